"""How a gradient changes a tensor: rules that are written once, and AdamW in its two modes.

A `Rule` names the state it keeps of each tensor, the numbers that change from step to step, and its formula over
`Arithmetic`. Every engine runs the formula; one that has a fused form of it registers that under the rule's name. An
`Optimiser` is the plugin behind `optim=<name>`: its settings, and the rules they describe.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Self, final

from toyexp.base.errors import RunFailed, UserError, printable, suggest
from toyexp.base.validators import require_float32, require_range
from toyexp.interfaces.arithmetic import Arithmetic, Shaped, Shapes, is_shape
from toyexp.interfaces.ops import Tensor

if TYPE_CHECKING:
    import numpy as np

FROM_SCRATCH = "from_scratch"
LORA = "lora"
MODES = (FROM_SCRATCH, LORA)
DEFAULT_BETA2 = {FROM_SCRATCH: 0.95, LORA: 0.999}


class Rule(ABC):
    """How a step changes one tensor: subclass it as a dataclass whose fields are what the formula is set by."""

    plugin_kind: ClassVar[str] = "optim"  # by which its errors are told
    elementwise: ClassVar[bool] = False  # each number by itself: an engine may take many tensors as one long vector

    @abstractmethod
    def slots(self, shape: tuple[int, ...]) -> Mapping[str, tuple[int, ...]]:
        """The state it keeps of a tensor of that shape, by name; all of it is zeros before the first step."""

    @abstractmethod
    def numbers(self, step: int, lr: float, weight_decay: float) -> Mapping[str, float]:
        """What the formula reads at the 0-based `step`: the same names in the same order every time.

        `lr` is the rate of this step, as the schedule has it; `weight_decay` is 0 for norms and biases.
        """

    @abstractmethod
    def update(
        self, ops: Arithmetic, w: Tensor, g: Tensor, state: Mapping[str, Tensor], n: Mapping[str, Tensor]
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """The tensor `w` after a step along its gradient `g`, and its new state; `n` holds the step's numbers."""

    def names(self) -> Sequence[str]:
        """The names of its numbers."""
        return tuple(self.numbers(0, 0.0, 0.0))

    def check(self) -> None:  # noqa: B027 - optional on purpose: a formula may take any number
        """Raises UserError for values that cannot work; also asked where a schedule has scaled one of them."""

    @final
    def results(
        self, ops: Arithmetic, w: Tensor, g: Tensor, state: Mapping[str, Tensor], n: Mapping[str, Tensor]
    ) -> list[Tensor]:
        """The values of `w` after a step, then those of each slot in order; none is what another of them replaces."""
        new, new_state = self.update(ops, w, g, state, n)
        before = (w, *state.values())
        found = [new, *(new_state[slot] for slot in state)]
        return [ops.scale(x, 1.0) if any(x is b for b in before) else x for x in found]

    def takes(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether it is for the tensor of that name; one that is not goes to the optimiser's next rule."""
        return True

    @property
    def fused_kernel(self) -> str | None:
        """The name by which engines know a kernel that computes just this, if there is such a kernel."""
        return None


@dataclass(frozen=True)
class Group:
    """Trainable tensors that a step changes alike."""

    rule: Rule
    tensors: tuple[str, ...]
    weight_decay: float = 0.0
    lr_scale: float = 1.0  # its learning rate by the run's

    def numbers(self, step: int, lr: float, factors: Mapping[str, float] | None = None) -> np.ndarray:
        """The rule's numbers at the 0-based `step`, in its order; `factors` scale its settings of those names.

        Raises RunFailed where the rule gives numbers of other names than before the first step.
        """
        rule, decay = self.rule, self.weight_decay
        if factors:
            rule, decay = self.scaled(factors), decay * factors.get("weight_decay", 1.0)
        found = rule.numbers(step, lr * self.lr_scale, decay)
        if found.keys() != set(self._names):
            name = getattr(self.rule, "name", type(self.rule).__name__)
            now, before = ", ".join(map(str, found)), ", ".join(self._names)
            raise RunFailed(f"optim.{name}: its numbers at step {step + 1} are {now}, and were {before}")
        import numpy as np

        return np.array([found[name] for name in self._names], np.float64)

    def scaled(self, factors: Mapping[str, float]) -> Rule:
        """The rule with its own settings multiplied by the factors of their names."""
        own = {k: getattr(self.rule, k) * f for k, f in factors.items() if k in self.scalable - {"weight_decay"}}
        return dataclasses.replace(self.rule, **own) if own else self.rule  # type: ignore[type-var]

    def setting(self, name: str) -> float:
        """What a schedule of that name scales: the group's own decay, or a setting of the rule."""
        return float(self.weight_decay if name == "weight_decay" else getattr(self.rule, name))

    @cached_property
    def scalable(self) -> frozenset[str]:
        """What of the rule a schedule can scale."""
        return frozenset(scalable(self.rule))

    @cached_property
    def _names(self) -> tuple[str, ...]:
        return tuple(self.rule.names())


def check_rule(rule: Rule, shape: tuple[int, ...]) -> None:
    """Raises UserError for a rule whose state or update of a tensor of that shape is not what every engine can take."""
    slots = rule.slots(shape)
    if not isinstance(slots, Mapping) or not all(is_shape(s) for s in slots.values()):
        raise UserError(f"its slots of {list(shape)} are {slots!r}; it must give a shape by name")
    if [*slots.items()] != [*(again := rule.slots(shape)).items()]:
        what = f"its slots of {list(shape)} are {slots!r}, and {again!r} when asked again"
        raise UserError(f"{what}; no checkpoint of them could be resumed")
    if rule.elementwise and any(tuple(s) != shape for s in slots.values()):
        raise UserError(f"its slots of {list(shape)} are {slots!r}, and it says that it is elementwise")
    state = {slot: Shaped(tuple(s)) for slot, s in slots.items()}
    n = dict.fromkeys(rule.names(), Shaped((1,)))
    found = rule.update(Shapes(rule.elementwise), Shaped(shape), Shaped(shape), state, n)
    if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[1], Mapping):
        raise UserError("its update must give two things, the tensor and its state by name")
    wanted = {"the tensor": shape, **{f"slot {slot}": x.shape for slot, x in state.items()}}
    given = {"the tensor": found[0], **{f"slot {slot}": x for slot, x in found[1].items()}}
    for name in wanted | given:
        got = list(x.shape) if isinstance(x := given.get(name), Shaped) else "no tensor"
        if (expected := wanted.get(name, ())) != tuple(got):
            raise UserError(f"its update of {list(shape)} gives {got} for {name}, expected {list(expected) or 'none'}")


