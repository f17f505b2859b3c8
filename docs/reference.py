"""mkdocs asks this for the pages that are made from the code, and from files beside it."""

import re
from pathlib import Path
from typing import Any

import command_pages
import journeys
import notebook_pages
import setting_pages
from mkdocs.structure.files import File, Files

from toyexp.cli.pages import insert_templates

ROOT = Path(__file__).parent.parent
PAGES = {"CONTRIBUTING.md": "contributing.md", "SECURITY.md": "trust.md", "CHANGELOG.md": "changes.md"}
BELOW = {"Commands": command_pages, "Settings": setting_pages}


def on_config(config: Any) -> Any:
    """Has blocks of ```journey drawn; nothing is fetched for that, now or by a browser."""
    drawn = {"name": "journey", "class": "journey", "format": journeys.fence}
    config.mdx_configs["pymdownx.superfences"] = {"custom_fences": [drawn]}
    return config


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages, and those that make a section to the table of contents."""
    pages = {f"reference/{page}": beside(file) for file, page in PAGES.items()}
    pages |= notebook_pages.pages()
    reference = next(section["Reference"] for section in config.nav if "Reference" in section)
    for title, made in BELOW.items():
        below = made.pages()
        pages |= below
        reference[reference.index({title: f"reference/{title.lower()}.md"})] = {title: [*below]}
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Return a page with the templates it links to; links to files of the checkout become links to pages."""
    return re.sub(
        rf"\]\((?:\.\./)+({'|'.join(PAGES)})\)",
        lambda link: f"](../reference/{PAGES[link[1]]})",
        insert_templates(markdown),
    )


def beside(name: str) -> str:
    """A file of the checkout as a page; links to files beside it lead to their pages."""
    text = (ROOT / name).read_text()
    for file, page in {**PAGES, "README.md": "../index.md"}.items():
        text = text.replace(f"]({file})", f"]({page})")
    return text
