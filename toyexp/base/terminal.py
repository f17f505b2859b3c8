"""What a person sees: lines as they come, the outcome of a run, the table of a sweep."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from collections.abc import Iterator

from toyexp.base.errors import for_terminal


def fit_encoding() -> None:
    """Lets what the terminal's encoding lacks (a C locale, PYTHONIOENCODING=ascii) become a question mark."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


_silent = 0  # how many have asked for silence, in this process


@contextlib.contextmanager
def silent(wanted: bool = True) -> Iterator[None]:
    """Nobody watches: no line, no status and no bar, for a while, if so; errors are raised as ever."""
    global _silent
    _silent += wanted
    try:
        yield
    finally:
        _silent -= wanted


def is_silent() -> bool:
    """Whether nobody watches."""
    return _silent > 0


def in_notebook() -> bool:
    """Whether what is shown appears on the page of a notebook: a kernel of Jupyter's runs this."""
    shell = sys.modules.get("IPython")  # which such a kernel has loaded
    return shell is not None and "kernel" in dir(shell.get_ipython())


def on_terminal() -> bool:
    """Whether what is printed appears on a terminal; a process may have no standard output at all (`>&-`)."""
    return bool(sys.stdout and sys.stdout.isatty())


_status = ""  # what stands in the terminal's last line, to be gone when the next line comes


def status(text: str) -> None:
    """What is being done, on a terminal alone and until the next line; "" takes it away."""
    global _status
    if text == _status or _silent or not on_terminal():
        return
    with contextlib.suppress(OSError):
        print(f"\r{' ' * len(_status)}\r{text}", end="", flush=True)
        _status = text


def tell(line: str) -> None:
    """A line of what a command is for: where it cannot be written, on a full disk, that has failed."""
    status("")
    print(for_terminal(line), flush=True)


def say(line: str) -> None:
    """A line for the person who watches. A reader who went away (`| head`) or a full disk ends them, not the run."""
    if _silent:
        return
    try:
        tell(line)
    except BrokenPipeError:
        drop_output()
    except OSError as error:
        drop_output()
        complain(f"warning: the output could not be written: {error.strerror}; the work goes on unseen")


def drop_output() -> None:
    """Lets whatever is still printed vanish."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def output_fails() -> bool:
    """Whether nothing more can be printed, as on a full disk; whatever follows then vanishes."""
    if not sys.stdout or sys.stdout.isatty():
        return False
    try:
        print(flush=True)  # an empty line: of an error one does not see which file it was about
    except OSError:
        drop_output()
        return True
    return False


def hold_standard_files() -> None:
    """Opens those of files 0, 1 and 2 that are closed: else the next file opened would get what is printed."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free


def write_text(text: str) -> None:
    """Text as it comes, without a new line."""
    status("")
    print(text, end="", flush=True)


def tell_aside(line: str) -> None:
    """A line on stderr beside what a command writes; where that cannot be written, nothing is lost."""
    if _silent:
        return
    status("")
    with contextlib.suppress(OSError):
        print(for_terminal(line), file=sys.stderr, flush=True)


def complain(line: str) -> None:
    """A line on stderr, long words of it cut; where that cannot be written, the exit code has to do."""
    status("")
    line = re.sub(r"\S{500,}", lambda word: f"{word[0][:200]}... ({len(word[0])} characters)", line)
    with contextlib.suppress(OSError):
        print(f"toyexp: {for_terminal(line)}", file=sys.stderr)
