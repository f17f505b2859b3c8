"""Sweeps on clusters lose no job when nodes, workers or the sweep are killed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from clusters import (
    MODULES,
    NODES,
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
from faults import FIGURES
from mishaps import MISHAP
from slurm import install

from toyexp.base.errors import UserError
from toyexp.training.rundir import lock

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds processes by /proc"),
]
FAILING_JOBS = ["callbacks.mishap.slow=200", "callbacks.mishap.raises=6", "callbacks.mishap.killed=9"]
NINE_JOBS = [*QUICK, *FAILING_JOBS, "steps=200,201,5,6,7,8,9,10,11"]


@pytest.fixture(autouse=True)
def _work_in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (tmp_path / "mishap.py").write_text(MISHAP)


@pytest.fixture
def nodes():
    """Start a Ray cluster with a head and two nodes; yield its process, its address and the nodes' sockets."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'toyexp[ray]'")
    with subprocess.Popen(
        [sys.executable, "-c", NODES], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        text=True, cwd="/", env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"},
    ) as cluster:  # fmt: skip
        address, *sockets = cluster.stdout.readline().split()
        yield cluster, address, sockets  # closing its standard input ends it


def is_free(number):
    try:
        os.close(lock(run_dir(number)))
    except UserError:
        return False
    return True


def test_jobs_of_a_lost_node_resume_on_another_node(nodes):
    cluster, address, sockets = nodes
    process = start("-m", *NINE_JOBS, "sweep.launcher=ray", f"sweep.ray.address={address}")
    wait_for(lambda: has_checkpoint(0) and has_checkpoint(1), process)
    raylet = Path(f"/proc/{parent_pid(parent_pid(writer_pid(0)))}/cmdline").read_text()
    (lost,) = [number for number, socket in enumerate(sockets) if socket in raylet]
    cluster.stdin.write(f"{lost}\n")
    cluster.stdin.flush()
    out, err = process.communicate(timeout=250)
    assert process.returncode == 1, err
    assert status_letters() == "cccfcckcc"
    assert [job["attempts"] for job in sweep_jobs()] == [2, *[1] * 8], out
    assert "2 jobs at once, 1 core each" in out and "[0] lost (" in out
    assert "resumed from step" in Path("s/logs/0.log").read_text()
    assert [recorded_steps(number) for number in (0, 1)] == [list(range(1, 201)), list(range(1, 202))]
    FIGURES["clusters: nodes lost, their jobs resumed elsewhere"] += 1


def test_a_sweep_on_ray_resumes_after_an_interrupt_and_after_a_kill():
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'toyexp[ray]'")
    process = start("-m", *NINE_JOBS, "sweep.launcher=ray", "sweep.jobs=2")
    wait_for(lambda: has_checkpoint(0) and has_checkpoint(1), process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130 and err.startswith("toyexp: interrupted by SIGINT; 0 of 9 jobs are completed"), err
    assert status_letters() == "iiwwwwwww"
    steps = recorded_steps(0)
    assert (run_dir(0) / "checkpoints" / f"step-{steps[-1]}").is_dir()
    Path("mishap.py").write_text(MISHAP.replace("and not run.resumed_step:", "or True:"))  # also after a resume
    process = start("sweep.resume=s", MODULES)
    wait_for(lambda: len(recorded_steps(0)) > len(steps) and not is_free(1), process)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    wait_for(lambda: is_free(0) and is_free(1))  # without their sweep, the jobs save and exit
    Path("mishap.py").write_text(MISHAP.replace("run.steps >= self.slow", "False"))
    process = start("sweep.resume=s", MODULES)
    _, err = process.communicate(timeout=200)
    assert process.returncode == 1 and status_letters() == "cccfcckcc", err
    assert [recorded_steps(number) for number in (0, 1)] == [list(range(1, 201)), list(range(1, 202))]
    FIGURES["clusters: sweeps on Ray interrupted or killed, and resumed"] += 2


@pytest.mark.parametrize("launcher", ["ray", "submitit"])
def test_jobs_with_slow_steps_save_and_exit_when_their_sweep_is_killed(launcher):
    pytest.importorskip(launcher)
    launcher_settings = ["sweep.jobs=2"] if launcher == "ray" else ["sweep.submitit.cluster=local"]
    words = [word for word in QUICK if not word.startswith("checkpoint_every")]
    process = start("-m", *words, "checkpoint_every=1h", "callbacks.mishap.wait=2", "steps=4000,4001",
                    f"sweep.launcher={launcher}", *launcher_settings)  # fmt: skip
    wait_for(
        lambda: all((run_dir(number) / "events.jsonl").exists() and recorded_steps(number) for number in (0, 1)),
        process,
    )
    process.kill()
    process.communicate()
    wait_for(lambda: is_free(0) and is_free(1))
    assert has_checkpoint(0) and has_checkpoint(1)
    FIGURES[f"clusters: jobs saved after their sweep on {launcher} was killed"] += 2


def test_a_search_on_ray_completes_all_trials():
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'toyexp[ray]'")
    pytest.importorskip("optuna")
    words = [w for w in QUICK if not w.startswith("eval_every")]
    process = start(
        "-m", *words, "eval_every=2", "steps=4", "lr=tag(log, interval(1e-4, 1e-1))", "sweep.search=tpe",
        "sweep.trials=6", "sweep.launcher=ray",
    )  # fmt: skip
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    assert status_letters() == "cccccc" and "\nbest    lr=" in out


def test_failing_jobs_on_submitit_are_reported_and_the_others_complete():
    pytest.importorskip("submitit")
    process = start("-m", *QUICK, *FAILING_JOBS, "steps=3,4,5,6,7,8,9,10,11", "sweep.launcher=submitit",
                    "sweep.submitit.cluster=local")  # fmt: skip
    out, err = process.communicate(timeout=200)
    assert process.returncode == 1 and status_letters() == "cccfcckcc", err
    assert "7 of 9 jobs are completed" in out


def test_slurm_jobs_past_the_time_limit_or_on_a_lost_node_are_requeued_and_resume(tmp_path):
    pytest.importorskip("submitit")
    slurm = install(tmp_path / "slurm")
    process = start("-m", *NINE_JOBS, "sweep.launcher=submitit", **slurm)
    wait_for(lambda: has_checkpoint(0) and has_checkpoint(1), process)
    (script,) = (tmp_path / "slurm").glob("*.sh")
    assert "--array=0-8%" in script.read_text() and "--signal=USR2@90" in script.read_text()
    os.kill(parent_pid(writer_pid(0)), signal.SIGUSR2)  # Slurm's signal for the time limit
    (tmp_path / "slurm" / "1_1.again").touch()  # Slurm requeues a job whose node failed
    kill(parent_pid(writer_pid(1)))
    out, err = process.communicate(timeout=250)
    assert process.returncode == 1 and status_letters() == "cccfcckcc", err
    for number, steps in ((0, 200), (1, 201)):
        assert recorded_steps(number) == list(range(1, steps + 1))
        assert "resumed from step" in Path(f"s/logs/{number}.log").read_text()
    assert "[8] steps=11  submitted as 1_8" in out
    FIGURES["clusters: jobs requeued by Slurm and resumed"] += 2
