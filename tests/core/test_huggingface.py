"""The directories for transformers: what is in them, what is refused, and that none is ever half written.

That transformers computes the same from them is tests/judge/test_huggingface.py.
"""

import json
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from texts import NASTY, hard_pieces, write_untrained
from tiny import MODELS, split_gguf, write_base

from toyexp import ModelExport, Rotary, RunFailed, Setup, UserError
from toyexp.base.formatting import format_bytes
from toyexp.cli.main import main
from toyexp.formats.file_plan import frozen_plan
from toyexp.formats.gguf.open_model import mappable_tensor, open_gguf, read_exported
from toyexp.formats.gguf.read import GGUFFile
from toyexp.formats.gguf.write import write_model
from toyexp.formats.huggingface import hf_notes, model_card, write_folder
from toyexp.plugins.discovery import load
from toyexp.plugins.exporter import card_facts
from toyexp.tokenizers.byte_level import BPE, Bytes, Characters
from toyexp.tokenizers.pretokenizers import PRE_TOKENIZERS
from toyexp.tokenizers.sentencepiece import BLANK, SentencePiece
from toyexp.tokenizers.tokenizer import SYMBOLS
from toyexp_formats.shipped import HuggingFace
from toyexp_models.huggingface import rope_scaling
from toyexp_models.llama import Llama
from toyexp_models.vit import ViT

CARD = "README.md"
FILES = [CARD, "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]


@pytest.fixture(autouse=True)
def change_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def names(folder="."):
    return sorted(p.name for p in Path(folder).iterdir())


def load_json(path):
    return json.loads(Path(path).read_text())


# -- rope's scaling ---------------------------------------------------------------------------------------------------


def llama3_factors(base, size, factor, low, high, original):
    """Frequency factors as the converters for GGUF compute them, in float32 from Meta's formula."""
    out = []
    for i in range(0, size, 2):
        frequency = np.float32(1) / np.float32(base) ** np.float32(i / size)
        wavelength = 2 * np.float32(np.pi) / frequency
        smooth = (original / wavelength - low) / (high - low)
        fast, slow = wavelength < original / high, wavelength > original / low
        out.append(1.0 if fast else factor if slow else 1 / ((1 - smooth) / factor + smooth))
    return tuple(float(str(np.float32(f))) for f in out)


@pytest.mark.parametrize(("size", "factor"), [(128, 8.0), (64, 32.0)])
def test_llama_3_rope_factors_are_exported_as_its_parameters(size, factor):
    factors = llama3_factors(500000.0, size, factor, 1, 4, 8192)
    assert rope_scaling(Rotary(500000.0, factors=factors), size, 131072) == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def test_rope_factors_of_the_same_formula_get_matching_parameters():
    """For any number of pairs between the fast and the slow ones, which may or may not determine the parameters."""
    rng, between = np.random.default_rng(0), set()
    for _ in range(300):
        base, size = float(10 ** rng.uniform(2, 6)), int(rng.choice([4, 8, 16, 64, 128]))
        factor, low = float(rng.uniform(1.5, 40)), float(rng.uniform(0.3, 2))
        arguments = (factor, low, low * float(rng.uniform(1.05, 6)), int(rng.integers(20, 10_000)))
        factors = llama3_factors(base, size, *arguments)
        between.add(min(3, sum(1 < f < max(factors) for f in factors)))
        parameters = rope_scaling(Rotary(base, factors=factors), size, 4096)
        if parameters is None or parameters["rope_type"] == "linear":
            assert len(set(factors)) == 1
            continue
        assert (
            json.loads(json.dumps(parameters)) == parameters
            and parameters["high_freq_factor"] > parameters["low_freq_factor"] > 0
        )
        restored = llama3_factors(base, size, *(parameters[k] for k in list(parameters)[1:]))
        np.testing.assert_allclose(restored, factors, rtol=2e-5)
    assert between == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("rotary", "expected"),
    [
        (Rotary(1e4), None),
        (Rotary(1e4, factors=(1.0, 1.0, 1.0, 1.0)), None),
        (Rotary(1e4, 2.5), {"rope_type": "linear", "factor": 2.5}),
        (Rotary(1e4, 2.0, (3.0, 3.0, 3.0, 3.0)), {"rope_type": "linear", "factor": 6.0}),
    ],
)
def test_one_rope_factor_for_all_pairs_is_linear_scaling(rotary, expected):
    assert rope_scaling(rotary, 8, 100) == expected


@pytest.mark.parametrize(
    ("rotary", "said"),
    [
        (Rotary(1e4, factors=(1.0, 1.0, 0.5, 4.0)), "cannot give them"),
        (Rotary(1e4, factors=(4.0, 2.0, 1.5, 1.0)), "cannot give them"),
        (Rotary(1e4, factors=(1.0, 1.5, 1.6, 1.7, 3.0, 3.0)), "cannot give them"),
        (Rotary(1e4, 2.0, (1.0, 1.0, 2.0, 4.0)), "rope_scale are both set"),
    ],
)
def test_rope_factors_that_transformers_lacks_are_rejected(rotary, said):
    with pytest.raises(UserError, match=said):
        rope_scaling(rotary, 2 * len(rotary.factors), 4096)


