"""Check batches against a plan, split them into micro-batches, and pad them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from toyexp.base.errors import BadBatch, SessionError
from toyexp.interfaces.dataset import Batch
from toyexp.interfaces.plan import Plan


def micro_batches(plan: Plan, batch: Batch) -> list[Batch]:
    """Split a training batch into micro-batches.

    Target weights, as `Objective.weigh` returns them, are divided by their sum over the batch, so that the weighted sum
    of the losses is the mean loss of the batch.
    """
    micros, total = split_batch(plan, batch, training=True)
    if total <= 0:
        raise BadBatch(f"the weights of a batch must sum to more than 0, got {total:g}")
    return [{**m, "weights": (m["weights"] / total).astype(np.float32)} for m in micros]


class PreparedBatch(dict[str, np.ndarray]):
    """A batch that was checked against `plan` and split into micro-batches, before its training step starts."""

    plan: Plan
    micros: Sequence[Batch]


def prepare_batches(plan: Plan, block: Batch, count: int) -> list[PreparedBatch]:
    """Return a prepared batch for each of the next `count` steps.

    `block` holds the rows of all these steps. Raise BadBatch if it is invalid.
    """
    full, total = _check_batch(plan, block, training=True)
    step_rows, size = plan.rows * plan.accumulate, plan.accumulate
    if len(block["weights"]) != count * step_rows:
        raise BadBatch(f"got a block of {len(block['weights'])} rows, expected {count * step_rows}")
    batches = _slice_rows(block, step_rows, PreparedBatch)
    if (full["weights"] == 1).all():  # every batch has the same total weight
        scaled = (full["weights"] / (total / count)).astype(np.float32)
        if size == 1 and full is block:
            weights = (scaled[i * step_rows : (i + 1) * step_rows] for i in range(count))
            micros = [{**batch, "weights": part} for batch, part in zip(batches, weights, strict=True)]
        else:
            micros = _slice_rows({**full, "weights": scaled}, plan.rows)
    else:
        micros = [dict(micro) for batch in batches for micro in micro_batches(plan, batch)]
    for i, batch in enumerate(batches):
        batch.plan, batch.micros = plan, micros[i * size : (i + 1) * size]
    return batches


class HeldOut:
    """Iterable over the micro-batches of all held-out batches. It checks each batch and adds up the target weights."""

    def __init__(self, plan: Plan, batches: Iterable[Batch]):
        self._plan, self._batches, self._weight = plan, batches, 0.0

    def __iter__(self) -> Iterator[Batch]:
        for batch in self._batches:
            for micro in split_batch(self._plan, batch)[0]:
                self._weight += float(micro["weights"].sum(dtype=np.float64))
                yield micro

    def mean(self, total: float) -> float:
        """Return `total`, the weighted sum of the losses, divided by the sum of the weights.

        Raise BadBatch if the sum of the weights is not a finite number above 0.
        """
        if not 0 < self._weight < math.inf:
            raise BadBatch(f"evaluate(): all weights must sum to a finite number above 0, got {self._weight:g}")
        return total / self._weight


def split_batch(plan: Plan, batch: Batch, training: bool = False) -> tuple[list[Batch], np.float64]:
    """Check a batch, and return its micro-batches and the sum of its target weights."""
    full, total = _check_batch(plan, batch, training)
    return [full] if len(full["weights"]) == plan.rows else _slice_rows(full, plan.rows), total


def _slice_rows(batch: Batch, rows: int, kind: type[Any] = dict) -> list[Any]:
    """Split a batch into batches of `rows` rows each. Each new batch is a mapping of the class `kind`."""
    slices = [slice(i, i + rows) for i in range(0, len(batch["weights"]), rows)]
    parts = ([array[rows_slice] for rows_slice in slices] for array in batch.values())
    return [kind(zip(batch, arrays, strict=True)) for arrays in zip(*parts, strict=True)]


def _check_batch(plan: Plan, batch: Batch, training: bool) -> tuple[Batch, np.float64]:
    """Return the batch and the sum of its target weights. Optional arrays that the batch lacks are added as zeros.

    If `training` is True, the plan's objective changes the weights.
    Raise BadBatch if the batch does not match the plan.
    """
    if not isinstance(batch, Mapping) or not all(isinstance(array, np.ndarray) for array in batch.values()):
        raise BadBatch("a batch must be a mapping of names to numpy arrays")
    for name, spec in plan.inputs.items():
        if name not in batch:
            if not spec.optional or "weights" not in batch:
                raise BadBatch(f"the batch has no {name!r}; it has {', '.join(sorted(batch))}")
            batch = {**batch, name: np.zeros((len(batch["weights"]), *spec.shape), spec.dtype)}
    count, rows = len(batch["weights"]), plan.rows
    _check_arrays(plan, batch, count)
    batch = plan.objective.weigh(batch) if training else batch
    total: np.float64 = batch["weights"].sum(dtype=np.float64)
    if not math.isfinite(total):
        raise BadBatch("batch['weights'] contains NaN or infinity")
    if count % rows:
        raise BadBatch(f"a batch of {count} rows cannot be split into micro-batches of {rows}")
    return batch, total


def _check_arrays(plan: Plan, batch: Batch, count: int) -> None:
    for name, spec in plan.inputs.items():
        array = batch[name]
        if array.shape[1:] != spec.shape or array.dtype != spec.dtype:
            raise BadBatch(
                f"batch[{name!r}]: expected [rows, {', '.join(map(str, spec.shape))}] {spec.dtype}, "
                f"got {list(array.shape)} {array.dtype}"
            )
        if len(array) != count:
            raise BadBatch(f"batch[{name!r}] has {len(array)} rows, expected {count} as in 'weights'")
        if spec.below is not None and array.size and not 0 <= array.min() <= array.max() < spec.below:
            invalid_id = array[(array < 0) | (array >= spec.below)][0]
            raise BadBatch(f"batch[{name!r}]: {invalid_id} is not one of 0..{spec.below - 1}")
        if name != "weights" and array.dtype.kind == "f" and not (spec.optional or np.isfinite(array).all()):
            raise BadBatch(f"batch[{name!r}] contains NaN or infinity")


def pad_batch(plan: Plan, batch: Batch) -> tuple[dict[str, np.ndarray], tuple[range, ...]]:
    """Return `batch` padded to the plan's shape, and the index ranges of the logits that are not padding.

    There is one range for each axis of the logits except the last: rows and, for sequences, positions.
    """
    full: dict[str, np.ndarray] = {}
    ranges: tuple[range, ...] = ()
    target_shape = plan.inputs["weights"].shape  # an input of this shape has one row of logits per position
    for name, spec in plan.inputs.items():
        array = np.zeros((plan.rows, *spec.shape), spec.dtype)
        if name in batch:
            part = np.asarray(batch[name])
            if part.ndim != array.ndim or any(p > f for p, f in zip(part.shape, array.shape, strict=True)):
                raise SessionError(f"logits(): {name} {list(part.shape)} does not fit the plan's {list(array.shape)}")
            if part.dtype != array.dtype:
                raise SessionError(f"logits(): {name} is {part.dtype}, expected {array.dtype}")
            array[tuple(slice(n) for n in part.shape)] = part
            ranges = tuple(range(n) for n in (part.shape if spec.shape == target_shape else part.shape[:1]))
        elif spec.counts:
            array[:] = np.arange(spec.shape[-1])
        full[name] = array
    if not ranges:
        raise SessionError(f"logits(): the batch has none of the plan's inputs {', '.join(plan.inputs)}")
    return full, ranges
