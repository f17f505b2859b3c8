"""Load a trained image classifier from its file alone; of toyexp, only the model class is used."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from toyexp import ModelFile
from toyexp.formats import GGUFFile, SafetensorsFile, read_model
from toyexp_models.vit import ViT, cut


@dataclass(frozen=True)
class SavedViT:
    """Contents of an exported file: all that is needed to classify an image."""

    model: ViT
    tensors: Mapping[str, np.ndarray]
    classes: tuple[str, ...]
    mean: np.ndarray  # of pixels from 0 to 1, by channel
    std: np.ndarray

    def patches(self, images: np.ndarray) -> np.ndarray:
        """Return 8-bit images [B, size, size, channels] as the model's input."""
        return cut(((images / 255 - self.mean) / self.std).astype(np.float32), self.model.patch)


def load_vit(path: str | Path) -> SavedViT:
    """Load a model.gguf or model.safetensors of a ViT. Raise UserError if a key is missing or wrong."""
    path = Path(path)
    with nullcontext(SafetensorsFile(path)) if path.suffix == ".safetensors" else GGUFFile(path) as file:
        model = read_model(ViT, file)
        classes = file.metadata.get(f"{file.architecture}.classes")
        if not isinstance(classes, list) or not 0 < len(classes) <= model.classes:
            raise file.error(f"{file.architecture}.classes must name at most {model.classes} classes")
        mean, std = (_read_channel_values(file, model, name) for name in ("image_mean", "image_std"))
        return SavedViT(model, {t.name: file.read(t.name) for t in model.tensors()}, tuple(classes), mean, std)


def _read_channel_values(file: ModelFile, model: ViT, name: str) -> np.ndarray:
    key = f"{file.architecture}.{name}"
    try:
        array = np.asarray(file.metadata.get(key), np.float64)
    except (TypeError, ValueError):
        array = np.empty(0)
    if array.shape != (model.channels,):
        raise file.error(f"{key} must list a number for each of {model.channels} channels")
    return array
