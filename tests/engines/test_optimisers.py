"""Every optimiser on every engine available: formula, state, groups, and resumed runs."""

import itertools
import json
from dataclasses import dataclass, replace

import float64_optimisers as float64
import numpy as np
import pytest
from tiny import add_weights, batches, plan

from toyexp import AdamW, Rule, SessionError, Unavailable, UserError
from toyexp.cli.main import main
from toyexp.formats.gguf.read import GGUFFile
from toyexp.interfaces.optimiser import Group
from toyexp.interfaces.plan import apply_optimiser
from toyexp.interfaces.snapshot import state_shapes
from toyexp.reference.engine import update_tensor
from toyexp.testing import OptimiserSuite
from toyexp_ggml.engines import GGMLCPU, GGMLCUDA, GGMLMetal, GGMLVulkan
from toyexp_optimisers.adamw import AdamWOptimiser
from toyexp_optimisers.muon import Adafactor, Muon
from toyexp_optimisers.sgd import SGD, Lion
from toyexp_torch.engines import TorchCPU, TorchCUDA

ENGINES = {"cpu": TorchCPU(threads=1), "ggml": GGMLCPU(threads=1), "metal": GGMLMetal(emulate=True)}
GPUS = {"cuda": TorchCUDA(), "ggml_cuda": GGMLCUDA(), "vulkan": GGMLVulkan()}
LR = 0.01

# name: (settings, function of a tensor's name, values and decay that returns its float64 reference)
OPTIMISERS = {
    "adamw_from_scratch": (AdamWOptimiser(mode="from_scratch"), lambda n, w, d: float64.ConstantBetas(w, d)),
    "adamw_lora": (AdamWOptimiser(mode="lora"), lambda n, w, d: float64.adamw(w, d)),
    "sgd": (SGD(momentum=0.0), lambda n, w, d: float64.sgd(w, d, momentum=0.0)),
    "sgd_momentum": (SGD(), lambda n, w, d: float64.sgd(w, d)),
    "sgd_nesterov": (SGD(nesterov=True), lambda n, w, d: float64.sgd(w, d, nesterov=True)),
    "lion": (Lion(), lambda n, w, d: float64.Lion(w, d)),
    "adafactor": (Adafactor(), lambda n, w, d: float64.adafactor(w, d)),
    "muon": (Muon(), float64.muon),
    "muon_original": (
        Muon(scale="original", nesterov=False),
        lambda n, w, d: float64.muon(n, w, d, scale="original", nesterov=False),
    ),
}


def build_session(engine, the_plan):
    session = {**ENGINES, **GPUS}[engine].realize(the_plan)
    session.build()
    return session


def assert_ten_steps(name, engine, rtol=1e-5):
    """Compare ten steps of a llama and a gpt2, whose norms and biases do not decay, with the engine's own gradients."""
    optimiser, make = OPTIMISERS[name]
    optimiser.weight_decay = 0.1
    for model in ("llama", "gpt2"):
        the_plan = apply_optimiser(plan(model), optimiser, LR)
        expected = {t.name: the_plan.initial_values(t) for t in the_plan.tensors}
        references = {n: make(n, w, 0.1 if w.ndim > 1 else 0.0) for n, w in expected.items()}
        with build_session(engine, the_plan) as session:
            for step in range(10):
                batch, lr = add_weights(batches().batch(step), step), LR / (1 + step)
                gradients = session.gradients(batch)
                session.step(batch, the_plan.numbers(step, lr))
                for tensor, g in gradients.items():
                    expected[tensor] = references[tensor].step(g.astype(np.float64), lr)
            for tensor, values in expected.items():
                # On Vulkan one of Lion's signs was wrong: its terms of 1e-6 differ by 7e-13 only.
                is_decided = ~getattr(references[tensor], "open", np.zeros(values.shape, bool))
                assert is_decided.mean() > 0.99
                ours = session.download(tensor)
                np.testing.assert_allclose(ours[is_decided], values[is_decided], rtol=rtol, atol=1e-5, err_msg=tensor)


@pytest.mark.parametrize("engine", ["cpu", "ggml", "metal"])
@pytest.mark.parametrize("name", OPTIMISERS)
def test_ten_steps_agree_with_float64(name, engine):
    assert_ten_steps(name, engine)


