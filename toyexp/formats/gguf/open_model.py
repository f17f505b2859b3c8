"""Load the model in a file of any format as that in a GGUF file, keep it open, and read initial values from it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from toyexp.base.attribution import attribute_errors, call_checked
from toyexp.base.errors import UserError, printable, suggest
from toyexp.base.ownership import cached_fingerprint
from toyexp.base.terminal import print_note
from toyexp.base.writing import total_bytes
from toyexp.formats.gguf.form import gguf_architecture, gguf_form, read_model
from toyexp.formats.gguf.ggml_types import GGUF_TYPES, IDS, NUMBERS, encode, iter_pieces
from toyexp.formats.gguf.quantise import tensor_type
from toyexp.formats.gguf.read import GGUFFile
from toyexp.formats.gguf.tokenizer import read_tokenizer
from toyexp.formats.gguf.write import model_keys, stored_value, value_type
from toyexp.interfaces.format import Format, LazyTensors, ModelExport, ModelFile, TensorInfo
from toyexp.interfaces.kind import Kind
from toyexp.interfaces.model import Model
from toyexp.interfaces.plan import PlanTensor
from toyexp.interfaces.values import Values
from toyexp.plugins.discovery import current_registry
from toyexp.plugins.registry import IN_A_MODULE, Registry
from toyexp.tokenizers.tokenizer import Tokenizer

# Keys `general.*` that describe the file, not the model.
FILE_KEYS = ("architecture", "type", "file_type", "quantization_version", "size_label", "alignment")
note_once = cache(print_note)
PARENT = ("name", "author", "organization", "version", "url", "repo_url")  # keys that identify a base


def load_model(path: Path, registry: Registry, reads: Sequence[Kind] | None = None) -> Model:
    """Return the model in a GGUF file; raise UserError if no registered model class has the file's architecture.

    With `reads`, search only the classes that read one of these kinds of data.
    """
    return load_open_model(open_gguf(str(path)), registry, reads)


def require_model(file: ModelFile) -> None:
    """Raise UserError if an open file holds no model, for example because it holds a LoRA adapter."""
    kind = file.metadata.get("general.type", "model")
    if kind != "model":
        raise file.error(f"holds no model (general.type is {printable(str(kind))})")


def find_model_class(file: ModelFile, models: Iterable[type[Model]]) -> type[Model]:
    """Return the class in `models` with the file's architecture; raise UserError if there is none."""
    require_model(file)
    classes = models_by_architecture(models)
    if file.architecture not in classes:
        nearest = nearest_architecture(file, classes)
        hint = f"its tensors are most like those of {nearest}; " if nearest else ""
        problem = f"its architecture is {printable(file.architecture)}; {hint}{suggest('', classes)}"
        raise file.error(f"{problem}; {IN_A_MODULE}")
    return classes[file.architecture]


def nearest_architecture(file: ModelFile, classes: Mapping[str, type[Model]]) -> str | None:
    """Return the architecture whose first block has the most tensor names in common with the file's.

    Return None if fewer than half of all names are common.
    """
    names = {name for name in file.tensors if name.startswith("blk.0.")}
    likeness = dict[str, float]()
    for architecture, cls in classes.items():
        try:
            own = {t.name for t in cls().tensors() if t.name.startswith("blk.0.")}
        except Exception:  # a plugin may raise anything for its default sizes
            continue
        likeness[architecture] = len(names & own) / max(len(names | own), 1)
    nearest = max(likeness, key=lambda name: likeness[name], default=None)
    return nearest if nearest and likeness[nearest] >= 0.5 else None


def models_by_architecture(models: Iterable[type[Model]]) -> dict[str, type[Model]]:
    """Return {GGUF architecture: class}.

    If several classes have the same architecture, a class that declares its own GGUF form takes precedence.
    """
    return {gguf_architecture(cls): cls for cls in sorted(models, key=lambda cls: "gguf" in cls.forms)}


def load_open_model(file: ModelFile, registry: Registry, reads: Sequence[Kind] | None = None) -> Model:
    """Return the model in an open file; raise UserError as `load_model` does."""
    return _load_as(file, [cls for cls in registry.models() if reads is None or cls.reads in reads])


