"""Base class of all tokenizers, and tokenization of long texts in pieces.

Every tokenizer can be stored in a GGUF and gives the same ids in llama.cpp. byte_level.py has the kinds that toyexp
trains; sentencepiece.py has the other kind that a GGUF may hold. If a tokenizer was read from a GGUF, an export writes
the tokenizer keys of that GGUF unchanged.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np

from toyexp.base.errors import UserError
from toyexp.base.formatting import format_bytes
from toyexp.base.lazy import tokenizers as hf
from toyexp.base.memory import available_bytes
from toyexp.base.signals import run_interruptibly
from toyexp.base.terminal import print_error

WHITE = " \t\n\v\f\r"  # what llama.cpp strips next to some special tokens
PIECE = 1 << 15  # size of a piece in characters; it ends at the last possible cut before twice this size
BATCH = 1 << 21  # characters tokenized at once, on all cores
LARGE = PIECE << 9  # characters of a piece above which a warning is printed
CHARACTER_MEMORY = 100  # bytes of memory per character during tokenization
END_OF_TEXT = "<|endoftext|>"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # token types of llama.cpp


def byte_symbols() -> list[str]:
    """Return the characters by which GPT-2 represents the 256 bytes (Radford 2019).

    A byte that is a printable character in Latin-1 is represented by this character, and any other byte by a character
    from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(b) if b in printable else chr(next(spare)) for b in range(256)]


SYMBOLS = byte_symbols()
SYMBOL_BYTES = {symbol: byte for byte, symbol in enumerate(SYMBOLS)}


