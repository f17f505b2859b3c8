"""Examples in JSON lines: prompts with their completions, conversations, or text."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time
from functools import partial
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import toyexp.formats
import toyexp.tokenizers
from toyexp import RunPreview, UserError, is_changed, printable, suggest
from toyexp.base import NOT_TEXT_HINTS, pluralise, read_file, require_choice, require_file, run_interruptibly
from toyexp_data.chat import (
    PLAIN_TEMPLATE,
    BadExample,
    Example,
    Message,
    Part,
    Rows,
    iter_strings,
    plain_rows,
    tokenize,
)
from toyexp_data.corpus import match_paths
from toyexp_data.held_out import MAX_NAMED, ON_ERROR
from toyexp_data.text import TokenizedData, tokenizer_facts

if TYPE_CHECKING:
    import numpy as np

    from toyexp_data.examples import ExampleDataset
    from toyexp_data.template import ChatTemplate

FORMS = (("prompt", "completion"), ("messages",), ("text",))
EXPECTED = "expected prompt and completion, or messages, or text"
ROLES = ("system", "developer", "user", "assistant", "tool")
TRAIN_ON = ("completion", "all")
TEMPLATES = ("auto", "plain")
_MESSAGE = "expected role and content"

T = TypeVar("T")
S = TypeVar("S")


@dataclass
class Jsonl(TokenizedData):
    """Prompts with completions, conversations or text, one JSON object a line; prompts are read, not learned."""

    name: ClassVar[str] = "jsonl"
    fills: ClassVar[tuple[str, ...]] = ("date",)

    path: str = ""  # of lines {"prompt", "completion"}, {"messages": [...]} or {"text"}: a file, or 'chats/*.jsonl'
    train_on: str = "completion"  # completion (what the assistant says, in a conversation) | all
    template: str = "auto"  # of conversations: auto (the tokenizer's GGUF's own, or plain) | plain
    date: str = ""  # the day that a template which writes one is told, 2026-11-21; empty: the day of the run
    pack: bool = False  # several examples in a row, held out too, where they see one another; false: one, filled up
    on_error: str = "refuse"  # what a line that cannot be used does: refuse (ends the run) | skip (is counted)
    val_fraction: float = 0.05  # of the examples, spread evenly over the file, held out from training

    @classmethod
    def recognises(cls, path: Path) -> int:
        """A file by its name."""
        return 2 if path.suffix in (".jsonl", ".ndjson") else 0

    def check(self) -> None:
        """Raises UserError for settings that cannot work and a file that is not there."""
        super().check()
        if not self.path:
            raise UserError("data=jsonl needs a file of JSON lines: data.path=...")
        self._files()
        require_choice("data", self, train_on=TRAIN_ON, template=TEMPLATES, on_error=ON_ERROR)
        try:
            self._now()
        except ValueError:
            raise UserError(f"data.date={self.date}: must be a day such as 2026-11-21, or 2026-11-21T17:30") from None

    def _now(self) -> datetime:
        """What a template is told that the time is: a day begins at midnight, so that the day alone tells all."""
        return datetime.fromisoformat(self.date) if self.date else datetime.combine(date.today(), time())

    def warnings(self, preview: RunPreview) -> Iterable[str]:
        """That there is no conversation that a template would write."""
        yield from super().warnings(preview)
        if is_changed(self, "template") and not preview.dataset.describe()["chats"]:
            yield f"data.template={self.template}: is of conversations; {self.path} holds none"

    def open(self, vocabulary: Path | None) -> ExampleDataset:
        """Reads, splits and tokenizes the examples; with on_error=skip a line that cannot be used is counted."""
        from toyexp_data.examples import ExampleDataset

        skipped: list[str] = []
        values = self._usable(self._lines(), parse, skipped)
        chats, now = sum("messages" in value for _, value in values), self._now()
        template = self._template(vocabulary, now) if chats else None
        write = partial(template.rows, everything=self.train_on == "all") if template else plain_rows
        examples = self._usable(values, lambda value: example_rows(value, write), skipped)
        if len(examples) < 1 + (self.val_fraction < 1):
            first = f" ({skipped[0]})" if skipped else ""
            needed = "one to train on and one to hold out are needed"
            raise UserError(f"{self.path}: {pluralise(len(examples), 'example')}; {needed}{first}")
        held_out = spread_held_out(len(examples), self.val_fraction)
        tokenizer = self._tokenizer([made for _, made in examples], held_out, vocabulary)
        if chats:
            tokenizer.chat_template = template.text if template else PLAIN_TEMPLATE
        # The rows of one conversation are all on one side.
        train, held = (self._tokenize(compress(examples, side), tokenizer, skipped) for side in (~held_out, held_out))
        if not (train or self.val_fraction == 1) or not held:
            use = "to hold out" if train else "to train on"
            raise UserError(f"{self.path}: no example is left {use} ({skipped[0]})")
        facts = {
            "path": self.path,
            "examples": len(train) + len(held),
            "chats": chats,
            "chat_template": "gguf" if template else "plain" if chats else None,
            **(self._template_facts(template, [made for _, made in examples], now) if template else {}),
            "skipped": len(skipped),
            "skipped_lines": skipped[:MAX_NAMED],
            **tokenizer_facts(tokenizer),
        }
        few = self.bpe_notes(tokenizer)
        dataset = ExampleDataset(train, held, tokenizer, self.pack, self.eval_batches, facts, few)
        dataset.chat_template = tokenizer.chat_template if chats else ""
        return dataset

    def _tokenizer(self, examples: Sequence[Rows], held_out: np.ndarray, vocabulary: Path | None) -> toyexp.Tokenizer:
        texts = ["".join(part.text for row in made.rows for part in row) for made in examples]
        if self.tokenizer == "char":
            return toyexp.tokenizers.Characters.from_texts(texts)
        if self.tokenizer == "bpe":
            return run_interruptibly(
                lambda: toyexp.tokenizers.BPE.train(list(compress(texts, ~held_out)), self.bpe_vocab)
            )
        return self.read_tokenizer(vocabulary)

    def _tokenize(
        self, examples: Iterable[tuple[str, Rows]], tokenizer: toyexp.Tokenizer, skipped: list[str]
    ) -> list[Example]:
        def ids_of(made: Rows) -> list[Example]:
            return [tokenize(row, tokenizer, self.train_on == "all") for row in made.rows]

        return [row for _, rows in self._usable(examples, ids_of, skipped) for row in rows]

    def _template_facts(self, template: ChatTemplate, examples: Sequence[Rows], now: datetime) -> dict[str, Any]:
        """What the record of the run says of the template's work; the day it has written becomes the setting's."""
        several = [made.rows for made in examples if len(made.rows) > 1]
        if template.is_dated:
            self.date = self.date or now.date().isoformat()
        return {
            "chat_date": self.date if template.is_dated else None,
            "chats_in_rows": len(several),
            "rows_of_these": sum(map(len, several)),
            "answers_not_as_asked": sum(made.not_as_asked for made in examples),
            "thoughts_dropped": sum(made.thoughts_dropped for made in examples),
        }

    def _files(self) -> list[Path]:
        return [require_file(path, f"data.path={path}") for path in match_paths(self.path)]

    def _lines(self) -> Iterator[tuple[str, bytes]]:
        for path in self._files():
            raw = read_file(path).removeprefix(codecs.BOM_UTF8)
            if hint := _other_format(path, raw):
                raise UserError(f"{path}: is no file of JSON lines; {hint}")
            # By newline alone: within JSON text, U+2028 and its kind end no line.
            yield from ((f"{path}:{n}", line) for n, line in enumerate(raw.split(b"\n"), 1) if line.strip())

    def _usable(
        self, placed: Iterable[tuple[str, S]], make: Callable[[S], T], skipped: list[str]
    ) -> list[tuple[str, T]]:
        """Return what `make` makes of each line; one that it cannot use ends the run, or goes to `skipped`."""
        made = []
        for place, thing in placed:
            try:
                made.append((place, make(thing)))
            except UserError as reason:
                if self.on_error == "refuse":
                    hint = " (data.on_error=skip leaves such lines out)" if made else ""  # else it may be another file
                    raise UserError(f"{place}: {reason}{hint}") from None
                skipped.append(f"{Path(place).name}: {reason}")
        return made

    def _template(self, vocabulary: Path | None, now: datetime) -> ChatTemplate | None:
        source = self.source(vocabulary)
        if source is None or self.template == "plain":
            return None
        from toyexp_data.template import ChatTemplate

        file = toyexp.formats.open_gguf(str(source))
        template = toyexp.formats.read_chat_template(file)
        return ChatTemplate(template, toyexp.formats.read_tokenizer(file), source, now) if template else None


def _other_format(path: Path, raw: bytes) -> str:
    if raw.lstrip().startswith(b"["):
        return f"it is a JSON array: jq -c '.[]' {path} > {path.stem}.jsonl"
    if path.suffix.lower() in (".csv", ".tsv") and not raw.lstrip().startswith(b"{"):
        return "it is a table: pandas.read_csv(FILE).to_json('x.jsonl', orient='records', lines=True) in Python"
    return next((hint for magic, hint in NOT_TEXT_HINTS.items() if raw.startswith(magic)), "")


def parse(line: bytes) -> dict[str, Any]:
    """The object of a line, checked: its prompt and completion, its messages or its text."""
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise BadExample(f"not UTF-8 text (byte {error.start} is 0x{line[error.start]:02x})") from None
    except (ValueError, RecursionError) as error:
        raise BadExample(f"not one JSON object a line ({printable(str(error))})") from None
    if not isinstance(value, dict):
        raise BadExample(f"is {_kind(value)}; {EXPECTED}")
    found = [form for form in FORMS if value.keys() & {*form}]
    if len(found) != 1 or not value.keys() >= {*found[0]}:
        keys = ", ".join(printable(key, 20) for key in list(value)[:8]) or "none"
        raise BadExample(f"has the keys {keys}; {EXPECTED}")
    if "messages" in value:
        return {"messages": _messages(value["messages"]), "tools": _tools(value.get("tools"))}
    return {key: _text(value[key], key) for key in found[0]}


def _messages(value: Any) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise BadExample(f"messages is {_kind(value)}; expected a list of role and content")
    messages = [_message(entry, number) for number, entry in enumerate(value, 1)]
    if all(message.role != "assistant" for message in messages):
        raise BadExample("the assistant says nothing in it, so there is nothing to learn")
    return messages


def _message(entry: Any, number: int) -> Message:
    if not isinstance(entry, dict) or "role" not in entry:
        what = ", ".join(printable(k, 20) for k in list(entry)[:8]) if isinstance(entry, dict) else _kind(entry)
        raise BadExample(f"message {number} holds {what or 'nothing'}; {_MESSAGE}")
    role, content = entry["role"], entry.get("content")
    if role not in ROLES:
        raise BadExample(f"message {number} has the role {printable(str(role))}; {suggest(str(role), ROLES)}")
    if role == "system" and number > 1:
        raise BadExample(f"message {number} is the system's; only the first can be")
    further = {key: item for key, item in entry.items() if key not in ("role", "content") and item is not None}
    if content not in (None, "") or (role != "tool" and not (role == "assistant" and further)):
        if "content" not in entry:
            raise BadExample(f"message {number} holds {', '.join(printable(k, 20) for k in entry)}; {_MESSAGE}")
        _text(content, f"message {number}'s content")
    for text in iter_strings(further):
        _require_unicode(text, f"message {number}")
    return Message(role, content, further)


def _tools(value: Any) -> list[Any] | None:
    if value is None or value == []:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise BadExample(f"tools is {_kind(value)}; expected a list of JSON schemas")
    for text in iter_strings(value):
        _require_unicode(text, "tools")
    return value


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise BadExample(f"{what} is {_kind(value)}, expected text")
    if not value:
        raise BadExample(f"{what} is empty")
    return _require_unicode(value, what)


def _require_unicode(text: str, what: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadExample(f"{what} holds half a surrogate pair ({ascii(text[error.start])[1:-1]})") from None
    return text


def _kind(value: Any) -> str:
    if value == []:
        return "an empty list"
    kinds = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")


def example_rows(value: Mapping[str, Any], write: Callable[[Sequence[Message], Any], Rows]) -> Rows:
    """A checked object as rows of parts; `write` is for conversations and the tools in them."""
    if "messages" in value:
        return write(value["messages"], value["tools"])
    if "text" in value:
        return Rows([[Part(value["text"], True, end=True)]])
    return Rows([[Part(value["prompt"], False), Part(value["completion"], True, end=True)]])


def spread_held_out(count: int, fraction: float) -> np.ndarray:
    """Return which of `count` examples are held out: `fraction`, evenly spread, at least one, and all only for 1."""
    import numpy as np

    held_out = min(max(round(count * fraction), 1), count - (fraction < 1))
    mask = np.zeros(count, bool)
    mask[np.arange(1, held_out + 1) * count // held_out - 1] = True
    return mask
