"""Find or make the GGUF file of a model or LoRA adapter, from a run, a checkpoint or a file in another format."""

from __future__ import annotations

import atexit
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from toyexp.base.errors import UserError, printable
from toyexp.base.files import ADDRESS_MESSAGE, is_address, require_file
from toyexp.base.ownership import Ledger, cached_fingerprint
from toyexp.base.user_paths import find_cached_repository
from toyexp.formats.file_plan import check_adapter, match_preprocessing
from toyexp.formats.gguf.form import gguf_architecture
from toyexp.formats.gguf.header import SAVED, SOURCE_PATHS, source_path
from toyexp.formats.gguf.open_model import find_reader, load_model, note_once, open_gguf
from toyexp.formats.gguf.read import GGUFFile
from toyexp.formats.gguf.write import copy_types, write_adapter, write_model, write_pairs
from toyexp.formats.peft import CONFIG, TENSORS, read_peft
from toyexp.interfaces.data import open_data
from toyexp.interfaces.model import Model
from toyexp.interfaces.plan import Plan, adapter_digest, adapter_tensors, export_tensors, inherited_metadata, lora_names
from toyexp.interfaces.recipe import Setup, start_session
from toyexp.plugins.discovery import current_registry, load
from toyexp.plugins.registry import Registry
from toyexp.training import checkpoint
from toyexp.training.provenance import NAMES, Origin, data_digests, parse_origin, require_own_checkpoint, source_files
from toyexp.training.run_config import config_hash

MODEL, ADAPTER = "model.gguf", "adapter.gguf"  # files that a run exports
NAME_ADAPTER = f"name a run of recipe=lora, or an {ADAPTER}"

_written: dict[Hashable, Path] = {}  # files converted in this process; for the key see write_once


def is_checkpoint(path: Path) -> bool:
    """Return True if `path` is the directory of a checkpoint."""
    return re.fullmatch(r"step-\d+", path.name) is not None and (path / checkpoint.MANIFEST).is_file()


def newest_checkpoint(path: Path) -> Path | None:
    """Return the newest checkpoint of a run without verifying it; None if there is none.

    `path` is the run's directory or its `checkpoints/`.
    """
    for folder in (path / "checkpoints", path):
        if checkpoints := checkpoint.list_checkpoints(folder):
            return next(iter(checkpoints.values()))
    return None


def checkpoint_gguf(path: Path, registry: Registry | None = None) -> Path:
    """Convert a checkpoint to a float32 GGUF file and return its path. The file is deleted when the process exits."""
    write = partial(_write, path, registry=registry or current_registry())
    return write_once([path / checkpoint.MANIFEST], path, path.name, write)


def write_once(files: Sequence[Path], source: Path, stem: str, write: Callable[[Path], object], kind: str = "") -> Path:
    """Call `write` to convert `source` to a temporary GGUF file, and return the path of this file.

    A second call for the same `files` and `kind` returns the same path, unless one of the files has changed since.
    `files` are the files that `write` reads, and `kind` distinguishes different conversions of them. `stem` is the name
    of the new file without `.gguf`. The new file is deleted when the process exits.
    """
    version = (kind, *((file.resolve(), file.stat().st_mtime_ns) for file in files))
    if version not in _written:
        directory = Path(tempfile.mkdtemp(prefix="toyexp-"))
        atexit.register(shutil.rmtree, directory, ignore_errors=True)
        target = directory / f"{stem}.gguf"
        write(target)
        _written[version], SOURCE_PATHS[target] = target, source
    return _written[version]


def gguf_path(file: GGUFFile) -> Path:
    """Return the path of the GGUF file of an open model, for llama.cpp. Convert a model in another format."""
    if not file.is_converted:
        return file.path
    types = {t.name: t.type for t in file.tensors.values()}
    writer = copy_types(file, types, file.metadata["general.file_type"])
    return write_once([file.path, *file.paths], file.path, file.stem, writer.save)


def _write(path: Path, target: Path, registry: Registry) -> None:
    saved, plan, recipe, dataset = _load_run(path, registry)
    from toyexp.reference.null import NullEngine  # holds tensors without computing anything

    with start_session(recipe, NullEngine(), plan) as session:
        values = {t.name: session.download(t.name) for t in plan.tensors}
    values |= {name: np.asarray(array, np.float32) for name, array in saved.arrays.items()}
    model, tensors = plan.model.fold(export_tensors(plan, values))
    general, keys = _general(path, saved, plan), dataset.gguf_metadata()
    write_model(target, model, tensors, dataset.tokenizer, "f32", general, keys)


def convert_adapter(path: Path, target: Path, registry: Registry) -> None:
    """Write the LoRA adapter of the checkpoint at `path` to a GGUF file; raise UserError if the checkpoint has none."""
    saved, plan, _, dataset = _load_run(path, registry)
    if plan.has_dora:
        raise UserError(f"{path}: is a checkpoint of DoRA, which no adapter.gguf can hold; name it as the model")
    if not adapter_tensors(plan):
        recipe, alone = saved.state["config"]["recipe"]["name"], " alone" * bool(plan.adapters)
        raise UserError(f"{path}: is a checkpoint of recipe={recipe}, which trains no adapter{alone}; {NAME_ADAPTER}")
    values = {name: np.asarray(array, np.float32) for name, array in saved.arrays.items()}
    write_adapter(target, plan, values, _general(path, saved, plan), dataset.chat_template)