def read_exported(file: ModelFile, models: Iterable[type[Model]]) -> ModelExport:
    """Return the model, tokenizer and metadata of an open file; tensors are read on access.

    Raise UserError if none of the classes `models` has the file's architecture.
    """
    model = _load_as(file, models)
    prefix, model_keys = f"{file.architecture}.", gguf_form(model).metadata(model)
    data = {k.removeprefix(prefix): v for k, v in file.metadata.items() if k.startswith(prefix)}
    general = {k.removeprefix("general."): v for k, v in file.metadata.items() if k.startswith("general.")}
    tokenizer, problems = _tokenizer(file) if model.reads.text else (None, [])
    return ModelExport(
        model,
        LazyTensors({spec.name: spec.shape for spec in model.tensors()}, file.read),
        tokenizer,
        {key: value for key, value in general.items() if key not in FILE_KEYS},
        {key: value for key, value in data.items() if key not in model_keys},
        unreadable=problems,
        file=file,
    )


def _tokenizer(file: ModelFile) -> tuple[Tokenizer | None, list[str]]:
    """Return (tokenizer, []) for a file, or (None, [reason]) if its tokenizer cannot be read."""
    try:
        if isinstance(file, GGUFFile):
            return read_tokenizer(file), []
        raise file.error("has no tokenizer")
    except UserError as error:
        return None, [f"written without a tokenizer: {error}"]


def _load_as(file: ModelFile, models: Iterable[type[Model]]) -> Model:
    model_class = find_model_class(file, models)
    _check_tokens(file)
    return read_model(model_class, file)


def _check_tokens(file: ModelFile) -> None:
    """Raise UserError if the number of tokens in the tokenizer differs from the number of rows of the embedding."""
    tokens, embedding = file.metadata.get("tokenizer.ggml.tokens"), file.tensors.get("token_embd.weight")
    if embedding is not None and isinstance(tokens, list) and len(tokens) != embedding.shape[0]:
        raise file.error(f"its tokenizer has {len(tokens)} tokens, its embedding {embedding.shape[0]} rows")


@dataclass(frozen=True)
class FromGGUF(Values):
    """Initial values from a tensor of a GGUF file. An engine may memory-map the tensor instead of copying it."""

    path: str
    tensor: str
    rows: int | None = None  # take only the first rows; None: all

    def draw(self, shape: tuple[int, ...], seed: int, name: str) -> np.ndarray:
        """Return the tensor in float32, dequantised if needed."""
        return open_gguf(self.path).weights(self.tensor, rows=self.rows)

    def raw(self) -> np.ndarray:
        """Return the tensor's bytes in its type in the file, uint8 [.., bytes per row]."""
        return open_gguf(self.path).read_raw(self.tensor, self.rows)

    def check_finite(self) -> None:
        """Raise UserError if the tensor holds a NaN or an infinity."""
        open_gguf(self.path).check_finite(self.tensor, self.rows)

    def export_metadata(self) -> Mapping[str, Any]:
        """Return licence and origin of the model in the file (see `inherited_keys`); {} if the file is an adapter."""
        file = open_gguf(self.path)
        return {} if file.metadata.get("general.type") == "adapter" else inherited_keys(file)


def inherited_keys(base: GGUFFile) -> Mapping[str, Any]:
    """Return the `general.*` keys, without this prefix, that a model copies from its base.

    They give the licence and the origin of the base.
    """
    copied = ("license", "license.name", "license.link", "adapter_digest")
    keys = {key: base.text(f"general.{key}") for key in copied}
    parent = {key: base.text(f"general.{key}") for key in PARENT} | {"digest": cached_fingerprint(base.path)}
    parent["name"] = parent["name"] or base.path.stem
    keys |= {f"base_model.0.{key}": value for key, value in parent.items()}
    return {"base_model.count": 1, **{key: value for key, value in keys.items() if value}}


def mappable_tensor(tensor: PlanTensor) -> TensorInfo | None:
    """Return the position of a planned tensor in its file, or None if an engine must not use it in its stored type.

    The offset is -1 if the file stores the tensor in another form: an engine then copies what `FromGGUF.raw` returns.

    Engines may memory-map frozen matrices of any type, and frozen float32 tensors of any shape. The result is also None
    if the tensor's shape in the file differs from the planned one: reading the tensor later raises an error. Raise
    GGUFError if the tensor is missing or not finite.
    """
    values = tensor.values
    if tensor.trainable or not isinstance(values, FromGGUF):
        return None
    file = open_gguf(values.path)
    info = file.tensors.get(values.tensor)
    if info is None:
        raise file.error(f"has no tensor {values.tensor}")
    rows = info.shape[0] if values.rows is None else values.rows
    if tensor.shape != (rows, *info.shape[1:]) or (len(info.shape) != 2 and info.type != "F32"):
        return None
    file.check_finite(values.tensor, values.rows)
    return info


def open_gguf(path: str) -> GGUFFile:
    """Open a model file of any format as a GGUF file, and keep it open, so that its header is parsed only once."""
    try:
        files = [Path(path), *(Path(path).iterdir() if Path(path).is_dir() else ())]
        versions = [(s.st_ino, s.st_size, s.st_mtime_ns) for s in (file.stat() for file in files)]
    except OSError:
        versions = []  # opening the file reports the error
    return _open_cached(path, tuple(versions))


