"""Batches of token sequences, and dropout masks; batch k depends only on (seed, k)."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from toyexp.base.errors import UserError
from toyexp.base.random import stream
from toyexp.batching.epochs import EpochBatches
from toyexp.interfaces.dataset import Batch, Batches, ChangedBatches, Dataset
from toyexp.interfaces.kind import TOKENS
from toyexp.interfaces.phases import TURN
from toyexp.interfaces.plan import NOISE, Plan
from toyexp.tokenizers.tokenizer import Tokenizer

PROMPT_TOKENS, PROMPT_LENGTH = 200, 24  # held-out tokens searched for a prompt; its maximum number of characters


class TokenDataset(Dataset):
    """Dataset of token ids: a long training sequence and a held-out one, from which batches take windows."""

    def __init__(
        self,
        train: np.ndarray,  # of any integer type, possibly memory-mapped
        held_out: np.ndarray,
        tokenizer: Tokenizer | None,
        vocab: int,
        eval_batches: int,
        facts: Mapping[str, Any],
        digest: str | None = None,  # SHA-256 of both arrays as int32, if known
        left_out: Sequence[str] = (),
        remarks: Sequence[str] = (),
        val_fraction: float | None = None,  # share of a text that is held out, for an error message
    ):
        for part, ids in (("training", train), ("held-out", held_out)):
            if ids.dtype.kind not in "iu":
                raise UserError(f"the ids of the data's {part} part are {ids.dtype}; they must be integers")
        self.train, self.held_out = train, held_out
        self.tokenizer, self.vocab = tokenizer, vocab
        self._eval_batches, self._val_fraction = eval_batches, val_fraction
        sizes = {"train_tokens": len(train), "held_out_tokens": len(held_out)}
        self._facts = {**facts, **sizes, "tokens_sha256": digest or _digest((train, held_out))}
        self._left_out, self._remarks = left_out, remarks

    def prompt(self) -> list[int]:
        """Return a prompt for samples: the token ids of the first three words of a held-out line.

        A line without an indent is preferred.
        """
        assert self.tokenizer is not None
        lines = self.tokenizer.decode(self.held_out[:PROMPT_TOKENS]).splitlines()
        complete = [line for line in lines[1:-1] if line.strip()] or lines[:1]  # first and last line may be cut off
        line = next((line for line in complete if not line[0].isspace()), "".join(complete[:1]))
        return cast("list[int]", self.tokenizer.prompt(" ".join(line.split()[:3])[:PROMPT_LENGTH]).tolist())

    def batches(self, context: int, rows: int, seed: int) -> TokenBatches:
        """Return batches of `rows` windows of `context` tokens, with the next tokens as targets.

        Raise UserError if the data is shorter than a window.
        """
        for part, ids in (("training", self.train), ("held-out", self.held_out)):
            if len(ids) <= context and (len(ids) or part == "held-out"):  # an evaluation may hold out all
                shorter = f", or model.context={len(ids) - 1} or less" if len(ids) > 1 else ""
                raise UserError(
                    f"model.context={context}: the data is too short: a row needs {context + 1} tokens, but the {part} "
                    f"part has {len(ids)}; use {self._enough(context + 1)} or more{shorter}"
                )
        return TokenBatches(self.train, self.held_out, context, rows, seed, self._eval_batches)

    def _enough(self, window: int) -> str:
        """Return an estimate of the smallest amount of data of which both parts have at least `window` tokens.

        The parts are the training and the held-out part. The result is text, such as "about 1,300 characters".
        """
        total = len(self.train) + len(self.held_out)
        held_out = self._val_fraction or len(self.held_out) / max(total, 1)
        needed = window / min(share for share in (held_out, 1 - held_out, 1.0) if share > 0)
        unit = "tokens"
        sample = np.concatenate([self.train[:PROMPT_TOKENS], self.held_out[:PROMPT_TOKENS]])
        if self.tokenizer is not None and len(sample):
            needed, unit = needed * len(self.tokenizer.decode(sample)) / len(sample), "characters"
        return f"about {float(f'{needed:.2g}'):,.0f} {unit}"


class TokenBatches(EpochBatches):
    """Batches of windows of `context` consecutive tokens; each window occurs once per epoch.

    In each epoch the training sequence is cut into adjacent windows, and the first one starts at a random offset. The
    windows are read in random order. Offset and order depend on (seed, epoch).
    """

    def __init__(self, train: np.ndarray, held_out: np.ndarray, context: int, rows: int, seed: int, eval_batches: int):
        # One window fewer than fits, to leave room for the offset, but at least one.
        windows, held_out_windows = max((len(train) - 1) // context - 1, 1), (len(held_out) - 1) // context
        super().__init__(windows, held_out_windows, rows, seed, eval_batches * rows)
        self._train, self._held_out, self._span = train, held_out, np.arange(context + 1)
        self.inputs = TOKENS.inputs(context)

    def _epoch_order(self, epoch: int) -> np.ndarray:
        """Return the shuffled start positions of the epoch's windows."""
        words, context = stream(self._seed, "data-order", epoch).random_raw(self._count + 1), len(self._span) - 1
        spare = len(self._train) - 1 - self._count * context
        offset = int(words[-1] % np.uint64(spare + 1))
        return np.argsort(words[:-1], kind="stable") * context + offset

    def _take(self, items: np.ndarray, is_held_out: bool) -> dict[str, np.ndarray]:
        ids, starts = (self._held_out, items * (len(self._span) - 1)) if is_held_out else (self._train, items)
        return shift_windows(ids[starts[:, None] + self._span])


