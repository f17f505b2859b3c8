"""The text files that a path means: a file, a folder's, or those that a pattern such as books/*.txt matches."""

from __future__ import annotations

import glob
import os
import stat
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from toyexp import UserError
from toyexp.base import cause, misfit, require, status

EACH = 500  # folders after which a person is told how far the search is
ALL = "*"  # among the suffixes: files of every name


@dataclass
class Found:
    """Files in a fixed order, how many others there were, and what could not be looked at, with the reason."""

    files: list[Path] = field(default_factory=list)
    others: int = 0  # files whose name has another ending
    strange: list[str] = field(default_factory=list)

    def left_out(self) -> list[str]:
        """What of all that lies there is not among the files, and which key changes that."""
        count = len(self.files)
        told = [f"{count} of {count + self.others} files: data.suffixes"] if self.others else []
        return [*told, *self.skipped()]

    def skipped(self) -> list[str]:
        """What could not be looked at."""
        return [f"{len(self.strange)} skipped, such as {self.strange[0]}"] if self.strange else []


def find(path: str, suffixes: Collection[str]) -> Found:
    """The files of `path`, of folders those with one of the suffixes; UserError where there are none."""
    found = Found()
    matches = meant(path)
    for match in matches:
        if match.is_dir():
            _add_folder(found, match, suffixes)
        else:
            found.files.append(match)
    if not found.files:
        more = "".join(f" ({skipped})" for skipped in found.skipped())
        raise UserError(
            f"data.path={path}: no file in there ends in {', '.join(suffixes) or 'nothing'}{more}; "
            "for others: data.suffixes='.rst .c', for all: data.suffixes='*'"
        )
    return found


def meant(path: str) -> list[Path]:
    """The path, or what it matches as a pattern; UserError where there is neither a file nor a folder."""
    kinds = stat.S_IFREG, stat.S_IFDIR
    if os.path.lexists(path) or not glob.has_magic(path):
        return [require(path, f"data.path={path}", *kinds)]
    matches = sorted(glob.glob(path, recursive=True))  # noqa: PTH207 - Path.glob takes no absolute pattern
    if not matches:
        raise UserError(f"data.path={path}: matches no file (looked in {Path.cwd()})")
    return [require(match, match, *kinds) for match in matches]


def _add_folder(found: Found, folder: Path, suffixes: Collection[str]) -> None:
    """Adds what lies below the folder, in path order."""

    def unreadable(error: OSError) -> None:
        found.strange.append(f"{error.filename}: {cause(error)}")

    inside: list[Path] = []
    walked = os.walk(folder, onerror=unreadable)  # Path.rglob hides what it may not read
    for number, (place, folders, names) in enumerate(walked, 1):
        if number % EACH == 0:
            status(f"looking for text below {folder}: {len(inside)} files in {number} folders")
        links = [os.path.join(place, f) for f in folders if os.path.islink(os.path.join(place, f))]  # noqa: PTH114, PTH118
        found.strange += [f"{link}: is a link to a folder" for link in links]
        chosen = [n for n in names if ALL in suffixes or os.path.splitext(n)[1] in suffixes]  # noqa: PTH122
        found.others += len(names) - len(chosen)
        for name in chosen:
            file = Path(place, name)
            reason = _reason(file)
            if reason:
                found.strange.append(f"{file}: {reason}")
            else:
                inside.append(file)
    found.files += sorted(inside)


def _reason(path: Path) -> str | None:
    """Why there is no file to read at the path."""
    try:
        reason = misfit(path.stat().st_mode)
        return reason and reason.partition(",")[0]  # without what to do about it
    except OSError as error:
        return cause(error)
