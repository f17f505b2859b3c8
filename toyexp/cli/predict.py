"""Which class an image is of: what `toyexp predict` says."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toyexp.base.errors import UserError, choose, for_terminal, in_a_cell
from toyexp.base.files import require
from toyexp.base.formatting import as_csv, columns, counted, short
from toyexp.base.terminal import say, tell_aside
from toyexp.base.writing import in_one_piece, require_place, required
from toyexp.batching.pictures import (
    IMAGE_SUFFIXES,
    BadImage,
    files_below,
    images_below,
    read_image,
    require_pillow,
    scaled,
)
from toyexp.cli.args import Answer, number, refuse_settings
from toyexp.cli.eval_data import trained_on
from toyexp.config.restored import file_of
from toyexp.formats.file_plan import frozen_plan
from toyexp.formats.gguf.form import architecture_of
from toyexp.formats.gguf.header import origin
from toyexp.formats.gguf.open_model import model_in, opened
from toyexp.formats.gguf.read import GGUFFile
from toyexp.interfaces.command import Arguments
from toyexp.interfaces.kind import IMAGES
from toyexp.interfaces.model import Model, sizes_of
from toyexp.interfaces.recipe import Setup
from toyexp.plugins.discovery import load
from toyexp.plugins.registry import Registry
from toyexp.training.memory import checked_session

if TYPE_CHECKING:
    import numpy as np

    from toyexp.interfaces.engine import Engine
    from toyexp.training.run_config import Config

HELP = """\
usage: toyexp predict MODEL IMAGE ... [--top K] [--csv FILE] [--json] [--engine NAME] [plugins=[my_module]]

Which class images are of, and how probable a model that was trained on images finds it. MODEL is a GGUF file, the
directory of a run that left a model.gguf, or a checkpoint (run/checkpoints/step-200); IMAGE a file (PNG, JPEG, BMP,
GIF, WebP, TIFF, PPM), or a folder, whose images are all taken, and those of the folders in it.
  toyexp predict outputs/vit_tiny-vit/2026-11-21_050553_073724 cat.jpg --top 3
  toyexp predict model.gguf photos --csv photos.csv

An image becomes what the model was trained on: its centred square, scaled, grey where those were, its pixels by their
mean and deviation. With data.resize=false in the run's config.yaml one of another size is an error.

--top K         the K likeliest classes of each (1)
--csv FILE      a row for each image: file, class, probability, ..., error; FILE must not exist yet
--json          the same as JSON
--engine NAME   auto (the best engine here), or any engine with its settings (cpu:dtype=float64:threads=1)

