"""What can be asked for: what `toyexp plugins` shows."""

from __future__ import annotations

from collections.abc import Iterator

from toyexp.base.errors import Broken, UserError
from toyexp.base.files import working_directory
from toyexp.base.terminal import print_output
from toyexp.interfaces.command import Arguments
from toyexp.plugins.compatibility import table
from toyexp.plugins.discovery import load
from toyexp.plugins.registry import Registry

HELP = """\
usage: toyexp plugins [NAME] [--matrix] [plugins=[my_module]]
       toyexp plugins --check PATH [--json]

What can be asked for: every engine, recipe, model, data set and callback, and which plugins are broken.
  toyexp plugins                      all of them
  toyexp plugins warm                 the settings of one
  toyexp plugins plugins=[my_module]  with those of a file in the current directory

options
--check runs the tests that lie with the plugin, which need not be installed, and the conformance suite of each part
that none of them is about. It exits with 1 where one fails or cannot be run, and with 2 where there is no plugin."""


def run(arguments: Arguments) -> int:
    """List all plugins, show which go together, describe one, or check one."""
    names, matrix, path = arguments.rest, arguments.matrix, arguments.check
    if path is not None:
        from toyexp.cli.plugin_check import check

        if arguments.settings or matrix:
            raise UserError(f"plugins --check {path}: takes one directory or file, and --json")
        checked = check(path)
        checked.show(arguments)
        return 0 if checked.has_passed else 1
    if arguments.json:
        raise UserError("plugins --json: goes with --check PATH")
    if len(names) > (0 if matrix else 1):
        raise UserError(f"plugins {' '.join(names)}: takes one name, or --matrix")
    registry = load(arguments.modules)
    if matrix:
        print("\n".join(table(registry)))
    elif names:
        from toyexp.config.describe import lines_about

        print("\n".join(lines_about(names[0], registry)))
    else:
        _list(registry)
    return 0


def _list(registry: Registry) -> None:
    width = max(16, *(len(name) for offers in registry.offers.values() for name in offers))
    for kind, offers in registry.offers.items():
        print(f"{kind}:")
        if kind == "engine":
            order = ", ".join(offer.name for offer in registry.engines())
            print(f"  {'auto':<{width}} The best engine that works here: the first of {order}.")
        for name, offer in sorted(offers.items()):
            print(f"  {name:<{width}} {offer.help}{offer.origin}")
    for problem in registry.problems:
        print(f"broken: {problem.plugin} ({problem.package}): {problem.reason}")
    one = f"toyexp plugins NAME{registry.loading}"
    print(f"\nSettings of one of them, or of a preset: {one}; what goes with what: --matrix", flush=True)
    for line in broken_engines(registry):  # last, for to know it takes as long as loading them
        print_output(f"not here: {line}")


def broken_engines(registry: Registry) -> Iterator[str]:
    """A line about each package that is here and cannot be loaded, with the engines that need it."""
    found: dict[str, list[str]] = {}
    working_directory()  # or MKL, which looks for itself from there, ends the process
    for offer in registry.engines():
        try:
            offer.cls().check()
        except Broken as reason:
            found.setdefault(str(reason), []).append(offer.name)
        except Exception:  # a device that is not here, and what else `toyexp doctor` tells
            continue
    yield from (f"engine={','.join(names)}: {reason}" for reason, names in found.items())
