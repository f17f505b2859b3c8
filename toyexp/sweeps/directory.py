"""The directory of a sweep: its jobs, their statuses, and the files that record them."""

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
from toyexp.base.formatting import format_csv, format_metric, short_path
from toyexp.base.ownership import (
    LOCK_FILE,
    SWEEP_FILE,
    DirectoryLocked,
    lock,
    rename_aside,
    require_empty,
    require_inside,
)
from toyexp.base.signals import SIGHUP, SIGUSR1
from toyexp.base.terminal import print_line, show_status
from toyexp.base.writing import dump_json, require_plain, require_plain_path, write_atomically
from toyexp.config.words import format_override
from toyexp.interfaces.command import parse_modules
from toyexp.results.ranking import TRAIN, Ranking, job_sources, rank_jobs
from toyexp.results.run_dirs import PRUNED_PREFIX, RESULT_TYPES
from toyexp.sweeps.journal import Journal, Throttle
from toyexp.training import checkpoint
from toyexp.training.checkpoint import DamagedCheckpoint, matches_type, read_json, read_result, rebuild_dataclass

log = logging.getLogger("toyexp")

FORMAT = 1


class Status(StrEnum):
    """Status of a job."""

    WAITING = "waiting"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"  # it raised an error
    REFUSED = "refused"  # its settings or data are invalid
    KILLED = "killed"
    INTERRUPTED = "interrupted"
    PRUNED = "pruned"  # a search stopped it because other trials were better


FAILURES = (Status.FAILED, Status.REFUSED, Status.KILLED)
UNFINISHED = (Status.WAITING, Status.RUNNING, Status.KILLED, Status.INTERRUPTED)  # jobs that a resumed sweep runs again
SUCCEEDED = (Status.COMPLETED, Status.PRUNED)  # jobs that ran as intended
# Errors of a disk or of limits on open files. They say nothing about a job's settings.
MACHINE_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE)
STOP_SIGNALS = [number for number in (signal.SIGINT, signal.SIGTERM, SIGHUP, SIGUSR1) if number]
# Statuses by the exit code of a job's process. Any other code, or any other signal, means that it was killed.
STATUS_BY_CODE = {
    0: Status.COMPLETED,
    1: Status.FAILED,
    2: Status.REFUSED,
    **{code: Status.INTERRUPTED for number in STOP_SIGNALS for code in (128 + number, -number)},
}


@dataclass(frozen=True)
class JobExit:
    """Exit code of a job's process, and the error message that the job printed."""

    code: int  # negative: the number of the signal that killed the process
    error: str = ""  # the error that it printed last

    @classmethod
    def from_error(cls, error: BaseException) -> JobExit:
        """Return the exit of a job that raised `error` in this process."""
        is_stopped = isinstance(error, KeyboardInterrupt)
        text = str(error) if is_stopped or isinstance(error, ToyexpError) else f"{type(error).__name__}: {error}"
        return cls(getattr(error, "exit_code", 130 if is_stopped else 1), text)

    def __str__(self) -> str:
        if self.code < 0:
            name = signal.Signals(-self.code).name
            text = f"killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
            return f"{text}; last output: {self.error}" if self.error else text
        return self.error or f"ended with exit code {self.code}"


@dataclass
class Job:
    """One run of a sweep: its overrides, its status, and its result once it has ended."""

    number: int
    overrides: list[str]
    directory: str | None = None  # relative to the sweep's directory; None until the job's configuration is composed
    status: Status = Status.WAITING
    attempts: int = 0  # number of times that the job was started
    code: int | None = None
    error: str | None = None
    result: dict[str, Any] = field(default_factory=dict)
    trial: int | None = None  # number of its trial in a search

    @property
    def is_machine_error(self) -> bool:
        """Whether the machine caused the failure (for example a full disk), rather than the job's settings."""
        return self.status == Status.FAILED and any(os.strerror(number) in str(self.error) for number in MACHINE_ERRNOS)

    @property
    def label(self) -> str:
        """Overrides of this job that set it apart from other jobs of the sweep, joined by blanks: lr=0.1 seed=2."""
        return " ".join(self.overrides)

    def difference(self, result: Mapping[str, Any]) -> str:
        """Compare `result`, which was read from the run directory again, with the result that this job recorded.

        Return a text about the first value that differs, or "" if all are equal.
        """
        differ = [name for name, value in self.result.items() if result.get(name) != value]
        return "; ".join(f"{k} was {self.result[k]} and is {printable(str(result.get(k)))}" for k in differ[:1])

    def record_exit(self, ended: JobExit, directory: Path | None) -> None:
        """Record how the job ended, and read its result (steps, losses, metrics) from `directory` if that is given.

        A job that exited with code 0 but left no result has failed.
        """
        result = read_result(directory) if directory else {}
        self.code, self.status, self.error = ended.code, STATUS_BY_CODE.get(ended.code, Status.KILLED), str(ended)
        self.result = {} if self.status in (Status.REFUSED, Status.KILLED) else _valid_numbers(result)
        if self.status == Status.COMPLETED:
            self.error = None if result else f"ended with exit code 0 without a result in {directory}"
            self.status = Status.COMPLETED if result else Status.FAILED
            if result.get("reason") == "aborted" and str(result.get("why")).startswith(PRUNED_PREFIX):
                self.status, self.error = Status.PRUNED, str(result["why"])


