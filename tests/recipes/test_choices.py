"""`toyexp eval --choices`: accuracy on multiple-choice questions, by the log-likelihood of each choice."""

import csv
import gzip
import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tiny import MODELS, write_base

from toyexp import InputSpec, Setup
from toyexp.cli.main import main
from toyexp.formats.file_plan import frozen_plan
from toyexp.formats.gguf.read import GGUFFile
from toyexp.formats.gguf.tokenizer import read_tokenizer
from toyexp.formats.gguf.write import write_model
from toyexp.reference.engine import reference_logits
from toyexp.tokenizers.byte_level import BPE, Bytes
from toyexp_models.vit import ViT


@pytest.fixture(autouse=True)
def change_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def write_questions(records):
    Path("questions.jsonl").write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))


def draw_questions(count):
    """Return random questions; some end in white space, and choices have one to six words of one or more bytes."""
    draw, words = random.Random(3), ["a", "to", "def", "café", "x", "naïve"]
    for _ in range(count):
        last = draw.sample(words, draw.randint(2, 5))  # no two choices are equal
        choices = [" ".join([*draw.choices(words, k=draw.randint(0, 5)), word]) for word in last]
        question = " ".join(draw.choices(words, k=draw.randint(1, 4))) + draw.choice(["", " ", "\n"])
        yield {"question": question, "choices": choices, "answer": draw.randrange(len(choices))}


def log_likelihood(model, values, tokenizer, question, choice):
    """Return the log-likelihood of a choice after a question, in float64, from a row of its own without padding."""
    ids = [int(i) for i in tokenizer.encode(f"{question} {choice}")]
    start = len(tokenizer.encode(question.rstrip()))
    inputs = {"tokens": InputSpec((len(ids),), "int32"), "targets": InputSpec((len(ids),), "int32")}
    setup = Setup({**inputs, "weights": InputSpec((len(ids),), "float32")}, rows=1)
    logits = reference_logits(frozen_plan(model, Path("m.gguf"), setup), values, {"tokens": np.array([ids])})[0]
    shares = np.exp(logits - logits.max(-1, keepdims=True))
    log_probs = np.log(shares / shares.sum(-1, keepdims=True))
    return sum(log_probs[i - 1, ids[i]] for i in range(start, len(ids)))


@pytest.mark.parametrize("engine", ["cpu", "ggml"])
def test_accuracy_is_that_of_log_likelihoods_in_float64(engine, capsys):
    base = Bytes()
    tokenizer = BPE([*base.pieces, "Ġd", "Ġx"], [("Ġ", "d"), ("Ġ", "x")], base.eos)  # merged over the question's end
    model = write_base(Path("m.gguf"), "llama", tokenizer=tokenizer, context=64)
    questions = list(draw_questions(60))
    write_questions(questions)
    with GGUFFile("m.gguf") as file:
        values = {name: file.read(name).astype(np.float64) for name in file.tensors}
        tokenizer = read_tokenizer(file)
    right = np.zeros(2)
    for question in questions:
        choices = question["choices"]
        sums = np.array([log_likelihood(model, values, tokenizer, question["question"], c) for c in choices])
        by_bytes = sums / [len(c.encode()) for c in choices]
        right += [sums.argmax() == question["answer"], by_bytes.argmax() == question["answer"]]
    assert main(["eval", "m.gguf", "--choices", "questions.jsonl", f"engine={engine}", "--json"]) == 0
    scores = json.loads(capsys.readouterr().out)
    assert [scores["acc"], scores["acc_bytes"]] == (right / 60).tolist() and right[0] != right[1]
    assert scores["questions"] == 60 and scores["engine"].startswith(engine)


def test_an_answer_is_a_letter_a_number_or_a_label(capsys):
    write_base(Path("m.gguf"), "llama", tokenizer=Bytes())
    texts, results = ["x", "yy"], []
    forms = [{"choices": texts, "answer": "B"}, {"choices": texts, "answer": 1}, {"choices": texts, "answer": "1"},
             {"choices": {"text": texts, "label": ["1", "2"]}, "answerKey": "2"}]  # fmt: skip
    for form in forms:
        write_questions([{"question": "q", **form}, {"question": "q", "choices": texts, "answer": 0}])
        assert main(["eval", "m.gguf", "--choices", "questions.jsonl", "engine=ggml"]) == 0
        results.append(capsys.readouterr().out)
    assert "2 questions\nacc 0.5000 · acc_bytes 0.5000\n" in results[0] and len({*results}) == 1


