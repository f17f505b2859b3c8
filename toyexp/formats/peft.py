"""Read a LoRA adapter in PEFT's format: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from toyexp.base.errors import UserError, printable
from toyexp.base.files import read_file
from toyexp.formats.layout import HFTensor, hf_layout, original_rows
from toyexp.formats.safetensors import TensorsFile, json_object
from toyexp.interfaces.model import Model
from toyexp.interfaces.plan import EMBEDDING, lora_names

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
CONFIG_LIMIT = 1 << 20  # bytes
# `general` keys, stored as metadata of TENSORS because some versions of PEFT reject unknown keys in CONFIG.
ORIGIN_KEYS = ("name", "run_id", "config_sha256", "adapter_digest", "base_model.0.name", "base_model.0.digest")
TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(embedding_)?(?P<part>[AB])(\.default)?(\.weight)?")
# Settings which, if not empty, make an adapter more than alpha / r * B A, or change its base.
UNSUPPORTED_KEYS = (
    "use_dora", "use_qalora", "modules_to_save", "lora_bias", "layer_replication", "trainable_token_indices",
    "target_parameters", "alora_invocation_tokens", "arrow_config",
)  # fmt: skip
CHANGES_BASE = ("pissa", "olora", "corda", "loftq")  # initialisations that also change the base's weights


def read_peft(folder: Path, model: Model) -> tuple[float, dict[str, np.ndarray], dict[str, str]]:
    """Read the LoRA adapter in a PEFT directory: return its alpha, its matrices by GGUF name, and metadata.

    Each linear layer has a pair of matrices A and B. The adapter adds alpha / rank * (B A), a matrix product, to the
    weight, where rank is the number of rows of A. The metadata is about the adapter's origin (see ORIGIN_KEYS). Raise
    UserError if the adapter is damaged, fits another model, or is not plain LoRA.
    """
    config = _config(folder / CONFIG)
    alpha, patterns = _number(folder, config, "lora_alpha", 8), config.get("rank_pattern") or {}  # 8 as in PEFT
    ranks = [_number(folder, config, "r", 8), *(patterns.values() if isinstance(patterns, dict) else ())]
    targets = {
        stored.name.removesuffix(".weight"): (name, stored) for name, stored in _stored_tensors(folder, model).items()
    }
    file = _tensors(folder)
    pairs: dict[str, np.ndarray] = {}
    for stored_name in file.tensors:
        match = TENSOR.fullmatch(stored_name)
        if match is None or match["module"] not in targets:
            hint = "; in PEFT, save it with save_embedding_layers=False" if ".base_layer." in stored_name else ""
            raise file.error(f"its tensor {printable(stored_name)} matches no linear layer of this {model.name}{hint}")
        target, stored = targets[match["module"]]
        array, (a, b) = file.read(stored_name), lora_names(target)
        if array.ndim != 2:
            raise file.error(f"{printable(stored_name)} has the shape {list(array.shape)}, expected a matrix")
        if (rank := array.shape[match["part"] == "B"]) not in ranks:
            raise file.error(f"{printable(stored_name)} has rank {rank}; {CONFIG} has r={config.get('r', 8)}")
        if match["part"] == "A":
            pairs[a] = array.T if target == EMBEDDING else array
        else:
            scale = _relative_scale(config, match["module"], array, alpha, folder)
            pairs[b] = original_rows(array, stored) * np.float32(scale)
    if not pairs:
        raise file.error("holds no tensors")
    return alpha, pairs, {key: str(value) for key in ORIGIN_KEYS if (value := file.metadata.get(f"general.{key}"))}


def _config(path: Path) -> Mapping[str, Any]:
    config = json_object(read_file(path, CONFIG_LIMIT), f"{path}:")
    kind = config.get("peft_type", "LORA")
    if kind != "LORA":
        raise UserError(f"{path}: has peft_type={printable(str(kind))}; only LORA is supported")
    extras = [f"{key}={printable(str(config[key]))}" for key in UNSUPPORTED_KEYS if config.get(key)]
    if config.get("bias", "none") != "none":
        extras.append(f"bias={printable(str(config['bias']))}")
    if str(config.get("init_lora_weights", "")).lower().startswith(CHANGES_BASE):
        extras.append(f"init_lora_weights={printable(str(config['init_lora_weights']))}")
    if extras:
        merged = path.parent.with_name("model.gguf")  # of the run that wrote adapter-hf
        remedy = f"name the merged model: {merged}" if merged.is_file() else "merge the adapter with PEFT"
        raise UserError(f"{path}: {extras[0]} is not supported (only plain LoRA on linear layers is); {remedy}")
    return config


def _number(folder: Path, config: Mapping[str, Any], key: str, default: int | None = None) -> float:
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
        raise UserError(f"{folder / CONFIG}: {key} is {printable(str(value))}, expected a number above 0")
    return float(value)


def _stored_tensors(folder: Path, model: Model) -> dict[str, HFTensor]:
    """Return how transformers stores the weight of each linear layer, keyed by the weight's GGUF name.

    Raise UserError if transformers does not have the model.
    """
    try:
        stored = hf_layout(model, {}).tensors
    except UserError as error:
        raise UserError(f"{folder}: a PEFT adapter needs a base model that transformers has: {error}") from None
    linears = [t.name for t in model.tensors() if len(t.shape) == 2 and not t.name.endswith("position_embd.weight")]
    return {name: stored[name] for name in linears}


def _tensors(folder: Path) -> TensorsFile:
    pickled = folder / "adapter_model.bin"
    if not (folder / TENSORS).exists() and pickled.exists():
        raise UserError(f"{pickled}: is a pickle, which could run code; save it as {TENSORS}")
    return TensorsFile(folder / TENSORS)


def _relative_scale(config: Mapping[str, Any], module: str, b: np.ndarray, alpha: float, folder: Path) -> float:
    """Return the factor by which PEFT scales a LoRA pair in addition to alpha / rank.

    The factor is 1 if the adapter uses neither rsLoRA nor alpha_pattern.
    """
    scale, patterns = alpha, config.get("alpha_pattern") or {}
    for pattern in patterns if isinstance(patterns, dict) else ():
        if not re.fullmatch(r"[\w.]+", pattern):  # an untrusted regular expression may never end
            problem = f"alpha_pattern has {printable(pattern)}, only module names are supported"
            raise UserError(f"{folder / CONFIG}: {problem}; merge it with PEFT")
        if f".{module}".endswith(f".{pattern}"):
            scale = _number(folder, patterns, pattern)
            break
    return scale / alpha * (math.sqrt(b.shape[1]) if config.get("use_rslora") else 1)
