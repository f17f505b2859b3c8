"""What llama.cpp makes of special tokens beyond what a file says: much goes by their text.

A token called `<|im_end|>` is a control token and ends generation whatever its type is, and so on. A model that is
exported with such a vocabulary meets these rules, so whoever reads the vocabulary follows them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from toyexp.text.tokenizer import CONTROL, NORMAL, UNKNOWN, USER_DEFINED, Tokenizer

ENDS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>",
    "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "[e~[",
)  # fmt: skip
# Tokens for filling in the middle, by the keys that name them; where none is named these texts count.
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
SHOWN = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")
# What llama.cpp looks for in `general.name`, and a spelling that it does not find.
FAMILIES = {
    "phi-3": (re.compile("phi-?3", re.IGNORECASE | re.ASCII), "phi 3"),
    "modern-bert": (re.compile("modern-bert", re.IGNORECASE | re.ASCII), "modern bert"),
}
KEEP_SPACE = ("<unk>", "<s>", "<|endoftext|>")  # of phi-3's special tokens
MASKED = ("jina-v2-de", "jina-v2-es", "jina-v2-code")  # pre-tokenizers with which <mask> takes the space before it


def special_tokens(ids: Mapping[str, int], types: np.ndarray, keys: Mapping[str, Any]) -> tuple[np.ndarray, set[int]]:
    """The types that llama.cpp gives the tokens, and the ids at which it stops generating.

    `ids` are the tokens by their text, `types` as the file has them, `keys` the `tokenizer.ggml.*` keys.
    """
    types, ends = types.copy(), set()
    for names, texts in FILL.items():
        named = [keys[name] for name in names if isinstance(keys.get(name), int) and 0 <= keys[name] < len(types)]
        found = named or [ids[text] for text in texts if text in ids]  # of several llama.cpp takes any one
        if not named:
            types[found] = CONTROL
        if names[0] in ENDING_FILL:
            ends.update(found)
    known = [ids[text] for text in ENDS if text in ids]
    types[known] = CONTROL
    types[[ids[text] for text in SHOWN if text in ids]] = USER_DEFINED
    ends.update(known, (keys[name] for name in ("eos_token_id", "eot_token_id", "eom_token_id") if name in keys))

    there = {text for text in (*ENDS, "<|plamo:eos|>") if ids.get(text) in ends}
    if "<|end|>" in there and there & {"<|call|>", "<|calls|>"} and there & {"<|return|>", "<|flush|>"}:
        ends.remove(ids["<|end|>"])  # in the format of gpt-oss it ends a part of an answer
        types[ids["<|end|>"]] = USER_DEFINED
    if "</s>" in there and there & {"<|tool_response>", "<|plamo:eos|>"}:
        ends.remove(ids["</s>"])
        types[ids["</s>"]] = NORMAL
    return types, ends


def family(name: str) -> str:
    """The family of vocabularies that llama.cpp takes a file's for by its `general.name`, or nothing."""
    return next((known for known, (pattern, _) in FAMILIES.items() if pattern.search(name)), "")


def swallowing(ids: Mapping[str, int], types: np.ndarray, pre: str, of: str) -> tuple[frozenset[int], frozenset[int]]:
    """The special tokens that swallow the white space before them in a text, and those that swallow what follows.

    No key says so: llama.cpp goes by the pre-tokenizer and the family (`of`). `types` are those of `special_tokens`.
    """
    special = frozenset(np.flatnonzero(np.isin(types, (CONTROL, UNKNOWN, USER_DEFINED))).tolist())

    def named(*texts: str) -> frozenset[int]:
        return frozenset(ids[text] for text in texts if text in ids) & special

    if any(known in pre for known in MASKED):
        return named("<mask>"), frozenset()
    if of == "phi-3":
        return frozenset(), special - named(*KEEP_SPACE)
    return (named("[MASK]") if of == "modern-bert" else frozenset()), frozenset()


def fitting_name(name: str, tokenizer: Tokenizer | None) -> str:
    """`general.name` for a file with this tokenizer: one by which llama.cpp makes the ids that the model knows."""
    wanted = tokenizer.family if tokenizer is not None else ""
    if family(name) == wanted:
        return name
    for pattern, instead in FAMILIES.values():
        name = pattern.sub(instead, name)
    return f"{name} (tokenizer of {wanted})" if wanted else name
