"""The sub-commands: what is there, what works here, and engines side by side."""

from __future__ import annotations

import math
import platform
import sys
import textwrap
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from toyexp.base.errors import RunFailed, UserError
from toyexp.base.terminal import say, write_text
from toyexp.base.words import typed
from toyexp.commands.options import Words, asks_for_help, read_options, refuse_settings, take_plugins
from toyexp.commands.usage import DOCTOR_HELP, PLUGINS_HELP
from toyexp.config.top_level import top_level
from toyexp.contract.compatibility import table
from toyexp.contract.registry import CONFIGURED, conf_dir, load
from toyexp.sweep.combinations import combinations, own_sweep
from toyexp.training.settings import OF_A_RUN, Settings, keys_with

if TYPE_CHECKING:
    from toyexp.commands.parity import Report
    from toyexp.config.request import Request


ALONE = {*keys_with(OF_A_RUN, Settings), "sweep", "hydra"}  # what is about a run alone


def plugins(words: Sequence[str]) -> int:
    """What can be asked for, and which plugins and engines are broken."""
    if asks_for_help(words):
        print(PLUGINS_HELP)
        return 0
    from toyexp.commands.here import broken_engines

    modules, rest = take_plugins(words)
    given = read_options("plugins", rest, ["--matrix"])
    names = given.rest
    refuse_settings("plugins", names, "a name, and plugins=[...]")
    registry = load(modules)
    if len(names) > 1:
        raise UserError(f"plugins {' '.join(names)}: takes one name")
    if given.switches:
        if names:
            raise UserError(f"plugins --matrix {names[0]}: shows all of them, and takes no name")
        print("\n".join(table(registry)))
        return 0
    if names:
        from toyexp.config.named import lines_about

        print("\n".join(lines_about(names[0], registry)))
        return 0
    width = max(16, *(len(name) for offers in registry.offers.values() for name in offers))
    for kind, offers in registry.offers.items():
        print(f"{kind}:")
        if kind == "engine":
            print(f"  {'auto':<{width}} The best engine that works here.")
        for name, offer in sorted(offers.items()):
            origin = "" if offer.package.startswith("toyexp ") else f"  [{offer.plugin}, {offer.package}]"
            print(f"  {name:<{width}} {offer.help}{origin}")
    for problem in registry.problems:
        print(f"broken: {problem.plugin} ({problem.package}): {problem.reason}")
    print(
        "\nSettings of one of them, of optim or a preset: toyexp plugins NAME; what goes with what: --matrix",
        flush=True,
    )
    for line in broken_engines(registry):  # last, for to know it takes as long as loading them
        say(f"not here: {line}")
    return 0


def doctor(words: Sequence[str]) -> int:
    """Which engines work here, and why the others do not."""
    if asks_for_help(words):
        print(DOCTOR_HELP)
        return 0
    given = read_options("doctor", words, ["--graph", "--numerics"])
    if "--graph" in given.switches:
        return _graphs(given.rest)
    if "--numerics" in given.switches:
        return _numerics(given.rest)
    if words:
        raise UserError(f"doctor {words[0]}: takes --numerics or --graph and settings behind it, or nothing")
    import toyexp
    from toyexp.commands.here import not_here, verdict

    registry = load()
    print(f"toyexp {toyexp.__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}")
    width = max((len(n) for n in registry.offers["engine"]), default=0)
    for offer in registry.engines():
        say(f"  {offer.name:<{width}}  {verdict(offer)}")
    for line in not_here(registry):
        say(f"  {line}")
    for problem in registry.problems:
        print(f"  broken plugin {problem.plugin} ({problem.package}): {problem.reason}")
    return 0


def _numerics(settings: Sequence[str]) -> int:
    """Whether the engines compute every op's values and gradients, and a short training, as float64 does."""
    from toyexp.commands.doctor_numerics import engines, examine, expectations, table, trainings
    from toyexp.config.request import take_engines

    modules, rest = take_plugins(settings)
    labels, strange = take_engines(rest, "")
    if strange:
        raise UserError(f"doctor --numerics {strange[0]}: takes engine=name[:key=value],... and plugins=[...]")
    chosen = engines(labels, load(modules))
    ops, runs = expectations(), trainings()
    passed = True
    for label, engine in chosen:
        lines = list(examine(engine, ops, runs))
        passed = passed and all(line.passed for line in lines)
        say("\n".join(table(label, engine, lines)))
    return 0 if passed else 1


