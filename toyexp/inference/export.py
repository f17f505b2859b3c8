"""Convert a model file to another type or format, or merge a LoRA adapter into it."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from toyexp.base.attribution import attribute_errors, call_for_lines
from toyexp.base.errors import RunFailed, UserError, escape_controls, printable, suggest
from toyexp.base.files import read_head
from toyexp.base.formatting import format_bytes, short_path
from toyexp.base.ownership import owning_run
from toyexp.base.writing import convert_write_errors, require_writable, total_bytes, write_atomically
from toyexp.formats.file_plan import read_adapter
from toyexp.formats.gguf.ggml_types import fitting_type, iter_pieces
from toyexp.formats.gguf.header import source_path
from toyexp.formats.gguf.open_model import (
    PARENT,
    find_model_class,
    inherited_keys,
    load_open_model,
    open_model_file,
    read_exported,
)
from toyexp.formats.gguf.quantise import FILE_TYPES, tensor_type
from toyexp.formats.gguf.read import GGUFFile
from toyexp.formats.gguf.tokenizer import read_chat_template
from toyexp.formats.gguf.write import Writer, require_exact
from toyexp.formats.layout import HF_TYPES
from toyexp.inference.model_files import check_base, find_adapter_file, find_model_file, is_checkpoint
from toyexp.interfaces.command import Answer
from toyexp.interfaces.format import Format, LazyTensors, ModelExport, require_written
from toyexp.interfaces.plan import LoraAdapter, adapter_digest
from toyexp.plugins.exporter import card_facts
from toyexp.plugins.registry import Registry
from toyexp.results.events import read_run_facts
from toyexp.results.run_dirs import read_run
from toyexp.tokenizers.tokenizer import NORMAL, USER_DEFINED
from toyexp.training.checkpoint import read_result
from toyexp.training.run_config import config_hash
from toyexp.training.rundir import read_settings

EXPORT_ADAPTER = "export its run; for PEFT, train again with 'callbacks=[default,hf_export]', which writes adapter-hf"
# Patterns of the first bytes of a file, by the end of its name.
BEGINNINGS = {".gguf": b"GGUF", ".safetensors": rb".{4}\0{4}\{", ".npz": b"PK", "Modelfile": b"# Written"}


@dataclass(frozen=True)
class ExportResult(Answer):
    """Result of an export."""

    source: str
    path: str
    type: str
    source_bytes: int
    bytes: int
    tensors: dict[str, int]  # number of tensors per type
    warnings: list[str]
    notes: list[str]  # sentences about how other programs treat the file differently

    def lines(self) -> list[str]:
        """Return the lines to print for the user: warnings, notes, and the path and size of the written file."""
        types = ", ".join(f"{count} {name}" for name, count in self.tensors.items())
        sizes = f"{format_bytes(self.source_bytes)} -> {format_bytes(self.bytes)}"
        lines = [*(f"warning: {w}" for w in self.warnings), *(f"note: {n}" for n in self.notes)]
        return [*map(escape_controls, lines), f"{self.path}  {sizes}  ({types})"]


def build_format(word: str, settings: Sequence[str], registry: Registry) -> Format:
    """Return the file format that `word`, the value of --type, names. Apply the `settings`, each given as key=value.

    Raise UserError for an unknown type or setting.
    """
    types = registry.types()
    if word not in types:
        raise UserError(f"--type={word}: {suggest(word, types)}")
    cls, values = types[word]
    form = _build_with_settings(cls, values, settings, word) if settings else cls(**values)
    try:
        form.check()
    except UserError as error:  # if no setting was typed, the error is about the value of --type
        is_about_type = not settings and not re.match(r"\w+=", str(error))  # such as a missing package
        raise type(error)(f"{f'--type={word}: ' if is_about_type else '' if settings else '--'}{error}") from None
    return form


def _build_with_settings(cls: type[Format], values: Mapping[str, Any], settings: Sequence[str], word: str) -> Format:
    from toyexp.config.build import apply_types, create_part  # deferred: imports Hydra, which few exports need
    from toyexp.config.words import parse

    names, chosen = [f.name for f in fields(cls)], {"name": cls.name, **values}
    for override in parse(settings):
        key = override.key_or_group
        if key not in names:
            hint = suggest(key, names) if names else "it has no settings"
            raise UserError(f"export {override.input_line}: unknown setting of --type {word}; {hint}")
        if key in values:
            raise UserError(f"export {override.input_line}: --type {word} means {key}={values[key]}; leave one out")
        chosen[key] = override.value()
    try:
        form: Format = create_part(cls, apply_types(cls, chosen, cls.name))
    except UserError as error:
        raise UserError(str(error).removeprefix(f"{cls.name}.")) from None
    return form


def export(
    model: Path, word: str, to: str | None, settings: Sequence[str], registry: Registry, force: bool, requantize: bool,
    new_tokens: Sequence[str] = (),
) -> ExportResult:  # fmt: skip
    """Convert a model to the type `word` (a value of `--type`) and write it to the path `to`.

    The vocabulary gets the `new_tokens`, as `add_tokens` says; only a GGUF file can hold them. If `to` is None, write
    the file beside the model. If `force` is True, replace an existing file. If `requantize` is True, numbers that are
    already quantised may be quantised again. Raise UserError, before anything is written, if the model cannot be
    converted.
    """
    form = build_format(word, settings, registry)
    # Appended to the stem of the file name: -q8_0.gguf, .onnx, -hf, -hf-f16.
    ending = form.suffix if word == form.name else f"-{word}" if form.contents else f"-{word}{form.suffix}"
    with open_model_file(find_model_file(model, registry=registry)) as file:
        if file.metadata.get("general.type") == "adapter":
            raise file.error(f"holds no model (general.type is adapter); {EXPORT_ADAPTER}")
        beside = default_target(file, ending) if os.path.lexists(model) else f"{model.name}{ending}"  # of a hub's id
        target = Path(to or beside)
        read = [*file.paths, source_path(file.path)]
        require_free(f"--to {target}", target, read, force, form.suffix, form.contents)
        others = tuple({*registry.suffixes()} - {form.suffix})
        if target.name.endswith(others) if form.contents else not target.name.endswith(form.suffix):
            raise UserError(f"--to {target}: the name must end in {form.suffix} with --type {word}")
        if new_tokens and form.suffix != ".gguf":
            raise UserError(f"--new-tokens: cannot be combined with --type {word}; write a GGUF first: --type f16")
        try:
            exported, problems = _write(form, file, target, requantize, registry, new_tokens)
        except UserError as error:
            raise error if str(error).startswith(str(source_path(file.path))) else file.error(str(error)) from None
        kinds = {HF_TYPES.get(form.kind, form.kind.upper()): len(exported.tensors if exported else file.tensors)}
        if target.suffix == ".gguf":
            with GGUFFile(target) as written:
                kinds = dict(Counter(t.type for t in written.tensors.values()))
        source, size = str(source_path(file.path)), total_bytes(target)
        notes = call_for_lines(form.notes, exported) if exported is not None else []
        return ExportResult(source, str(target), word, file.size, size, kinds, problems, notes)


def _write(
    form: Format, file: GGUFFile, target: Path, requantize: bool, registry: Registry, new_tokens: Sequence[str]
) -> tuple[ModelExport | None, list[str]]:
    """Write the model in `file` to `target` in the format `form`.

    Return two values: the exported model, or None if the format copied the tensors without reading the model; and
    warnings.
    """
    model_class = find_model_class(file, registry.models())
    with (
        attribute_errors(f"format.{form.name}", "while it wrote the file"),
        convert_write_errors(target),
        write_atomically(target) as path,
    ):
        try:
            form.check_model(model_class())  # at default sizes, because the file may have sizes that toyexp rejects
            problems = None if new_tokens else form.write_again(file, path, requantize)
            if problems is not None:
                is_other = file.is_converted and file.path.is_file()
                lacks = read_exported(file, registry.models()).unreadable if is_other else ()
                return None, [*lacks, *require_written(form, path, problems)]
            exported = read_exported(file, registry.models())
            exported = add_tokens(exported, new_tokens) if new_tokens else exported
            form.check_model(exported.model)
            rounded = {"float32": "F32", "f32": "F32"}.get(form.kind, form.kind)
            require_exact(file, dict.fromkeys(file.tensors, rounded), requantize)
            problems_written = require_written(form, path, form.write(replace(exported, about=_about(file)), path))
            return exported, [*exported.unreadable, *problems_written]
        except RunFailed as error:
            raise RunFailed(str(error).replace(str(path), str(target))) from error


def add_tokens(exported: ModelExport, texts: Sequence[str]) -> ModelExport:
    """Return the model with the tokens `texts` added, which are found wherever their texts occur.

    Each new row of the embedding and of the output layer is the mean of the old rows. Raise UserError for a model
    without a tokenizer, and for a text that is empty, repeated or a token already.
    """
    if exported.tokenizer is None:
        raise UserError("--new-tokens: the model has no tokenizer")
    tokenizer, keys = copy(exported.tokenizer), {**exported.tokenizer.gguf_metadata()}
    for text in texts:
        if not text or text in keys["ggml.tokens"] or texts.count(text) > 1:
            problem = "empty" if not text else "repeated" if texts.count(text) > 1 else "a token already"
            raise UserError(f"--new-tokens: {printable(repr(text))} is {problem}")
    added: dict[str, Any] = {"ggml.tokens": [*keys["ggml.tokens"], *texts]}
    types = keys.get("ggml.token_type", np.full(tokenizer.vocab, NORMAL, np.int32))
    for key, values, filler in (("token_type", types, USER_DEFINED), ("scores", keys.get("ggml.scores"), 0)):
        if values is not None:
            added[f"ggml.{key}"] = np.append(values, np.full(len(texts), filler, values.dtype))
    tokenizer.source, tokenizer.pieces = keys | added, [*tokenizer.pieces, *texts]
    model: Any = replace(exported.model, vocab=exported.tokenizer.vocab + len(texts))  # type: ignore[call-arg]
    shapes = {spec.name: spec.shape for spec in model.tensors()}

    def read(name: str) -> np.ndarray:
        array = exported.tensors[name]
        mean = array.mean(0, np.float64, keepdims=True).astype(np.float32)
        return np.concatenate([array, *[mean] * (shapes[name][0] - len(array))]) if array.ndim > 1 else array

    return replace(exported, model=model, tensors=LazyTensors(shapes, read), tokenizer=tokenizer)


def _about(file: GGUFFile) -> dict[str, Any]:
    """Return model card entries about the run that wrote `file`; empty if `file` is not in that run's directory."""
    if not (config := training_settings(file)):
        return {}
    run = _sibling_path(file).parent
    result, step = read_run(run), file.metadata.get("general.step")
    types = ", ".join(sorted({tensor.type for tensor in file.tensors.values()} - {"F32"}))
    rounded = f" before rounding to {types}" if types else ""
    scores = {f"{name}{rounded}": value for name, value in {"loss": result.loss, **result.scores}.items()}
    is_evaluated = read_result(run).get("eval_step") == step
    scores, seconds = (scores, result.seconds) if is_evaluated else ({}, None)
    return card_facts(config, result.engine, scores, read_run_facts(run), seconds)


