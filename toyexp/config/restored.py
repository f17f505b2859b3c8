"""A checkpoint as a model: what training changed, put together with what it started from, as a GGUF file.

The same of a file in another format that is read here.
"""

from __future__ import annotations

import atexit
import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from toyexp.base.blame import asked, blamed
from toyexp.base.errors import UserError, printable
from toyexp.base.files import ADDRESS, is_address, require
from toyexp.contract.data import open_data
from toyexp.contract.format import Exported, Format
from toyexp.contract.model import Model
from toyexp.contract.plan import LoraAdapter, Plan, export_tensors, inherited
from toyexp.contract.plugins import load
from toyexp.contract.recipe import Setup, start
from toyexp.contract.registry import Registry
from toyexp.formats.file_plan import see_as
from toyexp.formats.gguf.header import HF_TO_GGUF, MADE_OF, PROGRAM
from toyexp.formats.gguf.open_model import model_of
from toyexp.formats.gguf.write import write_adapter, write_model
from toyexp.training import checkpoint

MODEL, ADAPTER = "model.gguf", "adapter.gguf"  # what a run leaves
NAME_ADAPTER = f"name a run of recipe=lora, or an {ADAPTER}"  # what to type in place of what has none

_written: dict[Hashable, Path] = {}  # by what it was made of, and when that was written; for this process


def is_checkpoint(path: Path) -> bool:
    """Whether `path` is the directory of a checkpoint."""
    return re.fullmatch(r"step-\d+", path.name) is not None and (path / checkpoint.MANIFEST).is_file()


def newest_in(path: Path) -> Path | None:
    """The newest checkpoint of a run's directory, or of the folder of its checkpoints, whole or not."""
    for folder in (path / "checkpoints", path):
        if found := checkpoint.steps(folder):
            return next(iter(found.values()))
    return None


def gguf_of(path: Path, registry: Registry | None = None) -> Path:
    """The checkpoint's model in a GGUF file in float32, which is there as long as this process is.

    UserError for a checkpoint that is damaged, and for a run whose data or base is no longer what it was.
    """
    manifest = (path / checkpoint.MANIFEST).resolve()
    write = partial(_write, path, registry=registry or load())
    return made_once((manifest, manifest.stat().st_mtime_ns), path, path.name, write)


def made_once(version: Hashable, made_of: Path, stem: str, write: Callable[[Path], object]) -> Path:
    """The GGUF file that `write` makes of `made_of`, and did already where that is still of this `version`."""
    if version not in _written:
        place = Path(tempfile.mkdtemp(prefix="toyexp-"))
        atexit.register(shutil.rmtree, place, ignore_errors=True)
        target = place / f"{stem}.gguf"
        write(target)
        _written[version], MADE_OF[target] = target, made_of
    return _written[version]


def _read_by(path: Path, registry: Registry | None) -> Format | None:
    """Who reads files of that name, where they are in another format than GGUF."""
    forms = registry.classes("format").values() if registry else ()
    named = [form for form in forms if path.name.endswith(form.suffix)]
    return next((form() for form in named if form.suffix != ".gguf" and form.read is not Format.read), None)


def _converted_by(form: Format, path: Path, target: Path, registry: Registry) -> None:
    who, when = f"format.{form.name}", f"while it read {path}"
    found = asked(who, when, Exported, lambda: form.read(path, registry.models()))
    with blamed(who, when):
        tensors = _Fitting(found, f"{path}: format.{form.name} read")
        write_model(target, found.model, tensors, found.tokenizer, "f32", found.general, found.data)


class _Fitting(Mapping[str, np.ndarray]):
    """What was read of a model's tensors; UserError for one that the model says nothing of, lacks, or has otherwise."""

    def __init__(self, found: Exported, what: str):
        if not isinstance(found.model, Model):
            raise UserError(f"{what} {printable(repr(found.model))} for a model")
        self._tensors, self._what = found.tensors, what
        self._shapes = {spec.name: spec.shape for spec in found.model.tensors()}
        for name in sorted(self._shapes.keys() ^ found.tensors.keys()):
            lacks = "no tensor" if name in self._shapes else "a tensor"
            unlike = "has" if name in self._shapes else "has not"
            raise UserError(f"{what} {lacks} {printable(name)}, which its model.{found.model.name} {unlike}")

    def __getitem__(self, name: str) -> np.ndarray:
        array, wanted = self._tensors[name], self._shapes[name]
        if not isinstance(array, np.ndarray):
            raise UserError(f"{self._what} {printable(repr(array))} for {name}, expected an array {list(wanted)}")
        if array.shape != wanted:
            raise UserError(f"{self._what} {list(array.shape)} for {name}, and its model says {list(wanted)}")
        return array

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def _write(path: Path, target: Path, registry: Registry) -> None:
    found, plan, recipe, dataset = _set_up(path, registry)
    from toyexp.reference.null import NullEngine  # which holds tensors, and computes nothing

    with start(recipe, NullEngine(), plan) as session:
        values = {t.name: session.download(t.name) for t in plan.tensors}
    values |= {name: np.asarray(array, np.float32) for name, array in found.arrays.items()}
    keys = dataset.gguf_metadata()
    write_model(
        target, plan.model, export_tensors(plan, values), dataset.tokenizer, "f32", _general(path, found, plan), keys
    )


