"""Training step of several runs with the same shapes as one program, whose tensors have a leading axis of runs.

`torch.vmap` adds this axis, of length K, to a model's forward pass. The backward pass begins at the sum of all runs'
losses. The sum's gradient with respect to each loss is 1, so a NaN in one run does not reach the others.
On a GPU, `StackedResident` launches the program as CUDA graphs.
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
from toyexp_torch.capture import ArraySpec, CapturedCall, Inputs, Results
from toyexp_torch.stacks.ops import StackedOps
from toyexp_torch.update import Change, Formula, FusedAdamW, GroupSlice, TritonAdamW, Update, choose_kernel, view_slice

Micro = dict[str, Tensor]  # a micro-batch of each run, [K, rows, ...]
StepRequest = tuple[Sequence[Batch], Sequence[np.ndarray]]  # a run's micro-batches, and scalars per parameter group


class StackedFormula(Formula):
    """Optimiser step on the tensors [K, ...] of K runs, each with its own scalars, by the formula of an update rule."""

    def bind_device(self, numbers: Tensor, divisor: Tensor | None, skip: Tensor | None) -> Change:
        """Return a function that updates tensors [K, ...] of K runs; see Formula.

        `numbers` has a row of scalars for each run; `divisor` and `skip` are [K].
        """

        def update_one(w: Tensor, g: Tensor, state: Mapping[str, Tensor], n: Tensor, d: Any, s: Any) -> Tensor:
            Formula.bind_device(self, n.to(w.dtype), d, s)(w, g, state, None)
            return w

        settings = (numbers, divisor, skip)
        update_all = torch.vmap(update_one, (0, 0, 0, *(None if x is None else 0 for x in settings)))

        def change(w: Tensor, g: Tensor, state: Mapping[str, Tensor], rounded: Tensor | None) -> None:
            update_all(w, g, dict(state), *settings)

        return change


class AdamWByRow(FusedAdamW):
    """AdamW with PyTorch's fused kernel, called once per run. On the CPU this is faster than StackedFormula."""

    def bind_device(self, numbers: Tensor, divisor: Tensor | None, skip: Tensor | None) -> Change:
        """Return a function that updates the tensors of all runs; see StackedFormula."""
        updates = [self.bind_host(vector) for vector in numbers.numpy()]
        skipped = [False] * len(updates) if skip is None else (skip > 0).tolist()

        def change(w: Tensor, g: Tensor, state: Mapping[str, Tensor], rounded: Tensor | None) -> None:
            g = g if divisor is None else g / divisor[:, None]
            for i, update_one in enumerate(updates):
                if not skipped[i]:
                    update_one(w[i], g[i], {slot: x[i] for slot, x in state.items()}, None)

        return change


