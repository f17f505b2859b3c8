"""Callbacks that send a run's numbers to TensorBoard, Trackio and Weights & Biases, and never fail the run.

All calls of a dashboard's library are made in a separate thread, through a queue. If the library raises an error, the
callback stops with a warning. events.jsonl remains the complete record.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import platform
import queue
import re
import secrets
import shlex
import sys
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TextIO, cast

from toyexp import Run, RunPreview, UserError, hookimpl, printable, require_package
from toyexp.base import make_directory, require_choice, require_range
from toyexp_callbacks.events import Listener, recorded_events

log = logging.getLogger("toyexp")

FINISH_SECONDS = 30.0
UPLOAD_RATE = 1e6  # bytes per second that the wait at the end assumes: 8 Mbit/s
QUEUE_LIMIT = 10_000  # records; if the queue is full, new ones are dropped


@dataclass(eq=False)
class Dashboard(Listener):
    """Base of the callbacks that send a run's numbers to a dashboard."""

    library: ClassVar[str]  # the Python package that the callback needs
    entry_point: ClassVar[str] = "init"  # a name that the package lacks if only remains of it are installed

    every: int = 1  # steps between logged points

    def __post_init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._bytes = 0  # total size of queued files
        self._trouble: str | None = None  # the thread's error, until it is reported

    @abstractmethod
    def open_record(self, run: Run) -> Any:
        """Return a new record of the run with a method `log(fields, step)`.

        The thread that sends the data calls this method.
        """

    def finish(self, record: Any) -> None:
        """Finish the record that `open_record` returned. The thread that sends the data calls this method."""
        record.finish()

    def check(self) -> None:
        """Raise UserError for invalid settings, and Unavailable without the library."""
        require_range(f"callbacks.{self.name}", self, every="[1,inf)")
        with require_package(self.library, f"pip install 'toyexp[{self.name}]'"):
            getattr(importlib.import_module(self.library), self.entry_point)

    def warnings(self, preview: RunPreview) -> Iterable[str]:
        """Warn if `every` is so large that no step is sent."""
        return preview.interval_warnings(f"callbacks.{self.name}.every", self.every, "none of them is sent")

    @hookimpl
    def on_start(self, run: Run) -> None:
        """Start the thread, which loads the dashboard's library and sends the data."""
        self._queue: queue.Queue[Callable[[Any], Any] | None] = queue.Queue(QUEUE_LIMIT)
        self._thread = threading.Thread(target=self._listen, args=(run,), name=self.name, daemon=True)
        self._thread.start()

    def _listen(self, run: Run) -> None:
        is_finishing = False
        try:
            # Some libraries silently fall back to a temporary directory.
            if not os.access(run.dir, os.W_OK):
                raise OSError(f"{run.dir} cannot be written")
            record = self.open_record(run)
            while (send := self._queue.get()) is not None:
                send(record)
            is_finishing = True
            self.finish(record)
        except BaseException as error:  # wandb may even raise KeyboardInterrupt
            why = printable(f"{type(error).__name__}: {error}", 200)
            self._trouble = f"{self.name} stopped, the run continues: {why}"
            while not is_finishing and self._queue.get() is not None:
                pass

    def _enqueue(self, run: Run, send: Callable[[Any], Any], size: int = 0) -> None:
        """Queue the function `send`. The sending thread calls `send` with the dashboard's record of the run.

        `size` is the size in bytes of the file that `send` uploads, if any. If the queue is full, `send` is dropped.
        """
        with contextlib.suppress(queue.Full):  # the dashboard is too slow
            self._queue.put_nowait(send)
            self._bytes += size
        self._report_trouble(run)

    def _report_trouble(self, run: Run) -> None:
        """If the thread that sends the data has failed, report its error once.

        Only the run's own thread may call this method, because the report is an event of the run.
        """
        if self._trouble is not None:
            trouble, self._trouble = self._trouble, None
            log.warning(trouble)
            run.emit("note", text=trouble)

    @hookimpl(trylast=True)  # after callbacks that add metrics
    def on_step(self, run: Run, step: int, metrics: Mapping[str, float]) -> None:
        """Send the step's metrics."""
        if step % self.every == 0:
            fields = {f"train/{k}": v for k, v in metrics.items()}
            self._enqueue(run, lambda record: record.log(fields, step=step))

    @hookimpl(trylast=True)  # after callbacks that add metrics
    def on_eval(self, run: Run, step: int, metrics: Mapping[str, float]) -> None:
        """Send the held-out metrics."""
        fields = {f"held_out/{k}": v for k, v in metrics.items()}
        self._enqueue(run, lambda record: record.log(fields, step=step))

    @hookimpl
    def on_end(self, run: Run) -> None:
        """Wait a limited time for the dashboard to finish."""
        if self._thread is None:
            return
        seconds = FINISH_SECONDS + round(self._bytes / UPLOAD_RATE)
        with contextlib.suppress(queue.Full):  # a dashboard that is this slow cannot finish either
            self._queue.put(None, timeout=seconds)
            self._thread.join(seconds)
        if self._thread.is_alive():
            self._trouble = f"{self.name} did not finish within {seconds:g} s; its record of this run is incomplete"
        self._report_trouble(run)
        self.report_result(run)

    def report_result(self, run: Run) -> None:
        """Tell the user where to find the dashboard's record of the run."""