def shift_windows(windows: np.ndarray) -> dict[str, np.ndarray]:
    """Return a batch of windows of token ids [rows, context + 1]: tokens, targets (the next tokens) and weights."""
    tokens, targets = (np.ascontiguousarray(part, np.int32) for part in (windows[:, :-1], windows[:, 1:]))
    return {"tokens": tokens, "targets": targets, "weights": np.ones(tokens.shape, np.float32)}


def _digest(parts: Sequence[np.ndarray], step: int = 1 << 20) -> str:
    """Return the SHA-256 of the concatenated arrays `parts` as int32.

    The arrays may be memory-mapped, so only `step` ids are read at a time.
    """
    digest = hashlib.sha256()
    for ids in parts:
        for first in range(0, len(ids), step):
            digest.update(np.ascontiguousarray(ids[first : first + step], "<i4").tobytes())
    return digest.hexdigest()


class Dropout(ChangedBatches):
    """Batches that also contain the random arrays of a plan: the dropout masks of its adapters and model, and noise.

    An activation x becomes x (1 + mask), which is inverted dropout (Srivastava et al. 2014). The mask is -1 for dropped
    elements and p / (1 - p) for all others, where p is the probability of dropping. The mask of batch k depends only on
    the seed, the mask's name and k, so every engine drops the same elements. Held-out batches have no masks.
    If the plan has `neftune`, the noise of a batch is drawn the same way: [B, T, d], uniform between -neftune and
    neftune, divided by sqrt(T d) (Jain et al. 2023, "NEFTune: Noisy Embeddings Improve Instruction Finetuning").
    If tensors of the plan train in turns, each batch also has the number of its turn.
    """

    def __init__(self, batches: Batches, plan: Plan, seed: int | None = None):
        super().__init__(batches, plan.inputs)
        self._plan, self._seed = plan, plan.seed if seed is None else seed

    def _change(self, batch: Batch, k: int | None) -> Batch:
        if k is None:
            return batch
        rows = len(batch["weights"])
        masks = {name: self._mask(name, share, rows, k) for name, share in self._plan.dropout_shares.items()}
        if alpha := self._plan.neftune:
            width = alpha / math.sqrt(math.prod(self.inputs[NOISE].shape))
            masks[NOISE] = (self._bits(NOISE, rows, k).astype(np.float32) + 0.5) * np.float32(width / 32768)
            masks[NOISE] -= np.float32(width)
        turn = {TURN: np.full(rows, k % turns, np.float32)} if (turns := self._plan.turns) else {}
        return {**batch, **masks, **turn}

    def _mask(self, name: str, share: float, rows: int, k: int) -> np.ndarray:
        dropped = round(share * 65536)
        scaled_up = dropped / (65536 - dropped)
        return np.where(self._bits(name, rows, k) < dropped, np.float32(-1), np.float32(scaled_up))

    def _bits(self, name: str, rows: int, k: int) -> np.ndarray:
        """Return random integers below 65536 for batch `k`, of the shape of the input `name`."""
        count = math.prod(shape := (rows, *self.inputs[name].shape))
        words = stream(self._seed, name, k).random_raw(-(-count // 4))
        return words.astype("<u8").view("<u2")[:count].reshape(shape)
