"""On a terminal, parallel jobs are shown on a redrawn board, which is removed at the end of the sweep."""

import os
import pty
import re
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from toyexp.cli.main import main
from toyexp.results.ranking import rank_jobs
from toyexp.sweeps.board import MAX_ROWS, Board
from toyexp.sweeps.directory import Job, Status, SweepDir, SweepSpec
from toyexp.sweeps.launchers.job_process import Stop
from toyexp.sweeps.summary_table import outcome, print_table
from toyexp.sweeps.watch import Watch

SMALL = ["engine=ggml", "data=random", "model.n_layers=1", "model.d_model=16", "model.context=16", "batch_size=2",
         "eval_every=5", "sweep.launcher=processes", "sweep.jobs=2", "hydra.sweep.dir=s"]  # fmt: skip


SPEC = SweepSpec({}, [], [], "/", [])


def job(number, loss):
    return Job(number, [f"lr={number}"], f"{number}-run", Status.COMPLETED, result={"steps": 3, "eval_loss": loss})


def run_on_terminal(words, folder):
    """Run toyexp in a pseudo-terminal; return its exit code and output."""
    master, slave = pty.openpty()
    environment = {**os.environ, "COLUMNS": "100", "LINES": "30"}
    process = subprocess.Popen(
        [sys.executable, "-m", "toyexp", *words], cwd=folder, env=environment, stdout=slave, stderr=slave
    )
    os.close(slave)
    chunks = []

    def read():
        try:
            while chunk := os.read(master, 1 << 16):
                chunks.append(chunk)
        except OSError:  # the process has closed the terminal
            return

    reader = threading.Thread(target=read)
    reader.start()
    code = process.wait(120)
    reader.join(10)
    os.close(master)
    return code, b"".join(chunks).decode()


def screen(text):
    """Return the lines that remain visible, applying the `cursor up n, clear below` sequences."""
    lines = [""]
    for part in re.split(r"(\x1b\[\d+A\r\x1b\[J)", text.replace("\r\n", "\n")):
        if up := re.match(r"\x1b\[(\d+)A", part):
            assert lines[-1] == "", "the board must start at the beginning of a line"
            del lines[len(lines) - 1 - int(up[1]) :]
            lines.append("")
        else:
            first, *more = part.split("\n")
            lines[-1] += first
            lines += more
    return [line.rpartition("\r")[2] for line in lines]


def test_a_sweep_on_a_terminal_shows_a_board_and_leaves_complete_lines(tmp_path):
    code, text = run_on_terminal(["-m", *SMALL, "steps=20", "lr=1e-2,1e-3,1e30"], tmp_path)
    assert code == 1
    assert "2 running · 0 of 3 done" in text and "best so far lr=0." in text and "[1] lr=0.001  begins" in text
    lines = screen(text)
    assert not any(" running · " in line or line.startswith("best so far") for line in lines)
    for number, label in enumerate(("lr=0.01", "lr=0.001")):
        assert sum(bool(re.match(rf"\[{number}\] {label} +completed after 20 steps", line)) for line in lines) == 1
    (first,) = (number for number, line in enumerate(lines) if line.startswith("toyexp: error in job 2:"))
    error = " ".join(line.strip() for line in lines[first : first + 5])
    assert "lower lr" in error and "log.txt" in error and lines[first + 1].startswith("        ")
    assert not any(line.startswith("[0] engine") for line in lines)  # this line is in the log
    assert "completed after 20 steps" in (tmp_path / "s/logs/0.log").read_text()
    assert any(line.startswith("job  overrides") for line in lines)
    assert any(line.startswith("  0  lr=0.01 ") and "  0-scratch-llama" in line for line in lines)


@pytest.mark.parametrize("isolate", ["true", "false"])
def test_a_sweep_prints_two_lines_per_job_and_the_rest_into_logs(tmp_path, monkeypatch, capfd, isolate):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "")
    monkeypatch.setenv("FORCE_COLOR", "1")
    words = [
        "-m",
        *SMALL,
        "steps=3",
        "lr=1e-2,1e-3",
        "sweep.launcher=serial",
        "sweep.jobs=0",
        f"sweep.isolate={isolate}",
    ]
    assert main(words) == 0
    out = re.sub(r"\x1b\[[\d;]*m", "", capfd.readouterr().out)  # without colours
    lines = [line for line in out.splitlines() if line.startswith("[")]
    assert lines[::2] == ["[0] lr=0.01  begins, job 1 of 2", "[1] lr=0.001  begins, job 2 of 2"]
    assert [line.partition("  held-out")[0] for line in lines[1::2]] == [
        "[0] lr=0.01  completed after 3 steps", "[1] lr=0.001  completed after 3 steps"
    ]  # fmt: skip
    text = (tmp_path / "s/logs/1.log").read_text()
    assert "step 3/3" in text and "completed after 3 steps" in text and "\x1b" not in text
    assert main([*words, "sweep.verbose=true", "hydra.sweep.dir=t"]) == 0
    output = re.sub(r"\x1b\[[\d;]*m", "", capfd.readouterr().out)
    assert "[1] lr=0.001  (job 2 of 2)" in output and output.count("completed after 3 steps in") == 2


