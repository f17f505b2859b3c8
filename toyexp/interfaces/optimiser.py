"""Base classes of optimisers and their update rules, and AdamW in its two modes.

A `Rule` declares the state arrays that it keeps for each tensor, and the scalars that can change from step to step. Its
update formula is written with the operations of `Arithmetic`, so every engine can execute it. An engine that has the
fused kernel named by a rule's `fused_kernel` uses this kernel instead of the formula. An `Optimiser` is the plugin that
`optim=<name>` selects: it has the settings, and returns the rules.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, ClassVar, Self, final

from toyexp.base.errors import RunFailed, UserError, printable, suggest
from toyexp.base.lazy import numpy as np
from toyexp.base.validators import require_float32, require_range
from toyexp.interfaces.arithmetic import Arithmetic, Shaped, Shapes, is_shape
from toyexp.interfaces.ops import Tensor

FROM_SCRATCH = "from_scratch"
LORA = "lora"
MODES = (FROM_SCRATCH, LORA)
EVAL_OFFSET = "eval_offset"  # state array that evaluations and exports add to the weights
DEFAULT_BETA2 = {FROM_SCRATCH: 0.95, LORA: 0.999}


class Rule(ABC):
    """Base class of update rules: subclass it as a dataclass whose fields are hyperparameters.

    A rule updates one tensor at a time.
    """

    plugin_kind: ClassVar[str] = "optim"  # kind of plugin that error messages name
    elementwise: ClassVar[bool] = False  # True: the update has no reductions, so an engine may join tensors

    @abstractmethod
    def slots(self, shape: tuple[int, ...]) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of each state array of a tensor with this shape, keyed by the array's name, such as "m".

        State arrays start as zeros. If one is named `eval_offset` and has the tensor's shape, then evaluations and
        exports use the weights plus this array.
        """

    @abstractmethod
    def numbers(self, step: int, lr: float, weight_decay: float) -> Mapping[str, float]:
        """Return the scalars that the update formula reads at the 0-based `step`, keyed by name.

        Every call must return the same names in the same order. `lr` is the learning rate of this step, after the
        schedule; `weight_decay` is 0 for norms and biases.
        """

    @abstractmethod
    def update(
        self, ops: Arithmetic, w: Tensor, g: Tensor, state: Mapping[str, Tensor], n: Mapping[str, Tensor]
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the new values of tensor `w` after one step, and its new state.

        `g` is the gradient. `state` holds the state arrays, and `n` holds the scalars that `numbers` returned; both are
        keyed by name.
        """

    def names(self) -> Sequence[str]:
        """Return the names of the scalars that `numbers` returns, in order."""
        return tuple(self.numbers(0, 0.0, 0.0))

    def check(self) -> None:  # noqa: B027 - optional on purpose: a formula may take any number
        """Raise UserError for invalid settings. Also called with the settings that a schedule has scaled."""

    @final
    def results(
        self, ops: Arithmetic, w: Tensor, g: Tensor, state: Mapping[str, Tensor], n: Mapping[str, Tensor]
    ) -> list[Tensor]:
        """Return the result of one step as a list: the new `w`, and the new state arrays in the order of `state`.

        No result shares memory with an argument.
        """
        new, new_state = self.update(ops, w, g, state, n)
        before = (w, *state.values())
        after = [new, *(new_state[slot] for slot in state)]
        return [ops.scale(x, 1.0) if any(x is b for b in before) else x for x in after]

    def takes(self, name: str, shape: tuple[int, ...]) -> bool:
        """Return True if the rule accepts the tensor `name`. If not, toyexp asks the optimiser's next rule."""
        return True

    @property
    def settings_rule(self) -> Rule:
        """The rule whose fields are the settings: this rule or, if it wraps another rule, the wrapped one."""
        return self

    def replace_settings(self, changes: Mapping[str, Any]) -> Rule:
        """Return the rule with other values for the settings named in `changes`."""
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]

    @property
    def fused_kernel(self) -> str | None:
        """Name of the fused kernel with which an engine may compute this rule's formula, or None."""
        return None


