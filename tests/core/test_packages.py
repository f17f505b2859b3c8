"""Missing or broken packages: one line with the reason; everything else keeps working."""

import gc
import itertools
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from toyexp import Unavailable, UserError, require_package
from toyexp.base.errors import Broken
from toyexp.base.packages import explain_import_error, pause_collection, prefix_unavailable, probe_import
from toyexp.base.signals import Interrupted, catch_signals
from toyexp.config.build import check_engine, pick_engine
from toyexp.plugins.discovery import load
from toyexp.plugins.registry import Offer
from toyexp.testing.null import NullEngine

COUNTER = itertools.count()
LIBRARY = "OSError('libnothing.so.1: cannot open shared object file')"

# how it is broken: (the source of its __init__.py, or None for a folder without one; words of the reason)
BREAKAGES = {
    "a library is missing": (f"raise {LIBRARY}", "OSError: libnothing.so.1: cannot open"),
    "an extension does not load": ("raise ImportError('undefined symbol: _ZN3foo')", "ImportError: undefined symbol"),
    "what it needs is missing": ("import not_installed_anywhere", "there is no module not_installed_anywhere"),
    "a part of it is missing": ("import {name}.part", "there is no module {name}.part"),
    "a part is asked for by its name": (
        "import importlib\nimportlib.import_module('{name}.part')",
        "there is no module {name}.part (__init__.py, line 2)",
    ),
    "it was built for another numpy": (
        "raise RuntimeError('module compiled against ABI version 0x1000009\\n but this is 0x2000000')",
        "RuntimeError: module compiled against ABI version 0x1000009 but this",
    ),
    "it asks for what is gone": ("import numpy; numpy.float_of_old", "AttributeError: module 'numpy' has no attribute"),
    "it ends the process": ("raise SystemExit('needs a licence')", "SystemExit: needs a licence"),
    "a page of advice wraps the cause": (
        f"try: raise {LIBRARY}\nexcept OSError as e: raise ImportError('IMPORTANT: PLEASE READ ' * 99) from e",
        "(OSError: libnothing.so.1",
    ),
    "it is no Python": ("def (", "SyntaxError"),
    "only its folder is left": (None, "{name} holds no __init__.py"),
    "it is another file of that name": ("", "module '{name}' has no attribute 'works' in "),
}


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Writes a package that can be imported once; returns its name."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(source):
        name = f"some_package_{next(COUNTER)}"
        (tmp_path / name).mkdir()
        if source is not None:
            (tmp_path / name / "__init__.py").write_text(source.replace("{name}", name))
        return name

    return write


@pytest.mark.parametrize("how", BREAKAGES)
def test_a_broken_package_gives_one_line_with_the_reason_each_time(package, how):
    source, words = BREAKAGES[how]
    name = package(source)
    said = []
    for _ in range(2):  # leftovers of a first import may fail differently
        with pytest.raises(Broken) as error, require_package(name, "pip install it", "Some-Package"):
            module = __import__(name)
            if source is not None:
                module.works()
        said.append(str(error.value))
    assert said[0] == said[1]
    assert said[0].startswith("Some-Package is installed but cannot be loaded (")
    assert words.replace("{name}", name) in said[0] and "\n" not in said[0] and len(said[0]) < 500
    assert said[0].endswith("); reinstall it: pip install --force-reinstall Some-Package")


