"""Tokenized examples as batches of rows. Batch number k depends only on the seed and on k."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from toyexp import TOKENS, Dataset, EpochBatches, InputSpec, Tokenizer, UserError, apart_inputs
from toyexp.base import stream
from toyexp_data.chat import Example


class ExampleDataset(Dataset):
    """Data set of examples, in a training and a held-out part. Only tokens marked as learned count in the loss.

    With `pairs`, examples 2i and 2i + 1 are a pair: a chosen and a rejected completion, which are two rows of a batch.
    """

    def __init__(
        self, train: Sequence[Example], held_out: Sequence[Example], tokenizer: Tokenizer, pack: str, pairs: bool,
        eval_batches: int, facts: Mapping[str, Any], left_out: Sequence[str], remarks: Sequence[str],
    ):  # fmt: skip
        self.tokenizer, self.vocab = tokenizer, tokenizer.vocab
        self.train, self.held_out = (Examples(part, tokenizer.eos, pairs) for part in (train, held_out))
        self.pack, self.pairs, self.eval_batches = pack, pairs, eval_batches
        self._left_out, self._remarks = left_out, remarks
        parts = (self.train, self.held_out)
        digest = hashlib.sha256()
        for array in (a for part in parts for a in (part.ids, part.learned, part.lengths)):
            digest.update(array.tobytes())
        self._facts = {
            **facts,
            "train_examples": len(self.train.first),
            "held_out_examples": len(self.held_out.first),
            "tokens": sum(len(part.ids) for part in parts),
            "train_tokens": int(self.train.learned.sum()),
            "held_out_tokens": int(self.held_out.learned.sum()),
            "boundary_splits": sum(e.split for e in (*train, *held_out)),
            "tokens_sha256": digest.hexdigest(),
        }

    def prompt(self) -> list[int]:
        """Return the token ids of the first held-out example's prompt, or its first tokens if it has no prompt."""
        length = int(self.held_out.first[0]) or min(int(self.held_out.lengths[0]) // 4 + 1, 8)
        return cast("list[int]", self.held_out.ids[:length].tolist())

    def batches(self, context: int, rows: int, seed: int) -> ExampleBatches:
        """Return batches of `rows` rows of `context` tokens; a row has one example, or several if examples are packed.

        Raise UserError if no example has, within the context, a token that counts in the loss, and for an odd number of
        rows of pairs.
        """
        if self.pairs and rows % 2:
            raise UserError(f"batch_size={rows}: must be even with data=preference, whose pairs are two rows each")
        for name, part in (("training", self.train), ("held-out", self.held_out)):
            if len(part.first) and not part.usable(context + 1).any():
                problem = f"the {name} {part.unit} ({len(part.first)}) have only prompt tokens within this context"
                raise UserError(f"model.context={context}: {problem}; type model.context={part.first.min()} or more")
        return ExampleBatches(self, context, rows, seed)


class Examples:
    """All examples of a data set part as concatenated arrays: token ids, and True for ids that count in the loss.

    It also has the length of each example and, for each example or pair, the position from which on a token counts.
    """

    def __init__(self, examples: Sequence[Example], eos: int, pairs: bool = False):
        self.eos, self._size, self.unit = eos, 1 + pairs, "pairs" if pairs else "examples"
        self.ids = np.concatenate([np.empty(0, np.int32), *(e.ids for e in examples)])
        self.learned = np.concatenate([np.empty(0, bool), *(e.learned for e in examples)])
        self.lengths = np.array([len(e.ids) for e in examples], np.int64)
        self.starts = np.cumsum(self.lengths) - self.lengths
        first = np.array([int(e.learned.argmax()) for e in examples], np.int64)
        self.first = first.reshape(-1, self._size).max(1)

    def usable(self, length: int) -> np.ndarray:
        """Return a mask [N] of the usable examples or pairs: one of their first `length` tokens counts in the loss."""
        return self.first < length

    def cut(self, length: int) -> int:
        """Return how many usable examples or pairs are longer than `length` tokens."""
        longer = (self.lengths > length).reshape(-1, self._size).any(1)
        return int((self.usable(length) & longer).sum())

    def count_learned(self, examples: Sequence[int], length: int) -> int:
        """Return how many of the first `length` tokens of each of these examples count in the loss, in all."""
        chosen = np.array(sorted(examples), np.int64)
        ends = self.starts[chosen] + np.minimum(self.lengths[chosen], length)
        edges = np.stack([self.starts[chosen], ends], 1).ravel()
        return int(np.add.reduceat(np.append(self.learned, False), edges, dtype=np.int64)[::2].sum())

    def rows(self, row_length: int, pack: str, order: np.ndarray) -> list[list[int]]:
        """Return lists of the indices of examples: those that share a row, or the two of a pair, which have a row each.

        If `pack` is "none", a row has one example. Otherwise it has several that fit into `row_length` tokens (best
        fit, longest first). `order` has the indices of all examples or pairs. One is left out if none of its first
        `row_length` tokens counts in the loss.
        """
        order = order[self.usable(row_length)[order]]
        if pack == "none":
            return [[i * self._size + k for k in range(self._size)] for i in order.tolist()]
        lengths = np.minimum(self.lengths, row_length)
        rows: list[list[int]] = []
        by_room: list[list[int]] = [[] for _ in range(row_length)]  # rows by their free tokens
        for example in order[np.argsort(-lengths[order], kind="stable")].tolist():
            length = int(lengths[example])
            room = next((r for r in range(length, row_length) if by_room[r]), row_length)
            if room == row_length:
                rows.append([])
            row = by_room[room].pop() if room < row_length else len(rows) - 1
            rows[row].append(example)
            by_room[room - length].append(row)
        return rows

    def fill(self, rows: Sequence[Sequence[int]], context: int, apart: bool = False) -> dict[str, np.ndarray]:
        """Return the arrays of a batch: tokens, targets and weights, each [rows, context].

        `rows` has the numbers of the examples in each row. Rows are padded with end-of-text tokens of weight 0. If
        `apart` is True, the batch also has the arrays of `apart_inputs`.
        """
        ids = np.full((len(rows), context + 1), self.eos, np.int32)
        learned, starts = np.zeros(ids.shape, np.float32), np.zeros((len(rows), context), np.int32)
        for row, members in enumerate(rows):
            position = 0
            for example in members:
                length = min(int(self.lengths[example]), context + 1)
                source, target = int(self.starts[example]), slice(position, position + length)
                ids[row, target] = self.ids[source : source + length]
                learned[row, target] = self.learned[source : source + length]
                starts[row, position:] = position
                position += length
        arrays = {"tokens": ids[:, :-1], "targets": ids[:, 1:], "weights": learned[:, 1:]}
        if apart:
            arrays |= {"starts": starts, "positions": np.arange(context, dtype=np.int32) - starts}
        return {name: np.ascontiguousarray(array) for name, array in arrays.items()}


class ExampleBatches(EpochBatches):
    """Batches of rows of examples, as `Examples.fill` makes them; the seed also decides which share a row.

    Pairs have an array `mask` [rows, T], 1 for targets in the completion, and one weight per row.
    """

    def __init__(self, data: ExampleDataset, context: int, rows: int, seed: int):
        parts, size, length = (data.train, data.held_out), 1 + data.pairs, context + 1
        self._parts, self._context, self._apart, self._pairs = parts, context, data.pack == "apart", data.pairs
        orders = [np.arange(len(part.first)) for part in parts]
        if not data.pairs:
            orders[0] = np.argsort(stream(seed, "pack").random_raw(len(orders[0])), kind="stable")
        self._rows = [part.rows(length, data.pack, order) for part, order in zip(parts, orders, strict=True)]
        super().__init__(len(self._rows[0]), len(self._rows[1]), rows, seed, data.eval_batches * rows // size, size)
        self.inputs = TOKENS.inputs(context) | (apart_inputs(context) if self._apart else {})
        if data.pairs:
            self.inputs |= {"mask": self.inputs["weights"], "weights": InputSpec((), "float32")}
        cut, count = sum(part.cut(length) for part in parts), sum(len(part.first) for part in parts)
        too_long, setting = count - sum(int(p.usable(length).sum()) for p in parts), f"(model.context={context})"
        packed = {"packed_rows": self.rows_per_epoch} if data.pack != "none" else {}
        used = [example for row in self._rows[0] for example in row]
        counted = {"train_examples": len(used) // size, "train_tokens": data.train.count_learned(used, length)}
        self.facts = {"truncated": cut, "too_long": too_long, **counted, **packed}
        counts = {
            f"{cut} of {count} {parts[0].unit} cut to the context {setting}": cut,
            f"{too_long} of {count} {parts[0].unit} left out: their prompts exceed the context {setting}": too_long,
        }
        self.omissions = [text for text, number in counts.items() if number]

    def _take(self, items: np.ndarray, is_held_out: bool) -> dict[str, np.ndarray]:
        rows, part = [self._rows[is_held_out][item] for item in items], self._parts[is_held_out]
        if not self._pairs:
            return part.fill(rows, self._context, self._apart)
        arrays = part.fill([[example] for pair in rows for example in pair], self._context)
        return {**arrays, "mask": arrays["weights"], "weights": np.ones(len(arrays["weights"]), np.float32)}
