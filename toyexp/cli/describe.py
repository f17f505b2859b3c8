"""Show what is in a GGUF file: `toyexp describe`."""

from __future__ import annotations

from toyexp.cli.args import one_file
from toyexp.inference.describe import describe
from toyexp.interfaces.command import Arguments
from toyexp.plugins.discovery import load

HELP = """\
usage: toyexp describe WHAT [options] [plugins=[my_module]]

What is in a GGUF file: its model, numbers and tokenizer, what toyexp can do with it, and its forward pass op by op.
WHAT is a file, the first part of a split one, the directory of a run, or a checkpoint (run/checkpoints/step-200).
  toyexp describe model.gguf
  toyexp describe outputs/warm-llama/2026-11-21_050553_073724

options
A command that is shown works, as far as the file is concerned: the rules of those who run it were asked, the tokenizer
was read, and the numbers of a file of up to 256 MB were looked at.
In the forward pass B is sequences (or images) and T their tokens; operations are the multiplications and additions of
matrix products and attention for one token (or image), with attention looking at all T positions."""


def run(arguments: Arguments) -> int:
    """Reads the file's header, and shows it."""
    what = one_file("describe", arguments.rest, ": toyexp describe model.gguf")
    found = describe(what, load(arguments.modules), arguments.metadata, arguments.tensors)
    return found.show(arguments)
