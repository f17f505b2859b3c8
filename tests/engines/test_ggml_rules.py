"""Every op of the vocabulary and its gradient rule, on random shapes and values, against PyTorch in float64."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from probe import Probe, float32, probe_plan

from toyexp import AdaptedWeight, LowRank, Ops, Params, Rotary
from toyexp_ggml.binding import devices
from toyexp_ggml.engines import GGMLCPU, GGMLCUDA, GGMLMetal

ENGINES = {
    "fused": GGMLCPU(threads=1, products="ggml"),
    "kernels": GGMLCPU(threads=1),
    "blas": GGMLCPU(threads=1, products="blas"),
    "plain": GGMLMetal(threads=1, emulate=True),
    "cuda's": GGMLCUDA(threads=1, emulate=True),
}
AVAILABLE = {name: engine for name, engine in ENGINES.items() if name != "blas" or "BLAS" in devices()}
TOLERANCE = 1e-5  # relative error of a whole tensor: |ours - float64| / |float64|
EXAMPLES = settings(max_examples=20, deadline=None, derandomize=True, database=None)


class TorchOps(Ops):
    """The vocabulary in PyTorch's own functions, in the precision of its arguments."""

    def rows(self, table, ids):
        return F.embedding(ids, table)

    def first_rows(self, table, n):
        return table[:n]

    def matmul(self, x, w, bias=None):
        return F.linear(x, w, bias)

    def add(self, a, b):
        return a + b

    def mul(self, a, b):
        return a * b

    def div(self, a, b):
        return a / b

    def scale(self, x, factor, offset=0.0):
        return x * factor + offset

    def step(self, x):
        return torch.where(x > 0, 1.0, 0.0).to(x.dtype)

    def relu(self, x):
        return F.relu(x)

    def exp(self, x):
        return torch.exp(x)

    def log(self, x):
        return torch.log(x)

    def tanh(self, x):
        return torch.tanh(x)

    def softplus(self, x):
        return torch.logaddexp(x, torch.zeros((), dtype=x.dtype))

    def permute(self, x, axes):
        return torch.permute(x, axes)

    def product(self, a, b, transposed=False):
        return torch.einsum("...nk,...mk->...nm" if transposed else "...nk,...km->...nm", a, b)

    def sum(self, x, axis=None, keep=False):
        return torch.sum(x, axis, keepdim=keep)

    def cumsum(self, x):
        return torch.cumsum(x, -1)

    def softmax(self, x):
        return F.softmax(x, -1)

    def log_softmax(self, x):
        return F.log_softmax(x, -1)

    def take(self, x, ids):
        one_per_row = ids.ndim < x.ndim
        taken = torch.take_along_dim(x, ids[..., None] if one_per_row else ids, -1)
        return taken[..., 0] if one_per_row else taken

    def causal(self, x, window=0, fill=-math.inf):
        before = torch.arange(x.shape[-2])[:, None] - torch.arange(x.shape[-1])
        return torch.where((before >= 0) & ((before < window) | (window == 0)), x, fill)

    def rms_norm(self, x, w, eps):
        return F.rms_norm(x, w.shape, w, eps)

    def layer_norm(self, x, w, b, eps):
        return F.layer_norm(x, w.shape, w, b, eps)

    def heads(self, x, n):
        return x.unflatten(-1, (n, -1))

    def prepend(self, x, token):
        return torch.cat([token.expand(len(x), 1, -1), x], dim=1)

    def select(self, x, i):
        return x[:, i]

    def silu(self, x):
        return F.silu(x)

    def split(self, x, n):
        return x.chunk(n, -1)

    def rope(self, x, rotary):
        size = x.shape[-1]
        angle = torch.arange(x.shape[1], dtype=torch.float64)[:, None, None] * rotary.base ** (
            -torch.arange(0, size, 2, dtype=torch.float64) / size
        )
        angle = angle / torch.tensor(rotary.factors or 1.0, dtype=torch.float64) / rotary.scale
        cos, sin = angle.cos().to(x), angle.sin().to(x)
        if rotary.halves:  # as Hugging Face writes it
            turned = torch.cat((-x[..., size // 2 :], x[..., : size // 2]), -1)
            return x * torch.cat((cos, cos), -1) + turned * torch.cat((sin, sin), -1)
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)

    def attention(self, q, k, v, causal=True, window=0, scale=None, softcap=0.0, sinks=None, bias=None):
        """Attention score by score; with none of the settings, PyTorch's own function."""
        if window or scale or softcap or sinks is not None or bias is not None or v.shape != k.shape:
            share = q.shape[2] // k.shape[2]
            k, v = k.repeat_interleave(share, 2), v.repeat_interleave(share, 2)
            scores = torch.einsum("bihd,bjhd->bhij", q, k) * (q.shape[3] ** -0.5 if scale is None else scale)
            scores = torch.tanh(scores / softcap) * softcap if softcap else scores
            scores = scores if bias is None else scores + bias
            top = scores.detach().amax((1, 2, 3), keepdim=True)
            weights = self.causal(torch.exp(scores - top), window, 0.0) if causal else torch.exp(scores - top)
            total = weights.sum(-1) + (0 if sinks is None else torch.exp(sinks[:, None] - top[..., 0]))
            return torch.einsum("bhij,bjhd,bhi->bihd", weights, v, 1 / total).flatten(2)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True).transpose(1, 2).flatten(2)

    def distance_bias(self, table, length):
        rows = [[table[:, max(i - j, 0)] * (i >= j) for j in range(length)] for i in range(length)]
        return torch.stack([torch.stack(row, -1) for row in rows], 1)

    def sigmoid(self, x):
        return torch.sigmoid(x)

    def centre(self, x):
        return x - x.mean(-1, keepdim=True)

    def reshape(self, x, shape):
        return x.reshape(tuple(shape))

    def part(self, x, axis, start, stop):
        return x.narrow(axis, start, stop - start)

    def concat(self, parts, axis):
        return torch.cat(tuple(parts), axis)

    def gelu(self, x, exact=False):
        return F.gelu(x, approximate="none" if exact else "tanh")

    def swiglu(self, gate, up):
        return F.silu(gate) * up

    def cross_entropy(self, logits, targets, weights):
        losses = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="none")
        return (losses * weights.flatten()).sum()


