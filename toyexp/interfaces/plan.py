"""A Plan: what will be trained, as plain data that any engine can realize."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import TYPE_CHECKING, Any

from toyexp.base.errors import UserError, printable, suggest
from toyexp.base.packages import error_location
from toyexp.base.validators import require_range
from toyexp.interfaces.dataset import InputSpec
from toyexp.interfaces.model import Model
from toyexp.interfaces.ops import AdaptedWeight, LowRank, Params, Tensor
from toyexp.interfaces.optimiser import AdamW, Group, Optimiser, Rule, check_rule
from toyexp.interfaces.values import Values

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class PlanTensor:
    """One tensor of the run: where its values come from, and whether training changes it."""

    name: str
    shape: tuple[int, ...]
    values: Values
    trainable: bool = True

    @property
    def has_weight_decay(self) -> bool:
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
    groups: tuple[Group, ...] = ()  # which rule changes which tensors; () leaves all to AdamW

    def __post_init__(self) -> None:
        names = Counter(t.name for t in self.tensors)
        if repeated := [name for name, count in names.items() if count > 1]:
            raise UserError(f"plan: tensor {min(repeated)} is listed twice")
        for adapter in self.adapters:
            needed = [adapter.target]
            needed += [adapter.projection] if isinstance(adapter, Lens) else lora_names(adapter.target)
            for name in needed:
                if name not in names:
                    raise UserError(f"plan: the adapter of {adapter.target} needs tensor {name}, which is not listed")
            if isinstance(adapter, LoraAdapter) and adapter.dropout and adapter.mask not in self.inputs:
                raise UserError(f"plan: the dropout of {adapter.target} needs input {adapter.mask}, which is not there")
        require_range("plan", self, rows="[1,inf)", accumulate="[1,inf)", grad_clip="[0,inf)")
        for name, kind in (("targets", "int"), ("weights", "float")):
            dtype = self.inputs[name].dtype if name in self.inputs else "missing"
            if not dtype.startswith(kind):
                raise UserError(f"plan: inputs need {kind} {name}; they are {dtype}")
        grouped = [name for group in self.groups for name in group.tensors]
        if self.groups and sorted(grouped) != sorted(t.name for t in self.trainable):
            raise UserError("plan: its groups do not hold each tensor that trains, once")

    def tensor(self, name: str) -> PlanTensor:
        """The tensor of that name; KeyError when there is none."""
        for tensor in self.tensors:
            if tensor.name == name:
                return tensor
        raise KeyError(name)

    @cached_property
    def trainable(self) -> tuple[PlanTensor, ...]:
        """The tensors that training changes."""
        return tuple(t for t in self.tensors if t.trainable)

    @cached_property
    def updates(self) -> tuple[Group, ...]:
        """The groups of the tensors that train, in the order in which a step's numbers come."""
        return self.groups or grouped(self.trainable, (AdamW(),))

    def numbers(self, step: int, lr: float, factors: Mapping[str, float] | None = None) -> tuple[np.ndarray, ...]:
        """Each group's numbers for the 0-based `step`; `factors` scale settings of their rules by name."""
        return tuple(group.numbers(step, lr, factors) for group in self.updates)

    def scaled(self, factors: Mapping[str, float]) -> dict[str, float]:
        """What the settings of its rules are once the factors of their names scale them; of several, the largest."""
        there = {name: [group.setting(name) for group in self.updates if name in group.scalable] for name in factors}
        return {name: max(values) * factors[name] for name, values in there.items() if values}

    def slots(self, tensor: PlanTensor) -> Mapping[str, tuple[int, ...]]:
        """The optimiser's state of a tensor that trains: the shapes, by name."""
        return self._rules[tensor.name].slots(tensor.shape)

    @cached_property
    def _rules(self) -> Mapping[str, Rule]:
        return {name: group.rule for group in self.updates for name in group.tensors}

    def initial_values(self, tensor: PlanTensor) -> np.ndarray:
        """The float32 values that `tensor` starts from."""
        array = tensor.values.draw(tensor.shape, self.seed, tensor.name)
        if array.shape != tensor.shape:
            raise UserError(f"{tensor.name}: expected shape {list(tensor.shape)}, its source has {list(array.shape)}")
        return array

    @property
    def dropout_adapters(self) -> tuple[LoraAdapter, ...]:
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
                seen[adapter.target] = AdaptedWeight(base, lens=values[adapter.projection])
            else:
                a, b = (values[name] for name in lora_names(adapter.target))
                dropout = None
                if adapter.dropout:
                    if batch is None:
                        raise UserError(f"{adapter.target}: has dropout, which plan.params needs the batch for")
                    dropout = batch[adapter.mask]
                seen[adapter.target] = AdaptedWeight(base, low_rank=LowRank(a, b, adapter.scale, dropout))
        return Params(seen)


