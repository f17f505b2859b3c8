"""A model as transformers keeps it, a directory of config.json and model.safetensors; LoRA adapters as PEFT does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from toyexp.base.writing import dump_json, in_one_piece, required, write_synced
from toyexp.contract.model import Model
from toyexp.contract.plan import LoraAdapter, Plan, lora_names, one_alpha
from toyexp.formats.conversion import lacks
from toyexp.formats.huggingface_tokenizer import tokenizer_files
from toyexp.formats.layout import HF_TYPES, Place, layout_of
from toyexp.formats.safetensors import Tensor, write_safetensors
from toyexp.text.sentencepiece import SentencePiece
from toyexp.text.tokenizer import Tokenizer

FORM = "4.51.0"  # whose form config.json has; without it 4.57 takes a large vocabulary for one of Mistral's, and warns
METADATA = {"format": "pt"}  # transformers insists on it


def write_folder(
    path: Path,
    model: Model,
    read: Callable[[str], np.ndarray],
    tokenizer: Tokenizer | None,
    dtype: str = "float32",
    data: Mapping[str, Any] | None = None,
) -> list[str]:
    """Writes the directory `path` in one piece, in place of an earlier one: to a temporary name, flushed, renamed.

    `read` gives a tensor by our name, float32, and is asked for one at a time; `data` are the keys that the data adds
    to a GGUF. Returns a sentence for each tensor whose numbers are not finite, or are not in this type. Raises
    UserError for a model that transformers does not have.
    """
    layout = layout_of(model, data or {})
    tensors: dict[str, Tensor] = {}
    for spec in model.tensors():
        place = layout.tensors[spec.name]
        shape = place.form(np.broadcast_to(np.float32(0), spec.shape)).shape
        tensors[place.name] = shape, partial(_placed, read, spec.name, place)
    for name, shape in layout.zeros.items():
        tensors[name] = shape, partial(np.zeros, shape, np.float32)
    config = {**layout.config, "torch_dtype": dtype, "transformers_version": FORM}
    settings = dict(layout.files)
    if model.reads.text:
        ids = _special_ids(tokenizer)
        config |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, **ids}
        if tokenizer is not None and "eot_token_id" in config:
            config["eot_token_id"] = tokenizer.source.get("ggml.eot_token_id", tokenizer.eos)
        settings["generation_config.json"] = ids
    settings["config.json"] = config
    files = {name: dump_json(content, indent=2).encode() for name, content in settings.items()}
    if tokenizer is not None:
        files |= tokenizer_files(tokenizer, layout.tokenizer_replaced)
    with _directory(path) as folder:
        for name, content in files.items():
            write_synced(folder / name, content)
        return write_safetensors(folder / "model.safetensors", tensors, HF_TYPES[dtype], METADATA)


def hf_notes(model: Model, data: Mapping[str, Any], tokenizer: Tokenizer | None) -> list[str]:
    """A sentence for each who makes something else of a model's directory than toyexp and llama.cpp do."""
    lines: list[str] = []
    if isinstance(tokenizer, SentencePiece) and (count := tokenizer.joined_otherwise()):
        lines.append(f"transformers may join {count} of its {tokenizer.vocab} tokens in another order than llama.cpp")
    lost = lacks(layout_of(model, data).conversion, tokenizer) if model.reads.text else ""
    if lost:
        lines.append(f"llama.cpp's convert_hf_to_gguf.py cannot read this back: {lost}")
    return lines


def write_adapter_folder(path: Path, plan: Plan, values: Mapping[str, np.ndarray]) -> list[str]:
    """Writes the plan's LoRA adapters for PEFT, in one piece like `write_folder`, in float32.

    PEFT adds lora_alpha / r * B A to the linears of the base in transformers, so B's rows stand in their order.
    """
    adapters = [a for a in plan.adapters if isinstance(a, LoraAdapter)]
    places = layout_of(plan.model, {}).tensors
    tensors: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}  # by module
    for adapter in adapters:
        place, (a, b) = places[adapter.target], (values[name] for name in lora_names(adapter.target))
        module = place.name.removesuffix(".weight")
        ranks[module] = len(a)
        for name, array in (("lora_A", a), ("lora_B", place.rows(b))):
            tensors[f"base_model.model.{module}.{name}.weight"] = array.shape, array.copy
    rank = Counter(ranks.values()).most_common(1)[0][0]
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if plan.model.reads.text else None,
        "base_model_name_or_path": None,
        "inference_mode": True,
        "r": rank,
        "rank_pattern": {module: own for module, own in ranks.items() if own != rank},
        "lora_alpha": one_alpha(plan),
        "lora_dropout": adapters[0].dropout,
        "target_modules": [*ranks],
        "fan_in_fan_out": any(places[a.target].form is np.transpose for a in adapters),
        "bias": "none",
    }
    with _directory(path) as folder:
        write_synced(folder / "adapter_config.json", dump_json(config, indent=2).encode())
        return write_safetensors(folder / "adapter_model.safetensors", tensors, "F32", METADATA)


def _placed(read: Callable[[str], np.ndarray], name: str, place: Place) -> np.ndarray:
    return place.form(place.rows(read(name)))


def _special_ids(tokenizer: Tokenizer | None) -> dict[str, Any]:
    """What text begins with, where it ends, and what fills up the rows of a batch."""
    if tokenizer is None:
        return {}
    ends = [tokenizer.eos, *sorted(tokenizer.ends - {tokenizer.eos})]
    bos = {} if tokenizer.bos is None else {"bos_token_id": tokenizer.bos}
    return {**bos, "eos_token_id": ends if len(ends) > 1 else ends[0], "pad_token_id": tokenizer.padding}


@contextmanager
def _directory(path: Path) -> Iterator[Path]:
    """A directory to write into, which appears as `path` once it is whole; RunFailed when it cannot be written."""
    with required(path), in_one_piece(path) as folder:
        folder.mkdir()
        yield folder
