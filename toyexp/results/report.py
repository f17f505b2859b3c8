"""report.html: runs side by side in one file that opens anywhere, without a network."""

from __future__ import annotations

import base64
import gzip
import logging
import math
import shlex
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from toyexp.base.drawing import thin_curve
from toyexp.base.errors import Unavailable
from toyexp.base.files import read_head
from toyexp.base.formatting import describe_parameters, display_path, short_path
from toyexp.base.packages import require_package
from toyexp.base.terminal import print_line
from toyexp.base.writing import convert_write_errors, dump_json, make_directory, write_atomically
from toyexp.interfaces.model import lower_is_better
from toyexp.results.comparison import Comparison, Entry
from toyexp.results.events import Curve, History, means
from toyexp.results.found import DONE, below, look, metric_of, values
from toyexp.results.importance import importance
from toyexp.results.plot import sheet
from toyexp.results.plot_search import Search

MOST_POINTS = 10_000  # of a curve
ALL_POINTS = 400_000  # of the losses of all runs together
MOST_BYTES = 5_000_000
MOST_RUNS = 500
Importance = tuple[Mapping[str, float], str]  # of settings; and where there is none, why
PAGE = Path(__file__).parent / "page"
SCRIPTS = ("data.js", "charts.js", "choices.js", "table.js", "page.js")
NAME = "report.html"
SHARE = 0.02  # of a sweep's time that may go into its report before the end
FIRST = 30.0  # seconds before it is written for the first time
MADE_BY = '<meta name="generator" content="toyexp">'

log = logging.getLogger("toyexp")


def require() -> None:
    """Raises Unavailable without what draws."""
    with require_package("plotly", "pip install 'toyexp[report]'"):
        import plotly  # noqa: F401 - what packed_library() reads


def title(places: Sequence[str]) -> str:
    """What a page is called: what it is about."""
    places = [display_path(place) for place in places]
    return " ".join(places) if sum(map(len, places)) <= 80 else f"{places[0]} and {len(places) - 1} more"


def is_a_page(path: Path) -> bool:
    """Whether a file is a report that was written before, which a new one may replace."""
    return MADE_BY.encode() in read_head(path, 1000)


@cache
def packed_library() -> str:
    """What draws: plotly.js, as the Python package carries it; Unavailable without it."""
    require()
    from plotly.offline import get_plotlyjs

    return packed(str(get_plotlyjs()))


