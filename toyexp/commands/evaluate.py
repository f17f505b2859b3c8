"""The held-out loss of a model in a GGUF file, on any engine: what `toyexp eval` shows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toyexp.base.blame import batches_of
from toyexp.base.bounds import is_whole
from toyexp.base.errors import RunFailed, UserError
from toyexp.base.memory import TO_EVALUATE, running_out
from toyexp.commands.by_class import OfClass, by_class, table
from toyexp.commands.evaldata import Trained, kind_of, trained_on
from toyexp.commands.options import Answer, one_file
from toyexp.commands.variants import one_experiment
from toyexp.config.adapters import adapter_of
from toyexp.config.request import Request
from toyexp.config.restored import file_of
from toyexp.contract.batch import Batch
from toyexp.contract.command import Arguments
from toyexp.contract.compatibility import of_kind, unread
from toyexp.contract.data import open_data
from toyexp.contract.dataset import Dataset
from toyexp.contract.kind import Figure
from toyexp.contract.model import Model, scores_of, sizes_of
from toyexp.contract.recipe import Setup
from toyexp.contract.registry import Registry
from toyexp.contract.session import Session
from toyexp.datasets.images import ImageDataset
from toyexp.formats.file_plan import frozen_plan, see_as
from toyexp.formats.gguf.header import origin
from toyexp.formats.gguf.open_model import model_in
from toyexp.formats.gguf.source import opened
from toyexp.formats.gguf.tokenizer import has_text
from toyexp.reference.forward import check_forward
from toyexp.training.memory import check_plan

if TYPE_CHECKING:
    from toyexp.training.parts import Config

HELP = """\
usage: toyexp eval MODEL [key=value ...] [--data PATH] [--adapter PATH] [--json]

How well a model does on held-out data: its loss, perplexity and bits per byte, or for images its accuracy, and that
of each class with what it is mistaken for.
MODEL is a GGUF file, the directory of a run that left a model.gguf, or a checkpoint (run/checkpoints/step-200).
  toyexp eval outputs/warm-llama/2026-11-21_050553_073724 engine=ggml
                                                          on the run's own data, as the run evaluated it
  toyexp eval model.gguf                                  the standard library's held-out part, the best engine here
  toyexp eval model.gguf --data book.txt engine=ggml      short for data=text data.path=book.txt
  toyexp eval digits.gguf data=digits
  toyexp eval base.gguf --adapter outputs/lora-llama/2026-11-21_050553_073724
                                                          a LoRA adapter on a base: of a run, on that run's own data; a
                                                          file adapter.gguf; or a directory of PEFT's

