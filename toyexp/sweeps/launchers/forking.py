"""Jobs that start at once: each is forked from a process that has loaded what they need, and opened no device.

The fork server is our own. That of `multiprocessing` replaces sys.path, imports the caller's script again, is one for a
process and so keeps plugins that were edited since, and cannot say whether a thread runs or a device is open.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from io import FileIO
from multiprocessing.connection import Connection, Pipe
from multiprocessing.reduction import send_handle
from pathlib import Path
from typing import Any, TypeAlias, cast

from toyexp.base.ranks import FORK_SERVER_FILE

POLL = 0.1  # seconds between looks at whether the sweep is to stop
PLATFORMS = ("linux",)  # elsewhere libraries of the system are not fork-safe: jobs are spawned

Process: TypeAlias = "subprocess.Popen[bytes] | Forked"
Start = Callable[[Sequence[str], Mapping[str, str], bool], Process]  # of words, environment, whether on a terminal


def spawned(words: Sequence[str], environment: Mapping[str, str], terminal: bool) -> Process:
    """Start the process of a job, which loads everything by itself."""
    return subprocess.Popen(
        [sys.executable, "-m", "toyexp", *words],
        stdin=subprocess.PIPE, stdout=None if terminal else subprocess.PIPE, stderr=subprocess.PIPE,
        env=environment, process_group=0,  # a Ctrl-C reaches it through us, once
    )  # fmt: skip


class Forks:
    """Starts a sweep's jobs. Where that cannot be by forking, each is spawned.

    What a job does is what `spawned` has it do: only what is loaded is there already, as it was when the sweep began.
    """

    def __init__(
        self, environment: Mapping[str, str], words: Sequence[str], stopped: Callable[[], bool], stacks: bool = False
    ):
        """Start the fork server, which imports what jobs of these `words` need; with `stacks` also what trains those.

        Raises OSError if no process can be started.
        """
        self._stopped, self._lock = stopped, threading.Lock()
        self._ready: bool | None = None
        self._control, theirs = Pipe()
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "toyexp"], env={**environment, FORK_SERVER_FILE: str(theirs.fileno())},
                    stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()], process_group=0,
                )  # fmt: skip
            except BaseException:
                self._control.close()
                raise
        with contextlib.suppress(OSError):  # it has been killed; jobs are spawned then
            self._control.send({"words": list(words), "stacks": stacks})

    def start(self, words: Sequence[str], environment: Mapping[str, str], terminal: bool) -> Process:
        """Start the process of a job; raises OSError if there can be none."""
        with self._lock:
            if self._is_ready():
                try:
                    return Forked(self._control, words, environment, terminal)
                except (ConnectionError, EOFError):  # it has been killed
                    self._ready = False
        return spawned(words, environment, terminal)

    def wait(self) -> None:
        """Wait until the fork server has loaded what jobs need."""
        with self._lock:
            self._is_ready()

    def close(self) -> None:
        """End the fork server; jobs that run go on."""
        self._control.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0 if self._ready is None else 1)
        self._process.kill()
        self._process.wait()

    def _is_ready(self) -> bool:
        while self._ready is None:
            try:
                if self._control.poll(POLL):
                    self._ready = self._control.recv()
                elif self._stopped():  # whoever stops a sweep does not wait until all is loaded
                    return False
            except (EOFError, OSError):  # it is gone
                self._ready = False
        return self._ready


class Forked:
    """A process that is no child of this one, with Popen's methods: its parent sends its exit code."""

    def __init__(self, control: Connection, words: Sequence[str], environment: Mapping[str, str], terminal: bool):
        """Have the fork server begin it; raises OSError if it cannot, EOFError if that is gone."""
        self._lock = threading.RLock()
        self.pid, self.returncode = 0, cast("int | None", None)
        self.stdout: FileIO | None = None
        (its_input, self.stdin), (self.stderr, its_errors), (self._channel, end) = _pipe(), _pipe(), Pipe()
        with its_input, its_errors, end, contextlib.ExitStack() as stack:
            its_output: Any = sys.stdout
            if not terminal:
                self.stdout, its_output = _pipe()
                stack.enter_context(its_output)
            order = {"words": list(words), "environment": dict(environment), "directory": str(Path.cwd())}
            with contextlib.suppress(ConnectionError):  # nobody answers then
                control.send(order)
                for file in (its_input, its_output, its_errors, end):  # STREAMS of the fork server
                    send_handle(control, file.fileno(), None)
        try:
            self.pid = self._channel.recv()
            if self.pid < 0:
                raise OSError(-self.pid, os.strerror(-self.pid))
        except BaseException:
            self._close()
            raise

    def poll(self) -> int | None:
        """Return how it ended; None while it runs."""
        with self._lock:  # a signal to the sweep may come meanwhile, and be handed on
            if self.returncode is None and self._channel.poll():
                try:
                    self.returncode = self._channel.recv()
                except EOFError:  # its parent was killed; then it ends as its standard input does
                    self.returncode = -signal.SIGKILL
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return how it ended, once it has; raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            self._channel.poll(timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired("toyexp", timeout or 0.0)
        return code

    def send_signal(self, sig: int) -> None:
        """Send a signal, unless it has ended."""
        with self._lock:
            if self.poll() is None:
                os.kill(self.pid, sig)

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *error: Any) -> None:
        self._close()

    def _close(self) -> None:
        for file in (self.stdin, self.stdout, self.stderr):
            if file:
                file.close()  # it ends, if it has not
        if self.pid > 0:
            self.wait()
        self._channel.close()  # from now on its number may be another process's


def _pipe() -> tuple[FileIO, FileIO]:
    """Return the ends of a new pipe that are read from and written to."""
    reading, writing = os.pipe()
    return FileIO(reading), FileIO(writing, "w")
