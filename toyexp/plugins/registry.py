"""The registry of available parts, which can be looked up by kind and name. It also lists broken plugins."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from toyexp.base.errors import UserError, nearest, suggest
from toyexp.interfaces.engine import Engine
from toyexp.interfaces.format import Format
from toyexp.interfaces.model import Model
from toyexp.plugins.rules import KINDS, Candidate

DISTRIBUTION = "toyexp"  # distribution whose plugins are listed without an origin
LOCAL = "local module"  # stands for the package of modules in plugins=[...]
IN_A_MODULE = "if it is in your own module, add 'plugins=[my_module]'"
IN_A_FILE = "if it is in your own file DIR/experiment/NAME.yaml, type: --config-dir DIR experiment=NAME"


@dataclass(frozen=True)
class Offer:
    """A class that a plugin has registered as a part. `package` is the package that contains the plugin."""

    kind: str
    name: str
    cls: type
    plugin: str
    package: str

    @property
    def help(self) -> str:
        """First line of the class's docstring."""
        return (self.cls.__doc__ or "").strip().splitlines()[0]

    @property
    def origin(self) -> str:
        """Text with the plugin and package, to append to a list entry; empty for parts that ship with toyexp."""
        return "" if self.package.startswith(f"{DISTRIBUTION} ") else f"  [{self.plugin}, {self.package}]"


@dataclass(frozen=True)
class Problem:
    """A broken plugin and the reason. `offered` lists kind and name of each part that it tried to register."""

    plugin: str
    package: str
    reason: str
    offered: tuple[tuple[str, str], ...] = ()


