"""Helpers for the fault tests: tiny experiments, comparable traces of runs, processes, and counts of trials."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

FIGURES: Counter[str] = Counter()  # number of trials by outcome, printed at the end

TEXT = "It was a bright cold day in April, and the clocks were striking. " * 200
LIKE_LLAMA = ("llama", "qwen2", "qwen3", "gemma")
STEPS, EVERY = 12, 3

TINY = [
    "model.d_model=32", "model.n_layers=1", "batch_size=4", f"steps={STEPS}",
    f"checkpoint_every={EVERY}", "eval_every=5", "data.{}=8", "callbacks=[cosine,events,gguf_export]",
]  # fmt: skip
BOOK = ["data=text", "data.path=book.txt", "data.tokenizer=byte", "model.context=16"]
BASE_SETTINGS = ["data.tokenizer=auto", "lr=0.05"]
SETTINGS = {  # required by some pairs of recipe and model
    ("warm", "gpt2"): ["model.tied=false"],
    ("warm", "gemma"): ["recipe.lens=none", "model.d_model=96"],
    ("lora", "gpt2"): ["recipe.targets=[qkv]"],
}
ENGINES = {
    "cpu": ["engine=cpu", "engine.threads=1"],
    "ggml": ["engine=ggml", "engine.threads=1"],
    "metal": ["engine=metal", "engine.emulate=true", "engine.threads=1"],
    "cuda": ["engine=cuda", "engine.deterministic=true"],
    "ggml_cuda": ["engine=ggml_cuda"],
}


def words(recipe: str, model: str, engine: str) -> list[str]:
    """Return the overrides of a tiny experiment; recipes with a base use base-<model>.gguf."""
    is_image_model = model == "vit"
    data = ["data=digits"] if is_image_model else BOOK
    tiny = [w.format("eval_images" if is_image_model else "eval_batches") for w in TINY]
    based = [*BASE_SETTINGS, f"recipe.base=base-{model}.gguf"] if recipe in ("lora", "full") else []
    based = [word for word in based if not (is_image_model and word.startswith("data.tokenizer="))]
    extra = SETTINGS.get((recipe, model), [])
    return [f"recipe={recipe}", f"model={model}", *data, *tiny, *ENGINES[engine], *based, *extra]


# -- traces of runs ----------------------------------------------------------------------------------------------------

INTERRUPTION_EVENTS = (
    "run_start",
    "run_end",
    "resume",
    "checkpoint",
    "export",
    "note",
    "warning",
)  # how a run was interrupted
CLOCKS = ("t", "wall_us")


@dataclass(frozen=True)
class Trace:
    """Events and files of a run that do not depend on when it was interrupted."""

    events: list[dict[str, object]]
    files: dict[str, str]  # SHA-256 of the last state and the exported models

    @classmethod
    def read(cls, directory: Path, steps: int = STEPS) -> Trace:
        """Read the run in `directory`; its name, which the model files contain, is masked."""
        lines = [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]
        kinds = [line["kind"] for line in lines]
        assert (kinds[0], kinds[-1], kinds.count("run_start")) == ("run_start", "run_end", 1), kinds
        events = [
            {k: v for k, v in line.items() if k not in CLOCKS}
            for line in lines
            if line["kind"] not in INTERRUPTION_EVENTS
        ]
        files = [*sorted(directory.glob("*.gguf")), directory / "checkpoints" / f"step-{steps}" / "state.safetensors"]
        name = directory.name.encode()
        return cls(
            events,
            {f.name: hashlib.sha256(f.read_bytes().replace(name, b"-" * len(name))).hexdigest() for f in files},
        )


# -- processes --------------------------------------------------------------------------------------------------------


def python(*args: str) -> list[str]:
    """Return a command of this Python interpreter."""
    return [sys.executable, *args]


def toyexp(args: Sequence[str], cwd: Path, **options: object) -> subprocess.CompletedProcess[str]:
    """Run `toyexp` in its own process until it ends."""
    command = python("-m", "toyexp", *args)
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=120, env=environment(cwd), **options
    )  # type: ignore[call-overload, no-any-return]


def environment(cwd: Path) -> dict[str, str]:
    """Return the environment with a cache below `cwd` and threads that do not spin."""
    return {**os.environ, "TOYEXP_CACHE": str(cwd / "cache"), "OMP_WAIT_POLICY": "passive"}


@dataclass(frozen=True)
class ProcessEnd:
    """The end of a process that was sent a signal."""

    code: int  # exit code as in a shell: 128 + signal
    after: float  # seconds from the signal to the end
    errors: str

    def is_killed(self, number: int) -> bool:
        """Return True if that signal ended the process."""
        return self.code == shell_code(number)

    def is_completed(self) -> bool:
        """Return True if the run was completed, before or despite the signal.

        A run that was already complete exits with code 2 and reports it.
        """
        return self.code == 0 or (self.code == 2 and "is complete" in self.errors)


def interrupt_run(args: Sequence[str], cwd: Path, number: int, seconds: float) -> ProcessEnd:
    """Start a run and send it a signal after `seconds`, if it is still running.

    SIGINT is only sent once toyexp handles it: during the start of Python it may be lost or end with exit code 1.
    """
    command = python("-m", "toyexp", *args)
    with subprocess.Popen(
        command, cwd=cwd, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment(cwd)
    ) as process:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
        while number == signal.SIGINT and process.poll() is None and not holds_signals(process.pid):
            time.sleep(0.005)
        began = time.monotonic()
        process.send_signal(number)  # does nothing if the process has ended
        _, errors = process.communicate(timeout=120)
    code = process.returncode
    return ProcessEnd(128 - code if code < 0 else code, time.monotonic() - began, errors)


def holds_signals(pid: int) -> bool:
    """Return True if the process handles SIGTERM, which toyexp does and Python does not; True without /proc."""
    if not Path("/proc/self/status").exists():
        return True
    try:
        caught = re.search(r"^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    except OSError:  # the process has just ended
        return False
    return caught is not None and bool(int(caught[1], 16) >> (signal.SIGTERM - 1) & 1)


def shell_code(number: int) -> int:
    """Return the exit code that a shell shows for a process ended by a signal."""
    return 128 + signal.Signals(number)
