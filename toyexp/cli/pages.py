"""What `toyexp help` and `toyexp --help` show: the documentation's pages, which travel with toyexp, and the usage."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from toyexp.base.errors import UserError, nearest, suggest
from toyexp.base.formatting import format_value, short_path
from toyexp.base.terminal import is_terminal
from toyexp.config.paths import CONF, PAGES, TEMPLATES
from toyexp.config.top_level import GROUPS, top_level_settings
from toyexp.interfaces.command import Arguments
from toyexp.plugins.discovery import load
from toyexp.plugins.registry import Registry

if TYPE_CHECKING:
    from toyexp.training.run_config import Result

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


def read_page(topic: str) -> str:
    """A page with the files that it shows, its links as what one types; UserError where there is none of that name."""
    known = topics()
    if topic not in known:
        own = topic.removesuffix(".md").rpartition("/")[2]  # of guides/data.md, its place in a folder: data
        meant = nearest(topic, known) or (own if own in known else nearest(own, known)) or _KEY_PAGES.get(own)
        hint = f"did you mean {meant}?" if meant else suggest("", known)
        raise UserError(f"help {topic}: there is no such page; {hint}")
    page, by_path = known[topic], {path: name for name, path in known.items()}

    def told(link: re.Match[str]) -> str:
        name = by_path.get((page.parent / link[2]).resolve())
        return f"{link[1]} (`toyexp help {name}`)" if name and name != topic else link[1]

    text = re.sub(r"^ *<!--.*?-->\n+", "", insert_templates(page.read_text()), flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"!\[([^\]]*)\]\([^)]*\)", r"(picture: \1)", text)
    text = re.sub(r"\[([^\]]+)\]\(#[\w-]+\)", r"\1", text)  # to another place of the same page
    return re.sub(r"\[([^\]]+)\]\(([\w./-]+\.(?:md|py))(?:#[\w-]*)?\)", told, text)


def search(words: str) -> list[tuple[str, int, str]]:
    """Find the pages that hold `words`: each with the number and the text of its best line, best page first.

    The page of a setting of that name comes first, then titles, then headings, then how often the words are there.
    """
    found, begins = [], re.compile(rf"(?<!\w){re.escape(words)}", re.IGNORECASE)
    for topic in topics():
        lines = [(n, line) for n, line in enumerate(read_page(topic).splitlines(), 1) if begins.search(line)]
        hits = [(len(line.partition(" ")[0]) if line[0] == "#" else 9, n, line) for n, line in lines]  # of a heading
        if hits:
            depth, number, line = min(hits)
            found.append((topic != _KEY_PAGES.get(words), depth, -len(hits), topic, number, line.strip("# ")))
    return [(topic, number, line) for *_, topic, number, line in sorted(found)]


def insert_templates(page: str) -> str:
    """A page with the templates that it links to in lines of their own, such as `[x.py](../../templates/x.py)`."""

    def shown(match: re.Match[str]) -> str:
        text = (TEMPLATES / match[1]).read_text().rstrip()
        return f"```{'toml' if match[1].endswith('.toml') else 'python'}\n{text}\n```"

    return _TEMPLATE.sub(shown, page)


def print_page(page: str) -> None:
    """Prints a page, laid out where a person reads it."""
    if not is_terminal():
        print(page, end="")
        return
    from rich.console import Console
    from rich.markdown import Markdown

    Console(width=min(Console().width, 110)).print(Markdown(page, hyperlinks=False))


# What an error is about, by how it begins or what it holds: the first that fits; then by its key, or its command.
_ERROR_PAGES = (
    (r"add -m to sweep|run it with -m", "sweeps"),
    (r"^out of memory|loss is (nan|inf)", "symptoms"),
    (r"^--type[ =]", "exports"),
    (r"^(--?[a-z]|'[^']*' is neither)", "runs"),
    (r"to train longer: resume=", "resume"),
    (r"the GGUF files on this machine", "recipes"),
    (r"llama-quantize|llama\.cpp", "exports"),
    (r"^hydra\.(run|sweep)\.dir=|is not empty|choose another directory", "outputs"),
    (r"^plugins=", "plugins"),
)
_KEY_PAGES = {
    "engine": "engines", "recipe": "recipes", "model": "models", "data": "data", "optim": "optimisers",
    "callbacks": "callbacks", "sweep": "sweeps", "resume": "resume", "experiment": "runs", "format": "exports",
    "lr": "runs", "steps": "runs", "batch_size": "runs", "seed": "runs", "name": "outputs",
}  # fmt: skip
_COMMAND_PAGES = {
    "eval": "after", "generate": "after", "describe": "after", "predict": "after", "merge": "after", "models": "after",
    "export": "exports", "runs": "compare", "compare": "compare", "parity": "agreement", "bench": "speed",
    "new": "plugins", "plugins": "plugins", "doctor": "engines",
}  # fmt: skip


def page_about(error: str, command: str = "") -> str:
    """Return the topic that explains an error of a command; nothing if none does."""
    if command in _COMMAND_PAGES and re.search(r"^--|the GGUF files on this machine", error):
        return _COMMAND_PAGES[command]
    for pattern, topic in _ERROR_PAGES:
        if re.search(pattern, error):
            return topic
    if key := re.match(r"unknown key ([a-z_]+)", error):
        return _KEY_PAGES.get(key[1], "runs")
    if key := re.match(r"([a-z_]+)(?:\.[\w.]+)?=", error):
        return _KEY_PAGES.get(key[1], "")
    return _COMMAND_PAGES.get(error.partition(" ")[0].removesuffix(":"), "")


def add_page(error: str, command: str = "") -> str:
    """Return an error with the page that explains it behind it."""
    topic = page_about(error, command)
    return f"{error} (more: toyexp help {topic})" if topic else error


# -- how the command line is used, made of the tables that it goes by -------------------------------------------------


MOST = 8  # pages that a search lists
HEAD = """\
usage: toyexp [key=value ...]        run one experiment
       toyexp -m key=v1,v2 ...       sweep over values
       toyexp sweep.resume=DIR       go on with a sweep
       toyexp ... --dry-run          what any of these would do, and how long
       toyexp COMMAND ...            see toyexp COMMAND --help
