"""What a device's matrix products do to the numbers they read, found out by one."""

from __future__ import annotations

import numpy as np

from toyexp_ggml.binding import Backend, Graph, Memory, get, put

SIDE = 64  # beyond the few columns that have a kernel of their own, which rounds nothing
MORE = 2.0**-12  # what float16, bfloat16 and TF32 round away beside 1


def rounds_products(device: str) -> bool:
    """Whether the device rounds what its large products read."""
    backend = Backend(device, threads=1)
    memory, graph = Memory(backend, 1), Graph(backend, capacity=64)
    try:
        x = memory.tensor((SIDE, SIDE))
        memory.allocate()
        put(x, np.full((SIDE, SIDE), 1 + MORE, np.float32))
        product = graph.mul_mat(x, x)
        graph.want(product, keep=True)
        graph.finish()
        graph.compute()
        return bool(get(product).min() < SIDE * (1 + MORE))  # exact: SIDE (1 + MORE)^2
    finally:
        graph.close()
        memory.close()
        backend.close()
