"""`toyexp.sweep(...)`: many runs from Python, and what came out of them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from signal import Signals
from typing import TYPE_CHECKING, Any

from toyexp.base.blame import of_a_part
from toyexp.base.errors import UserError
from toyexp.base.home import at_home
from toyexp.base.packages import needed
from toyexp.base.words import columns, counted, short
from toyexp.commands.flags import split
from toyexp.commands.line import many_runs
from toyexp.contract.owners import OWNERS
from toyexp.contract.plugins import load
from toyexp.contract.registry import Registry
from toyexp.door.aside import aside
from toyexp.door.result import Result, require_run
from toyexp.door.shown import of_table
from toyexp.door.words import place, texts, worded
from toyexp.sweep.directory import Job, remembered
from toyexp.sweep.ranking import Ranking, ranked

if TYPE_CHECKING:
    import pandas

SHOWN = 30  # rows of a table


def sweep(
    *words: str,
    resume: str | os.PathLike[str] | None = None,
    directory: str | os.PathLike[str] | None = None,
    quiet: bool = False,
    **settings: Any,
) -> SweepResult:
    """Runs every combination of values, or a search, and returns what came out: `toyexp -m ...` from Python.

    `words` are what stands behind `toyexp -m`: `"seed=0,1,2"`, `"lr=tag(log, interval(1e-4, 1e-2))"`. Of keywords a
    list has the values of a sweep, `lr=[1e-3, 3e-3]`, and anything else is a setting of all jobs; how they are run is
    `sweep={"launcher": "joblib", "jobs": 4}`. A setting that is a list by itself stands in a word.

        swept = toyexp.sweep("recipe=scratch,warm", seed=[0, 1, 2], steps=100)
        swept.best.held_out["loss"], swept.frame()

    It is written to `directory`, which must not hold anything, or below outputs/sweeps/. `resume` goes on with the
    sweep in a directory (or a SweepResult). Each job is a process of its own, unless sweep.isolate=false.

    Raises UserError for bad input, where nothing is said of what to run, and where no job could begin; a job that fails
    ends no other, and stands in the result. KeyboardInterrupt lets the jobs that run save first; a note on it says how
    to look, and how to go on.
    """
    typed = [*texts("toyexp.sweep", words), *worded(settings, swept=True)]
    if not typed and resume is None:
        raise UserError("toyexp.sweep: says nothing of what to run: toyexp.sweep(seed=[0, 1]); one run is toyexp.run()")
    with aside("toyexp.sweep", quiet), of_a_part(lambda: OWNERS):
        from toyexp.config.request import Request
        from toyexp.config.schema import Source
        from toyexp.config.words import setting
        from toyexp.sweep.begin import prepared

        flags, asked = split(at_home(typed))
        if directory is not None:
            asked.append(setting("hydra.sweep.dir", place("toyexp.sweep directory", directory).absolute()))
        if resume is not None:
            asked.append(setting("sweep.resume", place("toyexp.sweep resume", resume).absolute()))
        flags.pop("--multirun", None)
        for flag in flags:
            if not flag.startswith("--config-"):
                raise UserError(f"toyexp.sweep {flag}: trains; type it: toyexp -m {flag} ...")
        request = Request.of(asked, Source.of(*map(flags.get, ("--config-path", "--config-name", "--config-dir"))))
        runner, jobs = prepared(many_runs(flags, request))
        code = runner.run(jobs)
        if code > 128:
            interrupted = KeyboardInterrupt(f"interrupted by {Signals(code - 128).name}")
            if runner.place is not None:  # else it had not begun
                left = repr(short(runner.place))
                interrupted.add_note(f"what it left: toyexp.open({left}); go on: toyexp.sweep(resume={left})")
            raise interrupted
        if runner.place is None:
            raise UserError(next((job.error for job in runner.jobs if job.error), "the sweep has no job"))
    return SweepResult(runner.place, request.registry)


class SweepResult(Sequence[Result]):
    """A sweep's directory: a sequence of its runs, the best first; those that did not complete come last.

    It may stand wherever a path may: `toyexp.sweep(resume=swept)`.
    """

    def __init__(self, directory: Path, registry: Registry | None = None):
        self.directory = directory.absolute()
        self._registry = registry or load()
        self._all, asked = remembered(self.directory)
        self._ranking: Ranking[Job] = ranked(self._all, asked["sweep"])

    def __reduce__(self) -> tuple[Any, ...]:
        """See Result."""
        return SweepResult, (self.directory, None)

    @cached_property
    def runs(self) -> list[Result]:
        """Its runs, the best first; a job that did not begin has none."""
        return [result for job, _ in self._ranking.jobs() if (result := self._result(job))]

    @property
    def best(self) -> Result | None:
        """The best run of the best choice of settings, by the mean over its seeds; None where none completed."""
        return self.runs[0] if self._ranking.best and self.runs else None

    @property
    def metric(self) -> str:
        """What they are ordered by: `held-out loss`, or another score; `train loss` where nothing was held out."""
        return self._ranking.column

    @cached_property
    def table(self) -> list[dict[str, Any]]:
        """A row for each job, the best first: its number, its own settings, state, steps, scores, seconds, error.

        `mean` and `deviation` (over n-1) are of the metric, over all jobs that differ from it in the seed alone.
        """
        keys = list(dict.fromkeys(word.partition("=")[0] for job in self._all for word in job.overrides))
        rows = []
        for job, point in self._ranking.jobs():
            result, found = self._result(job), job.result
            own = {word.partition("=")[0]: word.partition("=")[2] for word in job.overrides}
            scores = {f"held_out_{name}": value for name, value in (found.get("eval_scores") or {}).items()}
            rows.append({
                "job": job.number,
                **{key: result.settings.get(key, own.get(key)) if result else own.get(key) for key in keys},
                "state": str(job.status), "steps": found.get("steps"), "loss": found.get("train_loss"),
                "held_out_loss": found.get("eval_loss"), **scores, "seconds": found.get("seconds"),
                "mean": point.mean if point.values else None, "deviation": point.deviation, "error": job.error,
            })  # fmt: skip
        return rows

    def frame(self) -> pandas.DataFrame:
        """The table, by job; raises Unavailable without pandas."""
        with needed("pandas", "pip install pandas"):
            import pandas
        return pandas.DataFrame(self.table).set_index("job")

    @property
    def failed(self) -> dict[int, str]:
        """Why jobs have no result, by their numbers: what failed, was refused, or was killed."""
        return {job.number: job.error for job in self._all if job.error and job.status != "pruned"}

    @property
    def report(self) -> Path | None:
        """report.html, its runs side by side in one file, where it was written."""
        path = self.directory / "report.html"
        return path if path.is_file() else None

    def _result(self, job: Job) -> Result | None:
        if job.directory is None:
            return None
        try:
            require_run(self.directory / job.directory)
        except UserError:  # it ended before it wrote anything
            return None
        return Result(self.directory / job.directory, self._registry)

    def __getitem__(self, index: Any) -> Any:
        return self.runs[index]

    def __len__(self) -> int:
        return len(self.runs)

    def _cells(self) -> tuple[list[str], list[list[str]], str]:
        """Heads, rows and a line below them, as text."""
        left_out = {"error", *(name for name in ("mean", "deviation") if not self._ranking.seeds)}
        heads = [name for name in dict.fromkeys(key for row in self.table for key in row) if name not in left_out]
        rows = [[_text(row.get(name)) for name in heads] for row in self.table[:SHOWN]]
        more = f"{len(self.table) - SHOWN} more in .table; " if len(self.table) > SHOWN else ""
        failed = f", {len(self.failed)} without a result (.failed)" if self.failed else ""
        below = f"{more}{counted(len(self._all), 'job')}{failed}, the best {self.metric} first; {short(self.directory)}"
        return heads, rows, below

    def __repr__(self) -> str:
        heads, rows, below = self._cells()
        return "\n".join([*columns([heads, *rows]), below])

    def _repr_html_(self) -> str:
        return of_table(*self._cells())

    def __fspath__(self) -> str:
        return str(self.directory)


def _text(value: Any) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
