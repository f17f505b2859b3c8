"""Run the conformance suite: it checks names and shapes, and an engine's steps against the formula in float64."""

from toyexp_my_optimiser import MyOptimiser

from toyexp.testing import OptimiserSuite
from toyexp_ggml.engines import GGMLCPU
from toyexp_torch.engines import TorchCPU


class TestOnTorch(OptimiserSuite):
    optimiser, engine = MyOptimiser(), TorchCPU(threads=1)


class TestOnGgml(OptimiserSuite):
    optimiser, engine = MyOptimiser(decay=0.9), GGMLCPU(threads=1)
