import itertools
import math
from dataclasses import FrozenInstanceError, dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from toyexp import AdamW, Bus, Callback, Run, RunFailed, Schedule, UserError, hookimpl
from toyexp.base.errors import PluginFailed
from toyexp.cli.main import main
from toyexp.interfaces.optimiser import Group
from toyexp_optimisers.sgd import SGD

COUNTER = itertools.count()


@dataclass(eq=False)
class Recorder(Callback):
    """Record every hook call with its own label, and return preset answers."""

    name = "recorder"
    label: str = ""
    reason: str | None = None

    def bind(self, heard):
        self.heard = heard
        return self

    def note(self, hook):
        self.heard.append((self.label, hook))

    @hookimpl
    def on_start(self):
        self.note("on_start")

    @hookimpl
    def on_step(self, step, metrics):
        self.note(f"on_step {step} {metrics['loss']}")

    @hookimpl
    def on_eval(self, step):
        self.note(f"on_eval {step}")

    @hookimpl
    def on_event(self, kind, fields):
        self.note(f"on_event {kind} {fields}")

    @hookimpl
    def on_end(self, reason, error):
        self.note(f"on_end {reason} {error!r}")

    @hookimpl
    def stop_reason(self, step):
        self.note("stop_reason")
        return self.reason


@dataclass(eq=False)
class Answering(Recorder):
    """Return preset answers without being a Schedule."""

    rate: object = None

    @hookimpl
    def lr(self, step, steps):
        self.note(f"lr {step}/{steps}")
        return self.rate


@dataclass(eq=False)
class Failing(Recorder):
    """Raises at the end, after noting it."""

    error: BaseException | None = None

    @hookimpl
    def on_end(self):
        self.note("on_end")
        raise self.error


@dataclass(eq=False)
class Stumbling(Recorder):
    """Raises at a step, after noting it."""

    @hookimpl
    def on_step(self, step):
        self.note(f"on_step {step}")
        raise ValueError(self.label)


@dataclass(eq=False)
class Closing(Recorder):
    """Records the end, after everyone else."""

    closes_last = True


@dataclass(eq=False)
class Half(Schedule):
    """Half the base rate."""

    name = "half"

    def factor(self, step, steps):
        return 0.5


@dataclass(eq=False)
class Falling(Schedule):
    """A line down."""

    name = "falling"

    def factor(self, step, steps):
        return 1 - step / steps


@pytest.fixture
def heard():
    return []


OPTIMISERS = [SGD(), AdamW.for_from_scratch()]  # of two groups
PLAN = SimpleNamespace(updates=[Group(rule, ("w",)) for rule in OPTIMISERS])


def make_run(bus=None):
    return Run("r", Path("r"), 0, 10, 0.25, {}, "null", plan=PLAN, session=None, dataset=None, bus=bus)


def make_bus(heard, *callbacks):
    return Bus({c.label: c.bind(heard) for c in callbacks})


def test_every_hook_is_called_on_all_callbacks_in_config_order(heard):
    bus = make_bus(heard, Recorder("c"), Recorder("a"), Recorder("b"))
    run = make_run(bus)
    assert [name for name, _ in reversed(bus._manager.list_name_plugin())] == ["c", "a", "b"]
    bus.hook.on_start(run=run)
    bus.hook.on_step(run=run, step=3, metrics={"loss": 1.5}, batch={})
    bus.hook.on_eval(run=run, step=3, metrics={"loss": 1.5})
    run.emit("note", text="x")
    bus.end(run, "completed", None)
    hooks = ["on_start", "on_step 3 1.5", "on_eval 3", "on_event note {'text': 'x'}", "on_end completed None"]
    assert heard == [(label, hook) for hook in hooks for label in "cab"]


