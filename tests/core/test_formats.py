"""The formats that ship pass the kit, and what registering one gives: a word of --type and a callback."""

import json
import re
import shutil
import sys
from collections import UserDict
from dataclasses import dataclass, replace
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
from kinds import VIT
from safetensors.numpy import load_file, save_file
from tiny import MODELS, VOCAB, write_base

import toyexp
from toyexp import Callback, Format, ModelExport, RunFailed, UserError, hookimpl
from toyexp.cli.main import main
from toyexp.formats.gguf.form import PlainForm
from toyexp.formats.gguf.read import GGUFFile
from toyexp.formats.safetensors import SafetensorsFile, write_safetensors
from toyexp.plugins.discovery import load
from toyexp.plugins.exporter import exporter
from toyexp.plugins.rules import check_class
from toyexp.plugins.settings import list_settings
from toyexp.testing import FormatSuite, OpModel
from toyexp.testing.formats import _content as content
from toyexp.testing.formats import _end as end
from toyexp.testing.formats import _run as a_run
from toyexp.tokenizers.byte_level import Bytes
from toyexp_formats.shipped import GGUF, HuggingFace, Safetensors
from toyexp_models.gpt2 import GPT2
from toyexp_models.llama import Llama

TEXT = [replace(model, vocab=257) for name, model in MODELS.items() if name in (model.name, "llama_all")]


@dataclass
class Bare(GPT2):
    """GPT-2 under another name, which no format knows."""

    name: ClassVar[str] = "bare"
    forms: ClassVar[dict] = {}

    vocab: int = 257


@dataclass
class GeluLlama(Llama):
    """A llama with another activation, which states no forms."""

    name: ClassVar[str] = "gelu_llama"

    def gated(self, ops, gate, up):
        return ops.mul(ops.gelu(gate), up)


@dataclass
class Npz(Format):
    """Numpy's arrays, which it reads too."""

    name: ClassVar[str] = "npz"
    suffix: ClassVar[str] = ".npz"

    def write(self, exported, path):
        with open(path, "wb") as file:
            np.savez(file, **exported.tensors, sizes=json.dumps(exported.model.settings()))
        return []

    def read(self, path, models):
        arrays = dict(np.load(path))
        return ModelExport(Bare(**json.loads(str(arrays.pop("sizes")))), arrays)


@dataclass
class Folder(Npz):
    """A format that writes a directory."""

    name: ClassVar[str] = "folder"
    suffix: ClassVar[str] = "-npz"
    contents: ClassVar[frozenset] = frozenset({"all.npz"})

    def write(self, exported, path):
        path.mkdir()
        return super().write(exported, path / "all.npz")

    def read(self, path, models):
        return super().read(path / "all.npz", models)


class Torn(UserDict):
    """Tensors of which the last cannot be read, as on a failing disk."""

    def __getitem__(self, name):
        if name == list(self.data)[-1]:
            raise OSError(5, "Input/output error")
        return self.data[name]


class Suite(FormatSuite):
    """The kit's, and what holds of every format by the run that writes it."""

    def test_safetensors_are_written_atomically(self, tmp_path, monkeypatch):
        """If a tensor cannot be read, no file is left and an earlier export is unchanged."""
        run, callback = a_run(tmp_path, self.models[0]), self.callback()
        end(callback, run, step=2)
        before = {p.name: content(p) for p in tmp_path.iterdir()}
        exported = self.make_export(self.models[0])
        torn = replace(exported, tensors=Torn(exported.tensors))
        monkeypatch.setattr(callback, "build_export", lambda *_: torn)
        with pytest.raises(RunFailed, match="could not be written"):
            end(callback, run, step=4)
        assert {p.name: content(p) for p in tmp_path.iterdir()} == before


class TestGGUF(Suite):
    form, models, unsupported = GGUF(), [*TEXT, VIT, Bare(d_model=32)], [Bare(norm_eps=float("nan"))]


class TestGGUFInFloat16(Suite):
    form, models = GGUF(type="f16"), [*TEXT, VIT]


