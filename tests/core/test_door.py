"""The Python API: run, train, sweep and open, their results, and the process state after a call."""

import contextlib
import html
import io
import json
import os
import pickle
import re
import shutil
import signal
import sys
import threading
import time
import types
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import environments
import numpy as np
import pytest
from tiny import write_base

import toyexp
from toyexp import Callback, RunFailed, Unavailable, UserError, hookimpl
from toyexp.api.calls import format_settings
from toyexp.api.result import round_ticks
from toyexp.base.lazy import lazy
from toyexp.base.process_state import restore_process_state, use_torch_defaults
from toyexp.cli.main import main
from toyexp.config import compose_cache as beforehand
from toyexp.config import schema
from toyexp.config.paths import CONF
from toyexp.config.words import parse
from toyexp.formats.gguf.read import GGUFFile
from toyexp.results.events import History
from toyexp.tokenizers.byte_level import Bytes
from toyexp_callbacks.progress import Progress
from toyexp_data.text import Text
from toyexp_ggml.engines import GGMLCPU
from toyexp_models.llama import Llama
from toyexp_recipes.lora import Lora

MODEL = {"name": "llama", "d_model": 16, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "d_ff": 24, "context": 16}
SETTINGS = {"steps": 8, "batch_size": 2, "eval_every": 4, "checkpoint_every": "4", "lr": 0.01}


@pytest.fixture(scope="module")
def book_directory(tmp_path_factory):
    """Change to a directory with a text file."""
    folder, before = tmp_path_factory.mktemp("door"), Path.cwd()
    (folder / "book.txt").write_text("It was a bright cold day in April, and the clocks were striking thirteen.\n" * 60)
    os.chdir(folder)
    yield folder
    os.chdir(before)


ON_GGML = {"engine": "ggml", "engine.threads": 1}
WORDS = ["data=text", "data.path=book.txt", "engine=ggml", "engine.threads=1"]


@pytest.fixture(scope="module")
def trained(book_directory):
    return toyexp.run(*WORDS, model=MODEL, **SETTINGS, directory="first", quiet=True)


@pytest.mark.usefixtures("book_directory")
def test_a_mapping_of_callbacks_warns_of_the_default_callbacks_that_it_drops():
    settings = {**SETTINGS, "model": MODEL, "callbacks": {"cosine": {}, "events": {"every": 2}}}
    result = toyexp.run(*WORDS, **settings, directory="mapping", quiet=True)
    (warning,) = result.warnings
    assert "leaves out progress, watch, gguf_export" in warning and "callbacks=[default]" in warning


