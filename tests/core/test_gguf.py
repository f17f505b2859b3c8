"""GGUF files: they are read back as written, and a broken file raises only GGUFError."""

from __future__ import annotations

import math
import os
import re
import struct
import subprocess
import sys
import time
import tracemalloc
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import gguf
import numpy as np
import pytest

from toyexp import TOKENS, Constant, FromGGUF, Kind, Model, Normal, Setup, TensorSpec, UserError
from toyexp.base.errors import RunFailed
from toyexp.formats.gguf.form import GGUFForm, gguf_form
from toyexp.formats.gguf.ggml_types import GGUF_TYPES, encodes_finite
from toyexp.formats.gguf.header import GGUFError
from toyexp.formats.gguf.open_model import load_model
from toyexp.formats.gguf.read import GGUFFile
from toyexp.formats.gguf.tokenizer import has_text, read_tokenizer
from toyexp.formats.gguf.write import FILE_TYPES, Writer, check_keys, size_label, write_model
from toyexp.plugins.discovery import load
from toyexp.plugins.exporter import exporter
from toyexp.tokenizers.byte_level import BPE, Bytes, Characters
from toyexp.tokenizers.tokenizer import END_OF_TEXT, SYMBOLS
from toyexp_formats.shipped import GGUF
from toyexp_models.llama import Llama

# -- files by hand ----------------------------------------------------------------------------------------------------

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
FORMS = {U8: "<B", I8: "<b", U16: "<H", I16: "<h", U32: "<I", I32: "<i", F32: "<f", BOOL: "<?"}
FORMS |= {U64: "<Q", I64: "<q", F64: "<d"}


def u32(n: int) -> bytes:
    return struct.pack("<I", n)


def u64(n: int) -> bytes:
    return struct.pack("<Q", n)


def text(value: bytes | str) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return u64(len(raw)) + raw


def key(name: bytes | str, kind: int, value: bytes) -> bytes:
    return text(name) + u32(kind) + value


def array(kind: int, items: list[bytes], count: int | None = None) -> bytes:
    return u32(kind) + u64(len(items) if count is None else count) + b"".join(items)


