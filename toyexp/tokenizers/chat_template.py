"""Conversations as a GGUF's own chat template (Jinja) writes them, and the ids of what it wrote.

Templates are written for transformers' renderer: what it knows, they find here, and what it would write is written.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from toyexp.base.errors import UserError, printable
from toyexp.base.packages import prefix_unavailable, require_package
from toyexp.tokenizers.tokenizer import Tokenizer

TEMPLATE_LIMIT = 1 << 16  # characters of a chat template
RENDERED_LIMIT = 1 << 24  # characters of a conversation it has rendered
SECONDS = 3.0  # of computing that it may take for one
# What a template may call the end of a text and its kind, by the key that names the token.
TOKENS = {"unknown": "unk_token", "padding": "pad_token", "seperator": "sep_token", "mask": "mask_token"}
REASONING = ("reasoning_content", "thinking", "reasoning")  # what a message calls what was thought before its answer


class BadChat(UserError):
    """A conversation that the template does not write, and why."""


class Rendered(NamedTuple):
    """What a template wrote, and which ranges of it stood in {% generation %}: the assistant's words."""

    text: str
    marked: list[tuple[int, int]]


class Template:
    """A chat template in Jinja's sandbox, in a process of its own with limits to time, memory and what it writes.

    A template that asks what day it is (`strftime_now`) is told `now`, or else the truth; `dated` says whether one did.
    Raises UserError for a template that cannot be used, Unavailable without jinja2.
    """

    def __init__(self, text: str, tokenizer: Tokenizer, path: Path | str, now: datetime | None = None):
        if len(text) > TEMPLATE_LIMIT:
            raise UserError(f"{path}: its chat template has more than {TEMPLATE_LIMIT} characters")
        self.is_dated = False
        self._request = {"template": text, "now": now.isoformat() if now else "", "limit": RENDERED_LIMIT}
        self._renderer = _renderer()
        self._names = _special_names(tokenizer)
        self._added = self._names["bos_token"] if tokenizer.add_bos else ""  # what every text begins with anyway
        with prefix_unavailable(f"the chat template of {path}"):
            reply = self._ask([], None, [])
        if "invalid" in reply:
            raise UserError(f"{path}: its chat template is not valid ({printable(reply['invalid'])})")

    def render(self, messages: Sequence[Mapping[str, Any]], answer: bool, tools: Any = None) -> Rendered:
        """Return the messages as text; with `answer`, up to where the assistant's next one begins. Raises BadChat."""
        (found,) = self.render_beginnings(messages, [(len(messages), answer)], tools)
        if isinstance(found, BadChat):
            raise found
        return found

    def render_beginnings(
        self, messages: Sequence[Mapping[str, Any]], wanted: Sequence[tuple[int, bool]], tools: Any = None
    ) -> list[Rendered | BadChat]:
        """Return the first messages as text, for each wanted number of them, or why the template does not write them.

        A message has a role and content. `tools` are those that the assistant may call, as JSON schemas.
        """
        reply = self._ask(messages, tools, wanted)
        reasons = [reply.get("invalid")] * len(wanted)
        return [self._read(answer) for answer in reply.get("answers", reasons)]

    def _ask(self, messages: Sequence[Mapping[str, Any]], tools: Any, wanted: Sequence[tuple[int, bool]]) -> Any:
        told = {"messages": [_with_reasoning(m) for m in messages], "tools": tools, "documents": None, **self._names}
        return self._renderer.ask({**self._request, "seconds": SECONDS, "told": told, "wanted": wanted})

    def _read(self, answer: Any) -> Rendered | BadChat:
        if isinstance(answer, str):
            return BadChat(f"the chat template {printable(answer, 150)}")
        self.is_dated |= answer["dated"]
        text = answer["text"].removeprefix(self._added)
        less = len(answer["text"]) - len(text)
        return Rendered(text, [(max(begin - less, 0), end - less) for begin, end in answer["marked"] if end > less])


class _Renderer:
    """The process in which templates run; it is started anew after a template has ended it, and in a fork."""

    def __init__(self) -> None:
        self._lock, self._pid = threading.Lock(), 0
        self._end: Callable[[], int | None] = lambda: 0

    def ask(self, request: Mapping[str, Any]) -> Any:
        """Return the answer of renderer.py; in the place of one that ran into a limit, which limit that was."""
        with self._lock:
            if self._pid != os.getpid():
                self._start()
            line, self._pid = b"", 0  # after a signal, its answer would be taken for that to the next request
            with contextlib.suppress(BrokenPipeError):
                self._stdin.write(json.dumps(request).encode() + b"\n")
                self._stdin.flush()
                line = self._stdout.readline()
            if line:
                self._pid = os.getpid()
                return json.loads(line)
            code = self._end() or 0
            if code > 0:
                require_jinja()
            late = sys.platform != "win32" and code == -signal.SIGPROF
            return {"invalid": f"takes more than {SECONDS:g} s" if late else f"ends its process with {code}"}

    def _start(self) -> None:
        self._end()
        command = [sys.executable, "-P", str(Path(__file__).with_name("renderer.py"))]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert process.stdin is not None and process.stdout is not None
        self._stdin, self._stdout, self._pid = process.stdin, process.stdout, os.getpid()
        self._end = weakref.finalize(self, _end_process, process, self._pid)


def _end_process(process: subprocess.Popen[bytes], owner: int) -> int:
    """End the process that `owner` has started, and return its exit status."""
    if os.getpid() != owner:
        return 0
    with contextlib.suppress(OSError), process:  # which closes its pipes and waits for it
        process.kill()
    return process.returncode


_shared = weakref.WeakValueDictionary[str, _Renderer]()


def _renderer() -> _Renderer:
    """Return the one that all templates of this process share, as long as there is any."""
    return _shared.setdefault("", _Renderer())


def require_jinja() -> None:
    """Raise Unavailable when jinja2 is missing or broken."""
    with require_package("jinja2", "pip install 'toyexp[data]'"):
        import jinja2.sandbox  # noqa: F401 - what renderer.py uses


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
