"""The documentation's table of objectives: each on three engines and four families, against torch in float64.

`make objectives` runs all of it and writes the table; the default suite covers `llama` and `mlp`.
"""

import pytest
from objectives import CELLS, ENGINES, FIRST, first_step, make_case, measure


def marks(family):
    return [] if family in ("llama", "mlp") else [pytest.mark.full]


@pytest.mark.parametrize(("objective", "engine", "family"), [pytest.param(*c, marks=marks(c[2])) for c in CELLS])
def test_loss_and_gradients_of_a_step_are_those_of_torch_in_float64(
    objective, engine, family, tmp_path, record_property
):
    loss, gradient = measure(make_case(objective, family, tmp_path), ENGINES[engine])
    assert loss <= 1e-6 and gradient <= 1e-4
    record_property("cell", ((objective, engine, family), (loss, gradient)))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", FIRST)
def test_the_first_loss_against_the_model_itself_is_known(kind, engine, record_property):
    loss, margin = first_step(kind, ENGINES[engine])
    assert loss == pytest.approx(FIRST[kind], rel=1e-5) and margin == pytest.approx(0, abs=1e-5)
    record_property("first", ((kind, engine), (loss, margin)))
