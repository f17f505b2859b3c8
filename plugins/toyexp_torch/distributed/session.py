"""Data-parallel training: each rank computes its rows of every micro-batch, and the gradients are summed.

Rank 0 has the data, the run and the callbacks. The training loop calls only rank 0's session, as if it were the session
of a single device. Each method of this session calls the same method on the other ranks, with their rows. After every
step the weights are equal on all ranks.
The weights of the targets in the loss are normalised over the whole batch, not over the rows of a rank. The sums over
the ranks therefore equal the loss and the gradient of a single device.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from toyexp import Batch, Constant, Plan, PlanTensor, StepMetrics
from toyexp_torch.distributed.group import Group, RankConfig, connect_store, open_store, select_gpu, torchrun_store
from toyexp_torch.distributed.supervisor import Supervisor
from toyexp_torch.host_copy import put_on_host, wait_for_copies
from toyexp_torch.kernels.packed import Packed
from toyexp_torch.session import SessionSettings, TorchSession
from toyexp_torch.update import Share, Update

BUCKET = 25 << 20  # bytes of gradients that are summed in one operation
Frozen = list[tuple[str, str, list[int], str | None]]  # name, dtype, shape, GGUF type (None: not packed)


class GradientSums:
    """Sum of the gradients over all ranks, in buckets. Each sum starts when the backward pass has filled its bucket.

    A bucket is a slice of the flat gradient vector. All ranks must sum the buckets in the same order: from the end of
    the model to its beginning, because a backward pass usually computes the gradients in this order.
    """

    def __init__(self, plan: Plan, grad: Tensor, slices: Mapping[str, slice], group: Group):
        self._group = group
        ordinal = {t.name: i for i, t in enumerate(plan.trainable)}
        buckets: list[list[str]] = []
        limit = BUCKET // grad.element_size()
        for name, part in slices.items():
            if not buckets or part.stop - slices[buckets[-1][0]].start > limit:
                buckets.append([])
            buckets[-1].append(name)
        buckets.sort(key=lambda names: -min(ordinal[name] for name in names))
        self._buckets = [grad[slices[names[0]].start : slices[names[-1]].stop] for names in buckets]
        self._bucket_of = {name: index for index, names in enumerate(buckets) for name in names}
        self._sizes = [len(names) for names in buckets]

    def begin(self) -> None:
        """Prepare for the last backward pass of a step, during which the gradients are summed over the ranks."""
        self._left, self._waits = [*self._sizes], list[Callable[[], None]]()

    def mark_complete(self, name: str) -> None:
        """Record that a tensor's gradient is complete.

        If all gradients of the next bucket are now complete, start to sum this bucket over the ranks.
        """
        self._left[self._bucket_of[name]] -= 1
        while (following := len(self._waits)) < len(self._left) and self._left[following] == 0:
            self._waits.append(self._group.sum(self._buckets[following]))

    def finish(self, total: Tensor) -> None:
        """Start to sum the remaining buckets and `total` over the ranks, and wait for all sums.

        A bucket remains if a tensor in it, or in an earlier bucket, does not affect the loss.
        """
        for bucket in (*self._buckets[len(self._waits) :], total):
            self._waits.append(self._group.sum(bucket))
        for wait in self._waits:
            wait()


class ShardedUpdate(Update):
    """Update that splits the optimiser state over the ranks (ZeRO stage 1).

    Each rank updates a part of the weights, and broadcasts the new values to the others.
    """

    group: Group

    @torch.no_grad()
    def step_on_device(self, *arguments: Any) -> None:
        super().step_on_device(*arguments)
        self._exchange()

    @torch.no_grad()
    def __call__(self, numbers: Sequence[np.ndarray]) -> None:
        super().__call__(numbers)
        self._exchange()

    def _exchange(self) -> None:
        """Broadcast each rank's part of the weights.

        If the session keeps rounded weights, round the parts that other ranks send. The update has already rounded this
        rank's own part.
        """
        shares = (enumerate(itertools.pairwise(cuts)) for cuts in self.cuts)
        parts = [(rank, slice(*ends)) for share in shares for rank, ends in share if ends[0] < ends[1]]
        waits = [self.group.broadcast(self._flat[part], rank) for rank, part in parts]
        for wait, (rank, part) in zip(waits, parts, strict=True):
            wait()
            if self._rounded is not None and rank != self._share.rank:
                self._rounded[part].copy_(self._flat[part])

    def gather_state(self, name: str, slots: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
        """Return a tensor's complete optimiser state from the parts of all ranks, keyed by slot (such as `m`).

        `slots` has the shape of each slot. All ranks must call this together.
        """
        local_state, state, parts = self.state.get(name, {}), {}, self._parts(name)
        for slot, shape in slots.items():
            state[slot] = values = self._flat.new_zeros(shape)
            for rank, (start, stop) in parts.items():
                part = values if len(parts) == 1 else values.view(-1)[start:stop]
                if rank == self._share.rank:
                    part.copy_(local_state[slot])
                self.group.broadcast(part, rank)()
        return state

    def slice_state(self, name: str, state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return this rank's part of a tensor's complete optimiser state, keyed by slot.

        Return an empty dict if this rank does not update the tensor.
        """
        parts = self._parts(name)
        if self._share.rank not in parts:
            return {}
        start, stop = parts[self._share.rank]
        return {s: x if len(parts) == 1 else x.reshape(-1)[start:stop] for s, x in state.items()}

    def _parts(self, name: str) -> dict[int, tuple[int, int]]:
        """Return (start, stop) for each rank that updates a part of the flattened tensor, keyed by rank."""
        tensor = self._slices[name]
        cuts = next(cuts for cuts in self.cuts if cuts[0] <= tensor.start < cuts[-1])
        bounds = [min(max(cut, tensor.start), tensor.stop) - tensor.start for cut in cuts]
        return {rank: (a, b) for rank, (a, b) in enumerate(itertools.pairwise(bounds)) if a < b}


