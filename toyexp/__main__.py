"""`python -m toyexp` and the command `toyexp`: something is on the screen before anything is loaded."""

import sys

from toyexp.base.errors import ToyexpError
from toyexp.base.signals import hidden_interrupt, stop_signals
from toyexp.base.terminal import complain, status


def main() -> int:
    """Runs the command line of this process; returns its exit code."""
    status("starting")
    signals = None
    try:
        with stop_signals() as signals:
            # Deferred: numpy takes longer than a person waits for a sign of life.
            from toyexp.commands.line import main as run
    except ToyexpError as error:
        complain(f"error: {error}")
        return error.exit_code
    except BaseException as error:
        # NumPy's C code may have lost the signal, and raised an error of its own.
        interrupted = hidden_interrupt(error) or (signals.last_word() if signals else None)
        if interrupted is not None:
            complain(str(interrupted))
            return interrupted.exit_code
        from toyexp.base.packages import broken_requirement

        broken = broken_requirement(error)
        if broken is None:
            raise
        complain(f"error: {broken}")
        return 1
    return run()


if __name__ == "__main__":
    sys.exit(main())
