"""Find the files of a data set: a file, a directory, or the files that match a pattern."""

from __future__ import annotations

import glob
import os
import stat
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from toyexp import UserError
from toyexp.base import require_file, show_status, system_message, wrong_kind

STATUS_EVERY = 500  # directories between updates of the search's status
ALL = "*"  # suffix that matches all files


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
        count = len(self.files)
        notes = [f"{count} of {count + self.others} files: data.suffixes"] if self.others else []
        return [*notes, *self.unreadable_note()]

    def unreadable_note(self) -> list[str]:
        """Return a list with a note about unreadable files; empty if there are none."""
        return [f"{len(self.unreadable)} skipped, such as {self.unreadable[0]}"] if self.unreadable else []


def find_files(path: str, suffixes: Collection[str], required: bool = True) -> FoundFiles:
    """Return the files at `path`: one file, the files that match a pattern, or a directory's files with these suffixes.

    If `required`, raise UserError if there is no such file.
    """
    selection = FoundFiles()
    matches = match_paths(path)
    for match in matches:
        if match.is_dir():
            _add_folder(selection, match, suffixes)
        else:
            selection.files.append(match)
    if required and not selection.files:
        reason = "".join(f" ({skipped})" for skipped in selection.unreadable_note())
        raise UserError(
            f"data.path={path}: contains no file with the suffix {' '.join(suffixes) or '(none)'}{reason}; "
            "choose others: data.suffixes='.rst .c', or all: data.suffixes='*'"
        )
    return selection


def match_paths(path: str, key: str = "path") -> list[Path]:
    """Return the path itself if it exists, else the paths that match it as a glob pattern, else raise UserError.

    `key` is the setting of the section `data` that has this path, for the message.
    """
    kinds = stat.S_IFREG, stat.S_IFDIR
    if os.path.lexists(path) or not glob.has_magic(path):
        return [require_file(path, f"data.{key}={path}", *kinds)]
    matches = sorted(glob.glob(path, recursive=True))  # noqa: PTH207 - Path.glob takes no absolute pattern
    if not matches:
        raise UserError(f"data.{key}={path}: matches no file (looked in {Path.cwd()})")
    return [require_file(match, match, *kinds) for match in matches]


def iter_below(folder: Path) -> Iterator[Path]:
    """Yield the files below a directory; leave out hidden ones, and directories that vanish or cannot be read."""
    for directory, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(directory, name) for name in names if not name.startswith("."))


def _add_folder(selection: FoundFiles, folder: Path, suffixes: Collection[str]) -> None:
    def note_error(error: OSError) -> None:
        selection.unreadable.append(f"{error.filename}: {system_message(error)}")

    chosen_files: list[Path] = []
    walk = os.walk(folder, onerror=note_error)  # Path.rglob ignores unreadable directories
    for number, (directory, folders, names) in enumerate(walk, 1):
        if number % STATUS_EVERY == 0:
            show_status(f"looking for text below {folder}: {len(chosen_files)} files in {number} folders")
        links = [os.path.join(directory, f) for f in folders if os.path.islink(os.path.join(directory, f))]  # noqa: PTH114, PTH118
        selection.unreadable += [f"{link}: is a link to a directory" for link in links]
        chosen = [n for n in names if ALL in suffixes or os.path.splitext(n)[1] in suffixes]  # noqa: PTH122
        selection.others += len(names) - len(chosen)
        for name in chosen:
            file = Path(directory, name)
            reason = _reason(file)
            if reason:
                selection.unreadable.append(f"{file}: {reason}")
            else:
                chosen_files.append(file)
    selection.files += sorted(chosen_files)


def _reason(path: Path) -> str | None:
    try:
        reason = wrong_kind(path.stat().st_mode)
        return reason and reason.partition(",")[0]  # without the remedy
    except OSError as error:
        return system_message(error)
