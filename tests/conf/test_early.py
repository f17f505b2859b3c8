"""What the jobs of a sweep are forked from begins to load before its settings are read, and only where it is used."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from toyexp.base.home import at_home
from toyexp.base.threads import CORES
from toyexp.commands import forks
from toyexp.commands.flags import read
from toyexp.commands.line import main, many_runs
from toyexp.config.request import Request
from toyexp.sweep import early, forking, runner, share
from toyexp.sweep.begin import prepared

pytestmark = [
    pytest.mark.xdist_group("forking"),
    pytest.mark.skipif(sys.platform not in forking.PLATFORMS, reason="jobs are forked on Linux alone"),
]

SEVERAL = ["-m", "lr=1e-3,1e-4"]
STACKED = ["-m", "sweep.launcher=stacked"]
JOBLIB = ["-m", "sweep.launcher=joblib"]
GPU = "engine=cuda"


class Begun(forking.Loading):
    """Says what was begun, and with which words, and begins nothing."""

    all: list = []

    def __init__(self, environment):
        self.environment, self.directory, self.told, self.ended = dict(environment), Path.cwd(), [], False
        self.all.append(self)

    def tell(self, words, stacks, sure=True):
        self.told.append((words, stacks, sure))

    def end(self, patience=0.0):
        self.ended = True


@pytest.fixture
def begun(monkeypatch):
    monkeypatch.setattr(Begun, "all", [])
    monkeypatch.setattr(early, "Loading", Begun)
    return Begun.all


@pytest.mark.parametrize(
    ("there", "words"),
    [
        (0, SEVERAL),
        (0, [*STACKED, "engine=cpu", "seed=1,2,3"]),
        (0, [*STACKED, "engine=cpu", "seed=1,2,3", "lr=1e-3,1e-4", "sweep.jobs=4"]),
        (0, [*STACKED, "engine=cpu", "seed=range(0, 3)", "data.path=~/text"]),
        (1, [*STACKED, GPU, "seed=range(3)"]),
        (2, [*STACKED, GPU, "seed=range(3)"]),
        (1, [*STACKED, GPU, "seed=range(1,65,2)", "lr=1e-3,1e-4,1e-5"]),
        (2, [*STACKED, GPU, "seed=range(1,65,2)", "lr=1e-3,1e-4,1e-5"]),
        (1, [*STACKED, GPU, "seed=range(300)", "sweep.per_gpu=2"]),
        (2, [*STACKED, GPU, "seed=range(300)", "sweep.per_gpu=2"]),
        (1, [*STACKED, GPU, "seed=range(300)", "sweep.jobs=16"]),
        (2, [*STACKED, GPU, "seed=range(300)", "sweep.jobs=16"]),
        (0, [*JOBLIB, "engine=cpu", "seed=range(3)"]),
        (1, [*JOBLIB, GPU, "seed=range(30)", "sweep.jobs=3"]),
        (2, [*JOBLIB, GPU, "seed=range(30)", "sweep.jobs=3"]),
        (1, [*JOBLIB, GPU, "seed=range(30)", "sweep.per_gpu=3"]),
        (2, [*JOBLIB, GPU, "seed=range(30)", "sweep.per_gpu=3"]),
        (0, [*JOBLIB, "engine=ggml", "seed=range(3)", "sweep.jobs=30"]),
    ],
    ids=str,
)  # fmt: skip
def test_the_share_of_the_cores_is_guessed_as_it_is_found(there, words, monkeypatch, begun):
    monkeypatch.delenv("KMP_INIT_AT_FORK", raising=False)
    monkeypatch.delitem(sys.modules, "joblib", raising=False)  # which sets it when it is imported
    for module in (early, runner, share):
        monkeypatch.setattr(module, "visible", lambda: [str(number) for number in range(there)])
    for module in (early, share):
        monkeypatch.setattr(module, "available_cores", lambda: 16)
    with early.loading(words):
        flags, settings, _ = read(at_home(words))
        sweep, _ = prepared(many_runs(flags, Request.of(settings)))
        with monkeypatch.context() as patch:
            patch.setattr(runner, "Forks", lambda loading, words, stopped, stacks: (loading, words, stacks))
            loading, shared, stacks = sweep._forks_of_jobs()
    assert begun == [loading] and loading.told == [(shared, stacks, False)]


@pytest.mark.parametrize(
    "words",
    [
        ["lr=1e-3,1e-4"],
        ["-m", "sweep.launcher=ray", "seed=1,2"],
        ["-m", "sweep.launcher=submitit", "seed=1,2"],
        ["-m", "experiment=smoke", "seed=1,2"],  # which may name a launcher
        ["-m", "+experiment=smoke", "seed=1,2"],
        [*SEVERAL, "hydra/launcher=ray"],
        [*SEVERAL, "sweep={launcher: ray}"],
        [*SEVERAL, "++sweep.launcher=ray"],
        [*SEVERAL, "sweep.isolate=false"],
        [*SEVERAL, "plugins=[mine]"],
        ["-m", "sweep.resume=there"],
        [*SEVERAL, "--dry-run"],
        [*SEVERAL, "--config-dir=there"],
        [*SEVERAL, "--help"],
        [*SEVERAL, "nonsense"],
        [*JOBLIB, "seed=1,2", "sweep.jobs=many"],
        [*JOBLIB, "seed=range(99999999999999999999)"],
    ],
    ids=" ".join,
)
def test_what_forks_nothing_begins_nothing(words, begun):
    with early.loading(words):
        assert begun == []


def test_what_a_search_chooses_is_of_no_job_beforehand(begun):
    words = ["-m", "sweep.search=tpe", "sweep.trials=4", "lr=tag(log, interval(1e-4, 1e-1))", "optim=choice(sgd,adamw)"]
    with early.loading([*words, "engine=cpu", "steps=3"]):
        assert [loading.told for loading in begun] == [[(["engine=cpu", "steps=3"], False, False)]]


def test_on_other_platforms_nothing_begins(begun, monkeypatch):
    monkeypatch.setattr(early, "PLATFORMS", ())
    with early.loading(SEVERAL):
        assert begun == []


@pytest.mark.parametrize("change", ["environment", "directory", "nothing"])
def test_what_was_begun_elsewhere_or_otherwise_begins_again(begun, change, monkeypatch, tmp_path):
    with early.loading(SEVERAL):
        environment = dict(os.environ)
        if change == "environment":
            environment[CORES] = "7"
        if change == "directory":
            monkeypatch.chdir(tmp_path)
        found = early.taken(environment)
        assert found.environment == environment and found.directory == Path.cwd() and not found.ended
        assert len(begun) == (1 if change == "nothing" else 2) and all(one.ended for one in begun if one is not found)
    assert not found.ended  # the sweep sees to it


def test_what_no_sweep_asked_for_is_ended(begun):
    with pytest.raises(KeyboardInterrupt), early.loading(SEVERAL):
        raise KeyboardInterrupt
    assert [one.ended for one in begun] == [True]


@pytest.fixture
def real():
    """A process that loads, in an environment of its own."""
    loading = forking.Loading({**os.environ, "OMP_NUM_THREADS": "3"})
    yield loading
    loading.control.close()
    loading.process.kill()
    loading.process.wait()


def test_it_loads_where_jobs_compute_and_no_ctrl_c_reaches_it(real):
    """Libraries count their threads once, as they are loaded; and a job has to hear of Ctrl-C from the sweep alone."""
    environment = Path(f"/proc/{real.process.pid}/environ").read_bytes().split(b"\0")
    assert b"OMP_NUM_THREADS=3" in environment
    assert os.getpgid(real.process.pid) == real.process.pid


def test_it_is_ended_also_where_it_does_not_answer(real):
    real.process.send_signal(signal.SIGSTOP)
    ending = threading.Thread(target=real.end, daemon=True)
    ending.start()
    ending.join(20)
    assert not ending.is_alive() and real.process.returncode == -signal.SIGKILL


@pytest.mark.parametrize("told", [False, True])
def test_where_it_was_killed_before_it_has_read_what_to_load_jobs_are_spawned(real, told, monkeypatch):
    spawned = []
    monkeypatch.setattr(forking, "spawned", lambda *order: spawned.append(order))
    real.process.send_signal(signal.SIGSTOP)
    if told:
        real.tell(["seed=1"], stacks=False, sure=False)
    real.process.kill()
    real.process.wait()
    sweep = forking.Forks(real, ["seed=1"], lambda: False)
    sweep.start(["seed=1"], {}, False)
    sweep.close()
    assert spawned == [(["seed=1"], {}, False, ())]


@pytest.mark.parametrize(
    ("guess", "loaded"), [("seed=1", [["seed=1"]]), ("lr=1", [["lr=1"], ["seed=1"]]), (None, [["seed=1"]])]
)
def test_what_was_guessed_is_loaded_once_and_what_is_otherwise_too(guess, loaded, monkeypatch):
    found = []
    monkeypatch.setattr(forks, "_load", lambda words, stacks: found.append(words))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for words, sure in ((guess, False), ("seed=1", True)):
            if words:
                forking.tell(ours, {"words": [words], "stacks": False, "sure": sure})
        assert forks._loaded(theirs) and found == loaded


def processes(mark):
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            found += [path] if mark in path.read_bytes() else []
        except OSError:  # it has ended, or is somebody else's
            continue
    return found


def test_a_sweep_that_cannot_be_leaves_no_process(tmp_path):
    command = [sys.executable, "-m", "toyexp", *SEVERAL, "modle.n_layers=2"]
    mark = f"MARK={tmp_path}"
    ended = subprocess.run(
        command, env={**os.environ, "MARK": str(tmp_path)}, cwd=tmp_path, capture_output=True, text=True
    )
    assert ended.returncode == 2 and "modle.n_layers" in ended.stderr
    assert processes(mark.encode()) == [] and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("guess", [True, False])
def test_jobs_are_forked_from_it_also_where_its_words_were_guessed_otherwise(guess, tmp_path, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    loadings, jobs = [], []
    begin, start = forking.Loading.__init__, forking.Forks._forked
    monkeypatch.setattr(forking.Loading, "__init__", lambda self, env: (loadings.append(self), begin(self, env))[1])
    monkeypatch.setattr(forking.Forks, "_forked", lambda self, *order: jobs.append(start(self, *order)) or jobs[-1])
    if not guess:
        tell = forking.Loading.tell
        monkeypatch.setattr(
            forking.Loading,
            "tell",
            lambda self, words, stacks, sure=True: tell(self, words if sure else ["model=none"], stacks, sure),
        )
    tiny = ["data=random", "model.n_layers=1", "model.d_model=16", "model.context=16", "steps=2", "eval_every=0"]
    words = ["-m", "engine=cpu", *tiny, "callbacks=[events]", "seed=1,2", "hydra.sweep.dir=s"]
    with early.loading(words):
        assert main(words) == 0
    assert len(loadings) == 1 and len(jobs) == 2 and all(isinstance(job, forking.Forked) for job in jobs)
    assert {entry["status"] for entry in json.loads(Path("s/sweep.json").read_text())["jobs"]} == {"completed"}
    assert loadings[0].process.returncode is not None
