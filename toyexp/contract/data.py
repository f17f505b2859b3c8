"""Data as batches of numpy arrays, where batch k is a function of (seed, k) alone.

So every engine sees the same data, micro-batches cut the same rows, and a saved position is one integer.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np

from toyexp.base.errors import UserError
from toyexp.contract.engine import Batch
from toyexp.contract.plan import InputSpec, Plan
from toyexp.contract.planned import Planned
from toyexp.contract.values import stream
from toyexp.text.tokenizer import Tokenizer

PROMPT_TOKENS, PROMPT_LENGTH = 200, 24  # held-out tokens in which a prompt is looked for, and its characters at most


@dataclass
class Data(ABC):
    """Base of all data plugins: a dataclass whose fields say which data and how to split it."""

    name: ClassVar[str]  # what `data=` takes
    gives: ClassVar[str]  # the kind of data: "tokens" or "images"
    fills: ClassVar[tuple[str, ...]] = ()  # settings that opening the data fills in where they are empty

    @classmethod
    def recognises(cls, path: Path) -> int:
        """How well `path` fits where no `data=` says what it is: 2 like no other, 1 if nothing better does, 0 not."""
        return 0

    @abstractmethod
    def check(self) -> None:
        """Raises UserError for settings that cannot work and files that are not there."""

    @abstractmethod
    def open(self, vocabulary: Path | None) -> Dataset:
        """Reads the data. `vocabulary` is the GGUF whose tokenizer the recipe would like to share, if any."""

    def warnings(self, planned: Planned) -> Iterable[str]:
        """A sentence for each of its settings that has no effect in this run, or cannot have the one it is for."""
        return ()


class Dataset(ABC):
    """Opened data: what it is, and its batches."""

    tokenizer: Tokenizer | None = None
    vocab: int = 0  # ids run from 0 to vocab - 1 (or the number of classes)
    chat_template: str = ""  # in Jinja, that its conversations were written by

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """What run_start records: sizes and a digest of the contents."""

    def left_out(self) -> Sequence[str]:
        """What of the source is not learned from, a phrase each: how much of how much, and the key that changes that.

        `batches` may add to it what the context leaves out.
        """
        return ()

    def remarks(self) -> list[str]:
        """What a person should know of it before training, in a few words each."""
        return []

    def gguf_metadata(self) -> dict[str, Any]:
        """What a reader of the exported model must know of its data, without the architecture's prefix."""
        return {}

    def see_as(self, written: Mapping[str, Any]) -> None:
        """Shows itself as the data did whose `gguf_metadata` are in a model's file, for `toyexp eval`.

        Raises UserError for data that this model cannot be scored on. Keys that the file lacks are missing.
        """
        return

    def prompt(self) -> list[int]:
        """Ids for a model to continue, as a held-out text begins; only asked of data with a tokenizer."""
        assert self.tokenizer is not None
        return cast("list[int]", self.tokenizer.prompt("").tolist())

    @abstractmethod
    def batches(self, context: int, rows: int, seed: int) -> Batches:
        """Batches of `rows` examples, `context` positions each where that applies."""


class Batches(ABC):
    """A stream of training batches with random access, and the fixed held-out batches."""

    inputs: Mapping[str, InputSpec]

    @abstractmethod
    def batch(self, k: int) -> Batch:
        """Training batch `k`, counted from 0 without end."""

    @abstractmethod
    def held_out(self) -> Sequence[Batch]:
        """The batches that evaluation uses, the same every time."""


class TokenDataset(Dataset):
    """Token ids in two parts, one to train on and one held out."""

    def __init__(
        self,
        train: np.ndarray,
        held_out: np.ndarray,
        tokenizer: Tokenizer | None,
        vocab: int,
        eval_batches: int,
        facts: Mapping[str, Any],
        digest: str | None = None,
        left_out: Sequence[str] = (),
        remarks: Sequence[str] = (),
    ):
        """The parts may be mapped, and of any type of integer; `digest`: the SHA-256 of both as int32, where known."""
        self.train, self.held_out = train, held_out
        self.tokenizer, self.vocab = tokenizer, vocab
        self._eval_batches, self._left_out, self._remarks = eval_batches, left_out, remarks
        self._facts = {
            **facts,
            "train_tokens": len(train),
            "held_out_tokens": len(held_out),
            "tokens_sha256": digest or _digest((train, held_out)),
        }

    def describe(self) -> dict[str, Any]:
        """Token counts and a digest over both parts."""
        return self._facts

    def prompt(self) -> list[int]:
        """The first words of a line of the held-out text, of one without an indent if there is one."""
        assert self.tokenizer is not None
        lines = self.tokenizer.decode(self.held_out[:PROMPT_TOKENS]).splitlines()
        whole = [line for line in lines[1:-1] if line.strip()] or lines[:1]  # the first may be cut, as the last is
        line = next((line for line in whole if not line[0].isspace()), "".join(whole[:1]))
        return cast("list[int]", self.tokenizer.prompt(" ".join(line.split()[:3])[:PROMPT_LENGTH]).tolist())

    def left_out(self) -> Sequence[str]:
        """What whoever opened the data has left out."""
        return self._left_out

    def remarks(self) -> list[str]:
        """What whoever opened the data has to say."""
        return list(self._remarks)

    def batches(self, context: int, rows: int, seed: int) -> TokenBatches:
        """Windows of `context` tokens and their next tokens."""
        for part, ids in (("training", self.train), ("held-out", self.held_out)):
            if len(ids) <= context:
                raise UserError(
                    f"model.context={context} is longer than the {part} part of the data "
                    f"({len(ids)} tokens; a window needs {context + 1}): give more data or a smaller context"
                )
        return TokenBatches(self.train, self.held_out, context, rows, seed, self._eval_batches)


