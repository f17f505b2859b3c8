"""Format numbers, paths and tables for reading."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

UNZIP_PREFIX = "toyexp-zip-"  # of the temporary directory with the files of a zip archive


def format_count(n: float) -> str:
    """Format a number with a metric prefix: 950, 12.3k, 4.5M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if n >= size:
            return f"{n / size:.3g}{unit}"
    return f"{n:.0f}"


def display_path(path: Path | str) -> str:
    """Return a path as the user knows it.

    toyexp unpacks a zip archive into a temporary directory. For a file in it, return the path without this directory.
    """
    return re.sub(rf"^(.*[/\\])?{UNZIP_PREFIX}\w+[/\\]", "", str(path))


def short_path(path: Path) -> str:
    """Return a path as text, relative to the working directory if it lies inside that directory."""
    return display_path(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def format_value(value: Any) -> str:
    """Format a setting's value as it is typed in an override: null, true, [a,b], {a: 1}."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {format_value(item)}' for key, item in value.items())}}}"
    if isinstance(value, list):
        return f"[{','.join(map(format_value, value))}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def short_keys(keys: Sequence[str]) -> list[str]:
    """Shorten each setting key to its last component, such as `beta2` for optim.beta2.

    A key stays as it is if another key has the same last component.
    """
    last = [key.rpartition(".")[2] for key in keys]
    return [word if last.count(word) == 1 else key for key, word in zip(keys, last, strict=True)]


def describe_parameters(model: Mapping[str, Any]) -> str:
    """Return text such as "1,200 parameters, 300 train" or "LoRA r=8 on attn_q: 300 of 1,200 parameters".

    `model` has `parameters`, `trainable` and `adapters`, as the event run_start records them. Without them, return "".
    """
    total, trainable = model.get("parameters"), model.get("trainable")
    if (adapters := model.get("adapters")) and isinstance(trainable, int) and isinstance(total, int):
        return f"{adapters}: {trainable:,} of {total:,} parameters"
    share = f", {trainable:,} train" if isinstance(trainable, int) and trainable != total else ""
    return f"{total:,} parameters{share}" if isinstance(total, int) else ""


def pluralise(n: int, noun: str = "thread") -> str:
    """Return `1 thread`, `2 threads`."""
    return f"{n} {noun}{'' if n == 1 else 's'}"


def format_bytes(n: int) -> str:
    """Format a size in bytes: 948 kB, 145 MB, 4.92 GB, 6.4 PB."""
    units = ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"))
    size, unit = next(((s, u) for s, u in units if n >= 0.9995 * s), (1e3, "kB"))
    return f"{n / size:.3g} {unit}"


def format_duration(seconds: float) -> str:
    """Format seconds: 0.35 ms, 41 s, 12 min, 3.4 h, 2.1 days."""
    for limit, size, unit in ((1, 1e-3, "ms"), (100, 1, "s"), (6000, 60, "min"), (172800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 86400:.3g} days"


def align_columns(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Align rows of cells into lines; column indices in `right` are right-aligned. Rows of one cell are not changed."""
    table = [row for row in rows if len(row) > 1]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for row in rows:
        cells = [c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=False))]
        lines.append("  ".join(cells).rstrip() if len(row) > 1 else row[0])
    return lines


def format_csv(table: Iterable[Sequence[object]]) -> str:
    """Return rows as comma-separated values.

    A text that a spreadsheet would run as a formula gets a leading quote.
    """
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([_quote_formula(cell) for cell in row] for row in table)
    return text.getvalue()


def _quote_formula(cell: object) -> object:
    if isinstance(cell, str) and cell[:1] in ("=", "+", "-", "@", "\t", "\r"):
        try:
            float(cell)
        except ValueError:
            return f"'{cell}"
    return cell


def format_loss(value: float) -> str:
    """Format a loss with four decimals, or in scientific notation from 1e7 on; NaN and infinity as nan and inf."""
    return f"{value:.4g}" if abs(value) >= 1e7 else f"{value:z.4f}"


def smooth_loss(before: float | None, loss: float, step: int) -> float | None:
    """Return the exponential moving average of the training loss after `step`.

    `before` is the average up to the previous step, or None. The average covers about 50 steps, fewer in the first
    1000. A NaN or infinite loss does not change it.
    """
    if not math.isfinite(loss):
        return before
    return loss if before is None else before + max(1 / 50, min(20 / step, 1.0)) * (loss - before)


def format_metric(value: float | None, decimals: int = 4, none: str = "-") -> str:
    """Format a metric with `decimals` (large numbers in scientific notation); None, NaN and infinity become `none`."""
    number = math.nan if value is None else value
    return f"{number:z.{decimals}{'f' if abs(number) < 1e7 else 'g'}}" if math.isfinite(number) else none
