"""Output on the terminal: lines, the status line, errors and notes."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import IO

from toyexp.base.errors import UserError, escape_controls

# One style for each role of a text. Labels, paths and comments have the terminal's own colour: no grey or magenta is
# readable on all grounds. Bold red has a contrast of 4.5:1 where plain red has 3.2:1.
STYLES = {
    "bold": "1",  # headings, heads and best rows of tables, the result of a run
    "red": "1;31",  # errors and failures
    "green": "32",  # success
    "bright": "1;32",  # best
    "yellow": "33",  # warnings, notes, and runs that ended early
    "command": "1;36",  # text to type: commands, options, settings
    "value": "36",  # default values
}
COLOUR_CHOICES = ("auto", "always", "never")
# Patterns of words to colour, and their style. A later pattern must not match inside an earlier one.
_STYLED = (
    (re.compile(r"^  [\w.]+(?=  +(?:PASS|no  |FAIL)  )|^(?:toyexp \d|with toyexp|forward pass).*"), "bold"),
    (re.compile(r"(?<=error: )[\w.+]+=\S*(?=: )|(?<=error: unknown key )[\w.]+"), "bold"),
    (re.compile(r"^(?:toyexp: )?error(?: in job \d+)?:|^broken:"), "red"),
    (re.compile(r"^(?:toyexp: )?(?:warning|note):|^(?:warning|note)(?=  )"), "yellow"),
    (re.compile(r"\bFAIL\b|(?:(?<=  )|^)(?:failed|killed|(?:\d+ of \d+ )?diverged)(?=  |:|$| after )", re.M), "red"),
    (re.compile(r"(?<=  )(?:pruned|stopped|interrupted|running)(?=  |:|$| after | at )", re.MULTILINE), "yellow"),
    (re.compile(r"\bPASS\b|(?:(?<=  )|^)completed(?=  |$| after )", re.MULTILINE), "green"),
    (re.compile(r"^(?:(\d+) of \1 )?within the tolerances.*"), "green"),
    (re.compile(r"(?<=  )no(?=    )"), "yellow"),  # an engine that does not work here
    (re.compile(r"(?<=  )best$", re.MULTILINE), "bright"),
    (re.compile(r"^.+(?=  (?:\x1b\S+)?best\b\S*$)|^(?:best )?held-out .* (?:->|after step) \S+$|^best    .*"), "bold"),
)
# first column of an indented line of a help text: a command, or an option
_HEADING = re.compile(r"(?!usage:)(?:\S+(?=  )|\S[^.(=]{,60}(?=$|\s\())")
_COMMAND = re.compile(r"^(?:usage: | {1,8})(?:-\S.*?(?=  |$)|\S.*?(?=  +\S))", re.MULTILINE)


def replace_unencodable() -> None:
    """Make Python print a question mark in place of each character that the terminal's encoding lacks."""
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


_colour = "auto"


def choose_colour(words: Sequence[str]) -> list[str]:
    """Take `--color=auto`, `always` or `never` out of the words of a command line; return the other words."""
    global _colour
    _colour, rest = "auto", []
    for word in words:
        flag, _, choice = word.partition("=")
        if flag not in ("--color", "--colour"):
            rest.append(word)
        elif choice not in COLOUR_CHOICES:
            raise UserError(f"{word}: type --color=auto, --color=always or --color=never")
        else:
            _colour = choice
    return rest


def has_colour(stream: IO[str] | None) -> bool:
    """Return True if text on a stream may have colours.

    The option --color decides. Without this option, the environment variables NO_COLOR and FORCE_COLOR decide. If these
    are not set either, the text may have colours if the stream is a terminal.
    """
    if _colour != "auto":
        return _colour == "always"
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR", "0") not in ("", "0"):
        return True
    return bool(stream and stream.isatty()) and os.environ.get("TERM") != "dumb"


def paint(text: str, style: str, stream: IO[str] | None = None) -> str:
    """Return a text in the style `style`, a key of STYLES, if `stream` may have colours, else the unchanged text.

    The default `stream` is standard output.
    """
    return f"\x1b[{STYLES[style]}m{text}\x1b[0m" if text and has_colour(stream or sys.stdout) else text


def _paint_lines(text: str, stream: IO[str]) -> str:
    """Escape control characters in a text, wrap its lines, and colour the words that match a pattern in _STYLED."""
    painted = []
    for line in escape_controls(text).split("\n"):
        shown, is_painted = wrap_columns(line, stream, has_colour(stream)), has_colour(stream) and not _JSON.match(line)
        for pattern, style in _STYLED if is_painted else ():
            if pattern.search(line):  # a word that is the last one only of a wrapped line is no verdict
                shown = pattern.sub(paint(r"\g<0>", style, stream), shown)
        painted.append(shown)
    return "\n".join(painted)


