"""Token ids from files, and random ids.

A file has packed uint16 or int32 ids, perhaps after the header of toyexp (TOYC) or of llm.c, or numpy's .npy format.
"""

from __future__ import annotations

import stat
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import toyexp.formats
from toyexp import TOKENS, Data, Kind, UserError, printable
from toyexp.base import MAX_INT, NOT_TEXT_HINTS, generator, open_file, require_choice, require_file, require_range
from toyexp.base import numpy as np
from toyexp_data.files import FoundFiles, find_files
from toyexp_data.held_out import SplitData
from toyexp_data.text import tokenizer_facts

DTYPES = {"auto": "<i4", "int32": "<i4", "uint16": "<u2"}
MAGIC, NUMPY = b"TOYC", b"\x93NUMPY"
# The first number of llm.c's header of 256 int32, and the type of the ids after it. The third number is their count.
LLM_C_HEADER = 1024  # bytes
LLM_C = {20240520: "<u2", 20240801: "<u4"}
SUFFIXES = (".bin", ".npy")
UINT16_RATIO = 1000  # if reading as uint16 makes the largest id this many times smaller, it is uint16
RANDOM, HELD_OUT = 1_000_000, 50_000  # number of ids of data=random, and of held-out ids among them
MAX_IDS = 1 << 24  # each id needs a row of the embedding


@dataclass
class Tokens(SplitData):
    """Files of token ids: packed little-endian uint16 or int32, as nanoGPT and llm.c write them, or numpy's .npy."""

    name: ClassVar[str] = "tokens"
    gives: ClassVar[Kind] = TOKENS

    path: str = ""  # token file, directory, or pattern such as 'fineweb_*.bin'; files are read in the order of numbers
    val_path: str = ""  # the same for the held-out ids; empty: files named val, or by val_fraction
    dtype: str = "auto"  # int32 | uint16 | auto (int32). Headers of llm.c and TOYC, and .npy files, state their type
    tokenizer: str = ""  # GGUF file, or directory of a model, whose tokenizer made the ids, for samples and exports
    val_fraction: float = 0.05  # share of the ids held out for validation, from the end; (0, 1]
    eval_batches: int = 16  # held-out batches per evaluation

    @classmethod
    def recognises(cls, path: Path) -> int:
        """Return 2 (a certain match) for the suffixes .bin and .npy, and 0 for other paths."""
        return 2 if path.suffix in SUFFIXES else 0

    @classmethod
    def suggest_settings(cls, sizes: Mapping[str, Any], tokenizer: toyexp.Tokenizer | None) -> str | None:
        """Return an override of `data.path` with a placeholder, or None if the model has a tokenizer."""
        return None if tokenizer else "data.path=IDS.bin"

    def check(self) -> None:
        """Raise UserError for invalid settings and missing files."""
        if not self.path:
            raise UserError("data=tokens needs a token file: data.path=...")
        self._files()
        if self.tokenizer:
            require_file(self.tokenizer, f"data.tokenizer={self.tokenizer}", stat.S_IFREG, stat.S_IFDIR)
        require_choice("data", self, dtype=DTYPES)
        super().check()

    def _files(self) -> FoundFiles:
        def find(key: str) -> FoundFiles:
            what = "file of token ids (.bin .npy)"
            return find_files(getattr(self, key), lambda file: file.suffix in SUFFIXES, what, key)

        found = find("path")
        found.hold_out(find("val_path") if self.val_path else None)
        return found

    def open(self, vocabulary: Path | None) -> toyexp.TokenDataset:
        """Map the files into memory. Files named after splits are the training and the held-out part."""
        found, vocab, parts = self._files(), 0, list[Any]()
        for part in (found.files, found.held_out):
            arrays, sizes = zip(*(read_tokens(path, self.dtype) for path in part), strict=True) if part else ((), (0,))
            vocab = max(vocab, *sizes)
            parts.append(arrays[0] if len(arrays) == 1 else ConcatenatedIds(arrays))
        tokenizer = None
        if self.tokenizer:
            source = toyexp.find_model_file(Path(self.tokenizer))
            tokenizer = toyexp.formats.read_tokenizer(toyexp.formats.open_gguf(str(source)))
            if tokenizer.vocab < vocab:
                has = f"{self.tokenizer} has {tokenizer.vocab} tokens"
                raise UserError(f"{self.path}: its ids go up to {vocab - 1}, but data.tokenizer={has}")
            vocab = tokenizer.vocab
        facts = {"path": self.path, "files": len(found.files) + len(found.held_out), **found.facts()}
        train, held_out = parts
        if not found.held_out:
            cut = len(train) - int(len(train) * self.val_fraction)
            train, held_out = train[:cut], train[cut:]
        elif self.val_fraction == 1:
            train = train[:0]
        facts |= tokenizer_facts(tokenizer) if tokenizer else {}
        return toyexp.TokenDataset(
            train, held_out, tokenizer, vocab, self.eval_batches, facts, left_out=found.omissions()
        )


