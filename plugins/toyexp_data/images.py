"""Image data: a directory per class, or a directory with a CSV of labels; and handwritten digits."""

from __future__ import annotations

import csv
import gzip
import importlib.util
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import toyexp
from toyexp import IMAGES, Kind, Unavailable, UserError, printable
from toyexp.base import (
    broken_package,
    iter_files,
    read_text,
    require_choice,
    require_directory,
    require_file,
    require_range,
)
from toyexp.base import numpy as np
from toyexp_data.held_out import MAX_NAMED, ON_ERROR, SplitData

HELD_OUT = ("val", "valid", "validation", "test")  # names of a held-out directory next to one named `train`


@dataclass
class Images(SplitData):
    """Your own images, one directory per class."""

    name: ClassVar[str] = "images"
    gives: ClassVar[Kind] = IMAGES

    path: str = ""  # directory with one directory of images per class, or with train/ and val/ that have these
    labels: str = ""  # CSV file with lines "file,class" (classes from 0), instead of directories per class
    image_size: int = 32  # height and width of the model's input in pixels
    color: bool = True  # true: RGB; false: greyscale
    resize: bool = True  # crop to the centred square and scale; false: images of another size are errors
    on_error: str = "refuse"  # for an unusable image: refuse (stop the run) | skip (and count it)
    normalise: str = "train"  # pixel mean and std from: train (the training images) | fixed (0.5 and 0.5)
    augment: str = "none"  # random changes: none, or some of crop flip shift color joined by _, such as crop_flip
    sampler: str = "shuffle"  # order: shuffle (each image once per epoch) | balanced (each class equally often)
    mixup: float = 0.0  # mix pairs of images, with shares from Beta(mixup, mixup); usual: 0.2; 0: none
    val_fraction: float = 0.1  # share of each class held out for validation, the same for every seed; (0, 1]
    eval_images: int = 0  # held-out images per evaluation; 0: all
    max_mb: float = 4000.0  # maximum megabytes of pixels in memory

    @classmethod
    def recognises(cls, path: Path) -> int:
        """Return 2 (a certain match) for a directory with images, up to three levels deep, and 0 for other paths."""
        below = (f for depth in ("*", "*/*", "*/*/*") for f in path.glob(depth)) if path.is_dir() else ()
        return 2 if any(f.suffix.lower() in toyexp.IMAGE_SUFFIXES for f in below) else 0

    @classmethod
    def suggest_settings(cls, sizes: Mapping[str, Any], tokenizer: toyexp.Tokenizer | None) -> str | None:
        """Return overrides that fit the data to the model: a placeholder for the path, image size, and color=false.

        The image size and color=false are left out if the model does not need them.
        """
        size = f" data.image_size={sizes['image_size']}" if "image_size" in sizes else ""
        return f"data.path=FOLDER{size}" + " data.color=false" * (sizes.get("channels") == 1)

    def check(self) -> None:
        """Raise UserError for invalid settings and missing paths, Unavailable without Pillow."""
        toyexp.require_pillow()
        if not self.path:
            raise UserError("data=images needs a directory with one directory per class: data.path=...")
        require_directory(self.path, f"data.path={self.path}")
        if self.labels:
            require_file(self.labels, f"data.labels={self.labels}")
        super().check()
        choices = {"normalise": toyexp.NORMALISATIONS, "sampler": ("shuffle", "balanced")}
        require_choice("data", self, on_error=ON_ERROR, **choices)
        toyexp.require_augmentation(self.augment)
        require_range("data", self, image_size="[1,inf)", max_mb="(0,inf)", mixup="[0,inf)")

    def open(self, vocabulary: Path | None) -> toyexp.ImageDataset:
        """Read and scale every image. With on_error=skip, leave out and count unusable images."""
        listed, names = self._read_labels() if self.labels else self._folders()
        shape = (self.image_size, self.image_size, 3 if self.color else 1)
        if len(listed) * math.prod(shape) > self.max_mb * 1e6:
            problem = f"{len(listed)} images of {self.image_size} x {self.image_size} pixels take more than"
            raise UserError(f"data.path={self.path}: {problem} data.max_mb={self.max_mb:g} MB of memory")
        images = np.empty((len(listed), *shape), np.uint8)
        usable: list[tuple[Path, int]] = []
        sizes: set[tuple[int, int]] = set()
        skipped: list[str] = []
        for file, label in listed:
            try:
                if isinstance(label, str):
                    raise toyexp.BadImage(label)
                images[len(usable)] = toyexp.read_image(file, self.image_size, self.color, self.resize, sizes)
            except toyexp.BadImage as reason:
                if self.on_error == "refuse":
                    raise UserError(f"{file}: {reason} (data.on_error=skip leaves such images out)") from None
                skipped.append(f"{_relative_name(file, self.path)}: {reason}")
            else:
                usable.append((file, label))
        held_dir = self._split()[1]
        remarks = [*toyexp.scaling_note(sizes, self.image_size), *([f"held out: {held_dir}"] if held_dir else [])]
        is_held_out = np.array([held_dir in file.parents for file, _ in usable], bool)
        train_labels = {label for (_, label), is_held in zip(usable, is_held_out, strict=True) if not is_held}
        missing = [name for number, name in enumerate(names) if number not in train_labels]
        if missing or len(names) < 2 or (held_dir and not is_held_out.any()):
            empty = f"class {printable(missing[0])}" if missing else f"{held_dir}, to be held out,"
            problem = f"{empty} has no image" if missing or len(names) > 1 else "has fewer than two classes"
            raise UserError(f"data.path={self.path}: {problem}{f' that can be read ({skipped[0]})' if skipped else ''}")
        facts = {"path": self.path, "skipped": len(skipped), "skipped_files": skipped[:MAX_NAMED]}
        facts |= {"held_out_split": str(held_dir)} if held_dir else {}
        return toyexp.ImageDataset(
            images[: len(usable)], np.array([label for _, label in usable], np.int32), names,
            self.val_fraction, self.normalise, self.augment, self.eval_images, facts,
            self._left_out({file for file, _ in listed}, skipped), remarks, is_held_out if held_dir else None,
            self.sampler, self.mixup,
        )  # fmt: skip

    def _left_out(self, listed: set[Path], skipped: Sequence[str]) -> list[str]:
        notes = [
            f"{len(skipped)} of {len(listed)} images skipped (data.on_error), such as {name}" for name in skipped[:1]
        ]
        others = sorted(f for f in iter_files(Path(self.path)) if f not in listed)
        if self.labels:
            others = [f for f in others if f.suffix.lower() in toyexp.IMAGE_SUFFIXES]
            notes += [f"{len(listed)} of {len(listed) + len(others)} images: data.labels"] if others else []
        elif others:
            notes.append(f"{len(others)} other files, such as {_relative_name(others[0], self.path)}")
        return notes

    def _folders(self) -> tuple[list[tuple[Path, int | str]], list[str]]:
        train, held_dir = self._split()
        folders = _subdirectories(train)
        if not folders:
            raise UserError(f"data.path={self.path}: contains no directories; data=images needs one per class")
        names = [f.name for f in folders]
        for folder in _subdirectories(held_dir) if held_dir else []:
            if folder.name not in names:
                raise UserError(f"{folder}: holds held-out images, but {train} has no class {printable(folder.name)}")
            folders.append(folder)
        listed: list[tuple[Path, int | str]] = [
            (file, names.index(folder.name)) for folder in folders for file in sorted(toyexp.iter_images(folder))
        ]
        return listed, names

    def _split(self) -> tuple[Path, Path | None]:
        root = Path(self.path)
        names = {f.name.lower(): f for f in _subdirectories(root)}
        train, held_dir = names.get("train"), next((names[name] for name in HELD_OUT if name in names), None)
        is_split = not self.labels and train and held_dir and names.keys() <= {"train", *HELD_OUT}
        if not (is_split and train and _subdirectories(train)):
            return root, None
        return train, held_dir

    def _read_labels(self) -> tuple[list[tuple[Path, int | str]], list[str]]:
        """Read the CSV file that the setting `labels` names. Return its image files, and the class names.

        Each file comes with its class number, or with the reason why the file is unusable.
        """
        try:
            lines = [line for line in csv.reader(read_text(Path(self.labels)).splitlines()) if line]
        except csv.Error as error:
            raise UserError(f"data.labels={self.labels}: cannot be read: {error}") from None
        for line in lines:
            if len(line) != 2 or not re.fullmatch(r"\s*-?\d{1,18}\s*", line[1]):
                raise UserError(f"data.labels={self.labels}: a line must be a file and a class number, not {line}")
        numbers = [int(number) for _, number in lines]
        count = max(numbers, default=-1) + 1
        if count > len(lines):
            problem = f"{count} classes need an image each, but the file lists {len(lines)}"
            raise UserError(f"data.labels={self.labels}: {problem}")
        listed: dict[Path, tuple[Path, int | str]] = {}
        for (name, _), number in zip(lines, numbers, strict=True):
            file = Path(self.path, name)
            path = Path(os.path.abspath(file))  # noqa: PTH100 - ./a.png becomes a.png; Path.resolve would follow links
            if path in listed:  # it could be in the training and in the held-out part
                first = numbers[list(listed).index(path)]
                classes = "" if first == number else f", as class {first} and {number}"
                raise UserError(f"data.labels={self.labels}: {printable(name)} is listed twice{classes}")
            label: int | str = number if number >= 0 else f"its class {number} is not one of 0..{count - 1}"
            if not path.is_relative_to(os.path.abspath(self.path)):  # noqa: PTH100
                label = f"lies outside of data.path={self.path}"
            listed[path] = file, label
        return [*listed.values()], [str(number) for number in range(count)]


