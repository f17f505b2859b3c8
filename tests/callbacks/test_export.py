import sys

import numpy as np
import pytest

from toyexp.formats.gguf.ggml_types import iter_pieces
from toyexp.formats.gguf.read import GGUFFile
from toyexp.formats.gguf.write import Writer

# Largest error relative to the largest number of a block of 32: half a unit in the last place of the type; Q8_0 also
# rounds each block's scale to an F16.
ROUNDING = {"f16": 2**-11, "bf16": 2**-8, "q8_0": 0.5 / 127 + 2**-11, "q5_1": 1 / 31 + 2**-10, "q4_0": 1 / 8 + 2**-10}


def tensors(path):
    with GGUFFile(path) as file:
        return {name: file.read(name) for name in file.tensors}


def test_the_export_of_an_untrained_model_holds_the_initial_values(train):
    # With lr=0 no step changes a weight, so one step and twelve must give the same file contents.
    after_one_step, after_twelve_steps = (
        tensors(train("lr=0", f"steps={n}", to=f"run{n}").dir / "model.gguf") for n in (1, 12)
    )
    trained = tensors(train("lr=0.01").dir / "model.gguf")
    assert after_one_step.keys() == after_twelve_steps.keys() == trained.keys()
    assert all(np.array_equal(after_one_step[name], after_twelve_steps[name]) for name in after_one_step)
    assert all(not np.array_equal(after_one_step[name], trained[name]) for name in after_one_step)


def test_the_file_has_the_name_of_its_run(train):
    run = train("name=mine", engine="noop")
    with GGUFFile(run.dir / "model.gguf") as file:
        keys = file.metadata
    assert keys["general.architecture"] == "llama"
    assert keys["general.name"] == "mine" and keys["general.run_id"] == "run" and keys["general.step"] == 12
    assert keys["general.config_sha256"] == run.events[0]["config_sha256"]


@pytest.mark.parametrize("kind", ["f16", "bf16", "q8_0", "q5_1", "q4_0"])
def test_a_smaller_type_rounds_matrices_and_keeps_norms(train, kind):
    exact = tensors(train(to="exact", engine="noop").dir / "model.gguf")
    rounded = tensors(train(f"callbacks.gguf_export.type={kind}", to="rounded", engine="noop").dir / "model.gguf")
    assert exact.keys() == rounded.keys()
    for name, values in exact.items():
        error = np.abs(values - rounded[name])
        if values.ndim < 2:
            assert not error.any(), name
            continue
        # Rows of 16 numbers do not divide into blocks of 32 and become F16, which is the more precise type.
        blocks = values.reshape(-1, min(32, values.shape[-1]))
        largest = np.abs(blocks).max(axis=1, keepdims=True)
        assert (error.reshape(blocks.shape) <= ROUNDING[kind] * largest + 1e-8).all(), name


def test_a_tensor_that_overflows_its_type_stays_float32(train, tmp_path):
    """A long run must not end without an export: a tensor too large for float16 is written as float32."""
    first = train("model.tied=false").dir / "model.gguf"
    writer = Writer()
    with GGUFFile(first) as file:
        for key, value in file.metadata.items():
            writer.add(key, value, file.kinds[key])
        for t in file.tensors.values():
            values = file.read(t.name)
            if t.name == "token_embd.weight":
                values[250] = 7e4  # a byte that does not occur in the text
            writer.add_numbers(t.name, t.shape, "F32", iter_pieces(values))
    writer.save(tmp_path / "base.gguf")
    words = ("recipe=full", f"recipe.base={tmp_path / 'base.gguf'}", "callbacks.gguf_export.type=f16", "lr=1e-4")
    run = train(*words, to="on")
    assert run.code == 0
    with GGUFFile(run.dir / "model.gguf") as file:
        types = {name: t.type for name, t in file.tensors.items()}
        assert types["token_embd.weight"] == "F32" and types["output.weight"] == "F16"
        assert file.read("token_embd.weight")[250, 0] == pytest.approx(7e4, rel=1e-3)


def test_k_quants_without_llama_cpp_are_rejected_before_the_run(train, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    run = train("callbacks.gguf_export.type=q4_k_m", engine="noop")
    assert run.code == 2 and "callbacks.gguf_export.type=q4_k_m needs llama.cpp, which is not installed" in run.err
    assert not run.dir.exists()


def test_the_setting_every_exports_during_the_run_and_only_once_at_the_end(train):
    run = train("callbacks.gguf_export.every=4", engine="noop")
    assert sorted(p.name for p in run.dir.glob("*.gguf")) == ["model-4.gguf", "model-8.gguf", "model.gguf"]
    assert [(e["step"], e["path"].split("/")[-1]) for e in run.select("export")] == [
        (4, "model-4.gguf"),
        (8, "model-8.gguf"),
        (12, "model.gguf"),
    ]
    assert run.result["artifacts"] == [e["path"] for e in run.select("export")]


def test_a_failed_run_exports_nothing(train):
    run = train("engine.nan_at=3", engine="noop")
    assert run.code == 1 and not list(run.dir.rglob("*.gguf"))


BLOCKING_PLUGIN = """
from dataclasses import dataclass
from typing import ClassVar
from toyexp import Callback, hookimpl

@dataclass(eq=False)
class Alien(Callback):
    "Create a directory at the path of the model file."
    name: ClassVar[str] = "alien"
    @hookimpl
    def on_start(self, run):
        (run.dir / "model.gguf").mkdir()
        (run.dir / "model.gguf" / "mine").touch()

@hookimpl
def register_callbacks(register):
    register(Alien)
"""


def test_an_export_whose_path_exists_fails_the_run_and_keeps_other_results(train, local_plugin):
    plugins = f"plugins=[toyexp.testing.null,{local_plugin(BLOCKING_PLUGIN)}]"
    run = train("callbacks=[default,plots,alien]", plugins, engine="noop")
    assert run.code == 1 and (run.dir / "model.gguf" / "mine").exists()
    assert run.err.startswith("toyexp: error: ") and "model.gguf: could not be written: it exists" in run.err
    assert run.events[-1]["exit_code"] == 1 and run.events[-1]["reason"] == "completed"
    assert run.result["eval_loss"] is not None
    assert (run.dir / "plots" / "curves.png").exists()
    assert not list(run.dir.rglob("*.tmp"))


def test_an_unknown_type_is_rejected(train):
    run = train("callbacks.gguf_export.type=int4")
    assert run.code == 2 and "int4" in run.err and "q8_0" in run.err
    assert not run.dir.exists()
