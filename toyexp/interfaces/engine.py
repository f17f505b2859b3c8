"""Engine: a way to run a Plan, and what it says of itself before it runs one."""

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
    """Base of all engines, ways to run a Plan: subclass it as a dataclass whose fields are its settings."""

    plugin_kind: ClassVar[str] = "engine"
    name: ClassVar[str]  # what `engine=` takes
    priority: ClassVar[int] = 0  # `engine=auto` picks the highest that works here
    own_memory: ClassVar[bool] = False  # its device has memory of its own, beside the machine's
    on_gpu: ClassVar[bool] = False  # it computes on a GPU
    device_variable: ClassVar[str] = (
        ""  # the environment's variable that says which of the machine's devices it sees, if any
    )

    @abstractmethod
    def check(self) -> str:
        """One line about the device when the engine works here; raises Unavailable with the remedy when not."""

    def warnings(self, preview: RunPreview) -> Iterable[str]:
        """A sentence for each of its settings that has no effect in this run, or cannot have the one it is for."""
        return ()

    def advice(self) -> list[str]:
        """What would make it faster here, a short line each; empty when there is nothing to say."""
        return []

    def remedies(self) -> list[str]:
        """The same for `toyexp doctor`, where a line has room for a command."""
        return self.advice()

    def rounds_to(self) -> str:
        """The type that its matrix products round to: float64, float32, tf32, float16 or bfloat16."""
        return "float32"

    def check_rows(self, rows: int, accumulate: int) -> None:  # noqa: B027 - optional, as below
        """Raises UserError for steps of `accumulate` micro-batches of so many rows; before the data is opened."""

    def check_plan(self, plan: Plan) -> None:  # noqa: B027 - optional on purpose: most engines take any size
        """Raises UserError for a plan that is beyond what the engine can hold, before anything is made of it."""

    def free_bytes(self) -> int | None:
        """Bytes that its device has left for what a run computes; None where it does not say."""
        return available_bytes()

    def gpus(self) -> int | None:
        """How many of the machine's NVIDIA GPUs a run on it takes; None: all. No question to the device: see check."""
        return 0

    def preload(self) -> None:  # noqa: B027 - optional on purpose: it saves time
        """Imports what a run on it computes with: the jobs of a sweep are forked from a process that has done so once.

        No device is asked for, nothing is computed and no thread started: neither would live on in them.
        """

    def preload_stack(self) -> None:
        """The same of what trains several runs as one program."""
        self.preload()

    def wake(self) -> None:  # noqa: B027 - optional on purpose: it saves time
        """Begins to open its device beside what is done before it is needed, in a process that is to train on it.

        Called once `check` has found nothing wrong; what goes wrong here is left to whoever needs the device to say.
        """

    def generation_engine(self) -> Engine:
        """The engine that writes text, one row of it: itself, or its first device alone where it has several."""
        return self

    def processes(self) -> int:
        """How many processes a run on it is that compute on the CPU: jobs side by side have a core for each of them."""
        return 1

    def follow(self) -> None:
        """Take part in the run of rank 0 until it ends; on rank 0, and in a run of one process, return at once.

        Raises UserError if the engine computes in one process and `torchrun` has started several.
        """
        if started_ranks().count > 1:
            raise UserError(f"engine={self.name}: computes in one process; start it without torchrun")

    @abstractmethod
    def realize(self, plan: Plan) -> Session:
        """An open session, whose tensors hold the plan's initial values: `return MySession(plan).open()`."""

    def stack_conflict(self, plans: Sequence[Plan]) -> str:
        """Why sessions of these plans cannot take their training steps together, in words; empty where they can."""
        return f"engine={self.name}: takes the steps of one run at a time"

    def stack_bytes(self, plan: Plan) -> int | None:
        """What a run takes of its device's memory in a stack, beside tensors that do not train; None: it cannot say.

        Its weights, gradients and optimiser's state, and what a step holds of it at most.
        """
        return None

    def realize_stack(self, plans: Sequence[Plan]) -> Stack:
        """Open sessions of plans that are not `unstackable`, one each, whose training steps are one program.

        Each takes its part of a step as its session alone would take it but for the order of sums; bad numbers of one
        touch no other, nor does closing one. In everything else they are sessions like any. Raises UserError for plans
        that cannot be stacked.
        """
        raise UserError(self.stack_conflict(plans))
