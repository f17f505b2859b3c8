"""The wheel: installed somewhere else it runs from any directory, with conf/ inside the package."""

import subprocess
import sys
from pathlib import Path

import environments
import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    root = tmp_path_factory.mktemp("wheel")
    source = root / "source"
    files = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    for name in files.stdout.splitlines() or [str(p.relative_to(ROOT)) for p in ROOT.rglob("*") if p.is_file()]:
        if (ROOT / name).is_file() and not name.startswith((".venv", "outputs")):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(root), str(source)]
    done = subprocess.run(build, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return environments.make(root / "env", install=next(root.glob("toyexp-*.whl")))


def test_it_is_the_installed_copy_that_runs_and_conf_is_no_package(python, tmp_path):
    code = "import importlib.util as u, toyexp; print(toyexp.__file__, u.find_spec('conf'), u.find_spec('tests'))"
    where, *found = environments.run(python, "-c", code, cwd=tmp_path).stdout.split()
    assert Path(where).is_relative_to(python.parent.parent)
    assert found == ["None", "None"]


def test_help_and_a_short_run_work_from_another_directory(python, tmp_path):
    command = python.parent / "toyexp"
    listed = environments.run(command, "--help", cwd=tmp_path)
    assert "smollm2_135m" in listed.stdout, listed.stderr
    done = environments.run(command, "recipe=warm", "experiment=smoke", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.glob("outputs/smoke/*/model.gguf"))) == 1
    assert list(tmp_path.iterdir()) == [tmp_path / "outputs"]