# -- random cases -----------------------------------------------------------------------------------------------

sizes = st.one_of(st.integers(1, 40), st.integers(32, 40))  # BLAS computes products from 32 on
small_counts = st.integers(1, 4)
rows = st.integers(1, 3)
seeds = st.integers(0, 2**32 - 1)
magnitudes = st.sampled_from([1e-4, 1e-2, 1.0, 1.0, 1.0, 1e2, 1e4])
leads = st.one_of(st.tuples(sizes), st.tuples(rows, st.integers(1, 17)))  # [n] or [B, T]


class Case:
    """Named arrays and a function of them, drawn once and computed by each side."""

    def __init__(self, draw):
        self.draw, self.random = draw, np.random.default_rng(draw(seeds))
        self.arrays, self.ids, self.function = {}, {}, None

    def array(self, name, *shape, magnitude=None, uneven=True):
        """Normal values; if `uneven`, now and then each row has its own magnitude."""
        spread = 10.0 ** self.random.uniform(-1, 1, (*shape[:-1], 1)) if uneven and self.draw(st.booleans()) else 1.0
        scale = self.draw(magnitudes) if magnitude is None else magnitude
        self.arrays[name] = float32(self.random.standard_normal(shape) * spread * scale)

    def labels(self, shape, classes):
        """Return targets and weights; a fifth of the weights are 0."""
        weights = self.random.uniform(0.1, 2, shape) * (self.random.random(shape) < 0.8)
        weights.flat[0] = 1.0
        return {"targets": self.random.integers(0, classes, shape, dtype=np.int32), "weights": float32(weights)}


def to_torch(array, dtype):
    return torch.from_numpy(array).to(dtype if array.dtype == np.float32 else torch.int64)


def run_torch(function, batch, arrays, dtype):
    """Return logits, loss, and its gradient by each array, computed by torch."""
    tensors = {n: to_torch(a, dtype).requires_grad_() for n, a in arrays.items()}
    inputs = {n: to_torch(a, dtype) for n, a in batch.items()}
    logits = function(TorchOps(), Params(tensors), inputs)
    loss = TorchOps().cross_entropy(logits, inputs["targets"], inputs["weights"]) / inputs["weights"].sum()
    gradients = torch.autograd.grad(loss, list(tensors.values()), allow_unused=True, materialize_grads=True)
    return {"logits": logits.detach(), "loss": loss.detach(), **dict(zip(tensors, gradients, strict=True))}


