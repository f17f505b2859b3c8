"""The callback bus of one run: who hears what, in config order."""

from __future__ import annotations

import contextlib
import logging
import math
import numbers
from abc import ABC
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pluggy

from toyexp.base.blame import failure
from toyexp.base.errors import RunFailed, UserError, printable
from toyexp.base.signals import hidden_interrupt
from toyexp.contract.hooks import RunHooks, hookimpl
from toyexp.contract.planned import Planned
from toyexp.training.ownership import Ledger

if TYPE_CHECKING:
    from toyexp.contract.data import Dataset
    from toyexp.contract.engine import Session
    from toyexp.contract.plan import Plan
    from toyexp.training.checkpoint import Best

log = logging.getLogger("toyexp")

QUESTIONS = {"lr", "stop_reason", "on_end"}  # hooks whose errors are raised at once
OBSERVERS = {"on_start", "on_step", "on_eval", "on_checkpoint", "on_event"}


@dataclass(eq=False)
class Callback(ABC):
    """Base of all callbacks: subclass it as a `@dataclass(eq=False)` whose fields are its settings.

    Its hook methods, marked `@hookimpl`, are named after `toyexp.contract.hooks.RunHooks`. It observes or answers; whatever
    two callbacks would have to share belongs to the loop.
    """

    name: ClassVar[str]  # what `callbacks=[...]` takes

    def check(self) -> None:  # noqa: B027 - optional on purpose: most callbacks have nothing to check
        """Raises UserError for settings that cannot work, and Unavailable for a missing package."""

    def check_run(self, config: Mapping[str, Any], dataset: Dataset) -> None:  # noqa: B027 - optional, as above
        """Raises UserError for what cannot work with this run's configuration and data, before anything is written."""

    def check_plan(self, plan: Plan) -> None:  # noqa: B027 - optional, as above
        """Raises UserError for a model or recipe it cannot work with, before anything is written."""

    def best_by(self) -> str | None:
        """The held-out score whose best weights it wants the run to keep, as `checkpoint_best` does."""
        return None

    def warnings(self, planned: Planned) -> Iterable[str]:
        """A sentence for each of its settings that has no effect in this run, or cannot have the one it is for."""
        return ()

    def outputs(self, plan: Plan) -> Sequence[str]:
        """What it leaves in the run's directory, by name: a run that is resumed begins only if it may replace that."""
        return ()

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it, as JSON takes it: text, finite numbers, lists and dicts of them."""
        return {}

    def resume(self, state: Mapping[str, Any]) -> None:  # noqa: B027 - optional, as above
        """Takes back what `state` gave; called before `on_start` of a run that continues from a checkpoint."""

    def join(self, step: int) -> None:  # noqa: B027 - optional, as above
        """Called in place of `resume` when the run began without it; raises UserError if it cannot join at `step`."""


@dataclass(eq=False)
class Schedule(Callback):
    """Base of the callbacks that scale the base learning rate at every step; a run has one answer to `lr` at most."""

    def factor(self, step: int, steps: int) -> float:
        """What the base learning rate is multiplied by at 0-based `step` of `steps`."""
        raise NotImplementedError

    @hookimpl
    def lr(self, run: Run, step: int, steps: int) -> float:
        """The base learning rate times `factor`."""
        return run.lr * self.factor(step, steps)


def answers_lr(cls: type[Callback]) -> bool:
    """Whether callbacks of this class set the learning rate."""
    return getattr(getattr(cls, "lr", None), "toyexp_impl", None) is not None


@dataclass(frozen=True)
class Run:
    """What callbacks know about the run they are in."""

    name: str
    dir: Path
    seed: int
    steps: int
    lr: float  # the base learning rate
    config: Mapping[str, Any]  # the resolved configuration
    engine: str  # the engine's name; with engine=auto the one that was picked
    plan: Plan
    session: Session
    dataset: Dataset
    facts: Mapping[str, Any] = field(default_factory=dict)  # what run_start records
    bus: Bus | None = field(default=None, repr=False)
    resumed: int = 0  # the step it continues from, of a run that was resumed
    ledger: Ledger | None = field(default=None, repr=False)  # what it wrote into its directory
    stops: Callable[[], int] = lambda: 0  # how many signals have asked it to end: at the second everyone hurries

    def best(self) -> Best | None:
        """The best look at the held-out data so far, with its weights; None of a run that keeps no best."""
        return self.bus.best(True) if self.bus is not None else None

    @contextlib.contextmanager
    def output(self, path: Path, grows: bool = False) -> Iterator[Path]:
        """A place to write a file or directory to, which becomes `path`, below the run's directory, in one piece.

        A file that `grows` is appended to afterwards. Raises RunFailed where it cannot be written, and where something
        stands that this run did not write: that is never replaced. A callback names what it leaves in `outputs`.
        """
        try:
            with (self.ledger or Ledger(self.dir)).output(path, grows) as place:
                yield place
        except OSError as error:
            raise RunFailed(f"{path}: could not be written: {error.strerror or 'the disk may be full'}") from error
        except RunFailed as error:
            raise RunFailed(str(error).replace(str(place.parent), str(path.parent))) from error

    def emit(self, kind: str, **fields: Any) -> None:
        """Tells every callback (events.jsonl among them) that something happened."""
        if self.bus is not None:
            self.bus.say(self, kind, fields)


class Bus:
    """Delivers hooks to the callbacks of one run.

    Raises UserError for two callbacks that answer `lr`, and advises to drop the one that is `by_default`.
    """

    def __init__(self, callbacks: Mapping[str, Callback], by_default: Collection[str] = ()):
        self._manager = pluggy.PluginManager("toyexp")
        self._manager.add_hookspecs(RunHooks)
        for name, callback in reversed(list(callbacks.items())):  # pluggy calls the last registered first
            self._manager.register(callback, name)
        self.hook = self._manager.hook
        self.step: int | None = None  # the step that training is at; None before the first look
        self.log: Path | None = None  # where tracebacks stand
        self._ending = False
        self._failure: Exception | None = None
        for hook in QUESTIONS | OBSERVERS:
            for impl in getattr(self.hook, hook).get_hookimpls():
                impl.function = self._guarded(f"callbacks.{impl.plugin_name}", impl.function, hook in QUESTIONS)
        self.artifacts: list[Path] = []
        self.steps_of: dict[Path, int] = {}  # of each artifact, where it was said
        self.best: Callable[[bool], Best | None] = lambda weights: None  # see Run.best; with its weights, or without
        self.tell: Callable[[str], None] = lambda line: None  # gets lines for the person who watches
        schedules = [impl.plugin_name for impl in reversed(self.hook.lr.get_hookimpls())]
        if len(schedules) > 1:
            least = next((name for name in schedules if name in by_default), schedules[0])
            raise UserError(
                f"callbacks {' and '.join(schedules)} both set the learning rate; drop one: '~callbacks.{least}'"
            )
        self._schedule = next(iter(schedules), None)

    def lr(self, run: Run, step: int) -> float:
        """The learning rate of the 0-based `step`: the schedule's answer, or without one the base learning rate.

        Raises RunFailed for an answer that is no finite number from 0.
        """
        answer = self.hook.lr(run=run, step=step, steps=run.steps)
        if answer is None:
            return run.lr
        number = isinstance(answer, numbers.Real) and not isinstance(answer, bool)
        if not (number and math.isfinite(answer) and answer >= 0):
            what = f"lr at step {step + 1} is {printable(repr(answer))}"
            raise RunFailed(f"callbacks.{self._schedule}: {what}; it must be a finite number from 0, or None")
        return float(answer)

    def _guarded(self, name: str, function: Callable[..., Any], raises: bool) -> Callable[..., Any]:
        """The function with what it raises told as its callback's.

        An observer's is kept for `check`, so that the others hear of what has happened too: a checkpoint of this
        moment is then one that all can go on from.
        """

        def call(*arguments: Any) -> Any:
            try:
                return function(*arguments)
            except (Exception, SystemExit) as error:  # a callback may call sys.exit(); the run fails of it
                found = failure(name, self._when(), error, self.log)
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

    def say(self, run: Run, kind: str, fields: dict[str, Any]) -> None:
        """Delivers an event; an `export` is also noted as a result of the run, a `warning` told and logged."""
        if kind == "export":
            self.artifacts.append(Path(fields["path"]))
            if "step" in fields:
                self.steps_of[Path(fields["path"])] = fields["step"]
        if kind == "warning":
            log.warning("%s", fields["text"])
            self.tell(f"toyexp: warning: {fields['text']}")
        self.hook.on_event(run=run, kind=kind, fields=fields)

    def end(
        self,
        run: Run,
        reason: str,
        error: BaseException | None,
        signal: Callable[[], BaseException | None] = lambda: None,
    ) -> list[Exception]:
        """Calls on_end of every callback, one by one, so that a failing one silences no other.

        Exporters and the like come before what records the end: config order, with recorders (`closes_last`)
        at the end, who are told the first failure as the error of a run that had none. Returns what was raised;
        an interruption of one callback (a second Ctrl-C) is raised again once all were called. `signal`, asked when
        the recorders' turn comes, gives the first Ctrl-C as an error: it makes the run an interrupted one to them.
        """
        failures: list[Exception] = []
        self._ending = True
        interruption: BaseException | None = None
        impls = list(reversed(self.hook.on_end.get_hookimpls()))
        for impl in sorted(impls, key=lambda i: getattr(i.plugin, "closes_last", False)):
            last = getattr(impl.plugin, "closes_last", False)
            signalled = signal() if last or reason == "interrupted" else None
            told, why = reason, error or signalled
            if last:
                told = "interrupted" if signalled and reason == "completed" else reason
                why = why or interruption or (failures[0] if failures else None)
            arguments = {"run": run, "reason": told, "error": why}
            try:
                impl.function(*[arguments[name] for name in impl.argnames])
                self.check()  # of what it has said to others
            except Exception as found:
                log.error("%s", found, exc_info=found if failures else None)  # the first is raised, and logged there
                failures.append(found)
            except BaseException as second:
                log.error("callback %s was interrupted at the end of the run", impl.plugin_name)
                interruption = second
        if interruption is not None:
            raise interruption
        return failures

    def names(self) -> Sequence[str]:
        """The callbacks, in config order."""
        return [name for name, _ in reversed(self._manager.list_name_plugin())]
