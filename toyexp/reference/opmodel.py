"""Small models that consist of a single op, to check each op and its gradient through an engine's sessions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np

from toyexp.base.errors import UserError
from toyexp.interfaces.dataset import Batch, InputSpec
from toyexp.interfaces.engine import Engine
from toyexp.interfaces.kind import TOKENS, Kind
from toyexp.interfaces.model import Model, TensorSpec
from toyexp.interfaces.ops import Ops, Params, Rotary, Tensor
from toyexp.interfaces.plan import Lens, LoraAdapter, Plan, PlanTensor, lora_names
from toyexp.interfaces.values import Constant, Normal

ROWS, LENGTH, WIDTH, CLASSES = 3, 5, 8, 8
MOST_ROWS = 512  # largest number of rows that `case_rows` tries

Forward = Callable[..., Tensor]  # takes ops, params and x; _take_case also the ids


def _heads_case(
    ops: Ops, p: Params, x: Tensor, causal: bool = True, kv: int = 2, rotary: Rotary | None = None, **settings: Any
) -> Tensor:
    q, k, v = (ops.linear(x, p[name]) for name in ("q", "k", "v"))
    q, k, v = ops.heads(q, 4), ops.heads(k, kv), ops.heads(v, kv)
    if rotary is not None:
        q, k = ops.rope(q, rotary), ops.rope(k, rotary)
    own = {name: p[name] for name in ("sinks", "bias") if name in p}
    if "distances" in p:
        own["bias"] = ops.distance_bias(p["distances"], x.shape[1])
    return ops.attention(q, k, v, causal, **settings, **own)


def _row_bias_case(ops: Ops, p: Params, x: Tensor) -> Tensor:
    scores = ops.product(x, x, transposed=True)  # [B, T, T]
    return _heads_case(ops, p, x, bias=ops.reshape(scores, (x.shape[0], 1, *scores.shape[1:])))


def _wide_values_case(ops: Ops, p: Params, x: Tensor) -> Tensor:
    q, k, v = ops.linear(ops.part(x, 2, 0, 4), p["q"]), ops.linear(x, p["k"]), ops.linear(x, p["v"])
    return ops.attention(ops.heads(q, 4), ops.heads(k, 2), ops.heads(v, 2))


def _means_case(ops: Ops, p: Params, x: Tensor) -> Tensor:
    centred = ops.add(x, ops.scale(ops.mean(x, 2, keep=True), -1.0))
    return ops.mul(ops.mul(centred, ops.reshape(ops.mean(ops.mul(x, x)), (1,))), ops.mean(x, 0))


def _permute_case(ops: Ops, p: Params, x: Tensor) -> Tensor:
    by_position = ops.linear(ops.permute(x, (2, 0, 1)), p["w"])  # [d, B, d]
    return ops.mul(x, ops.sum(ops.permute(by_position, (1, 2, 0)), 1, keep=True))


def _product_case(ops: Ops, p: Params, x: Tensor) -> Tensor:
    scores = ops.product(ops.linear(x, p["q"]), x, transposed=True)  # [B, T, T]
    return ops.product(ops.scale(scores, 0.2), x)


def _causal_case(ops: Ops, p: Params, x: Tensor) -> Tensor:
    scores = ops.product(x, x, transposed=True)
    weights = ops.softmax(ops.causal(scores, window=3))
    return ops.product(ops.add(ops.causal(scores, fill=0.0), weights), x)


def _take_case(ops: Ops, p: Params, x: Tensor, ids: Tensor) -> Tensor:
    """Multiply x at each position by log softmax(x w^T)[id], where `ids` has an id for each position."""
    log_probs = ops.token_log_probs(ops.linear(x, p["w"]), ids)
    return ops.mul(x, ops.reshape(log_probs, (*x.shape[:2], 1)))


def _experts_case(ops: Ops, p: Params, x: Tensor) -> Tensor:
    """Multiply x by the sum of its four projections x w^T, weighted by a router that chooses two of them."""
    weights = ops.route(ops.linear(x, p["w"]), 2)  # [B, T, 4]
    return ops.mul(x, ops.sum(ops.mul(weights, ops.linear(x, p["w"])), 2, keep=True))


def _mixture_case(ops: Ops, p: Params, x: Tensor) -> Tensor:
    """Apply three experts (each has two linear layers with a ReLU) to x, and return the sum of their results."""
    return ops.sum(ops.experts(ops.relu(ops.experts(x, p["up"])), p["down"]), 2)


def _decay_case(ops: Ops, p: Params, x: Tensor) -> Tensor:
    q, k, v = (ops.heads(ops.linear(x, p[name]), 2) for name in ("q", "k", "v"))
    return ops.linear_attention(ops.scale(q, 0.2), k, v, ops.scale(ops.softplus(ops.linear(x, p["a"])), -1.0))


def _grouped_decay_case(ops: Ops, p: Params, x: Tensor) -> Tensor:
    q, k, v = (ops.heads(ops.linear(x, p[name]), n) for name, n in (("q", 2), ("k", 2), ("v", 4)))
    return ops.linear_attention(q, k, v, ops.scale(ops.softplus(ops.linear(x, p["a"])), -1.0))


def _rope_case(**settings: Any) -> tuple[dict[str, tuple[int, ...]], Forward]:
    """Return a test case for the op rope with these Rotary settings: tensor shapes by name, and a forward function.

    The op is applied to heads of 4 features.
    """
    rotary = Rotary(100.0, **settings)
    return {"q": (16, 8), "k": (8, 8), "v": (8, 8)}, lambda ops, p, x: _heads_case(ops, p, x, rotary=rotary)


def _blocks_case(ops: Ops, p: Params, x: Tensor) -> Tensor:
    """Apply three blocks to x and return the result. Each block multiplies the input x by a gate, silu(y w).

    The first block's y is x, and the y of each other block is the result of the block before.
    """

    def gated(ops: Ops, x: Tensor, p: Params, first: Tensor) -> Tensor:
        return ops.mul(first, ops.silu(ops.linear(x, p["w"])))

    y = x
    for i in range(3):
        y = ops.block(gated, y, p.block(i), x)
    return y


def _by_fours(ops: Ops, x: Tensor, w: Tensor) -> Tensor:
    """Multiply each group of four consecutive features of x by w [4, 4], to test reshape."""
    fours = ops.reshape(x, (x.shape[0], 2 * LENGTH, WIDTH // 2))
    return ops.reshape(ops.linear(fours, w), (x.shape[0], LENGTH, WIDTH))


QKV: dict[str, tuple[int, ...]] = {"q": (8, 8), "k": (4, 8), "v": (4, 8)}
# Cases by name: shapes of the tensors besides the embedding, and a function of embedding rows x [ROWS, LENGTH, WIDTH].
CASES: dict[str, tuple[dict[str, tuple[int, ...]], Forward]] = {
    "rows": ({}, lambda ops, p, x: x),
    "first_rows": ({"table": (LENGTH + 3, WIDTH)}, lambda ops, p, x: ops.add(x, ops.first_rows(p["table"], LENGTH))),
    "matmul": ({"w": (CLASSES, WIDTH)}, lambda ops, p, x: ops.linear(x, p["w"])),
    "bias": ({"w": (CLASSES, WIDTH), "b": (CLASSES,)}, lambda ops, p, x: ops.linear(x, p["w"], p["b"])),
    "add": ({"w": (WIDTH, WIDTH)}, lambda ops, p, x: ops.add(x, ops.linear(x, p["w"]))),
    "mul": ({"w": (WIDTH, WIDTH)}, lambda ops, p, x: ops.mul(x, ops.linear(x, p["w"]))),
    "scale": ({}, lambda ops, p, x: ops.scale(x, -1.7)),
    "rms_norm": ({"w": (WIDTH,)}, lambda ops, p, x: ops.rms_norm(x, p["w"], 1e-5)),
    "layer_norm": ({"w": (WIDTH,), "b": (WIDTH,)}, lambda ops, p, x: ops.layer_norm(x, p["w"], p["b"], 1e-5)),
    "sigmoid": ({}, lambda ops, p, x: ops.sigmoid(x)),
    "centre": ({}, lambda ops, p, x: ops.centre(x)),
    "reshape": ({"w": (4, 4)}, lambda ops, p, x: _by_fours(ops, x, p["w"])),
    "part_of_positions": ({}, lambda ops, p, x: ops.part(x, 1, 1, 4)),
    "part_of_rows": ({"w": (12, WIDTH)}, lambda ops, p, x: ops.linear(x, ops.part(p["w"], 0, 3, 3 + CLASSES))),
    "concat_positions": ({"w": (WIDTH, WIDTH)}, lambda ops, p, x: ops.concat([ops.linear(x, p["w"]), x], 1)),
    "concat_features": ({}, lambda ops, p, x: ops.concat([ops.part(x, 2, 5, WIDTH), ops.part(x, 2, 0, 5)], 2)),
    "dropout": (
        {"w": (WIDTH, WIDTH), "mask": (WIDTH,)},
        lambda ops, p, x: ops.dropout(ops.linear(ops.dropout(x, {}, "mask"), p["w"]), p, "mask"),
    ),
    "split": ({"w": (2 * WIDTH, WIDTH)}, lambda ops, p, x: ops.add(*ops.split(ops.linear(x, p["w"]), 2))),
    "prepend": ({"token": (WIDTH,)}, lambda ops, p, x: ops.prepend(x, p["token"])),
    "select_first": ({}, lambda ops, p, x: ops.select(x, 0)),
    "select": ({}, lambda ops, p, x: ops.select(x, 2)),
    "select_last": ({}, lambda ops, p, x: ops.select(x, LENGTH - 1)),
    "silu": ({}, lambda ops, p, x: ops.silu(x)),
    "gelu": ({}, lambda ops, p, x: ops.gelu(x)),
    "gelu_exact": ({}, lambda ops, p, x: ops.gelu(x, exact=True)),
    "swiglu": ({"w": (WIDTH, WIDTH)}, lambda ops, p, x: ops.swiglu(ops.linear(x, p["w"]), x)),
    "attention": ({"q": (8, 8), "k": (8, 8), "v": (8, 8)}, lambda ops, p, x: _heads_case(ops, p, x, kv=4)),
    "attention_grouped": (QKV, _heads_case),
    "attention_full": (QKV, lambda ops, p, x: _heads_case(ops, p, x, causal=False)),
    "rope": _rope_case(),
    "rope_scaled": _rope_case(scale=2.5),
    "rope_factors": _rope_case(factors=(0.5, 3.0)),
    "rope_halves": _rope_case(halves=True),
    "rope_halves_scaled_factors": _rope_case(halves=True, scale=1.6, factors=(1.5, 0.3)),
    "attention_window": (QKV, partial(_heads_case, window=2, scale=0.3)),
    "attention_softcap": (QKV, partial(_heads_case, softcap=1.5)),
    "attention_sinks": (QKV | {"sinks": (4,)}, partial(_heads_case, window=3)),
    "attention_bias": (QKV | {"bias": (4, LENGTH, LENGTH)}, partial(_heads_case, causal=False, softcap=1.5)),
    "attention_row_bias": (QKV, _row_bias_case),
    "distance_bias": (QKV | {"distances": (4, LENGTH + 2)}, partial(_heads_case, window=3)),
    "attention_wide_values": ({"q": (8, 4), "k": (4, 8), "v": (4, 8)}, _wide_values_case),
    "add_column": ({"w": (1, WIDTH)}, lambda ops, p, x: ops.sigmoid(ops.add(x, ops.linear(x, p["w"])))),
    "mul_vector": ({"w": (WIDTH,)}, lambda ops, p, x: ops.mul(x, p["w"])),
    "mul_position": ({"w": (LENGTH, 1)}, lambda ops, p, x: ops.mul(x, p["w"])),
    "div": ({"w": (WIDTH, WIDTH)}, lambda ops, p, x: ops.div(x, ops.exp(ops.linear(x, p["w"])))),
    "div_column": (
        {"w": (1, WIDTH)},
        lambda ops, p, x: ops.div(x, ops.scale(ops.exp(ops.linear(x, p["w"])), 1.0, 1.0)),
    ),
    "exp": ({}, lambda ops, p, x: ops.exp(x)),
    "log": ({}, lambda ops, p, x: ops.log(ops.scale(ops.mul(x, x), 1.0, 0.5))),
    "step": ({}, lambda ops, p, x: ops.mul(x, ops.step(x))),
    "relu": ({}, lambda ops, p, x: ops.relu(ops.scale(x, 3.0, 0.1))),
    "tanh": ({}, lambda ops, p, x: ops.tanh(x)),
    "softplus": ({}, lambda ops, p, x: ops.softplus(ops.scale(x, 4.0))),
    "softcap": ({}, lambda ops, p, x: ops.softcap(x, 1.5)),
    "softmax": ({}, lambda ops, p, x: ops.softmax(ops.scale(x, 2.0))),
    "log_softmax": ({"w": (WIDTH, WIDTH)}, lambda ops, p, x: ops.linear(ops.log_softmax(x), p["w"])),
    "sum": ({}, lambda ops, p, x: ops.mul(ops.mul(x, ops.sum(x, 1, keep=True)), ops.sum(x, 2, keep=True))),
    "mean": ({}, _means_case),
    "cumsum": ({}, lambda ops, p, x: ops.cumsum(x)),
    "permute": ({"w": (WIDTH, LENGTH)}, _permute_case),
    "product": ({"q": (8, 8)}, _product_case),
    "causal": ({}, _causal_case),
    "shift": ({}, lambda ops, p, x: ops.add(x, ops.shift(x, 2))),
    "take": ({"w": (CLASSES, WIDTH)}, _take_case),
    "top_k": ({"w": (4, WIDTH)}, _experts_case),
    "experts": ({"up": (3, 6, WIDTH), "down": (3, WIDTH, 6)}, _mixture_case),
    "linear_attention": ({"q": (8, 8), "k": (8, 8), "v": (8, 8), "a": (2, 8)}, _decay_case),
    "linear_attention_grouped": ({"q": (4, 8), "k": (4, 8), "v": (8, 8), "a": (4, 8)}, _grouped_decay_case),
    "block": ({f"blk.{i}.w": (WIDTH, WIDTH) for i in range(3)}, _blocks_case),
}
# Shape of the targets, for cases without one target per input position.
TARGETS: dict[str, tuple[int, ...]] = {
    "part_of_positions": (3,),
    "concat_positions": (2 * LENGTH,),
    "prepend": (LENGTH + 1,),
    "select_first": (),
    "select": (),
    "select_last": (),
}


@dataclass
class OpModel(Model):
    """Model that looks up rows of an embedding table and applies one op to them. The result is the model's logits.

    The setting `case`, a key of `CASES`, selects the op and its arguments.
    """

    name: ClassVar[str] = "op"
    reads: ClassVar[Kind] = TOKENS

    case: str = "rows"  # a key of CASES

    def check(self) -> None:
        """Do nothing: there are no settings to check besides `case`, whose value tests choose from `CASES`."""

    def tensors(self) -> list[TensorSpec]:
        """Return the embedding table and the case's tensors.

        Their initial values are large enough that every nonlinear op has a visible effect.
        """
        shapes = CASES[self.case][0]
        specs = [TensorSpec(name, shape, Normal(0.7)) for name, shape in shapes.items()]
        return [TensorSpec("x", (CLASSES, WIDTH), Normal(1.0)), *specs]

    def forward(self, ops: Ops, p: Params, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the op's result as logits."""
        function, x = CASES[self.case][1], ops.embed(p["x"], batch["tokens"])
        return function(ops, p, x, batch["tokens"]) if function is _take_case else function(ops, p, x)


