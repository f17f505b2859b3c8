"""Images and class labels as batches of numpy arrays; batch k depends only on (seed, k)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from toyexp.base.errors import UserError, printable
from toyexp.base.random import stream
from toyexp.interfaces.dataset import Batch, Batches, Dataset, InputSpec

AUGMENTATIONS = ("none", "flip", "shift", "flip_shift")
NORMALISATIONS = ("train", "fixed")
MAX_NAMED = 12  # number of class names that a run's output lists


class ImageDataset(Dataset):
    """Dataset of 8-bit images [N, height, width, channels], one class per image, with a training and a held-out set."""

    def __init__(
        self,
        images: np.ndarray,
        labels: np.ndarray,
        classes: Sequence[str],
        val_fraction: float,
        normalise: str = "train",
        augment: str = "none",
        eval_images: int = 0,
        facts: Mapping[str, Any] | None = None,
        left_out: Sequence[str] = (),
        remarks: Sequence[str] = (),
        held_out: np.ndarray | None = None,
    ):
        """Hold out the images where `held_out` [N] is true; if it is None, hold out `val_fraction` of each class."""
        held_out = held_out_mask(labels, val_fraction) if held_out is None else held_out
        if not held_out.any():
            problem = f"data.val_fraction={val_fraction} holds out none of {len(labels)} images"
            raise UserError(f"{problem}: use more images per class or a larger fraction")
        self.classes, self.vocab = tuple(classes), len(classes)
        self.image_shape: tuple[int, ...] = images.shape[1:]
        self.train = images[~held_out], labels[~held_out].astype(np.int32)
        self.held_out = images[held_out], labels[held_out].astype(np.int32)
        channels = self.image_shape[-1]
        training = self.train[0] if len(self.train[0]) else images  # all may be held out, for an evaluation
        halves = np.full(channels, 0.5)
        self.mean, self.std = mean_and_std(training) if normalise == "train" else (halves, halves)
        self._augment, self._eval_images, self._left_out, self._remarks = augment, eval_images, left_out, remarks
        digest = hashlib.sha256(images.tobytes())
        digest.update(labels.astype(np.int32).tobytes())
        self._facts = {
            **(facts or {}),
            "train_images": len(self.train[1]),
            "held_out_images": len(self.held_out[1]),
            "classes": len(classes),
            "image_shape": list(self.image_shape),
            "images_sha256": digest.hexdigest(),
            "classes_digest": hashlib.sha256(json.dumps(list(classes)).encode()).hexdigest()[:16],
        }

    def describe(self) -> dict[str, Any]:
        """Return image counts, image shape, and digests of pixels and classes."""
        return self._facts

    def omissions(self) -> Sequence[str]:
        """Return a note for each part of the source data that was left out, such as unreadable images."""
        return self._left_out

    def remarks(self) -> list[str]:
        """Return lines to print: the classes, the augmentation, and notes of the code that read the images."""
        names = [printable(name) for name in self.classes[:MAX_NAMED]]
        more = [f"and {self.vocab - MAX_NAMED} more"] if self.vocab > MAX_NAMED else []
        augment = [f"data.augment={self._augment}"] if self._augment != "none" else []
        return [f"{self.vocab} classes: {', '.join([*names, *more])}", *augment, *self._remarks]

    def gguf_metadata(self) -> dict[str, Any]:
        """Return the metadata that a model's file stores: class names, and the mean and std of each channel.

        A pixel, scaled to 0 to 1, enters the model as (pixel - mean) / std.
        """
        mean, std = ([float(x) for x in values] for values in (self.mean, self.std))
        return {"classes": list(self.classes), "image_mean": mean, "image_std": std}

    def match_preprocessing(self, metadata: Mapping[str, Any]) -> None:
        """Use the pixel mean, the pixel std and the class numbers of a trained model, given the `metadata` of its file.

        Raise UserError if the data has a class that the model does not know.
        """
        for name in ("image_mean", "image_std"):
            value = self.gguf_metadata()[name]
            stored = _numbers(name, metadata.get(name, value))
            is_equal = stored.shape != np.shape(value) or np.allclose(stored, value, rtol=1e-6)  # stored as float32
            if not is_equal:
                setattr(self, name.removeprefix("image_"), stored)
        model_classes = metadata.get("classes", list(self.classes))
        if not isinstance(model_classes, list):
            raise UserError(f"the file's classes are {printable(str(model_classes))}, expected a list of names")
        unknown = [name for name in self.classes if name not in model_classes]
        if unknown and self.classes == tuple(map(str, range(self.vocab))) and self.vocab <= len(model_classes):
            return  # class names that are only numbers: equal to the model's numbers
        if unknown:
            names = printable(", ".join(model_classes))
            raise UserError(
                f"the data has the class {printable(unknown[0])}, but the model knows {names}; "
                "to train a new output layer for them: recipe=full recipe.new_head=true"
            )
        numbers = np.array([model_classes.index(name) for name in self.classes], np.int32)
        self.train, self.held_out = ((images, numbers[labels]) for images, labels in (self.train, self.held_out))
        self.classes, self.vocab = tuple(model_classes), len(model_classes)

    def batches(self, context: int, rows: int, seed: int) -> ImageBatches:
        """Return batches of `rows` images; `context` has no effect."""
        return ImageBatches(self, rows, seed, self._augment, self._eval_images)


class Unlabelled(ImageDataset):
    """Dataset of images without labels for inference, normalised with the pixel `mean` and `std` of a model.

    The images are 8-bit arrays [N, height, width, channels]; `classes` are the names of the model's classes.
    """

    def __init__(self, images: np.ndarray, classes: Sequence[str], mean: np.ndarray, std: np.ndarray):
        self.classes, self.vocab = tuple(classes), len(classes)
        self.image_shape = images.shape[1:]
        self.train = self.held_out = images, np.zeros(len(images), np.int32)
        self.mean, self.std = mean, std
        self._augment, self._eval_images, self._left_out, self._remarks = "none", 0, (), ()
        self._facts = {"images": len(images)}


class ImageBatches(Batches):
    """Batches of images; each image occurs once per epoch. Order and augmentation depend on (seed, epoch)."""

    def __init__(self, dataset: ImageDataset, rows: int, seed: int, augment: str, eval_images: int):
        self._train, self._held_out = dataset.train, dataset.held_out
        self._rows, self._seed = rows, seed
        self._flip, self._shift = "flip" in augment, "shift" in augment
        self._eval_images = eval_images or len(self._held_out[1])
        self.rows_per_epoch = len(self._train[1])
        self._factor = (1 / (255 * dataset.std)).astype(np.float32)
        self._offset = (dataset.mean / dataset.std).astype(np.float32)
        self._epoch_draws = lru_cache(maxsize=2)(self._draw)
        self.inputs = {
            "images": InputSpec(dataset.image_shape, "float32"),
            "targets": InputSpec((), "int32", below=dataset.vocab),
            "weights": InputSpec((), "float32"),
        }

    def _draw(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the order of the images in an epoch, and for each image 64 random bits for its augmentation."""
        count = len(self._train[1])
        words = stream(self._seed, "data-order", epoch).random_raw(count)
        return np.argsort(words, kind="stable"), stream(self._seed, "augment", epoch).random_raw(count)

    def batch(self, k: int) -> Batch:
        """Return training batch `k`: images [rows, height, width, channels], targets [rows], weights [rows]."""
        images, labels = self._train
        selected, words = [], []
        for number in range(k * self._rows, (k + 1) * self._rows):
            epoch, index = divmod(number, len(labels))
            order, bits = self._epoch_draws(epoch)
            selected.append(order[index])
            words.append(int(bits[index]))
        picked = images[selected]
        if self._flip or self._shift:
            pairs = zip(picked, words, strict=True)
            picked = np.stack([augment_image(image, bits, self._flip, self._shift) for image, bits in pairs])
        return self._batch(picked, labels[selected])

    def held_out(self) -> Sequence[Batch]:
        """Return batches of held-out images.

        The setting `eval_images` limits the number of images; 0 means all. If images are left out, the ones in the
        batches are spread evenly over the held-out set. Padding rows of the last batch have weight 0.
        """
        images, labels = self._held_out
        count = min(len(labels), self._eval_images)
        indices = np.arange(count) * len(labels) // count
        batches = []
        for first in range(0, count, self._rows):
            part = indices[first : first + self._rows]
            padded = np.resize(part, self._rows)  # repeated rows fill the batch, with weight 0
            batch = self._batch(images[padded], labels[padded])
            batch["weights"][len(part) :] = 0
            batches.append(batch)
        return batches

    def _batch(self, images: np.ndarray, labels: np.ndarray) -> dict[str, np.ndarray]:
        pixels = images.astype(np.float32) * self._factor - self._offset
        return {"images": pixels, "targets": labels, "weights": np.ones(len(labels), np.float32)}


