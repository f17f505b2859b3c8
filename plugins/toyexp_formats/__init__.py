"""Formats of model files that ship with toyexp."""

from toyexp import Register, hookimpl


@hookimpl
def register_formats(register: Register) -> None:
    """Register the formats `gguf`, `safetensors` and `hf` (directories for transformers and PEFT)."""
    from toyexp_formats.shipped import GGUF, HuggingFace, Safetensors

    for form in (GGUF, Safetensors, HuggingFace):
        register(form)
