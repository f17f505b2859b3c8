"""`python -m toyexp` and the command `toyexp`: something is on the screen before anything is loaded."""

import gc
import os
import sys

from toyexp.base.exit_codes import run_to_exit_code
from toyexp.base.ranks import FORK_SERVER_FILE
from toyexp.base.signals import exit_now
from toyexp.base.terminal import show_status


def main() -> int:
    """Runs the command line of this process; returns its exit code."""
    if FORK_SERVER_FILE in os.environ:
        return _forks()
    show_status("starting")
    return run_to_exit_code(_load_and_run, _explained)


def _forks() -> int:
    """As the process that a sweep's jobs are forked from, and in each of these as one that was started by its words."""
    gc.disable()  # all that is loaded stays: to look for what does not takes a quarter of the time
    import toyexp.cli.main  # noqa: F401 - what a job begins with
    from toyexp.sweeps.launchers.forkserver import end, serve

    if serve():
        show_status("starting")
        end(run_to_exit_code(_load_and_run, _explained))
    exit_now(0)  # the sweep waits for it


def _load_and_run() -> int:
    # Deferred: numpy takes longer than a person waits for a sign of life.
    from toyexp.cli.main import run_words

    return run_words(sys.argv[1:])


def _explained(error: str) -> str:
    from toyexp.cli.main import add_page

    return add_page(error, sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