@dataclass
class WrappedRule(Rule):
    """Base class of update rules that wrap another rule, `rule`, and change its update or add state."""

    rule: Rule

    @property
    def elementwise(self) -> bool:  # type: ignore[override]
        """Whether the wrapped rule updates each element independently."""
        return self.rule.elementwise

    @property
    def settings_rule(self) -> Rule:
        """The wrapped rule, whose fields are the settings."""
        return self.rule.settings_rule

    def replace_settings(self, changes: Mapping[str, Any]) -> Rule:
        """Return a copy in which the settings of the wrapped rule named in `changes` have new values."""
        return dataclasses.replace(self, rule=self.rule.replace_settings(changes))

    def check(self) -> None:
        """Raise UserError for invalid settings of the wrapped rule."""
        self.rule.check()


@dataclass(frozen=True)
class Group:
    """Trainable tensors that share a rule, a weight decay and a learning-rate factor."""

    rule: Rule
    tensors: tuple[str, ...]
    weight_decay: float = 0.0
    lr_scale: float = 1.0  # the group's learning rate divided by the run's

    def numbers(self, step: int, lr: float, factors: Mapping[str, float] | None = None) -> np.ndarray:
        """Return the rule's scalars at the 0-based `step`, as a float64 vector in the order of `Rule.names`.

        `lr` is the run's learning rate. `factors` maps the name of a setting to the factor by which it is multiplied.
        Raise RunFailed if the names of the scalars differ from those of the first step.
        """
        rule, decay = self.rule, self.weight_decay
        if factors:
            rule, decay = self.scale_rule(factors), decay * factors.get("weight_decay", 1.0)
        numbers = rule.numbers(step, lr * self.lr_scale, decay)
        if numbers.keys() != set(self._names):
            rule = self.rule.settings_rule
            name = getattr(rule, "name", type(rule).__name__)
            now, before = ", ".join(map(str, numbers)), ", ".join(self._names)
            raise RunFailed(f"optim.{name}: numbers() returned {now} at step {step + 1}, expected {before}")
        return np.array([numbers[name] for name in self._names], np.float64)

    def scale_rule(self, factors: Mapping[str, float]) -> Rule:
        """Return the rule with its settings multiplied by `factors`, which are keyed by the name of the setting."""
        rule, names = self.rule.settings_rule, self.scalable - {"weight_decay"}
        changes = {k: getattr(rule, k) * f for k, f in factors.items() if k in names}
        return self.rule.replace_settings(changes) if changes else self.rule

    def base_value(self, name: str) -> float:
        """Return the value of a setting before scaling: the group's weight decay, or a field of the rule."""
        return float(self.weight_decay if name == "weight_decay" else getattr(self.rule.settings_rule, name))

    @cached_property
    def scalable(self) -> frozenset[str]:
        """Names of settings that a schedule can scale."""
        return frozenset(scalable(self.rule.settings_rule))

    @cached_property
    def _names(self) -> tuple[str, ...]:
        return tuple(self.rule.names())


def check_rule(rule: Rule, shape: tuple[int, ...]) -> None:
    """Raise UserError if the rule's `slots` or `update` would fail on some engine for a tensor of this shape."""
    slots = rule.slots(shape)
    if not isinstance(slots, Mapping) or not all(is_shape(s) for s in slots.values()):
        raise UserError(f"slots({shape}) returned {slots!r}; expected a mapping of names to shapes")
    if [*slots.items()] != [*(second := rule.slots(shape)).items()]:
        problem = f"slots({shape}) returned {slots!r}, and {second!r} at the second call"
        raise UserError(f"{problem}; both must be equal, so that a checkpoint can be resumed")
    if rule.elementwise and any(tuple(s) != shape for s in slots.values()):
        raise UserError(f"slots({shape}) returned {slots!r}; elementwise = True requires the tensor's shape")
    state = {slot: Shaped(tuple(s)) for slot, s in slots.items()}
    n = dict.fromkeys(rule.names(), Shaped((1,)))
    results = rule.update(Shapes(rule.elementwise), Shaped(shape), Shaped(shape), state, n)
    if not isinstance(results, tuple) or len(results) != 2 or not isinstance(results[1], Mapping):
        raise UserError("update() must return two values: the new tensor, and a mapping of names to its new state")
    shapes = {"the tensor": shape, **{f"slot {slot}": x.shape for slot, x in state.items()}}
    tensors = {"the tensor": results[0], **{f"slot {slot}": x for slot, x in results[1].items()}}
    for name in shapes | tensors:
        got = list(x.shape) if isinstance(x := tensors.get(name), Shaped) else "no tensor"
        if (expected := shapes.get(name, ())) != tuple(got):
            raise UserError(f"update() of {list(shape)} returns {got} for {name}, expected {list(expected) or 'none'}")


