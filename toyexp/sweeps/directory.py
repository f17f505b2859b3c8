"""The directory of a sweep: its jobs, what became of each, and the files that remember it."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path, PurePath
from typing import Any

from toyexp.base.errors import ToyexpError, UserError, printable
from toyexp.base.files import explain_missing, system_message
from toyexp.base.formatting import format_csv, short_path
from toyexp.base.ownership import (
    LOCK_FILE,
    SWEEP_FILE,
    DirectoryLocked,
    lock,
    rename_aside,
    require_empty,
    require_inside,
)
from toyexp.base.terminal import print_line, show_status
from toyexp.base.writing import dump_json, require_plain, require_plain_path, write_atomically
from toyexp.config.words import format_override
from toyexp.results.found import NUMBERS, PRUNES
from toyexp.results.ranking import TRAIN, Ranking, ranked, sources_of
from toyexp.sweeps.journal import Journal, Seldom
from toyexp.training import checkpoint
from toyexp.training.checkpoint import DamagedCheckpoint, matches_type, read_json, read_result, rebuild_dataclass

log = logging.getLogger("toyexp")

FORMAT = 1
SPREAD = "mean ± standard deviation (over n-1) of the seeds that completed"


class Status(StrEnum):
    """What became of a job."""

    WAITING = "waiting"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"  # it raised
    REFUSED = "refused"  # bad input
    KILLED = "killed"
    INTERRUPTED = "interrupted"
    PRUNED = "pruned"  # a search stopped it: other points were better


FAILURES = (Status.FAILED, Status.REFUSED, Status.KILLED)
UNFINISHED = (Status.WAITING, Status.RUNNING, Status.KILLED, Status.INTERRUPTED)  # the others had their answer
ANSWERED = (Status.COMPLETED, Status.PRUNED)  # what was asked of the job has its answer
# Errors of a disk or of limits on open files, which have nothing to do with a job's settings.
HINDRANCES = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE)
ENDING = [number for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1") if (number := getattr(signal, name, None))]
# What a job's process says by its exit code; by any other, and by a signal, it was killed.
MEANING = {
    0: Status.COMPLETED,
    1: Status.FAILED,
    2: Status.REFUSED,
    **{code: Status.INTERRUPTED for number in ENDING for code in (128 + number, -number)},
}


@dataclass(frozen=True)
class Ended:
    """How a job's process ended."""

    code: int  # below zero: the signal that killed it
    error: str = ""  # its last words

    @classmethod
    def of(cls, error: BaseException) -> Ended:
        """Return how a job ended that raised in this process."""
        text = str(error) if isinstance(error, ToyexpError) else f"{type(error).__name__}: {error}"
        return cls(getattr(error, "exit_code", 1), text)

    def __str__(self) -> str:
        if self.code < 0:
            name = signal.Signals(-self.code).name
            said = f"killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
            return f"{said}; its last line: {self.error}" if self.error else said
        return self.error or f"ended with exit code {self.code}"


@dataclass
class Job:
    """One run of a sweep."""

    number: int
    overrides: list[str]
    directory: str | None = None  # below the sweep's; unknown until its configuration was composed
    status: Status = Status.WAITING
    attempts: int = 0  # how often it was begun
    code: int | None = None
    error: str | None = None
    result: dict[str, Any] = field(default_factory=dict)
    trial: int | None = None  # of a search: which point

    @property
    def hindered(self) -> bool:
        """Whether the machine failed, as a full disk does, and not the job's settings."""
        return self.status == Status.FAILED and any(os.strerror(number) in str(self.error) for number in HINDRANCES)

    @property
    def label(self) -> str:
        """What is its own."""
        return " ".join(self.overrides)

    def difference(self, result: Mapping[str, Any]) -> str:
        """Return the first number of a result that is not the one that was recorded of this job, with both."""
        differ = [name for name, value in self.result.items() if result.get(name) != value]
        return "; ".join(f"{k} was {self.result[k]} and is {printable(str(result.get(k)))}" for k in differ[:1])

    def end(self, ended: Ended, directory: Path | None) -> None:
        """Takes down how it ended; its numbers are read from its run directory."""
        found = read_result(directory) if directory else {}
        self.code, self.status, self.error = ended.code, MEANING.get(ended.code, Status.KILLED), str(ended)
        self.result = {} if self.status in (Status.REFUSED, Status.KILLED) else _numbers_of(found)
        if self.status == Status.COMPLETED:
            self.error = None if found else f"ended with exit code 0 and left no result in {directory}"
            self.status = Status.COMPLETED if found else Status.FAILED
            if found.get("reason") == "aborted" and str(found.get("why")).startswith(PRUNES):
                self.status, self.error = Status.PRUNED, str(found["why"])


