"""Evaluate a model on held-out data: `toyexp eval`."""

from __future__ import annotations

import math
from pathlib import Path

from toyexp.base.errors import RunFailed
from toyexp.cli.args import one_file
from toyexp.config.request import one_experiment
from toyexp.inference.evaluate import evaluate
from toyexp.interfaces.command import Arguments

HELP = """\
usage: toyexp eval MODEL [key=value ...] [options]

How well a model does on held-out data: its loss, perplexity and bits per byte, or for images its accuracy, and that
of each class with what it is mistaken for.
MODEL is a GGUF file, the directory of a run that left a model.gguf, or a checkpoint (run/checkpoints/step-200).
  toyexp eval outputs/warm-llama/2026-11-21_050553_073724 engine=ggml
                                                          on the run's own data, as the run evaluated it
  toyexp eval model.gguf                                  the standard library's held-out part, the best engine here
  toyexp eval model.gguf --data book.txt engine=ggml      the whole of book.txt
  toyexp eval digits.gguf data=digits
  toyexp eval base.gguf --adapter outputs/lora-llama/2026-11-21_050553_073724
                                                          a LoRA adapter on a base: of a run, on that run's own data; a
                                                          file adapter.gguf; or a directory of PEFT's

options
A run says in its config.yaml which data, window and batch_size it had; what is typed takes their place. --data takes
text, .jsonl, packed ids (.bin, .npy), or a folder of text or of images. All of that is held out, or val/ of images in
train/ and val/; without it a share is. A few batches of that are taken (data.eval_batches=1000000 takes all,
as of images data.eval_images=0 does). Sizes and tokenizer come from the model's file. model.context=N takes windows of
N tokens, batch_size=N so many at a time; beside these go data.*, engine, engine.* and plugins=[...]."""


def run(arguments: Arguments) -> int:
    """Evaluates a model, and shows what it scored; RunFailed for a loss that is no number."""
    files = [word for word in arguments.rest if "=" not in word]
    usage = ", settings behind it, --data, --adapter and --json: toyexp eval model.gguf batch_size=4"
    what = one_file("eval", files, usage)
    request = one_experiment("eval", [word for word in arguments.settings if "=" in word])
    found = evaluate(what, request, arguments.data, Path(arguments.adapter) if arguments.adapter else None)
    found.show(arguments)
    if not math.isfinite(found.loss):
        raise RunFailed(f"{found.file}: its held-out loss is {found.loss}")
    return 0
