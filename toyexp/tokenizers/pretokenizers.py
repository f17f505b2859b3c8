"""Pre-tokenizers of llama.cpp, by their names in the GGUF key `tokenizer.ggml.pre`.

A pre-tokenizer cuts text into words; BPE then merges only inside a word. Its patterns are applied one after another,
each to the pieces that the previous pattern left. The patterns use Oniguruma's syntax and follow llama.cpp, which
sometimes differs from the model's own tokenizer: for example, llama.cpp distinguishes capitals from small letters only
in ASCII. Tests compare every pre-tokenizer with llama.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

from toyexp.base.lazy import tokenizers as hf

TAIL = 1 << 14  # characters at the end of a text that are searched for a cut
REACH = 1000  # characters on each side that are compared to check a cut
TRIES = 16  # positions tried per pattern
# Cuts must not lie inside a counted repetition (such as digits in threes), which depends on far earlier text. So they
# lie between a letter and a line end, a line end and a letter, a space and a letter, or a letter and punctuation.
LINE_ENDS = re.compile(r"(?<=[^\W\d_])(?=[\r\n])|(?<=\S\n)(?=[^\W\d_])")
WORD_ENDS = re.compile(r"(?<=\S)(?= [^\W\d_])|(?<=[^\W\d_])(?=[.,;:!?\u3001\u3002\uff01\uff0c\uff1a\uff1b\uff1f])")


@dataclass(frozen=True)
class PreTokenizer:
    """Patterns that cut text into words, and the rules that llama.cpp derives from the pre-tokenizer's name."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False  # a word that is a token is used as is, without merging
    add_bos: bool = False  # default of add_bos_token, for a GGUF that lacks this key

    def build(self) -> Any:
        """Return a pre-tokenizer of the tokenizers library with these patterns.

        The returned pre-tokenizer also replaces each byte of a word by GPT-2's symbol for it.
        """
        pre_tokenizers = hf.pre_tokenizers
        cuts = [pre_tokenizers.Split(hf.Regex(pattern), "isolated") for pattern in self.patterns]
        return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    def cuts(self, text: str) -> Iterator[int]:
        """Yield positions, last first, where a long text may be cut without changing how it splits into words.

        `text` is the beginning of the long text. Positions at the end of a line come before all others.
        """
        for pattern in (LINE_ENDS, WORD_ENDS):
            starts = [m.start() for m in pattern.finditer(text, max(len(text) - TAIL, 1), max(len(text) - REACH, 1))]
            yield from (start for start in islice(reversed(starts), TRIES) if self._words_end(text, start))

    def _words_end(self, text: str, position: int) -> bool:
        """Return True if the text can be cut at `position` without changing its words.

        Only the REACH characters on each side of `position` are compared.
        """
        before, after = text[max(position - REACH, 0) : position], text[position : position + REACH]
        return self._words(before) + self._words(after) == self._words(before + after)

    def _words(self, text: str) -> list[str]:
        return [word for word, _ in self._library_object.pre_tokenize_str(text)]

    @cached_property
    def _library_object(self) -> Any:
        return self.build()


# Both cases are spelled out: (?i:'s) would match the long s too.
ENDING = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
SIGNS = r" ?[^\s\p{L}\p{N}]+"
SPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{L}&&[^a-z]]", r"[\p{L}&&[^A-Z]]"
UPPER_MARKED, LOWER_MARKED = r"[\p{L}\p{M}&&[^a-z]]", r"[\p{L}\p{M}&&[^A-Z]]"
MARKED_WORD = r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
ASCII_SIGN = r"[!-/:-@\[-`{-~]"
WIDE = "[\u0800-\u9fa5\uac00-\ud7ff&&\\S]+"
KANA_OR_HAN = "[\u4e00-\u9fa5\u3040-\u30ff]+"

GPT2 = rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?\p{{N}}+|{SIGNS}|\s+(?!\S)|\s+"
LLAMA3 = rf"{ENDING}|{WORD}|\p{{N}}{{1,3}}|{SIGNS}[\r\n]*|{SPACE}"
QWEN2 = rf"{ENDING}|{WORD}|\p{{N}}|{SIGNS}[\r\n]*|{SPACE}"
DEEPSEEK3 = rf"{ASCII_SIGN}[A-Za-z]+|{MARKED_WORD}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{SPACE}"
BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
# Digits in threes, counted from the number's end; the first group includes the text before it.
THREES = r"\P{N}*\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"


def cased_words(upper: str, lower: str, ending: str, numbers: str) -> str:
    """Return a pattern of words that are capitals followed by small letters: OneTwo has two words.

    `upper` and `lower` are character classes, `ending` matches a suffix such as 's, and `numbers` matches digits.
    """
    lead = r"[^\r\n\p{L}\p{N}]?"
    words = f"{lead}{upper}*{lower}+{ending}|{lead}{upper}+{lower}*{ending}"
    return rf"{words}|{numbers}|{SIGNS}[\r\n/]*|{SPACE}"


def code_points(ranges: str) -> str:
    """Return a regular expression's character class from ranges of code points in hexadecimal, such as 41-5A B5."""
    return "[" + "".join("-".join(chr(int(end, 16)) for end in part.split("-")) for part in ranges.split()) + "]"


