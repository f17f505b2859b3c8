"""Write a trained model as a GGUF file that unmodified llama.cpp loads."""

from __future__ import annotations

import itertools
import math
import struct
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from toyexp.base.errors import RunFailed, UserError, printable
from toyexp.base.writing import convert_write_errors, write_atomically
from toyexp.formats.gguf.form import gguf_architecture, gguf_form
from toyexp.formats.gguf.ggml_types import (
    GGUF_TYPES,
    IDS,
    check_pieces,
    dequantise,
    encode_pieces,
    fitting_type,
    iter_pieces,
)
from toyexp.formats.gguf.header import ARRAY, SCALARS, STRING
from toyexp.formats.gguf.quantise import FILE_TYPES, K_QUANTS, check_type, quantise, tensor_type
from toyexp.formats.gguf.read import GGUFFile
from toyexp.formats.gguf.tokenizer import compatible_name
from toyexp.interfaces.format import ModelFile, TensorInfo
from toyexp.interfaces.model import Model, model_settings
from toyexp.interfaces.plan import Plan
from toyexp.tokenizers.tokenizer import NORMAL, UNUSED, Tokenizer, placeholder_metadata

U32, I32, F32, BOOL, U64, I64 = 4, 5, 6, 7, 10, 11  # GGUF value types
_KINDS = {np.dtype(form): kind for kind, form in SCALARS.items()}


def write_model(
    path: Path,
    model: Model,
    tensors: Mapping[str, np.ndarray],
    tokenizer: Tokenizer | None,
    kind: str = "f32",
    general: Mapping[str, Any] | None = None,
    data: Mapping[str, Any] | None = None,
) -> list[str]:
    """Write a model as a GGUF file, atomically; return a sentence for each tensor that is not finite.

    `tensors` maps GGUF names to float32 arrays; `general` and `data` are further keys without their prefixes
    (`general.`, `<architecture>.`). Without a tokenizer, a language model gets placeholder tokens. A tensor with finite
    numbers too large for its type stays F32.
    """
    check_type(kind)
    if kind in K_QUANTS:
        exact = path.with_name(f"{path.stem}-f32.gguf")
        problems = write_model(exact, model, tensors, tokenizer, "f32", general, data)
        try:
            quantise(exact, path, kind)
        except RunFailed as error:
            raise RunFailed(f"{error}; the model is saved in float32 as {exact}") from error
        exact.unlink()
        return problems
    writer = Writer(model_keys(model, tokenizer, kind, general or {}, data or {}))
    for source in (tensors, gguf_form(model).constants(model)):
        for name, array in source.items():
            type_name = fitting_type(array, tensor_type(name, array.shape, kind, tied="output.weight" not in tensors))
            writer.add_numbers(name, array.shape, type_name, _pieces(source, name))
    return writer.save(path)


def model_keys(
    model: Model, tokenizer: Tokenizer | None, kind: str, general: Mapping[str, Any], data: Mapping[str, Any]
) -> dict[str, Any]:
    """Return all keys of the GGUF file of a model. The parameters are those of `write_model`."""
    if isinstance(general.get("name"), str):
        general = {**general, "name": compatible_name(general["name"], tokenizer)}
    return {
        "general.architecture": gguf_architecture(model),
        "general.type": "model",
        "general.file_type": FILE_TYPES[kind],
        "general.quantization_version": 2,
        "general.size_label": size_label(sum(math.prod(t.shape) for t in model.tensors())),
        **model_metadata(model, general, data),
        **(_vocabulary(tokenizer, _vocab_size(model)) if model.reads.text else {}),
    }


def _pieces(tensors: Mapping[str, np.ndarray], name: str) -> Iterator[np.ndarray]:
    """Yield the pieces of a tensor, which is read when the first piece is requested."""
    yield from iter_pieces(tensors[name])


def _vocab_size(model: Model) -> int:
    rows = (t.shape[0] for t in model.tensors() if t.name == "token_embd.weight")
    return next(rows, int(model_settings(model).get("vocab", 0)))


def write_adapter(
    path: Path,
    plan: Plan,
    values: Mapping[str, np.ndarray],
    general: Mapping[str, Any] | None = None,
    chat_template: str = "",
) -> list[str]:
    """Write the plan's LoRA adapters in llama.cpp's `--lora` format, atomically, in float32.

    For matrices A and B of rank r, llama.cpp adds alpha / r * B A to the base's tensor of the same name. The file has a
    single alpha for all tensors. `chat_template` is the template used in training: `toyexp generate --adapter` uses it,
    and llama.cpp ignores it. Return a sentence for each tensor that is not finite.
    """
    return write_pairs(path, gguf_architecture(plan.model), *plan.adapter_file(values), general, chat_template)