def run_ggml(engine, model, batch):
    """Return the same from a session."""
    plan = probe_plan(model, len(batch["targets"]), {n: a.shape[1:] for n, a in batch.items()})
    with engine.realize(plan) as session:
        session.build()
        logits = session.logits({n: a for n, a in batch.items() if n != "weights"})
        return {"logits": logits, "loss": session.evaluate([batch]), **session.gradients(batch)}


def distance(a, b):
    return norm(torch.as_tensor(a).double() - torch.as_tensor(b).double())


def norm(t):
    return float(torch.linalg.vector_norm(t))


def check(case):
    """Compare every profile with PyTorch, whose results are computed once.

    A matrix maps the case's result to logits, so that gradients in all directions flow back.
    """
    with torch.no_grad():
        wide = Params({n: to_torch(a, torch.float64) for n, a in case.arrays.items()})
        y = case.function(TorchOps(), wide, {n: to_torch(a, torch.float64) for n, a in case.ids.items()})
    shape, d, classes = tuple(y.shape[:-1]), y.shape[-1], case.draw(st.integers(2, 12))
    factor = 1 / (float(y.square().mean().sqrt()) or 1.0)  # makes logits near 1 for any magnitude
    case.arrays["out"] = float32(case.random.standard_normal((classes, d)) / math.sqrt(d))
    batch = {**case.ids, **case.labels(shape, classes)}

    def function(ops, p, batch):
        return ops.matmul(ops.scale(case.function(ops, p, batch), factor), p["out"])

    # What ggml may overwrite depends on which arrays are results of ops, and on the order of the gradients.
    names = case.draw(st.permutations(sorted(case.arrays)))
    arrays, op_results = {n: case.arrays[n] for n in names}, frozenset(case.draw(st.sets(st.sampled_from(names))))
    expected = run_torch(function, batch, arrays, torch.float64)
    # If float32 itself loses more than the tolerance (a difference of nearly equal numbers), the bound is ten times the
    # error of PyTorch in float32 when its arrays change by one unit in the last place.
    noise = dict.fromkeys(expected, 0.0)
    for _ in range(3):
        moved = {n: float32(a * (1 + 2**-23 * case.random.choice([-1, 0, 1], a.shape))) for n, a in arrays.items()}
        rough = run_torch(function, batch, moved, torch.float32)
        noise = {n: max(e, distance(rough[n], expected[n])) for n, e in noise.items()}
    for profile, engine in AVAILABLE.items():
        ours = run_ggml(engine, Probe(arrays, function, op_results), batch)
        for name, theirs in expected.items():
            bound = max(TOLERANCE * norm(theirs), 10 * noise[name], 1e-30)
            assert distance(ours[name], theirs) <= bound, (profile, name)


# -- the ops --------------------------------------------------------------------------------------------------------


def rows_case(draw):
    case = Case(draw)
    vocab = draw(sizes)
    case.array("table", vocab, draw(sizes))
    shape = draw(st.one_of(leads, st.sampled_from([(257,), (3, 200)])))  # a rule may sum the rows in chunks
    case.ids["ids"] = case.random.integers(0, vocab, shape, dtype=np.int32)
    case.function = lambda ops, p, batch: ops.embed(p["table"], batch["ids"])
    return case


def lens_case(draw):
    case = rows_case(draw)
    case.array("lens", draw(sizes), case.arrays["table"].shape[1])
    case.function = lambda ops, p, batch: ops.embed(AdaptedWeight(p["table"], lens=p["lens"]), batch["ids"])
    return case


def first_rows_case(draw):
    case = Case(draw)
    total = draw(sizes)
    n = draw(st.integers(1, total))
    case.array("table", total, draw(sizes))
    case.function = lambda ops, p, batch: ops.first_rows(p["table"], n)
    return case


def matmul_case(draw):
    case = Case(draw)
    x, out, bias = (*draw(leads), draw(sizes)), draw(sizes), draw(st.booleans())
    case.array("x", *x)
    case.array("w", out, x[-1])
    if bias:
        # If bias and product had very different magnitudes, one of them would round away.
        case.array("bias", out, magnitude=float(np.linalg.norm(case.arrays["x"]) * np.abs(case.arrays["w"]).mean()))
    case.function = lambda ops, p, batch: ops.linear(p["x"], p["w"], p.get("bias"))
    return case


