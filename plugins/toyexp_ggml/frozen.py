"""Frozen tensors of a GGUF file, read where they lie and in the types they have there."""

from __future__ import annotations

from pathlib import Path

from toyexp import Plan, TensorInfo
from toyexp.formats import in_place
from toyexp_ggml.binding import Backend, MappedFile, Node


class Frozen:
    """What of a plan needs no copy: frozen matrices of any type, and frozen float32 tensors of any shape."""

    def __init__(self, backend: Backend):
        self._backend = backend
        self._files: list[MappedFile] = []
        self.nodes: dict[str, Node] = {}

    def find(self, plan: Plan) -> None:
        """Maps the tensors of the plan; raises GGUFError for a file without them, and for numbers that are none."""
        wanted: dict[Path, list[tuple[str, tuple[int, ...], TensorInfo]]] = {}
        for tensor in plan.tensors:
            info = in_place(tensor)
            if info is not None:
                wanted.setdefault(info.path, []).append((tensor.name, tensor.shape, info))
        for path, tensors in wanted.items():
            file = MappedFile(self._backend, str(path), len(tensors))
            self._files.append(file)
            for name, shape, info in tensors:
                nbytes = info.nbytes // info.shape[0] * shape[0]
                self.nodes[name] = file.tensor(shape, info.type_id, info.offset, nbytes)
            file.allocate()

    def close(self) -> None:
        """Lets go of the files."""
        for file in self._files:
            file.close()
        self._files.clear()
        self.nodes.clear()
