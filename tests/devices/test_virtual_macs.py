"""Virtual Macs have a GPU that does not work: engines report it, and engine=auto takes another."""

import platform
from types import SimpleNamespace

import pytest

from toyexp import Unavailable
from toyexp_ggml import binding, probe
from toyexp_ggml.binding import ggml
from toyexp_ggml.binding.static_graph import op_name
from toyexp_ggml.engines import GGMLMetal
from toyexp_torch import engines
from toyexp_torch.engines import TorchMPS


@pytest.fixture(autouse=True)
def pretend_to_be_a_mac(monkeypatch):
    monkeypatch.setattr(platform, "system", lambda: "Darwin")


def test_metal_without_the_ops_of_a_layer_is_unavailable(monkeypatch):
    """The CPU replaces the Metal device, and some of its ops are declared unsupported."""
    monkeypatch.setattr(binding, "devices", lambda: {"MTL0": "Apple Paravirtual device"})
    monkeypatch.setattr("toyexp_ggml.binding.static_graph.find_device", lambda name: ggml.ggml_backend_dev_get(0))
    assert probe.unsupported_ops("MTL") == set()
    assert GGMLMetal().check() == "ggml on Metal: Apple Paravirtual device"
    unsupported = {"RMS_NORM", "SUM_ROWS"}
    monkeypatch.setattr(ggml, "ggml_backend_dev_supports_op", lambda device, node: op_name(node) not in unsupported)
    with pytest.raises(Unavailable, match="Apple Paravirtual device, which does not support RMS_NORM, SUM_ROWS"):
        GGMLMetal().check()


def test_mps_that_cannot_allocate_memory_is_unavailable(monkeypatch):
    def ones(*shape, device):
        raise RuntimeError("MPS backend out of memory (MPS allocated: 0 bytes).\nAnd more")

    mps = SimpleNamespace(is_available=lambda: True)
    torch = SimpleNamespace(__version__="2.13.0", backends=SimpleNamespace(mps=mps), ones=ones)
    monkeypatch.setattr(engines, "import_torch", lambda: torch)
    with pytest.raises(Unavailable, match=r"MPS fails here \(MPS backend out of memory .*bytes\)\.\); use engine=cpu"):
        TorchMPS().check()