@pytest.mark.parametrize(
    ("answer", "rate"), [(None, 0.25), (0.5, 0.5), (0, 0.0), (np.float32(0.5), 0.5), (np.int64(1), 1.0)]
)
def test_any_callback_may_set_the_learning_rate_and_none_means_the_base_rate(heard, answer, rate):
    bus = make_bus(heard, Answering("a", rate=answer))
    lr = bus.lr(make_run(), 3)
    assert lr == rate and type(lr) is float
    assert heard == [("a", "lr 3/10")]


@pytest.mark.parametrize("answer", [math.nan, math.inf, -1e-9, "0.1", True, np.bool_(True), [0.1], np.array([0.1])])
def test_an_invalid_learning_rate_names_its_callback_and_the_step(heard, answer):
    with pytest.raises(RunFailed, match=r"^callbacks\.a: lr at step 4 is .*finite number >= 0"):
        make_bus(heard, Answering("a", rate=answer)).lr(make_run(), 3)


def test_the_first_stop_reason_is_used(heard):
    bus = make_bus(heard, Recorder("a"), Recorder("b", reason="bored"), Recorder("c", reason="tired"))
    assert bus.hook.stop_reason(run=make_run(), step=1, metrics={}) == "bored"


@pytest.mark.parametrize("answer", [True, False, 3.0, ["bored"]])
def test_a_stop_reason_that_is_no_text_names_its_callback(heard, answer):
    bus = make_bus(heard, Recorder("a"), Recorder("b", reason=answer))
    with pytest.raises(PluginFailed, match=r"^callbacks\.b\.stop_reason\(\) returned .*, expected a sentence or None"):
        bus.hook.stop_reason(run=make_run(), step=1, metrics={})


def test_without_callbacks_hooks_return_defaults():
    bus = Bus({})
    assert bus.lr(make_run(), 0) == 0.25
    assert bus.hook.stop_reason(run=make_run(), step=1, metrics={}) is None
    assert bus.end(make_run(), "completed", None) == []


def test_a_schedule_multiplies_the_base_rate():
    bus, run = Bus({"falling": Falling()}), replace(make_run(), steps=4)
    assert [bus.lr(run, k) for k in range(4)] == [0.25, 0.1875, 0.125, 0.0625]


def test_factors_of_other_numbers_are_requested_at_every_step():
    @dataclass(eq=False)
    class Both(Half):
        @hookimpl
        def factors(self, step):
            return {"beta1": 1.0 - step / 4}

    run, other = make_run(), Falling(scales="momentum")
    assert Bus({"half": Half()}).factors(run, 1) == {}
    assert Bus({"both": Both()}).factors(run, 1) == {"beta1": 0.75}, "a schedule of lr that has more to say"
    bus = Bus({"half": Half(), "other": other})
    assert [bus.factors(run, k) for k in (0, 5)] == [{"momentum": 1.0}, {"momentum": 0.5}]
    assert bus.lr(run, 5) == 0.125


@dataclass(eq=False)
class Scaling(Callback):
    """Scale preset numbers without being a Schedule."""

    name = "scaling"
    by: object = None

    @hookimpl
    def factors(self):
        return self.by


@pytest.mark.parametrize(
    ("by", "message"),
    [
        (
            {"momentun": 0.5},
            "momentun at step 3: this optimiser has no setting of that name; did you mean momentum?",
        ),
        ({"lr": 2.0}, "lr at step 3: this optimiser has no setting of that name; use the hook `lr`"),
        ({"momentum": -1.0}, "momentum at step 3 is -1.0; it must be a finite number >= 0"),
        ({"momentum": 1.2}, "momentum at step 3 is 1.2: optim.momentum=1.08: must be at least 0 and below 1"),
        ({"beta1": 3.0}, "beta1 at step 3 is 3: optim.beta1=2.7"),
        ({"beta2": 0.0}, "beta2 at step 3 is 0: optim.beta2=0: mode from_scratch"),
    ],
)
def test_a_factor_that_the_optimiser_cannot_take_names_its_callback_and_the_step(by, message):
    with pytest.raises(RunFailed) as error:
        Bus({"mine": Scaling(by)}).factors(make_run(), 2)
    assert str(error.value).startswith(f"callbacks.mine: the factor of {message}")


