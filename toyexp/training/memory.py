"""What a run takes of memory at least, held against what there is."""

from __future__ import annotations

import math

import numpy as np

from toyexp.base.errors import UserError
from toyexp.base.memory import REMEDY, available_bytes
from toyexp.contract.engine import Engine, state_shapes
from toyexp.contract.plan import Plan


def check_plan(plan: Plan, engine: Engine, remedy: str = REMEDY) -> None:
    """Raises UserError for a plan that takes more memory than there is, by what it takes at the very least.

    That is one step's batch, and the trainable tensors with their gradients and the optimiser's state in float32 (of a
    device with memory of its own: the largest of them, which passes through the machine's). Activations come on top,
    of which engine.recompute holds fewer.
    """
    rows = plan.rows * plan.accumulate
    batch = rows * sum(math.prod(s.shape) * np.dtype(s.dtype).itemsize for s in plan.inputs.values())
    sizes = [4 * t.size for t in plan.trainable]
    state = 4 * sum(math.prod(shape) for shape in state_shapes(plan).values())  # with the tensors themselves
    weights = max(sizes, default=0) if engine.own_memory else sum(sizes) + state
    left = available_bytes()
    if left is not None and batch + weights > left:
        parts = [(batch, f"a batch of {rows} rows takes"), (weights, "the weights that train and their optimiser take")]
        most, what = max(parts)
        raise UserError(f"too little memory: {what} {_gb(most)}, and there are {_gb(left)}; {remedy}")


def _gb(size: int) -> str:
    return f"{size / 1e9:.3g} GB"
