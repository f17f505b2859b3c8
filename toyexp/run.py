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

from toyexp.errors import UserError

log = logging.getLogger("toyexp")

# Where each part of a saved config gets its types from when it is composed again.
_DEFAULTS = ("model", "data", "recipe", "engine", "optim")


class RunDir:
    """A directory that belongs to one run alone: config.yaml, log.txt, result.json and what callbacks add."""

    def __init__(self, path: Path, config: Mapping[str, Any]):
        for taken in ("events.jsonl", "config.yaml"):
            if (path / taken).exists():
                raise UserError(f"{path} already holds a run ({taken}); choose another directory: hydra.run.dir=...")
        try:
            path.mkdir(parents=True, exist_ok=True)
            write_atomically(path / "config.yaml", runnable(config))
        except OSError as error:
            raise UserError(f"{path}: cannot be written ({error.strerror}); choose: hydra.run.dir=...") from None
        self.path = path
        self._handler = logging.FileHandler(path / "log.txt", encoding="utf-8")
        self._handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        log.addHandler(self._handler)

    def result(self, fields: Mapping[str, Any]) -> None:
        """Writes result.json: the final numbers."""
        write_atomically(self.path / "result.json", dump_json(fields, indent=2) + "\n")

    def close(self) -> None:
        """Stops writing log.txt."""
        log.removeHandler(self._handler)
        self._handler.close()


def runnable(config: Mapping[str, Any]) -> str:
    """The resolved configuration as a file that Hydra composes again to the same run."""
    choices = [{group: config[group]["name"]} for group in _DEFAULTS]
    defaults = ["schema", *choices, {"callbacks": list(config["callbacks"])}, "_self_"]
    text = "# The resolved configuration of one run. Repeat it with:\n"
    text += "#   toyexp --config-path <this directory> --config-name config\n"
    return text + yaml.safe_dump({"defaults": defaults, **config}, sort_keys=False, allow_unicode=True)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Writes a file under a temporary name, flushes it to the disk, and renames it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


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
