"""Text models in the format of transformers: config.json, and the name and layout of each tensor."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from toyexp import Rotary, UserError
from toyexp.base import numpy as np
from toyexp.formats import Conversion, HFTensor, Layout, identity
from toyexp_models.language import LanguageModel
from toyexp_models.rotary import RotaryModel

ROTARY = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
ATTENTION, FEED_FORWARD = ("attn_q", "attn_k", "attn_v", "attn_output"), ("ffn_gate", "ffn_up", "ffn_down")
GPT2 = {
    "token_embd": "transformer.wte", "position_embd": "transformer.wpe", "output_norm": "transformer.ln_f",
    "output": "lm_head", "attn_norm": "ln_1", "attn_qkv": "attn.c_attn", "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2", "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj",
}  # fmt: skip
MAMBA2 = {
    "token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f", "output": "lm_head", "attn_norm": "norm",
    "ssm_in": "mixer.in_proj", "ssm_conv1d": "mixer.conv1d", "ssm_norm": "mixer.norm", "ssm_out": "mixer.out_proj",
    "ssm_dt.bias": "mixer.dt_bias", "ssm_a": "mixer.A_log", "ssm_d": "mixer.D",
}  # fmt: skip
# Keys of config.json, and the settings that they give; a later key of the same setting takes precedence.
KEYS = {
    "vocab_size": "vocab", "hidden_size": "d_model", "n_embd": "d_model", "num_hidden_layers": "n_layers",
    "n_layer": "n_layers", "num_attention_heads": "n_heads", "n_head": "n_heads", "num_key_value_heads": "n_kv_heads",
    "intermediate_size": "d_ff", "n_inner": "d_ff", "moe_intermediate_size": "d_ff", "head_dim": "head_dim",
    "max_position_embeddings": "context", "n_positions": "context", "rms_norm_eps": "norm_eps",
    "layer_norm_epsilon": "norm_eps", "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale", "attention_multiplier": "attention_scale", "logits_scaling": "logit_scale",
    "num_experts": "experts", "num_local_experts": "experts", "num_experts_per_tok": "experts_used",
    "sliding_window": "window", "final_logit_softcapping": "final_softcap", "attn_logit_softcapping": "score_softcap",
    "sliding_window_pattern": "window_period", "_sliding_window_pattern": "window_period",
    "rope_local_base_freq": "window_rope_base", "norm_eps": "norm_eps", "conv_L_cache": "conv_length",
    "n_groups": "n_groups", "state_size": "state", "conv_kernel": "conv_length",
}  # fmt: skip
GELU: dict[str, Any] = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}  # old, new key
EXACT = 1e-5  # relative tolerance of rope frequencies, which files store as float32
ORIGINAL = 8192  # original context length in Llama 3's rope scaling
Data = Mapping[str, Any]  # metadata of the data: see Dataset.gguf_metadata


def _settings(model: Any, *keys: str) -> dict[str, Any]:
    """Return entries of config.json that are equal to the model's settings."""
    return {key: getattr(model, KEYS[key]) for key in keys}


def _hf_name(name: str, names: Mapping[str, str], blocks: str) -> str:
    """Return the name of a tensor in transformers; `names` has the names of layers, or of tensors, by their GGUF names.

    `blocks` is the prefix of all blocks, which are numbered from 0.
    """
    *block, own = name.split(".", 2) if name.startswith("blk.") else [name]
    layer, _, kind = own.rpartition(".")
    stored = names.get(own) or f"{names[layer]}.{kind}"
    return f"{blocks}.{block[1]}.{stored}" if block else stored


def llama_layout(model: RotaryModel, data: Data) -> Layout:
    """Return the layout of LlamaForCausalLM. Raise UserError for head sizes that transformers does not support."""
    return _llama(model)


def _llama(model: RotaryModel, problem: str = "", **own: Any) -> Layout:
    """Return the layout of llama and its nearest relatives; see `_rotary`."""
    _require_divisible_width(model)
    return _rotary(model, Conversion(prefix=None, ignored_setting=problem), **own)


