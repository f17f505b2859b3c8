"""Initial values of `recipe.init=toy`: those of toyexp's predecessor, a Ruby program.

Both programs draw the tensors in the same order, from the same linear congruential generator of 31 bits. For
GPT-2 a value is (upper 23 bits) / 2^23 - 1, so every weight lies between -0.02 and 0. For llama each pair of uniform
values becomes a pair of normal values (Box and Muller 1958).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

import toyexp
from toyexp import Model, UserError
from toyexp.base import numpy as np

MULTIPLIER, INCREMENT, MASK = 1103515245, 12345, 0x7FFFFFFF

Shapes = Mapping[str, tuple[int, ...]]
Draws = Iterator[tuple[str, "np.ndarray"]]


class LCG:
    """Random generator. Its state s starts at `seed`; the next state is (1103515245 s + 12345) mod 2^31."""

    def __init__(self, seed: int):
        self.state = seed & MASK

    @classmethod
    def for_llama(cls, seed: int) -> LCG:
        """Return the generator of toyexp's predecessor in Ruby for llama.

        It scrambles `seed` and skips the first eight states.
        """
        generator = cls((seed + 104729) * 2654435761 % 2147483647)
        generator.states(8)
        return generator

    def states(self, n: int) -> np.ndarray:
        """Return the next `n` states of the generator as a uint64 array [n]."""
        out = np.empty(n, np.uint64)
        out[:1] = (MULTIPLIER * self.state + INCREMENT) & MASK
        a, c, count = MULTIPLIER, INCREMENT, 1
        while count < n:  # `count` steps are one step with constants a and c, so each pass doubles the computed part
            added = min(count, n - count)
            out[count : count + added] = (out[:added] * np.uint64(a) + np.uint64(c)) & np.uint64(MASK)
            a, c, count = a * a & MASK, (a * c + c) & MASK, count + added
        if n:
            self.state = int(out[-1])
        return out

    def uniform(self, *shape: int) -> np.ndarray:
        """Return a float64 array of this shape with values in [-1, 0)."""
        return ((self.states(math.prod(shape)) >> np.uint64(8)) / 2.0**23 - 1.0).reshape(shape)

    def normal(self, *shape: int) -> np.ndarray:
        """Return a float64 array of this shape with standard normal values. Its number of elements must be even."""
        u = (self.states(math.prod(shape)).astype(np.float64) + 1) / 2.0**31
        radius, angle = np.sqrt(-2 * np.log(u[0::2])), 2 * math.pi * u[1::2]
        return np.stack((radius * np.cos(angle), radius * np.sin(angle)), axis=-1).reshape(shape)


def gpt2(seed: int, sizes: Mapping[str, int], shapes: Shapes) -> Draws:
    """Yield the name and the values of each random tensor of GPT-2, in the order of toyexp's predecessor in Ruby.

    The two embeddings come first. Each block follows with q, k and v of each head, attn_output, ffn_up and ffn_down.
    """
    draw = LCG(seed).uniform
    d, heads = sizes["d_model"], sizes["n_heads"]
    for name in ("token_embd.weight", "position_embd.weight"):
        yield name, 0.02 * draw(*shapes[name])
    for i in range(sizes["n_layers"]):
        qkv = draw(heads, 3, d // heads, d).transpose(1, 0, 2, 3)  # [3, H, D, d]
        yield f"blk.{i}.attn_qkv.weight", 0.02 * qkv.reshape(3 * d, d)
        for part in ("attn_output", "ffn_up", "ffn_down"):
            yield f"blk.{i}.{part}.weight", 0.02 * draw(*shapes[f"blk.{i}.{part}.weight"])


def llama(seed: int, sizes: Mapping[str, int], shapes: Shapes) -> Draws:
    """Yield the name and the values of each random tensor of llama, in the order of toyexp's predecessor in Ruby.

    The token embedding, the lens (projection) of recipe=warm and the output layer come first. Each block follows with
    q, k and v, attn_output, ffn_gate, ffn_up and ffn_down. A lens or output layer that is not in `shapes` is omitted.
    """
    draw = LCG.for_llama(seed).normal  # draws values in pairs; all tensors have an even number of elements
    d, heads, kv = sizes["d_model"], sizes["n_heads"], sizes["n_kv_heads"]
    inner, outer = 1 / math.sqrt(d), 1 / math.sqrt(sizes["d_ff"])
    yield "token_embd.weight", 0.02 * draw(*shapes["token_embd.weight"])
    if "lens.proj.weight" in shapes:
        lens = shapes["lens.proj.weight"]
        yield "lens.proj.weight", draw(*lens) / math.sqrt(lens[1])
    if "output.weight" in shapes:
        yield "output.weight", 0.02 * draw(*shapes["output.weight"])
    for i in range(sizes["n_layers"]):
        yield f"blk.{i}.attn_q.weight", inner * pairs(draw(heads, d // heads, d))
        keys_values = draw(kv, 2, d // heads, d)  # per head: k, then v
        yield f"blk.{i}.attn_k.weight", inner * pairs(keys_values[:, 0])
        yield f"blk.{i}.attn_v.weight", inner * keys_values[:, 1].reshape(-1, d)
        for part, std in (("attn_output", inner), ("ffn_gate", inner), ("ffn_up", inner), ("ffn_down", outer)):
            yield f"blk.{i}.{part}.weight", std * draw(*shapes[f"blk.{i}.{part}.weight"])


def pairs(heads: np.ndarray) -> np.ndarray:
    """Return the rows of H heads [H, D, d] as one matrix [H*D, d], reordered for toyexp's layout of rope.

    toyexp's predecessor in Ruby rotates rows j and j + D/2 of a head as a pair. In the result the two rows of each pair
    are adjacent.
    """
    count, size, d = heads.shape
    return heads.reshape(count, 2, size // 2, d).transpose(0, 2, 1, 3).reshape(-1, d)


ORIGINALS: dict[str, Callable[[int, Mapping[str, int], Shapes], Draws]] = {"gpt2": gpt2, "llama": llama}


def check_model(model: Model) -> None:
    """Raise UserError unless toyexp's predecessor in Ruby supports this model with its settings."""
    if model.name not in ORIGINALS:
        models = " and ".join(ORIGINALS)
        raise UserError(f"recipe.init=toy: supports {models} only; remove it to train model={model.name}")
    if model.name == "gpt2" and not model.settings()["tied"]:
        raise UserError("recipe.init=toy: gpt2 must share its output layer with the embedding; use model.tied=true")
    if model.settings().get("head_dim"):
        raise UserError("recipe.init=toy: does not support model.head_dim; remove that setting")


def upload(session: toyexp.Session) -> None:
    """Upload the initial values of toyexp's predecessor in Ruby to the session, for all tensors with random values.

    Tensors that start with constants, such as norms and biases, keep the plan's values.
    """
    plan = session.plan
    shapes = {t.name: t.shape for t in plan.tensors}
    for name, values in ORIGINALS[plan.model.name](plan.seed, plan.model.settings(), shapes):
        session.upload(name, values.astype(np.float32), source="recipe.init=toy")
