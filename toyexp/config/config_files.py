"""The configuration files that a command line chose, and what in one of them makes it of no use: told by its name."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from toyexp.base.errors import UserError
from toyexp.config.paths import CONF
from toyexp.config.schema import Source, load_yaml, read_config

HEADER = "# @package _global_"  # by which an experiment's keys stand at the top
RESUMES = {"resume": "resume=...", "sweep.resume": "sweep.resume=..."}  # what to go on with is said by who types


def check_files(cfg: DictConfig, parsed: Sequence[Override], source: Source) -> None:
    """Raises UserError for files whose settings stand in no place, and for one that says what to go on with."""
    if "experiment" in cfg:
        raise misplaced(parsed, source)
    given = {o.key_or_group for o in parsed}
    for key, typed in RESUMES.items():
        if key not in given and _is_set(cfg, key):
            where = next((path for path in files(parsed, source) if _holds(load_yaml(path), key)), "the config")
            raise UserError(f"{where}: {key} is not taken from a file; give it on the command line: {typed}")


def includes_itself(parsed: Sequence[Override], source: Source) -> UserError:
    """An error about defaults lists that lead in a circle."""
    path = next(files(parsed, source))
    return UserError(f"{path}: includes itself; take its own name out of its defaults list, or of a file's named there")


def misplaced(parsed: Sequence[Override], source: Source) -> UserError:
    """An error about an experiment whose settings stand under the key `experiment`."""
    path = next(files(parsed, source))
    held = load_yaml(path)
    if held is None:
        return UserError(f"{path}: holds no settings, such as steps: 100 below a first line '{HEADER}'")
    if not isinstance(held, dict):
        # Not what it holds: the file may be a link to one that its owner shows to nobody.
        what = "a list" if isinstance(held, list) else "one value"
        return UserError(f"{path}: holds {what}, and no keys with values, such as steps: 100")
    if path.parent.name != "experiment":
        return UserError(f"{path}: has a key experiment, which is none; choose one by experiment=NAME")
    return UserError(f"{path}: its first line must be '{HEADER}', and that of each experiment which it includes")


def files(parsed: Sequence[Override], source: Source) -> Iterator[Path]:
    """The experiment's file, where one is chosen, and the main one."""
    names = [str(o.value()) for o in parsed if o.key_or_group == "experiment" and not o.is_sweep_override()]
    places = [folder / "experiment" / f"{name.removesuffix('.yaml')}.yaml" for name in names
              for folder in source.directories]  # fmt: skip
    yield from [path for path in places if path.is_file()][:1]
    yield source.directory / f"{source.name}.yaml"


@contextlib.contextmanager
def placed(given: Sequence[Override], source: Source) -> Iterator[None]:
    """Begins a UserError about a setting with the line of the person's file that gave it, unless it was typed."""
    try:
        yield
    except UserError as error:
        found = re.match(r"([a-z]\w*(?:\.\w+)*)(=|: | )", str(error))
        if type(error) is not UserError or not found or source.saved or found[1] in {o.key_or_group for o in given}:
            raise
        key, said = found[1], str(error)[found.end() :]
        for path in files(given, source):
            if not path.is_relative_to(CONF) and _holds(load_yaml(path), key, one_value=found[2] == "="):
                raise UserError(f"{place(path, key, said)}: {error}") from error
        raise


def place(path: Path, key: str, said: str = "") -> str:
    """`path, line 3`: where a file says something of a key, as deep as it does, to the name that `said` begins with."""
    node, line = yaml.compose(read_config(path), Loader=yaml.SafeLoader), 0
    for part in key.split("."):  # a preset's keys begin where it stands
        pairs = node.value if isinstance(node, yaml.MappingNode) else ()
        line, node = next(((k.start_mark.line + 1, v) for k, v in pairs if k.value == part), (line, node))
    pairs = node.value if isinstance(node, yaml.MappingNode) else ()
    line = next((k.start_mark.line + 1 for k, _ in pairs if said.startswith((f"{k.value}:", f"{k.value} "))), line)
    return f"{path}, line {line}" if line else str(path)


def _is_set(cfg: DictConfig, key: str) -> bool:
    try:
        return OmegaConf.select(cfg, key) is not None
    except OmegaConfBaseException:  # it refers to another key
        return True


def _holds(node: Any, key: str, one_value: bool = False) -> bool:
    """Whether a file says something of a key, and where `one_value` is wanted, one."""
    for part in key.split("."):
        node = node.get(part) if isinstance(node, dict) else None
    return node is not None and not (one_value and isinstance(node, dict))
