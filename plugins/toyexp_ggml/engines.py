"""Engines `ggml`, `metal`, `ggml_cuda` and `vulkan`: settings and availability checks. ggml is imported on use."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import toyexp
from toyexp import Engine, Plan, RunPreview, Unavailable, UserError, printable, require_package
from toyexp.base import (
    MAX_THREADS,
    available_cores,
    check_threads,
    crowding_note,
    pluralise,
    reduce_spinning,
    require_choice,
)
from toyexp_ggml import profiles

OVERRIDE = "NVIDIA_TF32_OVERRIDE"
# Variables that ggml's Vulkan reads once per process. They forbid float16 products, matrix cores (which also use
# float16), and 8-bit products with quantised matrices.
NO_HALF = "GGML_VK_DISABLE_F16"
NO_ROUNDING = (NO_HALF, "GGML_VK_DISABLE_COOPMAT", "GGML_VK_DISABLE_COOPMAT2", "GGML_VK_DISABLE_INTEGER_DOT_PRODUCT")
AUTO = "auto"
# Advice if a library can be configured only once per process.
ONE_VALUE_HINT = "use one value per command: engine={0} or engine={0}:{1}, not both"
VISIBLE = "GGML_VK_VISIBLE_DEVICES"
SOFTWARE = ("llvmpipe", "lavapipe", "SwiftShader")  # names of Vulkan devices that are emulated on the CPU


def require_ggml() -> None:
    """Raise Unavailable unless ggml-python can be imported."""
    reduce_spinning()
    with require_package("ggml", "pip install 'toyexp[ggml]' (needs a C compiler)", "ggml-python"):
        import toyexp_ggml.binding.graph  # noqa: F401 - fails if ggml lacks a function it uses


def rebuild(flags: str) -> str:
    """Return the command that builds ggml-python again with these CMake flags."""
    return (
        f'CMAKE_ARGS="-DGGML_LLAMAFILE=ON {flags}" pip install --force-reinstall --no-deps --no-cache-dir '
        "--no-binary ggml-python ggml-python"
    )


@dataclass
class GGMLEngine(Engine):
    """Base class of the ggml engines."""

    threads: int = 0  # CPU threads; 0: one for each core this process may use, fewer while other processes are busy
    recompute: bool = False  # activation checkpointing: keep one block's activations at a time, compute them twice

    @property
    def profile(self) -> profiles.Profile:
        """The device's name, and the ops that its graphs may use."""
        raise NotImplementedError

    @property
    def device(self) -> str:
        """ggml's name of the device that computes."""
        return self.profile.device

    def thread_count(self) -> int:
        return self.threads or min(available_cores(), MAX_THREADS)

    def check_plan(self, plan: Plan) -> None:
        from toyexp_ggml.limits import exceeded_limit

        if reason := exceeded_limit(plan):
            raise UserError(f"engine={self.name}: {reason}")

    def preload(self) -> None:
        require_ggml()
        import toyexp_ggml.session  # noqa: F401

    def realize(self, plan: Plan) -> toyexp.Session:
        self.check()
        from toyexp_ggml.session import GGMLSession

        threads, adaptive = self.thread_count(), not self.threads
        return GGMLSession(plan, self.device, self.profile, threads, self.recompute, adaptive).open()


@dataclass
class GGMLCPU(GGMLEngine):
    """A static ggml graph on the CPU; starts in a fraction of PyTorch's time."""

    name: ClassVar[str] = "ggml"
    priority: ClassVar[int] = 10

    products: str = "auto"  # what multiplies matrices: auto | kernels (kernels.c of toyexp) | blas | ggml

    @property
    def profile(self) -> profiles.Profile:
        from toyexp_ggml.binding import devices
        from toyexp_ggml.native import instruction_set

        if self.products != AUTO:
            return profiles.BY_PRODUCTS[self.products]
        has_blas = "BLAS" in devices()
        # Apple's BLAS uses matrix units that C cannot reach; OpenBLAS is slower than kernels.c.
        if instruction_set() and not (has_blas and platform.system() == "Darwin"):
            return profiles.CPU_KERNELS
        return profiles.CPU_BLAS if has_blas else profiles.CPU

    def check(self) -> str:
        check_threads(self.threads)
        require_choice("engine", self, products=(AUTO, *profiles.BY_PRODUCTS))
        require_ggml()
        from toyexp_ggml.binding import devices
        from toyexp_ggml.native import instruction_set, unavailable_reason

        profile = self.profile
        if profile is profiles.CPU_BLAS and "BLAS" not in devices():
            raise UserError("engine.products=blas: this ggml-python is built without BLAS; use engine.products=auto")
        if profile is profiles.CPU_KERNELS and (why := unavailable_reason()):
            raise UserError(f"engine.products=kernels: {why}; use engine.products=auto")
        instructions = f" ({instruction_set()})" if profile is profiles.CPU_KERNELS else ""
        return f"ggml on the {profile.label}{instructions}, {pluralise(self.thread_count())}"

    def advice(self) -> list[str]:
        from toyexp_ggml.native import cache_problem, unavailable_reason

        slow = "this build of ggml-python is slow; see `toyexp doctor`" if self._is_slow() else ""
        kernels = f"toyexp's faster kernels are not used: {why}" if (why := unavailable_reason()) else ""
        crowding = self.threads and crowding_note(self.threads)
        return [line for line in (crowding, slow, kernels, cache_problem()) if line]

    def remedies(self) -> list[str]:
        if not self._is_slow():
            return self.advice()
        remedy = f"this build of ggml-python is slow: build it again: {rebuild('')}"
        return [*(line for line in self.advice() if "ggml-python" not in line), remedy]

    def _is_slow(self) -> bool:
        """Return True if ggml multiplies matrices, and ggml-python is built without llamafile's fast products."""
        from toyexp_ggml.binding import has_llamafile

        return self.profile is profiles.CPU and not has_llamafile()


