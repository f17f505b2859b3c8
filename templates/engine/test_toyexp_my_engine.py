"""The conformance suite: every op and its gradient against float64, AdamW, snapshots, and every misuse."""

from toyexp_my_engine import MyEngine

from toyexp.testing import EngineSuite


class TestMyEngine(EngineSuite):
    engine = MyEngine()
    rtol = 1e-6  # what the suite may see of float32, in which logits are handed over
