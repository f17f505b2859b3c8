"""Evaluate a model in a file on held-out data, on any engine."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from toyexp.base.attribution import attribute_errors, call_checked
from toyexp.base.errors import UserError, escape_cell, suggest
from toyexp.base.formatting import align_columns
from toyexp.base.validators import is_integer
from toyexp.batching.images import ImageDataset
from toyexp.config.build import resolve_paths
from toyexp.config.request import Request
from toyexp.config.safe_yaml import require_plugins
from toyexp.config.schema import load_yaml, part_class
from toyexp.config.words import format_override
from toyexp.formats.file_plan import match_preprocessing
from toyexp.formats.gguf.header import source_path
from toyexp.formats.gguf.tokenizer import has_text
from toyexp.inference.loaded_model import LoadedModel
from toyexp.inference.model_files import is_checkpoint
from toyexp.interfaces.command import Answer
from toyexp.interfaces.data import Data, open_data
from toyexp.interfaces.dataset import Batch, Dataset
from toyexp.interfaces.kind import DerivedMetric
from toyexp.interfaces.model import Model, compute_scores, model_settings
from toyexp.plugins.compatibility import kind_mismatch, matching_data
from toyexp.plugins.registry import Registry
from toyexp.training.provenance import Origin, data_digests, read_origin
from toyexp.training.run_config import Config

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
    own: bool  # whether it is what the model's run was trained on, by its digest
    targets: int  # tokens predicted, or images classified
    loss: float  # nats a target
    figures: Sequence[DerivedMetric]  # what the kind of data makes of it: of text, perplexity and bits per byte
    scores: Mapping[str, float]  # what else the model reports, such as accuracy
    note: str = ""  # on the data of a run, where it is not, or may not be, its own
    classes: list[ClassCounts] | None = None  # how it did by class, where there is one for a whole example

    def plain(self) -> dict[str, Any]:
        """What is known of text alone is null for others."""
        plain = asdict(self)
        known = {"perplexity": None, "bits_per_byte": None} | {name: value for name, value, _ in plain.pop("figures")}
        return {**plain, **known}

    def lines(self) -> list[str]:
        """What it read, and what it scored."""
        found = [f"loss {self.loss:.4f}", *(figure.text for figure in self.figures if figure.value is not None)]
        found += [f"{name} {value:.4f}" for name, value in self.scores.items()]
        named = " ".join(filter(None, (self.data, self.path))) + (", the run's own" if self.own else self.note)
        data = "; ".join((named, *self.left_out))
        share = ", ".join(f"data.{key}={value}" for key, value in self.share.items())
        held_out = "" if self.share.get("val_fraction") == 1 else "held-out "
        return [
            f"model   {self.file}, {self.model}",
            *([f"adapter {self.adapter}"] if self.adapter else []),
            f"engine  {self.engine}",
            f"data    {data}, {self.targets} {held_out}targets{f' ({share})' if share else ''}",
            " · ".join(found),
            *(class_table(self.classes) if self.classes else []),
        ]


def evaluate(what: Path, request: Request, data: str | None = None, adapter: Path | None = None) -> Evaluation:
    """Evaluate a model, with a LoRA `adapter` if given, on `data`, what the settings say, or its run's own data."""
    typed, registry = _check_settings(request), request.registry
    loaded = LoadedModel.open(what, registry, adapter)
    model = loaded.model
    trained = (read_trained(adapter, request.modules) if adapter else None) or read_trained(what, request.modules)
    chosen = _choose_data(loaded, typed, registry, trained, data)
    batch_size = [f"batch_size={trained.batch_size}"] if trained and "batch_size" not in typed else []
    with trained.record.explain_missing_paths(["data.path"]) if trained else nullcontext():
        built = request.with_defaults(*chosen, *batch_size).drop("model.context").build_config()
    built.engine.check_rows(built.settings.batch_size, 1)
    window = _window(request.values.get("model.context"), model, trained.context if trained else None)
    dataset = _open_dataset(built, loaded)
    keys = [key for key in (*typed, *(["data.path"] if data else [])) if key.split(".")[0] == "data"]
    data_of = built.plain["data"]
    own, note = trained.compare(dataset, keys, str(data_of.get("path") or "")) if trained else (False, "")
    fitted = dataclasses.replace(model, **({"context": window} if window else {}))
    batches = fitted.batches(dataset, built.settings.batch_size, built.settings.seed)
    inputs = model.reads.with_bounds(batches.inputs, dataset.vocab)
    boundary = attribute_errors(f"engine.{built.engine.name}", "while it evaluated", data=built.data.name)
    with boundary, loaded.session(built.engine, inputs, built.settings.batch_size) as session:
        held_out = batches.held_out()  # made once it is known that they fit
        loss, scores = session.evaluate(held_out), compute_scores(model, session.logits, held_out)
        read = [name for name in inputs if name not in ("targets", "weights")]
        names = dataset.classes if isinstance(dataset, ImageDataset) else ()
        of_an_example = not inputs["targets"].shape  # and not of each of its positions
        classes = count_by_class(session.logits, held_out, read, names) if of_an_example else None
    held = [remark for remark in dataset.remarks() if remark.startswith("held out: ")]  # by a folder, not by a share
    weights = sum(float(batch["weights"].sum(dtype="float64")) for batch in held_out)
    return Evaluation(
        file=loaded.name, model=f"{model.name}, {model.parameters()} parameters",
        adapter=str(source_path(loaded.adapter)) if loaded.adapter else None,
        engine=built.engine_note, data=built.data.name,
        path=data_of.get("path"), left_out=[*dataset.omissions(), *held, *batches.omissions], own=own, note=note,
        share={key: data_of[key] for key in (SHARE[1:] if held else SHARE) if key in data_of},
        targets=round(weights), loss=loss,
        figures=model.reads.derived_metrics(loss, held_out, dataset), scores=scores, classes=classes,
    )  # fmt: skip


