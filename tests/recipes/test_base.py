"""Runs that start from a GGUF model: they take its architecture, sizes and tokenizer, or reject it."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from gguf import GGUFWriter
from tiny import MODELS, split_gguf, write_base

from toyexp import TensorSpec
from toyexp.base.errors import UserError
from toyexp.base.ownership import fingerprint
from toyexp.cli.main import main
from toyexp.formats.gguf.form import gguf_form, read_model
from toyexp.formats.gguf.open_model import find_model_class
from toyexp.formats.gguf.read import GGUFFile
from toyexp.formats.gguf.tokenizer import read_tokenizer
from toyexp.formats.gguf.write import Writer, write_model
from toyexp.tokenizers.byte_level import Bytes
from toyexp_models.gpt2 import GPT2
from toyexp_models.llama import Gemma, Llama, Qwen2, Qwen3
from toyexp_models.olmo import Olmo2

QUICK = ["data=text", "data.path=book.txt", "engine=cpu", "engine.threads=1", "steps=2", "batch_size=4",
         "model.context=12"]  # fmt: skip


@pytest.fixture(autouse=True)
def working_directory(tmp_path, tmp_path_factory, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.txt").write_text("It was a bright cold day in April. " * 200)
    monkeypatch.setenv("TOYEXP_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


def run(directory, *words):
    assert main([*QUICK, f"hydra.run.dir={directory}", *words]) == 0
    return json.loads((directory / "result.json").read_text())


def tensors(path):
    with GGUFFile(path) as file:
        return {name: file.read(name) for name in file.tensors}


# -- whole runs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama_tied_bias", "gpt2"])
def test_recipe_full_starts_from_the_loss_of_an_export(tmp_path, name):
    model = write_base(tmp_path / "base.gguf", name, tokenizer=Bytes())
    first = run(tmp_path / "first", "recipe=full", "recipe.base=base.gguf", "lr=0.01")
    with GGUFFile(tmp_path / "first" / "model.gguf") as file:
        assert read_model(type(model), file) == model
    second = run(tmp_path / "same", "recipe=full", "recipe.base=first", "lr=0")
    assert second["first_eval_loss"] == second["eval_loss"] == pytest.approx(first["eval_loss"], abs=1e-6)
    weights, weights_after = tensors(tmp_path / "first" / "model.gguf"), tensors(tmp_path / "same" / "model.gguf")
    assert all(np.array_equal(weights[n], weights_after[n]) for n in weights)


def test_recipe_full_can_freeze_the_embeddings(tmp_path):
    write_base(tmp_path / "base.gguf", "gpt2", tokenizer=Bytes())
    run(tmp_path / "run", "recipe=full", "recipe.base=base.gguf", "recipe.train_embeddings=false")
    before, after = tensors(tmp_path / "base.gguf"), tensors(tmp_path / "run" / "model.gguf")
    unchanged = {n for n in before if np.array_equal(before[n], after[n])}
    assert unchanged == {"token_embd.weight", "position_embd.weight"}


def test_a_lora_run_writes_an_adapter_and_a_merged_model_and_can_be_repeated(tmp_path):
    write_base(tmp_path / "base.gguf", "gpt2", tokenizer=Bytes(), context=20)
    digest = hashlib.sha256((tmp_path / "base.gguf").read_bytes()).hexdigest()
    words = ["recipe=lora", "recipe.base=base.gguf", "recipe.targets=[qkv]", "recipe.rank=2", "recipe.dropout=0.1"]
    first = run(tmp_path / "one", *words)
    assert hashlib.sha256((tmp_path / "base.gguf").read_bytes()).hexdigest() == digest
    facts = json.loads((tmp_path / "one" / "events.jsonl").read_text().splitlines()[0])
    assert facts["model"]["arch"] == "gpt2" and facts["run_id"]
    assert yaml.safe_load((tmp_path / "one" / "config.yaml").read_text())["name"] == "lora-gpt2"
    before, merged = tensors(tmp_path / "base.gguf"), tensors(tmp_path / "one" / "model.gguf")
    pair = tensors(tmp_path / "one" / "adapter.gguf")
    assert merged.keys() == before.keys() and merged["position_embd.weight"].shape[0] == 20
    for name, array in before.items():
        a, b = (pair.get(f"{name}.lora_{x}") for x in "ab")
        np.testing.assert_allclose(merged[name], array if a is None else array + b @ a, atol=1e-7)
    again = ["--config-path", "one", "--config-name", "config", f"hydra.run.dir={tmp_path / 'two'}"]
    assert main(again) == 0
    assert json.loads((tmp_path / "two" / "result.json").read_text())["eval_loss"] == first["eval_loss"]


def test_a_lora_run_can_export_only_the_adapter_at_regular_steps(tmp_path):
    write_base(tmp_path / "base.gguf", "llama", tokenizer=Bytes())
    run(tmp_path / "run", "recipe=lora", "recipe.base=base.gguf", "callbacks.gguf_export.merged=false",
        "callbacks.gguf_export.every=1")  # fmt: skip
    assert sorted(p.name for p in (tmp_path / "run").glob("*.gguf")) == ["adapter-1.gguf", "adapter.gguf"]


def test_ranks_can_be_swept(tmp_path, capsys):
    write_base(tmp_path / "base.gguf", "llama", tokenizer=Bytes())
    words = ["recipe=lora", "recipe.base=base.gguf", "recipe.rank=1,2", f"hydra.sweep.dir={tmp_path / 'sweep'}"]
    assert main(["-m", "sweep.isolate=false", *QUICK, *words]) == 0
    files = sorted((tmp_path / "sweep").rglob("adapter.gguf"))
    assert [tensors(f)["blk.0.attn_q.weight.lora_a"].shape[0] for f in files] == [1, 2]


def test_a_run_and_its_directory_are_named_after_the_base_model(tmp_path, capsys):
    """By default lora adapts all linear layers of the blocks."""
    write_base(tmp_path / "base.gguf", "gpt2", tokenizer=Bytes())
    words = [*QUICK, "recipe=lora", "recipe.base=base.gguf", "engine=ggml", "steps=1", "eval_every=0"]
    assert main(words) == 0
    (directory,) = (tmp_path / "outputs").glob("*/*")
    assert directory.parent.name == "lora-gpt2"
    with GGUFFile(directory / "adapter.gguf") as file:
        assert {name.split(".")[2] for name in file.tensors} == {"attn_qkv", "attn_output", "ffn_up", "ffn_down"}
    assert main([*words, "resume=auto"]) == 0
    assert "is complete, 1 of 1 steps" in capsys.readouterr().out
    assert main(["-m", "sweep.isolate=false", *words, "seed=1,2", "hydra.sweep.dir=sweep"]) == 0
    assert {p.name for p in (tmp_path / "sweep").iterdir() if p.is_dir()} >= {"0-lora-gpt2", "1-lora-gpt2"}


def test_a_chat_uses_the_template_that_the_adapter_was_trained_with(tmp_path, capsys):
    write_base(tmp_path / "base.gguf", "llama", tokenizer=Bytes(), context=40)
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    (tmp_path / "chats.jsonl").write_text("\n".join([json.dumps({"messages": turns})] * 4))
    words = ["recipe=lora", "recipe.base=base.gguf", "engine=ggml", "steps=1", "model.context=40", "eval_every=0"]
    run(tmp_path / "chats", *words, "data=examples", "data.path=chats.jsonl")
    run(tmp_path / "text", *words)
    chat = ["--chat", "--prompt", "Hi", "--tokens", "1", "--engine", "ggml:threads=1"]
    capsys.readouterr()
    assert main(["generate", "base.gguf", "--adapter", "chats/adapter.gguf", *chat, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["template"] == "chats/adapter.gguf"
    assert bytes(report["prompt_ids"]) == b"user:\nHi\nassistant:\n"  # the prompt of a learned answer
    assert main(["generate", "chats", *chat]) == 0
    assert "chat template of chats/model.gguf" in capsys.readouterr().err
    assert main(["generate", "base.gguf", "--adapter", "text/adapter.gguf", *chat]) == 2
    assert "has no chat template" in capsys.readouterr().err


# -- bases that are rejected ------------------------------------------------------------------------------------------


def write_bare_gguf(path, arch, tensors=("token_embd.weight",), **general):
    writer = GGUFWriter(path, arch)
    for key, value in general.items():
        writer.add_string(f"general.{key}", value)
    for name in tensors:
        writer.add_tensor(name, np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("recipe=lora", "recipe=lora needs a model file to start from: add recipe.base=model.gguf"),
        ("recipe=full", "recipe=full needs a model file to start from: add recipe.base=model.gguf"),
        ("recipe=lora recipe.base=nowhere.gguf", "nowhere.gguf: not found"),
        ("recipe=lora recipe.base=book.txt", "recipe.base=book.txt: is not a GGUF file"),
        ("recipe=lora recipe.base=adapter.gguf", "adapter.gguf: holds no model (general.type is adapter)"),
        (
            "recipe=full recipe.base=other.gguf",
            "other.gguf: its architecture is mamba; choose one of: arcee, gemma, ",
        ),
        ("recipe=full recipe.base=bare.gguf", "bare.gguf: has no llama."),
        ("recipe=lora recipe.base=base.gguf recipe.rnak=4", "did you mean recipe.rank?"),
        ("recipe=lora recipe.base=base.gguf recipe.rank=0", "recipe.rank=0: must be at least 1"),
        ("recipe=lora recipe.base=base.gguf recipe.rank=99", "use recipe.rank=32 or less"),
        ("recipe=lora recipe.base=base.gguf recipe.targets=[attn_w]", "did you mean attn_"),
        ("recipe=lora recipe.base=base.gguf recipe.targets={q:1}", "recipe.targets={q:1}"),
        ("recipe=full recipe.base=${nope}", "${nope}, which does not exist"),
        ("recipe=full recipe.base=base.gguf model.d_model=64", "a llama with d_model=32; leave model.d_model out"),
        ("recipe=full recipe.base=base.gguf model=gpt2", "takes the model from base.gguf, a llama; leave model out"),
        (
            "recipe=full recipe.base=base.gguf model.context=13",
            "has a context of 12 tokens; use model.context=12 or less",
        ),
        ("recipe=full recipe.base=base.gguf data.tokenizer=bpe data.bpe_vocab=300", "leave data.tokenizer out"),
        ("recipe=full recipe.base=base.gguf data=digits", "model=llama reads tokens"),
    ],
)
def test_an_impossible_base_or_setting_is_rejected_with_a_short_error(tmp_path, capsys, words, message):
    write_base(tmp_path / "base.gguf", "llama", tokenizer=Bytes())
    write_bare_gguf(tmp_path / "adapter.gguf", "llama", type="adapter")
    write_bare_gguf(tmp_path / "other.gguf", "mamba")
    write_bare_gguf(tmp_path / "bare.gguf", "llama")
    (tmp_path / "book.txt").write_text("".join(f"It was {i} o'clock on a bright cold day. " for i in range(900)))
    quick = QUICK[2:] if "data=digits" in words else QUICK
    assert main([*quick, *words.split(" ")]) == 2
    err = capsys.readouterr().err
    assert message in err and len(err.splitlines()) <= 2, err
    assert not (tmp_path / "outputs").exists()


@pytest.mark.parametrize("kind", ["f32", "q8_0"])
@pytest.mark.parametrize(
    "words",
    [
        "recipe=full engine=cpu engine.threads=1",
        "recipe=lora engine=cpu engine.threads=1 engine.packed=true",
        "recipe=lora engine=ggml engine.threads=1",
    ],
)
def test_a_base_with_nan_weights_is_rejected_with_the_tensors_name(tmp_path, capsys, words, kind):
    """This holds for weights read as float32, packed, or mapped in place."""
    write_base(tmp_path / "base.gguf", "llama", kind, tokenizer=Bytes(), spoil="blk.1.attn_v.weight")
    assert main([*QUICK, "recipe.base=base.gguf", *words.split(" ")]) == 2
    err = capsys.readouterr().err
    assert err.startswith("toyexp: error: recipe.base=base.gguf: blk.1.attn_v.weight contains NaN or infinity (more: ")
    assert not (tmp_path / "outputs").exists()


def test_a_donor_with_a_nan_embedding_is_rejected_before_a_directory_is_created(tmp_path, capsys):
    write_base(tmp_path / "donor.gguf", "llama", tokenizer=Bytes(), spoil="token_embd.weight")
    assert main([*QUICK, "recipe=warm", "recipe.donor=donor.gguf"]) == 2
    assert "donor.gguf: token_embd.weight contains NaN" in capsys.readouterr().err
    assert not (tmp_path / "outputs").exists()


def test_a_split_base_trains_as_a_single_file(tmp_path):
    """Each part holds one tensor; torch reads the parts, ggml maps them."""
    write_base(tmp_path / "base.gguf", "llama", "q8_0", tokenizer=Bytes())
    paths = split_gguf(tmp_path / "base.gguf")
    words = ["recipe.targets=[q,down]", "steps=3", "lr=0.01"]
    for engine in ("cpu", "ggml"):
        adapters = []
        for base in ("base.gguf", paths[0].name):
            directory = tmp_path / f"{engine}-{len(adapters)}"
            run(directory, "recipe=lora", f"recipe.base={base}", f"engine={engine}", *words)
            adapters.append(tensors(directory / "adapter.gguf"))
        assert all(np.array_equal(adapters[0][n], adapters[1][n]) for n in adapters[0])


def test_an_export_names_its_base_model(tmp_path):
    write_base(tmp_path / "first.gguf", "llama", tokenizer=Bytes())
    writer = Writer()
    with GGUFFile(tmp_path / "first.gguf") as file:
        details = {"general.license": "apache-2.0", "general.name": "Small One", "general.organization": "Someone"}
        for key, value in {**file.metadata, **details}.items():
            writer.add(key, value, file.kinds.get(key))
        for t in file.tensors.values():
            writer.add_bytes(t.name, t.shape, t.type, [file.read_raw(t.name).ravel()])
        writer.save(tmp_path / "base.gguf")
    run(tmp_path / "run", "recipe=lora", "recipe.base=base.gguf", "name=mine")
    for name in ("model.gguf", "adapter.gguf"):
        with GGUFFile(tmp_path / "run" / name) as file:
            general = {k.removeprefix("general."): v for k, v in file.metadata.items() if k.startswith("general.")}
        assert general["name"] == "mine" and general["license"] == "apache-2.0"
        assert {k: v for k, v in general.items() if k.startswith("base_model")} == {
            "base_model.count": 1,
            "base_model.0.name": "Small One",
            "base_model.0.organization": "Someone",
            "base_model.0.digest": fingerprint(tmp_path / "base.gguf"),
        }


@pytest.mark.parametrize("name", ["llama_tied_bias", "qwen2", "qwen3", "gemma", "gpt2"])
def test_a_run_on_an_export_starts_from_the_loss_of_that_step(tmp_path, name):
    """Only the first held-out loss is equal; later ones differ, as AdamW's moments are not in the file."""
    write_base(tmp_path / "base.gguf", name, tokenizer=Bytes())
    words = ["recipe=full", "lr=0.01", "~callbacks.cosine", "eval_every=1"]
    run(tmp_path / "long", *words, "recipe.base=base.gguf", "steps=6", "callbacks.gguf_export.every=3")
    run(tmp_path / "on", *words, "recipe.base=long/model-3.gguf", "steps=1")

    def held_out(directory):
        lines = (directory / "events.jsonl").read_text().splitlines()
        return [e["loss"] for e in map(json.loads, lines) if e["kind"] == "eval"]

    loss_at_export, loss_at_start = held_out(tmp_path / "long")[3], held_out(tmp_path / "on")[0]
    assert loss_at_start == pytest.approx(loss_at_export, abs=1e-6)
    assert loss_at_start < held_out(tmp_path / "long")[0] - 0.1


