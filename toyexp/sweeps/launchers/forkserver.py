"""The fork server of a sweep: a process that has imported the modules of jobs and forks a process for each job.

It opens no device and starts no threads, because both would break in a forked process.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from pathlib import Path
from typing import Any, NoReturn, cast

import numpy as np
import numpy.ma  # numpy imports these two only when they are used
import numpy.random

import toyexp.batching.tokens
import toyexp.formats.gguf.write
import toyexp.training.experiment
import toyexp.training.resume  # noqa: F401
from toyexp.base.ranks import FORK_SERVER_FILE
from toyexp.base.signals import exit_now
from toyexp.config.compose_cache import store_composition
from toyexp.config.flags import split_flags
from toyexp.config.keys import Keys
from toyexp.config.request import Request
from toyexp.config.schema import AUTO, Source
from toyexp.interfaces.engine import Engine
from toyexp.plugins.discovery import cache_registry
from toyexp.sweeps.begin import JOB_FLAGS

HELD_BACK = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}
STREAMS = 4  # files that are passed for a job: standard streams, and the channel for its exit code
DEVICES = ("/dev/nvidia", "/dev/dri", "/dev/kfd", "/dev/dxg")  # device files of GPU drivers


def serve() -> bool:
    """Fork a process for each job that the sweep requests.

    This function returns in every process. It returns True in the process of a job, which must then run the job. It
    returns False in the server after the sweep has ended.
    """
    control = Connection(int(os.environ.pop(FORK_SERVER_FILE)))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, HELD_BACK)  # signals to the process group are for the jobs
    with control, contextlib.suppress(ConnectionError, EOFError):
        options = control.recv()
        with contextlib.suppress(Exception):  # each job reports errors in its settings itself
            _load(**options)
        fit = _is_safe_to_fork()
        control.send(fit)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # discard the exit status of the processes that fork jobs
        while fit:
            request, files = control.recv(), [recv_handle(control) for _ in range(STREAMS)]
            with contextlib.suppress(Exception):
                _compose_request(request["words"])
            if _fork_job(control, files):
                _become_job(request, files)
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
                return True
            for file in files:
                os.close(file)
    return False


def _load(words: Sequence[str], stacks: bool) -> None:
    """Import the modules that jobs with the arguments `words` need: plugins, and the framework of the engine.

    If `stacks` is True, also import the modules needed to train several jobs as one program.
    """
    import safetensors.numpy  # noqa: F401 - jobs import it when they write a checkpoint

    if stacks:
        import toyexp.sweeps.launchers.stack_process  # noqa: F401 - only stacks need it
    request = _compose_request(words)
    cache_registry(request.registry)
    composed = request.compose()
    for offer in request.registry.engines():
        if composed.cfg.engine.name in (AUTO, offer.name):
            with contextlib.suppress(Exception):  # not installed
                engine = cast("type[Engine]", offer.cls)()
                engine.preload_stack() if stacks else engine.preload()
    with contextlib.suppress(Exception):
        composed.check_parts()  # fills the caches of the schemas for all jobs


def _compose_request(args: Sequence[str]) -> Request:
    """Parse `args` as a request.

    Cache the configuration that Hydra composes for this request, because other jobs need it too.
    """
    flags, settings = split_flags(args)
    request = Request.parse(settings, Source.from_flags(*map(flags.get, JOB_FLAGS)))
    store_composition(Keys.from_registry(request.registry).hydra_overrides(request.settings), request.source)
    return request


def _is_safe_to_fork() -> bool:
    """Return True if forking is safe: no other thread runs, and no device is open."""
    gc.freeze()  # jobs share this memory; a garbage collection would copy it
    gc.enable()
    if not (trial := os.fork()):
        os._exit(0)
    os.waitpid(trial, 0)
    with contextlib.suppress(OSError):
        opened = [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
        threads = list(Path("/proc/self/task").iterdir())  # OpenBLAS has stopped its threads for the fork
        return len(threads) == 1 and not any(name.startswith(DEVICES) for name in opened)
    return False


def _fork_job(control: Connection, files: Sequence[int]) -> bool:
    """Fork a process that forks the job and waits for it. Return True in the job, and False in the server.

    The last of `files` is a channel to the sweep. Through it, the waiting process sends the job's process id and later
    the job's exit code. The process id is not reused until the sweep closes the channel.
    """
    try:
        if os.fork():
            return False
        control.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if not (job := os.fork()):
            return True
    except OSError as error:
        job = -(error.errno or 1)
    channel = Connection(os.dup(files[-1]))
    with contextlib.suppress(OSError):
        channel.send(job)
    if not control.closed:
        return False
    for file in files:
        os.close(file)
    if job > 0:
        status = os.waitid(os.P_PID, job, os.WEXITED | os.WNOWAIT)
        code = status.si_status if status and status.si_code == os.CLD_EXITED else -status.si_status if status else 0
        with contextlib.suppress(OSError):  # the sweep has exited
            channel.send(code)
            os.read(channel.fileno(), 1)
        os.waitpid(job, 0)
    os._exit(0)


def _become_job(request: Mapping[str, Any], files: Sequence[int]) -> None:
    """Set up this forked process for a job: its arguments, environment, directory, files and random state."""
    os.setpgid(0, 0)  # a Ctrl-C reaches this process only through the sweep, so only once
    for number, file in enumerate(files[:-1]):
        os.dup2(file, number)
    for file in files:
        os.close(file)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    sys.argv[1:] = request["words"]
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        before = getattr(sys, name)
        buffering = 1 if number == 2 or before.write_through else -1  # write_through is set by PYTHONUNBUFFERED
        mode = "w" if number else "r"
        stream = os.fdopen(number, mode, buffering, before.encoding, before.errors, closefd=False)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    np.random.seed()  # Python reseeds its own generator after a fork, numpy does not


def end(code: int) -> NoReturn:
    """Flush files and end a job's process. The interpreter's normal exit would take 0.1 s and copy shared memory."""
    threading._shutdown()  # type: ignore[attr-defined] # waits for non-daemon threads, as a normal exit does
    for file in gc.get_objects():  # only objects created since the fork
        if isinstance(file, io.IOBase):
            with contextlib.suppress(Exception):
                file.flush()  # as at a normal exit
    exit_now(code)
