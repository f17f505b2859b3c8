"""Attribute an exception to the plugin that raised it, in a one-line error that names the plugin."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from toyexp.base.errors import BadBatch, PluginFailed, RunFailed, ToyexpError, printable
from toyexp.base.formatting import short_path
from toyexp.base.memory import convert_memory_errors
from toyexp.base.packages import broken_requirement, error_location
from toyexp.base.signals import hidden_interrupt

T = TypeVar("T")
MESSAGE_LIMIT = 300  # characters of an exception's message


def has_own_message(error: BaseException) -> bool:
    """Return True for an error that needs no attribution: raised on purpose, by a signal or by lack of memory."""
    return isinstance(error, ToyexpError | MemoryError) or hidden_interrupt(error) is not None


def plugin_failure(who: str, when: str, error: Exception | SystemExit, log: Path | None = None) -> Exception:
    """Return `error` as a PluginFailed of `who`, with the traceback's location; return other toyexp errors as is."""
    if has_own_message(error) and isinstance(error, Exception):
        return error
    if broken := broken_requirement(error):
        return RunFailed(str(broken))
    words = " ".join(str(error).split())
    words = words[:MESSAGE_LIMIT] + "..." * (len(words) > MESSAGE_LIMIT)
    location = f"; see {short_path(log)}" if log else error_location(error)
    failed = PluginFailed(f"{who} failed {when}: {type(error).__name__}{': ' * bool(words)}{words}{location}")
    failed.__cause__ = error
    return failed


class attribute_errors:  # noqa: N801 - a context manager, cheap enough to enter in each step
    """Context that names the plugin that raised an exception, or else `who`; for a BadBatch, the data plugin `data`."""

    def __init__(self, who: str, when: str | Callable[[], str], log: Path | None = None, data: str = ""):
        self._who, self._when, self._log, self._data = who, when, log, data

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, Exception | SystemExit):
            return
        when = self._when if isinstance(self._when, str) else self._when()
        try:
            with convert_memory_errors():
                raise error
        except (Exception, SystemExit) as fault:
            if isinstance(fault, BadBatch) and self._data:
                raise PluginFailed(f"data.{self._data} {when}: {fault}") from fault
            if isinstance(fault, OSError) and fault.filename is not None:
                raise
            method = _failing_method(fault)
            who = method[1] if method and method[0] != self._who.partition(".")[0] else self._who
            raise plugin_failure(who, when, fault, self._log) from (
                fault.__cause__ if has_own_message(fault) else fault
            )


def call_checked(expected: type, method: Callable[..., T], *arguments: object, who: str = "") -> T:
    """Call a plugin's method and return its result; raise PluginFailed unless it is of type `expected`."""
    result = method(*arguments)
    if not isinstance(result, expected):
        raise wrong_return(method, result, expected.__name__, who)
    return result


def call_for_lines(method: Callable[..., object], *arguments: object) -> list[str]:
    """Call a plugin's method that returns sentences, each as one line. Raise PluginFailed for a plain string."""
    result = method(*arguments)
    if isinstance(result, str) or not isinstance(result, Iterable):
        raise wrong_return(method, result, "sentences in a list")
    return [" ".join(str(sentence).splitlines()) for sentence in result]


def wrong_return(method: Callable[..., object], result: object, expected: str, who: str = "") -> PluginFailed:
    """Return the PluginFailed for a method that returned another type than expected."""
    who = who or type(getattr(method, "__self__", None)).__name__
    return PluginFailed(f"{who}.{method.__name__}() returned {printable(repr(result))}, expected {expected}")


@contextlib.contextmanager
def attribute_part_errors(log: Path | None = None) -> Iterator[None]:
    """Attribute exceptions to the plugin they came from; leave OSErrors and toyexp's own errors as they are."""
    try:
        yield
    except (Exception, SystemExit) as error:
        if isinstance(error, OSError) or has_own_message(error) or (method := _failing_method(error)) is None:
            raise
        raise plugin_failure(method[1], f"in {method[2]}()", error, log) from error


def _failing_method(error: BaseException) -> tuple[str, str, str] | None:
    """Return the kind, name and method of the innermost plugin part in the error's traceback."""
    for frame, _ in reversed([*traceback.walk_tb(error.__traceback__)]):
        if not str(frame.f_globals.get("__name__")).startswith("toyexp."):
            owner = frame.f_locals.get("self", frame.f_locals.get("cls"))
            cls = owner if isinstance(owner, type) else type(owner)
            if isinstance(kind := getattr(cls, "plugin_kind", None), str):
                name = getattr(cls, "name", None)
                return kind, f"{kind}.{name}" if name else f"{kind}'s {cls.__name__}", frame.f_code.co_name
    return None
