"""What others make of a directory for transformers: the tokenizers library, and llama.cpp's convert_hf_to_gguf.py."""

from __future__ import annotations

from toyexp.formats.layout import Conversion
from toyexp.formats.sentencepiece_model import lacking
from toyexp.text.byte_level import BPE, Bytes, Characters
from toyexp.text.sentencepiece import SentencePiece
from toyexp.text.tokenizer import Tokenizer

GPT2_TOKENS = 50257


def lacks(conversion: Conversion, tokenizer: Tokenizer | None) -> str:
    """Why it does not take the directory, or makes another model of it; nothing if all is well."""
    if tokenizer is None:
        return "the model has no tokenizer"
    if isinstance(tokenizer, Bytes | Characters):
        return f"it has no {tokenizer.kind} tokenizer"
    if tokenizer.kind not in conversion.kinds:
        return f"for this architecture it has no {tokenizer.kind} tokenizer"
    if isinstance(tokenizer, BPE) and _trained_here(tokenizer):
        return "of byte-level BPE it knows only published vocabularies, not one trained here"
    if isinstance(tokenizer, SentencePiece):
        if conversion.prefix not in (None, tokenizer.prefix):
            return f"for this architecture it sets add_space_prefix={str(conversion.prefix).lower()}"
        return lacking(tokenizer) or conversion.lost
    return conversion.lost


def _trained_here(tokenizer: BPE) -> bool:
    """Whether it was trained here, or read from a GGUF of one that was: those have GPT-2's pre-tokenizer."""
    return tokenizer.source.get("ggml.pre", "gpt-2") == "gpt-2" and tokenizer.vocab < GPT2_TOKENS
