"""toyexp runs from any directory, installed from a wheel or as an editable clone."""

import shutil
import subprocess
import sys
from pathlib import Path

import environments
import pytest

from toyexp.cli.main import main

pytestmark = pytest.mark.release
ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """Copy the source into a directory named `toyexp`, as `git clone` does."""
    source = tmp_path_factory.mktemp("parent") / "toyexp"
    files = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    for name in files.stdout.splitlines() or [str(p.relative_to(ROOT)) for p in ROOT.rglob("*") if p.is_file()]:
        if (ROOT / name).is_file() and not name.startswith((".venv", "outputs")):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    return source


@pytest.fixture(scope="module")
def wheel(clone, tmp_path_factory):
    """Build the wheel; return its path and the output of the build."""
    root = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(root), str(clone)]
    done = subprocess.run(build, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return next(root.glob("toyexp-*.whl")), done.stdout + done.stderr


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
    """Return the python of an environment with the wheel installed."""
    return environments.make_environment(tmp_path_factory.mktemp("wheel_env"), install=wheel[0])


@pytest.fixture(scope="module")
def editable(clone, tmp_path_factory):
    """Return the python of an environment with the clone installed as editable."""
    return environments.make_environment(tmp_path_factory.mktemp("editable_env"), install=clone, editable=True)


def site_packages(python):
    (site,) = (python.parent.parent / "lib").glob("python*/site-packages")
    return site


def test_building_the_wheel_gives_no_warning(wheel):
    assert "arning" not in wheel[1] and "would be ignored" not in wheel[1]


def test_the_installed_copy_runs_and_conf_is_not_a_package(python, tmp_path):
    done = environments.run(python, "-c", "import toyexp, toyexp_torch; print(toyexp.__file__)", cwd=tmp_path)
    assert Path(done.stdout.strip()).is_relative_to(site_packages(python)), done.stderr
    assert not {"conf", "plugins", "tests"} & {p.name for p in site_packages(python).iterdir()}


def test_help_and_a_short_run_work_from_another_directory(python, tmp_path):
    command = python.parent / "toyexp"
    help_text = environments.run(command, "--help", cwd=tmp_path)
    assert "smollm2_135m" in help_text.stdout, help_text.stderr
    assert "class MyRecipe(Recipe)" in environments.run(command, "help", "plugins/recipe", cwd=tmp_path).stdout
    new = environments.run(command, "new", "recipe", "mine", "--into", tmp_path / "begun", cwd=tmp_path)
    assert (tmp_path / "begun" / "toyexp-mine" / "toyexp_mine.py").is_file(), new.stderr
    shutil.rmtree(tmp_path / "begun")
    done = environments.run(command, "recipe=warm", "experiment=smoke", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.glob("outputs/smoke/*/model.gguf"))) == 1
    assert list(tmp_path.iterdir()) == [tmp_path / "outputs"]


API_SCRIPT = """
import toyexp
result = toyexp.run("experiment=smoke", "recipe=warm", steps=2, engine="ggml", quiet=True, directory="here")
swept = toyexp.sweep("experiment=smoke", seed=[0, 1], steps=1, engine="ggml", quiet=True, callbacks=["events"])
objects = toyexp.train(data="random", engine="ggml", steps=1, eval_every=0, quiet=True)
print(result.state, len(swept), objects.state, toyexp.open("here").logits("def", engine="ggml").shape[1])
"""


