"""Commands on model files: `toyexp describe`, `models`, `eval`, `predict`, `export`, `merge` and `serve`.

The module of `toyexp.inference` that implements a command is imported only when the command runs.
"""

from __future__ import annotations

import math
import os
import shlex
import shutil
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from toyexp.base.errors import RunFailed, Unavailable, UserError, escape_cell, suggest
from toyexp.base.terminal import print_line
from toyexp.base.writing import convert_write_errors, require_writable, write_atomically
from toyexp.interfaces.command import Arguments
from toyexp.plugins.discovery import load


def parse_model_path(command: str, files: Sequence[str], usage: str) -> Path:
    """Return the single path in `files`, the model that a command reads.

    Raise UserError if there is no path or several. The message ends with `usage`, an example of the command.
    """
    if len(files) != 1 or not files[0]:
        raise UserError(f"{shlex.join([command, *files])}: needs exactly one file or run directory{usage}")
    return Path(files[0])


HELP_DESCRIBE = """\
usage: toyexp describe WHAT [options] [plugins=[my_module]]

Show a GGUF file: its model, weights and tokenizer, what toyexp can do with it, and its forward pass op by op.
WHAT is a file, the first part of a split file, a run directory, or a checkpoint (run/checkpoints/step-200).
  toyexp describe model.gguf
  toyexp describe outputs/warm-llama/2026-11-21_050553_073724

options
The suggested commands work with this file: its tokenizer and, in files of up to 256 MB, its weights are checked.
In the forward pass, B is the number of sequences (or images), T the number of tokens in each. Operations are the
multiplications and additions in matrix products and attention for one token (or image), attending to T positions."""


def run_describe(arguments: Arguments) -> int:
    """Describe a GGUF file, or the model of a run or checkpoint; return 0."""
    from toyexp.inference.describe import describe

    path = parse_model_path("describe", arguments.rest, ": toyexp describe model.gguf")
    return describe(path, load(arguments.modules), arguments.metadata, arguments.tensors).show(arguments)


HELP_MODELS = """\
usage: toyexp models [DIR ...] [--json] [plugins=[my_module]]

List GGUF files in the caches of Hugging Face, Ollama, LM Studio and llama.cpp, below the current directory, and in the
given directories. Only headers are read.

The column `here` says what toyexp can use a file for:
  base      fine-tune it (recipe=lora, recipe=full); if it is a language model, also copy its embedding (recipe=warm)
  donor     copy its embedding (recipe=warm)
  adapter   merge it into its base (toyexp merge), or train it further (recipe.adapter=)
  otherwise the kind of data that the model reads, if no recipe can fine-tune it, or `no:` and the reason
The column `path` can be pasted after recipe.base= or recipe.donor=. More about a file: toyexp describe PATH"""


def run_models(arguments: Arguments) -> int:
    """List the GGUF files in the caches of other programs and in the given directories; return 0."""
    from toyexp.inference.models import find_models

    directories = [Path(word) for word in arguments.rest]
    for path in directories:
        if not os.path.isdir(path):  # noqa: PTH112 - Path.is_dir() raises if a parent directory is not accessible
            exists = os.path.exists(path)  # noqa: PTH110 - likewise
            problem = "not a directory; to describe a file: toyexp describe" if exists else "not found"
            raise UserError(f"models {path}: {problem}")
    return find_models(load(arguments.modules), directories).show(arguments)


