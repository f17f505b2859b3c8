"""The files a trained model is left in: GGUF, safetensors, and the directories of transformers and PEFT."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from toyexp import (
    Callback,
    FromGGUF,
    LoraAdapter,
    Plan,
    Planned,
    Run,
    RunFailed,
    UserError,
    changed,
    choose,
    hookimpl,
)
from toyexp.base.writing import bytes_in
from toyexp.contract.plan import lora_names
from toyexp.contract.run import Best
from toyexp.formats.gguf.encode import check_type
from toyexp.formats.gguf.form import architecture_of, gguf_form
from toyexp.formats.gguf.source import opened
from toyexp.formats.gguf.write import check_keys, export_tensors, inherited, model_metadata, write_adapter, write_model
from toyexp.formats.huggingface import TYPES, notes, write_adapter_folder, write_folder
from toyexp.formats.layout import layout_of
from toyexp.formats.safetensors import write_safetensors

WEIGHTS = ("best", "last")
Tensors = dict[str, np.ndarray]  # by name, float32

log = logging.getLogger("toyexp")


@dataclass(eq=False)
class Export(Callback):
    """What all formats share: when a file is written, and what is in it."""

    suffix: ClassVar[str]  # behind `model`

    every: int = 0  # steps between extra files model-<step>; 0: only at the end
    weights: str = "best"  # at the end: best, of a run with early_stop or checkpoint_best; or last, as of any other

    def __post_init__(self) -> None:
        self._step = 0
        self._best: Best | None = None
        self._inherited: dict[str, Any] = {}
        self._warned = False

    def check(self) -> None:
        """Raises UserError for a negative interval and unknown weights."""
        if self.weights not in WEIGHTS:
            raise UserError(f"callbacks.{self.name}.weights={self.weights}: {choose(self.weights, WEIGHTS)}")
        if self.every < 0:
            raise UserError(f"callbacks.{self.name}.every={self.every}: must be 0 (only at the end) or above")

    def outputs(self, plan: Plan) -> Sequence[str]:
        """The model, and what is written beside it."""
        return [f"model{self.suffix}"]

    def warnings(self, planned: Planned) -> Iterable[str]:
        """That there is a file at the end alone."""
        return planned.beyond(f"callbacks.{self.name}.every", self.every, "there is a file at the end")

    @hookimpl
    def on_start(self, run: Run) -> None:
        """Notes where a resumed run stands, and what a run's base passes on; at the end its file may be gone."""
        self._step = run.resumed
        bases = {t.values.path for t in run.plan.tensors if isinstance(t.values, FromGGUF)}
        if len(bases) == 1:
            self._inherited = inherited(opened(bases.pop()))

    @hookimpl
    def on_step(self, run: Run, step: int) -> None:
        """Exports on the way, where asked for."""
        self._step = step
        if self.every and step % self.every == 0 and step < run.steps:
            try:
                self._export(run, run.dir / f"model-{step}{self.suffix}")
            except RunFailed as error:  # an extra file is not worth the run; without the last one it fails
                if not self._warned:
                    run.emit("warning", text=f"{error}; training goes on")
                self._warned = True

    @hookimpl
    def on_end(self, run: Run, reason: str) -> None:
        """Exports the weights, unless the run failed, for they may be no numbers, or someone cannot wait."""
        if reason != "errored" and self._step and run.stops() < 2:
            self._best = run.best() if self.weights == "best" else None
            self._step = self._best.step if self._best else self._step
            self._export(run, run.dir / f"model{self.suffix}")

    def _values(self, run: Run, names: Iterable[str]) -> Tensors:
        """The tensors' values: those of the best step, if that is asked for, or the present ones."""
        best = (self._best.weights if self._best else None) or {}
        return {n: np.asarray(best[n], np.float32) if n in best else run.session.download(n) for n in names}

    def _export(self, run: Run, path: Path) -> None:
        tensors = export_tensors(run.plan, self._values(run, (t.name for t in run.plan.tensors)))
        with run.output(path) as place:
            kind, problems = self.write(run, place, tensors, self._general(run))
        self._warn(run, path, problems)
        self._tell(run, path, kind)

    def _general(self, run: Run) -> dict[str, Any]:
        digest = run.facts.get("config_sha256")
        return {
            "name": run.name,
            "run_id": run.dir.name,
            "step": self._step,
            **({"config_sha256": digest} if digest else {}),
            **self._inherited,
        }

    def _warn(self, run: Run, path: Path, problems: list[str]) -> None:
        """Says loudly what is wrong with an export, which is kept: it may be all that a long run leaves."""
        for problem in problems:
            run.emit("warning", text=f"{path.name}: {problem}")

    def _tell(self, run: Run, path: Path, kind: str) -> None:
        which = "best" if self._best else "last"
        run.emit("export", path=str(path), step=self._step, weights=which, type=kind, bytes=bytes_in(path))

    @abstractmethod
    def write(self, run: Run, path: Path, tensors: Tensors, general: dict[str, Any]) -> tuple[str, list[str]]:
        """Writes the model's tensors and its keys, `general.*` among them.

        Returns the type of the numbers, and what is odd about them.
        """