def _valid_numbers(result: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: result[name] for name, hint in RESULT_TYPES.items() if name in result and matches_type(result[name], hint)
    }


@dataclass(frozen=True)
class LaunchSpec:
    """Data that is needed to start a job on this machine, or on another one that shares the file system."""

    directory: Path
    log: Path
    start_args: Sequence[str]  # arguments that start the run
    resume_args: Sequence[str]  # arguments that resume the run
    resumes: bool  # whether the job was started before
    cores: int = 0  # CPU cores of the job; 0: all
    gpus: Sequence[str] = ()  # GPUs of this job alone; empty: all GPUs
    environment: Mapping[str, str] = field(default_factory=dict)  # extra variables for its process
    is_stack: bool = False  # whether the process trains several jobs, which check their own directories

    def args(self) -> Sequence[str]:
        """Return the command-line arguments of the job's process: those that start its run, or those that resume it.

        Raise UserError if the run has to start anew but its directory holds other files.
        """
        if self.is_stack:
            return self.start_args
        if self.resumes and prepare_resume(self.directory):
            return self.resume_args
        try:
            require_empty(self.directory, "hydra.sweep.dir")
        except DirectoryLocked:
            raise
        except UserError:
            problem = f"{short_path(self.directory)}: is the run directory of this job and is not empty"
            raise UserError(f"{problem}; move it away, then resume the sweep with sweep.retry=true") from None
        return self.start_args


def prepare_resume(directory: Path) -> bool:
    """Return True if a run directory has a checkpoint to resume.

    If it has none, return False. In this case, an existing directory is renamed, so that the run can start again under
    its path. Raise UserError if another process uses the directory.
    """
    if not directory.is_dir():
        return False
    if checkpoint.list_checkpoints(directory / "checkpoints"):
        return True
    os.close(lock(directory))  # raises UserError while another process writes there
    rename_aside(directory)
    return False


@dataclass(frozen=True)
class SweepSpec:
    """Data with which a sweep is resumed."""

    flags: Mapping[str, str]  # flags of the command line
    settings: list[str]  # settings that all jobs share
    sweep: list[str]  # the sweep.* settings
    cwd: str  # directory in which the sweep was started
    space: list[str]  # swept keys of a search, with their values; empty for other sweeps

    @property
    def shared_args(self) -> list[str]:
        """Arguments that all jobs share: flags and settings."""
        return [*(word for flag in self.flags.items() for word in flag), *self.settings]


