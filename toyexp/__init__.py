"""toyexp: one experiment, any engine, and a GGUF at the end.

This is what plugin authors import. Each name is loaded when it is first asked for, so that a command can put something
on the screen before numpy is there. It loads numpy and pluggy, and no framework.
"""

import toyexp.base.searchpath  # noqa: F401  # isort: skip - before anything else is looked for

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from toyexp.base.errors import (
        RunFailed,
        SessionError,
        ToyexpError,
        Unavailable,
        UserError,
        choose,
        nearest,
        printable,
    )
    from toyexp.base.packages import needed
    from toyexp.contract.arithmetic import Arithmetic
    from toyexp.contract.batch import Batch, InputSpec
    from toyexp.contract.callback import Callback, Schedule
    from toyexp.contract.command import Arguments, Command
    from toyexp.contract.data import Data
    from toyexp.contract.dataset import Batches, Dataset
    from toyexp.contract.decoder import Decoder
    from toyexp.contract.engine import Engine, Session, State, StepMetrics
    from toyexp.contract.format import Exported, Format
    from toyexp.contract.hooks import Register, hookimpl
    from toyexp.contract.kind import IMAGES, TOKENS, Kind
    from toyexp.contract.model import Model, TensorSpec
    from toyexp.contract.ops import Adapted, LowRank, Ops, Params, Rotary
    from toyexp.contract.optimiser import AdamW, Group, Optimiser, Rule
    from toyexp.contract.plan import Lens, LoraAdapter, Plan, PlanTensor
    from toyexp.contract.planned import Planned, changed
    from toyexp.contract.recipe import Recipe, Setup
    from toyexp.contract.run import Run
    from toyexp.contract.values import Constant, Given, Normal, Values
    from toyexp.datasets.images import ImageBatches, ImageDataset
    from toyexp.datasets.tokens import TokenBatches, TokenDataset
    from toyexp.formats.gguf.source import FromGGUF
    from toyexp.reference.arithmetic import NumpyArithmetic, updated
    from toyexp.text.tokenizer import Tokenizer
    from toyexp.training.bus import Bus

__version__ = "0.1.0"

__all__ = [
    "IMAGES",
    "TOKENS",
    "AdamW",
    "Adapted",
    "Arguments",
    "Arithmetic",
    "Batch",
    "Batches",
    "Bus",
    "Callback",
    "Command",
    "Constant",
    "Data",
    "Dataset",
    "Decoder",
    "Engine",
    "Exported",
    "Format",
    "FromGGUF",
    "Given",
    "Group",
    "ImageBatches",
    "ImageDataset",
    "InputSpec",
    "Kind",
    "Lens",
    "LoraAdapter",
    "LowRank",
    "Model",
    "Normal",
    "NumpyArithmetic",
    "Ops",
    "Optimiser",
    "Params",
    "Plan",
    "PlanTensor",
    "Planned",
    "Recipe",
    "Register",
    "Rotary",
    "Rule",
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
    "Values",
    "changed",
    "choose",
    "hookimpl",
    "nearest",
    "needed",
    "printable",
    "updated",
]

# Where each of them lives, once more for the running program; a test holds it against the imports above.
_HOMES = {
    "toyexp.base.errors": "RunFailed SessionError ToyexpError Unavailable UserError choose nearest printable",
    "toyexp.base.packages": "needed",
    "toyexp.contract.arithmetic": "Arithmetic",
    "toyexp.contract.batch": "Batch InputSpec",
    "toyexp.contract.callback": "Callback Schedule",
    "toyexp.contract.command": "Arguments Command",
    "toyexp.contract.data": "Data",
    "toyexp.contract.dataset": "Batches Dataset",
    "toyexp.contract.decoder": "Decoder",
    "toyexp.contract.engine": "Engine Session State StepMetrics",
    "toyexp.contract.format": "Exported Format",
    "toyexp.contract.hooks": "Register hookimpl",
    "toyexp.contract.kind": "IMAGES TOKENS Kind",
    "toyexp.contract.model": "Model TensorSpec",
    "toyexp.contract.ops": "Adapted LowRank Ops Params Rotary",
    "toyexp.contract.optimiser": "AdamW Group Optimiser Rule",
    "toyexp.contract.plan": "Lens LoraAdapter Plan PlanTensor",
    "toyexp.contract.planned": "Planned changed",
    "toyexp.contract.recipe": "Recipe Setup",
    "toyexp.contract.run": "Run",
    "toyexp.contract.values": "Constant Given Normal Values",
    "toyexp.datasets.images": "ImageBatches ImageDataset",
    "toyexp.datasets.tokens": "TokenBatches TokenDataset",
    "toyexp.formats.gguf.source": "FromGGUF",
    "toyexp.reference.arithmetic": "NumpyArithmetic updated",
    "toyexp.text.tokenizer": "Tokenizer",
    "toyexp.training.bus": "Bus",
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
