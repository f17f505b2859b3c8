"""The Python API: `run`, `sweep`, `open`, `evaluate`, `predict` and `compare`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from signal import Signals
from typing import TYPE_CHECKING, Any

from toyexp.api.calls import check_path, check_words, format_settings, isolated_call, note_remains
from toyexp.api.result import Result, require_run, table_html
from toyexp.base.errors import UserError
from toyexp.base.formatting import align_columns, format_metric, pluralise, short_path
from toyexp.base.ownership import SWEEP_FILE
from toyexp.base.packages import require_package
from toyexp.base.signals import protect_imports
from toyexp.base.terminal import print_error
from toyexp.base.user_paths import expand_overrides
from toyexp.base.writing import reject_bad_names
from toyexp.config.flags import build_request, read_flags, split_flags
from toyexp.config.words import format_override
from toyexp.inference.model_files import is_checkpoint
from toyexp.plugins.discovery import load
from toyexp.plugins.registry import Registry
from toyexp.results.ranking import Ranking, rank_jobs
from toyexp.sweeps.directory import Job, read_sweep, update_summary
from toyexp.training.checkpoint import read_result

if TYPE_CHECKING:
    import pandas

    from toyexp.base.drawing import Sheet
    from toyexp.config.request import Request
    from toyexp.inference.evaluate import Evaluation
    from toyexp.inference.predict import Predictions
    from toyexp.sweeps.compare import ComparisonAnswer


@protect_imports()
def run(
    *words: str,
    resume: str | os.PathLike[str] | None = None,
    directory: str | os.PathLike[str] | None = None,
    quiet: bool = False,
    **settings: Any,
) -> Result:
    """Run or resume one experiment and return its result.

    `words` are arguments of the command line, such as `"recipe=warm"` or `"--config-dir=mine"`. Keyword arguments are
    settings, such as `steps=100` or `recipe="warm"`, and take precedence over `words`. Set a part together with its
    settings by a mapping that has the part's name under `name`: `model={"name": "llama", "d_model": 128}`. Set a single
    setting of a part by its full key: `**{"optim.beta1": 0.9}`.

        result = toyexp.run("recipe=warm", steps=100, seed=1)
        result.history["loss"], result.held_out["loss"], result.generate("def ")

    The run is written to `directory`, which must be empty, or by default to a new directory below outputs/. `resume` is
    the directory (or the Result) of a run to resume. `resume="auto"` resumes the newest run of the same name, or starts
    a new run if there is none. If `quiet` is True, nothing is printed.

    Raise UserError for invalid input, before anything is written, and RunFailed if the run fails. On Ctrl-C, the run
    saves a checkpoint, and the KeyboardInterrupt has a note on how to resume it. Calls from several threads wait for
    each other. The global state of the process, such as random state and environment, is restored when the call
    returns.
    """
    typed = [*check_words("toyexp.run", words), *format_settings(settings)]
    if resume is not None:
        typed.append(f"resume={os.fspath(check_path('toyexp.run resume', resume))}")
    with isolated_call("toyexp.run", quiet):
        from toyexp.runner.one_run import prepare_request
        from toyexp.training.resume import AUTO, Complete

        flags, overrides, resume_value = read_flags(expand_overrides(typed))
        if "--multirun" in flags:
            raise UserError("--multirun: toyexp.run trains one experiment; for several use toyexp.sweep(...)")
        overrides += _directory_override("hydra.run.dir", "toyexp.run directory", directory)
        request = _build_request("toyexp.run", flags, overrides)
        if "sweep.resume" in request.values:
            raise UserError("toyexp.run sweep.resume: resumes a sweep; use toyexp.sweep(resume=DIR)")
        try:
            ready = prepare_request(request, resume_value)
        except Complete as error:
            if resume_value != AUTO:
                raise
            return Result(error.run, request.registry)
        with note_remains(ready.directory, "toyexp.run("), update_summary(ready.directory, ready.resumed is not None):
            ready.run()
    return Result(ready.directory, request.registry)


def _directory_override(key: str, parameter: str, path: str | os.PathLike[str] | None) -> list[str]:
    return [] if path is None else [format_override(key, check_path(parameter, path).absolute())]


def _build_request(call: str, flags: Mapping[str, str], settings: Sequence[str]) -> Request:
    for flag in flags:
        if not flag.startswith("--config-"):
            command = "toyexp -m" if call == "toyexp.sweep" else "toyexp"
            raise UserError(f"{call} {flag}: not supported from Python; type: {command} {flag} ...")
    return build_request(flags, settings)


MAX_ROWS = 30  # maximum number of table rows shown


@protect_imports()
def sweep(
    *words: str,
    resume: str | os.PathLike[str] | None = None,
    directory: str | os.PathLike[str] | None = None,
    quiet: bool = False,
    **settings: Any,
) -> SweepResult:
    """Run a sweep, as `toyexp -m ...` does, and return its results.

    A sweep trains one job for each combination of the given values, or for each trial of a search. `words` are
    arguments of `toyexp -m`, such as `"seed=0,1,2"` or `"lr=tag(log, interval(1e-4, 1e-2))"`. A keyword argument with a
    list gives the values to try: `lr=[1e-3, 3e-3]`. Other keyword arguments are settings of all jobs. If a setting's
    value is itself a list, pass the setting in `words`. `sweep={"launcher": "processes", "jobs": 4}` chooses how jobs
    are launched.

        swept = toyexp.sweep("recipe=scratch,warm", seed=[0, 1, 2], steps=100)
        swept.best.held_out["loss"], swept.frame()

    The sweep is written to `directory`, which must be empty, or by default to a new directory below outputs/sweeps/.
    `resume` is the directory (or the SweepResult) of a sweep to resume. Each job runs in its own process, unless
    sweep.isolate=false. If `quiet` is True, nothing is printed.

    Raise UserError for invalid input, or if no job could start. A failing job does not stop the others; the result's
    `errors` has its message. On Ctrl-C, running jobs save checkpoints, and the KeyboardInterrupt has a note on how to
    resume the sweep.
    """
    typed = [*check_words("toyexp.sweep", words), *format_settings(settings, swept=True)]
    if not typed and resume is None:
        raise UserError("toyexp.sweep: needs settings, such as toyexp.sweep(seed=[0, 1]); for one run use toyexp.run()")
    with isolated_call("toyexp.sweep", quiet):
        from toyexp.sweeps.begin import prepare_sweep

        flags, overrides = split_flags(expand_overrides(typed))
        flags.pop("--multirun", None)
        overrides += _directory_override("hydra.sweep.dir", "toyexp.sweep directory", directory)
        overrides += _directory_override("sweep.resume", "toyexp.sweep resume", resume)
        request = _build_request("toyexp.sweep", flags, overrides)
        runner = prepare_sweep(flags, request)
        code = runner.run()
        if code > 128:
            interrupted = KeyboardInterrupt(f"interrupted by {Signals(code - 128).name}")
            if runner.folder is not None:  # None if the sweep had not started
                shown = repr(short_path(runner.folder.path))
                interrupted.add_note(f"open the sweep: toyexp.open({shown}); resume: toyexp.sweep(resume={shown})")
            raise interrupted
        if runner.folder is None:
            raise UserError(next((job.error for job in runner.source.jobs if job.error), "the sweep has no job"))
    return SweepResult(runner.folder.path, request.registry)


class SweepResult(Sequence[Result]):
    """Result of a sweep: a sequence with a Result for each run, best first. Runs that did not complete come last.

    You can pass this object wherever a path is expected. It then stands for the sweep's directory, for example in
    `toyexp.sweep(resume=swept)`.
    """

    def __init__(self, directory: Path, registry: Registry | None = None):
        self.directory = directory.absolute()
        self._registry = registry or load()
        self._jobs, spec = read_sweep(self.directory)
        self._ranking: Ranking[Job] = rank_jobs(self._jobs, spec.sweep)
        self._results = {job.number: self._result(job) for job, _ in self._ranking.jobs()}

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle only the directory; unpickling reads the sweep again, with the installed plugins."""
        return SweepResult, (self.directory, None)

    @property
    def runs(self) -> list[Result]:
        """Results of the sweep's runs, best first. Jobs that ended before they wrote a run are left out."""
        return [result for result in self._results.values() if result]

    @property
    def best(self) -> Result | None:
        """Best run of the sweep; None if no run completed, or if the data or losses of the runs differ.

        The settings with the best mean over seeds are chosen first. Among the runs with these settings, this is the run
        with the best `metric`.
        """
        return self.runs[0] if self._ranking.best and self.runs else None

    @property
    def metric(self) -> str:
        """Name of the metric that ranks the runs, such as `held-out loss`.

        It is `smoothed train loss` if no run has a held-out metric.
        """
        return self._ranking.column

    @cached_property
    def table(self) -> list[dict[str, Any]]:
        """A list with a dict for each job, best first.

        A dict has the job's number, swept settings, held-out metrics, training loss, state, steps, seconds and error.
        `mean` and `deviation` describe this job and all jobs that differ from it only in their seed. They are the mean
        and the sample standard deviation of the metric that ranks the runs.
        """
        keys = list(dict.fromkeys(word.partition("=")[0] for job in self._jobs for word in job.overrides))
        rows = []
        for job, point in self._ranking.jobs():
            result, summary = self._results[job.number], job.result
            values: dict[str, Any] = {word.partition("=")[0]: word.partition("=")[2] for word in job.overrides}
            with contextlib.suppress(UserError):  # the run was resumed after this result was read
                values |= result.settings if result else {}
            scores = {f"held_out_{name}": value for name, value in (summary.get("eval_scores") or {}).items()}
            rows.append({
                "job": job.number,
                **{key: values.get(key) for key in keys},
                "held_out_loss": summary.get("eval_loss"), **scores,
                "mean": point.mean if point.values else None, "deviation": point.deviation,
                "loss": summary.get("train_loss"), "state": str(job.status), "steps": summary.get("steps"),
                "seconds": summary.get("seconds"), "error": job.error,
            })  # fmt: skip
        return rows

    def plot(self) -> Sheet:
        """Return the plot of `toyexp compare --plot`. A notebook shows it; `plot().write("sweep.svg")` saves it."""
        from toyexp.results.plot import draw_sheet

        return draw_sheet(compare(self).comparison, "sweep", self.directory)

    def frame(self) -> pandas.DataFrame:
        """Return `table` as a DataFrame indexed by job number. Raise Unavailable if pandas is not installed."""
        with require_package("pandas", "pip install pandas"):
            import pandas
        return pandas.DataFrame(self.table).set_index("job")

    @property
    def errors(self) -> dict[int, str]:
        """Error messages of the jobs that failed, were rejected or were killed, keyed by job number."""
        return {job.number: job.error for job in self._jobs if job.error and job.status != "pruned"}

    @property
    def report(self) -> Path | None:
        """Path of the sweep's report.html, or None if the sweep did not write it."""
        path = self.directory / "report.html"
        return path if path.is_file() else None

    def _result(self, job: Job) -> Result | None:
        if job.directory is None:
            return None
        path = self.directory / job.directory
        try:
            require_run(path)
        except UserError:  # the job ended before it wrote anything
            return None
        if other := job.difference(read_result(path)):
            print_error(f"warning: job {job.number}: {short_path(path)} contains a run of another sweep: {other}")
        return Result(path, self._registry, late=True)

    def __getitem__(self, index: Any) -> Any:
        return self.runs[index]

    def __len__(self) -> int:
        return len(self.runs)

    def _table_cells(self) -> tuple[list[str], list[list[str]], str]:
        left_out = {"error", *(name for name in ("mean", "deviation") if not self._ranking.has_seeds)}
        heads = [name for name in dict.fromkeys(key for row in self.table for key in row) if name not in left_out]
        rows = [[_text(name, row.get(name)) for name in heads] for row in self.table[:MAX_ROWS]]
        more = f"{len(self.table) - MAX_ROWS} more in .table; " if len(self.table) > MAX_ROWS else ""
        failed = f", {len(self.errors)} without a result (.errors)" if self.errors else ""
        directory = short_path(self.directory)
        caption = f"{more}{pluralise(len(self._jobs), 'job')}{failed}, the best {self.metric} first; {directory}"
        return heads, rows, caption

    def __repr__(self) -> str:
        heads, rows, caption = self._table_cells()
        return "\n".join([*align_columns([heads, *rows]), caption])

    def _repr_html_(self) -> str:
        return table_html(*self._table_cells())

    def __fspath__(self) -> str:
        return str(self.directory)


