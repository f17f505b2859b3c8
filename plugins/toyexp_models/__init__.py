"""The architectures that ship with toyexp."""

from toyexp import Model, Register, hookimpl


@hookimpl
def register_models(register: Register) -> None:
    """Register the models of this package."""
    from toyexp_models.lab import FAMILIES, Lab
    from toyexp_models.lfm2 import Lfm2
    from toyexp_models.mamba2 import Mamba2
    from toyexp_models.mlp import MLP
    from toyexp_models.vit import ViT

    models: tuple[type[Model], ...] = (*FAMILIES, Lfm2, Mamba2, Lab, ViT, MLP)
    for model in models:
        register(model)
