"""What goes with what: recipe x model, from what each class says of itself."""

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
    """Why this recipe cannot train this model, on any engine; None where it can."""
    if reason := model_mismatch(recipe, model):
        return reason
    missing = set(recipe.needs_tensors) - {t.name for t in model.tensors()} if recipe.needs_tensors else set()
    return f"recipe={recipe.name} needs {min(missing)}, which model={model.name} does not have" if missing else None


def kind_mismatch(reader: str, kind: Kind, data: Data | type[Data]) -> str | None:
    """Why `reader`, which reads this kind of data, cannot read `data`; None where it can."""
    return None if data.gives == kind else f"{reader} reads {kind}; data={data.name} gives {data.gives}"


def matching_data(kind: Kind, registry: Registry) -> list[str]:
    """The names of the data of a kind; the first of them is taken where none is named."""
    return [name for name, cls in registry.classes("data").items() if cls.gives == kind]


def model_mismatch(recipe: Recipe, model: Model) -> str | None:
    """Why the recipe is for other kinds of models; None where it is not."""
    if model.reads in recipe.reads:
        return None
    kinds = " or ".join(map(str, recipe.reads))
    return f"recipe={recipe.name} trains models that read {kinds}; model={model.name} reads {model.reads}"


def suggest_command(
    typed: Mapping[str, str], recipe: Recipe, model: Model, data: type[Data], registry: Registry
) -> str:
    """What to type instead: data that was typed stays, with a recipe and a model for it; else the recipe stays.

    `typed` has what was typed by its key. A recipe that nobody typed stays where the kind of data is its first, one
    that was typed where it takes that kind.
    """
    own_data = [shlex.quote(typed[key]) for key in sorted(typed) if key.partition(".")[0] == "data"]
    kind = model.reads if model.reads in recipe.reads else recipe.reads[0]
    if "data" in typed:
        kind = data.gives
    fits = kind in (recipe.reads if "recipe" in typed else recipe.reads[:1])
    recipes = [recipe.name] if fits else [n for n, cls in registry.classes("recipe").items() if cls.reads[0] == kind]
    others = [n for n, cls in registry.classes("model").items() if cls.reads == kind]
    models = [model.name] if model.reads == kind else others
    words = own_data if "data" in typed else [f"data={name}" for name in matching_data(kind, registry)[:1]]
    if not (recipes and models and words):
        return ""
    return f"; try: toyexp recipe={recipes[0]} model={models[0]} {' '.join(words)}{registry.loading}"


@dataclass(frozen=True)
class Cell:
    """One combination, all settings at their defaults."""

    recipe: str
    model: str
    refused: str | None  # why it can never train
    setting: str | None  # what has to be set first, in the words of the error that says so


def cells(registry: Registry) -> Iterator[Cell]:
    """Every recipe with every model."""
    recipes, models = (sorted(registry.classes(kind).items()) for kind in ("recipe", "model"))
    for recipe, r in recipes:
        for model, m in models:
            refused = incompatibility(r(), m())
            yield Cell(recipe, model, refused, None if refused else _setting(r(), m()))


def _setting(recipe: Recipe, model: Model) -> str | None:
    """What a plan of nothing but defaults lacks."""
    try:
        recipe.check()
        recipe.plan(model, Setup(model.reads.inputs(1), rows=1))
    except UserError as error:
        return str(error)
    except Exception:  # a plugin's plan may need the sizes that come from the data; a run has them
        return None
    return None


def table(registry: Registry) -> list[str]:
    """The matrix in lines: a row per recipe, a column per model, and below it the reasons."""
    rows: dict[str, dict[str, str]] = {}
    reasons: dict[str, None] = {}
    for cell in cells(registry):
        mark = "no" if cell.refused else "set" if cell.setting else "yes"
        rows.setdefault(cell.recipe, {})[cell.model] = mark
        if cell.refused:
            reasons[f"no   {cell.refused}"] = None
        elif cell.setting:
            reasons[f"set  recipe={cell.recipe} model={cell.model}: {cell.setting}"] = None
    lines = [("recipe", *next(iter(rows.values()), {}))]
    lines += [(recipe, *marks.values()) for recipe, marks in rows.items()]
    return [
        *align_columns(lines),
        "",
        *sorted(reasons),
        "",
        f"Which engines work here: toyexp doctor{registry.loading}",
    ]
