"""Settings of the held-out part, which all data sets share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from toyexp import IMAGES, Data, RunPreview, UserError, is_changed
from toyexp.base import require_range

ON_ERROR = ("refuse", "skip")  # what happens to an unusable example
MAX_NAMED = 20  # skipped examples that a run's record names


@dataclass
class SplitData(Data):
    """Base of data plugins that hold out the fraction `val_fraction` and limit the amount of data per evaluation."""

    eval_settings: ClassVar[Mapping[str, Any]] = {"val_fraction": 1.0, "val_path": ""}

    def check(self) -> None:
        """Raise UserError for invalid held-out settings."""
        bounds = {"eval_images": "[0,inf)"} if self.gives is IMAGES else {"eval_batches": "[1,inf)"}
        require_range("data", self, val_fraction="(0,1]", **bounds)

    def warnings(self, preview: RunPreview) -> Iterable[str]:
        """Yield warnings about the held-out part. Raise UserError if all is held out."""
        facts, fraction = preview.dataset.describe(), getattr(self, "val_fraction", 0)
        if fraction == 1:
            raise UserError("data.val_fraction=1.0: leaves nothing to train on; it must be below 1")
        if file := facts.get("held_out_and_trained_on"):
            yield f"data.val_path: the held-out loss means little; {file} is also trained on (data.path)"
        if is_changed(self, "val_fraction") and (split := facts.get("held_out_split")):
            yield f"data.val_fraction={fraction}: has no effect; the data has its own held-out part, {split}"
        key = "eval_images" if self.gives is IMAGES else "eval_batches"
        if not is_changed(self, key):
            return
        setting = f"data.{key}={getattr(self, key)}"
        if not preview.config["eval_every"]:
            yield f"{setting}: has no effect with eval_every=0"
            return
        is_images = self.gives is IMAGES
        count = facts["held_out_images"] if is_images else len(preview.batches.held_out())
        if count < getattr(self, key):
            yield f"{setting}: only {count} {key.removeprefix('eval_')} are held out; each evaluation uses all"
