"""The pages of commands: one for each that the registry has, made of what it prints and takes."""

import contextlib
import io
from dataclasses import dataclass

from toyexp.cli.main import main
from toyexp.interfaces.command import Command
from toyexp.plugins.discovery import load

USUAL = {0: "done", 2: "bad input, told in a line or two; nothing was begun and nothing is written"}
WIDE = "---\nhide: [toc]\n---\n\n"  # a page without the column on its right: help has up to 120 letters a line
ENDED = "Ctrl-C, SIGTERM or SIGHUP"


@dataclass(frozen=True)
class Told:
    """What a page has to say that no help says."""

    leaves: str = "nothing"
    fails: str = ""  # what an exit code of 1 says
    guide: str = ""  # the page that goes with it


TOLD = {
    "plugins": Told(
        fails="with `--check`: a part failed its suite, or could not be held against it", guide="plugins/index.md"
    ),
    "new": Told("the plugin's directory, whole or not at all", guide="plugins/index.md"),
    "doctor": Told(
        "nothing, but for the kernel of `ggml`, built at its first use and kept in the cache",
        "with `--numerics`: an engine is off",
        "guides/engines.md",
    ),
    "parity": Told(fails="an engine is beyond the tolerances", guide="guides/agreement.md"),
    "bench": Told(guide="guides/speed.md"),
    "eval": Told(fails="its held-out loss is no number", guide="guides/after.md#evaluate-a-model-toyexp-eval"),
    "describe": Told(guide="guides/after.md#inspect-a-file-toyexp-describe"),
    "models": Told(guide="guides/after.md#list-the-models-on-this-machine-toyexp-models"),
    "generate": Told(guide="guides/after.md#generate-text-and-chat-toyexp-generate"),
    "predict": Told(
        "nothing, or with `--csv` that file, whole or not at all",
        "an image could not be read",
        "guides/after.md#classify-images-toyexp-predict",
    ),
    "export": Told(
        "the model in its new type beside the old one, or at `--to`: whole or not at all",
        "it could not be written",
        "guides/exports.md",
    ),
    "merge": Told(
        "the merged model, at `--out`: whole or not at all",
        "it could not be written",
        "guides/after.md#merge-an-adapter-into-its-base-toyexp-merge",
    ),
    "runs": Told(guide="guides/compare.md"),
    "compare": Told("nothing, or with `--html` that file", guide="guides/compare.md"),
    "completion": Told(guide="guides/runs.md#what-there-is"),
    "help": Told(guide="guides/runs.md#what-there-is"),
}


def printed(*words: str) -> str:
    """What toyexp prints for these words."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        assert main([*words]) == 0, words
    return text.getvalue().rstrip()


def fenced(text: str) -> str:
    """As it stands, in letters of one width."""
    return f"```text\n{text}\n```\n"


def overview() -> str:
    """All commands, the exit codes of a run, and what `toyexp --help` prints."""
    rows = "".join(
        f"| [`toyexp {name}`](commands/{name}.md) | {offer.help.removesuffix('.')} |\n"
        for name, offer in load().offers["command"].items()
    )
    return f"""{WIDE}# Commands

`toyexp key=value ...` without a command's name [trains](../guides/runs.md), `toyexp -m` [sweeps](../guides/sweeps.md).
What any of these reads as data may leave its token ids in the cache, `~/.cache/toyexp`.

| command | |
|---|---|
{rows}
## Exit codes

| | of a run or a sweep |
|---|---|
| 0 | {USUAL[0]}; of a sweep: all jobs are completed |
| 1 | the run failed, its held-out loss is no number, or it missed its quality gate; of a sweep: a job failed |
| 2 | {USUAL[2]} |
| 130, 143, 129 | {ENDED} came: the step was finished, a checkpoint and the model saved |

## toyexp --help

{fenced(printed("--help"))}"""


def page(name: str, command: type[Command]) -> str:
    """One command: what it is for, its help, what it leaves, and its exit codes."""
    about = (command.__doc__ or "").splitlines()[0]
    parts = [f"{WIDE}# toyexp {name}\n\n{about}\n", fenced(printed(name, "--help"))]
    told = TOLD.get(name, Told("", "", ""))
    if told.leaves:
        parts.append(f"## What it leaves\n\nOn the disk: {told.leaves}.\n")
    codes = dict(sorted((USUAL | ({1: told.fails} if told.fails else {})).items()))
    rows = [f"| {code} | {what} |" for code, what in codes.items()]
    parts.append("\n".join(["## Exit codes\n", "| | |", "|---|---|", *rows, ""]))
    parts.append(f"{ENDED} ends it with 130, 143 or 129.\n")
    if told.guide:
        parts.append(f"More: [the guide](../../{told.guide}).\n")
    return "\n".join(parts)


def pages() -> dict[str, str]:
    """All of them, by their places."""
    made = {"reference/commands.md": overview()}
    registry = load()
    for name in registry.offers["command"]:
        made[f"reference/commands/{name}.md"] = page(name, registry.get("command", name))
    return made