HELP_EVAL = """\
usage: toyexp eval MODEL [key=value ...] [options]

Evaluate a model on held-out data: loss, perplexity and bits per byte; for images loss and accuracy, and for each class
the share of right answers and the classes most often predicted instead.
MODEL is a GGUF file, a run directory with a model.gguf, a checkpoint (run/checkpoints/step-200), or a directory or the
id of a downloaded repository of transformers.
  toyexp eval outputs/warm-llama/2026-11-21_050553_073724 engine=ggml
                                                          on the run's own held-out data
  toyexp eval model.gguf                                  on held-out text of Python's standard library
  toyexp eval model.gguf --data book.txt engine=ggml      on all of book.txt
  toyexp eval digits.gguf data=digits
  toyexp eval base.gguf --adapter outputs/lora-llama/2026-11-21_050553_073724
                                                          with a LoRA adapter: a run (on its held-out data), an
                                                          adapter.gguf, or a PEFT directory
  toyexp eval model.gguf --choices questions.jsonl        share of multiple-choice questions answered right

options
Data, context and batch_size default to the run's config.yaml. --data takes text, .jsonl, packed token ids (.bin,
.npy), or a directory of text or images. With --data the whole path is evaluated, or its val/ directory if there is one;
without --data, the held-out part of the data. The number of batches is limited; to use all of them, set
data.eval_batches=1000000 (text) or data.eval_images=0 (images). Other settings: model.context=N (tokens per row),
batch_size=N, data.*, engine, engine.*, plugins=[...]."""


def run_eval(arguments: Arguments) -> int:
    """Evaluate a model on held-out data, print its metrics and return 0; raise RunFailed if the loss is not finite."""
    from toyexp.config.request import parse_experiment
    from toyexp.inference.choices import score_choices
    from toyexp.inference.evaluate import evaluate

    files = [word for word in arguments.rest if "=" not in word]
    usage = ", then settings and options: toyexp eval model.gguf batch_size=4"
    model_path = parse_model_path("eval", files, usage)
    adapter = Path(arguments.adapter) if arguments.adapter else None
    if file := arguments.choices:
        words = [*([f"--data {arguments.data}"] if arguments.data else []), *(w for w in arguments.rest if "=" in w)]
        if other := next((word for word in words if not word.startswith("engine=")), None):
            raise UserError(f"eval {other}: has no effect with --choices, which only takes engine=...; leave it out")
        engine = words[-1].removeprefix("engine=") if words else "auto"
        return score_choices(model_path, file, engine, load(arguments.modules), adapter).show(arguments)
    request = parse_experiment("eval", [word for word in arguments.settings if "=" in word])
    evaluation = evaluate(model_path, request, arguments.data, adapter)
    evaluation.show(arguments)
    if not math.isfinite(evaluation.loss):
        raise RunFailed(f"{evaluation.file}: its held-out loss is {evaluation.loss}")
    return 0


HELP_PREDICT = """\
usage: toyexp predict MODEL IMAGE ... [options] [plugins=[my_module]]

Classify images: print the most likely class of each image and its probability. MODEL is a GGUF file, a run directory
with a model.gguf, or a checkpoint (run/checkpoints/step-200). IMAGE is a file (PNG, JPEG, BMP, GIF, WebP, TIFF, PPM) or
a directory, which is searched recursively.
  toyexp predict outputs/vit_tiny-vit/2026-11-21_050553_073724 cat.jpg --top 3
  toyexp predict model.gguf photos --csv photos.csv
  toyexp predict model.gguf photos/val --html wrong.html

The label of an image is the name of its directory, if this is the name of a class: photos/val/cat/7.jpg. Of labelled
images, the accuracy is printed, and --html shows those that are classified wrongly.

Images are preprocessed as in training: centre crop, resize, greyscale if the training images were, and normalisation
with the same mean and standard deviation. If the run's config.yaml has data.resize=false, an image
of another size is an error.

options
Exit code: 1 if some images cannot be read; 2 if none can be read (nothing is written)."""


