"""Format plugins for GGUF, safetensors and directories for transformers. toyexp.formats reads and writes the files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import toyexp.formats as formats
from toyexp import Format, Model, ModelExport, ModelFile, Models, Plan, UserError, suggest
from toyexp.formats import FILE_TYPES, HF_FILES, HF_TYPES, K_QUANTS, gguf_architecture, gguf_form, hf_layout


@dataclass
class GGUF(Format):
    """A file for llama.cpp. For a language model it includes the tokenizer."""

    name: ClassVar[str] = "gguf"
    suffix: ClassVar[str] = ".gguf"
    types: ClassVar[Mapping[str, Mapping[str, Any]]] = {kind: {"type": kind} for kind in (*FILE_TYPES, *K_QUANTS)}
    dtype_setting: ClassVar[str] = "type"
    writes_adapters: ClassVar[bool] = True

    type: str = "f32"  # f32 | f16 | bf16 | q8_0 | q4_0 | q4_1 | q5_0 | q5_1; with llama.cpp installed q2_k ... q6_k

    def check(self) -> None:
        """Raise UserError if the setting `type` is unknown, and Unavailable if it needs llama.cpp, which is missing."""
        formats.check_type(self.type)

    def check_model(self, model: Model) -> None:
        """Raise UserError for a model that GGUF cannot hold.

        llama.cpp writes the K-quant types, so they also require an architecture that llama.cpp supports.
        """
        if model.engines:
            raise UserError(f"model={model.name}: GGUF cannot hold it")
        formats.check_keys(model)
        if self.type in K_QUANTS and not (model.reads.text and "gguf" in model.forms):
            problem = f"{self.type} is written by llama.cpp, which does not support {gguf_architecture(model)}"
            raise UserError(f"{problem}; {suggest('', FILE_TYPES)}")

    def write(self, export: ModelExport, path: Path) -> list[str]:
        """Write the file. Return a warning for each tensor whose numbers are not finite or do not fit the type."""
        model, tensors, tokenizer = export.model, export.tensors, export.tokenizer
        return formats.write_model(path, model, tensors, tokenizer, self.type, export.general, export.data)

    def write_adapter(self, plan: Plan, export: ModelExport, path: Path) -> list[str]:
        """Write a LoRA adapter as a GGUF file for llama.cpp's option --lora. Return warnings about its numbers."""
        return formats.write_adapter(path, plan, export.tensors, export.general, export.chat_template)

    def write_again(self, file: ModelFile, path: Path, requantize: bool) -> list[str] | None:
        """Copy a GGUF file to `path`, with its tensors converted to this format's type and with all its metadata.

        Return a list of warnings about converted tensors, or None if `file` cannot be copied so: llama.cpp, which
        writes K-quants, reads GGUF only. Tensors that already have the right type are copied unchanged.
        """
        if not isinstance(file, formats.GGUFFile) or (file.is_converted and self.type in K_QUANTS):
            return None
        return formats.rewrite_gguf(file, path, self.type, requantize)

    def notes(self, export: ModelExport) -> list[str]:
        """Return a note if only toyexp can read the model."""
        problem = f"only toyexp can read this file: model={export.model.name} has no form for GGUF"
        return [] if "gguf" in export.model.forms else [problem]

    def read(self, path: Path, models: Models) -> ModelExport:
        """Return the file's model and tokenizer. The file stays open while its tensors are in use."""
        return formats.read_exported(formats.GGUFFile(path), models)


@dataclass
class Safetensors(Format):
    """A file of float32 tensors. Its metadata holds the keys that the model's GGUF would have."""

    name: ClassVar[str] = "safetensors"
    suffix: ClassVar[str] = ".safetensors"

    def write(self, export: ModelExport, path: Path) -> list[str]:
        """Write the file; its metadata entry `gguf` holds the GGUF metadata as JSON.

        Return a warning for each tensor with NaN or infinite numbers.
        """
        model = export.model
        keys = {"general.architecture": gguf_architecture(model)}
        keys |= formats.model_metadata(model, export.general, export.data)
        tensors = {**export.tensors, **gguf_form(model).constants(model)}
        metadata = {"gguf": json.dumps(keys, default=lambda array: array.tolist())}
        numbers = {n: (array.shape, array.view) for n, array in tensors.items()}
        return formats.write_safetensors(path, numbers, "F32", metadata)

    def read(self, path: Path, models: Models) -> ModelExport:
        """Return the file's model, without a tokenizer."""
        return formats.read_exported(formats.SafetensorsFile(path), models)


@dataclass
class HuggingFace(Format):
    """A directory for transformers. In a LoRA run, the callback hf_export also writes the adapter, for PEFT."""

    name: ClassVar[str] = "hf"
    suffix: ClassVar[str] = "-hf"
    types: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "hf-f16": {"dtype": "float16"},
        "hf-bf16": {"dtype": "bfloat16"},
    }
    dtype_setting: ClassVar[str] = "dtype"
    contents: ClassVar[frozenset[str]] = HF_FILES
    writes_adapters: ClassVar[bool] = True
    writes_dora: ClassVar[bool] = True

    dtype: str = "float32"  # float32 | bfloat16 | float16

    def check(self) -> None:
        """Raise UserError for an unknown dtype."""
        if self.dtype not in HF_TYPES:
            raise UserError(f"dtype={self.dtype}: {suggest(self.dtype, HF_TYPES)}")

    def check_model(self, model: Model) -> None:
        """Raise UserError for a model that transformers does not support."""
        hf_layout(model, {})

    def write(self, export: ModelExport, path: Path) -> list[str]:
        """Write the directory. Return a warning for each tensor with numbers that are NaN, infinite or too large."""
        return formats.write_folder(path, export, self.dtype)

    def write_adapter(self, plan: Plan, export: ModelExport, path: Path) -> list[str]:
        """Write a LoRA adapter as a directory for PEFT. Return warnings about its numbers."""
        return formats.write_adapter_folder(path, plan, export)

    def recognises(self, path: Path) -> bool:
        """Return True for a directory with config.json and model*.safetensors, whatever its name is."""
        return formats.is_folder(path)

    def read(self, path: Path, models: Models) -> ModelExport:
        """Return the directory's model and tokenizer. Its files stay open while the tensors are in use."""
        return formats.read_folder(path, models)

    def notes(self, export: ModelExport) -> list[str]:
        """Return a note for each thing that transformers or llama.cpp's converter will read differently than toyexp."""
        return formats.hf_notes(export.model, export.data, export.tokenizer)