def tensor(name: bytes | str, dims: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    """An entry of the tensor table; `dims` in the file's order, the fastest first."""
    return text(name) + u32(len(dims)) + b"".join(map(u64, dims)) + u32(kind) + u64(offset)


ARCHITECTURE = key("general.architecture", STRING, text("llama"))


def gguf_file(
    keys: tuple[bytes, ...] = (ARCHITECTURE,),
    tensors: tuple[bytes, ...] = (tensor("a", (4, 2)),),
    data: bytes = bytes(32),
    *,
    magic: bytes = b"GGUF",
    version: bytes = u32(3),
    n_tensors: int | None = None,
    n_keys: int | None = None,
    alignment: int = 32,
) -> bytes:
    counts = u64(len(tensors) if n_tensors is None else n_tensors) + u64(len(keys) if n_keys is None else n_keys)
    head = magic + version + counts + b"".join(keys) + b"".join(tensors)
    return head + bytes(-len(head) % alignment) + data


GOOD = gguf_file(
    keys=(
        ARCHITECTURE,
        key("number", U32, u32(7)),
        key("numbers", ARRAY, array(F64, [struct.pack("<d", x) for x in (0.5, -2.0)])),
        key("words", ARRAY, array(STRING, [text("é"), text("")])),
    ),
    tensors=(tensor("matrix", (4, 2)), tensor("quantised", (32, 2), 8, 32), tensor("vector", (3,), 0, 128)),
    data=np.arange(8, dtype="<f4").tobytes() + bytes(range(68)) + bytes(28) + np.ones(3, "<f4").tobytes(),
)


@pytest.fixture
def put(tmp_path):
    """Return a function that writes bytes to a file and returns its path."""

    def write(data: bytes) -> Path:
        path = tmp_path / "file.gguf"
        path.write_bytes(data)
        return path

    return write


def read_all(path: Path) -> dict[str, np.ndarray]:
    with GGUFFile(path) as file:
        return {name: file.read(name) for name in file.tensors}


# -- reading ----------------------------------------------------------------------------------------------------------


def test_values_of_every_type_are_read(put):
    values = {U8: 255, I8: -128, U16: 65535, I16: -5, U32: 2**32 - 1, I32: -7, F32: 0.5, BOOL: True}
    values |= {U64: 2**64 - 1, I64: -(2**63), F64: 1e300}
    single = [key(f"one.{k}", k, struct.pack(FORMS[k], v)) for k, v in values.items()]
    several = [key(f"all.{k}", ARRAY, array(k, [struct.pack(FORMS[k], v)] * 3)) for k, v in values.items()]
    words = key("words", ARRAY, array(STRING, [text("中文"), text("")]))
    with GGUFFile(put(gguf_file(keys=(*single, *several, words)))) as file:
        for kind, value in values.items():
            assert file.metadata[f"one.{kind}"] == value
            assert file.metadata[f"all.{kind}"].tolist() == [value] * 3
        assert file.metadata["words"] == ["中文", ""]


@pytest.mark.parametrize("version", [2, 3])
def test_versions_2_and_3_are_read(put, version):
    assert read_all(put(gguf_file(version=u32(version))))["a"].shape == (2, 4)


def test_tensors_are_located_by_the_files_alignment(put):
    keys = (ARCHITECTURE, key("general.alignment", U32, u32(256)))
    values = np.arange(8, dtype="<f4")
    tensors = (tensor("a", (4, 2)), tensor("b", (4, 2), 0, 256))
    data = values.tobytes() + bytes(224) + (values + 8).tobytes()
    arrays = read_all(put(gguf_file(keys, tensors, data, alignment=256)))
    assert arrays["a"].tolist() == values.reshape(2, 4).tolist()
    assert arrays["b"].tolist() == (values + 8).reshape(2, 4).tolist()


@pytest.mark.parametrize("kind", GGUF_TYPES, ids=lambda k: GGUF_TYPES[k][0])
def test_every_type_reads_as_gguf_py_dequantises_it(put, kind):
    _, per_block, block_bytes = GGUF_TYPES[kind]
    width = 2 * per_block * (1 if per_block > 1 else 32)
    # Bytes below 0x3c make every float16 scale a number below 1, so that no product overflows.
    raw = np.random.default_rng(kind).integers(0, 0x3C, (3, width // per_block * block_bytes), dtype=np.uint8)
    path = put(gguf_file(tensors=(tensor("a", (width, 3), kind),), data=raw.tobytes()))
    with GGUFFile(path) as file:
        got, first = file.read("a"), file.read("a", rows=2)
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(kind))
    assert got.dtype == np.float32
    assert got.shape == (3, width)
    assert got.tobytes() == expected.astype(np.float32).tobytes()
    assert first.tobytes() == got[:2].tobytes()


def test_rows_reads_only_the_requested_rows(put):
    path = put(gguf_file(tensors=(tensor("a", (4, 100)),), data=np.arange(400, dtype="<f4").tobytes()))
    with GGUFFile(path) as file:
        os.truncate(path, path.stat().st_size - 90 * 16)  # only the first ten rows are left
        assert file.read("a", rows=10).tolist() == np.arange(40.0).reshape(10, 4).tolist()
        with pytest.raises(GGUFError, match=r"a needs 1600 bytes .* the file gave 160"):
            file.read("a")


@pytest.mark.parametrize("rows", [-1, 0, 3])
def test_rows_out_of_range_are_rejected(put, rows):
    with GGUFFile(put(GOOD)) as file, pytest.raises(GGUFError, match=f"matrix has 2 rows, {rows} were requested"):
        file.read("matrix", rows=rows)


def test_a_missing_tensor_is_named(put):
    with GGUFFile(put(GOOD)) as file, pytest.raises(GGUFError, match=r"has no tensor output\.weight"):
        file.read("output.weight")


def test_an_invalid_architecture_name_is_rejected(put):
    for keys in ((), (key("general.architecture", U32, u32(1)),), (key("general.architecture", STRING, text("")),)):
        with GGUFFile(put(gguf_file(keys=keys))) as file, pytest.raises(GGUFError, match=r"no general\.architecture"):
            _ = file.architecture


# -- broken files -----------------------------------------------------------------------------------------------------

HUGE = 2**63
BROKEN: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "not a GGUF file (0 bytes)"),
    "magic alone": (b"GGUF", "not a GGUF file (4 bytes)"),
    "wrong magic": (gguf_file(magic=b"GGML"), "not a GGUF file"),
    "zip": (b"PK\3\4" + bytes(100), "not a GGUF file"),
    "LFS pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12345\n",
        "Git LFS pointer: git lfs pull",
    ),
    "version 1": (gguf_file(version=u32(1)), "version 1;"),
    "version 4": (gguf_file(version=u32(4)), "version 4;"),
    "big-endian": (gguf_file(version=struct.pack(">I", 3)), "big-endian"),
    "absurd key count": (gguf_file(n_keys=HUGE), f"{HUGE} keys"),
    "absurd tensor count": (gguf_file(n_tensors=HUGE), f"{HUGE} tensors"),
    "more keys than bytes": (gguf_file(n_keys=1000), "1000 keys"),
    "more tensors than bytes": (gguf_file(n_tensors=1000), "1000 tensors"),
    "absurd key length": (gguf_file((u64(HUGE) + b"k",)), f"claims {HUGE} bytes"),
    "absurd string length": (gguf_file((key("k", STRING, u64(HUGE)),)), f"claims {HUGE} bytes"),
    "string past the end": (gguf_file((key("k", STRING, u64(10_000)),)), "does not fit into the file"),
    "absurd array length": (gguf_file((key("k", ARRAY, array(U8, [], HUGE)),)), f"claims {HUGE} elements"),
    "array past the end": (gguf_file((key("k", ARRAY, array(F64, [], 1_000_000)),)), "does not fit into the file"),
    "string array past the end": (gguf_file((key("k", ARRAY, array(STRING, [], 3_000_000)),)), "3000000 strings in k"),
    "absurd string in an array": (gguf_file((key("k", ARRAY, array(STRING, [u64(HUGE)])),)), f"claims {HUGE} bytes"),
    "nested array": (gguf_file((key("k", ARRAY, array(ARRAY, [array(U8, [b"1"])])),)), "element type 9"),
    "unknown value type": (gguf_file((key("k", 13, u64(0)),)), "value type 13"),
    "unknown element type": (gguf_file((key("k", ARRAY, array(13, [u64(0)])),)), "element type 13"),
    "unknown tensor type": (gguf_file(tensors=(tensor("a", (4, 2), 4),)), "unknown type 4"),
    "key twice": (gguf_file((key("k", U8, b"1"), key("k", U8, b"2"))), "the key k twice"),
    "tensor twice": (gguf_file(tensors=(tensor("a", (4,)), tensor("a", (4,), 0, 32)), data=bytes(64)), "a is listed"),
    "empty key": (gguf_file((key("", U8, b"1"),)), "empty key"),
    "key with NUL": (gguf_file((key("a\0b", U8, b"1"),)), "NUL"),
    "key that is not UTF-8": (gguf_file((key(b"\xff\xfe", U8, b"1"),)), "key is not UTF-8"),
    "string that is not UTF-8": (gguf_file((key("k", STRING, text(b"\xc3")),)), "value of k is not UTF-8"),
    "tensor name that is not UTF-8": (gguf_file(tensors=(tensor(b"\xc3", (8,)),)), "tensor name is not UTF-8"),
    "tensor without a name": (gguf_file(tensors=(tensor("", (8,)),)), "without a name"),
    "tensor name of 64 bytes": (gguf_file(tensors=(tensor("a" * 64, (8,)),)), "claims 64 bytes"),
    "tensor name with NUL": (gguf_file(tensors=(tensor("a\0b", (8,)),)), "NUL"),
    "no dimensions": (gguf_file(tensors=(tensor("a", ()),)), "0 dimensions"),
    "five dimensions": (gguf_file(tensors=(tensor("a", (1, 1, 1, 1, 1)),)), "5 dimensions"),
    "absurd dimensions": (gguf_file(tensors=(text("a") + u32(2**32 - 1),)), f"{2**32 - 1} dimensions"),
    "zero rows": (gguf_file(tensors=(tensor("a", (4, 0)),)), "shape [0, 4]"),
    "product that wraps to 0": (gguf_file(tensors=(tensor("a", (2**32, 2**32)),)), f"shape [{2**32}, {2**32}]"),
    "product that wraps to 8": (gguf_file(tensors=(tensor("a", (2**61 + 1, 8)),)), f"shape [8, {2**61 + 1}]"),
    "rows that are no whole blocks": (gguf_file(tensors=(tensor("a", (33, 1), 8),), data=bytes(68)), "multiple of 32"),
    "offset outside": (gguf_file(tensors=(tensor("a", (8,), 0, 3200),)), "after the end of the file"),
    "offset that wraps to 0": (gguf_file(tensors=(tensor("a", (8,), 0, 2**64 - 32),)), "after the end of the file"),
    "offset that is not aligned": (gguf_file(tensors=(tensor("a", (4,), 0, 4),)), "not a multiple of 32"),
    "same offset": (gguf_file(tensors=(tensor("a", (8,)), tensor("b", (8,))), data=bytes(64)), "a and b overlap"),
    "overlap": (gguf_file(tensors=(tensor("b", (8,), 0, 32), tensor("a", (9,))), data=bytes(64)), "a and b overlap"),
    "alignment 0": (gguf_file((key("general.alignment", U32, u32(0)),)), "general.alignment=0"),
    "alignment 48": (gguf_file((key("general.alignment", U32, u32(48)),)), "general.alignment=48"),
    "alignment 2^31": (gguf_file((key("general.alignment", U32, u32(2**31)),)), "general.alignment=2147483648"),
    "alignment that is a word": (gguf_file((key("general.alignment", STRING, text("32")),)), "general.alignment=32"),
    "alignment that is a list": (gguf_file((key("general.alignment", ARRAY, array(U32, [u32(32)])),)), "[32]"),
    "alignment below 0": (gguf_file((key("general.alignment", I32, struct.pack("<i", -32)),)), "general.alignment=-32"),
    "alignment 32.0": (gguf_file((key("general.alignment", F32, struct.pack("<f", 32)),)), "general.alignment=32.0"),
    "key of 65536 bytes": (gguf_file((key("k" * 65_536, U8, b"1"),)), "claims 65536 bytes"),
    "absurd value type": (gguf_file((key("k", 2**32 - 1, u64(0)),)), f"value type {2**32 - 1}"),
    "absurd string behind good ones": (
        gguf_file((key("k", ARRAY, array(STRING, [text("a"), text("b"), u64(HUGE)])),)),
        f"claims {HUGE} bytes",
    ),
    "string past the end behind good ones": (
        gguf_file((key("k", ARRAY, array(STRING, [text("a"), text("b"), u64(9_999)])),)),
        "does not fit into the file",
    ),
    "string in an array that is not UTF-8": (
        gguf_file((key("k", ARRAY, array(STRING, [text("a"), text(b"\xed\xa0\x80"), text("c")])),)),
        "a string of k is not UTF-8",
    ),
    "no columns": (gguf_file(tensors=(tensor("a", (0, 4)),)), "shape [4, 0]"),
    "rows that are no whole blocks of 256": (gguf_file(tensors=(tensor("a", (32, 8), 12),)), "multiple of 256"),
    "whole numbers as weights": (gguf_file(tensors=(tensor("a", (8,), 26),)), "tensor a is of type I32, which is not"),
    "float64 weights": (gguf_file(tensors=(tensor("a", (4,), 28),)), "tensor a is of type F64, which is not supported"),
    "gap before the first tensor": (
        gguf_file(tensors=(tensor("a", (8,), 0, 32),), data=bytes(64)),
        "32 unused bytes before tensor a",
    ),
    "gap between tensors": (
        gguf_file(tensors=(tensor("a", (8,)), tensor("b", (8,), 0, 96)), data=bytes(128)),
        "64 unused bytes before tensor b",
    ),
    "left over bytes": (gguf_file(data=bytes(64)), "32 unused bytes after its last tensor"),
    "left over bytes without a tensor": (gguf_file(tensors=(), data=bytes(32)), "unused bytes after its last"),
    "part number that is a word": (gguf_file((key("split.no", STRING, text("0")),)), "split.* key that is not a whole"),
    "part 7 of 3": (gguf_file((key("split.no", U16, b"\6\0"), key("split.count", U16, b"\3\0"))), "part 7 of 3"),
    "absurd count of parts": (gguf_file((key("split.count", U64, u64(HUGE)),)), f"part 1 of {HUGE}"),
    "part under another name": (gguf_file((key("split.count", U16, b"\2\0"),)), "must end in -00001-of-00002.gguf"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_an_error_with_its_path_and_one_cause(put, name):
    data, cause = BROKEN[name]
    path = put(data)
    tracemalloc.start()
    began = time.process_time()
    try:
        with pytest.raises(GGUFError) as caught:
            GGUFFile(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert cause in message
    assert message.isprintable()  # so one line, and nothing that a terminal would obey
    assert caught.value.exit_code == 2
    assert time.process_time() - began < 2
    assert peak < 4 << 20


def sparse(path: Path, head: bytes, size: int) -> Path:
    """Return a file of `head` followed by zeros."""
    path.write_bytes(head)
    os.truncate(path, size)
    return path


def test_a_header_too_large_for_memory_is_rejected_before_reading(tmp_path):
    """Return a header with 40 MB of values that need more memory in Python than in the file."""
    empty = key("k", ARRAY, u32(STRING) + u64(3_900_000))
    for head, cause in (
        (b"GGUF" + u32(3) + u64(0) + u64(2_900_000), "2900000 keys: its header takes more than 256 MiB"),
        (b"GGUF" + u32(3) + u64(1_200_000) + u64(0), "1200000 tensors: its header takes more than 256 MiB"),
        (b"GGUF" + u32(3) + u64(0) + u64(60_000) + empty, "3900000 strings in k: its header takes more"),
    ):
        path = sparse(tmp_path / "file.gguf", head, 40_000_000)
        tracemalloc.start()
        with pytest.raises(GGUFError) as caught:
            GGUFFile(path)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert str(caught.value).startswith(f"{path}: {cause}")
        assert peak < 4 << 20


# -- split models -----------------------------------------------------------------------------------------------------


def part(number: int, count: int, total: int | None = None, tensors: tuple[bytes, ...] = ()) -> bytes:
    """A part of a split model, numbered from 0, with tensors of 8 numbers that say where they are."""
    keys = (key("split.no", U16, struct.pack("<H", number)), key("split.count", U16, struct.pack("<H", count)))
    if total is not None:
        keys += (key("split.tensors.count", I32, struct.pack("<i", total)),)
    data = b"".join(np.full(8, 10 * number + i, "<f4").tobytes() for i in range(len(tensors)))
    return gguf_file((*((ARCHITECTURE,) if number == 0 else ()), *keys), tensors, data)


A, B, C = tensor("a", (4, 2)), tensor("b", (4, 2)), tensor("c", (4, 2), 0, 32)
WHOLE = {0: part(0, 3, 3), 1: part(1, 3, 3, (A,)), 2: part(2, 3, 3, (B, C))}


def put_parts(directory: Path, parts: dict[int, bytes]) -> list[Path]:
    paths = [directory / f"m-{i + 1:05}-of-00003.gguf" for i in range(3)]
    for i, data in parts.items():
        paths[i].write_bytes(data)
    return paths


def test_a_split_model_is_read_as_one_file(tmp_path):
    paths = put_parts(tmp_path, WHOLE)
    with GGUFFile(paths[0]) as file:
        assert file.paths == paths
        assert file.size == sum(p.stat().st_size for p in paths)
        assert file.architecture == "llama"
        assert {n: t.path for n, t in file.tensors.items()} == {"a": paths[1], "b": paths[2], "c": paths[2]}
        assert {n: file.read(n, rows=1).tolist() for n in file.tensors} == {
            "a": [[10.0] * 4], "b": [[20.0] * 4], "c": [[21.0] * 4],
        }  # fmt: skip
    with pytest.raises(GGUFError, match=rf"{paths[2]}: is closed"):
        file.read("c")


def test_a_model_split_by_gguf_py_is_read_as_one_file(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama", split_max_tensors=1)
    values = {name: np.random.default_rng(i).normal(size=(3, 5)).astype(np.float32) for i, name in enumerate("abc")}
    for name, array in values.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    arrays = read_all(tmp_path / "m-00001-of-00003.gguf")
    assert arrays.keys() == values.keys()
    assert all(np.array_equal(arrays[name], values[name]) for name in values)


SPLIT: dict[str, tuple[dict[int, bytes], int, str]] = {
    "a part that is not there": ({**WHOLE, 1: None}, 1, "not found"),
    "a part that is no GGUF": ({**WHOLE, 2: b"PK"}, 2, "is not a GGUF file (2 bytes) (part 3 of 3 of m-"),
    "two parts in each other's place": ({**WHOLE, 1: WHOLE[2], 2: WHOLE[1]}, 1, "is not part 2 of 3 of m-00001-of"),
    "a part of a model of more parts": ({**WHOLE, 1: part(1, 4, 3, (A,))}, 1, "is not part 2 of 3 of m-00001-of"),
    "a part of another model": ({**WHOLE, 1: part(1, 3, 9, (A,))}, 1, "is not part 2 of 3 of m-00001-of-00003.gguf"),
    "a file that is no part": ({**WHOLE, 1: gguf_file()}, 1, "is not part 2 of 3 of m-00001-of-00003.gguf"),
    "a tensor in two parts": ({**WHOLE, 2: part(2, 3, 3, (A, C))}, 2, "has the tensor a, as has m-00002-of-00003.gguf"),
    "too few tensors": ({**WHOLE, 2: part(2, 3, 3, (B,))}, 0, "split.tensors.count is 3, its parts have 2 tensors"),
    "a part cut short": ({**WHOLE, 2: WHOLE[2][:-8]}, 2, "tensor c ends 8 bytes after the end of the file"),
}  # fmt: skip


@pytest.mark.parametrize("name", SPLIT)
def test_a_broken_split_model_is_an_error_with_the_part_and_one_cause(tmp_path, name):
    parts, blamed, cause = SPLIT[name]
    paths = put_parts(tmp_path, {i: data for i, data in parts.items() if data is not None})
    with pytest.raises(GGUFError) as caught:
        GGUFFile(paths[0])
    assert str(caught.value).startswith(f"{paths[blamed]}: {cause}")
    assert "\n" not in str(caught.value)


def test_a_later_part_of_a_split_model_names_the_first(tmp_path):
    paths = put_parts(tmp_path, WHOLE)
    with pytest.raises(GGUFError) as caught:
        GGUFFile(paths[1])
    assert str(caught.value) == f"{paths[1]}: is part 2 of 3 of a model; give the first one, {paths[0].name}"


# -- files that are no model ------------------------------------------------------------------------------------------


def llama_keys(**changes: Any) -> dict[str, Any]:
    """The keys of a small llama with a tokenizer of bytes, some of them changed or, with None, left out."""
    model = Llama(d_model=32, n_layers=1, n_heads=4, n_kv_heads=2, d_ff=64, vocab=257)
    tokens = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": [*SYMBOLS, END_OF_TEXT],
        "merges": ["a b"],
        "eos_token_id": 256,
    }
    keys = {f"llama.{k}": v for k, v in gguf_form(model).metadata(model).items()}
    keys |= {f"tokenizer.ggml.{k}": v for k, v in tokens.items()}
    return {k: v for k, v in (keys | {k.replace("__", "."): v for k, v in changes.items()}).items() if v is not None}


def put_llama(path: Path, keys: dict[str, Any], tensors: dict[str, Any] | None = None, kind: str = "F32") -> Path:
    """Write a small llama with these keys. Tensors are zeros unless given; None omits one."""
    writer = Writer()
    for name, value in {"general.architecture": "llama", **keys}.items():
        writer.add(name, value)
    model = Llama(d_model=32, n_layers=1, n_heads=4, n_kv_heads=2, d_ff=64, vocab=257)
    arrays = {t.name: np.zeros(t.shape, np.float32) for t in model.tensors()} | (tensors or {})
    for name, array in arrays.items():
        if array is not None:
            writer.add_numbers(name, array.shape, kind if array.ndim == 2 else "F32", [array.ravel()])
    writer.save(path)
    return path


def with_one(value: float) -> np.ndarray:
    """A matrix of zeros with one such number."""
    array = np.zeros((32, 32), np.float32)
    array[7, 9] = value
    return array


BIG = 2**31 - 1
Q = "blk.0.attn_q.weight"
NO_MODEL: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no head": ({"llama__attention__head_count": 0}, {}, "llama.attention.head_count is 0"),
    "absurd head count": ({"llama__attention__head_count": 2**31}, {}, f"llama.attention.head_count is {2**31}"),
    "heads below 0": ({"llama__attention__head_count": -4}, {}, "llama.attention.head_count is -4"),
    "heads in a list": ({"llama__attention__head_count": [4]}, {}, "llama.attention.head_count is [4]"),
    "more heads than features": (
        {"llama__attention__head_count": 64, "llama__rope__dimension_count": None}, {}, "attention.key_length",
    ),
    "heads that do not fit": (
        {"llama__attention__head_count": 5, "llama__rope__dimension_count": None}, {}, "n_kv_heads=2 does not divide",
    ),
    "key heads that do not fit": ({"llama__attention__head_count_kv": 3}, {}, "model.n_kv_heads=3 does not divide"),
    "absurd key heads": ({"llama__attention__head_count_kv": BIG}, {}, f"model.n_kv_heads={BIG} does not divide"),
    "absurd rope size": ({"llama__rope__dimension_count": BIG}, {}, f"llama.rope.dimension_count is {BIG}"),
    "rope of no size": ({"llama__rope__dimension_count": 0}, {}, "llama.rope.dimension_count is 0"),
    "rope base NaN": ({"llama__rope__freq_base": math.nan}, {}, "nan"),
    "rope base 0": ({"llama__rope__freq_base": 0.0}, {}, "0.0"),
    "rope base below 0": ({"llama__rope__freq_base": -1e4}, {}, "-10000.0"),
    "rope base that is a word": ({"llama__rope__freq_base": "1e4"}, {}, "llama.rope.freq_base is 1e4"),
    "absurd block count": ({"llama__block_count": BIG}, {}, f"claims {BIG} blocks, and has 12 tensors"),
    "blocks that are not there": ({"llama__block_count": 2}, {}, "lacks the tensor blk.1."),
    "absurd width": ({"llama__embedding_length": BIG}, {}, "llama"),
    "context that is a float": ({"llama__context_length": 64.0}, {}, "llama.context_length is 64.0"),
    "no width": ({"llama__embedding_length": None}, {}, "has no llama.embedding_length"),
    "norm of NaN": ({"llama__attention__layer_norm_rms_epsilon": math.nan}, {}, "nan"),
    "fewer tokens than rows": ({"tokenizer__ggml__tokens": SYMBOLS}, {}, "has 256 tokens, its embedding 257 rows"),
    "more tokens than rows": (
        {"tokenizer__ggml__tokens": [*SYMBOLS, END_OF_TEXT, "<more>"]}, {}, "has 258 tokens, its embedding 257 rows",
    ),
    "a tensor missing": ({}, {"blk.0.ffn_up.weight": None}, "lacks the tensor blk.0.ffn_up.weight"),
    "a tensor that nobody knows": ({}, {"blk.0.extra.weight": np.zeros((2, 2), np.float32)}, "blk.0.extra.weight"),
    "a tensor of another shape": ({}, {Q: np.zeros((32, 16), np.float32)}, f"{Q} has the shape [32, 16]"),
    "an adapter": ({"general__type": "adapter"}, {}, "holds no model (general.type is adapter)"),
    "a type that is a list": ({"general__type": [1]}, {}, "holds no model (general.type is [1])"),
}  # fmt: skip


@pytest.fixture(scope="module")
def registry():
    return load()


def test_the_undamaged_model_of_the_error_cases_is_valid(tmp_path, registry):
    model = load_model(put_llama(tmp_path / "m.gguf", llama_keys()), registry, [TOKENS])
    assert (model.vocab, model.n_heads, model.n_kv_heads) == (257, 4, 2)


@pytest.mark.parametrize("name", NO_MODEL)
def test_an_unsupported_file_is_an_error_with_its_path_and_one_cause(tmp_path, registry, name):
    keys, tensors, cause = NO_MODEL[name]
    path = put_llama(tmp_path / "m.gguf", llama_keys(**keys), tensors)
    began = time.process_time()
    with pytest.raises(GGUFError) as caught:
        load_model(path, registry, [TOKENS])
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert cause in message
    assert message.isprintable()
    assert time.process_time() - began < 2


SPOILT = {
    "NaN in F32": ("F32", math.nan),
    "infinity in F16": ("F16", 1e6),
    "infinity in BF16": ("BF16", -math.inf),
    "NaN in Q8_0": ("Q8_0", math.nan),
    "infinity in Q4_1": ("Q4_1", 1e30),
}


@pytest.mark.parametrize("name", SPOILT)
def test_a_weight_that_is_not_finite_is_named_when_a_run_reads_it(tmp_path, name):
    kind, value = SPOILT[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # rounding to infinity is no news to numpy
        path = put_llama(tmp_path / "m.gguf", llama_keys(), {Q: with_one(value)}, kind)
    spec = {t.name: t for t in Llama(d_model=32, n_layers=1, n_heads=4, n_kv_heads=2, d_ff=64, vocab=257).tensors()}
    cause = f"{path}: {Q} contains NaN or infinity"
    for tensor_name, info in spec.items():
        values = FromGGUF(str(path), tensor_name)
        if tensor_name != Q:
            assert not values.draw(info.shape, 0, tensor_name).any()
            continue
        with pytest.raises(GGUFError, match=re.escape(cause)):
            values.draw(info.shape, 0, tensor_name)
        with GGUFFile(path) as file:
            file.check_finite(Q, rows=7)
            for rows in (8, None):
                with pytest.raises(GGUFError, match=re.escape(cause)):
                    file.check_finite(Q, rows)
            assert not np.isfinite(file.read(Q)[7]).all()  # as stored


@pytest.mark.parametrize("kind", GGUF_TYPES, ids=lambda k: GGUF_TYPES[k][0])
def test_nonfinite_quantised_numbers_are_found_by_their_scales(kind):
    """Against dequantising, on blocks of any bytes at all."""
    raw = np.random.default_rng(kind).integers(0, 256, (400, GGUF_TYPES[kind][2]), dtype=np.uint8)
    raw[::2] &= 0x3B  # half of them without infinite scales
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for block in raw:
            expected = bool(np.isfinite(gguf.quants.dequantize(block, gguf.GGMLQuantizationType(kind))).all())
            assert encodes_finite(block, kind) == expected


def test_more_than_sixty_kinds_of_broken_files_are_told_apart():
    assert len(BROKEN) >= 62  # by the header alone
    assert len(SPLIT) + len(NO_MODEL) + len(SPOILT) >= 40
    assert len({cause for _, cause in BROKEN.values()}) > 50


def test_a_truncated_file_is_an_error(put):
    assert set(read_all(put(GOOD))) == {"matrix", "quantised", "vector"}
    for size in range(len(GOOD)):  # its last tensor ends where the file does
        path = put(GOOD[:size])
        with pytest.raises(GGUFError) as caught:
            GGUFFile(path)
        assert str(caught.value).startswith(f"{path}: ")
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [0x00, 0x01, 0x7F, 0x80, 0xFF])
def test_a_changed_byte_never_crashes_the_reader(put, value):
    errors = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a scale of infinity times 0 is no crash
        for offset in range(len(GOOD)):
            data = bytearray(GOOD)
            data[offset] = value
            try:
                arrays = read_all(put(bytes(data)))
            except GGUFError as error:
                errors += 1
                assert "\n" not in str(error)
            else:
                assert all(array.dtype == np.float32 for array in arrays.values())
    assert errors > 20


def test_a_large_vocabulary_is_read_within_a_second(put):
    """Write 128,000 tokens and 280,000 merges, some longer than the read buffer. Reading took 0.2 s."""
    words = [f"wörd{i}" if i % 50_000 else "long" * 400_000 for i in range(408_000)]
    tokens = key("tokens", ARRAY, array(STRING, [text(w) for w in words[:128_000]]))
    merges = key("merges", ARRAY, array(STRING, [text(w) for w in words[128_000:]]))
    scores = key("scores", ARRAY, u32(F32) + u64(128_000) + np.arange(128_000, dtype="<f4").tobytes())
    path = put(gguf_file(keys=(ARCHITECTURE, tokens, merges, scores)))
    seconds = []
    for _ in range(3):
        began = time.process_time()
        with GGUFFile(path) as file:
            seconds.append(time.process_time() - began)
            assert file.metadata["tokens"] + file.metadata["merges"] == words
            assert file.metadata["scores"].tolist() == list(range(128_000))
    assert min(seconds) < 1


def test_reading_needs_little_memory_beyond_the_data(put):
    """gguf-py would take five times the result for its own use."""
    raw = np.random.default_rng(0).integers(0, 0x3C, (4096, 144 * 8), dtype=np.uint8)  # Q4_K, 8M numbers
    path = put(gguf_file(tensors=(tensor("a", (2048, 4096), 12),), data=raw.tobytes()))
    with GGUFFile(path) as file:
        file.read("a", rows=1)  # import its dependencies first
        tracemalloc.start()
        numbers = file.read("a")
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert numbers.nbytes == 32 << 20
    assert peak < numbers.nbytes + (12 << 20)


def test_pipes_and_directories_are_rejected_immediately(tmp_path):
    fifo, loop = tmp_path / "fifo", tmp_path / "loop"
    os.mkfifo(fifo)
    loop.symlink_to(loop)
    for path, cause in (
        (tmp_path, "is a directory; name a GGUF file"),
        (fifo, "is a pipe"),  # opening it to read would wait for a writer
        (Path("/dev/zero"), "is a device, not a file"),
        (tmp_path / "none.gguf", "not found"),
        (loop, "cannot be opened: "),
    ):
        with pytest.raises(GGUFError) as caught:
            GGUFFile(path)
        assert str(caught.value).startswith(f"{path}: {cause}")


def test_a_rejected_file_is_closed(put):
    path = put(BROKEN["key twice"][0])
    lowest = os.dup(0)  # a new descriptor takes the lowest number that is free
    os.close(lowest)
    for _ in range(3):
        with pytest.raises(GGUFError):
            GGUFFile(path)
    after = os.dup(0)
    os.close(after)
    assert after == lowest


# -- writing ----------------------------------------------------------------------------------------------------------


class TinyGGUF(GGUFForm):
    def metadata(self, model: Model) -> dict[str, Any]:
        return {"embedding_length": 64, "rope.freq_base": 500.25, "vocab_size": model.vocab}


@dataclass
class Tiny(Model):
    """Tensors of every kind that the writer tells apart."""

    name: ClassVar[str] = "llama"
    reads: ClassVar[Kind] = TOKENS
    forms: ClassVar[Mapping[str, Any]] = {"gguf": TinyGGUF()}

    vocab: int = 257

    def tensors(self) -> list[TensorSpec]:
        return [
            TensorSpec("token_embd.weight", (self.vocab, 64), Normal(1)),
            TensorSpec("position_embd.weight", (8, 64), Normal(1)),
            TensorSpec("blk.0.attn_norm.weight", (64,), Constant(1)),
            TensorSpec("blk.0.attn_q.bias", (64,), Normal(1)),
            TensorSpec("blk.0.ffn_down.weight", (64, 80), Normal(1)),
            TensorSpec("output.weight", (self.vocab, 64), Normal(3)),
        ]

    def forward(self, ops: Any, p: Any, batch: Any) -> Any:
        raise NotImplementedError

    def check(self) -> None:
        pass


def weights(model: Model) -> dict[str, np.ndarray]:
    return {t.name: t.init.draw(t.shape, 0, t.name) for t in model.tensors()}


def test_f32_tensors_are_read_back_bit_for_bit(tmp_path):
    tensors = weights(Tiny())
    strange = [math.nan, math.inf, -math.inf, -0.0, 1e-45, 3.4e38]
    tensors["token_embd.weight"][0, :6] = strange
    tensors["blk.0.attn_q.bias"][:6] = strange
    write_model(tmp_path / "m.gguf", Tiny(), tensors, Bytes())
    arrays = read_all(tmp_path / "m.gguf")
    assert list(arrays) == list(tensors)
    for name, values in tensors.items():
        assert arrays[name].shape == values.shape
        assert arrays[name].tobytes() == values.tobytes()


def test_a_setting_that_gguf_cannot_store_is_rejected_before_training(monkeypatch):
    check_keys(Tiny())
    for value in (1e308, 2**64):
        monkeypatch.setattr(TinyGGUF, "metadata", lambda self, model, value=value: {"rope.freq_base": value})
        with pytest.raises(UserError, match=r"llama\.rope\.freq_base"):
            check_keys(Tiny())
        with pytest.raises(UserError, match="to train without"):
            exporter(GGUF)().check_plan(Setup(TOKENS.inputs(4), 1).plan(Tiny(), []))


def test_keys_are_written_in_the_types_that_llama_cpp_expects(tmp_path):
    path = tmp_path / "m.gguf"
    write_model(path, Tiny(), weights(Tiny()), Bytes(), "f16", {"name": "größe", "step": 12, "flag": False})
    expected = {
        "general.architecture": ("llama", "STRING"),
        "general.type": ("model", "STRING"),
        "general.file_type": (1, "UINT32"),
        "general.quantization_version": (2, "UINT32"),
        "general.size_label": ("39K", "STRING"),
        "general.name": ("größe", "STRING"),
        "general.step": (12, "UINT32"),
        "general.flag": (False, "BOOL"),
        "llama.embedding_length": (64, "UINT32"),
        "llama.rope.freq_base": (500.25, "FLOAT32"),
        "llama.vocab_size": (257, "UINT32"),
        "tokenizer.ggml.model": ("gpt2", "STRING"),
        "tokenizer.ggml.pre": ("gpt-2", "STRING"),
        "tokenizer.ggml.tokens": ([*SYMBOLS, END_OF_TEXT], "STRING"),
        "tokenizer.ggml.token_type": ([1] * 256 + [3], "INT32"),
        "tokenizer.ggml.merges": (["ÿ ÿ"], "STRING"),
        "tokenizer.ggml.bos_token_id": (256, "UINT32"),
        "tokenizer.ggml.eos_token_id": (256, "UINT32"),
        "tokenizer.ggml.add_bos_token": (False, "BOOL"),
    }
    with GGUFFile(path) as file:
        metadata = dict(file.metadata)
    metadata["tokenizer.ggml.token_type"] = metadata["tokenizer.ggml.token_type"].tolist()
    assert metadata == {name: value for name, (value, _) in expected.items()}
    fields = gguf.GGUFReader(path).fields
    assert {k: fields[k].types[-1].name for k in expected} == {k: kind for k, (_, kind) in expected.items()}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", FILE_TYPES)
def test_every_type_is_rounded_and_read_like_gguf_py(tmp_path, kind, tied):
    path, tensors = tmp_path / "m.gguf", weights(Tiny())
    if tied:
        del tensors["output.weight"]
    write_model(path, Tiny(), tensors, Bytes(), kind)
    upper, blocks = kind.upper(), kind.startswith("q")
    output = "Q8_0" if blocks else upper  # the output matrix is rounded less
    types = dict.fromkeys(tensors, "F32") | {"output.weight": output, "token_embd.weight": output if tied else upper}
    types["blk.0.ffn_down.weight"] = "F16" if blocks else upper  # rows of 80 are no whole blocks of 32
    arrays = read_all(path)
    reader = gguf.GGUFReader(path)
    assert gguf.LlamaFileType(reader.fields["general.file_type"].contents()).name.removeprefix("ALL_").removeprefix(
        "MOSTLY_"
    ) == upper  # fmt: skip
    assert [t.name for t in reader.tensors] == list(tensors)
    for other in reader.tensors:
        name, values = other.name, tensors[other.name]
        assert other.tensor_type.name == types[name]
        theirs = gguf.quants.dequantize(other.data, other.tensor_type).reshape(values.shape)
        rounded = gguf.quants.dequantize(gguf.quants.quantize(values, other.tensor_type), other.tensor_type)
        assert arrays[name].tobytes() == theirs.astype(np.float32).tobytes()
        assert arrays[name].tobytes() == rounded.astype(np.float32).tobytes()


NUMPY = {
    "u1": U8, "i1": I8, "u2": U16, "i2": I16, "u4": U32, "i4": I32, "f4": F32, "?": BOOL, "u8": U64, "i8": I64,
    "f8": F64,
}  # fmt: skip


def test_values_keep_their_type_and_value(tmp_path):
    """numpy's in that of their dtype, Python's in the one llama.cpp insists on; gguf-py reads the types."""
    arrays = {f"array.{d}": np.array([0, 1, 1], d) for d in NUMPY}
    single = {f"one.{d}": np.dtype(d).type(1) for d in NUMPY}
    plain = {
        "bool": (True, "BOOL"), "text": ("é\0🙂", "STRING"), "no text": ("", "STRING"), "float": (0.1, "FLOAT32"),
        "int": (2**32 - 1, "UINT32"), "large": (2**32, "UINT64"), "small": (-1, "INT32"), "least": (-(2**40), "INT64"),
        "words": (["中", "", "a b"], "STRING"), "ints": ([1, -2], "INT32"), "floats": ([0.5, 1.0], "FLOAT32"),
        "flags": ([True, False], "BOOL"), "large ints": ([1, -(2**31) - 1], "INT64"),
    }  # fmt: skip
    writer = Writer()
    for name, value in {**arrays, **single, **{n: v for n, (v, _) in plain.items()}}.items():
        writer.add(name, value)
    writer.add("none", np.array([], np.float32))
    writer.add("no words", [])
    writer.save(tmp_path / "m.gguf")
    with GGUFFile(tmp_path / "m.gguf") as file:
        metadata, kinds = dict(file.metadata), dict(file.kinds)
    for name, value in arrays.items():
        assert (metadata[name].dtype, metadata[name].tolist()) == (value.dtype, value.tolist())
    assert {n: kinds[n] for n in single} == {f"one.{d}": kind for d, kind in NUMPY.items()}
    assert {n: metadata[n] for n in single} == dict.fromkeys(single, 1)
    assert metadata["float"] == np.float32(0.1)
    for name, (value, _) in plain.items():
        if name != "float":
            assert list(np.ravel(metadata[name])) == list(np.ravel(value)), name
    assert (metadata["none"].dtype, metadata["none"].size, metadata["no words"]) == (np.float32, 0, [])
    fields = gguf.GGUFReader(tmp_path / "m.gguf").fields
    assert {n: fields[n].types[-1].name for n in plain} == {n: kind for n, (_, kind) in plain.items()}


@pytest.mark.parametrize(
    ("kind", "value", "said"),
    [
        ("f32", math.nan, "contains NaN or infinity"),
        ("f16", -math.inf, "contains NaN or infinity"),
        ("q4_0", math.nan, "contains NaN or infinity"),
        ("f16", 7e4, None),  # which F16 cannot: it stays F32
        ("q8_0", -1e7, None),
        ("bf16", 7e4, None),
        ("q8_0", 7e4, None),
    ],
)
def test_tensors_out_of_range_are_written_with_a_warning(tmp_path, kind, value, said):
    tensors = weights(Tiny(vocab=5000))  # more than is encoded at once
    tensors["output.weight"][4999, 0] = value
    problems = write_model(tmp_path / "m.gguf", Tiny(vocab=5000), tensors, Bytes(), kind)
    assert problems == ([f"output.weight {said}"] if said else [])
    written = read_all(tmp_path / "m.gguf")
    assert written.keys() == tensors.keys()
    if said is None:
        assert written["output.weight"][4999, 0] == pytest.approx(value, rel=1e-2)


def test_writing_needs_little_memory_beyond_the_model(tmp_path):
    model = Tiny(vocab=100_000)
    tensors = weights(model)
    tracemalloc.start()
    write_model(tmp_path / "m.gguf", model, tensors, None, "q4_0")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 26 << 20  # of 51 MB that the two large tensors have; 100,000 placeholders take some


def test_sizes_are_formatted_as_in_model_names():
    sizes = {900: "0.9K", 12_345: "12K", 269_000: "269K", 1_240_000_000: "1.2B", 134_515_008: "135M", 9_960_000: "10M"}
    assert {n: size_label(n) for n in sizes} == sizes


def test_an_unsupported_type_is_rejected_before_writing(tmp_path):
    with pytest.raises(UserError, match="type=q8: did you mean q8_0"):
        write_model(tmp_path / "m.gguf", Tiny(), weights(Tiny()), Bytes(), "q8")
    assert list(tmp_path.iterdir()) == []


def test_a_file_without_a_tokenizer_takes_token_ids_only(tmp_path):
    write_model(tmp_path / "m.gguf", Tiny(), weights(Tiny()), None)
    with GGUFFile(tmp_path / "m.gguf") as file:
        assert file.metadata["tokenizer.ggml.tokens"] == [f"<{i}>" for i in range(257)]
        assert not has_text(file)
        with pytest.raises(GGUFError, match=r"has no tokenizer \(its tokens are placeholders"):
            read_tokenizer(file)


FULL_DISK = """
import resource, sys
from pathlib import Path
import numpy as np
from test_gguf import Tiny, weights
from toyexp.base.errors import RunFailed
from toyexp.formats.gguf.write import write_model
from toyexp.tokenizers.byte_level import Bytes

limit = int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))  # a write past it fails, as on a full disk
try:
    write_model(Path(sys.argv[1]), Tiny(), weights(Tiny()), Bytes())
except RunFailed as error:
    print(error)
"""


@pytest.mark.parametrize("limit", [10, 2_000, 100_000])  # bytes: in the header, and in the tensors
def test_a_failed_write_keeps_the_old_file_and_leaves_no_other(tmp_path, limit):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"old")
    run = subprocess.run(
        [sys.executable, "-B", "-W", "error", "-c", FULL_DISK, str(path), str(limit)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
    )
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""  # no file was left open
    assert run.stdout == f"{path}: could not be written: File too large\n"
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]
    assert path.read_bytes() == b"old"


