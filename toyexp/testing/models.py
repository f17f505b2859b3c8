"""Conformance suite for models."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from inspect import isfunction
from typing import Any, ClassVar

import numpy as np
import pytest

from toyexp.base.errors import SessionError
from toyexp.interfaces.dataset import Batch, Dataset
from toyexp.interfaces.engine import Engine
from toyexp.interfaces.model import Model
from toyexp.interfaces.objective import CrossEntropy, Objective
from toyexp.interfaces.ops import Ops, Params
from toyexp.interfaces.plan import Plan
from toyexp.interfaces.recipe import Setup
from toyexp.reference.engine import ReferenceOps, reference_logits, reference_slope
from toyexp.reference.forward import reason_to_recompute
from toyexp.testing.suites import Bare, PluginSuite, build_session, tiny_data

Values = Mapping[str, np.ndarray]
MIN_SLOPE = 1e-8  # smaller slopes are rounding errors of central differences in float64


class Opaque:
    """A tensor to test that a model uses ops only: it has a shape, but no operators, values or methods."""

    def __init__(self, array: np.ndarray, names: frozenset[str]):
        self.shape = array.shape
        self._array, self._names = array, names  # names of the model's tensors that it depends on

    def __bool__(self) -> bool:
        raise TypeError("a model uses a tensor as a condition; what it computes must not depend on values")


def _wrap_op(op: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an op of the float64 reference so that its arguments and results are Opaque tensors without operators."""

    def opaque(_: Ops, *args: Any, **named: Any) -> Any:
        names: set[str] = set()

        def unwrap(value: Any) -> Any:
            if isinstance(value, list | tuple):
                return [unwrap(v) for v in value]
            if not isinstance(value, Opaque):
                return value
            names.update(value._names)
            return value._array

        out = op(REFERENCE, *map(unwrap, args), **{k: unwrap(v) for k, v in named.items()})
        closed = [Opaque(array, frozenset(names)) for array in (out if isinstance(out, tuple) else (out,))]
        return tuple(closed) if isinstance(out, tuple) else closed[0]

    return opaque


def _twice(ops: Ops, function: Callable[..., Any], x: Any, p: Params, *rest: Any) -> Any:
    first, second = (function(ops, x, p, *rest) for _ in range(2))
    np.testing.assert_array_equal(first._array, second._array, "a block gives other numbers when it is called again")
    return second


REFERENCE = ReferenceOps()
# The float64 reference on opaque tensors. Each block is computed twice, as engines may do.
OpaqueOps = type(
    "OpaqueOps", (Ops,), {n: _wrap_op(op) for n, op in vars(ReferenceOps).items() if isfunction(op)} | {"block": _twice}
)


