"""The recipes that ship with toyexp."""

from toyexp import Register, hookimpl


@hookimpl
def register_recipes(register: Register) -> None:
    """scratch, warm and vit_tiny."""
    from toyexp_recipes.scratch import Scratch
    from toyexp_recipes.vit_tiny import VitTiny
    from toyexp_recipes.warm import Warm

    register(Scratch)
    register(Warm)
    register(VitTiny)
