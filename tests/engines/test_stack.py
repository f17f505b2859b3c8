"""Stacks: each run gives the results that it gives alone."""

import dataclasses
import re
import traceback

import numpy as np
import pytest
from stacks import (
    ADAMW,
    ENGINE,
    EXACT,
    OPTIMISERS,
    Job,
    begin,
    begin_all,
    build_sessions,
    build_stack,
    lora_jobs,
    make_jobs,
    make_training,
    take_all,
    train_alone,
)  # fmt: skip
from tiny import batches, plan

from toyexp import ArrayValues, CrossEntropy, InputSpec, RunFailed, Setup, UserError, program_difference
from toyexp.base.errors import BadBatch
from toyexp.interfaces.plan import apply_optimiser
from toyexp.training.driver import drive
from toyexp_ggml.engines import GGMLCPU
from toyexp_models.llama import Llama
from toyexp_models.vit import ViT
from toyexp_optimisers.adamw import AdamWOptimiser
from toyexp_optimisers.muon import Adafactor, Muon
from toyexp_optimisers.sgd import SGD, Lion
from toyexp_recipes.scratch import VitTiny
from toyexp_torch.engines import TorchCPU, TorchCUDA
from toyexp_torch.stacks.shapes import MemoryCounter
from toyexp_torch.stacks.step import StackedStep


def train_together(jobs, steps, engine=ENGINE):
    """Return losses and norms [jobs, steps, 2], and the final state of each run's session."""
    stack, sessions = build_stack(jobs, engine)
    losses = []
    for step in range(steps):
        losses.append(take_all(stack, jobs, step))
    snapshots = [session.snapshot() for session in sessions]
    for session in sessions:
        session.close()
    return np.array(losses).transpose(1, 0, 2), snapshots


def assert_each_as_alone(jobs):
    """Compare losses over 12 steps in float32, and everything in float64, where the order of sums hardly matters."""
    losses_float32, _ = train_together(jobs, 12)
    losses_float64, snapshots = train_together(jobs, 4, EXACT)
    for job, ours_float32, ours_float64, weights in zip(jobs, losses_float32, losses_float64, snapshots, strict=True):
        np.testing.assert_allclose(ours_float32[:, 0], train_alone(job, 12)[0][:, 0], rtol=1e-5)
        expected_losses, expected = train_alone(job, 4, EXACT)
        np.testing.assert_allclose(ours_float64, expected_losses, rtol=1e-11)
        for name, values in expected.items():
            # A constant added to all keys changes no softmax: the gradient of their bias is rounding alone, which AdamW
            # divides by its own size.
            atol = 1e-10 if name.endswith("attn_k.bias") else 1e-11
            np.testing.assert_allclose(weights[name], values, atol=atol, err_msg=name)


class RoundingAttention(TorchCPU):
    """An engine with engine.bfloat16_attention=true, which the real one offers on CUDA only."""

    def _session_settings(self, title):
        cuda = TorchCUDA(bfloat16_attention=True)._session_settings(title)
        return dataclasses.replace(super()._session_settings(title), attention_dtype=cuda.attention_dtype)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_attention_alone_is_rounded_to_bfloat16_in_stacks_and_single_runs(name):
    job, rounding = make_jobs(name, ADAMW)[0], RoundingAttention(threads=1)
    gradients = []
    for engine in (EXACT, rounding):
        with build_sessions([engine.realize(job.plan)])[0] as session:
            gradients.append({key: value.astype(float) for key, value in session.gradients(job.batch(0)).items()})
    for key, exact in gradients[0].items():
        difference = np.linalg.norm(gradients[1][key] - exact)
        assert 1e-7 < difference <= 2e-2 * np.linalg.norm(exact) + 1e-6, key  # bfloat16 has 8 bits
    exact, alone = (train_alone(job, 1, engine)[0][0, 0] for engine in (EXACT, rounding))
    stacked = train_together([job, job], 1, rounding)[0][:, 0, 0]
    assert 1e-6 < abs(alone - exact) < 1e-3
    np.testing.assert_allclose(stacked, alone, rtol=1e-6)


def nudge(job, direction):
    """Return the same job with each trainable number changed by one unit in the last place of float32."""

    def change(tensor):
        values = tensor.values.draw(tensor.shape, job.plan.seed, tensor.name)
        moved = np.nextafter(values.astype(np.float32), np.float32(direction))
        return dataclasses.replace(tensor, values=ArrayValues(moved)) if tensor.trainable else tensor

    tensors = tuple(map(change, job.plan.tensors))
    return dataclasses.replace(job, plan=dataclasses.replace(job.plan, tensors=tensors))


