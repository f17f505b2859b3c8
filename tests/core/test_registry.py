import ast
import importlib
import inspect
import itertools
import os
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import pytest
from structure import PUBLIC

import toyexp
from toyexp import UserError
from toyexp.base import require_choice, require_range
from toyexp.cli.main import main
from toyexp.config.paths import CONF
from toyexp.interfaces.hooks import Registration, RunHooks
from toyexp.plugins.discovery import load
from toyexp.plugins.rules import KINDS, check_class
from toyexp.plugins.settings import list_settings

COUNTER = itertools.count()
ROOT = Path(toyexp.__file__).resolve().parent.parent
CORE = ROOT / "toyexp"
SHIPPED = sorted(p for p in (ROOT / "plugins").iterdir() if (p / "__init__.py").exists())
FOREIGN = ("torch", "ggml", "gguf", "wandb", "matplotlib", "tokenizers", "hydra", "omegaconf",
           "sklearn", "PIL", "safetensors")  # fmt: skip

CALLBACK = """
from dataclasses import dataclass
from typing import ClassVar
from toyexp import Callback, hookimpl

@dataclass(eq=False)
class {cls}(Callback):
    '''{help}'''
    name: ClassVar[str] = "{name}"
    every: int = 1  # steps in between
{body}
@hookimpl
def register_callbacks(register):
    register({cls})
"""


def callback(name, body="", cls="Mine", help="Does something."):
    return CALLBACK.format(name=name, body="\n".join(f"    {line}" for line in body.splitlines()), cls=cls, help=help)


def part(kind, *body):
    """The source of a plugin with one part of a kind."""
    lines = "".join(f"    {line}\n" for line in ("'''Does something.'''", "name = 'other'", *body))
    return (
        "from dataclasses import dataclass\n"
        f"from toyexp import IMAGES, TOKENS, {kind}, hookimpl\n"
        f"@dataclass\nclass Mine({kind}):\n{lines}"
        f"@hookimpl\ndef register_{kind.lower()}{'' if kind == 'Data' else 's'}(register):\n    register(Mine)\n"
    )


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Entry points of plugins whose modules were just written: (plugin name, source) pairs."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(*plugins, package="stranger 1.2"):
        entries = []
        for name, source in plugins:
            module = f"installed_plugin_{next(COUNTER)}"  # a process imports a module once
            (tmp_path / f"{module}.py").write_text(source)
            entries.append((EntryPoint(name, module, "toyexp"), package))
        return entries

    return write


GOOD = ("good", callback("good_one", help="Works."))

