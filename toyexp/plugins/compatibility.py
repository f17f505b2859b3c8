"""Check which recipes can train which models, by the kinds of data that they declare."""

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
    """Return a sentence on why this recipe cannot train this model on any engine, or None if it can."""
    if reason := model_mismatch(recipe, model):
        return reason
    if model.engines and recipe.starts_from == "base":
        return f"recipe={recipe.name} starts from a GGUF file, which model={model.name} does not have"
    missing = set(recipe.needs_tensors) - {t.name for t in model.tensors()} if recipe.needs_tensors else set()
    return f"recipe={recipe.name} needs {min(missing)}, which model={model.name} does not have" if missing else None


def kind_mismatch(reader: str, kind: Kind, data: Data | type[Data]) -> str | None:
    """Return a sentence if `data` does not give data of this kind, else None.

    `reader` is the subject of the sentence, such as `model=gpt2`.
    """
    return None if data.gives == kind else f"{reader} reads {kind}; data={data.name} gives {data.gives}"


def engine_mismatch(engine: str, model: Model) -> str | None:
    """Return a sentence if this engine cannot run the model, else None."""
    if not model.engines or engine in model.engines:
        return None
    return f"engine={engine}: cannot run model={model.name}; type engine={model.engines[0]}"


def matching_data(kind: Kind, registry: Registry) -> list[str]:
    """Return the names of the data plugins that give data of this kind. The first is the default."""
    return [name for name, cls in registry.classes("data").items() if cls.gives == kind]


def model_mismatch(recipe: Recipe, model: Model) -> str | None:
    """Return a sentence if the model reads a kind of data that the recipe does not support, else None."""
    if model.reads in recipe.reads:
        return None
    kinds = " or ".join(map(str, recipe.reads))
    return f"recipe={recipe.name} trains models that read {kinds}; model={model.name} reads {model.reads}"


def suggest_command(
    overrides_by_key: Mapping[str, str], recipe: Recipe, model: Model, data: type[Data], registry: Registry
) -> str:
    """Return the end of an error message about parts that do not fit together: `; try: ` and a command that works.

    Return an empty string if no command works. `overrides_by_key` holds the overrides that the user typed; `recipe`,
    `model` and `data` are the parts that do not fit. The command is chosen as follows:

    1. Data: if the user typed `data=...`, keep it. Otherwise use the default data of the kind that the model reads or,
       if the recipe cannot train on that kind, of the first kind that the recipe reads.
    2. Model: keep it if it reads the kind of these data. Otherwise use the first model that does. A recipe that takes
       the model from a file gets the placeholder `recipe.base=MODEL.gguf`.
    3. Recipe: keep it if it reads this kind of data. Otherwise use the first recipe that prefers this kind, which means
       that it lists the kind first. A recipe that the user did not type is kept only if it prefers this kind.
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
    needs_base = registry.classes("recipe")[recipes[0]].starts_from == "base"
    verb = f"name a base that reads {kind}" if needs_base else "try"
    start = "recipe.base=MODEL.gguf" if needs_base else f"model={models[0]}"
    return f"; {verb}: toyexp recipe={recipes[0]} {start} {' '.join(overrides)}{registry.plugins_override}"


@dataclass(frozen=True)
class Cell:
    """Cell of the compatibility matrix: whether a recipe can train a model, both with default settings."""

    recipe: str
    model: str
    reason: str | None  # why it cannot train
    missing: str | None  # the error about a required setting that has no default


def cells(registry: Registry) -> Iterator[Cell]:
    """Yield a Cell for every combination of a recipe and a model."""
    recipes, models = (sorted(registry.classes(kind).items()) for kind in ("recipe", "model"))
    for recipe, r in recipes:
        for model, m in models:
            reason = incompatibility(r(), m())
            yield Cell(recipe, model, reason, None if reason else _missing_setting(r(), m()))


def _missing_setting(recipe: Recipe, model: Model) -> str | None:
    """Plan a run of recipe and model with default settings. Return the message if that raises UserError, else None."""
    try:
        recipe.check()
        model.check()
        recipe.plan(model, Setup(model.reads.inputs(1), rows=1))
    except UserError as error:
        return str(error)
    except Exception:  # a plugin's plan may need sizes from the data, which only a run has
        return None
    return None


def table(registry: Registry) -> list[str]:
    """Return the compatibility matrix as lines: a row per recipe and a column per model.

    A cell is "yes", "no" or "set" (a setting must be typed first). Further lines give the reason for each "no" and
    "set".
    """
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