@dataclass(eq=False)
class ExportWithAdapter(Export):
    """A format that LoRA adapters have too: of such a run they are written beside the model, or alone."""

    numbers: ClassVar[str]  # the setting that says which type of numbers the model's file has

    merged: bool = True  # of a lora run, write the base with the adapter added beside the adapter alone

    def outputs(self, plan: Plan) -> Sequence[str]:
        """The adapter too, and the model only where it is written."""
        adapted = any(isinstance(adapter, LoraAdapter) for adapter in plan.adapters)
        adapter = [f"adapter{self.suffix}"] if adapted else []
        return [*adapter, *(super().outputs(plan) if self.merged or not adapted else ())]

    def warnings(self, planned: Planned) -> Iterable[str]:
        """That there is no adapter to write alone, or no model beside it."""
        yield from super().warnings(planned)
        adapters = any(isinstance(a, LoraAdapter) for a in planned.plan.adapters)
        if not self.merged and not adapters:
            yield f"callbacks.{self.name}.merged=false: the run has no adapter, so the model is written"
        if not self.merged and adapters and changed(self, self.numbers):
            given = f"callbacks.{self.name}.{self.numbers}={getattr(self, self.numbers)}"
            yield f"{given}: is the type of the merged model, which merged=false leaves out; an adapter is f32"

    def _export(self, run: Run, path: Path) -> None:
        pairs = [n for a in run.plan.adapters if isinstance(a, LoraAdapter) for n in lora_names(a.target)]
        if pairs:
            adapter = path.with_name(path.name.replace("model", "adapter"))
            values = self._values(run, pairs)
            with run.output(adapter) as place:
                problems = self.write_adapter(run, place, values)
            self._warn(run, adapter, problems)
            self._tell(run, adapter, "f32")
        if self.merged or not pairs:
            super()._export(run, path)

    @abstractmethod
    def write_adapter(self, run: Run, path: Path, values: dict[str, np.ndarray]) -> list[str]:
        """Writes the run's adapters, whose tensors are `values`; returns what is odd about their numbers."""


@dataclass(eq=False)
class GGUFExport(ExportWithAdapter):
    """Writes model.gguf for llama.cpp, at the end and every so many steps; of a lora run also adapter.gguf."""

    name: ClassVar[str] = "gguf_export"
    suffix: ClassVar[str] = ".gguf"
    numbers: ClassVar[str] = "type"

    type: str = "f32"  # f32 | f16 | bf16 | q8_0 | q4_0 | q4_1 | q5_0 | q5_1, or with llama.cpp q2_k ... q6_k

    def check(self) -> None:
        """Raises UserError for a type that cannot be written, or not here."""
        super().check()
        check_type(self.type, "callbacks.gguf_export.type")

    def check_plan(self, plan: Plan) -> None:
        """Raises UserError for a model that no GGUF holds."""
        try:
            check_keys(plan.model)
        except UserError as error:
            raise UserError(f"{error}; to train without this file: '~callbacks.gguf_export'") from None

    def write_adapter(self, run: Run, path: Path, values: dict[str, np.ndarray]) -> list[str]:
        """Writes adapter.gguf."""
        return write_adapter(path, run.plan, values, self._general(run), run.dataset.chat_template)

    def write(self, run: Run, path: Path, tensors: Tensors, general: dict[str, Any]) -> tuple[str, list[str]]:
        """Writes the file, with the tokenizer of a language model."""
        data = run.dataset
        keys = data.gguf_metadata()
        return self.type, write_model(path, run.plan.model, tensors, data.tokenizer, self.type, general, keys)


@dataclass(eq=False)
class SafetensorsExport(Export):
    """Writes model.safetensors, at the end and every so many steps."""

    name: ClassVar[str] = "safetensors_export"
    suffix: ClassVar[str] = ".safetensors"

    def write(self, run: Run, path: Path, tensors: Tensors, general: dict[str, Any]) -> tuple[str, list[str]]:
        """Writes the file; the keys of the GGUF are its metadata `gguf`, in JSON."""
        model = run.plan.model
        keys = {"general.architecture": architecture_of(model)}
        keys |= model_metadata(model, general, run.dataset.gguf_metadata())
        write_safetensors(path, {**tensors, **gguf_form(model).constants(model)}, keys)
        return "f32", []


@dataclass(eq=False)
class HuggingFaceExport(ExportWithAdapter):
    """Writes model-hf for transformers, at the end and every so many steps; of a lora run also adapter-hf for PEFT."""

    name: ClassVar[str] = "hf_export"
    suffix: ClassVar[str] = "-hf"
    numbers: ClassVar[str] = "dtype"

    dtype: str = "float32"  # float32 | bfloat16 | float16

    def check(self) -> None:
        """Raises UserError for a dtype that is none of these."""
        super().check()
        if self.dtype not in TYPES:
            raise UserError(f"callbacks.hf_export.dtype={self.dtype}: {choose(self.dtype, TYPES)}")

    def check_plan(self, plan: Plan) -> None:
        """Raises UserError for a model that transformers does not have."""
        layout_of(plan.model, {})

    def write_adapter(self, run: Run, path: Path, values: dict[str, np.ndarray]) -> list[str]:
        """Writes adapter-hf."""
        return write_adapter_folder(path, run.plan, values)

    def write(self, run: Run, path: Path, tensors: Tensors, general: dict[str, Any]) -> tuple[str, list[str]]:
        """Writes the directory, with the tokenizer of a language model."""
        data = run.dataset
        read, keys = tensors.__getitem__, data.gguf_metadata()
        for note in notes(run.plan.model, keys, data.tokenizer):
            log.info("model%s: %s", self.suffix, note)
        return self.dtype, write_folder(path, run.plan.model, read, data.tokenizer, self.dtype, keys)
