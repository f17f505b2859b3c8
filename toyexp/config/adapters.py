"""A LoRA adapter by whatever names it: a GGUF file, the directory of a run, or one of PEFT's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from toyexp.base.errors import UserError
from toyexp.config.restored import ADAPTER, file_of, is_checkpoint, made_once
from toyexp.contract.model import Model
from toyexp.formats.gguf.form import architecture_of
from toyexp.formats.gguf.write import write_pairs
from toyexp.formats.peft import CONFIG, TENSORS, read_peft


def adapter_files(path: Path) -> list[Path]:
    """The files that hold the LoRA adapter meant by `path`; UserError when there is nothing."""
    if (path / CONFIG).is_file():
        return [path / name for name in (CONFIG, TENSORS) if (path / name).exists()]
    if is_checkpoint(path):
        run = path.absolute().parents[1]
        raise UserError(f"{path}: is a checkpoint, whose model has its adapter in it; name the run, {run}")
    if path.is_dir() and not (path / ADAPTER).exists():
        raise UserError(f"{path}: is a directory without {ADAPTER} or {CONFIG}; name a run of recipe=lora, or a file")
    return [file_of(path, leaves=(ADAPTER,))]


def adapter_of(path: Path, model: Callable[[], Model]) -> Path:
    """The GGUF file of the LoRA adapter meant by `path`: itself, what a run left, or made of PEFT's for the `model`.

    What is made is there as long as this process is. UserError when there is nothing.
    """
    files = adapter_files(path)
    if files[0].name != CONFIG:
        return files[0]
    base = model()
    version = tuple((file.resolve(), file.stat().st_mtime_ns) for file in files), repr(base)
    return made_once(version, path, path.name or "adapter", lambda target: _write(path, base, target))


def _write(path: Path, model: Model, target: Path) -> None:
    alpha, pairs = read_peft(path, model)
    write_pairs(target, architecture_of(model), alpha, pairs)
