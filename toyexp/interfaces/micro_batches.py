"""A batch as a session takes it: as its plan wants it, cut into micro-batches, or padded to one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from toyexp.base.errors import BadBatch, SessionError
from toyexp.interfaces.dataset import Batch
from toyexp.interfaces.plan import Plan


def micro_batches(plan: Plan, batch: Batch) -> list[Batch]:
    """The batch's micro-batches, their weights scaled so that the loss is the mean over its targets."""
    micros, total = split_batch(plan, batch)
    if total <= 0:
        raise BadBatch(f"a batch whose targets weigh {total:g} in all has no loss")
    return [{**m, "weights": (m["weights"] / total).astype(np.float32)} for m in micros]


class PreparedBatch(dict[str, np.ndarray]):
    """A batch that was checked and cut for a plan before its step's turn came."""

    plan: Plan
    micros: Sequence[Batch]


def prepare_batches(plan: Plan, block: Batch, count: int) -> list[PreparedBatch]:
    """The batches of `count` steps, whose rows stand one after another in `block`; BadBatch where one is none."""
    whole, total = _check_batch(plan, block)
    each, size = plan.rows * plan.accumulate, plan.accumulate
    if len(block["targets"]) != count * each:
        raise BadBatch(f"a block of {len(block['targets'])} rows, expected {count * each}")
    batches = _slice_rows(block, each, PreparedBatch)
    if (block["weights"] == 1).all():  # each weighs the same
        scaled = (block["weights"] / (total / count)).astype(np.float32)
        if size == 1 and whole is block:
            micros = [{**batch, "weights": scaled[i * each : (i + 1) * each]} for i, batch in enumerate(batches)]
        else:
            micros = _slice_rows({**whole, "weights": scaled}, plan.rows)
    else:
        micros = [dict(micro) for batch in batches for micro in micro_batches(plan, batch)]
    for i, batch in enumerate(batches):
        batch.plan, batch.micros = plan, micros[i * size : (i + 1) * size]
    return batches


class HeldOut:
    """The micro-batches of held-out batches, checked one by one; it adds up what their targets weigh."""

    def __init__(self, plan: Plan, batches: Iterable[Batch]):
        self._plan, self._batches, self._weight = plan, batches, 0.0

    def __iter__(self) -> Iterator[Batch]:
        for batch in self._batches:
            for micro in split_batch(self._plan, batch)[0]:
                self._weight += float(micro["weights"].sum(dtype=np.float64))
                yield micro

    def mean(self, total: float) -> float:
        """Return the mean loss, given the sum of the losses; raises BadBatch where no target weighs anything."""
        if not 0 < self._weight < math.inf:
            raise BadBatch(f"evaluate(): the targets weigh {self._weight:g} in all, so there is no loss")
        return total / self._weight


def split_batch(plan: Plan, batch: Batch) -> tuple[list[Batch], np.float64]:
    """The micro-batches of a batch that is as the plan wants it, and what its targets weigh in all."""
    whole, total = _check_batch(plan, batch)
    return [whole] if len(whole["targets"]) == plan.rows else _slice_rows(whole, plan.rows), total


def _slice_rows(batch: Batch, rows: int, kind: type[Any] = dict) -> list[Any]:
    """So many rows at a time."""
    places = [slice(i, i + rows) for i in range(0, len(batch["targets"]), rows)]
    parts = ([array[here] for here in places] for array in batch.values())
    return [kind(zip(batch, arrays, strict=True)) for arrays in zip(*parts, strict=True)]


def _check_batch(plan: Plan, batch: Batch) -> tuple[Batch, np.float64]:
    """A batch with all that the plan has in it, and what its targets weigh in all; BadBatch for one that is none."""
    if not isinstance(batch, Mapping) or not all(isinstance(array, np.ndarray) for array in batch.values()):
        raise BadBatch("a batch is a mapping of names to numpy's arrays, and this is none")
    for name, spec in plan.inputs.items():
        if name not in batch:
            if not spec.optional or "targets" not in batch:
                raise BadBatch(f"the batch has no {name!r}; it holds {', '.join(sorted(batch))}")
            batch = {**batch, name: np.zeros((len(batch["targets"]), *spec.shape), spec.dtype)}
    count, rows = len(batch["targets"]), plan.rows
    _check_arrays(plan, batch, count)
    total: np.float64 = batch["weights"].sum(dtype=np.float64)
    if not math.isfinite(total):
        raise BadBatch("batch['weights'] holds numbers that are NaN or infinite")
    if count % rows:
        raise BadBatch(f"a batch of {count} rows does not divide into micro-batches of {rows}")
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
            raise BadBatch(f"batch[{name!r}] has {len(array)} rows, its targets {count}")
        if spec.below is not None and array.size and not 0 <= array.min() <= array.max() < spec.below:
            wrong = array[(array < 0) | (array >= spec.below)][0]
            raise BadBatch(f"batch[{name!r}]: {wrong} is not one of 0..{spec.below - 1}")
        if name != "weights" and array.dtype.kind == "f" and not (spec.optional or np.isfinite(array).all()):
            raise BadBatch(f"batch[{name!r}] holds numbers that are NaN or infinite")


def pad_batch(plan: Plan, batch: Batch) -> tuple[dict[str, np.ndarray], tuple[range, ...]]:
    """`batch` grown to the plan's shape with zeros, and the ranges of the logits that belong to it."""
    full: dict[str, np.ndarray] = {}
    kept: tuple[range, ...] = ()
    aligned = plan.inputs["targets"].shape  # an input of this shape has one logit row per position
    for name, spec in plan.inputs.items():
        whole = np.zeros((plan.rows, *spec.shape), spec.dtype)
        if name in batch:
            part = np.asarray(batch[name])
            if part.ndim != whole.ndim or any(p > f for p, f in zip(part.shape, whole.shape, strict=True)):
                raise SessionError(f"logits(): {name} {list(part.shape)} does not fit the plan's {list(whole.shape)}")
            if part.dtype != whole.dtype:
                raise SessionError(f"logits(): {name} is {part.dtype}, expected {whole.dtype}")
            whole[tuple(slice(n) for n in part.shape)] = part
            kept = tuple(range(n) for n in (part.shape if spec.shape == aligned else part.shape[:1]))
        full[name] = whole
    if not kept:
        raise SessionError(f"logits(): the batch holds none of {', '.join(plan.inputs)}")
    return full, kept
