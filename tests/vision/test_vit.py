"""The ViT from the command line to its files and back."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from float64_models import vit
from lines import drop_repeated_keys
from PIL import Image
from safetensors.numpy import load_file, save_file
from saved_vit import load_vit

from toyexp import Setup, UserError
from toyexp.cli.main import main
from toyexp.formats.gguf.read import GGUFFile
from toyexp.formats.gguf.write import write_model
from toyexp.inference.evaluate import ClassCounts, class_table, count_by_class
from toyexp.testing import RecipeSuite
from toyexp_data.images import Digits
from toyexp_models.vit import ViT
from toyexp_recipes.scratch import VitTiny

TINY = ["model=vit", "recipe=vit_tiny", "data=digits", "model.d_model=32", "model.n_layers=1", "model.d_ff=32",
        "engine=ggml", "engine.threads=1"]  # fmt: skip


class TestVitTiny(RecipeSuite):
    recipe = VitTiny(init_scale=0.5)
    model = ViT(d_model=16, n_layers=2, n_heads=2, d_ff=24)


class TestVitTinyWithoutBiases(RecipeSuite):
    recipe = VitTiny()
    model = ViT(d_model=16, n_layers=2, n_heads=2, d_ff=24, block="rmsnorm_silu")


def train(directory, *settings):
    """Train in this process; return the run's directory and its result."""
    assert main([*TINY, f"hydra.run.dir={directory}", *settings]) == 0
    return directory, json.loads((directory / "result.json").read_text())


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    directory = tmp_path_factory.mktemp("vit") / "run"
    return train(directory, "steps=30", "batch_size=32", "eval_every=15", "callbacks=[default,safetensors_export]")


# -- training ---------------------------------------------------------------------------------------------------------


# tests/engines compares the steps of ggml with those of torch one by one.
@pytest.mark.parametrize(
    ("engine", "steps", "accuracy"),
    [("cpu", 80, 0.9), *(pytest.param(engine, 400, 0.97, marks=pytest.mark.full) for engine in ("cpu", "ggml"))],
)
def test_experiment_vit_digits_reaches_its_accuracy_on_held_out_digits(tmp_path, engine, steps, accuracy, capsys):
    """The accuracy is 97 % with the experiment's steps, and 90 % after a fifth of them."""
    line = ["experiment=vit_digits", f"engine={engine}", "engine.threads=1", f"steps={steps}", f"eval_every={steps}"]
    assert main([*line, f"hydra.run.dir={tmp_path / 'run'}"]) == 0
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["first_eval_scores"]["accuracy"] < 0.3 and result["eval_scores"]["accuracy"] >= accuracy
    assert f"-> {result['eval_scores']['accuracy']:.4f}" in capsys.readouterr().out


@pytest.mark.parametrize("block", ["layernorm_gelu", "rmsnorm_silu"])
def test_a_directory_of_images_trains_to_a_high_accuracy(tmp_path, block, capsys):
    """The classes are horizontal, vertical and diagonal stripes, in any colours and at any size."""
    draw = np.random.default_rng(0)
    for name in ("flat", "upright", "leaning"):
        (tmp_path / "stripes" / name).mkdir(parents=True)
        for i in range(40):
            size = int(draw.integers(20, 50))
            y, x = np.mgrid[:size, :size] / size
            wave = {"flat": y, "upright": x, "leaning": x + y}[name]
            light = np.sin(2 * np.pi * (4 * wave + draw.random()))[..., None] > 0
            pixels = np.where(light, draw.integers(128, 256, 3), draw.integers(0, 128, 3)).astype(np.uint8)
            Image.fromarray(pixels).save(tmp_path / "stripes" / name / f"{i}.png")
    _, result = train(
        tmp_path / "run", "data=images", f"data.path={tmp_path / 'stripes'}", "data.image_size=16",
        "data.augment=shift", "data.val_fraction=0.25", "model.patch=4", f"model.block={block}", "steps=150",
        "batch_size=16", "eval_every=150", "lr=0.003",
    )  # fmt: skip
    assert result["eval_scores"]["accuracy"] >= 0.9
    output = capsys.readouterr().out
    assert (
        "data    images (90 images to train on; 3 classes: flat, leaning, upright; " in output
        and "; images of sizes such as " in output
        and " images/s" in output
        and "tokens" not in output
    )


