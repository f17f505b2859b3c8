"""`toyexp.run(...)`: one experiment from Python, by the words of a command line."""

from __future__ import annotations

import os
from typing import Any

from toyexp.base.blame import of_a_part
from toyexp.base.errors import UserError
from toyexp.base.home import at_home
from toyexp.commands.flags import read
from toyexp.commands.line import carry_out, one_run
from toyexp.contract.owners import OWNERS
from toyexp.door.aside import aside, what_is_left
from toyexp.door.result import Result
from toyexp.door.words import place, texts, worded


def run(
    *words: str,
    resume: str | os.PathLike[str] | None = None,
    directory: str | os.PathLike[str] | None = None,
    quiet: bool = False,
    **settings: Any,
) -> Result:
    """Runs one experiment, or goes on with one, and returns what came out of it.

    `words` are what stands behind `toyexp` on a command line, `"recipe=warm"` or `"--config-dir=mine"`; keywords are
    settings, which count where a word says otherwise: `steps=100`, `recipe="warm"`. A mapping holds the settings of a
    part, with the part's own name under `name`: `model={"name": "llama", "d_model": 128}`; a whole key works too:
    `**{"optim.beta1": 0.9}`.

        result = toyexp.run("recipe=warm", steps=100, seed=1)
        result.history["loss"], result.held_out["loss"], result.generate("def ")

    The run is written to `directory`, which must not hold anything, or below outputs/. `resume` goes on with the run in
    a directory (or a Result), or with "auto" with the newest of the same name, also where that is complete already.
    `quiet` prints nothing; in a notebook the progress is one line that renews.

    Raises UserError for bad input, with the words of the command line, before anything is written; RunFailed for a run
    that could not go on. KeyboardInterrupt (Ctrl-C, the notebook's stop) saves first: a note on it says how to look at
    what is left, and how to go on. Calls from several threads wait for one another; random state, environment, working
    directory, logging and Hydra's own state are afterwards what they were.
    """
    typed = [*texts("toyexp.run", words), *worded(settings)]
    if resume is not None:
        typed.append(f"resume={os.fspath(place('toyexp.run resume', resume))}")
    with aside("toyexp.run", quiet), of_a_part(lambda: OWNERS):
        from toyexp.config.request import Request
        from toyexp.config.schema import Source
        from toyexp.config.words import setting
        from toyexp.training.resume import AUTO, Complete

        flags, asked, going_on = read(at_home(typed))
        if directory is not None:
            asked.append(setting("hydra.run.dir", place("toyexp.run directory", directory).absolute()))
        for flag in flags:
            if not flag.startswith("--config-"):
                meant = "many runs are toyexp.sweep(...)" if flag == "--multirun" else f"type it: toyexp {flag} ..."
                raise UserError(f"toyexp.run {flag}: trains one experiment; {meant}")
        request = Request.of(asked, Source.of(*map(flags.get, ("--config-path", "--config-name", "--config-dir"))))
        if "sweep.resume" in request.values:
            raise UserError("toyexp.run sweep.resume: goes on with a sweep: toyexp.sweep(resume=DIR)")
        try:
            prepared, where, resumed = one_run(request, going_on)
        except Complete as error:
            if going_on != AUTO:
                raise
            return Result(error.run, request.registry)
        with what_is_left(where, "toyexp.run("):
            carry_out(prepared, where, resumed)
    return Result(where, request.registry)
