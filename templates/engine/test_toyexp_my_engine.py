"""Run the conformance suite: it checks ops, gradients and AdamW against float64, snapshots, and error messages."""

from toyexp_my_engine import MyEngine

from toyexp.testing import EngineSuite


class TestMyEngine(EngineSuite):
    engine = MyEngine()
    rtol = 1e-6  # relative tolerance; 1e-6, because logits are returned in float32
