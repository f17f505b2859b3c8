"""A format of files: how a trained model is written, and read; and what a file says of the model in it."""

from __future__ import annotations

import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from toyexp.base.errors import PluginFailed, UserError
from toyexp.base.files import KINDS
from toyexp.base.formatting import align_columns
from toyexp.interfaces.model import Model
from toyexp.interfaces.plan import Plan

if TYPE_CHECKING:
    import numpy as np

    from toyexp.tokenizers.tokenizer import Tokenizer

Models = Collection[type[Model]]


@dataclass(frozen=True)
class TensorInfo:
    """A tensor of a file: its shape in numpy order ([out, in]), its type, and where its bytes are."""

    name: str
    shape: tuple[int, ...]
    type: str
    type_id: int
    path: Path  # the file that holds it, of a split model one of several
    offset: int  # bytes from the start of that file
    nbytes: int


class ModelFile(ABC):
    """An open file that holds a model: what a model reads itself from."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]

    @property
    def architecture(self) -> str:
        """What the file says it holds; raises UserError where it says nothing."""
        if not (value := self.text("general.architecture")):
            raise self.error("has no general.architecture")
        return value

    def text(self, key: str) -> str:
        """What a key says in words; nothing where it is not there, or holds something else."""
        value = self.metadata.get(key, "")
        return value if isinstance(value, str) else ""

    def error(self, cause: str) -> UserError:
        """An error that names the file."""
        return UserError(f"{self.path}: {cause}")

    @abstractmethod
    def read(self, name: str, rows: int | None = None) -> np.ndarray:
        """The first rows of a tensor, or all of it, in float32."""


class LazyTensors(Mapping[str, "np.ndarray"]):
    """A model's tensors by name, each read when it is asked for."""

    def __init__(self, shapes: Mapping[str, Sequence[int]], read: Callable[[str], np.ndarray]):
        self._shapes, self._read = shapes, read

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._shapes:
            raise KeyError(name)
        return self._read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)

    def __repr__(self) -> str:
        return "\n".join(align_columns([(name, str(list(shape))) for name, shape in self._shapes.items()]))


@dataclass(frozen=True)
class ModelExport:
    """A model to be written to a file, or one that was read from it."""

    model: Model
    tensors: Mapping[str, np.ndarray]  # the model's own by name, float32; each may be read when it is asked for
    tokenizer: Tokenizer | None = None
    general: Mapping[str, Any] = field(default_factory=dict)  # what is known of its origin: name, step, license
    data: Mapping[str, Any] = field(default_factory=dict)  # what a reader must know of its data: classes, image_mean
    chat_template: str = ""
    about: Mapping[str, Any] = field(default_factory=dict)  # what its run adds to a model card: recipe, base, scores
    unreadable: Sequence[str] = ()  # a sentence for each thing that could not be read of its file


@dataclass
class Format(ABC):
    """Base of all formats of model files: subclass it as a dataclass whose fields are its settings.

    `toyexp export --type <name>` writes it, and in a run the callback `<name>_export`, which has its settings.
    """

    plugin_kind: ClassVar[str] = "format"
    name: ClassVar[str]  # what `toyexp export --type` takes
    suffix: ClassVar[str]  # what stands behind `model` in the name of its file or directory: .onnx
    types: ClassVar[Mapping[str, Mapping[str, Any]]] = {}  # further words of --type, and the settings they stand for
    dtype_setting: ClassVar[str] = (
        ""  # the setting that says which type of numbers is written; without one they are f32
    )
    contents: ClassVar[frozenset[str]] = frozenset()  # of a directory: what may be in it, by name; of a file nothing
    writes_adapters: ClassVar[bool] = False  # whether LoRA adapters have it too: `write_adapter`

    def check(self) -> None:  # noqa: B027 - optional on purpose: many formats have nothing to check
        """Raises UserError, `<setting>=<value>: <why>`, for what cannot work, and Unavailable for what is not here."""

    def check_model(self, model: Model) -> None:  # noqa: B027 - optional, as above
        """Raises UserError in one line for a model that it cannot hold; asked before anything is trained or written."""

    @abstractmethod
    def write(self, export: ModelExport, path: Path) -> list[str]:
        """Writes the file or directory `path`, which is not there yet and is renamed once it is whole.

        Returns a sentence for each tensor whose numbers are not finite, or not in the type that was asked for.
        """

    def write_adapter(self, plan: Plan, export: ModelExport, path: Path) -> list[str]:
        """Likewise the plan's LoRA adapters, whose tensors `export` holds; only asked if `writes_adapters`."""
        raise NotImplementedError

    def write_again(self, file: ModelFile, path: Path, requantize: bool) -> list[str] | None:
        """Writes an open file of this format again, with all that stands in it; None for one that is another's.

        Raises UserError for numbers that would be rounded a second time, unless `requantize` says so.
        """
        return None

    def read(self, path: Path, models: Models) -> ModelExport:
        """What a file holds, a model of one of these classes; UserError for any other, and of a format that writes."""
        raise UserError(f"{path}: toyexp writes {self.name} files, and does not read them")

    def notes(self, export: ModelExport) -> list[str]:
        """A sentence for each thing that the file leaves out, and each program that makes something else of it."""
        return []

    @property
    def kind(self) -> str:
        """The type of its numbers."""
        return str(getattr(self, self.dtype_setting)) if self.dtype_setting else "f32"


def require_written(form: Format, place: Path, problems: list[str]) -> list[str]:
    """The `problems` that a format told, if what it was to write stands at `place`; PluginFailed if not."""
    kinds = {**KINDS, stat.S_IFDIR: "a directory"}
    wanted, there = kinds[stat.S_IFDIR if form.contents else stat.S_IFREG], "nothing"
    if os.path.lexists(place):
        there = kinds.get(stat.S_IFMT(place.lstat().st_mode), "something else")
    if there != wanted:
        raise PluginFailed(f"format.{form.name} wrote {there} where {wanted} was to be")
    if not isinstance(problems, list):
        raise PluginFailed(f"format.{form.name} gave {problems!r} for what is odd about the numbers, expected a list")
    return [" ".join(str(problem).splitlines()) for problem in problems]
