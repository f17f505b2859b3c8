"""`toyexp new` writes plugins that work, and `plugins --check` says of any plugin whether it keeps its promises."""

import json
import re
import shlex
import shutil
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import environments
import pytest

from toyexp.cli import pages
from toyexp.cli.main import main
from toyexp.cli.new import KINDS, fill_template
from toyexp.cli.pages import read_page, topics
from toyexp.config.paths import TEMPLATES
from toyexp.interfaces.run import Run
from toyexp.plugins.discovery import load_package
from toyexp.plugins.rules import KINDS as REGISTERED

SMALL = ["steps=2", "eval_every=1", "data.max_mb=0.1", "model.context=16", "model.d_model=16", "model.d_ff=16"]
OWN_SIZES = {"model": [*SMALL[:3], "model.context=16"], "data": [SMALL[0], SMALL[1], *SMALL[3:]]}


@pytest.fixture(scope="module")
def new_plugins(tmp_path_factory):
    """A directory with a plugin of each kind, under names that their templates do not have."""
    root = tmp_path_factory.mktemp("made")
    for kind in KINDS:
        assert main(["new", kind, f"own_{kind}_2", "--into", str(root)]) == 0
    return root


def plugin_directory(root, kind):
    return root / f"toyexp-own-{kind}-2"


