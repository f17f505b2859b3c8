"""The training loop on an engine that returns scripted metrics."""

import math
import traceback
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby

import numpy as np
import pytest

from toyexp import AdamW, Bus, Callback, Run, RunFailed, Schedule, Setup, StepMetrics, hookimpl
from toyexp.base.errors import BadBatch, PluginFailed
from toyexp.base.formatting import smooth_loss
from toyexp.interfaces.dataset import batch_digest
from toyexp.interfaces.micro_batches import micro_batches, prepare_batches
from toyexp.interfaces.plan import PlanTensor, group_tensors
from toyexp.interfaces.stack import Stack
from toyexp.testing import NullEngine, OpModel, token_dataset
from toyexp.testing.null import NullSession
from toyexp.testing.suites import Bare
from toyexp.training.driver import Evaluate, Step, drive, forward_interrupts
from toyexp.training.loop import MAX_CONSECUTIVE_SKIPS, Training
from toyexp.training.run_config import Outcome, Saver

BASE_LR = 0.25
GOOD, BAD = StepMetrics(1.5, 0.5), StepMetrics(math.nan, 0.5)


class Scripted(NullSession):
    """Return scripted metrics step by step, then finite ones, and record the inputs."""

    def __init__(self, plan, script):
        super().__init__(plan, NullEngine())
        self.script, self.hps, self.digests = list(script), [], []

    def do_step(self, micros, numbers):
        super().do_step(micros, numbers)
        self.hps.append(numbers[0])
        self.digests.append(batch_digest({"tokens": np.concatenate([m["tokens"] for m in micros])}))
        return self.script.pop(0) if self.script else GOOD


class Queued(Scripted):
    """Takes a step when it is waited for, as a GPU does that is given two at a time."""

    depth = 2

    def do_launch(self, micros, numbers):
        self.heard.append("launch")
        return lambda: self.do_step(micros, numbers)


class Several(Queued):
    """Is best given four steps at a time."""

    depth = 8


class Launched(Queued):
    """Takes a step when it is waited for, and has no second one launched before."""

    depth = 1


class Noting(Stack):
    """Notes how many rows take a step."""

    def __init__(self, runs):
        super().__init__([run.session for run in runs])
        self.rows = []

    def do_step(self, requests):
        self.rows.append([*requests])
        return super().do_step(requests)


@dataclass(eq=False)
class Recorder(Callback):
    """Record every hook call, and return preset answers."""

    name = "recorder"
    rate: float | None = None
    stops_at: int = 0
    looked_at: tuple | None = None  # steps; None: all
    heard: list = field(default_factory=list)
    metrics: list = field(default_factory=list)
    events: list = field(default_factory=list)

    def should_wait(self, step):
        return super().should_wait(step) if self.looked_at is None else step in self.looked_at

    @hookimpl
    def lr(self, step, steps):
        self.heard.append(f"lr {step}/{steps}")
        return self.rate

    @hookimpl
    def on_step(self, step, metrics):
        self.heard.append(f"on_step {step}")
        self.metrics.append(metrics)

    @hookimpl
    def on_eval(self, step, metrics):
        self.heard.append(f"on_eval {step}")
        self.metrics.append(metrics)

    @hookimpl
    def stop_reason(self, step):
        self.heard.append(f"stop_reason {step}")
        return "enough" if step == self.stops_at else None

    @hookimpl
    def on_event(self, kind, fields):
        self.events.append((kind, fields))

    def evals(self):
        return [int(hook.split()[1]) for hook in self.heard if hook.startswith("on_eval")]


@dataclass(eq=False)
class Failing(Recorder):
    """Goes wrong when it hears of a step."""

    at: int = 0

    @hookimpl
    def on_step(self, step, metrics):
        super().on_step(step, metrics)
        if step == self.at:
            raise ValueError("boom")


class Notes(Saver):
    """Record when it could save, with which metrics, and whether it was the last call."""

    def __init__(self, heard):
        self.heard, self.told, self.wanted = heard, [], ()

    def begin(self, metrics):
        self.heard.append("begin")
        self.told.append((0, dict(metrics), False))

    def is_due(self, step):
        return step in self.wanted

    def after(self, outcome, metrics, last):
        self.heard.append(f"after {outcome.steps}")
        self.told.append((outcome.steps, dict(metrics), last))


class Scored(OpModel):
    """Also report the number of held-out batches."""

    def scores(self, logits, batches):
        return {"seen": sum(1 for _ in batches)}


@dataclass
class Stage:
    """A prepared training: call `train()`, then inspect `session` and `recorder`."""

    session: Scripted
    recorder: Recorder
    saver: Notes
    training: Training

    def train(self):
        return self.training.train()


