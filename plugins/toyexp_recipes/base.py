"""What the recipes that start from a whole model share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from toyexp import FromGGUF, PlanTensor, Recipe, TensorSpec, UserError
from toyexp.gguf.model import file_of
from toyexp.optim import LORA


@dataclass
class FromBase(Recipe):
    """A recipe whose model, with all its values and its tokenizer, comes from a GGUF file, which is only read."""

    optim_mode: ClassVar[str] = LORA

    base: str | None = None  # GGUF file to start from, or a run's directory: llama, qwen2, qwen3, gemma or gpt2

    def check(self) -> None:
        """Raises UserError when no base is given."""
        if not self.base:
            raise UserError(f"recipe={self.name} starts from a model in a GGUF file: add recipe.base=model.gguf")

    def base_file(self) -> Path | None:
        """The base."""
        return file_of(Path(self.base)) if self.base else None

    def vocabulary(self) -> Path | None:
        """The base, whose tokens alone mean something to it."""
        return self.base_file()

    def origin(self) -> tuple[str, str] | None:
        """The base."""
        return "base", str(self.base_file())

    def _from_base(self, spec: TensorSpec, trainable: bool, packed: bool = False) -> PlanTensor:
        return PlanTensor(spec.name, spec.shape, FromGGUF(str(self.base_file()), spec.name), trainable, packed)
