"""Build plans that load a model file, and optionally a LoRA adapter file, without training them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from toyexp.base.errors import UserError, printable
from toyexp.formats.gguf.form import gguf_architecture
from toyexp.formats.gguf.header import source_path
from toyexp.formats.gguf.open_model import FromGGUF, open_gguf
from toyexp.formats.gguf.read import GGUFFile
from toyexp.interfaces.dataset import Dataset
from toyexp.interfaces.model import Model, TensorSpec, model_settings
from toyexp.interfaces.plan import EMBEDDING, LoraAdapter, Plan, PlanTensor, lora_names
from toyexp.interfaces.recipe import Setup


def frozen_plan(model: Model, path: Path, setup: Setup, adapter: Path | None = None) -> Plan:
    """Return a plan that opens a model file, and optionally a LoRA adapter file, without training either."""
    tensors, adapters = frozen_tensors(model, path, adapter)
    return setup.plan(model, tensors, adapters)


def frozen_tensors(
    model: Model, path: Path, adapter: Path | None = None
) -> tuple[list[PlanTensor], Sequence[LoraAdapter]]:
    """Return the tensors of a model file and of an optional LoRA adapter file, all frozen, and the LoRA adapters.

    A LoraAdapter holds no matrices. It has the name of the linear layer that it changes, and the scale by which the
    product of its matrices is multiplied.
    """
    tensors = [PlanTensor(t.name, t.shape, FromGGUF(str(path), t.name), trainable=False) for t in model.tensors()]
    pairs, adapters = read_adapter(adapter, model) if adapter else ([], [])
    return [*tensors, *pairs], adapters


def match_preprocessing(dataset: Dataset, model: Model, path: Path) -> None:
    """Make `dataset` preprocess its examples as the model file at `path` says.

    Raise UserError if the data and the model do not fit each other. The file's list of classes is ignored if the model
    takes its number of classes from the data.
    """
    metadata, skipped = (
        open_gguf(str(path)).metadata,
        {"classes"} if model_settings(model).get("classes") == 0 else set(),
    )
    keys = {name: f"{gguf_architecture(model)}.{name}" for name in dataset.gguf_metadata() if name not in skipped}
    try:
        dataset.match_preprocessing({name: metadata[key] for name, key in keys.items() if key in metadata})
        model.fit(dataset)
    except UserError as error:
        raise type(error)(f"{source_path(path)}: {error}") from None


def read_adapter(path: Path, model: Model) -> tuple[list[PlanTensor], Sequence[LoraAdapter]]:
    """Return the tensors of a LoRA adapter file and a list of its LoRA adapters, one for each changed linear layer.

    Raise UserError if the file does not fit `model`.
    """
    with GGUFFile(path) as file:
        alpha = check_adapter(file)
        if file.architecture != (expected := gguf_architecture(model)):
            raise file.error(f"is an adapter of {printable(file.architecture)}, the model is {expected}")
        linears = [t for t in model.tensors() if len(t.shape) == 2 and not t.name.endswith("position_embd.weight")]
        adapted = [t for t in linears if any(name in file.tensors for name in lora_names(t.name))]
        ranks = [_rank(file, linear) for linear in adapted]
        names = [name for linear in adapted for name in lora_names(linear.name)]
        if unknown := file.tensors.keys() - set(names):
            raise file.error(f"its tensor {printable(min(unknown))} matches no linear layer of this {model.name}")
        pairs = [PlanTensor(n, file.tensors[n].shape, FromGGUF(str(path), n), trainable=False) for n in names]
    scales = [alpha / rank if alpha else 1.0 for rank in ranks]  # as in llama.cpp
    return pairs, [LoraAdapter(linear.name, scale) for linear, scale in zip(adapted, scales, strict=True)]


def _rank(file: GGUFFile, linear: TensorSpec) -> int:
    """Return the rank of the matrices A and B of a linear layer; raise UserError if their shapes do not fit it."""
    a, b = (file.tensors[name].shape if name in file.tensors else () for name in lora_names(linear.name))
    (outputs, inputs), rank = linear.shape, b[-1] if b else 0
    if (a, b) != (((outputs, rank), (inputs, rank)) if linear.name == EMBEDDING else ((rank, inputs), (outputs, rank))):
        raise file.error(f"{linear.name} is {outputs} x {inputs}; its lora_a is {list(a)}, its lora_b {list(b)}")
    return rank


def check_adapter(file: GGUFFile) -> float:
    """Return the scaling number alpha in a LoRA adapter file, or 0 if the file has none.

    Raise UserError if the file is no LoRA adapter.
    """
    kinds = [file.metadata.get(key) for key in ("general.type", "adapter.type")]
    if kinds != ["adapter", "lora"]:
        raise file.error(f"holds no LoRA adapter (general.type is {printable(str(kinds[0]))})")
    alpha = file.metadata.get("adapter.lora.alpha", 0.0)
    if not isinstance(alpha, float) or not math.isfinite(alpha):
        raise file.error(f"its adapter.lora.alpha is {printable(str(alpha))}, expected a number")
    if not file.tensors:
        raise file.error("holds no tensors, so it fits no model")
    return alpha
