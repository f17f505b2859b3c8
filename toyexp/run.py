"""The run directory: everything needed to understand or repeat a run."""

from __future__ import annotations

import json
import logging
import math
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from toyexp.errors import UserError, printable
from toyexp.foreign import escaped

log = logging.getLogger("toyexp")

# Where each part of a saved config gets its types from when it is composed again.
_DEFAULTS = ("model", "data", "recipe", "engine", "optim")


class RunDir:
    """A directory that belongs to one run alone: config.yaml, log.txt, result.json and what callbacks add.

    Raises UserError for one that holds a run, unless that run is `continued`, and for one that another process writes.
    """

    def __init__(self, path: Path, config: Mapping[str, Any], continued: bool = False):
        for taken in ("events.jsonl", "config.yaml"):
            if (path / taken).exists() and not continued:
                raise UserError(
                    f"{path} already holds a run ({taken}); go on with it: resume={path}, "
                    "or choose another directory: hydra.run.dir=..."
                )
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = lock(path)
            write_atomically(path / "config.yaml", runnable(config))
            self._handler = logging.FileHandler(path / "log.txt", encoding="utf-8")
        except OSError as error:
            raise UserError(f"{path}: cannot be written ({error.strerror}); choose: hydra.run.dir=...") from None
        self.path = path
        self.judged = False  # whether result.json is of this process
        self._handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        log.addHandler(self._handler)

    def result(self, fields: Mapping[str, Any]) -> None:
        """Writes result.json: the final numbers."""
        write_atomically(self.path / "result.json", dump_json(fields, indent=2) + "\n")
        self.judged = True

    def close(self) -> None:
        """Stops writing log.txt, and lets others have the directory."""
        log.removeHandler(self._handler)
        self._handler.close()
        os.close(self._lock)


def lock(path: Path) -> int:
    """Makes this process the only one that writes the run in `path`; the file to close for letting it go.

    The kernel lets a lock go when its process ends, however it ends. Raises UserError when another one has it.
    """
    import fcntl

    file = os.open(path / "run.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(file, 0)
        os.write(file, f"{os.getpid()} on {platform.node()}\n".encode())
    except BlockingIOError:
        owner = printable(os.read(file, 100).decode(errors="replace").strip()) or "another process"
        os.close(file)
        raise UserError(f"{path}: is being written by process {owner}; wait for it, or stop it") from None
    except OSError:
        os.close(file)
        raise
    return file


def runnable(config: Mapping[str, Any]) -> str:
    """The resolved configuration as a file that Hydra composes again to the same run."""
    choices = [{group: config[group]["name"]} for group in _DEFAULTS]
    defaults = ["schema", *choices, {"callbacks": list(config["callbacks"])}, "_self_"]
    text = "# The resolved configuration of one run. Repeat it with:\n"
    text += "#   toyexp --config-path <this directory> --config-name config\n"
    return text + yaml.safe_dump({"defaults": defaults, **escaped(config)}, sort_keys=False, allow_unicode=True)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Writes a file under a temporary name, flushes it to the disk, and renames it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write_synced(temporary, content.encode() if isinstance(content, str) else content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_synced(path: Path, content: bytes) -> None:
    """Writes a file and flushes it to the disk."""
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Flushes the names in a directory to the disk."""
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def bytes_in(path: Path) -> int:
    """The size of a file, or of the files in a directory."""
    return sum(f.stat().st_size for f in path.iterdir()) if path.is_dir() else path.stat().st_size


def dump_json(fields: Mapping[str, Any], indent: int | None = None) -> str:
    """Strict JSON: numbers that are not finite become null."""
    return json.dumps({k: _finite(v) for k, v in fields.items()}, indent=indent, allow_nan=False, default=str)


def _finite(value: Any) -> Any:
    if isinstance(value, np.generic):  # float32 is no float to json, and would become text
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return value


def host_facts() -> dict[str, str]:
    """The machine, as run_start records it."""
    return {
        "name": platform.node(),
        "os": platform.system(),
        "arch": platform.machine(),
        "python": platform.python_version(),
    }


def git_facts() -> dict[str, str]:
    """Commit and branch of the directory the run was started in; empty outside a repository."""

    def ask(*words: str) -> str:
        return subprocess.run(["git", *words], capture_output=True, text=True, check=True, timeout=5).stdout.strip()

    try:
        return {"sha": ask("rev-parse", "HEAD"), "branch": ask("rev-parse", "--abbrev-ref", "HEAD")}
    except (OSError, subprocess.SubprocessError):
        return {}
