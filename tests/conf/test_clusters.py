"""Jobs on clusters: lost jobs are resubmitted; everything else works as for local jobs."""

import errno
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from clusters import (
    QUICK,
    has_checkpoint,
    kill,
    parent_pid,
    recorded_steps,
    run_dir,
    start,
    status_letters,
    sweep_jobs,
    wait_for,
    writer_pid,
)
from mishaps import MISHAP

from toyexp.cli.main import main
from toyexp.sweeps.directory import Job, JobExit, LaunchSpec
from toyexp.sweeps.launchers.cluster import Cluster, LostJob, NodeJob
from toyexp.sweeps.launchers.job_process import NOT_STARTED, Stop
from toyexp.training.rundir import lock

LINUX = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds processes by /proc")


@pytest.fixture(autouse=True)
def _work_in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (tmp_path / "mishap.py").write_text(MISHAP)
    monkeypatch.delitem(sys.modules, "mishap", raising=False)


@pytest.fixture
def on_ray():
    """Return the Ray launcher module; skip the test if Ray is not installed."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'toyexp[ray]'")
    from toyexp.sweeps.launchers import on_ray

    return on_ray


# -- submitting jobs, with a fake cluster ----------------------------------------------------------------------------


class ScriptedCluster(Cluster):
    """Fake cluster that ends each job by its next scripted word: an exit code, `lost`, or `waits` until stopped."""

    name = "told"

    def __init__(self, words, limit=2, retries=2):
        self.words, self.most, self.retries = words, limit, retries
        self.batches, self.stopped, self.peak = [], [], 0

    def begin(self, folder):
        """Do nothing."""

    def resources(self, jobs):
        """Do nothing."""

    def limit(self):
        return self.most

    def submit(self, specs):
        self.batches.append(list(specs))
        if "refused" in [self.words[number][0] for number in specs]:
            raise RuntimeError("a long story\nno such partition")
        return [(f" as {number}", (number, self.words[number].pop(0))) for number in specs]

    def poll(self, handles):
        self.peak = max(self.peak, len(handles))
        return [handle for handle in handles if handle[1] != "waits" or self.stopped]

    def result(self, handle):
        word = handle[1]
        return LostJob("its node is gone") if word == "lost" else JobExit(143 if word == "waits" else int(word))

    def stop(self, handles, times):
        self.stopped.append(times)


def run_scripted(words, stop=None, **settings):
    """Run jobs with scripted ends; return their ends, attempts, the printed lines and the cluster."""
    cluster, said = ScriptedCluster({n: list(w) for n, w in enumerate(words)}, **settings), []
    found = [Job(number, [], attempts=1) for number in range(len(words))]
    watch = SimpleNamespace(launch_spec=lambda job: job.number, begin=lambda jobs, shown: None, stop=stop or Stop(),
                            say=said.append, folder=SimpleNamespace(path=None))  # fmt: skip
    ended = cluster.run(iter(found), watch)
    return {job.number: end for job, end in ended}, [job.attempts for job in found], said, cluster


def test_a_lost_job_is_resubmitted_a_few_times_and_then_reported():
    words = [["0"], ["lost", "lost", "0"], ["lost"] * 9, ["1"], ["0"]]
    ended, attempts, said, cluster = run_scripted(words)
    assert {number: end.code for number, end in ended.items()} == {0: 0, 1: 0, 2: 137, 3: 1, 4: 0}
    assert str(ended[2]) == "told: its node is gone, resubmitted 2 times"
    assert attempts == [1, 3, 3, 1, 1] and cluster.peak == 2
    assert "[1] lost (its node is gone): resubmitted, 2 of 2 times" in said
    ended, *_ = run_scripted([["lost"]], retries=0)
    assert ended[0].error == "told: its node is gone"


def test_jobs_are_submitted_in_batches_up_to_the_limit_and_at_least_one():
    assert run_scripted([["0"]] * 5, limit=9)[3].batches == [[0, 1, 2, 3, 4]]
    ended, *_, cluster = run_scripted([["0"]] * 3, limit=0)  # with no node, one job waits for a new node
    assert [*ended] == [0, 1, 2] and cluster.batches == [[0], [1], [2]]


def test_a_job_that_the_cluster_rejects_ends_and_the_others_run():
    ended, *_ = run_scripted([["refused"], ["0"]], limit=1)
    assert ended[0] == JobExit(NOT_STARTED, "told: no such partition") and ended[1].code == 0


def test_each_signal_stops_the_jobs_once_and_lost_jobs_are_not_resubmitted():
    stop = Stop()
    for _ in range(2):
        stop.handle(signal.SIGINT)
    ended, attempts, _, cluster = run_scripted([["lost", "0"], ["waits"]], stop=stop)
    assert {number: end.code for number, end in ended.items()} == {0: 143, 1: 143}
    assert attempts == [1, 1] and cluster.stopped == [0, 1]


def test_a_job_waits_while_another_process_writes_its_run(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    folder.mkdir()
    work, seen = NodeJob(LaunchSpec(folder, tmp_path / "log", [], [], False), tmp_path / "stop"), []
    monkeypatch.setattr(
        "toyexp.sweeps.launchers.cluster.run_process", lambda spec, *rest: seen.append(spec.resumes) or JobExit(0)
    )
    held = lock(folder)

    def give_back(seconds):
        os.close(held)

    monkeypatch.setattr("toyexp.sweeps.launchers.cluster.time.sleep", give_back)
    assert work() == JobExit(0) and seen == [True]
    again = lock(folder)
    monkeypatch.setattr("toyexp.sweeps.launchers.cluster.time.sleep", lambda seconds: (tmp_path / "stop").touch())
    assert work() == JobExit(143, "interrupted") and seen == [True]
    os.close(again)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("held_at_first", [True, False])
def test_a_job_saves_and_ends_when_the_lock_of_its_sweep_is_released(tmp_path, monkeypatch, held_at_first, fails):
    """If no lock is held at first, as on a disk whose locks do not reach the node, the job runs to its end."""
    work, asked = NodeJob(LaunchSpec(tmp_path / "s/0", tmp_path / "s/logs/0.log", [], [], False)), []
    (tmp_path / "s").mkdir()
    held = lock(tmp_path / "s")
    if not held_at_first:
        os.close(held)

    def raising(path):
        raise OSError(errno.ESTALE, "Stale file handle")

    def run(spec, stop, show, poll):
        for _ in range(2):
            poll()
            asked.append(stop.is_requested)
            work._next_look = min(work._next_look, 0.0) if held_at_first else work._next_look
            if held_at_first and len(asked) == 1:
                os.close(held)
                if fails:  # as on the disk of a machine that is gone
                    monkeypatch.setattr("toyexp.sweeps.launchers.cluster.require_unlocked", raising)
        return JobExit(0)

    monkeypatch.setattr("toyexp.sweeps.launchers.cluster.run_process", run)
    assert work() == JobExit(0) and asked == [False, held_at_first]


# -- Ray --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nodes", "settings", "found"),
    [
        ([(4, 0)], (0, 1, 0, None), (4, 1)),
        ([(4, 0), (8, 0)], (0, 2, 0, None), (6, 2)),
        ([(4, 0), (8, 0)], (3, 1, 0, None), (3, 4)),  # 4 cores for each of three jobs
        ([(4, 0), (8, 0)], (50, 1, 0, None), (50, 1)),  # most jobs wait
        ([(16, 4), (8, 0)], (0, 1, 1, None), (4, 4)),
        ([(16, 4), (16, 4)], (0, 1, 0.5, None), (16, 2)),
        ([(16, 4)], (0, 1, 2, 3), (2, 3)),
        ([(16, 4)], (0, 1, 8, None), (0, 1)),
        ([], (0, 1, 0, None), (0, 1)),
    ],
)
def test_jobs_share_the_nodes_of_a_cluster(on_ray, nodes, settings, found):
    assert on_ray.divide_cores([on_ray.Node(*node) for node in nodes], *settings) == found


@pytest.mark.parametrize(
    ("words", "variable", "message"),
    [
        (
            ["sweep.ray.address=127.0.0.1:1"],
            "",
            "sweep.ray.address=127.0.0.1:1: no Ray cluster answers at this address",
        ),
        (["sweep.ray.address=nonsense"], "", "sweep.ray.address=nonsense: must be auto, or HOST:PORT"),
        (
            ["sweep.ray.address=127.0.0.1:99999"],
            "",
            "10.0.0.1:6379; ports are 1 to 65535",
        ),
        (["sweep.ray.address=127.0.0.1:65536"], "", "ports are 1 to 65535"),
        (["sweep.ray.address=ray://h:10001"], "", "sweep.ray.address=ray://h:10001: must be auto, or HOST:PORT"),
        ([], "127.0.0.1:1", "RAY_ADDRESS=127.0.0.1:1: no Ray cluster answers at this address"),
        (["sweep.ray.gpus=1.5"], "", "sweep.ray.gpus=1.5: must be a whole number, or a fraction such as 0.5"),
        (["sweep.ray.retries=-1"], "", "sweep.ray.retries=-1: must be at least 0"),
    ],
)
def test_an_unreachable_cluster_is_reported_before_anything_is_written(
    on_ray, words, variable, message, monkeypatch, capsys
):
    monkeypatch.setenv("RAY_ADDRESS", variable)
    assert main(["-m", *QUICK, "seed=0,1", "sweep.launcher=ray", *words]) == 2
    assert message in capsys.readouterr().err and not Path("s").exists()


@LINUX
@pytest.mark.release
def test_on_ray_failed_and_killed_jobs_are_reported_and_a_job_with_a_killed_worker_resumes(on_ray):
    words = [*QUICK, "steps=40,4,5,6,7,8,9,10,11", "callbacks.mishap.raises=6", "callbacks.mishap.killed=9",
             "callbacks.mishap.slow=40", "callbacks.mishap.told=true"]  # fmt: skip
    process = start("-m", *words, "sweep.launcher=ray", TOYEXP_NOTED="yes", CUDA_VISIBLE_DEVICES="")
    wait_for(lambda: has_checkpoint(0), process)
    kill(parent_pid(writer_pid(0)))
    out, err = process.communicate(timeout=200)
    assert process.returncode == 1, err
    assert status_letters() == "cccfcckcc"
    assert [job["attempts"] for job in sweep_jobs()] == [2, *[1] * 8]
    assert "[0] lost (its worker was killed): resubmitted, 1 of 3 times" in out
    assert "resumed from step" in Path("s/logs/0.log").read_text()
    assert recorded_steps(0) == list(range(1, 41))
    for line in (out + err).splitlines():  # no output of Ray itself
        ours = ("ray     a new cluster", "sweep ", "report ", "[", "job ", "  ", "7 of 9", "toyexp: error in")
        assert not line or line.startswith(ours), line
    assert len(err.splitlines()) == 2 and "job 3: callbacks.mishap failed" in err and "job 6: killed by SIGKILL" in err
    told = eval((run_dir(1) / "told").read_text())
    assert told[2:] == ["yes", str(Path.cwd())] and told[1] in ("1", "2")
