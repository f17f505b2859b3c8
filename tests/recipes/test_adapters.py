"""LoRA adapters after their run: evaluated, merged, trained further, and read from PEFT's directories."""

import json
import math
import shutil
from importlib.util import find_spec
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny import batches, write_base

from toyexp import Setup
from toyexp.base.ownership import fingerprint
from toyexp.cli.main import main
from toyexp.formats.gguf.form import read_model
from toyexp.formats.gguf.read import GGUFFile
from toyexp.inference.model_files import find_adapter_file
from toyexp.tokenizers.byte_level import Bytes
from toyexp_models.llama import Llama
from toyexp_recipes.lora import Lora

QUICK = ["data=text", "data.path=book.txt", "engine.threads=1", "batch_size=4", "model.context=12", "lr=0.05",
         "callbacks=[gguf_export,hf_export]", "recipe=lora", "recipe.base=base.gguf"]  # fmt: skip
NEW = ["recipe.targets=[q,k,o,down]", "recipe.rank=3", "recipe.alpha=5", "recipe.init_scale=0.3"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Create a base, a LoRA run on it with checkpoints, and two other models."""
    root = tmp_path_factory.mktemp("adapters")
    (root / "book.txt").write_text("It was a bright cold day in April. " * 200)
    write_base(root / "base.gguf", "llama", tokenizer=Bytes())
    write_base(root / "other.gguf", "llama", tokenizer=Bytes(), d_ff=32)
    write_base(root / "gpt2.gguf", "gpt2", tokenizer=Bytes())
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        assert main([*QUICK, *NEW, "engine=ggml", "steps=6", "eval_every=6", "checkpoint_every=3",
                     "hydra.run.dir=run"]) == 0  # fmt: skip
    return root


@pytest.fixture(autouse=True)
def working_directory(trained, tmp_path, monkeypatch):
    """Change to a directory that links to the files that all tests read."""
    for path in trained.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)


def run_json(capsys, *words, code=0):
    capsys.readouterr()
    assert main([*words, "--json"]) == code, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def run_rejected(capsys, *words):
    capsys.readouterr()
    assert main([*map(str, words)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


def result(directory):
    return json.loads(Path(directory, "result.json").read_text())


def write_changed_peft(directory, change_settings=lambda c: None, change_tensors=lambda t: None):
    """Copy run/adapter-hf to `directory` and change its settings or its arrays."""
    shutil.copytree("run/adapter-hf", directory)
    settings = json.loads(Path(directory, "adapter_config.json").read_text())
    change_settings(settings)
    Path(directory, "adapter_config.json").write_text(json.dumps(settings))
    arrays = load_file(Path(directory, "adapter_model.safetensors"))
    change_tensors(arrays)
    save_file(arrays, Path(directory, "adapter_model.safetensors"))


def read_pairs(path):
    """Return the adapter's tensors and its alpha."""
    with GGUFFile("base.gguf") as base:
        adapter_file = find_adapter_file(Path(path), lambda: read_model(Llama, base))
    with GGUFFile(adapter_file) as file:
        return {name: file.read(name) for name in file.tensors}, file.metadata["adapter.lora.alpha"]


# -- evaluated --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adapter", ["run", "run/adapter.gguf", "run/adapter-hf"])
@pytest.mark.parametrize("engine", ["cpu", "ggml"])
def test_a_base_with_its_adapter_has_the_held_out_loss_of_the_run(capsys, adapter, engine):
    data = [] if adapter == "run" else ["data=text", "data.path=book.txt", "model.context=12", "batch_size=4"]
    report = run_json(capsys, "eval", "base.gguf", "--adapter", adapter, f"engine={engine}", "engine.threads=1", *data)
    assert report["loss"] == pytest.approx(result("run")["eval_loss"], abs=2e-5)
    assert report["own"] is (adapter == "run") and report["adapter"].startswith("run/adapter" if data else "run")
    assert abs(report["loss"] - result("run")["first_eval_loss"]) > 0.05


# -- DoRA -------------------------------------------------------------------------------------------------------------


def test_a_dora_run_writes_a_merged_model_and_pefts_directory_and_resumes_exactly(capsys):
    words = [*QUICK, *NEW, "recipe.dora=true", "engine=ggml", "eval_every=6", "checkpoint_every=3"]
    assert main([*words, "steps=6", "hydra.run.dir=dora"]) == 0
    assert "recipe  lora, DoRA r=3 on q,k,o,down, " in capsys.readouterr().out
    names = {path.name for path in Path("dora").iterdir()}
    assert {"model.gguf", "model-hf", "adapter-hf"} <= names and "adapter.gguf" not in names
    for model in ("dora", "dora/checkpoints/step-6"):
        report = run_json(capsys, "eval", model, "engine=ggml", "engine.threads=1")
        assert report["loss"] == pytest.approx(result("dora")["eval_loss"], abs=1e-5)
    shutil.copytree("dora", "halfway")
    shutil.rmtree("halfway/checkpoints/step-6")
    assert main(["resume=halfway"]) == 0
    assert result("halfway")["eval_loss"] == result("dora")["eval_loss"]
    for adapter, said in (
        ("dora", "name a checkpoint, such as dora/checkpoints/step-6"),
        ("dora/checkpoints/step-6", "is a checkpoint of DoRA, which no adapter.gguf can hold; name it as"),
        ("dora/adapter-hf", "LoRA on linear layers is); name the merged model: dora/model.gguf"),
    ):
        assert said in run_rejected(capsys, "eval", "base.gguf", "--adapter", adapter)
    assert "to make BASE: toyexp export FILE.gguf" in Path("dora/adapter-hf/README.md").read_text()


# -- PEFT's directories ------------------------------------------------------------------------------------------------


def test_pefts_directory_holds_the_tensors_of_the_adapter_file():
    """tests/judge checks that PEFT computes the same with these files."""
    tensors, alpha = read_pairs("run")
    peft_tensors, peft_alpha = read_pairs("run/adapter-hf")
    assert tensors.keys() == peft_tensors.keys() and alpha == peft_alpha == 5
    assert all(np.array_equal(tensors[name], peft_tensors[name]) for name in tensors)


def test_pefts_rank_and_alpha_patterns_and_rslora_are_applied_as_in_peft(capsys):
    """The update of each pair is alpha / r * B A, or with rsLoRA alpha / sqrt(r) * B A."""
    module = "model.layers.1.mlp.down_proj"

    def widen(arrays):
        for part, axis in (("A", 0), ("B", 1)):
            name = f"base_model.model.{module}.lora_{part}.weight"
            arrays[name] = np.concatenate([arrays[name]] * 2, axis)

    patterns = {"rank_pattern": {"layers.1.mlp.down_proj": 6}, "alpha_pattern": {"down_proj": 8}, "use_rslora": True}
    write_changed_peft("many", lambda c: c.update(patterns), widen)
    plain, _ = read_pairs("run")
    patterned, alpha = read_pairs("many")
    for target in {name.rpartition(".")[0] for name in plain}:
        a, b = (plain[f"{target}.lora_{x}"].astype(np.float64) for x in "ab")
        a, b = (np.concatenate([a, a]), np.concatenate([b, b], 1)) if target == "blk.1.ffn_down.weight" else (a, b)
        expected = (8 if "ffn_down" in target else 5) / math.sqrt(len(a)) * b @ a
        ours_a, ours_b = (patterned[f"{target}.lora_{x}"].astype(np.float64) for x in "ab")
        np.testing.assert_allclose(alpha / len(ours_a) * ours_b @ ours_a, expected, rtol=0, atol=1e-6)
    words = ["recipe.adapter=many", "engine=ggml", "steps=1", "eval_every=0", "hydra.run.dir=on"]
    assert main([*QUICK, *words]) == 0, capsys.readouterr().err
    config = json.loads(Path("on/adapter-hf/adapter_config.json").read_text())
    assert (config["r"], config["rank_pattern"]) == (3, {module: 6})
    for rank in (3, 6):  # no single rank fits all pairs
        error = run_rejected(capsys, *QUICK, *words[:2], "steps=1", f"recipe.rank={rank}", "hydra.run.dir=no")
        assert f"recipe.rank={rank}: recipe.adapter=many has rank 3, 6; leave recipe.rank out" in error


@pytest.mark.parametrize(("config", "tensors", "message"), [
    ({"use_dora": True}, {}, "use_dora=True is not supported (only plain LoRA"),
    ({"bias": "all"}, {}, "bias=all is not supported"),
    ({"init_lora_weights": "pissa_niter_4"}, {}, "init_lora_weights=pissa_niter_4 is not supported"),
    ({"modules_to_save": ["lm_head"]}, {}, "modules_to_save"),
    ({"peft_type": "IA3"}, {}, "has peft_type=IA3; only LORA is supported"),
    ({"lora_alpha": 0}, {}, "lora_alpha is 0, expected a number above 0"),
    ({"r": 0}, {}, "adapter_config.json: r is 0, expected a number above 0"),
    ({"r": "four"}, {}, "adapter_config.json: r is four, expected a number above 0"),
    ({"r": 2}, {}, "has rank 3; adapter_config.json has r=2"),
    ({"alpha_pattern": {"(a+)+$": 3}}, {}, "only module names are supported"),
    ({}, {"base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight": np.ones((3, 32), np.float32)},
     "its tensor base_model.model.model.layers.9.self_attn.q_proj"),
    ({}, {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": np.ones((3, 31), np.float32)},
     "blk.0.attn_q.weight is 32 x 32; its lora_a is [3, 31]"),
    ({}, {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": np.full((3, 32), np.nan, np.float32)},
     "contains NaN"),
])  # fmt: skip
def test_an_adapter_that_is_more_than_lora_or_does_not_fit_is_rejected(capsys, config, tensors, message):
    write_changed_peft("odd", lambda c: c.update(config), lambda t: t.update(tensors))
    assert message in run_rejected(capsys, "merge", "base.gguf", "odd", "--out", "m.gguf")
    assert not Path("m.gguf").exists()


def test_a_missing_lora_alpha_has_pefts_default_of_8():
    write_changed_peft("plain", lambda c: c.pop("lora_alpha"))
    assert read_pairs("plain")[1] == 8


@pytest.mark.parametrize(("name", "content", "message"), [
    ("adapter_config.json", b"[]", "adapter_config.json: is not a JSON object"),
    ("adapter_config.json", b"[" * 5000, "adapter_config.json: is not a JSON object"),
    ("adapter_config.json", b'{"lora_alpha": 1' + b"0" * 400 + b"}", "expected a number above 0"),
    ("adapter_config.json", b'{"lora_alpha": "5"}', "lora_alpha is 5, expected a number above 0"),
    ("adapter_model.safetensors", b"", "is not a complete safetensors file"),
    ("adapter_model.safetensors", b"\x02\0\0\0\0\0\0\0{}", "holds no tensors"),
    ("adapter_model.safetensors", None, "not found"),
])  # fmt: skip
def test_a_damaged_directory_is_rejected_in_one_line(capsys, name, content, message):
    shutil.copytree("run/adapter-hf", "odd")
    Path("odd", name).unlink()
    if content is not None:
        Path("odd", name).write_bytes(content)
    assert message in run_rejected(capsys, "eval", "base.gguf", "--adapter", "odd", "engine=ggml")


# -- in a checkpoint --------------------------------------------------------------------------------------------------


def test_a_checkpoint_can_be_used_as_the_adapter_of_its_step(capsys):
    (early, alpha), (last, _), (final, _) = map(read_pairs, ("run/checkpoints/step-3", "run/checkpoints/step-6", "run"))
    assert alpha == 5 and early.keys() == last.keys() == final.keys()
    assert all(np.array_equal(last[name], final[name]) for name in last)
    assert not any(np.array_equal(early[name], final[name]) for name in early)
    path = "run/checkpoints/step-3"
    data = ["engine=ggml", "engine.threads=1", "data=text", "data.path=book.txt"]
    loss_of_checkpoint, loss_of_base_and_adapter = (
        run_json(capsys, "eval", *w, *data)["loss"] for w in ([path], ["base.gguf", "--adapter", path])
    )
    assert loss_of_checkpoint == pytest.approx(loss_of_base_and_adapter, abs=2e-6)
    words = [*QUICK, f"recipe.adapter={path}", "engine=ggml", "eval_every=0", "checkpoint_every=1"]
    assert main([*words, "steps=1", "hydra.run.dir=on"]) == 0
    assert main(["resume=on", "steps=2"]) == 0
    full = [word for word in QUICK if "recipe=" not in word]
    assert main([*full, "recipe=full", "engine=ggml", "steps=1", "checkpoint_every=1", "hydra.run.dir=full"]) == 0
    error = run_rejected(capsys, "merge", "base.gguf", "full/checkpoints/step-1", "--out", "m.gguf")
    assert "is a checkpoint of recipe=full, which trains no adapter; name a run of recipe=lora" in error
    error = run_rejected(capsys, *QUICK, "recipe.adapter=full", "engine=ggml", "steps=1", "hydra.run.dir=no")
    assert "recipe.adapter=full: its run trained no adapter; name a run of recipe=lora, or an adapter.gguf" in error
    both = ["recipe.base=full", "recipe.adapter=full", "engine=ggml", "steps=1", "hydra.run.dir=no"]
    assert "recipe.adapter=full: its run trained no adapter" in run_rejected(capsys, *QUICK[:-1], *both)


# -- merged -----------------------------------------------------------------------------------------------------------


def test_adapters_of_embedding_and_head_with_patterns_are_merged_and_trained_on(capsys):
    targets = "recipe.targets=[token_embd,output,q,down]"
    patterns = ["recipe.rank_pattern={token_embd:5,blk.1.*:2}", "recipe.alpha_pattern={lm_head:9}"]
    steps = ["engine=ggml", "steps=6", "eval_every=6", "checkpoint_every=6"]
    assert main([*QUICK, *NEW, targets, *patterns, *steps, "hydra.run.dir=tables"]) == 0
    assert main(["merge", "base.gguf", "tables/adapter-hf", "--out", "m.gguf"]) == 0
    shutil.copytree("tables/adapter-hf", "saved")  # PEFT also writes the weights of an adapted embedding
    name, arrays = "saved/adapter_model.safetensors", load_file("saved/adapter_model.safetensors")
    save_file({**arrays, "base_model.model.lm_head.base_layer.weight": np.zeros((257, 32), np.float32)}, name)
    error = run_rejected(capsys, "merge", "base.gguf", "saved", "--out", "n.gguf")
    assert "lm_head.base_layer.weight matches no linear layer of this llama; in PEFT, save it with" in error
    with GGUFFile("m.gguf") as ours, GGUFFile("tables/model.gguf") as exported:
        for name in ours.tensors:
            np.testing.assert_allclose(ours.read(name), exported.read(name), rtol=0, atol=1e-6)
    for adapter in ("tables", "tables/adapter-hf", "tables/checkpoints/step-6"):
        words = [f"recipe.adapter={adapter}", "engine=ggml", "steps=1", f"hydra.run.dir=on-{adapter.replace('/', '-')}"]
        assert main([*QUICK, *words]) == 0, capsys.readouterr().err
        further = result(words[-1].partition("=")[2])
        assert further["first_eval_loss"] == pytest.approx(result("tables")["eval_loss"], abs=1e-5)


@pytest.mark.parametrize(("kind", "type_name"), [("f32", "f32"), ("q8_0", "f32"), ("f16", "bf16")])
def test_a_merge_adds_alpha_over_rank_b_a_and_keeps_all_other_bytes(capsys, kind, type_name):
    write_base(Path("w.gguf"), "llama", kind, tokenizer=Bytes())
    report = run_json(capsys, "merge", "w.gguf", "run", "--out", "m.gguf", "--type", type_name)
    base, adapter, merged = (
        {t.name: t for t in gguf.GGUFReader(path).tensors} for path in ("w.gguf", "run/adapter.gguf", "m.gguf")
    )
    numbers = {n: gguf.quants.dequantize(t.data, t.tensor_type).astype(np.float64) for n, t in base.items()}
    assert merged.keys() == base.keys()
    for name, tensor in merged.items():
        if f"{name}.lora_a" not in adapter:
            assert tensor.tensor_type == base[name].tensor_type
            assert np.array_equal(tensor.data, base[name].data)
            continue
        expected = (
            numbers[name] + 5 / 3 * adapter[f"{name}.lora_b"].data.astype(np.float64) @ adapter[f"{name}.lora_a"].data
        )
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        assert tensor.tensor_type.name == type_name.upper()
        np.testing.assert_allclose(values, expected, rtol=2**-8 if type_name == "bf16" else 2**-24, atol=1e-12)
    assert report["changed"] == len(adapter) // 2 == sum(report["before"].values())
    assert {"f32": "F32", "q8_0": "Q8_0", "f16": "F16"}[kind] in report["before"]
    main(["merge", "w.gguf", "run", "--out", "again.gguf", "--type", type_name])
    assert ("changed tensors are now" in capsys.readouterr().out) is (kind != type_name)
    with GGUFFile("w.gguf") as base_file, GGUFFile("m.gguf") as merged_file:
        new_keys = {
            key: merged_file.metadata.pop(key) for key in [*merged_file.metadata] if key not in base_file.metadata
        }
        assert str(dict(base_file.metadata)) == str(dict(merged_file.metadata))
        assert new_keys.pop("general.adapter_digest") and new_keys.pop("general.base_model.0.digest") == fingerprint(
            "w.gguf"
        )
    assert new_keys == {
        "general.name": "w + lora-llama", "general.base_model.count": 1, "general.base_model.0.name": "w",
        "general.description": "w with the LoRA adapter lora-llama of run run merged in",
    }  # fmt: skip
    main(["describe", "m.gguf"])
    assert "about       w with the LoRA adapter lora-llama of run run" in capsys.readouterr().out


def test_a_merged_model_keeps_the_bases_license_but_not_its_run(capsys):
    general = {
        "name": "One", "run_id": "2026-11-21", "step": 7, "config_sha256": "ab", "license": "mit", "version": "2",
        "repo_url": "https://huggingface.co/org/one", "base_model.0.name": "Zero", "tags": ["a"],
        "base_model.0.organization": "Nought",
    }  # fmt: skip
    write_base(Path("w.gguf"), "llama", tokenizer=Bytes(), general=general)
    assert main(["merge", "w.gguf", "run/adapter-hf", "--out", "m.gguf"]) == 0
    with GGUFFile("m.gguf") as file:
        keys = file.metadata
        removed = "run_id", "step", "config_sha256", "repo_url", "base_model.0.organization"
        assert not {f"general.{key}" for key in removed} & keys.keys()
        assert (keys["general.license"], keys["general.tags"]) == ("mit", ["a"])
        assert (keys["general.name"], keys["general.base_model.0.name"]) == ("One + lora-llama", "One")
    capsys.readouterr()
    assert main(["export", "m.gguf", "--type", "hf"]) == 0
    card = Path("m-hf/README.md").read_text()
    assert "\nlicense: mit\nbase_model: org/one\n" in card and "| base | One |" in card and "| run |" not in card
    assert "| description | One with the LoRA adapter lora-llama of run run merged in |" in card


def test_an_adapter_without_a_name_is_named_after_its_directory():
    write_changed_peft("mine-0.5b")  # without the metadata that toyexp writes
    assert main(["merge", "base.gguf", "mine-0.5b", "--out", "m.gguf"]) == 0
    with GGUFFile("m.gguf") as file:
        assert file.text("general.name") == "base + mine-0.5b"
        assert file.text("general.description") == "base with the LoRA adapter mine-0.5b merged in"


def test_a_merged_model_has_the_loss_and_text_of_base_and_adapter(capsys):
    assert main(["merge", "base.gguf", "run/adapter-hf", "--out", "m.gguf"]) == 0
    data = ["data=text", "data.path=book.txt", "model.context=12", "engine=cpu", "engine.threads=1"]
    unmerged = run_json(capsys, "eval", "base.gguf", "--adapter", "run/adapter.gguf", *data)
    assert run_json(capsys, "eval", "m.gguf", *data)["loss"] == pytest.approx(unmerged["loss"], abs=1e-6)
    words = ["--prompt=It", "--tokens=9", "--temperature=0", "--engine"]
    engines = ["ggml:threads=1", *(["llama.cpp:threads=1"] if find_spec("xllamacpp") else [])]
    models = ["m.gguf"], ["base.gguf", "--adapter=run"], ["base.gguf", "--adapter=run/adapter-hf"]
    texts = {run_json(capsys, "generate", *m, *words, engine)["text"] for engine in engines for m in models}
    assert len(texts) == 1


def test_a_merge_takes_the_chat_template_of_the_adapter(capsys):
    reader = gguf.GGUFReader("run/adapter.gguf")
    writer = gguf.GGUFWriter("with.gguf", "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 5)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert main(["merge", "base.gguf", "with.gguf", "--out", "m.gguf"]) == 0
    with GGUFFile("m.gguf") as file:
        assert file.text("tokenizer.chat_template") == "{{ messages[0]['content'] }}"


@pytest.mark.parametrize(("words", "message"), [
    (["base.gguf", "run"], "needs a base, an adapter and --out"),
    (["base.gguf", "--out", "m.gguf"], "needs a base, an adapter and --out"),
    (["base.gguf", "run", "--out", "m.gguf", "--type", "q4_k_m"], "--type q4_k_m"),
    (["base.gguf", "run", "--out", "m.bin"], "must end in .gguf"),
    (["base.gguf", "run", "--out", "away/m.gguf"], "there is no directory away"),
    (["base.gguf", "run", "--out", "base.gguf", "--force"], "--out base.gguf: is the file to be read"),
    (["base.gguf", "run", "--out", "run/adapter.gguf", "--force"], "--out run/adapter.gguf: is the file to be read"),
    (["base.gguf", "run", "--out", "there.gguf"], "replace it with --force"),
    (["base.gguf", "run", "--out", "notes.gguf", "--force"], "already exists and is not a model file"),
    (["base.gguf", "other.gguf", "--out", "m.gguf"], "other.gguf: holds no LoRA adapter (general.type is model)"),
    (["other.gguf", "run", "--out", "m.gguf"], "blk.0.ffn_down.weight is 32 x 32"),
    (["gpt2.gguf", "run", "--out", "m.gguf"], "is an adapter of llama, the model is gpt2"),
    (["gpt2.gguf", "run/adapter-hf", "--out", "m.gguf"], "matches no linear layer of this gpt2"),
    (["run/adapter.gguf", "run", "--out", "m.gguf"], "holds no model (general.type is adapter)"),
    (["base.gguf", "empty", "--out", "m.gguf"], "empty: is a directory without adapter.gguf or adapter_config.json"),
    (["base.gguf", "unfinished", "--out", "m.gguf"], "name a checkpoint, such as unfinished/checkpoints/step-6"),
    (["base.gguf", "none", "--out", "m.gguf"], "none: not found"),
    (["base.gguf", "pickled", "--out", "m.gguf"], "is a pickle, which could run code"),
    (["base.gguf", "book.txt", "--out", "m.gguf"], "book.txt: is not a GGUF file"),
])  # fmt: skip
def test_an_impossible_merge_is_rejected_in_one_line_and_writes_nothing(capsys, words, message):
    shutil.copy("base.gguf", "there.gguf")
    Path("notes.gguf").write_text("mine")
    for folder in ("empty", "pickled", "unfinished"):
        Path(folder).mkdir()
    shutil.copytree("run/checkpoints", "unfinished/checkpoints")
    Path("pickled/adapter_config.json").write_text('{"peft_type": "LORA", "r": 3, "lora_alpha": 5}')
    Path("pickled/adapter_model.bin").touch()
    before = {path.name: path.stat().st_mtime_ns for path in Path().iterdir()}
    assert message in run_rejected(capsys, "merge", *words)
    assert {path.name: path.stat().st_mtime_ns for path in Path().iterdir()} == before


@pytest.mark.parametrize("through_a_link", [False, True])
def test_force_replaces_nothing_that_a_run_wrote(capsys, through_a_link):
    shutil.copytree("run", "own")
    Path("linked").symlink_to("own")
    assert main(["export", "base.gguf", "--type", "q8_0", "--to", "own/mine.gguf"]) == 0
    written = {path: path.read_bytes() for path in Path("own").rglob("*") if path.is_file()}
    run = "linked" if through_a_link else "own"
    export = ["export", "base.gguf", "--force", "--type"]
    for words in (
        ["merge", "base.gguf", "run", "--force", "--out", f"{run}/adapter.gguf"],
        [*export, "q8_0", "--to", f"{run}/adapter.gguf"],
        [*export, "hf", "--to", f"{run}/model-hf"],
        [*export, "safetensors", "--to", f"{run}/adapter-hf/adapter_model.safetensors"],
        [*export, "safetensors", "--to", f"{run}/checkpoints/step-6/state.safetensors"],
    ):
        assert f"{words[-1]}: belongs to the run own; choose another path" in run_rejected(capsys, *words)
    assert "already exists; choose another path, or replace it with --force" in run_rejected(
        capsys, "export", "base.gguf", "--type", "q8_0", "--to", f"{run}/mine.gguf"
    )
    assert {path: path.read_bytes() for path in Path("own").rglob("*") if path.is_file()} == written
    assert main([*export, "f16", "--to", f"{run}/mine.gguf"]) == 0, "a file that the run did not write can be replaced"
    Path("own/written.json").unlink()  # as in a run without exports
    checkpoint = f"{run}/checkpoints/step-6/state.safetensors"
    assert "belongs to the run own" in run_rejected(capsys, *export, "safetensors", "--to", checkpoint)


# -- trained further --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("adapter", "engine"), [("run", "cpu"), ("run/adapter.gguf", "ggml"), ("run/adapter-hf", "ggml")]
)
def test_a_run_on_an_adapter_starts_from_the_adapters_loss(capsys, adapter, engine):
    """Rank, alpha and targets are the adapter's; the export still names the base."""
    words = [f"recipe.adapter={adapter}", f"engine={engine}", "steps=4", "eval_every=4", "hydra.run.dir=on"]
    assert main([*QUICK, *words]) == 0
    assert f"on it {adapter}" in capsys.readouterr().out
    assert result("on")["first_eval_loss"] == pytest.approx(result("run")["eval_loss"], abs=2e-5)
    assert result("on")["eval_loss"] < result("on")["first_eval_loss"]
    before, after = read_pairs("run"), read_pairs("on")
    assert before[1] == after[1] == 5 and {n: a.shape for n, a in before[0].items()} == {
        n: a.shape for n, a in after[0].items()
    }
    with GGUFFile("on/model.gguf") as file:
        assert file.metadata["general.base_model.0.name"] == "base"


def test_a_run_on_an_adapter_resumes_bit_identically_and_not_on_another_adapter(capsys):
    shutil.copy("run/adapter.gguf", "mine.gguf")
    words = [
        *QUICK,
        "recipe.adapter=mine.gguf",
        "recipe.dropout=0.1",
        "engine=ggml",
        "checkpoint_every=2",
        "eval_every=0",
    ]
    assert main([*words, "steps=4", "hydra.run.dir=whole"]) == 0
    assert main([*words, "steps=2", "hydra.run.dir=part"]) == 0
    assert main(["resume=part", "steps=4"]) == 0
    uninterrupted, resumed = read_pairs("whole")[0], read_pairs("part")[0]
    assert all(np.array_equal(uninterrupted[name], resumed[name]) for name in uninterrupted)
    shutil.copy("whole/adapter.gguf", "mine.gguf")
    assert "the contents of mine.gguf changed" in run_rejected(capsys, "resume=part", "steps=6")


def test_a_run_on_an_adapter_has_its_own_dropout():
    with GGUFFile("base.gguf") as file:
        model = read_model(Llama, file)
    for dropout in (0.0, 0.3):
        recipe = Lora(base="base.gguf", adapter="run", dropout=dropout)
        plan = recipe.plan(model, Setup(batches().inputs, rows=2))
        assert {adapter.dropout for adapter in plan.adapters} == {dropout}


def test_an_alpha_that_float32_rounds_equals_the_adapters():
    words = [*QUICK, "engine=ggml", "steps=1", "eval_every=0", "recipe.alpha=0.1"]
    assert main([*words, "hydra.run.dir=first"]) == 0
    assert main([*words, "recipe.adapter=first", "hydra.run.dir=on"]) == 0
    assert read_pairs("on")[1] == read_pairs("first")[1] == np.float32(0.1)


@pytest.mark.parametrize(("words", "message"), [
    ("recipe.adapter=run recipe.rank=8", "recipe.rank=8: recipe.adapter=run has rank 3; leave recipe.rank out"),
    ("recipe.adapter=run recipe.alpha=3", "recipe.alpha=3: recipe.adapter=run has alpha 5; leave recipe.alpha out"),
    ("recipe.adapter=run recipe.targets=[q]", "recipe.targets=[q]: recipe.adapter=run has matrices on blk.0"),
    ("recipe.adapter=run recipe.targets=[q,k,o,down,up]", "has no matrices on blk.0.ffn_up.weight"),
    ("recipe.adapter=run recipe.rslora=true", "recipe.rslora=true: recipe.adapter=run has its own form, ranks"),
    ("recipe.adapter=run recipe.dora=true", "ranks and alpha; leave recipe.dora out"),
    ("recipe.adapter=run recipe.rank_pattern={q:2}", "ranks and alpha; leave recipe.rank_pattern out"),
    ("recipe.adapter=base.gguf", "base.gguf: holds no LoRA adapter"),
    ("recipe.adapter=none.gguf", "none.gguf: not found"),
    ("recipe.adapter=run recipe.base=other.gguf", "blk.0.ffn_down.weight is 32 x 32"),
    ("recipe.adapter=", "recipe.adapter"),
])  # fmt: skip
def test_settings_that_contradict_the_adapter_are_rejected_in_one_line(capsys, words, message):
    assert message in run_rejected(capsys, *QUICK, "engine=ggml", "steps=1", "hydra.run.dir=no", *words.split())
    assert not Path("no").exists()


def test_a_run_prints_rank_and_layers_of_its_adapters(caplog):
    caplog.set_level("INFO", "toyexp")
    assert main([*QUICK, *NEW, "engine=ggml", "steps=1", "hydra.run.dir=printed"]) == 0
    assert "recipe  lora, LoRA r=3 on q,k,o,down, AdamW with bias correction, betas 0.9 and 0.999" in caplog.text
