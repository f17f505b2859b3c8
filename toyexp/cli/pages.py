"""`toyexp help` and `toyexp --help`: print the usage and documentation pages, and name the page about an error."""

from __future__ import annotations

import re
import shlex
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toyexp.base.errors import UserError, nearest, suggest
from toyexp.base.formatting import format_value, short_path
from toyexp.base.terminal import has_colour, is_terminal, print_output, print_usage, terminal_width, text_width
from toyexp.config.paths import CONF, PAGES, TEMPLATES
from toyexp.config.top_level import GROUPS, top_level_settings
from toyexp.interfaces.command import Arguments
from toyexp.plugins.discovery import load
from toyexp.plugins.registry import Registry

if TYPE_CHECKING:
    from toyexp.training.run_config import Result

# A line with only a link to a file in templates/; the content of the file replaces it.
_TEMPLATE = re.compile(r"^\[[\w.]+\]\((?:\.\./)+templates/([\w./]+)\)$", re.MULTILINE)


def topics() -> dict[str, Path]:
    """Return {topic: file} for every documentation page.

    A topic is a name such as `data` or `plugins/data`. The topic of the first page is `start`.
    """
    pages: dict[str, Path] = {}
    for path in sorted(PAGES.rglob("*.md")):
        relative = path.relative_to(PAGES)
        name = relative.parent if relative.stem == "index" else relative.with_suffix("")
        pages["/".join(name.parts if name.parts[:1] == ("plugins",) else name.parts[-1:]) or "start"] = path
    return pages


def read_page(topic: str) -> str:
    """Return the Markdown text of a page, prepared for a terminal; raise UserError for an unknown topic.

    Links to other pages become `toyexp help` commands, and links to templates become the content of the files.
    """
    pages = topics()
    if topic not in pages:
        stem = topic.removesuffix(".md").rpartition("/")[2]  # guides/data.md: data
        meant = nearest(topic, pages) or (stem if stem in pages else nearest(stem, pages)) or _KEY_PAGES.get(stem)
        hint = f"did you mean {meant}?" if meant else suggest("", pages)
        raise UserError(f"help {topic}: unknown page; {hint}")
    page, by_path = pages[topic], {path: name for name, path in pages.items()}

    def link_text(link: re.Match[str]) -> str:
        name = by_path.get((page.parent / link[2]).resolve())
        return f"{link[1]} (`toyexp help {name}`)" if name and name != topic else link[1]

    text = re.sub(r"^ *<!--.*?-->\n+", "", insert_templates(page.read_text()), flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"!\[([^\]]*)\]\([^)]*\)", r"(picture: \1)", text)
    text = re.sub(r"\[([^\]]+)\]\(#[\w-]+\)", r"\1", text)  # links within the page
    return re.sub(r"\[([^\]]+)\]\(([\w./-]+\.(?:md|py))(?:#[\w-]*)?\)", link_text, text)


def search(words: str) -> list[tuple[str, int, str]]:
    """Search the pages for the text `words`; return a tuple (topic, line number, line) for each page with the text.

    The line is the page's highest heading that contains the text or, if no heading contains it, the first line that
    does. The best page comes first. If the text is a key of a setting, such as `optim`, this is the page about the key.
    The other pages are sorted by the level of their heading, then by the number of lines that contain the text.
    """
    results, pattern = [], re.compile(rf"(?<!\w){re.escape(words)}", re.IGNORECASE)
    for topic in topics():
        lines = [(n, line) for n, line in enumerate(read_page(topic).splitlines(), 1) if pattern.search(line)]
        hits = [(len(line.partition(" ")[0]) if line[0] == "#" else 9, n, line) for n, line in lines]  # heading level
        if hits:
            depth, number, line = min(hits)
            results.append((topic != _KEY_PAGES.get(words), depth, -len(hits), topic, number, line.strip("# ")))
    return [(topic, number, line) for *_, topic, number, line in sorted(results)]


