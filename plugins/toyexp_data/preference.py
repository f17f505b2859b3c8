"""Pairs of completions: JSON lines with a prompt, a chosen and a rejected completion."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from toyexp import UserError, is_changed, printable
from toyexp_data.chat import BadExample, Part, Rows
from toyexp_data.jsonl import Jsonl, parse, spread_held_out
from toyexp_data.text import tokenizer_facts

if TYPE_CHECKING:
    from toyexp_data.pairs import PairDataset

KEYS = {"prompt", "chosen", "rejected"}


@dataclass
class Preference(Jsonl):
    """Prompts with a chosen and a rejected completion, one JSON object per line, for objective=preference."""

    name: ClassVar[str] = "preference"
    fills: ClassVar[tuple[str, ...]] = ()

    path: str = ""  # file or pattern ('pairs/*.jsonl'); a line has "prompt", "chosen" and "rejected"

    def check(self) -> None:
        """Raise UserError for invalid settings, for settings of other JSON lines, and for missing files."""
        super().check()
        for name in ("train_on", "template", "date", "pack"):
            if is_changed(self, name):
                raise UserError(f"data.{name}={getattr(self, name)}: has no effect with data=preference; leave it out")

    @classmethod
    def recognises(cls, path: Path) -> int:
        """Return 0 (no match): the suffix .jsonl does not show whether a file contains preference pairs."""
        return 0

    def open(self, vocabulary: Path | None) -> PairDataset:
        """Read, split and tokenize the pairs; with on_error=skip leave out and count unusable lines."""
        from toyexp_data.pairs import PairDataset

        skipped: list[str] = []
        pairs = self._usable(self._lines(), parse_pair, skipped)
        if len(pairs) < 2:
            raise UserError(f"{self.path}: {len(pairs)} pairs; at least one to train on and one to hold out are needed")
        held_out = spread_held_out(len(pairs), self.val_fraction)
        tokenizer = self._tokenizer([rows for _, rows in pairs], held_out, vocabulary)
        train, held = (self._tokenize(compress(pairs, side), tokenizer, skipped) for side in (~held_out, held_out))
        facts = {"path": self.path, "pairs": len(pairs), "skipped": len(skipped), **tokenizer_facts(tokenizer)}
        return PairDataset(train, held, tokenizer, False, self.eval_batches, facts)


def parse_pair(line: bytes) -> Rows:
    """Parse a line with prompt, chosen and rejected as two rows. Raise BadExample if the line is invalid."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict) or value.keys() != KEYS:
        found = f"has the keys {printable(', '.join(value))}" if isinstance(value, dict) else "is not one JSON object"
        raise BadExample(f"{found}; expected prompt, chosen and rejected")
    rows = []
    for key in ("chosen", "rejected"):
        texts = parse(json.dumps({"prompt": value["prompt"], "completion": value[key]}).encode())
        rows.append([Part(texts["prompt"], False), Part(texts["completion"], True, end=True)])
    return Rows(rows)
