"""TensorBoard: event files in the run's directory."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, ClassVar

from toyexp import Run, needed
from toyexp_callbacks.dashboard import Dashboard

FOLDER = "tensorboard"


@dataclass(eq=False)
class Tensorboard(Dashboard):
    """Writes the run's numbers for TensorBoard: tensorboard --logdir outputs."""

    name: ClassVar[str] = "tensorboard"

    def check(self) -> None:
        """Raises UserError for values that cannot work, Unavailable without tensorboardX."""
        super().check()
        with needed("tensorboardX", "pip install 'toyexp[tensorboard]'"):
            import tensorboardX

            _ = tensorboardX.SummaryWriter

    def opened(self, run: Run) -> Scalars:
        """A new file beside those of the run before it was resumed, whose later steps it takes back."""
        return Scalars(run)

    def ended(self, run: Run) -> None:
        """Names the folder."""
        if (folder := run.dir / FOLDER).is_dir():
            run.emit("export", path=str(folder), what="tensorboard")


class Scalars:
    """An event file, as a record of a dashboard."""

    def __init__(self, run: Run):
        from tensorboardX import SummaryWriter

        purge = run.resumed + 1 if run.resumed else None
        # By itself a name goes by the second: a run that goes on at once would write over its first file.
        suffix = f".from-{run.resumed}"
        self._writer = SummaryWriter(str(run.dir / FOLDER), purge_step=purge, flush_secs=10, filename_suffix=suffix)
        if not run.resumed:
            told = json.dumps(dict(run.config), indent=4, default=str)
            self._writer.add_text("config", "    " + told.replace("\n", "\n    "), 0)

    def log(self, fields: dict[str, Any], step: int) -> None:
        """Numbers by name."""
        for name, value in fields.items():
            self._writer.add_scalar(name, value, step)

    def finish(self) -> None:
        """Everything is in the file."""
        self._writer.close()
