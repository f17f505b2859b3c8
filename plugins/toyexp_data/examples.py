"""Training examples in files of records: prompts with completions, conversations, or text."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, time
from functools import partial
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

import toyexp.formats
import toyexp.tokenizers
from toyexp import RunPreview, UserError, is_changed, suggest
from toyexp.base import iter_files, pluralise, require_choice, run_interruptibly
from toyexp.base import numpy as np
from toyexp.formats import BadExample, Record, iter_records, record_suffix
from toyexp_data.chat import PLAIN_TEMPLATE, Example, Part, Rows, plain_rows, tokenize
from toyexp_data.columns import NAMES, Value, convert
from toyexp_data.files import TRAIN, VALIDATION, FoundFiles, divide, find_records, is_record, split_name
from toyexp_data.held_out import MAX_NAMED, ON_ERROR
from toyexp_data.text import TokenizedData, tokenizer_facts

if TYPE_CHECKING:
    from toyexp_data.example_rows import ExampleDataset
    from toyexp_data.template import ChatTemplate

TRAIN_ON = ("answers", "last", "all")
TEMPLATES = ("auto", "plain")

T = TypeVar("T")
S = TypeVar("S")


class Place(NamedTuple):
    """Location of a record, such as FILE:LINE, and its split: train, validation, test, or None."""

    text: str
    split: str | None


Placed = list[tuple[Place, T]]


@dataclass
class RecordData(TokenizedData):
    """Base of data sets whose examples are the records of files: rows of a table, or JSON objects."""

    fills: ClassVar[tuple[str, ...]] = ("date",)
    pairs: ClassVar[bool] = False  # True: each example is two rows, a chosen and a rejected completion

    path: str = ""  # file, directory or pattern ('chats/*.jsonl'): jsonl, json, csv, tsv, parquet or arrow
    val_path: str = ""  # the same for the held-out examples; empty: by names (train, validation), or by val_fraction
    columns: dict[str, str] = field(default_factory=dict)  # other names: {prompt: ask} reads the column ask as prompt
    system: str = ""  # system message of conversations that have none
    template: str = "auto"  # chat template: auto (that of the tokenizer's GGUF file, if any, else plain) | plain
    date: str = ""  # date for chat templates that contain the date, such as 2026-11-21; empty: today
    on_error: str = "refuse"  # for an unusable example: refuse (stop the run) | skip (and count it)
    val_fraction: float = 0.05  # share of the examples held out for validation, evenly spread over the files; (0, 1]

    def check(self) -> None:
        """Raise UserError for invalid settings and missing files."""
        super().check()
        if not self.path:
            raise UserError(f"data={self.name} needs a file or directory of examples: data.path=...")
        self._files()
        require_choice("data", self, template=TEMPLATES, on_error=ON_ERROR)
        for name in self.columns:
            if name not in NAMES:
                raise UserError(f"data.columns.{name}: {suggest(name, NAMES)}")
        try:
            self._now()
        except ValueError:
            raise UserError(f"data.date={self.date}: must be a date such as 2026-11-21 or 2026-11-21T17:30") from None

    def warnings(self, preview: RunPreview) -> Iterable[str]:
        """Yield a warning for each setting that has no effect."""
        yield from super().warnings(preview)
        facts = preview.dataset.describe()
        for name in ("template", "system"):
            if is_changed(self, name) and not facts["chats"]:
                yield f"data.{name}={getattr(self, name)}: has no effect; {self.path} has no conversations"

    def _now(self) -> datetime:
        """Return the date and time for chat templates: the setting `date` or, if it is empty, today at midnight."""
        return datetime.fromisoformat(self.date) if self.date else datetime.combine(date.today(), time())

    def _files(self) -> FoundFiles:
        found = find_records(self.path)
        if self.val_path:
            found.hold_out(find_records(self.val_path, "val_path"))
        return found

    @abstractmethod
    def values(self, record: Record) -> Sequence[Value]:
        """Return a record as text, as prompt and completion, or as messages: two of them if it is a pair.

        Raise BadExample if that is not possible.
        """

    def join(self, part: Placed[Rows], name: str) -> Placed[Rows]:
        """Return the examples of the part `name`; a subclass may join or repeat some of them."""
        return part

    def count(self, examples: Placed[Rows], rows: Sequence[Example]) -> tuple[dict[str, Any], list[str]]:
        """Return facts for the run's record, and notes, about all examples and their tokenized rows."""
        return {"examples": len(rows)}, []

    def open(self, vocabulary: Path | None) -> ExampleDataset:
        """Read, split and tokenize the examples; with on_error=skip leave out and count unusable ones."""
        from toyexp_data.example_rows import ExampleDataset

        skipped: list[str] = []
        found = self._files()
        records = self._read(found, skipped)
        values = [value for _, record in records for value in record]
        chats = sum(bool(value.messages) for value in values)
        template = self._template(vocabulary) if chats else None
        write = template.rows if template else plain_rows
        examples = self._usable(records, partial(self._rows, write=write), skipped)
        train, held_out, split_facts = self._split(examples, skipped)
        train, held_out = self.join(train, "training"), self.join(held_out, "held-out")
        used = [rows for _, rows in (*train, *held_out)]
        tokenizer = self._tokenizer(used, len(train), vocabulary)
        if chats:
            tokenizer.chat_template = template.text if template else PLAIN_TEMPLATE
        # All rows of a conversation are in the same part.
        train_rows, held_rows = (self._tokenize(part, tokenizer, skipped) for part in (train, held_out))
        if not (train_rows or self.val_fraction == 1) or not held_rows:
            use, first = "to hold out" if train_rows else "to train on", f" ({skipped[0]})" if skipped else ""
            raise UserError(f"{self.path}: no example is left {use}{first}")
        counts, notes = self.count(examples, [*train_rows, *held_rows])
        read, others = (Counter(n for v in values for n in getattr(v, kind)) for kind in ("columns", "others"))
        facts = {
            "path": self.path,
            "val_path": self.val_path,
            "chats": chats,
            "chat_template": "gguf" if template else "plain" if chats else None,
            **self._template_facts(template, used),
            "columns": [*read],
            "other_columns": [name for name in others if name not in read],
            "skipped": len(skipped),
            "skipped_lines": list(skipped[:MAX_NAMED]),
            **found.facts(),
            **split_facts,
            **counts,
            **tokenizer_facts(tokenizer),
        }
        notes += [*self.bpe_notes(tokenizer), *_notes(facts)]
        left_out = found.omissions() + _omissions(len(train_rows) + len(held_rows), skipped, facts["other_splits"])
        pack = getattr(self, "pack", "none")
        dataset = ExampleDataset(
            train_rows, held_rows, tokenizer, pack, self.pairs, self.eval_batches, facts, left_out, notes
        )
        dataset.chat_template = tokenizer.chat_template if chats else ""
        return dataset

    def _read(self, found: FoundFiles, skipped: list[str]) -> Placed[Sequence[Value]]:
        """Return the values of all usable records."""
        records: Placed[Sequence[Value]] = []
        files = [(path, TRAIN if found.held_out else split_name(path)) for path in found.files]
        for path, split in [*files, *((path, VALIDATION) for path in found.held_out)]:
            located = ((Place(text, split), record) for text, record in iter_records(path))
            records += self._usable(located, self.values, skipped)
        if "split" in self.columns:
            records = [(place._replace(split=values[0].split), values) for place, values in records]
        return records

    def _rows(self, values: Sequence[Value], write: Callable[..., Rows]) -> Rows:
        """Return the training rows of the values of a record. The function `write` converts a conversation to rows."""
        parts = [example_rows(value, write, getattr(self, "train_on", "answers")) for value in values]
        if self.pairs and any(len(part.rows) > 1 for part in parts):
            raise BadExample("a completion with several answers becomes several rows with this chat template")
        return join_rows(parts)._replace(label=values[0].label)

    def _usable(self, located: Iterable[tuple[Place, S]], make: Callable[[S], T], skipped: list[str]) -> Placed[T]:
        """Apply `make` to the value of each record; return pairs of place and result.

        For an unusable record, raise UserError with its location, or with on_error=skip add the reason to `skipped`.
        """
        results = []
        for place, value in located:
            try:
                results.append((place, make(value)))
            except UserError as reason:
                if self.on_error == "refuse":
                    # If even the first record fails, and not for a null, the file is probably a wrong one: no hint.
                    is_odd = results or "(null)" in str(reason)
                    hint = " (data.on_error=skip leaves such examples out)" if is_odd else ""
                    raise UserError(f"{place.text}: {reason}{hint}") from None
                skipped.append(f"{Path(place.text).name}: {reason}")
        return results

    def _split(
        self, examples: Placed[Rows], skipped: Sequence[str]
    ) -> tuple[Placed[Rows], Placed[Rows], dict[str, Any]]:
        """Return the examples to train on, those that are held out, and facts for the run's record.

        If there is a training split, the validation split is held out, or the test split if there is no validation
        split. Otherwise the setting `val_fraction` divides the examples of each label. Raise UserError if a part is
        empty.
        """
        splits = [place.split for place, _ in examples]
        first = f" ({skipped[0]})" if skipped else ""
        if self.val_path and VALIDATION not in splits:
            raise UserError(f"data.val_path={self.val_path}: has no example to hold out{first}")
        if (self.val_path or "split" in self.columns) and TRAIN not in splits and self.val_fraction < 1:
            raise UserError(f"data.path={self.path}: has no example of the training split{first}")
        train, held_out, others, split = divide(examples, splits)
        if split is None:
            labels, mask = [rows.label for _, rows in examples], np.zeros(len(examples), bool)
            for label in {*labels}:
                same = [i for i, each in enumerate(labels) if each is label]
                mask[same] = spread_held_out(len(same), self.val_fraction)
            train, held_out = ([*compress(examples, side)] for side in (~mask, mask))
        elif self.val_fraction == 1:
            train = []
        if len(train) + len(held_out) < 1 + (self.val_fraction < 1):
            needed = "at least one to train on and one to hold out are needed"
            raise UserError(f"{self.path}: {pluralise(len(examples), 'example')}; {needed}{first}")
        return train, held_out, {"held_out_split": split, "other_splits": len(others)}

    def _tokenizer(self, examples: Sequence[Rows], train: int, vocabulary: Path | None) -> toyexp.Tokenizer:
        """Return the tokenizer; bpe is trained on the first `train` examples."""
        texts = ["".join(part.text for row in example.rows for part in row) for example in examples]
        if self.tokenizer == "char":
            return toyexp.tokenizers.Characters.from_texts(texts)
        if self.tokenizer == "bpe":
            return run_interruptibly(lambda: toyexp.tokenizers.BPE.train(texts[:train], self.bpe_vocab))
        return self.read_tokenizer(vocabulary)

    def _tokenize(self, examples: Placed[Rows], tokenizer: toyexp.Tokenizer, skipped: list[str]) -> list[Example]:
        everything = getattr(self, "train_on", "") == "all"

        encoded = self._usable(examples, lambda each: [tokenize(r, tokenizer, everything) for r in each.rows], skipped)
        return [row for _, rows in encoded for row in rows]

    def _template(self, vocabulary: Path | None) -> ChatTemplate | None:
        source = self.source(vocabulary)
        if source is None or self.template == "plain":
            return None
        from toyexp_data.template import ChatTemplate

        file = toyexp.formats.open_gguf(str(source))
        template = toyexp.formats.read_chat_template(file)
        return ChatTemplate(template, toyexp.formats.read_tokenizer(file), source, self._now()) if template else None

    def _template_facts(self, template: ChatTemplate | None, examples: Sequence[Rows]) -> dict[str, Any]:
        """Return how many conversations and answers the chat template changes, for the run's record.

        If the template used the date, also return the date and store it in the setting `date`.
        """
        if template is None:
            return {}
        several = [example.rows for example in examples if len(example.rows) > 1 + self.pairs]
        if template.is_dated:
            self.date = self.date or self._now().date().isoformat()
        return {
            "chat_date": self.date if template.is_dated else None,
            "chats_in_rows": len(several),
            "rows_of_these": sum(map(len, several)),
            "answers_not_as_asked": sum(example.off_prompt for example in examples),
            "thoughts_dropped": sum(example.thoughts_dropped for example in examples),
        }


