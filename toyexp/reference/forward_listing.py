"""List the ops of a model's forward pass, by running it with shapes instead of tensors."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from toyexp.base.formatting import format_count
from toyexp.base.tables import fit_table
from toyexp.interfaces.arithmetic import Shaped
from toyexp.interfaces.model import Model
from toyexp.interfaces.ops import Ops, Params, Rotary
from toyexp.reference.forward import OpShapes

Size = int | str  # a letter stands for a size that a run chooses: B sequences, T positions
LARGE = 1 << 40  # in shapes, multiples of this number stand for the letters; no real size is as large
BLOCK = re.compile(r"(?:^|\.)blk\.(\d+)\.")


@dataclass(frozen=True)
class WeightInfo:
    """Shape, name and type (such as Q4_K) of a tensor in a model file."""

    shape: tuple[int, ...]
    name: str = ""
    type: str = ""


@dataclass(frozen=True)
class Line:
    """Row of a listing: an op of the forward pass, its weights, and the shape of its result."""

    op: str
    weights: tuple[WeightInfo, ...]  # tensors of the file that the op reads
    result: tuple[Size, ...]
    detail: str = ""  # other arguments
    operations: int = 0  # multiplications and additions, divided by the sizes in `per`
    per: tuple[str, ...] = ()  # letters of sizes: `operations` times these is the full number
    results: int = 1  # number of results
    block: int | None = None  # number of the enclosing block, from 0

    def anywhere(self, types: bool) -> Line:
        """Return a copy of the line that is the same for equal ops in different blocks.

        The copy has no block number, and its weights' names have no block prefix. If `types` is False, its weights also
        have no types.
        """
        return replace(
            self,
            block=None,
            weights=tuple(replace(w, name=name_in_block(w.name), type=w.type if types else "") for w in self.weights),
        )


def name_in_block(name: str) -> str:
    """Return a tensor's name without the prefix of its block, such as attn_q.weight for blk.3.attn_q.weight."""
    match = BLOCK.search(name)
    return name[match.end() :] if match else name


@dataclass(frozen=True)
class Listing:
    """Ops of a forward pass in three parts: before, in and after the blocks."""

    before: Sequence[Line]
    blocks: Mapping[int, Sequence[Line]]  # keyed by block number
    after: Sequence[Line]
    once: frozenset[str] = frozenset()  # letters of sizes that count as 1 for one token: B, T
    unit: str = "token"  # token or image

    def all(self) -> list[Line]:
        """Return the lines of all ops, in the order of the forward pass."""
        return [*self.before, *(line for block in self.blocks.values() for line in block), *self.after]

    def operations(self) -> dict[str, int]:
        """Return the number of operations per token or image, as a sum of terms that depend on sizes such as T.

        For example, {"": 210000000, "T": 69120} means 210000000 + 69120 T operations for T positions.
        """
        total: dict[str, int] = {}
        for line in self.all():
            if line.operations:
                factor = " ".join(self._factor_letters(line))
                total[factor] = total.get(factor, 0) + line.operations
        return total

    def lines(self) -> list[str]:
        """Return the lines of a text table of all ops. Of several equal blocks, only the first is shown in full."""
        shown: set[str] = set()
        rows = self._rows(self.before, shown)
        written: dict[tuple[Line, ...], int] = {}
        for first, last in self._runs():
            form = tuple(line.anywhere(types=False) for line in self.blocks[first])
            if form in written:
                rows.append([self._alike(first, last, written[form])])
                continue
            written[form] = first
            rows += [[f"block {first}"], *self._rows(self.blocks[first], shown, "  ")]
            if last > first:
                rows.append([self._alike(first + 1, last, first)])
        rows += self._rows(self.after, shown)
        heads = ["op", "tensor", "shape", "type", "result", "parameters", "operations"]
        return fit_table([heads, *rows], heads[5:], ["result", "shape", "type", "parameters"])

    def _runs(self) -> list[tuple[int, int]]:
        """Return the numbers of the first and last block of each series of equal blocks that follow each other.

        Blocks count as equal even if the types of their weights differ.
        """
        runs: list[tuple[int, int]] = []
        previous = None
        for i, block in self.blocks.items():
            form = [line.anywhere(types=False) for line in block]
            if form == previous:
                runs[-1] = (runs[-1][0], i)
            else:
                runs.append((i, i))
            previous = form
        return runs

    def _alike(self, first: int, last: int, model: int) -> str:
        which, are = (f"block {first}", "is like it") if first == last else (f"blocks {first}..{last}", "are alike")
        if first != model + 1:
            are = f"{'is' if first == last else 'are'} like block {model}"
        varied: dict[str, set[str]] = {}
        for i in (model, *range(first, last + 1)):
            for line in self.blocks[i]:
                for w in line.weights:
                    varied.setdefault(name_in_block(w.name), set()).add(w.type)
        mixed = [f"{name} {' or '.join(sorted(types))}" for name, types in varied.items() if len(types) > 1]
        return f"{which} {are}" + (f", but for types: {', '.join(mixed)}" if mixed else "")

    def _rows(self, lines: Sequence[Line], shown: set[str], indent: str = "") -> list[list[str]]:
        rows = []
        for line in lines:
            new = [w for w in line.weights if w.name not in shown]
            shown.update(w.name for w in new)
            main = line.weights[0] if line.weights else None
            name = name_in_block(main.name) if main else line.detail
            name += " + bias" if len(line.weights) > 1 else ""
            name += " again" if main and not new else ""
            result = f"[{', '.join(map(str, line.result))}]"
            numbers = sum(math.prod(int(n) for n in w.shape) for w in new)
            rows.append([
                indent + line.op,
                name,
                " x ".join(map(str, main.shape)) if main else "",
                main.type if main else "",
                f"{line.results} times {result}" if line.results > 1 else result,
                format_count(numbers) if numbers else "",
                " ".join([format_count(line.operations), *self._factor_letters(line)]) if line.operations else "",
            ])  # fmt: skip
        return rows

    def _factor_letters(self, line: Line) -> list[str]:
        """Return the letters of the sizes, such as T, with which the number of operations of the line's op grows.

        The number of operations per token or image is `line.operations` times these sizes.
        """
        letters = list(line.per)
        for letter in self.once.intersection(letters):  # an op that reads only weights has none of these letters
            letters.remove(letter)
        return letters


