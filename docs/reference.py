"""Add generated pages to the site: mkdocs calls these hooks."""

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
SECTIONS = {"Commands": command_pages, "Settings": setting_pages}


def on_config(config: Any) -> Any:
    """Register the renderer of ```journey blocks, which needs no network."""
    drawn = {"name": "journey", "class": "journey", "format": journeys.format_fence}
    config.mdx_configs["pymdownx.superfences"] = {"custom_fences": [drawn]}
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages, and their sections to the table of contents."""
    pages = {f"reference/{page}": read_root_file(file) for file, page in PAGES.items()}
    pages |= notebook_pages.pages()
    reference = next(section["Reference"] for section in config.nav if "Reference" in section)
    for title, generator in SECTIONS.items():
        below = generator.pages()
        pages |= below
        reference[reference.index({title: f"reference/{title.lower()}.md"})] = {title: [*below]}
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Insert the templates that a page links to; point links to files of the repository's root at their pages."""
    return re.sub(
        rf"\]\((?:\.\./)+({'|'.join(PAGES)})\)",
        lambda link: f"](../reference/{PAGES[link[1]]})",
        insert_templates(markdown),
    )


def read_root_file(name: str) -> str:
    """Return a file of the repository's root as a page, with its links pointing to pages."""
    text = (ROOT / name).read_text()
    for file, page in {**PAGES, "README.md": "../index.md"}.items():
        text = text.replace(f"]({file})", f"]({page})")
    return text.replace("](docs/pages/", "](../")
