"""The command line: `python -m toyexp [key=value ...]` runs an experiment, `-m` sweeps, and a few sub-commands."""

from __future__ import annotations

import difflib
import logging
import os
import platform
import sys
import textwrap
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toyexp.errors import ToyexpError, Unavailable, UserError
from toyexp.registry import KINDS, Registry, load, settings_of

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from toyexp.experiment import Result

log = logging.getLogger("toyexp")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit code: 0 done, 1 failed, 2 bad input, 130/143 interrupted."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if words and words[0] in COMMANDS:
            return COMMANDS[words[0]](words[1:])
        if "-h" in words or "--help" in words:
            return show_help()
        return run(words)
    except ToyexpError as error:
        print(f"toyexp: error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt as error:
        print(f"toyexp: {error or 'interrupted'}", file=sys.stderr)
        return getattr(error, "exit_code", 130)
    except BrokenPipeError:  # `toyexp plugins | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


# -- running --------------------------------------------------------------------------------------------------------


def run(words: list[str]) -> int:
    """Composes and runs one experiment, or a sweep with -m."""
    from toyexp import config  # deferred: Hydra takes a third of a second that help and plugins do not need

    settings = [w for w in words if not w.startswith("-")]
    _refuse_commands(settings)
    flags = [w for w in words if w.startswith("-")]
    modules = [] if flags else _modules(config.parse(settings))
    modules = modules or _modules(config.parse([w for w in settings if w.startswith("plugins=")]))
    registry = load(modules)
    config.store_schemas(registry)
    if flags:
        return _through_hydra(words, registry, modules)
    cfg, directory = compose(settings, registry)
    result = experiment(cfg, registry, modules, directory)
    print_result(result)
    return 0


def _refuse_commands(settings: Sequence[str]) -> None:
    for word in settings:
        if "=" not in word and word[:1] not in "~+-":
            near = difflib.get_close_matches(word, COMMANDS, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; commands: {', '.join(COMMANDS)}; settings: key=value"
            raise UserError(f"{word!r} is neither a command nor a setting{hint}")


def _modules(parsed: Sequence[Any]) -> list[str]:
    """The modules of `plugins=[...]` on this command line."""
    for override in parsed:
        if override.key_or_group == "plugins":
            value = override.value()
            names = value if isinstance(value, list) else [value]
            for name in names:
                if not isinstance(name, str) or not name.replace(".", "_").isidentifier():
                    raise UserError(f"plugins={name}: not the name of a Python module")
            return names
    return []


def compose(overrides: Sequence[str], registry: Registry) -> tuple[DictConfig, Path]:
    """The configuration of one run, and the run directory that Hydra's settings give it."""
    import hydra
    from hydra.core.hydra_config import HydraConfig

    from toyexp import config

    with hydra.initialize_config_dir(str(config.conf_dir()), version_base="1.3", job_name="toyexp"):
        try:
            cfg = hydra.compose("config", overrides=list(overrides), return_hydra_config=True)
        except config.COMPOSITION_ERRORS as error:
            raise config.explain(error, overrides, registry) from None
        HydraConfig.instance().set_config(cfg)
        try:
            directory = Path(str(cfg.hydra.run.dir)).absolute()
        except Exception as error:  # an interpolation that cannot be resolved, in whatever way
            raise UserError(f"hydra.run.dir: {config.first_line(error)}") from None
        return _without_hydra(cfg), directory


def _without_hydra(cfg: DictConfig) -> DictConfig:
    from omegaconf import open_dict

    with open_dict(cfg):
        cfg.pop("hydra", None)
    return cfg


def experiment(cfg: DictConfig, registry: Registry, modules: Sequence[str], directory: Path) -> Result:
    """Builds, checks and runs one composed configuration."""
    from toyexp.config import build
    from toyexp.experiment import execute, prepare

    prepared = prepare(build(cfg, registry, modules))
    return execute(prepared, directory, say=lambda line: print(line, flush=True))


def _through_hydra(words: Sequence[str], registry: Registry, modules: Sequence[str]) -> int:
    """Runs with Hydra's own flags: -m, --cfg, --config-dir, tab completion and the rest."""
    import hydra
    from hydra.core.hydra_config import HydraConfig

    from toyexp import config

    rows: list[tuple[list[str], Result | Exception]] = []

    def job(cfg: DictConfig) -> None:
        hydra_config = HydraConfig.get()
        directory = Path(hydra_config.runtime.output_dir)
        overrides = list(hydra_config.overrides.task)
        sweeping = hydra_config.mode is not None and hydra_config.mode.name == "MULTIRUN"
        try:
            if sweeping:
                print(f"\n[{hydra_config.job.num}] {' '.join(overrides)}", flush=True)
            result = experiment(cfg, registry, modules, directory)
        except Exception as error:
            _remove_if_empty(directory)
            if not sweeping:
                raise
            rows.append((overrides, error))  # the others go on; the table and the exit code tell
            report = error if isinstance(error, ToyexpError) else f"{type(error).__name__}: {error}"
            print(f"toyexp: error in job {hydra_config.job.num}: {report}", file=sys.stderr)
            log.debug("job failed", exc_info=error)
        else:
            rows.append((overrides, result))
            print_result(result)

    with _hydra_arguments(words):
        try:
            hydra.main(version_base="1.3", config_path=str(config.conf_dir()), config_name="config")(job)()
        except config.COMPOSITION_ERRORS as error:
            if isinstance(error, ValueError) and error.__traceback__ is None:
                raise
            raise config.explain(error, [w for w in words if not w.startswith("-")], registry) from None
        except SystemExit as stop:
            return stop.code if isinstance(stop.code, int) else 2 if stop.code else 0
    failed = [r for _, r in rows if isinstance(r, Exception)]
    if len(rows) > 1:
        print_table(rows)
    if not failed:
        return 0
    return 2 if all(isinstance(e, UserError) for e in failed) else 1


@contextmanager
def _hydra_arguments(words: Sequence[str]) -> Any:
    """sys.argv as hydra.main reads it, and its errors as exceptions instead of its own words and exit 1."""
    argv, full = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    fixed = list(words)
    for i, word in enumerate(fixed[:-1]):
        if word in ("--config-path", "-cp", "--config-dir", "-cd"):  # Hydra would look beside this file
            fixed[i + 1] = str(Path(fixed[i + 1]).absolute())
    sys.argv = ["toyexp", *fixed]
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        sys.argv = argv
        os.environ.pop("HYDRA_FULL_ERROR")
        if full is not None:
            os.environ["HYDRA_FULL_ERROR"] = full


def _remove_if_empty(directory: Path) -> None:
    """Takes back the directory Hydra made for a job whose input was bad."""
    for path in (directory, directory.parent):
        try:
            path.rmdir()
        except OSError:  # not empty, or not there
            return


# -- what a person sees at the end ------------------------------------------------------------------------------------


def print_result(result: Result) -> None:
    """The outcome of one run, and where everything is."""
    from toyexp.experiment import count

    outcome = result.outcome
    speed = f" · {count(outcome.tokens_per_second)} tokens/s" if outcome.tokens_per_second else ""
    print(f"{outcome.reason} after {outcome.steps} steps in {outcome.seconds:.1f} s{speed}")
    if outcome.why:
        print(f"stopped because {outcome.why}")
    if outcome.eval_loss is not None and outcome.first_eval_loss is not None:
        print(f"held-out loss {outcome.first_eval_loss:.4f} -> {outcome.eval_loss:.4f}")
    print(f"run     {_short(result.dir)}")
    for path in result.artifacts:
        print(f"        {_short(path)}  {path.stat().st_size / 1e6:.2f} MB")


def _short(path: Path) -> str:
    """Relative to here when it is below here."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def print_table(rows: Sequence[tuple[list[str], Result | Exception]]) -> None:
    """One line per job of a sweep: what was varied, final losses, where it is."""
    table: list[tuple[str, ...]] = [("job", "overrides", "steps", "train loss", "held-out loss", "run")]
    for i, (overrides, result) in enumerate(rows):
        label = " ".join(overrides)
        if isinstance(result, Exception):
            table.append((str(i), label, "-", "-", "-", f"failed: {result}"))
            continue
        outcome = result.outcome
        losses = [f"{x:.4f}" if x is not None else "-" for x in (outcome.train_loss, outcome.eval_loss)]
        table.append((str(i), label, str(outcome.steps), *losses, _short(result.dir)))
    widths = [max(len(row[c]) for row in table) for c in range(len(table[0]))]
    print()
    for row in table:
        cells = [
            cell.rjust(w) if c in (0, 2, 3, 4) else cell.ljust(w)
            for c, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())


# -- sub-commands -----------------------------------------------------------------------------------------------------


def plugins(words: Sequence[str]) -> int:
    """What can be asked for, and which plugins are broken."""
    names = [w for w in words if not w.startswith("plugins=")]
    modules = [m for w in words if w.startswith("plugins=") for m in w.removeprefix("plugins=").strip("[]").split(",")]
    registry = load(modules)
    if names:
        return _plugin_settings(names[0], registry)
    for kind, offers in registry.offers.items():
        print(f"{kind}:")
        if kind == "engine":
            print(f"  {'auto':<16} The best engine that works here.")
        for name, offer in sorted(offers.items()):
            origin = "" if offer.package.startswith("toyexp ") else f"  [{offer.plugin}, {offer.package}]"
            print(f"  {name:<16} {offer.help}{origin}")
    for problem in registry.problems:
        print(f"broken: {problem.plugin} ({problem.package}): {problem.reason}")
    print("\nSettings of one of them: toyexp plugins NAME")
    return 0


def _plugin_settings(name: str, registry: Registry) -> int:
    found = [(kind, offers[name]) for kind, offers in registry.offers.items() if name in offers]
    if not found:
        from toyexp.errors import choose

        everything = {n for offers in registry.offers.values() for n in offers}
        raise UserError(f"plugins {name}: there is nothing of that name; {choose(name, everything)}")
    for kind, offer in found:
        print(f"{kind}={name}  {offer.help}  [{offer.plugin}, {offer.package}]")
        prefix = f"callbacks.{name}" if kind == "callbacks" else kind
        for s in settings_of(offer.cls):
            value = (
                "null" if s.default is None else str(s.default).lower() if isinstance(s.default, bool) else s.default
            )
            print(f"  {f'{prefix}.{s.name}={value}':<34} {s.comment}")
    return 0


def doctor(words: Sequence[str]) -> int:
    """Which engines work here, and why the others do not."""
    if words:
        raise UserError(f"doctor {words[0]}: takes no arguments")
    import toyexp

    registry = load()
    print(f"toyexp {toyexp.__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}")
    width = max((len(n) for n in registry.offers["engine"]), default=0)
    for name, offer in sorted(registry.offers["engine"].items(), key=lambda item: -getattr(item[1].cls, "priority", 0)):
        try:
            verdict = f"PASS  {offer.cls().check()}"
        except Unavailable as reason:
            verdict = f"no    {reason}"
        except Exception as error:  # whatever a plugin raises, the others are still reported
            verdict = f"FAIL  {type(error).__name__}: {error}"
        print(f"  {name:<{width}}  {verdict}")
    for name, offer in sorted(registry.offers["callbacks"].items()):
        try:
            offer.cls().check()
        except Unavailable as reason:
            print(f"  callbacks.{name}: {reason}")
    for problem in registry.problems:
        print(f"  broken plugin {problem.plugin} ({problem.package}): {problem.reason}")
    return 0


def show_help(words: Sequence[str] = ()) -> int:
    """How to use the command line."""
    from toyexp.config import conf_dir

    registry = load()
    print(
        textwrap.dedent("""\
        usage: toyexp [key=value ...]        run one experiment
               toyexp -m key=v1,v2 ...       sweep over values
               toyexp COMMAND

        commands
          plugins [NAME]    every engine, recipe, model, data set and callback; or one's settings
          doctor            which engines work here, and why the others do not
          help              this page

        examples
          toyexp recipe=warm steps=300
          toyexp recipe=scratch model=gpt2 data=text data.path=book.txt data.tokenizer=char
          toyexp -m recipe=scratch,warm seed=0,1,2
          toyexp callbacks=[default,sample,plots] ~callbacks.cosine callbacks.sample.every=50
    """)
    )
    print("choices")
    for kind in (*KINDS, "experiment"):
        presets = {p.stem for p in (conf_dir() / kind).glob("*.yaml")}
        extra = {"auto"} if kind == "engine" else set()
        form = "callbacks=[...]" if kind == "callbacks" else f"{kind}="
        listed = textwrap.wrap(", ".join(sorted(set(registry.offers.get(kind, ())) | presets | extra)), 90)
        print(f"  {form:<16} " + ("\n" + " " * 19).join(listed))
    print("\ntop-level keys (conf/config.yaml)")
    for line in (conf_dir() / "config.yaml").read_text().splitlines():
        key, _, comment = line.partition("#")
        if comment and ":" in key and not key.startswith((" ", "-")):
            print(f"  {key.strip().replace(': ', '='):<34} {comment.strip()}")
    print("\nThe composed configuration: toyexp [key=value ...] --cfg job")
    print('Tab completion for bash:    eval "$(toyexp -sc install=bash)"')
    return 0


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {"plugins": plugins, "doctor": doctor, "help": show_help}
