"""Every objective on several engines and families, against formulas in torch's float64, and the table of figures."""

import dataclasses
from pathlib import Path

import numpy as np
import torch
from float64_models import FORWARD
from tiny import MODELS, VOCAB, add_weights, batches, replace_initial_values, write_base
from torch.nn import functional as F

from toyexp import AdamW, CrossEntropy, InputSpec, Setup
from toyexp.testing import token_dataset
from toyexp_ggml.engines import GGMLCPU, GGMLMetal
from toyexp_models.mlp import MLP
from toyexp_objectives.distil import Distil
from toyexp_objectives.preference import Preference
from toyexp_objectives.vectors import MSE, Contrastive
from toyexp_recipes.scratch import Scratch
from toyexp_torch.engines import TorchCPU

PAGE = Path(__file__).parents[2] / "docs" / "pages" / "reference" / "measured.md"
BEGIN, END = "<!-- begin of the objectives by `make objectives` -->\n", "<!-- end of the objectives -->\n"
ENGINES = {"cpu": TorchCPU(threads=1), "ggml": GGMLCPU(threads=1), "metal, emulated": GGMLMetal(emulate=True)}
FAMILIES = ("llama", "gpt2", "gemma3", "qwen3moe")
KINDS = ("dpo", "ipo", "hinge", "kto", "orpo", "simpo")
OBJECTIVES = {
    "cross_entropy": CrossEntropy(),
    "cross_entropy, smoothing and z_loss": CrossEntropy(0.1, 1e-3),
    **{f"distil, {kind}": Distil("teacher", kind, 2.0, 0.3, 0.4) for kind in ("forward", "reverse", "jsd")},
    **{f"preference, {kind}": Preference(kind, 2.0 if kind == "simpo" else 0.1) for kind in KINDS},
}
VECTOR_OBJECTIVES = {"mse": MSE(), "contrastive": Contrastive()}
CELLS = [(o, e, f) for o in OBJECTIVES for e in ENGINES for f in FAMILIES]
CELLS += [(o, e, "mlp") for o in VECTOR_OBJECTIVES for e in ENGINES]
# Loss of the first step, at which model and reference are the same.
FIRST = {"dpo": np.log(2), "ipo": (1 / (2 * 0.1)) ** 2, "hinge": 1.0, "kto": 0.5}
ROWS, CONTEXT = 4, batches().inputs["tokens"].shape[0]


@dataclasses.dataclass
class Case:
    """One objective and family: a plan, a batch, and a function that returns the loss in torch's float64."""

    plan: object
    batch: dict
    loss: object  # of {name: float64 tensor} and the batch as torch tensors


def make_case(title, family, directory):
    """Return the case of an objective and family; the teacher of `distil` is a file in `directory`."""
    if family == "mlp":
        return vector_case(VECTOR_OBJECTIVES[title])
    objective, inputs = OBJECTIVES[title], dict(batches(ROWS).inputs)
    batch = add_weights(batches(ROWS).batch(0))
    draw = np.random.default_rng(1)
    if isinstance(objective, Distil):
        objective = dataclasses.replace(objective, teacher=str(directory / "teacher.gguf"))
        objective.second_model = write_base(directory / "teacher.gguf", "qwen2", tokenizer=None)
    if isinstance(objective, Preference):
        inputs |= {"mask": inputs["weights"], "weights": InputSpec((), "float32")}
        mask = (draw.random((ROWS, CONTEXT)) < 0.6).astype(np.float32)
        mask[:, -1] = 1
        batch = {**batch, "mask": mask, "weights": np.array([1, 1, 2, 2], np.float32)}
        inputs |= objective.precomputed(inputs)
    model = MODELS[family].fit(token_dataset(VOCAB))
    plan = Scratch().plan(model, Setup(inputs, rows=ROWS, objective=objective))
    tables = [t for t in plan.tensors if t.name.endswith("embd.weight") or t.name == "output.weight"]
    plan = replace_initial_values(plan, {t.name: 15 * plan.initial_values(t) for t in tables})  # logits of about 1
    plan = plan.with_frozen(objective.tensors(plan))

    if "reference" in inputs:
        batch["reference"] = (own_log_probs(plan, batch) + draw.normal(0, 3, ROWS)).astype(np.float32)

    def loss(w, arrays):
        logits = FORWARD[model.name](w, model, arrays["tokens"])
        if isinstance(objective, Preference):
            return preference_loss(objective, completion_log_probs(logits, arrays), arrays)
        by_target = F.cross_entropy(logits.flatten(0, 1), arrays["targets"].flatten(), reduction="none",
                                    label_smoothing=getattr(objective, "smoothing", 0.0))  # fmt: skip
        by_target = by_target.view_as(arrays["weights"])
        if isinstance(objective, CrossEntropy):
            by_target = by_target + objective.z_loss * logits.logsumexp(-1) ** 2
        else:
            teacher = {name.removeprefix("teacher."): x for name, x in w.items() if name.startswith("teacher.")}
            soft = FORWARD["qwen2"](teacher, objective.second_model, arrays["tokens"])
            by_target = objective.hard * by_target + (1 - objective.hard) * 4 * divergence(objective.kind, soft, logits)
        return (by_target * arrays["weights"]).sum() / arrays["weights"].sum()

    return Case(plan, batch, loss)


