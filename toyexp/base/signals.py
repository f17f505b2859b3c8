"""Handle signals that end a run or make it save a checkpoint, also during imports and long native calls."""

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
Handler = Callable[[int, FrameType | None], Any]  # signature of a Python signal handler

IMPORT_TIMEOUT = 10.0  # seconds that a signal waits for an import to finish
SIGHUP, SIGUSR1 = getattr(signal, "SIGHUP", None), getattr(signal, "SIGUSR1", None)  # Windows has neither
USR1_VARIABLE = "TOYEXP_SIGUSR1"  # variable: SIGUSR1, a cluster's warning, means save (and continue) or end


def ending_signals() -> list[signal.Signals]:
    """Return the signals that end a run: SIGINT, SIGTERM, SIGHUP (not under `nohup`), and SIGUSR1 if so configured.

    The environment variable TOYEXP_SIGUSR1=end adds SIGUSR1. Raise UserError if it has an unknown value.
    """
    action = os.environ.get(USR1_VARIABLE) or "save"
    if action not in ("save", "end"):
        raise UserError(f"{USR1_VARIABLE}={printable(action)}: must be save or end")
    numbers = [signal.SIGINT, signal.SIGTERM]
    numbers += [SIGHUP] if SIGHUP and signal.getsignal(SIGHUP) != signal.SIG_IGN else []
    return numbers + ([SIGUSR1] if SIGUSR1 and action == "end" else [])


_sweep_is_gone = threading.Event()


def end_with_sweep() -> None:
    """Send SIGTERM to this process because its sweep has ended, so that it saves a checkpoint and exits.

    The ended sweep may have sent a signal, too. Usually a second signal forces an immediate exit, but not in this case.
    """
    _sweep_is_gone.set()
    os.kill(os.getpid(), signal.SIGTERM)


class Signals:
    """Signals that one run has received, and the handlers that record them.

    Some signals, such as SIGINT and SIGTERM, end the run. The first of them raises Interrupted at once, with two
    exceptions. During training it is only recorded, and the training loop ends the run after the current step. During
    an import, Interrupted is raised when the import is over. A second signal raises Interrupted at once.
    """

    def __init__(self) -> None:
        self._number = 0
        self._count = 0
        self._is_deferring = False
        self._is_resent = False
        self._first = 0.0  # time of the first signal
        self._over = threading.Event()  # set when this object is no longer the handler
        self.is_save_requested = False
        self._final_interrupt: tuple[Interrupted | None] | None = None

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal that ends the run: record it, and raise Interrupted.

        For the first such signal there are two exceptions. During training, Interrupted is not raised. During an
        import, it is raised when the import is over.
        """
        self._number = self._number or number
        if self._count and _sweep_is_gone.is_set():  # the sweep has already asked this process to end
            _sweep_is_gone.clear()
            return
        is_repeat, self._is_resent = self._is_resent, False
        self._count += not is_repeat
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
            else:  # only a signal to the main thread interrupts its system call
                signal.pthread_kill(threading.main_thread().ident or 0, number)

    def close(self) -> None:
        """Stop handling signals.

        Drop a signal that arrived during an import and has not yet raised Interrupted.
        """
        self._over.set()

    def request_save(self, number: int, frame: FrameType | None) -> None:
        """Record that SIGUSR1 asked the run to save a checkpoint."""
        self.is_save_requested = True

    def take_save_request(self) -> bool:
        """Return True if a save was requested since the last call."""
        is_requested, self.is_save_requested = self.is_save_requested, False
        return is_requested

    def defer_to_step_end(self) -> None:
        """From now on, only record the first signal that ends the run. The training loop acts on it after a step."""
        self._is_deferring = True

    def is_ending(self) -> bool:
        """Return True once a signal asked the run to end."""
        return bool(self._number)

    def count(self) -> int:
        """Return how many of the received signals asked the run to end."""
        return self._count

    def final_interrupt(self) -> Interrupted | None:
        """Return an Interrupted if a signal asked the run to end before the first call of this method, else None.

        All later calls return the same result, because signals that arrive after the first call no longer affect the
        run.
        """
        if self._final_interrupt is None:
            self._final_interrupt = (Interrupted(self._number) if self._number else None,)
        return self._final_interrupt[0]


@contextlib.contextmanager
def handle_signals(handlers: Mapping[int, Handler]) -> Iterator[bool]:
    """Install signal handlers inside this context, restore the old ones on exit, and yield True.

    Outside the main thread, where Python allows no handlers, change nothing and yield False.
    """
    is_main = threading.current_thread() is threading.main_thread()
    previous = {number: signal.signal(number, handler) for number, handler in handlers.items() if is_main}
    try:
        yield is_main
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class CommonSignals(Signals):
    """Signals of a process in which several runs train. Each signal is recorded for every run.

    The first signal that ends the runs does not raise Interrupted, so that each run can end after its current step. A
    second one raises Interrupted.
    """

    def __init__(self) -> None:
        super().__init__()
        self._is_deferring = True
        self._runs: list[Signals] = []

    def add_run(self) -> Signals:
        """Add a run and return its Signals, which has all signals received so far and will record later ones."""
        run = Signals()
        run._number, run._count = self._number, self._count
        self._runs.append(run)
        return run

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal that ends all runs of this process: record it in the Signals of every run."""
        for run in self._runs:
            run._number, run._count = run._number or number, run._count + 1
        super().handle(number, frame)

    def request_save(self, number: int, frame: FrameType | None) -> None:
        """Handle SIGUSR1: make every run of this process save a checkpoint."""
        for run in self._runs:
            run.is_save_requested = True


@contextlib.contextmanager
def catch_signals(signals: Signals | None = None) -> Iterator[Signals]:
    """Inside this context, record signals that end a run or request a checkpoint.

    Yield the object that records them: `signals`, or a new one.
    """
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
    """Delay Ctrl-C until an import is over, if SIGINT has Python's default handler."""
    is_default = signal.getsignal(signal.SIGINT) == signal.default_int_handler
    with handle_signals({signal.SIGINT: Signals().handle} if is_default else {}):
        yield


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame is not None


class Interrupted(KeyboardInterrupt):
    """Exception raised for a signal that ends the run; `exit_code` is 128 plus the signal's number."""

    def __init__(self, number: int):
        super().__init__(f"interrupted by {signal.Signals(number).name}")
        self.exit_code = 128 + number


def hidden_interrupt(error: BaseException | None) -> Interrupted | None:
    """Return `error` if it is an Interrupted, else the first Interrupted in its `__context__` chain, or None."""
    while error is not None and not isinstance(error, Interrupted):
        error = error.__context__
    return error


_is_thread_abandoned = False  # whether an interrupted call left its thread running


def run_interruptibly(work: Callable[[], T]) -> T:
    """Run `work` in a thread, so that signals are handled during long native calls, and return its result."""
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
            thread.join(0.2)  # wakes up, as the signal may go to another thread
    except BaseException:
        _is_thread_abandoned = True
        raise
    if errors:
        raise errors[0]
    return results[0]


def end_process(code: int) -> int:
    """Return `code`, unless a call of `run_interruptibly` was interrupted and its thread may still run.

    In that case end the process at once with this exit code: a normal exit would abort inside the native (Rust) code of
    the thread.
    """
    if _is_thread_abandoned:
        exit_now(code)
    return code


def exit_now(code: int) -> NoReturn:
    """Run exit handlers, flush the streams and end the process without unloading libraries."""
    atexit._run_exitfuncs()  # remove temporary directories, close log files
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)