def scalable(rule: Rule) -> set[str]:
    """Return the names of the rule's settings that a schedule can scale.

    These are weight_decay and each float field of the rule that affects the result of `numbers`.
    """
    values = {f.name: getattr(rule, f.name) for f in dataclasses.fields(rule)}  # type: ignore[arg-type]
    variants = {k: dataclasses.replace(rule, **{k: v / 2 or 0.5}) for k, v in values.items() if isinstance(v, float)}  # type: ignore[type-var]
    unchanged = dict(rule.numbers(3, 0.1, 0.1))
    return {"weight_decay"} | {k for k, changed in variants.items() if dict(changed.numbers(3, 0.1, 0.1)) != unchanged}


@dataclass
class AdamW(Rule):
    """AdamW in one of two modes: create it with `for_from_scratch()` or `for_lora()`, or set `mode`.

    For weights w with gradient g, moments m and v, and weight decay wd, every engine computes

        m = b1 m + (1 - b1) g
        v = b2 v + (1 - b2) g^2
        w = w (1 - lr wd) - lr (m s5) / (sqrt(v s6) + eps)

    as ggml's OPT_STEP_ADAMW does. The modes differ in s5 and s6. In from_scratch, s5 = b1 and s6 = b2 at every step:
    there is no bias correction. In lora, they are the bias corrections 1/(1 - b1^t) and 1/(1 - b2^t) at step t = 1, 2,
    ..., as in torch.optim.AdamW (Loshchilov and Hutter 2019). Use one mode within an experiment, because the two modes
    give different results.
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
        """Return AdamW in mode from_scratch (without bias correction), for the recipes scratch, warm and vit_tiny."""
        return cls(mode=FROM_SCRATCH)

    @classmethod
    def for_lora(cls) -> AdamW:
        """Return AdamW in mode lora (with bias correction) and with beta2 0.999.

        The recipes lora and full and the model gpt2 use it.
        """
        return cls(beta2=DEFAULT_BETA2[LORA], mode=LORA)

    def hp_for_step(self, step: int) -> np.ndarray:
        """Return the vector [lr, beta1, beta2, eps, weight_decay, s5, s6] in float64 for the 0-based `step`.

        The update multiplies the first moment by s5 and the second by s6.

        Raise UserError for an unset or unknown mode.
        """
        return np.array([*self.numbers(step, self.lr, self.weight_decay).values()])

    def check(self) -> None:
        """Raise UserError for invalid settings.

        A beta of 0 is invalid in mode from_scratch, which multiplies the moments by the betas: with beta1=0 no weight
        would change, with beta2=0 each step would be divided by eps only.
        """
        require_range("optim", self, beta1="[0,1)", beta2="[0,1)", eps="(0,inf)")
        for name in ("beta1", "beta2"):
            if self.mode == FROM_SCRATCH and getattr(self, name) == 0:
                raise UserError(
                    f"optim.{name}=0: mode {FROM_SCRATCH} would multiply a moment by 0; set optim.mode={LORA}"
                )

    @property
    def fused_kernel(self) -> str:
        """Name of the fused AdamW kernel."""
        return "adamw"

    def names(self) -> Sequence[str]:
        """Return the names of the seven scalars that `numbers` returns. The setting `mode` need not be set yet."""
        return ("lr", "beta1", "beta2", "eps", "weight_decay", "slot5", "slot6")

    def slots(self, shape: tuple[int, ...]) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of the first moment m and the second moment v."""
        return {"m": shape, "v": shape}

    def numbers(self, step: int, lr: float, weight_decay: float) -> Mapping[str, float]:
        """Return the seven scalars of the update formula, keyed by name.

        The names are lr, beta1, beta2, eps, weight_decay, slot5 and slot6. The last two are the factors s5 of the first
        moment and s6 of the second. Raise UserError while the mode is unset, because it determines s5 and s6.
        """
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
        """Return the weights and the moments after one AdamW step. The class docstring has the formula."""
        m, v = ops.blend(g, state["m"], n["beta1"]), ops.blend(ops.square(g), state["v"], n["beta2"])
        root = ops.shift(ops.sqrt(ops.scale(v, n["slot6"])), n["eps"])
        direction = ops.add(ops.scale(w, n["weight_decay"]), ops.div(ops.scale(m, n["slot5"]), root))
        return ops.sub(w, ops.scale(direction, n["lr"])), {"m": m, "v": v}


