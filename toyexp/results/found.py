"""Which runs are below a directory, and what each is: little is read of one, so that thousands take a moment."""

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
from toyexp.results.ranking import METRIC
from toyexp.training.checkpoint import matches_type, read_json_or_empty, read_result
from toyexp.training.rundir import read_settings

HEAD = 4096  # bytes of config.yaml and events.jsonl that are read
TAIL = 1 << 16  # bytes of the events of a run without a result
DEPTH = 8  # of directories below the one that is searched
MOST_UNZIPPED = 1 << 30  # bytes that are extracted from an archive
RECORDS = {"config.yaml", "events.jsonl", "result.json", "search.json", SWEEP_FILE}  # files of runs that are extracted
INSIDE = {"checkpoints", "plots", "logs", "node_modules", "site-packages", "__pycache__"}  # hold no runs
SIGNS = {"events.jsonl", "result.json", LOCK_FILE}  # one beside config.yaml makes a directory a run, or two of them
NUMBERS = {  # what is read of a result.json
    "steps": int,
    "train_loss": float | None,
    "eval_loss": float | None,
    "eval_scores": Mapping[str, float | None],
    "seconds": float,
    "sources": Mapping[str, str],
    "diverged": bool,
}
PRUNES = "sweep.prune="  # how a run that a search has stopped says why
DONE = ("completed", "diverged", "stopped")  # states of runs whose numbers count: they came to their own end
_CHOICE = re.compile(r"^- (model|data|recipe|engine|optim): (\S+)$", re.MULTILINE)
_SETTING = re.compile(r"^(name|seed|steps|batch_size|lr): (.+)$", re.MULTILINE)
_ENGINE = re.compile(r'"backend": \{"kind": "([^"]+)"')
_STARTED = re.compile(r'"started_at": "([^"]+)"')


@dataclass(frozen=True)
class Run:
    """A run directory in short."""

    path: Path
    name: str = ""
    when: str = ""  # ISO 8601, UTC
    sweep: str = ""  # name of the sweep's directory
    recipe: str = ""
    model: str = ""
    data: str = ""
    engine: str = ""
    seed: int | None = None
    lr: float | None = None
    batch_size: int | None = None
    steps: int | None = None  # that were taken
    of: int | None = None  # that it was to take
    loss: float | None = None  # of the held-out data
    train_loss: float | None = None
    scores: Mapping[str, float] = field(default_factory=dict)  # held out, beside the loss
    seconds: float | None = None
    speed: float | None = None  # tokens, or images, a second
    state: str = ""  # completed | diverged | stopped | pruned | interrupted | failed | killed | running | unreadable
    why: str = ""  # of a state that is not completed
    unread: str = ""  # which of its files exist and cannot be read, and why

    def value(self, key: str) -> Any:
        """What stands in a column; None where it has none."""
        return getattr(self, key) if key in COLUMNS else self.scores.get(key)

    def plain(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "path": display_path(self.path),
            **{key: getattr(self, key) for key in COLUMNS},
            "scores": dict(self.scores),
        }


COLUMNS = tuple(one.name for one in fields(Run) if one.name not in ("path", "scores"))


def below(root: Path, notes: list[str] | None = None) -> Iterator[Path]:
    """Yield the runs in a directory and below it, by name; of directories that are links only the root is searched.

    A directory that this user may not read is yielded too: `look` says so of it. `notes` gets a line about links.
    """
    links: list[Path] = []

    def walk(directory: Path, depth: int) -> Iterator[Path]:
        try:
            entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
        except PermissionError:
            yield directory
            return
        except OSError:  # it was deleted meanwhile
            return
        names = {entry.name for entry in entries}
        if len(names & {"config.yaml", *SIGNS}) > 1:
            yield directory
            return
        links.extend(Path(entry.path) for entry in entries if entry.is_symlink() and not entry.name.startswith("."))
        for entry in entries if depth else ():
            if not entry.name.startswith(".") and entry.name not in INSIDE and entry.is_dir(follow_symlinks=False):
                yield from walk(Path(entry.path), depth - 1)

    yield from walk(root, DEPTH)
    away = [link for link in links if link.is_dir() and not link.resolve().is_relative_to(root.resolve())]
    if away and notes is not None:
        notes.append(
            f"not followed: {pluralise(len(away), 'link')} below {display_path(root)}, such as {display_path(away[0])}"
        )


