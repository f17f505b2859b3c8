"""toyexp describe: its output matches the file, and no file can make it print anything else."""

import json
import math
import os
import resource
import shlex
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader
from kinds import VIT, write_foreign, write_lora, write_vit
from safetensors.numpy import save_file
from tiny import MODELS, SIZES, VOCAB, write_base

from toyexp.cli.main import main
from toyexp.config.words import parse
from toyexp.formats.gguf.write import Writer, write_model
from toyexp.inference.describe import describe, quote_for_hydra, quote_for_shell
from toyexp.interfaces.arithmetic import Shaped
from toyexp.interfaces.ops import Params, Rotary
from toyexp.plugins.discovery import load
from toyexp.plugins.registry import Registry
from toyexp.reference.engine import ReferenceOps
from toyexp.reference.forward_listing import Line, ListedOps, Listing, WeightInfo, listing
from toyexp.tokenizers.byte_level import BPE, Bytes

GPT2 = """\
op            tensor                     shape    type  result              parameters  operations
rows          token_embd.weight          40 x 32  Q8_0  [B, T, 32]               1.28k
first_rows    position_embd.weight       12 x 32  F32   [T, 32]                    384
add                                                     [B, T, 32]
block 0
  layer_norm  attn_norm.weight + bias    32       F32   [B, T, 32]                  64
  matmul      attn_qkv.weight + bias     96 x 32  Q8_0  [B, T, 96]               3.17k       6.14k
  split                                                 3 times [B, T, 32]
  heads                                                 [B, T, 4, 8]
  heads                                                 [B, T, 4, 8]
  heads                                                 [B, T, 4, 8]
  attention   causal                                    [B, T, 32]                           128 T
  matmul      attn_output.weight + bias  32 x 32  Q8_0  [B, T, 32]               1.06k       2.05k
  add                                                   [B, T, 32]
  layer_norm  ffn_norm.weight + bias     32       F32   [B, T, 32]                  64
  matmul      ffn_up.weight + bias       80 x 32  Q8_0  [B, T, 80]               2.64k       5.12k
  gelu                                                  [B, T, 80]
  matmul      ffn_down.weight + bias     32 x 80  F16   [B, T, 32]               2.59k       5.12k
  add                                                   [B, T, 32]
blocks 1..3 are alike
layer_norm    output_norm.weight + bias  32       F32   [B, T, 32]                  64
matmul        token_embd.weight again    40 x 32  Q8_0  [B, T, 40]                           2.56k"""


@pytest.fixture(scope="module")
def registry():
    return load()


@pytest.fixture(autouse=True)
def change_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run_and_print(capsys, *words):
    """Run a command that must exit with 0, and return its output."""
    capsys.readouterr()
    assert main(["describe", *map(str, words)]) == 0
    return capsys.readouterr().out


def describe_json(capsys, *words):
    return json.loads(run_and_print(capsys, *words, "--json"))


# -- the forward pass -------------------------------------------------------------------------------------------------


def test_the_listing_of_a_gpt2_verbatim(capsys):
    write_base(Path("model.gguf"), "gpt2", kind="q8_0", n_layers=4, d_ff=80)
    out = run_and_print(capsys, "model.gguf")
    assert out.partition("forward pass, ")[2].partition("\n")[2].rstrip() == GPT2


@pytest.mark.parametrize(("width", "hidden"), [(80, "result"), (60, "result, shape, type, parameters")])
def test_the_tables_fit_the_terminal_and_name_hidden_columns(capsys, monkeypatch, width, hidden):
    write_base(Path("model.gguf"), "gpt2", kind="q8_0", n_layers=4, d_ff=80)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(width))
    lines = run_and_print(capsys, "model.gguf", "--tensors").splitlines()
    assert max(len(line) for line in lines if "toyexp " not in line) <= width
    assert " ".join(lines).endswith(f"columns left out to fit the terminal: {hidden}")
    assert any("attn_output.weight + bias" in line for line in lines)


