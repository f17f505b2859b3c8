"""The model that a recipe takes from its base file, in place of one that the settings describe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig

from toyexp.base.errors import UserError
from toyexp.config.build import made, resolved, typed
from toyexp.config.keys import Keys
from toyexp.contract.compatibility import misfit, suited
from toyexp.contract.model import Model, sizes_of
from toyexp.contract.recipe import Recipe
from toyexp.formats.gguf.open_model import model_in
from toyexp.formats.gguf.source import opened


@dataclass(frozen=True)
class Base:
    """A model in a file, and the settings of `model` that a run on it has."""

    model: Model
    settings: Mapping[str, Any]  # as in the file, but for `context`, the length of the run's own training windows


def base_of(cfg: DictConfig, given: Sequence[Override], keys: Keys) -> Base | None:
    """The base of the recipe, if it has one; UserError for a file that no model here can represent.

    Raises UserError too where anything of `model` but its context was given, and is not so in the file.
    """
    cls, described, data = (keys.classes[kind][0] for kind in ("recipe", "model", "data"))
    if cls.base_file is Recipe.base_file:
        return None
    recipe: Recipe = made(cls, typed(cls, resolved(cfg)["recipe"], "recipe"))
    if unfit := misfit(recipe, described()):
        raise UserError(f"{unfit}{suited(by_key(given), recipe, described(), data, keys.registry)}")
    recipe.check()
    path = recipe.base_file()
    if path is None:
        return None
    model = recipe.of_base(model_in(opened(str(path)), keys.registry, recipe.reads))
    settings = {"name": model.name, **sizes_of(model)}
    for override in given:
        _require_same(override, cfg, f"recipe={recipe.name} takes the model from {path}, a {model.name}", model)
    if model.context:
        settings["context"] = context = cfg.model.get("context", model.context)
        if isinstance(context, int) and context > model.context:
            raise UserError(
                f"model.context={context}: {path} holds a model for up to {model.context} positions; "
                f"use model.context={model.context} or less"
            )
    return Base(model, settings)


def _require_same(override: Override, cfg: DictConfig, taken: str, model: Model) -> None:
    """Raises UserError for a setting of the model that is another in the file."""
    kind, _, key = override.key_or_group.partition(".")
    if kind != "model" or key == "context":
        return
    held = sizes_of(model)
    wanted, there = (cfg.model[key], held.get(key)) if key else (override.value(), model.name)
    if wanted != there:
        but = f" with {key}={there}" if key in held else ""
        raise UserError(f"{override.input_line}: {taken}{but}; leave {override.key_or_group} out")


def by_key(given: Sequence[Override]) -> dict[str, str]:
    """The settings as they were typed, by their keys."""
    return {o.key_or_group: str(o.input_line) for o in given}
