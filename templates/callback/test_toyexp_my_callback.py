"""Run the conformance suite, and test when the callback ends a run."""

from types import SimpleNamespace

import pytest
from toyexp_my_callback import MyCallback

from toyexp.testing import CallbackSuite


class TestMyCallback(CallbackSuite):
    callback = MyCallback


@pytest.mark.parametrize(("held_out", "ends"), [(2.9, False), (3.1, True)])
def test_it_ends_a_run_whose_held_out_loss_is_above_the_gap(held_out, ends):
    callback, gaps = MyCallback(gap=1.0), []
    run = SimpleNamespace(emit=lambda kind, **fields: gaps.append(fields["gap"]))
    for _ in range(3):
        callback.on_step({"loss": 2.0})
    callback.on_eval(run, 3, {"loss": held_out})
    assert gaps == [pytest.approx(held_out - 2.0)]
    assert (callback.stop_reason() is not None) is ends
