"""Find the files of a data set, and tell from their names which are for training and which are held out."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from toyexp import UserError
from toyexp.formats import READERS, record_suffix
from toyexp_data.files import iter_below, match_paths

TRAIN, VALIDATION, TEST = "train", "validation", "test"
SPLITS = {
    **dict.fromkeys(("train", "training"), TRAIN),
    **dict.fromkeys(("validation", "valid", "val", "dev", "eval"), VALIDATION),
    "test": TEST,
}
METADATA = {"state.json", "dataset_info.json", "dataset_dict.json", "dataset_infos.json", "config.json"}  # no records


def split_name(path: Path) -> str | None:
    """Return the split that a file's name, or else its directory's name, shows: train, validation, test, or None."""
    for part in (path.name, path.parent.name):
        words = re.split(r"[-_.\s]|(?<=[a-z])(?=\d)", part.lower())
        if split := next((SPLITS[word] for word in words if word in SPLITS), None):
            return split
    return None


def divide(files: Sequence[Path]) -> tuple[list[Path], list[Path], list[Path]]:
    """Return the files for training, those that are held out, and those of a third split, by their names.

    The validation split is held out, or the test split if there is no validation split. If the names do not show a
    training split and another one, all files are for training.
    """
    splits = {file: split_name(file) for file in files}
    held_out = next((split for split in (VALIDATION, TEST) if split in splits.values()), None)
    if held_out is None or TRAIN not in splits.values():
        return list(files), [], []
    kinds = ((TRAIN, None), (held_out,), {VALIDATION, TEST} - {held_out})
    train, held, others = ([file for file, split in splits.items() if split in kind] for kind in kinds)
    return train, held, others


def overlap(train: Sequence[Path], held_out: Sequence[Path]) -> Iterator[str]:
    """Yield a warning if a held-out file is also among the files to train on."""
    if shared := {file.resolve() for file in train} & {file.resolve() for file in held_out}:
        yield f"data.val_path: the held-out loss means little; {min(shared).name} is also trained on (data.path)"


def find_all(path: str, is_suitable: Callable[[Path], object], what: str, key: str = "path") -> list[Path]:
    """Return the files at `path`, a file or a pattern, or the suitable files of a directory.

    Numbers in names sort by their value. `what` names suitable files, and `key` is the setting, for the message. Raise
    UserError if there is no file. Hidden files and directories are left out.
    """
    files: list[Path] = []
    for match in match_paths(path, key):
        files += [f for f in iter_below(match) if is_suitable(f) and f.is_file()] if match.is_dir() else [match]
    if not files:
        raise UserError(f"data.{key}={path}: has no file of {what}")
    return sorted(files, key=_natural_order)


def _natural_order(path: Path) -> list[tuple[int, int, str]]:
    pieces = [piece for piece in re.split(r"(\d+)", str(path)) if piece]
    return [(0, int(piece), "") if piece.isdecimal() else (1, 0, piece) for piece in pieces]


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
    return any(any(map(_is_data, iter_below(m))) if m.is_dir() else record_suffix(m) for m in match_paths(path))


def _is_data(file: Path) -> bool:
    """Return True for a file of records that is neither metadata nor a cache of `datasets`."""
    return bool(record_suffix(file)) and file.name not in METADATA and not file.name.startswith("cache-")
