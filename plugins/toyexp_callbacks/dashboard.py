"""Dashboards as listeners that can never hurt a run: TensorBoard, Trackio, and Weights & Biases.

Everything goes through a queue to a thread of its own; whatever the dashboard's library raises there ends the listening
with one warning. events.jsonl stays the record.
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
from toyexp_callbacks.events import Listener, told_before

log = logging.getLogger("toyexp")

FINISH_SECONDS = 30.0
UPLOAD_BYTES = 1e6  # a second that are waited for at the end: 8 Mbit/s
QUEUE_LIMIT = 10_000  # records; beyond it new ones are dropped, never waited for


@dataclass(eq=False)
class Dashboard(Listener):
    """Base of the callbacks that send a run's numbers to a dashboard."""

    library: ClassVar[str]  # the package that it needs
    begins: ClassVar[str] = "init"  # a name in it: what is left of a package that was removed has none

    every: int = 1  # steps between points

    def __post_init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._bytes = 0  # of files that were passed on
        self._trouble: str | None = None  # what the thread gave up on, until the run has been told

    @abstractmethod
    def opened(self, run: Run) -> Any:
        """Return the dashboard's record of the run, which has `log(fields, step)`; called in the thread."""

    def finish(self, record: Any) -> None:
        """Return once the record is complete; called in the thread."""
        record.finish()

    def check(self) -> None:
        """Raises UserError for values that cannot work, Unavailable without the library."""
        require_range(f"callbacks.{self.name}", self, every="[1,inf)")
        with require_package(self.library, f"pip install 'toyexp[{self.name}]'"):
            getattr(importlib.import_module(self.library), self.begins)

    def warnings(self, preview: RunPreview) -> Iterable[str]:
        """That no step is sent."""
        return preview.interval_warnings(f"callbacks.{self.name}.every", self.every, "none of them is sent")

    @hookimpl
    def on_start(self, run: Run) -> None:
        """Starts the listening thread; the library itself is started there."""
        self._queue: queue.Queue[Callable[[Any], Any] | None] = queue.Queue(QUEUE_LIMIT)
        self._thread = threading.Thread(target=self._listen, args=(run,), name=self.name, daemon=True)
        self._thread.start()

    def _listen(self, run: Run) -> None:
        ended = False
        try:
            # A library may fall back to a temporary directory in silence when this one cannot be written.
            if not os.access(run.dir, os.W_OK):
                raise OSError(f"{run.dir} cannot be written")
            record = self.opened(run)
            while (send := self._queue.get()) is not None:
                send(record)
            ended = True
            self.finish(record)
        except BaseException as error:  # wandb is known to raise even KeyboardInterrupt; none of it is the run's
            why = printable(f"{type(error).__name__}: {error}", 200)
            self._trouble = f"{self.name} gave up, the run goes on: {why}"
            while not ended and self._queue.get() is not None:
                pass

    def _put(self, run: Run, send: Callable[[Any], Any], size: int = 0) -> None:
        """Have the thread call `send` with its record; `size` is that of a file in bytes."""
        with contextlib.suppress(queue.Full):  # too slow: it is dropped, not waited for
            self._queue.put_nowait(send)
            self._bytes += size
        self._tell(run)

    def _tell(self, run: Run) -> None:
        """Passes the thread's trouble on from the run's own thread, once: callbacks expect to be called from it."""
        if self._trouble is not None:
            trouble, self._trouble = self._trouble, None
            log.warning(trouble)
            run.emit("note", text=trouble)

    @hookimpl(trylast=True)  # behind who logs
    def on_step(self, run: Run, step: int, metrics: Mapping[str, float]) -> None:
        """Sends a point."""
        if step % self.every == 0:
            fields = {f"train/{k}": v for k, v in metrics.items()}
            self._put(run, lambda record: record.log(fields, step=step))

    @hookimpl(trylast=True)  # behind who logs
    def on_eval(self, run: Run, step: int, metrics: Mapping[str, float]) -> None:
        """Sends a held-out point."""
        fields = {f"held_out/{k}": v for k, v in metrics.items()}
        self._put(run, lambda record: record.log(fields, step=step))

    @hookimpl
    def on_end(self, run: Run) -> None:
        """Waits for the dashboard to finish, but not for ever."""
        if self._thread is None:
            return
        seconds = FINISH_SECONDS + round(self._bytes / UPLOAD_BYTES)
        with contextlib.suppress(queue.Full):  # what it could not take in that time, it will not finish either
            self._queue.put(None, timeout=seconds)
            self._thread.join(seconds)
        if self._thread.is_alive():
            self._trouble = f"{self.name} did not finish within {seconds:g} s; its record of this run is incomplete"
        self._tell(run)
        self.ended(run)

    def ended(self, run: Run) -> None:
        """Says what it has left."""


