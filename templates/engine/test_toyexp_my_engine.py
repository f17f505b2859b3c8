"""Run the conformance suite: ops, gradients and AdamW against float64, snapshots, and errors for wrong calls."""

from toyexp_my_engine import MyEngine

from toyexp.testing import EngineSuite


class TestMyEngine(EngineSuite):
    engine = MyEngine()
    rtol = 1e-6  # relative tolerance; 1e-6, because logits are returned in float32
