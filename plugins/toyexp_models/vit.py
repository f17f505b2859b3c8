"""ViT: an image as a sequence of patches after a class token (Dosovitskiy et al. 2020), and its file formats."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Any, ClassVar

import toyexp
from toyexp import (
    IMAGES,
    Batch,
    Batches,
    ChangedBatches,
    Constant,
    Dataset,
    InputSpec,
    Kind,
    Model,
    ModelFile,
    Normal,
    Ops,
    Params,
    Tensor,
    TensorSpec,
    UserError,
)
from toyexp.base import MAX_INT, require_choice, require_range
from toyexp.base import numpy as np
from toyexp.formats import GGUFForm, HFTensor, Keys, Layout
from toyexp_models.language import BLOCKS, EPS, layer_specs, linear, norm, require_shared_heads

ARCHITECTURE = "toyexp-vit"
# GGUF key of the norms' eps, by block type (the setting `block`)
FORMS = {
    "layernorm_gelu": "attention.layer_norm_epsilon", "layernorm_gelu_erf": "attention.layer_norm_epsilon",
    "rmsnorm_silu": "attention.layer_norm_rms_epsilon",
}  # fmt: skip
POOLS = ("class", "mean")
# hidden_act in transformers, and the block type that computes it; the first of a block type is written
ACTIVATIONS = {"gelu_pytorch_tanh": "layernorm_gelu", "gelu": "layernorm_gelu_erf", "gelu_new": "layernorm_gelu"}
# Fields and their GGUF keys.
SIZES = {
    "image_size": "image_size", "channels": "channels", "patch": "patch_size", "classes": "class_count",
    "d_model": "embedding_length", "n_layers": "block_count", "d_ff": "feed_forward_length",
    "n_heads": "attention.head_count",
}  # fmt: skip
# Keys of config.json in transformers, and the fields that they give.
HF_SIZES = {
    "hidden_size": "d_model", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads",
    "intermediate_size": "d_ff", "layer_norm_eps": "norm_eps", "image_size": "image_size", "patch_size": "patch",
    "num_channels": "channels",
}  # fmt: skip
# Tensor names in transformers, and in timm.
NAMES = {
    "class_embd": "vit.embeddings.cls_token", "position_embd": "vit.embeddings.position_embeddings",
    "blk": "vit.encoder.layer", "patch_embd": "vit.embeddings.patch_embeddings.projection", "head": "classifier",
    "post_ln": "vit.layernorm", "ln1": "layernorm_before", "ln2": "layernorm_after",
    "attn_q": "attention.attention.query", "attn_k": "attention.attention.key", "attn_v": "attention.attention.value",
    "attn_out": "attention.output.dense", "ffn_up": "intermediate.dense", "ffn_down": "output.dense",
}  # fmt: skip
TIMM_NAMES = {
    "class_embd": "cls_token", "position_embd": "pos_embed", "blk": "blocks", "patch_embd": "patch_embed.proj",
    "post_ln": "norm", "head": "head", "ln1": "norm1", "ln2": "norm2", "attn_q": "attn.qkv", "attn_k": "attn.qkv",
    "attn_v": "attn.qkv", "attn_out": "attn.proj", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2",
}  # fmt: skip


class ViTGGUF(GGUFForm[Any]):
    """GGUF form of ViT. The dataset, not this class, provides the keys `classes`, `image_mean` and `image_std`."""

    def architecture(self, model: Any) -> str:
        """Return toyexp's own architecture name, so that no other program misreads the file."""
        return ARCHITECTURE

    def metadata(self, model: Any) -> dict[str, Any]:
        """Return the GGUF keys and values of the block type, the sizes and the norms' eps."""
        sizes = {key: getattr(model, name) for name, key in SIZES.items()}
        return {"block": model.block, "pool": model.pool, **sizes, FORMS[model.block]: model.norm_eps}

    def read(self, cls: type[Any], file: ModelFile) -> Any:
        """Return the file's model. Raise UserError if a key is missing."""
        keys = Keys(file)
        block = keys.expect("block", *FORMS)
        sizes = {name: keys.integer(key, lowest=name != "classes") for name, key in SIZES.items()}
        return cls(**sizes, block=block, pool=keys.expect("pool", *POOLS), norm_eps=keys.number(FORMS[block]))


