"""Data parallel training: each rank computes its rows of every micro-batch, and the gradients are summed.

Rank 0 has the data, the run and the callbacks. Its session is like any other to a caller, and tells the others which
method to call with their rows. Weights are the same on all ranks after every step. A target weighs what it weighs in
the whole batch, so that the sums over the ranks are the loss and the gradient of one device.
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
from toyexp_torch.distributed.group import Group, Place, meet, open_store, take_gpu, torchruns_store
from toyexp_torch.distributed.supervisor import Supervisor
from toyexp_torch.host_copy import put_on_host, wait_for_copies
from toyexp_torch.kernels.packed import Packed
from toyexp_torch.session import TorchSession, Wanted
from toyexp_torch.update import Share, Update

BUCKET = 25 << 20  # bytes of gradients that are summed at once
Frozen = list[tuple[str, str, list[int], str | None]]  # name, dtype, shape, and the file's type of a packed tensor


class Sums:
    """Sums the gradients over all ranks in buckets, each as soon as the backward pass is done with it.

    Buckets are stretches of the flat vector. All ranks send them in one order, as collectives require: from the end of
    the model to its beginning, which is likely the order of the backward pass.
    """

    def __init__(self, plan: Plan, grad: Tensor, places: Mapping[str, slice], group: Group):
        self._group = group
        ordinal = {t.name: i for i, t in enumerate(plan.trainable)}
        buckets: list[list[str]] = []
        most = BUCKET // grad.element_size()
        for name, place in places.items():
            if not buckets or place.stop - places[buckets[-1][0]].start > most:
                buckets.append([])
            buckets[-1].append(name)
        buckets.sort(key=lambda names: -min(ordinal[name] for name in names))
        self._stretches = [grad[places[names[0]].start : places[names[-1]].stop] for names in buckets]
        self._bucket_of = {name: index for index, names in enumerate(buckets) for name in names}
        self._sizes = [len(names) for names in buckets]

    def begin(self) -> None:
        """Prepare for the last backward pass of a step."""
        self._left, self._waits = [*self._sizes], list[Callable[[], None]]()

    def has(self, name: str) -> None:
        """Note that a tensor's whole gradient is in its place; begin the sums that can."""
        self._left[self._bucket_of[name]] -= 1
        while (following := len(self._waits)) < len(self._left) and self._left[following] == 0:
            self._waits.append(self._group.sum(self._stretches[following]))

    def finish(self, total: Tensor) -> None:
        """Sum the other buckets (a tensor of theirs is not in the loss), and at last the `total`; wait for all."""
        for stretch in (*self._stretches[len(self._waits) :], total):
            self._waits.append(self._group.sum(stretch))
        for wait in self._waits:
            wait()


