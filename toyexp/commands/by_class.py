"""How often a model is right about each class, and which others it takes an example for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from toyexp.base.errors import in_a_cell
from toyexp.commands.width import aligned
from toyexp.contract.batch import Batch

SHOWN = 20  # classes in the table
OTHERS = 3  # that one is mistaken for, in the table


@dataclass(frozen=True)
class OfClass:
    """What was held out of one class."""

    name: str
    examples: int
    right: int
    taken_for: dict[str, int]  # the other classes, the commonest first

    @property
    def wrong(self) -> int:
        """Examples that were taken for others."""
        return self.examples - self.right


def by_class(
    logits: Callable[[Batch], np.ndarray], batches: Sequence[Batch], read: Sequence[str], names: Sequence[str]
) -> list[OfClass]:
    """Of each class of the model, in its order. `read` are the inputs that logits [rows, classes] follow from.

    A row whose weight is 0 only fills its batch. Classes beyond the `names` are called by their numbers.
    """
    counts = None
    for batch in batches:
        found = logits({name: batch[name] for name in read})
        if counts is None:
            counts = np.zeros((found.shape[1],) * 2, np.int64)
        kept = batch["weights"] > 0
        np.add.at(counts, (batch["targets"][kept], found.argmax(-1)[kept]), 1)
    if counts is None:
        return []
    called = [*names, *map(str, range(len(names), len(counts)))]
    return [_of_class(number, row, called) for number, row in enumerate(counts.tolist())]


def _of_class(number: int, row: Sequence[int], names: Sequence[str]) -> OfClass:
    others = sorted((i for i, count in enumerate(row) if count and i != number), key=lambda i: (-row[i], i))
    return OfClass(names[number], sum(row), row[number], {names[i]: row[i] for i in others})


def table(classes: Sequence[OfClass]) -> list[str]:
    """A line for each class that there are examples of; of many those that it is wrong about most often."""
    there = [one for one in classes if one.examples]
    shown = there if len(there) <= SHOWN else sorted(there, key=lambda one: -one.wrong)[:SHOWN]
    rows = [["class", "examples", "right", "taken for"], *map(_row, shown)]
    lines = aligned(rows, {"examples", "right"})
    if len(shown) < len(there):
        lines.append(f"of {len(there)} classes those with most mistakes; --json has all")
    return lines


def _row(one: OfClass) -> list[str]:
    others = [f"{name} ({count})" for name, count in one.taken_for.items()]
    more = [f"{len(others) - OTHERS} more"] if len(others) > OTHERS + 1 else []
    told = ", ".join((others[:OTHERS] if more else others) + more)
    return [in_a_cell(one.name), str(one.examples), f"{one.right / one.examples:.1%}", in_a_cell(told)]
