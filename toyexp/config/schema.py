"""The schema for Hydra: top-level keys, the dataclass of every plugin, and the directories of presets."""

from __future__ import annotations

import copy
import dataclasses
import functools
import io
import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra._internal.core_plugins import file_config_source, structured_config_source
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.config_store import ConfigNode, ConfigStore
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.plugins.config_source import ConfigResult
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from toyexp.base.errors import UserError, printable, suggest
from toyexp.base.files import read_text, require_directory, require_file
from toyexp.config.paths import CONF
from toyexp.config.safe_yaml import PLACES, SIZE_LIMIT, check_file, require_plugins
from toyexp.config.top_level import PARTS, Sweep
from toyexp.plugins.registry import Registry
from toyexp.plugins.rules import type_hints
from toyexp.training.provenance import Origin, parse_origin
from toyexp.training.resume import saved_state
from toyexp.training.settings import Settings

AUTO = "auto"
START_DIRECTORY = "TOYEXP_BEGUN"  # environment variable: where a resumed sweep was started
EXPERIMENT_HINT = "to choose DIR/experiment/NAME.yaml, type --config-dir DIR experiment=NAME"


@dataclass
class Root(Settings):
    """Top-level keys of a configuration: settings of the run, its parts, and settings of sweeps."""

    sweep: Sweep = field(default_factory=Sweep)
    model: Any = MISSING
    data: Any = MISSING
    recipe: Any = MISSING
    engine: Any = MISSING
    optim: Any = MISSING
    objective: Any = field(default_factory=lambda: {"name": "cross_entropy"})
    callbacks: dict[str, Any] = field(default_factory=dict)


@dataclass
class AutoEngine:
    """The best engine that works on this machine. The run prints which engine this is."""

    threads: int = 0  # CPU threads, if the chosen engine uses the CPU; 0: all available cores


def default_callbacks() -> list[str]:
    """Return the names of the callbacks in `callbacks=[default]`, which a run has by default."""
    return list(load_yaml(CONF / "callbacks" / "default.yaml")["defaults"])


class FileConfigSource(file_config_source.FileConfigSource):
    """Replacement of Hydra's file reader that checks files with `safe_yaml`. Hydra finds it by its class name."""

    def load_config(self, config_path: str) -> ConfigResult:
        """Load a configuration file; raise UserError if it holds anything other than settings."""
        path = Path(self.path, self._normalize_file_name(config_path))
        is_builtin = path.is_relative_to(CONF)
        if not is_builtin and (".." in Path(config_path).parts or config_path.startswith("hydra/")):
            raise UserError(
                f"{config_path}: a file in {self.path} may include only files of this directory, none of hydra/"
            )
        if not os.path.lexists(path):
            return super().load_config(config_path)  # raises an error of Hydra

        def load(text: str) -> Any:
            return copy.deepcopy(_load_text(text)), self._get_header_dict(text)

        config, header = load_yaml(path, load, preset="/" in config_path)
        return ConfigResult(provider=self.provider, path=f"{self.scheme()}://{self.path}", config=config, header=header)

    def is_config(self, config_path: str) -> bool:
        """Return True if the path exists. If it is not a file, `load_config` then raises the error."""
        return os.path.lexists(Path(self.path, self._normalize_file_name(config_path)))


@functools.lru_cache
def _load_text(text: str) -> Any:
    """Parse YAML. Results are cached for processes that compose several runs from the same files."""
    return OmegaConf.load(io.StringIO(text))


def read_config(path: Path) -> str:
    """Return the text of a configuration file; raise UserError if it cannot be read or exceeds SIZE_LIMIT."""
    return read_text(path, SIZE_LIMIT).removeprefix("\ufeff")  # byte order mark, written by editors on Windows


class StructuredConfigSource(structured_config_source.StructuredConfigSource):
    """Replacement of Hydra's dataclass reader that converts only the chosen dataclasses, to save time."""

    def load_config(self, config_path: str) -> ConfigResult:
        """Return the settings of a part with types and defaults."""
        result = super().load_config(config_path)
        if isinstance(result.config, type):
            result.config = OmegaConf.structured(schema(result.config, Path(config_path).stem))
        return result


composition_cache: dict[tuple[Source, tuple[str, ...]], DictConfig | None] = {}  # valid for the current schemas