def test_rope_and_grouped_attention_are_described():
    lines = list_forward(replace(MODELS["llama"], vocab=VOCAB, rope_base=5e5)).all()
    details = {line.op: line.detail for line in lines}
    assert (details["rope"], details["attention"]) == ("base 500000", "causal, 4 heads on 2")
    ops = ListedOps({})
    ops.rope(Shaped((3, 7, 2, 4)), Rotary(100.0, 2.0, (1.0, 8.0), halves=True))
    assert ops.lines[0].detail == "base 100, scale 2, factors, halves"


class Shapes(ReferenceOps):
    """The float64 reference, which writes down the shape of every result, except those of ops inside other ops."""

    def __init__(self):
        self.found, self.depth = [], 0

    def __getattribute__(self, name):
        description = super().__getattribute__(name)
        composed = ("route", "softcap", "mean")
        if name not in (*type(self).__abstractmethods__, *composed) and name not in ReferenceOps.__dict__:
            return description

        def noted(*arguments, **named):
            self.depth += 1
            result = description(*arguments, **named)
            self.depth -= 1
            first = result[0] if isinstance(result, tuple) else result
            if not self.depth:
                self.found.append((name, first.shape))
            return result

        return noted


ALL = {**MODELS, "vit": VIT, "vit_rmsnorm": replace(VIT, block="rmsnorm_silu"), "vit_1": replace(VIT, n_layers=1)}


def list_forward(model):
    return listing(model, [WeightInfo(t.shape, t.name, "F32") for t in model.tensors()])


@pytest.mark.parametrize("name", ALL)
def test_every_op_has_the_shape_that_the_reference_computes(name):
    model = replace(ALL[name], **({"vocab": VOCAB} if ALL[name].reads.text else {}))
    sizes, draw = {"B": 3, "T": 7}, np.random.default_rng(0)
    batch = {
        n: draw.integers(0, VOCAB, (3, *(sizes.get(s, s) for s in shape)))
        if model.reads.text
        else draw.normal(size=(3, *shape))
        for n, shape in model.inputs().items()
    }
    ops = Shapes()
    model.forward(ops, Params({t.name: draw.normal(size=t.shape) for t in model.tensors()}), batch)
    lines = list_forward(model).all()
    assert [(line.op, tuple(sizes.get(n, n) for n in line.result)) for line in lines] == ops.found
    assert {w.name for line in lines for w in line.weights} == {t.name for t in model.tensors()}


@pytest.mark.parametrize("name", ALL)
def test_operations_count_two_per_weight_and_position_plus_attention(name):
    model = replace(ALL[name], **({"vocab": VOCAB} if ALL[name].reads.text else {}))
    no_matrices = ("embd", ".conv", "conv1d", "ssm_a", "ssm_d", "ssm_norm")  # they multiply element by element
    weights = [t for t in model.tensors() if len(t.shape) > 1 and not any(part in t.name for part in no_matrices)]
    matrices = sum(math.prod(t.shape) for t in weights)
    if model.reads.text:
        matrices += model.vocab * model.d_model if model.tied else 0
        widths = [t.shape[1] for t in weights if t.name.endswith("attn_output.weight")]  # heads times size, by layer
        expected = {"": 2 * matrices, "T": 4 * sum(widths)}
        if name.startswith("mamba2"):  # groups share q k, and each head has its own products with v
            expected["T"] = 2 * model.n_layers * (model.n_groups * model.state + model.d_ff)
    else:  # the head sees one position, the patches have no class token among them
        head, positions = model.classes * model.d_model, model.patches + 1
        patches = 2 * model.patches * model.d_model * model.channels * model.patch**2
        attention = 4 * model.d_model * model.n_layers * positions**2
        expected = {"": 2 * head + 2 * (matrices - head) * positions + patches + attention}
    assert list_forward(model).operations() == expected


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("name", ["llama", "gpt2_untied", "vit"])
def test_the_head_is_listed_apart_from_the_last_block(name, layers):
    model = replace(ALL[name], n_layers=layers, **({"vocab": VOCAB} if name != "vit" else {}))
    parts = list_forward(model)
    assert list(parts.blocks) == list(range(layers))
    assert all(line.block == i for i, block in parts.blocks.items() for line in block)
    assert all(f"blk.{i}." in w.name for i, block in parts.blocks.items() for line in block for w in line.weights)
    assert [line.block for line in (*parts.before, *parts.after)] == [None] * len([*parts.before, *parts.after])
    if layers > 1:
        assert [line.op for line in parts.blocks[layers - 1]] == [line.op for line in parts.blocks[0]]
        assert parts.blocks[layers - 1][-1].op == "add"


