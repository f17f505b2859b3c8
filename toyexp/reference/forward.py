"""Run a model's forward pass with shapes instead of tensors, to report errors before an engine is opened.

If a model passes this check and its forward pass fails later, the cause is in the engine.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, partialmethod
from numbers import Real
from typing import Any, NoReturn, TypeGuard

from toyexp.base.attribution import has_own_message, plugin_failure
from toyexp.base.errors import UserError, printable, suggest
from toyexp.base.formatting import pluralise
from toyexp.base.packages import error_location
from toyexp.interfaces.arithmetic import Shaped, is_shape
from toyexp.interfaces.decoder import IncrementalOps
from toyexp.interfaces.model import TensorSpec
from toyexp.interfaces.objective import CrossEntropy
from toyexp.interfaces.ops import AdaptedWeight, Ops, Params, Rotary, broadcasts
from toyexp.interfaces.plan import Plan, PlanTensor
from toyexp.interfaces.values import Values

LOOK_UP = Params.__getitem__.__code__  # the lookup of a tensor by name
LARGEST_HEAD = 1 << 16  # largest head size whose RoPE frequencies are computed
MOST_OPS = 1_000_000  # ops per forward pass; a block has about 30, a model at most 10,000 blocks


def check_forward(plan: Plan, recipe: str) -> None:
    """Raise UserError if the forward pass of the plan's model makes calls that not every engine can run.

    The message names the model or, if only the adapters or tensor shapes of the plan cause the failure, the `recipe`.
    """
    model = {t.name: t.shape for t in plan.model.tensors()}
    _forward(plan, f"model.{plan.model.name}", Params({name: Shaped(shape) for name, shape in model.items()}))
    planned = {t.name: Shaped(t.shape) for t in plan.tensors}
    if plan.adapters or {name: t.shape for name, t in planned.items()} != model:
        _forward(plan, recipe, plan.params(planned, _batch(plan)))
    if plan.objective != CrossEntropy():
        _check_objective(plan, plan.params(planned, _batch(plan)))


def count_blocks(plan: Plan) -> int:
    """Return how often the forward pass calls `ops.block`. Calls inside another block do not count.

    The plan must have passed `check_forward`.
    """
    ops = OpShapes()
    plan.model.forward(ops, Params({t.name: Shaped(t.shape) for t in plan.model.tensors()}), _batch(plan))
    return ops.blocks


def check_tensors(who: str, listed: Callable[[], Iterable[TensorSpec | PlanTensor]]) -> None:
    """Check the tensors of a model or plan: their names, shapes and initial values. `listed()` returns them.

    Raise UserError, whose message begins with `who`, for tensors that no engine can hold.
    """
    try:
        tensors = listed()
    except UserError as error:
        raise UserError(f"{who}: {error}{error_location(error, of_plugins=True)}") from error
    if not isinstance(tensors, Iterable) or isinstance(tensors, str):
        raise UserError(f"{who}: tensors() returned {_describe(tensors)}, expected a list of TensorSpec")
    names: set[str] = set()
    for t in tensors:
        if not isinstance(t, TensorSpec | PlanTensor):
            raise UserError(f"{who}: tensors() contains {_describe(t)}, expected a TensorSpec")
        if not isinstance(t.name, str) or not t.name.isprintable() or not t.name:
            raise UserError(f"{who}: a tensor is named {_describe(t.name)}; expected printable text")
        if not isinstance(t.shape, tuple) or not is_shape(t.shape):
            shape = printable(repr(t.shape))
            raise UserError(f"{who}: tensor {t.name} has the shape {shape}; expected a tuple of whole numbers >= 1")
        if not isinstance(values := t.init if isinstance(t, TensorSpec) else t.values, Values):
            raise UserError(
                f"{who}: tensor {t.name} has the initial values {_describe(values)}, expected one such as Normal(0.02)"
            )
        if t.name in names:
            raise UserError(f"{who}: tensor {t.name} is listed twice")
        names.add(t.name)


def _batch(plan: Plan) -> dict[str, Shaped]:
    shapes = {name: (plan.rows, *spec.shape) for name, spec in plan.inputs.items()}
    return {n: (Shaped if plan.inputs[n].dtype.startswith("float") else Ids)(shape) for n, shape in shapes.items()}


def _forward(plan: Plan, who: str, params: Params) -> None:
    """Run the forward pass with shapes only.

    If it fails, raise UserError. The message contains `who` and the line of the plugin's code.
    """
    ops, batch = OpShapes(), _batch(plan)
    logits = _call(who, "in its forward pass", params, lambda: plan.model.forward(ops, params, batch))
    if "starts" in batch and batch["starts"] not in ops.looked_up:
        problem = f"model={plan.model.name} does not keep the examples of a row apart"
        raise UserError(f"data.pack=apart: {problem} (see toyexp.keep_apart); type data.pack=none or data.pack=joined")
    targets = plan.inputs.get("targets")
    if not isinstance(plan.objective, CrossEntropy) or targets is None:
        return
    shape = (plan.rows, *targets.shape)
    if not _is_tensor(logits) or logits.shape[:-1] != shape:
        expected = ", ".join(map(str, (*shape, "classes")))
        raise UserError(f"{who}: its forward pass returns {_describe(logits)}, expected logits [{expected}]")
    if targets.below is not None and logits.shape[-1] < targets.below:
        classes = f"{logits.shape[-1]} classes, but targets go up to {targets.below - 1}"
        raise UserError(f"{who}: its forward pass returns logits of {classes}")


def _check_objective(plan: Plan, params: Params) -> None:
    """Run the methods of the plan's objective with shapes instead of tensors.

    Raise UserError if one of them fails or returns no scalar.
    """
    objective, batch, who = plan.objective, _batch(plan), f"objective.{plan.objective.name}"
    methods: list[Callable[..., Any]] = [objective.training_loss, objective.held_out_loss, objective.metrics]
    for method in methods:
        when = f"in {method.__name__.removeprefix('training_')}()"
        result = _call(who, when, params, partial(method, OpShapes(), plan.model, params, batch))
        scalars = result if method == objective.metrics else {"the loss": result}
        names = objective.metric_names if method == objective.metrics else ("the loss",)
        if not isinstance(scalars, Mapping) or {*scalars} != {*names}:
            found = ", ".join(map(str, scalars)) if isinstance(scalars, Mapping) else _describe(scalars)
            listed = f"metric_names lists {', '.join(names) or 'nothing'}"
            raise UserError(f"{who}: metrics() returns {printable(found) or 'nothing'}, {listed}")
        for name, value in scalars.items():
            if not _is_tensor(value) or value.shape != ():
                raise UserError(f"{who}: {when} {name} is {_describe(value)}, expected a scalar, such as ops.sum(x)")


def _call(who: str, when: str, params: Params, call: Callable[[], Any]) -> Any:
    """Return call(). If it fails, raise UserError.

    The message begins with `who` and `when`, and ends with the failing line of the plugin.
    """
    try:
        return call()
    except UserError as error:
        raise UserError(f"{who}: {when} {error}{error_location(error, of_plugins=True)}") from error
    except (Exception, SystemExit) as error:
        if has_own_message(error):
            raise
        if isinstance(error, KeyError) and [*traceback.walk_tb(error.__traceback__)][-1][0].f_code is LOOK_UP:
            name = str(error.args[0])
            has = f"there is no tensor {printable(name)}; {suggest(name, params)}"
            raise UserError(f"{who}: {when} {has}{error_location(error, of_plugins=True)}") from error
        raise UserError(str(plugin_failure(who, when, error))) from error


@dataclass(frozen=True, eq=False)
class Ids(Shaped):
    """Placeholder for an integer input, such as token ids. It has a shape but no values."""


def count_activations(plan: Plan) -> int:
    """Return roughly how many activations, as a number of elements, the forward pass keeps for the backward pass.

    The estimate counts all elements that ops read, except the plan's tensors. The plan must have passed
    `check_forward`.
    """
    ops = OpShapes()
    tensors = {t.name: Shaped(t.shape) for t in plan.tensors}
    batch = _batch(plan)
    if type(plan.objective) is not CrossEntropy:
        plan.objective.training_loss(ops, plan.model, plan.params(tensors, batch), batch)
        return max(ops.read - sum(t.size for t in plan.tensors), 0)
    logits = plan.model.forward(ops, plan.params(tensors, batch), batch)
    return max(ops.read - sum(t.size for t in plan.tensors), 0) + 2 * math.prod(logits.shape)


class OpShapes(Ops):
    """Ops that compute only the shapes of results. They raise UserError for a call that not every engine supports."""

    def __init__(self) -> None:
        self._calls = 0
        self.read = 0  # number of elements that all ops have read
        self.looked_up: list[Shaped] = []  # the arguments `ids` of `rows`
        self.blocks, self._inside = 0, False  # calls of `block` that are not nested; whether such a call is running

    def __getattr__(self, name: str) -> NoReturn:
        ops = (n for n in vars(Ops) if not n.startswith("_") and n != "positionwise")
        raise AttributeError(f"there is no op {name}; {suggest(name, ops)}")

    def _take(self, op: str, *tensors: object) -> None:
        self._calls += 1
        if self._calls > MOST_OPS:
            raise UserError(f"it calls more than {MOST_OPS} ops; is there an endless loop?")
        for x in tensors:
            if not _is_tensor(x):
                raise UserError(f"ops.{op} takes tensors, got {_describe(x)}")
            self.read += math.prod(x.shape)

    def _require(self, fits: bool, op: str, *values: object) -> None:
        if not fits:
            raise UserError(f"ops.{op} got {' and '.join(map(_describe, values))}, whose shapes do not fit together")

    def block(self, function: Callable[..., Any], x: Shaped, p: Params, *rest: Any) -> Any:
        outer, self._inside = self._inside, True
        self.blocks += not outer
        y = function(self, x, p, *rest)
        self._inside = outer
        return y

    def rows(self, table: Shaped, ids: Shaped) -> Shaped:
        self._take("embed", table)
        self._require(len(table.shape) == 2 and isinstance(ids, Ids), "embed", table, ids)
        self.looked_up.append(ids)
        return Shaped((*ids.shape, table.shape[1]))

    def matmul(self, x: Shaped, w: Shaped, bias: Shaped | None = None) -> Shaped:
        self._take("linear", x, w, *([] if bias is None else [bias]))
        self._require(len(x.shape) > 1 and len(w.shape) == 2 and x.shape[-1] == w.shape[-1], "linear", x, w)
        self._require(bias is None or bias.shape == w.shape[:1], "linear", w, bias)
        return Shaped((*x.shape[:-1], w.shape[0]))

    def _combine(self, op: str, a: Shaped, b: Shaped) -> Shaped:
        """Return the shape of an element-wise op on a and b: the shape of a, to which b is broadcast."""
        self._take(op, a, b)
        self._require(broadcasts(b.shape, a.shape), op, a, b)
        return Shaped(a.shape)

    def scale(self, x: Shaped, factor: float, offset: float = 0.0) -> Shaped:
        self._take("scale", x)
        for number in (factor, offset):
            if not isinstance(number, Real) or not math.isfinite(number):
                raise UserError(f"ops.scale takes finite numbers, got {_describe(number)}")
        return Shaped(x.shape)

    def _same(self, op: str, x: Shaped) -> Shaped:
        """Return the shape of an op's result, for an op whose result has the same shape as its argument x [..., d]."""
        self._take(op, x)
        return Shaped(x.shape)

    add, mul, div = map(partial(partialmethod, _combine), ("add", "mul", "div"))
    sigmoid, step, exp, log, cumsum, softmax, log_softmax, centre = map(
        partial(partialmethod, _same),
        ("sigmoid", "step", "exp", "log", "cumsum", "softmax", "log_softmax", "centre"),
    )

    def permute(self, x: Shaped, axes: Sequence[int]) -> Shaped:
        self._take("permute", x)
        order = tuple(axes)
        if sorted(order) != [*range(len(x.shape))] or len(order) > 4:
            raise UserError(f"ops.permute of {list(x.shape)}: expected its axes (at most 4) in some order, got {order}")
        return Shaped(tuple(x.shape[i] for i in order))

    def product(self, a: Shaped, b: Shaped, transposed: bool = False) -> Shaped:
        self._take("product", a, b)
        fits = 2 <= len(a.shape) == len(b.shape) <= 4 and a.shape[:-2] == b.shape[:-2]
        self._require(fits and a.shape[-1] == b.shape[-1 if transposed else -2], "product", a, b)
        return Shaped((*a.shape[:-1], b.shape[-2 if transposed else -1]))

    def sum(self, x: Shaped, axis: int | None = None, keep: bool = False) -> Shaped:
        self._take("sum", x)
        if axis is None:
            return Shaped(())
        if not 0 <= axis < len(x.shape):
            raise UserError(f"ops.sum cannot sum {list(x.shape)} over axis {axis}; count axes from 0")
        return Shaped((*x.shape[:axis], *((1,) if keep else ()), *x.shape[axis + 1 :]))

    def top_k(self, x: Shaped, k: int) -> Shaped:
        if not 1 <= k <= x.shape[-1]:
            raise UserError(f"ops.top_k of {list(x.shape)}: k must be from 1 to {x.shape[-1]}, got {_describe(k)}")
        return self._same("top_k", x)

    def experts(self, x: Shaped, w: Shaped) -> Shaped:
        self._take("experts", x, w)
        axes = (w.shape[-1],) if len(x.shape) == 3 else (w.shape[0], w.shape[-1])
        self._require(len(w.shape) == 3 and len(x.shape) in (3, 4) and x.shape[2:] == axes, "experts", x, w)
        return Shaped((*x.shape[:2], *w.shape[:2]))

    def take(self, x: Shaped, ids: Shaped) -> Shaped:
        self._take("take", x)
        rows = x.shape[:-1]
        self._require(isinstance(ids, Ids) and rows in (ids.shape, ids.shape[:-1]), "take", x, ids)
        return Shaped(ids.shape)

    def causal(self, x: Shaped, window: int = 0, fill: float = -math.inf) -> Shaped:
        self._take("causal", x)
        self._require(len(x.shape) >= 2 and x.shape[-1] == x.shape[-2], "causal", x)
        if window < 0 or fill not in (0.0, -math.inf):
            raise UserError(f"ops.causal takes a window of at least 0 and the fill 0 or -inf, got {window} and {fill}")
        return Shaped(x.shape)

    def rms_norm(self, x: Shaped, w: Shaped, eps: float) -> Shaped:
        self._take("rms_norm", x, w)
        self._require(bool(x.shape) and w.shape == x.shape[-1:], "rms_norm", x, w)
        if not isinstance(eps, Real) or not 0 <= eps < math.inf:
            raise UserError(f"ops.rms_norm takes a finite eps of at least 0, got {_describe(eps)}")
        return Shaped(x.shape)

    def reshape(self, x: Shaped, shape: Sequence[int]) -> Shaped:
        self._take("reshape", x)
        sizes = tuple(shape)
        if not is_shape(sizes) or len(sizes) > 4 or math.prod(sizes) != math.prod(x.shape):
            new_shape = printable(repr(list(sizes)))
            raise UserError(
                f"ops.reshape cannot reshape {list(x.shape)} to {new_shape}; the new shape needs as many elements, "
                "at most 4 axes, and no -1"
            )
        return Shaped(sizes)

    def part(self, x: Shaped, axis: int, start: int, stop: int) -> Shaped:
        self._take("part", x)
        if not (0 <= axis < len(x.shape) and 0 <= start < stop <= x.shape[axis]):
            raise UserError(f"ops.part cannot take positions {start} to {stop} of axis {axis} of {list(x.shape)}")
        return Shaped((*x.shape[:axis], stop - start, *x.shape[axis + 1 :]))

    def concat(self, parts: Sequence[Shaped], axis: int) -> Shaped:
        parts = tuple(parts)
        self._take("concat", *parts)
        others = {(*x.shape[:axis], *x.shape[axis + 1 :]) for x in parts}
        self._require(len(others) == 1 and 0 <= axis < len(parts[0].shape), f"concat along axis {axis}", *parts)
        shape = parts[0].shape
        return Shaped((*shape[:axis], sum(x.shape[axis] for x in parts), *shape[axis + 1 :]))

    def split(self, x: Shaped, n: int) -> tuple[Shaped, ...]:
        self._take("split", x)
        if n < 1 or x.shape[-1] % n:
            raise UserError(f"ops.split cannot split the last axis of {list(x.shape)} into {n} equal parts")
        return super().split(x, n)

    def prepend(self, x: Shaped, token: Shaped) -> Shaped:
        self._take("prepend", x, token)
        self._require(token.shape == x.shape[2:], "prepend", x, token)
        return super().prepend(x, token)

    def rope(self, x: Shaped, rotary: Rotary) -> Shaped:
        self._take("rope", x)
        self._require(len(x.shape) == 4 and isinstance(rotary, Rotary), "rope", x, rotary)
        if x.shape[3] <= LARGEST_HEAD:  # a larger head is rejected later, because it exceeds the memory
            rotary.frequencies(x.shape[3])
        return Shaped(x.shape)

    def attention(
        self, q: Shaped, k: Shaped, v: Shaped, causal: bool = True, *, window: int = 0, scale: float | None = None,
        softcap: float = 0.0, sinks: Shaped | None = None, bias: Shaped | None = None,
    ) -> Shaped:  # fmt: skip
        self._take("attention", q, k, v, *(x for x in (sinks, bias) if x is not None))
        self._require(len(q.shape) == len(k.shape) == 4 and k.shape[:3] == v.shape[:3], "attention", q, k, v)
        b, t, heads, size = q.shape
        fits = (b, t, size) == (k.shape[0], k.shape[1], k.shape[3]) and heads % k.shape[2] == 0
        self._require(fits and len(v.shape) == 4, "attention", q, k, v)
        self._require(sinks is None or sinks.shape == (heads,), "attention", q, sinks)
        shapes = [(t, t), *((*rows, n, t, t) for rows in ((), (b,)) for n in (1, heads))]
        self._require(bias is None or bias.shape in shapes, "attention", q, bias)
        for number in (window, softcap, scale or 0.0):
            if not isinstance(number, Real) or not 0 <= number < math.inf:
                raise UserError(f"ops.attention takes window, softcap and scale of at least 0, got {_describe(number)}")
        return Shaped((b, t, heads * v.shape[3]))

    def distance_bias(self, table: Shaped, length: int) -> Shaped:
        self._take("distance_bias", table)
        self._require(len(table.shape) == 2 and length <= table.shape[1], "distance_bias", table, length)
        return Shaped((table.shape[0], length, length))

    def cross_entropy(
        self, logits: Shaped, targets: Shaped, weights: Shaped, smoothing: float = 0.0, z_loss: float = 0.0
    ) -> Shaped:
        self._take("cross_entropy", logits, weights)
        fits = isinstance(targets, Ids) and logits.shape[:-1] == targets.shape == weights.shape
        self._require(fits, "cross_entropy", logits, targets, weights)
        return Shaped(())


