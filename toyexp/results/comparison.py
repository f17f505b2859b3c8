"""Runs side by side: what differs in their settings, and how well each choice did, over its seeds."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from toyexp.base.formatting import display_path, short_keys, short_path
from toyexp.results.events import start_of
from toyexp.results.found import DONE, Run, settings
from toyexp.results.ranking import ASIDE, METRIC, Ranking, ranked
from toyexp.training.provenance import read_origin

DIGEST = " digest"  # behind a role of sources: the column that tells runs of different data or bases apart
WHOSE = "whose"  # the column that tells equal runs of different people apart
PARTS = ("recipe", "model", "data", "engine", "optim")  # what is chosen by name leads what it brings along
# What may differ between two runs of one choice: their numbers do not depend on it, or only as on a seed.
OF_ONE_CHOICE = ("seed", "name", "plugins", "callbacks", "checkpoint_every", "checkpoint_keep")


@dataclass
class Entry:
    """A run among others; `overrides` are the settings by which its point differs from other points."""

    number: int
    run: Run
    settings: Mapping[str, str]
    overrides: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        run = self.run
        self.is_known = bool(self.settings)  # else nobody can say of which point it is
        done = "completed" if run.state in DONE else run.state
        self.status = done if self.is_known else "unknown"  # whether its numbers count
        scores = {"train_loss": run.train_loss, "eval_loss": run.loss, "eval_scores": run.scores}
        self.result: dict[str, Any] = {**scores, "sources": self.sources}  # as result.json has them

    @cached_property
    def facts(self) -> dict[str, Any]:
        """What its first event tells of data, engine and machine."""
        return start_of(self.run.path)

    @cached_property
    def sources(self) -> Mapping[str, str]:
        """Return the digests of data and files by role; those of a run that recorded none, by the facts of its data."""
        return read_origin(self.run.path).sources


@dataclass
class Comparison:
    """Runs, in points that differ in more than their seed, the best first."""

    entries: list[Entry]
    keys: list[str]  # by which points differ, those that say the same as another left out
    along: dict[str, list[str]]  # and those, under the one that leads them
    also: list[str]  # what differs and makes no other point
    ranking: Ranking[Entry]
    metric: str = "loss"
    pooled: bool = False  # equal runs of different people are one
    left_from: int = 0  # runs that there are, where these are the best of them
    unasked: list[str] = field(default_factory=list)  # which runs the filters could not ask, and which links lead away

    @classmethod
    def of(cls, runs: Iterable[Run], metric: str = "loss", pooled: bool = False) -> Comparison:
        """Compare runs by a held-out score, or by the training loss if no run has it.

        Unless `pooled`, equal runs that lie in different directories or have different names are different points.
        """
        entries = [Entry(number, run, _settings(run)) for number, run in enumerate(runs)]
        _mark_sources(entries)
        if not pooled:
            _mark_owners(entries)
        differ = differing([entry.settings for entry in entries])
        keys, along = led([key for key in differ if key not in OF_ONE_CHOICE], entries)
        every = [*keys, *(key for some in along.values() for key in some)]
        for entry in entries:
            entry.overrides = [f"{key}={entry.settings[key]}" for key in keys if key in entry.settings]
            if not entry.is_known:
                entry.overrides = [f"unknown, of {entry.run.path.name}"]
        also = [key for key in differ if key not in every]
        return cls(entries, keys, along, also, ranked(entries, [METRIC + metric], seed_of), metric, pooled)

    def best(self, most: int) -> Comparison:
        """At most so many of these runs, the best ones."""
        if len(self.entries) <= most:
            return self
        some = Comparison.of((entry.run for entry, _ in self.ranking.jobs()[:most]), self.metric, self.pooled)
        some.left_from, some.unasked = len(self.entries), self.unasked
        return some

    def values(self, key: str) -> list[str]:
        """The values that a setting has among these runs."""
        return list(dict.fromkeys(e.settings[key] for e in self.entries if key in e.settings))

    @property
    def every_key(self) -> list[str]:
        """All settings that differ between these runs."""
        return [*self.keys, *(key for some in self.along.values() for key in some), *self.also]

    @property
    def scores(self) -> list[str]:
        """What the models report beside the held-out loss."""
        return list(dict.fromkeys(name for entry in self.entries for name in entry.run.scores))

    def label(self, entry: Entry, brief: bool = False) -> str:
        """Return what tells a point apart, with the last words of keys; a `brief` one names chosen parts by value."""
        pairs = zip(self.keys, short_keys(self.keys), strict=True)
        values = [(key, word, entry.settings[key]) for key, word in pairs if key in entry.settings]
        words = [value if brief and key in PARTS else f"{word}={value}" for key, word, value in values]
        return "  ".join(words) or entry.run.name

    def notes(self) -> list[str]:
        """What has to be known before the numbers are believed."""
        told = [f"the best {len(self.entries)} of {self.left_from} runs are shown"] if self.left_from else []
        told += self.ranking.notes()
        if changed := [key for key in self.keys if key.endswith(DIGEST)]:
            told.append(f"runs of equal settings read different files ({', '.join(changed)}): they are counted apart")
        if WHOSE in self.keys:
            told.append(f"equal runs of different directories or names are counted apart ({WHOSE}); together: --pool")
        told += self.unasked
        lengths = {entry.run.of for entry in self.entries if entry.run.of is not None}
        if len(lengths) > 1 and "steps" not in self.keys:
            told.append(f"they were to take {' or '.join(map(str, sorted(lengths)))} steps")
        if versions := _several(entry.facts.get("backend", {}).get("framework") for entry in self.entries):
            told.append(f"several versions: {versions}")
        if hosts := _several(entry.facts.get("host", {}).get("name") for entry in self.entries):
            told.append(f"several machines: {hosts}; their speeds do not compare")
        if repeats := sum(point.repeats for point in self.ranking.points):
            more = "a run repeats another's" if repeats == 1 else f"{repeats} runs repeat others'"
            told.append(f"{more} settings and seed: runs of one seed count as one, with their mean")
        for entry in self.entries:
            if why := entry.run.unread or ("" if entry.is_known else "whose config.yaml cannot be read"):
                told.append(f"not {'read' if entry.is_known else 'counted'}: {short_path(entry.run.path)}, {why}")
        bad = [entry.run for entry in self.entries if entry.run.state not in DONE and entry.is_known]
        for state in dict.fromkeys(run.state for run in bad):
            some = [run for run in bad if run.state == state]
            # Why each was pruned is the search's business, and of what failed the first says most.
            why = some[0].why if state != "pruned" else ""
            first = "the first: " if len(some) > 1 else ""
            told.append(f"not counted: {len(some)} {state}" + (f" ({first}{why})" if why else ""))
        return told


def differing(each: Sequence[Mapping[str, str]]) -> list[str]:
    """The settings that have several values among the runs that have them, choices by name first, then in their order.

    What only some have, as recipe.rank of recipe=lora, is no difference between those that have it.
    """
    keys = list(dict.fromkeys(key for one in each for key in one))
    found = [key for key in keys if len({one[key] for one in each if key in one}) > 1]
    return [key for key in PARTS if key in found] + [key for key in found if key not in PARTS]


def led(keys: Sequence[str], entries: Sequence[Entry]) -> tuple[list[str], dict[str, list[str]]]:
    """Keys that tell runs apart in different ways, and behind each those that do it in the same."""
    leaders: dict[tuple[int, ...], str] = {}
    along: dict[str, list[str]] = {}
    for key in keys:
        seen: dict[str | None, int] = {}
        pattern = tuple(seen.setdefault(entry.settings.get(key), len(seen)) for entry in entries)
        leader = leaders.setdefault(pattern, key)
        if leader != key:
            along.setdefault(leader, []).append(key)
    return list(leaders.values()), along


def _mark_sources(entries: Sequence[Entry]) -> None:
    """Give runs whose data or files differ a setting of that name, so that no point pools them."""
    roles = dict.fromkeys(role for entry in entries for role in entry.sources if role not in ASIDE)
    for role in roles:
        if len({entry.sources[role] for entry in entries if role in entry.sources}) > 1:
            for entry in entries:
                own = {role + DIGEST: entry.sources[role][:8]} if role in entry.sources and entry.is_known else {}
                entry.settings = {**entry.settings, **own}


def _mark_owners(entries: Sequence[Entry]) -> None:
    """Give runs a setting that says whose they are, if equal runs are repeats or were begun in different directories.

    Whose: the name, if repeats differ in it, else the directory, or zip archive, below the one that holds all runs. Of
    runs that lie side by side it is the directory they were begun in. If they recorded none, seeds are one person's.
    """
    known = [entry for entry in entries if entry.is_known]
    groups: dict[str, list[Entry]] = {}
    seeds: dict[tuple[str, object], list[Entry]] = {}
    for entry in known:
        alike = repr([pair for pair in entry.settings.items() if pair[0] not in OF_ONE_CHOICE])
        groups.setdefault(alike, []).append(entry)
        seeds.setdefault((alike, seed_of(entry)), []).append(entry)
    same = list(seeds.values())
    moved = [some for some in groups.values() if len({str(entry.facts.get("cwd")) for entry in some}) > 1]
    owners = {entry.number: entry.run.name for entry in known}
    if known and not any(len({owners[entry.number] for entry in some}) > 1 for some in same):
        places = {entry.number: Path.cwd() / display_path(entry.run.path.absolute()) for entry in known}
        top = os.path.commonpath([place.parent for place in places.values()])
        parts = {number: place.relative_to(top).parts for number, place in places.items()}
        owners = {number: some[0] for number, some in parts.items()}
        begun = {entry.number: str(entry.facts.get("cwd", "-")) for entry in known}
        if all(len(some) == 1 for some in parts.values()) and ({*begun.values()} != {"-"} or len(same) > len(groups)):
            owners, moved = begun, []
    if any(len({owners[entry.number] for entry in some}) > 1 for some in (*same, *moved)):
        for entry in known:
            entry.settings = {**entry.settings, WHOSE: owners[entry.number]}


def _settings(run: Run) -> dict[str, str]:
    """As config.yaml has them, but for engine=auto, in place of which stands what it took."""
    found = settings(run.path)
    return {**found, "engine": run.engine} if found.get("engine") == "auto" and run.engine else found


def seed_of(entry: Entry) -> object:
    """What runs of one point that are repeats of each other have in common."""
    return ("seed", entry.settings["seed"]) if "seed" in entry.settings else entry.number


def _several(values: Iterable[Any]) -> str:
    known = sorted({str(value) for value in values if value})
    return ", ".join(known) if len(known) > 1 else ""
