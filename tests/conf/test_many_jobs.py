"""A sweep of thousands of jobs records each change at once and rewrites the large files rarely."""

import json
import math
import os
import statistics
import time
from pathlib import Path

import pytest

from toyexp.base.errors import UserError
from toyexp.results.ranking import rank_jobs
from toyexp.sweeps import journal
from toyexp.sweeps.directory import Job, Status, SweepDir, SweepSpec, summary_rows
from toyexp.sweeps.job_configs import JobDirectories
from toyexp.sweeps.journal import JOURNAL, Throttle
from toyexp.sweeps.search.study import Study

SPEC = SweepSpec({}, [], [], "/", [])


def create_sweep(folder, count):
    return SweepDir.create(folder / "s", [Job(n, [f"seed={n}"]) for n in range(count)], SPEC)


def mark_completed(job):
    job.directory, job.status, job.attempts = f"{job.number}-x", Status.COMPLETED, 1
    job.result = {"steps": 3, "eval_loss": 1.0 + job.number}


def saved_statuses(folder):
    return [job["status"] for job in json.loads((folder / "s/sweep.json").read_text())["jobs"]]


def test_sweep_json_has_one_line_per_job_and_is_read_back_completely(tmp_path):
    folder = create_sweep(tmp_path, 3)
    mark_completed(folder.jobs[1])
    folder.jobs[1].result |= {"train_loss": math.nan, "eval_scores": {"accuracy": 0.5}}
    folder.jobs[2].error = 'says "no"\nand é \udce9'  # as in a path that is not valid UTF-8
    folder.save()
    lines = (tmp_path / "s/sweep.json").read_text().splitlines()
    assert sum('"overrides"' in line for line in lines) == 3
    folder.close()
    again = SweepDir.open(tmp_path / "s")
    folder.jobs[1].result["train_loss"] = None
    assert again.jobs == folder.jobs and again.spec == SPEC
    again.close()


def test_a_link_in_place_of_a_summary_is_kept_and_reported_once(tmp_path, caplog):
    folder = create_sweep(tmp_path, 2)
    (tmp_path / "mine.csv").write_text("mine")
    summary = tmp_path / "s/summary.csv"
    summary.unlink()
    summary.symlink_to(tmp_path / "mine.csv")
    for job in folder.jobs:
        mark_completed(job)
        folder.record([job])
    folder.close()
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"{summary}: not written ({summary}: it is a link, not a file; move it away)")
    assert summary.is_symlink() and summary.read_text() == "mine" and saved_statuses(tmp_path) == ["completed"] * 2
    assert "0-x" in (tmp_path / "s/summary.md").read_text()


def test_changes_in_the_journal_are_restored_when_a_sweep_is_reopened(tmp_path):
    folder = create_sweep(tmp_path, 100)
    folder._writer._next = time.monotonic() + 1000  # delay the rewrite
    for job in folder.jobs[:3]:
        job.status = Status.RUNNING
        folder.record([job])
    mark_completed(folder.jobs[1])
    folder.record([folder.jobs[1]])
    folder.jobs.append(Job(100, ["seed=100"]))  # as a search does
    folder.record([folder.jobs[-1]])
    assert set(saved_statuses(tmp_path)) == {"waiting"}
    with open(tmp_path / "s" / JOURNAL, "a") as file:
        file.write('{"number": 2, "sta')  # cut off by a kill
    os.close(folder._lock)
    again = SweepDir.open(tmp_path / "s")
    assert [job.status for job in again.jobs[:4]] == ["running", "completed", "running", "waiting"]
    assert again.jobs[1].result["eval_loss"] == 2.0 and len(again.jobs) == 101
    again.record([again.jobs[0]])
    again.close()
    assert saved_statuses(tmp_path)[:4] == ["running", "completed", "running", "waiting"]


def test_a_journal_with_jobs_out_of_order_and_a_cut_off_line_is_restored(tmp_path):
    """Stacked jobs of a search start out of order; a line is cut off if the disk is full for a moment."""
    folder = create_sweep(tmp_path, 100)
    folder._writer._next = time.monotonic() + 1000  # delay the rewrite
    folder.jobs += [Job(number, [f"seed={number}"]) for number in range(100, 110)]
    folder.jobs[107].status = Status.RUNNING
    folder.record([folder.jobs[107]])
    with open(tmp_path / "s" / JOURNAL, "a") as file:
        file.write('{"number": 2, "sta')
    mark_completed(folder.jobs[103])
    folder.record([folder.jobs[103]])
    os.close(folder._lock)
    again = SweepDir.open(tmp_path / "s")
    assert [job.number for job in again.jobs] == list(range(108))
    assert [again.jobs[n].status for n in (102, 103, 107)] == ["waiting", "completed", "running"]
    again.close()


