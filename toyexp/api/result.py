"""`Result`: a run as a Python object."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from toyexp.api.calls import isolated_call
from toyexp.base.errors import UserError, printable
from toyexp.base.files import explain_missing
from toyexp.base.formatting import align_columns, pluralise, short_path
from toyexp.base.ownership import LEDGER, LOCK_FILE, cached_fingerprint
from toyexp.base.terminal import print_note
from toyexp.config.top_level import TEXT_LIMITS
from toyexp.interfaces.engine import Engine
from toyexp.interfaces.format import LazyTensors
from toyexp.interfaces.model import Model
from toyexp.plugins.discovery import load
from toyexp.plugins.registry import Registry
from toyexp.results.events import History, average_bins, read_events, read_run_facts
from toyexp.results.run_dirs import RUN_FILES, read_run, setting_values
from toyexp.training.checkpoint import read_result
from toyexp.training.provenance import read_origin

if TYPE_CHECKING:
    from toyexp.inference.loaded_model import LoadedModel
    from toyexp.tokenizers.tokenizer import Tokenizer

FILE_DIRECTORIES = ("checkpoints", "plots", "logs")  # subdirectories listed in Result.files


class Result:
    """Result of a run: its state and numbers when this object was created, and access to its files and weights.

    Files and weights are read from the run's directory when they are accessed. If the run was resumed after this object
    was created, the access raises UserError. You can pass this object wherever a path is expected. It then stands for
    the run's directory, for example in `toyexp.run(resume=result)`. If `late` is True, the run's settings and history
    are also read only on access. This saves time for sweeps of thousands of runs.
    """

    def __init__(
        self, directory: Path, registry: Registry | None = None, checkpoint: Path | None = None, late: bool = False
    ):
        self.directory = directory.absolute()
        self.checkpoint = checkpoint  # checkpoint to read weights from; None: use the final weights
        self._registry = registry or load()
        self._when, record = self._start_times(), read_run(self.directory)
        self.name, self._engine_name = record.name, record.engine
        self.state = record.state  # completed, diverged, stopped, pruned, interrupted, failed, killed or running
        self.why = record.why  # message of the callback that stopped the run, or the error message; otherwise empty
        self.steps = record.steps  # optimiser steps; None if unknown
        self.loss = record.train_loss  # smoothed training loss, over about 50 steps, in nats per target
        # Held-out metrics of the exported model: loss in nats per target, and others such as accuracy.
        self.held_out = {**({} if record.loss is None else {"loss": record.loss}), **record.scores}
        self.best: dict[str, Any] | None = read_result(directory).get("best")  # of checkpoint_best
        self.seconds, self.speed = record.seconds, record.speed  # seconds in all; tokens (images) per second
        if not late:
            self.lines()  # reads settings, history and warnings

    def _start_times(self) -> list[int]:
        """Return a list with the modification time of config.yaml in ns; empty if the file is missing.

        Each process that trains the run rewrites this file, so a new time means that the run was resumed.
        """
        return [path.stat().st_mtime_ns for path in self.directory.glob("config.yaml")]

    @property
    def _run_directory(self) -> Path:
        """The run's directory. Raise UserError if the run was resumed or moved after this object was created."""
        if self._when != self._start_times():
            now = f"toyexp.open({str(self.directory)!r}) reads it again"
            raise UserError(f"{short_path(self.directory)}: was resumed or moved after this result was read; {now}")
        return self.directory

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle only the paths of run and checkpoint; unpickling reads the run again, with the installed plugins."""
        return Result, (self.directory, None, self.checkpoint)

    # -- training --

    @cached_property
    def history(self) -> History:
        """Arrays with the loss, learning rate and other numbers of each recorded step; see History."""
        return History.read(self._run_directory)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """All settings of the run, keyed by full key: settings["model"], settings["model.d_model"]."""
        return setting_values(self._run_directory)

    @cached_property
    def facts(self) -> dict[str, Any]:
        """Facts that the run recorded when it started: the event `run_start` of events.jsonl.

        Each key, such as `backend` (the engine) or `model`, has a dict with facts about this subject.
        """
        return read_run_facts(self._run_directory)

    @cached_property
    def warnings(self) -> list[str]:
        """Texts of the warnings that the run recorded."""
        events = read_events(self._run_directory / "events.jsonl")
        return [str(event.get("text")) for event in events if event.get("kind") == "warning"]

    @property
    def files(self) -> dict[str, Path]:
        """Absolute paths of the run's files, keyed by relative path. Checkpoints are directories.

        For example, files["checkpoints/step-200"] is the path of a checkpoint.
        """
        files: dict[str, Path] = {}
        with contextlib.suppress(OSError):
            for path in sorted(self._run_directory.iterdir()):
                entries = sorted(path.iterdir()) if path.name in FILE_DIRECTORIES and path.is_dir() else [path]
                shown = [p for p in entries if not p.name.startswith(".") and p.name not in (LOCK_FILE, LEDGER)]
                files |= {str(p.relative_to(self.directory)): p for p in shown}
        return files

    # -- model --

    @cached_property
    def model(self) -> Model:
        """Model object: the architecture and sizes of the trained model. Its weights are in `parameters`.

        If the run trained an adapter, this is its base model. Raise UserError if the run left no weights.
        """
        return self._loaded_model.model

    @cached_property
    def parameters(self) -> Mapping[str, np.ndarray]:
        """Trained weights as float32 arrays, keyed by GGUF tensor name. Matrices are [out, in].

        Each array is read from the file when it is accessed. If the run trained an adapter, the mapping has the base
        model's tensors and the adapter's matrices `<tensor>.lora_a` [rank, in] and `<tensor>.lora_b` [out, rank].
        """
        from toyexp.formats.file_plan import frozen_tensors

        loaded = self._loaded_model
        tensors = {t.name: t for t in frozen_tensors(self.model, loaded.path, loaded.adapter)[0]}

        def read(name: str) -> np.ndarray:
            assert self._run_directory  # raises UserError if the run was resumed after this object was created
            return np.asarray(tensors[name].values.draw(tensors[name].shape, 0, name), np.float32)

        return LazyTensors({name: tensor.shape for name, tensor in tensors.items()}, read)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, with the methods encode() and decode(). Raise UserError if the model has none."""
        return self._loaded_model.tokenizer()

    def logits(self, inputs: Any, engine: str | Engine = "auto") -> np.ndarray:
        """Return the float32 logits of the model, before the softmax.

        For a language model, `inputs` is a text, or token ids [T] or [B, T], for B sequences of T tokens. The logits
        are [T, V] or [B, T, V], with V tokens in the vocabulary. If the tokenizer has a BOS token, it is put before a
        text, and has a row in the logits too. For an image model, `inputs` is uint8 [N, H, W, channels] of the model's
        image size, and the logits are [N, classes]. For a single image [H, W, channels] they are [classes].

        `engine` is an engine object or a name such as "cpu". Raise UserError for invalid inputs, and for more tokens
        than the model's context.
        """
        from toyexp.inference.predict import logits

        with isolated_call("logits"):
            return logits(self._loaded_model, inputs, engine)

    def generate(
        self, prompt: str | Sequence[int], tokens: int = 64, *, temperature: float = 0.8, top_k: int = 40,
        top_p: float = 0.95, min_p: float = 0.0, seed: int = 0, chat: bool = False, system: str | None = None,
        engine: str = "auto",
    ) -> str | list[int]:  # fmt: skip
        """Return a continuation of the prompt, without the prompt itself.

        Generation ends after `tokens` tokens, or earlier at the end-of-text token. When the context is full, the model
        continues from the second half of the tokens in it. The result is a text, or a list of token ids if `prompt` is
        a list of token ids or the model has no tokenizer.

        A temperature of 0 means greedy decoding; otherwise, the same `seed` gives the same tokens. If `chat` is True,
        the model's chat template formats the prompt and the `system` message. `engine` names the engine, such as "cpu".
        Raise UserError for invalid arguments.
        """
        from toyexp.inference.generate import Options
        from toyexp.inference.generate import generate as write
        from toyexp.inference.predict import token_ids
        from toyexp.interfaces.sampling import Sampling

        loaded = self._loaded_model
        numbers = {"tokens": tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p,
                   "seed": seed}  # fmt: skip
        for key, value in numbers.items():
            least, most = TEXT_LIMITS["--" + key.replace("_", "-")]
            fits, kind = (int, "whole number") if isinstance(least, int) else ((int, float, np.floating), "number")
            if not isinstance(value, fits) or isinstance(value, bool) or not least <= value <= most:
                raise UserError(f"generate {key}={printable(repr(value))}: must be a {kind} from {least} to {most}")
        if not isinstance(engine, str):
            raise UserError(f"generate engine={printable(repr(engine))}: must be text, such as 'ggml:threads=1'")
        if chat and not isinstance(prompt, str):
            raise UserError("generate chat=True: needs a text prompt, not token ids")
        if system is not None and not (chat and isinstance(system, str)):
            raise UserError(
                f"generate system={printable(repr(system))}: must be text, and only has an effect with chat=True"
            )
        text, ids = (prompt, None) if isinstance(prompt, str) else (None, token_ids("generate", prompt, (1,)).tolist())
        sampling = Sampling(temperature, top_k, top_p, min_p)
        adapter = str(loaded.adapter) if loaded.adapter else None
        options = Options(loaded.path, text, ids, chat, system, tokens, sampling, seed, adapter, engine)
        with isolated_call("generate", quiet=True):
            generated = write(options, self._registry, lambda text: None, print_note)
        return generated.text if isinstance(prompt, str) and generated.text is not None else generated.ids

    # -- internals --

    @property
    def _loaded_model(self) -> LoadedModel:
        """The run's model file. If the run trained an adapter, it is the adapter together with its base model file.

        Raise UserError if the run left no weights, or if it was resumed after this object was created. Raise it too if
        the base model file has changed.
        """
        from toyexp.inference.loaded_model import LoadedModel
        from toyexp.inference.model_files import ADAPTER, MODEL, find_model_file

        directory, adapter = self.checkpoint or self._run_directory, self._run_directory / ADAPTER
        if (directory / MODEL).exists():
            return LoadedModel.open(directory, self._registry)
        if not self.checkpoint and adapter.exists() and (base := self.settings.get("recipe.base")):
            record = read_origin(self.directory)
            path = find_model_file(Path(record.resolve(str(base))), registry=self._registry)
            if record.list_changes({"base": cached_fingerprint(path)}):
                raise UserError(f"{short_path(path)}: its contents changed since the run; restore that file")
            return LoadedModel(path, adapter, self._registry)
        with isolated_call("weights"):
            return LoadedModel.open(directory, self._registry)

    # -- display --

    def lines(self) -> list[tuple[str, str]]:
        """Return a summary of the run as lines, each a pair of label and text."""
        chosen = [*(str(self.settings.get(part, "")) for part in ("recipe", "model", "data")), self._engine_name]
        after = "" if self.steps is None else f" after {pluralise(self.steps, 'step')}"
        duration = "" if self.seconds is None else f" in {self.seconds:.1f} s"
        first = self.history.held_out.get("loss", np.empty(0))
        initial = f"{first[0]:.4f} -> " if len(first) > 1 and math.isfinite(first[0]) else ""
        rows = [
            ("run", f"{self.name}  ({', '.join(filter(None, chosen))})"),
            ("state", f"{self.state}{after}{duration}" + (f": {self.why}" if self.why else "")),
            *((f"held-out {k}", f"{initial if k == 'loss' else ''}{v:z.4f}") for k, v in self.held_out.items()),
        ]
        if self.loss is not None:
            rows.append(("smoothed train loss", f"{self.loss:.4f}"))
        if self.warnings:
            rows.append(("warnings", f"{len(self.warnings)}: {self.warnings[0]}"))
        if self.checkpoint:
            rows.append(("weights", self.checkpoint.name))
        return [*rows, ("directory", short_path(self.directory))]

    def __repr__(self) -> str:
        return "\n".join(align_columns(self.lines()))

    def _repr_html_(self) -> str:
        from toyexp.results.plot import describe_unit

        return run_html(self.lines(), self.history, describe_unit(self.directory, "loss"))

    def __fspath__(self) -> str:
        return str(self.directory)


