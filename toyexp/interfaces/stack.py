"""Sessions whose training steps are taken together, and which plans are one program, each run with its own numbers."""

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
    """Open sessions, by row, whose steps begin together: here one after another; a plain session is a stack of one."""

    def __init__(self, sessions: Sequence[Session]):
        self.sessions = sessions

    @final
    def step(self, asked: Mapping[int, StepInput]) -> Mapping[int, Callable[[], StepMetrics]]:
        """Begin a training step of the sessions in these rows; return for each what waits for it.

        A session's `depth` steps may be under way. After an error nobody knows which rows have taken the step.
        """
        for row in asked:
            self.sessions[row].begin_step()
        return self.do_step(asked)

    def do_step(self, asked: Mapping[int, StepInput]) -> Mapping[int, Callable[[], StepMetrics]]:
        """Begin such a step; an engine whose rows are one program takes it once for all of them."""
        return {row: self.sessions[row].do_launch(*given) for row, given in asked.items()}

    def losses(self, asked: Mapping[int, Iterable[Batch]]) -> Mapping[int, Callable[[], float]]:
        """Begin to evaluate the sessions in these rows, each on its batches; return what waits for each mean loss.

        An error of one row's batches is raised by its function alone.
        """
        return {row: partial(self.sessions[row].evaluate, batches) for row, batches in asked.items()}


def program_difference(plans: Sequence[Plan]) -> str:
    """In what the plans' programs differ, in words; empty where they are one.

    One program has one model, batches and tensors of the same shapes, the same adapters, and changes each tensor by the
    same formula. Seeds, first values, clipping, what is skipped, and whatever a step's `numbers` hold may differ.
    """
    return next((words for plan in plans[1:] for words in _between(plans[0], plan)), "")


def _between(a: Plan, b: Plan) -> Iterator[str]:
    yield from _differing("model", type(a.model).__name__, type(b.model).__name__)
    sizes, others = model_settings(a.model), model_settings(b.model)
    for name in sizes:
        yield from _differing(f"model.{name}", sizes[name], others.get(name))
    for name in ("rows", "accumulate"):
        yield from _differing(f"the plan's {name}", getattr(a, name), getattr(b, name))
    for what, of in (
        ("the batches", lambda p: {n: (s.shape, s.dtype) for n, s in p.inputs.items()}),
        ("the tensors", lambda p: [(t.name, t.shape, t.trainable) for t in p.tensors]),
        ("the adapters", lambda p: p.adapters),
        ("the optimiser's groups", lambda p: [group.tensors for group in p.updates]),
    ):
        if of(a) != of(b):
            yield f"{what} are not the same"
    for one, other in zip(a.updates, b.updates, strict=True):
        if _is_same(one.rule, other.rule):  # to write out what they do takes longer
            continue
        shapes = {a.tensor(name).shape for name in one.tensors}
        if any(_formula(one, shape) != _formula(other, shape) for shape in shapes):
            yield f"the optimiser changes {one.tensors[0]} by another formula"


def _is_same(a: Any, b: Any) -> bool:
    """Whether two rules are set by the same values, as far as these can be compared."""
    try:
        return type(a) is type(b) and bool(vars(a) == vars(b))
    except (TypeError, ValueError):  # as arrays say
        return False


def _differing(what: str, a: Any, b: Any) -> Iterator[str]:
    if a != b:
        yield f"{what} is {printable(str(a))} and {printable(str(b))}"


def _formula(group: Group, shape: tuple[int, ...]) -> list[Any]:
    """The update of a tensor of that shape, written out; rules that differ in their numbers alone have one."""
    rule = group.rule
    w, g, n = Shaped(shape), Shaped(shape), {name: Shaped((1,)) for name in rule.names()}
    state = {slot: Shaped(tuple(own)) for slot, own in rule.slots(shape).items()}
    ops = _Written([w, g, *state.values(), *n.values()])
    new, new_state = rule.update(ops, w, g, state, n)
    results = [ops.term(new), *((slot, ops.term(x)) for slot, x in new_state.items())]
    return [rule.elementwise, [*n], [(slot, x.shape) for slot, x in state.items()], ops.lines, results]


class _Written(Shapes):
    """Notes each operation with what it is of: a constant, or an earlier result by its number."""

    def __init__(self, given: Sequence[Shaped]):
        super().__init__()
        self.lines: list[Any] = []
        self._terms = [*given]  # kept, so that each has an identity of its own
        self._numbers = {id(x): i for i, x in enumerate(given)}

    def term(self, x: Any) -> Any:
        """What stands for it in a line."""
        return float(x) if isinstance(x, Real) else f"#{self._numbers[id(x)]}"

    def note(self, op: str, arguments: Sequence[Any], result: Shaped) -> Shaped:
        """Notes an operation, and gives its result."""
        self.lines.append((op, *map(self.term, arguments)))
        self._numbers[id(result)] = len(self._terms)
        self._terms.append(result)
        return result


def _noting(op: str) -> Any:
    compute = getattr(Shapes, op)
    return lambda self, *arguments: self.note(op, arguments, compute(self, *arguments))


for _op in ("add", "sub", "mul", "div", "scale", "shift", "sqrt", "sign", "at_least", "sum", "sum_last", "matmul",
            "transpose"):  # fmt: skip
    setattr(_Written, _op, _noting(_op))
