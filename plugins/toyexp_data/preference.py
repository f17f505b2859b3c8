"""Pairs of completions: records with a prompt, a chosen and a rejected completion, or with a label."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import compress, cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from toyexp import RunPreview, UserError
from toyexp.formats import BadExample
from toyexp_data.chat import PLAIN_TEMPLATE, Rows, plain_rows
from toyexp_data.columns import Pair, convert_pair
from toyexp_data.examples import Placed, RecordData, example_rows
from toyexp_data.text import tokenizer_facts

if TYPE_CHECKING:
    from toyexp_data.pairs import PairDataset


@dataclass
class Preference(RecordData):
    """Prompts with a chosen and a rejected completion, from JSON or tables, for objective=preference."""

    name: ClassVar[str] = "preference"

    @classmethod
    def recognises(cls, path: Path) -> int:
        """Return 0 (no match): the name of a file does not show whether it contains preference pairs."""
        return 0

    def warnings(self, preview: RunPreview) -> Iterable[str]:
        """Yield a warning for each setting without effect. Raise UserError if the objective needs pairs."""
        yield from super().warnings(preview)
        kind = preview.config["objective"].get("kind", "kto")
        if preview.dataset.describe()["labels"] and kind != "kto":
            problem = "its completions have labels and are not pairs"
            raise UserError(f"objective.kind={kind}: needs pairs, but {self.path}: {problem}; type objective.kind=kto")

    def open(self, vocabulary: Path | None) -> PairDataset:
        """Read, split and tokenize the pairs; with on_error=skip leave out and count unusable ones."""
        import numpy as np

        from toyexp_data.pairs import PairDataset

        skipped: list[str] = []
        values = self._read(partial(convert_pair, columns=self.columns, system=self.system), skipped)
        values, mask, split_facts = self._split(values, skipped)
        halves = [half for _, pair in values for half in pair if half]
        chats = sum(bool(half.messages) for half in halves)
        template = self._template(vocabulary) if chats else None
        make = partial(_rows, write=template.rows if template else plain_rows)
        sides = (~mask, "training"), (mask, "held-out")
        parts = [self._usable(self._match([*compress(values, side)], name), make, skipped) for side, name in sides]
        rows, held_out = [each for part in parts for _, each in part], np.repeat([False, True], [*map(len, parts)])
        tokenizer = self._tokenizer(rows, held_out, vocabulary)
        if chats:
            tokenizer.chat_template = template.text if template else PLAIN_TEMPLATE
        train, held = (self._tokenize(part, tokenizer, skipped, False) for part in parts)
        facts = {
            **self._facts(halves, rows, template, skipped),
            **split_facts,
            "chats_in_rows": 0,  # a pair has two rows by itself
            "pairs": len(rows),
            "labels": len(halves) if len(halves) != 2 * len(values) else 0,
            **tokenizer_facts(tokenizer),
        }
        pairs = [pair for part in (train, held) for pair in zip(part[::2], part[1::2], strict=True)]
        equal = facts["equal_pairs"] = sum(good.ids.tolist() == bad.ids.tolist() for good, bad in pairs)
        if equal == len(pairs) and not facts["labels"]:
            raise UserError(f"{self.path}: chosen and rejected are equal in all {equal} pairs; nothing can be learned")
        notes = [f"{equal} of {len(pairs)} pairs teach nothing: their completions are equal"] if equal else []
        notes += self.bpe_notes(tokenizer)
        dataset = PairDataset(train, held, tokenizer, "none", self.eval_batches, facts, notes)
        dataset.chat_template = tokenizer.chat_template if chats else ""
        return dataset

    def _match(self, part: Placed[Pair], name: str) -> Placed[Pair]:
        """Return the pairs of the part `name`; join completions with labels to pairs.

        Those of the rarer label repeat, so both labels have the same weight (Ethayarajh et al. 2024, section 4.2).
        """
        if all(pair.chosen and pair.rejected for _, pair in part):
            return part
        chosen = [(place, pair.chosen) for place, pair in part if pair.chosen]
        rejected = [(place, pair.rejected) for place, pair in part if pair.rejected]
        if not chosen or not rejected:
            missing = f"the {name} part has none with the label {str(not chosen).lower()}"
            raise UserError(f"{self.path}: completions with labels (objective.kind=kto) need both labels; {missing}")
        count = max(len(chosen), len(rejected))
        pairs = islice(zip(cycle(chosen), cycle(rejected), strict=True), count)
        return [(place, Pair(good, bad)) for (place, good), (_, bad) in pairs]


def _rows(pair: Pair, write: Callable[..., Rows]) -> Rows:
    """Return the chosen and the rejected completion as two rows. Raise BadExample if a template makes more of them."""
    halves = [example_rows(half, write, "answers") for half in pair if half]
    if any(len(half.rows) > 1 for half in halves):
        raise BadExample("a completion with several answers becomes several rows with this chat template")
    off_prompt, dropped = (sum(counts) for counts in zip(*(half[1:] for half in halves), strict=True))
    return Rows([half.rows[0] for half in halves], off_prompt, dropped)
