"""Conformance suites: inherit one, set the object to test, and run pytest.

from toyexp.testing import EngineSuite

class TestMyEngine(EngineSuite):
    engine = MyEngine()
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pytest

from toyexp.base.errors import Unavailable, UserError
from toyexp.batching.images import ImageDataset
from toyexp.batching.tokens import TokenDataset
from toyexp.batching.vectors import VectorDataset
from toyexp.interfaces.callback import Callback
from toyexp.interfaces.dataset import Dataset
from toyexp.interfaces.engine import Engine
from toyexp.interfaces.kind import IMAGES, TOKENS, VECTORS, Kind
from toyexp.interfaces.model import Model
from toyexp.interfaces.optimiser import AdamW, Rule
from toyexp.interfaces.plan import Plan, PlanTensor, export_tensors, group_tensors
from toyexp.interfaces.recipe import Recipe, Setup, start_session
from toyexp.interfaces.run import Run
from toyexp.interfaces.session import Session, State
from toyexp.plugins.rules import KINDS, check_class
from toyexp.plugins.settings import list_settings
from toyexp.reference.opmodel import OpModel
from toyexp.testing.null import NullEngine
from toyexp.tokenizers.byte_level import Bytes
from toyexp.training.bus import Bus
from toyexp.training.loop import Training


class PluginSuite:
    """Base of all conformance suites, with the tests that apply to every plugin class."""

    kind: ClassVar[str]
    part: ClassVar[str]  # name of the attribute that holds the tested object

    def subject(self) -> type:
        """Return the class under test."""
        return type(getattr(self, self.part))

    if not TYPE_CHECKING:  # with __getattr__, mypy would accept any attribute of a suite

        def __getattr__(self, name: str) -> Any:
            """Fail the test with the name of a required attribute that the test class did not set."""
            cls = type(self)
            hint = next((h for c in cls.__mro__ if (h := inspect.get_annotations(c).get(name))), None)
            if hint and inspect.getattr_static(cls, name, None) is None:
                pytest.fail(f"{cls.__name__}: set `{name}` ({hint}) in the class", pytrace=False)
            return object.__getattribute__(self, name)  # raise the original error of a property

    def test_the_registry_accepts_the_class(self) -> None:
        """toyexp accepts the class as a plugin: a dataclass with a name, a help line and defaults."""
        check_class(self.subject(), KINDS[self.kind][0])

    def test_every_setting_is_explained(self) -> None:
        """Each setting (dataclass field) has a comment, which becomes its help text."""
        assert [s.name for s in list_settings(self.subject()) if not s.comment] == []


class RecipeSuite(PluginSuite):
    """Conformance suite of a recipe: set `recipe` and a `model` that it can train."""

    kind, part = "recipe", "recipe"
    recipe: Recipe
    model: Model
    vocab: int = 16
    engine: Engine = NullEngine()

    def dataset(self) -> Dataset:
        """Return tiny data for the model; override it for a kind of data of your own."""
        return tiny_data(self.model.reads, self.vocab)

    def make_plan(self) -> Plan:
        """Return the recipe's plan for the model, with batches of two rows."""
        dataset = self.dataset()
        model = self.model.fit(dataset)
        return self.recipe.plan(model, Setup(model.batches(dataset, 2, 0).inputs, rows=2, seed=1))

    def test_plan_is_the_same_every_time(self) -> None:
        """Two plans have the same tensors with the same initial values."""
        first, second = self.make_plan(), self.make_plan()
        assert [(t.name, t.shape, t.trainable) for t in first.tensors] == [
            (t.name, t.shape, t.trainable) for t in second.tensors
        ]
        for a, b in zip(first.tensors, second.tensors, strict=True):
            np.testing.assert_array_equal(first.initial_values(a), second.initial_values(b))

    def test_plan_trains_something_and_exports_every_tensor(self) -> None:
        """Every tensor of the model is in the plan, and exported tensors have the model's shapes."""
        plan = self.make_plan()
        assert plan.trainable
        exported = export_tensors(plan, {t.name: plan.initial_values(t) for t in plan.tensors})
        assert {n: a.shape for n, a in exported.items()} == {t.name: t.shape for t in plan.model.tensors()}

    def test_the_recipe_trains_and_exports(self) -> None:
        """`start_session` with the recipe returns a session on `engine` that is built and can take a step."""
        with start_session(self.recipe, self.engine, self.make_plan()) as session:
            assert session.state is State.BUILT