def run_predict(arguments: Arguments) -> int:
    """Classify images and print the classes or write them to a CSV file; return 1 if an image is unreadable, else 0."""
    from toyexp.batching.pictures import require_pillow
    from toyexp.inference.predict import list_images, predict

    if not arguments.rest[1:]:
        typed = f"predict {arguments.rest[0]}" if arguments.rest else "predict"
        raise UserError(f"{typed}: needs a model, then images or directories of images: toyexp predict RUN photo.png")
    model_path, *image_paths = map(Path, arguments.rest)
    table, page = arguments.csv, arguments.html
    if table is not None and arguments.json:
        raise UserError(f"--csv {table} --json: choose one output format; leave out the other")
    for option, name in (("--csv", table), ("--html", page)):
        if name is not None:
            _check_output(option, name)
    require_pillow()
    files, modules = list_images(image_paths), arguments.modules
    predictions = predict(model_path, files, arguments.top or 1, arguments.engine or "auto", load(modules), modules)
    for image in predictions.failures:
        print(escape_cell(f"{image.file}: {image.error}"), file=sys.stderr)
    written = {table: predictions.csv()} if table else {}
    written |= {page: predictions.html()} if page else {}
    for name, content in written.items():
        with convert_write_errors(Path(name)), write_atomically(Path(name)) as temporary:
            temporary.write_text(content, encoding="utf-8", errors="surrogateescape")
    if arguments.json or not written:
        predictions.show(arguments)
    else:
        print_line(f"{predictions.summary()}; {', '.join(written)}")
    return 1 if predictions.failures else 0


def _check_output(option: str, name: str) -> None:
    """Raise UserError if the file `name` cannot be written or already exists. Called before images are read."""
    path, typed = Path(name), f"{option} {name}"
    if name == "-" or path.is_dir():
        example = path / ("classes.csv" if option == "--csv" else "wrong.html")
        raise UserError(f"{typed}: must be a file name, such as {option} {example}")
    require_writable(typed, path)
    if os.path.lexists(path):
        raise UserError(f"{typed}: already exists and is not overwritten; choose another name")


def HELP_EXPORT(modules: Sequence[str]) -> str:  # noqa: N802 - a help text that lists the formats of plugins
    """Return the usage text of `toyexp export`. It lists the types of all formats, also those of local `modules`."""
    registry, listed = load(modules), []
    for offer in registry.offers["format"].values():
        words = [word for word, (form, _) in registry.types().items() if form is offer.cls]
        listed += textwrap.wrap(f"{', '.join(words)}: {offer.help}", 100, subsequent_indent="  ")
    types = "\n          ".join(listed)
    return f"""\
usage: toyexp export WHAT --type TYPE [key=value ...] [options] [plugins=[my_module]]

Convert a model to another quantisation or format. WHAT is a GGUF file, a run directory (its model.gguf), or a
checkpoint (run/checkpoints/step-200). The new file of a checkpoint is written into the run directory.
  toyexp export model.gguf --type q8_0                    writes model-q8_0.gguf next to it
  toyexp export outputs/lora-llama/2026-11-21_050553_073724 --type q4_k_m --to small.gguf
  toyexp export model.gguf --type hf                      writes the directory model-hf for transformers
  toyexp export model.gguf --type f16 --new-tokens '<|a|>,<|b|>' --to larger.gguf
                                                          adds tokens, whose embeddings are the mean of all others
  toyexp export model.gguf --ollama                       writes a Modelfile for `ollama create` next to it

options
types     {types}
          K-quants need llama.cpp: llama-quantize on the PATH, or pip install llama-cpp-python.
settings  key=value of a format; toyexp plugins NAME lists them

From GGUF to GGUF all metadata is kept except general.file_type and general.quantization_version. Norms, biases and
position embeddings are written in f32. A split model, given by its first part, becomes one file."""