def events(run, kind):
    lines = (Path(run) / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


# -- what comes out of a run ------------------------------------------------------------------------------------------


def test_the_history_is_read_from_the_events(trained):
    history, steps, evals = trained.history, events(trained, "step"), events(trained, "eval")
    np.testing.assert_array_equal(history.step, range(1, 9))
    for name in ("loss", "lr", "grad_norm"):
        np.testing.assert_array_equal(history[name], [event[name] for event in steps])
    with pytest.raises(KeyError, match="accuracy: no such array; choose step, loss, lr"):
        history["accuracy"]
    np.testing.assert_array_equal(history.tokens, 2 * 16 * np.arange(1, 9))
    np.testing.assert_array_equal(history.seconds, [event["t"] for event in steps])
    np.testing.assert_array_equal(history.held_out["step"], [0, 4, 8])
    np.testing.assert_array_equal(history.held_out["loss"], [event["loss"] for event in evals])
    assert set(history) == {"step", "loss", "lr", "grad_norm", "tokens", "seconds", "speed"}


def test_a_result_has_the_outcome_of_the_run(trained, book_directory):
    result = json.loads((book_directory / "first" / "result.json").read_text())
    assert (trained.state, trained.steps, trained.loss) == ("completed", 8, result["train_loss"])
    assert trained.held_out == {"loss": result["eval_loss"]}
    assert trained.settings["model"] == "llama" and trained.settings["model.d_model"] == 16
    assert {"model.gguf", "events.jsonl", "checkpoints/step-4", "checkpoints/step-8"} <= trained.files.keys()
    shown = repr(trained)
    assert "completed after 8 steps" in shown and f"{result['eval_loss']:.4f}" in shown and shown.endswith("first")
    page = trained._repr_html_()
    assert page.count("<circle") == 3 and page.count("<polyline") == 2 and "completed after 8 steps" in page
    assert ">loss (nats per token)<" in page and ">step<" in page
    assert re.findall(r'text-anchor="middle">(\d+)<', page) == ["0", "2", "4", "6", "8"]


@pytest.mark.parametrize(
    "low, high", [(0, 1), (0, 9.1), (0, 10), (0, 60), (0, 99), (0, 100), (0, 2e5), (3.9, 7.1), (-2, 0.5)]
)
def test_an_axis_in_a_notebook_has_two_to_five_round_ticks_within_its_range(low, high):
    ticks = round_ticks(low, high)
    assert (3 if low == 0 else 2) <= len(ticks) <= 5 and low <= ticks[0] and ticks[-1] <= high
    assert {f"{gap:.0e}"[0] for gap in np.diff(ticks)} <= {"1", "2", "5"}


def test_parameters_are_read_from_the_models_file(trained):
    with GGUFFile(trained.files["model.gguf"]) as file:
        assert set(trained.parameters) == set(file.tensors)
        for name, array in trained.parameters.items():
            np.testing.assert_array_equal(array, file.read(name))
    assert trained.model == Llama(**{k: v for k, v in MODEL.items() if k != "name"}, vocab=trained.model.vocab)


def test_logits_agree_with_another_engine_and_generate_follows_them(trained):
    ids = trained.tokenizer.prompt("It was")
    ours, theirs = trained.logits("It was", engine="ggml"), trained.logits(ids, engine="cpu:threads=1")
    assert ours.shape == (len(ids), trained.model.vocab)
    np.testing.assert_allclose(ours, theirs, atol=1e-4)
    both = trained.logits(np.stack([ids, ids]), engine="ggml")
    np.testing.assert_allclose(both, [ours, ours], atol=1e-6)
    greedy = list(ids)
    for _ in range(4):
        greedy.append(int(trained.logits(greedy, engine="cpu:threads=1")[-1].argmax()))
    text = trained.generate("It was", tokens=4, temperature=0, engine="ggml")
    assert text == trained.tokenizer.decode(greedy[len(ids) :])
    assert trained.generate(ids, tokens=4, temperature=0, engine="ggml") == greedy[len(ids) :]


def test_a_data_frame_has_a_row_per_step_or_names_the_missing_package(trained):
    try:
        import pandas  # noqa: F401
    except ImportError:
        with pytest.raises(Unavailable, match="pip install pandas"):
            trained.history.frame()
        return
    frame = trained.history.frame()
    assert list(frame.index) == list(range(9)) and frame.loc[8, "held_out_loss"] == trained.held_out["loss"]
    np.testing.assert_array_equal(frame.loss[1:], trained.history.loss)


def test_open_takes_runs_and_model_files_and_rejects_other_paths(trained, book_directory):
    again = toyexp.open("first")
    assert (again.state, again.held_out) == (trained.state, trained.held_out)
    for path, reason in (("nowhere", "nowhere"), ("book.txt", "holds no run"), (".", "holds no run")):
        with pytest.raises(UserError, match=reason):
            toyexp.open(path)


# -- going on ---------------------------------------------------------------------------------------------------------


def test_a_resumed_run_equals_an_uninterrupted_one(trained, book_directory):
    uninterrupted = toyexp.run(*WORDS, "callbacks=[events]", model=MODEL, **{**SETTINGS, "steps": 12}, quiet=True)
    part = toyexp.run(*WORDS, "callbacks=[events]", model=MODEL, **SETTINGS, name="part", quiet=True)
    assert toyexp.run(resume=part, steps=12, quiet=True).directory == part.directory
    np.testing.assert_array_equal(toyexp.open(part).history.loss, uninterrupted.history.loss)
    same = toyexp.run(*WORDS, "callbacks=[events]", resume="auto", model=MODEL, **{**SETTINGS, "steps": 12},
                      name="part", quiet=True)  # fmt: skip
    assert same.directory == part.directory and same.steps == 12
    with pytest.raises(UserError, match="is complete"):
        toyexp.run(resume=part, quiet=True)


def test_a_result_does_not_change_when_its_run_is_resumed(book_directory):
    run = toyexp.run(*WORDS, model=MODEL, **SETTINGS, name="stays", checkpoint_best="loss", quiet=True)
    assert run.best == {"step": run.best["step"], "metric": "loss", "score": run.held_out["loss"]}
    weights, held = run.parameters, {"held_out": run.held_out, "settings": run.settings, "best": run.best}
    opened, begun = toyexp.open(run), repr(run)
    longer = toyexp.run(resume=run, steps=12, quiet=True)
    for result in (run, opened):
        assert repr(result) == begun and result.steps == len(result.history.loss) == 8 and not result.warnings
        assert {name: getattr(result, name) for name in held} == held
        for look in (lambda r: r.files, lambda r: r.facts, lambda r: r.parameters["output_norm.weight"],
                     lambda r: r.logits("It was"), lambda r: r.generate("It"),
                     lambda _: weights["output_norm.weight"]):  # fmt: skip
            with pytest.raises(UserError, match=r"was resumed .* read; toyexp\.open\(.*\) reads it again"):
                look(result)
    assert longer.steps == len(longer.history.loss) == 12 and "checkpoints/step-12" in longer.files
    assert toyexp.open(run.directory / "checkpoints" / "step-8").logits("It was").ndim == 2
    run.directory.rename(book_directory / "moved")
    with pytest.raises(UserError, match="or moved after this result was read"):
        longer.files  # noqa: B018


def test_a_sweep_result_does_not_change_when_one_of_its_runs_is_resumed(book_directory):
    swept = toyexp.sweep(*WORDS, model=MODEL, **SETTINGS, seed=[0, 1], sweep={"isolate": False}, quiet=True)
    best, before = swept.best, swept.best.held_out
    toyexp.run(resume=best, steps=12, quiet=True)
    assert best is swept.best and (best.steps, best.held_out) == (8, before) and "| 12" not in repr(swept)
    assert {str(row["seed"]) for row in swept.table} == {"0", "1"} and {row["steps"] for row in swept.table} == {8}
    with pytest.raises(UserError, match="was resumed"):
        best.history  # noqa: B018


@dataclass(eq=False)
class Interrupting(Callback):
    """Does as a person who presses Ctrl-C."""

    name = "interrupting"
    at: int = 5
    number: int = int(signal.SIGINT)

    @hookimpl
    def on_step(self, step: int):
        if step == self.at:
            os.kill(os.getpid(), self.number)


@dataclass(eq=False)
class Failing(Callback):
    """Is broken."""

    name = "failing"

    @hookimpl
    def on_step(self, step: int):
        if step == 6:
            raise RuntimeError("no more")


def parts(*callbacks, **more):
    return {
        "model": Llama(**{k: v for k, v in MODEL.items() if k != "name"}), "data": Text(path="book.txt"),
        "engine": GGMLCPU(threads=1), "callbacks": ["default", *callbacks], "quiet": True, **SETTINGS, **more,
    }  # fmt: skip


def test_an_interrupted_run_is_saved_and_can_be_resumed(trained, book_directory):
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt) as caught:
        toyexp.train(**parts(Interrupting()), directory="stopped")
    assert signal.getsignal(signal.SIGINT) is handler
    assert "toyexp.open('stopped')" in caught.value.__notes__[0]
    assert "toyexp.train(..., resume='stopped')" in caught.value.__notes__[0]
    interrupted = toyexp.open("stopped")
    assert (interrupted.state, interrupted.steps) == ("interrupted", 5)
    done = toyexp.train(**parts(), resume=interrupted)
    assert done.state == "completed"
    np.testing.assert_array_equal(done.history.loss, trained.history.loss)