@dataclass
class ExampleData(RecordData):
    """Prompts with completions, conversations or text, from JSON or tables; the loss covers only the answers."""

    name: ClassVar[str] = "examples"

    train_on: str = "answers"  # compute the loss on: answers | last (a conversation's last answer) | all
    pack: str = "none"  # examples per row: none (one) | joined (several, which see each other) | apart (which do not)

    @classmethod
    def recognises(cls, path: Path) -> int:
        """Return 2 (a certain match) for files of records and directories that contain some, and 0 for other paths."""
        return 2 * (any(map(is_record, iter_files(path))) if path.is_dir() else bool(record_suffix(path)))

    def check(self) -> None:
        """Raise UserError for invalid settings and missing files."""
        super().check()
        require_choice("data", self, train_on=TRAIN_ON, pack=("none", "joined", "apart"))

    def values(self, record: Record) -> Sequence[Value]:
        """Return the record's text, prompt and completion, or messages. Raise BadExample if it has none."""
        return [convert(record, self.columns, self.system)]


def _omissions(used: int, skipped: Sequence[str], other_splits: int) -> list[str]:
    """Return notes about skipped examples, and about those of splits that are neither trained on nor held out."""
    count = f"{len(skipped)} of {used + len(skipped)} examples skipped (data.on_error)"
    notes = [f"{count}, such as {first}" for first in skipped[:1]]
    return notes + [f"{other_splits} examples of other splits than train and the held-out one"] * bool(other_splits)