def _require_divisible_width(model: RotaryModel) -> None:
    """Raise UserError unless n_heads divides d_model."""
    if model.d_model % model.n_heads:
        heads = f"model.n_heads={model.n_heads} does not divide model.d_model={model.d_model}"
        raise UserError(f"{heads}, which transformers' {model.name} requires; only GGUF can store this model")


def granite_layout(model: Any, data: Data) -> Layout:
    """Return the layout of GraniteForCausalLM. Raise UserError for a model without RoPE."""
    if not model.rope:
        raise UserError("model.rope=false: transformers' granite always has RoPE; only GGUF can store this model")
    return _llama(
        model,
        "it does not read head_dim of granite" * bool(model.head_dim),
        **_settings(model, "embedding_multiplier", "residual_multiplier", "logits_scaling"),
        attention_multiplier=model.attention_scale or model.head_size**-0.5,
    )


def qwen2_layout(model: RotaryModel, data: Data) -> Layout:
    """Return the layout of Qwen2ForCausalLM, whose q, k and v have biases."""
    return replace(_rotary(model, Conversion(), biased=ATTENTION[:3]), tokenizer_replaced=True)


def qwen3_layout(model: RotaryModel, data: Data) -> Layout:
    """Return the layout of Qwen3ForCausalLM, whose attention output also has a bias if q, k and v have biases."""
    return _rotary(model, Conversion(ignored_setting=_bias_problem(model)))


def _bias_problem(model: RotaryModel) -> str:
    """Return why llama.cpp's converter cannot convert a model whose q, k and v have biases; "" if they have none."""
    problem = f"transformers adds a bias to attn_output; llama.cpp's {model.name} has no bias on attn_output"
    return problem * model.qkv_bias


def gemma_layout(model: RotaryModel, data: Data) -> Layout:
    """Return the layout of GemmaForCausalLM, which adds 1 to the weights of its norms."""
    is_usual = (model.rope_base, model.rope_scale) == (10000.0, 1.0)
    problem = "" if is_usual else "it reads neither rope_base nor rope_scale of gemma"
    # If eot_token_id is missing, llama.cpp's converter assumes token 107, as in Google's models.
    layout = _rotary(model, Conversion(("spm",), prefix=False, ignored_setting=problem), **GELU, eot_token_id=None)
    return replace(layout, tensors=_subtract_one(layout.tensors))


def _subtract_one(tensors: Mapping[str, HFTensor]) -> dict[str, HFTensor]:
    """Return `tensors`, changed so that 1 is subtracted from the weights of norms when they are written."""

    def subtract(weight: np.ndarray) -> np.ndarray:
        return weight - 1

    return {
        n: replace(t, form=subtract, back=lambda stored: stored + 1) if n.endswith("_norm.weight") else t
        for n, t in tensors.items()
    }


def gemma2_layout(model: Any, data: Data) -> Layout:
    """Return the layout of Gemma2ForCausalLM, whose config lists the layers with a window."""
    problem = "" if model.window_period == 2 else "it does not read window_period of gemma2"
    return _windowed_layout(model, problem, **_settings(model, "attn_logit_softcapping"))


def gemma3_layout(model: Any, data: Data) -> Layout:
    """Return the layout of Gemma3ForCausalLM, whose config lists the layers with a window."""
    is_usual = (model.window_period, model.window_rope_base) == (6, 10000.0)
    problem = "" if is_usual else "it reads neither window_period nor window_rope_base of gemma3"
    own = _settings(model, "rope_local_base_freq", "sliding_window_pattern")
    return _windowed_layout(model, problem, model_type="gemma3_text", **own)