def test_a_failing_run_names_the_faulty_part_and_the_saved_checkpoint(book_directory):
    with pytest.raises(RunFailed, match=r"callbacks\.failing failed at step 6: RuntimeError: no more") as caught:
        toyexp.train(**parts(Failing()), directory="failed")
    assert "toyexp.open('failed')" in caught.value.__notes__[0]
    assert toyexp.open("failed").state == "failed" and "no more" in toyexp.open("failed").why


# -- finished objects -------------------------------------------------------------------------------------------------


def test_objects_train_like_the_settings_that_describe_them(trained, book_directory):
    objects = parts()
    result = toyexp.train(**objects, directory="objects")
    np.testing.assert_array_equal(result.history.loss, trained.history.loss)
    assert result.settings == trained.settings
    assert objects["data"] == Text(path="book.txt") and objects["model"].vocab == parts()["model"].vocab
    assert toyexp.run(resume="objects", steps=9, quiet=True).steps == 9  # by the words of its config.yaml


def test_an_adapter_is_trained_on_a_base_and_can_be_loaded_with_it(book_directory):
    base = write_base(book_directory / "base.gguf", "llama", tokenizer=Bytes())
    recipe = Lora(base=str(book_directory / "base.gguf"), rank=2)
    result = toyexp.train(data=Text(path="book.txt"), recipe=recipe, engine="ggml", optim="adamw",
                          **{**SETTINGS, "lr": 0.1}, directory="adapter", quiet=True)  # fmt: skip
    assert result.model == base and result.settings["recipe.rank"] == 2
    merged = result.logits([1, 2, 3], engine="ggml")
    result.files["model.gguf"].unlink()  # the adapter and its base are left
    result = toyexp.open(result)
    pairs = [name for name in result.parameters if name.endswith("lora_a")]
    assert pairs and all(result.parameters[name].shape[0] == 2 for name in pairs)
    np.testing.assert_allclose(result.logits([1, 2, 3], engine="ggml"), merged, atol=1e-3 * np.abs(merged).max())
    lora = Lora(base=str(book_directory / "base.gguf"), rank=2)
    before = toyexp.train(data=Text(path="book.txt"), recipe=lora, engine="ggml",
                          **{**SETTINGS, "lr": 0.0, "steps": 1}, directory="none", quiet=True)  # fmt: skip
    changed = np.abs(result.logits([1, 2, 3], engine="ggml") - before.logits([1, 2, 3], engine="ggml")).max()
    assert changed > 1e-3
    with pytest.raises(UserError, match="leave model out"):
        toyexp.train(model="llama", recipe=Lora(base=str(book_directory / "base.gguf")), quiet=True)


