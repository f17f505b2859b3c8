"""An image file as 8-bit pixels, read with Pillow."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from toyexp.base.errors import printable
from toyexp.base.files import dangling_link, explain_missing
from toyexp.base.packages import require_package

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}
# Not everything Pillow can open: some of its decoders start other programs (EPS runs Ghostscript).
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")


class BadImage(Exception):
    """A file that is no image to look at, and why."""


def require_pillow() -> None:
    """Raises Unavailable where Pillow is missing or broken."""
    with require_package("PIL", "pip install 'toyexp[data]'", "Pillow"):
        from PIL import Image, ImageOps  # noqa: F401 - what read_image will use


def read_image(
    path: Path, size: int, color: bool, resize: bool, sizes: set[tuple[int, int]] | None = None
) -> np.ndarray:
    """Return an image file as 8-bit pixels [size, size, 3 or 1]; add its size to `sizes`. BadImage if it is none."""
    import numpy as np
    from PIL import Image, ImageOps

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", Image.DecompressionBombWarning)  # Pillow's limit, made a refusal
            with Image.open(path, formats=FORMATS) as opened:
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
        raise BadImage(printable(explain_missing(path), 200) if dangling_link(path) else "is not there") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise BadImage(f"has more than {Image.MAX_IMAGE_PIXELS} pixels, as files made to exhaust memory do") from None
    except Exception as error:  # a broken file makes decoders raise anything
        raise BadImage(f"cannot be read as an image ({printable(str(error)) or type(error).__name__})") from None


def _flat(image: Image, mode: str) -> Image:
    """The image in 8 bits a channel, over black where it is transparent."""
    from PIL import Image

    if image.mode.startswith(("I", "F")):
        raise BadImage(f"has pixels of mode {image.mode}, which 8 bits cannot hold")
    if image.has_transparency_data:
        ground = Image.new("RGBA", image.size, "black")
        image = Image.alpha_composite(ground, image.convert("RGBA"))
    return image.convert(mode)


def scaling_note(sizes: set[tuple[int, int]], size: int) -> list[str]:
    """Say that images of these sizes were cut and scaled, if any was."""
    if sizes <= {(size, size)}:
        return []
    ends = dict.fromkeys((min(sizes), max(sizes)))
    told = "sizes such as " * (len(sizes) > 2) + " and ".join(f"{width} x {height}" for width, height in ends)
    return [f"images of {told} pixels are cut to their centred square and scaled to {size} x {size}"]


def iter_files(folder: Path) -> Iterator[Path]:
    """Yield all files that are not hidden, as what a system keeps for itself in a folder of images is."""
    inside = (f for f in folder.rglob("*") if not f.is_dir())
    return (f for f in inside if not any(part.startswith(".") for part in f.relative_to(folder).parts))


def iter_images(folder: Path) -> Iterator[Path]:
    """The files in a folder, and in those in it, that are images by their names; links that lead nowhere too."""
    named = (f for f in folder.rglob("*") if f.suffix.lower() in IMAGE_SUFFIXES)
    return (f for f in named if f.is_file() or dangling_link(f))
