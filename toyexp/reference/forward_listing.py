"""A model's forward pass as a listing: its own function, run over ops that compute nothing but shapes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from toyexp.base.formatting import columns, count
from toyexp.interfaces.model import Model
from toyexp.interfaces.ops import Ops, Params, Rotary, Tensor

Size = int | str  # a letter is a size that a run chooses: B sequences, T positions
BLOCK = re.compile(r"(?:^|\.)blk\.(\d+)\.")


@dataclass(frozen=True)
class Traced:
    """What stands for a tensor: its shape, and of a weight its name and type."""

    shape: tuple[Size, ...]
    name: str = ""
    type: str = ""


@dataclass(frozen=True)
class Line:
    """One op of the forward pass."""

    op: str
    weights: tuple[Traced, ...]  # the tensors of the file that it reads
    result: tuple[Size, ...]
    detail: str = ""  # what else it is told
    operations: int = 0  # multiplications and additions, times `per`; of matrix products and attention
    per: tuple[str, ...] = ()
    results: int = 1
    block: int | None = None  # the one it is called in, from 0

    def anywhere(self, types: bool) -> Line:
        """The same without the number of its block, and without the types of its weights unless `types`."""
        return replace(
            self,
            block=None,
            weights=tuple(replace(w, name=inside(w.name), type=w.type if types else "") for w in self.weights),
        )


def inside(name: str) -> str:
    """A tensor's name inside its block: attn_q.weight of blk.3.attn_q.weight."""
    found = BLOCK.search(name)
    return name[found.end() :] if found else name


@dataclass(frozen=True)
class Listing:
    """A forward pass in three parts."""

    before: Sequence[Line]
    blocks: Mapping[int, Sequence[Line]]
    after: Sequence[Line]
    once: frozenset[str] = frozenset()  # the letters of an example: a token's B and T, an image's B
    unit: str = "token"  # which that is

    def all(self) -> list[Line]:
        """Every op, in order."""
        return [*self.before, *(line for block in self.blocks.values() for line in block), *self.after]

    def operations(self) -> dict[str, int]:
        """Operations of one token or image by what they are multiplied with: {"": 2.1e8, "T": 69120}."""
        total: dict[str, int] = {}
        for line in self.all():
            if line.operations:
                factor = " ".join(self._beside(line))
                total[factor] = total.get(factor, 0) + line.operations
        return total

    def lines(self) -> list[str]:
        """For a person: one block written out, the others in a line."""
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
        return columns([heads, *rows], right=(5, 6))

    def _runs(self) -> list[tuple[int, int]]:
        """The first and last number of blocks after one another that are alike but for types."""
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
                    varied.setdefault(inside(w.name), set()).add(w.type)
        mixed = [f"{name} {' or '.join(sorted(types))}" for name, types in varied.items() if len(types) > 1]
        return f"{which} {are}" + (f", but for types: {', '.join(mixed)}" if mixed else "")

    def _rows(self, lines: Sequence[Line], shown: set[str], indent: str = "") -> list[list[str]]:
        rows = []
        for line in lines:
            new = [w for w in line.weights if w.name not in shown]
            shown.update(w.name for w in new)
            main = line.weights[0] if line.weights else None
            name = inside(main.name) if main else line.detail
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
                count(numbers) if numbers else "",
                " ".join([count(line.operations), *self._beside(line)]) if line.operations else "",
            ])  # fmt: skip
        return rows

    def _beside(self, line: Line) -> list[str]:
        """The letters of the line's operations that are left for one token or image."""
        left = list(line.per)
        for letter in self.once.intersection(left):  # what reads tensors alone is done once for all of them
            left.remove(letter)
        return left


def listing(model: Model, weights: Iterable[Traced]) -> Listing:
    """Runs the model's forward function over shapes; `weights` are all its tensors."""
    ops = ShapeOps()
    inputs = model.inputs()
    batch = {name: Traced(("B", *shape)) for name, shape in inputs.items()}
    model.forward(ops, Params({w.name: w for w in weights}), batch)
    letters = {n for shape in inputs.values() for n in shape if isinstance(n, str)}
    return replace(_cut(ops.lines, frozenset({"B", *letters})), unit=model.reads.unit)


def _cut(lines: Sequence[Line], once: frozenset[str]) -> Listing:
    """Cuts where the blocks begin and end; what stands between two of them goes to the first."""
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


def _alike(op: str) -> Callable[..., Traced]:
    """An op whose result has its first tensor's shape."""

    def line(self: ShapeOps, x: Traced, *others: Any) -> Traced:
        return self._line(op, [x, *(t for t in others if isinstance(t, Traced))], x.shape)

    return line


