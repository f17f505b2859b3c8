"""How a command line ends: every error that a person can meet is one line, and an exit code."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
import time
from collections.abc import Callable

from toyexp.base.errors import RunFailed, ToyexpError, UserError
from toyexp.base.packages import broken_requirement, error_location
from toyexp.base.ranks import started_ranks
from toyexp.base.signals import Signals, catch_signals, end_process, hidden_interrupt
from toyexp.base.terminal import (
    drop_output,
    has_output_failed,
    open_standard_files,
    print_error,
    replace_unencodable,
    show_status,
)

TORCHRUN_GRACE = 5.0  # seconds in which torchrun ends the other ranks when one has failed


def run_to_exit_code(work: Callable[[], int], explained: Callable[[str], str] = str) -> int:
    """Does the work; returns its exit code, or that of what ended it: 1 failed, 2 bad input, 130/143 interrupted.

    An error is told as `explained` has it.
    """
    open_standard_files()
    replace_unencodable()
    signals: Signals | None = None
    try:
        with catch_signals() as signals:
            code = work()
            if sys.stdout:
                sys.stdout.flush()  # while an error of it can still be told
            return code
    except KeyboardInterrupt as error:
        return _report_interrupt(error)
    except BrokenPipeError:  # `toyexp plugins | head`
        drop_output()
        return 0
    except Exception as error:
        # It came in the middle of someone's clean-up, or of native code that raises its own error, as imports in C do.
        hidden = hidden_interrupt(error) or (signals.final_interrupt() if signals else None)
        if hidden is not None and not isinstance(error, RunFailed):
            return _report_interrupt(hidden)
        told = _error_message(error)
        if told is None:
            raise
        if isinstance(error, UserError) and (rank := _torchrun_rank()):
            with contextlib.suppress(KeyboardInterrupt):
                time.sleep(TORCHRUN_GRACE)  # torchrun ends this process where the first rank has said the same
            told = f"rank {rank} (on {platform.node()}): {told}"
        print_error(f"error: {explained(told)}")
        return error.exit_code if isinstance(error, ToyexpError) else 1
    finally:
        show_status("")


def _torchrun_rank() -> int:
    """The number of this process, where `torchrun` watches over it and it is not the first; else 0."""
    try:
        return started_ranks().rank if "TORCHELASTIC_RUN_ID" in os.environ else 0
    except UserError:
        return 0


def _report_interrupt(error: KeyboardInterrupt) -> int:
    if not _torchrun_rank():  # whose first rank says so for all
        print_error(str(error) or "interrupted")
    return end_process(getattr(error, "exit_code", 130))


def _error_message(error: Exception) -> str | None:
    """An error in words for a person; None for a mistake of ours, which needs its traceback."""
    if isinstance(error, ToyexpError):
        return str(error) or f"{type(error).__name__}, of which nothing is said{error_location(error)}"
    if isinstance(error, MemoryError):
        return f"out of memory{f' ({error})' if str(error) else ''}"
    if broken := broken_requirement(error):
        return str(broken)
    if isinstance(error, OSError):  # a disk that is full, a directory that went away, too many open files
        what = error.filename or ("the output could not be written" if has_output_failed() else "a file")
        return f"{what}: {error.strerror or error}"
    return None
