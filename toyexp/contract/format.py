"""What a model says of itself to the formats of files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from toyexp.base.errors import UserError

Numbers = Callable[[np.ndarray], np.ndarray]


def unchanged(numbers: np.ndarray) -> np.ndarray:
    """The numbers as they are."""
    return numbers


@dataclass(frozen=True)
class Place:
    """Where a tensor of a model stands in transformers."""

    name: str
    rows: Numbers = unchanged  # the order of its outputs there: of a weight's rows, a bias, or those of a LoRA's B
    form: Numbers = unchanged  # what else becomes of the numbers, after that; numpy.transpose in a Conv1D


@dataclass(frozen=True)
class Conversion:
    """What llama.cpp's converter reads of one architecture."""

    kinds: tuple[str, ...] = ("bpe", "spm")  # of tokenizers
    prefix: bool | None = True  # whether it thinks a blank before a SentencePiece's texts; None: it reads that
    lost: str = ""  # a setting of this model that it does not read


@dataclass(frozen=True)
class Layout:
    """A model in transformers: config.json, where each of its tensors stands, and what it needs beyond that."""

    config: Mapping[str, Any]
    tensors: Mapping[str, Place]  # by our name
    zeros: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # by their name: biases that the model lacks
    files: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # further files, in JSON
    tokenizer_replaced: bool = False  # transformers 5 has a tokenizer of its own for this model_type
    conversion: Conversion = field(default_factory=Conversion)  # what llama.cpp's converter makes of it


@dataclass(frozen=True)
class TensorInfo:
    """A tensor of a file: its shape in numpy order ([out, in]), its type, and where its bytes are."""

    name: str
    shape: tuple[int, ...]
    type: str
    type_id: int
    path: Path  # the file that holds it, of a split model one of several
    offset: int  # bytes from the start of that file
    nbytes: int


class ModelFile(Protocol):
    """An open file that holds a model: what a model reads itself from."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]

    @property
    def architecture(self) -> str:
        """What the file says it holds; raises UserError where it says nothing."""

    def error(self, cause: str) -> UserError:
        """An error that names the file."""

    def read(self, name: str, rows: int | None = None) -> np.ndarray:
        """The first rows of a tensor, or all of it, in float32."""
