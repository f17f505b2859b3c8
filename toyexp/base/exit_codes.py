"""Turn every expected error into one line on stderr and an exit code."""

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

TORCHRUN_GRACE = 5.0  # seconds within which torchrun ends all ranks after a failure


def run_to_exit_code(work: Callable[[], int], explained: Callable[[str], str] = str) -> int:
    """Run `work`, print an expected error in one line, and return the exit code.

    The exit code is that of `work`, 1 for a failure, 2 for invalid input, or 128 plus the number of a signal (130:
    Ctrl-C). The function `explained` turns each error message into the text to print. Unexpected errors (bugs) are
    raised.
    """
    open_standard_files()
    replace_unencodable()
    signals: Signals | None = None
    try:
        with catch_signals() as signals:
            code = work()
            if sys.stdout:
                sys.stdout.flush()  # raises a write error while it can still be reported
            return code
    except KeyboardInterrupt as error:
        return _report_interrupt(error)
    except BrokenPipeError:  # `toyexp plugins | head`
        drop_output()
        return 0
    except Exception as error:
        # A signal may surface as another error, raised by interrupted clean-up or native code (such as C imports).
        hidden = hidden_interrupt(error) or (signals.final_interrupt() if signals else None)
        if hidden is not None and not isinstance(error, RunFailed):
            return _report_interrupt(hidden)
        message = _error_message(error)
        if message is None:
            raise
        if isinstance(error, UserError) and (rank := _torchrun_rank()):
            with contextlib.suppress(KeyboardInterrupt):
                time.sleep(TORCHRUN_GRACE)  # if rank 0 reports the same error, torchrun ends this process meanwhile
            message = f"rank {rank} (on {platform.node()}): {message}"
        print_error(f"error: {explained(message)}")
        return error.exit_code if isinstance(error, ToyexpError) else 1
    finally:
        show_status("")


def _torchrun_rank() -> int:
    """Return this process's rank if `torchrun` started it, otherwise 0."""
    try:
        return started_ranks().rank if "TORCHELASTIC_RUN_ID" in os.environ else 0
    except UserError:
        return 0


def _report_interrupt(error: KeyboardInterrupt) -> int:
    if not _torchrun_rank():  # otherwise rank 0 reports it
        print_error(str(error) or "interrupted")
    return end_process(getattr(error, "exit_code", 130))


def _error_message(error: Exception) -> str | None:
    """Return the message of an expected error; None for a bug, which needs its traceback."""
    if isinstance(error, ToyexpError):
        return str(error) or f"{type(error).__name__} without a message{error_location(error)}"
    if isinstance(error, MemoryError):
        return f"out of memory{f' ({error})' if str(error) else ''}"
    if broken := broken_requirement(error):
        return str(broken)
    if isinstance(error, OSError):  # such as a full disk, a deleted directory, too many open files
        subject = error.filename or ("the output could not be written" if has_output_failed() else "a file")
        return f"{subject}: {error.strerror or error}"
    return None
