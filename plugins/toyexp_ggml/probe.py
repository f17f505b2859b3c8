"""Check, before a device is used, which ops it supports and whether it rounds matrix products."""

from __future__ import annotations

import numpy as np

from toyexp_ggml.binding.backend import Backend
from toyexp_ggml.binding.graph import Graph
from toyexp_ggml.binding.tensors import Memory, Node, get, put

SIDE = 64  # large enough not to use the kernel for few columns, which does not round
MORE = 2.0**-12  # 1 + MORE rounds to 1 in float16, bfloat16 and TF32


def rounds_products(device: str) -> bool:
    """Return True if the device rounds the inputs of large float32 products."""
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


def unsupported_ops(device: str) -> set[str]:
    """Return the ops that every layer needs but the device does not support. The device is not opened."""
    backend = Backend("CPU", threads=1)
    memory, graph = Memory(backend, 1), Graph(backend, capacity=64)
    try:
        x: Node = memory.tensor((SIDE, SIDE))
        for node in (graph.rms_norm(x, 1e-5), graph.softmax(x), graph.sum_last(x), graph.mul_mat(x, x)):
            graph.want(node)
        return graph.unsupported_ops(device)
    finally:
        graph.close()
        memory.close()
        backend.close()
