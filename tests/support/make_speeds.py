"""Write the documentation's tables of speeds from reports of `toyexp bench --json`.

    make_speeds.py                                    write the tables from speeds.json, next to this file
    make_speeds.py MACHINE                            first measure the shapes of its table here: `make speeds`
    make_speeds.py MACHINE SHAPE report.json          first add a report from elsewhere, such as one of a GPU

MACHINE is a key of speeds.json, which describes it; a new report replaces the figures of its engines. Figures that
bench does not measure, such as a whole run, are written into speeds.json by hand under the engine's name.
"""

import json
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "pages" / "reference" / "measured.md"
FIGURES = Path(__file__).with_name("speeds.json")
BEGIN, END = "<!-- begin of the speeds by `make speeds` -->\n", "<!-- end of the speeds -->\n"
RATIOS = "<!-- begin of the ratios by `make speeds` -->\n", "<!-- end of the ratios -->\n"
SHAPES = {
    "bench_100k": "vocab 256, d 64, 2 layers, context 64, batch 1",
    "bench_1m": "1024, 128, 4, 128, 4",
    "bench_6m": "4096, 256, 6, 256, 4",
}
GPT2 = "gpt2, 4 layers, d 128, 12 x 64, vocab 65"  # nanoGPT's setting for a CPU
GPT2_SETTINGS = [
    "model=gpt2", "model.n_layers=4", "model.d_model=128", "model.n_heads=4", "model.d_ff=512", "model.context=64",
    "batch_size=12", "data=random", "data.vocab=65",
]  # fmt: skip
ENGINES = "cpu,ggml,ggml:products=ggml"
STORED_KEYS = ("seconds_per_step", "ratio", "beyond_import_bytes", "share_of_peak", "device_bytes")  # of each engine
STEP, MEMORY = ("seconds_per_step", 1e3, "ms"), ("beyond_import_bytes", 1e-6, "MB")
ROWS = [  # machine, title, engines of a cell, quantity
    ("2 cores", "`ggml`", ["ggml"], STEP),
    ("2 cores", "`ggml:products=ggml`", ["ggml:products=ggml"], STEP),
    ("2 cores", "`cpu` (torch 2.13 eager)", ["cpu"], STEP),
    ("2 cores", "bare PyTorch loop, eager and compiled", ["bare torch", "bare torch compiled"], STEP),
    ("2 cores", "ggml's own autodiff", ["ggml autodiff"], STEP),
    ("2 cores", "memory beyond the imports, `ggml` and `cpu`", ["ggml", "cpu"], MEMORY),
    ("H200", "`ggml_cuda`", ["ggml_cuda"], STEP),
    (
        "H200", "`cuda` (torch 2.11) with `engine.capture=false`, eager and compiled",
        ["cuda:capture=false", "cuda:capture=false:compile=true"], STEP,
    ),
    (
        "H200, another host", "whole runs on `cuda`, eager and compiled, with their callbacks",
        ["cuda", "cuda:compile=true"], STEP,
    ),
    ("H200, another host", "whole runs on `cuda` with `engine.capture=false`, eager", ["cuda:capture=false"], STEP),
]  # fmt: skip

WITH_KERNELS = "2 cores, kernels.c"  # the machine of the second table, whose figures are ratios to `cpu`
RATIO_ROWS = [  # title, engines: the first one with a figure is shown
    ("`ggml`", ["ggml"]),
    ("`ggml:products=ggml`", ["ggml:products=ggml"]),
    ("bare PyTorch loop, compiled (of gpt2: `cpu:compile=true`)", ["bare torch compiled", "cpu:compile=true"]),
    ("ggml's own autodiff", ["ggml autodiff"]),
]


