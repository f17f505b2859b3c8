"""The files a trained model is left in: GGUF, safetensors, and the directories of transformers and PEFT."""

from __future__ import annotations

import json
import logging
from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from toyexp import Callback, FromGGUF, LoraAdapter, Plan, Run, RunFailed, UserError, choose, hookimpl
from toyexp.gguf.encode import check_type
from toyexp.gguf.write import export_tensors, inherited, model_metadata, write_adapter, write_model
from toyexp.huggingface import TYPES, notes, write_adapter_folder, write_folder
from toyexp.init import opened
from toyexp.plan import lora_names
from toyexp.run import bytes_in, write_atomically

log = logging.getLogger("toyexp")


@dataclass(eq=False)
class Export(Callback):
    """What all formats share: when a file is written, and what is in it."""

    suffix: ClassVar[str]  # behind `model`

    every: int = 0  # steps between extra files model-<step>; 0: only at the end

    def __post_init__(self) -> None:
        self._step = 0
        self._inherited: dict[str, Any] = {}
        self._warned = False

    def check(self) -> None:
        """Raises UserError for a negative interval."""
        if self.every < 0:
            raise UserError(f"callbacks.{self.name}.every={self.every}: must be 0 (only at the end) or above")

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
        """Exports the final weights, unless the run failed, for they may be no numbers, or someone cannot wait."""
        if reason != "errored" and self._step and run.stops() < 2:
            self._export(run, run.dir / f"model{self.suffix}")

    def _export(self, run: Run, path: Path) -> None:
        tensors = export_tensors(run.plan, {t.name: run.session.download(t.name) for t in run.plan.tensors})
        self._tell(run, path, self.write(run, path, tensors, self._general(run)))

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
        run.emit("export", path=str(path), step=self._step, type=kind, bytes=bytes_in(path))

    @abstractmethod
    def write(self, run: Run, path: Path, tensors: dict[str, np.ndarray], general: dict[str, Any]) -> str:
        """Writes the model's tensors and its keys, `general.*` among them; returns the type of the numbers."""


@dataclass(eq=False)
class ExportWithAdapter(Export):
    """A format that LoRA adapters have too: of such a run they are written beside the model, or alone."""

    merged: bool = True  # of a lora run, write the base with the adapter added beside the adapter alone

    def _export(self, run: Run, path: Path) -> None:
        pairs = [n for a in run.plan.adapters if isinstance(a, LoraAdapter) for n in lora_names(a.target)]
        if pairs:
            adapter = path.with_name(path.name.replace("model", "adapter"))
            values = {n: run.session.download(n) for n in pairs}
            self._warn(run, adapter, self.write_adapter(run, adapter, values))
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

    type: str = "f32"  # f32 | f16 | bf16 | q8_0 | q4_0 | q4_1 | q5_0 | q5_1, or with llama.cpp q2_k ... q6_k

    def check(self) -> None:
        """Raises UserError for a type that cannot be written, or not here."""
        super().check()
        check_type(self.type, "callbacks.gguf_export.type")

    def write_adapter(self, run: Run, path: Path, values: dict[str, np.ndarray]) -> list[str]:
        """Writes adapter.gguf."""
        return write_adapter(path, run.plan, values, self._general(run))

    def write(self, run: Run, path: Path, tensors: dict[str, np.ndarray], general: dict[str, Any]) -> str:
        """Writes the file, with the tokenizer of a language model."""
        data = run.dataset
        keys = data.gguf_metadata()
        problems = write_model(path, run.plan.model, tensors, data.tokenizer, self.type, general, keys)
        self._warn(run, path, problems)
        return self.type


@dataclass(eq=False)
class SafetensorsExport(Export):
    """Writes model.safetensors, at the end and every so many steps."""

    name: ClassVar[str] = "safetensors_export"
    suffix: ClassVar[str] = ".safetensors"

    def write(self, run: Run, path: Path, tensors: dict[str, np.ndarray], general: dict[str, Any]) -> str:
        """Writes the file; the keys of the GGUF are its metadata `gguf`, in JSON."""
        from safetensors.numpy import save

        model = run.plan.model
        keys = {"general.architecture": model.architecture}
        keys |= model_metadata(model, general, run.dataset.gguf_metadata())
        try:
            write_atomically(path, save({**tensors, **model.constants()}, {"gguf": json.dumps(keys)}))
        except OSError as error:
            raise RunFailed(f"{path}: could not be written: {error.strerror or 'the disk may be full'}") from error
        return "f32"


@dataclass(eq=False)
class HuggingFaceExport(ExportWithAdapter):
    """Writes model-hf for transformers, at the end and every so many steps; of a lora run also adapter-hf for PEFT."""

    name: ClassVar[str] = "hf_export"
    suffix: ClassVar[str] = "-hf"

    dtype: str = "float32"  # float32 | bfloat16 | float16

    def check(self) -> None:
        """Raises UserError for a dtype that is none of these."""
        super().check()
        if self.dtype not in TYPES:
            raise UserError(f"callbacks.hf_export.dtype={self.dtype}: {choose(self.dtype, TYPES)}")

    def check_plan(self, plan: Plan) -> None:
        """Raises UserError for a model that transformers does not have."""
        plan.model.huggingface({})

    def write_adapter(self, run: Run, path: Path, values: dict[str, np.ndarray]) -> list[str]:
        """Writes adapter-hf."""
        return write_adapter_folder(path, run.plan, values)

    def write(self, run: Run, path: Path, tensors: dict[str, np.ndarray], general: dict[str, Any]) -> str:
        """Writes the directory, with the tokenizer of a language model."""
        data = run.dataset
        read, keys = tensors.__getitem__, data.gguf_metadata()
        self._warn(run, path, write_folder(path, run.plan.model, read, data.tokenizer, self.dtype, keys))
        for note in notes(run.plan.model, keys, data.tokenizer):
            log.info("%s: %s", path.name, note)
        return self.dtype