def _text(name: str, value: Any) -> str:
    if name in ("loss", "mean", "deviation") or name.startswith("held_out_"):
        return format_metric(value)
    if isinstance(value, float):
        return f"{value:.1f}" if name == "seconds" else f"{value:.4g}"
    return "-" if value is None else str(value)


# -- finished models and runs -----------------------------------------------------------------------------------------


@reject_bad_names()
@protect_imports()
def open(path: str | os.PathLike[str], plugins: Sequence[str] = ()) -> Result | SweepResult:
    """Open a run, a sweep or a checkpoint by its directory, and return it as a Result or SweepResult.

    For a checkpoint, return the Result of its run, but with the weights of the checkpoint instead of the final ones.
    `plugins` names the local plugin modules that the run needs. Raise UserError if `path` is none of these directories.
    """
    from toyexp.base.process_state import restore_process_state

    with restore_process_state():
        directory, registry = check_path("toyexp.open", path), load(plugins)
    if (directory / SWEEP_FILE).is_file():
        return SweepResult(directory, registry)
    checkpoint = directory.absolute() if is_checkpoint(directory) else None
    run = checkpoint.parents[1] if checkpoint else directory
    require_run(run)
    return Result(run, registry, checkpoint)


@protect_imports()
def evaluate(
    model: str | os.PathLike[str], *, data: str | os.PathLike[str] | None = None,
    adapter: str | os.PathLike[str] | None = None, plugins: Sequence[str] = (), **settings: Any,
) -> Evaluation:  # fmt: skip
    """Evaluate a model on held-out data, and return its loss and metrics.

    `model` is a model file, a run directory (or a Result) or a checkpoint. `adapter` is a LoRA adapter to apply to the
    model. `data` is the path of the data to evaluate on, by default the data of the model's run. `plugins` names local
    plugin modules. `settings` are the settings that `toyexp eval` accepts, such as `engine="ggml"`, `batch_size=4` or
    `**{"data.val_fraction": 0.5}`.
    Raise UserError for invalid settings, or if model, adapter and data do not fit together.
    """
    with isolated_call("toyexp.evaluate", quiet=True):
        from toyexp.config.request import parse_experiment
        from toyexp.inference import evaluate as evaluating

        request = parse_experiment(
            "eval", format_settings({**settings, **({"plugins": list(plugins)} if plugins else {})})
        )
        data_path = None if data is None else os.fspath(check_path("toyexp.evaluate data", data))
        adapter_path = None if adapter is None else check_path("toyexp.evaluate adapter", adapter)
        return evaluating.evaluate(check_path("toyexp.evaluate", model), request, data_path, adapter_path)


