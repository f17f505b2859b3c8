"""Ops: composed ops equal their definitions, and a new op breaks no engine."""

from dataclasses import replace
from inspect import isfunction

import numpy as np
import pytest
from tiny import VOCAB, batches, plan

from toyexp import Ops, SessionError
from toyexp.interfaces.decoder import IncrementalOps, Recompute
from toyexp.reference.opmodel import CASES
from toyexp.testing import OpModel, ReferenceOps, op_batch, op_plan, reference_logits
from toyexp_ggml.engines import GGMLCPU
from toyexp_models.llama import Llama
from toyexp_torch.engines import TorchCPU
from toyexp_torch.ops import CachedDecoder, CachedOps, TorchOps

# A minimal engine: its author writes only these ops, and Ops composes the others.
Primitives = type("Primitives", (Ops,), {name: getattr(ReferenceOps, name) for name in Ops.__abstractmethods__})
LOOKS_FURTHER = {
    "reshape", "part", "concat", "first_rows", "prepend", "select", "rope", "attention", "cross_entropy", "permute",
    "product", "sum", "mean", "cumsum", "take", "token_log_probs", "causal", "shift", "compose_attention",
    "linear_attention", "distance_bias",
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_composed_ops_equal_their_definition(case):
    the_plan, batch = op_plan(case), op_batch(case=case)
    values = {t.name: the_plan.initial_values(t).astype(np.float64) for t in the_plan.tensors}
    composed = the_plan.model.forward(Primitives(), the_plan.params(values), batch)
    tolerance = 3e-7 if case == "gelu_exact" else 1e-12  # the composed erf is an approximation, within 1.5e-7
    np.testing.assert_allclose(composed, reference_logits(the_plan, values, batch), rtol=tolerance, atol=tolerance)


def test_an_engine_implements_only_two_dozen_ops():
    assert len(Ops.__abstractmethods__) == 26


def test_every_op_declares_whether_it_is_positionwise():
    public = {name for name, op in vars(Ops).items() if isfunction(op) and not name.startswith("_")}
    assert public - Ops.positionwise == LOOKS_FURTHER and public >= Ops.positionwise


@pytest.mark.parametrize(
    "case", [c for c in CASES if c not in ("block", "prepend", "concat_positions", "mul_position")]
)
def test_a_positionwise_op_computes_each_position_independently(case):
    """The position alone would be the first one; positionwise table ops do not depend on that either."""
    used = set()

    class Noting(ReferenceOps):
        def __getattribute__(self, name):
            used.add(name)
            return super().__getattribute__(name)

    the_plan, batch = op_plan(case), op_batch(case=case)
    params = the_plan.params({t.name: the_plan.initial_values(t).astype(np.float64) for t in the_plan.tensors})
    logits = the_plan.model.forward(Noting(), params, batch)
    if used - {"__class__"} <= Ops.positionwise:
        for i in range(logits.shape[1]):
            alone = the_plan.model.forward(ReferenceOps(), params, {"tokens": batch["tokens"][:, i : i + 1]})
            np.testing.assert_allclose(alone[:, 0], logits[:, i], rtol=1e-12)


# -- a stranger's op ------------------------------------------------------------------------------------------------


def shift(ops, x):
    """Each position takes half its features from the one before it, the first from zeros; of primitives alone."""
    _, length, d = x.shape
    before = ops.concat([ops.scale(ops.part(x, 1, 0, 1), 0.0), ops.part(x, 1, 0, length - 1)], 1)
    return ops.concat([ops.part(before, 2, 0, d // 2), ops.part(x, 2, d // 2, d)], 2)


def squared_relu(ops, x):
    """Not a new op to any engine: x^2 where x is far above 0, 0 far below (with the primitives that there are)."""
    return ops.mul(ops.mul(x, x), ops.sigmoid(ops.scale(x, 50.0)))


class Shifted(Llama):
    """A llama whose embedding is shifted."""

    def embed(self, ops, table, tokens):
        return shift(ops, super().embed(ops, table, tokens))


class Squared(Llama):
    """A llama with another activation."""

    def gated(self, ops, gate, up):
        return ops.mul(squared_relu(ops, gate), up)


def planned(kind):
    the_plan = plan("llama")
    model = kind(d_model=32, n_layers=2, n_heads=4, context=12, d_ff=48, vocab=VOCAB)
    return replace(the_plan, model=model)


@pytest.mark.parametrize("engine", [TorchCPU(threads=1), GGMLCPU(threads=1)], ids=["torch", "ggml"])
@pytest.mark.parametrize("kind", [Shifted, Squared])
def test_a_models_own_composed_op_works_on_every_engine(kind, engine):
    the_plan, batch = planned(kind), batches().batch(0)
    expected = reference_logits(the_plan, {t.name: the_plan.initial_values(t) for t in the_plan.tensors}, batch)
    with engine.realize(the_plan) as session:
        session.build()
        np.testing.assert_allclose(session.logits(batch), expected, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("engine", [TorchCPU(threads=1), GGMLCPU(threads=1)], ids=["torch", "ggml"])
@pytest.mark.parametrize("kind", [Squared, Shifted])
def test_a_decoder_gives_the_logits_of_the_full_sequence_for_custom_ops(kind, engine):
    ids = np.arange(12, dtype=np.int32)
    with engine.realize(planned(kind)) as session:
        session.build()
        decoder, logits = session.decoder(), session.logits({"tokens": ids[None]})[0]
        assert isinstance(decoder, CachedDecoder) is (kind is Squared and engine.name == "cpu")
        np.testing.assert_allclose([decoder.feed([i]) for i in ids], logits, atol=1e-5)


class Positions(OpModel):
    """A model that adds the whole position table instead of its first rows."""

    def forward(self, ops, p, batch):
        return ops.add(ops.embed(p["x"], batch["tokens"]), p["table"])


def test_a_decoder_recomputes_with_a_table_for_a_whole_sequence():
    the_plan = op_plan("first_rows")
    (length,) = the_plan.inputs["tokens"].shape
    tensors = tuple(replace(t, shape=(length, 8)) if t.name == "table" else t for t in the_plan.tensors)
    with TorchCPU(threads=1).realize(replace(the_plan, model=Positions("first_rows"), tensors=tensors)) as session:
        session.build()
        assert isinstance(session.decoder(), Recompute)
        np.testing.assert_array_equal(session.decoder().feed([1]), session.logits({"tokens": np.int32([[1]])})[0, 0])


class Wider(TorchOps):
    """Custom ops: two new ones, one of them declared positionwise."""

    positionwise = TorchOps.positionwise | {"relu"}

    def relu(self, x):
        return x.relu()

    def flip(self, x):
        return x.flip(1)


class WiderPieces(CachedOps, Wider):
    """A decoder of them."""

    positionwise = Wider.positionwise


class Knowing(WiderPieces):
    """Custom ops that also declare the other op."""

    def flip(self, x):
        return x


def test_a_decoder_rejects_custom_ops_that_do_not_declare_their_positions():
    import torch

    x = torch.randn(1, 1, 4)
    assert WiderPieces(3).relu(x).shape == Knowing(3).flip(x).shape == x.shape
    with pytest.raises(SessionError, match=r"ops\.flip may read other positions"):
        WiderPieces(3).flip(x)
    with pytest.raises(SessionError, match=r"ops\.select may read other positions"):
        Knowing(3).select(x, 0)
    assert issubclass(CachedOps, IncrementalOps)
