"""The callback bus of one run: who hears what, in config order."""

from __future__ import annotations

import logging
import math
import numbers
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import pluggy

from toyexp.base.attribution import plugin_failure
from toyexp.base.errors import PluginFailed, RunFailed, SessionError, UserError, printable, suggest
from toyexp.base.signals import hidden_interrupt
from toyexp.interfaces.callback import Callback, Schedule, has_hook, sets_lr
from toyexp.interfaces.dataset import Batch
from toyexp.interfaces.hooks import RunHooks
from toyexp.interfaces.plan import Plan
from toyexp.interfaces.run import Best, Metrics, Run

log = logging.getLogger("toyexp")

QUESTIONS = {"lr", "factors", "stop_reason", "on_end"}  # hooks whose errors are raised at once
OBSERVERS = {"on_start", "on_step", "on_eval", "on_checkpoint", "on_event"}


class _Manager(pluggy.PluginManager):
    def parse_hookimpl_opts(self, plugin: object, name: str) -> Any:
        """Look at the hooks alone: to look at all that a callback has takes a millisecond."""
        return super().parse_hookimpl_opts(plugin, name) if name in QUESTIONS | OBSERVERS else None


class Bus:
    """Delivers hooks to the callbacks of one run; UserError if two answer `lr`: drop the one that is `by_default`."""

    def __init__(self, callbacks: Mapping[str, Callback], by_default: Callable[[], Collection[str]] = list):
        self._manager = _Manager("toyexp")
        self._manager.add_hookspecs(RunHooks)
        for name, callback in reversed(list(callbacks.items())):  # pluggy calls the last registered first
            self._manager.register(callback, name)
        self.hook = self._manager.hook
        self._recorders = {name for name, callback in callbacks.items() if callback.closes_last}
        self.why: str | None = None  # the sentence of the callback that ended the run
        self.step: int | None = None  # the step that training is at; None before the first eval
        self.log: Path | None = None  # where tracebacks stand
        self._callbacks = tuple(callbacks.values())
        self._ending = False
        self._metrics: Metrics | None = None  # that callbacks hear of now
        self._pending: dict[str, float] = {}  # logged meanwhile
        self._failure: Exception | None = None
        for hook in QUESTIONS | OBSERVERS:
            for impl in getattr(self.hook, hook).get_hookimpls():
                impl.function = self._guard(f"callbacks.{impl.plugin_name}", impl.function, hook in QUESTIONS)
        self.artifacts: list[Path] = []
        self.artifact_steps: dict[Path, int] = {}  # of each artifact, where it was said
        self.best: Callable[[bool], Best | None] = lambda weights: None  # see Run.best; with its weights, or without
        self.print_line: Callable[[str], None] = lambda line: None  # gets lines for the person who watches
        scaled = {name: c.scales for name, c in callbacks.items() if isinstance(c, Schedule)}
        scaled |= {name: "lr" for name, c in callbacks.items() if sets_lr(c)}
        for number in set(scaled.values()):
            rivals = [name for name in callbacks if scaled.get(name) == number]
            if len(rivals) > 1:
                least = next((name for name in rivals if name in by_default()), rivals[0])
                what = "the learning rate" if number == "lr" else number
                raise UserError(f"callbacks {' and '.join(rivals)} both set {what}; drop one: '~callbacks.{least}'")
        asked = dict.fromkeys(name for name, c in callbacks.items() if has_hook(c, "factors"))
        self.schedules: dict[str, str | None] = asked | scaled  # what each scales; None: it says so at each step
        answering = [impl.plugin for impl in self.hook.factors.get_hookimpls()]
        self._asks_factors = not all(_scales_lr_alone(callback) for callback in answering)
        self._schedule = next((name for name, number in scaled.items() if number == "lr"), None)
        self._of_lr = self._calls("lr", "run", "step", "steps")
        self._of_steps = self._calls("on_step", "run", "step", "metrics", "batch")
        self._looking = [c.should_wait for c in callbacks.values() if not _never_looks(c)]

    def lr(self, run: Run, step: int) -> float:
        """Return the learning rate of the 0-based `step`; RunFailed for an answer that is no finite number from 0."""
        answers = (call(run, step, run.steps) for call in self._of_lr)
        answer = next((answer for answer in answers if answer is not None), None)
        if answer is None:
            return run.lr
        if not _scales(answer):
            what = f"lr at step {step + 1} is {printable(repr(answer))}"
            raise RunFailed(f"callbacks.{self._schedule}: {what}; it must be a finite number from 0, or None")
        return float(answer)

    def call_on_step(self, run: Run, step: int, metrics: Metrics, batch: Batch) -> None:
        """Tells that a step was taken."""
        self._begin(metrics)
        for call in self._of_steps:
            call(run, step, metrics, batch)
        self._metrics = None

    def call_on_eval(self, run: Run, step: int, metrics: Metrics) -> None:
        """Tell of an evaluation; callbacks may log scores of their own."""
        self._begin(metrics)
        self.hook.on_eval(run=run, step=step, metrics=metrics)
        self._metrics = None

    def _begin(self, metrics: Metrics) -> None:
        self._metrics = metrics
        if self._pending:
            pending, self._pending = self._pending, {}
            metrics.add(pending)

    def log_numbers(self, run: Run, numbers: Mapping[str, float]) -> None:
        """Add what a callback logs to the metrics of now, or of the next step or eval; at the end it is an event."""
        if self._metrics is not None:
            self._metrics.add(numbers)
        elif self._ending:
            self.emit(run, "log", {"step": self.step, **numbers})
        else:
            self._pending |= numbers

    def _calls(self, hook: str, *given: str) -> Sequence[Callable[..., Any]]:
        """Return a hook's functions in order, called with all that is `given`; pluggy takes twice as long."""
        impls = getattr(self.hook, hook).get_hookimpls()
        if any(impl.wrapper or impl.hookwrapper for impl in impls):
            return [lambda *values: getattr(self.hook, hook)(**dict(zip(given, values, strict=True)))]
        return [_taking(impl.function, [given.index(name) for name in impl.argnames]) for impl in reversed(impls)]

    def factors(self, run: Run, step: int) -> dict[str, float]:
        """Return what the optimiser's numbers are multiplied by at the 0-based `step`; RunFailed for what cannot be."""
        found: dict[str, float] = {}
        if not self._asks_factors:
            return found
        owners: dict[str, str] = {}
        arguments: dict[str, Any] = {"run": run, "step": step, "steps": run.steps}
        for impl in reversed(self.hook.factors.get_hookimpls()):
            answer: Any = impl.function(*[arguments[name] for name in impl.argnames])
            who = f"callbacks.{impl.plugin_name}"
            if answer is not None and not isinstance(answer, Mapping):
                what = f"its factors at step {step + 1} are {printable(repr(answer))}"
                raise RunFailed(f"{who}: {what}; they must be numbers by name, such as {{'beta1': 0.9}}, or None")
            for name, value in (answer or {}).items():
                if name in owners:
                    raise RunFailed(f"{owners[name]} and {who} both scale {name}; drop one: '~{who}'")
                _check_factor(f"{who}: the factor of {printable(str(name))} at step {step + 1}", run.plan, name, value)
                found[name], owners[name] = float(value), who
        return found

    def should_wait(self, step: int) -> bool:
        """Whether a callback needs the run as it stands after `step`."""
        return any(looks(step) for looks in self._looking)

    def _guard(self, name: str, function: Callable[..., Any], raises: bool) -> Callable[..., Any]:
        """Raise what a callback raises as its failure; keep an observer's for `check`, so that all are told."""

        def call(*arguments: Any) -> Any:
            try:
                return function(*arguments)
            except (Exception, SystemExit) as error:  # a callback may call sys.exit(); the run fails of it
                found = plugin_failure(name, self._when(), error, self.log)
                if isinstance(error, SessionError) or (isinstance(error, UserError) and self.step is not None):
                    found = PluginFailed(f"{name} {self._when()}: {str(error) or type(error).__name__}")
                    found.__cause__ = error
                if raises or hidden_interrupt(error):
                    raise found from found.__cause__
                self._failure = self._failure or found
                return None

        return call

    def _when(self) -> str:
        return "at the end" if self._ending else "at the start" if self.step is None else f"at step {self.step}"

    def check(self) -> None:
        """Raises the first thing that went wrong in a callback since this was last asked."""
        found, self._failure = self._failure, None
        if found is not None:
            raise found

    def emit(self, run: Run, kind: str, fields: dict[str, Any]) -> None:
        """Delivers an event; an `export` is also noted as a result of the run, a `warning` told and logged."""
        if kind == "export":
            self.artifacts.append(Path(fields["path"]))
            if "step" in fields:
                self.artifact_steps[Path(fields["path"])] = fields["step"]
        if kind == "warning":
            log.warning("%s", fields["text"])
            self.print_line(f"toyexp: warning: {fields['text']}")
        self.hook.on_event(run=run, kind=kind, fields=fields)

    def end(
        self, run: Run, reason: str, error: BaseException | None,
        signal: Callable[[], BaseException | None] = lambda: None,
    ) -> list[Exception]:  # fmt: skip
        """Call on_end of every callback, recorders (`closes_last`) last; return what was raised.

        Recorders are told the first failure. A second Ctrl-C is raised once all were called; `signal` returns a first.
        """
        self._ending = True
        raised: list[BaseException] = []
        impls = list(reversed(self.hook.on_end.get_hookimpls()))
        recorders = [impl for impl in impls if impl.plugin_name in self._recorders]
        signalled = signal() if reason == "interrupted" else None
        self._end_each([impl for impl in impls if impl not in recorders], raised, run, reason, error or signalled)
        signalled = signal()
        told = "interrupted" if signalled and reason == "completed" else reason
        first = next(iter(sorted(raised, key=lambda e: isinstance(e, Exception))), None)  # an interruption, if any
        self._end_each(recorders, raised, run, told, error or signalled or first)
        for second in raised:
            if not isinstance(second, Exception):
                raise second
        return [found for found in raised if isinstance(found, Exception)]

    def _end_each(
        self, impls: Sequence[pluggy.HookImpl], raised: list[BaseException], run: Run, reason: str,
        error: BaseException | None,
    ) -> None:  # fmt: skip
        arguments = {"run": run, "reason": reason, "error": error}
        for impl in impls:
            try:
                impl.function(*[arguments[name] for name in impl.argnames])
                self.check()  # of what it has said to others
            except Exception as found:
                log.error("%s", found, exc_info=found if raised else None)  # the first is raised, and logged there
                raised.append(found)
            except BaseException as second:
                log.error("callback %s was interrupted at the end of the run", impl.plugin_name)
                raised.append(second)