@dataclass
class GGMLGPU(GGMLEngine):
    """Base class of the ggml engines on GPUs."""

    on_gpu: ClassVar[bool] = True
    needs: ClassVar[tuple[str, str]]  # operating system ("" for any), and the CMake flag that adds the device
    products: ClassVar[str] = "float16"  # dtype to which ggml's kernels round the inputs of matrix products
    rounding: ClassVar[str] = ""  # setting that permits coarser rounding

    threads: int = 0  # CPU threads for ops that the GPU does not support (for all ops with emulate); 0: one per core
    emulate: bool = False  # compute the GPU's graph on the CPU, for tests

    def warnings(self, preview: RunPreview) -> Iterable[str]:
        yield from super().warnings(preview)
        if self.emulate and getattr(self, key := self.rounding, False):
            yield f"engine.{key}=true: has no effect with engine.emulate=true; it applies to products on the GPU"
        if self.threads and not self.emulate:
            yield f"engine.threads={self.threads}: applies only to ops that {self.name}'s GPU does not support"

    def product_dtype(self) -> str:
        return "float32" if self.emulate else self.products

    @property
    def device(self) -> str:
        """ggml's name of the GPU, or "CPU" if the CPU emulates the GPU."""
        return "CPU" if self.emulate else self.profile.device

    def check(self) -> str:
        check_threads(self.threads)
        name = self.profile.label
        if self.emulate:
            require_ggml()
            return f"{name}'s graph, emulated on the CPU with {pluralise(self.thread_count())}"
        system, flag = self.needs
        if system and platform.system() != system:
            raise Unavailable(
                f"{name} needs macOS; this is {platform.system()}. Use engine=ggml, or engine.emulate=true for a test"
            )
        require_ggml()
        from toyexp_ggml.binding import devices, is_built_with

        for device, description in devices().items():
            if device.startswith(self.profile.device):
                return f"ggml on {name}: {description}"
        if is_built_with(self.profile.device):
            raise Unavailable(f"ggml-python supports {name}, but finds no such device here{self.hint()}")
        raise Unavailable(f"this ggml-python is built without {name}; build it again: {rebuild(flag)}")

    def hint(self) -> str:
        """Return advice that is appended to the error message if no device is found."""
        return ""


@dataclass
class GGMLMetal(GGMLGPU):
    """A static ggml graph on the GPU of Apple silicon."""

    name: ClassVar[str] = "metal"
    priority: ClassVar[int] = 25
    profile: ClassVar[profiles.Profile] = profiles.METAL
    needs: ClassVar[tuple[str, str]] = ("Darwin", "-DGGML_METAL=ON")

    def check(self) -> str:
        """Return a line about the device. Raise Unavailable in a virtual machine: its GPU lacks ops that ggml needs."""
        note = super().check()
        if self.emulate:
            return note
        from toyexp_ggml.probe import unsupported_ops

        if ops := sorted(unsupported_ops(self.profile.device)):
            raise Unavailable(f"{note}, which does not support {', '.join(ops)}; use engine=ggml")
        return note