def _windowed_layout(model: Any, problem: str, **own: Any) -> Layout:
    """Return the layout of gemma2 or gemma3, with the entries `own` added to config.json.

    `problem` is a sentence about a setting that llama.cpp's converter ignores, or an empty string.
    """
    _require_divisible_width(model)
    names = {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
    kinds = ("full_attention", "sliding_attention")
    config = {
        "layer_types": [kinds[has_window] for i in range(model.n_layers) for has_window in model.layer(i)],
        "sliding_window": model.window or model.context,  # required even if no layer has a window
        "query_pre_attn_scalar": round(model.score_scale**-2),
        "final_logit_softcapping": model.final_softcap or None,
    }
    conversion = Conversion(prefix=False, ignored_setting=problem)
    layout = _rotary(model, conversion, names=names, **GELU, **config, **own)
    return replace(layout, tensors=_subtract_one(layout.tensors))


def olmo2_layout(model: RotaryModel, data: Data) -> Layout:
    """Return the layout of Olmo2ForCausalLM, whose norms follow attention and feed-forward layer."""
    norms = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
    return _rotary(model, Conversion(("bpe",)), names=norms)


def arcee_layout(model: RotaryModel, data: Data) -> Layout:
    """Return the layout of ArceeForCausalLM, whose feed-forward layer has squared ReLU and no gate."""
    return _llama(model, _bias_problem(model), hidden_act="relu2")


def smollm3_layout(model: RotaryModel, data: Data) -> Layout:
    """Return the layout of SmolLM3ForCausalLM, whose config lists the layers with RoPE."""
    rope_layers = [int(*model.layer(i)) for i in range(model.n_layers)]
    own = {"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": rope_layers, "no_rope_layer_interval": 4}
    return _llama(model, _bias_problem(model), **own)


def qwen3moe_layout(model: Any, data: Data) -> Layout:
    """Return the layout of Qwen3MoeForCausalLM."""
    own = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "moe_intermediate_size": model.d_ff}
    return _experts_layout(model, _bias_problem(model), norm_topk_prob=True, **own)


def olmoe_layout(model: Any, data: Data) -> Layout:
    """Return the layout of OlmoeForCausalLM."""
    problem = "" if model.norm_eps == 1e-5 else "it does not read norm_eps of olmoe"
    return _experts_layout(model, problem, norm_topk_prob=False, clip_qkv=None)


def _experts_layout(model: Any, problem: str, **own: Any) -> Layout:
    """Return the layout of a model with experts, with the entries `own` added to config.json.

    `problem` is a sentence about a setting that llama.cpp's converter ignores, or an empty string.
    """
    names = {f"ffn_{n}_exps": f"mlp.experts.{{}}.{n}_proj" for n in ("gate", "up", "down")}
    own |= {"names": {**names, "ffn_gate_inp": "mlp.gate"}, **_settings(model, "num_experts", "num_experts_per_tok")}
    layout = _rotary(model, Conversion(("bpe",), ignored_setting=problem), **own)
    return replace(layout, tensors={n: replace(t, is_split="_exps" in n) for n, t in layout.tensors.items()})


def lfm2_layout(model: Any, data: Data) -> Layout:
    """Return the layout of Lfm2ForCausalLM, whose config lists the layers with attention."""
    names = {
        "attn_norm": "operator_norm", "ffn_norm": "ffn_norm", "token_embd_norm": "model.embedding_norm",
        "attn_output": "self_attn.out_proj", "attn_q_norm": "self_attn.q_layernorm",
        "attn_k_norm": "self_attn.k_layernorm", "ffn_gate": "feed_forward.w1", "ffn_up": "feed_forward.w3",
        "ffn_down": "feed_forward.w2", "shortconv.in_proj": "conv.in_proj", "shortconv.conv": "conv.conv",
        "shortconv.out_proj": "conv.out_proj",
    }  # fmt: skip
    config = {
        **_settings(model, "norm_eps", "conv_L_cache"),
        "conv_bias": False,
        "block_auto_adjust_ff_dim": False,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 1,
        "layer_types": [("conv", "full_attention")[has] for i in range(model.n_layers) for has in model.layer(i)],
    }
    layout = _rotary(model, Conversion(("bpe",)), names=names, **config)
    axis: dict[str, Any] = {"form": lambda w: w[:, None], "back": lambda w: w[:, 0]}  # for input channels
    tensors = {n: replace(t, **axis) if n.endswith(".conv.weight") else t for n, t in layout.tensors.items()}
    return replace(layout, tensors=tensors)


