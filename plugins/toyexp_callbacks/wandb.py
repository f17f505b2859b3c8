"""Weights & Biases."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from toyexp import Run, hookimpl, needed
from toyexp.base import require_words
from toyexp_callbacks.dashboard import Record, Tracker

MODES = ("offline", "online")


@dataclass(eq=False)
class Wandb(Tracker):
    """Logs the run to Weights & Biases, offline unless told otherwise."""

    name: ClassVar[str] = "wandb"

    mode: str = "offline"  # offline | online
    entity: str | None = None  # the team or user that the project is of; null: your default one
    tags: str | None = None  # words to find it by, between commas
    artifacts: bool = False  # send the files of exporters that stand before it in the list, too

    def __post_init__(self) -> None:
        super().__post_init__()
        self._offline: Path | None = None  # where wandb keeps an offline run

    def check(self) -> None:
        """Raises UserError for values that cannot work, Unavailable without wandb."""
        require_words("callbacks.wandb", self, mode=MODES)
        super().check()
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        os.environ.setdefault("WANDB_SILENT", "true")
        with needed("wandb", "pip install 'toyexp[wandb]'"):
            import wandb

            _ = wandb.init, wandb.Settings  # what is left of a package that was removed has none

    def opened(self, run: Run) -> Record:
        """The W&B run."""
        import wandb

        record: Any = wandb.init(
            project=self.project,
            entity=self.entity,
            group=self.group_of(run),
            tags=[tag.strip() for tag in self.tags.split(",") if tag.strip()] if self.tags else None,
            id=self.id,
            resume="allow" if self.resumed and self.mode == "online" else None,  # offline, the id says enough
            name=f"{run.name}-{run.seed}",
            dir=str(run.dir),
            mode="online" if self.mode == "online" else "offline",
            config=dict(run.config),
            reinit="create_new",  # each job of a sweep is its own run
            settings=wandb.Settings(init_timeout=20, console="off", save_code=False, disable_git=True),
        )
        if self.mode == "offline" and (folder := getattr(record, "dir", None)):
            self._offline = Path(folder).parent
        return record

    @hookimpl
    def on_event(self, run: Run, kind: str, fields: Mapping[str, Any]) -> None:
        """Sends a model that was exported, with `artifacts`; those of several steps are versions of one artifact."""
        if not (self.artifacts and kind == "export" and fields.keys() >= {"step", "weights", "bytes"}):
            return
        path, step, weights = Path(fields["path"]), int(fields["step"]), str(fields["weights"])

        def send(record: Any) -> None:
            import wandb

            name = f"run-{self.id}-{path.name.replace(f'-{step}', '')}"
            artifact = wandb.Artifact(name, type="model", metadata={"step": step, "weights": weights})
            (artifact.add_dir if path.is_dir() else artifact.add_file)(str(path))
            record.log_artifact(artifact, aliases=["latest", f"step-{step}"])

        self._put(run, send, int(fields["bytes"]))

    def ended(self, run: Run) -> None:
        """Says where an offline run lies, and how to send it."""
        if self._offline is not None:
            run.emit("note", text=f"wandb   offline; send it: wandb sync {shlex.quote(str(self._offline))}")
