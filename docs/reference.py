"""Add generated pages to the site: mkdocs calls these hooks."""

import contextlib
import html
import io
import re
import tomllib
from pathlib import Path
from typing import Any

import command_pages
import journeys
import notebook_pages
import setting_pages
from mkdocs.structure.files import File, Files

import toyexp
from toyexp.base.terminal import STYLES, Head, choose_colour, print_output
from toyexp.cli.pages import insert_templates

ROOT = Path(__file__).parent.parent
PAGES_FOLDER = Path(__file__).parent / "pages"
PAGES = {"CONTRIBUTING.md": "contributing.md", "SECURITY.md": "trust.md", "CHANGELOG.md": "changes.md"}
# Relative weight in the site's search, whose first results should help users.
SEARCH_BOOST = {
    "reference/changes.md": 0.1, "reference/house.md": 0.1, "reference/measured.md": 0.5, "start/class.md": 0.5,
    "notebooks/first_run.md": 0.5, "notebooks/compare_and_sweep.md": 0.5,
}  # fmt: skip
SECTIONS = {"Commands": command_pages, "Settings": setting_pages}


def on_config(config: Any) -> Any:
    """Register the renderer of ```journey blocks, which needs no network, and show the version in the footer.

    The header links to the repository if pyproject.toml names it: `Repository` in `[project.urls]`.
    """
    config.copyright = f"toyexp {toyexp.__version__}"
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"].get("urls", {})
    config.repo_url, config.repo_name = urls.get("Repository"), "Repository"
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
    """Complete a page: templates that it links to, links to files of the repository's root, regions, pictures."""
    name = page.file.src_uri
    page.meta["search"] = {"boost": SEARCH_BOOST.get(name, 0.3 if name.startswith("plugins/") else 1)}
    if name == "index.md":
        page.meta["hide"] = ["navigation", "toc"]
    markdown = re.sub(
        rf"\]\((?:\.\./)+({'|'.join(PAGES)})\)",
        lambda link: f"](../reference/{PAGES[link[1]]})",
        insert_templates(markdown),
    )
    markdown = re.sub(r"^> \[!(\w+)\]\n((?:>.*\n?)+)", admonition, markdown, flags=re.MULTILINE)
    markdown = re.sub(r"<!-- begin (\w+) -->", r'<div class="\1" markdown>', markdown)
    markdown = markdown.replace("<!-- end -->", "</div>")
    return add_forms(markdown, (PAGES_FOLDER / name).parent)


def on_page_content(content: str, page: Any, config: Any, files: Files) -> str:
    """Allow breaks in settings, not in options such as `--top-k 40`; colour outputs of commands like a terminal."""
    content = re.sub(r"<code>(?=--?\w[^<]{0,24}</code>)", '<code class="option">', content)
    content = re.sub(
        r"(?<!<span></span>)<code>[^<]+</code>",
        lambda code: re.sub(r"(?<=[=},])(?=[^\s<]{5})", "<wbr>", code[0]),
        content,
    )
    return re.sub(r'(?<=<span class="go">)[^<]+(?=</span>)', paint_output, content)


def paint_output(line: re.Match[str]) -> str:
    """Return a line of a command's output with its roles as elements, whose classes are `t-` and a key of STYLES."""
    text, output = html.unescape(line[0]), io.StringIO()
    is_head = re.fullmatch(r"[a-z][a-z -]*  [a-z -]+", text) is not None
    choose_colour(["--color=always"])
    with contextlib.redirect_stdout(output):
        print_output(Head(text) if is_head else text)
    choose_colour([])
    names = {code: name for name, code in STYLES.items()}
    painted = html.escape(output.getvalue().removesuffix("\n"), quote=False).replace("\x1b[0m", "</span>")
    return re.sub(r"\x1b\[([\d;]+)m", lambda code: f'<span class="t-{names[code[1]]}">', painted)


def admonition(alert: re.Match[str]) -> str:
    """Return a GitHub alert, a quote that begins with [!WARNING], as the site's admonition."""
    text = re.sub(r"^> ?", "    ", alert[2], flags=re.MULTILINE)
    return f"!!! {alert[1].lower()}\n{text}"


def add_forms(markdown: str, folder: Path) -> str:
    """Show each picture in the form of the theme and width, such as report_dark.webp, and link to its full size.

    Forms are files: NAME_dark for a dark page, NAME_narrow for a phone.
    """

    def all_forms(picture: re.Match[str]) -> str:
        alt, path, suffix = picture.groups()
        forms = [("", "")]
        for name, other in (("dark", "light"), ("narrow", "wide")):
            if (folder / f"{path}_{name}{suffix}").is_file():
                forms = [("", f"#only-{other}"), (f"_{name}", f"#only-{name}")]
        return "".join(f"[![{alt}]({path}{form}{suffix}{only})]({path}{suffix}){{.zoom}}" for form, only in forms)

    return re.sub(r"!\[([^\]]*)\]\(([\w./-]+?)(\.\w+)\)", all_forms, markdown)


def read_root_file(name: str) -> str:
    """Return a file of the repository's root as a page, with its links pointing to pages."""
    text = (ROOT / name).read_text()
    for file, page in {**PAGES, "README.md": "../index.md"}.items():
        text = text.replace(f"]({file})", f"]({page})")
    return text.replace("](docs/pages/", "](../")
