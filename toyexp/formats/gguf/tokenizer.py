"""Read the tokenizer in a GGUF file.

No key of the file records how special tokens behave, so this module applies llama.cpp's rules for them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from toyexp.base.errors import printable
from toyexp.interfaces.format import ModelFile
from toyexp.tokenizers.byte_level import BPE, Bytes, Characters
from toyexp.tokenizers.pretokenizers import PRE_TOKENIZERS
from toyexp.tokenizers.sentencepiece import SentencePiece
from toyexp.tokenizers.tokenizer import (
    BYTE,
    CONTROL,
    NORMAL,
    SYMBOL_BYTES,
    SYMBOLS,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    Tokenizer,
    placeholder,
)

BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")
IDS = ("bos_token_id", "eos_token_id", "eot_token_id", "eom_token_id")
FLAGS = ("add_bos_token", "add_eos_token", "add_space_prefix")
IDS_HINT = "evaluate it on token ids: data=tokens data.path=IDS.bin"
NULL_MERGE = (SYMBOLS[0xFF], SYMBOLS[0xFF])  # stands for an empty merge list: no UTF-8 contains the byte 0xFF

# llama.cpp goes by the text of some special tokens: `<|im_end|>` is a control token and ends generation, even if the
# file gives it another type. Exported models are subject to these rules, so they are followed here.
ENDS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>",
    "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "[e~[",
)  # fmt: skip
# Fill-in-the-middle tokens by their keys; without a key, llama.cpp recognises these texts.
FILL = {
    ("fim_pre_token_id", "prefix_token_id"): (
        "<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<\uff5cfim\u2581begin\uff5c>", "<PRE>", "\u2581<PRE>",
        "<|code_prefix|>", "<|prefix|>",
    ),
    ("fim_suf_token_id", "suffix_token_id"): (
        "<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<\uff5cfim\u2581hole\uff5c>", "<SUF>", "\u2581<SUF>",
        "<|code_suffix|>", "<|suffix|>",
    ),
    ("fim_mid_token_id", "middle_token_id"): (
        "<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<\uff5cfim\u2581end\uff5c>", "<MID>", "\u2581<MID>",
        "<|code_middle|>", "<|middle|>",
    ),
    ("fim_pad_token_id",): ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    ("fim_rep_token_id",): ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    ("fim_sep_token_id",): ("<|file_sep|>",),
}  # fmt: skip
ENDING_FILL = ("fim_pad_token_id", "fim_rep_token_id", "fim_sep_token_id")
USER_DEFINED_TEXTS = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")
# Vocabulary families: llama.cpp's pattern for `general.name`, and a spelling that the pattern does not match.
FAMILIES = {
    "phi-3": (re.compile("phi-?3", re.IGNORECASE | re.ASCII), "phi 3"),
    "modern-bert": (re.compile("modern-bert", re.IGNORECASE | re.ASCII), "modern bert"),
}
KEEP_SPACE = ("<unk>", "<s>", "<|endoftext|>")  # phi-3's special tokens that do not strip white space
MASK_PRE_TOKENIZERS = ("jina-v2-de", "jina-v2-es", "jina-v2-code")  # their <mask> strips the space before it


def read_tokenizer(file: ModelFile) -> Tokenizer:
    """Return the file's tokenizer; raise GGUFError if it is missing, broken or of an unsupported kind."""
    return _Reader(file).tokenizer()


def check_kind(file: ModelFile) -> None:
    """Raise GGUFError if the file has no tokenizer, or one of an unsupported kind. The tokens are not read."""
    model, pre = _kind(file)
    if not model:
        raise file.error(f"has no tokenizer; {IDS_HINT}")
    if model != "llama" and not (model == "gpt2" and pre in PRE_TOKENIZERS):
        kind, supported = f"({printable(model)}, pre-tokenizer {printable(pre)})", ", ".join(sorted(PRE_TOKENIZERS))
        hint = "Choose another one: data.tokenizer=bpe"
        raise file.error(f"its tokenizer {kind} is not supported; supported: llama, and gpt2 with {supported}. {hint}")


def _kind(file: ModelFile) -> tuple[str, str]:
    model, pre = (str(file.metadata.get(f"tokenizer.ggml.{key}", "")) for key in ("model", "pre"))
    return model, pre or "default"


def read_chat_template(file: ModelFile) -> str:
    """Return the file's chat template in Jinja, or ""."""
    return file.text("tokenizer.chat_template")


