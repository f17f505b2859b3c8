"""Tables and sentences that fit the terminal's width."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Collection, Sequence

from toyexp.base.formatting import align_columns
from toyexp.base.terminal import is_terminal


def terminal_width() -> int | None:
    """Return the terminal's width in characters; None if the output is not a terminal and lines may have any length."""
    return shutil.get_terminal_size().columns if is_terminal() else None


def drop_columns(rows: Sequence[Sequence[str]], expendable: Sequence[str]) -> tuple[list[list[str]], list[str]]:
    """Drop columns until the table fits the terminal. Return its rows and the heads of the dropped columns.

    The first row has the column heads. `expendable` lists the heads of the columns that may be dropped, the first to be
    dropped first.
    """
    table, dropped = [list(row) for row in rows], []
    for head in expendable:
        if fits_terminal(table):
            break
        if head in table[0]:
            column = table[0].index(head)
            table = [[*row[:column], *row[column + 1 :]] for row in table]
            dropped.append(head)
    return table, dropped


def fits_terminal(rows: Sequence[Sequence[str]]) -> bool:
    """Return True if a table fits the terminal's width."""
    width = terminal_width()
    return width is None or max(map(len, align_columns(rows))) <= width


def align_table(rows: Sequence[Sequence[str]], right: Collection[str]) -> list[str]:
    """Return rows, the first of which has the column heads, as aligned lines.

    Columns whose head is in `right` are right-aligned.
    """
    return align_columns(rows, right={column for column, head in enumerate(rows[0]) if head in right})


def wrap_columns(text: str) -> str:
    """Wrap lines at the terminal's width, between words, and align the continuation with the line's last column.

    Columns are separated by at least two spaces. A column that begins in the last third of the width is not used for
    the alignment. Commands to type are not wrapped, so that they can be copied.
    """
    width = terminal_width()
    if width is None:
        return text
    wrapped = []
    for line in text.split("\n"):
        if len(line) <= width or re.match(r" *(?:next  )?toyexp (?!.*\S  )", line):
            wrapped.append(line)
            continue
        starts = [m.end() for m in re.finditer(r"^ +|(?<=\S) {2,}(?=\S)", line) if m.end() <= width * 2 // 3]
        indent = " " * (starts[-1] if starts else 0)
        wrapped += textwrap.wrap(line, width, subsequent_indent=indent, break_on_hyphens=False) or [""]
    return "\n".join(wrapped)


def wrap_lines(lines: Sequence[str]) -> list[str]:
    """Wrap sentences at the terminal's width, between words."""
    width = terminal_width()
    if width is None:
        return list(lines)
    return [part for line in lines for part in textwrap.wrap(line, width, break_on_hyphens=False) or [""]]
