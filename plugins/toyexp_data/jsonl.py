"""Training examples in JSON lines: prompts with completions, conversations, or text."""

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
    """Prompts with completions, conversations or text, one JSON object per line; the loss covers only completions."""

    name: ClassVar[str] = "jsonl"
    fills: ClassVar[tuple[str, ...]] = ("date",)

    path: str = ""  # file or pattern ('chats/*.jsonl'); a line has "prompt" and "completion", or "messages", or "text"
    train_on: str = "completion"  # compute the loss on: completion (in a conversation, the assistant's turns) | all
    template: str = "auto"  # chat template: auto (that of the tokenizer's GGUF file, if any, else plain) | plain
    date: str = ""  # date for chat templates that contain the date, such as 2026-11-21; empty: today
    pack: bool = False  # several examples per row, which attend to each other, also in evals; false: one per row
    on_error: str = "refuse"  # for an unusable line: refuse (stop the run) | skip (and count it)
    val_fraction: float = 0.05  # share of the examples held out for validation, evenly spread over the file; (0, 1]

    @classmethod
    def recognises(cls, path: Path) -> int:
        """Return 2 (a certain match) for the suffixes of JSON lines, and 0 for other paths."""
        return 2 if path.suffix in (".jsonl", ".ndjson") else 0

    def check(self) -> None:
        """Raise UserError for invalid settings and missing files."""
        super().check()
        if not self.path:
            raise UserError("data=jsonl needs a file of JSON lines: data.path=...")
        self._files()
        require_choice("data", self, train_on=TRAIN_ON, template=TEMPLATES, on_error=ON_ERROR)
        try:
            self._now()
        except ValueError:
            raise UserError(f"data.date={self.date}: must be a date such as 2026-11-21 or 2026-11-21T17:30") from None

    def _now(self) -> datetime:
        """Return the date and time for chat templates: the setting `date` or, if it is empty, today at midnight."""
        return datetime.fromisoformat(self.date) if self.date else datetime.combine(date.today(), time())

    def warnings(self, preview: RunPreview) -> Iterable[str]:
        """Yield a warning if the setting `template` has no effect."""
        yield from super().warnings(preview)
        if is_changed(self, "template") and not preview.dataset.describe()["chats"]:
            yield f"data.template={self.template}: has no effect; {self.path} has no conversations"

    def open(self, vocabulary: Path | None) -> ExampleDataset:
        """Read, split and tokenize the examples; with on_error=skip leave out and count unusable lines."""
        skipped: list[str] = []
        values = self._usable(self._lines(), self._parse_line, skipped)
        chats, now = sum("messages" in value for _, value in values), self._now()
        template = self._template(vocabulary, now) if chats else None
        write = partial(template.rows, everything=self.train_on == "all") if template else plain_rows
        examples = self._usable(values, lambda value: self._make_rows(value, write), skipped)
        if len(examples) < 1 + (self.val_fraction < 1):
            first = f" ({skipped[0]})" if skipped else ""
            needed = "at least one to train on and one to hold out are needed"
            raise UserError(f"{self.path}: {pluralise(len(examples), 'example')}; {needed}{first}")
        held_out = spread_held_out(len(examples), self.val_fraction)
        tokenizer = self._tokenizer([rows for _, rows in examples], held_out, vocabulary)
        if chats:
            tokenizer.chat_template = template.text if template else PLAIN_TEMPLATE
        # All rows of a conversation are in the same part.
        train, held = (self._tokenize(compress(examples, side), tokenizer, skipped) for side in (~held_out, held_out))
        if not (train or self.val_fraction == 1) or not held:
            use = "to hold out" if train else "to train on"
            raise UserError(f"{self.path}: no example is left {use} ({skipped[0]})")
        facts = {
            "path": self.path,
            "examples": len(train) + len(held),
            "chats": chats,
            "chat_template": "gguf" if template else "plain" if chats else None,
            **(self._template_facts(template, [rows for _, rows in examples], now) if template else {}),
            "skipped": len(skipped),
            "skipped_lines": skipped[:MAX_NAMED],
            **tokenizer_facts(tokenizer),
        }
        dataset = self._make_dataset(train, held, tokenizer, facts)
        dataset.chat_template = tokenizer.chat_template if chats else ""
        return dataset

    def _parse_line(self, line: bytes) -> dict[str, Any]:
        return parse(line)

    def _make_rows(self, value: Mapping[str, Any], write: Callable[[Sequence[Message], Any], Rows]) -> Rows:
        return example_rows(value, write)

    def _make_dataset(
        self, train: list[Example], held_out: list[Example], tokenizer: toyexp.Tokenizer, facts: dict[str, Any]
    ) -> ExampleDataset:
        from toyexp_data.examples import ExampleDataset

        notes = self.bpe_notes(tokenizer)
        return ExampleDataset(train, held_out, tokenizer, self.pack, self.eval_batches, facts, notes)

    def _tokenizer(self, examples: Sequence[Rows], held_out: np.ndarray, vocabulary: Path | None) -> toyexp.Tokenizer:
        texts = ["".join(part.text for row in example.rows for part in row) for example in examples]
        if self.tokenizer == "char":
            return toyexp.tokenizers.Characters.from_texts(texts)
        if self.tokenizer == "bpe":
            train = list(compress(texts, ~held_out))
            return run_interruptibly(lambda: toyexp.tokenizers.BPE.train(train, self.bpe_vocab))
        return self.read_tokenizer(vocabulary)

    def _tokenize(
        self, examples: Iterable[tuple[str, Rows]], tokenizer: toyexp.Tokenizer, skipped: list[str]
    ) -> list[Example]:
        def encode_rows(example: Rows) -> list[Example]:
            return [tokenize(row, tokenizer, self.train_on == "all") for row in example.rows]

        return [row for _, rows in self._usable(examples, encode_rows, skipped) for row in rows]

    def _template_facts(self, template: ChatTemplate, examples: Sequence[Rows], now: datetime) -> dict[str, Any]:
        """Return how many conversations and answers the chat template changes, for the run's record.

        If the template used the date, also return the date and store it in the setting `date`.
        """
        several = [example.rows for example in examples if len(example.rows) > 1]
        if template.is_dated:
            self.date = self.date or now.date().isoformat()
        return {
            "chat_date": self.date if template.is_dated else None,
            "chats_in_rows": len(several),
            "rows_of_these": sum(map(len, several)),
            "answers_not_as_asked": sum(example.off_prompt for example in examples),
            "thoughts_dropped": sum(example.thoughts_dropped for example in examples),
        }

    def _files(self) -> list[Path]:
        return [require_file(path, f"data.path={path}") for path in match_paths(self.path)]

    def _lines(self) -> Iterator[tuple[str, bytes]]:
        for path in self._files():
            raw = read_file(path).removeprefix(codecs.BOM_UTF8)
            if hint := _other_format(path, raw):
                raise UserError(f"{path}: is not a JSON lines file; {hint}")
            # Split at newlines only: U+2028 and the like may occur within JSON text.
            yield from ((f"{path}:{n}", line) for n, line in enumerate(raw.split(b"\n"), 1) if line.strip())

    def _usable(
        self, located: Iterable[tuple[str, S]], make: Callable[[S], T], skipped: list[str]
    ) -> list[tuple[str, T]]:
        """Apply `make` to the value of each line; return pairs of location and result.

        For an unusable line, raise UserError with its location, or with on_error=skip add the reason to `skipped`.
        """
        results = []
        for location, value in located:
            try:
                results.append((location, make(value)))
            except UserError as reason:
                if self.on_error == "refuse":
                    # If even the first line fails, the file is probably a wrong one, so give no hint.
                    hint = " (data.on_error=skip leaves such lines out)" if results else ""
                    raise UserError(f"{location}: {reason}{hint}") from None
                skipped.append(f"{Path(location).name}: {reason}")
        return results

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
        name = f"{path.stem}_lines.jsonl"  # not the file itself, which the shell would empty before jq reads it
        return f"it is a JSON array: jq -c '.[]' {path} > {name}"
    if path.suffix.lower() in (".csv", ".tsv") and not raw.lstrip().startswith(b"{"):
        return "it is a table: pandas.read_csv(FILE).to_json('x.jsonl', orient='records', lines=True) in Python"
    return next((hint for magic, hint in NOT_TEXT_HINTS.items() if raw.startswith(magic)), "")


