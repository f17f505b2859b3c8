"""What a person can get wrong in a configuration, and what they are told: one or two lines, the right word near."""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from toyexp.base.errors import UserError, choose, nearest
from toyexp.config.chosen import misplaced
from toyexp.config.schema import (
    AUTO,
    GROUPS,
    PARTS,
    AutoEngine,
    Root,
    Source,
    class_of,
    compose_raw,
    conf_dir,
    types_of,
)
from toyexp.config.top_level import HYDRA_KEYS, LAUNCHERS, top_level
from toyexp.config.trust import CODE, names_code
from toyexp.contract.registry import NAMES_CODE, Registry

# Keys that are gone, and what stands in their place.
MOVED = {
    "recipe.low_memory": "is the engine's now: engine.packed=true on cpu, cuda and mps; the ggml engines do so anyway"
}


def parse(overrides: Sequence[str]) -> list[Override]:
    """Hydra's reading of the command line; UserError for what it cannot read."""
    parser = OverridesParser.create()
    parsed = []
    for text in overrides:
        try:
            override = parser.parse_overrides([text])[0]
        except HydraException:
            raise UserError(_syntax(text)) from None
        if not override.key_or_group:
            raise UserError(_syntax(text))
        parsed.append(override)
    return parsed


def replaced(typed: Sequence[Override]) -> list[str]:
    """A warning of each setting that was typed twice, with another value: as in Hydra the last one counts."""
    last = {o.key_or_group: o for o in typed}
    return [
        f"{o.input_line}: {last[o.key_or_group].input_line}, which comes later, takes its place"
        for o in typed if o.input_line != last[o.key_or_group].input_line
    ]  # fmt: skip


def _syntax(text: str) -> str:
    key, equals, value = text.partition("=")
    if not equals:
        return f"{text!r}: cannot be read; a setting is key=value, such as steps=100"
    if not key.strip("+~"):
        return f"{text!r}: a setting needs a key before '=', such as steps=100"
    if value.endswith("()"):
        return f"{text!r}: {value} holds no value; several are {key}=1,2,3"
    if key[0] in "\"'":
        return f'{text!r}: the quotes belong around the value alone: key="value"'
    if value.count("[") != value.count("]") or value.count("{") != value.count("}"):
        return f"{text!r}: a bracket is not closed; a list is {key}=[a,b]"
    if value.count('"') % 2 or value.count("'") % 2:
        return f"{text!r}: a quote is not closed"
    return f"{text!r}: cannot be read; put quotes around a value with special characters: '{key}=\"{value}\"'"


def check_override(override: Override, registry: Registry, source: Source) -> None:
    """Raises UserError for what Hydra would accept without effect, or refuse in words of its own."""
    key, line = override.key_or_group, str(override.input_line)
    kind, *rest = key.split(".")
    code = next((part for part in (kind, *rest) if part in NAMES_CODE), None) or names_code(_value(override))
    if code is not None:
        raise UserError(f"{line}: {code} {CODE}")
    if key.replace("/", ".").startswith(("hydra.launcher", "hydra.sweeper")):
        raise UserError(
            f"{line}: toyexp runs the jobs of a sweep itself: -m key=a,b, with sweep.launcher={', '.join(LAUNCHERS)} "
            "and sweep.jobs=4"
        )
    if override.package is not None:
        raise UserError(f"{line}: '@' has no meaning here; write {key}={override.get_value_element_as_str()}")
    if override.is_sweep_override():
        listed = f"{key}=[{line.partition('=')[2]}] is a list, or " if holds_list(key, registry) else ""
        raise UserError(f"{line}: several values; {listed}add -m to sweep over them")
    if line.endswith("=") and key not in GROUPS:
        _check_empty(key, line, registry)
    _check_number(override, line, registry)
    if kind.split("/")[0] == "hydra":
        if key not in HYDRA_KEYS:
            raise unknown_key(key, None, registry)
        return
    if "/" in key:
        raise UserError(f"unknown key {key}; did you mean {key.replace('/', '.')}?")
    if override.is_delete():
        if kind != "callbacks" or len(rest) != 1:
            raise UserError(f"{line}: only callbacks can be dropped, such as '~callbacks.progress'")
    elif key in GROUPS:
        _check_choice(override, line, registry, source)
    elif kind in GROUPS and rest:
        depth = 2 if kind == "callbacks" else 1
        if len(rest) < depth and rest[0] not in registry.offers[kind]:
            raise unknown_key(key, None, registry)
        if len(rest) < depth:
            raise UserError(f"{line}: give a callback's settings one by one ({key}.<setting>=...); add callbacks by "
                            f"name: callbacks=[default,{rest[0]}]")  # fmt: skip
        if len(rest) > depth:
            raise UserError(f"{line}: {'.'.join([kind, *rest[:depth]])} holds one value, not keys of its own")
        if rest[-1] == "name":
            named = "callbacks=[...]" if kind == "callbacks" else f"{kind}={override.get_value_element_as_str()}"
            raise UserError(f"{line}: cannot be set; choose by name: {named}")
    elif kind == "sweep":
        _check_sweep(key, line)
    elif rest and kind in valid_keys(None, registry, ""):
        raise UserError(f"{line}: {kind} holds one value: {kind}=...")


