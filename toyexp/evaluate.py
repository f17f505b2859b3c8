"""The held-out loss of a model in a GGUF file, on any engine: what `toyexp eval` shows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from toyexp.errors import UserError
from toyexp.frozen import frozen_plan
from toyexp.gguf.model import model_of
from toyexp.recipe import Setup
from toyexp.registry import Registry
from toyexp.restored import origin

HELP = """\
usage: toyexp eval MODEL [key=value ...] [--data PATH] [--json]

How well a model does on held-out data: its loss, perplexity and bits per byte, or for images its accuracy.
MODEL is a GGUF file, the directory of a run that left a model.gguf, or a checkpoint (run/checkpoints/step-200).
  toyexp eval model.gguf                                  the standard library's held-out part, the best engine here
  toyexp eval model.gguf --data book.txt engine=ggml      short for data=text data.path=book.txt
  toyexp eval digits.gguf data=digits

Sizes and tokenizer come from the file. model.context=N takes windows of N tokens, batch_size=N so many at a time."""


@dataclass(frozen=True)
class Evaluation:
    """What a model scored."""

    file: str
    model: str
    engine: str
    data: str
    targets: int  # tokens predicted, or images classified
    loss: float  # nats a target
    perplexity: float | None  # of text
    bits_per_byte: float | None  # of text whose tokens are known
    scores: Mapping[str, float]  # what else the model reports, such as accuracy

    def plain(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)

    def lines(self) -> list[str]:
        """For a person."""
        found = [f"loss {self.loss:.4f}"]
        if self.perplexity is not None:
            found.append(f"perplexity {self.perplexity:.2f}")
        if self.bits_per_byte is not None:
            found.append(f"{self.bits_per_byte:.3f} bits per byte")
        found += [f"{name} {value:.4f}" for name, value in self.scores.items()]
        return [
            f"model   {self.file}, {self.model}",
            f"engine  {self.engine}",
            f"data    {self.data}, {self.targets} held-out targets",
            " · ".join(found),
        ]


def evaluate(path: Path, settings: Sequence[str], registry: Registry, modules: Sequence[str]) -> Evaluation:
    """Evaluates the file's model on the held-out part of the data; UserError for whatever does not fit together."""
    from toyexp import config
    from toyexp.schema import Source

    model = model_of(path, registry)
    typed = [s.partition("=")[0].lstrip("+~") for s in settings]
    for key in typed:
        if key.split(".")[0] in ("recipe", "optim", "callbacks", "model") and key != "model.context":
            raise UserError(f"{key}: the model comes from {path}, and nothing is trained")
    default = [] if model.reads == "tokens" or "data" in typed else ["data=digits"]
    known = [s for s in settings if not s.startswith("model.context=")]
    built = config.build(config.compose([*default, *known], registry, Source.of(None, None, None)), registry, modules)
    if built.data.gives != model.reads:
        raise UserError(f"{path} reads {model.reads}; data={built.data.name} gives {built.data.gives}")
    dataset = built.data.open(path if model.reads == "tokens" else None)
    if model.reads == "tokens" and dataset.vocab > model.vocab:  # type: ignore[attr-defined]
        raise UserError(f"{path}: the data's token ids go beyond its vocabulary; leave data.tokenizer out")
    window = _window(settings, model)
    fitted = dataclasses.replace(model, **({"context": window} if window else {}))
    batches = fitted.batches(dataset, built.settings.batch_size, built.settings.seed)
    setup = Setup(batches.inputs, built.settings.batch_size)
    held_out = batches.held_out()
    with built.engine.realize(frozen_plan(model, path, setup)) as session:
        session.build()
        loss, scores = session.evaluate(held_out), model.scores(session, held_out)
    weights = sum(float(batch["weights"].sum(dtype="float64")) for batch in held_out)
    text = model.reads == "tokens"
    return Evaluation(
        file=str(origin(path)), model=f"{model.name}, {model.parameters()} parameters", engine=built.engine_note,
        data="; ".join([built.data.name, *dataset.left_out()]), targets=round(weights), loss=loss,
        perplexity=math.exp(min(loss, 700)) if text else None,
        bits_per_byte=_bits_per_byte(loss, held_out, dataset) if text else None, scores=scores,
    )  # fmt: skip


def _window(settings: Sequence[str], model: Any) -> int | None:
    """Tokens of a window: as typed, or the model's own up to 512, where longer ones gain little and cost much."""
    if model.reads != "tokens":
        return None
    given = [s.partition("=")[2] for s in settings if s.startswith("model.context=")]
    if not given:
        return min(int(model.context), 512)
    if not given[-1].isdigit() or not 1 <= int(given[-1]) <= model.context:
        raise UserError(f"model.context={given[-1]}: must be a whole number from 1 to {model.context}, the file's own")
    return int(given[-1])


def _bits_per_byte(loss: float, held_out: Sequence[Mapping[str, Any]], dataset: Any) -> float | None:
    """The loss of all targets over the bytes that they stand for."""
    tokenizer = getattr(dataset, "tokenizer", None)
    if tokenizer is None:
        return None
    lengths = np.array([len(tokenizer.bytes_of(i)) for i in range(tokenizer.vocab)])
    kept = np.concatenate([b["targets"][b["weights"] > 0] for b in held_out])
    total = int(lengths[kept].sum())
    return loss * len(kept) / total / math.log(2) if total else None
