"""Jobs of a sweep are forked from a process with all imports, and behave like separate processes."""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from toyexp.base.errors import UserError
from toyexp.cli.main import main
from toyexp.config import compose_cache as beforehand
from toyexp.config import schema
from toyexp.config.build import drop_hydra_keys
from toyexp.config.request import Request
from toyexp.config.schema import Source, compose_raw
from toyexp.sweeps.launchers import forking, launcher
from toyexp.sweeps.launchers.forking import ForkServer

# This plugin records the process state of a job, then changes it; the seed selects how the job ends.
TRACE = """
import atexit, ctypes, json, os, random, resource, signal, subprocess, sys, threading, time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from toyexp import Callback, hookimpl

IMPORTED = os.environ.get("GIVEN"), os.getcwd()


@hookimpl
def register_callbacks(register):
    register(Trace)


@dataclass(eq=False)
class Trace(Callback):
    "Changes process-wide state."

    name: ClassVar[str] = "trace"
    held: ClassVar[list] = []

    @hookimpl
    def on_start(self, run):
        threads = {thread.name for thread in threading.enumerate()}
        status = Path("/proc/self/status").read_text().split()
        seen = {
            "environment": dict(os.environ), "directory": os.getcwd(), "imported": IMPORTED, "held": list(self.held),
            "threads": sorted(threads), "umask": os.umask(0o22), "path": sys.path, "limit": sys.getrecursionlimit(),
            "group": os.getpgid(0) == os.getpid(), "blocked": status[status.index("SigBlk:") + 1],
            "ignored": status[status.index("SigIgn:") + 1], "caught": status[status.index("SigCgt:") + 1],
            "files": sorted(os.readlink(f"/proc/self/fd/{n}").partition(":")[0] for n in (0, 1, 2)),
            "nice": os.nice(0), "core": resource.getrlimit(resource.RLIMIT_CORE), "tty": sys.stdout.isatty(),
        }
        own = {"python": random.random(), "numpy": float(np.random.rand())}
        own["forked"] = "toyexp.sweeps.launchers.forkserver" in sys.modules
        (run.dir / "seen.json").write_text(json.dumps([seen, own]))
        os.environ["LEFT"] = os.environ.pop("GIVEN", "")
        self.held.append(run.seed)
        sys.path.append("/left")
        sys.setrecursionlimit(5000)
        os.umask(0o77)
        os.nice(1)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        random.seed(1), np.random.seed(1)
        signal.signal(signal.SIGCONT, signal.SIG_IGN)
        threading.Thread(target=time.sleep, args=(60,), name="left", daemon=True).start()
        print("a line of job", run.seed)
        self.open = open(run.dir / "left.txt", "w")
        self.open.write("left open")
        atexit.register((run.dir / "exit.txt").write_text, "at exit")
        threading.Thread(target=lambda: time.sleep(0.3) or (run.dir / "thread.txt").write_text("waited for")).start()
        os.chdir("/")

    @hookimpl
    def on_step(self, run, step):
        if run.seed == 2:
            os._exit(7)
        if run.seed == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        if run.seed == 4:
            ctypes.string_at(0)
        if run.seed == 5:
            def deeper():
                return deeper()
            deeper()
        if run.seed == 6:
            sys.exit("enough")
        if run.seed == 10:
            print("sleeps")
            time.sleep(30)
        if run.seed == 7:
            subprocess.Popen(["sleep", "100"])  # the child keeps this process's output open
"""
PLUGINS = "plugins=[toyexp.testing.null,trace]"
TINY = ["data=random", "model.n_layers=1", "model.d_model=16", "model.context=16", "steps=2", "eval_every=0",
        "checkpoint_every=0"]  # fmt: skip
QUICK = ["engine=noop", *TINY, PLUGINS, "callbacks=[events,trace]"]
forks = pytest.mark.skipif(sys.platform not in forking.PLATFORMS, reason="jobs are only forked on Linux")
SEEDS = (1, 2, 3, 4, 5, 6, 7, 8)


def entries(folder):
    return json.loads((folder / "sweep.json").read_text())["jobs"]


