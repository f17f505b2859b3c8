"""The ggml engines: their settings, and whether they work here. ggml itself is imported only when used."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from toyexp import Engine, Plan, RunPreview, Unavailable, UserError, printable, require_package
from toyexp.base import MAX_THREADS, available_cores, check_threads, crowding_note, pluralise, reduce_spinning
from toyexp_ggml import profiles

if TYPE_CHECKING:
    from toyexp import Session

OVERRIDE = "NVIDIA_TF32_OVERRIDE"
# What ggml's Vulkan reads, once in a process: no products in float16, none on matrix cores, which it feeds with float16
# whatever the first says, and none in 8 bits with what is quantised.
NO_HALF = "GGML_VK_DISABLE_F16"
EXACT = (NO_HALF, "GGML_VK_DISABLE_COOPMAT", "GGML_VK_DISABLE_COOPMAT2", "GGML_VK_DISABLE_INTEGER_DOT_PRODUCT")
HEADERS, OPENBLAS = Path("/usr/include"), "*/openblas-openmp/cblas.h"
# What can be typed where a library takes one of two ways in a process.
ONE_OF_TWO = "a command has one of the two: engine={0}, or engine={0}:{1} beside engines like cpu or ggml"
VISIBLE = "GGML_VK_VISIBLE_DEVICES"
SOFTWARE = ("llvmpipe", "lavapipe", "SwiftShader")  # how drivers name a Vulkan device that is the CPU


def require_ggml() -> None:
    """Raises Unavailable unless ggml-python can be imported."""
    reduce_spinning()
    with require_package("ggml", "pip install 'toyexp[ggml]' (needs a C compiler)", "ggml-python"):
        import toyexp_ggml.binding.graph  # noqa: F401 - which also looks up what it uses of ggml


def rebuild(flags: str) -> str:
    """The command that builds ggml-python again with these flags of CMake."""
    return (
        f"CMAKE_ARGS='-DGGML_LLAMAFILE=ON {flags}' pip install --force-reinstall --no-deps --no-cache-dir "
        "--no-binary ggml-python ggml-python"
    )


@dataclass
class GGMLEngine(Engine):
    """What the ggml devices share."""

    threads: int = 0  # cores to use; 0: all that this process may use, fewer while other processes run there
    recompute: bool = False  # hold the activations of one block at a time and compute them twice

    @property
    def profile(self) -> profiles.Profile:
        """What the graph may use."""
        raise NotImplementedError

    @property
    def device(self) -> str:
        """ggml's name of the device that computes."""
        return self.profile.device

    def thread_count(self) -> int:
        """Threads of the CPU."""
        return self.threads or min(available_cores(), MAX_THREADS)

    def check_plan(self, plan: Plan) -> None:
        from toyexp_ggml.limits import beyond

        if reason := beyond(plan):
            raise UserError(f"engine={self.name}: {reason}")

    def preload(self) -> None:
        require_ggml()
        import toyexp_ggml.session  # noqa: F401

    def realize(self, plan: Plan) -> Session:
        self.check()
        from toyexp_ggml.session import GGMLSession

        threads, fewer = self.thread_count(), not self.threads
        return GGMLSession(plan, self.device, self.profile, threads, self.recompute, fewer).open()


