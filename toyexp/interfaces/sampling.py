"""How text is drawn from a model, token by token."""

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
    """Which tokens may come next, and how likely each of them is.

    The three cuts are made one after another, each by the probabilities without a temperature, as in llama.cpp.
    """

    temperature: float = 0.8  # the logits are divided by it; 0: always the likeliest token
    top_k: int = 40  # this many of the likeliest; 0: all
    top_p: float = 0.95  # the fewest that together have this probability (Holtzman et al. 2020); 1: all
    min_p: float = 0.0  # those with at least this share of the likeliest one's probability; 0: all

    def choose(self, logits: np.ndarray, uniform: float) -> int:
        """A token of logits [V], by a number from [0, 1); RunFailed for logits that are not finite."""
        if not np.isfinite(logits).all():
            raise RunFailed("the model's logits are not finite: its weights hold NaN or infinity, or overflow")
        if self.temperature == 0:
            return int(logits.argmax())
        order = top_tokens(logits, self.top_k)
        ranked = logits[order].astype(np.float64) - float(logits[order[0]])
        shares = np.exp(ranked)  # of the likeliest one's probability
        cumulative = shares.cumsum()
        kept = len(order)
        if self.top_p < 1:
            kept = int(np.searchsorted(cumulative, self.top_p * cumulative[-1])) + 1
        kept = min(kept, int((shares >= self.min_p).sum()))
        with np.errstate(over="ignore"):  # next to no temperature leaves the likeliest alone
            cumulative = np.exp(ranked[:kept] / self.temperature).cumsum()
        drawn = np.searchsorted(cumulative, uniform * cumulative[-1], side="right")
        return int(order[min(drawn, kept - 1)])


def top_tokens(logits: np.ndarray, count: int) -> np.ndarray:
    """The `count` largest of logits [V] (0: all) from the largest down, of equal ones the earlier first."""
    if not 0 < count < len(logits):
        return np.argsort(-logits, kind="stable")
    least = np.partition(logits, -count)[-count]
    among = np.flatnonzero(logits >= least)
    return among[np.argsort(-logits[among], kind="stable")][:count]


def generate_tokens(
    decoder: Decoder, ids: Sequence[int] | np.ndarray, sampling: Sampling, random: np.random.Philox, vocab: int
) -> Iterator[int]:
    """Tokens below `vocab` that follow `ids`, without end but for the decoder's context; `random` draws them."""
    while len(ids) <= decoder.context - decoder.position:
        logits = decoder.feed(ids)[:vocab]
        token = sampling.choose(logits, float(random.random_raw()) / 2**64)
        yield token
        ids = [token]


def generate_endlessly(
    session: Session, ids: Sequence[int], sampling: Sampling, random: np.random.Philox, vocab: int,
    slides: Callable[[], object] = lambda: None,
) -> Iterator[int]:  # fmt: skip
    """Tokens that follow `ids`; whenever the context is full, its later half is read anew, and `slides` called."""
    seen = list(ids)
    while True:
        decoder = session.decoder()
        window = seen[-decoder.context if len(seen) == len(ids) else -max(1, decoder.context // 2) :]
        for token in generate_tokens(decoder, window, sampling, random, vocab):
            seen.append(token)
            yield token
        slides()
