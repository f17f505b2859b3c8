"""Base class of language models: sizes, checks, and the vocabulary size from the data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from toyexp import TOKENS, Constant, Dataset, Kind, Model, Ops, Params, Tensor, TensorSpec, UserError, Values
from toyexp.base import MAX_INT, require_range

ONES = Constant(1)
BLOCKS = "[1,10000]"  # limited, because a plan lists every block's tensors
# If all inputs are 0, the gradient has the factor eps^-1.5, which must fit float32. Above 1, eps hides the inputs.
EPS = "[1e-24,1]"
DROPPED = ("attn_output", "ffn_down")  # layers of a block whose outputs dropout applies to


@dataclass
class LanguageModel(Model):
    """A causal language model over token ids [B, T]."""

    reads: ClassVar[Kind] = TOKENS

    d_model: int = 64  # width of the residual stream
    n_layers: int = 2  # number of blocks
    n_heads: int = 4  # number of attention heads
    d_ff: int = 192  # hidden size of the feed-forward layer
    context: int = 64  # sequence length in tokens
    vocab: int = 0  # vocabulary size; 0: that of the data
    tied: bool = True  # tie the output layer to the embedding table
    norm_eps: float = 1e-5  # added to the variance inside the norms

    def check(self) -> None:
        """Raise UserError for invalid sizes."""
        self.require_positive("d_model", "n_heads", "d_ff", "context")
        require_range("model", self, n_layers=BLOCKS, norm_eps=EPS, vocab=f"[0,{MAX_INT}]")

    @property
    def logit_factor(self) -> float:
        """Number by which the logits are multiplied."""
        return 1.0

    def score_factor(self, head_size: int) -> float | None:
        """Return the factor of attention scores, or None for 1 / sqrt(head_size)."""
        return None

    def scale_output(self, ops: Ops, x: Tensor) -> Tensor:
        """Return the input of the output layer times `logit_factor`."""
        return x if self.logit_factor == 1 else ops.scale(x, self.logit_factor)

    def masks(self) -> dict[str, tuple[tuple[int | str, ...], float]]:
        """Return the dropout masks of the embedding and of both layers of each block, if the model has dropout."""
        layers = [f"blk.{i}.{layer}" for i in range(self.n_layers) for layer in DROPPED]
        dropout: float = getattr(self, "dropout", 0.0)
        return {f"{n}.dropout": (("T", self.d_model), dropout) for n in ("token_embd", *layers) if dropout}

    def fit(self, dataset: Dataset) -> Model:
        """Return the model with the data's vocabulary size if `vocab` is 0. Raise UserError if `vocab` is too small."""
        if self.vocab and self.vocab < dataset.vocab:
            last = dataset.vocab - 1
            raise UserError(f"model.vocab={self.vocab} is too small for the data's token ids (0..{last}); leave it out")
        return replace(self, vocab=self.vocab or dataset.vocab)


def layer_specs(name: str, *shape: int, init: Values = ONES, biased: bool = True) -> list[TensorSpec]:
    """Return the specs of a norm or linear layer: its weight and, if `biased`, its bias, which starts from 0.

    `shape` is the weight's: (outputs, inputs) for a linear layer, (size,) for a norm.
    """
    weight = TensorSpec(f"{name}.weight", shape, init)
    return [weight, TensorSpec(f"{name}.bias", shape[:1], Constant(0))] if biased else [weight]


def linear(ops: Ops, x: Tensor, p: Params, name: str) -> Tensor:
    """Apply the linear layer `name` to x. Add its bias if the model has the tensor `<name>.bias`."""
    return ops.linear(x, p[f"{name}.weight"], p.get(f"{name}.bias"))


def norm(ops: Ops, x: Tensor, p: Params, name: str, eps: float) -> Tensor:
    """Return the norm `name` of x: LayerNorm if it has a bias, otherwise RMSNorm. Return x if there is no such norm."""
    weight, bias = p.get(f"{name}.weight"), p.get(f"{name}.bias")
    if weight is None:
        return x
    return ops.rms_norm(x, weight, eps) if bias is None else ops.layer_norm(x, weight, bias, eps)


def require_shared_heads(model: Any) -> None:
    """Raise UserError unless n_heads divides d_model."""
    if model.d_model % model.n_heads:
        raise UserError(f"model.n_heads={model.n_heads} does not divide model.d_model={model.d_model}")
