"""Images as data: the split, the batches, the digits, and directories of image files."""

import csv
import io
import warnings

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance

from toyexp import ImageDataset, RunPreview, UserError
from toyexp.batching.images import augment_image, change_colors, crop_image, held_out_mask
from toyexp.interfaces.dataset import batch_digest
from toyexp.testing import DataSuite, image_dataset
from toyexp_data.images import Digits, Images


class TestDigits(DataSuite):
    data = Digits()
    epoch = 1440 // DataSuite.rows


class TestDigitsAugmented(DataSuite):
    data = Digits(augment="shift_crop_color")


class TestImages(DataSuite):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path):
        path = str(write_class_directories(tmp_path, red=6, blue=5))
        self.data = Images(path=path, image_size=8, sampler="balanced", mixup=0.2)

    def subject(self):
        return Images


def write_class_directories(root, size=(8, 8), **counts):
    """Write a directory per class of PNG files, each with noise around the colour that its class names."""
    draw = np.random.default_rng(0)
    for name, count in counts.items():
        (root / name).mkdir(parents=True)
        for i in range(count):
            pixels = draw.integers(0, 60, (size[1], size[0], 3), dtype=np.uint8)
            pixels[..., {"red": 0, "green": 1, "blue": 2}[name]] += 180
            Image.fromarray(pixels).save(root / name / f"{i}.png")
    return root


def open_images(path, **settings):
    data = Images(path=str(path), **{"image_size": 8, **settings})
    data.check()
    return data.open(None)


# -- batches ----------------------------------------------------------------------------------------------------------