def training_settings(file: GGUFFile) -> dict[str, Any]:
    """Return the settings of the run that wrote `file`; empty if `file` is not in that run's directory."""
    config = read_settings(_sibling_path(file).parent / "config.yaml")
    digest = config_hash({key: value for key, value in config.items() if key != "defaults"})
    return config if digest == file.text("general.config_sha256") else {}


def require_free(
    option: str, target: Path, read: Sequence[Path], force: bool, suffix: str = ".gguf", contents: Collection[str] = ()
) -> None:
    """Raise UserError if `target` must not be written; `option` begins the message.

    If `force` is False, `target` must not exist. If `force` is True, an existing target must look like a file with this
    suffix, or like a directory with these `contents`. The target must not be one of the files in `read`, and must not
    belong to a run.
    """
    require_writable(option, target)
    if not os.path.lexists(target):
        return
    if contents:
        files = {f.name: f for f in target.iterdir()} if target.is_dir() and not target.is_symlink() else {"": target}
        # An empty directory may be used.
        main_files = {"config.json", "model.safetensors"} & {*contents} if files else set()
        is_valid = all(_starts_like(f, f.suffix, b"") for f in files.values())
        is_replaceable = is_valid and main_files <= {*files} <= {*contents}
    else:
        has_suffix = target.name.endswith(suffix)
        is_replaceable = _starts_like(target, ".gguf") or (has_suffix and _starts_like(target, suffix))
    if not is_replaceable:
        kind = "directory written by this format" if contents else "model file"
        kind = "Modelfile of toyexp" if suffix == "Modelfile" else kind
        hint = "name a file in it" if target.is_dir() and not contents else "rename it, or choose another path"
        raise UserError(f"{option}: already exists and is not a {kind}, so --force does not replace it; {hint}")
    if any(target.samefile(path) for path in read):
        raise UserError(f"{option}: is the file to be read; choose another path")
    if (run := owning_run(target)) is not None:
        raise UserError(f"{option}: belongs to the run {short_path(run)}; choose another path")
    if not force:
        raise UserError(f"{option}: already exists; choose another path, or replace it with --force")