@pytest.fixture
def stage(tmp_path):
    """Return a function that prepares a scripted training, with any field of Training and Plan."""

    def make(
        steps=4,
        script=(),
        recorder=None,
        model=None,
        data=None,
        skip=False,
        adamw=None,
        outcome=None,
        kind=Scripted,
        **options,
    ):
        model, recorder = model or OpModel("rows"), recorder or Recorder()
        dataset = token_dataset(8, 4000)
        batches = data or dataset.batches(5, 3, 0)
        setup = Setup(batches.inputs, rows=3, skip_nonfinite=skip)
        plan = setup.plan(model, [PlanTensor(t.name, t.shape, t.init) for t in model.tensors()])
        plan = replace(plan, groups=group_tensors(plan.trainable, (adamw or AdamW.for_from_scratch(),)))
        session, bus = kind(plan, script).open(), Bus({"recorder": recorder})
        session.heard = recorder.heard
        session.build()
        run = Run("test", tmp_path, 0, steps, BASE_LR, {}, "noop", plan, session, dataset, {}, bus)
        saver, options = Notes(recorder.heard), {"eval_every": 0, **options}
        training = Training(run, bus, batches, saver=saver, outcome=outcome or Outcome(), **options)
        return Stage(session, recorder, saver, training)

    return make


# -- edits of the recipe ----------------------------------------------------------------------------------------------


class Editing(Bare):
    """Record the steps after which the weights are edited; the edit adds 1 to every weight."""

    def __init__(self, steps):
        self.due, self.edited, self.launched, self.count_launched = steps, [], [], int

    def edit_steps(self, steps):
        return self.due

    def edit(self, step, arrays):
        self.edited.append(step)
        self.launched.append(self.count_launched())
        arrays.update({name: array + 1 for name, array in arrays.items() if "@" not in name})


@pytest.mark.parametrize("kind", [Scripted, Queued, Several])
def test_the_recipe_edits_the_weights_after_the_steps_that_it_names(stage, kind):
    recipe = Editing((0, 2, 4, 9))
    row = stage(4, recipe=recipe, kind=kind, recorder=Recorder(looked_at=()))
    recipe.count_launched = lambda: row.recorder.heard.count("launch") or len(row.session.hps)
    before = {t.name: row.session.download(t.name) for t in row.session.plan.tensors}
    assert row.train().steps == 4
    assert recipe.launched == [0, 2], "a step that was launched earlier would train the weights before the edit"
    assert recipe.edited == [0, 2], "an edit after the last step would not be trained, evaluated or exported"
    for name, array in before.items():
        np.testing.assert_array_equal(row.session.download(name), array + 1 + 1)


@pytest.mark.parametrize(("edited", "steps"), [(None, [2, 3]), (2, [3])])
def test_a_run_that_failed_after_an_edit_does_not_repeat_it_when_it_is_resumed(stage, edited, steps):
    recipe = Editing((2, 3))
    stage(4, recipe=recipe, outcome=Outcome(steps=2, edited=edited)).train()
    assert recipe.edited == steps


# -- numbers that are not finite ------------------------------------------------------------------------------------


def test_a_finite_step_resets_the_count_of_skipped_steps(stage):
    """Only consecutive skipped steps count, however many there are in all."""
    outcome = stage(3 * MAX_CONSECUTIVE_SKIPS, [BAD, GOOD] * MAX_CONSECUTIVE_SKIPS, skip=True).train()
    assert (outcome.reason, outcome.steps, outcome.skipped) == (
        "completed",
        3 * MAX_CONSECUTIVE_SKIPS,
        MAX_CONSECUTIVE_SKIPS,
    )


def test_twenty_skipped_steps_in_a_row_end_the_run(stage):
    almost = [BAD] * (MAX_CONSECUTIVE_SKIPS - 1)
    row = stage(100, [*almost, GOOD, *almost, BAD], skip=True)
    with pytest.raises(RunFailed, match="20 steps in a row were skipped") as error:
        row.train()
    assert "nonfinite=skip" not in str(error.value), "it is what was done"
    assert row.training.outcome.steps == 2 * MAX_CONSECUTIVE_SKIPS
    assert row.training.outcome.skipped == 2 * len(almost)


@pytest.mark.parametrize(
    "bad", [BAD, StepMetrics(math.inf, 0.5), StepMetrics(1.5, math.nan), StepMetrics(1.5, math.inf)]
)
def test_with_skip_a_nonfinite_step_is_reported_and_the_run_continues(stage, bad):
    it = stage(5, [GOOD, bad], skip=True)
    outcome = it.train()
    assert (outcome.reason, outcome.steps, outcome.skipped) == ("completed", 5, 1)
    ((kind, fields),) = it.recorder.events
    assert (kind, fields["step"], fields["skipped"]) == ("skipped", 2, 1)
    assert (str(fields["loss"]), str(fields["grad_norm"])) == (str(bad.loss), str(bad.grad_norm))
    assert fields["batch"] == batch_digest(it.training.batches.batch(1))
    assert "stop_reason 2" in it.recorder.heard and "after 2" in it.recorder.heard


@pytest.mark.parametrize("bad", [BAD, StepMetrics(1.5, math.inf)])
def test_without_skip_a_nonfinite_step_ends_the_run(stage, bad):
    it = stage(5, [GOOD, bad])
    with pytest.raises(RunFailed) as error:
        it.train()
    digest = batch_digest(it.training.batches.batch(1))
    for word in (f"step 2 (batch 1, digest {digest})", str(bad.loss), str(bad.grad_norm), "lr", "nonfinite=skip"):
        assert word in str(error.value)
    assert it.recorder.heard[-1] == "on_step 2", "it was recorded before the run ended"
    assert (it.training.outcome.skipped, it.recorder.events) == (0, [])


# -- what is counted ------------------------------------------------------------------------------------------------


