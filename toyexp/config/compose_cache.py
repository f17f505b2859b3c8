"""Compositions kept for the jobs of a sweep and for a process that composes again, and Hydra's state of a caller."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Iterator, Sequence
from typing import Any

from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton
from omegaconf import DictConfig, OmegaConf, read_write
from omegaconf.errors import OmegaConfBaseException

from toyexp.config.paths import CONF
from toyexp.config.schema import Source, compose_raw, composition_cache
from toyexp.config.top_level import GROUPS
from toyexp.config.words import parse

JOB_KEYS = ("hydra.run.dir", "hydra.sweep.", "hydra.job.num")  # where it is, and nothing is chosen by
CACHE_SIZE = 32  # choices of names that are kept: a composition takes some memory
HYDRA_REFERENCE = re.compile(r"hydra[.:](?!job\.num)")  # as ${hydra:job.override_dirname}, which tells of all the words

_presets: list[tuple[str, int, int]] = []  # the files of which composed_before is


def compose_cached(words: Sequence[str], source: Source) -> DictConfig:
    """Compose words with Hydra; its errors go through.

    Names that a process chooses again and again from toyexp's own presets are composed twice, and then copied.
    """
    names, _ = _split_job_words(words)
    if _presets != (now := _preset_files()):  # a person edits them while a notebook runs
        composition_cache.clear()
        _presets[:] = now
    if (source, names) not in composition_cache:
        if source == Source(CONF) and all(map(_is_choice, names)) and len(composition_cache) < CACHE_SIZE:
            composition_cache[source, names] = None
        return compose_raw(words, source)
    if composition_cache[source, names] is None:
        store_composition(words, source)
    base = composition_cache[source, names]
    cfg = _set_values(copy.deepcopy(base), words) if base is not None else None
    return compose_raw(words, source) if cfg is None else cfg


def store_composition(words: Sequence[str], source: Source) -> None:
    """Compose the names that these words choose, for `composed`; names that depend on other words are left to Hydra."""
    names, _ = _split_job_words(words)
    if len(composition_cache) == CACHE_SIZE:
        composition_cache.clear()
    if composition_cache.get((source, names)) is None and all(map(_is_choice, names)):
        cfg = compose_raw(names, source)
        own = OmegaConf.to_yaml(OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"]))
        composition_cache[source, names] = None if HYDRA_REFERENCE.search(own) else cfg


def _preset_files() -> list[tuple[str, int, int]]:
    """toyexp's presets as they stand: path, time of the last change in ns, bytes."""
    stated = [(str(path), path.stat()) for path in sorted(CONF.rglob("*.yaml"))]
    return [(path, status.st_mtime_ns, status.st_size) for path, status in stated]


def split_choices(words: Sequence[str]) -> tuple[tuple[str, ...], list[str]]:
    """The words that choose by name, add a key or hold keys of their own, and those that give a key a value."""
    keys = {word: word.partition("=") for word in words}
    names = tuple(
        w
        for w, (key, _, value) in keys.items()
        if key in GROUPS or not key.replace(".", "").isidentifier() or key[:6] == "hydra." or value[:1] == "{"
    )
    return names, [word for word in words if word not in names]


def _set_values(cfg: DictConfig, words: Sequence[str]) -> DictConfig | None:
    """The same with the values that the words give to keys; None where one cannot be set."""
    _, values = _split_job_words(words)
    if any(HYDRA_REFERENCE.search(word.partition("=")[2]) for word in values):
        return None
    try:
        with read_write(cfg.hydra):
            for override in parse(values):
                OmegaConf.update(cfg, override.key_or_group, override.value(), merge=True)
    except (OmegaConfBaseException, AttributeError):
        return None
    return cfg


def _split_job_words(words: Sequence[str]) -> tuple[tuple[str, ...], list[str]]:
    names, values = split_choices(words)
    told = [word for word in names if word.startswith(JOB_KEYS)]
    return tuple(word for word in names if word not in told), [*values, *told]


def _is_choice(word: str) -> bool:
    """Whether a word chooses and does nothing else: others count in the order in which they were typed."""
    key, _, value = word.partition("=")
    return key in GROUPS and value[:1] != "{"


_schemas: dict[str, Any] = {}  # schemas of plugins, which take a while to make, as Hydra's store holds them


@contextlib.contextmanager
def isolate_hydra() -> Iterator[None]:
    """Afterwards Hydra has the schemas, the readers of files and the configuration that it had before."""
    Plugins.instance()  # which makes its readers known, once in a process
    store, sources = ConfigStore.instance(), SourcesRegistry.instance()
    theirs, readers = store.repo, sources.types
    had = HydraConfig in Singleton._instances
    cfg = HydraConfig.instance().cfg
    begun = GlobalHydra.instance().hydra  # where the caller composes something, or runs under @hydra.main
    if not _schemas:
        _schemas.update({name: theirs[name] for name in ("hydra", "_dummy_empty_config_.yaml")})
    store.repo, sources.types = _schemas, dict(readers)
    GlobalHydra.instance().hydra = None
    try:
        yield
    finally:
        store.repo, sources.types = theirs, readers
        GlobalHydra.instance().hydra = begun
        HydraConfig.instance().cfg = cfg
        if not had:
            del Singleton._instances[HydraConfig]
