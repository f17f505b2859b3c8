"""Rows of several data sets in given shares. Batch number k depends only on the seed and on k."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from toyexp import Batch, Batches, Dataset, EpochBatches, UserError
from toyexp.base import stream

PERIOD = 1000  # rows in which each source has exactly its share


def _name_notes(notes: Mapping[str, Sequence[str]]) -> list[str]:
    return [f"{name}: {note}" for name, part in notes.items() for note in part]


class MixDataset(Dataset):
    """Several data sets with the same tokenizer. `weights` are relative shares of the rows, or None."""

    def __init__(self, datasets: Mapping[str, Dataset], weights: Mapping[str, float | None], temperature: float):
        first = next(iter(datasets.values()))
        self.tokenizer, self.vocab = first.tokenizer, first.vocab
        self.chat_template = next((d.chat_template for d in datasets.values() if d.chat_template), "")
        self._datasets, self._weights, self._temperature = datasets, weights, temperature
        self._left_out = _name_notes({name: dataset.omissions() for name, dataset in datasets.items()})
        self._remarks = _name_notes({name: dataset.remarks() for name, dataset in datasets.items()})
        self._facts = {"sources": {name: dataset.describe() for name, dataset in datasets.items()}}

    def prompt(self) -> list[int]:
        """Return the prompt of the first source."""
        return next(iter(self._datasets.values())).prompt()

    def batches(self, context: int, rows: int, seed: int) -> MixBatches:
        """Return batches whose rows are taken from the sources by their shares."""
        parts = {name: dataset.batches(context, 1, seed) for name, dataset in self._datasets.items()}
        held_out = {name: dataset.batches(context, rows, seed).held_out() for name, dataset in self._datasets.items()}
        sizes = {name: part.rows_per_epoch for name, part in parts.items()}
        if None in self._weights.values() and None in sizes.values():
            raise UserError("data.sources: a source without epochs needs weights: give each source a weight")
        shares = {
            name: weight if weight is not None else float(sizes[name] or 0) ** (1 / self._temperature)
            for name, weight in self._weights.items()
        }
        return MixBatches(parts, held_out, shares, rows, seed)


class MixBatches(EpochBatches):
    """Batches whose rows come from several sources, in an order that depends only on the seed.

    Of every 1,000 rows, each source has its share, rounded to whole rows.
    """

    def __init__(
        self, parts: Mapping[str, Batches], held_out: Mapping[str, Sequence[Batch]], shares: Mapping[str, float],
        rows: int, seed: int,
    ):  # fmt: skip
        super().__init__(PERIOD, 0, rows, seed)
        self._parts, self._held_out, self.rows_per_epoch = [*parts.values()], held_out, None
        self.inputs = self._parts[0].inputs
        for name, part in parts.items():
            if part.inputs != self.inputs:
                raise UserError(f"data.sources.{name}: its rows differ; either all sources have pack: apart, or none")
        exact = np.array([*shares.values()]) / sum(shares.values()) * PERIOD
        counts = np.floor(exact).astype(np.int64)
        counts[np.argsort(counts - exact, kind="stable")[: PERIOD - counts.sum()]] += 1
        for name, count in zip(shares, counts, strict=True):
            if not count:
                raise UserError(f"data.sources.{name}: its share is below 1 of {PERIOD} rows; raise its weight")
        self._counts = counts
        sizes = [part.rows_per_epoch for part in self._parts]
        self.facts = {
            "shares": dict(zip(parts, (counts / PERIOD).tolist(), strict=True)),
            "steps_per_epoch": {
                name: size and round(size * PERIOD / int(count) / rows, 1)
                for name, size, count in zip(parts, sizes, counts, strict=True)
            },
        }
        self.omissions = _name_notes({name: part.omissions for name, part in parts.items()})

    def _epoch_order(self, epoch: int) -> np.ndarray:
        """Return for each of 1,000 rows its source, and its number among all rows of this source, [1000, 2]."""
        sources = np.repeat(np.arange(len(self._counts)), self._counts)
        sources = sources[np.argsort(stream(self._seed, "mix", epoch).random_raw(PERIOD), kind="stable")]
        numbers = np.empty(PERIOD, np.int64)
        for source, count in enumerate(self._counts):
            numbers[sources == source] = epoch * count + np.arange(count)
        return np.stack([sources, numbers], 1)

    def _take(self, items: np.ndarray, is_held_out: bool) -> dict[str, np.ndarray]:
        rows = [self._parts[source].batch(number) for source, number in items.tolist()]
        return {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}

    def held_out(self) -> Sequence[Batch]:
        """Return the held-out batches of all sources."""
        return [batch for part in self._held_out.values() for batch in part]

    def held_out_sets(self) -> Mapping[str, Sequence[Batch]]:
        """Return the held-out batches of each source."""
        return self._held_out