@dataclass
class Report:
    """A report that may be written again as its runs go on: what a run that has ended told is kept."""

    title: str
    importance: Importance | None = None  # as a search has found it
    _kept: dict[Path, tuple[tuple[float, ...], dict[str, Any]]] = field(default_factory=dict)

    def write(self, comparison: Comparison, path: Path) -> int:
        """Writes the page in one piece, and returns its bytes; fewer points a curve where it would be too large.

        Of more than MOST_RUNS runs the best are shown.

        Raises RunFailed where it cannot be written, Unavailable without plotly.
        """
        comparison = comparison.best(MOST_RUNS)
        most = _points(len(comparison.entries))
        page = self._page(comparison, most)
        while len(page) > MOST_BYTES and most > 100:
            most //= 2
            page = self._page(comparison, most)
        with convert_write_errors(path), write_atomically(path) as place:
            place.write_bytes(page)
        return len(page)

    def _page(self, comparison: Comparison, most: int) -> bytes:
        told = packed(dump_json(self._data(comparison, most)))
        parts = {
            "title": escape(self.title, quote=False),
            "style": (PAGE / "page.css").read_text(encoding="utf-8"),
            "library": packed_library(),
            "data": told,
            "script": "\n".join((PAGE / name).read_text(encoding="utf-8") for name in SCRIPTS),
        }
        page = (PAGE / "page.html").read_text(encoding="utf-8")
        for name, text in parts.items():
            page = page.replace(f"<!--{name}-->", text)
        return page.encode(errors="backslashreplace")

    def _data(self, comparison: Comparison, most: int) -> dict[str, Any]:
        ranking = comparison.ranking
        shares, why = self.importance or importance_among(comparison)
        places = {id(point): place for place, point in enumerate(ranking.points)}
        every = comparison.every_key
        rising = not ranking.column.endswith("loss") and not lower_is_better(ranking.column.removeprefix("held-out "))
        return {
            "title": self.title,
            "written": datetime.now(UTC).isoformat(timespec="seconds"),
            "metric": ranking.column,
            "best": len(ranking.points) > 1 and ranking.best is not None,
            "rising": rising,
            "keys": comparison.keys,
            "along": comparison.along,
            "differ": {key: comparison.values(key) for key in every},
            "scores": comparison.scores,
            "notes": comparison.notes(),
            "importance": shares, "no_importance": why,
            "points": [
                {"label": comparison.label(point.jobs[0]), "deviation": point.deviation,
                 "mean": point.mean if math.isfinite(point.mean) else None,
                 "counted": len(point.values),
                 "settings": {key: point.jobs[0].settings.get(key) for key in comparison.keys}}
                for point in ranking.points
            ],
            "runs": [self._run(entry, places[id(point)], every, most) for entry, point in ranking.jobs()],
            "most": most, "unit": _unit(comparison.entries),
        }  # fmt: skip

    def _run(self, entry: Entry, point: int, differ: Sequence[str], most: int) -> dict[str, Any]:
        run, path = entry.run, display_path(entry.run.path.absolute())
        return {
            **run.plain(), "path": path, "point": point, "counts": run.state in DONE,
            "settings": {key: entry.settings[key] for key in differ if key in entry.settings},
            "all": dict(entry.settings), "facts": _environment(entry),
            "again": shlex.join(["toyexp", "--config-path", path, "--config-name", "config"]),
            **self._told(run.path, most),
        }  # fmt: skip

    def _told(self, path: Path, most: int) -> dict[str, Any]:
        """What the events of a run tell, read again only where they have changed."""
        try:
            status = (path / "events.jsonl").stat()
            mark: tuple[float, ...] = (most, status.st_mtime, status.st_size)
        except OSError:
            mark = (most,)
        if self._kept.get(path, (None,))[0] != mark:
            self._kept[path] = (mark, _shown(History.of(path), most))
        return self._kept[path][1]


def _points(count: int) -> int:
    """Those of a curve at most, of so many runs: halved, so that what is kept of one seldom has to be read again."""
    most = MOST_POINTS
    while most * count > ALL_POINTS and most > 200:
        most //= 2
    return most


