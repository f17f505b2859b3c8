"""Warm start: the token embedding is copied from a GGUF file, the donor; all other weights start random.

The copied embedding is a table [vocab, d_donor], frozen by default. A trainable projection W [d_model, d_donor], called
the lens, maps each row e of the table to the model's width: x = W e.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import toyexp.formats
from toyexp import Lens, Model, Normal, Plan, PlanTensor, Recipe, RunPreview, Setup, UserError, printable
from toyexp.base import numpy as np
from toyexp.base import require_choice
from toyexp_recipes import original
from toyexp_recipes.base import token_mismatch_warnings
from toyexp_recipes.scratch import DONOR, INITS

log = logging.getLogger("toyexp")

TABLE = "token_embd.weight"
PROJECTION = "lens.proj.weight"
LENSES = ("auto", "pca", "random", "none")


@dataclass
class Warm(Recipe):
    """Train with the token embedding of another GGUF (the donor) and random values for all other weights."""

    name: ClassVar[str] = "warm"
    starts_from: ClassVar[str] = "donor"
    needs_tensors: ClassVar[tuple[str, ...]] = (TABLE,)

    donor: str | None = None  # model file, run or checkpoint whose embedding to copy; null: toyexp's small donor
    lens: str = "auto"  # projection to the model's width: pca | random | none | auto (pca, or random if wider)
    freeze_donor: bool = True  # true: do not train the copied embedding
    init: str = "default"  # other weights: default (seeded by tensor name) | toy (as toyexp's predecessor in Ruby)

    @property
    def path(self) -> Path:
        """Path of the donor's GGUF file."""
        return DONOR if self.donor is None else toyexp.find_model_file(Path(self.donor))

    def check(self) -> None:
        """Raise UserError for an unknown value of `lens` or `init`.

        Also raise it if the donor, the GGUF file whose token embedding is copied, is missing or has no embedding.
        """
        require_choice("recipe", self, init=INITS, lens=LENSES)
        if self.donor == "":
            raise UserError("recipe.donor='': is empty; name a file, or leave it out to use the donor of toyexp")
        donor_embed_width(self.path)

    def vocabulary(self) -> Path | None:
        """Return the donor's GGUF file. The data then uses this file's tokenizer, whose ids the embedding needs."""
        return self.path

    def origin(self) -> tuple[str, str] | None:
        """Return "donor" and the path of the donor's file; for the default donor a phrase in place of the path."""
        return "donor", f"{self.path}" if self.donor else "toyexp's own small donor"

    def warnings(self, preview: RunPreview) -> Iterable[str]:
        """Return a warning if the data's token ids differ from those of the donor."""
        return token_mismatch_warnings("donor", self.path, preview)

    def plan(self, model: Model, setup: Setup) -> Plan:
        """Return a plan of the model's tensors, in which the token embedding has the donor's width.

        The plan also has the lens, a matrix that projects this width to the model's. If the setting `lens` is none,
        there is no such matrix, and both widths must be equal. The method `warm` fills in the donor's values.
        """
        specs = {t.name: t for t in model.tensors()}
        if self.init == "toy":
            original.check_model(model)
        (vocab, d_model), width = specs[TABLE].shape, donor_embed_width(self.path)
        tensors = {t.name: PlanTensor.from_spec(t) for t in specs.values()}
        trainable = not self.freeze_donor
        if self.lens == "none":
            if width != d_model:
                key, fit = _width_key(model, d_model), "pca" if d_model <= width else "random"
                resized = _resize(model, d_model, width)
                remedies = [f"use recipe.lens={fit}"] * ("output.weight" in specs) + [resized] * bool(resized)
                raise UserError(
                    f"{self.path}: width mismatch: expected {d_model}{f' ({key})' if key else ''}, the donor has "
                    f"{width}; {', or '.join(remedies) or 'use a donor of that width'}"
                )
            tensors[TABLE] = replace(tensors[TABLE], trainable=trainable)
            self._check_rows(vocab, width)
            return setup.plan(model, list(tensors.values()))
        if "output.weight" not in specs:
            remedies = ["model.tied=false"] * ("tied" in model.settings()) + ["recipe.lens=none"] * (width == d_model)
            resized = _resize(model, d_model, width)
            remedies += [f"recipe.lens=none {resized}"] * bool(resized and width != d_model)
            raise UserError(
                "recipe.lens (a projection) needs a model with a separate output layer (output.weight): "
                + (f"add {' or '.join(remedies)}" if remedies else f"model={model.name} has none; use another model")
            )
        if self._lens(d_model, width) == "pca" and d_model > width:
            setting = f"{_width_key(model, d_model) or 'the width'}={d_model}"
            raise UserError(f"recipe.lens=pca: {setting} exceeds the donor's width {width}; use recipe.lens=random")
        self._check_rows(vocab, width)
        tensors[TABLE] = replace(tensors[TABLE], shape=(vocab, width), values=Normal(0.02), trainable=trainable)
        lens = PlanTensor(PROJECTION, (d_model, width), Normal(1 / math.sqrt(width)))
        return setup.plan(model, [*tensors.values(), lens], [Lens(TABLE, PROJECTION)])

    def _lens(self, d_model: int, width: int) -> str:
        if self.lens == "auto":
            return "pca" if d_model <= width else "random"
        return self.lens

    def _check_rows(self, vocab: int, width: int) -> None:
        file = _open_with_rows(self.path, vocab, width)
        if vocab:  # 0 if the model was not fitted to data, as in `toyexp plugins --matrix`
            file.check_finite(TABLE, vocab)

    def warm(self, session: toyexp.Session) -> None:
        """Upload the donor's embedding rows to the session and, if `lens` selects PCA, the projection matrix.

        If `init` is toy, first upload the initial values of toyexp's predecessor in Ruby for all random tensors.
        """
        vocab, width = session.plan.tensor(TABLE).shape
        file = _open_with_rows(self.path, vocab, width)
        rows = file.weights(TABLE, rows=vocab)
        if self.init == "toy":
            original.upload(session)
        session.upload(TABLE, rows, source=str(self.path))
        if self.lens == "none":
            return
        d_model = session.plan.tensor(PROJECTION).shape[0]
        if self._lens(d_model, width) == "pca":
            projection, explained = pca(rows, d_model)
            log.info("the PCA projection keeps %.1f%% of the variance of the donor's embedding", 100 * explained)
            session.upload(PROJECTION, projection, source=str(self.path))


