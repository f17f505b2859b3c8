"""Run one experiment: open the data, build the plan, open a session, train, write the result."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from toyexp.base.attribution import attribute_errors, attribute_part_errors, call_checked, call_for_lines
from toyexp.base.errors import RunFailed, UserError
from toyexp.base.formatting import short_path
from toyexp.base.memory import convert_memory_errors
from toyexp.base.signals import Signals, catch_signals
from toyexp.base.user_paths import find_cached_repository
from toyexp.batching.tokens import Dropout
from toyexp.formats.file_plan import match_preprocessing
from toyexp.formats.gguf.open_model import open_gguf
from toyexp.formats.gguf.tokenizer import has_text, read_tokenizer
from toyexp.interfaces.callback import Schedule
from toyexp.interfaces.data import Data, open_shared_data
from toyexp.interfaces.dataset import Batches, Dataset
from toyexp.interfaces.model import Model
from toyexp.interfaces.objective import Objective
from toyexp.interfaces.optimiser import Optimiser
from toyexp.interfaces.plan import Plan, apply_optimiser
from toyexp.interfaces.recipe import Setup, prepare_session
from toyexp.interfaces.run import Best, Run
from toyexp.interfaces.run_preview import RunPreview
from toyexp.interfaces.session import Session
from toyexp.interfaces.stack import Stack
from toyexp.plugins.compatibility import engine_mismatch, incompatibility, kind_mismatch
from toyexp.plugins.discovery import current_registry
from toyexp.reference.forward import check_forward, check_tensors, count_blocks
from toyexp.training.bus import Bus
from toyexp.training.checkpoint import DamagedCheckpoint, list_checkpoints
from toyexp.training.checkpointing import CheckpointKeeper
from toyexp.training.driver import Pause, Realize, Requests, bind_sessions, drive, forward_interrupts
from toyexp.training.loop import Training
from toyexp.training.memory import check_plan, check_snapshot
from toyexp.training.precompute import precompute_arrays
from toyexp.training.provenance import origin_facts, require_same_file
from toyexp.training.resume import ResumeState
from toyexp.training.run_config import Config, Outcome, Prepared, Result, Saver, facts, introduction
from toyexp.training.rundir import RunDir
from toyexp.training.settings import Interval, require_utf8
from toyexp.training.verdict import bad_eval_error, conclude, conclude_failure, end_reason

log = logging.getLogger("toyexp")


@attribute_part_errors()
def prepare(config: Config) -> Prepared:
    """Open the data, build the plan and check both; nothing is trained or written.

    Raise UserError for settings that are invalid or do not fit together.
    """
    require_utf8(config.plain)
    config.model = call_checked(Model, config.model.adapt, config.data.gives)
    if reason := engine_mismatch(config.engine.name, config.model):
        raise UserError(reason)
    _replace_gguf(config)
    model, recipe, accumulate = config.model, config.recipe, config.optim.accumulate
    if reason := incompatibility(recipe, model):
        raise UserError(reason + (config.suggest_command() if model.reads not in recipe.reads else ""))
    if reason := kind_mismatch(f"model={model.name}", model.reads, config.data):
        raise UserError(reason + config.suggest_command())
    config.engine.check_rows(config.settings.batch_size // accumulate, accumulate)
    with contextlib.suppress(Exception):
        config.engine.open_device_early()
    bus = Bus(config.callbacks, config.default_callbacks)
    dataset = _open_data(config)
    model, batches = _fit_model(config, dataset)
    _count_steps(config, batches)
    plan = _build_plan(config, dataset, model, batches)
    optim = call_checked(Optimiser, config.optim.with_mode, model.optim_mode or config.recipe.optim_mode)
    plan = apply_optimiser(plan, optim, config.settings.lr)
    _check(config, plan)
    is_random = plan.dropout_shares or plan.neftune or plan.turns
    batches = Dropout(batches, plan, config.settings.seed) if is_random else batches
    warnings = config.warnings(RunPreview(config.plain, dataset, batches, plan))
    recomputed = count_blocks(plan) if getattr(config.engine, "recompute", False) else None
    if recomputed == 0:  # not the engine's own warning: it does not know the model
        warnings.append(f"engine.recompute=true: has no effect; model={model.name} has no ops.block")
    return Prepared(config, dataset, model, batches, plan, optim, bus, warnings, recomputed)


def _replace_gguf(config: Config) -> None:
    """Replace the default export to GGUF by one to safetensors, if GGUF cannot hold the model.

    Do nothing if the user chose a type for the GGUF file.
    """
    if not config.model.engines:
        return
    settings = config.plain["callbacks"].get("gguf_export", {})
    if settings.get("type") != "f32":
        return
    name = "safetensors_export"
    kept = {key: settings[key] for key in ("every", "weights")}
    exporter = current_registry().get("callbacks", name)(**kept)
    for parts in (config.callbacks, config.plain["callbacks"]):
        del parts["gguf_export"]
    config.callbacks.setdefault(name, exporter)
    config.plain["callbacks"].setdefault(name, {"name": name, **kept})


def _open_data(config: Config) -> Dataset:
    config.data, dataset = open_shared_data(config.data, config.recipe.vocabulary())
    for key in config.data.fills:
        config.plain["data"][key] = getattr(config.data, key)
    for callback in config.callbacks.values():
        callback.check_run(config.plain, dataset)
    _require_tokens_of_teacher(config.objective, config.data, dataset)
    _require_tokens_of_base(config, dataset)
    tokens = getattr(config.base, "vocab", dataset.vocab)
    if dataset.vocab > tokens:
        problem = f"the data's token ids go up to {dataset.vocab - 1}, but the base has {tokens} tokens"
        raise UserError(f"{problem}; leave data.tokenizer out")
    if config.base is not None and (path := config.recipe.base_file()):
        match_preprocessing(dataset, config.base, path)
    return dataset


def _require_tokens_of_teacher(objective: Objective, data: Data, dataset: Dataset) -> None:
    """Raise UserError if ids of the data mean other tokens in the file of the objective's second model.

    Raise it also if that model reads another kind of data, and if the data has a tokenizer and the file has none.
    """
    path, teacher = objective.model_file(), objective.second_model
    if path and teacher and (reason := kind_mismatch(short_path(path), teacher.reads, data)):
        raise UserError(f"objective={objective.name}: {reason}; name another teacher")
    if path is None or dataset.tokenizer is None:
        return
    if not has_text(file := open_gguf(str(path))):
        problem = f"{short_path(path)} has no tokenizer, so its token ids cannot be compared with those of the data"
        raise UserError(f"objective={objective.name}: {problem}; name the teacher's GGUF file or its run")
    pairs = zip(read_tokenizer(file).pieces, dataset.tokenizer.pieces, strict=False)
    if any(theirs != ours for theirs, ours in pairs):
        problem = f"ids of the data mean other tokens in {short_path(path)}"
        raise UserError(f"objective={objective.name}: {problem}; add data.tokenizer={path}")


def _require_tokens_of_base(config: Config, dataset: Dataset) -> None:
    """Raise UserError if the recipe's base has no tokenizer, and the data has one that no file defines."""
    path, tokenizer = config.recipe.base_file(), Path(getattr(config.data, "tokenizer", "") or "auto")
    is_file = find_cached_repository(tokenizer).exists()
    if path is None or dataset.tokenizer is None or is_file or has_text(open_gguf(str(path))):
        return
    problem = "has no tokenizer, so ids of the data may mean other tokens"
    remedy = "name its GGUF file or run, or add data.tokenizer=MODEL with its tokenizer"
    raise UserError(f"recipe.base={short_path(path)}: {problem}; {remedy}")