class Head(str):
    """Line with the column heads of a table. It is printed in bold."""


def terminal_width(stream: IO[str] | None = None) -> int | None:
    """Return the width in characters if `stream` (by default standard output) is a terminal; None if it is not."""
    stream = stream or sys.stdout
    return shutil.get_terminal_size().columns if stream and stream.isatty() else None


def text_width() -> int:
    """Return the width in characters of paragraphs and lists on standard output: at most 110."""
    return min(terminal_width() or 110, 110)


_JSON = re.compile(r'^ *["{}]')  # beginning of a line of JSON, which is neither wrapped nor coloured
_NAMES = " (?:help|plugins|new|doctor|parity|bench|eval|describe|models|generate|predict|export|merge|runs|compare)\\b"
_PROGRAM = r"(?:[A-Z_]+=(?:'[^']*'|\"[^\"]*\") )?(?:pip install|optuna-dashboard|toyexp(?! \d|:))"
# Text to type: commands that fill a column of a line, commands in a sentence, and corrections that errors propose.
_TYPED = re.compile(
    rf"(?:^|(?<=  )){_PROGRAM}(?: (?! )\S+)*(?=$|  )"
    rf"|(?:(?<=: )|(?<=`)|(?<=see )|(?<=use )|(?<= as )|(?<= or )|(?<=try ))(?=.*install|toyexp(?:`| -| \S+=|{_NAMES}))"
    rf"{_PROGRAM}(?: (?:'[^']*'|[^\s;`'()])+(?<![,:.]))*"
    r"|(?<=did you mean )[^?]+(?=\?)|(?:(?<=use )|(?<=Use )|(?<=try )|(?<=add )|(?<=type ))(?:[\w.]+=|--)[^\s;,)]+"
    r"|(?:(?<=, or )|(?<=  or )|(?<=\), ))[\w.]+=[^\s;,)]+|(?<=try a lower )[\w.]+|[\w.]+(?= \(it was )"
    r"|[\w.]+=\S+(?= may be faster)"
)


