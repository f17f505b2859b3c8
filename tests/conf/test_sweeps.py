"""A failing job does not stop a sweep, each failure is reported, and sweep.resume runs the remaining jobs."""

import csv
import json
import logging
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from mishaps import MISHAP
from omegaconf import OmegaConf

import toyexp
import toyexp.config.request as request_module
from toyexp.base.errors import UserError
from toyexp.base.threads import CORES_VARIABLE, available_cores, machine_cores
from toyexp.cli.main import main
from toyexp.config.request import Request
from toyexp.config.top_level import Submitit, Sweep
from toyexp.config.words import format_override, parse
from toyexp.results.report import is_report
from toyexp.sweeps.begin import LAUNCHERS
from toyexp.sweeps.combinations import combinations, sweep_values
from toyexp.sweeps.directory import Job, JobExit, Status, SweepDir, SweepSpec
from toyexp.sweeps.job_configs import JobConfigs, check_values
from toyexp.sweeps.launchers import launcher, on_submitit, processes, stacks
from toyexp.sweeps.launchers.gpus import Gpus, visible_gpus
from toyexp.sweeps.launchers.processes import Processes
from toyexp.sweeps.runner import Runner
from toyexp.sweeps.sources import JobSource
from toyexp.training.rundir import lock

MODULES = "plugins=[toyexp.testing.null,mishap]"
QUICK = [MODULES, "engine=noop", "data=random", "model.n_layers=1", "model.d_model=16", "model.context=16",
         "checkpoint_every=1", "eval_every=0", "callbacks=[events,mishap]"]  # fmt: skip


@pytest.fixture(autouse=True)
def _work_in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mishap.py").write_text(MISHAP)
    monkeypatch.delitem(sys.modules, "mishap", raising=False)


def read_jobs(folder):
    return json.loads((Path(folder) / "sweep.json").read_text())["jobs"]


def statuses(folder):
    return [job["status"] for job in read_jobs(folder)]