def test_blocks_of_other_types_or_shapes_are_listed_separately():
    model = replace(MODELS["llama"], vocab=VOCAB, n_layers=4)
    weights = [
        WeightInfo(t.shape, t.name, "Q6_K" if t.name == "blk.2.attn_v.weight" else "Q4_K") for t in model.tensors()
    ]
    assert "blocks 1..3 are alike, but for types: attn_v.weight Q4_K or Q6_K" in listing(model, weights).lines()
    parts = list_forward(model)
    odd = replace(parts, blocks={**parts.blocks, 2: [*parts.blocks[2], parts.blocks[2][-1]]}).lines()
    assert "block 1 is like it" in odd
    assert "block 2" in odd
    assert "block 3 is like block 0" in odd


# -- what is in a file ------------------------------------------------------------------------------------------------


def test_a_run_directory_is_described(capsys):
    tokenizer = BPE.train(["a b ab abc abcd " * 30], 270)
    tokenizer.chat_template = "{{ messages[0].content }}"
    Path("run").mkdir()
    model = write_base(Path("run/model.gguf"), "llama", tokenizer=tokenizer)
    description = describe_json(capsys, "run")
    reader = GGUFReader("run/model.gguf")
    assert description["file"] == "run/model.gguf"
    assert description["bytes"] == Path("run/model.gguf").stat().st_size
    assert description["version"] == 3
    assert (description["family"], description["architecture"], description["refused"]) == ("llama", "llama", None)
    assert description["sizes"] == model.settings()
    assert description["parameters"]["total"] == sum(int(t.n_elements) for t in reader.tensors) == model.parameters()
    assert description["parameters"]["embedding"] == tokenizer.vocab * 32
    block = sum(int(t.n_elements) for t in reader.tensors if t.name.startswith("blk.1."))
    assert (description["parameters"]["blocks"], description["parameters"]["per_block"]) == (2, block)
    assert description["types"] == {"F32": {"tensors": len(reader.tensors), "bytes": 4 * model.parameters()}}
    said = description["tokenizer"]
    assert (said["model"], said["pre"], said["size"], said["controls"]) == ("gpt2", "gpt-2", tokenizer.vocab, 1)
    assert said["special"]["eos"] == {"id": tokenizer.eos, "token": "<|endoftext|>"}
    assert (said["add_bos"], said["add_eos"], said["chat_template"], said["refused"]) == (False, None, True, None)
    assert [u["what"] for u in description["uses"]] == ["train on", "train on", "donor", "eval", "generate", "export"]
    assert "metadata" not in description
    assert "tensors" not in description


def test_the_flags_add_every_key_and_every_tensor(capsys):
    model = write_base(Path("model.gguf"), "gpt2", tokenizer=Bytes())
    description, reader = describe_json(capsys, "model.gguf", "--metadata", "--tensors"), GGUFReader("model.gguf")
    assert description["metadata"].keys() == {k for k in reader.fields if not k.startswith("GGUF.")}
    assert description["metadata"]["tokenizer.ggml.tokens"][-1] == "<|endoftext|>"
    assert description["metadata"]["tokenizer.ggml.token_type"] == [1] * 256 + [3]
    assert [(t["name"], t["offset"], t["bytes"]) for t in description["tensors"]] == [
        (t.name, t.data_offset, t.n_bytes) for t in reader.tensors
    ]
    lines = run_and_print(capsys, "model.gguf", "--metadata", "--tensors").splitlines()
    assert any(line.split()[:1] == ["gpt2.context_length"] for line in lines)
    assert sum(line.startswith("blk.1.") for line in lines) == len(model.tensors()) // 2 - 2
    assert max(map(len, lines)) < 160


