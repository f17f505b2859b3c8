"""Write a model as a transformers directory (config.json, model.safetensors), or LoRA adapters for PEFT."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from toyexp.base.errors import printable
from toyexp.base.user_paths import find_cached_repository
from toyexp.base.writing import convert_write_errors, dump_json, write_atomically, write_synced
from toyexp.formats.layout import HF_TYPES, Conversion, HFTensor, hf_layout
from toyexp.formats.peft import ORIGIN_KEYS
from toyexp.formats.safetensors import Tensor, write_safetensors
from toyexp.formats.sentencepiece_model import missing_requirement, sentencepiece_model
from toyexp.interfaces.format import ModelExport
from toyexp.interfaces.model import Model
from toyexp.interfaces.plan import LoraAdapter, Plan, lora_names
from toyexp.tokenizers.byte_level import BPE, Bytes, Characters
from toyexp.tokenizers.sentencepiece import SentencePiece
from toyexp.tokenizers.tokenizer import Tokenizer

TRANSFORMERS_VERSION = "4.51.0"  # format of config.json; without it 4.57 warns about a Mistral vocabulary
METADATA = {"format": "pt"}  # required by transformers
HUB = re.compile(r"https://huggingface\.co/([\w.-]+/[\w.-]+)/?")
TEXT_CLASSES = "AutoModelForCausalLM", "text-generation"
IMAGE_CLASSES = "AutoModelForImageClassification", "image-classification"


def write_folder(path: Path, exported: ModelExport, dtype: str = "float32") -> list[str]:
    """Write a model as the transformers directory `path`, atomically; replace an existing directory.

    Tensors are read one at a time. Return a sentence for each tensor with numbers that are not finite or do not fit the
    dtype. Raise UserError for a model that transformers does not have.
    """
    model, tokenizer, layout = exported.model, exported.tokenizer, hf_layout(exported.model, exported.data)
    tensors: dict[str, Tensor] = {}
    for spec in model.tensors():
        stored = layout.tensors[spec.name]
        shape = stored.form(np.broadcast_to(np.float32(0), spec.shape)).shape
        if stored.is_split:
            for i in range(shape[0]):
                convert = partial(_convert_tensor, exported.tensors, spec.name, stored, i)
                tensors[stored.name.format(i)] = shape[1:], convert
        else:
            tensors[stored.name] = shape, partial(_convert_tensor, exported.tensors, spec.name, stored)
    for name, shape in layout.zeros.items():
        tensors[name] = shape, partial(np.zeros, shape, np.float32)
    config = {**layout.config, "torch_dtype": dtype, "transformers_version": TRANSFORMERS_VERSION}
    settings = dict(layout.files)
    if model.reads.text:
        ids = _special_ids(tokenizer)
        config |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, **ids}
        if tokenizer is not None and "eot_token_id" in config:
            config["eot_token_id"] = tokenizer.source.get("ggml.eot_token_id", tokenizer.eos)
        settings["generation_config.json"] = ids
    settings["config.json"] = config
    files = {name: dump_json(content, indent=2).encode() for name, content in settings.items()}
    files["README.md"] = model_card(exported).encode()
    if tokenizer is not None:
        files |= tokenizer_files(tokenizer, layout.tokenizer_replaced)
    with _directory(path) as folder:
        for name, content in files.items():
            write_synced(folder / name, content)
        return write_safetensors(folder / "model.safetensors", tensors, HF_TYPES[dtype], METADATA)


def hf_notes(model: Model, data: Mapping[str, Any], tokenizer: Tokenizer | None) -> list[str]:
    """Return sentences about an exported directory.

    Each sentence names something that transformers or llama.cpp's converter will read differently from toyexp.
    """
    lines: list[str] = []
    if isinstance(tokenizer, SentencePiece) and (count := tokenizer.count_reordered()):
        lines.append(f"transformers may merge {count} of the {tokenizer.vocab} tokens in another order than llama.cpp")
    problem = conversion_problem(hf_layout(model, data).conversion, tokenizer) if model.reads.text else ""
    if problem:
        lines.append(f"llama.cpp's convert_hf_to_gguf.py cannot read this back: {problem}")
    return lines


def write_adapter_folder(path: Path, plan: Plan, exported: ModelExport) -> list[str]:
    """Write the plan's LoRA adapters as a directory for PEFT, atomically, in float32.

    The rows of each matrix B are written in the order that transformers uses. Return a sentence for each tensor that is
    not finite.
    """
    adapters = [a for a in plan.adapters if isinstance(a, LoraAdapter)]
    stored_tensors = hf_layout(plan.model, {}).tensors
    tensors: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}  # by module, as the next one
    alphas: dict[str, float] = {}
    for adapter in adapters:
        stored, (a, b) = stored_tensors[adapter.target], (exported.tensors[name] for name in lora_names(adapter.target))
        module = stored.name.removesuffix(".weight")
        ranks[module], alphas[module] = b.shape[1], plan.alphas[adapter.target]
        pair = {"lora_A.weight": a, "lora_B.weight": stored.rows(b)}
        for name, array in ({"lora_embedding_A": a.T, "lora_embedding_B": b} if adapter.is_embedding else pair).items():
            tensors[f"base_model.model.{module}.{name}"] = array.shape, array.copy
        if adapter.dora:
            magnitude = stored.rows(exported.tensors[adapter.tensors[2]])
            tensors[f"base_model.model.{module}.lora_magnitude_vector"] = magnitude.shape, magnitude.copy
    rank, alpha = (Counter(numbers.values()).most_common(1)[0][0] for numbers in (ranks, alphas))
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if plan.model.reads.text else None,
        "base_model_name_or_path": _repository(exported) or exported.about.get("base"),
        "inference_mode": True,
        "r": rank,
        "rank_pattern": {module: own for module, own in ranks.items() if own != rank},
        "lora_alpha": alpha,
        "alpha_pattern": {module: own for module, own in alphas.items() if own != alpha},
        "use_dora": adapters[0].dora,
        "lora_dropout": adapters[0].dropout,
        "target_modules": [*ranks],
        "fan_in_fan_out": any(stored_tensors[a.target].form is np.transpose for a in adapters),
        "bias": "none",
    }
    with _directory(path) as folder:
        write_synced(folder / "adapter_config.json", dump_json(config, indent=2).encode())
        write_synced(folder / "README.md", model_card(exported, adapter=True).encode())
        origin = {f"general.{key}": str(exported.general[key]) for key in ORIGIN_KEYS if key in exported.general}
        return write_safetensors(folder / "adapter_model.safetensors", tensors, "F32", METADATA | origin)


def model_card(exported: ModelExport, adapter: bool = False) -> str:
    """Return the text of README.md, which describes the model, its origin, its metrics and how to load it."""
    model, general, repository = exported.model, exported.general, _repository(exported)
    (auto, task), licence = TEXT_CLASSES if model.reads.text else IMAGE_CLASSES, str(general.get("license", ""))
    front = [f"library_name: {'peft' if adapter else 'transformers'}", f"pipeline_tag: {task}", "tags: [toyexp]"]
    front += [f"license: {licence}"] if re.fullmatch(r"[a-z0-9.-]+", licence) else []
    front += [f"base_model: {repository}"] if repository else []
    front += [f"datasets: [{dataset}]"] if (dataset := exported.about.get("dataset")) else []
    summary = f"{model.name} of {sum(math.prod(t.shape) for t in model.tensors()):,} parameters"
    keys = {"description": "description", "run": "run_id", "step": "step", "base": "base_model.0.name"}
    facts = {name: general.get(key) for name, key in keys.items()}
    facts |= {key: value for key, value in exported.about.items() if value is not None and key != "command"}
    command = exported.about.get("command")
    repeat = ["```", "", "The command that trained it:", "", "```bash", command] if command else []
    cells = {key: printable(str(value)).replace("|", " ") for key, value in facts.items() if value is not None}
    load = [f"from transformers import {auto}", "", f'model = {auto}.from_pretrained(".")  # this directory']
    if adapter:
        is_folder = (find_cached_repository(Path(str(facts["base"]))) / "config.json").is_file()
        hint = "the base above" if is_folder else "to make BASE: toyexp export FILE.gguf --type hf --to BASE"
        first = f'base = {auto}.from_pretrained("BASE")  # {hint}'
        load = ["from peft import PeftModel", load[0], "", first, 'model = PeftModel.from_pretrained(base, ".")']
    return "\n".join([
        "---", *front, "---", "", f"# {printable(str(general.get('name', model.name)))}", "",
        f"A {'LoRA adapter for a ' if adapter else ''}{summary}, written by toyexp.", "",
        "| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in cells.items()), "",
        "```python", *load, *repeat, "```", "",
    ])  # fmt: skip


def _repository(exported: ModelExport) -> str | None:
    """Return the Hugging Face repository OWNER/NAME of the base model, or None if the metadata does not name one."""
    match = HUB.fullmatch(str(exported.general.get("base_model.0.repo_url", "")))
    return match[1] if match else None


def _convert_tensor(
    tensors: Mapping[str, np.ndarray], name: str, stored: HFTensor, index: int | None = None
) -> np.ndarray:
    array = tensors[name] if index is None else tensors[name][index]
    return stored.form(stored.rows(array))


def _special_ids(tokenizer: Tokenizer | None) -> dict[str, Any]:
    if tokenizer is None:
        return {}
    ends = [tokenizer.eos, *sorted(tokenizer.end_ids - {tokenizer.eos})]
    bos = {} if tokenizer.bos is None else {"bos_token_id": tokenizer.bos}
    return {**bos, "eos_token_id": ends if len(ends) > 1 else ends[0], "pad_token_id": tokenizer.padding}


@contextmanager
def _directory(path: Path) -> Iterator[Path]:
    """Yield a temporary directory, which is renamed to `path` at the end; raise RunFailed if it cannot be written."""
    with convert_write_errors(path), write_atomically(path) as folder:
        folder.mkdir()
        yield folder


GPT2_TOKENS = 50257


def conversion_problem(conversion: Conversion, tokenizer: Tokenizer | None) -> str:
    """Return why llama.cpp's converter rejects or misreads a transformers directory; "" if there is no problem."""
    if tokenizer is None:
        return "the model has no tokenizer"
    if isinstance(tokenizer, Bytes | Characters):
        return f"it has no {tokenizer.kind} tokenizer"
    if tokenizer.kind not in conversion.kinds:
        return f"for this architecture it has no {tokenizer.kind} tokenizer"
    # A BPE that toyexp trained has GPT-2's pre-tokenizer, also if it was read back from a GGUF.
    is_small = tokenizer.source.get("ggml.pre", "gpt-2") == "gpt-2" and tokenizer.vocab < GPT2_TOKENS
    if isinstance(tokenizer, BPE) and is_small:
        return "it knows only published byte-level BPE vocabularies, not small ones of your own"
    if isinstance(tokenizer, SentencePiece):
        if conversion.prefix not in (None, tokenizer.prefix):
            return f"for this architecture it sets add_space_prefix={str(conversion.prefix).lower()}"
        return missing_requirement(tokenizer) or conversion.ignored_setting
    return conversion.ignored_setting


