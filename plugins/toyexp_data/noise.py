"""Random token ids: something to compute on where speed is the question and no text is needed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import toyexp
from toyexp import TOKENS, Data, Kind
from toyexp.base import MOST, generator, require_within

COUNT = 1_000_000
HELD_OUT = 50_000
EVAL_BATCHES = 16


@dataclass
class Random(Data):
    """Random token ids, for measuring speed: there is nothing in them to learn."""

    name: ClassVar[str] = "random"
    gives: ClassVar[Kind] = TOKENS

    vocab: int = 1024  # ids run from 0 to vocab - 1

    def check(self) -> None:
        """Raises UserError for a vocabulary that cannot be."""
        require_within("data", self, vocab=f"[1,{MOST}]")

    def open(self, vocabulary: Path | None) -> toyexp.TokenDataset:
        """The same ids every time; without a tokenizer, whatever `vocabulary` is."""
        ids = generator(0, "data=random").integers(0, self.vocab, COUNT, dtype="int32")
        return toyexp.TokenDataset(
            ids[HELD_OUT:], ids[:HELD_OUT], None, self.vocab, EVAL_BATCHES, {"vocab": self.vocab}
        )
