"""A sweep of thousands of jobs takes down each change at once, and writes what grows with their number seldom."""

import json
import math
import os
import statistics
import time

import pytest

from toyexp.base.errors import UserError
from toyexp.results.ranking import rank_jobs
from toyexp.sweeps import journal
from toyexp.sweeps.directory import Job, Status, SweepDir, summary_rows
from toyexp.sweeps.job_configs import JobDirectories
from toyexp.sweeps.journal import JOURNAL, Throttle
from toyexp.sweeps.search.study import Study

ASKED = {"flags": {}, "settings": [], "sweep": [], "cwd": "/", "space": []}


def many(folder, count):
    return SweepDir.create(folder / "s", [Job(n, [f"seed={n}"]) for n in range(count)], ASKED)


def ended(job):
    job.directory, job.status, job.attempts = f"{job.number}-x", Status.COMPLETED, 1
    job.result = {"steps": 3, "eval_loss": 1.0 + job.number}


def on_disk(folder):
    return [job["status"] for job in json.loads((folder / "s/sweep.json").read_text())["jobs"]]


def test_a_job_has_a_line_in_sweep_json_and_all_of_it_comes_back(tmp_path):
    folder = many(tmp_path, 3)
    ended(folder.jobs[1])
    folder.jobs[1].result |= {"train_loss": math.nan, "eval_scores": {"accuracy": 0.5}}
    folder.jobs[2].error = 'says "no"\nand é \udce9'  # as a path that is no text
    folder.save()
    lines = (tmp_path / "s/sweep.json").read_text().splitlines()
    assert sum('"overrides"' in line for line in lines) == 3
    folder.close()
    again = SweepDir.open(tmp_path / "s")
    folder.jobs[1].result["train_loss"] = None
    assert again.jobs == folder.jobs and again.spec == ASKED
    again.close()


def test_a_link_in_place_of_a_summary_is_left_alone_and_told_once(tmp_path, caplog):
    folder = many(tmp_path, 2)
    (tmp_path / "mine.csv").write_text("mine")
    summary = tmp_path / "s/summary.csv"
    summary.unlink()
    summary.symlink_to(tmp_path / "mine.csv")
    for job in folder.jobs:
        ended(job)
        folder.record([job])
    folder.close()
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"{summary}: not written ({summary}: it is a link, not a file; move it away)")
    assert summary.is_symlink() and summary.read_text() == "mine" and on_disk(tmp_path) == ["completed"] * 2
    assert "0-x" in (tmp_path / "s/summary.md").read_text()


def test_what_changed_since_the_files_were_written_is_known_to_who_goes_on(tmp_path):
    folder = many(tmp_path, 100)
    folder._writer._next = time.monotonic() + 1000  # no time for more
    for job in folder.jobs[:3]:
        job.status = Status.RUNNING
        folder.record([job])
    ended(folder.jobs[1])
    folder.record([folder.jobs[1]])
    folder.jobs.append(Job(100, ["seed=100"]))  # as a search adds them
    folder.record([folder.jobs[-1]])
    assert set(on_disk(tmp_path)) == {"waiting"}
    with open(tmp_path / "s" / JOURNAL, "a") as file:
        file.write('{"number": 2, "sta')  # killed in the middle
    os.close(folder._lock)
    again = SweepDir.open(tmp_path / "s")
    assert [job.status for job in again.jobs[:4]] == ["running", "completed", "running", "waiting"]
    assert again.jobs[1].result["eval_loss"] == 2.0 and len(again.jobs) == 101
    again.record([again.jobs[0]])
    again.close()
    assert on_disk(tmp_path)[:4] == ["running", "completed", "running", "waiting"]


def test_jobs_that_begin_out_of_turn_and_a_line_cut_off_leave_a_sweep_that_can_go_on(tmp_path):
    """As those of a search do that train together; and where the disk was full for a moment."""
    folder = many(tmp_path, 100)
    folder._writer._next = time.monotonic() + 1000  # no time for more
    folder.jobs += [Job(number, [f"seed={number}"]) for number in range(100, 110)]
    folder.jobs[107].status = Status.RUNNING
    folder.record([folder.jobs[107]])
    with open(tmp_path / "s" / JOURNAL, "a") as file:
        file.write('{"number": 2, "sta')
    ended(folder.jobs[103])
    folder.record([folder.jobs[103]])
    os.close(folder._lock)
    again = SweepDir.open(tmp_path / "s")
    assert [job.number for job in again.jobs] == list(range(108))
    assert [again.jobs[n].status for n in (102, 103, 107)] == ["waiting", "completed", "running"]
    again.close()