def test_settings_that_agree_with_the_base_are_accepted(tmp_path):
    write_base(tmp_path / "base.gguf", "llama", tokenizer=Bytes())
    run(
        tmp_path / "run",
        "recipe=full",
        "recipe.base=base.gguf",
        "model=llama",
        "model.d_model=32",
        "model.norm_eps=1e-5",
    )


class Header:
    """The parts of a GGUF file that a form reads."""

    def __init__(self, model, keys=(), tensors=(), without=()):
        self.path, self.architecture = "base.gguf", model.name
        self.metadata = {f"{model.name}.{k}": v for k, v in {**gguf_form(model).metadata(model), **dict(keys)}.items()}
        self.tensors = {t.name: t for t in model.tensors() if t.name not in without}
        self.tensors |= {name: TensorSpec(name, (3,), None) for name in tensors}

    def error(self, cause):
        return UserError(cause)


LLAMA, GPT = Llama(vocab=40), GPT2(vocab=40)
QWEN2, QWEN3, GEMMA, OLMO2 = Qwen2(vocab=40), Qwen3(vocab=40), Gemma(vocab=40), Olmo2(vocab=40)


@pytest.mark.parametrize(
    ("model", "header", "message"),
    [
        (LLAMA, {"tensors": ["rope_freqs.weight"]}, "rope_freqs.weight has the shape [3], heads of 16 need 8 numbers"),
        (QWEN3, {"tensors": ["rope_freqs.weight"]}, "has the tensor rope_freqs.weight"),
        (LLAMA, {"tensors": ["blk.1.attn_output.bias"]}, "has the tensor blk.1.attn_output.bias"),
        (LLAMA, {"tensors": ["blk.0.attn_q_norm.weight"]}, "has the tensor blk.0.attn_q_norm.weight"),
        (LLAMA, {"without": ["blk.1.ffn_up.weight"]}, "lacks the tensor blk.1.ffn_up.weight"),
        (LLAMA, {"without": ["token_embd.weight"]}, "lacks the tensor token_embd.weight"),
        (LLAMA, {"keys": {"rope.scaling.type": "yarn"}}, "llama.rope.scaling.type is yarn"),
        (QWEN3, {"keys": {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}}, "qwen3.rope.scaling.type is yarn"),
        (LLAMA, {"keys": {"rope.scaling.type": "longrope"}}, "llama.rope.scaling.type is longrope"),
        (LLAMA, {"keys": {"rope.scaling.attn_factor": 1.2}}, "llama.rope.scaling.attn_factor is 1.2"),
        (LLAMA, {"keys": {"rope.dimension_count": 8}}, "llama.rope.dimension_count is 8"),
        (LLAMA, {"keys": {"attention.key_length": 32}}, "keys of 32 features and values of 16"),
        (QWEN2, {"keys": {"attention.sliding_window": 512}}, "qwen2.attention.sliding_window is a key"),
        (QWEN3, {"keys": {"pooling_type": 3}}, "qwen3.pooling_type is 3"),
        (GEMMA, {"keys": {"attention.causal": False}}, "gemma.attention.causal is False"),
        (GEMMA, {"keys": {"final_logit_softcapping": 30.0}}, "gemma.final_logit_softcapping is a key"),
        (QWEN3, {"without": ["blk.0.attn_q_norm.weight"]}, "lacks the tensor blk.0.attn_q_norm.weight"),
        (QWEN2, {"without": ["blk.1.attn_k.bias"]}, "lacks the tensor blk.1.attn_k.bias"),
        (LLAMA, {"keys": {"attention.sliding_window": 512}}, "llama.attention.sliding_window is a key"),
        (LLAMA, {"keys": {"expert_count": 8}}, "llama.expert_count is 8"),
        (LLAMA, {"keys": {"attention.head_count": np.array([4, 4])}}, "llama.attention.head_count is [4 4]"),
        (LLAMA, {"keys": {"attention.head_count_kv": 4}}, "blk.0.attn_k.weight has the shape [32, 64]"),
        (GPT, {"tensors": ["blk.0.attn_q.weight"]}, "has the tensor blk.0.attn_q.weight"),
        (GPT, {"keys": {"block_count": 0}}, "gpt2.block_count is 0"),
        (GPT, {"keys": {"block_count": 2**31 - 1}}, "claims 2147483647 blocks, and has 28 tensors"),
        (LLAMA, {"keys": {"attention.head_count": 128}}, "has no llama.attention.key_length"),
    ],
)
def test_the_error_names_a_key_or_tensor_that_a_model_cannot_represent(model, header, message):
    with pytest.raises(UserError) as error:
        read_model(type(model), Header(model, **header))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (replace(QWEN2, head_dim=32), "in llama.cpp's qwen2 heads have d_model / n_heads features"),
        (replace(OLMO2, tied=True), "olmo2 requires model.tied=false"),
        (replace(OLMO2, head_dim=16), "olmo2 requires model.head_dim=0"),
        (replace(GEMMA, tied=False), "gemma requires model.tied=true"),
        (
            replace(LLAMA, rope_factors=[1.0] * 3),
            "model.rope_factors has 3 numbers; heads of 16 features need 8",
        ),
        (replace(LLAMA, rope_factors=[1.0] * 7 + [-1.0]), "model.rope_factors=-1.0: must be above 0"),
    ],
)
def test_a_model_that_llama_cpp_does_not_support_is_rejected(model, message):
    with pytest.raises(UserError, match=message):
        model.check()


