"""The training step of several runs of one shape as one program: forward, backward and update with a leading axis.

`torch.vmap` gives a model's own forward pass that axis [K]. The runs meet in no operation but the sum of their losses,
whose gradient is 1 for each of them, so that bad numbers of one stay its own.
On a GPU, `StackedResident` launches the step and held-out losses as CUDA graphs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from toyexp import Batch, Plan, Rule
from toyexp_torch.capture import Captured, Inputs, Kind, Results
from toyexp_torch.stacks.ops import StackedOps
from toyexp_torch.update import Change, Formula, FusedAdamW, Stretch, TritonAdamW, Update, kernel_of, part_of

Micro = dict[str, Tensor]  # a micro-batch of each run, [K, rows, ...]
Asked = tuple[Sequence[Batch], Sequence[np.ndarray]]  # a run's micro-batches, and each group's numbers


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
        """A kernel that has each run's own numbers, or the formula."""
        kernel = kernel_of(rule, self._flat)
        if kernel is FusedAdamW and self._flat.device.type == "cpu":
            return AdamWByRow
        return kernel if kernel is TritonAdamW else StackedFormula

    def _change(self, stretch: Stretch, change: Change) -> None:
        kernel = stretch.kernel
        if isinstance(kernel, TritonAdamW):
            kernel.rows = self.rows
        for w, g, state, _ in self._pieces(stretch):
            if self.rows is None or isinstance(kernel, TritonAdamW):
                change(w, g, state, None)
                continue
            near, held = w[self.rows], {slot: x[self.rows] for slot, x in state.items()}
            change(near, g[: len(near)], held, None)
            for there, values in zip((w, *state.values()), (near, *held.values()), strict=True):
                there.index_copy_(0, self.rows, values)


class StackedStep:
    """Steps and losses of the runs in some rows of `flat` [K, N], and of the state that `update` holds.

    `frozen` has each tensor that does not train: one for all these runs, or with True one of each of them, [k, ...].
    """

    def __init__(
        self, plans: Sequence[Plan], rows: Sequence[int], flat: Tensor, grad: Tensor, places: Mapping[str, slice],
        update: StackedUpdate, frozen: Mapping[str, tuple[Tensor, bool]], dtype: str = "float32",
    ):  # fmt: skip
        self._plan, self._flat, self._update, self._places = plans[0], flat, update, places
        self._rows = None if [*rows] == [*range(len(flat))] else torch.tensor(rows, device=flat.device)
        self._grad = grad[: len(rows)]
        self._shapes = {t.name: t.shape for t in self._plan.trainable}
        self._grads = [part_of(self._grad, here, self._shapes[name]) for name, here in places.items()]
        self._frozen = {name: values for name, (values, _) in frozen.items()}
        axes = {name: 0 if own else None for name, (_, own) in frozen.items()}
        rounds = torch.bfloat16 if dtype == "bfloat16" else None  # what products round to
        self._autocast = partial(torch.autocast, flat.device.type, torch.bfloat16) if rounds else contextlib.nullcontext
        self._ops = StackedOps(rounds, rounds if flat.device.type == "cuda" else None)
        clips, skips = [p.grad_clip for p in plans], [p.skip_nonfinite for p in plans]
        self._clip = flat.new_tensor(clips) if any(clips) else None
        self._skips = flat.new_tensor(skips) if any(skips) else None
        self._in_dims = (dict.fromkeys(places, 0), axes, 0)

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
        with torch.no_grad(), self._autocast():
            return self._losses(self._weights(), self._frozen, micro)

    def _weights(self) -> dict[str, Tensor]:
        """What trains, [k, ...] each."""
        flat = self._flat if self._rows is None else self._flat[self._rows]
        return {name: part_of(flat, here, self._shapes[name]) for name, here in self._places.items()}

    def _backward(self, micros: Sequence[Micro]) -> Tensor:
        """Leaves each run's summed gradient in its row and returns the summed losses, [k]."""
        leaves = {name: values.detach().requires_grad_() for name, values in self._weights().items()}
        losses: list[Tensor] = []
        for micro in micros:
            with self._autocast():
                found = self._losses(leaves, self._frozen, micro)
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


