"""Jobs of a sweep are forked from a process that has all loaded, and are what processes of their own are."""

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

# What a job has is written down, and then all of it changed; how it ends depends on its seed.
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
    "Changes what a process has one of."

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
            subprocess.Popen(["sleep", "100"])  # which holds this process's output open
"""
PLUGINS = "plugins=[toyexp.testing.null,trace]"
TINY = ["data=random", "model.n_layers=1", "model.d_model=16", "model.context=16", "steps=2", "eval_every=0",
        "checkpoint_every=0"]  # fmt: skip
QUICK = ["engine=noop", *TINY, PLUGINS, "callbacks=[events,trace]"]
forks = pytest.mark.skipif(sys.platform not in forking.PLATFORMS, reason="jobs are forked on Linux alone")
SEEDS = (1, 2, 3, 4, 5, 6, 7, 8)


def entries(folder):
    return json.loads((folder / "sweep.json").read_text())["jobs"]


def seen(folder):
    return {entry["number"]: json.loads(path.read_text()) for entry in entries(folder)
            if (path := folder / str(entry["directory"]) / "seen.json").exists()}  # fmt: skip


@pytest.fixture(scope="module")
def sweeps(tmp_path_factory):
    """The same sweep with its jobs forked, and with two of them spawned."""
    place = tmp_path_factory.mktemp("forking")
    (place / "trace.py").write_text(TRACE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setenv("GIVEN", "before")
        patch.delitem(sys.modules, "trace", raising=False)
        began = time.monotonic()
        code = main(["-m", *QUICK, f"seed={','.join(map(str, SEEDS))}", "hydra.sweep.dir=forked"])
        took = time.monotonic() - began
        patch.setattr(launcher, "PLATFORMS", ())
        main(["-m", *QUICK, "seed=1,8", "hydra.sweep.dir=spawned"])
    return code, took, place / "forked", place / "spawned"


@forks
def test_a_forked_job_finds_what_a_process_of_its_own_finds(sweeps):
    _, _, forked, spawned = sweeps
    first, last = (seen(spawned)[n] for n in (0, 1))
    assert first[0] == last[0] and not first[1]["forked"]
    found = seen(forked)
    assert len(found) == len(SEEDS)
    for values, own in found.values():
        assert own["forked"]
        assert values == first[0]
    for kind in ("python", "numpy"):
        assert len({own[kind] for _, own in found.values()}) == len(SEEDS)


@forks
def test_however_a_forked_job_ends_it_ends_alone_and_is_reported(sweeps):
    code, took, folder, _ = sweeps
    assert code == 1 and took < 90  # what a job leaves running for 100 s holds nobody up
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
def test_a_forked_job_ends_as_a_process_of_its_own_does(sweeps):
    """What it has written is on the disk, what is to be done at exit is done, and its threads have ended."""
    for number in (0, 4):
        run = sweeps[2] / entries(sweeps[2])[number]["directory"]
        found = [(run / f"{name}.txt").read_text() for name in ("left", "exit", "thread")]
        assert found == ["left open", "at exit", "waited for"]


def stray():
    """The processes that fork, by their numbers: they are what this process started and nobody else has ended."""
    own = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [int(n) for n in own if b"TOYEXP_FORKS=" in Path(f"/proc/{n}/environ").read_bytes()]


@forks
def test_nothing_of_what_forks_is_left_when_a_sweep_is_over(sweeps):
    assert stray() == []


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "trace", raising=False)
    (tmp_path / "trace.py").write_text(TRACE)
    return tmp_path


@forks
def test_where_what_forks_is_killed_the_jobs_are_spawned(place, monkeypatch):
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
    assert [own["forked"] for _, own in seen(place / "s").values()] == [True, False, False]


@forks
def test_a_process_of_stacks_is_forked_too_and_finds_the_files_that_it_is_handed(place):
    assert main(["-m", *QUICK, "seed=1,8,9", "sweep.launcher=stacked", "hydra.sweep.dir=s"]) == 0
    assert {entry["status"] for entry in entries(place / "s")} == {"completed"}
    assert [own["forked"] for _, own in seen(place / "s").values()] == [True] * 3


@forks
def test_a_plugin_that_starts_a_thread_when_it_is_imported_has_its_jobs_spawned(place):
    (place / "trace.py").write_text(TRACE + "\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n")
    assert main(["-m", *QUICK, "seed=1", "hydra.sweep.dir=s"]) == 0
    assert [own["forked"] for _, own in seen(place / "s").values()] == [False]


@forks
@pytest.mark.parametrize(("engine", "package"), [("cpu", "torch"), ("ggml", "ggml")])
def test_an_engine_that_is_loaded_before_the_fork_computes_the_same(place, engine, package):
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
    one, other = (json.loads((place / name / "result.json").read_text()) for name in ("forked", "here"))
    assert one["train_loss"] == other["train_loss"] > 0


@forks
def test_lines_of_an_unbuffered_job_come_at_once_and_one_whose_parent_is_killed_counts_as_killed(place):
    unbuffered = {**os.environ, "PYTHONUNBUFFERED": "1"}
    server = ForkServer(unbuffered, QUICK, lambda: False)
    try:
        began = time.monotonic()
        with server.start([*QUICK, "seed=10"], unbuffered, False) as process:
            assert any(line == b"sleeps\n" for line in process.stdout) and process.poll() is None
            assert time.monotonic() - began < 30  # it sleeps twice as long
            parent = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[1]
            os.kill(int(parent), signal.SIGKILL)
            assert process.wait(20) == -signal.SIGKILL
            os.kill(process.pid, signal.SIGKILL)
    finally:
        server.close()


@pytest.fixture
def server():
    """A fork server with an environment of its own, stopped before it reads what to load."""
    forks = ForkServer({**os.environ, "OMP_NUM_THREADS": "3"}, ["seed=1"], lambda: False)
    forks._process.send_signal(signal.SIGSTOP)
    yield forks
    forks.close()


@forks
def test_the_fork_server_has_the_cores_of_the_jobs_and_a_process_group_of_its_own(server):
    """Libraries count their threads once, when they are loaded; and the sweep alone passes Ctrl-C on to jobs."""
    environment = Path(f"/proc/{server._process.pid}/environ").read_bytes().split(b"\0")
    assert b"OMP_NUM_THREADS=3" in environment
    assert os.getpgid(server._process.pid) == server._process.pid


@forks
def test_a_fork_server_that_does_not_answer_is_killed(server):
    ending = threading.Thread(target=server.close, daemon=True)
    ending.start()
    ending.join(20)
    assert not ending.is_alive() and server._process.returncode == -signal.SIGKILL


@forks
def test_jobs_are_spawned_when_the_fork_server_was_killed_before_it_loaded(server, monkeypatch):
    spawned = []
    monkeypatch.setattr(forking, "spawn", lambda *order: spawned.append(order))
    server._process.kill()
    server._process.wait()
    server.start(["seed=1"], {}, False)
    server.close()
    assert spawned == [(["seed=1"], {}, False)]


# -- what is composed beforehand --------------------------------------------------------------------------------------

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
def test_what_was_composed_beforehand_is_what_hydra_composes(words, monkeypatch):
    request = Request.parse(words)
    schema.composition_cache.clear()
    beforehand.store_composition([word for word in words if word.partition("=")[0] in CHOOSE], request.source)
    lines = [str(o.input_line) for o in request.settings]
    whole = compose_raw(lines, request.source)
    monkeypatch.setattr(beforehand, "compose_raw", None)  # which is not asked again
    beforehand.compose_cached(lines, request.source).seed = 99  # a copy
    found = beforehand.compose_cached(lines, request.source)
    for cfg in (found, whole):
        OmegaConf.set_readonly(cfg.hydra, False)
        cfg.hydra.overrides.task, cfg.hydra.overrides.hydra, cfg.hydra.job.override_dirname = [], [], ""
    assert OmegaConf.to_yaml(found) == OmegaConf.to_yaml(whole)


def test_names_that_are_chosen_again_are_composed_no_more_and_are_what_they_were(monkeypatch):
    schema.composition_cache.clear()
    asked = []
    monkeypatch.setattr(beforehand, "compose_raw", lambda *given: asked.append(given) or compose_raw(*given))
    for number in range(3):
        for words in WORDS:
            lines = [str(o.input_line) for o in Request.parse(words).settings]
            source = Source.from_flags()
            found, whole = beforehand.compose_cached(lines, source), compose_raw(lines, source)
            assert OmegaConf.to_yaml(drop_hydra_keys(found)) == OmegaConf.to_yaml(drop_hydra_keys(whole))
            found.seed = found.model.context = 99  # which is nobody else's
        assert len(asked) == len(WORDS) * min(number + 1, 2)


def test_a_part_that_another_plugin_offers_under_the_same_name_is_composed_anew(tmp_path, monkeypatch):
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
def test_a_value_that_cannot_be_set_is_refused_in_the_words_of_any_run(word):
    request = Request.parse(["steps=3"])
    schema.composition_cache.clear()
    with pytest.raises(UserError) as usual:
        request.compose(word)
    beforehand.store_composition(["steps=3"], request.source)
    for _ in range(3):
        with pytest.raises(UserError) as found:
            request.compose(word)
        assert str(found.value) == str(usual.value)
        request.compose()


def test_what_depends_on_the_words_of_a_run_is_left_to_hydra(tmp_path, monkeypatch):
    (tmp_path / "mine.yaml").write_text("defaults: [config, _self_]\nname: ${hydra:job.override_dirname}\n")
    asked = []
    monkeypatch.setattr(beforehand, "compose_raw", lambda *given: asked.append([*given[0]]) or compose_raw(*given))
    # The second word counts in the order in which it was typed.
    for words, source in (["seed=5"], Source.from_flags(str(tmp_path), "mine")), (["+made_up=1"], Source.from_flags()):
        beforehand.store_composition(words, source)
        for _ in range(3):
            beforehand.compose_cached(words, source)
            assert asked[-1] == words
