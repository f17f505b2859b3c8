"""Settings of the whole test suite."""

import gc
import os
import shutil
import sys
import tempfile

import pytest

# Tests share two cores with whatever else runs: a waiting thread that spins costs the others their time, up to a
# factor of ten. Read by OpenMP when the first library that uses it loads.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "0")


def pytest_configure(config):
    """What tests start finds toyexp compiled, as anywhere else, also where Python is told to keep no bytecode."""
    if sys.dont_write_bytecode:
        kept = tempfile.mkdtemp(prefix="toyexp-bytecode-")
        config.add_cleanup(lambda: shutil.rmtree(kept, ignore_errors=True))
        os.environ["PYTHONPYCACHEPREFIX"] = kept
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def pytest_collection_finish():
    """What is imported and collected stays to the end: no collection of garbage need go through it again."""
    gc.freeze()


def pytest_collection_modifyitems(items):
    """Under xdist the tests that ask llama.cpp share a process: several servers at a time get in one another's way."""
    for item in items:
        if item.get_closest_marker("judge"):
            item.add_marker(pytest.mark.xdist_group("judge"))
