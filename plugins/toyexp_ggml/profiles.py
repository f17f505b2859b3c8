"""What each device can compute, as far as training needs it (ggml 0.15.3).

A gradient rule asks the profile for its fused op and otherwise takes the plain form; so one set of rules yields a
graph that stays whole on the device. The tables were read from the devices' own `supports_op`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

# What every device has: enough for a whole training step in plain form.
COMMON = frozenset({
    "CONT", "CPY", "ADD", "SUB", "MUL", "DIV", "SCALE",
    "SQR", "SQRT", "LOG", "CLAMP", "ACC", "SUM", "SUM_ROWS", "CONCAT", "GET_ROWS", "SET_ROWS", "MUL_MAT",
    "SOFT_MAX", "RMS_NORM", "ROPE", "ROPE_BACK", "UNARY", "GLU", "OPT_STEP_ADAMW",
})  # fmt: skip
# Gradients in one op, where a device has them.
FUSED = frozenset({"RMS_NORM_BACK", "SILU_BACK", "SOFT_MAX_BACK", "GET_ROWS_BACK", "REPEAT_BACK"})


@dataclass(frozen=True)
class Profile:
    """A device and the ops it has."""

    device: str  # what ggml's name of the device begins with
    label: str  # what people call it
    ops: frozenset[str]
    query_block: int = 256  # causal attention takes so many queries at a time
    half_products: bool = False  # matrix products round their inputs to float16
    slow_cont: bool = False  # CONT of a transposed view copies number by number, slowly
    slow_sum: bool = False  # SUM runs on one thread
    narrow_sum: bool = False  # SUM runs on one group of threads, while SUM_ROWS takes a group for each row
    side_by_side: bool = False  # nodes that follow one another run at once, unless one reads what another writes
    slow_concat: bool = False  # CONCAT copies number by number, SET row by row
    slow_column: bool = False  # a column [n, 1] is repeated along rows number by number
    shares: bool = False  # of a step's rows may be computed side by side
    slow_sigmoid: bool = False  # SILU takes several numbers at once, SIGMOID one
    slow_repeat_back: bool = False  # REPEAT_BACK sums a column on one thread: right for many columns of few numbers
    wide_tiles: bool = False  # MUL_MAT of more than 64 rows and columns goes to few groups of threads; see products

    def has(self, op: str) -> bool:
        """Whether the device computes this op."""
        return op in self.ops


CPU = Profile(
    "CPU", "CPU", COMMON | FUSED | {"NORM", "SET", "CUSTOM"}, query_block=64,
    slow_cont=True, slow_sum=True, slow_concat=True, slow_column=True, slow_sigmoid=True, shares=True,
)  # fmt: skip
# ggml's own OUT_PROD on the CPU is naive; BLAS's needs no transposed copies and runs as fast as its MUL_MAT.
CPU_BLAS = replace(CPU, ops=CPU.ops | {"OUT_PROD"}, shares=False)
METAL = Profile("MTL", "Metal", COMMON, half_products=True, narrow_sum=True, side_by_side=True)
# Its SUM has one group of 32 threads for all numbers.
VULKAN = Profile(
    "Vulkan", "Vulkan", COMMON | FUSED, narrow_sum=True, side_by_side=True, slow_repeat_back=True, wide_tiles=True,
)  # fmt: skip
VULKAN_HALF = replace(VULKAN, half_products=True)
# CUDA's launches cost more than its arithmetic at these sizes: few large nodes. Its REPEAT_BACK sums a column in one
# thread and its RMS_NORM_BACK is not much better: together they took half of a step.
CUDA = Profile("CUDA", "CUDA", (COMMON | FUSED | {"OUT_PROD"}) - {"REPEAT_BACK", "RMS_NORM_BACK"}, query_block=1024)
