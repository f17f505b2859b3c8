"""Base class of model-file formats, and the data that they write and read."""

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
from toyexp.base.lazy import numpy as np
from toyexp.interfaces.model import Model
from toyexp.interfaces.plan import Plan

if TYPE_CHECKING:
    from toyexp.tokenizers.tokenizer import Tokenizer

Models = Collection[type[Model]]


@dataclass(frozen=True)
class TensorInfo:
    """Description of a tensor in a file: its shape in numpy order ([out, in]), its type, and where its bytes are."""

    name: str
    shape: tuple[int, ...]
    type: str  # name of the type, such as Q4_K or F32
    type_id: int  # number of the type in the file's format
    path: Path  # file with its data; a split model has several
    offset: int  # in bytes from the start of that file
    nbytes: int


class ModelFile(ABC):
    """An open model file: metadata and tensors."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    parts: Mapping[Path, Any]  # the open files with the tensors' bytes, which have the methods `pread` and `close`

    @property
    def architecture(self) -> str:
        """The architecture that the file names. Raises UserError if it names none."""
        if not (value := self.text("general.architecture")):
            raise self.error("has no general.architecture")
        return value

    def text(self, key: str) -> str:
        """Return the text value of a metadata key; empty if it is absent or not text."""
        value = self.metadata.get(key, "")
        return value if isinstance(value, str) else ""

    def error(self, cause: str) -> UserError:
        """Return an error whose message starts with the file's path."""
        return UserError(f"{self.path}: {cause}")

    @abstractmethod
    def read(self, name: str, rows: int | None = None) -> np.ndarray:
        """Return a tensor as float32: its first `rows` rows, or all of them if `rows` is None."""


class LazyTensors(Mapping[str, "np.ndarray"]):
    """A model's tensors by name, each read from the file on access."""

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

    def __contains__(self, name: object) -> bool:
        return name in self._shapes  # without reading the tensor

    def __repr__(self) -> str:
        return "\n".join(align_columns([(name, str(list(shape))) for name, shape in self._shapes.items()]))


@dataclass(frozen=True)
class ModelExport:
    """A model to write to a file, or one that was read from a file."""

    model: Model
    tensors: Mapping[str, np.ndarray]  # the model's tensors by name, float32; may be read on access
    tokenizer: Tokenizer | None = None
    general: Mapping[str, Any] = field(default_factory=dict)  # metadata about its origin, such as name, step, license
    data: Mapping[str, Any] = field(default_factory=dict)  # metadata of its data, such as classes, image_mean
    chat_template: str = ""
    about: Mapping[str, Any] = field(default_factory=dict)  # entries for a model card: recipe, base, metrics
    unreadable: Sequence[str] = ()  # a sentence for each part of its file that could not be read
    file: ModelFile | None = None  # the open file: gives the types of tensors, and those that engines may read in place


@dataclass
class Format(ABC):
    """Base of all formats of model files: subclass it as a dataclass whose fields are its settings.

    `toyexp export --type <name>` writes the format. During a run the callback `<name>_export`, which has the same
    settings, writes it.
    """

    plugin_kind: ClassVar[str] = "format"
    name: ClassVar[str]  # the value of `toyexp export --type`
    suffix: ClassVar[str]  # end of its file or directory name, after `model`, such as .onnx
    types: ClassVar[Mapping[str, Mapping[str, Any]]] = {}  # more values of --type, with their settings
    dtype_setting: ClassVar[str] = ""  # setting that selects the dtype; empty: always f32
    contents: ClassVar[frozenset[str]] = frozenset()  # names allowed in its directory; empty: it is a file
    writes_adapters: ClassVar[bool] = False  # True: implements `write_adapter` for LoRA adapters
    writes_dora: ClassVar[bool] = False  # True: `write_adapter` also writes DoRA

    def check(self) -> None:  # noqa: B027 - optional on purpose: many formats have nothing to check
        """Raise UserError for invalid settings, and Unavailable for missing packages.

        The message of the UserError has the form `<setting>=<value>: <why>`.
        """

    def check_model(self, model: Model) -> None:  # noqa: B027 - optional, as above
        """Raise a one-line UserError for a model that the format cannot hold. Called before training or writing."""

    @abstractmethod
    def write(self, export: ModelExport, path: Path) -> list[str]:
        """Write a file or directory to `path`, a temporary path that does not exist yet.

        Return a warning for each tensor that has NaN or infinite values, or that could not be stored in the requested
        type.
        """

    def write_adapter(self, plan: Plan, export: ModelExport, path: Path) -> list[str]:
        """Write the plan's LoRA adapters to `path`, with values from `export.tensors`.

        Return warnings, as `write` does. Called only if `writes_adapters` is True.
        """
        raise NotImplementedError

    def write_again(self, file: ModelFile, path: Path, requantize: bool) -> list[str] | None:
        """Copy the model file `file` with all its metadata to `path`, in the dtype that the settings select.

        Return warnings, as `write` does, or None if `file` has another format than this one. Raise UserError if values
        would be quantised a second time, unless `requantize` is True.
        """
        return None

    def read(self, path: Path, models: Models) -> ModelExport:
        """Read the model file at `path`, and return its model, tensors, tokenizer and metadata.

        `models` are the available model classes. Raise UserError if the file's architecture is none of them, or if
        toyexp can write this format but not read it.
        """
        raise UserError(f"{path}: toyexp can write {self.name} files, but not read them")

    def recognises(self, path: Path) -> bool:
        """Return True if `path` may be a file or directory of this format; by default its name's end decides."""
        return path.name.endswith(self.suffix) and bool(self.contents) is os.path.isdir(path)  # noqa: PTH112

    def notes(self, export: ModelExport) -> list[str]:
        """Return notes about an export, one sentence each.

        There is a note for each part of the model that the file leaves out, and for each program that reads the file
        wrongly.
        """
        return []

    @property
    def kind(self) -> str:
        """Name of the dtype that the format writes, such as f32."""
        return str(getattr(self, self.dtype_setting)) if self.dtype_setting else "f32"


def require_written(form: Format, path: Path, problems: list[str]) -> list[str]:
    """Check the result of a format's method `write`, and return the warnings `problems`, one line each.

    `path` is the path that was passed to `write`, and `problems` is the value that it returned. Raise PluginFailed if
    `problems` is not a list, or if `path` is not a file (a directory, if the format writes one).
    """
    kinds = {**KINDS, stat.S_IFDIR: "a directory"}
    expected, got = kinds[stat.S_IFDIR if form.contents else stat.S_IFREG], "nothing"
    if os.path.lexists(path):
        got = kinds.get(stat.S_IFMT(path.lstat().st_mode), "something else")
    if got != expected:
        raise PluginFailed(f"format.{form.name} wrote {got}, expected {expected}")
    if not isinstance(problems, list):
        raise PluginFailed(f"format.{form.name}: write() must return a list of sentences, got {problems!r}")
    return [" ".join(str(problem).splitlines()) for problem in problems]
