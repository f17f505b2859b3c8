"""Settings of the whole test suite."""

import gc
import os
import sys

import pytest

os.environ["NO_COLOR"] = "1"  # tests compare plain text
# Tests share two cores with other processes: threads that spin while waiting slow the others down up to ten times.
# OpenMP reads this when the first library that uses it loads.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "0")
# Computations outside of engines are small and slower on several threads. Engines set their own number of threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_configure():
    """Enable the bytecode cache, also with PYTHONDONTWRITEBYTECODE, so that child processes start faster.

    The cache stays in its usual directory: with another PYTHONPYCACHEPREFIX, torch would be compiled again.
    """
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.fsync = os.fstat  # fsync only matters in a power cut; fstat still raises for a closed descriptor
    gc.set_threshold(
        20_000, 20, 20
    )  # the default spends a tenth of the time on the many small objects of configurations


def pytest_collection_finish():
    """Exclude imported modules and collected tests from garbage collection, and enlarge the compose cache.

    Tests compose many more configurations than a user's process, and repeat them.
    """
    from toyexp.config import compose_cache

    compose_cache.CACHE_SIZE = 1000
    gc.freeze()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol():
    """Remove the directories that a test added to sys.path; later tests would search them."""
    before = {*sys.path}
    result = yield
    sys.path[:] = [entry for entry in sys.path if entry in before]
    return result


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Run the tests of a file in one process, so that they share fixtures, and all tests of judge/ in one process.

    Several llama.cpp servers at a time would disturb each other.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file = nodeid.partition("::")[0]
            return "judge" if "judge/" in file else file

    return ByFile(config, log)
