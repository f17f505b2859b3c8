"""All that touches ggml: its library, devices, memory, and static graphs with one method per op.

A failed GGML_ASSERT ends the whole process, so everything that ggml asserts is checked here and raises GraphError.
Shapes are written as numpy orders them, [B, T, d]; ggml's own `ne` is the reverse.
"""

from toyexp_ggml.binding.backend import Backend
from toyexp_ggml.binding.graph import Graph
from toyexp_ggml.binding.library import GraphError, built_with, devices, ggml, has_llamafile, version
from toyexp_ggml.binding.tensors import MappedFile, Memory, Node, clear, get, get_all, host_arrays, put

__all__ = [
    "Backend",
    "Graph",
    "GraphError",
    "MappedFile",
    "Memory",
    "Node",
    "built_with",
    "clear",
    "devices",
    "get",
    "get_all",
    "ggml",
    "has_llamafile",
    "host_arrays",
    "put",
    "version",
]