def in_lists(parsed: Sequence[Override], registry: Registry) -> list[str]:
    """The settings as Hydra takes them: one value of a list stands in brackets, a mapping's keys may all be new."""
    words = []
    for override in parsed:
        key, equals, value = str(override.input_line).partition("=")
        held = types_of(override.key_or_group, registry) if equals else set()
        if "." in key and any(typing.get_origin(t) is dict for t in held) and key[0] != "+":
            key = f"++{key}"
        elif isinstance(_value(override), str | int | float) and holds_list(override.key_or_group, registry):
            value = f"[{value}]"
        words.append(key + equals + value)
    return words


def holds_list(key: str, registry: Registry) -> bool:
    """Whether a setting holds a list: callbacks=[...], recipe.targets=[...]."""
    return key == "callbacks" or any(typing.get_origin(t) is list for t in types_of(key, registry))


def _check_empty(key: str, line: str, registry: Registry) -> None:
    """Raises UserError for a setting without a value; a key that nobody knows is told by others."""
    known, part = types_of(key, registry), key.partition(".")[0]
    if known or part == "hydra":
        text = f"; an empty text is \"{line}''\"" if str in known and part == "callbacks" else ""
        raise UserError(f"{line}: is empty (a variable that is not set?); leave it out for the default{text}")


def _check_number(override: Override, line: str, registry: Registry) -> None:
    """Raises UserError for a number that would be taken as another: 2 as true, and 1e-400, which floats lack, as 0."""
    value, known = _value(override), types_of(override.key_or_group, registry)
    if isinstance(value, int) and value not in (0, 1) and known == {bool}:
        raise UserError(f"{line}: must be true or false")
    if isinstance(value, float) and not value and re.search("[1-9]", re.split("[eE]", line.partition("=")[2])[0]):
        raise UserError(f"{line}: is too near to 0 for a number here; write 0, or one that is larger")


def _check_sweep(key: str, line: str) -> None:
    if key in ("sweep", "sweep.submitit"):
        raise UserError(f"{line}: give its settings one by one: {key}.<setting>=...")
    if key not in _sweep_keys():
        raise _unknown_sweep_key(key)


def _sweep_keys() -> set[str]:
    return {key for key, _ in top_level() if key.startswith("sweep.")}


def _unknown_sweep_key(key: str) -> UserError:
    keys = _sweep_keys()
    best = next((k for k in keys if k.endswith("." + key.rpartition(".")[2])), None) or nearest(key, keys)
    return UserError(f"unknown key {key}; " + (f"did you mean {best}?" if best else choose("", keys)))


def _value(override: Override) -> Any:
    return None if override.is_sweep_override() or override.is_delete() else override.value()


def _check_choice(override: Override, line: str, registry: Registry, source: Source) -> None:
    kind, wanted = override.key_or_group, override.value()
    choices = valid_choices(kind, registry, source)
    if line.startswith("+"):
        raise UserError(f"{line}: leave out the '+': {line.lstrip('+')}")
    if isinstance(wanted, list) and kind != "callbacks":
        several = f"; to run several, sweep: -m {kind}={','.join(map(str, wanted))}" if len(wanted) > 1 else ""
        raise UserError(f"{line}: takes one name, without brackets{several}")
    for name in wanted if isinstance(wanted, list) else [wanted]:
        if not isinstance(name, str) or not name:
            raise UserError(f"{line}: takes a name; {choose('', choices)}")
        if name not in choices:
            raise UserError(f"{registry.missing(kind, name)}; {choose(name, choices)}")


