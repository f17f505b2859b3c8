"""The callback bus of a run: it calls the hooks of all callbacks, in the order of the configuration."""

from __future__ import annotations

import logging
import math
import numbers
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pluggy

from toyexp.base.attribution import plugin_failure, wrong_return
from toyexp.base.errors import PluginFailed, RunFailed, SessionError, UserError, printable, suggest
from toyexp.base.signals import hidden_interrupt
from toyexp.interfaces.callback import Callback, Schedule, has_hook, sets_lr
from toyexp.interfaces.dataset import Batch
from toyexp.interfaces.hooks import RunHooks
from toyexp.interfaces.plan import Plan
from toyexp.interfaces.run import Best, Metrics, Run

log = logging.getLogger("toyexp")

QUESTIONS = {"lr", "factors", "stop_reason", "on_end"}  # hooks whose errors are raised immediately
OBSERVERS = {"on_start", "on_step", "on_eval", "on_checkpoint", "on_event"}  # `Bus.check` raises their errors later


class _Manager(pluggy.PluginManager):
    def parse_hookimpl_opts(self, plugin: object, name: str) -> Any:
        """Return pluggy's options of the attribute `name` if it is a hook of toyexp, otherwise None.

        Without this override pluggy would inspect every attribute of each callback, which takes a millisecond.
        """
        return super().parse_hookimpl_opts(plugin, name) if name in QUESTIONS | OBSERVERS else None