def parse_object(line: bytes, expected: str) -> dict[str, Any]:
    """Parse a line with a JSON object. Raise BadExample if it has none, or if a key occurs twice in an object."""
    try:
        value = json.loads(line.decode("utf-8"), object_pairs_hook=_unique_keys)
    except UnicodeDecodeError as error:
        raise BadExample(f"not UTF-8 text (byte {error.start} is 0x{line[error.start]:02x})") from None
    except (ValueError, RecursionError) as error:
        raise BadExample(f"is not one JSON object ({printable(str(error))})") from None
    if not isinstance(value, dict):
        raise BadExample(f"is {_kind(value)}; {expected}")
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(value := dict(pairs)) < len(pairs):
        keys = [key for key, _ in pairs]
        raise BadExample(f"has the key {printable(next(k for k in keys if keys.count(k) > 1), 20)} twice")
    return value


def parse(line: bytes) -> dict[str, Any]:
    """Parse a line with prompt and completion, messages, or text. Raise BadExample if the line is invalid."""
    value = parse_object(line, EXPECTED)
    forms = [form for form in FORMS if value.keys() & {*form}]
    if len(forms) != 1 or not value.keys() >= {*forms[0]}:
        keys = ", ".join(printable(key, 20) for key in list(value)[:8]) or "none"
        raise BadExample(f"has the keys {keys}; {EXPECTED}")
    if "messages" in value:
        return {"messages": parse_messages(value["messages"]), "tools": parse_tools(value.get("tools"))}
    return {key: parse_text(value[key], key) for key in forms[0]}


