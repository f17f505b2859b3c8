"""Tokens of texts that were tokenized before, so that the second run starts at once."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np


def cache_dir() -> Path | None:
    """$TOYEXP_CACHE, or toyexp/ in the user's cache directory (XDG); None for a user without a home."""
    own, shared = os.environ.get("TOYEXP_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if own or shared:
        return Path(own) if own else Path(shared or "", "toyexp")
    try:
        return Path.home() / ".cache" / "toyexp"
    except RuntimeError:
        return None


def cached_tokens(key: str, make: Callable[[], list[np.ndarray]]) -> list[np.ndarray]:
    """The two arrays kept under `key`, or what `make` returns, kept for next time.

    A cache that cannot be read or written is only slower: it never fails a run.
    """
    folder = cache_dir()
    if folder is None:
        return make()
    path = folder / f"tokens-{hashlib.sha256(key.encode()).hexdigest()[:32]}.npz"
    # A damaged archive raises whatever zipfile and numpy come to raise on the way.
    with contextlib.suppress(Exception), open(path, "rb") as stored, np.load(stored, allow_pickle=False) as kept:
        return [kept["train"], kept["held_out"]]
    train, held_out = make()
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            np.savez(file, train=train, held_out=held_out)
        temporary.replace(path)
    except OSError:
        pass
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    return [train, held_out]
