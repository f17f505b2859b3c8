"""A model for one test: any function of the ops, with its tensors given as arrays."""

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from toyexp import TOKENS, ArrayValues, InputSpec, Kind, Model, Params, Plan, PlanTensor, TensorSpec


@dataclass
class Probe(Model):
    """A model with `function(ops, p, batch)` as forward pass; tensors in `computed` reach it as the result of an op."""

    name: ClassVar[str] = "probe"
    reads: ClassVar[Kind] = TOKENS

    arrays: dict = field(default_factory=dict)
    function: object = None
    computed: frozenset = frozenset()

    def check(self):
        pass

    def tensors(self):
        return [TensorSpec(n, a.shape, ArrayValues(a)) for n, a in self.arrays.items()]

    def forward(self, ops, p, batch):
        return self.function(
            ops, Params({n: ops.scale(t, 1.0) if n in self.computed else t for n, t in p.items()}), batch
        )


def probe_plan(model, rows, shapes, **settings):
    """Return a plan that trains all tensors of a Probe; `shapes` gives each input's shape after the row axis."""
    inputs = {n: InputSpec(tuple(s), "float32" if n == "weights" else "int32") for n, s in shapes.items()}
    tensors = tuple(PlanTensor(t.name, t.shape, t.init) for t in model.tensors())
    return Plan(model, tensors, inputs, rows=rows, **settings)


def float32(array):
    return np.ascontiguousarray(array, np.float32)
