"""Checks that a run's minimum memory is available."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import numpy as np

from toyexp.base.errors import UserError
from toyexp.base.formatting import format_bytes
from toyexp.base.memory import EVALUATE_REMEDY, available_bytes, convert_memory_errors
from toyexp.interfaces.engine import Engine
from toyexp.interfaces.plan import Plan
from toyexp.interfaces.session import Session
from toyexp.interfaces.snapshot import state_shapes
from toyexp.reference.forward import check_forward, count_activations


def check_plan(plan: Plan, engine: Engine, remedy: str = "") -> None:
    """Raise UserError if the batch, the trainable weights and the optimiser state do not fit into the free memory.

    Activations are not counted. `remedy` ends the message; "" stands for settings that reduce the larger of the two.
    """
    batch, weights = minimum_bytes(plan, engine)
    free = available_bytes()
    if free is not None and batch + weights > free:
        rows, sizes = plan.rows * plan.accumulate, plan.model.settings()
        shorter, narrower = " or model.context" * ("context" in sizes), ", such as model.d_model" * ("d_model" in sizes)
        most, subject, reduced = max(
            (batch, f"a batch of {rows} rows needs", f"batch_size{shorter}"),
            (weights, "the trainable weights and optimiser state need", f"the sizes of the model{narrower}"),
        )
        remedy = remedy or f"reduce {reduced}"
        raise UserError(
            f"too little memory: {subject} {format_bytes(most)}, but {format_bytes(free)} are free; {remedy}"
        )


@contextlib.contextmanager
def open_checked_session(plan: Plan, engine: Engine, file: str, remedy: str = EVALUATE_REMEDY) -> Iterator[Session]:
    """Open a session for inference, after checks of the plan and the free memory, and close it at the end.

    Error messages name `file`, from which the plan was read. Raise RunFailed with `remedy` if memory runs out.
    """
    check_plan(plan, engine, remedy)
    engine.check_plan(plan)
    check_forward(plan, file)
    with convert_memory_errors(remedy), engine.realize(plan) as session:
        session.build()
        yield session


def check_snapshot(plan: Plan, engine: Engine) -> None:
    """Raise UserError if a run and a snapshot of its weights and optimiser state exceed the free memory."""
    needed, free = sum(minimum_bytes(plan, engine)) + snapshot_bytes(plan), available_bytes()
    if free is not None and needed > free:
        copy = f"a checkpoint's copy of weights and optimiser state needs {format_bytes(snapshot_bytes(plan))}"
        needs_text = f"{copy}, and the whole run {format_bytes(needed)}, but {format_bytes(free)} are free"
        raise UserError(f"too little memory: {needs_text}; to train without checkpoints: checkpoint_every=0")


def snapshot_bytes(plan: Plan) -> int:
    """Return the size in bytes of a snapshot: trainable weights and optimiser state in float32."""
    return 4 * sum(math.prod(shape) for shape in state_shapes(plan).values())


def stack_bytes(plan: Plan) -> int:
    """Estimate the device memory in bytes that one run needs when it is trained in a stack with others."""
    batch = plan.rows * sum(math.prod(s.shape) * np.dtype(s.dtype).itemsize for s in plan.inputs.values())
    return snapshot_bytes(plan) + 4 * sum(t.size for t in plan.trainable) + batch + 8 * count_activations(plan)


def minimum_bytes(plan: Plan, engine: Engine) -> tuple[int, int]:
    """Return the least host memory in bytes that a step needs: one number for its batch, and one for the weights.

    The second number covers trainable weights and optimiser state. If the engine has its own memory, such as a GPU's,
    it covers only the largest tensor, because tensors are copied to the device one at a time.
    """
    rows = plan.rows * plan.accumulate
    batch = rows * sum(math.prod(s.shape) * np.dtype(s.dtype).itemsize for s in plan.inputs.values())
    sizes = [4 * t.size for t in plan.trainable]
    return batch, max(sizes, default=0) if engine.own_memory else sum(sizes) + snapshot_bytes(plan)