@pytest.mark.parametrize(("keywords", "parts_of_it"), [
    ({"stepss": 3}, ["stepss", "did you mean steps?"]),
    ({"steps": "six"}, ["steps=six"]),
    ({"steps": 0}, ["steps=0", "from 1"]),
    ({"model": Llama}, ["model", "Llama()"]),
    ({"model": "nano"}, ["a preset; use toyexp_models.llama.Llama(d_model=64, n_layers=2, ", "toyexp.run("]),
    ({"model": "small"}, ["model=small", "toyexp_models.llama.Llama(d_model=256, n_layers=6, "]),
    ({"data": "a book\n" * 9000}, ["a book", "...", "toyexp_data.text.Text(path='book.txt')"]),
    ({"engine": 3}, ["engine", "3", "ggml"]),
    ({"engine": "gml"}, ["engine=gml", "did you mean ggml?"]),
    ({"callbacks": "plots"}, ["['default', 'plots']"]),
    ({"model": Llama(d_model=30, n_heads=4)}, ["n_heads"]),
    ({"directory": "first"}, ["already holds a run", "directory=..."]),
    ({"directory": "other", "resume": "first"}, ["directory", "resume=first", "leave directory out"]),
    ({"callbacks": Text(path="book.txt")}, ["['default', 'plots']"]),
    ({"callbacks": [Text, "plots"]}, ["callbacks", "got the class Text", "cosine_2, default, early_stop"]),
    ({"callbacks": [Progress]}, ["callbacks", "Progress()"]),
])  # fmt: skip
def test_bad_objects_are_rejected_with_one_line(trained, keywords, parts_of_it):
    with pytest.raises(UserError) as caught:
        toyexp.train(**{**parts(), **keywords})
    assert all(part in str(caught.value) for part in parts_of_it), caught.value
    assert len(str(caught.value).splitlines()) <= 2


@pytest.mark.parametrize("path", [3, None, [], b"first"])
def test_a_path_that_is_not_a_directory_is_rejected(trained, path):
    calls = [lambda: toyexp.open(path)]
    if path is not None:
        calls += [lambda: toyexp.run(resume=path), lambda: toyexp.sweep("seed=1", directory=path)]
        calls += [lambda: toyexp.train(**parts(), directory=path)]
    for call in calls:
        with pytest.raises(UserError, match="must be a path, got "):
            call()
    with pytest.raises(UserError, match="quiet: must be True or False"):
        toyexp.run(quiet="no")


@pytest.mark.parametrize("name", ["x" * 300, "a\ud800"])
def test_an_impossible_file_name_is_a_user_error_in_every_call(trained, name):
    calls = [
        lambda: toyexp.open(name),
        lambda: toyexp.compare(name),
        lambda: toyexp.run(resume=name),
        lambda: toyexp.run(f"resume={name}"),
        lambda: toyexp.run(*WORDS, name=name),
        lambda: toyexp.run(*WORDS, directory=name),
        lambda: toyexp.sweep(resume=name),
        lambda: toyexp.evaluate(trained, data=name),
    ]
    for call in calls:
        with pytest.raises(UserError) as caught:
            call()
        assert len(str(caught.value).splitlines()) == 1


def test_a_model_is_evaluated_and_runs_are_compared_from_python(trained, book_directory):
    evaluation = toyexp.evaluate(trained, **ON_GGML)
    assert evaluation.loss == pytest.approx(trained.held_out["loss"], abs=1e-6) and evaluation.own
    part = {"data.val_fraction": trained.settings["data.val_fraction"]}
    named = toyexp.evaluate(trained.files["model.gguf"], data="book.txt", **ON_GGML, **part)
    assert evaluation.loss == pytest.approx(named.loss, abs=1e-6)
    assert "first/model.gguf, llama" in str(evaluation).splitlines()[0] and len(evaluation.figures) == 2
    compared = toyexp.compare(trained, "lr=0.01")
    assert [entry.run.path for entry in compared.comparison.entries] == [trained.directory]
    assert "held-out loss" in str(compared) and f"{trained.held_out['loss']:.4f}" in str(compared)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda run: toyexp.evaluate(run, lr=1),
            r"toyexp.evaluate\(...\) lr: cannot be set, because the model comes from its file",
        ),
        (lambda run: toyexp.evaluate(run, lr=1), r"; toyexp.evaluate\(...\) takes model.context"),
        (lambda run: toyexp.evaluate(run, data="nowhere"), "data.path=nowhere: not found"),
        (
            lambda run: toyexp.predict(run, "book.txt"),
            r"try toyexp.open\(...\).generate\(...\), or toyexp.evaluate\(...\)",
        ),
        (lambda run: toyexp.predict(run), "needs images"),
        (lambda run: toyexp.compare(run, metric="mine"), "metric mine: no run here has this metric"),
        (lambda run: toyexp.compare(run, metric=5), "metric 5: no run here has this metric"),
        (lambda run: toyexp.compare("nowhere"), "nowhere"),
        (lambda run: run.generate("a", chat=True), "has no chat template; leave chat out"),
        (lambda run: run.generate("a", system="Be brief."), "system='Be brief.': must be text"),
        (lambda run: run.generate("a", engine="nope"), "engine nope"),
    ],
)
def test_wrong_arguments_are_reported_in_terms_of_the_python_call(trained, call, words):
    with pytest.raises(UserError, match=words) as caught:
        call(trained)
    assert "--" not in str(caught.value) and "toyexp eval" not in str(caught.value).replace("toyexp.eval", "")


