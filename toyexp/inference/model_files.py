"""Find or make the GGUF file of a model or LoRA adapter, from a run, a checkpoint or a file in another format."""

from __future__ import annotations

import atexit
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Hashable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from toyexp.base.attribution import attribute_errors, call_checked
from toyexp.base.errors import UserError, printable
from toyexp.base.files import ADDRESS_MESSAGE, is_address, require_file
from toyexp.base.ownership import Ledger, cached_fingerprint
from toyexp.base.terminal import print_note
from toyexp.formats.file_plan import check_adapter, match_preprocessing
from toyexp.formats.gguf.form import gguf_architecture
from toyexp.formats.gguf.header import SOURCE_PATHS, how_to_convert, source_path
from toyexp.formats.gguf.open_model import load_model, open_gguf
from toyexp.formats.gguf.read import GGUFFile
from toyexp.formats.gguf.write import write_adapter, write_model, write_pairs
from toyexp.formats.peft import CONFIG, TENSORS, read_peft
from toyexp.interfaces.data import open_data
from toyexp.interfaces.format import Format, LazyTensors, ModelExport
from toyexp.interfaces.model import Model
from toyexp.interfaces.plan import LoraAdapter, Plan, adapter_digest, export_tensors, inherited_metadata, lora_names
from toyexp.interfaces.recipe import Setup, start_session
from toyexp.plugins.discovery import current_registry, load
from toyexp.plugins.registry import Registry
from toyexp.training import checkpoint
from toyexp.training.provenance import NAMES, Origin, data_digests, parse_origin, require_own_checkpoint, source_files
from toyexp.training.run_config import config_hash

MODEL, ADAPTER = "model.gguf", "adapter.gguf"  # what a run leaves
NAME_ADAPTER = f"name a run of recipe=lora, or an {ADAPTER}"  # what to type in place of what has none

_written: dict[Hashable, Path] = {}  # by what it was made of, and when that was written; for this process
_note_once = cache(print_note)


def is_checkpoint(path: Path) -> bool:
    """Whether `path` is the directory of a checkpoint."""
    return re.fullmatch(r"step-\d+", path.name) is not None and (path / checkpoint.MANIFEST).is_file()


def newest_checkpoint(path: Path) -> Path | None:
    """The newest checkpoint of a run's directory, or of the folder of its checkpoints, whole or not."""
    for folder in (path / "checkpoints", path):
        if found := checkpoint.list_checkpoints(folder):
            return next(iter(found.values()))
    return None


def checkpoint_gguf(path: Path, registry: Registry | None = None) -> Path:
    """Return a checkpoint's model as a GGUF file in float32, which this process deletes when it ends."""
    write = partial(_write, path, registry=registry or current_registry())
    return write_once([path / checkpoint.MANIFEST], path, path.name, write)


def write_once(files: Sequence[Path], source: Path, stem: str, write: Callable[[Path], object], kind: str = "") -> Path:
    """Return the GGUF file that `write` makes from `source`; write it again only if one of its `files` changed."""
    version = (kind, *((file.resolve(), file.stat().st_mtime_ns) for file in files))
    if version not in _written:
        place = Path(tempfile.mkdtemp(prefix="toyexp-"))
        atexit.register(shutil.rmtree, place, ignore_errors=True)
        target = place / f"{stem}.gguf"
        write(target)
        _written[version], SOURCE_PATHS[target] = target, source
    return _written[version]


def _find_reader(path: Path, registry: Registry) -> Format | None:
    named = [form for form in registry.classes("format").values() if path.name.endswith(form.suffix)]
    fits = [form for form in named if bool(form.contents) is os.path.isdir(path)]  # noqa: PTH112 - as below
    return next((form() for form in fits if form.suffix != ".gguf" and form.read is not Format.read), None)


def _convert_with(form: Format, path: Path, target: Path, registry: Registry) -> None:
    who = f"format.{form.name}"
    with attribute_errors(who, f"while it read {path}"):
        found = call_checked(ModelExport, form.read, path, registry.models(), who=who)
        tensors = _fitting(found, f"{path}: format.{form.name} read")
        write_model(target, found.model, tensors, found.tokenizer, "f32", found.general, found.data)


def _fitting(found: ModelExport, what: str) -> LazyTensors:
    """Return what was read of a model's tensors; UserError for one that the model lacks, or has in another shape."""
    if not isinstance(found.model, Model):
        raise UserError(f"{what} {printable(repr(found.model))} for a model")
    shapes = {spec.name: spec.shape for spec in found.model.tensors()}
    for name in sorted(shapes.keys() ^ found.tensors.keys()):
        lacks = "no tensor" if name in shapes else "a tensor"
        unlike = "has" if name in shapes else "has not"
        raise UserError(f"{what} {lacks} {printable(name)}, which its model.{found.model.name} {unlike}")

    def read(name: str) -> np.ndarray:
        array, wanted = found.tensors[name], list(shapes[name])
        if not isinstance(array, np.ndarray):
            raise UserError(f"{what} {printable(repr(array))} for {name}, expected an array {wanted}")
        if list(array.shape) != wanted:
            raise UserError(f"{what} {list(array.shape)} for {name}, and its model says {wanted}")
        return array

    return LazyTensors(shapes, read)


