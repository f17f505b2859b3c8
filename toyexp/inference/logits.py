"""Compute a model's logits for texts, token ids or images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from toyexp.base.errors import UserError
from toyexp.base.formatting import counted
from toyexp.config.engines import engine_of
from toyexp.inference.loaded_model import LoadedModel, fit_rows
from toyexp.inference.predict import ROWS, Seen
from toyexp.interfaces.dataset import InputSpec
from toyexp.interfaces.engine import Engine


def logits(loaded: LoadedModel, given: Any, engine: str | Engine = "auto") -> np.ndarray:
    """Return the float32 logits of a text, ids [T] or [B, T], or uint8 images [N, H, W, channels].

    What is given without the axis of its batch has an answer without it. Raises UserError for what the model cannot
    read, and for more tokens than its context.
    """
    arrays, specs, single = _inputs(loaded, given)
    rows = min(max((len(array) for array in arrays.values()), default=1), ROWS)
    computes = engine_of(engine, loaded.registry) if isinstance(engine, str) else engine
    with loaded.session(fit_rows(computes, "", rows)[0], specs, rows) as session:
        found = session.logits(arrays)
    return found[0] if single else found


def _inputs(loaded: LoadedModel, given: Any) -> tuple[dict[str, np.ndarray], Mapping[str, InputSpec], bool]:
    """Return the arrays of a batch, what they are, and whether one row was given without its axis."""
    model: Any = loaded.model
    name = model.reads.sequence
    if not name:
        return _images(loaded, given)
    ids = loaded.tokenizer().prompt(given) if isinstance(given, str) else token_ids("logits", given, (1, 2))
    vocab, context = int(model.vocab), int(model.context)
    if ids.min() < 0 or ids.max() >= vocab:
        raise UserError(f"logits: the ids run from {ids.min()} to {ids.max()}, the model's from 0 to {vocab - 1}")
    if ids.shape[-1] > context:
        raise UserError(f"logits: {counted(ids.shape[-1], 'token')} are more than the model's context of {context}")
    rows = np.atleast_2d(ids).astype(np.int32)
    return {name: rows}, model.reads.inputs(rows.shape[1]), ids.ndim == 1


def _images(loaded: LoadedModel, given: Any) -> tuple[dict[str, np.ndarray], Mapping[str, InputSpec], bool]:
    seen = Seen.of(loaded.file, loaded.model, loaded.path)
    images, wanted = _array("logits", given), (seen.size, seen.size, seen.channels)
    single = images.ndim == 3
    images = images[None] if single else images
    if images.dtype != np.uint8 or images.shape[1:] != wanted or not len(images):
        raise UserError(
            f"logits: takes uint8 images [N, {', '.join(map(str, wanted))}], not {list(images.shape)} of "
            f"{images.dtype}; files of any size are for toyexp predict"
        )
    return *seen.arrays(images, min(len(images), ROWS)), single


def token_ids(call: str, given: Any, axes: Sequence[int]) -> np.ndarray:
    """Return token ids as an array of so many axes; UserError for what are none."""
    ids = _array(call, given)
    if ids.ndim not in axes or ids.dtype.kind not in "iu" or not ids.size:
        shapes = " or ".join(("[T]", "[B, T]")[n - 1] for n in axes)
        raise UserError(f"{call}: takes a text, or token ids {shapes}, not {list(ids.shape)} of {ids.dtype}")
    return ids


def _array(call: str, given: Any) -> np.ndarray:
    try:
        return np.asarray(given)
    except ValueError:
        raise UserError(f"{call}: takes rows of equal length") from None
