"""List the GGUF files on this machine: `toyexp models`."""

from __future__ import annotations

import os
from pathlib import Path

from toyexp.base.errors import UserError
from toyexp.inference.models import find
from toyexp.interfaces.command import Arguments
from toyexp.plugins.discovery import load

HELP = """\
usage: toyexp models [DIR ...] [--json] [plugins=[my_module]]

The GGUF files on this machine: those of Hugging Face, Ollama, LM Studio and llama.cpp, those below here, and those in
the directories given. Only headers are read.

here is what toyexp can do with one:
  base      train it on (recipe=lora, recipe=full), or of text take its embedding (recipe=warm)
  donor     take its embedding (recipe=warm)
  adapter   add it to its base (toyexp merge), or train it on (recipe.adapter=)
  others    the kind of data that it reads, where no recipe trains it on
What stands under path can be pasted behind recipe.base= or recipe.donor=; more about one: toyexp describe PATH"""


def run(arguments: Arguments) -> int:
    """Looks for models, and lists them."""
    directories = [Path(word) for word in arguments.rest]
    for path in directories:
        if not os.path.isdir(path):  # noqa: PTH112 - Path.is_dir() raises where the way there may not be taken
            there = os.path.exists(path)  # noqa: PTH110 - likewise
            what = "is no directory; about one file: toyexp describe" if there else "not found"
            raise UserError(f"models {path}: {what}")
    return find(load(arguments.modules), directories).show(arguments)
