"""A suite for a part whose author wrote none: what the kit can ask of it as it stands, without a setting."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toyexp.base.errors import UserError
from toyexp.interfaces.data import Data
from toyexp.interfaces.dataset import Dataset
from toyexp.interfaces.engine import Engine
from toyexp.interfaces.format import Format
from toyexp.interfaces.kind import IMAGES, TOKENS, Kind
from toyexp.interfaces.model import Model
from toyexp.interfaces.recipe import Recipe
from toyexp.testing.data import DataSuite
from toyexp.testing.engines import EngineSuite
from toyexp.testing.formats import FormatSuite
from toyexp.testing.models import ModelSuite
from toyexp.testing.optimisers import OptimiserSuite
from toyexp.testing.suites import CallbackSuite, PluginSuite, RecipeSuite, tiny_data

SUITES: Mapping[str, type[PluginSuite]] = {
    suite.kind: suite
    for suite in (EngineSuite, RecipeSuite, OptimiserSuite, ModelSuite, DataSuite, CallbackSuite, FormatSuite)
}
MOST = 300_000  # numbers of a model, of whose function float64 takes a thousand values
VOCAB = 257


@dataclass(frozen=True)
class Beside:
    """What there is for parts of other kinds to be tried with."""

    engines: Sequence[Engine]  # that work here: optimisers run on the first, models on all of them
    models: Sequence[type[Model]]  # of which a recipe gets one to train, and a format those to hold
    data: Sequence[type[Data]]  # for kinds of data beside tokens and images

    def dataset(self, kind: Kind) -> Dataset:
        """Tiny data of a kind, or what some data of that kind open without a setting; UserError where none do."""
        if kind in (TOKENS, IMAGES):
            return tiny_data(kind, VOCAB)
        for cls in (cls for cls in self.data if cls.gives == kind):
            with contextlib.suppress(UserError):
                data = cls()
                data.check()
                return data.open(None)
        raise UserError(f"no data of {kind} open without a setting")

    def fitted(self, model: Model) -> Model:
        """The model with the sizes that come from such data."""
        return model.fit(self.dataset(model.reads))


def suite_for(kind: str, cls: type, beside: Beside) -> type[PluginSuite]:
    """The suite of a kind for a class with its defaults; UserError for one that needs to be told more."""
    made: dict[str, Any] = {"__doc__": f"{cls.__name__} with its defaults.", "__module__": cls.__module__}
    if kind == "callbacks":
        cls().check()
        made["callback"] = cls
    else:
        part = cls()
        if kind != "engine":  # which says itself that it is not here, and is skipped as that
            part.check()
        made |= {SUITES[kind].part: part, **_more(kind, part, beside)}
    return type(f"Test{cls.__name__}", (SUITES[kind],), made)


def _more(kind: str, part: Any, beside: Beside) -> dict[str, Any]:
    """What the suite needs beside the part itself."""
    if kind in ("optim", "model") and not beside.engines:
        raise UserError("no engine works here to run it on: toyexp doctor")
    if kind == "optim":
        return {"engine": beside.engines[0]}
    if kind == "model":
        size = beside.fitted(part).parameters()
        if size > MOST:
            raise UserError(f"its defaults are {size:,} numbers, and the suite takes a small one")
        return {"engines": tuple(beside.engines), **_reading(part, beside)}
    if kind == "recipe":
        return _trained_by(part, beside)
    if kind == "format":
        return {"models": _held_by(part, beside)}
    return {}


def _reading(model: Model, beside: Beside) -> dict[str, Any]:
    """The data of a suite's model."""
    dataset = beside.dataset(model.reads)
    return {"dataset": lambda suite: dataset}


def _trained_by(recipe: Recipe, beside: Beside) -> dict[str, Any]:
    """The first model that the recipe can plan with its defaults, and data for it."""
    refused = UserError(f"no model here reads {' or '.join(map(str, recipe.reads))}")
    for cls in (cls for cls in beside.models if cls.reads in recipe.reads):
        try:
            made = {"recipe": recipe, "model": cls(), **_reading(cls(), beside)}
            type("Tried", (RecipeSuite,), made)().planned()
        except UserError as error:
            refused = error
        else:
            return made
    raise refused


def _held_by(form: Format, beside: Beside) -> list[Model]:
    """Models that the format takes, small ones alone."""
    refused, found = UserError("no model is here to write"), []
    for cls in beside.models:
        try:
            model = beside.fitted(cls())
            form.check_model(model)
        except UserError as error:
            refused = error
        else:
            found += [model] if model.parameters() <= MOST else []
    if not found:
        raise refused
    return found[:3]
