"""Error messages for mistakes in a configuration: one or two lines with a suggestion."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.types import ChoiceSweep, Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from toyexp.base.errors import Unavailable, UserError, nearest, printable, suggest
from toyexp.base.formatting import format_value
from toyexp.base.user_paths import expand_path
from toyexp.config.compose_cache import compose_cached
from toyexp.config.keys import Keys, choices, chosen_names
from toyexp.config.paths import CONF
from toyexp.config.schema import Source, load_yaml, read_config
from toyexp.config.top_level import GROUPS, HYDRA_KEYS, LAUNCHERS, PARTS, top_level_settings, translate_setting
from toyexp.plugins.registry import Registry

EMPTY = "is empty (an unset shell variable?); give it a value, or leave it out"

# Matches one of several values after `=`; commas within quotes or brackets belong to the value.
LIST_ITEM = re.compile(r"""(?:"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|\[[^]]*\]|\{[^}]*\}|[^,])+""")

# -- typed settings --------------------------------------------------------------------------------------


def check_settings(typed: Sequence[Override], keys: Keys, source: Source) -> None:
    """Raise UserError for settings that Hydra would ignore, or reject with a less helpful message."""
    for override in typed:
        types = keys.types(override.key_or_group)
        choice = override.key_or_group in GROUPS and not override.is_delete()
        if mistake := _form_mistake(override, types, keys) or (
            _choice_mistake(override, keys, source) if choice else None
        ):
            raise UserError(mistake)


def check_brackets(override: Override, keys: Keys) -> None:
    """Raise UserError for a list where a number is expected, as in lr=[0.1,0.2]: a sweep needs no brackets."""
    key, line = str(override.key_or_group), str(override.input_line)
    types, listed = keys.types(key), re.fullmatch(r"\[([^][]*,[^][]*)\]", line.partition("=")[2])
    if listed and types & {int, float} and types <= {int, float, type(None)}:
        raise UserError(f"{line}: write the values of a sweep without brackets: {key}={listed[1]}")


def check_blanks(override: Override, keys: Keys) -> None:
    """Raise UserError if parsing would drop spaces at the beginning or end of a text in a sweep's list of values.

    A space after a comma is normal in a list and raises no error.
    """
    key, line, listed = str(override.key_or_group), str(override.input_line), override.value()
    simple = isinstance(listed, ChoiceSweep) and listed.simple_form
    if key in GROUPS or str not in keys.types(key) or not simple:
        return
    values = LIST_ITEM.findall(line.partition("=")[2])
    quoted = [v if _keeps_blanks(v if i == 0 else v.lstrip()) else f"'{v}'" for i, v in enumerate(values)]
    if quoted != values:
        raise UserError(f'{line!r}: spaces at the ends are dropped; to keep them, quote: "{key}={",".join(quoted)}"')


def _keeps_blanks(text: str) -> bool:
    """Return True if parsing keeps all spaces of a text on the command line."""
    return text == text.strip() or text.strip()[:1] in "'\""