def has_text(file: ModelFile) -> bool:
    """Return True if the file has a vocabulary of texts; False if it has none or only placeholder tokens."""
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    return isinstance(tokens, list) and any(token != placeholder(i) for i, token in enumerate(tokens))


class _Reader:
    """Reader that validates the keys `tokenizer.*` of a file and makes a tokenizer from them."""

    def __init__(self, file: ModelFile):
        self.file = file
        self.all = {k.removeprefix("tokenizer."): v for k, v in file.metadata.items() if k.startswith("tokenizer.")}
        self.keys = {k.removeprefix("ggml."): v for k, v in self.all.items() if k.startswith("ggml.")}

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer, with llama.cpp's defaults for missing keys."""
        check_kind(self.file)
        model, pre = _kind(self.file)
        if model == "llama":
            self.keys = {"bos_token_id": 1, "eos_token_id": 2, "add_bos_token": True} | self.keys
        else:
            self.keys = {"add_bos_token": PRE_TOKENIZERS[pre].add_bos} | self.keys
        self._check_keys()
        if not has_text(self.file):
            raise self.file.error(f"it has no tokenizer (its tokens are placeholders); {IDS_HINT}")
        self._read_tokens()
        tokenizer = self._sentencepiece() if model == "llama" else self._byte_level(pre)
        tokenizer.bos = self.keys.get("bos_token_id")
        tokenizer.add_bos, tokenizer.add_eos = self.keys["add_bos_token"], self.keys.get("add_eos_token", False)
        tokenizer.extra_end_ids = frozenset(self.ends) - {tokenizer.eos}
        tokenizer.controls = self._ids_with_types(CONTROL, UNKNOWN) - {tokenizer.eos}
        tokenizer.user_defined = self._ids_with_types(USER_DEFINED)
        tokenizer.family = self.family
        tokenizer.swallow_before, tokenizer.swallow_after = self.swallowing
        shown = self._ids_with_types(NORMAL, CONTROL, UNKNOWN, USER_DEFINED, BYTE)
        tokenizer.undecoded_ids = frozenset(range(len(self.pieces))) - shown
        tokenizer.source, tokenizer.chat_template = self.all, read_chat_template(self.file)
        return tokenizer

    def _check_keys(self) -> None:
        """Raise GGUFError for missing keys, and for ids and flags of a wrong type or range."""
        if not isinstance(self.keys.get("tokens"), list) or "eos_token_id" not in self.keys:
            raise self.file.error("its tokenizer lacks tokens, merges or eos_token_id")
        count = len(self.keys["tokens"])
        for name in IDS:
            value = self.keys.get(name, 0)
            if type(value) is not int or not 0 <= value < count:
                problem = f"{'an' if name.startswith('e') else 'a'} {name} that is no token: {printable(str(value))}"
                raise self.file.error(f"its tokenizer has {count} tokens, and {problem}")
        for name in FLAGS:
            if not isinstance(self.keys.get(name, False), bool):
                raise self.file.error(f"its tokenizer has {name}={printable(str(self.keys[name]))}: not true or false")
        if self.keys["add_bos_token"] and "bos_token_id" not in self.keys:
            raise self.file.error("its tokenizer has add_bos_token, and no bos_token_id")

    def _read_tokens(self) -> None:
        """Set the attributes that describe the tokens.

        `pieces` holds the texts of the tokens, without unused tokens at the end. `types` holds the types that llama.cpp
        assigns. `ends` holds the ids at which generation stops. `unreachable` holds the ids that never result from
        tokenizing a text. Also set `family` (see the function `family`) and `swallowing` (see `space_swallowing_ids`).
        """
        # As in llama.cpp, a NUL ends a token, and an empty token is called [EMPTY_i].
        tokens = [piece.partition("\0")[0] or f"[EMPTY_{i}]" for i, piece in enumerate(self.keys["tokens"])]
        ids = {piece: i for i, piece in enumerate(tokens)}
        if len(ids) < len(tokens):
            duplicate = next(piece for i, piece in enumerate(tokens) if ids[piece] != i)
            raise self.file.error(f"its tokenizer has two equal tokens: {printable(duplicate)}")
        types = self._array("token_type", len(tokens), "i", NORMAL)
        self.types, self.ends = special_tokens(ids, types, self.keys)
        self.family = family(self.file.text("general.name"))
        self.swallowing = space_swallowing_ids(ids, self.types, _kind(self.file)[1], self.family)
        min_count = max(self.keys.get(name, 0) for name in IDS) + 1
        count = max(len(tokens) - int(np.argmax(np.append(self.types[::-1], -1) != UNUSED)), min_count)
        self.pieces, self.types = tokens[:count], self.types[:count]
        self.unreachable = frozenset(np.flatnonzero(np.isin(types[:count], (CONTROL, UNKNOWN))).tolist())

    def _array(self, name: str, count: int, kinds: str, default: float) -> np.ndarray:
        """Return the 32-bit numbers of the key `name`, one per token; `default` for each token if the key is missing.

        `count` is the number of tokens. `kinds` says which numbers are allowed: "i" for integers, "f" for floats, or
        "if" for both.
        Raise GGUFError for a list of another length or type.
        """
        values = self.keys.get(name, np.full(count, default, np.float32 if "f" in kinds else np.int32))
        if not isinstance(values, np.ndarray) or values.dtype.kind not in kinds or values.dtype.itemsize != 4:
            noun = "numbers" if "f" in kinds else "integers"
            raise self.file.error(f"its tokenizer's {name} is no list of 32-bit {noun}")
        if len(values) != count:
            raise self.file.error(f"its tokenizer has {count} tokens, and {name} for {len(values)}")
        return values

    def _ids_with_types(self, *types: int) -> frozenset[int]:
        return frozenset(np.flatnonzero(np.isin(self.types, types)).tolist())

    def _sentencepiece(self) -> Tokenizer:
        scores = self._array("scores", len(self.keys["tokens"]), "if", 0).astype(np.float32)[: len(self.pieces)]
        if np.isnan(scores).any():
            raise self.file.error(f"its token {printable(self.pieces[int(np.isnan(scores).argmax())])} has no score")
        byte_pieces = (self.pieces[i] for i in self._ids_with_types(BYTE))
        malformed = next((piece for piece in byte_pieces if not BYTE_TOKEN.fullmatch(piece)), None)
        if malformed is not None:
            raise self.file.error(f"its byte token {printable(malformed)} is not of the form <0x0A>")
        prefix = self.keys.get("add_space_prefix", True)
        return SentencePiece(self.pieces, scores, self.types, self.keys["eos_token_id"], self.unreachable, prefix)

    def _byte_level(self, pre: str) -> Tokenizer:
        if self._ids_with_types(BYTE):
            raise self.file.error("its byte-level BPE has byte tokens (token_type 6), as SentencePiece has")
        pairs, pieces = self._pairs(), set(self.pieces)
        usable = [(a, b) for a, b in pairs if a in pieces and b in pieces and a + b in pieces]
        if pre == "gpt-2" and len(usable) < len(pairs) and (toyexp_tokenizer := self._own_tokenizer(usable)):
            return toyexp_tokenizer
        accepted = {*usable, NULL_MERGE}
        unusable = next((f"{a} {b}" for a, b in pairs if (a, b) not in accepted), None)
        if unusable is not None:
            raise self.file.error(f"its merge {printable(unusable)} uses or makes a text that is not a token")
        # Text is merged in byte symbols, so it never produces a token of other characters.
        unproducible = {i for i in self._ids_with_types(NORMAL) if not SYMBOL_BYTES.keys() >= set(self.pieces[i])}
        unreachable = self.unreachable | unproducible
        unreachable_pieces = {self.pieces[i] for i in unreachable}
        merges = [(a, b) for a, b in usable if unreachable_pieces.isdisjoint((a, b, a + b))]
        return BPE(self.pieces, merges, self.keys["eos_token_id"], PRE_TOKENIZERS[pre], unreachable)

    def _own_tokenizer(self, merges: list[tuple[str, str]]) -> Tokenizer | None:
        """Return toyexp's byte or character tokenizer if its vocabulary equals the tokens in the file, else None.

        `merges` are the usable merges in the file: both texts of the pair, and their concatenation, are tokens.
        """
        eos = self.keys["eos_token_id"]
        if not merges and self.pieces[:256] == SYMBOLS and (eos, len(self.pieces)) == (256, 257):
            return Bytes()
        characters = _characters(self.pieces, eos)
        return None if characters is None else Characters(characters)

    def _pairs(self) -> list[tuple[str, str]]:
        """Return the merges as pairs, in order. Of equal merges, keep only the first, as llama.cpp does."""
        merges = self.keys.get("merges")
        if not isinstance(merges, list):
            raise self.file.error("its tokenizer lacks tokens, merges or eos_token_id")
        pairs = [(a, b) for a, blank, b in (merge.partition(" ") for merge in merges) if a and b and " " not in b]
        if len(pairs) < len(merges):
            raise self.file.error("its tokenizer has a merge that is not a pair")
        return list(dict.fromkeys(pairs))


