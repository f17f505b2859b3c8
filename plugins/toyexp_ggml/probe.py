"""What a device computes and how, found out before it is used."""

from __future__ import annotations

import numpy as np

from toyexp_ggml.binding.backend import Backend
from toyexp_ggml.binding.graph import Graph
from toyexp_ggml.binding.tensors import Memory, Node, get, put

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


def refused(device: str) -> set[str]:
    """Which of the ops that every layer needs the device refuses, without opening it."""
    backend = Backend("CPU", threads=1)
    memory, graph = Memory(backend, 1), Graph(backend, capacity=64)
    try:
        x: Node = memory.tensor((SIDE, SIDE))
        for node in (graph.rms_norm(x, 1e-5), graph.softmax(x), graph.sum_last(x), graph.mul_mat(x, x)):
            graph.want(node)
        return graph.refused_by(device)
    finally:
        graph.close()
        memory.close()
        backend.close()
