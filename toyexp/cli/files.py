"""What `inference/` does with files of models: `toyexp describe`, `models`, `eval`, `predict`, `export` and `merge`.

Each command loads its library when it is called.
"""

from __future__ import annotations

import math
import os
import shlex
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from toyexp.base.errors import RunFailed, UserError, escape_cell, suggest
from toyexp.base.terminal import print_line
from toyexp.base.writing import convert_write_errors, require_writable, write_atomically
from toyexp.interfaces.command import Arguments
from toyexp.plugins.discovery import load


def parse_model_path(command: str, files: Sequence[str], usage: str) -> Path:
    """Return the file that a command is about; raise UserError, with its `usage`, for none and for several."""
    if len(files) != 1 or not files[0]:
        raise UserError(f"{shlex.join([command, *files])}: takes one file or run directory{usage}")
    return Path(files[0])


HELP_DESCRIBE = """\
usage: toyexp describe WHAT [options] [plugins=[my_module]]

What is in a GGUF file: its model, numbers and tokenizer, what toyexp can do with it, and its forward pass op by op.
WHAT is a file, the first part of a split one, the directory of a run, or a checkpoint (run/checkpoints/step-200).
  toyexp describe model.gguf
  toyexp describe outputs/warm-llama/2026-11-21_050553_073724

options
A command that is shown works with this file: its tokenizer and, up to 256 MB, its numbers were checked.
In the forward pass B is sequences (or images) and T their tokens; operations are the multiplications and additions of
matrix products and attention for one token (or image), with attention over all T positions."""


def run_describe(arguments: Arguments) -> int:
    """Read the file's header, and show it."""
    from toyexp.inference.describe import describe

    what = parse_model_path("describe", arguments.rest, ": toyexp describe model.gguf")
    return describe(what, load(arguments.modules), arguments.metadata, arguments.tensors).show(arguments)


HELP_MODELS = """\
usage: toyexp models [DIR ...] [--json] [plugins=[my_module]]

The GGUF files on this machine: those of Hugging Face, Ollama, LM Studio and llama.cpp, those below here, and those in
the directories given. Only headers are read.

here is what toyexp can do with one:
  base      train it on (recipe=lora, recipe=full), or of text take its embedding (recipe=warm)
  donor     take its embedding (recipe=warm)
  adapter   add it to its base (toyexp merge), or train it on (recipe.adapter=)
  others    the kind of data that it reads, where no recipe trains it on
What stands under path can be pasted behind recipe.base= or recipe.donor=; more about one: toyexp describe PATH"""


def run_models(arguments: Arguments) -> int:
    """Look for models, and list them."""
    from toyexp.inference.models import find_models

    directories = [Path(word) for word in arguments.rest]
    for path in directories:
        if not os.path.isdir(path):  # noqa: PTH112 - Path.is_dir() raises where the way there may not be taken
            there = os.path.exists(path)  # noqa: PTH110 - likewise
            what = "is no directory; about one file: toyexp describe" if there else "not found"
            raise UserError(f"models {path}: {what}")
    return find_models(load(arguments.modules), directories).show(arguments)


HELP_EVAL = """\
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
Data, window and batch_size default to those of the run's config.yaml. --data takes text, .jsonl, packed ids (.bin,
.npy), or a folder of text or of images, and evaluates on all of it, or on its val/; without --data, on the held-out
share. It takes a few batches (all: data.eval_batches=1000000, of images data.eval_images=0). Settings are
model.context=N (tokens of a window), batch_size=N, data.*, engine, engine.* and plugins=[...]."""


def run_eval(arguments: Arguments) -> int:
    """Evaluate a model, and show its scores; RunFailed for a loss that is no number."""
    from toyexp.config.request import parse_experiment
    from toyexp.inference.evaluate import evaluate

    files = [word for word in arguments.rest if "=" not in word]
    usage = ", settings behind it, --data, --adapter and --json: toyexp eval model.gguf batch_size=4"
    what = parse_model_path("eval", files, usage)
    request = parse_experiment("eval", [word for word in arguments.settings if "=" in word])
    found = evaluate(what, request, arguments.data, Path(arguments.adapter) if arguments.adapter else None)
    found.show(arguments)
    if not math.isfinite(found.loss):
        raise RunFailed(f"{found.file}: its held-out loss is {found.loss}")
    return 0