def test_a_missing_package_names_its_install_command_and_is_found_once_installed(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(Unavailable) as error, require_package("comes_later", "pip install 'toyexp[later]'"):
        import comes_later
    assert str(error.value) == "comes_later is not installed: pip install 'toyexp[later]'"
    assert not isinstance(error.value, Broken)
    (tmp_path / "comes_later.py").write_text("value = 3")
    with require_package("comes_later", ""):
        import comes_later
    assert comes_later.value == 3


def test_an_interrupted_import_does_not_count_as_a_broken_package(package):
    name = package("")
    with pytest.raises(Interrupted), require_package(name, ""):
        try:
            raise Interrupted(15)
        except Interrupted:
            raise ImportError("its clean-up expected to have got further")  # noqa: B904 - as such code does
    with require_package(name, ""):
        __import__(name)


SIGNALLED = """
import os, signal, time
os.kill(os.getpid(), signal.SIGINT)
time.sleep(0.01)  # in which the interpreter calls the handler
whole = True
"""


def test_a_signal_waits_for_the_end_of_an_import(package):
    """Native code that loads may end the process where one is raised; a second one acts at once."""
    name = package(SIGNALLED)
    began = time.monotonic()
    with catch_signals() as signals, pytest.raises(Interrupted), require_package(name, ""):
        module = __import__(name)
        time.sleep(30)
    assert time.monotonic() - began < 20  # a sleep was not slept to its end
    assert module.whole and signals.count() == 1
    twice = package(SIGNALLED.replace("time.sleep", "os.kill(os.getpid(), signal.SIGINT); time.sleep"))
    with catch_signals(), pytest.raises(Interrupted), require_package(twice, ""):
        __import__(twice)
    assert twice not in sys.modules


def test_a_signal_during_an_import_is_not_delivered_to_a_later_handler(package):
    name, heard = package(SIGNALLED), []
    with catch_signals() as signals:
        __import__(name)
    previous = signal.signal(signal.SIGINT, lambda *_: heard.append(True))
    time.sleep(0.1)
    signal.signal(signal.SIGINT, previous)
    assert signals.is_ending() and not heard


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        ("it is not installed", "callbacks.export: it is not installed"),
        ("callbacks.export.type=q4_k is written by another", "callbacks.export.type=q4_k is written by another"),
    ],
)
def test_plugins_with_missing_packages_are_named_once(reason, message):
    with pytest.raises(Unavailable) as error, prefix_unavailable("callbacks.export"):
        raise Unavailable(reason)
    assert str(error.value) == message


