"""The callback of a format: it writes a run's model as a file, at the end and on the way, and its LoRA adapters."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, make_dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from toyexp.base.attribution import call_for_lines
from toyexp.base.errors import RunFailed, UserError
from toyexp.base.validators import require_choice, require_range
from toyexp.base.writing import total_bytes
from toyexp.interfaces.callback import Callback
from toyexp.interfaces.format import Format, ModelExport, require_written
from toyexp.interfaces.hooks import hookimpl
from toyexp.interfaces.plan import LoraAdapter, Plan, adapter_digest, export_tensors, inherited_metadata, lora_names
from toyexp.interfaces.run import Best, Run
from toyexp.interfaces.run_preview import RunPreview, is_changed
from toyexp.plugins.rules import types_of

if TYPE_CHECKING:
    import numpy as np

WEIGHTS = ("best", "last")
Tensors = dict[str, "np.ndarray"]  # by name, float32

log = logging.getLogger("toyexp")


@dataclass(eq=False)
class Exporter(Callback):
    """Base of the callbacks that registering a format makes; `exporter` adds the settings of the format."""

    form: ClassVar[type[Format]]

    every: int = 0  # steps between extra files model-<step>; 0: only at the end
    weights: str = "best"  # at the end: best, of a run with early_stop or checkpoint_best; or last, as of any other

    def __post_init__(self) -> None:
        self._format = self.form(**{f.name: getattr(self, f.name) for f in fields(self.form)})
        self._step = 0
        self._best: Best | None = None
        self._inherited: dict[str, Any] = {}
        self._pairs: Tensors = {}  # of the adapter that the model has merged in
        self._scores: dict[int, Mapping[str, float]] = {}  # by step
        self._warned = False

    def check(self) -> None:
        """Raises UserError for a negative interval, unknown weights, and what the format refuses."""
        require_choice(f"callbacks.{self.name}", self, weights=WEIGHTS)
        require_range(f"callbacks.{self.name}", self, every="[0,inf)")
        try:
            self._format.check()
        except UserError as error:
            raise type(error)(f"callbacks.{self.name}.{error}") from None

    def check_plan(self, plan: Plan) -> None:
        """Raises UserError for a model that the format cannot hold."""
        try:
            self._format.check_model(plan.model)
        except UserError as error:
            raise UserError(f"{error}; to train without this file: '~callbacks.{self.name}'") from None

    def should_wait(self, step: int) -> bool:
        """Where it writes a file."""
        return bool(self.every) and step % self.every == 0

    def outputs(self, plan: Plan) -> Sequence[str]:
        """The model, and what is written beside it."""
        return [f"model{self.form.suffix}"]

    def warnings(self, preview: RunPreview) -> Iterable[str]:
        """That there is a file at the end alone."""
        return preview.interval_warnings(f"callbacks.{self.name}.every", self.every, "there is a file at the end")

    @hookimpl
    def on_start(self, run: Run) -> None:
        """Notes where a resumed run stands, and what a run's base passes on; at the end its file may be gone."""
        self._step = run.resumed_step
        self._inherited = dict(inherited_metadata(run.plan))

    @hookimpl
    def on_step(self, run: Run, step: int) -> None:
        """Exports on the way, where asked for."""
        self._step = step
        if self.every and step % self.every == 0 and step < run.steps:
            try:
                self._export(run, run.dir / f"model-{step}{self.form.suffix}")
            except RunFailed as error:  # an extra file is not worth the run; without the last one it fails
                if not self._warned:
                    run.emit("warning", text=f"{error}; training goes on")
                self._warned = True

    @hookimpl
    def on_eval(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keep the scores, for a model card."""
        self._scores[step] = dict(metrics)

    @hookimpl
    def on_end(self, run: Run, reason: str) -> None:
        """Exports the weights, unless the run failed, for they may be no numbers, or someone cannot wait."""
        if reason != "errored" and self._step and run.stop_signals() < 2:
            self._best = run.best() if self.weights == "best" else None
            self._step = self._best.step if self._best else self._step
            self._export(run, run.dir / f"model{self.form.suffix}")

    def _values(self, run: Run, names: Iterable[str]) -> Tensors:
        """The tensors' values: those of the best step, if that is asked for, or the present ones."""
        best = (self._best.weights if self._best else None) or {}
        return {n: best[n].astype("float32", copy=False) if n in best else run.session.download(n) for n in names}

    def _export(self, run: Run, path: Path) -> None:
        exported = self.exported(run, export_tensors(run.plan, self._values(run, (t.name for t in run.plan.tensors))))
        for note in call_for_lines(self._format.notes, exported):
            log.info("model%s: %s", self.form.suffix, note)
        self._write(run, path, self._format.kind, partial(self._format.write, exported))

    def exported(self, run: Run, tensors: Tensors) -> ModelExport:
        """The run's model with these tensors, and where it comes from."""
        digest, data = run.facts.get("config_sha256"), run.dataset
        general = {
            "name": run.name,
            "run_id": run.dir.name,
            "step": self._step,
            **({"config_sha256": digest} if digest else {}),
            **self._inherited,
        }
        if self._pairs:
            general["adapter_digest"] = adapter_digest(self._pairs, self._inherited.get("adapter_digest", ""))
        parts = (run.plan.model, tensors, data.tokenizer, general, data.gguf_metadata(), data.chat_template)
        best = {self._best.metric: self._best.score} if self._best else {}
        return ModelExport(*parts, card_facts(run.config, run.engine, self._scores.get(self._step, best)))

    def _write(self, run: Run, path: Path, kind: str, write: Callable[[Path], list[str]]) -> None:
        """Writes a file, and says loudly what is wrong with it: it is kept, as all that a long run may leave."""
        with run.output(path) as place:
            problems = require_written(self._format, place, write(place))
        for problem in problems:
            run.emit("warning", text=f"{path.name}: {problem}")
        which = "best" if self._best else "last"
        run.emit("export", path=str(path), step=self._step, weights=which, type=kind, bytes=total_bytes(path))


@dataclass(eq=False)
class AdapterExporter(Exporter):
    """That of a format which LoRA adapters have too: of such a run they are written beside the model, or alone."""

    merged: bool = True  # of a lora run, write the base with the adapter added beside the adapter alone

    def outputs(self, plan: Plan) -> Sequence[str]:
        """The adapter too, and the model only where it is written."""
        adapted = bool(_adapter_tensors(plan))
        adapter = [f"adapter{self.form.suffix}"] if adapted else []
        return [*adapter, *(super().outputs(plan) if self.merged or not adapted else ())]

    def warnings(self, preview: RunPreview) -> Iterable[str]:
        """That there is no adapter to write alone, or no model beside it."""
        yield from super().warnings(preview)
        adapters = bool(_adapter_tensors(preview.plan))
        if not self.merged and not adapters:
            yield f"callbacks.{self.name}.merged=false: the run has no adapter, so the model is written"
        if not self.merged and adapters and self.form.dtype_setting and is_changed(self, self.form.dtype_setting):
            given = f"callbacks.{self.name}.{self.form.dtype_setting}={self._format.kind}"
            yield f"{given}: is the type of the merged model, which merged=false leaves out; an adapter is f32"

    def _export(self, run: Run, path: Path) -> None:
        names = _adapter_tensors(run.plan)
        if names:
            adapter = path.with_name(path.name.replace("model", "adapter"))
            self._pairs = self._values(run, names)
            exported = self.exported(run, self._pairs)
            self._write(run, adapter, "f32", partial(self._format.write_adapter, run.plan, exported))
        if self.merged or not names:
            super()._export(run, path)


def card_facts(config: Mapping[str, Any], engine: str, scores: Mapping[str, float | None]) -> dict[str, Any]:
    """Return what a model card says of a run with this configuration and these held-out scores, by words."""
    recipe, data = (config.get(part) or {} for part in ("recipe", "data"))
    told = {
        "recipe": recipe.get("name"), "base": recipe.get("base"), "data": data.get("name"),
        "data file": Path(data.get("path") or "").name or None, "batch size": config.get("batch_size"),
        "learning rate": config.get("lr"), "seed": config.get("seed"), "engine": engine,
    }  # fmt: skip
    return told | {f"held-out {name}": f"{value:.6g}" for name, value in scores.items() if value is not None}


def _adapter_tensors(plan: Plan) -> list[str]:
    """The names of the tensors of its LoRA adapters."""
    return [n for a in plan.adapters if isinstance(a, LoraAdapter) for n in lora_names(a.target)]


@functools.cache  # one class, however often plugins are loaded: what is known of it stays known
def exporter(form: type[Format]) -> type[Exporter]:
    """The callback `<name>_export` of a format, with its settings behind those that all of them have.

    Raises UserError for a setting of a name that these have.
    """
    base = AdapterExporter if form.writes_adapters else Exporter
    if taken := {f.name for f in fields(base)} & {f.name for f in fields(form)}:
        what = f"{form.__qualname__}.{min(taken)}"
        raise UserError(f"{what} cannot be a setting: the callback that writes it in a run has its own")
    hints = types_of(form)
    settings = [
        (f.name, hints[f.name], field(default=f.default, default_factory=f.default_factory)) for f in fields(form)
    ]
    adapter = f"; of a lora run also adapter{form.suffix}" if form.writes_adapters else ""
    about = f"Writes model{form.suffix} at the end and every so many steps{adapter}. {(form.__doc__ or '').strip()}"
    own = {"name": f"{form.name}_export", "form": form, "__doc__": about}
    return make_dataclass(f"{form.__name__}Export", settings, bases=(base,), namespace=own, eq=False)
