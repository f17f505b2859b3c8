"""NaN and infinite losses, gradients and weights: how a run detects, reports and survives them."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny

from toyexp import AdamW
from toyexp.cli.main import main
from toyexp.formats.gguf.read import GGUFFile
from toyexp.formats.gguf.write import write_model
from toyexp.testing import op_batch, op_plan
from toyexp.tokenizers.byte_level import Bytes
from toyexp.training.checkpoint import list_checkpoints
from toyexp_ggml.engines import GGMLCPU
from toyexp_models.llama import Llama
from toyexp_torch.engines import TorchCPU

ENGINES = {"cpu": [], "ggml": [], "metal": ["engine.emulate=true"]}
MODEL = Llama(d_model=32, n_layers=1, n_heads=2, n_kv_heads=1, d_ff=48, context=16, vocab=257)
RARE = "Z"  # a character in few batches


@pytest.fixture(autouse=True)
def _enter_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TOYEXP_CACHE", str(tmp_path / "cache"))
    sentence = "It was a bright cold day in April, and the clocks were striking. "
    (tmp_path / "book.txt").write_text((sentence * 9 + RARE) * 15 + sentence * 20)


def write_model_file(path, **changes):
    """Write a random llama; `changed` maps a tensor's name to a function that changes its array."""
    values = {t.name: t.init.draw(t.shape, 7, t.name) for t in MODEL.tensors()}
    for name, change in changes.items():
        change(values[name])
    write_model(Path(path), MODEL, values, Bytes())
    return [f"recipe.base={path}", "lr=1e-3"]


def run(capsys, engine, *words):
    """Train a tiny model; return the exit code, the output, and the events."""
    capsys.readouterr()
    common = ["data=text", "data.path=book.txt", "batch_size=4", "model.context=16", "engine.threads=1",
              "hydra.run.dir=run", f"engine={engine}", *ENGINES[engine]]  # fmt: skip
    code = main([*common, *words])
    out, err = capsys.readouterr()
    with open("run/events.jsonl") as lines:
        return code, out, err, [json.loads(line) for line in lines]


SMALL = ["data.tokenizer=byte", "model.d_model=32", "model.n_layers=1", "model.d_ff=48"]


@pytest.mark.parametrize("engine", ["cpu", "ggml"])  # Metal's norm makes every number finite
def test_a_step_that_overflows_stops_the_run_and_the_error_names_it(engine, capsys, tmp_path):
    words = [*SMALL, "lr=1e8", "steps=30", "eval_every=0", "checkpoint_every=1"]
    code, _, err, events = run(capsys, engine, *words)
    assert code == 1
    line = re.fullmatch(
        r"toyexp: error: step (\d+) \(batch (\d+), digest ([0-9a-f]{16})\): the loss is \S+ and the gradient norm \S+; "
        r"the first (?:weight|gradient) that is not finite is (\S+) \(\d+ of \d+ numbers\); "
        r"try a lower lr \(it was \S+\), optim\.grad_clip=1, or nonfinite=skip",
        err.strip().splitlines()[-1],
    )
    assert line, err
    last = [e for e in events if e["kind"] == "step"][-1]
    assert (int(line[1]), line[3]) == (last["step"], last["batch"]) and int(line[2]) == last["step"] - 1
    assert events[-1]["reason"] == "errored" and not (tmp_path / "run" / "model.gguf").exists()
    for step in list_checkpoints(tmp_path / "run" / "checkpoints"):
        assert step < last["step"], "a checkpoint was saved after the overflow"


@pytest.mark.parametrize(("key", "usual"), [("lr", "0.003"), ("weight_decay", "0")])
def test_the_error_names_the_setting_of_a_group_that_exceeds_the_runs(key, usual, capsys, tmp_path):
    groups = f"optim.groups={{*norm*: {{{key}: {usual}}}, *: {{{key}: 1e30}}}}"
    code, _, err, _ = run(capsys, "ggml", *SMALL, "steps=5", "eval_every=0", "checkpoint_every=0", groups)
    assert code == 1
    assert f"; try a lower {key} of optim.groups: * (it was 1e+30), lr (it was 0.003), optim.grad_clip=1" in err


@pytest.mark.parametrize("setting", ["optim.adamw_lr", "optim.weight_decay"])
def test_the_error_names_a_higher_rate_of_one_of_the_optimisers_rules(capsys, setting):
    words = ["steps=5", "eval_every=0", "checkpoint_every=0", "optim=muon", f"{setting}=1e30"]
    code, _, err, _ = run(capsys, "ggml", *SMALL, *words)
    assert code == 1
    assert f"; try a lower {setting} (it was 1e+30), lr (it was 0.003), optim.grad_clip=1" in err


@pytest.fixture
def skip_weight_checks(monkeypatch):
    """Let the reader accept weights with NaN, as if they became bad after they were read."""
    monkeypatch.setattr(GGUFFile, "weights", GGUFFile.read)
    monkeypatch.setattr(GGUFFile, "check_finite", lambda self, name, rows=None: None)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("recipe", ["full", "lora"])
def test_the_error_names_a_bad_weight(engine, recipe, capsys, skip_weight_checks):
    base = write_model_file("base.gguf", **{"blk.0.ffn_up.weight": lambda w: w.__setitem__((3, 5), np.nan)})
    code, out, err, events = run(capsys, engine, *base, f"recipe={recipe}", "steps=3")
    assert code == 1
    step = next(e for e in events if e["kind"] == "step")
    assert f"step 1 (batch 0, digest {step['batch']}): the loss is nan" in err
    assert "held-out loss nan" in out
    if recipe == "lora":  # with recipe=full all weights are bad after that step
        assert "the first weight that is not finite is blk.0.ffn_up.weight (1 of 1536 numbers)" in err


