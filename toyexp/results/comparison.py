"""Compare runs: find the settings that differ, and average each combination of settings over its seeds."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from toyexp.base.formatting import display_path, pluralise, short_keys, short_path
from toyexp.results.events import read_run_facts
from toyexp.results.ranking import METRIC, TOO_LARGE, UNCOMPARED_DIGESTS, Ranking, rank_jobs
from toyexp.results.run_dirs import FINAL_STATES, Run, setting_texts
from toyexp.training.provenance import read_origin

DIGEST = " digest"  # suffix of the column that separates runs with different data or base files
WHOSE = "whose"  # column that separates equal runs of different people
# Parts, listed before the settings that depend on them.
PARTS = ("recipe", "model", "data", "engine", "optim", "objective")
# Runs that differ only in these settings form one point: results do not depend on them, or only as on a seed.
POOLED_KEYS = ("seed", "name", "plugins", "callbacks", "checkpoint_every", "checkpoint_keep")
MAX_NAMED_TOGETHER = 3  # settings that vary together and are all named in a label


@dataclass
class Entry:
    """A run in a comparison.

    `overrides`, such as ["lr=0.1"], holds this run's values of the settings that differ between the compared runs. The
    seed is not among them.
    """

    number: int
    run: Run
    settings: Mapping[str, str]
    overrides: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        run = self.run
        self.has_settings = bool(self.settings)  # if not, its point is unknown
        status = "completed" if run.state in FINAL_STATES else run.state
        self.status = status if self.has_settings else "unknown"  # "completed" if its numbers count
        numbers = {"steps": run.steps, "train_loss": run.train_loss, "eval_loss": run.loss, "eval_scores": run.scores}
        # with the keys of result.json
        self.result: dict[str, Any] = {**numbers, "sources": self.sources, "diverged": run.state == "diverged"}

    @cached_property
    def facts(self) -> dict[str, Any]:
        """Facts about the run's data, engine and machine, from the first event in its events.jsonl."""
        return read_run_facts(self.run.path)

    @cached_property
    def sources(self) -> Mapping[str, str]:
        """Digests of the data and files that the run read. The keys name what was read: `data`, `base`, ..."""
        return read_origin(self.run.path).sources