def store_schemas(registry: Registry) -> None:
    """Register every plugin's dataclass with Hydra by group and name, and install the file readers of this module."""
    SourcesRegistry.instance().types |= {"file": FileConfigSource, "structured": StructuredConfigSource}
    store = ConfigStore.instance()
    if "schema.yaml" not in store.repo:  # storing it is slow
        store.store(name="schema", node=Root)
    for kind, offers in all_part_classes(registry).items():
        nodes = store.repo.setdefault(kind, {})
        for name, cls in offers.items():
            file, package = f"{name}.yaml", f"callbacks.{name}" if kind == "callbacks" else None
            if file in nodes and nodes[file].node is cls:
                continue
            offer = registry.offers[kind].get(name)  # None if its plugin was dropped
            if offer and offer.origin:  # a third-party plugin; built-in ones are known to be valid
                try:
                    OmegaConf.structured(schema(cls, name))
                except OmegaConfBaseException as error:
                    cause = " ".join(str(error).split())
                    registry.drop(offer, f"{kind}={name}: fields are not valid settings: {cause}")
                    continue
            node: Any = cls
            nodes[file] = ConfigNode(file, node, kind, package, None)
            composition_cache.clear()


@functools.cache
def schema(cls: type, name: str) -> type:
    """Return a dataclass with a `name` field and the fields of `cls`, so that a saved config names its parts."""
    hints = type_hints(cls)
    parts: list[tuple[str, Any, Any]] = [("name", str, field(default=name))]
    for f in dataclasses.fields(cls):
        parts.append((f.name, hints[f.name], field(default=f.default, default_factory=f.default_factory)))
    return dataclasses.make_dataclass(cls.__name__, parts)


def part_classes(kind: str, registry: Registry) -> dict[str, type]:
    """Return {name: class} of the plugins for `kind`, such as model; for engines, include the choice `auto`."""
    auto = {AUTO: AutoEngine} if kind == "engine" else {}
    return auto | {name: offer.cls for name, offer in registry.offers.get(kind, {}).items()}


def all_part_classes(registry: Registry) -> dict[str, dict[str, type]]:
    """Return {kind: {name: class}} for every kind of part that a configuration chooses."""
    return {kind: part_classes(kind, registry) for kind in (*PARTS, "callbacks")}


def part_class(kind: str, node: Mapping[str, Any], registry: Registry) -> type:
    """Return the class of the part whose name is `node["name"]`; raise UserError if no part has this name."""
    return part_classes(kind, registry).get(str(node["name"])) or registry.get(kind, str(node["name"]))


