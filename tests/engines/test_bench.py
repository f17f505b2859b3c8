"""The command `toyexp bench`: its report, its measurements, and the baselines that it compares engines with."""

import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
from dataclasses import asdict, replace
from types import SimpleNamespace

import numpy as np
import pytest
from drawings import svg_texts
from tiny import batches

from toyexp import AdamW, Constant, LoraAdapter, PlanTensor, Setup, Unavailable
from toyexp.base.errors import RunFailed
from toyexp.base.formatting import format_count
from toyexp.cli import bench_stepper as stepper
from toyexp.cli.bench import Report, Work, sheet, step_flops, take_turns
from toyexp.cli.bench_stepper import (
    BASELINES,
    FIGURES,
    Entry,
    Stepper,
    measure_alone,
    memory_bytes,
    reset_peak,
    warm_up,
    worker_pids,
)
from toyexp.cli.commands import COMMANDS
from toyexp.cli.main import main
from toyexp.formats.gguf.write import write_model
from toyexp.interfaces.recipe import start_session
from toyexp.testing import DataSuite, ReferenceOps, token_dataset
from toyexp.testing.null import NullSession
from toyexp_data.tokens import Random
from toyexp_models.gpt2 import GPT2
from toyexp_models.llama import Llama
from toyexp_recipes.lora import Lora
from toyexp_recipes.scratch import Scratch
from toyexp_torch.engines import TorchCPU

TINY = ["data=random", "data.vocab=32", "model.d_model=16", "model.n_layers=1", "model.context=8", "model.d_ff=24",
        "batch_size=2", "engine.threads=1"]  # fmt: skip
QUICK = ["--rounds", "1", "--steps", "1", "--no-peak"]


def run_bench(capsys, *words):
    assert main(["bench", *TINY, *QUICK, *words]) == 0
    return capsys.readouterr().out


class TestRandom(DataSuite):
    data = Random(vocab=32)


# -- the report -------------------------------------------------------------------------------------------------------


def test_the_table_has_a_line_for_every_engine(capsys):
    lines = run_bench(capsys, "engine=cpu,ggml:products=ggml", "--no-memory").splitlines()
    assert lines[0].startswith("machine  ") and lines[2] == "data     random, 32 token ids"
    titles = ["engine", "ms/step", "quartiles", "tokens/s", "GFLOP/s", "ratio"]
    assert lines[4].split() == titles
    assert [line.split()[0] for line in lines[5:7]] == ["cpu", "ggml:products=ggml"]
    assert all(len(line.split()) == len(titles) for line in lines[5:7])
    assert lines[5].split()[-1] == "1.00"
    assert lines[8].startswith("cpu                 torch ") and lines[8].endswith(", 1 thread")


def test_the_numbers_of_the_json_report_and_the_plot_agree(capsys, tmp_path):
    flags = ["--rounds=3", "--steps=2", "--no-peak", "--json", f"--plot={tmp_path / 'speed.svg'}"]
    assert main(["bench", *TINY, *flags]) == 0
    report = json.loads(capsys.readouterr().out)
    cpu, ggml = report["engines"]
    words = svg_texts(tmp_path / "speed.svg")
    assert {"tokens per second", "cpu", "ggml", f"{ggml['ratio']:.2f} times cpu"} <= {*words}
    assert any("bars: median of 3 rounds" in word for word in words)
    for engine in (cpu, ggml):
        ms = f"{1e3 * engine['seconds_per_step']:.3g} ms per step"
        assert f"{format_count(engine['tokens_per_second'])} tokens/s, {ms}" in words
    bars = sheet([cpu, ggml], "tokens", "", []).panels[0]
    assert [bar.get_width() for bar in bars.patches] == pytest.approx([e["tokens_per_second"] for e in (cpu, ggml)])
    low, high = sorted(bars.lines[1].get_xdata())
    assert (low, high) == pytest.approx([16 / seconds for seconds in reversed(cpu["quartiles"])])
    assert (cpu["name"], ggml["name"]) == ("cpu", "ggml")
    assert report["tokens_per_step"] == 2 * 8
    for engine in (cpu, ggml):
        assert len(engine["rounds"]) == 3 and engine["steps_per_round"] == 2
        assert engine["seconds_per_step"] == sorted(engine["rounds"])[1]
        low, high = engine["quartiles"]
        assert min(engine["rounds"]) <= low <= engine["seconds_per_step"] <= high <= max(engine["rounds"])
        assert engine["tokens_per_second"] == pytest.approx(16 / engine["seconds_per_step"])
        assert engine["flops_per_second"] == pytest.approx(report["flops_per_step"] / engine["seconds_per_step"])
        assert engine["seconds_per_step"] < engine["first_step_seconds"] < 120
        assert 0 < engine["beyond_import_bytes"] < engine["peak_rss_bytes"] < 2e9
    assert ggml["ratio"] == pytest.approx(cpu["seconds_per_step"] / ggml["seconds_per_step"])
    assert ggml["peak_rss_bytes"] < cpu["peak_rss_bytes"] - 50e6  # its process does not load torch
    assert cpu["device_bytes"] is None and 0 < ggml["device_bytes"] < ggml["peak_rss_bytes"]


