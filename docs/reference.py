"""mkdocs asks this for the pages that are made from the code, and from files beside it."""

import contextlib
import io
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from toyexp.commands.line import main
from toyexp.contract.plugins import load

ROOT = Path(__file__).parent.parent
TITLES = {"optim": "Optimisers", "data": "Data", "callbacks": "Callbacks"}


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages."""
    pages = {
        "reference/commands.md": commands(),
        "reference/settings.md": settings(),
        "reference/contributing.md": beside("CONTRIBUTING.md"),
        "reference/trust.md": beside("SECURITY.md"),
        "reference/changes.md": beside("CHANGELOG.md"),
    }
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def said(*words: str) -> str:
    """What toyexp prints for these words."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main([*words]) == 0, words
    return printed.getvalue().rstrip()


def fenced(text: str) -> str:
    """As it stands, in letters of one width."""
    return f"```text\n{text}\n```\n"


def commands() -> str:
    """The help of all commands, as it is printed."""
    parts = ["# Commands\n\nWhat `toyexp --help` and the help of each command print.\n", fenced(said("--help"))]
    for name in load().offers["command"]:
        parts.append(f"## toyexp {name}\n\n{fenced(said(name, '--help'))}")
    return "\n".join(parts)


def settings() -> str:
    """Every part with its settings, as `toyexp plugins NAME` prints them, by kind."""
    registry = load()
    parts = [
        "# Settings\n\nEvery part and its settings with their defaults, as `toyexp plugins NAME` prints them; keys that"
        " belong to no part stand under [toyexp --help](commands.md).\n"
    ]
    for kind, offers in registry.offers.items():
        if kind != "command":
            parts.append(f"## {TITLES.get(kind, kind.capitalize() + 's')}\n")
            parts += [f"### {name}\n\n{table(said('plugins', name))}" for name in offers]
    return "\n".join(parts)


def table(text: str) -> str:
    """The settings of one part as a table, behind the line that says what it is."""
    first, *rest = text.splitlines()
    rows = [re.fullmatch(r"  (\S+?)=(.*?)(?:  +(.*))?", line) for line in rest]
    if not all(rows):
        return fenced(text)
    cells = ""
    for row in rows:
        said_of_it = (row[3] or "").replace("|", "&#124;")
        cells += f"| `{row[1]}` | `{row[2]}` | {said_of_it} |\n"
    about = re.sub(r"^\S+\s+(.*?)(  \[.*\])?$", r"\1", first)
    return f"{about}\n\n" + (f"| setting | default | |\n|---|---|---|\n{cells}" if cells else "")


def beside(name: str) -> str:
    """A file of the checkout as a page; links to files beside it lead to their pages."""
    pages = {
        "CONTRIBUTING.md": "contributing.md",
        "SECURITY.md": "trust.md",
        "CHANGELOG.md": "changes.md",
        "README.md": "../index.md",
    }
    text = (ROOT / name).read_text()
    for file, page in pages.items():
        text = text.replace(f"]({file})", f"]({page})")
    return text
