"""What every kind of data shares: a part that is held out, and what becomes of examples that cannot be used."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from toyexp import IMAGES, Data, RunPreview, UserError, is_changed
from toyexp.base import require_range

ON_ERROR = ("refuse", "skip")  # what an example that cannot be used does
MAX_NAMED = 20  # of those that are skipped the record of the run names so many


@dataclass
class SplitData(Data):
    """Data with a `val_fraction`, of which an eval takes so many `eval_batches`, or `eval_images`."""

    eval_settings: ClassVar[Mapping[str, Any]] = {"val_fraction": 1.0}

    def check(self) -> None:
        """Raises UserError for a part that cannot be held out, or looked at."""
        taken = {"eval_images": "[0,inf)"} if self.gives is IMAGES else {"eval_batches": "[1,inf)"}
        require_range("data", self, val_fraction="(0,1]", **taken)

    def warnings(self, preview: RunPreview) -> Iterable[str]:
        """Warn of an eval that takes more than is held out, or of none; UserError if nothing is left to train on."""
        if getattr(self, "val_fraction", 0) == 1:
            raise UserError("data.val_fraction=1.0: leaves nothing to train on; a run needs less than 1")
        key = "eval_images" if self.gives is IMAGES else "eval_batches"
        if not is_changed(self, key):
            return
        given = f"data.{key}={getattr(self, key)}"
        if not preview.config["eval_every"]:
            yield f"{given}: with eval_every=0 there is no eval"
        elif self.gives is IMAGES:
            if (images := preview.dataset.describe()["held_out_images"]) < getattr(self, key):
                yield f"{given}: {images} are held out, which are all taken"
        elif (batches := len(preview.batches.held_out())) < getattr(self, key):
            yield f"{given}: the held-out part has {batches}, which are all taken"
