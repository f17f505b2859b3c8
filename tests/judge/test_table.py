"""The table in the documentation: every architecture in every type, in every direction, compared with llama.cpp.

`make table` runs all of it and writes the table; the default suite covers the types of DEFAULT.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cells import CELLS, TYPES
from gguf import GGMLQuantizationType
from requantise import requantise

from toyexp import AdamW, Batch, Engine, Model, Plan, Recipe, Session, Setup, Unavailable
from toyexp.batching.tokens import TokenDataset
from toyexp.formats.file_plan import frozen_plan
from toyexp.formats.gguf.form import read_model
from toyexp.formats.gguf.quantise import K_QUANTS, check_type
from toyexp.formats.gguf.read import GGUFFile
from toyexp.formats.gguf.write import write_adapter, write_model
from toyexp.interfaces.plan import export_tensors
from toyexp.interfaces.recipe import start_session
from toyexp.tokenizers.byte_level import Bytes
from toyexp_ggml.engines import GGMLCPU
from toyexp_models.arcee import Arcee
from toyexp_models.gemma3 import Gemma2, Gemma3
from toyexp_models.gpt2 import GPT2
from toyexp_models.granite import Granite
from toyexp_models.lfm2 import Lfm2
from toyexp_models.llama import Gemma, Llama, Qwen2, Qwen3
from toyexp_models.mamba2 import Mamba2
from toyexp_models.moe import Olmoe, Qwen3Moe
from toyexp_models.olmo import Olmo2
from toyexp_models.smollm3 import SmolLM3
from toyexp_recipes.base import Full
from toyexp_recipes.lora import Lora
from toyexp_recipes.scratch import Scratch
from toyexp_recipes.warm import TABLE, Warm
from toyexp_torch.engines import TorchCPU

pytestmark = [pytest.mark.judge, pytest.mark.slow]

pytest.importorskip("xllamacpp", reason="the judge is llama.cpp, from the wheel xllamacpp: pip install 'toyexp[test]'")
pytest.importorskip("torch", reason="what files hold is computed in float32 by the torch engine")
ggml = pytest.importorskip("ggml", reason="models are trained by the ggml engine, and bases quantised by ggml")

DEFAULT = ("f32", "q8_0")
JUDGE = Path(__file__).with_name("judge_many.py")
TOKENIZER = Bytes()
CONTEXT = 16
PROSE = "The café sold 12 crêpes, didn't it? «Ja», said Zoë: 中文 und 🙂.\n\ndef f(x):\n\treturn x ** 2  # {}\n"

# Settings that differ from the defaults, so that a key that is not read or written changes the numbers.
SIZES = {"d_model": 64, "d_ff": 96, "context": CONTEXT, "norm_eps": 1e-3, "vocab": TOKENIZER.vocab}
ROPE = {"rope_base": 500.0, "rope_scale": 2.5}
FACTORS = np.linspace(1, 8, 64).round(2).tolist()
MODELS = {
    "llama": Llama(**SIZES, **ROPE, head_dim=24, rope_factors=FACTORS[:12], qkv_bias=True),
    "qwen2": Qwen2(**SIZES, **ROPE),
    "qwen3": Qwen3(**SIZES, **ROPE, head_dim=24),
    "gemma": Gemma(**SIZES, **ROPE, head_dim=24, n_kv_heads=1),
    "gpt2": GPT2(**SIZES),
    "gemma2": Gemma2(**SIZES, **ROPE, head_dim=24, window=7, score_softcap=3.0, final_softcap=8.0),
    "gemma3": Gemma3(**SIZES, **ROPE, head_dim=24, window=7, window_period=2, window_rope_base=100.0),
    "granite": Granite(
        **SIZES, **ROPE, embedding_scale=3.0, residual_scale=0.4, attention_scale=0.3, logit_scale=1.5, ffn_bias=True
    ),
    "olmo2": Olmo2(**SIZES, **ROPE),
    "arcee": Arcee(**SIZES, **ROPE, head_dim=24, tied=True),
    "smollm3": SmolLM3(**SIZES, **ROPE, n_layers=4, tied=True),
    "qwen3moe": Qwen3Moe(**{**SIZES, "d_ff": 32}, **ROPE, experts=6),
    "olmoe": Olmoe(**{**SIZES, "d_ff": 32}, **ROPE, experts=6),
    "lfm2": Lfm2(**SIZES, rope_base=500.0, conv_length=4, attention_layers=[1]),
    "mamba2": Mamba2(**{**SIZES, "d_ff": 128}, n_groups=2, state=16),
}

# The largest differences (of the loss, of any log-probability); test_llama_cpp.py explains them at TOLERANCE. llama.cpp
# has a float16 table of GELU for gpt2 and gemma.
EXACT = {"llama": (5e-6, 1e-4), "gpt2": (1.5e-4, 6e-3)}
ROUNDED = {"f32": (0.0, 0.0), "f16": (1.5e-4, 2e-2), "bf16": (1e-3, 1.5e-1)}
QUANTISED = (5e-3, 4e-1)
WIDER = (1.5e-2, 1.5)  # K-quants: one scale for 256 activations


# The ggml engine without BLAS rounds activations as llama.cpp does: differences were 9e-6 in all types but f16, and
# 2e-3 there. The margin is for other processors, whose kernels may round ties differently.
SAME_KERNELS = (1e-3, 3e-2)
# Models with experts are left out: toyexp multiplies by a position's shares before the last product of the experts and
# llama.cpp after it, so they round other activations.
EXPERTS = ("qwen3moe", "olmoe")
GELU = (
    "gpt2",
    "gemma",
    "gemma2",
    "gemma3",
)  # after llama.cpp's float16 table of GELU, later numbers may round differently


def sized_model(architecture: str, kind: str) -> Model:
    """Return the architecture's model for a type, with rows of 256 for a K-quant."""
    model = MODELS[architecture]
    if kind not in K_QUANTS:
        return model
    wide: dict[str, Any] = {"d_model": 256, "d_ff": 256, "n_layers": {"smollm3": 4, "lfm2": 2}.get(architecture, 1)}
    if architecture == "mamba2":
        wide["d_ff"] = 512  # a multiple of d_model for each of two groups
    if getattr(model, "head_dim", 0):
        wide["head_dim"] = 128
    if getattr(model, "rope_factors", None):
        wide["rope_factors"] = FACTORS
    return replace(model, **wide)