def check_keys(cfg: DictConfig, registry: Registry) -> None:
    """Raises UserError for keys nobody reads, whatever prefix they were typed with, and for config that names code."""
    for key in cfg:
        if str(key) not in valid_keys(cfg, registry, ""):
            raise unknown_key(str(key), cfg, registry)
    for kind in PARTS:
        node = None if OmegaConf.is_missing(cfg, kind) else cfg.get(kind)
        if not isinstance(node, DictConfig) or "name" not in node:
            raise UserError(
                f"the config chooses no {kind}; add {kind}=..., {choose('', valid_choices(kind, registry))}"
            )
        class_of(kind, node, registry)
        for key in node:
            if str(key) not in valid_keys(cfg, registry, kind):
                raise unknown_key(f"{kind}.{key!s}", cfg, registry)
    for name, node in cfg.get("callbacks", {}).items():
        registry.get("callbacks", str(name))
        if not isinstance(node, DictConfig) or node.get("name") != name:
            raise _not_chosen(f"callbacks.{name}")
        for key in node:
            if str(key) not in valid_keys(cfg, registry, f"callbacks.{name}"):
                raise unknown_key(f"callbacks.{name!s}.{key!s}", cfg, registry)


def valid_keys(cfg: DictConfig | None, registry: Registry, where: str) -> set[str]:
    """The keys that may stand under `where` ("" is the top level)."""
    if where == "":
        return {f.name for f in dataclasses.fields(Root)}
    kind, _, name = where.partition(".")
    name = name or _chosen(cfg, kind) or ""
    classes = {name: offer.cls for name, offer in registry.offers.get(kind, {}).items()}
    classes |= {AUTO: AutoEngine} if kind == "engine" else {}
    possible = classes.values() if cfg is None and not name else [classes[name]] if name in classes else []
    return {"name"}.union(*({f.name for f in dataclasses.fields(cls)} for cls in possible))


def _chosen(cfg: DictConfig | None, kind: str) -> str | None:
    """The name of the run's `kind`."""
    node = None if cfg is None or OmegaConf.is_missing(cfg, kind) else cfg.get(kind)
    return str(node.get("name")) if isinstance(node, DictConfig) else None


def valid_choices(kind: str, registry: Registry, source: Source | None = None) -> set[str]:
    """What `kind=` may be: plugins by name, and the presets of the config directories."""
    roots = [d / kind for d in (source.directories if source else [conf_dir()])]
    presets = {p.relative_to(root).with_suffix("").as_posix() for root in roots for p in root.rglob("*.yaml")}
    extra = {AUTO} if kind == "engine" else set()
    return set(registry.offers.get(kind, ())) | presets | extra


def unknown_key(key: str, cfg: DictConfig | None, registry: Registry) -> UserError:
    """An error about a key nobody reads, with the nearest one that somebody does."""
    kind, *rest = key.split(".")
    if key in MOVED:
        return UserError(f"{key}: {MOVED[key]}")
    top = valid_keys(cfg, registry, "")
    if kind == "sweep":
        return _unknown_sweep_key(key)
    if kind.split("/")[0] == "hydra":
        best = None if "/" in key else nearest(key, HYDRA_KEYS)
        if best:
            return UserError(f"unknown key {key}; did you mean {best}?")
        return UserError(f"{key}: has no effect here; of Hydra's settings there are {', '.join(HYDRA_KEYS[:4])}")
    if kind not in top:
        homes = [w for w in _places(cfg) if not rest and kind in valid_keys(cfg, registry, w)]
        homes += [key.rpartition(".")[0] for key in _sweep_keys() if not rest and key.rpartition(".")[2] == kind]
        best = nearest(kind, top)
        if homes or best:
            return UserError(
                f"unknown key {key}; did you mean {'.'.join([homes[0], key] if homes else [str(best), *rest])}?"
            )
        return UserError(f"unknown key {key}; the keys are: {', '.join(sorted(top))}")
    if not rest:
        return UserError(f"{key}: the configuration file has no such key; put 'schema' first in its defaults list")
    if kind == "callbacks":
        if rest[0] not in registry.offers["callbacks"]:
            best = nearest(rest[0], registry.offers["callbacks"])
            hint = f"did you mean {'.'.join([kind, best, *rest[1:]])}?" if best else choose("", registry.offers[kind])
            return UserError(f"unknown key {key}; {hint}")
        if cfg is not None and rest[0] not in cfg.callbacks:
            return _not_chosen(key)
    where, last = ".".join([kind, *rest[:-1]]), rest[-1]
    chosen = f"{kind}={_chosen(cfg, kind)}" if kind != "callbacks" and _chosen(cfg, kind) else where
    owners = [
        n for n, o in registry.offers.get(kind, {}).items() if last in {f.name for f in dataclasses.fields(o.cls)}
    ]
    if owners and kind != "callbacks":
        *others, last_one = sorted(owners)
        belongs = f"{kind}={', '.join(others)} or {last_one}" if others else f"{kind}={last_one}"
        return UserError(f"unknown key {key} with {chosen}; it belongs to {belongs}: add that too")
    valid = valid_keys(cfg, registry, where) - {"name"}
    best = nearest(last, valid)
    if best:
        return UserError(f"unknown key {key}; did you mean {where}.{best}?")
    return UserError(f"unknown key {key}; {chosen} has " + (", ".join(sorted(valid)) or "no settings"))