def summary(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def by_number(path):
    return sorted(summary(path), key=lambda row: int(row["job"]))


def recorded_steps(run):
    """Return the steps in a run's events.jsonl."""
    lines = (Path(run) / "events.jsonl").read_text().splitlines()
    return [line["step"] for line in map(json.loads, lines) if line["kind"] == "step"]


# -- failing jobs and resume ----------------------------------------------------------------------------------------


def test_three_of_six_jobs_fail_and_resume_finishes_the_killed_one(tmp_path, capsys):
    values = [3, 6, 0, 4, 9, 13]
    sweep = ["-m", *QUICK, f"steps={','.join(map(str, values))}", "hydra.sweep.dir=sweeps/s"]
    wrong = ["callbacks.mishap.raises=6", "callbacks.mishap.killed=9", "callbacks.mishap.leaves=3"]
    assert main([*sweep, *wrong]) == 1
    out, err = capsys.readouterr()
    expected = ["completed"] * 6
    expected[1], expected[2], expected[4] = "failed", "refused", "killed"
    assert statuses("sweeps/s") == expected
    assert err.splitlines() == [
        "toyexp: error in job 2: steps=0: must be a whole number from 1",  # reported before the first job starts
        "toyexp: error in job 1: callbacks.mishap failed at step 5: ZeroDivisionError: on purpose; see "
        "sweeps/s/1-scratch-llama/log.txt (exit code 1)",
        "toyexp: error in job 4: killed by SIGKILL (out of memory?) (log: sweeps/s/4-scratch-llama/log.txt)",
    ]
    assert (
        "3 of 6 jobs are completed; to resume: toyexp sweep.resume=sweeps/s 'plugins=[toyexp.testing.null,mishap]'"
        in out
    )
    assert "completed after 13 steps" in out  # the output of jobs is forwarded
    assert "Traceback" in Path("sweeps/s/1-scratch-llama/log.txt").read_text()

    # At the start of each job, the summary has all earlier jobs.
    for job in read_jobs("sweeps/s"):
        seen = Path("sweeps/s", job["directory"] or "none", "seen.csv")
        if seen.exists():
            before = [row["status"] for row in by_number(seen)]
            assert before[: job["number"]] == expected[: job["number"]]
            assert set(before[job["number"] + 1 :]) <= {"waiting", "refused"}
    table = by_number("sweeps/s/summary.csv")
    assert [row["steps"] for row in table] == list(map(str, values))
    assert [row["steps taken"] for row in table if row["status"] == "completed"] == [
        str(n) for n, status in zip(values, expected, strict=True) if status == "completed"
    ]
    assert "callbacks.mishap failed at step 5: ZeroDivisionError: on purpose" in table[1]["error"]
    assert table[0]["run"] == str(tmp_path / "sweeps/s/0-scratch-llama")
    markdown = Path("sweeps/s/summary.md").read_text().splitlines()
    assert len(markdown) == 8 and any(line.startswith("| 4 | 9 | killed |") for line in markdown)

    untouched = {p: p.read_bytes() for p in Path("sweeps/s").glob("[!4]-*/*") if p.is_file()}
    assert main(["sweep.resume=sweeps/s", MODULES]) == 1  # two failed jobs remain
    expected[4] = "completed"
    assert statuses("sweeps/s") == expected
    assert [job["attempts"] for job in read_jobs("sweeps/s")] == [1, 1, 0, 1, 2, 1]
    assert recorded_steps("sweeps/s/4-scratch-llama") == list(range(1, 10))
    assert "resumed from step" in Path("sweeps/s/logs/4.log").read_text()
    assert {p: p.read_bytes() for p in untouched} == untouched


def test_fail_fast_stops_at_the_first_failure_and_retry_reruns_failed_jobs(capsys):
    sweep = [*QUICK, "steps=3,4,5", "hydra.sweep.dir=s", "callbacks.mishap.raises=4", "sweep.isolate=false"]
    assert main(["-m", *sweep, "sweep.fail_fast=true"]) == 1
    assert statuses("s") == ["completed", "failed", "waiting"]
    Path("mended").touch()
    again = ["sweep.resume=s", MODULES]
    assert main(again) == 1
    assert statuses("s") == ["completed", "failed", "completed"]
    assert main([*again, "sweep.retry=true"]) == 0
    assert statuses("s") == ["completed"] * 3
    assert [job["attempts"] for job in read_jobs("s")] == [1, 2, 1]
    assert recorded_steps("s/1-scratch-llama") == [1, 2, 3, 4]
    assert main(again) == 0  # no jobs remain


def test_retry_reruns_failed_and_rejected_jobs():
    jobs = [Job(number, [], status=status) for number, status in enumerate(Status) if status != Status.RUNNING]

    def retried_statuses(retry):
        settings, source = Sweep(retry=retry, resume="s"), JobSource(jobs)
        launcher = SimpleNamespace(
            runs_singly=True, is_local=True, total=8, settings=settings, configs=SimpleNamespace()
        )
        Runner(None, source, launcher, SimpleNamespace())
        return {str(job.status) for job in source.remaining_jobs()}

    assert retried_statuses(False) == {"waiting", "killed", "interrupted"}
    assert retried_statuses(True) == {"waiting", "killed", "interrupted", "failed", "refused"}


def test_fail_fast_stops_parallel_jobs_which_save(capsys):
    sweep = ["-m", *QUICK, "checkpoint_every=100", "steps=4,4000", "hydra.sweep.dir=s", "callbacks.mishap.wait=0.01"]
    sweep += ["callbacks.mishap.raises=4", "sweep.fail_fast=true"]
    assert main([*sweep, "hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]) == 1
    assert statuses("s") == ["failed", "interrupted"]


def test_a_run_killed_before_its_first_checkpoint_is_moved_away_and_restarted(capsys):
    sweep = ["-m", *QUICK, "checkpoint_every=0", "steps=4", "hydra.sweep.dir=s", "callbacks.mishap.exits=4"]
    assert main(sweep) == 1
    assert "error in job 0: ended with exit code 7 (log: s/0-" in capsys.readouterr().err
    dead = Path("s/0-scratch-llama/events.jsonl").read_bytes()
    Path("mended").touch()
    assert main(["-m", "sweep.resume=s", MODULES, "sweep.isolate=false"]) == 0
    assert recorded_steps("s/0-scratch-llama") == [1, 2, 3, 4]
    assert Path("s/0-scratch-llama.1/events.jsonl").read_bytes() == dead


# -- real processes ---------------------------------------------------------------------------------------------------


def start(*words):
    command = [sys.executable, "-m", "toyexp", *words]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "OMP_WAIT_POLICY": "passive"},
    )  # fmt: skip


def wait_for(condition, seconds=60.0):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


def has_checkpoint(run):
    return any(Path(run).glob("checkpoints/step-*"))


def writer_pid(run):
    """Return the process that holds the lock of a run."""
    return int((Path(run) / "run.lock").read_text().split()[0])


def is_free(run):
    try:
        os.close(lock(Path(run)))
    except Exception:
        return False
    return True


def test_a_killed_sweep_resumes(capsys):
    folder = 'ä "b" c=d/s'
    sweep = [*QUICK, "checkpoint_every=50", "steps=1500,1501,4", "callbacks.mishap.wait=0.01"]
    sweep.append(format_override("hydra.sweep.dir", folder))
    process = start("-m", *sweep, "sweep.launcher=processes", "sweep.jobs=2")
    first, second = (Path(folder, f"{n}-scratch-llama") for n in (0, 1))
    wait_for(lambda: has_checkpoint(first) and has_checkpoint(second))
    again = [*QUICK, "seed=0,1", format_override("hydra.sweep.dir", folder)]
    for words in ([format_override("sweep.resume", folder), MODULES], ["-m", *again]):
        assert main(words) == 2  # only one process may run a sweep
        assert "is being written by process" in capsys.readouterr().err
    os.kill(writer_pid(first), signal.SIGKILL)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    Path("mended").touch()
    assert statuses(folder)[1:] == ["running", "waiting"]
    wait_for(lambda: is_free(second))  # without its sweep, a job saves and exits
    assert json.loads((second / "result.json").read_text())["reason"] == "interrupted"
    in_one = ["sweep.launcher=serial", "sweep.jobs=0", "sweep.isolate=false"]
    assert main([format_override("sweep.resume", folder), MODULES, *in_one]) == 0
    assert statuses(folder) == ["completed"] * 3
    assert ["resumed from step" in Path(folder, f"logs/{n}.log").read_text() for n in range(3)] == [True, True, False]
    assert recorded_steps(first) == list(range(1, 1501)) and recorded_steps(second) == list(range(1, 1502))


@pytest.mark.parametrize(("number", "isolate"), [(signal.SIGINT, "false"), (signal.SIGTERM, "true")])
def test_a_signal_saves_the_running_job_and_prints_how_to_resume(number, isolate):
    sweep = ["-m", *QUICK, "steps=1000,1001", "hydra.sweep.dir=s", "callbacks.mishap.wait=0.01"]
    process = start(*sweep, f"sweep.isolate={isolate}")
    wait_for(lambda: has_checkpoint("s/0-scratch-llama"))
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert statuses("s") == ["interrupted", "waiting"] and is_report(Path("s/report.html"))
    steps = recorded_steps("s/0-scratch-llama")
    assert (Path("s/0-scratch-llama/checkpoints") / f"step-{steps[-1]}").is_dir()
    (line,) = err.splitlines()
    assert line.startswith(
        f"toyexp: interrupted by {number.name}; 0 of 2 jobs are completed; to resume: toyexp sweep.resume="
    )


@pytest.mark.slow
def test_submitit_requeues_jobs_whose_time_limit_is_reached(capsys):
    pytest.importorskip("submitit")
    sweep = ["-m", *QUICK, "checkpoint_every=50", "steps=800,0", "hydra.sweep.dir=s", "callbacks.mishap.wait=0.01"]
    process = start(*sweep, "sweep.launcher=submitit", "sweep.submitit.cluster=local")
    run = Path("s/0-scratch-llama")
    wait_for(lambda: has_checkpoint(run))
    parent = Path(f"/proc/{writer_pid(run)}/stat").read_text().rpartition(")")[2].split()[1]
    Path("mended").touch()
    os.kill(int(parent), signal.SIGUSR2)  # Slurm's signal for the time limit
    out, err = process.communicate(timeout=120)
    assert process.returncode == 2, err
    assert statuses("s") == ["completed", "refused"]
    assert "error in job 1: steps=0: must be" in err
    assert re.search(r"^\[0\] steps=800 +completed after 800 steps", out, re.MULTILINE)
    assert "resumed from step" in Path("s/logs/0.log").read_text()
    assert recorded_steps(run) == list(range(1, 801))


# -- in one process ---------------------------------------------------------------------------------------------------

LEAKY = """
import logging, os, random
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from toyexp import Callback, hookimpl


@hookimpl
def register_callbacks(register):
    register(Leaky)


@dataclass(eq=False)
class Leaky(Callback):
    "Changes whatever a process has only one of."

    name: ClassVar[str] = "leaky"
    fails: bool = False  # raise at the end of on_start

    @hookimpl
    def on_start(self, run):
        values = [random.random(), float(np.random.rand()), float(torch.rand(()))]
        (run.dir / "seen.txt").write_text(repr((values, os.environ.get("LEAK"), os.getcwd())))
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        os.environ["LEAK"] = str(run.seed)
        os.environ.pop("KEPT")
        os.chdir(run.dir)
        logging.getLogger().addHandler(logging.FileHandler("stray.txt"))
        logging.getLogger("toyexp").setLevel(logging.DEBUG)
        assert not self.fails
"""


def handles():
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts open files by /proc")
def test_jobs_in_one_process_do_not_affect_the_next_job(tmp_path, monkeypatch, capsys):
    torch = pytest.importorskip("torch")
    (tmp_path / "leaky.py").write_text(LEAKY)
    monkeypatch.delitem(sys.modules, "leaky", raising=False)
    monkeypatch.setenv("KEPT", "1")
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    state = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    quick = [w for w in QUICK if not w.startswith(("plugins=", "callbacks="))]
    line = ["-m", *quick, "plugins=[toyexp.testing.null,leaky]", "callbacks=[default,leaky]", "sweep.isolate=false"]

    def process():
        handler_counts = [len(logging.getLogger(name).handlers) for name in (None, "toyexp")]
        return handles(), threading.active_count(), handler_counts, logging.getLogger("toyexp").level, Path.cwd()

    assert main([*line, "steps=2", "seed=1", "hydra.sweep.dir=warm"]) == 0  # so that later runs load nothing new
    before = process()
    assert main([*line, "steps=3,0", "callbacks.leaky.fails=false,true,0", "seed=1", "hydra.sweep.dir=s"]) == 1
    assert statuses("s") == ["completed", "failed", "completed"] + ["refused"] * 3
    assert process() == before
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == state
    assert os.environ["KEPT"] == "1" and "LEAK" not in os.environ
    assert len({path.read_text() for path in Path("s").glob("*/seen.txt")}) == 1
    results = [json.loads(path.read_text()) for path in sorted(Path("s").glob("*/result.json"))]
    assert len({r["train_loss"] for r in results if r["reason"] == "completed"}) == 1


# -- state of a sweep --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sweep_dir(tmp_path_factory):
    """Create a sweep with a completed and a waiting job."""
    folder = tmp_path_factory.mktemp("begun")
    (folder / "mishap.py").write_text(MISHAP)
    line = ["-m", *QUICK, "steps=0,3", "hydra.sweep.dir=s", "sweep.isolate=false", "sweep.fail_fast=true"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(line) == 2
    return folder / "s"


@pytest.fixture
def sweep_json(sweep_dir):
    return Path(shutil.copytree(sweep_dir, "s")) / "sweep.json"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state["jobs"][1].update(directory="../elsewhere"), "job 1 has a directory outside"),
        (lambda state: state["jobs"][1].update(directory="/tmp/elsewhere"), "job 1 has a directory outside"),
        (lambda state: state["jobs"][1].update(status="done"), "'done' is not a valid Status"),
        (lambda state: state["jobs"][1].update(number=7), "the entry of job 1 has the number 7"),
        (lambda state: state["jobs"][1].update(overrides=["--config-path=/tmp"]), "a setting looks like a flag"),
        (lambda state: state["jobs"][1].update(overrides=[3]), "job 1: overrides has"),
        (lambda state: state["jobs"][1].update(attempts="1"), "job 1: attempts has"),
        (lambda state: state["jobs"].append(5), "is damaged"),
        (lambda state: state.update(flags=[]), "flags has the invalid value []"),
        (lambda state: state["jobs"][1].pop("code"), "code"),
        (lambda state: state.update(format=9), "sweep.json: has format 9; this toyexp reads format 1; if a newer"),
        (lambda state: state.update(settings=None), "settings has the invalid value None"),
        (lambda state: state.clear(), "is damaged: format is missing"),
        (lambda state: state["jobs"].clear(), "is damaged: jobs is empty"),
    ],
)
def test_a_malformed_sweep_json_is_rejected_with_one_line(sweep_json, change, message):
    state = json.loads(sweep_json.read_text())
    change(state)
    sweep_json.write_text(json.dumps(state))
    with pytest.raises(UserError) as error:
        SweepDir.open(Path("s"))
    assert message in str(error.value) and "\n" not in str(error.value)
    assert str(error.value).endswith("/s/RUN")  # single runs can be resumed instead


