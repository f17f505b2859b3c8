"""Opened data: batches of numpy arrays, where batch k is a function of (seed, k) alone.

So every engine sees the same data, micro-batches cut the same rows, and a saved position is one integer.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, cast

if TYPE_CHECKING:
    import numpy as np

    from toyexp.tokenizers.tokenizer import Tokenizer

Batch = Mapping[str, "np.ndarray"]


@dataclass(frozen=True)
class InputSpec:
    """One array of a batch, without its leading batch axis."""

    shape: tuple[int, ...]
    dtype: str
    below: int | None = None  # what integers must stay below, from 0; None: unchecked
    optional: bool = False  # a batch without it means zeros


class Dataset(ABC):
    """Opened data: what it is, and its batches."""

    plugin_kind: ClassVar[str] = "data"  # by which its errors are told

    tokenizer: Tokenizer | None = None
    vocab: int = 0  # ids run from 0 to vocab - 1 (or the number of classes)
    chat_template: str = ""  # in Jinja, that its conversations were written by

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """What run_start records: sizes and a digest of the contents."""

    def omissions(self) -> Sequence[str]:
        """What of the source is not learned from, a phrase each: how much of how much, and which key changes that."""
        return ()

    def remarks(self) -> list[str]:
        """What a person should know of it before training, in a few words each."""
        return []

    def gguf_metadata(self) -> dict[str, Any]:
        """What a reader of the exported model must know of its data, without the architecture's prefix."""
        return {}

    def match_preprocessing(self, written: Mapping[str, Any]) -> None:
        """Shows itself as the data did whose `gguf_metadata` are in a model's file, for `toyexp eval`.

        Raises UserError for data that this model cannot be scored on. Keys that the file lacks are missing.
        """
        return

    def prompt(self) -> list[int]:
        """Ids for a model to continue, as a held-out text begins; only asked of data with a tokenizer."""
        assert self.tokenizer is not None
        return cast("list[int]", self.tokenizer.prompt("").tolist())

    @abstractmethod
    def batches(self, context: int, rows: int, seed: int) -> Batches:
        """Batches of `rows` examples, of `context` positions each where the data are sequences (0: they are not)."""


class Batches(ABC):
    """A stream of training batches with random access, and the fixed held-out batches."""

    plugin_kind: ClassVar[str] = "data"  # by which its errors are told

    inputs: Mapping[str, InputSpec]  # the arrays of each batch; always with integer `targets` and float `weights`
    facts: Mapping[str, Any] = MappingProxyType({})  # what run_start records of them beside what describes the data
    omissions: Sequence[str] = ()  # what of the data their rows have no room for, in the words of Dataset.omissions
    rows_per_epoch: int | None = None  # rows of one pass over the training data; None: not known, or without end

    @abstractmethod
    def batch(self, k: int) -> Batch:
        """Training batch `k`, counted from 0 without end."""

    def block(self, first: int, count: int) -> Batch | None:
        """The rows of `count` batches from batch `first` on, one after another; None where one by one is as fast."""
        return None

    @abstractmethod
    def held_out(self) -> Sequence[Batch]:
        """The batches that every evaluation uses, each of `rows` rows; what only fills one up has weights of 0."""


def batch_digest(batch: Batch) -> str:
    """16 hex digits that identify a batch, for comparing the data order of two runs."""
    digest = hashlib.sha256()
    for name in sorted(batch):
        digest.update(batch[name].tobytes())
    return digest.hexdigest()[:16]
