"""Test kit for plugin authors: conformance suites, an engine that computes nothing, and float64 references."""

import pkgutil
import sys
from typing import TYPE_CHECKING

from toyexp.base.lazy import lazy

if TYPE_CHECKING:
    from toyexp.reference.engine import ReferenceOps, reference_adamw, reference_logits, reference_loss, reference_slope
    from toyexp.reference.opmodel import OpModel, op_batch, op_plan
    from toyexp.testing.data import DataSuite
    from toyexp.testing.engines import EngineNumbers, EngineSuite
    from toyexp.testing.formats import FormatSuite
    from toyexp.testing.models import ModelSuite
    from toyexp.testing.null import NullEngine
    from toyexp.testing.objectives import ObjectiveSuite
    from toyexp.testing.optimisers import OptimiserSuite
    from toyexp.testing.suites import CallbackSuite, RecipeSuite, image_dataset, token_dataset

# Imported lazily: the suites need pytest, the rest does not.
__getattr__, __dir__, __all__ = lazy(__name__, __file__)

if sys.modules.get("pytest"):  # asserts of the suites then show their values, as asserts in test files do
    sys.modules["pytest"].register_assert_rewrite(*(f"{__name__}.{m.name}" for m in pkgutil.iter_modules(__path__)))