def low_rank_case(draw):
    case = Case(draw)
    x, out, rank, scale = (
        (*draw(leads), draw(sizes)),
        draw(sizes),
        draw(small_counts),
        draw(st.sampled_from([0.25, 1.0, 16.0])),
    )
    case.array("x", *x)
    case.array("w", out, x[-1], magnitude=1.0)
    case.array("a", rank, x[-1], magnitude=1.0)
    case.array("b", out, rank, magnitude=1.0)
    case.function = lambda ops, p, batch: ops.linear(p["x"], AdaptedWeight(p["w"], LowRank(p["a"], p["b"], scale)))
    return case


def add_case(draw):
    case = Case(draw)
    a, magnitude = (*draw(leads), draw(sizes)), draw(magnitudes)
    missing, twice = draw(st.integers(0, len(a) - 1)), draw(st.booleans())
    case.array("a", *a, magnitude=magnitude)
    case.array("b", *a[missing:], magnitude=magnitude)
    both = lambda ops, p: ops.add(p["a"], p["b"])  # noqa: E731
    case.function = lambda ops, p, batch: ops.add(both(ops, p), p["a"]) if twice else both(ops, p)
    return case


def mul_case(draw):
    case = Case(draw)
    shape, squared = (*draw(leads), draw(sizes)), draw(st.booleans())
    case.array("a", *shape)
    case.array("b", *shape, magnitude=1.0)
    case.function = lambda ops, p, batch: ops.mul(p["a"], p["a"] if squared else p["b"])
    return case


def scale_case(draw):
    case = Case(draw)
    case.array("x", *draw(leads), draw(sizes))
    factor = draw(st.sampled_from([-3.7, -1.0, 1e-4, 1.0, 1e4]))
    case.function = lambda ops, p, batch: ops.scale(p["x"], factor)
    return case


def norm_case(draw, op):
    """Draw at least 3 features: with one or two a norm's result is nearly constant, and its gradient cancels out."""
    case = Case(draw)
    d, eps = draw(st.integers(3, 40)), draw(st.sampled_from([1e-6, 1e-5, 1e-2]))
    case.array("x", *draw(leads), d)
    case.array("w", d)
    if op == "rms_norm":
        case.function = lambda ops, p, batch: ops.rms_norm(p["x"], p["w"], eps)
    else:
        case.array("b", d, magnitude=float(np.abs(case.arrays["w"]).mean()))
        case.function = lambda ops, p, batch: ops.layer_norm(p["x"], p["w"], p["b"], eps)
    return case


def rms_norm_case(draw):
    return norm_case(draw, "rms_norm")


def layer_norm_case(draw):
    return norm_case(draw, "layer_norm")


def heads_case(draw):
    case = Case(draw)
    n = draw(small_counts)
    case.array("x", draw(rows), draw(st.integers(1, 17)), n * draw(st.integers(1, 10)))
    case.function = lambda ops, p, batch: ops.heads(p["x"], n)
    return case


def split_case(draw):
    """Any of the parts may be unused, or used twice."""
    case = Case(draw)
    n = draw(small_counts)
    used = draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=n + 1))
    case.array("x", *draw(leads), n * draw(st.integers(1, 12)))

    def function(ops, p, batch):
        parts = ops.split(p["x"], n)
        y = parts[used[0]]
        for factor, i in enumerate(used[1:], start=2):
            y = ops.add(y, ops.scale(parts[i], 0.7 * factor))
        return y

    case.function = function
    return case


shapes = st.lists(st.integers(1, 9), min_size=2, max_size=4)


def part_case(draw):
    """Draw a part along any axis, sometimes all of it."""
    case = Case(draw)
    shape = draw(shapes)
    axis = draw(st.integers(0, len(shape) - 1))
    start = draw(st.integers(0, shape[axis] - 1))
    stop = draw(st.integers(start + 1, shape[axis]))
    case.array("x", *shape)
    case.function = lambda ops, p, batch: ops.part(p["x"], axis, start, stop)
    return case


def concat_case(draw):
    """Draw tensors along any axis; one may occur twice."""
    case = Case(draw)
    shape, magnitude = draw(shapes), draw(magnitudes)
    axis, count = draw(st.integers(0, len(shape) - 1)), draw(small_counts)
    for i in range(count):
        shape[axis] = draw(st.integers(1, 9))
        case.array(f"x{i}", *shape, magnitude=magnitude)
    used = draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=4))
    case.function = lambda ops, p, batch: ops.concat([p[f"x{i}"] for i in used], axis)
    return case


