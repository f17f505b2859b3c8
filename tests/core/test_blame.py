"""Errors of plugins: one line that names the plugin, exit code 1, the traceback in the log, and a checkpoint."""

import json
import shlex
import shutil
from pathlib import Path

import pytest
from lines import drop_repeated_keys, noop, run_failing

from toyexp.cli.main import main
from toyexp.training import checkpoint

PLUGIN = """
from dataclasses import dataclass
from typing import ClassVar

from toyexp import Callback, Engine, Model, PlanTensor, Recipe, RunFailed, TokenBatches, TokenDataset, UserError
from toyexp import hookimpl
from toyexp.testing.null import NullEngine, NullSession
from toyexp_data.tokens import Random
from toyexp_models.llama import Llama

HEARD = []


def fail(asked, here, kind="key"):
    HEARD.append(here)
    if asked == here:
        raise {"key": KeyError("no\\nsuch"), "user": UserError("mine: on purpose"), "mute": UserError(),
               "run": RunFailed("on purpose"), "os": OSError(28, "No space left on device"),
               "exit": SystemExit(0)}[kind]


@dataclass(eq=False)
class Clumsy(Callback):
    "Raises where it is told to."
    name: ClassVar[str] = "clumsy"

    at: str = ""
    kind: str = "key"
    step: int = 3

    def check(self):
        fail(self.at, "check")

    def check_plan(self, plan):
        fail(self.at, "check_plan")

    def warnings(self, planned):
        fail(self.at, "warnings")
        return {"text": "a sentence", "nothing": None}.get(self.at, [])

    def state(self):
        fail(self.at, "state")
        return {}

    @hookimpl
    def on_start(self):
        fail(self.at, "on_start", self.kind)

    @hookimpl
    def on_step(self, step):
        if step == self.step:
            fail(self.at, "on_step", self.kind)

    @hookimpl
    def on_eval(self, step):
        if step or not self.step:
            fail(self.at, "on_eval", self.kind)

    @hookimpl
    def on_checkpoint(self):
        fail(self.at, "on_checkpoint", self.kind)

    @hookimpl
    def on_event(self, kind):
        if kind == "checkpoint":
            fail(self.at, "on_event", self.kind)

    @hookimpl
    def on_end(self):
        fail(self.at, "on_end", self.kind)

    @hookimpl(tryfirst=True)
    def lr(self, step):
        if step == self.step - 1:
            fail(self.at, "lr", self.kind)

    @hookimpl
    def stop_reason(self, step):
        if step == self.step:
            fail(self.at, "stop_reason", self.kind)


@dataclass(eq=False)
class Heard(Callback):
    "Counts what it hears."
    name: ClassVar[str] = "heard"

    def __post_init__(self):
        self.steps = []

    def state(self):
        return {"steps": self.steps}

    def resume(self, state):
        self.steps = list(state["steps"])

    @hookimpl
    def on_step(self, step):
        self.steps.append(step)


@dataclass
class ClumsyRecipe(Recipe):
    "A recipe that raises."
    name: ClassVar[str] = "clumsy_recipe"
    at: str = ""

    def check(self):
        fail(self.at, "check")

    def plan(self, model, setup):
        fail(self.at, "plan")
        return setup.plan(model, [PlanTensor(t.name, t.shape, t.init) for t in model.tensors()])

    def origin(self):
        fail(self.at, "origin")

    def warm(self, session):
        fail(self.at, "warm")


@dataclass
class ClumsyModel(Llama):
    "A model that raises."
    name: ClassVar[str] = "clumsy_model"
    at: str = ""

    def fit(self, dataset):
        fail(self.at, "fit")
        return super().fit(dataset)

    def tensors(self):
        fail(self.at, "tensors")
        return super().tensors()

    def scores(self, logits, batches):
        if logits.__self__.steps:
            fail(self.at, "scores")
        return {}


class Session(NullSession):
    @property
    def steps(self):
        return self._steps

    def do_step(self, micros, numbers):
        if self._steps == 2:
            fail(self._engine.at, "step")
        return super().do_step(micros, numbers)

    def do_build(self):
        fail(self._engine.at, "build")

    def notes(self):
        fail(self._engine.at, "notes")
        return []

    def describe(self):
        return None if self._engine.at == "describe" else super().describe()


@dataclass
class ClumsyEngine(NullEngine):
    "An engine that raises."
    name: ClassVar[str] = "clumsy_engine"
    at: str = ""

    def realize(self, plan):
        fail(self.at, "realize")
        return Session(plan, self).open()


class Batches(TokenBatches):
    at = ""

    def batch(self, k):
        if k == 2:
            fail(self.at, "batch")
        return super().batch(k)


@dataclass
class ClumsyData(Random):
    "Data that raises."
    name: ClassVar[str] = "clumsy_data"
    at: str = ""

    def open(self, vocabulary):
        fail(self.at, "open")
        found = super().open(vocabulary)
        make = found.batches

        def batches(*arguments):
            made = make(*arguments)
            made.__class__, made.at = Batches, self.at
            return made

        found.batches = batches
        return found


@hookimpl
def register_callbacks(register):
    register(Clumsy)
    register(Heard)


@hookimpl
def register_recipes(register):
    register(ClumsyRecipe)


@hookimpl
def register_models(register):
    register(ClumsyModel)


@hookimpl
def register_engines(register):
    register(ClumsyEngine)


@hookimpl
def register_data(register):
    register(ClumsyData)
"""
PLUGINS, *TINY = noop("clumsy_plugin")
NOOP = [PLUGINS, *TINY, "steps=6", "eval_every=4", "checkpoint_every=100", "hydra.run.dir=run"]
CALLBACKS = "callbacks=[clumsy,events,heard,gguf_export]"