class Weighted:
    """The batches of another, whose targets weigh what `weights` says, [rows, context]."""

    def __init__(self, batches, weights):
        self.batches, self.inputs, self.weights = batches, batches.inputs, np.array(weights, np.float32)

    def batch(self, k):
        return {**self.batches.batch(k), "weights": self.weights}

    def held_out(self):
        return self.batches.held_out()


def test_tokens_counts_targets_of_nonzero_weight(stage):
    """A prompt's weigh nothing and do not count; however little another weighs, it counts as one."""
    weights = [[0, 0, 1, 1, 1], [0, 0.25, 0.001, 2, 0], [0, 0, 0, 0, 0]]
    it = stage(3, data=Weighted(token_dataset(8, 4000).batches(5, 3, 0), weights))
    outcome = it.train()
    assert outcome.tokens == 3 * 6
    assert [m["tokens"] for m in it.recorder.metrics] == [6, 6, 6]
    assert outcome.tokens_per_second == 18 / outcome.training_seconds


def test_target_weights_are_normalised_in_float64_and_rounded_once(stage, monkeypatch):
    """A sum taken, or divided by, in float32 would be another number for most."""
    monkeypatch.setattr(Scripted, "do_gradients", lambda self, micros: {str(i): m for i, m in enumerate(micros)})
    batches = token_dataset(8, 4000).batches(5, 6, 0)
    weights = np.random.default_rng(0).uniform(0.1, 1.0, (6, 5)).astype(np.float32)
    it = stage(1, data=Weighted(batches, weights))
    micros = it.session.gradients(it.training.batches.batch(0)).values()
    assert len(micros) == 2
    normalised = np.concatenate([m["weights"] for m in micros])
    expected = [float(w) / sum(weights.ravel().tolist()) for w in weights.ravel()]  # exact: few numbers of one size
    assert normalised.ravel().tolist() == np.array(expected).astype(np.float32).tolist()
    assert normalised.ravel().tolist() != (weights / weights.sum()).ravel().tolist()


def test_held_out_targets_of_weight_zero_do_not_count(stage):
    session = stage(1).session
    batch = token_dataset(8, 4000).batches(5, 3, 0).batch(0)
    with pytest.raises(BadBatch, match="got 0"):
        session.evaluate([{**batch, "weights": np.zeros_like(batch["weights"])}])


@pytest.mark.parametrize("even", [True, False])
def test_prefetched_batches_are_bit_identical(stage, even):
    plan = replace(stage(1).session.plan, rows=3, accumulate=2)
    batches = token_dataset(8, 4000).batches(5, 6, 0)
    block = batches.block(2, 4)
    if not even:
        block["weights"] = np.random.default_rng(0).uniform(0, 2, block["weights"].shape).astype(np.float32)
    for i, ours in enumerate(prepare_batches(plan, block, 4)):
        batch = {name: values[6 * i : 6 * i + 6] for name, values in block.items()}
        assert batch_digest(ours) == batch_digest(batch)
        for mine, theirs in zip(ours.micros, micro_batches(plan, batch), strict=True):
            assert batch_digest(mine) == batch_digest(theirs)


def test_each_step_gets_its_own_batch_whatever_is_prefetched(stage):
    """A batch of a subclass is never left out for a block that knows nothing of it."""
    ahead, alone, other = stage(40), stage(40), stage(40)
    kind = type(ahead.training.batches)
    alone.training.batches.__class__ = type("Alone", (kind,), {"batch": lambda self, k: kind.batch(self, k)})
    other.training.batches.__class__ = type("Other", (kind,), {"batch": lambda self, k: kind.batch(self, k + 1)})
    for it in (ahead, alone, other):
        it.train()
    assert ahead.session.digests == alone.session.digests
    assert other.session.digests[:-1] == ahead.session.digests[1:]


def test_every_step_gets_the_next_batch_and_its_own_numbers(stage):
    it = stage(3, adamw=AdamW.for_lora())
    it.train()
    expected = [batch_digest({"tokens": it.training.batches.batch(k)["tokens"]}) for k in range(3)]
    assert it.session.digests == expected
    lora = replace(AdamW.for_lora(), lr=BASE_LR)
    assert [hp.tolist() for hp in it.session.hps] == [lora.hp_for_step(i).tolist() for i in range(3)]


@pytest.mark.parametrize(("answer", "rate"), [(None, BASE_LR), (0.125, 0.125), (0.0, 0.0)])
def test_the_learning_rate_is_the_callbacks_or_else_the_runs(stage, answer, rate):
    it = stage(2, recorder=Recorder(rate=answer))
    it.train()
    assert [hp[0] for hp in it.session.hps] == [rate] * 2
    assert [m["lr"] for m in it.recorder.metrics] == [rate] * 2


# -- the held-out data ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("every", "steps", "evals"), [(0, 4, []), (2, 4, [0, 2, 4]), (3, 7, [0, 3, 6, 7]), (10, 4, [0, 4]), (1, 0, [0])]
)
def test_evaluations_are_before_the_first_step_at_intervals_and_after_the_last(stage, every, steps, evals):
    it = stage(steps, eval_every=every)
    outcome = it.train()
    assert it.recorder.evals() == evals
    assert outcome.eval_step == (evals[-1] if evals else None)


