"""The process of a job: it is started, listened to and stopped."""

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
from toyexp.sweeps.directory import Ended, Order
from toyexp.sweeps.launchers.forking import Process, Start, spawned
from toyexp.sweeps.launchers.gpus import VISIBLE

POLL = 0.2  # seconds between looks at a job's process and output
LINGER = 0.5  # seconds that a dead job's own children may hold its output open
ENDINGS = ("toyexp: error: ", "toyexp: interrupted ", "Traceback (most recent call last)")  # how a last word begins
LINES, LONG = 1000, 1 << 16  # of a job's last words, and bytes of a line, that are waited for
NOT_STARTED = 126  # the exit code that shells have for it
PATIENCE = 2  # signals to the sweep that are handed on; the next one kills


class Stop:
    """The first signal that ends goes on to the jobs that run, and no other is started; the third one kills them."""

    def __init__(self) -> None:
        self.number = 0  # of the signal
        self.ends = 0  # how often the jobs were to end
        self._count = 0
        self._processes: set[Process] = set()

    @property
    def requested(self) -> bool:
        """Whether the jobs are to end."""
        return self.ends > 0

    def handle(self, number: int, frame: FrameType | None = None) -> None:
        """What the interpreter calls."""
        self._count += 1
        self.number = self.number or number
        self.end(number if self._count <= PATIENCE else signal.SIGKILL)

    def end(self, number: int = signal.SIGTERM) -> None:
        """Has the jobs that run save and end."""
        self.ends += 1
        for process in list(self._processes):
            process.send_signal(number)

    def wait(self, seconds: float) -> None:
        """Until those that were told to end have ended, which they have to in this time."""
        until = time.monotonic() + seconds
        for process in list(self._processes):
            try:
                process.wait(max(until - time.monotonic(), 0))
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)

    @contextlib.contextmanager
    def watching(self, process: Process) -> Iterator[None]:
        """From now on a signal reaches `process`, and one that came already does."""
        self._processes.add(process)
        if self.requested:
            process.send_signal(self.number or signal.SIGTERM)
        try:
            yield
        finally:
            self._processes.discard(process)

    @contextlib.contextmanager
    def handling(self) -> Iterator[None]:
        """The signals that end are ours; SIGUSR1, if it is none of them, is for jobs alone."""
        handlers: dict[int, Handler] = dict.fromkeys(ending_signals(), self.handle)
        handlers.setdefault(signal.SIGUSR1, lambda number, frame: None)
        with handle_signals(handlers):
            yield


def run_process(
    order: Order,
    stop: Stop,
    show: Callable[[str, IO[str]], None],
    poll: Callable[[], None] = lambda: None,
    terminal: bool = False,
    start: Start = spawned,
) -> Ended:
    """Runs a job in a process of its own and waits for it; `show` gets its lines, and the log has them too.

    With `terminal` it writes to our own standard output, where it draws its bar. `poll` is called now and then.
    """
    last = _LastWords()
    try:
        words = order.words()
        environment = {**os.environ, **core_variables(order.cores), **order.environment, LIFELINE: "1"}
        if order.gpus:
            environment[VISIBLE] = ",".join(order.gpus)
        make_directory(order.log.parent)
        with (
            open(open_for_writing(order.log, os.O_APPEND), "ab", buffering=0) as log,
            start(words, environment, terminal) as process,
            stop.watching(process),
        ):
            for line, to_stderr in _lines(process, log, poll):
                if not (to_stderr and last.hears(line)):
                    show(line, sys.stderr if to_stderr else sys.stdout)
            code = process.wait()
        if code == 0:  # it said something of an error, and came through
            for line in last.held:
                show(line, sys.stderr)
    except UserError as error:
        return Ended(2, str(error))
    except OSError as error:  # no memory for a process, no room for its log
        return Ended(NOT_STARTED, f"could not be run here ({error.strerror})")
    return Ended(code, last.text() if code else "")


class _LastWords:
    """Keeps back what a job says of the error that ends it, which the sweep reports in a line of its own."""

    def __init__(self) -> None:
        self.held: deque[str] = deque(maxlen=LINES)
        self._line = ""

    def hears(self, line: str) -> bool:
        """Whether this line of its stderr belongs to an error."""
        self._line = line.strip() or self._line
        if self.held or line.startswith(ENDINGS):
            self.held.append(line)
        return bool(self.held)

    def text(self) -> str:
        """The error, or else the last line."""
        told = list(itertools.dropwhile(lambda line: not line.startswith("toyexp: error: "), self.held))
        return "\n".join(told).removeprefix("toyexp: error: ").rstrip() or self._line.removeprefix("toyexp: ")


def _lines(process: Process, log: IO[bytes], poll: Callable[[], None]) -> Iterator[tuple[str, bool]]:
    """What a process prints, line by line, and whether to stderr; until it ended, even if its own children live on."""
    left: dict[Any, bytes] = {pipe: b"" for pipe in (process.stdout, process.stderr) if pipe is not None}
    ended = None
    with selectors.DefaultSelector() as selector:
        for pipe in left:
            selector.register(pipe, selectors.EVENT_READ)
        while selector.get_map() and not (ended and time.monotonic() - ended > LINGER):
            for key, _ in selector.select(POLL):
                pipe = key.fileobj
                chunk = os.read(key.fd, 1 << 16)
                if not chunk:
                    selector.unregister(pipe)
                with contextlib.suppress(OSError):  # a full disk costs the log, not the job
                    log.write(chunk)
                *whole, left[pipe] = (left[pipe] + chunk).split(b"\n")
                if len(left[pipe]) > LONG:  # a bar that never ends its line
                    whole, left[pipe] = [*whole, left[pipe]], b""
                yield from ((line.decode(errors="replace"), pipe is process.stderr) for line in whole)
            poll()
            ended = ended or (time.monotonic() if process.poll() is not None else None)
    for pipe, rest in left.items():
        if rest:
            yield rest.decode(errors="replace"), pipe is process.stderr
