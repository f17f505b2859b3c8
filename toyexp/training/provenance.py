"""Provenance: digests of a run's data and source files, and the directory where it was started."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toyexp.base.attribution import call_checked
from toyexp.base.errors import RunFailed, UserError, printable
from toyexp.base.files import open_file, system_message, working_directory
from toyexp.base.ownership import cached_fingerprint
from toyexp.interfaces.recipe import Recipe
from toyexp.interfaces.run_preview import is_changed
from toyexp.training.checkpoint import ARRAYS, MANIFEST, STATE, read_json, read_json_or_empty, read_result
from toyexp.training.run_config import Prepared

DIGEST = re.compile(r"_?(sha256|digest)$")  # keys of digests among the facts of a data set
NAMES = ("tokenizer", "classes")  # digests that say what ids mean; they do not affect batches
MAX_EVENT_BYTES = 1 << 20  # of the first event
# Settings that a resumed run may change if a file was moved, and the digests that identify the file.
MOVED = {
    "data.path": ("text", "images", "tokens"), "recipe.base": ("base",), "recipe.donor": ("donor",),
    "objective.teacher": ("teacher",),
}  # fmt: skip


def source_files(recipe: Recipe) -> dict[str, Path]:
    """Return the paths of the files that a recipe reads.

    A key is the file's purpose: base, vocabulary, or donor (the file whose embedding a new model copies). The key of
    other files is their name.
    """
    base, vocabulary = recipe.base_file(), recipe.vocabulary()
    role = recipe.starts_from if recipe.starts_from and base is None else "vocabulary"
    by_role = {"base": base, role: None if vocabulary == base else vocabulary}
    return {k: p for k, p in by_role.items() if p is not None} | {p.name: p for p in recipe.further_files()}


def data_digests(facts: Mapping[str, Any]) -> dict[str, str]:
    """Return the digests in `facts`, the description of a dataset, keyed by their subject: `text`, `tokenizer`, ...

    The result also has the key `data`: a digest of everything in the description that affects batches.
    """
    digests = {DIGEST.sub("", key) or key: str(v)[:16] for key, v in facts.items() if DIGEST.search(key) and v}
    relevant: dict[str, Any] = {role: digest for role, digest in digests.items() if role not in NAMES}
    if relevant:
        relevant |= {key: value for key, value in facts.items() if key.startswith(("train_", "held_out_"))}
    else:
        relevant = {key: value for key, value in facts.items() if key not in ("name", "path", "left_out")}
    text = json.dumps(relevant, sort_keys=True, default=str)
    return {**digests, "data": hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:16]}


def source_digests(prepared: Prepared) -> dict[str, str]:
    """Return the digests of a run's data, of the files that it reads, and of its held-out loss, keyed by their subject.

    A loss that is a cross-entropy has no digest.

    Raise UserError if a file cannot be read.
    """
    facts = call_checked(Mapping, prepared.dataset.describe, who=f"data.{prepared.config.data.name}")
    objective = prepared.config.objective
    try:
        files = source_files(prepared.config.recipe)
        if teacher := objective.model_file():
            files["teacher"] = teacher
        digests = {role: cached_fingerprint(path) for role, path in files.items()}
    except OSError as error:
        raise UserError(f"{error.filename}: cannot be read: {system_message(error)}") from None
    if not objective.in_nats:
        changed = sorted(key for key in objective.settings() if key != "auxiliary" and is_changed(objective, key))
        text = f"{objective.name} {[(key, getattr(objective, key)) for key in changed]}"
        digests["loss"] = hashlib.sha256(text.encode()).hexdigest()[:16]
    return {**data_digests(facts), **digests}


def require_same_file(base: Path, status: os.stat_result, digest: str) -> None:
    """Raise RunFailed if the memory-mapped file `base` was modified during the run.

    `status` is the os.stat() of the file at the start of the run, and `digest` is its fingerprint at that time. A file
    that was replaced or deleted is not checked.
    """
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(base.stat(), status) and cached_fingerprint(base) != digest:
            raise RunFailed(f"{base}: was modified while the run read it, so its results are invalid; "
                            "restore that file and start a new run")  # fmt: skip


def origin_facts(prepared: Prepared) -> dict[str, Any]:
    """Return the facts that a run records about its origin.

    The keys are `cwd`, the directory where the run was first started; `typed`, the settings that the user typed, if
    they suffice to repeat the run without a configuration file; and `sources`, the digests of its data and files.
    """
    config = prepared.config
    typed = {"typed": [*config.typed]} if config.typed else {}
    return {"cwd": str(config.cwd or working_directory()), **typed, "sources": source_digests(prepared)}


@dataclass(frozen=True)
class Origin:
    """Origin of a run: the directory where it was started, and the digests of its data and files."""

    cwd: Path | None = None  # directory where the run was started
    sources: Mapping[str, str] = field(default_factory=dict)  # digests by role

    def resolve(self, typed: str) -> str:
        """Return `typed`, a path or glob pattern from the run's settings, in a form valid in the current directory.

        A relative path that exists below the run's `cwd` becomes absolute, unless it leads to the same file from the
        current directory. Other paths are returned unchanged.
        """
        if self.cwd is None or not typed or Path(typed).is_absolute():
            return typed
        path, pattern = self.cwd / typed, f"{glob.escape(str(self.cwd))}/{typed}"
        if os.path.lexists(path):
            is_same = path.exists() and Path(typed).exists() and path.samefile(typed)
            return typed if is_same else str(path)
        match = glob.has_magic(typed) and next(glob.iglob(pattern, recursive=True), None)  # noqa: PTH207
        return pattern if match else typed

    @contextlib.contextmanager
    def explain_missing_paths(self, moved: Collection[str] = ()) -> Iterator[None]:
        """In the `with` block, add to a UserError about a missing path how to find the file.

        If the path is relative, and the run was started in another directory, the message names that directory. If the
        path is the value of one of the settings `moved`, the message suggests setting the new path.
        """
        try:
            yield
        except UserError as error:
            if self.cwd and re.search("not found|matches no file", str(error)):
                cwd = printable(str(self.cwd), 500) + ("" if self.cwd.is_dir() else ", which no longer exists")
                key, _, path = str(error).partition(": ")[0].partition("=")
                started = f"; the run was started in {cwd}; cd to where its files are now"
                start = "" if Path(path or key).is_absolute() or self.cwd == working_directory() else started
                error.args = (f"{error}{start}" + (f"; if it was moved, type {key}=PATH" if key in moved else ""),)
            raise

    def list_changes(self, now: Mapping[str, str]) -> list[str]:
        """Return a clause for each digest that differs between this origin and the current digests `now`.

        A digest that is missing in this origin or in `now` is ignored.
        """
        changed_roles = [role for role in now if role in self.sources and self.sources[role] != now[role]]
        names = [("" if "." in role else "the ") + printable(role) for role in changed_roles]  # or a file's name
        return [f"the contents of {name} changed" for name in names]


def read_origin(path: Path) -> Origin:
    """Read the origin in a checkpoint or run directory. Return an empty Origin if none can be read."""
    facts = read_json_or_empty(path / STATE) if (path / STATE).is_file() else read_result(path)
    return parse_origin(facts if facts.get("sources") else read_first_event(path))


def parse_origin(facts: Mapping[str, Any]) -> Origin:
    """Return the origin of a run from `facts`: a checkpoint's state, a result.json or the event run_start."""
    sources, data, cwd = (facts.get(key) for key in ("sources", "data", "cwd"))
    if not sources and isinstance(data, Mapping) and data:
        sources = data_digests(data)
    digests = {k: v for k, v in sources.items() if isinstance(v, str)} if isinstance(sources, Mapping) else {}
    return Origin(Path(cwd) if isinstance(cwd, str) and Path(cwd).is_absolute() else None, digests)


