"""GGUF, safetensors and the layout of transformers as formats; what does the work is toyexp.formats."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import toyexp.formats as formats
from toyexp import Exported, Format, Model, ModelFile, Models, Plan, UserError, suggest
from toyexp.formats import FILE_TYPES, HF_FILES, HF_TYPES, K_QUANTS, architecture_of, gguf_form, layout_of


@dataclass
class GGUF(Format):
    """A file for llama.cpp, with the tokenizer of a language model."""

    name: ClassVar[str] = "gguf"
    suffix: ClassVar[str] = ".gguf"
    types: ClassVar[Mapping[str, Mapping[str, Any]]] = {kind: {"type": kind} for kind in (*FILE_TYPES, *K_QUANTS)}
    numbers: ClassVar[str] = "type"
    adapters: ClassVar[bool] = True

    type: str = "f32"  # f32 | f16 | bf16 | q8_0 | q4_0 | q4_1 | q5_0 | q5_1, or with llama.cpp q2_k ... q6_k

    def check(self) -> None:
        """Raises UserError for a type that cannot be written, or not here."""
        formats.check_type(self.type)

    def check_model(self, model: Model) -> None:
        """Raises UserError for a model that no GGUF holds, or llama.cpp does not write."""
        formats.check_keys(model)
        if self.type in K_QUANTS and not (model.reads.text and "gguf" in model.forms):
            what = f"{self.type} is written by llama.cpp, which has no {architecture_of(model)}"
            raise UserError(f"{what}; {suggest('', FILE_TYPES)}")

    def write(self, exported: Exported, path: Path) -> list[str]:
        """Writes the file."""
        model, tensors, tokenizer = exported.model, exported.tensors, exported.tokenizer
        return formats.write_model(path, model, tensors, tokenizer, self.type, exported.general, exported.data)

    def write_adapter(self, plan: Plan, exported: Exported, path: Path) -> list[str]:
        """Writes adapters for llama.cpp's --lora."""
        return formats.write_adapter(path, plan, exported.tensors, exported.general, exported.chat_template)

    def write_again(self, file: ModelFile, path: Path, requantize: bool) -> list[str] | None:
        """Every key stays as it is, and so does every tensor whose type does."""
        return formats.rewrite_gguf(file, path, self.type, requantize) if isinstance(file, formats.GGUFFile) else None

    def notes(self, exported: Exported) -> list[str]:
        """Say that toyexp alone reads a model without a form."""
        name = exported.model.name
        return [] if "gguf" in exported.model.forms else [f"toyexp alone reads it: model={name} has no form of GGUF"]

    def read(self, path: Path, models: Models) -> Exported:
        """The file's model and tokenizer; the file stays open as long as its tensors are held."""
        return formats.exported_of(formats.GGUFFile(path), models)


@dataclass
class Safetensors(Format):
    """A file of float32 numbers, with the keys of the GGUF in its metadata."""

    name: ClassVar[str] = "safetensors"
    suffix: ClassVar[str] = ".safetensors"

    def write(self, exported: Exported, path: Path) -> list[str]:
        """Writes the file; the keys are its metadata `gguf`, in JSON."""
        model = exported.model
        keys = {"general.architecture": architecture_of(model)}
        keys |= formats.model_metadata(model, exported.general, exported.data)
        tensors = {**exported.tensors, **gguf_form(model).constants(model)}
        metadata = {"gguf": json.dumps(keys, default=lambda array: array.tolist())}
        numbers = {n: (array.shape, array.view) for n, array in tensors.items()}
        return formats.write_safetensors(path, numbers, "F32", metadata)

    def read(self, path: Path, models: Models) -> Exported:
        """The file's model; it has no tokenizer."""
        return formats.exported_of(formats.SafetensorsFile(path), models)


@dataclass
class HuggingFace(Format):
    """A directory for transformers, with the tokenizer of a language model; of adapters one for PEFT."""

    name: ClassVar[str] = "hf"
    suffix: ClassVar[str] = "-hf"
    types: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "hf-f16": {"dtype": "float16"},
        "hf-bf16": {"dtype": "bfloat16"},
    }
    numbers: ClassVar[str] = "dtype"
    contents: ClassVar[frozenset[str]] = HF_FILES
    adapters: ClassVar[bool] = True

    dtype: str = "float32"  # float32 | bfloat16 | float16

    def check(self) -> None:
        """Raises UserError for a dtype that is none of these."""
        if self.dtype not in HF_TYPES:
            raise UserError(f"dtype={self.dtype}: {suggest(self.dtype, HF_TYPES)}")

    def check_model(self, model: Model) -> None:
        """Raises UserError for a model that transformers does not have."""
        layout_of(model, {})

    def write(self, exported: Exported, path: Path) -> list[str]:
        """Writes the directory."""
        return formats.write_folder(path, exported, self.dtype)

    def write_adapter(self, plan: Plan, exported: Exported, path: Path) -> list[str]:
        """Writes a directory for PEFT."""
        return formats.write_adapter_folder(path, plan, exported)

    def notes(self, exported: Exported) -> list[str]:
        """What transformers and llama.cpp's converter make of it."""
        return formats.hf_notes(exported.model, exported.data, exported.tokenizer)
