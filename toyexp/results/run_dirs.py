"""Find run directories and read a summary of each.

Of a long file, only the start and the end are read. Thousands of runs can thus be listed in a moment.
"""

from __future__ import annotations

import contextlib
import glob
import json
import math
import os
import re
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any

from toyexp.base.errors import UserError, printable
from toyexp.base.files import explain_missing, open_file, system_message
from toyexp.base.formatting import UNZIP_PREFIX, display_path, format_value, pluralise, smooth_loss
from toyexp.base.ownership import LOCK_FILE, SWEEP_FILE, DirectoryLocked, require_unlocked
from toyexp.interfaces.kind import perplexity
from toyexp.results.ranking import METRIC
from toyexp.training.checkpoint import matches_type, read_json_or_empty, read_result
from toyexp.training.rundir import read_settings

HEAD_BYTES = 4096  # bytes that are read from the start of config.yaml and events.jsonl
TAIL_BYTES = 1 << 16  # bytes that are read from the end of the events of a run without a result
MAX_DEPTH = 8  # levels of directories that are searched
MAX_UNZIPPED_BYTES = 1 << 30  # bytes that are extracted from an archive
EXTRACTED_FILES = {"config.yaml", "events.jsonl", "result.json", "search.json", SWEEP_FILE}
SKIPPED_DIRS = {"checkpoints", "plots", "logs", "node_modules", "site-packages", "__pycache__"}  # never searched
# A directory is a run if it holds two of these files, or config.yaml and one of them.
RUN_FILES = {"events.jsonl", "result.json", LOCK_FILE}
RESULT_TYPES = {  # keys of result.json that are read, with their types
    "steps": int,
    "train_loss": float | None,
    "eval_loss": float | None,
    "eval_scores": Mapping[str, float | None],
    "seconds": float,
    "sources": Mapping[str, str],
    "diverged": bool,
}
PRUNED_PREFIX = "sweep.prune="  # start of the stop reason of a run that a search pruned
FINAL_STATES = ("completed", "diverged", "stopped")  # states of runs whose numbers count in a comparison
_CHOICE = re.compile(r"^- (model|data|recipe|engine|optim|objective): (\S+)$", re.MULTILINE)
_SETTING = re.compile(r"^(name|seed|steps|batch_size|lr): (.+)$", re.MULTILINE)
_ENGINE = re.compile(r'"backend": \{"kind": "([^"]+)"')
_STARTED = re.compile(r'"started_at": "([^"]+)"')


@dataclass(frozen=True)
class Run:
    """Summary of a run directory."""

    path: Path
    name: str = ""
    when: str = ""  # start time, ISO 8601, UTC
    sweep: str = ""  # name of its sweep's directory, if it belongs to one
    recipe: str = ""
    model: str = ""
    data: str = ""
    engine: str = ""
    seed: int | None = None
    lr: float | None = None
    batch_size: int | None = None
    steps: int | None = None  # steps that were trained
    of: int | None = None  # steps that were planned
    loss: float | None = None  # held-out loss
    train_loss: float | None = None
    scores: Mapping[str, float] = field(default_factory=dict)  # held-out metrics other than the loss
    seconds: float | None = None
    speed: float | None = None  # tokens or images per second
    state: str = ""  # completed | diverged | stopped | pruned | interrupted | failed | killed | running | unreadable
    why: str = ""  # reason of a state other than completed
    unread: str = ""  # files that exist but cannot be read, and why

    def value(self, key: str) -> Any:
        """Return the value of a column (a name in COLUMNS) or of a held-out metric; None if the run has none."""
        if key == "ppl" and self.loss is not None:
            return perplexity(self.loss)
        return getattr(self, key) if key in COLUMNS else self.scores.get(key)

    def plain(self) -> dict[str, Any]:
        """Return the summary as a dict that can be written as JSON."""
        columns = {key: getattr(self, key) for key in COLUMNS}
        return {"path": display_path(self.path), **columns, "scores": dict(self.scores)}


COLUMNS = tuple(f.name for f in fields(Run) if f.name not in ("path", "scores"))


