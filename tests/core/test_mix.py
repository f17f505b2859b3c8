"""Mixtures of data sets: shares, order, and a held-out loss for each source."""

import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from toyexp import UserError
from toyexp.cli.main import main
from toyexp.interfaces.dataset import batch_digest
from toyexp.testing import DataSuite
from toyexp_data.mix import Mix


@pytest.fixture
def sources(tmp_path):
    """Three sources whose rows have only the letter a, b or c; b has four times the text of a."""
    (tmp_path / "a.txt").write_text("a" * 4_000)
    (tmp_path / "b.txt").write_text("b" * 16_000)
    (tmp_path / "c.jsonl").write_text('{"text": "ccccc"}\n' * 100)
    paths = {name: str(tmp_path / f"{name}.{'jsonl' if name == 'c' else 'txt'}") for name in "abc"}
    return {name: {"path": path} for name, path in paths.items()}


def open_mix(sources, **changes):
    data = Mix(sources=sources, tokenizer="byte", **changes)
    data.check()
    return data.open(None)


def letters(batch):
    return Counter(chr(int(row[1])) for row in batch["tokens"])


def count_rows(batches, count):
    return sum((letters(batches.batch(k)) for k in range(count)), Counter())


class TestMix(DataSuite):
    epoch = 0
    tells = ()

    @pytest.fixture(autouse=True)
    def _file(self, tmp_path):
        text = {"path": str(tmp_path / "x.txt")}
        (tmp_path / "x.txt").write_text("".join(f"{n} " for n in range(3_000)))
        (tmp_path / "y.jsonl").write_text("".join(json.dumps({"text": f"{n}" * 9}) + "\n" for n in range(300)))
        self.data = Mix(sources={"x": text, "y": {"path": str(tmp_path / "y.jsonl")}}, tokenizer="byte")

    def subject(self):
        return Mix


def test_sources_have_exactly_their_share_of_a_thousand_rows(sources):
    weighted = {name: {**source, "weight": w} for (name, source), w in zip(sources.items(), (1, 2, 5), strict=True)}
    batches = open_mix(weighted).batches(8, 10, seed=1)
    for first in (0, 100, 200):
        rows = sum((letters(batches.batch(k)) for k in range(first, first + 100)), Counter())
        assert rows == {"a": 125, "b": 250, "c": 625}
    assert batches.facts["shares"] == {"a": 0.125, "b": 0.25, "c": 0.625}
    # 95 examples of c for training, 6.25 rows a step
    assert batches.facts["steps_per_epoch"]["c"] == pytest.approx(95 / 6.25, abs=0.1)


@pytest.mark.parametrize(("temperature", "share"), [(1.0, 0.8), (2.0, 2 / 3), (1e9, 0.5)])
def test_without_weights_shares_follow_the_rows_and_the_temperature(sources, temperature, share):
    del sources["c"]
    batches = open_mix(sources, temperature=temperature).batches(8, 10, 0)
    assert count_rows(batches, 100)["b"] / 1000 == pytest.approx(share, abs=0.003)


def test_a_source_reads_its_rows_in_the_order_it_has_alone(sources, tmp_path):
    (tmp_path / "b.txt").write_text("".join(f"b{n:05}" for n in range(3_000)))
    dataset = open_mix(sources)
    mixed = dataset.batches(12, 7, seed=4)
    rows = [row for k in range(600) for row in mixed.batch(k)["tokens"] if b"b" in row.astype(np.uint8).tobytes()]
    alone = dataset._datasets["b"].batches(12, 1, seed=4)
    assert all(np.array_equal(row, alone.batch(i)["tokens"][0]) for i, row in enumerate(rows)) and len(rows) > 500
    expected = batch_digest(mixed.batch(321))
    assert batch_digest(dataset.batches(12, 7, seed=4).batch(321)) == expected
    assert batch_digest(dataset.batches(12, 7, seed=5).batch(321)) != expected


