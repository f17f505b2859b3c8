"""Directories of ViTs as transformers and timm write them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from toyexp import ModelExport
from toyexp.formats import write_folder
from toyexp_models.vit import ViT

# Published names in timm; those of q, k and v are joined in blocks.N.attn.qkv.
TIMM = {
    "v.class_embd": "cls_token", "v.position_embd.weight": "pos_embed", "v.patch_embd": "patch_embed.proj",
    "v.post_ln": "norm", "v.head": "head", "ln1": "norm1", "ln2": "norm2", "attn_out": "attn.proj",
    "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2",
}  # fmt: skip


def draw_values(model: ViT, factor: float = 3) -> dict[str, np.ndarray]:
    """Return initial values times `factor`, by default so large that logits differ clearly."""
    return {t.name: np.float32(factor) * t.init.draw(t.shape, 7, t.name) + np.float32(0.01) for t in model.tensors()}


def write_transformers(path: Path, model: ViT, values: Mapping[str, np.ndarray], classes: list[str]) -> None:
    """Write the model as transformers' ViTForImageClassification does."""
    data = {"classes": classes, "image_mean": [0.5] * model.channels, "image_std": [0.25] * model.channels}
    write_folder(path, ModelExport(model, values, data=data))


def write_timm(path: Path, model: ViT, values: Mapping[str, np.ndarray], **changes: object) -> None:
    """Write the model as timm's save_for_hf does; `changes` replace keys of config.json."""
    d, tensors = model.d_model, {}
    for name, array in values.items():
        module, _, kind = name.rpartition(".")
        if name == "v.class_embd":
            tensors["cls_token"] = array.reshape(1, 1, d)
        elif name == "v.position_embd.weight":
            tensors["pos_embed"] = array[None]
        elif module in TIMM:
            tensors[f"{TIMM[module]}.{kind}"] = array
        elif not name.split(".")[3].startswith("attn_q"):
            _, _, i, part, kind = name.split(".")
            if part in TIMM:
                tensors[f"blocks.{i}.{TIMM[part]}.{kind}"] = array
        else:
            i = name.split(".")[2]
            parts = [values[f"v.blk.{i}.attn_{part}.{kind}"] for part in "qkv"]
            tensors[f"blocks.{i}.attn.qkv.{kind}"] = np.concatenate(parts)
    kernel = (d, model.channels, model.patch, model.patch)
    tensors["patch_embed.proj.weight"] = tensors["patch_embed.proj.weight"].reshape(kernel)
    if model.pool == "mean":
        tensors |= {f"fc_norm.{kind}": tensors.pop(f"norm.{kind}") for kind in ("weight", "bias")}
    size, channels = model.image_size, model.channels
    config = {
        "architecture": f"vit_tiny_patch{model.patch}_{size}",
        "num_classes": model.classes,
        "num_features": d,
        "global_pool": "avg" if model.pool == "mean" else "token",
        "pretrained_cfg": {"input_size": [channels, size, size], "mean": [0.5] * channels, "std": [0.25] * channels},
    }
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config | changes))
