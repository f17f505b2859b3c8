"""`FromBase`, the base class of recipes that start from a model's GGUF, and `Full`, which trains all its weights."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import toyexp.formats
from toyexp import IMAGES, LORA, TOKENS, Kind, Model, Plan, PlanTensor, Recipe, RunPreview, Setup, TensorSpec, UserError
from toyexp.base import require_range


@dataclass
class FromBase(Recipe):
    """Base class of recipes that start from a GGUF file.

    The file provides the model, its initial values and the tokenizer. A recipe never changes the file.
    """

    reads: ClassVar[tuple[Kind, ...]] = (TOKENS, IMAGES)
    optim_mode: ClassVar[str] = LORA
    starts_from: ClassVar[str] = "base"

    base: str | None = None  # model to start from: a model file; directory of a run, checkpoint or HF model; hub id
    neftune: float = 0.0  # alpha of the uniform noise on embeddings in training (NEFTune), such as 5; 0: none

    def check(self) -> None:
        """Raise UserError if the setting `base` is empty, or `neftune` is invalid."""
        require_range("recipe", self, neftune="[0,inf)")
        if not self.base:
            raise UserError(f"recipe={self.name} needs a model file to start from: add recipe.base=model.gguf")

    def base_file(self) -> Path | None:
        """Return the path of the base's GGUF file, or None if no base is set."""
        return toyexp.find_model_file(Path(self.base)) if self.base else None

    def vocabulary(self) -> Path | None:
        """Return the base's GGUF file. The data then uses this file's tokenizer, whose ids the embedding needs."""
        return self.base_file()

    def origin(self) -> tuple[str, str] | None:
        """Return "base" and the path of the base's GGUF file."""
        return "base", str(self.base_file())

    def warnings(self, preview: RunPreview) -> Iterable[str]:
        """Return a warning if the data's token ids differ from those of the base."""
        path = self.base_file()
        return token_mismatch_warnings("base", path, preview) if path else ()

    def require_text(self, model: Model, *names: str) -> None:
        """Raise UserError if one of the settings `names` is not 0 and the model reads no text."""
        for name in names:
            if (value := getattr(self, name)) and not model.reads.sequence:
                problem = f"applies to text models only; model={model.name} reads {model.reads}"
                raise UserError(f"recipe.{name}={value}: {problem}")

    def _from_base(self, spec: TensorSpec, trainable: bool) -> PlanTensor:
        return PlanTensor.from_spec(spec, toyexp.FromGGUF(str(self.base_file()), spec.name), trainable)


def token_mismatch_warnings(role: str, path: Path, preview: RunPreview) -> Iterable[str]:
    """Yield a warning if the data's tokenizer and the GGUF file at `path` give different ids to the same tokens.

    The run uses the embedding of this file. `role` is what the warning calls the file: base or donor.
    """
    tokenizer = preview.dataset.tokenizer
    if tokenizer is None:
        return
    file = toyexp.formats.open_gguf(str(path))
    tokens = file.metadata["tokenizer.ggml.tokens"] if toyexp.formats.has_text(file) else []
    if tokens and tokens[: tokenizer.vocab] != list(tokenizer.pieces):
        yield (
            f"data.tokenizer={preview.config['data'].get('tokenizer')}: its token ids differ from those of the {role}, "
            f"whose embedding the run uses; remove data.tokenizer to use the {role}'s tokenizer"
        )


EMBEDDINGS = ("token_embd.weight", "position_embd.weight", "v.position_embd.weight")  # the last name is that of a ViT


@dataclass
class Full(FromBase):
    """Fine-tune all weights of a GGUF model."""

    name: ClassVar[str] = "full"
    hint: ClassVar[str] = "lr=1e-4"

    train_embeddings: bool = True  # false: freeze token and position embeddings
    new_head: bool = False  # for classifiers: true replaces the output layer by a new one for the data's classes

    def prepare_base(self, model: Model) -> Model:
        """Return the model. If `new_head` is set, its number of classes becomes 0, so that the data determines it.

        Raise UserError if `new_head` is set for a model that has no setting `classes`.
        """
        if self.new_head and "classes" not in model.settings():
            raise UserError(f"recipe.new_head=true: applies to classifiers only; model={model.name} has no classes")
        return replace(model, **({"classes": 0} if self.new_head else {}))

    def plan(self, model: Model, setup: Setup) -> Plan:
        """Return a plan in which all tensors start with the base's values and are trained.

        There are two exceptions: a new head starts with the model's initial values, and embeddings are frozen if
        `train_embeddings` is False.
        """
        self.require_text(model, "neftune")
        frozen, head = () if self.train_embeddings else EMBEDDINGS, self._head(model)
        return replace(setup, neftune=self.neftune).plan(model, [
            PlanTensor.from_spec(t) if t.name in head else self._from_base(t, t.name not in frozen)
            for t in model.tensors()
        ])  # fmt: skip

    def _head(self, model: Model) -> set[str]:
        """Return the names of the new head's tensors, or an empty set if `new_head` is not set.

        The head's tensors are those whose shape depends on the number of classes.
        """
        if not self.new_head:
            return set()
        larger = replace(model, classes=model.settings()["classes"] + 1)  # type: ignore[call-arg]
        sizes = {t.name: t.shape for t in larger.tensors()}
        return {t.name for t in model.tensors() if sizes[t.name] != t.shape}