def test_hooks_are_called_in_order(stage):
    it = stage(2, eval_every=2)
    it.train()
    assert it.recorder.heard == [
        "on_eval 0", "begin",
        "lr 0/2", "on_step 1", "stop_reason 1", "after 1",
        "lr 1/2", "on_step 2", "on_eval 2", "stop_reason 2", "after 2",
    ]  # fmt: skip


def test_first_and_last_metrics_are_kept_and_reported_at_their_own_step(stage):
    it = stage(3, model=Scored("rows"), eval_every=2)
    outcome = it.train()
    # The null engine's loss is 1 + 1 / (1 + steps).
    assert (outcome.first_eval_loss, outcome.eval_loss) == (pytest.approx(2), pytest.approx(1.25))
    assert (outcome.first_eval_scores, outcome.eval_scores) == ({"seen": 2}, {"seen": 2})
    scores = {step: metrics for step, metrics, _ in it.saver.told}
    assert scores[1] == {}
    assert scores[2] == {"loss": pytest.approx(4 / 3), "ppl": pytest.approx(math.exp(4 / 3)), "seen": 2}
    assert it.recorder.metrics[0] == scores[0]


def test_an_overflowing_perplexity_is_no_error(stage, monkeypatch):
    monkeypatch.setattr(Scripted, "do_loss", lambda self, micro: 1e6 * float(micro["weights"].sum()))
    it = stage(0, eval_every=1)
    assert it.train().eval_loss == pytest.approx(1e6)
    assert math.isfinite(it.recorder.metrics[0]["ppl"])


# -- how it ends ----------------------------------------------------------------------------------------------------


def test_the_saver_is_called_after_the_last_step(stage):
    it = stage(3)
    outcome = it.train()
    assert (outcome.reason, outcome.why, outcome.train_loss) == ("completed", None, GOOD.loss)
    assert [(step, last) for step, _, last in it.saver.told] == [(0, False), (1, False), (2, False), (3, True)]


@pytest.mark.parametrize(("every", "evals"), [(0, []), (2, [0, 2, 3]), (3, [0, 3])])
def test_a_run_stopped_by_a_callback_is_evaluated_once_more(stage, every, evals):
    it = stage(9, recorder=Recorder(stops_at=3), eval_every=every)
    outcome = it.train()
    assert (outcome.reason, outcome.why, outcome.steps) == ("aborted", "enough", 3)
    assert it.recorder.evals() == evals
    step, metrics, last = it.saver.told[-1]
    assert (step, bool(metrics), last) == (3, every > 0, True)


def test_a_signal_ends_the_run_after_its_step(stage):
    it = stage(9, eval_every=1, should_stop=lambda: len(it.session.hps) == 2)
    outcome = it.train()
    assert (outcome.reason, outcome.steps) == ("interrupted", 2)
    assert it.recorder.evals() == [0, 1], "it evaluates no more"
    assert (it.recorder.heard[-1], it.saver.told[-1]) == ("after 2", (2, {}, True))


def test_a_signal_before_the_first_step_prevents_all_steps(stage):
    it = stage(9, eval_every=1, should_stop=lambda: True)
    outcome = it.train()
    assert (outcome.reason, outcome.steps, it.recorder.heard) == ("interrupted", 0, ["begin"])


@pytest.mark.parametrize("batches_seen", [1, 3])
def test_an_interrupted_evaluation_stops_between_batches_and_is_not_reported(stage, batches_seen):
    """Also while the model's own metrics are computed, in a second pass over the two batches."""
    requests = []

    def should_stop():
        requests.append(1)
        return len(requests) > batches_seen + 1

    it = stage(4, model=Scored("rows"), eval_every=2, should_stop=should_stop)
    outcome = it.train()
    assert (outcome.reason, outcome.eval_step, outcome.steps) == ("interrupted", None, 0)
    assert it.recorder.evals() == []
    again = stage(4, model=Scored("rows"), eval_every=2, outcome=outcome)
    assert (again.train().reason, again.recorder.evals()) == ("completed", [0, 2, 4])


# -- a run that is resumed ------------------------------------------------------------------------------------------


def resumed_outcome(**changes):
    """Return the outcome in a checkpoint at step 3 of an interrupted run."""
    recorded = {"steps": 3, "reason": "interrupted", "why": "a signal", "train_loss": 1.75, "tokens": 45, "skipped": 2}
    recorded |= {"seconds": 100.0, "training_seconds": 50.0, "first_eval_loss": 2.0, "eval_loss": 1.5, "eval_step": 2}
    return Outcome(**{**recorded, **changes})


def test_resume_continues_with_the_next_step_and_its_counts(stage):
    it = stage(5, adamw=AdamW.for_lora(), outcome=resumed_outcome())
    outcome = it.train()
    assert (outcome.reason, outcome.why, outcome.steps) == ("completed", None, 5)
    assert (outcome.tokens, outcome.skipped) == (45 + 2 * 15, 2)
    assert 100 < outcome.seconds < 160 and 50 < outcome.training_seconds < 110
    assert [h for h in it.recorder.heard if h.startswith("lr")] == ["lr 3/5", "lr 4/5"]
    assert it.session.digests == [batch_digest({"tokens": it.training.batches.batch(k)["tokens"]}) for k in (3, 4)]
    assert [hp.tolist()[5:] for hp in it.session.hps] == [AdamW.for_lora().hp_for_step(i).tolist()[5:] for i in (3, 4)]


