"""Record the output of one example of each command, for the reference pages: `make pictures` runs it."""

import itertools
import json
import os
import pty
import re
import shlex
import shutil
import subprocess
import sys
import termios
from pathlib import Path

BUSY = re.compile(r"(^note +|; )\d+ of \d+ cores busy.*\n", re.MULTILINE)  # says what else this machine was doing
RECORDED = Path(__file__).parent / "examples"
COLUMNS = 106  # of the terminal: a page has room for as many beside its table of contents
# Runs that the examples use, besides outputs/sweep and outputs/digits, which `make pictures` trains.
RUNS = (
    "recipe=warm steps=1000 hydra.run.dir=outputs/warm",
    "recipe=lora recipe.base=outputs/warm/model.gguf recipe.targets=[q] steps=100 hydra.run.dir=outputs/lora",
)
PARTS = r"^(settings|engine|model|data|recipe|base|trains|time|dry)"  # of a dry run
# The command of each example, by the name of its command or of its page of settings; a pattern selects the lines to
# show, the others become dots.
EXAMPLES = {
    "plugins": ("plugins warm", ""),
    "new": ("new optimiser sgdr", ""),
    "doctor": ("doctor", r"^toyexp|^  (cuda|mps|metal|cpu|ggml\w*|vulkan) |^ {8}|^next|^ +toyexp"),
    "parity": ("parity engine=cpu,ggml steps=5", ""),
    "bench": ("bench engine=cpu,ggml --no-memory", ""),
    "eval": ("eval outputs/warm", ""),
    "describe": ("describe outputs/warm", ""),
    "models": ("models outputs", r"^(?!.*outputs/sweep/(?![01]-))"),
    "generate": ("generate outputs/warm --prompt 'def __init__(self' --tokens 60", ""),
    "predict": ("predict outputs/digits three.png seven.png --top 2", ""),
    "export": ("export outputs/warm --type q8_0", ""),
    "merge": ("merge outputs/warm outputs/lora --out merged.gguf", ""),
    "runs": ("runs outputs/sweep seed=0 'lr>1e-3'", ""),
    "compare": ("compare outputs/sweep", ""),
    "completion": ("completion fish", ""),
    "help": ("help 'learning rate'", ""),
    "settings": ("steps=300 batch_size=16 lr=1e-3 --dry-run", ""),
    "model": ("model=qwen3 model.d_model=128 model.n_layers=4 --dry-run", PARTS),
    "data": ("data data=examples data.path=questions.json data.tokenizer=byte model.context=64", ""),
    "recipe": ("recipe=lora recipe.base=outputs/warm/model.gguf recipe.rank=4 --dry-run", PARTS),
    "engine": ("engine=ggml engine.threads=1 --dry-run", PARTS),
    "optim": ("optim=lion lr=3e-4 optim.weight_decay=0.1 --dry-run", PARTS),
    "objective": ("objective=cross_entropy objective.smoothing=0.1 --dry-run", PARTS),
    "callbacks": ("plugins early_stop", ""),
    "format": ("export outputs/warm --type f16 --to small.gguf", ""),
}


def run(command: str, folder: Path) -> str:
    """Return the output of a toyexp command in a terminal, without colours and without lines that it overwrites."""
    ours, its = pty.openpty()
    termios.tcsetwinsize(its, (50, COLUMNS))
    environment = {**os.environ, "NO_COLOR": "1", "HOME": str(folder.resolve())}  # no models of other programs
    environment.pop("COLUMNS", None)
    words = [sys.executable, "-m", "toyexp", *shlex.split(command)]
    with subprocess.Popen(words, cwd=folder, env=environment, stdout=its, stderr=subprocess.DEVNULL):
        os.close(its)
        text = b""
        try:
            while part := os.read(ours, 65536):
                text += part
        except OSError:  # Linux raises it at the end of the output
            pass
    os.close(ours)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text.decode().replace("\r\n", "\n"))
    lines = "\n".join(line.rpartition("\r")[2].rstrip() for line in plain.split("\n")).strip("\n")
    return BUSY.sub(lambda busy: "" if busy[1].startswith("note") else "\n", f"{lines}\n")


def write_files(folder: Path) -> None:
    """Write images of two handwritten digits, for `toyexp predict`, and three questions, for `toyexp data`."""
    from PIL import Image
    from sklearn.datasets import load_digits

    digits = load_digits()
    for name, digit in (("three.png", 3), ("seven.png", 7)):
        pixels = digits.images[list(digits.target).index(digit)] / 16 * 255
        Image.fromarray(pixels.astype("uint8")).save(folder / name)
    answers = {"Capital of France?": "Paris", "Name a colour.": "Blue", "What is 2 + 2?": "4"}
    records = [{"id": n, "instruction": question, "output": answers[question]} for n, question in enumerate(answers)]
    (folder / "questions.json").write_text(json.dumps(records))


def record(folder: Path) -> None:
    """Run all examples in a directory with outputs/sweep and outputs/digits, and write what they print."""
    for command in RUNS:
        run(command, folder)
    write_files(folder)
    shutil.rmtree(RECORDED, ignore_errors=True)
    RECORDED.mkdir()
    for name, (command, keep) in EXAMPLES.items():
        lines = [line if re.search(keep, line) else "..." for line in run(command, folder).splitlines()]
        shown = [f"$ toyexp {command}"]
        shown += [line for before, line in itertools.pairwise(["", *lines]) if line != "..." or before != "..."]
        RECORDED.joinpath(f"{name}.txt").write_text("\n".join([*shown, ""]))
