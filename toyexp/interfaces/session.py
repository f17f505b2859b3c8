"""Session: a Plan with its numbers on a device, its states and its errors.

A session is NEW until it is opened, REALIZED when its tensors exist and may still be replaced (the warm window), BUILT
once `build()` has baked the training step, and CLOSED at the end. Every public method here checks the state, the names
and the shapes, so an engine implements only the `do_*` methods and can trust what reaches them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, ClassVar, NamedTuple, Self, TypeVar, final

import numpy as np

from toyexp.base.attribution import call_checked
from toyexp.base.errors import BadBatch, PluginFailed, SessionError, suggest
from toyexp.interfaces.dataset import Batch
from toyexp.interfaces.decoder import Decoder, Recompute
from toyexp.interfaces.micro_batches import HeldOut, PreparedBatch, micro_batches, pad_batch
from toyexp.interfaces.optimiser import AdamW
from toyexp.interfaces.plan import Plan, PlanTensor
from toyexp.interfaces.snapshot import slot_name, state_misfit

X = TypeVar("X")


class State(Enum):
    """Where a session is in its life."""

    NEW = "new"
    REALIZED = "realized"
    BUILT = "built"
    CLOSED = "closed"


class StepMetrics(NamedTuple):
    """What a training step reports: the batch's loss before the update, and the gradient's global norm."""

    loss: float
    grad_norm: float


class StepInput(NamedTuple):
    """A step's batch in micro-batches whose weights together sum to 1, and the optimiser's numbers of each group."""

    micros: Sequence[Batch]
    numbers: Sequence[np.ndarray]


def _for_groups(plan: Plan, numbers: Sequence[np.ndarray] | np.ndarray) -> Sequence[np.ndarray]:
    """A vector of finite numbers for each group of the plan; AdamW's seven are spread over the groups.

    Raises SessionError for what is neither. What does not decay (norms, biases) has a decay of 0 in its seven.
    """
    groups = plan.updates
    if isinstance(numbers, np.ndarray):
        if not all(isinstance(group.rule, AdamW) for group in groups):
            raise SessionError("step(): the plan has another optimiser than AdamW: it takes plan.numbers(step, lr)")
        if numbers.shape != (7,):
            raise SessionError(f"step(): hp has the shape {list(numbers.shape)}, expected [7]")
        keeps = np.where(np.arange(7) == 4, 0.0, numbers)
        numbers = [numbers if plan.tensor(group.tensors[0]).has_weight_decay else keeps for group in groups]
    if len(numbers) != len(groups):
        raise SessionError(f"step(): numbers for {len(numbers)} groups, and the plan has {len(groups)}")
    for vector in numbers:
        if not math.isfinite(sum(vector.tolist())) and not all(map(math.isfinite, vector.tolist())):
            raise SessionError(f"step(): its numbers are not finite: {', '.join(f'{x:g}' for x in vector)}")
    return numbers


class Session(ABC):
    """A realized plan: made, then opened. Use it as a context manager, or call `close()`."""

    plugin_kind: ClassVar[str] = "engine"  # by which its errors are told

    def __init__(self, plan: Plan):
        self.plan = plan
        self.state = State.NEW
        self.version = 0  # counts what makes a decoder's memory of earlier positions worthless
        self._by_name = {t.name: t for t in plan.tensors}
        self._state_is_set = False

    # -- the life of a session ----------------------------------------------------------------------------------

    @final
    def open(self) -> Self:
        """Makes the tensors, with the plan's initial values; closes the session where that fails."""
        self._require(State.NEW, "open()")
        try:
            self.do_open()
            self.state = State.REALIZED
            for tensor in self.plan.tensors:
                self.do_load(tensor)
        except BaseException:
            self.close()
            raise
        return self

    @final
    def upload(self, name: str, array: np.ndarray, source: str = "the caller") -> None:
        """Replaces a tensor's values with `array` (its exact shape); only while the warm window is open."""
        what = f"upload of {name} from {source}"
        if self.state is State.NEW:
            self._require(State.REALIZED, what)
        if self.state is not State.REALIZED:
            raise SessionError(f"{what}: the warm window closed at build(); upload before it")
        tensor = self._tensor(name, f"upload from {source}")
        if tuple(array.shape) != tensor.shape:
            raise SessionError(f"{what}: expected shape {list(tensor.shape)}, got {list(array.shape)}")
        self.do_upload(tensor, np.ascontiguousarray(array, np.float32))

    @final
    def build(self) -> None:
        """Closes the warm window and bakes forward, loss, backward and the optimiser into the training step.

        A plan that trains nothing has no step: its session only evaluates.
        """
        self._require(State.REALIZED, "build()")
        self.do_build()
        self.state = State.BUILT

    @final
    def step(self, batch: Batch, numbers: Sequence[np.ndarray] | np.ndarray) -> StepMetrics:
        """Take one step of the optimiser on `batch`; the first call starts from a state of zeros.

        `numbers` are those of `plan.numbers(step, lr)`, or AdamW's seven for a plan that AdamW alone trains.
        """
        given = self.step_input(batch, numbers)
        self.begin_step()
        return self.do_launch(*given)()

    @final
    def step_input(self, batch: Batch, numbers: Sequence[np.ndarray] | np.ndarray) -> StepInput:
        """Check what a step is given, and cut the batch into micro-batches; raises BadBatch for one that is none."""
        self._require_training("step()")
        numbers = _for_groups(self.plan, numbers)
        if isinstance(batch, PreparedBatch) and batch.plan is self.plan:
            micros: Sequence[Batch] = batch.micros
        else:
            micros = micro_batches(self.plan, batch)
        if len(micros) != self.plan.accumulate:
            wanted = self.plan.accumulate * self.plan.rows
            raise BadBatch(f"step(): a batch of {len(batch['targets'])} rows, expected {wanted}")
        return StepInput(micros, numbers)

    @final
    def begin_step(self) -> None:
        """Count a step whose input was checked; before the first one the optimiser's state is set to zeros."""
        self._require_training("step()")
        self._prepare_state()
        self.version += 1

    @final
    def evaluate(self, batches: Iterable[Batch]) -> float:
        """The mean loss over all weighted targets of `batches`; changes nothing."""
        self._require(State.BUILT, "evaluate()")
        micros = HeldOut(self.plan, batches)
        total = 0.0
        for micro in micros:
            total += self.do_loss(micro)
        return micros.mean(total)

    @final
    def logits(self, batch: Batch) -> np.ndarray:
        """The float32 logits of the inputs in `batch`, [rows, ..., V].

        Any number of rows: they are computed as many at a time as the plan has. Where rows are missing, or are shorter
        than the plan's, they are padded for the computation and cut off again.
        """
        self._require(State.BUILT, "logits()")
        count = max((len(array) for array in batch.values()), default=0)
        cuts = range(0, max(count, 1), self.plan.rows)
        parts = [self._padded_logits({k: v[i : i + self.plan.rows] for k, v in batch.items()}) for i in cuts]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    @final
    def decoder(self) -> Decoder:
        """What reads a sequence of tokens piece by piece, with the present weights; raises for other models."""
        self._require(State.BUILT, "decoder()")
        model = self.plan.model
        ids, targets = (self.plan.inputs.get(name) for name in (model.reads.sequence, "targets"))
        if ids is None or targets is None or ids.shape != targets.shape:
            raise SessionError(f"decoder(): model={model.name} does not continue a sequence of tokens")
        return self.do_decoder()

    @final
    def gradients(self, batch: Batch) -> dict[str, np.ndarray]:
        """The gradient of the batch's loss for every trainable tensor, before clipping; changes nothing."""
        self._require_training("gradients()")
        return self.do_gradients(micro_batches(self.plan, batch))

    @final
    def download(self, name: str) -> np.ndarray:
        """A tensor's present values, float32."""
        if self.state in (State.NEW, State.CLOSED):
            raise SessionError(f"download of {name}: the session is {self.state.value}")
        return self.do_download(self._tensor(name, "download"))

    @final
    def snapshot(self, into: Mapping[str, np.ndarray] | None = None) -> Mapping[str, np.ndarray]:
        """A copy of all that training changes: each trainable tensor, and its optimiser's state as `<name>@<slot>`.

        The numbers keep the engine's own precision, so that `restore` brings back the very bits. `into`, an earlier
        snapshot of this session that nobody needs any more, is overwritten where the engine can, which is faster.
        """
        self._require(State.BUILT, "snapshot()")
        if into is not None and (misfit := state_misfit(self.plan, into)):
            raise SessionError(f"snapshot(): {misfit}")
        self._prepare_state()
        found = call_checked(Mapping, self.do_snapshot, into or {})
        if fault := state_misfit(self.plan, found):
            raise PluginFailed(f"{type(self).__name__}.do_snapshot(): {fault}")
        return found

    @final
    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Puts back what `snapshot` gave, here or on another engine; raises SessionError when it does not fit."""
        self._require(State.BUILT, "restore()")
        misfit = state_misfit(self.plan, arrays)
        if misfit:
            raise SessionError(f"restore(): {misfit}")
        self._prepare_state()
        self.version += 1
        for tensor in self.plan.trainable:
            slots = {slot: slot_name(tensor.name, slot) for slot in self.plan.slots(tensor)}
            state = {slot: np.ascontiguousarray(arrays[name]) for slot, name in slots.items()}
            self.do_restore(tensor, np.ascontiguousarray(arrays[tensor.name]), state)

    @final
    def close(self) -> None:
        """Frees everything; closing twice is harmless."""
        if self.state is not State.CLOSED:
            self.state = State.CLOSED
            self.version += 1
            self.do_close()

    def __enter__(self) -> Self:
        return self.require_open()

    @final
    def require_open(self) -> Self:
        """Itself; raises SessionError for one that `Engine.realize` made and did not open."""
        if self.state is State.NEW:
            name = type(self).__name__
            raise SessionError(f"realize() gave a {name} that is not open; it returns Session(plan).open()")
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def describe(self) -> dict[str, Any]:
        """What run_start records about the engine: device, threads, precision."""
        return {}

    def device_bytes(self) -> int | None:
        """The most that its tensors and graphs have taken of its device's memory; None where nobody counts that."""
        return None

    def notes(self) -> Iterable[str]:
        """What a person should know of how it computes this plan, a line each, before the first step."""
        return ()

    @final
    def name_arrays(self, values: Mapping[str, X], states: Mapping[str, Mapping[str, X]]) -> dict[str, X]:
        """What stands in `values` and `states` for the trainable tensors, by the names of a snapshot."""
        found: dict[str, X] = {}
        for tensor in self.plan.trainable:
            found[tensor.name] = values[tensor.name]
            found |= {slot_name(tensor.name, slot): value for slot, value in states[tensor.name].items()}
        return found

    # -- what an engine implements ------------------------------------------------------------------------------

    @abstractmethod
    def do_open(self) -> None:
        """Allocates what holds the tensors; their values follow, one by one, through `do_load`."""

    def do_load(self, tensor: PlanTensor) -> None:
        """Gives the tensor its initial values; an engine may take those of a file as they stand there."""
        self.do_upload(tensor, self.plan.initial_values(tensor))

    @abstractmethod
    def do_upload(self, tensor: PlanTensor, array: np.ndarray) -> None:
        """Stores a contiguous float32 array as the tensor's values."""

    @abstractmethod
    def do_build(self) -> None:
        """Prepares the training step."""

    @abstractmethod
    def do_reset_state(self) -> None:
        """Sets the optimiser's state to zeros."""

    @abstractmethod
    def do_step(self, micros: Sequence[Batch], numbers: Sequence[np.ndarray]) -> StepMetrics:
        """Sums the gradients of the micro-batches, clips, updates. The weights of all micros together sum to 1.

        `numbers` has a vector for each group of `plan.updates`. Where the plan says `skip_nonfinite`, a loss or norm
        that is not finite leaves weights and state as they are.
        """

    def do_launch(self, micros: Sequence[Batch], numbers: Sequence[np.ndarray]) -> Callable[[], StepMetrics]:
        """Begin such a step and return what waits for it, in an engine whose device computes beside the host."""
        metrics = self.do_step(micros, numbers)
        return lambda: metrics

    @property
    def depth(self) -> int:
        """How many steps may be under way: 2 where the device has a queue of its own; a stack may take half at once."""
        return 1

    @abstractmethod
    def do_loss(self, micro: Batch) -> float:
        """The weighted sum of the losses of one micro-batch, without training."""

    @abstractmethod
    def do_logits(self, micro: Batch, rows: int) -> np.ndarray:
        """The logits of the first `rows` rows of a micro-batch."""

    def do_decoder(self) -> Decoder:
        """A decoder; an engine that can keep what it computed of earlier positions has a faster one."""
        return Recompute(self)

    @abstractmethod
    def do_gradients(self, micros: Sequence[Batch]) -> dict[str, np.ndarray]:
        """The summed gradient of every trainable tensor, by name."""

    @abstractmethod
    def do_download(self, tensor: PlanTensor) -> np.ndarray:
        """A float32 copy of the tensor's values."""

    @abstractmethod
    def do_snapshot(self, into: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Copies of all that training changes, as `named` gives it, in the engine's precision.

        `into` is empty, or what an earlier call gave: its arrays may be overwritten and returned.
        """

    @abstractmethod
    def do_restore(self, tensor: PlanTensor, values: np.ndarray, state: Mapping[str, np.ndarray]) -> None:
        """Sets a trainable tensor's values and state, from arrays of any float type."""

    @abstractmethod
    def do_close(self) -> None:
        """Frees what the session holds; one whose opening failed may hold a part."""

    # -- checks -------------------------------------------------------------------------------------------------

    def _prepare_state(self) -> None:
        if not self._state_is_set:
            self.do_reset_state()
            self._state_is_set = True

    def _require(self, state: State, call: str) -> None:
        if self.state is state:
            return
        advice = {State.NEW: "; call open() first", State.REALIZED: "; call build() first"}.get(self.state, "")
        raise SessionError(f"{call}: the session is {self.state.value}, expected {state.value}{advice}")

    def _require_training(self, call: str) -> None:
        self._require(State.BUILT, call)
        if not self.plan.trainable:
            raise SessionError(f"{call}: the plan trains nothing")

    def _tensor(self, name: str, what: str) -> PlanTensor:
        try:
            return self._by_name[name]
        except KeyError:
            raise SessionError(f"{what}: no tensor {name!r} in the plan; {suggest(name, self._by_name)}") from None

    def _padded_logits(self, batch: Batch) -> np.ndarray:
        full, kept = pad_batch(self.plan, batch)
        return np.ascontiguousarray(self.do_logits(full, len(kept[0]))[tuple(slice(len(k)) for k in kept)])