def _fit_model(config: Config, dataset: Dataset) -> tuple[Model, Batches]:
    settings = config.settings
    who = f"model.{config.model.name}"
    fitted = call_checked(Model, config.model.fit, dataset, who=who)
    seed = settings.seed if settings.data_seed is None else settings.data_seed
    if type(fitted).batches is Model.batches:  # an error is then the data plugin's
        who = f"data.{config.data.name}"
    batches = call_checked(Batches, fitted.batches, dataset, settings.batch_size, seed, who=who)
    model = config.base.fit(dataset) if config.base is not None else fitted
    if settings.checkpoint_best is not None:
        model.require_metric("checkpoint_best", settings.checkpoint_best, config.objective.metric_names)
    return model, batches


def _count_steps(config: Config, batches: Batches) -> None:
    settings, rows = config.settings, batches.rows_per_epoch
    if settings.epochs is None:
        return
    if not rows:
        problem = f"data={config.data.name} has no epochs of a fixed length"
        raise UserError(f"epochs={settings.epochs:g}: {problem}; set steps=... instead")
    settings.steps = math.ceil(settings.epochs * rows / settings.batch_size)
    config.plain.update(steps=settings.steps, epochs=None)
    settings.check()


def _build_plan(config: Config, dataset: Dataset, model: Model, batches: Batches) -> Plan:
    settings, optim, recipe = config.settings, config.optim, config.recipe
    inputs = model.reads.with_bounds(batches.inputs, dataset.vocab)
    specs = config.objective.precomputed(inputs)
    precomputed = {name: replace(spec, optional=True) for name, spec in specs.items()}  # zeros where only times matter
    setup = Setup(
        {**inputs, **precomputed},
        settings.batch_size // optim.accumulate, optim.accumulate, optim.grad_clip,
        settings.seed if settings.model_seed is None else settings.model_seed,
        settings.nonfinite == "skip", config.objective,
    )  # fmt: skip
    check_tensors(f"model.{model.name}", model.tensors)
    who = f"recipe.{recipe.name}"
    plan = call_checked(Plan, recipe.plan, model, setup, who=who)
    check_tensors(who, lambda: plan.tensors)
    if not plan.trainable:
        raise UserError(f"{who}: trains no tensor; its plan() must mark at least one as trainable")
    if extra := call_checked(Sequence, config.objective.tensors, plan, who=f"objective.{config.objective.name}"):
        plan = plan.with_frozen(extra)
    check_forward(plan, who)
    return plan