# -- llama.cpp --------------------------------------------------------------------------------------------------------


class Judge:
    """llama.cpp in its own process, which is restarted after a file that ended it."""

    def __init__(self, directory: Path):
        self.words = directory / "llama.cpp.txt"
        self.process: subprocess.Popen[str] | None = None

    def __call__(self, path: Path, windows: np.ndarray, adapter: Path | None = None) -> np.ndarray:
        """Return a file's log-probabilities [windows, T, V]; fail with llama.cpp's output if it rejects the file."""
        if self.process is None:
            with open(self.words, "w") as words:
                self.process = subprocess.Popen(
                    [sys.executable, str(JUDGE)],
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=words, text=True,
                    env={**os.environ, "GGML_NO_BACKTRACE": "1"},
                )  # fmt: skip
        question = {
            "model": str(path),
            "adapter": str(adapter) if adapter else None,
            "windows": windows.tolist(),
            "vocab": TOKENIZER.vocab,
            "plain": int(TOKENIZER.encode("e")[0]),
        }
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            told = [line for line in self.words.read_text(errors="replace").splitlines() if " I " not in line]
            code = self.close()
            pytest.fail(f"llama.cpp ended with {code} at {path.name}:\n" + "\n".join(told[-20:]))
        return np.array(json.loads(answer))

    def close(self) -> int | None:
        """End the process and return its exit code."""
        process, self.process = self.process, None
        if process is None:
            return None
        process.communicate()
        return process.returncode


