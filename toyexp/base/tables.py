"""Tables and sentences as wide as the terminal."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Collection, Sequence

from toyexp.base.formatting import align_columns
from toyexp.base.terminal import is_terminal


def terminal_width() -> int | None:
    """Return the characters of a line; None if output goes to no terminal, where a line may have any length."""
    return shutil.get_terminal_size().columns if is_terminal() else None


def drop_columns(rows: Sequence[Sequence[str]], expendable: Sequence[str]) -> tuple[list[list[str]], list[str]]:
    """Return rows that fit the terminal, the first of them the heads, and the columns that were left out.

    The columns of `expendable` go one after another, the first of them first, as long as there is too little room.
    """
    table, gone = [list(row) for row in rows], []
    for head in expendable:
        if fits_terminal(table):
            break
        if head in table[0]:
            place = table[0].index(head)
            table = [[*row[:place], *row[place + 1 :]] for row in table]
            gone.append(head)
    return table, gone


def fits_terminal(rows: Sequence[Sequence[str]]) -> bool:
    """Return True if a table has room."""
    width = terminal_width()
    return width is None or max(map(len, align_columns(rows))) <= width


def align_table(rows: Sequence[Sequence[str]], right: Collection[str]) -> list[str]:
    """Return rows as lines, the columns with these heads at their right edge."""
    return align_columns(rows, right={place for place, head in enumerate(rows[0]) if head in right})


def wrap_lines(lines: Sequence[str]) -> list[str]:
    """Return sentences, broken between words where they are too long."""
    width = terminal_width()
    if width is None:
        return list(lines)
    return [part for line in lines for part in textwrap.wrap(line, width, break_on_hyphens=False) or [""]]