def _characters(pieces: list[str], eos: int) -> list[str] | None:
    """Return the characters of a vocabulary in which each token is one character and end-of-text is the last token.

    Return None for another vocabulary. `pieces` are the texts of the tokens, and `eos` is the id of end-of-text.
    """
    if eos != len(pieces) - 1:
        return None
    try:
        texts = [bytes(SYMBOL_BYTES[c] for c in p).decode() for p in pieces[:eos]]
    except (KeyError, UnicodeDecodeError):
        return None
    return texts if all(len(t) == 1 for t in texts) else None


def special_tokens(ids: Mapping[str, int], types: np.ndarray, keys: Mapping[str, Any]) -> tuple[np.ndarray, set[int]]:
    """Return the type that llama.cpp assigns to each token, and the ids at which llama.cpp stops generating.

    `ids` maps a token's text to its id, `types` holds the token types in the file, and `keys` the file's
    keys `tokenizer.ggml.*` without that prefix.
    """
    types, ends = types.copy(), set()
    for names, texts in FILL.items():
        declared = [keys[name] for name in names if isinstance(keys.get(name), int) and 0 <= keys[name] < len(types)]
        fill_ids = declared or [ids[text] for text in texts if text in ids]  # if there are several, llama.cpp picks any
        if not declared:
            types[fill_ids] = CONTROL
        if names[0] in ENDING_FILL:
            ends.update(fill_ids)
    end_ids = [ids[text] for text in ENDS if text in ids]
    types[end_ids] = CONTROL
    types[[ids[text] for text in USER_DEFINED_TEXTS if text in ids]] = USER_DEFINED
    ends.update(end_ids, (keys[name] for name in ("eos_token_id", "eot_token_id", "eom_token_id") if name in keys))

    end_texts = {text for text in (*ENDS, "<|plamo:eos|>") if ids.get(text) in ends}
    if "<|end|>" in end_texts and end_texts & {"<|call|>", "<|calls|>"} and end_texts & {"<|return|>", "<|flush|>"}:
        ends.remove(ids["<|end|>"])  # in gpt-oss's format it ends a part of an answer
        types[ids["<|end|>"]] = USER_DEFINED
    if "</s>" in end_texts and end_texts & {"<|tool_response>", "<|plamo:eos|>"}:
        ends.remove(ids["</s>"])
        types[ids["</s>"]] = NORMAL
    return types, ends


