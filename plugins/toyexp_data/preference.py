"""Pairs of completions: records with a prompt, a chosen and a rejected completion, or with a label."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any, ClassVar

from toyexp import RunPreview, UserError
from toyexp.formats import Record
from toyexp_data.chat import Example, Rows
from toyexp_data.columns import Value, convert_pair
from toyexp_data.examples import Placed, RecordData, join_rows


@dataclass
class Preference(RecordData):
    """Prompts with a chosen and a rejected completion, from JSON or tables, for objective=preference."""

    name: ClassVar[str] = "preference"
    pairs: ClassVar[bool] = True

    def warnings(self, preview: RunPreview) -> Iterable[str]:
        """Yield a warning for each setting without effect. Raise UserError if the objective needs pairs."""
        yield from super().warnings(preview)
        kind = preview.config["objective"].get("kind", "kto")
        if preview.dataset.describe()["labels"] and kind != "kto":
            problem = "its completions have labels and are not pairs"
            raise UserError(f"objective.kind={kind}: needs pairs, but {self.path}: {problem}; type objective.kind=kto")

    def values(self, record: Record) -> Sequence[Value]:
        """Return the chosen and the rejected completion, or one completion with a label.

        Raise BadExample if the record has neither.
        """
        return convert_pair(record, self.columns, self.system)

    def join(self, part: Placed[Rows], name: str) -> Placed[Rows]:
        """Return the pairs of the part `name`; join completions with labels to pairs.

        Those of the rarer label repeat, so both labels have the same weight (Ethayarajh et al. 2024, section 4.2).
        """
        good, bad = ([example for example in part if example[1].label is label] for label in (True, False))
        if not good and not bad:
            return part
        if not good or not bad:
            missing = f"the {name} part has none with the label {str(not good).lower()}"
            raise UserError(f"{self.path}: completions with labels (objective.kind=kto) need both labels; {missing}")
        pairs = islice(zip(cycle(good), cycle(bad), strict=True), max(len(good), len(bad)))
        joined = [(place, join_rows((chosen, rejected))) for (place, chosen), (_, rejected) in pairs]
        return [*(example for example in part if example[1].label is None), *joined]

    def count(self, examples: Placed[Rows], rows: Sequence[Example]) -> tuple[dict[str, Any], list[str]]:
        """Return the numbers of pairs and labels, and a note on pairs of equal completions.

        Raise UserError if all pairs are equal.
        """
        labels, pairs = sum(part.label is not None for _, part in examples), [*zip(rows[::2], rows[1::2], strict=True)]
        equal = sum(good.ids.tolist() == bad.ids.tolist() for good, bad in pairs)
        if equal == len(pairs) and not labels:
            raise UserError(f"{self.path}: chosen and rejected are equal in all {equal} pairs; nothing can be learned")
        notes = [f"{equal} of {len(pairs)} pairs teach nothing: their completions are equal"] if equal else []
        return {"pairs": len(pairs), "labels": labels, "equal_pairs": equal}, notes
