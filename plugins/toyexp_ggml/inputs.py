"""What a graph reads beside the weights: the batch, what is worked out from it on the host, and constants.

Ops ask for what they need while a graph is built; each is made once and shared by all graphs of the session.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from toyexp import Batch, InputSpec, SessionError
from toyexp_ggml.binding import GraphError
from toyexp_ggml.binding.backend import Backend
from toyexp_ggml.binding.tensors import Memory, Node, put
from toyexp_ggml.limits import too_many_logits

LONG = 256  # numbers of a row that is repeated: more gain nothing
CHUNK = 256  # ids whose gradients are summed at a time where the device has no op for it: work and memory grow with it


@dataclass(frozen=True, eq=False)
class Ids:
    """Integers of a batch, [..], as a model sees them: `rows` looks them up, and no other op can take them."""

    name: str
    flat: Node  # ggml's row lookups take one flat list
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """How many there are."""
        return self.flat.size

    packed: ClassVar[bool] = False

    @property
    def ptr(self) -> Any:
        """Where an op would read numbers; raises GraphError."""
        raise GraphError(f"batch[{self.name!r}] holds integer ids {list(self.shape)}: only rows and embed take those")


class Inputs:
    """The input tensors of a session; `load` fills those that depend on the batch."""

    def __init__(self, backend: Backend):
        self._backend = backend
        self._memories: list[Memory] = []
        self._known: dict[Any, Node] = {}
        self._from_batch: list[tuple[Node, Callable[[Batch], np.ndarray]]] = []
        self._held: dict[str, int] = {}  # what every session holds the batch's ids below
        self._below: dict[str, int] = {}  # where that is not enough for a table
        self.batch: dict[str, Any] = {}  # a Node, or Ids

    def add(self, name: str, spec: InputSpec, rows: int) -> None:
        """Makes the tensor of one array of the batch."""
        shape = (rows, *spec.shape)
        self._held[name] = spec.below or 2**31
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
        if key not in self._known:
            array = make()
            self._known[key] = self._make(array.shape, array.dtype)
            put(self._known[key], array)
        return self._known[key]

    def load(self, batch: Batch) -> None:
        """Uploads a batch; raises SessionError for ids outside the tables they are looked up in."""
        for name, below in self._below.items():
            low, high = batch[name].min(), batch[name].max()
            if low < 0 or high >= below:
                raise SessionError(f"batch[{name!r}] holds ids from {low} to {high}, expected 0 to {below - 1}")
        for node, make in self._from_batch:
            put(node, np.ascontiguousarray(make(batch)))

    # -- constants ----------------------------------------------------------------------------------------------

    def zeros(self, *shape: int) -> Node:
        """A tensor of zeros."""
        return self._constant(("zeros", shape), lambda: np.zeros(shape, np.float32))

    def ones(self, count: int) -> Node:
        """[count] ones."""
        return self._constant(("ones", count), lambda: np.ones(count, np.float32))

    def span(self, start: int, stop: int) -> Node:
        """start, start + 1, .. stop - 1."""
        return self._constant(("span", start, stop), lambda: np.arange(start, stop, dtype=np.int32))

    def vector(self, numbers: tuple[float, ...]) -> Node:
        """The numbers themselves, [n]."""
        return self._constant(("vector", numbers), lambda: np.array(numbers, np.float32))

    def causal_mask(self, queries: int, seen: int) -> Node:
        """[queries, seen] for the last `queries` of `seen` positions: 0 where one may look, else minus infinity."""
        hidden = lambda: np.triu(np.full((queries, seen), -np.inf, np.float32), 1 + seen - queries)  # noqa: E731
        return self._constant(("mask", queries, seen), hidden)

    # -- worked out from the batch ------------------------------------------------------------------------------

    def _derived(self, key: Any, shape: tuple[int, ...], dtype: Any, make: Callable[[Batch], np.ndarray]) -> Node:
        if key not in self._known:
            self._known[key] = self._make(shape, dtype)
            self._from_batch.append((self._known[key], make))
        return self._known[key]

    def flat_ids(self, ids: Ids, below: int) -> Node:
        """Ids [..] as one list, of which every batch must keep to 0..below-1."""
        if not isinstance(ids, Ids):
            raise GraphError("rows: the ids must be an int32 array of the batch")
        self._keep_below(ids.name, below)
        return ids.flat

    def _keep_below(self, name: str, below: int) -> None:
        # ggml ends the process at an id that is out of range.
        if below < self._held[name]:
            self._below[name] = min(below, self._below.get(name, below))

    def places(self, n: int, classes: int) -> Node:
        """Where each target's entry lies in logits [n, classes] laid out flat."""
        if reason := too_many_logits(n, classes):
            raise GraphError(reason)
        targets = self.batch["targets"]
        if not isinstance(targets, Ids) or targets.size != n:
            raise GraphError(f"logits of {n} positions for targets {list(targets.shape)}")
        self._keep_below("targets", classes)
        base = np.arange(n, dtype=np.int32) * classes
        return self._derived(("places", n, classes), (n,), np.int32, lambda batch: base + batch["targets"].reshape(-1))

    def weights(self, n: int, classes: int) -> Node:
        """The batch's weights [n], each several times over, [n, k], so that long rows repeat along `classes`."""
        k = max(k for k in range(1, min(classes, LONG) + 1) if classes % k == 0)
        return self._derived(
            ("weights", n, k), (n, k), np.float32, lambda batch: np.repeat(batch["weights"].reshape(n, 1), k, 1)
        )

    def memberships(self, ids: Node, rows: int) -> list[tuple[int, int, Node, Node]]:
        """For each chunk start..stop of ids [n]: its distinct ids [c], and which positions hold each of them, [c, c].

        Unused slots point at the spare row `rows`, so that every list has the length of its chunk.
        """
        name = next(name for name, node in self.batch.items() if isinstance(node, Ids) and node.flat is ids)
        chunks = [(start, min(start + CHUNK, ids.size)) for start in range(0, ids.size, CHUNK)]
        return [(start, stop, *self._membership(name, start, stop, rows)) for start, stop in chunks]

    def _membership(self, name: str, start: int, stop: int, rows: int) -> tuple[Node, Node]:
        key, count = (name, start, rows), stop - start

        def distinct(batch: Batch) -> np.ndarray:
            found = np.unique(batch[name].reshape(-1)[start:stop])
            return np.concatenate([found, np.full(count - len(found), rows, np.int32)]).astype(np.int32)

        def member(batch: Batch) -> np.ndarray:
            _, slots = np.unique(batch[name].reshape(-1)[start:stop], return_inverse=True)
            matrix = np.zeros((count, count), np.float32)
            matrix[slots, np.arange(count)] = 1
            return matrix

        return (
            self._derived(("member", *key), (count, count), np.float32, member),
            self._derived(("distinct", *key), (count,), np.int32, distinct),
        )

    def close(self) -> None:
        """Frees everything."""
        for memory in self._memories:
            memory.close()
        self._memories.clear()
        self._known.clear()
