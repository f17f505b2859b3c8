"""Invalid plans, models and batches: each must raise, and none may reach an assertion of ggml.

A failed assertion would end the process, so all cases run in a child process, which names each case before trying it.
"""

import dataclasses
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))  # the child is started as a script
from probe import Probe, float32, probe_plan

from toyexp import AdamW, Constant, FromGGUF, InputSpec, LoraAdapter, PlanTensor, Rotary, ToyexpError
from toyexp.formats.gguf.ggml_types import iter_pieces
from toyexp.formats.gguf.write import Writer
from toyexp.reference.forward import check_forward
from toyexp_ggml.engines import GGMLCPU, GGMLMetal

ENGINES = {
    "ggml": GGMLCPU(threads=1),
    "metal": GGMLMetal(threads=1, emulate=True),
}
ROWS, LENGTH, VOCAB, WIDTH = 2, 3, 5, 8
HP = AdamW.for_lora().hp_for_step(0)


def batch(rows=ROWS, length=LENGTH):
    draw = np.random.default_rng(0)
    ids = {n: draw.integers(0, VOCAB, (rows, length), dtype=np.int32) for n in ("tokens", "targets")}
    return {**ids, "weights": np.ones((rows, length), np.float32)}


def good_plan(function=lambda ops, p, batch: ops.embed(p["x"], batch["tokens"]), **shapes):
    """Return a plan whose function receives the embedding x [VOCAB, WIDTH] and tensors of these shapes."""
    draw = np.random.default_rng(1)
    arrays = {n: float32(draw.standard_normal(s)) for n, s in {"x": (VOCAB, WIDTH), **shapes}.items()}
    return probe_plan(Probe(arrays, function), ROWS, dict.fromkeys(batch(), (LENGTH,)))


def use_session(engine, plan, data=None, hp=HP):
    """Check the plan as every run does, then call everything that a session offers."""
    check_forward(plan, "recipe.probe")
    with engine.realize(plan) as session:
        session.build()
        data = data or batch()
        session.evaluate([data])
        session.logits(data)
        session.gradients(data)
        session.step(data, hp)


class Cases(list):
    """Cases: a name, a function of the engine that must raise, and the allowed exceptions."""

    def plan(self, name, plan, allowed=ToyexpError):
        """Add a case that builds `plan` inside, because building it may raise."""
        self.append((name, lambda engine: use_session(engine, plan()), allowed))

    def model(self, name, function, allowed=ToyexpError, **shapes):
        """Add `function(ops, p, x, batch)` with x [ROWS, LENGTH, WIDTH], with trainable and with frozen tensors."""

        def forward(ops, p, batch):
            return function(ops, p, ops.embed(p["x"], batch["tokens"]), batch)

        def frozen_plan():
            plan = good_plan(forward, **shapes)
            tensors = tuple(dataclasses.replace(t, trainable=t.name == "x") for t in plan.tensors)
            return dataclasses.replace(plan, tensors=tensors)

        self.plan(name, lambda: good_plan(forward, **shapes), allowed)
        if shapes:
            self.plan(f"{name}, frozen", frozen_plan, allowed)

    def batch(self, name, call, allowed=ToyexpError, **changes):
        """Add `call(session, batch)` with some arrays of the batch replaced, or removed by None."""

        def act(engine):
            data = {n: a for n, a in {**batch(), **changes}.items() if a is not None}
            with engine.realize(good_plan()) as session:
                session.build()
                call(session, data)

        self.append((name, act, allowed))


def attend(q, k, v, causal=True):
    """Add a model with attention between three tensors of its own."""
    function = lambda ops, p, x, batch: ops.attention(p["q"], p["k"], p["v"], causal)  # noqa: E731
    return {"function": function, "q": q, "k": k, "v": v}


