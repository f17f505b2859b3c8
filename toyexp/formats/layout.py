"""A model as transformers has it: what it is called there, and where its tensors stand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from toyexp.base.errors import UserError
from toyexp.interfaces.model import Model

if TYPE_CHECKING:
    import numpy as np

HF_TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}  # our names, and those of GGUF and safetensors
HF_FILES = frozenset({
    "README.md", "config.json", "generation_config.json", "model.safetensors", "preprocessor_config.json",
    "tokenization.py", "tokenizer.json", "tokenizer.model", "tokenizer_config.json",
})  # fmt: skip

ArrayFunction = Callable[["np.ndarray"], "np.ndarray"]


def identity(numbers: np.ndarray) -> np.ndarray:
    """The numbers as they are."""
    return numbers


@dataclass(frozen=True)
class HFTensor:
    """Where a tensor of a model stands in transformers."""

    name: str
    rows: ArrayFunction = identity  # the order of its outputs there: of a weight's rows, a bias, or those of a LoRA's B
    form: ArrayFunction = identity  # what else becomes of the numbers, after that; numpy.transpose in a Conv1D


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
    tensors: Mapping[str, HFTensor]  # by our name
    zeros: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # by their name: biases that the model lacks
    files: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # further files, in JSON
    tokenizer_replaced: bool = False  # transformers 5 has a tokenizer of its own for this model_type
    conversion: Conversion = field(default_factory=Conversion)  # what llama.cpp's converter makes of it


def hf_layout(model: Model, data: Mapping[str, Any]) -> Layout:
    """What the model is in transformers; UserError for one that they do not have."""
    if "hf" not in model.forms:
        raise UserError(f"model={model.name} has no Hugging Face layout: its class names none in forms['hf']")
    layout: Layout = model.forms["hf"](model, data)
    return layout