@dataclass(eq=False)
class Tracker(Dashboard):
    """Base of those that keep runs by project: a run that is resumed goes on as the run it was."""

    project: str = "toyexp"  # where the run appears
    group: str | None = None  # runs that belong together; null: of a job, its sweep

    def __post_init__(self) -> None:
        super().__post_init__()
        self.id = secrets.token_hex(4)  # tells the run from others of its name, and stays when it is resumed
        self.resumed = False

    def state(self) -> dict[str, Any]:
        """The run's id."""
        return {"id": self.id}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Goes on in the same run."""
        self.id, self.resumed = str(state["id"]), True

    def run_group(self, run: Run) -> str | None:
        """The group that was asked for, or the sweep that the run is a job of."""
        sweep = run.dir.parent
        return self.group or (sweep.name if (sweep / "sweep.json").is_file() else None)


# -- TensorBoard: event files in the run's directory -------------------------------------------------------------------


FOLDER = "tensorboard"


@dataclass(eq=False)
class Tensorboard(Dashboard):
    """Writes the run's numbers for TensorBoard: tensorboard --logdir outputs."""

    name: ClassVar[str] = "tensorboard"
    library: ClassVar[str] = "tensorboardX"
    begins: ClassVar[str] = "SummaryWriter"

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
        name = f"events.out.tfevents.{int(time.time())}.{platform.node()}.from-{run.resumed_step}"
        self._path = make_directory(run.dir / FOLDER) / name
        self._path.touch(exist_ok=False)
        self._file = RecordWriter(str(self._path))
        self._write(file_version="brain.Event:2")
        if run.resumed_step:
            self._write(step=run.resumed_step + 1, session_log=SessionLog(status=SessionLog.START))
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


# -- Trackio, from Hugging Face ----------------------------------------------------------------------------------------


