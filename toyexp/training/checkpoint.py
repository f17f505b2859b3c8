"""Checkpoint files: the complete state of a run in a directory that is written atomically.

`checkpoints/step-<n>/` holds state.safetensors (weights and optimiser state), state.json (everything else) and
manifest.json, written last, with the size and SHA-256 of the other two. The directory is filled under a temporary name,
flushed and renamed. Reading a checkpoint cannot run code.
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
from toyexp.interfaces.optimiser import EVAL_OFFSET
from toyexp.interfaces.snapshot import SLOT, average_weights

log = logging.getLogger("toyexp")

T = typing.TypeVar("T")

FORMAT = 1
ARRAYS, STATE, MANIFEST = "state.safetensors", "state.json", "manifest.json"
JSON_LIMIT = 64 << 20  # bytes; a larger JSON file is rejected


class DamagedCheckpoint(UserError):
    """Error: a checkpoint is incomplete or its digests do not match."""


class NewerCheckpointFormat(UserError):
    """Error: a checkpoint has the format of a newer toyexp. It is neither read nor replaced."""


@dataclass(frozen=True)
class Checkpoint:
    """Checkpoint that was read and verified."""

    path: Path
    step: int
    arrays: Mapping[str, np.ndarray] = field(repr=False)  # the argument of Session.restore
    state: Mapping[str, Any] = field(repr=False)


# -- writing --------------------------------------------------------------------------------------------------------


def write_checkpoint(folder: Path, step: int, arrays: Mapping[str, np.ndarray], state: Mapping[str, Any]) -> Path:
    """Write the checkpoint directory `folder`/step-<step> atomically and return its path.

    A directory of that name is replaced. Raise OSError if the checkpoint cannot be written.
    """
    from concurrent.futures import ThreadPoolExecutor  # deferred: not needed by runs without checkpoints

    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    make_directory(folder)  # raises if the run directory was removed
    final, temporary = folder / f"step-{step}", folder / f".tmp-{step}-{os.getpid()}"
    try:
        make_empty_directory(temporary)
        try:
            save_file(dict(arrays), temporary / ARRAYS)
        except SafetensorError as error:  # raised if the disk is full, for example
            raise OSError(str(error)) from error
        with ThreadPoolExecutor(1) as executor:  # hash and flush in parallel: both take long
            digest = executor.submit(_digest, temporary / ARRAYS)
            with open(temporary / ARRAYS, "rb+") as file:  # as in write_atomically
                os.fsync(file.fileno())
            write_synced(temporary / STATE, dump_json(state).encode())
        digests = {ARRAYS: digest.result(), STATE: _digest(temporary / STATE)}
        files = {name: {"bytes": size, "sha256": sha256} for name, (size, sha256) in digests.items()}
        write_synced(temporary / MANIFEST, dump_json({"format": FORMAT, "step": step, "files": files}, 1).encode())
        sync_directory(temporary)
        if os.path.lexists(final):  # written before the run was resumed from an earlier checkpoint
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
    """Return the paths of the checkpoints in `folder` by step, newest first, without verifying them."""
    if not folder.is_dir():
        return {}
    paths = [path for path in folder.iterdir() if re.fullmatch(r"step-\d{1,18}", path.name) and path.is_dir()]
    return dict(sorted(((int(path.name[5:]), path) for path in paths), reverse=True))


def read_newest(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest valid checkpoint (or None), and an error message for each damaged checkpoint that is newer.

    Raise NewerCheckpointFormat if a newer toyexp wrote a checkpoint.
    """
    damaged: list[str] = []
    for path in list_checkpoints(folder).values():
        try:
            return read_checkpoint(path), damaged
        except DamagedCheckpoint as error:
            damaged.append(str(error))
    return None, damaged


