"""A search as a picture that one would print: its scores, trial by trial, and against each setting that it chose."""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toyexp.base.drawing import BLUE, GREY, SMALL, TITLE_LENGTH, VERMILLION, Sheet, fit_text, set_log_scale
from toyexp.base.errors import UserError
from toyexp.base.formatting import format_value, pluralise, short_keys
from toyexp.interfaces.model import lower_is_better
from toyexp.results.found import words_of
from toyexp.training.checkpoint import matches_type, read_json_or_empty

FILE = "search.json"
PANELS = 6  # settings that are shown: those that matter most
ACROSS = 3  # panels in a row
NAMES = 12  # values that are no numbers, of one setting
MANY = 500  # trials, from which on an SVG has their dots as a picture


@dataclass(frozen=True)
class Trial:
    """A point of a search."""

    number: int
    values: Mapping[str, Any]
    done: bool  # it came to its end
    score: float | None  # at its end, or where it was stopped


@dataclass(frozen=True)
class Search:
    """What a search found, as its directory keeps it."""

    how: str  # tpe, random, ...
    metric: str
    repeats: int
    trials: Sequence[Trial]
    importances: Mapping[str, float]
    no_importances: str  # why there are none
    notes: Sequence[str]  # why scores do not compare
    by_magnitude: Set[str]  # settings that were drawn so, as lr=tag(log, interval(1e-4, 1e-1))

    @classmethod
    def of(cls, place: Path) -> Search | None:
        """What is kept in the directory of a search that has ended; None of any other."""
        told = {"notes": [], "no_importances": "", "trials": [], **read_json_or_empty(place / FILE)}
        hints = {"search": str, "metric": str, "repeats": int, "importances": Mapping[str, float], "notes": list[str],
                 "no_importances": str, "trials": list[Mapping[str, Any]]}  # fmt: skip
        of_each = {"trial": int, "values": Mapping[str, Any], "state": str, "score": float | int | None}
        if not all(matches_type(told.get(name), hint) for name, hint in hints.items()):
            return None
        if not all(matches_type(one.get(name), hint) for one in told["trials"] for name, hint in of_each.items()):
            return None
        trials = [
            Trial(one["trial"], one["values"], one["state"] == "complete", one["score"]) for one in told["trials"]
        ]
        parted = [line.partition("=") for line in words_of(place, "space")]
        by_magnitude = {key.lstrip("+") for key, _, value in parted if re.match(r"tag\(\s*log\b", value)}
        return cls(
            told["search"], told["metric"], told["repeats"], trials, told["importances"], told["no_importances"],
            told["notes"], by_magnitude,
        )  # fmt: skip

    @property
    def keys(self) -> list[str]:
        """The settings that it chose, those that matter most first."""
        found = list(dict.fromkeys(key for trial in self.trials for key in trial.values))
        return sorted(found, key=lambda key: -self.importances.get(key, 0.0))

    @property
    def falls(self) -> bool:
        """Whether a lower score is better."""
        return lower_is_better(self.metric)


