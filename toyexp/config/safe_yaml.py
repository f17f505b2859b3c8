"""What a configuration file may say: plain values under plain keys. Nothing in it names code or reads the machine.

A file may come with a repository, a run or a mail. Hydra would follow it to packages and to the environment, and
`_target_` to any function; so what is not needed is refused before Hydra sees it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import yaml

from toyexp.base.errors import UserError, printable
from toyexp.base.files import check_nodes
from toyexp.plugins.rules import NAMES_CODE

SIZE_LIMIT = 256 << 10  # bytes of a file
CODE_ERROR = "names code; toyexp chooses its parts by name: engine=, recipe=, callbacks=[...]"
RESOLVERS = ("now", "hydra", "oc.select", "oc.dict.keys", "oc.dict.values")  # what ${name:...} may ask
HYDRA_PACKAGE = r"(_\w+_\.)?hydra(\.|$)"  # a package that is Hydra's own: hydra.run, _global_.hydra
HYDRA_KEYS = ("run", "sweep", "sweeper", "searchpath")  # of Hydra's own settings
PLACES = ("run", "sweep")  # where something is written: for a person's own main file to say, no other
TAGS = "str", "int", "float", "bool", "null", "map", "seq", "merge", "timestamp"
PLAIN_TAGS = {f"tag:yaml.org,2002:{tag}" for tag in TAGS}
NUMBER_TAGS = {"tag:yaml.org,2002:int", "tag:yaml.org,2002:float"}


@functools.lru_cache  # of a text that was looked through nothing else can be said
def check_file(path: Path, text: str, ours: bool, preset: bool = False) -> None:
    """Raises UserError for a file that says more than settings; `ours` lies in toyexp's own conf/.

    A `preset` is a choice of a group, such as an experiment, which one takes from elsewhere.
    """
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError:
        return  # whoever reads it says what is wrong, and on which line
    except RecursionError:
        raise UserError(f"{path}: its values are nested too deeply") from None
    if root is None:
        return
    check_nodes(root, path)
    for node, key in _nodes(root):
        place = f"{path}, line {node.start_mark.line + 1}"
        if node.tag not in PLAIN_TAGS:
            raise UserError(f"{place}: {printable(node.tag)} names a type; a configuration holds plain values")
        if node.tag in NUMBER_TAGS and ":" in node.value:  # sexagesimal
            raise UserError(f"{place}: YAML reads {node.value} in base 60; write the number, or a text in quotes")
        if key and not ours and re.search(rf"@{HYDRA_PACKAGE}", str(node.value)):
            raise UserError(f"{place}: {printable(str(node.value))} sets Hydra's own settings, which is not taken")
        if key and node.value in NAMES_CODE:
            raise UserError(f"{place}: {node.value} {CODE_ERROR}")
        if not key and not ours and isinstance(node, yaml.ScalarNode):
            check_text(node.value, place)
    if not ours:
        _check_hydra(root, text, path, preset)


def require_plugins(asked: object, loaded: Sequence[str], what: str) -> None:
    """Raises UserError where a configuration asks for local plugins that are not `loaded`: code comes with no file."""
    names = [str(name) for name in asked] if isinstance(asked, Iterable) and not isinstance(asked, str) else []
    if missing := [name for name in names if name not in loaded]:
        add = f"'plugins=[{printable(','.join(names), 200)}]'"
        raise UserError(
            f"{what} asks for the plugin {printable(missing[0])}; only the command line loads code: add {add}"
        )


def _nodes(node: yaml.Node, key: bool = False) -> Iterator[tuple[yaml.Node, bool]]:
    """The node and all in it, and whether each is a key."""
    yield node, key
    if isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            yield from _nodes(name, key=True)
            yield from _nodes(value)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _nodes(item)


def check_text(text: str, place: str) -> None:
    """Raises UserError for a value that asks the machine for something, such as ${oc.env:HOME}."""
    for match in re.finditer(r"(\\*)\$\{\s*([^:}$]*)(.?)", text):
        escaped, name, end = len(match[1]) % 2, match[2].strip(), match[3]
        if escaped or (end == "}" or (end == ":" and name in RESOLVERS)):
            continue
        also = "; give a variable on the command line: key=$NAME" if name.startswith("oc.env") else ""
        there = f"there may be ${{key}} and ${{now:...}}{also}"
        raise UserError(f"{place}: {printable(text)} is not taken from a file; {there}")


def _check_hydra(root: yaml.Node, text: str, path: Path, preset: bool) -> None:
    """Raises UserError for settings of Hydra's that can load or call something, or write where a preset wants."""
    package = re.search(r"^\s*#\s*@package\s+(\S+)", text, re.MULTILINE)
    if package and re.match(HYDRA_PACKAGE, package[1]):
        raise UserError(f"{path}: sets Hydra's own settings by '@package {printable(package[1])}', which is not taken")
    for key, value in root.value if isinstance(root, yaml.MappingNode) else ():
        if key.value != "hydra" or not isinstance(value, yaml.MappingNode):
            continue
        for name, inner in value.value:
            place = f"{path}, line {name.start_mark.line + 1}"
            if preset and name.value in PLACES:
                raise UserError(f"{place}: no preset sets hydra.{name.value}; type hydra.{name.value}.dir=...")
            if name.value not in HYDRA_KEYS:
                known = ", ".join(f"hydra.{key}" for key in HYDRA_KEYS)
                raise UserError(f"{place}: hydra.{printable(name.value)} is not taken from a file; there is {known}")
            if name.value == "sweeper" and any(k.value != "params" for k, _ in inner.value):
                raise UserError(f"{place}: of hydra.sweeper only params is taken from a file")
            if name.value == "searchpath" and "pkg:" in str(inner.value):
                raise UserError(f"{place}: hydra.searchpath loads a Python package (pkg://), which is not taken")
