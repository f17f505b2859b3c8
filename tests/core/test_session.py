"""A session's own checks on every engine: states, names, shapes, numbers."""

import math

import numpy as np
import pytest

from toyexp import AdamW, SessionError
from toyexp.interfaces.session import State
from toyexp.reference.null import NullSession
from toyexp.reference.opmodel import ROWS, op_batch, op_plan
from toyexp.testing import NullEngine

ENGINE = NullEngine()


def test_a_snapshot_of_another_plan_is_rejected():
    with ENGINE.realize(op_plan("matmul")) as session:
        session.build()
        arrays = session.snapshot()
        with pytest.raises(SessionError, match="must be m, v, got v"):
            session.restore({n: a for n, a in arrays.items() if n != "w@m"})
        with pytest.raises(SessionError, match="has else"):
            session.restore({**arrays, "else": arrays["w"]})
        with pytest.raises(SessionError, match=r"w has shape \[2, 2\], expected \[8, 8\]"):
            session.restore({**arrays, "w": np.zeros((2, 2), np.float32)})


def test_misuse_is_a_named_error():
    session = ENGINE.realize(op_plan("matmul"))
    batch, hp = op_batch(), AdamW.for_lora().hp_for_step(0)
    with pytest.raises(SessionError, match=r"step\(\).*realized.*build"):
        session.step(batch, hp)
    with pytest.raises(SessionError, match=r"expected shape \[8, 8\], got \[2, 2\]"):
        session.upload("w", np.zeros((2, 2), np.float32))
    with pytest.raises(SessionError, match="no tensor 'ww'"):
        session.upload("ww", np.zeros((8, 8), np.float32))
    session.build()
    with ENGINE.realize(op_plan("rows", frozen=True)) as frozen:
        frozen.build()
        with pytest.raises(SessionError, match="no trainable tensors"):
            frozen.step(batch, hp)
    with pytest.raises(SessionError, match="upload before build"):
        session.upload("w", np.zeros((8, 8), np.float32), source="donor.gguf")
    with pytest.raises(SessionError, match=r"numbers have shape \[6\]"):
        session.step(batch, hp[:6])
    with pytest.raises(SessionError, match="not finite"):
        session.step(batch, hp * math.nan)
    with pytest.raises(SessionError, match=f"{2 * ROWS} rows, expected {ROWS}"):
        session.step(op_batch(rows=2 * ROWS), hp)
    with pytest.raises(SessionError, match="cannot be split"):
        session.step(op_batch(rows=ROWS + 1), hp)
    with pytest.raises(SessionError, match=r"batch\['tokens'\]: expected"):
        session.step({**batch, "tokens": batch["tokens"].astype(np.int64)}, hp)
    for wrong in (8, -1):
        with pytest.raises(SessionError, match=rf"batch\['targets'\]: {wrong} is not one of 0\.\.7"):
            session.step({**batch, "targets": np.full_like(batch["targets"], wrong)}, hp)
    with pytest.raises(SessionError, match="sum to"):
        session.step({**batch, "weights": batch["weights"] * 0}, hp)
    session.close()
    session.close()
    assert session.state is State.CLOSED
    for call in (lambda: session.step(batch, hp), lambda: session.evaluate([batch]), lambda: session.download("w")):
        with pytest.raises(SessionError, match="closed"):
            call()


class Counting(NullSession):
    """A session whose logits are its input tokens."""

    def do_logits(self, micro, rows):
        assert len(micro["tokens"]) == self.plan.rows
        return micro["tokens"][:rows, :, None].astype(np.float32)


def test_logits_of_more_rows_than_a_micro_batch_are_computed_in_parts():
    tokens = op_batch(rows=2 * ROWS + 1)["tokens"]
    with Counting(op_plan("attention"), ENGINE).open() as session:
        session.build()
        assert (session.logits({"tokens": tokens})[..., 0] == tokens).all()