def op_plan(case: str, adapter: str | None = None, **changes: object) -> Plan:
    """Return a plan that trains the OpModel of `case`, a key of `CASES`.

    `adapter` selects an adapter to add: "lora" for a LoRA pair on the matrix w, or "lens" for a matrix that maps the
    rows of a narrower embedding table to the model's width. `changes` are fields of the plan, such as rows=4, or
    frozen=True for an embedding table that does not train.
    """
    model = OpModel(case)
    tensors = {t.name: PlanTensor.from_spec(t) for t in model.tensors()}
    adapters: tuple[LoraAdapter | Lens, ...] = ()
    if adapter == "lens":
        tensors["x"] = PlanTensor("x", (CLASSES, 6), Normal(1.0), trainable=False)
        tensors["lens"] = PlanTensor("lens", (WIDTH, 6), Normal(0.5))
        adapters = (Lens("x", "lens"),)
    if adapter == "lora":
        a, b = lora_names("w")
        tensors["w"] = PlanTensor("w", tensors["w"].shape, Normal(0.7), trainable=False)
        tensors[a] = PlanTensor(a, (2, WIDTH), Normal(0.5))
        tensors[b] = PlanTensor(b, (CLASSES, 2), Normal(0.5))
        adapters = (LoraAdapter("w", 1.5),)
    if changes.pop("frozen", False):
        tensors["x"] = PlanTensor("x", (CLASSES, WIDTH), Constant(0.5), trainable=False)
    settings: dict = {"rows": ROWS, "seed": 3, **changes}
    return Plan(model, tuple(tensors.values()), inputs=_inputs(case), adapters=adapters, **settings)


