"""engine=cpu: only logits of targets with a weight are computed, and results do not change."""

from functools import partial

import numpy as np
import pytest
import torch
from tiny import batches, plan, write_base

from toyexp import AdamW, AdaptedWeight, LowRank, Setup
from toyexp_recipes.lora import Lora
from toyexp_torch import ops
from toyexp_torch.engines import TorchCPU
from toyexp_torch.loss import DeferredLogits, LossOps
from toyexp_torch.ops import TorchOps

ROWS = 4


def few(step=0):
    """Return a batch in which every fifth target has a weight, but none in the last two rows."""
    batch = batches(rows=ROWS).batch(step)
    weights = batch["weights"] * (np.arange(batch["weights"].size).reshape(batch["weights"].shape) % 5 == 0)
    weights[2:] = 0
    return {**batch, "weights": weights}


def answers(engine, the_plan, whole=False):
    """Return loss, gradients, two steps and a held-out loss; with `whole`, logits of all positions are computed."""
    with engine.realize(the_plan) as session:
        if whole:
            session._loss_ops = session._ops
        session.build()
        gradients = session.gradients(few())
        steps = [session.step(few(k), AdamW.for_lora().hp_for_step(k)) for k in range(2)]
        return gradients, steps, session.evaluate([few(9), few(10)])


def assert_as_of_all(the_plan, monkeypatch, computed, **settings):
    """Compare with all logits; `computed` is the expected number of positions with logits."""
    wanted = answers(TorchCPU(threads=1, **settings), the_plan, whole=True)
    counts = []
    plain = torch.nn.functional.cross_entropy

    def count_positions(logits, *arguments, **options):
        counts.append(len(logits))
        return plain(logits, *arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(ops.F, "cross_entropy", count_positions)
        found = answers(TorchCPU(threads=1, **settings), the_plan)
    assert set(counts) == computed
    for name, gradient in wanted[0].items():
        scale = max(np.abs(gradient).max(), 1e-6)
        np.testing.assert_allclose(found[0][name], gradient, atol=1e-5 * scale, err_msg=name)
    np.testing.assert_allclose(found[1], wanted[1], rtol=1e-5)
    np.testing.assert_allclose(found[2], wanted[2], rtol=1e-6)


@pytest.mark.parametrize("name", ["llama", "llama_tied_bias", "gemma", "gpt2"])
def test_only_positions_that_weigh_have_logits(name, monkeypatch):
    assert_as_of_all(plan(name, rows=ROWS), monkeypatch, computed={5})


def test_so_in_micro_batches_of_which_one_weighs_nothing(monkeypatch):
    assert_as_of_all(plan("llama", rows=2, accumulate=2), monkeypatch, computed={5, 0})


@pytest.mark.parametrize("packed", [False, True])
def test_so_on_a_frozen_base_whose_embedding_is_the_last_product(tmp_path, monkeypatch, packed):
    model = write_base(tmp_path / "base.gguf", "llama_tied_bias", "q8_0")
    recipe = Lora(base=str(tmp_path / "base.gguf"), rank=2, dropout=0.5)
    the_plan = recipe.plan(model, Setup(batches(rows=ROWS).inputs, rows=ROWS))
    assert_as_of_all(the_plan, monkeypatch, computed={5}, packed=packed)


@pytest.mark.parametrize("masked", [False, True])
def test_an_adapter_of_the_last_product_has_its_part(masked):
    """Its dropout mask covers all positions, so all logits are computed."""
    x, w, a, b = (torch.randn(shape) for shape in ((2, 3, 5), (7, 5), (2, 5), (7, 2)))
    adapted = AdaptedWeight(w, low_rank=LowRank(a, b, 0.5, torch.randn(2, 3, 5) if masked else None))
    targets, weights = torch.tensor([[1, 6, 0], [2, 3, 4]]), torch.tensor([[0.5, 0, 0.25], [0, 0, 0]])
    found, wanted = (
        made.cross_entropy(made.logits(x, adapted), targets, weights) for made in (LossOps(TorchOps()), TorchOps())
    )
    torch.testing.assert_close(found, wanted)


def test_where_all_weigh_the_bits_are_those_of_all_logits():
    the_plan, batch = plan("llama", rows=ROWS), batches(rows=ROWS).batch(0)
    found = []
    for whole in (True, False):
        with TorchCPU(threads=1).realize(the_plan) as session:
            session._loss_ops = session._ops if whole else session._loss_ops
            session.build()
            found.append(session.gradients(batch))
    for name, gradient in found[0].items():
        np.testing.assert_array_equal(found[1][name], gradient, err_msg=name)


def test_a_compiled_step_computes_all(monkeypatch):
    """A number of positions that changes would recompile the step each time."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager", fullgraph=True))
    found, wanted = (answers(TorchCPU(threads=1, compile=c), plan("llama", rows=ROWS)) for c in (True, False))
    np.testing.assert_allclose(found[1], wanted[1], rtol=1e-5)


GOES_ON = {
    "scale": lambda ops, x: ops.scale(x, 3.0),
    "add": lambda ops, x: ops.add(x, torch.ones(7)),
    "added": lambda ops, x: ops.add(torch.ones(2, 3, 7), x),
    "mul": lambda ops, x: ops.mul(x, x),
    "centre": lambda ops, x: ops.centre(x),
    "sigmoid": lambda ops, x: ops.sigmoid(x),
    "reshape": lambda ops, x: ops.reshape(x, (6, 7)),
    "part": lambda ops, x: ops.part(x, 2, 1, 4),
    "concat": lambda ops, x: ops.concat([x, torch.zeros(2, 3, 1)], 2),
    "rms_norm": lambda ops, x: ops.rms_norm(x, torch.ones(7), 1e-5),
    "gelu": lambda ops, x: ops.gelu(x),
    "matmul": lambda ops, x: ops.matmul(x, torch.ones(2, 7)),
}


@pytest.mark.parametrize("op", GOES_ON)
def test_a_model_that_goes_on_with_its_logits_has_them_as_they_are(op):
    x, w = torch.randn(2, 3, 5), torch.randn(7, 5)
    made = LossOps(TorchOps())
    logits = made.logits(x, w)
    assert isinstance(logits, DeferredLogits)
    assert torch.equal(GOES_ON[op](made, logits), GOES_ON[op](TorchOps(), x @ w.T))