def _write(path: Path, target: Path, registry: Registry) -> None:
    found, plan, recipe, dataset = _load_run(path, registry)
    from toyexp.reference.null import NullEngine  # which holds tensors, and computes nothing

    with start_session(recipe, NullEngine(), plan) as session:
        values = {t.name: session.download(t.name) for t in plan.tensors}
    values |= {name: np.asarray(array, np.float32) for name, array in found.arrays.items()}
    keys = dataset.gguf_metadata()
    tensors, general = export_tensors(plan, values), _general(path, found, plan)
    write_model(target, plan.model, tensors, dataset.tokenizer, "f32", general, keys)


def convert_adapter(path: Path, target: Path, registry: Registry) -> None:
    """Writes the LoRA adapter of a checkpoint as a GGUF file; UserError for that of a run without one."""
    found, plan, _, dataset = _load_run(path, registry)
    if not any(isinstance(adapter, LoraAdapter) for adapter in plan.adapters):
        recipe = found.state["config"]["recipe"]["name"]
        raise UserError(f"{path}: is a checkpoint of recipe={recipe}, without an adapter; {NAME_ADAPTER}")
    values = {name: np.asarray(array, np.float32) for name, array in found.arrays.items()}
    write_adapter(target, plan, values, _general(path, found, plan), dataset.chat_template)


def _load_run(path: Path, registry: Registry) -> tuple[checkpoint.Checkpoint, Plan, Any, Any]:
    found = checkpoint.read_checkpoint(path, with_state=False)
    plain, begun = found.state.get("config"), parse_origin(found.state)
    if not isinstance(plain, dict):
        raise UserError(f"{path / checkpoint.STATE}: holds no configuration")
    require_own_checkpoint(path, found.state)
    try:
        with begun.explain_missing_paths():
            plan, recipe, dataset = _rebuild_plan(plain, registry, begun)
    except UserError as error:
        raise UserError(f"{path}: its run cannot be set up again: {error}; or name a GGUF of that run") from None
    wanted, there = {t.name: t.shape for t in plan.trainable}, {k: array.shape for k, array in found.arrays.items()}
    for name in sorted(wanted.keys() | there.keys()):
        if wanted.get(name) != there.get(name):
            raise UserError(
                f"{path}: its {printable(name)} is {list(there.get(name) or ())}, and the run's configuration says "
                f"{list(wanted.get(name) or ())}: its data or base is no longer what it was"
            )
    return found, plan, recipe, dataset


def _general(path: Path, found: checkpoint.Checkpoint, plan: Plan) -> dict[str, Any]:
    plain, passed = found.state["config"], inherited_metadata(plan)
    names = [name for a in plan.adapters if isinstance(a, LoraAdapter) for name in lora_names(a.target)]
    pairs = {name: np.asarray(found.arrays[name]) for name in names}
    return {
        "name": str(plain["name"]), "run_id": path.absolute().parents[1].name, "step": found.step,
        "config_sha256": config_hash(plain), **passed,
        **({"adapter_digest": adapter_digest(pairs, passed.get("adapter_digest", ""))} if pairs else {}),
    }  # fmt: skip


def _rebuild_plan(plain: dict[str, Any], registry: Registry, begun: Origin) -> tuple[Plan, Any, Any]:
    """Return the run's plan, recipe and data; UserError if its data or files are no longer what they were."""
    from toyexp.config.build import build_saved_parts

    model, data, recipe = build_saved_parts(plain, registry, begun)
    for role, file in source_files(recipe).items():
        if changes := begun.list_changes({role: cached_fingerprint(file)}):
            raise UserError(f"{source_path(file)}: is another file than it was: {changes[0]}; put that file back")
    base = recipe.base_file()
    dataset = open_data(data, recipe.vocabulary())
    sources = data_digests(dataset.describe())
    if changes := begun.list_changes({role: d for role, d in sources.items() if role in (*NAMES, "images")}):
        path = getattr(data, "path", None)
        where = f"data.path={path}" if path else f"data={data.name}"
        raise UserError(f"{where}: is other data than it was: {changes[0]}; put that data back")
    whole = recipe.prepare_base(load_model(base, registry, recipe.reads)) if base else None
    if base and whole:
        match_preprocessing(dataset, whole, base)
        whole = whole.fit(dataset)
    fitted = model.fit(dataset)
    inputs = fitted.batches(dataset, 1, int(plain["seed"])).inputs
    seed = int(plain["seed"] if plain.get("model_seed") is None else plain["model_seed"])
    return recipe.plan(whole or fitted, Setup(inputs, rows=1, seed=seed)), recipe, dataset