def family(name: str) -> str:
    """Return the vocabulary family (phi-3, modern-bert) that llama.cpp infers from `general.name`, or ""."""
    return next((name_of for name_of, (pattern, _) in FAMILIES.items() if pattern.search(name)), "")


def space_swallowing_ids(
    ids: Mapping[str, int], types: np.ndarray, pre: str, family_name: str
) -> tuple[frozenset[int], frozenset[int]]:
    """Return the ids of special tokens that strip white space before them, and of those that strip it after them.

    No key of the GGUF file records this: llama.cpp infers it from the pre-tokenizer `pre` and the vocabulary family.
    `ids` maps the text of each token to its id, and `types` holds the token types that `special_tokens` returned.
    """
    special = frozenset(np.flatnonzero(np.isin(types, (CONTROL, UNKNOWN, USER_DEFINED))).tolist())

    def special_ids(*texts: str) -> frozenset[int]:
        return frozenset(ids[text] for text in texts if text in ids) & special

    if any(name in pre for name in MASK_PRE_TOKENIZERS):
        return special_ids("<mask>"), frozenset()
    if family_name == "phi-3":
        return frozenset(), special - special_ids(*KEEP_SPACE)
    return (special_ids("[MASK]") if family_name == "modern-bert" else frozenset()), frozenset()


def compatible_name(name: str, tokenizer: Tokenizer | None) -> str:
    """Return a model name from which llama.cpp infers the right vocabulary family of the tokenizer (see `family`).

    The result is `name`, changed only if llama.cpp would infer another family from it.
    """
    required = tokenizer.family if tokenizer is not None else ""
    if family(name) == required:
        return name
    for pattern, replacement in FAMILIES.values():
        name = pattern.sub(replacement, name)
    return f"{name} (tokenizer of {required})" if required else name