class TestSafetensors(Suite):
    form, models = Safetensors(), [*TEXT, VIT, Bare(d_model=32)]


class TestHuggingFace(Suite):
    form, models = HuggingFace(), [*(m for m in TEXT[:1] + TEXT[2:] if m.name != "lab"), VIT]
    unsupported = [
        OpModel(),
        MODELS["lab"],
        TEXT[1],
        replace(VIT, block="rmsnorm_silu"),
        replace(TEXT[0], n_heads=5, n_kv_heads=1, head_dim=6),
    ]

    def test_a_written_model_is_read_back(self, tmp_path, monkeypatch):
        """Of the models for text: a directory with a ViT is not read, and mamba2's decays are rounded as logarithms."""
        monkeypatch.setattr(self, "models", [m for m in self.models[:-1] if m.name != "mamba2"], raising=False)
        super().test_a_written_model_is_read_back(tmp_path)


@dataclass
class Tall(Format):
    """Numbers as text."""

    name: ClassVar[str] = "tall"
    suffix: ClassVar[str] = ".tall"
    types: ClassVar[dict] = {"tall-short": {"digits": 2}}

    digits: int = 9  # of a number
    names: list[str] | None = None  # of tensors, if not all

    def check(self):
        if self.digits < 1:
            raise UserError(f"digits={self.digits}: must be above 0")

    def write(self, exported, path):
        path.write_text("\n".join(f"{n} {a.flat[0]:.{self.digits}g}" for n, a in exported.tensors.items()))
        return []


def test_the_export_callback_of_a_format_has_the_formats_settings():
    cls = exporter(Tall)
    check_class(cls, Callback)
    settings = {s.name: (s.default, s.comment) for s in list_settings(cls)}
    assert list(settings) == ["every", "weights", "digits", "names"]
    assert settings["digits"] == (9, "of a number") and settings["every"][1]
    with pytest.raises(UserError, match=r"^callbacks\.tall_export\.digits=0: must be above 0"):
        cls(digits=0).check()


def test_shipped_values_of_type_are_stable_and_unique():
    words = load().types()
    assert {"f32", "f16", "bf16", "q8_0", "q4_k_m", "hf", "hf-f16", "hf-bf16"} <= words.keys()
    forms = {form for form, _ in words.values()}
    assert len(words) == sum(len({form.name, *form.types}) for form in forms)


LOCAL = """
from toyexp import hookimpl
from test_formats_tall import Tall

@hookimpl
def register_formats(register):
    register(Tall)
"""


@pytest.fixture
def tall(tmp_path, monkeypatch):
    """Provide a directory with a model, and the format as a plugin."""
    import sys

    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "test_formats_tall", sys.modules[__name__])
    (tmp_path / "tall_plugin.py").write_text(LOCAL)
    write_base(tmp_path / "model.gguf", "llama", tokenizer=Bytes())
    return tmp_path


