"""A configuration, and what Hydra knows of it, shown without running: --cfg, --info and --hydra-help."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from toyexp.base.errors import UserError, choose
from toyexp.cli.flags import FLAGS

if TYPE_CHECKING:
    from toyexp.config.compose import Composed
    from toyexp.config.request import Request


def inspect(flags: Mapping[str, str], request: Request) -> int:
    """Shows what the flags ask for; returns the exit code, and raises UserError for what it cannot show."""
    import hydra

    from toyexp.config.mistakes import in_plain_words

    settings: Sequence[str] = ()
    if "--hydra-help" not in flags:
        composed = request.compose()
        if "--cfg" in flags:
            print(_composed(composed, flags), end="")
            return 0
        settings = composed.every.in_lists(composed.given)
    words = [w for f, v in flags.items() if not f.startswith("--config") for w in ([f] if FLAGS[f] is None else [f, v])]
    source = request.source
    show = hydra.main(version_base="1.3", config_path=str(source.directory), config_name=source.name)(lambda cfg: None)
    try:
        with _as_command_line([*words, *source.overrides(), *settings]):
            show()
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 2 if stop.code else 0
    except OSError:  # of what takes the output
        raise
    except Exception as error:
        raise in_plain_words(" ".join(words), error) from None
    return 0


@contextlib.contextmanager
def _as_command_line(words: Sequence[str]) -> Iterator[None]:
    """The words are what Hydra, which knows no other way, finds as this process's own; it raises what goes wrong."""
    argv, environment = sys.argv, dict(os.environ)
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    sys.argv = ["toyexp", *words]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # and prints no words of its own with exit code 1
    try:
        yield
    finally:
        sys.argv = argv
        root.handlers[:] = handlers  # Hydra's --info sets up a log of its own
        root.setLevel(level)
        del os.environ["HYDRA_FULL_ERROR"]
        os.environ.update(environment)


def _composed(composed: Composed, flags: Mapping[str, str]) -> str:
    """The configuration, or the part that --package names, as Hydra shows it; UserError where there is no such part."""
    from omegaconf import Container, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from toyexp.config.mistakes import in_plain_words

    cfg, package = composed.cfg, flags.get("--package")
    shown = {"job": set(cfg) - {"hydra"}, "hydra": {"hydra"}, "all": set(cfg)}[flags["--cfg"]]
    cfg = OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key in shown])
    try:
        node = OmegaConf.select(cfg, package) if package not in (None, "_global_") else cfg
        if "--resolve" in flags:
            OmegaConf.resolve(cfg)
    except OmegaConfBaseException as error:
        raise in_plain_words(f"--cfg {flags['--cfg']}", error) from None
    if node is None:
        raise UserError(f"--package {package}: the config has no such part; {choose(str(package), map(str, cfg))}")
    head = "" if node is cfg else f"# @package {package}\n"
    return head + OmegaConf.to_yaml(node) if isinstance(node, Container) else f"{node}\n"
