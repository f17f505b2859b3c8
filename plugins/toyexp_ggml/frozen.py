"""Frozen tensors of a GGUF file, read where they lie and in the types they have there."""

from __future__ import annotations

from toyexp import FromGGUF, Plan
from toyexp.init import opened
from toyexp_ggml.binding import Backend, MappedFile, Node


class Frozen:
    """What of a plan needs no copy: frozen matrices of any type, and frozen float32 tensors of any shape."""

    def __init__(self, backend: Backend):
        self._backend = backend
        self._files: list[MappedFile] = []
        self.nodes: dict[str, Node] = {}

    def find(self, plan: Plan) -> None:
        """Maps the tensors of the plan; raises GGUFError for a file without them."""
        wanted: dict[str, list[tuple[str, tuple[int, ...], FromGGUF]]] = {}
        for tensor in plan.tensors:
            if not tensor.trainable and isinstance(tensor.values, FromGGUF):
                wanted.setdefault(tensor.values.path, []).append((tensor.name, tensor.shape, tensor.values))
        for path, tensors in wanted.items():
            header = opened(path)
            file = MappedFile(self._backend, path, len(tensors))
            self._files.append(file)
            for name, shape, values in tensors:
                info = header.tensors.get(values.tensor)
                if info is None:
                    raise header.error(f"has no tensor {values.tensor}")
                rows = info.shape[0] if values.rows is None else values.rows
                # Whatever is not as the plan says is left to the reader, which says what is wrong.
                if shape == (rows, *info.shape[1:]) and (len(shape) == 2 or info.type == "F32"):
                    nbytes = info.nbytes // info.shape[0] * rows
                    self.nodes[name] = file.tensor(shape, info.type_id, info.offset, nbytes)
            file.allocate()

    def close(self) -> None:
        """Lets go of the files."""
        for file in self._files:
            file.close()
        self._files.clear()
        self.nodes.clear()
