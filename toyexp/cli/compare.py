"""Runs side by side: `toyexp compare`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from toyexp.base.drawing import picture_at
from toyexp.base.errors import UserError
from toyexp.base.formatting import in_bytes
from toyexp.base.terminal import say, tell_aside
from toyexp.base.writing import require_place
from toyexp.cli.runs import one_form
from toyexp.interfaces.command import Arguments
from toyexp.results.filters import Filter, divided
from toyexp.results.found import unzipped
from toyexp.results.plot import sheet
from toyexp.results.report import Report, importance_of, is_a_page, require, title
from toyexp.sweeps.compare import compared

HELP = """\
usage: toyexp compare WHAT ... [FILTER ...] [options]

Runs side by side: what differs in their settings, and how well they did. WHAT is a run, a sweep, a directory or a zip
archive that holds runs, or a pattern of these in quotes ('outputs/warm-*'); FILTER is as in toyexp runs (recipe=warm
'lr>1e-3').

Runs that differ in their seed alone are one point, with the mean and the standard deviation (over n-1) of those that
came to their end. The best point comes first. What tells points apart in the same way as another setting (the sizes of
a preset) stands below the table. Runs that read different data or different base models are different points, even if
their settings are equal; the column `data digest` or `base digest` tells them apart.

options
--pool is for the runs of a class; without it the column `whose` tells them apart. --html holds curves, table, settings
against score, samples, and how to repeat each, and opens anywhere. --plot draws held-out curves, the mean over seeds in
its band, and where each point ended; of a search its scores by trial and setting."""


def run(arguments: Arguments) -> int:
    """Compares what is named."""
    one_form(arguments)
    page, plot = arguments.html, arguments.plot
    if (page or plot) and (arguments.json or arguments.csv):
        told, other = f"--html {page}" if page else f"--plot {plot}", "--json" if arguments.json else "--csv"
        raise UserError(f"{told} {other}: are two answers; ask for them one after the other")
    if page:
        check_page(page)
    picture = picture_at("--plot", plot) if plot else None
    places, filters = divided(arguments.rest)
    if not places:
        raise UserError("compare: takes runs, sweeps or directories that hold some, such as toyexp compare outputs")
    with unzipped(places) as where:
        return _compare(arguments, where, filters, picture)


def _compare(arguments: Arguments, places: list[str], filters: Sequence[Filter], picture: Path | None) -> int:
    page, metric = arguments.html, arguments.metric
    answer = compared(places, filters, metric, arguments.pool)
    comparison = answer.comparison
    alone = Path(places[0]) if len(places) == 1 else None
    if page:
        size = Report(title(places), importance_of(alone) if alone else None).write(comparison, Path(page))
        say(f"report  {page}, {in_bytes(size)}")
    if picture:
        whole = alone if not filters and not metric else None
        size = sheet(comparison, title(places), whole).write(picture)
        say(f"plot    {arguments.plot}, {in_bytes(size)}")
    if not page and not picture and not arguments.csv:
        return answer.show(arguments)
    if not page and not picture:
        print(answer.csv(), end="")
    for note in comparison.notes():
        tell_aside(f"note: {note}")
    return 0


def check_page(page: str) -> None:
    """Raises UserError where the page could not be written, before anything is read."""
    path = Path(page)
    if path.is_dir() or path.suffix.lower() not in (".html", ".htm"):
        folder = path if path.is_dir() else path.parent
        raise UserError(f"--html {page}: takes the name of a file that ends in .html: --html {folder / 'report.html'}")
    require_place(f"--html {page}", path)
    if os.path.lexists(path) and not is_a_page(path):
        raise UserError(f"--html {page}: is there already, and is no report of toyexp's; choose another name")
    require()
