"""A decoder reads a sequence piece by piece and says what may come next: what text is written with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from inspect import isfunction
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, cast, final

import numpy as np

from toyexp.base.errors import SessionError
from toyexp.interfaces.ops import Ops, Tensor

if TYPE_CHECKING:
    from toyexp.interfaces.dataset import Batch
    from toyexp.interfaces.plan import Plan


class Weights(Protocol):
    """What a decoder reads by: a session, of which it needs no more."""

    plan: Plan
    version: int  # counts what makes the memory of earlier positions worthless

    def logits(self, inputs: Batch) -> np.ndarray:
        """The float32 logits [B, T, V]."""


class Decoder(ABC):
    """The logits after one sequence that grows, by the weights that the session has now.

    It holds the positions of a row of the plan, `context`, of any model: beyond them gpt2 has no position, and llama
    was not trained. Once it is full, or the session has taken a step, ask for a new one.
    """

    def __init__(self, session: Weights):
        self.session = session
        self.input = session.plan.model.reads.sequence  # the name of what it reads
        (self.context,) = session.plan.inputs[self.input].shape
        self.position = 0  # ids read so far
        self._version = session.version

    @final
    def feed(self, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """Reads these ids behind the earlier ones; returns the float32 logits [V] after the last of them.

        Raises SessionError for what are no ids, for more than the context holds, and once the weights have changed.
        """
        if self.session.version != self._version:
            raise SessionError("feed(): the session took a step or was closed since; ask for a new decoder")
        given, below = np.asarray(ids), self.session.plan.inputs[self.input].below
        if given.ndim != 1 or given.dtype.kind not in "iu" or not len(given):
            raise SessionError(f"feed(): expected token ids [n], got {list(given.shape)} {given.dtype}")
        wrong = given[(given < 0) | (given >= (2**31 if below is None else below))]
        if len(wrong):
            raise SessionError(f"feed(): {wrong[0]} is not one of 0..{2**31 - 1 if below is None else below - 1}")
        if self.position + len(given) > self.context:
            raise SessionError(f"feed(): {len(given)} ids after {self.position} exceed the context of {self.context}")
        logits = self.do_feed(given.astype(np.int32))
        self.position += len(given)
        return logits

    @abstractmethod
    def do_feed(self, ids: np.ndarray) -> np.ndarray:
        """The logits after the last of int32 `ids`, which take the positions from `position` on."""


class IncrementalOps(Ops):
    """Ops for new positions alone, of a decoder that keeps what it needs of the earlier ones.

    Subclass it together with the ops of whole sequences. Of those what is not positionwise is refused, unless the
    subclass defines it anew or names it in `keeps`.
    """

    incremental_ops: ClassVar[frozenset[str]] = (
        frozenset()
    )  # inherited ops that do the right thing for new positions alone

    def __init_subclass__(cls, **named: Any) -> None:
        super().__init_subclass__(**named)
        own = {name for base in cls.__mro__ if issubclass(base, IncrementalOps) for name in vars(base)}
        whole = {n for b in cls.__mro__ if issubclass(b, Ops) for n, op in vars(b).items() if isfunction(op)}
        for name in whole - own - cls.incremental_ops - cls.positionwise:
            if not name.startswith("_"):
                setattr(cls, name, cls._refusal(name))

    @staticmethod
    def _refusal(name: str) -> Callable[..., Tensor]:
        def refuse(self: IncrementalOps, *_: Any, **__: Any) -> Tensor:
            raise self.position_error(name)

        return refuse

    @staticmethod
    def position_error(name: str) -> SessionError:
        """Return the error for a model whose `ops.name` cannot be computed of new positions alone."""
        return SessionError(f"decoder(): the model's ops.{name} may look beyond its own position")

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        """Add tensors of the same positions; refuse a table of all positions."""
        return cast("Any", super()).add(a, self._ending("add", b, a))

    def mul(self, a: Tensor, b: Tensor) -> Tensor:
        """Multiply tensors of the same positions."""
        return cast("Any", super()).mul(a, self._ending("mul", b, a))

    def _ending(self, op: str, b: Tensor, a: Tensor) -> Tensor:
        if a.shape[len(a.shape) - len(b.shape) :] != b.shape:
            raise self.position_error(op)
        return b

    def reshape(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        """Reshape the features of each position."""
        if tuple(shape[:2]) != tuple(x.shape[:2]):
            raise self.position_error("reshape")
        return cast("Any", super()).reshape(x, shape)

    def part(self, x: Tensor, axis: int, start: int, stop: int) -> Tensor:
        """Take some features of each position."""
        if axis < 2:
            raise self.position_error("part")
        return cast("Any", super()).part(x, axis, start, stop)

    def concat(self, parts: Sequence[Tensor], axis: int) -> Tensor:
        """Join the features of each position."""
        if axis < 2:
            raise self.position_error("concat")
        return cast("Any", super()).concat(parts, axis)


class Recompute(Decoder):
    """Computes the whole sequence anew for every piece: for any engine, such as one of static graphs."""

    def __init__(self, session: Weights):
        super().__init__(session)
        self._ids = np.zeros(0, np.int32)

    def do_feed(self, ids: np.ndarray) -> np.ndarray:
        """See Decoder."""
        self._ids = np.concatenate([self._ids[: self.position], ids])
        return self.session.logits({self.input: self._ids[None]})[0, -1]
