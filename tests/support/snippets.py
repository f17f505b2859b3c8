"""Extract the commands in fenced blocks and tables of the documentation, and shorten them for tests.

HTML comments before a block control it: settings that make it quick (`<!-- small: steps=20 -->`), a shell command to
run first (`<!-- first: cp a.yaml b.yaml -->`), only run in the long suite (`<!-- slow -->`, the default for tables), or
why it cannot run here (`<!-- not run: two hosts -->`).
"""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

PAGES = Path(__file__).parent.parent.parent / "docs" / "pages"
PROGRAMS = ("toyexp", "python", "pip", "make", "echo", "cd", "git", "pytest", "torchrun")
# Commands that do not train.
STEPLESS_COMMANDS = {"plugins", "doctor", "parity", "bench", "eval", "describe", "models", "generate", "predict",
                     "export", "merge", "serve", "runs", "compare", "completion", "help", "new"}  # fmt: skip
SKIPPED_PROGRAMS = {"make": "sets up .venv, as CI does", "pip": "asks a network", "git": "asks a network"}
COMMENT = re.compile(r"<!-- (small|first|slow|not run)(?:: (.*?))? -->")
FENCE = re.compile(r"((?:^ *<!-- [^\n]*? -->\n+)*)^( *)```(\w*)[^\n]*\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
ROW = re.compile(r"\| `(toyexp [^`]*)` \|")
BLANK = re.compile(r"\b[A-Z]{3,}\b")  # a placeholder in a cell, such as FILE


@dataclass(frozen=True)
class Block:
    """A fenced block, or a table cell with a command."""

    page: str
    line: int
    language: str
    text: str
    options: dict[str, str]  # of the HTML comments: small, first, slow, not run

    @property
    def location(self):
        return f"{self.page}:{self.line}"

    @property
    def commands(self):
        """Lines that a reader types. In a block with `$` prompts, the other lines are output."""
        lines = re.sub(r"\\\n\s*", "", self.text).splitlines()
        if any(line.startswith("$ ") for line in lines):
            return [line[2:] for line in lines if line.startswith("$ ")]
        first = lines[0].removeprefix(".venv/bin/").split()[:1] if lines else []
        usage = any(line.startswith(("  ", "usage:")) for line in lines) or ": error:" in self.text
        typed = self.language in ("", "bash", "console", "sh") and first and first[0] in PROGRAMS and not usage
        return [line for line in lines if line.strip()] if typed else []

    @property
    def output(self):
        """Lines that the page shows as output."""
        return [line for line in self.text.splitlines() if not line.startswith("$ ")] if "$ " in self.text else []

    @property
    def file(self):
        """File name in the first line of a code block, or an empty string."""
        match = re.match(r"(?:# @package.*\n)?# ([\w/.]+\.(?:py|yaml|toml))\b", self.text)
        return match[1] if match else ""


def blocks(page, text=None):
    """Return all blocks of a page, in order."""
    text = (PAGES / page).read_text() if text is None else text
    result = []
    for match in FENCE.finditer(text):
        options = {m[1]: m[2] or "" for m in COMMENT.finditer(match[1])}
        indent = len(match[2])
        body = "".join(line[indent:] for line in match[4].splitlines(keepends=True))
        result.append(Block(page, text[: match.start(3)].count("\n") + 1, match[3], body, options))
    for match in ROW.finditer(text):
        if BLANK.search(match[1]):
            continue
        result.append(
            Block(page, text[: match.start()].count("\n") + 1, "", match[1].replace("&#124;", "|"), {"slow": ""})
        )
    return sorted(result, key=lambda block: block.line)


def skip_reason(command):
    """Return why a command is skipped on every page, or an empty string."""
    program = command.removeprefix(".venv/bin/").split()[0]
    return SKIPPED_PROGRAMS.get(program, "")


def shorten_command(command, added=""):
    """Return the arguments of a `toyexp` command, with fewer steps if it trains; `added` settings come last."""
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
