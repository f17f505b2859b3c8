"""Rows of examples that are kept apart: loss and gradients equal those of the examples in rows of their own."""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
import tiny
from stacks import ADAMW, EXACT, Job, build_stack, take_all, train_alone
from tiny import CONTEXT, MODELS, VOCAB, replace_initial_values

from toyexp import Normal, Setup, TensorSpec, UserError, apart_inputs
from toyexp.interfaces.plan import apply_optimiser
from toyexp.reference.engine import TOLERANCES, precision, reference_loss
from toyexp.reference.forward import check_forward
from toyexp.testing import token_dataset
from toyexp_data.chat import Example
from toyexp_data.example_rows import Examples
from toyexp_ggml.engines import GGMLCPU
from toyexp_models.llama import Llama
from toyexp_recipes.scratch import Scratch
from toyexp_torch.engines import TorchCPU

# Lengths of the examples of each row: two pairs, a full row, one that is much shorter than a row
ROWS = ((5, 8), (3, 4, 6), (13,), (2,))


def examples():
    draw = np.random.default_rng(4)
    parts = [draw.integers(0, VOCAB, n).astype(np.int32) for row in ROWS for n in row]
    return Examples([Example(ids, draw.random(len(ids)) < 0.8 * (np.arange(len(ids)) > 0), 0) for ids in parts], eos=1)


def packed():
    numbers, part = iter(range(99)), examples()
    return part.fill([[next(numbers) for _ in row] for row in ROWS], CONTEXT, apart=True)


def separate():
    part = examples()
    return part.fill([[i] for i in range(len(part.lengths))], CONTEXT)


def plan_for(batch, name, **changes):
    """Return a plan with weights of which attention and positions matter."""
    model = MODELS[name].fit(token_dataset(VOCAB))
    inputs = model.reads.inputs(CONTEXT) | (apart_inputs(CONTEXT) if "starts" in batch else {})
    rows = len(batch["tokens"]) // changes.get("accumulate", 1)
    the_plan = Scratch().plan(model, Setup(inputs, **{"rows": rows, "seed": 1} | changes))
    draw = np.random.default_rng(3)
    values = {t.name: the_plan.initial_values(t) + draw.normal(0, 0.2, t.shape) for t in the_plan.tensors}
    return replace_initial_values(the_plan, {name: value.astype(np.float32) for name, value in values.items()})


def results(engine, batch, name, **changes):
    with engine.realize(plan_for(batch, name, **changes)) as session:
        session.build()
        return session.evaluate([batch]), session.gradients(batch)


def differences(ours, theirs):
    """Return the relative differences of the losses, and of the gradients as the largest of all tensors."""
    (loss, gradients), (expected, others) = ours, theirs
    assert gradients.keys() == others.keys()
    errors = [np.linalg.norm(gradients[name] - g) / np.linalg.norm(g) for name, g in others.items()]
    return abs(loss / expected - 1), max(errors)


def joined():
    """Return the rows of `packed` as one example each."""
    batch = packed()
    positions = np.zeros_like(batch["starts"]) + np.arange(CONTEXT, dtype=np.int32)
    return {**batch, "starts": np.zeros_like(batch["starts"]), "positions": positions}


def float64_loss(batch, name):
    the_plan = plan_for(batch, name)
    values = {t.name: the_plan.initial_values(t).astype(np.float64) for t in the_plan.tensors}
    return reference_loss(the_plan, values, batch, held_out=True)


@pytest.mark.parametrize("name", [name for name in MODELS if not name.startswith("mamba2")])
def test_float64_losses_equal_those_of_separate_rows(name):
    expected = float64_loss(separate(), name)
    assert abs(float64_loss(packed(), name) / expected - 1) < 1e-12
    assert abs(float64_loss(joined(), name) / expected - 1) > 1e-3, "examples that see each other have another loss"


FAMILIES = ("llama", "gpt2", "gemma3", "lab", "lab_after", "lfm2", "olmoe")
ENGINES = {
    "float64": TorchCPU(threads=1, dtype="float64"),
    "float64_recomputed": TorchCPU(threads=1, dtype="float64", recompute=True),
    "torch": TorchCPU(threads=1),
    "ggml": GGMLCPU(threads=1),
    "ggml_recomputed": GGMLCPU(threads=1, recompute=True),
}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("engine", ENGINES)
def test_gradients_equal_those_of_separate_rows(name, engine):
    limits = TOLERANCES[precision(ENGINES[engine])]
    loss, gradient = differences(*(results(ENGINES[engine], batch, name) for batch in (packed(), separate())))
    if engine.startswith("float64"):
        assert loss < 1e-12 and gradient < 1e-12
    assert loss < limits.loss / 100 and gradient < limits.gradient / 10


def test_a_compiled_step_gives_the_same_gradients():
    compiled = TorchCPU(threads=1, dtype="float64", compile=True)
    loss, gradient = differences(results(compiled, packed(), "gpt2"), results(ENGINES["float64"], separate(), "gpt2"))
    assert loss < 1e-12 and gradient < 1e-6  # gradients are compared in float32


