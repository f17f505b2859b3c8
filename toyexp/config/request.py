"""Settings given on the command line, with the plugins and configuration files that they refer to."""

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
from toyexp.interfaces.command import MODEL_CODE, parse_modules
from toyexp.plugins.discovery import load
from toyexp.plugins.registry import Registry
from toyexp.training.provenance import MOVED
from toyexp.training.run_config import Config


@dataclass(frozen=True)
class Request:
    """Settings given on a command line, with the plugins and files needed to compose a configuration from them."""

    settings: Sequence[Override]
    registry: Registry
    modules: Sequence[str] = ()  # local plugins, only from the command line
    source: Source = field(default_factory=Source.from_flags)

    @classmethod
    def parse(cls, words: Sequence[str], source: Source | None = None) -> Request:
        """Parse words of the command line and load the plugins that they name; raise UserError for invalid words."""
        settings = parse(words)
        modules = parse_modules(lines := input_lines(settings))
        try:
            return cls(settings, load(modules), modules, source or Source.from_flags())
        except UserError as error:
            for line in lines:
                for name in parse_modules([line]) if line.startswith(f"{MODEL_CODE}=") else ():
                    stem = name.removesuffix(".py")
                    for old, new in (name, line), (stem, line.replace(f"{name}:", f"{stem}:")):
                        error.args = (str(error).replace(f"plugins=[{old}]", new),)
            raise

    def __post_init__(self) -> None:
        store_schemas(self.registry)

    def with_overrides(self, *more: str) -> Request:
        """Return a copy with additional settings. The new settings override existing ones."""
        return replace(self, settings=[*self.settings, *parse(more)])

    def with_defaults(self, *first: str) -> Request:
        """Return a copy with additional settings. Existing settings override the new ones."""
        return replace(self, settings=[*parse(first), *self.settings])

    def drop(self, key: str) -> Request:
        """Return a copy of the request without its override of `key`."""
        return replace(self, settings=[o for o in self.settings if o.key_or_group != key])

    def compose(self, *more: str) -> Composition:
        """Compose the configuration of one run from these settings and `more`."""
        settings = [*self.settings, *parse(more)] if more else self.settings
        return compose(settings, self.registry, self.source, self.modules)

    def build_config(self, *more: str) -> Config:
        """Compose the configuration from these settings and `more`, and build its parts."""
        return self.compose(*more).build_config()

    @property
    def values(self) -> dict[str, str]:
        """Values given on the command line, by key, without sweeps and deletions."""
        return {o.key_or_group: str(o.value()) for o in self.settings if not (o.is_sweep_override() or o.is_delete())}

    def use_saved_config(self, directory: Path) -> Request:
        """Return a copy of this request that starts from the saved configuration of a run.

        Raise UserError if the settings of the request contradict the saved configuration.
        """
        source = Source.from_run(directory, self.values, self.modules)
        typed = {} if source.origin.cwd in (None, Path.cwd()) else self.values
        moved = {key: Path(typed[key]).absolute() for key in MOVED if os.path.lexists(typed.get(key, ""))}
        settings = [o for o in self.settings if o.key_or_group not in moved]
        return replace(
            self, settings=[*settings, *parse([format_override(*pair) for pair in moved.items()])], source=source
        )

    def per_engine(self, labels: Sequence[str]) -> dict[str, Request]:
        """Return {label: copy of this request with that engine} for engine labels `name[:key=value...]`.

        Overrides of the form engine.key=value in this request apply to every engine, but settings in a label take
        precedence over them.
        """
        requests = {}
        for label in labels:
            name, settings = parse_label(label, f"engine={label}")
            requests[label] = self.with_overrides(
                f"engine={name}", *(f"engine.{key}={value}" for key, value in settings.items())
            )
        return requests


def take_engines(words: Sequence[str], default: str) -> tuple[list[str], list[str]]:
    """Return the engine labels in the override `engine=LABEL,LABEL,...`, and the other words.

    A label has the form `name[:key=value...]`. If the override is absent, return the labels in `default`, which are
    separated by commas.
    """
    lists = [word.removeprefix("engine=") for word in words if word.startswith("engine=")]
    if len(lists) > 1:
        raise UserError(f"engine={lists[1]}: give all engines in one list: engine={','.join(lists)}")
    labels = [label for text in lists or filter(None, [default]) for label in text.strip("[]").split(",")]
    if nonempty := [label for label in labels if label] if "" in labels else []:
        raise UserError(f"engine={','.join(labels)}: empty name; did you mean engine={','.join(nonempty)}?")
    if len(set(labels)) < len(labels):
        raise UserError(f"engine={','.join(labels)}: names an engine twice; give one other settings: ggml:threads=1")
    return labels, [word for word in words if not word.startswith("engine=")]


def parse_experiment(command: str, settings: Sequence[str], ignored: Collection[str] = ()) -> Request:
    """Parse the settings of a `command` that uses a single experiment.

    Raise UserError for a setting with several values. Also raise UserError for a setting if the first part of its key,
    such as optim in optim.lr, is in `ignored`.
    """
    request = Request.parse(settings)
    for override in request.settings:
        if override.is_sweep_override():
            raise UserError(f"{override.input_line}: {command} uses one experiment; give one value")
        if override.key_or_group.replace("/", ".").split(".")[0] in ignored:
            raise UserError(f"{override.input_line}: has no effect in {command}; leave it out")
    return request