A run says in its config.yaml which data, window and batch_size it had; what is typed takes their place. PATH is a file
of text, .jsonl, or packed ids (.bin, .npy), or a folder of text or of images. Its held-out part is taken, in a few
batches; for all that can be: data.val_fraction=0.999 data.eval_batches=1000000 (of images data.eval_images=0).
Sizes and tokenizer come from the model's file. model.context=N takes windows of N tokens, batch_size=N so many at a
time; beside these go data.*, engine, engine.* and plugins=[...]."""

SHARE = ("val_fraction", "eval_batches", "eval_images")
TAKEN = ("data", "engine", "batch_size", "plugins")  # keys, with those below them


@dataclass(frozen=True)
class Evaluation(Answer):
    """What a model scored."""

    file: str
    model: str
    adapter: str | None  # that was put on it
    engine: str
    data: str
    path: str | None  # of the data, where it has one
    left_out: list[str]  # what of the data is not taken, and which key changes that
    share: Mapping[str, float]  # the settings that say how much of the data is held out, and how much of that is taken
    own: bool  # whether it is what the model's run was trained on
    targets: int  # tokens predicted, or images classified
    loss: float  # nats a target
    figures: Sequence[Figure]  # what the kind of data makes of it: of text, perplexity and bits per byte
    scores: Mapping[str, float]  # what else the model reports, such as accuracy
    classes: list[OfClass] | None = None  # how it did by class, where there is one for a whole example

    def plain(self) -> dict[str, Any]:
        """What is known of text alone is null for others."""
        plain = asdict(self)
        known = {"perplexity": None, "bits_per_byte": None} | {name: value for name, value, _ in plain.pop("figures")}
        return {**plain, **known}

    def lines(self) -> list[str]:
        """What it read, and what it scored."""
        found = [f"loss {self.loss:.4f}", *(figure.shown for figure in self.figures if figure.value is not None)]
        found += [f"{name} {value:.4f}" for name, value in self.scores.items()]
        named = " ".join(filter(None, (self.data, self.path))) + (", the run's own" if self.own else "")
        data = "; ".join((named, *self.left_out))
        share = ", ".join(f"data.{key}={value}" for key, value in self.share.items())
        return [
            f"model   {self.file}, {self.model}",
            *([f"adapter {self.adapter}"] if self.adapter else []),
            f"engine  {self.engine}",
            f"data    {data}, {self.targets} held-out targets{f' ({share})' if share else ''}",
            " · ".join(found),
            *(table(self.classes) if self.classes else []),
        ]


def run(arguments: Arguments) -> int:
    """Evaluates a model, and shows what it scored; RunFailed for a loss that is no number."""
    files = [word for word in arguments.rest if "=" not in word]
    usage = ", settings behind it, --data, --adapter and --json: toyexp eval model.gguf batch_size=4"
    what = one_file("eval", files, usage)
    request = one_experiment("eval", [word for word in arguments.settings if "=" in word])
    adapter = arguments.values.get("--adapter")
    found = evaluate(what, request, arguments.values.get("--data"), Path(adapter) if adapter else None)
    found.show(arguments)
    if not math.isfinite(found.loss):
        raise RunFailed(f"{found.file}: its held-out loss is {found.loss}")
    return 0


def evaluate(what: Path, request: Request, data: str | None = None, adapter: Path | None = None) -> Evaluation:
    """Evaluates the model in a file or a run's directory on held-out data; UserError for what does not fit together.

    That is what the settings or the path `data` say, or else the run's own: of a LoRA `adapter` that of its run.
    """
    typed, registry = _check_taken(request), request.registry
    path = file_of(what, registry=registry)
    trained = (trained_on(adapter, request.modules) if adapter else None) or trained_on(what, request.modules)
    model = model_in(opened(str(path)), registry)
    put_on = adapter_of(adapter, lambda: model, registry) if adapter else None
    chosen = _data(model, path, typed, registry, trained, data)
    own = trained is not None and data is None and not any(key.split(".")[0] == "data" for key in typed)
    batch_size = [f"batch_size={trained.batch_size}"] if trained and "batch_size" not in typed else []
    built = request.before(*chosen, *batch_size).without("model.context").parts()
    built.engine.check_rows(built.settings.batch_size, 1)
    window = _window(request.values.get("model.context"), model, trained.context if trained else None)
    dataset = _opened(built, model, path)
    fitted = dataclasses.replace(model, **({"context": window} if window else {}))
    batches = fitted.batches(dataset, built.settings.batch_size, built.settings.seed)
    inputs = model.reads.bounded(batches.inputs, dataset.vocab)
    plan = frozen_plan(model, path, Setup(inputs, built.settings.batch_size), put_on)
    check_plan(plan, built.engine, TO_EVALUATE)
    built.engine.check_plan(plan)
    check_forward(plan, str(origin(path)))
    naming = batches_of(built.data.name, "was refused")
    with naming, running_out(TO_EVALUATE), built.engine.realize(plan) as session:
        session.build()
        held_out = batches.held_out()  # made once it is known that they fit
        loss, scores = session.evaluate(held_out), scores_of(model, session.logits, held_out)
        classes = _by_class(session, held_out, dataset)
    weights = sum(float(batch["weights"].sum(dtype="float64")) for batch in held_out)
    return Evaluation(
        file=str(origin(path)), model=f"{model.name}, {model.parameters()} parameters",
        adapter=str(origin(put_on)) if put_on else None, engine=built.engine_note,
        data=built.data.name, path=built.plain["data"].get("path"), left_out=[*dataset.left_out(), *batches.left_out],
        share={key: built.plain["data"][key] for key in SHARE if key in built.plain["data"]}, own=own,
        targets=round(weights), loss=loss,
        figures=model.reads.figures(loss, held_out, dataset), scores=scores, classes=classes,
    )  # fmt: skip


def _by_class(session: Session, held_out: Sequence[Batch], dataset: Dataset) -> list[OfClass] | None:
    """How it did by class; None where each position of an example has a target of its own."""
    inputs = session.plan.inputs
    if inputs["targets"].shape:
        return None
    read = [name for name in inputs if name not in ("targets", "weights")]
    return by_class(session.logits, held_out, read, dataset.classes if isinstance(dataset, ImageDataset) else ())


def _check_taken(request: Request) -> list[str]:
    """The keys that were typed; UserError for one that changes nothing here."""
    typed = [o.key_or_group for o in request.settings]
    for key in typed:
        if key.split(".")[0] not in TAKEN and key != "model.context":
            raise UserError(
                f"eval {key}: the model comes from its file and nothing is trained; eval takes model.context, "
                f"{', '.join(TAKEN)}"
            )
    return typed


def _data(
    model: Model, path: Path, typed: Sequence[str], registry: Registry, trained: Trained | None, data: str | None
) -> list[str]:
    """Which data, as typed, before what was typed."""
    if data is not None and "data" in typed:
        raise UserError(f"--data {data}: goes without data=..., which says the same")
    own = trained.settings(path, has_text(opened(str(path)))) if trained else []
    if data is not None:
        from toyexp.config.words import setting

        kind, given = f"data={kind_of(Path(data), model, registry)}", setting("data.path", data)
        return [*(own if kind in own else [kind]), given]
    if "data" in typed:
        return []
    return own or [f"data={name}" for name in of_kind(model.reads, registry)[:1]]


def _opened(built: Config, model: Model, path: Path) -> Dataset:
    """The data; UserError for what the file's model cannot read."""
    if reason := unread(str(origin(path)), model.reads, built.data):
        raise UserError(reason)
    dataset = open_data(built.data, path if model.reads.text else None)
    if model.reads.text and dataset.vocab > sizes_of(model).get("vocab", dataset.vocab):
        raise UserError(f"{origin(path)}: the data's token ids go beyond its vocabulary; leave data.tokenizer out")
    see_as(dataset, model, path)
    return dataset


def _window(given: str | None, model: Model, trained: int | None) -> int | None:
    """Tokens of a window: as typed, as trained, or the model's own up to 512: longer ones gain little and cost much."""
    if not model.context:
        return None
    if given is None:
        return min(model.context, trained or 512)
    if not is_whole(given, 1, model.context):
        raise UserError(f"model.context={given}: must be a whole number from 1 to {model.context}, the file's own")
    return int(given)
