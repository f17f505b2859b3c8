"""What is composed before it is asked for: a sweep's job is forked from a process that has done so once for many."""

from __future__ import annotations

import re
from collections.abc import Sequence

from omegaconf import DictConfig, OmegaConf, read_write
from omegaconf.errors import OmegaConfBaseException

from toyexp.config.schema import Source, compose_raw
from toyexp.config.top_level import GROUPS
from toyexp.config.words import parse

OF_A_JOB = ("hydra.run.dir", "hydra.sweep.", "hydra.job.num")  # where it is, and nothing is chosen by
CHOICES = 8  # of names that are kept: a composition takes some memory

_kept: dict[tuple[Source, tuple[str, ...]], DictConfig] = {}


def told_apart(words: Sequence[str]) -> tuple[tuple[str, ...], list[str]]:
    """The words that choose by name, add a key or hold keys of their own, and those that give a key a value."""
    keys = {word: word.partition("=") for word in words}
    names = tuple(
        w
        for w, (key, _, value) in keys.items()
        if key in GROUPS or not key.replace(".", "").isidentifier() or key[:6] == "hydra." or value[:1] == "{"
    )
    return names, [word for word in words if word not in names]


def keep(words: Sequence[str], source: Source) -> None:
    """Composes what these choose by name, unless that is there; what is made of words that vary is left to Hydra."""
    names, _ = _of_a_job(words)
    if (source, names) in _kept or len(_kept) == CHOICES or not all(_is_choice(name) for name in names):
        return
    cfg = compose_raw(names, source)
    own = OmegaConf.to_yaml(OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"]))
    if not re.search(r"hydra[.:](?!job\.num)", own):  # as ${hydra:job.override_dirname}
        _kept[source, names] = cfg


def take(words: Sequence[str], source: Source) -> DictConfig | None:
    """What Hydra would compose, but for its record of the words, from what was kept; None where nothing was.

    It can be had once, and where a value cannot be set nothing is: what is wrong with it is for Hydra to find.
    """
    names, values = _of_a_job(words)
    if (cfg := _kept.pop((source, names), None)) is None:
        return None
    try:
        with read_write(cfg.hydra):
            for override in parse(values):
                OmegaConf.update(cfg, override.key_or_group, override.value(), merge=True)
    except (OmegaConfBaseException, AttributeError):
        return None
    return cfg


def _of_a_job(words: Sequence[str]) -> tuple[tuple[str, ...], list[str]]:
    names, values = told_apart(words)
    told = [word for word in names if word.startswith(OF_A_JOB)]
    return tuple(word for word in names if word not in told), [*values, *told]


def _is_choice(word: str) -> bool:
    """Whether a word chooses and does nothing else: others count in the order in which they were typed."""
    key, _, value = word.partition("=")
    return key in GROUPS and value[:1] != "{"
