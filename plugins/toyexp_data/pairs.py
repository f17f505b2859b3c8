"""Tokenized pairs of completions as batches of rows: each pair is two rows, the chosen and then the rejected one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from toyexp import TOKENS, Batch, Batches, InputSpec, UserError
from toyexp.base import stream
from toyexp_data.example_rows import ExampleDataset, Examples


class PairDataset(ExampleDataset):
    """Pairs of examples in a training part and a held-out part; examples 2i and 2i + 1 are a pair."""

    def batches(self, context: int, rows: int, seed: int) -> PairBatches:  # type: ignore[override]  # another stream
        """Return batches of `rows` / 2 pairs. Raise UserError for an odd number of rows."""
        if rows % 2:
            raise UserError(f"batch_size={rows}: must be even with data=preference, whose pairs are two rows each")
        return PairBatches(self.train, self.held_out, context, rows, seed, self._eval_batches)


class PairBatches(Batches):
    """Batches that contain each pair once per epoch, in an order that depends only on the seed and the epoch.

    The arrays are tokens and targets [rows, T], `mask` [rows, T] with 1 for targets in the completion, and one weight
    per row.
    """

    def __init__(self, train: Examples, held_out: Examples, context: int, rows: int, seed: int, eval_batches: int):
        self._train, self._held_out, self._context, self._count, self._seed = train, held_out, context, rows // 2, seed
        self._pairs, self._held_out_pairs = (_usable_pairs(part, context) for part in (train, held_out))
        if (len(train.lengths) and not len(self._pairs)) or not len(self._held_out_pairs):
            least = max(part.first.reshape(-1, 2).max(1).min() for part in (train, held_out) if len(part.first))
            problem = f"every prompt of the pairs fills the row; type model.context={least} or more"
            raise UserError(f"model.context={context}: {problem}")
        self._eval_batches, self.rows_per_epoch = eval_batches, 2 * len(self._pairs)
        ids = TOKENS.inputs(context)
        self.inputs = {**ids, "mask": ids["weights"], "weights": InputSpec((), "float32")}
        parts = ((train, self._pairs), (held_out, self._held_out_pairs))
        count = sum(len(part.lengths) // 2 for part, _ in parts)
        left_out = count - sum(len(pairs) for _, pairs in parts)
        cut = sum(int((part.lengths.reshape(-1, 2)[pairs] > context + 1).any(1).sum()) for part, pairs in parts)
        self.facts = {"truncated": cut, "too_long": left_out}
        counts = {
            f"{cut} of {count} pairs cut to the context (model.context={context})": cut,
            f"{left_out} of {count} pairs left out: a prompt exceeds the context (model.context={context})": left_out,
        }
        self.omissions = [text for text, number in counts.items() if number]

    def batch(self, k: int) -> Batch:
        """Return training batch `k`."""
        count, chosen = len(self._pairs), []
        for n in range(k * self._count, (k + 1) * self._count):
            epoch, position = divmod(n, count)
            order = np.argsort(stream(self._seed, "data-order", epoch).random_raw(count), kind="stable")
            chosen.append(self._pairs[order[position]])
        return self._fill(self._train, chosen)

    def held_out(self) -> Sequence[Batch]:
        """Return at most `eval_batches` batches of evenly spread pairs. Pairs that pad the last one have weight 0."""
        count, batches = len(self._held_out_pairs), []
        limit = min(count, self._eval_batches * self._count)
        spread = self._held_out_pairs[np.arange(limit) * count // limit]
        for first in range(0, limit, self._count):
            part = spread[first : first + self._count]
            batch = self._fill(self._held_out, np.resize(part, self._count))
            batch["weights"][2 * len(part) :] = 0
            batches.append(batch)
        return batches

    def _fill(self, part: Examples, pairs: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
        arrays = part.fill([[2 * int(pair) + side] for pair in pairs for side in (0, 1)], self._context)
        return {**arrays, "mask": arrays["weights"], "weights": np.ones(len(arrays["weights"]), np.float32)}


def _usable_pairs(part: Examples, context: int) -> np.ndarray:
    """Return the indices of the usable pairs: both rows have a token of the completion within the context."""
    usable = part.usable(context + 1).reshape(-1, 2).all(1)
    return np.flatnonzero(usable)
