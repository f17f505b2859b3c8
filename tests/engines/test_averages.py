"""optim.ema: evaluations and exports use averaged weights, training does not, on every engine."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from faults import BOOK, TEXT, words
from multi_device import OPTIMISERS
from stacks import build_stack, make_jobs, take_all
from tiny import batches, plan, replace_initial_values

from toyexp.cli.main import main
from toyexp.formats.gguf.read import GGUFFile
from toyexp.interfaces.averaging import Averaged
from toyexp.interfaces.plan import apply_optimiser
from toyexp.interfaces.snapshot import average_weights
from toyexp_ggml.engines import GGMLCPU, GGMLMetal
from toyexp_optimisers.adamw import AdamWOptimiser
from toyexp_optimisers.sgd import SGD
from toyexp_torch.engines import TorchCPU

ENGINES = {"cpu": TorchCPU(threads=1), "ggml": GGMLCPU(threads=1), "metal": GGMLMetal(emulate=True)}
LR, EMA = 0.01, 0.8


def build_session(engine, the_plan):
    session = ENGINES[engine].realize(the_plan)
    session.build()
    return session


def make_plan(optimiser, model="llama", **settings):
    return apply_optimiser(plan(model, **settings), optimiser, LR)


def train(session, steps, first=0, record=None):
    for step in range(first, first + steps):
        session.step(batches().batch(step), session.plan.numbers(step, LR))
        if record is not None:
            record.append({t.name: session.snapshot()[t.name] for t in session.plan.trainable})


def weigh(history):
    """Return the moving average with bias correction as one weighted sum in float64."""
    weights = np.array([(1 - EMA) * EMA**i for i in range(len(history))])[::-1]
    weights /= 1 - EMA ** len(history)
    return {
        name: sum(w * x[name].astype(np.float64) for w, x in zip(weights, history, strict=True)) for name in history[0]
    }


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", OPTIMISERS)
def test_the_average_is_the_weighted_sum_of_all_weights(name, engine):
    """And training itself is that without an average."""
    optimiser = replace(OPTIMISERS[name], weight_decay=0.1)
    history, expected = [], []
    with build_session(engine, make_plan(optimiser)) as usual:
        train(usual, 6, record=expected)
    with build_session(engine, make_plan(replace(optimiser, ema=EMA))) as session:
        for step in range(6):
            train(session, 1, step, history)
            for tensor, values in weigh(history).items():
                np.testing.assert_allclose(session.download(tensor), values, rtol=1e-6, atol=1e-7, err_msg=tensor)
    for tensor, values in expected[-1].items():
        np.testing.assert_allclose(history[-1][tensor], values, rtol=1e-5, atol=5e-5, err_msg=tensor)


@pytest.mark.parametrize("engine", ENGINES)
def test_all_results_of_a_session_use_the_average_and_steps_do_not(engine):
    """Evaluations in between change no bit of the training."""
    the_plan, batch = make_plan(SGD(ema=EMA)), batches().batch(50)
    with build_session(engine, the_plan) as alone, build_session(engine, the_plan) as session:
        first = session.evaluate([batch])
        assert first == alone.evaluate([batch])  # before the first step: of the initial weights
        train(alone, 5)
        for step in range(5):
            train(session, 1, step)
            loss, logits = session.evaluate([batch]), session.logits(batch)
            average = {t.name: session.download(t.name) for t in the_plan.trainable}
            next_logits = session.decoder().feed(batch["tokens"][0])
            gradients = session.gradients(batch)
        expected, arrays = alone.snapshot(), session.snapshot()
        assert all(np.array_equal(expected[n], arrays[n]) for n in expected)
    for tensor, values in average_weights(arrays).items():
        np.testing.assert_allclose(average[tensor], values, rtol=1e-6)
        assert np.abs(values - arrays[tensor]).max() > 1e-5
    averaged, raw = (replace_initial_values(plan("llama"), x) for x in (average, arrays))
    with build_session(engine, averaged) as reference, build_session(engine, raw) as trained:
        assert loss == pytest.approx(reference.evaluate([batch]), rel=1e-6)
        np.testing.assert_allclose(logits, reference.logits(batch), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(next_logits, reference.logits(batch)[0, -1], rtol=1e-4, atol=1e-5)
        for tensor, values in trained.gradients(batch).items():
            np.testing.assert_allclose(gradients[tensor], values, rtol=1e-4, atol=1e-6)


def test_a_snapshot_moves_to_another_engine_with_its_average():
    the_plan, batch = make_plan(SGD(ema=EMA)), batches().batch(50)
    with build_session("cpu", the_plan) as first, build_session("ggml", the_plan) as second:
        train(first, 3)
        first.evaluate([batch])
        second.evaluate([batch])
        second.restore(first.snapshot())
        assert second.evaluate([batch]) == pytest.approx(first.evaluate([batch]), rel=1e-6)
        train(first, 2, 3)
        train(second, 2, 3)
        assert second.evaluate([batch]) == pytest.approx(first.evaluate([batch]), rel=1e-5)


def test_a_float64_session_gets_its_weights_back_exactly():
    the_plan = make_plan(AdamWOptimiser(mode="lora", ema=EMA))
    with TorchCPU(threads=1, dtype="float64").realize(the_plan) as session:
        session.build()
        train(session, 3)
        before = {name: array.copy() for name, array in session.snapshot().items()}
        session.evaluate([batches().batch(9)])
        after = session.snapshot()
    assert all(before[n].dtype == np.float64 and np.array_equal(before[n], after[n]) for n in before)


def test_runs_of_a_stack_evaluate_their_own_averages():
    jobs = make_jobs("llama", [(SGD(ema=0.5), 0.1), (SGD(ema=0.9), 0.1), (SGD(ema=0.7), 0.03)])
    stack, sessions = build_stack(jobs, TorchCPU(threads=1, dtype="float64"))
    held_out = [batches().batch(50)]
    for step in range(4):
        take_all(stack, jobs, step)
        losses = {row: wait() for row, wait in stack.losses(dict.fromkeys(range(3), held_out)).items()}
    for row, job in enumerate(jobs):
        with TorchCPU(threads=1, dtype="float64").realize(job.plan) as alone:
            alone.build()
            for step in range(4):
                job.step(alone, step)
            assert losses[row] == pytest.approx(alone.evaluate(held_out), rel=1e-12)
            assert alone.evaluate(held_out) == pytest.approx(sessions[row].evaluate(held_out), rel=1e-12)
    for session in sessions:
        session.close()


def test_a_schedule_scales_the_settings_of_the_averaged_rule():
    (group, *_) = make_plan(SGD(ema=EMA)).updates
    assert isinstance(group.rule, Averaged) and group.scalable == {"momentum", "weight_decay"}
    halved = group.scale_rule({"momentum": 0.5})
    assert (halved.rule.momentum, halved.decay, group.base_value("momentum")) == (0.45, EMA, 0.9)
    assert group.numbers(3, LR, {"momentum": 0.5}).tolist()[-1] == group.numbers(3, LR).tolist()[-1]


def read_weights(directory):
    with GGUFFile(directory / "model.gguf") as file:
        return {name: file.read(name) for name in file.tensors}


@pytest.mark.parametrize("engine", ["cpu", "ggml"])
def test_a_resumed_run_has_the_average_of_an_uninterrupted_run(engine, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("book.txt").write_text(TEXT)
    settings = [*words("scratch", "llama", engine), "optim.ema=0.9", "eval_every=1", "checkpoint_every=3"]
    assert main([*settings, "callbacks=[constant,gguf_export]", "steps=6", "hydra.run.dir=whole"]) == 0, (
        capsys.readouterr().err
    )
    assert main([*settings, "callbacks=[constant,gguf_export]", "steps=3", "hydra.run.dir=parts"]) == 0
    assert main(["resume=parts", "steps=6"]) == 0, capsys.readouterr().err
    uninterrupted, resumed = read_weights(tmp_path / "whole"), read_weights(tmp_path / "parts")
    assert all(np.array_equal(uninterrupted[name], resumed[name]) for name in uninterrupted)


@pytest.mark.parametrize("best", [False, True])
def test_files_and_checkpoints_hold_the_average(best, tmp_path, monkeypatch, capsys):
    """The rate is so high that the held-out loss also rises, and the best step is not the last."""
    monkeypatch.chdir(tmp_path)
    Path("book.txt").write_text(TEXT)
    settings = [*words("scratch", "llama", "ggml"), "optim.ema=0.7", "lr=1.0", "eval_every=1", "checkpoint_every=12"]
    settings += ["callbacks=[constant,events,gguf_export]", *(["checkpoint_best=loss"] if best else [])]
    assert main([*settings, "hydra.run.dir=run"]) == 0, capsys.readouterr().err
    assert "averaged weights (optim.ema=0.7)" in capsys.readouterr().out
    events = [json.loads(line) for line in Path("run/events.jsonl").read_text().splitlines()]
    losses = {f"{e['step']}": e["loss"] for e in events if e["kind"] == "eval"}
    paths = {path.name.removeprefix("step-"): path for path in Path("run/checkpoints").glob("step-*")}
    step = min(list(losses)[1:], key=losses.get) if best else "12"
    assert not best or step != "12"
    for name, path in [*paths.items(), (step, "run/model.gguf")]:
        data = [*BOOK, "data.eval_batches=8", "batch_size=4"]
        assert main(["eval", str(path), *data, "engine=ggml", "--json"]) == 0, capsys.readouterr().err
        assert json.loads(capsys.readouterr().out)["loss"] == pytest.approx(losses[name], rel=1e-5), path


@pytest.mark.parametrize("value", ["1", "-0.1"])
def test_a_decay_outside_its_range_is_rejected(value, capsys):
    assert main([f"optim.ema={value}", "steps=1"]) == 2
    assert f"optim.ema={float(value)}: must be at least 0 and below 1" in capsys.readouterr().err
