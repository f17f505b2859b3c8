"""What is begun of a command line before anything of it is read."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext


def loading(words: Sequence[str]) -> AbstractContextManager[None]:
    """As long as a sweep runs, what its jobs need may be loaded for it."""
    if not {"-m", "--multirun"} & {*words} or words[0].isidentifier():
        return nullcontext()
    from toyexp.sweep.early import loading as begun  # deferred: a run has no use for it

    return begun(words)