@dataclass
class Comparison:
    """Comparison of runs. Runs that differ only in their seed form a point; points are ranked, the best first."""

    entries: list[Entry]
    keys: list[str]  # settings that differ between points; of settings that vary together only the first
    linked_keys: dict[str, list[str]]  # settings that vary together with one of `keys`
    other_keys: list[str]  # settings that differ but form no separate points (POOLED_KEYS)
    ranking: Ranking[Entry]
    metric: str = "loss"
    pool: bool = False  # put runs with equal settings into one point, although different people ran them
    total_runs: int = 0  # number of runs before the best were selected; 0: all are here
    selection_notes: list[str] = field(default_factory=list)  # runs that filters could not read, skipped links

    @classmethod
    def build(cls, runs: Iterable[Run], metric: str = "loss", pool: bool = False) -> Comparison:
        """Compare runs by a held-out metric, or by the training loss if no run has the metric.

        Runs with equal settings in different directories or with different names form different points, unless `pool`
        is True.
        """
        entries = [Entry(number, run, _read_settings(run)) for number, run in enumerate(runs)]
        _mark_sources(entries)
        if not pool:
            _mark_owners(entries)
        differ = varying_keys([entry.settings for entry in entries])
        keys, linked = group_keys([key for key in differ if key not in POOLED_KEYS], entries)
        varying = [*keys, *(key for group in linked.values() for key in group)]
        for entry in entries:
            entry.overrides = [f"{key}={entry.settings[key]}" for key in keys if key in entry.settings]
            if not entry.has_settings:
                entry.overrides = [f"unknown, of {entry.run.path.name}"]
        other_keys = [key for key in differ if key not in varying]
        return cls(entries, keys, linked, other_keys, rank_jobs(entries, [METRIC + metric], seed_key), metric, pool)

    def best(self, most: int) -> Comparison:
        """Return a comparison of the best `most` runs."""
        if len(self.entries) <= most:
            return self
        best_runs = Comparison.build((entry.run for entry, _ in self.ranking.jobs()[:most]), self.metric, self.pool)
        best_runs.total_runs, best_runs.selection_notes = len(self.entries), self.selection_notes
        return best_runs

    def values(self, key: str) -> list[str]:
        """Return the different values that a setting has in these runs."""
        return list(dict.fromkeys(e.settings[key] for e in self.entries if key in e.settings))

    @property
    def every_key(self) -> list[str]:
        """Settings that differ between these runs."""
        return [*self.keys, *(key for group in self.linked_keys.values() for key in group), *self.other_keys]

    @property
    def scores(self) -> list[str]:
        """Names of the held-out metrics other than the loss."""
        return list(dict.fromkeys(name for entry in self.entries for name in entry.run.scores))

    def named_together(self, key: str) -> list[str]:
        """Return the keys that a label names together: `key`, and keys whose values always change together with it.

        If these are more than MAX_NAMED_TOGETHER keys, return only `key` and, if it is one of them, `lr`. If `key` is a
        part, such as model, its own settings, such as model.width, are left out. Digests and the column `whose` are
        left out too.
        """
        linked = [
            other for other in self.linked_keys.get(key, []) if not other.endswith(DIGEST) and other != WHOSE
            and not (key in PARTS and other.startswith(f"{key}."))
        ]  # fmt: skip
        return [key, *(linked if len(linked) < MAX_NAMED_TOGETHER else [other for other in linked if other == "lr"])]

    def label(self, entry: Entry, brief: bool = False) -> str:
        """Return the label of a run's point: its settings that differ from other points, such as `lr=0.01  rank=8`.

        If `brief`, models, recipes and other parts have only their name, without `model=` or `recipe=`.
        """
        keys = [name for key in self.keys for name in self.named_together(key)]
        pairs = zip(keys, short_keys(keys), strict=True)
        values = [(key, word, entry.settings[key]) for key, word in pairs if key in entry.settings]
        parts = [value if brief and key in PARTS else f"{word}={value}" for key, word, value in values]
        return "  ".join(parts) or entry.run.name

    def notes(self) -> list[str]:
        """Return notes about differences that make the numbers hard to compare."""
        notes = [f"the best {len(self.entries)} of {self.total_runs} runs are shown"] if self.total_runs else []
        notes += self.ranking.notes()
        if changed := [key for key in self.keys if key.endswith(DIGEST)]:
            notes.append(f"equal settings with different files ({', '.join(changed)}) form separate points")
        if WHOSE in self.keys:
            notes.append(
                f"equal settings of different people form separate points (column {WHOSE}); to combine them: --pool"
            )
        notes += self.selection_notes
        lengths = {entry.run.of for entry in self.entries if entry.run.of is not None}
        if len(lengths) > 1 and "steps" not in self.keys:
            notes.append(f"runs were planned with {' or '.join(map(str, sorted(lengths)))} steps")
        if versions := _join_if_several(entry.facts.get("backend", {}).get("framework") for entry in self.entries):
            notes.append(f"several versions: {versions}")
        if hosts := _join_if_several(entry.facts.get("host", {}).get("name") for entry in self.entries):
            notes.append(f"several machines: {hosts}; their speeds cannot be compared")
        if repeats := sum(point.repeats for point in self.ranking.points):
            more = "a run repeats another's" if repeats == 1 else f"{repeats} runs repeat others'"
            notes.append(f"{more} settings and seed: runs of one seed count as one, with their mean")
        for entry in self.entries:
            if why := entry.run.unread or ("" if entry.has_settings else "whose config.yaml cannot be read"):
                notes.append(f"not {'read' if entry.has_settings else 'counted'}: {short_path(entry.run.path)}, {why}")
        values = [{"loss": e.run.loss, "ppl": e.run.loss, **e.run.scores}.get(self.metric) for e in self.entries]
        if infinite := sum(abs(value or 0.0) >= TOO_LARGE for value in values):
            notes.append(f"a held-out {self.metric} beyond {TOO_LARGE:g} does not count: {pluralise(infinite, 'run')}")
        return [*notes, *self.unranked_notes().values()]

    def unranked_notes(self) -> dict[str, str]:
        """Return {state: note} for the states of runs that are not ranked; a note counts the runs in its state."""
        notes = {}
        incomplete = [entry.run for entry in self.entries if entry.run.state not in FINAL_STATES and entry.has_settings]
        for state in dict.fromkeys(run.state for run in incomplete):
            state_runs = [run for run in incomplete if run.state == state]
            # For failed runs the first reason says most; reasons for pruning are not repeated.
            why = state_runs[0].why if state != "pruned" else ""
            first = "the first: " if len(state_runs) > 1 else ""
            count = pluralise(len(state_runs), f"{state} run") + (" are" if first else " is")
            notes[state] = f"{count} not ranked" + (f" ({first}{why})" if why else "")
        return notes


