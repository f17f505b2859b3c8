"""Generate the reference pages of the settings: key, type, default, meaning and the parts that read it."""

import html
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import examples

from toyexp.base.formatting import format_value
from toyexp.config.paths import CONF
from toyexp.config.schema import AUTO, AutoEngine
from toyexp.config.top_level import GROUPS, top_level_settings
from toyexp.plugins.discovery import load
from toyexp.plugins.settings import Setting, list_settings
from toyexp.training.settings import ASIDE, FREE, Settings, keys_by_role

TITLES = {
    "model": "Models", "data": "Data", "recipe": "Recipes", "engine": "Engines", "optim": "Optimisers",
    "objective": "Objectives",
    "callbacks": "Callbacks", "format": "Formats",
}  # fmt: skip
GUIDES = {
    "model": "models", "data": "data", "recipe": "recipes", "engine": "engines", "optim": "optimisers",
    "objective": "objectives",
    "callbacks": "callbacks", "format": "exports",
}  # fmt: skip
CHOSEN = {kind: f"{kind}=NAME" for kind in TITLES} | {
    "callbacks": "callbacks=[default,NAME]", "format": "toyexp export --type NAME",
}  # fmt: skip
TYPES = {"int": "integer", "float": "number", "bool": "true, false", "str": "text"}
HYDRA = (
    ("hydra.run.dir", "outputs/NAME/DATE_TIME", "directory of a run; it must not exist or must be empty"),
    ("hydra.sweep.dir", "outputs/sweeps/DATE_TIME", "directory of a sweep, likewise"),
    ("hydra.sweep.subdir", "NUMBER-NAME", "directory of a job inside the sweep"),
)


def describe_type(text: str) -> str:
    """Return a type annotation in words: `float | None` is `number, or null`."""
    inner, optional = text.removesuffix(" | None"), text.endswith(" | None")
    if inner.startswith("list["):
        words = {"str": "list of texts", "float": "list of numbers", "int": "list of integers"}[inner[5:-1]]
    else:
        words = "mapping" if inner.startswith("dict[") else TYPES.get(inner, f"`{inner}`")
    return f"{words}, or null" if optional else words


def escape_cell(text: str) -> str:
    """Escape text for a Markdown table."""
    return html.escape(text, quote=False).replace("|", "&#124;").replace("*", "\\*")


def link_key(key: str, place: str, known: set[str]) -> str:
    """Return a key as a link to its own row, whose anchor is `place`; the first row of a place has the anchor."""
    anchor = "" if place in known else f" #{place}"
    known.add(place)
    return f"[`{key}`](#{place}){{.key{anchor}}}"


def format_row(link: str, setting: Setting) -> str:
    """Return the cells of a setting: `link`, its type, default and meaning."""
    cells = (link, describe_type(setting.type), format_default(setting.default), escape_cell(setting.comment))
    return f"| {' | '.join(cells)} |"


def format_default(value: object) -> str:
    """Return a value as typed on the command line, or `empty` for an empty text."""
    return f"`{format_value(value)}`" if format_value(value) else "empty"


@dataclass
class Row:
    """A key with the parts that read it with the same type, default and help."""

    setting: Setting
    parts: list[str] = field(default_factory=list)


def group_settings(classes: Iterable[tuple[str, type]]) -> list[Row]:
    """Return the settings of the parts, merging equal ones into one row."""
    rows: dict[tuple[str, str, str, str], Row] = {}
    for name, cls in classes:
        for setting in list_settings(cls):
            alike = (setting.name, setting.type, format_value(setting.default), setting.comment)
            rows.setdefault(alike, Row(setting)).parts.append(name)
    order = list(dict.fromkeys(key[0] for key in rows))
    return sorted(rows.values(), key=lambda row: order.index(row.setting.name))


def table(prefix: str, rows: Iterable[Row], names: Sequence[str] = (), part: str = "") -> Iterator[str]:
    """Yield the lines of a Markdown table; with `names`, those of all parts, add a column of readers.

    Each key has an anchor: the key itself or, for the settings of one `part` without a prefix, the part and the key.
    """
    known: set[str] = set()
    yield "| key | type | default | what it does |" + (" read by |" if names else "")
    yield "|---|---|---|---|" + ("---|" if names else "")
    for row in rows:
        s = row.setting
        key = link_key(prefix + s.name, (prefix or f"{part}.") + s.name, known)
        others = [name for name in names if name not in row.parts]
        shown = ", ".join(f"`{part}`" for part in (others if len(others) < len(row.parts) else row.parts))
        readers = f"all except {shown}" if 0 < len(others) < len(row.parts) else shown if others else "all"
        yield format_row(key, s) + (f" {readers} |" if names else "")
    yield ""


