"""For plugin authors: suites to inherit, an engine that computes nothing, and float64 references."""

from typing import TYPE_CHECKING

from toyexp.base.lazy import lazy
from toyexp.reference.engine import (
    ReferenceOps,
    reference_adamw,
    reference_logits,
    reference_loss,
    reference_slope,
)
from toyexp.reference.opmodel import OpModel, op_batch, op_plan
from toyexp.testing.null import NullEngine

if TYPE_CHECKING:
    from toyexp.testing.data import DataSuite
    from toyexp.testing.engines import EngineNumbers, EngineSuite
    from toyexp.testing.formats import FormatSuite
    from toyexp.testing.models import ModelSuite
    from toyexp.testing.optimisers import OptimiserSuite
    from toyexp.testing.suites import CallbackSuite, RecipeSuite, given, image_dataset, token_dataset

__all__ = [
    "CallbackSuite",
    "DataSuite",
    "EngineNumbers",
    "EngineSuite",
    "FormatSuite",
    "ModelSuite",
    "NullEngine",
    "OpModel",
    "OptimiserSuite",
    "RecipeSuite",
    "ReferenceOps",
    "given",
    "image_dataset",
    "op_batch",
    "op_plan",
    "reference_adamw",
    "reference_logits",
    "reference_loss",
    "reference_slope",
    "token_dataset",
]

# The suites need pytest, which not everyone who uses the rest has.
__getattr__ = lazy(
    __name__,
    {
        "toyexp.testing.data": "DataSuite",
        "toyexp.testing.engines": "EngineNumbers EngineSuite",
        "toyexp.testing.formats": "FormatSuite",
        "toyexp.testing.models": "ModelSuite",
        "toyexp.testing.optimisers": "OptimiserSuite",
        "toyexp.testing.suites": "CallbackSuite RecipeSuite given image_dataset token_dataset",
    },
)
