"""Conformance suite for optimisers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping

import numpy as np

from toyexp.interfaces.engine import Engine
from toyexp.interfaces.optimiser import FROM_SCRATCH, Group, Optimiser, Rule
from toyexp.interfaces.plan import Plan
from toyexp.interfaces.session import Session
from toyexp.interfaces.snapshot import state_shapes
from toyexp.reference.engine import update_tensor
from toyexp.reference.opmodel import op_batch, op_plan
from toyexp.testing.engines import assert_same
from toyexp.testing.suites import PluginSuite, build_session

Array = np.ndarray
LR = 0.01


class OptimiserSuite(PluginSuite):
    """Conformance suite of an optimiser: set `optimiser`, and the `engine` that computes its steps."""

    kind, part = "optim", "optimiser"
    optimiser: Optimiser
    engine: Engine
    steps: int = 20

    def plans(self) -> Iterator[Plan]:
        """Yield small plans where one of the optimiser's rules updates all tensors.

        For each rule, one plan has only matrices, and another has a matrix and vectors. A plan is left out if the rule
        does not accept all of the plan's tensors.
        """
        for rule in self.rules():
            for case in ("attention_grouped", "layer_norm"):
                plan = op_plan(case)
                parts = [[t for t in plan.trainable if t.has_weight_decay is decays] for decays in (True, False)]
                if all(rule.takes(f"blk.0.{t.name}", t.shape) for t in plan.trainable):
                    groups = [
                        Group(rule, tuple(t.name for t in ts), 0.1 * ts[0].has_weight_decay) for ts in parts if ts
                    ]
                    yield dataclasses.replace(plan, groups=tuple(groups))

    def rules(self) -> list[Rule]:
        """Return the optimiser's rules for training from scratch; a rule is the update of one tensor."""
        return list(self.optimiser.with_mode(FROM_SCRATCH).rules())

    def test_numbers_have_the_same_names_at_every_step(self) -> None:
        """The scalars that a rule's `numbers` returns, such as lr, are finite and have the names in `names`."""
        for rule in self.rules():
            for step in (0, 1, 999):
                numbers = rule.numbers(step, LR, 0.1)
                assert list(numbers) == list(rule.names())
                assert all(math.isfinite(value) for value in numbers.values())

    def test_an_update_keeps_shapes_and_slots(self) -> None:
        """An update keeps the shapes of weights and optimiser state, for vectors and for tall and wide matrices."""
        for rule in self.rules():
            for shape in (shape for shape in ((6,), (6, 4), (4, 6)) if rule.takes("blk.0.w", shape)):
                w, state = self._update(rule, shape, 1.0)
                assert w.shape == shape
                assert {slot: array.shape for slot, array in state.items()} == dict(rule.slots(shape))
                assert np.isfinite(w).all()

    def test_a_gradient_of_zero_leaves_finite_numbers(self) -> None:
        """A gradient of zero, as for a token that is not in the batch, gives finite weights and state."""
        for rule in self.rules():
            w, state = self._update(rule, (6, 4), 0.0)
            assert np.isfinite(w).all()
            assert all(np.isfinite(array).all() for array in state.values())

    def test_an_elementwise_rule_can_join_tensors(self) -> None:
        """An element-wise rule updates a tensor as it updates slices of it, so an engine may concatenate tensors."""
        for rule in (rule for rule in self.rules() if rule.elementwise):
            full_update, _ = self._update(rule, (8,), 1.0)
            parts = [self._update(rule, (8,), 1.0, part)[0] for part in (slice(0, 3), slice(3, 8))]
            np.testing.assert_allclose(np.concatenate(parts), full_update, rtol=1e-12)

    def test_the_engine_computes_the_formula(self) -> None:
        """The engine's steps equal steps of the rule in float64 with the engine's own gradients."""
        for plan in self.plans():
            weights = {t.name: plan.initial_values(t).astype(np.float64) for t in plan.trainable}
            state = {t.name: {s: np.zeros(shape) for s, shape in plan.slots(t).items()} for t in plan.trainable}
            with build_session(self.engine, plan) as session:
                for step in range(self.steps):
                    batch, numbers = op_batch(seed=step), plan.numbers(step, LR)
                    gradients = session.gradients(batch)
                    session.step(batch, numbers)
                    for group, vector in zip(plan.updates, numbers, strict=True):
                        for name in group.tensors:
                            g = gradients[name].astype(np.float64)
                            weights[name], after = update_tensor(group, vector, weights[name], g, state[name])
                            state[name] = dict(after)
                for name, expected in weights.items():
                    np.testing.assert_allclose(session.snapshot()[name], expected, atol=1e-5, rtol=1e-5, err_msg=name)

    def test_a_snapshot_restores_the_state(self) -> None:
        """A new session that restores a snapshot takes bit-identical further steps."""
        for plan in self.plans():
            with build_session(self.engine, plan) as session:
                self._steps(session, 0, 4)
                middle = session.snapshot()
                self._steps(session, 4, 4)
                end = session.snapshot()
            assert {name: array.shape for name, array in middle.items()} == state_shapes(plan)
            with build_session(self.engine, dataclasses.replace(plan, seed=9)) as session:
                session.restore(middle)
                self._steps(session, 4, 4)
                assert_same(session.snapshot(), end)

    def test_it_reduces_the_loss(self) -> None:
        """Repeated steps on one batch lower its loss."""
        batch = op_batch()
        for plan in self.plans():
            with build_session(self.engine, plan) as session:
                before = session.evaluate([batch])
                for step in range(self.steps):
                    session.step(batch, plan.numbers(step, LR))
                assert session.evaluate([batch]) < before

    def _steps(self, session: Session, first: int, count: int) -> None:
        for step in range(first, first + count):
            session.step(op_batch(seed=step), session.plan.numbers(step, LR))

    @staticmethod
    def _update(
        rule: Rule, shape: tuple[int, ...], size: float, part: slice = slice(None)
    ) -> tuple[Array, Mapping[str, Array]]:
        """Apply one float64 step to the slice `part` of a random tensor, with random gradients multiplied by `size`.

        Return the new weights, and the new optimiser state, keyed by slot.
        """
        draw = np.random.default_rng(1)
        w, g = draw.standard_normal(shape)[part], size * draw.standard_normal(shape)[part]
        group = Group(rule, ("w",), 0.1)
        return update_tensor(
            group, group.numbers(0, LR), w, g, {s: np.zeros(sh) for s, sh in rule.slots(w.shape).items()}
        )
