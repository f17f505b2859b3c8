"""Evaluate a model file on held-out data, on any engine."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np

from toyexp.base.attribution import attribute_errors, call_checked
from toyexp.base.errors import UserError, escape_cell, suggest
from toyexp.base.formatting import align_columns
from toyexp.base.validators import is_integer
from toyexp.batching.images import ImageDataset
from toyexp.config.build import build_saved_objective, resolve_paths
from toyexp.config.request import Request
from toyexp.config.safe_yaml import require_plugins
from toyexp.config.schema import load_run_config, part_class
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
from toyexp.interfaces.objective import Objective
from toyexp.plugins.compatibility import kind_mismatch, matching_data
from toyexp.plugins.registry import Registry
from toyexp.training.provenance import Origin, data_digests, read_origin
from toyexp.training.run_config import Config

SHARE = ("val_fraction", "eval_batches", "eval_images")  # data settings: how much is held out and evaluated
ALLOWED = ("data", "engine", "batch_size", "plugins")  # settings and groups of settings that eval accepts


@dataclass(frozen=True)
class Evaluation(Answer):
    """Result of an evaluation."""

    file: str
    model: str
    adapter: str | None  # the LoRA adapter added to the model
    engine: str
    data: str
    path: str | None  # path of the data; None if it has no path
    left_out: list[str]  # parts of the data that are not used, each with the setting that changes it
    share: Mapping[str, float]  # data settings that limit how much is evaluated; for their names see SHARE
    own: bool  # True if the data has the digest that the model's training run recorded
    targets: int  # tokens predicted, or images classified
    loss: float  # nats per target
    figures: Sequence[DerivedMetric]  # derived from the loss; for text: perplexity and bits per byte
    scores: Mapping[str, float]  # the model's other metrics, such as accuracy
    note: str = ""  # says so if the data is not, or may not be, that of the training run
    classes: list[ClassCounts] | None = None  # counts per class, if each example has one class

    def plain(self) -> dict[str, Any]:
        """Return all fields as plain data; perplexity and bits_per_byte are null if the data is not text."""
        plain = asdict(self)
        derived = {"perplexity": None, "bits_per_byte": None} | {name: value for name, value, _ in plain.pop("figures")}
        return {**plain, **derived}

    def lines(self) -> list[str]:
        """Return the lines printed to the user."""
        metrics = [f"loss {self.loss:.4f}", *(figure.text for figure in self.figures if figure.value is not None)]
        metrics += [f"{name} {value:z.4f}" for name, value in self.scores.items()]
        source = " ".join(filter(None, (self.data, self.path))) + (", the run's own" if self.own else self.note)
        data = "; ".join((source, *self.left_out))
        share = ", ".join(f"data.{key}={value}" for key, value in self.share.items())
        held_out = "" if self.share.get("val_fraction") == 1 else "held-out "
        return [
            f"model   {self.file}, {self.model}",
            *([f"adapter {self.adapter}"] if self.adapter else []),
            f"engine  {self.engine}",
            f"data    {data}, {self.targets} {held_out}targets{f' ({share})' if share else ''}",
            " · ".join(metrics),
            *(class_table(self.classes) if self.classes else []),
        ]


def evaluate(model_path: Path, request: Request, data: str | None = None, adapter: Path | None = None) -> Evaluation:
    """Evaluate the model at `model_path`, optionally with a LoRA `adapter`; return its held-out loss and metrics.

    The data is the first of these that is available: the path `data`, the `data=` setting of the request, the data that
    the model was trained on, the default data for the model.
    """
    overrides, registry = _check_settings(request), request.registry
    loaded = LoadedModel.open(model_path, registry, adapter)
    model = loaded.model
    training_run = find_training_run(adapter, request.modules) if adapter else None
    training_run = training_run or find_training_run(model_path, request.modules)
    data_overrides = _choose_data(loaded, overrides, registry, training_run, data)
    batch_size = [f"batch_size={training_run.batch_size}"] if training_run and "batch_size" not in overrides else []
    with training_run.record.explain_missing_paths(["data.path"]) if training_run else nullcontext():
        config = request.with_defaults(*data_overrides, *batch_size).drop("model.context").build_config()
    config.engine.check_rows(config.settings.batch_size, 1)
    window = _window(request.values.get("model.context"), model, training_run.context if training_run else None)
    dataset = _open_dataset(config, loaded)
    keys = [key for key in (*overrides, *(["data.path"] if data else [])) if key.split(".")[0] == "data"]
    path = (data_settings := config.plain["data"]).get("path")
    is_own, note = training_run.compare(dataset, keys, str(path or "")) if training_run else (False, "")
    fitted = dataclasses.replace(model, **({"context": window} if window else {}))
    batches = fitted.batches(dataset, config.settings.batch_size, config.settings.seed)
    inputs = model.reads.with_bounds(batches.inputs, dataset.vocab)
    rows, objective = config.settings.batch_size, training_run.objective(registry) if training_run else None
    boundary = attribute_errors(f"engine.{config.engine.name}", "while it evaluated", data=config.data.name)
    with boundary, loaded.session(config.engine, inputs, rows, objective=objective) as session:
        held_out = batches.held_out()  # after the session, so that a plan that needs too much memory fails first
        loss = session.evaluate(held_out)
        scores = compute_scores(model, session.logits, held_out) | session.metrics(held_out)
        scores |= {f"loss/{name}": session.evaluate(part) for name, part in batches.held_out_sets().items()}
        read = [name for name in inputs if name not in ("targets", "weights")]
        names = dataset.classes if isinstance(dataset, ImageDataset) else ()
        has_one_target = not inputs["targets"].shape  # per example, and not one per position or a vector
        classes = count_by_class(session.logits, held_out, read, names) if has_one_target else None
    split_remarks = [line for line in dataset.remarks() if line.startswith("held out: ")]  # by directory, not by share
    weights = sum(float(batch["weights"].sum(dtype="float64")) for batch in held_out)
    return Evaluation(
        file=loaded.name, model=f"{model.name}, {model.parameters()} parameters",
        adapter=str(source_path(loaded.adapter)) if loaded.adapter else None, engine=config.engine_note,
        data=config.data.name, path=path, left_out=[*dataset.omissions(), *split_remarks, *batches.omissions],
        own=is_own, note=note,
        share={key: data_settings[key] for key in (SHARE[1:] if split_remarks else SHARE) if key in data_settings},
        targets=round(weights), loss=loss,
        figures=model.reads.derived_metrics(loss, held_out, dataset) if objective is None or objective.in_nats else [],
        scores=scores, classes=classes,
    )  # fmt: skip


def _check_settings(request: Request) -> list[str]:
    keys = [o.key_or_group for o in request.settings]
    for key in keys:
        if key.split(".")[0] not in ALLOWED and key != "model.context":
            allowed = ", ".join(("model.context", *ALLOWED))
            raise UserError(f"eval {key}: cannot be set, because the model comes from its file; eval takes {allowed}")
    return keys


def _choose_data(
    loaded: LoadedModel, overrides: Sequence[str], registry: Registry, training_run: TrainedRun | None, data: str | None
) -> list[str]:
    model = loaded.model
    if data is not None and "data" in overrides:
        raise UserError(f"--data {data}: cannot be combined with data=...; leave one out")
    run_data = training_run.settings(loaded.path, has_text(loaded.file), registry) if training_run else []
    if data is not None:
        name = recognise_data(Path(data), model, registry)
        kind, settings = f"data={name}", [format_override("data.path", data)]
        cls = cast("type[Data]", registry.get("data", name))
        suggested = "" if model.reads.text else cls.suggest_settings(model_settings(model), None) or ""
        names = {field.name for field in dataclasses.fields(cls)}
        settings += [format_override(f"data.{k}", value) for k, value in cls.eval_settings.items() if k in names]
        default = [kind, *(word for word in suggested.split() if not re.search("=[A-Z]", word))]
        return [*(run_data if kind in run_data else default), *settings]
    if "data" in overrides:
        return []
    return run_data or [f"data={name}" for name in matching_data(model.reads, registry)[:1]]


def _open_dataset(config: Config, loaded: LoadedModel) -> Dataset:
    reads = loaded.model.reads
    if reason := kind_mismatch(loaded.name, reads, config.data):
        raise UserError(
            f"{reason}; for data, {suggest('', matching_data(reads, loaded.registry))}, or type --data PATH"
        )
    dataset = open_data(config.data, loaded.path if reads.text else None)
    if reads.text and dataset.vocab > model_settings(loaded.model).get("vocab", dataset.vocab):
        raise UserError(f"{loaded.name}: the data's token ids exceed the model's vocabulary; leave data.tokenizer out")
    match_preprocessing(dataset, loaded.model, loaded.path)
    return dataset


def _window(setting_value: str | None, model: Model, training_context: int | None) -> int | None:
    """Return the length of a row in tokens; None for a model without a context length.

    `setting_value` is the setting `model.context`. If it is None, use the context of the training run. If there is no
    run either, use 512, because longer rows cost much more. This default is at most the model's context. Raise
    UserError for an invalid setting.
    """
    if not model.context:
        return None
    if setting_value is None:
        return min(model.context, training_context or 512)
    if not is_integer(setting_value, 1, model.context):
        raise UserError(f"model.context={setting_value}: must be a whole number from 1 to {model.context}")
    return int(setting_value)


# -- by class ---------------------------------------------------------------------------------------------------------


MAX_ROWS = 20  # classes in the table
MAX_OTHERS = 3  # wrong classes listed in a row of the table


@dataclass(frozen=True)
class ClassCounts:
    """Classification counts of one class."""

    name: str
    examples: int
    right: int
    taken_for: dict[str, int]  # wrong predictions by class, most frequent first


def count_by_class(
    logits: Callable[[Batch], np.ndarray], batches: Sequence[Batch], read: Sequence[str], names: Sequence[str]
) -> list[ClassCounts]:
    """Count right and wrong predictions for each class. Examples of weight 0 are not counted.

    `logits` computes an array [rows, classes] from a batch that has only the arrays named in `read`. `names` are the
    class names; classes without a name are numbered.
    """
    counts = None
    for batch in batches:
        scores = logits({name: batch[name] for name in read if name in batch})
        if counts is None:
            counts = np.zeros((scores.shape[1],) * 2, np.int64)
        is_example = batch["weights"] > 0
        np.add.at(counts, (batch["targets"][is_example], scores.argmax(-1)[is_example]), 1)
    if counts is None:
        return []
    labels = [*names, *map(str, range(len(names), len(counts)))]
    classes = []
    for number, row in enumerate(counts.tolist()):
        others = sorted((i for i, count in enumerate(row) if count and i != number), key=lambda i: (-row[i], i))
        classes.append(ClassCounts(labels[number], sum(row), row[number], {labels[i]: row[i] for i in others}))
    return classes


def class_table(classes: Sequence[ClassCounts]) -> list[str]:
    """Return a table of right predictions and mistakes for each class that has examples.

    If there are more than MAX_ROWS classes, the table has only those with the most mistakes.
    """
    present = [counts for counts in classes if counts.examples]
    by_mistakes = sorted(present, key=lambda counts: counts.right - counts.examples)[:MAX_ROWS]
    shown = present if len(present) <= MAX_ROWS else by_mistakes
    rows = [["class", "examples", "right", "taken for"], *map(_row, shown)]
    lines = align_columns(rows, right=(1, 2))
    if len(shown) < len(present):
        lines.append(f"the {len(shown)} of {len(present)} classes with the most mistakes; --json lists all")
    return lines


def _row(tally: ClassCounts) -> list[str]:
    others = [f"{name} ({count})" for name, count in tally.taken_for.items()]
    more = [f"{len(others) - MAX_OTHERS} more"] if len(others) > MAX_OTHERS + 1 else []
    mistakes = ", ".join((others[:MAX_OTHERS] if more else others) + more)
    return [escape_cell(tally.name), str(tally.examples), f"{tally.right / tally.examples:.1%}", escape_cell(mistakes)]


# -- which data -------------------------------------------------------------------------------------------------------


CONFIG = "config.yaml"  # in a run's directory
CONTENTS = ("text", "images")  # digests that do not depend on how the data is split


@dataclass(frozen=True)
class TrainedRun:
    """Description of the data that a run was trained on, read from the run's config.yaml."""

    directory: Path
    data: dict[str, Any]  # the settings of `data`, with its name
    batch_size: int
    context: int | None  # window in tokens
    record: Origin  # digests of the data and files, and where the run was started
    saved: Mapping[str, Any] = field(default_factory=dict)  # the run's whole configuration

    def objective(self, registry: Registry) -> Objective:
        """Return the objective that defines the run's held-out loss."""
        return build_saved_objective(self.saved, registry, self.record)

    def settings(self, file: Path, has_text: bool, registry: Registry) -> list[str]:
        """Return the data settings of the run as overrides, such as `data=text`.

        `has_text` says whether the model `file` contains a tokenizer. If it does, and the run set data.tokenizer, the
        path of `file` is used for data.tokenizer instead.
        """
        name = self.data["name"]
        settings = resolve_paths(part_class("data", self.data, registry), self.data, self.record)
        run_settings = {key: value for key, value in settings.items() if key != "name"}
        if run_settings.get("tokenizer") not in (None, "", "auto") and has_text:
            run_settings["tokenizer"] = str(file)
        return [f"data={name}", *(format_override(f"data.{key}", value) for key, value in run_settings.items())]

    def compare(self, dataset: Dataset, typed: Sequence[str], path: str = "") -> tuple[bool, str]:
        """Return whether `dataset` is the data that the run was trained on, and a note for the user ("" if none).

        `typed` are the keys of the data settings that the user gave, and `path` is the path of the data. Raise
        UserError if the run's data has changed and the user did not name the data explicitly.
        """
        origin, digests = self.record, data_digests(dataset.describe())
        if origin.sources.get("data") in (None, digests["data"]):
            unknown = "" if typed else "; not compared with the run's own data, of which the run recorded no digest"
            return "data" in origin.sources, "" if "data" in origin.sources else unknown
        contents = [role for role in CONTENTS if role in digests and role in origin.sources]
        changes = origin.list_changes({role: digests[role] for role in contents})
        if {"data", "data.path"} & {*typed}:
            is_same, is_nested = self._overlap(path)
            is_known = not changes if contents else is_same
            part = ", part of which the run was trained on" if is_known else ", not the run's own"
            return False, ", some of which the run may have been trained on" if is_nested else part
        if typed and not changes:  # only the split may differ
            return False, "" if contents else ", split differently from the run's, so not compared with it"
        own_path = origin.resolve(str(self.data.get("path") or ""))
        override = f"data.path={own_path}" if own_path else f"data={self.data['name']}"
        change = (changes or origin.list_changes(digests))[0]
        raise UserError(f"eval {self.directory}: {override} is not the data that the run was trained on: {change}; "
                        f"to evaluate on it anyway, type {override}")  # fmt: skip

    def _overlap(self, path: str) -> tuple[bool, bool]:
        """Return two bools: whether `path` is the run's data path, and whether one of the paths contains the other."""
        own_path = self.record.resolve(str(self.data.get("path") or ""))
        if not own_path or not path:
            return False, False
        new, old = Path(path).resolve(), Path(own_path).resolve()
        return new == old, new != old and (new.is_relative_to(old) or old.is_relative_to(new))


