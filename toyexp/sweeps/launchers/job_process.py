"""Start a job's process, read its output, and stop it."""

from __future__ import annotations

import contextlib
import itertools
import os
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from types import FrameType
from typing import IO, Any

from toyexp.base.errors import UserError
from toyexp.base.signals import Handler, ending_signals, handle_signals
from toyexp.base.threads import core_variables
from toyexp.base.writing import make_directory, open_for_writing
from toyexp.sweeps.combinations import LIFELINE
from toyexp.sweeps.directory import JobExit, LaunchSpec
from toyexp.sweeps.launchers.forking import Process, Start, spawn
from toyexp.sweeps.launchers.gpus import VISIBLE_DEVICES

POLL = 0.2  # seconds between checks of a job's process and output
PIPE_TIMEOUT = 0.5  # seconds that children of an ended job may keep its output open
ENDINGS = ("toyexp: error: ", "toyexp: interrupted ", "Traceback (most recent call last)")  # starts of error messages
LINES, LONG = 1000, 1 << 16  # last lines of an error message that are kept; bytes after which an unended line is shown
NOT_STARTED = 126  # exit code of shells for a command that cannot be run
PATIENCE = 2  # signals that are forwarded to jobs; the next one kills them


class Stop:
    """Requests to stop a sweep. The first two signals ask the jobs to save and exit; the third signal kills them."""

    def __init__(self) -> None:
        self.number = 0  # number of the first signal; 0 if there was none
        self.ends = 0  # number of stop requests
        self._count = 0
        self._processes: set[Process] = set()

    @property
    def is_requested(self) -> bool:
        """Whether the sweep should stop."""
        return self.ends > 0

    def handle(self, number: int, frame: FrameType | None = None) -> None:
        """Handle a signal by sending it to the running jobs. From the third signal on, send SIGKILL instead."""
        self._count += 1
        self.number = self.number or number
        self.end(number if self._count <= PATIENCE else signal.SIGKILL)

    def end(self, number: int = signal.SIGTERM) -> None:
        """Send a signal to all running jobs. Signals other than SIGKILL ask a job to save a checkpoint and exit."""
        self.ends += 1
        for process in list(self._processes):
            process.send_signal(number)

    def wait(self, seconds: float) -> None:
        """Wait until the jobs' processes have ended. Kill those that still run after `seconds`."""
        until = time.monotonic() + seconds
        for process in list(self._processes):
            try:
                process.wait(max(until - time.monotonic(), 0))
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)

    @contextlib.contextmanager
    def forward_signals(self, process: Process) -> Iterator[None]:
        """Forward stop signals to `process` while the context is open.

        If a stop was requested before, send the signal to the process at once.
        """
        self._processes.add(process)
        if self.is_requested:
            process.send_signal(self.number or signal.SIGTERM)
        try:
            yield
        finally:
            self._processes.discard(process)

    @contextlib.contextmanager
    def handle_signals(self) -> Iterator[None]:
        """Handle stop signals in this process while the context is open.

        SIGUSR1 is meant for jobs. This process ignores it, unless it is one of the stop signals.
        """
        handlers: dict[int, Handler] = dict.fromkeys(ending_signals(), self.handle)
        handlers.setdefault(signal.SIGUSR1, lambda number, frame: None)
        with handle_signals(handlers):
            yield


def run_process(
    spec: LaunchSpec,
    stop: Stop,
    show: Callable[[str, IO[str]], None],
    poll: Callable[[], None] = lambda: None,
    terminal: bool = False,
    start: Start = spawn,
) -> JobExit:
    """Run a job in its own process, wait for it, and return its exit code and error message.

    `show` is called with each line that the job prints and with the stream (sys.stdout or sys.stderr) of the line.
    Lines are also written to the job's log. With `terminal`, the job can draw a progress bar, because it writes
    directly to the standard output of the sweep. `poll` is called about every POLL seconds. `start` is the function
    that starts the process.
    """
    last = _LastWords()
    try:
        words = spec.args()
        environment = {**os.environ, **core_variables(spec.cores), **spec.environment, LIFELINE: "1"}
        if not terminal:
            environment["NO_COLOR"] = "1"  # the output goes to a log
        if spec.gpus:
            environment[VISIBLE_DEVICES] = ",".join(spec.gpus)
        make_directory(spec.log.parent)
        with (
            open(open_for_writing(spec.log, os.O_APPEND), "ab", buffering=0) as log,
            start(words, environment, terminal) as process,
            stop.forward_signals(process),
        ):
            for line, to_stderr in _lines(process, log, poll):
                if not (to_stderr and last.holds_back(line)):
                    show(line, sys.stderr if to_stderr else sys.stdout)
            code = process.wait()
        if code == 0:  # the job printed an error and still succeeded
            for line in last.held:
                show(line, sys.stderr)
    except UserError as error:
        return JobExit(2, str(error))
    except OSError as error:  # no memory for a process, or no space for its log
        return JobExit(NOT_STARTED, f"the job's process could not be started on this machine ({error.strerror})")
    return JobExit(code, last.text() if code else "")


class _LastWords:
    """Filter that removes the error message from a job's stderr and stores it.

    The sweep later prints this message together with the job's number.
    """

    def __init__(self) -> None:
        self.held: deque[str] = deque(maxlen=LINES)
        self._line = ""

    def holds_back(self, line: str) -> bool:
        """Return True if this line of stderr belongs to an error message. In this case, store the line for later."""
        self._line = line.strip() or self._line
        if self.held or line.startswith(ENDINGS):
            self.held.append(line)
        return bool(self.held)

    def text(self) -> str:
        """Return the error message, or the last line of stderr if it holds no error message."""
        message = list(itertools.dropwhile(lambda line: not line.startswith("toyexp: error: "), self.held))
        return "\n".join(message).removeprefix("toyexp: error: ").rstrip() or self._line.removeprefix("toyexp: ")


def _lines(process: Process, log: IO[bytes], poll: Callable[[], None]) -> Iterator[tuple[str, bool]]:
    """Yield each line that a process prints, with True for stderr and False for stdout, and write it to the log.

    The iterator ends when the process has ended, although its child processes may still run.
    """
    partial_lines: dict[Any, bytes] = {pipe: b"" for pipe in (process.stdout, process.stderr) if pipe is not None}
    end_time = None
    with selectors.DefaultSelector() as selector:
        for pipe in partial_lines:
            selector.register(pipe, selectors.EVENT_READ)
        while selector.get_map() and not (end_time and time.monotonic() - end_time > PIPE_TIMEOUT):
            for key, _ in selector.select(POLL):
                pipe = key.fileobj
                chunk = os.read(key.fd, 1 << 16)
                if not chunk:
                    selector.unregister(pipe)
                with contextlib.suppress(OSError):  # on a full disk only the log is lost
                    log.write(chunk)
                *complete_lines, partial_lines[pipe] = (partial_lines[pipe] + chunk).split(b"\n")
                if len(partial_lines[pipe]) > LONG:  # such as a progress bar that never ends its line
                    complete_lines, partial_lines[pipe] = [*complete_lines, partial_lines[pipe]], b""
                yield from ((line.decode(errors="replace"), pipe is process.stderr) for line in complete_lines)
            poll()
            end_time = end_time or (time.monotonic() if process.poll() is not None else None)
    for pipe, rest in partial_lines.items():
        if rest:
            yield rest.decode(errors="replace"), pipe is process.stderr
