"""Find the GGUF files of other programs and of runs: list directories, up to a limit, and read headers."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from toyexp.base.errors import UserError, printable
from toyexp.base.formatting import align_columns, format_bytes, format_count, pluralise
from toyexp.formats.gguf.open_model import open_gguf
from toyexp.formats.gguf.read import GGUFFile
from toyexp.inference.describe import FileUses, count_types, quote_for_hydra
from toyexp.interfaces.command import Answer
from toyexp.plugins.registry import Registry

ENTRIES = 20_000  # of directories, looked at in one place
DEPTH = 5  # of directories below the one that is searched
PASSED_OVER = {"node_modules", "site-packages", "__pycache__"}  # large, and nobody keeps models there
MANIFEST_LIMIT = 1 << 20  # bytes of an Ollama manifest
SPLIT_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL | re.IGNORECASE)
OLLAMA_LAYERS = ("application/vnd.ollama.image.model", "application/vnd.ollama.image.adapter")


@dataclass
class ModelDirectory:
    """Somewhere that models are kept."""

    name: str
    root: Path
    search: Callable[[ModelDirectory], Iterator[tuple[str, Path]]]  # the files there, each with a name
    found: int = 0
    notes: list[str] = field(default_factory=list)  # what could not be looked at


@dataclass(frozen=True)
class ListedFile:
    """A model file, or why it cannot be read."""

    name: str
    place: str
    path: str
    bytes: int
    architecture: str = ""
    parameters: int = 0
    types: tuple[str, ...] = ()  # those with a share of the bytes that matters, the largest first
    here: str = ""  # base, donor, adapter, the kind of its data, or no: and why
    parts: int = 1
    also: tuple[str, ...] = ()  # its other names
    error: str | None = None


@dataclass(frozen=True)
class Models(Answer):
    """All that was found, and where was looked."""

    files: list[ListedFile]
    unreadable: list[ListedFile]
    places: list[ModelDirectory]
    loading: str = ""  # the local plugins, in what is suggested

    def plain(self) -> dict[str, Any]:
        """The files, those that cannot be read, and the places with what could not be looked at there."""
        looked = [{"name": p.name, "path": str(p.root), "files": p.found, "notes": p.notes} for p in self.places]
        models, unreadable = ([asdict(f) for f in files] for files in (self.files, self.unreadable))
        return {"models": models, "unreadable": unreadable, "places": looked}

    def lines(self) -> list[str]:
        """A table of the files, and what cannot be read; where was looked, if nothing was found."""
        blocks: list[list[str]] = []
        if self.files:
            rows = [["name", "architecture", "parameters", "types", "size", "here", "path"]]
            rows += [
                [
                    _show(f.name, 50), printable(f.architecture, 20) or "none", format_count(f.parameters),
                    "+".join(f.types), format_bytes(f.bytes), printable(f.here, 44), quote_for_hydra(Path(f.path)),
                ]
                for f in self.files
            ]  # fmt: skip
            total = f"{pluralise(len(self.files), 'model')}, {format_bytes(sum(f.bytes for f in self.files))}"
            total += f"; more about one: toyexp describe PATH{self.loading}"
            blocks += [align_columns(rows, right=(2, 4)), [total]]
        if self.unreadable:
            blocks.append(["cannot be read:", *(f"  {_show(f.path)}: {f.error}" for f in self.unreadable)])
        if not self.files:
            there = {p.root for p in self.places if os.path.isdir(p.root)}  # noqa: PTH112 - Path.is_dir() may raise
            places = [[p.name, _show(str(p.root)) + ("" if p.root in there else " (not there)")] for p in self.places]
            looked = [f"  {line}" for line in align_columns(places)]
            elsewhere = f"look elsewhere: toyexp models DIR{self.loading}"
            blocks.append(["no GGUF models found; looked in:", *looked, elsewhere])
        lines = [line for block in blocks for line in ("", *block)][1:]
        return lines + [f"note: {_show(note)}" for p in self.places for note in p.notes]


def find_models(registry: Registry, directories: Sequence[Path] = ()) -> Models:
    """Looks into every place, and reads the header of every file once."""
    home = os.path.expanduser("~")  # noqa: PTH111 - Path.home() raises where there is none
    places = default_directories(Path(home), os.environ)
    places += [ModelDirectory("named", d, _search_named) for d in directories]
    files: dict[object, ListedFile] = {}
    for place in places:
        for name, path in _merge_splits(place.search(place)):
            itself = _identity(path)
            if itself not in files:
                files[itself] = inspect(name, place.name, path, registry)
                place.found += 1
            elif name not in ((known := files[itself]).name, *known.also):
                files[itself] = replace(known, also=(*known.also, name))
    found = list(files.values())
    fine, broken = ([f for f in found if (f.error is None) is read] for read in (True, False))
    return Models(fine, broken, places, registry.loading)


def inspect(name: str, place: str, path: Path, registry: Registry) -> ListedFile:
    """What the header of one file says, or why it cannot be read."""
    parts, size = _parts(path), 0
    try:
        missing = [p.name for p in parts if not p.is_file()] if len(parts) > 1 else []
        size = sum(p.stat().st_size for p in parts if p.is_file())
        if missing:
            raise UserError(f"its part {printable(missing[0], 200)} is missing")
        file = open_gguf(str(path))
        kinds = count_types(file)
        # Those of runs are called the same in all of them.
        own = file.text("general.name") if name in ("model", "adapter") else ""
        heavy = [kind for kind, n in kinds.items() if n["bytes"] * 20 >= sum(k["bytes"] for k in kinds.values())]
        return ListedFile(
            name=own or name, place=place, path=str(path), bytes=size,
            architecture=file.text("general.architecture"),
            parameters=sum(math.prod(t.shape) for t in file.tensors.values()), types=tuple(heavy),
            here=summarise_use(file, registry), parts=len(parts),
        )  # fmt: skip
    except (UserError, OSError) as error:
        cause = str(error).removeprefix(f"{path}: ") if isinstance(error, UserError) else str(error.strerror)
        return ListedFile(name, place, str(path), size, parts=len(parts), error=cause)


def summarise_use(file: GGUFFile, registry: Registry) -> str:
    """What toyexp can do with a file, in a word."""
    if file.metadata.get("general.type") == "adapter":
        return "adapter"
    offers = FileUses(file, file.path, registry)
    if best := offers.best:
        return best
    reason = str(offers.refused)
    return f"no: {reason.removeprefix('its ').partition(';')[0].replace('architecture is', 'architecture')}"


# -- where models are kept --------------------------------------------------------------------------------------------


def default_directories(home: Path, environment: Mapping[str, str]) -> list[ModelDirectory]:
    """Where each program keeps its models, as it would look for them itself."""

    def at(variable: str, *default: str | Path) -> Path:
        given = environment.get(variable)
        # Path.expanduser() raises for a user that is none.
        return Path(os.path.expanduser(given)) if given else Path(home, *default)  # noqa: PTH111

    cache = at("XDG_CACHE_HOME", ".cache")
    hub = at("HF_HUB_CACHE", at("HF_HOME", cache / "huggingface") / "hub")
    return [
        ModelDirectory("Hugging Face", hub, _search_hugging_face),
        ModelDirectory("Ollama", at("OLLAMA_MODELS", ".ollama", "models"), _search_ollama),
        ModelDirectory("Ollama", Path("/usr/share/ollama/.ollama/models"), _search_ollama),
        ModelDirectory("LM Studio", home / ".lmstudio" / "models", _search_tree),
        ModelDirectory("LM Studio", home / ".cache" / "lm-studio" / "models", _search_tree),
        ModelDirectory("llama.cpp", at("LLAMA_CACHE", cache / "llama.cpp"), _search_tree),
        ModelDirectory("llama.cpp", home / "Library" / "Caches" / "llama.cpp", _search_tree),
        ModelDirectory("here", Path(), _search_tree),
    ]


def _search_tree(place: ModelDirectory) -> Iterator[tuple[str, Path]]:
    for path in _walk(place, place.root):
        yield path.stem, path


def _search_named(place: ModelDirectory) -> Iterator[tuple[str, Path]]:
    of_ollama = os.path.lexists(place.root / "manifests")
    yield from (_search_ollama if of_ollama else _search_tree)(place)


def _search_hugging_face(place: ModelDirectory) -> Iterator[tuple[str, Path]]:
    """models--org--name/snapshots/<commit>/**/x.gguf, which are links to blobs."""
    for repository in sorted(place.root.glob("models--*")):
        for path in _walk(place, repository / "snapshots"):
            yield path.stem, path


def _search_ollama(place: ModelDirectory) -> Iterator[tuple[str, Path]]:
    """manifests/<host>/<namespace>/<name>/<tag>, JSON that names blobs."""
    manifests = place.root / "manifests"
    for path in _walk(place, manifests, suffix=""):
        name = str(path.relative_to(manifests).parent).removeprefix("registry.ollama.ai/").removeprefix("library/")
        name += f":{path.name}"
        try:
            if path.stat().st_size > MANIFEST_LIMIT:
                raise ValueError("too large")
            layers = json.loads(path.read_bytes())["layers"]
            digests = [(la["mediaType"], la["digest"]) for la in layers if la["mediaType"] in OLLAMA_LAYERS]
        except OSError as error:
            place.notes.append(f"{path}: {error.strerror}")
            continue
        except (ValueError, KeyError, TypeError, RecursionError):
            place.notes.append(f"{path}: is no manifest of Ollama's")
            continue
        for kind, digest in digests:
            found = re.fullmatch(r"sha256[:-]([0-9a-f]{64})", str(digest))
            if found:
                label = name if kind == OLLAMA_LAYERS[0] else f"{name} (adapter)"
                yield label, place.root / "blobs" / f"sha256-{found[1]}"


# -- looking ----------------------------------------------------------------------------------------------------------


def _walk(place: ModelDirectory, root: Path, suffix: str = ".gguf") -> Iterator[Path]:
    """Files that end in `suffix` at most DEPTH directories below `root`, in order; each directory is seen once."""

    def note(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError | NotADirectoryError):
            place.notes.append(f"{error.filename}: {error.strerror}")

    seen: set[Path] = set()
    left = ENTRIES
    for name, folders, files in os.walk(root, onerror=note, followlinks=True):
        folder = Path(name)
        left -= len(folders) + len(files)
        if left < 0:
            place.notes.append(f"{root}: holds more than {ENTRIES} entries; not all of them were looked at")
            return
        led_back = folder.resolve() in seen  # by a link
        seen.add(folder.resolve())
        deepest = len(folder.relative_to(root).parts) == DEPTH
        below = [] if led_back or deepest else sorted({*folders} - PASSED_OVER)
        folders[:] = [name for name in below if not name.startswith(".")]
        for name in () if led_back else sorted(files):
            path = folder / name
            known = name.lower().endswith(suffix) and not name.startswith(".")
            if known and (path.is_file() or not os.path.exists(path)):  # noqa: PTH110 - a link that leads nowhere is told
                yield path


def _identity(path: Path) -> object:
    """What is the same for two names of one file."""
    try:
        status = path.stat()
    except OSError:
        return path.absolute()
    return status.st_dev, status.st_ino


def _merge_splits(files: Iterator[tuple[str, Path]]) -> Iterator[tuple[str, Path]]:
    seen: set[Path] = set()
    for name, path in files:
        first, *others = _parts(path)
        if not others:
            yield name, path
        elif first not in seen:
            seen.add(first)
            yield first.stem, first


def _parts(path: Path) -> list[Path]:
    found = SPLIT_NAME.fullmatch(path.name)
    if not found or not 1 < int(found[3]) <= 1000:
        return [path]
    return [path.with_name(f"{found[1]}-{i:05}-of-{found[3]}{path.suffix}") for i in range(1, int(found[3]) + 1)]


def _show(text: str, limit: int = 400) -> str:
    return text if text.isprintable() and len(text) <= limit else printable(text, limit)
