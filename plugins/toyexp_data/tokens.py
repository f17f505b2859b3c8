"""Token ids from files, and random ids.

A file has packed uint16 or int32 ids, int32 ids after a 16-byte header that begins with TOYC, or numpy's .npy format.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import toyexp.formats
from toyexp import TOKENS, Data, Kind, UserError, printable
from toyexp.base import MAX_INT, generator, open_file, read_file, require_choice, require_file, require_range
from toyexp_data.held_out import SplitData
from toyexp_data.text import tokenizer_facts

if TYPE_CHECKING:
    import numpy as np

DTYPES = {"auto": "<i4", "int32": "<i4", "uint16": "<u2"}
MAGIC, NUMPY = b"TOYC", b"\x93NUMPY"
UINT16_RATIO = 1000  # if reading as uint16 makes the largest id this many times smaller, it is uint16
RANDOM, HELD_OUT = 1_000_000, 50_000  # number of ids of data=random, and of held-out ids among them
MAX_IDS = 1 << 24  # each id needs a row of the embedding


@dataclass
class Tokens(SplitData):
    """File of packed token ids: little-endian uint16 or int32, or numpy's .npy."""

    name: ClassVar[str] = "tokens"
    gives: ClassVar[Kind] = TOKENS

    path: str = ""  # the token file
    dtype: str = "auto"  # int32 | uint16 | auto (int32). TOYC files are always int32; an .npy file states its type
    tokenizer: str = ""  # GGUF file with the tokenizer that made the ids, for samples and exports; empty: none
    val_fraction: float = 0.05  # share of the file held out for validation, from its end; (0, 1]
    eval_batches: int = 16  # held-out batches per evaluation

    @classmethod
    def recognises(cls, path: Path) -> int:
        """Return 2 (a certain match) for the suffixes .bin and .npy, and 0 for other paths."""
        return 2 if path.suffix in (".bin", ".npy") else 0

    @classmethod
    def suggest_settings(cls, sizes: Mapping[str, Any], tokenizer: toyexp.Tokenizer | None) -> str | None:
        """Return an override of `data.path` with a placeholder, or None if the model has a tokenizer."""
        return None if tokenizer else "data.path=IDS.bin"

    def check(self) -> None:
        """Raise UserError for invalid settings and missing files."""
        if not self.path:
            raise UserError("data=tokens needs a token file: data.path=...")
        for key, path in (("path", self.path), ("tokenizer", self.tokenizer)):
            if path:
                require_file(path, f"data.{key}={path}")
        require_choice("data", self, dtype=DTYPES)
        super().check()

    def open(self, vocabulary: Path | None) -> toyexp.TokenDataset:
        """Read the whole file into memory, so that later changes of the file cannot affect the run."""
        ids, vocab = read_tokens(Path(self.path), self.dtype)
        tokenizer = toyexp.formats.read_tokenizer(toyexp.formats.open_gguf(self.tokenizer)) if self.tokenizer else None
        if tokenizer is not None:
            if tokenizer.vocab < vocab:
                has = f"{self.tokenizer} has {tokenizer.vocab} tokens"
                raise UserError(f"{self.path}: its ids go up to {vocab - 1}, but data.tokenizer={has}")
            vocab = tokenizer.vocab
        facts = {"path": self.path, **(tokenizer_facts(tokenizer) if tokenizer else {})}
        cut = len(ids) - int(len(ids) * self.val_fraction)
        return toyexp.TokenDataset(ids[:cut], ids[cut:], tokenizer, vocab, self.eval_batches, facts)


def read_tokens(path: Path, dtype: str) -> tuple[np.ndarray, int]:
    """Return the int32 ids of a token file and its vocabulary size; raise UserError for an invalid file."""
    read = _read_npy if path.suffix in (".npy", ".npz") else _read_packed
    ids, declared, is_explicit = read(path, dtype)
    hint = "" if is_explicit else "; for uint16 ids: data.dtype=uint16; for text: data=text"
    if ids.min() < 0:
        raise UserError(f"{path}: position {int(ids.argmin())} holds the id {ids.min()}; ids begin at 0{hint}")
    top = int(ids.max()) + 1
    if top > MAX_IDS:
        location = f"position {int(ids.argmax())}"
        raise UserError(f"{path}: {location} holds the id {top - 1}; the limit is {MAX_IDS}{hint}")
    halves = ids.astype("<i4").view("<u2")  # two uint16 ids read as one int32 give 65536 times the second
    if not is_explicit and dtype == "auto" and top > UINT16_RATIO * (int(halves.max()) + 1):
        problem = f"its ids go up to {top - 1} if read as int32, to {halves.max()} if read as uint16"
        raise UserError(f"{path}: {problem}; set data.dtype=uint16 or data.dtype=int32")
    if declared and top > declared:
        raise UserError(
            f"{path}: its header gives a vocabulary of {declared}, but position "
            f"{int(ids.argmax())} has the id {top - 1}"
        )
    return ids.astype("int32", copy=False), declared or top


def _read_packed(path: Path, dtype: str) -> tuple[np.ndarray, int, bool]:
    """Return the ids, the vocabulary size in the header (0 if there is none), and True if a header gives the dtype."""
    import numpy as np

    raw = read_file(path)
    declared, body, has_header = 0, raw, raw[:4] == MAGIC
    if has_header:
        if len(raw) < 16:
            raise UserError(f"{path}: is cut off: a TOYC file has a header of 16 bytes, this one only {len(raw)} bytes")
        version, declared, _ = struct.unpack("<III", raw[4:16])
        if version != 1:
            raise UserError(f"{path}: is a TOYC file of version {version}; only version 1 is supported")
        if dtype == "uint16":
            raise UserError(f"{path}: is a TOYC file, whose ids are int32; remove data.dtype=uint16")
        body, dtype = raw[16:], "int32"
    kind = np.dtype(DTYPES[dtype])
    if not body:
        raise UserError(f"{path}: holds no token ids")
    if len(body) % kind.itemsize:
        guess = "is the file cut off?" if has_header or len(body) % 2 else "for uint16 ids: data.dtype=uint16"
        raise UserError(f"{path}: {len(body)} bytes are not a whole number of {kind.itemsize}-byte ids; {guess}")
    if declared > MAX_IDS:
        raise UserError(f"{path}: its header gives a vocabulary of {declared}; the limit is {MAX_IDS}")
    return np.frombuffer(body, kind).astype(np.int32), declared, has_header


def _read_npy(path: Path, dtype: str) -> tuple[np.ndarray, int, bool]:
    import numpy as np

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
    return np.array(ids), 0, True


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
