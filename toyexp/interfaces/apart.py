"""Rows of several examples that do not see each other: attention and positions begin again with each example."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NoReturn, cast

from toyexp.base.errors import UserError
from toyexp.interfaces.dataset import InputSpec
from toyexp.interfaces.ops import Ops, Params, Tensor

REJECTED = ("causal", "cumsum", "linear_attention", "prepend")  # ops that `keep_apart` cannot limit to an example


def apart_inputs(context: int) -> dict[str, InputSpec]:
    """Return the specs of the arrays from which `keep_apart` knows the examples of each row, [rows, context].

    For each position, `starts` has the index in the row at which its example begins, and `positions` its index in the
    example.
    """
    ids = InputSpec((context,), "int32", below=context)
    return {"starts": ids, "positions": replace(ids, counts=True)}


def keep_apart(ops: Ops, batch: Mapping[str, Tensor]) -> Ops:
    """Return ops with which a model's forward pass keeps the examples of a row apart, as in rows of their own.

    Attention, `shift` and `first_rows` then begin again with each example. The op `rope` stays the same, because scores
    depend only on distances. If the batch has no array `starts`, return `ops` itself. See `apart_inputs`.
    """
    return cast("Ops", _ApartOps(ops, batch)) if "starts" in batch else ops


class _ApartOps:
    """Ops of an engine, limited to the examples of each row."""

    def __init__(self, ops: Ops, batch: Mapping[str, Tensor]):
        rows, length = batch["starts"].shape
        self._ops, self._positions = ops, batch["positions"]
        self._zeros = ops.scale(ops.part(batch["weights"], 0, 0, 1), 0.0)  # [1, T], without a gradient
        square = ops.product(ops.reshape(self._zeros, (length, 1)), self._zeros)
        by_start = ops.permute(ops.causal(square), (1, 0))  # row s hides the positions before s
        hidden = ops.reshape(ops.rows(by_start, batch["starts"]), (rows, 1, length, length))
        self._bias = ops.causal(hidden)  # 0 where a position sees another one, -inf elsewhere

    def __getattr__(self, name: str) -> Any:
        return self._reject(name) if name in REJECTED else getattr(self._ops, name)

    def _reject(self, op: str) -> NoReturn:
        raise UserError(f"data.pack=apart: ops.{op} cannot keep the examples of a row apart; type data.pack=none")

    def block(self, function: Callable[..., Any], x: Tensor, p: Params, *rest: Any) -> Any:
        return self._ops.block(lambda _, *arguments: function(self, *arguments), x, p, *rest)

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool = True, *, window: int = 0, bias: Tensor | None = None,
        **settings: Any,
    ) -> Tensor:  # fmt: skip
        if not causal:
            self._reject("attention(causal=False)")
        if bias is not None:
            bias = self._ops.add(self._ops.concat([self._bias] * q.shape[2], 1), bias)
        bias = self._bias if bias is None else bias
        return self._ops.attention(q, k, v, window > 0, window=window, bias=bias, **settings)

    def first_rows(self, table: Tensor, n: int) -> Tensor:
        return self._ops.rows(table, self._positions)

    def shift(self, x: Tensor, n: int = 1) -> Tensor:
        ops, length = self._ops, x.shape[1]
        count = ops.cumsum(ops.scale(self._zeros, 1.0, 1.0))  # 1, 2, ..
        is_later = ops.reshape(ops.step(ops.scale(count, 1.0, -0.5 - n)), (length, 1))  # 1 from position n on
        seen = ops.rows(is_later, self._positions)  # [B, T, 1]
        return ops.mul(ops.shift(x, n), ops.reshape(seen, (*x.shape[:2], *(1 for _ in x.shape[2:]))))
