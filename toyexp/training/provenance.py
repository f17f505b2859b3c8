"""Provenance: the data and the files that a run was made of, recorded as digests, and the directory it was begun in."""

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
from toyexp.training.checkpoint import ARRAYS, MANIFEST, STATE, read_json, read_json_or_empty, read_result
from toyexp.training.run_config import Prepared

DIGEST = re.compile(r"_?(sha256|digest)$")  # how a fact of the data that is a digest is named
NAMES = ("tokenizer", "classes")  # digests of what ids stand for, and not of the ids
LINE = 1 << 20  # bytes of the first event that are read
# Settings that a resumed run may change, as a file that was moved has a new path, and the digests that tell the file.
MOVED = {"data.path": ("text", "images", "tokens"), "recipe.base": ("base",), "recipe.donor": ("donor",)}


def source_files(recipe: Recipe) -> dict[str, Path]:
    """Return the files that the recipe reads by their roles: base, donor or vocabulary, and further ones by name."""
    base, vocabulary = recipe.base_file(), recipe.vocabulary()
    role = recipe.starts_from if recipe.starts_from and base is None else "vocabulary"
    named = {"base": base, role: None if vocabulary == base else vocabulary}
    return {k: p for k, p in named.items() if p is not None} | {p.name: p for p in recipe.further_files()}


def data_digests(facts: Mapping[str, Any]) -> dict[str, str]:
    """Return digests of the data by role (`text`, `tokenizer`, ...), and as `data` of all that decides its batches."""
    digests = {DIGEST.sub("", key) or key: str(v)[:16] for key, v in facts.items() if DIGEST.search(key) and v}
    told = {role: digest for role, digest in digests.items() if role not in NAMES}
    told |= {key: value for key, value in facts.items() if key.startswith(("train_", "held_out_"))} if told else {
        key: value for key, value in facts.items() if key not in ("name", "path", "left_out")
    }  # fmt: skip
    text = json.dumps(told, sort_keys=True, default=str)
    return {**digests, "data": hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:16]}


def source_digests(prepared: Prepared) -> dict[str, str]:
    """Return the digests of a run's data and files by role; UserError if a file cannot be read."""
    facts = call_checked(Mapping, prepared.dataset.describe, who=f"data.{prepared.config.data.name}")
    try:
        digests = {role: cached_fingerprint(path) for role, path in source_files(prepared.config.recipe).items()}
    except OSError as error:
        raise UserError(f"{error.filename}: cannot be read: {system_message(error)}") from None
    return {**data_digests(facts), **digests}


def require_unchanged(base: Path, then: os.stat_result, digest: str) -> None:
    """Raise RunFailed if `base`, a file that an engine reads in place, was written to since it had that digest."""
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(base.stat(), then) and cached_fingerprint(base) != digest:
            raise RunFailed(f"{base}: was written to while the run trained on it, so its numbers are of both contents; "
                            "put that file back and begin anew")  # fmt: skip


def origin_facts(prepared: Prepared) -> dict[str, Any]:
    """Return what a run records of its origin: `cwd`, which a resumed run keeps, and `sources`."""
    return {"cwd": str(prepared.config.cwd or working_directory()), "sources": source_digests(prepared)}


@dataclass(frozen=True)
class Origin:
    """What a run or a checkpoint says of its origin."""

    cwd: Path | None = None  # where the run was begun
    sources: Mapping[str, str] = field(default_factory=dict)  # digests by role

    def resolve(self, typed: str) -> str:
        """Return a path as typed where the run was begun: absolute if it is relative and leads somewhere from there."""
        if self.cwd is None or not typed or Path(typed).is_absolute():
            return typed
        there, pattern = self.cwd / typed, f"{glob.escape(str(self.cwd))}/{typed}"
        if os.path.lexists(there):
            same = there.exists() and Path(typed).exists() and there.samefile(typed)
            return typed if same else str(there)
        matched = glob.has_magic(typed) and next(glob.iglob(pattern, recursive=True), None)  # noqa: PTH207
        return pattern if matched else typed

    @contextlib.contextmanager
    def explain_missing_paths(self, moved: Collection[str] = ()) -> Iterator[None]:
        """Add the directory that the run was begun in to an error about a missing path; name a `moved` key."""
        try:
            yield
        except UserError as error:
            if self.cwd and re.search("not found|matches no file", str(error)):
                where = printable(str(self.cwd), 500) + ("" if self.cwd.is_dir() else ", which is gone")
                anew = f", or type {key}=PATH" if (key := str(error).partition("=")[0]) in moved else ""
                error.args = (f"{error}; the run was begun in {where}; cd to where its files are now{anew}",)
            raise

    def list_changes(self, now: Mapping[str, str]) -> list[str]:
        """Return which of the sources that both know are others now, each with both digests."""
        both = [role for role in now if role in self.sources and self.sources[role] != now[role]]
        return [f"{role} was {printable(self.sources[role])} and is {printable(now[role])}" for role in both]


def read_origin(path: Path) -> Origin:
    """Return what the checkpoint or run in the directory `path` says of its origin, as far as it can be read."""
    told = read_json_or_empty(path / STATE) if (path / STATE).is_file() else read_result(path)
    return parse_origin(told if told.get("sources") else read_first_event(path))


def parse_origin(told: Mapping[str, Any]) -> Origin:
    """Return what a checkpoint's state, a result or the event run_start says of the origin of a run."""
    sources, data, cwd = (told.get(key) for key in ("sources", "data", "cwd"))
    if not sources and isinstance(data, Mapping) and data:
        sources = data_digests(data)
    digests = {k: v for k, v in sources.items() if isinstance(v, str)} if isinstance(sources, Mapping) else {}
    return Origin(Path(cwd) if isinstance(cwd, str) and Path(cwd).is_absolute() else None, digests)


def read_first_event(run: Path) -> dict[str, Any]:
    """Return the first event of a run; empty if it cannot be read."""
    try:
        with open_file(run / "events.jsonl") as file:
            found = json.loads(file.readline(LINE))
    except (UserError, OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def is_own_checkpoint(path: Path) -> bool:
    """Return whether a readable checkpoint of the run that it lies in is at `path`, to which nobody added a file."""
    try:
        read_json(path / MANIFEST)
        require_own_checkpoint(path, read_json(path / STATE))
    except UserError:
        return False
    return not path.is_symlink() and {entry.name for entry in path.iterdir()} <= {MANIFEST, STATE, ARRAYS}


def require_own_checkpoint(path: Path, state: Mapping[str, Any]) -> None:
    """Raise UserError if the checkpoint in the directory `path` is of another run than the one that it lies in."""
    begun = read_first_event(path.absolute().parents[1])
    then, now = parse_origin(begun), parse_origin(state)
    changes = then.list_changes(now.sources)
    if then.sources and now.sources:
        roles = {"base", "donor"} & {*then.sources} ^ {"base", "donor"} & {*now.sources}
        changes += [f"only one of them has a {role}" for role in sorted(roles)]
    seeds = [told.get("seed") for part in (begun, state) if isinstance(told := part.get("config"), Mapping)]
    if len(seeds) == 2 and seeds[0] != seeds[1]:
        changes.append(f"seed was {printable(str(seeds[0]))} and is {printable(str(seeds[1]))}")
    if changes:
        raise UserError(f"{path}: is a checkpoint of another run: {changes[0]}; put the run's own back, or remove it")
