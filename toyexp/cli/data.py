"""`toyexp data`: show what a run's data holds, and rows as the model reads them."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np

from toyexp.base.errors import UserError, escape_cell, escape_controls
from toyexp.base.formatting import align_columns, format_count, pluralise
from toyexp.base.terminal import has_colour, paint, print_output, print_text
from toyexp.base.writing import dump_json
from toyexp.batching.images import ImageDataset
from toyexp.config.request import Request
from toyexp.interfaces.command import Arguments
from toyexp.interfaces.dataset import Batch
from toyexp.tokenizers.tokenizer import Tokenizer
from toyexp.training.experiment import prepare
from toyexp.training.run_config import Prepared, introduction

BATCHES = 8  # training batches that are counted, or more if more rows are printed

HELP = """\
usage: toyexp data [key=value ...] [options]

Show what the data of a run holds: the columns that were read, what is cut, skipped or left out, and how many tokens
count in the loss. Then print the first training rows as the model reads them. Text that counts in the loss is green or,
without colours, in brackets [[ ]]. For images, print how many each class has. Nothing is trained or written.
  toyexp data data=examples data.path=chats.jsonl model.context=256
  toyexp data recipe=lora recipe.base=model.gguf data=examples data.path=alpaca.parquet --rows 5
  toyexp data data=text data.path=book.txt --ids     each token with its id

options"""


def run(arguments: Arguments) -> int:
    """Print the report and return exit code 0. Raise UserError for invalid settings, and for other kinds of data."""
    prepared = prepare(Request.parse(arguments.settings).build_config())
    report: dict[str, Any] = {"data": {**prepared.dataset.describe(), **prepared.batches.facts}}
    report["left_out"] = prepared.omissions()
    report["warnings"] = [text for text in prepared.warnings if text.startswith("data.")]
    if isinstance(prepared.dataset, ImageDataset):
        details, lines = _describe_classes(prepared.dataset)
    elif prepared.model.reads.sequence:
        details, lines = _describe_rows(prepared, arguments)
    else:
        problem = f"holds {prepared.model.reads.units}; toyexp data shows data of tokens or images"
        raise UserError(f"data={prepared.config.data.name}: {problem}")
    if arguments.json:
        print_output(dump_json({**report, **details}, indent=2))
        return 0
    for line in introduction(prepared):
        if line.startswith("data"):
            print_output(line)
    for text in report["warnings"]:
        print_output(f"warning  {text}")
    print_text("\n".join([*lines, ""]))
    return 0


def _describe_classes(data: ImageDataset) -> tuple[dict[str, Any], list[str]]:
    """Return the numbers of training and held-out images of each class, as plain data and as lines of a table."""
    counts = [np.bincount(labels, minlength=data.vocab).tolist() for _, labels in (data.train, data.held_out)]
    rows = [*zip(data.classes, *counts, strict=True)]
    table = [["class", "training", "held out"], *([escape_cell(name), str(a), str(b)] for name, a, b in rows)]
    return {"classes": {name: {"training": a, "held_out": b} for name, a, b in rows}}, align_columns(table, (1, 2))


def _describe_rows(prepared: Prepared, arguments: Arguments) -> tuple[dict[str, Any], list[str]]:
    """Return how many positions count in the loss, and the first training rows, as plain data and as lines."""
    wanted, size = arguments.rows or 2, prepared.config.settings.batch_size
    batches = [prepared.batches.batch(k) for k in range(max(BATCHES, -(-wanted // size)))]
    counted = [batch.get("mask", batch["weights"]) > 0 for batch in batches]
    positions, learned = sum(c.size for c in counted), sum(int(c.sum()) for c in counted)
    rows = [_row(prepared, batches[n // size], n % size) for n in range(wanted)]
    share = f"{learned / positions:.0%} of the first {format_count(positions)} positions"
    lines = [f"tokens  {share} count in the loss; the others are read, or padding"]
    for number, row in enumerate(rows, 1):
        lines.append(f"row {number}   {pluralise(len(row['ids']), 'token')}, {sum(row['counts'])} count in the loss")
        lines += _table(row) if arguments.ids else [_painted(row)]
    return {"positions": positions, "counted": learned, "rows": rows}, lines


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
    texts = [(learned, escape_controls(text)) for learned, text in row["text"]]
    return "".join((paint(text, "green") if colours else f"[[{text}]]") if learned else text for learned, text in texts)


def _table(row: Mapping[str, Any]) -> list[str]:
    tokens = enumerate(zip(row["ids"], row["counts"], row["tokens"], strict=True))
    return [f"{n:>6}  {i:>7}  {'loss' if counts else '    '}  {text!r}" for n, (i, counts, text) in tokens]
