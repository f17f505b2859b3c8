"""The summary of a sweep lists the best first, has means over seeds, and includes jobs that were resumed alone."""

import csv
import json
import math
import os
from pathlib import Path

import numpy as np
import pytest

from toyexp.cli.main import main
from toyexp.results.ranking import rank_jobs
from toyexp.sweeps.directory import Job, Status, SweepDir
from toyexp.sweeps.sources import JobSource
from toyexp.sweeps.summary_table import print_table
from toyexp.training.rundir import lock

SMALL = ["engine=ggml", "data=random", "model.n_layers=1", "model.d_model=16", "model.context=16", "batch_size=2",
         "eval_every=2", "callbacks=[events]"]  # fmt: skip


def job(number, words, status=Status.COMPLETED, **result):
    return Job(number, words.split(), f"{number}", status, 1, 0, None, result)


def table(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_trials_are_ranked_by_mean_with_the_sample_deviation():
    losses = {"lr=1": [3.0, 1.0, 2.0], "lr=2": [1.4, 1.7], "lr=3": [0.9]}
    jobs = [job(i, f"{lr} seed={i}", eval_loss=loss) for i, (lr, loss) in
            enumerate((lr, loss) for lr, values in losses.items() for loss in values)]  # fmt: skip
    jobs.append(job(6, "lr=3 seed=6", Status.KILLED, eval_loss=0.0))
    jobs.append(job(7, "lr=4 seed=0", eval_loss=math.nan))
    ranking = rank_jobs(jobs)
    assert [point.label for point in ranking.points] == ["lr=3", "lr=2", "lr=1", "lr=4"]
    for point in ranking.points[:3]:
        assert point.mean == pytest.approx(np.mean(losses[point.label]))
        values = losses[point.label]
        assert point.deviation == (pytest.approx(np.std(values, ddof=1)) if len(values) > 1 else None)
    assert [job.number for job, _ in ranking.jobs()] == [5, 3, 4, 1, 2, 0, 7, 6]
    assert ranking.best is ranking.points[0] and ranking.has_seeds


def test_trials_without_a_result_are_ranked_by_their_steps_and_then_by_their_last_value():
    ends = {"lr=1": (20, 2.0), "lr=2": (40, 9.0), "lr=3": (20, 1.0), "lr=4": (0, None)}
    jobs = [job(0, "lr=0", eval_loss=5.0)]
    for number, (lr, (steps, loss)) in enumerate(ends.items(), 1):
        jobs.append(job(number, lr, Status.PRUNED, steps=steps, eval_loss=loss))
    assert [point.label for point in rank_jobs(jobs).points] == ["lr=0", "lr=2", "lr=3", "lr=1", "lr=4"]


def test_a_point_says_how_many_of_its_completed_jobs_diverged():
    jobs = [job(i, f"lr={i // 3} seed={i}", eval_loss=float(i), diverged=i in (1, 3, 4)) for i in range(5)]
    ranking = rank_jobs([*jobs, job(5, "lr=1 seed=5", Status.FAILED), job(6, "lr=2", eval_loss=9.0)])
    assert [row[-1] for row in ranking.table()] == ["", "1 of 3 diverged  best", "2 of 2 diverged", ""]
    assert ranking.caption.endswith("completed runs, including diverged ones")
    assert rank_jobs(jobs[:1]).caption.endswith("completed runs")


def test_seeds_alone_are_one_row_without_a_mark():
    ranking = rank_jobs([job(i, f"seed={i}", eval_loss=float(i)) for i in range(2)])
    assert ranking.table()[1:] == [("-", "2", "0.5000 ± 0.7071", "")]


def test_a_metric_to_maximise_also_orders_seeds_and_missing_values_come_last():
    accuracies = [("lr=1", 0.3), ("lr=1", 0.9), ("lr=1", 0.6), ("lr=2", 0.7), ("lr=2", 0.8), ("lr=3", None)]
    jobs = [job(i, f"{lr} seed={i}", eval_loss=float(i), eval_scores={"accuracy": score})
            for i, (lr, score) in enumerate(accuracies)]  # fmt: skip
    jobs.insert(2, job(6, "lr=1 seed=6", Status.FAILED, eval_scores={"accuracy": 1.0}))
    ranking = rank_jobs(jobs, ["sweep.metric=accuracy"])
    assert [[one.number for one in point.jobs] for point in ranking.points] == [[4, 3], [1, 2, 0, 6], [5]]
    assert ranking.best and ranking.best.mean == pytest.approx(0.75) and ranking.column == "held-out accuracy"
    assert [one.number for one, _ in ranking.jobs()] == [4, 3, 1, 2, 0, 5, 6]


def test_pruned_jobs_come_last_by_steps_and_loss():
    ends = [(20, 6.2), (20, 6.1), (40, 5.9), (20, 6.9), (40, 5.7)]
    jobs = [job(i, f"lr={i}", Status.PRUNED, steps=steps, eval_loss=loss) for i, (steps, loss) in enumerate(ends)]
    ranking = rank_jobs([*jobs, job(5, "lr=5", steps=80, eval_loss=7.0)])
    assert [one.number for one, _ in ranking.jobs()] == [5, 4, 2, 1, 0, 3]


def test_a_metric_to_maximise_ranks_high_values_first_and_missing_metrics_fall_back():
    jobs = [job(i, f"lr={i}", eval_loss=loss, train_loss=9 - i, eval_scores={"accuracy": score})
            for i, (loss, score) in enumerate([(1.0, 0.2), (2.0, 0.9), (3.0, 0.5)])]  # fmt: skip
    assert [j.number for j, _ in rank_jobs(jobs, ["sweep.metric=accuracy"]).jobs()] == [1, 2, 0]
    assert [j.number for j, _ in rank_jobs(jobs, ["sweep.metric=unknown"]).jobs()] == [0, 1, 2]
    for one in jobs:
        one.result["eval_loss"] = None
    trained = rank_jobs(jobs)
    assert trained.column == "smoothed train loss" and [j.number for j, _ in trained.jobs()] == [2, 1, 0]
    assert rank_jobs([job(0, "lr=1", Status.FAILED)]).best is None


def test_jobs_with_other_bases_are_other_trials_and_with_other_data_none_is_best():
    bases = [("lr=1", "b1"), ("lr=1", "b1"), ("lr=1", "b2"), ("lr=2", "b2")]
    jobs = [job(i, f"{lr} seed={i}", eval_loss=1.0 + i, sources={"data": "d", "base": base, "vocabulary": base})
            for i, (lr, base) in enumerate(bases)]  # fmt: skip
    ranking = rank_jobs(jobs)
    assert [(p.label, p.mean, len(p.values)) for p in ranking.points] == [
        ("lr=1 base#b1", 1.5, 2), ("lr=1 base#b2", 3.0, 1), ("lr=2", 4.0, 1)]  # fmt: skip
    assert ranking.changed_sources == ["base"] and ranking.best is ranking.points[0] and len(ranking.notes()) == 1
    jobs[3].result["sources"] = {"data": "e", "base": "b2", "tokenizer": "byte"}
    jobs[0].result["sources"]["tokenizer"] = "char"
    ranking = rank_jobs(jobs)
    assert ranking.best is None and ranking.conflict == "the data differ between points (tokenizer)"
    assert ranking.notes()[1].startswith(ranking.conflict)
    del jobs[0].result["sources"]["tokenizer"]
    assert rank_jobs(jobs).conflict == "the data differ between points (data)"
    jobs[3].status = Status.FAILED  # a failed job has no result to compare
    assert rank_jobs(jobs).best is not None


def test_losses_of_different_objectives_are_not_ranked_but_a_metric_that_they_share_is():
    jobs = [job(i, f"objective.kind={kind}", eval_loss=1.0 - i, eval_scores={"margin": 1.0, "accuracy": 0.5 + i},
                sources={"data": "d", "loss": kind})
            for i, kind in enumerate(("dpo", "ipo"))]  # fmt: skip
    ranking = rank_jobs(jobs)
    assert ranking.best is None and ranking.notes() == [
        "the objectives differ between points: their losses cannot be compared; to rank them by accuracy: "
        "toyexp compare SWEEP --metric accuracy"
    ]
    ranking = rank_jobs(jobs, ["sweep.metric=margin"])
    assert ranking.best is None and "their margins cannot be compared; to rank them by acc" in ranking.notes()[0]
    ranking = rank_jobs(jobs, ["sweep.metric=accuracy"])
    assert ranking.best is ranking.points[0] and ranking.best.label == "objective.kind=ipo" and not ranking.notes()
    del jobs[0].result["sources"]["loss"]  # a cross-entropy has no digest
    assert rank_jobs(jobs).conflict == "the objectives differ between points"
    jobs[0].result["sources"]["data"] = "e"
    assert rank_jobs(jobs).conflict == "the data and objectives differ between points (data)"
    assert rank_jobs(jobs).notes()[0].endswith("cannot be compared")  # by no shared metric


def test_the_only_completed_job_is_not_marked_as_best(capsys):
    jobs = [job(0, "lr=1", eval_loss=1.0), job(1, "lr=2", status=Status.FAILED, error="diverged")]
    assert not any("best" in row for row in rank_jobs(jobs).table())
    print_table(jobs, None)
    assert "best" not in capsys.readouterr().out
    print_table([jobs[0], job(1, "lr=2", eval_loss=2.0)], None)
    assert capsys.readouterr().out.count("best") == 1


def test_equal_data_with_another_tokenizer_name_still_has_a_best_trial():
    jobs = [job(i, f"lr={i}", eval_loss=1.0 + i, sources={"data": "d", "tokenizer": name})
            for i, name in enumerate(("byte", "char"))]  # fmt: skip
    ranking = rank_jobs(jobs)
    assert ranking.best is ranking.points[0] and not ranking.conflict and not ranking.notes()


@pytest.mark.parametrize("swept", [["seed=0,1,2"], ["data.tokenizer=byte,char"]], ids=["replaced", "tokenizers"])
def test_a_sweep_with_differing_data_warns_in_table_and_summary(tmp_path, monkeypatch, capsys, swept):
    """The file is replaced after the first job; losses of different tokenizers cannot be compared either."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.txt").write_text("It was a bright cold day in April. " * 300)
    real = JobSource.record_end

    def replace(self, job):
        real(self, job)
        if swept == ["seed=0,1,2"]:
            (tmp_path / "book.txt").write_text("The quick brown fox jumps over it. " * 300)

    monkeypatch.setattr(JobSource, "record_end", replace)
    words = ["data=text", "data.path=book.txt", "data.tokenizer=byte", "steps=2", "hydra.sweep.dir=s"]
    words = [
        *SMALL,
        *(word for word in words if word.partition("=")[0] != swept[0].partition("=")[0]),
        "sweep.isolate=false",
        *swept,
    ]
    assert main(["-m", *words]) == 0
    output, rows = capsys.readouterr().out, table("s/summary.csv")
    assert "losses cannot be compared" in output and "losses cannot be compared" in Path("s/summary.md").read_text()
    assert not any(row["best"] for row in rows) and "  best" not in output
    if swept == ["seed=0,1,2"]:
        assert [row["seeds"] for row in sorted(rows, key=lambda row: row["seed"])] == ["1", "2", "2"]
        assert len({row["data digest"] for row in rows}) == 2 and "data changed" in output
    assert main(["compare", "s"]) == 0 and "losses cannot be compared" in capsys.readouterr().out


def test_a_job_with_a_higher_final_loss_is_reported_as_diverged(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = [*SMALL, "steps=20", "optim.grad_clip=0", "callbacks=[events,constant]", "hydra.sweep.dir=s"]
    assert main(["-m", *words, "lr=1e-3,3", "sweep.isolate=false"]) == 0
    output = capsys.readouterr().out
    assert "diverged after 20 steps" in output and "try a lower lr" in output
    assert [row["status"] for row in table("s/summary.csv")] == ["completed", "diverged"]
    assert [json.loads(path.read_text())["diverged"] for path in sorted(Path("s").glob("*/result.json"))] == [
        False,
        True,
    ]
    assert main(["runs", "s", "state=diverged", "--json"]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert run["lr"] == 3


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """Run a sweep of two learning rates, one far too high, with three seeds each, in one process."""
    here = tmp_path_factory.mktemp("sweep")
    before = Path.cwd()
    os.chdir(here)
    try:
        words = ["-m", *SMALL, "lr=5,1e-2", "seed=0,1,2", "steps=4", "hydra.sweep.dir=s", "sweep.isolate=false"]
        assert main(words) == 0
    finally:
        os.chdir(before)
    return here


def test_summary_files_list_the_best_first(swept):
    rows = table(swept / "s/summary.csv")
    assert list(rows[0])[:9] == ["job", "lr", "seed", "status", "steps taken", "smoothed train loss", "held-out loss",
                                 "seconds", "run"]  # fmt: skip
    assert [row["lr"] for row in rows] == ["0.01"] * 3 + ["5"] * 3
    assert [row["best"] for row in rows] == ["best"] * 3 + [""] * 3
    losses = [json.loads((Path(row["run"]) / "result.json").read_text())["eval_loss"] for row in rows[:3]]
    assert losses == sorted(losses)
    assert {(row["seeds"], row["held-out loss mean"], row["held-out loss std"]) for row in rows[:3]} == {
        ("3", f"{np.mean(losses):.6f}", f"{np.std(losses, ddof=1):.6f}")
    }
    text = (swept / "s/summary.md").read_text()
    assert f"| lr=0.01 | 3 | {np.mean(losses):.4f} ± {np.std(losses, ddof=1):.4f} | best |" in text
    assert "n-1" in text.splitlines()[0]


def test_resuming_one_job_updates_the_summary_of_its_sweep(swept, monkeypatch, capsys):
    monkeypatch.chdir(swept)
    files = [swept / "s" / name for name in ("sweep.json", "summary.csv", "summary.md")]
    before = [path.read_bytes() for path in files]
    assert main(["resume=s/4-scratch-llama"]) == 2  # already complete
    assert [path.read_bytes() for path in files] == before
    sweep_lock = lock(swept / "s")  # as a running sweep does
    try:
        assert main(["resume=s/3-scratch-llama", "steps=6"]) == 0
    finally:
        os.close(sweep_lock)
    assert [path.read_bytes() for path in files] == before
    capsys.readouterr()
    assert main(["resume=s/4-scratch-llama", "steps=8"]) == 0
    assert "s: its summary is up to date" in capsys.readouterr().out
    row = next(row for row in table(files[1]) if row["job"] == "4")
    result = json.loads((swept / "s/4-scratch-llama/result.json").read_text())
    assert row["steps taken"] == "8" and row["held-out loss"] == f"{result['eval_loss']:.4f}"
    folder = SweepDir.open(swept / "s")
    folder.close()
    assert folder.jobs[4].attempts == 2 and folder.jobs[4].status == Status.COMPLETED


def test_the_final_table_marks_the_best(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["-m", *SMALL, "lr=5,1e-2", "seed=0,1", "steps=3", "hydra.sweep.dir=s", "sweep.isolate=false"]) == 0
    lines = capsys.readouterr().out.splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith("job"))
    assert lines[head + 1].split()[1] == "lr=0.01" and lines[head + 1].endswith("best")
    assert sum(line.endswith("best") for line in lines[head:]) == 2  # the job's row and the trial's row
    assert any(line.startswith("lr=0.01") and "±" in line and line.endswith("best") for line in lines)
