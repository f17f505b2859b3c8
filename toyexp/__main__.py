"""`python -m toyexp` and the command `toyexp`: something is on the screen before anything is loaded."""

import sys

from toyexp.terminal import status


def main() -> int:
    """Runs the command line of this process; returns its exit code."""
    status("starting")
    from toyexp.cli import main as run  # deferred: numpy takes longer than a person waits without a sign of life

    return run()


if __name__ == "__main__":
    sys.exit(main())
