"""Input tensors of a session's graphs: the batch, arrays computed from it on the host, and constants.

Ops request inputs while a graph is built. Each input is made once and shared by all graphs of the session.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from toyexp import Batch, InputSpec, SessionError
from toyexp_ggml.binding import GraphError
from toyexp_ggml.binding.backend import Backend
from toyexp_ggml.binding.tensors import Memory, Node, put
from toyexp_ggml.limits import too_many_logits

LONG = 256  # largest k in `weights`: a larger one is not faster
CHUNK = 256  # ids per membership matrix, whose size and work grow with the square of this


@dataclass(frozen=True, eq=False)
class Ids:
    """Integer array of a batch, as it is passed to a model."""

    name: str
    flat: Node  # ggml's row lookups take one flat list
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of ids."""
        return self.flat.size


class Inputs:
    """Input tensors of a session; `load` fills the tensors that depend on the batch."""

    def __init__(self, backend: Backend):
        self._backend = backend
        self._memories: list[Memory] = []
        self._nodes: dict[Any, Node] = {}
        self._from_batch: list[tuple[Node, Callable[[Batch], np.ndarray]]] = []
        self._checked: dict[str, int] = {}  # by array: bound (exclusive) of ids that every session checks
        self._tighter_bounds: dict[str, int] = {}  # by array: smaller bound, for a small table, that `load` checks
        self.batch: dict[str, Any] = {}  # by name: a Node, or Ids

    def add(self, name: str, spec: InputSpec, rows: int) -> None:
        """Add an input tensor [rows, *spec.shape] for the array `name` of each batch."""
        shape = (rows, *spec.shape)
        self._checked[name] = spec.below or 2**31
        if spec.dtype == "int32":
            node = self._make((math.prod(shape),), np.int32)
            self.batch[name] = Ids(name, node, shape)
        else:
            self.batch[name] = node = self._make(shape, spec.dtype)
        self._from_batch.append((node, lambda batch: batch[name]))

    def _make(self, shape: tuple[int, ...], dtype: Any) -> Node:
        memory = Memory(self._backend, 1)
        self._memories.append(memory)
        node = memory.tensor(shape, dtype)
        memory.allocate()
        return node

    def _constant(self, key: Any, make: Callable[[], np.ndarray]) -> Node:
        if key not in self._nodes:
            array = make()
            self._nodes[key] = self._make(array.shape, array.dtype)
            put(self._nodes[key], array)
        return self._nodes[key]

    def load(self, batch: Batch) -> None:
        """Upload a batch and all inputs computed from it. Raise SessionError for an id that its table does not have."""
        for name, below in self._tighter_bounds.items():
            low, high = batch[name].min(), batch[name].max()
            if low < 0 or high >= below:
                raise SessionError(f"batch[{name!r}] holds ids from {low} to {high}, expected 0 to {below - 1}")
        for node, make in self._from_batch:
            put(node, np.ascontiguousarray(make(batch)))

    # -- constants ----------------------------------------------------------------------------------------------

    def zeros(self, *shape: int) -> Node:
        """Return a tensor of zeros."""
        return self._constant(("zeros", shape), lambda: np.zeros(shape, np.float32))

    def ones(self, count: int) -> Node:
        """Return a tensor of ones, [count]."""
        return self._constant(("ones", count), lambda: np.ones(count, np.float32))

    def span(self, start: int, stop: int) -> Node:
        """Return the int32 tensor of start, start + 1, .., stop - 1."""
        return self._constant(("span", start, stop), lambda: np.arange(start, stop, dtype=np.int32))

    def vector(self, numbers: tuple[float, ...]) -> Node:
        """Return the given numbers as a tensor, [n]."""
        return self._constant(("vector", numbers), lambda: np.array(numbers, np.float32))

    def visible(self, queries: int, keys: int, window: int = 0, fill: float = 0.0) -> Node:
        """Return a causal mask [queries, keys] of the last `queries` positions, with `fill` (0 or -inf) at hidden keys.

        Visible keys have the value 1 if `fill` is 0, and 0 if it is -inf. A query does not see later keys. If `window`
        is not 0, it sees only the last `window` positions up to its own.
        """

        def make() -> np.ndarray:
            before = np.subtract.outer(np.arange(keys - queries, keys), np.arange(keys))
            seen = (before >= 0) & ((before < window) | (window == 0))
            return np.where(seen, np.float32(fill == 0), np.float32(fill))

        return self._constant(("visible", queries, keys, window, fill), make)

    # -- computed from the batch ------------------------------------------------------------------------------

    def _derive(self, key: Any, shape: tuple[int, ...], dtype: Any, make: Callable[[Batch], np.ndarray]) -> Node:
        if key not in self._nodes:
            self._nodes[key] = self._make(shape, dtype)
            self._from_batch.append((self._nodes[key], make))
        return self._nodes[key]

    def flat_ids(self, ids: Ids, below: int) -> Node:
        """Return ids as a flat tensor [n]; from now on `load` checks that each batch's ids are in 0..below-1."""
        self._require_below(ids.name, below)
        return ids.flat

    def _require_below(self, name: str, below: int) -> None:
        # ggml ends the process if an id is out of range.
        if below < self._checked[name]:
            self._tighter_bounds[name] = min(below, self._tighter_bounds.get(name, below))

    def target_indices(self, targets: Ids, n: int, classes: int) -> Node:
        """Return the index of each target's logit in the flattened logits [n * classes], as a flat tensor.

        There are one or several targets for each of the n positions.
        """
        if reason := too_many_logits(n, classes):
            raise GraphError(reason)
        name, base = targets.name, np.repeat(np.arange(n, dtype=np.int32) * classes, targets.size // n)
        self._require_below(name, classes)
        key = ("places", name, n, classes)
        return self._derive(key, (targets.size,), np.int32, lambda batch: base + batch[name].reshape(-1))

    def weights(self, n: int, classes: int) -> Node:
        """Return the weights of the batch's n targets as a tensor [n, k], with each weight repeated k times.

        The number k is a divisor of `classes`. In ggml, multiplying the logits' gradient by the repeated weights is
        faster than multiplying it by a column [n, 1].
        """
        k = max(k for k in range(1, min(classes, LONG) + 1) if classes % k == 0)
        return self._derive(
            ("weights", n, k), (n, k), np.float32, lambda batch: np.repeat(batch["weights"].reshape(n, 1), k, 1)
        )

    def memberships(self, ids: Node, rows: int) -> list[tuple[int, int, Node, Node]]:
        """Return (start, stop, member, distinct) for each chunk of c = stop - start ids of `ids` [n].

        `distinct` [c] lists the chunk's distinct ids, padded with the value `rows`. The table has `rows` rows, so this
        value is the index of a spare row after them. `member` [c, c] is 1 at [i, j] if position j of the chunk has the
        id distinct[i], else 0.
        """
        name = next(name for name, node in self.batch.items() if isinstance(node, Ids) and node.flat is ids)
        chunks = [(start, min(start + CHUNK, ids.size)) for start in range(0, ids.size, CHUNK)]
        return [(start, stop, *self._membership(name, start, stop, rows)) for start, stop in chunks]

    def _membership(self, name: str, start: int, stop: int, rows: int) -> tuple[Node, Node]:
        key, count = (name, start, rows), stop - start

        def distinct(batch: Batch) -> np.ndarray:
            ids = np.unique(batch[name].reshape(-1)[start:stop])
            return np.concatenate([ids, np.full(count - len(ids), rows, np.int32)]).astype(np.int32)

        def member(batch: Batch) -> np.ndarray:
            _, slots = np.unique(batch[name].reshape(-1)[start:stop], return_inverse=True)
            matrix = np.zeros((count, count), np.float32)
            matrix[slots, np.arange(count)] = 1
            return matrix

        return (
            self._derive(("member", *key), (count, count), np.float32, member),
            self._derive(("distinct", *key), (count,), np.int32, distinct),
        )

    def close(self) -> None:
        """Free all inputs."""
        for memory in self._memories:
            memory.close()
        self._memories.clear()
        self._nodes.clear()