@pytest.mark.parametrize("answer", [[0.5], [], 0.5, "beta1", {"beta1"}])
def test_factors_of_the_wrong_type_are_attributed_to_their_callback(answer):
    with pytest.raises(RunFailed) as error:
        Bus({"mine": Scaling(answer)}).factors(make_run(), 2)
    assert str(error.value).startswith(f"callbacks.mine: its factors at step 3 are {answer!r}; ")


def test_two_callbacks_scaling_the_same_number_are_both_named():
    fine = {"one": Scaling({"beta1": 1.1, "weight_decay": 0.0}), "two": Scaling({"momentum": 0.5})}
    assert Bus(fine).factors(make_run(), 2) == {"beta1": 1.1, "weight_decay": 0.0, "momentum": 0.5}
    with pytest.raises(RunFailed, match=r"callbacks\.one and callbacks\.two both scale beta1"):
        Bus({**fine, "two": Scaling({"beta1": 0.5})}).factors(make_run(), 2)


@pytest.mark.parametrize(
    ("names", "by_default", "dropped"),
    [("half falling", "", "half"), ("half falling", "falling", "falling"), ("own half", "half", "half"),
     ("half own", "half", "half"), ("half own", "own", "own")],
)  # fmt: skip
def test_two_callbacks_setting_the_learning_rate_are_rejected_with_what_to_type(heard, names, by_default, dropped):
    callbacks = {"half": Half(), "falling": Falling(), "own": Answering("own").bind(heard)}
    with pytest.raises(UserError) as error:
        Bus({name: callbacks[name] for name in names.split()}, by_default.split)
    assert f"callbacks {' and '.join(names.split())} both" in str(error.value)
    assert f"'~callbacks.{dropped}'" in str(error.value)


def test_callbacks_with_equal_settings_are_called_separately(heard):
    bus = Bus({"one": Recorder("same").bind(heard), "two": Recorder("same").bind(heard)})
    bus.hook.on_start(run=make_run())
    assert heard == [("same", "on_start")] * 2


def test_exports_are_recorded_as_artifacts_in_order(heard):
    bus = make_bus(heard, Recorder("a"))
    run = make_run(bus)
    for path in ("b.gguf", "a.png"):
        run.emit("export", path=path)
    run.emit("note", path="no artifact")
    assert bus.artifacts == [Path("b.gguf"), Path("a.png")]


def test_on_end_is_called_on_all_callbacks_even_if_some_raise(heard):
    errors = [ValueError("one"), RunFailed("two")]
    bus = make_bus(
        heard, Failing("a", error=errors[0]), Recorder("b"), Failing("c", error=errors[1]), Recorder("d")
    )  # fmt: skip
    failures = bus.end(make_run(), "completed", None)
    assert [failures[0].__cause__, failures[1]] == errors and "callbacks.a failed at the end" in str(failures[0])
    assert [label for label, _ in heard] == ["a", "b", "c", "d"]


@dataclass(eq=False)
class Around(Recorder):
    """Hears of a step before and after the others."""

    @hookimpl(wrapper=True)
    def on_step(self, step):
        self.note("before")
        yield
        self.note("after")


@pytest.mark.parametrize("first", [Recorder, Around])
def test_direct_hook_calls_match_pluggy(heard, first):
    bus = make_bus(heard, first("a"), Recorder("b"), Answering("c", rate=0.5), Recorder("d"))
    bus.hook.on_step(run=make_run(), step=3, metrics={"loss": 1.5}, batch={})
    hooks = list(heard)
    heard.clear()
    bus.call_on_step(make_run(), 3, {"loss": 1.5}, {})
    assert heard == hooks and len(hooks) >= 4
    assert bus.lr(make_run(), 0) == bus.hook.lr(run=make_run(), step=0, steps=make_run().steps) == 0.5