def test_a_temperature_besides_weights_is_warned_about(sources):
    weighted = {name: {**source, "weight": 2} for name, source in sources.items()}
    (warning,) = Mix(sources=weighted, temperature=2.0).warnings(None)
    assert warning.startswith("data.temperature=2.0: has no effect")
    assert not [*Mix(sources=weighted).warnings(None), *Mix(sources=sources, temperature=2.0).warnings(None)]


def test_every_source_has_its_own_held_out_loss(sources, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    typed = ",".join(f"{name}:{{path:{source['path']}}}" for name, source in sources.items())
    words = ["engine=ggml", "engine.threads=1", "data=mix", f"data.sources={{{typed}}}",
             "data.tokenizer=byte", "model.d_model=16", "model.d_ff=16", "model.context=8",
             "batch_size=4", "eval_every=4"]  # fmt: skip
    assert main([*words, "data.pack=apart"]) == 2
    assert "data=mix; put it into each source: data.sources='{a: {pack: apart, ...}}'" in capsys.readouterr().err
    assert main([*words, "steps=8", "hydra.run.dir=run"]) == 0, capsys.readouterr().err
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("data "))
    assert "rows: " in line and all(re.search(rf"\d+\.\d% {name}[,;)]", line) for name in "abc")
    last = [e for e in map(json.loads, Path("run/events.jsonl").read_text().splitlines()) if e["kind"] == "eval"][-1]
    parts = [last[f"loss/{name}"] for name in "abc"]
    assert len(set(parts)) == 3 and min(parts) < last["loss"] < max(parts)
    capsys.readouterr()
    assert main(["eval", "run", "--json"]) == 0
    scores = json.loads(capsys.readouterr().out)["scores"]
    assert [scores[f"loss/{name}"] for name in "abc"] == pytest.approx(parts, rel=1e-5)
    for name in "abc":
        assert main(["eval", "run", "--data", sources[name]["path"], "--json", "data.val_fraction=0.05"]) == 0
        assert json.loads(capsys.readouterr().out)["loss"] == pytest.approx(parts["abc".index(name)], rel=1e-4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sources": {}}, "data=mix needs several sources"),
        ({"a": {"weight": 1}}, "data.sources.b: either all sources have a weight, or none"),
        ({"a": {"weight": 0}, "b": {"weight": 1}, "c": {"weight": 1}}, "a.weight=0: must be a finite number above 0"),
        ({"a": {"weight": 1e-9}, "b": {"weight": 1}, "c": {"weight": 1}}, "a: its share is below 1 of 1000 rows"),
        ({"a": {"name": "text"}}, "data.sources.a.name: "),
        ({"a": {"paht": "x"}}, "data.sources.a.paht: did you mean path?"),
        ({"a": {"data": "digits"}}, "data.sources.a"),
        ({"a": {"data": "mix", "sources": {}}}, "data.sources.a: a source cannot be a mixture"),
        (
            {"c": {"pack": "apart"}},
            "data.sources.c: its rows differ; either all sources have pack: apart",
        ),
        ({"c": {"data": "preference"}}, "data.sources.c: data=preference cannot be mixed"),
        ({"a": {"path": "nowhere.txt"}}, "nowhere.txt: not found"),
        ({"a": "x.txt"}, "data.sources.a=x.txt: must be settings"),
        ({"a": {"tokenizer": "bpe"}}, "data.sources.b: has another tokenizer than a; set data.tokenizer"),
        ({"temperature": 0.0}, "data.temperature=0.0: must be above 0"),
    ],
)
def test_invalid_mixtures_name_the_source_and_the_setting(sources, change, words):
    settings = {key: change.pop(key) for key in ("sources", "temperature") if key in change}
    mixed = {n: {**s, **change[n]} if isinstance(change.get(n), dict) else change.get(n, s) for n, s in sources.items()}
    with pytest.raises(UserError) as error:
        open_mix(**{"sources": mixed, **settings}).batches(8, 4, 0)
    assert words in str(error.value)