class Bus:
    """Dispatcher that calls the hooks of one run's callbacks.

    Raises UserError if two callbacks set the same value, such as the learning rate.
    """

    def __init__(self, callbacks: Mapping[str, Callback], default_callbacks: Callable[[], Collection[str]] = list):
        self._manager = _Manager("toyexp")
        self._manager.add_hookspecs(RunHooks)
        for name, callback in reversed(list(callbacks.items())):  # pluggy calls the last registered first
            self._manager.register(callback, name)
        self.hook = self._manager.hook
        self._recorders = {name for name, callback in callbacks.items() if callback.closes_last}
        self.stop_reason: str | None = None  # the reason given by the callback that stopped the run
        self.step: int | None = None  # current step; None before the first evaluation
        self.log: Path | None = None  # the log file with tracebacks
        self._callbacks = tuple(callbacks.values())
        self._ending = False
        self._metrics: Metrics | None = None  # passed to the hook that is running
        self._pending: dict[str, float] = {}  # logged between hooks
        self._failure: Exception | None = None
        for hook in QUESTIONS | OBSERVERS:
            for impl in getattr(self.hook, hook).get_hookimpls():
                impl.function = self._guard(f"callbacks.{impl.plugin_name}", impl.function, hook)
        self.artifacts: list[Path] = []
        self.artifact_steps: dict[Path, int] = {}  # artifacts whose event gave a step
        self.best: Callable[[bool], Best | None] = lambda weights: None  # see Run.best; True: with weights
        self.print_line: Callable[[str], None] = lambda line: None  # prints a line for the user
        scaled = {name: c.scales for name, c in callbacks.items() if isinstance(c, Schedule)}
        scaled |= {name: "lr" for name, c in callbacks.items() if sets_lr(c)}
        for number in set(scaled.values()):
            rivals = [name for name in callbacks if scaled.get(name) == number]
            if len(rivals) > 1:
                drop = next((name for name in rivals if name in default_callbacks()), rivals[0])
                label = "the learning rate" if number == "lr" else number
                raise UserError(f"callbacks {' and '.join(rivals)} both set {label}; drop one: '~callbacks.{drop}'")
        by_factors = dict.fromkeys(name for name, c in callbacks.items() if has_hook(c, "factors"))
        self.schedules: dict[str, str | None] = by_factors | scaled  # scaled number by callback; None: varies by step
        implementers = [impl.plugin for impl in self.hook.factors.get_hookimpls()]
        self._has_factors = not all(_scales_only_lr(callback) for callback in implementers)
        self._schedule = next((name for name, number in scaled.items() if number == "lr"), None)
        self._lr_hooks = self._calls("lr", "run", "step", "steps")
        self._step_hooks = self._calls("on_step", "run", "step", "metrics", "batch")
        self._wait_checks = [c.should_wait for c in callbacks.values() if not _never_waits(c)]

    def lr(self, run: Run, step: int) -> float:
        """Return the learning rate of the 0-based `step`: the schedule's, or the run's `lr` if no callback sets it.

        Raise RunFailed if a callback returns an invalid learning rate.
        """
        answers = (call(run, step, run.steps) for call in self._lr_hooks)
        answer = next((answer for answer in answers if answer is not None), None)
        if answer is None:
            return run.lr
        if not _is_scale(answer):
            problem = f"lr at step {step + 1} is {printable(repr(answer))}"
            raise RunFailed(f"callbacks.{self._schedule}: {problem}; it must be a finite number >= 0, or None")
        return float(answer)

    def call_on_step(self, run: Run, step: int, metrics: Metrics, batch: Batch) -> None:
        """Call on_step of all callbacks."""
        self._begin(metrics)
        for call in self._step_hooks:
            call(run, step, metrics, batch)
        self._metrics = None

    def call_on_eval(self, run: Run, step: int, metrics: Metrics) -> None:
        """Call on_eval of all callbacks. The callbacks may log further metrics."""
        self._begin(metrics)
        self.hook.on_eval(run=run, step=step, metrics=metrics)
        self._metrics = None

    def _begin(self, metrics: Metrics) -> None:
        self._metrics = metrics
        if self._pending:
            pending, self._pending = self._pending, {}
            metrics.add(pending)

    def log_numbers(self, run: Run, numbers: Mapping[str, float]) -> None:
        """Add numbers that a callback logs to the metrics of the current step or evaluation.

        A callback may also log numbers between two steps. They are added to the metrics of the next step or evaluation.
        At the end of the run, when no step follows, they are emitted as an event `log`.
        """
        if self._metrics is not None:
            self._metrics.add(numbers)
        elif self._ending:
            self.emit(run, "log", {"step": self.step, **numbers})
        else:
            self._pending |= numbers

    def _calls(self, hook: str, *params: str) -> Sequence[Callable[..., Any]]:
        """Return the functions that implement `hook`, in the order of the callbacks.

        Each function takes the values of `params` as positional arguments. A direct call of these functions takes half
        the time of a call through pluggy.
        """
        impls = getattr(self.hook, hook).get_hookimpls()
        if any(impl.wrapper or impl.hookwrapper for impl in impls):
            return [lambda *values: getattr(self.hook, hook)(**dict(zip(params, values, strict=True)))]
        return [
            _select_arguments(impl.function, [params.index(name) for name in impl.argnames]) for impl in reversed(impls)
        ]

    def factors(self, run: Run, step: int) -> dict[str, float]:
        """Return the factors by which callbacks scale the optimiser's numbers (such as beta1) at the 0-based `step`.

        The keys are the names of the numbers. Raise RunFailed if a factor is invalid, or if two callbacks scale the
        same number.
        """
        factors: dict[str, float] = {}
        if not self._has_factors:
            return factors
        owners: dict[str, str] = {}
        arguments: dict[str, Any] = {"run": run, "step": step, "steps": run.steps}
        for impl in reversed(self.hook.factors.get_hookimpls()):
            answer: Any = impl.function(*[arguments[name] for name in impl.argnames])
            who = f"callbacks.{impl.plugin_name}"
            if answer is not None and not isinstance(answer, Mapping):
                problem = f"its factors at step {step + 1} are {printable(repr(answer))}"
                raise RunFailed(f"{who}: {problem}; they must be numbers by name, such as {{'beta1': 0.9}}, or None")
            for name, value in (answer or {}).items():
                if name in owners:
                    raise RunFailed(f"{owners[name]} and {who} both scale {name}; drop one: '~{who}'")
                _check_factor(f"{who}: the factor of {printable(str(name))} at step {step + 1}", run.plan, name, value)
                factors[name], owners[name] = float(value), who
        return factors

    def should_wait(self, step: int) -> bool:
        """Return True if a callback needs the state of the run after `step`, before the next step is launched."""
        return any(check(step) for check in self._wait_checks)

    def _guard(self, name: str, function: Callable[..., Any], hook: str) -> Callable[..., Any]:
        """Return a function that calls `function`, the `hook` of the callback `name`, and converts its exceptions.

        The converted error names the callback. If `hook` is in QUESTIONS, it is raised at once. Otherwise the first
        such error is stored, and the method `check` raises it later.
        """

        def call(*arguments: Any) -> Any:
            try:
                answer = function(*arguments)
                if hook == "stop_reason" and not isinstance(answer, str | Generator | None):  # a wrapper is a generator
                    raise wrong_return(function, answer, "a sentence or None", name)
                return answer
            except (Exception, SystemExit) as error:  # a callback may call sys.exit(), which fails the run
                failure = plugin_failure(name, self._when(), error, self.log)
                if isinstance(error, SessionError) or (isinstance(error, UserError) and self.step is not None):
                    failure = PluginFailed(f"{name} {self._when()}: {str(error) or type(error).__name__}")
                    failure.__cause__ = error
                if hook in QUESTIONS or hidden_interrupt(error):
                    raise failure from failure.__cause__
                self._failure = self._failure or failure
                return None

        return call

    def _when(self) -> str:
        return "at the end" if self._ending else "at the start" if self.step is None else f"at step {self.step}"

    def check(self) -> None:
        """Raise the first error that a callback raised in one of the hooks `OBSERVERS` since the last `check`."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def emit(self, run: Run, kind: str, fields: dict[str, Any]) -> None:
        """Call on_event of all callbacks.

        For an event `export`, also record the path of the written file; print and log the text of a `warning`.
        """
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
        """Call on_end of every callback and return the errors that they raised.

        Callbacks with `closes_last`, which record the run, are called last. They receive the error that ended the run
        or, if there is none, the first error that another callback raised in on_end. `signal()` returns the interrupt
        (Ctrl-C) that ended the run, or None. A second Ctrl-C is raised as an interrupt after all calls.
        """
        self._ending = True
        raised: list[BaseException] = []
        impls = list(reversed(self.hook.on_end.get_hookimpls()))
        recorders = [impl for impl in impls if impl.plugin_name in self._recorders]
        signalled = signal() if reason == "interrupted" else None
        self._end_each([impl for impl in impls if impl not in recorders], raised, run, reason, error or signalled)
        signalled = signal()
        final_reason = "interrupted" if signalled and reason == "completed" else reason
        first = next(iter(sorted(raised, key=lambda e: isinstance(e, Exception))), None)  # an interrupt, if any
        self._end_each(recorders, raised, run, final_reason, error or signalled or first)
        for second in raised:
            if not isinstance(second, Exception):
                raise second
        return [failure for failure in raised if isinstance(failure, Exception)]

    def _end_each(
        self, impls: Sequence[pluggy.HookImpl], raised: list[BaseException], run: Run, reason: str,
        error: BaseException | None,
    ) -> None:  # fmt: skip
        arguments = {"run": run, "reason": reason, "error": error}
        for impl in impls:
            try:
                impl.function(*[arguments[name] for name in impl.argnames])
                self.check()  # errors of observers of the events that it emitted
            except Exception as failure:
                log.error("%s", failure, exc_info=failure if raised else None)  # the first is logged when raised
                raised.append(failure)
            except BaseException as second:
                log.error("callback %s was interrupted at the end of the run", impl.plugin_name)
                raised.append(second)


def _select_arguments(function: Callable[..., Any], indices: Sequence[int]) -> Callable[..., Any]:
    return lambda *values: function(*[values[index] for index in indices])


def _never_waits(callback: Callback) -> bool:
    """Return True if the callback's method `should_wait` surely returns False, so that it need not be called.

    A callback's `should_wait(step)` returns True if the callback needs the weights after this step. toyexp's own
    implementations do not depend on the step: if the callback inherits one, it is called once, with step 1.
    """
    method = getattr(callback.should_wait, "__func__", None)
    return method in (Callback.should_wait, Schedule.should_wait) and not callback.should_wait(1)


def _scales_only_lr(callback: object) -> bool:
    """Return True if a callback is a schedule of the learning rate that does not scale any other setting."""
    return isinstance(callback, Schedule) and callback.scales == "lr" and type(callback).factors is Schedule.factors


def _check_factor(key: str, plan: Plan, name: str, value: Any) -> None:
    if not _is_scale(value):
        raise RunFailed(f"{key} is {printable(repr(value))}; it must be a finite number >= 0")
    scalable = set().union(*(group.scalable for group in plan.updates))
    if name not in scalable:
        hint = "use the hook `lr`" if name == "lr" else suggest(str(name), scalable)
        raise RunFailed(f"{key}: this optimiser has no setting of that name; {hint}")
    for group in plan.updates:
        try:
            group.scale_rule({name: value}).check()
        except UserError as error:
            raise RunFailed(f"{key} is {value:g}: {error}") from error


def _is_scale(answer: Any) -> bool:
    number = isinstance(answer, numbers.Real) and not isinstance(answer, bool)
    return bool(number and math.isfinite(answer) and answer >= 0)