def test_export_writes_a_plugins_format_with_its_settings(tall, capsys):
    plugin = "plugins=[tall_plugin]"
    assert main(["export", "model.gguf", "--type", "tall", plugin]) == 0
    assert main(["export", "model.gguf", "--type", "tall-short", plugin]) == 0
    assert main(["export", "model.gguf", "--type", "tall", "digits=2", "--to", "x.tall", plugin]) == 0
    assert (tall / "x.tall").read_bytes() == (tall / "model-tall-short.tall").read_bytes()
    with GGUFFile(tall / "model.gguf") as file:
        name, number = (tall / "model.tall").read_text().splitlines()[0].split()
        assert np.float32(number) == file.read(name).flat[0]
    capsys.readouterr()
    assert main(["export", "model.gguf", "--type", "tall", plugin]) == 2
    assert "model.tall: already exists" in capsys.readouterr().err
    assert main(["export", "--help", plugin]) == 0
    assert "tall, tall-short: Numbers as text." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("tall digits=0", "digits=0: must be above 0"),
        ("tall digits=many", "digits=many"),
        ("tall digit=1", "export digit=1: unknown setting of --type tall; did you mean digits?"),
        ("q8_0 type=f16", "export type=f16: --type q8_0 means type=q8_0; leave one out"),
        ("safetensors digits=1", "unknown setting of --type safetensors; it has no settings"),
        ("tal", "did you mean tall?"),
        ("hf-f8", "did you mean hf-f16?"),
    ],
)
def test_invalid_settings_give_one_line_and_write_nothing(tall, capsys, words, said):
    before = sorted(tall.iterdir())
    assert main(["export", "model.gguf", "--type", *words.split(), "plugins=[tall_plugin]"]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1
    assert sorted(p for p in tall.iterdir() if p.name != "__pycache__") == before


def test_a_quantised_file_becomes_half_precision_safetensors_only_on_request(tall, capsys):
    assert main(["export", "model.gguf", "--type", "q8_0"]) == 0
    assert main(["export", "model-q8_0.gguf", "--type", "safetensors"]) == 0
    assert main(["export", "model-q8_0.gguf", "--type", "hf-f16"]) == 2
    assert "is quantised already" in capsys.readouterr().err
    back = Safetensors().read(tall / "model-q8_0.safetensors", load().models())
    with GGUFFile(tall / "model-q8_0.gguf") as file:
        assert back.model == replace(MODELS["llama"], vocab=257) != VOCAB
        assert all(np.array_equal(array, file.read(name)) for name, array in back.tensors.items())
        assert back.general["name"] == file.metadata["general.name"] if "general.name" in file.metadata else True


def test_a_file_in_a_readable_format_is_accepted_wherever_a_gguf_is(tall, capsys):
    assert main(["export", "model.gguf", "--type", "safetensors"]) == 0
    (tall / "model.gguf").rename(tall / "first.gguf")
    for kind in ("gguf", "q8_0"):
        assert main(["export", "model.safetensors", "--type", kind]) == 0
        assert main(["export", "first.gguf", "--type", kind, "--to", f"by-{kind}.gguf"]) == 0
    for source, target in (("model.gguf", "first.gguf"), ("model-q8_0.gguf", "by-q8_0.gguf")):
        with GGUFFile(tall / source) as back, GGUFFile(tall / target) as file:
            assert {n: t.type for n, t in back.tensors.items()} == {n: t.type for n, t in file.tensors.items()}
            assert all(np.array_equal(back.read(n), file.read(n)) for n in file.tensors)
    capsys.readouterr()
    assert main(["describe", "model.safetensors"]) == 0
    output = capsys.readouterr().out
    assert output.startswith("file        model.safetensors, ") and "read as GGUF" in output.splitlines()[0]
    assert "llama (model=llama)" in output and "trained on ids" not in output
    assert re.search(r"toyexp recipe=full recipe\.base=\S*model\.safetensors", output)
    assert main(["recipe=full", "recipe.base=model.safetensors", "model.context=64"]) == 2
    assert "model.context=64: model.safetensors has a context of 12 tokens" in capsys.readouterr().err
    for words in (["generate", "model.safetensors", "--prompt", "a"], ["eval", "model.safetensors", "engine=ggml"]):
        assert main(words) == 2
        assert capsys.readouterr().err.startswith("toyexp: error: model.safetensors: ")
    save_file({"x": np.zeros(3, np.float32)}, tall / "theirs.safetensors")
    (tall / "torn.safetensors").write_bytes((tall / "model.safetensors").read_bytes()[:-9])
    for name, said in (("theirs", "was not written by toyexp"), ("torn", "tensor ")):
        assert main(["describe", f"{name}.safetensors"]) == 2
        err = capsys.readouterr().err
        assert err.startswith(f"toyexp: error: {name}.safetensors: {said}") and err.count("\n") == 1


@pytest.mark.parametrize("rows", [None, 5, 2, 0])
def test_half_precision_in_safetensors_is_read_in_float32(tmp_path, rows):
    half = np.random.default_rng(0).standard_normal((5, 3)).astype(np.float16)
    save_file({"w": half}, tmp_path / "half.safetensors", {"gguf": "{}"})
    read = SafetensorsFile(tmp_path / "half.safetensors").read("w", rows)
    assert read.dtype == np.float32
    np.testing.assert_array_equal(read, half[:rows])


def broken(header=None, body=bytes(24), **tensors):
    """A safetensors file of two tensors [3] with another header, or other words about its tensors."""
    usual = {"__metadata__": {"gguf": "{}"}, "a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]},
             "b": {"dtype": "F32", "shape": [3], "data_offsets": [12, 24]}}  # fmt: skip
    for name, entry in tensors.items():
        usual[name] = {**usual[name], **entry} if isinstance(entry, dict) else entry
    words = header if header is not None else json.dumps(usual).encode()
    return len(words).to_bytes(8, "little") + words + body


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (broken()[:5], "is not a complete safetensors file"),
        (broken()[:40], "is not a complete safetensors file"),
        (bytes(8) + broken()[8:], "is not a complete safetensors file: its header claims 0 bytes"),
        (b"\xff" * 40, "is not a complete safetensors file"),
        (b"", "is not a complete safetensors file"),
        (b"version https://git-lfs.github.com/spec/v1", "is a Git LFS pointer: git lfs pull"),
        (broken(b"{nonsense"), "its header is not a JSON object"),
        (broken(b"[1, 2]"), "its header is not a JSON object"),
        (broken(b"[" * 100_000), "its header is not a JSON object"),
        (broken(b"{}"), "was not written by toyexp"),
        (broken(__metadata__=None), "was not written by toyexp"),
        (broken(__metadata__={"gguf": None}), "its metadata gguf is not a JSON object"),
        (broken(__metadata__={"gguf": "null"}), "its metadata gguf is not a JSON object"),
        (broken(a=[1]), "tensor a has no dtype, shape and data_offsets"),
        (broken(a={"data_offsets": [1]}), "tensor a has no dtype, shape and data_offsets"),
        (broken(a={"dtype": "F33"}), "tensor a is of type F33, expected F32, F16, BF16"),
        (broken(a={"dtype": ["F32"]}), "tensor a is of type"),
        (broken(a={"shape": [-3]}), "tensor a has the shape [-3]"),
        (broken(a={"shape": "3"}), "tensor a has the shape 3"),
        (broken(a={"shape": [10**18] * 500}), "tensor a has the shape"),
        (broken(a={"shape": [4]}), "tensor a has 12 bytes, its shape [4] takes 16"),
        (broken(b={"data_offsets": [8, 20]}), "tensors a and b overlap"),
        (broken(b={"data_offsets": [16, 28]}, body=bytes(28)), "has 4 unused bytes before tensor b"),
        (broken(body=bytes(20)), "tensor b ends 4 bytes after the end of the file"),
        (broken(body=bytes(25)), "has 1 unused bytes after its last tensor"),
    ],
)  # fmt: skip
def test_broken_safetensors_give_a_one_line_error(tmp_path, raw, said):
    (tmp_path / "x.safetensors").write_bytes(raw)
    with pytest.raises(UserError) as error:
        SafetensorsFile(tmp_path / "x.safetensors")
    assert str(error.value).startswith(f"{tmp_path / 'x.safetensors'}: {said}") and "\n" not in str(error.value)


