"""Kinds of data, such as tokens or images.

A data plugin provides one kind; models and recipes declare the kinds that they read. Everything that depends on the
kind is a method of the class Kind, so a plugin can add a kind: AUDIO = Kind("audio", "clip").
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from toyexp.base.lazy import numpy as np
from toyexp.interfaces.dataset import Batch, Dataset, InputSpec


def perplexity(loss: float) -> float:
    """Return exp(loss), with the loss in nats per token. To avoid float64 overflow, count losses above 700 as 700."""
    return math.exp(min(loss, 700))


class DerivedMetric(NamedTuple):
    """A number computed from a held-out loss, with the text that reports it."""

    name: str
    value: float | None  # None if the data does not determine it
    text: str


@dataclass(frozen=True, eq=False)
class Kind:
    """A kind of data, such as tokens or images. Two kinds with the same name are equal."""

    name: str  # used in messages
    unit: str  # singular noun for one item of data, in counts and speeds: token, image
    targets: str = "classes"  # plural noun for the targets, for messages
    text: bool = False  # True if models of this kind have a tokenizer, which is saved in their files
    sequence: str = ""  # name of the batch array with the token ids that a model continues; empty: none

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Kind) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __str__(self) -> str:
        return self.name

    @property
    def units(self) -> str:
        """Plural of `unit`, such as tokens or images."""
        return f"{self.unit}s"

    def inputs(self, context: int) -> dict[str, InputSpec]:
        """Return specs for the arrays of a batch of sequences, keyed by array name.

        The arrays are token ids, targets and target weights. Each has `context` values per row.
        """
        kinds = {self.sequence: "int32", "targets": "int32", "weights": "float32"}
        return {name: InputSpec((context,), kind) for name, kind in kinds.items() if name}

    def with_bounds(self, inputs: Mapping[str, InputSpec], vocab: int) -> dict[str, InputSpec]:
        """Return a copy of `inputs` in which token ids and targets must be below `vocab`.

        A spec that already has an upper bound (`below`) keeps it.
        """
        ids = self.sequence, "targets"
        return {
            n: replace(s, below=s.below or vocab) if n in ids and s.dtype.startswith("int") else s
            for n, s in inputs.items()
        }

    def derived_metrics(self, loss: float, held_out: Sequence[Batch], dataset: Dataset) -> list[DerivedMetric]:
        """Return metrics computed from `loss`, a held-out loss in nats per target.

        The metrics that `Model.scores` returns are not included.
        """
        return []


class Text(Kind):
    """Text as token ids."""

    def derived_metrics(self, loss: float, held_out: Sequence[Batch], dataset: Dataset) -> list[DerivedMetric]:
        """Return perplexity and bits per byte.

        Bits per byte is None if the tokenizer does not know the bytes of its tokens.
        """
        bits = self._bits_per_byte(loss, held_out, dataset)
        return [
            DerivedMetric("perplexity", perplexity(loss), f"perplexity {perplexity(loss):.2f}"),
            DerivedMetric("bits_per_byte", bits, "" if bits is None else f"{bits:.3f} bits per byte"),
        ]

    def _bits_per_byte(self, loss: float, held_out: Sequence[Batch], dataset: Dataset) -> float | None:
        """Return the total loss in bits divided by the number of bytes of the target tokens.

        Return None if there is no tokenizer, or if the targets have no bytes.
        """
        tokenizer = dataset.tokenizer
        if tokenizer is None:
            return None
        lengths = np.array([len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab)])
        targets = np.concatenate([b["targets"][b["weights"] > 0] for b in held_out])
        total = int(lengths[targets].sum())
        return loss * len(targets) / total / math.log(2) if total else None


TOKENS = Text("tokens", "token", "token ids", text=True, sequence="tokens")
IMAGES = Kind("images", "image")
VECTORS = Kind("vectors", "vector", targets="targets")