def test_a_job_directory_with_other_files_is_reported_with_a_remedy(sweep_json, capsys):
    retry = ["sweep.resume=s", MODULES, "sweep.retry=true", "sweep.report=false"]
    state = json.loads(sweep_json.read_text())
    for entry, name in zip(state["jobs"], "ab", strict=True):
        entry.update(status="killed", attempts=1, directory=name, overrides=["steps=1"])
    sweep_json.write_text(json.dumps(state))
    Path("s/a").write_text("mine")
    Path("s/b").mkdir()
    Path("s/b/notes").write_text("mine")
    assert main([*retry, "sweep.fail_fast=false"]) == 2
    output = capsys.readouterr().err
    assert "job 0: s/a: is the run directory of this job and is not empty; move it away" in output
    assert Path("s/a").read_text() == "mine" and "hydra.run.dir" not in output
    Path("s/a").unlink()
    assert main([*retry, "sweep.fail_fast=false"]) == 0
    shutil.rmtree("s/b")
    capsys.readouterr()
    assert main(retry) == 0
    output = capsys.readouterr().out
    assert "[1] is completed, but its run s/b is missing; train it again: toyexp" in output and "recorded" not in output
    assert "hydra.sweep" not in output
    shutil.rmtree("s/a")
    state = json.loads(sweep_json.read_text())
    state["jobs"][0].update(status="failed", code=1)
    sweep_json.write_text(json.dumps(state))
    assert main([*retry[:2], "sweep.report=false"]) == 1
    output = capsys.readouterr().out
    assert "[1] is completed, but its run s/b is missing; train it again: toyexp" in output