# Letters that have a case, as of Unicode 11.
CASED_LETTERS = code_points(
    "41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386 388-38A 38C 38E-3A1 "
    "3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A "
    "1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 "
    "1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128 "
    "212A-212D 212F-2134 2139 213C-213F 2145-2149 214E 2183 2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2 2CF3 A640-A66D "
    "A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F "
    "104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943"
)
HAN = "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0002a6df\U0002a700-\U0002ebef\U0002f800-\U0002fa1f"
EAST_ASIAN = code_points(
    "4E00-9FFF 3400-4DBF 8C48-FAFF 3040-309F 30A0-30FF FF65-FF9F 2F00-2FDF E40-E7F E80-EFF 1780-17FF 1000-109F "
    "AA60-AA7F A9E0-A9FF AC00-D7AF 1100-11FF"
)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {}


def _add(names: str, *patterns: str, ignore_merges: bool = False, add_bos: bool = False) -> None:
    PRE_TOKENIZERS.update(dict.fromkeys(names.split(), PreTokenizer(patterns, ignore_merges, add_bos)))


_add("gpt-2 phi-2 gigachat a.x-4.0 mellum exaone4 mpt olmo jais trillion granite-docling", GPT2)
_add("jina-es jina-de jina-v1-en jina-v2-es jina-v2-de jina-v2-code roberta-bpe modern-bert", GPT2)
_add("smollm starcoder refact command-r codeshell exaone minerva-7b mellum2", r"\p{N}", GPT2)
_add("default", r"[\p{P}$+<=>^~|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")
_add("falcon", r"[\p{P}$+<=>^~|`]+", GPT2, "[0-9][0-9][0-9]")
_add(
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
    LLAMA3,
    ignore_merges=True,
    add_bos=True,
)
_add("dbrx smaug-bpe chatglm-bpe", LLAMA3)
_add("glm4 glm5", LLAMA3, ignore_merges=True)
_add("qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2", QWEN2)
_add("bailingmoe bailingmoe2 llada-moe", QWEN2)  # their own pattern differs but cuts the same
_add("ufakzeka", rf"{WORD}|\p{{N}}|{SIGNS}[\r\n]*|{SPACE}")
_add("laguna", r"[^\n]+|\n+", QWEN2)
_add(
    "qwen35",
    rf"{ENDING}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{SPACE}",
)
_add("minicpm5", r"\p{N}{1,3}", rf"{ENDING}|{WORD}|\p{{N}}+|{SIGNS}[\r\n]*|{SPACE}", ignore_merges=True)
_add("seed-coder", rf"{ENDING}|{WORD}|\p{{N}}|{SIGNS}|{SPACE}")
_add(
    "exaone-moe",
    rf"{ENDING}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}|{SIGNS}[\r\n/]?"
    r"|\s*[\r\n]|\s+(?!\S)|\s+",
)
_add(
    "jais-2",
    rf"{ENDING}|{WORD}|\p{{N}}{{1,3}}|{SIGNS}[\r\n]*|\s*[\r\n]+|"
    + "".join(rf"\s{{{2**n}}}(?!\S)|" for n in range(9, 1, -1))
    + r"\s{1,2}(?!\S)|\s",
)
_add("tekken", cased_words(UPPER, LOWER, "", r"\p{N}"), ignore_merges=True, add_bos=True)
_add("gpt-4o llama4 kanana2 talkie minimax-m2", cased_words(UPPER, LOWER, f"{ENDING}?", r"\p{N}{1,3}"))
_add(
    "granite-embed-multi-97m", cased_words(UPPER_MARKED, LOWER_MARKED, f"{ENDING}?", r"\p{N}{1,3}"), ignore_merges=True
)
_add("tiny_aya cohere2moe", THREES, cased_words(r"[\p{L}\p{M}]", r"[\p{L}\p{M}]", f"{ENDING}?", r"\p{N}{1,3}"))
_add(
    "youtu",
    "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f"
    f"\ufe30-\ufe4f]+|[\u3105-\u312f]+|{KANA_OR_HAN}",
    cased_words(r"[\p{L}\p{M}]", r"[\p{L}\p{M}]", f"{ENDING}?", r"\p{N}"),
    ignore_merges=True,
)
_add("deepseek-v3 hunyuan-dense joyai-llm hy_v4", r"\p{N}{1,3}", KANA_OR_HAN, DEEPSEEK3)
_add(
    "spark2_5",
    r"\p{N}{1,3}",
    KANA_OR_HAN,
    rf"{ASCII_SIGN}[A-Za-z]+|{MARKED_WORD}| ?[\p{{P}}\p{{S}}]+|[\r\n]|\s+(?!\S)|\s+",
    r"\p{N}",
)
_add("afmoe", THREES, f"{EAST_ASIAN}+", DEEPSEEK3)
_add(
    "deepseek-llm",
    r"[\r\n]",
    rf"\s?{CASED_LETTERS}+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3001\u3002]+",
    r"\s+\z",
    WIDE,
    r"\p{N}+",
)
_add("deepseek-coder", r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", WIDE, r"\p{N}")
_add("poro-chat bloom gpt3-finnish", BLOOM)
_add("viking", BLOOM, r"\p{N}")
_add(
    "chameleon",
    "<sentinel:[0-9]+>",
    "IMGIMG[A-I]{1,4}Z",
    r"[\t\n]|    |  ",
    r"\p{N}",
    r"[\p{P}!-/:-@\[-`{-~]",
    GPT2,
    add_bos=True,
)
_add("superbpe", r"\p{N}+", r"[\s\S]+?(?=(?:[0-9]{3})+(?![0-9]))")
_add(
    "kimi-k2",
    rf"[{HAN}]+|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}&&[^{HAN}]]+{ENDING}?|\p{{N}}{{1,3}}|{SIGNS}[\r\n]*|{SPACE}",
)