def test_written_safetensors_are_read_by_the_safetensors_library(tmp_path):
    rng = np.random.default_rng(3)
    values = {"a": rng.standard_normal((3, 5), np.float32), "b": rng.standard_normal(7, np.float32)}
    write_safetensors(tmp_path / "x", {n: (v.shape, v.view) for n, v in values.items()}, "F32", {"gguf": "{}"})
    back = load_file(tmp_path / "x")
    assert back.keys() == values.keys() and all(np.array_equal(back[n], v) for n, v in values.items())


@pytest.mark.parametrize("name", ["a", "ab", "abc"])
def test_tensor_data_in_safetensors_is_aligned_to_eight_bytes(tmp_path, name):
    """Aligned like the library does, for programs that memory-map the file."""
    write_safetensors(tmp_path / "x", {name: ((2,), lambda: np.ones(2, np.float32))}, "F32", {"gguf": "{}"})
    raw = (tmp_path / "x").read_bytes()
    assert int.from_bytes(raw[:8], "little") % 8 == 0 and len(raw) % 8 == 0
    assert load_file(tmp_path / "x").keys() == {name}


def test_export_lets_the_format_check_the_model_before_writing(tall, capsys, monkeypatch):
    def only_wide(self, model):
        if model.d_model < 64:  # which the file's is, and a llama by default is not
            raise UserError(f"d_model={model.d_model} is too narrow for tall files")

    monkeypatch.setattr(Tall, "check_model", only_wide)
    assert main(["export", "model.gguf", "--type", "tall", "plugins=[tall_plugin]"]) == 2
    assert capsys.readouterr().err == "toyexp: error: model.gguf: d_model=32 is too narrow for tall files\n"
    assert not (tall / "model.tall").exists()


