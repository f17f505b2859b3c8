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

LEAVES = ("model.gguf", "adapter.gguf")  # what a run leaves, the model first


def file_of(path: Path) -> Path:
    """The file meant by `path`: itself, or of a run's directory the model; UserError when that holds none."""
    if not os.path.isdir(path):  # noqa: PTH112 - Path.is_dir() raises where the way there may not be taken
        return path
    found = next((path / name for name in LEAVES if (path / name).is_file()), None)
    if found is None:
        raise UserError(f"{path}: is a directory without {' or '.join(LEAVES)}; name a file, or the directory of a run")
    return found


def model_of(path: Path, reads: Sequence[str], registry: Registry) -> Model:
    """The model that a GGUF file holds; UserError when none of the kinds `reads` has its architecture."""
    with GGUFFile(path) as file:
        return model_in(file, reads, registry)


def model_in(file: GGUFFile, reads: Sequence[str], registry: Registry) -> Model:
    """The same of a file that is open."""
    if file.metadata.get("general.type", "model") != "model":
        raise file.error(f"holds no model (general.type is {printable(str(file.metadata['general.type']))})")
    offered = [cast("type[Model]", offer.cls) for offer in registry.offers["model"].values()]
    known = {cls().architecture: cls for cls in offered if cls.reads in reads}
    if file.architecture not in known:
        raise file.error(f"its architecture is {printable(file.architecture)}; {choose('', known)}")
    blocks = file.metadata.get(f"{file.architecture}.block_count")
    if isinstance(blocks, int) and blocks > len(file.tensors):  # a block has several; said before any are listed
        raise file.error(f"says it has {blocks} blocks, with {len(file.tensors)} tensors")
    model = known[file.architecture].from_gguf(file)
    model.check()
    return model
