"""toyexp: one experiment, any engine, and a GGUF at the end.

This is what plugin authors import. It loads numpy and pluggy, and no framework.
"""

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
from toyexp.plan import InputSpec, Lens, LoraAdapter, Plan, PlanTensor
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
    "choose",
    "hookimpl",
    "nearest",
    "printable",
]
