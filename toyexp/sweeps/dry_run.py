"""What a sweep would be, said before it is one: a job of each shape takes a few steps, in a process of its own."""

from __future__ import annotations

import contextlib
import heapq
import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from toyexp.base.errors import RunFailed, UserError
from toyexp.base.formatting import columns, count, counted, duration, in_bytes, short
from toyexp.base.ownership import require_empty
from toyexp.base.terminal import complain, say, status
from toyexp.base.writing import dump_json
from toyexp.config.words import setting
from toyexp.sweeps.directory import Job, Order, SweepDir, shared_words
from toyexp.sweeps.job_configs import JobConfigs
from toyexp.sweeps.launchers.gpus import visible
from toyexp.sweeps.launchers.job_process import Stop, run_process
from toyexp.sweeps.launchers.launcher import Launcher
from toyexp.training import checkpoint
from toyexp.training.rundir import require_writable
from toyexp.training.settings import evaluations

TRIED = 8  # shapes of which a job is tried; what the others take is then the mean of these
SAME = ("seed", "data_seed", "model_seed", "lr", "steps", "name", "checkpoint_every", "checkpoint_keep",
        "checkpoint_best", "nonfinite")  # fmt: skip
FRACTION = re.compile(r"[+-]?(\d+\.\d*|\.\d+|\d+(?=e))(e[+-]?\d+)?", re.IGNORECASE)


@dataclass(frozen=True)
class Shape:
    """Jobs of which each step takes the same, as far as their settings tell."""

    own: list[str]  # the settings that make it
    jobs: list[Job]
    start: float = 0.0  # seconds of a job's process until the first of its steps
    found: Mapping[str, Any] | None = None  # what --dry-run --json says of the first one; None: it was not tried