def _form_mistake(override: Override, types: Collection[Any], keys: Keys) -> str | None:
    """Return an error message for an override with a wrong form, such as an empty value; None if the form is valid.

    `types` are the types of the setting that the override sets.
    """
    key, line, value = str(override.key_or_group), str(override.input_line), override.value()
    text = line.partition("=")[2]
    kind, *rest = key.split(".")
    kind = kind.split("/")[0]
    if key.replace("/", ".").startswith(("hydra.launcher", "hydra.sweeper")):
        hint = f"type -m key=a,b and, if needed, sweep.jobs=4 or sweep.launcher={', '.join(LAUNCHERS)}"
        hint += "; for a search type sweep.search=tpe sweep.trials=20" if "sweeper" in key else ""
        return f"{line}: toyexp starts the jobs of a sweep itself; {hint}"
    if override.package is not None:
        return f"{line}: '@' is not supported; write {key}={override.get_value_element_as_str()}"
    if override.is_sweep_override():
        listed = f"{key}=[{text}] is a list, or " if keys.is_list(key) else ""
        is_number = float in types and re.fullmatch(r"\d+,\d+", text)
        decimal = f"for a decimal number type {line.replace(',', '.')}; " if is_number else ""
        return f"{line}: has several values; {listed}{decimal}add -m to sweep over them"
    if line.endswith("=") and key not in GROUPS and (types or kind == "hydra"):
        return f"{line}: {EMPTY}" + (f"; an empty text is \"{line}''\"" if kind == "callbacks" and str in types else "")
    if (kind == "hydra" and key not in HYDRA_KEYS) or (kind == "sweep" and key not in (*_sweep_keys(), *keys.classes)):
        return unknown_key(key, None, keys.registry)
    if "/" in key:
        return f"unknown key {key}; did you mean {key.replace('/', '.')}?"
    if override.is_delete():
        allowed = kind == "hydra" or (kind == "callbacks" and len(rest) == 1)
        return None if allowed else f"{line}: only callbacks can be removed, such as '~callbacks.progress'"
    if text.strip() and not _keeps_blanks(text) and isinstance(value, str) and str in types and key not in GROUPS:
        return f"{line!r}: spaces at the ends are dropped; to keep them, quote: \"{key}='{text}'\""
    if isinstance(value, int) and value not in (0, 1) and types == {bool}:
        return f"{line}: must be true or false"
    if isinstance(value, float) and not value and re.search("[1-9]", re.split("[eE]", text)[0]):
        return f"{line}: too close to 0; use 0 or a larger number"
    if kind in GROUPS and rest:
        return _part_mistake(override, kind, rest, keys)
    if kind == "sweep" and key in keys.classes:
        return f"{line}: set its keys one by one: {key}.<setting>=..."
    if rest and kind in keys.key_names("") and kind != "sweep":
        return f"{line}: {kind} has no sub-keys; write {kind}=..."
    return None


def _part_mistake(override: Override, kind: str, rest: Sequence[str], keys: Keys) -> str | None:
    """Return an error message if an override has an invalid key, such as model.a.b=1; None if the key is valid.

    `kind` is the first word of the key (model), and `rest` holds the other words (a and b).
    """
    line, depth = override.input_line, 2 if kind == "callbacks" else 1
    if len(rest) < depth and rest[0] not in keys.registry.offers[kind]:
        return unknown_key(f"{kind}.{rest[0]}", None, keys.registry)
    if len(rest) < depth:
        one_by_one = f"set the keys of a callback one by one ({kind}.{rest[0]}.<setting>=...)"
        return f"{line}: {one_by_one}; add callbacks by name: callbacks=[default,{rest[0]}]"
    if len(rest) > depth:
        key = ".".join([kind, *rest[:depth]])
        return (
            f"{line}: {key} holds {_mapping_example(key) if keys.is_mapping(key) else 'one value and has no sub-keys'}"
        )
    if rest[-1] == "name":
        name = "[...]" if kind == "callbacks" else override.get_value_element_as_str()
        return f"{line}: cannot be set; choose the part instead: {kind}={name}"
    return None


def _mapping_example(key: str) -> str:
    examples = {"optim.groups": "{blk.*: {lr: 0.001}}", "objective.class_weights": "{0: 2.5}"}
    example = examples.get(key, "{name: value}")
    return f"a mapping in braces: {key}={example}"


