"""Test every cell of the documentation's table of GGUF files against llama.cpp and write the table: `make table`."""

import sys
from pathlib import Path

import pytest
from cells import CELLS, PAGE, replace_table, table

TESTS = Path(__file__).parents[1] / "judge" / "test_table.py"


class Figures:
    """pytest plugin that collects the errors (loss, log-probability) of each cell whose tests passed."""

    def __init__(self):
        self.errors = {}

    def pytest_runtest_logreport(self, report):
        for name, value in report.user_properties if report.when == "call" and report.passed else ():
            if name == "cell":
                self.errors[value[:3]] = value[3:]


def main():
    figures = Figures()
    pytest.main(["-q", "-m", "full or not full", str(TESTS)], plugins=[figures])
    missing = [f"{' '.join(cell)}" for cell in CELLS if cell not in figures.errors]
    if missing:
        return (
            f"the table stays as it was: {len(missing)} of {len(CELLS)} cells did not pass, {missing[0]} for one "
            "(exports in K-quants take llama-quantize on the PATH, or pip install llama-cpp-python)"
        )
    PAGE.write_text(replace_table(PAGE.read_text(), table(figures.errors)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