def case_rows(engine: Engine) -> int:
    """Return ROWS, or the next larger number of rows per batch that the engine accepts.

    An engine with several devices accepts only numbers of rows that it can split equally among them.
    """
    for rows in range(ROWS, MOST_ROWS):
        try:
            engine.check_plan(op_plan("matmul", rows=rows))
        except UserError:
            continue
        return rows
    return ROWS


def _inputs(case: str) -> dict[str, InputSpec]:
    targets = TARGETS.get(case, (LENGTH,))
    return {
        "tokens": InputSpec((LENGTH,), "int32"),
        "targets": InputSpec(targets, "int32", below=CLASSES),
        "weights": InputSpec(targets, "float32"),
    }


def op_batch(rows: int = ROWS, seed: int = 0, case: str = "") -> Batch:
    """Return a batch of random token ids, targets and weights with the shapes that `case` needs.

    About a fifth of the weights are 0. Ids repeat, so that gradients of the same embedding row must be summed.
    """
    draw = np.random.default_rng(seed)
    shape = (rows, *TARGETS.get(case, (LENGTH,)))
    weights = draw.uniform(0.2, 2.0, shape).astype(np.float32)
    weights[draw.random(shape) < 0.2] = 0
    weights.flat[0] = 1
    return {
        "tokens": draw.integers(0, CLASSES, (rows, LENGTH), dtype=np.int32),
        "targets": draw.integers(0, CLASSES, shape, dtype=np.int32),
        "weights": weights,
    }
