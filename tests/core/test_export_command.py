"""`toyexp export`: a file again in another type, with every key as it was, or one plain error and nothing written."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from texts import hard_pieces
from tiny import MODELS, chat_tokenizer, split_gguf, write_base

from toyexp.base.errors import RunFailed
from toyexp.base.formatting import format_bytes
from toyexp.base.writing import convert_write_errors
from toyexp.cli.main import main
from toyexp.formats.gguf.form import read_model
from toyexp.formats.gguf.quantise import FILE_TYPES, K_QUANTS
from toyexp.formats.gguf.read import GGUFFile
from toyexp.formats.gguf.tokenizer import read_tokenizer
from toyexp.formats.gguf.write import Writer, write_model
from toyexp.tokenizers.byte_level import Bytes

OWN = ("general.file_type", "general.quantization_version")


@pytest.fixture(autouse=True)
def change_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))  # where there is no llama-quantize


def strange_keys():
    """Keys of every value type, in an order of their own, some empty."""
    dtypes = ("u1", "i1", "u2", "i2", "u4", "i4", "f4", "?", "u8", "i8", "f8")
    keys = {f"x.one.{d}": np.dtype(d).type(1) for d in dtypes}
    keys |= {f"x.all.{d}": np.array([1, 0, 1], d) for d in dtypes}
    nothing = {"x.empty": "", "x.none": np.array([], np.int32), "x.no words": [], "x.words": ["é", "", "a\nb"]}
    return keys | nothing | {"general.alignment": np.uint32(64), "x.float": np.float32(0.1)}


@pytest.fixture
def source(tmp_path):
    """A model with strange keys behind its own."""
    write_base(tmp_path / "plain.gguf", "llama", tokenizer=Bytes())
    writer = Writer()
    with GGUFFile(tmp_path / "plain.gguf") as file:
        for key, value in strange_keys().items():
            writer.add(key, value)
        for key, value in file.metadata.items():
            writer.add(key, value, file.kinds[key])
        for t in file.tensors.values():
            writer.add_bytes(t.name, t.shape, t.type, [file.read_raw(t.name).ravel()])
    writer.save(tmp_path / "model.gguf")
    (tmp_path / "plain.gguf").unlink()
    return tmp_path / "model.gguf"


def fields(path):
    """Every key with its type and bytes, by gguf-py."""
    reader_fields = gguf.GGUFReader(path).fields.items()
    return {
        k: ([t.name for t in f.types], [p.tobytes() for p in f.parts[3:]]) for k, f in reader_fields if k[:5] != "GGUF."
    }


def tensors(path):
    with GGUFFile(path) as file:
        return {n: (t.type, file.read(n)) for n, t in file.tensors.items()}


def test_export_to_f32_keeps_every_key_and_tensor(source, capsys):
    assert main(["export", "model.gguf", "--type", "f32", "--to", "again.gguf"]) == 0
    assert fields("again.gguf") == fields(source)
    assert list(fields("again.gguf")) == list(fields(source))
    theirs = {t.name: t for t in gguf.GGUFReader(source).tensors}
    for t in gguf.GGUFReader("again.gguf").tensors:
        assert t.tensor_type.name == "F32"
        assert t.data.tobytes() == theirs[t.name].data.tobytes()
        assert t.data_offset % 64 == 0  # the alignment of the source
    assert source.read_bytes() == (source.parent / "again.gguf").read_bytes()
    size = f"{source.stat().st_size / 1e3:.3g} kB"
    assert capsys.readouterr().out.startswith(f"again.gguf  {size} -> {size}  (")
    assert [format_bytes(n) for n in (900, 4992, 999_600, 1_234_567)] == ["0.9 kB", "4.99 kB", "1 MB", "1.23 MB"]


@pytest.mark.parametrize("kind", [k for k in FILE_TYPES if k != "f32"])
def test_a_type_rounds_like_a_runs_export_and_keeps_every_key(source, kind):
    assert main(["export", "model.gguf", "--type", kind]) == 0
    before, after = fields(source), fields(f"model-{kind}.gguf")
    assert {k: v for k, v in before.items() if k not in OWN} == {k: v for k, v in after.items() if k not in OWN}
    exact = {n: array for n, (_, array) in tensors(source).items()}
    with GGUFFile(f"model-{kind}.gguf") as file:
        assert file.metadata["general.file_type"] == FILE_TYPES[kind]
        model = read_model(type(MODELS["llama"]), file)
    write_model(source.parent / "run.gguf", model, exact, Bytes(), kind)
    run, ours = tensors("run.gguf"), tensors(f"model-{kind}.gguf")
    assert {n: t for n, (t, _) in ours.items()} == {n: t for n, (t, _) in run.items()}
    assert all(np.array_equal(ours[n][1], run[n][1]) for n in exact)


def test_dequantising_is_exact_and_requantising_needs_a_flag(source, capsys):
    assert main(["export", "model.gguf", "--type", "q4_1"]) == 0
    assert main(["export", "model-q4_1.gguf", "--type", "f32"]) == 0
    ours, back = tensors("model-q4_1.gguf"), tensors("model-q4_1-f32.gguf")
    assert {t for t, _ in back.values()} == {"F32"}
    assert all(np.array_equal(ours[n][1], back[n][1]) for n in ours)
    assert main(["export", "model-q4_1.gguf", "--type", "q5_0"]) == 2
    err = capsys.readouterr().err
    assert "model-q4_1.gguf: is quantised already (13 of 21 tensors: Q4_1)" in err and "--requantize" in err
    assert not Path("model-q4_1-q5_0.gguf").exists()
    assert main(["export", "model-q4_1.gguf", "--type", "q5_0", "--requantize"]) == 0
    assert tensors("model-q4_1-q5_0.gguf")["blk.0.attn_q.weight"][0] == "Q5_0"
    assert main(["export", "model-q4_1.gguf", "--type", "q4_1", "--to", "same.gguf"]) == 0  # nothing to round
    assert (source.parent / "same.gguf").read_bytes() == (source.parent / "model-q4_1.gguf").read_bytes()


def test_a_split_model_becomes_one_file(source):
    paths = split_gguf(source)
    assert main(["export", paths[0].name, "--type", "f32"]) == 0
    assert fields("model-f32.gguf") == fields(source)
    ours, before = tensors("model-f32.gguf"), tensors(source)
    assert list(ours) == list(before)
    assert all(np.array_equal(ours[n][1], before[n][1]) for n in before)


def test_a_run_directory_stands_for_its_model_and_json_describes_the_export(source, capsys):
    (source.parent / "run").mkdir()
    source.rename(source.parent / "run" / "model.gguf")
    assert main(["export", "run", "--type=q8_0", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["path"] == "run/model-q8_0.gguf" and result["source"] == "run/model.gguf" and result["type"] == "q8_0"
    assert result["bytes"] == Path("run/model-q8_0.gguf").stat().st_size < result["source_bytes"]
    assert result["tensors"] == {"Q8_0": 14, "F16": 2, "F32": 5} and result["warnings"] == []


def test_values_out_of_range_are_written_with_a_warning(tmp_path, capsys):
    write_base(tmp_path / "nan.gguf", "llama", tokenizer=Bytes(), spoil="blk.0.ffn_up.weight")
    for kind in ("f32", "f16"):  # copied, and rounded
        assert main(["export", "nan.gguf", "--type", kind]) == 0
        assert "warning: blk.0.ffn_up.weight contains NaN or infinity" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("model.gguf", "export model.gguf: needs a type: toyexp export model.gguf --type q8_0"),
        ("--type q8_0", "needs exactly one file or run directory, and a type"),
        ("model.gguf other.gguf --type q4_0", "and a type: toyexp export model.gguf --type q8_0 --to small.gguf"),
        ("model.gguf --type q8_0 --to=", "export --to '': is empty (an unset shell variable?); leave it out, or"),
        ("model.gguf --type q8_0 --to pipe --force", "--to pipe: already exists and is not a model file"),
        ("model.gguf --type", "--type needs a value, such as --type q8_0"),
        ("model.gguf --type f32 --to", "--to needs a value, such as --to small.gguf"),
        ("model.gguf --type q8", "did you mean q8_0?"),
        ("model.gguf --type int4", "choose one of: bf16, f16, f32, gguf, hf, hf-bf16, hf-f16, onnx, q2_k"),
        ("model.gguf --typ q8_0", "unknown option; did you mean --type?"),
        (
            "model.gguf --type q4_k_m",
            "--type=q4_k_m needs llama.cpp, which is not installed: put its llama-quantize",
        ),
        ("nowhere.gguf --type q8_0", "nowhere.gguf: not found"),
        ("empty --type q8_0", "empty: is a directory without model.gguf"),
        ("book.txt --type q8_0", "book.txt: is not a GGUF file"),
        ("model.gguf --type q8_0 --to nowhere/x.gguf", "--to nowhere/x.gguf: there is no directory nowhere"),
        ("model.gguf --type q8_0 --to empty", "not a model file, so --force does not replace it; name a file in it"),
        (
            "model.gguf --type q8_0 --to other.gguf",
            "--to other.gguf: already exists; choose another path, or replace it",
        ),
        ("model.gguf --type q8_0 --to there.gguf --force", "there.gguf: already exists and is not a model file"),
        ("model.gguf --type q8_0 --to config.yaml --force", "config.yaml: already exists and is not a model file"),
        ("model.gguf --type safetensors --to config.yaml --force", "and is not a model file, so --force does not repl"),
        ("model.gguf --type safetensors --to dir.safetensors --force", "not replace it; name a file in it"),
        ("model.gguf --type safetensors --to mine.safetensors --force", "and is not a model file, so --force does not"),
        (
            "model.gguf --type safetensors --to empty.safetensors --force",
            "and is not a model file, so --force does not",
        ),
        (
            "model.gguf --type hf --to card --force",
            "--to card: already exists and is not a directory written by this format",
        ),
        ("model.gguf --type q8_0 --to model.gguf --force", "model.gguf: is the file to be read; choose another path"),
        ("adapter.gguf --type q8_0", "adapter.gguf: holds no model (general.type is adapter)"),
        ("adapter.gguf --type hf", "for PEFT, train again with 'callbacks=[default,hf_export]'"),
        ("other.gguf --type q8_0", "other.gguf: its architecture is mamba; choose one of: arcee, gemma"),
        (
            "vit.gguf --type q4_k_m",
            "vit.gguf: q4_k_m is written by llama.cpp, which does not support toyexp-vit; choose one of: bf16",
        ),
    ],
)
def test_an_impossible_export_is_one_error_and_writes_nothing(source, capsys, monkeypatch, words, said):
    if "vit.gguf" in words:
        put_program(source.parent, "exit 1")
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    for name in ("empty", "dir.safetensors"):
        (source.parent / name).mkdir()
    os.mkfifo(source.parent / "pipe")
    (source.parent / "book.txt").write_text("It was a bright cold day in April.")
    (source.parent / "empty.safetensors").touch()
    for name in ("there.gguf", "config.yaml", "mine.safetensors"):
        (source.parent / name).write_bytes(b"mine")
    (source.parent / "card").mkdir()
    (source.parent / "card/README.md").write_bytes(b"mine")
    for name, key, value in (
        ("adapter", "general.type", "adapter"),
        ("other", "general.architecture", "mamba"),
        ("vit", "general.architecture", "toyexp-vit"),
    ):
        writer = Writer()
        writer.add("general.architecture", "llama")
        writer.add(key, value)
        writer.save(source.parent / f"{name}.gguf")
    before = sorted(p.name for p in source.parent.rglob("*"))
    assert main(["export", *words.split(" ")]) == 2
    err = capsys.readouterr().err
    assert said in err and len(err.splitlines()) == 1, err
    assert sorted(p.name for p in source.parent.rglob("*")) == before and (source.parent / "pipe").is_fifo()
    for name in ("there.gguf", "config.yaml", "mine.safetensors", "card/README.md"):
        assert (source.parent / name).read_bytes() == b"mine"


def test_force_replaces_the_file_atomically(source):
    (source.parent / "there.gguf").write_bytes(b"GGUF, damaged")
    assert main(["export", "model.gguf", "--type", "q8_0", "--to", "there.gguf", "--force"]) == 0
    assert tensors("there.gguf")["blk.0.attn_q.weight"][0] == "Q8_0"
    assert sorted(p.name for p in source.parent.iterdir()) == ["model.gguf", "there.gguf"]


FULL_DISK = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))  # a write past it fails, as on a full disk
from toyexp.cli.main import main
sys.exit(main(["export", "model.gguf", "--type", "f16", "--to", "there.gguf", "--force"]))
"""


