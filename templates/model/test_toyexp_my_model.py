"""Run the conformance suite: every tensor has a gradient, no position sees a later one, engines match float64."""

from toyexp_my_model import MyModel

from toyexp.testing import ModelSuite
from toyexp_ggml.engines import GGMLCPU
from toyexp_torch.engines import TorchCPU


class TestMyModel(ModelSuite):
    model, engines = MyModel(width=16, heads=2, context=8), (TorchCPU(threads=1), GGMLCPU(threads=1))
