"""Write a model with a LoRA adapter added to it as one file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from toyexp.base.errors import for_terminal
from toyexp.base.formatting import in_bytes
from toyexp.base.writing import bytes_in
from toyexp.formats.file_plan import read_adapter
from toyexp.formats.gguf.ggml_types import fitting, pieces_of
from toyexp.formats.gguf.header import origin
from toyexp.formats.gguf.open_model import PARENT, inherited_keys, model_in
from toyexp.formats.gguf.quantise import FILE_TYPES, tensor_type
from toyexp.formats.gguf.read import GGUFFile
from toyexp.formats.gguf.tokenizer import read_chat_template
from toyexp.formats.gguf.write import Writer
from toyexp.inference.export import require_free
from toyexp.inference.model_files import adapter_of, check_base, file_of
from toyexp.interfaces.command import Answer
from toyexp.interfaces.format import TensorInfo
from toyexp.interfaces.plan import LoraAdapter, adapter_digest, lora_names
from toyexp.plugins.registry import Registry

TYPES = tuple(FILE_TYPES)
# Keys of the base that are not true of what it becomes a part of, by how they begin.
OF_BASE = ("split.", *(f"general.{key}" for key in ("run_id", "step", "config_sha256", "base_model.", *PARENT)))


@dataclass(frozen=True)
class Merged(Answer):
    """What was written."""

    base: str
    adapter: str
    path: str
    type: str  # of what the adapter changed
    changed: int  # tensors
    before: dict[str, int]  # how many of these were of which type
    bytes: int
    tensors: dict[str, int]  # how many of each type there are now
    warnings: list[str]

    def lines(self) -> list[str]:
        """What is odd about it, which types came out, and where it is."""
        types = ", ".join(f"{count} {name}" for name, count in self.tensors.items())
        told = [f"warning: {warning}" for warning in self.warnings]
        if {*self.before} != {self.type}:
            were = ", ".join(f"{count} {name}" for name, count in self.before.items())
            told.append(f"note: the {self.changed} tensors that the adapter changes are {self.type} now; were {were}")
        return [*map(for_terminal, told), f"{self.path}  {in_bytes(self.bytes)}  ({types})"]


def merge(base: Path, adapter: Path, out: Path, kind: str, force: bool, registry: Registry) -> Merged:
    """Writes `out`; UserError for what does not fit together, before anything is written."""
    with GGUFFile(file_of(base, registry=registry)) as file:
        model = model_in(file, registry)
        put_on = adapter_of(adapter, lambda: model, registry)
        pairs, adapters = read_adapter(put_on, model)
        problems = check_base(put_on, file.path)
        for tensor in pairs:
            tensor.values.check_finite()
        with GGUFFile(put_on) as there:
            require_free(f"--out {out}", out, [*file.paths, origin(file.path), put_on, origin(put_on)], force)
            scales = {a.target: a.scale for a in adapters if isinstance(a, LoraAdapter)}
            writer = _merged(file, there, scales, kind)
            before = dict(Counter(file.tensors[name].type for name in scales))
            problems += writer.save(out)
        told = str(origin(file.path)), str(origin(put_on))
    with GGUFFile(out) as written:
        types = dict(Counter(info.type for info in written.tensors.values()))
        now = Counter(written.tensors[name].type for name in scales).most_common(1)[0][0]
    return Merged(*told, str(out), now, len(scales), before, bytes_in(out), types, problems)


def _merged(file: GGUFFile, adapter: GGUFFile, scales: dict[str, float], kind: str) -> Writer:
    """The base's keys and tensors, each changed one in its new type; its numbers are made as they are written."""
    writer = Writer()
    template = read_chat_template(adapter)
    for key, value in file.metadata.items():
        if not key.startswith(OF_BASE):
            writer.add(key, value, file.kinds[key])
    pairs, came = {name: adapter.weights(name) for name in adapter.tensors}, dict(inherited_keys(file))
    base, place = came["base_model.0.name"], origin(adapter.path)
    added = adapter.text("general.name") or place.name.removesuffix(".gguf")
    of_run = f" of run {run}" if (run := adapter.text("general.run_id")) else ""
    came |= {"name": f"{base} + {added}", "description": f"{base} with the LoRA adapter {added}{of_run} merged in",
             "adapter_digest": adapter_digest(pairs, came.get("adapter_digest", ""))}  # fmt: skip
    for key, value in came.items():
        writer.add(f"general.{key}", value)
    if template:
        writer.add("tokenizer.chat_template", template)
    tied = "output.weight" not in file.tensors
    for info in file.tensors.values():
        if info.name not in scales:
            writer.add_bytes(info.name, info.shape, info.type, (raw for _, raw in file.pieces(info)))
            continue
        scale, own = scales[info.name], tensor_type(info.name, info.shape, kind, tied)
        own = own if own == "F32" else fitting(_sum(file, adapter, info, scale), own)
        writer.add_numbers(info.name, info.shape, own, _pieces(file, adapter, info, scale))
    return writer


def _pieces(file: GGUFFile, adapter: GGUFFile, info: TensorInfo, scale: float) -> Iterator[np.ndarray]:
    yield from pieces_of(_sum(file, adapter, info, scale))  # made when they are written, a tensor at a time


def _sum(file: GGUFFile, adapter: GGUFFile, info: TensorInfo, scale: float) -> np.ndarray:
    """W + scale B A in float64, rounded to float32."""
    a, b = (adapter.read(name).astype(np.float64) for name in lora_names(info.name))
    return (file.read(info.name) + scale * (b @ a)).astype(np.float32)
