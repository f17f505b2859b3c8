"""How a model of images sees them, by its file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toyexp.base.errors import UserError
from toyexp.contract.kind import IMAGES
from toyexp.contract.model import Model, sizes_of
from toyexp.formats.gguf.form import architecture_of
from toyexp.formats.gguf.read import GGUFFile

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Seen:
    """How a model of images sees them, by its file."""

    model: Model
    size: int  # pixels along a side
    channels: int
    classes: Sequence[str]
    mean: np.ndarray  # of pixels from 0 to 1, by channel
    std: np.ndarray

    @classmethod
    def of(cls, file: GGUFFile, model: Model, what: Path) -> Seen:
        """That of an open file; UserError for one that holds no such model, or does not say all of it."""
        import numpy as np

        if model.reads != IMAGES:
            hint = "toyexp generate, or toyexp eval" if model.reads.sequence else "toyexp eval"
            raise UserError(f"{what}: a {model.name} reads {model.reads}, and predict is for images; try {hint}")
        size, channels = (sizes_of(model).get(name) for name in ("image_size", "channels"))
        if not isinstance(size, int) or size < 1 or channels not in (1, 3):
            raise file.error("does not say which images its model reads (image_size; channels, 1 or 3)")
        keys = (file.metadata.get(f"{architecture_of(model)}.{name}") for name in ("image_mean", "image_std"))
        mean, std = map(_numbers, keys)
        if not (mean.shape == std.shape == (channels,) and np.isfinite([mean, std]).all() and (std > 0).all()):
            raise file.error("does not say by which mean and deviation its model sees pixels (image_mean, image_std)")
        named = file.metadata.get(f"{architecture_of(model)}.classes")
        names = [str(name) for name in named] if isinstance(named, list) else []
        count = int(sizes_of(model).get("classes") or len(names))
        classes = [*names[:count], *(f"class {i}" for i in range(len(names), count))]
        return cls(model, size, channels, classes, mean, std)

    def blank(self) -> np.ndarray:
        """One image of nothing."""
        import numpy as np

        return np.zeros((1, self.size, self.size, self.channels), np.uint8)

    def dataset(self, images: np.ndarray) -> Any:
        """8-bit images [N, size, size, channels] as data of the model's."""
        from toyexp.datasets.images import Unlabelled

        return Unlabelled(images, self.classes, self.mean, self.std)


def _numbers(value: object) -> np.ndarray:
    """What a key holds as numbers; none where it holds something else."""
    import numpy as np

    try:
        return np.asarray(value, np.float64)
    except (TypeError, ValueError):
        return np.empty(0)
