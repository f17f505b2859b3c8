"""What all calls share: keywords as typed settings, and the process put back as it was."""

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
_lock = threading.RLock()  # Hydra, the environment and the working directory are those of the process


@contextlib.contextmanager
def isolated_call(call: str, quiet: bool = False) -> Iterator[None]:
    """Around all that is done: one call at a time, and what it changes globally is put back.

    That is random state, environment (but for what libraries read once, as they start), working directory, logging,
    PyTorch's settings, where modules are looked for, and what Hydra knows. UserError under torchrun, which starts the
    ranks of a command.
    """
    from toyexp.base.process_state import restore_process_state
    from toyexp.config.compose_cache import isolate_hydra

    if not isinstance(quiet, bool):
        raise UserError(f"{call} quiet: is True or False, and is {printable(repr(quiet))}")
    if started_ranks().count > 1:
        raise UserError(f"{call}: is done by one process; torchrun starts the ranks of `toyexp ...`")
    available_cores()  # which refuses a TOYEXP_CORES that cannot be
    working_directory()  # which says so when it is gone
    with _lock, restore_process_state(), isolate_hydra(), silence(quiet), reject_bad_names(), attribute_part_errors():
        try:
            yield
        except UserError as error:
            if call not in ("toyexp.run", "toyexp.sweep"):  # which take the words of a command line
                error.args = (translate_error(str(error)),)
            raise
        finally:
            show_status("")


def translate_error(text: str) -> str:
    """Return an error's words with keywords in place of options, and calls in place of commands."""
    text = re.sub(r"(?<![\w-])--([a-z]+(?:-[a-z]+)*)\b", lambda found: found[1].replace("-", "_"), text)
    return re.sub(rf"(?:\btoyexp |^|(?<=; ))({'|'.join(PYTHON_CALLS)})\b", lambda found: PYTHON_CALLS[found[1]], text)


@contextlib.contextmanager
def note_remains(where: Path, call: str) -> Iterator[None]:
    """Says of a run that fails or is interrupted how it is looked at from here, and gone on with."""
    try:
        yield
    except (RunFailed, KeyboardInterrupt) as error:
        if (where / "config.yaml").is_file():
            going_on = f"; go on: {call}resume={short_path(where)!r})" if any(where.glob("checkpoints/step-*")) else ""
            error.add_note(f"what it left: toyexp.open({short_path(where)!r}){going_on}")
        raise


# -- keywords of a call as the settings that would be typed for them --------------------------------------------------


NESTED_KEYS = ("callbacks", "hydra", "sweep")  # whose mappings hold mappings of settings, too


def check_words(call: str, words: Sequence[Any]) -> list[str]:
    """The words themselves; UserError for what is none, such as a mapping of settings."""
    for word in words:
        if not isinstance(word, str):
            raise UserError(
                f"{call} {printable(repr(word))}: is no word of a command line; settings are words or keywords: "
                f"{call}('recipe=warm', steps=100)"
            )
    return list(words)


def check_path(what: str, given: Any) -> Path:
    """A directory that is given; UserError for what is no path."""
    if not isinstance(given, str | os.PathLike) or isinstance(os.fspath(given), bytes) or not os.fspath(given):
        raise UserError(f"{what}: must be a path, got {printable(repr(given))}")
    return Path(given)


def format_settings(settings: Mapping[str, Any], swept: bool = False) -> list[str]:
    """`key=value` for each keyword; a mapping holds the settings of a part, and `name` in it which part that is.

    With `swept` a list or a tuple holds the values of a sweep, but for `callbacks` and `plugins`, which are lists.
    Raises UserError for what is no setting's value.
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
        yield f"{key}={','.join(format_override(key, one).removeprefix(f'{key}=') for one in value)}"
    else:
        yield format_override(key, value)
