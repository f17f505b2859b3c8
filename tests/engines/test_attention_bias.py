"""Attention with a bias by distance: learned as in T5, and fixed as in ALiBi; with and without a key-value cache."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import tiny
import torch
from stacks import ADAMW, EXACT, build_stack, make_jobs, take_all, train_alone
from tiny import CONTEXT, VOCAB, batches, plan

from toyexp import Normal, Recompute, TensorSpec, Values
from toyexp.testing import ModelSuite, ReferenceOps
from toyexp_ggml.engines import GGMLCPU
from toyexp_models.llama import Llama
from toyexp_torch.engines import TorchCPU
from toyexp_torch.ops import CachedDecoder


class Slopes(Values):
    """ALiBi's table: -slope * distance, with the slopes 2^(-8 h / H) of the heads h = 1 .. H."""

    def draw(self, shape, seed, name):
        slopes = 2.0 ** (-8 * np.arange(1, shape[0] + 1) / shape[0])
        return np.float32(-slopes[:, None] * np.arange(shape[1]))


@dataclass
class Biased(Llama):
    """A llama whose scores have a bias by distance in place of rope."""

    name: ClassVar[str] = "biased"

    alibi: bool = False  # a fixed table

    def tensors(self):
        init = Slopes() if self.alibi else Normal(0.5)
        table = TensorSpec("distances.weight", (self.n_heads, self.context), init, trainable=not self.alibi)
        return [*super().tensors(), table]

    def forward(self, ops, p, batch):
        self.bias = ops.distance_bias(p["distances.weight"], batch["tokens"].shape[1])
        return super().forward(ops, p, batch)

    def attend(self, ops, q, k, v, *layer):
        return ops.attention(q, k, v, bias=self.bias)


@dataclass
class Square(Biased):
    """A model whose bias is a matrix for all positions, which a cache cannot cut."""

    name: ClassVar[str] = "square"

    def tensors(self):
        return [*Llama.tensors(self), TensorSpec("bias.weight", (self.context, self.context), Normal(0.5))]

    def forward(self, ops, p, batch):
        length = batch["tokens"].shape[1]
        self.bias = ops.part(ops.part(p["bias.weight"], 0, 0, length), 1, 0, length)
        return Llama.forward(self, ops, p, batch)


@dataclass
class Capped(Biased):
    """A model whose scores are limited before the bias is added."""

    name: ClassVar[str] = "capped"

    def attend(self, ops, q, k, v, *layer):
        return ops.attention(ops.scale(q, 20.0), k, v, bias=self.bias, softcap=0.5)


ENGINES = (TorchCPU(threads=1), GGMLCPU(threads=1))
SIZES = {"d_model": 16, "n_layers": 2, "n_heads": 4, "d_ff": 24, "context": 8}


class TestLearned(ModelSuite):
    model, engines = Biased(**SIZES), ENGINES


class TestSquare(ModelSuite):
    model, engines = Square(**SIZES), ENGINES

    def test_cached_decoding_is_declared_correctly(self):
        with pytest.raises(AssertionError, match=r"ops\.part may read other positions"):
            super().test_cached_decoding_is_declared_correctly()


@pytest.fixture(autouse=True)
def _models(monkeypatch):
    for cls in (Biased, Square, Capped):
        monkeypatch.setitem(tiny.MODELS, cls.name, cls(**tiny.SIZES))
    monkeypatch.setitem(tiny.MODELS, "alibi", Biased(**tiny.SIZES, alibi=True))


@pytest.mark.parametrize(
    ("name", "decoder"),
    [("biased", CachedDecoder), ("alibi", CachedDecoder), ("capped", CachedDecoder), ("square", Recompute)],
)
def test_a_decoder_gives_the_logits_of_the_whole_sequence(name, decoder):
    ids = np.random.default_rng(0).integers(0, VOCAB, CONTEXT).astype(np.int32)
    with TorchCPU(threads=1).realize(plan(name)) as session:
        session.build()
        expected = session.logits({"tokens": ids[None]})[0]
        reader = session.decoder()
        assert isinstance(reader, decoder)
        pieces = [reader.feed(ids[:5]), *(reader.feed([i]) for i in ids[5:9]), reader.feed(ids[9:])]
        np.testing.assert_allclose(pieces, expected[[4, 5, 6, 7, 8, 11]], atol=1e-5)


def test_alibi_is_that_of_its_paper():
    """The scores of head h lose slope[h] for each position between query and key (Press et al. 2022)."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 7, 4, 6, generator=draw, dtype=torch.float64) for _ in range(3))
    table = Slopes().draw((4, 9), 0, "")
    ours = ReferenceOps().attention(q.numpy(), k.numpy(), v.numpy(), bias=ReferenceOps().distance_bias(table, 7))
    distance = torch.arange(7)[:, None] - torch.arange(7)
    mask = torch.where(distance >= 0, -torch.tensor([0.25, 0.0625, 2**-6, 2**-8])[:, None, None] * distance, -torch.inf)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask.double()).transpose(1, 2).flatten(2)
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)


@pytest.mark.parametrize("name", ["biased", "alibi"])
def test_a_frozen_table_stays_and_a_learned_one_is_trained(name):
    with GGMLCPU(threads=1).realize(plan(name)) as session:
        session.build()
        before = session.download("distances.weight")
        gradients = session.gradients(batches().batch(0))
        assert ("distances.weight" in gradients) is (name == "biased")
        assert name == "alibi" or np.abs(gradients["distances.weight"]).min() > 1e-9
        np.testing.assert_array_equal(session.download("distances.weight"), before)


def test_each_run_of_a_stack_has_its_own_bias():
    jobs = make_jobs("biased", ADAMW)
    stack, sessions = build_stack(jobs, EXACT)
    losses = np.array([take_all(stack, jobs, step) for step in range(4)]).transpose(1, 0, 2)
    for job, ours in zip(jobs, losses, strict=True):
        np.testing.assert_allclose(ours, train_alone(job, 4, EXACT)[0], rtol=1e-11)
    for session in sessions:
        session.close()
