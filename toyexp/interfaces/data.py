"""Base class of data plugins, and functions that open their data."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from toyexp.base.attribution import call_checked
from toyexp.base.errors import PluginFailed
from toyexp.interfaces.dataset import Dataset
from toyexp.interfaces.kind import Kind
from toyexp.interfaces.run_preview import RunPreview

if TYPE_CHECKING:
    from toyexp.tokenizers.tokenizer import Tokenizer


@dataclass
class Data(ABC):
    """Base of all data plugins: a dataclass whose fields say which data to use and how to split it."""

    plugin_kind: ClassVar[str] = "data"
    name: ClassVar[str]  # the value of `data=` that selects it
    gives: ClassVar[Kind]  # kind of data: TOKENS, IMAGES, or your own Kind
    fills: ClassVar[tuple[str, ...]] = ()  # settings that `open` sets if the user left them empty
    eval_settings: ClassVar[Mapping[str, Any]] = {}  # with which `toyexp eval` holds out all, of its settings

    @classmethod
    def recognises(cls, path: Path) -> int:
        """Return 2 if this plugin can surely read the file at `path`, 1 if it can as a last resort, 0 if it cannot.

        toyexp calls this method to select a data plugin if the user gives a path but no `data=`.
        """
        return 0

    @classmethod
    def suggest_settings(cls, sizes: Mapping[str, Any], tokenizer: Tokenizer | None) -> str | None:
        """Return the overrides needed to evaluate a model file on this data, besides `data=<name>`.

        `sizes` and `tokenizer` are those of the model file. The overrides may contain placeholders in capitals, such as
        PATH, which the user replaces. Return None if this data does not suit the model.
        """
        return None

    @abstractmethod
    def check(self) -> None:
        """Raise UserError for invalid settings and for missing files."""

    @abstractmethod
    def open(self, vocabulary: Path | None) -> Dataset:
        """Open the data. `vocabulary` is the GGUF file whose tokenizer must be used, or None."""

    def warnings(self, preview: RunPreview) -> Iterable[str]:
        """Return a one-sentence warning for each setting that has no effect, or an unintended one, in this run."""
        return ()


# Shared datasets by settings: for each the plugin that opened it and a weak reference, to free it with its last run.
_Cache = dict[tuple[Any, ...], tuple[Data, "weakref.ref[Dataset]"]]
_cache: ContextVar[_Cache | None] = ContextVar("cache", default=None)


@contextmanager
def share_open_data() -> Iterator[None]:
    """Inside this context, let runs with equal data settings share the opened data.

    Each run still has its own batches.
    """
    token = _cache.set({})
    try:
        yield
    finally:
        _cache.reset(token)


def open_shared_data(data: Data, vocabulary: Path | None) -> tuple[Data, Dataset]:
    """Return a data plugin and the dataset that it opened.

    Inside `share_open_data`, if another run with equal settings has already opened its data, return the plugin and
    dataset of that run. Otherwise return `data` and a newly opened dataset.
    """
    cache = _cache.get()
    if cache is None:
        return data, open_data(data, vocabulary)
    key = (type(data), vocabulary, *(repr(getattr(data, field.name, None)) for field in fields(data)))
    owner, reference = cache.get(key, (data, lambda: None))
    dataset = reference()
    if dataset is None:
        owner, dataset = data, open_data(data, vocabulary)
        cache[key] = data, weakref.ref(dataset)
    return owner, dataset


def open_data(data: Data, vocabulary: Path | None) -> Dataset:
    """Open the data. Raise PluginFailed if the result is not a Dataset or its `vocab` is not at least 1."""
    dataset = call_checked(Dataset, data.open, vocabulary, who=f"data.{data.name}")
    if not isinstance(dataset.vocab, Integral) or dataset.vocab < 1:
        raise PluginFailed(f"data.{data.name}: vocab is {dataset.vocab!r}; it must be a whole number >= 1")
    return dataset