def find_runs(root: Path, notes: list[str] | None = None) -> Iterator[Path]:
    """Yield `root` and the directories below it that are run directories, sorted by name.

    Symbolic links below `root` are not followed. A directory without read permission is yielded too, because `read_run`
    reports it. If links to directories outside `root` were skipped, a line about them is added to `notes`.
    """
    links: list[Path] = []

    def walk(directory: Path, depth: int) -> Iterator[Path]:
        try:
            entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
        except PermissionError:
            yield directory
            return
        except OSError:  # deleted meanwhile
            return
        names = {entry.name for entry in entries}
        if len(names & {"config.yaml", *RUN_FILES}) > 1:
            yield directory
            return
        links.extend(Path(entry.path) for entry in entries if entry.is_symlink() and not entry.name.startswith("."))
        for entry in entries if depth else ():
            if (
                not entry.name.startswith(".")
                and entry.name not in SKIPPED_DIRS
                and entry.is_dir(follow_symlinks=False)
            ):
                yield from walk(Path(entry.path), depth - 1)

    yield from walk(root, MAX_DEPTH)
    away = [link for link in links if link.is_dir() and not link.resolve().is_relative_to(root.resolve())]
    if away and notes is not None:
        notes.append(
            f"not followed: {pluralise(len(away), 'link')} below {display_path(root)}, such as {display_path(away[0])}"
        )


def resolve_runs(command: str, words: Sequence[str], notes: list[str]) -> list[Path]:
    """Return the directories of the runs that `words` name. Each directory is listed only once.

    A word is a run, a sweep, a directory that contains runs, or a glob pattern. For a word that names no run, raise
    UserError with a message that begins with `command`. Notes about skipped links are added to `notes`.
    """
    directories: dict[Path, None] = {}
    for word in words:
        if not word:
            raise UserError(f"{command} '': is empty (an unset shell variable?); leave it out, or name a directory")
        exists = os.path.lexists(word)
        paths = [word] if exists or not glob.has_magic(word) else sorted(glob.glob(word, recursive=True))  # noqa: PTH207
        runs = [run for path in paths for run in _list_runs(Path(path), notes)]
        if not runs:
            problem = (
                "holds no run" if exists else "matches no run" if glob.has_magic(word) else explain_missing(Path(word))
            )
            if exists and (Path(word) / SWEEP_FILE).is_file():
                problem = "is a sweep that has started no run"
            raise UserError(f"{command} {display_path(word)}: {problem}; to list runs: toyexp runs")
        directories.update(dict.fromkeys(runs))
    return list(directories)


@contextlib.contextmanager
def unzip_archives(words: Sequence[str]) -> Iterator[list[str]]:
    """Extract the zip archives in `words`. Yield the words, but with a temporary directory in place of each archive.

    This directory holds the files that the commands `runs` and `compare` read. It is deleted at the end of the `with`
    block.

    Raise UserError for an archive that is damaged, too large, or holds a path outside itself.
    """
    with contextlib.ExitStack() as stack:
        paths = list(words)
        for number, word in enumerate(words):
            if word.lower().endswith(".zip") and Path(word).is_file():
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix=UNZIP_PREFIX))
                paths[number] = str(_extract(Path(word), Path(folder, Path(word).name)))
        yield paths


def _extract(archive: Path, folder: Path) -> Path:
    """Extract into `folder` the files that the commands `runs` and `compare` read, and return `folder`."""
    try:
        with open_file(archive) as file, zipfile.ZipFile(file) as zip_file:
            members = [info for info in zip_file.infolist() if re.split(r"[/\\]", info.filename)[-1] in EXTRACTED_FILES]
            for info in members:
                info.filename = name = info.filename.replace("\\", "/")  # the archiver of Windows writes backslashes
                if name.startswith("/") or ".." in PurePosixPath(name).parts:
                    raise UserError(f"{archive}: the path {printable(name)} leads out of the archive")
            if sum(info.file_size for info in members) > MAX_UNZIPPED_BYTES:
                raise UserError(f"{archive}: its runs take more than {MAX_UNZIPPED_BYTES >> 20} MiB; unzip it yourself")
            zip_file.extractall(folder, members)
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, OSError, ValueError) as error:
        raise UserError(f"{archive}: cannot be unzipped: {printable(str(error).rpartition('> ')[2])}") from None
    if not members:
        raise UserError(f"{archive}: holds no run directory")
    return folder


