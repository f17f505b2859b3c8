"""Signals and closed outputs in real processes."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path

import pytest

from toyexp.base.signals import Interrupted, catch_signals, end_with_sweep
from toyexp.cli.main import main
from toyexp.training import checkpoint

DONOR = Path(__file__).parents[2] / "plugins" / "toyexp_recipes" / "assets"
NOOP = ["plugins=[toyexp.testing.null]", "engine=noop", "model.d_model=16", "model.d_ff=16", "model.n_layers=1",
        "model.context=16", "hydra.run.dir=run"]  # fmt: skip
BOOK = ["data=text", "data.path=book.txt", "data.tokenizer=byte"]


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Starts a Python process in an empty directory; `wait` says when it has come where the signal should fall."""
    (tmp_path / "book.txt").write_text("It was a bright cold day in April. " * 300)
    monkeypatch.setenv("TOYEXP_CACHE", str(tmp_path / "cache"))
    started = []

    def begin(*words, wait, **options):
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, **options}
        process = subprocess.Popen([sys.executable, *words], cwd=tmp_path, text=True, **output)
        started.append(process)
        until = time.monotonic() + 60
        while not wait(process):
            assert process.poll() is None and time.monotonic() < until, process.communicate()[0]
            time.sleep(0.02)
        return process

    yield begin
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def ends(process, number, code):
    """Sends the signal: the exit code, and its one line last, without a traceback."""
    process.send_signal(number)
    out, _ = process.communicate(timeout=30)  # half of its busy time
    assert process.returncode == code, out
    said, *_ = out.splitlines()[-1].split(";")
    assert said == f"toyexp: interrupted by {signal.Signals(number).name}" and "Traceback" not in out
    return out


def marker_exists(marker):
    return lambda process: (Path(f"/proc/{process.pid}/cwd") / marker).exists()


# Native code that blocks its thread for a minute without the GIL, like a tokenizer in Rust.
BUSY = """
import ctypes, sys
from pathlib import Path
from toyexp.tokenizers.byte_level import BPE, Bytes
def busy(*_):
    Path("there").touch()
    ctypes.CDLL(None).usleep(900_000); ctypes.CDLL(None).sleep(60)
BPE.train, Bytes.encode_pieces = busy, busy
from toyexp.cli.main import main
sys.exit(main())
"""


@pytest.mark.parametrize("tokenizer", ["byte", "bpe"])
def test_a_signal_during_native_tokenizing_ends_the_run(start, tmp_path, tokenizer):
    words = [*NOOP, *BOOK[:2], f"data.tokenizer={tokenizer}"]
    process = start("-c", BUSY, *words, wait=marker_exists("there"))
    ends(process, *{"byte": (signal.SIGTERM, 143), "bpe": (signal.SIGINT, 130)}[tokenizer])
    assert not (tmp_path / "run").exists()
    assert {p.name.partition("-")[0] for p in tmp_path.glob("cache/*")} <= {"text"}, "no ids, and nothing half written"


SLOW_END = """
import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar
from toyexp import Callback, hookimpl

@dataclass(eq=False)
class SlowEnd(Callback):
    "Takes a minute to end."
    name: ClassVar[str] = "slow_end"
    @hookimpl
    def on_end(self):
        Path("ending").touch()
        time.sleep(60)

@hookimpl
def register_callbacks(register):
    register(SlowEnd)
"""


def test_a_second_signal_at_the_end_of_a_run_acts_at_once(start, tmp_path):
    (tmp_path / "slow_end.py").write_text(SLOW_END)
    words = [*BOOK, *NOOP[1:], "plugins=[toyexp.testing.null,slow_end]", "callbacks=[slow_end,events,gguf_export]"]
    process = start("-m", "toyexp", *words, "steps=100000000", wait=marker_exists("run/events.jsonl"))
    process.send_signal(signal.SIGTERM)
    while not (tmp_path / "ending").exists():
        assert process.poll() is None
        time.sleep(0.02)
    ends(process, signal.SIGINT, 130)
    assert '"reason": "interrupted"' in (tmp_path / "run" / "events.jsonl").read_text().splitlines()[-1]
    assert not list((tmp_path / "run").glob(".*tmp*"))


def uses_ggml(process):
    return "libggml" in Path(f"/proc/{process.pid}/maps").read_text()


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux, to see how far the process is")
@pytest.mark.parametrize("command", ["eval", "parity", "bench"])
def test_a_command_ends_by_sigterm_with_143_and_one_line(start, tmp_path, command):
    small = ["model.d_model=32", "model.n_layers=1", "model.context=32", "data.max_mb=0.3"]
    words = {
        "eval": [str(next(DONOR.glob("*.gguf"))), "engine=ggml", "engine.threads=1", "data.eval_batches=100000"],
        "parity": ["engine=ggml:threads=1,ggml:threads=1:products=ggml", "steps=1000000", *small],
        "bench": ["engine=ggml:threads=1,ggml:threads=1:products=ggml", "--steps=100000", *small],
    }[command]
    process = start("-m", "toyexp", command, *words, wait=uses_ggml)
    time.sleep(0.3)
    ends(process, signal.SIGTERM, 143)
    assert sorted(p.name for p in tmp_path.iterdir()) in (["book.txt"], ["book.txt", "cache"])


