"""Writes a trained model as a GGUF file that stock llama.cpp loads."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from toyexp.errors import RunFailed, UserError, choose
from toyexp.model import Model
from toyexp.plan import Lens, LoraAdapter, Plan, lora_names
from toyexp.tokenizer import UNUSED, Tokenizer

FILE_TYPES = {"f32": 0, "f16": 1, "q8_0": 7, "bf16": 32}  # general.file_type of llama.cpp


def check_type(kind: str, key: str = "type") -> None:
    """Raises UserError unless `kind`, given as `key`, is a type that can be written."""
    if kind not in FILE_TYPES:
        raise UserError(f"{key}={kind}: {choose(kind, FILE_TYPES)}")


def export_tensors(plan: Plan, values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The model's own tensors from the run's: adapters are folded in.

    A lens makes an ordinary embedding, E' = E W^T; a LoRA pair an ordinary weight, W' = W + scale B A.
    """
    out = dict(values)
    for adapter in plan.adapters:
        if isinstance(adapter, Lens):
            lens = out.pop(adapter.projection).astype(np.float64)
            out[adapter.target] = (out[adapter.target].astype(np.float64) @ lens.T).astype(np.float32)
        else:
            a, b = (out.pop(name).astype(np.float64) for name in lora_names(adapter.target))
            out[adapter.target] = (out[adapter.target] + adapter.scale * (b @ a)).astype(np.float32)
    return {spec.name: out[spec.name] for spec in plan.model.tensors()}


def write_model(
    path: Path,
    model: Model,
    tensors: Mapping[str, np.ndarray],
    tokenizer: Tokenizer | None,
    kind: str = "f32",
    general: Mapping[str, Any] | None = None,
    data: Mapping[str, Any] | None = None,
) -> None:
    """Writes `path` in one piece: to a temporary name beside it, flushed, then renamed.

    `tensors` are the model's, float32, by GGUF name; `general` are further `general.*` keys, `data` further keys of
    the architecture. Without a tokenizer a language model's file holds ids only, which llama.cpp loads as `no_vocab`.
    """
    check_type(kind)
    with _writing(path, model.architecture) as writer:
        writer.add_type("model")
        writer.add_file_type(FILE_TYPES[kind])
        writer.add_quantization_version(2)
        for key, value in model_metadata(model, general or {}, data or {}).items():
            _add(writer, key, value)
        if model.reads == "tokens":
            for key, value in _vocabulary(tokenizer, rows=len(tensors["token_embd.weight"])).items():
                _add(writer, f"tokenizer.ggml.{key}", value)
            if tokenizer is not None and tokenizer.chat_template:
                writer.add_chat_template(tokenizer.chat_template)
        for name, array in {**tensors, **model.constants()}.items():
            _add_tensor(writer, name, array, kind)


def write_adapter(
    path: Path, plan: Plan, values: Mapping[str, np.ndarray], general: Mapping[str, Any] | None = None
) -> None:
    """Writes the plan's LoRA adapters for llama.cpp's `--lora`, in one piece like `write_model`, in float32.

    llama.cpp adds alpha / r * B A to the base's tensor of the same name, with one alpha for the whole file.
    """
    adapters = [a for a in plan.adapters if isinstance(a, LoraAdapter)]
    alphas = {a.scale * plan.tensor(lora_names(a.target)[0]).shape[0] for a in adapters}
    if len(alphas) != 1:
        raise UserError(f"{path.name}: an adapter file holds one alpha, these adapters have {sorted(alphas)}")
    with _writing(path, plan.model.architecture) as writer:
        writer.add_type("adapter")
        for key, value in (general or {}).items():
            _add(writer, f"general.{key}", value)
        writer.add_string("adapter.type", "lora")
        writer.add_float32("adapter.lora.alpha", alphas.pop())
        for adapter in adapters:
            for name in lora_names(adapter.target):
                _add_tensor(writer, name, values[name], "f32")


@contextlib.contextmanager
def _writing(path: Path, architecture: str) -> Iterator[Any]:
    """A GGUFWriter to be filled; the file appears under its name once it is whole."""
    from gguf import GGUFWriter  # deferred: training never needs it

    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    writer = GGUFWriter(temporary, architecture)
    try:
        yield writer
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise RunFailed(f"{path}: could not be written: {error.strerror or 'the disk may be full'}") from error
    finally:
        with contextlib.suppress(OSError):  # after a failed write, closing fails the same way once more
            writer.close()
        with contextlib.suppress(OSError):  # a disk that cannot be written, which was the error
            temporary.unlink(missing_ok=True)


def model_metadata(model: Model, general: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that describe a model, under their full names."""
    own = {**model.gguf_metadata(), **data}
    return {f"general.{k}": v for k, v in general.items()} | {f"{model.architecture}.{k}": v for k, v in own.items()}


def _vocabulary(tokenizer: Tokenizer | None, rows: int) -> dict[str, Any]:
    """The tokenizer's keys, padded to the rows of the embedding, as llama.cpp requires."""
    if tokenizer is None:
        return {"model": "no_vocab"}
    keys = tokenizer.gguf_metadata()
    known, spare = set(keys["tokens"]), rows - tokenizer.vocab
    names = (name for i in itertools.count(tokenizer.vocab) if (name := f"<unused{i}>") not in known)
    keys["tokens"] = [*keys["tokens"], *itertools.islice(names, spare)]  # llama.cpp aborts on two equal tokens
    keys["token_type"] = [*keys["token_type"], *itertools.repeat(UNUSED, spare)]
    return keys


def _add(writer: Any, key: str, value: Any) -> None:
    """One key in the type llama.cpp insists on: UINT32, FLOAT32, BOOL, STRING, or an array."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _add_tensor(writer: Any, name: str, array: np.ndarray, kind: str) -> None:
    """Matrices in `kind`; norms, biases and positions stay F32, and rows Q8_0 cannot cut into 32s become F16."""
    from gguf import GGMLQuantizationType as Type
    from gguf import quants

    array = np.ascontiguousarray(array, np.float32)
    if array.ndim < 2 or name.endswith("position_embd.weight") or kind == "f32":
        writer.add_tensor(name, array)
        return
    if kind == "q8_0" and array.shape[-1] % 32:
        kind = "f16"
    if kind == "f16":
        writer.add_tensor(name, array.astype(np.float16))
        return
    target = {"bf16": Type.BF16, "q8_0": Type.Q8_0}[kind]
    writer.add_tensor(name, quants.quantize(array, target), raw_dtype=target)