def insert_templates(page: str) -> str:
    """Replace each line that is only a link to a template file by a code block with the content of that file.

    An example of such a line is `[x.py](../../templates/x.py)`.
    """

    def template_block(match: re.Match[str]) -> str:
        text = (TEMPLATES / match[1]).read_text().rstrip()
        return f"```{'toml' if match[1].endswith('.toml') else 'python'}\n{text}\n```"

    return _TEMPLATE.sub(template_block, page)


def print_page(page: str) -> None:
    """Print a page: rendered if standard output is a terminal or has colours, otherwise as Markdown text."""
    is_coloured = has_colour(sys.stdout)
    if not is_terminal() and not is_coloured:
        print(page, end="")
        return
    from rich.console import Console
    from rich.markdown import Markdown, TableDataElement
    from rich.theme import Theme

    class Cell(TableDataElement):
        def on_text(self, context: Any, text: Any) -> None:
            super().on_text(context, text)
            self.content.overflow = "fold"  # long words continue on the next line; rich would cut them

    class Page(Markdown):
        elements = {**Markdown.elements, "td_open": Cell}

    # Without a ground, code is readable on light and on dark terminals.
    theme = Theme({"markdown.code": "bold cyan", "markdown.h1": "bold green", "markdown.h2": "bold green"})
    console = Console(width=text_width(), theme=theme, no_color=not is_coloured,
                      color_system="standard" if is_coloured else None)  # fmt: skip
    console.print(Page(page, hyperlinks=False, code_theme="ansi_light"))


_NO_MODEL = r"the GGUF files on this machine|is not a GGUF file|is a directory without"
# Patterns of error messages and the pages that explain them. The first pattern that matches decides. If none does, the
# key at the start of the message decides (_KEY_PAGES), and without a key the command (_COMMAND_PAGES).
_ERROR_PAGES = (
    (r"^model\.context=.*\bexamples\b", "data"),
    (r"^model\.context=.*; use model\.context=", "recipes"),
    (r"add -m to sweep|run it with -m|interval\(|range\(|would train the same job twice", "sweeps"),
    (r"^out of memory|loss is (nan|inf)", "symptoms"),
    (r"^--type[ =]", "exports"),
    (r"^(--?[a-z]|'[^']*' is neither)", "runs"),
    (r"to train longer: resume=", "resume"),
    (_NO_MODEL, "recipes"),
    (r"llama-quantize|llama\.cpp", "exports"),
    (r"^hydra\.(run|sweep)\.dir=|is not empty|choose another directory", "outputs"),
    (r"^plugins=", "plugins"),
    (r"torchrun|^MASTER_|^rank \d+: ", "gpus"),
)
_KEY_PAGES = {
    "engine": "engines", "recipe": "recipes", "model": "models", "data": "data", "optim": "optimisers",
    "objective": "objectives", "callbacks": "callbacks", "sweep": "sweeps", "resume": "resume", "experiment": "runs",
    "format": "exports", "lr": "runs", "steps": "runs", "batch_size": "runs", "seed": "runs", "name": "outputs",
    "data_seed": "runs", "model_seed": "runs", "epochs": "runs", "eval_every": "runs", "nonfinite": "resume",
    "checkpoint_every": "resume", "checkpoint_keep": "resume", "checkpoint_best": "resume",
}  # fmt: skip
_PAGE_ALIASES = {"ops": "plugins/ops", "loss": "plugins/ops"}
_COMMAND_PAGES = {
    "eval": "after", "generate": "after", "describe": "after", "predict": "after", "merge": "after", "models": "after",
    "export": "exports", "runs": "compare", "compare": "compare", "parity": "agreement", "bench": "speed",
    "new": "plugins", "plugins": "plugins", "doctor": "engines", "serve": "after", "data": "data",
}  # fmt: skip


