"""Arrays that objectives compute before training: their values, the cache, resumed runs and commands."""

import dataclasses
import json
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from float64_models import FORWARD
from tiny import MODELS, write_base

import toyexp
from toyexp import UserError
from toyexp.base.formatting import format_bytes
from toyexp.base.user_paths import cache_dir
from toyexp.cli.main import main
from toyexp.formats.gguf.read import GGUFFile
from toyexp.tokenizers.byte_level import BPE, Bytes
from toyexp.training import precompute
from toyexp.training.precompute import PrecomputedBatches
from toyexp_data.preference import Preference as Pairs
from toyexp_data.text import Text
from toyexp_models.llama import Llama
from toyexp_objectives.distil import Distil
from toyexp_objectives.preference import Preference
from toyexp_recipes.base import Full
from toyexp_recipes.lora import Lora
from toyexp_recipes.scratch import Scratch
from toyexp_torch.engines import TorchCPU

WORDS = ["red", "green", "blue", "dog", "cat", "house", "tree", "sun", "moon", "river"]
NOTE = "note    objective=preference: computing reference for each row before training"


@pytest.fixture(autouse=True)
def work(tmp_path, monkeypatch):
    """Write a base with a byte tokenizer and a file of 12 pairs, and use an empty cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TOYEXP_CACHE", str(tmp_path / "cache"))
    write_base(tmp_path / "base.gguf", "llama", tokenizer=Bytes(), context=64)
    draw, lines = np.random.default_rng(0), []
    for _ in range(12):
        words = draw.choice(WORDS, 3).tolist()
        pair = {"prompt": " ".join(words), "chosen": " ".join(sorted(words)), "rejected": " ".join(words[::-1])}
        lines.append(json.dumps(pair))
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
    return tmp_path


def train(directory, recipe=Full, engine="cpu", **settings):
    recipe = Lora(base="base.gguf", targets=["q"]) if recipe is Lora else recipe(base="base.gguf")
    pairs = Pairs(path="pairs.jsonl", val_fraction=0.25)
    parts = {"data": pairs, "objective": Preference(), "steps": 6, "lr": 1e-3, "batch_size": 4, "eval_every": 3}
    where = {} if "resume" in settings else {"directory": directory}
    return toyexp.train(recipe=recipe, engine=engine, **{**parts, **where, **settings})


def losses(result):
    return result.history["loss"].tolist()


def cached():
    return sorted(cache_dir().glob("precomputed-*"))


@pytest.mark.parametrize("recipe", [Lora, Full])
@pytest.mark.parametrize("engine", ["cpu", "ggml"])
def test_a_preference_run_starts_at_ln_2_without_margins(recipe, engine):
    result = train("run", recipe, engine)
    held_out = result.history.held_out
    assert (held_out["loss"][0], held_out["margin"][0]) == pytest.approx((np.log(2), 0), abs=1e-5)
    assert held_out["accuracy"][0] == 0.5  # each pair is a tie
    assert held_out["margin"][-1] > held_out["margin"][0]


def test_the_speed_of_a_preference_run_counts_the_tokens_of_completions(work):
    pair = json.dumps({"prompt": "red", "chosen": "blue", "rejected": "dog"})
    (work / "pairs.jsonl").write_text(f"{pair}\n" * 12)
    train("run", steps=1)
    events = [json.loads(line) for line in (work / "run" / "events.jsonl").read_text().splitlines()]
    step = next(event for event in events if event["kind"] == "step")
    assert step["tokens"] == 2 * (5 + 4)  # two pairs; an end token follows each completion


def test_references_are_the_log_probabilities_of_the_base_in_float64(work, monkeypatch):
    seen, change = [], PrecomputedBatches._change
    monkeypatch.setattr(PrecomputedBatches, "_change", lambda *args: seen.append(change(*args)) or seen[-1])
    train("run")
    with GGUFFile(work / "base.gguf") as file:
        weights = {name: torch.from_numpy(file.read(name)).double() for name in file.tensors}
    model = dataclasses.replace(MODELS["llama"], vocab=Bytes().vocab, context=64)
    assert len(seen) >= 6
    for batch in seen:
        logits = FORWARD["llama"](weights, model, torch.from_numpy(batch["tokens"]).long())
        targets = torch.from_numpy(batch["targets"]).long()[..., None]
        log_probs = logits.log_softmax(-1).gather(-1, targets)[..., 0]
        expected = (log_probs * torch.from_numpy(batch["mask"])).sum(-1).numpy()
        np.testing.assert_allclose(batch["reference"], expected, rtol=2e-5)


def test_a_second_run_reads_the_cache_and_a_damaged_cache_is_computed_again(capsys):
    first = train("first")
    assert NOTE in capsys.readouterr().out
    (path,) = cached()
    assert losses(train("second")) == losses(first)
    assert NOTE not in capsys.readouterr().out
    for damaged in (b"", path.read_bytes()[:-40], path.read_bytes()[:200] + bytes(60) + path.read_bytes()[260:]):
        path.write_bytes(damaged)
        again = train(f"damaged_{len(damaged)}")
        assert NOTE in capsys.readouterr().out and losses(again) == losses(first)
    write_base(path.parents[1] / "base.gguf", "llama_tied_bias", tokenizer=Bytes(), context=64)
    train("other")
    assert NOTE in capsys.readouterr().out and len(cached()) == 2


def test_other_weights_models_and_engines_have_caches_of_their_own():
    """With the reference of another model the loss before training would not be ln 2."""
    sizes, pairs = (
        {"d_model": 32, "n_layers": 1, "n_heads": 2, "context": 64},
        Pairs(path="pairs.jsonl", tokenizer="byte"),
    )
    for seed, base, dtype in ((0, 1e4, "float32"), (1, 1e4, "float32"), (0, 50.0, "float32"), (0, 1e4, "float64")):
        result = toyexp.train(
            model=Llama(**sizes, rope_base=base), recipe=Scratch(), data=pairs, objective=Preference(beta=100.0),
            engine=TorchCPU(threads=1, dtype=dtype), model_seed=seed, steps=1, eval_every=1, batch_size=4,
            directory=f"run_{seed}_{base}_{dtype}",
        )  # fmt: skip
        assert result.history.held_out["loss"][0] == pytest.approx(np.log(2), abs=1e-3)
    assert len(cached()) == 4


def test_a_teacher_with_other_weights_in_the_same_file_is_computed_again(work):
    teacher, losses = work / "teacher.gguf", []
    (work / "book.txt").write_text(" ".join(np.random.default_rng(0).choice(WORDS, 4000)))
    parts = {"recipe": Full(base="base.gguf"), "data": Text(path="book.txt"), "batch_size": 2, "steps": 1}
    for kind in ("f32", "q4_0", "f32"):
        write_base(teacher, "llama", kind, tokenizer=Bytes(), context=64)
        objective, directory = Distil(str(teacher), top_k=5, hard=0), f"run_{len(losses)}"
        result = toyexp.train(objective=objective, engine="cpu", eval_every=0, directory=directory, **parts)
        losses.append(result.history["loss"][0])
    assert losses[0] == losses[2] != losses[1] and len(cached()) == 2


def test_a_run_whose_teacher_has_changed_is_not_resumed_and_the_message_says_so(work):
    (work / "book.txt").write_text(" ".join(np.random.default_rng(0).choice(WORDS, 4000)))
    parts = {"recipe": Full(base="base.gguf"), "data": Text(path="book.txt"), "batch_size": 2, "eval_every": 0}
    for directory in ("run", None):
        write_base(work / "teacher.gguf", "llama", "q4_0" if directory else "f32", tokenizer=Bytes(), context=64)
        where = {"directory": directory, "steps": 1} if directory else {"resume": "run", "steps": 2}
        settings = {"objective": Distil("teacher.gguf"), "checkpoint_every": 1, **where, **parts}
        with nullcontext() if directory else pytest.raises(UserError, match=r"contents of the teacher changed"):
            toyexp.train(engine="cpu", **settings)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda x: x * np.nan, "reference contains NaN or infinity"),
        (lambda x: x[:, None], r"reference is \[4, 1\], expected \[4\]"),
    ],
)
def test_arrays_of_a_wrong_shape_or_without_numbers_name_the_objective(spoil, message, monkeypatch):
    compute = Preference.precompute
    monkeypatch.setattr(Preference, "precompute", lambda *given: {"reference": spoil(compute(*given)["reference"])})
    with pytest.raises(UserError, match=rf"^objective=preference: {message}"):
        train("run")


@pytest.mark.parametrize(("steps", "accumulate", "count"), [(2, 1, 8), (2, 2, 8), (200, 1, 18)])
def test_memory_is_needed_for_the_rows_of_the_steps_but_at_most_of_an_epoch(steps, accumulate, count, monkeypatch):
    words = [*SETTINGS, f"steps={steps}", f"optim.accumulate={accumulate}", "checkpoint_every=0"]
    monkeypatch.setattr(precompute, "available_bytes", lambda: 4 * count - 1)
    with pytest.raises(
        UserError, match=f"too little memory: reference of {count} rows need {format_bytes(4 * count)},"
    ):
        toyexp.run(*words, directory="small")
    monkeypatch.setattr(precompute, "available_bytes", lambda: 4 * count)
    toyexp.run(*words, "steps=1" if steps == 200 else f"steps={steps}", directory="large")


def test_a_run_without_a_writable_cache_trains(work, monkeypatch):
    expected = losses(train("first"))
    (work / "file").write_text("")
    monkeypatch.setenv("TOYEXP_CACHE", str(work / "file"))
    assert losses(train("second")) == expected


@pytest.mark.parametrize("recipe", [Lora, Full])
def test_a_resumed_run_compares_with_the_weights_before_training(recipe):
    callbacks = ["constant", "events"]
    whole = train("whole", recipe, callbacks=callbacks)
    train("begun", recipe, steps=3, callbacks=callbacks)
    for path in cached():
        path.unlink()
    resumed = train(None, recipe, resume="begun", callbacks=callbacks)
    assert losses(resumed) == losses(whole) and resumed.held_out == whole.held_out


SETTINGS = (
    "recipe=full", "recipe.base=base.gguf", "data=preference", "data.path=pairs.jsonl", "objective=preference",
    "data.val_fraction=0.25", "steps=4", "batch_size=4", "eval_every=2", "engine=cpu",
)  # fmt: skip


def test_stacked_and_accumulated_runs_read_the_references_of_their_rows():
    alone = toyexp.run(*SETTINGS, "lr=1e-3", directory="alone")
    split = toyexp.run(*SETTINGS, "lr=1e-3", "optim.accumulate=2", directory="split")
    assert split.history["loss"] == pytest.approx(alone.history["loss"], rel=1e-5)
    swept = toyexp.sweep(*SETTINGS, "sweep.launcher=stacked", lr=[1e-3, 2e-3], directory="swept")
    assert len(swept) == 2
    losses = [result.held_out["loss"] for result in swept.runs]
    assert any(loss == pytest.approx(alone.held_out["loss"], rel=1e-5) for loss in losses)


def test_commands_that_train_compute_references_and_eval_says_why_it_cannot(capsys):
    main(["parity", *SETTINGS[:-2], "engine=cpu,ggml", "lr=1e-3"])
    assert NOTE in capsys.readouterr().out
    main(["bench", *SETTINGS, "--no-memory", "--steps=2", "--rounds=1"])
    main([*SETTINGS, "--dry-run"])
    toyexp.run(*SETTINGS, directory="run")
    capsys.readouterr()
    assert main(["eval", "run"]) == 2
    assert "objective=preference: its loss compares the model with another one" in capsys.readouterr().err


def test_distillation_with_top_k_runs_without_the_teacher_and_needs_forward(work):
    teacher = str(work / "base.gguf")
    (work / "book.txt").write_text(" ".join(np.random.default_rng(0).choice(WORDS, 4000)))
    parts = {"recipe": Full(base=teacher), "data": Text(path="book.txt"), "batch_size": 2, "steps": 3, "eval_every": 3}
    first = toyexp.train(directory="run", objective=Distil(teacher, top_k=5, hard=0), engine="cpu", **parts)
    assert first.history["loss"][0] > 0  # the student is the teacher, but learns 5 of its tokens
    everything = Distil(teacher, top_k=257, hard=0)
    equal = toyexp.train(directory="all", objective=everything, engine="cpu", **parts)
    assert equal.history["loss"][0] == pytest.approx(0, abs=1e-5)
    for bad, message in (
        (Distil(teacher, kind="jsd", top_k=5), "needs kind=forward"),
        (Distil(teacher, top_k=999), "the teacher has 257 tokens"),
        (Distil(teacher, top_k=-1), "must be at least 0"),
    ):
        with pytest.raises(UserError, match=message):
            toyexp.train(engine="cpu", directory="bad", objective=bad, **parts)


def test_a_teacher_whose_ids_mean_other_tokens_is_rejected(work):
    write_base(
        work / "teacher.gguf", "llama", tokenizer=BPE([*Bytes().pieces[1:], Bytes().pieces[0]], [], 0), context=64
    )
    (work / "book.txt").write_text(" ".join(np.random.default_rng(0).choice(WORDS, 4000)))
    with pytest.raises(UserError, match=r"ids of the data mean other tokens in teacher.gguf; add data.tokenizer="):
        toyexp.train(
            recipe=Full(base="base.gguf"), data=Text(path="book.txt"), objective=Distil("teacher.gguf"), directory="run"
        )
    assert main(["export", "teacher.gguf", "--type", "safetensors", "--to", "bare.safetensors"]) == 0
    with pytest.raises(
        UserError, match=r"bare.safetensors has no tokenizer, .*; name the teacher's GGUF file or its run"
    ):
        toyexp.train(
            recipe=Full(base="base.gguf"),
            data=Text(path="book.txt"),
            objective=Distil("bare.safetensors"),
            directory="r",
        )


def test_a_teacher_of_another_kind_of_data_is_named(work):
    message = r"objective=distil: base.gguf reads tokens; data=digits gives images; name another teacher"
    with pytest.raises(UserError, match=message):
        toyexp.train("vit", recipe="vit_tiny", data="digits", objective=Distil("base.gguf"), directory="run")


def test_a_base_without_a_tokenizer_reads_text_only_with_the_tokenizer_of_a_file(work):
    (work / "book.txt").write_text(" ".join(np.random.default_rng(0).choice(WORDS, 4000)))
    assert main(["export", "base.gguf", "--type", "safetensors", "--to", "bare.safetensors"]) == 0
    parts = {"recipe": Full(base="bare.safetensors"), "engine": "cpu", "batch_size": 2, "steps": 1, "eval_every": 0}
    with pytest.raises(UserError, match=r"recipe.base=bare.safetensors: has no tokenizer.* data.tokenizer=MODEL"):
        toyexp.train(data=Text(path="book.txt", tokenizer="byte"), directory="run", **parts)
    assert toyexp.train(data=Text(path="book.txt", tokenizer="base.gguf"), directory="run", **parts).steps == 1


def test_pairs_that_are_all_held_out_leave_nothing_to_train_on(work):
    with pytest.raises(UserError, match=r"data\.val_fraction=1\.0: leaves nothing to train on"):
        train("run", data=Pairs(path="pairs.jsonl", val_fraction=1.0))


def test_the_metrics_of_an_objective_choose_checkpoints_and_trials():
    best = toyexp.run(*SETTINGS, "checkpoint_every=2", "checkpoint_best=margin", directory="best")
    assert best.held_out["margin"] > 0
    search = ["sweep.search=random", "sweep.trials=2", "sweep.metric=accuracy", "lr=interval(1e-4,1e-3)"]
    assert len(toyexp.sweep(*SETTINGS, *search, directory="searched")) == 2
    with pytest.raises(UserError, match=r"sweep.metric=kl: .*accuracy.*margin"):
        toyexp.sweep(*SETTINGS, *search[:2], "sweep.metric=kl", search[-1], directory="other")
