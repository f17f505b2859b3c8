"""A model in one safetensors file, whose metadata `gguf` has in JSON the keys that its GGUF would have."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from toyexp.base.errors import UserError
from toyexp.base.writing import in_one_piece, required, write_synced
from toyexp.contract.format import TensorInfo

KEYS = "gguf"


class SafetensorsFile:
    """An open file that was written so; UserError for one that is broken, or lacks those keys."""

    def __init__(self, path: Path):
        from safetensors import SafetensorError, safe_open  # deferred: few commands read such files

        self.path = path
        try:
            self._stored = safe_open(path, framework="numpy")
            metadata = json.loads((self._stored.metadata() or {}).get(KEYS, "{}"))
            self.tensors: Mapping[str, TensorInfo] = {name: self._info(name) for name in self._stored.keys()}  # noqa: SIM118 - it is no mapping
        except (OSError, SafetensorError, ValueError, RecursionError) as error:
            raise self.error(f"cannot be read as safetensors: {error}") from None
        if not isinstance(metadata, dict):
            raise self.error(f"its metadata {KEYS} is no JSON object")
        self.metadata: Mapping[str, Any] = metadata

    @property
    def architecture(self) -> str:
        """What its keys say it holds; UserError where they say nothing."""
        value = self.metadata.get("general.architecture")
        if not isinstance(value, str) or not value:
            raise self.error("has no general.architecture")
        return value

    def error(self, cause: str) -> UserError:
        """An error about this file."""
        return UserError(f"{self.path}: {cause}")

    def read(self, name: str, rows: int | None = None) -> np.ndarray:
        """The first rows of a tensor, or all of it, in float32."""
        array: np.ndarray = self._stored.get_slice(name)[:rows] if rows is not None else self._stored.get_tensor(name)
        return array.astype(np.float32, copy=False)

    def _info(self, name: str) -> TensorInfo:
        held = self._stored.get_slice(name)
        return TensorInfo(name, tuple(held.get_shape()), held.get_dtype(), -1, self.path, 0, 0)


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray], keys: Mapping[str, Any]) -> None:
    """Writes the tensors under their names, float32, and the keys, in one piece; RunFailed where that fails."""
    from safetensors.numpy import save

    content = save(dict(tensors), {KEYS: json.dumps(keys, default=np.ndarray.tolist)})
    with required(path), in_one_piece(path) as place:
        write_synced(place, content)
