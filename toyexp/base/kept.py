"""Where is kept what the next run need not do again, and whether that can be trusted as the user's own."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def cache_dir() -> Path | None:
    """$TOYEXP_CACHE, or toyexp/ in the user's cache directory (XDG); None for a user without a home."""
    own, shared = os.environ.get("TOYEXP_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if own or shared:
        return Path(own) if own else Path(shared or "", "toyexp")
    try:
        return Path.home() / ".cache" / "toyexp"
    except RuntimeError:
        return None


def is_private(path: Path) -> bool:
    """Whether only this user, or the system's own, can have put there what stands at `path`, or put something else.

    It and every directory above belong to one of the two, and no other may write there; in one like /tmp, where what
    is there is its owner's, others may add. False where the system knows no users, and for what is not there.
    """
    if os.name != "posix":
        return False
    try:
        there = path.resolve(strict=True)
        return all(_is_closed(part.lstat()) for part in (there, *there.parents))
    except (OSError, RuntimeError):
        return False


def _is_closed(status: os.stat_result) -> bool:
    shared = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
    return status.st_uid in (os.getuid(), 0) and (bool(shared) or not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))
