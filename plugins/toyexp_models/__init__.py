"""The architectures that ship with toyexp."""

from toyexp import Register, hookimpl


@hookimpl
def register_models(register: Register) -> None:
    """Llama and gpt2."""
    from toyexp_models.gpt2 import GPT2
    from toyexp_models.llama import Llama

    register(Llama)
    register(GPT2)
