"""engine=cuda on an NVIDIA GPU: captured steps against the same steps launched kernel by kernel."""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
from multi_device import OPTIMISERS, make_infinite, read_batch
from tiny import batches, plan, write_base

from toyexp import Unavailable
from toyexp.interfaces.plan import apply_optimiser
from toyexp_models.llama import Llama
from toyexp_recipes.lora import Lora
from toyexp_torch import loss, resident
from toyexp_torch.engines import TorchCUDA

pytestmark = pytest.mark.device("cuda")

try:
    TorchCUDA().check()
except Unavailable as reason:
    pytest.skip(str(reason), allow_module_level=True)

torch = pytest.importorskip("torch")
head = pytest.importorskip("toyexp_torch.kernels.head", exc_type=ImportError)
STEPS = 8


def train(the_plan, bad=None, **settings):
    """Return metrics of all steps, a held-out loss, the final state, and why steps were not captured.

    Only the step `bad` contains a token whose embedding is infinite.
    """
    data = batches(rows=the_plan.rows * the_plan.accumulate)
    engine = TorchCUDA(deterministic=True, **settings)
    with engine.realize(the_plan) as session:
        if bad is not None:
            make_infinite(session)
        session.build()
        metrics = []
        for step in range(STEPS):
            metrics.append(session.step(read_batch(data, step, bad), the_plan.numbers(step, 1e-2 / (1 + step))))
        loss = session.evaluate([data.batch(99)])
        return metrics, loss, session.snapshot(), session.describe()["captured"]


def assert_same_as_uncaptured(the_plan, **settings):
    captured, uncaptured = train(the_plan, **settings), train(the_plan, **settings, capture=False)
    assert (captured[3], uncaptured[3]) == (True, "engine.capture=false")
    np.testing.assert_array_equal(captured[0], uncaptured[0])
    np.testing.assert_equal(captured[1], uncaptured[1])
    for name, array in captured[2].items():
        np.testing.assert_array_equal(array, uncaptured[2][name], err_msg=name)
    return captured


@pytest.mark.parametrize("name", OPTIMISERS)
@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_captured_steps_of_every_optimiser_are_bit_identical(model, name):
    assert_same_as_uncaptured(apply_optimiser(plan(model), OPTIMISERS[name].with_mode("lora"), 1e-2))


@pytest.mark.parametrize("changes", [{"accumulate": 3}, {"grad_clip": 0.05}, {"skip_nonfinite": True}])
def test_captured_steps_with_settings_of_a_plan_are_bit_identical(changes):
    assert_same_as_uncaptured(apply_optimiser(plan("llama", **changes), OPTIMISERS["adamw"], 1e-2))


@pytest.mark.filterwarnings("ignore:TensorFloat32")  # advice from the compiler
@pytest.mark.parametrize("settings", [{"recompute": True}, {"compile": True}, {"dtype": "bfloat16"}, {"tf32": True}])
def test_captured_steps_with_settings_of_the_engine_are_bit_identical(settings):
    assert_same_as_uncaptured(apply_optimiser(plan("llama"), OPTIMISERS["adamw"], 1e-2), **settings)


@pytest.mark.filterwarnings("ignore:TensorFloat32", "ignore:The .grad attribute")  # raised by the compiler
@pytest.mark.parametrize("changes", [{}, {"accumulate": 2}, {"skip_nonfinite": True}])
@pytest.mark.parametrize("settings", [{}, {"recompute": True}, {"compile": True}, {"dtype": "bfloat16"}])
def test_positions_without_a_weight_are_left_out_of_a_large_loss(monkeypatch, changes, settings):
    """There is a graph for each number of positions that occurs; results agree with those of all positions."""
    the_plan = apply_optimiser(plan("llama", rows=8, **changes), OPTIMISERS["adamw"], 1e-3)
    expected = train(the_plan, **settings)
    counts, compute = [], head.ProjectedLoss.forward

    def forward(ctx, *arguments):
        counts.append(None if arguments[-1] is None else len(arguments[-1]))
        return compute(ctx, *arguments)

    monkeypatch.setattr(head.ProjectedLoss, "forward", staticmethod(forward))
    monkeypatch.setattr(loss, "LARGE", 0)
    monkeypatch.setattr(resident, "ROWS", 4)
    selected = assert_same_as_uncaptured(the_plan, **settings)
    assert set(counts) > {None} and 96 > max(filter(None, counts)) > 60, (
        "about four fifths of 96 positions have a weight"
    )
    if settings.get("dtype"):  # bfloat16 rounds the weights, on which the norms of so small a model depend
        np.testing.assert_allclose(selected[0][0], expected[0][0], rtol=2e-2)
        np.testing.assert_allclose([m.loss for m in selected[0]], [m.loss for m in expected[0]], rtol=2e-2)
    else:
        np.testing.assert_allclose(selected[0], expected[0], rtol=1e-4)


