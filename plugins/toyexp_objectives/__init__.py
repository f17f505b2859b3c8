"""The objectives that ship with toyexp."""

from toyexp import Register, hookimpl


@hookimpl
def register_objectives(register: Register) -> None:
    """Register the objectives."""
    from toyexp import CrossEntropy
    from toyexp_objectives.distil import Distil
    from toyexp_objectives.preference import Preference
    from toyexp_objectives.vectors import MSE, Contrastive

    for objective in (CrossEntropy, MSE, Contrastive, Distil, Preference):
        register(objective)