def _notes(facts: Mapping[str, Any]) -> list[str]:
    """Return notes for the user about the columns that were read, the held-out part and the chat template."""
    facts = {key: ", ".join(value) if isinstance(value, list) else value for key, value in facts.items()}
    others, obvious = facts["other_columns"], ("messages", "prompt, completion", "text", "prompt, chosen, rejected")
    notes = [f"read as {facts['columns']}{f'; not read: {others}' if others else ''}"]
    texts = {
        "held_out_split": "held out: {val_path}" if facts["val_path"] else "held out: the {} split",
        "chats_in_rows": "{} conversations become {rows_of_these} rows: the chat template changes earlier turns",
        "answers_not_as_asked": "{} answers do not begin with the chat template's generation prompt",
        "thoughts_dropped": "{} answers are learned without their reasoning, which the chat template drops",
        "chat_date": "the chat template uses the date {} (data.date)",
    }
    notes = notes if others or facts["columns"] not in obvious else []
    return notes + [text.format(facts[key], **facts) for key, text in texts.items() if facts.get(key)]


def example_rows(value: Value, write: Callable[..., Rows], train_on: str) -> Rows:
    """Return the training rows of an example. The function `write` converts a conversation to rows."""
    if not value.messages:
        prompt = [] if value.prompt is None else [Part(value.prompt, False)]
        return Rows([[*prompt, Part(value.completion, True, end=True)]])
    answers = [number for number, message in enumerate(value.messages) if message.role == "assistant"]
    first = answers[-1] if train_on == "last" else value.first
    return write(value.messages, value.tools, everything=train_on == "all", first=first)


def join_rows(parts: Sequence[Rows]) -> Rows:
    """Return the rows of all `parts` as those of one example, without a label."""
    rows, off_prompt, dropped, _ = zip(*parts, strict=True)
    return Rows([row for each in rows for row in each], sum(off_prompt), sum(dropped))


def spread_held_out(count: int, fraction: float) -> np.ndarray:
    """Return a mask [count] of the held-out examples, which are evenly spread.

    About `fraction` of the examples are held out, at least one if there are several. Unless `fraction` is 1, at least
    one example is left for training.
    """
    held_out = min(max(round(count * fraction), 1), count - (fraction < 1))
    mask = np.zeros(count, bool)
    mask[np.arange(1, held_out + 1) * count // held_out - 1] = True
    return mask
