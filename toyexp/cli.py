"""The command line: `python -m toyexp [key=value ...]` runs an experiment, `-m` sweeps, and a few sub-commands."""

from __future__ import annotations

import difflib
import itertools
import logging
import os
import platform
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from toyexp.errors import ToyexpError, Unavailable, UserError, choose
from toyexp.matrix import table
from toyexp.registry import KINDS, Registry, load, settings_of

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override
    from omegaconf import DictConfig

    from toyexp.experiment import Result
    from toyexp.parity import Report
    from toyexp.schema import Source

log = logging.getLogger("toyexp")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit code: 0 done, 1 failed, 2 bad input, 130/143 interrupted."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if words and words[0] in COMMANDS:
            return COMMANDS[words[0]](words[1:])
        if "-h" in words or "--help" in words:
            return show_help()
        if "--version" in words:
            return show_version()
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

SHORT = {
    "-m": "--multirun", "-c": "--cfg", "-p": "--package", "-i": "--info", "-sc": "--shell-completion",
    "-cp": "--config-path", "-cn": "--config-name", "-cd": "--config-dir",
}  # fmt: skip
# What a flag takes: None is nothing, () anything, and otherwise one of these words.
FLAGS: dict[str, tuple[str, ...] | None] = {
    "--multirun": None,
    "--cfg": ("job", "hydra", "all"),
    "--resolve": None,
    "--package": (),
    "--info": ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath"),
    "--config-path": (),
    "--config-name": (),
    "--config-dir": (),
    "--shell-completion": None,
    "--hydra-help": None,
}
SHELLS = ("bash", "fish", "zsh")


def run(words: Sequence[str]) -> int:
    """Composes and runs one experiment, or a sweep with -m."""
    flags, settings = split(words)
    from toyexp import config, mistakes, schema  # deferred: Hydra takes a third of a second that plugins need not

    parsed = mistakes.parse(settings)
    modules = _modules(parsed)
    registry = load(modules)
    schema.store_schemas(registry)
    source = schema.Source.of(flags.get("--config-path"), flags.get("--config-name"), flags.get("--config-dir"))
    for flag in ("--resolve", "--package"):
        if flag in flags and "--cfg" not in flags:
            raise UserError(f"{flag}: goes with --cfg, which shows the configuration: toyexp --cfg job {flag}")
    if flags.keys() & {"--cfg", "--info", "--shell-completion", "--hydra-help"}:
        return inspect(flags, settings, registry, source)
    if "--multirun" in flags:
        return sweep(parsed, registry, modules, source)
    cfg = config.compose(settings, registry, source)
    result = experiment(cfg, registry, modules, lambda: config.directory(cfg, "hydra.run.dir"))
    print_result(result)
    return 0


