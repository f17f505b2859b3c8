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
    """Runs in this process; returns the run's directory and its result."""
    assert main([*TINY, f"hydra.run.dir={directory}", *settings]) == 0
    return directory, json.loads((directory / "result.json").read_text())


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    directory = tmp_path_factory.mktemp("vit") / "run"
    return train(directory, "steps=30", "batch_size=32", "eval_every=15", "callbacks=[default,safetensors_export]")


# -- training ---------------------------------------------------------------------------------------------------------


# That ggml takes the same steps from the same bytes is held step by step in tests/engines.
@pytest.mark.parametrize(
    ("engine", "steps", "share"),
    [("cpu", 80, 0.9), *(pytest.param(engine, 400, 0.97, marks=pytest.mark.full) for engine in ("cpu", "ggml"))],
)
def test_vit_digits_reads_digits_it_has_not_seen(tmp_path, engine, steps, share, capsys):
    """97 of 100 as it stands, and 90 after a fifth of its steps."""
    line = ["experiment=vit_digits", f"engine={engine}", "engine.threads=1", f"steps={steps}", f"eval_every={steps}"]
    assert main([*line, f"hydra.run.dir={tmp_path / 'run'}"]) == 0
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["first_eval_scores"]["accuracy"] < 0.3 and result["eval_scores"]["accuracy"] >= share
    assert f"-> {result['eval_scores']['accuracy']:.4f}" in capsys.readouterr().out


@pytest.mark.parametrize("block", ["layernorm_gelu", "rmsnorm_silu"])
def test_a_folder_of_images_of_ones_own_trains(tmp_path, block, capsys):
    """Stripes that lie, stand or lean, in any colours and at any size."""
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
    shown = capsys.readouterr().out
    assert (
        "data    images (90 images to train on; 3 classes: flat, leaning, upright; images of " in shown
        and " images/s" in shown
        and "tokens" not in shown
    )


def test_what_a_run_says_and_records_of_its_accuracy(trained, capsys):
    directory, result = trained
    events = [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]
    scores = [e["accuracy"] for e in events if e["kind"] == "eval"]
    assert len(scores) == 3 and scores[0] == result["first_eval_scores"]["accuracy"]
    assert scores[-1] == result["eval_scores"]["accuracy"] > scores[0]
    model = events[0]["model"]
    assert (model["arch"], model["image_size"], model["patch"], model["classes"]) == ("vit", 8, 2, 10)
    assert events[0]["optim"]["mode"] == "from_scratch" and events[0]["data"]["held_out_images"] == 359


def test_skipped_images_are_counted_where_a_person_looks(tmp_path, capsys):
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
def test_what_does_not_fit_is_refused(tmp_path, line, words, capsys, monkeypatch):
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
    one, half = (VitTiny(init_scale=s).plan(model, Setup(inputs, rows=2)) for s in (1.0, 0.5))
    for a, b in zip(one.tensors, half.tensors, strict=True):
        scaled = a.name.startswith("v.blk.") and len(a.shape) == 2
        np.testing.assert_allclose(half.initial_values(b), one.initial_values(a) * (0.5 if scaled else 1), rtol=1e-6)


# -- files ------------------------------------------------------------------------------------------------------------


def accuracy(saved):
    """Of the digits that were held out, by float64 code of its own."""
    images, labels = Digits().open(None).held_out
    pixels = torch.from_numpy((images / 255 - saved.mean) / saved.std)
    weights = {name: torch.from_numpy(np.array(array)).double() for name, array in saved.tensors.items()}
    return float((vit(weights, saved.model, pixels).argmax(-1).numpy() == labels).mean())


@pytest.mark.parametrize("suffix", ["gguf", "safetensors"])
def test_a_file_alone_gives_the_accuracy_that_the_run_reported(trained, suffix):
    directory, result = trained
    saved = load_vit(directory / f"model.{suffix}")
    assert saved.classes == tuple("0123456789")
    assert accuracy(saved) == pytest.approx(
        result["eval_scores"]["accuracy"], abs=1.5 / 359
    )  # a tie may fall otherwise
    images = Digits().open(None).held_out[0][:5]
    patches = saved.model.batches(Digits().open(None), 359, 0).held_out()[0]["patches"]
    np.testing.assert_allclose(saved.patches(images), patches[:5], atol=1e-5)


def test_eval_says_how_often_each_class_is_right_and_what_it_is_taken_for(trained, capsys):
    directory, result = trained
    saved, (images, labels) = load_vit(directory / "model.gguf"), Digits().open(None).held_out
    pixels = torch.from_numpy((images / 255 - saved.mean) / saved.std)
    weights = {name: torch.from_numpy(np.array(array)).double() for name, array in saved.tensors.items()}
    chosen = vit(weights, saved.model, pixels).argmax(-1).numpy()  # by float64 code of its own
    capsys.readouterr()
    assert main(["eval", str(directory), "engine=ggml", "--json"]) == 0
    found = {one["name"]: one for one in json.loads(capsys.readouterr().out)["classes"]}
    assert list(found) == list("0123456789")
    matrix = np.array([[one["taken_for"].get(other, 0) for other in found] for one in found.values()])
    matrix += np.diag([one["right"] for one in found.values()])
    wanted = np.zeros((10, 10), int)
    np.add.at(wanted, (labels, chosen), 1)
    assert np.abs(matrix - wanted).sum() <= 2  # a tie may fall otherwise
    assert [one["examples"] for one in found.values()] == wanted.sum(1).tolist()
    assert np.trace(matrix) / 359 == pytest.approx(result["eval_scores"]["accuracy"])
    assert all([*one["taken_for"].values()] == sorted(one["taken_for"].values())[::-1] for one in found.values())
    assert main(["eval", str(directory), "engine=ggml"]) == 0
    lines = capsys.readouterr().out.splitlines()
    row = next(line.split() for line in lines if line.startswith("8 "))
    assert row[1:3] == [str(found["8"]["examples"]), f"{found['8']['right'] / found['8']['examples']:.1%}"]


