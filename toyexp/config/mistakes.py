"""What a person can get wrong in a configuration, and what they are told: one or two lines, the right word near.

Nothing of it is imported by a run that is asked for as it should be.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from toyexp.base.errors import UserError, choose, nearest, printable
from toyexp.base.words import typed
from toyexp.config.chosen import files, includes_itself, misplaced, place
from toyexp.config.keys import Keys, choices, names_in, value_of
from toyexp.config.schema import Source, class_of, compose_raw, load_yaml
from toyexp.config.top_level import GROUPS, HYDRA_KEYS, LAUNCHERS, PARTS, top_level
from toyexp.config.trust import CODE, names_code
from toyexp.contract.registry import NAMES_CODE, Registry

# Keys that are gone, and what stands in their place.
MOVED = {
    "recipe.low_memory": "is the engine's now: engine.packed=true on cpu, cuda and mps; the ggml engines do so anyway"
}

# -- one setting as it was typed --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Typed:
    """A setting, and what the rules below ask of it."""

    override: Override
    registry: Registry
    source: Source

    @property
    def key(self) -> str:
        return str(self.override.key_or_group)

    @property
    def kind(self) -> str:
        return self.key.split(".")[0].split("/")[0]

    @property
    def rest(self) -> list[str]:
        return self.key.split(".")[1:]

    @property
    def line(self) -> str:
        return str(self.override.input_line)

    @property
    def text(self) -> str:
        return self.line.partition("=")[2]

    @property
    def value(self) -> Any:
        return value_of(self.override)

    @cached_property
    def types(self) -> set[Any]:
        """What the key may hold; nothing for one that nobody knows."""
        return Keys.of(self.registry).types(self.key)

    @property
    def code(self) -> str | None:
        """The first word in it by which something would be called."""
        return next((part for part in (self.kind, *self.rest) if part in NAMES_CODE), None) or names_code(self.value)

    @property
    def chooses(self) -> bool:
        """Whether it chooses by name."""
        return self.key in GROUPS and not self.override.is_delete()

    @property
    def names(self) -> list[Any]:
        return self.value if isinstance(self.value, list) else [self.value]

    @property
    def of_part(self) -> bool:
        """Whether it is meant for a setting of a part."""
        return self.kind in GROUPS and bool(self.rest) and not self.override.is_delete()

    @property
    def depth(self) -> int:
        """How many words behind the group name one of its settings."""
        return 2 if self.kind == "callbacks" else 1

    @property
    def strangers(self) -> Iterator[str]:
        """The names that nothing has."""
        known = choices(self.key, self.registry, self.source)
        return (f"{self.registry.missing(self.key, n)}; {choose(n, known)}" for n in self.names if n not in known)


def check_override(override: Override, registry: Registry, source: Source) -> None:
    """Raises UserError for what Hydra would accept without effect, or refuse in words of its own."""
    setting = _Typed(override, registry, source)
    for applies, words in RULES:
        if applies(setting):
            raise UserError(words(setting))


# What is wrong when, and how it is told: the first rule that applies counts.
RULES: tuple[tuple[Callable[[_Typed], Any], Callable[[_Typed], str]], ...] = (
    (lambda t: t.code, lambda t: f"{t.line}: {t.code} {CODE}"),
    (lambda t: t.key.replace("/", ".").startswith(("hydra.launcher", "hydra.sweeper")),
     lambda t: f"{t.line}: toyexp runs the jobs of a sweep itself: -m key=a,b, with "
               f"sweep.launcher={', '.join(LAUNCHERS)} and sweep.jobs=4"),
    (lambda t: t.override.package is not None,
     lambda t: f"{t.line}: '@' has no meaning here; write {t.key}={t.override.get_value_element_as_str()}"),
    (lambda t: t.override.is_sweep_override() and Keys.of(t.registry).holds_list(t.key),
     lambda t: f"{t.line}: several values; {t.key}=[{t.text}] is a list, or add -m to sweep over them"),
    (lambda t: t.override.is_sweep_override(), lambda t: f"{t.line}: several values; add -m to sweep over them"),
    (lambda t: t.line.endswith("=") and t.kind == "callbacks" and str in t.types,
     lambda t: f"{t.line}: {EMPTY}; an empty text is \"{t.line}''\""),
    (lambda t: t.line.endswith("=") and t.key not in GROUPS and (t.types or t.kind == "hydra"),
     lambda t: f"{t.line}: {EMPTY}"),
    (lambda t: isinstance(t.value, int) and t.value not in (0, 1) and t.types == {bool},
     lambda t: f"{t.line}: must be true or false"),
    (lambda t: isinstance(t.value, float) and not t.value and re.search("[1-9]", re.split("[eE]", t.text)[0]),
     lambda t: f"{t.line}: is too near to 0 for a number here; write 0, or one that is larger"),
    (lambda t: t.kind == "hydra" and t.key not in HYDRA_KEYS, lambda t: _unknown(t.key, None, t.registry)),
    (lambda t: "/" in t.key, lambda t: f"unknown key {t.key}; did you mean {t.key.replace('/', '.')}?"),
    (lambda t: t.override.is_delete() and t.kind != "hydra" and (t.kind != "callbacks" or len(t.rest) != 1),
     lambda t: f"{t.line}: only callbacks can be dropped, such as '~callbacks.progress'"),
    (lambda t: t.chooses and t.line.startswith("+"), lambda t: f"{t.line}: leave out the '+': {t.line.lstrip('+')}"),
    (lambda t: t.chooses and isinstance(t.value, list) and t.kind != "callbacks",
     lambda t: f"{t.line}: takes one name, without brackets"
               + (f"; to run several, sweep: -m {t.kind}={','.join(map(str, t.names))}" if len(t.names) > 1 else "")),
    (lambda t: t.chooses and not all(isinstance(name, str) and name for name in t.names),
     lambda t: f"{t.line}: takes a name; {choose('', choices(t.key, t.registry, t.source))}"),
    (lambda t: t.chooses and any(t.strangers), lambda t: next(t.strangers)),
    (lambda t: t.of_part and len(t.rest) < t.depth and t.rest[0] not in t.registry.offers[t.kind],
     lambda t: _unknown(t.key, None, t.registry)),
    (lambda t: t.of_part and len(t.rest) < t.depth,
     lambda t: f"{t.line}: give a callback's settings one by one ({t.key}.<setting>=...); add callbacks by name: "
               f"callbacks=[default,{t.rest[0]}]"),
    (lambda t: t.of_part and len(t.rest) > t.depth,
     lambda t: f"{t.line}: {'.'.join([t.kind, *t.rest[: t.depth]])} holds one value, not keys of its own"),
    (lambda t: t.of_part and t.rest[-1] == "name" and t.kind == "callbacks",
     lambda t: f"{t.line}: cannot be set; choose by name: callbacks=[...]"),
    (lambda t: t.of_part and t.rest[-1] == "name",
     lambda t: f"{t.line}: cannot be set; choose by name: {t.kind}={t.override.get_value_element_as_str()}"),
    (lambda t: t.key in ("sweep", "sweep.submitit"),
     lambda t: f"{t.line}: give its settings one by one: {t.key}.<setting>=..."),
    (lambda t: t.kind == "sweep" and t.key not in _sweep_keys(), lambda t: _unknown(t.key, None, t.registry)),
    (lambda t: t.rest and t.kind in Keys.of(t.registry).under("") and t.kind not in (*GROUPS, "sweep"),
     lambda t: f"{t.line}: {t.kind} holds one value: {t.kind}=..."),
)  # fmt: skip
EMPTY = "is empty (a variable that is not set?); leave it out for the default"


def _sweep_keys() -> set[str]:
    return {key for key, _ in top_level() if key.startswith("sweep.")}


# -- keys that nobody reads -------------------------------------------------------------------------------------------


def check_keys(cfg: DictConfig, keys: Keys) -> None:
    """Raises UserError for keys nobody reads, whatever prefix they were typed with, and for parts that are missing."""
    registry = keys.registry
    _require_known("", cfg, keys, cfg)
    for kind in PARTS:
        node = None if OmegaConf.is_missing(cfg, kind) else cfg.get(kind)
        if not isinstance(node, DictConfig) or "name" not in node:
            raise UserError(f"the config chooses no {kind}; add {kind}=..., {choose('', choices(kind, registry))}")
        class_of(kind, node, registry)
        _require_known(kind, node, keys, cfg)
    for name, node in cfg.get("callbacks", {}).items():
        registry.get("callbacks", str(name))
        if not isinstance(node, DictConfig) or node.get("name") != name:
            raise UserError(_not_chosen(f"callbacks.{name}"))
        _require_known(f"callbacks.{name}", node, keys, cfg)


def _require_known(where: str, node: DictConfig, keys: Keys, cfg: DictConfig) -> None:
    for key in map(str, node):
        if key not in keys.under(where):
            raise unknown_key(f"{where}.{key}" if where else key, cfg, keys.registry)


def unknown_key(key: str, cfg: DictConfig | None, registry: Registry) -> UserError:
    """An error about a key nobody reads, with the nearest one that somebody does."""
    return UserError(_unknown(key, cfg, registry))


def _unknown(key: str, cfg: DictConfig | None, registry: Registry) -> str:
    every = Keys.of(registry)
    keys = every if cfg is None else every.of_config(cfg)
    guesses = (_moved, _of_sweep, _of_hydra, _at_the_top, _of_callbacks, _of_another, _of_the_part)
    return next(hint for guess in guesses if (hint := guess(key, cfg, keys)))


def _moved(key: str, cfg: DictConfig | None, keys: Keys) -> str | None:
    return f"{key}: {MOVED[key]}" if key in MOVED else None


def _of_sweep(key: str, cfg: DictConfig | None, keys: Keys) -> str | None:
    if key.split(".")[0] != "sweep":
        return None
    known = _sweep_keys()
    best = next((k for k in known if k.endswith("." + key.rpartition(".")[2])), None) or nearest(key, known)
    return f"unknown key {key}; " + (f"did you mean {best}?" if best else choose("", known))


def _of_hydra(key: str, cfg: DictConfig | None, keys: Keys) -> str | None:
    if re.split("[./]", key)[0] != "hydra":
        return None
    if best := None if "/" in key else nearest(key, HYDRA_KEYS):
        return f"unknown key {key}; did you mean {best}?"
    return f"{key}: has no effect here; of Hydra's settings there are {', '.join(HYDRA_KEYS[:4])}"


def _at_the_top(key: str, cfg: DictConfig | None, keys: Keys) -> str | None:
    """Of a word that is no key at the top: it stands elsewhere, or one like it does."""
    kind, *rest = key.split(".")
    if kind in keys.under(""):
        in_file = "the configuration file has no such key; put 'schema' first in its defaults list"
        return None if rest else f"{key}: {in_file}"
    places = [*PARTS, *(f"callbacks.{name}" for name in (names_in(cfg, "callbacks") if cfg is not None else ()))]
    homes = [f"{place}.{key}" for place in places if not rest and key in keys.under(place)]
    homes += [home for home in _sweep_keys() if not rest and home.rpartition(".")[2] == key]
    if not homes and (best := nearest(kind, keys.under(""))):
        homes = [".".join([best, *rest])]
    if homes:
        return f"unknown key {key}; did you mean {homes[0]}?"
    return f"unknown key {key}; the keys are: {', '.join(sorted(keys.under('')))}"


def _of_callbacks(key: str, cfg: DictConfig | None, keys: Keys) -> str | None:
    """Of a callback that there is not, or that this run has not."""
    kind, name, *rest = key.split(".")
    offers = keys.registry.offers["callbacks"]
    if kind != "callbacks":
        return None
    if name not in offers:
        best = nearest(name, offers)
        hint = f"did you mean {'.'.join([kind, best, *rest])}?" if best else choose("", offers)
        return f"unknown key {key}; {hint}"
    return _not_chosen(key) if cfg is not None and name not in cfg.callbacks else None


def _not_chosen(key: str) -> str:
    name = key.split(".")[1]
    return f"{key}: {name} is not among this run's callbacks; add it, such as callbacks=[default,{name}]"


def _chosen(key: str, cfg: DictConfig | None) -> str:
    """Whose setting a key was meant to be: model=llama."""
    kind = key.split(".")[0]
    name = "".join(names_in(cfg, kind)) if cfg is not None and kind != "callbacks" else ""
    return f"{kind}={name}" if name else key.rpartition(".")[0]


def _of_another(key: str, cfg: DictConfig | None, keys: Keys) -> str | None:
    """Of a setting that others of the kind have."""
    kind, last = key.split(".")[0], key.rpartition(".")[2]
    owners = [n for n, offer in keys.registry.offers.get(kind, {}).items() if last in Keys.fields(offer.cls)]
    if kind == "callbacks" or not owners:
        return None
    *others, last_one = sorted(owners)
    belongs = f"{kind}={', '.join(others)} or {last_one}" if others else f"{kind}={last_one}"
    return f"unknown key {key} with {_chosen(key, cfg)}; it belongs to {belongs}: add that too"


def _of_the_part(key: str, cfg: DictConfig | None, keys: Keys) -> str:
    where, _, last = key.rpartition(".")
    valid = keys.under(where) - {"name"}
    if best := nearest(last, valid):
        return f"unknown key {key}; did you mean {where}.{best}?"
    return f"unknown key {key}; {_chosen(key, cfg)} has " + (", ".join(sorted(valid)) or "no settings")


# -- what Hydra complains of ------------------------------------------------------------------------------------------


def explain(error: Exception, given: Sequence[Override], registry: Registry, source: Source) -> UserError:
    """A complaint about a configuration that could not be composed, as one of ours."""
    text = str(error)
    if isinstance(error, RecursionError):
        return includes_itself(given, source)
    if not isinstance(error, HydraException | OmegaConfBaseException):
        main = source.directory / f"{source.name}.yaml"
        return UserError(f"{main}: cannot be composed ({type(error).__name__}: {printable(text, 200)})")
    named = re.match(r"In '(\S+)': \w+ raised while", text)
    paths = [d / f"{named[1]}.yaml" for d in source.directories] if named else []
    path = next((path for path in paths if path.is_file()), None)
    key = next(iter(re.findall(r"full_key: (\S+)", f"{text}\n{error.__cause__}")), None)
    if path is not None and key is None:
        key, value = next(_misshapen(load_yaml(path), Keys.of(registry)), (None, None))
        if key in (*PARTS, "callbacks"):
            return UserError(f"{place(path, key)}: {key} holds settings, and no names; {_choice(key, value)}")
    found = _of_a_key(error, given, registry, source) or _of_a_value(error, key, [] if path else given, registry)
    if path is None or str(found).startswith(str(path)):
        return found
    return UserError(f"{place(path, key or '')}: {found}")


def _choice(kind: str, value: Any) -> str:
    return f"choose in the file's defaults list: '- override /{kind}: {typed(value)}'"


def _misshapen(held: Any, keys: Keys, where: str = "") -> Iterator[tuple[str, Any]]:
    """What a file gives one value, or a list, where there are names with values; or names where there is a list."""
    for key, value in ((f"{where}{name}", value) for name, value in held.items() if value is not None):
        names = key in keys.classes or key == "callbacks" or keys.holds_names(key)
        if isinstance(value, dict) != names and (names or keys.holds_list(key)):
            yield key, value
        elif isinstance(value, dict):
            yield from _misshapen(value, keys, f"{key}.")


def _of_a_key(error: Exception, given: Sequence[Override], registry: Registry, source: Source) -> UserError | None:
    """Where the complaint is of a key or a choice: Hydra says so in words alone."""
    text = str(error)
    if match := re.search(r"Could not override '([^']+)'|Key '[^']+' not in .*\n\s*full_key: (\S+)", text):
        if match[2] == "experiment":
            return misplaced(given, source)
        return unknown_key(match[1] or match[2], _groups_only(given, source), registry)
    if match := re.search(r"An item is already at '([^']+)'", text):
        return UserError(f"+{match[1]}: that key is there already; leave out the '+'")
    if match := re.search(r"Could not (?:find|load) '(?:([^']+)/)?([^'/]+)'", text):
        kind, name = match[1] or "config", match[2]
        hint = f"; {choose(name, choices(kind, registry, source))}" if kind in GROUPS else ""
        return UserError(f"{kind}={name}: there is none of that name{hint}")
    if match := re.search(r"Multiple values for (\S+)\. .*: (\S+)'", text):
        return UserError(f"{next(files(given, source))}: {match[1]} is chosen already; {_choice(match[1], match[2])}")
    dropped = next((o for o in given if o.is_delete() and "Could not delete" in text), None)
    if dropped is None:
        return None
    cfg, name = _groups_only(given, source), dropped.key_or_group.partition(".")[2]
    there = names_in(cfg, "callbacks") if cfg is not None else []
    return UserError(f"{dropped.input_line}: this run has no such callback; {choose(name, there)}")


def _of_a_value(error: Exception, key: str | None, given: Sequence[Override], registry: Registry) -> UserError:
    """Where it is of the value of a key: by the setting that gave it."""
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    same = [o for o in given if o.key_or_group == key]  # it may be there twice
    guilty = [o for o in same if f"'{o.value()}'" in str(cause)] or same
    label = guilty[-1].input_line if guilty else key or "the config"
    if key and Keys.of(registry).holds_names(key):
        return UserError(f"{label}: takes names with values, in braces: {key}={{name: value}}")
    numbers = [value for o in guilty if isinstance(value := o.value(), float) and value.is_integer()]
    whole = next((number for number in numbers if abs(number) < 2**63), None)
    written_out = f", written out: {key}={int(whole)}" if whole is not None and "Integer" in str(cause) else ""
    return UserError(f"{label}: {plain_words(cause)}{written_out}")


def _groups_only(given: Sequence[Override], source: Source) -> DictConfig | None:
    """The config with the choices of the command line alone, to know which model's keys to suggest."""
    chosen = [str(o.input_line) for o in given if o.key_or_group in GROUPS]
    try:
        return compose_raw(chosen, source)
    except (HydraException, OmegaConfBaseException):
        return None


_PLAIN_WORDS = {
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


def plain_words(error: BaseException) -> str:
    """What is wrong with a value, without OmegaConf's names for types."""
    text = str(error)
    for pattern, words in _PLAIN_WORDS.items():
        if match := re.search(pattern, text):
            return words.format(*match.groups())
    return text.strip().splitlines()[0] if text.strip() else "cannot be used"