def split(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """The flags with their values, by their long names, and the settings; UserError for what is neither."""
    flags: dict[str, str] = {}
    settings: list[str] = []
    left = list(words)
    while left:
        word = left.pop(0)
        if not word.startswith("-"):
            if "=" not in word and word[:1] not in "~+":
                near = difflib.get_close_matches(word, COMMANDS, n=1)
                hint = f"did you mean {near[0]}?" if near else f"commands: {', '.join(COMMANDS)}; settings: key=value"
                raise UserError(f"{word!r} is neither a command nor a setting; {hint}")
            settings.append(word)
            continue
        given, equals, value = word.partition("=")
        flag = SHORT.get(given, given)
        if flag not in FLAGS:
            if equals:
                raise UserError(f"{word}: a setting has no dashes: {word.lstrip('-')}")
            raise UserError(f"{word}: there is no such option; {choose(word, FLAGS)}")
        takes = FLAGS[flag]
        if equals or takes is None or (flag == "--info" and (not left or left[0] not in takes)):
            if equals and takes is None:
                raise UserError(f"{word}: {flag} takes no value")
            value = value or "all"
        elif not left:
            raise UserError(f"{given} needs a value" + (f": {', '.join(takes)}" if takes else ""))
        else:
            value = left.pop(0)
        if takes and value not in takes:
            raise UserError(f"{given} {value}: {choose(value, takes)}")
        flags[flag] = value
    return flags, settings


def _modules(parsed: Sequence[Override]) -> list[str]:
    """The modules of `plugins=[...]` on this command line."""
    for override in parsed:
        if override.key_or_group == "plugins":
            value = None if override.is_sweep_override() else override.value()
            names = [str(v) for v in value] if isinstance(value, list) else [str(value)]
            if value is None or not all(name.replace(".", "_").isidentifier() for name in names):
                raise UserError(f"{override.input_line}: takes names of Python modules, such as plugins=[my_module]")
            return names
    return []


def experiment(cfg: DictConfig, registry: Registry, modules: Sequence[str], directory: Callable[[], Path]) -> Result:
    """Builds, checks and runs one composed configuration; `directory` is asked once everything was checked."""
    from toyexp.config import build
    from toyexp.experiment import execute, prepare

    prepared = prepare(build(cfg, registry, modules))
    return execute(prepared, directory(), say=say)


def sweep(parsed: Sequence[Override], registry: Registry, modules: Sequence[str], source: Source) -> int:
    """Runs every combination of the values, one after another; a job that fails is reported and the others go on."""
    from toyexp import config, mistakes

    for override in parsed:  # what is wrong in every job is told once, before the first
        if not override.is_sweep_override():
            mistakes.check_override(override, registry, source)
    parsed = [*own_sweep(parsed, registry, source), *parsed]
    fixed = [o for o in parsed if not o.is_sweep_override()]
    rows: list[tuple[str, Result | Exception]] = []
    root: list[Path] = []

    def directory(cfg: DictConfig) -> Path:
        if not root:  # the time in its name is that of the first job
            root.append(config.directory(cfg, "hydra.sweep.dir"))
        return config.directory(cfg, "hydra.sweep.subdir", below=root[0])

    for number, varied in enumerate(combinations(parsed)):
        label = " ".join(varied)
        say(f"\n[{number}] {label}".rstrip())
        try:
            cfg = config.compose([*(str(o.input_line) for o in fixed), *varied], registry, source, number)
            result = experiment(cfg, registry, modules, lambda cfg=cfg: directory(cfg))  # type: ignore[misc]
        except Exception as error:
            rows.append((label, error))
            report = error if isinstance(error, ToyexpError) else f"{type(error).__name__}: {error}"
            print(f"toyexp: error in job {number}: {report}", file=sys.stderr)
            log.debug("job failed", exc_info=error)
        else:
            rows.append((label, result))
            print_result(result)
    failed = [r for _, r in rows if isinstance(r, Exception)]
    if len(rows) > 1:
        print_table(rows)
    if not failed:
        return 0
    return 2 if all(isinstance(e, UserError) for e in failed) else 1


def own_sweep(parsed: Sequence[Override], registry: Registry, source: Source) -> list[Override]:
    """What the chosen experiment sweeps over, but for the keys that the command line gives."""
    from toyexp import config, mistakes

    chosen = [str(o.input_line) for o in parsed if o.key_or_group == "experiment" and not o.is_sweep_override()]
    given = {o.key_or_group for o in parsed}
    own = config.sweep_of(config.compose(chosen, registry, source))
    return mistakes.parse([f"{key}={values}" for key, values in own.items() if key not in given])


def combinations(parsed: Sequence[Override]) -> list[tuple[str, ...]]:
    """The settings of each job: one value of every swept key, the last key varying fastest."""
    lists = []
    for o in parsed:
        if o.is_interval_sweep():
            raise UserError(f"{o.input_line}: an interval has no end of values; use range(...) or a list")
        if o.is_sweep_override():
            lists.append([f"{o.get_key_element()}={value}" for value in o.sweep_string_iterator()])
    return list(itertools.product(*lists))


def inspect(flags: dict[str, str], settings: Sequence[str], registry: Registry, source: Source) -> int:
    """Shows what Hydra knows, without running: --cfg, --info, --hydra-help and tab completion."""
    import hydra

    from toyexp import config, mistakes

    if "--shell-completion" in flags:
        _check_completion(settings)
    elif "--hydra-help" not in flags:
        cfg = config.compose(settings, registry, source)
        if "--package" in flags:
            config.require_node(cfg, flags["--package"])
    shown = [w for f, v in flags.items() if not f.startswith(("--config", "--multirun"))
             for w in ([f] if FLAGS[f] is None else [f, v])]  # fmt: skip
    argv, full = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = ["toyexp", *shown, *source.overrides(), *settings]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # exceptions instead of Hydra's words and exit 1
    try:
        hydra.main(version_base="1.3", config_path=str(source.directory), config_name=source.name)(lambda cfg: None)()
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 2 if stop.code else 0
    except Exception as error:
        raise UserError(f"{' '.join(shown)}: {mistakes.in_plain_words(error)}") from None
    finally:
        sys.argv = argv
        os.environ.pop("HYDRA_FULL_ERROR")
        if full is not None:
            os.environ["HYDRA_FULL_ERROR"] = full
    return 0


def _check_completion(settings: Sequence[str]) -> None:
    verb, _, shell = settings[0].partition("=") if settings else ("", "", "")
    if verb not in ("install", "uninstall", "query") or shell not in SHELLS:
        raise UserError("-sc takes install, uninstall or query, with =bash, =fish or =zsh")
    if verb == "query" and "COMP_LINE" not in os.environ:
        raise UserError(
            f'-sc query={shell} is what the shell asks; to switch it on: eval "$(toyexp -sc install={shell})"'
        )


def say(line: str) -> None:
    """A line for the person who watches; one who has gone away (`| head`) ends the lines, not the run."""
    try:
        print(line, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# -- what a person sees at the end ------------------------------------------------------------------------------------


def print_result(result: Result) -> None:
    """The outcome of one run, and where everything is."""
    from toyexp.experiment import count

    outcome = result.outcome
    speed = f" · {count(outcome.tokens_per_second)} {result.reads}/s" if outcome.tokens_per_second else ""
    say(f"{outcome.reason} after {outcome.steps} steps in {outcome.seconds:.1f} s{speed}")
    if outcome.why:
        say(f"stopped because {outcome.why}")
    if outcome.eval_loss is not None and outcome.first_eval_loss is not None:
        say(f"held-out loss {outcome.first_eval_loss:.4f} -> {outcome.eval_loss:.4f}")
    for name, value in outcome.eval_scores.items():
        say(f"held-out {name} {outcome.first_eval_scores[name]:.4f} -> {value:.4f}")
    say(f"run     {_short(result.dir)}")
    for path in result.artifacts:
        shown = path.relative_to(result.dir) if path.is_relative_to(result.dir) else path
        say(f"        {shown}  {path.stat().st_size / 1e6:.2f} MB")


def _short(path: Path) -> str:
    """Relative to here when it is below here."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def print_table(rows: Sequence[tuple[str, Result | Exception]]) -> None:
    """One line per job of a sweep: what was varied, final losses and scores, where it is."""
    outcomes = [result.outcome for _, result in rows if not isinstance(result, Exception)]
    scores = list(dict.fromkeys(name for outcome in outcomes for name in outcome.eval_scores))
    numbers = ["train loss", "held-out loss", *(f"held-out {name}" for name in scores)]
    table: list[tuple[str, ...]] = [("job", "overrides", "steps", *numbers, "run")]
    for i, (label, result) in enumerate(rows):
        if isinstance(result, Exception):
            table.append((str(i), label, "-", *("-" for _ in numbers), f"failed: {result}"))
            continue
        outcome = result.outcome
        values = [outcome.train_loss, outcome.eval_loss, *map(outcome.eval_scores.get, scores)]
        shown = [f"{x:.4f}" if x is not None else "-" for x in values]
        table.append((str(i), label, str(outcome.steps), *shown, _short(result.dir)))
    widths = [max(len(row[c]) for row in table) for c in range(len(table[0]))]
    say("")
    for row in table:
        cells = [
            cell.ljust(w) if c in (1, len(row) - 1) else cell.rjust(w)
            for c, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        say("  ".join(cells).rstrip())


# -- sub-commands -----------------------------------------------------------------------------------------------------


def plugins(words: Sequence[str]) -> int:
    """What can be asked for, and which plugins are broken."""
    names = [w for w in words if not w.startswith("plugins=") and w != "--matrix"]
    modules = [m for w in words if w.startswith("plugins=") for m in w.removeprefix("plugins=").strip("[]").split(",")]
    registry = load(modules)
    if len(names) > 1:
        raise UserError(f"plugins {' '.join(names)}: takes one name")
    if "--matrix" in words:
        if names:
            raise UserError(f"plugins --matrix {names[0]}: shows all of them, and takes no name")
        print("\n".join(table(registry)))
        return 0
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
    print("\nSettings of one of them: toyexp plugins NAME; what goes with what: toyexp plugins --matrix")
    return 0


def _plugin_settings(name: str, registry: Registry) -> int:
    found = [(kind, offers[name]) for kind, offers in registry.offers.items() if name in offers]
    if not found:
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
    if "--graph" in words:
        return _graphs([w for w in words if w != "--graph"])
    if words:
        raise UserError(f"doctor {words[0]}: takes --graph and settings behind it, or nothing")
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


def _graphs(settings: Sequence[str]) -> int:
    """What of an experiment's training step runs on which device."""
    from toyexp.residency import report
    from toyexp.variants import prepare_variants

    registry, modules, _ = _for_one_experiment("doctor --graph", settings)
    for line in report(prepare_variants(settings, registry, modules, default="ggml")):
        print(line)
    return 0


def parity(words: Sequence[str]) -> int:
    """Whether several engines compute the same experiment's numbers, within tolerances."""
    from toyexp.parity import STEPS, compare, help_text, split, summary

    if "-h" in words or "--help" in words:
        print(help_text())
        return 0
    options, settings = split(words)
    from toyexp.run import dump_json
    from toyexp.schema import Source
    from toyexp.variants import prepare_variants

    registry, modules, parsed = _for_one_experiment("parity", settings)
    own = own_sweep(parsed, registry, Source.of())
    fixed = [str(o.input_line) for o in own if not o.is_sweep_override()]
    watch: Callable[[str], None] = (lambda line: None) if options.json else say
    reports: dict[str, Report] = {}
    for varied in combinations(own):
        label = " ".join(varied)
        if varied:
            watch(f"\n[{len(reports)}] {label}")
        variants = prepare_variants([f"steps={STEPS}", *settings, *fixed, *varied], registry, modules)
        reports[label] = report = compare(variants, options.tolerances, watch)
        for line in summary(report, options.all):
            watch(line)
    within = sum(report.within for report in reports.values())
    if options.json:
        jobs = [{"overrides": label, **report.plain()} for label, report in reports.items()]
        print(dump_json({"within": within == len(jobs), "jobs": jobs} if own else reports[""].plain(), indent=2))
    if len(reports) > 1:
        watch(f"\n{within} of {len(reports)} within the tolerances")
    return 0 if within == len(reports) else 1


def bench(words: Sequence[str]) -> int:
    """Engines side by side on this machine: their speed, and their memory."""
    from toyexp.bench import HELP, measure, split, table

    if "-h" in words or "--help" in words:
        print(HELP)
        return 0
    options, settings = split(words)
    from toyexp.run import dump_json

    registry, modules, _ = _for_one_experiment("bench", settings)
    report = measure(settings, registry, modules, options, (lambda line: None) if options.json else say)
    print(dump_json(report.plain(), indent=2) if options.json else "\n".join(table(report)))
    return 0


def _for_one_experiment(command: str, settings: Sequence[str]) -> tuple[Registry, list[str], list[Override]]:
    """The plugins and the parsed settings, but the engines, of a command that runs one experiment on several engines.

    Raises UserError for a setting with several values.
    """
    from toyexp import mistakes, schema

    parsed = mistakes.parse([s for s in settings if not s.startswith("engine=")])
    for override in parsed:
        if override.is_sweep_override():
            raise UserError(f"{override.input_line}: {command} compares engines on one experiment; give one value")
    modules = _modules(parsed)
    registry = load(modules)
    schema.store_schemas(registry)
    return registry, modules, parsed


def show_help(words: Sequence[str] = ()) -> int:
    """How to use the command line."""
    if words:
        raise UserError(f"help {words[0]}: takes no arguments; the settings of one thing: toyexp plugins NAME")
    from toyexp.schema import conf_dir

    registry = load()
    print(
        textwrap.dedent("""\
        usage: toyexp [key=value ...]        run one experiment
               toyexp -m key=v1,v2 ...       sweep over values
               toyexp COMMAND

        commands
          plugins [NAME]    every engine, recipe, model, data set and callback; or one's settings
          plugins --matrix  which recipe trains which model on which engine
          doctor            which engines work here, and why the others do not
          doctor --graph    which ops of a training step run on which device: toyexp doctor --graph engine=ggml
          parity [...]      whether several engines compute the same numbers: toyexp parity --help
          bench [...]       engines side by side on this machine: toyexp bench --help
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


def show_version() -> int:
    """The version."""
    import toyexp

    print(f"toyexp {toyexp.__version__}")
    return 0


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "plugins": plugins,
    "doctor": doctor,
    "parity": parity,
    "bench": bench,
    "help": show_help,
}