def read_rows(batches, count):
    rows = batches.inputs["targets"].shape
    assert rows == ()
    parts = [batches.batch(k)["images"] for k in range(-(-count // len(batches.batch(0)["targets"])))]
    return np.concatenate(parts)[:count]


def test_an_epoch_has_every_image_once_and_the_next_epoch_has_another_order():
    data = image_dataset(count=40)
    count = len(data.train[1])
    stream = read_rows(data.batches(0, 7, seed=1), 2 * count)
    first, second = ([r.tobytes() for r in part] for part in (stream[:count], stream[count:]))
    assert len(set(first)) == count and sorted(first) == sorted(second) and first != second


@pytest.mark.parametrize("augment", ["none", "flip_shift"])
def test_a_large_batch_is_the_concatenation_of_small_batches(augment):
    dataset = image_dataset()
    data = ImageDataset(dataset.train[0], dataset.train[1], dataset.classes, 0.2, augment=augment)
    small, large = (data.batches(0, n, seed=3) for n in (3, 12))
    for k in range(6):  # beyond the end of an epoch
        joined = np.concatenate([small.batch(4 * k + i)["images"] for i in range(4)])
        np.testing.assert_array_equal(large.batch(k)["images"], joined)


def test_augmentation_changes_pixels_but_not_the_order_or_held_out_images():
    plain, augmented = (Digits(augment=a).open(None).batches(0, 16, 5) for a in ("none", "shift"))
    for k in range(3):
        plain_batch, augmented_batch = plain.batch(k), augmented.batch(k)
        np.testing.assert_array_equal(plain_batch["targets"], augmented_batch["targets"])
        is_changed = (plain_batch["images"] != augmented_batch["images"]).any(axis=(1, 2, 3))
        assert 0 < is_changed.sum() < 16  # one of nine shifts is zero
    assert [batch_digest(b) for b in plain.held_out()] == [batch_digest(b) for b in augmented.held_out()]


def draw_words(count):
    return np.random.default_rng(0).integers(0, 2**63, (count, 8), dtype=np.uint64)


def test_augmentation_mirrors_and_shifts_images():
    image = np.arange(16 * 16, dtype=np.uint8).reshape(16, 16, 1)
    mirrored = {augment_image(image, words, {"flip"}).tobytes() for words in draw_words(400)}
    assert mirrored == {image.tobytes(), np.ascontiguousarray(image[:, ::-1]).tobytes()}
    wide = np.pad(image, ((2, 2), (2, 2), (0, 0)), mode="edge")
    expected = {wide[y : y + 16, x : x + 16].tobytes() for y in range(5) for x in range(5)}  # an eighth of 16 is 2
    shifted = {np.ascontiguousarray(augment_image(image, words, {"shift"})).tobytes() for words in draw_words(400)}
    assert shifted == expected


@pytest.mark.parametrize("draws", [(0, 0.5, 0, 0), (0.3, 0.1, 0.9, 0.2), (0.6, 1, 0.4, 0.999), (1, 0.5, 0.5, 0.5)])
def test_a_random_crop_equals_torchs_bilinear_interpolation_of_the_rectangle(draws):
    image = np.random.default_rng(1).integers(0, 256, (20, 32, 3), dtype=np.uint8)
    area, aspect = 20 * 32 * (0.08 + 0.92 * draws[0]), (3 / 4) ** (1 - draws[1]) * (4 / 3) ** draws[1]
    height, width = min(round((area / aspect) ** 0.5), 20), min(round((area * aspect) ** 0.5), 32)
    top, left = int(draws[2] * (21 - height)), int(draws[3] * (33 - width))
    part = torch.from_numpy(image[top : top + height, left : left + width]).permute(2, 0, 1)[None].double()
    expected = torch.nn.functional.interpolate(part, (20, 32), mode="bilinear", align_corners=False)[0]
    assert abs(crop_image(image, *draws) - expected.permute(1, 2, 0).numpy()).max() <= 0.5001  # rounded to 8 bits


@pytest.mark.parametrize("channels", [1, 3])
def test_colours_change_as_in_pillow(channels):
    image = np.random.default_rng(2).integers(0, 256, (12, 10, channels), dtype=np.uint8)
    for factors in ((1.4, 1, 1), (1, 0.6, 1), (1, 1, 1.3), (0.7, 1.2, 0.6), (1, 1, 1)):
        expected = Image.fromarray(image.squeeze())
        for kind, factor in zip(
            (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color), factors, strict=True
        ):
            expected = kind(expected).enhance(factor)
        difference = change_colors(image, *factors).astype(int) - np.asarray(expected).reshape(image.shape)
        assert abs(difference).max() <= 3, "Pillow rounds after each change"


def test_all_augmentations_combine_and_depend_on_seed_epoch_and_image_only():
    dataset = image_dataset(count=24, size=16, channels=3)
    data = ImageDataset(*dataset.train, dataset.classes, 0.2, augment="color_shift_crop_flip")
    first, again, other = (data.batches(0, 4, seed) for seed in (1, 1, 2))
    epoch = first.rows_per_epoch
    for k in (5, 0, 9):  # in any order
        np.testing.assert_array_equal(first.batch(k)["images"], again.batch(k)["images"])
        assert (first.batch(k)["images"] != other.batch(k)["images"]).any()
    rows = read_rows(first, 2 * epoch)
    assert len({row.tobytes() for row in rows}) == 2 * epoch


@pytest.mark.parametrize("augment", ["flp", "flip_flip", "none_flip", "flip,shift", ""])
def test_an_unknown_augmentation_is_rejected(tmp_path, augment):
    with pytest.raises(
        UserError, match=r"data\.augment=.*: must be none, or some of crop, flip, shift, color joined by _"
    ):
        open_images(write_class_directories(tmp_path, red=4, blue=4), augment=augment)


def test_the_balanced_sampler_gives_each_class_the_same_number_of_rows():
    counts = (20, 6, 1)
    images = np.arange(27, dtype=np.uint8).repeat(4).reshape(27, 2, 2, 1)
    everything = np.arange(27) == 0  # hold out a single image of the first class
    data = ImageDataset(images, np.repeat([0, 1, 2], counts), list("abc"), 0, held_out=everything, sampler="balanced")
    small, large = (data.batches(0, rows, seed=4) for rows in (3, 9))
    assert small.rows_per_epoch == 27
    orders = []
    for epoch in range(3):
        parts = [small.batch(k) for k in range(9 * epoch, 9 * epoch + 9)]
        targets = np.concatenate([part["targets"] for part in parts])
        pixels = np.concatenate([part["images"][:, 0, 0, 0] for part in parts])
        assert np.bincount(targets).tolist() == [9, 9, 9]
        assert [len({*pixels[targets == label]}) for label in range(3)] == [9, 6, 1]
        joined = np.concatenate([large.batch(k)["images"][:, 0, 0, 0] for k in range(3 * epoch, 3 * epoch + 3)])
        np.testing.assert_array_equal(joined, pixels)
        orders.append(pixels.tobytes())
    assert len({*orders}) == 3


def test_mixup_mixes_pairs_of_images_with_shares_from_a_beta_distribution():
    dataset = image_dataset(count=400, size=8, channels=1)
    plain, mixed = (
        ImageDataset(*dataset.train, dataset.classes, 0.25, augment="flip", mixup=mixup).batches(0, 10, 3)
        for mixup in (0, 0.4)
    )
    epoch = -(-plain.rows_per_epoch // 10)
    images, targets = (np.concatenate([plain.batch(k)[name] for k in range(epoch)]) for name in ("images", "targets"))
    shares = []
    for k in range(epoch - 1):
        batch = mixed.batch(k)
        np.testing.assert_array_equal(batch["targets"], targets[10 * k : 10 * k + 10])
        for row in range(10):
            m, first = batch["second_shares"][row], images[10 * k + row]
            errors = abs((1 - m) * first + m * images - batch["images"][row]).max((1, 2, 3))
            assert errors.min() < 1e-5 and batch["second_targets"][row] in targets[errors < 1e-5]
            shares.append(m)
    assert np.mean(shares) == pytest.approx(0.5, abs=0.06) and np.var(shares) == pytest.approx(0.25 / 1.8, abs=0.03)
    assert [batch_digest(b) for b in plain.held_out()] == [batch_digest(b) for b in mixed.held_out()]


def test_pixels_are_normalised_with_the_training_mean_and_deviation_of_each_channel():
    data = image_dataset(channels=3)
    exact = data.train[0] / 255
    np.testing.assert_allclose(data.mean, exact.mean(axis=(0, 1, 2)), rtol=1e-12)
    np.testing.assert_allclose(data.std, exact.std(axis=(0, 1, 2)), rtol=1e-12)
    held_out = data.batches(0, len(data.held_out[1]), 0).held_out()[0]["images"]
    np.testing.assert_allclose(held_out, (data.held_out[0] / 255 - data.mean) / data.std, atol=1e-5)
    fixed = ImageDataset(data.train[0], data.train[1], data.classes, 0.2, normalise="fixed").batches(0, 8, 0).batch(0)
    assert -1 <= fixed["images"].min() < -0.5 and 0.5 < fixed["images"].max() <= 1


def test_images_of_one_colour_are_normalised_without_division_by_zero():
    data = ImageDataset(np.full((6, 2, 2, 1), 7, np.uint8), np.arange(6) % 2, ["a", "b"], 0.3)
    np.testing.assert_allclose(data.batches(0, 2, 0).batch(0)["images"], np.zeros((2, 2, 2, 1)), atol=1e-6)


# -- the held-out part ------------------------------------------------------------------------------------------------


def test_a_fixed_share_of_every_class_is_held_out_and_never_its_last_image():
    labels = np.repeat([0, 1, 2], [50, 10, 1])
    mask = held_out_mask(labels, 0.2)
    assert [mask[labels == c].sum() for c in range(3)] == [10, 2, 0]
    np.testing.assert_array_equal(mask, held_out_mask(labels, 0.2))
    assert held_out_mask(labels, 0.999)[labels == 1].sum() == 9


def test_no_held_out_image_is_trained_on_for_any_seed():
    data = image_dataset(count=50)
    held_out = {image.tobytes() for image in data.held_out[0]}
    assert len(held_out) + len(data.train[1]) == 50
    assert held_out.isdisjoint({image.tobytes() for image in data.train[0]})
    digests = [[batch_digest(b) for b in data.batches(0, 4, seed).held_out()] for seed in (0, 1)]
    assert digests[0] == digests[1]


@pytest.mark.parametrize(("eval_images", "expected_count"), [(0, 15), (6, 6), (100, 15)])
def test_eval_images_limits_the_images_of_an_evaluation_and_padding_has_no_weight(eval_images, expected_count):
    dataset = image_dataset()
    order = np.argsort(dataset.train[1], kind="stable")  # sorted by class, as directories are read
    images, labels = dataset.train[0][order], dataset.train[1][order]
    data = ImageDataset(images, labels, dataset.classes, 1 / 3, eval_images=eval_images)
    batches = data.batches(0, 4, 0).held_out()
    weights = np.concatenate([b["weights"] for b in batches])
    targets = np.concatenate([b["targets"] for b in batches])
    assert weights.sum() == expected_count and all(len(b["targets"]) == 4 for b in batches)
    assert set(targets[weights > 0]) == {0, 1, 2}
    evaluated = np.concatenate([b["images"] for b in batches])[weights > 0]
    assert len({image.tobytes() for image in evaluated}) == expected_count


# -- digits -----------------------------------------------------------------------------------------------------------


def test_classes_are_numbered_as_in_the_models_file():
    images, labels = np.zeros((6, 2, 2, 1), np.uint8), np.arange(6) % 2
    data = ImageDataset(images, labels, ["cat", "dog"], 1 / 3)
    data.match_preprocessing({"classes": ["bird", "cat", "dog", "emu"]})
    assert sorted(data.held_out[1]) == [1, 2] and data.vocab == 4
    listed = ImageDataset(images, labels, ["0", "1"], 1 / 3)  # a list of labels has only numbers
    listed.match_preprocessing({"classes": ["bird", "cat", "dog"]})
    assert sorted(listed.held_out[1]) == [0, 1]
    with pytest.raises(UserError, match=r"(?s)cat.*bird, dog"):
        ImageDataset(images, labels, ["cat", "dog"], 1 / 3).match_preprocessing({"classes": ["bird", "dog"]})
    named = ImageDataset(images, np.arange(6) // 2, ["0", "1", "2"], 1 / 2)  # names that are numbers, in another order
    named.match_preprocessing({"classes": ["0", "1", "10", "2"]})
    assert {*named.held_out[1], *named.train[1]} == {0, 1, 3}


@pytest.mark.parametrize("metadata", [
    {"image_mean": ["a"]}, {"image_mean": "x"}, {"image_mean": [float("nan")]}, {"image_std": [0.0]}, {"classes": 3},
])  # fmt: skip
def test_invalid_preprocessing_in_a_models_file_is_rejected(metadata):
    data = ImageDataset(np.zeros((6, 2, 2, 1), np.uint8), np.arange(6) % 2, ["cat", "dog"], 1 / 3)
    with pytest.raises(UserError, match=next(iter(metadata))):
        data.match_preprocessing(metadata)


def test_digits_equal_scikit_learns_digits():
    datasets = pytest.importorskip("sklearn.datasets")
    sklearn_digits, digits = datasets.load_digits(), Digits().open(None)
    expected = {
        (np.round(i * 255 / 16).astype(np.uint8).tobytes(), t)
        for i, t in zip(sklearn_digits.images, sklearn_digits.target, strict=True)
    }
    images_and_labels = {
        (i.tobytes(), t) for part in (digits.train, digits.held_out) for i, t in zip(*part, strict=True)
    }
    assert images_and_labels == expected
    assert len(digits.train[1]) + len(digits.held_out[1]) == 1797 and len(digits.held_out[1]) == 359


# -- directories ------------------------------------------------------------------------------------------------------


def test_classes_are_directories_in_alphabetical_order(tmp_path):
    data = open_images(write_class_directories(tmp_path, red=4, blue=6, green=5), val_fraction=0.25)
    assert data.classes == ("blue", "green", "red") and data.vocab == 3
    for images, labels in (data.train, data.held_out):
        np.testing.assert_array_equal(images.mean(axis=(1, 2)).argmax(-1), 2 - labels)  # the bright channel
    assert data.describe()["train_images"] == 11 and data.describe()["held_out_images"] == 4
    assert data.describe()["skipped"] == 0


@pytest.mark.parametrize("held_out_name", ["val", "valid", "Validation", "test"])
def test_directories_named_train_and_val_are_a_split_and_not_classes(tmp_path, held_out_name):
    write_class_directories(tmp_path / "train", red=6, blue=5)
    write_class_directories(tmp_path / held_out_name, red=2, blue=1)
    data = open_images(tmp_path)
    assert data.classes == ("blue", "red")
    assert (len(data.train[1]), sorted(data.held_out[1].tolist())) == (11, [0, 1, 1])
    assert data.remarks() == ["2 classes: blue, red", f"held out: {tmp_path / held_out_name}"]
    assert Images.recognises(tmp_path) == 2
    (tmp_path / held_out_name / "green").mkdir()
    with pytest.raises(UserError, match=r"green: holds held-out images, but .*train has no class green"):
        open_images(tmp_path)


def test_with_both_val_and_test_only_val_is_held_out(tmp_path):
    for part, count in (("train", 4), ("test", 3), ("val", 2)):
        write_class_directories(tmp_path / part, red=count, blue=count)
    data = open_images(tmp_path)
    assert (len(data.train[1]), len(data.held_out[1])) == (8, 4)
    assert data.omissions() == ["6 other files, such as test/blue/0.png"]


def test_a_held_out_directory_without_images_is_rejected(tmp_path):
    write_class_directories(tmp_path / "train", red=4, blue=4)
    (tmp_path / "val" / "red").mkdir(parents=True)
    with pytest.raises(UserError, match="val, to be held out, has no image"):
        open_images(tmp_path)


def test_a_class_may_be_called_train(tmp_path):
    for name in ("train", "test"):
        write_class_directories(tmp_path / "of" / name, red=10)
        (tmp_path / "pictures").mkdir(exist_ok=True)
        (tmp_path / "of" / name / "red").rename(tmp_path / "pictures" / name)
    assert open_images(tmp_path / "pictures").classes == ("test", "train"), "directories of images are classes"


def test_next_to_another_directory_train_and_val_are_classes(tmp_path):
    for name in ("cats", "train", "val"):
        write_class_directories(tmp_path / name, red=10)
    assert open_images(tmp_path).classes == ("cats", "train", "val")


def test_a_warning_is_printed_if_val_fraction_has_no_effect(tmp_path):
    for name in ("train", "val"):
        write_class_directories(tmp_path / name, red=3, blue=3)
    for settings, expected in (({}, []), ({"val_fraction": 0.3}, ["data.val_fraction=0.3: has no effect"])):
        data = Images(path=str(tmp_path), image_size=8, **settings)
        warnings = [*data.warnings(RunPreview({}, data.open(None), None, None))]
        assert len(warnings) == len(expected) and all(line.endswith(f"part, {tmp_path}/val") for line in warnings)
        assert [line.partition(";")[0] for line in warnings] == expected


def test_cropping_and_scaling_are_reported(tmp_path):
    small = write_class_directories(tmp_path / "a", red=10, blue=10)
    assert open_images(small).remarks() == ["2 classes: blue, red"]
    assert open_images(small, augment="flip").remarks() == ["2 classes: blue, red", "data.augment=flip"]
    remark = "images of 8 x 8 pixels are cropped to their centred square and scaled to 4 x 4"
    assert remark in open_images(small, image_size=4).remarks()
    write_class_directories(tmp_path / "b", size=(20, 10), red=1)
    (tmp_path / "b" / "red" / "0.png").rename(small / "red" / "large.png")
    assert any("images of 8 x 8 and 20 x 10 pixels are cropped" in line for line in open_images(small).remarks())


def test_images_of_every_format_are_converted_to_one_size(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name / "deeper").mkdir(parents=True)
    pixels = np.random.default_rng(0).integers(0, 256, (21, 34, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    image.save(tmp_path / "a" / "x.JPG", format="JPEG")
    image.convert("L").save(tmp_path / "a" / "grey.png")
    image.convert("P").save(tmp_path / "a" / "deeper" / "palette.gif")
    image.convert("1").save(tmp_path / "a" / "bits.tiff")
    image.convert("CMYK").save(tmp_path / "b" / "print.jpg")
    image.convert("RGBA").save(tmp_path / "b" / "alpha.webp", lossless=True)
    image.convert("P").save(tmp_path / "b" / "see_through.png", transparency=bytes(range(256)))
    image.save(tmp_path / "b" / "plain.ppm")
    (tmp_path / "b" / ".DS_Store").write_bytes(b"\0")
    (tmp_path / "b" / "notes.txt").write_text("no image")
    (tmp_path / ".hidden").mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        color, grey = open_images(tmp_path, val_fraction=0.3), open_images(tmp_path, color=False, val_fraction=0.3)
    assert color.image_shape == (8, 8, 3) and grey.image_shape == (8, 8, 1)
    assert color.describe()["train_images"] + color.describe()["held_out_images"] == 8


def test_the_centred_square_is_scaled_and_exif_rotation_is_undone(tmp_path):
    pixels = np.zeros((8, 16, 3), np.uint8)
    pixels[:4, 4:12] = (250, 0, 0)  # the upper half of the middle
    pixels[4:, 4:12] = (0, 250, 0)
    pixels[:, :4] = pixels[:, 12:] = (0, 0, 250)  # cropped
    exif = Image.Exif()
    exif[0x0112] = 3  # taken upside down
    for name, options in (("a", {}), ("b", {"exif": exif})):
        (tmp_path / name).mkdir()
        for i in range(2):
            Image.fromarray(pixels).save(tmp_path / name / f"{i}.png", **options)
    data = open_images(tmp_path, val_fraction=0.5, image_size=4)
    upright, upside_down = (data.train[0][data.train[1] == c][0] for c in (0, 1))
    assert (upright[0, :, 0] > 200).all() and (upright[3, :, 1] > 200).all() and (upright[..., 2] < 50).all()
    np.testing.assert_array_equal(upside_down, upright[::-1])


def test_transparent_pixels_become_black(tmp_path):
    pixels = np.full((8, 8, 4), 200, np.uint8)
    pixels[:4, :, 3] = 0
    pixels[4:, :, 3] = 255
    for name in "ab":
        (tmp_path / name).mkdir()
        for i in range(2):
            Image.fromarray(pixels).save(tmp_path / name / f"{i}.png")
    image = open_images(tmp_path, val_fraction=0.5).train[0][0]
    assert not image[:4].any() and (image[4:] == 200).all()


# -- files and settings that are rejected -----------------------------------------------------------------------------


def make_png(width=8, height=8, mode="RGB"):
    buffer = io.BytesIO()
    Image.new(mode, (width, height)).save(buffer, "PNG")
    return buffer.getvalue()


def make_noisy_png():
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def make_forged_png(width, height):
    """Return a PNG whose header claims another size, with a valid checksum."""
    import zlib

    header = b"IHDR" + width.to_bytes(4, "big") + height.to_bytes(4, "big") + b"\x08\x02\0\0\0"
    return make_png()[:8] + (13).to_bytes(4, "big") + header + zlib.crc32(header).to_bytes(4, "big") + make_png()[33:]


def make_gif():
    """Return a GIF of two frames."""
    first, second = (Image.new("L", (8, 8), shade) for shade in (0, 255))
    buffer = io.BytesIO()
    first.save(buffer, "GIF", save_all=True, append_images=[second])
    return buffer.getvalue()


BAD = {
    "empty": (b"", "cannot be read as an image"),
    "text": (b"this is no image at all", "cannot be read as an image"),
    "cut short": (make_noisy_png()[:2000], "cannot be read as an image"),
    "one flipped byte": (make_noisy_png()[:300] + b"\xff\x00" + make_noisy_png()[302:], "cannot be read as an image"),
    "a bomb": (make_forged_png(12_000, 12_000), "has more than 89478485 pixels"),
    "a larger bomb": (make_forged_png(60_000, 60_000), "has more than 89478485 pixels"),
    "16 bits": (make_png(mode="I;16"), "has pixels of mode I;16"),
    "animated": (make_gif(), "has 2 frames; save one of them as an image"),
    "PostScript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n", "cannot be read as an image"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_image_is_rejected_by_name_or_skipped_and_counted(tmp_path, name):
    content, reason = BAD[name]
    (write_class_directories(tmp_path, red=6, blue=6) / "red" / "3b.png").write_bytes(content)
    with pytest.raises(UserError) as error:
        open_images(tmp_path)
    assert str(error.value).startswith(f"{tmp_path / 'red' / '3b.png'}: {reason}")
    assert "data.on_error=skip" in str(error.value) and "\n" not in str(error.value)
    facts = open_images(tmp_path, on_error="skip").describe()
    assert facts["skipped"] == 1 and facts["skipped_files"][0].startswith(f"red/3b.png: {reason}")
    assert facts["train_images"] + facts["held_out_images"] == 12


def test_a_broken_link_is_a_bad_image(tmp_path):
    (write_class_directories(tmp_path, red=6, blue=6) / "red" / "lost.png").symlink_to("moved.png")
    with pytest.raises(UserError, match=r"lost\.png: is a link to moved\.png, which does not exist \(data\.on_error"):
        open_images(tmp_path)
    facts = open_images(tmp_path, on_error="skip").describe()
    assert facts["skipped"] == 1 and facts["train_images"] + facts["held_out_images"] == 12


def test_without_resize_an_image_of_another_size_is_rejected_or_skipped(tmp_path):
    Image.new("RGB", (9, 8)).save(write_class_directories(tmp_path, red=6, blue=6) / "blue" / "wide.png")
    assert open_images(tmp_path).describe()["skipped"] == 0
    with pytest.raises(UserError, match=r"wide\.png: is 9 x 8 pixels, expected 8 x 8"):
        open_images(tmp_path, resize=False)
    facts = open_images(tmp_path, resize=False, on_error="skip").describe()
    assert facts["skipped_files"] == ["blue/wide.png: is 9 x 8 pixels, expected 8 x 8"]


def write_labels(tmp_path, *lines):
    with open(tmp_path / "labels.csv", "w", newline="") as file:
        csv.writer(file).writerows(lines)
    return str(tmp_path / "labels.csv")


def test_labels_can_come_from_a_csv_file(tmp_path):
    write_class_directories(tmp_path / "all", red=4, blue=4)
    rows = [(f"{name}/{i}.png", {"red": 0, "blue": 1}[name]) for name in ("blue", "red") for i in range(4)]
    data = open_images(tmp_path / "all", labels=write_labels(tmp_path, *rows), val_fraction=0.25)
    assert data.classes == ("0", "1")
    np.testing.assert_array_equal(data.train[0].mean(axis=(1, 2)).argmax(-1), 2 * data.train[1])


def test_a_negative_label_is_rejected_by_name_or_skipped_and_counted(tmp_path):
    write_class_directories(tmp_path / "all", red=4, blue=4)
    rows = [(f"{name}/{i}.png", n) for n, name in enumerate(("red", "blue")) for i in range(4)]
    rows[5] = (rows[5][0], -1)
    settings = {"labels": write_labels(tmp_path, *rows), "val_fraction": 0.25}
    with pytest.raises(UserError, match=r"blue/1\.png: its class -1 is not one of 0\.\.1 .*data\.on_error=skip"):
        open_images(tmp_path / "all", **settings)
    assert open_images(tmp_path / "all", **settings, on_error="skip").describe()["skipped"] == 1


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"path": ""}, "data=images needs a directory"),
        ({"path": "missing"}, "data.path=missing: not found"),
        ({"labels": "missing.csv"}, "data.labels=missing.csv: not found"),
        ({"image_size": 0}, "data.image_size=0: must be at least 1"),
        ({"on_error": "skp"}, "data.on_error=skp: did you mean skip?"),
        ({"normalise": "mean"}, "data.normalise=mean: choose one of: fixed, train"),
        ({"augment": "flop"}, "data.augment=flop: must be none, or some of crop, flip"),
        ({"sampler": "balance"}, "data.sampler=balance: did you mean balanced?"),
        ({"mixup": -0.2}, "data.mixup=-0.2: must be at least 0"),
        ({"val_fraction": 1.1}, "data.val_fraction=1.1"),
        ({"eval_images": -1}, "data.eval_images=-1"),
        ({"max_mb": 0.0}, "data.max_mb=0.0"),
        ({"max_mb": 0.001}, "12 images of 8 x 8 pixels take more than data.max_mb=0.001 MB"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_wrong_settings_are_rejected(tmp_path, settings, words):
    with pytest.raises(UserError) as error:
        open_images(**{"path": write_class_directories(tmp_path, red=6, blue=6), **settings})
    assert words in str(error.value)


def test_directories_without_two_usable_classes_are_rejected(tmp_path):
    (tmp_path / "flat").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "flat" / "a.png")
    with pytest.raises(UserError, match="contains no directories"):
        open_images(tmp_path / "flat")
    with pytest.raises(UserError, match="fewer than two classes"):
        open_images(write_class_directories(tmp_path / "one", red=4))
    (write_class_directories(tmp_path / "empty", red=4, blue=4) / "green").mkdir()
    with pytest.raises(UserError, match=r"class green has no image$"):
        open_images(tmp_path / "empty")
    (tmp_path / "empty" / "green" / "a.png").write_bytes(b"no")
    with pytest.raises(UserError, match=r"class green has no image that can be read \(green/a\.png: cannot be read"):
        open_images(tmp_path / "empty", on_error="skip")
    with pytest.raises(UserError, match=r"data\.val_fraction=0\.1 holds out none of 2 images"):
        open_images(write_class_directories(tmp_path / "few", red=1, blue=1))


@pytest.mark.parametrize("line", [["red/0.png"], ["red/0.png", "zero"], ["red/0.png", "0", "1"]])
def test_a_malformed_line_of_labels_is_rejected(tmp_path, line):
    write_class_directories(tmp_path / "all", red=2)
    with pytest.raises(UserError, match="a line must be a file and a class number"):
        open_images(tmp_path / "all", labels=write_labels(tmp_path, line))


@pytest.mark.parametrize(
    ("second_path", "number", "words"), [("red/0.png", 1, ", as class 0 and 1"), ("./red/0.png", 0, "")]
)
@pytest.mark.parametrize("on_error", ["refuse", "skip"])
def test_an_image_that_is_listed_twice_is_rejected(tmp_path, second_path, number, words, on_error):
    write_class_directories(tmp_path / "all", red=2)
    labels = write_labels(tmp_path, ("red/0.png", 0), ("red/1.png", 1), (second_path, number))
    with pytest.raises(UserError) as error:
        open_images(tmp_path / "all", labels=labels, on_error=on_error)
    assert str(error.value).endswith(f"labels.csv: {second_path} is listed twice{words}")


def test_the_error_names_a_listed_file_that_is_missing(tmp_path):
    write_class_directories(tmp_path / "all", red=2)
    with pytest.raises(UserError, match=r"red/9\.png: does not exist"):
        open_images(tmp_path / "all", labels=write_labels(tmp_path, ("red/0.png", 0), ("red/9.png", 1)))