def test_a_full_disk_leaves_the_old_file_and_no_other(source):
    (source.parent / "there.gguf").write_bytes(b"GGUF, mine")
    run = subprocess.run([sys.executable, "-B", "-W", "error", "-c", FULL_DISK], capture_output=True, text=True)
    assert run.returncode == 1
    assert run.stderr == "toyexp: error: there.gguf: could not be written: File too large\n"
    assert (source.parent / "there.gguf").read_bytes() == b"GGUF, mine"
    assert sorted(p.name for p in source.parent.iterdir()) == ["model.gguf", "there.gguf"]


def test_an_os_error_without_errno_keeps_its_message():
    with pytest.raises(RunFailed, match=r"a\.npz: could not be written: boom$"), convert_write_errors(Path("a.npz")):
        raise OSError("boom")


# -- K-quants ---------------------------------------------------------------------------------------------------------


def put_program(directory, body):
    """A stand-in for llama-quantize: what toyexp does with its words, its file and its failure."""
    (directory / "bin").mkdir()
    program = directory / "bin" / "llama-quantize"
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)


def test_k_quants_are_made_by_llama_quantize(source, capsys):
    put_program(source.parent, 'echo "$@" > words; [ "$1" = --allow-requantize ] && shift; /bin/cp "$1" "$2"')
    assert main(["export", "model.gguf", "--type", "q4_k_m", "--to", "small.gguf"]) == 0
    arguments = (source.parent / "words").read_text().split()
    assert arguments[0] == "model.gguf" and arguments[2] == "Q4_K_M"
    assert arguments[1] != "small.gguf" and not (source.parent / arguments[1]).exists()
    assert (source.parent / "small.gguf").read_bytes() == source.read_bytes()
    assert main(["export", "model.gguf", "--type", "q8_0"]) == 0
    assert main(["export", "model-q8_0.gguf", "--type", "q6_k"]) == 2
    assert main(["export", "model-q8_0.gguf", "--type", "q6_k", "--requantize"]) == 0
    assert (source.parent / "words").read_text().startswith("--allow-requantize model-q8_0.gguf ")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ('echo "main: loading"; echo "failed to quantize: no room"; exit 1', "failed to quantize: no room"),
        ("kill -6 $$", "it ended with -6"),
    ],
)
def test_if_llama_cpp_fails_its_message_is_shown_and_no_file_is_left(source, capsys, body, said):
    put_program(source.parent, f': > "$2"; {body}')
    assert main(["export", "model.gguf", "--type", "q4_k_m", "--to", "small.gguf"]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"toyexp: error: small.gguf: llama.cpp could not write it: {said}") and err.count("\n") == 1
    assert sorted(p.name for p in source.parent.iterdir()) == ["bin", "model.gguf"]