@pytest.mark.parametrize("name", MODELS)
def test_a_model_read_from_its_file_equals_the_model_written(tmp_path, name):
    model = write_base(tmp_path / "base.gguf", name)
    with GGUFFile(tmp_path / "base.gguf") as file:
        loaded = read_model(type(model), file)
        assert loaded == model
        assert {t.name: t.shape for t in loaded.tensors()}.items() <= {
            n: i.shape for n, i in file.tensors.items()
        }.items()
        constants = gguf_form(model).constants(model)
        for name, values in constants.items():
            np.testing.assert_array_equal(file.read(name), values)
    assert ("rope_freqs.weight" in constants) is bool(getattr(model, "rope_factors", []))


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_was_read_is_written_with_the_same_bytes(tmp_path, name):
    """This covers every tensor and key, including those of the tokenizer."""
    write_base(tmp_path / "base.gguf", name, tokenizer=Bytes())
    with GGUFFile(tmp_path / "base.gguf") as file:
        model = read_model(type(MODELS[name]), file)
        values = {t.name: file.read(t.name) for t in model.tensors()}
        write_model(tmp_path / "again.gguf", model, values, read_tokenizer(file))
    assert (tmp_path / "again.gguf").read_bytes() == (tmp_path / "base.gguf").read_bytes()


