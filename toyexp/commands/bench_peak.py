"""What an engine reaches in large matrix products: the peak that `toyexp bench` holds a step against."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from toyexp.contract.batch import InputSpec
from toyexp.contract.engine import Engine
from toyexp.contract.kind import TOKENS, Kind
from toyexp.contract.model import Model, TensorSpec
from toyexp.contract.ops import Ops, Params, Tensor
from toyexp.contract.plan import Plan, PlanTensor
from toyexp.contract.values import Normal, Values

SIZES = ((256, 4), (1024, 8), (4096, 16), (8192, 16))  # of the matrices, and how many products follow one another
LONG = 0.02  # seconds of them beside which a call's own time is nothing: no larger ones are tried
TIMES = 5


@dataclass(frozen=True)
class Peak:
    """The speed of the fastest products, and how large they were."""

    flops_per_second: float
    size: int


def peak_of(engine: Engine) -> Peak:
    """The most floating-point operations a second in products of n x n matrices by this engine, here and now.

    They are computed as in a held-out loss, in the type that the engine's products have, through its own op; a product
    counts 2 n^3. It is a figure that was reached, and no data sheet's: what a device can do at its present clock and
    with the libraries that are there. Raises what the engine raises where it cannot hold them.
    """
    best = Peak(0.0, 0)
    for size, products in SIZES:
        seconds = _seconds(engine, size, products)
        best = max(best, Peak(2 * products * size**3 / seconds, size), key=lambda peak: peak.flops_per_second)
        if seconds > LONG:
            break
    return best


def _seconds(engine: Engine, size: int, products: int) -> float:
    """The median of some calls, after those that warm up."""
    model = Products(size=size, products=products)
    inputs = {
        "tokens": InputSpec((size,), "int32"),
        "targets": InputSpec((size,), "int32", below=CLASSES),
        "weights": InputSpec((size,), "float32"),
    }
    tensors = tuple(PlanTensor(t.name, t.shape, t.init, trainable=False) for t in model.tensors())
    ids = np.arange(size, dtype=np.int32)[None] % CLASSES
    batch = {"tokens": ids, "targets": ids, "weights": np.ones((1, size), np.float32)}
    times = []
    with engine.realize(Plan(model, tensors, inputs, rows=1)) as session:
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
