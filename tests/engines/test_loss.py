"""engine=cpu: only logits of targets with a weight are computed, and results do not change."""

from functools import partial

import numpy as np
import pytest
import torch
from tensor_memory import measure_peak_tensor_bytes
from tiny import batches, plan, write_base

from toyexp import AdamW, AdaptedWeight, InputSpec, LowRank, Ops, Setup
from toyexp_ggml.engines import GGMLCPU
from toyexp_ggml.ops import GGMLOps
from toyexp_models.llama import Llama
from toyexp_objectives.preference import Preference
from toyexp_recipes.lora import Lora
from toyexp_recipes.scratch import Scratch
from toyexp_torch import ops
from toyexp_torch.engines import TorchCPU
from toyexp_torch.loss import DeferredLogits, LossOps
from toyexp_torch.ops import TorchOps

ROWS = 4


def sparse_batch(step=0):
    """Return a batch in which every fifth target has a weight, but none in the last two rows."""
    batch = batches(rows=ROWS).batch(step)
    weights = batch["weights"] * (np.arange(batch["weights"].size).reshape(batch["weights"].shape) % 5 == 0)
    weights[2:] = 0
    return {**batch, "weights": weights}


def compute_results(engine, the_plan, full_logits=False):
    """Return loss, gradients, two steps and a held-out loss; with `whole`, logits of all positions are computed."""
    with engine.realize(the_plan) as session:
        if full_logits:
            session._loss_ops = session._ops
        session.build()
        gradients = session.gradients(sparse_batch())
        steps = [session.step(sparse_batch(k), AdamW.for_lora().hp_for_step(k)) for k in range(2)]
        return gradients, steps, session.evaluate([sparse_batch(9), sparse_batch(10)])


