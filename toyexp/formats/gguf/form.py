"""Convert a model to the metadata and constant tensors of a GGUF file, and read the model back from them."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

from toyexp.base.errors import UserError, printable
from toyexp.base.lazy import numpy as np
from toyexp.interfaces.format import ModelFile
from toyexp.interfaces.model import Model, model_settings

M = TypeVar("M", bound=Model)


class GGUFForm(ABC, Generic[M]):
    """Base class of forms. A form converts the models of one class to the metadata of a GGUF file and back.

    A model class declares its form as `forms = {"gguf": MyForm()}`.
    """

    def architecture(self, model: M | type[M]) -> str:
        """Return the value of the key general.architecture for a model.

        It must differ between models that compute differently.
        """
        return model.name

    @abstractmethod
    def metadata(self, model: M) -> dict[str, Any]:
        """Return the keys `<architecture>.*`, without that prefix, and their values."""

    def constants(self, model: M) -> Mapping[str, np.ndarray]:
        """Return float32 tensors that the GGUF file needs besides `model.tensors()`, keyed by name.

        They are computed from the model's settings.
        """
        return {}

    def read(self, cls: type[M], file: ModelFile) -> M:
        """Return the model of class `cls` in `file`; raise UserError if `cls` cannot represent the model exactly."""
        raise UserError(f"{file.path}: toyexp can write model={cls.name} as GGUF, but not read it")


class PlainForm(GGUFForm[Any]):
    """Default form. It stores the model's settings as JSON, so only toyexp can read the file."""

    def metadata(self, model: Model) -> dict[str, Any]:
        """Return the settings as JSON under the key `settings`; raise UserError for values that JSON cannot hold."""
        try:
            return {"settings": json.dumps(model_settings(model), allow_nan=False)}
        except (TypeError, ValueError) as error:
            raise UserError(f"model={model.name}: its settings cannot be written to a GGUF file: {error}") from None

    def read(self, cls: type[Any], file: ModelFile) -> Any:
        """Return the model with the settings in the file; raise UserError if the class `cls` does not accept them."""
        try:
            return cls(**json.loads(file.text(f"{file.architecture}.settings")))
        except (TypeError, ValueError) as error:
            raise file.error(f"does not hold the settings of model={cls.name}: {printable(str(error))}") from None


PLAIN = PlainForm()


def gguf_form(model: Model | type[Model]) -> GGUFForm[Any]:
    """Return the GGUF form that a model or model class declares, or PLAIN if it declares none."""
    form: GGUFForm[Any] = model.forms.get("gguf", PLAIN)
    return form


def gguf_architecture(model: Model | type[Model]) -> str:
    """Return the value of the key general.architecture in the GGUF file of a model."""
    return gguf_form(model).architecture(model)


def read_model(cls: type[M], file: ModelFile) -> M:
    """Return the model of class `cls` in `file`; raise UserError if its keys or tensors do not match `cls`."""
    if cls.engines:
        raise file.error(f"holds weights of model={cls.name}, whose code is in no file; load them with PyTorch")
    blocks = file.metadata.get(f"{file.architecture}.block_count")
    if isinstance(blocks, int) and blocks > len(file.tensors):  # too many to list their tensors
        raise file.error(f"claims {blocks} blocks, and has {len(file.tensors)} tensors")
    form = gguf_form(cls)
    model: M = form.read(cls, file)
    try:
        model.check()
    except UserError as error:
        raise file.error(str(error)) from None
    expected = {t.name: t.shape for t in model.tensors()} | {n: a.shape for n, a in form.constants(model).items()}
    for name in sorted(expected.keys() ^ file.tensors.keys()):
        verb = "lacks" if name in expected else "has"
        raise file.error(f"{verb} the tensor {printable(name)}, unlike toyexp's model={cls.name}")
    for name, shape in expected.items():
        if file.tensors[name].shape != shape:
            raise file.error(f"{name} has the shape {list(file.tensors[name].shape)}, its keys say {list(shape)}")
    return model


def decimal(value: float) -> float:
    """Return the float with the fewest decimals that equals `value` in float32, such as 0.1 for 0.100000001."""
    return float(str(np.float32(value)))


class Keys:
    """Reader of the keys `<architecture>.*` in a GGUF file.

    A key that nothing reads may change the computation, so the method `finish` rejects unread keys.
    """

    def __init__(self, file: ModelFile):
        self.file, self._prefix = file, f"{file.architecture}."
        self._unread = {k: v for k, v in file.metadata.items() if k.startswith(self._prefix)}

    def integer(self, name: str, default: int | None = None, lowest: int = 1) -> int:
        """Return a key's integer value, which must be at least `lowest`, or `default` if the key is missing.

        Raise GGUFError for any other value, and if the key is missing and has no default.
        """
        value = self._take(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value < 2**31:
            raise self._wrong(name, value)
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Return a key's value as a short decimal (see `decimal`), or `default` if the key is missing.

        Raise UserError if the value is not a float, or if the key is missing and has no default.
        """
        value = self._take(name, default)
        if not isinstance(value, float):
            raise self._wrong(name, value)
        return decimal(value)

    def expect(self, name: str, *allowed: Any) -> Any:
        """Return a key's value, or the first of `allowed` if the key is missing.

        Raise UserError if the value is not in `allowed`.
        """
        value = self._take(name, allowed[0])
        if isinstance(value, np.ndarray) or value not in allowed:
            raise self._wrong(name, value)
        return value

    def ignore(self, *names: str) -> None:
        """Accept the keys `names` with any value, because they do not change the computation."""
        for name in names:
            self._unread.pop(self._prefix + name, None)

    def finish(self) -> None:
        """Raise GGUFError if the file has keys `<architecture>.*` that were neither read nor ignored."""
        self.expect("expert_count", 0)
        self.expect("expert_used_count", 0)
        self.expect("attention.causal", True)
        self.expect("pooling_type", 0)  # other values are for text embeddings
        self.ignore("vocab_size")  # the embedding's rows give it
        if self._unread:
            key = printable(min(self._unread))
            raise self.file.error(f"{key} is a key that toyexp's {self.file.architecture} does not support")

    def _take(self, name: str, default: Any) -> Any:
        value = self._unread.pop(self._prefix + name, default)
        if value is None:
            raise self.file.error(f"has no {self._prefix}{name}")
        return value

    def _wrong(self, name: str, value: object) -> UserError:
        return self.file.error(f"{self._prefix}{name} is {printable(str(value))}, which toyexp does not support")
