"""What an engine reaches in large matrix products: the peak that `toyexp bench` holds a step against."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from toyexp.base.errors import UserError
from toyexp.interfaces.dataset import InputSpec
from toyexp.interfaces.engine import Engine
from toyexp.interfaces.kind import TOKENS, Kind
from toyexp.interfaces.model import Model, TensorSpec
from toyexp.interfaces.ops import Ops, Params, Tensor
from toyexp.interfaces.plan import Plan, PlanTensor
from toyexp.interfaces.values import Normal, Values

SIZES = ((256, 4), (1024, 8), (4096, 16), (8192, 16))  # of the matrices, and how many products follow one another
LONG = 0.02  # seconds of them beside which a call's own time is nothing: no larger ones are tried
TIMES = 5


@dataclass(frozen=True)
class Peak:
    """The speed of the fastest products, and how large they were."""

    flops_per_second: float
    size: int


def peak_of(engine: Engine, most_rows: int) -> Peak:
    """The most floating-point operations a second in products of n x n matrices by this engine, here and now.

    They are computed as in a held-out loss, in the type that the engine's products have, through its own op; a product
    counts 2 n^3. It is a figure that was reached, and no data sheet's: what a device can do at its present clock and
    with the libraries that are there. An engine of several devices computes one such product on each: a batch has as
    few rows as it takes, up to `most_rows`. Raises what the engine raises where it cannot hold them.
    """
    best = Peak(0.0, 0)
    for size, products in SIZES:
        plan = _plan(engine, size, products, most_rows)
        seconds = _seconds(engine, plan)
        reached = Peak(2 * plan.rows * products * size**3 / seconds, size)
        best = max(best, reached, key=lambda peak: peak.flops_per_second)
        if seconds > LONG:
            break
    return best


def _plan(engine: Engine, size: int, products: int, most_rows: int) -> Plan:
    """The products as a plan that trains nothing."""
    model = Products(size=size, products=products)
    inputs = {
        "tokens": InputSpec((size,), "int32"),
        "targets": InputSpec((size,), "int32", below=CLASSES),
        "weights": InputSpec((size,), "float32"),
    }
    tensors = tuple(PlanTensor(t.name, t.shape, t.init, trainable=False) for t in model.tensors())
    plan = Plan(model, tensors, inputs, rows=1)
    for rows in range(1, most_rows):
        try:
            engine.check_plan(replace(plan, rows=rows))
        except UserError:  # its devices would have no equal shares
            continue
        return replace(plan, rows=rows)
    return replace(plan, rows=most_rows)


def _seconds(engine: Engine, plan: Plan) -> float:
    """The median of some held-out losses, after those that warm up."""
    length = plan.inputs["tokens"].shape[0]
    ids = np.tile(np.arange(length, dtype=np.int32) % CLASSES, (plan.rows, 1))
    batch = {"tokens": ids, "targets": ids, "weights": np.ones(ids.shape, np.float32)}
    times = []
    with engine.realize(plan) as session:
        session.build()
        for _ in range(2 + TIMES):
            began = time.perf_counter()
            session.evaluate([batch])
            times.append(time.perf_counter() - began)
    return statistics.median(times[2:])


CLASSES = 8


@dataclass(frozen=True)
class Repeated(Values):
    """Normal values that come again and again: to draw 8192 x 8192 of them would take longer than to use them."""

    std: float

    def draw(self, shape: tuple[int, ...], seed: int, name: str) -> np.ndarray:
        """A million, as often as they are needed."""
        return np.resize(Normal(self.std).draw((1 << 20,), seed, name), shape)


@dataclass
class Products(Model):
    """A matrix [size, size] by another one, over and over."""

    name: ClassVar[str] = "products"
    reads: ClassVar[Kind] = TOKENS

    size: int = 1024
    products: int = 4

    def check(self) -> None:
        """Nothing to check."""

    def tensors(self) -> list[TensorSpec]:
        """Values that keep the size of what they multiply."""
        table, out = (CLASSES, self.size), (CLASSES, self.size)
        std = self.size**-0.5
        return [
            TensorSpec("table", table, Repeated(1.0)),
            TensorSpec("w", (self.size, self.size), Repeated(std)),
            TensorSpec("out", out, Repeated(std)),
        ]

    def forward(self, ops: Ops, p: Params, batch: Mapping[str, Tensor]) -> Tensor:
        """Rows [1, size, size], multiplied; as logits a few of the last."""
        x = ops.embed(p["table"], batch["tokens"])
        for _ in range(self.products):
            x = ops.linear(x, p["w"])
        return ops.linear(x, p["out"])