@pytest.fixture(autouse=True)
def change_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("clumsy_plugin.py").write_text(PLUGIN)


def run_failing_noop(capsys, *words):
    return run_failing(capsys, *drop_repeated_keys(*NOOP, *words))


def last_event():
    return json.loads(Path("run/events.jsonl").read_text().splitlines()[-1])


@pytest.mark.parametrize(
    ("hook", "when", "saved"),
    [
        ("on_start", "at the start", None),
        ("lr", "at step 3", 2),
        ("on_step", "at step 3", 3),
        ("on_eval", "at step 4", 4),
        ("stop_reason", "at step 3", 3),
        ("on_checkpoint", "at the end", 6),
        ("on_event", "at the end", 6),
        ("on_end", "at the end", 6),
    ],
)
def test_a_failing_callback_is_named_with_its_step_and_a_checkpoint_is_saved(hook, when, saved, capsys):
    line, out = run_failing_noop(capsys, CALLBACKS, f"callbacks.clumsy.at={hook}")
    if hook in ("on_checkpoint", "on_event"):  # written in a thread: reported at the end, or a step earlier
        when = "at step 6" if "at step 6" in line else when
    assert line.startswith(f"callbacks.clumsy failed {when}: KeyError: ") and line.endswith("; see " + log())
    text = Path("run/log.txt").read_text()
    assert "Traceback (most recent call last)" in text and 'fail(self.at, "' in text
    assert next(iter(checkpoint.list_checkpoints(Path("run/checkpoints"))), None) == saved
    end = last_event()
    assert (end["kind"], end["exit_code"]) == ("run_end", 1) and "callbacks.clumsy failed" in end["error"]
    assert "callbacks.clumsy failed" in json.loads(Path("run/result.json").read_text())["error"]
    assert ("steps are saved; to resume: toyexp resume=run" in out) == (saved is not None)


@pytest.mark.parametrize(
    ("hook", "when"), [("on_start", "at the start"), ("on_step", "at step 3"), ("on_end", "at the")]
)
def test_sys_exit_in_a_callback_counts_as_a_failure(hook, when, capsys):
    line, _ = run_failing_noop(capsys, CALLBACKS, f"callbacks.clumsy.at={hook}", "callbacks.clumsy.kind=exit")
    assert line.startswith(f"callbacks.clumsy failed {when}") and "SystemExit: 0" in line