def test_the_python_api_runs_sweeps_and_trains_in_an_empty_directory(python, tmp_path):
    done = environments.run(python, "-W", "error", "-c", API_SCRIPT, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout == "completed 2 completed 1024\n"


@pytest.mark.parametrize("where", ["beside the clone", "inside the clone", "elsewhere"])
def test_an_editable_install_is_importable_from_every_directory(editable, clone, where):
    # To Python, a directory named toyexp in the working directory is a namespace package.
    cwd = {"beside the clone": clone.parent, "inside the clone": clone, "elsewhere": "/"}[where]
    done = environments.run(editable, "-m", "toyexp", "--version", cwd=cwd)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("toyexp "), done.stderr


def test_an_editable_install_runs_the_files_of_the_clone_with_all_its_plugins(editable, clone):
    code = "import toyexp, toyexp_torch; print(toyexp.__file__, toyexp_torch.__file__)"
    files = environments.run(editable, "-c", code, cwd=clone.parent).stdout.split()
    assert files == [str(clone / "toyexp/__init__.py"), str(clone / "plugins/toyexp_torch/__init__.py")]
    plugins = environments.run(editable.parent / "toyexp", "plugins", cwd=clone.parent)
    for name in ("cpu", "ggml", "llama", "warm", "stdlib", "gguf_export"):
        assert f"\n  {name} " in plugins.stdout, plugins.stderr
    assert "\nbroken" not in plugins.stdout


LAZY_PLUGIN = """
from dataclasses import dataclass
from toyexp import Callback, hookimpl

@dataclass(eq=False)
class Lazy(Callback):
    '''Imports a module of its directory when a run starts.'''
    name = "lazy"
    @hookimpl
    def on_start(self):
        import beside_it
        print(beside_it.WORD)

@hookimpl
def register_callbacks(register):
    register(Lazy)
"""


def test_files_in_the_working_directory_do_not_shadow_libraries_but_local_plugins_can_import_them(tmp_path):
    (tmp_path / "lazy_plugin.py").write_text(LAZY_PLUGIN)
    (tmp_path / "beside_it.py").write_text("WORD = 'found it'")
    for name in ("torch", "ggml", "random", "yaml", "numpy", "hydra", "rich", "json"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('the wrong {name}')")
    for name in ("conf", "plugins", "toyexp"):
        (tmp_path / name).mkdir()
    (tmp_path / "conf" / "config.yaml").write_text("steps: 7")
    words = ["plugins=[lazy_plugin]", "experiment=smoke", "engine=ggml", "steps=1", "callbacks=[lazy]"]
    done = environments.run(sys.executable, "-m", "toyexp", *words, "hydra.run.dir=run", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "found it" in done.stdout and "completed after 1 step in" in done.stdout


# Remove what Python lacks on Windows, after importing the libraries that use it on Linux.
WITHOUT_POSIX = """
import asyncio, multiprocessing.connection, os, shutil, signal, socket, subprocess, sys, tempfile, types
sys.modules |= dict.fromkeys(("fcntl", "resource", "termios", "tty", "pwd", "grp"))
sys.modules["msvcrt"] = types.SimpleNamespace(LK_NBLCK=2, locking=lambda file, mode, count: print("locked", count))
for name in ("fork getuid geteuid getpgid setsid killpg sched_getaffinity sysconf pread O_NOFOLLOW O_DIRECTORY "
             "O_NONBLOCK O_CLOEXEC").split():
    delattr(os, name)
for name in ("SIGHUP SIGUSR1 SIGUSR2 SIGQUIT SIGKILL SIGALRM SIGVTALRM pthread_kill pthread_sigmask setitimer").split():
    delattr(signal, name)
shutil._use_fd_functions = False
from toyexp.cli.main import main
"""


@pytest.mark.parametrize("engine", ["ggml", pytest.param("cpu", marks=pytest.mark.full)])  # loading torch takes seconds
def test_runs_and_commands_work_without_the_modules_that_windows_lacks(engine, tmp_path):
    (tmp_path / "book.txt").write_text("To be, or not to be, that is the question. " * 100)
    run = ["data=text", "data.path=book.txt", "model.n_layers=1", "model.d_model=16", "model.d_ff=16", "steps=2",
           "model.context=16", "batch_size=2", "checkpoint_every=2",
           f"engine={engine}", "hydra.run.dir=run"]  # fmt: skip
    lines = [["--help"], run, ["resume=run", "steps=3"]]
    lines += [["eval", "run"], ["runs", "run"], ["doctor"]] if engine == "cpu" else []
    code = f"{WITHOUT_POSIX}\nfor words in {lines}:\n    assert main(words) == 0, words"
    done = environments.run(sys.executable, "-c", code, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "completed after 3 steps" in done.stdout and "locked 1" in done.stdout


def test_a_sweep_with_processes_is_rejected_without_fork(monkeypatch, capsys):
    monkeypatch.delattr("os.fork")
    assert main(["-m", "seed=0,1", "hydra.sweep.dir=nowhere"]) == 2
    assert "sweep.isolate=false" in capsys.readouterr().err
