"""GGUF, safetensors and the layout of transformers as formats; what does the work is toyexp.formats."""

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
    """A file for llama.cpp, with the tokenizer of a language model."""

    name: ClassVar[str] = "gguf"
    suffix: ClassVar[str] = ".gguf"
    types: ClassVar[Mapping[str, Mapping[str, Any]]] = {kind: {"type": kind} for kind in (*FILE_TYPES, *K_QUANTS)}
    dtype_setting: ClassVar[str] = "type"
    writes_adapters: ClassVar[bool] = True

    type: str = "f32"  # f32 | f16 | bf16 | q8_0 | q4_0 | q4_1 | q5_0 | q5_1, or with llama.cpp q2_k ... q6_k

    def check(self) -> None:
        """Raises UserError for a type that cannot be written, or not here."""
        formats.check_type(self.type)

    def check_model(self, model: Model) -> None:
        """Raises UserError for a model that no GGUF holds, or llama.cpp does not write."""
        formats.check_keys(model)
        if self.type in K_QUANTS and not (model.reads.text and "gguf" in model.forms):
            what = f"{self.type} is written by llama.cpp, which has no {gguf_architecture(model)}"
            raise UserError(f"{what}; {suggest('', FILE_TYPES)}")

    def write(self, export: ModelExport, path: Path) -> list[str]:
        """Writes the file."""
        model, tensors, tokenizer = export.model, export.tensors, export.tokenizer
        return formats.write_model(path, model, tensors, tokenizer, self.type, export.general, export.data)

    def write_adapter(self, plan: Plan, export: ModelExport, path: Path) -> list[str]:
        """Writes adapters for llama.cpp's --lora."""
        return formats.write_adapter(path, plan, export.tensors, export.general, export.chat_template)

    def write_again(self, file: ModelFile, path: Path, requantize: bool) -> list[str] | None:
        """Every key stays as it is, and so does every tensor whose type does."""
        return formats.rewrite_gguf(file, path, self.type, requantize) if isinstance(file, formats.GGUFFile) else None

    def notes(self, export: ModelExport) -> list[str]:
        """Say that toyexp alone reads a model without a form."""
        name = export.model.name
        return [] if "gguf" in export.model.forms else [f"toyexp alone reads it: model={name} has no form of GGUF"]

    def read(self, path: Path, models: Models) -> ModelExport:
        """The file's model and tokenizer; the file stays open as long as its tensors are held."""
        return formats.read_exported(formats.GGUFFile(path), models)


@dataclass
class Safetensors(Format):
    """A file of float32 numbers, with the keys of the GGUF in its metadata."""

    name: ClassVar[str] = "safetensors"
    suffix: ClassVar[str] = ".safetensors"

    def write(self, export: ModelExport, path: Path) -> list[str]:
        """Writes the file; the keys are its metadata `gguf`, in JSON."""
        model = export.model
        keys = {"general.architecture": gguf_architecture(model)}
        keys |= formats.model_metadata(model, export.general, export.data)
        tensors = {**export.tensors, **gguf_form(model).constants(model)}
        metadata = {"gguf": json.dumps(keys, default=lambda array: array.tolist())}
        numbers = {n: (array.shape, array.view) for n, array in tensors.items()}
        return formats.write_safetensors(path, numbers, "F32", metadata)

    def read(self, path: Path, models: Models) -> ModelExport:
        """The file's model; it has no tokenizer."""
        return formats.read_exported(formats.SafetensorsFile(path), models)


@dataclass
class HuggingFace(Format):
    """A directory for transformers, with the tokenizer of a language model; of adapters one for PEFT."""

    name: ClassVar[str] = "hf"
    suffix: ClassVar[str] = "-hf"
    types: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "hf-f16": {"dtype": "float16"},
        "hf-bf16": {"dtype": "bfloat16"},
    }
    dtype_setting: ClassVar[str] = "dtype"
    contents: ClassVar[frozenset[str]] = HF_FILES
    writes_adapters: ClassVar[bool] = True

    dtype: str = "float32"  # float32 | bfloat16 | float16

    def check(self) -> None:
        """Raises UserError for a dtype that is none of these."""
        if self.dtype not in HF_TYPES:
            raise UserError(f"dtype={self.dtype}: {suggest(self.dtype, HF_TYPES)}")

    def check_model(self, model: Model) -> None:
        """Raises UserError for a model that transformers does not have."""
        hf_layout(model, {})

    def write(self, export: ModelExport, path: Path) -> list[str]:
        """Writes the directory."""
        return formats.write_folder(path, export, self.dtype)

    def write_adapter(self, plan: Plan, export: ModelExport, path: Path) -> list[str]:
        """Writes a directory for PEFT."""
        return formats.write_adapter_folder(path, plan, export)

    def notes(self, export: ModelExport) -> list[str]:
        """What transformers and llama.cpp's converter make of it."""
        return formats.hf_notes(export.model, export.data, export.tokenizer)
