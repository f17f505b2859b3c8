import numpy as np
import pytest

from toyexp.cli.main import main


def read_samples(run):
    return [(e["step"], e["text"]) for e in run.select("sample")]


def test_the_same_seed_writes_the_same_text_and_another_seed_another(train):
    words = ["callbacks=[events,sample]", "callbacks.sample.every=6"]
    first, same_seed = train(*words, to="first"), train(*words, to="again")
    other_seed = train(*words, "seed=1", to="other")
    assert [step for step, _ in read_samples(first)] == [6, 12]
    assert read_samples(first) == read_samples(same_seed)
    assert read_samples(first) != read_samples(other_seed)
    assert read_samples(first)[0][1] != read_samples(first)[1][1], "two steps must not draw the same numbers"


def test_without_a_prompt_a_sample_begins_with_held_out_text(train):
    run = train("callbacks=[events,sample,progress]", engine="noop")
    (sample,) = run.select("sample")
    assert sample["prompt"] == "the quick brown"
    lines = run.out.partition("  sample\n")[2].splitlines()
    assert lines[0].startswith("    the quick brown")


def test_without_a_prompt_a_sample_of_examples_uses_a_held_out_prompt(train, tmp_path):
    rows = [f'{{"prompt": "say {i}", "completion": " {i}"}}\n' for i in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(rows))
    run = train("data=examples", f"data.path={tmp_path / 'rows.jsonl'}", "callbacks=[events,sample]", engine="noop")
    (sample,) = run.select("sample")
    assert sample["prompt"].startswith("say ") and sample["prompt"][4:].isdecimal()


def test_a_trained_model_writes_its_text(train):
    run = train(
        "callbacks=[cosine,events,sample]", "steps=150", "eval_every=0", "lr=0.02", "batch_size=16",
        "callbacks.sample.prompt='the quick '", "callbacks.sample.temperature=0", "callbacks.sample.tokens=9",
    )  # fmt: skip
    # The corpus is one repeated line, which 150 steps memorise.
    assert read_samples(run) == [(150, "brown fox")]


def test_sampling_changes_no_number_of_the_training(train):
    plain = train("callbacks=[events]", to="plain")
    sampled = train("callbacks=[events,sample]", "callbacks.sample.every=1", to="sampled")
    assert [e["loss"] for e in plain.select("step")] == [e["loss"] for e in sampled.select("step")]


def test_a_prompt_longer_than_the_context_and_an_empty_one_both_work(train):
    long_prompt = train("callbacks=[events,sample]", f"callbacks.sample.prompt={'x' * 100}", to="long", engine="noop")
    empty_prompt = train("callbacks=[events,sample]", "callbacks.sample.prompt=''", to="none", engine="noop")
    assert long_prompt.code == empty_prompt.code == 0
    assert len(read_samples(long_prompt)) == len(read_samples(empty_prompt)) == 1


def test_a_run_that_stops_early_still_ends_with_a_sample(train):
    run = train("callbacks=[events,sample,early_stop]", "lr=0", "eval_every=1", "callbacks.early_stop.patience=2")
    assert run.events[-1]["reason"] == "aborted"
    assert [step for step, _ in read_samples(run)] == [run.events[-1]["final_step"]]


def test_a_prompt_outside_the_vocabulary_is_rejected_before_anything_is_written(train):
    run = train("callbacks=[default,sample]", "data.tokenizer=char", "callbacks.sample.prompt=QUICK")
    assert run.code == 2
    assert "callbacks.sample.prompt=QUICK" in run.err and "'Q'" in run.err and run.err.count("\n") == 1
    assert not run.dir.exists()


def test_data_without_a_tokenizer_is_rejected_before_anything_is_written(train, tmp_path):
    (np.arange(4000, dtype="<i4") % 50).tofile(tmp_path / "ids.bin")
    run = train("data=tokens", f"data.path={tmp_path / 'ids.bin'}", "data.tokenizer=''", "callbacks=[default,sample]")
    assert run.code == 2 and "callbacks.sample needs a tokenizer" in run.err and "~callbacks.sample" in run.err
    assert "set data.tokenizer=" in run.err and not run.dir.exists()


def test_the_error_for_images_does_not_suggest_a_tokenizer(capsys):
    assert main(["data=digits", "model=vit", "recipe=vit_tiny", "callbacks=[default,sample]"]) == 2
    error = capsys.readouterr().err
    assert "~callbacks.sample" in error and "data.tokenizer" not in error


@pytest.mark.parametrize(
    "word",
    [
        "every=-1",
        "top_k=-1",
        "tokens=0",
        "temperature=-0.1",
        "temperature=100",
        "temperature=nan",
        "top_p=0",
        "min_p=2",
    ],
)
def test_invalid_settings_are_rejected(train, word):
    run = train("callbacks=[sample]", f"callbacks.sample.{word}")
    assert run.code == 2 and "callbacks.sample" in run.err and word.partition("=")[0] in run.err
    assert not run.dir.exists()
