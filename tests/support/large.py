"""Write a GGUF of about 1 GB within seconds: a sparse file with random weights at the start of each tensor."""

import random

import numpy as np

from toyexp.formats.gguf.ggml_types import GGUF_TYPES, encode
from toyexp.formats.gguf.quantise import tensor_type
from toyexp.formats.gguf.write import FILE_TYPES, Writer, model_metadata
from toyexp_models.llama import Llama

VOCAB, MERGES = 128_000, 280_000
MODEL = Llama(
    d_model=2048, n_layers=10, n_heads=32, n_kv_heads=8, d_ff=8192, context=8192, vocab=VOCAB, rope_base=500000.0
)
IDS = {name: i for i, (name, _, _) in GGUF_TYPES.items()}


def tokens(rng):
    """Return VOCAB distinct tokens with lengths as in real vocabularies, and MERGES merges."""
    letters = "abcdefghijklmnopqrstuvwxyzĠĠĠéĊ"
    words = {}
    while len(words) < VOCAB:
        words["".join(rng.choices(letters, k=rng.choice((3, 4, 5, 6, 7, 8, 10, 12))))] = None
    words = list(words)
    return words, [f"{a[:-2]} {b[-3:]}" for a, b in zip(rng.choices(words, k=MERGES), words * 3, strict=False)]


def write_large(path, kind="q8_0"):
    """Write the file and return its model. The first MB of each tensor is random, the rest is a hole."""
    writer = Writer()
    writer.add("general.architecture", "llama")
    writer.add("general.file_type", FILE_TYPES[kind])
    pieces, merges = tokens(random.Random(0))
    keys = {"model": "gpt2", "pre": "gpt-2", "tokens": pieces, "merges": merges, "bos_token_id": 0, "eos_token_id": 0}
    keys |= {"token_type": np.ones(VOCAB, np.int32), "scores": np.zeros(VOCAB, np.float32)}
    for key, value in model_metadata(MODEL, {"name": "large"}, {}).items():
        writer.add(key, value)
    for key, value in keys.items():
        writer.add(f"tokenizer.ggml.{key}", value)
    block = np.random.default_rng(0).normal(0, 0.02, 1 << 18).astype(np.float32)
    parts = []
    for spec in MODEL.tensors():
        name = tensor_type(spec.name, spec.shape, kind, tied=True)
        _, per_block, block_bytes = GGUF_TYPES[IDS[name]]
        raw = encode(block[: np.prod(spec.shape)], name)
        writer.add_bytes(spec.name, spec.shape, name, ())
        parts.append((raw, int(np.prod(spec.shape)) // per_block * block_bytes))
    writer.save(path)  # the header alone
    with open(path, "r+b") as file:
        end = path.stat().st_size
        for raw, nbytes in parts:
            file.seek(end)
            file.write(raw)
            end += nbytes + -nbytes % 32
        file.truncate(end)
    return MODEL