def require_run(directory: Path) -> None:
    """Raise UserError if the directory contains no run."""
    names = {path.name for path in directory.iterdir()} if directory.is_dir() else set()
    if "config.yaml" not in names or not names & RUN_FILES:
        problem = "holds no run" if directory.exists() else explain_missing(directory)
        raise UserError(f"{os.fspath(directory)}: {problem}; toyexp.open needs a run, a checkpoint or a sweep")


# -- notebooks ----------------------------------------------------------------------------------------------------

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BELOW = 680, 280, 44, 14, 24, 42  # size and margins in pixels
BLUE, RED = "#4C69FF", "#D0521F"  # contrast of about 4:1 with white and with black
POINTS = 100  # maximum points of a curve; longer curves are averaged in segments


def run_html(lines: Sequence[tuple[str, str]], history: History, unit: str) -> str:
    """Return a run's summary, given as pairs of label and text, and its loss curve in `unit` as HTML."""
    rows = "".join(
        f'<tr><td style="text-align:left">{escape(word)}</td><td style="text-align:left">{escape(text)}</td></tr>'
        for word, text in lines
    )
    return f"<table>{rows}</table>{loss_svg(history, unit)}"


def table_html(heads: Sequence[str], rows: Sequence[Sequence[str]], caption: str) -> str:
    """Return a table as HTML, with a caption below."""
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    body = "".join(f"<tr>{''.join(f'<td>{escape(text)}</td>' for text in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table><p>{escape(caption)}</p>"


def loss_svg(history: History, unit: str) -> str:
    """Return an SVG plot of the training loss (a line) and the held-out loss (points), for a background of any colour.

    `unit` is written after the axis's title. Return an empty string if the history has fewer than two values.
    """
    trained, held_out = average_bins(history.curve("loss"), POINTS), history.held_out_curve("loss")
    steps, values = map(np.concatenate, zip(trained, held_out, strict=True))
    if len(values) < 2:
        return ""
    last, low, high = int(steps.max()), values.min(), values.max()
    room = max(0.04 * (high - low), (0.05 * abs(high) - (high - low)) / 2, 1e-6)  # noise must not look like a trend
    low, high = low - room, high + room
    end, bottom, box = WIDTH - RIGHT, HEIGHT - BELOW, f"0 0 {WIDTH} {HEIGHT}"

    def place(step: Any, value: Any) -> tuple[Any, Any]:
        return LEFT + (end - LEFT) * step / (last or 1), TOP + (bottom - TOP) * (high - value) / (high - low)

    line, dotted = (
        " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(*place(*curve), strict=True)) for curve in (trained, held_out)
    )
    points = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3"><title>step {step}: {value:.4f}</title></circle>'
        for x, y, step, value in zip(*place(*held_out), *held_out, strict=True)
    )
    ticks = [(place(0, value)[1], value) for value in round_ticks(low, high)]
    marks = [(place(step, low)[0], step) for step in round_ticks(0, last or 1, 1)]
    labels = "".join(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.5g}</text>' for y, value in ticks)
    low_labels = (f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{step:.0f}</text>' for x, step in marks)
    grid = "".join(f"M{LEFT},{y:.1f}H{end}" for y, _ in ticks)
    return (
        f'<svg width="{WIDTH}" viewBox="{box}" style="max-width:100%" role="img" aria-label="loss, to step {last}" '
        f'font-size="12" fill="currentColor"><path d="{grid}" stroke="currentColor" '
        f'opacity="0.2"/><g fill="none"><polyline points="{line}" stroke="{BLUE}" stroke-width="1.5"/>'
        f'<polyline points="{dotted}" stroke="{RED}"/></g><g fill="{RED}">{points}</g>{labels}'
        f'{"".join(low_labels)}<text y="12">loss{unit}</text><text x="{LEFT}" y="{HEIGHT - 4}">'
        f'<tspan fill="{BLUE}">—</tspan> training loss<tspan dx="12" fill="{RED}">●</tspan> held-out loss</text>'
        f'<text x="{end}" y="{HEIGHT - 4}" text-anchor="end">step</text></svg>'
    )


def round_ticks(low: float, high: float, least: float = 0.0) -> np.ndarray:
    """Return up to five multiples of 1, 2 or 5 times a power of ten in a range; their distance is at least `least`."""
    rough = (high - low) / 5
    size = 10.0 ** math.floor(math.log10(rough))
    gap = max(size * next(factor for factor in (1, 2, 5, 10) if factor * size > rough), least)
    return gap * np.arange(math.ceil(low / gap), math.floor(high / gap) + 1)
