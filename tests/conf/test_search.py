"""Searches: trials reach the runs, bad runs are pruned, and a resumed search repeats no run."""

import contextlib
import errno
import json
import math
import os
import shlex
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from toyexp.base.errors import UserError
from toyexp.cli.main import main
from toyexp.sweeps.search.searcher import Search
from toyexp.training.rundir import lock

optuna = pytest.importorskip("optuna")

SLOW = """
import errno, os, time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from toyexp import Callback, hookimpl


@hookimpl
def register_callbacks(register):
    register(Slow)


@dataclass(eq=False)
class Slow(Callback):
    "Sleeps in each step until the file `mended` exists; fails above a learning rate."

    name: ClassVar[str] = "slow"
    wait: float = 0.0
    fails_above: float = 1e9

    @hookimpl
    def on_step(self, run):
        assert run.lr <= self.fails_above
        if Path("full").exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if not Path("mended").exists():
            time.sleep(self.wait)
"""
TINY = ["data=random", "data.vocab=32", "model.n_layers=1", "model.d_model=16", "model.context=8", "model.d_ff=24",
        "batch_size=2", "steps=8", "eval_every=2"]  # fmt: skip
CPU = [*TINY, "engine=cpu", "engine.threads=1", "callbacks=[]", "checkpoint_every=0"]
GGML = [word.replace("=cpu", "=ggml") for word in CPU]  # ggml loads faster than torch in a new process
NOOP = [*TINY, "plugins=[toyexp.testing.null,slow]", "engine=noop", "callbacks=[events,slow]", "checkpoint_every=1"]
HERE = "sweep.isolate=false"
LOG = "lr=tag(log, interval(1e-4, 1e-1))"


@pytest.fixture(autouse=True)
def _work_in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "slow.py").write_text(SLOW)
    monkeypatch.delitem(sys.modules, "slow", raising=False)


def read_jobs(folder="s"):
    return json.loads(Path(folder, "sweep.json").read_text())["jobs"]


def read_search_json(folder="s"):
    return json.loads(Path(folder, "search.json").read_text())


def trials(folder="s"):
    """Load the trials from the journal with Optuna."""
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(Path(folder, "study.log"))))
    return optuna.load_study(study_name=None, storage=storage).trials


def result(job, folder="s"):
    return json.loads(Path(folder, job["directory"], "result.json").read_text())


def recorded_steps(job, folder="s"):
    lines = Path(folder, job["directory"], "events.jsonl").read_text().splitlines()
    return [line["step"] for line in map(json.loads, lines) if line["kind"] == "step"]


@pytest.mark.parametrize("search", ["random", "tpe", "cmaes"])
def test_trials_reach_the_runs_and_the_best_is_saved_with_a_command_that_repeats_it(search, capsys):
    more = [] if search == "cmaes" else ["optim.weight_decay=0,0.1", "recipe.init=choice(default,toy)"]
    keys = [LOG, "seed=int(interval(1, 9))", "optim.beta1=range(0.5,0.85,0.1)", *more]
    search_settings = [f"sweep.search={search}", "sweep.trials=7", "hydra.sweep.dir=s", HERE]
    assert main(["-m", *CPU, *keys, *search_settings]) == 0
    out = capsys.readouterr().out
    scores = {}
    for job, trial in zip(read_jobs(), trials(), strict=True):
        config = yaml.safe_load(Path("s", job["directory"], "config.yaml").read_text())
        params = trial.params
        assert (config["lr"], config["seed"]) == (params["lr"], params["seed"])
        assert config["optim"]["beta1"] == pytest.approx(params["optim.beta1"], abs=1e-12)
        assert config["optim"]["beta1"] in (0.5, 0.6, 0.7, 0.8)
        if more:
            assert str(config["optim"]["weight_decay"]).removesuffix(".0") == params["optim.weight_decay"]
            assert config["recipe"]["init"] == params["recipe.init"]
        assert 1e-4 <= params["lr"] <= 1e-1 and float(f"{params['lr']:.4g}") == params["lr"]
        assert trial.value == result(job)["eval_loss"]
        assert trial.state == optuna.trial.TrialState.COMPLETE
        scores[job["number"]] = trial.value
    assert len({trial.params["lr"] for trial in trials()}) == 7
    search = read_search_json()
    assert search["best"]["score"] == min(scores.values()) == scores[search["best"]["jobs"][0]]
    assert search["importances"] == {} and "7 points are too few" in search["no_importances"]
    assert f"importance is unknown: {search['no_importances']}" in out
    assert f"again   {search['best']['command']}" in out and "optuna-dashboard s/study.log" in out
    assert main([*shlex.split(search["best"]["command"])[1:], "hydra.run.dir=again"]) == 0
    assert json.loads(Path("again/result.json").read_text())["eval_loss"] == search["best"]["score"]


