from toyexp.testing import EngineNumbers, EngineSuite
from toyexp_ggml.engines import GGMLCPU, GGMLCUDA, GGMLMetal, GGMLVulkan


class TestGGML(EngineSuite):
    engine = GGMLCPU(threads=1)


class TestGGMLWithoutKernels(EngineSuite):
    engine = GGMLCPU(threads=1, products="ggml")


# An emulated device differs in its graphs; what its sessions do with them is that of the two above.


class TestMetalEmulated(EngineNumbers):
    engine = GGMLMetal(threads=1, emulate=True)


class TestCUDAEmulated(EngineNumbers):
    engine = GGMLCUDA(threads=1, emulate=True)


class TestVulkanEmulated(EngineNumbers):
    engine = GGMLVulkan(threads=1, emulate=True)