def _width_key(model: Model, width: int) -> str:
    """Return the key of the setting with the model's width, such as `model.d_model`.

    If the model has no d_model of this value, return the only integer setting that has the value. Return an empty
    string if no setting, or more than one, has it.
    """
    names = [name for name, value in model.settings().items() if type(value) is int and value == width]
    names = ["d_model"] if "d_model" in names else names
    return f"model.{names[0]}" if len(names) == 1 else ""


def _resize(model: Model, d_model: int, width: int) -> str:
    """Return the settings that change the model's width from `d_model` to `width`, such as `model.d_model=96`.

    If the model rejects the new width, also set its d_ff, in proportion. Return "" if it then still rejects it.
    """
    key = _width_key(model, d_model).removeprefix("model.")
    for more in {}, {"d_ff": getattr(model, "d_ff", 0) * width // d_model}:
        with contextlib.suppress(UserError, TypeError):
            replace(model, **{key: width}, **more).check()
            return " ".join(f"model.{name}={value}" for name, value in ({key: width} | more).items())
    return ""


def donor_embed_width(path: Path) -> int:
    """Return the embedding width of the donor, a GGUF file. Raise UserError if the width or embedding is missing."""
    file = _open(path)
    key = f"{file.architecture}.embedding_length"
    width = file.metadata.get(key)
    if not isinstance(width, int) or width <= 0:
        raise file.error(f"the donor has no {printable(key)}")
    if TABLE not in file.tensors:  # such as image models
        raise file.error(f"the donor has no {TABLE}; its architecture is {printable(file.architecture)}")
    return width


def pca(rows: np.ndarray, directions: int) -> tuple[np.ndarray, float]:
    """Return the first principal axes of `rows` [n, d], and the fraction of the variance that they explain.

    The axes [directions, d] are eigenvectors of the covariance matrix, computed in float64, in descending order of
    their eigenvalues (Pearson 1901). The sign of an axis makes its entry of largest magnitude positive, so that the
    axes are the same on every machine.
    """
    centred = rows.astype(np.float64) - rows.mean(axis=0, dtype=np.float64)
    values, vectors = np.linalg.eigh(centred.T @ centred / max(len(rows) - 1, 1))
    axes = vectors[:, ::-1][:, :directions].T
    signs = np.sign(axes[np.arange(len(axes)), np.abs(axes).argmax(axis=1)])
    explained = float(values[::-1][:directions].sum() / (values.sum() or 1.0))  # equal rows have no variance
    return (axes * signs[:, None]).astype(np.float32), explained


def _open(path: Path) -> toyexp.formats.GGUFFile:
    file = toyexp.formats.open_gguf(str(path))
    if TABLE not in file.tensors:  # a file with an embedding may have an unknown architecture
        toyexp.formats.require_model(file)
    return file


def _open_with_rows(path: Path, vocab: int, width: int) -> toyexp.formats.GGUFFile:
    """Open the donor's file. Raise UserError unless its embedding has at least `vocab` rows of length `width`."""
    file = _open(path)
    shape = file.tensors[TABLE].shape
    if len(shape) != 2 or shape[1] != width:
        raise file.error(f"{TABLE} has the shape {list(shape)}, expected rows of {width}")
    if shape[0] < vocab:
        raise file.error(f"{TABLE} has too few rows: expected at least {vocab}, got {shape[0]}")
    return file
