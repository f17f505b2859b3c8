"""Load the model in a GGUF file, keep the file open, and read initial values from it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from toyexp.base.errors import UserError, printable, suggest
from toyexp.base.ownership import cached_fingerprint
from toyexp.formats.gguf.form import gguf_architecture, gguf_form, read_model
from toyexp.formats.gguf.read import GGUFFile
from toyexp.formats.gguf.tokenizer import read_tokenizer
from toyexp.interfaces.format import LazyTensors, ModelExport, ModelFile, TensorInfo
from toyexp.interfaces.kind import Kind
from toyexp.interfaces.model import Model
from toyexp.interfaces.plan import PlanTensor
from toyexp.interfaces.values import Values
from toyexp.plugins.registry import IN_A_MODULE, Registry
from toyexp.tokenizers.tokenizer import Tokenizer

# Keys `general.*` that describe the file, not the model.
FILE_KEYS = ("architecture", "type", "file_type", "quantization_version", "size_label", "alignment")
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
    """Return the position of a planned tensor in its GGUF file, or None if an engine must not memory-map the tensor.

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
    """Open a GGUF file and keep it open, so that its header is parsed once and not for each tensor."""
    try:
        status = Path(path).stat()
    except OSError:
        return _open_cached(path, ())  # reports the error
    return _open_cached(path, (status.st_ino, status.st_size, status.st_mtime_ns))


@lru_cache(maxsize=2)  # a base and an adapter
def _open_cached(path: str, version: tuple[int, ...]) -> GGUFFile:
    return GGUFFile(path)
