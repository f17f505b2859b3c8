"""Run the conformance suite: it checks gradients, that no position sees later ones, and engines against float64."""

from toyexp_my_model import MyModel

from toyexp.testing import ModelSuite
from toyexp_ggml.engines import GGMLCPU
from toyexp_torch.engines import TorchCPU


class TestMyModel(ModelSuite):
    model, engines = MyModel(width=16, heads=2, context=8), (TorchCPU(threads=1), GGMLCPU(threads=1))
