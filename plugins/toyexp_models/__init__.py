"""The architectures that ship with toyexp."""

from toyexp import Register, hookimpl


@hookimpl
def register_models(register: Register) -> None:
    """Register the models of this package."""
    from toyexp_models.arcee import Arcee
    from toyexp_models.gemma3 import Gemma2, Gemma3
    from toyexp_models.gpt2 import GPT2
    from toyexp_models.granite import Granite
    from toyexp_models.lfm2 import Lfm2
    from toyexp_models.llama import Gemma, Llama, Qwen2, Qwen3
    from toyexp_models.mlp import MLP
    from toyexp_models.moe import Olmoe, Qwen3Moe
    from toyexp_models.olmo import Olmo2
    from toyexp_models.smollm3 import SmolLM3
    from toyexp_models.vit import ViT

    llamas = (Llama, Qwen2, Qwen3, Gemma, Gemma2, Gemma3, Granite, Olmo2, Arcee, SmolLM3, Qwen3Moe, Olmoe, Lfm2)
    for model in (*llamas, GPT2, ViT, MLP):
        register(model)
