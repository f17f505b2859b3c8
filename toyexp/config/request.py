"""What was asked for: the settings, the plugins they may name, and where presets lie."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from hydra.core.override_parser.types import Override

from toyexp.base.errors import UserError
from toyexp.config.build import parse_label
from toyexp.config.compose import Composition, compose
from toyexp.config.schema import Source, store_schemas
from toyexp.config.words import format_override, input_lines, parse
from toyexp.interfaces.command import parse_modules
from toyexp.plugins.discovery import load
from toyexp.plugins.registry import Registry
from toyexp.training.provenance import MOVED
from toyexp.training.run_config import Config


@dataclass(frozen=True)
class Request:
    """Settings as they were typed, and all it takes to make a run of them."""

    settings: Sequence[Override]
    registry: Registry
    modules: Sequence[str] = ()  # local plugins, which come from the command line alone
    source: Source = field(default_factory=Source.from_flags)

    @classmethod
    def parse(cls, words: Sequence[str], source: Source | None = None) -> Request:
        """Reads words of the command line, and loads the plugins that they name; UserError for what cannot be read."""
        settings = parse(words)
        modules = parse_modules(input_lines(settings))
        return cls(settings, load(modules), modules, source or Source.from_flags())

    def __post_init__(self) -> None:
        store_schemas(self.registry)

    def with_overrides(self, *more: str) -> Request:
        """The same with more settings behind it."""
        return replace(self, settings=[*self.settings, *parse(more)])

    def with_defaults(self, *first: str) -> Request:
        """The same with more settings before it, of which what was typed takes the place."""
        return replace(self, settings=[*parse(first), *self.settings])

    def drop(self, key: str) -> Request:
        """The same without a setting."""
        return replace(self, settings=[o for o in self.settings if o.key_or_group != key])

    def compose(self, *more: str) -> Composition:
        """The configuration of one run."""
        settings = [*self.settings, *parse(more)] if more else self.settings
        return compose(settings, self.registry, self.source, self.modules)

    def build_config(self, *more: str) -> Config:
        """A run's parts, checked."""
        return self.compose(*more).build_config()

    @property
    def values(self) -> dict[str, str]:
        """What each key was given, where that is one value."""
        return {o.key_or_group: str(o.value()) for o in self.settings if not (o.is_sweep_override() or o.is_delete())}

    def use_saved_config(self, directory: Path) -> Request:
        """The same on the saved configuration of a run; UserError where that is of another model, data or recipe."""
        source = Source.from_run(directory, self.values, self.modules)
        typed = {} if source.begun.cwd in (None, Path.cwd()) else self.values
        here = {key: Path(typed[key]).absolute() for key in MOVED if os.path.lexists(typed.get(key, ""))}
        settings = [o for o in self.settings if o.key_or_group not in here]
        return replace(
            self, settings=[*settings, *parse([format_override(*pair) for pair in here.items()])], source=source
        )

    def per_engine(self, labels: Sequence[str]) -> dict[str, Request]:
        """The same on each engine of `name[:key=value...]`, by the label; engine.key=value is a setting of all."""
        found = {}
        for label in labels:
            name, own = parse_label(label, f"engine={label}")
            found[label] = self.with_overrides(
                f"engine={name}", *(f"engine.{key}={value}" for key, value in own.items())
            )
        return found


def take_engines(words: Sequence[str], default: str) -> tuple[list[str], list[str]]:
    """The labels of `engine=name[:key=value...],...`, or else of the `default`, and the other words."""
    asked = [word.removeprefix("engine=") for word in words if word.startswith("engine=")]
    if len(asked) > 1:
        raise UserError(f"engine={asked[1]}: the engines stand in one list: engine={','.join(asked)}")
    labels = [label for text in asked or filter(None, [default]) for label in text.strip("[]").split(",")]
    if named := [label for label in labels if label] if "" in labels else []:
        raise UserError(f"engine={','.join(labels)}: a name is missing; did you mean engine={','.join(named)}?")
    if len(set(labels)) < len(labels):
        raise UserError(f"engine={','.join(labels)}: names one twice; give each its own settings: ggml:threads=1")
    return labels, [word for word in words if not word.startswith("engine=")]


def parse_experiment(command: str, settings: Sequence[str], ignored: Collection[str] = ()) -> Request:
    """Return the request of one experiment; raise UserError for several values of a key, and for an `ignored` one."""
    request = Request.parse(settings)
    for override in request.settings:
        if override.is_sweep_override():
            raise UserError(f"{override.input_line}: {command} compares engines on one experiment; give one value")
        if override.key_or_group.replace("/", ".").split(".")[0] in ignored:
            raise UserError(f"{override.input_line}: is of no effect in {command}; leave it out")
    return request
