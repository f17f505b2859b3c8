"""Settings of the whole test suite."""

import gc
import os
import sys

import pytest

# Tests share two cores with whatever else runs: a waiting thread that spins costs the others their time, up to a
# factor of ten. Read by OpenMP when the first library that uses it loads.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "0")
# What tests compute outside of an engine is small: on several threads it takes longer. Engines set their own number.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_configure():
    """What tests import and start is compiled once, also where Python is told to keep no bytecode.

    It is kept where Python keeps it: in a place of its own (PYTHONPYCACHEPREFIX) torch would be compiled once more.
    """
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.fsync = os.fstat  # a killed process loses nothing that it wrote; a descriptor that is closed still raises
    gc.set_threshold(20_000, 20, 20)  # configurations are many small objects: the default takes a tenth of the time


def pytest_collection_finish():
    """What is imported and collected stays to the end: no collection of garbage need go through it again."""
    gc.freeze()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol():
    """Take the directory of a test's local plugins off the path again: every later test would search it."""
    before = {*sys.path}
    result = yield
    sys.path[:] = [place for place in sys.path if place in before]
    return result


def pytest_collection_modifyitems(items):
    """Under xdist the tests that ask llama.cpp share a process: several servers at a time get in one another's way."""
    for item in items:
        if item.get_closest_marker("judge"):
            item.add_marker(pytest.mark.xdist_group("judge"))
