"""Warm start: the token embedding comes from a donor GGUF, read through a lens, and the rest from random values.

WarmStartMetal of the original program: the donor's rows fill a table [vocab, d_donor]; a trainable projection, the lens
[d_model, d_donor], brings them to the model's width, x = lens e. The table is frozen unless told otherwise.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import toyexp.formats
from toyexp import Lens, Model, Normal, Plan, PlanTensor, Recipe, RunPreview, Setup, UserError, printable
from toyexp.base import require_choice
from toyexp_recipes.base import other_tokens
from toyexp_recipes.scratch import DONOR, INITS

if TYPE_CHECKING:
    import numpy as np

    from toyexp import Session
    from toyexp.formats import GGUFFile

log = logging.getLogger("toyexp")

TABLE = "token_embd.weight"
PROJECTION = "lens.proj.weight"
LENSES = ("auto", "pca", "random", "none")


@dataclass
class Warm(Recipe):
    """Embeddings from a donor GGUF, the rest from random values."""

    name: ClassVar[str] = "warm"
    starts_from: ClassVar[str] = "donor"
    needs_tensors: ClassVar[tuple[str, ...]] = (TABLE,)

    donor: str | None = None  # GGUF, run's directory or checkpoint whose embedding is used; null: the small one of ours
    lens: str = "auto"  # to d_model: pca | random | none (equal widths) | auto: pca, random for a model that is wider
    freeze_donor: bool = True  # keep the donor's rows as they are
    init: str = "default"  # of all other values: default (drawn by name) | toy (as the original draws llama and gpt2)

    @property
    def path(self) -> Path:
        """The donor's file."""
        return DONOR if self.donor is None else toyexp.find_model_file(Path(self.donor))

    def check(self) -> None:
        """Raises UserError for an unknown lens or initialiser, and for a donor that is not there."""
        require_choice("recipe", self, init=INITS, lens=LENSES)
        if self.donor == "":
            raise UserError("recipe.donor='': names no file; leave it out, or null, for toyexp's own small donor")
        donor_embed_width(self.path)

    def vocabulary(self) -> Path | None:
        """The donor, whose rows only mean something with its own tokens."""
        return self.path

    def origin(self) -> tuple[str, str] | None:
        """The donor, and whether it is toyexp's own."""
        return "donor", f"{self.path}" if self.donor else f"toyexp's own small one, {self.path}"

    def warnings(self, preview: RunPreview) -> Iterable[str]:
        """That the data's ids are not those of the donor."""
        return other_tokens("donor", self.path, preview)

    def plan(self, model: Model, setup: Setup) -> Plan:
        """The model's tensors, with the embedding replaced by the donor's table and, unless lens=none, the lens."""
        specs = {t.name: t for t in model.tensors()}
        if self.init == "toy":
            from toyexp_recipes import original

            original.check_model(model)
        (vocab, d_model), width = specs[TABLE].shape, donor_embed_width(self.path)
        tensors = {t.name: PlanTensor(t.name, t.shape, t.init) for t in specs.values()}
        trainable = not self.freeze_donor
        if self.lens == "none":
            if width != d_model:
                key, fit = _width_key(model, d_model), "pca" if d_model <= width else "random"
                ways = [f"use recipe.lens={fit}"] * ("output.weight" in specs) + [f"{key}={width}"] * bool(key)
                raise UserError(
                    f"{self.path}: width mismatch: expected {d_model}{f' ({key})' if key else ''}, the donor has "
                    f"{width}; {', or '.join(ways) or 'name a donor of that width'}"
                )
            tensors[TABLE] = replace(tensors[TABLE], trainable=trainable)
            self._check_rows(vocab, width)
            return setup.plan(model, list(tensors.values()))
        if "output.weight" not in specs:
            ways = ["model.tied=false"] * ("tied" in model.settings()) + ["recipe.lens=none"] * (width == d_model)
            key = _width_key(model, d_model)
            ways += [f"recipe.lens=none {key}={width}"] * bool(key and width != d_model)
            raise UserError(
                "recipe=warm with a lens needs an output layer (output.weight) of the model's own: "
                + (f"add {' or '.join(ways)}" if ways else f"model={model.name} has none; take another model")
            )
        if self._lens(d_model, width) == "pca" and d_model > width:
            wanted = f"{_width_key(model, d_model) or 'the width'}={d_model} is more than"
            raise UserError(f"recipe.lens=pca: {wanted} the donor's {width} directions; use recipe.lens=random")
        self._check_rows(vocab, width)
        tensors[TABLE] = PlanTensor(TABLE, (vocab, width), Normal(0.02), trainable)
        lens = PlanTensor(PROJECTION, (d_model, width), Normal(1 / math.sqrt(width)))
        return setup.plan(model, [*tensors.values(), lens], [Lens(TABLE, PROJECTION)])

    def _lens(self, d_model: int, width: int) -> str:
        if self.lens == "auto":
            return "pca" if d_model <= width else "random"
        return self.lens

    def _check_rows(self, vocab: int, width: int) -> None:
        file = _with_rows(self.path, vocab, width)
        if vocab:  # a model that knows no data yet, as `toyexp plugins --matrix` plans it, takes no rows
            file.check_finite(TABLE, vocab)

    def warm(self, session: Session) -> None:
        """Uploads the donor's first rows and the lens over what was drawn; realize_warm of the original program."""
        vocab, width = session.plan.tensor(TABLE).shape
        file = _with_rows(self.path, vocab, width)
        rows = file.weights(TABLE, rows=vocab)
        if self.init == "toy":
            from toyexp_recipes import original

            original.upload(session)
        session.upload(TABLE, rows, source=str(self.path))
        if self.lens == "none":
            return
        d_model = session.plan.tensor(PROJECTION).shape[0]
        if self._lens(d_model, width) == "pca":
            projection, explained = pca(rows, d_model)
            log.info("pca lens keeps %.1f%% of the donor's variance", 100 * explained)
            session.upload(PROJECTION, projection, source=str(self.path))