def _choice_mistake(override: Override, keys: Keys, source: Source) -> str | None:
    """Return an error message for an invalid choice of a part, such as model=lama; None if it is valid."""
    kind, line, value = str(override.key_or_group), str(override.input_line), override.value()
    names: list[Any] = value if isinstance(value, list) else [value]
    if line.startswith("+"):
        return f"{line}: leave out '+': {line.lstrip('+')}"
    if isinstance(value, list) and kind != "callbacks":
        several = f"; to run several, sweep: -m {kind}={','.join(map(str, names))}" if len(names) > 1 else ""
        return f"{line}: must be one name, without brackets{several}"
    unknown = [name for name in names if not isinstance(name, str) or name not in keys.offers.get(kind, ())]
    if not unknown:
        return None
    valid = choices(kind, keys.registry, source)  # presets too
    if not all(isinstance(name, str) and name for name in unknown):
        return f"{line}: must be a name; {suggest('', valid)}"
    unknown = [name for name in unknown if name not in valid]
    if kind == "model" and unknown and re.search(r"[/.]", unknown[0]):
        return f"{line}: must be an architecture; to fine-tune a model file: recipe=full recipe.base=FILE.gguf"
    if kind == "data" and unknown and re.search(r"[/.]", unknown[0]):
        offers = keys.registry.classes("data").values()
        reader = max(offers, key=lambda cls: cls.recognises(Path(unknown[0]))).name
        return f"{line}: must be a kind of data; for this file: data={reader} data.path={unknown[0]}"
    if unknown and (meant := translate_setting(kind, unknown[0])):
        return f"{line}: unknown name; did you mean {meant}?"
    return keys.registry.explain_missing(kind, unknown[0], valid) if unknown else None


def _sweep_keys() -> set[str]:
    return {key for key, _ in top_level_settings() if key.startswith("sweep.")}


# -- unknown keys -------------------------------------------------------------------------------------------


def check_keys(cfg: DictConfig, all_keys: Keys) -> Keys:
    """Return the valid keys for the model, data and other parts that `cfg` chooses.

    Raise UserError if `cfg` has an invalid key or lacks a part.
    """
    keys, registry = all_keys.restrict(cfg), all_keys.registry
    for name in chosen_names(cfg, "callbacks"):
        if name not in keys.offers["callbacks"]:
            registry.get("callbacks", name)  # raises
        node = cfg.callbacks[name]
        if not isinstance(node, DictConfig) or node.get("name") != name:
            raise UserError(_missing_callback(f"callbacks.{name}"))
    for key in keys.unknown_keys(cfg):
        value = "..."
        with contextlib.suppress(OmegaConfBaseException):  # an interpolation that cannot be resolved
            value = format_value(OmegaConf.select(cfg, key))
        raise UserError(unknown_key(key, cfg, registry, value))
    for kind in PARTS:
        if not keys.classes[kind]:
            for name in chosen_names(cfg, kind):
                registry.get(kind, name)
            raise UserError(f"the configuration has no {kind}; add {kind}=..., {suggest('', choices(kind, registry))}")
    return keys