def test_a_run_whose_quantising_fails_keeps_its_model(source, tmp_path):
    put_program(tmp_path, "exit 1")
    with GGUFFile(source) as file:
        values = {n: file.read(n) for n in file.tensors}
        model = read_model(type(MODELS["llama"]), file)
    with pytest.raises(
        Exception, match=r"could not write it: it ended with 1; the model is saved in float32 as .*run-f32\.gguf"
    ):
        write_model(tmp_path / "run.gguf", model, values, Bytes(), "q4_k_m")
    assert not (tmp_path / "run.gguf").exists()
    arrays = tensors(tmp_path / "run-f32.gguf")
    assert all(np.array_equal(arrays[n][1], values[n]) for n in values)
    (tmp_path / "bin" / "llama-quantize").write_text('#!/bin/sh\n/bin/cp "$1" "$2"\n')
    write_model(tmp_path / "run.gguf", model, values, Bytes(), "q4_k_m")
    assert (tmp_path / "run.gguf").exists() and not (tmp_path / "run-f32.gguf").exists()


def test_every_k_quant_is_one_that_llama_cpp_knows():
    assert {k: gguf.LlamaFileType[f"MOSTLY_{k.upper()}"].value for k in K_QUANTS} == K_QUANTS
    others = {k: v for k, v in FILE_TYPES.items() if k != "f32"}
    assert {k: gguf.LlamaFileType[f"MOSTLY_{k.upper()}"].value for k in others} == others


