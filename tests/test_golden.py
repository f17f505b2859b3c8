"""Compare runs with recorded numbers, to detect unintended changes of results."""

import json
from pathlib import Path

import numpy as np
import pytest
from golden import BOOK, CASES, ENGINES, RECORD, machine_digest, measure_case

GOLDEN = json.loads(RECORD.read_text())


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", CASES)
def test_a_run_reproduces_its_recorded_numbers(case, engine, tmp_path, monkeypatch):
    """Bit-identical on the machine that recorded the numbers; within rounding elsewhere or with another torch."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TOYEXP_CACHE", str(tmp_path / "cache"))
    Path("book.txt").write_text(BOOK)
    actual, recorded = json.loads(json.dumps(measure_case(case, engine))), GOLDEN["runs"][f"{case}, {engine}"]
    if GOLDEN["machine"] == machine_digest():
        assert actual == recorded
    else:
        for name in ("losses", "held_out"):
            np.testing.assert_allclose(actual.get(name, 0), recorded.get(name, 0), rtol=1e-4)
