"""Base class of model architectures: a forward pass written in ops, and a table of tensors."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any, ClassVar

from toyexp.base.attribution import call_checked, wrong_return
from toyexp.base.errors import UserError, printable, suggest
from toyexp.base.lazy import numpy as np
from toyexp.base.validators import require_positive
from toyexp.interfaces.dataset import Batch, Batches, Dataset
from toyexp.interfaces.kind import Kind
from toyexp.interfaces.ops import Ops, Params, Tensor
from toyexp.interfaces.values import Values

LOGGED_METRICS: set[str] = set()  # held-out metrics that callbacks declare in `Callback.logs`


@dataclass(frozen=True)
class TensorSpec:
    """Name (as in GGUF), shape and initial values of a tensor. A matrix has shape [out, in], as in torch.nn.Linear."""

    name: str
    shape: tuple[int, ...]
    init: Values
    trainable: bool = True  # False: training does not change it
    lr_scale: float = 1.0  # the tensor's learning rate divided by that which it would have otherwise


def lower_is_better(metric: str) -> bool:
    """Return True for the metrics loss, ppl and kl; all other metrics are better if higher."""
    return metric in ("loss", "ppl", "kl")


@dataclass
class Model(ABC):
    """Base of all architectures: subclass it as a dataclass whose fields are the sizes."""

    plugin_kind: ClassVar[str] = "model"
    name: ClassVar[str]  # the value of `model=` that selects it
    reads: ClassVar[Kind]  # kind of data it is trained on: TOKENS, IMAGES, or your own Kind
    optim_mode: ClassVar[str | None] = None  # the AdamW mode it needs; None: the recipe decides
    # Key and tensor names by format: "gguf": GGUFForm, "hf": layout. A subclass does not inherit them.
    forms: ClassVar[Mapping[str, Any]] = {}
    cached_decoding: ClassVar[bool] = True  # False: generation recomputes the whole sequence for each token
    has_auxiliary: ClassVar[bool] = False  # True: `forward` appends scalars to `p.auxiliary` if that is a list
    score_names: ClassVar[tuple[str, ...]] = ()  # metrics that `scores` returns, to check names before a run
    engines: ClassVar[tuple[str, ...]] = ()  # engines for a model that is not written in ops and has no GGUF; (): all

    def __init_subclass__(cls, **options: Any) -> None:
        """Set `forms` to {} if the subclass does not define it.

        Forms are not inherited, because a subclass may compute something else than its base class.
        """
        super().__init_subclass__(**options)
        if "forms" not in vars(cls):
            cls.forms = {}

    @abstractmethod
    def tensors(self) -> list[TensorSpec]:
        """Return a spec for every tensor, in the order of the forward pass."""

    @abstractmethod
    def forward(self, ops: Ops, p: Params, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the logits of a batch: [B, T, V] for tokens [B, T], [B, classes] for images."""

    @abstractmethod
    def check(self) -> None:
        """Raise UserError for invalid sizes. Called before anything is allocated."""

    def inputs(self) -> dict[str, tuple[int | str, ...]]:
        """Return the shapes of the arrays that `forward` reads from a batch, keyed by name, without the batch axis.

        A letter in a shape, such as "T", stands for a size that the run sets.
        """
        return {self.reads.sequence: ("T",)}

    def masks(self) -> Mapping[str, tuple[tuple[int | str, ...], float]]:
        """Return shape and probability of each dropout mask that `forward` passes to `ops.dropout`, keyed by name.

        Shapes have no batch axis; "T" stands for the length of a sequence. Training batches contain the masks.
        """
        return {}

    @property
    def context(self) -> int:
        """Number of positions in a row; 0 if rows are not sequences.

        A run may choose fewer positions than the base model's context.
        """
        return 0

    def adapt(self, kind: Kind) -> Model:
        """Return the model for data of this kind. A model that reads several kinds overrides this method."""
        return self

    def fit(self, dataset: Dataset) -> Model:
        """Return a copy of the model whose sizes of 0, such as an unset vocabulary, are replaced by the dataset's."""
        return self

    def batches(self, dataset: Dataset, rows: int, seed: int) -> Batches:
        """Return the dataset's batches in the form that the model reads: `rows` rows each, ordered by `seed`."""
        return dataset.batches(self.context, rows, seed)

    def fold(self, tensors: Mapping[str, np.ndarray]) -> tuple[Model, Mapping[str, np.ndarray]]:
        """Return the model and its tensors in the form in which they are written to model files.

        If the model scales activations by factors that other programs do not apply, multiply weights by these factors
        instead. By default, nothing changes. `tensors` is empty if only the model is needed.
        """
        return self, tensors

    def warnings(self) -> Iterable[str]:
        """Return lines to print before a run, such as that other programs cannot read its model file."""
        return ()

    def scores(self, logits: Callable[[Batch], np.ndarray], batches: Iterable[Batch]) -> dict[str, float]:
        """Return held-out metrics besides the loss, where larger is better: {"accuracy": 0.97}.

        `logits(batch)` returns the logits of a batch, [B, T, V] or [B, classes].
        """
        return {}

    def require_metric(self, key: str, name: str, of_objective: Sequence[str] = ()) -> None:
        """Raise UserError if evaluations do not report the metric `name`, the value of the setting `key`.

        `of_objective` are the metrics of the run's objective.

        Any name passes this check if the model overrides `scores` but does not list its metrics in `score_names`.
        """
        has_unlisted = not self.score_names and type(self).scores is not Model.scores
        reported = ("loss", "ppl", *self.score_names, *of_objective, *sorted(LOGGED_METRICS))
        if name not in reported and not has_unlisted:
            raise UserError(f"{key}={printable(name)}: {suggest(name, reported)}")

    def parameters(self) -> int:
        """Return the number of parameters."""
        return sum(math.prod(t.shape) for t in self.tensors())

    def require_positive(self, *names: str) -> None:
        """Raise UserError unless each named field is above 0 and fits into float32 or a 31-bit integer."""
        for name in names:
            require_positive(f"model.{name}", getattr(self, name))

    def settings(self) -> dict[str, Any]:
        """Return the values of the model's fields, keyed by field name."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


def model_settings(model: Model) -> dict[str, Any]:
    """Return `model.settings()`. Raise PluginFailed if it is not a dict."""
    return call_checked(dict, model.settings)


def compute_scores(model: Model, logits: Callable[[Batch], np.ndarray], batches: Iterable[Batch]) -> dict[str, float]:
    """Return `model.scores(logits, batches)`. Raise PluginFailed unless it maps strings to numbers."""
    scores = call_checked(dict, model.scores, logits, batches)
    for name, score in scores.items():
        if not (isinstance(name, str) and isinstance(score, Real)):
            raise wrong_return(model.scores, {name: score}, "numbers by their names")
    return scores