def _check_settings(request: Request) -> list[str]:
    typed = [o.key_or_group for o in request.settings]
    for key in typed:
        if key.split(".")[0] not in TAKEN and key != "model.context":
            raise UserError(f"eval {key}: the model comes from its file; eval takes model.context, {', '.join(TAKEN)}")
    return typed


def _choose_data(
    loaded: LoadedModel, typed: Sequence[str], registry: Registry, trained: TrainedRun | None, data: str | None
) -> list[str]:
    model = loaded.model
    if data is not None and "data" in typed:
        raise UserError(f"--data {data}: goes without data=..., which says the same")
    own = trained.settings(loaded.path, has_text(loaded.file), registry) if trained else []
    if data is not None:
        name = recognise_data(Path(data), model, registry)
        kind, given = f"data={name}", [format_override("data.path", data)]
        cls = cast("type[Data]", registry.get("data", name))
        fit = "" if model.reads.text else cls.suggest_settings(model_settings(model), None) or ""
        given += [format_override(f"data.{key}", value) for key, value in cls.eval_settings.items()]
        return [*(own if kind in own else [kind, *(w for w in fit.split() if not re.search("=[A-Z]", w))]), *given]
    if "data" in typed:
        return []
    return own or [f"data={name}" for name in matching_data(model.reads, registry)[:1]]


def _open_dataset(built: Config, loaded: LoadedModel) -> Dataset:
    reads = loaded.model.reads
    if reason := kind_mismatch(loaded.name, reads, built.data):
        raise UserError(reason)
    dataset = open_data(built.data, loaded.path if reads.text else None)
    if reads.text and dataset.vocab > model_settings(loaded.model).get("vocab", dataset.vocab):
        raise UserError(f"{loaded.name}: the data's token ids go beyond its vocabulary; leave data.tokenizer out")
    match_preprocessing(dataset, loaded.model, loaded.path)
    return dataset


def _window(given: str | None, model: Model, trained: int | None) -> int | None:
    """Tokens of a window: as typed, as trained, or the model's own up to 512: longer ones gain little and cost much."""
    if not model.context:
        return None
    if given is None:
        return min(model.context, trained or 512)
    if not is_integer(given, 1, model.context):
        raise UserError(f"model.context={given}: must be a whole number from 1 to {model.context}, the file's own")
    return int(given)


# -- by class ---------------------------------------------------------------------------------------------------------


SHOWN = 20  # classes in the table
OTHERS = 3  # that one is mistaken for, in the table


@dataclass(frozen=True)
class ClassCounts:
    """What was held out of one class."""

    name: str
    examples: int
    right: int
    taken_for: dict[str, int]  # the other classes, the commonest first


def count_by_class(
    logits: Callable[[Batch], np.ndarray], batches: Sequence[Batch], read: Sequence[str], names: Sequence[str]
) -> list[ClassCounts]:
    """Count for each class of the model how its examples were classified; rows of weight 0 only fill their batch."""
    counts = None
    for batch in batches:
        found = logits({name: batch[name] for name in read})
        if counts is None:
            counts = np.zeros((found.shape[1],) * 2, np.int64)
        kept = batch["weights"] > 0
        np.add.at(counts, (batch["targets"][kept], found.argmax(-1)[kept]), 1)
    if counts is None:
        return []
    called = [*names, *map(str, range(len(names), len(counts)))]
    classes = []
    for number, row in enumerate(counts.tolist()):
        others = sorted((i for i, count in enumerate(row) if count and i != number), key=lambda i: (-row[i], i))
        classes.append(ClassCounts(called[number], sum(row), row[number], {called[i]: row[i] for i in others}))
    return classes


def class_table(classes: Sequence[ClassCounts]) -> list[str]:
    """A line for each class that there are examples of; of many those that it is wrong about most often."""
    there = [one for one in classes if one.examples]
    shown = there if len(there) <= SHOWN else sorted(there, key=lambda one: one.right - one.examples)[:SHOWN]
    rows = [["class", "examples", "right", "taken for"], *map(_row, shown)]
    lines = align_columns(rows, right=(1, 2))
    if len(shown) < len(there):
        lines.append(f"of {len(there)} classes those with most mistakes; --json has all")
    return lines


