"""Generate the reference pages of the commands, one for each registered command."""

import contextlib
import io
import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

import examples
from setting_pages import escape_cell

from toyexp.cli.main import main
from toyexp.config.paths import PAGES
from toyexp.interfaces.command import Command
from toyexp.plugins.discovery import load

EXIT_CODES = {0: "success", 2: "bad input: one or two lines say what is wrong; nothing was started or written"}
# Commands by what a reader wants to do, for the overview.
PURPOSES = {
    "Look up": ["help", "plugins", "completion"],
    "Check this machine": ["doctor", "parity", "bench"],
    "Look at data": ["data"],
    "Compare runs": ["runs", "compare"],
    "Use a trained model": ["generate", "predict", "eval", "describe", "models", "export", "merge", "serve"],
    "Write a plugin": ["new"],
}
PLOT_FILE = "nothing, or with `--plot` that file"
SIGNALS = "Ctrl-C, SIGTERM or SIGHUP"


@dataclass(frozen=True)
class CommandNotes:
    """Information on a command that its help does not contain."""

    leaves: str = "nothing"
    fails: str = ""  # meaning of exit code 1
    guide: str = ""  # path of the guide, with its anchor
    examples: str = ""  # if the help has none


NOTES = {
    "plugins": CommandNotes(
        fails="with `--check`: a part failed its suite, or the suite could not run", guide="plugins/index.md"
    ),
    "new": CommandNotes("the plugin's directory, complete or not at all", guide="plugins/index.md"),
    "doctor": CommandNotes(
        "nothing except the kernel of `ggml`, which is compiled at its first use and cached",
        "with `--numerics`: an engine is outside the tolerances",
        "guides/engines.md",
    ),
    "parity": CommandNotes(
        PLOT_FILE,
        "an engine is outside the tolerances",
        "guides/agreement.md",
        "toyexp parity engine=cpu,ggml model=gpt2 steps=5",
    ),
    "bench": CommandNotes(PLOT_FILE, guide="guides/speed.md"),
    "data": CommandNotes("nothing, apart from the data cache", guide="guides/data.md#see-what-the-model-reads"),
    "eval": CommandNotes(
        fails="the held-out loss is NaN or infinite", guide="guides/after.md#evaluate-a-model-toyexp-eval"
    ),
    "describe": CommandNotes(guide="guides/after.md#inspect-a-file-toyexp-describe"),
    "models": CommandNotes(
        guide="guides/after.md#list-the-models-on-this-machine-toyexp-models", examples="toyexp models ~/models"
    ),
    "generate": CommandNotes(guide="guides/after.md#generate-text-and-chat-toyexp-generate"),
    "predict": CommandNotes(
        "nothing, or with `--csv` that file, complete or not at all",
        "an image could not be read",
        "guides/after.md#classify-images-toyexp-predict",
    ),
    "export": CommandNotes(
        "the converted model beside the old one, or at `--to`: complete or not at all",
        "it could not be written",
        "guides/exports.md",
    ),
    "merge": CommandNotes(
        "the merged model, at `--out`: complete or not at all",
        "it could not be written",
        "guides/after.md#merge-an-adapter-into-its-base-toyexp-merge",
    ),
    "serve": CommandNotes(
        fails="the exit code is that of llama-server",
        guide="guides/after.md#serve-a-model-toyexp-serve",
        examples="toyexp serve model.gguf -- --port 9000",
    ),
    "runs": CommandNotes(guide="guides/compare.md"),
    "compare": CommandNotes(
        "nothing, or with `--html` or `--plot` that file",
        guide="guides/compare.md",
        examples="toyexp compare outputs/sweeps/2026-11-21_102410_093817\n"
        "toyexp compare outputs recipe=warm 'lr>1e-3' --metric accuracy\n"
        "toyexp compare outputs --html report.html",
    ),
    "completion": CommandNotes(
        guide="guides/runs.md#look-up-parts-and-settings", examples='eval "$(toyexp completion bash)"'
    ),
    "help": CommandNotes(guide="guides/runs.md#look-up-parts-and-settings", examples="toyexp help sweeps"),
}


