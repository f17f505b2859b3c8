"""Optimiser step on one vector of all weights and one of all gradients, by fused kernels or the rules' formulas."""

from __future__ import annotations

import importlib.util
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from toyexp import Arithmetic, Group, Plan, Rule

NO_STEPS = 1e9  # step count for which 1 - beta^steps is 1, which disables the fused kernel's bias correction
# Numbers that a formula computes at a time. With CHUNK intermediate results stay in a core's cache. With LARGE_CHUNK,
# for GPUs and compiled formulas, they do not take the memory of several models.
CHUNK, LARGE_CHUNK = 1 << 17, 1 << 24
ALIGNMENT = 64  # elements; keeps every view aligned to cache lines and vector loads

State = Mapping[str, Tensor]
# Called with weights, gradient, state, and a tensor (or None) that receives the new weights rounded.
Change = Callable[[Tensor, Tensor, State, Tensor | None], None]
Piece = tuple[Tensor, Tensor, State, Tensor | None]


class TorchArithmetic(Arithmetic):
    """Operations that optimisers use in their formulas, on torch tensors. A scalar is a tensor without axes."""

    def sqrt(self, x: Tensor) -> Tensor:
        return x.sqrt()

    def sign(self, x: Tensor) -> Tensor:
        return x.sign()

    def at_least(self, x: Tensor, low: float) -> Tensor:
        return x.clamp(min=low)

    def sum(self, x: Tensor) -> Tensor:
        return x.sum().reshape(1)

    def sum_last(self, x: Tensor) -> Tensor:
        return x.sum(-1, keepdim=True)