def test_logits_take_as_many_ids_as_the_context_and_no_more(trained):
    assert trained.logits([1] * MODEL["context"]).shape[0] == MODEL["context"]
    with pytest.raises(UserError, match="16"):
        trained.logits([1] * (MODEL["context"] + 1))


def test_a_result_can_be_pickled(trained):
    again = pickle.loads(pickle.dumps(trained))
    assert again.directory == trained.directory and again.held_out == trained.held_out
    np.testing.assert_array_equal(again.history.loss, trained.history.loss)


@pytest.mark.parametrize(("method", "message"), [
    ("on_step", "put @hookimpl above it"), ("on_steps", "did you mean on_step"),
    ("on_train_end", "choose one of: .*on_end"),
])  # fmt: skip
def test_a_misspelt_hook_is_named(book_directory, method, message):
    silent = type("Silent", (Callback,), {"name": "silent", method: lambda self, step: None})
    with pytest.raises(UserError, match=rf"Silent\.{method} .*{message}"):
        toyexp.train(**parts(silent()), directory="silent")
    assert not (book_directory / "silent").exists()


@pytest.mark.parametrize("value", [Progress(), SimpleNamespace(), Progress])
def test_a_callback_object_for_run_is_rejected_with_the_call_that_takes_it(value):
    with pytest.raises(UserError, match=r"toyexp\.train\(callbacks=\['default', (Progress|SimpleNamespace)\(\)\]\)"):
        toyexp.run(*WORDS, callbacks=["default", value])


def test_callbacks_are_told_apart_by_their_names(trained):
    class Nameless(Callback):
        """Has none."""

    with pytest.raises(UserError, match="Nameless has no name"):
        toyexp.train(**parts(dataclass(eq=False)(Nameless)()))
    with pytest.raises(UserError, match="two callbacks are named interrupting"):  # neither is left out without a word
        toyexp.train(**parts(Interrupting(at=20), Interrupting(at=30)))


@pytest.mark.parametrize(("call", "reason"), [
    (lambda run: run.logits([[1, 2], [3]]), "all rows must have the same length"),
    (lambda run: run.logits([1.5]), "token ids"),
    (lambda run: run.generate([1.5]), r"token ids \[T\]"),
    (lambda run: run.generate(None), "token ids"),
    (lambda run: run.generate("It", temperature="hot"), "temperature='hot'"),
    (lambda run: run.generate("It", engine=GGMLCPU()), "must be text"),
    (lambda run: run.generate([1], chat=True), "needs a text prompt"),
])  # fmt: skip
def test_a_result_rejects_inputs_that_its_model_cannot_read(trained, call, reason):
    with pytest.raises(UserError, match=reason):
        call(trained)


def test_a_number_that_is_not_finite_is_nan_in_the_history(tmp_path):
    lines = [f'{{"kind": "step", "step": {i + 1}, "loss": {value}, "tokens": 4}}'
             for i, value in enumerate(("1.5", "Infinity", "1" + "0" * 400, "null"))]  # fmt: skip
    (tmp_path / "events.jsonl").write_text("\n".join(lines) + "\n")
    np.testing.assert_array_equal(History.read(tmp_path).loss, [1.5, np.nan, np.nan, np.nan])


def test_only_the_last_samples_are_kept(tmp_path):
    lines = [{"kind": "sample", "step": step, "prompt": "It", "text": " was"} for step in range(5)]
    (tmp_path / "events.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert [sample["step"] for sample in History.read(tmp_path).samples] == [2, 3, 4]


# -- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [
    ["recip=warm"], ["recipe=wram"], ["steps=ten"], ["steps"], ["seed=1,2"], ["engine=nothing"], ["sweep.jobs=3"],
    ["--config-dir=nowhere"], ["model.d_model=30", "model.n_heads=4"], ["resume=nowhere"], ["--nonsense"],
])  # fmt: skip
def test_bad_settings_are_reported_as_on_the_command_line(book_directory, capsys, words):
    assert main(words) == 2
    line = re.sub(r" \(more: toyexp help \w+\)$", "", capsys.readouterr().err.removeprefix("toyexp: error: ").rstrip())
    with pytest.raises(UserError) as caught:
        toyexp.run(*words, quiet=True)
    assert str(caught.value) == line
    assert capsys.readouterr() == ("", "")