@dataclass
class GGMLCPU(GGMLEngine):
    """A static ggml graph on the CPU; starts in a fraction of PyTorch's time."""

    name: ClassVar[str] = "ggml"
    priority: ClassVar[int] = 10

    blas: bool = True  # give the large matrix products to BLAS, where ggml-python was built with it

    @property
    def profile(self) -> profiles.Profile:
        from toyexp_ggml.binding import devices

        return profiles.CPU_BLAS if self.blas and "BLAS" in devices() else profiles.CPU

    def warnings(self, preview: RunPreview) -> Iterable[str]:
        from toyexp_ggml.binding import devices

        yield from super().warnings(preview)
        if not self.blas and "BLAS" not in devices():
            yield "engine.blas=false: this ggml-python is built without BLAS, so it changes nothing"

    def check(self) -> str:
        check_threads(self.threads)
        require_ggml()
        with_blas = "with" if self.profile is profiles.CPU_BLAS else "without"
        return f"ggml on the CPU {with_blas} BLAS, {pluralise(self.thread_count())}"

    def advice(self) -> list[str]:
        from toyexp_ggml.native import missing

        slow = "" if has_all(with_blas=can_build_blas()) else "this build of ggml-python is slow; see `toyexp doctor`"
        copies = f"transposed copies are slower than they could be: {why}" if (why := missing()) else ""
        return [line for line in (self.threads and crowding_note(self.threads), slow, copies) if line]

    def remedies(self) -> list[str]:
        linux = platform.system() == "Linux"
        if has_all(with_blas=linux):
            return self.advice()
        first = "install Debian's libopenblas-openmp-dev and " if linux and not can_build_blas() else ""
        command = rebuild("-DGGML_BLAS=ON -DGGML_BLAS_VENDOR=OpenBLAS" if linux else "")
        mended = f"slower than it could be, {first}build ggml-python again: {command}"
        return [*(line for line in self.advice() if "ggml-python" not in line), mended]


def can_build_blas() -> bool:
    """Whether OpenBLAS is there to be built in."""
    return platform.system() == "Linux" and any(HEADERS.glob(OPENBLAS))


def has_all(with_blas: bool) -> bool:
    """Whether this build of ggml-python lacks none of its fast products."""
    from toyexp_ggml.binding import devices, has_llamafile

    return has_llamafile() and not (with_blas and "BLAS" not in devices())


@dataclass
class GGMLGPU(GGMLEngine):
    """What the GPUs share."""

    on_gpu: ClassVar[bool] = True
    needs: ClassVar[tuple[str, str]]  # operating system ("" for any), and CMake's flag that builds it in
    products: ClassVar[str] = "float16"  # what ggml's own kernels for matrix products round to
    rounding: ClassVar[str] = ""  # the setting that lets them round more

    threads: int = 0  # cores of the CPU, which computes what the GPU refuses, or all if emulated; 0: all there are
    emulate: bool = False  # run the very graph the GPU would get on the CPU, for tests

    def warnings(self, preview: RunPreview) -> Iterable[str]:
        yield from super().warnings(preview)
        if self.emulate and getattr(self, key := self.rounding, False):
            yield f"engine.{key}=true: is of products on the GPU; engine.emulate=true computes them on the CPU"
        if self.threads and not self.emulate:
            yield f"engine.threads={self.threads}: are the CPU's, which computes only what {self.name}'s GPU refuses"

    def rounds_to(self) -> str:
        return "float32" if self.emulate else self.products

    @property
    def device(self) -> str:
        """The GPU, or the CPU that stands in for it."""
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
        from toyexp_ggml.binding import built_with, devices

        for found, description in devices().items():
            if found.startswith(self.profile.device):
                return f"ggml on {name}: {description}"
        if built_with(self.profile.device):
            raise Unavailable(f"ggml-python has {name}, but finds no such device here{self.hint()}")
        raise Unavailable(f"this ggml-python is built without {name}; build it again: {rebuild(flag)}")

    def hint(self) -> str:
        """What else may be told where no device is found."""
        return ""


