"""The documentation's table of what toyexp does with which GGUF files: its cells, how it is written and read back."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "pages" / "reference" / "files.md"
ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma", "gpt2")
# What an export is asked for, and the type that ggml's quantiser gives every matrix of a file to read.
TYPES = {
    "f32": "F32", "f16": "F16", "bf16": "BF16", "q8_0": "Q8_0", "q5_1": "Q5_1", "q5_0": "Q5_0", "q4_1": "Q4_1",
    "q4_0": "Q4_0", "q6_k": "Q6_K", "q5_k_m": "Q5_K", "q4_k_m": "Q4_K", "q3_k_m": "Q3_K", "q2_k": "Q2_K",
}  # fmt: skip
DIRECTIONS = {
    "read": "read",
    "donor": "warm donor",
    "base": "LoRA base",
    "full": "full",
    "export": "export",
    "adapter": "adapter",
}
COMPARED_DIRECTIONS = ("read", "export", "adapter")  # where llama.cpp multiplies by weights of that type
CELLS = [(a, t, d) for a in ARCHITECTURES for t in TYPES for d in DIRECTIONS]
TICK = "✓"
BEGIN, END = "<!-- begin of the table by `make table` -->\n", "<!-- end of the table -->\n"


def table(figures):
    """The table in Markdown, of the (loss, log-probability) by which each cell that passed was off."""
    head = ["model", "type", *DIRECTIONS.values(), "loss off by", "log-probability off by"]
    lines = [_line(head), _line(["---", "---", *[":-:"] * len(DIRECTIONS), "--:", "--:"])]
    for architecture in ARCHITECTURES:
        for kind in TYPES:
            ticks = [TICK if (architecture, kind, d) in figures else "" for d in DIRECTIONS]
            seen = [figures[architecture, kind, d] for d in COMPARED_DIRECTIONS if (architecture, kind, d) in figures]
            largest = [f"{max(off):.0e}".replace("e-0", "e-") for off in zip(*seen, strict=True)] or ["", ""]
            lines.append(_line([architecture, kind, *ticks, *largest]))
    return "".join(lines)


def ticked_cells(page):
    """The cells that its table ticks."""
    head, _, *lines = (re.split(r" *\| *", line.strip("| \n")) for line in _within(page).splitlines())
    directions = {title: name for name, title in DIRECTIONS.items()}
    return [
        (line[0], line[1], directions[title])
        for line in lines
        for title, mark in zip(head, line, strict=True)
        if mark == TICK
    ]


def replace_table(page, new):
    """The page with another table."""
    return page.replace(BEGIN + _within(page) + END, BEGIN + new + END)


def _within(page):
    return page.split(BEGIN)[1].split(END)[0]


def _line(parts):
    return f"| {' | '.join(parts)} |\n"