def _load_run(path: Path, registry: Registry) -> tuple[checkpoint.Checkpoint, Plan, Any, Any]:
    saved = checkpoint.read_checkpoint(path, with_state=False)
    plain, run_origin = saved.state.get("config"), parse_origin(saved.state)
    if not isinstance(plain, dict):
        raise UserError(f"{path / checkpoint.STATE}: is damaged (no configuration); use another checkpoint")
    require_own_checkpoint(path, saved.state)
    node = plain.get("model")
    name = str(node.get("name")) if isinstance(node, dict) else ""
    if (model := registry.classes("model").get(name)) and model.engines:
        raise UserError(f"{path}: model={name} has no GGUF file; load the run's model.safetensors with PyTorch")
    try:
        with run_origin.explain_missing_paths():
            plan, recipe, dataset = _rebuild_plan(plain, registry, run_origin)
    except UserError as error:
        raise UserError(f"{path}: needs the run's data and files: {error}; or use a GGUF file of the run") from None
    expected, shapes = {t.name: t.shape for t in plan.trainable}, {k: array.shape for k, array in saved.arrays.items()}
    for name in sorted(expected.keys() | shapes.keys()):
        if expected.get(name) != shapes.get(name):
            raise UserError(
                f"{path}: its {printable(name)} has shape {list(shapes.get(name) or ())}, but the run's "
                f"configuration needs {list(expected.get(name) or ())}: the run's data or base has changed"
            )
    return saved, plan, recipe, dataset


def _general(path: Path, saved: checkpoint.Checkpoint, plan: Plan) -> dict[str, Any]:
    plain, inherited_keys = saved.state["config"], inherited_metadata(plan)
    pairs = plan.adapter_file(saved.arrays)[1] if adapter_tensors(plan) else {}
    return {
        "name": str(plain["name"]), "run_id": path.absolute().parents[1].name, "step": saved.step,
        "config_sha256": config_hash(plain), **inherited_keys,
        **({"adapter_digest": adapter_digest(pairs, inherited_keys.get("adapter_digest", ""))} if pairs else {}),
    }  # fmt: skip


def _rebuild_plan(plain: dict[str, Any], registry: Registry, run_origin: Origin) -> tuple[Plan, Any, Any]:
    """Rebuild a run's plan, recipe and data set. Raise UserError if its data or files have changed."""
    from toyexp.config.build import build_saved_objective, build_saved_parts

    model, data, recipe = build_saved_parts(plain, registry, run_origin)
    for role, file in source_files(recipe).items():
        if run_origin.list_changes({role: cached_fingerprint(file)}):
            raise UserError(f"{source_path(file)}: its contents changed since the run; restore that file")
    base = recipe.base_file()
    dataset = open_data(data, recipe.vocabulary())
    sources = data_digests(dataset.describe())
    if changes := run_origin.list_changes({role: d for role, d in sources.items() if role in (*NAMES, "images")}):
        path = getattr(data, "path", None)
        override = f"data.path={path}" if path else f"data={data.name}"
        raise UserError(f"{override}: {changes[0]} since the run; restore that data")
    base_model = recipe.prepare_base(load_model(base, registry, recipe.reads)) if base else None
    if base and base_model:
        match_preprocessing(dataset, base_model, base)
        base_model = base_model.fit(dataset)
    fitted = model.fit(dataset)
    objective = build_saved_objective(plain, registry, run_origin)
    rows = objective.rows_together or 1
    inputs = fitted.batches(dataset, rows, int(plain["seed"])).inputs
    seed = int(plain["seed"] if plain.get("model_seed") is None else plain["model_seed"])
    return recipe.plan(base_model or fitted, Setup(inputs, rows=rows, seed=seed, objective=objective)), recipe, dataset


