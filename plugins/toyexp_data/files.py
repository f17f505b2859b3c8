"""Find the files of a data set, and tell from their names which are for training and which are held out."""

from __future__ import annotations

import glob
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from toyexp import UserError
from toyexp.base import iter_files, require_file, system_message, wrong_kind
from toyexp.formats import READERS, record_suffix

TRAIN, VALIDATION, TEST = "train", "validation", "test"
SPLITS = {
    **dict.fromkeys(("train", "training"), TRAIN),
    **dict.fromkeys(("validation", "valid", "val", "dev", "eval"), VALIDATION),
    "test": TEST,
}
METADATA = {"state.json", "dataset_info.json", "dataset_dict.json", "dataset_infos.json", "config.json"}  # no records

T = TypeVar("T")


@dataclass
class FoundFiles:
    """Files of a data set in a fixed order, and the reasons why other files were left out."""

    files: list[Path] = field(default_factory=list)
    others: int = 0  # files with another suffix
    unreadable: list[str] = field(default_factory=list)  # files, links and directories, each with the reason
    held_out: list[Path] = field(default_factory=list)  # files that are held out; empty: the end of each file is
    columns: Mapping[str, str] | None = None  # other names of the columns of records; None: the files are text

    def omissions(self) -> list[str]:
        """Return notes about files that `data.suffixes` leaves out, and about unreadable files."""
        count, skipped = len(self.files), self.unreadable
        notes = [f"{count} of {count + self.others} files: data.suffixes"] if self.others else []
        return [*notes, *(f"{len(skipped)} skipped, such as {first}" for first in skipped[:1])]


def find_files(
    path: str, is_suitable: Callable[[Path], bool], what: str, key: str = "path", hint: str = ""
) -> FoundFiles:
    """Return the files at `path`: a file, the files that match a pattern, or the suitable files of a directory.

    Numbers in names sort by their value. Hidden files and directories are left out. `what` names suitable files, `key`
    is the setting, and `hint` ends the message. Raise UserError if there is no file.
    """
    found = FoundFiles()
    for match in match_paths(path, key):
        if not match.is_dir():
            found.files.append(match)
            continue
        files = list(iter_files(match, found.unreadable))
        suitable = [file for file in files if is_suitable(file)]
        found.others += len(files) - len(suitable)
        reasons = {file: reason for file in suitable if (reason := _why_unreadable(file))}
        found.unreadable += [f"{file}: {reason}" for file, reason in reasons.items()]
        found.files += [file for file in suitable if file not in reasons]
    if not found.files:
        reason = f" ({len(found.unreadable)} skipped, such as {found.unreadable[0]})" if found.unreadable else ""
        raise UserError(f"data.{key}={path}: contains no {what}{reason}{hint}")
    found.files.sort(key=_natural_order)
    return found


def match_paths(path: str, key: str = "path") -> list[Path]:
    """Return the path itself if it exists, else the paths that match it as a glob pattern, else raise UserError.

    `key` is the setting of the section `data` that has this path, for the message.
    """
    kinds = stat.S_IFREG, stat.S_IFDIR
    if os.path.lexists(path) or not glob.has_magic(path):
        return [require_file(path, f"data.{key}={path}", *kinds)]
    matches = glob.glob(path, recursive=True)  # noqa: PTH207 - Path.glob takes no absolute pattern
    if not matches:
        raise UserError(f"data.{key}={path}: matches no file (looked in {Path.cwd()})")
    return [require_file(match, match, *kinds) for match in matches]


def _why_unreadable(path: Path) -> str | None:
    try:
        reason = wrong_kind(path.stat().st_mode)
        return reason and reason.partition(",")[0]  # without the remedy
    except OSError as error:
        return system_message(error)


def _natural_order(path: Path) -> list[tuple[int, int, str]]:
    pieces = [piece for piece in re.split(r"(\d+)", str(path)) if piece]
    return [(0, int(piece), "") if piece.isdecimal() else (1, 0, piece) for piece in pieces]


# -- records ----------------------------------------------------------------------------------------------------------


def find_records(path: str, key: str = "path") -> list[Path]:
    """Return the files of records at `path`, as `find_files` does. Raise UserError if they have several formats."""
    return require_one_format(
        find_files(path, is_record, f"file of examples ({' '.join(READERS)})", key).files, path, key
    )


def require_one_format(files: list[Path], path: str, key: str = "path") -> list[Path]:
    """Return the files of records at `path`. Raise UserError if they have several formats."""
    suffixes = sorted({record_suffix(file) for file in files})
    if len(suffixes) > 1:
        several = " and ".join(f"{sum(record_suffix(f) == s for f in files)} {s or 'other'}" for s in suffixes)
        choice = f"data.{key}='{path.rstrip('/*')}/*{suffixes[-1]}'"
        raise UserError(f"data.{key}={path}: has {several} files; choose one format: {choice}")
    return files


def is_record(file: Path) -> bool:
    """Return True for a file of records that is neither metadata nor a cache of `datasets`."""
    return bool(record_suffix(file)) and file.name not in METADATA and not file.name.startswith("cache-")


# -- splits -----------------------------------------------------------------------------------------------------------


def split_name(path: Path) -> str | None:
    """Return the split that a file's name, or else its directory's name, shows: train, validation, test, or None."""
    for part in (path.name, path.parent.name):
        words = re.split(r"[-_.\s]|(?<=[a-z])(?=\d)", part.lower())
        if split := next((SPLITS[word] for word in words if word in SPLITS), None):
            return split
    return None


def divide(items: Sequence[T], splits: Sequence[str | None]) -> tuple[list[T], list[T], list[T], str | None]:
    """Return the items for training, those that are held out, and those of a third split, by the split of each item.

    The last value is the split that is held out: the validation split, or the test split if there is no validation
    split. If there is no training split or no other one, it is None, and all items are for training.
    """
    held_out = next((split for split in (VALIDATION, TEST) if split in splits), None)
    if held_out is None or TRAIN not in splits:
        return list(items), [], [], None
    kinds = ((TRAIN, None), (held_out,), {VALIDATION, TEST} - {held_out})
    train, held, others = ([i for i, split in zip(items, splits, strict=True) if split in kind] for kind in kinds)
    return train, held, others, held_out


def overlap(train: Sequence[Path], held_out: Sequence[Path]) -> Iterator[str]:
    """Yield a warning if a held-out file is also among the files to train on."""
    if shared := {file.resolve() for file in train} & {file.resolve() for file in held_out}:
        yield f"data.val_path: the held-out loss means little; {min(shared).name} is also trained on (data.path)"