class PieceShapes(IncrementalOps, OpShapes):
    """Ops of a decoder that caches keys and values. They compute only shapes, and record each call in `calls`.

    A record has the op's name, weights and constants. It does not have the sizes of activations, which depend on the
    sequence length.
    """

    incremental_ops = frozenset({"attention", "distance_bias"})

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[object, ...]] = []

    def _take(self, op: str, *tensors: object) -> None:
        super()._take(op, *tensors)
        self.calls.append((op, *(x for x in tensors if isinstance(x, Weight))))

    def first_rows(self, table: Shaped, n: int) -> Shaped:
        self._take("first_rows", table)
        return Shaped((n, table.shape[1]))

    def shift(self, x: Shaped, n: int = 1) -> Shaped:
        self.calls.append(("shift", n))
        return Shaped(x.shape)

    def linear_attention(self, q: Shaped, k: Shaped, v: Shaped, log_decay: Shaped) -> Shaped:
        self._take("linear_attention", q, k, v, log_decay)
        return Shaped((*v.shape[:2], v.shape[2] * v.shape[3]))

    def scale(self, x: Shaped, factor: float, offset: float = 0.0) -> Shaped:
        self.calls.append((factor, offset))
        return super().scale(x, factor, offset)

    def rope(self, x: Shaped, rotary: Rotary) -> Shaped:
        self.calls.append((rotary,))
        return super().rope(x, rotary)


