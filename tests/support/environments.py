"""Create virtual environments within a second: they see the packages of the environment that runs the tests."""

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path


def make_environment(root, install, editable=False):
    """Create an environment in `root`, install `install` (a wheel or a project) and return its python."""
    venv.create(root, with_pip=False, symlinks=True)
    python = root / "bin" / "python"
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").stdout.strip()
    (Path(site) / "parent.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    options = ["--no-index", "--no-deps", "--no-build-isolation", "--ignore-installed"]
    subprocess.run([*pip, *options, *(["--editable"] if editable else []), str(install)], check=True)
    return python


def run(program, *words, cwd=None):
    """Run a program with these arguments and return the result; any exit code is accepted."""
    environment = {
        **{k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        "COLUMNS": "160",
        "OMP_WAIT_POLICY": "passive",
    }
    return subprocess.run([str(program), *map(str, words)], capture_output=True, text=True, cwd=cwd, env=environment)
