"""For plugin authors: suites to inherit, an engine that computes nothing, and float64 references."""

from toyexp.testing.null import NullEngine
from toyexp.testing.opmodel import OpModel, op_batch, op_plan
from toyexp.testing.reference import (
    ReferenceOps,
    reference_adamw,
    reference_logits,
    reference_loss,
    reference_slope,
)
from toyexp.testing.suites import (
    CallbackSuite,
    DataSuite,
    EngineSuite,
    RecipeSuite,
    given,
    image_dataset,
    token_dataset,
)

__all__ = [
    "CallbackSuite",
    "DataSuite",
    "EngineSuite",
    "NullEngine",
    "OpModel",
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