SLOW_TEXT = """
import sys, time
from pathlib import Path
import toyexp.inference.generate
def slow(*_):
    yield 1
    Path("there").touch()
    time.sleep(60)
toyexp.inference.generate.generate_endlessly = slow
from toyexp.cli.main import main
sys.exit(main())
"""


def test_generate_ends_after_the_text_so_far(start):
    words = ["generate", str(next(DONOR.glob("*.gguf"))), "--prompt", "def ", "--engine", "ggml:threads=1"]
    ends(start("-c", SLOW_TEXT, *words, wait=marker_exists("there")), signal.SIGTERM, 143)


@pytest.mark.parametrize("output", [">&-", "<&- >&- 2>&-", ">/dev/full", "| head -n 1"])
def test_an_output_that_goes_nowhere_harms_no_run(tmp_path, output):
    if "full" in output and not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full here")
    (tmp_path / "book.txt").write_text("It was a bright cold day in April. " * 300)
    words = " ".join(f"'{w}'" for w in [*NOOP, *BOOK, "steps=20", "callbacks=[default]"])
    line = f"({sys.executable} -m toyexp {words}; echo $? > code) {output}"
    environment = {**os.environ, "TOYEXP_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(
        ["sh", "-c", line], cwd=tmp_path, env=environment, timeout=60, stdout=-3, stderr=-1, text=True, check=False
    )
    expected = ["toyexp: warning: the output could not be written: No space left on device"] if "full" in output else []
    assert [said.split(";")[0] for said in done.stderr.splitlines()] == expected
    assert (tmp_path / "code").read_text() == "0\n"
    events = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    assert events[0].startswith('{"kind": "run_start"') and events[-1].startswith('{"kind": "run_end"')
    assert all(line.startswith('{"kind"') for line in events)
    assert (tmp_path / "run" / "model.gguf").read_bytes()[:4] == b"GGUF"


# -- a terminal that is closed, a cluster's notice -------------------------------------------------------------------

SENDS = """
import os, signal
from dataclasses import dataclass
from typing import ClassVar
from toyexp import Callback, hookimpl

@dataclass(eq=False)
class Sends(Callback):
    "Sends a signal to its own process after two steps."
    name: ClassVar[str] = "sends"
    signal: str = ""
    times: int = 1

    @hookimpl
    def on_step(self, step):
        for _ in range(self.times if step == 2 and self.signal else 0):
            os.kill(os.getpid(), getattr(signal, self.signal))

@hookimpl
def register_callbacks(register):
    register(Sends)
"""


@pytest.fixture
def run_with_signal(tmp_path, monkeypatch, capsys):
    """Run in this process and send it a signal after two of six steps; return the exit code and saved steps."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sends_plugin.py").write_text(SENDS)

    def send(name, *words):
        plugins = "plugins=[toyexp.testing.null,sends_plugin]"
        settings = [plugins, *NOOP[1:], "data=random", "steps=6", "callbacks=[sends,progress,events,gguf_export]"]
        code = main([*settings, f"callbacks.sends.signal={name}", *words])
        return code, sorted(checkpoint.list_checkpoints(Path("run/checkpoints"))), capsys.readouterr()

    return send


@pytest.fixture
def default_sighup():
    """SIGHUP as a terminal has it, also where the tests themselves run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def test_a_closed_terminal_ends_a_run_as_sigterm_does(run_with_signal, default_sighup):
    code, saved, (_, err) = run_with_signal("SIGHUP")
    assert (code, saved) == (129, [2])
    assert err.startswith("toyexp: interrupted by SIGHUP; 2 of 6 steps are saved; to resume: toyexp resume=run")
    assert err.count("\n") == 1
    assert json.loads(Path("run/events.jsonl").read_text().splitlines()[-1])["reason"] == "interrupted"
    assert main(["resume=run", "plugins=[toyexp.testing.null,sends_plugin]", "callbacks.sends.signal=''"]) == 0


def test_an_ignored_sighup_stays_ignored(run_with_signal):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert run_with_signal("SIGHUP")[:2] == (0, [6])
    finally:
        assert signal.signal(signal.SIGHUP, before) == signal.SIG_IGN


@pytest.mark.parametrize(("times", "exported"), [(1, True), (2, False)])
def test_a_second_signal_does_not_wait_for_exports(run_with_signal, times, exported):
    assert run_with_signal("SIGTERM", f"callbacks.sends.times={times}")[0] == 143
    assert Path("run/model.gguf").exists() == exported


def test_the_loss_of_the_sweep_is_not_a_second_signal():
    """Ray ends the worker of a job, which hands that on, and the job then loses its sweep."""
    with catch_signals() as signals:
        signals.defer_to_step_end()
        signal.raise_signal(signal.SIGTERM)
        end_with_sweep()
        assert signals.is_ending() and signals.count() == 1
        with pytest.raises(Interrupted):
            signal.raise_signal(signal.SIGTERM)


