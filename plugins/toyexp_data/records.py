"""Read the records of data files: JSON lines, JSON, CSV, Parquet and Arrow, also compressed."""

from __future__ import annotations

import codecs
import contextlib
import csv
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from toyexp import UserError, printable, require_package
from toyexp.base import NOT_TEXT_HINTS, open_file
from toyexp_data.files import match_paths
from toyexp_data.splits import find_all

COMPRESSED = (".gz", ".xz", ".zst")
INSTALL = "pip install 'toyexp[data]'"
METADATA = {"state.json", "dataset_info.json", "dataset_dict.json", "dataset_infos.json", "config.json"}
FIELD_LIMIT = (1 << 31) - 1  # characters of a CSV field; the csv module's own limit is 131,072

Record = bytes | dict[str, Any]  # a line of JSON, which is not parsed yet, or values by column


def record_suffix(path: Path) -> str:
    """Return the suffix that names the format, such as .jsonl for a.jsonl.gz; "" if it is not a format of records."""
    name = path.with_suffix("") if path.suffix in COMPRESSED else path
    return name.suffix if name.suffix in READERS and (path == name or name.suffix in _TEXTS) else ""


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


def iter_records(path: Path) -> Iterator[tuple[str, Record]]:
    """Yield the location and the value of each record of a file, in order.

    Raise UserError if the file is damaged or has another format.
    """
    read = READERS.get(record_suffix(path), _lines)
    try:
        yield from read(path)
    except (EOFError, zlib.error, lzma.LZMAError, OSError, csv.Error) as error:
        raise UserError(f"{path}: cannot be read: {printable(str(error), 200)}") from None


@contextlib.contextmanager
def _open_bytes(path: Path) -> Iterator[IO[bytes]]:
    """Open a file, decompressing it if its suffix says so."""
    with contextlib.ExitStack() as stack:
        file: IO[bytes] = stack.enter_context(open_file(path))
        if path.suffix == ".gz":
            file = stack.enter_context(gzip.open(file))  # type: ignore[arg-type]  # typeshed: not an IO[bytes]
        elif path.suffix == ".xz":
            file = stack.enter_context(lzma.open(file))
        elif path.suffix == ".zst":
            with require_package("pyarrow", INSTALL):
                import pyarrow
            file = stack.enter_context(io.BufferedReader(pyarrow.CompressedInputStream(file, "zstd")))
        yield file


def _lines(path: Path) -> Iterator[tuple[str, Record]]:
    with _open_bytes(path) as file:
        # Split at newlines only: U+2028 and the like may occur within JSON text.
        for number, line in enumerate(file, 1):
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
                if hint := _other_format(path, line):
                    raise UserError(f"{path}: is not a JSON lines file; {hint}")
            if line.strip():
                yield f"{path}:{number}", line.removesuffix(b"\n")


def _other_format(path: Path, line: bytes) -> str:
    if line.lstrip().startswith(b"["):
        return f"it is a JSON array: rename it to {path.stem}.json"
    return next((hint for magic, hint in NOT_TEXT_HINTS.items() if line.startswith(magic)), "")


def _json(path: Path) -> Iterator[tuple[str, Record]]:
    with _open_bytes(path) as file:
        head = file.read(64).lstrip()
    if not head.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):  # JSON lines under another name
        yield from _lines(path)
        return
    with _open_bytes(path) as file:
        try:
            values = json.loads(file.read().decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}: is not valid JSON ({printable(str(error))})") from None
    yield from ((f"{path}[{number}]", value) for number, value in enumerate(values))


def _table(path: Path) -> Iterator[tuple[str, Record]]:
    csv.field_size_limit(FIELD_LIMIT)
    delimiter = "\t" if ".tsv" in path.suffixes else ","
    with _open_bytes(path) as raw, io.TextIOWrapper(raw, "utf-8-sig", newline="") as file:
        try:
            reader = csv.DictReader(file, delimiter=delimiter, strict=True)
            names = reader.fieldnames or []
            other = next((d for d in (";", "\t", "|", ",") if d != delimiter and len(names) == 1 and d in names[0]), "")
            if other:
                raise UserError(f"{path}: its columns are separated by {other!r}; expected {delimiter!r}")
            for row in reader:
                if None in row or None in row.values():
                    problem = "more" if None in row else "fewer"
                    raise UserError(f"{path}:{reader.line_num}: has {problem} fields than the {len(names)} columns")
                yield f"{path}:{reader.line_num}", row
        except UnicodeDecodeError as error:
            raise UserError(f"{path}: is not UTF-8 text (byte 0x{error.object[error.start]:02x})") from None


def _parquet(path: Path) -> Iterator[tuple[str, Record]]:
    with require_package("pyarrow", INSTALL):
        from pyarrow import ArrowException, parquet
    try:
        with parquet.ParquetFile(path) as file:
            yield from _rows(path, file.iter_batches(1024))
    except ArrowException as error:
        raise UserError(f"{path}: cannot be read as Parquet: {printable(str(error), 200)}") from None


def _arrow(path: Path) -> Iterator[tuple[str, Record]]:
    with require_package("pyarrow", INSTALL):
        import pyarrow
    try:
        with pyarrow.memory_map(str(path)) as file:
            try:  # `datasets` writes streams; others write files, which begin with ARROW1
                stream = pyarrow.ipc.open_stream(file)
            except pyarrow.ArrowInvalid:
                whole = pyarrow.ipc.open_file(file)
                stream = (whole.get_batch(i) for i in range(whole.num_record_batches))
            yield from _rows(path, stream)
    except pyarrow.ArrowException as error:
        raise UserError(f"{path}: cannot be read as Arrow: {printable(str(error), 200)}") from None


def _rows(path: Path, batches: Any) -> Iterator[tuple[str, Record]]:
    number = 0
    for batch in batches:
        for row in batch.to_pylist():
            yield f"{path}[{number}]", row
            number += 1


_TEXTS = {".jsonl": _lines, ".ndjson": _lines, ".json": _json, ".csv": _table, ".tsv": _table}  # may be compressed
READERS: dict[str, Callable[[Path], Iterator[tuple[str, Record]]]] = {**_TEXTS, ".parquet": _parquet, ".arrow": _arrow}
