"""`toyexp data`: show what a run's data holds, and rows as the model reads them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

import numpy as np

from toyexp.base.errors import UserError
from toyexp.base.formatting import format_count, pluralise
from toyexp.base.terminal import has_colour, paint, print_output, print_text
from toyexp.base.writing import dump_json
from toyexp.config.request import Request
from toyexp.interfaces.command import Arguments
from toyexp.interfaces.dataset import Batch
from toyexp.tokenizers.tokenizer import Tokenizer
from toyexp.training.experiment import prepare
from toyexp.training.run_config import Prepared, introduction

BATCHES = 8  # training batches that are counted

HELP = """\
usage: toyexp data [key=value ...] [options]

Show what the data of a run holds: the columns that were read, what is cut, skipped or left out, and how many tokens
count in the loss. Then print the first training rows as the model reads them. Text that counts in the loss is green or,
without colours, in brackets [[ ]]. Nothing is trained or written.
  toyexp data data=examples data.path=chats.jsonl model.context=256
  toyexp data recipe=lora recipe.base=model.gguf data=examples data.path=alpaca.parquet --rows 5
  toyexp data data=text data.path=book.txt --ids     each token with its id

options"""


def run(arguments: Arguments) -> int:
    """Print the report and return exit code 0. Raise UserError for invalid settings, or data that has no tokens."""
    prepared = prepare(Request.parse(arguments.settings).build_config())
    kind, name = prepared.model.reads, prepared.config.data.name
    if not kind.sequence:
        raise UserError(f"data={name}: holds {kind.units}; toyexp data shows data of tokens")
    batches = [prepared.batches.batch(k) for k in range(min(BATCHES, prepared.config.settings.steps))]
    counts = _count(batches)
    rows = [_row(prepared, batches[0], number) for number in range(min(arguments.rows or 2, len(batches[0]["tokens"])))]
    if arguments.json:
        facts = {**prepared.dataset.describe(), **prepared.batches.facts}
        print_output(dump_json({"data": facts, "left_out": prepared.omissions(), **counts, "rows": rows}, indent=2))
        return 0
    for line in introduction(prepared):
        if line.startswith("data"):
            print_output(line)
    share, total = counts["counted"] / counts["positions"], format_count(counts["positions"])
    print_output(
        f"tokens  {share:.0%} of the first {total} positions count in the loss; the others are read, or padding"
    )
    for number, row in enumerate(rows, 1):
        length = len(row["ids"])
        print_output(f"row {number}   {pluralise(length, 'token')}, {sum(row['counts'])} count in the loss")
        print_text(_table(row) if arguments.ids else f"{_painted(row)}\n")
    return 0


def _count(batches: list[Batch]) -> dict[str, int]:
    """Return how many positions the batches have, and how many of them count in the loss."""
    counted = [batch.get("mask", batch["weights"]) for batch in batches]
    return {"positions": sum(c.size for c in counted), "counted": sum(int(np.count_nonzero(c)) for c in counted)}


def _row(prepared: Prepared, batch: Batch, number: int) -> dict[str, Any]:
    """Return a row's token ids, a list that says for each whether it counts in the loss, and the texts of the tokens.

    The row ends at its last token that counts.
    """
    counts = np.append(False, batch.get("mask", batch["weights"])[number] > 0)
    end = int(np.flatnonzero(counts)[-1]) + 1 if counts.any() else len(counts)
    ids = np.append(batch["tokens"][number, :1], batch["targets"][number])[:end]
    tokenizer = prepared.dataset.tokenizer
    texts = [_token_text(tokenizer, int(i)) for i in ids] if tokenizer else [f"{i} " for i in ids]
    groups = groupby(range(end), key=lambda i: bool(counts[i]))
    runs = [(learned, [*members]) for learned, members in groups]
    decoded = [
        [learned, _decode(tokenizer, ids[members]) if tokenizer else "".join(texts[i] for i in members)]
        for learned, members in runs
    ]
    return {"ids": ids.tolist(), "counts": counts[:end].astype(int).tolist(), "tokens": texts, "text": decoded}


def _decode(tokenizer: Tokenizer, ids: np.ndarray) -> str:
    """Return the text of token ids; control tokens appear by their names."""
    special = tokenizer.controls | {tokenizer.eos}
    runs = groupby(ids.tolist(), key=lambda i: i if i in special else None)
    return "".join(
        tokenizer.decode([*members]) if token is None else tokenizer.pieces[token] * len([*members])
        for token, members in runs
    )


def _token_text(tokenizer: Tokenizer, token: int) -> str:
    return tokenizer.pieces[token] if token in tokenizer.controls | {tokenizer.eos} else tokenizer.decode([token])


def _painted(row: Mapping[str, Any]) -> str:
    colours = has_colour(sys.stdout)
    return "".join(
        (paint(text, "green") if colours else f"[[{text}]]") if learned else text for learned, text in row["text"]
    )


def _table(row: Mapping[str, Any]) -> str:
    lines: Iterator[str] = (
        f"{number:>6}  {token:>7}  {'loss' if counts else '    '}  {text!r}"
        for number, (token, counts, text) in enumerate(zip(row["ids"], row["counts"], row["tokens"], strict=True))
    )
    return "".join(f"{line}\n" for line in lines)