def _relative_name(file: Path, folder: str) -> str:
    return printable(str(file.relative_to(folder) if file.is_relative_to(folder) else file))


def _subdirectories(folder: Path) -> list[Path]:
    return sorted(f for f in folder.iterdir() if f.is_dir() and not f.name.startswith("."))


# -- digits ----------------------------------------------------------------------------------------------------------


DIGITS = Path("datasets", "data", "digits.csv.gz")  # 1797 lines (Alpaydin and Kaynak 1998)


@dataclass
class Digits(SplitData):
    """Handwritten digits of scikit-learn, 8 x 8 pixels."""

    name: ClassVar[str] = "digits"
    gives: ClassVar[Kind] = IMAGES

    val_fraction: float = 0.2  # share of each digit held out for validation, the same for every seed; (0, 1]
    augment: str = "none"  # random changes: none, or some of crop flip shift color joined by _
    eval_images: int = 0  # held-out images per evaluation; 0: all

    def check(self) -> None:
        """Raise UserError for invalid settings, Unavailable without scikit-learn."""
        super().check()
        toyexp.require_augmentation(self.augment)
        self._file()

    def _file(self) -> Path:
        # The file behind load_digits; importing scikit-learn would take longer than the first steps.
        spec = importlib.util.find_spec("sklearn")
        if spec is None:
            raise Unavailable("scikit-learn is not installed: pip install 'toyexp[data]'")
        path = Path(*(spec.submodule_search_locations or [])[:1], DIGITS)
        if not path.is_file():
            raise broken_package("scikit-learn", f"there is no {path}")
        return path

    def open(self, vocabulary: Path | None) -> toyexp.ImageDataset:
        """Return all digits, scaled from 0..16 to 8-bit pixels."""
        with gzip.open(self._file(), "rt") as lines:
            table = np.loadtxt(lines, delimiter=",")
        images = np.round(table[:, :64] * (255 / 16)).astype(np.uint8).reshape(-1, 8, 8, 1)
        labels, names = table[:, 64].astype(np.int32), [str(digit) for digit in range(10)]
        return toyexp.ImageDataset(
            images, labels, names, self.val_fraction, augment=self.augment, eval_images=self.eval_images
        )