@dataclass
class GGMLMetal(GGMLGPU):
    """A static ggml graph on the GPU of Apple silicon."""

    name: ClassVar[str] = "metal"
    priority: ClassVar[int] = 25
    profile: ClassVar[profiles.Profile] = profiles.METAL
    needs: ClassVar[tuple[str, str]] = ("Darwin", "-DGGML_METAL=ON")

    def check(self) -> str:
        """The device; that of a virtual machine is there, and lacks what ggml's kernels need."""
        note = super().check()
        if self.emulate:
            return note
        from toyexp_ggml.probe import refused

        if ops := sorted(refused(self.profile.device)):
            raise Unavailable(f"{note}, which does not compute {', '.join(ops)}; use engine=ggml")
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
    products: ClassVar[str] = "tf32"  # of a few rows, whatever cuBLAS does with the others

    tf32: bool = False  # let matrix products round their inputs to TF32 (10-bit mantissa)

    _was_allowed: ClassVar[bool] = False

    def gpus(self) -> int | None:
        return 0 if self.emulate else 1

    def check(self) -> str:
        """The device. ggml asks cuBLAS for TF32; only a variable that is read once in a process says no."""
        note = super().check()
        if self.emulate:
            return note
        forbidden = os.environ.get(OVERRIDE) == "0"
        torch: Any = sys.modules.get("torch")  # which may have computed on the GPU already, in this process
        computed = torch is not None and torch.cuda.is_initialized() and torch.cuda.max_memory_allocated() > 0
        too_late = not forbidden and (GGMLCUDA._was_allowed or computed)
        if forbidden if self.tf32 else too_late:
            raise UserError(
                f"engine.tf32={str(self.tf32).lower()}: cuBLAS is told once in a process, and was told otherwise "
                f"({OVERRIDE}); {ONE_OF_TWO.format('ggml_cuda', 'tf32=true')}"
            )
        if self.tf32:
            GGMLCUDA._was_allowed = True
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

    half: bool = False  # let matrix products round their inputs to float16, which many GPUs multiply faster

    _claimed: ClassVar[bool | None] = None  # which of the two this process has ggml open the device for
    _is_exact: ClassVar[bool] = False  # whether that was seen to hold

    @property
    def profile(self) -> profiles.Profile:
        """Float32's, or the one whose gradients are scaled on the way."""
        return profiles.VULKAN_HALF if self.half else profiles.VULKAN

    def rounds_to(self) -> str:
        return "float16" if self.half and not self.emulate else "float32"

    def check(self) -> str:
        note = super().check()
        if self.emulate:
            return note
        if self.half and NO_HALF in os.environ:
            raise UserError(f"engine.half=true: {NO_HALF} is set in the environment and forbids it; unset it")
        if GGMLVulkan._claimed not in (None, self.half):
            raise UserError(
                f"engine.half={str(self.half).lower()}: ggml opens a Vulkan device with float16 or without, once in a "
                f"process; {ONE_OF_TWO.format('vulkan', 'half=true')}"
            )
        GGMLVulkan._claimed = self.half
        software = ", software on the CPU" if any(name in note for name in SOFTWARE) else ""
        return f"{note}{software}, products in {self.rounds_to()}"

    def hint(self) -> str:
        """How ggml takes a device in software, and what narrows its search."""
        if visible := os.environ.get(VISIBLE):
            return f"; {VISIBLE}={printable(visible)} has to be numbers of devices that are here, such as 0 or 0,1"
        return f"; a device in software is taken where {VISIBLE} names it, as {VISIBLE}=0 does"

    def realize(self, plan: Plan) -> Session:
        """A session on this device; UserError where ggml had opened it for float16 before, in this process."""
        if self.half or self.emulate:
            return super().realize(plan)
        self.check()
        with _set(*EXACT):  # while ggml opens the device, and not for what else this process may start
            if not GGMLVulkan._is_exact:
                from toyexp_ggml.probe import rounds_products

                if rounds_products(self.device):
                    raise UserError(
                        "engine.half=false: this process has opened the device for float16 already, without toyexp; "
                        "run this in a process of its own"
                    )
                GGMLVulkan._is_exact = True
            return super().realize(plan)


@contextmanager
def _set(*variables: str) -> Iterator[None]:
    """With variables of the environment set that may be set already."""
    missing = [name for name in variables if name not in os.environ]
    os.environ.update(dict.fromkeys(missing, "1"))
    try:
        yield
    finally:
        for name in missing:
            os.environ.pop(name, None)