def parse_messages(value: Any) -> list[Message]:
    """Return the messages of a conversation. Raise BadExample for invalid ones, or if the assistant has none."""
    if not isinstance(value, list) or not value:
        raise BadExample(f"messages is {_kind(value)}; expected a list of role and content")
    messages = [_message(entry, number) for number, entry in enumerate(value, 1)]
    if all(message.role != "assistant" for message in messages):
        raise BadExample("has no assistant message, so there is nothing to learn")
    return messages


def _message(entry: Any, number: int) -> Message:
    if not isinstance(entry, dict) or "role" not in entry:
        contents = ", ".join(printable(k, 20) for k in list(entry)[:8]) if isinstance(entry, dict) else _kind(entry)
        raise BadExample(f"message {number} holds {contents or 'nothing'}; {_MESSAGE}")
    role, content = entry["role"], entry.get("content")
    if role not in ROLES:
        raise BadExample(f"message {number} has the role {printable(str(role))}; {suggest(str(role), ROLES)}")
    if role == "system" and number > 1:
        raise BadExample(f"message {number} has the role system; only the first message may have it")
    further = {key: item for key, item in entry.items() if key not in ("role", "content") and item is not None}
    if content not in (None, "") or (role != "tool" and not (role == "assistant" and further)):
        if "content" not in entry:
            raise BadExample(f"message {number} holds {', '.join(printable(k, 20) for k in entry)}; {_MESSAGE}")
        parse_text(content, f"message {number}'s content")
    for text in iter_strings(further):
        _require_unicode(text, f"message {number}")
    return Message(role, content, further)


def parse_tools(value: Any) -> list[Any] | None:
    """Return the JSON schemas of a conversation's tools, or None if it has no tools."""
    if value is None or value == []:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise BadExample(f"tools is {_kind(value)}; expected a list of JSON schemas")
    for text in iter_strings(value):
        _require_unicode(text, "tools")
    return value


def parse_text(value: Any, subject: str) -> str:
    """Return a text that is not empty. Raise BadExample, which names the `subject`, for anything else."""
    if not isinstance(value, str):
        raise BadExample(f"{subject} is {_kind(value)}, expected text")
    if not value:
        raise BadExample(f"{subject} is empty")
    return _require_unicode(value, subject)


def _require_unicode(text: str, subject: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadExample(f"{subject} holds half a surrogate pair ({ascii(text[error.start])[1:-1]})") from None
    return text


def _kind(value: Any) -> str:
    if value == []:
        return "an empty list"
    kinds = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")


def example_rows(value: Mapping[str, Any], write: Callable[[Sequence[Message], Any], Rows]) -> Rows:
    """Return the training rows of a parsed line. The function `write` converts a conversation and its tools to rows."""
    if "messages" in value:
        return write(value["messages"], value["tools"])
    if "text" in value:
        return Rows([[Part(value["text"], True, end=True)]])
    return Rows([[Part(value["prompt"], False), Part(value["completion"], True, end=True)]])


def spread_held_out(count: int, fraction: float) -> np.ndarray:
    """Return a mask [count] of the held-out examples, which are evenly spread.

    About `fraction` of the examples are held out, at least one if there are several. Unless `fraction` is 1, at least
    one example is left for training.
    """
    import numpy as np

    held_out = min(max(round(count * fraction), 1), count - (fraction < 1))
    mask = np.zeros(count, bool)
    mask[np.arange(1, held_out + 1) * count // held_out - 1] = True
    return mask