@dataclass(eq=False)
class Tracker(Dashboard):
    """Base of dashboards that group runs by project. A resumed run continues its earlier record."""

    project: str = "toyexp"  # project in the dashboard that the run belongs to
    group: str | None = None  # group of the run in the project; null: the name of its sweep, if it is a job of one

    def __post_init__(self) -> None:
        super().__post_init__()
        self.id = secrets.token_hex(4)  # unique among runs of this name; unchanged when resumed
        self.is_resumed = False

    def state(self) -> dict[str, Any]:
        """Return the run's id in the dashboard, to be saved in a checkpoint."""
        return {"id": self.id}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Restore the run's id in the dashboard from a checkpoint, so that a resumed run continues its record there."""
        self.id, self.is_resumed = str(state["id"]), True

    def run_group(self, run: Run) -> str | None:
        """Return the setting `group`, or the name of the run's sweep; None if neither exists."""
        sweep = run.dir.parent
        return self.group or (sweep.name if (sweep / "sweep.json").is_file() else None)


# -- TensorBoard: event files in the run's directory -------------------------------------------------------------------


DIRECTORY = "tensorboard"


@dataclass(eq=False)
class Tensorboard(Dashboard):
    """Write event files for TensorBoard. To view them: tensorboard --logdir outputs."""

    name: ClassVar[str] = "tensorboard"
    library: ClassVar[str] = "tensorboardX"
    entry_point: ClassVar[str] = "SummaryWriter"

    def open_record(self, run: Run) -> Scalars:
        """Return a new event file.

        After a run is resumed, TensorBoard ignores the steps after the checkpoint in the older event files.
        """
        return Scalars(run)

    def report_result(self, run: Run) -> None:
        """Report the directory of the event files."""
        if any((directory := run.dir / DIRECTORY).glob("events.*")):
            run.emit("export", path=str(directory), what="tensorboard")


class Scalars:
    """TensorBoard event file, with the methods `log` and `finish`.

    This class replaces tensorboardX's SummaryWriter, whose thread prints tracebacks. SummaryWriter also waits for this
    thread without a timeout, so the process hangs if the disk is full or the clock is set back.
    """

    def __init__(self, run: Run):
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.record_writer import RecordWriter
        from tensorboardX.summary import scalar, text

        self._event, self._scalar = Event, scalar
        # The step in the name keeps names unique if a run is resumed within a second.
        name = f"events.out.tfevents.{int(time.time())}.{platform.node()}.from-{run.resumed_step}"
        self._path = make_directory(run.dir / DIRECTORY) / name
        self._path.touch(exist_ok=False)
        self._file = RecordWriter(str(self._path))
        self._write(file_version="brain.Event:2")
        if run.resumed_step:
            self._write(step=run.resumed_step + 1, session_log=SessionLog(status=SessionLog.START))
        else:
            config = json.dumps(dict(run.config), indent=4, default=str)
            self._write(step=0, summary=text("config", "    " + config.replace("\n", "\n    ")))

    def _write(self, **fields: Any) -> None:
        """Write one event to the event file. If the disk is full, remove the file to free space for the run."""
        try:
            self._file.write(self._event(wall_time=time.time(), **fields).SerializeToString())
            self._file.flush()
        except OSError:
            self._path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                self._file.close()
            raise

    def log(self, fields: dict[str, Any], step: int) -> None:
        """Write a scalar for each number in `fields`, which maps names to numbers."""
        for name, value in fields.items():
            self._write(step=step, summary=self._scalar(name, value))

    def finish(self) -> None:
        """Close the file."""
        self._file.close()


