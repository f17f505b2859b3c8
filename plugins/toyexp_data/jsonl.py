"""Examples in JSON lines: prompts with their completions, conversations, or text."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np

from toyexp import UserError, choose, printable
from toyexp.gguf.read import GGUFFile
from toyexp.gguf.tokenizer import read_chat_template, read_tokenizer
from toyexp_data.chat import PLAIN_TEMPLATE, BadExample, ChatTemplate, Example, Message, Part, plain, tokenize
from toyexp_data.examples import ExampleDataset
from toyexp_data.text import TokenizedData

FORMS = (("prompt", "completion"), ("messages",), ("text",))
EXPECTED = "expected prompt and completion, or messages, or text"
ROLES = ("system", "user", "assistant")
TRAIN_ON = ("completion", "all")
TEMPLATES = ("auto", "plain")
ON_ERROR = ("refuse", "skip")
NAMED = 20  # skipped lines that the record of the run names

T = TypeVar("T")
S = TypeVar("S")


@dataclass
class Jsonl(TokenizedData):
    """Prompts with completions, conversations or text, one JSON object a line; prompts are read, not learned."""

    name: ClassVar[str] = "jsonl"

    path: str = ""  # a file of lines {"prompt", "completion"}, {"messages": [{"role", "content"}, ...]} or {"text"}
    train_on: str = "completion"  # completion (what the assistant says, in a conversation) | all
    template: str = "auto"  # of conversations: auto (the tokenizer's GGUF's own, or plain) | plain
    pack: bool = False  # several examples in a row, where they see one another; false: one, filled up
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
        if not Path(self.path).is_file():
            raise UserError(f"data.path={self.path}: there is no such file (looked in {Path.cwd()})")
        for name, words in (("train_on", TRAIN_ON), ("template", TEMPLATES), ("on_error", ON_ERROR)):
            if getattr(self, name) not in words:
                raise UserError(f"data.{name}={getattr(self, name)}: {choose(getattr(self, name), words)}")

    def open(self, vocabulary: Path | None) -> ExampleDataset:
        """Reads, splits and tokenizes the examples; with on_error=skip a line that cannot be used is counted."""
        skipped: list[str] = []
        values = self._usable(self._lines(), parse, skipped)
        chats = sum("messages" in value for _, value in values)
        template = self._template(vocabulary) if chats else None
        write = template.parts if template else plain
        examples = self._usable(values, lambda value: parts_of(value, write), skipped)
        if len(examples) < 2:
            raise UserError(f"{self.path}: {len(examples)} examples; one to train on and one to hold out are needed")
        held_out = spread(len(examples), self.val_fraction)
        texts = ["".join(part.text for part in parts) for _, parts in examples]
        train_texts = [text for text, held in zip(texts, held_out, strict=True) if not held]
        tokenizer = self.make_tokenizer(texts, train_texts, vocabulary)
        if chats:
            tokenizer.chat_template = template.text if template else PLAIN_TEMPLATE

        def tokenized(wanted: bool) -> list[Example]:
            chosen = [example for example, held in zip(examples, held_out, strict=True) if held == wanted]
            return [
                e for _, e in self._usable(chosen, lambda p: tokenize(p, tokenizer, self.train_on == "all"), skipped)
            ]

        train, held = tokenized(False), tokenized(True)
        if not train or not held:
            raise UserError(
                f"{self.path}: no example is left {'to hold out' if train else 'to train on'} ({skipped[0]})"
            )
        facts = {
            "path": self.path,
            "examples": len(train) + len(held),
            "chats": chats,
            "chat_template": "gguf" if template else "plain" if chats else None,
            "skipped": len(skipped),
            "skipped_lines": skipped[:NAMED],
            "tokenizer": tokenizer.kind,
            "tokenizer_digest": tokenizer.fingerprint(),
        }
        dataset = ExampleDataset(train, held, tokenizer, self.pack, self.eval_batches, facts)
        dataset.chat_template = tokenizer.chat_template if chats else ""
        return dataset

    def _lines(self) -> Iterable[tuple[int, bytes]]:
        """The lines that are not empty, with their numbers."""
        try:
            raw = Path(self.path).read_bytes().removeprefix(codecs.BOM_UTF8)
        except OSError as error:
            raise UserError(f"{self.path}: cannot be read: {error.strerror}") from None
        # By newline alone: within JSON text, U+2028 and its kind end no line.
        return [(number, line) for number, line in enumerate(raw.split(b"\n"), 1) if line.strip()]

    def _usable(
        self, numbered: Iterable[tuple[int, S]], make: Callable[[S], T], skipped: list[str]
    ) -> list[tuple[int, T]]:
        """What `make` makes of each line; one it cannot use ends the run, or goes to `skipped`."""
        made = []
        for number, thing in numbered:
            try:
                made.append((number, make(thing)))
            except UserError as reason:
                if self.on_error == "refuse":
                    raise UserError(
                        f"{self.path}:{number}: {reason} (data.on_error=skip leaves such lines out)"
                    ) from None
                skipped.append(f"{Path(self.path).name}:{number}: {reason}")
        return made

    def _template(self, vocabulary: Path | None) -> ChatTemplate | None:
        """The GGUF's chat template, where it has one and it is wanted."""
        source = self.source(vocabulary)
        if source is None or self.template == "plain":
            return None
        with GGUFFile(source) as file:
            template = read_chat_template(file)
            return ChatTemplate(template, read_tokenizer(file), source) if template else None


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
        return {"messages": _messages(value["messages"])}
    return {key: _text(value[key], key) for key in found[0]}


def _messages(value: Any) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise BadExample(f"messages is {_kind(value)}; expected a list of role and content")
    messages = []
    for number, entry in enumerate(value, 1):
        if not isinstance(entry, dict) or entry.keys() != {"role", "content"}:
            what = ", ".join(printable(k, 20) for k in list(entry)[:8]) if isinstance(entry, dict) else _kind(entry)
            raise BadExample(f"message {number} holds {what or 'nothing'}; expected role and content")
        role = entry["role"]
        if role not in ROLES:
            raise BadExample(f"message {number} has the role {printable(str(role))}; {choose(str(role), ROLES)}")
        if role == "system" and number > 1:
            raise BadExample(f"message {number} is the system's; only the first can be")
        messages.append(Message(role, _text(entry["content"], f"message {number}'s content")))
    if all(message.role != "assistant" for message in messages):
        raise BadExample("the assistant says nothing in it, so there is nothing to learn")
    return messages


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise BadExample(f"{what} is {_kind(value)}, expected text")
    if not value:
        raise BadExample(f"{what} is empty")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadExample(f"{what} holds half a surrogate pair ({ascii(value[error.start])[1:-1]})") from None
    return value


def _kind(value: Any) -> str:
    if value == []:
        return "an empty list"
    kinds = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")


def parts_of(value: Mapping[str, Any], write: Callable[[Sequence[Message]], list[Part]]) -> list[Part]:
    """A checked object as parts; `write` is for conversations."""
    if "messages" in value:
        return write(value["messages"])
    if "text" in value:
        return [Part(value["text"], True, end=True)]
    return [Part(value["prompt"], False), Part(value["completion"], True, end=True)]


def spread(count: int, fraction: float) -> np.ndarray:
    """Which of `count` examples are held out: `fraction` of them, evenly spread, at least one and never all."""
    held_out = min(max(round(count * fraction), 1), count - 1)
    mask = np.zeros(count, bool)
    mask[np.arange(1, held_out + 1) * count // held_out - 1] = True
    return mask
