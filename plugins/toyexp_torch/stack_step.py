"""The training step of several runs of one shape as one program: forward, backward and update with a leading axis.

`torch.vmap` gives a model's own forward pass that axis [K]. The runs meet in no operation but the sum of their losses,
whose gradient is 1 for each of them, so that bad numbers of one stay its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from toyexp import Plan, Rule, printable
from toyexp_torch.ops import TorchOps
from toyexp_torch.session import places_of
from toyexp_torch.update import Change, Formula, FusedAdamW, Stretch, Update, kernel_of, part_of

Micro = dict[str, Tensor]  # a micro-batch of each run, [K, rows, ...]


class StackedOps(TorchOps):
    """The ops of a forward pass that `torch.vmap` runs for several runs at once."""

    def attention(self, q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
        """See Ops."""
        attended: Tensor = _Attention.apply(q, k, v, causal)
        return attended


class _Attention(torch.autograd.Function):
    """Attention whose kernels know no stack: the runs' sequences are one longer batch to them."""

    generate_vmap_rule = False

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        """Of one run: where nothing that it reads differs between the runs."""
        return TorchOps().attention(q, k, v, causal)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is kept: under `torch.vmap` it is `vmap` that computes, whose gradient autograd knows."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, int]:
        """q [K, B, T, H, D], k and v [K, B, T, Hkv, D] -> [K, B, T, H*D]."""
        q, k, v = (
            (x.unsqueeze(0).expand(info.batch_size, *x.shape) if axis is None else x.movedim(axis, 0)).flatten(0, 1)
            for x, axis in zip((q, k, v), in_dims, strict=False)
        )
        return TorchOps().attention(q, k, v, causal).unflatten(0, (info.batch_size, -1)), 0


class StackedFormula(Formula):
    """A rule on the tensors of several runs [K, ...], each with its own numbers."""

    def on_device(self, numbers: Tensor, divisor: Tensor | None, skip: Tensor | None) -> Change:
        """See Formula: with numbers [K, names], and a divisor and a skip for each run, [K]."""

        def one(w: Tensor, g: Tensor, state: Mapping[str, Tensor], n: Tensor, d: Any, s: Any) -> Tensor:
            Formula.on_device(self, n.to(w.dtype), d, s)(w, g, state, None)
            return w

        own = (numbers, divisor, skip)
        each = torch.vmap(one, (0, 0, 0, *(None if x is None else 0 for x in own)))

        def change(w: Tensor, g: Tensor, state: Mapping[str, Tensor], rounded: Tensor | None) -> None:
            each(w, g, dict(state), *own)

        return change


class AdamWByRow(FusedAdamW):
    """On the CPU torch's fused kernel, called for each run, is faster than the formula called once."""

    def on_device(self, numbers: Tensor, divisor: Tensor | None, skip: Tensor | None) -> Change:
        """See StackedFormula."""
        runs = [self.on_host(vector) for vector in numbers.numpy()]
        skipped = [False] * len(runs) if skip is None else (skip > 0).tolist()

        def change(w: Tensor, g: Tensor, state: Mapping[str, Tensor], rounded: Tensor | None) -> None:
            g = g if divisor is None else g / divisor[:, None]
            for i, one in enumerate(runs):
                if not skipped[i]:
                    one(w[i], g[i], {slot: x[i] for slot, x in state.items()}, None)

        return change