def test_arguments_for_another_call_name_the_call_to_use(book_directory):
    for words, reason in ((["-m", "seed=1,2"], "toyexp.sweep"), (["--dry-run"], "toyexp --dry-run"),
                          (["sweep.resume=x"], r"toyexp\.sweep\(resume=DIR\)")):  # fmt: skip
        with pytest.raises(UserError, match=reason):
            toyexp.run(*words)
    with pytest.raises(UserError, match=r"model=.*toyexp\.train"):
        toyexp.run(model=Llama())
    for call in (toyexp.run, toyexp.sweep):
        with pytest.raises(UserError, match="must be text"):
            call({"steps": 3})


def test_keywords_keep_their_values(book_directory):
    keywords = {
        "steps": 100, "lr": 1e-3, "name": "a b", "data.path": "it's \"here\"\\", "resume": None, "x": True, "y": "true",
        "z": "12", "list": ["a", 1, None], "u": np.float32(0.5), "place": Path("a/b c"), "café": "é",
    }  # fmt: skip
    parsed = {
        o.key_or_group: o.value() for o in parse(format_settings({k: v for k, v in keywords.items() if k != "café"}))
    }
    expected = {k: str(v) if isinstance(v, Path) else v for k, v in keywords.items() if k != "café"}
    assert {k: getattr(v, "text", v) for k, v in parsed.items()} == expected
    callbacks = {"default": {}, "plots": {"every": 5}}
    nested = format_settings({
        "model": {"name": "llama", "d_model": 8}, "callbacks": callbacks, "optim": {"groups": {"*[0]": {"lr": 1}}},
    })  # fmt: skip
    assert nested == ["model=llama", "model.d_model=8", "callbacks=[default,plots]", "callbacks.plots.every=5",
                      r"optim.groups={*\[0\]:{lr:1}}"]  # fmt: skip
    assert format_settings({"seed": [1, 2], "callbacks": ["a"]}, swept=True) == ["seed=1,2", "callbacks=[a]"]


# -- many -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def swept(book_directory):
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.redirect_stderr(printed):
        result = toyexp.sweep(
            *WORDS, model=MODEL, seed=[0, 1], **{**SETTINGS, "lr": [0.0, 0.01]}, callbacks=["events"],
            sweep={"isolate": False, "report": False}, directory="swept", quiet=True,
        )  # fmt: skip
    assert printed.getvalue() == ""
    return result


def test_a_sweep_is_a_sequence_of_its_runs_the_best_first(swept):
    assert [row["lr"] for row in swept.table] == [0.01, 0.01, 0.0, 0.0]
    scores = [run.held_out["loss"] for run in swept]
    assert scores[:2] == sorted(scores[:2]) and swept.best.held_out["loss"] == scores[0]
    assert swept.table[0]["mean"] == pytest.approx(np.mean(scores[:2]))
    assert swept.table[0]["deviation"] == pytest.approx(np.std(scores[:2], ddof=1))
    assert [row["loss"] for row in swept.table] == [run.loss for run in swept]
    again = toyexp.open("swept")
    assert again.table == swept.table and len(again) == 4 and again.metric == "held-out loss"
    assert repr(again).splitlines()[0].split() == ["job", "seed", "lr", "held_out_loss", "mean", "deviation",
                                                   "loss", "state", "steps", "seconds"]  # fmt: skip
    assert again._repr_html_().count("<tr>") == 5
    head, *rows = [line.split() for line in repr(again).splitlines()[:5]]
    forms = {"loss": r"\d\.\d{4}", "mean": r"\d\.\d{4}", "deviation": r"\d\.\d{4}", "seconds": r"\d+\.\d"}
    assert all(re.fullmatch(forms[name], row[head.index(name)]) for name in forms for row in rows)
    assert [row[head.index("lr")] for row in rows] == ["0.01", "0.01", "0", "0"]


def test_a_sweep_draws_itself_as_a_picture_that_a_notebook_shows(swept, book_directory):
    pytest.importorskip("matplotlib")
    sheet = toyexp.open("swept").plot()
    picture, style = sheet._repr_png_()
    assert picture.startswith(b"\x89PNG") and style["width"] == 768 and "seeds" in style["alt"]
    assert sheet.write(book_directory / "drawn.svg") and "write(file)" in repr(sheet)
    with pytest.raises(UserError, match=r"drawn.jpg: must end in .png, .svg, .pdf"):
        sheet.write("drawn.jpg")


def test_an_answer_shows_its_printed_lines_in_a_notebook(swept):
    answer = toyexp.compare("swept")
    assert answer._repr_html_() == f"<pre>{html.escape(str(answer))}</pre>"