GROUP_SETTINGS = ("lr", "weight_decay", "frozen")  # settings of a group in `optim.groups`


@dataclass
class Optimiser(Rule):
    """Base of all optimisers: subclass it as a dataclass whose fields are its settings."""

    name: ClassVar[str]  # the value of `optim=` that selects it

    weight_decay: float = 0.0  # decoupled weight decay of matrices; never applied to norms and biases
    grad_clip: float = 0.0  # clip gradients to this global norm; 0: no clipping
    accumulate: int = 1  # gradient accumulation: micro-batches per step; saves memory, same result
    ema: float = 0.0  # decay, such as 0.999, of the averaged weights that are evaluated and exported; 0: none
    groups: dict[str, Any] = field(default_factory=dict)  # of tensors: {blk.*.attn_*: {lr: 0.0001, frozen: false}}

    def check(self) -> None:
        """Raise UserError for invalid settings.

        A subclass that overrides this method need not call it: toyexp also checks the settings of all optimisers.
        """
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if isinstance(value, float):
                require_float32(f"optim.{f.name}", value)
        require_range("optim", self, weight_decay="[0,inf)", grad_clip="[0,inf)", accumulate="[1,inf)", ema="[0,1)")
        for pattern, settings in self.groups.items():
            _check_group(pattern, settings)

    def find_group(self, tensor: str) -> tuple[str, Mapping[str, Any]]:
        """Return the pattern and the settings of the first entry of `groups` that matches the tensor's name.

        Return ("", {}) if no pattern matches.
        """
        return next(((p, settings) for p, settings in self.groups.items() if fnmatchcase(tensor, p)), ("", {}))

    def with_mode(self, mode: str) -> Self:
        """Return the optimiser set to `mode`, the mode of AdamW that the model or recipe requires.

        An optimiser without modes returns itself.
        """
        return self

    def rules(self) -> Sequence[Rule]:
        """Return the update rules. Each tensor is updated by the first rule whose `takes` returns True for it."""
        return (self,)

    def base_lr(self, rule: Rule) -> float | None:
        """Return the base learning rate of the tensors that `rule` updates, or None to use the run's `lr`.

        If an optimiser has a setting for this rate, the setting's name should end in `_lr`. If the loss diverges and
        the rate exceeds `lr`, the error message then names this setting.
        """
        return None

    @property
    def title(self) -> str:
        """Name of the optimiser in the summary before a run."""
        return self.name

    def describe(self, lr: float) -> dict[str, Any]:
        """Return JSON data about the optimiser for the event run_start in events.jsonl.

        `lr` is the run's learning rate.
        """
        return {"name": self.name, "lr": lr, **dataclasses.asdict(self)}


def _check_group(pattern: str, settings: Any) -> None:
    key = f"optim.groups: {printable(pattern)}"
    if not isinstance(settings, Mapping):
        raise UserError(f"{key}: expected settings in braces, such as {{{pattern}: {{lr: 0.001}}}}")
    for name, value in settings.items():
        if name not in GROUP_SETTINGS:
            raise UserError(f"{key}: unknown setting {printable(str(name))}; {suggest(str(name), GROUP_SETTINGS)}")
        if name == "frozen":
            if not isinstance(value, bool):
                raise UserError(f"{key}: frozen={printable(str(value))}: must be true or false")
        elif isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            hint = "; it is a string: remove the quotes" if isinstance(value, str) else ""
            raise UserError(f"{key}: {name}={printable(repr(value))}: must be a finite number >= 0{hint}")
        elif settings.get("frozen") is True:
            raise UserError(f"{key}: {name}={value}: has no effect with frozen=true; remove one of them")
        else:
            require_float32(f"{key}: {name}", value)
