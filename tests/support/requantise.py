"""Rewrite a GGUF file with gguf-py, its matrices in another type, as other programs would."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter

FLOATS = (
    "position_embd.weight", "ffn_gate_inp.weight", "conv.weight", "conv1d.weight", "ssm_a", "ssm_d", "ssm_norm.weight",
)  # fmt: skip


def requantise(
    source: Path, path: Path, kind: GGMLQuantizationType, quantise: Callable[[np.ndarray], np.ndarray]
) -> Path:
    """Write `path` with its matrices in `kind`.

    gpt2's positions, routers of experts, convolutions, and what mamba2 has per head or group stay F32.
    `quantise` returns the bytes of the rows of a matrix, or of all experts' matrices.
    """
    reader = GGUFReader(source)
    writer = GGUFWriter(path, reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        if not key.startswith(("GGUF.", "general.architecture", "general.file_type")):
            value_type = field.types[0]
            item_type = field.types[1] if value_type == GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), value_type, item_type)
    for tensor in reader.tensors:
        if len(tensor.shape) > 1 and not tensor.name.endswith(FLOATS):
            writer.add_tensor(tensor.name, quantise(tensor.data), raw_dtype=kind)
        else:
            writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def q4_k(values: np.ndarray) -> np.ndarray:
    """Quantise a matrix [out, in] to Q4_K by plain rounding; gguf-py reads this type but cannot write it."""
    x = values.reshape(-1, 8, 32)  # eight runs of 32 share a block of 256
    low = np.minimum(x.min(axis=-1), 0)
    steps = (x.max(axis=-1) - low) / 15
    d, d_min = (np.float16(v.max(axis=-1) / 63) for v in (steps, -low))
    wide, wide_min = (np.maximum(v.astype(np.float32), 1e-8)[:, None] for v in (d, d_min))
    scale, minimum = np.round(steps / wide).astype(np.uint8), np.round(-low / wide_min).astype(np.uint8)
    step = np.maximum(wide * scale, 1e-8)[..., None]
    q = np.clip(np.round((x + (wide_min * minimum)[..., None]) / step), 0, 15).astype(np.uint8)
    packed = np.concatenate([
        scale[:, :4] | scale[:, 4:] >> 4 << 6,
        minimum[:, :4] | minimum[:, 4:] >> 4 << 6,
        (scale[:, 4:] & 15) | (minimum[:, 4:] & 15) << 4,
    ], axis=1)  # fmt: skip
    pairs = q.reshape(-1, 4, 2, 32)
    quants = (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(-1, 128)
    heads = [np.frombuffer(v.tobytes(), np.uint8).reshape(-1, 2) for v in (d, d_min)]
    return np.concatenate([*heads, packed, quants], axis=1).reshape(len(values), -1)
