"""How a class of models stands in a GGUF: the architecture, its keys, and the way back."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from toyexp.base.errors import UserError, printable
from toyexp.interfaces.format import ModelFile
from toyexp.interfaces.model import Model, model_settings

if TYPE_CHECKING:
    import numpy as np

M = TypeVar("M", bound=Model)


class GGUFForm(ABC, Generic[M]):
    """What a GGUF says of a model; its class names the one it has: `forms = {"gguf": MyForm()}`."""

    def architecture(self, model: M | type[M]) -> str:
        """As general.architecture has it; a model that computes something else is not to be taken for this one."""
        return model.name

    @abstractmethod
    def metadata(self, model: M) -> dict[str, Any]:
        """The architecture's own keys, without the `<architecture>.` prefix."""

    def constants(self, model: M) -> Mapping[str, np.ndarray]:
        """Tensors of the file that are neither trained nor among the model's, float32: they follow from its fields."""
        return {}

    def read(self, cls: type[M], file: ModelFile) -> M:
        """The model of class `cls` that `file` holds; UserError for what it cannot represent exactly."""
        raise UserError(f"{file.path}: model={cls.name} cannot be read from a GGUF")


class PlainForm(GGUFForm[Any]):
    """The form of models whose class names none: their settings as JSON, which no other program reads."""

    def metadata(self, model: Model) -> dict[str, Any]:
        """Return the settings under one key; raise UserError for what JSON does not hold."""
        try:
            return {"settings": json.dumps(model_settings(model), allow_nan=False)}
        except (TypeError, ValueError) as error:
            raise UserError(f"model={model.name}: its settings cannot be written: {error}") from None

    def read(self, cls: type[Any], file: ModelFile) -> Any:
        """Make the model of its settings; raise UserError for settings of another class."""
        try:
            return cls(**json.loads(file.text(f"{file.architecture}.settings")))
        except (TypeError, ValueError) as error:
            raise file.error(f"does not hold the settings of model={cls.name}: {printable(str(error))}") from None


PLAIN = PlainForm()


def gguf_form(model: Model | type[Model]) -> GGUFForm[Any]:
    """Return the form of a model, or of a class of them: its own, or else its settings as they are."""
    form: GGUFForm[Any] = model.forms.get("gguf", PLAIN)
    return form


def gguf_architecture(model: Model | type[Model]) -> str:
    """Under which architecture it stands in a GGUF."""
    return gguf_form(model).architecture(model)


def read_model(cls: type[M], file: ModelFile) -> M:
    """The model of class `cls` that `file` holds; UserError for what it cannot represent exactly."""
    blocks = file.metadata.get(f"{file.architecture}.block_count")
    if isinstance(blocks, int) and blocks > len(file.tensors):  # which would take long to list
        raise file.error(f"claims {blocks} blocks, and has {len(file.tensors)} tensors")
    form = gguf_form(cls)
    model: M = form.read(cls, file)
    try:
        model.check()
    except UserError as error:
        raise file.error(str(error)) from None
    wanted = {t.name: t.shape for t in model.tensors()} | {n: a.shape for n, a in form.constants(model).items()}
    for name in sorted(wanted.keys() ^ file.tensors.keys()):
        there = "lacks" if name in wanted else "has"
        raise file.error(f"{there} the tensor {printable(name)}, unlike any model={cls.name} of toyexp")
    for name, shape in wanted.items():
        if file.tensors[name].shape != shape:
            raise file.error(f"{name} has the shape {list(file.tensors[name].shape)}, its keys say {list(shape)}")
    return model


def decimal(value: float) -> float:
    """The shortest decimal of a float32."""
    import numpy as np

    return float(str(np.float32(value)))


class Keys:
    """A file's keys of its architecture, each to be asked for once; what is left over is refused by name.

    A key nobody asks for may change what the model computes: a rope scaling, a sliding window, experts.
    """

    def __init__(self, file: ModelFile):
        self.file, self._prefix = file, f"{file.architecture}."
        self._left = {k: v for k, v in file.metadata.items() if k.startswith(self._prefix)}

    def whole(self, name: str, default: int | None = None) -> int:
        """A whole number above 0; GGUFError when it is none, or not there and without default."""
        value = self._take(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
            raise self._wrong(name, value)
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A number, as the shortest decimal of the float32 in the file."""
        value = self._take(name, default)
        if not isinstance(value, float):
            raise self._wrong(name, value)
        return decimal(value)

    def expect(self, name: str, *allowed: Any) -> Any:
        """A key that must be one of these, and is the first where it is missing."""
        import numpy as np

        value = self._take(name, allowed[0])
        if isinstance(value, np.ndarray) or value not in allowed:
            raise self._wrong(name, value)
        return value

    def ignore(self, *names: str) -> None:
        """Keys that change nothing."""
        for name in names:
            self._left.pop(self._prefix + name, None)

    def finish(self) -> None:
        """Refuses the keys that are left."""
        self.expect("expert_count", 0)
        self.expect("expert_used_count", 0)
        self.expect("attention.causal", True)
        self.expect("pooling_type", 0)  # another one gives embeddings of texts
        self.ignore("vocab_size")  # the rows of the embedding count
        if self._left:
            raise self.file.error(f"{printable(min(self._left))} is a key that toyexp's {self.file.architecture} lacks")

    def _take(self, name: str, default: Any) -> Any:
        value = self._left.pop(self._prefix + name, default)
        if value is None:
            raise self.file.error(f"has no {self._prefix}{name}")
        return value

    def _wrong(self, name: str, value: object) -> UserError:
        return self.file.error(f"{self._prefix}{name} is {printable(str(value))}, which toyexp has no model for")