def test_accuracy_is_maximised_and_ppl_is_computed_from_the_loss():
    words = ["model=vit", "data=digits", "recipe=scratch", "engine=cpu", "engine.threads=1", "callbacks=[]"]
    words += ["checkpoint_every=0", "model.n_layers=1", "model.d_model=16", "steps=2", "eval_every=2", "seed=0,1"]
    assert main(["-m", *words, "sweep.search=grid", "sweep.metric=accuracy", HERE, "hydra.sweep.dir=s"]) == 0
    scores = [result(job)["eval_scores"]["accuracy"] for job in read_jobs()]
    assert [trial.value for trial in trials()] == scores and read_search_json()["best"]["score"] == max(scores)
    assert main(["-m", *CPU, "seed=0,1", "sweep.search=grid", "sweep.metric=ppl", HERE, "hydra.sweep.dir=t"]) == 0
    assert read_search_json("t")["best"]["score"] == pytest.approx(
        math.exp(min(result(job, "t")["eval_loss"] for job in read_jobs("t")))
    )


def test_a_bad_run_is_pruned_at_an_evaluation():
    sweep = [*GGML, "lr=0.01,30,0.02", "sweep.search=grid", "sweep.prune=asha", "hydra.sweep.dir=s"]
    assert main(["-m", *sweep]) == 0
    first, second, third = read_jobs()
    assert third["status"] in ("completed", "pruned")
    assert (first["status"], second["status"], second["code"]) == ("completed", "pruned", 0)
    assert second["error"].startswith("sweep.prune=asha: the held-out loss ") and "after step 2" in second["error"]
    assert (result(second)["reason"], result(second)["steps"], result(first)["steps"]) == ("aborted", 2, 8)
    assert second["error"] in Path("s/summary.csv").read_text()
    good, bad, _ = trials()
    assert bad.state == optuna.trial.TrialState.PRUNED and bad.intermediate_values == {2: result(second)["eval_loss"]}
    assert list(good.intermediate_values) == [2, 4, 6, 8]  # not step 0, before training
    config = yaml.safe_load(Path("s", second["directory"], "config.yaml").read_text())
    assert "sweep" not in config and not config["callbacks"]  # a run has no settings of its search


def test_the_score_of_a_trial_is_the_mean_over_its_seeds(capsys):
    sweep = [*CPU, "seed=4", "lr=0.01,0.001", "sweep.search=grid", "sweep.repeats=3", HERE, "hydra.sweep.dir=s"]
    assert main(["-m", *sweep]) == 0
    assert [job["overrides"] for job in read_jobs()] == [
        [f"lr={lr}", f"seed={seed}"] for lr in ("0.01", "0.001") for seed in (4, 5, 6)
    ]
    losses = [[result(job)["eval_loss"] for job in read_jobs() if job["trial"] == trial] for trial in (0, 1)]
    assert [trial.value for trial in trials()] == [pytest.approx(statistics.fmean(each)) for each in losses]
    best = read_search_json()["best"]
    assert best["score"] == pytest.approx(min(map(statistics.fmean, losses)))
    assert best["deviation"] == pytest.approx(statistics.stdev(losses[best["trial"]]))
    assert "over 3 seeds" in capsys.readouterr().out
    command = shlex.split(json.loads(Path("s/search.json").read_text())["best"]["command"])
    assert sum(word.startswith("seed=") for word in command) == 1


