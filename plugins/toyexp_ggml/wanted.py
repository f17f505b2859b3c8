"""What an engine wants of its sessions."""

from __future__ import annotations

from dataclasses import dataclass

from toyexp_ggml.profiles import Profile


@dataclass(frozen=True)
class Wanted:
    """The settings of an engine as a session needs them."""

    device: str  # ggml's name of the one that computes, which is the CPU where a GPU is emulated
    profile: Profile  # what the graph may use
    threads: int  # of the CPU
    recompute: bool  # hold the activations of one block at a time and compute them twice
