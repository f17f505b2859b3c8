"""Tables that fit the terminal's width."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from toyexp.base.formatting import align_columns
from toyexp.base.terminal import Head, terminal_width


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
    """Return rows as aligned lines. The first row has the column heads, which are printed in bold.

    `right` has the heads of the columns that are right-aligned.
    """
    head, *lines = align_columns(rows, right={column for column, name in enumerate(rows[0]) if name in right})
    return [Head(head), *lines]


def fit_table(rows: Sequence[Sequence[str]], right: Collection[str], expendable: Sequence[str]) -> list[str]:
    """Drop columns that do not fit the terminal, and return the table as aligned lines.

    `right` has the heads of the right-aligned columns. `expendable` lists the heads of columns that may be dropped, in
    this order. The last line names the dropped columns, if any.
    """
    table, dropped = drop_columns(rows, expendable)
    return [*align_table(table, right), *name_dropped(dropped)]


def name_dropped(heads: Sequence[str], more: str = "") -> list[str]:
    """Return a list with a line that names the dropped columns `heads`; an empty list if there are none.

    The text `more` is appended to the line.
    """
    return [f"columns left out to fit the terminal: {', '.join(dict.fromkeys(heads))}{more}"] if heads else []
