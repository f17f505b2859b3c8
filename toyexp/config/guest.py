"""Hydra in a process that is somebody else's, who may use it too: what it knows globally is ours for a while alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton

_ours: dict[str, Any] = {}  # schemas of plugins, which take a while to make, as Hydra's store holds them


@contextlib.contextmanager
def own_hydra() -> Iterator[None]:
    """Afterwards Hydra has the schemas, the readers of files and the configuration that it had before."""
    Plugins.instance()  # which makes its readers known, once in a process
    store, sources = ConfigStore.instance(), SourcesRegistry.instance()
    theirs, readers = store.repo, sources.types
    had = HydraConfig in Singleton._instances
    cfg = HydraConfig.instance().cfg
    begun = GlobalHydra.instance().hydra  # where the caller composes something, or runs under @hydra.main
    if not _ours:
        _ours.update({name: theirs[name] for name in ("hydra", "_dummy_empty_config_.yaml")})
    store.repo, sources.types = _ours, dict(readers)
    GlobalHydra.instance().hydra = None
    try:
        yield
    finally:
        store.repo, sources.types = theirs, readers
        GlobalHydra.instance().hydra = begun
        HydraConfig.instance().cfg = cfg
        if not had:
            del Singleton._instances[HydraConfig]