@pytest.mark.parametrize(
    "engine", [pytest.param(name, marks=pytest.mark.device(name)) for name in ("cuda", "ggml_cuda", "vulkan")]
)
def test_ten_steps_on_a_gpu_agree_with_float64(engine):
    try:
        GPUS[engine].check()
    except Unavailable as reason:
        pytest.skip(str(reason))
    for name in OPTIMISERS:
        assert_ten_steps(name, engine)


def assert_rule_agrees(rule, reference, w, lr):
    """Compare six steps in float64 along random gradients that grow (so that clipping matters), with a decay of 0.1."""
    group, draw = Group(rule, ("blk.0.w",), 0.1), np.random.default_rng(1)
    state = {slot: np.zeros(shape) for slot, shape in rule.slots(w.shape).items()}
    for step in range(6):
        g = 4.0**step * draw.standard_normal(w.shape)
        w, state = update_tensor(group, group.numbers(step, lr), w, g, state)
        np.testing.assert_allclose(w, reference.step(g, lr), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("shape", [(7,), (5, 3)])
@pytest.mark.parametrize("lr", [0.3, 3.0])
def test_adafactor_with_other_settings_agrees_with_pytorch(lr, shape):
    """A rate above 1 / sqrt(step) is clamped to it in the update, but not in the decay."""
    w = 0.1 * np.random.default_rng(0).standard_normal(shape)
    reference = float64.adafactor(w, 0.1, eps2=0.4, beta2_decay=-0.5, d=1.25)
    assert_rule_agrees(Adafactor(beta2_decay=-0.5, eps2=0.4, clip=1.25), reference, w, lr)


@pytest.mark.parametrize("shape", [(7, 3), (3, 7)])
def test_muon_with_other_settings_agrees_with_a_singular_value_decomposition(shape):
    w = np.random.default_rng(0).standard_normal(shape)
    reference = float64.Muon(w, 0.1, momentum=0.8, iterations=2)
    assert_rule_agrees(Muon(momentum=0.8, iterations=2), reference, w, 0.3)


def test_tensors_that_muon_leaves_to_adamw_use_adamws_betas():
    w = np.random.default_rng(0).standard_normal(7)
    rest = Muon(adamw_beta1=0.7, adamw_beta2=0.6).rules()[1]
    assert_rule_agrees(rest, float64.adamw(w, 0.1, betas=(0.7, 0.6)), w, 0.3)


SCALED = {
    "sgd": (SGD(), ["momentum"]),
    "sgd_nesterov": (SGD(nesterov=True), ["momentum"]),
    "lion": (Lion(), ["beta1", "beta2"]),
    "adafactor": (Adafactor(), ["beta2_decay"]),
    "muon": (Muon(), ["momentum"]),
    "adamw": (AdamWOptimiser(mode="from_scratch", beta2=0.9, eps=1e-4), ["beta1", "beta2", "eps"]),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", SCALED)
def test_halving_a_number_at_a_step_equals_halving_its_setting(name, engine):
    """A scheduled number must reach every place of the formula, also in a graph that is built once."""
    optimiser, numbers = SCALED[name]
    halved = replace(optimiser, **{n: getattr(optimiser, n) / 2 for n in numbers})
    weights = []
    for settings, factors in ((optimiser, dict.fromkeys(numbers, 0.5)), (halved, {}), (optimiser, {})):
        the_plan = apply_optimiser(plan("llama"), settings, LR)
        with build_session(engine, the_plan) as session:
            for step in range(3):
                session.step(batches().batch(step), the_plan.numbers(step, LR, factors))
            weights.append({t.name: session.download(t.name) for t in the_plan.trainable})
    scaled, expected, unscaled = weights
    assert all(np.array_equal(scaled[tensor], expected[tensor]) for tensor in expected)
    assert any(not np.array_equal(unscaled[tensor], expected[tensor]) for tensor in expected)


def optimiser_suites():
    """Run the suite for plugin authors, for each kind of optimiser on each engine."""
    kinds = {
        "adamw": AdamWOptimiser(),
        "sgd": SGD(nesterov=True),
        "lion": Lion(),
        "adafactor": Adafactor(),
        "muon": Muon(),
    }
    for (name, optimiser), (label, engine) in itertools.product(kinds.items(), ENGINES.items()):
        title = f"Test{name.title()}On{label.title()}"
        yield title, type(title, (OptimiserSuite,), {"optimiser": optimiser, "engine": engine, "__module__": __name__})


globals().update(optimiser_suites())


@pytest.mark.parametrize("engine", ENGINES)
def test_the_state_has_the_size_that_its_slots_declare(engine):
    """Adafactor needs almost none, plain SGD none; the memory check counts the same bytes."""
    numbers = {}
    for name in ("adamw_lora", "sgd", "sgd_momentum", "adafactor", "muon"):
        the_plan = apply_optimiser(plan("llama"), OPTIMISERS[name][0], LR)
        with build_session(engine, the_plan) as session:
            arrays = session.snapshot()
        assert {n: a.shape for n, a in arrays.items()} == state_shapes(the_plan)
        numbers[name] = sum(a.size for n, a in arrays.items() if "@" in n)
    weights = sum(t.size for t in plan("llama").trainable)
    assert numbers["adamw_lora"] == 2 * weights and numbers["sgd_momentum"] == weights and numbers["sgd"] == 0
    assert numbers["adafactor"] < weights / 4 and weights < numbers["muon"] < 2 * weights


# -- groups ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_groups_have_their_own_rates_and_decays(engine):
    """The first matching pattern applies; frozen tensors keep their values and have no state."""
    groups = {
        "blk.0.attn_q.weight": {"lr": 0.003, "weight_decay": 0.5},
        "blk.0.*": {"lr": 0.03, "frozen": False},
        "output.weight": {"frozen": True},
        "token_embd.weight": {"weight_decay": 0},
    }
    optimiser = AdamWOptimiser(mode="lora", weight_decay=0.1, groups=groups)
    optimiser.check()
    the_plan = apply_optimiser(plan("llama"), optimiser, LR)
    assert [t.name for t in the_plan.tensors if not t.trainable] == ["output.weight"]

    def rate_and_decay(name, w):
        if name == "blk.0.attn_q.weight":
            return 0.003, 0.5
        rate = 0.03 if name.startswith("blk.0.") else LR
        return rate, 0.0 if w.ndim == 1 or name == "token_embd.weight" else 0.1

    expected = {t.name: the_plan.initial_values(t) for t in the_plan.tensors}
    references = {n: float64.adamw(w, rate_and_decay(n, w)[1]) for n, w in expected.items()}
    with build_session(engine, the_plan) as session:
        for step in range(6):
            batch, scale = batches().batch(step), 1 / (1 + step)  # the schedule's scale, for all rates
            gradients = session.gradients(batch)
            session.step(batch, the_plan.numbers(step, LR * scale))
            for name, g in gradients.items():
                rate = rate_and_decay(name, expected[name])[0] * scale
                expected[name] = references[name].step(g.astype(np.float64), rate)
        assert "output.weight" not in gradients and "output.weight@m" not in session.snapshot()
        for name, values in expected.items():
            np.testing.assert_allclose(session.download(name), values, rtol=1e-5, atol=1e-5, err_msg=name)


def test_a_pattern_without_lr_keeps_the_rate_of_each_tensors_rule():
    """The settings as typed, which are recorded, do not change."""
    groups = {"blk.0.*": {"weight_decay": 0.5}, "blk.1.*": {"lr": 0.03}}
    the_plan = apply_optimiser(plan("llama"), Muon(adamw_lr=0.002, groups=groups), LR)
    rates = {name: group.lr_scale * LR for group in the_plan.updates for name in group.tensors}
    for name, rate in rates.items():
        rest = LR if name.startswith("blk.") and the_plan.tensor(name).has_weight_decay else 0.002
        assert rate == pytest.approx(0.03 if name.startswith("blk.1.") else rest, rel=1e-12), name
    assert groups == {"blk.0.*": {"weight_decay": 0.5}, "blk.1.*": {"lr": 0.03}}


@pytest.mark.parametrize(
    ("groups", "message_parts"),
    [
        ({"blk.9.*": {"lr": 1}}, ["blk.9.*", "no trainable tensor"]),
        ({"*": {"frozen": True}}, ["freezes every tensor"]),
    ],
)
def test_patterns_that_do_not_fit_the_tensors_are_rejected(groups, message_parts):
    with pytest.raises(UserError) as error:
        apply_optimiser(plan("llama"), SGD(groups=groups), LR)
    assert all(word in str(error.value) for word in message_parts)


@pytest.mark.parametrize(
    ("groups", "message_parts"),
    [
        ({"*": {"lrr": 1}}, ["lrr", "did you mean lr?"]),
        ({"*": {"lr": -1}}, ["lr=-1"]),
        ({"*": {"lr": True}}, ["lr=True"]),
        ({"*": {"frozen": "yes"}}, ["frozen=yes", "true or false"]),
        ({"*": 3}, ["*", "braces"]),
    ],
)
def test_malformed_groups_are_rejected_before_a_run(groups, message_parts):
    with pytest.raises(UserError) as error:
        SGD(groups=groups).check()
    assert all(word in str(error.value) for word in ["optim.groups", *message_parts])


def test_a_groups_rate_needs_a_nonzero_rate_of_the_run():
    with pytest.raises(UserError, match=r"^lr=0: .* has its own lr=0\.1.*type lr=0\.001"):
        apply_optimiser(plan("llama"), SGD(groups={"*": {"lr": 0.1}}), 0.0)


def test_a_pattern_of_tensors_that_the_recipe_freezes_is_rejected():
    llama = plan("llama")
    tensors = tuple(replace(t, trainable=t.name != "token_embd.weight") for t in llama.tensors)
    with pytest.raises(UserError, match=r"token_embd\.\*: the recipe freezes token_embd\.weight; remove"):
        apply_optimiser(replace(llama, tensors=tensors), SGD(groups={"token_embd.*": {"lr": 0.1}}), LR)


@pytest.mark.parametrize("engine", ENGINES)
def test_two_rules_with_equal_numbers_stay_separate(engine):
    """This holds even if their tensors are adjacent in an engine's memory."""
    llama = plan("llama")
    parts = [[t.name for t in llama.trainable if t.has_weight_decay is decays] for decays in (True, False)]
    rules = [SGD(nesterov=True), SGD()]
    the_plan = replace(llama, groups=tuple(Group(r, tuple(p)) for r, p in zip(rules, parts, strict=True)))
    expected = {t.name: the_plan.initial_values(t) for t in the_plan.tensors}
    references = {n: float64.sgd(w, 0.0, nesterov=w.ndim > 1) for n, w in expected.items()}
    with build_session(engine, the_plan) as session:
        for step in range(4):
            gradients = session.gradients(batches().batch(step))
            session.step(batches().batch(step), the_plan.numbers(step, 0.1))
            for name, g in gradients.items():
                expected[name] = references[name].step(g.astype(np.float64), 0.1)
        for name, values in expected.items():
            np.testing.assert_allclose(session.download(name), values, rtol=1e-5, atol=1e-5, err_msg=name)


class Chained(Rule):
    """Base of two rules in whose state `late` follows `seen` one step later."""

    elementwise = True

    def slots(self, shape):
        return {"seen": shape, "late": shape}

    def numbers(self, step, lr, weight_decay):
        return {"lr": lr}


@dataclass
class Delayed(Chained):
    """A rule whose new state depends on the old weights and the old state, which the step replaces."""

    def update(self, ops, w, g, state, n):
        new = {"seen": ops.add(w, g), "late": ops.scale(state["seen"], 0.5)}
        return ops.sub(w, ops.scale(state["late"], n["lr"])), new


@dataclass
class Remembers(Chained):
    """A rule that keeps the weights and its own state from before the step."""

    def update(self, ops, w, g, state, n):
        return ops.sub(w, ops.scale(g, n["lr"])), {"seen": w, "late": state["seen"]}


@pytest.mark.parametrize("engine", ["cpu", "ggml"])
def test_a_state_that_returns_an_input_holds_its_value_before_the_step(engine):
    the_plan = plan("llama")
    the_plan = replace(the_plan, groups=(Group(Remembers(), tuple(t.name for t in the_plan.trainable)),))
    weights = []
    with build_session(engine, the_plan) as session:
        for step in range(2):
            weights.append(session.download("output.weight"))
            session.step(batches().batch(step), the_plan.numbers(step, 0.1))
        after = session.snapshot()
    np.testing.assert_array_equal(after["output.weight@seen"], weights[1])
    np.testing.assert_array_equal(after["output.weight@late"], weights[0])


@pytest.mark.parametrize("engine", ENGINES)
def test_a_rule_reads_weights_and_state_from_before_the_step(engine):
    llama = plan("llama")
    the_plan = replace(llama, groups=(Group(Delayed(), tuple(t.name for t in llama.trainable)),))
    expected = {t.name: (the_plan.initial_values(t).astype(np.float64), 0.0, 0.0) for t in the_plan.tensors}
    with build_session(engine, the_plan) as session:
        for step in range(5):
            gradients = session.gradients(batches().batch(step))
            session.step(batches().batch(step), the_plan.numbers(step, 0.1))
            for name, g in gradients.items():
                w, seen, late = expected[name]
                expected[name] = w - 0.1 * late, w + g, 0.5 * seen
        for name, (values, _, _) in expected.items():
            np.testing.assert_allclose(session.download(name), values, rtol=1e-5, atol=1e-5, err_msg=name)


@dataclass
class Lopsided(Rule):
    """A rule that reads the gradient again after clamping it."""

    def slots(self, shape):
        return {}

    def numbers(self, step, lr, weight_decay):
        return {"lr": lr}

    def update(self, ops, w, g, state, n):
        return ops.sub(w, ops.scale(ops.add(ops.at_least(g, 0.0), g), n["lr"])), state


@pytest.mark.parametrize("engine", ENGINES)
def test_an_op_of_a_formula_does_not_change_its_inputs(engine):
    """ggml's own clamp works in place."""
    the_plan = plan("llama")
    the_plan = replace(the_plan, groups=(Group(Lopsided(), tuple(t.name for t in the_plan.trainable)),))
    with build_session(engine, the_plan) as session:
        gradients = session.gradients(batches().batch(0))
        session.step(batches().batch(0), the_plan.numbers(0, 0.1))
        for name, g in gradients.items():
            expected = the_plan.initial_values(the_plan.tensor(name)) - 0.1 * (np.maximum(g, 0) + g)
            np.testing.assert_allclose(session.download(name), expected, rtol=1e-5, atol=1e-6, err_msg=name)


# -- input of a session -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["cpu", "ggml"])
def test_a_snapshot_is_restored_whatever_the_memory_order_of_its_arrays(engine):
    the_plan = apply_optimiser(plan("llama"), AdamWOptimiser(mode="lora"), LR)
    with build_session(engine, the_plan) as session:
        session.step(batches().batch(0), the_plan.numbers(0, LR))
        expected = {name: array.copy() for name, array in session.snapshot().items()}
        session.step(batches().batch(1), the_plan.numbers(1, LR))
        session.restore({name: np.asfortranarray(array) for name, array in expected.items()})
        restored = session.snapshot()
    for name, array in expected.items():
        np.testing.assert_array_equal(restored[name], array, err_msg=name)


def test_a_session_rejects_numbers_that_do_not_fit_its_groups():
    the_plan = apply_optimiser(plan("llama"), SGD(), LR)
    batch = batches().batch(0)
    with build_session("cpu", the_plan) as session:
        with pytest.raises(SessionError, match="optimiser is not AdamW"):
            session.step(batch, AdamW.for_lora().hp_for_step(0))
        with pytest.raises(SessionError, match="numbers for 1 groups, expected 2"):
            session.step(batch, the_plan.numbers(0, LR)[:1])
        with pytest.raises(SessionError, match="not finite"):
            session.step(batch, [vector * np.nan for vector in the_plan.numbers(0, LR)])


# -- runs -----------------------------------------------------------------------------------------------------------

WORDS = [
    "data=random", "data.vocab=32", "model.d_model=16", "model.n_layers=1", "model.context=8", "model.d_ff=24",
    "batch_size=4", "eval_every=0", "engine.threads=1", "lr=0.01", "optim.weight_decay=0.1", "optim.grad_clip=1",
]  # fmt: skip


def read_weights(directory):
    with GGUFFile(directory / "model.gguf") as file:
        return {name: file.read(name) for name in file.tensors}


RESUME_CASES = [
    ("adamw", "cpu"),
    ("adafactor", "cpu"),
    ("muon", "cpu"),
    ("adamw", "ggml"),
    ("sgd", "ggml"),
    ("lion", "ggml"),
]


@pytest.mark.parametrize(("optim", "engine"), RESUME_CASES)
def test_a_resumed_run_has_the_weights_of_an_uninterrupted_run(tmp_path, monkeypatch, capsys, optim, engine):
    """Bit for bit, with any optimiser's state in the checkpoint."""
    monkeypatch.chdir(tmp_path)
    settings = [*WORDS, f"engine={engine}", f"optim={optim}", "callbacks=[constant,gguf_export]"]
    assert main([*settings, "steps=6", "hydra.run.dir=whole"]) == 0, capsys.readouterr().err
    assert main([*settings, "steps=3", "hydra.run.dir=parts"]) == 0
    assert main(["resume=parts", "steps=6"]) == 0, capsys.readouterr().err
    uninterrupted, resumed = read_weights(tmp_path / "whole"), read_weights(tmp_path / "parts")
    assert all(np.array_equal(uninterrupted[name], resumed[name]) for name in uninterrupted)


def test_optimisers_in_one_sweep_on_two_engines_agree(tmp_path, monkeypatch, capsys):
    """`-m optim=adamw,muon engine=cpu,ggml`; each run records its optimiser."""
    monkeypatch.chdir(tmp_path)
    words = [*WORDS, "steps=5", "sweep.isolate=false", "callbacks=[constant,events,gguf_export]"]
    assert main(["-m", *words, "optim=adamw,muon", "engine=cpu,ggml", "hydra.sweep.dir=s"]) == 0, (
        capsys.readouterr().err
    )
    weights = {}
    for events in (tmp_path / "s").glob("*/events.jsonl"):
        start = json.loads(events.read_text().splitlines()[0])
        weights[start["optim"]["name"], start["backend"]["kind"]] = read_weights(events.parent)
    assert weights.keys() == set(itertools.product(("adamw", "muon"), ("cpu", "ggml")))
    for optim in ("adamw", "muon"):
        for name, values in weights[optim, "cpu"].items():
            np.testing.assert_allclose(values, weights[optim, "ggml"][name], atol=1e-4, err_msg=name)
    differences = [
        np.abs(weights["adamw", "cpu"][n] - weights["muon", "cpu"][n]).max() for n in weights["adamw", "cpu"]
    ]
    assert max(differences) > 1e-3


def test_resuming_with_another_optimiser_is_rejected(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([*WORDS, "engine=ggml", "steps=2", "hydra.run.dir=run", "callbacks=[]"]) == 0
    assert main(["resume=run", "steps=4", "optim=sgd"]) == 2
    assert "optim" in capsys.readouterr().err


def test_a_schedule_can_scale_weight_decay(tmp_path, monkeypatch, capsys):
    """Weight decay falls while the rate is constant, so each step multiplies the weights by a different factor."""
    monkeypatch.chdir(tmp_path)
    words = [*WORDS[:-2], "engine=cpu", "optim=sgd", "optim.momentum=0", "steps=4"]
    falling = ["callbacks=[linear,gguf_export]", "callbacks.linear.scales=weight_decay", "optim.weight_decay=5"]
    constant = ["callbacks=[gguf_export]", "optim.weight_decay=5"]
    runs = {"falls": falling, "stays": constant, "none": ["callbacks=[gguf_export]"]}
    for name, settings in runs.items():
        assert main([*words, *settings, f"hydra.run.dir={name}"]) == 0, capsys.readouterr().err
    norms = {name: np.linalg.norm(read_weights(tmp_path / name)["output.weight"]) for name in runs}
    expected = {"falls": np.prod([1 - 0.05 * f for f in (1, 0.75, 0.5, 0.25)]), "stays": 0.95**4}
    for name, share in expected.items():
        assert norms[name] / norms["none"] == pytest.approx(share, rel=2e-3)


@pytest.mark.parametrize(
    ("words", "message_parts"),
    [
        (["callbacks.linear.scales=momentum"], ["momentum", "this optimiser has no setting of that name"]),
        (
            ["callbacks.linear.scales=beta2", "callbacks.linear.floor=0"],
            [
                "callbacks.linear.scales=beta2: invalid factor 0 (warmup=0, floor=0.0): ",
                "optim.beta2=0: mode from_scratch would multiply a moment by 0; set optim.mode=lora",
            ],
        ),
        (
            ["callbacks.linear.scales=eps"],
            ["callbacks.linear.scales=eps: invalid factor 0 (warmup", "optim.eps=0.0: must be above 0"],
        ),
        (["callbacks.linear.scales=lr"], ["cosine", "linear", "both set the learning rate"]),
    ],
)
def test_a_schedule_of_a_number_that_is_unknown_invalid_or_already_scheduled_is_rejected(
    tmp_path, monkeypatch, capsys, words, message_parts
):
    monkeypatch.chdir(tmp_path)
    assert main([*WORDS, "engine=ggml", "steps=2", "callbacks=[default,linear]", *words]) == 2
    error = capsys.readouterr().err
    assert all(word in error for word in message_parts) and not (tmp_path / "outputs").exists()


BROKEN = """
from dataclasses import dataclass
from typing import ClassVar
from toyexp import Optimiser, hookimpl

@dataclass
class Raises(Optimiser):
    "Raise, or return wrong values, at the point named by `at`."
    name: ClassVar[str] = "raises"
    at: str = ""  # the point of failure

    def slots(self, shape):
        if self.at == "slots":
            raise KeyError("boom")
        return [1] if self.at == "list" else {}

    def numbers(self, step, lr, weight_decay):
        if self.at == "nan":
            return {"lr": float("nan")}
        if self.at == "late" and step == 2:
            raise KeyError("boom")
        return {"lr": lr}

    def update(self, ops, w, g, state, n):
        return ops.sub(w, ops.scale(g, n["lr"])), state

@hookimpl
def register_optimisers(register):
    register(Raises)
"""


@pytest.mark.parametrize(
    ("at", "code", "message_parts"),
    [
        ("slots", 1, ["optim.raises failed", "KeyError: 'boom'"]),
        ("list", 2, ["optim.raises: ", "names to shapes"]),
        ("nan", 2, ["optim.raises: ", "expected finite numbers by name"]),
        ("late", 1, ["optim.raises failed at step 3", "KeyError: 'boom'"]),
    ],
)
def test_the_error_names_a_plugins_optimiser_that_fails(tmp_path, monkeypatch, capsys, at, code, message_parts):
    monkeypatch.chdir(tmp_path)
    (tmp_path / f"broken_{at}.py").write_text(BROKEN)
    words = [*WORDS, "engine=ggml", "steps=4", "callbacks=[]", f"plugins=[broken_{at}]", "optim=raises"]
    assert main([*words, f"optim.at={at}", "hydra.run.dir=run"]) == code
    error = capsys.readouterr().err
    assert all(word in error for word in message_parts) and "Traceback" not in error


def test_a_run_resumes_only_with_its_own_optimiser(tmp_path, monkeypatch, capsys):
    """This holds even if the other optimiser lacks the recorded settings."""
    monkeypatch.chdir(tmp_path)
    assert main([*WORDS, "engine=ggml", "steps=2", "hydra.run.dir=run", "callbacks=[]", "optim=muon"]) == 0
    assert main(["resume=run", "steps=4", "optim=adamw"]) == 2
    assert "leave optim=adamw out" in capsys.readouterr().err


def test_a_schedule_of_a_number_that_the_formula_does_not_read_is_rejected(tmp_path, monkeypatch, capsys):
    """A number that the formula does not read is rejected."""
    monkeypatch.chdir(tmp_path)
    for words in (
        ["optim=sgd", "callbacks.linear.scales=grad_clip"],
        ["optim=adafactor", "callbacks.linear.scales=clip"],
    ):
        assert main([*WORDS, "engine=ggml", "steps=2", "callbacks=[linear]", *words]) == 2
        assert "this optimiser has no setting of that name" in capsys.readouterr().err