class SweepDir:
    """Directory of one sweep: sweep.json, summary.csv, summary.md, logs/, and a run directory for each job."""

    def __init__(self, path: Path, jobs: list[Job], spec: SweepSpec, locked: int):
        self.path, self.jobs, self.spec = path, jobs, spec
        self._writing = threading.RLock()
        self._warned_reasons: set[str] = set()  # reasons that were reported
        self._saved_count = len(jobs)  # the files have entries for this number of jobs
        self._journal, self._writer = Journal(path), Throttle(self._write)
        self._later: threading.Timer | None = None
        self._lock = locked

    @classmethod
    def create(cls, path: Path, jobs: list[Job], spec: SweepSpec) -> SweepDir:
        """Create and lock the directory, and write the list of jobs. Raise UserError if it exists and is not empty."""
        require_empty(path, "hydra.sweep.dir")
        folder = cls(path, jobs, spec, _lock(path))
        try:
            require_empty(path, "hydra.sweep.dir")  # again: files may have been created before the lock
            show_status("writing the list of jobs")
            folder.save()
        except BaseException:  # also KeyboardInterrupt while a long list of jobs is written
            folder.close()
            if not (path / SWEEP_FILE).exists():
                with contextlib.suppress(OSError):
                    (path / LOCK_FILE).unlink()
                    path.rmdir()
            raise
        return folder

    @classmethod
    def open(cls, path: Path) -> SweepDir:
        """Open the directory of a sweep to resume it.

        Raise UserError if it holds no sweep, is damaged, or is used by another process.
        """
        if not (path / SWEEP_FILE).is_file():
            problem = f"holds no sweep ({SWEEP_FILE})" if path.exists() else explain_missing(path)
            problem += f"; it is a run: resume={path}" if (path / "config.yaml").is_file() else ""
            raise UserError(f"sweep.resume={path}: {problem}")
        path = path.absolute()
        require_inside(path)
        locked = _lock(path)  # lock first: another process could change the files
        try:
            jobs, spec = read_sweep(path)
            for directory in {job.directory for job in jobs if job.directory and os.sep in job.directory}:
                require_plain_path(path, path / directory)
            return cls(path, jobs, spec, locked)
        except BaseException:
            os.close(locked)
            raise

    def close(self) -> None:
        """Write pending changes and release the lock of the directory."""
        with self._writing:
            self._write_pending()
            self._writer.is_pending = False  # after a failed write the timer must not try again without the lock
            os.close(self._lock)

    def run_dir(self, job: Job) -> Path:
        """Return a job's run directory. The job must have one already (`job.directory` is not None)."""
        assert job.directory is not None
        return self.path / job.directory

    def log_path(self, job: Job) -> Path:
        """Return the file with the output of a job's processes."""
        return self.path / "logs" / f"{job.number}.log"

    def launch_spec(self, job: Job) -> LaunchSpec:
        """Return the specification to start a job, or to resume one that was started before."""
        directory = self.run_dir(job)
        run_args = [format_override("hydra.run.dir", directory), f"hydra.job.num={job.number}"]
        modules = parse_modules([*self.spec.settings, *job.overrides])
        plugins = [f"plugins=[{','.join(modules)}]"] if modules else []
        start, resume = [*self.spec.shared_args, *job.overrides, *run_args], [f"resume={directory}", *plugins]
        return LaunchSpec(directory, self.log_path(job), start, resume, job.attempts > (job.status == Status.RUNNING))

    def mark_running(self, jobs: Sequence[Job]) -> None:
        """Set the status of jobs to running, and add 1 to the number of attempts of each job.

        Write these changes to the journal.
        """
        for job in jobs:
            job.status, job.attempts = Status.RUNNING, job.attempts + 1
        self.record(jobs)

    def rank(self) -> Ranking[Job]:
        """Return the jobs ranked by the sweep's metric, the best first."""
        return rank_jobs(self.jobs, self.spec.sweep)

    def record(self, jobs: Sequence[Job]) -> None:
        """Append the current state of these jobs to the journal, then rewrite sweep.json and the summaries.

        If the sweep has many jobs, the files are rewritten later. When a job starts, its state is flushed to the disk
        before the job runs. When a job ends, its state is not flushed, since the run directory records the end too.
        """
        with self._writing:
            with self._warn_unwritten():
                begin = any(job.status == Status.RUNNING for job in jobs)
                end = max((job.number + 1 for job in jobs), default=0)
                # Add earlier jobs that were never saved, so that no number is missing.
                changed_jobs = {job.number: job for job in (*self.jobs[self._saved_count : end], *jobs)}
                self._journal.add(map(vars, changed_jobs.values()), flush=begin)
                self._saved_count = max(self._saved_count, end)
            if (wait := self._writer.request(len(self.jobs))) and self._later is None:
                self._later = threading.Timer(wait, self._write_pending)
                self._later.daemon = True
                self._later.start()

    def save(self) -> None:
        """Write sweep.json, summary.csv and summary.md, each atomically.

        Warn once about a file that cannot be written.
        """
        with self._writing:
            self._writer.run()

    def _write_pending(self) -> None:
        with self._writing:
            self._later = None
            if self._writer.is_pending:
                self._writer.run()

    def _write(self) -> None:
        jobs = self.jobs[:]
        ranking = self.rank()
        table = summary_rows(self.jobs, self.path, ranking)
        files: dict[str, Callable[[], str]] = {
            SWEEP_FILE: lambda: _sweep_json(self.spec, jobs),
            "summary.csv": lambda: format_csv(table),
            "summary.md": lambda: _summary(table, ranking),
        }
        for name, content in files.items():
            with self._warn_unwritten(name):
                require_plain(self.path / name)
                with write_atomically(self.path / name) as temporary:
                    temporary.write_bytes(content().encode(errors="backslashreplace"))
                if name == SWEEP_FILE:
                    self._saved_count = len(jobs)
                    self._journal.clear()

    @contextlib.contextmanager
    def _warn_unwritten(self, name: str = SWEEP_FILE) -> Iterator[None]:
        """Log a warning instead of raising an error if the `with` block cannot write the file `name`.

        Errors with the same reason are logged only once. The sweep tries to write the file again later.
        """
        try:
            yield
        except (OSError, UserError) as error:
            if (why := system_message(error)) not in self._warned_reasons:
                log.warning("%s: not written (%s); the sweep goes on", self.path / name, why)
            self._warned_reasons.add(why)
            self._writer.is_pending = True  # try again later, at the latest when the sweep ends