class ConcatenatedIds:
    """Arrays of ids, which may be mapped files, as one array: it has a length, slices and indices, but no copy."""

    def __init__(self, arrays: Sequence[np.ndarray]):
        self._arrays, self.dtype = arrays, np.result_type(*arrays) if arrays else np.dtype(np.int32)
        self._ends = np.cumsum([len(array) for array in arrays])

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            first, last, _ = index.indices(len(self))
            begins = self._ends - [len(array) for array in self._arrays]
            pieces = zip(self._arrays, begins, strict=True)
            return ConcatenatedIds([a[max(first - b, 0) : max(last - b, 0)] for a, b in pieces])
        which = np.searchsorted(self._ends, index, side="right")
        result = np.empty(np.shape(index), self.dtype)
        for number in np.unique(which):
            chosen, array = which == number, self._arrays[number]
            result[chosen] = array[np.asarray(index)[chosen] - (self._ends[number] - len(array))]
        return result

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.concatenate([np.empty(0, self.dtype), *self._arrays]).astype(dtype or self.dtype)


def read_tokens(path: Path, dtype: str) -> tuple[np.ndarray, int]:
    """Return the ids of a token file, mapped into memory, and its vocabulary size. Raise UserError if it is invalid."""
    read = _read_npy if path.suffix in (".npy", ".npz") else _read_packed
    ids, declared, is_explicit = read(path, dtype)
    hint = "" if is_explicit else "; for uint16 ids: data.dtype=uint16; for text: data=text"
    if ids.min() < 0:
        raise UserError(f"{path}: position {int(ids.argmin())} holds the id {ids.min()}; ids begin at 0{hint}")
    top = int(ids.max()) + 1
    if top > MAX_IDS:
        location = f"position {int(ids.argmax())}"
        raise UserError(f"{path}: {location} holds the id {top - 1}; the limit is {MAX_IDS}{hint}")
    # Two uint16 ids read as one int32 give 65536 times the second.
    halves = ids.view("<u2").max() if not is_explicit and dtype == "auto" else top
    if top > UINT16_RATIO * (int(halves) + 1):
        problem = f"its ids go up to {top - 1} if read as int32, to {halves} if read as uint16"
        raise UserError(f"{path}: {problem}; set data.dtype=uint16 or data.dtype=int32")
    if declared and top > declared:
        raise UserError(
            f"{path}: its header gives a vocabulary of {declared}, but position "
            f"{int(ids.argmax())} has the id {top - 1}"
        )
    return ids, declared or top


