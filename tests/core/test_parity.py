"""Parity: differences against values computed by hand, and its tolerances."""

import json
import math

import numpy as np
import pytest

from toyexp.cli.main import main
from toyexp.cli.parity import Measured, loss_difference, tensor_differences


def measure_arrays(start, gradients, weights, losses=(1.0,)):
    def arrays(values):
        return {name: np.array(value, np.float32) for name, value in values.items()}

    return Measured(arrays(start), arrays(gradients), list(losses), arrays(weights))


def differences(ours, theirs):
    return {t.name: t for t in tensor_differences(ours, theirs)}


def test_differences_match_values_computed_by_hand():
    reference = measure_arrays({"w": [1, 1]}, {"w": [3, 4]}, {"w": [1, 3]})
    other = measure_arrays({"w": [1, 1]}, {"w": [3, 5]}, {"w": [1.5, 3]})
    difference = differences(other, reference)["w"]
    assert difference.gradient == pytest.approx(1 / 5)
    assert difference.cosine == pytest.approx((3 * 3 + 4 * 5) / (5 * math.sqrt(34)))
    assert difference.weights == pytest.approx(0.5 / 2)  # 0.5 apart, where the reference moved by 2
    assert difference.of_norm == pytest.approx(0.5 / math.sqrt(10))


def test_losses_have_absolute_and_relative_differences():
    difference = loss_difference([4.0, 2.5, 1.0], [4.0, 2.0, 0.8])
    assert difference.largest == pytest.approx(0.5)
    assert difference.mean == pytest.approx(0.7 / 3)
    assert difference.largest_relative == pytest.approx(0.25)
    assert difference.mean_relative == pytest.approx(0.5 / 3)


def test_gradients_that_are_zero_on_one_engine_only_differ():
    zero, nonzero = {"w": [0, 0], "v": [1, 1]}, {"w": [0, 1], "v": [1, 1]}
    both = differences(measure_arrays(zero, zero, zero), measure_arrays(zero, zero, zero))["w"]
    assert (both.gradient, both.cosine, both.weights, both.of_norm) == (0, 1, 0, 0)
    first = differences(measure_arrays(zero, nonzero, zero), measure_arrays(zero, zero, zero))["w"]
    assert first.gradient > 1e5
    assert first.cosine == 0


def test_a_tensor_moved_only_by_rounding_does_not_count():
    """Like the key bias without RoPE: its gradient is rounding noise, which AdamW still turns into steps."""
    start = {"w": [0] * 4, "bias": [0] * 4}
    reference = measure_arrays(start, {"w": [1] * 4, "bias": [1e-8] * 4}, {"w": [0.1] * 4, "bias": [0.05] * 4})
    other = measure_arrays(start, {"w": [1] * 4, "bias": [-1e-8] * 4}, {"w": [0.1] * 4, "bias": [-0.05] * 4})
    bias = differences(other, reference)["bias"]
    assert bias.gradient == pytest.approx(2e-8, rel=1e-3)
    assert bias.weights == 0
    for gradient in (0, 1e-6):  # none at all (a LoRA's A before its first step), and a small one that is real
        reference = measure_arrays(start, {"w": [1] * 4, "bias": [gradient] * 4}, {"w": [0.1] * 4, "bias": [0.05] * 4})
        other = measure_arrays(start, {"w": [1] * 4, "bias": [gradient] * 4}, {"w": [0.1] * 4, "bias": [-0.05] * 4})
        assert differences(other, reference)["bias"].weights == pytest.approx(0.1 / 0.0790569, rel=1e-3)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_is_infinitely_far(bad):
    fine = {"w": [1, 1], "v": [1, 1]}
    broken = {"w": [1, bad], "v": [1, 1]}
    for ours, theirs in ((broken, fine), (fine, broken), (broken, broken)):
        difference = differences(measure_arrays(fine, ours, ours), measure_arrays(fine, theirs, theirs))
        assert (difference["w"].gradient, difference["w"].weights) == (math.inf, math.inf)
        assert difference["v"].gradient == difference["v"].weights == 0
    assert loss_difference([1, bad], [1, bad]).largest == math.inf


