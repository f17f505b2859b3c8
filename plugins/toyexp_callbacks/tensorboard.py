"""TensorBoard: event files in the run's directory."""

from __future__ import annotations

import contextlib
import json
import platform
import time
from dataclasses import dataclass
from typing import Any, ClassVar

from toyexp import Run, needed
from toyexp.base import make_folder
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
            import tensorboardX.record_writer

            _ = tensorboardX.record_writer.RecordWriter

    def opened(self, run: Run) -> Scalars:
        """A new file beside those of the run before it was resumed, whose later steps it takes back."""
        return Scalars(run)

    def ended(self, run: Run) -> None:
        """Names the folder."""
        if any((folder := run.dir / FOLDER).glob("events.*")):
            run.emit("export", path=str(folder), what="tensorboard")


class Scalars:
    """An event file, as a record of a dashboard.

    It is written in the dashboard's thread: SummaryWriter has a thread of its own that prints tracebacks, is waited for
    without a limit, and keeps the process when the disk is full or the clock is set back.
    """

    def __init__(self, run: Run):
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.record_writer import RecordWriter
        from tensorboardX.summary import scalar, text

        self._event, self._scalar = Event, scalar
        # A run that is resumed within a second must not write over its first file.
        name = f"events.out.tfevents.{int(time.time())}.{platform.node()}.from-{run.resumed}"
        self._path = make_folder(run.dir / FOLDER) / name
        self._path.touch(exist_ok=False)
        self._file = RecordWriter(str(self._path))
        self._write(file_version="brain.Event:2")
        if run.resumed:
            self._write(step=run.resumed + 1, session_log=SessionLog(status=SessionLog.START))
        else:
            told = json.dumps(dict(run.config), indent=4, default=str)
            self._write(step=0, summary=text("config", "    " + told.replace("\n", "\n    ")))

    def _write(self, **fields: Any) -> None:
        """Write one event; on a full disk, remove the file, so that the run has its room."""
        try:
            self._file.write(self._event(wall_time=time.time(), **fields).SerializeToString())
            self._file.flush()
        except OSError:
            self._path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                self._file.close()
            raise

    def log(self, fields: dict[str, Any], step: int) -> None:
        """Write numbers by name."""
        for name, value in fields.items():
            self._write(step=step, summary=self._scalar(name, value))

    def finish(self) -> None:
        """Close the file."""
        self._file.close()
