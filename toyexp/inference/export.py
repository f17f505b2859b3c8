"""Write a model's file again: in another type or format, or with a LoRA adapter added to it."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from toyexp.base.attribution import attribute_errors, call_for_lines
from toyexp.base.errors import RunFailed, UserError, escape_controls, suggest
from toyexp.base.files import read_head
from toyexp.base.formatting import format_bytes, short_path
from toyexp.base.ownership import owning_run
from toyexp.base.writing import convert_write_errors, require_writable, total_bytes, write_atomically
from toyexp.formats.file_plan import read_adapter
from toyexp.formats.gguf.ggml_types import fitting_type, iter_pieces
from toyexp.formats.gguf.header import source_path
from toyexp.formats.gguf.open_model import PARENT, find_model_class, inherited_keys, load_open_model, read_exported
from toyexp.formats.gguf.quantise import FILE_TYPES, tensor_type
from toyexp.formats.gguf.read import GGUFFile
from toyexp.formats.gguf.tokenizer import read_chat_template
from toyexp.formats.gguf.write import Writer, require_exact
from toyexp.formats.layout import HF_TYPES
from toyexp.inference.model_files import check_base, find_adapter_file, find_model_file
from toyexp.interfaces.command import Answer
from toyexp.interfaces.format import Format, ModelExport, TensorInfo, require_written
from toyexp.interfaces.plan import LoraAdapter, adapter_digest, lora_names
from toyexp.plugins.exporter import card_facts
from toyexp.plugins.registry import Registry
from toyexp.results.run_dirs import read_run
from toyexp.training.checkpoint import read_result
from toyexp.training.run_config import config_hash
from toyexp.training.rundir import read_settings

BEGINNINGS = {".gguf": b"GGUF", ".safetensors": rb".{4}\0{4}\{", ".npz": b"PK"}  # first bytes of files, as a pattern


@dataclass(frozen=True)
class ExportResult(Answer):
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
        sizes = f"{format_bytes(self.source_bytes)} -> {format_bytes(self.bytes)}"
        told = [*(f"warning: {w}" for w in self.warnings), *(f"note: {n}" for n in self.notes)]
        return [*map(escape_controls, told), f"{self.path}  {sizes}  ({types})"]


def build_format(word: str, settings: Sequence[str], registry: Registry) -> Format:
    """The format that `--type` names, with the settings behind it; UserError for what it does not take."""
    known = registry.types()
    if word not in known:
        raise UserError(f"--type={word}: {suggest(word, known)}")
    cls, values = known[word]
    form = _build_with_settings(cls, values, settings, word) if settings else cls(**values)
    try:
        form.check()
    except UserError as error:  # of the settings that the word stands for, where none was typed
        raise type(error)(f"{'' if settings else '--'}{error}") from None
    return form


def _build_with_settings(cls: type[Format], values: Mapping[str, Any], settings: Sequence[str], word: str) -> Format:
    from toyexp.config.build import apply_types, instantiate  # deferred: few exports take settings, which Hydra reads
    from toyexp.config.words import parse

    names, given = [f.name for f in fields(cls)], {"name": cls.name, **values}
    for override in parse(settings):
        key = override.key_or_group
        if key not in names:
            there = suggest(key, names) if names else "it has none"
            raise UserError(f"export {override.input_line}: --type {word} has no such setting; {there}")
        if key in values:
            raise UserError(f"export {override.input_line}: --type {word} means {key}={values[key]}; leave one out")
        given[key] = override.value()
    try:
        form: Format = instantiate(cls, apply_types(cls, given, cls.name))
    except UserError as error:
        raise UserError(str(error).removeprefix(f"{cls.name}.")) from None
    return form


def export(
    what: Path, word: str, to: str | None, settings: Sequence[str], registry: Registry, force: bool, requantize: bool
) -> ExportResult:
    """Write the file as the format that `word` names; UserError for what cannot be, before anything is written."""
    form = build_format(word, settings, registry)
    # What the stem of a file's name gets: -q8_0.gguf, .onnx, -hf, -hf-f16.
    ending = form.suffix if word == form.name else f"-{word}" if form.contents else f"-{word}{form.suffix}"
    with GGUFFile(find_model_file(what, registry=registry)) as file:
        target = Path(to) if to else default_target(file, ending)
        if target.suffix in {suffix for suffix in registry.suffixes() if suffix != form.suffix}:
            raise UserError(f"--to {target}: --type {word} is written as *{form.suffix}")
        read = [*file.paths, source_path(file.path)]
        require_free(f"--to {target}", target, read, force, form.suffix, form.contents)
        try:
            exported, problems = _write(form, file, target, requantize, registry)
        except UserError as error:
            raise error if str(error).startswith(str(source_path(file.path))) else file.error(str(error)) from None
        kinds = {HF_TYPES.get(form.kind, form.kind.upper()): len(exported.tensors if exported else file.tensors)}
        if target.suffix == ".gguf":
            with GGUFFile(target) as written:
                kinds = dict(Counter(t.type for t in written.tensors.values()))
        told = call_for_lines(form.notes, exported) if exported is not None else []
        return ExportResult(
            str(source_path(file.path)), str(target), word, file.size, total_bytes(target), kinds, problems, told
        )


def _write(
    form: Format, file: GGUFFile, target: Path, requantize: bool, registry: Registry
) -> tuple[ModelExport | None, list[str]]:
    """Write `target`; return the model, unless the file alone was enough, and what is odd about its numbers."""
    found = find_model_class(file, registry.models())
    with (
        attribute_errors(f"format.{form.name}", "while it wrote the file"),
        convert_write_errors(target),
        write_atomically(target) as place,
    ):
        try:
            form.check_model(found())  # its sizes may be what toyexp has no model for, and are left alone
            problems = form.write_again(file, place, requantize)
            if problems is not None:
                converted = source_path(file.path) != file.path and source_path(file.path).is_file()
                lacks = read_exported(file, registry.models()).unreadable if converted else ()  # a tokenizer
                return None, [*lacks, *require_written(form, place, problems)]
            exported = read_exported(file, registry.models())
            form.check_model(exported.model)
            rounded = {"float32": "F32", "f32": "F32"}.get(form.kind, form.kind)
            require_exact(file, dict.fromkeys(file.tensors, rounded), requantize)
            told = require_written(form, place, form.write(replace(exported, about=_about(file)), place))
            return exported, [*exported.unreadable, *told]
        except RunFailed as error:
            raise RunFailed(str(error).replace(str(place), str(target))) from error


def _about(file: GGUFFile) -> dict[str, Any]:
    """Return what a model card says of the run that a file comes from; nothing if the file is not beside that run's."""
    run = _path_beside(file).parent
    config, found, step = read_settings(run / "config.yaml"), read_run(run), file.metadata.get("general.step")
    if config_hash({k: v for k, v in config.items() if k != "defaults"}) != file.text("general.config_sha256"):
        return {}
    types = ", ".join(sorted({tensor.type for tensor in file.tensors.values()} - {"F32"}))
    rounded = f" before rounding to {types}" if types else ""
    scores = {f"{name}{rounded}": value for name, value in {"loss": found.loss, **found.scores}.items()}
    scores = scores if read_result(run).get("eval_step") == step else {}
    return card_facts(config, found.engine, scores)