def test_invalid_jobs_are_listed_and_if_all_are_invalid_an_error_is_raised(book_directory):
    words = ["data=random", "data.vocab=32", "engine=ggml", "eval_every=0", "callbacks=[events]", "sweep.report=false"]
    result = toyexp.sweep(*words, "model.n_heads=2,3", steps=1, model={"d_model": 16, "context": 8, "d_ff": 8},
                        sweep={"isolate": False}, quiet=True)  # fmt: skip
    assert [row["state"] for row in result.table] == ["completed", "refused"] and "n_heads" in result.errors[1]
    with pytest.raises(UserError, match="n_heads"):
        toyexp.sweep(*words, "model.n_heads=3,5", steps=1, model={"d_model": 16}, quiet=True)
    with pytest.raises(UserError, match=r"holds no sweep"):
        toyexp.sweep(resume=book_directory / "first", quiet=True)
    with pytest.raises(UserError, match=r"needs settings, such as toyexp\.sweep\(seed="):
        toyexp.sweep(directory=book_directory / "bare")
    assert not (book_directory / "bare").exists()


def test_interrupting_a_sweep_before_it_begins_is_not_a_user_error(book_directory, monkeypatch):
    monkeypatch.setattr("toyexp.sweeps.runner.Runner.run", lambda runner: 128 + signal.SIGINT)
    with pytest.raises(KeyboardInterrupt, match="SIGINT"):
        toyexp.sweep(*WORDS, seed=[0, 1], quiet=True)


# -- what is left behind in the process -------------------------------------------------------------------------------


AS_IT_WAS = """
import logging, os, random, signal, sys, threading
from pathlib import Path
import hydra
import numpy as np
import toyexp
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra

def state():
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    logs = [(log.level, log.handlers) for log in (logging.getLogger(), logging.getLogger("toyexp"))]
    environment = {key: value for key, value in os.environ.items() if key != "GOMP_SPINCOUNT"}  # which is read once
    return {
        "environment": environment, "here": os.getcwd(), "path": list(sys.path), "threads": threading.active_count(),
        "signals": [signal.getsignal(number) for number in numbers], "logs": repr(logs), "random": random.getstate(),
        "numpy": repr(np.random.get_state()), "groups": sorted(ConfigStore.instance().repo),
    }

words = ["data=random", "data.vocab=32", "engine=ggml", "eval_every=0", "plugins=[beside]"]
sizes = {"d_model": 16, "n_heads": 2, "context": 8, "d_ff": 8}
with hydra.initialize_config_dir(str(Path("app").absolute()), version_base="1.3"):
    before = state()
    for steps in (2, 0):
        try:
            toyexp.run(*words, steps=steps, model=sizes, quiet=True)
        except toyexp.UserError as error:
            print(error)
    after = state()
    for name in before:
        assert before[name] == after[name], (name, before[name], after[name])
    assert GlobalHydra.instance().is_initialized()
    print(hydra.compose("config").thing["_target_"])
assert not GlobalHydra.instance().is_initialized()
print("torch" in sys.modules)
"""


BESIDE = (
    "from dataclasses import dataclass\nfrom toyexp import Callback, hookimpl\n"
    "@dataclass(eq=False)\nclass Beside(Callback):\n    'Another.'\n    name = 'beside'\n"
    "@hookimpl\ndef register_callbacks(register):\n    register(Beside)\n"
)


def test_a_run_leaves_the_process_as_it_was(book_directory):
    """And a person's own Hydra, with files that toyexp's would refuse."""
    (book_directory / "app").mkdir()
    (book_directory / "app" / "config.yaml").write_text("thing:\n  _target_: builtins.dict\n  a: 1\n")
    (book_directory / "beside.py").write_text(BESIDE)
    done = environments.run(sys.executable, "-c", AS_IT_WAS, cwd=book_directory)
    expected = ["steps=0: must be a whole number from 1", "builtins.dict", "False"]
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == expected and done.stderr == ""


def test_environment_variables_that_a_library_reads_once_are_kept(monkeypatch):
    for name in ("CUBLAS_WORKSPACE_CONFIG", "OTHER"):
        monkeypatch.setenv(name, "")  # it is put back afterwards
        monkeypatch.delenv(name)
    with restore_process_state():
        os.environ.update(CUBLAS_WORKSPACE_CONFIG=":4096:8", OTHER="1")
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8" and "OTHER" not in os.environ


def test_calls_compute_under_torchs_defaults_whatever_the_caller_has_set():
    torch = pytest.importorskip("torch")

    def state():
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")
        return torch.get_default_dtype(), torch.get_default_device().type, *modes, torch.get_float32_matmul_precision()

    usual = state()
    try:
        torch.set_default_dtype(torch.float64)
        torch.set_float32_matmul_precision("medium")
        with torch.device("meta"), torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
            before = state()
            with use_torch_defaults(torch):
                assert state() == usual == (torch.float32, "cpu", True, False, False, "highest")
            assert state() == before != usual
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_float32_matmul_precision("highest")


