"""Special tokens cut out of a text as llama.cpp does it, before the rest is tokenized."""

from __future__ import annotations

from collections.abc import Collection, Mapping

WHITE = " \t\n\v\f\r"  # white space to llama.cpp where a special token swallows it


def cut(
    text: str,
    literals: Mapping[str, int],
    before: Collection[int] = (),
    behind: Collection[int] = (),
) -> list[str | int]:
    """The text in pieces: every literal found, in the order given and not from left to right, becomes its id.

    Of these, the ids `before` swallow the white space before them, and those `behind` what stands after them.
    """
    parts: list[str | int] = [text] if text else []
    for literal, i in literals.items():
        if literal in text:
            swallows = i in before, i in behind
            parts = [
                new
                for part in parts
                for new in (_split(part, literal, i, *swallows) if isinstance(part, str) else [part])
            ]
    return parts


def _split(text: str, literal: str, i: int, before: bool, behind: bool) -> list[str | int]:
    between = text.split(literal)
    if before:
        between = [*(part.rstrip(WHITE) for part in between[:-1]), between[-1]]
    if behind:
        between = [between[0], *(part.lstrip(WHITE) for part in between[1:])]
    parts: list[str | int] = [i] * (2 * len(between) - 1)
    parts[::2] = between
    return [part for part in parts if part != ""]