def require_free(
    asked: str, target: Path, read: Sequence[Path], force: bool, suffix: str = ".gguf", contents: Collection[str] = ()
) -> None:
    """Raise UserError unless nothing is at `target`, or with `force` a model, neither `read` nor written by a run."""
    require_writable(asked, target)
    if not os.path.lexists(target):
        return
    if contents:
        files = {f.name: f for f in target.iterdir()} if target.is_dir() and not target.is_symlink() else {"": target}
        whole = {"config.json", "model.safetensors"} & {*contents} if files else set()  # an empty directory is free
        ours = whole <= {*files} <= {*contents} and all(_starts_like(f, f.suffix, b"") for f in files.values())
    else:
        ours = _starts_like(target, ".gguf") or (target.name.endswith(suffix) and _starts_like(target, suffix))
    if not ours:
        what = "directory that was written so" if contents else "file of a model"
        hint = "name a file in it" if target.is_dir() and not contents else "write elsewhere"
        raise UserError(f"{asked}: is already there and no {what}, which alone --force replaces; {hint}")
    if any(target.samefile(path) for path in read):
        raise UserError(f"{asked}: is what is read; write elsewhere")
    if (run := owning_run(target)) is not None:
        raise UserError(f"{asked}: belongs to the run {short_path(run)}; write elsewhere")
    if not force:
        raise UserError(f"{asked}: is already there; write elsewhere, or replace it with --force")


def _starts_like(path: Path, suffix: str, other: bytes = b".") -> bool:
    """Return whether a file begins as BEGINNINGS says for this suffix, or as `other` if BEGINNINGS lacks the suffix."""
    return re.match(BEGINNINGS.get(suffix, other), read_head(path, 9), re.DOTALL) is not None


def default_target(file: GGUFFile, ending: str) -> Path:
    """Where a file goes unless `--to` says it: beside the model, a part of whose name is left out if it is split."""
    stem = re.sub(r"-\d{5}-of-\d{5}$", "", file.path.stem) if len(file.paths) > 1 else file.path.stem
    return _path_beside(file).with_name(f"{stem}{ending}")


def _path_beside(file: GGUFFile) -> Path:
    """Return the path beside which a new file goes: of what lies in a checkpoint's directory that of its run."""
    if (made_of := source_path(file.path)) == file.path:
        return file.path
    return (made_of.parents[1] if made_of.is_dir() else made_of.parent) / file.path.name