def test_a_run_records_its_accuracy(trained, capsys):
    directory, result = trained
    events = [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]
    scores = [e["accuracy"] for e in events if e["kind"] == "eval"]
    assert len(scores) == 3 and scores[0] == result["first_eval_scores"]["accuracy"]
    assert scores[-1] == result["eval_scores"]["accuracy"] > scores[0]
    model = events[0]["model"]
    assert (model["arch"], model["image_size"], model["patch"], model["classes"]) == ("vit", 8, 2, 10)
    assert events[0]["optim"]["mode"] == "from_scratch" and events[0]["data"]["held_out_images"] == 359


def test_skipped_images_are_counted_in_the_output_and_the_events(tmp_path, capsys):
    for name in "ab":
        (tmp_path / "images" / name).mkdir(parents=True)
        for i in range(4):
            Image.new("RGB", (8, 8), (60 * i, 0, 0)).save(tmp_path / "images" / name / f"{i}.png")
    (tmp_path / "images" / "a" / "x.png").write_bytes(b"broken")
    line = ["data=images", f"data.path={tmp_path / 'images'}", "data.image_size=8", "data.val_fraction=0.3", "steps=1"]
    assert main([*TINY, *line, "hydra.run.dir=" + str(tmp_path / "refused")]) == 2
    assert "a/x.png: cannot be read as an image" in capsys.readouterr().err
    assert not (tmp_path / "refused").exists()
    run, _ = train(tmp_path / "run", *line, "data.on_error=skip")
    assert (
        "(1 of 9 images skipped (data.on_error), such as a/x.png: cannot be read as an image" in capsys.readouterr().out
    )
    start = json.loads((run / "events.jsonl").read_text().splitlines()[0])
    assert start["data"]["skipped"] == 1 and start["data"]["skipped_files"][0].startswith("a/x.png: ")


