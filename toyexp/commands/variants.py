"""One experiment on several engines side by side: what `toyexp parity` and `toyexp bench` start from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from toyexp.base.errors import UserError
from toyexp.contract.registry import Registry
from toyexp.training.experiment import prepare
from toyexp.training.parts import Prepared


@dataclass(frozen=True)
class Variant:
    """The experiment on one engine."""

    label: str  # as it was typed: ggml, ggml:blas=false
    prepared: Prepared


def prepare_variants(
    settings: Sequence[str], registry: Registry, modules: Sequence[str] = (), default: str = "cpu,ggml"
) -> list[Variant]:
    """Composes the experiment once for each engine of `engine=name[:key=value...],...`.

    A key behind a name is a setting of that engine alone; `engine.key=value` beside it is one of all of them. Of the
    callbacks only the learning rate's schedule is asked.
    """
    from toyexp.config import build as config
    from toyexp.config.schema import Source

    asked = [s.removeprefix("engine=") for s in settings if s.startswith("engine=")]
    if len(asked) > 1:
        raise UserError(f"engine={asked[1]}: the engines stand in one list: engine={','.join(asked)}")
    rest = [s for s in settings if not s.startswith("engine=")]
    labels = (asked or [default])[0].strip("[]").split(",")
    if len(set(labels)) < len(labels):
        raise UserError(f"engine={','.join(labels)}: names one twice; give each its own settings: ggml:threads=1")
    variants = []
    for label in labels:
        name, *own = label.split(":")
        if not all("=" in setting for setting in own):
            raise UserError(f"engine={label}: an engine's own settings are written {name}:key=value")
        overrides = [*rest, f"engine={name}", *(f"engine.{setting}" for setting in own)]
        cfg = config.compose(overrides, registry, Source.of(None, None, None))
        variants.append(Variant(label, prepare(config.build(cfg, registry, modules))))
    return variants
