"""Find the files of a data set, and tell from their names which are for training and which are held out."""

from __future__ import annotations

import glob
import os
import re
import stat
from collections.abc import Callable, Mapping, Sequence
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
    """Files of a data set in a fixed order, those that are held out, and the reasons why others were left out."""

    files: list[Path] = field(default_factory=list)
    held_out: list[Path] = field(default_factory=list)  # if there are none, a part of each file is held out
    held_out_split: str | None = None  # the split that `held_out` is
    skipped: list[str] = field(default_factory=list)  # files, links and directories, each with the reason
    others: int = 0  # files that are not suitable
    columns: Mapping[str, str] | None = None  # other names of the columns of records; None: the files are text

    def hold_out(self, found: FoundFiles | None) -> None:
        """Hold out the files of `found` or, if it is None, those whose names show a held-out split.

        Leave out files of a third split.
        """
        if found is not None:
            self.held_out, self.held_out_split = found.files, VALIDATION
            self.skipped += found.skipped
            return
        names = [*map(split_name, self.files)]
        self.files, self.held_out, others, self.held_out_split = divide(self.files, names)
        self.skipped += [f"{file}: is neither of the training nor of the held-out split" for file in others]

    def omissions(self, setting: str = "") -> list[str]:
        """Return notes about skipped files and, if `setting` chooses suitable files, about the others."""
        count = len(self.files)
        notes = [f"{count} of {count + self.others} files: {setting}"] if setting and self.others else []
        return notes + [f"{len(self.skipped)} skipped, such as {first}" for first in self.skipped[:1]]

    def facts(self) -> dict[str, str]:
        """Return, for the run's record, the held-out split and a held-out file that is also trained on, if any."""
        shared = {file.resolve() for file in self.files} & {file.resolve() for file in self.held_out}
        facts = {"held_out_split": self.held_out_split, "held_out_and_trained_on": min(shared).name if shared else None}
        return {name: value for name, value in facts.items() if value}


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
        for file in iter_files(match, found.skipped):
            if not is_suitable(file):
                found.others += 1
            elif reason := _why_unreadable(file):
                found.skipped.append(f"{file}: {reason}")
            else:
                found.files.append(file)
    if not found.files:
        reasons = "".join(f" ({note})" for note in found.omissions())
        raise UserError(f"data.{key}={path}: contains no {what}{reasons}{hint}")
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


def find_records(path: str, key: str = "path") -> FoundFiles:
    """Return the files of records at `path`, as `find_files` does. Raise UserError if they have several formats."""
    found = find_files(path, is_record, f"file of examples ({' '.join(READERS)})", key)
    require_one_format(found.files, path, key)
    return found


def require_one_format(files: list[Path], path: str, key: str = "path") -> None:
    """Raise UserError if the files of records at `path` have several formats."""
    suffixes = sorted({record_suffix(file) for file in files})
    if len(suffixes) > 1:
        several = " and ".join(f"{sum(record_suffix(f) == s for f in files)} {s or 'other'}" for s in suffixes)
        choice = f"data.{key}='{path.rstrip('/*')}/*{suffixes[-1]}'"
        raise UserError(f"data.{key}={path}: has {several} files; choose one format: {choice}")


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