def run_export(arguments: Arguments) -> int:
    """Convert a model file to another quantisation or format; return 0."""
    settings = tuple(word for word in arguments.rest if "=" in word and not os.path.lexists(word))
    files, word = [word for word in arguments.rest if word not in settings], arguments.type
    model = parse_model_path("export", files, ", and a type: toyexp export model.gguf --type q8_0 --to small.gguf")
    registry, options = load(arguments.modules), (arguments.force, arguments.requantize)
    tokens = arguments.new_tokens.split(",") if arguments.new_tokens is not None else []
    if arguments.system is not None and not arguments.ollama:
        raise UserError("--system: applies to --ollama only; leave it out")
    if arguments.ollama and tokens:
        raise UserError("--new-tokens: has no effect with --ollama; first add the tokens, and train them")
    if arguments.ollama:
        from toyexp.inference.ollama import export_for_ollama

        return export_for_ollama(model, word, arguments.to, settings, registry, *options, arguments.system).show(
            arguments
        )
    if word is None:
        raise UserError(f"export {model}: needs a type: toyexp export {shlex.quote(str(model))} --type q8_0")
    from toyexp.inference.export import export

    return export(model, word, arguments.to, settings, registry, *options, tokens).show(arguments)


HELP_MERGE = """\
usage: toyexp merge BASE ADAPTER --out FILE.gguf [options] [plugins=[my_module]]

Merge a LoRA adapter into its base and write one GGUF file: W + alpha / rank * B A replaces each adapted W, computed in
float64. BASE is a GGUF file, a run directory, or a checkpoint. ADAPTER is a run of recipe=lora, its adapter.gguf, or a
PEFT directory.
  toyexp merge smollm2.gguf outputs/lora-llama/2026-11-21_050553_073724 --out mine.gguf
  toyexp export mine.gguf --type q8_0 --requantize        convert the merged model

options
Other tensors and metadata are kept. The chat template of the adapter, if it has one, replaces that of the base.
general.description, base_model.0.* and adapter_digest record what was merged."""


def run_merge(arguments: Arguments) -> int:
    """Merge a LoRA adapter into its base model and write one GGUF file; return 0."""
    from toyexp.inference.export import TYPES, merge

    out = arguments.out
    if len(arguments.rest) != 2 or out is None:
        raise UserError(
            "merge: needs a base, an adapter and --out: toyexp merge base.gguf adapter.gguf --out FILE.gguf"
        )
    kind = arguments.type or "f32"
    if kind not in TYPES:
        raise UserError(f"--type {kind}: {suggest(kind, TYPES)}")
    if not out.endswith(".gguf"):
        raise UserError(f"--out {out}: must end in .gguf; for other formats use toyexp export")
    base, adapter, force = *map(Path, arguments.rest), arguments.force
    return merge(base, adapter, Path(out), kind, force, load(arguments.modules)).show(arguments)


HELP_SERVE = """\
usage: toyexp serve WHAT [-- OPTION ...] [plugins=[my_module]]

Start llama-server, the HTTP server of llama.cpp, with a model. WHAT is a GGUF file or a run directory (its model.gguf).
The words after -- are options of llama-server.
  toyexp serve outputs/lora-llama/2026-11-21_050553_073724
  toyexp serve model.gguf -- --port 9000 --ctx-size 2048

options
llama-server must be on the PATH. By default it listens on http://127.0.0.1:8080 and has a chat page and an API like
OpenAI's (/v1/chat/completions). To end it, press Ctrl-C."""


def run_serve(arguments: Arguments) -> int:
    """Replace this process by llama-server with a model."""
    from toyexp.formats.gguf.header import source_path
    from toyexp.inference.model_files import find_model_file, find_reader

    model = parse_model_path("serve", arguments.rest, ": toyexp serve model.gguf")
    path = find_model_file(model, registry=(registry := load(arguments.modules)))
    if (program := shutil.which("llama-server")) is None:
        hint = "brew install llama.cpp, or download it from https://github.com/ggml-org/llama.cpp/releases"
        raise Unavailable(f"serve: there is no llama-server on the PATH; install llama.cpp: {hint}")
    if source_path(path) != path or find_reader(path, registry):
        command = f"toyexp export {shlex.quote(str(model))} --type f16"
        raise UserError(f"serve {model}: llama-server only loads GGUF files; convert it first: {command}")
    command_line = [program, "-m", str(path), *arguments.passed]
    print_line(shlex.join(command_line))
    os.execv(program, command_line)
