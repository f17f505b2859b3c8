"""Run the conformance suite: engines compute the loss, its gradients and the metrics as float64 does."""

from toyexp_my_objective import MyObjective

from toyexp.testing import ObjectiveSuite
from toyexp_ggml.engines import GGMLCPU
from toyexp_torch.engines import TorchCPU


class TestMyObjective(ObjectiveSuite):
    objective, engines = MyObjective(gamma=1.5), (TorchCPU(threads=1), GGMLCPU(threads=1))