def test_a_resumed_run_that_fails_immediately_names_its_step_and_adds_its_time(stage, monkeypatch):
    it = stage(5, eval_every=3, outcome=resumed_outcome())

    def gone(batches):
        raise ValueError("no such row")

    monkeypatch.setattr(type(it.training.batches), "held_out", gone)
    with pytest.raises(PluginFailed, match="at step 3: ValueError: no such row"):
        it.train()
    assert it.training.outcome.steps == 3 and 100 < it.training.outcome.seconds < 160


@pytest.mark.parametrize(("eval_step", "evals"), [(2, [3, 5]), (3, [5])], ids=["stopped before it", "done before"])
def test_an_evaluation_missed_by_a_stopped_run_is_made_once_on_resume(stage, eval_step, evals):
    it = stage(5, eval_every=3, outcome=resumed_outcome(eval_step=eval_step))
    outcome = it.train()
    assert it.recorder.evals() == evals
    assert (outcome.first_eval_loss, outcome.eval_step) == (2.0, 5), "the first eval was the first process's"


def test_resume_resets_the_count_of_skipped_steps(stage):
    it = stage(3 + MAX_CONSECUTIVE_SKIPS, [BAD] * (MAX_CONSECUTIVE_SKIPS - 1), skip=True, outcome=resumed_outcome())
    assert (it.train().reason, it.training.outcome.skipped) == ("completed", 2 + MAX_CONSECUTIVE_SKIPS - 1)


def test_a_complete_run_takes_no_step(stage):
    it = stage(3, outcome=resumed_outcome())
    assert (it.train().reason, it.session.hps) == ("completed", [])


# -- the loop without a session of its own --------------------------------------------------------------------------


def together(*runs, stack=None):
    """How each ends that is driven together with the others."""
    loops = [run.training.requests() for run in runs]
    with forward_interrupts(loops):
        return drive(loops, stack or Stack([run.session for run in runs]))


def test_two_loops_are_answered_in_turn_by_a_driver_of_ten_lines(stage):
    """When one loop ends, the other continues; each has its own numbers, metrics and evaluations."""
    long, short = stage(5, eval_every=2), stage(2, [StepMetrics(2.5, 0.1)], eval_every=1)
    waiting = {id(it): (it, it.training.requests()) for it in (long, short)}
    requests = {key: next(loop) for key, (_, loop) in waiting.items()}
    order = []
    while requests:
        for key in list(requests):
            (it, loop), request = waiting[key], requests.pop(key)
            order.append((it is long, type(request)))
            if isinstance(request, Step):
                answer = [partial(it.session.do_step, *request.inputs[0])]
            else:
                answer = (it.session.evaluate(request.batches()), {})
            try:
                requests[key] = loop.send(answer)
            except StopIteration as end:
                assert end.value is it.training.outcome
    assert [kind for first, kind in order if first] == [
        Evaluate,
        Step,
        Step,
        Evaluate,
        Step,
        Step,
        Evaluate,
        Step,
        Evaluate,
    ]
    assert order[-3:] == [(True, Evaluate), (True, Step), (True, Evaluate)]
    assert (long.training.outcome.steps, short.training.outcome.steps) == (5, 2)
    assert short.recorder.metrics[1]["loss"] == 2.5


def test_all_loops_launch_their_steps_before_any_is_waited_for(stage):
    """Also if only one loop evaluates; a loop that ends drops out."""
    heard = []
    recorders = [Recorder(looked_at=(), heard=heard) for _ in range(3)]
    runs = [
        stage(steps, recorder=r, kind=Launched, eval_every=every)
        for r, steps, every in zip(recorders, (4, 2, 4), (0, 0, 2), strict=True)
    ]
    stack = Noting(runs)
    assert [end.steps for end in together(*runs, stack=stack)] == [4, 2, 4]
    work = [hook.split()[0] for hook in heard if hook.split()[0] in ("launch", "on_step")]
    rounds = [[hook] * count for count in (3, 3, 2, 2) for hook in ("launch", "on_step")]
    assert work == [hook for hooks in rounds for hook in hooks]
    assert stack.rows == [[0, 1, 2]] * 2 + [[0, 2]] * 2


def test_all_evaluations_of_a_round_are_launched_before_any_is_waited_for(stage):
    """A failing evaluation fails only its loop; if none can be launched, all loops fail."""
    heard = []

    class Held(Stack):
        broken = ()

        def losses(self, requests):
            heard.append([*requests])
            return {row: partial(self.wait, row, batches) for row, batches in requests.items()}

        def wait(self, row, batches):
            heard.append("wait")
            return 1 / 0 if row in self.broken else self.sessions[row].evaluate(batches)

    class None_(Held):
        def losses(self, requests):
            raise ValueError("no device")

    def runs():
        return [stage(4, eval_every=2) for _ in range(3)] + [stage(4)]

    def driven(kind, broken=()):
        these = runs()
        stack = kind([run.session for run in these])
        stack.broken = broken
        return [getattr(end, "reason", type(end)) for end in together(*these, stack=stack)]

    assert driven(Held) == ["completed"] * 4
    assert heard == 3 * [[0, 1, 2], "wait", "wait", "wait"]  # before the first step, and after two and four
    assert driven(Held, broken=(0, 1)) == [PluginFailed, PluginFailed, "completed", "completed"]
    assert driven(None_) == [PluginFailed] * 3 + ["completed"]