def _read_packed(path: Path, dtype: str) -> tuple[np.ndarray, int, bool]:
    """Return the ids, the vocabulary size in the header (0 if there is none), and True if a header gives the dtype."""
    require_file(path, str(path))
    size = path.stat().st_size
    raw = np.memmap(path, np.uint8, "r") if size else np.empty(0, np.uint8)
    head, declared, offset, name, kind = raw[:16].tobytes(), 0, 0, "", np.dtype(DTYPES[dtype])
    if head[:4] == b"GGUF":
        raise UserError(f"{path}: {NOT_TEXT_HINTS[b'GGUF']}")
    if head[:4] == MAGIC:
        if size < 16:
            raise UserError(f"{path}: is cut off: a TOYC file has a header of 16 bytes, this one only {size} bytes")
        version, declared, _ = struct.unpack("<III", head[4:])
        if version != 1:
            raise UserError(f"{path}: is a TOYC file of version {version}; only version 1 is supported")
        offset, name, kind = 16, "a TOYC file", np.dtype("<i4")
    elif size >= LLM_C_HEADER and (llm_c := LLM_C.get(int.from_bytes(head[:4], "little"))):
        offset, name, kind = LLM_C_HEADER, "a file of llm.c", np.dtype(llm_c)
        count = int.from_bytes(head[8:12], "little")
        if size - offset != count * kind.itemsize:
            problem = f"its header gives {count} ids of {kind.itemsize} bytes, but {size - offset} bytes follow"
            raise UserError(f"{path}: {problem}; is the file cut off?")
    if name and dtype not in ("auto", kind.name):
        raise UserError(f"{path}: is {name}, whose ids are {kind.name}; remove data.dtype={dtype}")
    if size == offset:
        raise UserError(f"{path}: holds no token ids")
    if (size - offset) % kind.itemsize:
        guess = "is the file cut off?" if name or size % 2 else "for uint16 ids: data.dtype=uint16"
        raise UserError(f"{path}: {size - offset} bytes are not a whole number of {kind.itemsize}-byte ids; {guess}")
    if declared > MAX_IDS:
        raise UserError(f"{path}: its header gives a vocabulary of {declared}; the limit is {MAX_IDS}")
    return raw[offset:].view(kind), declared, bool(name)


def _read_npy(path: Path, dtype: str) -> tuple[np.ndarray, int, bool]:
    with open_file(path) as file:
        magic = file.read(len(NUMPY))
    if magic != NUMPY and not magic.startswith(b"PK"):  # an .npz archive has its own error below
        raise UserError(f"{path}: is not an .npy file; rename packed ids to {path.stem}.bin")
    if dtype != "auto":
        raise UserError(f"{path}: is an .npy file, which has its own dtype; remove data.dtype={dtype}")
    try:
        # Mapped, so that a false header cannot claim more memory than the file has bytes.
        ids = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:  # numpy's error for an invalid file
        raise UserError(f"{path}: cannot be read as numpy's .npy ({printable(str(error), 120)})") from None
    if not isinstance(ids, np.ndarray):
        raise UserError(f"{path}: is an archive of arrays; token ids must be one array")
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or not ids.size:
        raise UserError(f"{path}: holds {ids.dtype} {list(ids.shape)}, expected a one-dimensional array of integers")
    return ids, 0, True


@dataclass
class Random(Data):
    """Random token ids, to measure speed; there is nothing to learn."""

    name: ClassVar[str] = "random"
    gives: ClassVar[Kind] = TOKENS

    vocab: int = 1024  # vocabulary size; ids are from 0 to vocab - 1

    def check(self) -> None:
        """Raise UserError unless `vocab` is from 1 to 2^31 - 1."""
        require_range("data", self, vocab=f"[1,{MAX_INT}]")

    def open(self, vocabulary: Path | None) -> toyexp.TokenDataset:
        """Return random ids, which are the same in every run. They have no tokenizer, so `vocabulary` is ignored."""
        ids = generator(0, "data=random").integers(0, self.vocab, RANDOM, dtype="int32")
        return toyexp.TokenDataset(ids[HELD_OUT:], ids[:HELD_OUT], None, self.vocab, 16, {"vocab": self.vocab})