def test_rope_factors_are_read_and_exported_exactly(tmp_path):
    """A run on such a base exports the factors again."""
    factors = (32 / np.random.default_rng(0).uniform(1, 32, 6)).astype(np.float32)
    decimals = [float(str(f)) for f in factors]
    write_base(tmp_path / "base.gguf", "llama_all", tokenizer=Bytes(), rope_factors=decimals)
    run(tmp_path / "run", "recipe=lora", "recipe.base=base.gguf", "recipe.rank=2")
    assert tensors(tmp_path / "run" / "model.gguf")["rope_freqs.weight"].tobytes() == factors.tobytes()
    assert "rope_freqs.weight" not in tensors(tmp_path / "run" / "adapter.gguf")
    saved = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert saved["model"]["rope_factors"] == decimals


def test_missing_keys_have_llama_cpps_defaults(tmp_path):
    plain = {"attention.value_length": 16, "attention.key_length": 16, "expert_count": 0, "attention.causal": True}
    unscaled = {"rope.scaling.type": "none", "rope.scaling.factor": 4.0, "rope.scaling.attn_factor": 1.0}
    unread = {"rope.scaling.original_context_length": 8192, "rope.scaling.finetuned": False, "pooling_type": 0}
    header = Header(LLAMA, {**plain, **unscaled, **unread})
    for key in ("rope.freq_base", "rope.dimension_count", "vocab_size"):
        del header.metadata[f"llama.{key}"]
    assert read_model(Llama, header) == LLAMA
    plain = Llama(vocab=40, n_kv_heads=4)
    header = Header(plain)
    del header.metadata["llama.attention.head_count_kv"]
    assert read_model(Llama, header) == plain