# -- toyexp export ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "word"), [("hf", "F32"), ("hf-f16", "F16"), ("hf-bf16", "BF16")])
def test_export_writes_the_directory(capsys, kind, word):
    model = write_base(Path("m.gguf"), "llama_tied_bias", tokenizer=Bytes(), vocab=260)
    assert main(["export", "m.gguf", "--type", kind, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (
        result["path"] == f"m-{kind}" and result["tensors"] == {word: len(model.tensors())} and result["warnings"] == []
    )
    assert names() == ["m-" + kind, "m.gguf"] and names(f"m-{kind}") == FILES
    assert result["bytes"] == sum(f.stat().st_size for f in Path(f"m-{kind}").iterdir())
    config = load_json(f"m-{kind}/config.json")
    assert config["architectures"] == ["LlamaForCausalLM"] and config["vocab_size"] == 260
    assert config["torch_dtype"] == {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}[word]
    assert config["transformers_version"] < "4.57"  # else that version warns of large vocabularies
    assert (config["bos_token_id"], config["eos_token_id"]) == (256, 256)
    assert load_json(f"m-{kind}/generation_config.json")["eos_token_id"] == 256
    if word == "BF16":  # which numpy does not have
        return
    stored = load_file(f"m-{kind}/model.safetensors")
    with GGUFFile("m.gguf") as file:
        ours = {name: file.read(name).astype(word.replace("F", "float")) for name in file.tensors}
    assert "lm_head.weight" not in stored  # tied
    np.testing.assert_array_equal(stored["model.embed_tokens.weight"], ours["token_embd.weight"])
    np.testing.assert_array_equal(stored["model.layers.1.mlp.down_proj.weight"], ours["blk.1.ffn_down.weight"])
    assert not stored["model.layers.0.self_attn.o_proj.bias"].any()  # which transformers has where it has the others
    for name, heads in (("q", 4), ("k", 1)):  # what llama.cpp's converter does brings them back
        for part in ("weight", "bias"):
            theirs = stored[f"model.layers.1.self_attn.{name}_proj.{part}"]
            back = theirs.reshape(heads, 2, -1, *theirs.shape[1:]).swapaxes(1, 2).reshape(theirs.shape)
            np.testing.assert_array_equal(back, ours[f"blk.1.attn_{name}.{part}"])


def test_a_split_quantised_model_is_exported_to_one_directory(tmp_path, capsys):
    write_base(tmp_path / "m.gguf", "gpt2", "q8_0", tokenizer=Bytes())
    part = split_gguf(tmp_path / "m.gguf")[0].name
    assert main(["export", part, "--type", "hf"]) == 0
    with GGUFFile("m.gguf") as file:
        ours = file.read("blk.1.ffn_up.weight")
    np.testing.assert_array_equal(load_file("m-hf/model.safetensors")["transformer.h.1.mlp.c_fc.weight"], ours.T)
    assert main(["export", "m.gguf", "--type", "hf-bf16"]) == 2
    assert "m.gguf: is quantised already" in capsys.readouterr().err and not Path("m-hf-bf16").exists()
    assert main(["export", "m.gguf", "--type", "hf-bf16", "--requantize"]) == 0


def test_missing_or_mismatching_parts_are_reported(capsys):
    write_untrained(Path("ids.gguf"), None, 40)
    assert main(["export", "ids.gguf", "--type", "hf"]) == 0
    assert "warning: written without a tokenizer: ids.gguf: it has no tokenizer" in capsys.readouterr().out
    assert names("ids-hf") == [CARD, "config.json", "generation_config.json", "model.safetensors"]
    config = load_json("ids-hf/config.json")
    assert config["eos_token_id"] is None and config["bos_token_id"] is None and config["pad_token_id"] is None
    model = write_base(Path("big.gguf"), "llama", tokenizer=Bytes())
    values = {t.name: t.init.draw(t.shape, 7, t.name) for t in model.tensors()}
    values["blk.0.ffn_up.weight"][1, 2] = 1e5
    write_model(Path("big.gguf"), model, values, Bytes())
    assert main(["export", "big.gguf", "--type", "hf-f16"]) == 0
    assert "model.layers.0.mlp.up_proj.weight has numbers up to 1e+05, too large for F16" in capsys.readouterr().out


def test_force_replaces_only_directories_of_the_same_format(capsys):
    write_base(Path("m.gguf"), "llama", tokenizer=Bytes())
    words = ["export", "m.gguf", "--type", "hf", "--to", "out"]
    assert main(words) == 0
    Path("out/config.json").write_text("old")
    assert main(words) == 2 and "out: already exists" in capsys.readouterr().err
    assert main([*words, "--force"]) == 0 and load_json("out/config.json")["model_type"] == "llama"
    assert names("out") == FILES and names() == ["m.gguf", "out"]
    Path("out/mine.txt").write_text("mine")
    Path("file").write_text("mine")
    Path("whole").mkdir()
    Path("link").symlink_to("whole")
    for target in ("out", "file", "link", "m.gguf"):
        assert main(["export", "m.gguf", "--type", "hf", "--to", target, "--force"]) == 2
        assert f"--to {target}: already exists and is not a directory written by this format" in capsys.readouterr().err
    assert Path("out/mine.txt").read_text() == Path("file").read_text() == "mine"


@pytest.mark.parametrize(
    "files",
    [
        {"config.json": "{}"},
        {"tokenizer.json": "{}"},
        {"model.safetensors": "whole"},
        {"config.json": "{}", "model.safetensors": "mine"},
    ],
)
def test_force_keeps_directories_without_settings_and_weights(files, capsys):
    write_base(Path("m.gguf"), "llama", tokenizer=Bytes())
    words = ["export", "m.gguf", "--type", "hf", "--to", "out", "--force"]
    Path("out").mkdir()
    assert main(words) == 0 and names("out") == FILES, "an empty directory is no loss"
    weights = Path("out/model.safetensors").read_bytes()
    shutil.rmtree("out")
    Path("out").mkdir()
    for name, content in files.items():
        Path("out", name).write_bytes(weights if content == "whole" else content.encode())
    before = {file: file.read_bytes() for file in Path("out").iterdir()}
    assert main(words) == 2
    assert "--to out: already exists and is not a directory written by this format" in capsys.readouterr().err
    assert {file: file.read_bytes() for file in Path("out").iterdir()} == before


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (MODELS["granite_nope"], "model.rope=false: transformers' granite always has RoPE"),
        (replace(MODELS["gemma3"], n_heads=5, n_kv_heads=1), "transformers' gemma3"),
        (MODELS["llama_all"], "rope_factors and model.rope_scale are both set"),
        (
            replace(MODELS["llama"], n_heads=5, n_kv_heads=1, head_dim=6),
            "model.n_heads=5 does not divide model.d_model=32",
        ),
        (
            ViT(d_model=16, n_layers=1, block="rmsnorm_silu", image_size=4, channels=1, classes=2),
            "model.block=rmsnorm_silu: only GGUF can hold it; transformers' ViT is layernorm_gelu",
        ),
    ],
)
def test_a_model_that_transformers_lacks_is_rejected(capsys, model, said):
    model = replace(model, vocab=257) if model.reads.text else model
    values = {t.name: t.init.draw(t.shape, 7, t.name) for t in model.tensors()}
    write_model(Path("m.gguf"), model, values, Bytes() if model.reads.text else None)
    assert main(["export", "m.gguf", "--type", "hf"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("toyexp: error: m.gguf: ") and said in err and err.count("\n") == 1
    assert names() == ["m.gguf"]


def test_directories_are_written_atomically(monkeypatch):
    """The disk fills up at each file in turn; an earlier directory of that name stays as it was."""
    model = write_base(Path("m.gguf"), "llama", tokenizer=Bytes())
    import toyexp.formats.huggingface as module

    with GGUFFile("m.gguf") as file:
        export = read_exported(file, [type(model)])
        for count in range(len(FILES) - 1):
            remaining = iter(range(count))

            def write(path, content, remaining=remaining):
                if next(remaining, None) is None:
                    raise OSError(28, "No space left on device")
                path.write_bytes(content)

            with monkeypatch.context() as patch:
                patch.setattr(module, "write_synced", write)
                with pytest.raises(RunFailed, match="out: could not be written: No space left on device"):
                    write_folder(Path("out"), export)
            assert names() == ["m.gguf"]
        write_folder(Path("out"), export)
        Path("out/config.json").write_text("first")

        class Broken(dict):
            def __getitem__(self, name):
                raise OSError(5, "Input/output error")

        with pytest.raises(RunFailed, match="Input/output error"):
            write_folder(Path("out"), replace(export, tensors=Broken()))
    assert names() == ["m.gguf", "out"] and Path("out/config.json").read_text() == "first"


def test_an_interrupt_while_replacing_restores_the_earlier_directory(monkeypatch):
    model, rename = write_base(Path("m.gguf"), "llama", tokenizer=Bytes()), Path.rename

    def interrupted(self, target):
        if self.parent.suffix == ".tmp":
            raise KeyboardInterrupt
        return rename(self, target)

    with GGUFFile("m.gguf") as file:
        export = read_exported(file, [type(model)])
        write_folder(Path("out"), export)
        Path("out/config.json").write_text("first")
        monkeypatch.setattr(Path, "rename", interrupted)
        with pytest.raises(KeyboardInterrupt):
            write_folder(Path("out"), export)
    assert names() == ["m.gguf", "out"] and Path("out/config.json").read_text() == "first"


# -- for llama.cpp's converter ----------------------------------------------------------------------------------------


def sentencepiece(unknown=1, **keys):
    pieces = ["<unk>", "<s>", "</s>", BLANK + "a", "  ", BLANK, "a"]
    types = np.array([2 * unknown or 1, 3, 3, 1, 4, 1, 1], np.int32)
    scores = np.array([0, 0, 0, -1.5, 0, -2, -3], np.float32)
    tokenizer = SentencePiece(pieces, scores, types, 2, frozenset({0, 1, 2}), **keys)
    tokenizer.bos, tokenizer.add_bos, tokenizer.user_defined, tokenizer.controls = (
        1,
        True,
        frozenset({4}),
        frozenset({0, 1}),
    )
    return tokenizer


# What SentencePiece's own protobuf classes write.
MODEL_FILE = (
    "0a0e0a053c756e6b3e150000000018020a0c0a033c733e150000000018030a0d0a043c2f733e150000000018030a0d0a04e2968161150000c0"
    "bf18010a0f0a06e29681e29681150000000018040a0c0a03e2968115000000c018010a0a0a016115000040c01801123118022007980200c002"
    "00c80201d00202d802ffffffffffffffffff01ea02053c756e6b3ef202033c733efa02043c2f733e1a100a086964656e746974791801200028"
    "01"
)


def test_a_sentencepiece_vocabulary_is_also_written_to_its_own_file(capsys):
    write_base(Path("m.gguf"), "llama", tokenizer=sentencepiece())
    assert main(["export", "m.gguf", "--type", "hf"]) == 0
    assert "note: " not in capsys.readouterr().out
    assert names("m-hf") == sorted([*FILES, "tokenizer.model"])
    assert Path("m-hf/tokenizer.model").read_bytes().hex() == MODEL_FILE
    config = load_json("m-hf/tokenizer_config.json")
    assert (config["unk_token"], config["add_prefix_space"], config["add_bos_token"]) == ("<unk>", True, True)
    (added_token,) = config["added_tokens_decoder"].items()
    assert added_token[0] == "4" and (added_token[1]["content"], added_token[1]["special"]) == ("  ", False)
    assert main(["export", "m.gguf", "--type", "hf", "--force"]) == 0  # it is one of ours


@pytest.mark.parametrize(("named", "padding"), [(32, 32), (None, 256), (999, 256)])
def test_the_padding_token_is_that_of_the_file_or_the_end_token(named, padding):
    tokenizer, model = Bytes(), replace(MODELS["llama"], vocab=257)
    tokenizer.source = {"ggml.padding_token_id": named}
    zeros = {t.name: np.zeros(t.shape, np.float32) for t in model.tensors()}
    write_folder(Path("out"), ModelExport(model, zeros, tokenizer))
    for name in ("config.json", "generation_config.json"):
        assert load_json(f"out/{name}")["pad_token_id"] == padding


def test_a_directory_names_its_tokenizer_class_if_transformers_would_use_another():
    for name in ("llama", "qwen2", "qwen3", "gemma", "gpt2"):
        write_base(Path(f"{name}.gguf"), name, tokenizer=Bytes())
        assert main(["export", f"{name}.gguf", "--type", "hf"]) == 0
        has_class = "auto_map" in load_json(f"{name}-hf/tokenizer_config.json")
        assert has_class == Path(f"{name}-hf/tokenization.py").exists() == (name == "qwen2")
    assert main(["export", "qwen2.gguf", "--type", "hf", "--force"]) == 0


def test_settings_that_the_converter_reads_from_gpt2_and_gemma():
    write_base(Path("gpt2.gguf"), "gpt2", tokenizer=Bytes())
    write_base(Path("gemma.gguf"), "gemma", tokenizer=sentencepiece(prefix=False))
    for name in ("gpt2", "gemma"):
        assert main(["export", f"{name}.gguf", "--type", "hf"]) == 0
    config = load_json("gpt2-hf/config.json")
    assert config["n_ctx"] == config["n_positions"] == 12
    assert load_json("gemma-hf/config.json")["eot_token_id"] == 2  # unless named, it takes token 107


def foreign_bpe(vocab=257, **keys):
    """A BPE as a GGUF from elsewhere has it, whose vocabulary the converter may know."""
    tokenizer = BPE([*SYMBOLS, "<|endoftext|>", *(f"word{i}" for i in range(257, vocab))], [], 256)
    tokenizer.source = {"ggml.pre": "qwen2", **keys}
    return tokenizer


@pytest.mark.parametrize(
    ("name", "sizes", "tokenizer", "said"),
    [
        ("llama", {}, Bytes(), "it has no byte tokenizer"),
        ("qwen2", {}, Characters.from_texts(["abc"]), "it has no char tokenizer"),
        ("llama", {}, BPE.train(["hello hello world world"] * 3, 270), "not small ones of your own"),
        ("llama", {}, None, "no tokenizer"),
        ("llama", {}, foreign_bpe(), ""),
        ("llama", {}, sentencepiece(), ""),
        ("llama", {}, sentencepiece(prefix=False), ""),
        ("llama", {}, sentencepiece(unknown=0), "token of type unknown"),
        ("qwen2", {}, sentencepiece(), ""),
        ("qwen2", {}, sentencepiece(prefix=False), "add_space_prefix=true"),
        ("qwen3", {}, foreign_bpe(), ""),
        ("qwen3", {"qkv_bias": True}, foreign_bpe(), "no bias on attn_output"),
        ("gemma", {}, sentencepiece(prefix=False), ""),
        ("gemma", {}, sentencepiece(), "add_space_prefix=false"),
        ("gemma", {}, foreign_bpe(), "no bpe tokenizer"),
        ("gemma", {"rope_scale": 2.0}, sentencepiece(prefix=False), "rope_scale"),
        ("gemma2", {}, sentencepiece(prefix=False), ""),
        ("gemma2", {"window_period": 3}, sentencepiece(prefix=False), "window_period"),
        ("gemma3", {}, sentencepiece(prefix=False), "window_rope_base"),  # the tiny model has another period
        ("gemma3_full", {}, sentencepiece(prefix=False), ""),
        ("olmo2", {}, foreign_bpe(), ""),
        ("qwen3moe", {"qkv_bias": True}, foreign_bpe(), "no bias on attn_output"),
        ("arcee", {}, foreign_bpe(), "no bias on attn_output"),
        ("arcee", {"qkv_bias": False}, foreign_bpe(), ""),
        ("smollm3", {}, foreign_bpe(), ""),
        ("smollm3", {"qkv_bias": True}, foreign_bpe(), "no bias on attn_output"),
        ("granite", {}, foreign_bpe(), "head_dim"),
        ("granite", {"head_dim": 0}, foreign_bpe(), ""),
        ("olmoe", {}, foreign_bpe(), ""),
        ("olmoe", {"norm_eps": 1e-6}, foreign_bpe(), "norm_eps"),
        ("lfm2", {}, foreign_bpe(), ""),
        ("mamba2", {}, foreign_bpe(), ""),
        ("mamba2_wide", {}, foreign_bpe(), "d_ff=2*d_model"),
        ("gpt2", {"d_ff": 128}, foreign_bpe(), ""),
        ("gpt2", {"d_ff": 128}, foreign_bpe(50257, **{"ggml.pre": "gpt-2"}), ""),
        ("gpt2", {"d_ff": 128}, foreign_bpe(50256, **{"ggml.pre": "gpt-2"}), "not small ones of your own"),
        ("gpt2", {}, foreign_bpe(), "d_ff=4*d_model"),
        ("gpt2", {"d_ff": 128}, sentencepiece(), "no spm tokenizer"),
    ],
)
def test_limits_of_the_converter_are_noted_in_one_line(name, sizes, tokenizer, said):
    notes = hf_notes(replace(MODELS[name], vocab=300, **sizes), {}, tokenizer)
    assert len(notes) == bool(said)
    assert not said or (said in notes[0] and "convert_hf_to_gguf.py" in notes[0])


def test_export_prints_the_note_of_the_converter(capsys):
    write_base(Path("m.gguf"), "llama", tokenizer=Bytes())
    assert main(["export", "m.gguf", "--type", "hf"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("note: llama.cpp's convert_hf_to_gguf.py cannot") and second.startswith("m-hf ")
    assert main(["export", "m.gguf", "--type", "f16"]) == 0
    assert "note: " not in capsys.readouterr().out


# -- the callback -----------------------------------------------------------------------------------------------------

RUN = [
    "plugins=[toyexp.testing.null]", "engine=noop", "model.d_model=16", "model.n_heads=2", "model.n_kv_heads=1",
    "model.d_ff=32", "model.n_layers=1", "model.context=16", "data=text", "data.path=book.txt", "data.tokenizer=byte",
    "steps=3", "eval_every=3", "hydra.run.dir=run", "checkpoint_every=0",
]  # fmt: skip


def test_a_run_exports_directories_and_prints_their_sizes(capsys):
    Path("book.txt").write_text("It was a bright cold day in April. " * 90)
    words = [
        "recipe=scratch",
        "callbacks=[default,hf_export]",
        "callbacks.hf_export.every=2",
        "callbacks.gguf_export.every=2",
    ]
    assert main([*RUN, *words, "callbacks.hf_export.dtype=bfloat16"]) == 0
    assert names("run/model-hf") == names("run/model-2-hf") == FILES
    card, score = Path("run/model-hf", CARD).read_text(), load_json("run/result.json")["eval_loss"]
    assert card.startswith("---\nlibrary_name: transformers\npipeline_tag: text-generation\n") and "base" not in card
    for row in (f"held-out loss | {score:.6g}", "data file | book.txt", "recipe | scratch", "step | 3", "seed | 0",
                "learning rate | 0.003", "engine | noop"):  # fmt: skip
        assert f"| {row} |" in card
    words = shlex.join([word for word in [*RUN, *words] if not word.startswith("hydra.")])
    assert f"\n```bash\ntoyexp {words} callbacks.hf_export.dtype=bfloat16\n```\n" in card
    assert re.search(r"\| training data \| [\d,]+ tokens \|", card)
    assert "held-out" not in Path("run/model-2-hf", CARD).read_text(), "there was no eval at step 2"
    for path in ("run", "run/model.gguf"):
        assert main(["export", path, "--type", "hf", "--to", "again", "--force"]) == 0
        ours, again = (
            [line for line in text.splitlines() if not re.match(r"\| (held-out ppl|duration) \|", line)]
            for text in (card, Path("again", CARD).read_text())
        )
        assert again == ours and "| duration | " in Path("again", CARD).read_text()
    assert main(["export", "run", "--type", "f16"]) == 0
    assert main(["export", "run/model-f16.gguf", "--type", "hf", "--to", "again", "--force"]) == 0
    assert f"| held-out loss before rounding to F16 | {score:.6g} |" in Path("again", CARD).read_text()
    shutil.copytree("run", "other")
    Path("other/config.yaml").write_text(Path("run/config.yaml").read_text().replace("seed: 0", "seed: 1"))
    for path in (
        "run/model-2.gguf",
        "other/model.gguf",
    ):  # of a step without an evaluation, and next to another run's settings
        assert main(["export", path, "--type", "hf", "--to", "again", "--force"]) == 0
        assert not re.search("held-out|duration", Path("again", CARD).read_text())
    assert "data file" not in Path("again", CARD).read_text()
    assert load_json("run/model-hf/config.json")["torch_dtype"] == "bfloat16"
    size = sum(f.stat().st_size for f in Path("run/model-hf").iterdir())
    assert f"model-hf  {format_bytes(size)}" in capsys.readouterr().out
    events = [json.loads(line) for line in Path("run/events.jsonl").read_text().splitlines()]
    assert "model-hf: llama.cpp's convert_hf_to_gguf.py cannot" in Path("run/log.txt").read_text()
    exports = [e for e in events if e["kind"] == "export" and e["path"].endswith("-hf")]
    assert [(e["step"], e["type"]) for e in exports] == [(2, "bfloat16"), (3, "bfloat16")] and exports[1][
        "bytes"
    ] == size


def test_a_model_card_omits_the_data_path_if_there_is_none():
    about = card_facts({"data": {"name": "random"}, "lr": 0.1}, "cpu", {}, {})
    card = model_card(ModelExport(Llama(d_model=16), {}, about=about))
    assert "| data | random |" in card and "| data file |" not in card and "toyexp data" not in card


def test_a_model_card_names_the_dataset_of_the_hub_and_no_directory_of_this_machine():
    cache = "/home/me/.cache/huggingface/hub/datasets--org--my-chats_2/snapshots/0a1b/train.jsonl"
    typed = [f"data.path={cache}", "recipe.base=../base.gguf", "plugins=[mine,/home/me/b.py]", "name=a b"]
    run = {
        "typed": typed,
        "model": {"adapters": "LoRA r=8 on q,v"},
        "backend": {"device": "H100"},
        "data": {"train_tokens": 1234, "train_path": "x"},
    }
    about = card_facts({"data": {"name": "chat", "path": cache}}, "cuda", {"loss": 1.5}, run, 7300.0)
    card = model_card(ModelExport(Llama(d_model=16), {}, about=about), adapter=True)
    assert "\ndatasets: [org/my-chats_2]\n---\n" in card and "/home/me" not in card
    for row in ("adapter | LoRA r=8 on q,v", "device | H100", "data file | train.jsonl", "training data | 1,234 tokens",
                "duration | 2.03 h", "held-out loss | 1.5"):  # fmt: skip
        assert f"\n| {row} |\n" in card
    command = "toyexp data.path=train.jsonl recipe.base=../base.gguf 'plugins=[mine,b.py]' 'name=a b'"
    assert card.endswith(f"```bash\n{command}\n```\n")


@pytest.mark.parametrize("url", ["https://huggingface.co/org/base", "https://huggingface.co/org/base/"])
def test_a_model_card_names_the_licence_and_repository_of_the_base(url):
    general = {"name": "mine", "run_id": "of-mine", "license": "apache-2.0", "base_model.0.repo_url": url}
    card = model_card(ModelExport(Llama(d_model=16), {}, general=general, about={"base": "b.gguf"}), adapter=True)
    assert "library_name: peft" in card and "license: apache-2.0\nbase_model: org/base\n---" in card
    assert "PeftModel.from_pretrained(base" in card and "| run | of-mine |" in card


@pytest.mark.parametrize("url", ["https://example.org/base", "https://huggingface.co/org/base/tree/main", ""])
@pytest.mark.parametrize("base", ["outputs/run-1", "base.gguf", "/models/org/base"])
def test_a_model_card_names_a_base_without_a_repository_only_in_its_text(url, base):
    general = {"base_model.0.repo_url": url, "base_model.0.name": "Small One"}
    for about, row in (({"base": base}, base), ({"base": None}, "Small One")):
        card = model_card(ModelExport(Llama(d_model=16), {}, general=general, about=about))
        assert "base_model:" not in card and f"| base | {row} |" in card


@pytest.mark.parametrize("merged", ["true", "false"])
def test_a_lora_run_also_exports_its_adapter(merged):
    Path("book.txt").write_text("It was a bright cold day in April. " * 90)
    write_base(Path("base.gguf"), "llama", tokenizer=Bytes())
    words = ["recipe=lora", "recipe.base=base.gguf", "recipe.rank=2", "recipe.alpha=3", "callbacks=[hf_export]"]
    words.append("recipe.targets=[q]")
    settings = [w for w in RUN if ("tokenizer" not in w and not w.startswith("model.")) or "context" in w]
    assert main([*settings, *words, "model.context=12", f"callbacks.hf_export.merged={merged}"]) == 0
    assert Path("run/model-hf").exists() is (merged == "true")
    assert names("run/adapter-hf") == [CARD, "adapter_config.json", "adapter_model.safetensors"]
    assert "| base | base.gguf |" in Path("run/adapter-hf", CARD).read_text()
    config = load_json("run/adapter-hf/adapter_config.json")
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (2, 3.0, "LORA")
    assert config["base_model_name_or_path"] == "base.gguf"
    assert config["target_modules"] == [f"model.layers.{i}.self_attn.q_proj" for i in (0, 1)]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("callbacks.hf_export.dtype=float8", "callbacks.hf_export.dtype=float8: did you mean float32"),
        ("callbacks.hf_export.every=-1", "callbacks.hf_export.every=-1: must be at least 0"),
        ("model.rope_factors=[1.0,0.5,1.0,1.0]", "transformers' llama3 scaling cannot"),
    ],
)
def test_an_impossible_export_is_rejected_before_the_run(capsys, words, said):
    Path("book.txt").write_text("It was a bright cold day in April. " * 90)
    assert main([*RUN, "recipe=scratch", "callbacks=[hf_export]", words]) == 2
    assert said in capsys.readouterr().err and not Path("run").exists()


# -- reading a directory ----------------------------------------------------------------------------------------------


def change_json(path, **changes):
    Path(path).write_text(json.dumps({**load_json(path), **changes}))


def make_folder(name="llama", kind="hf", tokenizer=None, **sizes):
    """Write m.gguf with random weights and the directory m-hf or such, and return the model."""
    model = write_base(Path("m.gguf"), name, tokenizer=tokenizer or Bytes(), **sizes)
    assert main(["export", "m.gguf", "--type", kind]) == 0
    return model


@pytest.mark.parametrize("name", sorted(MODELS.keys() - {"granite_nope", "llama_all", "lab", "lab_after"}))
def test_a_directory_has_the_weights_and_settings_of_the_model(name):
    """All tensors are equal, but gemma's norms, of which 1 is subtracted, and mamba2's ssm_a, stored as logarithms."""
    make_folder(name)
    back = HuggingFace().read(Path("m-hf"), load().models())
    with GGUFFile("m.gguf") as file:
        for tensor, array in back.tensors.items():
            if tensor in file.tensors:
                tolerance = {"rtol": 2e-7 * tensor.endswith("ssm_a"), "atol": 1e-6 * name.startswith("gemma")}
                np.testing.assert_allclose(array, file.read(tensor), **tolerance)
            else:
                assert tensor.endswith(".bias") and not array.any()  # transformers has all biases or none
    write_model(Path("again.gguf"), back.model, back.tensors, back.tokenizer)
    for path in ("m.gguf", "again.gguf"):
        assert main(["export", path, "--type", "hf", "--to", f"{path}-hf"]) == 0
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        assert load_json(f"m.gguf-hf/{name}") == load_json(f"again.gguf-hf/{name}")


def spread_over_shards(folder):
    """Split model.safetensors into two files of the names that transformers gives them."""
    tensors = load_file(f"{folder}/model.safetensors")
    for i in (0, 1):
        part = {name: t for n, (name, t) in enumerate(tensors.items()) if n % 2 == i}
        save_file(part, f"{folder}/model-0000{i + 1}-of-00002.safetensors")
    Path(folder, "model.safetensors").unlink()


def test_commands_and_recipes_take_a_directory(capsys):
    """Each gives what it gives for the GGUF that the directory was made from; bfloat16 stays bfloat16."""
    make_folder("smollm3")
    spread_over_shards("m-hf")
    Path("book.txt").write_text("It was a bright cold day in April. " * 60)
    texts = []
    for model in ("m.gguf", "m-hf"):
        words = ["--prompt", "It", "--tokens", "5", "--temperature", "0", "--engine", "cpu:threads=1", "--json"]
        capsys.readouterr()
        assert main(["generate", model, *words]) == 0
        texts.append(json.loads(capsys.readouterr().out)["ids"])
        assert main(["describe", model]) == 0
        words = (
            f"recipe=lora recipe.base={model} recipe.rank=2 data=text data.path=book.txt steps=2 lr=0.01 eval_every=2"
        )
        more = f"engine=cpu engine.threads=1 model.context=12 hydra.run.dir=run-{model} checkpoint_every=0"
        assert main([*words.split(), *more.split()]) == 0
    assert texts[0] == texts[1]
    with GGUFFile("run-m.gguf/adapter.gguf") as a, GGUFFile("run-m-hf/adapter.gguf") as b:
        for name in a.tensors:
            np.testing.assert_allclose(a.read(name), b.read(name), rtol=0, atol=1e-6)
    assert main(["export", "m.gguf", "--type", "hf-bf16"]) == 0
    assert main(["export", "m-hf-bf16", "--type", "bf16", "--to", "b.gguf"]) == 0
    with GGUFFile("b.gguf") as file:
        assert {t.type for t in file.tensors.values() if len(t.shape) == 2} == {"BF16"}


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("llama", {"model_type": "qwen3_next"}, "its model_type is qwen3_next; did you mean qwen3_moe?"),
        ("olmo2", {"model_type": "olmo3"}, "its model_type is olmo3; did you mean olmoe?"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act is gelu; toyexp's model=llama has only silu"),
        ("llama", {"model_type": "mistral", "sliding_window": 0.5}, "model.context=0: must be"),
        ("qwen2", {"sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]}, "layer_types is "),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config is {'bits': 4}"),
        ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "its RoPE is {'rope_type': 'yarn'"),
        ("qwen3", {"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "its RoPE is {'rope_type': 'llama3'"),
        ("llama", {"num_hidden_layers": 1}, "has the tensor model.layers.1.input_layernorm.weight"),
        ("llama", {"num_hidden_layers": 3}, "lacks the tensor model.layers.2.input_layernorm.weight"),
        ("llama", {"num_attention_heads": None}, "gives no n_heads (num_attention_heads or n_head)"),
        ("llama", {"num_attention_heads": "x"}, "config.json: "),
        ("llama", {"rms_norm_eps": None}, "config.json: rms_norm_eps is null; expected a number"),
        ("llama", {"hidden_size": 36}, "shape [40, 32] for token_embd.weight, expected [40, 36]"),
        ("gemma3", {"layer_types": ["full_attention"] * 3}, ""),
        ("gemma3", {"layer_types": ["full_attention", *["sliding_attention"] * 2]}, "layer_types is "),
        ("gemma3", {"attn_logit_softcapping": 3.0}, "attn_logit_softcapping is 3.0"),
        ("smollm3", {"no_rope_layers": [1, 1, 0, 1, 1]}, "no_rope_layers is [1, 1, 0, 1, 1]"),
        ("qwen3moe", {"norm_topk_prob": False}, "norm_topk_prob is False; toyexp's model=qwen3moe has only True"),
        ("qwen3moe", {"mlp_only_layers": [0]}, "mlp_only_layers is [0]"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv is 8.0"),
    ],
)
def test_a_directory_of_another_architecture_is_refused(capsys, name, changes, said):
    make_folder(name, vocab=40, tokenizer=BPE([*SYMBOLS[:39], "<|endoftext|>"], [], 39))
    capsys.readouterr()
    change_json("m-hf/config.json", **changes)
    code = main(["export", "m-hf", "--type", "f32", "--to", "new.gguf"])
    error = capsys.readouterr().err
    assert (code, said in error, error.count("\n")) == ((2, True, 1) if said else (0, True, 0)), error


def test_the_base_of_an_output_layer_may_be_stored_alone():
    """Published directories of gpt2 were written by a class without an output layer; their names have no prefix."""
    make_folder("gpt2")
    tensors = load_file("m-hf/model.safetensors")
    masks = {"h.0.attn.bias": np.ones((1, 1, 4, 4), np.float32)}
    save_file({n.removeprefix("transformer."): t for n, t in tensors.items()} | masks, "m-hf/model.safetensors")
    back = HuggingFace().read(Path("m-hf"), load().models())
    with GGUFFile("m.gguf") as file:
        np.testing.assert_array_equal(back.tensors["blk.1.ffn_up.weight"], file.read("blk.1.ffn_up.weight"))


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2", "smollm", "tekken", "gpt-4o", "deepseek-llm", "viking"])
def test_a_pre_tokenizer_is_recognised_by_its_cuts(pre):
    tokenizer = BPE.train([*NASTY, "the cat sat on the mat, again and again. " * 9], 320, PRE_TOKENIZERS[pre])
    tokenizer.add_bos = PRE_TOKENIZERS[pre].add_bos
    model = replace(MODELS["llama"], vocab=tokenizer.vocab)
    tensors = {t.name: np.zeros(t.shape, np.float32) for t in model.tensors()}
    write_folder(Path("m-hf"), ModelExport(model, tensors, tokenizer))
    back = HuggingFace().read(Path("m-hf"), load().models()).tokenizer
    assert back.fingerprint() == tokenizer.fingerprint()
    assert [back.encode(text).tolist() for text in NASTY] == [tokenizer.encode(text).tolist() for text in NASTY]


@pytest.mark.parametrize("prefix", [True, False])
def test_a_sentencepiece_tokenizer_is_read_from_its_merges(prefix):
    tokenizer = hard_pieces(prefix)
    tokenizer.bos, tokenizer.add_bos, tokenizer.add_eos = 1, True, not prefix
    tokenizer.controls, tokenizer.user_defined = frozenset({0, 1}), frozenset({259, 260})
    make_folder(tokenizer=tokenizer)
    back = HuggingFace().read(Path("m-hf"), load().models()).tokenizer
    for text in NASTY:
        assert back.prompt(text).tolist() == tokenizer.prompt(text).tolist()
        assert back.decode(back.encode(text)) == tokenizer.decode(tokenizer.encode(text))


def test_a_directory_without_a_usable_tokenizer_has_token_ids_only(capsys):
    make_folder()
    contents = load_json("m-hf/tokenizer.json")
    change_json("m-hf/tokenizer.json", model={**contents["model"], "type": "Unigram"})
    words = ["generate", "m-hf", "--ids", "1,2", "--tokens", "3", "--engine", "cpu:threads=1"]
    capsys.readouterr()
    assert main(words) == 0
    said = "note: m-hf/tokenizer.json: it has no BPE but Unigram; only token ids can be used"
    assert said in capsys.readouterr().err
    assert main(["generate", "m-hf", "--prompt", "x"]) == 2
    assert "has no tokenizer" in capsys.readouterr().err
    Path("m-hf/tokenizer.json").write_text("{}")
    assert main(words) == 0
    assert "note: m-hf/tokenizer.json: it has no BPE" in capsys.readouterr().err
    Path("m-hf/model.safetensors").unlink()
    assert main(words) == 2
    assert "toyexp reads a directory with config.json and model.safetensors" in capsys.readouterr().err


# -- reading a directory in place -------------------------------------------------------------------------------------


KINDS = {"hf": "f32", "hf-f16": "f16", "hf-bf16": "bf16"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["llama_tied_bias", "gpt2", "gemma3", "qwen3moe", "lfm2", "mamba2"])
def test_an_open_directory_equals_the_gguf_of_its_model(name, kind):
    """Its keys, and each tensor's type and bytes, also of the first rows only."""
    make_folder(name, kind)
    exported = HuggingFace().read(Path(f"m-{kind}"), load().models())
    general = {"name": f"m-{kind}"}
    write_model(Path("m2.gguf"), exported.model, exported.tensors, exported.tokenizer, KINDS[kind], general)
    folder = open_gguf(f"m-{kind}")
    with GGUFFile("m2.gguf") as file:
        assert folder.kinds == file.kinds and folder.metadata.keys() == file.metadata.keys()
        for key, value in file.metadata.items():
            assert type(folder.metadata[key]) is type(value), key
            assert not isinstance(value, np.ndarray) or folder.metadata[key].dtype == value.dtype, key
            np.testing.assert_array_equal(folder.metadata[key], value)
        for name, info in file.tensors.items():
            other = folder.tensors[name]
            assert (other.name, other.shape, other.type, other.nbytes) == (name, info.shape, info.type, info.nbytes)
            np.testing.assert_array_equal(folder.read_raw(name), file.read_raw(name))
        np.testing.assert_array_equal(folder.read("token_embd.weight", 3), file.read("token_embd.weight", 3))


@pytest.mark.parametrize("kind", KINDS)
def test_engines_map_what_a_directory_stores_as_the_model_has_it(kind, tmp_path, monkeypatch):
    """The heads' rows have another order in transformers; a small file has norms only in float32."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    model = make_folder("llama_tied_bias", kind)
    assert main(["generate", f"m-{kind}", "--ids", "1,2", "--tokens", "2", "--engine", "ggml:threads=1"]) == 0
    plan = frozen_plan(model, Path(f"m-{kind}"), Setup(model.reads.inputs(8), rows=1))
    places = {t.name: info for t in plan.tensors if (info := mappable_tensor(t))}
    mapped = {name for name, info in places.items() if info.offset >= 0}
    assert {n for n in places.keys() - mapped if len(places[n].shape) == 2} == {
        f"blk.{i}.attn_{x}.weight" for i in range(model.n_layers) for x in "qk"
    }
    for name in mapped:
        info = places[name]
        assert info.path == Path(f"m-{kind}/model.safetensors")
        stored = info.path.read_bytes()[info.offset : info.offset + info.nbytes]
        assert stored == open_gguf(f"m-{kind}").read_raw(name).tobytes()
    assert not any((tmp_path / "temporary").iterdir())


def test_each_matrix_keeps_its_own_type():
    """Training tools store norms in float32 beside matrices in half precision."""
    make_folder("llama", "hf-f16")
    tensors = load_file("m-hf-f16/model.safetensors")
    save_file(
        {n: t.astype(np.float32) if "norm" in n or "layers.1.mlp.up" in n else t for n, t in tensors.items()},
        "m-hf-f16/model.safetensors",
    )
    types = {name: info.type for name, info in open_gguf("m-hf-f16").tensors.items()}
    assert types["blk.0.ffn_up.weight"] == types["blk.1.attn_q.weight"] == "F16"
    assert types["blk.1.ffn_up.weight"] == types["output_norm.weight"] == "F32"


def test_the_index_says_which_files_are_read(capsys):
    make_folder()
    spread_over_shards("m-hf")
    files = {i: load_file(f"m-hf/model-0000{i}-of-00002.safetensors") for i in (1, 2)}
    index = {name: f"model-0000{i}-of-00002.safetensors" for i, names in files.items() for name in names}
    Path("m-hf/model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    save_file({"other": np.zeros(3, np.float32)}, "m-hf/model-old.safetensors")
    assert main(["describe", "m-hf"]) == 0
    Path("m-hf/model-00002-of-00002.safetensors").unlink()
    capsys.readouterr()
    assert main(["describe", "m-hf"]) == 2
    assert "m-hf/model-00002-of-00002.safetensors: not found" in capsys.readouterr().err
    Path("m-hf/model.safetensors.index.json").write_text(json.dumps({"weight_map": []}))
    assert main(["describe", "m-hf"]) == 2
    assert "index.json: has no weight_map" in capsys.readouterr().err


@pytest.mark.parametrize("prefix", [True, False])
def test_a_sentencepiece_tokenizer_is_read_from_tokenizer_model(prefix):
    tokenizer = hard_pieces(prefix)
    tokenizer.bos, tokenizer.add_bos = 1, True
    tokenizer.controls, tokenizer.user_defined = frozenset({0, 1}), frozenset({259, 260})
    make_folder(tokenizer=tokenizer)
    Path("m-hf/tokenizer.json").unlink()
    back = HuggingFace().read(Path("m-hf"), load().models()).tokenizer
    assert (back.vocab, back.bos, back.eos, back.prefix) == (tokenizer.vocab, 1, tokenizer.eos, prefix)
    for text in NASTY:
        assert back.prompt(text).tolist() == tokenizer.prompt(text).tolist()
        assert back.decode(back.encode(text)) == tokenizer.decode(tokenizer.encode(text))


def test_a_broken_tokenizer_model_leaves_token_ids(capsys):
    tokenizer = hard_pieces(True)
    tokenizer.controls = frozenset({0, 1})
    make_folder(tokenizer=tokenizer)
    Path("m-hf/tokenizer.json").unlink()
    data = Path("m-hf/tokenizer.model").read_bytes()
    for broken in (b"", data[: len(data) // 2], b"\xff" * 40, b"\x0a\x04abcd", data.replace(b"\x18\x02", b"\x18\x01")):
        Path("m-hf/tokenizer.model").write_bytes(broken)
        problems = HuggingFace().read(Path("m-hf"), load().models()).unreadable
        assert len(problems) == 1 and problems[0].startswith("m-hf/tokenizer.model: ") and "token ids" in problems[0]


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Put the directory m-hf into a Hugging Face cache as my-org/tiny.v1, as links to its files."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    make_folder("llama", "hf-bf16")
    repository = tmp_path / "hub" / "models--my-org--tiny.v1"
    for part in ("refs", "snapshots/abc", "blobs"):
        (repository / part).mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    for i, file in enumerate(sorted(Path("m-hf-bf16").iterdir())):
        file.rename(repository / "blobs" / str(i))
        (repository / "snapshots/abc" / file.name).symlink_to(f"../../blobs/{i}")
    return repository


def test_the_id_of_a_downloaded_repository_is_taken_as_a_directory(hub, capsys):
    Path("book.txt").write_text("It was a bright cold day in April. " * 60)
    words = """recipe=lora recipe.base=my-org/tiny.v1 recipe.rank=2 data=text data.path=book.txt steps=2 eval_every=2
        engine=cpu engine.threads=1 model.context=12 hydra.run.dir=run checkpoint_every=0"""
    assert main(words.split()) == 0
    with GGUFFile("run/adapter.gguf") as file:
        assert file.metadata["general.base_model.0.name"] == "tiny.v1"
        assert file.metadata["general.base_model.0.repo_url"] == "https://huggingface.co/my-org/tiny.v1"
    assert main(["eval", "my-org/tiny.v1", "--data", "book.txt", "--adapter", "run/adapter.gguf"]) == 0
    assert "warning" not in capsys.readouterr().err
    assert main(["export", "my-org/tiny.v1", "--type", "q8_0"]) == 0 and Path("tiny.v1-q8_0.gguf").is_file()
    (hub / "snapshots" / "abc" / "model.safetensors").unlink()  # such as an interrupted download
    capsys.readouterr()
    assert main(["eval", "my-org/tiny.v1", "--data", "book.txt"]) == 2
    said = "my-org/tiny.v1: not found here and in the Hugging Face cache; to get it: hf download my-org/tiny.v1; "
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("data", ["text", "examples"])
def test_a_student_takes_the_tokenizer_of_a_directory_or_run(data, capsys):
    """The teacher is a directory of transformers, as is the tokenizer; then both are the first student's run."""
    make_folder(tokenizer=BPE.train(["It was a bright cold day in April. "] * 9, 280), vocab=280)
    Path("book.txt").write_text("It was a bright cold day in April. " * 60)
    Path("book.jsonl").write_text('{"text": "It was a bright cold day."}\n' * 9)
    words = f"""data={data} data.path=book.{"txt" if data == "text" else "jsonl"} steps=2 engine=ggml engine.threads=1
        model.d_model=16 model.n_layers=1 model.d_ff=32 model.context=12 objective=distil""".split()
    assert main([*words, "objective.teacher=m-hf"]) == 2
    assert "add data.tokenizer=m-hf" in capsys.readouterr().err
    for teacher, run in (("m-hf", "one"), ("./one", "two"), ("two/checkpoints/step-2", "three")):
        more = [f"objective.teacher={teacher}", f"data.tokenizer={teacher}", f"hydra.run.dir={run}"]
        assert main([*words, *more, "checkpoint_every=2"]) == 0
        assert (
            open_gguf(f"{run}/model.gguf").metadata["tokenizer.ggml.tokens"]
            == open_gguf("m.gguf").metadata["tokenizer.ggml.tokens"]
        )


def test_a_changed_directory_is_another_base(capsys):
    make_folder()
    Path("book.txt").write_text("It was a bright cold day in April. " * 60)
    words = """recipe=lora recipe.base=m-hf recipe.rank=2 data=text data.path=book.txt steps=2 eval_every=2
        engine=cpu engine.threads=1 model.context=12 hydra.run.dir=run checkpoint_every=2"""
    assert main([*words.split(), "callbacks=[default,hf_export]"]) == 0
    card = Path("run/adapter-hf/README.md").read_text()
    assert "| base | m-hf |" in card and '("BASE")  # the base above\n' in card
    Path("m-hf/README.md").write_text("my notes")
    assert main(["resume=run", "steps=3"]) == 0
    tensors = load_file("m-hf/model.safetensors")
    save_file({name: tensor * 2 for name, tensor in tensors.items()}, "m-hf/model.safetensors")
    capsys.readouterr()
    assert main(["resume=run", "steps=4"]) == 2
    assert "base" in capsys.readouterr().err
