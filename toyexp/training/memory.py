"""What a run takes of memory at least, held against what there is."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import numpy as np

from toyexp.base.errors import UserError
from toyexp.base.memory import EVALUATE_REMEDY, REMEDY, available_bytes, convert_memory_errors
from toyexp.interfaces.engine import Engine
from toyexp.interfaces.plan import Plan
from toyexp.interfaces.session import Session
from toyexp.interfaces.snapshot import state_shapes
from toyexp.reference.forward import check_forward, count_activations


def check_plan(plan: Plan, engine: Engine, remedy: str = REMEDY) -> None:
    """Raise UserError if a batch and what trains, without activations, take more memory than is free."""
    batch, weights = minimum_bytes(plan, engine)
    left = available_bytes()
    if left is not None and batch + weights > left:
        rows = plan.rows * plan.accumulate
        parts = [(batch, f"a batch of {rows} rows takes"), (weights, "the weights that train and their optimiser take")]
        most, what = max(parts)
        raise UserError(f"too little memory: {what} {_gb(most)}, and there are {_gb(left)}; {remedy}")


@contextlib.contextmanager
def open_checked_session(plan: Plan, engine: Engine, file: str, remedy: str = EVALUATE_REMEDY) -> Iterator[Session]:
    """Check a plan that trains nothing, read from `file`, and yield a session; RunFailed if memory runs out."""
    check_plan(plan, engine, remedy)
    engine.check_plan(plan)
    check_forward(plan, file)
    with convert_memory_errors(remedy), engine.realize(plan) as session:
        session.build()
        yield session


def check_snapshot(plan: Plan, engine: Engine) -> None:
    """Raise UserError if a run and one copy of its weights and state take more memory than is left."""
    needed, left = sum(minimum_bytes(plan, engine)) + snapshot_bytes(plan), available_bytes()
    if left is not None and needed > left:
        copy = f"a checkpoint's copy of the weights and their optimiser takes {_gb(snapshot_bytes(plan))}"
        needs = f"{copy} of {_gb(needed)} in all, there are {_gb(left)}"
        raise UserError(f"too little memory: {needs}; checkpoint_every=0 takes none")


def snapshot_bytes(plan: Plan) -> int:
    """What a snapshot takes in float32."""
    return 4 * sum(math.prod(shape) for shape in state_shapes(plan).values())


def stack_bytes(plan: Plan) -> int:
    """Return about how much device memory a run takes beside others; each activation has a gradient."""
    batch = plan.rows * sum(math.prod(s.shape) * np.dtype(s.dtype).itemsize for s in plan.inputs.values())
    return snapshot_bytes(plan) + 4 * sum(t.size for t in plan.trainable) + batch + 8 * count_activations(plan)


def minimum_bytes(plan: Plan, engine: Engine) -> tuple[int, int]:
    """Bytes of a step's batch, and of what trains."""
    rows = plan.rows * plan.accumulate
    batch = rows * sum(math.prod(s.shape) * np.dtype(s.dtype).itemsize for s in plan.inputs.values())
    sizes = [4 * t.size for t in plan.trainable]
    return batch, max(sizes, default=0) if engine.own_memory else sum(sizes) + snapshot_bytes(plan)


def _gb(size: int) -> str:
    return f"{size / 1e9:.3g} GB"
