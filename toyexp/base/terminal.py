"""Output on the terminal: lines, the status line, errors and notes."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from collections.abc import Iterator

from toyexp.base.errors import escape_controls


def replace_unencodable() -> None:
    """Print characters that the terminal's encoding lacks as question marks."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


_silence_depth = 0  # nesting depth of `silence`


@contextlib.contextmanager
def silence(enabled: bool = True) -> Iterator[None]:
    """Suppress lines, status and progress bars inside this context if `enabled`; errors are raised as usual."""
    global _silence_depth
    _silence_depth += enabled
    try:
        yield
    finally:
        _silence_depth -= enabled


def is_silent() -> bool:
    """Return True inside `silence`."""
    return _silence_depth > 0


def is_notebook() -> bool:
    """Return True if a Jupyter kernel runs this process, so that output appears in a notebook."""
    shell = sys.modules.get("IPython")  # a Jupyter kernel has it loaded
    return shell is not None and "kernel" in dir(shell.get_ipython())


def is_terminal() -> bool:
    """Return True if standard output is a terminal; False if it is a file, a pipe or closed (`>&-`)."""
    return bool(sys.stdout and sys.stdout.isatty())


_status = ""  # text of the status line, erased before the next line


def show_status(text: str) -> None:
    """Show the current activity in the terminal's last line until the next line; "" erases it."""
    global _status
    if text == _status or _silence_depth or not is_terminal():
        return
    with contextlib.suppress(OSError):
        print(f"\r{' ' * len(_status)}\r{text}", end="", flush=True)
        _status = text


def print_output(line: str) -> None:
    """Print a line of a command's output; errors such as a full disk are raised."""
    show_status("")
    print(escape_controls(line), flush=True)


def print_line(line: str) -> None:
    """Print a line of progress.

    If the reader of a pipe has exited or the disk is full, discard all later output and let the run continue.
    """
    if _silence_depth:
        return
    try:
        print_output(line)
    except BrokenPipeError:
        drop_output()
    except OSError as error:
        drop_output()
        print_error(f"warning: the output could not be written: {error.strerror}; the run continues without output")


def drop_output() -> None:
    """Discard everything printed from now on."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def has_output_failed() -> bool:
    """Return True, and discard later output, if standard output cannot be written, for example on a full disk."""
    if not sys.stdout or sys.stdout.isatty():
        return False
    try:
        print(flush=True)  # probe: the error does not name its file
    except OSError:
        drop_output()
        return True
    return False


def open_standard_files() -> None:
    """Open closed standard streams (0, 1, 2) on /dev/null, so that no other file gets their number."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number


def print_text(text: str) -> None:
    """Print text as it is generated, without a newline."""
    show_status("")
    print(text, end="", flush=True)


def print_note(line: str) -> None:
    """Print a note on stderr, so that it does not mix with a command's output; ignore write errors."""
    if _silence_depth:
        return
    show_status("")
    with contextlib.suppress(OSError):
        print(escape_controls(line), file=sys.stderr, flush=True)


def print_error(line: str) -> None:
    """Print a line on stderr with very long words cut; write errors are ignored."""
    show_status("")
    line = re.sub(r"\S{500,}", lambda word: f"{word[0][:200]}... ({len(word[0])} characters)", line)
    with contextlib.suppress(OSError):
        print(f"toyexp: {escape_controls(line)}", file=sys.stderr)
