"""A model file with an optional LoRA adapter, opened for inference on an engine."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from toyexp.base.errors import UserError, suggest
from toyexp.base.formatting import short_path
from toyexp.base.memory import EVALUATE_REMEDY
from toyexp.base.terminal import print_error
from toyexp.config.build import pick_labelled_engine
from toyexp.config.schema import AUTO
from toyexp.formats.file_plan import frozen_plan
from toyexp.formats.gguf.header import source_path
from toyexp.formats.gguf.open_model import load_model, open_gguf
from toyexp.formats.gguf.read import GGUFFile
from toyexp.formats.gguf.tokenizer import has_text, read_tokenizer
from toyexp.inference.model_files import check_base, find_adapter_file, find_model_file
from toyexp.interfaces.dataset import InputSpec
from toyexp.interfaces.engine import Engine
from toyexp.interfaces.model import Model
from toyexp.interfaces.objective import CrossEntropy, Objective
from toyexp.interfaces.recipe import Setup
from toyexp.interfaces.session import Session
from toyexp.plugins.registry import Registry
from toyexp.tokenizers.tokenizer import Tokenizer
from toyexp.training.memory import open_checked_session


@dataclass(frozen=True)
class LoadedModel:
    """The GGUF file of a model, and optionally that of a LoRA adapter, to be opened on an engine for inference."""

    path: Path
    adapter: Path | None
    registry: Registry

    @classmethod
    def open(cls, model_path: Path, registry: Registry, adapter: Path | None = None) -> LoadedModel:
        """Find the files of a model and an adapter; warn if the adapter was trained on another base."""
        path = find_model_file(model_path, registry=registry)
        if adapter is None:
            return cls(path, None, registry)
        adapter_file = find_adapter_file(adapter, lambda: load_model(path, registry), registry)
        for warning in check_base(adapter_file, path):
            print_error(f"warning: {warning}")
        return cls(path, adapter_file, registry)

    @property
    def name(self) -> str:
        """The path that the model was read from: a file or directory."""
        return str(source_path(self.path))

    @property
    def file(self) -> GGUFFile:
        """The model's open file."""
        return open_gguf(str(self.path))

    @cached_property
    def model(self) -> Model:
        """The model. Raises UserError if no model plugin has its architecture."""
        return load_model(self.path, self.registry)

    def tokenizer(self) -> Tokenizer:
        """Return the file's tokenizer. Raise UserError if it has none."""
        if not has_text(self.file):
            raise UserError(f"{short_path(self.path)}: has no tokenizer; use token ids")
        return read_tokenizer(self.file)

    def session(
        self, engine: Engine, inputs: Mapping[str, InputSpec], rows: int, remedy: str = EVALUATE_REMEDY,
        objective: Objective | None = None,
    ) -> AbstractContextManager[Session]:  # fmt: skip
        """Open a session for inference on batches of `rows` rows with these `inputs`.

        `objective` defines the held-out loss, by default cross-entropy. If memory runs out, the error message ends with
        `remedy`.
        """
        setup = Setup(inputs, rows, objective=objective or CrossEntropy())
        plan = frozen_plan(self.model, self.path, setup, self.adapter)
        if plan.objective.tensors(plan) or plan.objective.precomputed(inputs):
            problem = "its loss compares the model with another one, which the model's file does not have"
            hint = "see the run's held-out loss with: toyexp runs; or evaluate its model.gguf on other data"
            raise UserError(f"objective={plan.objective.name}: {problem}; {hint}")
        return open_checked_session(plan, engine, self.name, remedy)


def pick_engine(label: str, registry: Registry, rows: int) -> tuple[Engine, str]:
    """Return the engine for a label such as `auto` or `cpu:threads=1`, and a text about the engine for the user.

    If the engine's devices cannot share batches of `rows` rows equally, the engine uses its first device only.
    """
    name = label.partition(":")[0]
    if name not in (names := {*registry.offers["engine"], AUTO}):
        raise UserError(f"--engine {label}: {suggest(name, names)}")
    engine, note = pick_labelled_engine(label, registry, f"--engine {label}")
    return fit_rows(engine, note, rows)


def fit_rows(engine: Engine, note: str, rows: int) -> tuple[Engine, str]:
    """Return an engine that can compute batches of `rows` rows, and a text about the engine for the user.

    Return `engine` and `note` if the engine's devices can share the rows equally. Otherwise return an engine that uses
    only the first device.
    """
    try:
        engine.check_rows(rows, 1)
    except UserError:
        engine = engine.generation_engine()
        engine.check_rows(rows, 1)  # raises for an invalid setting
        return engine, f"{engine.name}: {engine.check()}, its first device only"
    return engine, note
