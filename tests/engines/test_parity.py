"""`toyexp parity` between real engines: correct ones agree, and each kind of mistake is found and named."""

import itertools
import json
import math
import re
import sys

import pytest
from drawings import svg_texts

from toyexp.cli.main import main
from toyexp.cli.parity_plot import sheet

TINY = ["data=text", "data.path=book.txt", "data.tokenizer=byte", "model.d_model=32", "model.context=16",
        "engine.threads=1", "lr=1e-3"]  # fmt: skip

WRONG = '''
from dataclasses import dataclass
from typing import ClassVar

from toyexp import hookimpl
from toyexp_ggml.engines import GGMLCPU
from toyexp_ggml.session import GGMLSession

TENSOR = "blk.1.ffn_up.weight"


@dataclass
class Wrong(GGMLCPU):
    """ggml with an error."""

    name: ClassVar[str] = "wrong"
    mistake: str = ""  # the kind of error

    def realize(self, plan):
        how = self.device, self.profile, self.thread_count(), self.recompute
        return WrongSession(self.mistake, plan, *how).open()


class WrongSession(GGMLSession):
    def __init__(self, mistake, *how):
        self.mistake = mistake
        super().__init__(*how)

    def do_upload(self, tensor, array):
        super().do_upload(tensor, array * (1.001 if (self.mistake, tensor.name) == ("start", TENSOR) else 1))

    def do_gradients(self, micros):
        gradients = super().do_gradients(micros)
        if self.mistake == "gradient":
            gradients[TENSOR] = gradients[TENSOR] * 1.001
        return gradients

    def do_step(self, micros, numbers):
        numbers = [hp.copy() for hp in numbers]
        numbers[0][0] *= 1.05 if self.mistake == "rate" else 1
        numbers[0][4] += 0.1 if self.mistake == "decay" else 0
        return super().do_step(micros, numbers)


@hookimpl
def register_engines(register):
    register(Wrong)
'''


@pytest.fixture(autouse=True)
def _enter_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TOYEXP_CACHE", str(tmp_path / "cache"))
    (tmp_path / "book.txt").write_text("It was a bright cold day in April, and the clocks were striking. " * 200)
    (tmp_path / "wrong_engine.py").write_text(WRONG)


def run_parity(capsys, *words):
    code = main(["parity", *TINY, *words])
    return code, capsys.readouterr()


@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_the_engines_agree_and_have_the_losses_of_a_run(model, tmp_path, capsys):
    code, (out, err) = run_parity(capsys, f"model={model}", "engine=cpu,ggml,metal:emulate=true", "--json")
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert report["within"] is True
    assert [e["engine"] for e in report["engines"]] == ["ggml", "metal:emulate=true"]
    for engine in report["engines"]:
        assert engine["exceeded"] == []
        assert len(engine["losses"]) == 20
        assert engine["loss"]["largest"] < 1e-4
        assert max(t["gradient"] for t in engine["tensors"]) < 1e-5
        assert min(t["cosine"] for t in engine["tensors"]) > 1 - 1e-9
        assert 0 < max(t["weights"] for t in engine["tensors"]) < 1e-2
    run = [*TINY, f"model={model}", "engine=cpu", "steps=20", "callbacks=[cosine,events]", "hydra.run.dir=run"]
    assert main(run) == 0
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert report["losses"] == [e["loss"] for e in events if e["kind"] == "step"]


def test_each_column_of_differences_has_a_name_of_its_own(capsys, monkeypatch):
    words = ["engine=ggml,metal:emulate=true", "steps=2"]
    code, (out, _) = run_parity(capsys, *words, "--json")
    loss = json.loads(out)["engines"][0]["loss"]
    out = run_parity(capsys, *words)[1].out
    assert code == 0
    head, row = next(pair for pair in itertools.pairwise(out.splitlines()) if pair[0].startswith("against ggml"))
    heads = re.split(r" {2,}", head)
    assert len(heads) == len(set(heads)) == 8, "no two columns have the same name"
    cells = dict(zip(heads, row.split(), strict=True))
    named = {"loss, largest": "largest", "loss, mean": "mean", "relative": "largest_relative",
             "relative, mean": "mean_relative"}  # fmt: skip
    assert {name: cells[name] for name in named} == {name: f"{loss[key]:.1e}" for name, key in named.items()}
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    out = run_parity(capsys, *words)[1].out
    assert "columns left out to fit the terminal: of norm, relative, mean" in out


def test_the_plot_shows_losses_differences_and_gradient_errors_with_their_tolerances(tmp_path, capsys):
    """One of the engines is wrong; --plot does not change the exit code."""
    engines = "engine=ggml,metal:emulate=true,wrong:mistake=gradient"
    words = ["steps=3", engines, "plugins=[wrong_engine]", "--gradient", "5e-4"]
    code, (out, err) = run_parity(capsys, *words, "--json", "--plot", "parity.svg")
    report = json.loads(out)
    assert (code, err) == (1, "")
    words = svg_texts(tmp_path / "parity.svg")
    assert "metal:emulate=true and wrong:mistake=gradient against ggml" in words
    for engine in (*report["engines"], {"engine": "ggml", "losses": report["losses"]}):
        assert f"{engine['engine']}, at the end {engine['losses'][-1]:.5g}" in words
    assert "tolerance of float32, 0.001" in words and "difference from ggml" in words
    names = {tensor["name"] for tensor in report["engines"][0]["tensors"]}
    tensor_labels = [word for word in words if word in names]
    assert {*tensor_labels} == names and tensor_labels[0] == "blk.1.ffn_up.weight", (
        "the tensor with the largest error is not first"
    )
    lines = sheet(report, "", []).panels[2].lines
    worst = next(t["gradient"] for t in report["engines"][1]["tensors"] if t["name"] == tensor_labels[0])
    assert lines[1].get_xdata()[0] == pytest.approx(worst) and lines[2].get_xdata()[0] == 5e-4 < worst
    for engine in report["engines"]:  # numbers may be missing, and tolerances 0
        engine["losses"][1:] = math.nan, math.inf
        engine["tolerances"] = dict.fromkeys(engine["tolerances"], 0.0)
        engine["tensors"][0]["gradient"] = math.inf
    figure = sheet(report, "", [])
    assert ">tolerance of float32, 0<" in figure.pictures(".svg")[".svg"].decode()
    left, right = ({axes.get_position().x0, axes.get_position().x1} for axes in figure.panels[:2])
    assert left == right, "losses and differences have one x axis"


