"""Data sets that ship with toyexp."""

from toyexp import Register, hookimpl


@hookimpl
def register_data(register: Register) -> None:
    """Register the data sets `stdlib`, `text`, `jsonl`, `tokens`, `random`, `digits` and `images`."""
    from toyexp_data.images import Digits, Images
    from toyexp_data.jsonl import Jsonl
    from toyexp_data.text import Stdlib, Text
    from toyexp_data.tokens import Random, Tokens

    for data in (Stdlib, Text, Jsonl, Tokens, Random, Digits, Images):
        register(data)
