"""The fenced blocks and tables of the documentation as commands that run, made small.

A page may say in comments of HTML, in the lines before a block, what makes it quick (`<!-- small: steps=20 -->`), what
a reader has done by then (`<!-- first: cp a.yaml b.yaml -->`), that it is left to the long suite (`<!-- slow -->`, as
tables are), or why nothing here can run it (`<!-- not run: two hosts -->`).
"""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

PAGES = Path(__file__).parent.parent.parent / "docs" / "pages"
PROGRAMS = ("toyexp", "python", "pip", "make", "echo", "cd", "git", "pytest", "torchrun")
# A command that works on a model or on runs has no steps of its own.
STEPLESS_COMMANDS = {"plugins", "doctor", "parity", "bench", "eval", "describe", "models", "generate", "predict",
                     "export", "merge", "runs", "compare", "completion", "help", "new"}  # fmt: skip
SKIPPED_PROGRAMS = {"make": "sets up .venv, as CI does", "pip": "asks a network", "git": "asks a network"}
COMMENT = re.compile(r"<!-- (small|first|slow|not run)(?:: (.*?))? -->")
FENCE = re.compile(r"((?:^ *<!-- [^\n]*? -->\n+)*)^( *)```(\w*)[^\n]*\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
ROW = re.compile(r"\| `(toyexp [^`]*)` \|")
BLANK = re.compile(r"\b[A-Z]{3,}\b")  # in a cell: what a reader puts something of their own for


@dataclass(frozen=True)
class Block:
    """A fenced block, or a cell of a table that holds a command."""

    page: str
    line: int
    language: str
    text: str
    said: dict[str, str]  # by small, first, slow, not run

    @property
    def where(self):
        return f"{self.page}:{self.line}"

    @property
    def commands(self):
        """The lines that a reader types; of a block with `$` those behind it, the others are what is printed."""
        lines = re.sub(r"\\\n\s*", "", self.text).splitlines()
        if any(line.startswith("$ ") for line in lines):
            return [line[2:] for line in lines if line.startswith("$ ")]
        first = lines[0].removeprefix(".venv/bin/").split()[:1] if lines else []
        usage = any(line.startswith(("  ", "usage:")) for line in lines) or ": error:" in self.text
        typed = self.language in ("", "bash", "console", "sh") and first and first[0] in PROGRAMS and not usage
        return [line for line in lines if line.strip()] if typed else []

    @property
    def printed(self):
        """What the page shows as output."""
        return [line for line in self.text.splitlines() if not line.startswith("$ ")] if "$ " in self.text else []

    @property
    def file(self):
        """The name that a block of code begins with, where it is a file to be saved."""
        found = re.match(r"(?:# @package.*\n)?# ([\w/.]+\.(?:py|yaml|toml))\b", self.text)
        return found[1] if found else ""


def blocks(page, text=None):
    """All blocks of a page, in order."""
    text = (PAGES / page).read_text() if text is None else text
    found = []
    for match in FENCE.finditer(text):
        said = {m[1]: m[2] or "" for m in COMMENT.finditer(match[1])}
        indent = len(match[2])
        body = "".join(line[indent:] for line in match[4].splitlines(keepends=True))
        found.append(Block(page, text[: match.start(3)].count("\n") + 1, match[3], body, said))
    for match in ROW.finditer(text):
        if BLANK.search(match[1]):
            continue
        found.append(
            Block(page, text[: match.start()].count("\n") + 1, "", match[1].replace("&#124;", "|"), {"slow": ""})
        )
    return sorted(found, key=lambda block: block.line)


def skip_reason(command):
    """Why a command is left out wherever it stands; nothing where it runs."""
    program = command.removeprefix(".venv/bin/").split()[0]
    return SKIPPED_PROGRAMS.get(program, "")


def shorten_command(command, added=""):
    """The words behind `toyexp`, with fewer steps where it trains; `added` settings come last."""
    words = shlex.split(command, comments=True)[1:]
    if words and words[0] in STEPLESS_COMMANDS:
        return [*words, *shlex.split(added)]
    given = {word.partition("=")[0] for word in words}
    quick = ["steps=2", "eval_every=2", "checkpoint_every=0"]
    if "-m" in words or "sweep.resume" in given:
        quick += ["sweep.report=false", *([] if "sweep.launcher" in given else ["sweep.isolate=false"])]
        quick += ["sweep.trials=2"] if "sweep.search" in given else []
        quick = [*(["steps=20", "eval_every=5"] if "sweep.prune" in given else quick[:2]), *quick[2:]]
    if "resume" in given or "sweep.resume" in given:
        quick = [word for word in quick if word.startswith("sweep.")]
    return [*words, *quick, *shlex.split(added)]
