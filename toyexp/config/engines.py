"""Which engine computes: the one that was asked for, or the best that works here."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

from toyexp.base.errors import Absent, Broken, Unavailable, UserError, choose, printable
from toyexp.base.packages import told_by, why
from toyexp.base.ranks import started_ranks
from toyexp.base.signals import hidden_interrupt
from toyexp.config.build import made, typed
from toyexp.config.schema import AUTO, class_of
from toyexp.interfaces.engine import Engine
from toyexp.plugins.registry import Registry


def read_label(label: str, asked: str) -> tuple[str, dict[str, str]]:
    """The engine of `name:key=value:...` and its own settings; the UserError tells what was `asked`."""
    name, *own = label.split(":")
    if own and not name:
        raise UserError(f"{asked}: the engine's name is missing before the ':', such as ggml:threads=1")
    if len(own) == 1 and own[0].isdecimal():
        return label, {}  # cuda:0, which the registry knows no engine of, and has words for
    if not all("=" in setting and "," not in setting for setting in own):
        raise UserError(f"{asked}: an engine's own settings are written {name}:key=value, such as {name}:threads=1")
    return name, dict(setting.split("=", 1) for setting in own)


def engine_of(label: str, registry: Registry) -> Engine:
    """Return the engine that a label means, which works here; raise UserError, or Unavailable."""
    return pick_labelled(label, registry, f"engine={label}")[0]


def pick_labelled(label: str, registry: Registry, asked: str) -> tuple[Engine, str]:
    """Return the engine of a label, and a line that says which; errors in the label begin with what was `asked`."""
    name, own = read_label(label, asked)
    cls = class_of("engine", {"name": name}, registry)
    known = [f.name for f in dataclasses.fields(cls)]
    for key in own.keys() - set(known):
        raise UserError(f"{asked}: {name} has no setting {printable(key)}; {choose(key, known)}")
    return pick_engine(typed(cls, {"name": name, **own}, "engine"), registry)


def pick_engine(node: Mapping[str, Any], registry: Registry) -> tuple[Engine, str]:
    """The engine that was asked for, or with `auto` the best that works here, and a line that says which and why."""
    if node["name"] != AUTO:
        engine = made(class_of("engine", node, registry), node)
        try:
            return engine, f"{engine.name}: {facts_of(engine)}"
        except Unavailable:
            with told_by(f"engine={engine.name}"):
                raise
    passed_over: list[str] = []
    absent: dict[str, None] = {}  # packages, with how each is installed
    broken: dict[str, list[str]] = {}  # the engines by what is wrong with their package
    threads = {"threads": node["threads"]} if node.get("threads") else {}
    offers = registry.engines()
    for i, offer in enumerate(offers):
        takes_threads = any(f.name == "threads" for f in dataclasses.fields(offer.cls))
        engine = offer.cls(**(threads if takes_threads else {}))
        if started_ranks().count > 1 and getattr(offer.cls, "follow", None) is Engine.follow:  # which refuses them
            passed_over.append(offer.name)
            continue
        try:
            facts = facts_of(engine)
        except Broken as reason:
            broken.setdefault(reason.fact, []).append(offer.name)
        except Unavailable as reason:
            passed_over.append(offer.name)
            if isinstance(reason, Absent):
                absent[str(reason)] = None
        else:
            shown = [] if engine.on_gpu else [later.name for later in offers[i:] if _is_shown(later.cls)]
            return engine, f"{offer.name}: {facts} ({_auto(passed_over, broken, shown)})"
    found = "".join(f"; {fact}" for fact in (*broken, *absent))
    command = f"`toyexp doctor{registry.loading}`"
    rest = "why" if absent else "why and what to install"
    raise UserError(f"engine=auto: no engine works here{found}; {command} says {rest}")


def facts_of(engine: Engine) -> str:
    """What an engine says about its device; Broken when its check fails in another way than saying why not."""
    try:
        return engine.check()
    except UserError:
        raise
    except Exception as error:  # whatever a library raises while it loads, or a plugin
        raise hidden_interrupt(error) or Broken(f"its check failed ({why(error)})") from None


def _is_shown(engine: type[Engine]) -> bool:
    """Whether the environment names GPUs for an engine."""
    return engine.on_gpu and os.environ.get(engine.shows or "-", "-1") not in ("", "-1")


def _auto(passed_over: Sequence[str], broken: Mapping[str, Sequence[str]], shown: Sequence[str]) -> str:
    told = [", ".join(passed_over)] if passed_over else []
    told += [f"{', '.join(names)}: {fact}" for fact, names in broken.items()]
    later = f"; not tried: {', '.join(shown)}" if shown else ""
    return "auto" + (f"; not here: {'; '.join(told)}" if told else "") + later
