"""What a snapshot of a session holds: every trainable tensor, and the optimiser's state of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from toyexp.base.errors import printable
from toyexp.interfaces.plan import Plan

SLOT = "@"  # stands in a snapshot between a tensor's name and that of a slot of its state


def slot_name(tensor: str, slot: str) -> str:
    """What a snapshot calls a slot of a tensor's state."""
    return f"{tensor}{SLOT}{slot}"


def state_shapes(plan: Plan) -> dict[str, tuple[int, ...]]:
    """What a snapshot holds, by name: `<tensor>`, and `<tensor>@<slot>` for the optimiser's state of it."""
    shapes: dict[str, tuple[int, ...]] = {}
    for t in plan.trainable:
        shapes[t.name] = t.shape
        shapes |= {slot_name(t.name, slot): shape for slot, shape in plan.slots(t).items()}
    return shapes


def state_misfit(plan: Plan, arrays: Mapping[str, np.ndarray]) -> str | None:
    """Why a snapshot's arrays are not those of `plan`, or None."""
    wanted = state_shapes(plan)
    for name in sorted(wanted.keys() ^ arrays.keys()):
        tensor = name.partition(SLOT)[0]
        if tensor != name and tensor in wanted and tensor in arrays:
            kept, found = (_slots(names, tensor) for names in (wanted, arrays))
            return f"of {printable(tensor)} the optimiser keeps {kept}, the snapshot has {found}; begin a new run"
        there = "lacks" if name in wanted else "has"
        return f"the snapshot {there} {printable(name)}, unlike the plan"
    for name, shape in wanted.items():
        array = arrays[name]
        if not isinstance(array, np.ndarray):
            return f"{name} is a {type(array).__name__}, no array"
        if array.shape != shape:
            return f"{name} has the shape {list(array.shape)}, not {list(shape)}"
        if array.dtype.kind != "f":
            return f"{name} holds {array.dtype}, not floating-point numbers"
    return None


def _slots(names: Iterable[str], tensor: str) -> str:
    """The slots of a tensor in words."""
    own = sorted(n.partition(SLOT)[2] for n in names if n.startswith(slot_name(tensor, "")))
    return printable(", ".join(own)) or "nothing"