def test_of_many_classes_those_with_most_mistakes_are_shown():
    rng, count = np.random.default_rng(0), 30
    targets = np.repeat(np.arange(count - 1), 4).astype(np.int32)  # nothing of the last class
    logits = np.eye(count)[targets] + 0.0
    logits[targets == 7] = np.eye(count)[8]
    logits[targets == 5, :] = np.eye(count)[rng.permutation(4) + 20]
    weights = np.ones(len(targets), np.float32)
    weights[0] = 0  # which only fills the batch
    batch = {"x": logits, "targets": targets, "weights": weights}
    found = count_by_class(lambda b: b["x"], [batch, batch], ["x"], ["first"])
    assert (found[0].name, found[0].examples, found[1].name, found[-1].examples) == ("first", 6, "1", 0)
    assert found[7].taken_for == {"8": 8} and found[7].right == 0
    lines = class_table(found)
    assert len(lines) == 22 and "29 classes" in lines[-1]
    assert [line.split()[0] for line in lines[1:3]] == ["5", "7"] and "8 (8)" in lines[2]
    assert "20 (2), 21 (2), 22 (2), 23 (2)" in lines[1]


def test_a_table_of_classes_counts_what_it_leaves_out_and_shows_names_as_text():
    others = {"cat": 5, "dog\x1b[31m": 4, "elk": 3, "fox": 2, "gnu": 1}
    few = [ClassCounts(str(number), 4, 4, {}) for number in range(19)]
    lines = class_table([*few, ClassCounts("a\nb", 20, 5, others)])
    assert [line.split()[0] for line in lines] == ["class", *map(str, range(19)), r"a\nb"]  # 20, in the model's order
    assert lines[-1].endswith(r"25.0%  cat (5), dog\x1b[31m (4), elk (3), 2 more")


def test_both_files_hold_the_same(trained):
    directory, _ = trained
    one, two = (load_vit(directory / f"model.{suffix}") for suffix in ("gguf", "safetensors"))
    assert one.model == replace(two.model, norm_eps=one.model.norm_eps)  # GGUF rounds it to float32
    assert one.model.norm_eps == pytest.approx(two.model.norm_eps)
    assert one.classes == two.classes and one.tensors.keys() == two.tensors.keys()
    assert all(np.array_equal(one.tensors[name], two.tensors[name]) for name in one.tensors)
    np.testing.assert_allclose(one.mean, two.mean, rtol=1e-6)


def test_gguf_py_reads_the_keys_the_documentation_lists(trained):
    reader = gguf.GGUFReader(trained[0] / "model.gguf")
    found = {name: field.contents() for name, field in reader.fields.items() if name.startswith("toyexp-vit.")}
    page = (Path(__file__).parents[2] / "docs" / "pages" / "guides" / "outputs.md").read_text()
    for key, value in found.items():
        assert f"`{key.removeprefix('toyexp-vit.')}`" in page, key
        assert value is not None
    assert found["toyexp-vit.classes"] == list("0123456789") and found["toyexp-vit.block"] == "layernorm_gelu"
    assert reader.fields["general.architecture"].contents() == "toyexp-vit"
    assert not [name for name in reader.fields if name.startswith("tokenizer.")]


@pytest.mark.parametrize(("kind", "most"), [("f16", 0.01), ("bf16", 0.02), ("q8_0", 0.02)])
def test_smaller_types_keep_the_accuracy(trained, tmp_path, kind, most):
    saved = load_vit(trained[0] / "model.gguf")
    keys = {"classes": list(saved.classes), "image_mean": saved.mean.tolist(), "image_std": saved.std.tolist()}
    write_model(tmp_path / "small.gguf", saved.model, saved.tensors, None, kind, data=keys)
    assert accuracy(load_vit(tmp_path / "small.gguf")) == pytest.approx(accuracy(saved), abs=most)
    with GGUFFile(tmp_path / "small.gguf") as file:
        assert file.tensors["v.position_embd.weight"].type == "F32"
        assert file.tensors["v.blk.0.attn_q.weight"].type == kind.upper()


def broken_gguf(source, target, **changes):
    """A copy of the file with some of its keys changed, or left out where None."""
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
def test_a_file_that_lacks_something_says_what(trained, tmp_path, changes, words):
    with pytest.raises(UserError) as error:
        load_vit(broken_gguf(trained[0] / "model.gguf", tmp_path / "bad.gguf", **changes))
    assert str(error.value).startswith(f"{tmp_path / 'bad.gguf'}: ") and words in str(error.value)


def test_safetensors_of_something_else_say_so(trained, tmp_path):
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


def test_a_language_models_safetensors_hold_what_its_gguf_holds(tmp_path):
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
