"""Mapping between text models and GGUF metadata: the keys that llama.cpp reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from toyexp import ModelFile
from toyexp.base import numpy as np
from toyexp.formats import GGUFForm, Keys, decimal
from toyexp_models.language import LanguageModel
from toyexp_models.rotary import RotaryModel

L = TypeVar("L", bound=LanguageModel)
FREQS = "rope_freqs.weight"
# Fields of every model, and their GGUF keys.
SIZES = {
    "context": "context_length", "d_model": "embedding_length", "n_layers": "block_count",
    "d_ff": "feed_forward_length", "n_heads": "attention.head_count",
}  # fmt: skip
Numbers = Mapping[str, tuple[str, float | None]]  # fields, their GGUF keys and llama.cpp's defaults; None: required
GRANITE_SCALES: Numbers = {
    "embedding_scale": ("embedding_scale", 1.0), "residual_scale": ("residual_scale", 1.0),
    "logit_scale": ("logit_scale", None),
}  # fmt: skip


class LanguageGGUF(GGUFForm[L]):
    """GGUF form (key names and conversions) of language models, with the keys that all architectures share."""

    names: Mapping[str, str] = SIZES  # fields with whole numbers, and their GGUF keys
    numbers: Numbers = {}  # fields with other numbers

    def metadata(self, model: L) -> dict[str, Any]:
        """Return the GGUF keys and values of the fields in `names` and `numbers`."""
        keys = {**self.names, **{name: key for name, (key, _) in self.numbers.items()}}
        return {key: getattr(model, name) for name, key in keys.items()} | {"vocab_size": model.vocab}

    def read(self, cls: type[L], file: ModelFile) -> L:
        """Return the model in a file. Raise UserError for a key that this architecture does not support."""
        keys = Keys(file)
        model = cls(**self.sizes(keys))
        keys.finish()
        return model

    def sizes(self, keys: Keys) -> dict[str, Any]:
        """Return the model's fields as a dict from field name to value, read from the file's metadata `keys`."""
        embedding = keys.file.tensors.get("token_embd.weight")
        if embedding is None:
            raise keys.file.error("lacks the tensor token_embd.weight")
        sizes: dict[str, Any] = {name: keys.integer(key) for name, key in self.names.items()}
        sizes |= {name: keys.number(key, default) for name, (key, default) in self.numbers.items()}
        return sizes | {"vocab": embedding.shape[0], "tied": "output.weight" not in keys.file.tensors}


class GPT2GGUF(LanguageGGUF[LanguageModel]):
    """GGUF form of GPT-2."""

    numbers = {"norm_eps": ("attention.layer_norm_epsilon", None)}


class RotaryGGUF(LanguageGGUF[RotaryModel]):
    """GGUF form of qwen2, qwen3 and gemma, which use rotary embedding. Base class of llama's form."""

    numbers: Numbers = {
        "norm_eps": ("attention.layer_norm_rms_epsilon", None), "rope_base": ("rope.freq_base", 10000.0),
    }  # fmt: skip

    def metadata(self, model: RotaryModel) -> dict[str, Any]:
        """Return the GGUF keys and values of sizes, heads, eps and RoPE."""
        keys = {
            **super().metadata(model),
            "attention.head_count_kv": model.n_kv_heads,
            "rope.dimension_count": model.head_size,
        }
        if model.head_size * model.n_heads != model.d_model:
            keys |= {"attention.key_length": model.head_size, "attention.value_length": model.head_size}
        if model.rope_scale != 1:
            keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": model.rope_scale}
        return keys

    def sizes(self, keys: Keys) -> dict[str, Any]:
        """Return the model's fields by name, read from `keys`, with llama.cpp's defaults for missing keys.

        Raise UserError for RoPE scaling other than linear, or other values that toyexp does not support.
        """
        common = super().sizes(keys)
        head_size = common["d_model"] // common["n_heads"]
        size, value = (keys.integer(f"attention.{kind}_length", head_size or None) for kind in ("key", "value"))
        if size != value:
            raise keys.file.error(f"its heads have keys of {size} features and values of {value}; they must be equal")
        keys.expect("rope.dimension_count", size)
        return common | {
            "n_kv_heads": keys.integer("attention.head_count_kv", common["n_heads"]),
            "head_dim": 0 if size * common["n_heads"] == common["d_model"] else size,
            "qkv_bias": "blk.0.attn_q.bias" in keys.file.tensors,
            "rope_scale": _linear_scaling(keys),
        }


