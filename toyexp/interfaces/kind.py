"""A kind of data, such as tokens or images: data give it, models learn from it, recipes train models of it.

Whatever depends on the kind asks it here, so that a plugin can bring another one: AUDIO = Kind("audio", "clip").
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from toyexp.interfaces.dataset import Batch, Dataset, InputSpec


def perplexity(loss: float) -> float:
    """Return exp(loss), of nats a token; a loss above 700 counts as 700, as a float64 holds no more."""
    return math.exp(min(loss, 700))


class DerivedMetric(NamedTuple):
    """A number that follows from a held-out loss: its name, and how it is shown to a person."""

    name: str
    value: float | None  # None where the data does not tell
    text: str


@dataclass(frozen=True, eq=False)
class Kind:
    """A kind of data; two of one name are the same one."""

    name: str  # what messages call it
    unit: str  # one of what data and speed are counted in
    targets: str = "classes"  # what a target is one of, in the plural
    text: bool = False  # whether it is text, whose tokenizer a model's file holds too
    sequence: str = ""  # the input of token ids that a model can continue; empty: there is none

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Kind) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __str__(self) -> str:
        return self.name

    @property
    def units(self) -> str:
        """What data and speed are counted in: tokens, images."""
        return f"{self.unit}s"

    def inputs(self, context: int) -> dict[str, InputSpec]:
        """The arrays of a batch of sequences, each [context] a row: ids, the targets after them, their weights."""
        kinds = {self.sequence: "int32", "targets": "int32", "weights": "float32"}
        return {name: InputSpec((context,), kind) for name, kind in kinds.items() if name}

    def with_bounds(self, inputs: Mapping[str, InputSpec], vocab: int) -> dict[str, InputSpec]:
        """The arrays of a batch with a bound for ids and targets: their own, or `vocab`."""
        ids = self.sequence, "targets"
        return {n: replace(s, below=s.below or vocab) if n in ids else s for n, s in inputs.items()}

    def derived_metrics(self, loss: float, held_out: Sequence[Batch], dataset: Dataset) -> list[DerivedMetric]:
        """What else follows from a held-out loss, in nats a target; a model's own scores stand beside it."""
        return []


class Text(Kind):
    """Text as token ids."""

    def derived_metrics(self, loss: float, held_out: Sequence[Batch], dataset: Dataset) -> list[DerivedMetric]:
        """Perplexity, and the bits of a byte where a tokenizer says which bytes a token stands for."""
        bits = self._bits_per_byte(loss, held_out, dataset)
        return [
            DerivedMetric("perplexity", perplexity(loss), f"perplexity {perplexity(loss):.2f}"),
            DerivedMetric("bits_per_byte", bits, "" if bits is None else f"{bits:.3f} bits per byte"),
        ]

    def _bits_per_byte(self, loss: float, held_out: Sequence[Batch], dataset: Dataset) -> float | None:
        """The loss of all targets over the bytes that they stand for."""
        tokenizer = dataset.tokenizer
        if tokenizer is None:
            return None
        import numpy as np

        lengths = np.array([len(tokenizer.bytes_of(i)) for i in range(tokenizer.vocab)])
        kept = np.concatenate([b["targets"][b["weights"] > 0] for b in held_out])
        total = int(lengths[kept].sum())
        return loss * len(kept) / total / math.log(2) if total else None


TOKENS = Text("tokens", "token", "token ids", text=True, sequence="tokens")
IMAGES = Kind("images", "image")
