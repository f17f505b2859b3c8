"""Write report.html: runs compared side by side in one HTML file that needs no network."""

from __future__ import annotations

import base64
import gzip
import logging
import math
import shlex
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from toyexp.base.drawing import COLOURS, DARK_COLOURS, DARK_RAMP, RAMP, find_divergence, thin_curve
from toyexp.base.errors import Unavailable
from toyexp.base.files import read_head
from toyexp.base.formatting import describe_parameters, display_path, pluralise, short_keys, short_path
from toyexp.base.packages import require_package
from toyexp.base.terminal import print_line
from toyexp.base.writing import convert_write_errors, dump_json, make_directory, write_atomically
from toyexp.interfaces.model import lower_is_better
from toyexp.results.comparison import Comparison, Entry
from toyexp.results.events import Curve, History, average_bins
from toyexp.results.importance import compute_shares
from toyexp.results.plot import draw_sheet
from toyexp.results.plot_search import Search
from toyexp.results.run_dirs import COLUMNS, FINAL_STATES, find_runs, read_run, setting_values, sweep_metric

MAX_CURVE_POINTS = 10_000  # points of a curve
MAX_LOSS_POINTS = 400_000  # points of the loss curves of all runs together
MAX_BYTES = 5_000_000
MAX_RUNS = 500
# by run: a state of its events, and their data for the page
Known = dict[Path, tuple[tuple[float, ...], dict[str, Any]]]
Importance = tuple[Mapping[str, float], str]  # share of each setting, and the reason if there are no shares
PAGE = Path(__file__).parent / "page"
SCRIPTS = ("data.js", "charts.js", "filter.js", "choices.js", "search.js", "table.js", "page.js")
REPORT_FILE = "report.html"
MAX_TIME_SHARE = 0.02  # share of a sweep's time that may be spent on reports before it ends
FIRST_DELAY = 30.0  # seconds before the first report
GENERATOR_TAG = '<meta name="generator" content="toyexp">'

log = logging.getLogger("toyexp")


def require_plotly() -> None:
    """Raise Unavailable if plotly is not installed."""
    with require_package("plotly", "pip install 'toyexp[report]'"):
        import plotly  # noqa: F401 - pack_library() reads its source


def describe_runs(comparison: Comparison, search: Search | None) -> str:
    """Return the heading of the page: what differs between the runs, and their number."""
    runs = [entry.run for entry in comparison.entries]
    keys = [*short_keys(comparison.keys), *["seed"] * (len({run.seed for run in runs}) > 1)]
    names = " and ".join(filter(None, [", ".join(keys[:-1]), *keys[-1:]])) if len(keys) < 7 else f"{len(keys)} settings"
    kind = "Sweep" if runs[0].sweep and len({run.sweep for run in runs}) == 1 else "Comparison"
    heading = f"{kind} of {names}: {pluralise(len(runs), 'run')}" if names else runs[0].name
    return search.describe() if search else heading


def is_report(path: Path) -> bool:
    """Return True if a file is an earlier report, which may be overwritten."""
    return GENERATOR_TAG.encode() in read_head(path, 1000)


@cache
def pack_library() -> str:
    """Return the source of plotly.js, packed with `pack`. Raise Unavailable if plotly is not installed."""
    require_plotly()
    from plotly.offline import get_plotlyjs

    return pack(str(get_plotlyjs()))


def write_report(
    comparison: Comparison, path: Path, source: str, search: Search | None = None, known: Known | None = None
) -> int:
    """Write the page to `path` atomically and return its size in bytes.

    `source` names the compared directories; `search` is given if the runs are the trials of a search. Only the best
    MAX_RUNS runs are shown. If the page exceeds MAX_BYTES, curves get fewer points. Raise RunFailed if the page cannot
    be written, Unavailable without plotly.

    If the page is written repeatedly, pass the same `known`: then events that have not changed are read only once.
    """
    comparison, most = comparison.best(MAX_RUNS), MAX_CURVE_POINTS
    while most * len(comparison.entries) > MAX_LOSS_POINTS:
        most //= 2  # by factors of 2, so that cached curves stay valid longer while runs are added
    known = {} if known is None else known
    page = _fill_page(comparison, source, search, most, known)
    while len(page) > MAX_BYTES and most > 100:
        most //= 2
        page = _fill_page(comparison, source, search, most, known)
    with convert_write_errors(path), write_atomically(path) as temporary:
        temporary.write_bytes(page)
    return len(page)