class LlamaGGUF(RotaryGGUF):
    """GGUF form of llama, with a tensor for the frequency divisors of Llama 3's RoPE."""

    def constants(self, model: RotaryModel) -> Mapping[str, np.ndarray]:
        """Return the tensor rope_freqs.weight with RoPE's frequency divisors, if the model has any."""
        factors = model.factors()
        return {FREQS: np.array(factors, np.float32)} if factors else {}

    def sizes(self, keys: Keys) -> dict[str, Any]:
        """Return the model's fields by name, read from `keys`, with llama.cpp's defaults for missing keys."""
        common = super().sizes(keys)
        keys.expect("tensor_data_layout", "Meta AI original pth")  # written by older converters; irrelevant in GGUF
        file, pairs = keys.file, (common["head_dim"] or common["d_model"] // common["n_heads"]) // 2
        info = file.tensors.get(FREQS)
        if info is not None and info.shape != (pairs,):
            raise file.error(f"{FREQS} has the shape {list(info.shape)}, heads of {2 * pairs} need {pairs} numbers")
        return common | {
            "o_bias": "blk.0.attn_output.bias" in file.tensors,
            "ffn_bias": "blk.0.ffn_up.bias" in file.tensors,
            "rope_factors": [] if info is None else [decimal(f) for f in file.read(FREQS)],
        }


class ExpertsGGUF(RotaryGGUF):
    """GGUF form of qwen3moe and olmoe: keys of the experts."""

    names = {**SIZES, "experts": "expert_count", "experts_used": "expert_used_count"}

    def metadata(self, model: Any) -> dict[str, Any]:
        """Return the GGUF keys and values, including those of the experts."""
        return super().metadata(model) | {"expert_feed_forward_length": model.d_ff}

    def sizes(self, keys: Keys) -> dict[str, Any]:
        """Return the model's fields, read from the file."""
        common = super().sizes(keys)
        return common | {"d_ff": keys.integer("expert_feed_forward_length", common["d_ff"])}


class GraniteGGUF(LlamaGGUF):
    """GGUF form of granite: that of llama, plus four keys for multipliers.

    For a model without RoPE, `rope.scaling.finetuned` is false.
    """

    numbers = {**RotaryGGUF.numbers, **GRANITE_SCALES}

    def metadata(self, model: Any) -> dict[str, Any]:
        """Return the GGUF keys and values: those of llama, and the multipliers."""
        keys: dict[str, Any] = {"attention.scale": model.attention_scale} if model.attention_scale else {}
        keys |= {} if model.rope else {"rope.scaling.finetuned": False}
        return super().metadata(model) | keys

    def sizes(self, keys: Keys) -> dict[str, Any]:
        """Return the model's fields, read from the file. As in llama.cpp, a multiplier of 0 in the file means 1."""
        has_rope, score_scale = keys.expect("rope.scaling.finetuned", True, False), keys.number("attention.scale", 0.0)
        common = super().sizes(keys)
        scales = {name: common[name] or 1.0 for name in GRANITE_SCALES}
        return common | scales | {"rope": has_rope, "attention_scale": score_scale}


class Gemma2GGUF(RotaryGGUF):
    """GGUF form of gemma2, with keys for the sliding window and the soft caps of scores and logits."""

    window, period = 4096, 2  # llama.cpp's values for missing keys
    numbers: Numbers = {
        **RotaryGGUF.numbers, "final_softcap": ("final_logit_softcapping", 30.0),
        "score_softcap": ("attn_logit_softcapping", 50.0),
    }  # fmt: skip

    def metadata(self, model: Any) -> dict[str, Any]:
        """Return the GGUF keys and values, including those of the sliding window and of the soft caps."""
        keys = {"attention.sliding_window": model.window}
        if model.window:
            keys["attention.sliding_window_pattern"] = model.window_period
        return super().metadata(model) | keys

    def sizes(self, keys: Keys) -> dict[str, Any]:
        """Return the model's fields, read from the file, with llama.cpp's defaults for missing keys."""
        return super().sizes(keys) | {
            "window": keys.integer("attention.sliding_window", self.window, lowest=0),
            "window_period": keys.integer("attention.sliding_window_pattern", self.period),
        }


class Gemma3GGUF(Gemma2GGUF):
    """GGUF form of gemma3, with keys for the sliding window, its RoPE base, and the soft cap of the logits."""

    window, period = 0, 6
    numbers = {
        **RotaryGGUF.numbers, "final_softcap": ("final_logit_softcapping", 0.0),
        "window_rope_base": ("rope.freq_base_swa", 10000.0),
    }  # fmt: skip


def _linear_scaling(keys: Keys) -> float:
    """Return the factor of linear RoPE scaling, by which positions are divided.

    As in llama.cpp, the scaling is linear if a factor but no type is given. Return 1 for type none or factor 0.
    """
    kind = keys.expect("rope.scaling.type", "linear", "none")
    old = keys.number("rope.scale_linear", 0.0)
    factor = keys.number("rope.scaling.factor", old)
    keys.expect("rope.scaling.attn_factor", 1.0)
    keys.ignore("rope.scaling.original_context_length", "rope.scaling.finetuned")  # only YaRN and LongRoPE read them
    return factor if factor and kind == "linear" else 1.0