@protect_imports()
def predict(
    model: str | os.PathLike[str], *images: str | os.PathLike[str], top: int = 1, engine: str = "auto",
    plugins: Sequence[str] = (),
) -> Predictions:  # fmt: skip
    """Classify images, and return the `top` most probable classes of each, with their probabilities.

    `model` is a model file, a run directory (or a Result) or a checkpoint. `images` are image files and directories
    with image files. `engine` is an engine with its settings, such as "cpu:threads=1". `plugins` names local plugin
    modules. Raise UserError if the model does not read images or if no image can be read.
    """
    with isolated_call("toyexp.predict", quiet=True):
        from toyexp.batching.pictures import require_pillow
        from toyexp.inference import predict as predicting

        require_pillow()
        if not images or type(top) is not int or top < 1:
            raise UserError("toyexp.predict(model, image, ..., top=1): needs images, and top a whole number from 1")
        files = predicting.list_images([check_path("toyexp.predict", image) for image in images])
        return predicting.predict(check_path("toyexp.predict", model), files, top, engine, load(plugins), plugins)


@protect_imports()
def compare(*runs: str | os.PathLike[str], metric: str | None = None, pool: bool = False) -> ComparisonAnswer:
    """Compare runs and rank them by a metric.

    `runs` are run directories (or Results), sweep directories and directories that contain runs. An argument such as
    "lr>1e-3" is a filter: only matching runs are compared. `metric` is the name of the metric that ranks the runs; the
    default is the sweep's metric or the held-out loss. If `pool` is True, runs with equal settings form one group even
    if their directories or names differ. Raise UserError if no run matches the filters, or if no run has the metric.
    """
    with isolated_call("toyexp.compare", quiet=True):
        from toyexp.results.filters import split_filters
        from toyexp.sweeps.compare import compare_runs

        paths, filters = split_filters([os.fspath(check_path("toyexp.compare", run)) for run in runs])
        return compare_runs(paths, filters, None if metric is None else str(metric), pool)