def test_a_format_that_fails_is_named_and_leaves_no_file(tall, capsys, monkeypatch):
    before = sorted(tall.iterdir())
    monkeypatch.setattr(Tall, "write", lambda self, exported, path: {}["digit"])
    assert main(["export", "model.gguf", "--type", "tall", "plugins=[tall_plugin]"]) == 1
    err = capsys.readouterr().err
    assert "format.tall failed while it wrote the file: KeyError: 'digit'" in err and err.count("\n") == 1
    assert sorted(p for p in tall.iterdir() if p.name != "__pycache__") == before


def test_notes_of_a_format_are_one_line_each_without_control_characters(tall, capsys, monkeypatch):
    write = Tall.write

    def odd(self, exported, path):
        return [*write(self, exported, path), "odd\n\x1b[2Jnumbers"]

    monkeypatch.setattr(Tall, "write", odd)
    monkeypatch.setattr(Tall, "notes", lambda self, exported: ["read\nby \x1b]0;others\x07"], raising=False)
    assert main(["export", "model.gguf", "--type", "tall", "plugins=[tall_plugin]"]) == 0
    output = capsys.readouterr().out
    assert "warning: odd \\x1b[2Jnumbers\n" in output and "note: read by \\x1b]0;others\\x07\n" in output
    assert "\x1b" not in output


def test_a_format_that_leaves_a_link_is_an_error(tall, capsys, monkeypatch):
    def link(self, exported, path):
        path.symlink_to(tall / "model.gguf")
        return []

    monkeypatch.setattr(Tall, "write", link)
    assert main(["export", "model.gguf", "--type", "tall", "plugins=[tall_plugin]"]) == 1
    assert "format.tall wrote a link, expected a file" in capsys.readouterr().err
    assert not (tall / "model.tall").is_symlink()


RUN = ["data=random", "data.vocab=32", "model.d_model=16", "model.context=8", "model.d_ff=24", "steps=4",
       "eval_every=0", "engine=ggml", "engine.threads=1", "checkpoint_every=0"]  # fmt: skip


def test_a_run_exports_a_plugins_format_during_training_and_at_the_end(tall, capsys):
    words = ["callbacks=[gguf_export,tall_export]", "callbacks.tall_export.every=2", "callbacks.tall_export.digits=3",
             "hydra.run.dir=run", "plugins=[tall_plugin]", "checkpoint_every=4"]  # fmt: skip
    assert main([*RUN, *words]) == 0, capsys.readouterr().err
    assert {"model-2.tall", "model.tall", "model.gguf"} <= {p.name for p in (tall / "run").iterdir()}
    with GGUFFile(tall / "run" / "model.gguf") as file:
        written = dict(line.split() for line in (tall / "run" / "model.tall").read_text().splitlines())
        assert {n: float(f"{file.read(n).flat[0]:.3g}") for n in written} == {n: float(x) for n, x in written.items()}
    assert main(["resume=run", "steps=6", "plugins=[tall_plugin]"]) == 0, capsys.readouterr().err