def test_a_search_has_no_more_runs_than_combinations(capsys):
    sweep = [*CPU, "lr=0.01,0.001", "sweep.search=tpe", "sweep.trials=5", HERE, "hydra.sweep.dir=s"]
    assert main(["-m", *sweep]) == 0
    assert sorted(job["overrides"] for job in read_jobs()) == [["lr=0.001"], ["lr=0.01"]]
    assert "2 trials (all combinations): tpe over lr" in capsys.readouterr().out
    assert main(["sweep.resume=s", "sweep.trials=9"]) == 0 and len(read_jobs()) == 2


def test_with_pruning_only_the_first_seed_of_a_trial_is_judged(monkeypatch):
    judged_trials = []
    environment = Search.environment

    def record_judged_trial(search, job):
        variables = environment(search, job)
        judged_trials.extend([job.trial] if variables else [])
        return variables

    monkeypatch.setattr(Search, "environment", record_judged_trial)
    sweep = [*CPU, "lr=0.01,30", "sweep.search=grid", "sweep.repeats=2", "sweep.prune=asha", HERE, "hydra.sweep.dir=s"]
    assert main(["-m", *sweep]) == 0
    assert [(job["trial"], job["status"]) for job in read_jobs()] == [(0, "completed"), (0, "completed"), (1, "pruned")]
    assert judged_trials == [0, 1]  # the second seed of a trial is never pruned


def test_a_search_without_completed_runs_reports_no_best(capsys):
    assert main(["-m", *CPU, "lr=1e30,1e31", "sweep.search=grid", HERE, "hydra.sweep.dir=s"]) == 1
    out = capsys.readouterr().out
    assert "best    none: no trial has recorded a held-out loss" in out and "again" not in out
    assert (
        read_search_json()["best"] is None
        and [trial["state"] for trial in read_search_json()["trials"]] == ["pruned"] * 2
    )