@dataclass
class GGMLCUDA(GGMLGPU):
    """A static ggml graph on an NVIDIA GPU."""

    name: ClassVar[str] = "ggml_cuda"
    device_variable: ClassVar[str] = "CUDA_VISIBLE_DEVICES"
    own_memory: ClassVar[bool] = True
    priority: ClassVar[int] = 15
    profile: ClassVar[profiles.Profile] = profiles.CUDA
    needs: ClassVar[tuple[str, str]] = ("", "-DGGML_CUDA=ON -DGGML_CUDA_GRAPHS=ON")
    rounding: ClassVar[str] = "tf32"
    products: ClassVar[str] = "tf32"  # ggml's own kernel for few rows uses TF32, even if cuBLAS may not

    tf32: bool = False  # let matrix products round their inputs to TF32 (10-bit mantissa)

    _tf32_was_allowed: ClassVar[bool] = False

    def gpus(self) -> int | None:
        return 0 if self.emulate else 1

    def check(self) -> str:
        """Return a line about the device, and allow or forbid TF32 in this process.

        ggml asks cuBLAS for TF32, and only NVIDIA_TF32_OVERRIDE=0 forbids it. cuBLAS reads this variable once per
        process, so raise UserError if the process has already used the other value.
        """
        note = super().check()
        if self.emulate:
            return note
        forbidden = os.environ.get(OVERRIDE) == "0"
        torch: Any = sys.modules.get("torch")  # may have initialised cuBLAS in this process
        computed = torch is not None and torch.cuda.is_initialized() and torch.cuda.max_memory_allocated() > 0
        too_late = not forbidden and (GGMLCUDA._tf32_was_allowed or computed)
        if forbidden if self.tf32 else too_late:
            raise UserError(
                f"engine.tf32={str(self.tf32).lower()}: cuBLAS reads {OVERRIDE} once per process, and this "
                f"process already has the other value; {ONE_VALUE_HINT.format('ggml_cuda', 'tf32=true')}"
            )
        if self.tf32:
            GGMLCUDA._tf32_was_allowed = True
        else:
            os.environ[OVERRIDE] = "0"
        return note


@dataclass
class GGMLVulkan(GGMLGPU):
    """A static ggml graph on any GPU with Vulkan."""

    name: ClassVar[str] = "vulkan"
    device_variable: ClassVar[str] = VISIBLE
    own_memory: ClassVar[bool] = True
    priority: ClassVar[int] = 12
    needs: ClassVar[tuple[str, str]] = ("", "-DGGML_VULKAN=ON")
    rounding: ClassVar[str] = "half"

    half: bool = False  # let matrix products round their inputs to float16, which is faster on many GPUs

    _opened_half: ClassVar[bool | None] = None  # value of `half` with which this process has opened the device
    _is_exact: ClassVar[bool] = False  # whether a trial has confirmed that half=false is in effect

    @property
    def profile(self) -> profiles.Profile:
        """Description of the device. With `half`, it states that matrix products are computed in float16."""
        return profiles.VULKAN_HALF if self.half else profiles.VULKAN

    def product_dtype(self) -> str:
        return "float16" if self.half and not self.emulate else "float32"

    def check(self) -> str:
        note = super().check()
        if self.emulate:
            return note
        if self.half and NO_HALF in os.environ:
            raise UserError(f"engine.half=true: {NO_HALF} is set in the environment, which forbids float16; unset it")
        if GGMLVulkan._opened_half not in (None, self.half):
            raise UserError(
                f"engine.half={str(self.half).lower()}: ggml opens a Vulkan device once per process, with or without "
                f"float16; {ONE_VALUE_HINT.format('vulkan', 'half=true')}"
            )
        GGMLVulkan._opened_half = self.half
        software = ", software on the CPU" if any(name in note for name in SOFTWARE) else ""
        return f"{note}{software}, products in {self.product_dtype()}"

    def hint(self) -> str:
        """Return advice on GGML_VK_VISIBLE_DEVICES, which selects devices and may hide all of them."""
        if visible := os.environ.get(VISIBLE):
            return f"; {VISIBLE}={printable(visible)} must be numbers of existing devices, such as 0 or 0,1"
        return f"; to use a software device, select it with {VISIBLE}=0"

    def realize(self, plan: Plan) -> toyexp.Session:
        """Return a session. Raise UserError if half=false, but this process has opened the device with float16."""
        if self.half or self.emulate:
            return super().realize(plan)
        self.check()
        with _set_variables(*NO_ROUNDING):  # only here: processes that start later must not inherit them
            if not GGMLVulkan._is_exact:
                from toyexp_ggml.probe import rounds_products

                if rounds_products(self.device):
                    raise UserError(
                        "engine.half=false: other code in this process has opened the Vulkan device with float16; run "
                        "toyexp in a separate process"
                    )
                GGMLVulkan._is_exact = True
            return super().realize(plan)


@contextmanager
def _set_variables(*variables: str) -> Iterator[None]:
    """Set environment variables to 1 inside the context, unless they are set already."""
    unset = [name for name in variables if name not in os.environ]
    os.environ.update(dict.fromkeys(unset, "1"))
    try:
        yield
    finally:
        for name in unset:
            os.environ.pop(name, None)