def read_checkpoint(path: Path, with_state: bool = True) -> Checkpoint:
    """Read and verify the checkpoint directory `path`; `with_state=False` leaves the optimiser state out.

    The tensors then have the values that evaluations use, such as averages (`optim.ema`).

    Raise DamagedCheckpoint if it is incomplete or changed, NewerCheckpointFormat if a newer toyexp wrote it.
    """
    if link := next((name for name in (MANIFEST, ARRAYS, STATE) if (path / name).is_symlink()), None):
        raise DamagedCheckpoint(f"{path / link}: is a link, which a checkpoint must not hold; replace it by the file")
    if not (path / MANIFEST).exists():
        raise DamagedCheckpoint(f"{path}: is incomplete or damaged: it has no {MANIFEST}")
    manifest = read_json(path / MANIFEST)
    if (version := manifest.get("format")) != FORMAT:
        cause = f"{path}: has format {printable(repr(version))}, this toyexp reads format {FORMAT}"
        if isinstance(version, int) and version > FORMAT:
            raise NewerCheckpointFormat(f"{cause}; update toyexp, or move it away to resume from an earlier checkpoint")
        raise DamagedCheckpoint(cause)
    files = manifest.get("files")
    if not isinstance(files, dict) or files.keys() != {ARRAYS, STATE}:
        raise DamagedCheckpoint(f"{path / MANIFEST}: does not list {ARRAYS} and {STATE}")
    for name in (ARRAYS, STATE):  # never a path from the file
        try:
            digest = _digest(path / name)
        except OSError as error:
            raise DamagedCheckpoint(f"{path / name}: {error.strerror}") from None
        except UserError as error:
            raise DamagedCheckpoint(str(error)) from None
        entry = files[name] if isinstance(files[name], dict) else {}
        if digest != (entry.get("bytes"), entry.get("sha256")):
            details = f"{digest[0]} bytes, different SHA-256"
            raise DamagedCheckpoint(f"{path / name}: does not match the manifest ({details})")
    state = read_json(path / STATE)
    step = manifest.get("step")
    if not isinstance(step, int) or path.name != f"step-{step}":
        raise DamagedCheckpoint(f"{path / MANIFEST}: names step {printable(str(step))}, expected that of the directory")
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path / ARRAYS, framework="numpy") as file:
            kept = [n for n in file.keys() if with_state or SLOT not in n or n.endswith(SLOT + EVAL_OFFSET)]  # noqa: SIM118
            arrays = {name: file.get_tensor(name) for name in kept}
    except (OSError, SafetensorError, ValueError) as error:
        raise DamagedCheckpoint(f"{path / ARRAYS}: {printable(str(error))}") from None
    return Checkpoint(path, step, arrays if with_state else average_weights(arrays), state)


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file as a dict. Raise DamagedCheckpoint if the file cannot be read as one."""
    try:
        with open_file(path) as file:
            text = file.read(JSON_LIMIT + 1)
        if len(text) > JSON_LIMIT:
            raise DamagedCheckpoint(f"{path}: is larger than {JSON_LIMIT >> 20} MiB")
        value = json.loads(text)
    except OSError as error:
        raise DamagedCheckpoint(f"{path}: {error.strerror}") from None
    except UserError as error:
        raise DamagedCheckpoint(str(error)) from None
    except (ValueError, RecursionError):
        raise DamagedCheckpoint(f"{path}: is not valid JSON") from None
    if not isinstance(value, dict):
        raise DamagedCheckpoint(f"{path}: is not a JSON object")
    return value


def read_json_or_empty(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file as a dict; {} if the file cannot be read or holds no object."""
    try:
        return read_json(path)
    except DamagedCheckpoint:
        return {}


def read_result(directory: Path) -> dict[str, Any]:
    """Return the content of result.json in a run directory; {} if the file is missing or cannot be read."""
    return read_json_or_empty(directory / "result.json")


def matches_type(value: Any, hint: Any) -> bool:
    """Return True if a value parsed from JSON has the type `hint`.

    `hint` is a scalar type, a union, list[T] or Mapping[str, T]. An int must fit into 64 bits.
    """
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
    """Rebuild a dataclass from the JSON of its asdict(). Raise ValueError if a field is missing or has another type."""
    hints = typing.get_type_hints(cls)
    for name, hint in hints.items():
        if name not in saved or not matches_type(saved[name], hint):
            raise ValueError(f"{name} has the invalid value {printable(str(saved.get(name)))}")
    return cls(**{name: saved[name] for name in hints})