# -- files ------------------------------------------------------------------------------------------------------------


def quantise(array: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """Return a matrix as bytes of a type, by ggml's own quantiser."""
    width = array.shape[-1]
    rows = array.size // width
    array = np.ascontiguousarray(array, np.float32)
    out = np.empty(ggml.ggml_row_size(kind, width) * rows, np.uint8)
    floats = array.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    ggml.ggml_quantize_chunk(int(kind), floats, out.ctypes.data_as(ctypes.c_void_p), 0, rows, width, None)
    return out.reshape(*array.shape[:-1], -1)


def dequantise(raw: np.ndarray, kind: str) -> np.ndarray:
    """Return rows of quantised bytes as numbers, by ggml itself."""
    type_id = GGMLQuantizationType[kind]
    if kind == "F32":
        return raw.view(np.float32)
    traits = ggml.ggml_get_type_traits(int(type_id)).contents
    out = np.empty(raw.size // traits.type_size * traits.blck_size, np.float32)
    floats = out.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    traits.to_float(raw.ctypes.data_as(ctypes.c_void_p), floats, out.size)
    return out.reshape(len(raw), -1)


def write_foreign(source: Path, path: Path, kind: str) -> Path:
    """Rewrite the file in one type, as other programs do."""
    type_id = GGMLQuantizationType[TYPES[kind]]
    return requantise(source, path, type_id, lambda values: quantise(values, type_id))


# -- training ---------------------------------------------------------------------------------------------------------

IDS = TOKENIZER.encode(PROSE * 40)
BATCHES = TokenDataset(IDS[300:], IDS[:300], TOKENIZER, TOKENIZER.vocab, 1, {}).batches(CONTEXT, 2, seed=0)
SETUP = Setup(BATCHES.inputs, rows=2)


@lru_cache
def held_out() -> Batch:
    """Return text that was not trained on; llama.cpp has no position for the last target of a window."""
    batch = dict(BATCHES.held_out()[0])
    batch["weights"] = batch["weights"].copy()
    batch["weights"][:, -1] = 0
    return batch


@dataclass(frozen=True)
class EngineResults:
    """An engine's results on the held-out text."""

    loss: float
    logits: np.ndarray  # [windows, T - 1, V]

    @classmethod
    def compute(cls, session: Session) -> EngineResults:
        return cls(session.evaluate([held_out()]), session.logits(held_out())[:, :-1])

    @property
    def log_probabilities(self) -> np.ndarray:
        logits = self.logits.astype(np.float64)
        return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))

    def differences(self, theirs: np.ndarray) -> tuple[float, float]:
        """Return the differences of llama.cpp's loss and log-probabilities (the largest of each)."""
        targets = held_out()["targets"][:, :-1, None]
        loss = -np.take_along_axis(theirs, targets, axis=-1).mean()
        return abs(float(loss) - self.loss), float(np.abs(theirs - self.log_probabilities).max())


def compute_results(
    model: Model, path: Path, adapter: Path | None = None, engine: Engine | None = None
) -> EngineResults:
    """Compute the results of a model file in float32, unless the engine says otherwise."""
    with (engine or TorchCPU(threads=1)).realize(frozen_plan(model, path, SETUP, adapter)) as session:
        session.build()
        return EngineResults.compute(session)


MIN_CHANGE = 0.1  # the smallest change of a log-probability by training that makes agreement meaningful


@dataclass(frozen=True)
class TrainedModel:
    """A trained model: its loss before training, its results and all its tensors."""

    plan: Plan
    started: float
    results: EngineResults
    values: dict[str, np.ndarray]

    def export(self, path: Path, kind: str = "f32") -> Path:
        problems = write_model(path, self.plan.model, export_tensors(self.plan, self.values), TOKENIZER, kind)
        assert problems == []
        return path