def _list_runs(path: Path, notes: list[str]) -> Iterator[Path]:
    if path.is_dir():
        yield from find_runs(path, notes)
    elif path.name in ("events.jsonl", "config.yaml", "result.json"):
        yield from (run for run in find_runs(path.parent) if run == path.parent)


def sweep_metric(directories: Sequence[Path]) -> str:
    """Return the metric of the sweeps in these directories if they agree on one, otherwise "loss"."""
    overrides = [word for directory in directories for word in sweep_overrides(directory, "sweep")]
    metrics = {word.removeprefix(METRIC) for word in overrides if word.startswith(METRIC)}
    return metrics.pop() if len(metrics) == 1 else "loss"


def sweep_overrides(sweep: Path, key: str) -> list[str]:
    """Return the overrides that a sweep recorded under `key` in its sweep.json; [] if there are none.

    The key `sweep` has the sweep.* settings, and `space` has the value ranges of a search.
    """
    overrides: Any = read_json_or_empty(sweep / SWEEP_FILE).get(key)
    return list(overrides) if matches_type(overrides, list[str]) else []


def read_run(path: Path) -> Run:
    """Read the summary of a run directory. Fields that are missing or unreadable stay empty."""
    unread: list[str] = []
    head = _read_head(path / "config.yaml", unread)
    if not unread and not re.search(r"^\w+:", head, re.MULTILINE):
        unread.append("config.yaml holds no settings" if head else "config.yaml is missing or empty")
    choices = dict(_CHOICE.findall(head))
    settings, result = dict(_SETTING.findall(head)), read_result(path)
    first = _read_head(path / "events.jsonl", unread)
    started = _STARTED.search(first)
    if choices.get("engine") == "auto" and (match := _ENGINE.search(first)):
        choices["engine"] = match[1]
    numbers: dict[str, Any] = {
        k: v for k, v in result.items() if k in RESULT_TYPES and matches_type(v, RESULT_TYPES[k])
    }
    if "steps" not in numbers:
        numbers |= read_last_numbers(path)
    state, why = ("unreadable", unread[0]) if not head and unread else _read_state(path, result)
    invalid_keys = [k for k, hint in RESULT_TYPES.items() if k in result and not matches_type(result[k], hint)]
    unread += [f"result.json has {printable(repr(result[k]))} for {k}" for k in invalid_keys]
    scores = {k: float(v) for k, v in (numbers.get("eval_scores") or {}).items() if v is not None}
    return Run(
        path=path, name=_unquote(settings.get("name", "")) or path.name,
        when=started[1] if started else _config_time(path),
        **{part: _unquote(choices.get(part, "")) for part in ("recipe", "model", "data", "engine")},
        seed=_parse_int(settings.get("seed")), lr=_parse_float(settings.get("lr")),
        of=_parse_int(settings.get("steps")), batch_size=_parse_int(settings.get("batch_size")),
        steps=numbers.get("steps"), loss=numbers.get("eval_loss"),
        train_loss=numbers.get("train_loss"), scores=scores, seconds=numbers.get("seconds"),
        speed=_finite_float(result.get("tokens_per_second")), state=state, why=why, unread=", ".join(unread),
        sweep=next((p.name for p in path.parents[:3] if (p / SWEEP_FILE).exists()), ""),
    )  # fmt: skip


EVAL_KEYS = ("kind", "t", "phase", "name", "step", "loss", "ppl")  # keys of an evaluation event; all others are metrics


def read_last_numbers(path: Path) -> dict[str, Any]:
    """Return the last step, losses, metrics and seconds in a run's events, as a dict with the keys of result.json."""
    numbers: dict[str, Any] = {}
    smoothed: float | None = None
    for event in _last_events(path / "events.jsonl"):
        kind, loss = event.get("kind"), _finite_float(event.get("loss"))
        step: Any = event.get("step")
        if kind == "step" and matches_type(step, int) and step > 0:
            smoothed = smooth_loss(smoothed, math.nan if loss is None else loss, step)
            numbers |= {"steps": step, "train_loss": smoothed, "seconds": _finite_float(event.get("t"))}
        elif kind == "eval":
            scores = {k: v for k, v in event.items() if k not in EVAL_KEYS and matches_type(v, float | int)}
            numbers |= {"eval_loss": loss, "eval_scores": scores}
    return numbers


