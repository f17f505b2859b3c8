"""Sampling of text from a model, token by token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from toyexp.base.errors import RunFailed

if TYPE_CHECKING:
    from toyexp.interfaces.decoder import Decoder
    from toyexp.interfaces.session import Session


@dataclass(frozen=True)
class Sampling:
    """Settings that determine which tokens may come next, and how likely each is.

    top_k, top_p and min_p are applied in this order, to probabilities at temperature 1, as in llama.cpp.
    """

    temperature: float = 0.8  # divides the logits; 0: always the most likely token
    top_k: int = 40  # keep this many most likely tokens; 0: all
    top_p: float = 0.95  # keep the fewest tokens with this total probability (Holtzman et al. 2020); 1: all
    min_p: float = 0.0  # keep tokens with at least this fraction of the highest probability; 0: all

    def choose(self, logits: np.ndarray, uniform: float) -> int:
        """Return a token id sampled from logits [V]; `uniform` is a random number in [0, 1) that selects it.

        Raise RunFailed for NaN or infinite logits.
        """
        if not np.isfinite(logits).all():
            raise RunFailed("the model's logits are not finite: its weights contain NaN or infinity, or overflow")
        if self.temperature == 0:
            return int(logits.argmax())
        order = top_tokens(logits, self.top_k)
        ranked = logits[order].astype(np.float64) - float(logits[order[0]])
        shares = np.exp(ranked)  # relative to the highest probability
        cumulative = shares.cumsum()
        count = len(order)
        if self.top_p < 1:
            count = int(np.searchsorted(cumulative, self.top_p * cumulative[-1])) + 1
        count = min(count, int((shares >= self.min_p).sum()))
        with np.errstate(over="ignore"):  # a tiny temperature leaves only the most likely token
            cumulative = np.exp(ranked[:count] / self.temperature).cumsum()
        index = np.searchsorted(cumulative, uniform * cumulative[-1], side="right")
        return int(order[min(index, count - 1)])


def top_tokens(logits: np.ndarray, count: int) -> np.ndarray:
    """Return the ids of the `count` largest logits [V], largest first; if `count` is 0, return all ids.

    Of equal logits, the one with the lower id comes first.
    """
    if not 0 < count < len(logits):
        return np.argsort(-logits, kind="stable")
    threshold = np.partition(logits, -count)[-count]
    candidates = np.flatnonzero(logits >= threshold)
    return candidates[np.argsort(-logits[candidates], kind="stable")][:count]


def generate_tokens(
    decoder: Decoder, ids: Sequence[int] | np.ndarray, sampling: Sampling, random: np.random.Philox, vocab: int
) -> Iterator[int]:
    """Yield token ids below `vocab` that continue `ids`, until the decoder's context is full.

    The generator `random` chooses the tokens.
    """
    while len(ids) <= decoder.context - decoder.position:
        logits = decoder.feed(ids)[:vocab]
        token = sampling.choose(logits, float(random.random_raw()) / 2**64)
        yield token
        ids = [token]


def generate_endlessly(
    session: Session, ids: Sequence[int], sampling: Sampling, random: np.random.Philox, vocab: int,
    on_slide: Callable[[], object] = lambda: None,
) -> Iterator[int]:  # fmt: skip
    """Yield token ids below `vocab` that continue `ids`, without end.

    When the context is full, call `on_slide`. Then continue with only the second half of the tokens in the context.
    """
    sequence = list(ids)
    while True:
        decoder = session.decoder()
        window = sequence[-decoder.context if len(sequence) == len(ids) else -max(1, decoder.context // 2) :]
        for token in generate_tokens(decoder, window, sampling, random, vocab):
            sequence.append(token)
            yield token
        on_slide()