# For some model_types transformers 5 only reads vocabulary and merges from tokenizer.json, and replaces the
# pre-tokenizer and normaliser. It keeps them if the directory has its own tokenizer class, so toyexp writes one.
# transformers only imports the class for users who allow code from the directory (trust_remote_code=True).
CLASS = {"AutoTokenizer": ["tokenization.FromFile", "tokenization.FromFile"]}  # slow and fast tokenizer
CODE = '''\
"""Use this directory's tokenizer.json, also if transformers has another tokenizer for its model_type."""

from transformers import PreTrainedTokenizerFast


class FromFile(PreTrainedTokenizerFast):
    """Tokenizer read from tokenizer.json, unchanged."""
'''


def tokenizer_files(tokenizer: Tokenizer, is_replaced: bool) -> dict[str, bytes]:
    """Return the tokenizer's files as {name: content}.

    If `is_replaced`, transformers would use its own tokenizer for this model type instead of tokenizer.json. The files
    then include a tokenizer class that prevents this.
    """
    library, settings = tokenizer.to_huggingface()
    files = {"tokenizer.json": library.encode()}
    if isinstance(tokenizer, SentencePiece):
        settings |= _sentencepiece_settings(tokenizer, library)
        if not missing_requirement(tokenizer):
            files["tokenizer.model"] = sentencepiece_model(tokenizer)
    if is_replaced:
        settings["auto_map"] = CLASS
        files["tokenization.py"] = CODE.encode()
    return files | {"tokenizer_config.json": dump_json(settings, indent=2).encode()}


def _sentencepiece_settings(tokenizer: SentencePiece, library: str) -> dict[str, Any]:
    """Return entries for tokenizer_config.json that llama.cpp's converter reads.

    `library` is the content of tokenizer.json, from which the added tokens are taken.
    """
    added = {str(token.pop("id")): token for token in json.loads(library)["added_tokens"]}
    not_special = {i: token for i, token in added.items() if not token["special"]}
    settings: dict[str, Any] = {"added_tokens_decoder": not_special} if not_special else {}
    if tokenizer.unknown is not None:
        settings["unk_token"] = tokenizer.pieces[tokenizer.unknown]
    return settings | {"add_prefix_space": tokenizer.prefix}
