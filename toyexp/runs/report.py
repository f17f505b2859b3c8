"""report.html: runs side by side in one file that opens anywhere, without a network."""

from __future__ import annotations

import base64
import gzip
import math
import shlex
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from toyexp.base.errors import UserError
from toyexp.base.files import open_file
from toyexp.base.packages import needed
from toyexp.base.words import last_words
from toyexp.base.writing import dump_json, in_one_piece
from toyexp.contract.model import lower_is_better
from toyexp.runs.comparison import Comparison, Entry
from toyexp.runs.events import Curve, History, means, thinned
from toyexp.runs.found import DONE
from toyexp.training.checkpoint import Damaged, conforms, read_json

MOST_POINTS = 10_000  # of a curve
ALL_POINTS = 400_000  # of the losses of all runs together
MOST_BYTES = 5_000_000
MOST_RUNS = 500
SOON_READ = 4 << 20  # bytes of events, which take a tenth of a second
PAGE = Path(__file__).parent / "page"
SCRIPTS = ("data.js", "charts.js", "choices.js", "table.js", "page.js")
MADE_BY = '<meta name="generator" content="toyexp">'
REMEDY = "pip install 'toyexp[report]'"


def require() -> None:
    """Raises Unavailable without what draws."""
    with needed("plotly", REMEDY):
        import plotly  # noqa: F401 - what packed_library() reads


def title(places: Sequence[str]) -> str:
    """What a page is called: what it is about."""
    return " ".join(places) if sum(map(len, places)) <= 80 else f"{places[0]} and {len(places) - 1} more"


