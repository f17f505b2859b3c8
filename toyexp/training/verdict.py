"""End a run: write result.json, choose the error to raise, and print the last lines."""

from __future__ import annotations

import contextlib
import logging
import math
import shlex
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from toyexp.base.attribution import attribute_errors
from toyexp.base.errors import PluginFailed, RankFailed, RunFailed
from toyexp.base.formatting import format_bytes, format_count, format_metric, pluralise, short_path
from toyexp.base.ownership import SWEEP_FILE
from toyexp.base.signals import Signals
from toyexp.base.terminal import print_line
from toyexp.base.writing import total_bytes
from toyexp.interfaces.command import MODEL_CODE
from toyexp.interfaces.dataset import Batch, batch_digest
from toyexp.interfaces.run import Run
from toyexp.interfaces.session import Session
from toyexp.training.bus import Bus
from toyexp.training.checkpoint import list_checkpoints
from toyexp.training.run_config import Outcome, Prepared, Result
from toyexp.training.rundir import RunDir

log = logging.getLogger("toyexp")


def boundary(run: Run, bus: Bus, kind: str) -> attribute_errors:
    """Return a context manager that adds the name of a plugin and the step to errors raised in its `with` block.

    `kind` selects the plugin: that of the run's `data`, optimiser (`optim`), `recipe` or `engine`.
    """
    names = {"engine": run.engine} | {k: run.config.get(k, {}).get("name", "?") for k in ("data", "optim", "recipe")}
    return attribute_errors(f"{kind}.{names[kind]}", lambda: f"at step {bus.step}", bus.log, names["data"])


def nonfinite_error(run: Run, step: int, metrics: Mapping[str, float], batch: Batch, in_a_row: int) -> RunFailed:
    """Return the error to raise for a step whose loss or gradient norm is NaN or infinite.

    The message names the first tensor that is not finite, and settings that may help. `in_a_row` is the number of
    consecutive steps with this problem.
    """
    problem = f"the loss is {metrics['loss']:.6g} and the gradient norm {metrics['grad_norm']:.6g}"
    skipped = f"; {in_a_row} steps in a row were skipped" if in_a_row > 1 else ""
    skip = "" if run.plan.skip_nonfinite else ", or nonfinite=skip"
    return RunFailed(
        f"step {step} (batch {step - 1}, digest {batch_digest(batch)}): {problem}{skipped}; "
        f"{first_bad_tensor(run.session, batch)}; {run.remedy}, optim.grad_clip=1{skip}"
    )


def first_bad_tensor(session: Session, batch: Batch) -> str:
    """Return a clause that names the first weight, or else the first gradient, that is not finite."""
    for kind, values in (("weight", session.download), ("gradient", session.gradients(batch).__getitem__)):
        for tensor in session.plan.tensors if kind == "weight" else session.plan.trainable:
            count = int((~np.isfinite(values(tensor.name))).sum())
            if count:
                return f"the first {kind} that is not finite is {tensor.name} ({count} of {tensor.size} numbers)"
    return "all weights and gradients are finite, so the loss or the norm itself overflowed"


def bad_eval_error(run: Run, outcome: Outcome) -> RunFailed | None:
    """Return the error to raise if the last held-out loss is not finite; None if finite or after an interrupt."""
    if outcome.reason == "interrupted" or outcome.eval_loss is None or math.isfinite(outcome.eval_loss):
        return None
    problem = f"the held-out loss after step {outcome.eval_step} is {outcome.eval_loss}"
    return RunFailed(f"{problem}; {run.remedy}, or optim.grad_clip=1")


def end_reason(error: BaseException) -> str:
    """Return `interrupted` or `errored` for an exception that ended a run."""
    return "interrupted" if isinstance(error, KeyboardInterrupt) else "errored"


def conclude(
    prepared: Prepared, run_dir: RunDir, outcome: Outcome, failures: Sequence[Exception], signals: Signals
) -> Result:
    """Write result.json of a run whose training ended, and return the result of the run.

    `failures` are the errors at the end of the run: raise the first of them. If the list is empty and an interrupt
    stopped the run, raise the interrupt.
    """
    bus, best = prepared.bus, prepared.bus.best(False)
    result = Result(
        prepared.config.settings.name, run_dir.path, outcome, prepared.model.reads.units, list(bus.artifacts),
        bus.artifact_steps, best,
    )  # fmt: skip
    summary = {
        **asdict(outcome),
        "diverged": outcome.has_diverged,
        **_exported_scores(result),
        "tokens_per_second": outcome.tokens_per_second,
        "artifacts": [str(p) for p in result.artifacts],
        "artifact_steps": {str(path): step for path, step in bus.artifact_steps.items()},
        "best": {"step": best.step, "metric": best.metric, "score": best.score} if best else None,
    }
    write_error = None
    try:
        run_dir.result({**summary, "error": str(failures[0])} if failures else summary)
    except RunFailed as error:
        write_error = error
    if failure := next(filter(None, (*failures, write_error, signals.final_interrupt())), None):
        raise failure
    return result


