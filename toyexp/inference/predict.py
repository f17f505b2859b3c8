"""Compute what a model says of inputs: logits, and of image files the likeliest classes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from toyexp.base.errors import UserError, escape_cell, escape_controls
from toyexp.base.files import require_file
from toyexp.base.formatting import align_columns, format_csv, pluralise, short_path
from toyexp.base.terminal import print_note
from toyexp.batching.images import Unlabelled
from toyexp.batching.pictures import IMAGE_SUFFIXES, BadImage, iter_files, iter_images, read_image, scaling_note
from toyexp.config.build import build_engine
from toyexp.formats.gguf.form import gguf_architecture
from toyexp.formats.gguf.read import GGUFFile
from toyexp.inference.evaluate import read_trained
from toyexp.inference.loaded_model import LoadedModel, fit_rows, pick_engine
from toyexp.interfaces.command import Answer
from toyexp.interfaces.dataset import InputSpec
from toyexp.interfaces.engine import Engine
from toyexp.interfaces.kind import IMAGES
from toyexp.interfaces.model import Model, model_settings
from toyexp.interfaces.session import Session
from toyexp.plugins.registry import Registry

ROWS = 32  # images that are computed at a time


@dataclass(frozen=True)
class Prediction:
    """What a model says of an image, or why it says nothing."""

    file: str
    top: Sequence[tuple[str, float]]  # its likeliest classes with their probabilities, from the likeliest down
    error: str | None = None

    def plain(self) -> dict[str, Any]:
        """As plain data; what is not known is null."""
        best = self.top[0] if self.top else (None, None)
        top = [{"class": name, "probability": share} for name, share in self.top]
        return {"file": self.file, "class": best[0], "probability": best[1], "top": top, "error": self.error}


@dataclass(frozen=True)
class Predictions(Answer):
    """What a model says of images."""

    file: str
    engine: str
    classes: Sequence[str]
    images: Sequence[Prediction]

    @property
    def failed(self) -> list[Prediction]:
        """Those that could not be read."""
        return [image for image in self.images if image.error]

    def plain(self) -> dict[str, Any]:
        """All of it."""
        images = [image.plain() for image in self.images]
        return {"file": self.file, "engine": self.engine, "classes": list(self.classes), "images": images}

    def lines(self) -> list[str]:
        """A line for each image, and of several how many are of which class."""
        rows = [
            [image.file, *(f"{name} {share:.1%}" for name, share in image.top)] for image in self.images if image.top
        ]
        table = align_columns([[escape_cell(cell) for cell in row] for row in rows])
        return [*table, "", self.summary()] if len(rows) > 1 else table

    def summary(self) -> str:
        """How many images are of which class."""
        found = Counter(image.top[0][0] for image in self.images if image.top)
        told = ", ".join(f"{escape_cell(name)} ({n})" for name, n in found.most_common(8))
        more = f" and {len(found) - 8} more classes" if len(found) > 8 else ""
        return escape_controls(f"{pluralise(found.total(), 'image')}: {told}{more}")

    def csv(self) -> str:
        """A row for each image."""
        places = max((len(image.top) for image in self.images), default=1)
        more = [f"{what}_{place}" for place in range(2, places + 1) for what in ("class", "probability")]
        table = [["file", "class", "probability", *more, "error"]]
        for image in self.images:
            cells = [cell for name, share in image.top for cell in (name, f"{share:.6g}")]
            table.append([image.file, *cells, *[""] * (2 * places - len(cells)), image.error or ""])
        return format_csv(table)


def list_images(places: Sequence[Path]) -> list[Path]:
    """The image files meant, each once; UserError for a name under which nothing is, and a folder without images."""
    found: list[Path] = []
    for place in places:
        if place.is_dir():
            inside = sorted(f for f in iter_images(place) if not f.name.startswith("."))
            others = sorted({*iter_files(place)} - {*inside})
            if not inside:
                kinds = ", ".join(sorted(suffix[1:] for suffix in IMAGE_SUFFIXES))
                raise UserError(f"{place}: there is no image in this folder ({kinds})")
            if others:
                print_note(
                    f"{place}: {pluralise(len(others), 'other file')} left out, such as {escape_cell(str(others[0]))}"
                )
            found += inside
        else:
            require_file(place, str(place))
            found.append(place)
    return list(dict.fromkeys(found))


def predict(
    what: Path, files: Sequence[Path], top: int, engine: str, registry: Registry, modules: Sequence[str] = ()
) -> Predictions:
    """Return what a model says of image files; UserError for a model of something else, and if no file can be read."""
    loaded, trained = LoadedModel.open(what, registry), read_trained(what, modules)
    seen = ImageInput.of(loaded.file, loaded.model, what)
    resize = trained is None or trained.data.get("resize") is not False
    rows = min(ROWS, len(files))
    computes, note = pick_engine(engine, registry, rows)
    found: list[Prediction] = []
    sizes: set[tuple[int, int]] = set()
    blank = np.zeros((1, seen.size, seen.size, seen.channels), np.uint8)
    with loaded.session(computes, seen.arrays(blank, rows)[1], rows) as session:
        for first in range(0, len(files), ROWS):
            found += _part(files[first : first + ROWS], seen, resize, session, top, sizes)
    if all(image.error for image in found):
        others = f" (nor any of {len(found) - 1} others)" if found[1:] else ""
        raise UserError(f"{found[0].file}: {found[0].error}{others}")
    for line in scaling_note(sizes, seen.size):
        print_note(line)
    return Predictions(loaded.name, note, seen.classes, found)


def _part(
    files: Sequence[Path], seen: ImageInput, resize: bool, session: Session, top: int, sizes: set[tuple[int, int]]
) -> Iterator[Prediction]:
    read: dict[Path, np.ndarray] = {}
    errors: dict[Path, str] = {}
    for file in files:
        try:
            read[file] = read_image(file, seen.size, seen.channels == 3, resize, sizes)
        except BadImage as reason:
            errors[file] = str(reason)
    shares: Iterator[np.ndarray] = iter(())
    if read:
        images = np.stack(list(read.values()))
        shares = iter(probabilities(session.logits(seen.arrays(images, session.plan.rows)[0])))
    for file in files:
        if file in errors:
            yield Prediction(short_path(file), (), errors[file])
            continue
        of_one = next(shares)
        best = np.argsort(-of_one, kind="stable")[:top]
        yield Prediction(short_path(file), [(seen.classes[i], float(of_one[i])) for i in best])


def probabilities(logits: np.ndarray) -> np.ndarray:
    """Return the softmax of logits [N, classes], in float64."""
    raised = logits.astype(np.float64)
    shares = np.exp(raised - raised.max(-1, keepdims=True))
    return shares / shares.sum(-1, keepdims=True)


# -- how a model of images sees them ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class ImageInput:
    """How a model of images sees them, by its file."""

    model: Model
    size: int  # pixels along a side
    channels: int
    classes: Sequence[str]
    mean: np.ndarray  # of pixels from 0 to 1, by channel
    std: np.ndarray

    @classmethod
    def of(cls, file: GGUFFile, model: Model, what: Path) -> ImageInput:
        """That of an open file; UserError for one that holds no such model, or does not say all of it."""
        if model.reads != IMAGES:
            hint = "toyexp generate, or toyexp eval" if model.reads.sequence else "toyexp eval"
            raise UserError(f"{what}: a {model.name} reads {model.reads}, and predict is for images; try {hint}")
        size, channels = (model_settings(model).get(name) for name in ("image_size", "channels"))
        if not isinstance(size, int) or size < 1 or channels not in (1, 3):
            raise file.error("does not say which images its model reads (image_size; channels, 1 or 3)")
        keys = (file.metadata.get(f"{gguf_architecture(model)}.{name}") for name in ("image_mean", "image_std"))
        mean, std = map(_numbers, keys)
        if not (mean.shape == std.shape == (channels,) and np.isfinite([mean, std]).all() and (std > 0).all()):
            raise file.error("does not say by which mean and deviation its model sees pixels (image_mean, image_std)")
        named = file.metadata.get(f"{gguf_architecture(model)}.classes")
        names = [str(name) for name in named] if isinstance(named, list) else []
        count = int(model_settings(model).get("classes") or len(names))
        classes = [*names[:count], *(f"class {i}" for i in range(len(names), count))]
        return cls(model, size, channels, classes, mean, std)

    def arrays(self, images: np.ndarray, rows: int) -> tuple[dict[str, np.ndarray], Mapping[str, InputSpec]]:
        """Return 8-bit images [N, size, size, channels] as the model's inputs, and the specs of these by `rows`."""
        batches = self.model.batches(Unlabelled(images, self.classes, self.mean, self.std), rows, 0)
        parts = list(batches.held_out())
        arrays = {name: np.concatenate([part[name] for part in parts])[: len(images)] for name in self.model.inputs()}
        return arrays, batches.inputs