def _starts_like(path: Path, suffix: str, other: bytes = b".") -> bool:
    """Return True if the first bytes of the file at `path` match the pattern of `suffix` in BEGINNINGS.

    If BEGINNINGS has no pattern for this suffix, `other` is the pattern.
    """
    return re.match(BEGINNINGS.get(suffix, other), read_head(path, 9), re.DOTALL) is not None


def default_target(file: GGUFFile, ending: str) -> Path:
    """Return the path of the exported file if `--to` is not given.

    The file lies beside the model file and has its name, with `ending` in place of the suffix. The part number of a
    split file is left out. For a checkpoint, the path is in the run's directory.
    """
    stem = re.sub(r"-\d{5}-of-\d{5}$", "", file.stem) if len(file.paths) > 1 else file.stem
    return _sibling_path(file).with_name(f"{stem}{ending}")


def _sibling_path(file: GGUFFile) -> Path:
    """Return a path with the name of `file`, in the directory in which new files are written.

    New files are written into the directory of the model file, or for a checkpoint into the directory of its run.
    """
    if (source := source_path(file.path)) == file.path:
        return file.path
    return (source.parents[1] if is_checkpoint(source) else source.parent) / file.path.name


# -- merging an adapter -----------------------------------------------------------------------------------------------


TYPES = tuple(FILE_TYPES)
# Prefixes of metadata keys of the base that do not apply to the merged model.
BASE_ONLY = ("split.", *(f"general.{key}" for key in ("run_id", "step", "config_sha256", "base_model.", *PARENT)))


