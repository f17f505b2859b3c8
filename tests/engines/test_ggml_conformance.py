from toyexp.testing import EngineSuite
from toyexp_ggml.engines import GGMLCPU, GGMLCUDA, GGMLMetal, GGMLVulkan


class TestGGML(EngineSuite):
    engine = GGMLCPU(threads=1)


class TestGGMLWithoutBLAS(EngineSuite):
    engine = GGMLCPU(threads=1, blas=False)


class TestMetalEmulated(EngineSuite):
    engine = GGMLMetal(threads=1, emulate=True)


class TestCUDAEmulated(EngineSuite):
    engine = GGMLCUDA(threads=1, emulate=True)


class TestVulkanEmulated(EngineSuite):
    engine = GGMLVulkan(threads=1, emulate=True)