def test_a_sweep_compares_accuracies(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["-m", "sweep.isolate=false", *TINY, "steps=1", "callbacks=[]", "data.eval_images=20", "seed=0,1"]) == 0
    assert "held-out loss  held-out accuracy  run" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("recipe=scratch data=stdlib", "model=vit reads images; data=stdlib gives tokens"),
        ("model=llama", "recipe=vit_tiny trains models that read images; model=llama reads tokens"),
        ("model.patch=3", "model.patch=3 does not divide images of 8 pixels"),
        ("model.image_size=16", "model.image_size=16: the data has 8; type data.image_size=16"),
        ("model.channels=3", "model.channels=3: the data has 1"),
        ("model.classes=9", "model.classes=9 is smaller than the data's classes (0..9)"),
        ("model.classes=-1", "model.classes=-1: must be at least 0"),
        ("model.n_heads=5", "model.n_heads=5 does not divide model.d_model=32"),
        ("model.block=rmsnorm_slu", "did you mean rmsnorm_silu?"),
        ("model.norm_eps=0", "model.norm_eps=0.0: must be at least 1e-24"),
        ("recipe.init_scale=0", "recipe.init_scale=0.0: must be above 0"),
        ("data.val_fraction=0", "data.val_fraction=0.0"),
        ("callbacks=[safetensors_export] callbacks.safetensors_export.every=-1", "safetensors_export.every=-1: must"),
    ],
    ids=lambda v: v if " " not in v else "",
)  # fmt: skip
def test_settings_that_do_not_fit_are_rejected(tmp_path, line, words, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(drop_repeated_keys(*TINY, "steps=1", *line.split(" "))) == 2
    assert words in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_more_classes_than_the_data_has_are_allowed(tmp_path):
    directory, _ = train(tmp_path / "run", "model.classes=12", "steps=1", "eval_every=0")
    assert load_vit(str(directory / "model.gguf")).model.classes == 12


def test_init_scale_scales_the_blocks_matrices_and_nothing_else():
    model = ViT(d_model=16, n_layers=2, n_heads=2, d_ff=24).fit(Digits().open(None))
    inputs = model.batches(Digits().open(None), 2, 0).inputs
    full_scale, half_scale = (VitTiny(init_scale=s).plan(model, Setup(inputs, rows=2)) for s in (1.0, 0.5))
    for a, b in zip(full_scale.tensors, half_scale.tensors, strict=True):
        scaled = a.name.startswith("v.blk.") and len(a.shape) == 2
        np.testing.assert_allclose(
            half_scale.initial_values(b), full_scale.initial_values(a) * (0.5 if scaled else 1), rtol=1e-6
        )


# -- files ------------------------------------------------------------------------------------------------------------


def accuracy_in_float64(saved):
    """Return the accuracy on the held-out digits, computed by independent float64 code."""
    images, labels = Digits().open(None).held_out
    pixels = torch.from_numpy((images / 255 - saved.mean) / saved.std)
    weights = {name: torch.from_numpy(np.array(array)).double() for name, array in saved.tensors.items()}
    return float((vit(weights, saved.model, pixels).argmax(-1).numpy() == labels).mean())


@pytest.mark.parametrize("suffix", ["gguf", "safetensors"])
def test_an_exported_file_has_the_accuracy_that_the_run_reported(trained, suffix):
    directory, result = trained
    saved = load_vit(directory / f"model.{suffix}")
    assert saved.classes == tuple("0123456789")
    assert accuracy_in_float64(saved) == pytest.approx(
        result["eval_scores"]["accuracy"], abs=1.5 / 359
    )  # an image with equal logits may be classified differently
    images = Digits().open(None).held_out[0][:5]
    patches = saved.model.batches(Digits().open(None), 359, 0).held_out()[0]["patches"]
    np.testing.assert_allclose(saved.patches(images), patches[:5], atol=1e-5)


def test_eval_counts_the_correct_and_confused_images_of_each_class(trained, capsys):
    directory, result = trained
    saved, (images, labels) = load_vit(directory / "model.gguf"), Digits().open(None).held_out
    pixels = torch.from_numpy((images / 255 - saved.mean) / saved.std)
    weights = {name: torch.from_numpy(np.array(array)).double() for name, array in saved.tensors.items()}
    predictions = vit(weights, saved.model, pixels).argmax(-1).numpy()  # by independent float64 code
    capsys.readouterr()
    assert main(["eval", str(directory), "engine=ggml", "--json"]) == 0
    counts = {count["name"]: count for count in json.loads(capsys.readouterr().out)["classes"]}
    assert list(counts) == list("0123456789")
    matrix = np.array([[count["taken_for"].get(other, 0) for other in counts] for count in counts.values()])
    matrix += np.diag([count["right"] for count in counts.values()])
    expected = np.zeros((10, 10), int)
    np.add.at(expected, (labels, predictions), 1)
    assert np.abs(matrix - expected).sum() <= 2  # an image with equal logits may be classified differently
    assert [count["examples"] for count in counts.values()] == expected.sum(1).tolist()
    assert np.trace(matrix) / 359 == pytest.approx(result["eval_scores"]["accuracy"])
    assert all([*count["taken_for"].values()] == sorted(count["taken_for"].values())[::-1] for count in counts.values())
    assert main(["eval", str(directory), "engine=ggml"]) == 0
    lines = capsys.readouterr().out.splitlines()
    row = next(line.split() for line in lines if line.startswith("8 "))
    assert row[1:3] == [str(counts["8"]["examples"]), f"{counts['8']['right'] / counts['8']['examples']:.1%}"]


def test_of_many_classes_the_table_shows_those_with_most_mistakes():
    rng, count = np.random.default_rng(0), 30
    targets = np.repeat(np.arange(count - 1), 4).astype(np.int32)  # no example of the last class
    logits = np.eye(count)[targets] + 0.0
    logits[targets == 7] = np.eye(count)[8]
    logits[targets == 5, :] = np.eye(count)[rng.permutation(4) + 20]
    weights = np.ones(len(targets), np.float32)
    weights[0] = 0  # padding of the batch
    batch = {"x": logits, "targets": targets, "weights": weights}
    counts = count_by_class(lambda b: b["x"], [batch, batch], ["x"], ["first"])
    assert (counts[0].name, counts[0].examples, counts[1].name, counts[-1].examples) == ("first", 6, "1", 0)
    assert counts[7].taken_for == {"8": 8} and counts[7].right == 0
    lines = class_table(counts)
    assert len(lines) == 22 and "29 classes" in lines[-1]
    assert [line.split()[0] for line in lines[1:3]] == ["5", "7"] and "8 (8)" in lines[2]
    assert "20 (2), 21 (2), 22 (2), 23 (2)" in lines[1]


def test_a_table_of_classes_counts_omitted_classes_and_escapes_names():
    mistakes = {"cat": 5, "dog\x1b[31m": 4, "elk": 3, "fox": 2, "gnu": 1}
    counts = [ClassCounts(str(number), 4, 4, {}) for number in range(19)]
    lines = class_table([*counts, ClassCounts("a\nb", 20, 5, mistakes)])
    assert [line.split()[0] for line in lines] == ["class", *map(str, range(19)), r"a\nb"]  # in the model's order
    assert lines[-1].endswith(r"25.0%  cat (5), dog\x1b[31m (4), elk (3), 2 more")


def test_gguf_and_safetensors_hold_the_same_model(trained):
    directory, _ = trained
    from_gguf, from_safetensors = (load_vit(directory / f"model.{suffix}") for suffix in ("gguf", "safetensors"))
    assert from_gguf.model == replace(
        from_safetensors.model, norm_eps=from_gguf.model.norm_eps
    )  # GGUF rounds it to float32
    assert from_gguf.model.norm_eps == pytest.approx(from_safetensors.model.norm_eps)
    assert from_gguf.classes == from_safetensors.classes and from_gguf.tensors.keys() == from_safetensors.tensors.keys()
    assert all(np.array_equal(from_gguf.tensors[name], from_safetensors.tensors[name]) for name in from_gguf.tensors)
    np.testing.assert_allclose(from_gguf.mean, from_safetensors.mean, rtol=1e-6)


def test_gguf_py_reads_the_keys_that_the_documentation_lists(trained):
    reader = gguf.GGUFReader(trained[0] / "model.gguf")
    metadata = {name: field.contents() for name, field in reader.fields.items() if name.startswith("toyexp-vit.")}
    page = (Path(__file__).parents[2] / "docs" / "pages" / "guides" / "outputs.md").read_text()
    for key, value in metadata.items():
        assert f"`{key.removeprefix('toyexp-vit.')}`" in page, key
        assert value is not None
    assert metadata["toyexp-vit.classes"] == list("0123456789") and metadata["toyexp-vit.block"] == "layernorm_gelu"
    assert reader.fields["general.architecture"].contents() == "toyexp-vit"
    assert not [name for name in reader.fields if name.startswith("tokenizer.")]


@pytest.mark.parametrize(("kind", "limit"), [("f16", 0.01), ("bf16", 0.02), ("q8_0", 0.02)])
def test_smaller_types_keep_the_accuracy_within_a_limit(trained, tmp_path, kind, limit):
    saved = load_vit(trained[0] / "model.gguf")
    keys = {"classes": list(saved.classes), "image_mean": saved.mean.tolist(), "image_std": saved.std.tolist()}
    write_model(tmp_path / "small.gguf", saved.model, saved.tensors, None, kind, data=keys)
    assert accuracy_in_float64(load_vit(tmp_path / "small.gguf")) == pytest.approx(
        accuracy_in_float64(saved), abs=limit
    )
    with GGUFFile(tmp_path / "small.gguf") as file:
        assert file.tensors["v.position_embd.weight"].type == "F32"
        assert file.tensors["v.blk.0.attn_q.weight"].type == kind.upper()


def write_broken_gguf(source, target, **changes):
    """Copy the file with some of its keys changed, or removed if the new value is None."""
    with GGUFFile(source) as file:
        writer = gguf.GGUFWriter(target, changes.pop("architecture", "toyexp-vit"))
        for key, value in {**file.metadata, **{f"toyexp-vit.{k}": v for k, v in changes.items()}}.items():
            if not key.startswith("toyexp-vit.") or value is None:
                continue
            if isinstance(value, str):
                writer.add_string(key, value)
            elif isinstance(value, int):
                writer.add_uint32(key, value)
            elif isinstance(value, float):
                writer.add_float32(key, value)
            else:
                writer.add_array(key, list(value) if isinstance(value, list) else value.tolist())
        for name in file.tensors:
            writer.add_tensor(name, file.read(name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architecture": "llama"}, "has no llama.image_size"),
        ({"patch_size": None}, "has no toyexp-vit.patch_size"),
        ({"patch_size": "two"}, "toyexp-vit.patch_size is two"),
        ({"patch_size": 3}, "model.patch=3 does not divide images of 8 pixels"),
        ({"block": "banana"}, "toyexp-vit.block is banana"),
        ({"block": "rmsnorm_silu"}, "has no toyexp-vit.attention.layer_norm_rms_epsilon"),
        ({"block_count": 2**31 - 1}, "claims 2147483647 blocks, and has 24 tensors"),
        ({"block_count": 2}, "lacks the tensor v.blk.1."),
        ({"class_count": 11}, "v.head.weight has the shape [10, 32], its keys say [11, 32]"),
        ({"attention.head_count": 5}, "does not divide"),
        ({"image_mean": [0.1, 0.2]}, "image_mean must list a number for each of 1 channels"),
        ({"image_std": ["a"]}, "image_std must list a number"),
        ({"classes": None}, "toyexp-vit.classes must name at most 10 classes"),
        ({"classes": [str(i) for i in range(11)]}, "toyexp-vit.classes must name at most 10 classes"),
    ],
    ids=str,
)
def test_the_error_names_a_missing_or_wrong_key(trained, tmp_path, changes, words):
    with pytest.raises(UserError) as error:
        load_vit(write_broken_gguf(trained[0] / "model.gguf", tmp_path / "bad.gguf", **changes))
    assert str(error.value).startswith(f"{tmp_path / 'bad.gguf'}: ") and words in str(error.value)


def test_safetensors_that_hold_no_model_are_rejected(trained, tmp_path):
    save_file({"x": np.zeros(3, np.float32)}, tmp_path / "other.safetensors")
    with pytest.raises(UserError, match="was not written by toyexp"):
        load_vit(tmp_path / "other.safetensors")
    save_file({"x": np.zeros(3, np.float32)}, tmp_path / "list.safetensors", {"gguf": "[]"})
    with pytest.raises(UserError, match=r"list\.safetensors: its metadata gguf is not a JSON object"):
        load_vit(tmp_path / "list.safetensors")
    (tmp_path / "broken.safetensors").write_bytes(b"\xff" * 40)
    with pytest.raises(UserError, match=r"broken\.safetensors: is not a complete safetensors file"):
        load_vit(tmp_path / "broken.safetensors")
    with pytest.raises(UserError, match=r"missing\.safetensors: not found"):
        load_vit(tmp_path / "missing.safetensors")
    shutil.copy(trained[0] / "model.safetensors", tmp_path / "cut.safetensors")
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "cut.safetensors").read_bytes()[:-100])
    with pytest.raises(UserError, match=r"cut\.safetensors: tensor .* bytes after the end"):
        load_vit(tmp_path / "cut.safetensors")


def test_a_language_models_safetensors_have_the_tensors_of_its_gguf(tmp_path):
    (tmp_path / "text.txt").write_text("a quick brown fox " * 200)
    line = ["data=text", f"data.path={tmp_path / 'text.txt'}", "data.tokenizer=byte", "steps=2", "engine=ggml",
            "engine.threads=1", "callbacks=[gguf_export,safetensors_export]",
            "callbacks.safetensors_export.every=1"]  # fmt: skip
    assert main([*line, f"hydra.run.dir={tmp_path / 'run'}"]) == 0
    stored = load_file(tmp_path / "run" / "model.safetensors")
    with GGUFFile(tmp_path / "run" / "model.gguf") as file:
        assert stored.keys() == file.tensors.keys()
        assert all(np.array_equal(stored[name], file.read(name)) for name in stored)
    earlier = load_file(tmp_path / "run" / "model-1.safetensors")
    assert not np.array_equal(earlier["output.weight"], stored["output.weight"])