def test_a_failing_loop_does_not_end_others(stage):
    runs = [stage(4), stage(4, [GOOD, BAD]), stage(4), stage(2)]
    runs[2].session.do_loss = lambda micro: 1 / 0
    runs[2].training.eval_every = 2
    ends = together(*runs)
    assert [getattr(end, "reason", type(end)) for end in ends] == ["completed", RunFailed, PluginFailed, "completed"]
    assert "step 2" in str(ends[1]) and "no finite" not in str(ends[2])
    assert [len(run.session.hps) for run in runs] == [4, 2, 0, 2]


def test_an_interrupt_ends_all_loops(stage):
    runs = [stage(4), stage(4)]

    def interrupted(*_):
        raise KeyboardInterrupt

    runs[0].session.do_step = interrupted
    with pytest.raises(KeyboardInterrupt):
        together(*runs)


def test_a_signal_during_an_answer_reaches_every_run(stage):
    runs, heard = [stage(4), stage(4)], []

    def interrupted(*_):
        raise KeyboardInterrupt

    def noting(it):
        try:
            yield from it.training.requests()
        except KeyboardInterrupt:
            heard.append(it.training.outcome.steps)
            raise

    runs[1].session.do_launch = interrupted
    loops = [noting(run) for run in runs]
    with pytest.raises(KeyboardInterrupt), forward_interrupts(loops):
        drive(loops, Stack([run.session for run in runs]))
    assert heard == [0, 0]


def test_a_signal_between_an_answer_and_the_next_request_reaches_the_run(stage):
    """A driver that is interrupted itself has the run end as it ends of a signal in the middle of a step."""
    it, heard = stage(5), []

    class Interrupts(Noting):
        def do_step(self, requests):
            if len(self.rows) == 2:
                raise KeyboardInterrupt("now")
            return super().do_step(requests)

    def run():
        try:
            yield from it.training.requests()
        except KeyboardInterrupt as error:
            heard.append((str(error), it.training.outcome.steps))
            raise

    loop = run()
    with pytest.raises(KeyboardInterrupt, match="now"), forward_interrupts([loop]):
        drive([loop], Interrupts([it]))
    assert heard == [("now", 2)]


def test_an_error_of_the_driver_is_raised_at_the_loops_request(stage):
    """The loop can then attribute the error and save a checkpoint."""
    it = stage(5)
    loop = it.training.requests()
    loop.send(None)
    loop.send([lambda: GOOD])
    with pytest.raises(PluginFailed, match=r"engine\.noop failed at step 2: ValueError: no device"):
        loop.throw(ValueError("no device"))


def test_an_error_of_an_answer_keeps_its_traceback(stage):
    it = stage(4)

    def broken(*_):
        raise KeyError("weights")

    it.session.do_step = broken
    with pytest.raises(PluginFailed) as error:
        it.train()
    way = [frame.name for frame in traceback.extract_tb(error.value.__cause__.__traceback__)]
    assert way[-1] == "broken"


# -- steps that are launched while another is taken ------------------------------------------------------------------


def queued_training(stage, steps=6, looked_at=(), **options):
    """Return a training on a session that launches early, with a callback that waits at certain steps."""
    return stage(steps, recorder=Recorder(looked_at=looked_at), kind=Queued, **options)


def heard_hooks(it, *kinds):
    return [hook for hook in it.recorder.heard if hook.split()[0] in kinds]


def test_the_next_step_is_launched_early_if_nothing_reads_the_weights(stage):
    """At most one step is launched early; the reported metrics equal those without it."""
    it, plain = queued_training(stage), stage(6)
    assert it.train().steps == plain.train().steps == 6
    expected = ["launch", *(hook for k in range(1, 6) for hook in ("launch", f"on_step {k}")), "on_step 6"]
    assert heard_hooks(it, "launch", "on_step") == expected
    assert it.session.digests == plain.session.digests and np.array_equal(it.session.hps, plain.session.hps)
    assert [m["tokens"] for m in it.recorder.metrics] == [m["tokens"] for m in plain.recorder.metrics]
    assert sum(m["wall_us"] for m in it.recorder.metrics) <= it.training.outcome.seconds * 1e6


@pytest.mark.parametrize("by", ["callback", "checkpoint", "eval", "unknown callback"])
def test_no_step_is_launched_early_if_something_reads_the_weights(stage, by):
    """At the steps that a callback, a checkpoint or an evaluation needs, and after all of them for an unknown one."""
    it = queued_training(stage, looked_at={"callback": (2, 4), "unknown callback": None}.get(by, ()))
    it.saver.wanted = (2, 4) if by == "checkpoint" else ()
    it.training.eval_every = 2 if by == "eval" else 0
    it.train()
    before = {
        hook: heard_hooks(it, "launch", "on_step")[: i + 1].count("launch")
        for i, hook in enumerate(heard_hooks(it, "launch", "on_step"))
    }
    ahead = [k for k in range(1, 7) if before[f"on_step {k}"] == k + 1]
    assert ahead == ([] if by == "unknown callback" else [1, 3, 5])
    assert heard_hooks(it, "stop_reason") == [f"stop_reason {k}" for k in range(1, 7) if k not in ahead]
    assert heard_hooks(it, "after") == [f"after {k}" for k in range(1, 7) if k not in ahead]