def sequence_inputs(context: int) -> dict[str, InputSpec]:
    """The arrays of a batch of sequences, each [context] a row: tokens, the targets after them, and their weights."""
    kinds = {"tokens": "int32", "targets": "int32", "weights": "float32"}
    return {name: InputSpec((context,), kind) for name, kind in kinds.items()}


class TokenBatches(Batches):
    """Every epoch visits each window of `context` tokens once, in an order drawn from (seed, epoch).

    Window boundaries move from epoch to epoch by a random offset, so that no target stays at an edge.
    """

    def __init__(self, train: np.ndarray, held_out: np.ndarray, context: int, rows: int, seed: int, eval_batches: int):
        self._train, self._held_out = train, held_out
        self._context, self._rows, self._seed = context, rows, seed
        self._eval_batches = eval_batches
        self._span = np.arange(context + 1)
        # One window fewer than fit, so that the rest is room for the offset; a tiny corpus keeps one.
        self._windows = max((len(train) - 1) // context - 1, 1)
        self._order = lru_cache(maxsize=2)(self._epoch_order)
        self.inputs = sequence_inputs(context)

    def _epoch_order(self, epoch: int) -> np.ndarray:
        """Start positions of the epoch's windows, shuffled."""
        words = stream(self._seed, "data-order", epoch).random_raw(self._windows + 1)
        spare = len(self._train) - 1 - self._windows * self._context
        offset = int(words[-1] % np.uint64(spare + 1))
        return np.argsort(words[:-1], kind="stable") * self._context + offset

    def batch(self, k: int) -> Batch:
        """Training batch `k`: tokens, targets and weights, each [rows, context]."""
        first = k * self._rows
        starts: list[int] = []
        while len(starts) < self._rows:  # a batch may cross into the next epoch, more than once on a tiny corpus
            epoch, place = divmod(first + len(starts), self._windows)
            starts.extend(self._order(epoch)[place : place + self._rows - len(starts)])
        return _windows(self._train, np.array(starts), self._span)

    def held_out(self) -> Sequence[Batch]:
        """At most `eval_batches` batches spread evenly over the held-out part; the last rows may weigh nothing."""
        count = (len(self._held_out) - 1) // self._context
        wanted = min(count, self._eval_batches * self._rows)
        starts = np.arange(wanted) * count // wanted * self._context
        batches = []
        for first in range(0, wanted, self._rows):
            part = starts[first : first + self._rows]
            spare = self._rows - len(part)  # repeated rows fill the shape and weigh nothing
            batch = _windows(self._held_out, np.concatenate([part, np.repeat(part[:1], spare)]), self._span)
            batch["weights"][len(part) :] = 0
            batches.append(batch)
        return batches


class Dropout(Batches):
    """Batches with the masks of a plan's adapters: what x is to be multiplied by, less one.

    Inverted dropout (Srivastava et al. 2014): a number is hidden, x + x * -1, or scaled up so that the mean stays.
    Drawn on the host as a function of (seed, adapter, k), so every engine hides the same. Held-out batches have no
    masks, which means zeros: nothing is hidden.
    """

    def __init__(self, batches: Batches, plan: Plan):
        self._batches, self._plan = batches, plan
        self.inputs = plan.inputs

    def batch(self, k: int) -> Batch:
        """Training batch `k` and its masks, each [rows, *spec.shape]."""
        batch = self._batches.batch(k)
        rows = len(batch["targets"])
        masks = {a.mask: self._mask(a.mask, a.dropout, rows, k) for a in self._plan.drops}
        return {**batch, **masks}

    def _mask(self, name: str, share: float, rows: int, k: int) -> np.ndarray:
        shape = (rows, *self.inputs[name].shape)
        count, hidden = math.prod(shape), round(share * 65536)  # 16 random bits decide about a number
        bits = stream(self._plan.seed, name, k).random_raw(-(-count // 4)).astype("<u8").view("<u2")[:count]
        scaled_up = hidden / (65536 - hidden)
        return np.where(bits < hidden, np.float32(-1), np.float32(scaled_up)).reshape(shape)

    def held_out(self) -> Sequence[Batch]:
        """The held-out batches as they are."""
        return self._batches.held_out()


def _windows(ids: np.ndarray, starts: np.ndarray, span: np.ndarray) -> dict[str, np.ndarray]:
    window = ids[starts[:, None] + span]  # [rows, context + 1]: each token's target is the one after it
    return {
        "tokens": np.ascontiguousarray(window[:, :-1], np.int32),
        "targets": np.ascontiguousarray(window[:, 1:], np.int32),
        "weights": np.ones((len(starts), len(span) - 1), np.float32),
    }


def _digest(parts: Sequence[np.ndarray], step: int = 1 << 20) -> str:
    """SHA-256 of arrays one after another, of which memory holds `step` ids at a time."""
    digest = hashlib.sha256()
    for ids in parts:
        for first in range(0, len(ids), step):
            digest.update(ids[first : first + step].tobytes())
    return digest.hexdigest()


def batch_digest(batch: Batch) -> str:
    """16 hex digits that identify a batch, for comparing the data order of two runs."""
    digest = hashlib.sha256()
    for name in sorted(batch):
        digest.update(batch[name].tobytes())
    return digest.hexdigest()[:16]