def _row(one: ClassCounts) -> list[str]:
    others = [f"{name} ({count})" for name, count in one.taken_for.items()]
    more = [f"{len(others) - OTHERS} more"] if len(others) > OTHERS + 1 else []
    told = ", ".join((others[:OTHERS] if more else others) + more)
    return [escape_cell(one.name), str(one.examples), f"{one.right / one.examples:.1%}", escape_cell(told)]


# -- which data -------------------------------------------------------------------------------------------------------


CONFIG = "config.yaml"  # of a run's directory
CONTENTS = ("text", "images")  # sources that do not depend on how the data is split


@dataclass(frozen=True)
class TrainedRun:
    """What a run's config.yaml says its model was trained on."""

    directory: Path
    data: dict[str, Any]  # the settings of `data`, with its name
    batch_size: int
    context: int | None  # tokens of a window
    record: Origin  # what the run says of its origin

    def settings(self, file: Path, has_text: bool, registry: Registry) -> list[str]:
        """The same as typed, for the model in `file`, whose own tokenizer is the one that the run made or took."""
        name = self.data["name"]
        settings = resolve_paths(part_class("data", self.data, registry), self.data, self.record)
        own = {key: value for key, value in settings.items() if key != "name"}
        if own.get("tokenizer") not in (None, "", "auto") and has_text:
            own["tokenizer"] = str(file)
        return [f"data={name}", *(format_override(f"data.{key}", value) for key, value in own.items())]

    def compare(self, dataset: Dataset, typed: Sequence[str], taken: str = "") -> tuple[bool, str]:
        """Return whether the data is the run's own, or else what to say; UserError for other data nobody `typed`."""
        then, now = self.record, data_digests(dataset.describe())
        if then.sources.get("data") in (None, now["data"]):
            unknown = "" if typed else "; not compared with the run's own, of which it recorded no digest"
            return "data" in then.sources, "" if "data" in then.sources else unknown
        contents = [role for role in CONTENTS if role in now and role in then.sources]
        changes = then.list_changes({role: now[role] for role in contents})
        if {"data", "data.path"} & {*typed}:
            same, within = self._overlap(taken)
            known = not changes if contents else same
            part = ", of which the run was trained on a part" if known else ", not the run's own"
            return False, ", some of which the run may have been trained on" if within else part
        if typed and not changes:  # only how it is split
            return False, "" if contents else ", split otherwise than the run's, so not compared with it"
        path = then.resolve(str(self.data.get("path") or ""))
        there = f"data.path={path}" if path else f"data={self.data['name']}"
        change = (changes or then.list_changes(now))[0]
        raise UserError(f"eval {self.directory}: {there} is other data than the run was trained on: {change}; "
                        f"to evaluate on it all the same, type {there}")  # fmt: skip

    def _overlap(self, path: str) -> tuple[bool, bool]:
        """Return whether a path is the one that the run read its data from, and whether one lies in the other."""
        own = self.record.resolve(str(self.data.get("path") or ""))
        if not own or not path:
            return False, False
        here, there = Path(path).resolve(), Path(own).resolve()
        return here == there, here != there and (here.is_relative_to(there) or there.is_relative_to(here))


def read_trained(what: Path, modules: Sequence[str]) -> TrainedRun | None:
    """Return what a run, or the run of a checkpoint, was trained on; None if the path is neither."""
    path = (what.absolute().parents[1] if is_checkpoint(what) else what) / CONFIG
    if not os.path.lexists(path):
        return None
    saved = load_yaml(path)
    if not isinstance(saved, dict) or not isinstance(saved.get("data"), dict) or "name" not in saved["data"]:
        raise UserError(f"{path}: names no data; type --data PATH, and the model's file instead of {what}")
    require_plugins(saved.get("plugins"), modules, str(path))
    model = saved.get("model")
    context = model.get("context") if isinstance(model, dict) else None
    context = context if isinstance(context, int) else None
    return TrainedRun(what, saved["data"], saved.get("batch_size", 8), context, read_origin(what))


def recognise_data(path: Path, model: Model, registry: Registry) -> str:
    """The kind of data that a path holds, by the names of its files; UserError for one that `model` does not read."""
    classes: list[type[Data]] = list(registry.classes("data").values())
    fits: dict[type[Data], int] = {
        cls: call_checked(int, cls.recognises, path, who=f"data.{cls.name}") for cls in classes
    }
    readable = matching_data(model.reads, registry)
    best = max(classes, key=lambda cls: (fits[cls] > 0, cls.name in readable, fits[cls]))
    if not fits[best]:
        raise UserError(f"--data {path}: nothing in there is known to be data; say what it is: data=NAME data.path=...")
    if best.name not in readable:
        raise UserError(f"--data {path}: is data={best.name}, which gives {best.gives}; the model reads {model.reads}; "
                        f"{suggest('', readable)}")  # fmt: skip
    return best.name
