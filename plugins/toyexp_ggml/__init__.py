"""ggml: the same models trained as one static graph, on the CPU, Metal, CUDA and Vulkan."""

from toyexp import Register, hookimpl


@hookimpl
def register_engines(register: Register) -> None:
    """Register the engines `ggml`, `metal`, `ggml_cuda` and `vulkan`."""
    from toyexp_ggml.engines import GGMLCPU, GGMLCUDA, GGMLMetal, GGMLVulkan

    for engine in (GGMLCPU, GGMLMetal, GGMLCUDA, GGMLVulkan):
        register(engine)
