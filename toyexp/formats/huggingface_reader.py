"""Read a directory of transformers or timm: config.json, the tensors in model*.safetensors, and the tokenizer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from toyexp.base.errors import UserError, printable, suggest
from toyexp.base.files import read_file
from toyexp.formats.gguf.tokenizer import read_tokenizer
from toyexp.formats.huggingface_tokenizer import tokenizer_keys
from toyexp.formats.layout import HFTensor, hf_layout, original_rows
from toyexp.formats.safetensors import TensorsFile, json_object
from toyexp.interfaces.format import LazyTensors, ModelExport, ModelFile, TensorInfo
from toyexp.interfaces.model import Model, model_settings

CONFIG, SHARDS, INDEX = "config.json", "model*.safetensors", "model.safetensors.index.json"
PREPROCESSOR = "preprocessor_config.json"
LIMIT = 16 << 20  # bytes of config.json, and of the index of shards
NO_WEIGHTS = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")  # ends of names of tensors without weights


def is_folder(path: Path) -> bool:
    """Return True if `path` is a directory with config.json and the weights of a model in safetensors."""
    return (path / CONFIG).is_file() and any(path.glob(SHARDS))


class Folder(ModelFile):
    """An open directory of transformers: its `config`, and its open `files` by the names of tensors in transformers.

    The function `read_folder` fills in `tensors`, by the names in the model, and the tokenizer's keys in `metadata`.
    """

    def __init__(self, path: Path):
        self.path, self.metadata, self.tensors = path, {}, {}
        self.config = json_object(read_file(path / CONFIG, LIMIT), f"{path / CONFIG}:")
        shards = sorted(path.glob(SHARDS))
        if (index := path / INDEX).exists():
            places = json_object(read_file(index, LIMIT), f"{index}:").get("weight_map")
            if not isinstance(places, dict):
                raise UserError(f"{index}: has no weight_map, the file of each tensor")
            shards = sorted({path / Path(str(name)).name for name in places.values()})
        self.parts = {path: TensorsFile(path) for path in shards}
        self.files = {name: file for file in self.parts.values() for name in file.tensors}

    def read(self, name: str, rows: int | None = None) -> np.ndarray:
        """Return a tensor, named as in transformers, in float32, or only its first `rows` rows."""
        return self.files[name].read(name, rows)

    def locate(self, stored: HFTensor, names: Sequence[str]) -> TensorInfo:
        """Return type and position of a model's tensor, which has the names `names` in transformers.

        The offset is -1 if its bytes must be converted.
        """
        infos = [self.files[name].tensors[name] for name in names]
        first, width = infos[0], infos[0].nbytes // math.prod(infos[0].shape)
        if stored == HFTensor(stored.name) and first.offset % width == 0:
            return first
        return replace(first, offset=-1, type=first.type if len({info.type for info in infos}) == 1 else "F32")

    def find(self, stored: HFTensor, count: int) -> list[str]:
        """Return the names that a model's tensor has in the directory; there are `count` if transformers splits it.

        If the directory was written without an output layer, the first part of all names is missing.
        """
        names = [stored.name.format(i) for i in range(count)] if stored.is_split else [stored.name]
        return [next((n for n in (name, name.partition(".")[2]) if n in self.files), name) for name in names]


def read_folder(path: Path, models: Iterable[type[Model]]) -> ModelExport:
    """Return the model, tokenizer and tensors of a directory of transformers or timm; tensors are read on access.

    Raise UserError if none of the classes `models` computes what config.json says, or if a tensor is missing or extra.
    """
    folder = Folder(path)
    model = _read_model(folder, models)
    layout = hf_layout(model, folder.config if "architecture" in folder.config else {})
    names = {spec.name: folder.find(layout.tensors[spec.name], spec.shape[0]) for spec in model.tensors()}
    expected = {name for found in names.values() for name in found}
    unused = {"lm_head.weight", "pooler.dense.weight", "pooler.dense.bias"}
    extra = {n for n in folder.files.keys() - expected - unused if not n.endswith(NO_WEIGHTS)}
    extra -= {n for n in layout.zeros.keys() & extra if not folder.read(n).any()}
    for name in sorted(extra | expected - folder.files.keys()):
        verb = "has" if name in extra else "lacks"
        raise folder.error(f"{verb} the tensor {printable(name)}, unlike toyexp's model={model.name}")

    def read(name: str) -> np.ndarray:
        stored = layout.tensors[name]
        parts = [original_rows(stored.back(folder.read(n)), stored) for n in names[name]]
        return np.stack(parts) if stored.is_split else parts[0]

    folder.tensors = {s.name: folder.locate(layout.tensors[s.name], names[s.name]) for s in model.tensors()}
    tensors, tokenizer, problems = LazyTensors({s.name: s.shape for s in model.tensors()}, read), None, []
    if not model.reads.text:
        data = _image_data(path / PREPROCESSOR, folder.config, model_settings(model))
        notes = [f"{path} has no output layer; recipe=full and recipe=lora add a new one"] * (not data["classes"])
        if not (path / PREPROCESSOR).exists() and "architecture" not in folder.config:
            notes.append(f"{path} has no {PREPROCESSOR}; pixels are normalised with mean and std 0.5")
        return ModelExport(model, tensors, None, _names(path.resolve()), data, unreadable=notes, file=folder)
    try:
        keys = tokenizer_keys(path, folder.config)
        folder.metadata = {f"tokenizer.{key}": value for key, value in keys.items()}
        tokenizer = read_tokenizer(folder)
    except UserError as error:
        problems = [f"{error}; only token ids can be used"]
    return ModelExport(model, tensors, tokenizer, _names(path.resolve()), unreadable=problems, file=folder)


def _image_data(file: Path, config: Mapping[str, Any], sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the names of the classes, and mean and std of pixels: those of `file`, of timm's config, or 0.5."""
    stated = {**config.get("pretrained_cfg", {}), **config}
    pixels = json_object(read_file(file, LIMIT), f"{file}:") if file.exists() else {}
    labels = stated.get("id2label") or stated.get("label_names") or []
    names = {str(key): name for key, name in (labels.items() if isinstance(labels, dict) else enumerate(labels))}
    data: dict[str, Any] = {"classes": [str(names.get(str(i), i)) for i in range(sizes["classes"])]}
    for key, unchanged in (("mean", 0.0), ("std", 1.0)):
        value = pixels.get(f"image_{key}") or stated.get(key) or [0.5] * sizes["channels"]
        data[f"image_{key}"] = value if pixels.get("do_normalize", True) else [unchanged] * sizes["channels"]
    return data


def _names(path: Path) -> dict[str, str]:
    """Return the model's name and, for the path of a download in the Hugging Face cache, its address."""
    repository = path.parent.parent.name.split("--")  # the path is models--ORG--NAME/snapshots/COMMIT
    if path.parent.name != "snapshots" or repository[0] != "models":
        return {"name": path.name}
    return {"name": repository[-1], "repo_url": f"https://huggingface.co/{'/'.join(repository[1:])}"}


def _read_model(folder: Folder, models: Iterable[type[Model]]) -> Model:
    """Return the model that config.json describes; raise UserError if no class in `models` computes it."""
    classes = {hf_layout(cls(), {}).config["model_type"]: cls for cls in models if "config" in cls.forms}
    kind = "vit" if "architecture" in folder.config else str(folder.config.get("model_type"))
    if (cls := classes.get("llama" if kind == "mistral" else kind)) is None:
        raise folder.error(f"its model_type is {printable(kind)}; {suggest(kind, classes)}")
    try:
        model: Model = cls.forms["config"](cls, folder.config, folder.files.keys())
        return model
    except (UserError, TypeError, ValueError, KeyError, AttributeError) as error:
        raise UserError(f"{folder.path / CONFIG}: {printable(str(error), 200)}") from None