def _check(config: Config, plan: Plan) -> None:
    for callback in config.callbacks.values():
        if isinstance(callback, Schedule):
            callback.check_scales(plan, config.settings.steps)
        callback.check_plan(plan)
    check_plan(plan, config.engine)
    config.engine.check_plan(plan)
    for tensor in plan.tensors:
        tensor.values.check_finite()


def execute(
    prepared: Prepared,
    directory: Path,
    say: Callable[[str], None] = lambda line: None,
    resumed: ResumeState | None = None,
) -> Result:
    """Run a prepared experiment in `directory` and return its result.

    `say` prints a line for the user; `resumed` is the state that a resumed run continues from.
    """
    with catch_signals() as signals:
        loop = run_requests(prepared, directory, signals, say, resumed)
        with forward_interrupts([loop]):
            request = next(loop)
            assert isinstance(request, Realize)
            opened: Stack | Exception
            try:
                opened = request.answer()
            except Exception as error:
                opened = error
            (end,) = drive([loop], *bind_sessions([loop], opened))
    if isinstance(end, Exception):
        raise end
    return end


def run_requests(
    prepared: Prepared, directory: Path, signals: Signals, say: Callable[[str], None], resumed: ResumeState | None
) -> Requests[Result]:
    """Run an experiment as a generator: create the run directory, train, write result.json and return the result.

    The generator yields requests for a session, steps and evaluations, which a driver answers.
    """
    config, bus, log_file = prepared.config, prepared.bus, directory / "log.txt"
    bus.print_line = say
    if Interval.parse(config.settings.checkpoint_every, "checkpoint_every"):
        check_snapshot(prepared.plan, config.engine)
    origin = origin_facts(prepared)
    run_dir = RunDir(directory, config.plain, resumed=resumed is not None, origin=origin)
    try:
        for line in [*introduction(prepared), *(resumed.lines() if resumed else ())]:
            log.info(line)
            say(line)
        state = resumed.checkpoint.arrays if resumed else None
        with attribute_part_errors(log_file), convert_memory_errors():
            batches = precompute_arrays(prepared, say, resumed.checkpoint.step if resumed else 0, log_file)
            prepared = replace(prepared, batches=batches)
            with attribute_errors(f"engine.{config.engine.name}", "while it realized the plan", log_file):
                opened: Session = yield Realize(config.engine, prepared.plan)
            with prepare_session(config.recipe, config.engine, opened, state, log_file) as session:
                for line in call_for_lines(session.notes):
                    log.info("note    %s", line)
                    say(f"note    {line}")
                about = _build_run(prepared, run_dir, session, signals, resumed)
                outcome, failures = yield from _train(prepared, about, signals, resumed, say)
        return conclude(prepared, run_dir, outcome, failures, signals)
    except BaseException as error:
        conclude_failure(prepared, run_dir, error)
        raise
    finally:
        run_dir.close()