def test_if_two_callbacks_raise_at_a_step_only_the_first_error_is_reported(heard):
    bus = make_bus(heard, Stumbling("a"), Stumbling("b"))
    bus.hook.on_step(run=make_run(), step=1, metrics={}, batch={})
    assert heard == [("a", "on_step 1"), ("b", "on_step 1")]
    with pytest.raises(RunFailed, match=r"^callbacks\.a failed .*: ValueError: a"):
        bus.check()
    bus.check()


def test_recorders_are_called_last_and_get_the_first_failure(heard):
    error = ValueError("no disk")
    bus = make_bus(heard, Closing("log"), Recorder("a"), Failing("b", error=error), Failing("c", error=RunFailed("x")))
    bus.end(make_run(), "completed", None)
    assert heard[:3] == [("a", "on_end completed None"), ("b", "on_end"), ("c", "on_end")]
    assert len(heard) == 4 and heard[3][0] == "log"
    assert "on_end completed PluginFailed('callbacks.b failed at the end: ValueError: no disk" in heard[3][1]


@pytest.mark.parametrize("reason", ["completed", "aborted"])
def test_a_signal_before_the_recorders_are_called_is_recorded_as_an_interrupted_run(heard, reason):
    bus, signal = make_bus(heard, Closing("log"), Recorder("a")), KeyboardInterrupt("SIGINT")
    assert bus.end(make_run(), reason, None, lambda: signal) == []
    end_reason = "interrupted" if reason == "completed" else reason
    assert heard == [("a", f"on_end {reason} None"), ("log", f"on_end {end_reason} {signal!r}")]


def test_recorders_of_a_failed_run_get_its_error(heard):
    error = RunFailed("NaN")
    bus = make_bus(heard, Closing("log"), Failing("b", error=ValueError("also")))
    bus.end(make_run(), "errored", error)
    assert heard[-1] == ("log", f"on_end errored {error!r}")


def test_an_interrupt_at_the_end_skips_one_callback_and_is_raised_after_the_others(heard):
    bus = make_bus(heard, Failing("a", error=KeyboardInterrupt()), Recorder("b"), Closing("log"))
    with pytest.raises(KeyboardInterrupt):
        bus.end(make_run(), "completed", None)
    assert heard[1:] == [("b", "on_end completed None"), ("log", "on_end completed KeyboardInterrupt()")]


def test_a_run_cannot_be_changed_by_a_callback():
    with pytest.raises(FrozenInstanceError):
        make_run().lr = 1.0


def test_emit_without_a_bus_does_nothing():
    make_run().emit("note", text="x")


# -- in real runs ---------------------------------------------------------------------------------------------------

PLUGIN = """
from dataclasses import dataclass
from pathlib import Path
from toyexp import Callback, hookimpl

HEARD = []

@dataclass(eq=False)
class Raising(Callback):
    '''Raises where it is told to.'''
    name = "raising"
    where: str = ""

    def check_run(self, config, dataset):
        self.at("check_run")
        HEARD.append(("check_run", config["steps"], len(dataset.train)))
    def at(self, hook):
        if self.where == hook:
            raise ValueError(f"boom in {hook}")
    @hookimpl
    def on_start(self):
        self.at("on_start")
    @hookimpl
    def lr(self, step):
        self.at("lr")
    @hookimpl
    def on_step(self, run, batch):
        self.at("on_step")
        if self.where == "batch":
            run.session.evaluate([{name: array[:, :-1] for name, array in batch.items()}])
    @hookimpl
    def on_eval(self, step):
        self.at("on_eval")
    @hookimpl
    def stop_reason(self, step):
        self.at("stop_reason")
    @hookimpl
    def on_end(self, reason, error):
        HEARD.append(("raising", reason, repr(error)))
        self.at("on_end")

@dataclass(eq=False)
class Witness(Callback):
    '''Notes how the run ended, and whether its tensors could still be read then.'''
    name = "witness"
    @hookimpl
    def on_end(self, run, reason, error):
        HEARD.append(("witness", reason, repr(error)))
        run.session.download("token_embd.weight")

@hookimpl
def register_callbacks(register):
    register(Raising)
    register(Witness)
"""