def named(command: str, words: Sequence[str], notes: list[str]) -> list[Path]:
    """The runs that words name: runs, sweeps, directories that hold them, and patterns of these; each once.

    Raises UserError for a word that names none. See `below` for `notes`.
    """
    found: dict[Path, None] = {}
    for word in words:
        if not word:
            raise UserError(f"{command} '': is empty (a variable that is not set?); leave it out, or name a directory")
        exists = os.path.lexists(word)
        places = [word] if exists or not glob.has_magic(word) else sorted(glob.glob(word, recursive=True))  # noqa: PTH207
        runs = [run for place in places for run in _at(Path(place), notes)]
        if not runs:
            what = (
                "holds no run" if exists else "matches no run" if glob.has_magic(word) else explain_missing(Path(word))
            )
            if exists and (Path(word) / SWEEP_FILE).is_file():
                what = "is a sweep of which no run has begun"
            raise UserError(f"{command} {display_path(word)}: {what}; what is here: toyexp runs")
        found.update(dict.fromkeys(runs))
    return list(found)


@contextlib.contextmanager
def unzipped(words: Sequence[str]) -> Iterator[list[str]]:
    """Yield words in which a temporary directory stands for each zip archive, with the archive's records of runs.

    Raises UserError for an archive that is damaged or too large, and for one that names a place outside itself.
    """
    with contextlib.ExitStack() as stack:
        places = list(words)
        for number, word in enumerate(words):
            if word.lower().endswith(".zip") and Path(word).is_file():
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix=UNZIP_PREFIX))
                places[number] = str(_extract(Path(word), Path(folder, Path(word).name)))
        yield places


def _extract(archive: Path, folder: Path) -> Path:
    """Extract what `runs` and `compare` read of runs; models and checkpoints stay in the archive."""
    try:
        with open_file(archive) as file, zipfile.ZipFile(file) as found:
            wanted = [info for info in found.infolist() if re.split(r"[/\\]", info.filename)[-1] in RECORDS]
            for info in wanted:
                info.filename = name = info.filename.replace("\\", "/")  # as Windows' own archiver has written them
                if name.startswith("/") or ".." in PurePosixPath(name).parts:
                    raise UserError(f"{archive}: holds {printable(name)}, which lies outside of it")
            if sum(info.file_size for info in wanted) > MOST_UNZIPPED:
                raise UserError(f"{archive}: its runs take more than {MOST_UNZIPPED >> 20} MiB; unzip it yourself")
            found.extractall(folder, wanted)
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, OSError, ValueError) as error:
        raise UserError(f"{archive}: cannot be unzipped: {printable(str(error).rpartition('> ')[2])}") from None
    if not wanted:
        raise UserError(f"{archive}: holds no run")
    return folder


def _at(place: Path, notes: list[str]) -> Iterator[Path]:
    """The runs at a place; of a file in a run, that run."""
    if place.is_dir():
        yield from below(place, notes)
    elif place.name in ("events.jsonl", "config.yaml", "result.json"):
        yield from (run for run in below(place.parent) if run == place.parent)


def metric_of(places: Sequence[Path]) -> str:
    """What the sweeps at these places went by, where that is one metric; the loss otherwise."""
    every = [word for place in places for word in words_of(place, "sweep")]
    found = {word.removeprefix(METRIC) for word in every if word.startswith(METRIC)}
    return found.pop() if len(found) == 1 else "loss"


def words_of(sweep: Path, key: str) -> list[str]:
    """Return what was typed of a sweep: its own settings (`sweep`), or the space of a search (`space`)."""
    words: Any = read_json_or_empty(sweep / SWEEP_FILE).get(key)
    return list(words) if matches_type(words, list[str]) else []


def look(path: Path) -> Run:
    """What a run directory says of itself; what it does not say, or what cannot be read, is left out."""
    unread: list[str] = []
    head = _start(path / "config.yaml", unread)
    unread += [] if head or unread else ["config.yaml is missing or empty"]
    chosen = dict(_CHOICE.findall(head))
    settings, result = dict(_SETTING.findall(head)), read_result(path)
    first = _start(path / "events.jsonl", unread)
    started = _STARTED.search(first)
    if chosen.get("engine") == "auto" and (taken := _ENGINE.search(first)):
        chosen["engine"] = taken[1]
    told: dict[str, Any] = {k: v for k, v in result.items() if k in NUMBERS and matches_type(v, NUMBERS[k])}
    if "steps" not in told:
        told |= last_numbers(path)
    state, why = ("unreadable", unread[0]) if not head and unread else _state(path, result)
    wrong = [k for k, hint in NUMBERS.items() if k in result and not matches_type(result[k], hint)]
    unread += [f"result.json has {printable(repr(result[k]))} for {k}" for k in wrong]
    scores = {k: float(v) for k, v in (told.get("eval_scores") or {}).items() if v is not None}
    return Run(
        path=path, name=_text(settings.get("name", "")) or path.name, when=started[1] if started else _when(path),
        **{part: _text(chosen.get(part, "")) for part in ("recipe", "model", "data", "engine")},
        seed=_whole(settings.get("seed")), lr=_number(settings.get("lr")), of=_whole(settings.get("steps")),
        batch_size=_whole(settings.get("batch_size")), steps=told.get("steps"), loss=told.get("eval_loss"),
        train_loss=told.get("train_loss"), scores=scores, seconds=told.get("seconds"),
        speed=_finite(result.get("tokens_per_second")), state=state, why=why, unread=", ".join(unread),
        sweep=next((p.name for p in path.parents[:3] if (p / SWEEP_FILE).exists()), ""),
    )  # fmt: skip