def test_a_failed_cleanup_does_not_hide_the_write_error(tmp_path, monkeypatch):
    def failing(self, *_, **__):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Path, "replace", failing)
    monkeypatch.setattr(Path, "unlink", failing)
    with pytest.raises(RunFailed, match=r"m\.gguf: could not be written: Input/output error"):
        write_model(tmp_path / "m.gguf", Tiny(), weights(Tiny()), Bytes())


def test_an_export_replaces_the_file_atomically(tmp_path):
    path = tmp_path / "m.gguf"
    write_model(path, Tiny(), weights(Tiny()), Bytes())
    with GGUFFile(path) as before:
        write_model(path, Tiny(vocab=300), weights(Tiny(vocab=300)), Bytes())
        assert before.read("output.weight").shape == (257, 64)  # processes that have the old file open keep it
    assert read_all(path)["output.weight"].shape == (300, 64)
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]


# -- tokenizers -------------------------------------------------------------------------------------------------------

CORPUS = "The café sold 12 crêpes, didn't it?\n\tfor i in range(10): print(f'{i}')  # 中文 🙂 <unused300>\n" * 4
TOKENIZERS = {"byte": Bytes(), "char": Characters.from_texts([CORPUS]), "bpe": BPE.train([CORPUS], 320)}


@pytest.mark.parametrize("spare", [0, 1, 50])
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_tokenizer_is_read_back_unchanged(tmp_path, kind, spare):
    tokenizer = TOKENIZERS[kind]
    model = Tiny(vocab=tokenizer.vocab + spare)
    write_model(tmp_path / "m.gguf", model, weights(model), tokenizer)
    with GGUFFile(tmp_path / "m.gguf") as file:
        assert len(file.metadata["tokenizer.ggml.tokens"]) == model.vocab
        assert has_text(file)
        restored = read_tokenizer(file)
    assert (restored.kind, restored.vocab, restored.eos) == (kind, tokenizer.vocab, tokenizer.eos)
    assert restored.fingerprint() == tokenizer.fingerprint()
    assert restored.encode(CORPUS).tolist() == tokenizer.encode(CORPUS).tolist()
    assert restored.decode(restored.encode(CORPUS)) == CORPUS