def find_model_file(path: Path, leaves: Sequence[str] = (MODEL,), registry: Registry | None = None) -> Path:
    """Return the GGUF file meant by `path`: a file (converted if need be), or the model of a run or checkpoint."""
    if not os.path.lexists(path):
        if is_address(path):
            raise UserError(f"{str(path).replace(':/', '://', 1)}: {ADDRESS_MESSAGE}")
        raise UserError(f"{path}: not found; the GGUF files on this machine: toyexp models")
    if form := _find_reader(path, known := registry or current_registry()):
        inside = sorted(path.iterdir()) if form.contents else [path]
        require_file(inside[0] if inside else path, str(path))
        stem = path.name.removesuffix(form.suffix)
        return write_once(inside, path, stem, lambda target: _convert_with(form, path, target, known))
    if not os.path.isdir(path):  # noqa: PTH112 - Path.is_dir() raises where the way there may not be taken
        return path
    if not os.access(path, os.X_OK):
        raise UserError(f"{path}: is a directory that may not be entered")
    there = [path / name for name in leaves if os.path.lexists(path / name)]
    if there:
        leaf = next((leaf for leaf in there if leaf.is_file()), there[0])  # whoever opens it says what it is
        if Ledger.open(path).is_replaced(leaf):
            raise UserError(f"{leaf}: is not what this run wrote there; to use it all the same, name the file itself")
        return leaf
    if is_checkpoint(path):
        return checkpoint_gguf(path, registry)
    newest = newest_checkpoint(path)
    if newest is not None and MODEL in leaves:
        _note_once(f"note: {path} has no {MODEL}; its newest checkpoint is read: {newest}")
        return checkpoint_gguf(newest, registry)
    named = f"name a GGUF file, the directory of a run, or a checkpoint{f', such as {newest}' if newest else ''}"
    if (path / "config.yaml").is_file() and not newest:
        named = f"the run left no weights: callbacks=[default] writes {MODEL}, checkpoint_every=100 checkpoints"
    raise UserError(f"{path}: is a directory without {' or '.join(leaves)}; {_conversion_hint(path) or named}")


def _conversion_hint(path: Path) -> str | None:
    """How a directory of transformers or PEFT becomes a GGUF; None for any other."""
    if (path / "adapter_config.json").is_file():
        return how_to_convert(path, "convert_lora_to_gguf.py")
    if (path / "config.json").is_file():
        return how_to_convert(path)
    return None


def adapter_files(path: Path) -> list[Path]:
    """The files that hold the LoRA adapter meant by `path`; UserError when there is nothing."""
    if (path / CONFIG).is_file():
        return [path / name for name in (CONFIG, TENSORS) if (path / name).exists()]
    if is_checkpoint(path):
        return [path / checkpoint.MANIFEST]
    if path.is_dir() and not (path / ADAPTER).exists():
        newest = newest_checkpoint(path)
        if newest is not None and _trained_whole(newest):
            raise UserError(f"{path}: is of a run that trained no adapter; {NAME_ADAPTER}")
        named = f"name a checkpoint, such as {newest}" if newest else NAME_ADAPTER
        raise UserError(f"{path}: is a directory without {ADAPTER} or {CONFIG}; {named}")
    return [find_model_file(path, leaves=(ADAPTER,))]


def _trained_whole(saved: Path) -> bool:
    """Whether a checkpoint can be read and holds no adapter: to name it would lead to the next error."""
    try:
        arrays = checkpoint.read_checkpoint(saved, with_state=False).arrays
        return not any(name.endswith((*lora_names(""),)) for name in arrays)
    except UserError:
        return False


def find_adapter_file(path: Path, model: Callable[[], Model], registry: Registry | None = None) -> Path:
    """Return the GGUF file of the LoRA adapter meant by `path`: a file, run, checkpoint, or directory of PEFT's."""
    files = adapter_files(path)
    if is_checkpoint(path):
        return write_once(files, path, path.name, partial(convert_adapter, path, registry=registry or load()), ADAPTER)
    if files[0].name != CONFIG:
        return files[0]
    base = model()

    def write_from_peft(target: Path) -> None:
        write_pairs(target, gguf_architecture(base), *read_peft(path, base))

    return write_once(files, path, path.name or "adapter", write_from_peft, repr(base))


def check_base(adapter: Path, base: Path) -> list[str]:
    """Return a warning if the adapter was trained on another base; UserError if the base has it merged in already."""
    there = open_gguf(str(base)).metadata
    with GGUFFile(adapter) as file:
        check_adapter(file)
        own, digest = file.metadata, adapter_digest({name: file.weights(name) for name in file.tensors})
    keys = ("general.run_id", "general.config_sha256")
    same_run = all(own.get(key) and own.get(key) == there.get(key) for key in keys)
    shown, name = printable(str(source_path(base))), printable(str(own.get("general.base_model.0.name", "")), 60)
    if same_run or digest in str(there.get("general.adapter_digest", "")).split(","):
        named = f" ({name})" if name else ""
        raise UserError(f"{source_path(adapter)}: {shown} has this adapter merged in already; leave the adapter out, "
                        f"or name the base that it was trained on{named}")  # fmt: skip
    if own.get("general.base_model.0.digest") in (None, cached_fingerprint(base)):
        return []
    return [f"{source_path(adapter)}: was trained on another file ({name}) than {shown}, and fits it only where "
            "that holds the same model, as in another type"]  # fmt: skip
