"""Settings with the types and defaults of the classes whose fields they are."""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from toyexp.base.errors import UserError
from toyexp.base.home import expanded
from toyexp.config.schema import schema
from toyexp.config.top_level import PARTS


def without_hydra(cfg: DictConfig) -> DictConfig:
    """A copy with our keys alone."""
    return OmegaConf.masked_copy(cfg, [str(k) for k in cfg if k != "hydra"])


def resolved(cfg: DictConfig) -> dict[str, Any]:
    """Our keys as plain data, with every ${key} in place; UserError for what cannot be."""
    try:
        found = OmegaConf.to_container(without_hydra(cfg), resolve=True, throw_on_missing=True)
        return typing.cast("dict[str, Any]", found)
    except OmegaConfBaseException as error:
        raise in_plain_words(getattr(error, "full_key", None) or "the config", error) from None


def typed(cls: type, node: Mapping[str, Any], where: str) -> dict[str, Any]:
    """`node` with the types and defaults of `cls`: a person's own config file may have come without its schema."""
    dot = f"{where}." if where else ""
    shape = cls if where in ("", "sweep") else schema(cls, str(node["name"]))
    try:
        merged = OmegaConf.merge(OmegaConf.structured(shape), node)
        values = typing.cast("dict[str, Any]", OmegaConf.to_container(merged, throw_on_missing=True))
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None) or getattr(error, "key", None)
        raise in_plain_words(f"{dot}{key}={node.get(str(key))}", error) from None
    for key, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{dot}{key}={value}: must be a finite number")
    texts = [key for key, value in values.items() if isinstance(value, str) and value.startswith("~/")]
    return values | {key: expanded(values[key]) for key in texts if where in PARTS}


def made(cls: type, node: Mapping[str, Any]) -> Any:
    """An instance of a dataclass from its settings."""
    return cls(**{f.name: node[f.name] for f in dataclasses.fields(cls)})


def in_plain_words(what: str, error: BaseException) -> UserError:
    """OmegaConf's complaint about a value as one of ours."""
    from toyexp.config.mistakes import plain_words

    return UserError(f"{what}: {plain_words(error)}")