def read_traces(folder):
    return {entry["number"]: json.loads(path.read_text()) for entry in entries(folder)
            if (path := folder / str(entry["directory"]) / "seen.json").exists()}  # fmt: skip


@pytest.fixture(scope="module")
def sweeps(tmp_path_factory):
    """Run a sweep with forked jobs, and two of its jobs spawned."""
    root = tmp_path_factory.mktemp("forking")
    (root / "trace.py").write_text(TRACE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        patch.setenv("GIVEN", "before")
        patch.delitem(sys.modules, "trace", raising=False)
        began = time.monotonic()
        code = main(["-m", *QUICK, f"seed={','.join(map(str, SEEDS))}", "hydra.sweep.dir=forked"])
        seconds = time.monotonic() - began
        patch.setattr(launcher, "PLATFORMS", ())
        main(["-m", *QUICK, "seed=1,8", "hydra.sweep.dir=spawned"])
    return code, seconds, root / "forked", root / "spawned"


@forks
def test_a_forked_job_sees_the_same_process_state_as_a_spawned_one(sweeps):
    _, _, forked, spawned = sweeps
    first, last = (read_traces(spawned)[n] for n in (0, 1))
    assert first[0] == last[0] and not first[1]["forked"]
    traces = read_traces(forked)
    assert len(traces) == len(SEEDS)
    for values, random_values in traces.values():
        assert random_values["forked"]
        assert values == first[0]
    for kind in ("python", "numpy"):
        assert len({random_values[kind] for _, random_values in traces.values()}) == len(SEEDS)


@forks
def test_a_failing_forked_job_is_reported_and_does_not_affect_others(sweeps):
    code, seconds, folder, _ = sweeps
    assert code == 1 and seconds < 90  # a child that a job leaves for 100 s delays nothing
    told = {SEEDS[entry["number"]]: (entry["status"], entry["code"], entry["error"]) for entry in entries(folder)}
    assert [seed for seed, (status, _, _) in told.items() if status == "completed"] == [1, 7, 8]
    assert told[2][:2] == ("killed", 7) and "exit code 7" in told[2][2]
    assert told[3][:2] == ("killed", -signal.SIGKILL) and "SIGKILL" in told[3][2]
    assert told[4][:2] == ("killed", -signal.SIGSEGV) and "SIGSEGV" in told[4][2]
    assert told[5][:2] == ("failed", 1) and "RecursionError" in told[5][2]
    assert told[6][:2] == ("failed", 1) and "enough" in told[6][2]
    for number, seed in enumerate(SEEDS):
        assert f"a line of job {seed}" in (folder / "logs" / f"{number}.log").read_text()


@forks
def test_a_forked_job_flushes_files_runs_exit_handlers_and_joins_threads(sweeps):
    """Files are flushed, exit handlers have run and threads have ended."""
    for number in (0, 4):
        run = sweeps[2] / entries(sweeps[2])[number]["directory"]
        texts = [(run / f"{name}.txt").read_text() for name in ("left", "exit", "thread")]
        assert texts == ["left open", "at exit", "waited for"]


def running_fork_servers():
    """Return the pids of fork servers that this process started and that still run."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [int(n) for n in children if b"TOYEXP_FORKS=" in Path(f"/proc/{n}/environ").read_bytes()]


@forks
def test_no_fork_server_is_left_after_a_sweep(sweeps):
    assert running_fork_servers() == []


@pytest.fixture
def trace_dir(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "trace", raising=False)
    (tmp_path / "trace.py").write_text(TRACE)
    return tmp_path


@forks
def test_jobs_are_spawned_after_the_fork_server_is_killed(trace_dir, monkeypatch):
    started = []

    class Killed(ForkServer):
        def start(self, *order):
            if len(started) == 1:
                self._process.kill()
                self._process.wait()
            started.append(super().start(*order))
            return started[-1]

    monkeypatch.setattr(launcher, "ForkServer", Killed)
    assert main(["-m", *QUICK, "seed=1,8,9", "hydra.sweep.dir=s"]) == 0
    assert [own["forked"] for _, own in read_traces(trace_dir / "s").values()] == [True, False, False]


@forks
def test_the_process_of_a_stack_is_forked_with_its_files(trace_dir):
    assert main(["-m", *QUICK, "seed=1,8,9", "sweep.launcher=stacked", "hydra.sweep.dir=s"]) == 0
    assert {entry["status"] for entry in entries(trace_dir / "s")} == {"completed"}
    assert [own["forked"] for _, own in read_traces(trace_dir / "s").values()] == [True] * 3


@forks
def test_jobs_are_spawned_if_a_plugin_starts_a_thread_at_import(trace_dir):
    (trace_dir / "trace.py").write_text(
        TRACE + "\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    )
    assert main(["-m", *QUICK, "seed=1", "hydra.sweep.dir=s"]) == 0
    assert [own["forked"] for _, own in read_traces(trace_dir / "s").values()] == [False]


@forks
@pytest.mark.parametrize(("engine", "package"), [("cpu", "torch"), ("ggml", "ggml")])
def test_an_engine_loaded_before_the_fork_computes_the_same(trace_dir, engine, package):
    pytest.importorskip(package)
    words = [f"engine={engine}", *TINY, "callbacks=[events]"]
    server = ForkServer(dict(os.environ), words, lambda: False)
    try:
        with server.start([*words, "hydra.run.dir=forked"], dict(os.environ), False) as process:
            errors = process.stderr.read()
            assert process.wait(60) == 0, errors
        assert isinstance(process, forking.ForkedProcess)
    finally:
        server.close()
    assert main([*words, "hydra.run.dir=here"]) == 0
    one, other = (json.loads((trace_dir / name / "result.json").read_text()) for name in ("forked", "here"))
    assert one["train_loss"] == other["train_loss"] > 0


@forks
def test_unbuffered_output_arrives_at_once_and_a_job_with_a_killed_parent_counts_as_killed(trace_dir):
    unbuffered = {**os.environ, "PYTHONUNBUFFERED": "1"}
    server = ForkServer(unbuffered, QUICK, lambda: False)
    try:
        began = time.monotonic()
        with server.start([*QUICK, "seed=10"], unbuffered, False) as process:
            assert any(line == b"sleeps\n" for line in process.stdout) and process.poll() is None
            assert time.monotonic() - began < 30  # the job sleeps for 30 s
            parent = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[1]
            os.kill(int(parent), signal.SIGKILL)
            assert process.wait(20) == -signal.SIGKILL
            os.kill(process.pid, signal.SIGKILL)
    finally:
        server.close()


@pytest.fixture
def server():
    """Start a fork server with its own environment, and stop it with SIGSTOP before it imports anything."""
    forks = ForkServer({**os.environ, "OMP_NUM_THREADS": "3"}, ["seed=1"], lambda: False)
    forks._process.send_signal(signal.SIGSTOP)
    yield forks
    forks.close()


@forks
def test_the_fork_server_has_the_thread_limit_of_the_jobs_and_its_own_process_group(server):
    """Libraries read the number of threads when they load; only the sweep forwards Ctrl-C to jobs."""
    environment = Path(f"/proc/{server._process.pid}/environ").read_bytes().split(b"\0")
    assert b"OMP_NUM_THREADS=3" in environment
    assert os.getpgid(server._process.pid) == server._process.pid


@forks
def test_an_unresponsive_fork_server_is_killed(server):
    ending = threading.Thread(target=server.close, daemon=True)
    ending.start()
    ending.join(20)
    assert not ending.is_alive() and server._process.returncode == -signal.SIGKILL


@forks
def test_jobs_are_spawned_if_the_fork_server_is_killed_before_loading(server, monkeypatch):
    spawned = []
    monkeypatch.setattr(forking, "spawn", lambda *order: spawned.append(order))
    server._process.kill()
    server._process.wait()
    server.start(["seed=1"], {}, False)
    server.close()
    assert spawned == [(["seed=1"], {}, False)]


# -- cached compositions ----------------------------------------------------------------------------------------------

WORDS = [
    ["lr=0.1", "seed=3"],
    ["model=small", "model.n_layers=1", "lr=1e-2", "name=${model.name}-${seed}", "seed=4"],
    ["engine=ggml", "engine.threads=2", "optim=sgd", "optim.momentum=0.5", "hydra.run.dir='a b'", "hydra.job.num=3"],
    ["callbacks=[default]", "callbacks.cosine.warmup=3", "checkpoint_every=10s"],
    ["recipe=lora", "recipe.base=x.gguf", "recipe.targets=[attn_q]", "data=text", "data.path='a,b'", "eval_every=0"],
    ["experiment=bench_100k", "steps=3", "hydra.sweep.dir=/s", "hydra.run.dir=/s/0", "hydra.sweep.subdir=a"],
]


CHOOSE = ("model", "engine", "optim", "recipe", "data", "experiment", "callbacks")


@pytest.mark.parametrize("words", WORDS, ids=" ".join)
def test_a_cached_composition_equals_hydras(words, monkeypatch):
    request = Request.parse(words)
    schema.composition_cache.clear()
    beforehand.store_composition([word for word in words if word.partition("=")[0] in CHOOSE], request.source)
    lines = [str(o.input_line) for o in request.settings]
    composed = compose_raw(lines, request.source)
    monkeypatch.setattr(beforehand, "compose_raw", None)  # Hydra is not called again
    beforehand.compose_cached(lines, request.source).seed = 99  # changes a copy only
    cached = beforehand.compose_cached(lines, request.source)
    for cfg in (cached, composed):
        OmegaConf.set_readonly(cfg.hydra, False)
        cfg.hydra.overrides.task, cfg.hydra.overrides.hydra, cfg.hydra.job.override_dirname = [], [], ""
    assert OmegaConf.to_yaml(cached) == OmegaConf.to_yaml(composed)


def test_repeated_choices_are_composed_once_and_stay_unchanged(monkeypatch):
    schema.composition_cache.clear()
    calls = []
    monkeypatch.setattr(
        beforehand, "compose_raw", lambda *arguments: calls.append(arguments) or compose_raw(*arguments)
    )
    for number in range(3):
        for words in WORDS:
            lines = [str(o.input_line) for o in Request.parse(words).settings]
            source = Source.from_flags()
            cached, composed = beforehand.compose_cached(lines, source), compose_raw(lines, source)
            assert OmegaConf.to_yaml(drop_hydra_keys(cached)) == OmegaConf.to_yaml(drop_hydra_keys(composed))
            cached.seed = cached.model.context = 99  # changes a copy only
        assert len(calls) == len(WORDS) * min(number + 1, 2)


def test_a_part_of_another_plugin_with_the_same_name_is_composed_again(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    for value, module in enumerate(("offers_one", "offers_other")):
        text = TRACE.replace(
            'name: ClassVar[str] = "trace"', f'name: ClassVar[str] = "offered"\n    size: int = {value}'
        )
        (tmp_path / f"{module}.py").write_text(text)
        for _ in range(3):
            composed = Request.parse([f"plugins=[{module}]", "callbacks=[offered]"]).compose()
            assert composed.cfg.callbacks.offered.size == value


@pytest.mark.parametrize("word", ["lr=much", "modle.n_layers=2", "model.n_layer=2", "lr=[1]"])
def test_an_invalid_value_has_the_same_error_with_a_cached_composition(word):
    request = Request.parse(["steps=3"])
    schema.composition_cache.clear()
    with pytest.raises(UserError) as usual:
        request.compose(word)
    beforehand.store_composition(["steps=3"], request.source)
    for _ in range(3):
        with pytest.raises(UserError) as caught:
            request.compose(word)
        assert str(caught.value) == str(usual.value)
        request.compose()


def test_compositions_that_depend_on_all_overrides_are_not_cached(tmp_path, monkeypatch):
    (tmp_path / "mine.yaml").write_text("defaults: [config, _self_]\nname: ${hydra:job.override_dirname}\n")
    calls = []
    monkeypatch.setattr(
        beforehand, "compose_raw", lambda *arguments: calls.append([*arguments[0]]) or compose_raw(*arguments)
    )
    # The position of `+made_up` in the command line matters.
    for words, source in (["seed=5"], Source.from_flags(str(tmp_path), "mine")), (["+made_up=1"], Source.from_flags()):
        beforehand.store_composition(words, source)
        for _ in range(3):
            beforehand.compose_cached(words, source)
            assert calls[-1] == words