def scalable(rule: Rule) -> set[str]:
    """The settings of a rule that a schedule can scale: weight_decay, and those that a step's numbers follow from."""
    values = {f.name: getattr(rule, f.name) for f in dataclasses.fields(rule)}  # type: ignore[arg-type]
    others = {k: dataclasses.replace(rule, **{k: v / 2 or 0.5}) for k, v in values.items() if isinstance(v, float)}  # type: ignore[type-var]
    usual = dict(rule.numbers(3, 0.1, 0.1))
    return {"weight_decay"} | {k for k, other in others.items() if dict(other.numbers(3, 0.1, 0.1)) != usual}


@dataclass
class AdamW(Rule):
    """AdamW; use `for_from_scratch()` or `for_lora()`, or set `mode`.

    Every engine computes exactly

        m = b1 m + (1 - b1) g
        v = b2 v + (1 - b2) g^2
        w = w (1 - lr wd) - lr (m s5) / (sqrt(v s6) + eps)

    from hp = [lr, b1, b2, eps, wd, s5, s6] (ggml's OPT_STEP_ADAMW). The modes differ in s5 and s6 and must never be
    mixed up: FROM_SCRATCH feeds the constant betas; LORA feeds the bias corrections 1/(1 - b^t), which makes it
    torch.optim.AdamW (Loshchilov and Hutter 2019).
    """

    elementwise: ClassVar[bool] = True

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    mode: str | None = None

    @classmethod
    def for_from_scratch(cls) -> AdamW:
        """Constant betas in slots 5 and 6: recipes scratch, warm and vit_tiny."""
        return cls(mode=FROM_SCRATCH)

    @classmethod
    def for_lora(cls) -> AdamW:
        """Bias correction in slots 5 and 6, beta2 0.999: recipes lora and full, model gpt2."""
        return cls(beta2=DEFAULT_BETA2[LORA], mode=LORA)

    def hp_for_step(self, step: int) -> np.ndarray:
        """The seven numbers for the loop's 0-based `step`; UserError while the mode is unset, or is none."""
        import numpy as np

        return np.array([*self.numbers(step, self.lr, self.weight_decay).values()])

    def check(self) -> None:
        """Raises UserError for values that cannot work.

        One is a beta of 0 in mode from_scratch, which multiplies its moment by it: nothing would move (beta1), or each
        step divide by eps alone (beta2).
        """
        require_range("optim", self, beta1="[0,1)", beta2="[0,1)", eps="(0,inf)")
        for name in ("beta1", "beta2"):
            if self.mode == FROM_SCRATCH and getattr(self, name) == 0:
                raise UserError(f"optim.{name}=0: {FROM_SCRATCH} multiplies a moment by it; choose: optim.mode={LORA}")

    @property
    def fused_kernel(self) -> str:
        """adamw."""
        return "adamw"

    def names(self) -> Sequence[str]:
        """Of the seven, also while the mode is unset."""
        return ("lr", "beta1", "beta2", "eps", "weight_decay", "slot5", "slot6")

    def slots(self, shape: tuple[int, ...]) -> Mapping[str, tuple[int, ...]]:
        """The two moments."""
        return {"m": shape, "v": shape}

    def numbers(self, step: int, lr: float, weight_decay: float) -> Mapping[str, float]:
        """The seven; UserError while the mode is unset: those of the other one would silently train otherwise."""
        if self.mode not in MODES:
            raise UserError(f"AdamW: mode={self.mode}: {suggest(str(self.mode), MODES)}")
        slot5, slot6 = self.beta1, self.beta2
        if self.mode == LORA:
            slot5, slot6 = 1 / (1 - self.beta1 ** (step + 1)), 1 / (1 - self.beta2 ** (step + 1))
        return {
            "lr": lr, "beta1": self.beta1, "beta2": self.beta2, "eps": self.eps, "weight_decay": weight_decay,
            "slot5": slot5, "slot6": slot6,
        }  # fmt: skip

    def update(
        self, ops: Arithmetic, w: Tensor, g: Tensor, state: Mapping[str, Tensor], n: Mapping[str, Tensor]
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """The formula above."""
        m, v = ops.blend(g, state["m"], n["beta1"]), ops.blend(ops.square(g), state["v"], n["beta2"])
        root = ops.shift(ops.sqrt(ops.scale(v, n["slot6"])), n["eps"])
        along = ops.add(ops.scale(w, n["weight_decay"]), ops.div(ops.scale(m, n["slot5"]), root))
        return ops.sub(w, ops.scale(along, n["lr"])), {"m": m, "v": v}


GROUP_SETTINGS = ("lr", "weight_decay", "frozen")  # what a group of `optim.groups` may have of its own


@dataclass
class Optimiser(Rule):
    """Base of all optimisers: subclass it as a dataclass whose fields are its settings."""

    name: ClassVar[str]  # what `optim=` takes

    weight_decay: float = 0.0  # decoupled decay of matrices; norms and biases never decay
    grad_clip: float = 0.0  # largest global norm of the gradient; 0: no clipping
    accumulate: int = 1  # micro-batches a batch is cut into; lowers memory, not the result
    groups: dict[str, Any] = field(default_factory=dict)  # {blk.*.attn_*: {lr: 0.0001, weight_decay: 0, frozen: false}}

    def check(self) -> None:
        """Raises UserError for values that cannot work; what all optimisers have is checked in any case."""
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if isinstance(value, float):
                require_float32(f"optim.{f.name}", value)
        require_range("optim", self, weight_decay="[0,inf)", grad_clip="[0,inf)", accumulate="[1,inf)")
        for pattern, own in self.groups.items():
            _check_group(pattern, own)

    def find_group(self, tensor: str) -> tuple[str, Mapping[str, Any]]:
        """The first pattern of `groups` that fits a tensor, and what it gives it; nothing where none does."""
        return next(((p, own) for p, own in self.groups.items() if fnmatchcase(tensor, p)), ("", {}))

    def with_mode(self, mode: str) -> Self:
        """The same with what model and recipe decide: `mode` is the one they want of AdamW."""
        return self

    def rules(self) -> Sequence[Rule]:
        """What changes the tensors: each tensor goes to the first of them that takes it."""
        return (self,)

    def base_lr(self, rule: Rule) -> float | None:
        """The base learning rate of one of its rules, where that is not the run's.

        A setting that ends in `_lr` is named where a loss blows up and it is higher than the run's.
        """
        return None

    @property
    def title(self) -> str:
        """What it is called before a run."""
        return self.name

    def describe(self, lr: float) -> dict[str, Any]:
        """What run_start records of it."""
        return {"name": self.name, "lr": lr, **dataclasses.asdict(self)}


def _check_group(pattern: str, own: Any) -> None:
    key = f"optim.groups: {printable(pattern)}"
    if not isinstance(own, Mapping):
        raise UserError(f"{key}: takes settings in braces, such as {{{pattern}: {{lr: 0.001}}}}")
    for name, value in own.items():
        if name not in GROUP_SETTINGS:
            raise UserError(f"{key} has no setting {printable(str(name))}; {suggest(str(name), GROUP_SETTINGS)}")
        if name == "frozen":
            if not isinstance(value, bool):
                raise UserError(f"{key}: frozen={printable(str(value))}: must be true or false")
        elif isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            text = "; it is a text: leave out the quotes" if isinstance(value, str) else ""
            raise UserError(f"{key}: {name}={printable(repr(value))}: must be a finite number from 0{text}")
        elif own.get("frozen") is True:
            raise UserError(f"{key}: {name}={value}: has no effect with frozen=true; leave one of them out")
        else:
            require_float32(f"{key}: {name}", value)