def test_a_sweep_interrupted_before_it_is_saved_leaves_no_directory(monkeypatch):
    def raise_interrupt(folder):
        raise KeyboardInterrupt

    monkeypatch.setattr(SweepDir, "save", raise_interrupt)
    spec = SweepSpec({}, [], [], "", [])
    with pytest.raises(KeyboardInterrupt):
        SweepDir.create(Path("new"), [Job(0, [])], spec)
    assert not Path("new").exists()


def test_invalid_numbers_in_a_sweep_json_are_dropped(sweep_json):
    state = json.loads(sweep_json.read_text())
    numbers = {"steps": "many", "train_loss": [1], "eval_loss": 2.5, "eval_scores": {"accuracy": {}}, "else": 1}
    state["jobs"][0].update(result=numbers, overrides=["name=\ud800"])
    sweep_json.write_text(json.dumps(state))
    folder = SweepDir.open(Path("s"))
    folder.save()
    folder.close()
    assert folder.jobs[0].result == {"eval_loss": 2.5}
    assert "\\ud800" in Path("s/summary.csv").read_text()


def test_a_sweep_json_cannot_load_code(sweep_json, capsys):
    state = json.loads(sweep_json.read_text())
    state["settings"][0] = "plugins=[evil]"
    sweep_json.write_text(json.dumps(state))
    Path("evil.py").write_text("raise SystemExit('it was loaded')")
    assert main(["sweep.resume=s", MODULES]) == 2
    assert "add 'plugins=[evil]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sweep.resume=s"], "add 'plugins=[toyexp.testing.null,mishap]'"),
        (["sweep.resume=s", MODULES, "lr=1"], "lr=1: a resumed sweep keeps its settings"),
        (["-m", "sweep.resume=s", MODULES, "seed=1,2"], "seed=1,2: a resumed sweep keeps its settings"),
        (["sweep.resume=s", MODULES, "--config-dir", "."], "--config-dir: a resumed sweep keeps its settings"),
        (["-m", *QUICK, "seed=1,2", "hydra.sweep.dir=s"], "already holds a sweep; continue it: sweep.resume="),
    ],
)
def test_settings_that_contradict_an_existing_sweep_are_rejected(sweep_json, words, message, capsys):
    before = sweep_json.read_bytes()
    assert main(words) == 2
    assert message in capsys.readouterr().err
    assert sweep_json.read_bytes() == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["seed=0,1", "seed=2,3"], "seed=0,1 seed=2,3: seed is given twice; list all its values once: seed=0,1,2,3"),
        (["seed=0,1", "+seed=1,2"], "list all its values once: seed=0,1,2"),
        (["seed=range(0,2)", "seed=2,3"], "seed=range(0,2) seed=2,3: seed is given twice; give its values once"),
        (["seed=0,1", "lr=1", "seed=2"], "seed=0,1 seed=2: seed is given twice"),
        (["lr=[1e-3,1e-2]"], "lr=[1e-3,1e-2]: write the values of a sweep without brackets: lr=1e-3,1e-2"),
        (["data_seed=[1,2]"], "data_seed=[1,2]: write the values of a sweep without brackets: data_seed=1,2"),
        (["seed=0,1", "sweep.dir=s"], "did you mean hydra.sweep.dir?"),
    ],
)
def test_wrong_syntax_for_several_values_is_reported_before_the_first_job(words, message, capsys):
    assert main(["-m", *QUICK, *words, "hydra.sweep.dir=s"]) == 2
    assert message in capsys.readouterr().err
    assert not Path("s").exists()


