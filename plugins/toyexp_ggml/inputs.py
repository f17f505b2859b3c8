"""What a graph reads beside the weights: the batch, what is worked out from it on the host, and constants.

Ops ask for what they need while a graph is built; each is made once and shared by all graphs of the session.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from toyexp import Batch, InputSpec
from toyexp_ggml.binding import LIMIT, Backend, GraphError, Memory, Node, put


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
            is_ids = np.issubdtype(spec.dtype, np.integer)
            node = self._make((int(np.prod(shape)),) if is_ids else shape, spec.dtype)
            self.batch[name] = Node(node.ptr, shape)
            self._from_batch.append((node, lambda batch, name=name: batch[name]))  # type: ignore[misc]

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

    def causal_mask(self, length: int) -> Node:
        """[T, T]: 0 where a position may look, minus infinity where it may not."""
        return self._constant(("mask", length), lambda: np.triu(np.full((length, length), -np.inf, np.float32), 1))

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

    def membership(self, ids: Node, rows: int) -> tuple[Node, Node]:
        """For ids [n]: which positions hold each distinct id, [n, n], and the distinct ids [n].

        Unused slots point at the spare row `rows`, so that every list has the same length.
        """
        name = next(name for name, node in self.batch.items() if node.ptr is ids.ptr)
        key = ("membership", name, rows)
        if key not in self._known:
            n = ids.size

            def distinct(batch: Batch) -> np.ndarray:
                found = np.unique(batch[name])
                return np.concatenate([found, np.full(n - len(found), rows, np.int32)]).astype(np.int32)

            def member(batch: Batch) -> np.ndarray:
                _, slots = np.unique(batch[name].reshape(-1), return_inverse=True)
                matrix = np.zeros((n, n), np.float32)
                matrix[slots, np.arange(n)] = 1
                return matrix

            self._known[key] = self._make((n, n), np.float32)
            self._known[*key, "distinct"] = self._make((n,), np.int32)
            self._from_batch.append((self._known[key], member))
            self._from_batch.append((self._known[*key, "distinct"], distinct))
        return self._known[key], self._known[*key, "distinct"]

    def close(self) -> None:
        """Frees everything."""
        for memory in self._memories:
            memory.close()
        self._memories.clear()
        self._known.clear()
