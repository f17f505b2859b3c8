"""One experiment on several engines side by side: what `toyexp parity` and `toyexp bench` start from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from toyexp.training.experiment import prepare
from toyexp.training.parts import Prepared

if TYPE_CHECKING:
    from toyexp.config.request import Request


@dataclass(frozen=True)
class Variant:
    """The experiment on one engine."""

    label: str  # as it was typed: ggml, ggml:blas=false
    prepared: Prepared


def prepare_variants(request: Request, labels: Sequence[str]) -> list[Variant]:
    """Composes the experiment once for each engine. Of the callbacks only the learning rate's schedule is asked."""
    return [Variant(label, prepare(asked.parts())) for label, asked in request.on_engines(labels).items()]