@dataclass(frozen=True)
class MergeResult(Answer):
    """Result of a merge."""

    base: str
    adapter: str
    path: str
    type: str  # type of the changed tensors in the merged file
    changed: int  # number of tensors that the adapter changed
    before: dict[str, int]  # number of changed tensors per type in the base
    bytes: int
    tensors: dict[str, int]  # number of all tensors per type
    warnings: list[str]

    def lines(self) -> list[str]:
        """Return the lines to print for the user.

        They are warnings, a note if tensors changed their type, and a line with the path and size of the written file.
        """
        types = ", ".join(f"{count} {name}" for name, count in self.tensors.items())
        lines = [f"warning: {warning}" for warning in self.warnings]
        if {*self.before} != {self.type}:
            types_before = ", ".join(f"{count} {name}" for name, count in self.before.items())
            lines.append(f"note: the {self.changed} changed tensors are now {self.type}, before: {types_before}")
        return [*map(escape_controls, lines), f"{self.path}  {format_bytes(self.bytes)}  ({types})"]


def merge(base: Path, adapter: Path, out: Path, kind: str, force: bool, registry: Registry) -> MergeResult:
    """Merge a LoRA adapter into its base model and write the merged model to `out`.

    Tensors that the adapter changes are stored as type `kind`; the others are copied. Raise UserError, before anything
    is written, if the adapter does not fit the base or `out` must not be replaced.
    """
    with open_model_file(find_model_file(base, registry=registry)) as file:
        model = load_open_model(file, registry)
        adapter_file = find_adapter_file(adapter, lambda: model, registry)
        pairs, adapters = read_adapter(adapter_file, model)
        problems = check_base(adapter_file, file.path)
        for tensor in pairs:
            tensor.values.check_finite()
        with GGUFFile(adapter_file) as adapter_gguf:
            read = [*file.paths, source_path(file.path), adapter_file, source_path(adapter_file)]
            require_free(f"--out {out}", out, read, force)
            by_target = {a.target: a for a in adapters}
            writer = _merge_tensors(file, adapter_gguf, by_target, kind)
            before = dict(Counter(file.tensors[name].type for name in by_target))
            problems += writer.save(out)
        sources = str(source_path(file.path)), str(source_path(adapter_file))
    with GGUFFile(out) as written:
        types = dict(Counter(info.type for info in written.tensors.values()))
        main_type = Counter(written.tensors[name].type for name in by_target).most_common(1)[0][0]
    return MergeResult(*sources, str(out), main_type, len(by_target), before, total_bytes(out), types, problems)


