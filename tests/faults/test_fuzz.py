"""Malformed inputs never crash the process, make it hang or exhaust memory; see fuzz.py."""

import contextlib
import json
import os
import shutil
import struct
import subprocess
import tempfile
from pathlib import Path

import pytest
from faults import FIGURES, environment, python, words
from hypothesis import given, settings
from hypothesis import strategies as st

from toyexp import UserError
from toyexp.cli.main import main
from toyexp.formats.gguf.header import GGUFError
from toyexp.formats.gguf.read import GGUFFile
from toyexp_data.columns import convert

FUZZ = Path(__file__).with_name("fuzz.py")
SUPPORT = str(Path(__file__).parent.parent / "support")
COUNTS = {  # inputs of each kind in the long test
    "describe": 12_000, "base": 8_000, "donor": 8_000, "tokenizer": 8_000, "eval": 2_000, "tokens": 8_000,
    "jsonl": 5_000, "images": 8_000, "events": 400, "manifest": 400, "arrays": 600, "state": 1_000, "sweep": 5_000,
    "config": 250,
}  # fmt: skip


SMALL = ["model.d_model=8", "steps=1", "checkpoint_every=0", "eval_every=0"]
MODEL_RUNS = {
    "vit.gguf": ["vit_tiny", "vit", *SMALL],
    "q8_0.gguf": ["scratch", "llama", *SMALL, "model.d_model=32", "callbacks.gguf_export.type=q8_0"],
    "char.gguf": ["scratch", "llama", *SMALL, "data.tokenizer=char"],
    "bpe.gguf": ["scratch", "llama", *SMALL, "data.tokenizer=bpe", "data.bpe_vocab=300"],
    "adapter.gguf": ["lora", "llama", "steps=1"],
}


@pytest.fixture(scope="module")
def material(bench):
    """Create the valid files to mutate: models of several kinds, and a run to resume."""
    if (bench / "resumable").exists():
        return bench
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(bench)
        patch.setenv("TOYEXP_CACHE", str(bench / "cache"))
        for name, (recipe, model, *more) in MODEL_RUNS.items():
            assert main([*words(recipe, model, "ggml"), *more, f"hydra.run.dir=models/{name}"]) == 0
            shutil.copy(Path("models", name, "adapter.gguf" if recipe == "lora" else "model.gguf"), name)
        sizes = ["model.d_model=8", "steps=6", "callbacks=[default,early_stop,quality_gate]"]
        assert main([*words("scratch", "gpt2", "ggml"), *sizes, "hydra.run.dir=resumable"]) in (0, 1)
        Path("resumable", "result.json").unlink()
    return bench


def fuzz(material, kind, count, seed):
    env = environment(material)
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [SUPPORT, env.get("PYTHONPATH")]))
    command = python(str(FUZZ), kind, str(seed), str(count))
    done = subprocess.run(command, cwd=material, env=env, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads(done.stdout.splitlines()[-1])
    FIGURES["fuzz: malformed inputs without crash, hang or 1 GiB"] += report["inputs"]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=12,
)
PARTS = ["prompt", "completion", "text", "messages", "role", "content", "user", "assistant", "system"]
EXAMPLES = st.dictionaries(st.sampled_from(PARTS), VALUES | st.sampled_from(PARTS), max_size=4)


@settings(max_examples=300, derandomize=True, deadline=None)
@given(st.one_of(VALUES, EXAMPLES, st.fixed_dictionaries({"messages": st.lists(EXAMPLES, max_size=3)})))
def test_any_json_is_parsed_or_rejected(value):
    with contextlib.suppress(UserError):
        parsed = convert(json.dumps(value).encode(errors="surrogatepass"), {})
        assert parsed.completion or parsed.messages


@settings(max_examples=300, derandomize=True, deadline=None)
@given(st.binary(max_size=200), st.sampled_from([2, 3]), st.integers(0, 3), st.integers(0, 3))
def test_any_gguf_header_is_read_or_rejected(rest, version, tensors, keys):
    with tempfile.NamedTemporaryFile(suffix=".gguf") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + rest)
        file.flush()
        with contextlib.suppress(GGUFError), GGUFFile(file.name) as opened:
            assert (len(opened.tensors), len(opened.metadata)) == (tensors, keys)


@pytest.mark.slow
def test_some_malformed_inputs_of_every_quick_kind(material):
    """Fuzz a few inputs of every kind except the slow ones."""
    fuzz(material, "describe,base,donor,tokenizer,tokens,jsonl,images,state,sweep", 20, 1)


@pytest.mark.faults
@pytest.mark.timeout(1600)
@pytest.mark.parametrize("kind", COUNTS)
def test_many_malformed_inputs_of_a_kind(kind, material):
    fuzz(material, kind, COUNTS[kind], 2)