class Tokenizer(ABC):
    """Tokenizer with ids 0..vocab-1, in which `eos` separates documents.

    If an attribute of a subclass differs from the default here, the constructor must set it before a text is encoded.
    """

    kind: str
    pieces: Sequence[str]  # each token's text as GGUF writes it: control tokens are literal
    merges: Sequence[tuple[str, str]] = ()
    eos: int
    bos: int | None = None  # id put before each text if `add_bos`; None if there is none
    add_bos: bool = False
    add_eos: bool = False  # whether llama.cpp ends a prompt with `eos`
    extra_end_ids: frozenset[int] = frozenset()  # tokens besides `eos` that end generation
    controls: frozenset[int] = frozenset()  # control tokens besides `eos`, which plain text never produces
    user_defined: frozenset[int] = frozenset()  # tokens matched literally, before all others
    swallow_before: frozenset[int] = frozenset()  # special tokens that strip the white space before them
    swallow_after: frozenset[int] = frozenset()  # special tokens that strip the white space after them
    family: str = ""  # what `general.name` must contain for llama.cpp to use the same rules
    undecoded_ids: frozenset[int] = frozenset()  # ordinary tokens that decode to nothing, such as padding
    chat_template: str = ""  # Jinja template of conversations; exported with the model
    source: Mapping[str, Any] = {}  # the `tokenizer.*` keys of the GGUF it was read from, without that prefix

    @property
    def vocab(self) -> int:
        """Number of token ids."""
        return len(self.pieces)

    @property
    def end_ids(self) -> frozenset[int]:
        """Ids at which generation stops."""
        return self.extra_end_ids | {self.eos}

    @property
    def padding(self) -> int:
        """Id that pads the rows of a batch: the padding token of the GGUF, or `eos` if there is none."""
        declared = self.source.get("ggml.padding_token_id")
        return declared if isinstance(declared, int) and 0 <= declared < self.vocab else self.eos

    # -- text to ids --------------------------------------------------------------------------------------------

    @abstractmethod
    def _encode(self, texts: Sequence[str], starts: Sequence[bool]) -> list[np.ndarray]:
        """Return the int32 ids of each text; the texts contain no special tokens.

        `starts` is True for a text at the beginning of a document or after a special token, and False for a
        continuation.
        """

    def encode(self, text: str, special: bool = False, after: int | None = None) -> np.ndarray:
        """Return the int32 ids of a text that follows the token `after`, or that begins a document if `after` is None.

        With `special`, control tokens spelled out in the text become their ids; without it, they are encoded as plain
        text.
        """
        if after in self.swallow_after:
            text = text.lstrip(WHITE)
        return self.encode_pieces([text], [after is None or after in self._special], special)[0]

    def encode_pieces(self, texts: Sequence[str], begins: Sequence[bool], special: bool = False) -> list[np.ndarray]:
        """Return the int32 ids of each text.

        `begins` is True for a text that begins a document, False for one that continues a document that was cut.
        `special` works as in `encode`.
        """
        before, after = self.swallow_before, self.swallow_after
        texts_cut = [_extract_special(text, self._literals[special], before, after) for text in texts]
        starts = [
            n > 0 or first
            for parts, first in zip(texts_cut, begins, strict=True)
            for n, part in enumerate(parts)
            if isinstance(part, str)
        ]
        plain = [part for parts in texts_cut for part in parts if isinstance(part, str)]
        encoded = iter(self._encode(plain, starts))
        empty = np.zeros(0, np.int32)
        return [
            np.concatenate([empty, *(next(encoded) if isinstance(p, str) else np.array([p], np.int32) for p in parts)])
            for parts in texts_cut
        ]

    def cuts(self, text: str) -> Iterator[int]:
        """Yield positions, last first, where a long text may be cut without changing its token ids.

        `text` is the beginning of the long text.
        """
        literals = self._literals[False]
        ahead = max(map(len, literals), default=1) - 1
        stripped = WHITE if self.swallow_before or self.swallow_after else ""
        for position in self._places(text):
            before, after = text[:position].rstrip(stripped), text[position:].lstrip(stripped)
            nearby = before[-ahead - 1 :] + after[:ahead]
            if len(after) >= ahead and not any(literal in nearby for literal in literals):
                yield position

    @abstractmethod
    def _places(self, text: str) -> Iterator[int]:
        """Yield positions, last first, where a cut does not change the token ids; the text has no special tokens."""

    @cached_property
    def _special(self) -> frozenset[int]:
        return self.controls | self.user_defined | {self.eos}

    @cached_property
    def _literals(self) -> tuple[dict[str, int], dict[str, int]]:
        """Return two dicts {text: id} of the special tokens to search for in a text, longest text first.

        The first has only user-defined tokens, the second also control tokens.
        """
        searched = (
            sorted(ids, key=lambda i: (-len(self.pieces[i].encode()), i)) for ids in (self.user_defined, self._special)
        )
        first, second = ({self.pieces[i]: i for i in ids} for ids in searched)
        return first, second

    def prompt(self, text: str) -> np.ndarray:
        """Return the int32 ids of a prompt, with `bos` and `eos` where llama.cpp adds them; never empty."""
        ids = [self.bos] * self.add_bos + self.encode(text).tolist() + [self.eos] * self.add_eos
        return np.array(ids or [self.eos if self.bos is None else self.bos], np.int32)

    # -- ids to text --------------------------------------------------------------------------------------------

    def token_bytes(self, i: int) -> bytes:
        """Return the bytes that token `i` decodes to; b"" for a control token.

        A token may begin or end inside a character.
        """
        if i == self.eos or i in self.controls or i in self.undecoded_ids:
            return b""
        return self.pieces[i].encode() if i in self.user_defined else self._token_bytes(i)

    def _token_bytes(self, i: int) -> bytes:
        """Return the bytes of an ordinary token, whose text is written with GPT-2's characters for the 256 bytes.

        If the text contains any other character, return the text in UTF-8.
        """
        piece = self.pieces[i]
        return bytes(SYMBOL_BYTES[c] for c in piece) if SYMBOL_BYTES.keys() >= set(piece) else piece.encode()

    def spelling(self, i: int) -> str:
        """Return the text of token `i` as chat templates write it."""
        return self.pieces[i] if i in self._special else self.token_bytes(i).decode("utf-8", errors="replace")

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of ids; control tokens are skipped and invalid UTF-8 becomes the replacement character."""
        return b"".join(self.token_bytes(int(i)) for i in ids).decode("utf-8", errors="replace")

    # -- to files -----------------------------------------------------------------------------------------------

    def fingerprint(self) -> str:
        """Return a digest, in 16 hex digits, of everything that determines the ids of a document."""
        basics: list[Any] = [self.kind, list(self.pieces), [list(m) for m in self.merges]]
        rules = self._rules()
        text = json.dumps([*basics, rules] if rules else basics)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def _rules(self) -> dict[str, Any]:
        """Return the attributes, except vocabulary and merges, that affect token ids and differ from the defaults."""
        rules: dict[str, Any] = {"user_defined": sorted(self.user_defined)} if self.user_defined else {}
        if self.add_bos:
            rules["bos"] = self.bos
        if self.swallow_before or self.swallow_after:
            rules["swallow"] = [sorted(self.swallow_before), sorted(self.swallow_after)]
        if self.eos != self.vocab - 1:
            rules["eos"] = self.eos
        return rules

    def gguf_metadata(self) -> dict[str, Any]:
        """Return the metadata `tokenizer.*` for a GGUF file, as a dict whose keys lack the prefix `tokenizer.`.

        For a tokenizer that was read from a GGUF file, this is the metadata of that file.
        """
        keys = dict(self.source) or self._own_metadata()
        return {**keys, "chat_template": self.chat_template} if self.chat_template else keys

    def _own_metadata(self) -> dict[str, Any]:
        # llama.cpp requires a merge list, and gguf-py cannot write an empty one. No UTF-8 contains the byte 0xFF, so
        # this merge never applies. If it applied, llama.cpp would lose bytes, because its result is not a token.
        merges = self.merges or [(SYMBOLS[0xFF], SYMBOLS[0xFF])]
        types = np.full(self.vocab, NORMAL, np.int32)
        types[[*self.user_defined]], types[[self.eos, *self.controls]] = USER_DEFINED, CONTROL
        keys = {
            "model": "gpt2",
            "pre": "gpt-2",
            "tokens": list(self.pieces),
            "token_type": types,
            "merges": [f"{a} {b}" for a, b in merges],
            "bos_token_id": self.eos,
            "eos_token_id": self.eos,
            "add_bos_token": False,
        }
        return {f"ggml.{key}": value for key, value in keys.items()}

    @abstractmethod
    def _library(self) -> Any:
        """Return a tokenizers.Tokenizer that gives the same ids as this tokenizer and contains all its tokens."""

    def to_huggingface(self) -> tuple[str, dict[str, Any]]:
        """Return the contents of tokenizer.json, as JSON text, and of tokenizer_config.json, as a dict."""
        engine = self._library()
        for i in sorted(self._special):
            # llama.cpp's converter decodes tokens that are not normalised, and "\u00f6" would then become a byte.
            is_byte = engine.normalizer is None and engine.decoder.decode([self.pieces[i]]) != self.pieces[i]
            token = hf.AddedToken(self.pieces[i], normalized=is_byte, special=i not in self.user_defined)
            (engine.add_tokens if i in self.user_defined else engine.add_special_tokens)([token])
        bos = None if self.bos is None else self.pieces[self.bos]
        start, end = [self.bos] * self.add_bos, [self.eos] * self.add_eos
        contents = json.loads(engine.to_str()) | {"post_processor": _surround(self.pieces, start, end)}
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": bos,
            "eos_token": self.pieces[self.eos],
            "pad_token": self.pieces[self.padding],
            "padding_side": "left",  # generation continues each row at its end
            "add_bos_token": self.add_bos,
            "add_eos_token": self.add_eos,
            "clean_up_tokenization_spaces": False,
        }
        if self.chat_template:
            config["chat_template"] = self.chat_template
        return json.dumps(contents, ensure_ascii=False), config


def _surround(pieces: Sequence[str], start: Sequence[int | None], end: Sequence[int | None]) -> dict[str, Any] | None:
    """Return the post-processor for tokenizer.json that adds the tokens `start` before and `end` after a text.

    Return None if there are no such tokens.
    """
    tokens = [i for i in (*start, *end) if i is not None]
    if not tokens:
        return None
    marks = [{"SpecialToken": {"id": pieces[i], "type_id": 0}} for i in tokens]
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    single = [*marks[: len(start)], first, *marks[len(start) :]]
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, *marks[: len(start)], second, *marks[len(start) :]],
        "special_tokens": {pieces[i]: {"id": pieces[i], "ids": [i], "tokens": [pieces[i]]} for i in tokens},
    }


def placeholder(i: int) -> str:
    """Return a placeholder, such as <5>, for a token id that has no text."""
    return f"<{i}>"


def placeholder_metadata(rows: int) -> dict[str, Any]:
    """Return the GGUF keys `tokenizer.*` of a model whose `rows` token ids have no text.

    The returned keys lack the prefix `tokenizer.`. Each id gets a placeholder as its text, because without a vocabulary
    llama.cpp's server aborts at the first generated token.
    """
    keys = {
        "model": "llama",
        "tokens": [placeholder(i) for i in range(rows)],
        "token_type": np.full(rows, NORMAL, np.int32),
        "eos_token_id": rows - 1,
        "bos_token_id": rows - 1,
        "add_bos_token": False,
        "add_space_prefix": False,
    }
    return {f"ggml.{key}": value for key, value in keys.items()}


def _extract_special(
    text: str, literals: Mapping[str, int], before: Collection[int], after: Collection[int]
) -> list[str | int]:
    """Split a text at its special tokens; return a list of the plain texts and the ids of the special tokens.

    `literals` maps the text of each special token to its id. The text is searched for one special token after another,
    as in llama.cpp. Tokens whose id is in `before` strip the white space before them. Tokens whose id is in `after`
    strip the white space after them.
    """
    parts: list[str | int] = [text] if text else []
    for literal, i in literals.items():
        if literal in text:
            swallows = i in before, i in after
            parts = [
                new
                for part in parts
                for new in (_split(part, literal, i, *swallows) if isinstance(part, str) else [part])
            ]
    return parts


def _split(text: str, literal: str, i: int, before: bool, after: bool) -> list[str | int]:
    between = text.split(literal)
    if before:
        between = [*(part.rstrip(WHITE) for part in between[:-1]), between[-1]]
    if after:
        between = [between[0], *(part.lstrip(WHITE) for part in between[1:])]
    parts: list[str | int] = [i] * (2 * len(between) - 1)
    parts[::2] = between
    return [part for part in parts if part != ""]


class Piece(NamedTuple):
    """A piece of a document. `begins` is True for the first piece of a document, `ends` for the last one."""

    text: str
    begins: bool
    ends: bool


def split_text(chunks: Iterable[str], cuts: Callable[[str], Iterator[int]], size: int = PIECE) -> Iterator[Piece]:
    """Join the chunks of a document, and yield it in pieces of up to 2 x `size` characters.

    `cuts` receives the beginning of the text and yields positions where it may be cut, last first. If there is no such
    position, the piece becomes longer.
    """
    text, target, begins = "", size, True
    for chunk in chunks:
        text += chunk
        while len(text) > 2 * target:
            cut = next(cuts(text[: 2 * target]), 0)
            if cut:
                yield Piece(text[:cut], begins, ends=False)
                text, target, begins = text[cut:], size, False
            else:
                target *= 2
                _check_memory(target)
    if text:
        yield Piece(text, begins, ends=True)


def _check_memory(size: int) -> None:
    """Raise UserError for a piece that needs more memory than is free; print a warning for a very large one."""
    free = available_bytes() if size >= LARGE else None
    if free is not None and size * CHARACTER_MEMORY > free:
        needed = f"needs {format_bytes(size * CHARACTER_MEMORY)} of memory, but {format_bytes(free)} are free"
        run = f"the tokenizer cannot split {size / 1e6:.0f} million characters of the text; this piece"
        raise UserError(f"{run} {needed}; choose another data.tokenizer")
    if size == LARGE:
        print_error(
            "warning: this tokenizer cannot split the text, so it is tokenized in one piece, which needs much memory"
        )


def encode_documents(tokenizer: Tokenizer, documents: Iterable[Iterable[str]]) -> Iterator[np.ndarray]:
    """Yield the int32 ids of documents, one array per piece of a document; a document is given as chunks of text.

    `bos` comes before each document if the tokenizer has `add_bos`, and `eos` after each.
    """
    start = np.array([tokenizer.bos] if tokenizer.add_bos else [], np.int32)
    end = np.array([tokenizer.eos], np.int32)
    for batch in _batches(tokenizer, documents):
        texts, begins = [part.text for part in batch], [part.begins for part in batch]
        encoded = run_interruptibly(partial(tokenizer.encode_pieces, texts, begins))
        for part, ids in zip(batch, encoded, strict=True):
            yield np.concatenate([start[: part.begins], ids, end[: part.ends]])


def _batches(tokenizer: Tokenizer, documents: Iterable[Iterable[str]]) -> Iterator[list[Piece]]:
    """Yield the documents' pieces in batches of about BATCH characters."""
    batch: list[Piece] = []
    size = 0
    for chunks in documents:
        for part in split_text(chunks, tokenizer.cuts):
            batch.append(part)
            size += len(part.text)
            if size >= BATCH:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch
