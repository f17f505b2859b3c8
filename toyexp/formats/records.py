"""Read the records of data files (JSON lines, JSON, CSV, Parquet, Arrow, also compressed), and their columns."""

from __future__ import annotations

import codecs
import contextlib
import csv
import gzip
import io
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from itertools import takewhile
from pathlib import Path
from string import ascii_uppercase
from typing import IO, Any

from toyexp.base.errors import UserError, printable
from toyexp.base.files import NOT_TEXT_HINTS, open_file
from toyexp.base.formatting import pluralise
from toyexp.base.packages import require_package

COMPRESSED = (".gz", ".xz", ".zst")
INSTALL = "pip install 'toyexp[data]'"
FIELD_LIMIT = (1 << 31) - 1  # characters of a CSV field; the csv module's own limit is 131,072

Record = bytes | dict[str, Any]  # a line of JSON, which is not parsed yet, or values by column


def record_suffix(path: Path) -> str:
    """Return the suffix that names the format, such as .jsonl for a.jsonl.gz; "" if it is not a format of records."""
    name = path.with_suffix("") if path.suffix in COMPRESSED else path
    return name.suffix if name.suffix in READERS and (path == name or name.suffix not in BINARY) else ""


def iter_records(path: Path) -> Iterator[tuple[str, Record]]:
    """Yield the location and the value of each record of a file, in order.

    Raise UserError if the file is damaged or has another format.
    """
    suffix = record_suffix(path)
    read = READERS.get(suffix, _lines)
    try:
        if suffix not in BINARY:
            with _open_bytes(path) as file:
                head = file.read(64).removeprefix(codecs.BOM_UTF8).lstrip()
            if suffix == ".json" and not head.startswith(b"["):  # JSON lines under another name
                read = _lines
            if read != _json and (hint := _other_format(path, head)):
                kind = "a JSON lines file" if read == _lines else "a table of text"
                raise UserError(f"{path}: is not {kind}; {hint}")
        yield from read(path)
    except (EOFError, zlib.error, lzma.LZMAError, OSError) as error:  # gzip's may end in the file's bytes
        raise UserError(f"{path}: cannot be read: {printable(str(error).partition(' (b')[0], 200)}") from None


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


def _other_format(path: Path, head: bytes) -> str:
    if re.match(rb"\[\s*(\{|$)", head):  # other lists are values of lines
        return f"it is a JSON array: rename it to {path.stem}.json"
    hint = next((hint for magic, hint in NOT_TEXT_HINTS.items() if head.startswith(magic)), "")
    return "decompress it first (gunzip, unxz or unzstd)" if hint and path.suffix in COMPRESSED else hint


def _lines(path: Path) -> Iterator[tuple[str, Record]]:
    with _open_bytes(path) as file:
        # Split at newlines only: U+2028 and the like may occur within JSON text.
        for number, line in enumerate(file, 1):
            content = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if content.strip():
                yield f"{path}:{number}", content.removesuffix(b"\n")


def _json(path: Path) -> Iterator[tuple[str, Record]]:
    with _open_bytes(path) as file:
        try:
            values = json.loads(file.read().decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}: is not valid JSON ({printable(str(error))})") from None
    yield from ((f"{path}[{number}]", value) for number, value in enumerate(values))


def _table(path: Path) -> Iterator[tuple[str, Record]]:
    csv.field_size_limit(FIELD_LIMIT)
    delimiter, line = "\t" if ".tsv" in path.suffixes else ",", 0
    with _open_bytes(path) as raw, io.TextIOWrapper(raw, "utf-8-sig", newline="") as file:
        try:
            reader = csv.DictReader(file, delimiter=delimiter, strict=True)
            names = reader.fieldnames or []
            other = next((d for d in (";", "\t", "|", ",") if d != delimiter and len(names) == 1 and d in names[0]), "")
            if twice := [name for name in names if names.count(name) > 1]:
                raise UserError(f"{path}: has the column {printable(twice[0], 20)} twice")
            if other:
                raise UserError(f"{path}: its columns are separated by {other!r}; use ',' in .csv and tabs in .tsv")
            line = reader.line_num
            for row in reader:
                if None in row or None in row.values():
                    problem = "more" if None in row else "fewer"
                    raise UserError(f"{path}:{reader.line_num}: has {problem} fields than the {len(names)} columns")
                yield f"{path}:{reader.line_num}", row
                line = reader.line_num
        except csv.Error as error:
            raise UserError(f"{path}:{line + 1}: cannot be read: {error}; is a quote left open?") from None
        except UnicodeDecodeError as error:
            raise UserError(f"{path}: is not UTF-8 text (byte 0x{error.object[error.start]:02x})") from None


def _columnar(path: Path) -> Iterator[tuple[str, Record]]:
    with require_package("pyarrow", INSTALL):
        import pyarrow
        from pyarrow import parquet
    kind = "Parquet" if path.suffix == ".parquet" else "Arrow"
    try:
        with pyarrow.memory_map(str(path)) as file:
            if kind == "Parquet":
                batches = parquet.ParquetFile(file).iter_batches(1024)
            elif file.read(6) == b"ARROW1":  # a file; `datasets` writes streams
                whole = pyarrow.ipc.open_file(file)
                batches = (whole.get_batch(i) for i in range(whole.num_record_batches))
            else:
                file.seek(0)
                batches = pyarrow.ipc.open_stream(file)
            rows = (row for batch in batches for row in batch.to_pylist())
            yield from ((f"{path}[{number}]", row) for number, row in enumerate(rows))
    except pyarrow.ArrowException as error:
        raise UserError(f"{path}: cannot be read as {kind}: {printable(str(error), 200)}") from None


