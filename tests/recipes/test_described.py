"""Commands that `toyexp describe` prints must run as printed, for every kind of file."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from kinds import write_foreign, write_lora, write_vit
from PIL import Image
from tiny import VOCAB, write_base

from toyexp.cli.main import main
from toyexp.config.request import Request
from toyexp.formats.gguf.ggml_types import GGUF_TYPES
from toyexp.formats.gguf.read import GGUFFile
from toyexp.formats.gguf.write import Writer
from toyexp.inference.describe import describe
from toyexp.plugins.discovery import load
from toyexp.plugins.registry import Offer, Registry
from toyexp.tokenizers.byte_level import Bytes, Characters
from toyexp.training.experiment import prepare
from toyexp_data.tokens import Tokens
from toyexp_recipes.base import Full

NOOP = ["plugins=[toyexp.testing.null]", "engine=noop"]
QUICK = [*NOOP, "steps=1", "batch_size=2", "eval_every=0", "callbacks=[]"]
ALL = ["recipe=lora", "recipe=full", "recipe=warm", "eval", "generate", "export"]
DONOR, LEFT = ["recipe=warm"], ["recipe=warm", "export"]


@pytest.fixture(autouse=True)
def working_directory(tmp_path, monkeypatch):
    """Create the files whose names the printed commands leave to the reader."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TOYEXP_CACHE", str(tmp_path / "cache"))
    (np.arange(4000, dtype=np.int32) % VOCAB).tofile("IDS.bin")
    Path("TEXT.txt").write_text("abba caba " * 500)
    for name in "abc":
        Path("FOLDER", name).mkdir(parents=True)
        for i in range(6):
            Image.new("RGB", (9, 9), (i, i, i)).save(Path("FOLDER", name, f"{i}.png"))
    Image.new("RGB", (9, 9)).save("IMAGE.png")
    write_base(Path("BASE.gguf"), "llama", tokenizer=Bytes(), context=40)


def write_changed(path, keys=(), drop=(), tensors=None):
    """Write the file again with other keys or tensors."""
    with GGUFFile(path) as file:
        writer = Writer()
        for key, value in {**file.metadata, **dict(keys)}.items():
            if key not in drop:
                writer.add(key, value, None if key in dict(keys) else file.kinds[key])
        for name, info in file.tensors.items():
            raw = (tensors or {}).get(name, file.read_raw(name))
            shape = raw.shape if name in (tensors or {}) else info.shape
            writer.add_bytes(name, shape, info.type, [np.ascontiguousarray(raw).view(np.uint8).ravel()])
        path.unlink()
        writer.save(path)


def ggml_key(key):
    return f"tokenizer.ggml.{key}"


def base_file(name="llama", tokenizer=None, change=None, **settings):
    def write(path):
        write_base(path, name, tokenizer=tokenizer, **settings)
        if change:
            write_changed(path, **change)

    return write


def quantised_writer(type_id):
    """Return a function that writes a llama whose matrices, of 256 columns, are zeros of that type."""

    def write(path):
        name, per_block, block_bytes = GGUF_TYPES[type_id]
        write_base(path, "llama", tokenizer=Bytes(), d_model=256, d_ff=256, head_dim=64)
        with GGUFFile(path) as file:
            writer = Writer()
            for key, value in file.metadata.items():
                writer.add(key, value, file.kinds[key])
            for info in file.tensors.values():
                if len(info.shape) == 2:
                    size = int(np.prod(info.shape)) // per_block * block_bytes
                    writer.add_bytes(info.name, info.shape, name, [np.zeros(size, np.uint8)])
                else:
                    writer.add_bytes(info.name, info.shape, info.type, [file.read_raw(info.name).ravel()])
            path.unlink()
            writer.save(path)

    return write


def adapter_writer(change=None):
    def write(path):
        write_lora(path, Path("BASE.gguf"))
        write_base(Path("BASE.gguf"), "llama", tokenizer=Bytes(), context=64)  # another base than the adapter's
        if change:
            write_changed(path, **change)

    return write


