"""Checkpoints: a run's whole state in a directory that is either there and whole, or not there.

`checkpoints/step-<n>/` holds state.safetensors (what training changes), state.json (everything else) and
manifest.json, written last, with the size and SHA-256 of the others. It is filled under a temporary name, flushed and
renamed; the newest is the one with the largest step whose manifest verifies. Nothing in it can run code.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from toyexp.base.errors import UserError, printable
from toyexp.base.files import open_file
from toyexp.base.writing import dump_json, make_directory, make_empty_directory, sync_directory, write_synced
from toyexp.interfaces.snapshot import SLOT

log = logging.getLogger("toyexp")

T = typing.TypeVar("T")

FORMAT = 1
ARRAYS, STATE, MANIFEST = "state.safetensors", "state.json", "manifest.json"
JSON_LIMIT = 64 << 20  # bytes of a JSON file that is read


class DamagedCheckpoint(UserError):
    """A checkpoint that is not what was written, with the cause."""


class NewerCheckpointFormat(UserError):
    """A checkpoint of a later format, which is neither read nor replaced."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was read and verified."""

    path: Path
    step: int
    arrays: Mapping[str, np.ndarray] = field(repr=False)  # what Session.restore takes
    state: Mapping[str, Any] = field(repr=False)


# -- writing --------------------------------------------------------------------------------------------------------


