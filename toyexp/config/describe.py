"""Describe plugins, engine=auto and presets with their settings, for `toyexp plugins NAME`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from toyexp.base.errors import UserError, nearest, printable
from toyexp.base.formatting import format_value
from toyexp.config.paths import CONF
from toyexp.config.schema import AUTO, AutoEngine
from toyexp.config.top_level import GROUPS
from toyexp.plugins.registry import IN_A_MODULE, Registry
from toyexp.plugins.settings import list_settings


def lines_about(name: str, registry: Registry) -> list[str]:
    """Return lines about each plugin and preset called `name`, or about each plugin of the kind `name`, such as model.

    Each plugin or preset has a title and a line per setting. Raise UserError for an unknown name.
    """
    auto = [f"engine={AUTO}  {(AutoEngine.__doc__ or '').splitlines()[0]}", *_settings("engine.", AutoEngine)]
    blocks = [*_plugins(name, registry), *([auto] if name == AUTO else []), *_presets(name, registry)]
    if not blocks:
        names = {n for offers in registry.offers.values() for n in offers} | {*registry.offers, AUTO}
        presets = {path.stem for kind in GROUPS for path in (CONF / kind).glob("*.yaml")}
        best = nearest(name, names | presets)
        hint = f"did you mean {best}?" if best else f"list all names: toyexp plugins{registry.plugins_override}"
        hint += "" if best or registry.modules else f"; {IN_A_MODULE}"
        raise UserError(f"plugins {printable(name)}: unknown name; {hint}")
    return [line for block in blocks for line in block]


def _plugins(name: str, registry: Registry) -> Iterator[list[str]]:
    for kind, offers in registry.offers.items():
        for offer in offers.values() if name == kind else filter(None, [offers.get(name)]):
            label, prefix = {
                "command": (f"toyexp {offer.name}", ""),
                "format": (f"export --type {offer.name}", ""),
                "callbacks": (f"callbacks={offer.name}", f"callbacks.{offer.name}."),
            }.get(kind, (f"{kind}={offer.name}", f"{kind}."))
            yield [f"{label}  {offer.help}  [{offer.plugin}, {offer.package}]", *_settings(prefix, offer.cls)]


def _presets(name: str, registry: Registry) -> Iterator[list[str]]:
    for path in sorted(CONF.glob(f"*/{name}.yaml")):
        kind, text = path.parent.name, path.read_text(encoding="utf-8")
        body = yaml.safe_load(text)
        chosen = body.pop("defaults", [])
        comments = [line[1:].strip() for line in text.splitlines() if line.startswith("#") and "@package" not in line]
        about = " ".join(line for line in comments if not line.startswith("toyexp "))
        head = f"{kind}={name}  {about}  [conf/{kind}/{path.name}]"
        base = next((part for part in chosen if isinstance(part, str) and part != "_self_"), "")
        if kind == "callbacks":
            yield [head, f"  callbacks=[{','.join(chosen)}]"]
        elif base in registry.offers.get(kind, {}):
            yield [head, f"  {kind}={base} with", *_settings(f"{kind}.", registry.get(kind, base), body)]
        else:
            commands = (line for line in comments if line.startswith("toyexp "))
            yield [head, *(f"  {line}" for line in (*commands, *_choices(chosen), *_flatten(body)))]


def _settings(prefix: str, cls: type, values: Mapping[str, Any] | None = None) -> list[str]:
    """Return a line per setting of a class, with its default or the value in `values`."""
    shown = [(s, (values or {}).get(s.name, s.default)) for s in list_settings(cls)]
    return [f"  {f'{prefix}{s.name}={format_value(value)}':<34} {s.comment}" for s, value in shown]


def _choices(defaults: list[Any]) -> Iterator[str]:
    for part in defaults:
        for key, value in part.items() if isinstance(part, dict) else ():
            yield f"{str(key).rpartition('/')[2]}={format_value(value)}"


def _flatten(node: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in node.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _flatten(value, f"{name}.")
        else:
            yield f"{name.replace('hydra.sweeper.params.', '-m ')}={format_value(value)}"
