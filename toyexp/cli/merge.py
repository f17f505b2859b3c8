"""Write a model with a LoRA adapter added to it: `toyexp merge`."""

from __future__ import annotations

from pathlib import Path

from toyexp.base.errors import UserError, choose
from toyexp.inference.export import TYPES, merge
from toyexp.interfaces.command import Arguments
from toyexp.plugins.discovery import load

HELP = """\
usage: toyexp merge BASE ADAPTER --out FILE.gguf [options] [plugins=[my_module]]

Writes a model with a LoRA adapter added to it as one GGUF file: W + alpha / rank * B A in place of each adapted W,
computed in float64. BASE is a GGUF file, the directory of a run, or a checkpoint; ADAPTER a run of recipe=lora, its
adapter.gguf, or a directory of PEFT's.
  toyexp merge smollm2.gguf outputs/lora-llama/2026-11-21_050553_073724 --out mine.gguf
  toyexp export mine.gguf --type q8_0 --requantize        the whole of it in another type

options
All other tensors, and all keys but those that say where the base comes from, stay as they are, in their types. A chat
template that the adapter was trained with takes the place of the base's. general.description, base_model.0.* and
adapter_digest say what was merged."""


def run(arguments: Arguments) -> int:
    """Writes the file, and tells what it is."""
    out = arguments.out
    if len(arguments.rest) != 2 or out is None:
        raise UserError(
            "merge: takes a base, an adapter and a place: toyexp merge base.gguf adapter.gguf --out FILE.gguf"
        )
    kind = arguments.type or "f32"
    if kind not in TYPES:
        raise UserError(f"--type {kind}: {choose(kind, TYPES)}")
    if not out.endswith(".gguf"):
        raise UserError(f"--out {out}: is written as *.gguf; other formats: toyexp export")
    base, adapter, force = *map(Path, arguments.rest), arguments.force
    return merge(base, adapter, Path(out), kind, force, load(arguments.modules)).show(arguments)
