"""Where data comes from: what `data=` names, and how that is opened."""

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
    """Base of all data plugins: a dataclass whose fields say which data and how to split it."""

    plugin_kind: ClassVar[str] = "data"
    name: ClassVar[str]  # what `data=` takes
    gives: ClassVar[Kind]  # TOKENS, IMAGES, or a kind of your own
    fills: ClassVar[tuple[str, ...]] = ()  # settings that opening the data fills in where they are empty
    eval_settings: ClassVar[Mapping[str, Any]] = {}  # settings that hold out all of it, for `toyexp eval --data PATH`

    @classmethod
    def recognises(cls, path: Path) -> int:
        """How well `path` fits where no `data=` says what it is: 2 like no other, 1 if nothing better does, 0 not."""
        return 0

    @classmethod
    def suggest_settings(cls, sizes: Mapping[str, Any], tokenizer: Tokenizer | None) -> str | None:
        """What to type beside `data=<name>` for a file's model of these sizes, names in capitals; None: not for it."""
        return None

    @abstractmethod
    def check(self) -> None:
        """Raises UserError for settings that cannot work and files that are not there."""

    @abstractmethod
    def open(self, vocabulary: Path | None) -> Dataset:
        """Reads the data; `vocabulary` is the GGUF whose tokenizer the recipe would like it to have, if any."""

    def warnings(self, preview: RunPreview) -> Iterable[str]:
        """A sentence for each of its settings that has no effect in this run, or cannot have the one it is for."""
        return ()


# By their settings, where runs of one process share them: what gave them, and themselves for as long as a run has them.
_Known = dict[tuple[Any, ...], tuple[Data, "weakref.ref[Dataset]"]]
_known: ContextVar[_Known | None] = ContextVar("known", default=None)


@contextmanager
def share_open_data() -> Iterator[None]:
    """Inside, runs whose data have the same settings have them in common; their batches are each run's own."""
    before = _known.set({})
    try:
        yield
    finally:
        _known.reset(before)


def open_shared_data(data: Data, vocabulary: Path | None) -> tuple[Data, Dataset]:
    """The opened data, and what opened them: `data`, unless a run that shares them has done so."""
    known = _known.get()
    if known is None:
        return data, open_data(data, vocabulary)
    key = (type(data), vocabulary, *(repr(getattr(data, field.name, None)) for field in fields(data)))
    opened, found = known.get(key, (data, lambda: None))
    dataset = found()
    if dataset is None:
        opened, dataset = data, open_data(data, vocabulary)
        known[key] = data, weakref.ref(dataset)
    return opened, dataset


def open_data(data: Data, vocabulary: Path | None) -> Dataset:
    """The opened data; PluginFailed for what is none, or has no ids."""
    dataset = call_checked(Dataset, data.open, vocabulary, who=f"data.{data.name}")
    if not isinstance(dataset.vocab, Integral) or dataset.vocab < 1:
        raise PluginFailed(f"data.{data.name}: its vocab is {dataset.vocab!r}; it must be a whole number from 1")
    return dataset
