"""Write the documentation's tables of speeds from reports of `toyexp bench --json`.

    make_speeds.py                                    write the tables from speeds.json, next to this file
    make_speeds.py measure                            first measure the CPU here: `make speeds`
    make_speeds.py MACHINE SHAPE report.json          first add a report from elsewhere, such as one of a GPU

MACHINE is a key of speeds.json, which describes it; a new report replaces the figures of its engines. Figures that
bench does not measure, such as a whole run, are written into speeds.json by hand under the engine's name.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "pages" / "reference" / "measured.md"
FIGURES = Path(__file__).with_name("speeds.json")
BEGIN, END = "<!-- begin of the speeds by `make speeds` -->\n", "<!-- end of the speeds -->\n"
SHAPES = {
    "bench_100k": "vocab 256, d 64, 2 layers, context 64, batch 1",
    "bench_1m": "1024, 128, 4, 128, 4",
    "bench_6m": "4096, 256, 6, 256, 4",
    "gpt2": "65, 128, 4, 64, 12",  # nanoGPT's setting for a CPU
}
GPT2_SETTINGS = [
    "model=gpt2", "model.n_layers=4", "model.d_model=128", "model.n_heads=4", "model.d_ff=512", "model.context=64",
    "batch_size=12", "data=random", "data.vocab=65",
]  # fmt: skip
ENGINES = "cpu,cpu:compile=true,ggml,ggml:products=ggml"
STORED_KEYS = ("seconds_per_step", "ratio", "beyond_import_bytes", "share_of_peak", "device_bytes")  # of each engine
STEP, MEMORY = ("seconds_per_step", 1e3, "ms"), ("beyond_import_bytes", 1e-6, "MB")
# The processors of the first table, with variables that keep PyTorch, MKL, oneDNN and kernels.c from AVX-512.
PROCESSORS: dict[str, dict[str, str]] = {
    "2 cores": {},
    "2 cores, AVX2": {
        "CC": "gcc -mno-avx512f",
        "ATEN_CPU_CAPABILITY": "avx2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
    },
}
CPU_ROWS = [  # title, engines of a row: each cell shows the first that was measured
    ("`ggml`", ["ggml"]),
    ("`ggml:products=ggml`", ["ggml:products=ggml"]),
    ("`cpu`", ["cpu"]),
    ("`cpu:compile=true`", ["cpu:compile=true"]),
    ("plain PyTorch loop (of gpt2: nanoGPT's)", ["bare torch", "nanoGPT-style eager"]),
    ("the same, compiled", ["bare torch compiled", "nanoGPT-style"]),
    ("ggml's own autodiff", ["ggml autodiff"]),
]
GPU_ROWS = [  # machine, title, engines of a cell
    ("H200", "`ggml_cuda`", ["ggml_cuda"]),
    (
        "H200", "`cuda` (torch 2.11) with `engine.capture=false`, eager and compiled",
        ["cuda:capture=false", "cuda:capture=false:compile=true"],
    ),
    (
        "H200, another host", "whole runs on `cuda`, eager and compiled, with their callbacks",
        ["cuda", "cuda:compile=true"],
    ),
    ("H200, another host", "whole runs on `cuda` with `engine.capture=false`, eager", ["cuda:capture=false"]),
]  # fmt: skip


def text(machines):
    """Return the tables in Markdown: processors with speeds relative to `cpu`, and GPUs."""
    lines = [["", *(f"`{shape}`: {sizes}" for shape, sizes in SHAPES.items())], ["---"] * (1 + len(SHAPES))]
    for machine in PROCESSORS:
        runs, what = machines[machine]["runs"], f"{machines[machine]['what']}: "
        for title, names in CPU_ROWS:
            found = [[name for name in names if name in runs.get(shape, {})][:1] for shape in SHAPES]
            if any(found):
                cells = [
                    f"{_cell(runs[shape], name, *STEP)} ({runs[shape][name[0]]['ratio']:.2f})" if name else ""
                    for shape, name in zip(SHAPES, found, strict=True)
                ]
                lines.append([what + title, *cells])
                what = ""
        if any("beyond_import_bytes" in run["ggml"] for run in runs.values()):
            cells = [_cell(runs[shape], ["ggml", "cpu"], *MEMORY) for shape in SHAPES]
            lines.append(["memory beyond the imports, `ggml` and `cpu`", *cells])
    for i, (machine, title, names) in enumerate(GPU_ROWS):
        first = i == 0 or GPU_ROWS[i - 1][0] != machine
        cells = [_cell(machines[machine]["runs"].get(shape, {}), names, *STEP) for shape in SHAPES]
        lines.append([f"{machines[machine]['what']}: {title}" if first else title, *cells])
    return "".join("|" + "|".join(line) + "|\n" if line[0] == "---" else _line(line) for line in lines)


def _line(cells):
    return "| " + " | ".join(cells).strip() + " |\n"


def _cell(run, names, key, factor, unit):
    """Return the figures of the measured engines as a cell, such as `4.87, 2.76 ms`."""
    values = [factor * run[name][key] for name in names if key in run.get(name, ())]
    digits = [0 if unit == "MB" or value >= 99.95 else 1 if value >= 9.995 else 2 for value in values]
    return f"{', '.join(f'{value:.{n}f}' for value, n in zip(values, digits, strict=True))} {unit}" if values else ""


def section(page):
    """Return the tables of a page."""
    return page.split(BEGIN)[1].split(END)[0]


def add_report(machines, machine, shape, report):
    """Add the figures of a report of `toyexp bench --json`. Raise SystemExit for an unknown machine or shape."""
    if machine not in machines or shape not in SHAPES:
        raise SystemExit(f"{machine} {shape}: takes one of {', '.join(machines)} and one of {', '.join(SHAPES)}")
    run = machines[machine]["runs"].setdefault(shape, {})
    for engine in report["engines"]:
        run[engine["name"]] = {key: engine[key] for key in STORED_KEYS if engine.get(key) is not None}


def run_bench(machine, shape):
    """Run `toyexp bench` on this machine and return its report."""
    settings = GPT2_SETTINGS if shape == "gpt2" else [f"experiment={shape}"]
    words = ["bench", *settings, f"engine={ENGINES}", "--baseline", "--json", "--rounds", "11"]
    environment = {**os.environ, **PROCESSORS[machine]}
    done = subprocess.run([sys.executable, "-m", "toyexp", *words], check=True, stdout=-1, env=environment)
    return json.loads(done.stdout)


def describe_machine(report):
    """Return a description of the CPU that a report is of, the libraries, and what multiplies in `ggml`."""
    names = [e["note"].rpartition(", ")[0] for e in report["engines"] if e["name"] in ("ggml", "cpu")]
    info = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*: (.*)", info.read_text() if info.exists() else "")
    return "; ".join([report["machine"].partition(",")[0], *([model[1].replace("(R)", "")] if model else []), *names])


def main(machine=None, shape=None, path=None):
    machines = json.loads(FIGURES.read_text())
    if path:
        add_report(machines, machine, shape, json.loads(Path(path).read_text()))
    elif machine:
        for name in PROCESSORS:
            for bench_shape in SHAPES:
                add_report(machines, name, bench_shape, report := run_bench(name, bench_shape))
            machines[name]["what"] = describe_machine(report)
    FIGURES.write_text(json.dumps(machines, indent=1) + "\n")
    page = PAGE.read_text()
    PAGE.write_text(page.replace(BEGIN + section(page) + END, BEGIN + text(machines) + END))


if __name__ == "__main__":
    main(*sys.argv[1:])
