"""`FromBase`, the base class of recipes that start from a model's GGUF, and `Full`, which trains all its weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import toyexp.formats
from toyexp import IMAGES, LORA, TOKENS, Kind, Model, Plan, PlanTensor, Recipe, RunPreview, Setup, UserError
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
    new_head: bool = False  # for classifiers: true replaces the output layer by a new one for the data's classes
    new_size: bool = False  # for classifiers of images: true interpolates the positions for the data's image size

    def check(self) -> None:
        """Raise UserError if the setting `base` is empty, or `neftune` is invalid."""
        require_range("recipe", self, neftune="[0,1000]")
        if not self.base:
            raise UserError(f"recipe={self.name} needs a model file to start from: add recipe.base=model.gguf")

    def base_file(self) -> Path | None:
        """Return the path of the base's GGUF file, or None if no base is set."""
        return toyexp.find_model_file(Path(self.base)) if self.base else None

    def vocabulary(self) -> Path | None:
        """Return the base's GGUF file. The data then uses this file's tokenizer, whose ids the embedding needs."""
        return self.base_file()

    def origin(self) -> tuple[str, str]:
        """Return "base" and a phrase: the path of the base's file, and which of its tensors are replaced."""
        changes = ", with a new output layer" * self.new_head + ", with interpolated positions" * self.new_size
        return "base", f"{self.base_file()}{changes}"

    def prepare_base(self, model: Model) -> Model:
        """Return the model. Its sizes that `new_head` and `new_size` change become 0, so that the data determines them.

        Raise UserError if one of them is set for a model that has no such size.
        """
        names = {"classes": "new_head", "image_size": "new_size"}
        sizes = {size: 0 for size, name in names.items() if getattr(self, name)}
        for size in sizes.keys() - model.settings().keys():
            raise UserError(f"recipe.{names[size]}=true: applies to classifiers only; model={model.name} has no {size}")
        return replace(model, **sizes)

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

    def _from_base(self, model: Model, frozen: Callable[[str], bool]) -> list[PlanTensor]:
        """Return the model's tensors with the base's values; `frozen` says which do not train.

        The tensors of a new head start with the model's initial values, and train.
        """
        from toyexp_recipes.positions import InterpolatedPositions

        path = self.base_file()
        stored = toyexp.formats.open_gguf(str(path)).tensors if path else {}
        new = self._head(model) | {t.name for t in model.tensors() if path and t.name not in stored}
        tensors = []
        for spec in model.tensors():
            source = InterpolatedPositions if self.new_size and spec.name == POSITIONS else toyexp.FromGGUF
            values = None if spec.name in new else source(str(path), spec.name)
            tensors.append(PlanTensor.from_spec(spec, values, spec.name in new or not frozen(spec.name)))
        return tensors

    def _head(self, model: Model) -> set[str]:
        """Return the names of the new head's tensors, or an empty set if `new_head` is not set.

        The head's tensors are those whose shape depends on the number of classes.
        """
        if not self.new_head:
            return set()
        larger = replace(model, classes=model.settings()["classes"] + 1)  # type: ignore[call-arg]
        sizes = {t.name: t.shape for t in larger.tensors()}
        return {t.name for t in model.tensors() if sizes[t.name] != t.shape}


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


POSITIONS = "v.position_embd.weight"  # of a ViT
EMBEDDINGS = ("token_embd.weight", "position_embd.weight", POSITIONS)


@dataclass
class Full(FromBase):
    """Fine-tune all weights of a GGUF model."""

    name: ClassVar[str] = "full"
    hint: ClassVar[str] = "lr=1e-4"

    train_embeddings: bool = True  # false: freeze token and position embeddings

    def plan(self, model: Model, setup: Setup) -> Plan:
        """Return a plan in which all tensors start with the base's values and are trained.

        There are two exceptions: a new head starts with the model's initial values, and embeddings are frozen if
        `train_embeddings` is False.
        """
        self.require_text(model, "neftune")
        frozen = () if self.train_embeddings else EMBEDDINGS
        return replace(setup, neftune=self.neftune).plan(model, self._from_base(model, frozen.__contains__))