def _shown(history: History, most: int) -> dict[str, Any]:
    fewer = max(most // 8, 60)
    return {
        "curves": {
            "loss": _curve(history.curve("loss"), most, max(most // 4, 100)),
            **{name: _curve(history.curve(name), fewer, fewer // 2) for name in ("lr", "grad_norm", "speed")},
        },
        "clock": _clock(history),
        "held": {name: _few(history.held_out_curve(name), fewer) for name in history.held_out if name != "step"},
        "samples": history.samples, "warnings": history.warnings, "warned": history.warned,
    }  # fmt: skip


def importance_among(comparison: Comparison) -> Importance:
    """Return how much each setting matters for the score of these runs."""
    points = [point for point in comparison.ranking.points if point.values]
    settings = {key: [point.jobs[0].settings.get(key, "") for point in points] for key in comparison.keys}
    return importance(settings, [point.mean for point in points])


def packed(text: str) -> str:
    """Text as a page carries it: compressed, in base64; the browser undoes both by itself."""
    return base64.b64encode(gzip.compress(text.encode(), 6, mtime=0)).decode()  # of 9 it takes a third, and 0.5% more


def _curve(curve: Curve, most: int, smooth: int) -> dict[str, Any]:
    """A curve for the page: steps as differences, values in five digits."""
    count = len(curve[0])
    steps, values = thin_curve(*curve, most)
    found = {"n": count, "x": _differences(steps), "y": _short(values)}
    if count > smooth:
        steps, values = means(curve, smooth)
        found["mx"], found["my"] = _differences(steps.round()), _short(values)
    return found


def _clock(history: History) -> list[Sequence[float]]:
    """Some steps, with the seconds and the tokens at each: between them the page draws straight lines."""
    count = len(history.step)
    places = sorted({count * i // 200 for i in range(200)} | {count - 1}) if count else []
    steps, tokens = (of[places].astype(int).tolist() for of in (history.step, history.tokens))
    return [steps, _short(history.seconds[places]), tokens]


def _few(curve: Curve, most: int) -> list[list[float]]:
    """Return the steps and values of held-out scores, of many only every so many-th and the last."""
    steps, values = curve
    places = sorted({*range(0, len(steps), -(-len(steps) // most) or 1), len(steps) - 1} - {-1})
    return [steps[places].tolist(), _short(values[places])]


def _differences(steps: np.ndarray) -> list[int]:
    return np.diff(steps.astype(int), prepend=0).tolist()


def _short(values: Iterable[float]) -> list[float]:
    return [float(f"{value:.5g}") for value in values]


def _environment(entry: Entry) -> dict[str, str]:
    facts = entry.facts
    host, git, backend, model = (facts.get(name) or {} for name in ("host", "git", "backend", "model"))
    names = [str(backend[key]) for key in ("kind", "framework", "device") if backend.get(key)]
    # "ggml", "ggml 0.15.3", "CPU": what another one says too is left out
    engine = [name for name in names if not any(name != other and name in other for other in names)]
    told = {
        "engine": " ".join(dict.fromkeys(engine)),
        "threads": backend.get("threads"),
        "machine": " ".join(str(host[k]) for k in ("name", "os", "arch") if host.get(k)),
        "Python": host.get("python"),
        "commit": str(git.get("sha") or "")[:12],
        "parameters": describe_parameters(model).replace(" parameters", ""),
    }
    return {key: str(value)[:200] for key, value in told.items() if value}


def _unit(entries: Iterable[Entry]) -> str:
    images = {"train_images" in (entry.facts.get("data") or {}) for entry in entries}
    return "tokens or images" if len(images) > 1 else "images" if images == {True} else "tokens"


def importance_of(search: Path) -> Importance | None:
    """Return how much each setting matters, as a search has found it; None in other directories."""
    found = Search.of(search)
    return (found.importances, found.no_importances) if found else None


# -- what lies beside the runs of a sweep -----------------------------------------------------------------------------


def draw_sweep(sweep: Path) -> None:
    """plots/sweep.png and .svg of a sweep that has ended and whose runs have the callback `plots`.

    No trouble with it is one of the sweep's: it is said.
    """
    try:
        first = next(below(sweep), None)
        if first is None or "plots" not in (values(first).get("callbacks") or ()):
            return
        comparison = Comparison.of([look(run) for run in below(sweep)], metric_of([sweep]))
        picture = sheet(comparison, short_path(sweep), sweep)
        folder = make_directory(sweep / "plots")
        for path in (folder / "sweep.png", folder / "sweep.svg"):
            picture.write(path)
            print_line(f"plot    {short_path(path)}")
    except Exception as error:
        log.warning("%s: not drawn (%s)", sweep, error)
        print_line(f"plot    none: {error}")


class SweepReport:
    """The report of a sweep that runs; no trouble with it is one of the sweep's."""

    def __init__(self) -> None:
        self._report = Report("")
        self._next = time.monotonic() + FIRST

    def __call__(self, sweep: Path, last: bool) -> None:
        """Writes it, if it is time or this is the `last` call, which says where it is, or why there is none."""
        if not last and time.monotonic() < self._next:
            return
        began, path = time.monotonic(), sweep / NAME
        try:
            runs = [look(run) for run in below(sweep)]
            if not runs:
                return
            if path.exists() and not is_a_page(path):
                raise Unavailable(f"{short_path(path)} is somebody else's")
            self._report.title = short_path(sweep)
            self._report.importance = importance_of(sweep)
            self._report.write(Comparison.of(runs, metric_of([sweep])), path)
        except Exception as error:  # also a full disk, or a run that somebody is taking away
            self._next = math.inf
            log.info("%s: not written (%s)", path, error)
            if last:
                print_line(f"report  none: {error}, or leave it out: sweep.report=false")
        else:
            self._next = time.monotonic() + max(FIRST, (time.monotonic() - began) / SHARE)
            if last:
                print_line(f"report  {short_path(path)}")
