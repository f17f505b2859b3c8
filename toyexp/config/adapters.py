"""A LoRA adapter by whatever names it: a GGUF file, the directory of a run, its checkpoint, or one of PEFT's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from toyexp.base.errors import UserError
from toyexp.config.restored import ADAPTER, NAME_ADAPTER, adapter_in, file_of, is_checkpoint, made_once, newest_in
from toyexp.contract.model import Model
from toyexp.contract.plan import lora_names
from toyexp.contract.plugins import load
from toyexp.contract.registry import Registry
from toyexp.formats.gguf.form import architecture_of
from toyexp.formats.gguf.write import write_pairs
from toyexp.formats.peft import CONFIG, TENSORS, read_peft
from toyexp.training.checkpoint import MANIFEST, Damaged, read


def adapter_files(path: Path) -> list[Path]:
    """The files that hold the LoRA adapter meant by `path`; UserError when there is nothing."""
    if (path / CONFIG).is_file():
        return [path / name for name in (CONFIG, TENSORS) if (path / name).exists()]
    if is_checkpoint(path):
        return [path / MANIFEST]
    if path.is_dir() and not (path / ADAPTER).exists():
        newest = newest_in(path)
        if newest is not None and _trained_whole(newest):
            raise UserError(f"{path}: is of a run that trained no adapter; {NAME_ADAPTER}")
        named = f"name a checkpoint, such as {newest}" if newest else NAME_ADAPTER
        raise UserError(f"{path}: is a directory without {ADAPTER} or {CONFIG}; {named}")
    return [file_of(path, leaves=(ADAPTER,))]


def _trained_whole(checkpoint: Path) -> bool:
    """Whether a checkpoint can be read and holds no adapter: to name it would lead to the next error."""
    try:
        return not any(name.endswith((*lora_names(""),)) for name in read(checkpoint, with_state=False).arrays)
    except Damaged:
        return False


def adapter_of(path: Path, model: Callable[[], Model], registry: Registry | None = None) -> Path:
    """The GGUF file of the LoRA adapter meant by `path`: itself, what a run left, or made of PEFT's for the `model`.

    Of a run's checkpoint it is the adapter as it was then. What is made is there as long as this process is. UserError
    when there is nothing.
    """
    files = adapter_files(path)
    version: tuple[object, ...] = tuple((file.resolve(), file.stat().st_mtime_ns) for file in files)
    if is_checkpoint(path):
        write = partial(adapter_in, path, registry=registry or load())
        return made_once((*version, ADAPTER), path, path.name, write)
    if files[0].name != CONFIG:
        return files[0]
    base = model()
    version = *version, repr(base)
    return made_once(version, path, path.name or "adapter", lambda target: _write(path, base, target))


def _write(path: Path, model: Model, target: Path) -> None:
    alpha, pairs = read_peft(path, model)
    write_pairs(target, architecture_of(model), alpha, pairs)
