"""For plugin authors: suites to inherit, an engine that computes nothing, and float64 references."""

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
    from toyexp.testing.optimisers import OptimiserSuite
    from toyexp.testing.suites import CallbackSuite, RecipeSuite, image_dataset, token_dataset

# The suites need pytest, which not everyone who uses the rest has.
__getattr__, __dir__, __all__ = lazy(__name__, __file__)

if sys.modules.get("pytest"):  # so that a suite's bare assert shows its values, as one in a test's own file does
    sys.modules["pytest"].register_assert_rewrite(*(f"{__name__}.{m.name}" for m in pkgutil.iter_modules(__path__)))