@pytest.mark.parametrize(
    "keys",
    [
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
        {"rope.scaling.factor": 4.0},
        {"rope.scale_linear": 4.0},
    ],
)
def test_three_spellings_of_linear_rope_scaling_are_read(keys):
    assert read_model(Llama, Header(LLAMA, keys)) == replace(LLAMA, rope_scale=4.0)
    assert read_model(Llama, Header(LLAMA, dict.fromkeys(keys, 0.0) | {"rope.scaling.type": "linear"})) == LLAMA


def test_the_error_names_the_architecture_with_the_nearest_tensors():
    for model, renamed, nearest in ((QWEN3, "phi3", "qwen3"), (OLMO2, "exaone4", "olmo2"), (GPT, "starcoder", "gpt2")):
        header = Header(model)
        header.architecture = renamed
        with pytest.raises(
            UserError, match=f"architecture is {renamed}; its tensors are most like those of {nearest};"
        ):
            find_model_class(header, [Gemma, GPT2, Llama, Olmo2, Qwen2, Qwen3])


@pytest.mark.parametrize(
    ("layers", "said"),
    [([3], "must be some of 0 to 2"), ([1, 0], "in order"), ([], "must be some of 0 to 2")],
)
def test_lfm2_has_attention_in_some_of_its_layers(layers, said):
    with pytest.raises(UserError, match=said):
        replace(MODELS["lfm2"], attention_layers=layers).check()


@pytest.mark.parametrize("heads", [[2, 0], ["2", "x", "0"], [0, 0, 0], [2, 1, 0], 2])
def test_lfm2_has_one_number_of_key_heads(heads):
    write_base(Path("m.gguf"), "lfm2")
    with GGUFFile("m.gguf") as file:
        metadata = {**file.metadata, "lfm2.attention.head_count_kv": np.array(heads) if heads != 2 else heads}
        file.metadata = metadata
        with pytest.raises(UserError, match="expected one number per layer"):
            read_model(type(MODELS["lfm2"]), file)
