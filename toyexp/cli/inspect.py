"""The options --cfg, --info and --hydra-help: print the composed configuration, or Hydra's information about it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from toyexp.base.errors import UserError, suggest

if TYPE_CHECKING:
    from toyexp.config.compose import Composition
    from toyexp.config.request import Request
    from toyexp.config.schema import Source


def inspect(flags: Mapping[str, str], request: Request) -> int:
    """Print the output of --cfg, --info or --hydra-help and return 0. `flags` maps the typed flags to their values.

    Raise UserError for an invalid setting, or a value that Hydra rejects.
    """
    from toyexp.config.mistakes import rephrase

    if "--hydra-help" in flags:
        words: Sequence[str] = ()
    else:
        composed = request.compose()
        if "--cfg" in flags:
            print(_format_config(composed, flags), end="")
            return 0
        words = composed.all_keys.hydra_overrides(composed.typed)
    try:
        _print_from_hydra(flags.get("--info"), request.source, [*request.source.overrides(), *words])
    except OSError:  # the output cannot be written
        raise
    except Exception as error:
        raise rephrase(" ".join(f"{flag} {value}".strip() for flag, value in flags.items()), error) from None
    return 0


def _print_from_hydra(info: str | None, source: Source, words: list[str]) -> None:
    """Print what Hydra's option --info prints for the value `info`. If `info` is None, print Hydra's help.

    `words` are overrides in Hydra's syntax. Remove the log handlers that Hydra adds.
    """
    from hydra import initialize_config_dir
    from hydra._internal.utils import get_args_parser
    from hydra.core.global_hydra import GlobalHydra

    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        with initialize_config_dir(str(source.directory), version_base="1.3", job_name="toyexp"):
            active, parser = GlobalHydra.instance().hydra, get_args_parser()
            assert active is not None
            if info is None:
                active.hydra_help(source.name, parser, parser.parse_args(words))
            else:
                active.show_info(info, source.name, words)
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


def _format_config(composed: Composition, flags: Mapping[str, str]) -> str:
    """Return the configuration as YAML: the keys of the run (--cfg job), those of Hydra (hydra), or both (all).

    With --package, return only the keys below the given name, such as optim. With --resolve, replace interpolations
    such as ${seed}. Raise UserError if the configuration does not have the name.
    """
    from omegaconf import Container, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from toyexp.config.mistakes import rephrase

    cfg, package = composed.cfg, flags.get("--package")
    shown = {"job": set(cfg) - {"hydra"}, "hydra": {"hydra"}, "all": set(cfg)}[flags["--cfg"]]
    cfg = OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key in shown])
    try:
        node = OmegaConf.select(cfg, package) if package not in (None, "_global_") else cfg
        if "--resolve" in flags:
            OmegaConf.resolve(cfg)
    except OmegaConfBaseException as error:
        raise rephrase(f"--cfg {flags['--cfg']}", error) from None
    if node is None:
        raise UserError(f"--package {package}: not in the configuration; {suggest(str(package), map(str, cfg))}")
    head = "" if node is cfg else f"# @package {package}\n"
    return head + OmegaConf.to_yaml(node) if isinstance(node, Container) else f"{node}\n"
