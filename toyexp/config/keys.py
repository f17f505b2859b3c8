"""Valid configuration keys: those of all available parts (model, data, ...), or only of the parts that a run uses."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from toyexp.config.paths import CONF
from toyexp.config.schema import Root, Source, all_part_classes, part_classes
from toyexp.config.top_level import LAUNCHER_SETTINGS, PARTS, Sweep
from toyexp.plugins.registry import Registry
from toyexp.plugins.rules import type_hints


@dataclass(frozen=True)
class Keys:
    """Valid configuration keys.

    `classes` maps each section of the configuration to dataclasses. The names of their fields are the keys that are
    valid in this section. A section is named by its key, such as model or callbacks.cosine; "" is the top level.
    """

    registry: Registry
    classes: Mapping[str, Sequence[type[Any]]]
    offers: Mapping[str, Mapping[str, type]]  # classes by kind and name; presets have none

    @classmethod
    def from_registry(cls, registry: Registry) -> Keys:
        """Return the valid keys for all available parts (models, data plugins, recipes, ...)."""
        offers = all_part_classes(registry)
        return cls(registry, _classes_by_key(offers), offers)

    def restrict(self, cfg: DictConfig) -> Keys:
        """Return only the keys of the parts (model, data, ...) that a configuration chooses; ignore unknown parts."""
        chosen = {kind: [n for n in chosen_names(cfg, kind) if n in offered] for kind, offered in self.offers.items()}
        return replace(
            self, classes=_classes_by_key({k: {n: self.offers[k][n] for n in names} for k, names in chosen.items()})
        )

    def unknown_keys(self, cfg: DictConfig) -> list[str]:
        """Return the keys of a configuration, at the top level and in its parts, that are not valid."""
        unknown = sorted({str(key) for key in cfg} - self.key_names("") - {"hydra"})
        for where in (w for w, classes in self.classes.items() if w and classes and not w.startswith("sweep")):
            present = {str(key) for key in OmegaConf.select(cfg, where)}
            unknown += [f"{where}.{key}" for key in sorted(present - self.key_names(where))]
        return unknown

    def key_names(self, where: str) -> set[str]:
        """Return the keys that are valid below the key `where`, such as model, or at the top level ("")."""
        names = {name for cls in self.classes.get(where, ()) for name in self.field_names(cls)}
        return names if where == "" or where.partition(".")[0] == "sweep" else names | {"name"}

    @staticmethod
    def field_names(cls: type) -> set[str]:
        """Return the names of a class's settings."""
        return {f.name for f in dataclasses.fields(cls)}

    def types(self, key: str) -> set[Any]:
        """Return the types that the classes declare for a setting, such as {str, NoneType}; empty if it is unknown."""
        where, _, name = key.rpartition(".")
        classes: list[type] = [cls for cls in self.classes.get(where, ()) if name in self.field_names(cls)]
        hints = [type_hints(cls)[name] for cls in classes]
        unions = (typing.Union, types.UnionType)
        return {t for h in hints for t in (typing.get_args(h) if typing.get_origin(h) in unions else (h,))}

    def is_list(self, key: str) -> bool:
        """Return True if a setting is a list, as in callbacks=[...] or recipe.targets=[...]."""
        return key == "callbacks" or any(typing.get_origin(t) is list for t in self.types(key))

    def is_mapping(self, key: str) -> bool:
        """Return True if a setting is a mapping, as in optim.groups={token_embd.weight: {lr: 0.001}}."""
        return any(typing.get_origin(t) is dict for t in self.types(key))

    def hydra_overrides(self, typed: Sequence[Override]) -> list[str]:
        """Return the overrides `typed` in Hydra's syntax.

        A single value of a list setting is put in brackets. A key inside a mapping setting gets the prefix ++, because
        the mapping may not have that key yet.
        """
        words = []
        for override in typed:
            key, equals, value = str(override.input_line).partition("=")
            if equals and "." in key and self.is_mapping(override.key_or_group) and key[0] != "+":
                key = f"++{key}"
            elif isinstance(single_value(override), str | int | float) and self.is_list(override.key_or_group):
                value = f"[{value}]"
            words.append(key + equals + value)
        return words


def _classes_by_key(offers: Mapping[str, Mapping[str, type]]) -> dict[str, Sequence[type]]:
    """Return the mapping `Keys.classes` for some parts.

    `offers` maps a kind of part, such as model, to {name: class}.
    """
    callbacks = {f"callbacks.{name}": [cls] for name, cls in offers["callbacks"].items()}
    parts = {kind: list(offers[kind].values()) for kind in PARTS}
    launchers = {f"sweep.{launcher}": [cls] for launcher, cls in LAUNCHER_SETTINGS.items()}
    return {"": [Root], "sweep": [Sweep], **launchers, **parts, **callbacks}


def chosen_names(cfg: DictConfig, kind: str) -> list[str]:
    """Return the names of the parts that a configuration chooses for `kind`, such as model or callbacks."""
    node = None if OmegaConf.is_missing(cfg, kind) else cfg.get(kind)
    if not isinstance(node, DictConfig):
        return []
    return [str(name) for name in node] if kind == "callbacks" else [str(node["name"])] if "name" in node else []


def single_value(override: Override) -> Any:
    """Return the value of an override; None if it sweeps over several values or deletes its key."""
    return None if override.is_sweep_override() or override.is_delete() else override.value()


def mapping_overrides(typed: Sequence[Override]) -> list[Override]:
    """Return the overrides whose value is a mapping, as in optim.groups={...}."""
    return [override for override in typed if isinstance(single_value(override), dict)]


def choices(kind: str, registry: Registry, source: Source | None = None) -> set[str]:
    """Return the names that can be chosen for `kind`, such as model: plugins, and presets in the config directories."""
    roots = [d / kind for d in (source.directories if source else [CONF])]
    presets = {p.relative_to(root).with_suffix("").as_posix() for root in roots for p in root.rglob("*.yaml")}
    return part_classes(kind, registry).keys() | presets
