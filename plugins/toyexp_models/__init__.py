"""The architectures that ship with toyexp."""

from toyexp import Register, hookimpl


@hookimpl
def register_models(register: Register) -> None:
    """Register the models `llama`, `qwen2`, `qwen3`, `gemma`, `gpt2`, `vit` and `mlp`."""
    from toyexp_models.gpt2 import GPT2
    from toyexp_models.llama import Gemma, Llama, Qwen2, Qwen3
    from toyexp_models.mlp import MLP
    from toyexp_models.vit import ViT

    for model in (Llama, Qwen2, Qwen3, Gemma, GPT2, ViT, MLP):
        register(model)