def reshape_case(draw):
    """Reshape, change some numbers, and reshape back."""
    case = Case(draw)
    shape = draw(shapes)
    permuted = draw(st.permutations(shape))
    case.array("x", *shape)
    case.array("y", *permuted)
    case.function = lambda ops, p, batch: ops.reshape(ops.add(ops.reshape(p["x"], permuted), p["y"]), shape)
    return case


def centre_case(draw):
    """Draw at least 3 features: see norm_case."""
    case = Case(draw)
    case.array("x", *draw(leads), draw(st.integers(3, 40)))
    case.function = lambda ops, p, batch: ops.centre(p["x"])
    return case


def prepend_case(draw):
    case = Case(draw)
    d = draw(sizes)
    case.array("x", draw(rows), draw(sizes), d)
    case.array("token", d)
    case.function = lambda ops, p, batch: ops.prepend(p["x"], p["token"])
    return case


def select_case(draw):
    case = Case(draw)
    length = draw(sizes)
    i = draw(st.integers(0, length - 1))
    case.array("x", draw(rows), length, draw(sizes))
    case.function = lambda ops, p, batch: ops.select(p["x"], i)
    return case


def silu_case(draw):
    case = Case(draw)
    case.array("x", *draw(leads), draw(sizes))
    case.function = lambda ops, p, batch: ops.silu(p["x"])
    return case


def rope_case(draw):
    case = Case(draw)
    pairs = draw(st.integers(1, 20))
    rotary = Rotary(
        base=draw(st.sampled_from([100.0, 10000.0, 500000.0])),
        scale=draw(st.sampled_from([1.0, 1.0, 0.5, 4.0])),
        factors=draw(st.sampled_from([(), tuple(case.random.uniform(0.5, 32, pairs).tolist())])),
        halves=draw(st.booleans()),
    )
    case.array("x", draw(rows), draw(sizes), draw(small_counts), 2 * pairs)
    case.function = lambda ops, p, batch: ops.rope(p["x"], rotary)
    return case


def attention_case(draw):
    case = Case(draw)
    batch, length, shared, size = (
        draw(rows),
        draw(st.integers(1, 40)),
        draw(st.integers(1, 3)),
        draw(st.integers(1, 20)),
    )
    group, causal, sharp = draw(st.sampled_from([1, 2, 4])), draw(st.booleans()), draw(st.sampled_from([0.1, 1.0, 2.0]))
    large = draw(
        st.sampled_from([1e-2, 1.0, 1e2])
    )  # queries are small if keys are large, which keeps the scores moderate
    case.array("q", batch, length, group * shared, size, magnitude=sharp * large, uneven=False)
    case.array("k", batch, length, shared, size, magnitude=sharp / large, uneven=False)
    case.array("v", batch, length, shared, size)
    case.function = lambda ops, p, batch: ops.attention(p["q"], p["k"], p["v"], causal)
    return case


def sigmoid_case(draw):
    case = Case(draw)
    case.array("x", *draw(leads), draw(sizes))
    case.function = lambda ops, p, batch: ops.sigmoid(p["x"])
    return case


def gelu_case(draw):
    case = Case(draw)
    case.array("x", *draw(leads), draw(sizes))
    exact = draw(st.booleans())
    case.function = lambda ops, p, batch: ops.gelu(p["x"], exact)
    return case


def attention_settings_case(draw):
    case = Case(draw)
    batch, length, shared, share = draw(rows), draw(st.integers(1, 9)), draw(small_counts), draw(small_counts)
    size, value_size = draw(st.integers(1, 20)), draw(st.integers(1, 20))
    case.array("q", batch, length, shared * share, size, magnitude=1.0, uneven=False)
    case.array("k", batch, length, shared, size, magnitude=1.0, uneven=False)
    case.array("v", batch, length, shared, value_size)
    options = {"window": draw(st.integers(0, 10)), "scale": draw(st.sampled_from([None, 0.3]))}
    options["softcap"] = draw(st.sampled_from([0.0, 2.0]))
    with_sinks, causal = draw(st.booleans()), draw(st.booleans())
    if with_sinks:
        case.array("sinks", shared * share, magnitude=1.0)
    shape = draw(st.sampled_from([None, (shared * share, length, length), (1, length, length), (length, length)]))
    by_distance = shape is None and draw(st.booleans())
    if shape or by_distance:
        case.array("bias", *(shape or (shared * share, length + draw(st.integers(0, 3)))), magnitude=1.0)

    def function(ops, p, batch):
        own = {name: p[name] for name in ("sinks", "bias") if name in p}
        own |= {"bias": ops.distance_bias(p["bias"], length)} if by_distance else {}
        return ops.attention(p["q"], p["k"], p["v"], causal, **own, **options)

    case.function = function
    return case