def unknown_key(key: str, cfg: DictConfig | None, registry: Registry, value: str = "...") -> str:
    """Return the error message for an unknown key, with the most similar valid key.

    Keys of the parts that `cfg` chooses are valid; if `cfg` is None, those of all parts. `value` is the key's value.
    """
    keys = Keys.from_registry(registry) if cfg is None else Keys.from_registry(registry).restrict(cfg)
    kind, *rest = re.split("[./]", key)
    where, _, last = key.rpartition(".")
    chosen_by_kind = {k: chosen_names(cfg, k) if cfg is not None else [] for k in (kind, "callbacks")}
    translated = (translate_setting(key, value) or "").removesuffix(f"={value}")
    if kind == "sweep":
        translated = translated or (f"hydra.{key}" if rest in (["dir"], ["subdir"]) else "")
        hint = f"did you mean {translated}?" if translated else suggest(key, _sweep_keys())
        return f"unknown key {key}; {hint}"
    if kind == "hydra":
        return f"unknown key {key}; {suggest(key, HYDRA_KEYS)}"
    if kind not in keys.key_names(""):  # it may be a key of a part
        launchers = [section for section in keys.classes if section.partition(".")[0] == "sweep"]
        sections = [*PARTS, *(f"callbacks.{name}" for name in chosen_by_kind["callbacks"]), *launchers]
        homes = [translated] * bool(translated)
        homes += [f"{section}.{key}" for section in sections if key in keys.key_names(section)]
        # eval_every for eval.every, steps for train.steps, lr for lerning_rate
        names = key.replace(".", "_"), last, re.sub("(?<=[a-z])[a-z]+_?", "", last)
        homes += [name for name in names if name in keys.key_names("")]
        if (best := nearest(kind, keys.key_names(""))) and (best in (*GROUPS, "sweep") or not rest):
            homes.append(".".join([best, *rest]))
        hint = _did_you_mean(homes[0], cfg, keys) if homes else f"the keys are: {', '.join(sorted(keys.key_names('')))}"
        return f"unknown key {key}; {hint}"
    if not rest:
        return f"{key}: the configuration file lacks this key; put 'schema' first in the file's defaults list"
    offers = registry.offers.get(kind, {})
    if kind == "callbacks":
        if rest[0] not in offers:
            best = nearest(rest[0], offers)
            hint = f"did you mean {'.'.join([kind, best, *rest[1:]])}?" if best else suggest("", offers)
            return f"unknown key {key}; {hint}"
        if cfg is not None and rest[0] not in cfg.callbacks:
            return _missing_callback(key)
    chosen = f"{kind}={chosen_by_kind[kind][0]}" if chosen_by_kind[kind] and kind != "callbacks" else where
    owners = " or ".join(sorted(n for n, offer in offers.items() if last in Keys.field_names(offer.cls)))
    if owners and kind == "data" and "sources" in keys.key_names(where):
        example = f"data.sources='{{a: {{{last}: {value}, ...}}}}'"
        return f"unknown key {key} with {chosen}; put it into each source: {example}"
    if owners and kind != "callbacks":
        return f"unknown key {key} with {chosen}; it belongs to {kind}={owners}: choose that, or leave the key out"
    valid = keys.key_names(where) - {"name"}
    best = nearest(last, valid)
    # data.seed: data_seed; optim.lr: lr
    top_level_key = next((name for name in (f"{kind}_{last}", last) if name in keys.key_names("")), None)
    meant = translated or top_level_key or (best and f"{where}.{best}")
    hint = _did_you_mean(meant, cfg, keys) if meant else f"{chosen} has {', '.join(sorted(valid)) or 'no settings'}"
    return f"unknown key {key}; {hint}"


def _did_you_mean(meant: str, cfg: DictConfig | None, keys: Keys) -> str:
    """Return the question `did you mean MEANT?` for an error message.

    If the chosen part has no such setting, add the names of the parts that have it.
    """
    where, _, last = meant.partition("=")[0].rpartition(".")
    if cfg is None or where not in PARTS or last in keys.key_names(where):
        return f"did you mean {meant}?"
    owners = sorted(n for n, offer in keys.registry.offers[where].items() if last in Keys.field_names(offer.cls))
    chosen = "".join(f"{where}={name}" for name in chosen_names(cfg, where))
    return f"did you mean {meant}? {chosen} has no such setting; it belongs to {where}={' or '.join(owners)}"


def _missing_callback(key: str) -> str:
    name = key.split(".")[1]
    return f"{key}: the run has no callback {name}; add it: callbacks=[default,{name}]"


# -- errors of Hydra ------------------------------------------------------------------------------------------