@dataclass(frozen=True)
class Foresight:
    """A sweep that is composed, and how its jobs would be run."""

    configs: JobConfigs
    launcher: Launcher
    asked: Mapping[str, Any]  # as a sweep's directory has it
    folder: SweepDir | None  # of a sweep that is gone on with
    search: str = ""  # how points are chosen that these jobs stand for

    def show(self, jobs: Sequence[Job], as_json: bool) -> int:
        """Says what these jobs would be; returns 2 where one of those tried is refused, and 1 where it fails."""
        if not jobs:
            say(dump_json({"jobs": 0}) if as_json else "no job would run")
            return 0
        shapes, codes = [], [0]
        grouped = self._shapes(jobs)
        root = self._root(shape.jobs[0] for shape in grouped)
        for number, shape in enumerate(grouped):
            if number >= TRIED:
                shapes.append(shape)
                continue
            status(f"taking a few steps of job {shape.jobs[0].number}")
            try:
                shapes.append(self._tried(shape, root))
            except (UserError, RunFailed) as error:
                complain(f"error in job {shape.jobs[0].number}: {error}")
                codes.append(error.exit_code)
        status("")
        if tried := [shape for shape in shapes if shape.found]:
            told = self._sum(shapes, tried, root)
            say(dump_json(told, indent=2)) if as_json else self._tell(told, tried)
        return 1 if 1 in codes else max(codes)

    def _root(self, jobs: Iterable[Job]) -> Path:
        """The sweep's directory, which the first job says that can be; UserError where it would be refused."""
        if self.folder:
            return self.folder.path
        for job in jobs:
            with contextlib.suppress(UserError):  # which is told when the job is tried
                root = self.configs.directory(job, None)[0]
                break
        else:
            return Path.cwd()
        require_empty(root, "hydra.sweep.dir")
        require_writable(root, "hydra.sweep.dir")
        return root

    def _shapes(self, jobs: Sequence[Job]) -> Sequence[Shape]:
        found: dict[tuple[str, ...], Shape] = {}
        for job in jobs:
            own = [word for word in job.overrides if not _costs_the_same(word)]
            found.setdefault(tuple(own), Shape(own, [])).jobs.append(job)
        return list(found.values())

    # -- a job of each shape -------------------------------------------------------------------------------------------

    def _tried(self, shape: Shape, root: Path) -> Shape:
        """With what a run of its first job says of itself; raises UserError and RunFailed."""
        share = self.launcher.share
        of_machine = self.launcher.is_forked and not self.launcher.is_stacked
        words = [*self._words(shape.jobs[0], root), "--dry-run", "--json"]
        gpus = visible()[: share.gpus] if of_machine else ()
        self.launcher.wait()
        out: list[str] = []

        def take(line: str, to: IO[str]) -> None:
            if to is sys.stdout:
                out.append(line)

        with tempfile.TemporaryDirectory() as aside:
            log = Path(aside, "log")
            order = Order(root, log, words, [], False, share.cores * of_machine, gpus, several=True)
            began = time.perf_counter()
            ended = run_process(order, Stop(), take, start=self.launcher.start)
            seconds = time.perf_counter() - began
        if ended.code:
            raise UserError(ended.error) if ended.code == 2 else RunFailed(str(ended))
        found = json.loads("\n".join(out))
        return Shape(shape.own, shape.jobs, seconds - found["tried"]["seconds"], found)

    def _words(self, job: Job, root: Path) -> list[str]:
        """What a process is told that is to try a job."""
        begun = root / job.directory if self.folder and job.directory else None
        if begun and checkpoint.steps(begun / "checkpoints"):
            return [f"resume={begun}", *(word for word in self.asked["settings"] if word.startswith("plugins="))]
        where = begun if begun and not begun.exists() else self.configs.directory(job, root)[1]
        place = [] if where.exists() else [setting("hydra.run.dir", where)]
        return [*shared_words(self.asked), *job.overrides, *place, f"hydra.job.num={job.number}"]

    # -- all of them ---------------------------------------------------------------------------------------------------

    def _steps(self, job: Job, shape: Shape, root: Path) -> tuple[int, int]:
        """The step that a job goes on from, and the last one."""
        begun = self.folder and job.directory and next(iter(checkpoint.steps(root / job.directory / "checkpoints")), 0)
        if any(word.startswith("steps=") for word in job.overrides):
            return begun or 0, int(self.configs.config(job).cfg.steps)
        assert shape.found is not None
        return begun or 0, shape.found["begins"] + shape.found["steps"]

    def _sum(self, shapes: Sequence[Shape], tried: Sequence[Shape], root: Path) -> dict[str, Any]:
        """Everything that is said, as plain data."""
        seconds: dict[int, float] = {}
        flops = {}
        entries = []
        for shape in shapes:
            if shape.found is None:
                continue
            found, of = shape.found, shape.found["tried"]
            every = int(self.configs.config(shape.jobs[0]).cfg.eval_every)
            for job in shape.jobs:
                begins, steps = self._steps(job, shape, root)
                evals = evaluations(begins, steps, every)
                own = self.launcher.settings.isolate and not self.launcher.is_stacked  # a process
                start = shape.start if own or not seconds else of["ready"]
                seconds[job.number] = start + (steps - begins) * of["step"] + evals * of["evaluation"]
                flops[job.number] = (steps - begins) * found["flops_per_step"]
            entries.append({"jobs": [j.number for j in shape.jobs], "own": shape.own, "start": shape.start, **found})
        left = [job.number for shape in shapes if shape.found is None for job in shape.jobs]
        seconds |= dict.fromkeys(left, statistics.mean(seconds.values()))
        flops |= dict.fromkeys(left, statistics.mean(flops.values()))
        workers = max(min(self.launcher.limit(), len(seconds)), 1)
        free = [0.0] * workers
        for number in sorted(seconds):  # each begins when one before it ends
            heapq.heapreplace(free, free[0] + seconds[number])
        varied: dict[str, dict[str, None]] = {}  # of each key its values, in their order
        for job in sorted((job for shape in shapes for job in shape.jobs), key=lambda job: job.number):
            for key, _, value in (word.partition("=") for word in job.overrides):
                varied.setdefault(key, {})[value] = None
        return {
            "directory": str(root), "settings": self.asked["settings"],
            "varied": {key: list(values) for key, values in varied.items()}, "search": self.search,
            "jobs": len(seconds),
            "launcher": self.launcher.name, "at_once": workers, "cores": self.launcher.share.cores, "shapes": entries,
            "not_tried": left, "flops": sum(flops.values()), "seconds": max(free), "seconds_of_jobs": seconds,
        }  # fmt: skip

    def _tell(self, told: Mapping[str, Any], tried: Sequence[Shape]) -> None:
        """The same for a person."""
        at_once = told["at_once"]
        how = self.launcher.describe(at_once)
        say(f"sweep    {short(Path(told['directory']))}, {counted(told['jobs'], 'job')}, {how} ({told['launcher']})")
        if told["settings"]:
            say(f"settings {' '.join(told['settings'])}")
        if self.search:
            say(f"search   {self.search}")
        for key, values in told["varied"].items() if not self.search else ():
            more = f",... ({len(values)} values)" if len(values) > 12 else ""
            say(f"varies   {key}={','.join(values[:12])}{more}")
        for line in tried[0].found["about"] if tried[0].found else ():
            name, _, rest = line.partition(" ")
            say(f"{name:<8} {rest.lstrip()}")
        table = [["jobs", "parameters", "train", "memory", "held", "step", "eval", "GFLOP a step", "start", "settings"]]
        for shape in tried:
            assert shape.found is not None
            found, of = shape.found, shape.found["tried"]
            least = sum(found[f"{part}_bytes"] for part in ("batch", "weights", "frozen", "checkpoint"))
            table.append([
                str(len(shape.jobs)), count(found["parameters"]), count(found["trainable"]), in_bytes(least),
                in_bytes(of["device_bytes"] or of["process_bytes"]), duration(of["step"]),
                duration(of["evaluation"]) if of["evaluations"] else "-", f"{found['flops_per_step'] / 1e9:.3g}",
                duration(shape.start), " ".join(shape.own) or "(all alike)",
            ])  # fmt: skip
        say("")
        for line in columns(table, right=range(9)):
            say(line)
        say("")
        if left := told["not_tried"]:
            mean = f"the mean of the {len(tried)} that were tried"
            say(f"guessed  {counted(len(left), 'job')} of other shapes, which were not tried, are counted as {mean}")
        say(f"compute  {told['flops'] / 1e9:.3g} GFLOP in all")
        one = told["seconds_of_jobs"].values()
        each = duration(min(one)) if max(one) < 1.05 * min(one) else f"{duration(min(one))} to {duration(max(one))}"
        say(f"time     about {duration(told['seconds'])}: {counted(told['jobs'], 'job')}, {each} each, {how}")
        if caveat := self.launcher.caveat(at_once):
            say(f"         {caveat}")
        if self.search:
            say("         its points are yet to be chosen: these are runs at the ends of intervals, and at each value")
        if self.launcher.settings.prune:
            say(f"         without what sweep.prune={self.launcher.settings.prune} saves")
        say("         callbacks, checkpoints and exports come on top")
        say("nothing was trained, and nothing written but what data keep in their cache")


def _costs_the_same(word: str) -> bool:
    """Whether a setting leaves what a step computes as it is: a seed, a rate, a number with a fraction."""
    key, _, value = word.partition("=")
    kind = key.split(".")[0]
    return key in SAME or (kind in ("optim", "callbacks") and key != kind and FRACTION.fullmatch(value) is not None)