# -- the command, with an engine that computes nothing ----------------------------------------------------------------

LINE = ["parity", "plugins=[toyexp.testing.null]", "data=text", "data.path=book.txt", "data.tokenizer=byte"]


@pytest.fixture(autouse=True)
def change_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TOYEXP_CACHE", str(tmp_path / "cache"))
    (tmp_path / "book.txt").write_text("It was a bright cold day in April. " * 200)


def test_equal_engines_are_within_zero_and_nothing_is_written(tmp_path, capsys):
    engines = "engine=noop,noop:nan_at=99"
    assert main([*LINE, engines, "--loss", "0", "--gradient=0", "--weights=0", "--all"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == "within the tolerances, 20 steps"
    assert "21 of 21 tensors" in out
    assert {p.name for p in tmp_path.iterdir()} <= {"book.txt", "cache"}


def test_a_nan_loss_exceeds_the_tolerance_and_the_json_is_valid(capsys):
    assert main([*LINE, "engine=noop,noop:nan_at=3", "steps=4", "--json"]) == 1
    out, err = capsys.readouterr()
    report = json.loads(out, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert err == ""
    assert report["within"] is False
    (engine,) = report["engines"]
    assert engine["losses"][2] is None and None not in report["losses"]
    assert engine["loss"]["largest"] is None
    assert [line.partition(":")[0] for line in engine["exceeded"]] == ["loss"]
    assert main([*LINE, "engine=noop:nan_at=3,noop", "steps=4"]) == 1
    assert "noop exceeds the tolerance of the loss: at one step it differs by inf" in capsys.readouterr().out


def test_help_names_every_option_and_the_tolerances(capsys):
    assert main(["parity", "--help"]) == 0
    out = capsys.readouterr().out
    for words in ("--loss 1e-3", "--gradient 1e-3", "--weights 1e-3", "--all", "--json", "steps=20"):
        assert words in out
    rows = [line.split() for line in out.splitlines()]
    assert ["float32", "0.001", "0.0001", "0.005"] in rows and ["float16", "0.001", "0.005", "0.2"] in rows


ROUNDING = """
from dataclasses import dataclass

from toyexp import hookimpl
from toyexp.testing import NullEngine


@dataclass
class Rounding(NullEngine):
    '''Computes nothing, and says that it rounds.'''

    name = "rounding"
    to: str = "float32"

    def product_dtype(self):
        return self.to


@hookimpl
def register_engines(register):
    register(Rounding)
"""


def test_the_tolerance_is_that_of_the_less_precise_engine(tmp_path, capsys):
    """The tolerances are those of the report unless given."""
    (tmp_path / "rounding_engine.py").write_text(ROUNDING)
    line = [LINE[0], "plugins=[rounding_engine]", *LINE[2:], "steps=1"]
    engines = "engine=rounding:to=float16,rounding:to=bfloat16,rounding"
    assert main([*line, engines, "--json", "--loss=7"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [e["rounds_to"] for e in report["engines"]] == ["bfloat16", "float16"]
    assert [e["tolerances"]["gradient"] for e in report["engines"]] == [5e-2, 5e-3]
    assert [e["tolerances"]["loss"] for e in report["engines"]] == [7, 7]
    assert main([*line, engines]) == 0
    rows = [row.split() for row in capsys.readouterr().out.splitlines() if row.startswith("tolerance, ")]
    assert rows == [
        ["tolerance,", "bfloat16", "2.0e-03", "5.0e-02", "5.0e-01"],
        ["tolerance,", "float16", "1.0e-03", "5.0e-03", "2.0e-01"],
    ]
    assert main([*line, "engine=rounding,rounding:to=float8"]) == 2
    assert "engine=rounding: product_dtype() is 'float8'; did you mean" in capsys.readouterr().err
