"""A stack's step and held-out losses on a GPU as CUDA graphs: they read what a run has for them from its memory."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from toyexp import Batch, Plan
from toyexp_torch.capture import Captured, Inputs, Kind, Results
from toyexp_torch.stack_step import Micro, StackedStep

Asked = tuple[Sequence[Batch], Sequence[np.ndarray]]  # a run's micro-batches, and each group's numbers


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
        one: dict[str, Kind] = {
            name: ((plan.rows, *spec.shape), np.dtype(spec.dtype)) for name, spec in plan.inputs.items()
        }
        blank = {name: np.zeros(*kind) for name, kind in one.items()}
        of_all: dict[Hashable, Kind] = {
            name: ((count * shape[0], *shape[1:]), dtype) for name, (shape, dtype) in one.items()
        }
        self._held_out, self._blank = Inputs(of_all), blank
        self._losses = Captured("a held-out loss", self._losses_there, self._losses_there, pool, off)
        kinds: dict[Hashable, Kind] = {(i, n): kind for i in range(plan.accumulate) for n, kind in of_all.items()}
        kinds |= {i: ((count * size,), np.dtype(np.float64)) for i, size in enumerate(sizes)}
        self._inputs = Inputs({**kinds, "idle": ((count,), np.dtype(np.float32))}, under_way)
        self._results = Results(2 * count, dtype, under_way)
        self._latest: list[Asked] = [([blank] * plan.accumulate, [np.zeros(size) for size in sizes])] * count
        micros = [{n: self._inputs.tensors[i, n] for n in plan.inputs} for i in range(plan.accumulate)]
        self._micros = [self._by_run(micro) for micro in micros]
        self._numbers = [self._inputs.tensors[i].view(count, size) for i, size in enumerate(sizes)]
        self._inputs.put({"idle": np.ones(count)})
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
        self._inputs.put_joined(parts)
        return self._results.fetch(self._taken().flatten())

    def losses(self, micros: Mapping[int, Batch]) -> Tensor:
        """Of a micro-batch of the runs at those places, [count]; for others 0. Overwritten by the next call."""
        each = [micros.get(place, self._blank) for place in range(self._count)]
        self._held_out.put_joined({name: [micro[name] for micro in each] for name in self._plan.inputs})
        return self._losses()

    def close(self) -> None:
        """Frees the graphs."""
        self._taken.close()
        self._losses.close()

    def _work(self) -> Tensor:
        return self._step([self._exact(micro) for micro in self._micros], self._numbers, self._inputs.tensors["idle"])

    def _losses_there(self) -> Tensor:
        return self._step.losses(self._exact(self._by_run({n: self._held_out.tensors[n] for n in self._plan.inputs})))

    def _by_run(self, micro: Micro) -> Micro:
        return {name: x.unflatten(0, (self._count, -1)) for name, x in micro.items()}

    def _exact(self, micro: Micro) -> Micro:
        """Its fractions in the type of the weights."""
        return {name: x.to(self._dtype) if x.is_floating_point() else x for name, x in micro.items()}