def vit_layout(model: Any, data: Mapping[str, Any]) -> Layout:
    """Return the layout of ViTForImageClassification; `data` has the class names and the pixel mean and std.

    If `data` is config.json of timm, which has an "architecture", the tensors have timm's names. Raise UserError for
    settings that transformers' ViT lacks.
    """
    if "architecture" in data:
        return Layout({}, _places(model, {**TIMM_NAMES, **({"post_ln": "fc_norm"} if model.pool == "mean" else {})}))
    for name, value, allowed in (("block", model.block, ACTIVATIONS.values()), ("pool", model.pool, ["class"])):
        if value not in allowed:
            problem = f"only GGUF can hold it; transformers' ViT is {' or '.join(dict.fromkeys(allowed))}"
            raise UserError(f"model.{name}={value}: {problem}")
    config = {
        "architectures": ["ViTForImageClassification"],
        "model_type": "vit",
        "hidden_act": next(name for name, block in ACTIVATIONS.items() if block == model.block),
        **{key: getattr(model, name) for key, name in HF_SIZES.items()},
        "qkv_bias": True,
    }
    classes = list(data.get("classes", ()))
    classes += [f"LABEL_{i}" for i in range(len(classes), model.classes)]
    config["id2label"] = {str(i): name for i, name in enumerate(classes)}
    config["label2id"] = {name: i for i, name in enumerate(classes)}
    return Layout(config, _places(model, NAMES), files={"preprocessor_config.json": _preprocessor(model, data)})


def read_vit_config(cls: type[Any], config: Mapping[str, Any], names: Collection[str]) -> Any:
    """Return the model that config.json of transformers or timm describes; it has no classes if `names` have no head.

    Raise UserError if toyexp cannot compute the model.
    """
    config = _from_timm(config, names) if "architecture" in config else config
    activation = config.get("hidden_act", "gelu")
    if activation not in ACTIVATIONS or not config.get("qkv_bias", True):
        problem = f"hidden_act is {activation}, qkv_bias {config.get('qkv_bias', True)}"
        raise UserError(f"{problem}; toyexp's model=vit has {' or '.join(ACTIVATIONS)}, with biases")
    classes = len(config.get("id2label", "01")) if {"classifier.weight", "head.weight"} & {*names} else 0
    sizes = {name: config[key] for key, name in HF_SIZES.items()} | {"classes": classes}
    model = cls(**sizes, block=ACTIVATIONS[activation], pool=config.get("pool", "class"))
    model.check()
    return model


