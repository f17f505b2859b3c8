"""Child process that renders chat templates: it reads one JSON request per line and answers with one line.

Jinja's sandbox limits neither memory nor time. Therefore the process has a memory limit, and the system kills it if one
rendering takes too long. This module imports nothing from toyexp, so that the process starts quickly.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any

MEMORY = 1 << 30  # bytes of address space
ERROR_LIMIT = 1000  # characters of an error message


class TemplateError(Exception):
    """Error: the template rejects a conversation."""


class Compiled:
    """A compiled chat template."""

    def __init__(self, text: str):
        self._now, self._dated, self._length, self._marked = "", False, 0, list[tuple[int, int]]()
        environment = _environment(self._mark)
        environment.globals |= {"raise_exception": _raise_template_error, "strftime_now": self._strftime_now}
        self._template = environment.from_string(text)

    def render(self, request: Mapping[str, Any], count: int, prompted: bool) -> dict[str, Any]:
        """Render the first `count` messages; `prompted` appends the start of the assistant's next message.

        Return `text`, `marked` (the character ranges inside {% generation %}) and `dated` (whether the template used
        the date).
        """
        self._now, self._dated, self._length, self._marked = request["now"], False, 0, []
        variables = {**request["variables"], "add_generation_prompt": prompted}
        variables["messages"] = variables["messages"][:count]
        pieces: list[str] = []
        for piece in self._template.generate(**variables):
            pieces.append(piece)
            self._length += len(piece)
            if self._length > request["limit"]:
                raise TemplateError(f"writes more than {request['limit']} characters")
        return {"text": "".join(pieces), "marked": self._marked, "dated": self._dated}

    def _mark(self, words: str) -> None:
        """Record the character range of `words`, the text inside {% generation %} that the template writes next."""
        self._marked.append((self._length, self._length + len(words)))

    def _strftime_now(self, form: str) -> str:
        self._dated = True
        return (datetime.fromisoformat(self._now) if self._now else datetime.now()).strftime(form)


def _environment(mark: Callable[[str], None]) -> Any:
    """Return a sandboxed Jinja environment with the tags and filters that chat templates expect.

    `mark` is called with each text inside the tag {% generation %}.
    """
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """Jinja extension for the tag {% generation %}, which encloses the assistant's words."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            """Parse the tag; return a syntax node that calls the method `_marked` with the content of the tag."""
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

        def _marked(self, caller: Callable[[], str]) -> str:
            words = caller()
            mark(words)
            return words

    extensions = [Generation, "jinja2.ext.loopcontrols"]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _to_json
    return environment


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | str | None = None, separators: Any = None,
    sort_keys: bool = False,
) -> str:  # fmt: skip
    """Return a value as plain JSON. This replaces Jinja's own filter, which escapes characters for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_template_error(message: Any) -> None:
    raise TemplateError(f"rejects the conversation ({str(message)[:ERROR_LIMIT]})")


compile_template = lru_cache(maxsize=8)(Compiled)


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """Render the beginnings of a conversation that a request lists.

    Return {"answers": [...]} with the result of `Compiled.render`, or the reason for the rejection, for each beginning;
    return {"invalid": reason} if the template is invalid.
    """
    seconds = request["seconds"]
    template = _attempt(seconds, compile_template, request["template"])
    if isinstance(template, str):
        return {"invalid": template}
    return {"answers": [_attempt(seconds, template.render, request, *beginning) for beginning in request["beginnings"]]}


def _attempt(seconds: float, work: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of `work(*arguments)`, or an error message if it fails.

    If the call takes more than `seconds` of CPU time, the system kills the process.
    """
    if sys.platform != "win32":
        signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        return work(*arguments)
    except TemplateError as reason:
        return str(reason)
    except MemoryError:
        return f"takes more than {MEMORY >> 30} GB of memory"
    except Exception as error:  # a template can raise anything
        return f"fails ({str(error)[:ERROR_LIMIT]})"


def _limit_memory() -> None:
    with contextlib.suppress(ImportError, ValueError, OSError):  # Windows lacks it; macOS may reject it
        import resource

        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY if hard == resource.RLIM_INFINITY else min(MEMORY, hard), hard))


def main() -> None:
    """Read JSON requests, one per line, from standard input, and print a JSON answer to each until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    _limit_memory()
    _environment(lambda words: None)  # fails early if jinja2 cannot be loaded
    for line in sys.stdin.buffer:
        sys.stdout.buffer.write(json.dumps(answer(json.loads(line))).encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
