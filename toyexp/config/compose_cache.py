"""Cache of composed configurations for jobs of a sweep, and isolation of Hydra's global state."""

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

JOB_KEYS = ("hydra.run.dir", "hydra.sweep.", "hydra.job.num")  # keys that differ between jobs but choose no part
CACHE_SIZE = 32  # maximum number of entries
HYDRA_REFERENCE = re.compile(r"hydra[.:](?!job\.num)")  # ${hydra:job.override_dirname} depends on all overrides

_presets: list[tuple[str, int, int]] = []  # the presets (see _preset_files) that the cache is valid for


def compose_cached(words: Sequence[str], source: Source) -> DictConfig:
    """Compose overrides with Hydra; exceptions of Hydra are not converted to UserError.

    If only toyexp's own presets are used, the second call that chooses a set of parts (model, data, ...) caches their
    composition. From then on, calls that choose the same parts copy it and set plain values, such as lr=0.1, in the
    copy.
    """
    names, _ = _split_job_words(words)
    if _presets != (now := _preset_files()):  # files may be edited while a notebook runs
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
    """Compose the overrides in `words` that choose parts, without the other overrides, and cache the result.

    Cache None instead if the result refers to settings of Hydra that depend on all overrides, such as
    hydra.job.override_dirname.
    """
    names, _ = _split_job_words(words)
    if len(composition_cache) == CACHE_SIZE:
        composition_cache.clear()
    if composition_cache.get((source, names)) is None and all(map(_is_choice, names)):
        cfg = compose_raw(names, source)
        text = OmegaConf.to_yaml(OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"]))
        composition_cache[source, names] = None if HYDRA_REFERENCE.search(text) else cfg


def _preset_files() -> list[tuple[str, int, int]]:
    """Return path, modification time in ns and size in bytes of toyexp's presets."""
    files = [(str(path), path.stat()) for path in sorted(CONF.rglob("*.yaml"))]
    return [(path, status.st_mtime_ns, status.st_size) for path, status in files]


def split_choices(words: Sequence[str]) -> tuple[tuple[str, ...], list[str]]:
    """Split overrides into two lists.

    The first list has the overrides that choose a part, add a key, set a mapping, or set a key of Hydra. The second
    list has all others, which set plain values such as lr=0.1.
    """
    keys = {word: word.partition("=") for word in words}
    names = tuple(
        w
        for w, (key, _, value) in keys.items()
        if key in GROUPS or not key.replace(".", "").isidentifier() or key[:6] == "hydra." or value[:1] == "{"
    )
    return names, [word for word in words if word not in names]


def _set_values(cfg: DictConfig, words: Sequence[str]) -> DictConfig | None:
    """Apply to `cfg` the overrides in `words` that set plain values. Return `cfg`, or None if a value cannot be set."""
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
    job_words = [word for word in names if word.startswith(JOB_KEYS)]
    return tuple(word for word in names if word not in job_words), [*values, *job_words]


def _is_choice(word: str) -> bool:
    """Return True if the override `word` only chooses a part, as model=gpt2 does.

    The cache is used only for such overrides, because the effect of the others depends on their order.
    """
    key, _, value = word.partition("=")
    return key in GROUPS and value[:1] != "{"


_schemas: dict[str, Any] = {}  # schemas of plugins, in the form of Hydra's store; slow to create


@contextlib.contextmanager
def isolate_hydra() -> Iterator[None]:
    """Give Hydra separate global state (schemas, file readers, configuration) in the `with` block.

    At the end of the block, restore the state that Hydra had before.
    """
    Plugins.instance()  # registers its file readers, once per process
    store, sources = ConfigStore.instance(), SourcesRegistry.instance()
    stored, readers = store.repo, sources.types
    was_set = HydraConfig in Singleton._instances
    cfg = HydraConfig.instance().cfg
    outer = GlobalHydra.instance().hydra  # set if the caller is composing, or runs under @hydra.main
    if not _schemas:
        _schemas.update({name: stored[name] for name in ("hydra", "_dummy_empty_config_.yaml")})
    store.repo, sources.types = _schemas, dict(readers)
    GlobalHydra.instance().hydra = None
    try:
        yield
    finally:
        store.repo, sources.types = stored, readers
        GlobalHydra.instance().hydra = outer
        HydraConfig.instance().cfg = cfg
        if not was_set:
            del Singleton._instances[HydraConfig]