def _graphs(settings: Sequence[str]) -> int:
    """What of an experiment's training step runs on which device."""
    from toyexp.commands.doctor import report
    from toyexp.commands.variants import prepare_variants

    labels, request = _on_engines("doctor --graph", settings, {*ALONE, "steps", "lr", "callbacks"}, "ggml")
    for line in report(prepare_variants(request, labels)):
        print(line)
    return 0


def parity(words: Sequence[str]) -> int:
    """Whether several engines compute the same experiment's numbers, within tolerances."""
    from toyexp.commands.parity import STEPS, compare, help_text, split, summary

    if asks_for_help(words):
        print(help_text())
        return 0
    options, settings = split(words)
    from toyexp.base.writing import dump_json
    from toyexp.commands.variants import prepare_variants

    labels, request = _on_engines("parity", settings, ALONE)
    for override in request.settings:
        kind, _, rest = override.key_or_group.partition(".")
        offer = request.registry.offers["callbacks"].get(rest.partition(".")[0]) if kind == "callbacks" else None
        if offer is not None and "lr" not in dir(offer.cls):
            raise UserError(f"{override.input_line}: parity asks callbacks for the learning rate alone; leave it out")
    own = own_sweep(request)
    fixed = [str(o.input_line) for o in own if not o.is_sweep_override()]
    request = request.before(f"steps={STEPS}").plus(*fixed)
    watch: Callable[[str], None] = (lambda line: None) if options.json else say
    reports: dict[str, Report] = {}
    for varied in combinations(own):
        label = " ".join(varied)
        if varied:
            watch(f"\n[{len(reports)}] {label}")
        variants = prepare_variants(request.plus(*varied), labels)
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
    from toyexp.commands.bench import HELP, measure, split, table

    if asks_for_help(words):
        print(HELP)
        return 0
    options, settings = split(words)
    from toyexp.base.writing import dump_json

    labels, request = _on_engines("bench", settings, {*ALONE, "callbacks"})
    report = measure(request, labels, options, (lambda line: None) if options.json else say)
    print(dump_json(report.plain(), indent=2) if options.json else "\n".join(table(report)))
    return 0


def evaluate(words: Sequence[str]) -> int:
    """The held-out loss of a model in a file."""
    from toyexp.commands.evaluate import HELP
    from toyexp.commands.evaluate import evaluate as run

    if asks_for_help(words):
        print(HELP)
        return 0
    what, settings, given = _file_and_settings(words)
    from toyexp.base.writing import dump_json

    found = run(Path(what), _one_experiment("eval", settings), given.values.get("--data"))
    print(dump_json(found.plain(), indent=2) if "--json" in given.switches else "\n".join(found.lines()))
    if not math.isfinite(found.loss):
        raise RunFailed(f"{found.file}: its held-out loss is {found.loss}")
    return 0


def _file_and_settings(words: Sequence[str]) -> tuple[str, list[str], Words]:
    """The file or directory that eval is asked about, the settings, and the options; or UserError."""
    given = read_options("eval", words, ["--json"], {"--data": "book.txt"})
    files = [word for word in given.rest if "=" not in word]
    settings = [word for word in given.rest if "=" in word]
    if len(files) != 1:
        raise UserError(
            f"{' '.join(['eval', *files])}: takes one file or run directory, settings behind it, --data and "
            "--json: toyexp eval model.gguf batch_size=4"
        )
    return files[0], settings, given


def generate(words: Sequence[str]) -> int:
    """Text from a model in a file, as it comes; how fast it came goes to standard error."""
    from toyexp.commands.generate import HELP, split
    from toyexp.commands.generate import generate as run

    if asks_for_help(words):
        print(HELP)
        return 0
    options = split(words)
    from toyexp.base.writing import dump_json
    from toyexp.config import schema

    registry = load(options.plugins)
    schema.store_schemas(registry)
    try:
        found = run(options, registry, (lambda text: None) if options.json else write_text)
    except KeyboardInterrupt:
        print(flush=True)
        raise
    print(dump_json(found.plain()) if options.json else "", flush=True)
    if not options.json:
        print(found.line(), file=sys.stderr)
    return 0


def describe(words: Sequence[str]) -> int:
    """What is in a GGUF file, and what can be done with it here."""
    from toyexp.commands.describe import HELP, split
    from toyexp.commands.describe import describe as read

    if asks_for_help(words):
        print(HELP)
        return 0
    modules, rest = take_plugins(words)
    path, flags = split(rest)
    from toyexp.base.writing import dump_json

    found = read(path, load(modules), "--metadata" in flags, "--tensors" in flags)
    print(dump_json(found.plain(), indent=2) if "--json" in flags else "\n".join(found.lines()))
    return 0


