"""Render conversations with a GGUF's own chat template (Jinja).

Templates are written for transformers' renderer, so they get the same names, filters and extensions here.
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
RENDERED_LIMIT = 1 << 24  # characters of a rendered conversation
SECONDS = 3.0  # CPU seconds per rendering
# Names of special tokens in templates, by the GGUF key of the token. "seperator" is GGUF's spelling.
TOKENS = {"unknown": "unk_token", "padding": "pad_token", "seperator": "sep_token", "mask": "mask_token"}
REASONING = ("reasoning_content", "thinking", "reasoning")  # keys of a message that hold its reasoning


class BadChat(UserError):
    """Error: the template rejects a conversation. The message has the reason."""


class Rendered(NamedTuple):
    """Conversation rendered as text, and the character ranges of the assistant's words in this text.

    A range (begin, end) covers text that the template encloses in {% generation %}. A template without this tag gives
    no ranges.
    """

    text: str
    marked: list[tuple[int, int]]


class Template:
    """Chat template in Jinja's sandbox, run in a child process with limits on time, memory and output.

    `now` is the time that the template gets from `strftime_now`, by default the real time. `is_dated` becomes True when
    the template calls `strftime_now`. Raise UserError for an invalid template, Unavailable without jinja2.
    """

    def __init__(self, text: str, tokenizer: Tokenizer, path: Path | str, now: datetime | None = None):
        if len(text) > TEMPLATE_LIMIT:
            raise UserError(f"{path}: its chat template has more than {TEMPLATE_LIMIT} characters")
        self.is_dated = False
        self._request = {"template": text, "now": now.isoformat() if now else "", "limit": RENDERED_LIMIT}
        self._renderer = _renderer()
        self._names = _special_names(tokenizer)
        self._bos_text = self._names["bos_token"] if tokenizer.add_bos else ""  # removed here; the tokenizer adds it
        with prefix_unavailable(f"the chat template of {path}"):
            reply = self._ask([], None, [])
        if "invalid" in reply:
            raise UserError(f"{path}: its chat template is not valid ({printable(reply['invalid'])})")

    def render(self, messages: Sequence[Mapping[str, Any]], answer: bool, tools: Any = None) -> Rendered:
        """Return the rendered messages; raise BadChat if the template rejects them.

        With `answer`, the text ends with the start of the assistant's next message. `tools` are JSON schemas of the
        tools that the assistant may call.
        """
        (rendered,) = self.render_beginnings(messages, [(len(messages), answer)], tools)
        if isinstance(rendered, BadChat):
            raise rendered
        return rendered

    def render_beginnings(
        self, messages: Sequence[Mapping[str, Any]], beginnings: Sequence[tuple[int, bool]], tools: Any = None
    ) -> list[Rendered | BadChat]:
        """Render several beginnings of a conversation. For a beginning that the template rejects, return a BadChat.

        Each pair (count, answer) in `beginnings` renders the first `count` messages, and with `answer` also the start
        of the assistant's next message. A message has a role and content. `tools` are JSON schemas of the tools that
        the assistant may call.
        """
        reply = self._ask(messages, tools, beginnings)
        reasons = [reply.get("invalid")] * len(beginnings)
        return [self._read(answer) for answer in reply.get("answers", reasons)]

    def _ask(self, messages: Sequence[Mapping[str, Any]], tools: Any, beginnings: Sequence[tuple[int, bool]]) -> Any:
        context = {"messages": [_with_reasoning(m) for m in messages], "tools": tools, "documents": None, **self._names}
        return self._renderer.ask({**self._request, "seconds": SECONDS, "variables": context, "beginnings": beginnings})

    def _read(self, answer: Any) -> Rendered | BadChat:
        if isinstance(answer, str):
            return BadChat(f"the chat template {printable(answer, 150)}")
        self.is_dated |= answer["dated"]
        text = answer["text"].removeprefix(self._bos_text)
        lead = len(answer["text"]) - len(text)
        return Rendered(text, [(max(begin - lead, 0), end - lead) for begin, end in answer["marked"] if end > lead])


class _Renderer:
    """Child process that renders templates; it is restarted after a crash and after a fork."""

    def __init__(self) -> None:
        self._lock, self._pid = threading.Lock(), 0
        self._end: Callable[[], int | None] = lambda: 0

    def ask(self, request: Mapping[str, Any]) -> Any:
        """Send a request to the child process (renderer.py) and return its answer.

        If the child process died, for example because of the time limit, return {"invalid": reason}. Raise Unavailable
        if the child process could not import jinja2.
        """
        with self._lock:
            if self._pid != os.getpid():
                self._start()
            line, self._pid = b"", 0  # if a signal interrupts this, the late answer must not be read
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
            is_timeout = sys.platform != "win32" and code == -signal.SIGPROF
            return {"invalid": f"takes more than {SECONDS:g} s" if is_timeout else f"ends its process with {code}"}

    def _start(self) -> None:
        self._end()
        command = [sys.executable, "-P", str(Path(__file__).with_name("renderer.py"))]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert process.stdin is not None and process.stdout is not None
        self._stdin, self._stdout, self._pid = process.stdin, process.stdout, os.getpid()
        self._end = weakref.finalize(self, _end_process, process, self._pid)


def _end_process(process: subprocess.Popen[bytes], owner: int) -> int:
    """Kill a child process and return its exit status.

    `owner` is the id of the process that started the child. In any other process, such as a fork of the owner, do
    nothing and return 0.
    """
    if os.getpid() != owner:
        return 0
    with contextlib.suppress(OSError), process:  # leaving the context closes its pipes and waits
        process.kill()
    return process.returncode


_shared = weakref.WeakValueDictionary[str, _Renderer]()


def _renderer() -> _Renderer:
    """Return the renderer shared by all templates of this process."""
    return _shared.setdefault("", _Renderer())


def require_jinja() -> None:
    """Raise Unavailable if jinja2 is missing or broken."""
    with require_package("jinja2", "pip install 'toyexp[data]'"):
        import jinja2.sandbox  # noqa: F401 - renderer.py uses it


def _special_names(tokenizer: Tokenizer) -> dict[str, str]:
    """Return {name in chat templates: text} of the special tokens, such as {"bos_token": "<s>"}."""
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
    """Return the message with its reasoning also under the keys `thinking` and `reasoning_content`.

    Templates differ in the key that they read. A message without reasoning is returned unchanged.
    """
    thought = next((message[key] for key in REASONING if message.get(key) is not None), None)
    return message if thought is None else {"thinking": thought, **message, "reasoning_content": thought}


def control_pattern(tokenizer: Tokenizer) -> re.Pattern[str]:
    """Return a regular expression that matches the text of each control token of the tokenizer."""
    literals = sorted((tokenizer.pieces[i] for i in {tokenizer.eos, *tokenizer.controls}), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, literals)))
