"""toyexp: experiments with small models on several engines, exported as GGUF files.

This module has the Python API (run, sweep, train, open, ...) and the names that plugins import. Names are imported
lazily, so that commands respond quickly. Importing toyexp does not import NumPy or a framework.
"""

import toyexp.base.searchpath  # isort: skip - must come before all other imports

from typing import TYPE_CHECKING

from toyexp.base.lazy import lazy

if TYPE_CHECKING:
    from toyexp.api.functions import SweepResult, compare, evaluate, open, predict, run, sweep
    from toyexp.api.result import Result
    from toyexp.api.train import train
    from toyexp.base.errors import (
        RunFailed,
        SessionError,
        ToyexpError,
        Unavailable,
        UserError,
        nearest,
        printable,
        suggest,
    )
    from toyexp.base.packages import require_package
    from toyexp.batching.epochs import EpochBatches
    from toyexp.batching.images import NORMALISATIONS, ImageBatches, ImageDataset, require_augmentation
    from toyexp.batching.pictures import (
        IMAGE_SUFFIXES,
        BadImage,
        iter_images,
        read_image,
        require_pillow,
        scaling_note,
    )
    from toyexp.batching.tokens import TokenBatches, TokenDataset, shift_windows
    from toyexp.batching.vectors import VectorDataset
    from toyexp.config.build import create_data
    from toyexp.formats.gguf.open_model import FromGGUF
    from toyexp.inference.model_files import adapter_files, check_base, find_adapter_file, find_model_file
    from toyexp.interfaces.apart import apart_inputs, keep_apart
    from toyexp.interfaces.arithmetic import Arithmetic
    from toyexp.interfaces.callback import Callback, Schedule
    from toyexp.interfaces.command import Arguments, Command
    from toyexp.interfaces.data import Data
    from toyexp.interfaces.dataset import Batch, Batches, ChangedBatches, Dataset, InputSpec, batch_digest
    from toyexp.interfaces.decoder import Decoder, IncrementalOps, Recompute
    from toyexp.interfaces.engine import Engine
    from toyexp.interfaces.format import Format, LazyTensors, ModelExport, ModelFile, Models, TensorInfo
    from toyexp.interfaces.hooks import Register, hookimpl
    from toyexp.interfaces.kind import IMAGES, TOKENS, VECTORS, Kind
    from toyexp.interfaces.micro_batches import HeldOut
    from toyexp.interfaces.model import Model, TensorSpec, lower_is_better
    from toyexp.interfaces.objective import CrossEntropy, Objective, require_class_targets
    from toyexp.interfaces.ops import AdaptedWeight, LowRank, Ops, Params, Rotary, Tensor
    from toyexp.interfaces.optimiser import DEFAULT_BETA2, FROM_SCRATCH, LORA, MODES, AdamW, Group, Optimiser, Rule
    from toyexp.interfaces.plan import Lens, LoraAdapter, Plan, PlanTensor, lora_names
    from toyexp.interfaces.recipe import Recipe, Setup
    from toyexp.interfaces.run import Run
    from toyexp.interfaces.run_preview import RunPreview, is_changed
    from toyexp.interfaces.sampling import Sampling, generate_endlessly
    from toyexp.interfaces.session import Session, State, StepInput, StepMetrics
    from toyexp.interfaces.stack import Stack, program_difference
    from toyexp.interfaces.values import ArrayValues, Constant, Normal, Values
    from toyexp.plugins.discovery import import_local
    from toyexp.reference.engine import NumpyArithmetic, update_tensor
    from toyexp.reference.forward import reason_to_recompute
    from toyexp.reference.forward_listing import WeightInfo, listing
    from toyexp.results.events import History
    from toyexp.tokenizers.tokenizer import Tokenizer
    from toyexp.training.bus import Bus
    from toyexp.training.checkpoint import rebuild_dataclass

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy(__name__, __file__)
