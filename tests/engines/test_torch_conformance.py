from dataclasses import dataclass, replace
from typing import ClassVar

from toyexp.testing import EngineSuite
from toyexp_torch.engines import TorchCPU, TorchCUDA, TorchMPS


class TestCPU(EngineSuite):
    engine = TorchCPU()


@dataclass
class InAStack(TorchCPU):
    """Each session is one of two whose steps are taken together."""

    name: ClassVar[str] = "in_a_stack"

    def realize(self, plan):
        return self.realize_stack([plan, replace(plan, seed=plan.seed + 1)])[0]


class TestCPUInAStack(EngineSuite):
    engine = InAStack()


class TestCUDA(EngineSuite):
    engine = TorchCUDA()


@dataclass
class OnAGPU(TorchCUDA):
    """The same on a GPU, where the steps are one graph."""

    name: ClassVar[str] = "in_a_stack"

    def realize(self, plan):
        return self.realize_stack([plan, replace(plan, seed=plan.seed + 1)])[0]


class TestCUDAInAStack(EngineSuite):
    engine = OnAGPU()


class TestMPS(EngineSuite):
    engine = TorchMPS()
    rtol = 1e-4  # Apple's kernels use fast approximations of exp and tanh
    gradient_rtol = 5e-4
