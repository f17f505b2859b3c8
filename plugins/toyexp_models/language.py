"""What all language models share: sizes, checks, and the vocabulary that comes from the data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from toyexp import TOKENS, Constant, Dataset, Kind, Model, Normal, TensorSpec, UserError
from toyexp.base import MAX_INT, require_range

BLOCKS = "[1,10000]"  # each has tensors that a plan lists
# Where all inputs are 0 the gradient takes an eps's power of -1.5, which float32 has to hold; above 1 it decides.
EPS = "[1e-24,1]"


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
        require_range("model", self, n_layers=BLOCKS, norm_eps=EPS, vocab=f"[0,{MAX_INT}]")

    def fit(self, dataset: Dataset) -> Model:
        """Takes the vocabulary from the data when none was given."""
        if self.vocab and self.vocab < dataset.vocab:
            last = dataset.vocab - 1
            raise UserError(f"model.vocab={self.vocab} is smaller than the data's token ids (0..{last}); leave it out")
        return replace(self, vocab=self.vocab or dataset.vocab)


def linear_specs(name: str, outputs: int, inputs: int, init: Normal, biased: bool = True) -> list[TensorSpec]:
    """The weight of a linear and its bias."""
    weight = TensorSpec(f"{name}.weight", (outputs, inputs), init)
    return [weight, TensorSpec(f"{name}.bias", (outputs,), Constant(0))] if biased else [weight]


def norm_specs(name: str, size: int, biased: bool = True) -> list[TensorSpec]:
    """The weight of a norm and its bias."""
    weight = TensorSpec(f"{name}.weight", (size,), Constant(1))
    return [weight, TensorSpec(f"{name}.bias", (size,), Constant(0))] if biased else [weight]


def require_shared_heads(model: Any) -> None:
    """Raise UserError unless the heads divide d_model among themselves."""
    if model.d_model % model.n_heads:
        raise UserError(f"model.n_heads={model.n_heads} does not divide model.d_model={model.d_model}")
