"""The files a trained model is left in: GGUF and safetensors."""

from __future__ import annotations

import importlib.util
import json
import logging
from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from toyexp import Callback, LoraAdapter, Run, RunFailed, Unavailable, UserError, hookimpl
from toyexp.gguf.write import check_type, export_tensors, model_metadata, write_adapter, write_model
from toyexp.plan import lora_names
from toyexp.run import write_atomically

log = logging.getLogger("toyexp")


@dataclass(eq=False)
class Export(Callback):
    """What both formats share: when a file is written, and what is in it."""

    suffix: ClassVar[str]

    every: int = 0  # steps between extra files model-<step>; 0: only at the end

    def __post_init__(self) -> None:
        self._step = 0
        self._warned = False

    def check(self) -> None:
        """Raises UserError for a negative interval."""
        if self.every < 0:
            raise UserError(f"callbacks.{self.name}.every={self.every}: must be 0 (only at the end) or above")

    @hookimpl
    def on_start(self, run: Run) -> None:
        """Notes where a resumed run stands."""
        self._step = run.resumed

    @hookimpl
    def on_step(self, run: Run, step: int) -> None:
        """Exports on the way, where asked for."""
        self._step = step
        if self.every and step % self.every == 0 and step < run.steps:
            try:
                self._export(run, run.dir / f"model-{step}.{self.suffix}")
            except RunFailed as error:  # an extra file is not worth the run; without the last one it fails
                self._warn(run, f"{error}; training goes on")

    @hookimpl
    def on_end(self, run: Run, reason: str) -> None:
        """Exports the final weights, unless the run failed: its weights may be no numbers."""
        if reason != "errored" and self._step:
            self._export(run, run.dir / f"model.{self.suffix}")

    def _export(self, run: Run, path: Path) -> None:
        tensors = export_tensors(run.plan, {t.name: run.session.download(t.name) for t in run.plan.tensors})
        self._tell(run, path, self.write(run, path, tensors, self._general(run)))

    def _warn(self, run: Run, text: str) -> None:
        log.warning("%s", text)
        if not self._warned:
            self._warned = True
            run.emit("note", text=f"toyexp: warning: {text}")

    def _general(self, run: Run) -> dict[str, Any]:
        return {
            "name": run.name,
            "run_id": run.dir.name,
            "step": self._step,
            "config_sha256": str(run.facts.get("config_sha256", "")),
        }

    def _tell(self, run: Run, path: Path, kind: str) -> None:
        run.emit("export", path=str(path), step=self._step, type=kind, bytes=path.stat().st_size)

    @abstractmethod
    def write(self, run: Run, path: Path, tensors: dict[str, np.ndarray], general: dict[str, Any]) -> str:
        """Writes the model's tensors and its keys, `general.*` among them; returns the type of the numbers."""


@dataclass(eq=False)
class GGUFExport(Export):
    """Writes model.gguf for llama.cpp, at the end and every so many steps; of a lora run also adapter.gguf."""

    name: ClassVar[str] = "gguf_export"
    suffix: ClassVar[str] = "gguf"

    type: str = "f32"  # f32 | f16 | bf16 | q8_0; norms and biases stay f32
    merged: bool = True  # of a lora run, write the base with the adapter added beside the adapter alone

    def check(self) -> None:
        """Raises UserError for a type that cannot be written."""
        super().check()
        check_type(self.type, "callbacks.gguf_export.type")

    def _export(self, run: Run, path: Path) -> None:
        pairs = [n for a in run.plan.adapters if isinstance(a, LoraAdapter) for n in lora_names(a.target)]
        if pairs:
            adapter = path.with_name(path.name.replace("model", "adapter"))
            write_adapter(adapter, run.plan, {n: run.session.download(n) for n in pairs}, self._general(run))
            self._tell(run, adapter, "f32")
        if self.merged or not pairs:
            super()._export(run, path)

    def write(self, run: Run, path: Path, tensors: dict[str, np.ndarray], general: dict[str, Any]) -> str:
        """Writes the file, with the tokenizer of a language model."""
        data = run.dataset
        write_model(path, run.plan.model, tensors, data.tokenizer, self.type, general, data.gguf_metadata())
        return self.type


@dataclass(eq=False)
class SafetensorsExport(Export):
    """Writes model.safetensors, at the end and every so many steps."""

    name: ClassVar[str] = "safetensors_export"
    suffix: ClassVar[str] = "safetensors"

    def check(self) -> None:
        """Raises Unavailable without safetensors."""
        super().check()
        if importlib.util.find_spec("safetensors") is None:
            raise Unavailable("callbacks.safetensors_export needs safetensors: pip install 'toyexp[safetensors]'")

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
