"""What Hydra knows, shown without running: --cfg, --info and --hydra-help."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from toyexp.base.errors import UserError, choose
from toyexp.commands.flags import FLAGS

if TYPE_CHECKING:
    from toyexp.config.compose import Composed
    from toyexp.config.request import Request


def inspect(flags: Mapping[str, str], settings: Sequence[str], request: Request) -> int:
    """Has Hydra show what the flags ask for; returns the exit code, and raises UserError for what it cannot show."""
    import hydra

    from toyexp.config.build import in_plain_words

    if "--hydra-help" not in flags:
        composed = request.compose()
        if "--package" in flags:
            _require_node(composed, flags["--package"])
    words = [w for f, v in flags.items() if not f.startswith(("--config", "--multirun"))
             for w in ([f] if FLAGS[f] is None else [f, v])]  # fmt: skip
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
    sys.argv = ["toyexp", *words]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # and prints no words of its own with exit code 1
    try:
        yield
    finally:
        sys.argv = argv
        del os.environ["HYDRA_FULL_ERROR"]
        os.environ.update(environment)


def _require_node(composed: Composed, key: str) -> None:
    """Raises UserError when the config has no part of that name."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        found = OmegaConf.select(composed.cfg, key)
    except OmegaConfBaseException:
        found = None
    if found is None:
        known = map(str, composed.cfg)
        raise UserError(f"--package {key}: the config has no such part; {choose(key, known)}")
