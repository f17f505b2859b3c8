"""Trackio, from Hugging Face."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, TextIO, cast

from toyexp import Run, UserError, needed
from toyexp_callbacks.dashboard import Record, Tracker
from toyexp_callbacks.events import told_before


@dataclass(eq=False)
class Trackio(Tracker):
    """Logs the run to Trackio, on this machine unless told otherwise: trackio show --project toyexp."""

    name: ClassVar[str] = "trackio"

    space: str | None = None  # the Space at Hugging Face to send to, USER/NAME; null: stay here

    def __post_init__(self) -> None:
        super().__post_init__()
        self._kept = False  # whether trackio has it, here

    def check(self) -> None:
        """Raises UserError for values that cannot work, Unavailable without trackio."""
        super().check()
        if self.space is not None and not re.fullmatch(r"[\w.-]+/[\w.-]+", self.space):
            raise UserError(f"callbacks.trackio.space={self.space}: must be USER/NAME, a Space at Hugging Face")
        with needed("trackio", "pip install 'toyexp[trackio]'"):
            import trackio

            _ = trackio.init

    def opened(self, run: Run) -> Record:
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
                group=self.group_of(run),
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
        return Quiet(record)

    def _before(self, run: Run) -> list[tuple[int, dict[str, Any]]]:
        """The points up to the checkpoint that the run goes on from; none where events.jsonl lacks some of them."""
        points = {}
        for kind, step, fields in told_before(run):
            if kind == "eval" or (kind == "step" and step % self.every == 0):
                part = {"step": "train", "eval": "held_out"}[kind]
                numbers = {f"{part}/{k}": v for k, v in fields.items() if isinstance(v, int | float)}
                points[kind, step] = numbers  # an eval of a resumed run may be told twice
        if sum(kind == "step" for kind, _ in points) < run.resumed // self.every:
            return []
        return [(step, numbers) for (_, step), numbers in points.items()]

    def ended(self, run: Run) -> None:
        """Says how to look at it, and how to send it."""
        if self.space is not None:
            run.emit("note", text=f"trackio  look: https://huggingface.co/spaces/{self.space}")
        elif self._kept:
            project = shlex.quote(self.project)
            text = (
                f"look: trackio show --project {project}; send: trackio sync --project {project} --space-id USER/NAME"
            )
            run.emit("note", text=f"trackio  {text}")


class Quiet:
    """A record of trackio's that says nothing when it is finished."""

    def __init__(self, record: Any):
        self._record = record
        self.log = record.log

    def finish(self) -> None:
        """Waits until everything is kept."""
        with quiet():
            self._record.finish()


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
