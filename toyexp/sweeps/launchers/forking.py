"""Jobs that start at once: each is forked from a process that has loaded what they need, and opened no device."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any, TypeAlias

from toyexp.base.ranks import FORKS

NUMBER = struct.Struct("!q")
STREAMS = 3  # files of a job: standard ones, then the channel that hears how it ended, then those that it is handed
HANDED = 4  # at most
FILES = "TOYEXP_FILES"  # in the environment of a process that was handed open files: their numbers there
POLL = 0.1  # seconds between looks at whether the sweep is to stop
FORKED = ("serial", "joblib", "stacked")  # the launchers whose jobs may be
PLATFORMS = ("linux",)  # elsewhere libraries of the system do not bear a fork: jobs are started anew


# Of words, environment, whether before a terminal, and open files that it is handed: see FILES.
Process: TypeAlias = "subprocess.Popen[bytes] | Forked"
Start = Callable[[Sequence[str], Mapping[str, str], bool, Sequence[int]], Process]


def spawned(words: Sequence[str], environment: Mapping[str, str], terminal: bool, files: Sequence[int] = ()) -> Process:
    """The process of a job, which loads everything by itself."""
    return subprocess.Popen(
        [sys.executable, "-m", "toyexp", *words],
        stdin=subprocess.PIPE, stdout=None if terminal else subprocess.PIPE, stderr=subprocess.PIPE,
        env={**environment, **with_files(files)}, pass_fds=files,
        process_group=0,  # a Ctrl-C reaches it through us, once
    )  # fmt: skip


def with_files(numbers: Sequence[int]) -> dict[str, str]:
    """What tells a process of the files that it was handed."""
    return {FILES: ",".join(map(str, numbers))} if numbers else {}


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
        self._control, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "toyexp"], env={**environment, FORKS: str(theirs.fileno())},
                    stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()], process_group=0,
                )  # fmt: skip
            except BaseException:
                self._control.close()
                raise
        with contextlib.suppress(OSError):  # it has been killed; jobs are spawned then
            tell(self._control, {"words": list(words), "stacks": stacks})

    def start(
        self, words: Sequence[str], environment: Mapping[str, str], terminal: bool, files: Sequence[int] = ()
    ) -> Process:
        """The process of a job; raises OSError where there can be none."""
        with self._lock:
            if self._is_ready() and (process := self._forked(words, environment, terminal, files)) is not None:
                return process
        return spawned(words, environment, terminal, files)

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
        if self._ready is None:
            while not _readable(self._control, POLL):
                if self._stopped():  # whoever stops a sweep does not wait until all is loaded
                    return False
            try:
                self._ready = self._control.recv(1) == b"1"
            except ConnectionError:  # it is gone, and has not read what it was told
                self._ready = False
        return self._ready

    def _forked(
        self, words: Sequence[str], environment: Mapping[str, str], terminal: bool, handed: Sequence[int]
    ) -> Process | None:
        """The process; None where what it is forked from has been killed."""
        with contextlib.ExitStack() as theirs:
            ours: list[int] = []
            files = [_pipe(ours, theirs, 1), sys.stdout.fileno() if terminal else _pipe(ours, theirs, 0),
                     _pipe(ours, theirs, 0)]  # fmt: skip
            channel, end = socket.socketpair()
            theirs.callback(end.close)
            process = Forked(channel, ours[0], None if terminal else ours[1], ours[-1])
            try:
                order = {"words": list(words), "environment": dict(environment), "directory": str(Path.cwd())}
                tell(self._control, order, [*files, end.fileno(), *handed])
                theirs.close()
                process.begin()
            except ConnectionError:
                self._ready = False
                process.release()
                return None
            except BaseException:
                process.release()
                raise
            return process


def _pipe(ours: list[int], theirs: contextlib.ExitStack, kept: int) -> int:
    """The other end of a pipe of which we keep this one."""
    ends = os.pipe()
    ours.append(ends[kept])
    theirs.callback(os.close, ends[1 - kept])
    return ends[1 - kept]


class Forked:
    """A process that is no child of this one: whoever is its parent waits for it and tells us by a channel."""

    def __init__(self, channel: socket.socket, stdin: int, stdout: int | None, stderr: int):
        self._channel, self._lock = channel, threading.RLock()
        self.stdin, self.stderr = FileIO(stdin, "w"), FileIO(stderr)
        self.stdout = None if stdout is None else FileIO(stdout)
        self.pid = 0
        self.returncode: int | None = None

    def begin(self) -> None:
        """Hears of the process; raises OSError where it could not be made."""
        told = self._channel.recv(NUMBER.size)
        if len(told) < NUMBER.size:
            raise ConnectionError
        (self.pid,) = NUMBER.unpack(told)
        if self.pid < 0:
            raise OSError(-self.pid, os.strerror(-self.pid))

    def poll(self) -> int | None:
        """How it ended, as Popen tells it; None while it runs."""
        with self._lock:  # a signal to the sweep may come meanwhile, and be handed on
            if self.returncode is None and _readable(self._channel, 0):
                try:
                    told = self._channel.recv(NUMBER.size)
                except OSError:  # likewise
                    if self.returncode is None:
                        raise
                    return self.returncode
                # Without a word whoever waited for it was killed; then it ends as its standard input does.
                (self.returncode,) = NUMBER.unpack(told) if len(told) == NUMBER.size else (-signal.SIGKILL,)
                self._channel.close()  # from now on its number may be another process's
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The same once it has ended; raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            _readable(self._channel, timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired("toyexp", timeout or 0.0)
        return code

    def send_signal(self, sig: int) -> None:
        """Does so, unless it has ended."""
        with self._lock:
            if self.poll() is None:
                os.kill(self.pid, sig)

    def kill(self) -> None:
        """Ends it at once."""
        self.send_signal(signal.SIGKILL)

    def release(self) -> None:
        """Closes what there is between it and us: it ends, if it has not."""
        for file in (self.stdin, self.stdout, self.stderr):
            if file:
                file.close()
        if self.returncode is None and not self.pid > 0:
            self._channel.close()

    def __enter__(self) -> Forked:
        """As Popen's."""
        return self

    def __exit__(self, *error: Any) -> None:
        """As Popen's."""
        self.release()
        self.wait()


def _readable(channel: socket.socket, seconds: float | None) -> bool:
    """Whether something can be read, or the other end is gone; waits for it so long, or for ever."""
    looked = select.poll()
    try:
        looked.register(channel, select.POLLIN)
    except ValueError:  # a signal came between, and whoever handled it has heard the end
        return True
    return bool(looked.poll(None if seconds is None else seconds * 1000))


# -- what is said between the two -------------------------------------------------------------------------------------


def tell(channel: socket.socket, message: Mapping[str, Any], files: Sequence[int] = ()) -> None:
    """Sends a message, and open files with it."""
    text = json.dumps(message).encode()
    socket.send_fds(channel, [NUMBER.pack(len(text))], files)
    channel.sendall(text)


def hear(channel: socket.socket, files: int = 0) -> tuple[dict[str, Any], list[int]] | None:
    """A message and the files that came with it; None when whoever sends them has gone."""
    head, found, _, _ = socket.recv_fds(channel, NUMBER.size, files)
    if len(head) < NUMBER.size:
        return None
    (left,), text = NUMBER.unpack(head), b""
    while left > len(text):
        if not (chunk := channel.recv(left - len(text))):
            return None
        text += chunk
    return json.loads(text), found
