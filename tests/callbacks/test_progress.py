import fcntl
import math
import os
import re
import struct
import subprocess
import sys
import termios
from types import SimpleNamespace

import pytest

from toyexp.base.drawing import GREEN
from toyexp.base.formatting import format_loss, format_metric
from toyexp.training import loop, next_steps
from toyexp_callbacks.progress import Bar, Progress

NUMBER = r"\d+\.\d{4}"
SPEED = r"[\d.]+[kM]? tokens/s"


def run_in_terminal(words, columns, cwd):
    """Run toyexp in a terminal of that width; return every state of every line that it shows."""
    controller, terminal = os.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color"}
    environment.pop("COLUMNS", None)  # COLUMNS would take precedence over the terminal's width
    process = subprocess.Popen(
        [sys.executable, "-m", "toyexp", *words],
        cwd=cwd,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env=environment,
    )
    os.close(terminal)
    output = b""
    while True:
        try:
            part = os.read(controller, 1 << 16)
        except OSError:  # on Linux, the error for a closed terminal
            break
        if not part:
            break
        output += part
    os.close(controller)
    assert process.wait(60) == 0, output.decode()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output.decode())
    return [state for line in text.split("\r\n") for state in line.split("\r") if state]


@pytest.mark.parametrize(
    ("columns", "last"),
    [
        (80, rf"40/40  loss 1\.0244  held-out 1\.0244  {SPEED}  ━+"),
        (60, r"40/40  loss 1\.0244  held-out 1\.0244  ━+"),
        (40, r"40/40  loss 1\.0244  held-out 1\.0244"),
        (30, r"40/40  loss 1\.0244"),
    ],
)
def test_a_terminal_shows_a_bar_and_as_many_numbers_as_fit(settings, tmp_path, columns, last):
    words = settings("callbacks=[progress,sample]", "steps=40", "callbacks.sample.tokens=4", engine="noop")
    states = run_in_terminal(words, columns, tmp_path)
    bars = [s for s in states if "/40  loss" in s]
    assert bars, states
    # The null engine's losses: 1 + 1/41 after 40 steps. Three columns are left free for the ^C of Ctrl-C.
    assert all(len(s) <= columns - 3 for s in bars)
    assert re.fullmatch(last, bars[-1].strip()), bars
    assert "step 40/40  sample" in states
    after = len(states) - states[::-1].index(bars[-1])
    assert any(s.startswith("completed after 40 steps") for s in states[after:])