class StackedUpdate(Update):
    """Optimiser step of a stack, whose weights and optimiser state are matrices with a row for each of K runs.

    A step updates only the rows that the attribute `rows` lists. Their gradients are the first rows of `grad`, in the
    same order.
    """

    def __init__(self, plan: Plan, flat: Tensor, grad: Tensor, slices: Mapping[str, slice]):
        super().__init__(plan, flat, grad, slices, compiled=False)
        self._chunk = max(self._chunk // len(flat), 1)
        self.rows: Tensor | None = None  # None: all rows

    def choose_kernel(self, rule: Rule) -> type[Formula]:
        """Return the class that applies this rule with different scalars for each run."""
        kernel = choose_kernel(rule, self._flat)
        if kernel is FusedAdamW and self._flat.device.type == "cpu":
            return AdamWByRow
        return kernel if kernel is TritonAdamW else StackedFormula

    def _change(self, group_slice: GroupSlice, change: Change) -> None:
        kernel = group_slice.kernel
        if isinstance(kernel, TritonAdamW):
            kernel.rows = self.rows
        for w, g, state, _ in self._pieces(group_slice):
            if self.rows is None or isinstance(kernel, TritonAdamW):
                change(w, g, state, None)
                continue
            weights, moments = w[self.rows], {slot: x[self.rows] for slot, x in state.items()}
            change(weights, g[: len(weights)], moments, None)
            for target, values in zip((w, *state.values()), (weights, *moments.values()), strict=True):
                target.index_copy_(0, self.rows, values)


class StackedStep:
    """Program that computes training steps and losses of k runs, whose weights are the `rows` of the matrix `flat`.

    `frozen` maps the name of each frozen tensor to the tensor and a bool: True if the tensor is a stack [k, ...] with
    the values of each run, False if the runs share it.
    """

    def __init__(
        self, plans: Sequence[Plan], rows: Sequence[int], flat: Tensor, grad: Tensor, slices: Mapping[str, slice],
        update: StackedUpdate, frozen: Mapping[str, tuple[Tensor, bool]], dtype: str = "float32",
        attention_dtype: torch.dtype | None = None,
    ):  # fmt: skip
        self._plan, self._flat, self._update, self._slices = plans[0], flat, update, slices
        self._rows = None if [*rows] == [*range(len(flat))] else torch.tensor(rows, device=flat.device)
        self._grad = grad[: len(rows)]
        self._shapes = {t.name: t.shape for t in self._plan.trainable}
        self._grads = [view_slice(self._grad, part, self._shapes[name]) for name, part in slices.items()]
        self._frozen = {name: values for name, (values, _) in frozen.items()}
        axes = {name: 0 if by_run else None for name, (_, by_run) in frozen.items()}
        rounds = torch.bfloat16 if dtype == "bfloat16" else None  # dtype of a product's factors
        self._autocast = partial(torch.autocast, flat.device.type, torch.bfloat16) if rounds else contextlib.nullcontext
        self._ops = StackedOps(rounds, rounds if flat.device.type == "cuda" else None, attention_dtype)
        clips, skips = [p.grad_clip for p in plans], [p.skip_nonfinite for p in plans]
        self._clip = flat.new_tensor(clips) if any(clips) else None
        self._skips = flat.new_tensor(skips) if any(skips) else None
        self._in_dims = (dict.fromkeys(slices, 0), axes, 0)

    def __call__(self, micros: Sequence[Micro], numbers: Sequence[Tensor], idle: Tensor | None = None) -> Tensor:
        """Take a step of all runs; return a tensor [2, k] with their losses and their gradient norms.

        `numbers` has a matrix for each parameter group, with a row of scalars for each run. A run whose element of
        `idle` [k] is 1 keeps its weights and optimiser state.
        """
        losses = self._backward(micros)
        norms = torch.linalg.vector_norm(self._grad, dim=1)
        metrics = torch.stack((losses, norms.to(losses.dtype)))
        divisor, skip = None, idle
        if self._clip is not None:
            excess = ((norms + 1e-6) / self._clip).clamp(min=1.0)
            divisor = torch.where(self._clip > 0, excess, torch.ones_like(excess))
        if self._skips is not None:
            skip = self._skips * (1 - metrics.isfinite().all(0).to(self._skips.dtype))
            skip = skip if idle is None else torch.maximum(skip, idle.to(skip.dtype))
        self._update.rows = self._rows
        self._update.step_on_device(numbers, divisor, skip)
        return metrics

    def losses(self, micro: Micro) -> Tensor:
        """Return the loss of one micro-batch of each run, [k], without training."""
        with torch.no_grad(), self._autocast():
            return self._map(self._plan.objective.held_out_loss, self._weights(), self._frozen, micro)

    def _weights(self) -> dict[str, Tensor]:
        flat = self._flat if self._rows is None else self._flat[self._rows]
        return {name: view_slice(flat, part, self._shapes[name]) for name, part in self._slices.items()}

    def _backward(self, micros: Sequence[Micro]) -> Tensor:
        """Write each run's gradient, summed over micro-batches, into its row of `grad`; return summed losses [k]."""
        leaves = {name: values.detach().requires_grad_() for name, values in self._weights().items()}
        losses: list[Tensor] = []
        for micro in micros:
            with self._autocast():
                by_run = self._map(self._plan.objective.training_loss, leaves, self._frozen, micro)
            gradients = torch.autograd.grad(by_run.sum(), [*leaves.values()], allow_unused=True, materialize_grads=True)
            add = torch._foreach_add_ if losses else torch._foreach_copy_
            add(self._grads, gradients)
            losses.append(by_run.detach())
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum(0)

    def _map(self, loss: Callable[..., Tensor], *arguments: Any) -> Tensor:
        """Return the losses of all runs, [k], computed by a method of the objective."""

        def compute(leaves: Mapping[str, Tensor], frozen: Mapping[str, Tensor], batch: Micro) -> Tensor:
            return loss(self._ops, self._plan.model, self._plan.params({**leaves, **frozen}, batch), batch)

        losses: Tensor = torch.vmap(compute, self._in_dims)(*arguments)
        return losses


class StackedResident:
    """Launcher of the training step and held-out loss of `count` runs, as CUDA graphs with inputs in GPU memory.

    A run is identified by its index among the runs of `step`. Up to `under_way` steps may be launched before the
    results of the first are read. The graphs always compute all runs. A run without a request is idle: it reads its
    previous batch again and keeps its weights and optimiser state.
    """

    def __init__(
        self, step: StackedStep, plan: Plan, sizes: Sequence[int], count: int, dtype: torch.dtype, capture: bool,
        under_way: int = 2,
    ):  # fmt: skip
        self._step, self._plan, self._count, self._dtype = step, plan, count, dtype
        off = "" if capture else "engine.capture=false"
        pool = torch.cuda.graph_pool_handle()  # graphs that never run at the same time can share memory
        self._blank = blank = {n: np.zeros((plan.rows, *s.shape), s.dtype) for n, s in plan.inputs.items()}
        stacked: dict[str, ArraySpec] = {n: ((count * len(x), *x.shape[1:]), x.dtype) for n, x in blank.items()}
        self._held_out = Inputs({(0, name): spec for name, spec in stacked.items()})
        self._losses = CapturedCall("a held-out loss", self._compute_losses, self._compute_losses, pool, off)
        specs: dict[Hashable, ArraySpec] = {(i, n): spec for i in range(plan.accumulate) for n, spec in stacked.items()}
        specs |= {i: ((count * size,), np.dtype(np.float64)) for i, size in enumerate(sizes)}
        self._inputs = Inputs({**specs, "idle": ((count,), np.dtype(np.float32))}, under_way)
        self._results = Results(2 * count, dtype, under_way)
        self._latest: list[StepRequest] = [([blank] * plan.accumulate, [np.zeros(size) for size in sizes])] * count
        self._numbers = [self._inputs.tensors[i].view(count, size) for i, size in enumerate(sizes)]
        self._inputs.put({"idle": [np.ones(count)]})
        # All runs are marked idle, so that rehearsing the step for its capture changes no weights.
        self._captured_step = CapturedCall("a step", self._run_step, self._run_step, pool, off)
        self._captured_step.prepare()

    @property
    def uncaptured_reason(self) -> str:
        """Reason why the step is not captured as a graph; empty if it is."""
        return self._captured_step.uncaptured_reason

    def launch(self, requests: Mapping[int, StepRequest]) -> Callable[[], list[float]]:
        """Launch a step of the runs whose indices are keys of `requests`; return a function that waits for it.

        That function returns a list of the losses of all `count` runs, followed by their gradient norms.
        """
        for index, request in requests.items():
            self._latest[index] = request
        micros, numbers = zip(*self._latest, strict=True)
        parts: dict[Hashable, Sequence[np.ndarray]] = dict(enumerate(zip(*numbers, strict=True)))
        for i, by_run in enumerate(zip(*micros, strict=True)):
            parts |= {(i, name): [micro[name] for micro in by_run] for name in self._plan.inputs}
        parts["idle"] = [np.array([index not in requests for index in range(self._count)], np.float32)]
        self._inputs.put(parts)
        return self._results.fetch(self._captured_step().flatten())

    def losses(self, micros: Mapping[int, Batch]) -> Tensor:
        """Return the loss of each run, [count]; the next call overwrites this tensor.

        `micros` has the micro-batches to evaluate, keyed by the run's index. The loss of other runs is 0.
        """
        by_run = [micros.get(index, self._blank) for index in range(self._count)]
        self._held_out.put({(0, name): [micro[name] for micro in by_run] for name in self._plan.inputs})
        return self._losses()

    def close(self) -> None:
        """Free the CUDA graphs."""
        self._captured_step.close()
        self._losses.close()

    def _run_step(self) -> Tensor:
        micros = [self._micro(self._inputs, i) for i in range(self._plan.accumulate)]
        return self._step(micros, self._numbers, self._inputs.tensors["idle"])

    def _compute_losses(self) -> Tensor:
        return self._step.losses(self._micro(self._held_out, 0))

    def _micro(self, inputs: Inputs, i: int) -> Micro:
        """Return micro-batch `i` of all runs, [count, rows, ...], with floats in the dtype of the weights."""
        by_run = {n: inputs.tensors[i, n].unflatten(0, (self._count, -1)) for n in self._plan.inputs}
        return {name: x.to(self._dtype) if x.is_floating_point() else x for name, x in by_run.items()}
