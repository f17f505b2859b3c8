"""Tables of the ops that each device supports (ggml 0.15.3). They contain only ops that training needs.

A gradient rule uses a fused op if the profile has it, and plain ops otherwise. One set of rules thus serves all
devices. The tables list the ops for which `supports_op` of each device returns True.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

# Ops that every device has: enough for a whole training step without fused ops.
COMMON = frozenset({
    "CONT", "CPY", "ADD", "SUB", "MUL", "DIV", "SCALE",
    "SQR", "SQRT", "LOG", "CLAMP", "ACC", "SUM", "SUM_ROWS", "CONCAT", "GET_ROWS", "SET_ROWS", "MUL_MAT",
    "SOFT_MAX", "RMS_NORM", "ROPE", "ROPE_BACK", "UNARY", "GLU", "OPT_STEP_ADAMW",
})  # fmt: skip
# Fused gradient ops, which only some devices have.
FUSED = frozenset({"RMS_NORM_BACK", "SILU_BACK", "SOFT_MAX_BACK", "GET_ROWS_BACK", "REPEAT_BACK"})


@dataclass(frozen=True)
class Profile:
    """Description of a device: its name, the ops that it supports, and flags for ops that are slow on it."""

    device: str  # prefix of ggml's device names
    label: str  # name in messages
    ops: frozenset[str]
    query_block: int = 256  # queries that causal attention computes at a time
    half_products: bool = False  # matrix products round their inputs to float16
    slow_cont: bool = False  # CONT of a transposed view copies number by number, slowly
    slow_sum: bool = False  # SUM runs on one thread
    narrow_sum: bool = False  # SUM runs on one group of threads, SUM_ROWS on a group for each row
    side_by_side: bool = False  # consecutive nodes run at the same time unless one reads what another writes
    slow_concat: bool = False  # CONCAT copies number by number, while SET copies row by row
    slow_column: bool = False  # repeating a column [n, 1] along rows copies number by number, slowly
    shares: bool = False  # parts of a batch may be computed concurrently; see session.py
    slow_sigmoid: bool = False  # SILU is vectorised, SIGMOID is not
    slow_repeat_back: bool = False  # REPEAT_BACK sums each column on one thread, which is slow for long columns
    fast_products: bool = False  # kernels.c multiplies matrices, which need no transposed copies
    wide_tiles: bool = False  # MUL_MAT uses few groups of threads; see products.py

    def has(self, op: str) -> bool:
        """Return True if the device supports this op."""
        return op in self.ops


CPU = Profile(
    "CPU", "CPU", COMMON | FUSED | {"NORM", "SET", "CUSTOM"}, query_block=64,
    slow_cont=True, slow_sum=True, slow_concat=True, slow_column=True, slow_sigmoid=True, shares=True,
)  # fmt: skip
CPU_KERNELS = replace(CPU, label="CPU with kernels.c", fast_products=True)
# ggml's own OUT_PROD on the CPU is naive; BLAS's needs no transposed copies and runs as fast as its MUL_MAT.
CPU_BLAS = replace(CPU, label="CPU with BLAS", ops=CPU.ops | {"OUT_PROD"}, shares=False)
BY_PRODUCTS = {"kernels": CPU_KERNELS, "blas": CPU_BLAS, "ggml": CPU}  # by engine.products of `ggml`
METAL = Profile("MTL", "Metal", COMMON, half_products=True, narrow_sum=True, side_by_side=True)
# Vulkan's SUM has one group of 32 threads for all numbers.
VULKAN = Profile(
    "Vulkan", "Vulkan", COMMON | FUSED, narrow_sum=True, side_by_side=True, slow_repeat_back=True, wide_tiles=True,
)  # fmt: skip
VULKAN_HALF = replace(VULKAN, half_products=True)
# On CUDA launches cost more than arithmetic at these sizes, so few large nodes are best. REPEAT_BACK sums a column on
# one thread and RMS_NORM_BACK is not much better: together they took half of a step.
CUDA = Profile("CUDA", "CUDA", (COMMON | FUSED | {"OUT_PROD"}) - {"REPEAT_BACK", "RMS_NORM_BACK"}, query_block=1024)
