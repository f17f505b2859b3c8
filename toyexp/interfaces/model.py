"""A model: one readable function over the op vocabulary, and the table of its tensors."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar

from toyexp.base.attribution import call_checked, wrong_return
from toyexp.base.errors import UserError, printable, suggest
from toyexp.base.validators import require_positive
from toyexp.interfaces.kind import Kind
from toyexp.interfaces.ops import Ops, Params, Tensor
from toyexp.interfaces.values import Values

if TYPE_CHECKING:
    import numpy as np

    from toyexp.interfaces.dataset import Batch, Batches, Dataset


LOGGED_METRICS: set[str] = set()  # held-out scores that callbacks say they log


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a model under its GGUF name; a matrix is [out, in], as numpy and torch order it."""

    name: str
    shape: tuple[int, ...]
    init: Values


def lower_is_better(metric: str) -> bool:
    """Whether a held-out metric gets better as it falls: loss and ppl do, a model's own scores rise."""
    return metric in ("loss", "ppl")


@dataclass
class Model(ABC):
    """Base of all architectures: subclass it as a dataclass whose fields are the sizes."""

    plugin_kind: ClassVar[str] = "model"
    name: ClassVar[str]  # what `model=` takes
    reads: ClassVar[Kind]  # what it learns from: TOKENS, IMAGES, or a kind of your own
    optim_mode: ClassVar[str | None] = None  # the AdamW mode it wants, or None to leave it to the recipe
    forms: ClassVar[Mapping[str, Any]] = {}  # how it stands in files, by format: "gguf" a GGUFForm, "hf" its layout
    cached_decoding: ClassVar[bool] = True  # False: text is written by computing the whole sequence for each token
    score_names: ClassVar[tuple[str, ...]] = ()  # what `scores` reports, so that a name can be checked before a run

    @abstractmethod
    def tensors(self) -> list[TensorSpec]:
        """Every tensor, in the order of the forward pass."""

    @abstractmethod
    def forward(self, ops: Ops, p: Params, batch: Mapping[str, Tensor]) -> Tensor:
        """The logits of a batch: [B, T, V] for tokens [B, T], [B, classes] for images."""

    @abstractmethod
    def check(self) -> None:
        """Raises UserError for sizes that cannot work, before anything is allocated."""

    def inputs(self) -> dict[str, tuple[int | str, ...]]:
        """The arrays of a batch that `forward` reads, without the batch axis; a letter is a size the run chooses."""
        return {self.reads.sequence: ("T",)}

    @property
    def context(self) -> int:
        """Positions of a row, the one size of a model in a file that a run may make smaller; 0: rows have none."""
        return 0

    def fit(self, dataset: Dataset) -> Model:
        """The same model with the sizes that come from the data (a vocabulary left at 0) filled in."""
        return self

    def batches(self, dataset: Dataset, rows: int, seed: int) -> Batches:
        """The data's batches as the model reads them."""
        return dataset.batches(self.context, rows, seed)

    def scores(self, logits: Callable[[Batch], np.ndarray], batches: Iterable[Batch]) -> dict[str, float]:
        """What is reported of held-out batches beside the loss, where more is better: {"accuracy": 0.97}.

        `logits` gives those of the inputs of a batch, [B, T, V] or [B, classes].
        """
        return {}

    def require_metric(self, key: str, name: str) -> None:
        """Raises UserError when an eval reports nothing of that name, as far as that is known.

        What a model scores without naming it in `score_names` shows at the first eval.
        """
        unnamed = not self.score_names and type(self).scores is not Model.scores
        known = ("loss", "ppl", *self.score_names, *sorted(LOGGED_METRICS))
        if name not in known and not unnamed:
            raise UserError(f"{key}={printable(name)}: {suggest(name, known)}")

    def parameters(self) -> int:
        """How many numbers the model has."""
        return sum(math.prod(t.shape) for t in self.tensors())

    def require_positive(self, *names: str) -> None:
        """Raises UserError unless each named field is above zero, and no more than float32 holds or 31 bits count."""
        for name in names:
            require_positive(f"model.{name}", getattr(self, name))

    def settings(self) -> dict[str, Any]:
        """The fields and their values."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


def model_settings(model: Model) -> dict[str, Any]:
    """Its `settings`; PluginFailed for what is none."""
    return call_checked(dict, model.settings)


def compute_scores(model: Model, logits: Callable[[Batch], np.ndarray], batches: Iterable[Batch]) -> dict[str, float]:
    """Its `scores`; PluginFailed for what is no number by its name."""
    found = call_checked(dict, model.scores, logits, batches)
    for name, score in found.items():
        if not (isinstance(name, str) and isinstance(score, Real)):
            raise wrong_return(model.scores, {name: score}, "numbers by their names")
    return found
