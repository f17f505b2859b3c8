"""Conformance suites for engines."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import re
from collections.abc import Mapping

import numpy as np
import pytest

from toyexp.base.errors import SessionError, Unavailable, UserError
from toyexp.interfaces.dataset import Batch
from toyexp.interfaces.engine import Engine
from toyexp.interfaces.optimiser import AdamW
from toyexp.interfaces.plan import Plan
from toyexp.interfaces.session import Session, StepMetrics
from toyexp.reference.engine import reference_adamw, reference_logits, reference_loss, reference_slope
from toyexp.reference.opmodel import CASES, LENGTH, case_rows, op_batch, op_plan
from toyexp.testing.suites import PluginSuite, build_session

ADAPTED = [("matmul", "lens"), ("matmul", "lora"), ("bias", "lora")]


def _values(plan: Plan) -> dict[str, np.ndarray]:
    return {t.name: plan.initial_values(t) for t in plan.tensors}


class EngineNumbers(PluginSuite):
    """Tests of the numbers that an engine computes, which depend on the device's kernels.

    Set `engine`, and larger tolerances if the device rounds more than float32. pytest skips the class if the engine's
    device is not available.
    """

    kind, part = "engine", "engine"
    engine: Engine
    rtol: float = 2e-5  # tolerance of losses and logits, relative to the largest value
    gradient_rtol: float = 1e-4  # tolerance of a gradient along a direction, relative to the gradient's norm

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Skip the whole class at collection if the engine's device is not available; pytest calls this."""
        environment = dict(os.environ)  # restored below: check() may set variables, and the tests call it anew
        try:
            self.engine.check()
        except Unavailable as reason:
            pytest.skip(str(reason))
        except (UserError, pytest.fail.Exception):
            pass  # the tests report a UserError; a fixture may still set the engine
        finally:
            os.environ.clear()
            os.environ.update(environment)

    @pytest.fixture(autouse=True)
    def _check_engine(self) -> None:
        with contextlib.suppress(pytest.fail.Exception):  # a later fixture may set the engine
            self.engine.check()

    def build_session(self, plan: Plan) -> Session:
        """Return a session that is ready to step."""
        return build_session(self.engine, plan)

    @property
    def rows(self) -> int:
        """Number of rows of a micro-batch that the engine can split equally among its devices."""
        return case_rows(self.engine)

    def op_plan(self, case: str, adapter: str | None = None, **changes: object) -> Plan:
        """Return the plan of a model that consists of the op `case`, with a number of rows that the engine accepts.

        `adapter` selects an adapter to add: "lora" for a LoRA pair, or "lens" for a matrix that maps a narrower
        embedding to the model's width. `changes` are fields of the plan.
        """
        return op_plan(case, adapter, **{"rows": self.rows, **changes})

    def op_batch(self, rows: int = 0, seed: int = 0, case: str = "") -> Batch:
        """Return a random batch for the plan of `op_plan(case)`; rows=0 means the default number of rows."""
        return op_batch(rows or self.rows, seed, case)

    @pytest.mark.parametrize(("case", "adapter"), [*((c, None) for c in CASES), *ADAPTED])
    def test_op_computes_what_its_definition_says(self, case: str, adapter: str | None) -> None:
        """Logits and loss equal those of the float64 reference."""
        plan, batch = self.op_plan(case, adapter), self.op_batch(case=case)
        expected = reference_logits(plan, _values(plan), batch)
        with self.build_session(plan) as session:
            np.testing.assert_allclose(session.logits(batch), expected, atol=self.rtol * np.abs(expected).max())
            assert session.evaluate([batch]) == pytest.approx(reference_loss(plan, _values(plan), batch), rel=self.rtol)

    @pytest.mark.parametrize(("case", "adapter"), [*((c, None) for c in CASES), *ADAPTED])
    def test_op_has_the_right_gradient(self, case: str, adapter: str | None) -> None:
        """The gradient of each tensor, projected on random directions, equals finite differences of the loss."""
        plan, batch = self.op_plan(case, adapter), self.op_batch(case=case)
        with self.build_session(plan) as session:
            gradients = session.gradients(batch)
        assert set(gradients) == {t.name for t in plan.trainable}
        draw = np.random.default_rng(1)
        for name, gradient in gradients.items():
            scale = float(np.linalg.norm(gradient)) + 1e-3
            for _ in range(3):
                direction = draw.standard_normal(gradient.shape)
                direction /= np.linalg.norm(direction)
                slope = reference_slope(plan, _values(plan), batch, name, direction)
                assert float((gradient * direction).sum()) == pytest.approx(slope, abs=self.gradient_rtol * scale), name

    @pytest.mark.parametrize(("case", "adapter"), [*((c, None) for c in CASES), *ADAPTED])
    def test_runs_of_a_stack_take_the_steps_that_they_take_alone(self, case: str, adapter: str | None) -> None:
        """Runs that are trained together in a stack take the same steps as on their own.

        If the engine's stack_conflict() returns a reason, realize_stack() raises a UserError with this reason.
        """
        plans = [op_plan(case, adapter, seed=seed, grad_clip=clip) for seed, clip in ((3, 0.0), (4, 0.05), (5, 0.0))]
        if why := self.engine.stack_conflict(plans):
            with pytest.raises(UserError, match=re.escape(why)):
                self.engine.realize_stack(plans)
            return
        batches = [op_batch(seed=i, case=case) for i in range(3)]
        # With such a large eps, an update is nearly proportional to the gradient, not to its sign.
        numbers = [np.array([lr, 0.5, 0.5, 1.0, 0.1, 1.0, 1.0]) for lr in (0.1, 0.2, 0.0)]
        stack = self.engine.realize_stack(plans)
        sessions = stack.sessions
        for session in sessions:
            session.build()
        for _ in range(2):
            inputs = [s.step_input(b, n) for s, b, n in zip(sessions, batches, numbers, strict=True)]
            metrics = [wait() for wait in stack.step(dict(enumerate(inputs))).values()]
        for plan, batch, hp, stacked, session in zip(plans, batches, numbers, metrics, sessions, strict=True):
            with self.build_session(plan) as alone:
                alone.step(batch, hp)
                single = alone.step(batch, hp)
                assert stacked.loss == pytest.approx(single.loss, rel=self.rtol)
                assert stacked.grad_norm == pytest.approx(single.grad_norm, rel=10 * self.rtol)
                for tensor in plan.trainable:
                    values = session.download(tensor.name)
                    np.testing.assert_allclose(values, alone.download(tensor.name), atol=self.rtol, err_msg=tensor.name)
            session.close()

    @pytest.mark.parametrize("adamw", [AdamW.for_from_scratch(), AdamW.for_lora()], ids=["from_scratch", "lora"])
    def test_adamw_computes_its_formula(self, adamw: AdamW) -> None:
        """Five AdamW steps equal float64 steps that use the engine's gradients; only matrices have weight decay."""
        adamw = dataclasses.replace(adamw, lr=0.01, weight_decay=0.1)
        plan = self.op_plan("layer_norm")
        names = [t.name for t in plan.trainable]
        start = {n: v.astype(np.float64) for n, v in _values(plan).items()}
        expected = {n: (w, np.zeros_like(w), np.zeros_like(w)) for n, w in start.items()}
        with self.build_session(plan) as session:
            for step in range(5):
                batch, hp = self.op_batch(seed=step), adamw.hp_for_step(step)
                gradients = session.gradients(batch)
                session.step(batch, hp)
                for name in names:
                    tensor_hp = hp.copy()
                    tensor_hp[4] = hp[4] if plan.tensor(name).has_weight_decay else 0
                    w, m, v = expected[name]
                    expected[name] = reference_adamw(w, gradients[name].astype(np.float64), m, v, tensor_hp)
            for name in names:
                # A step moves a weight by about lr whatever its gradient, so the tolerance is a fraction of lr.
                weights = session.download(name)
                np.testing.assert_allclose(weights, expected[name][0], atol=1e-3 * adamw.lr, err_msg=name)

    def test_accumulation_equals_one_large_batch(self) -> None:
        """A step on four micro-batches gives the same loss, gradient norm and weights as on one large batch."""
        batch, hp = self.op_batch(rows=4 * self.rows), AdamW.for_lora().hp_for_step(0)
        results = []
        for rows, accumulate in ((4 * self.rows, 1), (self.rows, 4)):
            with self.build_session(self.op_plan("swiglu", rows=rows, accumulate=accumulate)) as session:
                metrics = session.step(batch, hp)
                results.append((metrics.loss, metrics.grad_norm, session.download("w")))
        assert results[0][0] == pytest.approx(results[1][0], rel=self.rtol)
        assert results[0][1] == pytest.approx(results[1][1], rel=10 * self.rtol)
        np.testing.assert_allclose(results[0][2], results[1][2], atol=1e-5)

    def test_step_reports_loss_and_gradient_norm_from_before_the_update(self) -> None:
        """Loss and norm of a step equal evaluate() and gradients() on the weights before the step."""
        with self.build_session(self.op_plan("gelu")) as session:
            batch = self.op_batch()
            loss, gradients = session.evaluate([batch]), session.gradients(batch)
            metrics = session.step(batch, AdamW.for_lora().hp_for_step(0))
        norm = math.sqrt(sum(float((g.astype(np.float64) ** 2).sum()) for g in gradients.values()))
        assert metrics.loss == pytest.approx(loss, rel=self.rtol)
        assert metrics.grad_norm == pytest.approx(norm, rel=10 * self.rtol)

    def test_clipping_scales_the_gradient_to_the_limit(self) -> None:
        """Clipping makes the update smaller (without momentum). The reported norm is the norm before clipping."""
        hp = np.array([0.1, 0.0, 0.0, 1e-2, 0.0, 1.0, 1.0])  # with such a large eps, w moves by about lr * g / eps
        distances = []
        for clip in (0.0, 0.01):
            plan = self.op_plan("matmul", grad_clip=clip)
            with self.build_session(plan) as session:
                norm = session.step(self.op_batch(), hp).grad_norm
                distances.append(np.linalg.norm(session.download("w") - plan.initial_values(plan.tensor("w"))))
        assert norm > 0.01  # the norm is reported before clipping
        assert distances[1] < distances[0]