def test_a_dry_run_of_a_search_counts_its_trials(capsys):
    words = [
        "-m",
        *GGML,
        LOG,
        "model.n_layers=1,2",
        "sweep.search=tpe",
        "sweep.trials=5",
        "sweep.repeats=2",
        "--dry-run",
    ]
    assert main([*words, HERE, "hydra.sweep.dir=s", "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert output["search"] == f"5 trials of 2 runs, by tpe: {LOG} model.n_layers=1,2"
    # probes: both ends of the interval with the first list value, and the second list value
    assert (output["jobs"], [len(shape["jobs"]) for shape in output["shapes"]]) == (10, [7, 3])
    flops = [shape["flops_per_step"] for shape in output["shapes"]]
    assert flops[0] < flops[1] and output["flops"] == 8 * (7 * flops[0] + 3 * flops[1])
    assert not Path("s").exists()
    assert main([*words, HERE, "eval_every=0"]) == 2
    assert "needs evaluations of the held-out data" in capsys.readouterr().err


def test_a_trial_whose_run_fails_has_no_score_and_the_search_continues(capsys):
    sweep = [*NOOP, "lr=0.1,5,0.2", "callbacks.slow.fails_above=1", "sweep.search=grid", HERE, "hydra.sweep.dir=s"]
    assert main(["-m", *sweep]) == 1
    assert [job["status"] for job in read_jobs()] == ["completed", "failed", "completed"]
    assert [trial.state.name for trial in trials()] == ["COMPLETE", "PRUNED", "COMPLETE"]
    assert "error in job 1: callbacks.slow failed" in capsys.readouterr().err
    assert main(["sweep.resume=s", "sweep.retry=true", "plugins=[toyexp.testing.null,slow]"]) == 1
    assert [job["attempts"] for job in read_jobs()] == [1, 1, 1]


@pytest.mark.parametrize("repeats", [1, 2])
def test_trials_that_failed_on_a_full_disk_are_rerun_and_not_scored(capsys, repeats):
    Path("full").touch()
    search_settings = ["sweep.search=random", "sweep.trials=2", f"sweep.repeats={repeats}", HERE, "hydra.sweep.dir=s"]
    assert main(["-m", *NOOP, LOG, *search_settings]) == 1
    assert [job["status"] for job in read_jobs()] == ["failed"] * 2
    assert [trial.state.name for trial in trials()] == ["RUNNING"] * 2
    assert "0 of 2 trials are done; to resume: toyexp sweep.resume=s sweep.retry=true" in capsys.readouterr().out
    Path("full").unlink()
    params_before = [trial.params for trial in trials()]
    assert main(["sweep.resume=s", "sweep.retry=true", "plugins=[toyexp.testing.null,slow]"]) == 0
    assert [job["status"] for job in read_jobs()] == ["completed"] * 2 * repeats
    assert [(trial.state.name, trial.params) for trial in trials()] == [
        ("COMPLETE", params) for params in params_before
    ]
    assert read_search_json()["best"]


def test_the_resume_command_is_printed_for_jobs_that_failed_on_a_full_disk(capsys):
    Path("full").touch()
    words = [*NOOP, "lr=0.1,5", "callbacks.slow.fails_above=1", HERE, "hydra.sweep.dir=s"]
    assert main(["-m", *words]) == 1
    assert "to resume: toyexp sweep.resume=s sweep.retry=true" in capsys.readouterr().out


def test_a_search_completes_when_its_summary_cannot_be_written(capsys, monkeypatch):
    def full(path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("toyexp.sweeps.search.searcher.write_atomically", full)
    assert main(["-m", *NOOP, LOG, "sweep.search=random", "sweep.trials=1", HERE, "hydra.sweep.dir=s"]) == 0
    assert "search.json cannot be written (No space left on device)" in capsys.readouterr().out
    assert [trial.state.name for trial in trials()] == ["COMPLETE"]


@contextlib.contextmanager
def start_sweep(*words):
    """Start a sweep as a process, which is killed at the end of the block."""
    command = [sys.executable, "-m", "toyexp", *words]
    with open("output.txt", "wb") as output_file:
        process = subprocess.Popen(command, stdout=output_file, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_for(condition, process):
    deadline = time.monotonic() + 200
    while not condition():
        assert time.monotonic() < deadline and process.poll() is None, Path("output.txt").read_text()
        time.sleep(0.05)


def test_a_free_worker_gets_the_next_trial_at_once():
    sweep = [
        *NOOP,
        "checkpoint_every=0",
        "steps=9000,3,4,5",
        "callbacks.slow.wait=0.01",
        "sweep.search=grid",
        "hydra.sweep.dir=s",
    ]
    with start_sweep("-m", *sweep, "sweep.launcher=processes", "sweep.jobs=2") as process:
        wait_for(
            lambda: (
                Path("s/sweep.json").exists()
                and [job["status"] for job in read_jobs()] == ["running", *["completed"] * 3]
            ),
            process,
        )
        Path("mended").touch()
        assert process.wait(100) == 0, Path("output.txt").read_text()
    assert [trial.state.name for trial in trials()] == ["COMPLETE"] * 4


@pytest.mark.release
def test_a_killed_search_resumes_and_repeats_no_run(capsys):
    sweep = [*NOOP, "steps=300", "checkpoint_every=20", "eval_every=100", LOG, "callbacks.slow.wait=0.01",
             "sweep.search=tpe", "sweep.trials=4", "sweep.prune=median", "hydra.sweep.dir=s"]  # fmt: skip
    with start_sweep("-m", *sweep, "sweep.launcher=processes", "sweep.jobs=2") as process:
        wait_for(lambda: any(Path().glob("s/[23]-*/checkpoints/step-*")), process)
    before = read_jobs()
    done = [job["number"] for job in before if job["status"] == "completed"]
    untouched = {path: path.read_bytes() for n in done for path in Path("s").glob(f"{n}-*/[!r]*") if path.is_file()}
    Path("mended").touch()
    for job in before:  # jobs of the killed sweep save and exit
        until = time.monotonic() + 60
        while not is_free(Path("s", job["directory"])):
            assert time.monotonic() < until
            time.sleep(0.05)
    again = ["sweep.resume=s", "plugins=[toyexp.testing.null,slow]"]
    assert main([*again, "sweep.prune=asha"]) == 2
    assert "sweep.prune: a resumed search can only change sweep.trials" in capsys.readouterr().err
    assert main([*again, "sweep.launcher=serial", "sweep.jobs=0", HERE]) == 0
    assert [job["overrides"] for job in read_jobs()][: len(before)] == [job["overrides"] for job in before]
    assert [job["trial"] for job in read_jobs()] == [0, 1, 2, 3]
    assert [job["attempts"] for job in read_jobs()][:2] == [1, 1] and sum(job["attempts"] for job in read_jobs()) <= 6
    assert all(recorded_steps(job) == list(range(1, 301)) for job in read_jobs())
    assert {path: path.read_bytes() for path in untouched} == untouched and done
    assert "  begins again, job " in capsys.readouterr().out
    assert any("resumed from step" in log.read_text() for log in Path("s/logs").iterdir())
    assert [(t.state.name, list(t.intermediate_values)) for t in trials()] == [("COMPLETE", [100, 200, 300])] * 4
    assert main([*again, "sweep.launcher=serial", "sweep.jobs=0", HERE, "sweep.trials=5"]) == 0  # one more trial
    assert len(read_jobs()) == 5 and [job["attempts"] for job in read_jobs()][4] == 1
    assert {path: path.read_bytes() for path in untouched} == untouched


def is_free(run):
    try:
        os.close(lock(run))
    except UserError:
        return False
    return True


def test_a_malformed_search_state_is_rejected(capsys):
    assert main(["-m", *CPU, "steps=2", "lr=0.1,0.2", "sweep.search=grid", HERE, "hydra.sweep.dir=s"]) == 0
    original = Path("s/sweep.json").read_text()
    state = json.loads(original)
    for part, message in (
        ({"jobs": [{**state["jobs"][0], "trial": -1}]}, "is damaged: its jobs have trial numbers [-1]"),
        ({"jobs": [{**state["jobs"][0], "trial": 5}]}, "is damaged: its jobs have trial numbers [5]"),
        ({"jobs": [{**state["jobs"][0], "trial": None}]}, "is damaged: its jobs have trial numbers [None]"),
        ({"space": ["plugins=[a],[b]"]}, "plugins=[a],[b]: takes names of Python modules, such as plugins=[a,b]"),
        ({"jobs": [{**state["jobs"][0], "overrides": ["+plugins=[a]"]}]}, "is damaged: job 0 sets plugins"),
        ({"space": 3}, "is damaged: space has the invalid value 3"),
    ):
        Path("s/sweep.json").write_text(json.dumps(state | part))
        capsys.readouterr()
        assert main(["sweep.resume=s"]) == 2
        assert message in capsys.readouterr().err
    Path("s/sweep.json").write_text(original)
    assert main(["sweep.resume=s"]) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([LOG], ["an interval has infinitely many values", "sweep.search=tpe sweep.trials=20"]),
        ([LOG, "sweep.search=tpe"], ["sweep.search=tpe", "sweep.trials=20"]),
        ([LOG, "sweep.search=tpe", "sweep.trials=0"], ["sweep.trials=0: must be at least 1"]),
        ([LOG, "sweep.search=tep", "sweep.trials=3"], ["sweep.search=tep", "did you mean tpe?"]),
        ([LOG, "sweep.search=grid"], ["interval(1e-4, 1e-1)): an interval has infinitely many", "sweep.search=grid"]),
        ([LOG, "sweep.search=cmaes", "sweep.trials=3"], ["needs at least two keys"]),
        ([LOG, "seed=1,2", "sweep.search=cmaes", "sweep.trials=3"], ["seed=1,2", "needs numeric ranges, not lists"]),
        (["lr=interval(0.2,0.1)", "sweep.search=tpe", "sweep.trials=3"], ["the lower one first"]),
        (
            ["lr=tag(log,interval(0,1))", "sweep.search=tpe", "sweep.trials=3"],
            ["an interval with log must start above 0"],
        ),
        (["lr=tag(lgo,interval(0,1))", "sweep.search=tpe", "sweep.trials=3"], ["unknown tag lgo", "accepts log"]),
        (["lr=interval(-1,1)", "sweep.search=tpe", "sweep.trials=3"], ["lr=-1.0: must be"]),
        (["optim.beta1=0.5,2", "sweep.search=grid"], ["optim.beta1=2"]),
        (
            ["model.d_model=interval(8,16)", "sweep.search=tpe", "sweep.trials=3"],
            ["model.d_model=interval(8,16)", "model.d_model=int(interval(8,16))"],
        ),
        (["sweep.search=tpe", "sweep.trials=3"], ["needs a key with several values"]),
        (["lr=0.1", "seed=1,2", "sweep.trials=3"], ["sweep.trials=3: only has an effect with a search"]),
        (["seed=1,2", "sweep.prune=asha"], ["sweep.prune=asha: only has an effect with a search"]),
        (["seed=1,2", "sweep.search=grid", "sweep.prune=ahsa"], ["did you mean asha?"]),
        (["seed=1,2", "sweep.search=grid", "sweep.repeats=0"], ["sweep.repeats=0: must be at least 1"]),
        (["seed=1,2", "sweep.search=grid", "sweep.repeats=2"], ["sweep.repeats=2", "leave out seed"]),
        (["seed=1,2", "sweep.search=grid", "sweep.metric=acuracy"], ["sweep.metric=acuracy", "loss, ppl"]),
        (
            ["seed=1,2", "sweep.search=grid", "eval_every=0"],
            ["sweep.metric=loss: needs evaluations of the held-out data"],
        ),
        (
            ["seed=1,2", "sweep.search=grid", "sweep.prune=asha", "eval_every=0"],
            ["sweep.prune=asha: needs evaluations of the held-out data"],
        ),
        (["eval_every=2,0", "sweep.search=grid"], ["sweep.metric=loss: needs evaluations of the held-out data"]),
        (
            ["eval_every=2,4", "sweep.search=grid", "sweep.prune=asha"],
            ["eval_every=2,4: ", "compares runs at the same steps"],
        ),
        (
            ["steps=1,2", "sweep.search=grid", "sweep.prune=asha"],
            ["before the last step: eval_every=2 must be below 2"],
        ),
        (["lr=glob(*)", "sweep.search=tpe", "sweep.trials=3"], ["globs are not supported"]),
        (["lr=interval(0.1)", "sweep.search=tpe", "sweep.trials=3"], ["interval(0.1, 0.5)", "tag(log, interval("]),
        (["lr=suggest_float(1,2)", "sweep.search=tpe", "sweep.trials=3"], ["interval(0.1, 0.5)", "tag(log, interval("]),
        ([LOG, "sweep.search=tpe", "sweep.n_trials=3"], ["sweep.n_trials; did you mean sweep.trials?"]),
        (["seed=1,2", "sweep.search=grid", "n_trials=3"], ["unknown key n_trials; did you mean sweep.trials?"]),
        (["seed=1,2", "sweep.search=grid", "--n-trials", "3"], ["sweep.trials=3"]),
        (["seed=1,2", "sweep.search=grid", "direction=minimize"], ["did you mean sweep.metric=", "loss, ppl and kl"]),
        (
            ["seed=1,2", "sweep.search=grid", "sweep.direction=minimize"],
            ["did you mean sweep.metric=", "loss, ppl and kl"],
        ),
        (["seed=1,2", "hydra/sweeper=optuna"], ["sweep.search=tpe sweep.trials=20"]),
        (
            ["seed=1,2", "sweep.search=grid", "sweep.prune=asha", "eval_every=8"],
            ["no evaluation before the last step"],
        ),
        (
            [LOG, "sweep.search=tpe", "sweep.trials=2000000000"],
            ["sweep.trials=2000000000: must be at least 1 and at most 100000"],
        ),
        (
            ["lr=1,2", "sweep.search=tpe", "sweep.trials=9", "sweep.repeats=60000"],
            ["sweep.trials=2 sweep.repeats=60000"],
        ),
        ([LOG, "sweep.search=tpe", "sweep.trials=9", "sweep.launcher=submitit"], ["sweep.jobs=4"]),
    ],
)
def test_an_invalid_search_is_rejected_with_one_line_and_leaves_no_files(words, message, capsys):
    assert main(["-m", *CPU, *words, "hydra.sweep.dir=s"]) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) <= 2 and "Traceback" not in err
    for word in message:
        assert word in err
    assert not Path("s").exists()


def test_a_missing_search_package_is_reported_with_the_install_command(monkeypatch, capsys):
    for package, search in (("optuna", "tpe"), ("cmaes", "cmaes")):
        monkeypatch.setitem(sys.modules, package, None)
        words = [LOG, "seed=range(1,9)", f"sweep.search={search}", "sweep.trials=3", "hydra.sweep.dir=s"]
        assert main(["-m", *CPU, *words]) == 2
        message = f"sweep.search={search}: {package} is not installed: pip install 'toyexp[search]'"
        assert message in capsys.readouterr().err
        monkeypatch.undo()
    assert not Path("s").exists()


@pytest.mark.parametrize(
    ("objective", "metric", "advised"),
    [("preference objective.kind=dpo,ipo", "loss", True), ("preference objective.beta=0.1,0.2", "margin", True),
     ("preference objective.kind=dpo,ipo", "accuracy", False), ("preference lr=0.1,0.2", "margin", False)],
)  # fmt: skip
def test_a_search_over_objectives_says_first_that_their_losses_cannot_be_compared(objective, metric, advised, capsys):
    pairs = [f'{{"prompt": "{i}", "chosen": "b", "rejected": "c"}}\n' for i in range(40)]
    Path("pairs.jsonl").write_text("".join(pairs))
    words = [word for word in CPU if not word.startswith(("data", "steps", "lr"))]
    words += ["data=preference", "data.path=pairs.jsonl", *f"objective={objective}".split(), f"sweep.metric={metric}"]
    assert main(["-m", *words, "steps=1", "sweep.search=grid", HERE, "hydra.sweep.dir=s"]) == 0
    output = capsys.readouterr().out
    note = f"trials' values of {metric} cannot be compared; type sweep.metric=accuracy"
    assert (note in output.partition("job 1 of 2")[0]) is advised and ("best    none" in output) is advised


def test_a_search_over_tokenizers_warns_that_scores_cannot_be_compared(capsys):
    Path("book.txt").write_text("It was a bright cold day in April. " * 300)
    text = ["data=text", "data.path=book.txt", "data.tokenizer=byte,char", "steps=2"]
    words = [word for word in CPU if not word.startswith(("data", "steps"))]
    assert main(["-m", *words, *text, "sweep.search=grid", HERE, "hydra.sweep.dir=s"]) == 0
    output, search = capsys.readouterr().out, json.loads(Path("s/search.json").read_text())
    assert output.count("the search continues, but their scores cannot be compared") == 1 and "best    none" in output
    assert search["best"] is None and "tok" in search["notes"][0]
    pytest.importorskip("matplotlib")
    assert main(["compare", "s", "--plot", "s.svg"]) == 0
    svg = Path("s.svg").read_text()
    assert "their losses cannot be" in svg and "compared" in svg  # possibly in two lines
