"""Graph builder with one method per ggml op (arithmetic, views and copies); each method checks shapes first."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from typing import Any

from toyexp import Rotary
from toyexp_ggml import native
from toyexp_ggml.binding import F32, GraphError, ggml
from toyexp_ggml.binding.static_graph import StaticGraph
from toyexp_ggml.binding.tensors import Node

SET_LIMIT = 2**30  # bytes of a tensor from which on ggml's op SET cannot write to it
# Kernel of an op that only allocates memory. ggml_time_init does nothing except prepare a clock on some systems.
NOTHING = ggml.ggml_custom_op_t(ctypes.cast(ggml.lib.ggml_time_init, ctypes.c_void_p).value)


def _unary(name: str) -> Callable[[Graph, Node], Node]:
    def make(graph: Graph, x: Node) -> Node:
        graph._check_float32(name, x)
        return graph._node(getattr(ggml, f"ggml_{name}")(graph._context, x.ptr), x.shape)

    return make


def _binary(name: str) -> Callable[[Graph, Node, Node], Node]:
    def make(graph: Graph, a: Node, b: Node) -> Node:
        graph._check_float32(name, a, b)
        graph._check_repeats(name, a, b)
        return graph._node(getattr(ggml, f"ggml_{name}")(graph._context, a.ptr, b.ptr), a.shape)

    return make


class Graph(StaticGraph):
    """Static graph with one method per op. A method raises GraphError for shapes that do not fit. See StaticGraph."""

    add, sub, mul, div = map(_binary, ("add", "sub", "mul", "div"))  # a op b, with b repeated over a
    sqr, sqrt, sgn, log, sigmoid, silu = map(_unary, ("sqr", "sqrt", "sgn", "log", "sigmoid", "silu"))
    exp, step, relu, tanh, gelu_erf = map(_unary, ("exp", "step", "relu", "tanh", "gelu_erf"))

    def scale(self, x: Node, factor: float, shift: float = 0.0) -> Node:
        """Return x * factor + shift."""
        self._check_float32("scale", x)
        return self._node(ggml.ggml_scale_bias(self._context, x.ptr, factor, shift), x.shape)

    def clamp(self, x: Node, low: float, high: float) -> Node:
        """Return x limited to low..high, computed in place: x must not be used again."""
        return self._node(ggml.ggml_clamp(self._context, x.ptr, low, high), x.shape)

    def total(self, x: Node, by_rows: bool = False) -> Node:
        """Return the sum of all numbers of x, [1]. `by_rows` sums rows first, which is faster on some devices."""
        x = self.row_sums(x) if by_rows else x
        return self._node(ggml.ggml_sum(self._context, x.ptr), (1,))

    def row_sums(self, x: Node) -> Node:
        """Reshape x to a nearly square matrix and return the sum of each row, [n, 1]."""
        count = next(n for n in range(math.isqrt(x.size), 0, -1) if x.size % n == 0)
        return self.sum_last(self.reshape(x, count, x.size // count))

    def sum_of_squares(self, x: Node, by_dot: bool = False) -> Node:
        """Return the sum of x^2, [1]. With `by_dot`, use the dot product of each row of a matrix with itself."""
        if not by_dot or len(x.shape) != 2:
            return self.total(self.sqr(x))
        rows = self.reshape(x, x.shape[0], 1, x.shape[1])
        return self.total(self.mul_mat(rows, rows))

    def sum_last(self, x: Node) -> Node:
        """Return the sum over the last axis, [.., 1]."""
        return self._node(ggml.ggml_sum_rows(self._context, x.ptr), (*x.shape[:-1], 1))

    def add_to_rows(self, x: Node, rows: Node) -> Node:
        """Add `rows` [a, m, d] to the first m of the n rows of x [a, n, d], in place: x must not be used again."""
        if x.shape[::2] != rows.shape[::2] or rows.shape[1] > x.shape[1]:
            raise GraphError(f"add_to_rows: cannot add {list(rows.shape)} to rows of {list(x.shape)}")
        _, n, d = x.shape
        size = x.size * 4
        return self._node(ggml.ggml_acc_inplace(self._context, x.ptr, rows.ptr, d * 4, n * d * 4, size, 0), x.shape)

    def mul_mat(self, w: Node, x: Node) -> Node:
        """Return x [.., n, in] times the transpose of w [.., out, in] -> [.., n, out].

        The leading axes of w are missing, or equal to those of x. The last leading axis of w may also be 1.
        """
        fits = w.shape[-1] == x.shape[-1] and 2 <= len(w.shape) <= len(x.shape)
        if not fits or (len(w.shape) > 2 and w.shape[:-2] not in (x.shape[:-2], (*x.shape[:-3], 1))):
            raise GraphError(f"mul_mat: cannot multiply {list(x.shape)} by the transpose of {list(w.shape)}")
        return self._node(ggml.ggml_mul_mat(self._context, w.ptr, x.ptr), (*x.shape[:-1], w.shape[-2]))

    def out_prod(self, a: Node, b: Node, transposed: bool = False) -> Node:
        """Return b^T a for a [.., k, m] and b [.., k, n] -> [.., n, m].

        If `transposed` is True, b is given as [.., n, k], and is transposed by a view, without a copy.
        """
        k, n = reversed(b.shape[-2:]) if transposed else b.shape[-2:]
        if a.shape[:-1] != (*b.shape[:-2], k):
            raise GraphError(f"out_prod: the shapes {list(a.shape)} and {list(b.shape)} do not fit")
        b_ptr = self._transpose_view(b) if transposed else b.ptr
        return self._node(ggml.ggml_out_prod(self._context, a.ptr, b_ptr), (*b.shape[:-2], n, a.shape[-1]))

    def get_rows_back(self, dy: Node, ids: Node, table: Node) -> Node:
        """Return the gradient of `table` [n, d] in get_rows: its row j is the sum of all rows dy[i] with ids[i] = j."""
        return self._node(ggml.ggml_get_rows_back(self._context, dy.ptr, ids.ptr, table.ptr), table.shape)

    def repeat_back(self, x: Node, like: Node) -> Node:
        """Return x summed to the shape of `like`, which is the gradient of repeating `like` to the shape of x."""
        self._check_repeats("repeat_back", x, like)
        return self._node(ggml.ggml_repeat_back(self._context, x.ptr, like.ptr), like.shape)

    def sum_first(self, x: Node) -> Node:
        """Return the sum of x [c, ..] over its first axis -> [..]."""
        rest = math.prod(x.shape[1:])
        first = self._view(x, (rest,), 0)
        return self.reshape(self.repeat_back(self.reshape(x, x.shape[0], rest), first), *x.shape[1:])

    def rms_norm(self, x: Node, eps: float) -> Node:
        """Return x / sqrt(mean(x^2) + eps) over the last axis."""
        return self._apply_norm("rms_norm", x, eps)

    def norm(self, x: Node, eps: float) -> Node:
        """Return (x - mean) / sqrt(variance + eps) over the last axis."""
        return self._apply_norm("norm", x, eps)

    def _apply_norm(self, op: str, x: Node, eps: float) -> Node:
        self._check_float32(op, x)
        if not 0 <= eps < math.inf:
            raise GraphError(f"{op}: eps={eps} must be 0 or above")
        return self._node(getattr(ggml, f"ggml_{op}")(self._context, x.ptr, eps), x.shape)

    def rms_norm_back(self, dy: Node, x: Node, eps: float) -> Node:
        """Return the gradient of x in y = rms_norm(x), given dy."""
        self._check_same("rms_norm_back", dy, x)
        return self._node(ggml.ggml_rms_norm_back(self._context, dy.ptr, x.ptr, eps), x.shape)

    def silu_back(self, dy: Node, x: Node) -> Node:
        """Return the gradient of x in y = silu(x), given dy."""
        self._check_same("silu_back", dy, x)
        return self._node(ggml.ggml_silu_back(self._context, dy.ptr, x.ptr), x.shape)

    def swiglu(self, gate: Node, up: Node) -> Node:
        """Return silu(gate) * up."""
        self._check_float32("swiglu", gate, up)
        self._check_same("swiglu", gate, up)
        return self._node(ggml.ggml_swiglu_split(self._context, gate.ptr, up.ptr), gate.shape)

    def softmax(self, x: Node, mask: Node | None = None, scale: float = 1.0) -> Node:
        """Return the softmax of x * scale + mask over the last axis; mask [T, T] repeats over the leading axes."""
        ptr = ggml.ggml_soft_max_ext(self._context, x.ptr, mask.ptr if mask else None, scale, 0.0)
        return self._node(ptr, x.shape)

    def softmax_back(self, dp: Node, p: Node, scale: float) -> Node:
        """Return the gradient of x in p = softmax(x * scale), given dp: scale p (dp - sum(p dp)).

        ggml may store a result in the memory of an operand that no later node reads, but this kernel still reads p
        while it writes the result. An extra node therefore reads p afterwards, so that the result gets other memory.
        """
        self._check_same("softmax_back", dp, p)
        result = self._node(ggml.ggml_soft_max_ext_back(self._context, dp.ptr, p.ptr, scale, 0.0), p.shape)
        self.want(result)
        self.want(self.total(self._view(p, (1,), 0)))
        return result

    def rope(self, x: Node, positions: Node, factors: Node | None, rotary: Rotary, back: bool) -> Node:
        """Apply rotary position embedding to x [B, T, H, D]. If `back` is True, rotate in the opposite direction.

        `factors` [D/2] holds the frequency divisors `rotary.factors`; None if all are 1. The device computes the angles
        from the base, the factors and the scale in float32.
        """
        self._check_float32("rope", x)
        size = x.shape[-1]
        if len(x.shape) != 4 or size % 2 or positions.shape != (x.shape[1],):
            raise GraphError(
                f"rope: expected [B, T, H, even D] and [T], got {list(x.shape)} and {list(positions.shape)}"
            )
        if factors and factors.shape != (size // 2,):
            raise GraphError(f"rope: expected {size // 2} factors, got {factors.shape[0]}")
        make = ggml.ggml_rope_ext_back if back else ggml.ggml_rope_ext
        mode = ggml.GGML_ROPE_TYPE_NEOX if rotary.halves else ggml.GGML_ROPE_TYPE_NORMAL
        rest = (size, mode, 0, rotary.base, 1 / rotary.scale, 0.0, 1.0, 32.0, 1.0)  # no YaRN
        return self._node(make(self._context, x.ptr, positions.ptr, factors and factors.ptr, *rest), x.shape)

    def adamw(self, w: Node, g: Node, m: Node, v: Node, hp: Node, by_kernel: bool = False) -> Node:
        """Update the weight w and the moments m and v in place, from the gradient g; by kernels.c if `by_kernel`.

        `hp` [7] holds ggml's AdamW parameters: learning rate, beta1, beta2, eps, weight decay, and the factors of m
        and v in the update.
        """
        for operand in (g, m, v):
            self._check_same("adamw", w, operand)
        if by_kernel:
            return self._call_kernel(native.kernel("adamw"), native.AdamW(size=w.size), w.shape, g, m, v, hp, target=w)
        return self._node(ggml.ggml_opt_step_adamw(self._context, w.ptr, g.ptr, m.ptr, v.ptr, hp.ptr), w.shape)

    # -- shapes, order and copies --

    def _node(self, ptr: Any, shape: tuple[int, ...]) -> Node:
        self._node_count += 1
        if self._node_count > self.capacity - 8:
            raise GraphError(f"the graph has more than {self.capacity} nodes")
        return Node(ptr, shape, math.prod(shape), ptr.contents.type != F32)

    def _check_float32(self, op: str, *nodes: Node) -> None:
        # For other types ggml ends the process, or reads their bytes as float32.
        if any(node.packed for node in nodes):
            raise GraphError(f"{op}: expected float32 tensors")

    def _check_same(self, op: str, a: Node, b: Node) -> None:
        if a.shape != b.shape:
            raise GraphError(f"{op}: the shapes {list(a.shape)} and {list(b.shape)} differ")

    def _check_repeats(self, op: str, a: Node, b: Node) -> None:
        """Raise GraphError unless b can be repeated to the shape of a (aligned at the last axis)."""
        padded = (1,) * (len(a.shape) - len(b.shape)) + b.shape
        if len(b.shape) > len(a.shape) or any(x % y for x, y in zip(a.shape, padded, strict=True)):
            raise GraphError(f"{op}: {list(b.shape)} cannot be repeated over {list(a.shape)}")

    def reshape(self, x: Node, *shape: int) -> Node:
        """Return a view of x in another shape."""
        self._check_float32("reshape", x)
        if math.prod(shape) != x.size or not 1 <= len(shape) <= 4 or min(shape) < 1:
            raise GraphError(f"reshape: {list(x.shape)} cannot be reshaped to {list(shape)}")
        make = getattr(ggml, f"ggml_reshape_{len(shape)}d")
        return x if shape == x.shape else self._node(make(self._context, x.ptr, *reversed(shape)), shape)

    def flat(self, x: Node) -> Node:
        """Return x [.., d] reshaped to [n, d], where n is the product of the leading axes."""
        return self.reshape(x, x.size // x.shape[-1], x.shape[-1])

    def transpose(self, x: Node, slow_cont: bool = False) -> Node:
        """Return a contiguous copy of x with its last two axes exchanged.

        If `slow_cont` is True, use the kernel in kernels.c instead of ggml's op CONT, if kernels.c can be compiled.
        """
        shape = (*x.shape[:-2], x.shape[-1], x.shape[-2])
        if slow_cont and (kernel := native.kernel("transpose")):
            return self.reshape(self._call_transpose(kernel, x), *shape)
        return self._node(ggml.ggml_cont(self._context, self._transpose_view(x)), shape)

    def _view(self, x: Node, shape: tuple[int, ...], start: int, *strides: int) -> Node:
        """Return a view of x from element `start` on.

        `strides` holds the stride, in elements, of each axis except the last.
        """
        make = getattr(ggml, f"ggml_view_{len(shape)}d")
        return self._node(make(self._context, x.ptr, *shape[::-1], *(4 * s for s in strides[::-1]), 4 * start), shape)

    def _transpose_view(self, x: Node) -> Any:
        self._node_count += 1
        return ggml.ggml_transpose(self._context, x.ptr)

    def _call_transpose(self, kernel: int, *sources: Node) -> Node:
        """Return one tensor [m, d, n] with the transposes of one or two sources of equal shape [.., n, d].

        `kernel` is the address of the C function that transposes.
        """
        self._check_float32("transpose", *sources)
        n, d = sources[0].shape[-2:]
        shape = (sum(source.size for source in sources) // (n * d), d, n)
        return self._call_kernel(kernel, native.Transpose(matrices=shape[0], rows=n, columns=d), shape, *sources)

    def product(self, a: Node, b: Node, a_transposed: bool = False, b_transposed: bool = False) -> Node:
        """Return a [n, k] times b [k, m] -> [n, m] by kernels.c. A transposed a is [k, n], a transposed b [m, k].

        A transposed b may have another type than float32: panels of it are dequantised when they are multiplied.
        """
        self._check_float32("product", a, *([] if b_transposed else [b]))
        (n, k), (rows, m) = a.shape[:: -1 if a_transposed else 1], b.shape[:: -1 if b_transposed else 1]
        if k != rows:
            raise GraphError(f"product: the shapes {list(a.shape)} and {list(b.shape)} do not fit")
        task = native.Product(n=n, m=m, k=k, a_transposed=a_transposed, b_transposed=b_transposed)
        if b.packed:
            traits = ggml.ggml_get_type_traits(b.ptr.contents.type).contents
            task.to_float, task.row_bytes = ctypes.cast(traits.to_float, ctypes.c_void_p), b.ptr.contents.nb[1]
        return self._call_kernel(native.kernel("product"), task, (n, m), a, b)

    def attention(self, q: Node, k: Node, v: Node, scale: float, causal: bool) -> Node:
        """Return softmax(scale q k^T) v [B, T, H * D] by kernels.c, for q [B, T, H, D] and k, v [B, T, Hkv, D]."""
        b, t, h, d = q.shape
        return self._attend("attention", (b, t, h * d), scale, causal, q, k, v)

    def attention_back(self, q: Node, k: Node, v: Node, dy: Node, scale: float, causal: bool) -> list[Node]:
        """Return the gradients of q, k and v in `attention`, given dy."""
        out = self._attend("attention_back", (q.size + 2 * k.size,), scale, causal, q, k, v, dy)
        starts = (0, q.size, q.size + k.size)
        return [
            self.reshape(self._view(out, (x.size,), start), *x.shape)
            for x, start in zip((q, k, v), starts, strict=True)
        ]

    def gelu(self, x: Node, dy: Node | None = None) -> Node:
        """Return GELU (tanh form) of x by kernels.c or, given dy, the gradient of x."""
        return self._map("gelu", x.shape, x, *([dy] if dy else []))

    def swiglu_back(self, gate: Node, up: Node, dy: Node) -> tuple[Node, Node]:
        """Return the gradients of gate and up in `swiglu` by kernels.c, given dy."""
        return self.halves(self._map("swiglu_back", (2 * gate.size,), gate, up, dy), gate.shape)

    def _map(self, name: str, shape: tuple[int, ...], *sources: Node) -> Node:
        self._check_float32(name, *sources)
        for source in sources:
            self._check_same(name, sources[0], source)
        return self._call_kernel(native.kernel(name), native.Elements(size=sources[0].size), shape, *sources)

    def _attend(
        self, name: str, shape: tuple[int, ...], scale: float, causal: bool, q: Node, k: Node, *rest: Node
    ) -> Node:
        self._check_float32(name, q, k, *rest)
        b, t, h, d = q.shape
        task = native.Attention(rows=b, length=t, heads=h, shared=k.shape[2], size=d, causal=causal, scale=scale)
        return self._call_kernel(native.kernel(name), task, shape, q, k, *rest)

    def _call_kernel(
        self, kernel: int, task: ctypes.Structure, shape: tuple[int, ...], *sources: Node, target: Node | None = None
    ) -> Node:
        """Return a node of `shape` that calls a kernel of kernels.c, whose address is `kernel`, with `task`.

        The kernel overwrites `target`, which becomes the first source, or writes a new tensor.
        """
        args = (type(sources[0].ptr) * len(sources))(*(source.ptr for source in sources))
        call = (args, len(args), ggml.ggml_custom_op_t(kernel), ggml.GGML_N_TASKS_MAX, ctypes.addressof(task))
        if target:
            ptr = ggml.ggml_custom_inplace(self._context, target.ptr, *call)
        else:
            ptr = ggml.ggml_custom_4d(self._context, F32, *(*(1,) * (4 - len(shape)), *shape)[::-1], *call)
        self._tasks.append((task, node := self._node(ptr, shape)))
        return node

    def transpose_both(self, a: Node, b: Node, slow_cont: bool = False) -> Node:
        """Return the transposes of a and b (m matrices [n, d] each) as one tensor [2 m, d, n], made by one copy."""
        self._check_same("transpose_both", a, b)
        if slow_cont and (kernel := native.kernel("transpose")):
            return self._call_transpose(kernel, a, b)
        n, d = a.shape[-2:]
        flat = (self.reshape(x, x.size // (n * d), n, d) for x in (a, b))
        joined = ggml.ggml_concat(self._context, *(self._transpose_view(x) for x in flat), 2)
        return self._node(joined, (2 * a.size // (n * d), d, n))

    def halves(self, x: Node, shape: tuple[int, ...]) -> tuple[Node, Node]:
        """Return the first and the second half of x as views of the given shape."""
        if x.size != 2 * math.prod(shape):
            raise GraphError(f"halves: {list(x.shape)} cannot be split into two of {list(shape)}")
        first, second = (self._view(x, (x.size // 2,), start) for start in (0, x.size // 2))
        return self.reshape(first, *shape), self.reshape(second, *shape)

    def permute(self, x: Node, axes: Sequence[int]) -> Node:
        """Return a contiguous copy of x, whose axis i is axis `axes[i]` of x."""
        self._check_float32("permute", x)
        count = len(x.shape)
        # ggml counts axes from the last one, and takes for each axis of x its place in the result.
        places = [count - 1 - list(axes).index(count - 1 - i) for i in range(count)] + [*range(count, 4)]
        self._node_count += 1
        view = ggml.ggml_permute(self._context, x.ptr, *places)
        return self._node(ggml.ggml_cont(self._context, view), tuple(x.shape[i] for i in axes))

    def swap_middle(self, x: Node) -> Node:
        """Return a contiguous copy of x [a, b, c, d] with its middle axes exchanged, [a, c, b, d]."""
        return self.permute(x, (0, 2, 1, 3))

    def join_heads(self, blocks: Sequence[Node], by_set: bool = False) -> Node:
        """Concatenate blocks [B, H, n, D] along n and exchange the middle axes -> [B, T, H, D], contiguous.

        If `by_set` is True, copy each block into one preallocated tensor, as `concat` does.
        """
        rows, heads, _, size = blocks[0].shape
        length = sum(block.shape[2] for block in blocks)
        if not by_set or len(blocks) == 1 or 4 * rows * length * heads * size >= SET_LIMIT:
            return self.swap_middle(self.concat(blocks, 2, by_set))
        out, start = self._allocate((rows, length, heads, size)), 0
        for block in blocks:
            self._check_float32("join_heads", block)
            self._node_count += 1
            permuted = ggml.ggml_permute(self._context, block.ptr, 0, 2, 1, 3)
            out = self._set(out, permuted, start * heads * size, (length * heads * size, heads * size, size))
            start += block.shape[2]
        return out

    def part(self, x: Node, axis: int, start: int, stop: int) -> Node:
        """Return a contiguous copy of indices start to stop - 1 of one axis, or x itself if these are all indices."""
        self._check_float32("part", x)
        if not 0 <= start < stop <= x.shape[axis]:
            raise GraphError(f"part: {start}..{stop} is not within axis {axis} of {list(x.shape)}")
        if (start, stop) == (0, x.shape[axis]):
            return x
        inner = math.prod(x.shape[axis + 1 :])
        width, outer = x.shape[axis] * inner, x.size // (x.shape[axis] * inner)
        count = (stop - start) * inner
        view = self._view(x, (outer, count), start * inner, width)
        copy = self._node(ggml.ggml_cont(self._context, view.ptr), (outer, count))
        return self.reshape(copy, *x.shape[:axis], stop - start, *x.shape[axis + 1 :])

    def number(self, x: Node, i: int) -> Node:
        """Return element `i` of x [n] as a view [1]."""
        if len(x.shape) != 1 or not 0 <= i < x.shape[0]:
            raise GraphError(f"number: {list(x.shape)} has no index {i}")
        return self._view(x, (1,), i)

    def first_rows(self, x: Node, count: int) -> Node:
        """Return the first `count` rows of x [n, d] as a view."""
        if len(x.shape) != 2 or not 1 <= count <= x.shape[0]:
            raise GraphError(f"first_rows: {list(x.shape)} does not have {count} rows")
        return self._view(x, (count, x.shape[1]), 0, x.shape[1])

    def concat(self, parts: Sequence[Node], axis: int, by_set: bool = False) -> Node:
        """Concatenate tensors along one axis. They must have equal sizes along all other axes.

        If `by_set` is True, copy each tensor into a preallocated one, unless the result has SET_LIMIT bytes or more.
        """
        if not parts:
            raise GraphError("concat: expected at least one tensor")
        self._check_float32("concat", *parts)
        first = parts[0].shape
        for other in (part.shape for part in parts[1:]):
            if len(other) != len(first) or first[:axis] + first[axis + 1 :] != other[:axis] + other[axis + 1 :]:
                raise GraphError(f"concat: {list(first)} and {list(other)} differ in more than axis {axis}")
        shape = (*first[:axis], sum(part.shape[axis] for part in parts), *first[axis + 1 :])
        if by_set and len(parts) > 1 and 4 * math.prod(shape) < SET_LIMIT:
            return self._set_side_by_side(parts, axis, shape)
        out = parts[0]
        for part in parts[1:]:
            shape = (*first[:axis], out.shape[axis] + part.shape[axis], *first[axis + 1 :])
            joined = ggml.ggml_concat(self._context, out.ptr, part.ptr, len(shape) - 1 - axis)
            out = self._node(joined, shape)
        return out

    def _set_side_by_side(self, parts: Sequence[Node], axis: int, shape: tuple[int, ...]) -> Node:
        outer, inner = math.prod(shape[:axis]), math.prod(shape[axis + 1 :])
        by_row = outer == 1 and inner > 1  # SET divides rows among threads; one thread would copy one long row
        out, start = self._allocate(shape), 0
        for part in parts:
            n = part.shape[axis]
            rows = self.reshape(part, n, inner) if by_row else self.reshape(part, outer, n * inner)
            out = self._set(out, rows.ptr, start, (inner if by_row else shape[axis] * inner,))
            start += n * inner
        return out

    def _allocate(self, shape: tuple[int, ...]) -> Node:
        """Allocate a tensor, on the CPU, that `_set` will fill."""
        sizes = (*(1,) * (4 - len(shape)), *shape)[::-1]
        tensor = ggml.ggml_custom_4d(self._context, F32, *sizes, None, 0, NOTHING, 1, None)
        return self._node(tensor, shape)

    def _set(self, x: Node, values: Any, start: int, strides: tuple[int, ...]) -> Node:
        """Copy values into x from element `start` on.

        `strides` holds the stride, in elements, of each axis except the last.
        """
        sizes = (*(4 * s for s in strides[::-1]), *(4 * x.size,) * (3 - len(strides)))
        return self._node(ggml.ggml_set_inplace(self._context, x.ptr, values, *sizes, 4 * start), x.shape)

    def get_rows(self, table: Node, ids: Node) -> Node:
        """Return the rows of `table` [n, d] at `ids` [m] -> [m, d]; the caller must ensure that ids are in range."""
        if len(table.shape) != 2 or len(ids.shape) != 1:
            raise GraphError(f"get_rows: expected [n, d] and ids [m], got {list(table.shape)} and {list(ids.shape)}")
        return self._node(ggml.ggml_get_rows(self._context, table.ptr, ids.ptr), (ids.shape[0], table.shape[1]))

    def set_rows(self, table: Node, rows: Node, ids: Node) -> Node:
        """Return `table` [n, d] with `rows` [m, d] written at ids [m], in place: `table` must not be used again."""
        if table.shape[1] != rows.shape[1] or rows.shape[0] != ids.shape[0]:
            raise GraphError(f"set_rows: {list(rows.shape)} at {list(ids.shape)} do not fit {list(table.shape)}")
        return self._node(ggml.ggml_set_rows(self._context, table.ptr, rows.ptr, ids.ptr), table.shape)

    def copy_into(self, x: Node, target: Node) -> Node:
        """Overwrite `target` with the values of x, and return it."""
        self._check_same("copy_into", x, target)
        return self._node(ggml.ggml_cpy(self._context, x.ptr, target.ptr), target.shape)
