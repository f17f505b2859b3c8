"""What toyexp describe says can be typed works as it stands, whatever file it is about."""

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
def _here(tmp_path, monkeypatch):
    """A directory with what the commands leave to the reader."""
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


def changed(path, keys=(), drop=(), tensors=None):
    """The file again with other keys or tensors."""
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


def ggml(key):
    return f"tokenizer.ggml.{key}"


def base(name="llama", tokenizer=None, change=None, **settings):
    def write(path):
        write_base(path, name, tokenizer=tokenizer, **settings)
        if change:
            changed(path, **change)

    return write


def of_type(type_id):
    """A llama whose matrices of 256 columns are zeros in that type."""

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


def adapter(change=None):
    def write(path):
        write_lora(path, Path("BASE.gguf"))
        write_base(Path("BASE.gguf"), "llama", tokenizer=Bytes(), context=64)  # that of a run unless told
        if change:
            changed(path, **change)

    return write


BYTES = {"tokenizer": Bytes(), "context": 40}
FILES = {
    "text": (base(**BYTES), ALL),
    "gpt2": (base("gpt2", **BYTES), ALL),
    "qwen3": (base("qwen3", **BYTES), ALL),
    "ids": (base("gpt2"), ALL),
    "characters": (base(tokenizer=Characters("abc ")), ALL),
    "a short context": (base(tokenizer=Bytes(), context=3), ALL),
    "small matrices": (base(tokenizer=Bytes(), d_model=4, n_heads=2, n_kv_heads=1, context=40),
                       [w for w in ALL if w != "recipe=lora"]),
    "no numbers in a block": (base(spoil="blk.1.attn_v.weight", **BYTES), LEFT),
    "no numbers in the embedding": (base(spoil="token_embd.weight", **BYTES), ["export"]),
    "no numbers in 8 bits": (base(spoil="blk.0.ffn_up.weight", kind="q8_0", **BYTES), LEFT),
    "eos beyond": (base(change={"keys": {ggml("eos_token_id"): 9999}}, **BYTES), ALL),
    "bos beyond": (base(change={"keys": {ggml("bos_token_id"): 9999}}, **BYTES), ALL),
    "bos missing": (base(change={"keys": {ggml("add_bos_token"): True}, "drop": [ggml("bos_token_id")]}, **BYTES), ALL),
    "types for others": (base(change={"keys": {ggml("token_type"): np.ones(3, np.int32)}}, **BYTES), ALL),
    "no merges": (base(change={"drop": [ggml("merges")]}, **BYTES), ALL),
    "a merge of three": (base(change={"keys": {ggml("merges"): ["a b c"]}}, **BYTES), ALL),
    "no kind of tokenizer": (base(change={"drop": [ggml("model")]}, **BYTES), ALL),
    "another kind of tokenizer": (base(change={"keys": {ggml("model"): "bert"}}, **BYTES), ALL),
    "another model": (write_foreign, DONOR),
    "another model, no donor": (lambda path: write_foreign(path, tensors={"x.weight": (2, 32)}), []),
    "fewer rows than tokens": (base(change={"keys": {"general.architecture": "phi3", "phi3.embedding_length": 32},
                                            "tensors": {"token_embd.weight": np.zeros((9, 32), np.float32)}}, **BYTES),
                               []),
    "images": (write_vit, ["recipe=lora", "recipe=full", "eval", "predict", "export"]),
    "an adapter": (adapter(), ["generate", "merge", "recipe=lora"]),
    "an adapter without numbers": (adapter({"keys": {"adapter.lora.alpha": float("nan")}}), []),
    "an adapter of another model": (adapter({"keys": {"general.architecture": "phi3"}}), []),
    **{name: (of_type(i), ALL) for i, (name, _, _) in GGUF_TYPES.items()},
}  # fmt: skip
# For these others of their kind stand in the short form.
RARE = {name for name, _, _ in GGUF_TYPES.values()} - {"Q6_K", "NVFP4"}
RARE |= {"qwen3", "bos beyond", "bos missing", "types for others", "a merge of three", "another kind of tokenizer"}


@pytest.fixture(scope="module")
def registry():
    return load(["toyexp.testing.null"])


def run(words, registry):
    """One offered command on an engine that computes nothing, and on little text where it names no data."""
    words, plugins = words[:-1], words[-1]
    assert plugins == NOOP[0], "a command is told with the plugins that were named"
    named = any(w.startswith("data=") for w in words)
    if words[0].startswith("recipe="):  # up to where its directory would be made
        text = [] if named else ["data=text", "data.path=TEXT.txt"]
        return prepare(Request([], registry, ["toyexp.testing.null"]).build_config(*words, *text, *QUICK))
    eval_on = NOOP if named else [*NOOP, "--data", "TEXT.txt"]
    written = [NOOP[0], "--engine", "noop"]
    more = {"eval": eval_on, "generate": written, "predict": written, "merge": [NOOP[0]], "export": []}
    return not main([*words, *more[words[0]]])


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.full] * (n in RARE)) for n in FILES])
def test_every_command_that_is_offered_runs(name, registry):
    write, offered = FILES[name]
    path = Path("my model.gguf")
    write(path)
    uses = describe(path, registry).uses
    shown = [shlex.split(use.command)[1:] for use in uses if use.command]
    assert sorted(words[0] for words in shown) == sorted(offered)
    assert all(use.reason for use in uses if not use.command)
    for words in shown:
        assert run(words, registry), words


def test_a_type_that_is_already_there_is_not_offered_again(registry):
    path = Path("my model.gguf")
    base(**BYTES)(path)
    for kind in ("q8_0", "f16", "f32", None):
        (use,) = (use for use in describe(path, registry).uses if use.what == "export")
        assert f"--type {kind} " in (use.command or "--type None ")
        assert kind or "already exists" in use.reason
        Path(f"my model-{kind}.gguf").touch()


def test_numbers_of_a_large_file_are_left_to_the_run(registry, monkeypatch):
    path = Path("my model.gguf")
    base(spoil="blk.1.attn_v.weight", **BYTES)(path)
    monkeypatch.setattr("toyexp.inference.describe.MAX_CHECKED_BYTES", 1000)
    assert describe(path, registry).uses[0].command


def test_a_recipe_and_data_of_a_stranger_are_offered_by_what_they_say_of_themselves(registry):
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
    base("gpt2")(Path("ids.gguf"))
    shown = {use.what: use.command for use in describe(Path("ids.gguf"), Registry(offers)).uses}
    assert shown["train on"].startswith("toyexp recipe=longer recipe.base=ids.gguf data=their_ids data.path=THEIRS ")
    assert shown["train on"].endswith(f"data.below={VOCAB} model.context=12 lr=1e-6") and "donor" not in shown
    assert shown["eval"].endswith(f"data=their_ids data.path=THEIRS data.below={VOCAB}")
