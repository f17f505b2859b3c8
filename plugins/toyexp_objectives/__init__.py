"""The objectives that ship with toyexp."""

from toyexp import Register, hookimpl


@hookimpl
def register_objectives(register: Register) -> None:
    """Register the objectives."""
    from toyexp import CrossEntropy

    register(CrossEntropy)