def test_runs_that_amplify_rounding_differ_in_float32_by_at_most_ten_perturbations():
    """At a rate too high for 1e-5, a stack's error at each step is at most ten times the effect of that change."""
    jobs, steps = make_jobs("llama_all", [(Lion(weight_decay=0.1), 0.3), (Lion(beta1=0.8), 0.3)]), 16
    losses_float32, _ = train_together(jobs, steps)
    losses_float64, _ = train_together(jobs, steps, EXACT)
    largest_error = 0.0
    for job, ours, ours_float64 in zip(jobs, losses_float32, losses_float64, strict=True):
        losses = train_alone(job, steps)[0][:, 0]
        error = np.maximum.accumulate(np.abs(ours[:, 0] / losses - 1))
        perturbed_error = np.maximum.accumulate(np.abs(train_alone(nudge(job, np.inf), steps)[0][:, 0] / losses - 1))
        assert (error <= 10 * np.maximum(perturbed_error, 1e-6)).all(), (error, perturbed_error)
        largest_error = max(largest_error, error[-1])
        np.testing.assert_allclose(ours_float64, train_alone(job, steps, EXACT)[0], rtol=1e-11)
    assert largest_error > 1e-5


@pytest.mark.parametrize(
    "model", ["llama_all", "gemma", "gemma3", "granite", "qwen3moe", "mamba2", "gpt2_untied", "lab"]
)
def test_losses_of_every_family_are_those_of_each_run_alone(model):
    assert_each_as_alone(make_jobs(model, ADAMW))


@pytest.mark.parametrize("name", OPTIMISERS)
def test_losses_with_every_optimiser_are_those_of_each_run_alone(name):
    assert_each_as_alone(make_jobs("llama", OPTIMISERS[name]))


def test_losses_with_an_auxiliary_loss_or_class_weights_are_those_of_each_run_alone():
    assert_each_as_alone(make_jobs("qwen3moe", ADAMW, objective=CrossEntropy(auxiliary=0.1)))
    assert_each_as_alone(make_jobs("llama", ADAMW, objective=CrossEntropy(class_weights={3: 4.0, 7: 0.0})))


def test_losses_with_two_micro_batches_are_those_of_each_run_alone():
    assert_each_as_alone(make_jobs("llama", ADAMW, rows=2, accumulate=2))


@pytest.mark.parametrize("block", ["layernorm_gelu", "rmsnorm_silu"])
def test_losses_of_vits_are_those_of_each_run_alone(block):
    model = ViT(d_model=16, n_layers=2, n_heads=2, d_ff=24, block=block, image_size=4, channels=1, classes=5)
    inputs = {
        "patches": InputSpec((4, 4), "float32"),
        "targets": InputSpec((), "int32", 5),
        "weights": InputSpec((), "float32"),
    }

    class Images(Job):
        def batch(self, step):
            draw = np.random.default_rng((self.data, step))
            patches = draw.standard_normal((3, 4, 4), np.float32)
            return {
                "patches": patches, "targets": draw.integers(0, 5, 3, np.int32), "weights": np.ones(3, np.float32)
            }  # fmt: skip

    assert_each_as_alone([
        Images(apply_optimiser(VitTiny().plan(model, Setup(inputs, rows=3, seed=i)), optimiser, lr), lr, i)
        for i, (optimiser, lr) in enumerate(ADAMW)
    ])  # fmt: skip


@pytest.mark.parametrize(
    ("bases", "dropout", "settings"),
    [((0, 0), 0.0, {}), ((0, 1), 0.2, {}), ((0, 1), 0.0, {"dora": True, "neftune": 9.0, "targets": ["q", "output"]})],
    ids=["of one base", "of two bases", "DoRA and noise"],
)
def test_losses_of_adapters_are_those_of_each_run_alone(tmp_path, bases, dropout, settings):
    assert_each_as_alone(lora_jobs(tmp_path, bases, dropout, **settings))