def explain(error: Exception, typed: Sequence[Override], registry: Registry, source: Source) -> UserError:
    """Convert an exception of Hydra or OmegaConf into a UserError."""
    text = str(error)
    if isinstance(error, RecursionError):
        included = next(config_files(typed, source))
        hint = "remove the circular reference from the defaults lists"
        return UserError(f"{included}: includes itself; {hint}")
    if not isinstance(error, HydraException | OmegaConfBaseException | OverflowError):
        wrong_list = re.search(r"Invalid defaults list in '(\S+)', (.*)", text)
        main = next(config_files(typed, source)) if wrong_list else source.directory / f"{source.name}.yaml"
        if wrong_list:
            return UserError(f"{main}: invalid defaults list in {wrong_list[1]}.yaml: {wrong_list[2]}")
        return UserError(f"{main}: cannot be composed ({type(error).__name__}: {printable(text, 200)})")
    named = re.match(r"In '(\S+)': \w+ raised while", text)
    paths = [d / f"{named[1]}.yaml" for d in source.directories] if named else []
    path = next((path for path in paths if path.is_file()), None)
    key = next(iter(re.findall(r"full_key: (\S+)", f"{text}\n{error.__cause__}")), None)
    if path is not None and not isinstance(load_yaml(path), dict):
        return UserError(f"{path}: {CONTENT}")
    if path is not None and key is None:
        key, value = next(_misplaced_values(load_yaml(path), Keys.from_registry(registry)), (None, None))
        if key in (*PARTS, "callbacks"):
            return UserError(f"{file_line(path, key)}: {key} must be a mapping of settings; {_choice_hint(key, value)}")
    explained = _explain_key(error, typed, registry, source) or wrong_value(error, key, [] if path else typed, registry)
    if path is None or str(explained).startswith(str(path)):
        return explained
    with_value = str(explained).replace(f"{key}: ", f"{key}{_file_value(path, key or '')}: ", 1)
    return UserError(f"{file_line(path, key or '')}: {with_value}")


def _file_value(path: Path, key: str) -> str:
    """Return `=value` for a key in a file, or "" for a mapping, null, or a key that the file does not set."""
    node = load_yaml(path)
    for part in key.split("."):  # the keys of a preset are relative
        node = node.get(part, node) if isinstance(node, dict) else node
    return "" if node is None or isinstance(node, dict) else f"={printable(format_value(node), 60)}"


def _choice_hint(kind: str, value: Any) -> str:
    return f"choose it in the defaults list of the file: '- override /{kind}: {format_value(value)}'"