def find_training_run(directory: Path, modules: Sequence[str]) -> TrainedRun | None:
    """Return the description of the data that a run, or the run of a checkpoint, was trained on.

    Return None if `directory` is neither a run nor a checkpoint. Raise UserError if the run's config.yaml names no
    data, or if a plugin of the run is not loaded.
    """
    path = (directory.absolute().parents[1] if is_checkpoint(directory) else directory) / CONFIG
    if not os.path.lexists(path):
        return None
    saved = load_run_config(path)
    if not isinstance(saved.get("data"), dict) or "name" not in saved["data"]:
        raise UserError(f"{path}: names no data; pass --data PATH, and the model's file instead of {directory}")
    require_plugins(saved.get("plugins"), modules, str(path))
    model = saved.get("model")
    context = model.get("context") if isinstance(model, dict) else None
    context = context if isinstance(context, int) else None
    return TrainedRun(directory, saved["data"], saved.get("batch_size", 8), context, read_origin(directory), saved)


def recognise_data(path: Path, model: Model, registry: Registry) -> str:
    """Return the name of the data plugin that recognises the files at `path`.

    Raise UserError if no plugin does, or if `model` cannot read the plugin's data.
    """
    classes: list[type[Data]] = list(registry.classes("data").values())
    fits = {cls: call_checked(int, cls.recognises, path, who=f"data.{cls.name}") for cls in classes}
    readable = matching_data(model.reads, registry)
    best = max(classes, key=lambda cls: (fits[cls] > 0, cls.name in readable, fits[cls]))
    if not fits[best]:
        raise UserError(f"--data {path}: no data plugin recognises it; name one: data=NAME data.path=...")
    if best.name not in readable:
        raise UserError(f"--data {path}: holds {best.gives} (data={best.name}), but the model reads {model.reads}; "
                        f"for other data, {suggest('', readable)}")  # fmt: skip
    return best.name