def test_a_short_sweep_shows_the_notes_of_a_job_and_not_its_steps(capsys):
    watch = Watch(lambda _: {}, Stop(), alone=True, total=1, verbose=False)
    watch.hear(job(0, 2.0), "step 3/3", sys.stdout)
    watch.hear(job(0, 2.0), "toyexp: warning: low memory", sys.stderr)
    assert capsys.readouterr() == ("", "toyexp: warning: low memory\n")


@pytest.mark.parametrize("notebook", [True, False])
def test_the_result_of_a_job_is_printed_except_in_a_notebook(monkeypatch, capsys, notebook):
    monkeypatch.setattr("toyexp.sweeps.watch.is_notebook", lambda: notebook)
    Watch(lambda _: {}, Stop(), alone=True, total=1, verbose=False).end(job(0, 2.0))
    assert ("completed after 3 steps" in capsys.readouterr().out) is not notebook


def test_a_short_sweep_in_one_process_shows_what_a_job_writes_to_stderr(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    write = "toyexp.sweeps.launchers.processes.print_result"
    monkeypatch.setattr(write, lambda _: print("low memory", file=sys.stderr))
    words = ["sweep.launcher=serial", "sweep.jobs=0", "sweep.isolate=false", "sweep.report=false"]
    assert main(["-m", *SMALL, *words, "steps=1", "lr=1e-2"]) == 0
    assert "low memory" in capfd.readouterr().err


def test_a_short_serial_sweep_shows_no_steps_on_a_terminal(tmp_path):
    words = ["sweep.launcher=serial", "sweep.jobs=0", "sweep.isolate=true", "steps=3", "lr=1e-2,1e-3"]
    code, text = run_on_terminal(["-m", *SMALL, *words], tmp_path)
    assert code == 0 and "[1] lr=0.001  completed after 3 steps" in text
    assert not any("step 3/3" in line for line in screen(text))  # the board may show this line while a job runs
    assert "step 3/3" in (tmp_path / "s/logs/1.log").read_text()


def test_a_table_has_the_sweeps_directory_once_and_only_names_of_runs_in_rows(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    folder = SweepDir.create(tmp_path / ("d" * 60), [job(0, 2.0), job(1, 1.0)], SPEC)
    for is_terminal in (True, False):
        monkeypatch.setattr(sys.stdout, "isatty", lambda is_terminal=is_terminal: is_terminal)
        monkeypatch.setenv("COLUMNS", "80")
        print_table(folder.jobs, folder)
        _, head, *_, first, second = capsys.readouterr().out.splitlines()
        assert head == "sweep   " + "d" * 60
        assert first.endswith("  1-run  best") and second.split()[:2] == ["0", "lr=0"]
        assert len(first) < 80
    folder.close()


def test_the_row_of_a_failed_job_has_a_short_reason_and_the_full_one_is_below(monkeypatch, capsys):
    jobs = [job(number, 2.0) for number in range(3)]
    full = "step 2 (batch 1, digest 9abb7eb2d0c60005): the loss is nan and the gradient norm nan; try a lower lr"
    for one in jobs[1:]:
        one.status, one.error = Status.FAILED, full
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for columns, end in (("80", "  failed: the loss is nan (step 2)"), ("60", "  failed")):
        monkeypatch.setenv("COLUMNS", columns)
        print_table(jobs, None)
        _, _, _, second, third, *below = capsys.readouterr().out.splitlines()
        assert second.endswith(end) and third.endswith(end), "a row never continues in the next line"
        assert " ".join(line.strip() for line in below) == f"job 1   {full}"


def test_a_table_of_a_search_fits_a_narrow_terminal(monkeypatch, capsys):
    jobs = [job(number, 2.0 + number) for number in range(3)]
    for one in jobs:
        one.overrides += ["optim.weight_decay=0.1", "optim.beta2=0.95", "model.d_ff=64"]
    jobs[2].status, jobs[2].error = Status.PRUNED, "sweep.prune=asha: the held-out loss 4.0 after step 20 is bad"
    print_table(jobs, None)
    assert "optim.beta2=0.95" in capsys.readouterr().out  # a pipe gets the full table
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "86")
    print_table(jobs, None)
    _, heads, first, _, last = capsys.readouterr().out.splitlines()
    assert heads.split() == ["job", "overrides", "steps", "held-out", "loss", "run"] and first.endswith("best")
    assert "lr=2 weight_decay=0.1 beta2=0.95 d_ff=64 " in last and last.endswith("4.0000  pruned at 3")
    assert max(map(len, (heads, first, last))) < 86


@pytest.mark.parametrize(
    ("width", "end"), [(80, "completed after 3 steps  held-out 2.0000"), (49, "completed  held-out 2.0000")]
)
def test_a_jobs_line_has_no_steps_if_it_would_wrap(monkeypatch, capsys, width, end):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(width))
    Watch(lambda job: {}, None, alone=False, verbose=False).end(job(0, 2.0))
    assert re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out) == f"[0] lr=0  {end}\n"