class RankSession(TorchSession):
    """Session of one rank, which computes its rows of each micro-batch.

    The same methods must be called on all ranks, in the same order.
    """

    selects_positions = False  # if True, ranks would capture graphs, and so call collectives, at different times

    def __init__(self, plan: Plan, settings: SessionSettings, config: RankConfig):
        update = partial(ShardedUpdate, share=Share(config.rank, config.count)) if config.shard else Update
        super().__init__(plan, settings, update)
        self._config = config
        self._under_way: Callable[[], object] = lambda: None

    def join(self, group: Group) -> None:
        """Join the group of ranks. Rank 0 sends the values of all tensors, the others receive them."""
        self._group = group
        if isinstance(self._update, ShardedUpdate):
            self._update.group = group
        self._sums = GradientSums(self.plan, self._grad, self._slices, group)
        for name, leaf, gradient in zip(self._slices, self._leaves, self._grads, strict=True):
            leaf.register_hook(partial(self._add_gradient, name, gradient))
        frozen = [self._tensors[name] for name in self._frozen_names()]
        for values in (*([self._flat] if self.plan.trainable else []), *frozen):
            group.broadcast(values.raw if isinstance(values, Packed) else values, 0)()
        if self._rounded is not None:
            self._rounded.copy_(self._flat)

    def frozen_layout(self) -> Frozen:
        """Return how the device stores each frozen tensor: name, dtype, shape, and the GGUF type if it is packed."""
        layout: Frozen = []
        for name in self._frozen_names():
            values = self._tensors[name]
            raw, kind = (values.raw, values.kind) if isinstance(values, Packed) else (values, None)
            layout.append((name, str(raw.dtype).removeprefix("torch."), list(raw.shape), kind))
        return layout

    def allocate_frozen(self, frozen_layout: Frozen) -> None:
        """Allocate the frozen tensors in the layout that rank 0 sends. Later, `join` receives their values."""
        for name, dtype, shape, kind in frozen_layout:
            raw = torch.empty(shape, dtype=getattr(torch, dtype), device=self._device)
            self._tensors[name] = raw if kind is None else Packed(raw, kind, self._dtype)

    def _frozen_names(self) -> list[str]:
        return [t.name for t in self.plan.tensors if not t.trainable]

    def _backward(self, micros: Sequence[dict[str, Tensor]]) -> Tensor:
        """Write the gradients, summed over micro-batches and ranks, into the gradient vector; return the summed loss.

        The sum over ranks starts as soon as the last micro-batch's backward pass has computed the gradients of a
        bucket.
        """
        losses = []
        self._grad.zero_()
        for number, micro in enumerate(micros, 1):
            loss = self._compute_loss(micro)
            self._last = number == len(micros)
            if self._last:
                self._sums.begin()
            torch.autograd.grad(loss, self._leaves, allow_unused=True)
            losses.append(loss.detach())
        self._sums.finish(total := torch.stack(losses).sum().reshape(1))
        return total[0]

    def _add_gradient(self, name: str, target: Tensor, gradient: Tensor) -> None:
        target.add_(gradient)
        if self._last:
            self._sums.mark_complete(name)

    def do_loss(self, micro: Batch) -> float:
        total = torch.tensor([super().do_loss(micro)], dtype=torch.float64, device=self._device)
        self._group.sum(total)()
        return float(total)

    def do_metrics(self, micro: Batch) -> Mapping[str, float]:
        local_metrics = super().do_metrics(micro)
        totals = torch.tensor([*local_metrics.values()], dtype=torch.float64, device=self._device)
        self._group.sum(totals)()
        return dict(zip(local_metrics, totals.tolist(), strict=True))

    def do_logits(self, micro: Batch, rows: int) -> np.ndarray:
        local_logits = super().do_logits(micro, rows)
        logits = torch.zeros((self._config.count, *local_logits.shape), device=self._device)
        logits[self._config.rank] = torch.from_numpy(local_logits)
        self._group.sum(logits)()
        return logits.flatten(0, 1).cpu().numpy()

    def do_snapshot(self, into: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        if not isinstance(self._update, ShardedUpdate):
            return super().do_snapshot(into)
        slots = {t.name: self.plan.slots(t) for t in self.plan.trainable}
        parts = self.name_arrays(
            {n: (n, "") for n in slots}, {n: {s: (n, s) for s in shapes} for n, shapes in slots.items()}
        )
        names, arrays = {part: name for name, part in parts.items()}, dict(into)
        for tensor in self.plan.trainable:  # one at a time: the state of all may not fit on one device
            state = self._update.gather_state(tensor.name, slots[tensor.name])
            if self._config.rank:  # only rank 0 needs the snapshot
                continue
            for part, values in {"": self._weights(tensor), **state}.items():
                put_on_host(arrays, names[tensor.name, part], values)
        wait_for_copies(self._device)
        return arrays

    def do_restore(self, tensor: PlanTensor, values: np.ndarray, state: Mapping[str, np.ndarray]) -> None:
        if isinstance(self._update, ShardedUpdate):
            state = self._update.slice_state(tensor.name, state)
        super().do_restore(tensor, values, state)

    def do_close(self) -> None:
        super().do_close()
        if group := self.__dict__.pop("_group", None):
            group.abort()

    # -- calls from rank 0, in place of methods whose arguments or results cannot be sent --

    def join_ranks(self) -> None:
        """Join the group of ranks and prepare the training step. Rank 0 does the same at the same time."""
        self.join(Group(self._config, connect_store(self._config), self._settings.device))
        self.do_build()

    def launch_step(self, micros: Sequence[Batch], numbers: Sequence[np.ndarray]) -> None:
        """Launch a step, then wait for the previous step to end."""
        before, self._under_way = self._under_way, self.do_launch(micros, numbers)
        before()

    def restore_tensor(self, name: str, values: np.ndarray, state: Mapping[str, np.ndarray]) -> None:
        self.do_restore(self.plan.tensor(name), values, state)


def open_rank(config: RankConfig, plan: Plan, settings: SessionSettings, frozen_layout: Frozen) -> RankSession:
    """Return an open session of a worker rank. Its frozen tensors receive their values in `join_ranks`."""
    if settings.device == "cuda":
        select_gpu(config)
    session = RankSession(plan, settings, config)
    session.do_open()
    session.allocate_frozen(frozen_layout)
    return session


class LeadSession(RankSession):
    """Session of rank 0. Each of its methods also calls the same method on the sessions of the other ranks.

    The function `gather` starts the other ranks if necessary, and returns their supervisor.
    """

    _numbers = itertools.count()

    def __init__(
        self, plan: Plan, settings: SessionSettings, count: int, shard: bool, gather: Callable[[], Supervisor]
    ):
        super().__init__(plan, settings, RankConfig(0, count, shard, next(self._numbers), 0))
        self._local_plan, self._gather_ranks = replace(plan, rows=plan.rows // count), gather

    def do_open(self) -> None:
        self._others = self._gather_ranks()  # new processes load PyTorch while this one continues
        if self._others.is_persistent:
            self._store = torchrun_store()
        else:
            self._store, port = open_store(self._config.count)
            self._config = replace(self._config, port=port)
        if self._settings.device == "cuda":
            select_gpu(self._config)
        super().do_open()

    def do_build(self) -> None:
        # The other ranks receive the values from this one, so they do not need the files that the plan names.
        tensors = tuple(replace(t, values=Constant(0.0)) for t in self.plan.tensors)
        plan, layout = replace(self._local_plan, tensors=tensors), self.frozen_layout()
        with self._others.watch_computation():
            self._others.call("open", lambda rank: (replace(self._config, rank=rank), plan, self._settings, layout))
            self._others.wait_for_all()
            self._others.call("join_ranks")  # uninterruptible native code, so all ranks must be ready
            group = Group(self._config, self._store, self._settings.device, self._others.check)
            self._others.abort = group.abort
            self.join(group)
            super().do_build()

    def do_reset_state(self) -> None:
        with self._call_others("do_reset_state"):
            super().do_reset_state()

    def do_launch(self, micros: Sequence[Batch], numbers: Sequence[np.ndarray]) -> Callable[[], StepMetrics]:
        with self._call_others("launch_step", lambda rank: (self._split_rows(micros, rank), list(numbers))):
            wait = super().do_launch(self._split_rows(micros, 0), numbers)

        def waited() -> StepMetrics:
            with self._others.watch_computation():
                return wait()

        return waited

    def do_gradients(self, micros: Sequence[Batch]) -> dict[str, np.ndarray]:
        with self._call_others("do_gradients", lambda rank: (self._split_rows(micros, rank),)):
            return super().do_gradients(self._split_rows(micros, 0))

    def do_loss(self, micro: Batch) -> float:
        with self._call_others("do_loss", lambda rank: self._split_rows([micro], rank)):
            return super().do_loss(self._split_rows([micro], 0)[0])

    def do_metrics(self, micro: Batch) -> Mapping[str, float]:
        with self._call_others("do_metrics", lambda rank: self._split_rows([micro], rank)):
            return super().do_metrics(self._split_rows([micro], 0)[0])

    def do_logits(self, micro: Batch, rows: int) -> np.ndarray:
        with self._call_others("do_logits", lambda rank: (self._split_rows([micro], rank)[0], self._local_plan.rows)):
            return super().do_logits(self._split_rows([micro], 0)[0], self._local_plan.rows)[:rows]

    def do_snapshot(self, into: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        if not self._config.shard:
            return super().do_snapshot(into)
        with self._call_others("do_snapshot", lambda rank: ({},)):
            return super().do_snapshot(into)

    def do_restore(self, tensor: PlanTensor, values: np.ndarray, state: Mapping[str, np.ndarray]) -> None:
        with self._call_others("restore_tensor", lambda rank: (tensor.name, values, dict(state))):
            super().do_restore(tensor, values, state)

    def describe(self) -> dict[str, Any]:
        """Return the description of rank 0's device, with the sum of all ranks' threads and a list of the ranks."""
        facts, count = super().describe(), self._config.count
        ranks = [f"pid {os.getpid()} on {platform.node()}", *(f"pid {p.pid} on {p.host}" for p in self._others.ranks)]
        threads = facts["threads"] * count
        return facts | {"threads": threads, "devices": count, "shard": self._config.shard, "ranks": ranks}

    def do_close(self) -> None:
        if others := self.__dict__.pop("_others", None):
            others.close()
            # After losing a rank in the middle of a kernel, CUDA cannot free memory.
            with contextlib.suppress(RuntimeError) if others.failed else contextlib.nullcontext():
                super().do_close()

    def _split_rows(self, micros: Sequence[Batch], rank: int) -> list[dict[str, np.ndarray]]:
        rows = slice(rank * self._local_plan.rows, (rank + 1) * self._local_plan.rows)
        return [{name: micro[name][rows] for name in self.plan.inputs} for micro in micros]

    @contextlib.contextmanager
    def _call_others(self, name: str, arguments: Callable[[int], Sequence[Any]] = lambda rank: ()) -> Iterator[None]:
        """Call the method `name` of the other ranks' sessions, while the body does rank 0's part of the computation.

        `arguments(rank)` returns the arguments for one rank.
        """
        with self._others.watch_computation():
            self._others.call(name, arguments)
            yield