def test_a_run_gives_the_same_numbers_in_any_state_of_torch(book_directory):
    torch = pytest.importorskip("torch")
    words = ["data=text", "data.path=book.txt", "engine=cpu", "engine.threads=1", "callbacks=[events]"]
    losses = []
    for ambient in (False, True):
        with contextlib.ExitStack() as entered:
            if ambient:
                torch.set_default_dtype(torch.float64)
                entered.callback(torch.set_default_dtype, torch.float32)
                torch.set_float32_matmul_precision("medium")
                entered.callback(torch.set_float32_matmul_precision, "highest")
                contexts = [torch.device("meta"), torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad()]
                for context in [*contexts, torch.inference_mode()]:
                    entered.enter_context(context)
            run = toyexp.run(*words, model=MODEL, **SETTINGS, quiet=True)
            losses.append((run.history.loss.tolist(), run.held_out["loss"], run.logits("It was").sum()))
            if ambient:
                assert torch.empty(1).device.type == "meta" and torch.get_default_dtype() is torch.float64
                assert torch.is_autocast_enabled("cpu") and torch.is_inference_mode_enabled()
                assert torch.get_float32_matmul_precision() == "medium"
    assert losses[0] == losses[1]


# The interrupt may come while pathlib reads a directory, which it then leaves to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("call", ["a name that is loaded", "a run"])
def test_an_interrupt_waits_for_the_end_of_an_import(book_directory, call, monkeypatch):
    """Or every later call would fail over the half that was loaded."""
    monkeypatch.syspath_prepend(str(book_directory))
    name = f"slowly_{len(call)}"
    (book_directory / f"{name}.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(0.1)\n" + BESIDE
    )
    (book_directory / "names.py").write_text(f"    from {name} import Beside\n")
    sys.modules["names"] = types.ModuleType("names")
    with pytest.raises(KeyboardInterrupt):
        if call == "a run":
            toyexp.run(*WORDS, "callbacks=[beside]", model=MODEL, **SETTINGS, plugins=[name], quiet=True)
        lazy("names", str(book_directory / "names.py"))[0]("Beside")
        time.sleep(1)
    assert sys.modules[name].Beside.name == "beside"


def test_plugin_modules_of_an_opened_run_are_found_after_a_change_of_directory(trained, book_directory, monkeypatch):
    (book_directory / "of_opening.py").write_text(BESIDE.replace("eside", "eyond"))
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(book_directory))])
    before = list(sys.path)
    assert toyexp.open("first", plugins=["of_opening"]).steps == 8
    assert sys.path == before


def test_an_edited_preset_is_used_by_the_next_run_of_the_same_process(book_directory, monkeypatch):
    presets = shutil.copytree(CONF, book_directory / "presets")
    for module in (beforehand, schema):
        monkeypatch.setattr(module, "CONF", presets)
    for steps in (3, 4):  # more often than what is chosen is composed anew
        (presets / "experiment" / "edited.yaml").write_text(f"# @package _global_\nsteps: {steps}\nlr: 0.5\n")
        for _ in range(3):
            assert beforehand.compose_cached(["experiment=edited"], schema.Source(presets)).steps == steps


def test_runs_of_several_threads_take_turns(book_directory):
    results = []

    def work(seed):
        results.append(toyexp.run(*WORDS, "callbacks=[events]", seed=seed, model=MODEL, **{**SETTINGS, "steps": 2},
                                  quiet=True))  # fmt: skip

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 2, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    losses = sorted((result.settings["seed"], *result.history.loss) for result in results)
    assert len(losses) == 3 and losses[0] == losses[1] != losses[2]


def test_progress_in_a_notebook_is_one_output_that_is_updated(book_directory, monkeypatch, capsys):
    shown = []

    class Handle:
        def update(self, output, raw):
            shown[-1].append(output["text/plain"])

    def display(output, raw, display_id):
        shown.append([output["text/plain"]])
        return Handle()

    shell = types.ModuleType("IPython")
    shell.get_ipython = lambda: types.SimpleNamespace(kernel=None)
    page = types.ModuleType("IPython.display")
    page.display = display
    monkeypatch.setitem(sys.modules, "IPython", shell)
    monkeypatch.setitem(sys.modules, "IPython.display", page)
    toyexp.run(*WORDS, model=MODEL, **SETTINGS)
    printed = capsys.readouterr().out
    assert "step" not in printed.partition("recipe ")[2].partition("\n")[2] and "engine  ggml" in printed
    assert len(shown) == 1 and shown[0][-1].startswith("8/8  loss ") and "held-out" in shown[0][-1]
    shown.clear()
    capsys.readouterr()
    swept = toyexp.sweep(*WORDS, seed=[0, 1], model=MODEL, **{**SETTINGS, "steps": 2},
                         sweep={"isolate": False, "report": False})  # fmt: skip
    assert len(shown) == 1 and shown[0][-1].splitlines()[0] == "2 of 2 done"
    printed = capsys.readouterr().out
    assert "job  overrides" not in printed and "completed" not in printed  # the table is the result's own
    assert swept._repr_html_().count("<tr>") == 3
