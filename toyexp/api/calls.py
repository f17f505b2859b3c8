"""Helpers of all API calls: convert keywords to settings, and restore the state of the process."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from toyexp.base.attribution import attribute_part_errors
from toyexp.base.errors import RunFailed, UserError, printable
from toyexp.base.files import working_directory
from toyexp.base.formatting import short_path
from toyexp.base.ranks import started_ranks
from toyexp.base.terminal import show_status, silence
from toyexp.base.threads import available_cores
from toyexp.base.writing import reject_bad_names

PYTHON_CALLS = {"eval": "toyexp.evaluate(...)", "generate": "toyexp.open(...).generate(...)"}
PYTHON_CALLS |= {command: f"toyexp.{command}(...)" for command in ("predict", "compare")}
_lock = threading.RLock()  # Hydra, environment and working directory are global


@contextlib.contextmanager
def isolated_call(call: str, quiet: bool = False) -> Iterator[None]:
    """Run the `with` block of one API call at a time, and restore the global state of the process when the block ends.

    Global state is: random state, environment (except variables that libraries read only at import), working directory,
    logging, PyTorch settings, sys.path and Hydra. `call` is the API function's name in error messages; `quiet`
    suppresses its output. Raise UserError in a process that torchrun has started, because API calls run in one process.
    """
    from toyexp.base.process_state import restore_process_state
    from toyexp.config.compose_cache import isolate_hydra

    if not isinstance(quiet, bool):
        raise UserError(f"{call} quiet: must be True or False, got {printable(repr(quiet))}")
    if started_ranks().count > 1:
        raise UserError(f"{call}: runs in one process, not under torchrun; use python, or torchrun -m toyexp ...")
    available_cores()  # validates TOYEXP_CORES
    working_directory()  # raises if the directory is gone
    with _lock, restore_process_state(), isolate_hydra(), silence(quiet), reject_bad_names(), attribute_part_errors():
        try:
            yield
        except UserError as error:
            if call not in ("toyexp.run", "toyexp.sweep"):  # these take options of the command line
                error.args = (translate_error(str(error)),)
            raise
        finally:
            show_status("")


def translate_error(text: str) -> str:
    """Rewrite an error message of the command line for Python.

    Options become keyword arguments (`--top-k` becomes `top_k`), and commands become API calls (`toyexp eval` becomes
    `toyexp.evaluate(...)`).
    """
    text = re.sub(r"(?<![\w-])--([a-z]+(?:-[a-z]+)*)\b", lambda match: match[1].replace("-", "_"), text)
    return re.sub(rf"(?:\btoyexp |^|(?<=; ))({'|'.join(PYTHON_CALLS)})\b", lambda match: PYTHON_CALLS[match[1]], text)


@contextlib.contextmanager
def note_remains(directory: Path, call: str) -> Iterator[None]:
    """If the `with` block raises RunFailed or KeyboardInterrupt, add a note to the exception.

    The note says how to open and resume the run. `call` is the beginning of the Python call that resumes the run, such
    as `toyexp.run(`. If the run has no checkpoint, the note says only how to open the run. If no run was written to
    `directory`, no note is added.
    """
    try:
        yield
    except (RunFailed, KeyboardInterrupt) as error:
        if (directory / "config.yaml").is_file():
            has_checkpoint = any(directory.glob("checkpoints/step-*"))
            resuming = f"; resume: {call}resume={short_path(directory)!r})" if has_checkpoint else ""
            error.add_note(f"open the run: toyexp.open({short_path(directory)!r}){resuming}")
        raise


# -- keywords as settings --------------------------------------------------


NESTED_KEYS = ("callbacks", "hydra", "sweep")  # their values may be mappings of mappings


def check_words(call: str, words: Sequence[Any]) -> list[str]:
    """Return command-line arguments as a list. Raise UserError if one of them is not a string but, say, a dict."""
    for word in words:
        if not isinstance(word, str):
            raise UserError(
                f"{call} {printable(repr(word))}: must be text; give settings as words or keywords: "
                f"{call}('recipe=warm', steps=100)"
            )
    return list(words)


def check_path(parameter: str, value: Any) -> Path:
    """Return `value` as a Path. If it is not a path or is empty, raise UserError with `parameter` in the message."""
    if not isinstance(value, str | os.PathLike) or isinstance(os.fspath(value), bytes) or not os.fspath(value):
        raise UserError(f"{parameter}: must be a path, got {printable(repr(value))}")
    return Path(value)


def format_settings(settings: Mapping[str, Any], swept: bool = False) -> list[str]:
    """Convert keyword arguments to overrides `key=value`.

    The value of a part, such as `model`, may be a mapping that holds the part's name under `name` and its settings. If
    `swept` is True, a list or tuple holds the values that a sweep tries, except for the settings `callbacks` and
    `plugins`, whose values are lists themselves. Raise UserError for a value that cannot be written as an override.
    """
    return [word for key, value in settings.items() for word in _overrides(key, value, swept)]


def _overrides(key: str, value: Any, swept: bool) -> Iterator[str]:
    from toyexp.config.words import format_override

    parts = key.split(".")
    if isinstance(value, Mapping) and (len(parts) == 1 or (parts[0] in NESTED_KEYS and len(parts) == 2)):
        if parts == ["callbacks"]:
            yield format_override(key, list(value))
        for name, inner in value.items():
            yield from _overrides(key if name == "name" and parts[0] != "callbacks" else f"{key}.{name}", inner, swept)
    elif swept and isinstance(value, list | tuple | range) and key not in ("callbacks", "plugins"):
        yield f"{key}={','.join(format_override(key, item).removeprefix(f'{key}=') for item in value)}"
    else:
        yield format_override(key, value)