def capture_output(*words: str) -> str:
    """Return the output of a toyexp command."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        assert main([*words]) == 0, words
    return text.getvalue().rstrip()


def code_block(text: str, language: str = "text") -> str:
    """Return the text as a fenced code block."""
    return f"```{language}\n{text}\n```\n"


def format_help(text: str) -> str:
    """Return a help text as Markdown with headings: usage, options, details and lists of terms.

    Commands and tables become code, options and terms a table.
    """
    parts = ["## Usage\n"]
    for block in text.split("\n\n"):
        if block.startswith("options:\n"):
            parts += [format_options(block), "## Details\n"]
            continue
        heading, _, rest = block.partition("\n")
        if re.search(r"^\S+( \S+)* {2,}\S", rest) and not re.search(r"  |[.:]$", heading):
            terms = read_rows(rest.splitlines(), r"(\S+(?: \S+)*) {2,}(\S.*)")
            parts += [f"### {heading}\n", format_terms(terms)]
            continue
        for is_code, group in groupby(block.splitlines(), lambda line: bool(re.search(r"^usage:|^  |\S {2,}\S", line))):
            lines = [*group]
            is_example = lines[0].startswith("  toyexp ")
            if is_code and not is_example and all(re.match(r"  \w+ +\S(?!.* {2})", line) for line in lines):
                parts.append(format_terms(read_rows(lines, r"  (\w+) +(.*)")))
                continue
            if is_code and is_example:  # text after a command, or alone in a line, becomes a comment
                lines = [re.sub(r"(?<=\S) {2,}(?=\S)|^ {9,}", "  # ", line).strip() for line in lines]
            joined = re.sub(r"^(usage: | {7}(?=toyexp))", "", "\n".join(lines), flags=re.MULTILINE)
            parts.append(
                code_block(joined, "bash" if is_example else "text") if is_code else f"{escape_text(joined)}\n"
            )
    return "\n".join(parts[:-1] if parts[-1] == "## Details\n" else parts)


def read_rows(lines: Iterable[str], pattern: str) -> list[tuple[str, str]]:
    """Return pairs of a term and its text; a line that does not match the pattern continues the text before it."""
    rows: list[tuple[str, str]] = []
    for line in lines:
        if found := re.match(pattern, line):
            rows.append((found[1], found[2] or ""))
        else:
            rows[-1] = rows[-1][0], f"{rows[-1][1]} {line.strip()}"
    return [(name, escape_text(escape_cell(about.strip()))) for name, about in rows]


def format_terms(terms: list[tuple[str, str]]) -> str:
    """Return terms and their meanings as a table."""
    return "\n".join(["| | meaning |", "|---|---|", *(f"| {term} | {about} |" for term, about in terms), ""])


def escape_text(text: str) -> str:
    """Escape characters that Markdown would interpret, except in code, and show options as code."""
    text = re.sub(r"`[^`]*`|[*<]", lambda part: part[0] if part[0][0] == "`" else f"\\{part[0]}", text)
    return re.sub(r"(?<![\w`-])--[a-z][\w-]*", r"`\g<0>`", text)


def format_options(block: str) -> str:
    """Return the options of a help text as a table. Each option has an anchor, its name, and links to it."""
    rows = [
        f"| [`{name}`](#{name.split()[0]}){{.key #{name.split()[0]}}} | {about} |"
        for name, about in read_rows(block.splitlines()[1:], r"  (-\S.*?)(?: {2,}(.*))?$")
    ]
    return "\n".join(["## Options\n", "| option | what it does |", "|---|---|", *rows, ""])


def overview() -> str:
    """Return the overview page: all commands by purpose, and the exit codes of a run."""
    offers = load().offers["command"]
    grouped = {name for names in PURPOSES.values() for name in names}
    parts = []
    for purpose, names in (PURPOSES | {"Commands of plugins": [*sorted({*offers} - grouped)]}).items():
        rows = [f"| [`toyexp {name}`](commands/{name}.md) | {offers[name].help.removesuffix('.')} |" for name in names]
        parts += [f"## {purpose}\n", "| command | what it does |", "|---|---|", *rows, ""] if rows else []
    tables = "\n".join(parts)
    return f"""---
