"""The tokenizer inside a GGUF file."""

from __future__ import annotations

from typing import Any

import numpy as np

from toyexp.errors import printable
from toyexp.gguf.read import GGUFFile
from toyexp.tokenizer import BPE, BYTE_OF, CONTROL, SYMBOLS, UNUSED, Bytes, Characters, Tokenizer

PRE = ("gpt-2",)  # pre-tokenizers whose pattern we have checked against llama.cpp


def read_tokenizer(file: GGUFFile) -> Tokenizer:
    """The file's tokenizer; raises GGUFError when it has none or one of a kind not supported."""
    check_kind(file)
    pieces, merges, eos = _key(file, "tokens"), _key(file, "merges"), _key(file, "eos_token_id")
    if not isinstance(pieces, list) or not isinstance(merges, list) or not isinstance(eos, int):
        raise file.error("its tokenizer lacks tokens, merges or eos_token_id")
    pieces = pieces[: len(pieces) - _padding(file, len(pieces))]
    if len(set(pieces)) != len(pieces) or not 0 <= eos < len(pieces):
        raise file.error("its tokenizer has two equal tokens, or an eos_token_id that is no token")
    known, controls = set(pieces), _controls(file, len(pieces)) - {eos}
    texts = (p for i, p in enumerate(pieces) if i != eos and i not in controls)
    strange = next((p for p in texts if not set(p) <= BYTE_OF.keys()), None)
    if strange is not None:
        raise file.error(f"its token {printable(strange)} is not in byte-level form")
    pairs = [tuple(m.split(" ")) for m in merges]
    if any(len(p) != 2 for p in pairs):
        raise file.error("its tokenizer has a merge that is not a pair")
    real = [(a, b) for a, b in pairs if a in known and b in known and a + b in known]
    if not real and eos == 256 and pieces[:256] == SYMBOLS and len(pieces) == 257:
        return Bytes()
    characters = None if controls else _characters(pieces, eos)
    if characters is not None and len(real) < len(pairs):
        return Characters(characters)
    tokenizer = BPE(pieces, real, eos)
    tokenizer.controls = controls
    return tokenizer


def check_kind(file: GGUFFile) -> None:
    """Raises GGUFError for a kind of tokenizer that is not supported; two keys say so, and no token is looked at."""
    model, pre = _key(file, "model"), _key(file, "pre", "default")
    if model != "gpt2" or pre not in PRE:
        raise file.error(
            f"its tokenizer ({printable(str(model))}, pre-tokenizer {printable(str(pre))}) is not supported; "
            f"supported: gpt2 with {', '.join(PRE)}. Choose another one: data.tokenizer=bpe"
        )


def read_chat_template(file: GGUFFile) -> str:
    """The file's chat template in Jinja, or nothing."""
    template = file.metadata.get("tokenizer.chat_template", "")
    return template if isinstance(template, str) else ""


def _controls(file: GGUFFile, count: int) -> frozenset[int]:
    """Which of the first `count` tokens are control tokens."""
    types = _key(file, "token_type")
    if not isinstance(types, np.ndarray):
        return frozenset()
    return frozenset(np.flatnonzero(types[:count] == CONTROL).tolist())


def _padding(file: GGUFFile, count: int) -> int:
    """How many tokens at the end are only there to fill the rows of the embedding."""
    types = _key(file, "token_type")
    if not isinstance(types, np.ndarray) or len(types) != count:
        return 0
    return int(np.argmax(np.append(types[::-1], -1) != UNUSED))


def _characters(pieces: list[str], eos: int) -> list[str] | None:
    """The characters the tokens stand for, when each is exactly one and end-of-text comes last."""
    if eos != len(pieces) - 1:
        return None
    try:
        texts = [bytes(BYTE_OF[c] for c in p).decode() for p in pieces[:eos]]
    except UnicodeDecodeError:
        return None
    return texts if all(len(t) == 1 for t in texts) else None


def _key(file: GGUFFile, name: str, default: Any = None) -> Any:
    return file.metadata.get(f"tokenizer.ggml.{name}", default)