def wrap_columns(text: str, stream: IO[str] | None = None, has_codes: bool = False) -> str:
    """Wrap long lines of a table at the width of the terminal, and indent continuation lines to the last column.

    Columns are separated by at least two spaces. A column that begins in the last third of the width does not count. A
    command to type stays in one line. If it is longer than that, its lines end with a backslash, as shells require, so
    that it can be copied. Long paths and lines of JSON are not broken. If `has_codes` is True, colour commands.
    """
    width, wrapped = terminal_width(stream) or sys.maxsize, []
    for line in text.split("\n"):
        columns = re.finditer(r"^ +|^toyexp: |^usage: |(?<=\S) {2,}(?=\S)", line)
        indent = max((m.end() for m in columns if m.end() <= width * 2 // 3), default=0)
        if job := re.match(r"\[\d+\] ", line):  # its columns are short: they are not aligned, and a number has its name
            line, indent = re.sub(r" (?=\d\S*(?:  |$)|m?s$|min$|h$)", "\0", line), len(job[0])
        marked = line if _JSON.match(line) else _TYPED.sub(partial(_mark, width - indent), line)
        wrapped += [marked] if len(line) <= width or _JSON.match(line) else _fill(marked, width, indent)
    marks = {0: " ", 11: " ", 12: None, 14: f"\x1b[{STYLES['command']}m" * has_codes, 15: "\x1b[0m" * has_codes}
    return "\n".join(wrapped).translate(marks)


def _mark(room: int, command: re.Match[str]) -> str:
    """Return a command with marks for `_fill`; `room` is the length of the longest line.

    0x0e and 0x0f enclose it. A blank becomes 0x0b if the line may be broken there, otherwise 0. 0x0c begins a new line.
    """
    text = re.sub(r"'[^']*'|pip install", lambda unbroken: unbroken[0].replace(" ", "\0"), command[0])
    text = text.replace(" ", "\0" if len(text) <= room else "\v")
    is_column = command.string[: command.start()].endswith(("  ", "usage: ")) or not command.start()
    return ("" if is_column or "\v" not in text else "\f") + f"\x0e{text}\x0f"


def _fill(line: str, width: int, indent: int) -> list[str]:
    """Return a line as lines of at most `width` characters. If a word does not fit, all lines are indented less."""
    lines, current = [], ""

    def measure(text: str) -> int:
        return len(text) - sum(map(text.count, "\f\x0e\x0f"))

    for chunk in re.findall(r"[ \v]*[^ \v]+", line):
        is_rest = chunk[0] == "\v"
        is_full = measure(current + chunk) > width - 2 * ("\v" in line)  # 2 for the backslash
        if current.strip() and (is_full or "\f" in chunk):
            lines.append(current + " \\" * is_rest)
            current, chunk = " " * (indent + 2 * is_rest), chunk.strip(" \v")
        current += chunk
    excess, least = max(map(measure, [*lines[1:], current])) - width, 4 * ("\v" in line)
    if excess > 0 and lines and indent > least:  # commands below each other stay aligned
        return _fill(line, width, least or max(indent - excess, 0))
    return [*lines, current]


_status = ""  # text of the status line, erased before the next line


def show_status(text: str) -> None:
    """Show the current activity in the terminal's last line until other output follows; "" erases it."""
    global _status
    if text == _status or _silence_depth or not is_terminal():
        return
    with contextlib.suppress(OSError):
        print(f"\r{' ' * len(_status)}\r{text}", end="", flush=True)
        _status = text


def print_output(text: str, style: str = "") -> None:
    """Print lines of a command's output. Errors such as a full disk are raised. `style` is a name in STYLES, or ""."""
    show_status("")
    style = style or ("bold" if isinstance(text, Head) else "")
    print(paint(escape_controls(text), style) if style else _paint_lines(text, sys.stdout), flush=True)


def print_usage(text: str) -> None:
    """Print a help text with coloured headings, commands, options and settings.

    Headings are the word `usage:`, and each short text before an indented line, without the sentence that follows it.
    On a terminal of less than 72 columns, a description that would begin at column 24 or later is below its key.
    """
    if is_terminal():  # join the lines of paragraphs, which are wrapped below
        text = re.sub(r"^(\S.{95,})\n(?=\S)", r"\1 ", text, flags=re.MULTILINE)
    lines = text.split("\n")
    show_status("")
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        shown = wrap_columns(escape_controls(line))
        if head := _HEADING.match(shown) if following[:1] == " " else None:
            shown = paint(head[0], "bold") + shown[head.end() :]
        elif first := _COMMAND.match(shown):
            name = first[0].removeprefix("usage:")
            key, equals, value = name.partition("=") if " " not in name.strip() else (name, "", "")
            usage = "usage:" if name != first[0] else ""
            rest = shown[first.end() :]
            begins = len(shown) - len(rest.lstrip())
            if rest.strip() and begins >= 24 and (terminal_width() or 72) < 72:
                indent = 11 if usage or name.startswith(" " * 7) else 6  # lines below `usage:` begin at column 7
                rest = "\n" + wrap_columns(" " * indent + escape_controls(line)[begins:])
            shown = usage + paint(key, "command") + paint(equals + value, "value") + rest
        else:
            shown = wrap_columns(escape_controls(line), None, has_colour(sys.stdout))
        shown = shown.replace("usage:", paint("usage:", "bold")) if shown.startswith("usage:") else shown
        print(shown, flush=True)


def print_line(line: str, style: str = "") -> None:
    """Print a line of progress. `style` is a name in STYLES, or "" for none.

    If the reader of a pipe has exited or the disk is full, discard all later output and let the run continue.
    """
    if _silence_depth:
        return
    try:
        print_output(line, style)
    except BrokenPipeError:
        drop_output()
    except OSError as error:
        drop_output()
        print_error(f"warning: the output could not be written: {error.strerror}; the run continues without output")


def drop_output() -> None:
    """Discard everything printed from now on."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def has_output_failed() -> bool:
    """Return True if standard output cannot be written, for example on a full disk, and then discard later output."""
    if not sys.stdout or sys.stdout.isatty():
        return False
    try:
        print(flush=True)  # an OSError does not say whether stdout caused it
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
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one


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
        print(_paint_lines(line, sys.stderr), file=sys.stderr, flush=True)


def print_error(line: str) -> None:
    """Print a line on stderr with very long words cut; write errors are ignored.

    On a terminal, each setting that may help against a NaN has a line of its own.
    """
    show_status("")
    problem, advice, remedies = line.partition("; try a lower ")
    if advice and terminal_width(sys.stderr):
        line = f"{problem}\n  try a lower " + re.sub(r",(?: or)? (?=[\w.]+=)", "\n  or ", remedies)
    line = re.sub(r"\S{500,}", lambda word: f"{word[0][:200]}... ({len(word[0])} characters)", line)
    with contextlib.suppress(OSError):
        print(_paint_lines(f"toyexp: {line}", sys.stderr), file=sys.stderr)