def find_model_file(path: Path, leaves: Sequence[str] = (MODEL,), registry: Registry | None = None) -> Path:
    """Return the GGUF file of a model, run or checkpoint, converted if needed. Raise UserError if there is none.

    `leaves` are the file names to look for in a run's directory. If the directory has none of these files and `leaves`
    contains MODEL, convert the newest checkpoint of the run.
    """
    if not os.path.lexists(path := find_cached_repository(path)):
        if is_address(path):
            raise UserError(f"{str(path).replace(':/', '://', 1)}: {ADDRESS_MESSAGE}")
        hub = re.fullmatch(r"\w[\w.-]*/[\w.-]+(?<!gguf)", str(path)) and not path.parent.exists()
        download = f" here and in the Hugging Face cache; to get it: hf download {path}" if hub else ""
        raise UserError(f"{path}: not found{download}; to list the GGUF files on this machine: toyexp models")
    if form := find_reader(path, registry or current_registry()):
        return path if form.contents else require_file(path, str(path))
    if not os.path.isdir(path):  # noqa: PTH112 - Path.is_dir() raises PermissionError
        return path
    if not os.access(path, os.X_OK):
        raise UserError(f"{path}: no permission to enter this directory")
    existing = [path / name for name in leaves if os.path.lexists(path / name)]
    if existing:
        leaf = next((leaf for leaf in existing if leaf.is_file()), existing[0])  # opening it reports what it is
        if Ledger.open(path).is_replaced(leaf):
            raise UserError(
                f"{leaf}: was replaced after the run wrote it, so its contents changed; put the old file back, "
                "or start a new run (name=...) with the path of this file"
            )
        return leaf
    if is_checkpoint(path):
        return checkpoint_gguf(path, registry)
    newest = newest_checkpoint(path)
    if newest is not None and MODEL in leaves:
        note_once(f"note: {path} has no {MODEL}; using its newest checkpoint, {newest}")
        return checkpoint_gguf(newest, registry)
    hint = f"name a GGUF file, the directory of a run, or a checkpoint{f', such as {newest}' if newest else ''}"
    if (path / "config.yaml").is_file() and not newest:
        hint = f"the run saved no weights: callbacks=[default] writes {MODEL}, checkpoint_every=100 checkpoints"
    if (path / checkpoint.STATE).is_file():
        raise UserError(f"{path}: is a damaged checkpoint: it has no {checkpoint.MANIFEST}; use another checkpoint")
    if (path / CONFIG).is_file():
        hint = "it holds an adapter of PEFT; name its base, and this directory as the adapter"
    elif (path / "config.json").is_file():
        hint = SAVED
    raise UserError(f"{path}: is a directory without {' or '.join(leaves)}; {hint}")


def adapter_files(path: Path) -> list[Path]:
    """Return the files that hold a LoRA adapter. Raise UserError if there is none.

    `path` is a GGUF file, a run, a checkpoint, or a directory written by PEFT.
    """
    if ((path := find_cached_repository(path)) / CONFIG).is_file():
        return [path / name for name in (CONFIG, TENSORS) if (path / name).exists()]
    if is_checkpoint(path):
        return [path / checkpoint.MANIFEST]
    if path.is_dir() and not (path / ADAPTER).exists():
        newest = newest_checkpoint(path)
        if newest is not None and _has_no_adapter(newest):
            raise UserError(f"{path}: its run trained no adapter; {NAME_ADAPTER}")
        hint = f"name a checkpoint, such as {newest}" if newest else NAME_ADAPTER
        raise UserError(f"{path}: is a directory without {ADAPTER} or {CONFIG}; {hint}")
    return [find_model_file(path, leaves=(ADAPTER,))]


def _has_no_adapter(saved: Path) -> bool:
    """Return True if a checkpoint can be read and holds no LoRA adapter."""
    try:
        arrays = checkpoint.read_checkpoint(saved, with_state=False).arrays
        return not any(name.endswith((*lora_names(""),)) for name in arrays)
    except UserError:
        return False


def find_adapter_file(path: Path, model: Callable[[], Model], registry: Registry | None = None) -> Path:
    """Return the GGUF file of a LoRA adapter, converted from a checkpoint or PEFT directory if needed.

    `model` returns the base model and is called only to convert a PEFT directory. Raise UserError if there is no
    adapter.
    """
    files = adapter_files(path := find_cached_repository(path))
    if is_checkpoint(path):
        return write_once(files, path, path.name, partial(convert_adapter, path, registry=registry or load()), ADAPTER)
    if files[0].name != CONFIG:
        return files[0]
    base = model()

    def write_from_peft(target: Path) -> None:
        write_pairs(target, gguf_architecture(base), *read_peft(path, base))

    return write_once(files, path, path.name or "adapter", write_from_peft, repr(base))


def check_base(adapter: Path, base: Path) -> list[str]:
    """Return a list with a warning if the adapter was trained on another base; otherwise return an empty list.

    Raise UserError if the adapter is already merged into `base`.
    """
    base_keys = open_gguf(str(base)).metadata
    with GGUFFile(adapter) as file:
        check_adapter(file)
        adapter_keys, digest = file.metadata, adapter_digest({name: file.weights(name) for name in file.tensors})
    keys = ("general.run_id", "general.config_sha256")
    same_run = all(adapter_keys.get(key) and adapter_keys.get(key) == base_keys.get(key) for key in keys)
    shown = printable(str(source_path(base)))
    name = printable(str(adapter_keys.get("general.base_model.0.name", "")), 60)
    if same_run or digest in str(base_keys.get("general.adapter_digest", "")).split(","):
        base_name = f" ({name})" if name else ""
        raise UserError(f"{source_path(adapter)}: is already merged into {shown}; leave the adapter out, "
                        f"or name the base that it was trained on{base_name}")  # fmt: skip
    if adapter_keys.get("general.base_model.0.digest") in (None, cached_fingerprint(base)):
        return []
    return [f"{source_path(adapter)}: was trained on another file ({name}) than {shown}; the adapter only fits "
            "the same model, for example in another type"]  # fmt: skip
