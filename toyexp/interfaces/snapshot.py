"""Contents of a session's snapshot: every trainable tensor, and its optimiser state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from toyexp.base.errors import printable
from toyexp.interfaces.optimiser import EVAL_OFFSET
from toyexp.interfaces.plan import Plan

SLOT = "@"  # separates the tensor's name and the slot (m or v for AdamW) in names of optimiser state


def slot_name(tensor: str, slot: str) -> str:
    """Return the name that the state array `slot` of a tensor has in a snapshot, such as `<tensor>@m`."""
    return f"{tensor}{SLOT}{slot}"


def state_shapes(plan: Plan) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a snapshot's arrays: `<tensor>`, and `<tensor>@<slot>` for optimiser state."""
    shapes: dict[str, tuple[int, ...]] = {}
    for t in plan.trainable:
        shapes[t.name] = t.shape
        shapes |= {slot_name(t.name, slot): shape for slot, shape in plan.slots(t).items()}
    return shapes


def average_weights(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the values that evaluations use: a snapshot's tensors plus their state arrays `eval_offset`, if any."""
    weights = {name: array for name, array in arrays.items() if SLOT not in name}
    offsets = {name: arrays.get(slot_name(name, EVAL_OFFSET)) for name in weights}
    return {name: array if (offset := offsets[name]) is None else array + offset for name, array in weights.items()}


def state_misfit(plan: Plan, arrays: Mapping[str, np.ndarray]) -> str | None:
    """Return a sentence on how a snapshot's arrays differ from what `plan` requires, or None if they match."""
    shapes = state_shapes(plan)
    for name in sorted(shapes.keys() ^ arrays.keys()):
        tensor = name.partition(SLOT)[0]
        if tensor != name and tensor in shapes and tensor in arrays:
            expected, got = (_slots(names, tensor) for names in (shapes, arrays))
            return f"the optimiser state of {printable(tensor)} must be {expected}, got {got}; start a new run"
        verb = "lacks" if name in shapes else "has"
        return f"the snapshot {verb} {printable(name)}, unlike the plan"
    for name, shape in shapes.items():
        array = arrays[name]
        if not isinstance(array, np.ndarray):
            return f"{name} must be an array, got {type(array).__name__}"
        if array.shape != shape:
            return f"{name} has shape {list(array.shape)}, expected {list(shape)}"
        if array.dtype.kind != "f":
            return f"{name} must have a float dtype, got {array.dtype}"
    return None


def _slots(names: Iterable[str], tensor: str) -> str:
    """Return the slots (state arrays) of `tensor` that occur among the array names `names`, as text for a message."""
    slots = sorted(n.partition(SLOT)[2] for n in names if n.startswith(slot_name(tensor, "")))
    return printable(", ".join(slots)) or "nothing"