OWN = """
from toyexp import hookimpl
from test_formats_tall import Bare, Folder, Npz

@hookimpl
def register_models(register):
    register(Bare)

@hookimpl
def register_formats(register):
    register(Npz)
    register(Folder)
"""


@pytest.fixture
def bare(tall, capsys):
    """A run of a model without any form, whose last checkpoint has the weights that it exported."""
    (tall / "bare_model.py").write_text(OWN)
    words = [*(w for w in RUN if "_every" not in w), "model=bare", "plugins=[bare_model]", "hydra.run.dir=run"]
    assert main([*words, "checkpoint_every=2", "eval_every=4"]) == 0, capsys.readouterr().err
    assert "only toyexp can read this file: model=bare has no form for GGUF" in (tall / "run" / "log.txt").read_text()
    assert main([*words, "callbacks=[hf_export]", "hydra.run.dir=other"]) == 2
    assert "model=bare cannot be written for transformers" in capsys.readouterr().err
    return tall


def evaluate_json(path, capsys):
    capsys.readouterr()
    assert main(["eval", path, "--json", "plugins=[bare_model]", "engine=ggml"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)["loss"]


def test_a_model_without_a_form_can_be_evaluated_trained_on_and_generated_with(bare, capsys):
    said = toyexp.open("run", plugins=["bare_model"])
    loss = evaluate_json("run", capsys)
    assert loss == pytest.approx(said.held_out["loss"], abs=1e-6)
    assert evaluate_json("run/checkpoints/step-4", capsys) == pytest.approx(loss, abs=1e-6)
    earlier = toyexp.open("run/checkpoints/step-2", plugins=["bare_model"])
    assert earlier.directory == said.directory and earlier.model == said.model and "step-2" in repr(earlier)
    last, ggml = toyexp.open("run/checkpoints/step-4", ["bare_model"]), "ggml:threads=1"
    written, again = (model.generate([1, 2], 4, temperature=0, engine=ggml) for model in (said, last))
    assert written == again and len(written) == 4
    assert np.abs(earlier.logits([1, 2, 3], ggml) - said.logits([1, 2, 3], ggml)).max() > 1e-4
    (bare / "run" / "model.gguf").unlink()  # as of a run that was killed
    assert evaluate_json("run", capsys) == pytest.approx(loss, abs=1e-6)
    assert main(["generate", "run", "--ids", "1,2", "--engine", ggml, "plugins=[bare_model]"]) == 0
    assert main(["recipe=full", "recipe.base=run", *NEXT]) == 0, capsys.readouterr().err
    assert toyexp.open("next", plugins=["bare_model"]).history.held_out["loss"][0] == pytest.approx(loss, abs=1e-6)
    shutil.rmtree("run/checkpoints")
    assert main(["eval", "run", "plugins=[bare_model]"]) == 2
    assert "the run saved no weights: callbacks=[default] writes model.gguf" in capsys.readouterr().err


def test_unknown_settings_of_a_model_without_a_form_are_rejected(tmp_path):
    plain = PlainForm()
    header = SimpleNamespace(architecture="bare", path=tmp_path, error=lambda cause: UserError(cause))
    for text in ("", "[]", "[1]", '{"d_model": 8, "depth": 3}', "3"):
        header.text = lambda key, text=text: text
        with pytest.raises(UserError, match="settings of model=bare"):
            plain.read(Bare, header)


NEXT = ["data=random", "data.vocab=32", "model.context=8", "steps=1", "engine=ggml", "engine.threads=1",
        "hydra.run.dir=next", "plugins=[bare_model]", "eval_every=1"]  # fmt: skip


@pytest.mark.parametrize("kind", ["npz", "folder"])
def test_a_file_that_a_format_reads_can_be_a_base(bare, kind, capsys):
    word = {"npz": "m.npz", "folder": "m-npz"}[kind]
    assert main(["export", "run", "--type", kind, "--to", word, "plugins=[bare_model]"]) == 0, capsys.readouterr().err
    loss = evaluate_json("run", capsys)
    assert main(["recipe=full", f"recipe.base={word}", *NEXT]) == 0, capsys.readouterr().err
    assert toyexp.open("next", plugins=["bare_model"]).history.held_out["loss"][0] == pytest.approx(loss, abs=1e-6)


def test_the_target_of_an_export_has_its_formats_suffix_and_is_not_the_source(tall, capsys):
    """Before anything is written."""
    for kind, name in (("safetensors", "x.gguf"), ("q8_0", "x.safetensors"), ("q8_0", "x.txt"), ("hf", "x.gguf")):
        assert main(["export", "model.gguf", "--type", kind, "--to", name]) == 2
        assert f"--to {name}: the name must end in " in capsys.readouterr().err
        assert not (tall / name).exists()
    assert main(["export", "model.gguf", "--type", "safetensors"]) == 0
    before = (tall / "model.safetensors").read_bytes()
    words = ["export", "model.safetensors", "--type", "safetensors", "--to", "model.safetensors", "--force"]
    assert main(words) == 2
    assert "is the file to be read" in capsys.readouterr().err
    assert (tall / "model.safetensors").read_bytes() == before


def test_force_checks_the_suffix_of_a_plugins_format_and_keeps_empty_files(tall, capsys):
    words = ["export", "model.gguf", "--type", "tall", "--to", "x.tall", "--force", "plugins=[tall_plugin]"]
    (tall / "x.tall").touch()
    assert main(words) == 2
    assert "x.tall: already exists and is not a model file" in capsys.readouterr().err
    (tall / "x.tall").write_text("token_embd.weight 1\n")
    assert main(words) == 0 and (tall / "x.tall").stat().st_size > 100


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "q8_0"}, "--type q8_0 is already used by format=gguf"),
        ({"suffix": ".gguf"}, "format=gguf uses already"),
        ({"suffix": "/../x"}, "the end of a file name"),
        ({"suffix": ""}, "the end of a file name"),
        ({"types": {"hf-f16": {}}}, "--type hf-f16 is already used by format=hf"),
    ],
)
def test_a_format_cannot_take_names_of_another(changes, message, monkeypatch):
    cls = dataclass(type("Theirs", (Tall,), {"name": "theirs", "suffix": ".theirs", "types": {}, **changes}))
    cls.__doc__ = "Numbers as text."
    module = ModuleType("theirs")
    module.register_formats = hookimpl(lambda register: register(cls), specname="register_formats")
    monkeypatch.setitem(sys.modules, "theirs", module)
    with pytest.raises(UserError, match=re.escape(message)):
        load(["theirs"])


def test_a_subclass_is_not_exported_as_its_base_class_unless_it_states_forms(tmp_path):
    model = GeluLlama(d_model=32, vocab=257)
    tensors = {t.name: np.zeros(t.shape, np.float32) for t in model.tensors()}
    export = ModelExport(model, tensors, Bytes())
    assert "model=gelu_llama has no form for GGUF" in GGUF().notes(export)[0]
    GGUF().write(export, tmp_path / "m.gguf")
    with GGUFFile(tmp_path / "m.gguf") as file:
        assert file.architecture == "gelu_llama" and "gelu_llama.settings" in file.metadata
    for write in (HuggingFace().check_model, lambda model: HuggingFace().write(export, tmp_path / "m-hf")):
        with pytest.raises(UserError, match=r"^model=gelu_llama cannot be written for transformers.*of its own$"):
            write(model)
    with pytest.raises(UserError, match="which does not support gelu_llama"):
        GGUF("q4_k_m").check_model(model)

    @dataclass
    class Wide(GeluLlama):
        """A subclass that states the forms of llama."""

        forms: ClassVar[dict] = Llama.forms

    assert Wide.forms == Llama.forms and not GeluLlama.forms
