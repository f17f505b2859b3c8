"""`toyexp eval` compared with the run that wrote the file."""

import json
import math
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from toyexp.batching.images import held_out_mask
from toyexp.cli.main import main
from toyexp.inference.evaluate import recognise_data
from toyexp.plugins.discovery import load
from toyexp_data.images import Images

BOOK = "It was a bright cold day in April, and the clocks were striking. " * 200
TEXT = ["data=text", "data.path=book.txt", "data.tokenizer=byte", "data.val_fraction=0.2", "model.context=16"]
TINY = ["model.d_model=32", "model.n_layers=1", "engine.threads=1", "batch_size=4", "steps=12", "hydra.run.dir=run"]


@pytest.fixture(autouse=True)
def working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TOYEXP_CACHE", str(tmp_path / "cache"))
    (tmp_path / "book.txt").write_text(BOOK)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Train a run of one step."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "book.txt").write_text(BOOK)
    words = [w.replace("=book.txt", f"={folder}/book.txt") for w in TEXT]
    assert main([*words, *TINY, "engine=ggml", "steps=1", f"hydra.run.dir={folder}/run"]) == 0
    return folder / "run"


def read_result():
    return json.loads(Path("run/result.json").read_text())


def evaluate_export(capsys, *words):
    capsys.readouterr()
    assert main(["eval", "run/model.gguf", "engine.threads=1", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_eval_on_text_has_the_held_out_loss_of_the_run(model, capsys):
    assert main([f"model={model}", *TEXT, *TINY, "engine=cpu"]) == 0
    for engine in ("cpu", "ggml"):
        report = evaluate_export(capsys, f"engine={engine}", "batch_size=4", "data=text", "data.path=book.txt",
                          "data.val_fraction=0.2")  # fmt: skip
        assert report["loss"] == pytest.approx(read_result()["eval_loss"], abs=2e-5)
        assert report["perplexity"] == pytest.approx(math.exp(report["loss"]))
        assert report["bits_per_byte"] == pytest.approx(report["loss"] / math.log(2))  # a token is a byte here


def test_eval_on_images_has_the_held_out_loss_of_the_run(capsys):
    assert main(["recipe=vit_tiny", "model=vit", "data=digits", *TINY, "model.patch=4", "engine=ggml"]) == 0
    report = evaluate_export(capsys, "data=digits", "engine=cpu", "batch_size=4")
    assert report["loss"] == pytest.approx(read_result()["eval_loss"], abs=2e-5)
    assert report["scores"] == pytest.approx(read_result()["eval_scores"])
    assert report["perplexity"] is None


def run_eval(capsys, *words):
    capsys.readouterr()
    assert main(["eval", *words, "engine=ggml", "engine.threads=1", "--json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def test_the_data_option_guesses_the_kind_of_data(trained, capsys):
    shutil.copytree(trained, "run")
    Path("it's a \\'book\\").write_text(Path("book.txt").read_text())
    long = evaluate_export(capsys, "engine=ggml", "data=text", "data.path=book.txt", "data.val_fraction=1")
    short = run_eval(capsys, "--data=it's a \\'book\\", "run/model.gguf")
    assert short == {**long, "path": "it's a \\'book\\"}


def write_chats():
    lines = [{"messages": [{"role": "user", "content": f"{i} + 1?"}, {"role": "assistant", "content": f"{i + 1}!"}]}
             for i in range(30)]  # fmt: skip
    Path("chats.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return [
        "data=examples",
        "data.path=chats.jsonl",
        "data.tokenizer=char",
        "data.val_fraction=0.3",
        "model.context=24",
    ]


def write_photos(folder="photos"):
    for i in range(12):
        path = Path(folder, "ab"[i % 2], f"{i}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((6, 6, 3), 20 * i, np.uint8)).save(path)
    return ["recipe=vit_tiny", "model=vit", "data=images", f"data.path={folder}", "data.image_size=6",
            "data.val_fraction=0.5", "data.color=false"]  # fmt: skip


def test_other_images_are_normalised_with_the_models_mean_and_deviation(capsys):
    """The held-out images are the same, but the other images of the directory are brighter."""
    assert main([*write_photos(), *TINY, "engine=ggml", "steps=1"]) == 0
    paths = sorted(Path("photos").rglob("*.png"), key=lambda p: (p.parent.name, p.name))
    held_out = held_out_mask(np.array(["ab".index(p.parent.name) for p in paths]), 0.5)
    for path, is_held_out in zip(paths, held_out, strict=True):
        other = Path("other", *path.parts[1:])
        other.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, other) if is_held_out else Image.fromarray(np.full((6, 6, 3), 250, np.uint8)).save(other)
    report = run_eval(capsys, "run", "--data", "other", "data.val_fraction=0.5")
    assert report["loss"] == pytest.approx(read_result()["eval_loss"], abs=2e-6)


@pytest.mark.parametrize("color", [True, False])
def test_a_directory_of_images_is_read_at_the_models_image_size(capsys, monkeypatch, color):
    suggest = classmethod(lambda cls, *given, own=Images.suggest_settings: f"data.labels=LABELS.csv {own(*given)}")
    monkeypatch.setattr(Images, "suggest_settings", suggest)  # a placeholder that the user must fill in is skipped
    assert main([*write_photos(), f"data.color={color}", *TINY, "engine=ggml", "steps=1"]) == 0
    shutil.copy("run/model.gguf", "alone.gguf")
    loss_of_file, loss_of_run = (run_eval(capsys, what, "--data", "photos")["loss"] for what in ("alone.gguf", "run"))
    assert loss_of_file == pytest.approx(loss_of_run, abs=1e-6)
    assert main(["eval", "alone.gguf", "data=images", "data.path=photos", "engine=ggml"]) == 2
    error = capsys.readouterr().err
    assert "model.image_size=6: the data has 32; type data.image_size=6 for data=images" in error


def test_of_a_directory_with_a_split_only_the_held_out_part_is_evaluated(capsys):
    words = write_photos("photos/train")
    write_photos("photos/val")
    shutil.rmtree("photos/val/a")
    data = [w.replace("photos/train", "photos") for w in words if "val_fraction" not in w]
    assert main([*data, *TINY, "engine=ggml", "steps=1"]) == 0
    for arguments in ([], ["--data", "photos"]):
        report = run_eval(capsys, "run", *arguments)
        assert (report["targets"], report["own"], report["left_out"]) == (6, True, ["held out: photos/val"])
        assert report["share"] == {"eval_images": 0}
    assert main(["eval", "run", "--data", "photos", "engine=ggml", "engine.threads=1"]) == 0
    output = capsys.readouterr().out
    assert "the run's own; held out: photos/val, 6 held-out targets (data.eval_images=0)" in output


def write_ids():
    np.save("ids.npy", np.arange(600, dtype=np.uint16) % 37)
    return ["data=tokens", "data.path=ids.npy", "model.context=8"]


@pytest.mark.parametrize(
    ("data", "path", "targets"),
    [(write_photos, "photos", 12), (write_chats, "chats.jsonl", None), (write_ids, "ids.npy", 592)],
    ids=["images", "chats", "ids"],
)
def test_data_named_on_the_command_line_is_evaluated_completely(data, path, targets, capsys):
    """The whole data set counts, not only the held-out share."""
    assert main([*data(), *TINY, "engine=ggml", "steps=1"]) == 0
    everything = ["data.eval_batches=1000"] if path != "photos" else []
    report = run_eval(capsys, "run", "--data", path, *everything)
    assert report["share"]["val_fraction"] == 1 and report["targets"] > run_eval(capsys, "run", *everything)["targets"]
    assert targets is None or report["targets"] == targets
    capsys.readouterr()
    assert main([*data(), *TINY, "engine=ggml", "steps=1", "data.val_fraction=1", "hydra.run.dir=none"]) == 2
    assert "data.val_fraction=1.0: leaves nothing to train on" in capsys.readouterr().err and not Path("none").exists()


def test_the_error_names_a_class_that_the_model_does_not_know(capsys):
    assert main([*write_photos(), *TINY, "engine=ggml", "steps=1"]) == 0
    shutil.copytree("photos/a", "other/a")
    shutil.copytree("photos/b", "other/zebra")
    capsys.readouterr()
    assert main(["eval", "run", "--data", "other", "engine=ggml"]) == 2
    error = capsys.readouterr().err
    assert "zebra" in error and "a, b" in error


@pytest.mark.parametrize(
    "data",
    [lambda: TEXT, lambda: [w.replace("=byte", "=char") for w in TEXT], write_chats, write_photos, write_ids],
    ids=["text", "characters", "chats", "images", "ids"],
)
def test_a_run_evaluated_on_its_own_data_has_its_held_out_loss(data, capsys):
    """Other data, settings, context, batch size or tokenizer would give another loss."""
    words = data()
    assert main([*words, *TINY, "engine=ggml", "steps=3"]) == 0
    report = run_eval(capsys, "run")
    assert report["loss"] == pytest.approx(read_result()["eval_loss"], abs=2e-6)
    assert report["own"] and f"data={report['data']}" in words
    capsys.readouterr()
    assert main(["eval", "run", "engine=ggml", "engine.threads=1"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("data"))
    assert report["data"] in line and report["path"] in line and "own" in line


def test_a_lora_run_is_evaluated_with_its_own_context(capsys):
    assert main([*TEXT, *TINY, "engine=ggml", "steps=1", "hydra.run.dir=base"]) == 0
    words = ["data=text", "data.path=book.txt", "model.context=5", "batch_size=4", "steps=2", "engine=ggml"]
    assert main(["recipe=lora", "recipe.base=base", "hydra.run.dir=run", *words]) == 0
    assert run_eval(capsys, "run")["loss"] == pytest.approx(read_result()["eval_loss"], abs=2e-6)


def test_typed_settings_replace_those_of_the_run(trained, capsys):
    shutil.copytree(trained, "run")
    Path("tale.md").write_text("Once upon a time there was a queen. " * 100)
    defaults, changed = (
        run_eval(capsys, "run"),
        run_eval(capsys, "run", "data.val_fraction=0.1", "batch_size=2", "model.context=8"),
    )
    assert changed["own"] is False and changed["targets"] < defaults["targets"]
    other = run_eval(capsys, "run", "--data", "tale.md")  # evaluated completely
    assert (other["data"], other["path"], other["own"]) == ("text", "tale.md", False)
    same_data = run_eval(capsys, "run", "data=text", "data.path=tale.md", "data.val_fraction=1")
    assert {**same_data, "own": False} == other
    assert run_eval(capsys, "run", "data=stdlib", "data.max_mb=0.01")["data"] == "stdlib"


@pytest.mark.parametrize(
    ("path", "kind", "kind_of_input"),
    [("chats.jsonl", "examples", "text"), ("ids.npy", "tokens", "tokens"), ("ids.bin", "tokens", "tokens"),
     ("book.txt", "text", "text"), ("tales", "text", "text"), ("LICENSE", "text", "text"),
     ("photos", "images", "images"), ("both", "text", "text"), ("both", "images", "images"),
     ("flat", "images", "images")],
)  # fmt: skip
def test_the_kind_of_data_follows_from_the_path(path, kind, kind_of_input):
    write_chats(), write_photos(), write_ids()
    Path("tales/of").mkdir(parents=True)
    Path("tales/of/old.md").write_text("Once.")
    shutil.copytree("photos", "both")
    shutil.copytree("photos/a", "flat")  # as used with data.labels
    Path("both/about.md").write_text("What they show.")
    registry = load()
    model = registry.get("model", "vit" if kind_of_input == "images" else "llama")()
    assert recognise_data(Path(path), model, registry) == kind


def test_a_local_plugin_of_the_run_must_be_typed_again(trained, capsys, monkeypatch):
    shutil.copytree(trained, "run")
    config = Path("run/config.yaml")
    config.write_text(config.read_text().replace("plugins: []", "plugins: [colours]"))
    Path("colours.py").write_text("raise SystemExit('it was run')")
    capsys.readouterr()
    assert main(["eval", "run"]) == 2
    assert "plugins=[colours]" in capsys.readouterr().err


def test_a_vit_rejects_data_that_it_cannot_read(capsys):
    assert main([*write_photos(), *TINY, "engine=ggml", "steps=1"]) == 0
    write_chats()
    for words, parts in [
        (["data=stdlib"], ("reads images", "data=stdlib gives tokens")),
        (["--data", "book.txt"], ("data=text", "reads images")),
        (["--data", "chats.jsonl"], ("data=examples", "reads images")),
        (["data=digits"], ("class 0", "a, b")),
        (["data.image_size=8"], ("image_size=6", "8")),
    ]:
        capsys.readouterr()
        assert main(["eval", "run", "engine=ggml", *words]) == 2
        error = capsys.readouterr().err
        assert all(part in error for part in parts) and error.count("\n") == 1


def test_a_model_without_a_tokenizer_rejects_text_and_images(capsys):
    assert main([*write_ids(), *TINY, "engine=ggml", "steps=1"]) == 0
    write_photos()
    for words, message in [
        (["--data", "book.txt"], "data=tokens"),
        (["--data", "photos"], "holds images"),
        (["data=stdlib"], "data=tokens"),
    ]:
        capsys.readouterr()
        assert main(["eval", "run", "engine=ggml", *words]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
    assert main(["eval", "run/model.gguf", "engine=ggml"]) == 2  # the default data is text


def test_a_batch_size_beyond_the_memory_is_rejected_before_allocation(trained, capsys):
    shutil.copytree(trained, "run")
    capsys.readouterr()
    assert main(["eval", "run", "batch_size=1000000000"]) == 2
    error = capsys.readouterr().err
    assert "1000000000 rows" in error and "model.d_model" not in error
    assert main(["eval", "run", "engine=ggml", "batch_size=1000000"]) == 2
    assert "2^31 - 1 logits" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "needs exactly one file"),
        (["run/model.gguf", "--data"], "--data needs a value, such as --data book.txt"),
        (["run/model.gguf", "--data", "none.txt"], "none.txt"),
        (["run/model.gguf", "--data", "https://host/b.txt"], "data.path=https://host/b.txt: is an address"),
        (["run/model.gguf", "--dat", "none.txt"], "did you mean --data?"),
        ([".", "batch_size=1"], "without model.gguf"),
        (["missing.gguf"], "missing.gguf: not found"),
        (["book.txt"], "book.txt"),
        (["run/model.gguf", "more"], "eval run/model.gguf more: needs exactly one file"),
        (["run/model.gguf", "recipe=full"], "the model comes from"),
        (["run/model.gguf", "model.context=17"], "from 1 to 16"),
        (["run/model.gguf", 'model.context="²"'], "from 1 to 16"),
        (["run/model.gguf", "data=digits"], "reads tokens; data=digits gives images"),
        (["run/model.gguf", "batch_size=1,2"], "give one value"),
        (["run/model.gguf", "lr=1"], "eval lr"),
        (["run", "steps=5"], "eval steps"),
        (["run", "experiment=smoke"], "eval experiment"),
        (["run", "hydra.run.dir=x"], "eval hydra.run.dir"),
        (["run", "--data", "book.txt", "data=text"], "cannot be combined with data="),
        pytest.param(  # rejected before the data is opened
            ["run", "--data", "empty.txt", "engine=cpu", "engine.devices=2", "batch_size=3"],
            "engine.devices=2: a batch of 3 rows",
            marks=pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two cores"),
        ),
    ],
)
def test_bad_arguments_are_rejected(words, message, trained, capsys):
    shutil.copytree(trained, "run")
    Path("empty.txt").touch()
    assert main(["eval", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_nan_loss_gives_exit_code_1(capsys, monkeypatch):
    assert main([*TEXT, *TINY, "engine=ggml", "steps=1"]) == 0
    monkeypatch.setattr("toyexp.interfaces.session.Session.evaluate", lambda *_: float("nan"))
    capsys.readouterr()
    assert main(["eval", "run", "engine=ggml", "engine.threads=1", "--json"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["loss"] is None and "its held-out loss is nan" in err


def test_the_data_option_replaces_the_held_out_files_of_the_run(capsys, monkeypatch):
    """The run's own val_path is not read; a typed one is. The run names its held-out file."""
    words = write_chats()
    lines = Path("chats.jsonl").read_text().splitlines()
    Path("val.jsonl").write_text("\n".join(lines[:6]))
    Path("new.jsonl").write_text("\n".join(lines[10:22]))
    words += [*TINY, "data.val_path=val.jsonl", "model.context=48", "engine=ggml", "steps=1"]
    assert main(words) == 0
    assert "; held out: val.jsonl)" in capsys.readouterr().out
    monkeypatch.chdir(Path("run").resolve())  # paths of the run are found from another directory
    assert run_eval(capsys, ".")["own"]
    monkeypatch.chdir("..")
    new, own, typed = (run_eval(capsys, "run", *more) for more in (
        ["--data", "new.jsonl"], [], ["--data", "new.jsonl", "data.val_path=val.jsonl"]
    ))  # fmt: skip
    assert (new["path"], new["own"], own["own"]) == ("new.jsonl", False, True)
    assert new["targets"] == run_eval(capsys, "run/model.gguf", "--data", "new.jsonl")["targets"]
    assert typed["targets"] == own["targets"] != new["targets"]


def test_a_run_with_mixup_is_evaluated_by_class(capsys):
    assert main([*write_photos(), "data.mixup=0.2", *TINY, "engine=ggml", "steps=1"]) == 0
    report = run_eval(capsys, "run")
    assert report["own"] and sum(row["examples"] for row in report["classes"]) == 6
