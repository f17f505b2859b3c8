"""Callbacks that export a run's model and LoRA adapters as files; each format gets one callback."""

from __future__ import annotations

import functools
import logging
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, make_dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from toyexp.base.attribution import call_for_lines
from toyexp.base.errors import RunFailed, UserError
from toyexp.base.formatting import format_duration
from toyexp.base.lazy import numpy as np
from toyexp.base.validators import require_choice, require_range
from toyexp.base.writing import total_bytes
from toyexp.interfaces.callback import Callback
from toyexp.interfaces.format import Format, ModelExport, require_written
from toyexp.interfaces.hooks import hookimpl
from toyexp.interfaces.model import Model
from toyexp.interfaces.plan import Plan, adapter_digest, adapter_tensors, export_tensors, inherited_metadata
from toyexp.interfaces.run import Best, Run
from toyexp.interfaces.run_preview import RunPreview, is_changed
from toyexp.plugins.rules import type_hints

WEIGHTS = ("best", "last")
Tensors = dict[str, "np.ndarray"]  # by name, float32

log = logging.getLogger("toyexp")


@dataclass(eq=False)
class Exporter(Callback):
    """Base class of the export callbacks that the function `exporter` creates, one for each format.

    A created class has further fields: the settings of its format.
    """

    form: ClassVar[type[Format]]

    every: int = 0  # also write model-<step> every this many steps; 0: only at the end
    weights: str = "best"  # step of the final file: best (the last one without early_stop or checkpoint_best) | last

    def __post_init__(self) -> None:
        self._format = self.form(**{f.name: getattr(self, f.name) for f in fields(self.form)})
        self._step = 0
        self._best: Best | None = None
        self._inherited: dict[str, Any] = {}
        self._pairs: Tensors = {}  # adapter tensors that are merged into the model
        self._scores: dict[int, Mapping[str, float]] = {}  # held-out metrics by step
        self._warned = False

    def check(self) -> None:
        """Raise UserError for invalid settings, including those of the format."""
        require_choice(f"callbacks.{self.name}", self, weights=WEIGHTS)
        require_range(f"callbacks.{self.name}", self, every="[0,inf)")
        try:
            self._format.check()
        except UserError as error:
            separator = "." if re.match(r"\w+=", str(error)) else ": "  # no setting: such as a missing package
            raise type(error)(f"callbacks.{self.name}{separator}{error}") from None

    def check_plan(self, plan: Plan) -> None:
        """Raise UserError for a model that the format cannot hold."""
        try:
            self._format.check_model(plan.model.fold({})[0])
        except UserError as error:
            raise UserError(f"{error}; to train without this file, add '~callbacks.{self.name}'") from None

    def should_wait(self, step: int) -> bool:
        """Return True if the callback writes a file after `step`."""
        return bool(self.every) and step % self.every == 0

    def outputs(self, plan: Plan) -> Sequence[str]:
        """Return the name of the model file."""
        return [f"model{self.form.suffix}"]

    def warnings(self, preview: RunPreview) -> Iterable[str]:
        """Warn if `every` exceeds the run's number of steps."""
        return preview.interval_warnings(f"callbacks.{self.name}.every", self.every, "only the final file is written")

    @hookimpl
    def on_start(self, run: Run) -> None:
        """Store the number of the step after which the run starts, and the metadata of the base file.

        The metadata is read now, because the base file may be deleted before the run ends.
        """
        self._step = run.resumed_step
        self._inherited = dict(inherited_metadata(run.plan))

    @hookimpl
    def on_step(self, run: Run, step: int) -> None:
        """Write an additional file model-<step> if `every` divides `step` and more steps follow."""
        self._step = step
        if self.every and step % self.every == 0 and step < run.steps:
            try:
                self._export(run, run.dir / f"model-{step}{self.form.suffix}")
            except RunFailed as error:  # only a failure of the final file fails the run
                if not self._warned:
                    run.emit("warning", text=f"{error}; training goes on")
                self._warned = True

    @hookimpl
    def on_eval(self, step: int, metrics: Mapping[str, float]) -> None:
        """Store the held-out metrics for the model card."""
        self._scores[step] = dict(metrics)

    @hookimpl
    def on_end(self, run: Run, reason: str) -> None:
        """Export the weights, unless the run failed (weights may be NaN) or was interrupted twice."""
        if reason != "errored" and self._step and run.stop_signals() < 2:
            self._best = run.best() if self.weights == "best" else None
            self._step = self._best.step if self._best else self._step
            self._export(run, run.dir / f"model{self.form.suffix}")

    def _values(self, run: Run, names: Iterable[str]) -> Tensors:
        """Return the float32 values of tensors, keyed by name.

        If `_best` is set, the values are those of the best evaluation. Otherwise they are the session's current values.
        """
        best = (self._best.weights if self._best else None) or {}
        return {n: best[n].astype("float32", copy=False) if n in best else run.session.download(n) for n in names}

    def _export(self, run: Run, path: Path) -> None:
        tensors = export_tensors(run.plan, self._values(run, (t.name for t in run.plan.tensors)))
        export = self.build_export(run, *run.plan.model.fold(tensors))
        for note in call_for_lines(self._format.notes, export):
            log.info("model%s: %s", self.form.suffix, note)
        self._write(run, path, self._format.kind, partial(self._format.write, export))

    def build_export(self, run: Run, model: Model, tensors: Mapping[str, np.ndarray]) -> ModelExport:
        """Return the run's model with these tensors, and metadata about its origin."""
        digest, data = run.facts.get("config_sha256"), run.dataset
        general = {
            "name": run.name,
            "run_id": run.dir.name,
            "step": self._step,
            **({"config_sha256": digest} if digest else {}),
            **self._inherited,
        }
        if self._pairs:
            pairs = run.plan.adapter_file(self._pairs)[1]
            general["adapter_digest"] = adapter_digest(pairs, self._inherited.get("adapter_digest", ""))
        parts = (model, tensors, data.tokenizer, general, data.gguf_metadata(), data.chat_template)
        best = {self._best.metric: self._best.score} if self._best else {}
        scores = self._scores.get(self._step, best)
        return ModelExport(*parts, card_facts(run.config, run.engine, scores, run.facts))

    def _write(self, run: Run, path: Path, kind: str, write: Callable[[Path], list[str]]) -> None:
        """Call `write` with a temporary path, rename the written file to `path`, and emit an event of kind "export".

        `kind` is the type of file that the event records. A problem with the values, such as a NaN, becomes a warning:
        the file is kept, because the run may have taken long.
        """
        with run.output(path) as temporary:
            problems = require_written(self._format, temporary, write(temporary))
        for problem in problems:
            run.emit("warning", text=f"{path.name}: {problem}")
        label = "best" if self._best else "last"
        run.emit("export", path=str(path), step=self._step, weights=label, type=kind, bytes=total_bytes(path))