def _numbers_of(result: Mapping[str, Any]) -> dict[str, Any]:
    return {name: result[name] for name, hint in NUMBERS.items() if name in result and matches_type(result[name], hint)}


@dataclass(frozen=True)
class Order:
    """What it takes to run a job, on this machine or another one that sees its files."""

    directory: Path
    log: Path
    first: Sequence[str]  # the words that begin it
    again: Sequence[str]  # the words that resume it
    goes_on: bool  # it was begun before
    cores: int = 0  # its share of the machine; 0: all
    gpus: Sequence[str] = ()  # those that it alone has; none: all that there are
    environment: Mapping[str, str] = field(default_factory=dict)  # of its process alone
    several: bool = False  # its process trains a stack, whose jobs check their own directories

    def words(self) -> Sequence[str]:
        """Return the command line of its process; UserError if its directory holds anything but its own run."""
        if self.several:
            return self.first
        if self.goes_on and is_begun(self.directory):
            return self.again
        try:
            require_empty(self.directory, "hydra.sweep.dir")
        except DirectoryLocked:
            raise
        except UserError:
            what = f"{short_path(self.directory)}: is where this job runs, and is no empty directory"
            raise UserError(f"{what}; move that away, then go on with sweep.retry=true") from None
        return self.first


def is_begun(directory: Path) -> bool:
    """Return whether a directory has a checkpoint to resume. A run without one is moved aside."""
    if not directory.is_dir():
        return False
    if checkpoint.list_checkpoints(directory / "checkpoints"):
        return True
    os.close(lock(directory))  # raises UserError while a process writes there
    rename_aside(directory)
    return False