def _merge_tensors(file: GGUFFile, adapter: GGUFFile, adapters: dict[str, LoraAdapter], kind: str) -> Writer:
    """Return a writer of the merged model. The writer computes the merged tensors when it writes them.

    `adapters` maps the name of each tensor that the file `adapter` changes to its LoRA adapter.
    """
    writer = Writer()
    template = read_chat_template(adapter)
    for key, value in file.metadata.items():
        if not key.startswith(BASE_ONLY):
            writer.add(key, value, file.kinds[key])
    pairs, general = {name: adapter.weights(name) for name in adapter.tensors}, dict(inherited_keys(file))
    base, adapter_path = general["base_model.0.name"], source_path(adapter.path)
    adapter_name = adapter.text("general.name") or adapter_path.name.removesuffix(".gguf")
    run_note = f" of run {run}" if (run := adapter.text("general.run_id")) else ""
    general |= {"name": f"{base} + {adapter_name}",
                "description": f"{base} with the LoRA adapter {adapter_name}{run_note} merged in",
                "adapter_digest": adapter_digest(pairs, general.get("adapter_digest", ""))}  # fmt: skip
    for key, value in general.items():
        writer.add(f"general.{key}", value)
    if template:
        writer.add("tokenizer.chat_template", template)
    tied = "output.weight" not in file.tensors
    for info in file.tensors.values():
        if info.name not in adapters:
            writer.add_bytes(info.name, info.shape, info.type, (raw for _, raw in file.pieces(info)))
            continue
        new_type = tensor_type(info.name, info.shape, kind, tied)
        if new_type != "F32":
            new_type = fitting_type(_sum(file, adapter, adapters[info.name]), new_type)
        writer.add_numbers(info.name, info.shape, new_type, _pieces(file, adapter, adapters[info.name]))
    return writer


def _pieces(file: GGUFFile, pairs: GGUFFile, adapter: LoraAdapter) -> Iterator[np.ndarray]:
    yield from iter_pieces(_sum(file, pairs, adapter))  # a generator: computed while writing


def _sum(file: GGUFFile, pairs: GGUFFile, adapter: LoraAdapter) -> np.ndarray:
    """Return the merged weights, computed in float64 and rounded to float32."""
    return adapter.merge(file.read(adapter.target), {name: pairs.read(name) for name in adapter.tensors})
