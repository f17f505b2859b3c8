"""Opened data, which yields batches of numpy arrays. Training batch k depends only on the seed and k.

Therefore every engine reads the same data, and a step reads the same rows for every size of the micro-batches. To
record the position in the data, a checkpoint stores only the number k.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, cast

from toyexp.base.lazy import numpy as np

if TYPE_CHECKING:
    from toyexp.tokenizers.tokenizer import Tokenizer

Batch = Mapping[str, "np.ndarray"]


@dataclass(frozen=True)
class InputSpec:
    """Shape and dtype of one array of a batch, without its batch axis."""

    shape: tuple[int, ...]
    dtype: str
    below: int | None = None  # integers must be from 0 to below - 1; None: not checked
    optional: bool = False  # True: a batch may omit the array, which then counts as zeros
    counts: bool = False  # True: if logits are computed without the array, each row is 0, 1, 2, ..; False: zeros


class Dataset(ABC):
    """Base class of opened data, with methods that describe it and return its batches."""

    plugin_kind: ClassVar[str] = "data"  # kind of plugin that error messages name

    tokenizer: Tokenizer | None = None
    vocab: int = 0  # number of token ids or classes
    chat_template: str = ""  # Jinja template that formats its conversations; empty: none

    # What the methods below return, unless a subclass overrides them.
    _facts: Mapping[str, Any] = MappingProxyType({})
    _left_out: Sequence[str] = ()
    _remarks: Sequence[str] = ()

    def describe(self) -> dict[str, Any]:
        """Return JSON data for the event run_start in events.jsonl: sizes, and a digest of the contents."""
        return dict(self._facts)

    def omissions(self) -> Sequence[str]:
        """Return a phrase for each portion of the source data that training does not use.

        The phrase says how much is omitted, and which setting changes that.
        """
        return self._left_out

    def remarks(self) -> list[str]:
        """Return short notes about the data to print before training."""
        return list(self._remarks)

    def gguf_metadata(self) -> dict[str, Any]:
        """Return metadata about the data to store in an exported model.

        The keys have no prefix: toyexp adds the architecture's name when it writes the file.
        """
        return {}

    def match_preprocessing(self, metadata: Mapping[str, Any]) -> None:
        """Preprocess this data in the same way as the training data of a model file, for `toyexp eval`.

        `metadata` holds the values that the model file has for keys of `gguf_metadata`. Raise UserError if the model
        cannot be evaluated on this data.
        """
        return

    def prompt(self) -> list[int]:
        """Return the token ids of a prompt, from which a model generates sample texts during a run.

        By default the prompt is empty; a subclass may return the start of a held-out text. Requires a tokenizer.
        """
        assert self.tokenizer is not None
        return cast("list[int]", self.tokenizer.prompt("").tolist())

    @abstractmethod
    def batches(self, context: int, rows: int, seed: int) -> Batches:
        """Return batches of `rows` examples, whose order depends on `seed`.

        `context` is the number of positions of an example, or 0 if examples are not sequences.
        """


class Batches(ABC):
    """An endless stream of training batches with random access, and the fixed batches of the held-out set."""

    plugin_kind: ClassVar[str] = "data"  # kind of plugin that error messages name

    inputs: Mapping[str, InputSpec]  # arrays of each batch, incl. integer `targets` and float `weights`
    facts: Mapping[str, Any] = MappingProxyType({})  # JSON data for the event run_start, besides Dataset.describe()
    omissions: Sequence[str] = ()  # data that does not fit into rows, as in Dataset.omissions
    rows_per_epoch: int | None = None  # rows in one epoch of the training data; None: unknown or unlimited

    @abstractmethod
    def batch(self, k: int) -> Batch:
        """Return training batch `k`, for any `k` >= 0: the stream has no end."""

    def block(self, first: int, count: int) -> Batch | None:
        """Return the training batches `first` to `first + count - 1` as one batch with concatenated rows.

        Return None if reading the batches one by one is as fast.
        """
        return None

    @abstractmethod
    def held_out(self) -> Sequence[Batch]:
        """Return the batches of the held-out set, which every evaluation uses.

        Each batch has the number of rows that `Dataset.batches` was called with. Targets that only pad a batch have
        weight 0.
        """

    def held_out_sets(self) -> Mapping[str, Sequence[Batch]]:
        """Return parts of the held-out set by name, each with batches of `held_out`. By default there are none.

        An evaluation also reports the loss of each part.
        """
        return {}


class ChangedBatches(Batches):
    """Batches of another object, each changed by the method `_change`."""

    def __init__(self, batches: Batches, inputs: Mapping[str, InputSpec]):
        self._batches, self.inputs = batches, inputs
        self.facts, self.omissions, self.rows_per_epoch = batches.facts, batches.omissions, batches.rows_per_epoch

    @abstractmethod
    def _change(self, batch: Batch, k: int | None) -> Batch:
        """Return the changed batch. `k` is the number of a training batch, and None for a held-out one."""

    def batch(self, k: int) -> Batch:
        """Return training batch `k`."""
        return self._change(self._batches.batch(k), k)

    def held_out(self) -> Sequence[Batch]:
        """Return the held-out batches."""
        return [self._change(batch, None) for batch in self._batches.held_out()]

    def held_out_sets(self) -> Mapping[str, Sequence[Batch]]:
        """Return the named parts of the held-out set."""
        sets = self._batches.held_out_sets()
        return {name: [self._change(batch, None) for batch in part] for name, part in sets.items()}


def batch_digest(batch: Batch) -> str:
    """Return a digest of a batch as 16 hex digits.

    If the digests of two runs are equal at every step, the runs have read the same data in the same order.
    """
    digest = hashlib.sha256()
    for name in sorted(batch):
        digest.update(batch[name].tobytes())
    return digest.hexdigest()[:16]
