"""Pairs of completions: JSON lines with a chosen and a rejected completion of a prompt, as texts or messages."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from toyexp import Tokenizer, UserError, is_changed, printable
from toyexp_data.chat import BadExample, Example, Message, Rows
from toyexp_data.jsonl import Jsonl, example_rows, parse_messages, parse_object, parse_text, parse_tools

if TYPE_CHECKING:
    from toyexp_data.pairs import PairDataset

EXPECTED = "expected chosen and rejected, and a prompt unless they begin with it"


@dataclass
class Preference(Jsonl):
    """Pairs of a chosen and a rejected completion, one JSON object per line, for objective=preference."""

    name: ClassVar[str] = "preference"

    path: str = ""  # file or pattern ('pairs/*.jsonl'); a line has "chosen" and "rejected", and may have "prompt"

    def check(self) -> None:
        """Raise UserError for invalid settings, for settings of other JSON lines, and for missing files."""
        super().check()
        for name in ("train_on", "pack"):
            if is_changed(self, name):
                raise UserError(f"data.{name}={getattr(self, name)}: has no effect with data=preference; leave it out")

    @classmethod
    def recognises(cls, path: Path) -> int:
        """Return 0 (no match): the suffix .jsonl does not show whether a file contains preference pairs."""
        return 0

    def _parse_line(self, line: bytes) -> dict[str, Any]:
        return parse_pair(line)

    def _make_rows(self, value: Mapping[str, Any], write: Callable[[Sequence[Message], Any], Rows]) -> Rows:
        sides = [_keep_last_answer(example_rows(value[key], write)) for key in ("chosen", "rejected")]
        return Rows(
            [side.rows[0] for side in sides],
            *(sum(counts) for counts in zip(*(side[1:] for side in sides), strict=True)),
        )

    def _make_dataset(
        self, train: list[Example], held_out: list[Example], tokenizer: Tokenizer, facts: dict[str, Any]
    ) -> PairDataset:
        from toyexp_data.pairs import PairDataset

        pairs = [pair for part in (train, held_out) for pair in zip(part[::2], part[1::2], strict=True)]
        equal = sum(chosen.ids.tolist() == rejected.ids.tolist() for chosen, rejected in pairs)
        facts |= {"equal_pairs": equal, "chats_in_rows": 0}
        notes = [f"{equal} of {len(pairs)} pairs teach nothing: their completions are equal"] if equal else []
        notes += self.bpe_notes(tokenizer)
        return PairDataset(train, held_out, tokenizer, False, self.eval_batches, facts, notes)


def parse_pair(line: bytes) -> dict[str, Any]:
    """Parse a line with chosen and rejected, two texts or lists of messages, and return both as parsed JSON lines.

    If a line has no prompt, the prompt is the common beginning of both texts or lists. Raise BadExample if the line is
    invalid. Other keys are ignored.
    """
    value = parse_object(line, EXPECTED)
    if not value.keys() >= {"chosen", "rejected"}:
        raise BadExample(f"has the keys {printable(', '.join(value)) or 'none'}; {EXPECTED}")
    prompt, sides = value.get("prompt"), {key: value[key] for key in ("chosen", "rejected")}
    if all(isinstance(side, list) for side in sides.values()):
        before, tools = prompt if isinstance(prompt, list) else [], parse_tools(value.get("tools"))
        chats = {key: parse_messages([*before, *side]) for key, side in sides.items()}
        if isinstance(prompt, str) and all(chat[0].role == "assistant" for chat in chats.values()):
            chats = {key: [Message("user", prompt), *chat] for key, chat in chats.items()}
        return {"messages": True, **{key: {"messages": chat, "tools": tools} for key, chat in chats.items()}}
    texts = {key: parse_text(side, key) for key, side in sides.items()}
    if "prompt" in value:
        return {key: {"prompt": parse_text(prompt, "prompt"), "completion": text} for key, text in texts.items()}
    prompt = os.path.commonprefix([*texts.values()]).removesuffix(" ")  # noqa: RUF071 - of texts, not of paths
    return {key: {"prompt": prompt, "completion": text.removeprefix(prompt)} for key, text in texts.items()}


def _keep_last_answer(rows: Rows) -> Rows:
    """Return the last row, in which only the last answer is learned: earlier ones belong to the prompt."""
    parts = rows.rows[-1]
    last = max(i for i, part in enumerate(parts) if part.learned)
    return rows._replace(rows=[[part._replace(learned=i == last) for i, part in enumerate(parts)]])
