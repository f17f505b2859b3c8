"""Training on: every weight starts from a GGUF file; and what all recipes share that start from a whole model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import toyexp.formats
from toyexp import IMAGES, LORA, TOKENS, Kind, Model, Plan, PlanTensor, Recipe, RunPreview, Setup, TensorSpec, UserError


@dataclass
class FromBase(Recipe):
    """A recipe whose model, with all its values and its tokenizer, comes from a GGUF file, which is only read."""

    reads: ClassVar[tuple[Kind, ...]] = (TOKENS, IMAGES)
    optim_mode: ClassVar[str] = LORA
    starts_from: ClassVar[str] = "base"

    base: str | None = None  # what to start from: a GGUF or another format that is read, a run, or a checkpoint

    def check(self) -> None:
        """Raises UserError when no base is given."""
        if not self.base:
            raise UserError(f"recipe={self.name} starts from a model in a GGUF file: add recipe.base=model.gguf")

    def base_file(self) -> Path | None:
        """The base."""
        return toyexp.find_model_file(Path(self.base)) if self.base else None

    def vocabulary(self) -> Path | None:
        """The base, whose tokens alone mean something to it."""
        return self.base_file()

    def origin(self) -> tuple[str, str] | None:
        """The base."""
        return "base", str(self.base_file())

    def warnings(self, preview: RunPreview) -> Iterable[str]:
        """That the data's ids are not those of the base."""
        path = self.base_file()
        return other_tokens("base", path, preview) if path else ()

    def _from_base(self, spec: TensorSpec, trainable: bool) -> PlanTensor:
        return PlanTensor(spec.name, spec.shape, toyexp.FromGGUF(str(self.base_file()), spec.name), trainable)


def other_tokens(role: str, path: Path, preview: RunPreview) -> Iterable[str]:
    """A warning where an id of the data stands for another token than in the file whose embedding it chooses from."""
    tokenizer = preview.dataset.tokenizer
    if tokenizer is None:
        return
    file = toyexp.formats.open_gguf(str(path))
    tokens = file.metadata["tokenizer.ggml.tokens"] if toyexp.formats.has_text(file) else []
    if tokens and tokens[: tokenizer.vocab] != list(tokenizer.pieces):
        yield (
            f"data.tokenizer={preview.config['data'].get('tokenizer')}: its ids stand for other tokens than in the "
            f"{role}, whose embedding is of no use for them; leave data.tokenizer out for the {role}'s own"
        )


EMBEDDINGS = ("token_embd.weight", "position_embd.weight", "v.position_embd.weight")  # the last a ViT's


@dataclass
class Full(FromBase):
    """All weights of a GGUF model, trained further."""

    name: ClassVar[str] = "full"
    hint: ClassVar[str] = "lr=1e-4"

    train_embeddings: bool = True  # false keeps the token and position embeddings as they are
    new_head: bool = False  # of a classifier: a new output layer, for the classes of the data in place of the base's

    def prepare_base(self, model: Model) -> Model:
        """With a new head the classes are the data's; UserError for a model that has none."""
        if self.new_head and "classes" not in model.settings():
            raise UserError(f"recipe.new_head=true: is for classifiers, and a {model.name} has no classes")
        return replace(model, **({"classes": 0} if self.new_head else {}))

    def plan(self, model: Model, setup: Setup) -> Plan:
        """Every tensor of the model from the base, but for those of a new head."""
        frozen, head = () if self.train_embeddings else EMBEDDINGS, self._head(model)
        return setup.plan(model, [
            PlanTensor(t.name, t.shape, t.init) if t.name in head else self._from_base(t, t.name not in frozen)
            for t in model.tensors()
        ])  # fmt: skip

    def _head(self, model: Model) -> set[str]:
        """The tensors of a new head: those that one more class makes larger."""
        if not self.new_head:
            return set()
        larger = replace(model, classes=model.settings()["classes"] + 1)  # type: ignore[call-arg]
        sizes = {t.name: t.shape for t in larger.tensors()}
        return {t.name for t in model.tensors() if sizes[t.name] != t.shape}
