"""Base class of recipes.

A recipe decides which tensors are trained and where their initial values come from. It returns a Plan for any engine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from toyexp.base.attribution import attribute_errors
from toyexp.base.lazy import numpy as np
from toyexp.interfaces.dataset import InputSpec
from toyexp.interfaces.engine import Engine
from toyexp.interfaces.kind import TOKENS, Kind
from toyexp.interfaces.model import Model
from toyexp.interfaces.objective import CrossEntropy, Objective
from toyexp.interfaces.optimiser import FROM_SCRATCH
from toyexp.interfaces.phases import TURN
from toyexp.interfaces.plan import EMBEDDING, NOISE, Lens, LoraAdapter, Plan, PlanTensor
from toyexp.interfaces.run_preview import RunPreview

if TYPE_CHECKING:
    from toyexp.interfaces.session import Session


@dataclass(frozen=True)
class Setup:
    """The fields of a Plan that depend on the run's settings and data. A recipe adds the other fields."""

    inputs: Mapping[str, InputSpec]
    rows: int  # examples in a micro-batch
    accumulate: int = 1
    grad_clip: float = 0.0
    seed: int = 0
    skip_nonfinite: bool = False
    objective: Objective = field(default_factory=CrossEntropy)
    neftune: float = 0.0

    def plan(self, model: Model, tensors: Sequence[PlanTensor], adapters: Sequence[LoraAdapter | Lens] = ()) -> Plan:
        """Return a Plan of these tensors and adapters, with the other fields taken from this setup.

        The inputs also contain the model's dropout masks, the noise of `neftune` and, if tensors have `turns`, the
        number of the turn.
        """
        turn = {TURN: InputSpec((), "float32", optional=True)} if any(t.turns for t in tensors) else {}
        inputs = {**self.inputs, **self._mask_inputs(model), **turn}
        if self.neftune:
            (width,) = (t.shape[1] for t in tensors if t.name == EMBEDDING)
            shape = (*self.inputs[str(model.reads.sequence)].shape, width)
            inputs[NOISE] = InputSpec(shape, "float32", optional=True)
        return Plan(model, tuple(tensors), adapters=tuple(adapters), **{**vars(self), "inputs": inputs})

    def _mask_inputs(self, model: Model) -> dict[str, InputSpec]:
        sequence = self.inputs.get(model.reads.sequence)
        length = sequence.shape[0] if sequence is not None and sequence.shape else 0
        shapes = {name: shape for name, (shape, _) in model.masks().items()}
        sizes = {name: tuple(length if isinstance(n, str) else n for n in shape) for name, shape in shapes.items()}
        return {name: InputSpec(shape, "float32", optional=True) for name, shape in sizes.items()}


@dataclass
class Recipe(ABC):
    """Base of all recipes: subclass it as a dataclass whose fields are its settings.

    Before anything is written, toyexp calls `check`, `base_file`, `vocabulary`, `further_files`, `plan` and `warnings`,
    each any number of times. It calls `warm` once, with the open session.
    """

    plugin_kind: ClassVar[str] = "recipe"
    name: ClassVar[str]  # the value of `recipe=` that selects it
    optim_mode: ClassVar[str] = FROM_SCRATCH  # AdamW mode, unless the model sets one
    reads: ClassVar[tuple[Kind, ...]] = (TOKENS,)  # kinds of data its models may read
    starts_from: ClassVar[str] = ""  # setting with the GGUF file to start from: "base", "donor" or none
    hint: ClassVar[str] = ""  # override to suggest for a first run, such as lr=1e-4
    needs_tensors: ClassVar[tuple[str, ...]] = ()  # names of tensors that the model must have

    @abstractmethod
    def plan(self, model: Model, setup: Setup) -> Plan:
        """Return a plan that lists the tensors of `model`, the source of their values, and which of them are trained.

        Build the result with `setup.plan(model, tensors)`. Raise UserError for invalid settings.
        """

    def check(self) -> None:  # noqa: B027 - optional on purpose: many recipes have nothing to check
        """Raise UserError for invalid settings and for missing files."""

    def vocabulary(self) -> Path | None:
        """Return the GGUF file whose tokenizer the data should use, or None."""
        return None

    def base_file(self) -> Path | None:
        """Return the GGUF file whose architecture and sizes replace `model=...`, or None."""
        return None

    def prepare_base(self, model: Model) -> Model:
        """Return the model to train, given the `model` that the base file describes.

        Each size that this method sets to 0 is later replaced by the size that the data needs.
        """
        return model

    def further_files(self) -> Sequence[Path]:
        """Return the files, other than the base file, from which initial values are read.

        A run can be resumed only if these files are unchanged.
        """
        return ()

    def origin(self) -> tuple[str, str] | None:
        """Return the role and path of the file from which initial values are read; None if there is no such file.

        The role is a word such as base; an example of the result is ("base", "model.gguf").
        """
        return None

    def warnings(self, preview: RunPreview) -> Iterable[str]:
        """Return a one-sentence warning for each setting that has no effect, or an unintended one, in this run."""
        return ()

    def warm(self, session: Session) -> None:  # noqa: B027 - optional on purpose: most recipes start as planned
        """Change initial values with `session.upload(name, array)`. Called before the training step is built."""

    def edit_steps(self, steps: int) -> Iterable[int]:
        """Return the numbers of steps after which toyexp calls `edit`; 0 is before the first. The run has `steps`."""
        return ()

    def edit(self, step: int, arrays: dict[str, np.ndarray]) -> None:  # noqa: B027 - optional: most runs have one phase
        """Change trained tensors and optimiser state between two steps; `step` is the number of steps taken.

        `arrays` holds each trained tensor under its name, and its optimiser state and the arrays in its `keeps` as
        `<name>@<array>`. Assign new arrays of the same shape to the keys. The result must depend only on the arguments
        and the settings, so that a resumed run is exact.
        """


def start_session(
    recipe: Recipe,
    engine: Engine,
    plan: Plan,
    state: Mapping[str, np.ndarray] | None = None,
    directory: Path | None = None,
) -> Session:
    """Open a session for the plan, prepare it with `prepare_session`, and return it ready to train.

    `state` is a snapshot to continue from, or None. If a plugin raises an exception, the error message names the
    plugin. If `directory` is given, the message also names the file log.txt in this directory.
    """
    log = directory / "log.txt" if directory else None
    with attribute_errors(f"engine.{engine.name}", "while it realized the plan", log):
        session = engine.realize(plan).require_open()
    return prepare_session(recipe, engine, session, state, log)


def prepare_session(
    recipe: Recipe, engine: Engine, session: Session, state: Mapping[str, np.ndarray] | None, log: Path | None
) -> Session:
    """Make an open session ready to train, and return it.

    Call `recipe.warm`, which may change initial values. Then build the training step and, if `state` is given, restore
    this snapshot. Close the session on any error. If a plugin raises an exception, the error message names the plugin
    and the file `log`.
    """
    try:
        with attribute_errors(f"recipe.{recipe.name}", "in warm()", log):
            recipe.warm(session)
        with attribute_errors(f"engine.{engine.name}", "while it built the training step", log):
            session.build()
        if state is not None:
            with attribute_errors(f"engine.{engine.name}", "while it restored the checkpoint", log):
                session.restore(state)
    except BaseException:
        session.close()
        raise
    return session