def write_checkpoint(folder: Path, step: int, arrays: Mapping[str, np.ndarray], state: Mapping[str, Any]) -> Path:
    """Write `folder`/step-<step> in one piece, replacing the directory of that name; raise OSError."""
    from concurrent.futures import ThreadPoolExecutor  # deferred: a run without checkpoints needs neither

    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    make_directory(folder)  # a run directory that was removed is not made anew
    final, temporary = folder / f"step-{step}", folder / f".tmp-{step}-{os.getpid()}"
    try:
        make_empty_directory(temporary)
        try:
            save_file(dict(arrays), temporary / ARRAYS)
        except SafetensorError as error:  # which says only in words that the disk is full
            raise OSError(str(error)) from error
        with ThreadPoolExecutor(1) as beside:  # both take long, and wait for other things
            digest = beside.submit(_digest, temporary / ARRAYS)
            with open(temporary / ARRAYS, "rb+") as file:  # as in in_one_piece
                os.fsync(file.fileno())
            write_synced(temporary / STATE, dump_json(state).encode())
        digests = {ARRAYS: digest.result(), STATE: _digest(temporary / STATE)}
        files = {name: {"bytes": size, "sha256": found} for name, (size, found) in digests.items()}
        write_synced(temporary / MANIFEST, dump_json({"format": FORMAT, "step": step, "files": files}, 1).encode())
        sync_directory(temporary)
        if os.path.lexists(final):  # of the same run, before it was continued from an earlier checkpoint
            shutil.rmtree(final)
        temporary.rename(final)
        sync_directory(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return final


def _digest(path: Path) -> tuple[int, str]:
    with open_file(path) as file:
        digest = hashlib.file_digest(file, "sha256")
        return file.tell(), digest.hexdigest()


# -- reading --------------------------------------------------------------------------------------------------------


def list_checkpoints(folder: Path) -> dict[int, Path]:
    """The checkpoints below `folder` by step, newest first, whole or not."""
    if not folder.is_dir():
        return {}
    found = {int(m[1]): p for p in folder.iterdir() if (m := re.fullmatch(r"step-(\d{1,18})", p.name)) and p.is_dir()}
    return dict(sorted(found.items(), reverse=True))


def read_newest(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest checkpoint that is whole, and a line about each newer one that is not; raise Newer."""
    damaged: list[str] = []
    for path in list_checkpoints(folder).values():
        try:
            return read_checkpoint(path), damaged
        except DamagedCheckpoint as error:
            damaged.append(str(error))
    return None, damaged


def read_checkpoint(path: Path, with_state: bool = True) -> Checkpoint:
    """Return a checkpoint that matches its manifest, of its arrays all or the weights alone; raise Damaged or Newer."""
    if link := next((name for name in (MANIFEST, ARRAYS, STATE) if (path / name).is_symlink()), None):
        raise DamagedCheckpoint(
            f"{path / link}: is a link, and none is followed inside a checkpoint; put the file there"
        )
    manifest = read_json(path / MANIFEST)
    if (version := manifest.get("format")) != FORMAT:
        what = f"{path}: has format {printable(repr(version))}; this toyexp reads {FORMAT}"
        if isinstance(version, int) and version > FORMAT:
            raise NewerCheckpointFormat(
                f"{what}: a newer toyexp wrote it; update toyexp, or move it away to go on from an earlier one"
            )
        raise DamagedCheckpoint(what)
    files = manifest.get("files")
    if not isinstance(files, dict) or files.keys() != {ARRAYS, STATE}:
        raise DamagedCheckpoint(f"{path / MANIFEST}: does not list {ARRAYS} and {STATE}")
    for name in (ARRAYS, STATE):  # never a name out of the file
        try:
            found = _digest(path / name)
        except OSError as error:
            raise DamagedCheckpoint(f"{path / name}: {error.strerror}") from None
        except UserError as error:
            raise DamagedCheckpoint(str(error)) from None
        said = files[name] if isinstance(files[name], dict) else {}
        if found != (said.get("bytes"), said.get("sha256")):
            raise DamagedCheckpoint(f"{path / name}: is not what was written ({found[0]} bytes, other SHA-256)")
    state = read_json(path / STATE)
    step = manifest.get("step")
    if not isinstance(step, int) or path.name != f"step-{step}":
        raise DamagedCheckpoint(f"{path / MANIFEST}: is of step {printable(str(step))}")
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path / ARRAYS, framework="numpy") as file:
            names = [name for name in file.keys() if with_state or SLOT not in name]  # noqa: SIM118 - no dict
            arrays = {name: file.get_tensor(name) for name in names}
    except (OSError, SafetensorError, ValueError) as error:
        raise DamagedCheckpoint(f"{path / ARRAYS}: {printable(str(error))}") from None
    return Checkpoint(path, step, arrays, state)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a checkpoint; raises Damaged."""
    try:
        with open_file(path) as file:
            text = file.read(JSON_LIMIT + 1)
        if len(text) > JSON_LIMIT:
            raise DamagedCheckpoint(f"{path}: has more than {JSON_LIMIT >> 20} MiB")
        value = json.loads(text)
    except OSError as error:
        raise DamagedCheckpoint(f"{path}: {error.strerror}") from None
    except UserError as error:
        raise DamagedCheckpoint(str(error)) from None
    except (ValueError, RecursionError):
        raise DamagedCheckpoint(f"{path}: is not JSON") from None
    if not isinstance(value, dict):
        raise DamagedCheckpoint(f"{path}: holds no object")
    return value


def read_json_or_empty(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file of a checkpoint or run; an empty one if it cannot be read."""
    try:
        return read_json(path)
    except DamagedCheckpoint:
        return {}


def read_result(directory: Path) -> dict[str, Any]:
    """A run's result.json; empty when there is none that can be read."""
    return read_json_or_empty(directory / "result.json")


def matches_type(value: Any, hint: Any) -> bool:
    """Whether data as JSON gives it is of a type: a scalar (int: of 64 bits), a union, list[T] or Mapping[str, T]."""
    parts = typing.get_args(hint)
    match typing.get_origin(hint):
        case None if hint is int:
            return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 63
        case None:
            return hint is Any or isinstance(value, hint)
        case types.UnionType:
            return any(matches_type(value, part) for part in parts)
        case kind if kind is list:
            return isinstance(value, list) and all(matches_type(item, parts[0]) for item in value)
        case _:
            return isinstance(value, dict) and all(matches_type(item, parts[1]) for item in value.values())


def rebuild_dataclass(cls: type[T], saved: Mapping[str, Any]) -> T:
    """A dataclass from what asdict() and JSON made of it; ValueError for a field that is missing or of another type."""
    hints = typing.get_type_hints(cls)
    for name, hint in hints.items():
        if name not in saved or not matches_type(saved[name], hint):
            raise ValueError(f"{name} is {printable(str(saved.get(name)))}")
    return cls(**{name: saved[name] for name in hints})
