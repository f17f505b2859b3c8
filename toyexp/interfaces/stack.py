"""Stacks of sessions whose training steps are launched together, and a check of which plans can form a stack."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from numbers import Real
from typing import Any, final

from toyexp.base.errors import printable
from toyexp.interfaces.arithmetic import Shaped, Shapes
from toyexp.interfaces.dataset import Batch
from toyexp.interfaces.model import model_settings
from toyexp.interfaces.optimiser import Group
from toyexp.interfaces.plan import Plan
from toyexp.interfaces.session import Session, StepInput, StepMetrics


class Stack:
    """Open sessions whose training steps are launched together. The index of a session is called its row.

    This base class launches the steps one after another.
    """

    def __init__(self, sessions: Sequence[Session]):
        self.sessions = sessions

    @final
    def step(self, inputs: Mapping[int, StepInput]) -> Mapping[int, Callable[[], StepMetrics]]:
        """Launch a training step of each session whose row is a key of `inputs`.

        Return, for each row, a function that waits for the step's metrics. Up to `depth` steps of a session may be
        launched before their metrics are read. After an error it is undefined which sessions have taken the step.
        """
        for row in inputs:
            self.sessions[row].begin_step()
        return self.do_step(inputs)

    def do_step(self, inputs: Mapping[int, StepInput]) -> Mapping[int, Callable[[], StepMetrics]]:
        """Launch the steps as `step` describes. An engine that computes all sessions together overrides this."""
        return {row: self.sessions[row].do_launch(*values) for row, values in inputs.items()}

    def losses(self, batches: Mapping[int, Iterable[Batch]]) -> Mapping[int, Callable[[], float]]:
        """Start to evaluate each session whose row is a key of `batches`.

        Return, for each row, a function that waits for the mean loss on its batches. An error in one row's batches is
        raised only by that row's function.
        """
        return {row: partial(self.sessions[row].evaluate, held_out) for row, held_out in batches.items()}


def program_difference(plans: Sequence[Plan]) -> str:
    """Return the first difference that keeps an engine from training the plans together as one program.

    Return an empty string if there is none.
    The plans must have the same model and equal adapters. Their batches and tensors must have the same shapes, and each
    tensor must have the same update formula in all plans. Seeds, initial values, gradient clipping, `skip_nonfinite`
    and the values in a step's `numbers` may differ.
    """
    return next((words for plan in plans[1:] for words in _differences(plans[0], plan)), "")


def _differences(a: Plan, b: Plan) -> Iterator[str]:
    yield from _differing_value("model", type(a.model).__name__, type(b.model).__name__)
    sizes, others = model_settings(a.model), model_settings(b.model)
    for name in sizes:
        yield from _differing_value(f"model.{name}", sizes[name], others.get(name))
    for name in ("rows", "accumulate"):
        yield from _differing_value(f"the plan's {name}", getattr(a, name), getattr(b, name))
    if not _has_same_settings(a.objective, b.objective):
        yield "the objectives differ"
    for subject, extract in (
        ("the batches", lambda p: {n: (s.shape, s.dtype) for n, s in p.inputs.items()}),
        ("the tensors", lambda p: [(t.name, t.shape, t.trainable) for t in p.tensors]),
        ("the adapters", lambda p: p.adapters),
        ("the optimiser's groups", lambda p: [group.tensors for group in p.updates]),
    ):
        if extract(a) != extract(b):
            yield f"{subject} differ"
    for first, second in zip(a.updates, b.updates, strict=True):
        if _has_same_settings(first.rule, second.rule):  # comparing formulas takes longer
            continue
        shapes = {a.tensor(name).shape for name in first.tensors}
        if any(_formula(first, shape) != _formula(second, shape) for shape in shapes):
            yield f"the optimiser updates {first.tensors[0]} by another formula"


def _has_same_settings(a: Any, b: Any) -> bool:
    """Return True if two parts have the same class and equal settings.

    Settings that Python cannot compare count as different.
    """
    try:
        return type(a) is type(b) and bool(vars(a) == vars(b))
    except (TypeError, ValueError):  # arrays have no single truth value
        return False


def _differing_value(subject: str, a: Any, b: Any) -> Iterator[str]:
    if a != b:
        yield f"{subject} is {printable(str(a))} and {printable(str(b))}"


def _formula(group: Group, shape: tuple[int, ...]) -> list[Any]:
    """Return the group's update formula for a tensor of this shape, as a list of recorded operations.

    The formula does not contain the values of the rule's scalars.
    """
    rule = group.rule
    w, g, n = Shaped(shape), Shaped(shape), {name: Shaped((1,)) for name in rule.names()}
    state = {slot: Shaped(tuple(slot_shape)) for slot, slot_shape in rule.slots(shape).items()}
    ops = _Recorder([w, g, *state.values(), *n.values()])
    new, new_state = rule.update(ops, w, g, state, n)
    results = [ops.term(new), *((slot, ops.term(x)) for slot, x in new_state.items())]
    return [rule.elementwise, [*n], [(slot, x.shape) for slot, x in state.items()], ops.lines, results]


class _Recorder(Shapes):
    """Arithmetic that records each operation and its operands.

    An operand is a constant or the index of an earlier result.
    """

    def __init__(self, operands: Sequence[Shaped]):
        super().__init__()
        self.lines: list[Any] = []
        self._terms = [*operands]  # keeps the operands alive, so that ids stay unique
        self._numbers = {id(x): i for i, x in enumerate(operands)}

    def term(self, x: Any) -> Any:
        """Return the recorded form of an operand: a float for a constant, or "#<index>" for an earlier result."""
        return float(x) if isinstance(x, Real) else f"#{self._numbers[id(x)]}"

    def record(self, op: str, arguments: Sequence[Any], result: Shaped) -> Shaped:
        """Record an operation, and return its result."""
        self.lines.append((op, *map(self.term, arguments)))
        self._numbers[id(result)] = len(self._terms)
        self._terms.append(result)
        return result


def _recording(op: str) -> Any:
    compute = getattr(Shapes, op)
    return lambda self, *arguments: self.record(op, arguments, compute(self, *arguments))


for _op in ("add", "sub", "mul", "div", "scale", "shift", "sqrt", "sign", "at_least", "sum", "sum_last", "matmul",
            "transpose"):  # fmt: skip
    setattr(_Recorder, _op, _recording(_op))