def _build_run(
    prepared: Prepared, run_dir: RunDir, session: Session, signals: Signals, resumed: ResumeState | None
) -> Run:
    settings = prepared.config.settings
    return Run(
        name=settings.name,
        dir=run_dir.path,
        ledger=run_dir.ledger,
        seed=settings.seed,
        steps=settings.steps,
        lr=settings.lr,
        config=prepared.config.plain,
        engine=prepared.config.engine.name,
        plan=prepared.plan,
        session=session,
        dataset=prepared.dataset,
        facts={**facts(prepared, call_checked(dict, session.describe)), **run_dir.origin},
        bus=prepared.bus,
        resumed_step=resumed.checkpoint.step if resumed else 0,
        stop_signals=signals.count,
    )


def _train(
    prepared: Prepared, run: Run, signals: Signals, resumed: ResumeState | None, say: Callable[[str], None]
) -> Requests[tuple[Outcome, list[Exception]]]:
    """Train and call the hooks of all callbacks. The hook on_end is called even if training fails.

    Return the outcome and a list of errors that did not stop training: a NaN or infinite held-out loss, a failed write
    of the last checkpoint, and exceptions that callbacks raised in on_end.
    """
    bus, settings, error = prepared.bus, prepared.config.settings, None
    bus.log = run.dir / "log.txt"
    reason, eval_error = "errored", None
    saver = RunSaver(run, prepared, resumed, signals)
    bus.best = saver.best
    try:
        signals.defer_to_step_end()
        bus.hook.on_start(run=run)
        bus.check()
        if resumed:
            inexact = resumed.inexactness(run.facts["backend"])
            run.emit("resume", **resumed.facts(), inexact=inexact)
            if inexact:
                say(inexact)
        for text in prepared.warnings:
            run.emit("warning", text=text)
        outcome = yield from Training(
            run, bus, prepared.batches, settings.eval_every, signals.is_ending,
            saver, resumed.outcome if resumed else Outcome(in_nats=prepared.plan.objective.in_nats),
            prepared.config.recipe,
        ).requests()  # fmt: skip
        yield Pause()  # finish() waits for the last checkpoint
        reason, eval_error = outcome.reason, bad_eval_error(run, outcome)
    except BaseException as caught:
        error, reason = caught, end_reason(caught)
        raise
    finally:
        unsaved = None
        try:
            unsaved = saver.finish()
        finally:  # a second signal may interrupt finish()
            failures = bus.end(run, reason, error or eval_error or unsaved, signals.final_interrupt)
        failures = [*filter(None, (eval_error, unsaved)), *failures]
    if signals.final_interrupt():
        outcome.reason = "interrupted"
    return outcome, failures