@pytest.mark.parametrize(("columns", "bar_width"), [(28, 8), (27, 0)])
def test_a_bar_is_drawn_from_eight_columns_on(columns, bar_width, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    bar = Bar(40, 0)
    bar.draw(40, loss="loss 1.0")
    with bar._console.capture() as capture:
        bar._console.print(bar._live.renderable)
    bar.stop()
    assert capture.get().rstrip() == f"40/40  loss 1.0  {'━' * bar_width}".rstrip()


def test_a_terminal_shows_starting_until_the_first_line_is_printed(settings, tmp_path):
    states = run_in_terminal(settings("callbacks=[]", "steps=1", engine="noop"), 80, tmp_path)
    assert states[0] == "starting"
    first = next(i for i, s in enumerate(states) if s.startswith("engine "))
    assert states[first - 1].isspace(), "the line must be cleared before the next one"


def test_a_pipe_receives_about_ten_plain_lines_and_each_held_out_loss(train):
    run = train("steps=30", "eval_every=15", engine="noop")
    assert "\x1b" not in run.out and "\r" not in run.out
    lines = [s for s in run.out.splitlines() if s.startswith("step ")]
    line = rf"step ([ \d]\d)/30  loss {NUMBER}  lr \d\.\d\de[-+]\d\d  {SPEED}(  \d+ s left)?"
    step_matches = [m for s in lines if (m := re.fullmatch(line, s))]
    assert [int(m[1]) for m in step_matches] == [1, 3, 6, 9, 12, 15, 18, 21, 24, 27, 30]
    assert [bool(m[2]) for m in step_matches] == [True] * 10 + [False]
    held_out = [m[1] for s in lines if (m := re.fullmatch(rf"step ([ \d]\d)/30  held-out loss {NUMBER}", s))]
    assert held_out == [" 0", "15", "30"]
    assert len(step_matches) + len(held_out) == len(lines), lines


def test_the_setting_every_sets_the_steps_between_lines(train):
    run = train("steps=30", "eval_every=0", "callbacks.progress.every=10", engine="noop")
    assert re.findall(r"^step +(\d+)/30", run.out, re.MULTILINE) == ["1", "10", "20", "30"]


SLOW_START_PLUGIN = """
import toyexp.training.loop
from dataclasses import dataclass
from toyexp import Callback, hookimpl

@dataclass(eq=False)
class SlowStart(Callback):
    '''Make the first step slow, as that of a compiled engine is.'''
    name = "slow_start"
    @hookimpl
    def lr(self, step):
        toyexp.training.loop.time.now += 0.5 if step == 0 else 0.004

@hookimpl
def register_callbacks(register):
    register(SlowStart)
"""


class Clock:
    """A clock that tests advance."""

    now = 0.0

    def perf_counter(self):
        return self.now


def test_the_printed_speed_excludes_a_slow_first_step(train, local_plugin, monkeypatch):
    clock = Clock()
    for module in (loop, next_steps):
        monkeypatch.setattr(module, "time", clock)
    plugins = f"plugins=[toyexp.testing.null,{local_plugin(SLOW_START_PLUGIN)}]"
    run = train("callbacks=[slow_start,progress]", "steps=10", "eval_every=0", plugins, engine="noop")
    speeds = [float(n) * (1000 if k else 1) for n, k in re.findall(r"loss .*  ([\d.]+)(k?) tokens/s", run.out)]
    # 64 tokens in 0.5 s, then in 4 ms each; an average that includes the first step would be below 1.2k.
    assert (speeds[0], speeds[-1]) == (128, 16_000)


def test_a_closed_pipe_ends_the_output_and_not_the_run(settings, spawn, read_run):
    words = settings("callbacks=[progress,events]", "steps=400", "callbacks.progress.every=1", engine="noop")
    process = spawn("-m", "toyexp", *words)
    while not process.stdout.readline().startswith("step "):
        assert process.poll() is None
    process.stdout.close()
    assert process.wait(60) == 0
    assert read_run(0).events[-1]["final_step"] == 400


def test_a_negative_interval_is_rejected(train):
    run = train("callbacks.progress.every=-1")
    assert run.code == 2 and "callbacks.progress.every=-1: must be at least 0" in run.err
    assert not run.dir.exists()


def test_consecutive_skipped_steps_print_a_line_for_the_first_and_a_count(capsys):
    model = SimpleNamespace(reads=SimpleNamespace(units="tokens"))
    run, bar = SimpleNamespace(steps=9, resumed_step=0, plan=SimpleNamespace(model=model)), Progress(every=100)
    bar.on_start(run)
    for step in range(1, 10):
        loss = math.nan if step in (2, 4, 5, 6, 9) else 1.5
        bar.on_step(run, step, {"loss": loss, "grad_norm": 1.0, "lr": 0.1, "tokens": 1, "wall_us": 1.0})
        if math.isnan(loss):
            bar.on_event(run, "skipped", {"step": step, "loss": loss, "grad_norm": 1.0})
    printed = re.findall(r"step (\d)/9  skipped: (\d?)", capsys.readouterr().out)
    assert printed == [("2", ""), ("4", ""), ("6", "3"), ("9", "")]


@pytest.mark.parametrize(("every", "steps"), [(0, [1, 4, 7, 10, 13, 16, 19, 100]), (50, [1, 50, 100])])
def test_plain_output_prints_a_line_at_least_every_minute(every, steps, monkeypatch, capsys):
    """Except with `every`. The first 20 steps take 20 s each, the others no time."""
    now = [0.0]
    monkeypatch.setattr("toyexp_callbacks.progress.time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr("sys.stdout.isatty", lambda: False)
    model = SimpleNamespace(reads=SimpleNamespace(units="tokens"))
    run = SimpleNamespace(steps=1000, resumed_step=0, plan=SimpleNamespace(model=model))
    progress = Progress(every=every)
    progress.on_start(run)
    for step in range(1, 101):
        now[0] += 20 if step <= 20 else 0
        progress.on_step(run, step, {"loss": 1.0, "grad_norm": 1.0, "lr": 0.1, "tokens": 1, "wall_us": 1.0})
    assert [int(re.match(r"step +(\d+)/", line)[1]) for line in capsys.readouterr().out.splitlines()] == steps


def test_the_bar_has_the_green_of_the_plots_and_a_track_visible_on_black_and_white(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    bar = Bar(40, 0)
    for step, colours in ((20, 2), (40, 1)):
        bar.draw(step)
        segments = bar._console.render(bar._live.renderable)
        drawn = [s.style.color.get_truecolor() for s in segments if s.text.strip("━╸╺") == "" != s.text]
        assert len(set(drawn)) == colours and drawn[0].hex == GREEN.lower()
        for colour in drawn:
            linear = [(((c / 255) + 0.055) / 1.055) ** 2.4 for c in colour]
            luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
            assert 1.05 / (luminance + 0.05) > 2.5 and (luminance + 0.05) / 0.05 > 2.5, f"{colour} is too faint"
    bar.stop()


def test_a_rounded_zero_has_no_sign():
    assert format_loss(-1e-5) == format_metric(-1e-5) == "0.0000" and format_metric(-1e-3) == "-0.0010"


def test_a_huge_loss_is_printed_in_short_form():
    assert [format_loss(x) for x in (1e300, -2e7, 7.0, math.nan, math.inf)] == [
        "1e+300",
        "-2e+07",
        "7.0000",
        "nan",
        "inf",
    ]
