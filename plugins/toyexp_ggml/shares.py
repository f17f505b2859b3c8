"""The rows of a step in shares that are computed side by side, each by a backend, and so by threads, of its own.

Within one graph ggml's threads wait for one another after every op, and each reads what the other has just written:
where two cores share no cache, two threads are hardly faster than one. Those of a share meet the others once a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass

from toyexp import Batch, Plan
from toyexp_ggml.binding import Backend, Memory, Node
from toyexp_ggml.inputs import Inputs

SHARES = 2
# Numbers to train times positions, from which on a step is long enough; and numbers to train, for every share sums
# gradients of its own and transposes the weights once more.
LONG, MOST = 2e8, 2**24


def shares_of(plan: Plan) -> int:
    """In how many shares a step's rows are computed, by the plan alone: sums of shares have other last digits."""
    trained = sum(t.size for t in plan.trainable)
    all_trained = len(plan.trainable) == len(plan.tensors)  # a frozen matrix may have to be unpacked for each
    work = trained * plan.rows * math.prod(plan.inputs["targets"].shape)
    return SHARES if all_trained and trained <= MOST and work >= LONG and plan.rows % SHARES == 0 else 1


@dataclass(frozen=True)
class Share:
    """Some of a micro-batch's rows, what computes them, and where their gradients add up."""

    backend: Backend
    inputs: Inputs
    rows: slice
    sums: Mapping[str, Node]

    def load(self, micro: Batch) -> None:
        """Uploads its rows of a micro-batch."""
        self.inputs.load({name: array[self.rows] for name, array in micro.items()})


def sums_of(plan: Plan, memory: Memory) -> dict[str, Node]:
    """Memory for a gradient of each trainable tensor."""
    return {t.name: memory.tensor(t.shape) for t in plan.trainable}


class Parallel:
    """Calls of one function at the same time, the first in this thread, or one after the other where `count` is 1."""

    def __init__(self, count: int):
        self._pool = ThreadPoolExecutor(count - 1) if count > 1 else None

    def __call__(self, function: Callable[[int], float], count: int) -> list[float]:
        """What it returns for 0, 1, .. count - 1; raises what one of the calls raises, after all have ended."""
        if not self._pool:
            return [function(i) for i in range(count)]
        others = [self._pool.submit(function, i) for i in range(1, count)]
        try:
            first = function(0)
        finally:
            wait(others)
        return [first, *(other.result() for other in others)]

    def close(self) -> None:
        """Ends the threads."""
        if self._pool:
            self._pool.shutdown()
