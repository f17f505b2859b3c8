"""How far an engine may be off, by the type that its matrix products round to."""

from __future__ import annotations

from dataclasses import dataclass

from toyexp.base.errors import UserError, choose
from toyexp.interfaces.engine import Engine


@dataclass(frozen=True)
class Tolerances:
    """The largest differences that count as agreement."""

    values: float  # of one op, relative to the largest of them; of a loss, relative to itself
    slopes: float  # of one op: the gradient of one tensor, in norm and relative to it
    loss: float  # of one step of a model's training
    gradient: float  # of a model: of one tensor, in norm and relative to it
    weights: float  # of one tensor after the last step of a training, relative to how far it moved


# From the finest on. AdamW makes steps of one size from small gradients and large ones, so weights come to differ by
# more than their gradients do. Of the ten bits of float16 and TF32 the op case "block", three gates behind one another,
# makes gradients that are off by 1.2e-2: on a device, and in float64 that rounds what its products read. And the keys'
# third of GPT-2's attn_qkv.bias has a gradient that is nothing but rounding: with float16 the bias ends 9e-2 off.
TOLERANCES = {
    "float64": Tolerances(1e-6, 1e-6, 1e-6, 1e-6, 1e-5),  # what is compared is handed over in float32
    "float32": Tolerances(1e-4, 1e-4, 1e-3, 1e-4, 5e-3),
    "tf32": Tolerances(5e-3, 2e-2, 1e-3, 5e-3, 2e-1),
    "float16": Tolerances(1e-2, 2e-2, 1e-3, 5e-3, 2e-1),
    "bfloat16": Tolerances(5e-2, 5e-2, 2e-3, 5e-2, 5e-1),  # the nano llama: 6e-4 in loss, 2e-2 in gradients
}


def precision(engine: Engine) -> str:
    """What the engine's products round to; UserError for what no tolerances are known of."""
    found = engine.rounds_to()
    if found not in TOLERANCES:
        raise UserError(f"engine={engine.name}: rounds_to() is {found!r}; {choose(found, TOLERANCES)}")
    return found


def coarser(one: str, other: str) -> str:
    """The precision by which two engines are held against each other."""
    return max(one, other, key=list(TOLERANCES).index)
