"""The model inside a file with the keys of a GGUF."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from toyexp.base.errors import UserError, choose, printable
from toyexp.contract.format import Exported, ModelFile
from toyexp.contract.kind import Kind
from toyexp.contract.model import Model
from toyexp.contract.registry import IN_A_MODULE, Registry
from toyexp.formats.gguf.form import architecture_of, gguf_form, read_model
from toyexp.formats.gguf.read import GGUFFile
from toyexp.formats.gguf.source import opened
from toyexp.formats.gguf.tokenizer import read_tokenizer
from toyexp.text.tokenizer import Tokenizer

# Keys of `general` that are about the file and not about the model.
OF_THE_FILE = ("architecture", "type", "file_type", "quantization_version", "size_label", "alignment")


def model_of(path: Path, registry: Registry, reads: Sequence[Kind] | None = None) -> Model:
    """The model that a GGUF file holds; UserError when none of those that read `reads` (any) has its architecture."""
    return model_in(opened(str(path)), registry, reads)


def require_model(file: ModelFile) -> None:
    """Raises UserError for an open file that holds something else than a model, such as a LoRA adapter."""
    kind = file.metadata.get("general.type", "model")
    if kind != "model":
        raise file.error(f"holds no model (general.type is {printable(str(kind))})")


def class_in(file: ModelFile, models: Iterable[type[Model]]) -> type[Model]:
    """Who of `models` has the architecture of an open file's; UserError when none of them has."""
    require_model(file)
    known = by_architecture(models)
    if file.architecture not in known:
        raise file.error(f"its architecture is {printable(file.architecture)}; {choose('', known)}; {IN_A_MODULE}")
    return known[file.architecture]


def by_architecture(models: Iterable[type[Model]]) -> dict[str, type[Model]]:
    """Those that stand in GGUF files, by the architecture that these name."""
    return {architecture_of(cls): cls for cls in models if "gguf" in cls.forms}


def model_in(file: ModelFile, registry: Registry, reads: Sequence[Kind] | None = None) -> Model:
    """The same as `model_of`, of a file that is open."""
    return _model_in(file, [cls for cls in registry.models() if reads is None or cls.reads in reads])


def exported_of(file: ModelFile, models: Iterable[type[Model]]) -> Exported:
    """All that an open file says of its model, one of `models`; its tensors are read when they are asked for."""
    model = _model_in(file, models)
    prefix, own = f"{file.architecture}.", gguf_form(model).metadata(model)
    data = {k.removeprefix(prefix): v for k, v in file.metadata.items() if k.startswith(prefix)}
    general = {k.removeprefix("general."): v for k, v in file.metadata.items() if k.startswith("general.")}
    tokenizer, lacks = _tokenizer(file) if model.reads.text else (None, [])
    return Exported(
        model,
        _Tensors(file, [spec.name for spec in model.tensors()]),
        tokenizer,
        {key: value for key, value in general.items() if key not in OF_THE_FILE},
        {key: value for key, value in data.items() if key not in own},
        lacks=lacks,
    )


class _Tensors(Mapping[str, np.ndarray]):
    """Those of a file that the model has."""

    def __init__(self, file: ModelFile, names: Sequence[str]):
        self._file, self._names = file, names

    def __getitem__(self, name: str) -> np.ndarray:
        return self._file.read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _tokenizer(file: ModelFile) -> tuple[Tokenizer | None, list[str]]:
    """The file's tokenizer, or a sentence that says why there is none: the model is of use without one too."""
    try:
        if isinstance(file, GGUFFile):
            return read_tokenizer(file), []
        raise file.error("has no tokenizer")
    except UserError as error:
        return None, [f"written without a tokenizer: {error}"]


def _model_in(file: ModelFile, models: Iterable[type[Model]]) -> Model:
    found = class_in(file, models)
    _check_tokens(file)
    model = read_model(found, file)
    try:
        model.check()
    except UserError as error:
        raise file.error(str(error)) from None
    return model


def _check_tokens(file: ModelFile) -> None:
    """Raises UserError for other tokens than the embedding has rows."""
    tokens, embedding = file.metadata.get("tokenizer.ggml.tokens"), file.tensors.get("token_embd.weight")
    if embedding is not None and isinstance(tokens, list) and len(tokens) != embedding.shape[0]:
        raise file.error(f"its tokenizer has {len(tokens)} tokens, its embedding {embedding.shape[0]} rows")