@dataclass(eq=False)
class AdapterExporter(Exporter):
    """Exporter of a format that supports LoRA adapters.

    For a run with adapters it writes an adapter file and, if `merged` is true, also the merged model.
    """

    merged: bool = True  # with recipe=lora: also write the model with the adapter added to its weights

    def outputs(self, plan: Plan) -> Sequence[str]:
        """Return the names of the files that the callback writes.

        It writes an adapter file if the run has adapters. It writes a model file if the run has none, or if `merged` is
        true.
        """
        has_adapter = bool(adapter_tensors(plan, self.form.writes_dora))
        adapter = [f"adapter{self.form.suffix}"] if has_adapter else []
        return [*adapter, *(super().outputs(plan) if self.merged or not has_adapter else ())]

    def warnings(self, preview: RunPreview) -> Iterable[str]:
        """Warn if the setting `merged`, or the setting that selects the file's dtype, has no effect."""
        yield from super().warnings(preview)
        has_adapter = bool(adapter_tensors(preview.plan, self.form.writes_dora))
        if not self.merged and not has_adapter:
            yield f"callbacks.{self.name}.merged=false: has no effect: the run has no adapter for this format"
        if not self.merged and has_adapter and self.form.dtype_setting and is_changed(self, self.form.dtype_setting):
            setting = f"callbacks.{self.name}.{self.form.dtype_setting}={self._format.kind}"
            yield f"{setting}: has no effect with merged=false: the adapter is always f32"

    def _export(self, run: Run, path: Path) -> None:
        names = adapter_tensors(run.plan, self.form.writes_dora)
        if names:
            adapter = path.with_name(path.name.replace("model", "adapter"))
            self._pairs = self._values(run, names)
            export = self.build_export(run, run.plan.model, self._pairs)
            self._write(run, adapter, "f32", partial(self._format.write_adapter, run.plan, export))
        if self.merged or not names:
            super()._export(run, path)


