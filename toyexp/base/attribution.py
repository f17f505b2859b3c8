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
    """Return True if an error's message can be printed as it is, without the name of a plugin.

    This holds for toyexp's own errors, for MemoryError, and for errors that a signal caused.
    """
    return isinstance(error, ToyexpError | MemoryError) or hidden_interrupt(error) is not None


def plugin_failure(who: str, when: str, error: Exception | SystemExit, log: Path | None = None) -> Exception:
    """Return the exception to raise in place of `error`, which the plugin `who` raised.

    Usually it is a PluginFailed. Its message names the plugin, `when` the error occurred (such as "at step 3"), and the
    file `log`, which has the traceback. Without `log` it names the line of code instead. toyexp's own errors are
    returned unchanged; an error from importing a third-party package becomes a RunFailed.
    """
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
    """Context manager that converts an exception to a PluginFailed, whose message names the plugin that raised it.

    If the traceback contains a plugin's method, the message names this plugin, otherwise `who`. A BadBatch is
    attributed to the data plugin `data`. `when` says when the error occurred, such as "at step 3". toyexp's own errors
    and OSErrors about a file are raised unchanged.
    """

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
    """Call a plugin's method and return its result. Raise PluginFailed if the result is not of type `expected`."""
    result = method(*arguments)
    if not isinstance(result, expected):
        raise wrong_return(method, result, expected.__name__, who)
    return result


def call_for_lines(method: Callable[..., object], *arguments: object) -> list[str]:
    """Call a plugin's method that returns sentences, and return a list with each sentence as a single line.

    Raise PluginFailed if the method returns a plain string or something that is not iterable.
    """
    result = method(*arguments)
    if isinstance(result, str) or not isinstance(result, Iterable):
        raise wrong_return(method, result, "sentences in a list")
    return [" ".join(str(sentence).splitlines()) for sentence in result]


def wrong_return(method: Callable[..., object], result: object, expected: str, who: str = "") -> PluginFailed:
    """Return the PluginFailed for a method that returned a wrong type.

    Its message names `who` or, if that is empty, the method's class.
    """
    who = who or type(getattr(method, "__self__", None)).__name__
    return PluginFailed(f"{who}.{method.__name__}() returned {printable(repr(result))}, expected {expected}")


@contextlib.contextmanager
def attribute_part_errors(log: Path | None = None) -> Iterator[None]:
    """Convert an exception from a plugin's method to a PluginFailed that names the plugin and the method.

    OSErrors, toyexp's own errors, and exceptions that no plugin's method raised are not converted.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        if isinstance(error, OSError) or has_own_message(error) or (method := _failing_method(error)) is None:
            raise
        raise plugin_failure(method[1], f"in {method[2]}()", error, log) from error


def _failing_method(error: BaseException) -> tuple[str, str, str] | None:
    """Return the innermost plugin method in the error's traceback as (kind, plugin, method), or None.

    An example is ("optim", "optim.adamw", "check").
    """
    for frame, _ in reversed([*traceback.walk_tb(error.__traceback__)]):
        if not str(frame.f_globals.get("__name__")).startswith("toyexp."):
            owner = frame.f_locals.get("self", frame.f_locals.get("cls"))
            cls = owner if isinstance(owner, type) else type(owner)
            if isinstance(kind := getattr(cls, "plugin_kind", None), str):
                name = getattr(cls, "name", None)
                return kind, f"{kind}.{name}" if name else f"{kind}'s {cls.__name__}", frame.f_code.co_name
    return None
