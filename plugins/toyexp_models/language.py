"""What all language models share: sizes, checks, and the vocabulary that comes from the data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from toyexp import Dataset, Model, UserError


@dataclass
class LanguageModel(Model):
    """A causal language model over token ids [B, T]."""

    reads: ClassVar[str] = "tokens"

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
        self.require_positive("d_model", "n_layers", "n_heads", "d_ff", "context", "norm_eps")
        if self.vocab < 0:
            raise UserError(f"model.vocab={self.vocab}: must be 0 (take the tokenizer's) or above")
        if self.d_model % self.n_heads:
            raise UserError(
                f"model.n_heads={self.n_heads} does not divide model.d_model={self.d_model}: "
                f"a head would have {self.d_model / self.n_heads:g} features"
            )

    def fit(self, dataset: Dataset) -> Model:
        """Takes the vocabulary from the data when none was given."""
        if self.vocab and self.vocab < dataset.vocab:
            raise UserError(
                f"model.vocab={self.vocab} is smaller than the data's token ids (0..{dataset.vocab - 1}); "
                f"leave it at 0 or give at least {dataset.vocab}"
            )
        return replace(self, vocab=self.vocab or dataset.vocab)

    @property
    def head_size(self) -> int:
        """Features of one attention head."""
        return self.d_model // self.n_heads

    def gguf_metadata(self) -> dict[str, Any]:
        """The keys both architectures share."""
        return {
            "context_length": self.context,
            "embedding_length": self.d_model,
            "block_count": self.n_layers,
            "feed_forward_length": self.d_ff,
            "attention.head_count": self.n_heads,
            "vocab_size": self.vocab,
        }
