"""What ggml can hold: its indices have 31 bits, and its allocator a table of fixed size."""

from __future__ import annotations

import math

from toyexp import Model, Plan, Traced, listing

LIMIT = 2**31 - 1  # largest index and row count that ggml's int32 ids and kernels take
# ggml's allocator ends the process once its memory has 256 gaps. Gradients that wait for the norm leave some: seen from
# 820 trainable tensors on (llama of 92 layers). And the tables of ggml's scheduler take 5 MB for each of all tensors.
MOST_TRAINABLE, MOST_TENSORS = 600, 2000


def beyond(plan: Plan) -> str | None:
    """Why a plan is more than ggml holds, and what is less; None where it is not."""
    if len(plan.trainable) > MOST_TRAINABLE or len(plan.tensors) > MOST_TENSORS:
        return (
            f"{len(plan.tensors)} tensors, {len(plan.trainable)} of them to train: ggml's allocator takes up to "
            f"{MOST_TENSORS} and {MOST_TRAINABLE}; use fewer layers, or engine=cpu"
        )
    for t in plan.tensors:
        if len(t.shape) > 4 or any(n > LIMIT for n in t.shape):
            return f"tensor {t.name} {list(t.shape)}: ggml holds up to 4 axes of up to 2^31 - 1; choose engine=cpu"
    for name, spec in plan.inputs.items():
        if plan.rows * math.prod(spec.shape) > LIMIT:
            return f"batch[{name!r}] of {plan.rows} rows has more than 2^31 - 1 numbers; {LESS}"
    positions = plan.rows * math.prod(plan.inputs["targets"].shape)
    return too_many_logits(positions, _classes(plan.model))


LESS = "use a smaller batch_size, or optim.accumulate"


def too_many_logits(positions: int, classes: int) -> str | None:
    """Why so many logits cannot be; None where they can."""
    if positions * classes <= LIMIT:
        return None
    return f"{positions} positions times {classes} classes are more than 2^31 - 1 logits; {LESS}"


def _classes(model: Model) -> int:
    """How many logits a position has; 0 for a model whose graph has to tell."""
    try:
        lines = listing(model, [Traced(t.shape, t.name) for t in model.tensors()]).all()
    except Exception:  # a plugin's model may ask shapes for what they cannot do
        return 0
    last = lines[-1].result[-1] if lines and lines[-1].result else 0
    return last if isinstance(last, int) else 0