def _last_events(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(size - TAIL_BYTES, 0))
            lines = file.read(TAIL_BYTES).split(b"\n")[size > TAIL_BYTES :]
    except (OSError, UserError):
        return
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError):
            if isinstance(event := json.loads(line), dict):
                yield event


def _read_state(path: Path, result: Mapping[str, Any]) -> tuple[str, str]:
    """Return the state of a run (see Run.state) and the reason for that state.

    The reason is "" if there is none or if it is unknown.
    """
    try:
        require_unlocked(path)
    except DirectoryLocked:
        return "running", ""
    except (OSError, UserError):  # the file system has no locks
        pass
    why = " ".join(str(result.get("error") or result.get("why") or "").split())
    match result.get("reason"):
        case "interrupted":
            return "interrupted", ""
        case "completed" if not result.get("error"):
            return "diverged" if result.get("diverged") is True else "completed", ""
        case "aborted" if not result.get("error"):
            return ("pruned" if why.startswith(PRUNED_PREFIX) else "stopped"), why
        case None:
            return "killed", "result.json cannot be read" if (path / "result.json").exists() else ""
    return "failed", why


def _read_head(path: Path, unread: list[str]) -> str:
    """Return the start of a file as text, or "" if it cannot be read.

    If an existing file cannot be read, add its name and the reason to `unread`.
    """
    try:
        with open_file(path) as file:
            return file.read(HEAD_BYTES).decode(errors="replace")
    except (OSError, UserError) as error:
        if os.path.lexists(path) or not os.access(path.parent, os.X_OK):
            unread.append(f"{path.name} {system_message(error).removeprefix(f'{path}: ')}")
        return ""


def _config_time(path: Path) -> str:
    try:
        return datetime.fromtimestamp((path / "config.yaml").stat().st_mtime, UTC).isoformat(timespec="milliseconds")
    except OSError:
        return ""


def _unquote(scalar: str) -> str:
    if scalar[:1] == "'":
        return scalar[1:-1].replace("''", "'")
    if scalar[:1] == '"':
        with contextlib.suppress(ValueError):
            return str(json.loads(scalar))
    return scalar


def _parse_int(text: str | None) -> int | None:
    return int(text) if text is not None and re.fullmatch(r"-?\d{1,18}", text) else None


def _parse_float(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


def _finite_float(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) <= sys.float_info.max else None  # an int may be too large


# -- settings of runs by full key, such as optim.beta1 ----------------------------------------------------------------

# Top-level keys of config.yaml that are not settings of the run: those of Hydra, and the run from which it resumed.
IGNORED_KEYS = ("defaults", "resume", "hydra", "sweep")


def setting_texts(run: Path) -> dict[str, str]:
    """Return a run's settings by full key (`optim.beta1`), with values as they are typed; {} if they cannot be read."""
    return {  # 100, not 100.0
        key: f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else format_value(value)
        for key, value in setting_values(run).items()
    }


def setting_values(run: Path) -> dict[str, Any]:
    """Return a run's settings by full key (`optim.beta1`), with values as in YAML; {} if they cannot be read."""
    saved = read_settings(run / "config.yaml")
    return dict(_flatten({k: v for k, v in saved.items() if k not in IGNORED_KEYS}))


def _flatten(saved: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (full key, value) for each setting in nested settings.

    The setting with the name of a part has the key of the part: `recipe`, not `recipe.name`. The key `callbacks` has a
    list with the names of the callbacks.
    """
    for key, value in saved.items():
        full_key = f"{prefix}{key}"
        if full_key == "callbacks" and isinstance(value, Mapping):
            yield full_key, list(value)
        if isinstance(value, Mapping) and value and prefix.count(".") < 8:
            yield from _flatten(value, f"{full_key}.")
        elif full_key.endswith(".name"):
            if not full_key.startswith("callbacks."):
                yield full_key.removesuffix(".name"), value
        else:
            yield full_key, value
