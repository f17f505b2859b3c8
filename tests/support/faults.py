"""What the fault tests share: tiny experiments of every kind, what must be equal between two runs, and the figures."""

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

FIGURES: Counter[str] = Counter()  # what was tried and what came out, shown at the end

TEXT = "It was a bright cold day in April, and the clocks were striking. " * 200
LIKE_LLAMA = ("llama", "qwen2", "qwen3", "gemma")
STEPS, EVERY = 12, 3

TINY = [
    "model.d_model=32", "model.n_layers=1", "batch_size=4", f"steps={STEPS}",
    f"checkpoint_every={EVERY}", "eval_every=5", "data.{}=8", "callbacks=[cosine,events,gguf_export]",
]  # fmt: skip
BOOK = ["data=text", "data.path=book.txt", "data.tokenizer=byte", "model.context=16"]
BASE_SETTINGS = ["data.tokenizer=auto", "lr=0.05"]
SETTINGS = {  # what some pairs of a recipe and a model need
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
    """The command line of a tiny experiment; recipes with a base take base-<model>.gguf."""
    of_images = model == "vit"
    data = ["data=digits"] if of_images else BOOK
    tiny = [w.format("eval_images" if of_images else "eval_batches") for w in TINY]
    based = [*BASE_SETTINGS, f"recipe.base=base-{model}.gguf"] if recipe in ("lora", "full") else []
    based = [word for word in based if not (of_images and word.startswith("data.tokenizer="))]
    own = SETTINGS.get((recipe, model), [])
    return [f"recipe={recipe}", f"model={model}", *data, *tiny, *ENGINES[engine], *based, *own]


# -- what must be equal -----------------------------------------------------------------------------------------------

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
    """What of a run does not depend on when it was interrupted."""

    events: list[dict[str, object]]
    files: dict[str, str]  # SHA-256 of the last state and the exported models

    @classmethod
    def of(cls, directory: Path, steps: int = STEPS) -> Trace:
        """The run in `directory`; its name, which the models carry, does not count."""
        lines = [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]
        kinds = [line["kind"] for line in lines]
        assert (kinds[0], kinds[-1], kinds.count("run_start")) == ("run_start", "run_end", 1), kinds
        events = [
            {k: v for k, v in line.items() if k not in CLOCKS}
            for line in lines
            if line["kind"] not in INTERRUPTION_EVENTS
        ]
        files = [*sorted(directory.glob("*.gguf")), directory / "checkpoints" / f"step-{steps}" / "state.safetensors"]
        own = directory.name.encode()
        return cls(
            events,
            {f.name: hashlib.sha256(f.read_bytes().replace(own, b"-" * len(own))).hexdigest() for f in files},
        )


# -- processes --------------------------------------------------------------------------------------------------------


def python(*args: str) -> list[str]:
    """A command for this interpreter."""
    return [sys.executable, *args]


def toyexp(args: Sequence[str], cwd: Path, **options: object) -> subprocess.CompletedProcess[str]:
    """A run in a process of its own, to its end."""
    command = python("-m", "toyexp", *args)
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=120, env=environment(cwd), **options
    )  # type: ignore[call-overload, no-any-return]


def environment(cwd: Path) -> dict[str, str]:
    """With a cache below `cwd`, and threads that do not spin."""
    return {**os.environ, "TOYEXP_CACHE": str(cwd / "cache"), "OMP_WAIT_POLICY": "passive"}


@dataclass(frozen=True)
class ProcessEnd:
    """How a process that was to be sent a signal ended."""

    code: int  # as a shell shows it
    after: float  # seconds from the signal to the end
    errors: str

    def by(self, number: int) -> bool:
        """Whether that signal ended it."""
        return self.code == shell_code(number)

    def done(self) -> bool:
        """Whether it came to its own end: before the signal, while that was on its way, or because the end was near.

        That of a run that was complete already is to say so.
        """
        return self.code == 0 or (self.code == 2 and "is complete" in self.errors)


def interrupt_run(args: Sequence[str], cwd: Path, number: int, seconds: float) -> ProcessEnd:
    """Starts a run and sends it a signal so many seconds after it was started, if it runs so long.

    SIGINT waits until toyexp holds it: before, it meets Python's own start, which may end with exit code 1 or lose it.
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
        process.send_signal(number)  # which one that has ended is not sent
        _, errors = process.communicate(timeout=120)
    code = process.returncode
    return ProcessEnd(128 - code if code < 0 else code, time.monotonic() - began, errors)


def holds_signals(pid: int) -> bool:
    """Whether toyexp has taken SIGTERM in that process, which Python leaves alone; true where nobody can see."""
    if not Path("/proc/self/status").exists():
        return True
    try:
        caught = re.search(r"^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    except OSError:  # it has just ended
        return False
    return caught is not None and bool(int(caught[1], 16) >> (signal.SIGTERM - 1) & 1)


def shell_code(number: int) -> int:
    """What a shell shows of a process that a signal ended."""
    return 128 + signal.Signals(number)