def write_table(path, records):
    with open(path, "w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, ["question", "choices", "answer"])
        table.writeheader()
        table.writerows({**record, "choices": json.dumps(record["choices"])} for record in records)


def test_questions_are_read_from_the_formats_of_examples(capsys):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    write_base(Path("m.gguf"), "llama", tokenizer=Bytes(), context=64)
    records = list(draw_questions(9))
    write_questions(records)
    Path("q.jsonl.gz").write_bytes(gzip.compress(Path("questions.jsonl").read_bytes()))
    Path("q.json").write_text(json.dumps(records))
    write_table("q.csv", records)
    parquet.write_table(pyarrow.Table.from_pylist(records), "q.parquet")
    results = []
    for name in ("questions.jsonl", "q.jsonl.gz", "q.json", "q.csv", "q.parquet"):
        assert main(["eval", "m.gguf", "--choices", name, "engine=ggml", "--json"]) == 0
        results.append({**json.loads(capsys.readouterr().out), "data": ""})
    assert results == [results[0]] * 5 and results[0]["questions"] == 9


@pytest.mark.parametrize(
    ("record", "words", "said"),
    [
        (
            {"choices": ["a"], "answer": 0},
            "",
            "questions.jsonl:1: choices has 1 text; expected a list of 2 to 26 texts",
        ),
        ({"choices": ["a", "b"], "answer": "C"}, "", ":1: answer is C; expected a letter, or a number from 0"),
        ({"choices": ["a", "b"], "answer": -1}, "", ":1: answer is -1; expected a letter"),
        ({"choices": ["a", "b"], "answer": True}, "", ":1: answer is True; expected a letter"),
        ({"choices": ["a", "b"]}, "", ":1: has the keys question, choices; expected question, choices and answer"),
        ({"choices": "ab", "answer": 0}, "", ":1: choices is a text; expected a list"),
        (
            {"choices": {"text": ["a"] * 27, "label": [*range(27)]}, "answerKey": "3"},
            "",
            ":1: choices has 27 texts; expected a list of 2 to 26 texts",
        ),
        ({"choices": ["a", ""], "answer": 0}, "", ":1: a choice is empty"),
        ({"choices": ["a", 3], "answer": 0}, "", ":1: a choice is a number, expected text"),
        ({"choices": ["a", "b" * 99], "answer": 0}, "", "a question has 101 tokens; the model's context is"),
        ({"choices": ["a", "b"], "answer": 0}, "lr=1", "eval lr=1: has no effect with --choices"),
        ({"choices": ["a", "b"], "answer": 0}, "--data x", "eval --data x: has no effect with --choices"),
    ],
)
def test_a_line_that_is_no_question_is_named(capsys, record, words, said):
    write_base(Path("m.gguf"), "llama", tokenizer=Bytes())
    write_questions([{"question": "q", **record}])
    assert main(["eval", "m.gguf", "--choices", "questions.jsonl", *words.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_a_model_whose_logits_overflow_has_no_accuracy(capsys):
    model = replace(MODELS["llama"], vocab=Bytes().vocab)
    values = {t.name: t.init.draw(t.shape, 7, t.name) for t in model.tensors()}
    values["output.weight"][:] = 3e38
    write_model(Path("m.gguf"), model, values, Bytes())
    write_questions([{"question": "q", "choices": ["a", "b"], "answer": 0}])
    assert main(["eval", "m.gguf", "--choices", "questions.jsonl", "engine=ggml"]) == 1
    assert "m.gguf: the log-likelihood of a choice is not finite" in capsys.readouterr().err


def test_a_classifier_of_images_is_named(capsys):
    model = ViT(n_layers=1, d_model=16, n_heads=2, d_ff=24, image_size=8, patch=4, channels=1, classes=3)
    write_model(Path("m.gguf"), model, {t.name: t.init.draw(t.shape, 7, t.name) for t in model.tensors()}, None)
    write_questions([{"question": "q", "choices": ["a", "b"], "answer": 0}])
    assert main(["eval", "m.gguf", "--choices", "questions.jsonl"]) == 2
    assert "m.gguf: a vit reads images" in capsys.readouterr().err


def test_an_empty_file_is_named(capsys):
    write_base(Path("m.gguf"), "llama", tokenizer=Bytes())
    write_questions([])
    assert main(["eval", "m.gguf", "--choices", "questions.jsonl"]) == 2
    assert "--choices questions.jsonl: is empty" in capsys.readouterr().err
