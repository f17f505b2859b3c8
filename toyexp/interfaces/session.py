"""Base class of sessions. A session holds the tensors of a plan on a device, and trains and evaluates them.

A new session is NEW. `open()` creates its tensors and makes it REALIZED; `upload` may then replace their values.
`build()` prepares the training step and makes it BUILT, and `close()` makes it CLOSED. Every public method checks the
session's state and its arguments; an engine implements only the `do_*` methods, whose arguments are valid.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, ClassVar, NamedTuple, Self, TypeVar, final

import numpy as np

from toyexp.base.attribution import call_checked
from toyexp.base.errors import BadBatch, PluginFailed, SessionError, suggest
from toyexp.interfaces.dataset import Batch
from toyexp.interfaces.decoder import Decoder, Recompute
from toyexp.interfaces.micro_batches import HeldOut, PreparedBatch, micro_batches, pad_batch
from toyexp.interfaces.optimiser import EVAL_OFFSET, AdamW
from toyexp.interfaces.plan import Plan, PlanTensor
from toyexp.interfaces.snapshot import average_weights, slot_name, state_misfit

X = TypeVar("X")


class State(Enum):
    """Lifecycle state of a session."""

    NEW = "new"
    REALIZED = "realized"
    BUILT = "built"
    CLOSED = "closed"


class StepMetrics(NamedTuple):
    """Loss of the batch before the update, and global norm of the gradient before clipping."""

    loss: float
    grad_norm: float


class StepInput(NamedTuple):
    """Input of a step: micro-batches whose target weights sum to 1, and the update scalars of each parameter group."""

    micros: Sequence[Batch]
    numbers: Sequence[np.ndarray]


def _numbers_per_group(plan: Plan, numbers: Sequence[np.ndarray] | np.ndarray) -> Sequence[np.ndarray]:
    """Return a vector of finite scalars for each parameter group of the plan.

    `numbers` is either a sequence of these vectors, or a single vector with AdamW's seven scalars. Every group gets the
    single vector; for norms and biases its weight decay is set to 0. Raise SessionError for anything else.
    """
    groups = plan.updates
    if isinstance(numbers, np.ndarray):
        if not all(isinstance(group.rule, AdamW) for group in groups):
            raise SessionError("step(): the plan's optimiser is not AdamW: pass plan.numbers(step, lr)")
        if numbers.shape != (7,):
            raise SessionError(f"step(): numbers have shape {list(numbers.shape)}, expected [7]")
        without_decay = np.where(np.arange(7) == 4, 0.0, numbers)
        decays = [plan.tensor(group.tensors[0]).has_weight_decay for group in groups]
        numbers = [numbers if decay else without_decay for decay in decays]
    if len(numbers) != len(groups):
        raise SessionError(f"step(): got numbers for {len(numbers)} groups, expected {len(groups)}")
    for vector in numbers:
        if not math.isfinite(sum(vector.tolist())) and not all(map(math.isfinite, vector.tolist())):
            raise SessionError(f"step(): numbers are not finite: {', '.join(f'{x:g}' for x in vector)}")
    return numbers


class Session(ABC):
    """A plan with its tensors on a device. Use it as a context manager, or call `close()`."""

    plugin_kind: ClassVar[str] = "engine"  # kind of plugin that error messages name

    def __init__(self, plan: Plan):
        self.plan = plan
        self.state = State.NEW
        self.version = 0  # incremented when weights change, which invalidates decoder caches
        self._by_name = {t.name: t for t in plan.tensors}
        self._state_is_set = False
        self._has_average = any(EVAL_OFFSET in plan.slots(t) for t in plan.trainable)
        self._raw: Mapping[str, np.ndarray] | None = None  # snapshot of the weights that an average replaces
        self._spare: Mapping[str, np.ndarray] = {}  # arrays of an earlier `_raw`, to be overwritten

    # -- the life of a session ----------------------------------------------------------------------------------

    @final
    def open(self) -> Self:
        """Create the tensors with the plan's initial values. Close the session if that fails."""
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
        """Replace the values of the tensor `name` with `array`, which has the same shape.

        Raise SessionError after build(). `source` says where the values come from, for error messages.
        """
        action = f"upload of {name} from {source}"
        if self.state is State.NEW:
            self._require(State.REALIZED, action)
        if self.state is not State.REALIZED:
            raise SessionError(f"{action}: the session is built; upload before build()")
        tensor = self._tensor(name, f"upload from {source}")
        if tuple(array.shape) != tensor.shape:
            raise SessionError(f"{action}: expected shape {list(tensor.shape)}, got {list(array.shape)}")
        self.do_upload(tensor, np.ascontiguousarray(array, np.float32))

    @final
    def build(self) -> None:
        """Prepare the training step, or only evaluation if no tensor of the plan is trainable.

        Afterwards `upload` raises an error.
        """
        self._require(State.REALIZED, "build()")
        self.do_build()
        self.state = State.BUILT

    @final
    def step(self, batch: Batch, numbers: Sequence[np.ndarray] | np.ndarray) -> StepMetrics:
        """Take one optimiser step on `batch`, and return its loss and gradient norm.

        `numbers` is the result of `plan.numbers(step, lr)`. If every rule of the plan is AdamW, the result of
        `AdamW.hp_for_step(step)` is also allowed. Before the first step, all optimiser state is zero.
        """
        inputs = self.step_input(batch, numbers)
        self.begin_step()
        return self.do_launch(*inputs)()

    @final
    def step_input(self, batch: Batch, numbers: Sequence[np.ndarray] | np.ndarray) -> StepInput:
        """Check a step's arguments, and return the micro-batches and the vectors of scalars for `do_step`.

        Raise BadBatch for an invalid batch.
        """
        self._require_training("step()")
        numbers = _numbers_per_group(self.plan, numbers)
        if isinstance(batch, PreparedBatch) and batch.plan is self.plan:
            micros: Sequence[Batch] = batch.micros
        else:
            micros = micro_batches(self.plan, batch)
        if len(micros) != self.plan.accumulate:
            rows = self.plan.accumulate * self.plan.rows
            raise BadBatch(f"step(): a batch of {len(batch['weights'])} rows, expected {rows}")
        return StepInput(micros, numbers)

    @final
    def begin_step(self) -> None:
        """Register the start of a step whose input was checked.

        Increment `version`, so that decoders detect the change of the weights.

        If this is the first step, set the optimiser's state to zeros.
        """
        self._require_training("step()")
        self._prepare_state()
        self.use_average(False)
        self.version += 1

    @final
    def use_average(self, average: bool) -> None:
        """If `average` is True, replace the weights by their average (`optim.ema`); if False, undo that.

        Each method that reads or trains the weights calls this first. It does nothing if the session keeps no average,
        or if the requested weights are in place. An evaluation thus takes one snapshot and two uploads of weights and
        optimiser state.
        """
        if not self._has_average or self.state is not State.BUILT or average is (self._raw is not None):
            return
        self._prepare_state()
        raw = self._raw = self.do_snapshot(self._spare) if self._raw is None else self._raw
        self._put(raw, average_weights(raw) if average else raw)
        if not average:
            self._raw, self._spare = None, raw

    def _put(self, arrays: Mapping[str, np.ndarray], weights: Mapping[str, np.ndarray]) -> None:
        """Set the trainable tensors to `weights`, and their optimiser state to that of the snapshot `arrays`."""
        self.version += 1
        for tensor in self.plan.trainable:
            slots = {slot: slot_name(tensor.name, slot) for slot in self.plan.slots(tensor)}
            state = {slot: np.ascontiguousarray(arrays[name]) for slot, name in slots.items()}
            self.do_restore(tensor, np.ascontiguousarray(weights[tensor.name]), state)

    @final
    def evaluate(self, batches: Iterable[Batch]) -> float:
        """Return the mean loss of `batches`, weighted by the target weights. The session does not change."""
        self._require(State.BUILT, "evaluate()")
        self.use_average(True)
        micros = HeldOut(self.plan, batches)
        total = 0.0
        for micro in micros:
            total += self.do_loss(micro)
        return micros.mean(total)

    @final
    def metrics(self, batches: Iterable[Batch]) -> dict[str, float]:
        """Return the objective's held-out metrics on `batches`, keyed by name: means weighted by the target weights."""
        self._require(State.BUILT, "metrics()")
        self.use_average(True)
        if not self.plan.objective.metric_names:
            return {}
        micros, totals = HeldOut(self.plan, batches), Counter[str]()
        for micro in micros:
            totals.update(self.do_metrics(micro))
        return {name: micros.mean(totals[name]) for name in self.plan.objective.metric_names}

    @final
    def logits(self, batch: Batch) -> np.ndarray:
        """Return the float32 logits of the inputs in `batch`, [rows, ..., V].

        `batch` may have any number of rows, and its sequences may be shorter than the plan's. The session computes
        `plan.rows` rows at a time. It pads the inputs to the plan's shape, and removes the padding from the logits.
        """
        self._require(State.BUILT, "logits()")
        self.use_average(True)
        count = max((len(array) for array in batch.values()), default=0)
        cuts = range(0, max(count, 1), self.plan.rows)
        parts = [self._padded_logits({k: v[i : i + self.plan.rows] for k, v in batch.items()}) for i in cuts]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    @final
    def decoder(self) -> Decoder:
        """Return a decoder that uses the current weights.

        Raise SessionError if the model cannot continue a sequence of tokens.
        """
        self._require(State.BUILT, "decoder()")
        self.use_average(True)
        model = self.plan.model
        ids, targets = (self.plan.inputs.get(name) for name in (model.reads.sequence, "targets"))
        if ids is None or targets is None or ids.shape != targets.shape:
            raise SessionError(f"decoder(): model={model.name} cannot continue a sequence of tokens")
        return self.do_decoder()

    @final
    def gradients(self, batch: Batch) -> dict[str, np.ndarray]:
        """Return the gradient of the batch's mean loss for each trainable tensor, keyed by name, before clipping.

        The session does not change.
        """
        self._require_training("gradients()")
        self.use_average(False)
        return self.do_gradients(micro_batches(self.plan, batch))

    @final
    def download(self, name: str) -> np.ndarray:
        """Return a tensor's current values in float32; with `optim.ema`, return the average that evaluations use."""
        if self.state in (State.NEW, State.CLOSED):
            raise SessionError(f"download of {name}: the session is {self.state.value}, so it has no values")
        self.use_average(True)
        return self.do_download(self._tensor(name, "download"))

    @final
    def snapshot(self, into: Mapping[str, np.ndarray] | None = None) -> Mapping[str, np.ndarray]:
        """Return copies of the trainable tensors, keyed by name, and of the optimiser state, keyed by `<name>@<slot>`.

        A slot is the name of a state array, such as m. Arrays keep the engine's precision, so `restore` is exact.
        `into` is an earlier snapshot that is no longer needed; the engine may overwrite its arrays, which is faster.
        """
        self._require(State.BUILT, "snapshot()")
        if into is not None and (misfit := state_misfit(self.plan, into)):
            raise SessionError(f"snapshot(): {misfit}")
        self._prepare_state()
        self.use_average(False)
        arrays = call_checked(Mapping, self.do_snapshot, into or {})
        if fault := state_misfit(self.plan, arrays):
            raise PluginFailed(f"{type(self).__name__}.do_snapshot(): {fault}")
        return arrays

    @final
    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Load a snapshot that a session of any engine returned. Raise SessionError if it does not match the plan."""
        self._require(State.BUILT, "restore()")
        misfit = state_misfit(self.plan, arrays)
        if misfit:
            raise SessionError(f"restore(): {misfit}")
        self._prepare_state()
        self._raw = None
        self._put(arrays, arrays)

    @final
    def close(self) -> None:
        """Free all resources. Closing twice is allowed."""
        if self.state is not State.CLOSED:
            self.state = State.CLOSED
            self.version += 1
            self.do_close()

    def __enter__(self) -> Self:
        return self.require_open()

    @final
    def require_open(self) -> Self:
        """Return the session. Raise SessionError if `Engine.realize` returned it without opening it."""
        if self.state is State.NEW:
            name = type(self).__name__
            raise SessionError(f"realize() returned a {name} that is not open; return Session(plan).open()")
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def describe(self) -> dict[str, Any]:
        """Return JSON data about the engine for the event run_start in events.jsonl: device, threads, precision."""
        return {}

    def device_bytes(self) -> int | None:
        """Return the peak device memory of the session's tensors and graphs, in bytes; None if not measured."""
        return None

    def notes(self) -> Iterable[str]:
        """Return notes on how the engine computes the plan, one line each, to print before the first step."""
        return ()

    @final
    def name_arrays(self, values: Mapping[str, X], states: Mapping[str, Mapping[str, X]]) -> dict[str, X]:
        """Return the values and optimiser states of the trainable tensors in one mapping, with the names of a snapshot.

        `values` is keyed by tensor name, and `states` by tensor name and then by slot (the name of a state array).
        """
        arrays: dict[str, X] = {}
        for tensor in self.plan.trainable:
            arrays[tensor.name] = values[tensor.name]
            arrays |= {slot_name(tensor.name, slot): value for slot, value in states[tensor.name].items()}
        return arrays

    # -- implemented by an engine -------------------------------------------------------------------------------

    @abstractmethod
    def do_open(self) -> None:
        """Allocate memory for the tensors. toyexp then calls `do_load` for each tensor."""

    def do_load(self, tensor: PlanTensor) -> None:
        """Set the tensor to its initial values. An engine may instead load a file's quantised data directly."""
        self.do_upload(tensor, self.plan.initial_values(tensor))

    @abstractmethod
    def do_upload(self, tensor: PlanTensor, array: np.ndarray) -> None:
        """Store a contiguous float32 array as the tensor's values."""

    @abstractmethod
    def do_build(self) -> None:
        """Prepare the training step."""

    @abstractmethod
    def do_reset_state(self) -> None:
        """Set the optimiser's state to zeros."""

    @abstractmethod
    def do_step(self, micros: Sequence[Batch], numbers: Sequence[np.ndarray]) -> StepMetrics:
        """Sum the micro-batches' gradients, clip the sum, and update the trainable tensors.

        The target weights of all micro-batches sum to 1. `numbers` has a vector for each group of `plan.updates`. If
        `plan.skip_nonfinite`, a NaN or infinite loss or gradient norm must leave tensors and optimiser state unchanged.
        """

    def do_launch(self, micros: Sequence[Batch], numbers: Sequence[np.ndarray]) -> Callable[[], StepMetrics]:
        """Start the step that `do_step` describes, and return a function that waits for its metrics.

        An engine whose device runs asynchronously overrides this.
        """
        metrics = self.do_step(micros, numbers)
        return lambda: metrics

    @property
    def depth(self) -> int:
        """Maximum number of steps that may be launched before the metrics of the first one are read.

        With 1, the metrics of each step are read before the next step is launched. With 2, the device works on one step
        while another is queued. The training loop may launch up to `depth` / 2 steps together, and reads their metrics
        together.
        """
        return 1

    @abstractmethod
    def do_loss(self, micro: Batch) -> float:
        """Return `plan.objective.held_out_loss` for one micro-batch: a weighted sum over its examples."""

    def do_metrics(self, micro: Batch) -> Mapping[str, float]:
        """Return the sums that `plan.objective.metrics` computes over one micro-batch, keyed by name."""
        names = ", ".join(self.plan.objective.metric_names)
        raise SessionError(f"{type(self).__name__} does not compute the objective's metrics {names}")

    @abstractmethod
    def do_logits(self, micro: Batch, rows: int) -> np.ndarray:
        """Return the logits of the first `rows` rows of a micro-batch."""

    def do_decoder(self) -> Decoder:
        """Return a decoder. An engine that can cache keys and values overrides this method to decode faster."""
        return Recompute(self)

    @abstractmethod
    def do_gradients(self, micros: Sequence[Batch]) -> dict[str, np.ndarray]:
        """Return the gradient of every trainable tensor, summed over the micro-batches, keyed by name."""

    @abstractmethod
    def do_download(self, tensor: PlanTensor) -> np.ndarray:
        """Return a float32 copy of the tensor's values."""

    @abstractmethod
    def do_snapshot(self, into: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Return copies of the trainable tensors and their optimiser state, with the names that `name_arrays` gives.

        Arrays keep the engine's precision. `into` is empty, or the result of an earlier call, whose arrays may be
        overwritten and returned.
        """

    @abstractmethod
    def do_restore(self, tensor: PlanTensor, values: np.ndarray, state: Mapping[str, np.ndarray]) -> None:
        """Set a trainable tensor's values and its optimiser state. `state` is keyed by slot, the name of a state array.

        The arrays may have any float dtype.
        """

    @abstractmethod
    def do_close(self) -> None:
        """Free the session's resources. Some may not exist if opening the session failed."""

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
            raise SessionError(f"{call}: the plan has no trainable tensors")

    def _tensor(self, name: str, action: str) -> PlanTensor:
        try:
            return self._by_name[name]
        except KeyError:
            raise SessionError(f"{action}: no tensor {name!r} in the plan; {suggest(name, self._by_name)}") from None

    def _padded_logits(self, batch: Batch) -> np.ndarray:
        full, ranges = pad_batch(self.plan, batch)
        return np.ascontiguousarray(self.do_logits(full, len(ranges[0]))[tuple(slice(len(r)) for r in ranges)])