def test_the_origin_of_a_model_is_shown(capsys):
    keys = {"general.name": "Big One", "general.license": "apache-2.0", "general.base_model.0.name": "Bigger One",
            "general.base_model.0.repo_url": "https://example.org/big", "general.run_id": "2026-11-21",
            "general.step": 200}  # fmt: skip
    write_foreign(Path("model.gguf"), keys=keys)
    out = run_and_print(capsys, "model.gguf")
    assert "name        Big One\n" in out
    assert "licence     apache-2.0\n" in out
    assert "base model  Bigger One, https://example.org/big\n" in out
    assert "made by     run 2026-11-21, step 200\n" in out


def test_an_adapter_lists_its_targets(capsys):
    write_lora(Path("adapter.gguf"), Path("base.gguf"))
    description = describe_json(capsys, "adapter.gguf")
    assert description["adapter"] == {
        "type": "lora",
        "ranks": [4],
        "alpha": 6.0,
        "targets": ["attn_q in 2 blocks", "attn_v in 2 blocks"],
    }
    assert description["parameters"]["total"] == 2 * 4 * (32 + 32 + 32 + 16)
    commands = {u["what"]: u["command"] for u in description["uses"]}
    assert commands["train on"] == "toyexp recipe=lora recipe.base=BASE.gguf recipe.adapter=adapter.gguf lr=1e-3"
    assert commands["merge"] == "toyexp merge BASE.gguf adapter.gguf --out merged.gguf"
    assert "a base of architecture llama, rank 4, alpha 6" in run_and_print(capsys, "adapter.gguf")


def test_a_directory_with_only_an_adapter_describes_the_adapter(capsys, tmp_path):
    (tmp_path / "run").mkdir()
    write_lora(Path("run/adapter.gguf"), Path("base.gguf"))
    assert describe_json(capsys, "run")["kind"] == "adapter"


def test_an_image_classifier_can_be_trained_on_and_evaluated(capsys):
    write_vit(Path("vit.gguf"))
    description = describe_json(capsys, "vit.gguf")
    assert description["family"] == "vit"
    assert description["sizes"]["classes"] == 3
    assert description["tokenizer"] is None
    assert [u["what"] for u in description["uses"] if u["command"]] == [
        "train on", "train on", "new head", "new head", "eval", "predict", "export",
    ]  # fmt: skip
    assert "operations an image" in run_and_print(capsys, "vit.gguf")


@pytest.mark.parametrize(
    ("keys", "tensors", "reason"),
    [
        ({}, None, "its architecture is phi3; choose one of: "),
        ({"general.type": "mmproj"}, None, "holds no model (general.type is mmproj)"),
        ({}, {}, "its architecture is phi3"),
    ],
)
def test_an_architecture_without_a_model_is_described_too(keys, tensors, reason, capsys):
    write_foreign(Path("model.gguf"), keys=keys, tensors=tensors)
    description = describe_json(capsys, "model.gguf")
    assert description["family"] is None
    assert description["refused"].startswith(reason)
    assert description["sizes"] == {"embedding_length": 32, "block_count": 2}
    donor = next(u for u in description["uses"] if u["what"] == "donor")
    assert (donor["command"] is None) == (tensors == {})
    assert f"train on  no: {reason}" in run_and_print(capsys, "model.gguf")


def test_a_model_with_an_unsupported_key_is_only_a_donor(capsys):
    write_base(Path("model.gguf"), "llama", tokenizer=Bytes())
    data = Path("model.gguf").read_bytes()
    at = data.index(b"llama.rope.dimension_count") + len(b"llama.rope.dimension_count") + 4
    Path("model.gguf").write_bytes(data[:at] + struct.pack("<I", 4) + data[at + 4 :])
    description = describe_json(capsys, "model.gguf")
    assert "llama.rope.dimension_count is 4" in description["refused"]
    assert [u["what"] for u in description["uses"] if u["command"]] == ["donor"]


