"""A Plan: what will be trained, as plain data that any engine can realize."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from toyexp.base.errors import UserError
from toyexp.contract.batch import InputSpec
from toyexp.contract.model import Model
from toyexp.contract.ops import Adapted, LowRank, Params, Tensor
from toyexp.contract.values import Values


@dataclass(frozen=True)
class PlanTensor:
    """One tensor of the run: where its values come from, and whether training changes it."""

    name: str
    shape: tuple[int, ...]
    values: Values
    trainable: bool = True
    packed: bool = False  # a frozen tensor FromGGUF: an engine that can keeps it in the file's type

    @property
    def decays(self) -> bool:
        """Whether weight decay applies: to matrices, never to norms and biases."""
        return len(self.shape) > 1

    @property
    def size(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class LoraAdapter:
    """A low-rank update of the linear `target`, by the plan's tensors `<target>.lora_a` and `<target>.lora_b`."""

    target: str
    scale: float
    dropout: float = 0.0  # the share of its inputs that a training step hides from it

    @property
    def mask(self) -> str:
        """The batch's array that holds what dropout does to each input: see `Dropout`."""
        return f"{self.target}.dropout"


@dataclass(frozen=True)
class Lens:
    """The embedding table `target` is read through the plan's tensor `projection` [d_model, d_table]."""

    target: str
    projection: str


@dataclass(frozen=True)
class Plan:
    """Everything an engine needs to know; it names no engine and no file format of one."""

    model: Model
    tensors: tuple[PlanTensor, ...]
    inputs: Mapping[str, InputSpec]  # of a batch; always with integer `targets` and float `weights`
    rows: int  # examples in a micro-batch
    accumulate: int = 1  # micro-batches in a step
    grad_clip: float = 0.0  # largest global gradient norm; 0: none
    adapters: tuple[LoraAdapter | Lens, ...] = ()
    seed: int = 0
    skip_nonfinite: bool = False  # a step whose loss or gradient is not finite must change nothing

    def __post_init__(self) -> None:
        names = [t.name for t in self.tensors]
        repeated = {n for n in names if names.count(n) > 1} if len(set(names)) != len(names) else set()
        if repeated:
            raise UserError(f"plan: tensor {min(repeated)} is listed twice")
        for adapter in self.adapters:
            needed = [adapter.target]
            needed += [adapter.projection] if isinstance(adapter, Lens) else lora_names(adapter.target)
            for name in needed:
                if name not in names:
                    raise UserError(f"plan: the adapter of {adapter.target} needs tensor {name}, which is not listed")
            if isinstance(adapter, LoraAdapter) and adapter.dropout and adapter.mask not in self.inputs:
                raise UserError(
                    f"plan: the dropout of {adapter.target} needs input {adapter.mask}, which is not listed"
                )
        if self.rows < 1 or self.accumulate < 1:
            raise UserError(f"plan: rows={self.rows} and accumulate={self.accumulate} must be 1 or above")
        if not 0 <= self.grad_clip < math.inf:
            raise UserError(f"plan: grad_clip={self.grad_clip} must be 0 (none) or above")
        for name, kind in (("targets", "int"), ("weights", "float")):
            dtype = self.inputs[name].dtype if name in self.inputs else "missing"
            if not dtype.startswith(kind):
                raise UserError(f"plan: inputs need {kind} {name}; they are {dtype}")

    def tensor(self, name: str) -> PlanTensor:
        """The tensor of that name; KeyError when there is none."""
        for tensor in self.tensors:
            if tensor.name == name:
                return tensor
        raise KeyError(name)

    @property
    def trainable(self) -> tuple[PlanTensor, ...]:
        """The tensors that training changes."""
        return tuple(t for t in self.tensors if t.trainable)

    def initial(self, tensor: PlanTensor) -> np.ndarray:
        """The float32 values that `tensor` starts from."""
        array = tensor.values.draw(tensor.shape, self.seed, tensor.name)
        if array.shape != tensor.shape:
            raise UserError(f"{tensor.name}: expected shape {list(tensor.shape)}, its source has {list(array.shape)}")
        return array

    def check_values(self) -> None:
        """Raises GGUFError unless what comes from files is there and holds finite numbers alone."""
        for values in (t.values for t in self.tensors):
            values.check_finite()

    @property
    def drops(self) -> tuple[LoraAdapter, ...]:
        """The adapters with dropout."""
        return tuple(a for a in self.adapters if isinstance(a, LoraAdapter) and a.dropout)

    def params(self, values: Mapping[str, Tensor], batch: Mapping[str, Tensor] | None = None) -> Params:
        """`values` as a model sees them: each adapted tensor together with its adapter.

        `batch` may be left out of a plan without dropout.
        """
        seen: dict[str, Any] = dict(values)
        for adapter in self.adapters:
            base = values[adapter.target]
            if isinstance(adapter, Lens):
                seen[adapter.target] = Adapted(base, lens=values[adapter.projection])
            else:
                a, b = (values[name] for name in lora_names(adapter.target))
                dropout = None
                if adapter.dropout:
                    if batch is None:
                        raise UserError(f"{adapter.target}: has dropout, which plan.params needs the batch for")
                    dropout = batch[adapter.mask]
                seen[adapter.target] = Adapted(base, low_rank=LowRank(a, b, adapter.scale, dropout))
        return Params(seen)


def lora_names(target: str) -> list[str]:
    """The names of an adapter's two tensors, as llama.cpp reads them."""
    return [f"{target}.lora_a", f"{target}.lora_b"]


def one_alpha(plan: Plan) -> float:
    """Scale times rank, of which a file of adapters holds one; UserError where they differ."""
    adapters = [a for a in plan.adapters if isinstance(a, LoraAdapter)]
    alphas = {a.scale * plan.tensor(lora_names(a.target)[0]).shape[0] for a in adapters}
    if len(alphas) != 1:
        raise UserError(f"a file of adapters holds one alpha, these have {sorted(alphas)}")
    return alphas.pop()
