"""Describe how transformers stores a model: its config and the names of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from toyexp.base.errors import UserError
from toyexp.base.lazy import numpy as np
from toyexp.interfaces.model import Model

HF_TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}  # dtype: its name in GGUF and safetensors
HF_FILES = frozenset({
    "README.md", "config.json", "generation_config.json", "model.safetensors", "preprocessor_config.json",
    "tokenization.py", "tokenizer.json", "tokenizer.model", "tokenizer_config.json",
})  # fmt: skip

ArrayFunction = Callable[["np.ndarray"], "np.ndarray"]


def identity(numbers: np.ndarray) -> np.ndarray:
    """Return the array unchanged."""
    return numbers


@dataclass(frozen=True)
class HFTensor:
    """Name of a model's tensor in transformers, and the functions that convert its numbers to transformers' layout."""

    name: str
    rows: ArrayFunction = identity  # reorders output features: rows of a weight or of a LoRA's B, elements of a bias
    form: ArrayFunction = identity  # applied after `rows`; numpy.transpose for a Conv1D
    back: ArrayFunction = identity  # inverse of `form`
    is_split: bool = False  # transformers has a tensor for each index of the first axis, which replaces {} in `name`


def original_rows(array: np.ndarray, stored: HFTensor) -> np.ndarray:
    """Return an array with its rows, or the elements of a bias, in the model's order instead of transformers' order."""
    if stored.rows is identity:
        return array
    order = stored.rows(np.arange(len(array), dtype=np.int64)[:, None])[:, 0]
    return array[np.argsort(order)]


@dataclass(frozen=True)
class Conversion:
    """Description of what llama.cpp's converter supports for one architecture."""

    kinds: tuple[str, ...] = ("bpe", "spm")  # supported kinds of tokenizers
    prefix: bool | None = True  # add_space_prefix that it sets for SentencePiece; None: as in the directory
    ignored_setting: str = ""  # sentence about a model setting that the converter ignores; "": none


@dataclass(frozen=True)
class Layout:
    """Contents of a model's directory in transformers: config.json, the stored tensors and further files."""

    config: Mapping[str, Any]
    tensors: Mapping[str, HFTensor]  # by GGUF name
    zeros: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # shapes of biases that only transformers has
    files: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # further JSON files
    tokenizer_replaced: bool = False  # transformers 5 forces its own tokenizer for this model_type
    conversion: Conversion = field(default_factory=Conversion)  # support by llama.cpp's converter


def hf_layout(model: Model, data: Mapping[str, Any]) -> Layout:
    """Return the model's layout in transformers; raise UserError for a model that transformers does not have."""
    if "hf" not in model.forms:
        raise UserError(
            f"model={model.name} cannot be written for transformers: its class has no forms['hf'] of its own"
        )
    layout: Layout = model.forms["hf"](model, data)
    return layout