def assert_equals_full_logits(the_plan, monkeypatch, expected_counts, **settings):
    """Compare with all logits; `computed` is the expected number of positions with logits."""
    expected = compute_results(TorchCPU(threads=1, **settings), the_plan, full_logits=True)
    counts = []
    cross_entropy = torch.nn.functional.cross_entropy

    def count_positions(logits, *arguments, **options):
        counts.append(len(logits))
        return cross_entropy(logits, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(ops.F, "cross_entropy", count_positions)
        results = compute_results(TorchCPU(threads=1, **settings), the_plan)
    assert set(counts) == expected_counts
    for name, gradient in expected[0].items():
        scale = max(np.abs(gradient).max(), 1e-6)
        np.testing.assert_allclose(results[0][name], gradient, atol=1e-5 * scale, err_msg=name)
    np.testing.assert_allclose(results[1], expected[1], rtol=1e-5)
    np.testing.assert_allclose(results[2], expected[2], rtol=1e-6)


@pytest.mark.parametrize("name", ["llama", "llama_tied_bias", "gemma", "gpt2"])
def test_only_positions_with_a_weight_have_logits(name, monkeypatch):
    assert_equals_full_logits(plan(name, rows=ROWS), monkeypatch, expected_counts={5})


def test_micro_batches_only_have_logits_where_there_is_a_weight(monkeypatch):
    assert_equals_full_logits(plan("llama", rows=2, accumulate=2), monkeypatch, expected_counts={5, 0})


@pytest.mark.parametrize("packed", [False, True])
def test_a_frozen_base_with_a_tied_output_only_has_logits_where_there_is_a_weight(tmp_path, monkeypatch, packed):
    model = write_base(tmp_path / "base.gguf", "llama_tied_bias", "q8_0")
    recipe = Lora(base=str(tmp_path / "base.gguf"), rank=2, dropout=0.5)
    the_plan = recipe.plan(model, Setup(batches(rows=ROWS).inputs, rows=ROWS))
    assert_equals_full_logits(the_plan, monkeypatch, expected_counts={5}, packed=packed)


@pytest.mark.parametrize("masked", [False, True])
def test_an_adapter_of_the_output_matrix_contributes_to_the_logits(masked):
    """An adapter with a dropout mask needs all positions, as the mask covers all of them."""
    x, w, a, b = (torch.randn(shape) for shape in ((2, 3, 5), (7, 5), (2, 5), (7, 2)))
    adapted = AdaptedWeight(w, low_rank=LowRank(a, b, 0.5, torch.randn(2, 3, 5) if masked else None))
    targets, weights = torch.tensor([[1, 6, 0], [2, 3, 4]]), torch.tensor([[0.5, 0, 0.25], [0, 0, 0]])
    loss, expected = (
        ops.cross_entropy(ops.logits(x, adapted), targets, weights) for ops in (LossOps(TorchOps()), TorchOps())
    )
    torch.testing.assert_close(loss, expected)


def test_if_all_positions_have_a_weight_gradients_are_bit_identical():
    the_plan, batch = plan("llama", rows=ROWS), batches(rows=ROWS).batch(0)
    gradients = []
    for full_logits in (True, False):
        with TorchCPU(threads=1).realize(the_plan) as session:
            session._loss_ops = session._ops if full_logits else session._loss_ops
            session.build()
            gradients.append(session.gradients(batch))
    for name, gradient in gradients[0].items():
        np.testing.assert_array_equal(gradients[1][name], gradient, err_msg=name)


def test_a_compiled_step_computes_all_positions(monkeypatch):
    """A number of positions that changes would recompile the step each time."""
    torch.compiler.reset()  # functions that earlier tests compiled count towards Dynamo's limit of recompilations
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager", fullgraph=True))
    compiled, eager = (compute_results(TorchCPU(threads=1, compile=c), plan("llama", rows=ROWS)) for c in (True, False))
    np.testing.assert_allclose(compiled[1], eager[1], rtol=1e-5)


LATER_OPS = {
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


@pytest.mark.parametrize("op", LATER_OPS)
def test_a_model_can_apply_further_ops_to_its_logits(op):
    x, w = torch.randn(2, 3, 5), torch.randn(7, 5)
    ops = LossOps(TorchOps())
    logits = ops.logits(x, w)
    assert isinstance(logits, DeferredLogits)
    assert torch.equal(LATER_OPS[op](ops, logits), LATER_OPS[op](TorchOps(), x @ w.T))


# -- log-probabilities of tokens, a few positions at a time ------------------------------------------------------------


def token_gradients(ops, x, w, targets, by_token):
    """Return log-probabilities of targets, and the gradients of their sum, each multiplied by its own factor."""
    leaves = [x, *((w.base, w.low_rank.a, w.low_rank.b) if isinstance(w, AdaptedWeight) else (w,))]
    values = ops.token_log_probs(ops.logits(x, w), targets)
    return values, *torch.autograd.grad((values * by_token).sum(), leaves)


@pytest.mark.parametrize("form", ["eager", "compiled", "adapted", "float32"])
@pytest.mark.parametrize("chunk", [1, 21, 28, 1000])  # logits: less than a position, 3 or 4 of 6 positions, all
def test_log_probabilities_of_chunks_of_positions_have_exact_gradients(form, chunk, monkeypatch):
    draw = torch.Generator().manual_seed(1)
    dtype = torch.float32 if form == "float32" else torch.float64
    shapes = ((2, 3, 5), (7, 5), (2, 5), (7, 2))
    x, w, a, b = (torch.randn(s, generator=draw, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes)
    targets, by_token = torch.tensor([[1, 6, 0], [2, 3, 3]], dtype=torch.int32), torch.tensor([[2.0, 0, -1], [3, 1, 5]])
    weight = AdaptedWeight(w, low_rank=LowRank(a, b, 0.5)) if form == "adapted" else w
    expected = token_gradients(TorchOps(), x, weight, targets, by_token)
    fused = LossOps(TorchOps())
    fused.chunk = chunk

    def run():
        return fused.token_log_probs(fused.logits(x, weight), targets)

    if form == "compiled":
        torch.compiler.reset()
        run = torch.compile(run, backend="aot_eager", fullgraph=True)
    values = run()
    leaves = [x, w, *((a, b) if form == "adapted" else ())]
    results = (values, *torch.autograd.grad((values * by_token).sum(), leaves))
    torch.testing.assert_close(results, expected)


def preference_session(engine, context=32, vocab=4096):
    """Return a session that trains DPO with a small model and a large vocabulary, and a batch."""
    ids, number = InputSpec((context,), "int32", below=vocab), InputSpec((context,), "float32")
    inputs = {"tokens": ids, "targets": ids, "mask": number}
    inputs |= dict.fromkeys(("reference", "weights"), InputSpec((), "float32"))
    model = Llama(d_model=16, n_layers=1, n_heads=2, d_ff=16, context=context, vocab=vocab, tied=True)
    the_plan = Scratch().plan(model, Setup(inputs, rows=ROWS, objective=Preference()))
    draw = np.random.default_rng(0)
    tokens, targets = draw.integers(0, vocab, (2, ROWS, context), dtype=np.int32)
    mask = np.ones((ROWS, context), np.float32)
    batch = {"tokens": tokens, "targets": targets, "mask": mask}
    batch |= {"reference": np.zeros(ROWS, np.float32), "weights": np.ones(ROWS, np.float32)}
    session = engine.realize(the_plan)
    session.build()
    return session, batch


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_preference_step_never_holds_all_logits(dtype, recompute, monkeypatch):
    engine, hp = TorchCPU(threads=1, dtype=dtype, recompute=recompute), AdamW.for_lora().hp_for_step(0)
    gradients, peaks, logits = [], [], 4 * ROWS * 32 * 4096
    for chunk in (1 << 30, 1 << 15):
        monkeypatch.setattr(LossOps, "chunk", chunk)
        session, batch = preference_session(engine)
        with session:
            gradients.append(session.gradients(batch))
            peaks.append(measure_peak_tensor_bytes(lambda session=session, batch=batch: session.step(batch, hp)))
    for name, gradient in gradients[0].items():
        norm = np.linalg.norm(gradient)
        assert np.linalg.norm(gradients[1][name] - gradient) <= (2e-2 if dtype == "bfloat16" else 1e-5) * norm, name
    assert peaks[0] > logits
    assert peaks[1] < (2 if dtype == "float64" else 1) * logits


def test_a_preference_graph_of_ggml_holds_fewer_copies_of_the_logits(monkeypatch):
    sizes = []
    for composed in (False, True):
        if composed:
            monkeypatch.setattr(GGMLOps, "token_log_probs", Ops.token_log_probs)
        session, _ = preference_session(GGMLCPU(threads=1))
        with session:
            sizes.append(session.describe()["compute_bytes"])
    assert sizes[0] < 0.8 * sizes[1]
