"""The class Plan, which describes a training run as plain data. Any engine can open a session from it."""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

from toyexp.base.errors import UserError, printable, suggest
from toyexp.base.lazy import numpy as np
from toyexp.base.packages import error_location
from toyexp.base.validators import require_range
from toyexp.interfaces.averaging import Averaged
from toyexp.interfaces.dataset import InputSpec
from toyexp.interfaces.model import Model, TensorSpec
from toyexp.interfaces.objective import CrossEntropy, Objective
from toyexp.interfaces.ops import AdaptedWeight, LowRank, Params, Tensor
from toyexp.interfaces.optimiser import EVAL_OFFSET, AdamW, Group, Optimiser, Rule, check_rule
from toyexp.interfaces.phases import Phased
from toyexp.interfaces.values import Values

EMBEDDING = "token_embd.weight"  # name of the table of token embeddings
NOISE = "token_embd.noise"  # batch array [T, d] of the noise of `Plan.neftune`


@dataclass(frozen=True)
class PlanTensor:
    """A tensor of a plan, with its shape, the source of its initial values, and whether training changes it."""

    name: str
    shape: tuple[int, ...]
    values: Values
    trainable: bool = True
    lr_scale: float = 1.0  # factor of the tensor's learning rate; see TensorSpec
    turns: tuple[int, ...] = ()  # 1: trains in this step, 0: does not; repeated over all steps. (): trains in each
    keeps: tuple[str, ...] = ()  # arrays of its shape for `Recipe.edit`; elements do not train where `frozen` is 1

    @classmethod
    def from_spec(cls, spec: TensorSpec, values: Values | None = None, trainable: bool = True) -> PlanTensor:
        """Return a model's tensor with the initial values of its spec, or with `values`."""
        return cls(
            spec.name, spec.shape, spec.init if values is None else values, trainable and spec.trainable, spec.lr_scale
        )

    @property
    def has_weight_decay(self) -> bool:
        """Whether weight decay applies: True for matrices, False for norms, biases and the numbers of SSM heads."""
        return len(self.shape) > 1 and not self.name.endswith(("_norm.weight", ".ssm_a", ".ssm_d"))

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class LoraAdapter:
    """A low-rank update of the linear layer or embedding with the weight `target`.

    Its matrices A and B are the plan's tensors `<target>.lora_a` and `<target>.lora_b`; `LowRank` gives their shapes.
    """

    target: str
    scale: float
    dropout: float = 0.0  # probability of zeroing an element of the adapter's input in training
    dora: bool = False  # the rows of the sum are scaled to trained magnitudes (DoRA); see LowRank

    @property
    def tensors(self) -> list[str]:
        """Names of the plan's tensors A and B; with `dora` also of the magnitudes, and of the norms of W's rows."""
        further = (f"{self.target}.lora_magnitude", f"{self.target}.lora_norm") if self.dora else ()
        return [*lora_names(self.target), *further]

    @property
    def is_embedding(self) -> bool:
        """Whether the target is the table of token embeddings."""
        return self.target == EMBEDDING

    def merge(self, weight: np.ndarray, tensors: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return the weight with the update added, computed in float64; `tensors` holds the adapter's, by name."""
        a, b = (tensors[name].astype("float64") for name in lora_names(self.target))
        merged = weight + self.scale * (a @ b.T if self.is_embedding else b @ a)
        if self.dora:
            merged *= (tensors[self.tensors[2]] / (merged**2).sum(1) ** 0.5)[:, None]
        return merged.astype("float32")

    @property
    def mask(self) -> str:
        """Name of the batch array with the adapter's dropout mask; toyexp.batching.tokens.Dropout adds the array."""
        return f"{self.target}.dropout"


@dataclass(frozen=True)
class Lens:
    """Matrix `projection` [d_model, d_table] that maps rows of the embedding table `target` to the model's width.

    Both fields are names of tensors of the plan.
    """

    target: str
    projection: str


@dataclass(frozen=True)
class Plan:
    """Complete description of a training run. It is the same for every engine and file format.

    Raises UserError if tensors, adapters, inputs and groups contradict each other.
    """

    model: Model
    tensors: tuple[PlanTensor, ...]
    inputs: Mapping[str, InputSpec]  # batch arrays by name, incl. float `weights` and what model and objective read
    rows: int  # examples in a micro-batch
    accumulate: int = 1  # micro-batches per step
    grad_clip: float = 0.0  # maximum global gradient norm; 0: no clipping
    adapters: tuple[LoraAdapter | Lens, ...] = ()
    seed: int = 0
    skip_nonfinite: bool = False  # skip steps with a NaN or infinite loss or gradient
    groups: tuple[Group, ...] = ()  # parameter groups; () means one AdamW rule for all tensors
    objective: Objective = field(default_factory=CrossEntropy)  # what a step minimises
    neftune: float = 0.0  # in training, embeddings get uniform noise of at most neftune / sqrt(T d) (NEFTune)

    def __post_init__(self) -> None:
        names = Counter(t.name for t in self.tensors)
        if repeated := [name for name, count in names.items() if count > 1]:
            raise UserError(f"plan: tensor {min(repeated)} is listed twice")
        for adapter in self.adapters:
            needed = [adapter.target]
            needed += [adapter.projection] if isinstance(adapter, Lens) else adapter.tensors
            for name in needed:
                if name not in names:
                    raise UserError(f"plan: the adapter of {adapter.target} needs tensor {name}, which is missing")
            if isinstance(adapter, LoraAdapter) and adapter.dropout and adapter.mask not in self.inputs:
                raise UserError(f"plan: the dropout of {adapter.target} needs input {adapter.mask}, which is missing")
        for tensor in self.tensors:
            if not 0 <= tensor.lr_scale < math.inf:
                raise UserError(f"plan: {tensor.name} has lr_scale={tensor.lr_scale}; must be a finite number >= 0")
        if len({len(t.turns) for t in self.tensors if t.turns}) > 1:
            raise UserError("plan: `turns` of its tensors differ in length; give each the same number of turns")
        require_range("plan", self, rows="[1,inf)", accumulate="[1,inf)", grad_clip="[0,inf)")
        dtype = self.inputs["weights"].dtype if "weights" in self.inputs else "missing"
        if not dtype.startswith("float"):
            raise UserError(f"plan: input weights must have a dtype of kind float; it is {dtype}")
        require_range("objective", self.objective, auxiliary="[0,inf)")
        if self.objective.auxiliary and not self.model.has_auxiliary:
            given = f"objective.auxiliary={self.objective.auxiliary}"
            raise UserError(f"{given}: model={self.model.name} has no auxiliary loss; leave objective.auxiliary out")
        self.objective.check_inputs(self.model, self.inputs)
        self._check_rows()
        names_in_groups = [name for group in self.groups for name in group.tensors]
        if self.groups and sorted(names_in_groups) != sorted(t.name for t in self.trainable):
            raise UserError("plan: its groups must hold each trainable tensor exactly once")

    def _check_rows(self) -> None:
        """Raise UserError if micro-batches would separate rows that the objective compares with each other."""
        together, name = self.objective.rows_together, self.objective.name
        if together == 0 and self.accumulate > 1:
            raise UserError(f"optim.accumulate={self.accumulate}: objective={name} compares all rows of a batch; use 1")
        if together and self.rows % together:
            raise UserError(f"objective={name}: needs micro-batches of a multiple of {together} rows, not {self.rows}")

    def with_frozen(self, specs: Iterable[TensorSpec]) -> Plan:
        """Return the plan with further tensors that are not trained, such as those of its objective."""
        return replace(self, tensors=(*self.tensors, *(PlanTensor.from_spec(t, trainable=False) for t in specs)))

    def tensor(self, name: str) -> PlanTensor:
        """Return a tensor by name. Raise KeyError if the plan does not have it."""
        for tensor in self.tensors:
            if tensor.name == name:
                return tensor
        raise KeyError(name)

    @cached_property
    def trainable(self) -> tuple[PlanTensor, ...]:
        """The tensors that training changes."""
        return tuple(t for t in self.tensors if t.trainable)

    @property
    def turns(self) -> int:
        """Number of turns after which the pattern of trained tensors repeats; 0 if all tensors train in every step."""
        return max((len(t.turns) for t in self.trainable), default=0)

    @cached_property
    def updates(self) -> tuple[Group, ...]:
        """The parameter groups of the trainable tensors, in the order of the vectors that `numbers` returns."""
        return self.groups or group_tensors(self.trainable, (AdamW(),))

    def numbers(self, step: int, lr: float, factors: Mapping[str, float] | None = None) -> tuple[np.ndarray, ...]:
        """Return, for each group of `updates`, a vector of its rule's scalars at the 0-based `step`.

        `lr` is the run's learning rate. `factors` maps the name of a setting to the factor by which it is multiplied.
        """
        return tuple(group.numbers(step, lr, factors) for group in self.updates)

    def scaled_settings(self, factors: Mapping[str, float]) -> dict[str, float]:
        """Multiply each setting in `factors` by its factor, and return the new values, keyed by setting.

        If groups have different values for a setting, return the largest. Settings that no group can scale are left
        out.
        """
        base = {name: [group.base_value(name) for group in self.updates if name in group.scalable] for name in factors}
        return {name: max(values) * factors[name] for name, values in base.items() if values}

    def slots(self, tensor: PlanTensor) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of a trainable tensor's optimiser state, keyed by the state's name, such as "m"."""
        return self._rules[tensor.name].slots(tensor.shape)

    @cached_property
    def _rules(self) -> Mapping[str, Rule]:
        return {name: group.rule for group in self.updates for name in group.tensors}

    def initial_values(self, tensor: PlanTensor) -> np.ndarray:
        """Return the initial float32 values of `tensor`. Raise UserError if they do not have the tensor's shape."""
        array = tensor.values.draw(tensor.shape, self.seed, tensor.name)
        if array.shape != tensor.shape:
            raise UserError(f"{tensor.name}: expected shape {list(tensor.shape)}, got {list(array.shape)}")
        return array

    @property
    def dropout_adapters(self) -> tuple[LoraAdapter, ...]:
        """The adapters with dropout."""
        return tuple(a for a in self.adapters if isinstance(a, LoraAdapter) and a.dropout)

    @property
    def has_dora(self) -> bool:
        """Whether its adapters are DoRA."""
        return any(isinstance(adapter, LoraAdapter) and adapter.dora for adapter in self.adapters)

    @property
    def alphas(self) -> dict[str, float]:
        """The alpha (scale * rank) of each LoRA adapter, keyed by the weight that it changes."""
        adapters = [a for a in self.adapters if isinstance(a, LoraAdapter)]
        # alpha / rank * rank may differ from alpha in the last bits.
        return {a.target: float(f"{a.scale * self.tensor(a.tensors[1]).shape[1]:.12g}") for a in adapters}

    def adapter_file(self, values: Mapping[str, np.ndarray]) -> tuple[float, dict[str, np.ndarray]]:
        """Return the alpha of an adapter file, and the matrices of the adapters, by name, as the file stores them.

        A file has only one alpha. If an adapter has another one, its matrix B is multiplied by the ratio.
        """
        tensors, alpha = dict[str, Any](), Counter(self.alphas.values()).most_common(1)[0][0]
        for (a, b), own in ((lora_names(target), own) for target, own in self.alphas.items()):
            tensors |= {a: values[a], b: values[b] if own == alpha else (values[b] * (own / alpha)).astype("float32")}
        return alpha, tensors

    @cached_property
    def dropout_shares(self) -> Mapping[str, float]:
        """The probability of dropping an element, for each dropout mask of a training batch, keyed by its name."""
        masks = {name: share for name, (_, share) in self.model.masks().items() if name in self.inputs}
        return {adapter.mask: adapter.dropout for adapter in self.dropout_adapters} | masks

    def params(self, values: Mapping[str, Tensor], batch: Mapping[str, Tensor] | None = None) -> Params:
        """Return the tensors `values` in the form that `Model.forward` reads: each adapter is attached to its weight.

        If an adapter has dropout, `batch` is required: it contains the dropout masks.
        """
        params: dict[str, Any] = dict(values)
        for adapter in self.adapters:
            base = values[adapter.target]
            if isinstance(adapter, Lens):
                params[adapter.target] = AdaptedWeight(base, lens=values[adapter.projection])
            else:
                a, b, *dora = (values[name] for name in adapter.tensors)
                dropout = None
                if adapter.dropout:
                    if batch is None:
                        raise UserError(f"the adapter of {adapter.target} has dropout; pass the batch to plan.params()")
                    dropout = batch[adapter.mask]
                params[adapter.target] = AdaptedWeight(base, low_rank=LowRank(a, b, adapter.scale, dropout, *dora))
        if batch is not None and NOISE in batch:
            table = params[EMBEDDING]
            table = table if isinstance(table, AdaptedWeight) else AdaptedWeight(table)
            params[EMBEDDING] = replace(table, noise=batch[NOISE])
        return Params(params)


def group_tensors(
    tensors: Sequence[PlanTensor],
    rules: Sequence[Rule],
    choose_settings: Callable[[PlanTensor, Rule], tuple[float, float]] = lambda tensor, rule: (0.0, 1.0),
) -> tuple[Group, ...]:
    """Return parameter groups: the tensors of a group share a rule, a weight decay and a learning-rate ratio.

    Each tensor is updated by the first of `rules` that accepts it. `choose_settings(tensor, rule)` returns two numbers:
    the tensor's weight decay (ignored for norms and biases), and a factor of the run's learning rate. This factor is
    multiplied by the tensor's `lr_scale`. Raise UserError for a tensor that no rule accepts.
    """
    members: dict[tuple[int, bool, float, float, tuple[int, ...], tuple[str, ...]], list[str]] = {}
    for t in tensors:
        index = next((i for i, rule in enumerate(rules) if rule.takes(t.name, t.shape)), None)
        if index is None:
            raise UserError(f"optim: no rule of this optimiser takes the tensor {t.name} {list(t.shape)}")
        decay, lr_scale = choose_settings(t, rules[index])
        decay = decay if t.has_weight_decay else 0.0
        key = (index, not t.has_weight_decay, decay, lr_scale * t.lr_scale, t.turns, t.keeps)
        members.setdefault(key, []).append(t.name)
    # A rule's tensors with weight decay come first, so that they are contiguous if an engine joins its tensors.
    return tuple(
        Group(Phased(rules[i], turns, keeps) if turns or keeps else rules[i], tuple(names), decay, lr_scale)
        for (i, _, decay, lr_scale, turns, keeps), names in sorted(members.items())
    )


def apply_optimiser(plan: Plan, optimiser: Optimiser, lr: float) -> Plan:
    """Return the plan with its trainable tensors divided into the optimiser's parameter groups.

    Tensors that `optim.groups` freezes become untrainable. Raise UserError if a pattern of `optim.groups` matches no
    trainable tensor, or if no tensor is left to train.
    """
    names = [t.name for t in plan.trainable]
    for pattern in optimiser.groups:
        if names and not any(fnmatchcase(name, pattern) for name in names):
            key = f"optim.groups: {printable(pattern)}"
            frozen_names = [t.name for t in plan.tensors if not t.trainable and fnmatchcase(t.name, pattern)]
            if frozen_names:
                suffix = f" and {len(frozen_names) - 1} more" if len(frozen_names) > 1 else ""
                raise UserError(f"{key}: the recipe freezes {frozen_names[0]}{suffix}; remove this pattern")
            hint = suggest(pattern, names) if len(names) < 20 else f"a trainable tensor is {names[0]}"
            raise UserError(f"{key}: matches no trainable tensor; {hint}")
    frozen = {name for name in names if optimiser.find_group(name)[1].get("frozen")}
    if names and frozen.issuperset(names):
        raise UserError("optim.groups: freezes every tensor, so nothing is left to train; unfreeze some")
    tensors = tuple(replace(t, trainable=False) if t.name in frozen else t for t in plan.tensors)

    def choose_settings(tensor: PlanTensor, rule: Rule) -> tuple[float, float]:
        settings = optimiser.find_group(tensor.name)[1]
        base = settings.get("lr", optimiser.base_lr(rule))
        if base is not None and not lr:
            problem = f"{tensor.name} has its own lr={base:g}, which is stored as a multiple of lr"
            raise UserError(f"lr=0: must be above 0, because {problem}; type lr=0.001")
        return settings.get("weight_decay", optimiser.weight_decay), 1.0 if base is None else base / lr

    trainable = [t for t in tensors if t.trainable]
    groups, shapes = group_tensors(trainable, optimiser.rules(), choose_settings), {t.name: t.shape for t in trainable}
    if optimiser.ema:
        if any(EVAL_OFFSET in group.rule.slots(shapes[name]) for group in groups for name in group.tensors):
            raise UserError(f"optim.ema={optimiser.ema:g}: optim={optimiser.name} has its own average; set ema to 0")
        averaged = {id(group.rule): Averaged(group.rule, optimiser.ema) for group in groups}  # groups share a rule
        groups = tuple(replace(group, rule=averaged[id(group.rule)]) for group in groups)
    try:
        for group in groups:
            _check_group(group, shapes, lr)
    except UserError as error:
        raise UserError(f"optim.{optimiser.name}: {error}{error_location(error, of_plugins=True)}") from error
    return replace(plan, tensors=tensors, groups=groups)


def idle_group_warnings(plan: Plan, optimiser: Optimiser) -> Iterator[str]:
    """Yield a warning for each entry of `optim.groups` that has no effect in `plan`."""
    affected = [t for t in plan.tensors if t.trainable or optimiser.find_group(t.name)[1].get("frozen")]
    for pattern, settings in optimiser.groups.items():
        key = f"optim.groups: {printable(pattern)}"
        tensors = [t for t in affected if fnmatchcase(t.name, pattern)]
        patterns = [optimiser.find_group(t.name)[0] for t in tensors]
        if patterns and pattern not in patterns:
            yield f"{key}: has no effect: {printable(patterns[0])} matches its tensors first; reverse their order"
        elif settings.get("weight_decay") and not any(t.has_weight_decay for t in tensors):
            yield f"{key}: weight_decay={settings['weight_decay']} has no effect: norms and biases never decay"


def sign_flip_warnings(plan: Plan, lr: float) -> Iterator[str]:
    """Yield a warning for each parameter group for which lr * weight_decay is above 1.

    In such a group, weight decay would flip the sign of every weight at each step.
    """
    for group in plan.updates:
        rate = lr * group.lr_scale
        if (factor := 1 - rate * group.weight_decay) < 0:
            more = f" and {len(group.tensors) - 1} more" if group.tensors[1:] else ""
            yield (
                f"weight_decay={group.weight_decay:g} at lr={rate:g}: each step multiplies {group.tensors[0]}{more} by "
                f"{factor:g}; lower one of them"
            )


def describe_adapters(plan: Plan) -> str:
    """Return text such as "LoRA r=8 on q,v", or "" if the plan has no LoRA adapters."""
    names = [adapter.target for adapter in plan.adapters if isinstance(adapter, LoraAdapter)]
    ranks = {plan.tensor(lora_names(name)[1]).shape[1] for name in names}
    layers = (re.sub(r"^(v\.)?blk\.\d+\.|\.weight$", "", name) for name in names)
    kinds = dict.fromkeys(
        re.sub(r"attn_out\w*", "o", layer).replace("attn_", "").replace("ffn_", "") for layer in layers
    )
    kind, sizes = "DoRA" if plan.has_dora else "LoRA", ",".join(map(str, sorted(ranks)))
    return f"{kind} r={sizes} on {','.join(kinds)}" if names else ""


def export_tensors(plan: Plan, values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the model's tensors, keyed by name, with adapters merged into the weights that they adapt.

    `values` are the tensors of the run, including those of adapters. An embedding E with a lens W becomes E' = E W^T; a
    weight W with a LoRA pair becomes W' = W + scale B A, with DoRA normalised and scaled.
    """
    out = dict(values)
    for adapter in plan.adapters:
        if isinstance(adapter, Lens):
            lens = out.pop(adapter.projection).astype("float64")
            out[adapter.target] = (out[adapter.target].astype("float64") @ lens.T).astype("float32")
        else:
            out[adapter.target] = adapter.merge(out[adapter.target], out)
    return {spec.name: out[spec.name] for spec in plan.model.tensors()}


def inherited_metadata(plan: Plan) -> Mapping[str, Any]:
    """Return the metadata of the file from which the plan's initial values are read.

    Return an empty mapping if there is no such file, or if there are several with different metadata.
    """
    sources = [metadata for tensor in plan.tensors if (metadata := tensor.values.export_metadata())]
    return sources[0] if sources and all(other == sources[0] for other in sources) else {}


def _check_group(group: Group, shapes: Mapping[str, tuple[int, ...]], lr: float) -> None:
    """Raise UserError if `numbers`, `slots` or `update` of the group's rule are invalid or fail on some engine."""
    numbers = group.rule.numbers(0, lr, 0.0)
    values = [*numbers.values()] if isinstance(numbers, Mapping) else []
    if not values or not all(isinstance(n, int | float) and math.isfinite(n) for n in values):
        raise UserError(f"numbers() returned {printable(repr(numbers))}; expected finite numbers by name")
    for shape in {shapes[name] for name in group.tensors}:
        check_rule(group.rule, shape)


def lora_names(target: str) -> list[str]:
    """Return the names of the matrices A and B of the adapter on `target`, as llama.cpp's adapter files name them."""
    return [f"{target}.lora_a", f"{target}.lora_b"]


def adapter_tensors(plan: Plan, with_dora: bool = False) -> list[str]:
    """Return the names of the plan's trained LoRA tensors; none if no adapter file holds all that the plan trains.

    No file holds tensors besides adapters; `with_dora` says whether it holds DoRA.
    """
    names = [n for a in plan.adapters if isinstance(a, LoraAdapter) for n in a.tensors[:3]]
    is_complete = {t.name for t in plan.trainable} <= {*names}
    return names if is_complete and (with_dora or not plan.has_dora) else []


def adapter_digest(pairs: Mapping[str, np.ndarray], merged: str = "") -> str:
    """Return a digest of an adapter's tensors `pairs`: 16 hex digits.

    If other adapters were merged into this adapter's base model before, `merged` holds their digests, separated by
    commas. The result then begins with these digests.
    """
    digest = hashlib.sha256()
    for name in sorted(pairs):
        digest.update(name.encode() + pairs[name].astype("float32", copy=False).tobytes())
    return ",".join(filter(None, (merged, digest.hexdigest()[:16])))
