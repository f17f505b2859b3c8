"""The optimiser's step on flat vectors: fused kernels where torch has them, the rules' own formulas elsewhere."""

from __future__ import annotations

import importlib.util
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from toyexp import Arithmetic, Group, Plan, Rule

NO_STEPS = 1e9  # a step count at which 1 - beta^t is 1: switches off the fused kernel's own bias correction
# Numbers that a formula takes at a time: its intermediate results then stay in a core's cache, or where that does not
# matter, do not take the memory of several models.
CHUNK, LARGE_CHUNK = 1 << 17, 1 << 24
ALIGNMENT = 64  # elements; keeps every view on a cache line and on what vector kernels like

State = Mapping[str, Tensor]
# Changes weights by their gradient, and their state; what follows gets the weights rounded, where that is wanted.
Change = Callable[[Tensor, Tensor, State, Tensor | None], None]
Piece = tuple[Tensor, Tensor, State, Tensor | None]


class TorchArithmetic(Arithmetic):
    """On tensors of any device; a number is a tensor of no axes."""

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
    """Which part of what each rule changes is this process's: that number `rank` of `count`."""

    rank: int = 0
    count: int = 1

    def cuts(self, begin: int, end: int, only_at: Sequence[int] = ()) -> list[int]:
        """Where the parts of begin..end begin, and the end: of nearly one length, only at given places if there are."""
        even = [begin + (end - begin) * rank // self.count for rank in range(1, self.count)]
        if not only_at:
            return [begin, *(begin + (cut - begin) // ALIGNMENT * ALIGNMENT for cut in even), end]
        return [begin, *(min((*only_at, end), key=lambda place: abs(place - cut)) for cut in even), end]


ALL = Share()


@dataclass
class Stretch:
    """The place of one group's tensors in the flat vectors, and the state of all that its rule changes."""

    group: Group
    kernel: Formula
    names: Sequence[str]  # the tensors that this process changes, each in part at least
    start: int
    stop: int
    origin: int  # where the state's own vectors begin
    state: State  # of an element-wise rule: vectors, by slot
    pieces: list[Piece] = field(default_factory=list)  # once it was changed


class Update:
    """Changes the weights in the vector `flat` by the gradients in `grad`; `places` says where each tensor is.

    The vector `rounded` gets the same weights in a shorter type. Of several runs `flat` and `grad` are matrices, a row
    each, and so is the state: see `StackedUpdate`.
    """

    def __init__(
        self, plan: Plan, flat: Tensor, grad: Tensor, places: Mapping[str, slice], compiled: bool,
        rounded: Tensor | None = None, share: Share = ALL,
    ):  # fmt: skip
        self._share = share
        self._flat, self._grad, self._places, self._rounded = flat, grad, places, rounded
        self._shapes = {t.name: t.shape for t in plan.trainable}
        self._results = torch.compile(_results, dynamic=False) if compiled else _results
        self._chunk = CHUNK if flat.device.type == "cpu" and not compiled else LARGE_CHUNK
        self.state: dict[str, State] = {}  # of each tensor, by slot; of one that is changed in part, a vector
        self.cuts: list[list[int]] = []  # of each rule's stretch of the vector: where its shares begin, and its end
        self._stretches: list[Stretch] = []
        for _, groups in itertools.groupby(plan.updates, key=lambda group: id(group.rule)):
            self._allocate(list(groups))

    def _allocate(self, groups: Sequence[Group]) -> None:
        """Allocate the state of one rule, as far as it is this process's, and record each group's stretch."""
        rule = groups[0].rule
        kernel = self.kernel_of(rule)(rule, self._results, self._flat.new_tensor)
        only_at = [] if rule.elementwise else [self._places[n].start for group in groups for n in group.tensors]
        cuts = self._share.cuts(self._span(groups[0]).start, self._span(groups[-1]).stop, only_at)
        begin, end = cuts[self._share.rank : self._share.rank + 2]
        vectors = {slot: self._zeros((end - begin,)) for slot in rule.slots((1,))} if rule.elementwise else {}
        for group in groups:
            parts = {name: part for name in group.tensors if (part := _between(self._places[name], begin, end))}
            span = _between(self._span(group), begin, end) or range(begin, begin)
            self._stretches.append(Stretch(group, kernel, [*parts], span.start, span.stop, begin, vectors))
            for name, part in parts.items():
                shape = self._shapes[name]
                if rule.elementwise:
                    kept = shape if len(part) == math.prod(shape) else (-1,)
                    here = slice(part.start - begin, part.stop - begin)
                    self.state[name] = {slot: part_of(vector, here, kept) for slot, vector in vectors.items()}
                else:
                    self.state[name] = {slot: self._zeros(size) for slot, size in rule.slots(shape).items()}
        self.cuts.append(cuts)

    def kernel_of(self, rule: Rule) -> type[Formula]:
        """What changes the weights by that rule."""
        return kernel_of(rule, self._flat)

    def _zeros(self, shape: Sequence[int]) -> Tensor:
        return self._flat.new_zeros((*self._flat.shape[:-1], *shape))

    def _span(self, group: Group) -> slice:
        """From a group's first tensor to the padding behind its last one."""
        stop = self._places[group.tensors[-1]].stop
        return slice(self._places[group.tensors[0]].start, -(-stop // ALIGNMENT) * ALIGNMENT)

    def sizes(self) -> list[int]:
        """How many numbers a step has for each group."""
        return [len(stretch.group.rule.names()) for stretch in self._stretches]

    @torch.no_grad()
    def on_device(self, numbers: Sequence[Tensor], divisor: Tensor | None, skip: Tensor | None) -> None:
        """One step that reads each group's numbers from the device: a graph can hold it.

        The gradient is divided by `divisor`, and where `skip` is 1 nothing changes; both have no axes.
        """
        for stretch, vector in zip(self._stretches, numbers, strict=True):
            self._change(stretch, stretch.kernel.on_device(vector, divisor, skip))

    def __call__(self, numbers: Sequence[np.ndarray]) -> None:
        """One step with each group's numbers."""
        with torch.no_grad():  # as a decorator it takes longer: small models feel what a step costs on the host
            for stretch, vector in zip(self._stretches, numbers, strict=True):
                self._change(stretch, stretch.kernel.on_host(vector))

    def _change(self, stretch: Stretch, change: Change) -> None:
        if not stretch.pieces:
            stretch.pieces = list(self._pieces(stretch))
        for piece in stretch.pieces:
            change(*piece)

    def _pieces(self, stretch: Stretch) -> Iterator[Piece]:
        """What one call of the rule changes: a tensor at a time, or of an element-wise rule a length of vector."""
        if not stretch.group.rule.elementwise:
            for name in stretch.names:
                here, shape = self._places[name], self._shapes[name]
                rounded = None if self._rounded is None else part_of(self._rounded, here, shape)
                yield part_of(self._flat, here, shape), part_of(self._grad, here, shape), self.state[name], rounded
            return
        size = max(stretch.stop - stretch.start, 1) if stretch.kernel.whole else self._chunk
        for start in range(stretch.start, stretch.stop, size):
            length = min(size, stretch.stop - start)
            state = {slot: v.narrow(-1, start - stretch.origin, length) for slot, v in stretch.state.items()}
            rounded = None if self._rounded is None else self._rounded[start : start + length]
            yield self._flat.narrow(-1, start, length), self._grad.narrow(-1, start, length), state, rounded


def _between(place: slice, begin: int, end: int) -> range:
    """Return what of a place lies there; empty where nothing does."""
    return range(max(place.start, begin), min(place.stop, end))


def part_of(vectors: Tensor, place: slice, shape: Sequence[int]) -> Tensor:
    """What stands in a vector at that place, or in each row of a matrix, in that shape."""
    return vectors.narrow(-1, place.start, place.stop - place.start).view((*vectors.shape[:-1], *shape))


def _results(rule: Rule, w: Tensor, g: Tensor, state: State, n: State) -> list[Tensor]:
    return rule.results(TorchArithmetic(), w, g, state, n)


@dataclass
class Formula:
    """A rule as it is written: `results` works it out with numbers that are tensors, which `put` makes of a vector."""

    rule: Rule
    results: Callable[[Rule, Tensor, Tensor, State, State], list[Tensor]]
    put: Callable[[np.ndarray], Tensor]
    whole = False  # whether a stretch is best changed at once

    def on_host(self, vector: np.ndarray) -> Change:
        """With numbers that are on the host as yet."""
        return self.on_device(self.put(vector), None, None)

    def on_device(self, numbers: Tensor, divisor: Tensor | None, skip: Tensor | None) -> Change:
        """With numbers that are on the device."""
        n = dict(zip(self.rule.names(), numbers.unbind(), strict=True))

        def change(w: Tensor, g: Tensor, state: State, rounded: Tensor | None) -> None:
            results = self.results(self.rule, w, g if divisor is None else g / divisor, state, n)
            for target, values in zip((w, *state.values()), results, strict=True):
                target.copy_(values if skip is None else torch.where(skip > 0, target, values))
            if rounded is not None:
                rounded.copy_(w)

        return change


class FusedAdamW(Formula):
    """AdamW in place on flat tensors, through torch's fused kernel.

    The kernel works out bias corrections c1 = 1 - beta1^t and c2 = 1 - beta2^t of its own from a step count t:
    w = w (1 - lr wd) - lr / c1 m / (sqrt(v / c2) + eps).
    """

    whole = True

    def on_host(self, vector: np.ndarray) -> Change:
        """Given a step count at which the corrections are 1, slots 5 and 6 are folded into the other numbers.

        lr (m s5) / (sqrt(v s6) + eps) = (lr s5 / sqrt(s6)) m / (sqrt(v) + eps / sqrt(s6)).
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
    """AdamW as one kernel that reads its numbers on the GPU."""

    whole = True
    rows: Tensor | None = None  # of matrices, to which the rows of the gradient and of the numbers belong; None: all

    def __post_init__(self) -> None:
        self._go_on = self.put(np.zeros(()))

    def on_device(self, numbers: Tensor, divisor: Tensor | None, skip: Tensor | None) -> Change:
        """One pass over memory, the division of the gradient and the question whether to skip in it."""
        from toyexp_torch.kernels.adamw import step  # deferred: it needs Triton

        def change(w: Tensor, g: Tensor, state: State, rounded: Tensor | None) -> None:
            idle = self._go_on if skip is None else skip
            step(w, g, state["m"], state["v"], numbers, divisor, idle, rounded, self.rows)

        return change


def kernel_of(rule: Rule, flat: Tensor) -> type[Formula]:
    """What changes weights in that vector by that rule."""
    if rule.fused_kernel != "adamw":
        return Formula
    if flat.device.type != "cuda" or flat.dtype != torch.float32:
        return FusedAdamW
    return TritonAdamW if importlib.util.find_spec("triton") else Formula
