"""The conformance suite of models: shipped models pass, and each kind of fault is found."""

from dataclasses import replace
from typing import ClassVar

import pytest
from tiny import MODELS

from toyexp import Params
from toyexp.testing import ModelSuite, NullEngine
from toyexp_ggml.engines import GGMLCPU, GGMLMetal
from toyexp_models.llama import Llama
from toyexp_models.vit import ViT
from toyexp_torch.engines import TorchCPU

ENGINES = (TorchCPU(threads=1), GGMLCPU(threads=1), GGMLMetal(threads=1, emulate=True))
VIT = ViT(d_model=8, n_layers=3, n_heads=2, d_ff=16)
SHIPPED = {
    **{
        name: replace(model, n_layers=3, d_model=16, d_ff=64 if model.name == "mamba2" else 24)
        for name, model in MODELS.items()
    },
    "vit": VIT,
    "vit_rmsnorm": replace(VIT, block="rmsnorm_silu"),
}


def suite(name, model):
    # A softmax does not change when all its scores grow alike: without rope a bias of all keys has no gradient.
    idle = ("*.attn_k.bias",) if name == "vit" else ()
    members = {"model": model, "engines": ENGINES, "without_gradient": idle}
    return {f"Test_{name}": type(f"Test_{name}", (ModelSuite,), members)}


for _name, _model in SHIPPED.items():
    globals().update(suite(_name, _model))


# -- what is wrong is found -----------------------------------------------------------------------------------------


class Operators(Llama):
    """Adds tensors as torch and numpy can."""

    def block(self, ops, x, p):
        return super().block(ops, x, p) + x


class Method(Llama):
    """Asks a tensor for its mean."""

    def gated(self, ops, gate, up):
        return ops.scale(up, gate.mean())


class Branching(Llama):
    """Looks at a tensor to decide what to do."""

    def gated(self, ops, gate, up):
        return super().gated(ops, gate, up) if up else gate


class Unused(Llama):
    """A model with an unused norm."""

    def block(self, ops, x, p):
        return super().block(ops, x, Params({**p, "ffn_norm.weight": p["attn_norm.weight"]}))


class Muted(Llama):
    """Multiplies a part of itself by 0."""

    def gated(self, ops, gate, up):
        return ops.scale(super().gated(ops, gate, up), 0.0)


class Counting(Llama):
    """A block that does something else when it is called again."""

    calls: ClassVar[int] = 0

    def block(self, ops, x, p):
        Counting.calls += 1
        return ops.scale(super().block(ops, x, p), Counting.calls)


class Foreseeing(Llama):
    """Every position also reads the next one."""

    def embed(self, ops, table, tokens):
        x = super().embed(ops, table, tokens)
        length = x.shape[1]
        return ops.add(x, ops.concat([ops.part(x, 1, 1, length), ops.part(x, 1, 0, 1)], 1))


@pytest.mark.parametrize(
    ("kind", "test", "words"),
    [
        (Operators, "forward_uses_only_ops", "unsupported operand"),
        (Method, "forward_uses_only_ops", "'Opaque' object has no attribute 'mean'"),
        (Branching, "forward_uses_only_ops", "uses a tensor as a condition"),
        (Unused, "forward_uses_only_ops", "the result does not depend on blk.0.ffn_norm.weight, blk.1.ffn_norm"),
        (Counting, "forward_uses_only_ops", "gives other numbers when it is called again"),
        (Muted, "tensor_has_a_gradient", "blk.0.ffn_norm.weight has no gradient"),
        (Foreseeing, "position_sees_a_later_one", "depend on later ones"),
    ],
)
def test_the_suite_finds_wrong_models(kind, test, words):
    wrong = ModelSuite()
    wrong.model = kind(d_model=16, n_layers=2, n_heads=2, d_ff=24, context=8)
    (method,) = (getattr(wrong, name) for name in dir(wrong) if name.startswith("test_") and test in name)
    with pytest.raises((AssertionError, TypeError, AttributeError), match=words):
        method()


def test_the_suite_finds_a_frozen_tensor_with_a_gradient():
    wrong = ModelSuite()
    wrong.model, wrong.without_gradient = VIT, ("*.attn_k.bias", "*.attn_q.bias")
    with pytest.raises(AssertionError, match=r"attn_q.bias has a gradient"):
        wrong.test_every_tensor_has_a_gradient()


def test_the_suite_finds_an_engine_with_wrong_numbers():
    wrong = ModelSuite()
    wrong.model = SHIPPED["gpt2"]
    with pytest.raises(AssertionError):
        wrong.test_engines_agree_with_float64(NullEngine())
