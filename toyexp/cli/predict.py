"""Predict which class images are of: `toyexp predict`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from toyexp.base.errors import UserError, in_a_cell
from toyexp.base.terminal import say
from toyexp.base.writing import in_one_piece, require_place, required
from toyexp.batching.pictures import require_pillow
from toyexp.inference.predict import listed, predict
from toyexp.interfaces.command import Arguments
from toyexp.plugins.discovery import load

HELP = """\
usage: toyexp predict MODEL IMAGE ... [options] [plugins=[my_module]]

Which class images are of, and how probable a model that was trained on images finds it. MODEL is a GGUF file, the
directory of a run that left a model.gguf, or a checkpoint (run/checkpoints/step-200); IMAGE a file (PNG, JPEG, BMP,
GIF, WebP, TIFF, PPM), or a folder, whose images are all taken, and those of the folders in it.
  toyexp predict outputs/vit_tiny-vit/2026-11-21_050553_073724 cat.jpg --top 3
  toyexp predict model.gguf photos --csv photos.csv

An image becomes what the model was trained on: its centred square, scaled, grey where those were, its pixels by their
mean and deviation. With data.resize=false in the run's config.yaml one of another size is an error.

options
An image that cannot be read is told on standard error, and the exit code is then 1; where none can be, nothing is
written, and it is 2. Of an animation the first picture counts."""


def run(arguments: Arguments) -> int:
    """Tells of each image which class it is of; 1 where one could not be read."""
    if not arguments.rest[1:]:
        given = f"predict {arguments.rest[0]}" if arguments.rest else "predict"
        raise UserError(f"{given}: takes a model, and images or folders of them: toyexp predict RUN photo.png")
    what, *places = map(Path, arguments.rest)
    sheet = arguments.csv
    if sheet is not None:
        _check_sheet(sheet, arguments)
    require_pillow()
    files = listed(places)
    engine, modules = arguments.engine or "auto", arguments.modules
    found = predict(what, files, arguments.top or 1, engine, load(modules), modules)
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
    if arguments.json:
        raise UserError(f"--csv {sheet} --json: are two forms of the same; leave one of them out")
    path = Path(sheet)
    if sheet in ("", "-"):
        raise UserError(f"--csv {sheet}: takes the name of a file, such as --csv classes.csv")
    if path.is_dir():
        raise UserError(f"--csv {sheet}: is a directory; name a file, such as --csv {path / 'classes.csv'}")
    require_place(f"--csv {sheet}", path)
    if os.path.lexists(path):
        raise UserError(f"--csv {sheet}: is already there, and no table is replaced; choose another name")