class EngineSuite(EngineNumbers):
    """Conformance suite of an engine. It tests the engine's numbers and the methods of its sessions."""

    def test_frozen_tensors_do_not_change(self) -> None:
        """Training changes all trainable tensors and no frozen one."""
        plan = self.op_plan("bias", frozen=True)
        with self.build_session(plan) as session:
            for step in range(3):
                session.step(self.op_batch(seed=step), AdamW.for_from_scratch().hp_for_step(step))
            for tensor in plan.tensors:
                is_same = np.array_equal(session.download(tensor.name), plan.initial_values(tensor))
                assert is_same is not tensor.trainable, tensor.name

    def test_evaluate_and_gradients_change_nothing(self) -> None:
        """A step after evaluate(), gradients() and logits() equals a step without them."""
        weights = []
        for evaluated in (False, True):
            with self.build_session(self.op_plan("swiglu")) as session:
                for step in range(3):
                    if evaluated:
                        session.evaluate([self.op_batch(seed=9)])
                        session.gradients(self.op_batch(seed=8))
                        session.logits(self.op_batch(seed=7))
                    session.step(self.op_batch(seed=step), AdamW.for_lora().hp_for_step(step))
                weights.append(session.download("w"))
        np.testing.assert_array_equal(weights[0], weights[1])

    def test_two_runs_give_identical_results(self) -> None:
        """Two sessions with the same plan and batches give bit-identical losses."""

        def losses() -> list[float]:
            with self.build_session(self.op_plan("attention_grouped")) as session:
                hps = (AdamW.for_lora().hp_for_step(s) for s in range(10))
                return [session.step(self.op_batch(seed=s), hp).loss for s, hp in enumerate(hps)]

        assert losses() == losses()

    def test_logits_accept_fewer_and_shorter_rows(self) -> None:
        """logits() accepts fewer and shorter rows than the plan's. For a causal model, the logits stay the same."""
        batch = self.op_batch()
        with self.build_session(self.op_plan("attention")) as session:
            full = session.logits({"tokens": batch["tokens"]})
            part = session.logits({"tokens": batch["tokens"][:2, :3]})
        assert part.shape == (2, 3, full.shape[-1])
        np.testing.assert_allclose(part, full[:2, :3], atol=1e-5)

    @pytest.mark.parametrize("case", ["attention_grouped", "rope"])
    def test_a_decoder_gives_the_logits_of_the_whole_sequence(self, case: str) -> None:
        """The decoder gives the same logits as logits().

        This holds for tokens that are fed one by one or several at once, and also after a training step.
        """
        tokens = self.op_batch()["tokens"][:1]
        with self.build_session(self.op_plan(case)) as session:
            for sizes in ([1] * LENGTH, [2, LENGTH - 2]):
                session.step(self.op_batch(), AdamW.for_lora().hp_for_step(0))
                full_logits, decoder = session.logits({"tokens": tokens})[0], session.decoder()
                for end, size in zip(np.cumsum(sizes), sizes, strict=True):
                    logits = decoder.feed(tokens[0, end - size : end])
                    np.testing.assert_allclose(logits, full_logits[end - 1], atol=self.rtol * np.abs(full_logits).max())

    # -- the session's life -------------------------------------------------------------------------------------

    def test_download_returns_uploaded_values(self) -> None:
        """download() returns the uploaded values exactly, before and after build()."""
        with self.engine.realize(self.op_plan("matmul")) as session:
            values = np.random.default_rng(5).standard_normal(session.plan.tensor("w").shape).astype(np.float32)
            session.upload("w", values)
            np.testing.assert_array_equal(session.download("w"), values)
            session.build()
            np.testing.assert_array_equal(session.download("w"), values)

    @pytest.mark.parametrize("accumulate", [1, 2])
    def test_a_restored_session_continues_bit_for_bit(self, accumulate: int) -> None:
        """A fresh session restored from a snapshot gives bit-identical losses and weights."""
        plan = self.op_plan("attention_grouped", accumulate=accumulate, grad_clip=0.5)
        batches = [self.op_batch(rows=accumulate * plan.rows, seed=i) for i in range(6)]
        adamw = AdamW.for_lora()

        def steps(session: Session, first: int) -> list[StepMetrics]:
            return [session.step(batches[i], adamw.hp_for_step(i)) for i in range(first, first + 3)]

        with self.build_session(plan) as session:
            before = session.snapshot()
            steps(session, 0)
            middle = session.snapshot()
            expected, end = steps(session, 3), session.snapshot()
        with self.build_session(dataclasses.replace(plan, seed=9)) as session:
            session.restore(before)
            steps(session, 0)
            assert_same(session.snapshot(), middle)
        with self.build_session(dataclasses.replace(plan, seed=9)) as session:
            session.restore(middle)
            assert steps(session, 3) == expected
            assert_same(session.snapshot(), end)

    def test_a_snapshot_into_an_earlier_one_equals_a_new_one(self) -> None:
        """snapshot(old) may overwrite the arrays of the earlier snapshot `old`, but not those of other snapshots.

        Its result equals that of snapshot(), and a later step does not change it.
        """
        plan, hp = self.op_plan("attention_grouped"), AdamW.for_lora().hp_for_step(0)
        with self.build_session(plan) as session:
            first_snapshot, old = session.snapshot(), session.snapshot()
            was = {name: array.copy() for name, array in first_snapshot.items()}
            session.step(self.op_batch(rows=plan.rows), hp)
            fresh, new = session.snapshot(), session.snapshot(old)
            assert_same(new, fresh)
            assert_same(first_snapshot, was)
            session.step(self.op_batch(rows=plan.rows, seed=1), hp)
            assert_same(new, fresh)
            assert any((new[name] != array).any() for name, array in session.snapshot().items())
            session.restore(new)
            assert_same(session.snapshot(first_snapshot), fresh)
            with pytest.raises(SessionError, match=r"snapshot\(\): .* has else"):
                session.snapshot({**first_snapshot, "else": np.zeros(1)})

    @pytest.mark.parametrize("accumulate", [1, 2])
    def test_a_skipped_step_changes_nothing(self, accumulate: int) -> None:
        """With skip_nonfinite, a step that overflows changes no weights or optimiser state; later steps are normal."""
        plan = self.op_plan("swiglu", accumulate=accumulate, skip_nonfinite=True)
        batch, hp = self.op_batch(rows=accumulate * plan.rows), AdamW.for_lora().hp_for_step(0)
        with (
            self.build_session(plan) as session,
            self.build_session(dataclasses.replace(plan, skip_nonfinite=False)) as usual,
        ):
            assert session.step(batch, hp) == pytest.approx(usual.step(batch, hp), rel=1e-6)
            before = session.snapshot()
            session.restore({n: a if "@" in n else a * np.finfo(a.dtype).max ** 0.78 for n, a in before.items()})
            huge = session.snapshot()
            metrics = session.step(batch, hp)
            assert not math.isfinite(metrics.loss) or not math.isfinite(metrics.grad_norm)
            assert_same(session.snapshot(), huge)
            session.restore(before)
            assert math.isfinite(session.step(batch, hp).loss)


def assert_same(first: Mapping[str, np.ndarray], second: Mapping[str, np.ndarray]) -> None:
    """Assert that two snapshots are bit-identical."""
    assert first.keys() == second.keys()
    for name, array in first.items():
        np.testing.assert_array_equal(array, second[name], err_msg=name)
