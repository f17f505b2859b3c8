"""Write a model's file again in another type or format: `toyexp export`."""

from __future__ import annotations

import os
import shlex
import textwrap
from collections.abc import Sequence
from pathlib import Path

from toyexp.base.errors import UserError
from toyexp.inference.export import export
from toyexp.interfaces.command import Arguments
from toyexp.plugins.discovery import load


def help_text(modules: Sequence[str]) -> str:
    """What it takes, with the types of all formats."""
    registry, listed = load(modules), []
    for offer in registry.offers["format"].values():
        words = [word for word, (form, _) in registry.types().items() if form is offer.cls]
        listed += textwrap.wrap(f"{', '.join(words)}: {offer.help}", 100, subsequent_indent="  ")
    types = "\n          ".join(listed)
    return f"""\
usage: toyexp export WHAT --type TYPE [key=value ...] [options] [plugins=[my_module]]

Writes a model again in another type; WHAT is a GGUF file, a run's directory, which means its model.gguf, or a
checkpoint (run/checkpoints/step-200), whose model is written into the run's directory.
  toyexp export model.gguf --type q8_0                    writes model-q8_0.gguf beside it
  toyexp export outputs/lora-llama/2026-11-21_050553_073724 --type q4_k_m --to small.gguf
  toyexp export model.gguf --type hf                      writes the directory model-hf for transformers

options
types     {types}
          The K-quants among them take llama.cpp: llama-quantize on the PATH, or pip install llama-cpp-python.
settings  of a format, such as key=value: toyexp plugins NAME

From GGUF to GGUF every key is kept as it is, but general.file_type and general.quantization_version; norms, biases and
positions are written in f32. A split model, given by its first part, becomes one file."""


HELP = help_text


def run(arguments: Arguments) -> int:
    """Writes the file, and tells what it is."""
    settings = tuple(word for word in arguments.rest if "=" in word and not os.path.lexists(word))
    files = [word for word in arguments.rest if word not in settings]
    if len(files) != 1 or arguments.type is None:
        second = files[1] if len(files) == 2 and arguments.to is None else ""
        example = [files[0] if second else "model.gguf", "--type", arguments.type or "q8_0"]
        example += ["--to", second] if second else []
        given = shlex.join(["export", *arguments.rest])
        raise UserError(f"{given}: takes one file or run directory, and a type: toyexp export {shlex.join(example)}")
    word, to, force = arguments.type, arguments.to, arguments.force
    found = export(Path(files[0]), word, to, settings, load(arguments.modules), force, arguments.requantize)
    return found.show(arguments)
