"""The run directory: everything needed to understand or repeat a run."""

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

# Where each part of a saved config gets its types from when it is composed again.
_DEFAULTS = ("model", "data", "recipe", "engine", "optim")
CONFIG_LIMIT = 1 << 20  # bytes of a config.yaml that is read
SHALLOW = 8 << 10  # characters of YAML that cannot nest deep enough to overflow libyaml's stack; yaml's own may
GIT_SECONDS = 5.0  # in which the commit is asked for once
# Nine times as fast, where libyaml is there.
_SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_SafeDumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


class RunDir:
    """A run's own directory; UserError if it is not empty or not the run that is `continued`, locked, or read-only."""

    def __init__(
        self, path: Path, config: Mapping[str, Any], continued: bool = False, origin: Mapping[str, Any] | None = None
    ):
        self.path, self.origin = path, origin or {}  # what the run is made of, which result.json says too
        self.judged = False  # whether result.json is of this process
        self._lock: int | None = None
        self._log: LogFile | None = None
        made: list[Path] = []
        began = False  # whether what stands there now is of this process
        try:
            if not continued:
                require_empty(path, "hydra.run.dir")
            elif path.is_dir():
                require_inside(path)
            made = [d for d in (path, *path.parents) if not d.exists()]
            path.mkdir(parents=True, exist_ok=True)
            self._lock = lock(path)
            if continued:
                self._tidy()
            else:
                require_empty(path, "hydra.run.dir")  # another process may have been faster
                began = True
            self.ledger = Ledger.open(path)
            self._log = LogFile(path / "log.txt")
            self._write("config.yaml", runnable_yaml(config))
        except BaseException as error:
            self._undo(made, began)
            if isinstance(error, OSError):
                raise UserError(f"{path}: cannot be written ({error.strerror}); choose: hydra.run.dir=...") from None
            raise
        self._level = log.level
        log.setLevel(logging.INFO)
        log.addHandler(self._log)
        _at_work.set(self._log)

    def _tidy(self) -> None:
        """Removes what a process that was killed had not finished writing; a config.yaml that was edited is kept."""
        for left in self.path.glob(".*"):
            if TEMPORARY_NAME.fullmatch(left.name):
                (shutil.rmtree if left.is_dir() and not left.is_symlink() else os.unlink)(left)
        if changed := Ledger.open(self.path).foreign_paths(["config.yaml"]):
            rename_aside(changed[0])

    def _write(self, name: str, text: str) -> None:
        with self.ledger.output(self.path / name) as place:
            write_synced(place, text.encode(errors="backslashreplace"))

    def _undo(self, made: Sequence[Path], began: bool) -> None:
        if self._log is not None:
            self._log.close()
        for name in ("config.yaml", "log.txt", LEDGER, LOCK_FILE) if began else ():
            with contextlib.suppress(OSError):
                (self.path / name).unlink(missing_ok=True)
        if self._lock is not None:
            os.close(self._lock)
        for directory in made:  # the innermost first
            with contextlib.suppress(OSError):  # someone else has put something there
                directory.rmdir()

    def result(self, fields: Mapping[str, Any]) -> None:
        """Writes result.json: the final numbers; raises RunFailed."""
        with convert_write_errors(self.path / "result.json"):
            self._write("result.json", dump_json({**fields, **self.origin}, indent=2) + "\n")
        self.judged = True

    def close(self) -> None:
        """Stops writing log.txt, and lets others have the directory."""
        assert self._log is not None and self._lock is not None
        _at_work.set(None)
        log.removeHandler(self._log)
        log.setLevel(self._level)
        with contextlib.suppress(OSError):  # the last lines of a log on a full disk
            self._log.close()
        os.close(self._lock)


def require_writable(path: Path, key: str = "hydra.run.dir") -> None:
    """Raises UserError where RunDir would, as far as that is seen without writing anything."""
    if why := unwritable_reason(path / "config.yaml"):
        raise UserError(f"{path}: cannot be written ({why}); choose: {key}=...")


class LogFile(logging.FileHandler):
    """log.txt. What cannot be written there is told once and lost: no line of a log is worth a step."""

    def __init__(self, path: Path):
        super().__init__(path, encoding="utf-8")
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        self._told = False

    def _open(self) -> TextIOWrapper:
        return open(open_for_writing(Path(self.baseFilename), os.O_APPEND), "a", encoding=self.encoding)

    def emit(self, record: logging.LogRecord) -> None:
        """Leaves out what another run says; what none says, as a thread does, stands in the log of each."""
        if _at_work.get() in (None, self):
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """Says so the first time."""
        if self._told:
            return
        self._told = True
        error = sys.exc_info()[1]
        with contextlib.suppress(OSError):
            why = system_message(error) if error else ""
            sys.stderr.write(f"toyexp: warning: {self.baseFilename}: not written ({why}); the run goes on\n")


# The log of the run that is at work: of runs that share a process each has a context of its own.
_at_work: ContextVar[LogFile | None] = ContextVar("at_work", default=None)


def runnable_yaml(config: Mapping[str, Any]) -> str:
    """The resolved configuration as a file that Hydra composes again to the same run."""
    choices = [{group: config[group]["name"]} for group in _DEFAULTS]
    defaults = ["schema", *choices, {"callbacks": list(config["callbacks"])}, "_self_"]
    text = "# The resolved configuration of one run. Repeat it with:\n"
    text += "#   toyexp --config-path <this directory> --config-name config\n"
    tree = {"defaults": defaults, **escape_interpolations(config)}
    dumped = yaml.dump(tree, Dumper=_SafeDumper, sort_keys=False, allow_unicode=True)
    if "\\U" in dumped:  # libyaml does not write emoji as they are
        dumped = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)
    return text + dumped


def host_facts() -> dict[str, str]:
    """The machine, as run_start records it."""
    here = platform.uname()
    return {"name": here.node, "os": here.system, "arch": here.machine, "python": platform.python_version()}


def git_facts() -> dict[str, str]:
    """Commit and branch of the directory the run was started in; empty outside a repository."""
    try:
        return dict(_git_facts(Path.cwd(), int(time.monotonic() // GIT_SECONDS)))
    except FileNotFoundError:  # the directory is gone
        return {}


@lru_cache(maxsize=1)  # runs that begin together ask once
def _git_facts(directory: Path, when: int) -> dict[str, str]:
    command = ["git", "rev-parse", "HEAD", "--abbrev-ref", "HEAD"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=5).stdout
        return dict(zip(("sha", "branch"), said.split(), strict=False))
    except (OSError, subprocess.SubprocessError):
        return {}


def escape_interpolations(value: Any) -> Any:
    """Plain data whose texts mean themselves when a configuration is read back: ${ stays what it is."""
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", lambda m: m[1] * 2 + r"\${", value)
    if isinstance(value, dict):
        return {key: escape_interpolations(item) for key, item in value.items()}
    return [escape_interpolations(item) for item in value] if isinstance(value, list | tuple) else value


def read_settings(config: Path) -> dict[str, Any]:
    """Return the settings in a run's config.yaml; an empty dict if the file cannot be read or is too large."""
    try:
        text = read_text(config, CONFIG_LIMIT)
        loader = (_SafeLoader if len(text) <= SHALLOW else yaml.SafeLoader)(text)
        node = loader.get_single_node()
        if node is None:
            return {}
        check_nodes(node, config)  # before the loader copies what aliases and merge keys repeat
        saved = loader.construct_document(node)
    except (UserError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    return saved if isinstance(saved, dict) else {}