def _misplaced_values(content: Any, keys: Keys, where: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (key, value) for each key of a configuration file whose value has the wrong structure.

    The structure is wrong if the value is a mapping where a list is expected, or no mapping where a mapping is
    expected.
    """
    for key, value in ((f"{where}{name}", value) for name, value in content.items() if value is not None):
        names = key in keys.classes or key == "callbacks" or keys.is_mapping(key)
        if isinstance(value, dict) != names and (names or keys.is_list(key)):
            yield key, value
        elif isinstance(value, dict):
            yield from _misplaced_values(value, keys, f"{key}.")


def _explain_key(error: Exception, typed: Sequence[Override], registry: Registry, source: Source) -> UserError | None:
    """Convert an error about a key or choice, recognised by its message; return None for other errors."""
    text = str(error)
    if match := re.search(r"Could not override '([^']+)'|Key '[^']+' not in .*\n\s*full_key: (\S+)", text):
        if match[2] == "experiment":
            return misplaced_error(typed, source)
        key = match[1] or match[2]
        value = next((str(o.input_line).partition("=")[2] for o in typed if o.key_or_group == key), "...")
        return UserError(unknown_key(key, _compose_choices(typed, source), registry, value))
    if match := re.search(r"An item is already at '([^']+)'", text):
        return UserError(f"+{match[1]}: the key already exists; leave out '+'")
    if match := re.search(r"Could not (?:find|load) '(?:([^']+)/)?([^'/]+)'", text):
        kind, name = match[1] or "config", match[2]
        hint = f"; {suggest(name, choices(kind, registry, source))}" if kind in GROUPS else ""
        return UserError(f"{kind}={name}: unknown name{hint}")
    if match := re.search(r"Multiple values for (\S+)\. .*: (\S+)'", text):
        return UserError(
            f"{next(config_files(typed, source))}: {match[1]} is chosen twice; {_choice_hint(match[1], match[2])}"
        )
    dropped = next((o for o in typed if o.is_delete() and "Could not delete" in text), None)
    if dropped is None:
        return None
    cfg, name = _compose_choices(typed, source), dropped.key_or_group.partition(".")[2]
    callback_names = chosen_names(cfg, "callbacks") if cfg is not None else []
    return UserError(f"{dropped.input_line}: the run has no such callback; {suggest(name, callback_names)}")


def wrong_value(error: Exception, key: str | None, typed: Sequence[Override], registry: Registry) -> UserError:
    """Convert an error of Hydra about the value of `key` to a UserError that names the override with this value."""
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    matching = [o for o in typed if o.key_or_group == key]  # the key may be set twice
    culprits = [o for o in matching if f"'{o.value()}'" in str(cause)] or matching
    label = str(culprits[-1].input_line) if culprits else key or "the config"
    if key and Keys.from_registry(registry).is_mapping(key):
        return UserError(f"{label}: must be {_mapping_example(key)}")
    numbers = [value for o in culprits if isinstance(value := o.value(), float) and value.is_integer()]
    integral = next((number for number in numbers if abs(number) < 2**63), None)
    written_out = f"; write {key}={int(integral)}" if integral is not None and "Integer" in str(cause) else ""
    return UserError(f"{rephrase(label, cause)}{written_out}")


def _compose_choices(typed: Sequence[Override], source: Source) -> DictConfig | None:
    """Compose only the overrides that choose parts, to know which keys to suggest; return None if that fails."""
    chosen = [str(o.input_line) for o in typed if o.key_or_group in GROUPS]
    try:
        return compose_cached(chosen, source)
    except (HydraException, OmegaConfBaseException):
        return None


_PLAIN_WORDS = {
    r"could not be converted to Integer": "must be a whole number",
    r"could not be converted to Float|type hint 'Union\[int, float\]'": "must be a number",
    r"too large to convert to float": "is too large for a number",
    r"could not be converted to Boolean|is not a valid bool": "must be true or false",
    r"Cannot convert '\w+' to string": "must be a single text",
    r"is not Optional|Incompatible value 'None'": "cannot be null",
    r"Cannot merge DictConfig with ListConfig|is not a ListConfig": "must be a list: [a,b]",
    r"NoneType is not a subclass": "cannot be null",
    r"is not a subclass of": "must be a mapping of settings",
    r"Key (\S+) \(\w+\) is incompatible with \(int\)": "keys must be whole numbers, got {0}",
    r"Key (\S+) \(\w+\) is incompatible": "keys must be text, got {0}",
    r"Interpolation key '(.+)' not found": "refers to ${{{0}}}, which does not exist",
    r"Unsupported interpolation type (\S+)": "refers to ${{{0}:...}}, an unknown resolver",
    r"[Rr]ecursi": "refers to itself",
    r"[Mm]issing ?[Mm]andatory": "has no value",
    r"expected one of \[(.*)\]": "must be one of {0}",
}


def rephrase(subject: str, error: BaseException) -> UserError:
    """Convert an error of OmegaConf about the value of `subject` to plain words, without names of Python types."""
    text = re.sub(r"^In '\S+': \w+ raised while composing config:\s*", "", str(error)).strip()
    for pattern, words in _PLAIN_WORDS.items():
        if match := re.search(pattern, text):
            return UserError(f"{subject}: {words.format(*match.groups())}")
    return UserError(f"{subject}: {text.splitlines()[0] if text else 'is invalid'}")


# -- configuration files -------------------------------------


HEADER = "# @package _global_"  # puts the keys of an experiment at the top level
CONTENT = f"must contain keys with values, such as steps: 100, after a first line '{HEADER}'"
RESUMES = {"resume": "resume=...", "sweep.resume": "sweep.resume=..."}  # keys that are only allowed on the command line


def check_files(cfg: DictConfig, parsed: Sequence[Override], source: Source) -> None:
    """Raise UserError if a configuration file has misplaced settings, or keys that only the command line may set."""
    if "experiment" in cfg:
        raise misplaced_error(parsed, source)
    typed_keys = {o.key_or_group for o in parsed}
    for key, example in RESUMES.items():
        if key not in typed_keys and OmegaConf.select(cfg, key, throw_on_resolution_failure=False) is not None:
            where = next(
                (path for path in config_files(parsed, source) if _has_key(load_yaml(path), key)), "the config"
            )
            raise UserError(f"{where}: {key} is not allowed in a file; give it on the command line: {example}")


def misplaced_error(parsed: Sequence[Override], source: Source) -> UserError:
    """Return an error about an experiment file whose settings ended up under the key `experiment`."""
    path = next(config_files(parsed, source))
    if not isinstance(load_yaml(path), dict):
        # Do not quote the content: the file may be a link to a private file.
        return UserError(f"{path}: {CONTENT}")
    if path.parent.name != "experiment":
        return UserError(f"{path}: invalid key experiment; choose an experiment with experiment=NAME")
    return UserError(f"{path}: the first line must be '{HEADER}', also in each experiment that it includes")


def config_files(parsed: Sequence[Override], source: Source) -> Iterator[Path]:
    """Yield the path of the chosen experiment's file, if there is one, and then that of the main configuration file."""
    names = [str(o.value()) for o in parsed if o.key_or_group == "experiment" and not o.is_sweep_override()]
    paths = [folder / "experiment" / f"{name.removesuffix('.yaml')}.yaml" for name in names
              for folder in source.directories]  # fmt: skip
    yield from [path for path in paths if path.is_file()][:1]
    yield source.directory / f"{source.name}.yaml"


@contextlib.contextmanager
def locate_errors(cfg: DictConfig, typed: Sequence[Override], source: Source) -> Iterator[None]:
    """If a UserError is raised in the `with` block, add to its message where the wrong value was set.

    If the message begins with a path, prefix it with the key of the setting that holds this path. If the setting was
    not typed but comes from a configuration file, prefix it with the path and line of the file.
    """
    try:
        yield
    except UserError as caught:
        path_key = None if isinstance(caught, Unavailable) else _key_of_path(str(caught), cfg)
        error = UserError(f"{path_key}={caught}") if path_key else caught
        match = re.match(r"([a-z]\w*(?:\.\w+)*)(=|: | )", str(error))
        if type(error) is not UserError or not match or source.saved or match[1] in {o.key_or_group for o in typed}:
            raise error from caught.__cause__
        key, message = match[1], str(error)[match.end() :]
        for path in config_files(typed, source):
            if not path.is_relative_to(CONF) and _has_key(load_yaml(path), key, one_value=match[2] == "="):
                raise UserError(f"{file_line(path, key, message)}: {error}") from caught
        raise error from caught.__cause__


def _key_of_path(message: str, cfg: DictConfig) -> str | None:
    """Return the key of the setting that holds the path at the start of `message`; None if there is no such setting."""
    values = {f"{kind}.{name}": str(cfg[kind]._get_node(name)) for kind in PARTS[::-1] for name in cfg[kind]}
    paths = {key: Path(expand_path(value)) for key, value in values.items() if re.search("[./]", value)}
    return next((key for key, path in paths.items() if message.startswith((f"{path}:", f"{path} "))), None)


def file_line(path: Path, key: str, message: str = "") -> str:
    """Return a text such as `path, line 3`, with the number of the line in which the file sets `key`.

    If no line sets the key, return only the path. If `message` begins with the name of a key below `key`, use the line
    of that key.
    """
    node, line = yaml.compose(read_config(path), Loader=yaml.SafeLoader), 0
    for part in key.split("."):  # the keys of a preset are relative
        pairs = node.value if isinstance(node, yaml.MappingNode) else ()
        line, node = next(((k.start_mark.line + 1, v) for k, v in pairs if k.value == part), (line, node))
    pairs = node.value if isinstance(node, yaml.MappingNode) else ()
    line = next((k.start_mark.line + 1 for k, _ in pairs if message.startswith((f"{k.value}:", f"{k.value} "))), line)
    return f"{path}, line {line}" if line else str(path)


def _has_key(node: Any, key: str, one_value: bool = False) -> bool:
    """Return True if the parsed file `node` sets a key; with `one_value`, only if its value is not a mapping."""
    for part in key.split("."):
        node = node.get(part) if isinstance(node, dict) else None
    return node is not None and not (one_value and isinstance(node, dict))