def _sweep_json(spec: SweepSpec, jobs: Sequence[Job]) -> str:
    """Return the text of sweep.json, with one line for each job.

    Indented JSON would be slow for 100,000 jobs.
    """
    lines = ",\n".join(f"  {dump_json(vars(job))}" for job in jobs)
    head = dump_json({"format": FORMAT, **vars(spec)}, indent=1).removesuffix("\n}")
    return f'{head},\n "jobs": [\n{lines}\n ]\n}}\n'


def _lock(path: Path) -> int:
    try:
        path.mkdir(parents=True, exist_ok=True)
        return lock(path)
    except OSError as error:
        problem = f"cannot be written ({error.strerror}); choose another directory: hydra.sweep.dir=..."
        raise UserError(f"{path}: {problem}") from None


def read_sweep(path: Path) -> tuple[list[Job], SweepSpec]:
    """Return a sweep's jobs, and the data needed to resume it. Raise UserError if its files are missing or damaged."""
    alone = f"; its runs can be resumed one by one: resume={path}/RUN"
    try:
        state = read_json(path / SWEEP_FILE)
        if state["format"] != FORMAT:
            problem = f"{SWEEP_FILE}: has format {printable(str(state['format']))}; this toyexp reads format {FORMAT}"
            raise DamagedCheckpoint(f"{problem}; if a newer toyexp wrote it, update toyexp")
        spec, entries = rebuild_dataclass(SweepSpec, state), state["jobs"]
        if not isinstance(entries, list):
            raise ValueError(f"jobs is {entries}")
        if not entries and not spec.space:
            raise ValueError("jobs is empty")
        Journal(path).read_into(entries)
        jobs = [_job(number, entry) for number, entry in enumerate(entries)]
        overrides = (*spec.settings, *spec.space, *(word for job in jobs for word in job.overrides))
        if any(word.startswith("-") for word in overrides):
            raise ValueError("a setting looks like a flag")
    except (KeyError, TypeError, ValueError) as error:
        problem = f"{error.args[0]} is missing" if isinstance(error, KeyError) else printable(str(error))
        raise UserError(f"{path / SWEEP_FILE}: is damaged: {problem}{alone}") from None
    except DamagedCheckpoint as error:
        raise UserError(f"{error}{alone}") from None
    return jobs, spec


def _job(number: int, entry: Mapping[str, Any]) -> Job:
    try:
        job = rebuild_dataclass(Job, {**entry, "status": Status(entry["status"])})
    except ValueError as error:
        raise ValueError(f"job {number}: {error}") from None
    job.result = _valid_numbers(job.result)
    if any(text.lstrip("+").startswith("plugins=") for text in job.overrides):
        raise ValueError(f"job {number} sets plugins, which only the command line may do")
    path = PurePath(job.directory or "")
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(f"job {number} has a directory outside of the sweep: {job.directory}")
    if job.number != number:
        raise ValueError(f"the entry of job {number} has the number {job.number}")
    return job


@contextlib.contextmanager
def update_summary(run: Path, resumed: bool) -> Iterator[None]:
    """Update the files of the sweep to which a resumed run belongs, when the `with` block that resumes it ends.

    This is needed if the user resumed a single run (resume=DIR) instead of its sweep (sweep.resume=DIR). Do nothing if
    `resumed` is False, if the directory `run` belongs to no sweep, or if the sweep is running.
    """
    if not resumed:
        yield
        return
    ended, before = JobExit(0), read_result(run)
    try:
        yield
    except BaseException as error:
        ended = JobExit.from_error(error)
        raise
    finally:
        if ended.code != 2:  # with code 2 the settings were rejected and nothing ran
            _record_resumed_run(run.resolve(), ended, before)