DATASET = re.compile(r"datasets--([\w.-]+?)--([\w.-]+)/")  # a dataset in the cache of Hugging Face's hub
DIRECTORIES = re.compile(r"(?<![^=,\[ ])[~/][^,\]}]*/")  # the directories of an absolute path in a setting


def card_facts(
    config: Mapping[str, Any], engine: str, scores: Mapping[str, float | None], run_facts: Mapping[str, Any],
    seconds: float | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Return the entries of a model card, keyed by their labels.

    The entries describe a run with this configuration and engine. `scores` holds the held-out metrics of the run,
    `run_facts` the fields of its event run_start, and `seconds` its duration. Of paths only the last part is kept.
    """
    recipe, data = (config.get(part) or {} for part in ("recipe", "data"))
    model, read, backend = (run_facts.get(key) or {} for key in ("model", "data", "backend"))
    typed = [DIRECTORIES.sub("", word) for word in run_facts.get("typed") or ()]
    dataset = DATASET.search(str(data.get("path")))
    sizes = [f"{v:,} {k[6:]}" for k, v in read.items() if k.startswith("train_") and isinstance(v, int)]
    facts = {
        "recipe": recipe.get("name"), "base": recipe.get("base"), "adapter": model.get("adapters"),
        "data": data.get("name"), "dataset": f"{dataset[1]}/{dataset[2]}" if dataset else None,
        "data file": Path(data.get("path") or "").name or None, "training data": ", ".join(sizes) or None,
        "batch size": config.get("batch_size"), "learning rate": config.get("lr"), "seed": config.get("seed"),
        "engine": engine, "device": backend.get("device"),
        "duration": None if seconds is None else format_duration(seconds),
        "command": shlex.join(["toyexp", *typed]) if typed else None,
    }  # fmt: skip
    return facts | {f"held-out {name}": f"{value:.6g}" for name, value in scores.items() if value is not None}


@functools.cache  # one class per format, however often plugins are loaded
def exporter(form: type[Format]) -> type[Exporter]:
    """Return the callback class `<name>_export` for a format.

    Raise UserError if a setting of the format has the same name as a setting of the callback.
    """
    base = AdapterExporter if form.writes_adapters else Exporter
    if conflicts := {f.name for f in fields(base)} & {f.name for f in fields(form)}:
        name = f"{form.__qualname__}.{min(conflicts)}"
        raise UserError(f"{name} cannot be a setting: the format's callback has a setting of that name")
    hints = type_hints(form)
    settings = [
        (f.name, hints[f.name], field(default=f.default, default_factory=f.default_factory)) for f in fields(form)
    ]
    adapter = f"; with recipe=lora also adapter{form.suffix}" if form.writes_adapters else ""
    doc = (
        f"Write model{form.suffix} at the end, and during the run with every=N{adapter}. {(form.__doc__ or '').strip()}"
    )
    namespace = {"name": f"{form.name}_export", "form": form, "__doc__": doc}
    return make_dataclass(f"{form.__name__}Export", settings, bases=(base,), namespace=namespace, eq=False)