def test_missing_blocks_are_ignored(capsys):
    write_foreign(Path("model.gguf"), "llama", keys={"llama.context_length": 8})
    data = Path("model.gguf").read_bytes()
    at = data.index(b"llama.block_count") + len(b"llama.block_count") + 4
    Path("model.gguf").write_bytes(data[:at] + struct.pack("<I", 2**31 - 1) + data[at + 4 :])
    assert describe_json(capsys, "model.gguf")["refused"] == "claims 2147483647 blocks, and has 3 tensors"


def test_the_first_part_of_a_split_file_counts_all_tensors(capsys):
    write_foreign(Path("model.gguf"), split=2)
    parts = sorted(Path().glob("*.gguf"))
    assert [p.name for p in parts] == ["model-00001-of-00002.gguf", "model-00002-of-00002.gguf"]
    description = describe_json(capsys, parts[0])
    assert description["parts"] == {"part": 1, "of": 2}
    assert description["bytes"] == sum(p.stat().st_size for p in parts)


# -- strangers' files -------------------------------------------------------------------------------------------------

NASTY = "\x1b[31mred\x07\u202e{{ 7*7 }}${oc.env:HOME}\n" + "long" * 40


def test_text_from_a_file_is_escaped_for_the_terminal(capsys):
    texts = ("general.name", "general.license", "general.run_id", "phi3.x", "tokenizer.ggml.model",
             "tokenizer.ggml.pre", "tokenizer.chat_template", "adapter.type")  # fmt: skip
    keys = dict.fromkeys(texts, NASTY) | {f"phi3.{NASTY}": 1}
    keys |= {"tokenizer.ggml.tokens": [NASTY, NASTY], "tokenizer.ggml.bos_token_id": 1}
    tensors = {"\x1b[31m.weight": (2, 32), "blk.0.\x1b[31m.lora_a": (2, 32)}
    for name, extra in (("a.gguf", {}), ("b.gguf", {"general.type": "adapter"}), ("c.gguf", {"general.type": NASTY})):
        write_foreign(Path(name), architecture="phi3", keys={**keys, **extra}, tensors=tensors)
        for flags in ([], ["--metadata", "--tensors"], ["--json", "--metadata"]):
            out = run_and_print(capsys, name, *flags)
            assert out.isascii()
            assert all(c.isprintable() or c == "\n" for c in out)
            assert "49" not in out.replace("{{ 7*7 }}", "")
            assert os.environ["HOME"] not in out
    write_foreign(Path("d.gguf"), architecture=NASTY.replace("\n", ""))
    assert run_and_print(capsys, "d.gguf").isascii()


def test_special_tokens_out_of_range_have_no_text(capsys):
    keys = {"model": "bert", "tokens": ["a", "b"], "bos_token_id": 9, "eos_token_id": 1}
    write_foreign(Path("model.gguf"), keys={f"tokenizer.ggml.{k}": v for k, v in keys.items()})
    description = describe_json(capsys, "model.gguf")["tokenizer"]
    assert description["special"] == {"bos": {"id": 9, "token": None}, "eos": {"id": 1, "token": "b"}}
    assert "is not supported" in description["refused"]


