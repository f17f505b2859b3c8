"""Measure the structure of the code: `python tests/support/structure.py` prints the figures.

A top-level package is a file or directory directly below toyexp/. Imports count wherever they are: at the head of a
file, inside functions and for type checkers.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import io
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[2]
PRODUCT = ("toyexp", "plugins")
OURS = tuple(f"{ROOT / folder}{os.sep}" for folder in PRODUCT)

Graph = Mapping[str, set[str]]


# The packages that plugins may import.
PUBLIC = ("toyexp", "toyexp.base", "toyexp.formats", "toyexp.tokenizers", "toyexp.testing")


def modules(folder: Path) -> dict[str, Path]:
    """Return the path of every module of a package by its dotted name."""
    paths = {}
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder.parent).with_suffix("").parts
        paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return paths


def imported_modules(path: Path, known: Iterable[str]) -> set[str]:
    """Return the modules in `known` that a file imports anywhere."""
    known, result = set(known), set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            result |= {alias.name for alias in node.names if alias.name in known}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            result |= (names & known) or ({node.module} & known)
    return result


def module_graph(package: str = "toyexp") -> dict[str, set[str]]:
    """Return the imports of each module, without the package's `__init__`, which imports all public names."""
    folder = ROOT / package if (ROOT / package).is_dir() else ROOT / "plugins" / package
    known = {name: path for name, path in modules(folder).items() if name != package}
    return {name: imported_modules(path, known) - {name} for name, path in known.items()}


def package_graph(graph: Graph) -> dict[str, set[str]]:
    """Return the imports between top-level packages."""
    targets_by_package: dict[str, set[str]] = defaultdict(set)
    for name, targets in graph.items():
        package = name.split(".")[1]
        targets_by_package[package] |= {target.split(".")[1] for target in targets} - {package}
    return dict(targets_by_package)


def import_cycles(graph: Graph) -> list[list[str]]:
    """Return the strongly connected groups of modules (Tarjan, SIAM J. Comput. 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    cycles: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for target in graph.get(name, ()):
            if target not in index:
                visit(target)
            if target in stack:
                low[name] = min(low[name], low[target])
        if low[name] == index[name]:
            group = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(group) > 1:
                cycles.append(sorted(group))

    for name in graph:
        if name not in index:
            visit(name)
    return sorted(cycles)


def graph_depth(graph: Graph) -> int:
    """Return the length of the longest import chain; a cycle counts as one module."""
    group = {name: min(cycle) for cycle in import_cycles(graph) for name in cycle}
    merged: dict[str, set[str]] = defaultdict(set)
    for name, targets in graph.items():
        node = group.get(name, name)
        merged[node] |= {group.get(t, t) for t in targets} - {node}
    height: dict[str, int] = {}

    def measure_height(name: str) -> int:
        if name not in height:
            height[name] = 1 + max((measure_height(target) for target in merged.get(name, ())), default=0)
        return height[name]

    return max(measure_height(name) for name in list(merged))


def count_lines(*paths: str) -> int:
    """Return the number of Python lines below these directories."""
    return sum(len(p.read_text(encoding="utf-8").splitlines()) for folder in paths for p in _below(ROOT / folder))


def _below(path: Path) -> Iterator[Path]:
    yield from path.rglob("*.py") if path.is_dir() else [path]


class CallTrace:
    """The project's files that a call goes through, in order, as a profiler function.

    Calls while a module loads are left out: they only happen once per process. The trace ends at the function `until`.
    """

    def __init__(self, until: str = "") -> None:
        self.files: list[str] = []
        self._until, self._over = until, False
        self._loading = 0  # number of modules being loaded

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        path = frame.f_code.co_filename
        if frame.f_code.co_name == "<module>":
            self._loading += {"call": 1, "return": -1}.get(event, 0)
        ours = event == "call" and not self._loading and path.startswith(OURS)
        self._over = self._over or (ours and frame.f_code.co_name == self._until)
        if ours and not self._over and self.files[-1:] != [path]:
            self.files.append(path)

    @contextlib.contextmanager
    def watching(self) -> Iterator[CallTrace]:
        """Record the calls in the `with` block."""
        sys.setprofile(self)
        try:
            yield self
        finally:
            sys.setprofile(None)


def count_visited_files() -> dict[str, tuple[int, int]]:
    """Return (files visited, changes of file) of a run up to its data, up to its session, and of whole runs."""
    from toyexp.cli.main import main

    counts = {}
    common = "model.d_model=32 model.n_layers=1 engine=ggml engine.threads=1 data=text data.path=book.txt batch_size=2"
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        Path("book.txt").write_text("It was a bright cold day in April. " * 300)
        os.environ["TOYEXP_CACHE"] = f"{folder}/cache"
        quiet = contextlib.redirect_stdout(io.StringIO())
        warm = f"recipe=warm steps=4 {common}"
        for name, words, until in [
            ("recipe=warm until the data is opened", f"{warm} hydra.run.dir=a", "prepare"),
            ("recipe=warm until its session is built", f"{warm} hydra.run.dir=b", "realize"),
            ("recipe=warm to its end", f"{warm} hydra.run.dir=run", ""),
            ("resume to its end", "resume=run steps=6", ""),
        ]:
            with quiet, CallTrace(until).watching() as trace:
                main(words.split())
            counts[name] = len({*trace.files}), len(trace.files)
    return counts


def figures() -> dict[str, Any]:
    """Return all figures by name."""
    graph = module_graph()
    packages, files = package_graph(graph), [path for folder in PRODUCT for path in _below(ROOT / folder)]
    longest = max(files, key=lambda p: len(p.read_text().splitlines()))

    return {
        "top-level packages": len(packages),
        "modules": len(graph),
        "imports between packages": sum(map(len, packages.values())),
        "imports between modules": sum(map(len, graph.values())),
        "import cycles of modules": [len(c) for c in import_cycles(graph)],
        "import cycles of packages": [len(c) for c in import_cycles(packages)],
        "longest import chain of packages": graph_depth(packages),
        "public names": sum(len(importlib.import_module(name).__all__) for name in PUBLIC),
        "lines of product code": count_lines(*PRODUCT),
        "lines of toyexp": count_lines("toyexp"),
        "longest file": f"{longest.relative_to(ROOT)} {len(longest.read_text().splitlines())}",
        "files over 400 lines": sum(len(p.read_text().splitlines()) > 400 for p in files),
        **{name: f"{visited} files, {changes} changes" for name, (visited, changes) in count_visited_files().items()},
    }


if __name__ == "__main__":
    for name, figure in figures().items():
        print(f"{name:40} {figure}")