def experts_case(draw):
    case = Case(draw)
    count, outputs, inputs = draw(small_counts), draw(st.integers(1, 9)), draw(st.integers(1, 9))
    each = (count,) * draw(st.integers(0, 1))  # whether each expert reads another x
    case.array("x", draw(rows), draw(st.integers(1, 9)), *each, inputs)
    case.array("w", count, outputs, inputs)
    case.function = lambda ops, p, batch: ops.experts(p["x"], p["w"])
    return case


def linear_attention_case(draw):
    case = Case(draw)
    batch, length, shared = draw(rows), draw(st.integers(1, 9)), draw(small_counts)
    heads = shared * draw(small_counts)
    for name, count in (("q", shared), ("v", heads)):
        case.array(name, batch, length, count, draw(st.integers(1, 9)), magnitude=1.0)
    case.array("k", *case.arrays["q"].shape, magnitude=1.0)
    case.array("a", batch, length, heads, magnitude=1.0, uneven=False)
    case.function = lambda ops, p, batch: ops.linear_attention(p["q"], p["k"], p["v"], ops.scale(ops.exp(p["a"]), -1.0))
    return case


def repeated_case(draw):
    """Add, multiply and divide with a second tensor that lacks leading axes of the first, or has 1 on others."""
    case, shape = Case(draw), tuple(draw(st.lists(st.integers(1, 7), min_size=2, max_size=4)))
    other = [n if draw(st.booleans()) else 1 for n in shape][draw(st.integers(0, len(shape) - 1)) :]
    case.array("x", *shape, magnitude=1.0)
    case.array("w", *other, magnitude=1.0, uneven=False)
    op = draw(st.sampled_from(["add", "mul", "div"]))
    case.function = lambda ops, p, batch: getattr(ops, op)(
        p["x"], ops.scale(ops.mul(p["w"], p["w"]), 1.0, 0.5) if op == "div" else p["w"]
    )
    return case


def elementwise_case(draw):
    case = Case(draw)
    case.array("x", *draw(leads), draw(sizes), magnitude=1.0)
    op = draw(st.sampled_from(["relu", "tanh", "softplus", "softmax", "log_softmax", "cumsum", "softcap"]))
    case.function = lambda ops, p, batch: ops.softcap(p["x"], 3.0) if op == "softcap" else getattr(ops, op)(p["x"])
    return case


def exp_log_case(draw):
    case = Case(draw)
    case.array("x", *draw(leads), draw(sizes), magnitude=1.0, uneven=False)
    case.function = lambda ops, p, batch: ops.log(ops.scale(ops.exp(p["x"]), 2.0, 0.25))
    return case


def reduced_case(draw):
    case, shape = Case(draw), tuple(draw(st.lists(st.integers(1, 7), min_size=2, max_size=4)))
    case.array("x", *shape, magnitude=1.0)
    axis, op = draw(st.integers(0, len(shape) - 1)), draw(st.sampled_from(["sum", "mean"]))
    case.function = lambda ops, p, batch: ops.mul(ops.mul(p["x"], p["x"]), getattr(ops, op)(p["x"], axis, keep=True))
    return case


def permuted_case(draw):
    case, shape = Case(draw), tuple(draw(st.lists(st.integers(1, 7), min_size=2, max_size=4)))
    case.array("x", *shape)
    axes = draw(st.permutations(range(len(shape))))
    case.function = lambda ops, p, batch: ops.permute(p["x"], axes)
    return case


def product_case(draw):
    case, lead = Case(draw), draw(st.lists(st.integers(1, 4), max_size=2))
    (n, k, m), transposed = (draw(sizes) for _ in range(3)), draw(st.booleans())
    case.array("x", *lead, n, k)
    case.array("w", *lead, *((m, k) if transposed else (k, m)))
    case.function = lambda ops, p, batch: ops.product(p["x"], p["w"], transposed)
    return case


def take_case(draw):
    case, lead, count = Case(draw), draw(leads), draw(st.integers(2, 30))
    case.array("x", *lead, count, magnitude=1.0)
    case.ids = {"ids": case.random.integers(0, count, lead, dtype=np.int32)}
    op = draw(st.sampled_from(["take", "token_log_probs"]))
    case.function = lambda ops, p, batch: ops.mul(
        p["x"], ops.reshape(getattr(ops, op)(p["x"], batch["ids"]), (*lead, 1))
    )
    return case


