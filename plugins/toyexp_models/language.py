"""What all language models share: sizes, checks, and the vocabulary that comes from the data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from toyexp import TOKENS, Dataset, Kind, Model, UserError
from toyexp.base import MOST, require_within


@dataclass
class LanguageModel(Model):
    """A causal language model over token ids [B, T]."""

    reads: ClassVar[Kind] = TOKENS

    d_model: int = 64  # width of the residual stream
    n_layers: int = 2  # blocks
    n_heads: int = 4  # attention heads
    d_ff: int = 192  # width inside the feed-forward layer
    context: int = 64  # tokens a sequence holds
    vocab: int = 0  # rows of the embedding; 0: as many as the tokenizer has
    tied: bool = True  # the output layer is the embedding table
    norm_eps: float = 1e-5  # added to the variance inside the norms

    def check(self) -> None:
        """Raises UserError for sizes that cannot work."""
        self.require_positive("d_model", "n_heads", "d_ff", "context")
        self.require_eps("norm_eps")
        self.require_blocks("n_layers")
        require_within("model", self, vocab=f"[0,{MOST}]")

    def fit(self, dataset: Dataset) -> Model:
        """Takes the vocabulary from the data when none was given."""
        if self.vocab and self.vocab < dataset.vocab:
            raise UserError(
                f"model.vocab={self.vocab} is smaller than the data's token ids (0..{dataset.vocab - 1}); "
                f"leave it at 0 or give at least {dataset.vocab}"
            )
        return replace(self, vocab=self.vocab or dataset.vocab)


def require_shared_heads(model: Any) -> None:
    """Raise UserError unless the heads divide d_model among themselves."""
    if model.d_model % model.n_heads:
        raise UserError(
            f"model.n_heads={model.n_heads} does not divide model.d_model={model.d_model}: "
            f"a head would have {model.d_model / model.n_heads:g} features"
        )
