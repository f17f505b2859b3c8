"""What an engine wants of its sessions."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Wanted:
    """The settings of an engine as a session needs them."""

    device: str  # torch's name of it
    title: str  # the version, and what computes
    dtype: str  # float32 | bfloat16 | float64
    compile: bool
    deterministic: bool  # only kernels that repeat to the bit
    packed: bool  # keep frozen matrices in their file's type
    recompute: bool  # hold the activations of one block at a time and compute them twice
    threads: int | None = None  # None leaves the process's own
    tf32: bool | None = None  # whether float32 products may round their inputs; None leaves that as it is
