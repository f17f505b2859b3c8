"""The model inside a GGUF file."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from toyexp.base.errors import UserError, choose, printable
from toyexp.contract.model import Model
from toyexp.contract.registry import Registry
from toyexp.formats.gguf.read import HF_TO_GGUF, PROGRAM, GGUFFile

MODEL, ADAPTER = "model.gguf", "adapter.gguf"  # what a run leaves


def file_of(path: Path, leaves: Sequence[str] = (MODEL,), registry: Registry | None = None) -> Path:
    """The file meant by `path`: itself, what a run left in that directory, or the model of that checkpoint.

    UserError when there is nothing.
    """
    if not os.path.lexists(path):
        raise UserError(f"{path}: not found; the GGUF files on this machine: toyexp models")
    if not os.path.isdir(path):  # noqa: PTH112 - Path.is_dir() raises where the way there may not be taken
        return path
    if not os.access(path, os.X_OK):
        raise UserError(f"{path}: is a directory that may not be entered")
    there = [path / name for name in leaves if os.path.lexists(path / name)]
    if there:
        return next((leaf for leaf in there if leaf.is_file()), there[0])  # whoever opens it says what it is
    from toyexp.commands.restored import gguf_of, is_checkpoint, newest_in  # deferred: it plans a run again

    if is_checkpoint(path):
        return gguf_of(path, registry)
    newest = newest_in(path)
    named = f"name a GGUF file, the directory of a run, or a checkpoint{f', such as {newest}' if newest else ''}"
    raise UserError(f"{path}: is a directory without {' or '.join(leaves)}; {_converted(path) or named}")


def _converted(path: Path) -> str | None:
    """How a directory of transformers or PEFT becomes a GGUF; None for any other."""
    for config, script in (("adapter_config.json", "convert_lora_to_gguf.py"), ("config.json", HF_TO_GGUF)):
        if (path / config).is_file():
            return (
                f"{PROGRAM} makes one of Hugging Face's: python {script} {shlex.quote(str(path))} --outfile model.gguf"
            )
    return None


def model_of(path: Path, registry: Registry, reads: Sequence[str] | None = None) -> Model:
    """The model that a GGUF file holds; UserError when none of those that read `reads` (any) has its architecture."""
    with GGUFFile(path) as file:
        return model_in(file, registry, reads)


def require_model(file: GGUFFile) -> None:
    """Raises GGUFError for an open file that holds something else than a model, such as a LoRA adapter."""
    kind = file.metadata.get("general.type", "model")
    if kind != "model":
        raise file.error(f"holds no model (general.type is {printable(str(kind))})")


def class_in(file: GGUFFile, registry: Registry, reads: Sequence[str] | None = None) -> type[Model]:
    """Who has the architecture of an open file's model; see `model_of`."""
    require_model(file)
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
