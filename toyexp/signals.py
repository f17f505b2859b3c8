"""Ctrl-C and SIGTERM: noted, raised where that is safe, and able to act while native code is busy; limits of time."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")


class Signals:
    """The first SIGINT or SIGTERM: raised as Interrupted, or once steps are taken, noted until the step is done.

    A second one acts at once.
    """

    def __init__(self) -> None:
        self._number = 0
        self._count = 0
        self._patient = False
        self._last_word: tuple[Interrupted | None] | None = None

    def handle(self, number: int, frame: FrameType | None) -> None:
        """What the interpreter calls."""
        self._number = self._number or number
        self._count += 1
        if self._count > 1 or not self._patient:
            raise Interrupted(number)

    def wait_for_the_step(self) -> None:
        """From now on a signal is only noted."""
        self._patient = True

    def caught(self) -> bool:
        """Whether one came."""
        return bool(self._number)

    def count(self) -> int:
        """How many came."""
        return self._count

    def last_word(self) -> Interrupted | None:
        """The one that came before this was first asked: a later one finds the run over, and changes no more of it."""
        if self._last_word is None:
            self._last_word = (Interrupted(self._number) if self._number else None,)
        return self._last_word[0]


@contextlib.contextmanager
def stop_signals() -> Iterator[Signals]:
    """Gives SIGINT and SIGTERM to a Signals; outside the main thread they belong to someone else and are left alone."""
    signals = Signals()
    previous = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            previous[number] = signal.signal(number, signals.handle)
    except ValueError:  # not the main thread
        yield signals
        return
    try:
        yield signals
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class Interrupted(KeyboardInterrupt):
    """A signal ended the run."""

    def __init__(self, number: int):
        super().__init__(f"interrupted by {signal.Signals(number).name}")
        self.exit_code = 128 + number


def hidden_interrupt(error: BaseException | None) -> Interrupted | None:
    """The signal in the middle of which `error` was raised, by code whose clean-up expects to have got further."""
    while error is not None and not isinstance(error, Interrupted):
        error = error.__context__
    return error


@contextlib.contextmanager
def cpu_limit(seconds: float, error: BaseException) -> Iterator[None]:
    """Raises `error` once this process has computed for so long in the block; outside the main thread it never does."""

    def handle(number: int, frame: FrameType | None) -> None:
        raise error

    try:
        previous = signal.signal(signal.SIGVTALRM, handle)
    except ValueError:  # not the main thread
        yield
        return
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, previous)


_abandoned = False  # whether a thread still works for someone who was interrupted


def interruptible(work: Callable[[], T]) -> T:
    """The result of `work`, for native code that returns late: done in a thread, so that a signal acts meanwhile."""
    global _abandoned
    if threading.current_thread() is not threading.main_thread():
        return work()
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="work", daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(0.2)  # a signal may wake another thread than this one
    except BaseException:
        _abandoned = True
        raise
    if errors:
        raise errors[0]
    return results[0]


def end_process(code: int) -> int:
    """The exit code; with an abandoned thread, ends the process here.

    The interpreter would end that thread wherever it asks for the lock again, which aborts the process inside Rust.
    """
    if _abandoned:
        _exit_now(code)
    return code


def _exit_now(code: int) -> NoReturn:
    atexit._run_exitfuncs()  # temporary directories, log files
    streams: tuple[Any, ...] = (sys.stdout, sys.stderr)
    for stream in streams:
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)