class SweepDir:
    """A directory that belongs to one sweep alone: sweep.json, summary.csv, summary.md, logs/, and a run for each job.

    `asked` is what it takes to go on: flags, settings, sweep (its own settings), where it was typed, and of a search
    the values that it has to choose from (space).
    """

    def __init__(self, path: Path, jobs: list[Job], asked: Mapping[str, Any], locked: int | None = None):
        self.path, self.jobs, self.asked = path, jobs, asked
        self._writing = threading.RLock()
        self._told: set[str] = set()  # reasons
        self._known = len(jobs)  # of the first so many the files hold something
        self._journal, self._whole = Journal(path), Seldom(self._write)
        self._later: threading.Timer | None = None
        self._lock = _lock(path) if locked is None else locked

    @classmethod
    def create(cls, path: Path, jobs: list[Job], asked: Mapping[str, Any]) -> SweepDir:
        """A new one; UserError where anything is already."""
        require_empty(path, "hydra.sweep.dir")
        folder = cls(path, jobs, asked)
        try:
            require_empty(path, "hydra.sweep.dir")  # another process may have been faster
            show_status("writing down the jobs")
            folder.save()
        except BaseException:  # also interrupted while many jobs are written down
            folder.close()
            if not (path / SWEEP_FILE).exists():
                with contextlib.suppress(OSError):
                    (path / LOCK_FILE).unlink()
                    path.rmdir()
            raise
        return folder

    @classmethod
    def open(cls, path: Path) -> SweepDir:
        """One to go on with; UserError where there is none, where it is damaged, and while another process has it."""
        if not (path / SWEEP_FILE).is_file():
            what = f"holds no sweep ({SWEEP_FILE})" if path.exists() else explain_missing(path)
            what += f"; it is a run: resume={path}" if (path / "config.yaml").is_file() else ""
            raise UserError(f"sweep.resume={path}: {what}")
        path = path.absolute()
        require_inside(path)
        locked = _lock(path)  # what is read holds as long as nobody else writes
        try:
            jobs, asked = remembered(path)
            for directory in {job.directory for job in jobs if job.directory and os.sep in job.directory}:
                require_plain_path(path, path / directory)
            return cls(path, jobs, asked, locked)
        except BaseException:
            os.close(locked)
            raise

    def close(self) -> None:
        """Lets others have the directory, whose files are up to date."""
        if self._whole.waits:
            self.save()
        os.close(self._lock)

    def run(self, job: Job) -> Path:
        """The run directory of a job whose configuration was composed."""
        assert job.directory is not None
        return self.path / job.directory

    def log(self, job: Job) -> Path:
        """What a job's processes printed."""
        return self.path / "logs" / f"{job.number}.log"

    def order(self, job: Job) -> Order:
        """Return what starts a job, or resumes one that was begun before."""
        directory = self.run(job)
        where = [format_override("hydra.run.dir", directory), f"hydra.job.num={job.number}"]
        plugins = [word for word in self.asked["settings"] if word.startswith("plugins=")]
        first, again = [*shared_words(self.asked), *job.overrides, *where], [f"resume={directory}", *plugins]
        return Order(directory, self.log(job), first, again, job.attempts > (job.status == Status.RUNNING))

    def begin(self, jobs: Sequence[Job]) -> None:
        """Note that jobs begin."""
        for job in jobs:
            job.status, job.attempts = Status.RUNNING, job.attempts + 1
        self.note(jobs)

    def ranking(self) -> Ranking[Job]:
        """The jobs by what they came to, the best first."""
        return ranked(self.jobs, self.asked["sweep"])

    def note(self, jobs: Sequence[Job]) -> None:
        """Takes down at once how these jobs stand now; where there are many, the summaries follow a little later.

        That they have begun is on the disk before they do: how they ended their directories tell, too.
        """
        with self._writing:
            with self._telling():
                begin = any(job.status == Status.RUNNING for job in jobs)
                end = max((job.number + 1 for job in jobs), default=0)
                told = {job.number: job for job in (*self.jobs[self._known : end], *jobs)}  # no number is left out
                self._journal.add(map(vars, told.values()), flush=begin)
                self._known = max(self._known, end)
            if (wait := self._whole.ask(len(self.jobs))) and self._later is None:
                self._later = threading.Timer(wait, self._catch_up)
                self._later.daemon = True
                self._later.start()

    def save(self) -> None:
        """Writes sweep.json and the summaries, each in one piece; what cannot be written is told once."""
        with self._writing:
            if self._later:
                self._later.cancel()
                self._later = None
            self._whole.now()

    def _catch_up(self) -> None:
        with self._writing:
            if self._later:  # and nobody was faster
                self.save()

    def _write(self) -> None:
        jobs = self.jobs[:]
        ranking = self.ranking()
        table = rows(self.jobs, lambda job: str(self.run(job)) if job.directory else "", ranking)
        files: dict[str, Callable[[], str]] = {
            SWEEP_FILE: lambda: _dumped({"format": FORMAT, **self.asked}, jobs),
            "summary.csv": lambda: format_csv(table),
            "summary.md": lambda: _summary(table, ranking),
        }
        for name, content in files.items():
            with self._telling(name):
                require_plain(self.path / name)
                with write_atomically(self.path / name) as place:
                    place.write_bytes(content().encode(errors="backslashreplace"))
                if name == SWEEP_FILE:
                    self._known = len(jobs)
                    self._journal.clear()

    @contextlib.contextmanager
    def _telling(self, name: str = SWEEP_FILE) -> Iterator[None]:
        """Warn of a file that cannot be written, once for each reason."""
        try:
            yield
        except (OSError, UserError) as error:
            if (why := system_message(error)) not in self._told:
                log.warning("%s: not written (%s); the sweep goes on", self.path / name, why)
            self._told.add(why)
            self._whole.waits = True  # it is tried again, at the latest as the sweep ends