def listing(model: Model, weights: Iterable[WeightInfo]) -> Listing:
    """Run the model's forward function with shapes instead of tensors, and return a Listing of its ops.

    `weights` describes all tensors of the model.
    """
    inputs = model.inputs()
    letters = dict.fromkeys(["B", *(n for shape in inputs.values() for n in shape if isinstance(n, str))])
    numbers = {letter: LARGE + i * LARGE for i, letter in enumerate(letters)}
    ops = ListedOps({number: letter for letter, number in numbers.items()})
    batch = {
        name: Shaped((numbers["B"], *(numbers[n] if isinstance(n, str) else n for n in shape)))
        for name, shape in inputs.items()
    }
    model.forward(ops, Params({w.name: w for w in weights}), batch)
    return replace(_cut(ops.lines, frozenset(letters)), unit=model.reads.unit)


def _cut(lines: Sequence[Line], once: frozenset[str]) -> Listing:
    """Return a Listing of `lines`, split into the ops before, in and after the blocks.

    A line between two blocks is put into the first of the two. `once` holds the letters of sizes, such as B, that count
    as 1 when operations are counted per token.
    """
    numbers = [line.block for line in lines]
    inside = [at for at, number in enumerate(numbers) if number is not None]
    if not inside:
        return Listing(lines, {}, [], once)
    blocks: dict[int, list[Line]] = {}
    number = 0
    for line in lines[inside[0] : inside[-1] + 1]:
        number = number if line.block is None else line.block
        blocks.setdefault(number, []).append(line)
    return Listing(lines[: inside[0]], blocks, lines[inside[-1] + 1 :], once)