def _numbers(value: object) -> np.ndarray:
    try:
        return np.asarray(value, np.float64)
    except (TypeError, ValueError):
        return np.empty(0)


# -- logits -----------------------------------------------------------------------------------------------------------


def logits(loaded: LoadedModel, given: Any, engine: str | Engine = "auto") -> np.ndarray:
    """Return the float32 logits of a text, ids [T] or [B, T], or uint8 images [N, H, W, channels]."""
    arrays, specs, single = _inputs(loaded, given)
    rows = min(max((len(array) for array in arrays.values()), default=1), ROWS)
    computes = build_engine(engine, loaded.registry) if isinstance(engine, str) else engine
    with loaded.session(fit_rows(computes, "", rows)[0], specs, rows) as session:
        found = session.logits(arrays)
    return found[0] if single else found


def _inputs(loaded: LoadedModel, given: Any) -> tuple[dict[str, np.ndarray], Mapping[str, InputSpec], bool]:
    """Return the arrays of a batch, what they are, and whether one row was given without its axis."""
    model: Any = loaded.model
    name = model.reads.sequence
    if not name:
        return _images(loaded, given)
    ids = loaded.tokenizer().prompt(given) if isinstance(given, str) else token_ids("logits", given, (1, 2))
    vocab, context = int(model.vocab), int(model.context)
    if ids.min() < 0 or ids.max() >= vocab:
        raise UserError(f"logits: the ids run from {ids.min()} to {ids.max()}, the model's from 0 to {vocab - 1}")
    if ids.shape[-1] > context:
        raise UserError(f"logits: {pluralise(ids.shape[-1], 'token')} are more than the model's context of {context}")
    rows = np.atleast_2d(ids).astype(np.int32)
    return {name: rows}, model.reads.inputs(rows.shape[1]), ids.ndim == 1