def write_pairs(
    path: Path,
    architecture: str,
    alpha: float,
    pairs: Mapping[str, np.ndarray],
    general: Mapping[str, Any] | None = None,
    chat_template: str = "",
) -> list[str]:
    """Write LoRA matrices as an adapter file, as `write_adapter` does.

    `pairs` maps the names `<weight>.lora_a` and `<weight>.lora_b` to the matrices A and B that change a weight.
    """
    writer = Writer({
        "general.architecture": architecture,
        "general.type": "adapter",
        **{f"general.{key}": value for key, value in (general or {}).items()},
        "adapter.type": "lora",
        "adapter.lora.alpha": alpha,
        **({"tokenizer.chat_template": chat_template} if chat_template else {}),
    })  # fmt: skip
    for name, array in pairs.items():
        writer.add_numbers(name, array.shape, "F32", iter_pieces(array))
    return writer.save(path)


def model_metadata(model: Model, general: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the GGUF keys and values of a model, including those in `general` and `data`.

    The keys in `general` get the prefix `general.`, and those in `data` get `<architecture>.`.
    """
    keys, architecture = {**gguf_form(model).metadata(model), **data}, gguf_architecture(model)
    return {f"general.{k}": v for k, v in general.items()} | {f"{architecture}.{k}": v for k, v in keys.items()}


def check_keys(model: Model) -> None:
    """Raise UserError if GGUF keys cannot hold one of the model's settings. Call it before training."""
    for key, value in model_metadata(model, {}, {}).items():
        try:
            _pack_value(value, value_type(value))
        except (struct.error, OverflowError):
            raise UserError(f"model={model.name}: the GGUF key {key} cannot hold {printable(str(value))}") from None


def _vocabulary(tokenizer: Tokenizer | None, rows: int) -> dict[str, Any]:
    """Return the keys `tokenizer.*` of a model whose embedding has `rows` rows.

    llama.cpp requires one token for each row, so rows without a token get placeholder tokens.
    """
    if tokenizer is None:
        return {f"tokenizer.{key}": value for key, value in placeholder_metadata(rows).items()}
    keys = tokenizer.gguf_metadata()
    tokens = keys["ggml.tokens"][:rows]
    texts, missing = set(tokens), rows - len(tokens)
    names = (name for i in itertools.count(len(tokens)) if (name := f"<unused{i}>") not in texts)
    keys["ggml.tokens"] = [*tokens, *itertools.islice(names, missing)]  # llama.cpp aborts on two equal tokens
    types = keys.get("ggml.token_type", np.full(len(tokens), NORMAL, np.int32))
    for key, values, filler in (("token_type", types, UNUSED), ("scores", keys.get("ggml.scores"), 0)):
        if values is not None:
            keys[f"ggml.{key}"] = np.append(values[:rows], np.full(missing, filler, values.dtype))
    return {f"tokenizer.{key}": value for key, value in keys.items()}


def size_label(parameters: int) -> str:
    """Return a parameter count as model names write it, such as 269K or 1.2B."""
    units = {"T": 1e12, "B": 1e9, "M": 1e6, "K": 1e3}
    letter = next((u for u, size in units.items() if parameters >= size), "K")
    count = parameters / units[letter]
    return f"{count:.0f}{letter}" if count >= 9.5 else f"{count:.1f}{letter}"


class Writer:
    """Writer of a GGUF file. Add keys and tensors first; `save` then writes them, one tensor at a time."""

    def __init__(self, keys: Mapping[str, Any] | None = None) -> None:
        self._keys: dict[str, bytes] = {}
        self._alignment = 32
        self._tensors: dict[str, tuple[tuple[int, ...], str, Iterable[np.ndarray]]] = {}
        self._problems: list[str] = []
        for key, value in (keys or {}).items():
            self.add(key, value)

    def add(self, key: str, value: Any, kind: int | None = None) -> None:
        """Add a key. If `kind` is None, use the GGUF value type that llama.cpp expects for the value."""
        if kind is None:
            kind = value_type(value)
        if key == "general.alignment":
            self._alignment = int(value)
        self._keys[key] = struct.pack("<I", kind) + _pack_value(value, kind)

    def add_numbers(self, name: str, shape: tuple[int, ...], type_name: str, pieces: Iterable[np.ndarray]) -> None:
        """Add a tensor, given as float32 pieces; `save` encodes them as `type_name`."""
        self._tensors[name] = (shape, type_name, encode_pieces(name, pieces, type_name, self._problems))

    def add_bytes(self, name: str, shape: tuple[int, ...], type_name: str, pieces: Iterable[np.ndarray]) -> None:
        """Add a tensor, given as pieces of bytes that are already encoded as `type_name`."""
        self._tensors[name] = (shape, type_name, check_pieces(name, pieces, type_name, self._problems))

    def save(self, path: Path) -> list[str]:
        """Write the file atomically; return a sentence for each tensor that is not finite or does not fit its type."""
        with convert_write_errors(path), write_atomically(path) as temporary, open(temporary, "wb") as file:
            file.write(self._header())
            for _, _, pieces in self._tensors.values():
                file.write(bytes(-file.tell() % self._alignment))
                for piece in pieces:
                    file.write(piece.data)
            file.write(bytes(-file.tell() % self._alignment))
        return self._problems

    def _header(self) -> bytes:
        parts = [struct.pack("<4sIQQ", b"GGUF", 3, len(self._tensors), len(self._keys))]
        for key, value in self._keys.items():
            parts += [_text(key), value]
        offset = 0
        for name, (shape, type_name, _) in self._tensors.items():
            dims = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
            parts += [_text(name), dims, struct.pack("<IQ", IDS[type_name], offset)]
            _, per_block, block_bytes = GGUF_TYPES[IDS[type_name]]
            nbytes = math.prod(shape) // per_block * block_bytes
            offset += nbytes + -nbytes % self._alignment
        return b"".join(parts)


def value_type(value: Any) -> int:
    """Return the GGUF value type of a Python or numpy value."""
    if isinstance(value, str):
        return STRING
    if isinstance(value, np.generic):
        return _KINDS[value.dtype]
    if isinstance(value, bool):
        return BOOL
    if isinstance(value, int):
        return (U32 if value < 2**32 else U64) if value >= 0 else I32 if value >= -(2**31) else I64
    return F32 if isinstance(value, float) else ARRAY


def _pack_value(value: Any, kind: int) -> bytes:
    if kind == STRING:
        return _text(value)
    if kind != ARRAY:
        return struct.pack(SCALARS[kind], value)
    value = stored_value(value)
    if isinstance(value, list):
        return struct.pack("<IQ", STRING, len(value)) + b"".join(map(_text, value))
    return struct.pack("<IQ", _KINDS[value.dtype], value.size) + value.tobytes()


def stored_value(value: Any) -> Any:
    """Return a key's value as a reader of the file gets it: floats in float32, lists of numbers as arrays."""
    if isinstance(value, np.generic | float):
        return value.item() if isinstance(value, np.generic) else float(np.float32(value))
    if isinstance(value, np.ndarray | int | str):
        return value
    if all(isinstance(item, str) for item in value):
        return list(value)
    array = np.asarray(value)
    narrow = array.astype({"i": np.int32, "f": np.float32}.get(array.dtype.kind, array.dtype))
    return array if array.dtype.kind == "i" and (narrow != array).any() else narrow


def _text(value: str) -> bytes:
    raw = value.encode(errors="replace")  # a name from the command line may be invalid Unicode
    return struct.pack("<Q", len(raw)) + raw


# -- convert a GGUF file to another type, keeping every key ----------------------------------------------------------


PLAIN = ("F32", "F16", "BF16")


def rewrite_gguf(file: GGUFFile, path: Path, kind: str, requantize: bool) -> list[str]:
    """Write a copy of an open GGUF file, converted to the file type `kind`, to `path`.

    Return a sentence for each tensor with numbers that are not finite or too large for its type. Raise UserError if
    tensors that are quantised already would be rounded again, unless `requantize` is set.
    """
    tied = "output.weight" not in file.tensors
    types = {t.name: tensor_type(t.name, t.shape, kind, tied) for t in file.tensors.values()}
    require_exact(file, types, requantize, every=kind in K_QUANTS)
    if kind not in K_QUANTS:
        return copy_types(file, types, FILE_TYPES[kind]).save(path)
    quantise(file.path, path, kind, requantize)
    problems: list[str] = []
    for t in file.tensors.values():
        deque(check_pieces(t.name, _raw(file, t), t.type, problems), maxlen=0)
    return problems


def require_exact(file: ModelFile, types: Mapping[str, str], requantize: bool, every: bool = False) -> None:
    """Raise UserError if tensors that are quantised already would be rounded again, unless `requantize` is set.

    `types` maps tensor names to new types. If `every` is True, tensors that keep their type are rounded again too.
    """

    def is_rounded(t: TensorInfo) -> bool:
        return types[t.name] != "F32" and (types[t.name] != t.type or every)

    requantised = [t for t in file.tensors.values() if t.type not in PLAIN and is_rounded(t)]
    if requantised and not requantize:
        kinds = ", ".join(sorted({t.type for t in requantised}))
        summary = f"({len(requantised)} of {len(file.tensors)} tensors: {kinds})"
        raise file.error(f"is quantised already {summary}; export the original, or add --type f32 or --requantize")


def copy_types(file: GGUFFile, types: Mapping[str, str], file_type: int) -> Writer:
    """Return a writer with the file's keys and tensors; `file_type` is the new value of general.file_type.

    `types` maps each tensor's name to the type in which it is written.
    """
    writer = Writer()
    type_keys = {"general.file_type": file_type, "general.quantization_version": 2}
    for key, value in file.metadata.items():
        if key in type_keys:
            writer.add(key, type_keys.pop(key))
        elif not key.startswith("split."):
            writer.add(key, value, file.kinds[key])
    for key, value in type_keys.items():
        writer.add(key, value)
    for info in file.tensors.values():
        if info.type == types[info.name]:
            writer.add_bytes(info.name, info.shape, info.type, _raw(file, info))
        else:
            numbers = map(dequantise, _raw(file, info), itertools.repeat(info.type_id))
            writer.add_numbers(info.name, info.shape, types[info.name], numbers)
    return writer


def _raw(file: GGUFFile, info: TensorInfo) -> Iterator[np.ndarray]:
    return (raw for _, raw in file.pieces(info))