def mamba2_layout(model: Any, data: Data) -> Layout:
    """Return the layout of Mamba2ForCausalLM, which stores log(-a) and vectors in place of matrices."""
    config = {
        "architectures": ["Mamba2ForCausalLM"],
        "model_type": "mamba2",
        **_settings(
            model, "vocab_size", "hidden_size", "num_hidden_layers", "n_groups", "state_size", "conv_kernel",
            "layer_norm_epsilon",
        ),
        # These three are read only by llama.cpp's converter.
        **_settings(model, "intermediate_size", "max_position_embeddings"),
        "pad_vocab_size_multiple": 1,
        "expand": model.d_ff // model.d_model,
        "num_heads": model.n_heads,
        "head_dim": model.d_ff // model.n_heads,
        "hidden_act": "silu",
        "use_bias": False,
        "use_conv_bias": True,
        "tie_word_embeddings": model.tied,
    }  # fmt: skip
    forms: dict[str, Any] = {
        "ssm_conv1d.weight": {"form": lambda w: w[:, None], "back": lambda w: w[:, 0]},
        "ssm_norm.weight": {"form": np.ravel, "back": lambda w: w.reshape(model.n_groups, -1)},
        "ssm_a": {"form": lambda a: np.log(np.maximum(abs(a[:, 0]), 1e-30)), "back": lambda a: -np.exp(a)[:, None]},
        "ssm_d": {"form": np.ravel, "back": lambda d: d[:, None]},
    }
    tensors = {}
    for spec in model.tensors():
        form = forms.get(spec.name.split(".", 2)[-1], {})
        tensors[spec.name] = HFTensor(_hf_name(spec.name, MAMBA2, "backbone.layers"), **form)
    problem = "" if model.d_ff == 2 * model.d_model else f"it requires d_ff=2*d_model, but d_ff is {model.d_ff}"
    return Layout(config, tensors, conversion=Conversion(ignored_setting=problem))


def gpt2_layout(model: LanguageModel, data: Data) -> Layout:
    """Return the layout of GPT2LMHeadModel, which stores the weights of linear layers as [in, out]."""
    config = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        **_settings(model, "vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "n_inner", "layer_norm_epsilon"),
        "n_ctx": model.context,  # the old key, which llama.cpp's converter reads
        "activation_function": "gelu_new",
        "tie_word_embeddings": model.tied,
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
    }
    tensors = {}
    for spec in model.tensors():
        is_linear = spec.name.startswith("blk.") and len(spec.shape) == 2
        transposed: dict[str, Any] = {"form": np.transpose, "back": np.transpose} if is_linear else {}
        tensors[spec.name] = HFTensor(_hf_name(spec.name, GPT2, "transformer.h"), **transposed)
    problem = "" if model.d_ff == 4 * model.d_model else f"it requires d_ff=4*d_model, but d_ff is {model.d_ff}"
    return Layout(config, tensors, conversion=Conversion(("bpe",), ignored_setting=problem))


def _rotary(
    model: RotaryModel, conversion: Conversion, *, biased: tuple[str, ...] | None = None,
    names: Mapping[str, str] = ROTARY, **own: Any,
) -> Layout:  # fmt: skip
    """Return the layout of a RotaryModel in transformers, where RoPE rotates pairs (x[i], x[i + D/2]).

    `biased` names the linear layers of a block that have a bias in transformers. By default, all linear layers of the
    attention have one if any of them has a bias in the model; the same holds for those of the feed-forward layer.
    `names` maps GGUF names to names in transformers, where these differ from llama's. `own` are further entries of
    config.json.
    """
    biases, names = model.biases(), {**ROTARY, **names}
    if biased is None:
        biased = tuple(n for layer in (ATTENTION, FEED_FORWARD) for n in layer if not biases.keys().isdisjoint(layer))
    config = {
        "architectures": [f"{model.name.capitalize()}ForCausalLM"],
        "model_type": model.name,
        **_settings(
            model, "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "max_position_embeddings", "rms_norm_eps",
        ),
        "head_dim": model.head_size,
        "hidden_act": "silu",
        "rope_theta": model.rope_base,
        "rope_scaling": rope_scaling(model.rotary(), model.head_size, model.context),
        "tie_word_embeddings": model.tied,
        "attention_bias": ATTENTION[0] in biased,
        "mlp_bias": FEED_FORWARD[0] in biased,
        **own,
    }  # fmt: skip
    tensors, zeros = {}, {}
    for spec in model.tensors():
        name, kind = spec.name.split(".")[-2:]
        heads = {"attn_q": model.n_heads, "attn_k": model.n_kv_heads}.get(name)
        order = identity if model.halves or heads is None else partial(_join_pairs, heads)
        stored = _hf_name(spec.name, names, "model.layers")
        tensors[spec.name] = HFTensor(stored, order)
        if kind == "weight" and name in biased and name not in biases:
            zeros[f"{stored.removesuffix('weight')}bias"] = spec.shape[:1]
    return Layout(config, tensors, zeros, conversion=conversion)


