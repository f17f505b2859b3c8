"""Which data a model is evaluated on: its run's own, what is typed, or what a path holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from toyexp.base.blame import asked
from toyexp.base.errors import UserError, choose
from toyexp.config.restored import is_checkpoint
from toyexp.config.trust import require_plugins
from toyexp.contract.compatibility import of_kind
from toyexp.contract.data import Data
from toyexp.contract.model import Model
from toyexp.contract.registry import Registry

CONFIG = "config.yaml"  # of a run's directory


@dataclass(frozen=True)
class Trained:
    """What a run's config.yaml says its model was trained on."""

    directory: Path
    data: dict[str, Any]  # the settings of `data`, with its name
    batch_size: int
    context: int | None  # tokens of a window

    def settings(self, file: Path, has_text: bool) -> list[str]:
        """The same as typed, for the model in `file`, whose own tokenizer is the one that the run made or took."""
        from toyexp.config.words import setting

        name = self.data["name"]
        own = {key: value for key, value in self.data.items() if key != "name"}
        if own.get("tokenizer") not in (None, "", "auto") and has_text:
            own["tokenizer"] = str(file)
        return [f"data={name}", *(setting(f"data.{key}", value) for key, value in own.items())]


def trained_on(what: Path, modules: Sequence[str]) -> Trained | None:
    """What the run in the directory `what`, or of that checkpoint, was trained on; None for what is no run's.

    Raises UserError for a configuration that is none, and one that asks for local plugins not among `modules`.
    """
    from toyexp.config.schema import load_yaml

    path = (what.absolute().parents[1] if is_checkpoint(what) else what) / CONFIG
    if not path.is_file():
        return None
    saved = load_yaml(path)
    if not isinstance(saved, dict) or not isinstance(saved.get("data"), dict) or "name" not in saved["data"]:
        raise UserError(
            f"{path}: says of no data what it is; name the data: --data PATH, and the file instead of {what}"
        )
    require_plugins(saved.get("plugins"), modules, str(path))
    model = saved.get("model")
    context = model.get("context") if isinstance(model, dict) else None
    return Trained(what, saved["data"], saved.get("batch_size", 8), context if isinstance(context, int) else None)


def kind_of(path: Path, model: Model, registry: Registry) -> str:
    """The kind of data that a path holds, by the names of its files; UserError for one that `model` does not read."""
    classes: list[type[Data]] = list(registry.classes("data").values())
    fits: dict[type[Data], int] = {
        cls: asked(f"data.{cls.name}", f"while it looked at {path}", int, partial(cls.recognises, path))
        for cls in classes
    }
    readable = of_kind(model.reads, registry)
    best = max(classes, key=lambda cls: (fits[cls] > 0, cls.name in readable, fits[cls]))
    if not fits[best]:
        raise UserError(f"--data {path}: nothing in there is known to be data; say what it is: data=NAME data.path=...")
    if best.name not in readable:
        raise UserError(f"--data {path}: is data={best.name}, which gives {best.gives}; the model reads {model.reads}; "
                        f"{choose('', readable)}")  # fmt: skip
    return best.name