BYTES = {"tokenizer": Bytes(), "context": 40}
FILES = {
    "text": (base_file(**BYTES), ALL),
    "gpt2": (base_file("gpt2", **BYTES), ALL),
    "qwen3": (base_file("qwen3", **BYTES), ALL),
    "ids": (base_file("gpt2"), ALL),
    "characters": (base_file(tokenizer=Characters("abc ")), ALL),
    "a short context": (base_file(tokenizer=Bytes(), context=3), ALL),
    "small matrices": (base_file(tokenizer=Bytes(), d_model=4, n_heads=2, n_kv_heads=1, context=40),
                       [w for w in ALL if w != "recipe=lora"]),
    "no numbers in a block": (base_file(spoil="blk.1.attn_v.weight", **BYTES), LEFT),
    "no numbers in the embedding": (base_file(spoil="token_embd.weight", **BYTES), ["export"]),
    "no numbers in 8 bits": (base_file(spoil="blk.0.ffn_up.weight", kind="q8_0", **BYTES), LEFT),
    "eos beyond": (base_file(change={"keys": {ggml_key("eos_token_id"): 9999}}, **BYTES), ALL),
    "bos beyond": (base_file(change={"keys": {ggml_key("bos_token_id"): 9999}}, **BYTES), ALL),
    "bos missing": (base_file(change={"keys": {ggml_key("add_bos_token"): True},
                                      "drop": [ggml_key("bos_token_id")]}, **BYTES), ALL),
    "types for others": (base_file(change={"keys": {ggml_key("token_type"): np.ones(3, np.int32)}}, **BYTES), ALL),
    "no merges": (base_file(change={"drop": [ggml_key("merges")]}, **BYTES), ALL),
    "a merge of three": (base_file(change={"keys": {ggml_key("merges"): ["a b c"]}}, **BYTES), ALL),
    "no kind of tokenizer": (base_file(change={"drop": [ggml_key("model")]}, **BYTES), ALL),
    "another kind of tokenizer": (base_file(change={"keys": {ggml_key("model"): "bert"}}, **BYTES), ALL),
    "another model": (write_foreign, DONOR),
    "another model, no donor": (lambda path: write_foreign(path, tensors={"x.weight": (2, 32)}), []),
    "fewer rows than tokens": (base_file(change={"keys": {"general.architecture": "phi3", "phi3.embedding_length": 32},
                                                 "tensors": {"token_embd.weight": np.zeros((9, 32), np.float32)}},
                                         **BYTES), []),
    "images": (write_vit, [*["recipe=lora", "recipe=full"] * 2, "eval", "predict", "export"]),
    "an adapter": (adapter_writer(), ["generate", "merge", "recipe=lora"]),
    "an adapter without numbers": (adapter_writer({"keys": {"adapter.lora.alpha": float("nan")}}), []),
    "an adapter of another model": (adapter_writer({"keys": {"general.architecture": "phi3"}}), []),
    **{name: (quantised_writer(i), ALL) for i, (name, _, _) in GGUF_TYPES.items()},
}  # fmt: skip
# Other files of the same kind cover these in the default suite.
RARE = {name for name, _, _ in GGUF_TYPES.values()} - {"Q6_K", "NVFP4"}
RARE |= {"qwen3", "bos beyond", "bos missing", "types for others", "a merge of three", "another kind of tokenizer"}


@pytest.fixture(scope="module")
def registry():
    return load(["toyexp.testing.null"])


def run_command(words, registry):
    """Run a printed command with an engine that computes nothing, on a little text if it names no data."""
    words, plugins = words[:-1], words[-1]
    assert plugins == NOOP[0], "a printed command must name the plugins"
    names_data = any(w.startswith("data=") for w in words)
    if words[0].startswith("recipe="):  # run up to the creation of its directory
        text = [] if names_data else ["data=text", "data.path=TEXT.txt"]
        return prepare(Request([], registry, ["toyexp.testing.null"]).build_config(*words, *text, *QUICK))
    eval_on = NOOP if names_data else [*NOOP, "--data", "TEXT.txt"]
    engine_words = [NOOP[0], "--engine", "noop"]
    extra_words = {"eval": eval_on, "generate": engine_words, "predict": engine_words, "merge": [NOOP[0]], "export": []}
    return not main([*words, *extra_words[words[0]]])


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.full] * (n in RARE)) for n in FILES])
def test_every_printed_command_runs(name, registry):
    write, expected = FILES[name]
    path = Path("my model.gguf")
    write(path)
    uses = describe(path, registry).uses
    commands = [shlex.split(use.command)[1:] for use in uses if use.command]
    assert sorted(words[0] for words in commands) == sorted(expected)
    assert all(use.reason for use in uses if not use.command)
    for words in commands:
        assert run_command(words, registry), words


def test_an_export_that_already_exists_is_not_suggested_again(registry):
    path = Path("my model.gguf")
    base_file(**BYTES)(path)
    for kind in ("q8_0", "f16", "f32", None):
        (use,) = (use for use in describe(path, registry).uses if use.what == "export")
        assert f"--type {kind} " in (use.command or "--type None ")
        assert kind or "already exists" in use.reason
        Path(f"my model-{kind}.gguf").touch()


def test_weights_of_a_large_file_are_not_checked_for_nan(registry, monkeypatch):
    path = Path("my model.gguf")
    base_file(spoil="blk.1.attn_v.weight", **BYTES)(path)
    monkeypatch.setattr("toyexp.inference.describe.MAX_CHECKED_BYTES", 1000)
    assert describe(path, registry).uses[0].command


def test_recipes_and_data_of_plugins_are_suggested_with_their_own_hints(registry):
    @dataclass
    class Longer(Full):
        """Trains on, slowly."""

        name: ClassVar[str] = "longer"
        hint: ClassVar[str] = "lr=1e-6"

    @dataclass
    class Ids(Tokens):
        """Ids of another program."""

        name: ClassVar[str] = "their_ids"

        @classmethod
        def suggest_settings(cls, sizes, tokenizer):
            return None if tokenizer else f"data.path=THEIRS data.below={sizes['vocab']}"

    offers = {
        "recipe": {"longer": Offer("recipe", "longer", Longer, "theirs", "theirs 1.0")},
        "model": registry.offers["model"],
        "format": registry.offers["format"],
        "data": {"their_ids": Offer("data", "their_ids", Ids, "theirs", "theirs 1.0"), **registry.offers["data"]},
    }
    base_file("gpt2")(Path("ids.gguf"))
    commands = {use.what: use.command for use in describe(Path("ids.gguf"), Registry(offers)).uses}
    assert commands["train on"].startswith("toyexp recipe=longer recipe.base=ids.gguf data=their_ids data.path=THEIRS ")
    assert commands["train on"].endswith(f"data.below={VOCAB} model.context=12 lr=1e-6") and "donor" not in commands
    assert commands["eval"].endswith(f"data=their_ids data.path=THEIRS data.below={VOCAB}")