@dataclass
class Registry:
    """The available parts, keyed by kind and then by name, and the broken plugins."""

    offers: dict[str, dict[str, Offer]] = field(default_factory=lambda: {kind: {} for kind in KINDS})
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # a sentence for each side effect of a plugin that was undone
    modules: Sequence[str] = ()  # local plugins

    @property
    def plugins_override(self) -> str:
        """The override `'plugins=[a,b]'`, with a leading blank, to append to a suggested command; empty if not needed.

        The override makes the suggested command load the local plugins of this registry.
        """
        return f" 'plugins=[{','.join(self.modules)}]'" if self.modules else ""

    def engines(self) -> list[Offer]:
        """Return the engines, highest priority first, which is the order in which engine=auto tries them."""
        return sorted(self.offers["engine"].values(), key=lambda o: -cast("type[Engine]", o.cls).priority)

    def classes(self, kind: str) -> dict[str, Any]:
        """Return the classes of a kind, keyed by name, in the order of registration."""
        return {name: offer.cls for name, offer in self.offers[kind].items()}

    def models(self) -> list[type[Model]]:
        """Return the model classes."""
        return list(self.classes("model").values())

    def types(self) -> dict[str, tuple[type[Format], Mapping[str, Any]]]:
        """Return a format and its settings for each value of `toyexp export --type`, keyed by this value."""
        types: dict[str, tuple[type[Format], Mapping[str, Any]]] = {}
        for form in self.classes("format").values():
            types |= {form.name: (form, {}), **{word: (form, settings) for word, settings in form.types.items()}}
        return types

    def suffixes(self) -> dict[str, str]:
        """Return the name of each format, keyed by the suffix of its files."""
        return {form.suffix: name for name, form in self.classes("format").items()}

    def get(self, kind: str, name: str) -> type:
        """Return the class that a plugin registered under `name` as a part of this `kind`, such as "model".

        Raise UserError if there is none. The message suggests similar names, or names the broken plugin that has the
        class and could not be loaded.
        """
        offer = self.offers[kind].get(name)
        if offer is not None:
            return offer.cls
        raise UserError(self.explain_missing(kind, name, self.offers[kind]))

    def add(self, candidate: Candidate) -> None:
        """Add all classes of the plugin `candidate`.

        Raise UserError if a name, a format's suffix or a value of `--type` is already registered.
        """
        updated = Registry({kind: dict(offers) for kind, offers in self.offers.items()})
        by_kind: list[tuple[str, list[Any]]] = [*candidate.classes.items(), ("callbacks", [*candidate.exporters])]
        for kind, cls in [(kind, cls) for kind, classes in by_kind for cls in classes]:
            offer = Offer(kind, cls.name, cls, candidate.plugin, candidate.package)
            other = updated.offers[kind].get(offer.name)
            if other is not None:
                is_same = (other.plugin, other.package) == (offer.plugin, offer.package)
                how = "registered twice" if is_same else f"already registered by {other.plugin} ({other.package})"
                raise UserError(f"{kind}={offer.name} is {how}")
            if kind == "format":
                updated._check_format(cls)
            updated.offers[kind][offer.name] = offer
        self.offers = updated.offers

    def _check_format(self, form: type[Format]) -> None:
        if form.suffix in (suffixes := self.suffixes()):
            other = suffixes[form.suffix]
            raise UserError(f"{form.__qualname__}.suffix is {form.suffix!r}, which format={other} uses already")
        for word in {form.name, *form.types} & (types := self.types()).keys():
            raise UserError(f"{form.__qualname__}: --type {word} is already used by format={types[word][0].name}")

    def drop(self, offer: Offer, reason: str) -> None:
        """Remove all classes of the plugin that registered `offer`, and record the plugin as broken for `reason`.

        If the plugin is local, raise UserError instead.
        """
        if offer.package == LOCAL:
            raise UserError(f"plugins=[{offer.plugin}]: {reason}")
        origin = offer.plugin, offer.package
        removed = [o for offers in self.offers.values() for o in offers.values() if (o.plugin, o.package) == origin]
        for removed_offer in removed:
            del self.offers[removed_offer.kind][removed_offer.name]
        self.problems.append(Problem(*origin, reason, tuple((o.kind, o.name) for o in removed)))

    def explain_missing(self, kind: str, name: str, names: Collection[str]) -> str:
        """Return the message for an unknown `name` of this kind.

        It suggests similar names among `names` or lists them all, and names broken plugins that may have registered the
        name.
        """
        for problem in self.problems:
            if (kind, name) in problem.offered:
                cause = f"comes from plugin {problem.plugin}, which is broken: {problem.reason}"
                return f"{kind}={name} {cause}; {suggest('', names)}"  # '': do not suggest similar names
            if not problem.offered and problem.plugin in (name, f"{DISTRIBUTION}_{name}"):
                return f"{kind}={name}: unknown name; plugin {problem.plugin} is broken: {problem.reason}"
        broken = "; ".join(f"{p.plugin}: {p.reason}" for p in self.problems)
        note = f" (a broken plugin may have it: {broken})" if broken else ""
        if kind == "engine" and (hint := self._gpu_hint(name)):
            return f"engine={name}: {hint}"
        location = IN_A_FILE if kind == "experiment" else "" if self.modules else IN_A_MODULE
        hint = f"; {location}" if location and not nearest(name, names) else ""
        return f"{kind}={name}: unknown name{note}; {suggest(name, names)}{hint}"

    def _gpu_hint(self, name: str) -> str | None:
        """Return a hint for a `name` that is a GPU's vendor, or an engine with a device number such as cuda:1.

        The hint says what to type instead. Return None for other names.
        """
        engine, _, number = name.partition(":")
        engines: dict[str, type[Engine]] = self.classes("engine")
        if name.lower() in ("gpu", "nvidia", "amd", "apple"):
            names = ", ".join(sorted(n for n, cls in engines.items() if cls.on_gpu))
            return f"unknown name; engines on a GPU are {names}: `toyexp doctor` shows which work here"
        if engine in engines and number.isdecimal() and (variable := engines[engine].device_variable):
            return f"select GPUs before the command: {variable}={number} toyexp engine={engine}"
        return None