READERS: dict[str, Callable[[Path], Iterator[tuple[str, Record]]]] = {
    ".jsonl": _lines, ".ndjson": _lines, ".json": _json, ".csv": _table, ".tsv": _table,
    ".parquet": _columnar, ".arrow": _columnar,
}  # fmt: skip
BINARY = (".parquet", ".arrow")  # they are not compressed as a whole


class BadExample(UserError):
    """Error with the reason why a record cannot be used."""


def decode(record: Record, columns: Mapping[str, str], nulls: bool = False) -> dict[str, Any]:
    """Return a record's values by column, renamed by `columns`: {name in toyexp: column}; keep nulls if `nulls`.

    Raise BadExample if the record is not a JSON object, or lacks a column.
    """
    value: Any = record
    if isinstance(record, bytes):
        try:
            value = json.loads(record.decode("utf-8"), object_pairs_hook=_unique_keys)
        except UnicodeDecodeError as error:
            raise BadExample(f"not UTF-8 text (byte {error.start} is 0x{record[error.start]:02x})") from None
        except (ValueError, RecursionError) as error:
            raise BadExample(f"is not one JSON object ({printable(str(error))})") from None
    if not isinstance(value, dict):
        raise BadExample(f"is {kind_of(value)}; expected an object with a value for each column")
    for name, column in columns.items():
        if column not in value:
            raise BadExample(f"has no column {printable(column, 20)} (data.columns.{name}); it has {join_names(value)}")
    renamed = {name: value[column] for name, column in columns.items()}
    others = {key: item for key, item in value.items() if key not in columns.values() and key not in columns}
    return {key: item for key, item in {**renamed, **others}.items() if nulls or item is not None}


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(value := dict(pairs)) < len(pairs):
        keys = [key for key, _ in pairs]
        raise BadExample(f"has the key {printable(next(k for k in keys if keys.count(k) > 1), 20)} twice")
    return value


def text_of(value: Any, subject: str) -> str:
    """Return `value`. Raise BadExample if it is not a text, is empty, or is not valid Unicode."""
    if not isinstance(value, str):
        raise BadExample(f"{subject} is {kind_of(value)}, expected text")
    if not value:
        raise BadExample(f"{subject} is empty")
    return require_unicode(value, subject)


def require_unicode(text: str, subject: str) -> str:
    """Return `text`. Raise BadExample if it is not valid Unicode."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadExample(f"{subject} holds half a surrogate pair ({ascii(text[error.start])[1:-1]})") from None
    return text


def kind_of(value: Any) -> str:
    """Return what a JSON value is, such as "a list", for a message."""
    if value == []:
        return "an empty list"
    kinds = {dict: "an object", list: "a list", str: "a text", bool: "true or false", bytes: "bytes"}
    return "null" if value is None else kinds.get(type(value), "a number")


def join_names(value: Mapping[Any, Any]) -> str:
    """Return the first keys of a mapping, separated by commas, for a message; keys of nulls are marked."""
    return ", ".join(printable(str(k), 20) + " (null)" * (value[k] is None) for k in list(value)[:8]) or "none"


def parse_cell(value: Any) -> Any:
    """Return the value of a text that is a JSON list or object, as tables hold them; return other values unchanged."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(value)
    return value


def read_question(value: Mapping[str, Any]) -> tuple[str, list[str], int]:
    """Return the question of a record's columns, its choices, and the index of the right choice.

    Choices are a list, columns A, B, ... or, as in the data set ARC, {text: [...], label: [...]}. The answer is a
    letter, a label, or a number from 0. Raise BadExample if the record is no such question.
    """
    answer = "answer" if "answer" in value else "answerKey"
    letters = [value[letter] for letter in takewhile(value.get, ascii_uppercase)]
    if not value.keys() >= {"question", answer} or not ("choices" in value or letters):
        raise BadExample(f"has the keys {join_names(value)}; expected question, choices and answer")
    choices, labels, right = parse_cell(value.get("choices", letters)), list(ascii_uppercase), value[answer]
    if isinstance(choices, dict) and choices.keys() >= {"text", "label"}:
        choices, labels = choices["text"], [str(label) for label in choices["label"]]
    if not isinstance(choices, list) or not 2 <= len(choices) <= min(len(labels), 26):
        held = f"has {pluralise(len(choices), 'text')}" if isinstance(choices, list) else f"is {kind_of(choices)}"
        raise BadExample(f"choices {held}; expected a list of 2 to 26 texts")
    if isinstance(right, str) and right not in labels and right.isdecimal():
        right = int(right)
    place = labels.index(right) if right in labels else right if type(right) is int else -1
    if not 0 <= place < len(choices):
        raise BadExample(f"{answer} is {printable(str(right), 20)}; expected a letter, or a number from 0")
    texts = [text_of(choice, "a choice") for choice in choices]
    if texts.count(texts[place]) > 1:
        raise BadExample(f"choices has the right one, {printable(texts[place], 20)}, twice")
    return text_of(value["question"], "question"), texts, place
