"""What lies beside the runs of a sweep: report.html, now and then and at the end, and at the end a picture."""

from __future__ import annotations

import contextlib
import logging
import time
from pathlib import Path

from toyexp.base.errors import Unavailable
from toyexp.base.terminal import say
from toyexp.base.words import short
from toyexp.runs.comparison import Comparison
from toyexp.runs.found import below, look, metric_of
from toyexp.runs.plot import sheet
from toyexp.runs.report import Report, importance_of, is_a_page
from toyexp.runs.settings import values

log = logging.getLogger("toyexp")

NAME = "report.html"
PLOTS = "plots"
SHARE = 0.02  # of a sweep's time that may go into its report before the end
FIRST = 30.0  # seconds before it is written for the first time


def draw_sweep(sweep: Path) -> None:
    """plots/sweep.png and .svg of a sweep that has ended and whose runs have the callback `plots`.

    No trouble with it is one of the sweep's: it is said.
    """
    try:
        first = next(below(sweep), None)
        if first is None or "plots" not in (values(first).get("callbacks") or ()):
            return
        comparison = Comparison.of([look(run) for run in below(sweep)], metric_of([sweep]))
        picture = sheet(comparison, short(sweep), sweep)
        (sweep / PLOTS).mkdir(exist_ok=True)
        for suffix in (".png", ".svg"):
            path = sweep / PLOTS / f"sweep{suffix}"
            picture.write(path)
            say(f"plot    {short(path)}")
    except Exception as error:
        log.warning("%s: not drawn (%s)", sweep, error)
        say(f"plot    none: {error}")


class SweepReport:
    """The report of a sweep that runs; no trouble with it is one of the sweep's."""

    def __init__(self) -> None:
        self._report = Report("")
        self._next = time.monotonic() + FIRST
        self._failed = False

    def read(self, run: Path, count: int) -> None:
        """Reads what a run tells that has ended, one of so many: at the end somebody waits for the page."""
        with contextlib.suppress(Exception):  # which is told when it is to be written
            self._report.read(run, count)

    def __call__(self, sweep: Path, last: bool) -> None:
        """Writes it, if it is time or this is the `last` call, which says where it is, or why there is none."""
        if self._failed or not (last or time.monotonic() >= self._next):
            return
        began = time.monotonic()
        path = sweep / NAME
        try:
            runs = [look(run) for run in below(sweep)]
            if not runs:
                return
            if path.exists() and not is_a_page(path):
                raise Unavailable(f"{short(path)} is somebody else's")
            self._report.title = short(sweep)
            self._report.importance = importance_of(sweep)
            self._report.write(Comparison.of(runs, metric_of([sweep])), path)
        except Unavailable as error:
            if last:
                say(f"report  none: {error}, or leave it out: sweep.report=false")
            self._next = float("inf")
        except Exception as error:  # a full disk, or a run that somebody is taking away
            self._failed = True
            log.warning("%s: not written (%s)", path, error)
            say(f"report  none: {path.name} was not written ({error})")
        else:
            took = time.monotonic() - began
            self._next = time.monotonic() + max(FIRST, took / SHARE)
            if last:
                say(f"report  {short(path)}")