def is_a_page(path: Path) -> bool:
    """Whether a file is a report that was written before, which a new one may replace."""
    try:
        with open_file(path) as file:
            return MADE_BY.encode() in file.read(1000)
    except (UserError, OSError):
        return False


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
    importance: Mapping[str, float] | None = None  # of settings, where a search has found it
    _kept: dict[Path, tuple[tuple[float, ...], dict[str, Any]]] = field(default_factory=dict)

    def write(self, comparison: Comparison, path: Path) -> int:
        """Writes the page in one piece, and returns its bytes; fewer points a curve where it would be too large.

        Of more than MOST_RUNS runs the best are shown.

        Raises UserError where it cannot be written, Unavailable without plotly.
        """
        comparison = comparison.best(MOST_RUNS)
        most = _points(len(comparison.entries))
        page = self._page(comparison, most)
        while len(page) > MOST_BYTES and most > 100:
            most //= 2
            page = self._page(comparison, most)
        try:
            with in_one_piece(path) as place:
                place.write_bytes(page)
        except OSError as error:
            raise UserError(f"{path}: cannot be written ({error.strerror})") from None
        return len(page)

    def read(self, run: Path, count: int) -> None:
        """Keeps what a run tells that has ended, for a page of so many; what takes long is left for when it is written.

        Raises OSError where there are no events, Unavailable without plotly.
        """
        if count <= MOST_RUNS and (run / "events.jsonl").stat().st_size <= SOON_READ:
            packed_library()
            self._told(run, _points(count))

    def _page(self, comparison: Comparison, most: int) -> bytes:
        told = packed(dump_json(self._data(comparison, most)))
        parts = {
            "title": _escaped(self.title),
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
        order = {id(entry): place for place, (entry, _) in enumerate(ranking.jobs())}
        place_of = {id(entry): n for n, point in enumerate(ranking.points) for entry in point.jobs}
        entries = sorted(comparison.entries, key=lambda entry: order[id(entry)])
        every = [*comparison.keys, *(key for some in comparison.along.values() for key in some), *comparison.also]
        return {
            "title": self.title,
            "written": datetime.now(UTC).isoformat(timespec="seconds"),
            "metric": ranking.column,
            "best": len(ranking.points) > 1 and comparison.best_point is not None,
            "rising": _rises(ranking.column),
            "keys": comparison.keys,
            "along": comparison.along,
            "differ": {key: comparison.values(key) for key in every},
            "scores": comparison.scores,
            "notes": comparison.notes(),
            "importance": importance(comparison) if self.importance is None else self.importance,
            "searched": self.importance is not None,
            "points": [
                {"label": _label(point.jobs[0], comparison), "mean": _known(point.mean), "deviation": point.deviation,
                 "counted": len(point.values),
                 "settings": {key: point.jobs[0].settings.get(key) for key in comparison.keys}}
                for point in ranking.points
            ],
            "runs": [self._run(entry, place_of[id(entry)], every, most) for entry in entries],
            "most": most, "unit": _unit(entries),
        }  # fmt: skip

    def _run(self, entry: Entry, point: int, differ: Sequence[str], most: int) -> dict[str, Any]:
        run = entry.run
        return {
            **run.plain(), "path": str(run.path.absolute()), "point": point, "counts": run.state in DONE,
            "settings": {key: entry.settings[key] for key in differ if key in entry.settings},
            "all": dict(entry.settings), "facts": _environment(entry),
            "again": shlex.join(["toyexp", "--config-path", str(run.path.absolute()), "--config-name", "config"]),
            **self._told(run.path, most),
        }  # fmt: skip

    def _told(self, path: Path, most: int) -> dict[str, Any]:
        """What the events of a run tell, read again only where they have changed."""
        try:
            status = (path / "events.jsonl").stat()
            mark: tuple[float, ...] = (most, status.st_mtime, status.st_size)
        except OSError:
            mark = (most,)
        if path not in self._kept or self._kept[path][0] != mark:
            self._kept[path] = (mark, _shown(History.of(path), most))
        return self._kept[path][1]


def _points(count: int) -> int:
    """Those of a curve at most, of so many runs: halved, so that what is kept of one seldom has to be read again."""
    most = MOST_POINTS
    while most * count > ALL_POINTS and most > 200:
        most //= 2
    return most


def _shown(history: History, most: int) -> dict[str, Any]:
    """The events of a run as the page has them."""
    fewer = max(most // 8, 60)
    return {
        "curves": {
            "loss": _curve(history.loss, most, max(most // 4, 100)),
            **{name: _curve(getattr(history, name), fewer, fewer // 2) for name in ("lr", "grad_norm", "speed")},
        },
        "clock": _clock(history),
        "held": {name: [c.steps.tolist(), _short(c.values)] for name, c in _few(history.held_out, fewer)},
        "samples": history.samples, "warnings": history.warnings, "warned": history.warned,
    }  # fmt: skip


def importance(comparison: Comparison) -> dict[str, float]:
    """Of each setting, which share of the variance of the scores between points its values alone account for.

    The correlation ratio, eta squared: the sum of squares between the groups of its values over that of all points. A
    number with many values is taken in four groups of equal size. Nothing of fewer than four points.
    """
    points = [point for point in comparison.ranking.points if point.values]
    if len(points) < 4 or not comparison.keys:
        return {}
    scores = [point.mean for point in points]
    mean = statistics.fmean(scores)
    total = sum((score - mean) ** 2 for score in scores)
    found = {}
    for key in comparison.keys if total > 0 else ():
        groups: dict[str, list[float]] = {}
        for label, score in zip(
            _groups([point.jobs[0].settings.get(key, "") for point in points]), scores, strict=True
        ):
            groups.setdefault(label, []).append(score)
        between = sum(len(some) * (statistics.fmean(some) - mean) ** 2 for some in groups.values())
        if 1 < len(groups) < len(points):
            found[key] = between / total
    return dict(sorted(found.items(), key=lambda pair: -pair[1]))


def _groups(values: Sequence[str]) -> list[str]:
    """What each value counts as: itself, or one of four quarters where there are many numbers."""
    if len(set(values)) <= max(len(values) // 3, 4):
        return list(values)
    try:
        numbers = [float(value) for value in values]
    except ValueError:
        return list(values)
    cuts = statistics.quantiles(numbers, n=4)
    return [str(sum(number > cut for cut in cuts)) for number in numbers]


def packed(text: str) -> str:
    """Text as a page carries it: compressed, in base64; the browser undoes both by itself."""
    return base64.b64encode(gzip.compress(text.encode(), 6, mtime=0)).decode()  # of 9 it takes a third, and 0.5% more


def _curve(curve: Curve, most: int, smooth: int) -> dict[str, Any]:
    """A curve for the page: steps as differences, values in five digits."""
    steps, values = thinned(curve, most)
    found = {"n": len(curve.steps), "x": _differences(steps), "y": _short(values)}
    if len(curve.steps) > smooth:
        steps_of_means, values = means(curve, smooth)
        found["mx"], found["my"] = _differences([round(step) for step in steps_of_means]), _short(values)
    return found


def _clock(history: History) -> list[Sequence[float]]:
    """Some steps, with the seconds and the tokens at each: between them the page draws straight lines."""
    count = len(history.tokens.steps)
    places = sorted({count * i // 200 for i in range(200)} | {count - 1}) if count else []
    seconds = dict(zip(history.seconds.steps, history.seconds.values, strict=True))
    steps = [history.tokens.steps[place] for place in places]
    return [
        steps,
        _short(seconds.get(step, math.nan) for step in steps),
        [int(history.tokens.values[p]) for p in places],
    ]


def _few(held_out: Mapping[str, Curve], most: int) -> Iterable[tuple[str, Curve]]:
    """Held-out scores, where there are many every so many-th and the last."""
    for name, curve in held_out.items():
        every = -(-len(curve.steps) // most) or 1
        places = sorted({*range(0, len(curve.steps), every), len(curve.steps) - 1}) if curve.steps else []
        fewer = Curve()
        for place in places:
            fewer.add(curve.steps[place], curve.values[place])
        yield name, fewer


def _differences(steps: Sequence[int]) -> list[int]:
    return [step - before for step, before in zip(steps, [0, *steps], strict=False)]


def _short(values: Iterable[float]) -> list[float]:
    return [float(f"{value:.5g}") for value in values]


def _environment(entry: Entry) -> dict[str, str]:
    """Where a run was done, and with what."""
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
        "parameters": f"{many:,}" if isinstance(many := model.get("parameters"), int) else None,
    }
    return {key: str(value)[:200] for key, value in told.items() if value}


def _unit(entries: Iterable[Entry]) -> str:
    """What their steps count."""
    images = {"train_images" in (entry.facts.get("data") or {}) for entry in entries}
    return "tokens or images" if len(images) > 1 else "images" if images == {True} else "tokens"


def _label(entry: Entry, comparison: Comparison) -> str:
    """What tells a point apart, with the last words of keys where these say enough."""
    words = [
        f"{word}={entry.settings[key]}"
        for key, word in zip(comparison.keys, last_words(comparison.keys), strict=True)
        if key in entry.settings
    ]
    return "  ".join(words) or entry.run.name


def importance_of(search: Path) -> dict[str, float] | None:
    """How much each setting matters, as a search has found it in its directory; None where it has not."""
    try:
        found: Any = read_json(search / "search.json").get("importances")
    except Damaged:
        return None
    return dict(found) if found and conforms(found, Mapping[str, float]) else None


def _rises(column: str) -> bool:
    return not column.endswith("loss") and not lower_is_better(column.removeprefix("held-out "))


def _known(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")
