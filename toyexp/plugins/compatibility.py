"""Checks which recipes can train which models, by the kinds of data that they declare."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from toyexp.base.errors import UserError
from toyexp.base.formatting import align_columns
from toyexp.interfaces.data import Data
from toyexp.interfaces.kind import Kind
from toyexp.interfaces.model import Model
from toyexp.interfaces.recipe import Recipe, Setup
from toyexp.plugins.registry import Registry


def incompatibility(recipe: Recipe, model: Model) -> str | None:
    """Return why this recipe cannot train this model, on any engine; None if it can."""
    if reason := model_mismatch(recipe, model):
        return reason
    missing = set(recipe.needs_tensors) - {t.name for t in model.tensors()} if recipe.needs_tensors else set()
    return f"recipe={recipe.name} needs {min(missing)}, which model={model.name} does not have" if missing else None


def kind_mismatch(reader: str, kind: Kind, data: Data | type[Data]) -> str | None:
    """Return why `reader`, which reads data of this kind, cannot read `data`; None if it can."""
    return None if data.gives == kind else f"{reader} reads {kind}; data={data.name} gives {data.gives}"


def matching_data(kind: Kind, registry: Registry) -> list[str]:
    """Return the names of data plugins of a kind. The first is the default."""
    return [name for name, cls in registry.classes("data").items() if cls.gives == kind]


def model_mismatch(recipe: Recipe, model: Model) -> str | None:
    """Return why the recipe cannot train models of this kind; None if it can."""
    if model.reads in recipe.reads:
        return None
    kinds = " or ".join(map(str, recipe.reads))
    return f"recipe={recipe.name} trains models that read {kinds}; model={model.name} reads {model.reads}"


def suggest_command(
    overrides_by_key: Mapping[str, str], recipe: Recipe, model: Model, data: type[Data], registry: Registry
) -> str:
    """Return a command that works, as a hint: it keeps the typed data, or else the recipe, and replaces the rest.

    `overrides_by_key` are the typed ones. A recipe that was not typed is kept if the kind of data is its first one; a
    typed recipe if it reads that kind.
    """
    data_overrides = [
        shlex.quote(overrides_by_key[key]) for key in sorted(overrides_by_key) if key.partition(".")[0] == "data"
    ]
    kind = model.reads if model.reads in recipe.reads else recipe.reads[0]
    if "data" in overrides_by_key:
        kind = data.gives
    is_kept = kind in (recipe.reads if "recipe" in overrides_by_key else recipe.reads[:1])
    recipes = [recipe.name] if is_kept else [n for n, cls in registry.classes("recipe").items() if cls.reads[0] == kind]
    others = [n for n, cls in registry.classes("model").items() if cls.reads == kind]
    models = [model.name] if model.reads == kind else others
    overrides = (
        data_overrides if "data" in overrides_by_key else [f"data={name}" for name in matching_data(kind, registry)[:1]]
    )
    if not (recipes and models and overrides):
        return ""
    return f"; try: toyexp recipe={recipes[0]} model={models[0]} {' '.join(overrides)}{registry.plugins_override}"


@dataclass(frozen=True)
class Cell:
    """Combination of a recipe and a model, both with default settings."""

    recipe: str
    model: str
    reason: str | None  # why it cannot train
    missing: str | None  # the error about a setting that is required first


def cells(registry: Registry) -> Iterator[Cell]:
    """Yield every combination of recipe and model."""
    recipes, models = (sorted(registry.classes(kind).items()) for kind in ("recipe", "model"))
    for recipe, r in recipes:
        for model, m in models:
            reason = incompatibility(r(), m())
            yield Cell(recipe, model, reason, None if reason else _missing_setting(r(), m()))


def _missing_setting(recipe: Recipe, model: Model) -> str | None:
    """Return the error of a plan with default settings, or None."""
    try:
        recipe.check()
        recipe.plan(model, Setup(model.reads.inputs(1), rows=1))
    except UserError as error:
        return str(error)
    except Exception:  # a plugin's plan may need sizes from the data, which only a run has
        return None
    return None


def table(registry: Registry) -> list[str]:
    """Return the matrix as lines, a row per recipe and a column per model, followed by the reasons."""
    rows: dict[str, dict[str, str]] = {}
    reasons: dict[str, None] = {}
    for cell in cells(registry):
        mark = "no" if cell.reason else "set" if cell.missing else "yes"
        rows.setdefault(cell.recipe, {})[cell.model] = mark
        if cell.reason:
            reasons[f"no   {cell.reason}"] = None
        elif cell.missing:
            reasons[f"set  recipe={cell.recipe} model={cell.model}: {cell.missing}"] = None
    lines = [("recipe", *next(iter(rows.values()), {}))]
    lines += [(recipe, *marks.values()) for recipe, marks in rows.items()]
    hint = f"Engines that work here: toyexp doctor{registry.plugins_override}"
    return [*align_columns(lines), "", *sorted(reasons), "", hint]
