"""Token ids: packed little-endian uint16 or int32, TOYC, numpy's .npy, and random ones."""

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
UINT16_RATIO = 1000  # a vocabulary that is so many times smaller when the file is read as uint16 is one of uint16
RANDOM, HELD_OUT = 1_000_000, 50_000  # ids of data=random
MAX_IDS = 1 << 24  # each is a row of the embedding


@dataclass
class Tokens(SplitData):
    """A file of packed token ids: uint16 or int32, little-endian, or numpy's .npy."""

    name: ClassVar[str] = "tokens"
    gives: ClassVar[Kind] = TOKENS

    path: str = ""  # the token file
    dtype: str = "auto"  # int32 | uint16 | auto (int32; a TOYC file is always int32, an .npy says its own)
    tokenizer: str = ""  # a GGUF whose tokenizer made the ids, for samples and the export; empty: ids only
    val_fraction: float = 0.05  # the last part of the file, held out from training
    eval_batches: int = 16  # held-out batches that one eval takes

    @classmethod
    def recognises(cls, path: Path) -> int:
        """A file by its name."""
        return 2 if path.suffix in (".bin", ".npy") else 0

    @classmethod
    def suggest_settings(cls, sizes: Mapping[str, Any], tokenizer: toyexp.Tokenizer | None) -> str | None:
        """For a model that knows ids alone."""
        return None if tokenizer else "data.path=IDS.bin"

    def check(self) -> None:
        """Raises UserError for settings that cannot work and files that are not there."""
        if not self.path:
            raise UserError("data=tokens needs a token file: data.path=...")
        for key, path in (("path", self.path), ("tokenizer", self.tokenizer)):
            if path:
                require_file(path, f"data.{key}={path}")
        require_choice("data", self, dtype=DTYPES)
        super().check()

    def open(self, vocabulary: Path | None) -> toyexp.TokenDataset:
        """Reads the whole file; it is not mapped, so that nobody can cut it short under a run."""
        ids, vocab = read_tokens(Path(self.path), self.dtype)
        tokenizer = toyexp.formats.read_tokenizer(toyexp.formats.open_gguf(self.tokenizer)) if self.tokenizer else None
        if tokenizer is not None:
            if tokenizer.vocab < vocab:
                has = f"{self.tokenizer} has {tokenizer.vocab} tokens"
                raise UserError(f"{self.path}: its ids go up to {vocab - 1}, {has}")
            vocab = tokenizer.vocab
        facts = {"path": self.path, **(tokenizer_facts(tokenizer) if tokenizer else {})}
        cut = len(ids) - int(len(ids) * self.val_fraction)
        return toyexp.TokenDataset(ids[:cut], ids[cut:], tokenizer, vocab, self.eval_batches, facts)


def read_tokens(path: Path, dtype: str) -> tuple[np.ndarray, int]:
    """The int32 ids of a token file and its vocabulary; UserError for what is no such file."""
    ids, declared, typed = _numpy(path, dtype) if path.suffix in (".npy", ".npz") else _packed(path, dtype)
    hint = "" if typed else "; uint16 ids take data.dtype=uint16"
    if ids.min() < 0:
        raise UserError(f"{path}: position {int(ids.argmin())} holds the id {ids.min()}; ids begin at 0{hint}")
    top = int(ids.max()) + 1
    if top > MAX_IDS:
        place = f"position {int(ids.argmax())}"
        raise UserError(f"{path}: {place} holds the id {top - 1}; at most {MAX_IDS} make sense{hint}")
    halves = ids.astype("<i4").view("<u2")  # a pair of uint16 ids, read as one of int32, is 65536 times the second
    if not typed and dtype == "auto" and top > UINT16_RATIO * (int(halves.max()) + 1):
        what = f"its ids go up to {top - 1} as int32, to {halves.max()} as uint16"
        raise UserError(f"{path}: {what}; type data.dtype=uint16, or data.dtype=int32")
    if declared and top > declared:
        raise UserError(f"{path}: its header says {declared} ids, position {int(ids.argmax())} holds {top - 1}")
    return ids.astype("int32", copy=False), declared or top


def _packed(path: Path, dtype: str) -> tuple[np.ndarray, int, bool]:
    """Return the ids, how many ids the header says there are (0: nothing), and whether it names their type."""
    import numpy as np

    raw = read_file(path)
    declared, body, typed = 0, raw, raw[:4] == MAGIC
    if typed:
        if len(raw) < 16:
            raise UserError(f"{path}: a TOYC header has 16 bytes, the file {len(raw)}")
        version, declared, _ = struct.unpack("<III", raw[4:16])
        if version != 1:
            raise UserError(f"{path}: TOYC version {version}; version 1 is supported")
        if dtype == "uint16":
            raise UserError(f"{path}: is a TOYC file, whose ids are int32; leave data.dtype=uint16 out")
        body, dtype = raw[16:], "int32"
    kind = np.dtype(DTYPES[dtype])
    if not body:
        raise UserError(f"{path}: holds 0 bytes of ids")
    if len(body) % kind.itemsize:
        guess = "it is cut off, or holds none" if typed or len(body) % 2 else "uint16 ids take data.dtype=uint16"
        raise UserError(f"{path}: {len(body)} bytes are no whole number of {kind.itemsize}-byte ids; {guess}")
    if declared > MAX_IDS:
        raise UserError(f"{path}: its header says {declared} ids; at most {MAX_IDS} make sense")
    return np.frombuffer(body, kind).astype(np.int32), declared, typed


def _numpy(path: Path, dtype: str) -> tuple[np.ndarray, int, bool]:
    import numpy as np

    with open_file(path) as file:
        begins = file.read(len(NUMPY))
    if begins != NUMPY and not begins.startswith(b"PK"):  # an archive of numpy's, which is told as that
        raise UserError(f"{path}: is no .npy file; packed ids are named {path.stem}.bin")
    if dtype != "auto":
        raise UserError(f"{path}: is an .npy file, which says its own type; leave data.dtype={dtype} out")
    try:
        ids = np.load(path, mmap_mode="r", allow_pickle=False)  # mapped, a header cannot claim more than is there
    except (OSError, ValueError, EOFError) as error:  # numpy's words for whatever is wrong with a file
        raise UserError(f"{path}: cannot be read as numpy's .npy ({printable(str(error), 120)})") from None
    if not isinstance(ids, np.ndarray):
        raise UserError(f"{path}: is an archive of arrays; token ids are one array")
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or not ids.size:
        raise UserError(f"{path}: holds {ids.dtype} {list(ids.shape)}; token ids are one list of integers")
    return np.array(ids), 0, True


@dataclass
class Random(Data):
    """Random token ids, for measuring speed: there is nothing in them to learn."""

    name: ClassVar[str] = "random"
    gives: ClassVar[Kind] = TOKENS

    vocab: int = 1024  # ids run from 0 to vocab - 1

    def check(self) -> None:
        """Raise UserError unless `vocab` is from 1 to MOST."""
        require_range("data", self, vocab=f"[1,{MAX_INT}]")

    def open(self, vocabulary: Path | None) -> toyexp.TokenDataset:
        """Return the same ids every time; they have no tokenizer, so `vocabulary` is ignored."""
        ids = generator(0, "data=random").integers(0, self.vocab, RANDOM, dtype="int32")
        return toyexp.TokenDataset(ids[HELD_OUT:], ids[:HELD_OUT], None, self.vocab, 16, {"vocab": self.vocab})
