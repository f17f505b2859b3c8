"""Find files of records: JSON lines, JSON, CSV, Parquet and Arrow."""

from __future__ import annotations

from pathlib import Path

from toyexp import UserError
from toyexp.formats import READERS, record_suffix
from toyexp_data.files import match_paths
from toyexp_data.splits import find_all

METADATA = {"state.json", "dataset_info.json", "dataset_dict.json", "dataset_infos.json", "config.json"}


def find_records(path: str, key: str = "path") -> list[Path]:
    """Return the files of records at `path`, a file, a directory or a pattern; numbers in names sort by their value.

    Raise UserError if there are none, or if a directory has several formats.
    """
    files = find_all(path, _is_data, f"examples ({' '.join(READERS)})", key)
    suffixes = sorted({record_suffix(file) for file in files})
    if len(suffixes) > 1:
        several = " and ".join(f"{sum(record_suffix(f) == s for f in files)} {s or 'other'}" for s in suffixes)
        choice = f"data.{key}='{path.rstrip('/*')}/*{suffixes[-1]}'"
        raise UserError(f"data.{key}={path}: has {several} files; choose one format: {choice}")
    return files


def has_records(path: str) -> bool:
    """Return True if there is a file of records at `path`, a file, a directory or a pattern."""
    return any(any(map(_is_data, m.rglob("*"))) if m.is_dir() else record_suffix(m) for m in match_paths(path))


def _is_data(file: Path) -> bool:
    """Return True for a file of records that is neither metadata nor a cache of `datasets`."""
    return bool(record_suffix(file)) and file.name not in METADATA and not file.name.startswith("cache-")
