"""`toyexp new`: create a plugin from a template."""

from __future__ import annotations

import re
from importlib.util import find_spec
from keyword import iskeyword
from pathlib import Path

from toyexp.base.errors import UserError, suggest
from toyexp.base.files import working_directory
from toyexp.base.formatting import short_path
from toyexp.base.writing import convert_write_errors, unwritable_reason, write_atomically
from toyexp.config.paths import CONF, TEMPLATES
from toyexp.interfaces.command import Arguments
from toyexp.plugins.discovery import load

HELP = """\
usage: toyexp new KIND NAME [--into DIR]

Create a plugin in a new directory, toyexp-NAME: a working part, a test with the conformance suite, and a README with
the next commands. KIND is engine, model, recipe, data, callback, optimiser, objective or
format.
  toyexp new optimiser sgdr
  cd toyexp-sgdr && pytest
Existing files are never overwritten."""

KINDS = {  # keys: as typed; values: as in the registry
    "engine": "engine", "model": "model", "recipe": "recipe", "data": "data", "callback": "callbacks",
    "optimiser": "optim", "objective": "objective", "format": "format",
}  # fmt: skip
KIND_ALIASES = {"optim": "optimiser", "optimizer": "optimiser", "callbacks": "callback", "dataset": "data"}
MAX_NAME_LENGTH = 60  # characters; the name becomes part of file names
USAGE = "toyexp new KIND NAME, such as toyexp new optimiser sgdr"


def run(arguments: Arguments) -> int:
    """Create a plugin from the template of its kind, print the commands to type next, and return 0."""
    words = arguments.rest
    if len(words) != 2:
        raise UserError(f"new{''.join(f' {word}' for word in words)}: needs a kind and a name: {USAGE}")
    kind = KIND_ALIASES.get(words[0], words[0])
    if kind not in KINDS:
        raise UserError(f"new {kind}: unknown kind; {suggest(kind, KINDS)}")
    directory = write(kind, words[1], Path(arguments.into or "."), arguments.modules)
    commands = re.findall(r"```\n(.*?)```", (directory / "README.md").read_text(), re.DOTALL)[0].splitlines()
    print(f"{short_path(directory)}: {', '.join(sorted(path.name for path in directory.iterdir()))}\n")
    for line in (f"cd {short_path(directory)}", *([] if find_spec("pytest") else ["pip install pytest"]), *commands):
        print(f"  {line}")
    module = f"toyexp_{words[1]}"
    print(f"\nIf you rename or remove a setting in {module}.py, edit test_{module}.py too.")
    print(f"How to write it: toyexp help plugins/{kind}")
    return 0


def write(kind: str, name: str, into: Path, modules: list[str]) -> Path:
    """Write a plugin called `name`, from the template of `kind`, into a new directory in `into`; return its path.

    Raise UserError for a name that is invalid, or in use by an installed plugin or by one in the local `modules`. If an
    error occurs, no files are left behind.
    """
    files = {path.name: path.read_text() for path in (TEMPLATES / kind).iterdir() if path.is_file()}
    _check_name(kind, name, "".join(files.values()), modules)
    directory = (working_directory() / into / f"toyexp-{name.replace('_', '-')}").resolve()
    if directory.exists() or directory.is_symlink():
        raise UserError(f"new {kind} {name}: {short_path(directory)} already exists; choose another name or --into")
    if why := unwritable_reason(directory):
        raise UserError(f"new {kind} {name}: {short_path(directory)} cannot be written ({why}); type --into DIR")
    with convert_write_errors(directory):
        directory.parent.mkdir(parents=True, exist_ok=True)
        with write_atomically(directory) as new:
            new.mkdir()
            for file, text in files.items():
                (new / fill_template(file, kind, name)).write_text(fill_template(text, kind, name))
    return directory


def fill_template(text: str, kind: str, name: str) -> str:
    """Replace the placeholder `my_<kind>` in a template's text with the plugin's name.

    The placeholder's forms as a class name (MyModel) and as a distribution name (my-model) are replaced as well.
    """
    for old, new in zip(_name_forms(f"my_{kind}"), _name_forms(name), strict=True):
        text = text.replace(old, new)
    return text


def _name_forms(name: str) -> tuple[str, str, str]:
    """Return three forms of a name such as my_model: itself, as a class (MyModel), and as a distribution (my-model)."""
    return name, "".join(part.capitalize() for part in name.split("_")), name.replace("_", "-")


def _check_name(kind: str, name: str, template: str, modules: list[str]) -> None:
    """Raise UserError if `name` is malformed or in use by a plugin, a preset or a module.

    `template` is the text of the template's files. The name of the plugin's class must not occur in it.
    """
    command = f"new {kind} {name}"
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name):
        guess = "_".join(re.findall("[a-z0-9]+", re.sub("([a-z0-9])([A-Z])", r"\1_\2", name).lower()))
        hint = f"; did you mean {guess}?" if name.isascii() and guess[:1].isalpha() else ""
        raise UserError(f"{command}: use lower-case letters, digits and single underscores, a letter first{hint}")
    if len(name) > MAX_NAME_LENGTH:
        raise UserError(f"new {kind} {name[:20]}...: has {len(name)} characters; at most {MAX_NAME_LENGTH} are allowed")
    _, its_class, _ = _name_forms(name)
    if name != f"my_{kind}" and (iskeyword(its_class) or re.search(rf"\b{its_class}\b", template)):
        raise UserError(f"{command}: the class name {its_class} is already in use; try my_{name}")
    offer = load(modules).offers[KINDS[kind]].get(name)
    if offer is not None:
        key = "--type " if kind == "format" else f"{KINDS[kind]}="
        raise UserError(f"{command}: {key}{name} exists, in {offer.plugin} ({offer.package}); choose another name")
    preset = CONF / KINDS[kind] / f"{name}.yaml"
    if preset.is_file() or (kind, name) == ("engine", "auto"):
        raise UserError(f"{command}: {KINDS[kind]}={name} is already in use; choose another name")
    if find_spec(f"toyexp_{name}") is not None:
        raise UserError(f"{command}: a module toyexp_{name} already exists; choose another name")
