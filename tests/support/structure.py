"""The structure of the code in numbers: `python tests/support/structure.py` prints them.

Rooms are the files and folders directly below toyexp/, arrows the imports between them: at the head of a file, inside
functions and for type checkers alike.
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


# What plugins import: the rest of toyexp is its own.
PUBLIC = ("toyexp", "toyexp.base", "toyexp.formats", "toyexp.tokenizers", "toyexp.testing")


def modules(folder: Path) -> dict[str, Path]:
    """Every module below a package's folder by its dotted name."""
    found = {}
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported_modules(path: Path, known: Iterable[str]) -> set[str]:
    """The modules among `known` that a file imports, wherever in it that stands."""
    known, found = set(known), set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name in known}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (names & known) or ({node.module} & known)
    return found


def module_graph(package: str = "toyexp") -> dict[str, set[str]]:
    """Which module imports which; the facade, which imports all that it names, is left out."""
    folder = ROOT / package if (ROOT / package).is_dir() else ROOT / "plugins" / package
    known = {name: path for name, path in modules(folder).items() if name != package}
    return {name: imported_modules(path, known) - {name} for name, path in known.items()}


def package_graph(graph: Graph) -> dict[str, set[str]]:
    """The same between the rooms of the house."""
    found: dict[str, set[str]] = defaultdict(set)
    for name, targets in graph.items():
        room = name.split(".")[1]
        found[room] |= {target.split(".")[1] for target in targets} - {room}
    return dict(found)


def import_cycles(graph: Graph) -> list[list[str]]:
    """The groups of modules of which each reaches every other (Tarjan, SIAM J. Comput. 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

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
                found.append(sorted(group))

    for name in graph:
        if name not in index:
            visit(name)
    return sorted(found)


def graph_depth(graph: Graph) -> int:
    """How many floors the house has: the longest way down, a circle counted as one."""
    group = {name: min(circle) for circle in import_cycles(graph) for name in circle}
    merged: dict[str, set[str]] = defaultdict(set)
    for name, targets in graph.items():
        own = group.get(name, name)
        merged[own] |= {group.get(t, t) for t in targets} - {own}
    height: dict[str, int] = {}

    def floor(name: str) -> int:
        if name not in height:
            height[name] = 1 + max((floor(target) for target in merged.get(name, ())), default=0)
        return height[name]

    return max(floor(name) for name in list(merged))


def count_lines(*paths: str) -> int:
    """Lines of Python below these folders."""
    return sum(len(p.read_text(encoding="utf-8").splitlines()) for folder in paths for p in _below(ROOT / folder))


def _below(path: Path) -> Iterator[Path]:
    yield from path.rglob("*.py") if path.is_dir() else [path]


class CallTrace:
    """Which files a call goes through, in their order: of this project alone, without what is done to load a module.

    That happens once in a process, to whoever comes first. `until` is the name of a function where the walk ends.
    """

    def __init__(self, until: str = "") -> None:
        self.files: list[str] = []
        self._until, self._over = until, False
        self._loading = 0  # modules that are being executed

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
        """Watches the calls in the block."""
        sys.setprofile(self)
        try:
            yield self
        finally:
            sys.setprofile(None)


def count_visited_files() -> dict[str, tuple[int, int]]:
    """Files visited and changes of file: of a run up to what is allocated first, of a whole run, and of going on."""
    from toyexp.cli.main import main

    found = {}
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
            with quiet, CallTrace(until).watching() as walk:
                main(words.split())
            found[name] = len({*walk.files}), len(walk.files)
    return found


def figures() -> dict[str, Any]:
    """All numbers by what they count."""
    graph = module_graph()
    house, files = package_graph(graph), [path for folder in PRODUCT for path in _below(ROOT / folder)]
    longest = max(files, key=lambda p: len(p.read_text().splitlines()))

    return {
        "rooms at house level": len(house),
        "modules": len(graph),
        "arrows at house level": sum(map(len, house.values())),
        "arrows between modules": sum(map(len, graph.values())),
        "circles of modules": [len(c) for c in import_cycles(graph)],
        "circles of rooms": [len(c) for c in import_cycles(house)],
        "floors of the house": graph_depth(house),
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