@pytest.mark.parametrize("engine", [TorchCPU(threads=1), GGMLCPU(threads=1)])
def test_micro_batches_give_the_gradients_of_their_batch(engine):
    loss, gradient = differences(*(results(engine, packed(), "gemma3", rows=4 // n, accumulate=n) for n in (2, 1)))
    assert loss < 1e-6 and gradient < 1e-5


class PackedJob(Job):
    """A run of a stack on packed rows."""

    def batch(self, step):
        return {**packed(), "weights": packed()["weights"] * (1 + self.data + step)}


@pytest.mark.parametrize("name", ["gpt2", "gemma3", "lab", "lfm2"])
def test_a_stacked_run_on_packed_rows_equals_the_run_on_its_own(name):
    jobs = [
        PackedJob(apply_optimiser(replace(plan_for(packed(), name), seed=i), optimiser, lr), lr, i)
        for i, (optimiser, lr) in enumerate(ADAMW)
    ]
    stack, sessions = build_stack(jobs, EXACT)
    losses = np.array([take_all(stack, jobs, step) for step in range(3)]).transpose(1, 0, 2)
    for job, ours in zip(jobs, losses, strict=True):
        np.testing.assert_allclose(ours, train_alone(job, 3, EXACT)[0], rtol=1e-11)
    for session in sessions:
        session.close()


@pytest.mark.parametrize("name", ["llama", "gpt2", "lfm2"])
@pytest.mark.parametrize("engine", [TorchCPU(threads=1), GGMLCPU(threads=1)])
def test_a_session_writes_text_as_one_that_was_trained_on_separate_rows(name, engine):
    ids = packed()["tokens"][2:3, :9]
    with engine.realize(plan_for(packed(), name)) as session, engine.realize(plan_for(separate(), name)) as other:
        session.build()
        other.build()
        expected = other.logits({"tokens": ids})
        np.testing.assert_allclose(session.logits({"tokens": ids}), expected, atol=2e-6)
        np.testing.assert_allclose(session.decoder().feed(ids[0]), expected[0, -1], atol=1e-5)
        rows = session.logits(packed())
        np.testing.assert_allclose(rows[0, 5:], session.logits({"tokens": packed()["tokens"][:1, 5:]})[0], atol=1e-5)


@dataclass
class Biased(Llama):
    """A llama with a bias by distance in place of rope."""

    name: ClassVar[str] = "biased"

    def tensors(self):
        return [*super().tensors(), TensorSpec("distances.weight", (self.n_heads, self.context), Normal(0.5))]

    def attend(self, ops, q, k, v, *layer):
        return ops.attention(q, k, v, bias=ops.distance_bias(self.table, q.shape[1]), softcap=3.0)

    def forward(self, ops, p, batch):
        self.table = p["distances.weight"]
        return super().forward(ops, p, batch)


@pytest.mark.parametrize("engine", ["float64", "torch", "ggml"])
def test_a_bias_by_distance_is_added_to_that_of_the_examples(monkeypatch, engine):
    monkeypatch.setitem(MODELS, "biased", Biased(**tiny.SIZES))
    assert abs(float64_loss(packed(), "biased") / float64_loss(separate(), "biased") - 1) < 1e-12
    loss, gradient = differences(*(results(ENGINES[engine], batch, "biased") for batch in (packed(), separate())))
    assert loss < 1e-6 and gradient < 1e-5


def attend(ops, x):
    return ops.attention(*[ops.heads(x, 4)] * 3, causal=False)


def remember(ops, x):
    q = ops.heads(x, 4)
    return ops.linear_attention(q, q, q, ops.scale(ops.sum(q, 3), 0.0))


@pytest.mark.parametrize(
    ("mix", "problem"),
    [
        (attend, r"data\.pack=apart: ops\.attention\(causal=False\) cannot keep the examples of a row apart"),
        (remember, r"data.pack=apart: ops.linear_attention cannot keep the examples of a row apart"),
        (None, r"data.pack=apart: model=other does not keep the examples of a row apart .*; type data.pack=none or"),
    ],
)
def test_a_model_that_cannot_keep_examples_apart_is_refused(mix, problem):
    class Other(Llama):
        name = "other"

        def forward(self, ops, p, batch):
            if mix is None:
                batch = {"tokens": batch["tokens"]}
            return super().forward(ops, p, batch)

        def mix(self, ops, h, p, *layer):
            return super().mix(ops, h, p) if mix is None else mix(ops, h)

    model = Other(**tiny.SIZES, vocab=VOCAB)
    inputs = model.reads.inputs(CONTEXT)
    check_forward(Scratch().plan(model, Setup(inputs, rows=2)), "recipe.scratch")
    with pytest.raises(UserError, match=problem):
        check_forward(Scratch().plan(model, Setup(inputs | apart_inputs(CONTEXT), rows=2)), "recipe.scratch")


def test_a_model_with_a_state_is_refused():
    inputs = MODELS["mamba2"].reads.inputs(CONTEXT) | apart_inputs(CONTEXT)
    the_plan = Scratch().plan(MODELS["mamba2"].fit(token_dataset(VOCAB)), Setup(inputs, rows=2))
    with pytest.raises(UserError, match=r"data\.pack=apart: model=mamba2 does not keep the examples of a row apart"):
        check_forward(the_plan, "recipe.scratch")