@dataclass(frozen=True, eq=False)
class Weight(Shaped):
    """Placeholder for a tensor of the model. Two placeholders are different even if they have the same shape."""


def reason_to_recompute(plan: Plan) -> str | None:
    """Return why text generation must recompute all tokens at each step, or None if keys and values can be cached.

    The forward pass is run three times with shapes only: for one position, two positions and the full context. Keys and
    values can be cached only if all three runs call the same ops.
    """
    model = plan.model
    if not model.cached_decoding:
        return "it has cached_decoding = False"
    if plan.has_dora:
        return "DoRA computes the norms of weights, which are not cached"
    weights = Params({t.name: Weight(t.shape) for t in model.tensors()})
    calls, (context,) = list[list[tuple[object, ...]]](), plan.inputs[model.reads.sequence].shape
    for length in sorted({1, min(2, context), context}):
        ops = PieceShapes()
        try:
            model.forward(ops, weights, {model.reads.sequence: Ids((1, length))})
        except Exception as error:  # a model may raise anything for a shorter sequence
            return f"with {pluralise(length, 'position')} its forward pass fails: {printable(str(error))}"
        calls.append(ops.calls)
        if calls[0] != ops.calls:
            return f"it calls other ops for {pluralise(length, 'position')} than for 1"
    return None


def _is_tensor(x: Any) -> TypeGuard[Shaped]:
    return isinstance(x, Shaped) and not isinstance(x, Ids)


def _describe(x: object) -> str:
    """Describe an op's argument for an error message: its shape, value or type."""
    if isinstance(x, Shaped):
        return f"{'integers ' if isinstance(x, Ids) else ''}{list(x.shape)}"
    if isinstance(x, AdaptedWeight):
        return "a tensor with an adapter"
    return printable(repr(x)) if x is None or isinstance(x, bool | int | float | str) else f"a {type(x).__name__}"