def _record_resumed_run(run: Path, ended: JobExit, before: Mapping[str, Any]) -> None:
    path = next((folder for folder in run.parents if (folder / SWEEP_FILE).is_file()), None)
    if path is None:
        return
    try:
        folder = SweepDir.open(path)
    except DirectoryLocked:  # the running sweep reads the result itself
        return
    except UserError as error:
        log.warning("%s; its summary is not updated", error)
        return
    with contextlib.closing(folder):
        for job in [job for job in folder.jobs if job.directory == str(run.relative_to(path))]:
            if difference := job.difference(before):
                reason = f"job {job.number} was another run: {difference}"
                print_line(f"sweep   {short_path(path)}: its summary is not updated: {reason}")
                return
            job.attempts += 1
            job.record_exit(ended, run)
            folder.save()
            print_line(f"sweep   {short_path(path)}: its summary is up to date")


# -- the summary ----------------------------------------------------------------------------------------------------


def summary_rows(jobs: Sequence[Job], root: Path, ranking: Ranking[Job]) -> list[list[str]]:
    """Return the table of summary.csv: a header, then a row for each job, the best first.

    A row holds the job's overrides, status, steps, losses, metrics, run directory (below `root`) and error.
    Its last columns describe a group: this job and all jobs that differ from it only in their seed. They hold the
    number of completed jobs in the group, the mean and the standard deviation (over n-1) of the metric, and "best" for
    the best group.
    """
    keys = list(dict.fromkeys(_key(word) for job in jobs for word in job.overrides))
    names = score_names(jobs)
    table = [["job", *keys, "status", "steps taken", TRAIN, "held-out loss", *(f"held-out {n}" for n in names),
              *(f"{role} digest" for role in ranking.changed_sources), "seconds", "run", "error", "seeds",
              f"{ranking.column} mean", f"{ranking.column} std", "best"]]  # fmt: skip
    for job, point in ranking.jobs():
        values = {_key(word): word.partition("=")[2] for word in job.overrides}
        table.append([str(job.number), *(values.get(key, "") for key in keys), job_state(job),
                      *number_cells(job, names, ""),
                      *(job_sources(job).get(role, "")[:8] for role in ranking.changed_sources),
                      format_metric(job.result.get("seconds"), 1, ""),
                      str(root / job.directory) if job.directory else "", job.error or "",
                      str(len(point.values)), format_metric(point.mean, 6, ""),
                      format_metric(point.deviation, 6, ""), "best" if point is ranking.best else ""])  # fmt: skip
    return table


def job_state(job: Job) -> str:
    """Return the text that tables show for a job's status.

    A completed job whose loss diverged has the text "diverged".
    """
    return "diverged" if job.status == Status.COMPLETED and job.result.get("diverged") else str(job.status)


def score_names(jobs: Sequence[Job]) -> list[str]:
    """Return the names of all held-out metrics, other than the loss, in the results of these jobs."""
    return list(dict.fromkeys(name for job in jobs for name in job.result.get("eval_scores") or {}))


def number_cells(job: Job, names: Sequence[str], none: str) -> list[str]:
    """Return table cells with a job's steps, training loss, held-out loss, and the held-out metrics in `names`.

    The cell of a missing value is the text `none`.
    """
    result, steps = job.result, job.result.get("steps")
    values = [result.get("train_loss"), result.get("eval_loss"), *map((result.get("eval_scores") or {}).get, names)]
    return [none if steps is None else str(steps), *(format_metric(value, none=none) for value in values)]


def _key(word: str) -> str:
    return word.partition("=")[0].lstrip("+")


def _summary(table: Sequence[Sequence[str]], ranking: Ranking[Job]) -> str:
    has_points = ranking.has_seeds or ranking.changed_sources
    over_seeds = f"{ranking.caption}\n\n{_markdown(ranking.table())}\n" if has_points else ""
    return "".join(f"Note: {note}.\n\n" for note in ranking.notes()) + over_seeds + _markdown(table)


def _markdown(table: Sequence[Sequence[str]]) -> str:
    lines = [[cell.replace("|", "\\|").replace("\n", "<br>") for cell in row] for row in table]
    lines.insert(1, ["---"] * len(table[0]))
    return "".join("| " + " | ".join(row) + " |\n" for row in lines)