def _join_pairs(heads: int, rows: np.ndarray) -> np.ndarray:
    """Reorder the outputs of a linear layer with this number of heads for RoPE on pairs (x[i], x[i + D/2])."""
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def rope_scaling(rotary: Rotary, size: int, context: int) -> dict[str, Any] | None:
    """Return the value of `rope_scaling` in config.json for heads of `size` features; None for no scaling.

    Raise UserError if transformers has no kind of scaling that gives the frequencies of `rotary`.
    """
    factors = np.array(rotary.factors or [1.0])
    if np.ptp(factors) == 0:  # equal divisors are linear scaling
        factor = rotary.scale * float(factors[0])
        return None if factor == 1 else {"rope_type": "linear", "factor": factor}
    if rotary.scale != 1:
        raise UserError("model.rope_factors and model.rope_scale are both set; transformers supports only one")
    # Rotations per position.
    turns = np.array([rotary.base ** (-2 * i / size) for i in range(size // 2)]) / (2 * math.pi)
    for low, high, original in [(1.0, 4.0, ORIGINAL), *_guesses(turns, factors, context)]:
        parameters = {
            "rope_type": "llama3",
            "factor": float(factors.max()),
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": original,
        }
        if 0 < low < high and np.allclose(llama3(turns, parameters), factors, rtol=EXACT, atol=0):
            return parameters
    raise UserError("model.rope_factors: transformers' llama3 scaling cannot give them; only GGUF can store them")


def llama3(turns: np.ndarray, parameters: dict[str, Any]) -> np.ndarray:
    """Return the divisor of each RoPE frequency in Llama 3's scaling: `factor` for low frequencies, 1 for high ones.

    `turns` are the frequencies in rotations per position; `parameters` is `rope_scaling` of config.json.
    """
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    share = (parameters["original_max_position_embeddings"] * turns - low) / (high - low)
    share = share.clip(0, 1)
    return 1 / ((1 - share) / parameters["factor"] + share)


def _guesses(turns: np.ndarray, factors: np.ndarray, context: int) -> list[tuple[float, float, int]]:
    """Return candidates for Llama 3's scaling, each as (low_freq_factor, high_freq_factor, original context).

    Between the low and the high frequencies, 1 / factor is a linear function of the frequency (`turns`). Each candidate
    comes from a line that is fitted to some points of this function.
    """
    original = max(1, int(context / factors.max()))
    speed = 1 / factors
    is_between = (factors > 1) & (factors < factors.max())
    first, last = np.flatnonzero(factors > 1)[:1] - 1, np.flatnonzero(factors == factors.max())[:1]
    points = [i for i in (*first, *np.flatnonzero(is_between), *last) if i >= 0]
    pairs = [*itertools.combinations(points, 2)]
    lines = [np.polyfit(turns[list(pair)], speed[list(pair)], 1) for pair in (pairs[:3] if len(points) < 4 else [])]
    if is_between.sum() > 1:
        lines.insert(0, np.polyfit(turns[is_between], speed[is_between], 1))
    ends = [((speed.min() - offset) / slope, (1 - offset) / slope) for slope, offset in lines if slope > 0]
    return [(float(low * original), float(high * original), original) for low, high in ends]
