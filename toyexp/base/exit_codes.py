"""How a command line ends: every error that a person can meet is one line, and an exit code."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
import time
from collections.abc import Callable

from toyexp.base.errors import RunFailed, ToyexpError, UserError
from toyexp.base.packages import broken_requirement, place
from toyexp.base.ranks import started_ranks
from toyexp.base.signals import Signals, end_process, hidden_interrupt, stop_signals
from toyexp.base.terminal import complain, drop_output, fit_encoding, hold_standard_files, output_fails, status

GRACE = 5.0  # seconds in which torchrun ends the other ranks when one has failed


def exit_code_of(work: Callable[[], int], explained: Callable[[str], str] = str) -> int:
    """Does the work; returns its exit code, or that of what ended it: 1 failed, 2 bad input, 130/143 interrupted.

    An error is told as `explained` has it.
    """
    hold_standard_files()
    fit_encoding()
    signals: Signals | None = None
    try:
        with stop_signals() as signals:
            code = work()
            if sys.stdout:
                sys.stdout.flush()  # while an error of it can still be told
            return code
    except KeyboardInterrupt as error:
        return _interrupted(error)
    except BrokenPipeError:  # `toyexp plugins | head`
        drop_output()
        return 0
    except Exception as error:
        # It came in the middle of someone's clean-up, or of native code that raises its own error, as imports in C do.
        hidden = hidden_interrupt(error) or (signals.last_word() if signals else None)
        if hidden is not None and not isinstance(error, RunFailed):
            return _interrupted(hidden)
        told = _told(error)
        if told is None:
            raise
        if isinstance(error, UserError) and (rank := _rank_of_torchrun()):
            with contextlib.suppress(KeyboardInterrupt):
                time.sleep(GRACE)  # torchrun ends this process where the first rank has said the same
            told = f"rank {rank} (on {platform.node()}): {told}"
        complain(f"error: {explained(told)}")
        return error.exit_code if isinstance(error, ToyexpError) else 1
    finally:
        status("")


def _rank_of_torchrun() -> int:
    """The number of this process, where `torchrun` watches over it and it is not the first; else 0."""
    try:
        return started_ranks().rank if "TORCHELASTIC_RUN_ID" in os.environ else 0
    except UserError:
        return 0


def _interrupted(error: KeyboardInterrupt) -> int:
    if not _rank_of_torchrun():  # whose first rank says so for all
        complain(str(error) or "interrupted")
    return end_process(getattr(error, "exit_code", 130))


def _told(error: Exception) -> str | None:
    """An error in words for a person; None for a mistake of ours, which needs its traceback."""
    if isinstance(error, ToyexpError):
        return str(error) or f"{type(error).__name__}, of which nothing is said{place(error)}"
    if isinstance(error, MemoryError):
        return f"out of memory{f' ({error})' if str(error) else ''}"
    if broken := broken_requirement(error):
        return str(broken)
    if isinstance(error, OSError):  # a disk that is full, a directory that went away, too many open files
        what = error.filename or ("the output could not be written" if output_fails() else "a file")
        return f"{what}: {error.strerror or error}"
    return None