@dataclass(eq=False)
class Trackio(Tracker):
    """Logs the run to Trackio, on this machine unless told otherwise: trackio show --project toyexp."""

    name: ClassVar[str] = "trackio"
    library: ClassVar[str] = "trackio"

    space: str | None = None  # the Space at Hugging Face to send to, USER/NAME; null: stay here

    _kept = False  # whether trackio has it, here

    def check(self) -> None:
        """Raises UserError for values that cannot work, Unavailable without trackio."""
        if self.space is not None and not re.fullmatch(r"[\w.-]+/[\w.-]+", self.space):
            raise UserError(f"callbacks.trackio.space={self.space}: must be USER/NAME, a Space at Hugging Face")
        super().check()

    def opened(self, run: Run) -> Any:
        """The run in trackio's database; it is found again by its name."""
        import trackio

        name = f"{run.name}-{run.seed}-{self.id}"
        points = self._before(run) if self.resumed and self.space is None else []
        with quiet():
            if points:  # taken back as a whole, and told again as far as the checkpoint
                with contextlib.suppress(ValueError):  # the project was deleted
                    for old in trackio.Api().runs(self.project):
                        if old.name == name:
                            old.delete()
            record: Any = trackio.init(
                project=self.project,
                name=name,
                group=self.run_group(run),
                space_id=self.space,
                config=json.loads(json.dumps(dict(run.config), default=str)),
                resume="allow" if self.resumed else "never",
                embed=False,
                auto_log_gpu=False,  # without psutil's and the driver's figures: the run's own numbers alone
                auto_log_cpu=False,
            )
        for step, fields in points:
            record.log(fields, step=step)
        self._kept = getattr(record, "url", None) is None  # its own variables of the environment may send it away
        return record

    def finish(self, record: Any) -> None:
        """Wait until everything is kept."""
        with quiet():
            record.finish()

    def _before(self, run: Run) -> list[tuple[int, dict[str, Any]]]:
        """The points up to the checkpoint that the run goes on from; none where events.jsonl lacks some of them."""
        points = {}
        for kind, step, fields in told_before(run):
            if kind == "eval" or (kind == "step" and step % self.every == 0):
                part = {"step": "train", "eval": "held_out"}[kind]
                numbers = {f"{part}/{k}": v for k, v in fields.items() if isinstance(v, int | float)}
                points[kind, step] = numbers  # an eval of a resumed run may be told twice
        if sum(kind == "step" for kind, _ in points) < run.resumed_step // self.every:
            return []
        return [(step, numbers) for (_, step), numbers in points.items()]

    def ended(self, run: Run) -> None:
        """Says how to look at it, and how to send it."""
        if self.space is not None:
            run.emit("note", text=f"trackio  look: https://huggingface.co/spaces/{self.space}")
        elif self._kept:
            project = f"--project {shlex.quote(self.project)}"
            text = f"trackio  look: trackio show {project}; send: trackio sync {project} --space-id USER/NAME"
            run.emit("note", text=text)


class Hushed:
    """Standard output without what one thread writes to it."""

    def __init__(self, stream: TextIO):
        self.stream, self.over = stream, False
        self._thread = threading.get_ident()

    def write(self, text: str) -> int:
        """Writes what other threads say."""
        hushed = threading.get_ident() == self._thread and not self.over
        return len(text) if hushed else self.stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Nothing that this thread prints appears: trackio has no setting for it, and stdout is the run's.

    contextlib.redirect_stdout would take the lines of the run's own thread too, and put back what may be gone: a bar
    takes stdout's place for a while, and so do the runs beside this one.
    """
    if sys.stdout is None:
        yield
        return
    hushed = Hushed(sys.stdout)
    sys.stdout = cast("TextIO", hushed)
    try:
        yield
    finally:
        hushed.over = True
        while isinstance(sys.stdout, Hushed) and sys.stdout.over:
            sys.stdout = sys.stdout.stream


# -- Weights & Biases --------------------------------------------------------------------------------------------------


MODES = ("offline", "online")


@dataclass(eq=False)
class Wandb(Tracker):
    """Logs the run to Weights & Biases, offline unless told otherwise."""

    name: ClassVar[str] = "wandb"
    library: ClassVar[str] = "wandb"

    mode: str = "offline"  # offline | online
    entity: str | None = None  # the team or user that the project is of; null: your default one
    tags: str | None = None  # words to find it by, between commas
    artifacts: bool = False  # send the files of exporters that stand before it in the list, too

    _offline = ""  # where wandb keeps an offline run

    def check(self) -> None:
        """Raises UserError for values that cannot work, Unavailable without wandb."""
        require_choice("callbacks.wandb", self, mode=MODES)
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        os.environ.setdefault("WANDB_SILENT", "true")
        super().check()

    def opened(self, run: Run) -> Any:
        """The W&B run."""
        import wandb

        record: Any = wandb.init(
            project=self.project,
            entity=self.entity,
            group=self.run_group(run),
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
            self._offline = str(Path(folder).parent)
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
        if self._offline:
            run.emit("note", text=f"wandb   offline; send it: wandb sync {shlex.quote(self._offline)}")