def test_a_run_whose_callback_failed_at_the_end_prints_the_command_that_resumes_it(capsys):
    _, out = run_failing_noop(capsys, CALLBACKS, "callbacks.clumsy.at=on_end")
    command = out[out.index("to resume: toyexp ") :].splitlines()[0].removeprefix("to resume: toyexp ")
    assert main([*shlex.split(command), "callbacks.clumsy.at=nowhere"]) == 0
    assert last_event()["reason"] == "completed" and last_event()["exit_code"] == 0


def log():
    return "run/log.txt"


def test_a_run_resumed_after_a_failure_ends_like_an_uninterrupted_one(capsys):
    run_failing_noop(capsys, CALLBACKS, "callbacks.clumsy.at=on_step")
    assert main(["resume=run", PLUGINS, "callbacks.clumsy.at=nowhere"]) == 0
    assert main([*NOOP[:-1], CALLBACKS, "hydra.run.dir=whole"]) == 0

    def heard(run):
        return checkpoint.read_checkpoint(Path(run, "checkpoints/step-6")).state["callbacks"]["heard"]

    def steps(run):
        lines = map(json.loads, Path(run, "events.jsonl").read_text().splitlines())
        return [(e["kind"], e["step"], e["loss"]) for e in lines if e["kind"] in ("step", "eval")]

    assert heard("run") == heard("whole") == {"steps": [1, 2, 3, 4, 5, 6]}
    assert steps("run") == steps("whole")


@pytest.mark.parametrize(
    ("at", "kind", "code", "words"),
    [("on_start", "user", 2, "mine: on purpose"), ("on_step", "run", 1, "on purpose")],
)
def test_errors_raised_on_purpose_keep_their_message(at, kind, code, words, capsys):
    overrides = [*NOOP, CALLBACKS, f"callbacks.clumsy.at={at}", f"callbacks.clumsy.kind={kind}"]
    assert main(overrides) == code
    assert capsys.readouterr().err == f"toyexp: error: {words}\n"
    assert list(checkpoint.list_checkpoints(Path("run/checkpoints"))) == ([3] if at == "on_step" else [])


@pytest.mark.parametrize(
    ("at", "when", "saved"), [("lr", "at step 3", 2), ("on_step", "at step 3", 3), ("on_end", "at the end", 6)]
)
def test_a_user_error_of_a_callback_during_training_names_the_callback_and_how_to_resume(at, when, saved, capsys):
    for kind, words in (("user", "mine: on purpose"), ("mute", "UserError")):
        assert main([*NOOP, CALLBACKS, f"callbacks.clumsy.at={at}", f"callbacks.clumsy.kind={kind}"]) == 1
        out, err = capsys.readouterr()
        assert err == f"toyexp: error: callbacks.clumsy {when}: {words}\n"
        assert f"{saved} of 6 steps are saved; to resume: toyexp resume=run" in out
        shutil.rmtree("run")


def test_a_user_error_of_a_callback_at_the_first_evaluation_names_the_callback(capsys):
    words = ["callbacks.clumsy.at=on_eval", "callbacks.clumsy.kind=user", "callbacks.clumsy.step=0"]
    assert main([*NOOP, CALLBACKS, *words]) == 1
    assert capsys.readouterr().err == "toyexp: error: callbacks.clumsy at step 0: mine: on purpose\n"


def test_an_error_without_a_message_is_reported_with_its_source_line(capsys):
    assert main([*NOOP, CALLBACKS, "callbacks.clumsy.at=on_start", "callbacks.clumsy.kind=mute"]) == 2
    line = capsys.readouterr().err
    assert line.startswith("toyexp: error: UserError without a message (clumsy_plugin.py, line ")