def presets(kind: str, parts: Iterable[str]) -> Iterator[str]:
    """Yield the presets of a kind: each file of conf/ that sets some of the keys."""
    paths = [path for path in sorted((CONF / kind).glob("*.yaml")) if path.stem not in set(parts)]
    if paths:
        yield "## Presets\n\nA preset is a file of `conf/` that sets some of these keys:\n"
    for path in paths:
        yield f"### {kind}={path.stem}\n\n```yaml\n# conf/{kind}/{path.name}\n{path.read_text().rstrip()}\n```\n"


def example(name: str) -> list[str]:
    """Return the recorded example of a page."""
    recorded = (examples.RECORDED / f"{name}.txt").read_text().rstrip()
    return [f"## Example\n\n```console\n{recorded}\n```\n"]


def page(kind: str) -> str:
    """Return the page of a kind: its parts and their settings."""
    registry = load()
    classes = [(name, registry.get(kind, name)) for name in registry.offers[kind]]
    if kind == "engine":
        classes = [(AUTO, AutoEngine), *classes]
    helps = {name: offer.help for name, offer in registry.offers[kind].items()}
    by_part = kind in ("callbacks", "format")
    helps[AUTO] = (AutoEngine.__doc__ or "").splitlines()[0]
    parts = [
        f"---\ntitle: {TITLES[kind]}\n---\n",  # in the sidebar, which has them below "Settings"
        f"# {TITLES[kind]}: settings\n",
        f"Choose one with `{CHOSEN[kind]}`. [The guide](../../guides/{GUIDES[kind]}.md) explains them, and "
        "`toyexp plugins NAME` prints the settings of one.\n",
        *example(kind),
        f"## {TITLES[kind]}\n",
    ]
    parts += [
        "| name | what it is |",
        "|---|---|",
        *(
            f"| {f'[`{name}`](#{name})' if by_part else f'`{name}`'} | {escape_cell(helps[name])} |"
            for name, _ in classes
        ),
        "",
    ]
    if by_part:
        for name, cls in classes:
            prefix = f"callbacks.{name}." if kind == "callbacks" else ""
            rows = group_settings([(name, cls)])
            parts += [f"## {name}\n", f"{helps[name]}\n"]
            parts += table(prefix, rows, part=name) if rows else ["No settings.\n"]
    else:
        parts += ["## Keys\n", *table(f"{kind}.", group_settings(classes), [name for name, _ in classes])]
    parts += presets(kind, dict(classes)) if kind in GROUPS else []
    return "\n".join(parts)


def overview() -> str:
    """Return the overview page, with the keys that belong to no part."""
    free, aside = keys_by_role(FREE, Settings), keys_by_role(ASIDE, Settings)
    known: set[str] = set()
    own = [(key, setting) for key, setting in top_level_settings() if not key.startswith("sweep.")]
    parts = [
        "---\ntitle: All settings\n---\n\n# Settings\n",
        "Type a setting as `key=value`, or write it into a file of `--config-dir`. `--dry-run` shows the effect.\n",
        *example("settings"),
        "## Settings of parts\n",
        "| settings | guide | choose it with |",
        "|---|---|---|",
    ]
    parts += [
        f"| [{title}](settings/{kind}.md) | [guide](../guides/{GUIDES[kind]}.md) | `{CHOSEN[kind]}` |"
        for kind, title in TITLES.items()
    ]
    columns = "key | type | default | what it does | may change on resume | changes numbers"
    parts += ["\n## Settings of a run\n", f"| {columns} |"]
    parts.append("|---|---|---|---|---|---|")
    for key, s in own:
        row = format_row(link_key(key, key, known), s)
        parts.append(f"{row} {'yes' if key in free else 'no'} | {'no' if key in aside else 'yes'} |")
    parts += ["\n## Settings of a sweep\n", "Use them with `-m`. They do not change a run's numbers.\n"]
    parts += ["| key | type | default | what it does |", "|---|---|---|---|"]
    for key, s in top_level_settings():
        if key.startswith("sweep."):
            parts.append(format_row(link_key(key, key, known), s))
    parts += ["\n## Settings of Hydra\n", "| key | default | what it does |", "|---|---|---|"]
    parts += [f"| {link_key(key, key, known)} | `{value}` | {about} |" for key, value, about in HYDRA]
    return "\n".join([*parts, ""])


def pages() -> dict[str, str]:
    """Return all pages by their path in the site."""
    return {"reference/settings.md": overview()} | {f"reference/settings/{kind}.md": page(kind) for kind in TITLES}
