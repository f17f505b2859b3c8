"""Signals that end a run or have it save: noted, raised where that is safe, and heard while native code is busy."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any, NoReturn, TypeVar

from toyexp.base.errors import UserError, printable

T = TypeVar("T")
Handler = Callable[[int, FrameType | None], Any]  # what the interpreter calls

IMPORT_TIMEOUT = 10.0  # seconds that a signal waits for the end of an import, which it would break
SIGHUP, SIGUSR1 = getattr(signal, "SIGHUP", None), getattr(signal, "SIGUSR1", None)  # Windows has neither
USR1_VARIABLE = (
    "TOYEXP_SIGUSR1"  # in the environment: save (and go on), or end; for what a cluster sends before time is up
)


def ending_signals() -> list[signal.Signals]:
    """Return the signals that end a run: not SIGHUP under `nohup`; UserError if TOYEXP_SIGUSR1 is not save or end."""
    asked = os.environ.get(USR1_VARIABLE) or "save"
    if asked not in ("save", "end"):
        raise UserError(f"{USR1_VARIABLE}={printable(asked)}: takes save or end")
    numbers = [signal.SIGINT, signal.SIGTERM]
    numbers += [SIGHUP] if SIGHUP and signal.getsignal(SIGHUP) != signal.SIG_IGN else []
    return numbers + ([SIGUSR1] if SIGUSR1 and asked == "end" else [])


_sweep_is_gone = threading.Event()


def end_with_sweep() -> None:
    """Signal this process to save and exit. After another such signal this one does not make it exit at once."""
    _sweep_is_gone.set()
    os.kill(os.getpid(), signal.SIGTERM)


class Signals:
    """The first signal that ends: raised as Interrupted, or once steps are taken, noted until the step is done.

    In the middle of an import, which it would break, it is raised after that. A second one acts at once.
    """

    def __init__(self) -> None:
        self._number = 0
        self._count = 0
        self._is_deferring = False
        self._is_resent = False
        self._first = 0.0  # when the first one came
        self._over = threading.Event()  # nobody handles signals with this any more
        self.is_save_requested = False
        self._final_interrupt: tuple[Interrupted | None] | None = None

    def handle(self, number: int, frame: FrameType | None) -> None:
        """What the interpreter calls."""
        self._number = self._number or number
        if self._count and _sweep_is_gone.is_set():  # it was told so before, by what the sweep ran on
            _sweep_is_gone.clear()
            return
        again, self._is_resent = self._is_resent, False
        self._count += not again
        if self._count == 1 and self._is_deferring:
            return
        self._first = self._first or time.monotonic()
        if self._count == 1 and time.monotonic() - self._first < IMPORT_TIMEOUT and _is_importing(frame):
            threading.Thread(target=self._resend, args=(number,), daemon=True).start()
            return
        raise Interrupted(number)

    def _resend(self, number: int) -> None:
        if not self._over.wait(0.02):
            self._is_resent = True
            if sys.platform == "win32":
                signal.raise_signal(number)
            else:  # whose system call a signal to this thread would not end
                signal.pthread_kill(threading.main_thread().ident or 0, number)

    def close(self) -> None:
        """What waits for the end of an import is not raised any more."""
        self._over.set()

    def request_save(self, number: int, frame: FrameType | None) -> None:
        """What the interpreter calls on SIGUSR1."""
        self.is_save_requested = True

    def take_save_request(self) -> bool:
        """Whether that was asked for since the last call."""
        asked, self.is_save_requested = self.is_save_requested, False
        return asked

    def defer_to_step_end(self) -> None:
        """From now on a signal is only noted."""
        self._is_deferring = True

    def is_ending(self) -> bool:
        """Whether one came."""
        return bool(self._number)

    def count(self) -> int:
        """How many came."""
        return self._count

    def final_interrupt(self) -> Interrupted | None:
        """The one that came before this was first asked: a later one finds the run over, and changes no more of it."""
        if self._final_interrupt is None:
            self._final_interrupt = (Interrupted(self._number) if self._number else None,)
        return self._final_interrupt[0]


@contextlib.contextmanager
def handle_signals(handlers: Mapping[int, Handler]) -> Iterator[bool]:
    """Gives signals to handlers for a while, if so: outside the main thread they are someone else's, and left alone."""
    ours = threading.current_thread() is threading.main_thread()
    previous = {number: signal.signal(number, handler) for number, handler in handlers.items() if ours}
    try:
        yield ours
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class CommonSignals(Signals):
    """Those of a process that several runs share: the first is only noted, and each run hears of it."""

    def __init__(self) -> None:
        super().__init__()
        self._is_deferring = True
        self._runs: list[Signals] = []

    def add_run(self) -> Signals:
        """What another run knows of them: those that came already, and those that come."""
        run = Signals()
        run._number, run._count = self._number, self._count
        self._runs.append(run)
        return run

    def handle(self, number: int, frame: FrameType | None) -> None:
        """What the interpreter calls."""
        for run in self._runs:
            run._number, run._count = run._number or number, run._count + 1
        super().handle(number, frame)

    def request_save(self, number: int, frame: FrameType | None) -> None:
        """What the interpreter calls on SIGUSR1."""
        for run in self._runs:
            run.is_save_requested = True


@contextlib.contextmanager
def catch_signals(signals: Signals | None = None) -> Iterator[Signals]:
    """Give the signals that end or save a run to `signals`, or to new ones, for a while."""
    signals = signals or Signals()
    handlers: dict[int, Handler] = dict.fromkeys(ending_signals(), signals.handle)
    if SIGUSR1 and signal.getsignal(SIGUSR1) != signal.SIG_IGN:
        handlers.setdefault(SIGUSR1, signals.request_save)
    with handle_signals(handlers):
        try:
            yield signals
        finally:
            signals.close()


@contextlib.contextmanager
def protect_imports() -> Iterator[None]:
    """Delay Ctrl-C until an import is over, in a program that leaves SIGINT to Python."""
    python = signal.getsignal(signal.SIGINT) == signal.default_int_handler
    with handle_signals({signal.SIGINT: Signals().handle} if python else {}):
        yield


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame is not None


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


_is_thread_abandoned = False  # whether a thread still works for someone who was interrupted


def run_interruptibly(work: Callable[[], T]) -> T:
    """The result of `work`, for native code that returns late: done in a thread, so that a signal acts meanwhile."""
    global _is_thread_abandoned
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
        _is_thread_abandoned = True
        raise
    if errors:
        raise errors[0]
    return results[0]


def end_process(code: int) -> int:
    """Return the exit code, or exit here if a thread was abandoned: to end it later aborts inside Rust."""
    if _is_thread_abandoned:
        exit_now(code)
    return code


def exit_now(code: int) -> NoReturn:
    """Ends the process here: what is to be done at exit is done, and nothing that is loaded is taken apart."""
    atexit._run_exitfuncs()  # temporary directories, log files
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)