def grouped(
    tensors: Sequence[PlanTensor],
    rules: Sequence[Rule],
    own: Callable[[PlanTensor, Rule], tuple[float, float]] = lambda tensor, rule: (0.0, 1.0),
) -> tuple[Group, ...]:
    """Tensors in groups: by the first rule that takes them, whether they decay, and what is their own.

    `own` gives a tensor's weight decay, for norms and biases unread, and its learning rate by the run's. Raises
    UserError for a tensor that no rule takes.
    """
    members: dict[tuple[int, bool, float, float], list[str]] = {}
    for t in tensors:
        index = next((i for i, rule in enumerate(rules) if rule.takes(t.name, t.shape)), None)
        if index is None:
            raise UserError(f"optim: no rule takes {t.name} {list(t.shape)}")
        decay, lr_scale = own(t, rules[index])
        members.setdefault((index, not t.has_weight_decay, decay if t.has_weight_decay else 0.0, lr_scale), []).append(
            t.name
        )
    # Of each rule what decays comes first, so that it is one stretch of an engine's memory.
    return tuple(Group(rules[key[0]], tuple(members[key]), *key[2:]) for key in sorted(members))


def apply_optimiser(plan: Plan, optimiser: Optimiser, lr: float) -> Plan:
    """The plan with each tensor that trains in its group, and without those that `optim.groups` freezes.

    Raises UserError for patterns that match nothing, and where nothing is left to train.
    """
    names = [t.name for t in plan.trainable]
    for pattern in optimiser.groups:
        if names and not any(fnmatchcase(name, pattern) for name in names):
            key = f"optim.groups: {printable(pattern)}"
            fixed = [t.name for t in plan.tensors if not t.trainable and fnmatchcase(t.name, pattern)]
            if fixed:
                also = f", and {len(fixed) - 1} more" if len(fixed) > 1 else ""
                raise UserError(f"{key}: the recipe freezes {fixed[0]}{also}; leave it out")
            hint = suggest(pattern, names) if len(names) < 20 else f"one that trains is {names[0]}"
            raise UserError(f"{key} is no tensor that trains; {hint}")
    frozen = {name for name in names if optimiser.find_group(name)[1].get("frozen")}
    if names and frozen.issuperset(names):
        raise UserError("optim.groups: freezes every tensor, and nothing is left to train")
    tensors = tuple(replace(t, trainable=False) if t.name in frozen else t for t in plan.tensors)

    def own(tensor: PlanTensor, rule: Rule) -> tuple[float, float]:
        mine = optimiser.find_group(tensor.name)[1]
        base = mine.get("lr", optimiser.base_lr(rule))
        if base is not None and not lr:
            raise UserError(f"lr=0: {tensor.name} has lr {base:g} of its own, a multiple of lr; give lr=0.001 or so")
        return mine.get("weight_decay", optimiser.weight_decay), 1.0 if base is None else base / lr

    trainable = [t for t in tensors if t.trainable]
    groups, shapes = grouped(trainable, optimiser.rules(), own), {t.name: t.shape for t in trainable}
    try:
        for group in groups:
            _check_group(group, shapes, lr)
    except UserError as error:
        raise UserError(f"optim.{optimiser.name}: {error}{error_location(error, of_plugins=True)}") from error
    return replace(plan, tensors=tensors, groups=groups)