def causal_case(draw):
    case, length = Case(draw), draw(st.integers(1, 12))
    case.array("x", draw(rows), length, length, magnitude=1.0)
    window, fill = draw(st.integers(0, 13)), draw(st.sampled_from([0.0, -math.inf]))
    case.function = lambda ops, p, batch: (
        ops.causal(p["x"], window, fill) if fill == 0 else ops.softmax(ops.causal(p["x"], window))
    )
    return case


def shift_case(draw):
    case = Case(draw)
    case.array("x", draw(rows), draw(st.integers(1, 9)), draw(sizes))
    n = draw(st.integers(0, 10))
    case.function = lambda ops, p, batch: ops.add(p["x"], ops.shift(p["x"], n))
    return case


def route_case(draw):
    case, count = Case(draw), draw(st.integers(2, 9))
    case.array("x", *draw(leads), count, magnitude=1.0, uneven=False)
    k, normalise = draw(st.integers(1, count)), draw(st.booleans())
    case.function = lambda ops, p, batch: ops.route(p["x"], k, normalise)
    return case


def swiglu_case(draw):
    case = Case(draw)
    shape = (*draw(leads), draw(sizes))
    case.array("gate", *shape)
    case.array("up", *shape)
    case.function = lambda ops, p, batch: ops.swiglu(p["gate"], p["up"])
    return case


CASES = [
    rows_case, lens_case, first_rows_case, matmul_case, low_rank_case, add_case, mul_case, scale_case, rms_norm_case,
    layer_norm_case, heads_case, split_case, prepend_case, select_case, rope_case, attention_case, gelu_case,
    silu_case, swiglu_case, sigmoid_case, centre_case, reshape_case, part_case, concat_case, repeated_case,
    elementwise_case, exp_log_case, reduced_case, permuted_case, product_case, take_case, causal_case, shift_case,
    route_case, experts_case, attention_settings_case, linear_attention_case,
]  # fmt: skip


@pytest.fixture(params=ENGINES)
def engine(request):
    if request.param == "blas" and "BLAS" not in devices():
        pytest.skip("this ggml-python is built without BLAS")
    return ENGINES[request.param]


@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__.removesuffix("_case"))
def test_an_op_and_its_gradient_agree_with_float64(make):
    @EXAMPLES
    @given(st.data())
    def every_example(data):
        check(make(data.draw))

    every_example()


def test_ids_can_be_taken_from_tensors_of_several_shapes(engine):
    """Two elements of a row, the same of a row of another length, and one of each of two rows."""
    draw = np.random.default_rng(0)
    arrays = {"x": float32(draw.normal(size=(2, 3, 7))), "y": float32(draw.normal(size=(2, 3, 2, 7)))}
    arrays["z"] = float32(draw.normal(size=(2, 3, 5)))
    ids = np.stack([draw.permutation(5)[:2] for _ in range(6)]).reshape(2, 3, 2).astype(np.int32)
    batch = {"ids": ids, "targets": np.zeros((2, 3), np.int32), "weights": np.ones((2, 3), np.float32)}

    def function(ops, p, batch):
        x, y, z = (ops.mul(p[n], p[n]) for n in "xyz")
        return ops.mul(ops.take(x, batch["ids"]), ops.add(ops.take(y, batch["ids"]), ops.take(z, batch["ids"])))

    ours = run_ggml(engine, Probe(arrays, function), batch)
    for name, theirs in run_torch(function, batch, arrays, torch.float64).items():
        assert distance(ours[name], theirs) <= TOLERANCE * norm(theirs), name


def values_and_gradients(engine, function, **arrays):
    """Compute a function [n, d] of arrays, and the gradients of a loss of it, on both sides."""
    n = len(arrays["x"])
    batch = {"targets": np.zeros(n, np.int32), "weights": np.ones(n, np.float32)}
    call = lambda ops, p, batch: function(ops, p)  # noqa: E731
    return run_ggml(engine, Probe(arrays, call), batch), run_torch(call, batch, arrays, torch.float64)