def test_new_has_a_template_for_every_kind_with_a_suite():
    assert {*KINDS.values(), "command"} == {*REGISTERED}
    assert {p.name for p in TEMPLATES.iterdir() if p.is_dir()} == {*KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_plugin_is_a_package_with_its_own_name_and_entry_point(new_plugins, kind):
    name = f"own_{kind}_2"
    files = {path.name: path.read_text() for path in plugin_directory(new_plugins, kind).iterdir()}
    assert {*files} == {"README.md", "pyproject.toml", f"toyexp_{name}.py", f"test_toyexp_{name}.py"}
    project = tomllib.loads(files["pyproject.toml"])
    assert project["project"]["entry-points"]["toyexp"] == {name: f"toyexp_{name}"}
    assert project["project"]["name"] == f"toyexp-own-{kind}-2"
    for file, text in files.items():
        assert not re.search(rf"my_{kind}|My{kind.capitalize()}|my-{kind}", text), file
        compile(text, file, "exec") if file.endswith(".py") else None


def test_a_part_may_be_named_like_its_template_and_its_directory_is_created(tmp_path):
    assert main(["new", "model", "my_model", "--into", str(tmp_path / "new")]) == 0
    assert "class MyModel(" in (tmp_path / "new" / "toyexp-my-model" / "toyexp_my_model.py").read_text()


@pytest.mark.release
def test_every_template_passes_the_conformance_suite_and_its_own_tests(new_plugins):
    """Run all templates in one process, without installing them."""
    tests = [plugin_directory(new_plugins, kind) / f"test_toyexp_own_{kind}_2.py" for kind in KINDS]
    done = environments.run(
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rs", *tests, cwd=new_plugins
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert re.search(r"\d{3} passed, 1 skipped", done.stdout), "data whose lines are alike skip one test"


def test_without_pytest_the_printed_commands_install_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("toyexp.cli.new.find_spec", lambda module: None)
    assert main(["new", "callback", "mine", "--into", str(tmp_path)]) == 0
    lines = [line.split()[:2] for line in capsys.readouterr().out.splitlines()]
    assert lines.index(["pip", "install"]) < lines.index(["python", "-m"])


@pytest.mark.parametrize("kind", ["model", "recipe", "data", "callback", "optimiser", "format", "engine"])
def test_the_command_in_the_readme_runs(new_plugins, monkeypatch, capsys, kind):
    """With fewer steps and a smaller model."""
    monkeypatch.chdir(plugin_directory(new_plugins, kind))
    line = next(line for line in Path("README.md").read_text().splitlines() if line.startswith("toyexp 'plugins"))
    words = [word for word in shlex.split(line)[1:] if not word.startswith(("steps=", "eval_every="))]
    engine = [] if kind == "engine" else ["engine=ggml"]
    assert main([*words, *engine, *OWN_SIZES.get(kind, SMALL), "hydra.run.dir=run"]) == 0, capsys.readouterr().err
    settings, files = Path("run/config.yaml").read_text(), [path.name for path in Path("run").iterdir()]
    assert f"own_{kind}_2" in settings or f"model.own_{kind}_2.json" in files


@pytest.mark.release
def test_the_plugin_is_found_by_its_entry_point_once_it_is_installed(new_plugins, tmp_path):
    python = environments.make_environment(
        tmp_path / "env", install=plugin_directory(new_plugins, "optimiser"), editable=True
    )
    listed = environments.run(python, "-m", "toyexp", "plugins", cwd=tmp_path)
    assert re.search(r"own_optimiser_2 +RMSprop\b.*\[own_optimiser_2, toyexp-own-optimiser-2 0\.1\]", listed.stdout)


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_every_template_can_be_installed_and_used_by_name(new_plugins, tmp_path, kind):
    python = environments.make_environment(tmp_path / "env", install=plugin_directory(new_plugins, kind), editable=True)
    line = next(
        line
        for line in (plugin_directory(new_plugins, kind) / "README.md").read_text().splitlines()
        if line.startswith("toyexp ")
    )
    words = [word for word in shlex.split(line)[1:] if not word.startswith("plugins=")]
    done = environments.run(python, "-m", "toyexp", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("optimiser Sgd-R", "did you mean sgd_r?"),
        (f"callback {'a' * 300}", "has 300 characters; at most 60"),
        ("optimiser 1st", "a letter first (more"),
        ("optimiser größe", "a letter first (more"),
        ("optimiser _", "a letter first (more"),
        ("optimiser a__b", "single underscores"),
        ("optimiser adamw", "optim=adamw exists, in toyexp_optimisers"),
        ("format gguf", "--type gguf exists, in "),
        ("model nano", "model=nano is already in use"),
        ("engine auto", "engine=auto is already in use"),
        ("recipe torch", "a module toyexp_torch already"),
        ("model normal", "the class name Normal is already in use"),
        ("modle x", "did you mean model?"),
        ("command x", "choose one of: callback, data"),
        ("optimiser", "needs a kind and a name"),
        ("optimiser a b", "needs a kind and a name"),
        ("optimiser steps=3", "is a setting of a run"),
        ("optimiser there", "toyexp-there already exists"),
        ("optimiser x --into file", "file/toyexp-x cannot be written"),
        ("optimiser x --into", "--into needs a value"),
    ],
)
def test_invalid_arguments_of_new_give_one_line_and_write_nothing(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("toyexp-there").mkdir()
    Path("toyexp-there/mine.py").write_text("mine")
    assert main(["new", *words.split()]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1
    assert sorted(str(path) for path in Path().rglob("*")) == ["file", "toyexp-there", "toyexp-there/mine.py"]


@pytest.mark.parametrize(
    ("word", "kind"),
    [("optim", "optimiser"), ("optimizer", "optimiser"), ("callbacks", "callback"), ("dataset", "data")],
)
def test_common_synonyms_of_a_kind_are_accepted(tmp_path, capsys, word, kind):
    assert main(["new", word, "of_mine", "--into", str(tmp_path)]) == 0
    assert f"toyexp help plugins/{kind}" in capsys.readouterr().out
    directory = tmp_path / "toyexp-of-mine"
    assert {path.name for path in directory.iterdir()} >= {"README.md", "pyproject.toml", "toyexp_of_mine.py"}


def test_the_templates_name_is_replaced_in_every_spelling():
    text = "my_data MyData my-data my_datax"
    assert fill_template(text, "data", "two_words") == "two_words TwoWords two-words two_wordsx"


# -- plugins --check ------------------------------------------------------------------------------------------------


def check(path, tmp_path, *more):
    """Run a check in a subprocess, because its imports persist."""
    done = environments.run(sys.executable, "-m", "toyexp", "plugins", "--check", path, *more, cwd=tmp_path)
    assert "Traceback" not in done.stdout + done.stderr
    return done


def test_a_check_runs_the_tests_beside_a_plugin(new_plugins, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTEST_ADDOPTS", "-q")  # an option of pytest's terminal, which a check has none of
    report = json.loads(check(plugin_directory(new_plugins, "callback"), tmp_path, "--json").stdout)
    suite, others = report["checked"]
    assert report["good"] and (suite["part"], suite["suite"]) == ("callbacks=[own_callback_2]", "CallbackSuite")
    assert (suite["passed"], suite["note"]) == (6, "") and (others["suite"], others["passed"]) == ("other tests", 2)


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("conftest.py", "raise RuntimeError('torn')", "could not be run: RuntimeError: torn"),
        pytest.param(
            "test_more.py", "raise SystemExit('left')", "could not be run: SystemExit: left", marks=pytest.mark.release
        ),
        pytest.param(
            "conftest.py",
            "import pytest\npytest.skip('no', allow_module_level=True)",
            "conftest.py: pytest.skip: no",
            marks=pytest.mark.release,
        ),
    ],
)
def test_tests_that_cannot_run_fail_the_check(new_plugins, tmp_path, monkeypatch, file, text, message):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    shutil.copytree(plugin_directory(new_plugins, "callback"), tmp_path / "its")
    (tmp_path / "its" / file).write_text(text)
    done = check("its", tmp_path)
    assert done.returncode == 1 and message in done.stdout and not done.stderr, done.stdout + done.stderr
    assert not list(tmp_path.glob("pytest-of-*")), "temporary files stay"


ENDS = """
import os

def test_a_child_may_end():
    child = os.fork()
    if not child:
        os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3

def test_of_all():
    os._exit(0)
"""


def test_a_test_that_ends_the_process_fails_and_one_that_ends_its_child_does_not(tmp_path):
    (tmp_path / "test_ends.py").write_text(ENDS)
    program = (
        "from toyexp.cli.plugin_check import _PytestResults, _run_pytest; found = _PytestResults([])\n"
        "_run_pytest(['test_ends.py'], found); print(found.sorted_lines()[0].failures)"
    )
    done = environments.run(sys.executable, "-c", program, cwd=tmp_path)
    assert done.stdout == "['test_of_all: SystemExit: os._exit(0) would end toyexp']\n", done.stdout + done.stderr


def test_a_plugin_that_is_also_installed_is_loaded_once():
    registry = load_package([EntryPoint("mine", "toyexp_optimisers", "toyexp")], "under test")
    assert registry.problems == [] and registry.offers["optim"]["adamw"].package == "under test"


SEVERAL = '''
"""Parts that are right, wrong, in need of a setting, and without a suite."""
from dataclasses import dataclass
from typing import ClassVar
from toyexp import TOKENS, Command, Data, Kind, Optimiser, UserError, hookimpl

@dataclass
class Good(Optimiser):
    """Gradient descent."""
    name: ClassVar[str] = "good"
    def slots(self, shape): return {}
    def numbers(self, step, lr, weight_decay): return {"lr": lr}
    def update(self, ops, w, g, state, n): return ops.sub(w, ops.scale(g, n["lr"])), state

@dataclass
class Uphill(Good):
    """Gradient ascent."""
    name: ClassVar[str] = "uphill"
    def update(self, ops, w, g, state, n): return ops.add(w, ops.scale(g, n["lr"])), state

@dataclass
class Torn(Good):
    """Misspelt."""
    name: ClassVar[str] = "torn"
    def update(self, ops, w, g, state, n): return ops.ad(w, g), state

@dataclass
class Book(Data):
    """A book."""
    name: ClassVar[str] = "book"
    gives: ClassVar[Kind] = TOKENS
    path: str = ""  # of the book
    def check(self): raise UserError("data.path=: there is no such file")
    def open(self, vocabulary): ...

@dataclass
class Hello(Command):
    """Says hello."""
    name: ClassVar[str] = "hello"
    def run(self, arguments): return 0

@hookimpl
def register_optimisers(register): register(Good), register(Uphill), register(Torn)
@hookimpl
def register_data(register): register(Book)
@hookimpl
def register_commands(register): register(Hello)
'''


def test_a_check_without_tests_uses_the_default_suites(tmp_path):
    (tmp_path / "several.py").write_text(SEVERAL)
    (tmp_path / "conftest.py").write_text("raise SystemExit('the conftest of another project')")
    done = check("several.py", tmp_path)
    assert done.returncode == 1
    verdicts = {part: (verdict, note) for part, verdict, note in ROW.findall(done.stdout)}
    assert {part: verdict for part, (verdict, _) in verdicts.items()} == {
        "optim=good": "PASS", "optim=uphill": "FAIL", "optim=torn": "FAIL", "data=book": "not run",
        "toyexp hello": "PASS",
    }  # fmt: skip
    assert verdicts["data=book"][1].startswith("data.path=: there is no such file; write a test: class TestBook(Data")
    assert "\n  optim=uphill: TestUphill::test_it_reduces_the_loss: " in done.stdout
    line = 1 + SEVERAL[: SEVERAL.index("ops.ad(")].count("\n")
    torn = r"\n  optim=torn: TestTorn::test_it_reduces_the_loss: .*"
    assert re.search(rf"{torn}\(several\.py, line {line}\)\n", done.stdout)


ROW = re.compile(r"^(\S.*?)  +\w+  +(PASS|FAIL|skipped|not run) *(.*)$", re.MULTILINE)


@pytest.mark.parametrize(
    ("name", "text", "code", "message"),
    [
        ("none.py", "x = 1", 1, "none registers nothing"),
        ("lost.py", "import nowhere_at_all", 1, "there is no module nowhere_at_all"),
        ("exits.py", "import os; os._exit(0)", 1, "exits: SystemExit: os._exit(0) would end toyexp"),
        ("segfaults.py", "import ctypes\nctypes.string_at(0)", -11, 'segfaults.py", line 2 in <module>'),
        ("gone.py", None, 2, "no such file or directory"),
        ("notes.txt", "x", 2, "is not a Python file"),
        ("empty/notes.txt", "x", 2, "holds neither a pyproject.toml nor an __init__.py"),
        ("other/pyproject.toml", "[project]\nname = 'x'", 2, "names no plugin; add [project.entry-points.toyexp]"),
        ("odd/pyproject.toml", "project = 3", 2, "names no plugin"),
        ("number/pyproject.toml", "[project.entry-points.toyexp]\na = 3", 2, "names no plugin"),
        ("torn/pyproject.toml", "[project", 2, "its pyproject.toml cannot be read"),
    ],
)
def test_a_missing_or_broken_plugin_is_reported_in_one_line(tmp_path, name, text, code, message):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    if text is not None:
        path.write_text(text)
    done = check(name if path.parent == tmp_path else path.parent.name, tmp_path)
    assert done.returncode == code, done.stdout + done.stderr
    assert message in (done.stdout if code == 1 else done.stderr)


def test_json_needs_check_and_check_takes_one_directory(capsys):
    assert main(["plugins", "--json"]) == 2 and "with --check" in capsys.readouterr().err
    assert main(["plugins", "--check", "x.py", "warm"]) == 2 and "takes one directory" in capsys.readouterr().err


# -- pages ----------------------------------------------------------------------------------------------------------


def test_every_page_is_a_topic_of_help_and_shows_the_files_it_links_to(capsys):
    for topic in topics():
        text = read_page(topic)
        assert not re.search(r"\]\((?!http)[^)]*\.(md|py)", text), topic
        assert {*re.findall(r"`toyexp help ([\w/-]+)`", text)} <= {*topics(), "TOPIC"}, topic
        assert "<!--" not in text and "](#" not in text, topic
    assert "by_name[name](**sizes)" in read_page("plugins/format"), "code is no link"
    assert "A model (`toyexp help plugins/model`)" in read_page("plugin-author")
    assert main(["help", "plugins/engine"]) == 0
    assert "class MyEngineSession(Session):" in capsys.readouterr().out
    for alias in ("ops", "loss"):
        capsys.readouterr()
        assert main(["help", alias]) == 0 and capsys.readouterr().out.startswith("# Losses and ops")
    assert main(["help", "runs"]) == 0
    assert capsys.readouterr().out.rstrip().endswith("The command of the same name: toyexp runs --help")
    for kind in KINDS:
        assert f"plugins/{kind}" in topics(), "which toyexp new names"


def test_the_page_on_callbacks_lists_every_field_and_method_of_a_run():
    page = read_page("plugins/callback")
    listed = re.findall(r"`run\.(\w+)[`(]", "".join(re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)))
    public = {name for name in (*vars(Run), *Run.__dataclass_fields__) if name[0] != "_"} - {"bus", "ledger", "remedy"}
    assert public <= {*listed}


def test_a_search_of_the_pages_puts_the_page_of_a_setting_first_and_counts_the_words_of_others(monkeypatch, tmp_path):
    for name, text in {"abc": "one seed", "runs": "a seed", "title": "# Seeds", "zoo": "seed\nseed"}.items():
        (tmp_path / f"{name}.md").write_text(text)
    monkeypatch.setattr(pages, "PAGES", tmp_path)
    assert [topic for topic, _, _ in pages.search("seed")] == ["runs", "title", "zoo", "abc"]


def test_help_with_a_word_that_names_no_page_searches_the_pages(capsys, monkeypatch, tmp_path):
    """The page of a setting of that name first, then headings, then text; a word of one page prints that page."""
    for name, text in {
        "data": "# Data\n\nrows, and Warmup\nwarmup too", "runs": "# Runs\n\n## Warmup\n",
        "speed": "# Speed\n\nlr of lions\n",
    }.items():  # fmt: skip
        (tmp_path / f"{name}.md").write_text(text)
    monkeypatch.setattr(pages, "PAGES", tmp_path)
    assert main(["help", "warmup"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[2:5] for line in lines[1:]] == [["runs", "line", "3"], ["data", "line", "3"]]
    for words in (["lions"], ["of", "lions"]):
        assert main(["help", *words]) == 0
        assert capsys.readouterr().out == "# Speed\n\nlr of lions\n"
    assert main(["help", "ions"]) == 2, "no word begins with it"
