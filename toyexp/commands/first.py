"""What to try next, for whoever has just begun: behind a first run, and behind `toyexp doctor`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from toyexp.base.words import short
from toyexp.training.parts import Result


def nothing_yet() -> bool:
    """Whether nothing was trained in this directory."""
    return not Path("outputs").exists()


def after_a_run(result: Result) -> list[str]:
    """Three things to try, behind the first run of a directory."""
    run = shlex.quote(short(result.dir))
    written = any(path.suffix == ".gguf" for path in result.artifacts)
    return _next([
        (f"toyexp generate {run} --prompt 'def '", "what it writes") if written else ("toyexp runs", "what is here"),
        ("toyexp -m recipe=scratch,warm seed=0,1", "four such runs, compared"),
        ("toyexp help start", "where to go from here, by what you are after"),
    ])  # fmt: skip


def after_the_doctor(engines: Sequence[str]) -> list[str]:
    """What can be done with the engines that work here, the one that `auto` takes first."""
    if not engines:
        return _next([
            ("pip install 'toyexp[torch]'", "the engines on PyTorch"),
            ("pip install 'toyexp[ggml]'", "those on ggml; it is built with the C compiler that is here"),
        ])  # fmt: skip
    several = ",".join(engines[:2])
    agree = ("toyexp parity engine=" + several, "do they agree, to which digit") if len(engines) > 1 else None
    return _next([
        ("toyexp", f"a small run of seconds on {engines[0]}, which engine=auto takes"),
        *([agree] if agree else []),
        ("toyexp help engines", "how one is chosen, what each rounds to, and how to get those that are not here"),
    ])  # fmt: skip


def _next(commands: Sequence[tuple[str, str]]) -> list[str]:
    """Lines to be copied: what each does stands behind it as a comment of the shell's."""
    rows = [f"{'next  ' if i == 0 else '      '}{command}  # {what}" for i, (command, what) in enumerate(commands)]
    return ["", *rows]
