"""Write and read tokenizer.model, SentencePiece's protobuf format (see its sentencepiece_model.proto)."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import Any

from toyexp.tokenizers.sentencepiece import BLANK, SentencePiece
from toyexp.tokenizers.tokenizer import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED

# Field numbers.
PIECES, TRAINER, NORMALIZER = 1, 2, 3
PIECE, SCORE, TYPE = 1, 2, 3
MODEL_TYPE, VOCAB_SIZE, BYTE_FALLBACK = 3, 4, 35
UNK_ID, BOS_ID, EOS_ID, PAD_ID, UNK_PIECE, BOS_PIECE, EOS_PIECE = 40, 41, 42, 43, 45, 46, 47
NAME, CHARSMAP, ADD_DUMMY_PREFIX, REMOVE_EXTRA_WHITESPACES, ESCAPE_WHITESPACES = 1, 2, 3, 4, 5
BPE = 2  # value of MODEL_TYPE
Value = int | float | str | bytes


def missing_requirement(tokenizer: SentencePiece) -> str:
    """Return the reason why the tokenizer's vocabulary cannot be written as tokenizer.model; "" if it can."""
    count = tokenizer.types.tolist().count(BYTE)
    if tokenizer.unknown is None:
        return "SentencePiece requires a token of type unknown"
    return "" if count in (0, 256) else f"it has {count} byte tokens, and SentencePiece requires all 256 or none"


def sentencepiece_model(tokenizer: SentencePiece) -> bytes:
    """Return the bytes of tokenizer.model. `missing_requirement` must have returned "" for the tokenizer."""
    pieces = (_message({PIECE: piece, SCORE: score, TYPE: kind}) for piece, score, kind in _pieces(tokenizer))
    unknown, bos = tokenizer.unknown, tokenizer.bos
    assert unknown is not None
    trainer: dict[int, Value] = {
        MODEL_TYPE: BPE,
        VOCAB_SIZE: tokenizer.vocab,
        BYTE_FALLBACK: BYTE in tokenizer.types,
        UNK_ID: unknown,
        BOS_ID: -1 if bos is None else bos,
        EOS_ID: tokenizer.eos,
        PAD_ID: -1,
        UNK_PIECE: tokenizer.pieces[unknown],
        **({} if bos is None else {BOS_PIECE: tokenizer.pieces[bos]}),
        EOS_PIECE: tokenizer.pieces[tokenizer.eos],
    }
    normalizer: dict[int, Value] = {
        NAME: "identity",
        ADD_DUMMY_PREFIX: tokenizer.prefix,
        REMOVE_EXTRA_WHITESPACES: False,
        ESCAPE_WHITESPACES: True,
    }
    settings = _field(TRAINER, _message(trainer)) + _field(NORMALIZER, _message(normalizer))
    return b"".join(_field(PIECES, piece) for piece in pieces) + settings


def _pieces(tokenizer: SentencePiece) -> Iterator[tuple[str, float, int]]:
    """Yield (text, score, type) of each token in a form that SentencePiece accepts.

    Exactly one token has the type "unknown", and no text contains a space.
    """
    texts = set(tokenizer.pieces)
    types = tokenizer.types.copy()
    types[types == UNKNOWN] = CONTROL
    types[tokenizer.unknown] = UNKNOWN
    for piece, score, kind in zip(tokenizer.pieces, tokenizer.scores.tolist(), types.tolist(), strict=True):
        text = piece.replace(" ", BLANK) if kind == USER_DEFINED else piece
        yield piece if text in texts else text, score, kind


def _message(fields: Mapping[int, Value]) -> bytes:
    return b"".join(_field(number, value) for number, value in fields.items())


def _field(number: int, value: Value) -> bytes:
    """Encode one protobuf field: its number and wire type, followed by its value.

    The value is a varint, four bytes, or a length followed by bytes.
    """
    if isinstance(value, float):
        return _varint(number << 3 | 5) + struct.pack("<f", value)
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value & 0xFFFFFFFFFFFFFFFF)
    data = value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    """Encode an integer in groups of seven bits, lowest first; all bytes but the last have the high bit set."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def read_sentencepiece(data: bytes) -> tuple[dict[str, tuple[int, int]], dict[str, Any]]:
    """Read tokenizer.model: return {text: (id, type)} of the tokens, and further keys `tokenizer.ggml.*` of a GGUF.

    Raise ValueError for a kind of model that llama.cpp does not have, and others for damaged bytes.
    """
    fields, vocab = [*_fields(data)], dict[str, tuple[int, int]]()
    tokens = [dict(_fields(value)) for number, value in fields if number == PIECES]
    trainer, normalizer = (dict(_fields(b"".join(v for n, v in fields if n == part))) for part in (TRAINER, NORMALIZER))
    if trainer.get(MODEL_TYPE) != BPE or normalizer.get(CHARSMAP):
        raise ValueError("it is no BPE, or it normalises characters, which llama.cpp does not")
    for i, token in enumerate(tokens):
        text, kind = token[PIECE].decode(), token.get(TYPE, NORMAL)
        vocab[text.replace(BLANK, " ") if kind == USER_DEFINED else text] = i, kind
    ids = {"unknown": (UNK_ID, 0), "bos": (BOS_ID, 1), "eos": (EOS_ID, 2), "padding": (PAD_ID, -1)}  # and defaults
    keys = {f"{name}_token_id": trainer.get(*default) for name, default in ids.items()}
    keys = {key: i for key, i in keys.items() if 0 <= i < len(tokens)}
    scores = [struct.unpack("<f", token.get(SCORE, bytes(4)))[0] for token in tokens]
    return vocab, keys | {"scores": scores, "add_space_prefix": bool(normalizer.get(ADD_DUMMY_PREFIX, 1))}


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the number of each field of a protobuf message, and its value: an integer, or the bytes of another type."""
    at = 0
    while at < len(data):
        key, at = _read_varint(data, at)
        size, begin = {1: (8, at), 5: (4, at)}.get(key & 7) or _read_varint(data, at)
        at = begin + size if key & 7 else begin
        yield key >> 3, data[begin:at] if key & 7 else size


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the integer that `_varint` encoded at the position `at`, and the position after it."""
    end = next((i for i in range(at, at + 9) if data[i] < 0x80), at + 9) + 1
    return sum((byte & 0x7F) << 7 * i for i, byte in enumerate(data[at:end])), end
