"""Security checks of configuration files: only plain values are allowed, no code and no access to the environment.

A file may come from an untrusted source. Hydra would load packages, read environment variables, and call any function
named by `_target_`. Everything that is not needed is therefore rejected before Hydra reads the file.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import yaml

from toyexp.base.errors import UserError, printable
from toyexp.base.files import check_nodes
from toyexp.plugins.rules import RESERVED_KEYS

SIZE_LIMIT = 256 << 10  # bytes per file
CODE_ERROR = "names code, which is not allowed; choose parts by name: engine=, recipe=, callbacks=[...]"
RESOLVERS = ("now", "hydra", "oc.select", "oc.dict.keys", "oc.dict.values")  # allowed in ${name:...}
HYDRA_PACKAGE = r"(_\w+_\.)?hydra(\.|$)"  # an @package of Hydra's own settings: hydra.run, _global_.hydra
HYDRA_KEYS = ("run", "sweep", "sweeper", "searchpath")  # allowed under hydra
PLACES = ("run", "sweep")  # sections with output directories, only allowed in a user's main file
TAGS = "str", "int", "float", "bool", "null", "map", "seq", "merge", "timestamp"
PLAIN_TAGS = {f"tag:yaml.org,2002:{tag}" for tag in TAGS}
NUMBER_TAGS = {"tag:yaml.org,2002:int", "tag:yaml.org,2002:float"}


@functools.lru_cache  # the result only depends on the arguments
def check_file(path: Path, text: str, preset: bool = False) -> None:
    """Raise UserError if a file of the user holds anything other than settings.

    A `preset` is a file of a config group, such as an experiment; fewer settings are allowed in it than in a main file.
    """
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError:
        return  # the loader reports it, with the line
    except RecursionError:
        raise UserError(f"{path}: nested too deeply") from None
    if root is None:
        return
    check_nodes(root, path)
    for node, key in _nodes(root):
        location = f"{path}, line {node.start_mark.line + 1}"
        if node.tag not in PLAIN_TAGS:
            raise UserError(
                f"{location}: YAML tag {printable(node.tag)} is not allowed; use numbers, texts, lists, mappings"
            )
        if node.tag in NUMBER_TAGS and ":" in node.value:  # sexagesimal
            raise UserError(f"{location}: YAML reads {node.value} as a number in base 60; if it is a text, quote it")
        if key and re.search(rf"@{HYDRA_PACKAGE}", str(node.value)):
            raise UserError(f"{location}: {printable(str(node.value))} sets Hydra's own settings; remove it")
        if key and node.value in RESERVED_KEYS:
            raise UserError(f"{location}: {node.value} {CODE_ERROR}")
        if not key and isinstance(node, yaml.ScalarNode):
            check_text(node.value, location)
    _check_hydra(root, text, path, preset)


def require_plugins(plugins: object, loaded: Sequence[str], subject: str) -> None:
    """Raise UserError if a configuration needs local plugins that are not in `loaded`.

    `plugins` is the list of plugins in the configuration. They are not loaded from there, because a file must not load
    code. `subject` begins the message and names the configuration.
    """
    names = [str(name) for name in plugins] if isinstance(plugins, Iterable) and not isinstance(plugins, str) else []
    if missing := [name for name in names if name not in loaded]:
        add = f"'plugins=[{printable(','.join(names), 200)}]'"
        raise UserError(
            f"{subject} needs the plugin {printable(missing[0])}; only the command line can load code: add {add}"
        )


def _nodes(node: yaml.Node, key: bool = False) -> Iterator[tuple[yaml.Node, bool]]:
    """Yield pairs for a node and all nodes inside it. A pair holds the node, and True if the node is a key."""
    yield node, key
    if isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            yield from _nodes(name, key=True)
            yield from _nodes(value)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _nodes(item)


def check_text(text: str, location: str) -> None:
    """Raise UserError for an interpolation that reads from the machine, such as ${oc.env:HOME}."""
    for match in re.finditer(r"(\\*)\$\{\s*([^:}$]*)(.?)", text):
        escaped, name, end = len(match[1]) % 2, match[2].strip(), match[3]
        if escaped or (end == "}" or (end == ":" and name in RESOLVERS)):
            continue
        also = "; pass a variable on the command line: key=$NAME" if name.startswith("oc.env") else ""
        allowed = f"only ${{key}} and ${{now:...}} are{also}"
        raise UserError(f"{location}: {printable(text)} is not allowed in a file; {allowed}")


def _check_hydra(root: yaml.Node, text: str, path: Path, preset: bool) -> None:
    """Raise UserError for settings of Hydra that load or call code, or set output directories in a preset."""
    package = re.search(r"^\s*#\s*@package\s+(\S+)", text, re.MULTILINE)
    if package and re.match(HYDRA_PACKAGE, package[1]):
        raise UserError(
            f"{path}: sets Hydra's own settings by '@package {printable(package[1])}'; use '# @package _global_'"
        )
    for key, value in root.value if isinstance(root, yaml.MappingNode) else ():
        if key.value != "hydra" or not isinstance(value, yaml.MappingNode):
            continue
        for name, inner in value.value:
            location = f"{path}, line {name.start_mark.line + 1}"
            if preset and name.value in PLACES:
                raise UserError(
                    f"{location}: a preset cannot set hydra.{name.value}; "
                    f"on the command line, type hydra.{name.value}.dir=..."
                )
            if name.value not in HYDRA_KEYS:
                names = ", ".join(f"hydra.{key}" for key in HYDRA_KEYS)
                raise UserError(f"{location}: hydra.{printable(name.value)} is not allowed in a file; allowed: {names}")
            if name.value == "sweeper" and any(k.value != "params" for k, _ in inner.value):
                raise UserError(f"{location}: only hydra.sweeper.params is allowed in a file")
            if name.value == "searchpath" and "pkg:" in str(inner.value):
                raise UserError(f"{location}: hydra.searchpath loads a Python package (pkg://), which is not allowed")