def test_a_signal_ends_the_run_after_the_step_that_is_under_way(stage):
    """The saved session is in the state after that step."""
    it = queued_training(stage, 50)
    it.training.should_stop = lambda: "on_step 3" in it.recorder.heard
    outcome = it.train()
    assert (outcome.reason, outcome.steps, len(it.session.hps)) == ("interrupted", 4, 4)
    assert heard_hooks(it, "on_step", "after")[-3:] == ["on_step 3", "on_step 4", "after 4"]


def test_a_failing_callback_saves_a_checkpoint_including_the_launched_step(stage):
    """Callbacks are called for that step first, so that the run can be resumed after it."""
    it = stage(50, recorder=Failing(looked_at=(), at=3), kind=Queued)
    with pytest.raises(PluginFailed, match=r"callbacks\.recorder failed at step 3: ValueError: boom"):
        it.train()
    assert heard_hooks(it, "on_step", "after")[-2:] == ["on_step 4", "after 4"]
    assert it.training.outcome.steps == len(it.session.hps) == 4 and it.saver.told[-1][2]


def test_nonfinite_numbers_end_the_run_at_their_own_step(stage):
    """Though the next one was launched; and where they are skipped, it counts from its own numbers."""
    it = queued_training(stage, 50, script=[GOOD, GOOD, BAD])
    with pytest.raises(RunFailed, match=r"step 3 \(batch 2, digest"):
        it.train()
    it = queued_training(stage, 6, script=[GOOD, BAD, BAD], skip=True)
    assert it.train().skipped == 2
    assert [fields["step"] for kind, fields in it.recorder.events if kind == "skipped"] == [2, 3]


@pytest.mark.parametrize("looked_at", [None, ()], ids=["alone", "with another behind it"])
def test_no_checkpoint_is_saved_if_a_launched_step_fails(stage, looked_at):
    """The step may be half applied to the weights."""

    class Fails(Queued):
        def do_step(self, micros, numbers):
            metrics = super().do_step(micros, numbers)
            if len(self.hps) == 4:
                raise ValueError("no device")
            return metrics

    it = stage(9, recorder=Recorder(looked_at=looked_at), kind=Fails)
    with pytest.raises(PluginFailed, match=r"engine\.noop failed at step 4: ValueError: no device"):
        it.train()
    assert it.training.outcome.steps == 3 and heard_hooks(it, "on_step")[-1] == "on_step 3"
    assert not any(last for _, _, last in it.saver.told)


def test_a_rejected_batch_still_saves_a_checkpoint(stage):
    """The batch is rejected before the weights change, whether or not a step is launched."""
    for it, ahead in ((queued_training(stage, 9), False), (stage(9), False), (stage(9), True)):
        batches = it.training.batches

        class Torn(type(batches)):
            def batch(self, k):
                return super().batch(k) if k < 4 else {"tokens": np.zeros((1, 1), np.int32)}

        class Ahead(Torn):
            def block(self, first, count):
                return {name: values.astype(np.float16) for name, values in super().block(first, count).items()}

        batches.__class__ = Ahead if ahead else Torn
        with pytest.raises(PluginFailed, match=r"at step 5: the batch has no"):
            it.train()
        assert (it.training.outcome.steps, len(it.session.hps), it.saver.told[-1][0]) == (4, 4, 4)


def at_once(it):
    """How many steps were launched with nothing else between them, each time."""
    return [len([*group]) for hook, group in groupby(it.recorder.heard) if hook == "launch"]


def several(stage, steps, looked_at=(), recorder=None, **how):
    return stage(steps, recorder=recorder or Recorder(looked_at=looked_at), kind=Several, **how)


def test_steps_launched_together_equal_single_steps_and_end_before_a_reader_of_the_weights(stage):
    script = [StepMetrics(3.0 - i / 10, 0.5) for i in range(11)]
    alone = stage(11, recorder=Recorder(looked_at=()), script=script, eval_every=6)
    alone.train()
    it = several(stage, 11, script=script, eval_every=6)
    (end,) = together(it)
    assert at_once(it) == [4, 2, 4, 1]
    assert it.session.digests == alone.session.digests
    np.testing.assert_array_equal(it.session.hps, alone.session.hps)
    assert heard_hooks(it, "lr", "on_step", "on_eval", "after")[-1] == "after 11" and it.recorder.evals() == [0, 6, 11]
    ours, theirs = ([{**m, "wall_us": 0} for m in run.recorder.metrics] for run in (it, alone))
    assert ours == theirs and end.tokens == alone.training.outcome.tokens
    assert end.training_seconds == pytest.approx(sum(m.get("wall_us", 0) for m in it.recorder.metrics) / 1e6)
    looks = several(stage, 9, looked_at=(3,))
    together(looks)
    assert at_once(looks) == [3, 4, 2] and heard_hooks(looks, "launch", "after")[3] == "after 3"