def test_a_full_disk_in_a_callback_is_attributed_to_the_callback(capsys):
    line, _ = run_failing_noop(capsys, CALLBACKS, "callbacks.clumsy.at=on_step", "callbacks.clumsy.kind=os")
    assert "callbacks.clumsy failed at step 3: OSError: [Errno 28] No space left on device" in line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["recipe=clumsy_recipe", "recipe.at=plan"], "recipe.clumsy_recipe failed in plan()"),
        (["recipe=clumsy_recipe", "recipe.at=check"], "recipe.clumsy_recipe failed in check()"),
        (["model=clumsy_model", "model.at=fit"], "model.clumsy_model failed in fit()"),
        (["model=clumsy_model", "model.at=tensors"], "model.clumsy_model failed in tensors()"),
        (["data=clumsy_data", "data.at=open"], "data.clumsy_data failed in open()"),
        ([CALLBACKS, "callbacks.clumsy.at=check_plan"], "callbacks.clumsy failed in check_plan()"),
        ([CALLBACKS, "callbacks.clumsy.at=check"], "callbacks.clumsy failed in check()"),
        ([CALLBACKS, "callbacks.clumsy.at=warnings"], "callbacks.clumsy failed in warnings()"),
    ],
)
def test_a_plugin_failing_before_the_run_is_named_with_its_line_and_no_directory_is_created(words, message, capsys):
    line, _ = run_failing_noop(capsys, *words)
    assert line.startswith(f"{message}: KeyError: ") and "(clumsy_plugin.py, line " in line
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            [CALLBACKS, "callbacks.clumsy.at=text"],
            "Clumsy.warnings() returned 'a sentence', expected sentences in a list",
        ),
        ([CALLBACKS, "callbacks.clumsy.at=nothing"], "Clumsy.warnings() returned None, expected sentences in a list"),
        (["engine=clumsy_engine", "engine.at=describe"], "Session.describe() returned None, expected dict"),
    ],
)
def test_a_return_value_of_the_wrong_type_is_reported(words, message, capsys):
    assert run_failing_noop(capsys, *words)[0] == message


def test_unexpected_errors_are_attributed_to_the_plugin_whose_method_raised(capsys):
    line, _ = run_failing_noop(capsys, "recipe=clumsy_recipe", "recipe.at=origin")
    assert line.startswith("recipe.clumsy_recipe failed in origin(): KeyError: ") and "(clumsy_plugin.py, line " in line


def test_a_bug_in_toyexp_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr("toyexp.training.experiment.introduction", lambda prepared: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(drop_repeated_keys(*NOOP))


@pytest.mark.parametrize(
    ("words", "message", "saved"),
    [
        (["recipe=clumsy_recipe", "recipe.at=warm"], "recipe.clumsy_recipe failed in warm()", None),
        (["engine=clumsy_engine", "engine.at=realize"], "engine.clumsy_engine failed while it realized", None),
        (["engine=clumsy_engine", "engine.at=build"], "engine.clumsy_engine failed while it built", None),
        (["engine=clumsy_engine", "engine.at=notes"], "engine's Session failed in notes()", None),
        ([CALLBACKS, "callbacks.clumsy.at=state"], "callbacks.clumsy failed in state()", None),
        (["engine=clumsy_engine", "engine.at=step"], "engine.clumsy_engine failed at step 3", None),
        (["engine=clumsy_engine", "engine.at=step", "checkpoint_every=1"], "engine.clumsy_engine failed at step 3", 2),
        (["data=clumsy_data", "data.at=batch"], "data.clumsy_data failed at step 3", 2),
        (["engine=clumsy_engine", "model=clumsy_model", "model.at=scores"], "failed at step 4", 4),
    ],
)
def test_a_plugin_failing_during_the_run_is_named_and_the_last_valid_state_is_saved(words, message, saved, capsys):
    """A step that broke off is not whole; then the last checkpoint counts."""
    line, _ = run_failing_noop(capsys, *words)
    assert message in line and line.endswith("; see " + log())
    assert "Traceback (most recent call last)" in Path("run/log.txt").read_text()
    assert next(iter(checkpoint.list_checkpoints(Path("run/checkpoints"))), None) == saved


def test_other_jobs_of_a_sweep_continue_after_a_plugin_failure(capsys):
    overrides = [w for w in NOOP if not w.startswith("hydra")]
    sweep = ["-m", *overrides, CALLBACKS, "callbacks.clumsy.at=on_step,nowhere", "sweep.isolate=false"]
    assert main([*sweep, "hydra.sweep.dir=s"]) == 1
    err = capsys.readouterr().err
    assert "error in job 0: callbacks.clumsy failed at step 3: KeyError: " in err and "Traceback" not in err
    jobs = json.loads(Path("s/sweep.json").read_text())["jobs"]
    assert [job["status"] for job in jobs] == ["failed", "completed"]