def test_the_files_catch_up_while_nothing_happens(tmp_path):
    folder = many(tmp_path, 100)
    for job in folder.jobs[:2]:
        ended(job)
        folder.record([job])
    until = time.monotonic() + 60
    while on_disk(tmp_path)[:2] != ["completed", "completed"] or (tmp_path / "s" / JOURNAL).exists():
        assert time.monotonic() < until
        time.sleep(0.05)
    folder.close()


def test_a_twentieth_of_the_time_goes_into_what_grows_with_the_jobs(monkeypatch):
    clock, done = [0.0], []
    monkeypatch.setattr(journal.time, "monotonic", lambda: clock[0])

    def write():
        clock[0] += 2.0
        done.append(clock[0])

    seldom = Throttle(write)
    for _ in range(4000):
        clock[0] += 0.1
        seldom.request(5000)
    assert len(done) == pytest.approx(clock[0] * 0.05 / 2.0, abs=1.5) and seldom.is_pending
    few = Throttle(write)
    before = len(done)
    for _ in range(10):
        few.request(50)
    assert len(done) == before + 10 and not few.is_pending


def test_mean_and_deviation_of_many_seeds_are_worked_out_once(monkeypatch):
    calls = []
    stdev = statistics.stdev
    monkeypatch.setattr(statistics, "stdev", lambda values: calls.append(1) or stdev(values))
    jobs = [Job(n, [f"seed={n}"]) for n in range(300)]
    for job in jobs:
        ended(job)
    assert len(summary_rows(jobs, str, rank_jobs(jobs))) == 301
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("[]", "holds an entry that is not a job"),
        ('{"number": "1"}', "holds an entry that is not a job"),
        ('{"number": 102}', "holds job 102 of 100"),
        ('{"number": 0}', "is damaged"),
        ("{", "is damaged"),
        ('{"number": 0, "overrides": ["plugins=[evil]"], "status": "waiting", "directory": null, "attempts": 0, '
         '"code": null, "error": null, "result": {}, "trial": null}', "sets plugins"),
    ],
)  # fmt: skip
def test_a_strange_journal_is_refused_in_a_line(tmp_path, line, told):
    many(tmp_path, 100).close()
    (tmp_path / "s" / JOURNAL).write_text(line + "\n")
    with pytest.raises(UserError, match="is damaged") as error:
        SweepDir.open(tmp_path / "s")
    assert told in str(error.value) and "\n" not in str(error.value)


LINKED = ("run.lock", "sweep.json", "sweep.jsonl", "summary.csv", "study.log", "search.json", "report.html", "logs",
          "logs/0.log", "plots", "submitit", "0-x", "deep/0-x")  # fmt: skip


@pytest.mark.parametrize("kind", ["file", "nothing", "folder"])
@pytest.mark.parametrize("name", LINKED)
def test_a_link_in_a_sweep_is_refused_and_what_it_leads_to_stays(name, kind, tmp_path):
    folder = many(tmp_path, 2)
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
    gone = name == "sweep.json" and kind != "file"  # no sweep is there then
    assert "holds no sweep" in str(error.value) if gone else f"{place}: it is a link" in str(error.value)
    if kind == "file":
        assert mine.read_bytes() == before
    elif kind == "folder":
        assert [(p.name, p.read_text()) for p in mine.iterdir()] == [("run.lock", "mine")]
    else:
        assert not mine.exists()


def test_the_link_by_which_optuna_locks_its_journal_is_no_strangers(tmp_path):
    many(tmp_path, 1).close()
    (tmp_path / "s/study.log.lock").symlink_to("study.log")
    SweepDir.open(tmp_path / "s").close()


def test_a_job_is_not_put_behind_a_link(tmp_path):
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
