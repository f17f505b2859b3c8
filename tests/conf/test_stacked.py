"""Stacked jobs have the same results as jobs trained one at a time, and a failing job does not affect the others."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml

from toyexp.base.errors import RunFailed
from toyexp.base.signals import CommonSignals, Interrupted
from toyexp.base.threads import CORES_VARIABLE
from toyexp.cli.main import main
from toyexp.config.request import Request
from toyexp.config.top_level import Sweep
from toyexp.formats.gguf.read import GGUFFile
from toyexp.interfaces.data import share_open_data
from toyexp.sweeps.combinations import REPORTS, STACK
from toyexp.sweeps.directory import Job, JobExit, LaunchSpec
from toyexp.sweeps.job_configs import JobConfigs
from toyexp.sweeps.launchers import stack_process, stacks
from toyexp.sweeps.launchers.job_process import Stop
from toyexp.sweeps.launchers.stack_process import TaggedStream
from toyexp.sweeps.launchers.stacks import Stacks, advice, deal_jobs
from toyexp.sweeps.watch import Watch
from toyexp.training.experiment import prepare
from toyexp_torch.engines import TorchCPU

from ..support.tiny import VOCAB, write_base

STACKED = "sweep.launcher=stacked"
TINY = ["model.n_layers=1", "model.d_model=16", "model.n_heads=2", "model.d_ff=24", "model.context=12"]
QUICK = ["engine=cpu", "engine.threads=1", "data=random", *TINY, "batch_size=2"]

# Experiments with different shapes, chosen by name in a sweep.
PRESETS = {
    "gpt2": ["override /model: gpt2", "override /data: random"],
    "vit": ["override /model: vit", "override /data: digits", "override /recipe: vit_tiny"],
    "lora2": ["override /recipe: lora", "override /data: random"],
    "lora4": ["override /recipe: lora", "override /data: random"],
}
OWN = {
    "gpt2": {"model": {"n_layers": 1, "d_model": 16, "n_heads": 2, "d_ff": 24, "context": 12}},
    "vit": {"model": {"n_layers": 1, "d_model": 16, "n_heads": 2, "d_ff": 24}},
    "lora2": {"model": {"context": 12}, "data": {"vocab": VOCAB}, "recipe": {"rank": 2, "base": "base.gguf"}},
    "lora4": {"model": {"context": 12}, "data": {"vocab": VOCAB}, "recipe": {"rank": 4, "base": "base.gguf"}},
}

MISHAP = """
import os, signal, time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from toyexp import Callback, hookimpl
from toyexp_torch.engines import TorchCPU


@hookimpl
def register_callbacks(register):
    register(Mishap)


@hookimpl
def register_engines(register):
    register(Pretended)


@dataclass
class Pretended(TorchCPU):
    "Claims to use a GPU."

    name: ClassVar[str] = "pretended"

    def gpus(self):
        return 1

    def check(self):
        return f"{super().check()} on {os.environ['CUDA_VISIBLE_DEVICES']}"


@dataclass(eq=False)
class Mishap(Callback):
    "Fails in a way that depends on the seed of its run."

    name: ClassVar[str] = "mishap"
    kills: bool = True

    @hookimpl
    def on_step(self, run, step):
        print(f"prints {run.seed}")
        if Path("slow").exists() and step == 2:
            Path("asleep").touch()
            time.sleep(40)
        if Path("silent").exists():
            os._exit(0)
        if run.seed == 1 and step == 5:
            raise ZeroDivisionError("on purpose")
        if run.seed == 3 and step == 17 and self.kills and not Path("mended").exists():
            os.kill(os.getpid(), signal.SIGKILL)

    @hookimpl
    def stop_reason(self, run, step):
        return "enough" if run.seed == 2 and step == 7 else None
