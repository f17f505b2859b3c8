"""A model's file written again in another type or format: what `toyexp export` does."""

from __future__ import annotations

import os
import re
import shlex
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from toyexp.base.blame import blamed, sentences
from toyexp.base.errors import RunFailed, UserError, choose, for_terminal
from toyexp.base.writing import bytes_in, in_one_piece, require_place, required
from toyexp.commands.options import Answer
from toyexp.config.restored import file_of
from toyexp.contract.command import Arguments
from toyexp.contract.format import Exported, Format, require_written
from toyexp.contract.plugins import load
from toyexp.contract.registry import Registry
from toyexp.formats.gguf.header import origin
from toyexp.formats.gguf.open_model import class_in, exported_of
from toyexp.formats.gguf.read import GGUFFile
from toyexp.formats.gguf.rewrite import require_exact
from toyexp.formats.layout import HF_TYPES


def help_text(modules: Sequence[str]) -> str:
    """What it takes, with the types of all formats."""
    registry, listed = load(modules), []
    for offer in registry.offers["format"].values():
        words = [word for word, (form, _) in registry.types().items() if form is offer.cls]
        listed += textwrap.wrap(f"{', '.join(words)}: {offer.help}", 100, subsequent_indent="  ")
    types = "\n          ".join(listed)
    return f"""\
usage: toyexp export WHAT --type TYPE [key=value ...] [--to PATH] [--force] [--requantize] [--json]
       [plugins=[my_module]]

Writes a model again in another type; WHAT is a GGUF file, a run's directory, which means its model.gguf, or a
checkpoint (run/checkpoints/step-200), whose model is written into the run's directory.
  toyexp export model.gguf --type q8_0                    writes model-q8_0.gguf beside it
  toyexp export outputs/lora-llama/2026-11-21_050553_073724 --type q4_k_m --to small.gguf
  toyexp export model.gguf --type hf                      writes the directory model-hf for transformers

types     {types}
          The K-quants among them take llama.cpp: llama-quantize on the PATH, or pip install llama-cpp-python.
settings  of a format, such as key=value: toyexp plugins NAME

From GGUF to GGUF every key is kept as it is, but general.file_type and general.quantization_version; norms, biases and
positions are written in f32. A split model, given by its first part, becomes one file.

options
  --to PATH      where to; an existing file is replaced only with --force
  --requantize   round numbers again that were already rounded to a quantised type
  --json         print what was written as JSON"""


HELP = help_text


@dataclass(frozen=True)
class Written(Answer):
    """What was written."""

    source: str
    path: str
    type: str
    source_bytes: int
    bytes: int
    tensors: dict[str, int]  # how many of each type
    warnings: list[str]
    notes: list[str]  # who makes something else of it

    def lines(self) -> list[str]:
        """What is odd about it, and where it is."""
        types = ", ".join(f"{count} {name}" for name, count in self.tensors.items())
        sizes = f"{self.source_bytes / 1e6:.2f} -> {self.bytes / 1e6:.2f} MB"
        told = [*(f"warning: {w}" for w in self.warnings), *(f"note: {n}" for n in self.notes)]
        return [*map(for_terminal, told), f"{self.path}  {sizes}  ({types})"]


def run(arguments: Arguments) -> int:
    """Writes the file, and tells what it is."""
    settings = tuple(word for word in arguments.rest if "=" in word and not os.path.lexists(word))
    files = [word for word in arguments.rest if word not in settings]
    if len(files) != 1 or "--type" not in arguments.values:
        second = files[1] if len(files) == 2 and "--to" not in arguments.values else ""
        example = [files[0] if second else "model.gguf", "--type", arguments.values.get("--type", "q8_0")]
        example += ["--to", second] if second else []
        given = shlex.join(["export", *arguments.rest])
        raise UserError(f"{given}: takes one file or run directory, and a type: toyexp export {shlex.join(example)}")
    return export(Path(files[0]), settings, arguments, load(arguments.modules)).show(arguments)


def asked(word: str, settings: Sequence[str], registry: Registry) -> Format:
    """The format that `--type` names, with the settings behind it; UserError for what it does not take."""
    known = registry.types()
    if word not in known:
        raise UserError(f"--type={word}: {choose(word, known)}")
    cls, values = known[word]
    form = _with(cls, values, settings, word) if settings else cls(**values)
    try:
        form.check()
    except UserError as error:  # of the settings that the word stands for, where none was typed
        raise type(error)(f"{'' if settings else '--'}{error}") from None
    return form


def _with(cls: type[Format], values: Mapping[str, Any], settings: Sequence[str], word: str) -> Format:
    from toyexp.config.build import made, typed  # deferred: few exports take settings, which Hydra reads
    from toyexp.config.words import parse

    names, given = [f.name for f in fields(cls)], {"name": cls.name, **values}
    for override in parse(settings):
        key = override.key_or_group
        if key not in names:
            there = choose(key, names) if names else "it has none"
            raise UserError(f"export {override.input_line}: --type {word} has no such setting; {there}")
        if key in values:
            raise UserError(f"export {override.input_line}: --type {word} means {key}={values[key]}; leave one out")
        given[key] = override.value()
    try:
        form: Format = made(cls, typed(cls, given, cls.name))
    except UserError as error:
        raise UserError(str(error).removeprefix(f"{cls.name}.")) from None
    return form


