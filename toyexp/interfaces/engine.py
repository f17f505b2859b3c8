"""Base class of engines, which execute plans."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from toyexp.base.errors import UserError
from toyexp.base.memory import available_bytes
from toyexp.base.ranks import started_ranks
from toyexp.interfaces.plan import Plan
from toyexp.interfaces.run_preview import RunPreview

if TYPE_CHECKING:
    from toyexp.interfaces.session import Session
    from toyexp.interfaces.stack import Stack


@dataclass
class Engine(ABC):
    """Base of all engines: subclass it as a dataclass whose fields are its settings."""

    plugin_kind: ClassVar[str] = "engine"
    name: ClassVar[str]  # the value of `engine=` that selects it
    priority: ClassVar[int] = 0  # `engine=auto` selects the engine with the highest priority that works here
    own_memory: ClassVar[bool] = False  # True: its device has its own memory, separate from the host's
    on_gpu: ClassVar[bool] = False  # True: it computes on a GPU
    device_variable: ClassVar[str] = ""  # variable such as CUDA_VISIBLE_DEVICES; empty: none

    @abstractmethod
    def check(self) -> str:
        """Return one line about the device if the engine works on this machine.

        Raise Unavailable, with the remedy in the message, if it does not.
        """

    def warnings(self, preview: RunPreview) -> Iterable[str]:
        """Return a one-sentence warning for each setting that has no effect, or an unintended one, in this run."""
        return ()

    def advice(self) -> list[str]:
        """Return short tips, one line each, that would make the engine faster on this machine."""
        return []

    def remedies(self) -> list[str]:
        """Return the tips that `toyexp doctor` prints. Unlike those of `advice`, they may contain commands to type."""
        return self.advice()

    def product_dtype(self) -> str:
        """Return the precision of matrix products: float64, float32, tf32, float16 or bfloat16."""
        return "float32"

    def check_rows(self, rows: int, accumulate: int) -> None:  # noqa: B027 - optional, as below
        """Raise UserError if the engine cannot take a step on `accumulate` micro-batches of `rows` rows each."""

    def check_plan(self, plan: Plan) -> None:  # noqa: B027 - optional on purpose: most engines take any size
        """Raise UserError if the plan exceeds the engine's limits. Called before anything is allocated."""

    def free_bytes(self) -> int | None:
        """Return the bytes of device memory available to a run, or None if unknown."""
        return available_bytes()

    def gpus(self) -> int | None:
        """Return how many of the machine's NVIDIA GPUs a run uses, or None for all. This method must not open a GPU."""
        return 0

    def preload(self) -> None:  # noqa: B027 - optional on purpose: it saves time
        """Import the libraries that a run needs. Jobs of a sweep are forked from a process that called this method.

        The method must not open a device, compute anything or start threads, because forked processes could not go on
        using the device or the threads.
        """

    def preload_stack(self) -> None:
        """Import the libraries that stacked runs need, under the same conditions as `preload`."""
        self.preload()

    def open_device_early(self) -> None:  # noqa: B027 - optional on purpose: it saves time
        """Start to open the device in a background thread, after `check` has succeeded.

        Ignore errors, because the first use of the device raises them again.
        """

    def generation_engine(self) -> Engine:
        """Return the engine to generate a single sequence with: this one, or a copy limited to the first device."""
        return self

    def processes(self) -> int:
        """Return the number of CPU processes of a run.

        When toyexp runs jobs in parallel, it reserves a core for each of these processes.
        """
        return 1

    def follow(self) -> None:
        """Run as a worker process of a distributed run until the run ends.

        Return at once on rank 0, and in a run of a single process. Raise UserError if `torchrun` has started several
        processes but the engine supports only one.
        """
        if started_ranks().count > 1:
            raise UserError(f"engine={self.name}: runs in one process only; start it without torchrun")

    @abstractmethod
    def realize(self, plan: Plan) -> Session:
        """Return an open session whose tensors hold the initial values: `return MySession(plan).open()`."""

    def stack_conflict(self, plans: Sequence[Plan]) -> str:
        """Return a sentence on why these plans cannot be trained together as one program, or "" if they can."""
        return f"engine={self.name}: does not support stacked runs"

    def stack_bytes(self, plan: Plan) -> int | None:
        """Return the peak device memory that each run of a stack needs, in bytes; None if unknown.

        The peak includes weights, gradients, optimiser state and activations, but not frozen tensors.
        """
        return None

    def realize_stack(self, plans: Sequence[Plan]) -> Stack:
        """Return a stack with an open session for each plan; their training steps run as one program.

        Raise UserError if `stack_conflict` returns a reason. Each session returns the same results as a separate run,
        except for rounding due to the order of sums. NaNs in one session, or closing it, do not affect the other
        sessions.
        """
        raise UserError(self.stack_conflict(plans))
