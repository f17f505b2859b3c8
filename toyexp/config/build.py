"""The parts of a run from its settings: each from its own class, and none of them sees another's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig

from toyexp.base.blame import blamed
from toyexp.base.errors import UserError
from toyexp.base.packages import told_by
from toyexp.config.keys import Keys
from toyexp.config.schema import Root, class_of
from toyexp.config.top_level import PARTS
from toyexp.config.typed import made, resolved, typed
from toyexp.contract.data import Data
from toyexp.contract.model import Model
from toyexp.contract.recipe import Recipe
from toyexp.contract.registry import Registry
from toyexp.training.settings import Settings


def parts_of(cfg: DictConfig, keys: Keys) -> dict[str, Any]:
    """The parts of a run by their names in Config, each checked, but for the engine."""
    plain = typed(Root, resolved(cfg), "")
    del plain["sweep"]  # is about many runs, and no part of any
    classes = {where: found[0] for where, found in keys.classes.items() if found}
    for kind in PARTS:
        plain[kind] = typed(classes[kind], plain[kind], kind)
    for name, node in plain["callbacks"].items():
        plain["callbacks"][name] = typed(classes[f"callbacks.{name}"], node, f"callbacks.{name}")
    parts = {kind: made(classes[kind], plain[kind]) for kind in PARTS if kind != "engine"}
    callbacks = {name: made(classes[f"callbacks.{name}"], node) for name, node in plain["callbacks"].items()}
    settings = made(Settings, plain)
    check_parts({"settings": settings, **{f"{kind}={plain[kind]['name']}": part for kind, part in parts.items()}})
    batch_size, accumulate = plain["batch_size"], plain["optim"]["accumulate"]
    if batch_size % accumulate:
        raise UserError(f"optim.accumulate={accumulate} does not divide batch_size={batch_size} into micro-batches")
    check_parts({f"callbacks.{name}": callback for name, callback in callbacks.items()})
    return {"settings": settings, **parts, "callbacks": callbacks, "plain": plain}


def check_parts(parts: Mapping[str, Any]) -> None:
    """Has each part look at its own settings; what one raises without meaning to is told as its failure."""
    for who, part in parts.items():
        try:
            part.check()
        except (Exception, SystemExit):
            with blamed(who.replace("=", "."), "while its settings were checked"), told_by(who):
                raise


def saved_parts(plain: Mapping[str, Any], registry: Registry) -> tuple[Model, Data, Recipe]:
    """The model, data and recipe of a run's saved configuration, checked; UserError for what is not here any more."""
    parts = []
    for kind in ("model", "data", "recipe"):
        node = plain.get(kind)
        if not isinstance(node, Mapping) or "name" not in node:
            raise UserError(f"its configuration holds no {kind}")
        cls = class_of(kind, node, registry)
        parts.append(made(cls, typed(cls, node, kind)))
        parts[-1].check()
    return parts[0], parts[1], parts[2]
