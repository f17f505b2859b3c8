"""Which data a model is evaluated on: its run's own, what is typed, or what a path holds."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toyexp.base.attribution import given
from toyexp.base.errors import UserError, choose
from toyexp.config.safe_yaml import require_plugins
from toyexp.inference.model_files import is_checkpoint
from toyexp.interfaces.data import Data
from toyexp.interfaces.dataset import Dataset
from toyexp.interfaces.model import Model
from toyexp.plugins.compatibility import of_kind
from toyexp.plugins.registry import Registry
from toyexp.training.provenance import Record, data_sources, recorded

CONFIG = "config.yaml"  # of a run's directory
CONTENTS = ("text", "images")  # sources that do not depend on how the data is split


@dataclass(frozen=True)
class Trained:
    """What a run's config.yaml says its model was trained on."""

    directory: Path
    data: dict[str, Any]  # the settings of `data`, with its name
    batch_size: int
    context: int | None  # tokens of a window
    record: Record  # what the run says of its origin

    def settings(self, file: Path, has_text: bool, registry: Registry) -> list[str]:
        """The same as typed, for the model in `file`, whose own tokenizer is the one that the run made or took."""
        from toyexp.config.build import located
        from toyexp.config.schema import class_of
        from toyexp.config.words import setting

        name = self.data["name"]
        settings = located(class_of("data", self.data, registry), self.data, self.record)
        own = {key: value for key, value in settings.items() if key != "name"}
        if own.get("tokenizer") not in (None, "", "auto") and has_text:
            own["tokenizer"] = str(file)
        return [f"data={name}", *(setting(f"data.{key}", value) for key, value in own.items())]

    def compare(self, dataset: Dataset, typed: Sequence[str], taken: str = "") -> tuple[bool, str]:
        """Return whether the data is what the run was trained on, and what to say if that is not so, or not known.

        Raises UserError for other data, unless the keys that were `typed` say which data it is. `taken` is its path.
        """
        then, now = self.record, data_sources(dataset.describe())
        if then.sources.get("data") in (None, now["data"]):
            unknown = "" if typed else "; not compared with the run's own, of which it recorded no digest"
            return "data" in then.sources, "" if "data" in then.sources else unknown
        contents = [role for role in CONTENTS if role in now and role in then.sources]
        changes = then.differing({role: now[role] for role in contents})
        if {"data", "data.path"} & {*typed}:
            same, within = self._overlap(taken)
            known = not changes if contents else same
            part = ", of which the run was trained on a part" if known else ", not the run's own"
            return False, ", some of which the run may have been trained on" if within else part
        if typed and not changes:  # only how it is split
            return False, "" if contents else ", split otherwise than the run's, so not compared with it"
        path = then.found(str(self.data.get("path") or ""))
        there = f"data.path={path}" if path else f"data={self.data['name']}"
        change = (changes or then.differing(now))[0]
        raise UserError(f"eval {self.directory}: {there} is other data than the run was trained on: {change}; "
                        f"to evaluate on it all the same, type {there}")  # fmt: skip

    def _overlap(self, path: str) -> tuple[bool, bool]:
        """Return whether a path is the one that the run read its data from, and whether one lies in the other."""
        own = self.record.found(str(self.data.get("path") or ""))
        if not own or not path:
            return False, False
        here, there = Path(path).resolve(), Path(own).resolve()
        return here == there, here != there and (here.is_relative_to(there) or there.is_relative_to(here))


def trained_on(what: Path, modules: Sequence[str]) -> Trained | None:
    """What the run in the directory `what`, or of that checkpoint, was trained on; None for what is no run's.

    Raises UserError for a configuration that is none, and one that asks for local plugins not among `modules`.
    """
    from toyexp.config.schema import load_yaml

    path = (what.absolute().parents[1] if is_checkpoint(what) else what) / CONFIG
    if not os.path.lexists(path):
        return None
    saved = load_yaml(path)
    if not isinstance(saved, dict) or not isinstance(saved.get("data"), dict) or "name" not in saved["data"]:
        raise UserError(
            f"{path}: says of no data what it is; name the data: --data PATH, and the file instead of {what}"
        )
    require_plugins(saved.get("plugins"), modules, str(path))
    model = saved.get("model")
    context = model.get("context") if isinstance(model, dict) else None
    context = context if isinstance(context, int) else None
    return Trained(what, saved["data"], saved.get("batch_size", 8), context, recorded(what))


def kind_of(path: Path, model: Model, registry: Registry) -> str:
    """The kind of data that a path holds, by the names of its files; UserError for one that `model` does not read."""
    classes: list[type[Data]] = list(registry.classes("data").values())
    fits: dict[type[Data], int] = {cls: given(int, cls.recognises, path, who=f"data.{cls.name}") for cls in classes}
    readable = of_kind(model.reads, registry)
    best = max(classes, key=lambda cls: (fits[cls] > 0, cls.name in readable, fits[cls]))
    if not fits[best]:
        raise UserError(f"--data {path}: nothing in there is known to be data; say what it is: data=NAME data.path=...")
    if best.name not in readable:
        raise UserError(f"--data {path}: is data={best.name}, which gives {best.gives}; the model reads {model.reads}; "
                        f"{choose('', readable)}")  # fmt: skip
    return best.name
