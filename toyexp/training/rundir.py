"""Run directory with config.yaml, result.json, log.txt and a lock file."""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from functools import lru_cache
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import yaml

from toyexp.base.errors import UserError
from toyexp.base.files import check_nodes, read_text, system_message
from toyexp.base.ownership import (
    LEDGER,
    LOCK_FILE,
    TEMPORARY_NAME,
    Ledger,
    lock,
    rename_aside,
    require_empty,
    require_inside,
)
from toyexp.base.writing import convert_write_errors, dump_json, open_for_writing, unwritable_reason, write_synced

log = logging.getLogger("toyexp")

# Config groups whose presets give a saved config its types when Hydra composes it again.
_GROUPS = ("model", "data", "recipe", "engine", "optim", "objective")
CONFIG_LIMIT = 1 << 20  # bytes; a larger config.yaml is not read
MAX_LIBYAML_SIZE = 8 << 10  # characters; longer YAML could nest deep enough to overflow libyaml's stack
GIT_SECONDS = 5.0  # how long a commit is cached
# libyaml, if available, is nine times as fast.
_SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_SafeDumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


class RunDir:
    """Open directory of a run. Raises UserError if it is locked, read-only, or (unless `resumed`) not empty."""

    def __init__(
        self, path: Path, config: Mapping[str, Any], resumed: bool = False, origin: Mapping[str, Any] | None = None
    ):
        self.path, self.origin = path, origin or {}  # origin is copied into result.json
        self.has_result = False  # True once this process has written result.json
        self._lock: int | None = None
        self._log: LogFile | None = None
        created: list[Path] = []
        is_new = False  # True if this process wrote all files in it
        try:
            if not resumed:
                require_empty(path, "hydra.run.dir")
            elif path.is_dir():
                require_inside(path)
            created = [d for d in (path, *path.parents) if not d.exists()]
            path.mkdir(parents=True, exist_ok=True)
            self._lock = lock(path)
            if resumed:
                self._tidy()
            else:
                require_empty(path, "hydra.run.dir")  # another process may have been faster
                is_new = True
            self.ledger = Ledger.open(path)
            self._log = LogFile(path / "log.txt")
            self._write("config.yaml", runnable_yaml(config))
        except BaseException as error:
            self._undo(created, is_new)
            if isinstance(error, OSError):
                problem = f"{path}: cannot be written ({error.strerror})"
                raise UserError(f"{problem}; choose another: hydra.run.dir=...") from None
            raise
        self._level = log.level
        log.setLevel(logging.INFO)
        log.addHandler(self._log)
        _current_log.set(self._log)

    def _tidy(self) -> None:
        """Clean up the run directory before a run starts or resumes.

        Remove temporary files of a killed process. Rename a config.yaml that the run did not write.
        """
        for path in self.path.glob(".*"):
            if TEMPORARY_NAME.fullmatch(path.name):
                (shutil.rmtree if path.is_dir() and not path.is_symlink() else os.unlink)(path)
        if changed := Ledger.open(self.path).foreign_paths(["config.yaml"]):
            rename_aside(changed[0])

    def _write(self, name: str, text: str) -> None:
        with self.ledger.output(self.path / name) as path:
            write_synced(path, text.encode(errors="backslashreplace"))

    def _undo(self, created: Sequence[Path], is_new: bool) -> None:
        if self._log is not None:
            self._log.close()
        for name in ("config.yaml", "log.txt", LEDGER, LOCK_FILE) if is_new else ():
            with contextlib.suppress(OSError):
                (self.path / name).unlink(missing_ok=True)
        if self._lock is not None:
            os.close(self._lock)
        for directory in created:  # innermost first
            with contextlib.suppress(OSError):  # not empty: another process uses it
                directory.rmdir()

    def result(self, fields: Mapping[str, Any]) -> None:
        """Write `fields` and the run's origin to result.json. Raise RunFailed if the file cannot be written."""
        with convert_write_errors(self.path / "result.json"):
            self._write("result.json", dump_json({**fields, **self.origin}, indent=2) + "\n")
        self.has_result = True

    def close(self) -> None:
        """Close log.txt and release the lock."""
        assert self._log is not None and self._lock is not None
        _current_log.set(None)
        log.removeHandler(self._log)
        log.setLevel(self._level)
        with contextlib.suppress(OSError):  # on a full disk, the last lines are lost
            self._log.close()
        os.close(self._lock)