# -- Trackio, from Hugging Face ----------------------------------------------------------------------------------------


@dataclass(eq=False)
class Trackio(Tracker):
    """Log the run to Trackio, by default on this machine. To view it: trackio show --project toyexp."""

    name: ClassVar[str] = "trackio"
    library: ClassVar[str] = "trackio"

    space: str | None = None  # Hugging Face Space to log to, USER/NAME; null: log locally

    _is_local = False  # whether trackio stores the run on this machine

    def check(self) -> None:
        """Raise UserError for invalid settings, and Unavailable without trackio."""
        if self.space is not None and not re.fullmatch(r"[\w.-]+/[\w.-]+", self.space):
            raise UserError(f"callbacks.trackio.space={self.space}: must be a Hugging Face Space, USER/NAME")
        super().check()

    def open_record(self, run: Run) -> Any:
        """Start and return a trackio run, whose name contains a unique id.

        When a toyexp run is resumed, trackio finds the earlier trackio run by this name and continues it.
        """
        import trackio

        name = f"{run.name}-{run.seed}-{self.id}"
        points = self._recorded_points(run) if self.is_resumed and self.space is None else []
        with mute_thread():
            if points:  # delete the run and log it again up to the checkpoint
                with contextlib.suppress(ValueError):  # raised if the project was deleted
                    for old in trackio.Api().runs(self.project):
                        if old.name == name:
                            old.delete()
            record: Any = trackio.init(
                project=self.project,
                name=name,
                group=self.run_group(run),
                space_id=self.space,
                config=json.loads(json.dumps(dict(run.config), default=str)),
                resume="allow" if self.is_resumed else "never",
                embed=False,
                auto_log_gpu=False,  # log only the run's own numbers
                auto_log_cpu=False,
            )
        for step, fields in points:
            record.log(fields, step=step)
        self._is_local = getattr(record, "url", None) is None  # trackio's environment variables may select a Space
        return record

    def finish(self, record: Any) -> None:
        """Wait until all data is stored."""
        with mute_thread():
            record.finish()

    def _recorded_points(self, run: Run) -> list[tuple[int, dict[str, Any]]]:
        """Read events.jsonl, and return pairs (step, metrics) up to a resumed run's checkpoint.

        The list is empty if some training steps are missing in events.jsonl.
        """
        points = {}
        for kind, step, fields in recorded_events(run):
            if kind == "eval" or (kind == "step" and step % self.every == 0):
                part = {"step": "train", "eval": "held_out"}[kind]
                numbers = {f"{part}/{k}": v for k, v in fields.items() if isinstance(v, int | float)}
                points[kind, step] = numbers  # a resumed run may record an evaluation twice
        if sum(kind == "step" for kind, _ in points) < run.resumed_step // self.every:
            return []
        return [(step, numbers) for (_, step), numbers in points.items()]

    def report_result(self, run: Run) -> None:
        """Report the commands to view and to upload the run."""
        if self.space is not None:
            run.emit("note", text=f"trackio  view: https://huggingface.co/spaces/{self.space}")
        elif self._is_local:
            project = f"--project {shlex.quote(self.project)}"
            text = f"trackio  view: trackio show {project}; upload: trackio sync {project} --space-id USER/NAME"
            run.emit("note", text=text)


