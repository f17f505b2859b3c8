"""Ops and optimiser arithmetic in float64 NumPy, written for clarity: every engine is compared with them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from toyexp.base.errors import UserError, suggest
from toyexp.interfaces.arithmetic import Arithmetic
from toyexp.interfaces.dataset import Batch
from toyexp.interfaces.engine import Engine
from toyexp.interfaces.ops import Ops, Rotary
from toyexp.interfaces.optimiser import Group
from toyexp.interfaces.plan import Plan

Array = np.ndarray


class ReferenceOps(Ops):
    """Ops on float64 arrays, as `toyexp.interfaces.ops.Ops` defines them."""

    def rows(self, table: Array, ids: Array) -> Array:
        return table[ids]

    def first_rows(self, table: Array, n: int) -> Array:
        return table[:n]

    def matmul(self, x: Array, w: Array, bias: Array | None = None) -> Array:
        return x @ w.T if bias is None else x @ w.T + bias

    def add(self, a: Array, b: Array) -> Array:
        return a + b

    def mul(self, a: Array, b: Array) -> Array:
        return a * b

    def div(self, a: Array, b: Array) -> Array:
        return a / b

    def scale(self, x: Array, factor: float, offset: float = 0.0) -> Array:
        return x * factor + offset

    def step(self, x: Array) -> Array:
        return (x > 0).astype(np.float64)

    def exp(self, x: Array) -> Array:
        return np.exp(x)

    def log(self, x: Array) -> Array:
        return np.log(x)

    def permute(self, x: Array, axes: Sequence[int]) -> Array:
        return x.transpose(axes)

    def product(self, a: Array, b: Array, transposed: bool = False) -> Array:
        return np.einsum("...nk,...mk->...nm" if transposed else "...nk,...km->...nm", a, b)

    def sum(self, x: Array, axis: int | None = None, keep: bool = False) -> Array:
        return x.sum(axis, keepdims=keep)

    def cumsum(self, x: Array) -> Array:
        return x.cumsum(-1)

    def softmax(self, x: Array) -> Array:
        weights = np.exp(x - x.max(-1, keepdims=True))
        return weights / weights.sum(-1, keepdims=True)

    def log_softmax(self, x: Array) -> Array:
        lower = x - x.max(-1, keepdims=True)
        return lower - np.log(np.exp(lower).sum(-1, keepdims=True))

    def take(self, x: Array, ids: Array) -> Array:
        if ids.ndim == x.ndim:
            return np.take_along_axis(x, ids.astype(int), axis=-1)
        return np.take_along_axis(x, ids[..., None].astype(int), axis=-1)[..., 0]

    def causal(self, x: Array, window: int = 0, fill: float = -np.inf) -> Array:
        return np.where(_visible(x.shape[-1], window), x, fill)

    def relu(self, x: Array) -> Array:
        return np.maximum(x, 0)

    def tanh(self, x: Array) -> Array:
        return np.tanh(x)

    def softplus(self, x: Array) -> Array:
        return np.logaddexp(x, 0)

    def top_k(self, x: Array, k: int) -> Array:
        chosen = np.argsort(-x, axis=-1, kind="stable")[..., :k]
        mask = np.zeros_like(x)
        np.put_along_axis(mask, chosen, 1.0, axis=-1)
        return mask

    def experts(self, x: Array, w: Array) -> Array:
        return np.einsum("bti,eoi->bteo" if x.ndim == 3 else "btei,eoi->bteo", x, w)

    def distance_bias(self, table: Array, length: int) -> Array:
        distance = np.subtract.outer(np.arange(length), np.arange(length))
        return np.where(distance < 0, 0.0, table[:, distance.clip(0)])

    def linear_attention(self, q: Array, k: Array, v: Array, log_decay: Array) -> Array:
        """Compute linear attention position by position, with a state [B, H, D, Dv]."""
        q, k = (x.repeat(v.shape[2] // x.shape[2], 2) for x in (q, k))
        state, outs = np.zeros((q.shape[0], *q.shape[2:], v.shape[3])), []
        for t in range(q.shape[1]):
            state = state * np.exp(log_decay[:, t, :, None, None]) + k[:, t, ..., None] * v[:, t, :, None]
            outs.append(np.einsum("bhd,bhde->bhe", q[:, t], state))
        return np.stack(outs, 1).reshape(*q.shape[:2], -1)

    def shift(self, x: Array, n: int = 1) -> Array:
        moved = np.zeros_like(x)
        moved[:, n:] = x[:, : max(x.shape[1] - n, 0)]
        return moved

    def sigmoid(self, x: Array) -> Array:
        return 1 / (1 + np.exp(-x))

    def centre(self, x: Array) -> Array:
        return x - x.mean(-1, keepdims=True)

    def reshape(self, x: Array, shape: Sequence[int]) -> Array:
        return x.reshape(shape)

    def part(self, x: Array, axis: int, start: int, stop: int) -> Array:
        return x.take(range(start, stop), axis)

    def concat(self, parts: Sequence[Array], axis: int) -> Array:
        return np.concatenate(parts, axis)

    def rms_norm(self, x: Array, w: Array, eps: float) -> Array:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * w

    def layer_norm(self, x: Array, w: Array, b: Array, eps: float) -> Array:
        centred = x - x.mean(-1, keepdims=True)
        return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps) * w + b

    def heads(self, x: Array, n: int) -> Array:
        return x.reshape(*x.shape[:-1], n, x.shape[-1] // n)

    def split(self, x: Array, n: int) -> tuple[Array, ...]:
        return tuple(np.split(x, n, axis=-1))

    def prepend(self, x: Array, token: Array) -> Array:
        return np.stack([np.vstack([token, rows]) for rows in x])

    def select(self, x: Array, i: int) -> Array:
        return x[:, i]

    def rope(self, x: Array, rotary: Rotary) -> Array:
        """Rotate each pair of features: multiply the pair, as a complex number, by exp(i * angle).

        `Ops.rope` defines the angles.
        """
        size = x.shape[-1]
        angle = np.arange(x.shape[1])[:, None, None] * rotary.base ** (-np.arange(0, size, 2) / size) / rotary.scale
        if rotary.factors:
            angle = angle / np.array(rotary.factors)
        if rotary.halves:
            pairs = (x[..., : size // 2] + 1j * x[..., size // 2 :]) * np.exp(1j * angle)
            return np.concatenate((pairs.real, pairs.imag), axis=-1)
        pairs = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * angle)
        return np.stack((pairs.real, pairs.imag), axis=-1).reshape(x.shape)

    def attention(
        self, q: Array, k: Array, v: Array, causal: bool = True, *, window: int = 0, scale: float | None = None,
        softcap: float = 0.0, sinks: Array | None = None, bias: Array | None = None,
    ) -> Array:  # fmt: skip
        """Compute attention, as `Ops.attention` defines it, in a loop over heads."""
        heads, size = q.shape[2:]
        out = np.empty((*q.shape[:3], v.shape[3]))
        for h in range(heads):
            shared = h // (heads // k.shape[2])
            scores = q[:, :, h] @ k[:, :, shared].transpose(0, 2, 1) * (size**-0.5 if scale is None else scale)
            scores = softcap * np.tanh(scores / softcap) if softcap else scores  # [B, T, T]
            shape = (len(q), heads, *scores.shape[1:])
            scores = scores if bias is None else scores + np.broadcast_to(bias, shape)[:, h]
            scores = np.where(_visible(len(scores[0]), window), scores, -np.inf) if causal else scores
            top = scores.max(-1, keepdims=True)
            weights = np.exp(scores - top)
            total = weights.sum(-1, keepdims=True) + (0 if sinks is None else np.exp(sinks[h] - top))
            out[:, :, h] = weights / total @ v[:, :, shared]
        return out.reshape(*q.shape[:2], -1)

    def gelu(self, x: Array, exact: bool = False) -> Array:
        if exact:
            return 0.5 * x * (1 + np.vectorize(math.erf, otypes=[float])(x / np.sqrt(2)))
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))

    def silu(self, x: Array) -> Array:
        return x / (1 + np.exp(-x))

    def swiglu(self, gate: Array, up: Array) -> Array:
        return gate / (1 + np.exp(-gate)) * up

    def cross_entropy(
        self, logits: Array, targets: Array, weights: Array, smoothing: float = 0.0, z_loss: float = 0.0
    ) -> Array:
        top = logits.max(-1, keepdims=True)
        log_sum = np.log(np.exp(logits - top).sum(-1)) + top[..., 0]
        chosen = np.take_along_axis(logits, targets[..., None].astype(int), axis=-1)[..., 0]
        expected = (1 - smoothing) * chosen + smoothing * logits.mean(-1)
        return (weights * (log_sum - expected + z_loss * log_sum**2)).sum()


def _visible(length: int, window: int) -> Array:
    """Return a causal attention mask [T, T]: True where the position of the row attends to that of the column.

    A position attends to itself and to earlier positions. With a `window`, it attends only to the last `window` of
    these.
    """
    before = np.subtract.outer(np.arange(length), np.arange(length))
    return (before >= 0) & ((before < window) | (window == 0))


def reference_logits(plan: Plan, values: Mapping[str, Array], batch: Batch) -> Array:
    """Return the logits of the plan's model for a batch, in float64. `values` are the plan's tensors, by name."""
    wide = {name: value.astype(np.float64) for name, value in values.items()}
    return plan.model.forward(ReferenceOps(), plan.params(wide, batch), batch)


def reference_loss(plan: Plan, values: Mapping[str, Array], batch: Batch, held_out: bool = False) -> float:
    """Return the mean loss of a batch, weighted by the batch's `weights`, in float64.

    It is the training loss of the plan's objective or, if `held_out`, its held-out loss. `values` are the plan's
    tensors, keyed by name.
    """
    wide = {name: value.astype(np.float64) for name, value in values.items()}
    scaled = _widen(batch if held_out else plan.objective.weigh(batch))
    loss = plan.objective.held_out_loss if held_out else plan.objective.training_loss
    return float(loss(ReferenceOps(), plan.model, plan.params(wide, scaled), scaled))


def reference_metrics(plan: Plan, values: Mapping[str, Array], batch: Batch) -> dict[str, float]:
    """Return the objective's held-out metrics of a batch, means weighted by its `weights`, in float64."""
    wide = {name: value.astype(np.float64) for name, value in values.items()}
    scaled = _widen(batch)
    metrics = plan.objective.metrics(ReferenceOps(), plan.model, plan.params(wide, scaled), scaled)
    return {name: float(value) for name, value in metrics.items()}


