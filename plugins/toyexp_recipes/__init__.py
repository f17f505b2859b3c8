"""The recipes that ship with toyexp."""

from toyexp import Register, hookimpl


@hookimpl
def register_recipes(register: Register) -> None:
    """Register the recipes `scratch`, `warm`, `lora`, `full` and `vit_tiny`."""
    from toyexp_recipes.base import Full
    from toyexp_recipes.lora import Lora
    from toyexp_recipes.scratch import Scratch, VitTiny
    from toyexp_recipes.warm import Warm

    for recipe in (Scratch, Warm, Lora, Full, VitTiny):
        register(recipe)
