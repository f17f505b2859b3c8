"""A search is a sweep that chooses each trial by the results of earlier trials."""

from __future__ import annotations

import itertools
import json
import shlex
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from toyexp.base.errors import UserError
from toyexp.base.formatting import format_metric, pluralise, short_path
from toyexp.base.terminal import print_line, show_status
from toyexp.base.writing import dump_json, write_atomically
from toyexp.config.top_level import MAX_JOBS, Sweep
from toyexp.interfaces.kind import perplexity
from toyexp.interfaces.objective import Objective
from toyexp.results.ranking import SCALED, job_sources, metric_value
from toyexp.sweeps.combinations import TRIAL
from toyexp.sweeps.directory import UNFINISHED, Job, Status, SweepDir
from toyexp.sweeps.job_configs import JobConfigs, check_values, require_distinct_directories
from toyexp.sweeps.search.pruning import first_pruning_step
from toyexp.sweeps.search.space import Key, count_points, make_probes
from toyexp.sweeps.search.study import Study, require_optuna
from toyexp.sweeps.sources import JobSource


def _is_bad(job: Job) -> bool:
    """Return True if the job failed, had invalid settings or was pruned, so that its trial gets no score.

    Return False after an error of the machine, such as a full disk, because the job can run again.
    """
    return job.status in (Status.FAILED, Status.REFUSED, Status.PRUNED) and not job.is_machine_error


