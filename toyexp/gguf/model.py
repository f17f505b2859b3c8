"""The model inside a GGUF file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from toyexp.errors import UserError, choose, printable
from toyexp.gguf.read import GGUFFile
from toyexp.model import Model
from toyexp.registry import Registry

MODEL, ADAPTER = "model.gguf", "adapter.gguf"  # what a run leaves


def file_of(path: Path, leaves: Sequence[str] = (MODEL,), registry: Registry | None = None) -> Path:
    """The file meant by `path`: itself, what a run left in that directory, or the model of that checkpoint.

    UserError when there is nothing.
    """
    if not os.path.exists(path):  # noqa: PTH110 - as below
        raise UserError(f"{path}: not found; the GGUF files on this machine: toyexp models")
    if not os.path.isdir(path):  # noqa: PTH112 - Path.is_dir() raises where the way there may not be taken
        return path
    found = next((path / name for name in leaves if (path / name).is_file()), None)
    if found is not None:
        return found
    from toyexp.restored import gguf_of, is_checkpoint, newest_in  # deferred: it plans a run again

    if is_checkpoint(path):
        return gguf_of(path, registry)
    newest = newest_in(path)
    raise UserError(
        f"{path}: is a directory without {' or '.join(leaves)}; name a GGUF file, the directory of a run, or a "
        f"checkpoint{f', such as {newest}' if newest else ''}"
    )


def model_of(path: Path, registry: Registry, reads: Sequence[str] | None = None) -> Model:
    """The model that a GGUF file holds; UserError when none of those that read `reads` (any) has its architecture."""
    with GGUFFile(path) as file:
        return model_in(file, registry, reads)


def class_in(file: GGUFFile, registry: Registry, reads: Sequence[str] | None = None) -> type[Model]:
    """Who has the architecture of an open file's model; see `model_of`."""
    if file.metadata.get("general.type", "model") != "model":
        raise file.error(f"holds no model (general.type is {printable(str(file.metadata['general.type']))})")
    offered = [cast("type[Model]", offer.cls) for offer in registry.offers["model"].values()]
    known = {cls().architecture: cls for cls in offered if reads is None or cls.reads in reads}
    if file.architecture not in known:
        raise file.error(f"its architecture is {printable(file.architecture)}; {choose('', known)}")
    return known[file.architecture]


def model_in(file: GGUFFile, registry: Registry, reads: Sequence[str] | None = None) -> Model:
    """The same as `model_of`, of a file that is open."""
    found = class_in(file, registry, reads)
    _check_counts(file)
    model = found.from_gguf(file)
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