def vector_case(objective):
    """Return the case of an objective for vectors, with an mlp."""
    inputs = {name: InputSpec((6,), "float32") for name in ("vectors", "targets")}
    inputs["weights"] = InputSpec((), "float32")
    draw, model = np.random.default_rng(0), MLP(6, 16, 6, n_layers=3, activation="tanh")
    batch = {name: draw.normal(size=(ROWS, *spec.shape)).astype(np.float32) for name, spec in inputs.items()}
    batch["weights"] = np.array([1, 0, 2, 0.5], np.float32)

    def forward(w, x):
        for i in range(3):
            x = F.linear(x, w[f"layer.{i}.weight"], w[f"layer.{i}.bias"])
            x = x.tanh() if i < 2 else x
        return x

    def loss(w, arrays):
        x = forward(w, arrays["vectors"])
        if isinstance(objective, MSE):
            by_row = F.mse_loss(x, arrays["targets"], reduction="none").mean(1)
        else:
            scores = F.normalize(x) @ F.normalize(forward(w, arrays["targets"])).T / objective.temperature
            own = torch.arange(ROWS)
            by_row = sum(F.cross_entropy(x, own, reduction="none") for x in (scores, scores.T)) / 2
        return (by_row * arrays["weights"]).sum() / arrays["weights"].sum()

    return Case(Scratch().plan(model, Setup(inputs, rows=ROWS, objective=objective)), batch, loss)


def divergence(kind, teacher, student, temperature=2.0, beta=0.4):
    """Return the divergence of each position, as in Hinton et al. 2015 and Agarwal et al. 2023."""
    log_p, log_q = (x.div(temperature).log_softmax(-1) for x in (teacher, student))
    kl = torch.nn.KLDivLoss(reduction="none", log_target=True)
    log_m = torch.log(beta * log_p.exp() + (1 - beta) * log_q.exp())
    return {"forward": lambda: kl(log_q, log_p), "reverse": lambda: kl(log_p, log_q),
            "jsd": lambda: beta * kl(log_m, log_p) + (1 - beta) * kl(log_m, log_q)}[kind]().sum(-1)  # fmt: skip


def completion_log_probs(logits, arrays):
    """Return the log-probability of each row's completion."""
    by_token = logits.log_softmax(-1).gather(-1, arrays["targets"][..., None])[..., 0]
    return (by_token * arrays["mask"]).sum(1)


def preference_loss(objective, log_probs, arrays):
    """Return the mean over pairs, weighted by the sums of their rows' weights, of the loss of the papers."""
    beta, length = objective.beta, arrays["mask"].sum(1)
    ratio = log_probs - arrays.get("reference", 0)
    (c, r), (cn, rn), (u, v) = (x.view(-1, 2).T for x in (ratio, ratio / length, log_probs / length))
    weights = arrays["weights"].view(-1, 2).sum(1)

    def orpo():
        log_odds = (u - v) - (torch.log1p(-u.exp()) - torch.log1p(-v.exp()))
        return -u - beta * F.logsigmoid(log_odds)

    by_pair = {
        "dpo": lambda: -F.logsigmoid(beta * (c - r)),
        "ipo": lambda: (cn - rn - 1 / (2 * beta)) ** 2,
        "hinge": lambda: torch.relu(1 - beta * (c - r)),
        "kto": lambda: (1 - torch.sigmoid(beta * c) + 1 - torch.sigmoid(-beta * r)) / 2,
        "orpo": orpo,
        "simpo": lambda: -F.logsigmoid(beta * (u - v) - objective.gamma),
    }[objective.kind]()
    return (by_pair * weights).sum() / weights.sum()


