"""Conversations as a GGUF's own chat template (Jinja) writes them, and the ids of what it wrote."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toyexp.errors import UserError, printable
from toyexp.packages import needed, told_by
from toyexp.signals import cpu_limit
from toyexp.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

TEMPLATE_LIMIT = 1 << 16  # characters of a chat template
RENDERED_LIMIT = 1 << 24  # characters of a conversation it has rendered
SECONDS = 3.0  # of computing that it may take for one


class BadChat(UserError):
    """A conversation that the template does not write, and why."""


class _TooLong(BaseException):
    """Time is up; no Exception, for Jinja catches those when it tries to work out constants."""


class Template:
    """A chat template in Jinja's sandbox, with a limit to its time and to what it writes.

    Raises UserError for one that cannot be used, Unavailable without jinja2.
    """

    def __init__(self, text: str, tokenizer: Tokenizer, path: Path | str):
        with told_by(f"the chat template of {path}"):
            sandboxed = sandbox()
        if len(text) > TEMPLATE_LIMIT:
            raise UserError(f"{path}: its chat template has more than {TEMPLATE_LIMIT} characters")
        # The settings that chat templates are written for.
        environment = sandboxed(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
        environment.globals["raise_exception"] = _refuse
        try:
            with cpu_limit(SECONDS, _TooLong(f"it takes more than {SECONDS:g} s")):
                self._template = environment.from_string(text)
        except (_TooLong, Exception) as error:  # Jinja's errors, and Python's about the code that Jinja makes of it
            raise UserError(f"{path}: its chat template is not valid ({printable(str(error))})") from None
        bos = "" if tokenizer.bos is None else tokenizer.spelling(tokenizer.bos)
        self._names = {"bos_token": bos, "eos_token": tokenizer.spelling(tokenizer.eos)}
        self._added = bos if tokenizer.add_bos else ""  # what every text begins with anyway

    def render(self, messages: Sequence[Mapping[str, str]], answer: bool) -> str:
        """The text of messages with role and content; with `answer`, up to where the assistant's next one begins."""
        text = ""
        try:
            with cpu_limit(SECONDS, _TooLong()):
                for piece in self._template.generate(messages=messages, add_generation_prompt=answer, **self._names):
                    text += piece
                    if len(text) > RENDERED_LIMIT:
                        raise BadChat(f"the chat template writes more than {RENDERED_LIMIT} characters")
        except BadChat:
            raise
        except _TooLong:
            raise BadChat(f"the chat template takes more than {SECONDS:g} s") from None
        except Exception as error:  # a template may do whatever Jinja can, and fail in all its ways
            raise BadChat(f"the chat template refuses it ({printable(str(error), 120)})") from None
        return text.removeprefix(self._added)


def sandbox() -> type[ImmutableSandboxedEnvironment]:
    """Jinja's sandbox; raises Unavailable when jinja2 is missing or broken."""
    with needed("jinja2", "pip install 'toyexp[data]'"):
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    return ImmutableSandboxedEnvironment


def _refuse(message: Any) -> None:
    raise BadChat(f"the chat template refuses it ({printable(str(message), 120)})")


def control_pattern(tokenizer: Tokenizer) -> re.Pattern[str]:
    """Matches the tokenizer's control tokens as templates spell them."""
    literals = sorted((tokenizer.pieces[i] for i in {tokenizer.eos, *tokenizer.controls}), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, literals)))
