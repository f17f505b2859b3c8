"""Data sets that ship with toyexp."""

from toyexp import Register, hookimpl


@hookimpl
def register_data(register: Register) -> None:
    """Register the data sets that ship with toyexp."""
    from toyexp_data.examples import ExampleData
    from toyexp_data.images import Digits, Images
    from toyexp_data.mix import Mix
    from toyexp_data.preference import Preference
    from toyexp_data.text import Stdlib, Text
    from toyexp_data.tokens import Random, Tokens
    from toyexp_data.vectors import Vectors

    for data in (Stdlib, Text, ExampleData, Preference, Tokens, Mix, Random, Digits, Images, Vectors):
        register(data)
