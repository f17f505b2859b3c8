"""An engine of `toyexp bench` that takes its turns in a process of its own, for in that of the others it cannot be.

A library that is told once in a process how to compute takes one of two settings there: ggml's Vulkan float16 or none.
Run as a program this module is that process: a line on its input is a turn, and a line of its output what came of it.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from toyexp.base.errors import RunFailed
from toyexp.commands.bench_peak import Peak, peak_of
from toyexp.commands.bench_stepper import Entry, Measured, made_batches, warm_up, why_it_ended
from toyexp.contract.dataset import Batch


class Apart(Measured):
    """What is opened, warmed up and stepped elsewhere; the peak of its products is found there too, if it is wanted."""

    def __init__(self, entry: Entry, steps: int, with_peak: bool, environment: Mapping[str, str]):
        self._name = entry.name
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as the process
        asked = {"entry": asdict(entry), "steps": steps, "peak": with_peak}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "toyexp.commands.bench_apart", json.dumps(asked)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, env=environment,
        )  # fmt: skip
        try:
            told = self._heard()
        except BaseException:
            self.close()
            raise
        self.note, self.devices, self.steps = f"{told['note']}; in a process of its own", told["devices"], told["steps"]
        self.peak = Peak(**told["peak"]) if with_peak else None

    def turn(self, batches: Sequence[Batch], steps: int) -> float:
        """As many steps as it said, of the batches that it made: those of here, for batch k is the same everywhere."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # which its last words explain
            print("turn", file=self._process.stdin, flush=True)
        return float(self._heard())

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def _heard(self) -> Any:
        assert self._process.stdout is not None
        if line := self._process.stdout.readline():
            return json.loads(line)
        self._process.wait()
        raise RunFailed(f"{self._name}: in a process of its own: {why_it_ended(self._process, self._errors)}")


def main(words: Sequence[str]) -> None:
    """Opens the entry that `words` ask for, says what it is, and takes a turn for each line that comes."""
    asked = json.loads(words[0])
    prepared, open_stepper = Entry(**asked["entry"]).prepare()
    peak = peak_of(prepared.config.engine, prepared.plan.rows) if asked["peak"] else None
    batches = made_batches(prepared)
    stepper, steps = warm_up(open_stepper, batches, asked["steps"])
    _tell({"note": stepper.note, "devices": stepper.devices, "steps": steps, "peak": peak and asdict(peak)})
    for _ in sys.stdin:
        _tell(stepper.turn(batches, steps))
    stepper.close()


def _tell(what: object) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
