"""The documentation's pages, which travel with toyexp: what `toyexp help TOPIC` shows."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from toyexp.base.errors import UserError, choose
from toyexp.config.shipped import pages_dir, templates_dir

# A line that is nothing but a link to a file of templates/, in whose place stands the file.
_TEMPLATE = re.compile(r"^\[[\w.]+\]\((?:\.\./)+templates/([\w./]+)\)$", re.MULTILINE)


def topics() -> dict[str, Path]:
    """The pages by what one types: `data`, `plugins/data`; those about plugins have the folder in front."""
    found = {}
    for path in sorted(pages_dir().rglob("*.md")):
        place = path.relative_to(pages_dir())
        name = place.parent if place.stem == "index" else place.with_suffix("")
        if name.parts:
            found["/".join(name.parts if name.parts[0] == "plugins" else name.parts[-1:])] = path
    return found


def read(topic: str) -> str:
    """A page as it stands, with the files that it shows; UserError where there is none of that name."""
    known = topics()
    if topic not in known:
        raise UserError(f"help {topic}: there is no such page; {choose(topic, known)}")
    return with_templates(known[topic].read_text())


def with_templates(page: str) -> str:
    """A page with the templates that it links to in lines of their own, such as `[x.py](../../templates/x.py)`."""

    def shown(match: re.Match[str]) -> str:
        text = (templates_dir() / match[1]).read_text().rstrip()
        return f"```{'toml' if match[1].endswith('.toml') else 'python'}\n{text}\n```"

    return _TEMPLATE.sub(shown, page)


def show(page: str) -> None:
    """Prints a page, laid out where a person reads it."""
    if not sys.stdout.isatty():
        print(page, end="")
        return
    from rich.console import Console
    from rich.markdown import Markdown

    Console(width=min(Console().width, 110)).print(Markdown(page, hyperlinks=False))
