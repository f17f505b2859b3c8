"""Count sentences and names that hide their subject, and fail above the limits of CONTRIBUTING.md.

usage: prose.py [--list]

Two patterns find candidates in docstrings, comments and pages: openings without a head noun ("What is ...", "Those that
..."), and phrases that leave out the actor ("is told", "whoever"). A third pattern finds functions whose names are
participles, pronouns or prepositions. All are heuristics: `--list` prints every hit for a person to read.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
CODE = ("toyexp", "plugins", "templates")
PAGES = ("README.md", "CONTRIBUTING.md", "docs/pages")
CODE_LIMIT, PAGE_LIMIT = 2.0, 3.0  # hits per thousand words
NAME_LIMIT = 4.0  # percent of functions

OPENING = re.compile(
    r"^(What|Whose|Those|That|Likewise|The same|The other|So many|Of|As|Such|It|Its|One|Has|Have|Meanwhile|Itself"
    r"|Nothing|Both|All|Where|Who|Which|By|With|Without|For|Until|Once|Unless|Beside|Too|Also|None)\b"
    r"(?! (?:MB|GB|of the))"
)
PHRASE = re.compile(
    r"\b(is|are|was|were) (told|said|asked for|looked at|begun|there|meant|noted)\b"
    r"|\b(nobody|somebody|whoever|wherever|whatever|thereof|of which|in which|to which|so many|as many|likewise|beside"
    r"|as it (seems|stands)|sees to|goes on|go on|goes by|has to be|is to|are to|that which|those that"
    r"|what (is|was|comes|came|it|they|a|an|the))\b",
    re.IGNORECASE,
)
NAME = re.compile(
    r"(?:^|_)(told|made|given|begun|shown|taken|found|seen|held|kept|known|left|sent|drawn|written|chosen|spoken|thrown|meant|built"
    r"|heard|gone|come|done|put|named|asked|looked|wanted|\w+ed|of|at|in|by|for|with|from|beside|ahead|apart|early|sooner|here"
    r"|there|own|those|others?|same|where|whose|what|how|who|whoever|nobody)$"
)
DIRECTIVE = re.compile(r"#\s*(fmt|noqa|type|ruff|mypy|--)")


@dataclass(frozen=True)
class Text:
    """One docstring, comment or paragraph."""

    path: Path
    line: int
    words: str
    is_docstring: bool = False

    @property
    def hits(self) -> int:
        """Count the patterns that match."""
        first_sentence = re.split(r"(?<=[.:;])\s", self.words)[0]
        opening = self.is_docstring and OPENING.match(first_sentence) is not None
        return opening + len(PHRASE.findall(self.words))


def read_code(path: Path) -> Iterator[Text]:
    """Yield the docstrings and comments of a Python file."""
    source = path.read_text()
    for node in ast.walk(ast.parse(source)):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if documented and (docstring := ast.get_docstring(node)):
            yield Text(path, getattr(node, "lineno", 1), " ".join(docstring.split()), is_docstring=True)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and len(token.string) > 12 and not DIRECTIVE.match(token.string):
            yield Text(path, token.start[0], token.string.lstrip("# "))


def read_page(path: Path) -> Iterator[Text]:
    """Yield the paragraphs of a page, without code blocks, tables, headings and pictures."""
    # Blocks of code leave their line ends, so that line numbers stay right.
    source = re.sub(r"```.*?```", lambda block: "\n" * block[0].count("\n"), path.read_text(), flags=re.DOTALL)
    line = 1
    for paragraph in re.split(r"\n[ \t]*\n", source):
        lines = [text for text in paragraph.split("\n") if not text.lstrip().startswith(("|", "#", "!["))]
        words = " ".join(" ".join(lines).split())
        if len(words.split()) > 3:
            yield Text(path, line, words)
        line += paragraph.count("\n") + 2


def read_function_names(path: Path) -> Iterator[tuple[str, int]]:
    """Yield the name and line of each function, except special methods and tests."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith(("__", "test")):
            yield node.name, node.lineno


def find(roots: tuple[str, ...], suffix: str) -> list[Path]:
    """Return the files with this suffix under the roots, which may be files."""
    paths = [ROOT / root for root in roots]
    return sorted(file for path in paths for file in ([path] if path.is_file() else path.rglob(f"*{suffix}")))


def measure(title: str, texts: list[Text], limit: float, listed: bool) -> bool:
    """Print the hits per thousand words, and return whether they stay within the limit."""
    hits = 1000 * sum(text.hits for text in texts) / sum(len(text.words.split()) for text in texts)
    print(f"{title}: {hits:.1f} hits per thousand words (limit {limit:g})")
    for text in texts:
        if text.hits and (listed or hits > limit):
            print(f"  {text.path.relative_to(ROOT)}:{text.line}: {text.words[:140]}")
    return hits <= limit


def measure_names(listed: bool) -> bool:
    """Print the share of function names that are no verbs or nouns, and return whether it stays within the limit."""
    functions = [(name, path, line) for path in find(CODE, ".py") for name, line in read_function_names(path)]
    unclear = [function for function in functions if NAME.search(function[0])]
    share = 100 * len(unclear) / len(functions)
    print(f"function names: {share:.1f} % (limit {NAME_LIMIT:g} %)")
    for name, path, line in unclear:
        if listed or share > NAME_LIMIT:
            print(f"  {path.relative_to(ROOT)}:{line}: {name}")
    return share <= NAME_LIMIT


def main() -> int:
    """Measure code, pages and names; return 1 if one of them is above its limit."""
    listed = "--list" in sys.argv[1:]
    code = [text for path in find(CODE, ".py") for text in read_code(path)]
    pages = [text for path in find(PAGES, ".md") for text in read_page(path)]
    results = [
        measure("docstrings and comments", code, CODE_LIMIT, listed),
        measure("pages", pages, PAGE_LIMIT, listed),
        measure_names(listed),
    ]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