def test_a_plot_that_cannot_be_written_is_rejected_before_measuring(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("toyexp.cli.bench.measure", None)
    for name, message in (("speed.gif", "must end in .png, .svg, .pdf"), ("none/speed.svg", "there is no directory")):
        assert main(["bench", *TINY, "--plot", str(tmp_path / name)]) == 2
        assert message in (err := capsys.readouterr().err) and err.count("\n") == 1


def test_the_share_of_the_peak_is_measured_with_large_products_in_the_same_process(capsys, monkeypatch):
    """A small model's steps are far below the peak. The report states the peak, and compares a baseline with it too."""
    monkeypatch.setattr(stepper, "SIZES", ((64, 2), (128, 4)))
    words = [word for word in QUICK if word != "--no-peak"]
    assert main(["bench", *TINY, *words, "engine=ggml:threads=1", "--no-memory", "--json"]) == 0
    (ggml,) = json.loads(capsys.readouterr().out)["engines"]
    assert ggml["share_of_peak"] == pytest.approx(ggml["flops_per_second"] / ggml["peak_flops_per_second"])
    assert 0 < ggml["share_of_peak"] < 1
    assert main(["bench", *TINY, *words, "engine=ggml", "--no-memory"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[4].split() == ["engine", "ms/step", "quartiles", "tokens/s", "GFLOP/s", "of", "peak", "ratio"]
    assert re.search(r" [\d.e-]+ % +1\.00$", lines[5])
    assert re.search(r"^ +peak speed \S+ GFLOP/s, in products of (64 x 64|128 x 128) matrices$", lines[-1])


def test_the_model_that_measures_the_peak_computes_as_many_products_as_it_counts(monkeypatch):
    """Each product doubles its input, so four give sixteen times the values."""
    model = stepper.Products(size=4, products=4)
    p = {"table": np.eye(8, 4, dtype=np.float32), "w": 2 * np.eye(4, dtype=np.float32), "out": np.eye(8, 4)}
    logits = model.forward(ReferenceOps(), p, {"tokens": np.array([[0, 1, 2, 3]])})
    np.testing.assert_array_equal(logits[0], 16 * np.eye(4, 8))


def test_the_peak_counts_the_products_of_all_devices_of_an_engine(monkeypatch):
    """Each device gets one row and all are counted: three rows for three devices, though a step has twelve."""
    monkeypatch.setattr(stepper, "SIZES", ((32, 2),))
    row_counts = []
    monkeypatch.setattr(stepper, "_median_seconds", lambda engine, plan: row_counts.append(plan.rows) or 0.5)
    monkeypatch.setattr(TorchCPU, "count", lambda self: 3)
    assert stepper.measure_peak(TorchCPU(), max_rows=12).flops_per_second == 3 * 2 * 2 * 32**3 / 0.5
    assert row_counts == [3]


def test_the_peak_is_that_of_the_fastest_size_and_sizes_after_a_slow_one_are_skipped(monkeypatch):
    monkeypatch.setattr(stepper, "SIZES", ((32, 2), (64, 2), (128, 2), (256, 2)))
    times = iter([0.001, 0.012, 1.0])  # seconds for each size: the first is the fastest, and the fourth is never tried
    monkeypatch.setattr(stepper, "_median_seconds", lambda engine, plan: next(times))
    assert stepper.measure_peak(TorchCPU(), 1) == stepper.Peak(2 * 2 * 32**3 / 0.001, 32)


def make_plan(model, rows):
    data = token_dataset(40, count=2000, seed=5)
    inputs = data.batches(model.context, rows, 0).inputs
    return Scratch().plan(model.fit(data), Setup(inputs, rows=rows))


def test_flops_agree_with_a_count_by_hand():
    # Forward, a product of [T, in] with [in, out] takes 2 T in out operations; with its gradients three times that.
    length, d, kv, ff, vocab, layers, rows = 6, 8, 4, 10, 40, 3, 2
    sizes = {"d_model": d, "n_layers": layers, "n_heads": 4, "d_ff": ff, "context": length}
    linears = 2 * length * (2 * d * d + 2 * kv * d + 3 * d * ff)
    attention = 2 * (2 * length * length * d)  # q k^T, and its softmax times v, over all heads
    output = 2 * length * d * vocab
    expected = 3 * rows * (layers * (linears + attention) + output)
    for tied in (True, False):  # looking up an embedding is not a product
        plan_of_one = make_plan(Llama(**sizes, n_kv_heads=2, tied=tied), rows)
        assert step_flops(plan_of_one) == expected
        assert step_flops(replace(plan_of_one, accumulate=3)) == 3 * expected
    linears = 2 * length * (4 * d * d + 2 * d * ff)
    expected = 3 * rows * (layers * (linears + attention) + output)
    assert step_flops(make_plan(GPT2(**sizes), rows)) == expected
    # A frozen matrix has no gradient; the two matrices of an adapter of q, of rank 2, have.
    base = make_plan(Llama(**sizes, n_kv_heads=2), rows)
    pair = [PlanTensor("blk.0.attn_q.weight.lora_a", (2, d), Constant(1)),
            PlanTensor("blk.0.attn_q.weight.lora_b", (d, 2), Constant(0))]  # fmt: skip
    plan = replace(
        base, tensors=(*(replace(t, trainable=False) for t in base.tensors), *pair), groups=(),
        adapters=(LoraAdapter("blk.0.attn_q.weight", 1.0),),
    )  # fmt: skip
    linears = 2 * length * (2 * d * d + 2 * kv * d + 3 * d * ff)
    frozen, trained = layers * linears + output, 2 * length * (2 * 2 * d)
    assert step_flops(plan) == rows * (2 * frozen + 3 * (layers * attention + trained))


# -- measuring --------------------------------------------------------------------------------------------------------


class Counter(Stepper):
    """An object whose steps only record their names."""

    note = "counts"

    def __init__(self, name="", seen=None, fails=False):
        self.name, self.seen, self.fails, self.closed = name, seen if seen is not None else [], fails, False

    def step(self, batch):
        if self.fails:
            raise RuntimeError("cannot")
        self.seen.append(self.name)

    def wait(self):
        self.seen.append(".")

    def close(self):
        self.closed = True


def test_engines_take_turns_and_each_round_begins_with_another():
    seen = []
    ready = {name: (Counter(name, seen), steps) for name, steps in (("a", 1), ("b", 2), ("c", 1))}
    seconds = take_turns(ready, [{}] * 8, rounds=4)
    assert "".join(seen) == "a.bb.c." + "bb.c.a." + "c.a.bb." + "a.bb.c."
    assert {name: len(times) for name, times in seconds.items()} == {"a": 4, "b": 4, "c": 4}


def test_seconds_are_per_step_whatever_the_number_of_steps_in_a_turn(monkeypatch):
    now = 0.0

    class Timed(Counter):
        def step(self, batch):
            nonlocal now
            now += {"a": 0.5, "b": 2.0}[self.name]

    monkeypatch.setattr("toyexp.cli.bench_stepper.time", SimpleNamespace(perf_counter=lambda: now))
    ready = {name: (Timed(name), steps) for name, steps in (("a", 7), ("b", 2))}
    assert take_turns(ready, [{}] * 8, rounds=2) == {"a": [0.5, 0.5], "b": [2.0, 2.0]}


@pytest.mark.parametrize(("seconds", "requested", "steps"), [(0.1, 0, 3), (2.0, 0, 1), (2.0, 7, 7)])
def test_a_turn_has_as_many_steps_as_fit_its_time_slice_and_at_least_one(monkeypatch, seconds, requested, steps):
    now = 0.0

    class Timed(Counter):
        def step(self, batch):
            nonlocal now
            now += seconds

    monkeypatch.setattr("toyexp.cli.bench_stepper.time", SimpleNamespace(perf_counter=lambda: now))
    assert warm_up(Timed, [{}] * 8, requested)[1] == steps


@pytest.mark.parametrize("queues_ahead", [False, True])
def test_an_engine_queues_one_step_ahead_if_it_can_and_never_two(monkeypatch, queues_ahead):
    calls = []

    def launch(session, micros, numbers):
        calls.append("launch")
        return lambda: calls.append("taken")

    monkeypatch.setattr(NullSession, "depth", 1 + queues_ahead)
    monkeypatch.setattr(NullSession, "do_launch", launch)
    prepared, open_stepper = Entry("noop", [*TINY[:-1], "plugins=[toyexp.testing.null]"], "noop").prepare()
    stepper = open_stepper()
    for k in range(3):
        stepper.step(prepared.batches.batch(k))
    expected = ["launch", *["launch", "taken"] * 2] if queues_ahead else ["launch", "taken"] * 3
    assert calls == expected
    stepper.wait()
    assert calls == expected + (["taken"] if queues_ahead else [])
    stepper.close()


def test_the_note_of_engine_auto_names_the_engine_that_it_chose():
    _, open_stepper = Entry("auto", TINY, "auto").prepare()
    stepper = open_stepper()
    stepper.close()
    assert re.match(r"cpu: torch [^,]+, 1 thread(;.*)?$", stepper.note), stepper.note


def test_a_step_that_fails_while_warming_up_closes_its_stepper():
    broken = Counter(fails=True)
    with pytest.raises(RuntimeError):
        warm_up(lambda: broken, [{}] * 8, 1)
    assert broken.closed


def test_the_memory_peak_is_measured_and_can_be_reset():
    block = np.ones(8_000_000)  # 64 MB
    with_block, _ = memory_bytes()
    del block
    present, peak = memory_bytes()
    assert peak > with_block - 1e6  # Linux counts in batches of pages
    if present < peak - 50e6:  # if the system reports current memory
        reset_peak()
        assert memory_bytes()[1] < peak - 50e6


def test_the_error_of_a_measuring_process_is_reported():
    with pytest.raises(RunFailed, match=r"odd: measuring its memory failed: .*unknown key modle; .*--no-memory"):
        measure_alone(Entry("odd", ["modle=llama"], "ggml"))


# -- the baselines ----------------------------------------------------------------------------------------------------


def load_baseline(file, name):
    spec = importlib.util.spec_from_file_location(file, BASELINES / f"{file}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return {b.name: b for b in module.BASELINES}[name]


@pytest.mark.parametrize(
    ("file", "name", "rows", "kv_heads", "tied"),
    [
        ("bare_torch", "bare torch", 3, 4, True),
        pytest.param("bare_torch", "bare torch", 3, 2, False, marks=pytest.mark.full),
        pytest.param("ggml_autodiff", "ggml autodiff", 3, 4, True, marks=pytest.mark.full),
        ("ggml_autodiff", "ggml autodiff", 1, 2, False),
    ],
)
def test_a_baseline_trains_the_same_model(file, name, rows, kv_heads, tied):
    model = Llama(d_model=32, n_layers=2, n_heads=4, n_kv_heads=kv_heads, d_ff=48, context=12, tied=tied)
    plan, data = make_plan(model, rows), batches(rows)
    adamw = replace(AdamW.for_lora(), lr=0.01)
    with start_session(Scratch(), TorchCPU(threads=1), plan) as session:
        expected = [session.step(data.batch(k), adamw.hp_for_step(k)).loss for k in range(10)]
    bare = load_baseline(file, name)(plan, adamw, TorchCPU(threads=1))
    losses = [bare.step(data.batch(k)) for k in range(10)]
    bare.close()
    np.testing.assert_allclose(losses, expected, atol=2e-4)
    assert abs(expected[-1] - expected[0]) > 0.01  # the updates are seen


@pytest.mark.parametrize("name", ["nanoGPT-style eager", pytest.param("nanoGPT-style", marks=pytest.mark.full)])
@pytest.mark.parametrize("tied", [True, False])
def test_the_nanogpt_style_loop_trains_the_same_model(name, tied):
    """Runs on the CPU, where it can be compared with an engine to the last digits."""
    plan = make_plan(GPT2(d_model=32, n_layers=2, n_heads=4, d_ff=48, context=12, tied=tied), 3)
    assert_same_losses(
        lambda adamw: load_baseline("nanogpt_style", name)(plan, adamw, TorchCPU(threads=1)), plan, Scratch()
    )


def test_pefts_loop_trains_the_same_adapters(tmp_path):
    pytest.importorskip("peft")
    model = Llama(d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=48, context=12, vocab=40)
    path = tmp_path / "base.gguf"
    write_model(path, model, {t.name: t.init.draw(t.shape, 0, t.name) for t in model.tensors()}, None, "f32")
    recipe = Lora(base=str(path), rank=2, targets=["q", "v", "down"])
    inputs = token_dataset(40, count=2000, seed=5).batches(12, 3, 0).inputs
    plan = recipe.plan(model, Setup(inputs, rows=3, grad_clip=1.0))
    assert_same_losses(lambda adamw: load_baseline("peft_lora", "PEFT")(plan, adamw, TorchCPU(threads=1)), plan, recipe)


def assert_same_losses(open_loop, plan, recipe):
    """Check that a loop has the losses of an engine, and that its updates are visible."""
    data, adamw = batches(plan.rows), replace(AdamW.for_lora(), lr=0.01)
    with start_session(recipe, TorchCPU(threads=1), plan) as session:
        expected = [session.step(data.batch(k), adamw.hp_for_step(k)).loss for k in range(10)]
    loop = open_loop(adamw)
    losses = [loop.step(data.batch(k)) for k in range(10)]
    assert loop.device_bytes() is None and "float32" in loop.note
    loop.close()
    np.testing.assert_allclose(losses, expected, atol=2e-4)
    assert abs(expected[-1] - expected[0]) > 0.005  # the updates are seen


def test_training_loops_of_other_projects_are_only_compared_on_their_own_device():
    names_by_device = {
        engine: [name for name, _ in stepper.baselines([], [engine])] for engine in ("cpu", "cuda", "mps")
    }
    assert (
        names_by_device["cuda"] == ["nanoGPT-style", "nanoGPT-style eager", "PEFT", "PEFT compiled"]
        and not names_by_device["mps"]
    )
    cpu_names = ["bare torch", "bare torch compiled", "ggml autodiff", "nanoGPT-style", "nanoGPT-style eager"]
    assert names_by_device["cpu"] == cpu_names
    overrides = ["model=gpt2", "engine.dtype=bfloat16", "engine.threads=2", "engine.tf32=true", "engine.capture=false"]
    entry = dict(stepper.baselines(overrides, ["cuda"]))["nanoGPT-style"]
    assert entry.settings == ["model=gpt2", "engine.dtype=bfloat16", "engine.tf32=true"] and entry.engine == "cuda"
    entry = dict(stepper.baselines(overrides, ["ggml"]))["nanoGPT-style"]
    assert entry.settings == ["model=gpt2", "engine.dtype=bfloat16", "engine.threads=2"] and entry.engine == "cpu"


def test_the_ggml_autodiff_baseline_rejects_grouped_heads_in_a_batch():
    with pytest.raises(Unavailable, match=r"no gradient of grouped heads in a batch: model\.n_kv_heads=model\.n_heads"):
        load_baseline("ggml_autodiff", "ggml autodiff")(make_plan(Llama(context=12), 2), AdamW.for_lora(), TorchCPU())


@pytest.mark.full
def test_baselines_that_cannot_train_the_model_are_left_out_with_the_reason(capsys):
    lines = run_bench(capsys, "model=gpt2", "engine=ggml", "--baseline", "--no-memory").splitlines()
    left_out = [line.split("  ")[0] for line in lines if "not measured: only written for a plain model=llama" in line]
    assert left_out == ["bare torch", "bare torch compiled", "ggml autodiff"]
    assert [line.split("  ")[0] for line in lines if ", 1 thread" in line][1:] == [
        "nanoGPT-style",
        "nanoGPT-style eager",
    ]


def test_a_baseline_is_a_row_of_the_report(capsys, monkeypatch, tmp_path):
    for name in ("__init__.py", "ggml_autodiff.py"):
        (tmp_path / name).write_text((BASELINES / name).read_text())
    (tmp_path / "needs_more.py").write_text("import a_module_that_nobody_has\n")
    monkeypatch.setattr(stepper, "BASELINES", tmp_path)
    report = json.loads(run_bench(capsys, "engine=ggml", "model.n_kv_heads=4", "--baseline", "--json"))
    engine, autodiff = report["engines"]
    assert (engine["name"], autodiff["name"]) == ("ggml", "ggml autodiff")
    assert autodiff["tokens_per_second"] > 0 and autodiff["beyond_import_bytes"] > 0
    assert autodiff["note"].endswith(", 1 thread")
    assert report["left_out"] == {"needs more": "No module named 'a_module_that_nobody_has'"}


def test_baselines_need_a_source_checkout(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(stepper, "BASELINES", tmp_path / "none")
    assert main(["bench", *TINY, "--baseline"]) == 2
    assert "an installed toyexp has no baselines; run bench in a checkout" in capsys.readouterr().err


# -- the command line -------------------------------------------------------------------------------------------------


def test_help_names_every_option(capsys):
    assert main(["bench", "--help"]) == 0
    text = capsys.readouterr().out
    assert all(
        f"  {flag} " in text for flag in ("--rounds", "--steps", "--baseline", "--no-peak", "--no-memory", "--json")
    )


def test_options_are_parsed_with_an_equals_sign_and_with_a_space():
    options = COMMANDS["bench"]().read(["--rounds=2", "lr=1", "--steps", "3", "--no-memory"])
    assert (options.rounds, options.steps, options.no_memory, options.json) == (2, 3, True, False)
    assert options.rest == ["lr=1"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--round", "3"], "bench --round: unknown option; did you mean --rounds?"),
        (["-m", "lr=1,2"], "bench -m: unknown option; choose one of: --baseline"),
        (["--rounds"], "--rounds needs a value, such as --rounds 7"),
        (["--rounds", "0"], "--rounds 0: must be a whole number from 1"),
        (["--steps=x"], "--steps x: must be a whole number"),
        (["--json=1"], "--json takes no value"),
        (["steps=5"], "steps=5: has no effect in bench, which chooses the steps per round; to set them: --steps 5"),
        (["fast"], "bench fast: expected key=value"),
        (["lr=1,2"], "lr=1,2: bench uses one experiment"),
        (["engine=ggml,ggml"], "names an engine twice"),
        (["engine=ggml:products"], "expected ggml:key=value"),
        (["engine=gmgl"], "did you mean ggml?"),
        (["engine=cpu,,ggml,"], "engine=cpu,,ggml,: empty name; did you mean engine=cpu,ggml?"),
        (["data=random", "data.vocab=0"], "data.vocab=0: must be at least 1"),
        (["model.d_modle=32"], "did you mean model.d_model?"),
    ],
)
def test_bad_arguments_are_rejected_in_one_line(capsys, words, expected):
    assert main(["bench", *words]) == 2
    output = capsys.readouterr()
    assert output.err.startswith("toyexp: error: ") and expected in output.err
    assert len(output.err.splitlines()) == 1 and output.out == ""


def test_memory_of_several_processes_is_their_sum_and_the_table_says_which_columns_are_sums(capsys, monkeypatch):
    """Memory beyond imports is known only for the first process; a process's current memory may shrink."""
    child = subprocess.Popen(
        [sys.executable, "-c", "held = b'1' * 300_000_000; print(flush=True); input()"], stdin=-1, stdout=-1
    )
    child.stdout.readline()
    ranks = [f"pid {pid} on {platform.node()}" for pid in (os.getpid(), child.pid)]
    entry = Entry("noop", [*TINY[:-1], "plugins=[toyexp.testing.null]"], "noop")
    figures = []
    for facts in ({}, {"devices": 2, "ranks": ranks}):
        monkeypatch.setattr(NullSession, "describe", lambda self, facts=facts: facts)
        readings = iter(
            [(900_000_000, 950_000_000), (980_000_000, 1_000_000_000)]
        )  # after the imports, after the steps
        monkeypatch.setattr(stepper, "memory_bytes", lambda readings=readings: next(readings))
        stepper.main([json.dumps(asdict(entry)), "0"])
        figures.append(json.loads(capsys.readouterr().out))
    child.communicate(b"\n")
    one, two = figures
    if sys.platform == "linux":
        assert 250e6 < two["peak_rss_bytes"] - one["peak_rss_bytes"] < 400e6
    else:
        assert two["peak_rss_bytes"] is None
    assert one["peak_rss_bytes"] == 1e9 and two["beyond_import_bytes"] == 100e6
    work = Work("m", "m", "d", "tokens", 1, 1.0)
    row = {"engine": "cpu", "note": "", "seconds_per_step": 1.0, "quartiles": (1, 1), "tokens_per_second": 1.0,
           "flops_per_second": 1.0, "ratio": 1.0, **dict.fromkeys(FIGURES, 1e6)}  # fmt: skip
    engines = [{**row, "name": "cpu", "devices": 1}, {**row, "name": "cpu:devices=2", "devices": 2}]
    lines = Report(work, engines, {}).lines()
    assert lines[-1].strip() == "peak: all 2 processes; on device and beyond import: first process"
    assert sum("processes" in line for line in lines) == 1


def test_memory_is_measured_for_worker_processes_of_this_host_only():
    host = platform.node()
    assert worker_pids([f"pid {os.getpid()} on {host}", f"pid 7 on {host}", "pid 8 on elsewhere"]) == [7]


ONCE_PLUGIN = """
import os
from dataclasses import dataclass
from typing import ClassVar
from toyexp import UserError, hookimpl
from toyexp.testing import null

@dataclass
class Once(null.NullEngine):
    '''An engine with a setting that holds for the whole process.'''
    name: ClassVar[str] = "once"
    half: bool = False
    def check(self):
        if os.environ.setdefault("ONCE_HALF", str(self.half)) != str(self.half):
            raise UserError(f"half={self.half}: already set to another value")
        return "here"

@hookimpl
def register_engines(register):
    register(Once)
"""


def test_engines_with_conflicting_process_wide_settings_are_rejected_before_measuring(capsys, monkeypatch, tmp_path):
    (tmp_path / "once_plugin.py").write_text(ONCE_PLUGIN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ONCE_HALF", "")
    monkeypatch.delenv("ONCE_HALF")
    overrides = [word for word in TINY if not word.startswith("engine.")]
    assert main(["bench", *overrides, "plugins=[once_plugin]", "engine=once,once:half=true"]) == 2
    out, err = capsys.readouterr()
    assert err == "toyexp: error: half=True: already set to another value\n" and "rounds" not in out