def page_about(error: str, command: str = "") -> str:
    """Return the topic of the documentation page that explains an error message; "" if there is no such page.

    `command` is the sub-command that raised the error, if any.
    """
    error = re.sub(r"^.*?\.yaml, line \d+: ", "", error)
    if command in _COMMAND_PAGES and re.search(rf"^--|{_NO_MODEL}", error):
        return _COMMAND_PAGES[command]
    for pattern, topic in _ERROR_PAGES:
        if re.search(pattern, error):
            return topic
    if key := re.match(r"unknown key ([a-z_]+)", error):
        return _KEY_PAGES.get(key[1], "runs")
    if key := re.match(
        r"([a-z_]+)((?:\.[\w.]+)?=|\.\w+ (needs|does not|holds|has|is|and) |\.(devices|targets): )", error
    ):
        return _KEY_PAGES.get(key[1], "")
    return _COMMAND_PAGES.get(error.partition(" ")[0].removesuffix(":"), "")


def add_page(error: str, command: str = "") -> str:
    """Append to an error message the command that prints the page about it, such as (more: toyexp help data)."""
    topic = page_about(error, command)
    return f"{error} (more: toyexp help {topic})" if topic else error


# -- usage ------------------------------------------------


MAX_HITS = 8  # pages listed by a search
HEAD = """\
usage: toyexp [key=value ...]        train one run with these settings
       toyexp -m key=v1,v2 ...       sweep: train one run for each combination of values
       toyexp resume=DIR             resume the run in this directory (resume=auto: newest of the same name)
       toyexp sweep.resume=DIR       resume the sweep in this directory
       toyexp ... --dry-run          estimate the time and memory of any of these, without training
       toyexp COMMAND ...            run one of the commands below; toyexp COMMAND --help explains it
"""
EXAMPLES = """
examples
  train for 300 steps, with the token embedding of a pretrained model:
    toyexp recipe=warm steps=300
  train a GPT-2 from random weights on the characters of a book:
    toyexp recipe=scratch model=gpt2 data=text data.path=book.txt data.tokenizer=char
  sweep over two recipes with three seeds each, which are six runs:
    toyexp -m recipe=scratch,warm seed=0,1,2
  add plots and a generated text every 50 steps, and leave out the learning rate schedule:
    toyexp 'callbacks=[default,sample,plots]' '~callbacks.cosine' callbacks.sample.every=50
"""
PARTS = "parts of a run and their presets (toyexp plugins describes all; toyexp plugins NAME lists the settings of one)"
SETTINGS = "other settings of a run or sweep, with their defaults (conf/config.yaml)"
TAIL = """
Print the configuration of a run without training: toyexp [key=value ...] --cfg job
Enable tab completion: eval "$(toyexp completion bash)" (or zsh, fish)
Colours: --color=auto, always or never, with any command, or the environment variables NO_COLOR and FORCE_COLOR"""


def run_help(arguments: Arguments) -> int:
    """Print the usage, the page of a topic, or a list of the pages that contain the typed words; return 0."""
    if not arguments.rest:
        print_usage(usage_text())
        return 0
    typed, offers = " ".join(arguments.rest), load(arguments.modules).offers
    word = _PAGE_ALIASES.get(typed, typed)
    if word in offers["command"] and word not in topics():
        raise UserError(f"help {word}: is a command; see toyexp {word} --help")
    results = [] if word in topics() or not word.strip() else search(word)
    if len(results) > 1:
        print_output(f"no page is named {word}; {len(results)} pages mention it (best first, at most {MAX_HITS}):")
        room = max(text_width() - 44, 30)
        for topic, number, line in results[:MAX_HITS]:
            start = max(line.lower().find(word.lower()) - 30, 0)
            print_output(f"  {f'toyexp help {topic}':<30} line {number:>3}  {line[start : start + room]}")
        return 0
    print_page(read_page(results[0][0] if results else word))
    if word in offers["command"]:
        print_output(f"\nThe command of the same name: toyexp {word} --help")
    return 0