def _fill_page(comparison: Comparison, source: str, search: Search | None, most: int, known: Known) -> bytes:
    data = pack(dump_json(_page_data(comparison, search, most, known)))
    parts = {
        "title": escape(describe_runs(comparison, search), quote=False),
        "source": escape(source, quote=False),
        "style": (PAGE / "page.css").read_text(encoding="utf-8"),
        "library": pack_library(),
        "data": data,
        "script": "\n".join((PAGE / name).read_text(encoding="utf-8") for name in SCRIPTS),
    }
    page = (PAGE / "page.html").read_text(encoding="utf-8")
    for name, text in parts.items():
        page = page.replace(f"<!--{name}-->", text)
    return page.encode(errors="backslashreplace")


def _page_data(comparison: Comparison, search: Search | None, most: int, known: Known) -> dict[str, Any]:
    ranking = comparison.ranking
    shares, why = (search.importances, search.no_importances) if search else compute_importance(comparison)
    point_indices = {id(point): index for index, point in enumerate(ranking.points)}
    differing_keys = comparison.every_key
    every_key = list(dict.fromkeys([*differing_keys, *(search.keys if search else ())]))
    rising = not ranking.column.endswith("loss") and not lower_is_better(ranking.column.removeprefix("held-out "))
    return {
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "metric": ranking.column,
        "best": len(ranking.points) > 1 and ranking.best is not None,
        "rising": rising,
        "keys": comparison.keys, "names": dict(zip(every_key, short_keys(every_key), strict=True)),
        "along": {key: leader for leader, group in comparison.linked_keys.items() for key in group},
        "differ": {key: comparison.values(key) for key in differing_keys},
        "scores": comparison.scores, "columns": COLUMNS,
        "notes": comparison.notes(), "unranked": comparison.unranked_notes(),
        "importance": shares, "no_importance": why, "search": search and _search_data(search),
        "colours": {"light": COLOURS, "dark": DARK_COLOURS}, "ramps": {"light": RAMP, "dark": DARK_RAMP},
        "points": [
            {"label": comparison.label(point.jobs[0]), "deviation": point.deviation,
             "mean": point.mean if math.isfinite(point.mean) else None,
             "counted": len(point.values), "state": point.state}
            for point in ranking.points
        ],
        "runs": [
            _run_data(run, point_indices[id(point)], differing_keys, most, known) for run, point in ranking.jobs()
        ],
        "most": most, "unit": _unit(comparison.entries),
    }  # fmt: skip


def _run_data(entry: Entry, point: int, differ: Sequence[str], most: int, known: Known) -> dict[str, Any]:
    run, path = entry.run, display_path(entry.run.path.absolute())
    typed = [word.partition("=")[0].lstrip("+") for word in entry.facts.get("typed") or []]
    first = {key: entry.settings[key] for key in (*differ, *typed) if key in entry.settings}
    return {
        **run.plain(), "path": path, "point": point, "counts": run.state in FINAL_STATES,
        "all": {**first, **entry.settings}, "typed": len(first), "facts": _environment(entry),
        "again": report_command(entry, path),
        **_read_events(run.path, most, known),
    }  # fmt: skip


def report_command(entry: Entry, path: str) -> str:
    """Return the command that repeats a run.

    It contains the settings that were typed for the run or, if these are unknown, the path of the run's config.yaml.
    """
    return shlex.join(["toyexp", *(entry.facts.get("typed") or ["--config-path", path, "--config-name", "config"])])