def test_a_plot_that_cannot_be_written_is_rejected_before_computing(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("toyexp.cli.parity.compare", None)
    (tmp_path / "theirs.png").write_bytes(b"theirs")
    for words, message in (
        (["--plot", "a.txt"], "--plot a.txt: must end in .png, .svg, .pdf"),
        (["--plot", "theirs.png"], "theirs.png: exists"),
        (["--plot", "a.png", "experiment=parity_all"], "this one sweeps over recipe, model; leave it out"),
    ):
        code, (_, err) = run_parity(capsys, *words)
        assert code == 2 and message in err and err.count("\n") == 1, err
    assert (tmp_path / "theirs.png").read_bytes() == b"theirs"


def test_the_note_of_an_engine_is_printed_below_it(monkeypatch, capsys):
    monkeypatch.setattr("toyexp_ggml.engines.GGMLCPU.advice", lambda self: [f"about recompute={self.recompute}"])
    code, (out, _) = run_parity(capsys, "engine=ggml,ggml:recompute=true", "steps=1")
    lines = out.splitlines()
    for i, label in enumerate(("ggml: ", "ggml:recompute=true: ")):
        (line_number,) = [k for k, line in enumerate(lines) if line.startswith(f"engine  {label}")]
        assert (code, lines[line_number + 1]) == (0, f"note    about recompute={bool(i)}")


def test_warm_tensors_start_from_the_same_bytes(capsys):
    warm = ["recipe=warm", "data.tokenizer=auto", "steps=2"]
    code, (out, _) = run_parity(capsys, *warm, "engine=ggml,metal:emulate=true")
    assert code == 0
    assert out.splitlines()[-1] == "within the tolerances, 2 steps"


@pytest.mark.parametrize(
    ("mistake", "exceeded"),
    [("gradient", {"gradient"}), ("decay", {"weights"}), ("rate", {"loss", "weights"})],
)
def test_an_engine_with_an_error_exceeds_the_tolerances_that_it_affects(mistake, exceeded, capsys):
    code, (out, err) = run_parity(capsys, "plugins=[wrong_engine]", f"engine=ggml,wrong:mistake={mistake}")
    assert (code, err) == (1, "")
    exceeded_lines = [
        line.split(" exceeds the tolerance of the ")[1] for line in out.splitlines() if " exceeds " in line
    ]
    assert {line.partition(":")[0] for line in exceeded_lines} == exceeded
    heading = next(i for i, line in enumerate(out.splitlines()) if line.startswith("wrong:") and "3 of" in line)
    if mistake == "gradient":
        assert out.splitlines()[heading + 1].split()[0] == "blk.1.ffn_up.weight", (
            "the tensor with the largest error is not first"
        )
        assert exceeded_lines == ["gradient: blk.1.ffn_up.weight differs by 1.0e-03, 10 times the tolerance 0.0001"]


def test_a_looser_tolerance_lets_an_error_pass(capsys):
    code, _ = run_parity(capsys, "plugins=[wrong_engine]", "engine=ggml,wrong:mistake=gradient", "--gradient", "2e-3")
    assert code == 0


def test_engines_with_different_initial_weights_are_not_compared(capsys):
    code, (_, err) = run_parity(capsys, "plugins=[wrong_engine]", "engine=ggml,wrong:mistake=start")
    assert code == 1
    assert err == (
        "toyexp: error: wrong:mistake=start: the initial values of blk.1.ffn_up.weight differ from those on ggml\n"
    )


def test_an_experiment_with_a_sweep_is_compared_job_by_job(capsys):
    words = ["experiment=parity_all", "model=qwen3", "engine=ggml,metal:emulate=true", "steps=2"]
    jobs = ["recipe=scratch", "recipe=warm"]
    code, (out, err) = run_parity(capsys, *words)
    assert (code, err) == (0, "")
    assert [line for line in out.splitlines() if line.startswith("[")] == [f"[{i}] {job}" for i, job in enumerate(jobs)]
    assert out.splitlines()[-1] == "2 of 2 within the tolerances"
    code, (out, _) = run_parity(capsys, *words, "--json", "--gradient", "0")
    report = json.loads(out)
    assert (code, report["within"], len(report["jobs"])) == (1, False, 2)
    assert [job["overrides"] for job in report["jobs"]] == jobs


@pytest.mark.full  # tests/engines/test_matrix.py compares every cell on its own
def test_every_cell_of_parity_all_agrees(capsys):
    code, (out, err) = run_parity(capsys, "experiment=parity_all", "engine=cpu,ggml,metal:emulate=true", "steps=5")
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == "8 of 8 within the tolerances"
