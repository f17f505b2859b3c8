"""Run the conformance suite: ops and gradients against float64, AdamW, snapshots, and misuse."""

from toyexp_my_engine import MyEngine

from toyexp.testing import EngineSuite


class TestMyEngine(EngineSuite):
    engine = MyEngine()
    rtol = 1e-6  # relative tolerance: logits are returned in float32