class SharedUpdate(Update):
    """An update in which each rank holds the state of its own part of the weights, changes it, and sends it."""

    group: Group

    @torch.no_grad()
    def on_device(self, *arguments: Any) -> None:
        super().on_device(*arguments)
        self._exchange()

    @torch.no_grad()
    def __call__(self, numbers: Sequence[np.ndarray]) -> None:
        super().__call__(numbers)
        self._exchange()

    def _exchange(self) -> None:
        """Send each rank's part to the others, which round it as its kernels did."""
        shares = (enumerate(itertools.pairwise(cuts)) for cuts in self.cuts)
        parts = [(rank, slice(*ends)) for share in shares for rank, ends in share if ends[0] < ends[1]]
        waits = [self.group.broadcast(self._flat[here], rank) for rank, here in parts]
        for wait, (rank, here) in zip(waits, parts, strict=True):
            wait()
            if self._rounded is not None and rank != self._share.rank:
                self._rounded[here].copy_(self._flat[here])

    def gathered(self, name: str, slots: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
        """Return a tensor's whole state; all ranks call it together."""
        own, found, parts = self.state.get(name, {}), {}, self._parts(name)
        for slot, shape in slots.items():
            found[slot] = values = self._flat.new_zeros(shape)
            for rank, (start, stop) in parts.items():
                part = values if len(parts) == 1 else values.view(-1)[start:stop]
                if rank == self._share.rank:
                    part.copy_(own[slot])
                self.group.broadcast(part, rank)()
        return found

    def own_part(self, name: str, state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return this rank's part of a tensor's whole state."""
        parts = self._parts(name)
        if self._share.rank not in parts:
            return {}
        start, stop = parts[self._share.rank]
        return {s: x if len(parts) == 1 else x.reshape(-1)[start:stop] for s, x in state.items()}

    def _parts(self, name: str) -> dict[int, tuple[int, int]]:
        """Return which ranks change a tensor, and from where to where."""
        here = self._places[name]
        cuts = next(cuts for cuts in self.cuts if cuts[0] <= here.start < cuts[-1])
        bounds = [min(max(cut, here.start), here.stop) - here.start for cut in cuts]
        return {rank: (a, b) for rank, (a, b) in enumerate(itertools.pairwise(bounds)) if a < b}


class RankSession(TorchSession):
    """The session of one rank, which computes its own rows. All ranks call the same methods in the same order."""

    selects = False  # ranks would capture at different steps what all of them have to call together

    def __init__(self, plan: Plan, wanted: Wanted, place: Place):
        update = partial(SharedUpdate, share=Share(place.rank, place.count)) if place.shard else Update
        super().__init__(plan, wanted, update)
        self._place = place
        self._under_way: Callable[[], object] = lambda: None

    def join(self, group: Group) -> None:
        """Join the other ranks, and take the values of rank 0."""
        self._group = group
        if isinstance(self._update, SharedUpdate):
            self._update.group = group
        self._sums = Sums(self.plan, self._grad, self._places, group)
        for name, leaf, gradient in zip(self._places, self._leaves, self._grads, strict=True):
            leaf.register_hook(partial(self._take, name, gradient))
        held = [self._tensors[name] for name in self._frozen_names()]
        for values in (*([self._flat] if self.plan.trainable else []), *held):
            group.broadcast(values.raw if isinstance(values, Packed) else values, 0)()
        if self._rounded is not None:
            self._rounded.copy_(self._flat)

    def frozen(self) -> Frozen:
        """Return how the tensors that do not train are held in memory."""
        layout: Frozen = []
        for name in self._frozen_names():
            held = self._tensors[name]
            raw, kind = (held.raw, held.kind) if isinstance(held, Packed) else (held, None)
            layout.append((name, str(raw.dtype).removeprefix("torch."), list(raw.shape), kind))
        return layout

    def make_room(self, frozen: Frozen) -> None:
        """Allocate the tensors that do not train; `join` brings their values."""
        for name, dtype, shape, kind in frozen:
            raw = torch.empty(shape, dtype=getattr(torch, dtype), device=self._device)
            self._tensors[name] = raw if kind is None else Packed(raw, kind, self._dtype)

    def _frozen_names(self) -> list[str]:
        return [t.name for t in self.plan.tensors if not t.trainable]

    def _backward(self, micros: Sequence[dict[str, Tensor]]) -> Tensor:
        """Do as on one device, but send each gradient as soon as the last pass has it."""
        losses = []
        self._grad.zero_()
        for number, micro in enumerate(micros, 1):
            loss = self._loss_of(micro)
            self._last = number == len(micros)
            if self._last:
                self._sums.begin()
            torch.autograd.grad(loss, self._leaves, allow_unused=True)
            losses.append(loss.detach())
        self._sums.finish(total := torch.stack(losses).sum().reshape(1))
        return total[0]

    def _take(self, name: str, place: Tensor, found: Tensor) -> None:
        """Add the whole gradient of a tensor, which the backward pass has found, to its place."""
        place.add_(found)
        if self._last:
            self._sums.has(name)

    def do_loss(self, micro: Batch) -> float:
        total = torch.tensor([super().do_loss(micro)], dtype=torch.float64, device=self._device)
        self._group.sum(total)()
        return float(total)

    def do_logits(self, micro: Batch, rows: int) -> np.ndarray:
        own = super().do_logits(micro, rows)
        found = torch.zeros((self._place.count, *own.shape), device=self._device)
        found[self._place.rank] = torch.from_numpy(own)
        self._group.sum(found)()
        return found.flatten(0, 1).cpu().numpy()

    def do_snapshot(self, into: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        if not isinstance(self._update, SharedUpdate):
            return super().do_snapshot(into)
        slots = {t.name: self.plan.slots(t) for t in self.plan.trainable}
        parts = self.name_arrays({n: (n, "") for n in slots}, {n: {s: (n, s) for s in own} for n, own in slots.items()})
        names, arrays = {part: name for name, part in parts.items()}, dict(into)
        for tensor in self.plan.trainable:  # one at a time: no device has room for all
            state = self._update.gathered(tensor.name, slots[tensor.name])
            if self._place.rank:  # rank 0 alone keeps it
                continue
            for part, values in {"": self._weights(tensor), **state}.items():
                put_on_host(arrays, names[tensor.name, part], values)
        wait_for_copies(self._device)
        return arrays

    def do_restore(self, tensor: PlanTensor, values: np.ndarray, state: Mapping[str, np.ndarray]) -> None:
        if isinstance(self._update, SharedUpdate):
            state = self._update.own_part(tensor.name, state)
        super().do_restore(tensor, values, state)

    def do_close(self) -> None:
        super().do_close()
        if group := self.__dict__.pop("_group", None):
            group.abort()

    # -- what rank 0 calls here in place of methods that take a plan's tensor or return a function --

    def meet(self) -> None:
        """Join the other ranks and build, while rank 0 does."""
        self.join(Group(self._place, meet(self._place), self._wanted.device))
        self.do_build()

    def take_step(self, micros: Sequence[Batch], numbers: Sequence[np.ndarray]) -> None:
        """Begin a step, and wait for the one before."""
        before, self._under_way = self._under_way, self.do_launch(micros, numbers)
        before()

    def restore_of(self, name: str, values: np.ndarray, state: Mapping[str, np.ndarray]) -> None:
        """Restore one tensor."""
        self.do_restore(self.plan.tensor(name), values, state)


def open_rank(place: Place, plan: Plan, wanted: Wanted, frozen: Frozen) -> RankSession:
    """Open the session of a rank other than rank 0."""
    if wanted.device == "cuda":
        take_gpu(place)
    session = RankSession(plan, wanted, place)
    session.do_open()
    session.make_room(frozen)
    return session


class LeadSession(RankSession):
    """The session of rank 0, which has the other ranks do their part of what it is called for."""

    _numbers = itertools.count()

    def __init__(self, plan: Plan, wanted: Wanted, count: int, shard: bool, gather: Callable[[], Supervisor]):
        super().__init__(plan, wanted, Place(0, count, shard, next(self._numbers), 0))
        self._own, self._gather_ranks = replace(plan, rows=plan.rows // count), gather

    def do_open(self) -> None:
        self._others = self._gather_ranks()  # ranks that are started here load PyTorch meanwhile
        if self._others.stays:
            self._store = torchruns_store()
        else:
            self._store, port = open_store(self._place.count)
            self._place = replace(self._place, port=port)
        if self._wanted.device == "cuda":
            take_gpu(self._place)
        super().do_open()

    def do_build(self) -> None:
        # The others get their values from here, and need no file that the plan names.
        tensors = tuple(replace(t, values=Constant(0.0)) for t in self.plan.tensors)
        plan, frozen = replace(self._own, tensors=tensors), self.frozen()
        with self._others.together():
            self._others.call("open", lambda rank: (replace(self._place, rank=rank), plan, self._wanted, frozen))
            self._others.wait_for_all()
            self._others.call("meet")  # which waits in native code, which no signal ends
            group = Group(self._place, self._store, self._wanted.device, self._others.check)
            self._others.abort = group.abort
            self.join(group)
            super().do_build()

    def do_reset_state(self) -> None:
        with self._calling("do_reset_state"):
            super().do_reset_state()

    def do_launch(self, micros: Sequence[Batch], numbers: Sequence[np.ndarray]) -> Callable[[], StepMetrics]:
        with self._calling("take_step", lambda rank: (self._rows_of(micros, rank), list(numbers))):
            wait = super().do_launch(self._rows_of(micros, 0), numbers)

        def waited() -> StepMetrics:
            with self._others.together():
                return wait()

        return waited

    def do_gradients(self, micros: Sequence[Batch]) -> dict[str, np.ndarray]:
        with self._calling("do_gradients", lambda rank: (self._rows_of(micros, rank),)):
            return super().do_gradients(self._rows_of(micros, 0))

    def do_loss(self, micro: Batch) -> float:
        with self._calling("do_loss", lambda rank: self._rows_of([micro], rank)):
            return super().do_loss(self._rows_of([micro], 0)[0])

    def do_logits(self, micro: Batch, rows: int) -> np.ndarray:
        with self._calling("do_logits", lambda rank: (self._rows_of([micro], rank)[0], self._own.rows)):
            return super().do_logits(self._rows_of([micro], 0)[0], self._own.rows)[:rows]

    def do_snapshot(self, into: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        if not self._place.shard:
            return super().do_snapshot(into)
        with self._calling("do_snapshot", lambda rank: ({},)):
            return super().do_snapshot(into)

    def do_restore(self, tensor: PlanTensor, values: np.ndarray, state: Mapping[str, np.ndarray]) -> None:
        with self._calling("restore_of", lambda rank: (tensor.name, values, dict(state))):
            super().do_restore(tensor, values, state)

    def describe(self) -> dict[str, Any]:
        """Describe one device, but with the threads of all, and name the ranks."""
        own, count = super().describe(), self._place.count
        ranks = [f"pid {os.getpid()} on {platform.node()}", *(f"pid {p.pid} on {p.host}" for p in self._others.ranks)]
        return own | {"threads": own["threads"] * count, "devices": count, "shard": self._place.shard, "ranks": ranks}

    def do_close(self) -> None:
        if others := self.__dict__.pop("_others", None):
            others.close()
            # A GPU that lost another rank in the middle of a kernel can free nothing.
            with contextlib.suppress(RuntimeError) if others.failed else contextlib.nullcontext():
                super().do_close()

    def _rows_of(self, micros: Sequence[Batch], rank: int) -> list[dict[str, np.ndarray]]:
        here = slice(rank * self._own.rows, (rank + 1) * self._own.rows)
        return [{name: micro[name][here] for name in self.plan.inputs} for micro in micros]

    @contextlib.contextmanager
    def _calling(self, name: str, arguments: Callable[[int], Sequence[Any]] = lambda rank: ()) -> Iterator[None]:
        """Have each other rank call its method of that name, with arguments of its own, beside what is done inside."""
        with self._others.together():
            self._others.call(name, arguments)
            yield
