"""`python -m toyexp` and the command `toyexp`: something is on the screen before anything is loaded."""

import sys

from toyexp.terminal import complain, status


def main() -> int:
    """Runs the command line of this process; returns its exit code."""
    status("starting")
    try:
        from toyexp.cli import main as run  # deferred: numpy takes longer than a person waits without a sign of life
    except Exception as error:
        from toyexp.packages import broken_requirement

        broken = broken_requirement(error)
        if broken is None:
            raise
        complain(f"error: {broken}")
        return 1
    return run()


if __name__ == "__main__":
    sys.exit(main())
