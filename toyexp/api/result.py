"""What came out of a run, as a Python program looks at it."""

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
from toyexp.plugins.discovery import load
from toyexp.plugins.registry import Registry
from toyexp.results.events import History, average_bins, read_events, read_run_facts
from toyexp.results.run_dirs import RUN_FILES, read_run, setting_values
from toyexp.training.checkpoint import read_result
from toyexp.training.provenance import read_origin

if TYPE_CHECKING:
    from toyexp.inference.loaded_model import LoadedModel
    from toyexp.interfaces.engine import Engine
    from toyexp.interfaces.model import Model
    from toyexp.tokenizers.tokenizer import Tokenizer

FILE_DIRECTORIES = ("checkpoints", "plots", "logs")  # directories of a run whose entries are files of it


class Result:
    """A run as it stood when this object was made; files and weights are read from its directory when asked for.

    Once the run was resumed, its weights and files are others: asking for them raises UserError. A result may stand
    wherever a path may: `toyexp.run(resume=result)`. One of a sweep, which may have thousands, reads its events `late`.
    """

    def __init__(
        self, directory: Path, registry: Registry | None = None, checkpoint: Path | None = None, late: bool = False
    ):
        self.directory = directory.absolute()
        self.checkpoint = checkpoint  # whose weights are read in place of those that the run left
        self._registry = registry or load()
        self._when, found = self._start_times(), read_run(self.directory)
        self.name, self._engine_name = found.name, found.engine
        self.state = found.state  # completed, diverged, stopped, pruned, interrupted, failed, killed or running
        self.why = found.why  # the sentence of the callback that stopped it, or the error that it failed with, or empty
        self.steps = found.steps  # optimiser steps taken; None if none is known of
        self.loss = found.train_loss  # smoothed training loss, over about the last 50 steps, in nats a target
        # Held-out scores of the exported model: loss, in nats a target, and the model's own, such as accuracy.
        self.held_out = {**({} if found.loss is None else {"loss": found.loss}), **found.scores}
        self.best: dict[str, Any] | None = read_result(directory).get("best")  # step, metric, score: `checkpoint_best`
        self.seconds, self.speed = found.seconds, found.speed  # in all; tokens, or images, a second in steps alone
        if not late:
            self.lines()  # which reads settings, history and warnings

    def _start_times(self) -> list[int]:
        """Return when training last began: each process that trains the run writes its config.yaml anew."""
        return [path.stat().st_mtime_ns for path in self.directory.glob("config.yaml")]

    @property
    def _run_directory(self) -> Path:
        """The run's directory; UserError if the run was resumed since."""
        if self._when != self._start_times():
            now = f"toyexp.open({str(self.directory)!r}) shows it as it is now"
            raise UserError(f"{short_path(self.directory)}: was resumed, or moved, since this result was read; {now}")
        return self.directory

    def __reduce__(self) -> tuple[Any, ...]:
        """A pickle of it opens the directory again, with the plugins that are found there."""
        return Result, (self.directory, None, self.checkpoint)

    # -- how it went --

    @cached_property
    def history(self) -> History:
        """Its numbers step by step, as arrays."""
        return History.read(self._run_directory)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """All settings by the keys they are typed under: settings["model"], settings["model.d_model"]."""
        return setting_values(self._run_directory)

    @cached_property
    def facts(self) -> dict[str, Any]:
        """What it recorded as it began: engine, machine, model, data."""
        return read_run_facts(self._run_directory)

    @cached_property
    def warnings(self) -> list[str]:
        """What it was warned of, a sentence each."""
        events = read_events(self._run_directory / "events.jsonl")
        return [str(event.get("text")) for event in events if event.get("kind") == "warning"]

    @property
    def files(self) -> dict[str, Path]:
        """Its files by their names below its directory; a checkpoint is a directory: files["checkpoints/step-200"]."""
        found: dict[str, Path] = {}
        with contextlib.suppress(OSError):
            for path in sorted(self._run_directory.iterdir()):
                inside = sorted(path.iterdir()) if path.name in FILE_DIRECTORIES and path.is_dir() else [path]
                shown = [p for p in inside if not p.name.startswith(".") and p.name not in (LOCK_FILE, LEDGER)]
                found |= {str(p.relative_to(self.directory)): p for p in shown}
        return found

    # -- what it trained --

    @cached_property
    def model(self) -> Model:
        """The model that was trained, with its sizes; of an adapter, its base. `parameters` are its weights.

        Raises UserError where the run left no weights.
        """
        return self._load_model.model

    @cached_property
    def parameters(self) -> Mapping[str, np.ndarray]:
        """Its trained weights: float32 arrays by the names of GGUF, a matrix as [out, in]; read one by one.

        An adapter's are `<tensor>.lora_a` [rank, in] and `<tensor>.lora_b` [out, rank], beside the base's.
        """
        from toyexp.formats.file_plan import frozen_tensors
        from toyexp.interfaces.format import LazyTensors

        loaded = self._load_model
        tensors = {t.name: t for t in frozen_tensors(self.model, loaded.path, loaded.adapter)[0]}

        def read(name: str) -> np.ndarray:
            assert self._run_directory  # which raises UserError if the run was resumed since
            return np.asarray(tensors[name].values.draw(tensors[name].shape, 0, name), np.float32)

        return LazyTensors({name: tensor.shape for name, tensor in tensors.items()}, read)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of its text: encode(), decode(); UserError for a model without one."""
        return self._load_model.tokenizer()

    def logits(self, inputs: Any, engine: str | Engine = "auto") -> np.ndarray:
        """The model's float32 logits, before any softmax.

        Of a language model `inputs` is a text, or token ids [T] or [B, T], and the answer [T, V] or [B, T, V]; a text
        begins with the tokenizer's first token, where it has one. Of images it is uint8 [N, H, W, channels] as large as
        the model's, and the answer [N, classes]; one image has an answer [classes].

        Raises UserError for what the model cannot read, and for more tokens than its context.
        """
        from toyexp.inference.predict import logits

        with isolated_call("logits"):
            return logits(self._load_model, inputs, engine)

    def generate(
        self, prompt: str | Sequence[int], tokens: int = 64, *, temperature: float = 0.8, top_k: int = 40,
        top_p: float = 0.95, min_p: float = 0.0, seed: int = 0, chat: bool = False, system: str | None = None,
        engine: str = "auto",
    ) -> str | list[int]:  # fmt: skip
        """What the model writes behind a prompt, without it: at most so many tokens, or up to its end of text.

        With temperature 0 always the likeliest token; `chat` puts the prompt into the chat template, behind what
        `system` says. The same seed writes the same text. Of ids as a prompt, and a model without a tokenizer, it is a
        list of ids.

        Beyond the model's context the later half of the text is read anew. Raises UserError for what cannot be.
        """
        from toyexp.inference.generate import Options
        from toyexp.inference.generate import generate as write
        from toyexp.inference.predict import token_ids
        from toyexp.interfaces.sampling import Sampling

        loaded = self._load_model
        numbers = {"tokens": tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p,
                   "seed": seed}  # fmt: skip
        for key, value in numbers.items():
            least, most = TEXT_LIMITS["--" + key.replace("_", "-")]
            fits, kind = (int, "whole number") if isinstance(least, int) else ((int, float, np.floating), "number")
            if not isinstance(value, fits) or isinstance(value, bool) or not least <= value <= most:
                raise UserError(f"generate {key}={printable(repr(value))}: must be a {kind} from {least} to {most}")
        if not isinstance(engine, str):
            raise UserError(f"generate engine={printable(repr(engine))}: takes a name, such as 'ggml:threads=1'")
        if chat and not isinstance(prompt, str):
            raise UserError("generate chat=True: takes its message as text; ids go without it")
        if system is not None and not (chat and isinstance(system, str)):
            raise UserError(f"generate system={printable(repr(system))}: takes a text, with chat=True")
        text, ids = (prompt, None) if isinstance(prompt, str) else (None, token_ids("generate", prompt, (1,)).tolist())
        sampling = Sampling(temperature, top_k, top_p, min_p)
        adapter = str(loaded.adapter) if loaded.adapter else None
        asked = Options(loaded.path, text, ids, chat, system, tokens, sampling, seed, adapter, engine)
        with isolated_call("generate", quiet=True):
            found = write(asked, self._registry, lambda text: None, print_note)
        return found.text if isinstance(prompt, str) and found.text is not None else found.ids

    # -- how it is done --

    @property
    def _load_model(self) -> LoadedModel:
        """The files of the model and an adapter on it; UserError if the run left no weights, or was resumed since."""
        from toyexp.inference.loaded_model import LoadedModel
        from toyexp.inference.model_files import ADAPTER, MODEL, find_model_file

        where, adapter = self.checkpoint or self._run_directory, self._run_directory / ADAPTER
        if (where / MODEL).exists():
            return LoadedModel.open(where, self._registry)
        if not self.checkpoint and adapter.exists() and (base := self.settings.get("recipe.base")):
            record = read_origin(self.directory)
            path = find_model_file(Path(record.resolve(str(base))), registry=self._registry)
            if changes := record.list_changes({"base": cached_fingerprint(path)}):
                raise UserError(f"{short_path(path)}: is another file than it was: {changes[0]}; put that file back")
            return LoadedModel(path, adapter, self._registry)
        with isolated_call("weights"):
            return LoadedModel.open(where, self._registry)

    # -- how it is shown --

    def lines(self) -> list[tuple[str, str]]:
        """What is worth a look, as pairs of a word and what it is."""
        chosen = [*(str(self.settings.get(part, "")) for part in ("recipe", "model", "data")), self._engine_name]
        taken = "" if self.steps is None else f" after {pluralise(self.steps, 'step')}"
        took = "" if self.seconds is None else f" in {self.seconds:.1f} s"
        first = self.history.held_out.get("loss", np.empty(0))
        begun = f"{first[0]:.4f} -> " if len(first) > 1 and math.isfinite(first[0]) else ""
        told = [
            ("run", f"{self.name}  ({', '.join(filter(None, chosen))})"),
            ("state", f"{self.state}{taken}{took}" + (f": {self.why}" if self.why else "")),
            *((f"held-out {k}", f"{begun if k == 'loss' else ''}{v:.4f}") for k, v in self.held_out.items()),
        ]
        if self.loss is not None:
            told.append(("smoothed train loss", f"{self.loss:.4f}"))
        if self.warnings:
            told.append(("warnings", f"{len(self.warnings)}: {self.warnings[0]}"))
        if self.checkpoint:
            told.append(("weights", self.checkpoint.name))
        return [*told, ("directory", short_path(self.directory))]

    def __repr__(self) -> str:
        return "\n".join(align_columns(self.lines()))

    def _repr_html_(self) -> str:
        return run_html(self.lines(), self.history)

    def __fspath__(self) -> str:
        return str(self.directory)


def require_run(directory: Path) -> None:
    """Raises UserError for a directory that is none of a run."""
    names = {path.name for path in directory.iterdir()} if directory.is_dir() else set()
    if "config.yaml" not in names or not names & RUN_FILES:
        what = "holds no run" if directory.exists() else explain_missing(directory)
        raise UserError(f"{os.fspath(directory)}: {what}; toyexp.open takes a run, a checkpoint or a sweep")


# -- in a notebook ----------------------------------------------------------------------------------------------------

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BELOW = 420, 130, 34, 8, 8, 20  # of the picture and its margins, in pixels
POINTS = 300  # of a curve; of more the means of so many stretches are drawn


def run_html(lines: Sequence[tuple[str, str]], history: History) -> str:
    """A run: what is worth a look, and its losses."""
    rows = "".join(
        f'<tr><td style="text-align:left">{escape(word)}</td><td style="text-align:left">{escape(text)}</td></tr>'
        for word, text in lines
    )
    return f"<table>{rows}</table>{loss_svg(history)}"


def table_html(heads: Sequence[str], rows: Sequence[Sequence[str]], below: str) -> str:
    """A table, whose first row is the best one, with a line below it."""
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    body = "".join(f"<tr>{''.join(f'<td>{escape(text)}</td>' for text in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table><p>{escape(below)}</p>"


def loss_svg(history: History) -> str:
    """The training loss as a line and the held-out loss as points over the steps, in SVG; nothing of fewer than two."""
    trained, held_out = average_bins(history.curve("loss"), POINTS), history.held_out_curve("loss")
    steps, values = map(np.concatenate, zip(trained, held_out, strict=True))
    if len(values) < 2:
        return ""
    last, low, high = int(steps.max()), values.min(), values.max()
    across = LEFT + (WIDTH - LEFT - RIGHT) * steps / (last or 1)
    down = TOP + (HEIGHT - TOP - BELOW) * (high - values) / (high - low or 1.0)
    places = [*zip(across.round(1), down.round(1), strict=True)]
    line = " ".join(f"{x},{y}" for x, y in places[: len(trained[0])])
    points = "".join(
        f'<circle cx="{x}" cy="{y}" r="3"><title>step {step}: {value:.4f}</title></circle>'
        for (x, y), step, value in zip(places[len(trained[0]) :], *held_out, strict=True)
    )
    words = f"loss; held-out as points; {last} steps"
    return (
        f'<svg width="{WIDTH}" height="{HEIGHT}" role="img" aria-label="{words}" font-size="10" fill="currentColor">'
        f'<polyline points="{line}" fill="none" stroke="currentColor" stroke-opacity="0.55" stroke-width="1.5"/>'
        f'{points}<text y="14">{high:.2f}</text><text y="{HEIGHT - 18}">{low:.2f}</text>'
        f'<text x="{LEFT}" y="{HEIGHT - 4}">{words}</text></svg>'
    )