def test_a_base_shared_by_runs_is_in_memory_once(tmp_path):
    sessions = ENGINE.realize_stack([job.plan for job in lora_jobs(tmp_path, (0, 0, 1), 0.0)]).sessions
    frozen = [t.name for t in sessions[0].plan.tensors if not t.trainable and t.has_weight_decay]
    for name in frozen:
        addresses = [session._tensors[name].data_ptr() for session in sessions]
        assert addresses[0] == addresses[1] != addresses[2]
    sessions[1].upload(frozen[0], np.ones(sessions[1].plan.tensor(frozen[0]).shape, np.float32))
    assert (sessions[1].download(frozen[0]) == 1).all()
    assert not (sessions[0].download(frozen[0]) == 1).any()


def test_losses_of_a_bfloat16_stack_are_near_those_of_each_run_alone():
    """Products round to 8 bits, and sums have a different order."""
    engine = dataclasses.replace(ENGINE, dtype="bfloat16")
    for model in ("llama", "gpt2"):
        jobs = make_jobs(model, ADAMW[:2])
        losses, _ = train_together(jobs, 10, engine)
        for job, ours in zip(jobs, losses, strict=True):
            theirs, _ = train_alone(job, 10, engine)
            np.testing.assert_allclose(ours[:, 0], theirs[:, 0], rtol=5e-3)
            assert (ours[:, 0] != train_alone(job, 10)[0][:, 0]).all()


def test_bases_that_differ_are_in_memory_once_each(tmp_path):
    """They are stacked from the first step on, also after a run has ended, and can be evaluated and downloaded."""
    jobs = lora_jobs(tmp_path, (0, 1, 2), 0.0)
    stack, sessions = build_stack(jobs, EXACT)
    frozen = [t for t in sessions[0].plan.tensors if not t.trainable]
    before = [{t.name: session.download(t.name) for t in frozen} for session in sessions]
    for active in ([0, 1, 2], [0, 2]):
        begin(stack, jobs, dict.fromkeys(active, 0))
        for tensor in frozen:
            memory = {
                storage.data_ptr(): storage.nbytes()
                for storage in (sessions[i].frozen_values(tensor.name).untyped_storage() for i in active)
            }
            assert [*memory.values()] in ([8 * tensor.size], [8 * tensor.size * len(active)]), tensor.name
            for i in active:
                np.testing.assert_array_equal(sessions[i].download(tensor.name), before[i][tensor.name])
        sessions[1].close()
    held_out = batches(3, 9).batch(0)
    for i in (0, 2):
        with build_sessions([EXACT.realize(jobs[i].plan)])[0] as session_alone:
            for _ in range(2):
                jobs[i].step(session_alone, 0)
            assert sessions[i].evaluate([held_out]) == pytest.approx(session_alone.evaluate([held_out]), rel=1e-11)
            np.testing.assert_allclose(sessions[i].logits(held_out), session_alone.logits(held_out), atol=1e-6)


@pytest.mark.parametrize("name", ["llama", "gpt2", "lora"])
def test_the_memory_of_a_run_in_a_stack_agrees_with_its_estimate(name, tmp_path):
    """Predicted from shapes and compared with a real step; workspaces inside kernels are unknown."""
    jobs = lora_jobs(tmp_path, (0, 0), 0.0) if name == "lora" else make_jobs(name, OPTIMISERS["sgd_momentum"], rows=16)
    stack, sessions = build_stack(jobs, ENGINE)
    take_all(stack, jobs, 0)
    inputs = {row: job.step_input(sessions[row], 1) for row, job in enumerate(jobs)}
    with MemoryCounter() as memory:
        stack.step(inputs)
    state = {x.untyped_storage() for it in stack.update.state.values() for x in it.values()}
    rows = sum(x.nbytes for x in (stack.flat, stack.grad)) + sum(it.nbytes() for it in state)
    expected = 2 * ENGINE.stack_bytes(jobs[0].plan)
    assert 0.9 * expected < rows + memory.peak < 1.1 * expected


# -- different settings for each run -----------------------------------------------------------------------------------


def test_each_run_is_clipped_to_its_own_norm():
    jobs = [make_jobs("llama", [(SGD(momentum=0.0), 0.1)], grad_clip=clip)[0] for clip in (0.0, 0.05, 100.0)]
    assert_each_as_alone(jobs)
    _, (free, clipped, _) = train_together(jobs, 3)
    assert max(np.abs(free[n] - clipped[n]).max() for n in free) > 1e-3