def train(recipe: Recipe, model: Model, steps: int, lr: float) -> TrainedModel:
    recipe.check()
    plan = recipe.plan(model, SETUP)
    adamw = replace(AdamW.for_lora(), lr=lr)
    engine = GGMLCPU(threads=1, products="ggml")  # so that no processor's kernels.c changes the files compared below
    with start_session(recipe, engine, plan) as session:
        before = EngineResults.compute(session)
        for step in range(steps):
            session.step(BATCHES.batch(step), adamw.hp_for_step(step))
        after = EngineResults.compute(session)
        assert np.abs(after.log_probabilities - before.log_probabilities).max() > MIN_CHANGE
        return TrainedModel(plan, before.loss, after, {t.name: session.download(t.name) for t in plan.tensors})


# -- the cells --------------------------------------------------------------------------------------------------------


class Row:
    """One architecture in one type: a foreign file of that type, and the tests of each direction with it."""

    def __init__(self, directory: Path, judge: Judge, source: TrainedModel, kind: str):
        self.directory, self.judge, self.source, self.kind = directory, judge, source, kind
        self.model = source.plan.model
        exact = source.export(directory / "exact.gguf")
        self.file = write_foreign(exact, directory / f"{self.model.name}-{kind}.gguf", kind)

    @property
    def windows(self) -> np.ndarray:
        return held_out()["tokens"][:, :-1]

    def compare_with_judge(self, ours: EngineResults, path: Path, adapter: Path | None = None) -> tuple[float, float]:
        return ours.differences(self.judge(path, self.windows, adapter))

    @cached_property
    def results(self) -> EngineResults:
        return compute_results(self.model, self.file)

    @cached_property
    def lora(self) -> TrainedModel:
        recipe = Lora(base=str(self.file), targets=["*"], rank=4, alpha=8.0)
        return train(recipe, self.model, steps=8, lr=0.02)

    def read(self) -> tuple[float, float]:
        """Read the file; compare the engine's results with llama.cpp's."""
        with GGUFFile(self.file) as file:
            assert read_model(type(self.model), file) == self.model
            assert {t.type for t in file.tensors.values()} == {"F32", TYPES[self.kind]}
            for name, tensor in file.tensors.items():
                theirs = dequantise(file.read_raw(name), tensor.type).reshape(tensor.shape)
                np.testing.assert_allclose(file.read(name), theirs, rtol=1e-6, atol=1e-8)
        theirs = self.judge(self.file, self.windows)
        if self.model.name not in (*GELU, *EXPERTS):
            ours = compute_results(self.model, self.file, engine=GGMLCPU(threads=1, products="ggml"))
            rounded = ours.differences(theirs)
            assert all(differences <= limit for differences, limit in zip(rounded, SAME_KERNELS, strict=True)), rounded
        return self.results.differences(theirs)

    def donor(self) -> tuple[float, float]:
        """Warm-start a smaller model from the file's embedding, which stays frozen; the export folds the lens in."""
        model, lens = self.model, "none"
        if not model.settings()["tied"]:
            model, lens = replace(model, d_model=32), "pca"
        trained = train(Warm(donor=str(self.file), lens=lens), model, steps=20, lr=0.01)
        with GGUFFile(self.file) as file:
            np.testing.assert_array_equal(trained.values[TABLE], file.read(TABLE))
        return self.compare_with_judge(trained.results, trained.export(self.directory / "donor-f32.gguf"))

    def base(self) -> tuple[float, float]:
        """Train adapters on the file as it is, and merge them into its dequantised weights."""
        assert self.lora.started == pytest.approx(self.results.loss, abs=self.limits("read")[0])
        path, adapter = self.lora.export(self.directory / "lora-f32.gguf"), self.adapter_file()
        return self.compare_with_judge(compute_results(self.model, self.file, adapter), path)

    def adapter_file(self) -> Path:
        path = self.directory / "adapter.gguf"
        write_adapter(path, self.lora.plan, self.lora.values)
        return path

    def adapter(self) -> tuple[float, float]:
        """Let llama.cpp apply the adapter to the file itself."""
        adapter = self.adapter_file()
        ours = compute_results(self.model, self.file, adapter)
        assert self.lora.results.loss == pytest.approx(ours.loss, abs=self.limits("adapter")[0])
        return self.compare_with_judge(ours, self.file, adapter)

    def full(self) -> tuple[float, float]:
        """Train all weights of the file."""
        trained = train(Full(base=str(self.file)), self.model, steps=8, lr=3e-3)
        assert trained.started == pytest.approx(self.results.loss, abs=1e-5)
        return self.compare_with_judge(trained.results, trained.export(self.directory / "full-f32.gguf"))

    def export(self) -> tuple[float, float]:
        """Export a model trained in float32 in this type; toyexp and llama.cpp must dequantise it alike."""
        try:
            check_type(self.kind)
        except Unavailable as reason:
            pytest.skip(str(reason))
        path = self.source.export(self.directory / f"export-{self.kind}.gguf", self.kind)
        with GGUFFile(path) as file:
            assert TYPES[self.kind] in {t.type for t in file.tensors.values()}
        return self.compare_with_judge(compute_results(self.model, path), path)

    def limits(self, direction: str) -> tuple[float, float]:
        exact = EXACT["gpt2" if self.model.name in GELU else "llama"]
        if direction in ("donor", "base", "full"):
            return exact
        rounded = ROUNDED.get(self.kind, WIDER if self.kind in K_QUANTS else QUANTISED)
        return max(exact[0], rounded[0]), max(exact[1], rounded[1])


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Return a function `rows(architecture, kind)` that keeps the last row and its files."""
    place = tmp_path_factory.mktemp("table")
    judge = Judge(place)

    @lru_cache
    def source(architecture: str, wide: bool) -> TrainedModel:
        model = sized_model(architecture, "q6_k" if wide else "f32")
        trained = train(Scratch(), model, steps=150, lr=3e-3)
        assert trained.results.loss < 3  # the entropy of single bytes is 3.5, so the results depend on the context
        return trained

    @lru_cache(maxsize=1)
    def row(architecture: str, kind: str) -> Row:
        for path in place.glob("*.gguf"):
            path.unlink()
        return Row(place, judge, source(architecture, kind in K_QUANTS), kind)

    yield row
    judge.close()


def parameter(architecture: str, kind: str, direction: str) -> Any:
    marks = [] if kind in DEFAULT else [pytest.mark.full]
    return pytest.param(architecture, kind, direction, marks=marks, id=f"{architecture}-{kind}-{direction}")


@pytest.mark.parametrize(("architecture", "kind", "direction"), [parameter(*cell) for cell in CELLS])
def test_a_cell_of_the_table_agrees_with_llama_cpp(rows, architecture, kind, direction, record_property):
    row = rows(architecture, kind)
    loss, worst = getattr(row, direction)()
    record_property("cell", (architecture, kind, direction, loss, worst))
    loss_limit, limit = row.limits(direction)
    assert loss <= loss_limit and worst <= limit


def test_a_file_that_aborts_llama_cpp_is_named_and_the_next_one_is_judged(tmp_path):
    judge = Judge(tmp_path)
    windows = held_out()["tokens"][:1, :2]
    good, bad = tmp_path / "good.gguf", tmp_path / "bad.gguf"
    model = sized_model("llama", "f32")
    write_model(good, model, {t.name: t.init.draw(t.shape, 0, t.name) for t in model.tensors()}, TOKENIZER)
    bad.write_bytes(good.read_bytes()[:-9000])
    assert judge(good, windows).shape == (1, 2, TOKENIZER.vocab)
    with pytest.raises(pytest.fail.Exception, match=r"llama\.cpp ended with .* at bad\.gguf:\n(.*\n)*.*file bounds"):
        judge(bad, windows)
    assert judge(good, windows).shape == (1, 2, TOKENIZER.vocab)
    judge.close()
