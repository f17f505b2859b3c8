"""Read the settings of text models from config.json of transformers."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any

from toyexp import UserError
from toyexp.base import numpy as np
from toyexp.formats import decimal, hf_layout
from toyexp_models.huggingface import KEYS, llama3
from toyexp_models.language import LanguageModel

BIASES = {"qkv_bias": "q_proj.bias", "o_bias": "o_proj.bias", "ffn_bias": "up_proj.bias"}
# Keys whose values must be those of the model's layout or, if the layout lacks them, these; None: any is allowed.
FIXED: Mapping[str, Any] = {
    "hidden_act": "silu", "activation_function": "gelu_new", "norm_topk_prob": None, "no_rope_layers": None,
    "query_pre_attn_scalar": None, "clip_qkv": 0, "partial_rotary_factor": 1, "mlp_only_layers": [],
    "decoder_sparse_step": 1, "use_bidirectional_attention": False, "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False, "quantization_config": 0, "attn_logit_softcapping": 0,
    "conv_bias": False, "use_bias": False, "use_conv_bias": True,
}  # fmt: skip


def read_config(cls: type[LanguageModel], config: Mapping[str, Any], names: Collection[str]) -> LanguageModel:
    """Return the model of class `cls` that config.json describes; `names` are the names of the stored tensors.

    Raise UserError for a value that the class does not compute; wrong types raise TypeError, ValueError or KeyError.
    """
    defaults: dict[str, Any] = {f.name: f.default for f in fields(cls)}
    if null := [key for key, s in KEYS.items() if s == "norm_eps" and config.get(key, 0) is None]:
        raise UserError(f"{null[0]} is null; expected a number")
    found: dict[str, Any] = {s: config[key] for key, s in KEYS.items() if config.get(key) is not None}
    if missing := {"n_layers", "n_heads", "context"} - found.keys():
        raise UserError(f"gives no {min(missing)} ({' or '.join(k for k, s in KEYS.items() if s == min(missing))})")
    found = {"d_ff": 4 * found["d_model"], "n_kv_heads": found["n_heads"], "attention_scale": 1.0, **found}
    if found.get("head_dim", 0) * found["n_heads"] == found["d_model"]:
        found["head_dim"] = 0
    found["tied"] = config.get("tie_word_embeddings") is True or "lm_head.weight" not in names
    found |= {setting: any(name.endswith(end) for name in names) for setting, end in BIASES.items()}
    kinds = config.get("layer_types") or ["sliding_attention" if "window" in defaults else "full_attention"]
    if "full_attention" in kinds:
        found["window_period"] = kinds.index("full_attention") + 1
    found["attention_layers"] = [i for i, kind in enumerate(kinds) if kind == "full_attention"]
    if config.get("block_auto_adjust_ff_dim"):  # as transformers computes it
        width = int(config["block_ffn_dim_multiplier"] * int(2 * found["d_ff"] / 3))
        found["d_ff"] = width + -width % config["block_multiple_of"]
    if "sliding_attention" not in kinds:
        found["window"] = 0
    if "window" not in defaults and config.get("use_sliding_window", True) and (window := config.get("sliding_window")):
        found["context"] = min(found["context"], window)  # a window hides nothing in contexts up to its length
    found |= _rope(config, found, "rope_factors" in defaults) if "rope_base" in defaults else {}
    wanted = {s: v for s, v in found.items() if s in defaults}
    settings: dict[str, Any] = {s: v if isinstance(v, list) else type(defaults[s])(v) for s, v in wanted.items()}
    model = cls(**settings)
    model.check()
    layout = hf_layout(model, {}).config
    expected = {key: value if layout.get(key) is None else layout[key] for key, value in FIXED.items()}
    expected["layer_types"] = layout.get("layer_types", ["full_attention"] * model.n_layers)
    if "hidden_activation" in layout:  # transformers then ignores hidden_act
        expected |= {"hidden_act": None, "hidden_activation": layout["hidden_activation"]}
    for key, value in expected.items():
        if value is not None and config.get(key) not in (None, value):
            raise UserError(f"{key} is {config[key]}; toyexp's model={model.name} has only {value}")
    return model


def read_mamba2_config(cls: type[LanguageModel], config: Mapping[str, Any], names: Collection[str]) -> LanguageModel:
    """Return the model that config.json of mamba2 describes. It may lack sizes that transformers does not need."""
    low, high = config.get("time_step_limit") or (0, math.inf)
    if low or high not in (math.inf, {"__float__": "Infinity"}):
        raise UserError(f"time_step_limit is {[low, high]}; toyexp's model={cls.name} has no limits")
    heads, context = config["num_heads"], 1 << 20  # context of llama.cpp's converter; the model has no limit
    sizes = {"num_attention_heads": heads, "intermediate_size": heads * config["head_dim"]}
    return read_config(cls, {"max_position_embeddings": context, **config, **sizes}, names)


def _rope(config: Mapping[str, Any], found: Mapping[str, Any], has_factors: bool) -> dict[str, Any]:
    """Return the settings of RoPE; raise UserError for scaling other than linear and, if `has_factors`, Llama 3's.

    transformers 5 writes them as `rope_parameters`, in gemma3 for each kind of layers.
    """
    old = {**(config.get("rope_scaling") or {}), "rope_theta": config.get("rope_theta", 10000.0)}
    rope = config.get("rope_parameters") or old
    local, rope = rope.get("sliding_attention", {}), rope.get("full_attention", rope)
    base, kind = float(rope["rope_theta"]), rope.get("rope_type", rope.get("type", "default"))
    windows = {"window_rope_base": local["rope_theta"]} if local else {}
    if kind == "llama3" and has_factors:
        size = found.get("head_dim") or found["d_model"] // found["n_heads"]
        turns = np.array([base ** (-2 * i / size) for i in range(size // 2)]) / (2 * math.pi)
        return {"rope_base": base, "rope_factors": [decimal(factor) for factor in llama3(turns, rope)]}
    if kind not in ("default", "linear") or rope.get("partial_rotary_factor", 1) != 1:
        raise UserError(f"its RoPE is {rope}; toyexp has the types default and linear, for llama also llama3")
    return {"rope_base": base, "rope_scale": rope["factor"] if kind == "linear" else 1.0, **windows}