@pytest.mark.parametrize("skip", [False, True])
def test_nonfinite_numbers_after_a_failing_callback_are_counted_or_not_saved(stage, skip):
    it = several(stage, 50, recorder=Failing(looked_at=(), at=1), script=[GOOD, GOOD, BAD], skip=skip)
    (error,) = together(it)
    assert "callbacks.recorder failed at step 1: ValueError: boom" in str(error)
    saved = any(last for _, _, last in it.saver.told)
    assert (saved, it.training.outcome.skipped) == ((True, 1) if skip else (False, 0))


def test_loops_take_as_many_steps_at_once_as_all_of_them_request(stage):
    """No device is idle while a loop waits, and prefetched inputs are reused."""
    first, second = several(stage, 9, eval_every=3), several(stage, 9)
    ends = together(first, second)
    assert [end.steps for end in ends] == [9, 9] and first.recorder.evals() == [0, 3, 6, 9]
    assert 3 in at_once(second) and len(second.session.digests) == len(heard_hooks(second, "lr")) == 9
    assert second.session.digests == [
        batch_digest({"tokens": second.training.batches.batch(k)["tokens"]}) for k in range(9)
    ]


def test_an_error_among_steps_launched_together_ends_the_run_at_the_same_step(stage):
    it = several(stage, 50, script=[GOOD, GOOD, BAD])
    (error,) = together(it)
    assert "step 3 (batch 2, digest" in str(error) and heard_hooks(it, "on_step")[-1] == "on_step 3"
    assert not any(last for _, _, last in it.saver.told)
    it = several(stage, 50, recorder=Failing(looked_at=(), at=3))
    (error,) = together(it)
    assert "callbacks.recorder failed at step 3: ValueError: boom" in str(error)
    count = len(it.session.hps)  # all launched steps, which the session has taken
    assert (
        count == it.training.outcome.steps == it.saver.told[-1][0]
        and heard_hooks(it, "on_step")[-1] == f"on_step {count}"
    )

    it = several(stage, 50)
    batches = it.training.batches

    class Torn(type(batches)):
        def block(self, first, count):
            return {name: values.astype(np.float16) for name, values in super().block(first, count).items()}

        def batch(self, k):
            return super().batch(k) if k < 6 else {"tokens": np.zeros((1, 1), np.int32)}

    batches.__class__ = Torn
    (error,) = together(it)
    assert "at step 7: the batch has no" in str(error)
    assert (it.training.outcome.steps, len(it.session.hps), it.saver.told[-1][0]) == (6, 6, 6)

    it = several(stage, 50)
    it.training.should_stop = lambda: "on_step 5" in it.recorder.heard
    (end,) = together(it)
    assert (end.reason, end.steps) == ("interrupted", len(it.session.hps)) and end.steps <= 12


def test_a_schedule_needs_no_wait_unless_it_has_on_step():
    """A factor depends on the step only; callbacks with on_step must be called before the next launch."""

    @dataclass(eq=False)
    class Flat(Schedule):
        name = "flat"

        def factor(self, step, steps):
            return 1.0

    @dataclass(eq=False)
    class Plateau(Flat):
        name = "plateau"

        @hookimpl
        def on_step(self, metrics):
            pass

    @dataclass(eq=False)
    class Falls(Flat):
        name = "falls"

        @hookimpl
        def stop_reason(self, metrics):
            pass

    assert not Flat().should_wait(3) and Plateau().should_wait(3) and Falls().should_wait(3)
    assert not Callback().should_wait(3) and Recorder().should_wait(3)


# -- what a run says of its loss ------------------------------------------------------------------------------------


def test_the_smoothed_loss_is_an_exponential_mean_with_a_short_start():
    losses = np.random.default_rng(0).normal(3.0, 0.5, 2000)
    smoothed = None
    for step, loss in enumerate(losses, 1):
        smoothed = smooth_loss(smoothed, float(loss), step)
    share = np.maximum(0.02, np.minimum(1.0, 20 / np.arange(1, 2001)))
    weights = share * np.append(np.cumprod((1 - share)[::-1])[::-1][1:], 1.0)
    assert weights.sum() == pytest.approx(1.0) and smoothed == pytest.approx(float(weights @ losses), rel=1e-12)
    assert smooth_loss(smoothed, math.nan, 2001) == smoothed and smooth_loss(None, math.inf, 1) is None
    assert 40 < float(weights @ np.arange(1999, -1, -1.0)) < 60  # steps that it lies behind


@pytest.mark.parametrize(
    ("train", "held_out", "diverged"),
    [
        ((4.0, 4.5), (4.0, 4.6), True),
        ((4.0, 4.5), (4.0, 3.9), False),  # one noisy batch
        ((2.0, 0.1), (2.0, 2.9), False),  # overfitted
        ((4.0, 4.39), (4.0, 4.39), False),  # by less than a tenth
        ((0.01, 0.09), (None, None), False),  # by less than 0.1 nats
        ((-10.0, -9.5), (None, None), False),  # a loss may be below 0
        ((4.0, 9.0), (None, None), True),
        ((None, 9.0), (None, None), False),  # resumed from a checkpoint that does not have it
    ],
)
def test_a_run_has_diverged_if_its_losses_end_higher_than_they_began(train, held_out, diverged):
    outcome = Outcome(
        train_loss=train[1], first_train_loss=train[0], eval_loss=held_out[1], first_eval_loss=held_out[0]
    )
    assert outcome.has_diverged is diverged
