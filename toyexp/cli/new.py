"""A plugin to begin with: what `toyexp new` writes."""

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

A plugin to begin with, in a directory of its own, toyexp-NAME: a part that works, its test by the conformance suite,
and a README with the commands to go on with. KIND is engine, model, recipe, data, callback, optimiser or format.
  toyexp new optimiser sgdr
  cd toyexp-sgdr && pytest
Nothing that is there is ever replaced."""

KINDS = {  # the registry's words for them
    "engine": "engine", "model": "model", "recipe": "recipe", "data": "data", "callback": "callbacks",
    "optimiser": "optim", "format": "format",
}  # fmt: skip
KIND_ALIASES = {"optim": "optimiser", "optimizer": "optimiser", "callbacks": "callback", "dataset": "data"}
MAX_NAME_LENGTH = 60  # letters of a name, which becomes a part of file names
USAGE = "toyexp new KIND NAME, such as toyexp new optimiser sgdr"


def run(arguments: Arguments) -> int:
    """Writes it, and says how to go on."""
    words = arguments.rest
    if len(words) != 2:
        raise UserError(f"new{''.join(f' {word}' for word in words)}: takes a kind, and a name: {USAGE}")
    kind = KIND_ALIASES.get(words[0], words[0])
    if kind not in KINDS:
        raise UserError(f"new {kind}: there is no such kind; {suggest(kind, KINDS)}")
    place = write(kind, words[1], Path(arguments.into or "."), arguments.modules)
    commands = re.findall(r"```\n(.*?)```", (place / "README.md").read_text(), re.DOTALL)[0].splitlines()
    print(f"{short_path(place)}: {', '.join(sorted(path.name for path in place.iterdir()))}\n")
    for line in (f"cd {short_path(place)}", *([] if find_spec("pytest") else ["pip install pytest"]), *commands):
        print(f"  {line}")
    print(f"\nHow such a part is written: toyexp help plugins/{kind}")
    return 0


def write(kind: str, name: str, into: Path, modules: list[str]) -> Path:
    """Writes the plugin, whole or not at all; returns its directory. UserError for a name that cannot be one."""
    files = {path.name: path.read_text() for path in (TEMPLATES / kind).iterdir() if path.is_file()}
    _check_name(kind, name, "".join(files.values()), modules)
    place = (working_directory() / into / f"toyexp-{name.replace('_', '-')}").resolve()
    if place.exists() or place.is_symlink():
        raise UserError(f"new {kind} {name}: {short_path(place)} is there already; choose another name or --into")
    if why := unwritable_reason(place):
        raise UserError(f"new {kind} {name}: {short_path(place)} cannot be written ({why})")
    with convert_write_errors(place):
        place.parent.mkdir(parents=True, exist_ok=True)
        with write_atomically(place) as new:
            new.mkdir()
            for file, text in files.items():
                (new / fill_template(file, kind, name)).write_text(fill_template(text, kind, name))
    return place


def fill_template(text: str, kind: str, name: str) -> str:
    """A template with a name of one's own in the place of `my_<kind>`, as class and as distribution too."""
    for mine, theirs in zip(_name_forms(f"my_{kind}"), _name_forms(name), strict=True):
        text = text.replace(mine, theirs)
    return text


def _name_forms(name: str) -> tuple[str, str, str]:
    """As a module and a setting, as a class, and as a distribution."""
    return name, "".join(part.capitalize() for part in name.split("_")), name.replace("_", "-")


def _check_name(kind: str, name: str, template: str, modules: list[str]) -> None:
    """Raises UserError for a name that is none, or somebody else's."""
    asked = f"new {kind} {name}"
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name):
        guess = "_".join(re.findall("[a-z0-9]+", re.sub("([a-z0-9])([A-Z])", r"\1_\2", name).lower()))
        hint = f"; did you mean {guess}?" if name.isascii() and guess[:1].isalpha() else ""
        raise UserError(f"{asked}: a name is lower-case letters, digits and single underscores, a letter first{hint}")
    if len(name) > MAX_NAME_LENGTH:
        raise UserError(f"new {kind} {name[:20]}...: has {len(name)} letters; a name has at most {MAX_NAME_LENGTH}")
    _, its_class, _ = _name_forms(name)
    if name != f"my_{kind}" and (iskeyword(its_class) or re.search(rf"\b{its_class}\b", template)):
        raise UserError(f"{asked}: its class would be {its_class}, which stands for something else; such as my_{name}")
    offer = load(modules).offers[KINDS[kind]].get(name)
    if offer is not None:
        key = "--type " if kind == "format" else f"{KINDS[kind]}="
        raise UserError(f"{asked}: {key}{name} is that of {offer.plugin} ({offer.package}); another name")
    preset = CONF / KINDS[kind] / f"{name}.yaml"
    if preset.is_file() or (kind, name) == ("engine", "auto"):
        raise UserError(f"{asked}: {KINDS[kind]}={name} stands for something else; another name")
    if find_spec(f"toyexp_{name}") is not None:
        raise UserError(f"{asked}: there is a module toyexp_{name} already; another name")
