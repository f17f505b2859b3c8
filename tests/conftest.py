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
    """What is imported and collected stays to the end: no collection of garbage need go through it again.

    A process of tests chooses more names than a user's, again and again: all of their compositions are kept.
    """
    from toyexp.config import compose_cache

    compose_cache.CACHE_SIZE = 1000
    gc.freeze()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol():
    """Take the directory of a test's local plugins off the path again: every later test would search it."""
    before = {*sys.path}
    result = yield
    sys.path[:] = [place for place in sys.path if place in before]
    return result


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Keep the tests of a file in one process, which makes what they share once, and so all that ask llama.cpp.

    Several servers of llama.cpp at a time get in one another's way.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file = nodeid.partition("::")[0]
            return "judge" if "judge/" in file else file

    return ByFile(config, log)