class StackedUpdate(Update):
    """The optimiser's step on rows of matrices [K, ...]: of `rows`, to which the first rows of `grad` belong."""

    def __init__(self, plan: Plan, flat: Tensor, grad: Tensor, places: Mapping[str, slice]):
        super().__init__(plan, flat, grad, places, compiled=False)
        self._chunk = max(self._chunk // len(flat), 1)
        self.rows: Tensor | None = None  # None: all of them

    def kernel_of(self, rule: Rule) -> type[Formula]:
        """The formula: a fused kernel has one run's numbers."""
        on_cpu = self._flat.device.type == "cpu"
        return AdamWByRow if on_cpu and kernel_of(rule, self._flat) is FusedAdamW else StackedFormula

    def _change(self, stretch: Stretch, change: Change) -> None:
        for w, g, state, _ in self._pieces(stretch):
            if self.rows is None:
                change(w, g, state, None)
                continue
            near, held = w[self.rows], {slot: x[self.rows] for slot, x in state.items()}
            change(near, g[: len(near)], held, None)
            for there, values in zip((w, *state.values()), (near, *held.values()), strict=True):
                there.index_copy_(0, self.rows, values)


class StackedStep:
    """A step of the runs in some rows of `flat` [K, N], and with them of the state that `update` holds.

    `frozen` has each tensor that does not train: one for all these runs, or with True one of each of them, [k, ...].
    """

    def __init__(
        self, plans: Sequence[Plan], rows: Sequence[int], flat: Tensor, grad: Tensor, places: Mapping[str, slice],
        update: StackedUpdate, frozen: Mapping[str, tuple[Tensor, bool]],
    ):  # fmt: skip
        self._plan, self._flat, self._update, self._places = plans[0], flat, update, places
        self._rows = None if len(rows) == len(flat) else torch.tensor(rows, device=flat.device)
        self._grad = grad[: len(rows)]
        self._shapes = {t.name: t.shape for t in self._plan.trainable}
        self._grads = [part_of(self._grad, here, self._shapes[name]) for name, here in places.items()]
        self._frozen = {name: values for name, (values, _) in frozen.items()}
        self._axes = {name: 0 if own else None for name, (_, own) in frozen.items()}
        self._ops = StackedOps()
        clips, skips = [p.grad_clip for p in plans], [p.skip_nonfinite for p in plans]
        self._clip = flat.new_tensor(clips) if any(clips) else None
        self._skips = flat.new_tensor(skips) if any(skips) else None

    def __call__(self, micros: Sequence[Micro], numbers: Sequence[Tensor]) -> Tensor:
        """Takes it; numbers [k, names] of each group. Each run's loss and its gradient's norm, [2, k]."""
        losses = self._backward(micros)
        norms = torch.linalg.vector_norm(self._grad, dim=1)
        metrics = torch.stack((losses, norms.to(losses.dtype)))
        divisor = skip = None
        if self._clip is not None:
            beyond = ((norms + 1e-6) / self._clip).clamp(min=1.0)
            divisor = torch.where(self._clip > 0, beyond, torch.ones_like(beyond))
        if self._skips is not None:
            skip = self._skips * (1 - metrics.isfinite().all(0).to(self._skips.dtype))
        self._update.rows = self._rows
        self._update.on_device(numbers, divisor, skip)
        return metrics

    def _backward(self, micros: Sequence[Micro]) -> Tensor:
        """Leaves each run's summed gradient in its row and returns the summed losses, [k]."""
        flat = self._flat if self._rows is None else self._flat[self._rows]
        leaves = {
            name: part_of(flat, here, self._shapes[name]).detach().requires_grad_()
            for name, here in self._places.items()
        }
        each = torch.vmap(self._loss, (dict.fromkeys(leaves, 0), self._axes, 0))
        losses: list[Tensor] = []
        for micro in micros:
            found = each(leaves, self._frozen, micro)
            gradients = torch.autograd.grad(found.sum(), [*leaves.values()], allow_unused=True, materialize_grads=True)
            add = torch._foreach_add_ if losses else torch._foreach_copy_
            add(self._grads, [g.contiguous() for g in gradients])
            losses.append(found.detach())
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum(0)

    def _loss(self, leaves: Mapping[str, Tensor], frozen: Mapping[str, Tensor], batch: Micro) -> Tensor:
        """Of one run."""
        params = self._plan.params({**leaves, **frozen}, batch)
        logits = self._plan.model.forward(self._ops, params, batch)
        return self._ops.cross_entropy(logits, batch["targets"], batch["weights"])


def refusal(plan: Plan) -> str:
    """Why the steps of several runs of such a plan are no one program, or nothing; it is tried on shapes alone."""
    if not plan.trainable:  # it has no steps
        return ""
    places, length = places_of(plan)
    flat, grad = (torch.zeros((2, length), device="meta") for _ in range(2))
    frozen = {t.name: (torch.empty(t.shape, device="meta"), False) for t in plan.tensors if not t.trainable}
    micro = {
        name: torch.zeros((2, plan.rows, *spec.shape), dtype=getattr(torch, spec.dtype), device="meta")
        for name, spec in plan.inputs.items()
    }
    update = StackedUpdate(plan, flat, grad, places)
    numbers = [torch.zeros((2, size), device="meta") for size in update.sizes()]
    try:
        StackedStep([plan] * 2, range(2), flat, grad, places, update, frozen)([micro] * plan.accumulate, numbers)
    except Exception as error:
        told = printable(str(error).strip().partition("\n")[0])
        return f"model={plan.model.name}: several runs of it cannot be computed at once ({told})"
    return ""
