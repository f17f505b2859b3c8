"""The model inside a GGUF file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

from toyexp.base.errors import UserError, choose, printable
from toyexp.contract.kind import Kind
from toyexp.contract.model import Model
from toyexp.contract.registry import Registry
from toyexp.formats.gguf.form import architecture_of, read_model
from toyexp.formats.gguf.read import GGUFFile


def model_of(path: Path, registry: Registry, reads: Sequence[Kind] | None = None) -> Model:
    """The model that a GGUF file holds; UserError when none of those that read `reads` (any) has its architecture."""
    with GGUFFile(path) as file:
        return model_in(file, registry, reads)


def require_model(file: GGUFFile) -> None:
    """Raises GGUFError for an open file that holds something else than a model, such as a LoRA adapter."""
    kind = file.metadata.get("general.type", "model")
    if kind != "model":
        raise file.error(f"holds no model (general.type is {printable(str(kind))})")


def class_in(file: GGUFFile, registry: Registry, reads: Sequence[Kind] | None = None) -> type[Model]:
    """Who has the architecture of an open file's model; see `model_of`."""
    require_model(file)
    known = by_architecture(registry, reads)
    if file.architecture not in known:
        raise file.error(f"its architecture is {printable(file.architecture)}; {choose('', known)}")
    return known[file.architecture]


def by_architecture(registry: Registry, reads: Sequence[Kind] | None = None) -> dict[str, type[Model]]:
    """Those models that read `reads` (any) and stand in GGUF files, by the architecture that those name."""
    offered = [cast("type[Model]", offer.cls) for offer in registry.offers["model"].values()]
    known = [cls for cls in offered if "gguf" in cls.forms and (reads is None or cls.reads in reads)]
    return {architecture_of(cls): cls for cls in known}


def model_in(file: GGUFFile, registry: Registry, reads: Sequence[Kind] | None = None) -> Model:
    """The same as `model_of`, of a file that is open."""
    found = class_in(file, registry, reads)
    _check_counts(file)
    model = read_model(found, file)
    try:
        model.check()
    except UserError as error:
        raise file.error(str(error)) from None
    return model


def _check_counts(file: GGUFFile) -> None:
    """Raises UserError for more blocks than the file can have, which would take long to list, and unmatched tokens."""
    blocks, tokens = file.metadata.get(f"{file.architecture}.block_count"), file.metadata.get("tokenizer.ggml.tokens")
    if isinstance(blocks, int) and blocks > len(file.tensors):
        raise file.error(f"claims {blocks} blocks, and has {len(file.tensors)} tensors")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is not None and isinstance(tokens, list) and len(tokens) != embedding.shape[0]:
        raise file.error(f"its tokenizer has {len(tokens)} tokens, its embedding {embedding.shape[0]} rows")