def test_the_files_are_updated_while_the_sweep_is_idle(tmp_path):
    folder = create_sweep(tmp_path, 100)
    for job in folder.jobs[:2]:
        mark_completed(job)
        folder.record([job])
    deadline = time.monotonic() + 60
    while saved_statuses(tmp_path)[:2] != ["completed", "completed"] or (tmp_path / "s" / JOURNAL).exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    folder.close()


def test_rewriting_large_files_takes_a_twentieth_of_the_time(monkeypatch):
    clock, writes = [0.0], []
    monkeypatch.setattr(journal.time, "monotonic", lambda: clock[0])

    def write():
        clock[0] += 2.0
        writes.append(clock[0])

    throttle = Throttle(write)
    for _ in range(4000):
        clock[0] += 0.1
        throttle.request(5000)
    assert len(writes) == pytest.approx(clock[0] * 0.05 / 2.0, abs=1.5) and throttle.is_pending
    unthrottled = Throttle(write)
    before = len(writes)
    for _ in range(10):
        unthrottled.request(50)
    assert len(writes) == before + 10 and not unthrottled.is_pending


def test_mean_and_deviation_of_many_seeds_are_computed_once(monkeypatch):
    calls = []
    stdev = statistics.stdev
    monkeypatch.setattr(statistics, "stdev", lambda values: calls.append(1) or stdev(values))
    jobs = [Job(n, [f"seed={n}"]) for n in range(300)]
    for job in jobs:
        mark_completed(job)
    assert len(summary_rows(jobs, Path(), rank_jobs(jobs))) == 301
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[]", "holds an entry that is not a job"),
        ('{"number": "1"}', "holds an entry that is not a job"),
        ('{"number": 102}', "holds job 102, but the sweep has 100 jobs"),
        ('{"number": 0}', "is damaged"),
        ("{", "is damaged"),
        ('{"number": 0, "overrides": ["plugins=[evil]"], "status": "waiting", "directory": null, "attempts": 0, '
         '"code": null, "error": null, "result": {}, "trial": null}', "sets plugins"),
    ],
)  # fmt: skip
def test_a_malformed_journal_is_rejected_with_one_line(tmp_path, line, message):
    create_sweep(tmp_path, 100).close()
    (tmp_path / "s" / JOURNAL).write_text(line + "\n")
    with pytest.raises(UserError, match="is damaged") as error:
        SweepDir.open(tmp_path / "s")
    assert message in str(error.value) and "\n" not in str(error.value)


LINKED = ("run.lock", "sweep.json", "sweep.jsonl", "summary.csv", "study.log", "search.json", "report.html", "logs",
          "logs/0.log", "plots", "submitit", "0-x", "deep/0-x")  # fmt: skip


@pytest.mark.parametrize("kind", ["file", "nothing", "folder"])
@pytest.mark.parametrize("name", LINKED)
def test_a_link_in_a_sweep_is_rejected_and_its_target_unchanged(name, kind, tmp_path):
    folder = create_sweep(tmp_path, 2)
    folder.jobs[0].directory = "deep/0-x" if "deep" in name else "0-x"
    folder.jobs[0].status = Status.RUNNING
    folder.save()
    folder.close()
    place = tmp_path / "s" / name
    place.parent.mkdir(exist_ok=True)
    mine = tmp_path / "mine"
    if kind == "folder":
        mine.mkdir()
        (mine / "run.lock").write_text("mine")
    elif kind == "file":
        mine.write_bytes((tmp_path / "s/sweep.json").read_bytes())
    before = mine.read_bytes() if kind == "file" else None
    place.unlink(missing_ok=True)
    place.symlink_to(mine)
    with pytest.raises(UserError) as error:
        SweepDir.open(tmp_path / "s")
    gone = name == "sweep.json" and kind != "file"  # then the directory holds no sweep
    assert "holds no sweep" in str(error.value) if gone else f"{place}: it is a link" in str(error.value)
    if kind == "file":
        assert mine.read_bytes() == before
    elif kind == "folder":
        assert [(p.name, p.read_text()) for p in mine.iterdir()] == [("run.lock", "mine")]
    else:
        assert not mine.exists()


def test_optunas_journal_lock_link_is_accepted(tmp_path):
    create_sweep(tmp_path, 1).close()
    (tmp_path / "s/study.log.lock").symlink_to("study.log")
    SweepDir.open(tmp_path / "s").close()


def test_a_job_directory_behind_a_link_is_rejected(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "s/deep").mkdir(parents=True)
    (tmp_path / "s/deep/0").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="s/deep/0: it is a link"):
        JobDirectories([]).assign(Job(0, []), tmp_path / "s", tmp_path / "s/deep/0/x")


def test_a_study_is_not_written_through_a_link(tmp_path):
    pytest.importorskip("optuna")
    (tmp_path / "mine").write_text("")
    (tmp_path / "study.log").symlink_to(tmp_path / "mine")
    with pytest.raises(UserError, match=r"study\.log.*link"):
        Study(tmp_path, "tpe", "loss", [], 0)
    assert (tmp_path / "mine").read_text() == ""
