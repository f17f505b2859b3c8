"""A GGUF file written again in another type, or for transformers: what `toyexp export` does."""

from __future__ import annotations

import itertools
import os
import re
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from toyexp.base.errors import UserError, choose
from toyexp.base.writing import bytes_in, dump_json
from toyexp.commands.options import read_options, refuse_settings
from toyexp.config.restored import file_of, origin
from toyexp.contract.format import TensorInfo
from toyexp.contract.registry import Registry
from toyexp.formats.gguf.encode import FILE_TYPES, K_QUANTS, check_type, checked, tensor_type
from toyexp.formats.gguf.open_model import class_in, model_in
from toyexp.formats.gguf.quantise import quantise
from toyexp.formats.gguf.read import GGUFError, GGUFFile, dequantise
from toyexp.formats.gguf.tokenizer import read_tokenizer
from toyexp.formats.gguf.write import Writer
from toyexp.formats.huggingface import TYPES, notes, write_folder
from toyexp.text.tokenizer import Tokenizer

PLAIN = ("F32", "F16", "BF16")
FOLDERS = {"hf": "float32", "hf-f16": "float16", "hf-bf16": "bfloat16"}  # directories for transformers
FOLDER_FILES = {
    "config.json", "generation_config.json", "model.safetensors", "preprocessor_config.json", "tokenization.py",
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json",
}  # fmt: skip
VALUES = {"--type": "q8_0", "--to": "small.gguf"}
SWITCHES = ("--force", "--requantize", "--json")

HELP = f"""\
usage: toyexp export WHAT --type TYPE [--to PATH] [--force] [--requantize] [--json] [plugins=[my_module]]

Writes a model again in another type; WHAT is a GGUF file, a run's directory, which means its model.gguf, or a
checkpoint (run/checkpoints/step-200), whose model is written into the run's directory.
  toyexp export model.gguf --type q8_0                    writes model-q8_0.gguf beside it
  toyexp export outputs/lora-llama/2026-11-21_050553_073724 --type q4_k_m --to small.gguf
  toyexp export model.gguf --type hf                      writes the directory model-hf for transformers

types     {", ".join(FILE_TYPES)}
          with llama.cpp (llama-quantize on the PATH, or pip install llama-cpp-python):
          {", ".join(K_QUANTS)}
          {", ".join(FOLDERS)}: config.json, model.safetensors and the tokenizer for Hugging Face's transformers

Every key of the file is kept as it is, but general.file_type and general.quantization_version; norms, biases and
positions are written in f32. A split model, given by its first part, becomes one file.

options
  --to PATH      where to; an existing file is replaced only with --force
  --requantize   round numbers again that were already rounded to a quantised type
  --json         print what was written as JSON"""


@dataclass(frozen=True)
class Options:
    """What was typed."""

    what: Path
    type: str
    to: Path | None
    force: bool
    requantize: bool
    json: bool


@dataclass(frozen=True)
class Exported:
    """What was written."""

    source: str
    path: str
    type: str
    source_bytes: int
    bytes: int
    tensors: dict[str, int]  # how many of each type
    warnings: list[str]
    notes: list[str]  # who makes something else of it

    def plain(self) -> str:
        """As JSON."""
        return dump_json(asdict(self), indent=2)

    def lines(self) -> list[str]:
        """For a person."""
        types = ", ".join(f"{count} {name}" for name, count in self.tensors.items())
        sizes = f"{self.source_bytes / 1e6:.2f} -> {self.bytes / 1e6:.2f} MB"
        told = [*(f"warning: {w}" for w in self.warnings), *(f"note: {n}" for n in self.notes)]
        return [*told, f"{self.path}  {sizes}  ({types})"]


def split(words: Sequence[str]) -> Options:
    """The command line of `toyexp export`; UserError for what it does not take."""
    given = read_options("export", words, SWITCHES, VALUES)
    refuse_settings("export", given.rest)
    if len(given.rest) != 1 or "--type" not in given.values:
        raise UserError(
            f"export {' '.join(words)}".rstrip() + ": takes one file or run directory, and a type: "
            "toyexp export model.gguf --type q8_0"
        )
    to = Path(given.values["--to"]) if "--to" in given.values else None
    flags = (f"--{name}" in given.switches for name in ("force", "requantize", "json"))
    return Options(Path(given.rest[0]), given.values["--type"], to, *flags)


def export(options: Options, registry: Registry) -> Exported:
    """Writes the file; UserError for what cannot be, before anything is written."""
    if options.type not in FOLDERS:
        check_type(options.type, "--type", FOLDERS)
    with GGUFFile(file_of(options.what, registry=registry)) as file:
        if options.type in FOLDERS:
            return _folder(options, file, registry)
        target = choose_target(file, options.type, options.to, options.force)
        _check_model(file, options.type, registry)
        tied = "output.weight" not in file.tensors
        types = {t.name: tensor_type(t.name, t.shape, options.type, tied) for t in file.tensors.values()}
        _check_rounding(options, file, types)
        if options.type in K_QUANTS:
            quantise(file.path, target, options.type, options.requantize)
            warnings: list[str] = []
            for t in file.tensors.values():
                deque(checked(t.name, _raw(file, t), t.type, warnings), maxlen=0)
        else:
            warnings = _written(file, types, options.type).save(target)
        with GGUFFile(target) as written:
            counts = Counter(t.type for t in written.tensors.values())
            return Exported(
                str(origin(file.path)), str(target), options.type, file.size, written.size, dict(counts), warnings, []
            )


