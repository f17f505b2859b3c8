"""Commands of plugins: they work like built-in commands, and broken ones do no harm."""

import importlib
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from toyexp import Arguments, Command, UserError
from toyexp.base.exit_codes import run_to_exit_code
from toyexp.cli.commands import COMMANDS
from toyexp.cli.main import main
from toyexp.plugins.discovery import load

COMMAND = """
from dataclasses import dataclass
from typing import ClassVar
from toyexp import Command, hookimpl

@dataclass
class Greet(Command):
    '''Says hello.'''
    name: ClassVar[str] = "{name}"

    def configure(self, parser):
        parser.add_argument("--loud", action="store_true")
        parser.add_argument("--times", type=int, default=1, help="how often")
        parser.add_argument("--to", choices=("you", "them"))

    def run(self, arguments):
        {body}

@hookimpl
def register_commands(register):
    register(Greet)
"""
HELLO = "print('hello', *arguments.rest, end='!' * arguments.loud * arguments.times); return 3"


@pytest.fixture
def toyexp(tmp_path, monkeypatch, capsys):
    """Run toyexp with an installed plugin that has a command; `alone`: in a subprocess."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # the plugin changes between two calls
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    def run(words, name="greet", body=HELLO, more="", alone=False):
        (tmp_path / "strange.py").write_text(COMMAND.format(name=name, body=body) + more)
        info = tmp_path / "strange-1.2.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: strange\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text("[toyexp]\nstranger = strange\n")
        if not alone:
            importlib.invalidate_caches()
            for module in ("strange", "here"):
                sys.modules.pop(module, None)
            capsys.readouterr()
            code = main(words)
            return SimpleNamespace(returncode=code, **capsys.readouterr()._asdict())
        path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(
            [sys.executable, "-m", "toyexp", *words], env={**os.environ, "PYTHONPATH": path}, cwd=tmp_path,
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        return SimpleNamespace(returncode=done.returncode, out=done.stdout, err=done.stderr)

    return run


def test_a_plugin_command_gets_its_arguments_and_sets_the_exit_code(toyexp):
    done = toyexp(["greet", "--loud", "you"], alone=True)
    assert (done.out, done.err, done.returncode) == ("hello you!", "", 3)
    assert toyexp(["greet", "--times", "3", "you", "--loud"]).out == "hello you!!!"
    help_text = toyexp(["greet", "--help"]).out
    assert help_text.startswith("usage: toyexp greet [options] ...\n\nSays hello.") and "how often" in help_text


CALLBACK = """
import gc
from dataclasses import dataclass
from toyexp import Callback, hookimpl

@dataclass(eq=False)
class Told(Callback):
    'Prints whether garbage is collected when training starts.'
    name = "told"
    @hookimpl
    def on_start(self):
        print(f"collects: {gc.isenabled()}")

@hookimpl
def register_callbacks(register):
    register(Told)
