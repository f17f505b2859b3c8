"""Whether settings can be what they are: sets are compared, and the words for what is wrong looked for only then."""

from __future__ import annotations

from collections.abc import Sequence

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig

from toyexp.config.keys import Keys
from toyexp.config.schema import Source
from toyexp.config.typed import without_hydra


def check_settings(typed: Sequence[Override], keys: Keys, source: Source) -> None:
    """Raises UserError for what Hydra would accept without effect, or refuse in words of its own."""
    if not keys.are_plain(typed, source):
        from toyexp.config import mistakes

        for override in typed:
            mistakes.check_override(override, keys.registry, source)


def check_keys(cfg: DictConfig, keys: Keys) -> Keys:
    """The keys of what a configuration chooses; UserError for one that nobody reads, and a part that is missing."""
    ours, chosen = without_hydra(cfg), keys.of_config(cfg)
    if not chosen.are_those_of(ours):
        from toyexp.config import mistakes

        mistakes.check_keys(ours, chosen)
    return chosen
