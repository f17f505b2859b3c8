"""Mixtures: rows of several data sets in given shares."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from pathlib import Path
from typing import Any, ClassVar

import toyexp
from toyexp import TOKENS, Data, Dataset, Kind, RunPreview, UserError, is_changed
from toyexp.base import require_range


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
        for name, source in self.sources.items():
            if not isinstance(source, Mapping):
                raise UserError(f"data.sources.{name}={source}: must be settings of a data set: {{path: x.txt}}")
            if source.get("data") == self.name:
                raise UserError(f"data.sources.{name}: a source cannot be a mixture")
        weights = {name: source.get("weight") for name, source in self.sources.items()}
        for name, weight in weights.items():
            if (weight is None) != (next(iter(weights.values())) is None):
                raise UserError(f"data.sources.{name}: either all sources have a weight, or none")
            if weight is not None and not (type(weight) in (int, float) and 0 < weight < inf):
                raise UserError(f"data.sources.{name}.weight={weight}: must be a finite number above 0")
        self._plugins  # noqa: B018 - creating the sources checks their settings

    def warnings(self, preview: RunPreview) -> Iterable[str]:
        """Yield a warning if `temperature` has no effect."""
        if is_changed(self, "temperature") and any(source.get("weight") for source in self.sources.values()):
            yield f"data.temperature={self.temperature}: has no effect; the sources have weights"

    @cached_property
    def _plugins(self) -> dict[str, Any]:
        """The data plugin of each source, with checked settings."""
        sources = {}
        for name, settings in self.sources.items():
            where = f"data.sources.{name}"
            data: Any = toyexp.create_data({key: value for key, value in settings.items() if key != "weight"}, where)
            if data.gives != TOKENS or getattr(data, "pairs", False):
                raise UserError(f"{where}: data={data.name} cannot be mixed; a source gives rows of tokens, not pairs")
            if self.tokenizer != "auto" and getattr(data, "tokenizer", None) == "auto":
                data.tokenizer = self.tokenizer
                data.check()
            sources[name] = data
        return sources

    def open(self, vocabulary: Path | None) -> Dataset:
        """Open all sources. Raise UserError if their tokenizers differ."""
        from toyexp_data.mix_rows import MixDataset

        datasets = {name: data.open(vocabulary) for name, data in self._plugins.items()}
        first, *others = datasets.items()
        for name, dataset in others:
            if _identity(dataset) != _identity(first[1]):
                raise UserError(f"data.sources.{name}: has another tokenizer than {first[0]}; set data.tokenizer")
        return MixDataset(datasets, {name: s.get("weight") for name, s in self.sources.items()}, self.temperature)


def _identity(dataset: Dataset) -> Any:
    """Return what must be equal in all sources: the digest of the tokenizer, or the size of the vocabulary."""
    return dataset.tokenizer.fingerprint() if dataset.tokenizer else dataset.vocab
