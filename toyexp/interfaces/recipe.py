"""A recipe: what is trained and from where. It returns a Plan and knows no engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from toyexp.base.attribution import attribute_errors
from toyexp.interfaces.dataset import InputSpec
from toyexp.interfaces.engine import Engine
from toyexp.interfaces.kind import TOKENS, Kind
from toyexp.interfaces.model import Model
from toyexp.interfaces.optimiser import FROM_SCRATCH
from toyexp.interfaces.plan import Lens, LoraAdapter, Plan, PlanTensor
from toyexp.interfaces.run_preview import RunPreview

if TYPE_CHECKING:
    import numpy as np

    from toyexp.interfaces.session import Session


@dataclass(frozen=True)
class Setup:
    """What a recipe's plan takes over from the run: the fields of Plan that go by the same names."""

    inputs: Mapping[str, InputSpec]
    rows: int  # examples in a micro-batch
    accumulate: int = 1
    grad_clip: float = 0.0
    seed: int = 0
    skip_nonfinite: bool = False

    def plan(self, model: Model, tensors: Sequence[PlanTensor], adapters: Sequence[LoraAdapter | Lens] = ()) -> Plan:
        """A Plan of these tensors with this setup."""
        return Plan(model, tuple(tensors), adapters=tuple(adapters), **vars(self))


@dataclass
class Recipe(ABC):
    """Base of all recipes: subclass it as a dataclass whose fields are its settings.

    It is asked `check`, `base_file`, `vocabulary`, `further_files`, `plan` and `warnings` before anything is written,
    each of them any number of times, and `warm` once, with the open session.
    """

    plugin_kind: ClassVar[str] = "recipe"
    name: ClassVar[str]  # what `recipe=` takes
    optim_mode: ClassVar[str] = FROM_SCRATCH  # the AdamW mode, where the model wants no other
    reads: ClassVar[tuple[Kind, ...]] = (TOKENS,)  # kinds of data whose models it can train
    starts_from: ClassVar[str] = ""  # the setting that names a GGUF: base (a whole model), donor (a part of one)
    hint: ClassVar[str] = ""  # what a first try with a file adds, such as lr=1e-4
    needs_tensors: ClassVar[tuple[str, ...]] = ()  # what a model must have, by name

    @abstractmethod
    def plan(self, model: Model, setup: Setup) -> Plan:
        """The tensors of `model`, where their values come from, and which of them train: `setup.plan(model, tensors)`.

        Raises UserError for what cannot work.
        """

    def check(self) -> None:  # noqa: B027 - optional on purpose: many recipes have nothing to check
        """Raises UserError for settings that cannot work and files that are not there."""

    def vocabulary(self) -> Path | None:
        """The GGUF file whose tokenizer the data should use, if the recipe has one."""
        return None

    def base_file(self) -> Path | None:
        """The GGUF file whose architecture and sizes take the place of `model=...`, if the recipe has one."""
        return None

    def prepare_base(self, model: Model) -> Model:
        """The model in its base file as it trains it: one that leaves a size at 0 takes it from the data again."""
        return model

    def further_files(self) -> Sequence[Path]:
        """What its values come from beside these files; a run that goes on must find all of them as they were."""
        return ()

    def origin(self) -> tuple[str, str] | None:
        """What a run says of where its values come from: the role of a file, and the file. None: of no file."""
        return None

    def warnings(self, preview: RunPreview) -> Iterable[str]:
        """A sentence for each of its settings that has no effect in this run, or cannot have the one it is for."""
        return ()

    def warm(self, session: Session) -> None:  # noqa: B027 - optional on purpose: most recipes start as planned
        """Replaces initial values, with `session.upload(name, array)`, before the training step is built."""


def start_session(
    recipe: Recipe,
    engine: Engine,
    plan: Plan,
    state: Mapping[str, np.ndarray] | None = None,
    directory: Path | None = None,
) -> Session:
    """The recipe's life up to its first step: realize, the warm window, build; then the `state` to continue from.

    Closes the session on any error. A plugin's own is told as that, with the log in `directory`.
    """
    log = directory / "log.txt" if directory else None
    with attribute_errors(f"engine.{engine.name}", "while it realized the plan", log):
        session = engine.realize(plan).require_open()
    return prepare_session(recipe, engine, session, state, log)


def prepare_session(
    recipe: Recipe, engine: Engine, session: Session, state: Mapping[str, np.ndarray] | None, log: Path | None
) -> Session:
    """The same from an open session on."""
    try:
        with attribute_errors(f"recipe.{recipe.name}", "while it warmed the model", log):
            recipe.warm(session)
        with attribute_errors(f"engine.{engine.name}", "while it built the training step", log):
            session.build()
        if state is not None:
            with attribute_errors(f"engine.{engine.name}", "while it took the checkpoint", log):
                session.restore(state)
    except BaseException:
        session.close()
        raise
    return session