def _widen(batch: Batch) -> dict[str, Array]:
    """Return the batch with float arrays converted to float64, and with weights normalised to the sum 1."""
    floats = {name: array.astype(np.float64) for name, array in batch.items() if array.dtype.kind == "f"}
    return {**batch, **floats, "weights": floats["weights"] / floats["weights"].sum()}


def reference_slope(
    plan: Plan, values: Mapping[str, Array], batch: Batch, name: str, direction: Array, h: float = 1e-4
) -> float:
    """Return the directional derivative of the loss with respect to tensor `name` along `direction`, in float64.

    If f(x) is the loss after a move by x along `direction`, the result is the central difference
    (8 (f(h) - f(-h)) - (f(2h) - f(-2h))) / 12h, with an error of order h^4. `values` are the plan's tensors, by name.
    """

    def loss(distance: float) -> float:
        moved = values[name].astype(np.float64) + distance * direction
        return reference_loss(plan, {**values, name: moved}, batch)

    return (8 * (loss(h) - loss(-h)) - (loss(2 * h) - loss(-2 * h))) / (12 * h)


def reference_adamw(w: Array, g: Array, m: Array, v: Array, hp: Array) -> tuple[Array, Array, Array]:
    """Apply one AdamW step, as `toyexp.interfaces.optimiser.AdamW` defines it, in float64.

    `hp` holds the seven scalars that this class names. Return the new weights w and the new moments m and v.
    """
    lr, beta1, beta2, eps, decay, slot5, slot6 = (float(x) for x in hp)
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g**2
    return w * (1 - lr * decay) - lr * (m * slot5) / (np.sqrt(v * slot6) + eps), m, v