class RunSaver(Saver):
    """Checkpointing of one run: weights, optimiser state, progress and callback state."""

    def __init__(self, run: Run, prepared: Prepared, resumed: ResumeState | None, signals: Signals):
        settings = prepared.config.settings
        self._run, self._prepared, self._signals = run, prepared, signals
        self._folder, self._step = run.dir / "checkpoints", run.resumed_step
        base, engine = prepared.config.recipe.base_file(), prepared.config.engine
        in_place = base and not engine.own_memory and getattr(engine, "packed", True)
        self._base = (base, base.stat(), run.facts["sources"]["base"]) if base and in_place else None
        callbacks = prepared.config.callbacks
        self._keeper = CheckpointKeeper(
            self._folder,
            Interval.parse(settings.checkpoint_every, "checkpoint_every"),
            settings.checkpoint_keep,
            settings.checkpoint_best or next(filter(None, (c.best_metric() for c in callbacks.values())), None),
            resumed.checkpoint if resumed else None,
        )

    def begin(self, metrics: Mapping[str, float]) -> None:
        """Raise UserError if the metric of `checkpoint_best` is not among `metrics`."""
        self._keeper.check(metrics)

    def is_due(self, step: int) -> bool:
        """Return True if `after` must be called at `step`.

        This holds if a checkpoint is due, if SIGUSR1 requested one, or if a finished or failed write is not yet
        reported to callbacks.
        """
        return self._signals.is_save_requested or self._keeper.needs_attention(step)

    def after(self, outcome: Outcome, metrics: Mapping[str, float], last: bool) -> None:
        """Save a checkpoint if one is due, if SIGUSR1 requested one, or if this is the last step.

        With `checkpoint_every=0` no checkpoint is saved only because it is the last step. Also tell the callbacks which
        checkpoints were written since the last call.
        """
        self._step = outcome.steps
        is_requested = self._signals.take_save_request()
        if is_requested:
            self._run.emit("note", text=f"SIGUSR1: saving step {outcome.steps}; training continues")
        due = self._keeper.is_due(outcome.steps, metrics, last, is_requested)
        if self._base and (due or last):
            require_same_file(*self._base)
        if due:
            callbacks = {name: c.state() for name, c in self._prepared.config.callbacks.items()}
            state = {
                **{key: self._run.facts[key] for key in ("cwd", "sources")},
                "outcome": asdict(outcome),
                "callbacks": {name: state for name, state in callbacks.items() if state},
                "engine": self._run.facts.get("backend", {}),
                "config": self._run.config,
                "scores": dict(self._keeper.scores),  # copied: the checkpoint is written later
                "evals": dict(self._keeper.evals),
                "metric": self._keeper.metric,
            }
            self._keeper.save(outcome.steps, self._run.session.snapshot, state, self._sync)
        self._tell()

    def _sync(self) -> None:
        for callback in self._prepared.config.callbacks.values():
            callback.sync()

    def best(self, weights: bool) -> Best | None:
        """Return the best evaluation so far, with its weights if `weights` is True; None if there is none.

        If the weights cannot be read, emit a warning and return None.
        """
        try:
            return self._keeper.best(self._step, weights)
        except DamagedCheckpoint as error:
            self._run.emit("warning", text=f"the best weights cannot be read: {error}; using the last weights")
            return None

    def finish(self) -> Exception | None:
        """Wait until the last checkpoint is written, and report it to callbacks. Return the error if either fails."""
        self._keeper.wait()
        self._tell(last=True)
        try:
            self._prepared.bus.check()
        except Exception as error:  # of a callback; the other callbacks' on_end still run
            return error
        if self._keeper.missing is None:
            return None
        last = next((p.name for p in list_checkpoints(self._folder).values()), "none")
        return RunFailed(f"{self._folder}: {self._keeper.missing}; the last checkpoint is: {last}")

    def _tell(self, last: bool = False) -> None:
        for saved in self._keeper.pop_written_checkpoints():
            fields = {"bytes": saved.bytes, "seconds": saved.seconds}
            self._run.emit("checkpoint", step=saved.step, path=str(saved.path), **fields)
            self._prepared.bus.hook.on_checkpoint(run=self._run, step=saved.step, path=saved.path)
        if self._keeper.trouble:
            if not last:  # at the end, finish() returns it as an error
                self._run.emit("warning", text=f"{self._keeper.trouble}; training continues and tries the next one")
            self._keeper.trouble = None
