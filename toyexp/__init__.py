"""toyexp: one experiment, any engine, and a GGUF at the end.

This is what plugin authors import. Each name is loaded when it is first asked for, so that a command can put something
on the screen before numpy is there. It loads numpy and pluggy, and no framework.
"""

import toyexp.searchpath  # noqa: F401  # isort: skip - before anything else is looked for

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from toyexp.bus import Bus, Callback, Run, Schedule
    from toyexp.data import Batches, Data, Dataset, TokenBatches, TokenDataset
    from toyexp.decoder import Decoder
    from toyexp.engine import Batch, Engine, Session, State, StepMetrics
    from toyexp.errors import RunFailed, SessionError, ToyexpError, Unavailable, UserError, choose, nearest, printable
    from toyexp.hooks import Register, hookimpl
    from toyexp.images import ImageBatches, ImageDataset
    from toyexp.init import Constant, FromGGUF, Given, Normal
    from toyexp.model import Model, TensorSpec
    from toyexp.ops import Adapted, LowRank, Ops, Params, Rotary
    from toyexp.optim import AdamW
    from toyexp.packages import needed
    from toyexp.plan import InputSpec, Lens, LoraAdapter, Plan, PlanTensor
    from toyexp.planned import Planned, changed
    from toyexp.recipe import Recipe, Setup
    from toyexp.tokenizer import Tokenizer

__version__ = "0.1.0"

__all__ = [
    "AdamW",
    "Adapted",
    "Batch",
    "Batches",
    "Bus",
    "Callback",
    "Constant",
    "Data",
    "Dataset",
    "Decoder",
    "Engine",
    "FromGGUF",
    "Given",
    "ImageBatches",
    "ImageDataset",
    "InputSpec",
    "Lens",
    "LoraAdapter",
    "LowRank",
    "Model",
    "Normal",
    "Ops",
    "Params",
    "Plan",
    "PlanTensor",
    "Planned",
    "Recipe",
    "Register",
    "Rotary",
    "Run",
    "RunFailed",
    "Schedule",
    "Session",
    "SessionError",
    "Setup",
    "State",
    "StepMetrics",
    "TensorSpec",
    "TokenBatches",
    "TokenDataset",
    "Tokenizer",
    "ToyexpError",
    "Unavailable",
    "UserError",
    "changed",
    "choose",
    "hookimpl",
    "nearest",
    "needed",
    "printable",
]

# Where each of them lives, once more for the running program; a test holds it against the imports above.
_HOMES = {
    "toyexp.bus": "Bus Callback Run Schedule",
    "toyexp.data": "Batches Data Dataset TokenBatches TokenDataset",
    "toyexp.decoder": "Decoder",
    "toyexp.engine": "Batch Engine Session State StepMetrics",
    "toyexp.errors": "RunFailed SessionError ToyexpError Unavailable UserError choose nearest printable",
    "toyexp.hooks": "Register hookimpl",
    "toyexp.images": "ImageBatches ImageDataset",
    "toyexp.init": "Constant FromGGUF Given Normal",
    "toyexp.model": "Model TensorSpec",
    "toyexp.ops": "Adapted LowRank Ops Params Rotary",
    "toyexp.optim": "AdamW",
    "toyexp.packages": "needed",
    "toyexp.plan": "InputSpec Lens LoraAdapter Plan PlanTensor",
    "toyexp.planned": "Planned changed",
    "toyexp.recipe": "Recipe Setup",
    "toyexp.tokenizer": "Tokenizer",
}

_HOME_OF = {name: module for module, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> object:
    """A name of the public surface, from the module it lives in."""
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value  # the next time it is simply there
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
