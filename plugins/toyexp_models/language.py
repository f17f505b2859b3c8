"""What all language models share: sizes, checks, and the vocabulary that comes from the data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np

from toyexp import TOKENS, Dataset, Kind, Model, UserError, printable
from toyexp.contract.format import ModelFile


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
        self.require_positive("d_model", "n_layers", "n_heads", "d_ff", "context")
        self.require_eps("norm_eps")
        self.require_counts("vocab")
        self.require_few_blocks(self.n_layers)
        if self.vocab < 0:
            raise UserError(f"model.vocab={self.vocab}: must be 0 (take the tokenizer's) or above")

    def require_shared_heads(self) -> None:
        """Raises UserError unless the heads divide d_model among themselves."""
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
    def from_gguf(cls, file: ModelFile) -> Self:
        """The file's model; UserError with the name of a key or tensor that this architecture does not have."""
        keys = Keys(file)
        model = cls(**cls.sizes(keys))
        keys.finish()
        if model.n_layers > len(file.tensors):  # before so many are listed
            raise file.error(f"claims {model.n_layers} blocks and has {len(file.tensors)} tensors")
        wanted = {t.name: t.shape for t in model.tensors()} | {n: a.shape for n, a in model.constants().items()}
        for name in sorted(wanted.keys() ^ file.tensors.keys()):
            there = "lacks" if name in wanted else "has"
            raise file.error(f"{there} the tensor {printable(name)}, unlike any model={cls.name} of toyexp")
        for name, shape in wanted.items():
            if file.tensors[name].shape != shape:
                raise file.error(f"{name} has the shape {list(file.tensors[name].shape)}, its keys say {list(shape)}")
        return model

    @classmethod
    def sizes(cls, keys: Keys) -> dict[str, Any]:
        """The fields that every architecture reads from a file."""
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

    def gguf_metadata(self) -> dict[str, Any]:
        """The keys that all architectures share."""
        return {
            "context_length": self.context,
            "embedding_length": self.d_model,
            "block_count": self.n_layers,
            "feed_forward_length": self.d_ff,
            "attention.head_count": self.n_heads,
            "vocab_size": self.vocab,
        }


def decimal(value: float) -> float:
    """The shortest decimal of a float32."""
    return float(str(np.float32(value)))


class Keys:
    """A GGUF file's keys of its architecture, each to be asked for once; what is left over is refused by name.

    A key nobody asks for may change what the model computes: a rope scaling, a sliding window, experts.
    """

    def __init__(self, file: ModelFile):
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
        return decimal(value)

    def expect(self, name: str, *allowed: Any) -> Any:
        """A key that must be one of these, and is the first where it is missing."""
        value = self._take(name, allowed[0])
        if isinstance(value, np.ndarray) or value not in allowed:
            raise self._wrong(name, value)
        return value

    def ignore(self, *names: str) -> None:
        """Keys that change nothing."""
        for name in names:
            self._left.pop(self._prefix + name, None)

    def finish(self) -> None:
        """Refuses the keys that are left."""
        self.expect("expert_count", 0)
        self.expect("expert_used_count", 0)
        self.expect("attention.causal", True)
        self.expect("pooling_type", 0)  # another one gives embeddings of texts
        self.ignore("vocab_size")  # the rows of the embedding count
        if self._left:
            raise self.file.error(f"{printable(min(self._left))} is a key that toyexp's {self.file.architecture} lacks")

    def _take(self, name: str, default: Any) -> Any:
        value = self._left.pop(self._prefix + name, default)
        if value is None:
            raise self.file.error(f"has no {self._prefix}{name}")
        return value

    def _wrong(self, name: str, value: object) -> UserError:
        return self.file.error(f"{self._prefix}{name} is {printable(str(value))}, which toyexp has no model for")
