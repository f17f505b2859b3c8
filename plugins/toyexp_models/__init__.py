"""The architectures that ship with toyexp."""

from toyexp import Register, hookimpl


@hookimpl
def register_models(register: Register) -> None:
    """llama, gpt2 and vit."""
    from toyexp_models.gpt2 import GPT2
    from toyexp_models.llama import Llama
    from toyexp_models.vit import ViT

    register(Llama)
    register(GPT2)
    register(ViT)