# -- with an adapter --------------------------------------------------------------------------------------------------


TYPES = tuple(FILE_TYPES)
# Keys of the base that are not true of what it becomes a part of, by how they begin.
OF_BASE = ("split.", *(f"general.{key}" for key in ("run_id", "step", "config_sha256", "base_model.", *PARENT)))


@dataclass(frozen=True)
class MergeResult(Answer):
    """What was written."""

    base: str
    adapter: str
    path: str
    type: str  # of what the adapter changed
    changed: int  # tensors
    before: dict[str, int]  # how many of these were of which type
    bytes: int
    tensors: dict[str, int]  # how many of each type there are now
    warnings: list[str]

    def lines(self) -> list[str]:
        """What is odd about it, which types came out, and where it is."""
        types = ", ".join(f"{count} {name}" for name, count in self.tensors.items())
        told = [f"warning: {warning}" for warning in self.warnings]
        if {*self.before} != {self.type}:
            were = ", ".join(f"{count} {name}" for name, count in self.before.items())
            told.append(f"note: the {self.changed} tensors that the adapter changes are {self.type} now; were {were}")
        return [*map(escape_controls, told), f"{self.path}  {format_bytes(self.bytes)}  ({types})"]


def merge(base: Path, adapter: Path, out: Path, kind: str, force: bool, registry: Registry) -> MergeResult:
    """Writes `out`; UserError for what does not fit together, before anything is written."""
    with GGUFFile(find_model_file(base, registry=registry)) as file:
        model = load_open_model(file, registry)
        put_on = find_adapter_file(adapter, lambda: model, registry)
        pairs, adapters = read_adapter(put_on, model)
        problems = check_base(put_on, file.path)
        for tensor in pairs:
            tensor.values.check_finite()
        with GGUFFile(put_on) as there:
            require_free(f"--out {out}", out, [*file.paths, source_path(file.path), put_on, source_path(put_on)], force)
            scales = {a.target: a.scale for a in adapters if isinstance(a, LoraAdapter)}
            writer = _merge_tensors(file, there, scales, kind)
            before = dict(Counter(file.tensors[name].type for name in scales))
            problems += writer.save(out)
        told = str(source_path(file.path)), str(source_path(put_on))
    with GGUFFile(out) as written:
        types = dict(Counter(info.type for info in written.tensors.values()))
        now = Counter(written.tensors[name].type for name in scales).most_common(1)[0][0]
    return MergeResult(*told, str(out), now, len(scales), before, total_bytes(out), types, problems)


def _merge_tensors(file: GGUFFile, adapter: GGUFFile, scales: dict[str, float], kind: str) -> Writer:
    """The base's keys and tensors, each changed one in its new type; its numbers are made as they are written."""
    writer = Writer()
    template = read_chat_template(adapter)
    for key, value in file.metadata.items():
        if not key.startswith(OF_BASE):
            writer.add(key, value, file.kinds[key])
    pairs, came = {name: adapter.weights(name) for name in adapter.tensors}, dict(inherited_keys(file))
    base, place = came["base_model.0.name"], source_path(adapter.path)
    added = adapter.text("general.name") or place.name.removesuffix(".gguf")
    of_run = f" of run {run}" if (run := adapter.text("general.run_id")) else ""
    came |= {"name": f"{base} + {added}", "description": f"{base} with the LoRA adapter {added}{of_run} merged in",
             "adapter_digest": adapter_digest(pairs, came.get("adapter_digest", ""))}  # fmt: skip
    for key, value in came.items():
        writer.add(f"general.{key}", value)
    if template:
        writer.add("tokenizer.chat_template", template)
    tied = "output.weight" not in file.tensors
    for info in file.tensors.values():
        if info.name not in scales:
            writer.add_bytes(info.name, info.shape, info.type, (raw for _, raw in file.pieces(info)))
            continue
        scale, own = scales[info.name], tensor_type(info.name, info.shape, kind, tied)
        own = own if own == "F32" else fitting_type(_sum(file, adapter, info, scale), own)
        writer.add_numbers(info.name, info.shape, own, _pieces(file, adapter, info, scale))
    return writer


def _pieces(file: GGUFFile, adapter: GGUFFile, info: TensorInfo, scale: float) -> Iterator[np.ndarray]:
    yield from iter_pieces(_sum(file, adapter, info, scale))  # made when they are written, a tensor at a time


def _sum(file: GGUFFile, adapter: GGUFFile, info: TensorInfo, scale: float) -> np.ndarray:
    """W + scale B A in float64, rounded to float32."""
    a, b = (adapter.read(name).astype(np.float64) for name in lora_names(info.name))
    return (file.read(info.name) + scale * (b @ a)).astype(np.float32)