def idle_group_warnings(plan: Plan, optimiser: Optimiser) -> Iterator[str]:
    """A sentence for each part of `optim.groups` that changes nothing in the plan which was `optimised` by them."""
    trained = [t for t in plan.tensors if t.trainable or optimiser.find_group(t.name)[1].get("frozen")]
    for pattern, own in optimiser.groups.items():
        key = f"optim.groups: {printable(pattern)}"
        tensors = [t for t in trained if fnmatchcase(t.name, pattern)]
        takers = [optimiser.find_group(t.name)[0] for t in tensors]
        if takers and pattern not in takers:
            yield f"{key}: {printable(takers[0])} takes all its tensors; the first that fits counts: put it before that"
        elif own.get("weight_decay") and not any(t.has_weight_decay for t in tensors):
            yield f"{key}: weight_decay={own['weight_decay']}: norms and biases never decay"


def sign_flip_warnings(plan: Plan, lr: float) -> Iterator[str]:
    """A sentence for each group whose decay takes more than all of a weight at a step, which turns its sign."""
    for group in plan.updates:
        rate = lr * group.lr_scale
        if (left := 1 - rate * group.weight_decay) < 0:
            more = f" and {len(group.tensors) - 1} more" if group.tensors[1:] else ""
            yield (
                f"weight_decay={group.weight_decay:g} at lr={rate:g}: each step multiplies {group.tensors[0]}{more} by "
                f"{left:g}; lower one of the two"
            )


def export_tensors(plan: Plan, values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The model's own tensors from the run's: adapters are folded in.

    A lens makes an ordinary embedding, E' = E W^T; a LoRA pair an ordinary weight, W' = W + scale B A.
    """
    out = dict(values)
    for adapter in plan.adapters:
        if isinstance(adapter, Lens):
            lens = out.pop(adapter.projection).astype("float64")
            out[adapter.target] = (out[adapter.target].astype("float64") @ lens.T).astype("float32")
        else:
            a, b = (out.pop(name).astype("float64") for name in lora_names(adapter.target))
            out[adapter.target] = (out[adapter.target] + adapter.scale * (b @ a)).astype("float32")
    return {spec.name: out[spec.name] for spec in plan.model.tensors()}


def inherited_metadata(plan: Plan) -> Mapping[str, Any]:
    """What a model that is trained by the plan says of the one file that its values come from; of several nothing."""
    told = [told for tensor in plan.tensors if (told := tensor.values.export_metadata())]
    return told[0] if told and all(other == told[0] for other in told) else {}


def _check_group(group: Group, shapes: Mapping[str, tuple[int, ...]], lr: float) -> None:
    """Raises UserError for a rule whose numbers, slots or update are not what a session can take."""
    numbers = group.rule.numbers(0, lr, 0.0)
    found = [*numbers.values()] if isinstance(numbers, Mapping) else []
    if not found or not all(isinstance(n, int | float) and math.isfinite(n) for n in found):
        raise UserError(f"its numbers are {printable(repr(numbers))}; they must be finite numbers by name")
    for shape in {shapes[name] for name in group.tensors}:
        check_rule(group.rule, shape)


def lora_names(target: str) -> list[str]:
    """The names of an adapter's two tensors, as llama.cpp reads them."""
    return [f"{target}.lora_a", f"{target}.lora_b"]


def adapter_digest(pairs: Mapping[str, np.ndarray], merged: str = "") -> str:
    """Return 16 hex digits of an adapter's pairs, behind those of the adapters that its base has `merged` already."""
    digest = hashlib.sha256()
    for name in sorted(pairs):
        digest.update(name.encode() + pairs[name].astype("float32", copy=False).tobytes())
    return ",".join(filter(None, (merged, digest.hexdigest()[:16])))


def shared_alpha(plan: Plan) -> float:
    """Scale times rank, of which a file of adapters holds one; UserError where they differ."""
    adapters = [a for a in plan.adapters if isinstance(a, LoraAdapter)]
    # Scales that were divided from one alpha by several ranks give it again but for their last bits.
    alphas = {float(f"{a.scale * plan.tensor(lora_names(a.target)[0]).shape[0]:.12g}") for a in adapters}
    if len(alphas) != 1:
        raise UserError(f"a file of adapters holds one alpha, these have {sorted(alphas)}")
    return alphas.pop()