def drawn(search: Search, place: str) -> Sheet:
    """The picture; `place` is where the search is. UserError where no point has come to a score."""
    done = [trial for trial in search.trials if trial.done and trial.score is not None]
    if not done:
        raise UserError(f"{place}: no point of this search has a score yet; there is nothing to draw")
    best = (min if search.falls else max)(done, key=lambda trial: trial.score or 0.0)
    keys, names = search.keys[:PANELS], short_keys(search.keys)
    rows = -(-len(keys) // ACROSS)
    sheet = Sheet(0.5 + 3.2 + 2.4 * rows, _title(search), _below(search, place, keys), [3.2] + [2.4] * rows,
                  columns=[1] + [min(len(keys), ACROSS)] * rows)  # fmt: skip
    limits = _limits([trial.score for trial in done if trial.score is not None], search.falls)
    above, *panels = sheet.panels
    _over_trials(above, search, done, best, limits)
    for number, (axes, key) in enumerate(zip(panels, keys, strict=False)):
        _against(axes, search, key, names[number], best, limits, first=number % ACROSS == 0)
    for axes in panels[len(keys) :]:
        axes.set_visible(False)
    return sheet


def _title(search: Search) -> str:
    names, after = short_keys(search.keys), f": {pluralise(len(search.trials), 'trial')}"
    whole = f"{search.how} search of {', '.join(names)}{after}"
    return whole if len(whole) <= TITLE_LENGTH else f"{search.how} search of {len(names)} settings{after}"


def _below(search: Search, place: str, keys: Sequence[str]) -> str:
    told = [place, *search.notes, f"{search.repeats} seeds a trial, their mean" if search.repeats > 1 else ""]
    pruned = sum(not trial.done and trial.score is not None for trial in search.trials)
    without = sum(trial.score is None for trial in search.trials)
    told += [f"{pruned} stopped on their way (crosses)"] if pruned else []
    told += [f"{without} without a score"] if without else []
    told += [f"what matters is unknown: {search.no_importances}"] if search.no_importances else []
    left = [key for key in search.keys if key not in keys]
    told += [f"not shown: {', '.join(left)}"] if left else []
    return " · ".join(filter(None, told))


def _limits(scores: Sequence[float], falls: bool) -> tuple[float, float]:
    """From where to where scores are shown: those far from the better half of the others stand at the edge."""
    sign = 1 if falls else -1
    costs = sorted(sign * score for score in scores)
    best, middle = costs[0], statistics.median(costs)
    worst = max((cost for cost in costs if cost <= best + 4 * (middle - best)), default=best)
    pad = 0.06 * (worst - best) or 0.05 * abs(best) or 1.0
    low, high = sorted((sign * (best - 2.3 * pad), sign * (worst + pad)))  # beside the best stand words
    return low, high


def _points(axes: Any, places: Sequence[float], trials: Sequence[Trial], limits: tuple[float, float]) -> None:
    """A dot for each that came to its end, darker the later it was chosen, and a cross for each that did not.

    What is beyond the limits stands at the edge, a dot as an arrow.
    """
    low, high = limits
    last = max((trial.number for trial in trials), default=0) or 1
    drawn: dict[tuple[str, str, float], list[tuple[float, float, float]]] = {}
    for place, trial in zip(places, trials, strict=True):
        if trial.score is not None:
            beyond = "^" if trial.score > high else "v" if trial.score < low else ""
            how = (beyond or "o", BLUE, 20.0) if trial.done else ("x", GREY, 13.0)
            alpha = 0.25 + 0.75 * trial.number / last if trial.done else 0.3 if beyond else 0.7
            drawn.setdefault(how, []).append((place, min(max(trial.score, low), high), alpha))
    for (mark, colour, size), points in drawn.items():
        x, y, shades = zip(*points, strict=True)
        axes.scatter(x, y, marker=mark, s=size, color=colour, alpha=shades, linewidths=0.8 if mark == "x" else 0,
                     clip_on=False, rasterized=len(trials) > MANY)  # fmt: skip
    axes.set_ylim(low, high)


def _over_trials(
    axes: Any, search: Search, done: Sequence[Trial], best: Trial, limits: tuple[float, float]
) -> None:  # fmt: skip
    axes.margins(x=0.02)
    _points(axes, [trial.number for trial in search.trials], search.trials, limits)
    better = min if search.falls else max
    so_far = [*itertools.accumulate((trial.score for trial in done if trial.score is not None), better)]
    numbers = [trial.number for trial in done]
    last = max(trial.number for trial in search.trials)
    axes.step([*numbers, last], [*so_far, so_far[-1]], where="post", color=VERMILLION, linewidth=1.6)
    _star(axes, best.number, best)
    (low, high), down = limits, search.falls
    pairs = zip(search.keys, short_keys(search.keys), strict=True)
    words = " ".join(f"{name}={format_value(best.values[key])}" for key, name in pairs if key in best.values)
    # Below the best so far, or above it where scores rise, no point is: there is room for words.
    axes.text(0.01, 0.04 if down else 0.96, fit_text(f"best {best.score:.5g}, trial {best.number}: {words}", 96),
              transform=axes.transAxes, va="bottom" if down else "top", fontsize=SMALL, color=VERMILLION)  # fmt: skip
    beyond = [trial.score for trial in done if trial.score is not None and not low <= trial.score <= high]
    if beyond:
        far = f"up to {max(beyond):.4g}" if down else f"down to {min(beyond):.4g}"
        text = f"{len(beyond)} at the edge are beyond it, {far}"
        axes.text(0.99, 0.97 if down else 0.03, text, transform=axes.transAxes, ha="right",
                  va="top" if down else "bottom", fontsize=SMALL, color=GREY)  # fmt: skip
    axes.set_xlabel("trial")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_ylabel(f"held-out {search.metric}")


def _against(
    axes: Any, search: Search, key: str, name: str, best: Trial, limits: tuple[float, float], first: bool
) -> None:  # fmt: skip
    trials = [trial for trial in search.trials if key in trial.values]
    values = [trial.values[key] for trial in trials]
    if all(matches_type(value, float | int) for value in values):
        if key not in search.by_magnitude or not set_log_scale(axes, "x", values):
            axes.locator_params(axis="x", nbins=4)
        places = {trial.number: float(value) for trial, value in zip(trials, values, strict=True)}
    else:
        names = sorted({format_value(value) for value in values})[:NAMES]
        # Side by side within their value, in the order of the trials: many have one value.
        places = {
            trial.number: names.index(format_value(value)) + 0.5 * trial.number / max(len(search.trials) - 1, 1) - 0.25
            for trial, value in zip(trials, values, strict=True)
            if format_value(value) in names
        }
        labels = [fit_text(name, 14) for name in names]
        axes.set_xticks(range(len(labels)), labels, rotation=30 if sum(map(len, labels)) > 24 else 0)
        axes.set_xlim(-0.5, len(names) - 0.5)
    shown = [trial for trial in trials if trial.number in places]
    _points(axes, [places[trial.number] for trial in shown], shown, limits)
    if best.number in places:
        _star(axes, places[best.number], best)
    share = search.importances.get(key)
    matters = f" (matters {share:.0%})" if share is not None else ""
    axes.set_xlabel(f"{fit_text(name, 26)}{matters}")
    if first:
        axes.set_ylabel(f"held-out {search.metric}")
    else:
        axes.set_yticklabels([])


def _star(axes: Any, place: float, best: Trial) -> None:
    axes.plot(place, best.score, marker="*", markersize=12, color=VERMILLION, markeredgecolor="white",
              markeredgewidth=0.6, zorder=5, clip_on=False)  # fmt: skip
