"""The ggml engines: their settings, and whether they work here. ggml itself is imported only when used."""

from __future__ import annotations

import importlib.util
import platform
from dataclasses import dataclass
from typing import ClassVar

from toyexp import Engine, Plan, Session, Unavailable, UserError
from toyexp.threads import available_cores, calm_threads
from toyexp_ggml import profiles


def require_ggml() -> None:
    """Raises Unavailable unless ggml-python can be imported."""
    if importlib.util.find_spec("ggml") is None:
        raise Unavailable("ggml-python is not installed: pip install 'toyexp[ggml]' (needs a C compiler)")


@dataclass
class GGMLEngine(Engine):
    """What the ggml devices share."""

    threads: int = 0  # cores to use; 0: all that this process may use
    recompute: bool = False  # hold the activations of one block at a time and compute them twice

    @property
    def device(self) -> str:
        """ggml's name of the device that computes."""
        return self.profile.device

    @property
    def profile(self) -> profiles.Profile:
        """What the graph may use."""
        raise NotImplementedError

    def thread_count(self) -> int:
        """Threads of the CPU."""
        return self.threads or available_cores()

    def check_settings(self) -> None:
        """Raises UserError for settings that cannot work, Unavailable without ggml-python."""
        if self.threads < 0:
            raise UserError(f"engine.threads={self.threads}: must be 0 (all cores) or above")
        require_ggml()
        calm_threads()  # before anything imports ggml

    def realize(self, plan: Plan) -> Session:
        """A session on this device; raises Unavailable when the device is not here."""
        self.check()
        from toyexp_ggml.session import GGMLSession

        return GGMLSession(plan, self)


@dataclass
class GGMLCPU(GGMLEngine):
    """A static ggml graph on the CPU; starts in a fraction of PyTorch's time."""

    name: ClassVar[str] = "ggml"
    priority: ClassVar[int] = 10

    blas: bool = True  # give the large matrix products to BLAS, where ggml-python was built with it

    @property
    def profile(self) -> profiles.Profile:
        """The CPU's, with or without BLAS."""
        from toyexp_ggml.binding import devices

        return profiles.CPU_BLAS if self.blas and "BLAS" in devices() else profiles.CPU

    def check(self) -> str:
        """The number of threads, and whether BLAS is there."""
        self.check_settings()
        with_blas = " with BLAS" if self.profile is profiles.CPU_BLAS else ""
        return f"ggml on the CPU{with_blas}, {self.thread_count()} threads"


@dataclass
class GGMLMetal(GGMLEngine):
    """A static ggml graph on the GPU of Apple silicon."""

    name: ClassVar[str] = "metal"
    priority: ClassVar[int] = 25

    emulate: bool = False  # run the very graph Metal would get on the CPU, for tests

    @property
    def device(self) -> str:
        """Metal, or the CPU that stands in for it."""
        return "CPU" if self.emulate else "Metal"

    @property
    def profile(self) -> profiles.Profile:
        """Metal's."""
        return profiles.METAL

    def check(self) -> str:
        """The device."""
        self.check_settings()
        if self.emulate:
            return f"Metal's graph, emulated on the CPU with {self.thread_count()} threads"
        if platform.system() != "Darwin":
            raise Unavailable(
                f"Metal needs macOS; this is {platform.system()}. Use engine=ggml, or engine.emulate=true for a test"
            )
        from toyexp_ggml.binding import devices

        if not any(d.startswith("Metal") for d in devices()):
            raise Unavailable(
                "this ggml-python is built without Metal; build it again: CMAKE_ARGS=-DGGML_METAL=ON "
                "pip install --force-reinstall --no-binary ggml-python ggml-python"
            )
        return "ggml on Metal"
