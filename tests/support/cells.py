"""The documentation's table of supported GGUF files: its cells, and functions that write and read it."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "pages" / "reference" / "files.md"
ARCHITECTURES = (
    "llama", "qwen2", "qwen3", "gemma", "gpt2", "gemma2", "gemma3", "granite", "olmo2", "arcee", "smollm3", "qwen3moe",
    "olmoe",
    "lfm2", "mamba2",
)  # fmt: skip
# `--type` of an export, and the ggml type of every matrix in the file that is read.
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
    """Return the table in Markdown; `figures` has the errors (loss, log-probability) of each cell that passed."""
    head = ["model", "type", *DIRECTIONS.values(), "loss off by", "log-probability off by"]
    lines = [_line(head), _line(["---", "---", *[":-:"] * len(DIRECTIONS), "--:", "--:"])]
    for architecture in ARCHITECTURES:
        for kind in TYPES:
            ticks = [TICK if (architecture, kind, d) in figures else "" for d in DIRECTIONS]
            errors = [figures[architecture, kind, d] for d in COMPARED_DIRECTIONS if (architecture, kind, d) in figures]
            largest = [f"{max(off):.0e}".replace("e-0", "e-") for off in zip(*errors, strict=True)] or ["", ""]
            lines.append(_line([architecture, kind, *ticks, *largest]))
    return "".join(lines)


def ticked_cells(page):
    """Return the cells that are ticked in the table of a page."""
    head, _, *lines = (re.split(r" *\| *", line.strip("| \n")) for line in _table_text(page).splitlines())
    directions = {title: name for name, title in DIRECTIONS.items()}
    return [
        (line[0], line[1], directions[title])
        for line in lines
        for title, mark in zip(head, line, strict=True)
        if mark == TICK
    ]


def replace_table(page, new):
    """Return the page with its table replaced."""
    return page.replace(BEGIN + _table_text(page) + END, BEGIN + new + END)


def _table_text(page):
    return page.split(BEGIN)[1].split(END)[0]


def _line(parts):
    return f"| {' | '.join(parts)} |\n"