def _width_key(model: Model, width: int) -> str:
    """The key that sets a model's width: d_model, or the one setting of that value; empty where none can be told."""
    found = [name for name, value in model.settings().items() if type(value) is int and value == width]
    found = ["d_model"] if "d_model" in found else found
    return f"model.{found[0]}" if len(found) == 1 else ""


def donor_embed_width(path: Path) -> int:
    """The donor's embedding width, from `<architecture>.embedding_length`; UserError for a file with no embedding."""
    file = _open(path)
    key = f"{file.architecture}.embedding_length"
    width = file.metadata.get(key)
    if not isinstance(width, int) or width <= 0:
        raise file.error(f"the donor has no {printable(key)}")
    if TABLE not in file.tensors:  # as in a model of images
        raise file.error(f"the donor has no {TABLE}; its architecture is {printable(file.architecture)}")
    return width


def pca(rows: np.ndarray, directions: int) -> tuple[np.ndarray, float]:
    """The `directions` main axes of `rows` [n, d] as a matrix [directions, d], and the share of variance they keep.

    Eigenvectors of the covariance of the centred rows in float64, largest first (Pearson 1901). The sign of each
    axis is fixed, its largest entry positive, so that every machine gets the same lens.
    """
    import numpy as np

    centred = rows.astype(np.float64) - rows.mean(axis=0, dtype=np.float64)
    values, vectors = np.linalg.eigh(centred.T @ centred / max(len(rows) - 1, 1))
    axes = vectors[:, ::-1][:, :directions].T
    signs = np.sign(axes[np.arange(len(axes)), np.abs(axes).argmax(axis=1)])
    explained = float(values[::-1][:directions].sum() / (values.sum() or 1.0))  # of rows that are all the same: none
    return (axes * signs[:, None]).astype(np.float32), explained


def _open(path: Path) -> GGUFFile:
    file = toyexp.formats.open_gguf(str(path))
    if TABLE not in file.tensors:  # what has the rows is a donor, whatever else it is
        toyexp.formats.require_model(file)
    return file


def _with_rows(path: Path, vocab: int, width: int) -> GGUFFile:
    """The donor; UserError unless its table has `vocab` rows of `width`."""
    file = _open(path)
    shape = file.tensors[TABLE].shape
    if len(shape) != 2 or shape[1] != width:
        raise file.error(f"{TABLE} has the shape {list(shape)}, expected rows of {width}")
    if shape[0] < vocab:
        raise file.error(f"{TABLE} has too few rows: expected at least {vocab}, it has {shape[0]}")
    return file
