"""`toyexp data`: show what a run's data holds, and rows as the model reads them."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import itemgetter
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
    counted = [batch.get("mask", batch["weights"]) > 0 for batch in batches]
    positions, learned = sum(c.size for c in counted), sum(int(c.sum()) for c in counted)
    rows = [_row(prepared, batches[0], number) for number in range(min(arguments.rows or 2, len(counted[0])))]
    if arguments.json:
        facts = {**prepared.dataset.describe(), **prepared.batches.facts}
        counts = {"left_out": prepared.omissions(), "positions": positions, "counted": learned}
        print_output(dump_json({"data": facts, **counts, "rows": rows}, indent=2))
        return 0
    for line in introduction(prepared):
        if line.startswith("data"):
            print_output(line)
    share = f"{learned / positions:.0%} of the first {format_count(positions)} positions"
    print_output(f"tokens  {share} count in the loss; the others are read, or padding")
    for number, row in enumerate(rows, 1):
        length = len(row["ids"])
        print_output(f"row {number}   {pluralise(length, 'token')}, {sum(row['counts'])} count in the loss")
        print_text(_table(row) if arguments.ids else f"{_painted(row)}\n")
    return 0


def _row(prepared: Prepared, batch: Batch, number: int) -> dict[str, Any]:
    """Return a row's token ids, a list that says for each whether it counts in the loss, and the texts of the tokens.

    The row ends at its last token that counts.
    """
    counts = np.append(False, batch.get("mask", batch["weights"])[number] > 0)
    end = int(np.flatnonzero(counts)[-1]) + 1 if counts.any() else len(counts)
    tokenizer = prepared.dataset.tokenizer
    ids = np.append(batch["tokens"][number, :1], batch["targets"][number])[:end].tolist()
    runs = groupby(zip(counts.tolist(), ids, strict=False), key=itemgetter(0))
    text = [[learned, _decode(tokenizer, [i for _, i in members])] for learned, members in runs]
    tokens = [_decode(tokenizer, [i]) for i in ids]
    return {"ids": ids, "counts": counts[:end].astype(int).tolist(), "tokens": tokens, "text": text}


def _decode(tokenizer: Tokenizer | None, ids: Sequence[int]) -> str:
    """Return the text of token ids: control tokens by their names and, without a tokenizer, ids as numbers."""
    if tokenizer is None:
        return "".join(f"{i} " for i in ids)
    special, pieces = tokenizer.controls | {tokenizer.eos}, tokenizer.pieces
    runs = [(is_special, [*run]) for is_special, run in groupby(ids, key=special.__contains__)]
    return "".join("".join(pieces[i] for i in run) if is_special else tokenizer.decode(run) for is_special, run in runs)


def _painted(row: Mapping[str, Any]) -> str:
    colours = has_colour(sys.stdout)
    return "".join(
        (paint(text, "green") if colours else f"[[{text}]]") if learned else text for learned, text in row["text"]
    )


def _table(row: Mapping[str, Any]) -> str:
    tokens = enumerate(zip(row["ids"], row["counts"], row["tokens"], strict=True))
    return "".join(f"{n:>6}  {i:>7}  {'loss' if counts else '    '}  {text!r}\n" for n, (i, counts, text) in tokens)
