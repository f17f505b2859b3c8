"""A transformer for comparisons, in which each part of a block is a setting."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, ClassVar

from toyexp import Constant, LazyTensors, Model, Normal, Ops, Params, Tensor, TensorSpec, UserError, is_changed
from toyexp.base import MAX_INT, require_choice, require_range
from toyexp.base import numpy as np
from toyexp_models.arcee import Arcee
from toyexp_models.gemma3 import Gemma2, Gemma3
from toyexp_models.gpt2 import GPT2
from toyexp_models.granite import Granite
from toyexp_models.language import DROPPED, LanguageModel, linear, norm
from toyexp_models.llama import Gemma, Llama, Qwen2, Qwen3
from toyexp_models.moe import ExpertsModel, Olmoe, Qwen3Moe
from toyexp_models.olmo import Olmo2
from toyexp_models.rotary import RotaryModel
from toyexp_models.smollm3 import SmolLM3
from toyexp_models.terms import Terms

FAMILIES: tuple[type[LanguageModel], ...] = (
    Llama, Qwen2, Qwen3, Gemma, Gemma2, Gemma3, Granite, Olmo2, Arcee, SmolLM3, Qwen3Moe, Olmoe, GPT2,
)  # fmt: skip
CHOICES: Mapping[str, tuple[str, ...]] = {
    "norm_kind": ("rms", "layer", "none"),
    "norm_place": ("before", "after", "both"),
    "qk_norm": ("none", "head", "width"),
    "positions": ("rope", "learned", "none"),
    "activation": ("swiglu", "geglu", "relu2", "gelu"),
    "residual_scalars": ("none", "branch", "block"),
}
SWITCHES = (*CHOICES, "nope_every", "window", "score_softcap", "final_softcap", "experts", "value_residual")
# For each branch of a block: its last linear layer, and the norm after it.
LAST = {"attn": "attn_output", "ffn": "ffn_down"}
POST = {"attn": "post_attention_norm", "ffn": "post_ffw_norm"}


@dataclass
class Lab(ExpertsModel):
    """Transformer for comparisons: each part of a block is a setting. With the defaults it is a llama."""

    name: ClassVar[str] = "lab"
    halves: ClassVar[bool] = False

    d_ff: int = 192  # hidden size of the feed-forward layer, or of each expert
    norm_kind: str = "rms"  # rms (RMSNorm) | layer (LayerNorm) | none
    norm_place: str = "before"  # norms of attention and feed-forward layer: before | after | both
    qk_norm: str = "none"  # RMSNorm on q and k: none | head (on each head) | width (on all heads together)
    positions: str = "rope"  # rope | learned (a table that is added to the embeddings) | none
    nope_every: int = 0  # every so many layers, one has no RoPE; 0: all have it
    activation: str = "swiglu"  # swiglu | geglu | relu2 (squared ReLU, no gate) | gelu (no gate)
    o_bias: bool = False  # bias of the attention's output projection
    ffn_bias: bool = False  # biases of the feed-forward layer
    window: int = 0  # number of positions that layers see; 0: all
    window_period: int = 4  # with a window: every so many layers, one sees all positions
    score_softcap: float = 0.0  # limit of the attention scores: cap * tanh(score / cap); 0: none
    final_softcap: float = 0.0  # limit of the logits: cap * tanh(logit / cap); 0: none
    experts: int = 0  # number of experts per layer; 0: a single feed-forward layer
    experts_normalised: bool = True  # the weights of a position's experts sum to 1
    value_residual: bool = False  # later layers mix the first layer's values into theirs, with learned scalars
    residual_scalars: str = "none"  # learned factors: none | branch (of both layers' outputs) | block (of its input)
    dropout: float = 0.0  # probability of dropping a number after embedding, attention and feed-forward layer

    # The base classes have these as constants.
    rotates = property(lambda self: self.positions == "rope")
    head_norms = property(lambda self: self.qk_norm == "head")
    width_norms = property(lambda self: self.qk_norm == "width")
    has_auxiliary = property(lambda self: self.experts > 0)
    normalised = property(lambda self: self.experts_normalised)
    is_gated = property(lambda self: self.activation in ("swiglu", "geglu"))

    def check(self) -> None:
        """Raise UserError for sizes that cannot work, unknown values, and settings that contradict each other."""
        require_choice("model", self, **CHOICES)
        whole = dict.fromkeys(("nope_every", "window", "experts"), f"[0,{MAX_INT}]")
        softcaps = dict.fromkeys(("score_softcap", "final_softcap"), "[0,inf)")
        require_range("model", self, **whole, **softcaps, window_period=f"[1,{MAX_INT}]", dropout="[0,1)")
        super().check() if self.experts else RotaryModel.check(self)
        if self.nope_every == 1:
            raise UserError("model.nope_every=1: leaves no layer with RoPE; type model.positions=none instead")
        for first, second, conflicts in (
            ("norm_place", "norm_kind", self.norm_kind == "none" and self.norm_place != "before"),
            ("nope_every", "positions", self.nope_every and self.positions != "rope"),
            ("experts", "ffn_bias", self.experts and self.ffn_bias),
            ("experts", "activation", self.experts and not self.is_gated),
            ("value_residual", "n_layers", self.value_residual and self.n_layers == 1),
        ):
            if conflicts:
                settings = [f"model.{name}={str(getattr(self, name)).lower()}" for name in (first, second)]
                raise UserError(f"{settings[0]}: contradicts {settings[1]}; leave one of them out")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each weight of a block, by name. Factors have the shape (1,)."""
        shapes = super().shapes() if self.experts else RotaryModel.shapes(self)
        absent = {"attn_norm", "ffn_norm"} if self.norm_kind == "none" or self.norm_place == "after" else set[str]()
        absent |= set() if self.is_gated else {"ffn_gate"}
        shapes = {name: shape for name, shape in shapes.items() if name not in absent}
        if self.norm_kind != "none" and self.norm_place != "before":
            shapes |= dict.fromkeys(POST.values(), (self.d_model,))
        factors = {"none": (), "branch": ("attn_scale", "ffn_scale"), "block": ("block_scale",)}
        return shapes | dict.fromkeys(factors[self.residual_scalars], (1,))

    def biases(self) -> dict[str, int]:
        """Return the size of each bias in a block, by the name of its linear layer or LayerNorm."""
        biases = super().biases() | ({"attn_output": self.d_model} if self.o_bias else {})
        if self.ffn_bias:
            biases |= {"ffn_gate": self.d_ff, "ffn_up": self.d_ff, "ffn_down": self.d_model}
        if self.norm_kind == "layer":
            biases |= dict.fromkeys(("attn_norm", "ffn_norm", *POST.values()), self.d_model)
        return {name: size for name, size in biases.items() if name in self.shapes()}

    def tensors(self) -> list[TensorSpec]:
        """Return the specs of all tensors. Positions start from N(0, 0.02), factors of values from 0.5."""
        specs = [t for t in super().tensors() if self.norm_kind != "none" or t.name != "output_norm.weight"]
        if self.norm_kind == "layer":
            specs.append(TensorSpec("output_norm.bias", (self.d_model,), Constant(0)))
        if self.positions == "learned":
            specs.insert(1, TensorSpec("position_embd.weight", (self.context, self.d_model), Normal(0.02)))
        later = range(1, self.n_layers if self.value_residual else 1)
        names = [f"blk.{i}.{name}.weight" for i in later for name in ("value_own", "value_first")]
        return [*specs, *(TensorSpec(name, (1,), Constant(0.5)) for name in names)]

    def blocks(self, ops: Ops, x: Tensor, p: Params, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the output of the last block, for the embeddings x [B, T, d] of tokens."""
        if self.positions == "learned":
            x = ops.add(x, ops.first_rows(p["position_embd.weight"], batch["tokens"].shape[-1]))
        masks = batch if self.dropout else {}  # a batch for two models may have masks of the other one
        x = ops.dropout(x, masks, "token_embd.dropout")
        first = None
        if self.value_residual:
            h = norm(ops, x, p.block(0), "attn_norm", self.norm_eps)
            first = ops.heads(linear(ops, h, p.block(0), "attn_v"), self.n_kv_heads)  # [B, T, Hkv, D]
        for i in range(self.n_layers):
            own = {n: masks[f"blk.{i}.{n}.dropout"] for n in DROPPED if f"blk.{i}.{n}.dropout" in masks}
            x = self.run_block(ops, x, p, i, i, first, own)
        return x

    def block(self, ops: Ops, x: Tensor, p: Params, *layer: Any) -> Tensor:
        """Return the output of block `i` for x [B, T, d]; `layer` is i, the first layer's values, and dropout masks."""
        i, first, masks = layer
        x = multiply(ops, x, p, "block_scale")
        for branch in LAST:
            h = norm(ops, x, p, f"{branch}_norm", self.norm_eps)
            y = self.mix(ops, h, p, i, first, p) if branch == "attn" else self.feed_forward(ops, h, p)
            y = norm(ops, ops.dropout(y, masks, LAST[branch]), p, POST[branch], self.norm_eps)
            x = ops.add(x, multiply(ops, y, p, f"{branch}_scale"))
        return x

    def attend(self, ops: Ops, q: Tensor, k: Tensor, v: Tensor, *layer: Any) -> Tensor:
        """Return rope and attention [B, T, H*D] of q [B, T, H, D] and k, v [B, T, Hkv, D]."""
        i, first, p = layer
        if self.value_residual and i:
            v = ops.add(multiply(ops, v, p, "value_own"), multiply(ops, first, p, "value_first"))
        if self.positions == "rope" and not (self.nope_every and (i + 1) % self.nope_every == 0):
            q, k = ops.rope(q, self.rotary()), ops.rope(k, self.rotary())
        window = self.window if (i + 1) % self.window_period else 0
        return ops.attention(q, k, v, window=window, softcap=self.score_softcap)

    def gated(self, ops: Ops, gate: Tensor, up: Tensor) -> Tensor:
        """Return the gated activations of the feed-forward layer."""
        return ops.mul(ops.gelu(gate), up) if self.activation == "geglu" else ops.swiglu(gate, up)

    def feed_forward(self, ops: Ops, h: Tensor, p: Params) -> Tensor:
        """Return the output [B, T, d] of the feed-forward layer, or of the experts, for h [B, T, d]."""
        if self.experts:
            return super().feed_forward(ops, h, p)
        if self.is_gated:
            return RotaryModel.feed_forward(self, ops, h, p)
        up = linear(ops, h, p, "ffn_up")  # [B, T, d_ff]
        if self.activation == "gelu":
            return linear(ops, ops.gelu(up), p, "ffn_down")
        positive = ops.relu(up)
        return linear(ops, ops.mul(positive, positive), p, "ffn_down")

    def find_family(self) -> tuple[LanguageModel, float] | None:
        """Return a model of llama.cpp that computes the same, and the factor of its embeddings, or None."""
        terms, extra = Terms(self.head_size), {"rope": self.positions == "rope", "window_rope_base": self.rope_base}
        expected = terms.run(self, ("attn_scale.weight", "ffn_scale.weight"))
        for cls in FAMILIES:
            shared = {f.name for f in fields(cls)}
            settings = {**self.settings(), **extra, "dropout": 0.0}
            family = cls(**{name: value for name, value in settings.items() if name in shared})
            with contextlib.suppress(UserError):
                family.check()
                if terms.run(family) == expected:
                    return family, terms.embedding_scale
        return None

    def warnings(self) -> Iterable[str]:
        """Warn of settings without effect, and if llama.cpp has no equal model. Name settings with which it has one."""
        switches = {"experts_used": "experts", "experts_normalised": "experts", "window_period": "window"}
        for name, switch in switches.items():
            if is_changed(self, name) and not getattr(self, switch):
                yield f"model.{name}={str(getattr(self, name)).lower()}: has no effect with model.{switch}=0"
        for name in ("rope_base", "rope_scale"):
            if is_changed(self, name) and not self.rotates:
                yield f"model.{name}={getattr(self, name)}: has no effect with model.positions={self.positions}"
        if self.find_family() is None:
            problem = "stock llama.cpp has no equal model, so only toyexp can read model.gguf"
            yield f"model=lab: {problem}{next(self._suggestions(), '')}"

    def _suggestions(self) -> Iterator[str]:
        """Yield ends of sentences about changes of few settings that make the model equal to a family."""
        defaults, biases = Lab().settings(), ("qkv_bias", "o_bias", "ffn_bias")
        typed = [name for name in (*SWITCHES, *biases) if getattr(self, name) != defaults[name]]
        changes: list[dict[str, Any]] = [{n: v} for n, values in CHOICES.items() for v in values if n not in typed]
        changes += [{"experts_normalised": False}, {"tied": True}]
        changes.append({**dict.fromkeys(biases, True), "n_kv_heads": self.n_heads})  # as in gpt2
        resets = (some for n in range(len(typed)) for some in itertools.combinations(typed, n + 1))
        for change in (*changes, *({name: defaults[name] for name in some} for some in resets)):
            model, changed = replace(self, **change), {n: v for n, v in change.items() if getattr(self, n) != v}
            with contextlib.suppress(UserError):
                model.check()
                if changed and (found := model.find_family()):
                    settings = " and ".join(f"model.{name}={str(value).lower()}" for name, value in changed.items())
                    yield f"; with {settings} it would be {found[0].name}"

    def fold(self, tensors: Mapping[str, np.ndarray]) -> tuple[Model, Mapping[str, np.ndarray]]:
        """Return the equal model of llama.cpp and its tensors, or this model if there is none."""
        if (found := self.find_family()) is None:
            return self, tensors
        family, scale = found
        read = partial(self._convert, tensors, scale, getattr(family, "halves", False))
        return family, LazyTensors({t.name: t.shape for t in family.tensors()}, read)

    def _convert(self, tensors: Mapping[str, np.ndarray], scale: float, halves: bool, name: str) -> np.ndarray:
        """Return the tensor `name` of an equal model, computed from this model's `tensors`.

        That model multiplies its embeddings by `scale`. With `halves`, its RoPE rotates the pairs (x[i], x[i + D/2]).
        """
        if "attn_qkv" in name:
            return np.concatenate([self._convert(tensors, scale, halves, name.replace("qkv", x)) for x in "qkv"])
        values, layer = tensors[name], name.split(".")[-2]
        if halves and layer.startswith(("attn_q", "attn_k")):
            pairs = values.reshape(-1, self.head_size // 2, 2, *values.shape[1:])
            values = pairs.swapaxes(1, 2).reshape(values.shape)
        factor = {"token_embd": 1 / scale, "output_norm": scale}.get(layer, 1.0)
        if self.residual_scalars == "branch":
            for branch, last in (LAST if self.norm_place == "before" or self.norm_kind == "none" else POST).items():
                if layer.startswith(last):  # also the last layer of experts
                    factor *= tensors[name.replace(f"{layer}.", f"{branch}_scale.").replace(".bias", ".weight")][0]
        return values if factor == 1 else values * values.dtype.type(factor)


def multiply(ops: Ops, x: Tensor, p: Params, name: str) -> Tensor:
    """Return x times the learned factor `name`, or x if the block has none."""
    factor = p.get(f"{name}.weight")
    return x if factor is None else ops.mul(x, factor)