"""


def test_garbage_is_collected_while_a_command_runs(toyexp):
    assert toyexp(["greet"], body="import gc; print(gc.isenabled()); return 0", alone=True).out == "True\n"


def test_garbage_is_collected_while_a_run_trains(toyexp, tmp_path):
    (tmp_path / "here.py").write_text(CALLBACK)
    words = ["plugins=[here,toyexp.testing.null]", "engine=noop", "callbacks=[told]", "steps=1"]
    assert "collects: True" in toyexp(words, alone=True).out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--times", "x"], "--times x: must be a whole number"),
        (["--to", "hem"], "--to hem: did you mean them?"),
        (["--to"], "--to needs a value: you, them"),
        (["--to", ""], "greet --to '': is empty (an unset shell variable?); leave it out, or give it a value"),
        (["--time", "3"], "greet --time: unknown option; did you mean --times?"),
    ],
)
def test_a_wrong_argument_of_a_plugin_command_is_rejected(toyexp, words, message):
    done = toyexp(["greet", *words])
    assert (done.out, done.returncode) == ("", 2)
    assert done.err.startswith(f"toyexp: error: {message}") and len(done.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return 1 / 0", "command.greet failed while it ran: ZeroDivisionError: division by zero (strange.py, line"),
        ("import sys; sys.exit(7)", "command.greet failed while it ran: SystemExit: 7 (strange.py, line"),
        *(
            (f"return {it}", f"command.greet returned {it}; an exit code must be")
            for it in ("None", "True", "1.0", "300", "-1")
        ),
    ],
)
def test_an_unexpected_error_of_a_plugin_command_is_one_line_that_names_it(toyexp, body, message):
    done = toyexp(["greet"], body=body)
    assert done.returncode == 1 and done.out == ""
    (line,) = done.err.splitlines()
    assert message in line


def test_a_command_with_a_broken_help_is_reported_in_one_line(toyexp):
    done = toyexp(["greet", "--help"], more="\nGreet.usage = lambda self: 'anyhow'\n")
    assert done.returncode == 1 and done.err.startswith("toyexp: error: command.greet failed while it ran: TypeErr")
    done = toyexp(["greet"], more="\nGreet.configure = lambda self, parser: parser.add_argument(1)\n")
    assert done.returncode == 1 and done.err.startswith("toyexp: error: command.greet failed while it ran: ")
    assert len(done.err.splitlines()) == 1


@pytest.mark.parametrize("name", ["two words", "Loud"])
def test_an_invalid_command_name_is_reported_with_the_plugins(toyexp, name):
    listed = toyexp(["plugins"], name=name)
    assert (
        f"broken: stranger (strange 1.2): Greet.name is '{name}'; it must consist of lower-case letters" in listed.out
    )
    assert listed.returncode == 0 and toyexp([name], name=name).returncode == 2


def test_a_plugin_cannot_override_a_shipped_command(toyexp):
    done = toyexp(["bench", "--help"], name="bench")
    assert done.out.startswith("usage: toyexp bench [key=value ...]") and done.returncode == 0
    listed = toyexp(["plugins"], name="bench").out
    assert "broken: stranger (strange 1.2): command=bench is already registered by commands (toyexp 0.1.0)" in listed


def test_a_broken_command_does_not_break_help_and_gives_its_reason(toyexp):
    done = toyexp(["--help"], body="return 0\n\nraise RuntimeError('out of cheese')")
    assert done.returncode == 0 and all(f"\n  {name} " in done.out for name in COMMANDS)
    assert "greet" not in done.out
    done = toyexp(["greet"], more="    register(int)\n")
    assert done.returncode == 2 and "command=greet comes from plugin stranger, which is broken" in done.err


def test_a_module_in_the_working_directory_may_define_a_command(toyexp, tmp_path):
    toyexp(["--version"])
    (tmp_path / "here.py").write_text(COMMAND.format(name="here", body=HELLO))
    assert toyexp(["here", "plugins=[here]", "you"]).out == "hello you"


def test_help_imports_no_framework_for_commands(toyexp):
    program = "import sys; from toyexp.cli.main import main; main(['--help']); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    loaded = set(done.stderr.split())
    assert not loaded & {"numpy", "yaml", "hydra", "omegaconf", "torch", "ggml"}
    assert not loaded & {"toyexp.cli.bench", "toyexp.interfaces.session", "toyexp_data.example_rows"}


def test_every_shipped_command_is_registered():
    offers = load().offers["command"]
    assert {name: offer.cls for name, offer in offers.items()} == dict(COMMANDS)
    assert all(offer.package.startswith("toyexp ") for offer in offers.values())


class Two(Command):
    name = "two"

    def configure(self, parser):
        parser.add_argument("--all", action="store_true")
        parser.add_argument("--to", metavar="x.gguf")
        parser.add_argument("--type", metavar="q8_0")

    def run(self, arguments):
        return 0


def test_options_and_settings_are_told_apart():
    arguments = Two().read(["a", "--to", "b", "--all", "c=1", "plugins=[m,n]", "--to=b"])
    assert arguments == Arguments(all=True, to="b", type=None, rest=["a", "c=1"], modules=["m", "n"])
    assert arguments.settings == ["a", "c=1", "plugins=[m,n]"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--al"], "two --al: unknown option; did you mean --all?"),
        (["-a"], "two -a: unknown option; did you mean --all?"),
        (["--colr"], "two --colr: unknown option; did you mean --color?"),
        (["-t", "x"], "two -t: unknown option; choose one of: --to, --type$"),
        (["--output-to=x"], "two --output-to=x: unknown option; did you mean --to?"),
        (["--to"], "--to needs a value, such as --to x.gguf"),
        (["--to", "--all"], "--to needs a value, such as --to x.gguf"),
        (["--to", "--x"], "--to needs a value"),
        (["--to", "b", "--to=c"], "--to c: was given already, as b; leave one of them out"),
        (["--all=1"], "--all takes no value"),
        (["plugins=a-b"], "plugins=a-b: takes names of Python modules"),
        (["plugins=a,b"], r"such as plugins=\[a,b\]"),
    ],
)
def test_a_wrong_argument_is_rejected(words, message):
    with pytest.raises(UserError, match=message):
        Two().read(words)


@pytest.mark.parametrize(("error", "line"), [
    (MemoryError("2 GB for a table"), "toyexp: error: out of memory (2 GB for a table)"),
    (OSError(28, "No space left on device", "there"), "toyexp: error: there: No space left on device"),
])  # fmt: skip
def test_out_of_memory_and_a_full_disk_give_one_line(error, line, capsys):
    def work() -> int:
        raise error

    assert run_to_exit_code(work) == 1
    assert capsys.readouterr().err.strip() == line