def make(kind):
    """A run's directory whose model.gguf is none, or another program's directory or file."""
    Path("run").mkdir()
    model = Path("run/model.gguf")
    match kind:
        case "a directory":
            model.mkdir()
        case "a pipe":
            os.mkfifo(model)
        case "a link that leads nowhere":
            model.symlink_to("gone.gguf")
        case "unreadable":
            model.write_bytes(b"GGUF")
            model.chmod(0)
        case "safetensors":
            save_file({"x": np.zeros(3, np.float32)}, model)
        case "transformers":
            Path("run/config.json").write_text("{}")
            Path("run/pytorch_model.bin").touch()
        case "peft":
            Path("run/adapter_config.json").write_text("{}")


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("a directory", "run/model.gguf: is a directory"),
        ("a pipe", "run/model.gguf: is a pipe"),
        ("a link that leads nowhere", "run/model.gguf: is a link to gone.gguf, which does not exist"),
        ("unreadable", "run/model.gguf: cannot be opened: Permission denied"),
        ("safetensors", "run/model.gguf: is not a GGUF file but safetensors; toyexp reads a directory with"),
        ("transformers", "toyexp reads a directory with config.json and model.safetensors"),
        ("peft", "it holds an adapter of PEFT; name its base, and this directory as the adapter"),
    ],
)
def test_a_file_that_is_no_gguf_model_is_named(kind, said, capsys):
    make(kind)
    if kind == "unreadable" and os.access("run/model.gguf", os.R_OK):
        pytest.skip("this user may read everything")
    commands = [["describe", "run"], ["eval", "run"], ["generate", "run", "--prompt", "x"],
                ["export", "run", "--type", "f32"], ["recipe=full", "recipe.base=run"],
                ["recipe=warm", "recipe.donor=run"]]  # fmt: skip
    for words in commands:
        assert main(words) == 2, words
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1, words
    assert not Path("outputs").exists()


def test_a_file_that_names_no_tokenizer_has_none(capsys):
    write_foreign(Path("model.gguf"), keys={"tokenizer.ggml.tokens": ["a", "b"]})
    assert describe_json(capsys, "model.gguf")["tokenizer"]["refused"] == "has no tokenizer"
    assert main(["recipe=warm", "recipe.donor=model.gguf"]) == 2
    assert "model.gguf: has no tokenizer; evaluate it on token ids: data=tokens" in capsys.readouterr().err


def test_64_bit_numbers_are_shown_exactly(registry):
    writer = Writer()
    for name, value in {"large": np.float64(1e300), "fine": np.float64(1 / 3), "single": np.float32(1e-5)}.items():
        writer.add(f"x.{name}", value)
    writer.save(Path("x.gguf"))
    lines = describe(Path("x.gguf"), registry, metadata=True).lines()
    run_and_print = dict(line.split() for line in lines if line.startswith("x."))
    assert run_and_print == {"x.large": "1e+300", "x.fine": "0.3333333333333333", "x.single": "1e-05"}


def test_a_product_of_two_weights_is_counted_too():
    listing = Listing(
        [Line("matmul", (WeightInfo((8, 4), "w"),), (2, 8), operations=128)], {}, [], frozenset({"B", "T"})
    )
    assert listing.operations() == {"": 128}
    assert "128" in listing.lines()[1]


def test_a_failing_plugin_does_not_prevent_a_description(registry, monkeypatch):
    cls = registry.offers["model"]["llama"].cls
    write_base(Path("model.gguf"), "llama")
    with monkeypatch.context() as patch:
        patch.setattr(type(cls.forms["gguf"]), "read", lambda self, cls, file: {}["\x1b"])
        assert describe(Path("model.gguf"), registry).refused == "KeyError: '\\\\x1b'"
    monkeypatch.setattr(cls, "forward", lambda self, ops, p, batch: batch["tokens"].values)
    description = describe(Path("model.gguf"), registry)
    assert description.forward is None
    assert description.family == "llama"
    assert "AttributeError" in description.refused


def test_without_any_plugin_a_file_is_still_described():
    write_base(Path("model.gguf"), "llama")
    assert describe(Path("model.gguf"), Registry()).refused == (
        "its architecture is llama; none is available; if it is in your own module, add 'plugins=[my_module]'"
    )


# -- what is to be typed ----------------------------------------------------------------------------------------------