def _places(cfg: DictConfig | None) -> list[str]:
    """Where this run's settings stand."""
    return [*PARTS, *(f"callbacks.{name}" for name in (cfg.callbacks if cfg is not None else ()))]


def _not_chosen(key: str) -> UserError:
    name = key.split(".")[1]
    return UserError(f"{key}: {name} is not among this run's callbacks; add it, such as callbacks=[default,{name}]")


def explain(error: Exception, parsed: Sequence[Override], registry: Registry, source: Source) -> UserError:
    """Hydra's and OmegaConf's complaint about a configuration, as one of ours."""
    text = str(error)
    if match := re.search(r"Could not override '([^']+)'|Key '[^']+' not in .*\n\s*full_key: (\S+)", text):
        if match[2] == "experiment":
            return misplaced(parsed, source)
        return unknown_key(match[1] or match[2], _groups_only(parsed, source), registry)
    if match := re.search(r"An item is already at '([^']+)'", text):
        return UserError(f"+{match[1]}: that key is there already; leave out the '+'")
    if match := re.search(r"Could not (?:find|load) '(?:([^']+)/)?([^'/]+)'", text):
        kind, name = match[1] or "config", match[2]
        hint = f"; {choose(name, valid_choices(kind, registry, source))}" if kind in GROUPS else ""
        return UserError(f"{kind}={name}: there is none of that name{hint}")
    dropped = next((o for o in parsed if o.is_delete() and "Could not delete" in text), None)
    if dropped is not None:
        cfg, name = _groups_only(parsed, source), dropped.key_or_group.partition(".")[2]
        there = [str(n) for n in cfg.callbacks] if cfg is not None else []
        return UserError(f"{dropped.input_line}: this run has no such callback; {choose(name, there)}")
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    key = getattr(cause, "full_key", None) or next(iter(re.findall(r"full_key: (\S+)", text)), None)
    typed = [o for o in parsed if o.key_or_group == key]  # the same key may be there twice
    guilty = [o for o in typed if f"'{o.value()}'" in str(cause)] or typed
    label = guilty[-1].input_line if guilty else key or "the config"
    numbers = [value for o in guilty if isinstance(value := o.value(), float) and value.is_integer()]
    whole = next((number for number in numbers if abs(number) < 2**63), None)
    written_out = f", written out: {key}={int(whole)}" if whole is not None and "Integer" in str(cause) else ""
    return UserError(f"{label}: {in_plain_words(cause)}{written_out}")


def _groups_only(parsed: Sequence[Override], source: Source) -> DictConfig | None:
    """The config with the choices of the command line alone, to know which model's keys to suggest."""
    chosen = [str(o.input_line) for o in parsed if o.key_or_group in GROUPS]
    try:
        return compose_raw([*source.overrides(), *chosen], source)
    except (HydraException, OmegaConfBaseException):
        return None


_PLAIN_WORDS = {
    r"Cannot assign \w+ to Dict": "takes names with values, in braces",
    r"could not be converted to Integer": "must be a whole number",
    r"could not be converted to Float": "must be a number",
    r"could not be converted to Boolean|is not a valid bool": "must be true or false",
    r"Cannot convert '\w+' to string": "must be one text",
    r"is not Optional": "cannot be null",
    r"Cannot merge DictConfig with ListConfig": "must be a list: [a,b]",
    r"NoneType is not a subclass": "cannot be null",
    r"Interpolation key '(.+)' not found": "refers to ${{{0}}}, a key that is not there",
    r"Unsupported interpolation type (\S+)": "refers to ${{{0}:...}}, which is not known here",
    r"[Rr]ecursi": "refers to itself",
    r"[Mm]issing ?[Mm]andatory": "has no value",
    r"expected one of \[(.*)\]": "must be one of {0}",
}


def in_plain_words(error: BaseException) -> str:
    """What is wrong with a value, without OmegaConf's names for types."""
    text = str(error)
    for pattern, words in _PLAIN_WORDS.items():
        if match := re.search(pattern, text):
            return words.format(*match.groups())
    return text.strip().splitlines()[0] if text.strip() else "cannot be used"
