"""ggml: the same models trained as one static graph, on the CPU, Metal, CUDA and Vulkan."""

from toyexp import Register, hookimpl


@hookimpl
def register_engines(register: Register) -> None:
    """ggml and metal."""
    from toyexp_ggml.engines import GGMLCPU, GGMLMetal

    register(GGMLCPU)
    register(GGMLMetal)
