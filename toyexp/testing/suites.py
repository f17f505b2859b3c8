"""The conformance kit: inherit a suite, name what it should test, and pytest does the rest.

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
from toyexp.interfaces.callback import Callback
from toyexp.interfaces.dataset import Dataset
from toyexp.interfaces.engine import Engine
from toyexp.interfaces.kind import IMAGES, TOKENS, Kind
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
    """What holds for every plugin class."""

    kind: ClassVar[str]
    part: ClassVar[str]  # the name under which a suite is given what it tests

    def subject(self) -> type:
        """The class under test."""
        return type(getattr(self, self.part))

    if not TYPE_CHECKING:  # to which it would say that a suite has whatever is asked of it

        def __getattr__(self, name: str) -> Any:
            """Says which attribute was forgotten, where it is used: it may be given late, by a fixture."""
            cls = type(self)
            hint = next((h for c in cls.__mro__ if (h := inspect.get_annotations(c).get(name))), None)
            if hint and inspect.getattr_static(cls, name, None) is None:
                pytest.fail(f"{cls.__name__}: set `{name}` ({hint}) in the class", pytrace=False)
            return object.__getattribute__(self, name)  # raises, of a property what went wrong in it

    def test_the_registry_takes_the_class(self) -> None:
        """It is a dataclass with a name, a help line and defaults."""
        check_class(self.subject(), KINDS[self.kind][0])

    def test_every_setting_is_explained(self) -> None:
        """Each field has a comment, which help shows."""
        assert [s.name for s in list_settings(self.subject()) if not s.comment] == []


class RecipeSuite(PluginSuite):
    """What a recipe must do: set `recipe` and a `model` it can train."""

    kind, part = "recipe", "recipe"
    recipe: Recipe
    model: Model
    vocab: int = 16
    engine: Engine = NullEngine()

    def dataset(self) -> Dataset:
        """Tiny data for the model; for a kind of data of your own, say which."""
        return tiny_data(self.model.reads, self.vocab)

    def planned(self) -> Plan:
        """A plan for tiny batches."""
        dataset = self.dataset()
        model = self.model.fit(dataset)
        return self.recipe.plan(model, Setup(model.batches(dataset, 2, 0).inputs, rows=2, seed=1))

    def test_plan_is_the_same_every_time(self) -> None:
        """Same tensors, same initial values."""
        one, two = self.planned(), self.planned()
        assert [(t.name, t.shape, t.trainable) for t in one.tensors] == [
            (t.name, t.shape, t.trainable) for t in two.tensors
        ]
        for a, b in zip(one.tensors, two.tensors, strict=True):
            np.testing.assert_array_equal(one.initial_values(a), two.initial_values(b))

    def test_plan_trains_something_and_holds_the_whole_model(self) -> None:
        """Every tensor of the model is there, and what is exported has the model's own shapes."""
        plan = self.planned()
        assert plan.trainable
        exported = export_tensors(plan, {t.name: plan.initial_values(t) for t in plan.tensors})
        assert {n: a.shape for n, a in exported.items()} == {t.name: t.shape for t in plan.model.tensors()}

    def test_life_of_the_recipe(self) -> None:
        """realize, the warm window, build: after it the session can step."""
        with start_session(self.recipe, self.engine, self.planned()) as session:
            assert session.state is State.BUILT


class CallbackSuite(PluginSuite):
    """What a callback must do: set `callback`, a function that makes a fresh one."""

    kind = "callbacks"
    steps: int = 4
    rule: Rule = AdamW.for_from_scratch()  # changes the weights; one that scales another's numbers sets that here
    last: Callback  # of the last run

    def callback(self) -> Callback:
        """A fresh callback."""
        pytest.fail(f"{type(self).__name__}: set `callback`, such as its class, in the class", pytrace=False)

    def subject(self) -> type:
        """The callback's class."""
        return type(self.callback())

    def test_it_listens_and_the_run_completes(self, tmp_path: Path) -> None:
        """A whole run with it ends by itself, and its on_end is called."""
        outcome = self.run(tmp_path, NullEngine())
        assert outcome.reason in ("completed", "aborted")

    def test_it_survives_a_run_that_fails(self, tmp_path: Path) -> None:
        """on_end copes with a run whose loss became NaN."""
        with pytest.raises(Exception, match="the loss is nan"):
            self.run(tmp_path, NullEngine(nan_at=1))

    def test_its_state_survives_json_and_a_fresh_one_takes_it(self, tmp_path: Path) -> None:
        """What a checkpoint keeps of it is plain and finite, and comes back the same."""
        self.run(tmp_path, NullEngine())
        state = json.loads(json.dumps(self.last.state(), allow_nan=False))
        fresh = self.callback()
        fresh.resume(state)
        assert fresh.state() in ({}, state)

    def test_it_copes_without_evals(self, tmp_path: Path) -> None:
        """With `eval_every=0` it hears of none, unless it refuses that."""
        with contextlib.suppress(UserError):
            assert self.run(tmp_path, NullEngine(), eval_every=0).reason in ("completed", "aborted")

    def run(self, directory: Path, engine: Engine, eval_every: int = 2) -> Any:
        """A short run on the null engine with this callback alone; raises what on_end raised."""
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


def built(engine: Engine, plan: Plan, values: Mapping[str, np.ndarray] | None = None) -> Session:
    """A session ready to step, with these values in place of the plan's; skips where the engine is not here."""
    try:
        session = engine.realize(plan)
    except Unavailable as reason:
        pytest.skip(str(reason))
    for name, array in (values or {}).items():
        session.upload(name, array)
    session.build()
    return session


def tiny_data(kind: Kind, vocab: int) -> Dataset:
    """Data of a kind that ships."""
    return {TOKENS: token_dataset(vocab), IMAGES: image_dataset()}[kind]


def token_dataset(vocab: int, count: int = 400, seed: int = 0) -> TokenDataset:
    """Random ids below `vocab`, for tests."""
    ids = np.random.default_rng(seed).integers(0, vocab, count, dtype=np.int32)
    return TokenDataset(ids[: count * 3 // 4], ids[count * 3 // 4 :], Bytes(), vocab, 2, {})


def image_dataset(count: int = 60, size: int = 8, channels: int = 1, classes: int = 3, seed: int = 0) -> ImageDataset:
    """Random images of `size` x `size` pixels, each brighter than chance where its class says, for tests."""
    draw = np.random.default_rng(seed)
    labels = np.arange(count) % classes
    images = draw.integers(0, 156, (count, size, size, channels), dtype=np.uint8)
    for label in range(classes):
        images[labels == label, label::classes] += 100
    return ImageDataset(images, labels, [f"class {label}" for label in range(classes)], 0.25)


@dataclasses.dataclass
class Bare(Recipe):
    """Every tensor of a model as it begins."""

    name: ClassVar[str] = "bare"

    def plan(self, model: Model, setup: Setup) -> Plan:
        """All of them train."""
        return setup.plan(model, [PlanTensor(t.name, t.shape, t.init) for t in model.tensors()])
