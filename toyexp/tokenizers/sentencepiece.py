"""SentencePiece BPE as in llama.cpp: the pair of neighbours whose joined token has the highest score merges first.

Of several pairs with this score, the leftmost merges first. The tokenizers library cannot do that, because it merges in
the order of a list of pairs. Therefore this module implements the merging.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from toyexp.base.errors import UnknownCharacter
from toyexp.base.lazy import tokenizers as hf
from toyexp.tokenizers.tokenizer import BYTE, CONTROL, NORMAL, UNKNOWN, Tokenizer

BLANK = "\u2581"  # how tokens write a space
CACHED = 1 << 17  # words in the cache of ids
TAIL = 1 << 14  # characters at the end of a text that are searched for a cut


class SentencePiece(Tokenizer):
    """Tokenizer that repeatedly merges the two neighbours whose joined token has the highest score.

    Characters that have no token become byte tokens.
    """

    kind = "spm"

    def __init__(
        self,
        pieces: Sequence[str],
        scores: np.ndarray,
        types: np.ndarray,
        eos: int,
        unreachable: frozenset[int] = frozenset(),  # tokens that no text may produce
        prefix: bool = True,  # add a space before each text
    ):
        self.pieces, self.eos, self.prefix = list(pieces), eos, prefix
        self.types, self.scores, self._unreachable = types, scores, unreachable
        self._ids = {piece: i for i, piece in enumerate(self.pieces) if i not in unreachable}
        self._cost = (-scores).tolist()
        pairs = {piece[n : n + 2] for piece in self._ids for n in range(len(piece) - 1)}
        self._pairs = np.array(sorted(ord(p[0]) << 21 | ord(p[1]) for p in pairs) or [-1])
        self._id_cache: dict[str, list[int]] = {}

    @property
    def unknown(self) -> int | None:
        """Id of the token for unknown text, in a vocabulary without byte tokens; None if there is no such token."""
        declared = self.source.get("ggml.unknown_token_id")
        if isinstance(declared, int) and 0 <= declared < self.vocab and self.types[declared] in (UNKNOWN, CONTROL):
            return declared
        return next(iter(np.flatnonzero(self.types == UNKNOWN).tolist()), None)

    def _encode(self, texts: Sequence[str], starts: Sequence[bool]) -> list[np.ndarray]:
        """Return the int32 ids of each text.

        Raise UnknownCharacter for a character that has neither a token nor byte tokens.
        """
        return [
            np.array([i for word in self._words(text, start) for i in self._word_ids(word)], np.int32)
            for text, start in zip(texts, starts, strict=True)
        ]

    def _words(self, text: str, start: bool) -> list[str]:
        """Split a text into pieces that merge independently of each other.

        The text is split between two neighbouring characters if no token contains them side by side. Spaces are
        replaced by the character BLANK, as in tokens. If `start` is True and the vocabulary wants a space before each
        text, this space is added first.
        """
        text = (" " * (start and self.prefix) + text).replace(" ", BLANK)
        return [text[begin:end] for begin, end in itertools.pairwise([0, *self._break_points(text), len(text)])]

    def _break_points(self, text: str) -> list[int]:
        """Return the positions between two neighbouring characters that no token contains side by side.

        Spaces in the text must already be replaced by BLANK.
        """
        codes = np.frombuffer(text.encode("utf-32-le"), "<u4").astype(np.int64)
        pairs = codes[:-1] << 21 | codes[1:]
        index = np.searchsorted(self._pairs, pairs).clip(max=len(self._pairs) - 1)
        positions: list[int] = (np.flatnonzero(self._pairs[index] != pairs) + 1).tolist()
        return positions

    def _places(self, text: str) -> Iterator[int]:
        begin = max(len(text) - TAIL, 0)
        return (begin + position for position in reversed(self._break_points(text[begin:].replace(" ", BLANK))))

    def _word_ids(self, word: str) -> list[int]:
        ids = self._id_cache.get(word)
        if ids is None:
            if len(self._id_cache) >= CACHED:
                self._id_cache.clear()
            ids = self._id_cache[word] = [i for symbol in self._merge(word) for i in self._token(symbol)]
        return ids

    def _merge(self, word: str) -> list[str]:
        """Split a word into characters, merge them to tokens, and return the tokens.

        The pair whose joined token has the highest score merges first. Of several such pairs, the leftmost merges
        first.
        """
        symbols = list(word)
        before, after = list(range(-1, len(word) - 1)), [*range(1, len(word)), -1]
        heap: list[tuple[float, int, int, str]] = []

        def offer(left: int, right: int) -> None:
            if left >= 0 and right >= 0:
                joined = symbols[left] + symbols[right]
                token = self._ids.get(joined)
                if token is not None:
                    heapq.heappush(heap, (self._cost[token], left, right, joined))

        for n in range(len(word) - 1):
            offer(n, n + 1)
        while heap:
            _, left, right, joined = heapq.heappop(heap)
            if not symbols[left] or not symbols[right] or symbols[left] + symbols[right] != joined:
                continue  # outdated: one of the two has been merged since
            symbols[left], symbols[right] = joined, ""
            after[left] = after[right]
            if after[left] >= 0:
                before[after[left]] = left
            offer(before[left], left)
            offer(left, after[left])
        return [symbol for symbol in symbols if symbol]

    def _token(self, symbol: str) -> list[int]:
        """Return a list with the id of a symbol or, if the symbol is not a token, with the ids of its bytes."""
        token = self._ids.get(symbol)
        if token is not None:
            return [token]
        byte_tokens = [self._ids.get(f"<0x{byte:02X}>") for byte in symbol.encode()]
        present = [i for i in byte_tokens if i is not None]
        if len(present) < len(byte_tokens):
            raise UnknownCharacter(symbol, "tokenizer")
        return present

    def _token_bytes(self, i: int) -> bytes:
        piece = self.pieces[i]
        return bytes([int(piece[3:5], 16)]) if self.types[i] == BYTE else piece.replace(BLANK, " ").encode()

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Decode the ids of a complete text. If `encode` puts a space before each text, remove this space."""
        text = super().decode(ids)
        return text.removeprefix(" ") if self.prefix else text

    def _rules(self) -> dict[str, Any]:
        scores = self.scores.astype(np.float64).tolist()
        return {**super()._rules(), "scores": scores, "prefix": self.prefix, "unreachable": sorted(self._unreachable)}

    def _own_metadata(self) -> dict[str, Any]:
        keys = {
            "model": "llama",
            "tokens": list(self.pieces),
            "scores": self.scores,
            "token_type": self.types,
            "eos_token_id": self.eos,
            "add_bos_token": self.add_bos,
            "add_eos_token": self.add_eos,
            "add_space_prefix": self.prefix,
        }
        return {f"ggml.{k}": v for k, v in (keys | ({} if self.bos is None else {"bos_token_id": self.bos})).items()}

    def _splits(self, pieces: Iterable[str]) -> Iterator[tuple[float, str, str]]:
        """Yield (cost, left, right) for each way to cut one of the tokens `pieces` into two tokens or characters.

        The cost is the negative score of the token that is cut.
        """
        for piece in pieces:
            for n in range(1, len(piece)):
                if all(len(half) == 1 or half in self._ids for half in (piece[:n], piece[n:])):
                    yield self._cost[self._ids[piece]], piece[:n], piece[n:]

    def count_reordered(self) -> int:
        """Return how many tokens the tokenizers library may merge in another order than llama.cpp, or cannot merge.

        The library merges only pairs of tokens. Of two pairs with equal score it always merges the same one first,
        whereas llama.cpp merges the leftmost.
        """
        ids, shared = self._ids, Counter(self._cost[i] for i in self._ids.values())
        normal = ((p, i) for p, i in ids.items() if self.types[i] == NORMAL)
        splits = list(
            self._splits(p for p, i in normal if shared[self._cost[i]] > 1 or not {p[0], p[-1]} <= ids.keys())
        )
        reordered = {a + b for _, a, b in splits if a not in ids or b not in ids}
        joined_by_start: dict[tuple[float, str], set[str]] = {}
        for cost, a, b in splits:
            joined_by_start.setdefault((cost, a), set()).add(a + b)
        for cost, a, b in splits:
            rivals = {other for other in joined_by_start.get((cost, b), ()) if other != a + b and len({*a, *other}) > 1}
            reordered |= rivals | {a + b} if rivals else rivals
        return len(reordered)

    def _library(self) -> Any:
        """Return the tokenizers.Tokenizer that comes closest to this tokenizer.

        It merges pairs in the order of their scores. Of several pairs with equal scores, the one with the longest left
        half merges first. Thus a run of one character merges from the left, as in llama.cpp.
        """
        joins = sorted(
            (cost, -len(a), a, b) for cost, a, b in self._splits(self._ids) if a in self._ids and b in self._ids
        )
        merges = [(a, b) for _, _, a, b in joins]
        vocab = {piece: i for i, piece in enumerate(self.pieces)}
        unknown = None if self.unknown is None else self.pieces[self.unknown]
        engine = hf.Tokenizer(hf.models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token=unknown))
        normalizers, decoders = hf.normalizers, hf.decoders
        blanks = [normalizers.Replace(" ", BLANK)]
        engine.normalizer = normalizers.Sequence([normalizers.Prepend(BLANK)] * self.prefix + blanks)
        strip = [decoders.Strip(" ", 1, 0)] * self.prefix
        engine.decoder = decoders.Sequence(
            [decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
        )
        return engine