@pytest.mark.parametrize("packed", [False, True])
def test_captured_steps_with_dropout_on_adapters_are_bit_identical(tmp_path, packed):
    write_base(tmp_path / "base.gguf", "llama", "q8_0")
    recipe = Lora(base=str(tmp_path / "base.gguf"), rank=2, dropout=0.5)
    assert_same_as_uncaptured(apply_optimiser(plan("llama", recipe=recipe), OPTIMISERS["adamw"], 1e-2), packed=packed)


@pytest.mark.parametrize("name", ["adamw", "sgd", "muon"])
def test_a_skipped_step_changes_nothing(name):
    the_plan = apply_optimiser(plan("llama", skip_nonfinite=True), OPTIMISERS[name].with_mode("lora"), 1e-2)
    metrics, _, arrays, _ = assert_same_as_uncaptured(the_plan, bad=5)
    assert [np.isfinite(step).all() for step in metrics] == [step != 5 for step in range(STEPS)]
    arrays["token_embd.weight"] = arrays["token_embd.weight"][:-1]
    assert all(np.isfinite(array).all() for array in arrays.values())


@dataclass
class Waits(Llama):
    """A llama that reads a value from the GPU during the forward pass: in training, or only in evaluation."""

    name: ClassVar[str] = "waits"
    in_a_step: bool = True

    def forward(self, ops, p, batch):
        if torch.is_grad_enabled() == self.in_a_step and float(batch["tokens"].sum()) < 0:
            raise ValueError("no token is below 0")
        return super().forward(ops, p, batch)


@pytest.mark.parametrize("in_a_step", [True, False])
def test_a_model_that_waits_for_the_gpu_is_not_captured_and_has_the_same_results(caplog, in_a_step):
    the_plan = apply_optimiser(plan("llama"), OPTIMISERS["adamw"], 1e-2)
    waiting_plan = replace(the_plan, model=Waits(**vars(the_plan.model), in_a_step=in_a_step))
    expected = train(the_plan)
    with caplog.at_level("INFO", "toyexp"):
        results = train(waiting_plan)
    np.testing.assert_array_equal(results[0], expected[0])
    assert results[1] == expected[1]
    assert (results[3] is True) == (not in_a_step), "describe() has no reason why steps are not captured"
    subject = "a step" if in_a_step else "a held-out loss"
    assert any(line.startswith(f"{subject} is launched kernel by kernel: ") for line in caplog.messages)
    with TorchCUDA().realize(waiting_plan) as session:
        session.build()
        assert len(list(session.notes())) == in_a_step


def test_evaluations_of_a_model_that_can_be_captured_are_captured(caplog):
    with caplog.at_level("INFO", "toyexp"):
        train(apply_optimiser(plan("gpt2"), OPTIMISERS["adamw"], 1e-2))
    assert not [line for line in caplog.messages if "kernel by kernel" in line]


def test_a_clipped_step_agrees_with_pytorch():
    the_plan = apply_optimiser(plan("llama", grad_clip=0.05), OPTIMISERS["adamw"], 1e-2)
    with TorchCUDA().realize(the_plan) as session:
        session.build()
        batch = batches(rows=3).batch(0)
        leaves = {n: torch.from_numpy(session.download(n)).requires_grad_() for n in session.gradients(batch)}
        for name, gradient in session.gradients(batch).items():
            leaves[name].grad = torch.from_numpy(gradient)
        torch.nn.utils.clip_grad_norm_(leaves.values(), 0.05)
        decays = [leaves[t.name] for t in the_plan.trainable if t.has_weight_decay]
        rest = [leaves[t.name] for t in the_plan.trainable if not t.has_weight_decay]
        groups = [{"params": decays, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.999)).step()
        session.step(batch, the_plan.numbers(0, 1e-2))
        for name, leaf in leaves.items():
            np.testing.assert_allclose(session.download(name), leaf.detach().numpy(), rtol=1e-5, atol=1e-6)


def test_any_number_of_an_optimiser_can_change_from_step_to_step():
    the_plan = apply_optimiser(plan("llama"), OPTIMISERS["adamw"], 1e-2)
    data = batches(rows=3)
    curves = []
    for capture in (True, False):
        with TorchCUDA(deterministic=True, capture=capture).realize(the_plan) as session:
            session.build()
            factors = ({"beta1": 1 - step / 100} for step in range(STEPS))
            numbers = (the_plan.numbers(step, 1e-2, step_factors) for step, step_factors in enumerate(factors))
            curves.append([session.step(data.batch(step), vector) for step, vector in enumerate(numbers)])
            assert session.describe()["captured"] is True or not capture
    assert curves[0] == curves[1]