def text(machines):
    """Return the first table in Markdown, with the sentence that compares torch and ggml's own autodiff."""
    lines = [["", *(f"`{shape}`: {sizes}" for shape, sizes in SHAPES.items())], ["---"] * 4]
    for i, (machine, title, names, what) in enumerate(ROWS):
        first = i == 0 or ROWS[i - 1][0] != machine
        cells = [_cell(machines[machine]["runs"].get(shape, {}), names, *what) for shape in SHAPES]
        lines.append([f"{machines[machine]['what']}: {title}" if first else title, *cells])
    table = "".join("|" + "|".join(line) + "|\n" if line[0] == "---" else _line(line) for line in lines)
    here = machines["2 cores"]["runs"]
    *others, last = (f"{_ratio(here[shape], 'ggml', 'cpu'):.2f}" for shape in SHAPES)
    torch = (f"On the machine with 2 cores, a step on `ggml` takes {', '.join(others)} and {last} times as long as on "
             "`cpu` at these sizes. At")  # fmt: skip
    autodiff = f"{_ratio(here['bench_6m'], 'ggml', 'ggml autodiff'):.2f} times as long as with ggml's own autodiff"
    return f"{table}\n{torch}\n`bench_6m` it takes {autodiff}.\n"


def ratios(machines):
    """Return the second table in Markdown."""
    runs = [machines[WITH_KERNELS]["runs"].get(shape, {}) for shape in (*SHAPES, GPT2)]
    lines = [["", *(f"`{shape}`" for shape in SHAPES), GPT2]]
    for title, names in RATIO_ROWS:
        values = [next((run[name]["ratio"] for name in names if name in run), None) for run in runs]
        lines.append([title, *("" if ratio is None else f"{ratio:.2f}" for ratio in values)])
    head, *rows = map(_line, lines)
    return "".join([head, "|---|---|---|---|---|\n", *rows]).replace("|  |", "| |")


def _line(cells):
    return "| " + " | ".join(cells).lstrip() + " |\n"


def _cell(run, names, key, factor, unit):
    """Return the figures of the measured engines as a cell, such as `4.87, 2.76 ms`."""
    values = [factor * run[name][key] for name in names if name in run]
    digits = [0 if unit == "MB" or value >= 99.95 else 1 if value >= 9.995 else 2 for value in values]
    return f"{', '.join(f'{value:.{n}f}' for value, n in zip(values, digits, strict=True))} {unit}" if values else ""


def _ratio(run, one, other):
    return run[one]["seconds_per_step"] / run[other]["seconds_per_step"]


def section(page, begin=BEGIN, end=END):
    """Return the text of a page between two marks."""
    return page.split(begin)[1].split(end)[0]


def add_report(machines, machine, shape, report):
    """Add the figures of a report of `toyexp bench --json`. Raise SystemExit for an unknown machine or shape."""
    if machine not in machines or shape not in (*SHAPES, GPT2):
        raise SystemExit(
            f"{machine} {shape}: takes one of {', '.join(machines)} and one of {', '.join((*SHAPES, GPT2))}"
        )
    run = machines[machine]["runs"].setdefault(shape, {})
    for engine in report["engines"]:
        run[engine["name"]] = {key: engine[key] for key in STORED_KEYS if engine.get(key) is not None}


def run_bench(shape):
    """Run `toyexp bench` on this machine and return its report."""
    settings = [f"experiment={shape}", f"engine={ENGINES}"]
    if shape == GPT2:  # which has no bare loop on the CPU
        settings = [*GPT2_SETTINGS, f"engine={ENGINES},cpu:compile=true"]
    words = ["bench", *settings, "--baseline", "--json"]
    return json.loads(subprocess.run([sys.executable, "-m", "toyexp", *words], check=True, stdout=-1).stdout)


def main(machine=None, shape=None, path=None):
    machines = json.loads(FIGURES.read_text())
    if path:
        add_report(machines, machine, shape, json.loads(Path(path).read_text()))
    elif machine:
        for bench_shape in (*SHAPES, GPT2) if machine == WITH_KERNELS else SHAPES:
            add_report(machines, machine, bench_shape, run_bench(bench_shape))
    FIGURES.write_text(json.dumps(machines, indent=1) + "\n")
    page = PAGE.read_text()
    for (begin, end), render in (((BEGIN, END), text), (RATIOS, ratios)):
        page = page.replace(begin + section(page, begin, end) + end, begin + render(machines) + end)
    PAGE.write_text(page)


if __name__ == "__main__":
    main(*sys.argv[1:])
