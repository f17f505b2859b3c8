"""Handwritten digits: 1797 real images of 8 x 8 pixels (Alpaydin and Kaynak 1998), as scikit-learn ships them."""

from __future__ import annotations

import gzip
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import toyexp
from toyexp import IMAGES, Kind, Unavailable
from toyexp.base import broken, require_words
from toyexp_data.held_out import SplitData

FILE = Path("datasets", "data", "digits.csv.gz")  # 64 pixels from 0 to 16 and the digit, a line each


@dataclass
class Digits(SplitData):
    """Handwritten digits, 8 x 8 pixels, from scikit-learn."""

    name: ClassVar[str] = "digits"
    gives: ClassVar[Kind] = IMAGES

    val_fraction: float = 0.2  # of every digit, held out from training; the same images whatever the seed
    augment: str = "none"  # none | flip | shift (by a pixel) | flip_shift
    eval_images: int = 0  # held-out images that one eval takes; 0: all

    def check(self) -> None:
        """Raises UserError for settings that cannot work, Unavailable without scikit-learn."""
        super().check()
        require_words("data", self, augment=toyexp.AUGMENTATIONS)
        self._file()

    def _file(self) -> Path:
        # Its load_digits reads this file; importing scikit-learn for that would take longer than the first steps.
        spec = importlib.util.find_spec("sklearn")
        if spec is None:
            raise Unavailable("scikit-learn is not installed: pip install 'toyexp[data]'")
        path = Path(*(spec.submodule_search_locations or [])[:1], FILE)
        if not path.is_file():
            raise broken("scikit-learn", f"there is no {path}")
        return path

    def open(self, vocabulary: Path | None) -> toyexp.ImageDataset:
        """All digits, stretched from 0..16 to 8-bit pixels."""
        import numpy as np

        with gzip.open(self._file(), "rt") as lines:
            table = np.loadtxt(lines, delimiter=",")
        images = np.round(table[:, :64] * (255 / 16)).astype(np.uint8).reshape(-1, 8, 8, 1)
        labels, names = table[:, 64].astype(np.int32), [str(digit) for digit in range(10)]
        return toyexp.ImageDataset(
            images, labels, names, self.val_fraction, augment=self.augment, eval_images=self.eval_images
        )