def export(what: Path, settings: Sequence[str], arguments: Arguments, registry: Registry) -> Written:
    """Writes the file; UserError for what cannot be, before anything is written."""
    word, to = arguments.values["--type"], arguments.values.get("--to")
    place = None if to is None else Path(to)
    form = asked(word, settings, registry)
    # What the stem of a file's name gets: -q8_0.gguf, .onnx, -hf, -hf-f16.
    ending = form.suffix if word == form.name else f"-{word}" if form.contents else f"-{word}{form.suffix}"
    with GGUFFile(file_of(what, registry=registry)) as file:
        target = choose_target(file, ending, place, "--force" in arguments.switches, form.contents)
        if target.suffix in {suffix for suffix in registry.suffixes() if suffix != form.suffix}:
            raise UserError(f"--to {target}: --type {word} is written as *{form.suffix}")
        try:
            exported, problems = _write(form, file, target, "--requantize" in arguments.switches, registry)
        except UserError as error:
            raise error if str(error).startswith(str(origin(file.path))) else file.error(str(error)) from None
        kinds = {HF_TYPES.get(form.kind, form.kind.upper()): len(exported.tensors if exported else file.tensors)}
        if target.suffix == ".gguf":
            with GGUFFile(target) as written:
                kinds = dict(Counter(t.type for t in written.tensors.values()))
        told = sentences(form.notes, exported) if exported is not None else []
        return Written(str(origin(file.path)), str(target), word, file.size, bytes_in(target), kinds, problems, told)


def _write(
    form: Format, file: GGUFFile, target: Path, requantize: bool, registry: Registry
) -> tuple[Exported | None, list[str]]:
    """Writes `target` in one piece: from the file as it stands where that has the format already, or from its model.

    Returns the model, of which there is none in the first case, and what is odd about the numbers.
    """
    found = class_in(file, registry.models())
    with blamed(f"format.{form.name}", "while it wrote the file"), required(target), in_one_piece(target) as place:
        try:
            form.check_model(found())  # its sizes may be what toyexp has no model for, and are left alone
            problems = form.write_again(file, place, requantize)
            if problems is not None:
                return None, [*_unread(file, registry), *require_written(form, place, problems)]
            exported = exported_of(file, registry.models())
            form.check_model(exported.model)
            rounded = {"float32": "F32", "f32": "F32"}.get(form.kind, form.kind)
            require_exact(file, dict.fromkeys(file.tensors, rounded), requantize)
            return exported, [*exported.lacks, *require_written(form, place, form.write(exported, place))]
        except RunFailed as error:
            raise RunFailed(str(error).replace(str(place), str(target))) from error


def _unread(file: GGUFFile, registry: Registry) -> Sequence[str]:
    """What a file of another format did not bring along: its tokenizer."""
    converted = origin(file.path) != file.path and origin(file.path).is_file()
    return exported_of(file, registry.models()).lacks if converted else ()


def choose_target(
    file: GGUFFile, ending: str, to: Path | None = None, force: bool = False, contents: frozenset[str] = frozenset()
) -> Path:
    """Where a file goes, or a directory of `contents`; UserError for a place that cannot be, or that is taken."""
    target = _path(file, ending, to)
    if not os.path.lexists(target):
        return target
    if contents:
        if target.is_symlink() or not target.is_dir() or {f.name for f in target.iterdir()} - contents:
            raise UserError(f"--to {target}: is already there, and no directory that was written so")
    elif target.is_dir():
        raise UserError(f"--to {target}: is a directory; name a file in it")
    elif target.exists() and any(target.samefile(path) for path in (*file.paths, origin(file.path))):
        raise UserError(f"{target}: is what is read; write elsewhere: --to other{target.suffix}")
    elif target.exists() and not target.is_file():
        raise UserError(f"--to {target}: is a device or a pipe, which no file takes the place of; name a file")
    if not force:
        raise UserError(f"{target}: is already there; write elsewhere with --to, or replace it with --force")
    return target


def _path(file: GGUFFile, ending: str, to: Path | None) -> Path:
    """Where to; UserError when there is no directory."""
    beside = file.path
    if (made_of := origin(file.path)) != file.path:  # what lies in a checkpoint's directory goes with it
        beside = (made_of.parents[1] if made_of.is_dir() else made_of.parent) / file.path.name
    stem = re.sub(r"-\d{5}-of-\d{5}$", "", file.path.stem) if len(file.paths) > 1 else file.path.stem
    target = to or beside.with_name(f"{stem}{ending}")
    require_place(f"--to {target}", target)
    return target
