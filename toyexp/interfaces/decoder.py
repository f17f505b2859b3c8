"""Decoders, which read a token sequence a few tokens at a time and return logits for the next token."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from inspect import isfunction
from typing import Any, ClassVar, Protocol, final

import numpy as np

from toyexp.base.errors import SessionError
from toyexp.interfaces.dataset import Batch
from toyexp.interfaces.ops import Ops, Tensor, broadcasts
from toyexp.interfaces.plan import Plan


class LogitSource(Protocol):
    """The part of a session's interface that a decoder uses."""

    plan: Plan
    version: int  # incremented when weights change, which invalidates decoder caches

    def logits(self, inputs: Batch) -> np.ndarray:
        """Return the float32 logits [B, T, V] for a batch of token ids."""


class Decoder(ABC):
    """Reader of a token sequence: `feed` appends tokens, and returns the logits of the next token.

    The sequence may have up to `context` positions: gpt2 has no embeddings for later positions, and llama was not
    trained on longer sequences. Request a new decoder when the context is full, or when a training step has changed the
    weights.
    """

    def __init__(self, session: LogitSource):
        self.session = session
        self.input = session.plan.model.reads.sequence  # batch array with the token ids
        (self.context,) = session.plan.inputs[self.input].shape
        self.position = 0  # number of ids read so far
        self._version = session.version

    @final
    def feed(self, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """Append token ids to the sequence; return the float32 logits [V] after the last one.

        Raise SessionError if an id is invalid, or if the ids do not fit into the context. Also raise it if the weights
        have changed since the decoder was created.
        """
        if self.session.version != self._version:
            raise SessionError("feed(): the session has taken a step or was closed; request a new decoder")
        array, below = np.asarray(ids), self.session.plan.inputs[self.input].below
        if array.ndim != 1 or array.dtype.kind not in "iu" or not len(array):
            raise SessionError(f"feed(): expected token ids [n], got {list(array.shape)} {array.dtype}")
        invalid_ids = array[(array < 0) | (array >= (2**31 if below is None else below))]
        if len(invalid_ids):
            raise SessionError(
                f"feed(): id {invalid_ids[0]} is not one of 0..{2**31 - 1 if below is None else below - 1}"
            )
        if self.position + len(array) > self.context:
            problem = f"{len(array)} ids after {self.position} earlier ones exceed the context of {self.context}"
            raise SessionError(f"feed(): {problem}")
        logits = self.do_feed(array.astype(np.int32))
        self.position += len(array)
        return logits

    @abstractmethod
    def do_feed(self, ids: np.ndarray) -> np.ndarray:
        """Return the logits [V] after the last of the int32 `ids`. The first id has position `self.position`."""


class IncrementalOps(Ops):
    """Ops for a decoder that caches keys and values: they compute only the new positions of a sequence.

    An engine defines a class that inherits from this class and from the engine's own ops, which compute whole
    sequences. An inherited op whose result may depend on other positions raises an error. To allow such an op, the
    class overrides it or lists it in `incremental_ops`.
    """

    incremental_ops: ClassVar[frozenset[str]] = frozenset()  # inherited ops that also work with new positions only

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        overrides = {name for base in cls.__mro__ if issubclass(base, IncrementalOps) for name in vars(base)}
        all_ops = {n for b in cls.__mro__ if issubclass(b, Ops) for n, op in vars(b).items() if isfunction(op)}
        for name in all_ops - overrides - cls.incremental_ops - cls.positionwise:
            if not name.startswith("_"):
                setattr(cls, name, cls._raising(name))

    @staticmethod
    def _raising(name: str) -> Callable[..., Tensor]:
        def raise_error(self: IncrementalOps, *_: Any, **__: Any) -> Tensor:
            raise self.position_error(name)

        return raise_error

    @staticmethod
    def position_error(name: str) -> SessionError:
        """Return the error for a model that calls the op `name`, which may read positions that are not cached."""
        return SessionError(f"decoder(): ops.{name} may read other positions, which are not cached")


# For each op that may combine positions: whether a call with these arguments reads only the new positions.
READS_NEW_POSITIONS: dict[str, Callable[..., bool]] = {
    # b must have the positions of a; it may wrongly be a table of all positions.
    **dict.fromkeys(("add", "mul", "div"), lambda a, b: broadcasts(b.shape, a.shape)),
    **dict.fromkeys(("sum", "mean"), lambda x, axis=None, keep=False: axis is not None and axis >= 2),
    "permute": lambda x, axes: tuple(axes[:2]) == (0, 1),
    "reshape": lambda x, shape: tuple(shape[:2]) == tuple(x.shape[:2]),
    "part": lambda x, axis, start, stop: axis >= 2,
    "concat": lambda parts, axis: axis >= 2,
}


def _checked(op: str) -> Callable[..., Tensor]:
    def call(self: IncrementalOps, *args: Any, **kwargs: Any) -> Tensor:
        if not READS_NEW_POSITIONS[op](*args, **kwargs):
            raise self.position_error(op)
        return getattr(super(IncrementalOps, self), op)(*args, **kwargs)

    return call


for _op in READS_NEW_POSITIONS:
    setattr(IncrementalOps, _op, _checked(_op))


class Recompute(Decoder):
    """Decoder that recomputes the whole sequence whenever tokens are appended. It works with every engine."""

    def __init__(self, session: LogitSource):
        super().__init__(session)
        self._ids = np.zeros(0, np.int32)

    def do_feed(self, ids: np.ndarray) -> np.ndarray:
        """Return the logits [V] at the last position."""
        self._ids = np.concatenate([self._ids[: self.position], ids])
        return self.session.logits({self.input: self._ids[None]})[0, -1]
