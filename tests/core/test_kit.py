"""The conformance kit as a plugin's author meets it, in a pytest of its own."""

pytest_plugins = "pytester"

AUTHORS = """
import os
from toyexp import Unavailable, UserError
from toyexp.testing import EngineNumbers, EngineSuite, NullEngine

def test_collecting_settles_nothing():
    assert "TOYEXP_SETTLED" not in os.environ

class Absent(NullEngine):
    def check(self):
        raise Unavailable("no quantum device here; plug one in")

class Odd(NullEngine):
    def check(self):
        os.environ["TOYEXP_SETTLED"] = "1"
        raise UserError("engine.tf32=true: told otherwise")

class TestAbsent(EngineSuite):
    engine = Absent()

class TestOdd(EngineNumbers):
    engine = Odd()
"""


def test_a_device_that_is_not_here_is_one_skip_and_a_wrong_setting_is_told_where_it_runs(pytester, monkeypatch):
    pytester.makepyfile(AUTHORS)
    monkeypatch.setenv("TOYEXP_SETTLED", "")  # so that it is put back
    monkeypatch.delenv("TOYEXP_SETTLED")
    done = pytester.inline_run("-k", "Absent or collecting or (Odd and explained)")
    passed, skipped, failed = done.listoutcomes()
    assert [report.nodeid.split("::")[-1] for report in passed] == ["test_collecting_settles_nothing"]
    assert [report.nodeid.split("::")[-1] for report in skipped] == ["TestAbsent"]
    assert "no quantum device here; plug one in" in str(skipped[0].longrepr)
    assert ["told otherwise" in str(report.longrepr) for report in failed] == [True]