def require_writable(path: Path, key: str = "hydra.run.dir") -> None:
    """Raise UserError if `path` is not writable, without writing anything."""
    if why := unwritable_reason(path / "config.yaml"):
        raise UserError(f"{path}: cannot be written ({why}); choose another: {key}=...")


class LogFile(logging.FileHandler):
    """Handler of log.txt. A failed write prints one warning and never stops the run."""

    def __init__(self, path: Path):
        super().__init__(path, encoding="utf-8")
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        self._has_warned = False

    def _open(self) -> TextIOWrapper:
        return open(open_for_writing(Path(self.baseFilename), os.O_APPEND), "a", encoding=self.encoding)

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record to the log, unless another run in this process emitted it.

        A record emitted in a background thread cannot be assigned to a run, so it is written to the logs of all runs.
        """
        if _current_log.get() in (None, self):
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """Print a warning about the first record that cannot be written."""
        if self._has_warned:
            return
        self._has_warned = True
        error = sys.exc_info()[1]
        with contextlib.suppress(OSError):
            why = system_message(error) if error else ""
            sys.stderr.write(f"toyexp: warning: {self.baseFilename}: not written ({why}); the run continues\n")


# The log of the current run: runs that share a process have a context each.
_current_log: ContextVar[LogFile | None] = ContextVar("current_log", default=None)


def runnable_yaml(config: Mapping[str, Any]) -> str:
    """Return the resolved configuration as the text of a config.yaml, with which Hydra repeats the run."""
    choices = [{group: config[group]["name"]} for group in _GROUPS]
    defaults = ["schema", *choices, {"callbacks": list(config["callbacks"])}, "_self_"]
    text = "# The resolved configuration of one run. Repeat it with:\n"
    text += "#   toyexp --config-path <this directory> --config-name config\n"
    tree = {"defaults": defaults, **escape_interpolations(config)}
    dumped = yaml.dump(tree, Dumper=_SafeDumper, sort_keys=False, allow_unicode=True)
    if "\\U" in dumped:  # libyaml escapes emoji
        dumped = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)
    return text + dumped


def host_facts() -> dict[str, str]:
    """Return this machine's name, operating system, architecture and Python version for the event run_start."""
    uname = platform.uname()
    return {"name": uname.node, "os": uname.system, "arch": uname.machine, "python": platform.python_version()}


def git_facts() -> dict[str, str]:
    """Return commit and branch of the working directory; {} outside a git repository."""
    try:
        return dict(_git_facts(Path.cwd(), int(time.monotonic() // GIT_SECONDS)))
    except FileNotFoundError:  # the directory is gone
        return {}


@lru_cache(maxsize=1)  # runs that start together call git once
def _git_facts(directory: Path, when: int) -> dict[str, str]:
    command = ["git", "rev-parse", "HEAD", "--abbrev-ref", "HEAD"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=5).stdout
        return dict(zip(("sha", "branch"), output.split(), strict=False))
    except (OSError, subprocess.SubprocessError):
        return {}


def escape_interpolations(value: Any) -> Any:
    """Return nested settings with `${` escaped in all strings, so that Hydra does not interpolate them."""
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", lambda m: m[1] * 2 + r"\${", value)
    if isinstance(value, dict):
        return {key: escape_interpolations(item) for key, item in value.items()}
    return [escape_interpolations(item) for item in value] if isinstance(value, list | tuple) else value


def read_settings(config: Path) -> dict[str, Any]:
    """Return the settings in a run's config.yaml; an empty dict if the file cannot be read or is too large."""
    try:
        text = read_text(config, CONFIG_LIMIT)
        loader = (_SafeLoader if len(text) <= MAX_LIBYAML_SIZE else yaml.SafeLoader)(text)
        node = loader.get_single_node()
        if node is None:
            return {}
        check_nodes(node, config)  # before the loader expands aliases and merge keys
        saved = loader.construct_document(node)
    except (UserError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    return saved if isinstance(saved, dict) else {}