def test_a_sweep_completes_without_standard_output():
    line = [sys.executable, "-m", "toyexp", "-m", *QUICK, "steps=1,2", "hydra.sweep.dir=s", "sweep.report=false"]
    ended = subprocess.run(["sh", "-c", 'exec "$@" >&-', "sh", *line], stderr=subprocess.PIPE, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert statuses("s") == ["completed", "completed"]


def test_job_directories_must_differ_and_be_inside_the_sweep(capsys):
    line = ["-m", *QUICK, "steps=2,3", "sweep.isolate=false"]
    for subdir, seeds in (("x", "seed=0"), ("'${steps}'", "seed=0,1"), ("'${hydra:job.id}'", "seed=0")):
        assert main([*line, seeds, "hydra.sweep.dir=s", f"hydra.sweep.subdir={subdir}"]) == 2
        err = capsys.readouterr().err
        assert "hydra.sweep.subdir gives jobs 0 and 1 the same directory" in err or "hydra.sweep.subdir: " in err
        assert not Path("s").exists()
    assert main([*line, "seed=1", "hydra.sweep.dir=s", "hydra.sweep.subdir='${steps}-${hydra:job.num}'"]) == 0
    assert sorted(job["directory"] for job in read_jobs("s")) == ["2-0", "3-1"]
    quick = [word for word in line if not word.startswith("steps=")]
    assert (
        main(
            [*quick, "steps=2", "seed=1,2", "hydra.sweep.dir=u", "hydra.sweep.subdir='a${hydra:job.override_dirname}'"]
        )
        == 0
    )
    assert ["seed=1" in job["directory"] for job in read_jobs("u")] == [True, False]
    assert main([*line, "hydra.sweep.dir=t", "hydra.sweep.subdir='../x${steps}'"]) == 2
    assert "error in job 0: hydra.sweep.subdir points outside of the sweep's directory" in capsys.readouterr().err
    assert not Path("t").exists() and not list(Path().glob("x*"))


def list_jobs(*words, fixed=("data=random", "engine=cpu")):
    """Return the jobs of a sweep and the JobConfigs that checks them."""
    parsed = parse(words)
    jobs = [Job(number, list(varied)) for number, varied in enumerate(combinations(parsed))]
    return jobs, JobConfigs(Request.parse(fixed))


def test_every_value_is_checked_once_before_the_first_job_and_names_are_composed_once(monkeypatch):
    composed = []
    real = request_module.compose
    monkeypatch.setattr(request_module, "compose", lambda *a: composed.append(a[0]) or real(*a))
    jobs, job_configs = list_jobs("recipe=scratch,warm,wram", "seed=0,1,-1", "model.d_model=64,x,66", "lr=0.1,0.2,nan")
    wrong = {tuple(jobs[number].overrides): str(error) for number, error in check_values(jobs, job_configs).items()}
    first = ("recipe=scratch", "seed=0", "model.d_model=64", "lr=0.1")
    assert wrong.pop(("recipe=wram", *first[1:])).startswith("recipe=wram: unknown name")
    assert wrong.pop((first[0], "seed=-1", *first[2:])).startswith("seed=-1: must be a whole number from 0")
    assert wrong.pop((*first[:2], "model.d_model=x", first[3])) == "model.d_model=x: must be a whole number"
    assert wrong.pop((*first[:2], "model.d_model=66", first[3])).startswith("model.n_heads=4 does not divide")
    assert wrong.pop((*first[:3], "lr=nan")).startswith("lr=nan: must be")
    assert wrong == {} and len(composed) == 3


def test_a_job_built_without_hydra_has_the_settings_of_a_composed_one():
    jobs, job_configs = list_jobs("recipe=scratch,warm", "seed=0,7", "model.tied=true,null",
                                  "name=a b,'c',${recipe.name}", "recipe.init=default,toy",
                                  "plugins=a,[b,c]")  # fmt: skip
    for job in (jobs[0], jobs[-1], jobs[5], jobs[40]):
        if "model.tied=null" in job.overrides:
            with pytest.raises(UserError, match=r"model\.tied=null: cannot be null"):
                job_configs.config(job)
            continue
        composed = job_configs.request.compose(*job.overrides, f"hydra.job.num={job.number}").cfg
        cfg = job_configs.config(job).cfg
        assert cfg.hydra.job.num == composed.hydra.job.num == job.number
        plain = [OmegaConf.to_container(OmegaConf.masked_copy(c, [k for k in c if k != "hydra"]), resolve=True)
                 for c in (cfg, composed)]  # fmt: skip
        assert plain[0] == plain[1]


def test_group_patterns_of_a_sweep_have_the_same_errors_as_in_its_jobs():
    patterns = "{*attn*: {lr: 1}},{blk.0.*: {frozen: true}},{},output.weight,'{output.weight: {lr: 1}}',null"
    jobs, job_configs = list_jobs(f"optim.groups={patterns}", "steps=5,2e3",
                             fixed=("data=random", "engine=cpu", "optim.groups={*: {weight_decay: 0}}"))  # fmt: skip

    def outcome(config, *words):
        try:
            cfg = config(*words).cfg
        except UserError as error:
            return str(error)
        return list(cfg.optim.groups.items()), cfg.steps

    outcomes = [outcome(job_configs.config, job) for job in jobs]
    assert outcomes == [outcome(job_configs.request.compose, *job.overrides) for job in jobs]
    assert outcomes[2] == ([("blk.0.*", {"frozen": True}), ("*", {"weight_decay": 0})], 5)
    assert outcomes[1] == "steps=2000.0: must be a whole number; write steps=2000"
    assert all(
        "must be a mapping in braces: optim.groups={blk.*: {lr: 0.001}}" in outcome_text
        for outcome_text in outcomes[6::2]
    )


def test_an_error_in_every_job_stops_the_sweep_but_an_invalid_value_does_not():
    for fixed, message in (("optim.beta1=2", "optim.beta1=2.0"), ("stesp=5", "unknown key stesp")):
        jobs, job_configs = list_jobs("seed=1,2", fixed=("data=random", fixed))
        with pytest.raises(UserError, match=message):
            check_values(jobs, job_configs)
    jobs, job_configs = list_jobs("steps=-1,5,-2")
    assert set(check_values(jobs, job_configs)) == {0, 2}


def test_an_error_that_every_job_raises_is_reported_once(capsys):
    words = [*QUICK, "data=text", "data.path=tiny.txt", "seed=0,1,2", "sweep.isolate=false", "hydra.sweep.dir=s"]
    Path("tiny.txt").write_text("abc")
    assert main(["-m", *words]) == 2
    out, err = capsys.readouterr()
    (why,) = {job["error"] for job in read_jobs("s")}
    assert "model.context=16" in why and err.count(why) == 1 and out.count(why) == 1
    assert "error in job 2: as in job 0" in err and out.count("refused, as job 0") == 2


def test_swept_lists_have_plain_values():
    (override,) = parse(['recipe.targets=[qkv],["*"]'])
    assert [value for _, value in sweep_values(override)] == [["qkv"], ["*"]]


def test_a_thousand_jobs_are_checked_within_two_seconds():
    jobs, job_configs = list_jobs("seed=range(0,1000)")
    began = time.process_time()
    assert check_values(jobs, job_configs) == {}
    assert time.process_time() - began < 2  # composing each job would take minutes


def test_a_runs_configuration_has_no_sweep_settings(sweep_json, capsys):
    assert main(["sweep.resume=s", MODULES, "sweep.jobs=1"]) == 2
    config = yaml.safe_load(Path("s/1-scratch-llama/config.yaml").read_text())
    assert "sweep" not in config


def test_swapped_runs_are_reported_and_change_no_record(capsys):
    assert main(["-m", *QUICK, "seed=1,2", "steps=1", "sweep.isolate=false", "hydra.sweep.dir=s"]) == 0
    recorded, runs = read_jobs("s"), [Path(f"s/{number}-scratch-llama") for number in (0, 1)]
    assert main(["sweep.resume=s", MODULES]) == 0
    assert "recorded" not in capsys.readouterr().out
    swap(*runs)
    assert main(["sweep.resume=s", MODULES]) == 0
    out = capsys.readouterr().out
    assert "[0] seed=1: s/0-scratch-llama is not the run that the sweep recorded: " in out and "[1] seed=2: s/1-" in out
    assert main(["resume=s/0-scratch-llama", MODULES, "steps=2"]) == 0
    assert "s: its summary is not updated: job 0 was another run: " in capsys.readouterr().out
    assert read_jobs("s") == recorded


def swap(one, other):
    for run, to in ((one, Path("x")), (other, one), (Path("x"), other)):
        run.rename(to)


def interrupt(folder, status="killed"):
    """Take back the last step of each job of a sweep that has completed, as if the sweep had been killed before it."""
    state = json.loads((Path(folder) / "sweep.json").read_text())
    for job in state["jobs"]:
        run = Path(folder, job["directory"])
        job |= {"status": status, "code": None, "result": {}}
        (run / "result.json").unlink()
        shutil.rmtree(max((run / "checkpoints").iterdir()))
    (Path(folder) / "sweep.json").write_text(json.dumps(state))


def read_files(*runs):
    return {path: path.read_bytes() for run in runs for path in sorted(run.rglob("*")) if path.is_file()}


@pytest.mark.parametrize(
    "how",
    [
        ["sweep.launcher=serial"],
        *(
            pytest.param(["sweep.isolate=true", f"sweep.launcher={x}"], marks=pytest.mark.release)
            for x in ("joblib", "stacked")
        ),
    ],
    ids=" ".join,
)
def test_a_job_only_resumes_its_own_run(how, capsys):
    assert main(["-m", *QUICK, "lr=1e-4,1e-2,1e-3", "steps=2", "sweep.isolate=false", "hydra.sweep.dir=s"]) == 0
    interrupt("s", "running" if "sweep.launcher=processes" in how else "killed")
    first, second = (Path(f"s/{number}-scratch-llama") for number in (0, 1))
    swap(first, second)
    before = read_files(first, second)
    assert main(["sweep.resume=s", MODULES, *how]) == 1
    assert statuses("s") == ["killed", "killed", "completed"] and read_files(first, second) == before
    refused = (
        "s/0-scratch-llama: holds another run: lr is 0.01 in that run and 0.0001 in this job; put the job's own run"
    )
    assert refused in capsys.readouterr().err and refused in read_jobs("s")[0]["error"]
    swap(first, second)
    assert main(["sweep.resume=s", MODULES, *how]) == 0
    assert statuses("s") == ["completed"] * 3 and recorded_steps(first) == [1, 2]


@pytest.mark.parametrize(
    ("swept", "message"),
    [
        ("seed=1,2", "seed is 2 in that run and 1 in this job"),
        ("model=llama,gpt2", "model is gpt2 in that run and llama in this job"),
        ("model.d_model=16,32", "model.d_model is 32 in that run and 16 in this job"),
        ("data_seed=null,1", "data_seed is 1 in that run and null in this job"),
    ],
)
def test_a_finished_run_with_other_settings_is_not_accepted_as_a_jobs_run(swept, message, capsys):
    words = [word for word in QUICK if word.partition("=")[0] != swept.partition("=")[0]]
    words += ["steps=1", "sweep.isolate=false", "hydra.sweep.subdir=${hydra.job.num}", "hydra.sweep.dir=s"]
    assert main(["-m", *words, swept]) == 0
    state = json.loads(Path("s/sweep.json").read_text())
    for job in state["jobs"]:
        job |= {"status": "running", "code": None, "result": {}}
    Path("s/sweep.json").write_text(json.dumps(state))
    swap(Path("s/0"), Path("s/1"))
    assert main(["sweep.resume=s", MODULES]) == 1
    assert statuses("s") == ["killed", "killed"] and f"s/0: holds another run: {message}; " in capsys.readouterr().err
    swap(Path("s/0"), Path("s/1"))
    Path("s/1").rename("elsewhere")
    assert main(["sweep.resume=s", MODULES]) == 0  # one run exists, the other is trained again


def test_a_jobs_run_is_recognised_by_its_settings():
    """Cover texts that Hydra reads as numbers, computed values, and settings that a resume may change."""
    Path("2024_01").write_text("It was a bright cold day in April. " * 50)
    fixed = [w for w in QUICK if w != "data=random"] + [
        "data=text", "data.path=2024_01", "name=x-${hydra:job.num}", "model_seed=${seed}",
        "batch_size=2", "epochs=0.1", "optim.groups={output.*: {lr: 0.5}, blk.*: {frozen: true}}", "eval_every=0",
    ]  # fmt: skip
    assert main(["-m", *fixed, "seed=1,2", "sweep.isolate=false", "hydra.sweep.dir=s"]) == 0
    jobs, job_configs = list_jobs("seed=1,2", fixed=fixed)
    runs = sorted(path.parent for path in Path("s").glob("*/config.yaml"))
    assert [[bool(job_configs.other_run(job, run)) for run in runs] for job in jobs] == [[False, True], [True, False]]
    config = runs[0] / "config.yaml"
    config.write_text(config.read_text().replace("checkpoint_every: 1", "checkpoint_every: 7"))
    assert not job_configs.other_run(jobs[0], runs[0])
    config_text = config.read_text()
    config.write_text(config_text.replace("\nlr: 0.003\n", "\nlr: 0.5\n"))  # not set by an override
    assert job_configs.other_run(jobs[0], runs[0]) == "lr is 0.5 in that run and 0.003 in this job"
    config.write_text(config_text.replace("name: scratch", "name: lora"))
    assert job_configs.other_run(jobs[0], runs[0]) == "recipe is lora in that run and scratch in this job"
    config.write_text(config_text.replace("frozen: true", "frozen: false"))
    assert (
        job_configs.other_run(jobs[0], runs[0]) == "optim.groups.blk.*.frozen is false in that run and true in this job"
    )


def test_swapped_and_missing_runs_are_reported_by_the_api_and_compare(capsys):
    assert main(["-m", *QUICK, "lr=1e-4,1e-2", "steps=1", "sweep.isolate=false", "hydra.sweep.dir=s"]) == 0
    first, second = (Path(f"s/{number}-scratch-llama") for number in (0, 1))
    toyexp.open("s", plugins=["toyexp.testing.null", "mishap"])
    assert main(["compare", "s"]) == 0
    assert not {"recorded", "any more"} & {*capsys.readouterr().out.split()}
    swap(first, second)
    toyexp.open("s", plugins=["toyexp.testing.null", "mishap"])
    errors = capsys.readouterr().err
    assert "job 0: s/0-scratch-llama contains a run of another sweep: " in errors and "job 1: s/1-" in errors
    first.rename("elsewhere")
    assert main(["compare", "s"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "not counted: 1 run of s no longer there: 0-scratch-llama" in output


def test_an_experiment_may_have_sweep_settings(tmp_path, capsys):
    (tmp_path / "own" / "experiment").mkdir(parents=True)
    (tmp_path / "own" / "experiment" / "mine.yaml").write_text(
        "# @package _global_\nsweep: {isolate: false, fail_fast: true}\nhydra: {sweeper: {params: {steps: '0,2'}}}\n"
    )
    assert main(["-m", "--config-dir", "own", "experiment=mine", *QUICK, "hydra.sweep.dir=s"]) == 2
    assert statuses("s") == ["refused", "waiting"]
    assert not Path("s/logs").exists()
    assert main(["sweep.resume=s", MODULES, "sweep.fail_fast=false"]) == 2
    assert statuses("s") == ["refused", "completed"]
    (tmp_path / "own" / "experiment" / "mine.yaml").write_text("# @package _global_\nsweep: {isolaet: false}\n")
    assert main(["-m", "--config-dir", "own", "experiment=mine", *QUICK, "seed=1,2"]) == 2
    assert "unknown key sweep.isolaet; did you mean sweep.isolate?" in capsys.readouterr().err


def test_a_launcher_with_a_missing_package_prints_the_install_command(monkeypatch, capsys):
    for name in ("submitit", "ray"):
        monkeypatch.setitem(sys.modules, name, None)
        assert main(["-m", *QUICK, "seed=1,2", f"sweep.launcher={name}"]) == 2
        assert f"{name} is not installed: pip install 'toyexp[{name}]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ["a/b", "a b", 'say "x"', "back\\slash", 'both\\"', "end\\", "ü=ß", "007", "null", "it's"]
)
def test_a_quoted_path_with_any_characters_is_parsed_back(text):
    (override,) = parse([format_override("hydra.run.dir", text)])
    assert override.value() == text and isinstance(override.value(), str)


ON_GPUS = """
import os, time
from dataclasses import dataclass
from typing import ClassVar

from toyexp import Callback, hookimpl
from toyexp.testing import NullEngine


@hookimpl
def register_engines(register):
    register(OnGpus)


@hookimpl
def register_callbacks(register):
    register(Told)


@dataclass
class OnGpus(NullEngine):
    "Says that it takes GPUs."

    name: ClassVar[str] = "ongpus"
    take: int = 1  # number of GPUs; 0: all

    def gpus(self):
        return self.take or None


@dataclass(eq=False)
class Told(Callback):
    "Writes down which GPUs its run sees, and when."

    name: ClassVar[str] = "told"

    @hookimpl
    def on_step(self, run):
        began = time.time()
        time.sleep(1)
        (run.dir / "told").write_text(f"{os.environ['CUDA_VISIBLE_DEVICES']} {began} {time.time()}")
"""


@pytest.mark.parametrize(("take", "seen"), [(1, {"4", "5", "x7"}), (2, {"4,5", "x7,4", "5,x7"}), (0, {"4,5,x7"})])
def test_parallel_jobs_use_different_gpus(tmp_path, monkeypatch, take, seen):
    (tmp_path / "ongpus.py").write_text(ON_GPUS)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,x7")
    words = [*QUICK[2:-1], "plugins=[ongpus]", "engine=ongpus", f"engine.take={take}", "callbacks=[told]", "steps=1"]
    assert main(["-m", *words, "seed=0,1", "sweep.launcher=processes", "sweep.jobs=2", "hydra.sweep.dir=s"]) == 0
    uses = [path.read_text().split() for path in sorted(Path("s").glob("*/told"))]
    assert len(uses) == 2 and {gpus for gpus, _, _ in uses} <= seen
    (one, _, first_end), (other, next_start, _) = sorted(uses, key=lambda use: use[1])
    assert float(next_start) >= float(first_end) or not {*one.split(",")} & {*other.split(",")}, uses


def test_gpus_are_only_shared_if_there_are_too_few(monkeypatch):
    pool = Gpus(["0", "1"])
    assert [pool.capacity(most) for most in (0, 1, 2, 3)] == [0, 2, 1, 1]
    with pool.reserve(1) as one, pool.reserve(1) as other, pool.reserve(1) as third:
        assert (one, other, third) == (["0"], ["1"], ["0"])
        with pool.reserve(3) as too_many, pool.reserve(2) as all_of_them:
            assert (too_many, sorted(all_of_them)) == ([], ["0", "1"])
    with pool.reserve(1) as one, pool.reserve(1) as other, pool.reserve(1) as third:
        with pool.reserve(2):
            pass  # then GPU "0" still has two jobs and GPU "1" one
        with pool.reserve(1) as fourth, pool.reserve(1) as fifth:
            assert (one, other, third, fourth, fifth) == (["0"], ["1"], ["0"], ["1"], ["0"])
    for visible, names in (("", []), ("-1", []), ("3, GPU-ab", ["3", "GPU-ab"])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert visible_gpus() == names


@pytest.mark.parametrize(
    ("words", "at_once", "cores"),
    [
        (["engine.devices=1"], 8, 1),
        (["engine.devices=2"], 4, 2),
        (["engine.devices=1,3"], 2, 4),
        (["engine.devices=9"], 1, 8),
        (["engine.devices=2", "sweep.jobs=5"], 5, 2),
        (["sweep.jobs=1000000"], 9, 1),  # one per job
    ],
)
def test_jobs_with_several_processes_have_one_core_per_process(monkeypatch, words, at_once, cores):
    seen = []
    monkeypatch.setattr(launcher, "available_cores", lambda: 8)
    monkeypatch.setattr(processes, "run_in_threads", lambda jobs, run, limit: seen.append(limit) or iter(()))
    monkeypatch.setattr(Processes, "preload", lambda self, words, stop: seen.append(self.share))
    main(
        ["-m", "engine=cpu", "data=random", "seed=range(0,9)", *words, "sweep.launcher=processes", "hydra.sweep.dir=s"]
    )
    assert [seen[0][:3], seen[1]] == [(at_once, cores, 0), at_once]


def test_a_search_runs_no_more_jobs_at_once_than_it_has_trials(monkeypatch):
    seen = []
    monkeypatch.setattr(processes, "run_in_threads", lambda jobs, run, limit: seen.append(limit) or iter(()))
    search = ["sweep.search=random", "sweep.trials=3", "sweep.launcher=processes", "sweep.jobs=1000000"]
    main(["-m", "engine=cpu", "data=random", "lr=0.1,0.2,0.3,0.4", "eval_every=4", *search, "hydra.sweep.dir=s"])
    assert seen == [3]


@pytest.mark.parametrize(
    ("settings", "jobs", "most", "at_once", "stacks_each"),
    [
        ({"launcher": "processes"}, 8, 1, 2, 1),
        ({"launcher": "processes", "per_gpu": 3}, 8, 1, 6, 1),
        ({"launcher": "processes", "per_gpu": 3, "jobs": 9}, 20, 1, 6, 1),
        ({"launcher": "processes", "jobs": 9}, 20, 1, 9, 1),
        ({"launcher": "processes"}, 8, 2, 1, 1),
        ({"launcher": "stacked"}, 63, 1, 2, 1),
        ({"launcher": "stacked"}, 128, 1, 4, 2),  # 32 jobs per stack
        ({"launcher": "stacked"}, 9999, 1, 8, 4),
        ({"launcher": "stacked", "jobs": 16}, 9999, 1, 2, 1),
        ({"launcher": "stacked", "per_gpu": 3}, 9, 1, 6, 3),
        ({"launcher": "stacked"}, 9999, 2, 1, 1),
    ],
)
def test_the_requested_number_of_jobs_or_stacks_shares_a_gpu(monkeypatch, settings, jobs, most, at_once, stacks_each):
    for module in (launcher, stacks):
        monkeypatch.setattr(module, "available_cores", lambda: 16)
    ahead = SimpleNamespace(gpus=lambda job, auto: most, processes=lambda job: 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    cls = LAUNCHERS[settings["launcher"]]
    found = cls(Sweep(**settings), [Job(n, []) for n in range(jobs)], jobs, ahead).share
    assert (found.jobs, found.stacks, found.cores) == (at_once, stacks_each, 16 // at_once)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sweep.per_gpu=2"], "sweep.launcher=processes or stacked"),
        (["sweep.per_gpu=2", "sweep.launcher=ray"], "sweep.ray.gpus=0.25"),
        (["sweep.per_gpu=-1", "sweep.launcher=processes"], "sweep.per_gpu=-1"),
    ],
)
def test_invalid_gpu_sharing_is_rejected(capsys, words, message):
    assert main(["-m", "seed=0,1", *words]) == 2
    assert message in capsys.readouterr().err


def test_the_gpus_of_a_cluster_job_default_to_those_of_its_engine(tmp_path):
    pytest.importorskip("submitit")
    for settings, gpus in ((Submitit(cluster="local"), 2), (Submitit(cluster="local", gpus=1), 1)):
        assert on_submitit.make_executor(tmp_path, settings, 2)._executor.parameters["gpus_per_node"] == gpus


def test_the_limit_of_cores_is_respected(monkeypatch):
    for given, cores in (("1", 1), ("0", machine_cores()), ("", machine_cores()), ("999", machine_cores())):
        monkeypatch.setenv(CORES_VARIABLE, given)
        assert available_cores() == cores


@pytest.mark.parametrize("given", ["junk", "-3", "1.5", " "])
def test_an_invalid_limit_of_cores_is_rejected(given, monkeypatch, capsys):
    monkeypatch.setenv(CORES_VARIABLE, given)
    assert main([*QUICK, "engine.threads=1"]) == 2
    assert f"{CORES_VARIABLE}={given}: must be a number of cores from 1" in capsys.readouterr().err


def test_the_end_of_a_process_is_described():
    assert str(JobExit(-signal.SIGSEGV, "GGML_ASSERT failed")) == "killed by SIGSEGV; last output: GGML_ASSERT failed"
    assert str(JobExit(3)) == "ended with exit code 3"


def test_too_many_parallel_jobs_are_reduced_to_the_machines_limit_with_a_note(monkeypatch, capsys):
    monkeypatch.setattr("toyexp.sweeps.launchers.processes.MAX_PROCESSES", 1)
    monkeypatch.setattr(processes, "run_process", lambda *order, **how: JobExit(3, "not run"))
    words = [*QUICK, "seed=0,1", "sweep.launcher=processes", "sweep.jobs=2", "sweep.report=false", "hydra.sweep.dir=s"]
    assert main(["-m", *words]) == 1
    assert "sweep.jobs=2: at most 1 jobs can run at once" in capsys.readouterr().out
