"""ViT in files: in a GGUF of toyexp's own architecture, and in transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toyexp import ModelFile, UserError, choose, printable
from toyexp.formats import GGUFForm, Layout, Place

ARCHITECTURE = "toyexp-vit"
# form of the blocks: the GGUF key of its norms' eps
EPS = {"layernorm_gelu": "attention.layer_norm_epsilon", "rmsnorm_silu": "attention.layer_norm_rms_epsilon"}
# Its fields, and the keys of a GGUF.
SIZES = {
    "image_size": "image_size", "channels": "channels", "patch": "patch_size", "classes": "class_count",
    "d_model": "embedding_length", "n_layers": "block_count", "d_ff": "feed_forward_length",
    "n_heads": "attention.head_count",
}  # fmt: skip
# Where tensors stand in transformers.
NAMES = {
    "patch_embd": "vit.embeddings.patch_embeddings.projection", "post_ln": "vit.layernorm", "head": "classifier",
    "ln1": "layernorm_before", "ln2": "layernorm_after",
    "attn_q": "attention.attention.query", "attn_k": "attention.attention.key", "attn_v": "attention.attention.value",
    "attn_out": "attention.output.dense", "ffn_up": "intermediate.dense", "ffn_down": "output.dense",
}  # fmt: skip


class ViTGGUF(GGUFForm[Any]):
    """The sizes; `classes`, `image_mean` and `image_std` come from the data."""

    def architecture(self, model: Any) -> str:
        """One of toyexp's own, under which no other program expects a model of another form."""
        return ARCHITECTURE

    def metadata(self, model: Any) -> dict[str, Any]:
        """The keys that the documentation lists."""
        sizes = {key: getattr(model, name) for name, key in SIZES.items()}
        return {"block": model.block, **sizes, EPS[model.block]: model.norm_eps}

    def read(self, cls: type[Any], file: ModelFile) -> Any:
        """The file's model, held against the shapes of its tensors; UserError for one that lacks something."""
        architecture = file.metadata.get("general.architecture")
        if architecture != ARCHITECTURE:
            raise file.error(f"its architecture is {printable(str(architecture))}, not {ARCHITECTURE}")
        block = self._key(file, "block", str)
        if block not in EPS:
            raise file.error(f"{ARCHITECTURE}.block is {printable(block)}; {choose(block, EPS)}")
        sizes = {name: self._key(file, key, int) for name, key in SIZES.items()}
        model = cls(**sizes, block=block, norm_eps=self._key(file, EPS[block], float))
        try:
            model.check()
        except UserError as error:
            raise file.error(str(error)) from None
        self._check_tensors(file, model)
        return model

    def _key(self, file: ModelFile, name: str, kind: type) -> Any:
        value = file.metadata.get(f"{ARCHITECTURE}.{name}")
        if not isinstance(value, kind) or (kind is int and not 0 < value < 2**31):  # type: ignore[operator]
            raise file.error(f"{ARCHITECTURE}.{name} is {printable(str(value))}")
        return value

    def _check_tensors(self, file: ModelFile, model: Any) -> None:
        for spec in model.tensors():
            info = file.tensors.get(spec.name)
            if info is None or info.shape != spec.shape:
                got = list(info.shape) if info else "not there"
                raise file.error(f"{spec.name} is {got}, expected {list(spec.shape)}")


def vit_layout(model: Any, data: Mapping[str, Any]) -> Layout:
    """ViTForImageClassification, of the classic blocks; with the data's classes and the way it takes images."""
    if model.block != "layernorm_gelu":
        raise UserError(f"model.block={model.block} has no Hugging Face layout; transformers' ViT is layernorm_gelu")
    config = {
        "architectures": ["ViTForImageClassification"],
        "model_type": "vit",
        "hidden_size": model.d_model,
        "num_hidden_layers": model.n_layers,
        "num_attention_heads": model.n_heads,
        "intermediate_size": model.d_ff,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": model.norm_eps,
        "image_size": model.image_size,
        "patch_size": model.patch,
        "num_channels": model.channels,
        "qkv_bias": True,
    }
    classes = list(data.get("classes", ()))
    classes += [f"LABEL_{i}" for i in range(len(classes), model.classes)]
    config["id2label"] = {str(i): name for i, name in enumerate(classes)}
    config["label2id"] = {name: i for i, name in enumerate(classes)}
    return Layout(config, _places(model), files={"preprocessor_config.json": _preprocessor(model, data)})


def _places(model: Any) -> dict[str, Place]:
    kernel = (model.d_model, model.channels, model.patch, model.patch)
    places = {
        "v.class_embd": Place("vit.embeddings.cls_token", form=lambda x: x[None, None]),
        "v.position_embd.weight": Place("vit.embeddings.position_embeddings", form=lambda x: x[None]),
        "v.patch_embd.weight": Place(f"{NAMES['patch_embd']}.weight", form=lambda x: x.reshape(kernel)),
    }
    for spec in model.tensors():
        if spec.name not in places:
            _, *block, name, kind = spec.name.split(".")
            at = f"vit.encoder.layer.{block[1]}." if block else ""
            places[spec.name] = Place(f"{at}{NAMES[name]}.{kind}")
    return places


def _preprocessor(model: Any, data: Mapping[str, Any]) -> dict[str, Any]:
    """Scaled until the shorter side fits, cut to the centre, normalised: what CLIP's does and ViT's does not."""
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