def test_a_package_that_may_crash_is_tried_in_a_subprocess(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    sources = {"aborts": "import os; os.abort()", "raises": f"raise {LIBRARY}", "works": "", "is_gone": None}
    for name, source in sources.items():
        if source is not None:
            (tmp_path / f"{name}.py").write_text(source)
    (tmp_path / "is_left").mkdir()
    assert probe_import("works") is None
    assert probe_import("is_gone") == "is not installed"
    assert "OSError: libnothing.so.1" in probe_import("raises")
    assert "its import ended with -6" in probe_import("aborts")
    assert "is_left holds no __init__.py" in probe_import("is_left")


# -- engines ----------------------------------------------------------------------------------------------------------


class Faulty(NullEngine):
    """Fails while it asks for its device, in the way of libraries."""

    def check(self):
        raise OSError("libdriver.so: too old")


def test_an_engine_whose_check_raises_is_unavailable():
    with pytest.raises(Broken, match=r"^its check failed \(OSError: libdriver\.so: too old\)$"):
        check_engine(Faulty())


def engine(name, check):
    def checked(self):
        if isinstance(check, Exception):
            raise check
        return check

    return type(name, (NullEngine,), {"name": name, "check": checked, "__doc__": "One."})


@pytest.mark.parametrize(
    ("on_gpu", "visible", "note"),
    [
        (False, "0", " (auto; not tried: later)"),
        (False, "-1", " (auto)"),
        (False, "", " (auto)"),
        (True, "0", " (auto)"),
    ],
)
def test_auto_notes_a_later_engine_if_the_environment_lists_gpus(monkeypatch, on_gpu, visible, note):
    registry = load(installed=[])
    for priority, (name, is_gpu) in enumerate({"taken": on_gpu, "later": True, "other": True}.items()):
        cls = engine(name, "a device")
        cls.priority, cls.on_gpu, cls.device_variable = -priority, is_gpu, "LATER_VISIBLE" if name == "later" else ""
        registry.offers["engine"][name] = Offer("engine", name, cls, "some_plugin", "some package")
    monkeypatch.setenv("LATER_VISIBLE", visible)
    assert pick_engine({"name": "auto"}, registry)[1] == f"taken: a device{note}"


def test_auto_reports_skipped_and_broken_engines():
    registry = load(installed=[])
    lame = Broken("xlib is installed but cannot be loaded (OSError: no)", "install it again")
    checks = {"best": lame, "good": Unavailable("no such device"), "fair": Broken("its check failed (X: y)"),
              "also": lame, "works": "a device"}  # fmt: skip
    for priority, (name, check) in enumerate(checks.items()):
        cls = engine(name, check)
        cls.priority = -priority
        registry.offers["engine"][name] = Offer("engine", name, cls, "some_plugin", "some package")
    _, note = pick_engine({"name": "auto"}, registry)
    assert note == (
        "works: a device (auto; unavailable: good; best, also: xlib is installed but cannot be loaded (OSError: no); "
        "fair: its check failed (X: y))"
    )
    del registry.offers["engine"]["works"]
    with pytest.raises(UserError, match=r"no engine works here; xlib is installed but .* \(OSError: no\); its check"):
        pick_engine({"name": "auto"}, registry)


# -- in real processes, beside packages that are broken --------------------------------------------------------------

FAKES = {
    "torch": f"raise {LIBRARY}",
    "ggml": "import ctypes",  # and nothing that is expected of it
    "wandb": "",
    "matplotlib": "",  # without its parts
    "PIL": "raise ImportError('the _imaging extension was built for another version of Pillow')",
    "jinja2": "import markupsafe_of_old",
    "submitit": "import cloudpickle_of_old",
    "ray": "import msgpack_of_old",
    "optuna": "import sqlalchemy_of_old",
    "xllamacpp": "import os; os.abort()",
    "llama_cpp": f"raise {LIBRARY}",
    "tokenizers": f"raise {LIBRARY}",
    "numpy": "raise ImportError('undefined symbol: cblas_dgemm')",
}
SMOKE = ["experiment=smoke", "steps=1", "callbacks=[]", "hydra.run.dir=run", "data.max_mb=0.1"]


@pytest.fixture
def run_without(tmp_path):
    """Return a function that runs `python -m toyexp WORDS` with some packages broken."""

    def run(names, *words):
        for name in names:
            (tmp_path / "fakes" / name).mkdir(parents=True)
            (tmp_path / "fakes" / name / "__init__.py").write_text(FAKES[name])
        path = os.pathsep.join(filter(None, [str(tmp_path / "fakes"), os.environ.get("PYTHONPATH")]))
        return subprocess.run(
            [sys.executable, "-m", "toyexp", *words],
            capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, timeout=60,
        )  # fmt: skip

    return run


def test_auto_takes_the_next_engine_if_torch_cannot_be_imported(run_without, tmp_path):
    done = run_without(["torch"], *SMOKE)
    assert (done.returncode, done.stderr) == (0, "")
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("engine ")]
    assert line.startswith("engine  ggml: ")
    assert "cuda, cpu: torch is installed but cannot be loaded (OSError: libnothing.so.1" in line


def test_without_packages_for_any_engine_auto_says_what_to_install(tmp_path):
    gone = "import sys; sys.modules |= dict.fromkeys(['torch', 'ggml'])"
    code = [gone, "from toyexp.cli.main import main", "sys.exit(main())"]
    done = subprocess.run([sys.executable, "-c", "; ".join(code)], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout, list(tmp_path.iterdir())) == (2, "", [])
    assert done.stderr == (
        "toyexp: error: engine=auto: no engine works here; torch is not installed: pip install 'toyexp[torch]'; "
        "ggml-python is not installed: pip install 'toyexp[ggml]' (needs a C compiler); "
        "`toyexp doctor` shows the reasons (more: toyexp help engines)\n"
    )


@pytest.mark.parametrize(
    ("names", "engine", "words"),
    [
        (["torch"], "cpu", ["engine=cpu: torch is installed but cannot be loaded (OSError: libnothing.so.1"]),
        (["ggml"], "metal engine.emulate=true", ["engine=metal: ggml-python is installed but", "AttributeError"]),
        (["torch", "ggml"], "auto", ["engine=auto: no engine works here; torch is", "; ggml-python is", "doctor"]),
    ],
)
def test_a_named_engine_that_cannot_be_loaded_is_rejected_with_the_reason(run_without, tmp_path, names, engine, words):
    done = run_without(names, *SMOKE, *f"engine={engine}".split())
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("toyexp: error: ") and done.stderr.count("\n") == 1
    for word in words:
        assert word in done.stderr
    assert not (tmp_path / "run").exists()