OF_AN_EVAL = ("kind", "t", "phase", "name", "step", "loss", "ppl")  # what is no score of the model's


def last_numbers(path: Path) -> dict[str, Any]:
    """What the end of the events tells of a run that has left no result."""
    found: dict[str, Any] = {}
    smoothed: float | None = None
    for event in _last_events(path / "events.jsonl"):
        kind, loss = event.get("kind"), _finite(event.get("loss"))
        step: Any = event.get("step")
        if kind == "step" and matches_type(step, int) and step > 0:
            smoothed = smooth_loss(smoothed, math.nan if loss is None else loss, step)
            found |= {"steps": step, "train_loss": smoothed, "seconds": _finite(event.get("t"))}
        elif kind == "eval":
            scores = {k: v for k, v in event.items() if k not in OF_AN_EVAL and matches_type(v, float | int)}
            found |= {"eval_loss": loss, "eval_scores": scores}
    return found


def _last_events(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(size - TAIL, 0))
            lines = file.read(TAIL).split(b"\n")[size > TAIL :]
    except (OSError, UserError):
        return
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError):
            if isinstance(event := json.loads(line), dict):
                yield event


def _state(path: Path, result: Mapping[str, Any]) -> tuple[str, str]:
    """How a run stands, and why, where it did not simply come to its end."""
    try:
        require_unlocked(path)
    except DirectoryLocked:
        return "running", ""
    except (OSError, UserError):  # a file system that knows no locks
        pass
    why = " ".join(str(result.get("error") or result.get("why") or "").split())
    match result.get("reason"):
        case "interrupted":
            return "interrupted", ""
        case "completed" if not result.get("error"):
            return "diverged" if result.get("diverged") is True else "completed", ""
        case "aborted" if not result.get("error"):
            return ("pruned" if why.startswith(PRUNES) else "stopped"), why
        case None:
            return "killed", "result.json cannot be read" if (path / "result.json").exists() else ""
    return "failed", why


def _start(path: Path, unread: list[str]) -> str:
    """Return how a file begins; add to `unread` why one that exists cannot be read."""
    try:
        with open_file(path) as file:
            return file.read(HEAD).decode(errors="replace")
    except (OSError, UserError) as error:
        if os.path.lexists(path) or not os.access(path.parent, os.X_OK):
            unread.append(f"{path.name} {system_message(error).removeprefix(f'{path}: ')}")
        return ""


def _when(path: Path) -> str:
    try:
        return datetime.fromtimestamp((path / "config.yaml").stat().st_mtime, UTC).isoformat(timespec="milliseconds")
    except OSError:
        return ""


def _text(scalar: str) -> str:
    if scalar[:1] == "'":
        return scalar[1:-1].replace("''", "'")
    if scalar[:1] == '"':
        with contextlib.suppress(ValueError):
            return str(json.loads(scalar))
    return scalar


def _whole(text: str | None) -> int | None:
    return int(text) if text is not None and re.fullmatch(r"-?\d{1,18}", text) else None


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


def _finite(value: Any) -> float | None:
    known = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if known and abs(value) <= sys.float_info.max else None  # an int may be larger, which is none


# -- the settings of runs under their whole names, as they are typed: optim.beta1 -------------------------------------

# What says nothing of a run's numbers, and differs between any two: what Hydra composes, and where it went on from.
LEFT_OUT = ("defaults", "resume", "hydra", "sweep")


def settings(run: Path) -> dict[str, str]:
    """All settings of a run as they are typed; none where its config.yaml cannot be read."""
    return {key: format_value(value) for key, value in values(run).items()}


def values(run: Path) -> dict[str, Any]:
    """The same as the numbers, texts and lists that they are."""
    saved = read_settings(run / "config.yaml")
    return dict(_flat({k: v for k, v in saved.items() if k not in LEFT_OUT}))


def _flat(saved: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """A part's name stands under the part alone, `recipe`; a callback's says nothing."""
    for key, value in saved.items():
        whole = f"{prefix}{key}"
        if whole == "callbacks" and isinstance(value, Mapping):
            yield whole, list(value)
        if isinstance(value, Mapping) and value and prefix.count(".") < 8:
            yield from _flat(value, f"{whole}.")
        elif whole.endswith(".name"):
            if not whole.startswith("callbacks."):
                yield whole.removesuffix(".name"), value
        else:
            yield whole, value
