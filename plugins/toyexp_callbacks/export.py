"""The GGUF file that llama.cpp loads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from toyexp import Callback, Run, UserError, hookimpl
from toyexp.gguf.write import check_type, export_tensors, write_model


@dataclass(eq=False)
class GGUFExport(Callback):
    """Writes model.gguf for llama.cpp, at the end and every so many steps."""

    name: ClassVar[str] = "gguf_export"

    type: str = "f32"  # f32 | f16 | bf16 | q8_0; norms and biases stay f32
    every: int = 0  # steps between extra files model-<step>.gguf; 0: only at the end

    def __post_init__(self) -> None:
        self._step = 0

    def check(self) -> None:
        """Raises UserError for a type that cannot be written."""
        check_type(self.type, "callbacks.gguf_export.type")
        if self.every < 0:
            raise UserError(f"callbacks.gguf_export.every={self.every}: must be 0 (only at the end) or above")

    @hookimpl
    def on_step(self, run: Run, step: int) -> None:
        """Exports on the way, where asked for."""
        self._step = step
        if self.every and step % self.every == 0 and step < run.steps:
            self._export(run, run.dir / f"model-{step}.gguf")

    @hookimpl
    def on_end(self, run: Run, reason: str) -> None:
        """Exports the final weights, unless the run failed: its weights may be no numbers."""
        if reason != "errored" and self._step:
            self._export(run, run.dir / "model.gguf")

    def _export(self, run: Run, path: Path) -> None:
        plan = run.plan
        values = {t.name: run.session.download(t.name) for t in plan.tensors}
        general = {
            "name": run.name,
            "run_id": run.dir.name,
            "step": self._step,
            "config_sha256": str(run.facts.get("config_sha256", "")),
        }
        write_model(path, plan.model, export_tensors(plan, values), run.dataset.tokenizer, self.type, general)
        run.emit("export", path=str(path), step=self._step, type=self.type, bytes=path.stat().st_size)