# name of the breakage: (source of the plugin, words the reason must hold)
BROKEN = {
    "raises on import": ("raise RuntimeError('no such\\n  library')", ["RuntimeError: no such library"]),
    "imports what is not there": ("import not_installed_anywhere", ["not_installed_anywhere"]),
    "has a syntax error": ("def register(:", ["SyntaxError"]),
    "calls sys.exit on import": ("import sys; sys.exit('goodbye')", ["SystemExit: goodbye"]),
    "calls os._exit on import": ("import os; os._exit(0)", ["SystemExit: os._exit(0) would end toyexp"]),
    "calls sys.exit in its hook": (
        "import sys\nfrom toyexp import hookimpl\n@hookimpl\ndef register_callbacks(register):\n    sys.exit(3)",
        ["SystemExit: 3"],
    ),
    "registers a name twice": (
        callback("twice") + "    register(Mine)\n",
        ["callbacks=twice is registered twice"],
    ),
    "registers a name that is taken": (
        callback("good_one"),
        ["callbacks=good_one is already registered by good (stranger 1.2)"],
    ),
    "misspells a hook of the module": (
        callback("other").replace("def register_callbacks", "def register_callback"),
        ["bad.register_callback is marked @hookimpl but is not a hook", "did you mean register_callbacks?"],
    ),
    "forgets to mark the hook of the module": (
        callback("other").replace("@hookimpl\ndef", "def"),
        ["bad.register_callbacks has a hook's name but is not marked @hookimpl"],
    ),
    "has a hook with an unknown argument": (
        callback("other").replace("(register)", "(registry)").replace("    register(", "    registry("),
        ["bad.register_callbacks: 'registry' is not an argument of that hook", "register"],
    ),
    "offers nothing": ("VALUE = 1", ["registers nothing"]),
    "misspells a hook of a callback": (
        callback("other", "@hookimpl\ndef on_stepp(self, step):\n    pass"),
        ["Mine.on_stepp is marked @hookimpl but is not a hook", "did you mean on_step?"],
    ),
    "forgets to mark a hook of a callback": (
        callback("other", "def on_step(self, step):\n    pass"),
        ["Mine.on_step has a hook's name but is not marked @hookimpl; put @hookimpl above it"],
    ),
    "misspells a hook of a callback and forgets to mark it": (
        callback("other", "def on_steps(self, step):\n    pass"),
        ["Mine.on_steps is not a hook", "did you mean on_step?"],
    ),
    "has a callback hook with an unknown argument": (
        callback("other", "@hookimpl\ndef on_step(self, step, metric):\n    pass"),
        ["Mine.on_step: 'metric' is not an argument of that hook", "did you mean metrics?"],
    ),
    "is not a dataclass": (
        callback("other").replace("@dataclass(eq=False)\n", ""),
        ["Mine is not decorated with @dataclass"],
    ),
    "has no docstring": (
        callback("other").replace("    '''Does something.'''\n", ""),
        ["Mine has no docstring"],
    ),
    "has an empty docstring": (callback("other", help=" "), ["Mine has no docstring"]),
    "has a setting without default": (
        callback("other").replace("every: int = 1", "every: int"),
        ["Mine.every has no default"],
    ),
    "says a type that is nowhere": (
        callback("other").replace("every: int = 1", "every: 'Foo' = 1"),
        ["Mine: type annotations cannot be evaluated: NameError: name 'Foo' is not defined"],
    ),
    "compares callbacks by their settings": (
        callback("other").replace("(eq=False)", ""),
        ["Mine must be a @dataclass(eq=False)"],
    ),
    "has a name nobody can type": (callback("Other One"), ["Mine.name is 'Other One'", "lower-case"]),
    "has no name": (callback("other").replace("    name: ClassVar[str] = \"other\"\n", ""), ["Mine.name is None"]),
    "leaves abstract methods": (
        part("Recipe"),
        ["Mine does not implement plan"],
    ),
    "starts from what is no setting": (
        part("Recipe", "def plan(self, model, setup): ...", "starts_from = 'base'"),
        ["Mine.starts_from is 'base'", "not one of its settings"],
    ),
    "says in a word which data it reads": (
        part("Recipe", "def plan(self, model, setup): ...", "reads = ('tokens',)"),
        ["Mine.reads is ('tokens',)", "TOKENS"],
    ),
    "registers another kind of thing": (
        callback("other").replace("register_callbacks", "register_engines"),
        ["Mine is not a subclass of toyexp.Engine"],
    ),
    "registers an object": (callback("other").replace("register(Mine)", "register(Mine())"), ["not a subclass of"]),
    "names a setting like a method": (
        callback("other", "state: str = ''"),
        ["Mine.state cannot be a setting: toyexp.Callback has an attribute of that name"],
    ),
    "makes a setting of its name": (
        callback("other").replace("name: ClassVar[str]", "name: str"),
        ["Mine.name cannot be a setting", "ClassVar"],
    ),
    "schedules nothing": (
        callback("other").replace("Callback", "Schedule"),
        ["Mine does not implement factor"],
    ),
    "forgets the comma of a tuple": (
        part("Recipe", "def plan(self, model, setup): ...", "needs_tensors = ('token_embd.weight')"),
        ["Mine.needs_tensors is 'token_embd.weight'; it must be a tuple of names: ('token_embd.weight',)"],
    ),
    "fills what is no setting": (
        part("Data", "gives = TOKENS", "fills = ('date',)", "def check(self): ...", "def open(self, vocabulary): ..."),
        ["Mine.fills is 'date'", "not one of its settings"],
    ),
    "wants a mode that AdamW does not have": (
        part("Recipe", "def plan(self, model, setup): ...", "optim_mode = 'lor'"),
        ["Mine.optim_mode is 'lor'", "did you mean lora?"],
    ),
    "has an update of other arguments": (
        part("Optimiser", "slots = numbers = lambda self, *a: {}", "def update(self, ops, w, g, state): ..."),
        ["Mine.update takes (self, ops, w, g, state); it must take (self, ops, w, g, state, n)"],
    ),
    "has a loss of other arguments": (
        part("Objective", "def loss(self, model, batch): ..."),
        ["Mine.loss takes (self, model, batch); it must take (self, ops, model, p, batch)"],
    ),
    "reads nothing of its kind": (
        part("Model", "reads = IMAGES", "def check(self): ...", "def tensors(self): ...", "def forward(self): ..."),
        ["Mine does not implement inputs", "images"],
    ),
    "writes no adapters after all": (
        part("Format", "suffix = '.mine'", "writes_adapters = True", "def write(self, exported, path): ..."),
        ["Mine does not implement write_adapter"],
    ),
    "writes numbers of what is no setting": (
        part("Format", "suffix = '.mine'", "dtype_setting = 'type'", "def write(self, exported, path): ..."),
        ["Mine.dtype_setting is 'type'", "not one of its settings"],
    ),
    "gives a format a setting of its callback": (
        part("Format", "suffix = '.mine'", "every: int = 2  # files", "def write(self, exported, path): ..."),
        ["Mine.every cannot be a setting", "callback"],
    ),
    "registers two formats with one suffix": (
        part("Format", "suffix = '.mine'", "def write(self, exported, path): ...")
        + "    register(dataclass(type('Its', (Mine,), {'name': 'its', '__doc__': 'Another.'})))\n",
        ["Its.suffix is '.mine'", "format=other"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_plugin_is_reported_and_does_not_stop_others(install, how):
    source, words = BROKEN[how]
    registry = load(installed=install(GOOD, ("bad", source), ("later", callback("later_one"))))
    assert sorted(registry.offers["callbacks"]) == ["good_one", "later_one"]
    assert not any(registry.offers[kind] for kind in KINDS if kind != "callbacks"), "taken in whole or not at all"
    (problem,) = registry.problems
    assert (problem.plugin, problem.package) == ("bad", "stranger 1.2")
    assert "\n" not in problem.reason
    for word in words:
        assert word in problem.reason


def test_a_plugin_with_one_bad_class_offers_none_of_its_classes(install):
    source = callback("first") + "    register(int)\n"
    registry = load(installed=install(("mixed", source)))
    assert registry.offers["callbacks"] == {}
    assert registry.problems[0].offered[0] == ("callbacks", "first")


def test_using_a_part_of_a_broken_plugin_reports_that_it_is_broken(install):
    registry = load(installed=install(GOOD, ("bad", callback("wanted", "def on_step(self):\n    pass"))))
    with pytest.raises(UserError) as error:
        registry.get("callbacks", "wanted")
    text = str(error.value)
    assert text.startswith("callbacks=wanted comes from plugin bad, which is broken: Mine.on_step has a hook's name")


def test_a_name_like_that_of_an_unloadable_plugin_suggests_nothing_else(install):
    registry = load(installed=install(GOOD, ("toyexp_good_on", "raise OSError('no driver')")))
    with pytest.raises(UserError) as error:
        registry.get("callbacks", "good_on")
    message = "callbacks=good_on: unknown name; plugin toyexp_good_on is broken: OSError: no driver"
    assert str(error.value) == message


def test_an_unknown_part_names_the_broken_plugins_that_may_provide_it(install):
    registry = load(installed=install(GOOD, ("bad", "raise OSError('no driver')")))
    with pytest.raises(UserError) as error:
        registry.get("callbacks", "good_oen")
    assert str(error.value) == (
        "callbacks=good_oen: unknown name (a broken plugin may have it: bad: OSError: no "
        "driver); did you mean good_one?"
    )


@pytest.fixture
def distribution(tmp_path, monkeypatch):
    """Install a package with one plugin and its requirements; return the module's directory."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(*requires, source=None, package="stranger"):
        module = f"required_plugin_{next(COUNTER)}"
        (tmp_path / f"{module}.py").write_text(source or callback(f"wanted_{package}"))
        info = tmp_path / f"{package}-1.2.dist-info"
        info.mkdir()
        lines = [
            "Metadata-Version: 2.1",
            f"Name: {package}",
            "Version: 1.2",
            *(f"Requires-Dist: {r}" for r in requires),
        ]
        (info / "METADATA").write_text("\n".join(lines) + "\n")
        (info / "entry_points.txt").write_text(f"[toyexp]\nreq = {module}\n")
        return tmp_path

    return write


@pytest.mark.parametrize(
    ("requires", "reason"),
    [
        (["toyexp>=99,<100", "numpy"], "needs toyexp <100,>=99; this is"),
        (["toyexp (<0.1)"], "needs toyexp <0.1"),
        (["Toyexp==0.0.1"], "needs toyexp ==0.0.1"),
        (["toyexp>=0.1"], None),
        (["toyexp[torch]"], None),
        (["toyexp-other>=99"], None),
        (['toyexp>=99; extra == "new"'], None),
        (["toyexp >>> 1"], None),
        ([], None),
    ],
)
def test_a_plugin_for_another_toyexp_version_is_skipped_before_importing(distribution, requires, reason):
    explodes = "import sys; sys.exit('imported')" if reason else None
    distribution(*requires, source=explodes)
    registry = load()
    problems = [p.reason for p in registry.problems if p.package == "stranger 1.2"]
    assert len(problems) == (1 if reason else 0) and all(p.startswith(reason) for p in problems)
    assert ("wanted_stranger" in registry.offers["callbacks"]) is not bool(reason)


def test_a_newly_installed_package_is_found(distribution):
    assert "wanted_stranger" not in load().offers["callbacks"]
    distribution()
    assert "wanted_stranger" in load().offers["callbacks"]


def test_a_run_warns_once_of_a_broken_plugin_that_it_does_not_use(distribution, tmp_path, monkeypatch, capsys):
    distribution("toyexp>=99")
    distribution(source="raise OSError('no driver')", package="driver")
    monkeypatch.chdir(tmp_path)
    words = [
        "plugins=toyexp.testing.null",
        "engine=noop",
        "data=random",
        "steps=6",
        "eval_every=0",
        "hydra.run.dir=run",
    ]
    assert main(words) == 0
    warned = sorted(line for line in capsys.readouterr().out.splitlines() if "warning" in line)
    assert len(warned) == 2
    assert "plugin req (driver 1.2) is left out: OSError: no driver" in warned[0]
    assert "plugin req (stranger 1.2) is left out: needs toyexp >=99" in warned[1]
    (tmp_path / "unread.py").write_text(callback("unread").replace("every: int = 1", "every: 'Foo' = 1"))
    assert main([*words, "plugins=[unread]"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert main([*words, "callbacks=[default,wanted_stranger]"]) == 2
    err = capsys.readouterr().err
    assert "callbacks=wanted_stranger: unknown name" in err and "needs toyexp >=99" in err and "no driver" in err


def test_a_plugin_that_changes_the_working_directory_does_not_move_runs(distribution, tmp_path, monkeypatch, capsys):
    distribution(source=f"import os; os.chdir({os.sep!r})\n{callback('wanted_mover')}", package="mover")
    monkeypatch.chdir(tmp_path)
    words = ["plugins=toyexp.testing.null", "engine=noop", "data=random", "steps=2", "eval_every=0"]
    assert main([*words, "hydra.run.dir=run"]) == 0
    assert (tmp_path / "run" / "config.yaml").is_file()
    out = capsys.readouterr().out
    assert f"warning: plugin req changed the working directory; it was changed back to {tmp_path}" in out


def test_a_deleted_working_directory_is_reported(tmp_path, monkeypatch, capsys):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    for words in (["plugins=toyexp.testing.null", "engine=noop", "data=random", "steps=2"], ["plugins"], ["doctor"]):
        assert main(words) == 2
        assert "the working directory was deleted" in capsys.readouterr().err


def test_a_plugin_with_invalid_setting_types_is_not_loaded(distribution, tmp_path, monkeypatch, capsys):
    source = callback("unsettled").replace("every: int = 1", "every: complex = 1j")
    distribution(source=source)
    monkeypatch.chdir(tmp_path)
    words = ["engine=noop", "data=random", "steps=6", "eval_every=0", "hydra.run.dir=run"]
    assert main(["plugins=toyexp.testing.null", *words]) == 0
    (warned,) = [line for line in capsys.readouterr().out.splitlines() if "warning" in line]
    assert "plugin req (stranger 1.2) is left out: callbacks=unsettled: fields are not valid settings" in warned
    assert main(["plugins=toyexp.testing.null", *words, "callbacks=[unsettled]"]) == 2
    assert "callbacks=unsettled comes from plugin req, which is broken" in capsys.readouterr().err


def test_a_healthy_registry_just_suggests_the_nearest_name(install):
    registry = load(installed=install(GOOD))
    with pytest.raises(UserError, match=r"^callbacks=god_one: unknown name; did you mean good_one\?$"):
        registry.get("callbacks", "god_one")
    assert registry.get("callbacks", "good_one").__name__ == "Mine"
    assert registry.offers["callbacks"]["good_one"].help == "Works."


def test_loading_twice_leaks_nothing_from_one_registry_into_the_other(install):
    entries = install(GOOD)
    first, second = load(installed=entries), load(installed=entries)
    assert second.problems == [] and first.offers == second.offers
    assert load(installed=[]).offers["callbacks"] == {}


def test_plugins_are_listed_in_columns(capsys):
    assert main(["plugins"]) == 0
    rows = [row for row in capsys.readouterr().out.splitlines() if row.startswith("  ")]
    names = {name for offers in load().offers.values() for name in offers}
    assert {row.split()[0] for row in rows} == names | {"auto"}
    begins = {row.index(row.split(maxsplit=1)[1], len(row.split()[0]) + 2) for row in rows}
    assert len(begins) == 1


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("optim", ["optim=adamw ", "  optim.beta2=null ", "  optim.mode=auto ", "  optim.grad_clip=0.0 "]),
        ("auto", ["engine=auto ", "  engine.threads=0 "]),
        ("small", ["model=small ", "  model=llama with", "  model.d_model=256 ", "  model.tied=false "]),
        ("vit_tiny", ["recipe=vit_tiny ", "  recipe.init_scale=1.0 ", "model=vit_tiny ", "  model.patch=16 "]),
        ("default", ["callbacks=default ", "  callbacks=[cosine,progress,watch,events,gguf_export]"]),
        ("lora_rank_sweep", ["experiment=lora_rank_sweep ", "  recipe=lora", "  recipe.targets=[q,v]",
                             "  -m recipe.rank=1,2,4,8,16"]),
    ],
)  # fmt: skip
def test_a_named_part_shows_its_description(capsys, name, lines):
    assert main(["plugins", name]) == 0
    shown = capsys.readouterr().out.splitlines()
    for line in lines:
        assert any(s.startswith(line) for s in shown), line
    assert all(s.split("  ")[-1].strip() for s in shown if s.startswith("  optim.")), "each setting has its comment"


def test_every_preset_of_conf_shows_its_settings(capsys):
    for path in CONF.glob("*/*.yaml"):
        assert main(["plugins", path.stem]) == 0
        assert f"{path.parent.name}={path.stem} " in capsys.readouterr().out


def test_a_local_module_in_the_working_directory_is_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = f"local_module_{next(COUNTER)}"
    (tmp_path / f"{name}.py").write_text(callback("local_one"))
    before = list(sys.path)
    monkeypatch.setattr(sys, "path", list(before))
    registry = load([name], installed=[])
    assert registry.offers["callbacks"]["local_one"].package == "local module"
    assert sys.path == [*before, str(tmp_path)], "last, for what it imports later"


@pytest.mark.parametrize(
    ("source", "words"),
    [("raise ValueError('typo')", "ValueError: typo"), (callback("good_one"), "already registered by good")],
)
def test_a_broken_local_module_is_an_error(install, tmp_path, monkeypatch, source, words):
    monkeypatch.chdir(tmp_path)
    name = f"local_module_{next(COUNTER)}"
    (tmp_path / f"{name}.py").write_text(source)
    with pytest.raises(UserError) as error:
        load([name], installed=install(GOOD))
    assert str(error.value).startswith(f"plugins=[{name}]: ") and words in str(error.value)


def test_a_missing_local_module_is_an_error():
    with pytest.raises(UserError, match="no_such_local_module"):
        load(["no_such_local_module"], installed=[])


# -- what ships -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shipped_registry():
    return load()


def test_nothing_that_ships_is_broken(shipped_registry):
    problems = [p for p in shipped_registry.problems if p.package.startswith("toyexp ")]
    assert problems == []
    assert {p.name for p in SHIPPED} <= {
        o.plugin for offers in shipped_registry.offers.values() for o in offers.values()
    }
    for kind, (base, _) in KINDS.items():  # `load` checks only plugins of other packages
        for cls in shipped_registry.classes(kind).values():
            check_class(cls, base)


def test_every_setting_that_ships_has_a_comment_in_the_help(shipped_registry):
    missing = [
        f"{kind}={name} {setting.name}"
        for kind, offers in shipped_registry.offers.items()
        for name, offer in offers.items()
        for setting in list_settings(offer.cls)
        if not setting.comment
    ]
    assert missing == []


def test_help_shows_inherited_settings_with_the_defaults_of_the_class_itself(shipped_registry):
    settings = {
        s.name: (s.default, s.type, s.comment) for s in list_settings(shipped_registry.get("callbacks", "cosine"))
    }
    comment = "warmup steps, in which the factor rises linearly to 1; below 1: fraction of the run"
    assert settings["warmup"] == (5, "int | float", comment)
    assert settings["floor"][:2] == (0.01, "float")


def test_every_hook_is_documented_and_registration_hooks_share_one_shape():
    for group in (Registration, RunHooks):
        for name, hook in inspect.getmembers(group, inspect.isfunction):
            assert hook.__doc__, name
            if group is Registration:
                assert list(inspect.signature(hook).parameters) == ["self", "register"], name
    assert {hook for _, hook in KINDS.values()} == {n for n in vars(Registration) if n.startswith("register_")}


def test_discovering_the_shipped_plugins_imports_no_framework():
    program = (
        "import sys; from toyexp.plugins.discovery import load; registry = load(); "
        "assert 'cpu' in registry.offers['engine'] and 'wandb' in registry.offers['callbacks']; "
        f"print(sorted(set({FOREIGN!r}) & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"


# -- who may import whom ----------------------------------------------------------------------------------------------

# Where core may import which framework: at the head of the file, or only inside a function.
CONFIG = {f"config/{path.name}" for path in (CORE / "config").glob("*.py")}
CONFIG |= {"sweeps/job_configs.py", "sweeps/combinations.py", "sweeps/search/space.py", "cli/inspect.py"}
AT_HEAD = {
    "pluggy": {"interfaces/hooks.py", "training/bus.py"},
    "hydra": CONFIG,
    "omegaconf": CONFIG,
    "yaml": {*CONFIG, "training/rundir.py"},  # comes with omegaconf; configs are read and written as Hydra reads them
    "numpy": None,  # anywhere
}  # fmt: skip
INSIDE_FUNCTIONS = {
    "pandas",
    "pyarrow",
    "IPython",
    "packaging",
    "gguf",
    "tokenizers",
    "safetensors",
    "jinja2",
    "xllamacpp",
    "llama_cpp",
    "submitit",
    "ray",
    "optuna",
    "cmaes",
    "plotly",
    "PIL",
    "rich",  # pages of the documentation on a terminal
    "matplotlib",  # pictures
    "pytest",  # plugins --check
}
# The conformance kit is for people who have pytest; autograd gives its float64 references.
TESTING = {"pytest", "numpy", "autograd", "hypothesis"}


def sources(folder):
    return sorted(p for p in folder.rglob("*.py") if "__pycache__" not in p.parts)


def imports(path):
    """(module, imported names, whether it happens when the file is imported) of every import of a file."""
    tree = ast.parse(path.read_text())
    late = set()
    for node in ast.walk(tree):
        deferred = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if deferred or (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            late.update(id(n) for n in ast.walk(node))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, [], id(node) not in late) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module, [alias.name for alias in node.names], id(node) not in late


def top(module):
    return module.partition(".")[0]


@pytest.mark.parametrize("path", sources(CORE), ids=lambda p: str(p.relative_to(ROOT)))
def test_core_imports_only_what_the_design_allows(path):
    for module, _, at_head in imports(path):
        package = top(module)
        if package in sys.stdlib_module_names or package == "toyexp":
            continue
        if path.is_relative_to(CORE / "testing") and package in TESTING:
            continue
        if package in INSIDE_FUNCTIONS:
            assert not at_head, f"{module} is imported at the head of the file"
            continue
        allowed = AT_HEAD.get(package, set())
        assert allowed is None or str(path.relative_to(CORE)) in allowed, f"{module} does not belong into core"


def test_core_names_no_plugin_package():
    for path in sources(CORE):
        for node in ast.walk(ast.parse(path.read_text())):
            words = [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else []
            words += [node.id] if isinstance(node, ast.Name) else []
            for package in SHIPPED:
                assert not any(package.name in word for word in words), f"{path.name} names {package.name}"


@pytest.mark.parametrize("package", SHIPPED, ids=lambda p: p.name)
def test_plugins_import_neither_one_another_nor_anything_private(package):
    others = {p.name for p in SHIPPED} - {package.name}
    for path in sources(package):
        for module, names, _ in imports(path):
            assert top(module) not in others, f"{path}: {module}"
            if top(module) == "toyexp":
                assert module in PUBLIC, f"{path}: {module}"
                assert set(names) <= {*importlib.import_module(module).__all__, "__version__"}, f"{path}: {names}"


@pytest.mark.parametrize("package", SHIPPED, ids=lambda p: p.name)
def test_the_init_of_a_plugin_package_imports_only_toyexp(package):
    heads = {top(module) for module, _, at_head in imports(package / "__init__.py") if at_head}
    assert heads <= {"toyexp", *sys.stdlib_module_names}


def test_hasattr_is_not_used():
    # Interfaces are defined in classes; checks for attributes hide a missing contract.
    for path in [*sources(CORE), *(p for package in SHIPPED for p in sources(package))]:
        calls = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
        assert not any(isinstance(c.func, ast.Name) and c.func.id == "hasattr" for c in calls), path


@pytest.mark.parametrize("name", ["section", "part", "words", "bounds"])
def test_a_setting_may_be_named_like_a_parameter_of_its_check(name):
    require_choice("data", SimpleNamespace(**{name: "a"}), **{name: ("a", "b")})
    require_range("data", SimpleNamespace(**{name: 1}), **{name: "[1,2]"})
    with pytest.raises(UserError, match=f"data.{name}=c: "):
        require_choice("data", SimpleNamespace(**{name: "c"}), **{name: ("a", "b")})
    with pytest.raises(UserError, match=f"data.{name}=3: "):
        require_range("data", SimpleNamespace(**{name: 3}), **{name: "[1,2]"})
