"""Conversations as a GGUF's own chat template (Jinja) writes them, and the ids of what it wrote.

Templates are written for transformers' renderer: what it knows, they find here, and what it would write is written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from toyexp.base.errors import UserError, printable
from toyexp.base.packages import needed, told_by
from toyexp.base.signals import cpu_limit
from toyexp.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

TEMPLATE_LIMIT = 1 << 16  # characters of a chat template
RENDERED_LIMIT = 1 << 24  # characters of a conversation it has rendered
SECONDS = 3.0  # of computing that it may take for one
# What a template may call the end of a text and its kind, by the key that names the token.
TOKENS = {"unknown": "unk_token", "padding": "pad_token", "seperator": "sep_token", "mask": "mask_token"}
REASONING = ("reasoning_content", "thinking", "reasoning")  # what a message calls what was thought before its answer


class BadChat(UserError):
    """A conversation that the template does not write, and why."""


class _TooLong(BaseException):
    """Time is up; no Exception, for Jinja catches those when it tries to work out constants."""


class Rendered(NamedTuple):
    """What a template wrote, and which ranges of it stood in {% generation %}: the assistant's words."""

    text: str
    marked: list[tuple[int, int]]


class Template:
    """A chat template in Jinja's sandbox, with a limit to its time and to what it writes.

    A template that asks what day it is (`strftime_now`) is told `now`, or else the truth; `dated` says whether one did.
    Raises UserError for a template that cannot be used, Unavailable without jinja2.
    """

    def __init__(self, text: str, tokenizer: Tokenizer, path: Path | str, now: datetime | None = None):
        with told_by(f"the chat template of {path}"):
            sandboxed = sandbox()
        if len(text) > TEMPLATE_LIMIT:
            raise UserError(f"{path}: its chat template has more than {TEMPLATE_LIMIT} characters")
        self.dated = False
        self._now = now
        self._length, self._marked = 0, list[tuple[int, int]]()  # of the text that is being written
        environment = _environment(sandboxed, self._mark)
        environment.globals |= {"raise_exception": _refuse, "strftime_now": self._strftime_now}
        try:
            with cpu_limit(SECONDS, _TooLong(f"it takes more than {SECONDS:g} s")):
                self._template = environment.from_string(text)
        except (_TooLong, Exception) as error:  # Jinja's errors, and Python's about the code that Jinja makes of it
            raise UserError(f"{path}: its chat template is not valid ({printable(str(error))})") from None
        self._names = _special_names(tokenizer)
        self._added = self._names["bos_token"] if tokenizer.add_bos else ""  # what every text begins with anyway

    def render(self, messages: Sequence[Mapping[str, Any]], answer: bool, tools: Any = None) -> Rendered:
        """What becomes of messages with role and content; with `answer`, up to where the assistant's next one begins.

        `tools` are those that the assistant may call, as JSON schemas. Raises BadChat.
        """
        told = {"messages": [_with_reasoning(m) for m in messages], "tools": tools, "documents": None}
        self._length, self._marked = 0, []
        pieces: list[str] = []
        try:
            with cpu_limit(SECONDS, _TooLong()):
                for piece in self._template.generate(add_generation_prompt=answer, **told, **self._names):
                    pieces.append(piece)
                    self._length += len(piece)
                    if self._length > RENDERED_LIMIT:
                        raise BadChat(f"the chat template writes more than {RENDERED_LIMIT} characters")
        except BadChat:
            raise
        except _TooLong:
            raise BadChat(f"the chat template takes more than {SECONDS:g} s") from None
        except Exception as error:  # a template may do whatever Jinja can, and fail in all its ways
            raise BadChat(f"the chat template refuses it ({printable(str(error), 120)})") from None
        text = "".join(pieces).removeprefix(self._added)
        less = self._length - len(text)
        return Rendered(text, [(max(begin - less, 0), end - less) for begin, end in self._marked if end > less])

    def _mark(self, words: str) -> None:
        """Notes that the template writes `words` next, in {% generation %}."""
        self._marked.append((self._length, self._length + len(words)))

    def _strftime_now(self, form: str) -> str:
        self.dated = True
        return (self._now or datetime.now()).strftime(form)


def _environment(sandboxed: type[ImmutableSandboxedEnvironment], mark: Callable[[str], None]) -> Any:
    """The sandbox as chat templates expect it; `mark` gets what stands in {% generation %}."""
    from jinja2 import nodes  # deferred: only chats need it
    from jinja2.ext import Extension

    class Generation(Extension):
        """The tag {% generation %}."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            """A call of `_marked` with what stands between the tag and its end."""
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

        def _marked(self, caller: Callable[[], str]) -> str:
            words = caller()
            mark(words)
            return words

    environment = sandboxed(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = _to_json
    return environment


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | str | None = None, separators: Any = None,
    sort_keys: bool = False,
) -> str:  # fmt: skip
    """As the text stands in JSON: Jinja's own filter writes it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def sandbox() -> type[ImmutableSandboxedEnvironment]:
    """Jinja's sandbox; raises Unavailable when jinja2 is missing or broken."""
    with needed("jinja2", "pip install 'toyexp[data]'"):
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    return ImmutableSandboxedEnvironment


def _refuse(message: Any) -> None:
    raise BadChat(f"the chat template refuses it ({printable(str(message), 120)})")


def _special_names(tokenizer: Tokenizer) -> dict[str, str]:
    """The tokens that templates know by name, as they spell them."""
    names = {
        "bos_token": "" if tokenizer.bos is None else tokenizer.spelling(tokenizer.bos),
        "eos_token": tokenizer.spelling(tokenizer.eos),
    }
    for key, name in TOKENS.items():
        i = tokenizer.source.get(f"ggml.{key}_token_id")
        if isinstance(i, int) and 0 <= i < tokenizer.vocab:
            names[name] = tokenizer.spelling(i)
    return names


def _with_reasoning(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message with what was thought under each name that templates have for it."""
    thought = next((message[key] for key in REASONING if message.get(key) is not None), None)
    return message if thought is None else {"thinking": thought, **message, "reasoning_content": thought}


def control_pattern(tokenizer: Tokenizer) -> re.Pattern[str]:
    """Matches the tokenizer's control tokens as templates spell them."""
    literals = sorted((tokenizer.pieces[i] for i in {tokenizer.eos, *tokenizer.controls}), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, literals)))