def _folder(options: Options, file: GGUFFile, registry: Registry) -> Exported:
    """The same as a directory for transformers."""
    target = _path(file, options.type, options.to)
    if os.path.lexists(target):
        if target.is_symlink() or not target.is_dir() or {f.name for f in target.iterdir()} - FOLDER_FILES:
            raise UserError(f"--to {target}: is already there, and no directory that was written so")
        if not options.force:
            raise UserError(f"{target}: is already there; write elsewhere with --to, or replace it with --force")
    model, dtype = model_in(file, registry), FOLDERS[options.type]
    _check_rounding(options, file, dict.fromkeys(file.tensors, TYPES[dtype]))
    prefix = f"{file.architecture}."
    data = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    tokenizer, warnings = _tokenizer(file) if model.reads.text else (None, [])
    try:
        told = notes(model, data, tokenizer)
        warnings += write_folder(target, model, file.read, tokenizer, dtype, data)
    except UserError as error:
        raise file.error(str(error)) from None
    count = {TYPES[dtype]: len(model.tensors())}
    return Exported(str(file.path), str(target), options.type, file.size, bytes_in(target), count, warnings, told)


def _tokenizer(file: GGUFFile) -> tuple[Tokenizer | None, list[str]]:
    """The file's tokenizer, or a sentence that says why there is none: the model is of use without one too."""
    try:
        return read_tokenizer(file), []
    except GGUFError as error:
        return None, [f"written without a tokenizer: {error}"]


def _path(file: GGUFFile, ending: str, to: Path | None) -> Path:
    """Where to; UserError when there is no directory."""
    beside = file.path
    if (made_of := origin(file.path)) != file.path:  # what lies in a checkpoint's directory goes with it
        beside = made_of.parents[1] / file.path.name
    stem = re.sub(r"-\d{5}-of-\d{5}$", "", file.path.stem) if len(file.paths) > 1 else file.path.stem
    target = to or beside.with_name(f"{stem}-{ending}")
    if not target.parent.is_dir():
        raise UserError(f"--to {target}: there is no directory {target.parent}")
    return target


def choose_target(file: GGUFFile, kind: str, to: Path | None = None, force: bool = False) -> Path:
    """Where a file goes; UserError for a place that cannot be, or that is taken."""
    target = _path(file, f"{kind}.gguf", to)
    if target.is_dir():
        raise UserError(f"--to {target}: is a directory; name a file in it")
    if os.path.lexists(target):
        if target.exists() and any(target.samefile(path) for path in file.paths):
            raise UserError(f"{target}: is what is read; write elsewhere: --to other.gguf")
        if not force:
            raise UserError(f"{target}: is already there; write elsewhere with --to, or replace it with --force")
    return target


def _check_model(file: GGUFFile, kind: str, registry: Registry) -> None:
    """Raises UserError unless the file holds a model of an architecture that is known here."""
    model = class_in(file, registry)
    if kind in K_QUANTS and not model.reads.text:
        raise file.error(f"{kind} is written by llama.cpp, which has no {file.architecture}; {choose('', FILE_TYPES)}")


def _check_rounding(options: Options, file: GGUFFile, types: dict[str, str]) -> None:
    """Raises UserError for numbers that would be rounded a second time, unless that was asked for."""

    def is_rounded(t: TensorInfo) -> bool:
        return types[t.name] != "F32" and (types[t.name] != t.type or options.type in K_QUANTS)

    again = [t for t in file.tensors.values() if t.type not in PLAIN and is_rounded(t)]
    if again and not options.requantize:
        kinds = ", ".join(sorted({t.type for t in again}))
        raise file.error(
            f"is quantised already ({len(again)} of {len(file.tensors)} tensors: {kinds}); rounding twice "
            "loses more than rounding the original once. Export that, or take --type f32, or add --requantize"
        )


def _written(file: GGUFFile, types: dict[str, str], kind: str) -> Writer:
    """The file's keys and tensors, the latter in the types given."""
    writer = Writer()
    own = {"general.file_type": FILE_TYPES[kind], "general.quantization_version": 2}
    for key, value in file.metadata.items():
        if key in own:
            writer.add(key, own.pop(key))
        elif not key.startswith("split."):
            writer.add(key, value, file.kinds[key])
    for key, value in own.items():
        writer.add(key, value)
    for info in file.tensors.values():
        if info.type == types[info.name]:
            writer.add_bytes(info.name, info.shape, info.type, _raw(file, info))
        else:
            numbers = map(dequantise, _raw(file, info), itertools.repeat(info.type_id))
            writer.add_numbers(info.name, info.shape, types[info.name], numbers)
    return writer


def _raw(file: GGUFFile, info: TensorInfo) -> Iterator[np.ndarray]:
    return (raw for _, raw in file.pieces(info))


def show(words: Sequence[str], registry: Registry) -> str:
    """What `toyexp export` prints."""
    options = split(words)
    done = export(options, registry)
    return done.plain() if options.json else "\n".join(done.lines())
