"""Mixtures: rows of several data sets in given shares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import toyexp
from toyexp import TOKENS, Batch, Batches, Data, Dataset, Kind, UserError
from toyexp.base import require_range, stream

if TYPE_CHECKING:
    import numpy as np

PERIOD = 1000  # rows in which each source has exactly its share


@dataclass
class Mix(Data):
    """Rows of several data sets, each with a share of the rows and a held-out loss of its own."""

    name: ClassVar[str] = "mix"
    gives: ClassVar[Kind] = TOKENS

    sources: dict[str, Any] = field(default_factory=dict)  # {a: {path: a.txt, weight: 3}, b: ...} for each source
    temperature: float = 1.0  # without weights, shares are proportional to rows^(1/temperature); (0, inf)
    tokenizer: str = "auto"  # tokenizer of all sources, as in data=text: auto | byte | model

    def check(self) -> None:
        """Raise UserError for invalid settings, of the mixture or of its sources."""
        require_range("data", self, temperature="(0,inf)")
        if len(self.sources) < 2:
            raise UserError("data=mix needs several sources: data.sources='{a: {path: a.txt}, b: {path: b.jsonl}}'")
        weights = [source.get("weight") for source in self._settings().values()]
        for name, weight in zip(self.sources, weights, strict=True):
            if (weight is None) != (weights[0] is None):
                raise UserError(f"data.sources.{name}: either all sources have a weight, or none")
            is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
            if weight is not None and not (is_number and isfinite(weight) and weight > 0):
                raise UserError(f"data.sources.{name}.weight={weight}: must be a finite number above 0")
        self._open()

    def _settings(self) -> dict[str, Mapping[str, Any]]:
        for name, source in self.sources.items():
            if not isinstance(source, Mapping):
                raise UserError(
                    f"data.sources.{name}={source}: must be settings of a data set, such as {{path: x.txt}}"
                )
        return self.sources

    def _open(self) -> dict[str, Data]:
        """Return the data plugin of each source, with checked settings."""
        sources = {}
        for name, settings in self._settings().items():
            where, chosen = f"data.sources.{name}", {key: value for key, value in settings.items() if key != "weight"}
            data = toyexp.create_data(chosen, where)
            if data.gives != TOKENS or isinstance(data, Mix):
                raise UserError(f"{where}: data={data.name} cannot be mixed; a source gives tokens, and is no mixture")
            if self.tokenizer != "auto" and getattr(data, "tokenizer", None) == "auto":
                data = toyexp.create_data({**chosen, "tokenizer": self.tokenizer}, where)
            sources[name] = data
        return sources

    def open(self, vocabulary: Path | None) -> MixDataset:
        """Open all sources. Raise UserError if their tokenizers differ."""
        datasets = {name: data.open(vocabulary) for name, data in self._open().items()}
        first, *others = datasets.items()
        for name, dataset in others:
            if _vocabulary(dataset) != _vocabulary(first[1]):
                raise UserError(f"data.sources.{name}: has another tokenizer than {first[0]}; set data.tokenizer")
        weights = {name: source.get("weight") for name, source in self._settings().items()}
        return MixDataset(datasets, weights, self.temperature)


def _vocabulary(dataset: Dataset) -> Any:
    return dataset.tokenizer.fingerprint() if dataset.tokenizer else dataset.vocab


class MixDataset(Dataset):
    """Several data sets with the same tokenizer. `weights` are relative shares of the rows, or None."""

    def __init__(self, datasets: Mapping[str, Dataset], weights: Mapping[str, float | None], temperature: float):
        first = next(iter(datasets.values()))
        self.tokenizer, self.vocab = first.tokenizer, first.vocab
        self.chat_template = next((d.chat_template for d in datasets.values() if d.chat_template), "")
        self._datasets, self._weights, self._temperature = datasets, weights, temperature

    def describe(self) -> dict[str, Any]:
        """Return what each source says about itself."""
        return {"sources": {name: dataset.describe() for name, dataset in self._datasets.items()}}

    def omissions(self) -> Sequence[str]:
        """Return notes about what the sources leave out."""
        return [f"{name}: {note}" for name, dataset in self._datasets.items() for note in dataset.omissions()]

    def remarks(self) -> list[str]:
        """Return the notes of the sources."""
        return [f"{name}: {note}" for name, dataset in self._datasets.items() for note in dataset.remarks()]

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


class MixBatches(Batches):
    """Batches whose rows come from several sources, in an order that depends only on the seed.

    Of every 1,000 rows, each source has its share, rounded to whole rows.
    """

    def __init__(
        self, parts: Mapping[str, Batches], held_out: Mapping[str, Sequence[Batch]], shares: Mapping[str, float],
        rows: int, seed: int,
    ):  # fmt: skip
        import numpy as np

        self._parts, self._held_out, self._rows, self._seed = [*parts.values()], held_out, rows, seed
        self.inputs = self._parts[0].inputs
        for name, part in parts.items():
            if part.inputs != self.inputs:
                raise UserError(f"data.sources.{name}: its rows have other arrays than those of {next(iter(parts))}")
        exact = np.array([*shares.values()]) / sum(shares.values()) * PERIOD
        counts = np.floor(exact).astype(np.int64)
        counts[np.argsort(counts - exact, kind="stable")[: PERIOD - counts.sum()]] += 1
        for name, count in zip(shares, counts, strict=True):
            if not count:
                raise UserError(f"data.sources.{name}: its share is below 1 of {PERIOD} rows; raise its weight")
        self._counts, self._order = counts, lru_cache(maxsize=2)(self._period_order)
        sizes = [part.rows_per_epoch for part in self._parts]
        self.facts = {
            "shares": dict(zip(parts, (counts / PERIOD).tolist(), strict=True)),
            "steps_per_epoch": {
                name: size and round(size * PERIOD / int(count) / rows, 1)
                for name, size, count in zip(parts, sizes, counts, strict=True)
            },
        }
        self.omissions = [f"{name}: {note}" for name, part in parts.items() for note in part.omissions]

    def _period_order(self, period: int) -> tuple[np.ndarray, np.ndarray]:
        """Return, for each row of a period, its source, and its number among the period's rows of this source."""
        import numpy as np

        sources = np.repeat(np.arange(len(self._counts)), self._counts)
        sources = sources[np.argsort(stream(self._seed, "mix", period).random_raw(PERIOD), kind="stable")]
        numbers = np.empty(PERIOD, np.int64)
        for source, count in enumerate(self._counts):
            numbers[sources == source] = np.arange(count)
        return sources, numbers

    def batch(self, k: int) -> Batch:
        """Return training batch `k`."""
        import numpy as np

        rows = []
        for period, position in (divmod(n, PERIOD) for n in range(k * self._rows, (k + 1) * self._rows)):
            sources, numbers = self._order(period)
            source = int(sources[position])
            rows.append(self._parts[source].batch(period * int(self._counts[source]) + int(numbers[position])))
        return {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}

    def held_out(self) -> Sequence[Batch]:
        """Return the held-out batches of all sources."""
        return [batch for part in self._held_out.values() for batch in part]

    def held_out_sets(self) -> Mapping[str, Sequence[Batch]]:
        """Return the held-out batches of each source."""
        return self._held_out
