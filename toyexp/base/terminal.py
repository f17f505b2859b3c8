"""What a person sees: lines as they come, the outcome of a run, the table of a sweep."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from collections.abc import Iterator

from toyexp.base.errors import escape_controls


def replace_unencodable() -> None:
    """Lets what the terminal's encoding lacks (a C locale, PYTHONIOENCODING=ascii) become a question mark."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


_silence_depth = 0  # how many have asked for silence, in this process


@contextlib.contextmanager
def silence(wanted: bool = True) -> Iterator[None]:
    """Nobody watches: no line, no status and no bar, for a while, if so; errors are raised as ever."""
    global _silence_depth
    _silence_depth += wanted
    try:
        yield
    finally:
        _silence_depth -= wanted


def is_silent() -> bool:
    """Whether nobody watches."""
    return _silence_depth > 0


def is_notebook() -> bool:
    """Whether what is shown appears on the page of a notebook: a kernel of Jupyter's runs this."""
    shell = sys.modules.get("IPython")  # which such a kernel has loaded
    return shell is not None and "kernel" in dir(shell.get_ipython())


def is_terminal() -> bool:
    """Whether what is printed appears on a terminal; a process may have no standard output at all (`>&-`)."""
    return bool(sys.stdout and sys.stdout.isatty())


_status = ""  # what stands in the terminal's last line, to be gone when the next line comes


def show_status(text: str) -> None:
    """What is being done, on a terminal alone and until the next line; "" takes it away."""
    global _status
    if text == _status or _silence_depth or not is_terminal():
        return
    with contextlib.suppress(OSError):
        print(f"\r{' ' * len(_status)}\r{text}", end="", flush=True)
        _status = text


def print_output(line: str) -> None:
    """A line of what a command is for: where it cannot be written, on a full disk, that has failed."""
    show_status("")
    print(escape_controls(line), flush=True)


def print_line(line: str) -> None:
    """A line for the person who watches. A reader who went away (`| head`) or a full disk ends them, not the run."""
    if _silence_depth:
        return
    try:
        print_output(line)
    except BrokenPipeError:
        drop_output()
    except OSError as error:
        drop_output()
        print_error(f"warning: the output could not be written: {error.strerror}; the work goes on unseen")


def drop_output() -> None:
    """Lets whatever is still printed vanish."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def has_output_failed() -> bool:
    """Whether nothing more can be printed, as on a full disk; whatever follows then vanishes."""
    if not sys.stdout or sys.stdout.isatty():
        return False
    try:
        print(flush=True)  # an empty line: of an error one does not see which file it was about
    except OSError:
        drop_output()
        return True
    return False


def open_standard_files() -> None:
    """Opens those of files 0, 1 and 2 that are closed: else the next file opened would get what is printed."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free


def print_text(text: str) -> None:
    """Text as it comes, without a new line."""
    show_status("")
    print(text, end="", flush=True)


def print_note(line: str) -> None:
    """A line on stderr beside what a command writes; where that cannot be written, nothing is lost."""
    if _silence_depth:
        return
    show_status("")
    with contextlib.suppress(OSError):
        print(escape_controls(line), file=sys.stderr, flush=True)


def print_error(line: str) -> None:
    """A line on stderr, long words of it cut; where that cannot be written, the exit code has to do."""
    show_status("")
    line = re.sub(r"\S{500,}", lambda word: f"{word[0][:200]}... ({len(word[0])} characters)", line)
    with contextlib.suppress(OSError):
        print(f"toyexp: {escape_controls(line)}", file=sys.stderr)
