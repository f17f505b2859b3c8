"""`toyexp plugins`: list plugins and their settings, and check a plugin."""

from __future__ import annotations

from collections.abc import Iterator

from toyexp.base.errors import Broken, UserError
from toyexp.base.files import working_directory
from toyexp.base.terminal import print_output, print_usage
from toyexp.interfaces.command import Arguments
from toyexp.plugins.compatibility import table
from toyexp.plugins.discovery import load
from toyexp.plugins.registry import Registry

HELP = """\
usage: toyexp plugins [NAME] [--matrix] [plugins=[my_module]]
       toyexp plugins --check PATH [--json]

List engines, models, data sets, recipes, optimisers, callbacks, formats and commands, and broken plugins.
  toyexp plugins                      list everything
  toyexp plugins warm                 show the settings of the plugin or preset `warm`
  toyexp plugins plugins=[my_module]  include the plugins of my_module.py in the current directory

options
--check runs the tests in the plugin's directory, and the conformance suite of each part that has no test. The plugin
need not be installed. Exit code: 1 if a test fails or cannot be run, 2 if PATH is not a plugin."""


def run(arguments: Arguments) -> int:
    """List all plugins, or describe one, or with --matrix show which recipe can train which model.

    With --check, test a plugin. Return the exit code: 1 if that check fails, otherwise 0.
    """
    names, matrix, path = arguments.rest, arguments.matrix, arguments.check
    if path is not None:
        from toyexp.cli.plugin_check import check

        if arguments.settings or matrix:
            raise UserError(f"plugins --check {path}: only takes one directory or file, and --json")
        checked = check(path)
        checked.show(arguments)
        return 0 if checked.has_passed else 1
    if arguments.json:
        raise UserError("plugins --json: only has an effect with --check PATH")
    if len(names) > (0 if matrix else 1):
        raise UserError(f"plugins {' '.join(names)}: takes either one name or --matrix")
    registry = load(arguments.modules)
    if matrix:
        print_output("\n".join(table(registry)))
    elif names:
        from toyexp.config.describe import lines_about

        print_usage("\n".join(lines_about(names[0], registry)))
    else:
        _list(registry)
    return 0


def _list(registry: Registry) -> None:
    width = max(16, *(len(name) for offers in registry.offers.values() for name in offers))
    lines = []
    for kind, offers in registry.offers.items():
        lines.append(f"{kind}:")
        if kind == "engine":
            order = ", ".join(offer.name for offer in registry.engines())
            lines.append(f"  {'auto':<{width}}  The best engine on this machine: the first that works of {order}.")
        lines += [f"  {name:<{width}}  {offer.help}{offer.origin}" for name, offer in sorted(offers.items())]
    print_usage("\n".join(lines))
    for problem in registry.problems:
        print_output(f"broken: {problem.plugin} ({problem.package}): {problem.reason}")
    command = f"toyexp plugins NAME{registry.plugins_override}"
    print_output(f"\nSettings of a plugin or preset: {command}; which recipe can train which model: --matrix")
    for line in broken_engines(registry):  # last, because it imports the engines
        print_output(f"broken: {line}")


def broken_engines(registry: Registry) -> Iterator[str]:
    """Yield a line for each package that is installed but cannot be imported, with the engines that need the package.

    The form of a line is `engine=cpu,cuda: REASON`.
    """
    engines: dict[str, list[str]] = {}
    working_directory()  # raises if the directory was deleted; importing MKL would then end the process
    for offer in registry.engines():
        try:
            offer.cls().check()
        except Broken as reason:
            engines.setdefault(str(reason), []).append(offer.name)
        except Exception:  # unavailable devices are reported by `toyexp doctor`
            continue
    yield from (f"engine={','.join(names)}: {reason}" for reason, names in engines.items())