def test_both_modes_of_adamw_are_one_program():
    modes = [(AdamWOptimiser(mode=mode).with_mode(mode), 0.003) for mode in ("lora", "from_scratch")]
    assert program_difference([job.plan for job in make_jobs("llama", modes)]) == ""
    assert_each_as_alone(make_jobs("llama", modes))


def test_a_run_that_diverges_does_not_affect_others():
    jobs = make_jobs("gpt2", [(SGD(momentum=0.0), 0.01), (SGD(momentum=0.0), 1e9), (SGD(momentum=0.0), 0.02)])
    stack_losses, snapshots = train_together(jobs, 8)
    assert not np.isfinite(stack_losses[1]).all()
    for i in (0, 2):
        losses, expected = train_alone(jobs[i], 8)
        np.testing.assert_allclose(stack_losses[i], losses, rtol=1e-5)
        for name, values in expected.items():
            np.testing.assert_allclose(snapshots[i][name], values, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("optimiser", [AdamWOptimiser(mode="lora"), SGD()], ids=["fused", "formula"])
def test_a_nonfinite_step_is_skipped_only_by_runs_with_skip_nonfinite(optimiser):
    jobs = make_jobs("llama", [(optimiser, 0.01)] * 3, skip_nonfinite=True)
    jobs[2].plan = dataclasses.replace(jobs[2].plan, skip_nonfinite=False)
    stack, sessions = build_stack(jobs, ENGINE)
    for session in sessions[1:]:
        bad = session.snapshot()
        bad["output_norm.weight"][:] = np.nan
        session.restore(bad)
    before = [session.snapshot() for session in sessions]
    assert [np.isfinite(metrics).all() for metrics in take_all(stack, jobs, 0)] == [True, False, False]

    def unchanged(i):
        same = (np.array_equal(before[i][n], sessions[i].download(n), equal_nan=True) for n in names)
        return list(same)

    names = [t.name for t in jobs[0].plan.trainable]
    assert not any(unchanged(0))
    assert all(unchanged(1))
    assert not all(unchanged(2))


# -- runs that begin and end independently -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["adamw", "muon", "sgd_momentum"])
def test_the_other_runs_of_a_stack_continue_when_one_ends(name):
    jobs = make_jobs("llama", [*OPTIMISERS[name], OPTIMISERS[name][0]])
    stack, sessions = build_stack(jobs, EXACT)
    lengths = {0: 12, 1: 4, len(jobs) - 1: 7} if len(jobs) > 2 else {0: 12, 1: 4}
    losses = [[] for _ in jobs]
    for step in range(12):
        active = [i for i in range(len(jobs)) if step < lengths.get(i, 12)]
        waits = begin(stack, jobs, dict.fromkeys(active, step))
        for i, wait in zip(active, waits, strict=True):
            losses[i].append(wait())
        for i in active:
            if step + 1 == lengths.get(i):
                theirs = train_alone(jobs[i], step + 1, EXACT)[1]
                for tensor, values in sessions[i].snapshot().items():
                    np.testing.assert_allclose(values, theirs[tensor], atol=1e-11, err_msg=tensor)
                sessions[i].close()
    for job, ours, i in zip(jobs, losses, range(len(jobs)), strict=True):
        theirs, _ = train_alone(job, lengths.get(i, 12), EXACT)
        np.testing.assert_allclose(ours, theirs, rtol=1e-11)


def test_a_session_of_a_stack_evaluates_its_own_run():
    jobs = make_jobs("llama", ADAMW)
    stack, sessions = build_stack(jobs, EXACT)
    waits = begin_all(stack, jobs, 0)
    held_out = batches(3, 9).batch(0)
    for job, session in zip(jobs, sessions, strict=True):  # the step is taken even before its metrics are waited for
        with build_sessions([EXACT.realize(job.plan)])[0] as session_alone:
            job.step(session_alone, 0)
            assert session.evaluate([held_out]) == pytest.approx(session_alone.evaluate([held_out]), rel=1e-11)
            np.testing.assert_allclose(session.logits(held_out), session_alone.logits(held_out), atol=1e-6)
            ids = held_out["tokens"][0]
            np.testing.assert_allclose(session.decoder().feed(ids), session_alone.decoder().feed(ids), atol=1e-6)
            for name, gradient in session_alone.gradients(held_out).items():
                np.testing.assert_allclose(session.gradients(held_out)[name], gradient, atol=1e-7)
    assert len({wait() for wait in waits}) == len(jobs)


def test_an_evaluation_without_weights_raises_and_the_others_have_their_losses():
    jobs = make_jobs("llama", ADAMW)
    stack, _ = build_stack(jobs, EXACT)
    held_out = [[], [batches(3, 9).batch(k) for k in range(2)], [batches(3, 9).batch(0)]]
    waits = stack.losses(dict(enumerate(held_out)))
    with pytest.raises(BadBatch, match="got 0"):
        waits[0]()
    for i, (job, batches_of_job) in enumerate(zip(jobs[1:], held_out[1:], strict=True), 1):
        with build_sessions([EXACT.realize(job.plan)])[0] as session_alone:
            assert waits[i]() == pytest.approx(session_alone.evaluate(batches_of_job), rel=1e-12)


def test_a_run_trained_alone_can_continue_in_a_stack():
    jobs = make_jobs("llama", [(Muon(), 0.01), (Muon(momentum=0.9), 0.003)])
    expected, _ = train_alone(jobs[1], 10)
    _, snapshot = train_alone(jobs[1], 6)
    stack, sessions = build_stack(jobs, ENGINE)
    sessions[1].restore(snapshot)
    for step in range(4):  # at different steps
        waits = begin(stack, jobs, {0: step, 1: 6 + step})
        assert waits[1]().loss == pytest.approx(expected[6 + step, 0], rel=1e-5)
    theirs = train_alone(jobs[0], 4)[1]
    assert all(np.allclose(values, theirs[name], atol=1e-6) for name, values in sessions[0].snapshot().items())


def test_a_snapshot_reuses_an_earlier_one_and_holds_only_its_own_run():
    _, sessions = build_stack(make_jobs("llama", ADAMW), ENGINE)
    first = sessions[1].snapshot()
    arrays = {name: first[name] for name in first}
    again = sessions[1].snapshot(first)
    assert all(again[name] is arrays[name] for name in arrays)
    host_vectors = [
        *first._host_vectors.values()
    ]  # its weights and AdamW's two moments: from a GPU each is a copy of its own
    assert len(host_vectors) == 3 and sum(x.nbytes for x in host_vectors) < 1.1 * sum(x.nbytes for x in arrays.values())


def test_after_a_step_that_fails_runs_can_take_another_step(monkeypatch):
    jobs = make_jobs("llama", ADAMW)
    stack, _ = build_stack(jobs, ENGINE)
    with monkeypatch.context() as patch:
        patch.setattr("toyexp_torch.stacks.step.StackedOps.attention", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            begin_all(stack, jobs, 0)
    assert np.isfinite(take_all(stack, jobs, 0)).all()


# -- training loops on a stack -----------------------------------------------------------------------------------------


def test_loops_on_a_stack_report_the_same_events_as_alone(tmp_path, monkeypatch):
    """The runs fail, are stopped, have fewer steps, or evaluate more often."""
    jobs = make_jobs("llama", [(SGD(), 0.03), (SGD(), 1e9), (SGD(momentum=0.5), 0.1), (SGD(), 0.01), (SGD(), 0.02)])
    schedules = [(9, 3, 0), (9, 0, 0), (9, 4, 5), (4, 2, 0), (9, 0, 0)]
    stack, sessions = build_stack(jobs, EXACT)
    row_counts, step = [], StackedStep.__call__

    def count_steps(self, micros, numbers, idle=None):
        row_counts.append(len(numbers[0]))
        return step(self, micros, numbers, idle)

    monkeypatch.setattr(StackedStep, "__call__", count_steps)
    loops = [
        make_training(job, s, tmp_path, *schedule) for job, s, schedule in zip(jobs, sessions, schedules, strict=True)
    ]
    ends = drive([loop.requests() for _, loop in loops], stack)
    assert isinstance(ends[1], RunFailed)
    assert [getattr(end, "reason", None) for end in ends] == ["completed", None, "aborted", "completed", "completed"]
    steps_until_error = len(loops[1][0].steps)
    assert row_counts == [sum(n >= i for n in (9, steps_until_error, 5, 4, 9)) for i in range(1, 10)]
    for job, schedule, (ours, _), end in zip(jobs, schedules, loops, ends, strict=True):
        with build_sessions([EXACT.realize(job.plan)])[0] as session:
            theirs, loop = make_training(job, session, tmp_path, *schedule)
            if isinstance(end, RunFailed):
                with pytest.raises(RunFailed) as error:
                    loop.train()
                error_alone, error_in_stack = (re.sub(r"\d+(\.\d+)?", "#", str(e)) for e in (error.value, end))
                assert (
                    error_alone == error_in_stack
                )  # except for losses above 1e12, whose last digits depend on the order of sums
            else:
                loop.train()
        # Of a run that diverges, later steps amplify the last digits, which depend on the order of sums, so on the CPU.
        count = 1 if isinstance(end, RunFailed) else len(ours.steps)
        assert len(ours.steps) == len(theirs.steps)
        np.testing.assert_allclose(ours.steps[:count], theirs.steps[:count], rtol=1e-9)
        np.testing.assert_allclose(np.reshape(ours.evals, (-1, 2)), np.reshape(theirs.evals, (-1, 2)), rtol=1e-9)


def test_the_tracebacks_of_loops_that_fail_together_do_not_accumulate(tmp_path, monkeypatch):
    jobs = make_jobs("llama", [(SGD(), 0.03)] * 6)
    stack, sessions = build_stack(jobs, EXACT)
    loops = [make_training(job, s, tmp_path, 2, 1, 0)[1].requests() for job, s in zip(jobs, sessions, strict=True)]
    monkeypatch.setattr("toyexp_torch.stacks.step.StackedOps.attention", lambda *_, **__: 1 / 0)
    ends = drive(loops, stack)
    # With the ways of all six it would be 131 lines.
    lengths = {len("".join(traceback.format_exception(end)).splitlines()) for end in ends}
    assert all("ZeroDivisionError" in str(end) for end in ends) and max(lengths) < 110, (
        lengths
    )  # 131 with the ways of all six


# -- plans that cannot be stacked --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second", "difference"),
    [
        (plan("llama"), plan("gpt2"), "model is Llama and GPT2"),
        (plan("llama"), plan("llama_all"), "model.head_dim is 0 and 12"),
        (plan("llama", rows=4), plan("llama", rows=2), "rows is 4 and 2"),
        (plan("llama", rows=2), plan("llama", rows=2, accumulate=2), "accumulate is 1 and 2"),
        (apply_optimiser(plan("llama"), SGD(), 0.1), apply_optimiser(plan("llama"), Lion(), 0.1), "another formula"),
        (apply_optimiser(plan("llama"), SGD(), 0.1),
         apply_optimiser(plan("llama"), SGD(nesterov=True), 0.1), "another formula"),
        (apply_optimiser(plan("llama"), Adafactor(), 0.1),
         apply_optimiser(plan("llama"), Adafactor(clip=2.0), 0.1), "another f"),
        (apply_optimiser(plan("llama"), Muon(), 0.1),
         apply_optimiser(plan("llama"), AdamWOptimiser(mode="lora"), 0.1), "groups"),
        (plan("llama"), apply_optimiser(plan("llama"), SGD(groups={"output*": {"frozen": True}}), 0.1), "tensors"),
    ],
)  # fmt: skip
def test_plans_of_different_programs_are_rejected_with_their_difference(first, second, difference):
    with pytest.raises(UserError, match=difference):
        ENGINE.realize_stack([first, second])


@pytest.mark.parametrize("setting", [{"compile": True}, {"recompute": True}, {"packed": True}])
def test_engine_settings_without_support_for_stacks_are_rejected(setting):
    engine = dataclasses.replace(ENGINE, **setting)
    with pytest.raises(UserError, match=f"engine.{next(iter(setting))}="):
        engine.realize_stack([plan("llama"), plan("llama", seed=1)])


def test_a_model_with_data_dependent_control_flow_is_rejected():
    class Deciding(Llama):
        def forward(self, ops, p, batch):
            x = super().forward(ops, p, batch)
            return ops.scale(x, 2.0) if float(p["output_norm.weight"].sum()) > 0 else x

    settings = vars(plan("llama").model)
    deciding = dataclasses.replace(plan("llama"), model=Deciding(**settings))
    with pytest.raises(UserError, match="model=llama: cannot be trained in a stack"):
        ENGINE.realize_stack([deciding, deciding])


def test_an_engine_without_stacks_rejects_them():
    with pytest.raises(UserError, match="engine=ggml: does not support stacked runs"):
        GGMLCPU().realize_stack([plan("llama")] * 2)