class NumpyArithmetic(Arithmetic):
    """Operations of optimisers' update formulas on NumPy arrays of any dtype; scalars are Python floats."""

    def sqrt(self, x: Array) -> Array:
        return np.sqrt(x)

    def sign(self, x: Array) -> Array:
        return np.sign(x)

    def at_least(self, x: Array, low: float) -> Array:
        return np.maximum(x, low)

    def sum(self, x: Array) -> Array:
        return x.sum().reshape(1)

    def sum_last(self, x: Array) -> Array:
        return x.sum(-1, keepdims=True)


def update_tensor(
    group: Group, numbers: Array, w: Array, g: Array, state: Mapping[str, Array]
) -> tuple[Array, Mapping[str, Array]]:
    """Apply one step of the group's update rule to one of its tensors; return the new values and the new state.

    `w` holds the tensor's values and `g` its gradient. `state` holds the optimiser state, keyed by slot. `numbers`
    holds the rule's scalars for this step, such as the learning rate, in the order of `group.rule.names()`.
    """
    n = dict(zip(group.rule.names(), map(float, numbers), strict=True))
    return group.rule.update(NumpyArithmetic(), w, g, state, n)


# -- tolerances --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tolerances:
    """Largest allowed differences between an engine and the float64 reference, for one precision such as tf32."""

    values: float  # of an op's result, relative to its largest value; of a single op's loss, relative to the loss
    slopes: float  # of the gradient of one tensor through one op: norm of the difference, relative to its norm
    loss: float  # of a model's loss after one training step, relative to the loss
    gradient: float  # of the gradient of one tensor through a model: norm of the difference, relative to its norm
    weights: float  # of one tensor after training, relative to the distance from its initial values