@lru_cache(maxsize=3)  # a base, an adapter and a teacher
def _open_cached(path: str, version: tuple[tuple[int, ...], ...]) -> GGUFFile:
    return open_model_file(Path(path))


# -- files of other formats -------------------------------------------------------------------------------------------


def find_reader(path: Path, registry: Registry) -> Format | None:
    """Return the format, other than GGUF, that reads the file or directory `path`; None if there is none."""
    forms = (form() for form in registry.classes("format").values() if form.suffix != ".gguf")
    return next((form for form in forms if type(form).read is not Format.read and form.recognises(path)), None)


def open_model_file(path: Path) -> GGUFFile:
    """Open a GGUF file, or a model file or directory of another format that a plugin can read."""
    form = find_reader(path, registry := current_registry())
    if form is None:
        return GGUFFile(path)
    who = f"format.{form.name}"
    with attribute_errors(who, f"while it read {path}"):
        export = call_checked(ModelExport, form.read, path, registry.models(), who=who)
        file = ConvertedFile(path, path.name.removesuffix(form.suffix), export, f"{path}: {who} read")
    for problem in export.unreadable:
        note_once(f"note: {problem}")
    return file


class ConvertedFile(GGUFFile):
    """Model file of another format with the keys and tensors that its GGUF file would have.

    The TensorInfo of a tensor that the model's files store in the same bytes gives the file and the offset. Any other
    tensor is converted whenever it is read; its TensorInfo has the path of this object and the offset -1.
    """

    is_converted = True

    def __init__(self, path: Path, stem: str, export: ModelExport, subject: str):
        """Check the names of the tensors in `export`; `subject` begins error messages about it."""
        model, file, self._export, self._subject = export.model, export.file, export, subject
        if not isinstance(model, Model):
            raise UserError(f"{subject} {printable(repr(model))}, expected a model")
        shapes = {t.name: t.shape for t in model.tensors()}
        for name in sorted(shapes.keys() ^ export.tensors.keys()):
            number, verb = ("no tensor", "has") if name in shapes else ("a tensor", "does not have")
            raise UserError(f"{subject} {number} {printable(name)}, which model.{model.name} {verb}")
        self._constants = gguf_form(model).constants(model)
        shapes |= {name: array.shape for name, array in self._constants.items()}
        self.path, self.stem, self.version, self._finite = path, stem, 3, set()
        self.parts, stored = ({**file.parts}, file.tensors) if file else ({}, {})
        self.tensors = {name: self._info(name, shape, stored.get(name)) for name, shape in shapes.items()}
        types = {t.type.lower() for t in self.tensors.values()} - {"f32"}
        kind = types.pop() if len(types) == 1 else "f32"
        keys = model_keys(model, export.tokenizer, kind, export.general, export.data)
        self.kinds = {key: value_type(value) for key, value in keys.items()}
        self.metadata = {key: stored_value(value) for key, value in keys.items()}

    @property
    def size(self) -> int:
        """Size of the file in bytes, or total size of the files in the directory."""
        return total_bytes(self.path)

    def pieces(self, info: TensorInfo, count: int | None = None) -> Iterator[tuple[int, np.ndarray]]:
        """Yield a tensor's bytes in pieces, as GGUFFile does; a tensor that must be converted is read as a whole."""
        if info.offset >= 0:
            yield from super().pieces(info, count)
            return
        name, shape = info.name, list(info.shape)
        array = self._constants[name] if name in self._constants else self._export.tensors[name]
        if not isinstance(array, np.ndarray):
            raise UserError(f"{self._subject} {printable(repr(array))} for {name}, expected an array {shape}")
        if list(array.shape) != shape:
            raise UserError(f"{self._subject} shape {list(array.shape)} for {name}, expected {shape}")
        for i, numbers in enumerate(iter_pieces(array.reshape(-1)[:count])):
            yield i * NUMBERS, encode(numbers, info.type)

    def _info(self, name: str, shape: tuple[int, ...], stored: TensorInfo | None) -> TensorInfo:
        """Return the position of a tensor; `stored` is its position in the model's files if it has one."""
        kind = tensor_type(name, shape, stored.type.lower(), tied=False) if stored else "F32"
        if stored and stored.offset >= 0 and (stored.shape, stored.type) == (shape, kind):
            return replace(stored, name=name)
        return TensorInfo(name, shape, kind, IDS[kind], self.path, -1, math.prod(shape) * GGUF_TYPES[IDS[kind]][2])