PATHS = ["m.gguf", "/a/b-c_1.0+x@y%z.gguf", "a b.gguf", "é.gguf", "a=b,c.gguf", "it's.gguf", 'say "hi".gguf',
         "a[1]{2}(3).gguf", "~/x.gguf", "$HOME/${x}.gguf", "a\\b.gguf", "-x.gguf", "null", "1e5", "a'b\"c$d,e.gguf",
         " x.gguf", "!x.gguf", "#x.gguf", "/blobs/sha256-0a1b", "a;b&c|d.gguf", "x.gguf ", "a:b.gguf",
         "`id`.gguf", "base", "out/a-b_1.0", "True", "nan", "1_0", "a/1e5", "-inf"]  # fmt: skip


def test_a_path_of_any_name_can_be_pasted():
    from omegaconf import OmegaConf

    script = "\n".join(f"printf '%s\\0' recipe.base={quote_for_hydra(Path(p))} {quote_for_shell(p)}" for p in PATHS)
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)
    words = done.stdout.split("\0")[:-1]
    for path, override, plain in zip(PATHS, words[::2], words[1::2], strict=True):
        value = parse([override])[0].value()
        assert OmegaConf.create({"base": value}).base == str(Path(path)), path
        assert plain.removeprefix("./") == path
        assert not plain.startswith("-")
        assert shlex.split(quote_for_hydra(Path(path)))


def test_a_plain_path_is_not_quoted():
    for path in ("m.gguf", "base", "outputs/lora-llama/2026-11-21_050553_073724"):
        assert quote_for_hydra(Path(path)) == path


def test_a_path_that_cannot_be_printed_is_made_harmless():
    assert quote_for_hydra(Path("a\x1b[31m\n.gguf")) == quote_for_shell("a\x1b[31m\n.gguf") == "a\\x1b[31m\\n.gguf"


# -- as a process -----------------------------------------------------------------------------------------------------


def toyexp(*words):
    return subprocess.run(
        [sys.executable, "-m", "toyexp", *map(str, words)], capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "describe: needs exactly one file"),
        (["a.gguf", "b.gguf"], "describe a.gguf b.gguf: needs exactly one file"),
        (["a.gguf", "--tensor"], "describe --tensor: unknown option; did you mean --tensors?"),
        (["missing.gguf"], "missing.gguf: not found"),
        (["broken.gguf"], "broken.gguf: is not a GGUF file"),
        (["empty"], "empty: is a directory without model.gguf or adapter.gguf"),
    ],
)
def test_bad_words_and_broken_files_are_one_line_and_exit_2(words, said, capsys):
    Path("broken.gguf").write_bytes(b"no model at all, but long enough to be one")
    Path("empty").mkdir()
    assert main(["describe", *words]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"toyexp: error: {said}")
    assert printed.err.count("\n") == 1


PLUGIN = """
from dataclasses import dataclass
from typing import ClassVar
from toyexp import hookimpl
from toyexp_models.gpt2 import GPT2

@hookimpl
def register_models(register):
    register(Mine)

@dataclass
class Mine(GPT2):
    "A model of one's own."
    name: ClassVar[str] = "mine"
    forms: ClassVar[dict] = GPT2.forms
"""


