"""Write small GGUF files of every kind, for the tests of `toyexp describe` and `toyexp models`."""

import numpy as np
from gguf import GGUFWriter
from tiny import CONTEXT, VOCAB, write_base

from toyexp import TOKENS, Setup
from toyexp.formats.gguf.write import write_adapter, write_model
from toyexp_models.vit import ViT
from toyexp_recipes.lora import Lora

VIT = ViT(d_model=16, n_layers=2, n_heads=2, d_ff=24, patch=4, image_size=8, channels=1, classes=3)


def write_vit(path, model=VIT):
    """Write an image classifier with random weights; return the model."""
    values = {t.name: t.init.draw(t.shape, 7, t.name) for t in model.tensors()}
    data = {"classes": ["a", "b", "c"], "image_mean": [0.5], "image_std": [0.5]}
    write_model(path, model, values, None, "f32", {"name": "digits"}, data)
    return model


def write_lora(path, base):
    """Write a llama to `base`, and an adapter of rank 4 and alpha 6 on q and v of its blocks to `path`."""
    model = write_base(base, "llama")
    inputs = TOKENS.inputs(CONTEXT)
    recipe = Lora(base=str(base), rank=4, alpha=6.0, targets=["q", "v"])
    plan = recipe.plan(model, Setup(inputs, rows=1))
    values = {t.name: plan.initial_values(t) for t in plan.trainable}
    write_adapter(path, plan, values, {"name": "lora-llama"})


def write_foreign(path, architecture="phi3", keys=(), width=32, split=0, tensors=None):
    """Write a file of an unsupported architecture; with `split` > 0 in several files of that many tensors."""
    writer = GGUFWriter(path, architecture, split_max_tensors=split)
    writer.add_uint32(f"{architecture}.embedding_length", width)
    writer.add_uint32(f"{architecture}.block_count", 2)
    for key, value in dict(keys).items():
        add = {str: writer.add_string, int: writer.add_uint32, bool: writer.add_bool, list: writer.add_array}
        add[type(value)](key, value)
    shapes = {
        "token_embd.weight": (VOCAB, width),
        "blk.0.attn_qkv.weight": (96, width),
        "blk.1.attn_qkv.weight": (96, width),
    }
    for name, shape in (shapes if tensors is None else tensors).items():
        writer.add_tensor(name, np.zeros(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
