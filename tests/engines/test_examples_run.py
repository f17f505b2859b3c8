"""Masked examples on an engine: prompts are read but not learned; and a whole run from JSON lines."""

import datetime
import json

import numpy as np
import pytest

from toyexp import Setup
from toyexp.cli.main import main
from toyexp.formats.gguf.read import GGUFFile
from toyexp.formats.gguf.write import write_model
from toyexp.interfaces.recipe import start_session
from toyexp.tokenizers.byte_level import Bytes
from toyexp_data import examples
from toyexp_data.chat import PLAIN_TEMPLATE
from toyexp_data.examples import ExampleData
from toyexp_models.llama import Llama
from toyexp_recipes.scratch import Scratch

pytest.importorskip("ggml", reason="the ggml engine: pip install 'toyexp[ggml]'")

TALK = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}


@pytest.fixture
def lines(tmp_path):
    pairs = [{"prompt": f"{i} + {i} =", "completion": f" {2 * i}"} for i in range(40)]
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in [*pairs, TALK, TALK]))
    return path


def test_logits_depend_on_the_prompt_but_its_targets_have_no_gradient(lines):
    from toyexp_ggml.engines import GGMLCPU

    dataset = ExampleData(path=str(lines), tokenizer="byte").open(None)
    model = Llama(d_model=16, n_layers=1, n_heads=2, n_kv_heads=1, d_ff=32, context=16).fit(dataset)
    batches = dataset.batches(16, 4, 0)
    recipe, batch = Scratch(), batches.batch(0)
    plan = recipe.plan(model, Setup(batches.inputs, rows=4, seed=1))
    learned = batch["weights"] > 0
    assert learned.any() and not learned[:, 0].any()
    with start_session(recipe, GGMLCPU(threads=1), plan) as session:
        logits = session.logits({"tokens": batch["tokens"]}).astype(np.float64)
        chosen = np.take_along_axis(logits, batch["targets"][..., None].astype(int), -1)[..., 0]
        losses = np.log(np.exp(logits).sum(-1)) - chosen
        assert session.evaluate([batch]) == pytest.approx(losses[learned].mean(), rel=1e-5)
        other = {**batch, "targets": np.where(learned, batch["targets"], 7).astype(np.int32)}
        gradients, gradients_of_other = session.gradients(batch), session.gradients(other)
        assert all(np.array_equal(gradients[name], gradients_of_other[name]) for name in gradients), (
            "masked targets have a gradient"
        )
        swapped = {**batch, "tokens": batch["tokens"].copy()}
        swapped["tokens"][:, 0] = ord("?")  # the first token of every prompt
        changed = session.logits({"tokens": swapped["tokens"]})
        assert (np.abs(changed - logits).max(-1)[learned] > 1e-6).all(), (
            "logits of the completion do not depend on the prompt"
        )


def test_a_run_learns_from_json_lines_and_exports_its_chat_template(lines, tmp_path, capsys):
    lines.write_text(lines.read_text() + "{}\n" + json.dumps({"prompt": "x" * 99, "completion": "y"}) + "\n")
    words = ["engine=ggml", "engine.threads=1", "data=examples", f"data.path={lines}", "data.tokenizer=byte", "steps=3",
             "model.d_model=16", "model.d_ff=16", "model.context=32", f"hydra.run.dir={tmp_path / 'run'}"]  # fmt: skip
    assert main(words) == 2
    assert f"{lines}:43: has the keys none; expected messages," in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert main([*words, "data.on_error=skip"]) == 0
    out = capsys.readouterr().out
    assert "1 of 44 examples skipped (data.on_error), such as x.jsonl:43: has the keys none" in out
    assert "1 of 43 examples left out: their prompts exceed the context (model.context=32)" in out
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    facts = events[0]["data"]
    assert (facts["name"], facts["examples"], facts["chats"], facts["too_long"]) == ("examples", 43, 2, 1)
    steps = [e for e in events if e["kind"] == "step"]
    assert len(steps) == 3 and steps[-1]["loss"] < steps[0]["loss"]
    with GGUFFile(tmp_path / "run" / "model.gguf") as file:
        assert file.metadata["tokenizer.chat_template"] == PLAIN_TEMPLATE


def test_a_resumed_run_keeps_the_date_that_its_chat_template_first_saw(lines, tmp_path, capsys, monkeypatch):
    class Day(datetime.date):
        today_is = datetime.date(2024, 7, 26)

        @classmethod
        def today(cls):
            return cls.today_is

    monkeypatch.setattr(examples, "date", Day)
    tokenizer = Bytes()
    tokenizer.chat_template = (
        "{{ strftime_now('%d %b') }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    )
    model = Llama(d_model=16, n_layers=1, n_heads=2, n_kv_heads=1, d_ff=16, context=8, vocab=257)
    values = {t.name: np.zeros(t.shape, np.float32) for t in model.tensors()}
    write_model(tmp_path / "donor.gguf", model, values, tokenizer)
    data = ["data=examples", f"data.path={lines}", f"data.tokenizer={tmp_path / 'donor.gguf'}"]
    sizes = ["model.d_model=16", "model.d_ff=16", "model.context=32"]
    words = ["engine=ggml", "engine.threads=1", *data, *sizes, "checkpoint_every=1", "name=day"]
    assert main([*words, "steps=2", f"hydra.run.dir={tmp_path / 'runs' / 'a'}"]) == 0
    assert "the chat template uses the date 2024-07-26 (data.date)" in capsys.readouterr().out
    assert "date: '2024-07-26'" in (tmp_path / "runs" / "a" / "config.yaml").read_text()
    Day.today_is = datetime.date(2025, 1, 1)
    assert main([*words, "steps=3", "resume=auto", f"hydra.run.dir={tmp_path / 'runs' / 'b'}"]) == 0
    assert "resumed from step 2" in capsys.readouterr().out and not (tmp_path / "runs" / "b").exists()
    assert main([f"resume={tmp_path / 'runs' / 'a'}", "steps=4"]) == 0
    assert main([f"resume={tmp_path / 'runs' / 'a'}", "steps=5", "data.date=2025-01-01"]) == 2
    assert "data.date was 2024-07-26 and is 2025-01-01" in capsys.readouterr().err
    events = [json.loads(line) for line in (tmp_path / "runs" / "a" / "events.jsonl").read_text().splitlines()]
    assert events[0]["data"]["chat_date"] == "2024-07-26"