class Search(JobSource):
    """Source of the jobs of a search. Optuna chooses its trials one by one.

    Each trial has `sweep.repeats` jobs, which differ in their seed and are created one by one.
    """

    _study: Study  # set by open(), once the sweep's directory exists

    def __init__(self, settings: Sweep, keys: Sequence[Key], jobs: list[Job], shared: Sequence[str]):
        """Search over `keys`. `jobs` are the jobs of earlier trials; `shared` are the arguments of all jobs."""
        require_optuna(str(settings.search))
        self._settings, self._keys, self._shared = settings, keys, shared
        super().__init__(jobs)
        self.samples = make_probes(keys)
        self.probe = self.samples[0]
        there_are = count_points(keys)
        self._points = int(min(there_are, settings.trials or there_are))
        if self.total > MAX_JOBS:
            repeats = f" sweep.repeats={settings.repeats}" if settings.repeats > 1 else ""
            raise UserError(f"sweep.trials={self._points}{repeats}: a sweep has at most {MAX_JOBS} jobs")
        self._first_asked = 0  # the first step at which a run may be stopped
        self.description = f"{self._describe_size()}, by {settings.search}: {' '.join(key.line for key in keys)}"
        self._note = ""  # why scores of trials cannot be compared
        self._data: set[str] = set()  # data digests of the runs that ended

    @property
    def total(self) -> int:
        """Maximum number of jobs."""
        return self._points * self._settings.repeats

    # -- before the first job --

    def check(self, configs: JobConfigs, is_new: bool) -> Mapping[int, UserError]:
        """Check the values of the search space and the metric, and raise UserError for any error.

        The returned dict, which would list invalid jobs, is always empty: a search does not start if any value is
        invalid.
        """
        show_status("checking the values of the search")
        for error in check_values(self.samples, configs).values():
            raise error
        self._check_metric(configs)
        self._seed = int(configs.config(self.samples[0]).cfg.seed)
        if is_new:
            require_distinct_directories(self.samples, configs)
        return {}

    def open(self, folder: SweepDir, is_new: bool) -> None:
        """Open the Optuna study in the sweep's directory, and report the results of earlier jobs to the study."""
        settings = self._settings
        self._study = Study(folder.path, str(settings.search), settings.metric, self._keys, self._seed)
        self._study.require_trials(len(self._group_by_trial()))
        for job in self.jobs:
            self.record_end(job)
        description = f"{settings.search} over {', '.join(key.key for key in self._keys)}"
        print_line(f"sweep   {short_path(folder.path)}, {self._describe_size()}: {description}")
        if self._note:
            print_line(f"note    {self._note}")

    def remaining_jobs(self) -> list[Job]:
        """Return the jobs that are left to run.

        If Optuna has not chosen the values of a job yet, the job has example values from the search space instead.
        """
        more = self.all_jobs()[len(self.jobs) :]
        pairs = zip(more, itertools.cycle(self.samples), strict=False)
        return [*super().remaining_jobs(), *(Job(job.number, probe.overrides) for job, probe in pairs)]

    def _describe_size(self) -> str:
        requested, repeats = self._settings.trials or 0, self._settings.repeats
        no_more = " (all combinations)" if self._points < requested else ""
        return pluralise(self._points, "trial") + no_more + (f" of {pluralise(repeats, 'run')}" if repeats > 1 else "")

    def _check_metric(self, configs: JobConfigs) -> None:
        settings = self._settings
        setting = f"sweep.prune={settings.prune}" if settings.prune else f"sweep.metric={settings.metric}"
        lengths, first = [], {*self.samples[0].overrides}
        objectives, metrics = set[type[Objective]](), list[Sequence[str]]()
        for probe in self.samples:
            changed = {word.partition("=")[0] for word in {*probe.overrides} - first}
            if changed and not changed & {"steps", "eval_every", "model", "experiment", "objective"}:
                continue
            cfg = configs.config(probe).cfg
            if not cfg.eval_every:
                raise UserError(f"{setting}: needs evaluations of the held-out data: eval_every must be above 0")
            if settings.prune and cfg.epochs is not None:
                raise UserError(f"epochs={cfg.epochs:g}: {setting} compares runs at equal steps; set steps=...")
            lengths.append((int(cfg.steps), int(cfg.eval_every)))
            model, objective = configs.model(probe), configs.objective(probe)
            model.require_metric("sweep.metric", settings.metric, objective.metric_names)
            objectives.add(objective)
            metrics.append([*model.score_names, *objective.metric_names])
        keys = [key for key in self._keys if key.key.startswith("objective") and key.key != "objective.auxiliary"]
        if keys and settings.metric in SCALED and not all(objective.in_nats for objective in objectives):
            shared = [name for name in metrics[0] if name not in SCALED and all(name in other for other in metrics)]
            hint = f"; type sweep.metric={shared[0]}" if shared else ""
            self._note = f"{keys[0].line}: its trials' values of {settings.metric} cannot be compared{hint}"
        steps, every = max(lengths)
        varying_key = next((key for key in self._keys if key.key == "eval_every"), None)
        if settings.prune and varying_key:
            raise UserError(f"{varying_key.line}: {setting} compares runs at the same steps; give eval_every one value")
        if settings.prune and every >= steps:
            raise UserError(f"{setting}: no evaluation before the last step: eval_every={every} must be below {steps}")
        self._first_asked = first_pruning_step(steps, every)
        if settings.repeats > 1 and any(key.key == "seed" for key in self._keys):
            raise UserError(f"sweep.repeats={settings.repeats}: sets the seeds of each trial; leave out seed=...")

    # -- the next job --

    def next(self) -> Job | None:
        """Return the next job to run, or None if no job is left.

        It is a job to resume, another seed of an earlier trial, or the first job of a new trial. With pruning, the
        first job of a trial runs before its other jobs. These run once the first job has completed without being
        pruned, or once no new trials are left.
        """
        return (
            super().next()
            or self._next_repeat(bool(self._settings.prune))
            or self._next_trial()
            or self._next_repeat(False)
        )

    def _next_repeat(self, decided: bool) -> Job | None:
        for trial, jobs in self._group_by_trial().items():
            has_bad_job = any(map(_is_bad, jobs)) or (decided and jobs[0].status != Status.COMPLETED)
            stuck = jobs[0].status == Status.KILLED or jobs[0].is_machine_error
            if len(jobs) < self._settings.repeats and not has_bad_job and not stuck:
                return self._add(trial, [word for word in jobs[0].overrides if not word.startswith("seed=")], len(jobs))
        return None

    def _next_trial(self) -> Job | None:
        trial = len(self._group_by_trial())
        return self._add(trial, self._study.ask(trial), 0) if trial < self._points else None

    def may_retry(self, job: Job) -> bool:
        """Return True if sweep.retry=true runs the job again.

        In a search, this holds only if the machine caused the failure, for example a full disk.
        """
        return job.is_machine_error  # other failures are results that the search has used

    def _add(self, trial: int, words: list[str], repeat: int) -> Job:
        seed = [f"seed={self._seed + repeat}"] if self._settings.repeats > 1 else []
        self.jobs.append(Job(len(self.jobs), [*words, *seed], trial=trial))
        return self.jobs[-1]

    def _group_by_trial(self) -> dict[int, list[Job]]:
        trials: dict[int, list[Job]] = {}
        for job in self.jobs:
            assert job.trial is not None
            trials.setdefault(job.trial, []).append(job)
        return trials

    # -- one job --

    def environment(self, job: Job) -> Mapping[str, str]:
        """Return the environment variable that makes the process of a job prune its run: the fields of `Pruning`.

        Only the first job of a trial can be pruned. Return an empty dict for other jobs, or if the search does not
        prune.
        """
        assert job.trial is not None
        if not self._settings.prune or self._group_by_trial()[job.trial][0] is not job:
            return {}
        options = {
            "journal": str(self._study.path), "trial": job.trial, "prune": self._settings.prune,
            "metric": self._settings.metric, "first": self._first_asked,
        }  # fmt: skip
        return {TRIAL: json.dumps(options)}

    def record_end(self, job: Job) -> None:
        """Record that a job has ended, and report its trial to the study if the trial is finished.

        A trial's score is the mean over its jobs. If a job failed or was pruned, its trial has no score. A completed
        job without the metric counts as failed.
        """
        assert job.trial is not None
        if job.status == Status.COMPLETED and self._score(job) is None:
            loss_names = ["loss", "ppl"] if job.result.get("eval_loss") is not None else []
            metric_names = ", ".join([*loss_names, *(job.result.get("eval_scores") or {})]) or "none"
            job.status = Status.FAILED
            missing = f"sweep.metric={self._settings.metric}: the run recorded no value of this metric"
            job.error = f"{missing}; its held-out metrics: {metric_names}"
        jobs = self._group_by_trial()[job.trial]
        before, self._data = len(self._data), self._data | {job_sources(job).get("data", "")} - {""}
        if len(self._data) > 1 >= before:
            print_line("note    trials read different data: the search continues, but their scores cannot be compared")
        if self._is_finished_trial(jobs):
            self._study.tell(job.trial, None if any(map(_is_bad, jobs)) else statistics.fmean(self._scores(jobs)))

    def _score(self, job: Job) -> float | None:
        is_perplexity = self._settings.metric == "ppl"
        value = metric_value(job, "loss" if is_perplexity else self._settings.metric)
        return perplexity(value) if is_perplexity and value is not None else value

    def _scores(self, jobs: Sequence[Job]) -> list[float]:
        return [score for score in map(self._score, jobs) if score is not None]

    # -- results --

    def all_jobs(self) -> list[Job]:
        """Return the jobs that were chosen so far, and a job without overrides for each job still to be chosen."""
        by_trial = self._group_by_trial()
        more = sum(
            self._settings.repeats - len(jobs) for jobs in by_trial.values() if not self._is_finished_trial(jobs)
        )
        more += (self._points - len(by_trial)) * self._settings.repeats
        return [*self.jobs, *(Job(len(self.jobs) + number, []) for number in range(more))]

    def progress(self) -> tuple[str, bool]:
        """Return a text such as "3 of 10 trials are done", and True if any trial is left to run."""
        finished_trials = [jobs for jobs in self._group_by_trial().values() if self._is_finished_trial(jobs)]
        count = sum(any(map(_is_bad, jobs)) for jobs in finished_trials)
        note = f", {count} of them without a score" if count else ""
        has_trials_left = len(finished_trials) < self._points or any(job.status in UNFINISHED for job in self.jobs)
        return f"{len(finished_trials)} of {self._points} trials are done{note}", has_trials_left

    def _is_finished_trial(self, jobs: Sequence[Job]) -> bool:
        is_complete = len(jobs) == self._settings.repeats and all(job.status == Status.COMPLETED for job in jobs)
        return is_complete or any(map(_is_bad, jobs))

    def summarise(self, folder: SweepDir) -> None:
        """Print the best trial, the importance of each key, and commands to type; write all trials to search.json."""
        study, settings, ranking = self._study, self._settings, folder.rank()
        shares, why = ({}, "the scores cannot be compared") if ranking.conflict else study.importances()
        best = None
        if ranking.conflict:
            print_line(f"best    none: {ranking.conflict}, so their scores cannot be compared")
        elif (trial := study.best()) is None:
            print_line(f"best    none: no trial has recorded a held-out {settings.metric}")
        else:
            best = self._describe_best(trial)
            share_text = ", ".join(f"{key} {share:.0%}" for key, share in shares.items())
            print_line(
                f"keys    by importance: {share_text}" if shares else f"keys    their importance is unknown: {why}"
            )
            print_line(f"again   {best['command']}")
        summary = {
            "search": settings.search, "metric": settings.metric, "repeats": settings.repeats, "prune": settings.prune,
            "best": best, "trials": list(study.outcomes()), "notes": ranking.notes(), "importances": shares,
            "no_importances": why,
        }  # fmt: skip
        print_line(f"study   optuna-dashboard {shlex.quote(short_path(study.path))}")
        try:
            with write_atomically(folder.path / "search.json") as temporary:
                temporary.write_text(dump_json(summary, indent=1) + "\n")
        except OSError as error:
            print_line(f"note    search.json cannot be written ({error.strerror})")

    def _describe_best(self, trial: int) -> dict[str, Any]:
        """Print the best trial and return its entry for search.json."""
        jobs = self._group_by_trial()[trial]
        scores = self._scores(jobs)
        overrides = [word for word in jobs[0].overrides if self._settings.repeats == 1 or not word.startswith("seed=")]
        own_keys = {word.partition("=")[0] for word in jobs[0].overrides}  # for example the seed of a repeat
        shared = [word for word in self._shared if not word.startswith("hydra.sweep.")]
        shared = [word for word in shared if word.partition("=")[0] not in own_keys]
        mean, spread = statistics.fmean(scores), statistics.stdev(scores) if len(scores) > 1 else None
        over_seeds = f" ± {format_metric(spread)} over {len(scores)} seeds" if spread is not None else ""
        print_line(f"best    {' '.join(overrides)}: held-out {self._settings.metric} {format_metric(mean)}{over_seeds}")
        return {
            "trial": trial, "settings": overrides, "score": mean, "deviation": spread,
            "command": shlex.join(["toyexp", *shared, *jobs[0].overrides]), "jobs": [job.number for job in jobs],
        }  # fmt: skip
