"""Recorded numbers: what was computed before a change of the code is computed after it."""

import json
from pathlib import Path

import numpy as np
import pytest
from golden import BOOK, CASES, ENGINES, RECORD, machine_digest, measure_case

GOLDEN = json.loads(RECORD.read_text())


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", CASES)
def test_a_recorded_run_computes_what_it_did(case, engine, tmp_path, monkeypatch):
    """To the bit on the machine that recorded them; on another, and with another torch, within rounding."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TOYEXP_CACHE", str(tmp_path / "cache"))
    Path("book.txt").write_text(BOOK)
    found, wanted = json.loads(json.dumps(measure_case(case, engine))), GOLDEN["runs"][f"{case}, {engine}"]
    if GOLDEN["machine"] == machine_digest():
        assert found == wanted
    else:
        for name in ("losses", "held_out"):
            np.testing.assert_allclose(found.get(name, 0), wanted.get(name, 0), rtol=1e-4)
