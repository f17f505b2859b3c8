"""What all language models share: sizes, checks, and the vocabulary that comes from the data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np

from toyexp import Dataset, Model, UserError, printable
from toyexp.gguf.read import GGUFFile


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

    @classmethod
    def from_gguf(cls, file: GGUFFile) -> Self:
        """The file's model; UserError with the name of a key or tensor that this architecture does not have."""
        keys = Keys(file)
        model = cls(**cls.sizes(keys))
        keys.expect("attention.key_length", model.head_size)
        keys.expect("attention.value_length", model.head_size)
        keys.finish()
        wanted = {t.name: t.shape for t in model.tensors()}
        for name in sorted(wanted.keys() ^ file.tensors.keys()):
            there = "lacks" if name in wanted else "has"
            raise file.error(f"{there} the tensor {printable(name)}, unlike any model={cls.name} of toyexp")
        for name, shape in wanted.items():
            if file.tensors[name].shape != shape:
                raise file.error(f"{name} has the shape {list(file.tensors[name].shape)}, its keys say {list(shape)}")
        return model

    @classmethod
    def sizes(cls, keys: Keys) -> dict[str, Any]:
        """The fields that both architectures read from a file."""
        embedding = keys.file.tensors.get("token_embd.weight")
        if embedding is None:
            raise keys.file.error("lacks the tensor token_embd.weight")
        return {
            "d_model": keys.whole("embedding_length"),
            "n_layers": keys.whole("block_count"),
            "n_heads": keys.whole("attention.head_count"),
            "d_ff": keys.whole("feed_forward_length"),
            "context": keys.whole("context_length"),
            "vocab": embedding.shape[0],
            "tied": "output.weight" not in keys.file.tensors,
        }

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


class Keys:
    """A GGUF file's keys of its architecture, each to be asked for once; what is left over is refused by name.

    A key nobody asks for may change what the model computes: a rope scaling, a sliding window, experts.
    """

    def __init__(self, file: GGUFFile):
        self.file, self._prefix = file, f"{file.architecture}."
        self._left = {k: v for k, v in file.metadata.items() if k.startswith(self._prefix)}

    def whole(self, name: str, default: int | None = None) -> int:
        """A whole number above 0; GGUFError when it is none, or not there and without default."""
        value = self._take(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
            raise self._wrong(name, value)
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A number, as the shortest decimal of the float32 in the file."""
        value = self._take(name, default)
        if not isinstance(value, float):
            raise self._wrong(name, value)
        return float(str(np.float32(value)))

    def expect(self, name: str, *allowed: Any) -> None:
        """A key that may be missing, and otherwise must be one of these."""
        value = self._take(name, allowed[0])
        if isinstance(value, np.ndarray) or value not in allowed:
            raise self._wrong(name, value)

    def finish(self) -> None:
        """Refuses the keys that are left."""
        self.expect("expert_count", 0)
        self.expect("expert_used_count", 0)
        self._left.pop(f"{self._prefix}vocab_size", None)  # the rows of the embedding count
        if self._left:
            raise self.file.error(f"{printable(min(self._left))} is a key that toyexp's {self.file.architecture} lacks")

    def _take(self, name: str, default: Any) -> Any:
        value = self._left.pop(self._prefix + name, default)
        if value is None:
            raise self.file.error(f"has no {self._prefix}{name}")
        return value

    def _wrong(self, name: str, value: object) -> UserError:
        return self.file.error(f"{self._prefix}{name} is {printable(str(value))}, which toyexp has no model for")
