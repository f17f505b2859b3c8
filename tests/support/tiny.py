"""Small models, plans, batches and GGUF files for tests."""

from dataclasses import replace

import numpy as np

from toyexp import Setup
from toyexp.formats.gguf.read import GGUFFile
from toyexp.formats.gguf.write import Writer, write_model
from toyexp.interfaces.values import ArrayValues
from toyexp.testing import token_dataset
from toyexp.tokenizers.byte_level import BPE, Bytes
from toyexp_models.arcee import Arcee
from toyexp_models.gemma3 import Gemma2, Gemma3
from toyexp_models.gpt2 import GPT2
from toyexp_models.granite import Granite
from toyexp_models.lab import Lab
from toyexp_models.lfm2 import Lfm2
from toyexp_models.llama import Gemma, Llama, Qwen2, Qwen3
from toyexp_models.mamba2 import Mamba2
from toyexp_models.moe import Olmoe, Qwen3Moe
from toyexp_models.olmo import Olmo2
from toyexp_models.smollm3 import SmolLM3
from toyexp_recipes.scratch import Scratch

VOCAB, CONTEXT = 40, 12

SIZES = {"d_model": 32, "n_layers": 2, "n_heads": 4, "context": CONTEXT}
# All settings of a model family, with values other than the defaults.
ROPE = {"head_dim": 12, "rope_base": 500.0, "rope_scale": 2.5}
BIASES = {"qkv_bias": True, "o_bias": True, "ffn_bias": True}

SCALES = {"embedding_scale": 3.0, "residual_scale": 0.4, "attention_scale": 0.2, "logit_scale": 1.5}

MODELS = {
    "llama": Llama(**SIZES, n_kv_heads=2, d_ff=48),
    "llama_tied_bias": Llama(**SIZES, n_kv_heads=1, d_ff=48, tied=True, qkv_bias=True),
    "llama_all": Llama(**SIZES, **ROPE, **BIASES, d_ff=48, rope_factors=[1.0, 1.0, 1.3, 0.5, 4.0, 8.0]),
    "qwen2": Qwen2(**SIZES, d_ff=48),
    "qwen3": Qwen3(**SIZES, **ROPE, d_ff=48, tied=True),
    "gemma": Gemma(**SIZES, d_ff=48, n_kv_heads=1, head_dim=16),
    "gemma2": Gemma2(**SIZES, **ROPE, d_ff=48, window=5, score_softcap=2.0, final_softcap=1.5),
    "gemma3": Gemma3(**{**SIZES, "n_layers": 3}, **ROPE, d_ff=48, window=5, window_period=3, final_softcap=1.5),
    "gemma3_full": Gemma3(**SIZES, d_ff=48, n_kv_heads=1, window=0),
    "granite": Granite(**SIZES, **ROPE, **BIASES, **SCALES, d_ff=48),
    "granite_nope": Granite(**SIZES, d_ff=48, tied=True, rope=False, residual_scale=0.4),
    "olmo2": Olmo2(**SIZES, d_ff=48, rope_scale=2.5),
    "arcee": Arcee(**SIZES, **ROPE, d_ff=48, qkv_bias=True),
    "smollm3": SmolLM3(**{**SIZES, "n_layers": 5}, **ROPE, d_ff=48, tied=True),
    "qwen3moe": Qwen3Moe(**SIZES, **ROPE, d_ff=24, experts=5, experts_used=3, tied=True),
    "olmoe": Olmoe(**SIZES, d_ff=24),
    "lfm2": Lfm2(
        **{**SIZES, "n_layers": 3}, d_ff=48, rope_base=500.0, rope_scale=2.5, conv_length=4, attention_layers=[1]
    ),
    "mamba2": Mamba2(**SIZES, d_ff=64, n_groups=2, state=6, conv_length=3),
    "mamba2_wide": Mamba2(**SIZES, d_ff=96, state=5, tied=False, norm_eps=1e-3),
    "gpt2": GPT2(**SIZES, d_ff=64),
    "gpt2_untied": GPT2(**SIZES, d_ff=64, tied=False),
    # No family of llama.cpp is equal to these two. tests/engines/test_lab.py has more combinations.
    "lab": Lab(
        **{**SIZES, "n_layers": 3}, **ROPE, **BIASES, d_ff=48, norm_kind="layer", norm_place="both", qk_norm="head",
        nope_every=2, activation="relu2", window=5, window_period=3, score_softcap=2.0, final_softcap=1.5,
    ),
    "lab_after": Lab(
        **SIZES, d_ff=48, tied=True, norm_place="after", qk_norm="width", positions="learned", activation="geglu",
    ),
}  # fmt: skip


CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def batches(rows=3, seed=0):
    return token_dataset(VOCAB, count=2000, seed=5).batches(CONTEXT, rows, seed)


def add_weights(batch, seed=0):
    """Return the batch with uneven target weights, some of them zero."""
    weights = np.random.default_rng(seed).uniform(0, 2, batch["weights"].shape).astype(np.float32)
    return {**batch, "weights": np.where(weights < 0.4, 0, weights).astype(np.float32)}


def plan(name, rows=3, accumulate=1, seed=0, recipe=None, **changes):
    model = MODELS[name].fit(token_dataset(VOCAB))
    setup = Setup(batches(rows).inputs, rows=rows, accumulate=accumulate, seed=seed, **changes)
    return (recipe or Scratch()).plan(model, setup)


def write_base(path, name, kind="f32", tokenizer=None, spoil=None, general=None, **sizes):
    """Write a GGUF with random weights and return its model; the tensor `spoil` gets one NaN."""
    model = replace(MODELS[name], **{"vocab": tokenizer.vocab if tokenizer else VOCAB, **sizes})
    values = {t.name: t.init.draw(t.shape, 7, t.name) for t in model.tensors()}
    for name in values.keys() & {"token_embd.weight", "position_embd.weight", "output.weight"}:
        values[name] *= 15  # so that the logits of tokens differ clearly
    if spoil:
        values[spoil].flat[5] = np.nan
    write_model(path, model, values, tokenizer, kind, general)
    return model


def split_gguf(path):
    """Split a GGUF as llama.cpp's gguf-split does: the first file has the keys, each other file one tensor."""
    with GGUFFile(path) as file:
        count = len(file.tensors) + 1
        paths = [path.with_name(f"{path.stem}-{i + 1:05}-of-{count:05}.gguf") for i in range(count)]
        for i, part in enumerate(paths):
            writer = Writer()
            for key, value in file.metadata.items() if i == 0 else ():
                writer.add(key, value, file.kinds[key])
            writer.add("split.no", np.uint16(i))
            writer.add("split.count", np.uint16(count))
            writer.add("split.tensors.count", np.int32(count - 1))
            for t in list(file.tensors.values())[i - 1 : i] if i else ():
                writer.add_bytes(t.name, t.shape, t.type, [file.read_raw(t.name).ravel()])
            writer.save(part)
    return paths


def chat_tokenizer():
    """Return a byte tokenizer with the two special tokens and the template of ChatML."""
    base = Bytes()
    tokenizer = BPE([*base.pieces, "<|im_start|>", "<|im_end|>"], [], base.eos)
    tokenizer.controls, tokenizer.chat_template = frozenset([257, 258]), CHATML
    return tokenizer


def replace_initial_values(plan, values):
    """Return the plan with the initial values of the tensors named in `values` replaced."""
    return replace(
        plan,
        tensors=tuple(replace(t, values=ArrayValues(values[t.name])) if t.name in values else t for t in plan.tensors),
    )