def test_doctor_lists_everything_that_is_broken(run_without):
    done = run_without([name for name in FAKES if name != "numpy"], "doctor")
    assert (done.returncode, done.stderr) == (0, "")
    for pattern in (
        r"  cpu +no +torch is installed but cannot be loaded \(OSError: libnothing",
        r"  cuda +no +torch is installed but cannot be loaded \(OSError: libnothing",
        r"  ggml +no +ggml-python is installed but cannot be loaded \(AttributeError: module 'ggml' has no attribute",
        r"  data=images: Pillow is installed but .*another version of Pillow",
        r"  callbacks\.plots: matplotlib is installed but .*there is no module matplotlib\.",
        r"  callbacks\.wandb: wandb is installed but .*no attribute 'init'",
        r"  sweep\.launcher=submitit: submitit is installed but .*cloudpickle_of_old",
        r"  sweep\.launcher=ray: ray is installed but .*msgpack_of_old",
        r"  sweep\.search=cmaes: optuna is installed but .*sqlalchemy_of_old",
        r"  the chat template of a GGUF: jinja2 is installed but .*markupsafe_of_old",
        r"  --engine llama\.cpp: xllamacpp is installed but .*ended with -6.*llama_cpp is installed but .*libnothing",
    ):
        assert re.search(f"^{pattern}", done.stdout, re.MULTILINE), done.stdout


def test_plugins_lists_everything_and_says_which_engines_are_broken(run_without):
    done = run_without(["torch"], "plugins")
    assert (done.returncode, done.stderr) == (0, "")
    assert "\n  cpu " in done.stdout and "\n  plots " in done.stdout
    assert "\nbroken: engine=cuda,cpu: torch is installed but cannot be loaded (OSError: libnothing" in done.stdout


def test_a_broken_requirement_gives_one_line_too(run_without, tmp_path):
    (tmp_path / "book.txt").write_text("of all that could be written, only this was\n" * 99)
    words = ["data=text", "data.path=book.txt", "data.tokenizer=bpe", "engine=ggml", "hydra.run.dir=run"]
    done = run_without(["tokenizers"], *words)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "toyexp: error: tokenizers is installed but cannot be loaded (OSError: libnothing.so.1: cannot open shared "
        "object file); reinstall it: pip install --force-reinstall tokenizers\n"
    )
    assert not (tmp_path / "run").exists()


def test_a_broken_numpy_gives_one_line_in_any_command(run_without):
    done = run_without(["numpy"], "describe", "model.gguf")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(
        "toyexp: error: numpy is installed but cannot be loaded (ImportError: undefined symbol"
    )
    assert done.stderr.count("\n") == 1


def test_the_reason_of_a_user_error_is_its_message():
    assert explain_import_error(UserError("it says\nwhat is wrong")) == "it says what is wrong"


def test_a_missing_module_named_by_the_user_has_no_source_line():
    with pytest.raises(UserError) as refused:
        load(["plain_sgdd"])
    assert str(refused.value) == "plugins=[plain_sgdd]: there is no module plain_sgdd"


def test_a_module_inside_its_package_directory_is_suggested(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "toyexp-pairs").mkdir()
    (tmp_path / "toyexp-pairs/toyexp_pairs.py").write_text("")
    with pytest.raises(UserError) as refused:
        load(["toyexp_pairs"])
    assert str(refused.value) == (
        "plugins=[toyexp_pairs]: there is no module toyexp_pairs here, but toyexp-pairs/toyexp_pairs.py exists; type: "
        "cd toyexp-pairs, or pip install -e toyexp-pairs"
    )


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_collection_is_as_before_after_a_pause_also_after_an_error(enabled):
    was_enabled = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(ZeroDivisionError), pause_collection():
            assert not gc.isenabled()
            raise ZeroDivisionError
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()