@dataclass
class ShapeOps(Ops):
    """The op vocabulary, which writes a line for each op; see Ops for the shapes."""

    lines: list[Line] = field(default_factory=list)
    _blocks: int = 0  # begun so far
    _block: int | None = None  # the present one

    def _line(
        self, op: str, reads: Sequence[Traced], result: tuple[Size, ...], detail: str = "", cost: Sequence[Size] = (),
        results: int = 1,
    ) -> Traced:  # fmt: skip
        numbers, letters = [n for n in cost if isinstance(n, int)], [n for n in cost if isinstance(n, str)]
        weights = tuple(t for t in reads if t.name)
        operations = math.prod(numbers) if cost else 0
        self.lines.append(Line(op, weights, result, detail, operations, tuple(letters), results, self._block))
        return Traced(result)

    def block(self, function: Callable[..., Tensor], x: Tensor, p: Params, *rest: Any) -> Tensor:
        """A block inside another is a part of it."""
        outer = self._block
        if outer is None:
            self._block, self._blocks = self._blocks, self._blocks + 1
        y = function(self, x, p, *rest)
        self._block = outer
        return y

    add, mul, sigmoid, centre = map(_alike, ("add", "mul", "sigmoid", "centre"))
    rms_norm, layer_norm = map(_alike, ("rms_norm", "layer_norm"))
    silu, gelu, swiglu = map(_alike, ("silu", "gelu", "swiglu"))

    def rows(self, table: Tensor, ids: Tensor) -> Tensor:
        return self._line("rows", [table], (*ids.shape, table.shape[1]))

    def first_rows(self, table: Tensor, n: Size) -> Tensor:
        return self._line("first_rows", [table], (n, table.shape[1]))

    def matmul(self, x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
        reads = [w] if bias is None else [w, bias]
        return self._line("matmul", reads, (*x.shape[:-1], w.shape[0]), cost=(2, *x.shape, w.shape[0]))

    def scale(self, x: Tensor, factor: float) -> Tensor:
        return self._line("scale", [x], x.shape, f"times {factor:g}")

    def reshape(self, x: Tensor, shape: Sequence[Size]) -> Tensor:
        return self._line("reshape", [x], tuple(shape))

    def part(self, x: Tensor, axis: int, start: int, stop: int) -> Tensor:
        shape = (*x.shape[:axis], stop - start, *x.shape[axis + 1 :])
        return self._line("part", [x], shape, f"{start} to {stop - 1} of axis {axis}")

    def concat(self, parts: Sequence[Tensor], axis: int) -> Tensor:
        sizes = [p.shape[axis] for p in parts]
        letters = [n for n in sizes if isinstance(n, str)]
        number = sum(n for n in sizes if isinstance(n, int))
        joined = "+".join([*letters, *[str(number)] * bool(number)]) if letters else number
        first = parts[0].shape
        return self._line("concat", parts, (*first[:axis], joined, *first[axis + 1 :]), f"axis {axis}")

    def heads(self, x: Tensor, n: int) -> Tensor:
        return self._line("heads", [], (*x.shape[:-1], n, x.shape[-1] // n))

    def split(self, x: Tensor, n: int) -> tuple[Tensor, ...]:
        return (self._line("split", [], (*x.shape[:-1], x.shape[-1] // n), results=n),) * n

    def prepend(self, x: Tensor, token: Tensor) -> Tensor:
        rows, length, width = x.shape
        return self._line("prepend", [token], (rows, length + 1 if isinstance(length, int) else f"{length}+1", width))

    def select(self, x: Tensor, i: int) -> Tensor:
        return self._line("select", [], (x.shape[0], x.shape[2]), f"position {i}")

    def rope(self, x: Tensor, rotary: Rotary) -> Tensor:
        words = [f"base {rotary.base:g}"]
        words += [f"scale {rotary.scale:g}"] if rotary.scale != 1 else []
        words += ["factors"] if rotary.factors else []
        words += ["halves"] if rotary.halves else []
        return self._line("rope", [], x.shape, ", ".join(words))

    def attention(self, q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
        """Its two products count every position, hidden ones too."""
        rows, length, heads, size = q.shape
        shared = "" if k.shape[2] == heads else f", {heads} heads on {k.shape[2]}"
        detail = ("causal" if causal else "all positions") + shared
        return self._line("attention", [], (rows, length, heads * size), detail, (4, *q.shape, length))

    def cross_entropy(self, logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        return self._line("cross_entropy", [], ())