An image that cannot be read is told on standard error, and the exit code is then 1; where none can be, nothing is
written, and it is 2. Of an animation the first picture counts."""

ROWS = 32  # images that are computed at a time


@dataclass(frozen=True)
class Predicted:
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
    images: Sequence[Predicted]

    @property
    def failed(self) -> list[Predicted]:
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
        table = columns([[in_a_cell(cell) for cell in row] for row in rows])
        return [*table, "", self.summary()] if len(rows) > 1 else table

    def summary(self) -> str:
        """How many images are of which class."""
        found = Counter(image.top[0][0] for image in self.images if image.top)
        told = ", ".join(f"{in_a_cell(name)} ({n})" for name, n in found.most_common(8))
        more = f" and {len(found) - 8} more classes" if len(found) > 8 else ""
        return for_terminal(f"{counted(found.total(), 'image')}: {told}{more}")

    def csv(self) -> str:
        """A row for each image."""
        places = max((len(image.top) for image in self.images), default=1)
        more = [f"{what}_{place}" for place in range(2, places + 1) for what in ("class", "probability")]
        table = [["file", "class", "probability", *more, "error"]]
        for image in self.images:
            cells = [cell for name, share in image.top for cell in (name, f"{share:.6g}")]
            table.append([image.file, *cells, *[""] * (2 * places - len(cells)), image.error or ""])
        return as_csv(table)


def run(arguments: Arguments) -> int:
    """Tells of each image which class it is of; 1 where one could not be read."""
    refuse_settings("predict", arguments.rest, "options, and plugins=[...]")
    if not arguments.rest[1:]:
        given = f"predict {arguments.rest[0]}" if arguments.rest else "predict"
        raise UserError(f"{given}: takes a model, and images or folders of them: toyexp predict RUN photo.png")
    what, *places = map(Path, arguments.rest)
    top = int(number("--top", arguments.values.get("--top", "1"), 1, 10**6, whole=True))
    sheet = arguments.values.get("--csv")
    if sheet is not None:
        _check_sheet(sheet, arguments)
    require_pillow()
    files = listed(places)
    found = predict(
        what, files, top, arguments.values.get("--engine", "auto"), load(arguments.modules), arguments.modules
    )
    for image in found.failed:
        print(in_a_cell(f"{image.file}: {image.error}"), file=sys.stderr)
    if sheet is None:
        found.show(arguments)
    else:
        with required(Path(sheet)), in_one_piece(Path(sheet)) as place:
            place.write_text(found.csv(), encoding="utf-8", errors="surrogateescape")
        say(f"{found.summary()}; {sheet}")
    return 1 if found.failed else 0


def _check_sheet(sheet: str, arguments: Arguments) -> None:
    """Raises UserError where the CSV file could not be written, before anything is read."""
    if "--json" in arguments.switches:
        raise UserError(f"--csv {sheet} --json: are two forms of the same; leave one of them out")
    path = Path(sheet)
    if sheet in ("", "-"):
        raise UserError(f"--csv {sheet}: takes the name of a file, such as --csv classes.csv")
    if path.is_dir():
        raise UserError(f"--csv {sheet}: is a directory; name a file, such as --csv {path / 'classes.csv'}")
    require_place(f"--csv {sheet}", path)
    if os.path.lexists(path):
        raise UserError(f"--csv {sheet}: is already there, and no table is replaced; choose another name")


def listed(places: Sequence[Path]) -> list[Path]:
    """The image files meant, each once; UserError for a name under which nothing is, and a folder without images."""
    found: list[Path] = []
    for place in places:
        if place.is_dir():
            inside = sorted(f for f in images_below(place) if not f.name.startswith("."))
            others = sorted({*files_below(place)} - {*inside})
            if not inside:
                kinds = ", ".join(sorted(suffix[1:] for suffix in IMAGE_SUFFIXES))
                raise UserError(f"{place}: there is no image in this folder ({kinds})")
            if others:
                tell_aside(
                    f"{place}: {counted(len(others), 'other file')} left out, such as {in_a_cell(str(others[0]))}"
                )
            found += inside
        else:
            require(place, str(place))
            found.append(place)
    return list(dict.fromkeys(found))


def predict(
    what: Path, files: Sequence[Path], top: int, engine: str, registry: Registry, modules: Sequence[str] = ()
) -> Predictions:
    """What the model in a file, or of a run, says of image files; UserError for a model of something else.

    UserError too where none of them can be read.
    """
    from toyexp.config.request import Request

    if (name := engine.partition(":")[0]) not in (known := {*registry.offers["engine"], "auto"}):
        raise UserError(f"--engine {engine}: {choose(name, known)}")
    path, trained = file_of(what, registry=registry), trained_on(what, modules)
    seen = Seen.of(opened(str(path)), model_in(opened(str(path)), registry), what)
    resize = trained is None or trained.data.get("resize") is not False
    (request,) = Request([], registry, modules).on_engines([engine]).values()
    built = request.parts()
    rows = min(ROWS, len(files))
    computes, note = _engine(built, rows)
    inputs = seen.model.batches(seen.dataset(seen.blank()), rows, 0).inputs
    plan = frozen_plan(seen.model, path, Setup(inputs, rows))
    found: list[Predicted] = []
    sizes: set[tuple[int, int]] = set()
    with checked_session(plan, computes, str(origin(path))) as session:

        def told(images: np.ndarray) -> np.ndarray:
            batches = seen.model.batches(seen.dataset(images), rows, 0).held_out()
            parts = [session.logits({n: batch[n] for n in seen.model.inputs()}) for batch in batches]
            return probabilities(parts)[: len(images)]

        for first in range(0, len(files), ROWS):
            found += _part(files[first : first + ROWS], seen, resize, told, top, sizes)
    if all(image.error for image in found):
        raise UserError(
            f"{found[0].file}: {found[0].error}" + f" (nor any of {len(found) - 1} others)" * (len(found) > 1)
        )
    for line in scaled(sizes, seen.size):
        tell_aside(line)
    return Predictions(str(origin(path)), note, seen.classes, found)


def _engine(built: Config, rows: int) -> tuple[Engine, str]:
    """What computes so many images at a time, and how it is told: of several devices the first without equal shares."""
    try:
        built.engine.check_rows(rows, 1)
    except UserError:
        first = built.engine.of_one_row()  # which repeats what is wrong with the setting itself
        first.check_rows(rows, 1)
        return first, f"{first.name}: {first.check()}, of its devices the first"
    return built.engine, built.engine_note


def _part(
    files: Sequence[Path], seen: Seen, resize: bool, told: Any, top: int, sizes: set[tuple[int, int]]
) -> Iterator[Predicted]:
    """What is said of some files, in their order."""
    import numpy as np

    read: dict[Path, np.ndarray] = {}
    errors: dict[Path, str] = {}
    for file in files:
        try:
            read[file] = read_image(file, seen.size, seen.channels == 3, resize, sizes)
        except BadImage as reason:
            errors[file] = str(reason)
    shares = iter(told(np.stack(list(read.values()))) if read else ())
    for file in files:
        if file in errors:
            yield Predicted(short(file), (), errors[file])
            continue
        of_one = next(shares)
        best = np.argsort(-of_one, kind="stable")[:top]
        yield Predicted(short(file), [(seen.classes[i], float(of_one[i])) for i in best])


def probabilities(logits: Sequence[np.ndarray]) -> np.ndarray:
    """Softmax of logits [B, classes], in float64."""
    import numpy as np

    raised = np.concatenate(logits).astype(np.float64)
    shares = np.exp(raised - raised.max(-1, keepdims=True))
    return shares / shares.sum(-1, keepdims=True)


# -- how a model of images sees them ----------------------------------------------------------------------------------


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
        from toyexp.batching.images import Unlabelled

        return Unlabelled(images, self.classes, self.mean, self.std)


def _numbers(value: object) -> np.ndarray:
    """What a key holds as numbers; none where it holds something else."""
    import numpy as np

    try:
        return np.asarray(value, np.float64)
    except (TypeError, ValueError):
        return np.empty(0)