def shared_words(asked: Mapping[str, Any]) -> list[str]:
    """Return the words of all jobs, as a sweep's directory has them."""
    return [*(word for flag in asked["flags"].items() for word in flag), *asked["settings"]]


def _dumped(asked: Mapping[str, Any], jobs: Sequence[Job]) -> str:
    """A sweep.json in which each job has a line: there may be 100,000, with which JSON with indents takes its time."""
    lines = ",\n".join(f"  {dump_json(vars(job))}" for job in jobs)
    return dump_json(asked, indent=1).removesuffix("\n}") + f',\n "jobs": [\n{lines}\n ]\n}}\n'


def _lock(path: Path) -> int:
    try:
        path.mkdir(parents=True, exist_ok=True)
        return lock(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); choose: hydra.sweep.dir=...") from None


def remembered(path: Path) -> tuple[list[Job], dict[str, Any]]:
    """The jobs of the sweep in a directory as they stand, and what it takes to go on; UserError where it is damaged."""
    alone = f"; each of its runs goes on by itself: resume={path}/RUN"
    try:
        state = {"space": [], **read_json(path / SWEEP_FILE)}
        if isinstance(state.get("jobs"), list):
            Journal(path).read_into(state["jobs"])
        jobs = _check(state)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path / SWEEP_FILE}: is damaged: {printable(str(error))}{alone}") from None
    except DamagedCheckpoint as error:
        raise UserError(f"{error}{alone}") from None
    return jobs, {k: state[k] for k in ("flags", "settings", "sweep", "cwd", "space")}


def _check(state: Mapping[str, Any]) -> list[Job]:
    """Return the jobs in a sweep.json; raise KeyError, TypeError, ValueError or DamagedCheckpoint."""
    if state["format"] != FORMAT:
        what = f"{SWEEP_FILE}: has format {printable(str(state['format']))}; this toyexp reads {FORMAT}"
        raise DamagedCheckpoint(f"{what}; if a newer toyexp wrote it, update toyexp")
    asked = {"flags": Mapping[str, str], "settings": list[str], "sweep": list[str], "cwd": str, "space": list[str],
             "jobs": list[Any]}  # fmt: skip
    for name, hint in asked.items():
        if not matches_type(state[name], hint):
            raise ValueError(f"{name} is {state[name]}")
    jobs = [_job(number, entry) for number, entry in enumerate(state["jobs"])]
    for job in jobs:
        if any(text.lstrip("+").startswith("plugins=") for text in job.overrides):
            raise ValueError(f"job {job.number} names plugins, which the command line alone does")
    words = (*state["settings"], *state["space"], *(word for job in jobs for word in job.overrides))
    if any(word.startswith("-") for word in words):
        raise ValueError("a setting looks like a flag")
    return jobs


def _job(number: int, entry: Mapping[str, Any]) -> Job:
    try:
        job = rebuild_dataclass(Job, {"trial": None, **entry, "status": Status(entry["status"])})
    except ValueError as error:
        raise ValueError(f"job {number}: {error}") from None
    job.result = _numbers_of(job.result)
    place = PurePath(job.directory or "")
    if place.is_absolute() or ".." in place.parts:
        raise ValueError(f"job {number} lies outside, in {job.directory}")
    if job.number != number:
        raise ValueError(f"job {number} has number {job.number}")
    return job


@contextlib.contextmanager
def update_summary(run: Path, resumed: bool) -> Iterator[None]:
    """Record how a job ends that is resumed by itself in its sweep's files, unless that sweep is running."""
    if not resumed:
        yield
        return
    ended, before = Ended(0), read_result(run)
    try:
        yield
    except BaseException as error:
        ended = Ended(getattr(error, "exit_code", 130 if isinstance(error, KeyboardInterrupt) else 1), str(error))
        raise
    finally:
        if ended.code != 2:  # it was refused, and nothing happened
            _take_down(run.resolve(), ended, before)