def own_log_probs(plan, batch):
    """Return the log-probability that the plan's model gives to each row's completion, in float64."""
    values, arrays = in_float64(plan, batch)
    return completion_log_probs(FORWARD[plan.model.name](values, plan.model, arrays["tokens"]), arrays).detach().numpy()


def in_float64(plan, batch):
    """Return the plan's tensors and the batch as torch tensors, with gradients for the trained ones."""
    values = {t.name: torch.from_numpy(plan.initial_values(t)).double() for t in plan.tensors}
    for t in plan.trainable:
        values[t.name].requires_grad_()
    arrays = {name: torch.from_numpy(array) for name, array in batch.items()}
    return values, {name: x.double() if x.is_floating_point() else x.long() for name, x in arrays.items()}


def measure(case, engine):
    """Return the error of the loss of a step, and that of the worst tensor's gradient.

    The former is relative to the loss, or to 1 if the loss is smaller, since a hinge near 0 is a difference of larger
    numbers. The latter is relative to the norm of the tensor's gradient, or to 1/1000 of the norm of all gradients.
    """
    values, arrays = in_float64(case.plan, case.batch)
    loss = case.loss(values, arrays)
    names = [t.name for t in case.plan.trainable]
    gradients = torch.autograd.grad(loss, [values[name] for name in names])
    expected = {name: gradient.numpy() for name, gradient in zip(names, gradients, strict=True)}
    least = 1e-3 * np.sqrt(sum((g**2).sum() for g in expected.values()))
    with engine.realize(case.plan) as session:
        session.build()
        actual = session.gradients(case.batch)
        step = session.step(case.batch, AdamW.for_lora().hp_for_step(0)).loss
    norm = np.linalg.norm
    worst = max(norm(actual[name] - g) / max(norm(g), least) for name, g in expected.items())
    return abs(step - loss.item()) / max(loss.item(), 1.0), float(worst)


def first_step(kind, engine):
    """Return the loss and the margin of a preference objective whose reference is the model itself."""
    case = make_case(f"preference, {kind}", "llama", None)
    batch = {**case.batch, "reference": own_log_probs(case.plan, case.batch).astype(np.float32)}
    with engine.realize(case.plan) as session:
        session.build()
        return session.evaluate([batch]), session.metrics([batch])["margin"]


def table(errors, firsts):
    """Return both tables in Markdown: `errors` by cell, and `firsts` (loss, margin) by (kind, engine)."""
    families = (*FAMILIES, "mlp")
    lines = [_line(["objective", "engine", *families]), _line(["---"] * 2 + ["--:"] * len(families))]
    for objective in (*OBJECTIVES, *VECTOR_OBJECTIVES):
        for engine in ENGINES:
            cells = [errors.get((objective, engine, family)) for family in families]
            texts = ["; ".join(_round(error) for error in cell) if cell else "" for cell in cells]
            lines.append(_line([objective, engine, *texts]))
    lines += ["\n", _line(["`objective.kind`", "loss of the first step", *ENGINES]), _line(["---", *["--:"] * 4])]
    for kind, expected in FIRST.items():
        texts = [f"{loss:.6f}; {_round(abs(margin))}" for loss, margin in (firsts[kind, engine] for engine in ENGINES)]
        lines.append(_line([kind, f"{expected:.6f}", *texts]))
    return "".join(lines)


def replace_table(page, new):
    """Return the page with its tables replaced."""
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + new + END + rest.partition(END)[2]


def _round(error):
    return f"{error:.0e}".replace("e-0", "e-").replace("0e+00", "0")


def _line(parts):
    return f"| {' | '.join(parts)} |\n"
