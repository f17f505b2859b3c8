"""Runs with recorded numbers, which detect unintended changes of results.

`make golden` records them again. Do this only for an intended change that the CHANGELOG describes.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import io
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import quantize
from requantise import q4_k, requantise

from toyexp.cli.main import main
from toyexp_ggml.binding import devices

RECORD = Path(__file__).parents[1] / "golden.json"
ENGINES = ("cpu", "ggml")
Q8_0, Q4_K = GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_K

BOOK = "It was a bright cold day in April, and the clocks were striking thirteen.\n" * 80
TEXT = "data=text data.path=book.txt data.tokenizer=byte data.val_fraction=0.1 data.eval_batches=2 model.context=16"
SMALL = "model.d_model=32 model.n_layers=2 batch_size=4 steps=6 eval_every=3 callbacks.cosine.warmup=2"
ON_BASE_TEXT = (
    "data=text data.path=book.txt data.val_fraction=0.1 data.eval_batches=2 model.context=16 batch_size=4 steps=6"
)
WIDE = "model.d_model=256 model.d_ff=512 model.n_layers=1 model.n_heads=4 batch_size=2 steps=1 eval_every=0"


def train(words: str, run: str = "run") -> dict[str, Any]:
    """Train; return the losses of the steps, the held-out losses, and a digest of the weights."""
    command([*words.split(), f"hydra.run.dir={run}"])
    return outcome(Path(run))


def outcome(run: Path) -> dict[str, Any]:
    """Return the losses and the digest of the weights in a run directory."""
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return {
        "losses": [e["loss"] for e in events if e["kind"] == "step"],
        "held_out": [e["loss"] for e in events if e["kind"] == "eval"],
        "weights": weights(run / "model.gguf"),
    }


def weights(path: Path) -> str:
    """Return a digest of all tensors of a GGUF file, with their names and shapes."""
    digest = hashlib.sha256()
    for tensor in sorted(GGUFReader(path).tensors, key=lambda t: t.name):
        digest.update(f"{tensor.name} {tensor.shape.tolist()}".encode() + tensor.data.tobytes())
    return digest.hexdigest()[:16]


def command(words: list[str]) -> str:
    """Run a command line and return its stdout. Raise AssertionError with its stderr if it fails."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words)
    assert code == 0, err.getvalue()
    return out.getvalue()


def training_case(words: str) -> Callable[[str], dict[str, Any]]:
    return lambda engine: train(f"{words} {engine}")


def base_case(model: str, words: str, kind: GGMLQuantizationType | None = None) -> Callable[[str], dict[str, Any]]:
    """Return a case that trains a base, may requantise its matrices to `kind`, and trains the recipe on it."""

    def run(engine: str) -> dict[str, Any]:
        train(f"model={model} {TEXT} {WIDE} engine=ggml engine.threads=1", "base")
        base = Path("base/model.gguf")
        if kind is not None:
            base = requantise(base, Path("base.gguf"), kind, q4_k if kind == Q4_K else lambda x: quantize(x, Q8_0))
        return train(f"{words} recipe.base={base} {ON_BASE_TEXT} {engine}")

    return run


def train_on_chats(engine: str) -> dict[str, Any]:
    """Train on chats and completions; only the answers count in the loss."""
    lines = [{"messages": [{"role": "user", "content": f"{i} + 1?"}, {"role": "assistant", "content": f"{i + 1}!"}]}
             for i in range(30)]  # fmt: skip
    Path("chats.jsonl").write_text("\n".join(map(json.dumps, [*lines, {"prompt": "a", "completion": "b"}])))
    data = "data=examples data.path=chats.jsonl data.tokenizer=char data.val_fraction=0.3 model.context=24"
    return train(f"model=llama {data} {SMALL} {engine}")


def train_and_resume(engine: str) -> dict[str, Any]:
    """Train three steps, then resume for three more."""
    train(f"model=llama {TEXT} {SMALL} steps=3 checkpoint_every=3 {engine}")
    command(["resume=run", "steps=6"])
    return outcome(Path("run"))


def sweep_rates(engine: str) -> dict[str, Any]:
    """Run a sweep of two learning rates."""
    words = f"-m model=llama {TEXT} {SMALL} lr=0.003,0.01 sweep.isolate=false hydra.sweep.dir=sweep {engine}"
    command([*words.split()])
    jobs = [outcome(path.parent) for path in sorted(Path("sweep").glob("*/events.jsonl"))]
    assert len(jobs) == 2
    return {key: [job[key] for job in jobs] for key in jobs[0]}


