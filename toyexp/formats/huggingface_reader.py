"""Read a directory of transformers: config.json, the tensors in model*.safetensors, and the tokenizer."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from toyexp.base.errors import UserError, printable, suggest
from toyexp.base.files import read_file
from toyexp.formats.gguf.tokenizer import read_tokenizer
from toyexp.formats.huggingface_tokenizer import tokenizer_keys
from toyexp.formats.layout import HFTensor, hf_layout, original_rows
from toyexp.formats.safetensors import TensorsFile, json_object
from toyexp.interfaces.format import LazyTensors, ModelExport, ModelFile
from toyexp.interfaces.model import Model

CONFIG, SHARDS = "config.json", "model*.safetensors"
LIMIT = 16 << 20  # bytes of config.json
NO_WEIGHTS = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")  # ends of names of tensors without weights


def is_folder(path: Path) -> bool:
    """Return True if `path` is a directory with config.json and the weights of a model in safetensors."""
    return (path / CONFIG).is_file() and any(path.glob(SHARDS))


class Folder(ModelFile):
    """An open directory of transformers: its `config`, and its tensors by their names in transformers."""

    def __init__(self, path: Path):
        self.path, self.metadata = path, {}
        self.config = json_object(read_file(path / CONFIG, LIMIT), f"{path / CONFIG}:")
        self._files = {name: file for file in map(TensorsFile, sorted(path.glob(SHARDS))) for name in file.tensors}
        self.tensors = {name: file.tensors[name] for name, file in self._files.items()}

    def read(self, name: str, rows: int | None = None) -> np.ndarray:
        """Return a tensor in float32, or only its first `rows` rows."""
        return self._files[name].read(name, rows)

    def find(self, stored: HFTensor, count: int) -> list[str]:
        """Return the names that a model's tensor has in the directory; there are `count` if transformers splits it.

        If the directory was written without an output layer, the first part of all names is missing.
        """
        names = [stored.name.format(i) for i in range(count)] if stored.is_split else [stored.name]
        return [name if name in self.tensors else name.partition(".")[2] for name in names]


def read_folder(path: Path, models: Iterable[type[Model]]) -> ModelExport:
    """Return the model, tokenizer and tensors of a directory of transformers; tensors are read on access.

    Raise UserError if none of the classes `models` computes what config.json says, or if a tensor is missing or extra.
    """
    folder = Folder(path)
    model = _read_model(folder, models)
    layout = hf_layout(model, {})
    names = {spec.name: folder.find(layout.tensors[spec.name], spec.shape[0]) for spec in model.tensors()}
    expected = {name for found in names.values() for name in found}
    extra = {n for n in folder.tensors.keys() - expected - {"lm_head.weight"} if not n.endswith(NO_WEIGHTS)}
    extra -= {n for n in layout.zeros.keys() & extra if not folder.read(n).any()}
    for name in sorted(extra | expected - folder.tensors.keys()):
        verb = "has" if name in extra else "lacks"
        raise folder.error(f"{verb} the tensor {printable(name)}, unlike toyexp's model={model.name}")

    def read(name: str) -> np.ndarray:
        stored = layout.tensors[name]
        parts = [original_rows(stored.back(folder.read(n)), stored) for n in names[name]]
        return np.stack(parts) if stored.is_split else parts[0]

    tensors, tokenizer, problems = LazyTensors({s.name: s.shape for s in model.tensors()}, read), None, []
    try:
        keys = tokenizer_keys(path, folder.config)
        folder.metadata = {f"tokenizer.{key}": value for key, value in keys.items()}
        tokenizer = read_tokenizer(folder)
    except UserError as error:
        problems = [f"{error}; only token ids can be used"]
    types = {folder.tensors[name].type.lower() for name in expected}
    kind = types.pop() if len(types) == 1 else "f32"
    return ModelExport(model, tensors, tokenizer, {"name": path.resolve().name}, unreadable=problems, type=kind)


def _read_model(folder: Folder, models: Iterable[type[Model]]) -> Model:
    """Return the model that config.json describes; raise UserError if no class in `models` computes it."""
    classes = {hf_layout(cls(), {}).config["model_type"]: cls for cls in models if "config" in cls.forms}
    kind = str(folder.config.get("model_type"))
    if (cls := classes.get("llama" if kind == "mistral" else kind)) is None:
        raise folder.error(f"its model_type is {printable(kind)}; {suggest(kind, classes)}")
    try:
        model: Model = cls.forms["config"](cls, folder.config, folder.tensors.keys())
        return model
    except (UserError, TypeError, ValueError, KeyError, AttributeError) as error:
        raise UserError(f"{folder.path / CONFIG}: {printable(str(error), 200)}") from None
