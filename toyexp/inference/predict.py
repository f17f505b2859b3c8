"""Compute a model's predictions: logits of any input, and the most probable classes of image files."""

from __future__ import annotations

import base64
import io
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from toyexp.base.errors import UserError, escape_cell, escape_controls
from toyexp.base.files import iter_files, require_file
from toyexp.base.formatting import align_columns, format_csv, pluralise, short_path
from toyexp.base.terminal import print_note
from toyexp.batching.images import Unlabelled
from toyexp.batching.pictures import IMAGE_SUFFIXES, BadImage, iter_images, read_image, scaling_note
from toyexp.config.build import build_engine
from toyexp.formats.gguf.form import gguf_architecture
from toyexp.formats.gguf.read import GGUFFile
from toyexp.inference.evaluate import find_training_run
from toyexp.inference.loaded_model import LoadedModel, fit_rows, pick_engine
from toyexp.interfaces.command import Answer
from toyexp.interfaces.dataset import InputSpec
from toyexp.interfaces.engine import Engine
from toyexp.interfaces.kind import IMAGES
from toyexp.interfaces.model import Model, model_settings
from toyexp.interfaces.session import Session
from toyexp.plugins.registry import Registry

ROWS = 32  # maximum rows of a batch
MAX_PICTURES, SIDE = 1000, 96  # pictures on a page, and their height and width in pixels
PAGE = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8"><meta name="viewport" content="width=device-width"><meta name="generator" content="toyexp">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; font: 15px/1.4 system-ui, sans-serif; overflow-wrap: anywhere; }}
caption, th, td {{ text-align: left; padding-right: 1rem; }}
main {{ display: flex; flex-wrap: wrap; gap: 1rem; margin-top: 2rem; }} figure {{ width: 11rem; margin: 0; }}
</style>
<h1>{title}</h1>
<p>{summary}</p>
<table><caption>Confusions, most frequent first</caption>
<tr><th scope="col">label<th scope="col">predicted<th scope="col">images</tr>
{rows}</table>
<main>
{figures}</main>
"""


@dataclass(frozen=True)
class Prediction:
    """Prediction for one image, or the error of reading it."""

    file: str
    top: Sequence[tuple[str, float]]  # most probable classes with their probabilities, in descending order
    error: str | None = None
    path: Path = Path()
    label: str | None = None  # name of the image's directory, if it is the name of a class

    @property
    def correct(self) -> bool | None:
        """Whether the most probable class is the label; None if the label is unknown or the image unreadable."""
        return self.top[0][0] == self.label if self.top and self.label is not None else None

    def plain(self) -> dict[str, Any]:
        """Return the prediction as plain data; class and probability are null if the image could not be read."""
        best = self.top[0] if self.top else (None, None)
        top = [{"class": name, "probability": share} for name, share in self.top]
        truth = {"label": self.label, "correct": self.correct}
        return {"file": self.file, "class": best[0], "probability": best[1], "top": top, **truth, "error": self.error}


@dataclass(frozen=True)
class Predictions(Answer):
    """Predictions for several images."""

    file: str
    engine: str
    classes: Sequence[str]
    images: Sequence[Prediction]

    @property
    def failures(self) -> list[Prediction]:
        """The images that could not be read."""
        return [image for image in self.images if image.error]

    @property
    def accuracy(self) -> float | None:
        """Fraction of correct predictions among readable images with a label; None if there are none."""
        marks = [image.correct for image in self.images if image.correct is not None]
        return sum(marks) / len(marks) if marks else None

    def plain(self) -> dict[str, Any]:
        """Return all predictions as plain data."""
        facts = {"file": self.file, "engine": self.engine, "classes": list(self.classes), "accuracy": self.accuracy}
        return {**facts, "images": [image.plain() for image in self.images]}

    def lines(self) -> list[str]:
        """Return a line for each readable image, and if there are several, a summary."""
        rows = [
            [image.file, *(f"{name} {share:.1%}" for name, share in image.top)] for image in self.images if image.top
        ]
        table = align_columns([[escape_cell(cell) for cell in row] for row in rows])
        return [*table, "", self.summary()] if len(rows) > 1 else table

    def summary(self) -> str:
        """Return the number of images per class, for the eight most frequent classes, and the accuracy."""
        counts = Counter(image.top[0][0] for image in self.images if image.top)
        classes = ", ".join(f"{escape_cell(name)} ({n})" for name, n in counts.most_common(8))
        more = f" and {len(counts) - 8} more classes" if len(counts) > 8 else ""
        labelled = sum(image.correct is not None for image in self.images)
        share = "" if self.accuracy is None else f"; accuracy {self.accuracy:.4f} of {labelled} with a label"
        return escape_controls(f"{pluralise(counts.total(), 'image')}: {classes}{more}{share}")

    def csv(self) -> str:
        """Return the predictions as CSV, one row per image."""
        rank_count = max((len(image.top) for image in self.images), default=1)
        more = [f"{column}_{rank}" for rank in range(2, rank_count + 1) for column in ("class", "probability")]
        table = [["file", "class", "probability", *more, "label", "correct", "error"]]
        for image in self.images:
            cells = [cell for name, share in image.top for cell in (name, f"{share:.6g}")]
            truth = [image.label or "", "" if image.correct is None else str(image.correct).lower()]
            table.append([image.file, *cells, *[""] * (2 * rank_count - len(cells)), *truth, image.error or ""])
        return format_csv(table)

    def html(self) -> str:
        """Return a page with the wrongly classified images, the most probable first, and the number of each confusion.

        Raise UserError if no image lies in a directory with the name of a class.
        """
        if self.accuracy is None:
            names = ", ".join(self.classes[:3])
            raise UserError(
                f"--html: no image lies in a directory named like one of the model's classes ({names}, ...)"
            )
        wrong = sorted((i for i in self.images if i.correct is False), key=lambda image: -image.top[0][1])
        pairs = Counter((str(image.label), image.top[0][0]) for image in wrong).most_common()
        shown = f" The {MAX_PICTURES} most probable are shown." if len(wrong) > MAX_PICTURES else ""
        return PAGE.format(
            title=escape(f"{self.file}: {pluralise(len(wrong), 'wrongly classified image')}"),
            summary=escape(f"{self.summary()}.{shown}"),
            rows="".join(f"<tr><td>{escape(label)}<td>{escape(name)}<td>{n}</tr>\n" for (label, name), n in pairs),
            figures="".join(map(_figure, wrong[:MAX_PICTURES])),
        )


def _figure(image: Prediction) -> str:
    from PIL import Image

    picture = io.BytesIO()
    Image.fromarray(read_image(image.path, SIDE, color=True, resize=True)).save(picture, "JPEG")
    address, file = f"data:image/jpeg;base64,{base64.b64encode(picture.getvalue()).decode()}", escape(image.file)
    shares = escape(", ".join(f"{name} {share:.1%}" for name, share in image.top))
    return (
        f'<figure><img src="{address}" width="{SIDE}" height="{SIDE}" alt="{file}"><figcaption>'
        f"<b>{escape(str(image.label))}</b>, predicted: {shares}<br>{file}</figcaption></figure>\n"
    )


def list_images(paths: Sequence[Path]) -> list[Path]:
    """List image files at and below `paths`, each once. Raise UserError if a path does not exist or has no images."""
    images: list[Path] = []
    for path in paths:
        if path.is_dir():
            images_inside = sorted(iter_images(path))
            others = sorted({*iter_files(path)} - {*images_inside})
            if not images_inside:
                kinds = ", ".join(sorted(suffix[1:] for suffix in IMAGE_SUFFIXES))
                raise UserError(f"{path}: has no images ({kinds})")
            if others:
                print_note(
                    f"{path}: {pluralise(len(others), 'other file')} left out, such as {escape_cell(str(others[0]))}"
                )
            images += images_inside
        else:
            require_file(path, str(path))
            images.append(path)
    return list(dict.fromkeys(images))


def predict(
    model_path: Path, files: Sequence[Path], top: int, engine: str, registry: Registry, modules: Sequence[str] = ()
) -> Predictions:
    """Return the `top` most probable classes of each image in `files`, and the class that its directory names.

    `engine` is a label such as `auto` or `cpu:threads=1`, and `modules` are the local plugins that are loaded. Raise
    UserError if the model does not read images, if no image file is readable, or if a plugin of the model's run is not
    loaded.
    """
    loaded, training_run = LoadedModel.open(model_path, registry), find_training_run(model_path, modules)
    reader = ImageInput.from_file(loaded.file, loaded.model, model_path)
    resize = training_run is None or training_run.data.get("resize") is not False
    rows = min(ROWS, len(files))
    chosen_engine, note = pick_engine(engine, registry, rows)
    predictions: list[Prediction] = []
    sizes: set[tuple[int, int]] = set()
    blank = np.zeros((1, reader.size, reader.size, reader.channels), np.uint8)
    with loaded.session(chosen_engine, reader.arrays(blank, rows)[1], rows) as session:
        for first in range(0, len(files), ROWS):
            predictions += _predict_batch(files[first : first + ROWS], reader, resize, session, top, sizes)
    if all(image.error for image in predictions):
        others = f" (nor can {len(predictions) - 1} others)" if predictions[1:] else ""
        raise UserError(f"{predictions[0].file}: {predictions[0].error}{others}")
    for line in scaling_note(sizes, reader.size):
        print_note(line)
    return Predictions(loaded.name, note, reader.classes, predictions)


def _predict_batch(
    files: Sequence[Path], reader: ImageInput, resize: bool, session: Session, top: int, sizes: set[tuple[int, int]]
) -> Iterator[Prediction]:
    images_by_file: dict[Path, np.ndarray] = {}
    errors: dict[Path, str] = {}
    for file in files:
        try:
            images_by_file[file] = read_image(file, reader.size, reader.channels == 3, resize, sizes)
        except BadImage as reason:
            errors[file] = str(reason)
    shares: Iterator[np.ndarray] = iter(())
    if images_by_file:
        images = np.stack(list(images_by_file.values()))
        shares = iter(probabilities(session.logits(reader.arrays(images, session.plan.rows)[0])))
    for file in files:
        folder = file.absolute().parent.name
        label, best = folder if folder in reader.classes else None, []
        if file not in errors:
            probability = next(shares)
            order = np.argsort(-probability, kind="stable")[:top]
            best = [(reader.classes[i], float(probability[i])) for i in order]
        yield Prediction(short_path(file), best, errors.get(file), file, label)


def probabilities(logits: np.ndarray) -> np.ndarray:
    """Return the softmax of logits [N, classes], in float64."""
    wide = logits.astype(np.float64)
    shares = np.exp(wide - wide.max(-1, keepdims=True))
    return shares / shares.sum(-1, keepdims=True)


# -- image preprocessing ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ImageInput:
    """Image preprocessing of a model, read from its file."""

    model: Model
    size: int  # pixels along a side
    channels: int
    classes: Sequence[str]
    mean: np.ndarray  # per channel, of pixel values from 0 to 1
    std: np.ndarray

    @classmethod
    def from_file(cls, file: GGUFFile, model: Model, model_path: Path) -> ImageInput:
        """Read the preprocessing from a file. Raise UserError if its model reads no images or a key is missing."""
        if model.reads != IMAGES:
            hint = "toyexp generate, or toyexp eval" if model.reads.sequence else "toyexp eval"
            raise UserError(f"{model_path}: a {model.name} reads {model.reads}, but predict takes images; try {hint}")
        size, channels = (model_settings(model).get(name) for name in ("image_size", "channels"))
        if not isinstance(size, int) or size < 1 or channels not in (1, 3):
            raise file.error("has no valid image_size and channels (1 or 3)")
        keys = (file.metadata.get(f"{gguf_architecture(model)}.{name}") for name in ("image_mean", "image_std"))
        mean, std = map(_numbers, keys)
        if not (mean.shape == std.shape == (channels,) and np.isfinite([mean, std]).all() and (std > 0).all()):
            raise file.error("has no valid pixel mean and standard deviation (image_mean, image_std)")
        labels = file.metadata.get(f"{gguf_architecture(model)}.classes")
        names = [str(name) for name in labels] if isinstance(labels, list) else []
        count = int(model_settings(model).get("classes") or len(names))
        classes = [*names[:count], *(f"class {i}" for i in range(len(names), count))]
        return cls(model, size, channels, classes, mean, std)

    def arrays(self, images: np.ndarray, rows: int) -> tuple[dict[str, np.ndarray], Mapping[str, InputSpec]]:
        """Convert uint8 images [N, size, size, channels] to the model's input arrays.

        Return the arrays by input name, and the spec (shape and dtype) of each input in batches of `rows` rows.
        """
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


def logits(loaded: LoadedModel, inputs: Any, engine: str | Engine = "auto") -> np.ndarray:
    """Return the float32 logits of a text, of token ids [T] or [B, T], or of uint8 images [N, H, W, channels].

    The last axis has an entry per token of the vocabulary, or per class of an image model. For a single text, sequence
    or image, the result has no batch axis.
    """
    arrays, specs, single = _inputs(loaded, inputs)
    rows = min(max((len(array) for array in arrays.values()), default=1), ROWS)
    chosen_engine = build_engine(engine, loaded.registry) if isinstance(engine, str) else engine
    with loaded.session(fit_rows(chosen_engine, "", rows)[0], specs, rows) as session:
        result = session.logits(arrays)
    return result[0] if single else result


def _inputs(loaded: LoadedModel, inputs: Any) -> tuple[dict[str, np.ndarray], Mapping[str, InputSpec], bool]:
    """Convert a text, token ids or images to a batch of the model.

    Return the batch's arrays by input name, the spec (shape and dtype) of each input, and True if `inputs` was a single
    text, sequence or image without a batch axis.
    """
    model: Any = loaded.model
    name = model.reads.sequence
    if not name:
        return _images(loaded, inputs)
    ids = loaded.tokenizer().prompt(inputs) if isinstance(inputs, str) else token_ids("logits", inputs, (1, 2))
    vocab, context = int(model.vocab), int(model.context)
    if ids.min() < 0 or ids.max() >= vocab:
        raise UserError(f"logits: token ids must be between 0 and {vocab - 1}, got {ids.min()} to {ids.max()}")
    if ids.shape[-1] > context:
        raise UserError(f"logits: {pluralise(ids.shape[-1], 'token')} exceed the model's context of {context}")
    rows = np.atleast_2d(ids).astype(np.int32)
    return {name: rows}, model.reads.inputs(rows.shape[1]), ids.ndim == 1


def _images(loaded: LoadedModel, inputs: Any) -> tuple[dict[str, np.ndarray], Mapping[str, InputSpec], bool]:
    reader = ImageInput.from_file(loaded.file, loaded.model, loaded.path)
    images, expected = _array("logits", inputs), (reader.size, reader.size, reader.channels)
    single = images.ndim == 3
    images = images[None] if single else images
    if images.dtype != np.uint8 or images.shape[1:] != expected or not len(images):
        shape = ", ".join(map(str, expected))
        raise UserError(f"logits: expected uint8 images [N, {shape}], got {list(images.shape)} of {images.dtype}")
    return *reader.arrays(images, min(len(images), ROWS)), single


def token_ids(call: str, inputs: Any, axes: Sequence[int]) -> np.ndarray:
    """Return token ids as an integer array. Raise UserError for another dtype or number of axes.

    `axes` are the allowed numbers of axes, and `call` is the API call that error messages name.
    """
    ids = _array(call, inputs)
    if ids.ndim not in axes or ids.dtype.kind not in "iu" or not ids.size:
        shapes = " or ".join(("[T]", "[B, T]")[n - 1] for n in axes)
        raise UserError(f"{call}: expected a text or token ids {shapes}, got {list(ids.shape)} of {ids.dtype}")
    return ids


def _array(call: str, inputs: Any) -> np.ndarray:
    try:
        return np.asarray(inputs)
    except ValueError:
        raise UserError(f"{call}: all rows must have the same length") from None
