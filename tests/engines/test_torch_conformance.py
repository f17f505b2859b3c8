import threading
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import ClassVar

from lines import noop

from toyexp.cli.main import main
from toyexp.testing import EngineSuite
from toyexp.testing.null import NullEngine
from toyexp.training import experiment
from toyexp_torch import engines
from toyexp_torch.engines import TorchCPU, TorchCUDA, TorchMPS


class TestCPU(EngineSuite):
    engine = TorchCPU()


@dataclass
class InAStack(TorchCPU):
    """Sessions that are one of two in a stack."""

    name: ClassVar[str] = "in_a_stack"

    def realize(self, plan):
        return self.realize_stack([plan, replace(plan, seed=plan.seed + 1)]).sessions[0]


class TestCPUInAStack(EngineSuite):
    engine = InAStack()


class TestCUDA(EngineSuite):
    engine = TorchCUDA()


@dataclass
class OnAGPU(TorchCUDA):
    """Sessions in a stack on a GPU, whose steps are one graph."""

    name: ClassVar[str] = "in_a_stack"

    def realize(self, plan):
        return self.realize_stack([plan, replace(plan, seed=plan.seed + 1)]).sessions[0]


class TestCUDAInAStack(EngineSuite):
    engine = OnAGPU()


class TestMPS(EngineSuite):
    engine = TorchMPS()
    rtol = 1e-4  # Apple's kernels use fast approximations of exp and tanh
    gradient_rtol = 5e-4


def test_waking_a_gpu_tries_once_per_process_and_ignores_failure(monkeypatch):
    monkeypatch.setattr(engines, "CUDA_IS_OPEN", threading.Event())
    opened = []
    monkeypatch.setattr(
        engines, "import_torch", lambda: SimpleNamespace(ones=lambda *_, **__: opened.append(1) or 1 / 0)
    )
    TorchCUDA(devices="2").open_device_early()
    with monkeypatch.context() as patch:
        patch.setattr(engines, "started_ranks", lambda: SimpleNamespace(count=2))
        TorchCUDA().open_device_early()
    assert not engines.CUDA_IS_OPEN.is_set(), "a run with several ranks opened a device here"
    for _ in range(2):  # a process opens it once for all its runs
        TorchCUDA().open_device_early()
    for thread in threading.enumerate():
        if thread.daemon and getattr(thread, "_target", None) is engines._open_cuda:
            thread.join(10)
    assert opened == [1]


def test_a_deterministic_gpu_is_opened_without_cublas(monkeypatch):
    """cuBLAS reads its settings at first use, and the session sets them later."""
    products = []

    class Matrix:
        def __matmul__(self, other):
            products.append(other)

    monkeypatch.setattr(engines, "import_torch", lambda: SimpleNamespace(ones=lambda *_, **__: Matrix()))
    engines._open_cuda(deterministic=True)
    assert not products
    engines._open_cuda(deterministic=False)
    assert len(products) == 1


def test_a_run_opens_its_device_before_its_data_and_ignores_failure(monkeypatch, tmp_path):
    order = []
    monkeypatch.setattr(NullEngine, "open_device_early", lambda self: order.append("device") or 1 / 0)
    monkeypatch.setattr(
        experiment, "_open_data", lambda config, old=experiment._open_data: order.append("data") or old(config)
    )
    assert main([*noop(), "steps=1", f"hydra.run.dir={tmp_path / 'run'}"]) == 0
    assert order == ["device", "data"]