def test_padding_tokens_have_unique_texts(tmp_path):
    tokenizer = BPE([*SYMBOLS, "<unused259>", END_OF_TEXT], [], 257)  # a token that is called like padding
    write_model(tmp_path / "m.gguf", Tiny(vocab=262), weights(Tiny(vocab=262)), tokenizer)
    with GGUFFile(tmp_path / "m.gguf") as file:
        tokens = file.metadata["tokenizer.ggml.tokens"]
        assert len(tokens) == len(set(tokens)) == 262
        assert file.metadata["tokenizer.ggml.token_type"].tolist() == [1] * 257 + [3] + [5] * 4
        assert read_tokenizer(file).vocab == 258


def tokenizer_keys(**changes: Any) -> tuple[bytes, ...]:
    """The keys of a small tokenizer: the bytes in reverse order, one merge, end-of-text last."""
    words = {
        "model": "gpt2", "pre": "gpt-2", "tokens": [*reversed(SYMBOLS), "ab", END_OF_TEXT],
        "merges": ["a b"], "eos_token_id": 257,
    } | changes  # fmt: skip
    keys = [ARCHITECTURE]
    for name, value in words.items():
        if isinstance(value, list):
            keys.append(key(f"tokenizer.ggml.{name}", ARRAY, array(STRING, [text(v) for v in value])))
        elif value is not None:
            kind, raw = (STRING, text(value)) if isinstance(value, str) else (U32, u32(value))
            keys.append(key(f"tokenizer.ggml.{name}", kind, raw))
    return tuple(keys)


