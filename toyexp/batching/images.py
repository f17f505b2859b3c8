"""Images and class labels as batches of numpy arrays; batch k depends only on (seed, k)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Container, Mapping, Sequence
from typing import Any

import numpy as np

from toyexp.base.errors import UserError, printable
from toyexp.base.random import generator, stream
from toyexp.batching.epochs import EpochBatches
from toyexp.interfaces.dataset import Dataset, InputSpec

AUGMENTATIONS = ("crop", "flip", "shift", "color")
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
        sampler: str = "shuffle",
        mixup: float = 0.0,
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
        self.augment, self.eval_images, self.sampler, self.mixup = augment, eval_images, sampler, mixup
        digest = hashlib.sha256(images.tobytes())
        digest.update(labels.astype(np.int32).tobytes())
        self._left_out, self._remarks = left_out, remarks
        self._facts = {
            **(facts or {}),
            "train_images": len(self.train[1]),
            "held_out_images": len(self.held_out[1]),
            "classes": len(classes),
            "image_shape": list(self.image_shape),
            "images_sha256": digest.hexdigest(),
            "classes_digest": hashlib.sha256(json.dumps(list(classes)).encode()).hexdigest()[:16],
        }

    def remarks(self) -> list[str]:
        """Return lines to print: the classes, the augmentation, and notes of the code that read the images."""
        names = [printable(name) for name in self.classes[:MAX_NAMED]]
        more = [f"and {self.vocab - MAX_NAMED} more"] if self.vocab > MAX_NAMED else []
        defaults = {"augment": "none", "sampler": "shuffle", "mixup": 0}
        changes = [f"data.{n}={getattr(self, n)}" for n, default in defaults.items() if getattr(self, n) != default]
        return [f"{self.vocab} classes: {', '.join([*names, *more])}", *changes, *self._remarks]

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
                "to train a new output layer for them: recipe.new_head=true with recipe=full or lora"
            )
        numbers = np.array([model_classes.index(name) for name in self.classes], np.int32)
        self.train, self.held_out = ((images, numbers[labels]) for images, labels in (self.train, self.held_out))
        self.classes, self.vocab = tuple(model_classes), len(model_classes)

    def batches(self, context: int, rows: int, seed: int) -> ImageBatches:
        """Return batches of `rows` images; `context` has no effect."""
        return ImageBatches(self, rows, seed)


class Unlabelled(ImageDataset):
    """Dataset of images without labels for inference, normalised with the pixel `mean` and `std` of a model.

    The images are 8-bit arrays [N, height, width, channels]; `classes` are the names of the model's classes.
    """

    def __init__(self, images: np.ndarray, classes: Sequence[str], mean: np.ndarray, std: np.ndarray):
        count = len(images)
        super().__init__(images, np.zeros(count, np.int32), classes, 1, "fixed", held_out=np.ones(count, bool))
        self.mean, self.std = mean, std


class ImageBatches(EpochBatches):
    """Batches of images; order, augmentation and mixup depend on (seed, epoch).

    With the sampler `shuffle` each image occurs once per epoch. With `balanced` each class has the same number of rows,
    and an epoch about as many rows as there are images: all images of a class occur equally often, up to 1.
    """

    def __init__(self, dataset: ImageDataset, rows: int, seed: int):
        self._train, self._held_out, self._mixup = dataset.train, dataset.held_out, dataset.mixup
        self._augment = set(dataset.augment.split("_")) - {"none"}
        self._groups = self._train[1] if dataset.sampler == "balanced" else 0 * self._train[1]  # group of each image
        groups = len(np.unique(self._groups))
        count, held_out_count = -(-len(self._groups) // max(groups, 1)) * groups, len(self._held_out[1])
        super().__init__(count, held_out_count, rows, seed, dataset.eval_images or held_out_count)
        self._factor = (1 / (255 * dataset.std)).astype(np.float32)
        self._offset = (dataset.mean / dataset.std).astype(np.float32)
        self.inputs = {
            "images": InputSpec(dataset.image_shape, "float32"),
            "targets": InputSpec((), "int32", below=dataset.vocab),
            "weights": InputSpec((), "float32"),
        }
        if self._mixup:
            self.inputs["second_targets"] = InputSpec((), "int32", below=dataset.vocab, optional=True)
            self.inputs["second_shares"] = InputSpec((), "float32", optional=True)

    def _epoch_order(self, epoch: int) -> np.ndarray:
        """Return for each row of an epoch the number of its image, and 8 words that determine the augmentation.

        With mixup, a row has two images with their words, and the share of the second one.
        """

        def permutation(name: str, count: int) -> np.ndarray:
            return np.argsort(stream(self._seed, name, epoch).random_raw(count), kind="stable")

        order, count = permutation("data-order", len(self._groups)), self._count
        if (groups := np.unique(self._groups)).size > 1:
            parts = [np.resize(order[self._groups[order] == group], count // len(groups)) for group in groups]
            order = np.concatenate(parts)[permutation("class-order", count)]
        words = stream(self._seed, "augment", epoch).random_raw(8 * count).reshape(8, count).T
        images = 1 + bool(self._mixup)
        rows = np.zeros(count, [("images", "i8", (images,)), ("words", "u8", (images, 8)), ("share", "f4")])
        rows["images"], rows["words"] = order[:, None], words[:, None]
        if self._mixup:
            partners = permutation("mixup-order", count)
            rows["images"][:, 1], rows["words"][:, 1] = order[partners], words[partners]
            rows["share"] = generator(self._seed, f"mixup/{epoch}").beta(self._mixup, self._mixup, count)
        return rows

    def _take(self, items: np.ndarray, is_held_out: bool) -> dict[str, np.ndarray]:
        """Return a batch: images [rows, height, width, channels], targets [rows], weights [rows].

        With mixup (Zhang et al. 2018), an image is (1 - m) x_i + m x_j, with m from Beta(mixup, mixup). The batch then
        also has the classes of the images j, second_targets [rows], and the numbers m, second_shares [rows].
        """
        if is_held_out:
            return self._batch(self._held_out[0][items], self._held_out[1][items])
        batch = self._read(items, 0)
        if self._mixup:
            second, shares = self._read(items, 1), np.ascontiguousarray(items["share"])
            batch["images"] += shares[:, None, None, None] * (second["images"] - batch["images"])
            batch |= {"second_targets": second["targets"], "second_shares": shares}
        return batch

    def _read(self, items: np.ndarray, place: int) -> dict[str, np.ndarray]:
        """Return a batch of the first images of the rows `items`, or of the second ones, with augmentation."""
        numbers = items["images"][:, place]
        picked = self._train[0][numbers]
        if self._augment:
            pairs = zip(picked, items["words"][:, place], strict=True)
            picked = np.stack([augment_image(*pair, self._augment) for pair in pairs])
        return self._batch(picked, self._train[1][numbers])

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


def require_augmentation(augment: str) -> None:
    """Raise UserError unless `augment` is none, or names of AUGMENTATIONS joined by `_`, each at most once."""
    parts = augment.split("_")
    if augment != "none" and not (set(parts) <= {*AUGMENTATIONS} and len({*parts}) == len(parts)):
        allowed = f"must be none, or some of {', '.join(AUGMENTATIONS)} joined by _, such as crop_flip"
        raise UserError(f"data.augment={printable(augment)}: {allowed}")


def augment_image(image: np.ndarray, words: np.ndarray, parts: Container[str]) -> np.ndarray:
    """Return an 8-bit image [height, width, channels] with the random changes `parts`, a subset of AUGMENTATIONS.

    `words` are 8 random 64-bit words, which determine the changes. `flip` mirrors half of the images. A shift is at
    most an eighth of the height and width, or one pixel if that is more. `crop` calls `crop_image` and `color`
    `change_colors`.
    """
    bits, draws = int(words[0]), (words[1:] >> np.uint64(11)) * 2.0**-53
    if "crop" in parts:
        image = crop_image(image, *draws[:4])
    if "flip" in parts and bits & 1:
        image = image[:, ::-1]
    if "shift" in parts:
        height, width = image.shape[:2]
        y, x = max(height // 8, 1), max(width // 8, 1)
        down, right = (bits >> 8) % (2 * y + 1), (bits >> 32) % (2 * x + 1)
        image = np.pad(image, ((y, y), (x, x), (0, 0)), mode="edge")[down : down + height, right : right + width]
    return change_colors(image, *(0.6 + 0.8 * draws[4:])) if "color" in parts else image


def crop_image(image: np.ndarray, area: float, ratio: float, top: float, left: float) -> np.ndarray:
    """Return a rectangle of an image [height, width, channels], scaled to the image's size by bilinear interpolation.

    The numbers, from 0 to 1, determine the rectangle: its area, 8 % to 100 % of the image's, and its width / height,
    (3/4)^(1 - 2 ratio), as in Szegedy et al. 2015; a longer side than the image's is cut. `top` and `left` choose among
    all positions.
    """
    pixels, extent = image.astype(np.float32), image[..., 0].size * (0.08 + 0.92 * area)
    aspect = 0.75 ** (1 - 2 * ratio)
    for side, position in (((extent / aspect) ** 0.5, top), ((extent * aspect) ** 0.5, left)):
        full = len(pixels)
        size = min(max(round(side), 1), full)
        points = np.clip((np.arange(full) + 0.5) * size / full - 0.5, 0, size - 1) + int(position * (full - size + 1))
        low, high = np.floor(points).astype(int), np.ceil(points).astype(int)
        share = (points - low).astype(np.float32)[:, None, None]
        pixels = (pixels[low] * (1 - share) + pixels[high] * share).swapaxes(0, 1)
    return np.rint(pixels).astype(np.uint8)


def change_colors(image: np.ndarray, brightness: float, contrast: float, saturation: float) -> np.ndarray:
    """Return an 8-bit image [height, width, channels] with other colours, as torchvision's ColorJitter computes them.

    x becomes brightness * x, then m + contrast * (x - m), then g + saturation * (x - g). g is a pixel's grey value,
    0.299 R + 0.587 G + 0.114 B, and m its mean over the image. Results are limited to 0 to 255.
    """
    luma = np.array([[0.299], [0.587], [0.114]] if image.shape[-1] == 3 else [[1]], np.float32)
    pixels = np.clip(np.float32(brightness) * image, 0, 255)
    mean = (pixels @ luma).mean()
    pixels = np.clip(mean + np.float32(contrast) * (pixels - mean), 0, 255)
    ground = pixels @ luma
    return np.rint(np.clip(ground + np.float32(saturation) * (pixels - ground), 0, 255)).astype(np.uint8)