def _take_down(run: Path, ended: Ended, before: Mapping[str, Any]) -> None:
    path = next((folder for folder in run.parents if (folder / SWEEP_FILE).is_file()), None)
    if path is None:
        return
    try:
        folder = SweepDir.open(path)
    except DirectoryLocked:  # which will look for itself
        return
    except UserError as error:
        log.warning("%s; its summary is left as it was", error)
        return
    with contextlib.closing(folder):
        for job in [job for job in folder.jobs if job.directory == str(run.relative_to(path))]:
            if other := job.difference(before):
                print_line(
                    f"sweep   {short_path(path)}: its summary stays as it is: job {job.number} was another run: {other}"
                )
                return
            job.attempts += 1
            job.end(ended, run)
            folder.save()
            print_line(f"sweep   {short_path(path)}: its summary is up to date")


# -- the summary ----------------------------------------------------------------------------------------------------


def rows(jobs: Sequence[Job], where: Callable[[Job], str], ranking: Ranking[Job]) -> list[list[str]]:
    """A head and a line for each job, the best first: what was varied, what came out, where it is, and beside it.

    The last columns are of all jobs that differ from it in the seed alone: how many completed, mean and standard
    deviation (over n-1) of the metric, and whether they are the best.
    """
    varied = list(dict.fromkeys(_key(word) for job in jobs for word in job.overrides))
    names = scores(jobs)
    table = [["job", *varied, "status", "steps taken", TRAIN, "held-out loss", *(f"held-out {n}" for n in names),
              *(f"{role} digest" for role in ranking.apart), "seconds", "run", "error", "seeds",
              f"{ranking.column} mean", f"{ranking.column} std", "best"]]  # fmt: skip
    for job, point in ranking.jobs():
        values = {_key(word): word.partition("=")[2] for word in job.overrides}
        table.append([str(job.number), *(values.get(key, "") for key in varied), state_of(job),
                      *numbers(job, names, ""), *(sources_of(job).get(role, "")[:8] for role in ranking.apart),
                      _number(job.result.get("seconds"), ".1f", ""), where(job), job.error or "",
                      str(len(point.values)), _number(point.mean if point.values else None, ".6f", ""),
                      _number(point.deviation, ".6f", ""), "best" if point is ranking.best else ""])  # fmt: skip
    return table


def state_of(job: Job) -> str:
    """Return what a table calls the end of a job: diverged, or its status."""
    return "diverged" if job.status == Status.COMPLETED and job.result.get("diverged") else str(job.status)


def scores(jobs: Sequence[Job]) -> list[str]:
    """What the models report beside the held-out loss."""
    return list(dict.fromkeys(name for job in jobs for name in job.result.get("eval_scores") or {}))


def numbers(job: Job, names: Sequence[str], none: str) -> list[str]:
    """Steps, training loss, held-out loss and scores of those names."""
    found = job.result
    values = [found.get("train_loss"), found.get("eval_loss"), *map((found.get("eval_scores") or {}).get, names)]
    return [_number(found.get("steps"), "d", none), *(_number(value, ".4f", none) for value in values)]


def _number(value: Any, form: str, none: str) -> str:
    return none if value is None else format(value, form)


def _key(word: str) -> str:
    return word.partition("=")[0].lstrip("+")


def _summary(table: Sequence[Sequence[str]], ranking: Ranking[Job]) -> str:
    over_seeds = f"{SPREAD}\n\n{_markdown(ranking.table())}\n" if ranking.seeds or ranking.apart else ""
    return "".join(f"Note: {note}.\n\n" for note in ranking.notes()) + over_seeds + _markdown(table)


def _markdown(table: Sequence[Sequence[str]]) -> str:
    lines = [[cell.replace("|", "\\|").replace("\n", "<br>") for cell in row] for row in table]
    lines.insert(1, ["---"] * len(table[0]))
    return "".join("| " + " | ".join(row) + " |\n" for row in lines)