def test_the_order_of_byte_tokens_in_a_foreign_file_is_kept(put):
    with GGUFFile(put(gguf_file(tokenizer_keys()))) as file:
        assert read_tokenizer(file).encode("cab").tolist() == [255 - ord("c"), 256]
    plain = {"tokens": [*reversed(SYMBOLS), END_OF_TEXT], "merges": ["ÿ ÿ"], "eos_token_id": 256}
    with GGUFFile(put(gguf_file(tokenizer_keys(**plain)))) as file:
        restored = read_tokenizer(file)
    assert restored.encode("ab é").tolist() == [255 - b for b in "ab é".encode()]
    assert restored.decode(restored.encode("ab é")) == "ab é"


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"model": "no_vocab"}, "(no_vocab, pre-tokenizer gpt-2) is not supported; supported: llama, and gpt2 with "),
        ({"pre": "qwen2\n"}, r"(gpt2, pre-tokenizer qwen2\n) is not supported"),
        ({"tokens": None}, "lacks tokens, merges or eos_token_id"),
        ({"merges": None}, "lacks tokens, merges or eos_token_id"),
        ({"eos_token_id": None}, "lacks tokens, merges or eos_token_id"),
        ({"tokens": ["a", "b", "a"], "eos_token_id": 1}, "two equal tokens"),
        ({"eos_token_id": 258}, "an eos_token_id that is no token"),
        ({"merges": ["a b c"]}, "a merge that is not a pair"),
    ],
)
def test_an_invalid_tokenizer_is_an_error(put, changes, cause):
    path = put(gguf_file(tokenizer_keys(**changes)))
    with GGUFFile(path) as file, pytest.raises(GGUFError) as caught:
        read_tokenizer(file)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert cause in message
    assert "\n" not in message