# -- new tokens -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokenizer", [chat_tokenizer(), hard_pieces(True)], ids=["bpe", "sentencepiece"])
@pytest.mark.parametrize("name", ["llama", "llama_tied_bias", "gpt2"])
def test_new_tokens_have_the_mean_of_the_old_rows_and_are_found_in_texts(capsys, name, tokenizer):
    write_base(Path("m.gguf"), name, tokenizer=tokenizer)
    assert main(["export", "m.gguf", "--type", "f32", "--new-tokens", "<|tool|>,<call>", "--to", "more.gguf"]) == 0
    count = tokenizer.vocab
    with GGUFFile("m.gguf") as base, GGUFFile("more.gguf") as file:
        assert base.tensors.keys() == file.tensors.keys()
        for tensor in base.tensors:
            before, after = base.read(tensor), file.read(tensor)
            if tensor in ("token_embd.weight", "output.weight"):
                np.testing.assert_array_equal(after[:count], before)
                mean = before.astype(np.float64).mean(0)
                np.testing.assert_allclose(after[count:], [mean, mean], rtol=1e-6, atol=1e-9)
            else:
                np.testing.assert_array_equal(after, before)
        assert read_model(type(MODELS[name]), file).vocab == count + 2
        old, new = read_tokenizer(base), read_tokenizer(file)
    assert new.pieces == [*old.pieces, "<|tool|>", "<call>"] and new.chat_template == old.chat_template
    assert (new.bos, new.eos, new.add_bos, new.controls) == (old.bos, old.eos, old.add_bos, old.controls)
    expected = [*old.encode("a b").tolist(), count, *new.encode(" c", after=count).tolist(), count + 1]
    assert new.encode("a b<|tool|> c<call>").tolist() == expected and new.decode([count]) == "<|tool|>"
    Path("book.txt").write_text("a b<|tool|> c<call>\n" * 200)
    words = ["recipe=full", "recipe.base=more.gguf", "data=text", "data.path=book.txt", "model.context=8", "lr=1e-2"]
    words += ["engine=ggml", "steps=2", "batch_size=2", "checkpoint_every=1", "hydra.run.dir=run"]
    assert main(words) == 0, capsys.readouterr().err
    with GGUFFile("more.gguf") as base, GGUFFile("run/model.gguf") as trained:
        assert read_tokenizer(trained).fingerprint() == new.fingerprint()
        assert (trained.read("token_embd.weight")[count:] != base.read("token_embd.weight")[count:]).all(1).all()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--new-tokens <|a|>,<|a|> --type f32", "--new-tokens: '<|a|>' is repeated"),
        ("--new-tokens <|im_end|> --type f32", "--new-tokens: '<|im_end|>' is a token already"),
        ("--new-tokens <|a|>, --type f32", "--new-tokens: '' is empty"),
        ("--new-tokens <|a|> --type hf", "--new-tokens: cannot be combined with --type hf; write a GGUF first"),
        ("--new-tokens <|a|> --type f16 --ollama", "--new-tokens: has no effect with --ollama"),
        ("--new-tokens <|a|>", "export m.gguf: needs a type"),
    ],
)
def test_new_tokens_that_cannot_be_added_are_one_error(capsys, words, said):
    write_base(Path("m.gguf"), "llama", tokenizer=chat_tokenizer())
    assert main(["export", "m.gguf", *words.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line and [path.name for path in Path().iterdir()] == ["m.gguf"]


def test_a_model_without_a_tokenizer_gets_no_new_tokens(capsys):
    write_base(Path("ids.gguf"), "llama")
    assert main(["export", "ids.gguf", "--type", "f32", "--new-tokens", "<|a|>"]) == 2
    assert "ids.gguf: --new-tokens: the model has no tokenizer" in capsys.readouterr().err