def adapter_in(path: Path, target: Path, registry: Registry) -> None:
    """Writes the LoRA adapter of a checkpoint as a GGUF file; UserError for that of a run without one."""
    found, plan, _, dataset = _set_up(path, registry)
    if not any(isinstance(adapter, LoraAdapter) for adapter in plan.adapters):
        recipe = found.state["config"]["recipe"]["name"]
        raise UserError(f"{path}: is a checkpoint of recipe={recipe}, without an adapter; {NAME_ADAPTER}")
    values = {name: np.asarray(array, np.float32) for name, array in found.arrays.items()}
    write_adapter(target, plan, values, _general(path, found, plan), dataset.chat_template)


def _set_up(path: Path, registry: Registry) -> tuple[checkpoint.Checkpoint, Plan, Any, Any]:
    """What a checkpoint holds, and the plan, the recipe and the data of its run."""
    found = checkpoint.read(path, with_state=False)
    plain = found.state.get("config")
    if not isinstance(plain, dict):
        raise UserError(f"{path / checkpoint.STATE}: holds no configuration")
    try:
        plan, recipe, dataset = _planned(plain, registry)
    except UserError as error:
        raise UserError(f"{path}: its run cannot be set up again: {error}") from None
    _check_fit(path, plan, found)
    return found, plan, recipe, dataset


def _general(path: Path, found: checkpoint.Checkpoint, plan: Plan) -> dict[str, Any]:
    """What the file says of where it comes from."""
    from toyexp.training.introduction import config_hash

    plain = found.state["config"]
    return {
        "name": str(plain["name"]), "run_id": path.absolute().parents[1].name, "step": found.step,
        "config_sha256": config_hash(plain), **inherited(plan),
    }  # fmt: skip


def _planned(plain: dict[str, Any], registry: Registry) -> tuple[Plan, Any, Any]:
    """The run's plan, recipe and data, from its configuration; a plan that nothing will be trained by."""
    from toyexp.config.build import saved_parts

    model, data, recipe = saved_parts(plain, registry)
    base = recipe.base_file()
    dataset = open_data(data, recipe.vocabulary())
    whole = recipe.of_base(model_of(base, registry, recipe.reads)) if base else None
    if base and whole:
        see_as(dataset, whole, base)
        whole = whole.fit(dataset)
    fitted = model.fit(dataset)
    inputs = fitted.batches(dataset, 1, int(plain["seed"])).inputs
    with blamed(f"recipe.{recipe.name}", "while it planned"):
        return recipe.plan(whole or fitted, Setup(inputs, rows=1, seed=int(plain["seed"]))), recipe, dataset


def _check_fit(path: Path, plan: Plan, found: checkpoint.Checkpoint) -> None:
    wanted = {t.name: t.shape for t in plan.trainable}
    there = {name: array.shape for name, array in found.arrays.items()}
    for name in sorted(wanted.keys() | there.keys()):
        if wanted.get(name) != there.get(name):
            raise UserError(
                f"{path}: its {printable(name)} is {list(there.get(name) or ())}, and the run's configuration says "
                f"{list(wanted.get(name) or ())}: its data or base is no longer what it was"
            )


def file_of(path: Path, leaves: Sequence[str] = (MODEL,), registry: Registry | None = None) -> Path:
    """The GGUF file meant by `path`: itself, what a run left in that directory, or the model of that checkpoint.

    What is in another format that is read here is one too.

    UserError when there is nothing.
    """
    if not os.path.lexists(path):
        if is_address(path):
            raise UserError(f"{str(path).replace(':/', '://', 1)}: {ADDRESS}")
        raise UserError(f"{path}: not found; the GGUF files on this machine: toyexp models")
    if not os.path.isdir(path):  # noqa: PTH112 - Path.is_dir() raises where the way there may not be taken
        form = _read_by(path, registry)
        if form is None or registry is None:
            return path
        require(path, str(path))
        stem = path.name.removesuffix(form.suffix)
        version = path.resolve(), path.stat().st_mtime_ns
        return made_once(version, path, stem, lambda target: _converted_by(form, path, target, registry))
    if not os.access(path, os.X_OK):
        raise UserError(f"{path}: is a directory that may not be entered")
    there = [path / name for name in leaves if os.path.lexists(path / name)]
    if there:
        return next((leaf for leaf in there if leaf.is_file()), there[0])  # whoever opens it says what it is
    if is_checkpoint(path):
        return gguf_of(path, registry)
    newest = newest_in(path)
    named = f"name a GGUF file, the directory of a run, or a checkpoint{f', such as {newest}' if newest else ''}"
    raise UserError(f"{path}: is a directory without {' or '.join(leaves)}; {_converted(path) or named}")


def _converted(path: Path) -> str | None:
    """How a directory of transformers or PEFT becomes a GGUF; None for any other."""
    for config, script in (("adapter_config.json", "convert_lora_to_gguf.py"), ("config.json", HF_TO_GGUF)):
        if (path / config).is_file():
            return (
                f"{PROGRAM} makes one of Hugging Face's: python {script} {shlex.quote(str(path))} --outfile model.gguf"
            )
    return None
