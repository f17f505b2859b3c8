"""Read image files as 8-bit pixels, with Pillow."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from toyexp.base.errors import printable
from toyexp.base.files import dangling_link, explain_missing, iter_files
from toyexp.base.lazy import numpy as np
from toyexp.base.packages import require_package

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}
# Not all formats of Pillow, because some decoders start other programs (EPS runs Ghostscript).
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")


class BadImage(Exception):
    """Error: a file cannot be used as an image. The message gives the reason, but not the path of the file."""


def require_pillow() -> None:
    """Raise Unavailable if Pillow is missing or broken."""
    with require_package("PIL", "pip install 'toyexp[data]'", "Pillow"):
        from PIL import Image, ImageOps  # noqa: F401 - read_image uses them


def read_image(
    path: Path, size: int, color: bool, resize: bool, sizes: set[tuple[int, int]] | None = None
) -> np.ndarray:
    """Return an image file as 8-bit pixels [size, size, channels], with 3 channels if `color`, else 1.

    If `resize`, crop and scale the image; otherwise its width and height must be `size`. Add the original (width,
    height) to the set `sizes`. Raise BadImage if the file cannot be used.
    """
    from PIL import Image, ImageOps

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", Image.DecompressionBombWarning)  # make Pillow's limit an error
            with Image.open(path, formats=FORMATS) as opened:
                if (frames := getattr(opened, "n_frames", 1)) > 1 and opened.format != "MPO":  # a JPEG with a preview
                    raise BadImage(f"has {frames} frames; save one of them as an image")
                opened.load()
                image = ImageOps.exif_transpose(opened)
                if not resize and image.size != (size, size):
                    raise BadImage(f"is {image.width} x {image.height} pixels, expected {size} x {size}")
                if sizes is not None:
                    sizes.add(image.size)
                image = ImageOps.fit(_flat(image, "RGB" if color else "L"), (size, size))
                return np.asarray(image).reshape(size, size, -1)
    except BadImage:
        raise
    except FileNotFoundError:
        raise BadImage(printable(explain_missing(path), 200) if dangling_link(path) else "does not exist") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise BadImage(f"has more than {Image.MAX_IMAGE_PIXELS} pixels, which may exhaust memory") from None
    except Exception as error:  # a broken file makes decoders raise anything
        raise BadImage(f"cannot be read as an image ({printable(str(error)) or type(error).__name__})") from None


def _flat(image: Image, mode: str) -> Image:
    """Convert an image to `mode`, with 8 bits per channel; transparent parts become black."""
    from PIL import Image

    if image.mode.startswith(("I", "F")):
        raise BadImage(f"has pixels of mode {image.mode}, which 8 bits cannot hold")
    if image.has_transparency_data:
        ground = Image.new("RGBA", image.size, "black")
        image = Image.alpha_composite(ground, image.convert("RGBA"))
    return image.convert(mode)


def scaling_note(sizes: set[tuple[int, int]], size: int) -> list[str]:
    """Return a list with one note that images were cropped and scaled to `size`, or [] if none of them was.

    `sizes` holds the original (width, height) of the images.
    """
    if sizes <= {(size, size)}:
        return []
    extremes = dict.fromkeys((min(sizes), max(sizes)))
    examples = "sizes such as " * (len(sizes) > 2) + " and ".join(f"{width} x {height}" for width, height in extremes)
    return [f"images of {examples} pixels are cropped to their centred square and scaled to {size} x {size}"]


def iter_images(folder: Path) -> Iterator[Path]:
    """Yield the files below a directory whose names have an image suffix, including broken symbolic links."""
    files = (file for file in iter_files(folder) if file.suffix.lower() in IMAGE_SUFFIXES)
    return (file for file in files if file.is_file() or dangling_link(file))
