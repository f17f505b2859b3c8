"""Build conformance suites for plugin classes with their default settings, for `toyexp plugins --check`."""

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
from toyexp.interfaces.kind import IMAGES, TOKENS, VECTORS, Kind
from toyexp.interfaces.model import Model
from toyexp.interfaces.recipe import Recipe
from toyexp.testing.data import DataSuite
from toyexp.testing.engines import EngineSuite
from toyexp.testing.formats import FormatSuite
from toyexp.testing.models import ModelSuite
from toyexp.testing.objectives import ObjectiveSuite
from toyexp.testing.optimisers import OptimiserSuite
from toyexp.testing.suites import CallbackSuite, PluginSuite, RecipeSuite, tiny_data

CORE_SUITES = (EngineSuite, RecipeSuite, OptimiserSuite, ObjectiveSuite, ModelSuite)
SUITES: Mapping[str, type[PluginSuite]] = {
    suite.kind: suite for suite in (*CORE_SUITES, DataSuite, CallbackSuite, FormatSuite)
}
MOST = 300_000  # maximum parameters of a tested model: its gradients need about a thousand float64 evaluations
VOCAB = 257


@dataclass(frozen=True)
class SuiteParts:
    """Installed engines, models and data for the test of a plugin of another kind.

    For example, a recipe needs a model and data.
    """

    engines: Sequence[Engine]  # engines that work on this machine; an optimiser runs on the first, a model on all
    models: Sequence[type[Model]]  # a recipe is tested with one of them, a format with some
    data: Sequence[type[Data]]  # used for other kinds of data than tokens, images and vectors

    def dataset(self, kind: Kind) -> Dataset:
        """Return tiny data of a kind: built-in data for tokens, images and vectors, otherwise data of a plugin.

        Use the first data plugin of this kind that opens with its default settings. Raise UserError if there is none.
        """
        if kind in (TOKENS, IMAGES, VECTORS):
            return tiny_data(kind, VOCAB)
        for cls in (cls for cls in self.data if cls.gives == kind):
            with contextlib.suppress(UserError):
                data = cls()
                data.check()
                return data.open(None)
        raise UserError(f"the test needs data that gives {kind}; no data plugin opens with its default settings")

    def fit_model(self, model: Model) -> Model:
        """Return the model with its sizes, such as the vocabulary, fitted to tiny data of its kind."""
        return model.fit(self.dataset(model.reads))


def make_suite(kind: str, cls: type, beside: SuiteParts) -> type[PluginSuite]:
    """Return a class of tests for the plugin class `cls` with its default settings.

    `kind` is the kind of the plugin, such as "model". `beside` holds the parts of other kinds that the tests need.
    Raise UserError if the plugin class cannot be tested with its defaults.
    """
    attributes: dict[str, Any] = {"__doc__": f"{cls.__name__} with its defaults.", "__module__": cls.__module__}
    if kind == "callbacks":
        cls().check()
        attributes["callback"] = cls
    else:
        part = cls()
        if kind != "engine":  # an engine whose device is missing is skipped instead
            part.check()
        attributes |= {SUITES[kind].part: part, **_suite_attributes(kind, part, beside)}
    return type(f"Test{cls.__name__}", (SUITES[kind],), attributes)


def _suite_attributes(kind: str, part: Any, beside: SuiteParts) -> dict[str, Any]:
    if kind in ("optim", "model", "objective") and not beside.engines:
        raise UserError("the test needs an engine, and none works on this machine; see: toyexp doctor")
    if kind == "optim":
        return {"engine": beside.engines[0]}
    if kind == "objective":
        return {"engines": tuple(beside.engines)}
    if kind == "model":
        size = beside.fit_model(part).parameters()
        if size > MOST:
            raise UserError(f"the default model has {size:,} parameters; the test needs at most {MOST:,}")
        return {"engines": tuple(beside.engines), **_dataset_attribute(part, beside)}
    if kind == "recipe":
        return _recipe_attributes(part, beside)
    if kind == "format":
        return {"models": _format_models(part, beside)}
    return {}


def _dataset_attribute(model: Model, beside: SuiteParts) -> dict[str, Any]:
    dataset = beside.dataset(model.reads)
    return {"dataset": lambda suite: dataset}


def _recipe_attributes(recipe: Recipe, beside: SuiteParts) -> dict[str, Any]:
    """Return the attributes of a RecipeSuite: the recipe, the first model that it can plan, and data for the model.

    Raise UserError if there is no such model.
    """
    refused = UserError(f"the test needs a model that reads {' or '.join(map(str, recipe.reads))}; none is installed")
    for cls in (cls for cls in beside.models if cls.reads in recipe.reads):
        try:
            attributes = {"recipe": recipe, "model": cls(), **_dataset_attribute(cls(), beside)}
            type("Tried", (RecipeSuite,), attributes)().make_plan()
        except UserError as error:
            refused = error
        else:
            return attributes
    raise refused


def _format_models(form: Format, beside: SuiteParts) -> list[Model]:
    """Return up to three small models that the format supports. Raise UserError if there is none."""
    refused, models = UserError("the test needs a model to write; none is installed"), []
    for cls in beside.models:
        try:
            model = beside.fit_model(cls())
            form.check_model(model)
        except UserError as error:
            refused = error
        else:
            models += [model] if model.parameters() <= MOST else []
    if not models:
        raise refused
    return models[:3]