"""


def events(run, kind=None):
    lines = [json.loads(line) for line in (Path(run) / "events.jsonl").read_text().splitlines()]
    return [line for line in lines if kind is None or line["kind"] == kind]


def state(folder):
    return json.loads((Path(folder) / "sweep.json").read_text())["jobs"]


def statuses(folder):
    return [job["status"] for job in state(folder)]


def runs(folder):
    """Return the run directories of the jobs, in order."""
    return [Path(folder) / job["directory"] for job in state(folder)]


def has_stepped(file):
    return '"step"' in file.read_text()


def assert_same_steps(first, second):
    """Check that two runs took the same steps, up to float32 rounding over 30 steps.

    Gradient norms have a larger tolerance: AdamW amplifies the rounding of gradients near zero.
    """
    for name, tolerance in (("step", 0), ("loss", 1e-5), ("lr", 0), ("grad_norm", 1e-3)):
        a, b = (np.array([e[name] for e in events(run, "step")], float) for run in (first, second))  # null becomes NaN
        np.testing.assert_allclose(a, b, rtol=tolerance, err_msg=f"{first} {name}")


@pytest.fixture(scope="module", autouse=True)
def _working_dir(tmp_path_factory):
    """Create a working directory with experiments and a base for adapters."""
    here = tmp_path_factory.mktemp("stacked")
    (here / "wrong_by_seed.py").write_text(MISHAP)
    for name, defaults in PRESETS.items():
        path = here / "own" / "experiment" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        text = yaml.safe_dump({"defaults": [dict([line.split(": ")]) for line in defaults], **OWN[name], "name": name})
        path.write_text(f"# @package _global_\n{text}")
    write_base(here / "base.gguf", "llama")
    before = Path.cwd()
    os.chdir(here)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CORES_VARIABLE, "1")  # one process per core
        yield
    os.chdir(before)


@pytest.fixture(scope="module")
def run_pairs():
    """Run 16 jobs stacked and one at a time: seeds, lr, decay and optimisers; runs with lr=1e9 fail."""
    words = [*QUICK, "steps=12", "eval_every=0", "callbacks=[events,cosine]", "seed=0,1", "lr=1e-2,1e9",
             "optim.weight_decay=0,0.1", "optim=adamw,sgd", "optim.grad_clip=0"]  # fmt: skip
    assert main(["-m", *words, STACKED, "hydra.sweep.dir=together"]) == 1
    assert main(["-m", *words, "sweep.isolate=false", "hydra.sweep.dir=alone"]) == 1
    return [*zip(runs("together"), runs("alone"), strict=True)]


@pytest.fixture(scope="module")
def shape_pairs():
    """Run four experiments with two seeds and default callbacks, stacked and one at a time."""
    words = ["--config-dir", "own", "experiment=gpt2,vit,lora2,lora4", "seed=0,1", "engine=cpu", "engine.threads=1",
             "batch_size=2", "steps=12", "eval_every=6"]  # fmt: skip
    assert main(["-m", *words, STACKED, "hydra.sweep.dir=shapes"]) == 0
    assert main(["-m", *words, "sweep.isolate=false", "hydra.sweep.dir=shapes-alone"]) == 0
    return [*zip(runs("shapes"), runs("shapes-alone"), strict=True)]


# -- results of the jobs ----------------------------------------------------------------------------------------------


def test_16_stacked_jobs_take_the_same_steps_as_alone(run_pairs):
    stacked = {run: events(run, "run_start")[0]["backend"].get("stacked") for run, _ in run_pairs}
    assert set(stacked.values()) == {8}
    for together, alone in run_pairs:
        assert_same_steps(together, alone)


def test_a_failing_stacked_job_fails_as_alone_and_does_not_affect_others(run_pairs):
    actual, expected = state("together"), state("alone")
    assert [job["status"] for job in actual] == [job["status"] for job in expected]
    broken = [job["number"] for job in actual if job["status"] == "failed"]
    hopeless = [job["number"] for job in actual if "lr=1000000000.0" in job["overrides"]]
    # Whether a loss of 1e30 becomes infinite in time depends on the order of sums, so on the CPU.
    assert {*broken} <= {*hopeless} and len(broken) > len(hopeless) / 2
    for number in broken:
        assert actual[number]["error"].split(";")[0] == expected[number]["error"].split(";")[0]


def test_jobs_of_other_shapes_form_other_stacks_with_the_same_results_as_alone(shape_pairs):
    """Other models, data and adapter ranks need other stacks. Files and events match those of jobs trained alone."""
    for together, alone in shape_pairs:
        assert events(together, "run_start")[0]["backend"]["stacked"] == 2
        assert_same_steps(together, alone)
        a, b = events(together), events(alone)
        assert [(e["kind"], sorted(e)) for e in a] == [(e["kind"], sorted(e)) for e in b]
        losses = [[e["loss"] for e in run_events if e["kind"] == "eval"] for run_events in (a, b)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
        assert (together / "config.yaml").read_text() == (alone / "config.yaml").read_text()
        assert {p.name for p in together.iterdir()} == {p.name for p in alone.iterdir()}
        models = list(alone.glob("*.gguf"))
        assert models
        for path in models:
            with GGUFFile(together / path.name) as actual, GGUFFile(path) as expected:
                assert actual.tensors.keys() == expected.tensors.keys()
                # The gradient of a key bias is only rounding, which AdamW amplifies.
                for name in (n for n in expected.tensors if not n.endswith("attn_k.bias")):
                    np.testing.assert_allclose(actual.read(name), expected.read(name), atol=1e-5, err_msg=name)


def test_each_stacked_job_logs_only_its_own_lines(shape_pairs):
    for together, alone in shape_pairs:
        actual, expected = (
            [line.split(" ", 3)[3] for line in (run / "log.txt").read_text().splitlines()] for run in (together, alone)
        )
        assert [line for line in actual if "busy" not in line] == [line for line in expected if "busy" not in line]


# -- failures and signals ---------------------------------------------------------------------------------------------


def test_a_killed_stack_resumes_its_unfinished_jobs(capfd):
    words = ["plugins=[wrong_by_seed]", *QUICK, "steps=30", "eval_every=0", "checkpoint_every=6", "seed=0,1,2,3,4"]
    words += ["callbacks=[events,cosine,mishap]"]
    assert main(["-m", *words, STACKED, "hydra.sweep.dir=hurt"]) == 1
    assert statuses("hurt") == ["killed", "failed", "completed", "killed", "killed"]
    err = capfd.readouterr().err
    assert "[4] prints 4" in Path("hurt/logs/stack-0.log").read_text() and "on purpose" in state("hurt")[1]["error"]
    assert err.count("killed by SIGKILL") == 3
    Path("mended").touch()
    assert main(["sweep.resume=hurt", "plugins=[wrong_by_seed]"]) == 1
    assert statuses("hurt") == ["completed", "failed", "completed", "completed", "completed"]
    assert Path("hurt/logs/stack-0.log").read_text().count("resumed from step") == 3  # from checkpoints
    assert main(["-m", *words, "sweep.isolate=false", "hydra.sweep.dir=whole"]) == 1
    actual, expected = runs("hurt"), runs("whole")
    assert len(events(actual[1], "step")) == 5 and len(events(actual[2], "step")) == 7
    for together, alone in zip(actual, expected, strict=True):
        assert_same_steps(together, alone)


def test_jobs_whose_process_exits_without_a_report_have_failed(request):
    Path("silent").touch()
    request.addfinalizer(Path("silent").unlink)
    words = ["plugins=[wrong_by_seed]", *QUICK, "steps=3", "eval_every=0", "callbacks=[mishap]", "seed=0,4"]
    assert main(["-m", *words, STACKED, "hydra.sweep.dir=silence"]) == 1
    assert [job["error"] for job in state("silence")] == ["its process ended without reporting how the job ended"] * 2


def test_ctrl_c_saves_all_stacked_jobs_and_prints_how_to_resume():
    words = ["plugins=[wrong_by_seed]", *QUICK, "steps=100000", "eval_every=0", "seed=5,6,7", "callbacks=[events]"]
    command = [sys.executable, "-m", "toyexp", "-m", *words, STACKED, "sweep.jobs=2", "hydra.sweep.dir=stopped"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            deadline = time.monotonic() + 120
            while time.monotonic() < deadline and not any(
                map(has_stepped, Path("stopped").glob("[01]-*/events.jsonl"))
            ):
                time.sleep(0.1)
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=120)
        except BaseException:
            process.kill()
            raise
    assert process.returncode == 130
    assert statuses("stopped") == ["interrupted", "interrupted", "waiting"]
    (line,) = err.splitlines()
    assert line.startswith("toyexp: interrupted by SIGINT; 0 of 3 jobs are completed; to resume: toyexp sweep.resume=")
    for run in runs("stopped")[:2]:
        last_step = events(run, "step")[-1]["step"]
        assert (run / "checkpoints" / f"step-{last_step}").is_dir()
    assert main(["resume=stopped/0-scratch-llama", "plugins=[wrong_by_seed]", f"steps={last_step + 3}"]) == 0  # alone
    assert statuses("stopped") == ["completed", "interrupted", "waiting"]


@pytest.mark.release
def test_a_second_ctrl_c_ends_the_whole_stack():
    words = ["plugins=[wrong_by_seed]", *QUICK, "steps=9", "eval_every=0", "seed=5,6,7", "callbacks=[events,mishap]"]
    command = [sys.executable, "-m", "toyexp", "-m", *words, STACKED, "sweep.jobs=3", "hydra.sweep.dir=twice"]
    Path("slow").touch()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            deadline = time.monotonic() + 120
            while time.monotonic() < deadline and not Path("asleep").exists():
                time.sleep(0.1)
            began = time.monotonic()
            for _ in range(2):
                process.send_signal(signal.SIGINT)
                time.sleep(0.5)  # simultaneous signals count as one
            _, err = process.communicate(timeout=120)
            seconds = time.monotonic() - began
        except BaseException:
            process.kill()
            raise
        finally:
            Path("slow").unlink()
    assert process.returncode == 130 and err.count("\n") == 1, err
    assert statuses("twice") == ["interrupted"] * 3
    assert seconds < 35, "a sleep of 40 s was cut short in each of them"


def test_jobs_that_cannot_be_stacked_train_one_by_one_and_the_reason_is_printed_once(capfd):
    words = ["plugins=[toyexp.testing.null]", "engine=noop", *QUICK[2:], "steps=2", "eval_every=0"]
    assert main(["-m", *words, "callbacks=[events]", "seed=0,1,2", STACKED, "hydra.sweep.dir=noop"]) == 0
    assert statuses("noop") == ["completed"] * 3
    why = "stack   jobs train one after another: engine=noop: does not support stacked runs"
    assert capfd.readouterr().out.splitlines().count(why) == 1


@pytest.mark.parametrize(
    ("engine", "cores", "expected"),
    [(["cpu"], 8, (5, 1)), (["cpu"], 2, (2, 1)), (["cpu", "engine.threads=4"], 8, (2, 4)), (["mps"], 8, (1, 8))],
)
def test_each_core_has_a_stack_process_unless_jobs_need_more_cores(monkeypatch, engine, cores, expected):
    monkeypatch.setattr(stacks, "available_cores", lambda: cores)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    name, *more = engine
    words = [f"engine={name}", *more, *QUICK[2:]]
    jobs = [Job(number, [f"seed={number}"]) for number in range(5)]
    ahead = JobConfigs(Request.parse(words))
    assert Stacks(Sweep(launcher="stacked"), jobs, len(jobs), ahead).share[:2] == expected


def test_each_device_has_its_own_stack_process(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,7")
    words = ["plugins=[wrong_by_seed]", *QUICK, "engine=pretended", "steps=3", "eval_every=0", "callbacks=[events]"]
    assert main(["-m", *words, "seed=0,1,2,3", STACKED, "hydra.sweep.dir=two"]) == 0
    seen = [events(run, "run_start")[0]["backend"] for run in runs("two")]
    devices = [facts["device"].rpartition(" ")[2] for facts in seen]
    assert sorted(devices) == ["3", "3", "7", "7"]
    assert devices[0] == devices[1] and [facts["stacked"] for facts in seen] == [2] * 4


def test_a_stacked_search_trains_one_generation_at_a_time(capfd):
    pytest.importorskip("optuna")
    words = [*QUICK, "steps=2", "eval_every=2", "callbacks=[events]"]
    search = ["lr=tag(log, interval(1e-3, 1e-1))", "sweep.search=tpe", "sweep.trials=4", "sweep.jobs=2"]
    assert main(["-m", *words, *search, STACKED, "hydra.sweep.dir=search"]) == 0
    out = capfd.readouterr().out
    assert "train together: 0, 1" in out and "train together: 2, 3" in out and "best    lr=" in out


def test_a_stacked_grid_search_trains_all_trials_together(capfd):
    words = [*QUICK, "steps=1", "eval_every=1", "callbacks=[events]", "lr=choice(1e-3,1e-2,1e-1)"]
    assert main(["-m", *words, "sweep.search=grid", STACKED, "hydra.sweep.dir=grid"]) == 0
    assert "train together: 0, 1, 2" in capfd.readouterr().out


def test_stacking_is_suggested_only_if_it_is_faster(monkeypatch):
    def stacking_hint(*words, seeds=4):
        jobs = [Job(number, [f"seed={number}", f"model.n_layers={1 + number // 4}"]) for number in range(seeds)]
        return advice(jobs, JobConfigs(Request.parse([*QUICK[2:], *words])))

    line = "could train together: sweep.launcher=stacked"
    assert stacking_hint("engine=cuda") == f"these 4 jobs {line}"
    assert stacking_hint("engine=cuda", seeds=6) == f"4 of these 6 jobs {line}"
    assert stacking_hint("engine=cpu") == stacking_hint("engine=ggml") == stacking_hint("engine=cuda", seeds=3) == ""
    assert stacking_hint("engine=cuda", "engine.devices=2") == stacking_hint("engine=cuda", "model.d_model=8192") == ""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert stacking_hint("engine=auto") == ""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert stacking_hint("engine=auto") == f"these 4 jobs {line}"


# -- size of a stack --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ready():
    request = Request.parse([*QUICK, "callbacks=[]", "eval_every=0"])
    return [prepare(request.build_config(f"seed={seed}")) for seed in range(6)]


def test_a_stack_is_as_large_as_memory_allows(ready, monkeypatch):
    each = ready[0].config.engine.stack_bytes(ready[0].plan)
    weights = 4 * sum(t.size for t in ready[0].plan.trainable)
    assert 4 * weights < each < 40 * weights
    monkeypatch.setattr(TorchCPU, "free_bytes", lambda self: 5 * each)
    jobs, words = stack_process.choose_size(ready, 10, 0)
    assert jobs == 4 and "at most 4 at once" in words
    assert stack_process.choose_size(ready, 10, 3)[0] == 3
    assert stack_process.choose_size(ready, 10, 0, shared_by=2)[0] == 2  # both stacks share the machine's memory
    with monkeypatch.context() as gpu:
        gpu.setattr(TorchCPU, "on_gpu", True)  # stacks that share a GPU disturb timing, so nothing is tried
        assert stack_process.choose_size(ready, 10**6, 0, shared_by=2)[0] == 2
    monkeypatch.setattr(TorchCPU, "free_bytes", lambda self: None)
    assert stack_process.choose_size(ready, 10, 0)[0] == 6


def test_stacks_that_share_a_device_each_count_frozen_weights(ready, monkeypatch):
    first, *others = ready[0].plan.tensors
    plan = replace(ready[0].plan, groups=(), tensors=(replace(first, trainable=False), *others))
    monkeypatch.setattr(TorchCPU, "stack_bytes", lambda self, plan: 100)
    monkeypatch.setattr(TorchCPU, "free_bytes", lambda self: 2 * (4 * first.size + 500))
    assert stack_process.choose_size([replace(one, plan=plan) for one in ready], 10, 6, shared_by=2)[0] == 4


def test_a_stack_is_no_larger_than_is_faster(ready, monkeypatch):
    def size_with_timings(**seconds):
        monkeypatch.setattr(stack_process, "_time_step", lambda runs: seconds[f"of_{len(runs)}"])
        return stack_process.choose_size(ready, 10**6, 0)

    assert size_with_timings(of_1=1.0, of_4=1.6, of_6=1.5)[0] == 6
    assert size_with_timings(of_1=1.0, of_4=1.6, of_6=3.0)[0] == 4
    jobs, words = size_with_timings(of_1=1.0, of_4=4.1, of_6=6.5)
    assert jobs == 1 and "they train one after another" in words


def test_on_a_gpu_smaller_stacks_are_only_tried_if_the_largest_gains_little(ready, monkeypatch):
    monkeypatch.setattr(TorchCPU, "on_gpu", True)
    monkeypatch.setattr(stack_process, "SIZES", (2, 4))

    def sizes_with_timings(**seconds):
        sizes = []

        def step_seconds(runs):
            sizes.append(len(runs))
            if seconds[f"of_{len(runs)}"] is None:
                raise RunFailed("out of memory")
            return seconds[f"of_{len(runs)}"]

        monkeypatch.setattr(stack_process, "_time_step", step_seconds)
        return stack_process.choose_size(ready, 10**6, 0)[0], sizes

    assert sizes_with_timings(of_1=1.0, of_6=2.4) == (6, [1, 6])
    assert sizes_with_timings(of_1=1.0, of_6=4.2, of_4=1.6, of_2=0.6) == (2, [1, 6, 4, 2])
    assert sizes_with_timings(of_1=1.0, of_6=4.2, of_4=4.0) == (6, [1, 6, 4])
    assert sizes_with_timings(of_1=1.0, of_6=None, of_4=1.6, of_2=1.0) == (4, [1, 6, 4, 2])


def test_the_step_time_of_a_stack_is_measured(ready):
    blank = [stack_process._zero_weights(prepared) for prepared in ready[:3]]
    assert 0 < stack_process._time_step(blank[:1]) < 5
    assert 0 < stack_process._time_step(blank) < 5


def test_jobs_that_probably_share_a_program_are_grouped():
    def jobs(*lists):
        return [Job(number, list(words)) for number, words in enumerate(lists)]

    mixed = jobs(("model=a", "seed=0"), ("model=b", "seed=0"), ("model=a", "seed=1"), ("model=b", "lr=1"))
    assert [[job.number for job in part] for part in deal_jobs(mixed, 1)] == [[0, 2, 1, 3]]
    assert [[job.number for job in part] for part in deal_jobs(mixed, 2)] == [[0], [2], [1], [3]]
    alike = jobs(*[(f"optim.weight_decay={n}", f"recipe.base=f{n}") for n in range(5)])
    assert [len(part) for part in deal_jobs(alike, 2)] == [3, 2]


# -- shared state -----------------------------------------------------------------------------------------------------


def test_runs_of_one_process_share_equal_data_but_no_batches():
    request = Request.parse([*QUICK, "callbacks=[]"])
    with share_open_data():
        words = "seed=0", "seed=1", "data.vocab=99"
        one, two, other = (prepare(request.build_config(word)) for word in words)
    assert one.dataset is two.dataset is not other.dataset and one.config.data is two.config.data
    assert one.batches is not two.batches and (one.batches.batch(0)["tokens"] != two.batches.batch(0)["tokens"]).any()
    assert prepare(request.build_config("seed=0")).dataset is not one.dataset


def test_each_run_gets_the_first_signal_and_the_second_is_raised():
    common = CommonSignals()
    first = common.add_run()
    common.handle(signal.SIGTERM, None)
    late = common.add_run()
    common.request_save(signal.SIGUSR1, None)
    for run in (first, late):
        assert run.is_ending() and run.count() == 1 and run.take_save_request() and not run.take_save_request()
    with pytest.raises(Interrupted) as error:
        common.handle(signal.SIGINT, None)
    assert error.value.exit_code == 130 and first.count() == 2
    assert first.final_interrupt().exit_code == 143


def test_lines_of_a_job_that_has_ended_are_not_printed(monkeypatch, tmp_path, capsys):
    """Its end may be reported before its last lines are read."""

    def run_process(spec, stop, show, poll, start):
        with open(Path(spec.environment[STACK], REPORTS), "w") as reports:
            reports.write('{"begins": [0]}\n{"ended": 0, "code": 0, "error": ""}\n')
        for line in ("[0] held-out loss 3.1 -> 2.9", "[0]         model.gguf  948 kB", "stack   of all"):
            show(line, sys.stdout)
        return JobExit(0)

    monkeypatch.setattr(stacks, "run_process", run_process)
    jobs, ended = [Job(0, ["seed=0"])], []
    launcher = Stacks(Sweep(launcher="stacked"), jobs, 1, JobConfigs(Request.parse(QUICK)))
    watch = Watch(lambda job: {}, Stop(), alone=False, total=1, verbose=False)
    spec = LaunchSpec(tmp_path / "0", tmp_path / "0.log", [], [], False)
    watch.folder = SimpleNamespace(
        launch_spec=lambda job: spec, spec=SimpleNamespace(shared_args=[]), mark_running=lambda jobs: None
    )
    launcher._train_part(watch, jobs, ended.append)
    assert ended == [(jobs[0], JobExit(0))]
    assert capsys.readouterr().out.splitlines()[1:] == ["stack   of all"]


def test_each_line_names_its_job(tmp_path):
    from toyexp.sweeps.launchers.stack_process import _tag

    with open(tmp_path / "out", "w") as file:
        stream = TaggedStream(file)
        print("nobody's", file=stream)
        token = _tag.set("[3] ")
        print("one\ntwo", file=stream)
        print("three", end="", file=stream)
        print(" and more", file=stream)
        _tag.reset(token)
    assert (tmp_path / "out").read_text() == "nobody's\n[3] one\n[3] two\n[3] three and more\n"