def evaluate_model(engine: str) -> dict[str, Any]:
    """Evaluate a trained model on another text."""
    train(f"model=qwen3 {TEXT} {SMALL} engine=ggml engine.threads=1")
    Path("tale.txt").write_text("Once upon a time there was a queen who counted clocks. " * 60)
    return {
        "held_out": [
            json.loads(
                command(["eval", "run", "--data", "tale.txt", "data.val_fraction=0.1", *engine.split(), "--json"])
            )["loss"]
        ]
    }


def generate_ids(engine: str) -> dict[str, Any]:
    """Sample tokens at temperature 0.8 with a fixed seed."""
    train(f"model=llama {TEXT} {SMALL} lr=0.02 engine=ggml engine.threads=1")
    name, _, threads = engine.removeprefix("engine=").partition(" engine.")
    words = ["generate", "run", "--prompt", "It was", "--tokens", "12", "--temperature", "0.8", "--seed", "5"]
    return {"ids": json.loads(command([*words, "--engine", f"{name}:{threads}", "--json"]))["ids"]}


CASES: dict[str, Callable[[str], dict[str, Any]]] = {
    "scratch llama": training_case(f"model=llama {TEXT} {SMALL}"),
    "scratch gpt2, accumulated, clipped": training_case(
        f"model=gpt2 {TEXT} {SMALL} optim.accumulate=2 optim.grad_clip=.5"
    ),
    "scratch qwen2, tied": training_case(f"model=qwen2 {TEXT} {SMALL} model.tied=true optim.weight_decay=0.1"),
    "scratch qwen3, grouped heads": training_case(f"model=qwen3 {TEXT} {SMALL} model.n_heads=4 model.n_kv_heads=2"),
    "scratch gemma": training_case(f"model=gemma {TEXT} {SMALL}"),
    "warm llama": training_case(f"recipe=warm model=llama {SMALL} data=text data.path=book.txt model.context=16"),
    "scratch gpt2, toy init": training_case(f"recipe.init=toy model=gpt2 {TEXT} {SMALL}"),
    "vit_tiny": training_case(f"recipe=vit_tiny model=vit data=digits data.augment=shift model.patch=4 {SMALL}"),
    "chats": train_on_chats,
    "full gpt2": base_case("gpt2", "recipe=full lr=0.01"),
    "lora with dropout": base_case("llama", "recipe=lora recipe.rank=4 recipe.dropout=0.1 recipe.targets=[*] lr=0.02"),
    "lora on Q8_0": base_case("qwen2", "recipe=lora recipe.rank=4 recipe.targets=[q] lr=0.02", Q8_0),
    "lora on Q4_K": base_case("llama", "recipe=lora recipe.rank=4 recipe.targets=[q,v,ffn_*] lr=0.02", Q4_K),
    "resume": train_and_resume,
    "sweep": sweep_rates,
    "eval": evaluate_model,
    "generate": generate_ids,
}  # fmt: skip


def measure_case(case: str, engine: str) -> dict[str, Any]:
    """Run a case on an engine in the working directory and return its numbers."""
    return CASES[case](f"engine={engine} engine.threads=1")


def machine_digest() -> str:
    """Return a digest of the processor and the libraries, on which the last bits of a number depend."""
    cpu = Path("/proc/cpuinfo")
    cpu_lines = cpu.read_text().splitlines() if cpu.exists() else [platform.processor()]
    cpu_features = [line for line in cpu_lines if line.startswith(("model name", "flags"))][:2]
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("torch", "numpy", "ggml-python")]
    facts = [platform.machine(), platform.system(), *platform.libc_ver(), *cpu_features, *versions, *devices()]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]


def record() -> None:
    """Write golden.json."""
    record_data: dict[str, Any] = {"machine": machine_digest(), "runs": {}}
    os.environ["TOYEXP_CACHE"] = tempfile.mkdtemp()
    for case in CASES:
        for engine in ENGINES:
            with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
                Path("book.txt").write_text(BOOK)
                record_data["runs"][f"{case}, {engine}"] = measure_case(case, engine)
            print(f"{case}, {engine}", file=sys.stderr)
    RECORD.write_text(json.dumps(record_data, indent=1) + "\n")


if __name__ == "__main__":
    record()
