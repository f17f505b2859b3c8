"""Paths on the command line that contain `~` or non-ASCII letters, the cache directory, and private files."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_TEXT_FLAGS = ("--prompt",)  # flags whose value is text, not a path


def expand_overrides(words: Sequence[str]) -> list[str]:
    """Expand `~` and quote non-ASCII values in command-line words; leave a word that is an existing path as it is."""
    return [word if os.path.lexists(word) else quote_letters(expand_home(word)) for word in words]


def expand_home(word: str) -> str:
    """Expand each `~` that begins an unquoted value: `key=~/a,~/b`, `--to=~/c`."""
    key, equals, value = word.partition("=")
    if not equals or key in _TEXT_FLAGS:
        return word
    return key + equals + re.sub(r"(^|[\[,])(~[\w.-]*)(?=[/,\]]|$)", lambda m: m[1] + _expand_user(m[2]), value)


def quote_letters(word: str) -> str:
    """Quote values with non-ASCII letters, which Hydra's grammar does not accept. Do not change values in quotes."""
    key, equals, value = word.partition("=")
    if not equals or key.startswith("-") or value.isascii() or set(value) & set("\"'\\"):
        return word
    words = r"((?:^|[\[,])\s*)([^\[\],(){}:=]*[^\[\],(){}:=\s])(?=\s*(?:[,\]]|$))"
    return key + equals + re.sub(words, lambda m: m[0] if m[2].isascii() else f'{m[1]}"{m[2]}"', value)


def expand_path(value: Any) -> Any:
    """Expand `~` in a configuration file's value if it is text that begins with `~/`; return other values unchanged."""
    return _expand_user(value) if isinstance(value, str) and value.startswith("~/") else value


def _expand_user(path: str) -> str:
    return os.path.expanduser(path)  # noqa: PTH111 - Path.expanduser() raises for an unknown user


def cache_dir() -> Path | None:
    """Return $TOYEXP_CACHE, or toyexp/ in the user's cache directory (XDG); None if the user has no home."""
    names = ("TOYEXP_CACHE", "XDG_CACHE_HOME")
    toyexp_cache, user_cache = (_expand_user(os.environ.get(name, "").strip()) for name in names)
    if toyexp_cache or user_cache:
        return Path(toyexp_cache or f"{user_cache}/toyexp")
    try:
        return Path.home() / ".cache" / "toyexp"
    except RuntimeError:
        return None


def hub_cache(home: Path, environment: Mapping[str, str]) -> Path:
    """Return the directory in which huggingface_hub keeps what it downloads."""
    cache = Path(environment.get("XDG_CACHE_HOME") or home / ".cache")
    folder = environment.get("HF_HUB_CACHE") or Path(environment.get("HF_HOME") or cache / "huggingface", "hub")
    return Path(_expand_user(str(folder)))


def find_cached_repository(path: Path) -> Path:
    """Return the download in the Hugging Face cache if `path` is the id of a repository, ORG/NAME, and no file.

    Return `path` itself if the cache has no weights of that repository in safetensors.
    """
    folder = hub_cache(Path(_expand_user("~")), os.environ) / f"models--{'--'.join(path.parts)}"
    if len(path.parts) != 2 or os.path.lexists(path) or not os.access(main := folder / "refs" / "main", os.R_OK):
        return path
    snapshot = folder / "snapshots" / main.read_text(errors="replace").strip()
    return snapshot if any(snapshot.glob("*.safetensors")) else path


def is_private(path: Path) -> bool:
    """Return True if only this user or root can have written `path`; False on Windows."""
    if getattr(os, "getuid", None) is None:
        return False
    try:
        resolved = path.resolve(strict=True)
        return all(_is_entry_private(part.lstat()) for part in (resolved, *resolved.parents))
    except (OSError, RuntimeError):
        return False


def _is_entry_private(status: os.stat_result) -> bool:
    is_sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
    return status.st_uid in (os.getuid(), 0) and (bool(is_sticky) or not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))