def _numbers(name: str, value: object) -> np.ndarray:
    """Convert `value`, the pixel mean or std in a model's file, to an array. Raise UserError for invalid numbers."""
    try:
        array = np.asarray(value, np.float64)
    except (TypeError, ValueError):
        array = np.full(1, np.nan)
    if not np.isfinite(array).all() or (name == "image_std" and not (array > 0).all()):
        raise UserError(f"the file's {name} is {printable(str(value))}, expected finite numbers (image_std: above 0)")
    return array


def held_out_mask(labels: np.ndarray, fraction: float) -> np.ndarray:
    """Return a mask [N] that is True for the held-out images: the share `fraction` of each class.

    The mask does not depend on the run's seed. Unless `fraction` is 1, at least one image of each class is left for
    training.
    """
    order = np.argsort(stream("held-out").random_raw(len(labels)), kind="stable")
    mask = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        of_class = order[labels[order] == label]
        mask[of_class[: min(round(len(of_class) * fraction), len(of_class) - (fraction < 1))]] = True
    return mask


def mean_and_std(images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean and the standard deviation of each channel of 8-bit images, on a scale from 0 to 1.

    A deviation of 0 is replaced by 1.
    """
    values = np.arange(256) / 255
    means, deviations = [], []
    for channel in range(images.shape[-1]):  # from counts of each pixel value
        share = sum(np.bincount(image[..., channel].ravel(), minlength=256) for image in images) / images[..., 0].size
        mean = float((share * values).sum())
        means.append(mean)
        # A constant channel has a deviation of 0, which cannot divide.
        deviations.append(float(np.sqrt((share * (values - mean) ** 2).sum())) or 1.0)
    return np.array(means), np.array(deviations)


def augment_image(image: np.ndarray, bits: int, flip: bool, shift: bool) -> np.ndarray:
    """Return an image [height, width, channels] that is randomly mirrored (if `flip`) and shifted (if `shift`).

    The random bits in the integer `bits` determine whether the image is mirrored, and how far it is shifted. A shift is
    at most an eighth of the height and width, or one pixel if that is more.
    """
    if flip and bits & 1:
        image = image[:, ::-1]
    if shift:
        height, width = image.shape[:2]
        y, x = max(height // 8, 1), max(width // 8, 1)
        down, right = (bits >> 8) % (2 * y + 1), (bits >> 32) % (2 * x + 1)
        image = np.pad(image, ((y, y), (x, x), (0, 0)), mode="edge")[down : down + height, right : right + width]
    return image