def _exported_scores(result: Result) -> dict[str, Any]:
    """Return the fields to change in result.json if the best weights were exported instead of the last ones.

    The evaluation of the best step replaces that of the last step, which is kept under `last_eval`. If the best weights
    were not exported, return {}.
    """
    best, outcome = result.best, result.outcome
    if best is None or best.scores.get("loss") is None:
        return {}
    if result.artifact_steps and best.step not in result.artifact_steps.values():
        return {}
    scores = {name: score for name, score in best.scores.items() if name not in ("loss", "ppl")}
    last = {"step": outcome.eval_step, "loss": outcome.eval_loss, "scores": outcome.eval_scores}
    return {"eval_step": best.step, "eval_loss": best.scores["loss"], "eval_scores": scores, "last_eval": last}


def conclude_failure(prepared: Prepared, run_dir: RunDir, error: BaseException) -> None:
    """Log the traceback of `error`, which ended a run, write result.json if it is missing, and print how to resume.

    An interrupt or a failed rank is printed as one line. This line includes the command that resumes the run.
    """
    if isinstance(error, RankFailed):  # the traceback that matters is that of the other rank
        error.args = (f"{error}, at step {prepared.bus.step}" if prepared.bus.step else str(error),)
        log.error("%s", f"{error}\n{error.trace}".rstrip())
    else:
        log.error("%s", "".join(traceback.format_exception(error)).rstrip())
    if not run_dir.has_result:
        with contextlib.suppress(RunFailed):  # it would hide the error that ended the run
            run_dir.result({"reason": end_reason(error), "error": f"{type(error).__name__}: {error}"})
    resume_hint = _resume_hint(prepared, run_dir)
    if isinstance(error, KeyboardInterrupt | RankFailed):  # printed as one line
        has_trace = isinstance(error, RankFailed) and error.trace
        log_hint = f"; see {short_path(run_dir.path / 'log.txt')}" if has_trace else ""
        run_hint = "" if log_hint else f"; run {short_path(run_dir.path)}"
        error.args = (f"{str(error) or 'interrupted'}{log_hint}{f'; {resume_hint}' if resume_hint else run_hint}",)
        return
    prepared.bus.print_line(f"run     {short_path(run_dir.path)}")
    if isinstance(error, PluginFailed) and resume_hint:
        prepared.bus.print_line(f"        {resume_hint}")


def _resume_hint(prepared: Prepared, run_dir: RunDir) -> str:
    saved = next(iter(list_checkpoints(run_dir.path / "checkpoints")), None)
    if not saved or (run_dir.path.parent / SWEEP_FILE).exists():
        return ""
    settings = prepared.config.settings
    plugins = [f"plugins=[{','.join(settings.plugins)}]"] if settings.plugins else []
    path = prepared.model.settings().get("path") if prepared.model.engines else ""
    code = [f"{MODEL_CODE}={path}"] if path else []
    command = shlex.join(["toyexp", f"resume={short_path(run_dir.path)}", *plugins, *code])
    return f"{saved} of {settings.steps} steps are saved; to resume: {command}"


def print_result(result: Result) -> None:
    """Print the outcome of a run and the paths of its files."""
    outcome = result.outcome
    rate = outcome.tokens_per_second
    speed = f" · {format_count(rate)} {result.units}/s (training steps only)" if rate else ""
    how = (
        "stopped" if outcome.reason == "aborted" else outcome.reason
    )  # by a callback, perhaps because its goal was reached
    how = "diverged" if how == "completed" and outcome.has_diverged else how
    print_line(f"{how} after {pluralise(outcome.steps, 'step')} in {outcome.seconds:.1f} s{speed}")
    if how == "diverged":
        first = format_metric(outcome.first_train_loss)
        print_line(f"smoothed train loss {first} -> {format_metric(outcome.train_loss)}; try a lower lr")
    if outcome.why:
        print_line(f"stopped because {outcome.why}")
    if outcome.skipped:
        print_line(f"{outcome.skipped} steps were skipped: loss or gradient was not finite")
    if outcome.eval_loss is not None and outcome.first_eval_loss is not None:
        print_line(f"held-out loss {format_metric(outcome.first_eval_loss)} -> {format_metric(outcome.eval_loss)}")
    for name, value in outcome.eval_scores.items():
        first = format_metric(outcome.first_eval_scores.get(name))
        print_line(f"held-out {name} {first} -> {format_metric(value)}")
    if result.best and result.best.step != outcome.steps:
        print_line(
            f"best held-out {result.best.metric} {format_metric(result.best.score)} after step {result.best.step}"
        )
    print_line(f"run     {short_path(result.dir)}")
    for path in result.artifacts:
        shown = path.relative_to(result.dir) if path.is_relative_to(result.dir) else path
        step, best = result.artifact_steps.get(path, outcome.steps), result.best and result.best.step
        last = ", the last" if best not in (None, step) else ""
        step_note = f"  of step {step}{', the best' if step == best else last}" if step != outcome.steps or last else ""
        print_line(f"        {shown}  {format_bytes(total_bytes(path))}{step_note}")
