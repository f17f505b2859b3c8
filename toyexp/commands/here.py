"""What of all that can be asked for does not work on this machine, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from toyexp.base.errors import Broken, Unavailable, UserError
from toyexp.base.packages import why
from toyexp.commands import llamacpp
from toyexp.config.top_level import LAUNCHERS
from toyexp.contract.registry import Offer, Registry
from toyexp.formats.gguf.quantise import quantiser
from toyexp.runs import report
from toyexp.sweep import study
from toyexp.sweep.process import require
from toyexp.text import chat


def verdict(offer: Offer) -> str:
    """Whether an engine works here: PASS with its facts and advice, or no or FAIL with the reason."""
    try:
        engine = offer.cls()
        return "; ".join((f"PASS  {engine.check()}", *engine.remedies()))
    except Unavailable as reason:
        return f"no    {reason}"
    except Exception as error:  # whatever a plugin raises, the others are still reported
        return f"FAIL  {why(error)}"


def broken_engines(registry: Registry) -> Iterator[str]:
    """A line about each package that is here and cannot be loaded, with the engines that need it."""
    found: dict[str, list[str]] = {}
    for offer in registry.engines():
        try:
            offer.cls().check()
        except Broken as reason:
            found.setdefault(str(reason), []).append(offer.name)
        except Exception:  # a device that is not here, and what else `toyexp doctor` tells
            continue
    yield from (f"engine={','.join(names)}: {reason}" for reason, names in found.items())


def not_here(registry: Registry) -> Iterator[str]:
    """A line about each thing but engines that needs a package which is missing or broken."""
    for label, check in _checks(registry):
        try:
            check()
        except Unavailable as reason:
            yield f"{label}: {reason}" if label else str(reason)
        except UserError:  # a setting that has to be given
            continue
        except Exception as error:  # of a plugin
            yield f"{label}: its check failed ({why(error)})"


def _check(cls: type) -> None:
    cls().check()


def _checks(registry: Registry) -> Iterator[tuple[str, Callable[[], object]]]:
    for kind, form in (("data", "data={}"), ("callbacks", "callbacks.{}")):
        for name, offer in sorted(registry.offers[kind].items()):
            yield form.format(name), partial(_check, offer.cls)
    for launcher in LAUNCHERS:
        yield "", partial(require, launcher)
    yield "", partial(study.require, "cmaes")
    yield "compare --html", report.require
    yield "the chat template of a GGUF", chat.sandbox
    yield "", llamacpp.installed
    yield "", partial(quantiser, "a K-quant")
