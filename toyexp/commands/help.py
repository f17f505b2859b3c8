"""How the command line is used: what `toyexp --help` shows, made of the tables that it goes by."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from toyexp.base.errors import UserError
from toyexp.base.words import typed
from toyexp.commands.pages import page_about, read, show, topics
from toyexp.config.shipped import CONF
from toyexp.config.top_level import GROUPS, top_level
from toyexp.contract.command import Arguments
from toyexp.contract.plugins import load
from toyexp.contract.registry import Registry

HEAD = """\
usage: toyexp [key=value ...]        run one experiment
       toyexp -m key=v1,v2 ...       sweep over values
       toyexp sweep.resume=DIR       go on with a sweep
       toyexp ... --dry-run          what any of these would do, and how long
       toyexp COMMAND ...            see toyexp COMMAND --help
"""
EXAMPLES = """
examples
  toyexp recipe=warm steps=300
  toyexp recipe=scratch model=gpt2 data=text data.path=book.txt data.tokenizer=char
  toyexp -m recipe=scratch,warm seed=0,1,2
  toyexp callbacks=[default,sample,plots] ~callbacks.cosine callbacks.sample.every=50
"""
TAIL = """
The composed configuration: toyexp [key=value ...] --cfg job
Tab completion (or zsh, fish): eval "$(toyexp completion bash)\""""


def run(arguments: Arguments) -> int:
    """Prints the page, or one of the documentation."""
    if not arguments.rest:
        print(page())
        return 0
    word, offers = arguments.rest[0], load(arguments.modules).offers
    known = offers["command"]
    if len(arguments.rest) > 1:
        raise UserError(f"help {' '.join(arguments.rest)}: takes one topic, such as toyexp help data")
    if word in known and word not in topics():
        raise UserError(f"help {word}: is a command: toyexp {word} --help")
    if word not in topics() and (kind := next((kind for kind in GROUPS if word in offers.get(kind, ())), None)):
        page_of_it = page_about(f"{kind}={word}")
        raise UserError(f"help {word}: there is no such page; {kind}={word} is on toyexp help {page_of_it}")
    show(read(word))
    if word in known:
        print(f"\nOf the command: toyexp {word} --help")
    return 0


def page(modules: Sequence[str] = ()) -> str:
    """All of it."""
    registry = load(modules)
    commands = [f"  {n:<12} {o.help.removesuffix('.')}{o.origin}" for n, o in registry.offers["command"].items()]
    keys = [f"  {f'{key}={typed(setting.default)}':<34} {setting.comment}" for key, setting in top_level()]
    return "\n".join([
        HEAD, "commands", *commands, EXAMPLES, "choices", *_choices(registry), "",
        "top-level keys (conf/config.yaml)", *keys, "", "pages of the documentation: toyexp help TOPIC",
        *(f"  {line}" for line in textwrap.wrap(", ".join(topics()), 108)), TAIL,
    ])  # fmt: skip


HELP = page


def _choices(registry: Registry) -> Iterator[str]:
    for kind in GROUPS:
        presets = {path.stem for path in (CONF / kind).glob("*.yaml")}
        extra = {"auto"} if kind == "engine" else set()
        form = "callbacks=[...]" if kind == "callbacks" else f"{kind}="
        listed = textwrap.wrap(", ".join(sorted(set(registry.offers.get(kind, ())) | presets | extra)), 90)
        yield f"  {form:<16} " + ("\n" + " " * 19).join(listed)