@pytest.fixture
def run_raising(tmp_path, monkeypatch):
    """Runs with a callback that raises, and one after it that notes the end."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TOYEXP_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text("some words to learn from. " * 100)

    def run(where):
        name = f"raising_plugin_{next(COUNTER)}"  # a process imports a module once
        (tmp_path / f"{name}.py").write_text(PLUGIN)
        words = ["data=text", "data.path=text.txt", "data.tokenizer=byte", "model.context=8", "steps=3", "eval_every=1"]
        words += [f"plugins=[toyexp.testing.null,{name}]", "engine=noop", "callbacks=[raising,witness]"]
        code = main([*words, f"callbacks.raising.where={where}", "hydra.run.dir=run"])
        return __import__(name).HEARD, code

    return run


def test_a_batch_of_the_wrong_size_from_a_callback_is_attributed_to_it(run_raising, capsys):
    _, code = run_raising("batch")
    err = capsys.readouterr().err
    assert code == 1 and "callbacks.raising at step 1: batch['tokens']: expected [rows, 8] int32, got [8, 7]" in err


@pytest.mark.parametrize("hook", ["on_start", "lr", "on_step", "on_eval", "stop_reason"])
def test_an_error_in_any_hook_ends_the_run_and_on_end_is_called_on_all(run_raising, hook):
    heard, code = run_raising(hook)
    assert code == 1
    assert [entry[:2] for entry in heard[1:]] == [("raising", "errored"), ("witness", "errored")]
    assert all(f"ValueError: boom in {hook}" in entry[2] for entry in heard[1:])


def test_an_error_in_on_end_fails_the_run_after_all_were_called(run_raising, capsys):
    heard, code = run_raising("on_end")
    assert heard[1:] == [("raising", "completed", "None"), ("witness", "completed", "None")]
    assert code == 1
    assert "callbacks.raising failed at the end: ValueError: boom in on_end" in capsys.readouterr().err


def test_check_run_gets_configuration_and_data_before_anything_is_written(run_raising, tmp_path, capsys):
    heard, code = run_raising("nowhere")
    assert code == 0 and heard[0][:2] == ("check_run", 3) and heard[0][2] > 2000
    (tmp_path / "run").rename(tmp_path / "finished")
    assert run_raising("check_run")[1] == 1
    assert "callbacks.raising failed in at(): ValueError: boom" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


OWN_RATE = """
from dataclasses import dataclass
from toyexp import Callback, hookimpl

@dataclass(eq=False)
class Own(Callback):
    '''Sets a learning rate of its own.'''
    name = "own"
    @hookimpl
    def lr(self, step):
        return float("nan") if step == 1 else 0.125

@hookimpl
def register_callbacks(register):
    register(Own)
"""


def test_a_learning_rate_from_a_callback_is_used_unless_it_is_none(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    name = f"own_rate_{next(COUNTER)}"
    (tmp_path / f"{name}.py").write_text(OWN_RATE)
    words = [f"plugins=[toyexp.testing.null,{name}]", "engine=noop", "data=random", "steps=3", "hydra.run.dir=run"]
    assert main([*words, "callbacks=[default,own]"]) == 2
    err = capsys.readouterr().err
    assert "callbacks cosine and own both" in err and "'~callbacks.cosine'" in err
    assert not (tmp_path / "run").exists()
    assert main([*words, "callbacks=[default,own]", "~callbacks.cosine"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("toyexp: error: callbacks.own: lr at step 2 is nan") and len(err.splitlines()) == 1