@pytest.mark.parametrize("engine", ENGINES)
def test_a_base_with_huge_weights_stops_the_run_at_step_1(engine, capsys):
    base = write_model_file("base.gguf", **{"output.weight": lambda w: w.__imul__(1e38)})
    code, _, err, _ = run(capsys, engine, *base, "recipe=full", "steps=3")
    assert code == 1 and "step 1 (batch 0" in err


@pytest.mark.parametrize("engine", [TorchCPU(threads=1), GGMLCPU(threads=1)], ids=["cpu", "ggml"])
def test_a_step_whose_gradient_overflows_is_skipped_though_its_loss_is_finite(engine):
    """The loss is finite: a huge number is multiplied by a tiny one."""
    plan = replace(op_plan("matmul"), skip_nonfinite=True)
    with engine.realize(plan) as session:
        for name, size in (("x", 1e25), ("w", 1e-25)):
            session.upload(name, size * plan.initial_values(plan.tensor(name)))
        session.build()
        before = dict(session.snapshot())
        metrics = session.step(op_batch(), AdamW.for_from_scratch().hp_for_step(0))
        assert math.isfinite(metrics.loss) and not math.isfinite(metrics.grad_norm)
        after = session.snapshot()
    for name, array in before.items():
        np.testing.assert_array_equal(after[name], array, err_msg=name)


def spoil_rare_row(w):
    w[ord(RARE)] = np.nan


@pytest.mark.parametrize("engine", ENGINES)
def test_skipped_steps_are_counted_in_every_output_and_leave_the_weights_finite(
    engine, capsys, tmp_path, skip_weight_checks
):
    """Only batches with one rare token are bad, because its row of the embedding is."""
    base = write_model_file("base.gguf", **{"token_embd.weight": spoil_rare_row})
    words = [*base, "recipe=full", "steps=40", "eval_every=20", "nonfinite=skip"]
    code, out, err, events = run(capsys, engine, *words)
    assert code == 1 and "checkpoint of step 40: not written (weight token_embd.weight has NaN or infinity" in err
    steps = {e["step"]: e for e in events if e["kind"] == "step"}
    bad = [step for step, e in steps.items() if e["loss"] is None]
    assert 2 <= len(bad) <= 20 and steps[40]["loss"] < steps[1 if 1 not in bad else 2]["loss"]
    skipped = [e for e in events if e["kind"] == "skipped"]
    assert [e["step"] for e in skipped] == bad and [e["skipped"] for e in skipped] == [*range(1, len(bad) + 1)]
    assert [e["batch"] for e in skipped] == [steps[step]["batch"] for step in bad]
    assert events[-1]["skipped"] == len(bad)
    assert json.loads((tmp_path / "run" / "result.json").read_text())["skipped"] == len(bad)
    first = [step for step in bad if step - 1 not in bad]
    last = [step for step in bad if step + 1 not in bad and step not in (*first, 40)]
    assert re.findall(r"step +(\d+)/40  skipped: loss nan, gradient norm nan", out) == [*map(str, first)]
    assert re.findall(r"step +(\d+)/40  skipped: \d+ steps in a row", out) == [*map(str, last)]
    with GGUFFile("run/model.gguf") as file:
        for name in file.tensors:
            values = file.read(name)
            assert np.isfinite(np.delete(values, ord(RARE), 0) if name == "token_embd.weight" else values).all()
    # That row is still bad, so no checkpoint is written, but the export is kept; both are reported.
    assert "token_embd.weight has NaN or infinity" in err and not list_checkpoints(tmp_path / "run" / "checkpoints")
    assert "model.gguf: token_embd.weight contains NaN or infinity" in out
    warnings = [e["text"] for e in events if e["kind"] == "warning"]
    assert any("model.gguf: token_embd.weight" in text for text in warnings)


def test_a_run_that_skips_20_steps_in_a_row_stops(capsys):
    code, out, err, events = run(capsys, "cpu", *SMALL, "lr=1e8", "steps=100", "eval_every=0", "nonfinite=skip")
    assert code == 1 and "20 steps in a row were skipped" in err and "nonfinite=skip" not in err.split(";")[-1]
    assert events[-1]["skipped"] == 19 and out.count("skipped: ") == 1, "the error counts the others"


@pytest.mark.parametrize(("kind", "huge"), [("f16", 70_000.0), ("q8_0", 1e7), ("f16", -3e38), ("bf16", 3e38)])
def test_a_tensor_that_overflows_its_type_is_exported_in_float32(kind, huge, tmp_path):
    model = tiny.MODELS["llama"].fit(tiny.token_dataset(tiny.VOCAB))
    values = {t.name: t.init.draw(t.shape, 7, t.name) for t in model.tensors()}
    values["blk.0.ffn_gate.weight"][1, 2] = huge
    write_model(tmp_path / "model.gguf", model, values, None, kind)
    with GGUFFile(tmp_path / "model.gguf") as file:
        types = {name: info.type for name, info in file.tensors.items()}
        assert types["blk.0.ffn_gate.weight"] == ("BF16" if kind == "bf16" else "F32")
        assert types["blk.0.ffn_up.weight"] == kind.upper() and types["blk.1.ffn_gate.weight"] == kind.upper()
        assert file.read("blk.0.ffn_gate.weight")[1, 2] == pytest.approx(huge, rel=1e-2)