class StackedResident:
    """What `step` computes of `count` runs; each is known by its place among them.

    As many steps as `under_way` may be launched before the first is waited for. The graphs are of all runs at any
    time. One that asks for nothing is idle: it reads what it has read before, and keeps all that it has.
    """

    def __init__(
        self, step: StackedStep, plan: Plan, sizes: Sequence[int], count: int, dtype: torch.dtype, capture: bool,
        under_way: int = 2,
    ):  # fmt: skip
        self._step, self._plan, self._count, self._dtype = step, plan, count, dtype
        off = "" if capture else "engine.capture=false"
        pool = torch.cuda.graph_pool_handle()  # one after the other, graphs can share their memory
        self._blank = blank = {n: np.zeros((plan.rows, *s.shape), s.dtype) for n, s in plan.inputs.items()}
        of_all: dict[str, Kind] = {n: ((count * len(x), *x.shape[1:]), x.dtype) for n, x in blank.items()}
        self._held_out = Inputs({(0, name): kind for name, kind in of_all.items()})
        self._losses = Captured("a held-out loss", self._losses_there, self._losses_there, pool, off)
        kinds: dict[Hashable, Kind] = {(i, n): kind for i in range(plan.accumulate) for n, kind in of_all.items()}
        kinds |= {i: ((count * size,), np.dtype(np.float64)) for i, size in enumerate(sizes)}
        self._inputs = Inputs({**kinds, "idle": ((count,), np.dtype(np.float32))}, under_way)
        self._results = Results(2 * count, dtype, under_way)
        self._latest: list[Asked] = [([blank] * plan.accumulate, [np.zeros(size) for size in sizes])] * count
        self._numbers = [self._inputs.tensors[i].view(count, size) for i, size in enumerate(sizes)]
        self._inputs.put({"idle": [np.ones(count)]})
        self._taken = Captured("a step", self._work, self._work, pool, off)  # all runs are idle when it is rehearsed
        self._taken.prepare()

    @property
    def refused(self) -> str:
        """Why the step is not captured; empty where it is."""
        return self._taken.refused

    def launch(self, asked: Mapping[int, Asked]) -> Callable[[], list[float]]:
        """Begins a step of the runs at those places; what it returns waits for all losses, then all norms."""
        for place, own in asked.items():
            self._latest[place] = own
        micros, numbers = zip(*self._latest, strict=True)
        parts: dict[Hashable, Sequence[np.ndarray]] = dict(enumerate(zip(*numbers, strict=True)))
        for i, each in enumerate(zip(*micros, strict=True)):
            parts |= {(i, name): [micro[name] for micro in each] for name in self._plan.inputs}
        parts["idle"] = [np.array([place not in asked for place in range(self._count)], np.float32)]
        self._inputs.put(parts)
        return self._results.fetch(self._taken().flatten())

    def losses(self, micros: Mapping[int, Batch]) -> Tensor:
        """Of a micro-batch of the runs at those places, [count]; for others 0. Overwritten by the next call."""
        each = [micros.get(place, self._blank) for place in range(self._count)]
        self._held_out.put({(0, name): [micro[name] for micro in each] for name in self._plan.inputs})
        return self._losses()

    def close(self) -> None:
        """Frees the graphs."""
        self._taken.close()
        self._losses.close()

    def _work(self) -> Tensor:
        micros = [self._micro(self._inputs, i) for i in range(self._plan.accumulate)]
        return self._step(micros, self._numbers, self._inputs.tensors["idle"])

    def _losses_there(self) -> Tensor:
        return self._step.losses(self._micro(self._held_out, 0))

    def _micro(self, inputs: Inputs, i: int) -> Micro:
        """Micro-batch `i` by run, its fractions in the type of the weights."""
        by_run = {n: inputs.tensors[i, n].unflatten(0, (self._count, -1)) for n in self._plan.inputs}
        return {name: x.to(self._dtype) if x.is_floating_point() else x for name, x in by_run.items()}
