"""The conformance kit as a plugin's author meets it, in a pytest of its own."""

import re

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


def test_a_missing_device_is_one_skipped_test_and_a_wrong_setting_fails_where_it_is_used(pytester, monkeypatch):
    pytester.makepyfile(AUTHORS)
    monkeypatch.setenv("TOYEXP_SETTLED", "")  # so that it is put back
    monkeypatch.delenv("TOYEXP_SETTLED")
    done = pytester.inline_run("-k", "Absent or collecting or (Odd and explained)")
    passed, skipped, failed = done.listoutcomes()
    assert [report.nodeid.split("::")[-1] for report in passed] == ["test_collecting_settles_nothing"]
    assert [report.nodeid.split("::")[-1] for report in skipped] == ["TestAbsent"]
    assert "no quantum device here; plug one in" in str(skipped[0].longrepr)
    assert ["told otherwise" in str(report.longrepr) for report in failed] == [True]


WITHOUT_ITS_ENGINE = """
from toyexp import Unavailable
from toyexp.testing import NullEngine, OptimiserSuite
from toyexp_optimisers.sgd import SGD

class Absent(NullEngine):
    def realize(self, plan):
        raise Unavailable("no quantum device here; plug one in")

class TestSGD(OptimiserSuite):
    optimiser, engine = SGD(), Absent()
"""


def test_without_its_engine_an_optimiser_is_tested_as_far_as_possible(pytester):
    pytester.makepyfile(WITHOUT_ITS_ENGINE)
    passed, skipped, failed = pytester.inline_run().listoutcomes()
    assert (len(passed), len(failed)) == (6, 0)
    assert len(skipped) == 3 and all("no quantum device here" in str(report.longrepr) for report in skipped)


SUITES = """
import pytest
from toyexp import Callback, hookimpl
from toyexp.testing import CallbackSuite, EngineNumbers, NullEngine, OptimiserSuite
from toyexp_optimisers.sgd import SGD

class TestForgotten(OptimiserSuite):
    optimiser = SGD()

class TestNoEngine(EngineNumbers):
    pass

class TestNoCallback(CallbackSuite):
    pass

class Given(EngineNumbers):
    def test_it_has_one(self):
        assert isinstance(self.engine, NullEngine)

class TestByAProperty(Given):
    @property
    def engine(self):
        return NullEngine()

class TestByAFixture(Given):
    @pytest.fixture(autouse=True)
    def later(self):
        self.engine = NullEngine()

class TestByABrokenProperty(OptimiserSuite):
    @property
    def optimiser(self):
        return self.optimizer

class Unlike(SGD):
    def numbers(self, step, lr, weight_decay):
        return {**super().numbers(step, lr, weight_decay), **({"late": 1.0} if step else {})}

class TestUnlike(OptimiserSuite):
    optimiser = Unlike()

class GoesByEvals(Callback):
    name = "goes_by_evals"

    @hookimpl
    def on_eval(self, metrics):
        self.loss = metrics["loss"]

    @hookimpl
    def stop_reason(self, step):
        return "enough" if self.loss < 0 else None

class TestGoesByEvals(CallbackSuite):
    callback = GoesByEvals
"""


def test_a_failing_test_shows_the_missing_setting_and_its_values(pytester):
    pytester.makepyfile(SUITES)
    chosen = "engine_computes or has_one or same_names or (evaluations and NoCallback)"
    chosen += " or (explained and (NoEngine or Broken))"
    done = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-rA", "-k", chosen)
    shown = done.stdout.str()
    for suite, missing in [
        ("TestForgotten", "engine` (Engine)"), ("TestNoEngine", "engine` (Engine)"), ("TestNoCallback", "callback`"),
    ]:  # fmt: skip
        assert f"{suite}: set `{missing}" in shown
    assert re.findall(r"PASSED \S+::(TestBy\w+)", shown) == ["TestByAProperty", "TestByAFixture"]
    assert {*re.findall("AttributeError: (.*)", shown)} == {
        "'TestByABrokenProperty' object has no attribute 'optimizer'"
    }
    assert "Left contains one more item: 'late'" in shown


def test_a_callback_that_waits_for_an_eval_fails_the_kit(pytester):
    pytester.makepyfile(SUITES)
    done = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-k", "GoesByEvals and without_evaluations")
    assert "'GoesByEvals' object has no attribute 'loss'" in done.stdout.str()