# The finest precision comes first. AdamW takes equal steps for small and large gradients, so weights differ more than
# gradients do. With the ten mantissa bits of float16 and TF32 the gradients of the op case "block" (three gates in a
# row) are off by 1.2e-2, both on a device and in float64 with rounded operands. The gradient of the keys' part of
# GPT-2's attn_qkv.bias is only rounding error, which puts this bias 9e-2 off in float16.
TOLERANCES = {
    "float64": Tolerances(1e-6, 1e-6, 1e-6, 1e-6, 1e-5),  # the compared arrays are float32
    "float32": Tolerances(1e-4, 1e-4, 1e-3, 1e-4, 5e-3),
    "tf32": Tolerances(5e-3, 2e-2, 1e-3, 5e-3, 2e-1),
    "float16": Tolerances(1e-2, 2e-2, 1e-3, 5e-3, 2e-1),
    "bfloat16": Tolerances(5e-2, 5e-2, 2e-3, 5e-2, 5e-1),  # measured on llama nano: 6e-4 in loss, 2e-2 in gradients
}


def precision(engine: Engine) -> str:
    """Return the precision of the engine's matrix products, such as "tf32".

    Raise UserError if the engine gives a name that is not a key of TOLERANCES.
    """
    dtype = engine.product_dtype()
    if dtype not in TOLERANCES:
        raise UserError(f"engine={engine.name}: product_dtype() is {dtype!r}; {suggest(dtype, TOLERANCES)}")
    return dtype


def coarser_precision(first: str, second: str) -> str:
    """Return the coarser of two precisions, whose tolerances apply when two engines are compared with each other."""
    return max(first, second, key=list(TOLERANCES).index)