def test_a_narrow_table_over_seeds_has_one_line_for_a_point(monkeypatch, capsys):
    jobs = [job(number, 2.0 if number < 2 else 40000.0 + 9000 * number) for number in range(4)]
    for number, one in enumerate(jobs):
        one.overrides[:] = [f"recipe={'warm' if number < 2 else 'scratch'}", "lr=0.001", f"seed={number % 2}"]
        one.result["diverged"] = number > 1
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    print_table(jobs, None)
    *_, heads, best, other, note = capsys.readouterr().out.splitlines()
    assert heads == "settings                 held-out loss" and best.endswith("  best")
    assert other.startswith("recipe=scratch lr=0.001  62500.0000 ± ") and other.endswith("  diverged")
    assert note == "columns left out to fit the terminal: seeds"


def test_the_time_left_counts_the_jobs_that_remain(monkeypatch):
    """Four jobs at once take 10 s each; 4 s after its start, the fifth and last one needs 6 s more."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("toyexp.sweeps.board.time", SimpleNamespace(monotonic=lambda: clock.now))
    jobs = [Job(i, [f"lr={i}"], f"{i}", Status.RUNNING) for i in range(4)] + [Job(4, ["lr=4"])]
    board = Board(lambda: jobs, lambda: rank_jobs(jobs), 4)
    monkeypatch.setattr(board, "draw", lambda: None)
    for job in jobs[:4]:
        board.begin(job)
    clock.now = 10.0
    for job in jobs[:4]:
        job.status = Status.COMPLETED
        board.end(job)
    jobs[4].status = Status.RUNNING
    board.begin(jobs[4])
    clock.now = 14.0
    assert board.lines()[0] == "1 running · 4 of 5 done · about 6 s left"


def test_the_board_fits_the_terminal_and_counts_jobs_by_status(monkeypatch, capsys):
    jobs = [Job(i, [f"lr={i}"], f"{i}", Status.RUNNING) for i in range(40)]
    jobs += [Job(40, ["lr=40"], "40", Status.COMPLETED, result={"eval_loss": 2.5}), Job(41, ["lr=41"])]
    jobs.append(Job(42, ["lr=42"], "42", Status.KILLED))
    board = Board(lambda: jobs, lambda: rank_jobs(jobs), 40)
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("LINES", "12")
    for job in jobs[:40]:
        board.begin(job)
    board.begin(jobs[40])
    board.end(jobs[40])
    board.hear(jobs[0], "x\x1b[2J" * 50)
    lines = board.lines()
    assert lines[0].startswith("40 running · 1 of 43 done · 1 failed · about")
    assert lines[1] == "best so far lr=40: held-out loss 2.5000"
    assert lines[-1] == f"... and {40 - MAX_ROWS} more"
    jobs.append(Job(43, ["lr=43"], "43", Status.PRUNED, error="sweep.prune=asha: it is bad"))
    board.end(jobs[-1])
    assert board.lines()[0].startswith("40 running · 1 of 44 done · 1 pruned · 1 failed · about")
    assert outcome(jobs[-1]) == "pruned after 0 steps"
    wild = Job(44, ["lr=44"], "44", Status.COMPLETED, result={"steps": 1, "train_loss": 1e12, "eval_loss": 1e308})
    assert outcome(wild) == "completed after 1 step  held-out 1e+308"
    capsys.readouterr()
    board.draw()
    board_lines = capsys.readouterr().out.rpartition("\x1b[J")[2].splitlines()
    assert len(board_lines) == 12 - 4 and max(map(len, board_lines)) < 60
    assert "\x1b" not in "".join(board_lines)
    jobs[1].overrides[:] = [f"optim.beta{number}=0.9" for number in range(9)]
    board.hear(jobs[1], "step  80/100  loss 5.8295")
    assert board.lines(59)[3] == "[1] optim.beta0=0.9 optim.bet...  step  80/100  loss 5.8295"
