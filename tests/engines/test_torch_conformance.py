from toyexp.testing import EngineSuite
from toyexp_torch.engines import TorchCPU, TorchCUDA, TorchMPS


class TestCPU(EngineSuite):
    engine = TorchCPU()


class TestCUDA(EngineSuite):
    engine = TorchCUDA()


class TestMPS(EngineSuite):
    engine = TorchMPS()
    rtol = 1e-4  # Apple's kernels use fast approximations of exp and tanh
    gradient_rtol = 5e-4
