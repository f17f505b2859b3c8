"""What the recipes that start from a whole model share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import toyexp.formats
from toyexp import IMAGES, LORA, TOKENS, Kind, Planned, PlanTensor, Recipe, TensorSpec, UserError


@dataclass
class FromBase(Recipe):
    """A recipe whose model, with all its values and its tokenizer, comes from a GGUF file, which is only read."""

    reads: ClassVar[tuple[Kind, ...]] = (TOKENS, IMAGES)
    optim_mode: ClassVar[str] = LORA
    starts_from: ClassVar[str] = "base"
    other_classes: ClassVar[str] = "a new output layer for them: recipe=full recipe.new_head=true"

    base: str | None = None  # what to start from: a GGUF or another format that is read, a run, or a checkpoint

    def check(self) -> None:
        """Raises UserError when no base is given."""
        if not self.base:
            raise UserError(f"recipe={self.name} starts from a model in a GGUF file: add recipe.base=model.gguf")

    def base_file(self) -> Path | None:
        """The base."""
        return toyexp.file_of(Path(self.base)) if self.base else None

    def vocabulary(self) -> Path | None:
        """The base, whose tokens alone mean something to it."""
        return self.base_file()

    def origin(self) -> tuple[str, str] | None:
        """The base."""
        return "base", str(self.base_file())

    def warnings(self, planned: Planned) -> Iterable[str]:
        """That the data's ids are not those of the base."""
        path = self.base_file()
        return other_tokens("base", path, planned) if path else ()

    def _from_base(self, spec: TensorSpec, trainable: bool) -> PlanTensor:
        return PlanTensor(spec.name, spec.shape, toyexp.FromGGUF(str(self.base_file()), spec.name), trainable)


def other_tokens(role: str, path: Path, planned: Planned) -> Iterable[str]:
    """A warning where an id of the data stands for another token than in the file whose embedding it chooses from."""
    tokenizer = planned.dataset.tokenizer
    if tokenizer is None:
        return
    file = toyexp.formats.opened(str(path))
    tokens = file.metadata["tokenizer.ggml.tokens"] if toyexp.formats.has_text(file) else []
    if tokens and tokens[: tokenizer.vocab] != list(tokenizer.pieces):
        yield (
            f"data.tokenizer={planned.config['data'].get('tokenizer')}: its ids stand for other tokens than in the "
            f"{role}, whose embedding is of no use for them; leave data.tokenizer out for the {role}'s own"
        )