def add_models(cases, draw):
    """Add forward passes that do not fit their tensors; `draw` returns sizes."""

    def n(low=1, high=9):
        return int(draw.integers(low, high + 1))

    for i in range(4):
        out, off = n(), n()
        cases.model(f"matmul inner {i}", lambda o, p, x, b: o.matmul(x, p["w"]), w=(out, WIDTH + off))
        cases.model(f"matmul inner, less {i}", lambda o, p, x, b: o.matmul(x, p["w"]), w=(out, n(1, WIDTH - 1)))
        cases.model(f"bias {i}", lambda o, p, x, b: o.matmul(x, p["w"], p["b"]), w=(out + 1, WIDTH), b=(out + 1 + off,))
        cases.model(f"add {i}", lambda o, p, x, b: o.add(x, p["w"]), w=(LENGTH, WIDTH + off))
        cases.model(f"add, middle axis {i}", lambda o, p, x, b: o.add(x, p["w"]), w=(LENGTH + off, WIDTH))
        cases.model(f"add, a divisor {i}", lambda o, p, x, b: o.add(x, p["w"]), w=(WIDTH // 2 ** (i % 2 + 1),))
        cases.model(f"rms_norm weight {i}", lambda o, p, x, b: o.rms_norm(x, p["w"], 1e-5), w=(WIDTH + off,))
        cases.model(
            f"rms_norm divisor {i}", lambda o, p, x, b: o.rms_norm(x, p["w"], 1e-5), w=(WIDTH // 2 ** (i % 4 or 1),)
        )
        cases.model(
            f"layer_norm bias {i}",
            lambda o, p, x, b: o.layer_norm(x, p["w"], p["b"], 1e-5),
            w=(WIDTH,),
            b=(WIDTH // 2,),
        )
        cases.model(f"swiglu {i}", lambda o, p, x, b: o.swiglu(x, o.matmul(x, p["w"])), w=(WIDTH + off, WIDTH))
        heads = n(2, 7)
        cases.model(
            f"heads {i}", lambda o, p, x, b, h=heads: o.heads(o.matmul(x, p["w"]), h), w=(heads * n() + 1, WIDTH)
        )
        odd = 2 * n(0, 6) + 1
        cases.model(
            f"rope of odd size {i}", lambda o, p, x, b, d=odd: o.rope(o.heads(o.matmul(x, p["w"]), 2), Rotary(1e4)),
            w=(2 * odd, WIDTH),
        )  # fmt: skip
        rows, length, shared, group, size = n(1, 3), n(), n(2, 3), n(2, 3), 2 * n(1, 4)
        q, k = (rows, length, shared * group, size), (rows, length, shared, size)
        causal = bool(i % 2)
        cases.model(f"attention heads {i}", **attend((rows, length, shared * group + 1, size), k, k, causal))
        cases.model(f"attention more keys' heads {i}", **attend(k, q, q, causal))
        cases.model(f"attention size {i}", **attend(q, (*k[:3], size + 1), (*k[:3], size + 1), causal))
        cases.model(f"attention values {i}", **attend(q, k, (*k[:3], size + off), causal))
        cases.model(
            f"attention length {i}", **attend(q, (rows, length + 1, *k[2:]), (rows, length + 1, *k[2:]), causal)
        )
        cases.model(f"attention rows {i}", **attend(q, (rows + 1, *k[1:]), (rows + 1, *k[1:]), causal))
        cases.model(f"first_rows {i}", lambda o, p, x, b, m=off: o.first_rows(p["w"], m + 1), w=(off, WIDTH))
        cases.model(
            f"lens {i}",
            lambda o, p, x, b: o.matmul(o.rows(p["w"], b["tokens"]), p["l"]),
            w=(VOCAB, off),
            l=(WIDTH, off + 1),
        )
    for shape in [(WIDTH,), (2, WIDTH, WIDTH), (1, 1, WIDTH, WIDTH)]:
        cases.model(f"matmul by {shape}", lambda o, p, x, b: o.matmul(x, p["w"]), w=shape)
    for shape in [(1, WIDTH), (LENGTH, WIDTH), (1,)]:
        cases.model(f"rms_norm by {shape}", lambda o, p, x, b: o.rms_norm(x, p["w"], 1e-5), w=shape)
    for shape in [(VOCAB,), (1, VOCAB, WIDTH)]:
        cases.model(f"rows of {shape}", lambda o, p, x, b: o.rows(p["w"], b["tokens"]), w=shape)
        cases.model(f"first_rows of {shape}", lambda o, p, x, b: o.first_rows(p["w"], 1), w=shape)
    for count in (0, -1):
        cases.model(f"first {count} rows", lambda o, p, x, b, m=count: o.first_rows(p["w"], m), w=(LENGTH, WIDTH))
    for heads in (0, -1, -2, 16):
        cases.model(f"{heads} heads", lambda o, p, x, b, h=heads: o.heads(x, h))
    cases.model("heads of heads", lambda o, p, x, b: o.heads(o.heads(x, 2), 2))
    cases.model("heads of a table", lambda o, p, x, b: o.heads(p["x"], 2))
    for eps in (-1e-5, math.nan, math.inf, -math.inf):
        cases.model(f"rms_norm eps {eps}", lambda o, p, x, b, e=eps: o.rms_norm(x, p["w"], e), w=(WIDTH,))
        cases.model(f"layer_norm eps {eps}", lambda o, p, x, b, e=eps: o.layer_norm(x, p["w"], p["w"], e), w=(WIDTH,))
    for bad in (0.0, -1.0, math.nan, math.inf):
        cases.model(f"rope base {bad}", lambda o, p, x, b, f=bad: o.rope(o.heads(x, 2), Rotary(f)))
        cases.model(f"rope scale {bad}", lambda o, p, x, b, f=bad: o.rope(o.heads(x, 2), Rotary(1e4, scale=f)))
        factors = (1.0,) * (WIDTH // 4 - 1) + (bad,)
        cases.model(f"rope factor {bad}", lambda o, p, x, b, f=factors: o.rope(o.heads(x, 2), Rotary(1e4, factors=f)))
    for count in (1, 3, 4):  # heads of 4 have 2 pairs
        factors = (1.0,) * count
        cases.model(
            f"{count} rope factors", lambda o, p, x, b, f=factors: o.rope(o.heads(x, 2), Rotary(1e4, factors=f))
        )
    cases.model("rope of [B, T, d]", lambda o, p, x, b: o.rope(x, Rotary(1e4)))
    cases.model("rope of a vector", lambda o, p, x, b: o.rope(p["w"], Rotary(1e4)), w=(WIDTH,))
    cases.model("attention without heads", lambda o, p, x, b: o.attention(x, x, x), allowed=Exception)
    cases.model("split into none", lambda o, p, x, b: o.split(x, 0)[0], allowed=Exception)

    # Ids in place of numbers, and numbers in place of ids.
    cases.model("add ids", lambda o, p, x, b: o.add(x, b["tokens"]))
    cases.model("add to ids", lambda o, p, x, b: o.add(b["tokens"], b["targets"]))
    cases.model("scale ids", lambda o, p, x, b: o.scale(b["tokens"], 2.0))
    cases.model("matmul ids", lambda o, p, x, b: o.matmul(b["tokens"], p["w"]), w=(4, LENGTH))
    cases.model("matmul by ids", lambda o, p, x, b: o.matmul(o.matmul(x, p["w"]), b["tokens"]), w=(LENGTH, WIDTH))
    cases.model("norm ids", lambda o, p, x, b: o.rms_norm(b["tokens"], p["w"], 1e-5), w=(LENGTH,))
    cases.model("gelu of ids", lambda o, p, x, b: o.gelu(b["targets"]))
    cases.model("swiglu of ids", lambda o, p, x, b: o.swiglu(b["tokens"], b["tokens"]))
    cases.model("part of ids", lambda o, p, x, b: o.part(b["tokens"], 0, 0, 1))
    cases.model("reshaped ids", lambda o, p, x, b: o.reshape(b["tokens"], (1, ROWS * LENGTH)))
    cases.model("joined ids", lambda o, p, x, b: o.concat([b["tokens"], b["tokens"]], 0))
    for axis in (-1, 3):
        cases.model(f"part of axis {axis}", lambda o, p, x, b, a=axis: o.part(x, a, 0, 1))
        cases.model(f"concat along axis {axis}", lambda o, p, x, b, a=axis: o.concat([x, x], a))
    for start, stop in ((-1, 1), (2, 2), (2, 1), (0, WIDTH + 1)):
        cases.model(f"part {start} to {stop}", lambda o, p, x, b, at=(start, stop): o.part(x, 2, *at))
    cases.model("concat of nothing", lambda o, p, x, b: o.concat([], 0))
    cases.model("concat of other widths", lambda o, p, x, b: o.concat([x, o.part(x, 2, 0, 3)], 1))
    cases.model("concat of fewer axes", lambda o, p, x, b: o.concat([x, p["w"]], 0), w=(LENGTH, WIDTH))
    for shape in ((ROWS, LENGTH), (ROWS, LENGTH, WIDTH, 1, 1), (0,), (-1, WIDTH), ()):
        cases.model(f"reshape to {shape}", lambda o, p, x, b, s=shape: o.reshape(x, s))
    cases.model("split ids", lambda o, p, x, b: o.split(b["tokens"], 3)[0])
    cases.model("first ids", lambda o, p, x, b: o.first_rows(b["tokens"], 1))
    cases.model("ids as a table", lambda o, p, x, b: o.rows(b["tokens"], b["tokens"]))
    cases.model("ids as logits", lambda o, p, x, b: b["tokens"])
    cases.model("weights as ids", lambda o, p, x, b: o.rows(p["x"], b["weights"]))
    cases.model("a tensor as ids", lambda o, p, x, b: o.rows(p["x"], p["x"]))

    # Results that are not logits.
    cases.model("logits of the last position", lambda o, p, x, b: o.first_rows(p["x"], ROWS))
    cases.model("logits of too many positions", lambda o, p, x, b: o.heads(x, 2))
    cases.model("one number", lambda o, p, x, b: o.cross_entropy(x, b["targets"], b["weights"]))
    cases.model("weights as logits", lambda o, p, x, b: b["weights"])
    for value in (None, 3, (1, 2), np.zeros((ROWS, LENGTH, VOCAB), np.float32)):
        cases.model(f"a {type(value).__name__} as logits", lambda o, p, x, b, v=value: v, allowed=Exception)
    cases.model("a tensor that is not there", lambda o, p, x, b: p["nothing"])

    def deep(o, p, x, b):
        for _ in range(100_000):
            x = o.scale(x, 1.0)
        return x

    cases.model("100000 layers", deep)
    # Attention between so many positions that their scores exceed any address space.
    length = 2**23
    wide = lambda: good_plan(lambda o, p, b: o.attention(*[p["q"]] * 3, causal=False), q=(1, length, 1, 1))  # noqa: E731
    shapes = {n: InputSpec((length,), "float32" if n == "weights" else "int32") for n in batch()}
    cases.plan("256 TB of scores", lambda: dataclasses.replace(wide(), inputs=shapes, rows=1))


def add_class_tokens(cases):
    """Add frozen class tokens whose size differs from the features; ggml would repeat some of them."""
    data = {"tokens": batch()["tokens"], "targets": np.zeros(ROWS, np.int32), "weights": np.ones(ROWS, np.float32)}

    def classify(ops, p, batch):
        return ops.select(ops.prepend(ops.embed(p["x"], batch["tokens"]), p["w"]), 1)

    for size in (1, 2, WIDTH // 2, WIDTH + 1, 2 * WIDTH):

        def act(engine, size=size):
            arrays = {"x": np.ones((VOCAB, WIDTH), np.float32), "w": np.ones(size, np.float32)}
            plan = probe_plan(Probe(arrays, classify), ROWS, {n: a.shape[1:] for n, a in data.items()})
            tensors = tuple(dataclasses.replace(t, trainable=t.name == "x") for t in plan.tensors)
            use_session(engine, dataclasses.replace(plan, tensors=tensors), data)

        cases.append((f"a class token of {size}", act, ToyexpError))


def add_quantised(cases, folder):
    """Add ops on a frozen matrix w [32, 32] that stays quantised, which few ops support."""
    weights, calls = (
        float32(np.random.default_rng(2).standard_normal((32, 32))),
        {
            "scale": lambda o, x, w: o.matmul(x, o.scale(w, 2.0)),
            "gelu": lambda o, x, w: o.matmul(x, o.gelu(w)),
            "silu": lambda o, x, w: o.matmul(x, o.silu(w)),
            "swiglu": lambda o, x, w: o.matmul(x, o.swiglu(w, w)),
            "split": lambda o, x, w: o.add(x, o.matmul(o.split(x, 2)[0], o.split(w, 2)[0])),
            "add": lambda o, x, w: o.matmul(x, o.add(w, w)),
            "mul": lambda o, x, w: o.matmul(x, o.mul(w, w)),
            "the left of matmul": lambda o, x, w: o.matmul(w, w),
            "too many first_rows": lambda o, x, w: o.matmul(x, o.first_rows(w, 33)),
            "no first_rows": lambda o, x, w: o.matmul(x, o.first_rows(w, 0)),
        },
    )
    for kind in ("F16", "Q8_0"):
        path, writer = Path(folder, f"{kind}.gguf"), Writer()
        writer.add("general.architecture", "probe")
        writer.add_numbers("w", weights.shape, kind, iter_pieces(weights))
        writer.save(path)
        for name, call in calls.items():

            def plan(call=call, path=path):
                forward = lambda o, p, b: call(o, o.embed(p["x"], b["tokens"]), p["w"])  # noqa: E731
                plan_of_shape = good_plan(forward, x=(VOCAB, 32), w=weights.shape)
                frozen = PlanTensor("w", weights.shape, FromGGUF(str(path), "w"), trainable=False)
                return dataclasses.replace(
                    plan_of_shape, tensors=(*(t for t in plan_of_shape.tensors if t.name != "w"), frozen)
                )

            cases.plan(f"{name} of {kind}", plan)


def add_plans(cases):
    """Add plans that no session can hold."""
    good = good_plan()
    change = lambda **changes: lambda: dataclasses.replace(good, **changes)  # noqa: E731
    shapes = [
        (2**31, 4), (4, 2**31), (2**40,), (2**20, 2**21), (2**16, 2**16, 2**8), (2**31 - 1, 2**31 - 1), (2**62, 4),
        (1, 1, 1, 2, 2), (2, 2, 2, 2, 2, 2), (0,), (0, 4), (4, 0), (-1,), (-4, -4), (2, -1, 2), (),
    ]  # fmt: skip
    for shape in shapes:
        for trainable in (True, False):
            extra = PlanTensor("w", shape, Constant(0.0), trainable)
            cases.plan(f"a tensor {shape}, {trainable=}", change(tensors=(*good.tensors, extra)))
    for shape in [(2.5, 2), ("a",), (None,)]:
        cases.plan(
            f"a tensor {shape}", change(tensors=(*good.tensors, PlanTensor("w", shape, Constant(0.0)))), Exception
        )
    for shape in [(0,), (-1,), (2**31,), (2**20, 2**20), (2**62,), (2, 2, 2, 2)]:
        inputs = {n: InputSpec(shape, s.dtype) for n, s in good.inputs.items()}
        cases.plan(f"inputs {shape}", change(inputs=inputs))
    for name in good.inputs:
        for dtype in ("float64", "int64", "int8", "bool", "uint32"):
            cases.plan(f"{dtype} {name}", change(inputs={**good.inputs, name: InputSpec((LENGTH,), dtype)}))
        cases.plan(
            f"{name} of no type", change(inputs={**good.inputs, name: InputSpec((LENGTH,), "numbers")}), Exception
        )
    for name in ("targets", "weights"):
        cases.plan(f"no {name}", change(inputs={n: s for n, s in good.inputs.items() if n != name}))
        swapped = {"targets": "float32", "weights": "int32"}[name]
        cases.plan(f"{swapped} {name}", change(inputs={**good.inputs, name: InputSpec((LENGTH,), swapped)}))
    cases.plan("no tokens", change(inputs={n: s for n, s in good.inputs.items() if n != "tokens"}))
    cases.plan("float tokens", change(inputs={**good.inputs, "tokens": InputSpec((LENGTH,), "float32")}))
    cases.plan("fewer targets", change(inputs={**good.inputs, "targets": InputSpec((LENGTH - 1,), "int32")}))
    cases.plan("fewer weights", change(inputs={**good.inputs, "weights": InputSpec((1,), "float32")}))
    for rows in (0, -1, 2**31, 2**40):
        cases.plan(f"{rows} rows", change(rows=rows))
    for accumulate in (0, -1):
        cases.plan(f"accumulate {accumulate}", change(accumulate=accumulate))
    for clip in (-1.0, math.nan, math.inf):
        cases.plan(f"grad_clip {clip}", change(grad_clip=clip))
    for count, trainable in ((1000, True), (10_000, False)):
        more = tuple(PlanTensor(f"blk.{i}.w", (2, 2), Constant(0.0), trainable) for i in range(count))
        cases.plan(f"{count} tensors, {trainable=}", change(tensors=(*good.tensors, *more)))
    cases.plan("nothing to train", change(tensors=(PlanTensor("x", (VOCAB, WIDTH), Constant(1.0), trainable=False),)))
    cases.plan("no tensors", change(tensors=()), Exception)
    cases.plan("a tensor twice", change(tensors=good.tensors * 2))
    a, b = (PlanTensor(f"x.lora_{n}", s, Constant(1.0)) for n, s in (("a", (2, WIDTH + 1)), ("b", (WIDTH, 2))))
    linear = lambda o, p, b: o.linear(o.embed(p["e"], b["tokens"]), p["x"])  # noqa: E731
    cases.plan(
        "an adapter that does not fit",
        lambda: dataclasses.replace(
            good_plan(linear, e=(VOCAB, WIDTH)), tensors=(*good_plan(linear, e=(VOCAB, WIDTH)).tensors, a, b),
            adapters=(LoraAdapter("x", 1.0),),
        ),
    )  # fmt: skip


def add_batches(cases):
    """Add a good plan with invalid batches."""
    calls = {
        "step": lambda session, data: session.step(data, HP),
        "evaluate": lambda session, data: session.evaluate([data]),
        "gradients": lambda session, data: session.gradients(data),
    }
    all_calls = {**calls, "logits": lambda session, data: session.logits({"tokens": data["tokens"]})}
    for bad in (-1, VOCAB, 2**31 - 1, -(2**31), -100):
        tokens, targets = batch()["tokens"], batch()["targets"]
        tokens[1, 2], targets[0, 1] = bad, bad if bad != VOCAB else WIDTH
        for name, call in all_calls.items():
            cases.batch(f"{name}: token {bad}", call, tokens=tokens)
        for name, call in calls.items():
            cases.batch(f"{name}: target {bad}", call, targets=targets)
    good = batch()
    for name, call in all_calls.items():
        cases.batch(f"{name}: long tokens", call, tokens=batch(length=LENGTH + 1)["tokens"])
        cases.batch(f"{name}: flat tokens", call, tokens=good["tokens"].reshape(-1))
        cases.batch(f"{name}: deep tokens", call, tokens=good["tokens"][..., None])
        cases.batch(f"{name}: int64 tokens", call, tokens=good["tokens"].astype(np.int64) + 2**32)
        cases.batch(f"{name}: float tokens", call, tokens=good["tokens"] + 0.5)
        cases.batch(f"{name}: tokens in words", call, Exception, tokens=np.array([["a", "b", "c"]] * ROWS))
    for name, call in calls.items():
        for array in good:
            cases.batch(f"{name}: no {array}", call, **{array: None})
            cases.batch(f"{name}: more rows of {array}", call, **{array: np.concatenate([good[array]] * 2)})
            cases.batch(f"{name}: no rows of {array}", call, **{array: good[array][:0]})
            cases.batch(f"{name}: lists", call, Exception, **{array: good[array].tolist()})
        for value in (0.0, math.nan, math.inf, -math.inf, -1.0):
            cases.batch(f"{name}: weights {value}", call, weights=np.full_like(good["weights"], value))
        cases.batch(f"{name}: float64 weights", call, weights=good["weights"].astype(np.float64))
        cases.batch(f"{name}: short weights", call, weights=good["weights"][:, :2])
    twice = {n: np.concatenate([a] * 2) for n, a in good.items()}
    cases.batch("step: two micro-batches for one", calls["step"], **twice)
    for slot in range(7):
        for value in (math.nan, math.inf):
            hp = HP.copy()
            hp[slot] = value
            cases.batch(f"hp[{slot}] {value}", lambda session, data, hp=hp: session.step(data, hp))
    for hp in (HP[:6], np.ones(8), HP[None], np.zeros(0)):
        cases.batch(f"hp {hp.shape}", lambda session, data, hp=hp: session.step(data, hp))


def all_cases(folder):
    cases = Cases()
    add_models(cases, np.random.default_rng(0))
    add_class_tokens(cases)
    add_quantised(cases, folder)
    add_plans(cases)
    add_batches(cases)
    return cases


def main(engine):
    """Try every case."""
    with tempfile.TemporaryDirectory() as folder:
        try_cases(all_cases(folder), ENGINES[engine])
    print("all tried", flush=True)


def try_cases(cases, engine):
    """Try all cases; print a line before and after each."""
    for number, (name, act, allowed) in enumerate(cases):
        print(number, name, flush=True)
        try:
            act(engine)
        except allowed as error:
            readable = isinstance(error, ToyexpError)
            lines = str(error).count("\n")
            verdict = "ok" if not readable or (str(error) and lines < 2 and len(str(error)) < 300) else "UNREADABLE"
            print("   ", verdict, type(error).__name__, error, flush=True)
        except Exception as error:
            print("    NOT READABLE", type(error).__name__, error, flush=True)
        else:
            print("    SLIPPED THROUGH", flush=True)


@pytest.mark.parametrize("engine", ENGINES)
def test_every_bad_plan_raises_and_none_ends_the_process(engine):
    child = subprocess.run(
        [sys.executable, __file__, engine],
        capture_output=True, text=True, env={**os.environ, "GGML_NO_BACKTRACE": "1"}, timeout=120,
    )  # fmt: skip
    lines = child.stdout.splitlines()
    assert child.returncode == 0, f"ended in case {lines[-1]}\n{child.stderr[-2000:]}"
    assert lines[-1] == "all tried"
    wrong = [f"{case}: {verdict.strip()}" for case, verdict in zip(lines[:-1:2], lines[1::2], strict=True)
             if not verdict.startswith("    ok")]  # fmt: skip
    assert wrong == []
    assert len(lines) > 2 * 200


if __name__ == "__main__":
    main(sys.argv[1])