@pytest.mark.parametrize("op", ["gelu", "gelu_exact", "sigmoid", "silu"])
def test_activations_at_zero_and_at_large_values_agree_with_float64(op, engine):
    tiny = [0.0, -0.0, 1e-38, -1e-38, 1e-29, -1e-29, 1e-12, -1e-12]
    x = float32([tiny, [1e-3, -1e-3, 10, -10, 90, -90, 1e4, -1e4]])
    function = {"gelu_exact": lambda ops, p: ops.gelu(p["x"], exact=True)}
    ours, theirs = values_and_gradients(engine, function.get(op, lambda ops, p: getattr(ops, op)(p["x"])), x=x)
    for name in ("logits", "x"):
        np.testing.assert_allclose(ours[name], theirs[name], rtol=2e-6, atol=1e-7, err_msg=name)


@pytest.mark.parametrize("magnitude", [1e-8, 1e-3, 1e6])
def test_layer_norm_of_small_and_large_numbers_agrees_with_float64(magnitude, engine):
    draw = np.random.default_rng(0)
    arrays = {"x": draw.standard_normal((5, 48)) * magnitude, "w": draw.standard_normal(48), "b": np.zeros(48)}
    arrays = {name: float32(array) for name, array in arrays.items()}
    ours, theirs = values_and_gradients(engine, lambda ops, p: ops.layer_norm(p["x"], p["w"], p["b"], 1e-5), **arrays)
    for name in ("logits", *arrays):
        assert distance(ours[name], theirs[name]) <= TOLERANCE * norm(theirs[name]), name


@pytest.mark.parametrize("used", [(1,), (0, 2), (2,)])
def test_unused_parts_have_a_gradient_of_zero(used, engine):
    x = float32(np.random.default_rng(0).standard_normal((4, 15)))

    def function(ops, p):
        parts = ops.split(p["x"], 3)
        return parts[used[0]] if len(used) == 1 else ops.mul(*(parts[i] for i in used))

    ours, theirs = values_and_gradients(engine, function, x=x)
    np.testing.assert_allclose(ours["x"], theirs["x"], atol=1e-7)
    assert np.any(ours["x"])


@pytest.mark.parametrize("classes", [251, 514, 521, 1000])
def test_the_gradient_weighs_each_position_by_its_own_weight(classes, engine):
    """Includes a prime number of classes, and one with a large divisor."""
    case = Case(lambda strategy: 0)
    x, batch = float32(case.random.standard_normal((2, 3, classes))), case.labels((2, 3), classes)
    ours, theirs = run_cross_entropy(engine, x, batch)
    assert distance(ours["x"], theirs["x"]) <= TOLERANCE * norm(theirs["x"])


def run_cross_entropy(engine, x, batch):
    """Compute the loss and its gradient by the logits x, on both sides."""
    function = lambda ops, p, batch: p["x"]  # noqa: E731
    return run_ggml(engine, Probe({"x": x}, function), batch), run_torch(function, batch, {"x": x}, torch.float64)


def test_cross_entropy_and_its_gradient_agree_with_float64(engine):
    """A gradient is a probability, or a probability minus 1, times its weight, to float32's precision."""

    @EXAMPLES
    @given(st.data())
    def every_example(data):
        case, classes = Case(data.draw), data.draw(sizes)
        magnitude = data.draw(st.sampled_from([1e-4, 1.0, 20.0]))
        case.array("x", *data.draw(leads), classes, magnitude=magnitude, uneven=False)
        x = case.arrays["x"].clip(-40, 40) + float32(data.draw(st.sampled_from([0, -1000, 1000])))
        batch = case.labels(x.shape[:-1], classes)
        ours, theirs = run_cross_entropy(engine, x, batch)
        assert ours["loss"] == pytest.approx(theirs["loss"].item(), rel=TOLERANCE, abs=2e-7)
        error, share = distance(ours["x"], theirs["x"]), np.linalg.norm(batch["weights"]) / batch["weights"].sum()
        assert error <= 1e-6 * share
        if magnitude <= 1:
            assert error <= TOLERANCE * norm(theirs["x"])

    every_example()


def test_a_probability_that_underflows_keeps_its_gradient(engine):
    """The loss is cut off at 85, near float32's smallest number; the gradient is that of the exact loss."""
    x, batch = float32([[200.0, 0.0, -200.0]]), {"targets": np.array([2], np.int32), "weights": float32([1.0])}
    ours, theirs = run_cross_entropy(engine, x, batch)
    assert (ours["loss"], theirs["loss"]) == (pytest.approx(85.195, abs=1e-3), pytest.approx(400))
    np.testing.assert_allclose(ours["x"], theirs["x"], atol=1e-7)
