"""Entry point of `toyexp` and `python -m toyexp`; prints a status line before slow imports."""

import gc
import os
import signal
import sys

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # before and after the command, Ctrl-C ends the process silently

from toyexp.base.exit_codes import run_to_exit_code
from toyexp.base.ranks import FORK_SERVER_FILE
from toyexp.base.signals import exit_now
from toyexp.base.terminal import show_status


def main() -> int:
    """Run the command line of this process and return its exit code."""
    if FORK_SERVER_FILE in os.environ:
        return _forks()
    show_status("starting")
    return run_to_exit_code(_load_and_run, _explained)


def _forks() -> int:
    """Run the fork server of a sweep. In each process that it forks, run the command line of one job of the sweep."""
    gc.disable()  # as in _load_and_run
    import toyexp.cli.main  # noqa: F401 - preload the imports of jobs
    from toyexp.sweeps.launchers.forkserver import end, serve

    if serve():
        show_status("starting")
        end(run_to_exit_code(_load_and_run, _explained))
    exit_now(0)  # skip cleanup: the sweep waits for this process


def _load_and_run() -> int:
    gc.disable()  # until the settings are parsed: imports create little garbage, and collecting it is slow
    # Deferred: importing NumPy is slow, and the status line comes first.
    from toyexp.cli.main import run_words

    return run_words(sys.argv[1:])


def _explained(error: str) -> str:
    from toyexp.cli.main import add_page

    return add_page(error, sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