def read_first_event(run: Path) -> dict[str, Any]:
    """Return the first event of a run; {} if it cannot be read."""
    try:
        with open_file(run / "events.jsonl") as file:
            event = json.loads(file.readline(MAX_EVENT_BYTES))
    except (UserError, OSError, ValueError, RecursionError):
        return {}
    return event if isinstance(event, dict) else {}


def is_own_checkpoint(path: Path) -> bool:
    """Return True if the run whose directory contains the checkpoint `path` wrote this checkpoint.

    Return False if `path` also contains other files.
    """
    try:
        read_json(path / MANIFEST)
        require_own_checkpoint(path, read_json(path / STATE))
    except UserError:
        return False
    return not path.is_symlink() and {entry.name for entry in path.iterdir()} <= {MANIFEST, STATE, ARRAYS}


def require_own_checkpoint(path: Path, state: Mapping[str, Any]) -> None:
    """Raise UserError if the checkpoint at `path` was not written by the run whose directory contains it.

    `state` is the checkpoint's state. Its digests and its seed are compared with those in the run's first event.
    """
    start = read_first_event(path.absolute().parents[1])
    run_origin, saved_origin = parse_origin(start), parse_origin(state)
    changes = run_origin.list_changes(saved_origin.sources)
    if run_origin.sources and saved_origin.sources:
        roles = {"base", "donor"} & {*run_origin.sources} ^ {"base", "donor"} & {*saved_origin.sources}
        changes += [f"only one of them has a {role}" for role in sorted(roles)]
    seeds = [config.get("seed") for part in (start, state) if isinstance(config := part.get("config"), Mapping)]
    if len(seeds) == 2 and seeds[0] != seeds[1]:
        changes.append(f"seed was {printable(str(seeds[0]))} and is {printable(str(seeds[1]))}")
    if changes:
        raise UserError(f"{path}: is a checkpoint of another run: {changes[0]}; restore the run's own, or remove it")