class ModelSuite(PluginSuite):
    """Conformance suite of a model: set a small `model` of at least two blocks, and `engines` to compute it on."""

    kind, part = "model", "model"
    model: Model
    engines: ClassVar[Sequence[Engine]] = ()
    objective: Objective = CrossEntropy()  # an objective that suits the model's result, such as MSE()
    vocab: int = 16
    causal: bool | None = None  # True: no position depends on a later one; None: True for sequences, else False
    without_gradient: ClassVar[tuple[str, ...]] = ()  # name patterns of tensors whose gradient is always 0
    rtol: float = 2e-5  # tolerance of an engine's logits, relative to the largest
    gradient_rtol: float = 1e-4  # tolerance of a gradient along a direction, relative to the gradient's norm

    def dataset(self) -> Dataset:
        """Return tiny data for the model; override it for a kind of data of your own."""
        return tiny_data(self.model.reads, self.vocab)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run each test with the argument `engine` once per engine. pytest calls this hook."""
        if "engine" in metafunc.fixturenames:
            metafunc.parametrize("engine", self.engines, ids=[f"{e.name}{i}" for i, e in enumerate(self.engines)])

    def make_case(self) -> tuple[Plan, Batch, Values]:
        """Return a plan that trains every tensor, a batch, and values of the tensors by name.

        Random numbers are added to all initial values, so that no bias is 0 and no norm weight is 1.
        """
        dataset = self.dataset()
        model = self.model.fit(dataset)
        model.check()
        batches = model.batches(dataset, 2, 0)
        plan = Bare().plan(model, Setup(batches.inputs, rows=2, seed=1, objective=self.objective))
        draw = np.random.default_rng(3)
        values = {t.name: plan.initial_values(t) + draw.normal(0, 0.2, t.shape) for t in plan.tensors}
        return plan, batches.batch(0), {n: v.astype(np.float32) for n, v in values.items()}

    # -- the function -------------------------------------------------------------------------------------------

    def test_its_inputs_are_arrays_of_its_batches(self) -> None:
        """The batches contain the inputs that `Model.inputs` declares, with their shapes."""
        plan, batch, _ = self.make_case()
        assert set(plan.model.inputs()) <= set(batch) - {"targets", "weights"}
        for name, shape in plan.model.inputs().items():
            batch_shape = plan.inputs[name].shape
            assert len(shape) == len(batch_shape)
            assert all(n == m for n, m in zip(shape, batch_shape, strict=True) if not isinstance(n, str)), name

    def test_forward_uses_only_ops(self) -> None:
        """The model uses ops only, and no Python operators, numpy or tensor methods. Its logits depend on each tensor.

        Each block is computed twice, as an engine may do in the backward pass, and gives the same numbers.
        """
        plan, batch, values = self.make_case()
        wide = {n: Opaque(v.astype(np.float64), frozenset([n])) for n, v in values.items()}
        inputs = {n: Opaque(batch[n], frozenset()) for n in plan.model.inputs()}
        logits = plan.model.forward(OpaqueOps(), plan.params(wide), inputs)
        assert isinstance(logits, Opaque), f"forward returned {type(logits).__name__}, which is not the result of an op"
        np.testing.assert_allclose(logits._array, reference_logits(plan, values, batch), rtol=1e-12, atol=1e-12)
        idle = sorted(values.keys() - logits._names)
        assert idle == [], f"the result does not depend on {', '.join(idle)}"
        assert batch["targets"].shape in (logits.shape[:-1], logits.shape)

    def test_every_tensor_has_a_gradient(self) -> None:
        """The float64 loss depends on every tensor except those whose names match a pattern in `without_gradient`."""
        plan, batch, values = self.make_case()
        for name in values:
            moves = max(map(abs, self._slopes(plan, values, batch, name))) >= MIN_SLOPE
            expected = not any(fnmatchcase(name, pattern) for pattern in self.without_gradient)
            assert moves is expected, f"{name} has {'a' if moves else 'no'} gradient"

    def _slopes(self, plan: Plan, values: Values, batch: Batch, name: str) -> list[float]:
        return [reference_slope(plan, values, batch, name, d) for d in _directions(values[name].shape)]

    def test_no_position_sees_a_later_one(self) -> None:
        """Logits of a position do not change with the tokens after it."""
        plan, batch, values = self.make_case()
        sequence = plan.model.reads.sequence
        if not (bool(sequence) if self.causal is None else self.causal):
            pytest.skip(f"model={plan.model.name} is not causal")
        full_logits = reference_logits(plan, values, batch)
        for length in (1, full_logits.shape[1] // 2, full_logits.shape[1] - 1):
            short = {**batch, sequence: batch[sequence][:, :length]}
            np.testing.assert_allclose(
                reference_logits(plan, values, short), full_logits[:, :length], rtol=1e-9, atol=1e-12,
                err_msg=f"the first {length} positions depend on later ones",
            )  # fmt: skip

    def test_cached_decoding_is_declared_correctly(self) -> None:
        """If `cached_decoding` is true, the model can be computed token by token with cached keys and values."""
        plan, _, _ = self.make_case()
        if plan.model.reads.sequence and plan.model.cached_decoding:
            assert (reason := reason_to_recompute(plan)) is None, (
                f"model={plan.model.name}: {reason}; set cached_decoding: ClassVar[bool] = False, and text is written "
                "by computing the whole sequence for each token"
            )

    # -- on engines ---------------------------------------------------------------------------------------------

    def test_engines_agree_with_float64(self, engine: Engine) -> None:
        """The engine's logits equal the float64 reference, and its gradients equal finite differences of the loss."""
        plan, batch, values = self.make_case()
        expected = reference_logits(plan, values, batch)
        with build_session(engine, plan, values) as session:
            np.testing.assert_allclose(session.logits(batch), expected, atol=self.rtol * np.abs(expected).max())
            gradients = session.gradients(batch)
        assert gradients.keys() == values.keys()
        for name, gradient in gradients.items():
            scale = float(np.linalg.norm(gradient)) + 1e-3
            for direction, slope in zip(
                _directions(gradient.shape), self._slopes(plan, values, batch, name), strict=True
            ):
                assert float((gradient * direction).sum()) == pytest.approx(slope, abs=self.gradient_rtol * scale), name

    def test_recomputed_blocks_give_the_same_gradients(self, engine: Engine) -> None:
        """Gradients are the same with `recompute=true`, if the engine has this setting."""
        if "recompute" not in {f.name for f in dataclasses.fields(engine)}:
            pytest.skip(f"engine={engine.name} keeps all activations")
        plan, batch, values = self.make_case()
        again: Any = dataclasses.replace(engine, recompute=True)  # type: ignore[call-arg]
        with build_session(engine, plan, values) as first, build_session(again, plan, values) as second:
            expected = first.gradients(batch)
            for name, gradient in second.gradients(batch).items():
                atol = 1e-6 * np.abs(expected[name]).max()
                np.testing.assert_allclose(gradient, expected[name], atol=atol, err_msg=name)

    def test_a_decoder_gives_the_logits_of_the_whole_sequence_or_raises(self, engine: Engine) -> None:
        """A decoder that is fed single tokens gives the logits of the whole sequence, or raises SessionError."""
        plan, batch, values = self.make_case()
        sequence = plan.model.reads.sequence
        if not sequence:
            pytest.skip(f"model={plan.model.name} does not continue a sequence")
        ids = batch[sequence][0]
        with build_session(engine, plan, values) as session:
            full_logits, decoder = session.logits({sequence: ids[None]})[0], session.decoder()
            try:
                logits = [decoder.feed([i]) for i in ids]
            except SessionError as refused:
                assert "beyond its own position" in str(refused)
            else:
                np.testing.assert_allclose(logits, full_logits, atol=self.rtol * np.abs(full_logits).max())


def _directions(shape: tuple[int, ...]) -> list[np.ndarray]:
    draw = np.random.default_rng(1)
    directions = [draw.standard_normal(shape) for _ in range(2)]
    return [d / np.linalg.norm(d) for d in directions]
