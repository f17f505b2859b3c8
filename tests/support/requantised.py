"""A GGUF file written again by gguf-py, its matrices in another type: what other programs make of ours."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter


def requantised(
    source: Path, path: Path, kind: GGMLQuantizationType, quantise: Callable[[np.ndarray], np.ndarray]
) -> Path:
    """Writes `path`: every matrix but gpt2's positions in `kind`, the bytes of whose rows `quantise` gives."""
    reader = GGUFReader(source)
    writer = GGUFWriter(path, reader.fields["general.architecture"].contents())
    for key, found in reader.fields.items():
        if not key.startswith(("GGUF.", "general.architecture", "general.file_type")):
            value_type = found.types[0]
            of = found.types[1] if value_type == GGUFValueType.ARRAY else None
            writer.add_key_value(key, found.contents(), value_type, of)
    for tensor in reader.tensors:
        if len(tensor.shape) == 2 and tensor.name != "position_embd.weight":
            writer.add_tensor(tensor.name, quantise(tensor.data), raw_dtype=kind)
        else:
            writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