def _search_data(search: Search) -> dict[str, Any]:
    """Return the data of a search for the page: its metric, the searched settings, and all trials."""
    return {
        "metric": f"held-out {search.metric}", "keys": search.keys, "log": sorted(search.log_keys),
        "limits": search.limits, "ticks": search.cut_ticks, "pruning": search.pruning_steps,
        "legend": search.describe_pruning(),
        "trials": [{"number": t.number, "values": dict(t.values), "complete": t.is_complete, "score": t.score,
                    "step": t.step, "height": None if t.score is None else search.place(t.score)}
                   for t in search.trials],
    }  # fmt: skip


def _read_events(run: Path, most: int, known: Known) -> dict[str, Any]:
    """Return the data of a run for the page: curves of at most `most` points, the last samples, the first warnings.

    The events are read only if they have changed since their data was added to `known`.
    """
    try:
        status = (run / "events.jsonl").stat()
        state: tuple[float, ...] = (most, status.st_mtime, status.st_size)
    except OSError:
        state = (most,)
    if run not in known or known[run][0] != state:
        known[run] = state, _history_data(History.read(run), most)
    return known[run][1]


def _history_data(history: History, most: int) -> dict[str, Any]:
    fewer = max(most // 8, 60)
    return {
        "curves": {
            "loss": _curve(history.curve("loss"), most, max(most // 4, 100)),
            **{name: _curve(history.curve(name), fewer, fewer // 2) for name in ("lr", "speed")},
            "grad_norm": _curve(history.curve("grad_norm"), fewer, fewer // 2, True),
        },
        "clock": _clock(history),
        "held": {
            name: _thin_scores(history.held_out_curve(name), fewer) for name in history.held_out if name != "step"
        },
        "diverged": find_divergence(*(numbers.tolist() for numbers in history.curve("loss"))),
        "samples": history.samples, "warnings": history.warnings, "warned": history.warning_count,
    }  # fmt: skip


def compute_importance(comparison: Comparison) -> Importance:
    """Return a dict with the importance of each setting for the metric, and an empty text.

    If the importance cannot be computed, return an empty dict and a text that says why.
    """
    points = [point for point in comparison.ranking.points if point.values]
    settings = {key: [point.jobs[0].settings.get(key, "") for point in points] for key in comparison.keys}
    return compute_shares(settings, [point.mean for point in points])


def pack(text: str) -> str:
    """Compress a text with gzip and encode it as base64; a browser can decode both."""
    compressed = gzip.compress(text.encode(), 6, mtime=0)  # level 9 is 3 times slower, 0.5% smaller
    return base64.b64encode(compressed).decode()


def _curve(curve: Curve, most: int, smooth: int, log: bool = False) -> dict[str, Any]:
    """Return the data of a curve for the page: at most `most` of its points, and its averages over `smooth` bins.

    If `log` is True, the averages are geometric: those of the logarithms, without values that have none.
    To save space, a step is stored as the difference from the step before it, and a value is rounded to five digits.
    """
    count = len(curve[0])
    steps, values = thin_curve(*curve, most)
    curve_data = {"n": count, "x": _differences(steps), "y": _round(values)}
    if count > smooth:
        if log:
            curve = curve[0][curve[1] > 0], np.log(curve[1][curve[1] > 0])
        steps, values = average_bins(curve, smooth)
        values = np.exp(values) if log else values
        curve_data["mx"], curve_data["my"] = _differences(steps.round()), _round(values)
    return curve_data


def _clock(history: History) -> list[Sequence[float]]:
    """Return the lists [steps, seconds, tokens]: the elapsed time and the number of tokens at about 200 steps.

    The page interpolates linearly between these steps.
    """
    count = len(history.step)
    indices = sorted({count * i // 200 for i in range(200)} | {count - 1}) if count else []
    steps, tokens = (numbers[indices].astype(int).tolist() for numbers in (history.step, history.tokens))
    return [steps, _round(history.seconds[indices]), tokens]


def _thin_scores(curve: Curve, most: int) -> list[list[float]]:
    """Return the lists [steps, values] of a held-out metric.

    If there are more than `most` values, return only every n-th value and the last one.
    """
    steps, values = curve
    indices = sorted({*range(0, len(steps), -(-len(steps) // most) or 1), len(steps) - 1} - {-1})
    return [steps[indices].tolist(), _round(values[indices])]


def _differences(steps: np.ndarray) -> list[int]:
    return np.diff(steps.astype(int), prepend=0).tolist()


def _round(values: Iterable[float]) -> list[float]:
    return [float(f"{value:.5g}") for value in values]


def _environment(entry: Entry) -> dict[str, str]:
    facts = entry.facts
    host, git, backend, model = (facts.get(name) or {} for name in ("host", "git", "backend", "model"))
    names = [str(backend[key]) for key in ("kind", "framework", "device") if backend.get(key)]
    # drop names that another name contains: of "ggml", "ggml 0.15.3", "CPU" the first
    engine = [name for name in names if not any(name != other and name in other for other in names)]
    environment = {
        "engine": " ".join(dict.fromkeys(engine)),
        "threads": backend.get("threads"),
        "machine": " ".join(str(host[k]) for k in ("name", "os", "arch") if host.get(k)),
        "Python": host.get("python"),
        "commit": str(git.get("sha") or "")[:12],
        "parameters": describe_parameters(model).replace(" parameters", ""),
    }
    return {key: str(value)[:200] for key, value in environment.items() if value}


def _unit(entries: Iterable[Entry]) -> str:
    images = {"train_images" in (entry.facts.get("data") or {}) for entry in entries}
    return "tokens or images" if len(images) > 1 else "images" if images == {True} else "tokens"


# -- plots and report of a whole sweep --------------------------------------------------------------------------------


def draw_sweep(sweep: Path) -> None:
    """Draw plots/sweep.png and .svg after a sweep, if its runs have the callback `plots`.

    Errors are reported and do not fail the sweep.
    """
    try:
        first = next(find_runs(sweep), None)
        if first is None or "plots" not in (setting_values(first).get("callbacks") or ()):
            return
        comparison = Comparison.build([read_run(run) for run in find_runs(sweep)], sweep_metric([sweep]))
        picture = draw_sheet(comparison, short_path(sweep), sweep)
        folder = make_directory(sweep / "plots")
        for path in (folder / "sweep.png", folder / "sweep.svg"):
            picture.write(path)
            print_line(f"plot    {short_path(path)}")
    except Exception as error:
        log.warning("%s: not drawn (%s)", sweep, error)
        print_line(f"plot    none: {error}")


class SweepReport:
    """Writer of a sweep's report while the sweep runs. An error in the writer never stops the sweep."""

    def __init__(self) -> None:
        self._next, self._known = time.monotonic() + FIRST_DELAY, Known()

    def __call__(self, sweep: Path, last: bool) -> None:
        """Write report.html of the sweep in directory `sweep` if enough time has passed since the last write.

        With `last`, write it in any case, and print its path or the error.
        """
        if not last and time.monotonic() < self._next:
            return
        began, path = time.monotonic(), sweep / REPORT_FILE
        try:
            runs = [read_run(run) for run in find_runs(sweep)]
            if not runs:
                return
            if path.exists() and not is_report(path):
                raise Unavailable(f"{short_path(path)} was not written by toyexp; move it away")
            comparison = Comparison.build(runs, sweep_metric([sweep]))
            write_report(comparison, path, short_path(sweep), Search.read(sweep), self._known)
        except Exception as error:  # also a full disk, or a run that is deleted meanwhile
            self._next = math.inf
            log.info("%s: not written (%s)", path, error)
            if last:
                print_line(f"report  not written: {error} (to write no report: sweep.report=false)")
        else:
            self._next = time.monotonic() + max(FIRST_DELAY, (time.monotonic() - began) / MAX_TIME_SHARE)
            if last:
                print_line(f"report  {short_path(path)}")
