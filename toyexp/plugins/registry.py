"""What there is of each kind, by name, and which plugins are broken."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from toyexp.base.errors import UserError, nearest, suggest
from toyexp.interfaces.engine import Engine
from toyexp.interfaces.format import Format
from toyexp.interfaces.model import Model
from toyexp.plugins.rules import KINDS, Candidate

DISTRIBUTION = "toyexp"  # the distribution whose names nobody can take over
LOCAL = "local module"  # the package of plugins=[...]
IN_A_MODULE = "one in a module of yours: add 'plugins=[my_module]'"
IN_A_FILE = "one in a file of yours, DIR/experiment/NAME.yaml: --config-dir DIR experiment=NAME"


@dataclass(frozen=True)
class Offer:
    """One thing a plugin offers."""

    kind: str
    name: str
    cls: type
    plugin: str
    package: str

    @property
    def help(self) -> str:
        """The first line of its docstring."""
        return (self.cls.__doc__ or "").strip().splitlines()[0]

    @property
    def origin(self) -> str:
        """What stands behind that in a list: where it comes from, if that is not toyexp itself."""
        return "" if self.package.startswith(f"{DISTRIBUTION} ") else f"  [{self.plugin}, {self.package}]"


@dataclass(frozen=True)
class Problem:
    """A plugin that could not be used, and what it would have offered as far as it came."""

    plugin: str
    package: str
    reason: str
    offered: tuple[tuple[str, str], ...] = ()


@dataclass
class Registry:
    """Everything that can be asked for by name."""

    offers: dict[str, dict[str, Offer]] = field(default_factory=lambda: {kind: {} for kind in KINDS})
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # a sentence about each thing that a plugin did and that was undone
    modules: Sequence[str] = ()  # the local ones among them

    @property
    def loading(self) -> str:
        """What stands at the end of a command that is suggested, for it to find the same: ` 'plugins=[a,b]'`."""
        return f" 'plugins=[{','.join(self.modules)}]'" if self.modules else ""

    def engines(self) -> list[Offer]:
        """The engines in the order in which engine=auto asks them."""
        return sorted(self.offers["engine"].values(), key=lambda o: -cast("type[Engine]", o.cls).priority)

    def classes(self, kind: str) -> dict[str, Any]:
        """The classes of a kind by name, in the order in which they were registered."""
        return {name: offer.cls for name, offer in self.offers[kind].items()}

    def models(self) -> list[type[Model]]:
        """The classes of models."""
        return list(self.classes("model").values())

    def types(self) -> dict[str, tuple[type[Format], Mapping[str, Any]]]:
        """What `toyexp export --type` takes: the format of each word, and the settings that it stands for."""
        known: dict[str, tuple[type[Format], Mapping[str, Any]]] = {}
        for form in self.classes("format").values():
            known |= {form.name: (form, {}), **{word: (form, settings) for word, settings in form.types.items()}}
        return known

    def suffixes(self) -> dict[str, str]:
        """The formats by what their files' names end in."""
        return {form.suffix: name for name, form in self.classes("format").items()}

    def get(self, kind: str, name: str) -> type:
        """The class of that name; raises UserError with the nearest name, and with the broken plugin that had it."""
        offer = self.offers[kind].get(name)
        if offer is not None:
            return offer.cls
        raise UserError(self.missing(kind, name, self.offers[kind]))

    def add(self, candidate: Candidate) -> None:
        """All that a plugin has; raises UserError for a name, a format's suffix or a word of `--type` that is taken."""
        grown = Registry({kind: dict(known) for kind, known in self.offers.items()})
        given: list[tuple[str, list[Any]]] = [*candidate.classes.items(), ("callbacks", [*candidate.exporters])]
        for kind, cls in [(kind, cls) for kind, classes in given for cls in classes]:
            offer = Offer(kind, cls.name, cls, candidate.plugin, candidate.package)
            taken = grown.offers[kind].get(offer.name)
            if taken is not None:
                same = (taken.plugin, taken.package) == (offer.plugin, offer.package)
                how = "registered twice" if same else f"already offered by {taken.plugin} ({taken.package})"
                raise UserError(f"{kind}={offer.name} is {how}")
            if kind == "format":
                grown._check_format(cls)
            grown.offers[kind][offer.name] = offer
        self.offers = grown.offers

    def _check_format(self, form: type[Format]) -> None:
        if form.suffix in (suffixes := self.suffixes()):
            format_there = suffixes[form.suffix]
            raise UserError(f"{form.__qualname__}.suffix is {form.suffix!r}, which is that of format={format_there}")
        for word in {form.name, *form.types} & (types := self.types()).keys():
            raise UserError(f"{form.__qualname__}: --type {word} is already a word of format={types[word][0].name}")

    def drop(self, offer: Offer, reason: str) -> None:
        """Takes out all that the plugin of an offer has, which is broken after all; UserError for a local one."""
        if offer.package == LOCAL:
            raise UserError(f"plugins=[{offer.plugin}]: {reason}")
        origin = offer.plugin, offer.package
        gone = [o for known in self.offers.values() for o in known.values() if (o.plugin, o.package) == origin]
        for each in gone:
            del self.offers[each.kind][each.name]
        self.problems.append(Problem(*origin, reason, tuple((each.kind, each.name) for each in gone)))

    def missing(self, kind: str, name: str, known: Collection[str]) -> str:
        """Why nothing of that name is there, and what of the `known` is near, or all of them."""
        for problem in self.problems:
            if (kind, name) in problem.offered:
                why_not = f"comes from plugin {problem.plugin}, which is broken: {problem.reason}"
                return f"{kind}={name} {why_not}; {suggest('', known)}"  # nothing near: what was meant is known
            if not problem.offered and problem.plugin in (name, f"{DISTRIBUTION}_{name}"):
                return f"{kind}={name}: there is none of that name; plugin {problem.plugin} is broken: {problem.reason}"
        broken = "; ".join(f"{p.plugin}: {p.reason}" for p in self.problems)
        note = f" (a broken plugin may have offered it: {broken})" if broken else ""
        if kind == "engine" and (hint := self._gpu(name)):
            return f"engine={name}: {hint}"
        elsewhere = IN_A_FILE if kind == "experiment" else "" if self.modules else IN_A_MODULE
        own = f"; {elsewhere}" if elsewhere and not nearest(name, known) else ""
        return f"{kind}={name}: there is none of that name{note}; {suggest(name, known)}{own}"

    def _gpu(self, name: str) -> str | None:
        """What to type where a GPU was asked for by a word, or one of several by its number."""
        engine, _, number = name.partition(":")
        known: dict[str, type[Engine]] = self.classes("engine")
        if name.lower() in ("gpu", "nvidia", "amd", "apple"):
            names = ", ".join(sorted(n for n, cls in known.items() if cls.on_gpu))
            return f"there is none of that name; those on a GPU are {names}: `toyexp doctor` says which work here"
        if engine in known and number.isdecimal() and (shown := known[engine].device_variable):
            return f"which GPUs it sees is set before the command: {shown}={number} toyexp engine={engine}"
        return None