def _from_timm(config: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return config.json of timm's VisionTransformer under transformers' keys; `names` are the stored tensors.

    Heads have 64 features or, from a width of 1024, there are 16, unless model_args say otherwise.
    """
    stated, args = {**config.get("pretrained_cfg", {}), **config}, config.get("model_args") or {}
    kind, pool = re.match(r"(?:vit|deit)_.*patch(\d+)", config["architecture"]), config.get("global_pool", "token")
    if not kind or pool not in ("token", "avg") or {"act_layer", "norm_layer"} & {*args}:
        asked = f"architecture {config['architecture']} with global_pool {pool} and model_args {args}"
        raise UserError(f"is timm's {asked}; toyexp reads vit_*_patch* and deit_*_patch* with token or avg")
    d, (channels, size, _) = config["num_features"], stated["input_size"]
    return {
        "hidden_size": d, "num_hidden_layers": sum(name.endswith(".attn.qkv.weight") for name in names),
        "num_attention_heads": args.get("num_heads", 16 if d >= 1024 else d // 64), "layer_norm_eps": 1e-6,
        "intermediate_size": int(d * args.get("mlp_ratio", 4)), "image_size": args.get("img_size", size),
        "patch_size": args.get("patch_size", int(kind[1])), "num_channels": channels,
        "id2label": range(stated["num_classes"]), "pool": "mean" if pool == "avg" else "class",
    }  # fmt: skip


def _places(model: Any, names: Mapping[str, str]) -> dict[str, HFTensor]:
    d, kernel = model.d_model, (model.d_model, model.channels, model.patch, model.patch)
    tensors = {
        "v.class_embd": HFTensor(names["class_embd"], form=lambda x: x[None, None], back=lambda x: x[0, 0]),
        "v.position_embd.weight": HFTensor(names["position_embd"], form=lambda x: x[None], back=lambda x: x[0]),
        "v.patch_embd.weight": HFTensor(
            f"{names['patch_embd']}.weight", form=lambda x: x.reshape(kernel), back=lambda x: x.reshape(d, -1)
        ),
    }
    for spec in model.tensors():
        if spec.name not in tensors:
            _, *block, name, kind = spec.name.split(".")
            prefix = f"{names['blk']}.{block[1]}." if block else ""
            tensors[spec.name] = HFTensor(f"{prefix}{names[name]}.{kind}")
            if names[name] == "attn.qkv":
                start = "qkv".index(name[-1]) * d
                tensors[spec.name] = replace(tensors[spec.name], back=itemgetter(slice(start, start + d)))
    return tensors


def _preprocessor(model: Any, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of CLIP's image processor: scale the shorter side, crop the centre, normalise."""
    size = model.image_size
    return {
        "image_processor_type": "CLIPImageProcessor",
        "do_convert_rgb": model.channels == 3,
        "size": {"shortest_edge": size},
        "crop_size": {"height": size, "width": size},
        "resample": 3,  # bicubic
        "image_mean": [float(x) for x in data.get("image_mean", ())] or [0.0] * model.channels,
        "image_std": [float(x) for x in data.get("image_std", ())] or [1.0] * model.channels,
    }


@dataclass
class ViT(Model):
    """Vision transformer: image patches, a class token, learned positions."""

    name: ClassVar[str] = "vit"
    reads: ClassVar[Kind] = IMAGES
    forms: ClassVar[Mapping[str, Any]] = {"gguf": ViTGGUF(), "hf": vit_layout, "config": read_vit_config}
    score_names: ClassVar[tuple[str, ...]] = ("accuracy", "top5")

    d_model: int = 64  # width of the residual stream
    n_layers: int = 4  # number of blocks
    n_heads: int = 4  # number of attention heads
    d_ff: int = 256  # hidden size of the feed-forward layer
    patch: int = 2  # side length of a patch in pixels
    block: str = "layernorm_gelu"  # layernorm_gelu | layernorm_gelu_erf (exact GELU) | rmsnorm_silu (no biases)
    pool: str = "class"  # the head reads: class (the class token) | mean (of the patches)
    norm_eps: float = 1e-5  # added to the variance inside the norms
    image_size: int = 0  # side length of an image in pixels; 0: the data's
    channels: int = 0  # channels per pixel; 0: the data's
    classes: int = 0  # number of classes; 0: the data's

    def check(self) -> None:
        """Raise UserError for invalid sizes."""
        self.require_positive("d_model", "n_heads", "d_ff", "patch")
        require_choice("model", self, block=tuple(FORMS), pool=POOLS)
        require_range("model", self, n_layers=BLOCKS, norm_eps=EPS)
        require_range("model", self, **dict.fromkeys(("image_size", "channels", "classes"), f"[0,{MAX_INT}]"))
        require_shared_heads(self)
        if self.image_size % self.patch:
            raise UserError(f"model.patch={self.patch} does not divide images of {self.image_size} pixels")

    def fit(self, dataset: Dataset) -> Model:
        """Return the model, with each size of 0 replaced by the data's.

        Raise UserError if a size that is not 0 does not fit the data.
        """
        assert isinstance(dataset, toyexp.ImageDataset)
        height, width, channels = dataset.image_shape
        if height != width:
            raise UserError(f"model=vit reads square images; the data has images of {width} x {height}")
        size, color = f"data.image_size={self.image_size}", f"data.color={str(self.channels == 3).lower()}"
        base = ", recipe.new_size=true to interpolate a base's positions"
        for name, value, fit, more in (("image_size", height, size, base), ("channels", channels, color, "")):
            if (own := getattr(self, name)) not in (0, value):
                problem = f"model.{name}={own}: the data has {value}; type {fit} for data=images{more}"
                raise UserError(f"{problem}, or for a new model leave model.{name} out")
        if 0 < self.classes < dataset.vocab:
            raise UserError(f"model.classes={self.classes} is smaller than the data's classes (0..{dataset.vocab - 1})")
        fitted = replace(self, image_size=height, channels=channels, classes=self.classes or dataset.vocab)
        fitted.check()
        return fitted

    @property
    def patches(self) -> int:
        """Number of patches per image."""
        return (self.image_size // self.patch) ** 2

    def inputs(self) -> dict[str, tuple[int | str, ...]]:
        """Return a dict from the name of the model's input to the input's shape for one image."""
        return {"patches": (self.patches, self.channels * self.patch**2)}

    def batches(self, dataset: Dataset, rows: int, seed: int) -> Batches:
        """Return the data's batches, whose images are cut into patches on the CPU."""
        return Patches(dataset.batches(0, rows, seed), self.patch)

    def tensors(self) -> list[TensorSpec]:
        """Return the tensors, under llama.cpp's names for vision models.

        Patch embedding, positions and head start from N(0, 0.02), and the class token from 0. The linear layers of
        blocks start from N(0, 1/sqrt(d)). v.patch_embd.weight, reshaped to [d, channels, patch, patch], is the kernel
        of a convolution. Without classes there is no head.
        """
        d, ff, small, inner = self.d_model, self.d_ff, Normal(0.02), Normal(1 / math.sqrt(self.d_model))
        layer = partial(layer_specs, biased=self.block != "rmsnorm_silu")
        matrix = partial(layer, init=inner)
        specs = matrix("v.patch_embd", d, self.channels * self.patch**2, init=small)
        specs.append(TensorSpec("v.class_embd", (d,), Constant(0)))
        specs.append(TensorSpec("v.position_embd.weight", (self.patches + 1, d), small))
        for i in range(self.n_layers):
            specs += layer(f"v.blk.{i}.ln1", d)
            for part in ("attn_q", "attn_k", "attn_v", "attn_out"):
                specs += matrix(f"v.blk.{i}.{part}", d, d)
            specs += layer(f"v.blk.{i}.ln2", d)
            specs += matrix(f"v.blk.{i}.ffn_up", ff, d)
            specs += matrix(f"v.blk.{i}.ffn_down", d, ff)
        head = matrix("v.head", self.classes, d, init=small) if self.classes else []
        return specs + layer("v.post_ln", d) + head

    def forward(self, ops: Ops, p: Params, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the logits [B, classes] of patches [B, P, channels * patch * patch]."""
        v = Params(p, "v.")
        x = ops.prepend(linear(ops, batch["patches"], v, "patch_embd"), v["class_embd"])  # [B, P+1, d]
        x = ops.add(x, v["position_embd.weight"])
        for i in range(self.n_layers):
            x = ops.block(self._block, x, v.block(i))
        x = ops.select(x, 0) if self.pool == "class" else ops.mean(ops.part(x, 1, 1, self.patches + 1), 1)
        x = norm(ops, x, v, "post_ln", self.norm_eps)  # [B, d]
        return linear(ops, x, v, "head")

    def _block(self, ops: Ops, x: Tensor, p: Params) -> Tensor:
        h = norm(ops, x, p, "ln1", self.norm_eps)
        q, k, v = (ops.heads(linear(ops, h, p, f"attn_{n}"), self.n_heads) for n in "qkv")  # [B, P+1, H, D]
        x = ops.add(x, linear(ops, ops.attention(q, k, v, causal=False), p, "attn_out"))
        h = linear(ops, norm(ops, x, p, "ln2", self.norm_eps), p, "ffn_up")  # [B, P+1, d_ff]
        h = ops.silu(h) if self.block == "rmsnorm_silu" else ops.gelu(h, exact=self.block == "layernorm_gelu_erf")
        return ops.add(x, linear(ops, h, p, "ffn_down"))

    def scores(self, logits: Callable[[Batch], np.ndarray], batches: Iterable[Batch]) -> dict[str, float]:
        """Return the accuracy and, of more than 10 classes, `top5`, both weighted by batch weights.

        Accuracy is the fraction of images whose most likely class is correct, and top5 the fraction of images whose
        class is one of the five most likely ones.
        """
        counts, total = {"accuracy": 1, **({"top5": 5} if self.classes > 10 else {})}, 0.0
        correct = dict.fromkeys(counts, 0.0)
        for batch in batches:
            ranked = (-logits({"patches": batch["patches"]})).argsort(-1, kind="stable")
            is_class = ranked == batch["targets"][:, None]
            for name, count in counts.items():
                correct[name] += float(batch["weights"][is_class[:, :count].any(-1)].sum())
            total += float(batch["weights"].sum())
        return {name: value / total for name, value in correct.items()}


class Patches(ChangedBatches):
    """Batches of images, each cut into patches [rows, P, channels * patch * patch]."""

    def __init__(self, images: Batches, patch: int):
        height, width, channels = images.inputs["images"].shape
        patches = InputSpec(((height // patch) * (width // patch), channels * patch**2), "float32")
        rest = {name: spec for name, spec in images.inputs.items() if name != "images"}
        super().__init__(images, {"patches": patches, **rest})
        self._patch = patch

    def _change(self, batch: Batch, k: int | None) -> Batch:
        rest = {name: array for name, array in batch.items() if name != "images"}
        return {"patches": cut(batch["images"], self._patch), **rest}


def cut(images: np.ndarray, patch: int) -> np.ndarray:
    """Cut images [B, height, width, C] into patches [B, P, C * patch * patch].

    The patches of an image are ordered row by row, and the numbers in a patch as [C, y, x].
    """
    rows, height, width, channels = images.shape
    tiles = images.reshape(rows, height // patch, patch, width // patch, patch, channels)
    return np.ascontiguousarray(tiles.transpose(0, 1, 3, 5, 2, 4)).reshape(rows, -1, channels * patch**2)
