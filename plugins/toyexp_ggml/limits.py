"""Limits of ggml: indices have 31 bits, and its allocator has tables of fixed size."""

from __future__ import annotations

import math

from toyexp import Model, Plan, WeightInfo, listing

LIMIT = 2**31 - 1  # largest index and row count for ggml's int32 ids and kernels
# ggml's allocator ends the process when its memory has 256 gaps. Gradients that are kept until the norm is known leave
# gaps: a llama of 92 layers, with 820 trainable tensors, failed. The tables of ggml's scheduler take 5 MB per tensor.
MOST_TRAINABLE, MOST_TENSORS = 600, 2000


def exceeded_limit(plan: Plan) -> str | None:
    """Return a message about the first ggml limit that a plan exceeds, with a remedy, or None if it exceeds none."""
    if len(plan.trainable) > MOST_TRAINABLE or len(plan.tensors) > MOST_TENSORS:
        return (
            f"{len(plan.tensors)} tensors, {len(plan.trainable)} of them trainable: ggml's allocator is limited to "
            f"{MOST_TENSORS} and {MOST_TRAINABLE}; use fewer layers, or engine=cpu"
        )
    for t in plan.tensors:
        if len(t.shape) > 4 or any(n > LIMIT for n in t.shape):
            return f"tensor {t.name} {list(t.shape)}: ggml is limited to 4 axes of at most 2^31 - 1; use engine=cpu"
    for name, spec in plan.inputs.items():
        if plan.rows * math.prod(spec.shape) > LIMIT:
            return f"batch[{name!r}] of {plan.rows} rows has more than 2^31 - 1 numbers; {LESS}"
    positions = plan.rows * math.prod(plan.inputs["weights"].shape)
    return too_many_logits(positions, _count_classes(plan.model))


LESS = "use a smaller batch_size, or a larger optim.accumulate"


def too_many_logits(positions: int, classes: int) -> str | None:
    """Return an error text if there are too many logits for 31-bit indices, else None."""
    if positions * classes <= LIMIT:
        return None
    return f"{positions} positions times {classes} classes are more than 2^31 - 1 logits; {LESS}"


def _count_classes(model: Model) -> int:
    """Return the number of logits per position, or 0 if the shapes of the model cannot be traced."""
    try:
        lines = listing(model, [WeightInfo(t.shape, t.name) for t in model.tensors()]).all()
    except Exception:  # a plugin's model may do what traced shapes do not support
        return 0
    last = lines[-1].result[-1] if lines and lines[-1].result else 0
    return last if isinstance(last, int) else 0