def test_a_plugins_model_is_known_where_the_plugin_is_named(monkeypatch, capsys):
    Path("my_models.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(".")
    from my_models import Mine

    model = replace(Mine(**{**SIZES, "d_ff": 64}), vocab=VOCAB)
    write_model(Path("mine.gguf"), model, {t.name: t.init.draw(t.shape, 0, t.name) for t in model.tensors()}, None)
    assert describe_json(capsys, "mine.gguf")["family"] is None
    assert main(["eval", "mine.gguf"]) == 2
    assert capsys.readouterr().err.endswith("; if it is in your own module, add 'plugins=[my_module]'\n")
    description = describe_json(capsys, "mine.gguf", "plugins=[my_models]")
    assert description["family"] == "mine" and description["forward"]
    commands = {use["what"]: use["command"] for use in description["uses"] if use["command"]}
    assert commands.keys() >= {"train on", "eval", "generate", "export"}
    assert all(command.endswith(" 'plugins=[my_models]'") for command in commands.values())
    for words in ([], ["plugins=[my_models]"]):
        assert main(["models", *words, "--json"]) == 0
        (listed,) = json.loads(capsys.readouterr().out)["models"]
        assert listed["here"] == ("base" if words else "donor")
        assert main(["models", *words]) == 0
        ending = " 'plugins=[my_models]'" if words else ""
        assert capsys.readouterr().out.endswith(f"; more about one: toyexp describe PATH{ending}\n")
    assert main(shlex.split(commands["export"])[1:]) == 0


def test_the_export_that_is_offered_writes_to_a_name_that_is_free(capsys):
    write_base(Path("model.gguf"), "llama", tokenizer=Bytes())
    for _ in range(2):
        (command,) = (use["command"] for use in describe_json(capsys, "model.gguf")["uses"] if use["what"] == "export")
        assert main(shlex.split(command)[1:]) == 0, command


def write_large_vocabulary(path, tokens=128_256, merges=280_147):
    """The header of a llama with a vocabulary as large as they come; its numbers are a hole in the file."""

    def text(word):
        return struct.pack("<Q", len(word)) + word.encode()

    def words(key, items):
        return text(key) + struct.pack("<IIQ", 9, 8, len(items)) + b"".join(map(text, items))

    sizes = {"context_length": 8192, "embedding_length": 2048, "block_count": 1, "feed_forward_length": 64,
             "attention.head_count": 16, "attention.head_count_kv": 4}  # fmt: skip
    keys = [text("general.architecture") + struct.pack("<I", 8) + text("llama")]
    keys += [text(f"llama.{k}") + struct.pack("<II", 4, v) for k, v in sizes.items()]
    keys += [text("llama.attention.layer_norm_rms_epsilon") + struct.pack("<If", 6, 1e-5)]
    keys += [text("tokenizer.ggml.model") + struct.pack("<I", 8) + text("gpt2")]
    keys += [words("tokenizer.ggml.tokens", [f"token{i}" for i in range(tokens)])]
    keys += [words("tokenizer.ggml.merges", [f"to ken{i}" for i in range(merges)])]
    model = replace(
        MODELS["llama"], d_model=2048, n_layers=1, n_heads=16, n_kv_heads=4, d_ff=64, vocab=tokens, tied=True
    )
    table, offset = b"", 0
    for t in model.tensors():
        table += text(t.name) + struct.pack(f"<I{len(t.shape)}QIQ", len(t.shape), *t.shape[::-1], 0, offset)
        offset += -(-4 * math.prod(t.shape) // 32) * 32
    head = b"GGUF" + struct.pack("<IQQ", 3, len(model.tensors()), len(keys)) + b"".join(keys) + table
    with open(path, "wb") as file:
        file.write(head + b"\0" * (-len(head) % 32))
        file.truncate(file.tell() + offset)


def test_a_gigabyte_with_128k_tokens_takes_a_second_and_little_memory():
    write_large_vocabulary("big.gguf")
    assert Path("big.gguf").stat().st_size > 1e9
    program = (
        "import sys; from toyexp.cli.main import main; main(['describe', 'big.gguf']);"
        "names = {m.partition('.')[0] for m in sys.modules};"
        "print(*names & {'hydra', 'omegaconf', 'torch', 'ggml', 'gguf', 'tokenizers', 'jinja2', 'transformers'});"
        "from toyexp.cli.bench_stepper import memory_bytes; print(memory_bytes()[1])"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    *lines, heavy, peak = done.stdout.splitlines()
    assert "1 block of " in "".join(lines)
    assert "128256 tokens" in "".join(lines)
    assert heavy == ""
    assert int(peak) < 200e6
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 3  # alone on the machine about 1


def test_the_process_returns_0_and_2():
    write_foreign(Path("phi.gguf"))
    done = toyexp("describe", "phi.gguf")
    assert (done.returncode, done.stderr) == (0, "")
    Path("broken.gguf").write_bytes(Path("phi.gguf").read_bytes()[:300])
    done = toyexp("describe", "broken.gguf")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
