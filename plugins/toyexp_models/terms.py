"""Compare what two models compute, by the ops that they call."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, cast

from toyexp import Params, Rotary
from toyexp_models.language import LanguageModel


class Term(int):
    """Number of a term. As a shape it stands for unknown sizes."""

    shape = property(lambda self: (self,))


class Terms:
    """Ops whose results are terms: calls of the same op with the same arguments have the same number.

    Some differences are left out, because other weights make up for them: which features RoPE rotates as a pair, one
    weight for q, k and v in place of three, and a factor of the embeddings.
    """

    split = dropout = staticmethod(lambda x, *_: x)

    def __init__(self, head_size: int):
        self._head_size, self._numbers = head_size, dict[Any, Term]()
        self._embedding, self.embedding_scale = Term(-1), 1.0  # factor of the embeddings in the last forward pass

    def __getattr__(self, op: str) -> Any:
        return partial(self._number, op)

    def _number(self, *call: Any, **named: Any) -> Term:
        return self._numbers.setdefault((call, *sorted(named.items())), Term(len(self._numbers)))

    def run(self, model: LanguageModel, unused: tuple[str, ...] = ()) -> Term:
        """Return the term of the model's logits. `unused` are the ends of names of tensors to leave out."""
        params, self.embedding_scale = dict[str, Any](), 1.0
        for name, shape in ((t.name, t.shape) for t in model.tensors() if not t.name.endswith(unused)):
            third = shape[0] // 3, *shape[1:]
            thirds = [self._number(name.replace("qkv", part), third) for part in "qkv"]
            params[name] = thirds if "attn_qkv" in name else self._number(name, shape)
        logits: Term = model.forward(cast("Any", self), Params(params), {"tokens": self._number("tokens")})
        return logits

    def embed(self, table: Term, ids: Term) -> Term:
        self._embedding = self._number("embed", table, ids)
        return self._embedding

    def scale(self, x: Term, factor: float) -> Term:
        if x == self._embedding:
            self.embedding_scale = factor
            return x
        return x if factor == 1 else self._number("scale", x, factor)

    def linear(self, x: Term, w: Any, bias: Any = None) -> Any:
        if isinstance(w, list):
            return [self.linear(x, *pair) for pair in zip(w, bias, strict=True)]
        return self._number("linear", x, w, bias)

    def block(self, function: Any, x: Term, *rest: Any) -> Any:
        return function(self, x, *rest)

    def rope(self, x: Term, rotary: Rotary) -> Term:
        return self._number("rope", x, replace(rotary, halves=False))

    def attention(
        self, q: Term, k: Term, v: Term, *, scale: float | None = None, window: int = 0, softcap: float = 0.0
    ) -> Term:
        factor = self._head_size**-0.5 if scale is None else scale
        return self._number("attention", q, k, v, factor, window, softcap)
