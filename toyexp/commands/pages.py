"""The documentation's pages, which travel with toyexp: what `toyexp help TOPIC` shows."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from toyexp.base.errors import UserError, choose, nearest
from toyexp.base.terminal import on_terminal
from toyexp.config.shipped import PAGES, TEMPLATES

# A line that is nothing but a link to a file of templates/, in whose place stands the file.
_TEMPLATE = re.compile(r"^\[[\w.]+\]\((?:\.\./)+templates/([\w./]+)\)$", re.MULTILINE)


def topics() -> dict[str, Path]:
    """The pages by what one types: `data`, `plugins/data`, which have their folder in front; `start` is the first."""
    found: dict[str, Path] = {}
    for path in sorted(PAGES.rglob("*.md")):
        place = path.relative_to(PAGES)
        name = place.parent if place.stem == "index" else place.with_suffix("")
        found["/".join(name.parts if name.parts[:1] == ("plugins",) else name.parts[-1:]) or "start"] = path
    return found


def read(topic: str) -> str:
    """A page with the files that it shows, its links as what one types; UserError where there is none of that name."""
    known = topics()
    if topic not in known:
        raise UserError(f"help {topic}: there is no such page; {_instead(topic, known)}")
    page, by_path = known[topic], {path: name for name, path in known.items()}

    def told(link: re.Match[str]) -> str:
        name = by_path.get((page.parent / link[2]).resolve())
        return f"{link[1]} (`toyexp help {name}`)" if name and name != topic else link[1]

    text = re.sub(r"^ *<!--.*?-->\n+", "", with_templates(page.read_text()), flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"!\[([^\]]*)\]\([^)]*\)", r"(picture: \1)", text)
    text = re.sub(r"\[([^\]]+)\]\(#[\w-]+\)", r"\1", text)  # to another place of the same page
    return re.sub(r"\[([^\]]+)\]\(([\w./-]+\.(?:md|py))(?:#[\w-]*)?\)", told, text)


def _instead(topic: str, known: Mapping[str, Path]) -> str:
    """The page that may be meant: the nearest, or that of a setting; of guides/data.md, its place in a folder, data."""
    own = topic.removesuffix(".md").rpartition("/")[2]
    if meant := nearest(topic, known) or (own if own in known else nearest(own, known)) or _OF_KEY.get(own):
        return f"did you mean {meant}?"
    return choose("", known)


def with_templates(page: str) -> str:
    """A page with the templates that it links to in lines of their own, such as `[x.py](../../templates/x.py)`."""

    def shown(match: re.Match[str]) -> str:
        text = (TEMPLATES / match[1]).read_text().rstrip()
        return f"```{'toml' if match[1].endswith('.toml') else 'python'}\n{text}\n```"

    return _TEMPLATE.sub(shown, page)


def show(page: str) -> None:
    """Prints a page, laid out where a person reads it."""
    if not on_terminal():
        print(page, end="")
        return
    from rich.console import Console
    from rich.markdown import Markdown

    Console(width=min(Console().width, 110)).print(Markdown(page, hyperlinks=False))


# What an error is about, by how it begins or what it holds: the first that fits; then by its key, or its command.
_ABOUT = (
    (r"add -m to sweep|run it with -m", "sweeps"),
    (r"^out of memory|loss is (nan|inf)", "symptoms"),
    (r"^--type[ =]", "exports"),
    (r"^(--?[a-z]|'[^']*' is neither)", "runs"),
    (r"to train on: resume=", "resume"),
    (r"the GGUF files on this machine", "recipes"),
    (r"llama-quantize|llama\.cpp", "exports"),
    (r"^hydra\.(run|sweep)\.dir=|is not empty|choose another directory", "outputs"),
    (r"^plugins=", "plugins"),
)
_OF_KEY = {
    "engine": "engines", "recipe": "recipes", "model": "models", "data": "data", "optim": "optimisers",
    "callbacks": "callbacks", "sweep": "sweeps", "resume": "resume", "experiment": "runs", "format": "exports",
    "lr": "runs", "steps": "runs", "batch_size": "runs", "seed": "runs", "name": "outputs",
}  # fmt: skip
_OF_COMMAND = {
    "eval": "after", "generate": "after", "describe": "after", "predict": "after", "merge": "after", "models": "after",
    "export": "exports", "runs": "compare", "compare": "compare", "parity": "agreement", "bench": "speed",
    "new": "plugins", "plugins": "plugins", "doctor": "engines",
}  # fmt: skip
_OF_THE_COMMAND = r"^--|the GGUF files on this machine"  # options and files: the command says what of


def page_about(error: str, command: str = "") -> str:
    """The topic that explains what an error of a command is about; nothing where none does."""
    if command in _OF_COMMAND and re.search(_OF_THE_COMMAND, error):
        return _OF_COMMAND[command]
    for pattern, topic in _ABOUT:
        if re.search(pattern, error):
            return topic
    if key := re.match(r"unknown key ([a-z_]+)", error):
        return _OF_KEY.get(key[1], "runs")
    if key := re.match(r"([a-z_]+)(?:\.[\w.]+)?=", error):
        return _OF_KEY.get(key[1], "")
    return _OF_COMMAND.get(error.partition(" ")[0].removesuffix(":"), "")


def with_page(error: str, command: str = "") -> str:
    """An error, with the page that explains it behind it."""
    topic = page_about(error, command)
    return f"{error} (more: toyexp help {topic})" if topic else error