@dataclass(frozen=True)
class Source:
    """Source of a configuration. It is toyexp's directory conf/, or a user's directory with conf/ as fallback."""

    directory: Path
    name: str = "config"
    extra: Path | None = None  # additional directory of presets
    saved: bool = False  # the saved configuration of a run
    origin: Origin = field(default_factory=Origin, compare=False)  # start directory of that run

    @classmethod
    def from_run(cls, directory: Path, chosen: Mapping[str, str], modules: Sequence[str]) -> Source:
        """Return a source that reads the saved configuration of a run.

        `chosen` maps the keys given on the command line to their values. If it has the key `engine` or `callbacks`, the
        saved section of that name is left out. Raise UserError if `chosen` names another model, data set, recipe,
        optimiser or objective than the run has. Also raise it if a local plugin of the run is not in `modules`.
        """
        file = directory / "config.yaml"
        saved = load_run_config(file)
        require_plugins(saved.get("plugins"), modules, str(file))
        if "hydra" in saved:
            raise UserError(f"{file}: the key hydra has no effect when a run is resumed; remove it")
        for kind in ("model", "data", "recipe", "optim", "objective"):
            saved_node, chosen_name = saved.get(kind), chosen.get(kind)
            if not isinstance(saved_node, dict) or chosen_name in (None, saved_node.get("name")):
                continue
            saved_name = printable(str(saved_node.get("name")))
            raise UserError(f"resume={directory}: the run has {kind}={saved_name}; leave {kind}={chosen_name} out")
        others = {"engine", "callbacks"} & chosen.keys()
        origin = parse_origin(saved_state(directory))
        if others:
            return cls._write_config({k: v for k, v in saved.items() if k not in others}, origin)
        return cls(directory.absolute(), saved=True, origin=origin)

    @classmethod
    def _write_config(cls, settings: Mapping[str, Any], origin: Origin) -> Source:
        """Write settings to a temporary file, because Hydra needs one, and return a source that reads it.

        The file is deleted when the source is garbage-collected.
        """
        source = cls(Path(tempfile.mkdtemp(prefix="toyexp-")), saved=True, origin=origin)
        weakref.finalize(source, shutil.rmtree, source.directory, ignore_errors=True)
        text = yaml.safe_dump(dict(settings), sort_keys=False)
        (source.directory / "config.yaml").write_text(text, encoding="utf-8")
        return source

    @classmethod
    def from_flags(cls, path: str | None = None, name: str | None = None, extra: str | None = None) -> Source:
        """Return the source named by --config-path, --config-name, --config-dir; raise UserError if one is missing."""
        main_hint = "type --config-path DIR --config-name NAME"
        for flag, value, hint in (("--config-path", path, main_hint), ("--config-dir", extra, EXPERIMENT_HINT)):
            if value is not None and Path(value).is_file():
                raise UserError(f"{flag} {value}: is a file, but must be a directory; {hint}")
            if value is not None:
                require_directory(value, f"{flag} {value}")
        directory = Path(path).absolute() if path else CONF
        origin = parse_origin({"cwd": os.environ.get(START_DIRECTORY)})
        extra_directory = Path(extra).absolute() if extra else None
        source = cls(directory, (name or "config").removesuffix(".yaml"), extra_directory, origin=origin)
        file = directory / f"{source.name}.yaml"
        if not file.exists():
            stems = [p.stem for p in directory.glob("*.yaml")]
            hint = (
                f"{'' if name else 'add --config-name NAME; '}{suggest(source.name, stems)}"
                if stems
                else EXPERIMENT_HINT
            )
            subject = f"--config-name {source.name}" if name else f"--config-path {path}"
            raise UserError(f"{subject}: {directory} has no {source.name}.yaml; {hint}")
        require_file(file, f"--config-name {source.name}: {file}")
        return source

    @property
    def directories(self) -> list[Path]:
        """Directories that may contain presets."""
        return list(dict.fromkeys(d for d in (self.directory, self.extra, CONF) if d))

    def overrides(self) -> list[str]:
        """Return the overrides that Hydra needs if presets can come from several directories; else an empty list.

        The overrides set Hydra's search path and the output directories. If the main file is the user's and has no
        settings of Hydra, they also set logging as toyexp does. Only the main file may set output directories.
        Therefore the overrides repeat the directories of the main file, which a preset then cannot change.
        """
        if len(self.directories) == 1:
            return []
        quoted = [f'"file://{d}"'.replace("\\", "\\\\") for d in self.directories[1:]]
        added = [f"hydra.searchpath=[{','.join(quoted)}]", "hydra.output_subdir=null"]
        our_hydra = load_yaml(CONF / "config.yaml")["hydra"]
        if self.directory == CONF:
            return added + _directory_overrides(our_hydra)
        path = self.directory / f"{self.name}.yaml"
        user_config = load_yaml(path) or {}
        if not isinstance(user_config, dict):
            raise UserError(f"{path}: must contain keys with values, such as steps: 100")
        user_hydra: dict[str, Any] = user_config["hydra"] if isinstance(user_config.get("hydra"), dict) else {}
        quiet = [] if user_hydra else ["hydra/hydra_logging=none", "hydra/job_logging=none"]
        return added + quiet + _directory_overrides({k: {**our_hydra[k], **(user_hydra.get(k) or {})} for k in PLACES})


def _directory_overrides(hydra_node: Mapping[str, Any]) -> list[str]:
    nodes = [(f"hydra.{k}.{n}", str(value)) for k in PLACES for n, value in hydra_node[k].items()]
    return [f"{key}={QuotedString(text, Quote.single).with_quotes()}" for key, text in nodes]


def load_yaml(path: Path, load: Callable[[str], Any] = yaml.safe_load, preset: bool = False) -> Any:
    """Load a configuration file; raise UserError if it is not YAML or holds anything other than settings."""
    text = read_config(path)
    if not path.is_relative_to(CONF):
        check_file(path, text, preset)
    try:
        return load(text)
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        location = f"{path}, line {mark.line + 1}" if mark else str(path)
        raise UserError(f"{location}: not valid YAML: {problem or 'cannot be parsed'}") from None


def load_run_config(path: Path) -> dict[str, Any]:
    """Load the config.yaml of a run; raise UserError if it is damaged."""
    remedy = "this file of the run is damaged; restore it from a copy, or start a new run"
    try:
        saved = load_yaml(path)
    except UserError as error:
        if re.search("not valid YAML|not UTF-8", str(error)):
            raise UserError(f"{str(error).partition(';')[0]}; {remedy}") from None
        raise
    settings: dict[str, Any] = saved if isinstance(saved, dict) else {}
    if missing := [key for key in ("model", "data", "recipe", "optim", "callbacks") if key not in settings]:
        raise UserError(f"{path}: has no {missing[0]}; {remedy}")
    return settings


def compose_raw(overrides: Sequence[str], source: Source) -> DictConfig:
    """Compose a configuration with Hydra from `source`. Hydra's exceptions are not converted to UserError.

    The overrides that `source` itself needs come first, then `overrides`.
    """
    with hydra.initialize_config_dir(str(source.directory), version_base="1.3", job_name="toyexp"):
        return hydra.compose(source.name, overrides=[*source.overrides(), *overrides], return_hydra_config=True)