def test_an_ignored_sigusr1_stays_ignored():
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        with catch_signals() as signals:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert not signals.take_save_request()
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("every", ["100", "0"])
def test_sigusr1_saves_a_checkpoint_and_training_continues(run_with_signal, every):
    code, saved, (out, _) = run_with_signal("SIGUSR1", f"checkpoint_every={every}")
    assert (code, saved) == (0, [2, 6] if every == "100" else [2])
    assert "SIGUSR1: saving step 2;" in out


def test_sigusr1_ends_a_run_of_a_job_that_requests_it(run_with_signal, monkeypatch):
    monkeypatch.setenv("TOYEXP_SIGUSR1", "end")
    code, saved, (_, err) = run_with_signal("SIGUSR1")
    assert (code, saved) == (128 + signal.SIGUSR1, [2]) and err.startswith("toyexp: interrupted by SIGUSR1; 2 of 6")
    monkeypatch.setenv("TOYEXP_SIGUSR1", "stop")
    assert main(["plugins"]) == 2


def test_a_run_continues_without_its_terminal(start, tmp_path):
    ours, theirs = os.openpty()
    words = [*NOOP, "data=random", "steps=100000000", "callbacks=[progress,events]"]
    here = {"stdin": theirs, "stdout": theirs, "stderr": theirs, "start_new_session": True}
    process = start("-m", "toyexp", *words, wait=marker_exists("run/events.jsonl"), **here)
    os.close(theirs)
    os.close(ours)
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143
    end = json.loads((tmp_path / "run" / "events.jsonl").read_text().splitlines()[-1])
    assert (end["kind"], end["reason"]) == ("run_end", "interrupted") and end["final_step"] > 1


EARLY = """
import os, sys
class KillsWhileLoading:
    def find_spec(self, name, path=None, target=None):
        if name == "{module}":
            os.kill(os.getpid(), {number})
sys.meta_path.insert(0, KillsWhileLoading())
from toyexp.__main__ import main
sys.exit(main())
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_imports_gives_one_line(number):
    code = EARLY.format(module="toyexp.cli.main", number=int(number))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 128 + number
    assert done.stderr == f"toyexp: interrupted by {number.name}\n"


AT_EXIT = "import atexit, os; atexit.register(os.kill, os.getpid(), {number})"


@pytest.mark.parametrize("code", [EARLY, AT_EXIT + EARLY])
def test_ctrl_c_before_and_after_a_command_prints_no_traceback(code):
    code = code.format(module="toyexp.base.ranks" if code is EARLY else "", number=int(signal.SIGINT))
    done = subprocess.run([sys.executable, "-c", code, "plugins"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


SLOW_PLUGIN = """
import os, signal, time
for _ in range(2):
    os.kill(os.getpid(), signal.SIGTERM)
time.sleep(60)
"""


def test_the_second_signal_ends_the_import_of_a_slow_plugin_at_once(tmp_path):
    (tmp_path / "slow_plugin.py").write_text(SLOW_PLUGIN)
    words = [sys.executable, "-m", "toyexp", "data=random", "plugins=[slow_plugin]"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, timeout=40)
    assert (done.returncode, done.stderr) == (143, "toyexp: interrupted by SIGTERM\n")


# -- in this process --------------------------------------------------------------------------------------------------


LOCKED = """
def callback(_):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.01)  # in which the interpreter calls the handler
    whole.append(True)
"""


def test_a_signal_while_python_tidies_up_after_an_import_is_not_lost():
    """Python ignores exceptions there and keeps the import lock, so that other threads would wait forever."""
    modules = []
    names = {"os": os, "signal": signal, "time": time, "whole": modules}
    exec(compile(LOCKED, "<frozen importlib._bootstrap>", "exec"), names)
    began = time.monotonic()
    with catch_signals() as signals, pytest.raises(Interrupted):
        thing = type("Thing", (), {})()
        watched = weakref.ref(thing, names["callback"])
        del thing
        assert modules and watched() is None and signals.count() == 1
        time.sleep(30)
    assert time.monotonic() - began < 20  # a sleep was not slept to its end
    assert signals.count() == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_a_librarys_cleanup_is_not_a_user_error(number, monkeypatch, capsys):
    def compose(*_):
        try:
            os.kill(os.getpid(), number)
            old = 1
        finally:
            print(old)  # which has no value yet, as where OmegaConf puts its flags back

    monkeypatch.setattr("toyexp.config.compose.compose_cached", compose)
    assert main(["steps=1"]) == 128 + number
    assert capsys.readouterr().err == f"toyexp: interrupted by {signal.Signals(number).name}\n"


def test_a_signal_lost_in_native_code_is_not_a_failure(monkeypatch, capsys):
    def compose(*_):
        with contextlib.suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
        raise ImportError("_multiarray failed to import")  # as NumPy's C API reports it, without its cause

    monkeypatch.setattr("toyexp.config.compose.compose_cached", compose)
    assert main(["steps=1"]) == 143
    assert capsys.readouterr().err == "toyexp: interrupted by SIGTERM\n"