class MutedStream:
    """Substitute for standard output that drops the text of one thread: the thread that created this object."""

    def __init__(self, stream: TextIO):
        self.stream, self.has_ended = stream, False
        self._thread = threading.get_ident()

    def write(self, text: str) -> int:
        """Write the text, unless the muted thread calls this method. Return the length of the text."""
        is_muted = threading.get_ident() == self._thread and not self.has_ended
        return len(text) if is_muted else self.stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextlib.contextmanager
def mute_thread() -> Iterator[None]:
    """Drop the output of this thread within the context, because trackio has no setting that silences it.

    contextlib.redirect_stdout would also drop the output of the run's own thread. At the end of the context, it would
    also restore an outdated stream, because progress bars and parallel runs replace sys.stdout in the meantime.
    """
    if sys.stdout is None:
        yield
        return
    muted = MutedStream(sys.stdout)
    sys.stdout = cast("TextIO", muted)
    try:
        yield
    finally:
        muted.has_ended = True
        while isinstance(sys.stdout, MutedStream) and sys.stdout.has_ended:
            sys.stdout = sys.stdout.stream


# -- Weights & Biases --------------------------------------------------------------------------------------------------


MODES = ("offline", "online")


@dataclass(eq=False)
class Wandb(Tracker):
    """Log the run to Weights & Biases, offline by default."""

    name: ClassVar[str] = "wandb"
    library: ClassVar[str] = "wandb"

    mode: str = "offline"  # offline | online
    entity: str | None = None  # team or user of the project; null: your default entity
    tags: str | None = None  # tags, separated by commas
    artifacts: bool = False  # also upload model files; list their exporters before wandb in `callbacks`

    _offline_path = ""  # directory of an offline run

    def check(self) -> None:
        """Raise UserError for invalid settings, and Unavailable without wandb."""
        require_choice("callbacks.wandb", self, mode=MODES)
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        os.environ.setdefault("WANDB_SILENT", "true")
        super().check()

    def open_record(self, run: Run) -> Any:
        """Start a W&B run, or continue the earlier one if this run was resumed, and return it."""
        import wandb

        record: Any = wandb.init(
            project=self.project,
            entity=self.entity,
            group=self.run_group(run),
            tags=[tag.strip() for tag in self.tags.split(",") if tag.strip()] if self.tags else None,
            id=self.id,
            resume="allow" if self.is_resumed and self.mode == "online" else None,  # offline, the id suffices
            name=f"{run.name}-{run.seed}",
            dir=str(run.dir),
            mode="online" if self.mode == "online" else "offline",
            config=dict(run.config),
            reinit="create_new",  # each job of a sweep is its own run
            settings=wandb.Settings(init_timeout=20, console="off", save_code=False, disable_git=True),
        )
        if self.mode == "offline" and (directory := getattr(record, "dir", None)):
            self._offline_path = str(Path(directory).parent)
        return record

    @hookimpl
    def on_event(self, run: Run, kind: str, fields: Mapping[str, Any]) -> None:
        """Upload an exported model if `artifacts` is set. Models of several steps become versions of one artifact."""
        if not (self.artifacts and kind == "export" and fields.keys() >= {"step", "weights", "bytes"}):
            return
        path, step, weights = Path(fields["path"]), int(fields["step"]), str(fields["weights"])

        def send(record: Any) -> None:
            import wandb

            name = f"run-{self.id}-{path.name.replace(f'-{step}', '')}"
            artifact = wandb.Artifact(name, type="model", metadata={"step": step, "weights": weights})
            (artifact.add_dir if path.is_dir() else artifact.add_file)(str(path))
            record.log_artifact(artifact, aliases=["latest", f"step-{step}"])

        self._enqueue(run, send, int(fields["bytes"]))

    def report_result(self, run: Run) -> None:
        """Report the path of an offline run, and the command to upload it."""
        if self._offline_path:
            run.emit("note", text=f"wandb   offline; upload: wandb sync {shlex.quote(self._offline_path)}")