"""
EXAMPLES = """
examples
  toyexp recipe=warm steps=300
  toyexp recipe=scratch model=gpt2 data=text data.path=book.txt data.tokenizer=char
  toyexp -m recipe=scratch,warm seed=0,1,2
  toyexp callbacks=[default,sample,plots] ~callbacks.cosine callbacks.sample.every=50
"""
TAIL = """
The composed configuration: toyexp [key=value ...] --cfg job
Tab completion (or zsh, fish): eval "$(toyexp completion bash)\""""


def run_help(arguments: Arguments) -> int:
    """Print how toyexp is used, a page of the documentation, or the pages that mention a word."""
    if not arguments.rest:
        print(usage_text())
        return 0
    word, offers = " ".join(arguments.rest), load(arguments.modules).offers
    if word in offers["command"] and word not in topics():
        raise UserError(f"help {word}: is a command: toyexp {word} --help")
    found = [] if word in topics() or not word.strip() else search(word)
    if len(found) > 1:
        print(f"no page has the name {word}; {len(found)} mention it, the best first (at most {MOST})")
        for topic, number, line in found[:MOST]:
            begins = max(line.lower().find(word.lower()) - 30, 0)
            print(f"  {f'toyexp help {topic}':<30} line {number:>3}  {line[begins : begins + 64]}")
        return 0
    print_page(read_page(found[0][0] if found else word))
    if word in offers["command"]:
        print(f"\nOf the command: toyexp {word} --help")
    return 0


def usage_text(modules: Sequence[str] = ()) -> str:
    """All of it."""
    registry = load(modules)
    commands = [f"  {n:<12} {o.help.removesuffix('.')}{o.origin}" for n, o in registry.offers["command"].items()]
    keys = [
        f"  {f'{key}={format_value(setting.default)}':<34} {setting.comment}" for key, setting in top_level_settings()
    ]
    return "\n".join([
        HEAD, "commands", *commands, EXAMPLES, "choices", *_choices(registry), "",
        "top-level keys (conf/config.yaml)", *keys, "", "pages of the documentation: toyexp help TOPIC",
        *(f"  {line}" for line in textwrap.wrap(", ".join(topics()), 108)), TAIL,
    ])  # fmt: skip


HELP_HELP = usage_text


def _choices(registry: Registry) -> Iterator[str]:
    for kind in GROUPS:
        presets = {path.stem for path in (CONF / kind).glob("*.yaml")}
        extra = {"auto"} if kind == "engine" else set()
        form = "callbacks=[...]" if kind == "callbacks" else f"{kind}="
        listed = textwrap.wrap(", ".join(sorted(set(registry.offers.get(kind, ())) | presets | extra)), 90)
        yield f"  {form:<16} " + ("\n" + " " * 19).join(listed)


# -- what to try next -------------------------------------------------------------------------------------------------


def run_hints(result: Result) -> list[str]:
    """Three things to try, behind the first run of a directory."""
    run = shlex.quote(short_path(result.dir))
    written = any(path.suffix == ".gguf" for path in result.artifacts)
    return _next([
        (f"toyexp generate {run} --prompt 'def '", "what it writes") if written else ("toyexp runs", "what is here"),
        ("toyexp -m recipe=scratch,warm seed=0,1", "four such runs, compared"),
        ("toyexp help start", "where to go from here, by what you are after"),
    ])  # fmt: skip


def doctor_hints(engines: Sequence[str]) -> list[str]:
    """What can be done with the engines that work here, the one that `auto` takes first."""
    if not engines:
        return _next([
            ("pip install 'toyexp[torch]'", "the engines on PyTorch"),
            ("pip install 'toyexp[ggml]'", "those on ggml; it is built with the C compiler that is here"),
        ])  # fmt: skip
    agree = (f"toyexp parity engine={','.join(engines[:2])}", "do they agree, to which digit")
    return _next([
        ("toyexp", f"a small run of seconds on {engines[0]}, which engine=auto takes"),
        *([agree] if len(engines) > 1 else []),
        ("toyexp help engines", "how one is chosen, what each rounds to, and how to get those that are not here"),
    ])  # fmt: skip


def _next(commands: Sequence[tuple[str, str]]) -> list[str]:
    """Lines to be copied: what each does stands behind it as a comment of the shell's."""
    rows = [f"{'next  ' if i == 0 else '      '}{command}  # {what}" for i, (command, what) in enumerate(commands)]
    return ["", *rows]