def _images(loaded: LoadedModel, given: Any) -> tuple[dict[str, np.ndarray], Mapping[str, InputSpec], bool]:
    seen = ImageInput.of(loaded.file, loaded.model, loaded.path)
    images, wanted = _array("logits", given), (seen.size, seen.size, seen.channels)
    single = images.ndim == 3
    images = images[None] if single else images
    if images.dtype != np.uint8 or images.shape[1:] != wanted or not len(images):
        shape = ", ".join(map(str, wanted))
        raise UserError(f"logits: takes uint8 images [N, {shape}], not {list(images.shape)} of {images.dtype}")
    return *seen.arrays(images, min(len(images), ROWS)), single


def token_ids(call: str, given: Any, axes: Sequence[int]) -> np.ndarray:
    """Return token ids as an array of so many axes; UserError for what are none."""
    ids = _array(call, given)
    if ids.ndim not in axes or ids.dtype.kind not in "iu" or not ids.size:
        shapes = " or ".join(("[T]", "[B, T]")[n - 1] for n in axes)
        raise UserError(f"{call}: takes a text, or token ids {shapes}, not {list(ids.shape)} of {ids.dtype}")
    return ids


def _array(call: str, given: Any) -> np.ndarray:
    try:
        return np.asarray(given)
    except ValueError:
        raise UserError(f"{call}: takes rows of equal length") from None