def _taking(function: Callable[..., Any], places: Sequence[int]) -> Callable[..., Any]:
    return lambda *given: function(*[given[place] for place in places])


def _never_looks(callback: Callback) -> bool:
    """Return True if a callback inherits `should_wait` and its answer is False, which then holds for every step."""
    own = getattr(callback.should_wait, "__func__", None)
    return own in (Callback.should_wait, Schedule.should_wait) and not callback.should_wait(1)


def _scales_lr_alone(callback: object) -> bool:
    """Return True for a schedule of the learning rate, which scales no other number at any step."""
    return isinstance(callback, Schedule) and callback.scales == "lr" and type(callback).factors is Schedule.factors


def _check_factor(key: str, plan: Plan, name: str, value: Any) -> None:
    if not _scales(value):
        raise RunFailed(f"{key} is {printable(repr(value))}; it must be a finite number from 0")
    known = set().union(*(group.scalable for group in plan.updates))
    if name not in known:
        hint = "the hook `lr` is for that" if name == "lr" else suggest(str(name), known)
        raise RunFailed(f"{key} is of no number of this optimiser; {hint}")
    for group in plan.updates:
        try:
            group.scale_rule({name: value}).check()
        except UserError as error:
            raise RunFailed(f"{key} is {value:g}: {error}") from error


def _scales(answer: Any) -> bool:
    number = isinstance(answer, numbers.Real) and not isinstance(answer, bool)
    return bool(number and math.isfinite(answer) and answer >= 0)