# An op's other arguments as text, and the sizes whose product is its number of operations.
DETAILS: dict[str, Callable[..., str]] = {
    "scale": lambda x, factor, offset=0.0: f"times {factor:g}" + (f" plus {offset:g}" if offset else ""),
    "permute": lambda x, axes: f"axes {', '.join(map(str, axes))}",
    "sum": lambda x, axis=None, keep=False: "all" if axis is None else f"axis {axis}",
    "mean": lambda x, axis=None, keep=False: "all" if axis is None else f"axis {axis}",
    "shift": lambda x, n=1: f"by {n}",
    "softcap": lambda x, cap: f"cap {cap:g}",
    "route": lambda scores, k, normalise=True: f"top {k}",
    "causal": lambda x, window=0, fill=0.0: f"window {window}" if window else "",
    "part": lambda x, axis, start, stop: f"{start} to {stop - 1} of axis {axis}",
    "concat": lambda parts, axis: f"axis {axis}",
    "select": lambda x, i: f"position {i}",
    "rope": lambda x, rotary: _rotary(rotary),
    "attention": lambda q, k, v, causal=True, **settings: _heads(q, k, causal, **settings),
}
COSTS: dict[str, Callable[..., tuple[int, ...]]] = {
    "matmul": lambda x, w, bias=None: (2, *x.shape, w.shape[0]),
    "product": lambda a, b, transposed=False: (2, *a.shape, b.shape[-2 if transposed else -1]),
    "attention": lambda q, k, v, *_, **__: (4, *q.shape, q.shape[1]),  # masked positions count too
    "experts": lambda x, w: (2, *x.shape[:2], *w.shape),
    "linear_attention": lambda q, k, v, log_decay: (
        2,
        *q.shape[:2],
        q.shape[1],
        math.prod(q.shape[2:]) + math.prod(v.shape[2:]),
    ),
}


def _rotary(rotary: Rotary) -> str:
    words = [f"base {rotary.base:g}"]
    words += [f"scale {rotary.scale:g}"] if rotary.scale != 1 else []
    words += ["factors"] if rotary.factors else []
    words += ["halves"] if rotary.halves else []
    return ", ".join(words)


def _heads(q: Shaped, k: Shaped, causal: bool, window: int = 0, softcap: float = 0.0, **_: Any) -> str:
    heads, shared = q.shape[2], k.shape[2]
    words = ["causal" if causal else "all positions"] + ([f"{heads} heads on {shared}"] if shared != heads else [])
    words += [f"window {window}"] if window else []
    words += [f"softcap {softcap:g}"] if softcap else []
    return ", ".join(words)


class ListedOps(OpShapes):
    """Implementation of the ops that computes shapes only and records a line for each op that the model calls.

    An op that is called inside another op has no line.
    """

    def __init__(self, letters: Mapping[int, str]) -> None:
        super().__init__()
        self.lines: list[Line] = []
        self._letters = letters  # letters of the sizes that a run chooses, keyed by the number that stands for each
        self._depth = 0  # nesting depth of ops that call other ops

    def __getattribute__(self, name: str) -> Any:
        op = super().__getattribute__(name)
        return partial(self._record_call, name, op) if name in LISTED else op

    def _record_call(self, name: str, op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._depth += 1
        try:
            result = op(*args, **kwargs)
        finally:
            self._depth -= 1
        if not self._depth:
            results = result if isinstance(result, tuple) else (result,)
            reads = [x for arg in (*args, *kwargs.values()) for x in (arg if isinstance(arg, list | tuple) else [arg])]
            cost = [self._size(n) for n in COSTS[name](*args, **kwargs)] if name in COSTS else []
            numbers, letters = [n for n in cost if isinstance(n, int)], [n for n in cost if isinstance(n, str)]
            self.lines.append(Line(
                name, tuple(x for x in reads if isinstance(x, WeightInfo)), tuple(map(self._size, results[0].shape)),
                DETAILS[name](*args, **kwargs) if name in DETAILS else "", math.prod(numbers) if cost else 0,
                tuple(letters), len(results), self.blocks - 1 if self._inside else None,
            ))  # fmt: skip
        return result

    def _size(self, n: int) -> Size:
        """Return the size `n` as the listing shows it: a number, or a letter such as T.

        T, for example, is the number of tokens in a row, which each run chooses. To find such sizes in the result, the
        listing runs the model with a large number in place of each. This function replaces the large number by its
        letter, and a number that is larger by 1 by `T+1`. Other sizes do not change.
        """
        base = n // LARGE * LARGE
        return n if base not in self._letters else self._letters[base] + (f"+{n - base}" if n > base else "")

    def _take(self, op: str, *tensors: object) -> None:
        """Do nothing: the listing does not check arguments of ops."""

    def _require(self, fits: bool, op: str, *values: object) -> None:
        """Do nothing: the listing does not check arguments of ops."""

    def first_rows(self, table: Shaped, n: int) -> Shaped:
        return Shaped((n, table.shape[1]))


LISTED = {name for name, op in vars(Ops).items() if callable(op) and not name.startswith("_")} - {
    "embed", "linear", "logits", "block", "dropout",
}  # fmt: skip