def varying_keys(run_settings: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the keys of the settings that differ between runs; `run_settings` holds the settings of each run.

    Keys of parts, such as `model`, come first. A setting does not differ merely because some runs lack it. For example,
    only runs with recipe=lora have recipe.rank.
    """
    keys = list(dict.fromkeys(key for settings in run_settings for key in settings))
    varying = [key for key in keys if len({settings[key] for settings in run_settings if key in settings}) > 1]
    return [key for key in PARTS if key in varying] + [key for key in varying if key not in PARTS]


def group_keys(keys: Sequence[str], entries: Sequence[Entry]) -> tuple[list[str], dict[str, list[str]]]:
    """Group keys whose values always change together: whenever one of them differs between two runs, all of them do.

    Return the first key of each group. Also return a dict that maps the first key to the other keys of its group, if
    there are any.
    """
    leaders: dict[tuple[int, ...], str] = {}
    linked_keys: dict[str, list[str]] = {}
    for key in keys:
        values: dict[str | None, int] = {}
        pattern = tuple(values.setdefault(entry.settings.get(key), len(values)) for entry in entries)
        leader = leaders.setdefault(pattern, key)
        if leader != key:
            linked_keys.setdefault(leader, []).append(key)
    return list(leaders.values()), linked_keys


def _mark_sources(entries: Sequence[Entry]) -> None:
    """If runs read different data or files, add digests of the data and files to the settings of the runs.

    Runs that read different files then have different settings and are not averaged.
    """
    roles = dict.fromkeys(role for entry in entries for role in entry.sources if role not in UNCOMPARED_DIGESTS)
    for role in roles:
        readers = [entry for entry in entries if role in entry.sources]
        if len({entry.sources[role] for entry in readers}) > 1:
            for entry in readers:
                if entry.has_settings:
                    entry.settings = {**entry.settings, role + DIGEST: entry.sources[role][:8]}


def _mark_owners(entries: Sequence[Entry]) -> None:
    """Add the setting `whose` to the runs, so that runs of different people do not count as repeats of one run.

    The value for a run is the first of these that applies:

    - the run's name, if any runs with equal settings and seed have different names
    - if the runs lie in different directories: the first directory (or zip archive) on the path from their common
      parent directory to the run
    - the directory in which the run was started, if any run recorded such a directory, or if any runs with equal
      settings have different seeds
    - the name of the run's own directory

    The setting is added only if it differs between runs with equal settings and seed. If the runs lie in different
    directories, it is also added if it differs between runs that have equal settings but were started in different
    directories.
    """
    known_entries = [entry for entry in entries if entry.has_settings]
    groups: dict[str, list[Entry]] = {}
    seeds: dict[tuple[str, object], list[Entry]] = {}
    for entry in known_entries:
        group_key = repr([pair for pair in entry.settings.items() if pair[0] not in POOLED_KEYS])
        groups.setdefault(group_key, []).append(entry)
        seeds.setdefault((group_key, seed_key(entry)), []).append(entry)
    seed_groups = list(seeds.values())
    moved_groups = [group for group in groups.values() if len({str(entry.facts.get("cwd")) for entry in group}) > 1]
    owners = {entry.number: entry.run.name for entry in known_entries}
    if known_entries and not any(len({owners[entry.number] for entry in group}) > 1 for group in seed_groups):
        run_paths = {entry.number: Path.cwd() / display_path(entry.run.path.absolute()) for entry in known_entries}
        top = os.path.commonpath([path.parent for path in run_paths.values()])
        parts = {number: path.relative_to(top).parts for number, path in run_paths.items()}
        owners = {number: names[0] for number, names in parts.items()}
        start_directories = {entry.number: str(entry.facts.get("cwd", "-")) for entry in known_entries}
        if all(len(names) == 1 for names in parts.values()) and (
            {*start_directories.values()} != {"-"} or len(seed_groups) > len(groups)
        ):
            owners, moved_groups = start_directories, []
    if any(len({owners[entry.number] for entry in group}) > 1 for group in (*seed_groups, *moved_groups)):
        for entry in known_entries:
            entry.settings = {**entry.settings, WHOSE: owners[entry.number]}


def _read_settings(run: Run) -> dict[str, str]:
    """Return the settings of a run by key. For engine=auto, return the engine that was chosen.

    The key `schedule` is added. Its value names the callbacks that scale the learning rate or another number. Other
    callbacks are not compared: runs that differ only in these count as runs with equal settings.
    """
    settings = dict(setting_texts(run.path))
    if settings.get("engine") == "auto" and run.engine:
        settings["engine"] = run.engine
    parts = (key.split(".") for key in settings)
    schedules = [part[1] for part in parts if part[0] == "callbacks" and part[-1] == "scales"]
    return {**settings, "schedule": ",".join(schedules)} if schedules else settings


def seed_key(entry: Entry) -> object:
    """Return a key that is equal for runs with the same seed. A run whose seed is unknown gets a key of its own."""
    return ("seed", entry.settings["seed"]) if "seed" in entry.settings else entry.number


def _join_if_several(values: Iterable[Any]) -> str:
    names = sorted({str(value) for value in values if value})
    return ", ".join(names) if len(names) > 1 else ""
