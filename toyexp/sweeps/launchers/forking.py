"""Start jobs fast: fork them from a server process that has imported the modules of jobs and has opened no device.

The fork server of `multiprocessing` is not used: it overwrites sys.path, runs the caller's script again, exists once
per process (so it keeps old versions of edited plugins), and cannot tell whether it is safe to fork.
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

POLL = 0.1  # seconds between checks whether the sweep should stop
PLATFORMS = ("linux",)  # other platforms' libraries are not fork-safe; jobs are spawned there

Process: TypeAlias = "subprocess.Popen[bytes] | ForkedProcess"
Start = Callable[[Sequence[str], Mapping[str, str], bool], Process]  # arguments, environment, on a terminal


def spawn(args: Sequence[str], environment: Mapping[str, str], terminal: bool) -> Process:
    """Start a job in a new Python process, which imports everything itself.

    With `terminal`, the job writes to the standard output of this process.
    """
    return subprocess.Popen(
        [sys.executable, "-m", "toyexp", *args],
        stdin=subprocess.PIPE, stdout=None if terminal else subprocess.PIPE, stderr=subprocess.PIPE,
        env=environment, process_group=0,  # a Ctrl-C reaches the job only through the sweep
    )  # fmt: skip


class ForkServer:
    """Client of the fork server. If forking is not possible, it starts jobs in new Python processes instead.

    A forked job behaves like one in a new process, except that it uses modules that were imported when the sweep
    started.
    """

    def __init__(
        self, environment: Mapping[str, str], words: Sequence[str], stopped: Callable[[], bool], stacks: bool = False
    ):
        """Start the fork server, which imports the modules that jobs with the arguments `words` need.

        With `stacks`, it also imports what a process needs to train stacks. `stopped` returns True once the sweep
        should stop. Raise OSError if no process can be started.
        """
        self._stopped, self._lock = stopped, threading.Lock()
        self._ready: bool | None = None
        self._control, server_end = Pipe()
        with server_end:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "toyexp"], env={**environment, FORK_SERVER_FILE: str(server_end.fileno())},
                    stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                    pass_fds=[server_end.fileno()], process_group=0,
                )  # fmt: skip
            except BaseException:
                self._control.close()
                raise
        with contextlib.suppress(OSError):  # the server was killed; jobs are then spawned
            self._control.send({"words": list(words), "stacks": stacks})

    def start(self, words: Sequence[str], environment: Mapping[str, str], terminal: bool) -> Process:
        """Start a job's process with the arguments `words`: forked if possible, otherwise as a new Python process.

        With `terminal`, the job writes to the standard output of this process. Raise OSError if no process can be
        started.
        """
        with self._lock:
            if self._is_ready():
                try:
                    return ForkedProcess(self._control, words, environment, terminal)
                except (ConnectionError, EOFError):  # the server was killed
                    self._ready = False
        return spawn(words, environment, terminal)

    def wait(self) -> None:
        """Wait until the fork server has imported what jobs need."""
        with self._lock:
            self._is_ready()

    def close(self) -> None:
        """Stop the fork server; running jobs continue."""
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
                elif self._stopped():  # do not let a Ctrl-C wait for imports
                    return False
            except (EOFError, OSError):  # the server has exited
                self._ready = False
        return self._ready


class ForkedProcess:
    """Handle of a forked job, with the interface of subprocess.Popen.

    The job is not a child of this process, but of a process that the fork server forked. That process sends the exit
    code.
    """

    def __init__(self, control: Connection, words: Sequence[str], environment: Mapping[str, str], terminal: bool):
        """Ask the fork server, over the connection `control`, to fork a job with the arguments `words`.

        Raise OSError if the fork fails, and EOFError if the server has exited.
        """
        self._lock = threading.RLock()
        self.pid, self.returncode = 0, cast("int | None", None)
        self.stdout: FileIO | None = None
        (its_input, self.stdin), (self.stderr, its_errors), (self._channel, end) = _pipe(), _pipe(), Pipe()
        with its_input, its_errors, end, contextlib.ExitStack() as stack:
            its_output: Any = sys.stdout
            if not terminal:
                self.stdout, its_output = _pipe()
                stack.enter_context(its_output)
            request = {"words": list(words), "environment": dict(environment), "directory": str(Path.cwd())}
            with contextlib.suppress(ConnectionError):  # the server has exited; recv() raises EOFError below
                control.send(request)
                for file in (its_input, its_output, its_errors, end):  # STREAMS files, as the server expects
                    send_handle(control, file.fileno(), None)
        try:
            self.pid = self._channel.recv()
            if self.pid < 0:
                raise OSError(-self.pid, os.strerror(-self.pid))
        except BaseException:
            self._close()
            raise

    def poll(self) -> int | None:
        """Return the exit code; None while the job runs."""
        with self._lock:  # a signal handler may call this meanwhile
            if self.returncode is None and self._channel.poll():
                try:
                    self.returncode = self._channel.recv()
                except EOFError:  # its parent was killed; the job then ends because its standard input is closed
                    self.returncode = -signal.SIGKILL
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code once the job has ended. Raise subprocess.TimeoutExpired after `timeout` seconds."""
        if self.returncode is None:
            self._channel.poll(timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired("toyexp", timeout or 0.0)
        return code

    def send_signal(self, sig: int) -> None:
        """Send a signal, unless the job has ended."""
        with self._lock:
            if self.poll() is None:
                os.kill(self.pid, sig)

    def __enter__(self) -> ForkedProcess:
        return self

    def __exit__(self, *error: Any) -> None:
        self._close()

    def _close(self) -> None:
        for file in (self.stdin, self.stdout, self.stderr):
            if file:
                file.close()  # a running job ends when its standard input is closed
        if self.pid > 0:
            self.wait()
        self._channel.close()  # from now on the system may reuse the process id


def _pipe() -> tuple[FileIO, FileIO]:
    reading, writing = os.pipe()
    return FileIO(reading), FileIO(writing, "w")