title: All commands
---

# Commands

`toyexp key=value ...` without a command's name [trains](../guides/runs.md), `toyexp -m` [sweeps](../guides/sweeps.md):

```bash
toyexp recipe=warm steps=300              # one run
toyexp -m recipe=scratch,warm seed=0,1,2  # six runs and a table of their means
toyexp runs                               # a command: list the runs
```

{tables}
## Exit codes

| code | meaning for a run or a sweep |
|---|---|
| 0 | {EXIT_CODES[0]}; sweep: all jobs completed |
| 1 | the run failed, its held-out loss is NaN or infinite, or it missed its quality gate; sweep: a job failed |
| 2 | {EXIT_CODES[2]} |
| 130, 143, 129 | {SIGNALS}: toyexp finished the step and saved a checkpoint and the model |

Commands that read text may cache its token ids in `~/.cache/toyexp`.
"""


def format_overview(text: str) -> str:
    """Return the usage of toyexp itself; its lists of commands and settings have pages of their own."""
    usage = code_block(text.partition("\n\n")[0].removeprefix("usage: ").replace("\n       ", "\n"))
    return (
        f"## Usage\n\n{usage}\n`toyexp help` prints this usage, then [all commands](../commands.md), "
        "[all settings](../settings.md) and the names of all pages. `toyexp help NAME` prints a page, and "
        "`toyexp help WORDS` lists the pages that contain the words.\n"
    )


def page(name: str, command: type[Command]) -> str:
    """Return the page of one command: its purpose, an example, its help, the files it writes and its exit codes."""
    about = (command.__doc__ or "").splitlines()[0]
    notes = NOTES.get(name, CommandNotes("", "", ""))
    text = capture_output(name, "--help")
    parts = [f"---\ntitle: {name}\n---\n\n# toyexp {name}\n\n{about}\n"]
    recorded = examples.RECORDED / f"{name}.txt"
    parts += ["## Example\n"] if recorded.is_file() or notes.examples else []
    parts += [code_block(recorded.read_text().rstrip(), "console")] if recorded.is_file() else []
    parts += [code_block(notes.examples, "bash")] if notes.examples else []
    parts.append(format_overview(text) if name == "help" else format_help(text))
    if notes.leaves:
        parts.append(f"## Files it writes\n\nOn the disk: {notes.leaves}.\n")
    codes = dict(sorted((EXIT_CODES | ({1: notes.fails} if notes.fails else {})).items()))
    rows = [f"| {code} | {what} |" for code, what in codes.items()]
    parts.append("\n".join(["## Exit codes\n", "| code | meaning |", "|---|---|", *rows, ""]))
    parts.append(f"After {SIGNALS} the exit code is 130, 143 or 129.\n")
    if notes.guide:
        title = re.findall(r"^# (.+)", (PAGES / notes.guide.partition("#")[0]).read_text(), re.MULTILINE)[0]
        parts.append(f"## See also\n\n[{title}](../../{notes.guide}), the guide.\n")
    return "\n".join(parts)


def pages() -> dict[str, str]:
    """Return all pages by their path in the site."""
    pages_by_path = {"reference/commands.md": overview()}
    registry = load()
    for name in registry.offers["command"]:
        pages_by_path[f"reference/commands/{name}.md"] = page(name, registry.get("command", name))
    return pages_by_path