@dataclass(frozen=True)
class Share:
    """Part of the weights that this rank updates: part `rank`, counted from 0, of `count` parts."""

    rank: int = 0
    count: int = 1

    def cuts(self, begin: int, end: int, allowed: Sequence[int] = ()) -> list[int]:
        """Divide the range begin..end into `count` nearly equal parts, and return their `count` + 1 bounds.

        If `allowed` is not empty, every inner bound is one of these positions, or `end`.
        """
        even = [begin + (end - begin) * rank // self.count for rank in range(1, self.count)]
        if not allowed:
            return [begin, *(begin + (cut - begin) // ALIGNMENT * ALIGNMENT for cut in even), end]
        return [begin, *(min((*allowed, end), key=lambda position: abs(position - cut)) for cut in even), end]


UNSHARED = Share()


@dataclass
class GroupSlice:
    """One parameter group: its slice (`start` to `stop`) of the flat vector of weights, and its optimiser state."""

    group: Group
    kernel: Formula
    names: Sequence[str]  # tensors that this process updates, entirely or in part
    start: int
    stop: int
    origin: int  # position in the flat vector of the first element of the state's vectors
    state: State  # for an element-wise rule: a vector for each slot, such as m
    pieces: list[Piece] = field(default_factory=list)  # arguments of each call of the kernel, filled at the first step


class Update:
    """Optimiser step that updates the weights in the vector `flat` by the gradients in the vector `grad`.

    `slices` has the slice of each trainable tensor in these vectors, keyed by name. The vector `rounded` receives the
    new weights in a shorter dtype. For several runs, `flat`, `grad` and the optimiser state are matrices with a row for
    each run; see `StackedUpdate`.
    """

    def __init__(
        self, plan: Plan, flat: Tensor, grad: Tensor, slices: Mapping[str, slice], compiled: bool,
        rounded: Tensor | None = None, share: Share = UNSHARED,
    ):  # fmt: skip
        self._share = share
        self._flat, self._grad, self._slices, self._rounded = flat, grad, slices, rounded
        self._shapes = {t.name: t.shape for t in plan.trainable}
        self._compute_results = torch.compile(_compute_results, dynamic=False) if compiled else _compute_results
        self._chunk = CHUNK if flat.device.type == "cpu" and not compiled else LARGE_CHUNK
        self.state: dict[str, State] = {}  # by tensor and slot (such as m); a vector if only a part is on this rank
        self.cuts: list[list[int]] = []  # for each rule: the start of each rank's share of the weights, and the end
        self._group_slices: list[GroupSlice] = []
        for _, groups in itertools.groupby(plan.updates, key=lambda group: id(group.rule)):
            self._allocate(list(groups))

    def _allocate(self, groups: Sequence[Group]) -> None:
        """Allocate this rank's optimiser state for parameter groups with one update rule; record each group's slice."""
        rule = groups[0].rule
        kernel = self.choose_kernel(rule)(rule, self._compute_results, self._flat.new_tensor)
        allowed = [] if rule.elementwise else [self._slices[n].start for group in groups for n in group.tensors]
        cuts = self._share.cuts(self._span(groups[0]).start, self._span(groups[-1]).stop, allowed)
        begin, end = cuts[self._share.rank : self._share.rank + 2]
        vectors = {slot: self._zeros((end - begin,)) for slot in rule.slots((1,))} if rule.elementwise else {}
        for group in groups:
            parts = {name: part for name in group.tensors if (part := _intersect(self._slices[name], begin, end))}
            bounds = _intersect(self._span(group), begin, end) or range(begin, begin)
            self._group_slices.append(GroupSlice(group, kernel, [*parts], bounds.start, bounds.stop, begin, vectors))
            for name, part in parts.items():
                shape = self._shapes[name]
                if rule.elementwise:
                    view_shape = shape if len(part) == math.prod(shape) else (-1,)
                    span = slice(part.start - begin, part.stop - begin)
                    self.state[name] = {slot: view_slice(vector, span, view_shape) for slot, vector in vectors.items()}
                else:
                    self.state[name] = {slot: self._zeros(size) for slot, size in rule.slots(shape).items()}
        self.cuts.append(cuts)

    def choose_kernel(self, rule: Rule) -> type[Formula]:
        """Return the class that applies this rule to tensors: Formula, or a subclass with a faster kernel."""
        return choose_kernel(rule, self._flat)

    def _zeros(self, shape: Sequence[int]) -> Tensor:
        return self._flat.new_zeros((*self._flat.shape[:-1], *shape))

    def _span(self, group: Group) -> slice:
        """Return a group's slice of `flat` and `grad`, including the padding after its last tensor."""
        stop = self._slices[group.tensors[-1]].stop
        return slice(self._slices[group.tensors[0]].start, -(-stop // ALIGNMENT) * ALIGNMENT)

    def sizes(self) -> list[int]:
        """Return, for each parameter group, how many scalars (such as the learning rate) a step reads."""
        return [len(group_slice.group.rule.names()) for group_slice in self._group_slices]

    @torch.no_grad()
    def step_on_device(self, numbers: Sequence[Tensor], divisor: Tensor | None, skip: Tensor | None) -> None:
        """Take one step whose inputs are all in device memory, so that a CUDA graph can record it.

        `numbers` has a vector of scalars for each group. The gradient is divided by `divisor`, and nothing changes if
        `skip` is 1; both are tensors without axes, or None.
        """
        for group_slice, vector in zip(self._group_slices, numbers, strict=True):
            self._change(group_slice, group_slice.kernel.bind_device(vector, divisor, skip))

    def __call__(self, numbers: Sequence[np.ndarray]) -> None:
        """Take one step; `numbers` has a vector of scalars for each group, in host memory."""
        with torch.no_grad():  # faster than the decorator, which matters for small models
            for group_slice, vector in zip(self._group_slices, numbers, strict=True):
                self._change(group_slice, group_slice.kernel.bind_host(vector))

    def _change(self, group_slice: GroupSlice, change: Change) -> None:
        if not group_slice.pieces:
            group_slice.pieces = list(self._pieces(group_slice))
        for piece in group_slice.pieces:
            change(*piece)

    def _pieces(self, group_slice: GroupSlice) -> Iterator[Piece]:
        """Divide a parameter group into pieces that are updated one by one, and yield the tensors of each piece.

        They are its weights, gradient, optimiser state, and rounded weights (or None). A piece is one tensor or, if the
        update rule is element-wise, one chunk of the flat vector.
        """
        if not group_slice.group.rule.elementwise:
            for name in group_slice.names:
                part, shape = self._slices[name], self._shapes[name]
                view = partial(view_slice, span=part, shape=shape)
                rounded = None if self._rounded is None else view(self._rounded)
                yield view(self._flat), view(self._grad), self.state[name], rounded
            return
        size = max(group_slice.stop - group_slice.start, 1) if group_slice.kernel.is_single_pass else self._chunk
        for start in range(group_slice.start, group_slice.stop, size):
            length = min(size, group_slice.stop - start)
            state = {slot: v.narrow(-1, start - group_slice.origin, length) for slot, v in group_slice.state.items()}
            rounded = None if self._rounded is None else self._rounded[start : start + length]
            yield self._flat.narrow(-1, start, length), self._grad.narrow(-1, start, length), state, rounded


def _intersect(span: slice, begin: int, end: int) -> range:
    """Return the range of positions that are both in the slice `span` and in begin..end."""
    return range(max(span.start, begin), min(span.stop, end))


def view_slice(vectors: Tensor, span: slice, shape: Sequence[int]) -> Tensor:
    """Return a slice of a vector as a view of the given shape.

    If `vectors` is a matrix, return this slice of each of its rows, as a view [rows, *shape].
    """
    return vectors.narrow(-1, span.start, span.stop - span.start).view((*vectors.shape[:-1], *shape))


def _compute_results(rule: Rule, w: Tensor, g: Tensor, state: State, n: State) -> list[Tensor]:
    return rule.results(TorchArithmetic(), w, g, state, n)


@dataclass
class Formula:
    """Optimiser step on tensors by the formula of an update rule, such as AdamW.

    `results` computes the formula, and `to_tensor` copies a vector of scalars to the device.
    """

    rule: Rule
    results: Callable[[Rule, Tensor, Tensor, State, State], list[Tensor]]
    to_tensor: Callable[[np.ndarray], Tensor]
    is_single_pass = False  # True if one call changes a whole slice at full speed

    def bind_host(self, vector: np.ndarray) -> Change:
        """Return a function that updates tensors, given the step's scalars as a vector in host memory."""
        return self.bind_device(self.to_tensor(vector), None, None)

    def bind_device(self, numbers: Tensor, divisor: Tensor | None, skip: Tensor | None) -> Change:
        """Return a function that updates tensors, given the step's scalars as a tensor on the device.

        The function divides the gradient by `divisor`, and changes nothing if `skip` is 1; both may be None.
        """
        n = dict(zip(self.rule.names(), numbers.unbind(), strict=True))

        def change(w: Tensor, g: Tensor, state: State, rounded: Tensor | None) -> None:
            results = self.results(self.rule, w, g if divisor is None else g / divisor, state, n)
            for target, values in zip((w, *state.values()), results, strict=True):
                target.copy_(values if skip is None else torch.where(skip > 0, target, values))
            if rounded is not None:
                rounded.copy_(w)

        return change


class FusedAdamW(Formula):
    """AdamW in place on vectors, with PyTorch's fused kernel.

    The kernel computes w = w (1 - lr wd) - lr / c1 m / (sqrt(v / c2) + eps). Here m and v are the two moments, and wd
    is the weight decay. The kernel derives the bias corrections c1 = 1 - beta1^t and c2 = 1 - beta2^t from a step count
    t. The formula of toyexp.AdamW multiplies m and v by the scalars s5 and s6 instead.
    """

    is_single_pass = True

    def bind_host(self, vector: np.ndarray) -> Change:
        """Return a function that updates tensors with the scalars of toyexp.AdamW; see Formula.

        AdamW multiplies its moments m and v by the scalars s5 and s6. Here these are folded into lr and eps:
        lr (m s5) / (sqrt(v s6) + eps) = (lr s5 / sqrt(s6)) m / (sqrt(v) + eps / sqrt(s6)). The fused kernel gets a step
        count so large that its own bias corrections are 1.
        """
        lr, beta1, beta2, eps, weight_decay, slot5, slot6 = vector.tolist()
        root = slot6**0.5

        def change(w: Tensor, g: Tensor, state: State, rounded: Tensor | None) -> None:
            if weight_decay:
                w.mul_(1 - lr * weight_decay)
            steps = torch.full((), NO_STEPS, dtype=torch.float32, device=w.device)
            torch._fused_adamw_(
                [w], [g], [state["m"]], [state["v"]], [], [steps],
                lr=lr * slot5 / root, beta1=beta1, beta2=beta2, eps=eps / root, weight_decay=0.0,
                amsgrad=False, maximize=False,
            )  # fmt: skip

        return change


@dataclass
class TritonAdamW(Formula):
    """AdamW as one Triton kernel, which reads the step's scalars from GPU memory."""

    is_single_pass = True
    rows: Tensor | None = None  # rows of the matrices [K, n] to change, in the order of the gradient's rows; None: all

    def __post_init__(self) -> None:
        self._no_skip = self.to_tensor(np.zeros(()))

    def bind_device(self, numbers: Tensor, divisor: Tensor | None, skip: Tensor | None) -> Change:
        """Return a function that updates tensors, as `Formula.bind_device` does, but in one pass over memory."""
        from toyexp_torch.kernels.adamw import step  # imported here because it needs Triton

        def change(w: Tensor, g: Tensor, state: State, rounded: Tensor | None) -> None:
            skip_now = self._no_skip if skip is None else skip
            step(w, g, state["m"], state["v"], numbers, divisor, skip_now, rounded, self.rows)

        return change


def choose_kernel(rule: Rule, flat: Tensor) -> type[Formula]:
    """Return the fastest class that can apply this rule to a vector like `flat`: Formula or a subclass."""
    if rule.fused_kernel != "adamw":
        return Formula
    if flat.device.type != "cuda" or flat.dtype != torch.float32:
        return FusedAdamW
    return TritonAdamW if importlib.util.find_spec("triton") else Formula
