"""One experiment on several engines side by side: what `toyexp parity` and `toyexp bench` start from."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from toyexp.config.request import Request, one_experiment, take_engines
from toyexp.interfaces.command import Arguments
from toyexp.training.experiment import prepare
from toyexp.training.run_config import Prepared
from toyexp.training.settings import OF_A_RUN, Settings, keys_with

ALONE = {*keys_with(OF_A_RUN, Settings), "sweep", "hydra"}  # what is about a run alone


def prepared_on(request: Request, labels: Sequence[str]) -> dict[str, Prepared]:
    """The experiment on each engine, by its label as it was typed: ggml, ggml:blas=false."""
    return {label: prepare(asked.parts()) for label, asked in request.on_engines(labels).items()}


def on_engines(
    command: str, arguments: Arguments, ignored: Collection[str], default: str = "cpu,ggml"
) -> tuple[Request, list[str]]:
    """What is asked of one experiment, and the engines that it is to be on; see `one_experiment`."""
    labels, settings = take_engines(arguments.settings, default)
    return one_experiment(command, settings, ignored), labels
