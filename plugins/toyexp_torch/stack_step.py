"""The training step of several runs of one shape as one program: forward, backward and update with a leading axis.

`torch.vmap` gives a model's own forward pass that axis [K]. The runs meet in no operation but the sum of their losses,
whose gradient is 1 for each of them, so that bad numbers of one stay its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from toyexp import Plan, Rule
from toyexp_torch.stack_ops import StackedOps
from toyexp_torch.update import Change, Formula, FusedAdamW, Stretch, TritonAdamW, Update, kernel_of, part_of

Micro = dict[str, Tensor]  # a micro-batch of each run, [K, rows, ...]


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


class RowsOfAdamW(TritonAdamW):
    """The kernel on some rows of matrices, each with its own numbers; it finds them by itself."""

    rows: Tensor | None = None  # to which the rows of the gradient and of the numbers belong; None: all

    def on_device(self, numbers: Tensor, divisor: Tensor | None, skip: Tensor | None) -> Change:
        """See StackedFormula."""
        from toyexp_torch.adamw_kernel import step_of_rows  # deferred: it needs Triton

        def change(w: Tensor, g: Tensor, state: Mapping[str, Tensor], rounded: Tensor | None) -> None:
            idle = self._go_on if skip is None else skip
            step_of_rows(w, g, state["m"], state["v"], numbers, divisor, idle, self.rows)

        return change


class StackedUpdate(Update):
    """The optimiser's step on rows of matrices [K, ...]: of `rows`, to which the first rows of `grad` belong."""

    def __init__(self, plan: Plan, flat: Tensor, grad: Tensor, places: Mapping[str, slice]):
        super().__init__(plan, flat, grad, places, compiled=False)
        self._chunk = max(self._chunk // len(flat), 1)
        self.rows: Tensor | None = None  # None: all of them

    def kernel_of(self, rule: Rule) -> type[Formula]:
        """A kernel that has each run's own numbers, or the formula."""
        kernel = kernel_of(rule, self._flat)
        if kernel is FusedAdamW and self._flat.device.type == "cpu":
            return AdamWByRow
        return RowsOfAdamW if kernel is TritonAdamW else StackedFormula

    def _change(self, stretch: Stretch, change: Change) -> None:
        kernel = stretch.kernel
        if isinstance(kernel, RowsOfAdamW):
            kernel.rows = self.rows
        for w, g, state, _ in self._pieces(stretch):
            if self.rows is None or isinstance(kernel, RowsOfAdamW):
                change(w, g, state, None)
                continue
            near, held = w[self.rows], {slot: x[self.rows] for slot, x in state.items()}
            change(near, g[: len(near)], held, None)
            for there, values in zip((w, *state.values()), (near, *held.values()), strict=True):
                there.index_copy_(0, self.rows, values)


@dataclass(frozen=True)
class How:
    """What a stack's engine asks of its computing."""

    dtype: str = "float32"  # float32 | bfloat16 | float64
    compile: bool = False

    def rounding(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        """In which its products round."""
        if self.dtype != "bfloat16":
            return contextlib.nullcontext()
        return torch.autocast(device.type, torch.bfloat16)


class StackedStep:
    """Steps and losses of the runs in some rows of `flat` [K, N], and of the state that `update` holds.

    `frozen` has each tensor that does not train: one for all these runs, or with True one of each of them, [k, ...].
    """

    def __init__(
        self, plans: Sequence[Plan], rows: Sequence[int], flat: Tensor, grad: Tensor, places: Mapping[str, slice],
        update: StackedUpdate, frozen: Mapping[str, tuple[Tensor, bool]], how: How = How(),
    ):  # fmt: skip
        self._plan, self._flat, self._update, self._places, self._how = plans[0], flat, update, places, how
        self._rows = None if [*rows] == [*range(len(flat))] else torch.tensor(rows, device=flat.device)
        self._grad = grad[: len(rows)]
        self._shapes = {t.name: t.shape for t in self._plan.trainable}
        self._grads = [part_of(self._grad, here, self._shapes[name]) for name, here in places.items()]
        self._frozen = {name: values for name, (values, _) in frozen.items()}
        axes = {name: 0 if own else None for name, (_, own) in frozen.items()}
        rounds = torch.bfloat16 if how.dtype == "bfloat16" else None
        self._ops = StackedOps(rounds, rounds if flat.device.type == "cuda" else None)
        clips, skips = [p.grad_clip for p in plans], [p.skip_nonfinite for p in plans]
        self._clip = flat.new_tensor(clips) if any(clips) else None
        self._skips = flat.new_tensor(skips) if any(skips) else None
        self._in_dims = (dict.fromkeys(places, 0), axes, 0)
        self._each: Callable[..., Tensor] = self._losses
        if how.compile:
            self.losses(self._blank(len(rows)))  # fills the tables that ops keep: the compiler finds them as constants
            self._each = torch.compile(self._losses, dynamic=False)

    def __call__(self, micros: Sequence[Micro], numbers: Sequence[Tensor], idle: Tensor | None = None) -> Tensor:
        """Takes it; numbers [k, names] of each group. Each run's loss and its gradient's norm, [2, k].

        Where `idle` [k] is 1 a run keeps all that it has.
        """
        losses = self._backward(micros)
        norms = torch.linalg.vector_norm(self._grad, dim=1)
        metrics = torch.stack((losses, norms.to(losses.dtype)))
        divisor, skip = None, idle
        if self._clip is not None:
            beyond = ((norms + 1e-6) / self._clip).clamp(min=1.0)
            divisor = torch.where(self._clip > 0, beyond, torch.ones_like(beyond))
        if self._skips is not None:
            skip = self._skips * (1 - metrics.isfinite().all(0).to(self._skips.dtype))
            skip = skip if idle is None else torch.maximum(skip, idle.to(skip.dtype))
        self._update.rows = self._rows
        self._update.on_device(numbers, divisor, skip)
        return metrics

    def losses(self, micro: Micro) -> Tensor:
        """Of one micro-batch each, without training: [k]."""
        with torch.no_grad(), self._how.rounding(self._flat.device):
            found: Tensor = self._each(self._weights(), self._frozen, micro)
        return found

    def _blank(self, count: int) -> Micro:
        """Zeros in place of a micro-batch of so many runs."""
        shapes = {name: (count, self._plan.rows, *spec.shape) for name, spec in self._plan.inputs.items()}
        kinds = {name: getattr(torch, spec.dtype) for name, spec in self._plan.inputs.items()}
        exact = {name: self._flat.dtype if kind.is_floating_point else kind for name, kind in kinds.items()}
        return {name: self._flat.new_zeros(shape, dtype=exact[name]) for name, shape in shapes.items()}

    def _weights(self) -> dict[str, Tensor]:
        """What trains, [k, ...] each."""
        flat = self._flat if self._rows is None else self._flat[self._rows]
        return {name: part_of(flat, here, self._shapes[name]) for name, here in self._places.items()}

    def _backward(self, micros: Sequence[Micro]) -> Tensor:
        """Leaves each run's summed gradient in its row and returns the summed losses, [k]."""
        leaves = {name: values.detach().requires_grad_() for name, values in self._weights().items()}
        losses: list[Tensor] = []
        for micro in micros:
            with self._how.rounding(self._flat.device):
                found = self._each(leaves, self._frozen, micro)
            gradients = torch.autograd.grad(found.sum(), [*leaves.values()], allow_unused=True, materialize_grads=True)
            add = torch._foreach_add_ if losses else torch._foreach_copy_
            add(self._grads, gradients)
            losses.append(found.detach())
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum(0)

    def _losses(self, *arguments: Any) -> Tensor:
        """Of all of them, [k]."""
        found: Tensor = torch.vmap(self._loss, self._in_dims)(*arguments)
        return found

    def _loss(self, leaves: Mapping[str, Tensor], frozen: Mapping[str, Tensor], batch: Micro) -> Tensor:
        """Of one run."""
        params = self._plan.params({**leaves, **frozen}, batch)
        logits = self._plan.model.forward(self._ops, params, batch)
        return self._ops.cross_entropy(logits, batch["targets"], batch["weights"])