class CallbackSuite(PluginSuite):
    """Conformance suite of a callback: set `callback` to a function that returns a new callback."""

    kind = "callbacks"
    steps: int = 4
    rule: Rule = AdamW.for_from_scratch()  # must change the weights, and have the settings that the callback scales
    last: Callback  # the callback of the last run

    def callback(self) -> Callback:
        """Return a fresh callback."""
        pytest.fail(
            f"{type(self).__name__}: set `callback` in the class, for example to the callback's class", pytrace=False
        )

    def subject(self) -> type:
        """Return the callback's class."""
        return type(self.callback())

    def test_a_run_with_it_completes(self, tmp_path: Path) -> None:
        """A run with the callback completes, or the callback stops it; on_end raises no error."""
        outcome = self.run(tmp_path, NullEngine())
        assert outcome.reason in ("completed", "aborted")

    def test_it_handles_a_run_that_fails(self, tmp_path: Path) -> None:
        """on_end is called for a run that failed because its loss became NaN."""
        with pytest.raises(Exception, match="the loss is nan"):
            self.run(tmp_path, NullEngine(nan_at=1))

    def test_its_state_is_restored_from_json(self, tmp_path: Path) -> None:
        """state() is valid JSON without NaN, and a new callback that resumes from it has the same state."""
        self.run(tmp_path, NullEngine())
        state = json.loads(json.dumps(self.last.state(), allow_nan=False))
        fresh = self.callback()
        fresh.resume(state)
        assert fresh.state() in ({}, state)

    def test_it_works_without_evaluations(self, tmp_path: Path) -> None:
        """The callback works with `eval_every=0`, or rejects it with UserError."""
        with contextlib.suppress(UserError):
            assert self.run(tmp_path, NullEngine(), eval_every=0).reason in ("completed", "aborted")

    def run(self, directory: Path, engine: Engine, eval_every: int = 2) -> Any:
        """Train a few steps with only this callback and return the Outcome; raise the first error of on_end."""
        dataset = token_dataset(16)
        batches = dataset.batches(8, 2, 0)
        plan = Bare().plan(OpModel("rows"), Setup(batches.inputs, rows=2))
        plan = dataclasses.replace(plan, groups=group_tensors(plan.trainable, (self.rule,)))
        callback, settings = self.callback(), {"eval_every": eval_every}
        self.last = callback
        callback.check()
        callback.check_run(settings, dataset)
        bus = Bus({callback.name: callback})
        with start_session(Bare(), engine, plan) as session:
            run = Run("test", directory, 0, self.steps, 1e-3, settings, engine.name, plan, session, dataset, {}, bus)
            reason: str = "errored"
            try:
                bus.hook.on_start(run=run)
                bus.check()
                outcome = Training(run, bus, batches, eval_every=eval_every).train()
                reason = outcome.reason
            finally:
                failures = bus.end(run, reason, None)
        if failures:
            raise failures[0]
        return outcome


def build_session(engine: Engine, plan: Plan, values: Mapping[str, np.ndarray] | None = None) -> Session:
    """Return a session that is ready to step; skip the test if the engine's device is not available.

    `values`, keyed by tensor name, replace initial values of the plan.
    """
    try:
        session = engine.realize(plan)
    except Unavailable as reason:
        pytest.skip(str(reason))
    for name, array in (values or {}).items():
        session.upload(name, array)
    session.build()
    return session


def tiny_data(kind: Kind, vocab: int) -> Dataset:
    """Return tiny random data of the kind TOKENS, IMAGES or VECTORS; `vocab` is for tokens only."""
    vectors = np.random.default_rng(0).random((20, 6), dtype=np.float32)  # their own targets
    own_targets = VectorDataset(vectors, vectors, np.arange(20) >= 15, {})
    return {TOKENS: token_dataset(vocab), IMAGES: image_dataset(), VECTORS: own_targets}[kind]


def token_dataset(vocab: int, count: int = 400, seed: int = 0) -> TokenDataset:
    """Return a dataset of `count` random token ids below `vocab`, a quarter of them held out."""
    ids = np.random.default_rng(seed).integers(0, vocab, count, dtype=np.int32)
    return TokenDataset(ids[: count * 3 // 4], ids[count * 3 // 4 :], Bytes(), vocab, 2, {})


def image_dataset(count: int = 60, size: int = 8, channels: int = 1, classes: int = 3, seed: int = 0) -> ImageDataset:
    """Return a dataset of random images with classes that can be learned; a quarter of them is held out.

    The class of an image determines which of its rows of pixels are brighter.
    """
    draw = np.random.default_rng(seed)
    labels = np.arange(count) % classes
    images = draw.integers(0, 156, (count, size, size, channels), dtype=np.uint8)
    for label in range(classes):
        images[labels == label, label::classes] += 100
    return ImageDataset(images, labels, [f"class {label}" for label in range(classes)], 0.25)


@dataclasses.dataclass
class Bare(Recipe):
    """Recipe for tests that trains every tensor of a model from its initial values."""

    name: ClassVar[str] = "bare"

    def plan(self, model: Model, setup: Setup) -> Plan:
        """Return a plan that trains all tensors of the model."""
        return setup.plan(model, [PlanTensor.from_spec(t) for t in model.tensors()])
