"""Conformance suite for objectives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest

from toyexp.interfaces.dataset import Batch, InputSpec
from toyexp.interfaces.engine import Engine
from toyexp.interfaces.kind import TOKENS, Kind
from toyexp.interfaces.model import Model, TensorSpec
from toyexp.interfaces.objective import Objective
from toyexp.interfaces.ops import Ops, Params, Tensor
from toyexp.interfaces.plan import Plan, PlanTensor
from toyexp.interfaces.values import Normal
from toyexp.reference.engine import (
    TOLERANCES,
    ReferenceOps,
    precision,
    reference_loss,
    reference_metrics,
    reference_slope,
)
from toyexp.reference.forward import check_forward
from toyexp.testing.suites import PluginSuite, build_session

ROWS, CLASSES = 4, 8


@dataclass
class Rows(Model):
    """Small model that maps token ids to logits, or vectors to predictions, with two matrices."""

    name: ClassVar[str] = "rows"
    reads: ClassVar[Kind] = TOKENS

    source: str = "tokens"  # array of the batch that it reads

    def check(self) -> None:
        """Accept every value of the only setting, `source`."""

    def tensors(self) -> list[TensorSpec]:
        """Return a table of embeddings and a matrix."""
        return [TensorSpec("table", (CLASSES, CLASSES), Normal(1.0)), TensorSpec("w", (CLASSES, CLASSES), Normal(0.7))]

    def forward(self, ops: Ops, p: Params, batch: Mapping[str, Tensor]) -> Tensor:
        """Return logits [B, T, V] for token ids [B, T], or predictions [B, n] for vectors [B, n]."""
        source = batch[self.source]
        x = ops.embed(p["table"], source) if self.source == "tokens" else ops.linear(source, p["table"])
        return ops.linear(ops.silu(x), p["w"])


class ObjectiveSuite(PluginSuite):
    """Conformance suite of an objective: set `objective`, and the `engines` that compute it.

    Override `inputs` and `batch` for an objective that reads other arrays than token ids and integer targets.
    """

    kind, part = "objective", "objective"
    objective: Objective
    engines: Sequence[Engine]

    def inputs(self) -> Mapping[str, InputSpec]:
        """Return the specs of a batch's arrays: five token ids a row with targets, or vectors with float targets."""
        weights = InputSpec((5,), "float32")
        try:
            ids = InputSpec((5,), "int32", below=CLASSES)
            inputs = {"tokens": ids, "targets": ids, "weights": weights}
            self.objective.check_inputs(Rows(), inputs)
            inputs |= self.objective.precomputed(inputs)
        except Exception:  # the objective reads vectors
            vector = InputSpec((CLASSES,), "float32")
            return {"vectors": vector, "targets": vector, "weights": InputSpec((), "float32")}
        return inputs

    def batch(self, seed: int = 0) -> Batch:
        """Return a random batch with uneven weights, some of them 0."""
        draw, arrays = np.random.default_rng(seed), dict[str, np.ndarray]()
        precomputed = self.objective.precomputed(self.inputs())
        for name, spec in self.inputs().items():
            if name in precomputed:
                continue
            shape = (ROWS, *spec.shape)
            if spec.dtype == "int32":
                arrays[name] = draw.integers(0, spec.below or CLASSES, shape, dtype=np.int32)
            elif name == "weights":
                arrays[name] = (draw.uniform(0.5, 2, shape) * (draw.random(shape) < 0.8)).astype(np.float32)
                arrays[name].flat[0] = 1.0
            else:
                arrays[name] = draw.normal(size=shape).astype(np.float32)
        if precomputed:
            log_probs = ReferenceOps().log_softmax(draw.normal(size=(*arrays["targets"].shape, CLASSES)))
            values = self.objective.precompute(log_probs, arrays)
            arrays |= {name: values[name].astype(spec.dtype) for name, spec in precomputed.items()}
        return arrays

    def make_plan(self) -> Plan:
        """Return a plan that trains a small model with the objective."""
        model = Rows(next(iter(self.inputs())))
        tensors = [PlanTensor.from_spec(t) for t in model.tensors()]
        plan = Plan(model, tuple(tensors), self.inputs(), ROWS, seed=3, objective=self.objective)
        return plan.with_frozen(self.objective.tensors(plan))

    @pytest.fixture
    def plan(self) -> Plan:
        """Return the plan of `make_plan`."""
        return self.make_plan()

    def test_every_engine_can_run_it(self, plan: Plan) -> None:
        """Loss and metrics use only ops, and return scalars."""
        check_forward(plan, "recipe.test")

    def test_engines_agree_with_float64(self, plan: Plan) -> None:
        """Each engine computes loss, held-out loss, metrics and gradients as float64 NumPy does."""
        batch, values = self.batch(), {t.name: plan.initial_values(t) for t in plan.tensors}
        for engine in self.engines:
            limits = TOLERANCES[precision(engine)]
            with build_session(engine, plan) as session:
                gradients = session.gradients(batch)
                expected = reference_loss(plan, values, batch, held_out=True)
                assert session.evaluate([batch]) == pytest.approx(expected, rel=limits.values, abs=1e-5)
                for name, value in reference_metrics(plan, values, batch).items():
                    assert session.metrics([batch])[name] == pytest.approx(value, rel=limits.values, abs=1e-5)
                for name, gradient in gradients.items():
                    direction = gradient / (np.linalg.norm(gradient) or 1.0)
                    slope = reference_slope(plan, values, batch, name, direction.astype(np.float64))
                    assert np.linalg.norm(gradient) == pytest.approx(slope, rel=100 * limits.slopes, abs=1e-5), name

    def test_a_step_reduces_the_loss(self, plan: Plan) -> None:
        """Twenty steps of gradient descent on one batch reduce the training loss."""
        batch, values = self.batch(), {t.name: plan.initial_values(t) for t in plan.tensors}
        first = reference_loss(plan, values, batch)
        for _ in range(20):
            with build_session(self.engines[0], self._from_values(plan, values)) as session:
                gradients = session.gradients(batch)
            values |= {name: values[name] - 0.05 * gradient for name, gradient in gradients.items()}
        assert reference_loss(plan, values, batch) < first

    @staticmethod
    def _from_values(plan: Plan, values: Mapping[str, np.ndarray]) -> Plan:
        from toyexp.interfaces.values import ArrayValues

        return replace(plan, tensors=tuple(replace(t, values=ArrayValues(values[t.name])) for t in plan.tensors))

    def test_micro_batches_give_the_gradients_of_one_batch(self, plan: Plan) -> None:
        """If the objective allows a batch to be split into micro-batches, their gradients add up to the batch's."""
        together = self.objective.rows_together
        if together == 0 or ROWS // 2 % together:
            pytest.skip("the objective compares all rows of a batch")
        batch, parts = self.batch(), replace(plan, rows=ROWS // 2, accumulate=2)
        with build_session(self.engines[0], plan) as whole, build_session(self.engines[0], parts) as split:
            expected = whole.gradients(batch)
            for name, gradient in split.gradients(batch).items():
                np.testing.assert_allclose(gradient, expected[name], rtol=1e-4, atol=1e-6)
