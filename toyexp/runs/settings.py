"""The settings of runs under their whole names, as they are typed: optim.beta1, callbacks.cosine.warmup."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from toyexp.base.words import typed
from toyexp.training.rundir import settings_in

# What says nothing of a run's numbers, and differs between any two: what Hydra composes, and where it went on from.
LEFT_OUT = ("defaults", "resume", "hydra", "sweep")


def settings(run: Path) -> dict[str, str]:
    """All settings of a run as they are typed; none where its config.yaml cannot be read."""
    return {key: typed(value) for key, value in values(run).items()}


def values(run: Path) -> dict[str, Any]:
    """The same as the numbers, texts and lists that they are."""
    saved = settings_in(run / "config.yaml")
    return dict(_flat({k: v for k, v in saved.items() if k not in LEFT_OUT}))


def _flat(saved: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """A part's name stands under the part alone, `recipe`; a callback's says nothing."""
    for key, value in saved.items():
        whole = f"{prefix}{key}"
        if whole == "callbacks" and isinstance(value, Mapping):
            yield whole, list(value)
        if isinstance(value, Mapping) and value and prefix.count(".") < 8:
            yield from _flat(value, f"{whole}.")
        elif whole.endswith(".name"):
            if not whole.startswith("callbacks."):
                yield whole.removesuffix(".name"), value
        else:
            yield whole, value