def models(words: Sequence[str]) -> int:
    """The GGUF files on this machine, and what each is good for here."""
    from toyexp.commands.models import HELP, find, split

    if asks_for_help(words):
        print(HELP)
        return 0
    modules, rest = take_plugins(words)
    directories, as_json = split(rest)
    from toyexp.base.writing import dump_json

    found = find(load(modules), directories)
    print(dump_json(found.plain(), indent=2) if as_json else "\n".join(found.lines()))
    return 0


def export(words: Sequence[str]) -> int:
    """A model's file again in another type."""
    from toyexp.commands.export import help_text, show

    modules, rest = take_plugins(words)
    print(help_text(load(modules)) if asks_for_help(rest) else show(rest, load(modules)))
    return 0


def _on_engines(
    command: str, settings: Sequence[str], ignored: Collection[str], default: str = "cpu,ggml"
) -> tuple[list[str], Request]:
    """The engines, and the rest of what is asked of a command that runs one experiment on several of them."""
    from toyexp.config.request import take_engines

    labels, rest = take_engines(settings, default)
    return labels, _one_experiment(command, rest, ignored)


def _one_experiment(command: str, settings: Sequence[str], ignored: Collection[str] = ()) -> Request:
    """What is asked of one experiment; UserError for a setting with several values, and for one that is `ignored`."""
    from toyexp.config.request import Request

    request = Request.of(settings)
    for override in request.settings:
        if override.is_sweep_override():
            raise UserError(f"{override.input_line}: {command} compares engines on one experiment; give one value")
        if override.key_or_group.replace("/", ".").split(".")[0] in ignored:
            raise UserError(f"{override.input_line}: is of no effect in {command}; leave it out")
    return request


def show_help(words: Sequence[str] = ()) -> int:
    """How to use the command line."""
    if words and not asks_for_help(words):
        raise UserError(f"help {words[0]}: takes no arguments; the settings of one thing: toyexp plugins NAME")
    registry = load()
    print(
        textwrap.dedent("""\
        usage: toyexp [key=value ...]        run one experiment
               toyexp -m key=v1,v2 ...       sweep over values
               toyexp sweep.resume=DIR       go on with a sweep
               toyexp COMMAND

        commands
          plugins [NAME]    every engine, recipe, model, data set and callback; or one's settings
          plugins --matrix  which recipe trains which model
          doctor            which engines work here, and why the others do not
          doctor --numerics whether they compute every op and a short training as float64 does; exit 1 if not
          doctor --graph    which ops of a training step run on which device: toyexp doctor --graph engine=ggml
          parity [...]      whether several engines compute the same numbers: toyexp parity --help
          eval FILE [...]   the held-out loss of a model in a GGUF file: toyexp eval --help
          describe FILE     what is in a GGUF file, and what can be done with it: toyexp describe --help
          models [DIR ...]  the GGUF files on this machine, and what each is good for here: toyexp models --help
          generate FILE ... text from a model in a GGUF file: toyexp generate --help
          export WHAT [...] a model's GGUF again in another type: toyexp export --help
          bench [...]       engines side by side on this machine: toyexp bench --help
          completion SHELL  tab completion for bash, zsh or fish: toyexp completion --help
          help              this page

        examples
          toyexp recipe=warm steps=300
          toyexp recipe=scratch model=gpt2 data=text data.path=book.txt data.tokenizer=char
          toyexp -m recipe=scratch,warm seed=0,1,2
          toyexp callbacks=[default,sample,plots] ~callbacks.cosine callbacks.sample.every=50
    """)
    )
    print("choices")
    for kind in (*CONFIGURED, "experiment"):
        presets = {p.stem for p in (conf_dir() / kind).glob("*.yaml")}
        extra = {"auto"} if kind == "engine" else set()
        form = "callbacks=[...]" if kind == "callbacks" else f"{kind}="
        listed = textwrap.wrap(", ".join(sorted(set(registry.offers.get(kind, ())) | presets | extra)), 90)
        print(f"  {form:<16} " + ("\n" + " " * 19).join(listed))
    print("\ntop-level keys (conf/config.yaml)")
    for key, setting in top_level():
        print(f"  {f'{key}={typed(setting.default)}':<34} {setting.comment}")
    print("\nThe composed configuration: toyexp [key=value ...] --cfg job")
    print('Tab completion (or zsh, fish): eval "$(toyexp completion bash)"')
    return 0


def show_version() -> int:
    """The version."""
    import toyexp

    print(f"toyexp {toyexp.__version__}")
    return 0


def completion(words: Sequence[str]) -> int:
    """What makes a shell complete command lines."""
    from toyexp.commands.shells import show

    return show(words)
