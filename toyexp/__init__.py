"""toyexp: one experiment, any engine, and a GGUF at the end.

This is what a Python program or a notebook calls (run, sweep, train, open), and what plugin authors import. Each name
is loaded when it is first asked for, so that a command can put something on the screen at once: what lists plugins
loads no numpy, and nothing here loads a framework.
"""

import toyexp.base.searchpath  # isort: skip - before anything else is looked for

from typing import TYPE_CHECKING

from toyexp.base.lazy import lazy

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
    from toyexp.config.restored import adapter_files, adapter_of, check_base, file_of
    from toyexp.contract.arithmetic import Arithmetic
    from toyexp.contract.callback import Callback, Schedule
    from toyexp.contract.command import Arguments, Command
    from toyexp.contract.data import Data
    from toyexp.contract.dataset import Batch, Batches, Dataset, InputSpec, batch_digest
    from toyexp.contract.decoder import Decoder, Piecewise, Recompute
    from toyexp.contract.engine import Engine
    from toyexp.contract.format import Exported, Format, ModelFile, Models, TensorInfo
    from toyexp.contract.hooks import Register, hookimpl
    from toyexp.contract.kind import IMAGES, TOKENS, Kind
    from toyexp.contract.model import Model, TensorSpec, lower_is_better
    from toyexp.contract.ops import Adapted, LowRank, Ops, Params, Rotary, Tensor
    from toyexp.contract.optimiser import DEFAULT_BETA2, FROM_SCRATCH, LORA, MODES, AdamW, Group, Optimiser, Rule
    from toyexp.contract.plan import Lens, LoraAdapter, Plan, PlanTensor, lora_names
    from toyexp.contract.planned import Planned, changed
    from toyexp.contract.recipe import Recipe, Setup
    from toyexp.contract.run import Run
    from toyexp.contract.sampling import Sampling, endless
    from toyexp.contract.session import Session, State, StepMetrics
    from toyexp.contract.stack import unlike
    from toyexp.contract.values import Constant, Given, Normal, Values
    from toyexp.datasets.images import AUGMENTATIONS, NORMALISATIONS, ImageBatches, ImageDataset
    from toyexp.datasets.pictures import (
        IMAGE_SUFFIXES,
        BadImage,
        files_below,
        images_below,
        read_image,
        require_pillow,
        scaled,
    )
    from toyexp.datasets.tokens import TokenBatches, TokenDataset
    from toyexp.door.history import History
    from toyexp.door.result import Result
    from toyexp.door.running import SweepResult, compare, evaluate, open, predict, run, sweep
    from toyexp.door.training import train
    from toyexp.formats.gguf.open_model import FromGGUF
    from toyexp.reference.engine import NumpyArithmetic, updated
    from toyexp.reference.forward import reason_to_recompute
    from toyexp.reference.forward_listing import Traced, listing
    from toyexp.text.tokenizer import Tokenizer
    from toyexp.training.bus import Bus
    from toyexp.training.checkpoint import rebuilt

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy(__name__, __file__)
