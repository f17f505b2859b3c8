"""What a graph reads beside the weights: the batch, what is worked out from it on the host, and constants.

Ops ask for what they need while a graph is built; each is made once and shared by all graphs of the session.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from toyexp import Batch, InputSpec
from toyexp_ggml.binding import LIMIT, Backend, GraphError, Memory, Node, put

CHUNK = 256  # ids whose gradients are summed at a time where the device has no op for it: work and memory grow with it


class Inputs:
    """The input tensors of a session; `load` fills those that depend on the batch."""

    def __init__(self, backend: Backend, specs: Mapping[str, InputSpec], rows: int):
        self._backend = backend
        self._memories: list[Memory] = []
        self._known: dict[Any, Node] = {}
        self._from_batch: list[tuple[Node, Callable[[Batch], np.ndarray]]] = []
        self.batch: dict[str, Node] = {}
        for name, spec in specs.items():
            # ggml's row lookups take ids as one flat list; the node keeps the batch's shape for the model's eyes.
            shape = (rows, *spec.shape)
            flat = self._make((int(np.prod(shape)),), spec.dtype)
            self.batch[name] = Node(flat.ptr, shape)
            self._from_batch.append((flat, lambda batch, name=name: batch[name]))  # type: ignore[misc]

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
        """Uploads a batch."""
        for node, make in self._from_batch:
            put(node, np.ascontiguousarray(make(batch)))

    # -- constants ----------------------------------------------------------------------------------------------

    def zeros(self, *shape: int) -> Node:
        """A tensor of zeros."""
        return self._constant(("zeros", shape), lambda: np.zeros(shape, np.float32))

    def ones(self, count: int) -> Node:
        """[count] ones."""
        return self._constant(("ones", count), lambda: np.ones(count, np.float32))

    def positions(self, length: int) -> Node:
        """0, 1, .. [T]."""
        return self._constant(("positions", length), lambda: np.arange(length, dtype=np.int32))

    def causal_mask(self, queries: int, seen: int) -> Node:
        """[queries, seen] for the last `queries` of `seen` positions: 0 where one may look, else minus infinity."""
        hidden = lambda: np.triu(np.full((queries, seen), -np.inf, np.float32), 1 + seen - queries)  # noqa: E731
        return self._constant(("mask", queries, seen), hidden)

    def spare_table(self, shape: tuple[int, ...]) -> Node:
        """Zeros with one row more than a table."""
        return self.zeros(shape[0] + 1, shape[1])

    # -- worked out from the batch ------------------------------------------------------------------------------

    def flat_ids(self, ids: Node) -> Node:
        """Ids [..] as one list."""
        return Node(ids.ptr, (ids.size,)) if ids.shape != (ids.size,) else ids

    def places(self, n: int, classes: int) -> Node:
        """Where each target's entry lies in logits [n, classes] laid out flat."""
        if n * classes > LIMIT:
            raise GraphError(
                f"{n} positions times {classes} classes are more than 2^31 - 1 logits; "
                "use a smaller batch_size, or optim.accumulate"
            )
        key = ("places", n, classes)
        if key not in self._known:
            self._known[key] = self._make((n,), np.int32)
            base = np.arange(n, dtype=np.int32) * classes
            self._from_batch.append((self._known[key], lambda batch: base + batch["targets"].reshape(-1)))
        return self._known[key]

    def memberships(self, ids: Node, rows: int) -> list[tuple[int, int, Node, Node]]:
        """For each chunk start..stop of ids [n]: its distinct ids [c], and which positions hold each of them, [c, c].

        Unused slots point at the spare row `rows`, so that every list has the length of its chunk.
        """
        name = next(name for name, node in self.batch.items() if node.ptr is ids.ptr)
        chunks = [(start, min(start + CHUNK, ids.size)) for start in range(0, ids.size, CHUNK)]
        return [(start, stop, *self._membership(name, start, stop, rows)) for start, stop in chunks]

    def _membership(self, name: str, start: int, stop: int, rows: int) -> tuple[Node, Node]:
        key, count = ("membership", name, start, rows), stop - start
        if key not in self._known:

            def distinct(batch: Batch) -> np.ndarray:
                found = np.unique(batch[name].reshape(-1)[start:stop])
                return np.concatenate([found, np.full(count - len(found), rows, np.int32)]).astype(np.int32)

            def member(batch: Batch) -> np.ndarray:
                _, slots = np.unique(batch[name].reshape(-1)[start:stop], return_inverse=True)
                matrix = np.zeros((count, count), np.float32)
                matrix[slots, np.arange(count)] = 1
                return matrix

            self._known[key] = self._make((count, count), np.float32)
            self._known[*key, "distinct"] = self._make((count,), np.int32)
            self._from_batch.append((self._known[key], member))
            self._from_batch.append((self._known[*key, "distinct"], distinct))
        return self._known[key], self._known[*key, "distinct"]

    def close(self) -> None:
        """Frees everything."""
        for memory in self._memories:
            memory.close()
        self._memories.clear()
        self._known.clear()