def usage_text(modules: Sequence[str] = ()) -> str:
    """Return the text of `toyexp --help`. Its lists include the plugins in the local modules `modules`."""
    registry = load(modules)
    commands = [f"  {n:<12} {o.help.removesuffix('.')}{o.origin}" for n, o in registry.offers["command"].items()]
    keys = [
        f"  {f'{key}={format_value(setting.default)}':<34} {setting.comment}" for key, setting in top_level_settings()
    ]
    return "\n".join([
        HEAD, "commands", *commands, EXAMPLES, PARTS, *_choices(registry), "", SETTINGS, *keys, "",
        "documentation pages (toyexp help TOPIC prints one)",
        *(f"  {line}" for line in textwrap.wrap(", ".join(topics()), text_width() - 2)), TAIL,
    ])  # fmt: skip


HELP_HELP = usage_text


def _choices(registry: Registry) -> Iterator[str]:
    for kind in GROUPS:
        presets = {path.stem for path in (CONF / kind).glob("*.yaml")}
        extra = {"auto"} if kind == "engine" else set()
        form = "callbacks=[...]" if kind == "callbacks" else f"{kind}="
        names = ", ".join(sorted(set(registry.offers.get(kind, ())) | presets | extra))
        yield f"  {form:<16} " + ("\n" + " " * 19).join(textwrap.wrap(names, text_width() - 19))


# -- suggestions -------------------------------------------------------------------------------------------------


def run_hints(result: Result, is_first: bool) -> list[str]:
    """Return lines with a command to try after a run.

    If `is_first` is True, because there was no run here before, return lines with several commands.
    """
    run = shlex.quote(short_path(result.dir))
    written = any(path.suffix == ".gguf" for path in result.artifacts)
    if result.outcome.has_diverged:
        return _next([("toyexp help symptoms", "read what to do if the loss rises")])
    if not is_first:
        use = (f"toyexp describe {run}", "show how to use the model")
        return _next([use if written else ("toyexp runs", "list runs")])
    return _next([
        (f"toyexp generate {run} --prompt 'def '", "generate text") if written else ("toyexp runs", "list runs"),
        ("toyexp -m recipe=scratch,warm seed=0,1", "compare four such runs"),
        ("toyexp help start", "read the introduction"),
    ])  # fmt: skip


def sweep_hints(sweep: Path, best: Path | None) -> list[str]:
    """Return lines with commands to try after a sweep, given its directory and that of its best run."""
    use = [(f"toyexp describe {shlex.quote(short_path(best))}", "show how to use the best model")] if best else []
    return _next(
        [*use, (f"toyexp compare {shlex.quote(short_path(sweep))} --plot sweep.svg", "draw a picture of the runs")]
    )


def doctor_hints(engines: Sequence[str]) -> list[str]:
    """Return lines with commands to try next, given the names of the engines that work here.

    `engines` begins with the engine that engine=auto selects. If `engines` is empty, the commands install engines.
    """
    if not engines:
        return _next([
            ("pip install 'toyexp[torch]'", "install the PyTorch engines"),
            ("pip install 'toyexp[ggml]'", "install the ggml engines; needs a C compiler"),
        ])  # fmt: skip
    agree = (f"toyexp parity engine={','.join(engines[:2])}", "check that engines agree")
    return _next([
        ("toyexp", f"train a small model in seconds on {engines[0]}, the choice of engine=auto"),
        *([agree] if len(engines) > 1 else []),
        ("toyexp help engines", "read how to choose and install engines"),
    ])  # fmt: skip


def _next(commands: Sequence[tuple[str, str]]) -> list[str]:
    """Return lines that list (command, description) pairs; a description follows its command as a shell comment."""
    rows = [f"{'next  ' if i == 0 else '      '}{command}  # {about}" for i, (command, about) in enumerate(commands)]
    is_wide = max(map(len, rows)) > (terminal_width() or sys.maxsize)
    return ["", *(row.replace("  # ", "\n      # ") if is_wide else row for row in rows)]