HELP_PREDICT = """\
usage: toyexp predict MODEL IMAGE ... [options] [plugins=[my_module]]

Which class images are of, and how probable a model that was trained on images finds it. MODEL is a GGUF file, the
directory of a run that left a model.gguf, or a checkpoint (run/checkpoints/step-200); IMAGE a file (PNG, JPEG, BMP,
GIF, WebP, TIFF, PPM), or a folder, whose images are all taken, and those of the folders in it.
  toyexp predict outputs/vit_tiny-vit/2026-11-21_050553_073724 cat.jpg --top 3
  toyexp predict model.gguf photos --csv photos.csv

Each image is prepared as in training: its centred square, scaled, grey if those were, normalised by their mean and
deviation. With data.resize=false in the run's config.yaml an image of another size is an error.

options
If an image cannot be read, the exit code is 1; if none can be read, nothing is written and it is 2."""


def run_predict(arguments: Arguments) -> int:
    """Show the class of each image; 1 if one could not be read."""
    from toyexp.batching.pictures import require_pillow
    from toyexp.inference.predict import list_images, predict

    if not arguments.rest[1:]:
        given = f"predict {arguments.rest[0]}" if arguments.rest else "predict"
        raise UserError(f"{given}: takes a model, and images or folders of them: toyexp predict RUN photo.png")
    what, *places = map(Path, arguments.rest)
    table = arguments.csv
    if table is not None:
        _check_table(table, arguments)
    require_pillow()
    files, modules = list_images(places), arguments.modules
    found = predict(what, files, arguments.top or 1, arguments.engine or "auto", load(modules), modules)
    for image in found.failures:
        print(escape_cell(f"{image.file}: {image.error}"), file=sys.stderr)
    if table is None:
        found.show(arguments)
    else:
        with convert_write_errors(Path(table)), write_atomically(Path(table)) as place:
            place.write_text(found.csv(), encoding="utf-8", errors="surrogateescape")
        print_line(f"{found.summary()}; {table}")
    return 1 if found.failures else 0


def _check_table(table: str, arguments: Arguments) -> None:
    """Raise UserError before anything is read if the CSV file could not be written."""
    if arguments.json:
        raise UserError(f"--csv {table} --json: are two forms of the same; leave one of them out")
    path = Path(table)
    if table == "-" or path.is_dir():
        raise UserError(f"--csv {table}: takes the name of a file, such as --csv {path / 'classes.csv'}")
    require_writable(f"--csv {table}", path)
    if os.path.lexists(path):
        raise UserError(f"--csv {table}: is already there, and no table is replaced; choose another name")


def HELP_EXPORT(modules: Sequence[str]) -> str:  # noqa: N802 - a help text with the formats of plugins
    """Return what it takes, with the types of all formats."""
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


def run_export(arguments: Arguments) -> int:
    """Write the file, and show what it is."""
    from toyexp.inference.export import export

    settings = tuple(word for word in arguments.rest if "=" in word and not os.path.lexists(word))
    files, word = [word for word in arguments.rest if word not in settings], arguments.type
    what = parse_model_path("export", files, ", and a type: toyexp export model.gguf --type q8_0 --to small.gguf")
    if word is None:
        raise UserError(f"export {what}: takes a type: toyexp export {shlex.quote(str(what))} --type q8_0")
    registry = load(arguments.modules)
    return export(what, word, arguments.to, settings, registry, arguments.force, arguments.requantize).show(arguments)


HELP_MERGE = """\
usage: toyexp merge BASE ADAPTER --out FILE.gguf [options] [plugins=[my_module]]

Writes a model with a LoRA adapter added to it as one GGUF file: W + alpha / rank * B A in place of each adapted W,
computed in float64. BASE is a GGUF file, the directory of a run, or a checkpoint; ADAPTER a run of recipe=lora, its
adapter.gguf, or a directory of PEFT's.
  toyexp merge smollm2.gguf outputs/lora-llama/2026-11-21_050553_073724 --out mine.gguf
  toyexp export mine.gguf --type q8_0 --requantize        the whole of it in another type

options
Other tensors and keys are kept. A chat template that the adapter was trained with replaces the base's.
general.description, base_model.0.* and adapter_digest record what was merged."""


def run_merge(arguments: Arguments) -> int:
    """Write the file, and show what it is."""
    from toyexp.inference.export import TYPES, merge

    out = arguments.out
    if len(arguments.rest) != 2 or out is None:
        raise UserError(
            "merge: takes a base, an adapter and a place: toyexp merge base.gguf adapter.gguf --out FILE.gguf"
        )
    kind = arguments.type or "f32"
    if kind not in TYPES:
        raise UserError(f"--type {kind}: {suggest(kind, TYPES)}")
    if not out.endswith(".gguf"):
        raise UserError(f"--out {out}: is written as *.gguf; other formats: toyexp export")
    base, adapter, force = *map(Path, arguments.rest), arguments.force
    return merge(base, adapter, Path(out), kind, force, load(arguments.modules)).show(arguments)
