"""Find GGUF files of runs and other programs: list directories, up to a limit, and read the files' headers."""

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
from toyexp.base.tables import fit_table
from toyexp.base.user_paths import hub_cache
from toyexp.formats.gguf.open_model import open_gguf
from toyexp.formats.gguf.read import GGUFFile
from toyexp.inference.describe import FileUses, count_types, quote_for_hydra
from toyexp.interfaces.command import Answer
from toyexp.plugins.registry import Registry

MAX_ENTRIES = 20_000  # files and directories visited below one directory
MAX_DEPTH = 5  # levels of subdirectories
SKIPPED_NAMES = {"node_modules", "site-packages", "__pycache__"}  # large directories without models
MANIFEST_LIMIT = 1 << 20  # bytes of an Ollama manifest
SPLIT_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL | re.IGNORECASE)
OLLAMA_LAYERS = ("application/vnd.ollama.image.model", "application/vnd.ollama.image.adapter")


@dataclass
class ModelDirectory:
    """Directory in which a program keeps models."""

    name: str
    root: Path
    search: Callable[[ModelDirectory], Iterator[tuple[str, Path]]]  # yields (name, path) for each GGUF file
    count: int = 0  # number of files found
    notes: list[str] = field(default_factory=list)  # errors of reading directories, and limits that were reached


@dataclass(frozen=True)
class ListedFile:
    """GGUF file that the search found, with its properties or the error of reading it."""

    name: str
    place: str  # name of its ModelDirectory, such as Ollama
    path: str
    bytes: int
    architecture: str = ""
    parameters: int = 0
    types: tuple[str, ...] = ()  # tensor types with at least 5 % of the bytes, largest first
    here: str = ""  # its use in toyexp: base, donor, adapter, the kind of its data, or `no: REASON`
    parts: int = 1
    also: tuple[str, ...] = ()  # further names of the same file
    error: str | None = None


@dataclass(frozen=True)
class Models(Answer):
    """Result of `toyexp models`."""

    files: list[ListedFile]
    unreadable: list[ListedFile]
    places: list[ModelDirectory]
    loading: str = ""  # the `plugins=` override to add to suggested commands

    def plain(self) -> dict[str, Any]:
        """Return models, unreadable files and searched directories as plain data."""
        searched = [{"name": p.name, "path": str(p.root), "files": p.count, "notes": p.notes} for p in self.places]
        models, unreadable = ([asdict(f) for f in files] for files in (self.files, self.unreadable))
        return {"models": models, "unreadable": unreadable, "places": searched}

    def lines(self) -> list[str]:
        """Return a table of models and a list of unreadable files, or the searched directories if there is no model."""
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
            expendable = ["types", "architecture", "parameters", "here"]
            blocks += [fit_table(rows, ["parameters", "size"], expendable), [total]]
        if self.unreadable:
            blocks.append(["cannot be read:", *(f"  {_show(f.path)}: {f.error}" for f in self.unreadable)])
        if not self.files:
            existing = {p.root for p in self.places if os.path.isdir(p.root)}  # noqa: PTH112 - Path.is_dir() may raise
            searched_rows = [
                [p.name, _show(str(p.root)) + ("" if p.root in existing else " (does not exist)")] for p in self.places
            ]
            searched = [f"  {line}" for line in align_columns(searched_rows)]
            elsewhere = f"to search another directory: toyexp models DIR{self.loading}"
            blocks.append(["no GGUF models found; searched:", *searched, elsewhere])
        lines = [line for block in blocks for line in ("", *block)][1:]
        return lines + [f"note: {_show(note)}" for p in self.places for note in p.notes]


def find_models(registry: Registry, directories: Sequence[Path] = ()) -> Models:
    """Find GGUF files in all programs' default directories and in `directories`; read each file's header once."""
    home = os.path.expanduser("~")  # noqa: PTH111 - Path.home() raises where there is none
    all_directories = default_directories(Path(home), os.environ)
    all_directories += [ModelDirectory("named", d, _search_directory) for d in directories]
    files: dict[object, ListedFile] = {}
    for directory in all_directories:
        for name, path in _merge_splits(directory.search(directory)):
            identity = _identity(path)
            if identity not in files:
                files[identity] = inspect(name, directory.name, path, registry)
                directory.count += 1
            elif name not in ((listed := files[identity]).name, *listed.also):
                files[identity] = replace(listed, also=(*listed.also, name))
    readable = [file for file in files.values() if file.error is None]
    broken = [file for file in files.values() if file.error is not None]
    return Models(readable, broken, all_directories, registry.plugins_override)


def inspect(name: str, origin: str, path: Path, registry: Registry) -> ListedFile:
    """Read the header of the GGUF file `path`. If that fails, the result has the error message.

    `name` is the file's name in the list, and `origin` is the name of its ModelDirectory, such as Ollama.
    """
    parts, size = _parts(path), 0
    try:
        missing = [p.name for p in parts if not p.is_file()] if len(parts) > 1 else []
        size = sum(p.stat().st_size for p in parts if p.is_file())
        if missing:
            raise UserError(f"the file {printable(missing[0], 200)} of this split model is missing")
        file = open_gguf(str(path))
        kinds = count_types(file)
        # The files of all runs have the same names: use the name in the header.
        run_name = file.text("general.name") if name in ("model", "adapter") else ""
        main_types = [kind for kind, n in kinds.items() if n["bytes"] * 20 >= sum(k["bytes"] for k in kinds.values())]
        return ListedFile(
            name=run_name or name, place=origin, path=str(path), bytes=size,
            architecture=file.text("general.architecture"),
            parameters=sum(math.prod(t.shape) for t in file.tensors.values()), types=tuple(main_types),
            here=summarise_use(file, registry), parts=len(parts),
        )  # fmt: skip
    except (UserError, OSError) as error:
        cause = str(error).removeprefix(f"{path}: ") if isinstance(error, UserError) else str(error.strerror)
        return ListedFile(name, origin, str(path), size, parts=len(parts), error=cause)


def summarise_use(file: GGUFFile, registry: Registry) -> str:
    """Return the best use of a file: `adapter`, `base`, `donor`, a kind of data such as images, or `no: REASON`.

    A `base` can be fine-tuned; the embeddings of a `donor` can be copied. A kind of data means that the model can only
    be evaluated on such data.
    """
    if file.metadata.get("general.type") == "adapter":
        return "adapter"
    offers = FileUses(file, file.path, registry)
    if best := offers.best:
        return best
    reason = str(offers.refused)
    return f"no: {reason.removeprefix('its ').partition(';')[0].replace('architecture is', 'architecture')}"


# -- directories of models --------------------------------------------------------------------------------------------


def default_directories(home: Path, environment: Mapping[str, str]) -> list[ModelDirectory]:
    """Return the model directories of each program, resolved from the environment as the program itself does."""

    def resolve(variable: str, *default: str | Path) -> Path:
        value = environment.get(variable)
        # Path.expanduser() raises for an unknown user.
        return Path(os.path.expanduser(value)) if value else Path(home, *default)  # noqa: PTH111

    cache = resolve("XDG_CACHE_HOME", ".cache")
    return [
        ModelDirectory("Hugging Face", hub_cache(home, environment), _search_hugging_face),
        ModelDirectory("Ollama", resolve("OLLAMA_MODELS", ".ollama", "models"), _search_ollama),
        ModelDirectory("Ollama", Path("/usr/share/ollama/.ollama/models"), _search_ollama),
        ModelDirectory("LM Studio", home / ".lmstudio" / "models", _search_tree),
        ModelDirectory("LM Studio", home / ".cache" / "lm-studio" / "models", _search_tree),
        ModelDirectory("llama.cpp", resolve("LLAMA_CACHE", cache / "llama.cpp"), _search_tree),
        ModelDirectory("llama.cpp", home / "Library" / "Caches" / "llama.cpp", _search_tree),
        ModelDirectory("here", Path(), _search_tree),
    ]


def _search_tree(directory: ModelDirectory) -> Iterator[tuple[str, Path]]:
    for path in _walk(directory, directory.root):
        yield path.stem, path


def _search_directory(directory: ModelDirectory) -> Iterator[tuple[str, Path]]:
    is_ollama = os.path.lexists(directory.root / "manifests")
    yield from (_search_ollama if is_ollama else _search_tree)(directory)


def _search_hugging_face(directory: ModelDirectory) -> Iterator[tuple[str, Path]]:
    """Yield name and path of the GGUF files in a Hugging Face cache.

    Their paths are models--org--name/snapshots/<commit>/**/x.gguf. Each is a link to a blob, a file named by its hash.
    """
    for repository in sorted(directory.root.glob("models--*")):
        for path in _walk(directory, repository / "snapshots"):
            yield path.stem, path


def _search_ollama(directory: ModelDirectory) -> Iterator[tuple[str, Path]]:
    """Yield name and path of Ollama's model and adapter files, which are blobs: files named by their hash.

    The JSON files manifests/<host>/<namespace>/<name>/<tag> list the blobs of each model.
    """
    manifests = directory.root / "manifests"
    for path in _walk(directory, manifests, suffix=""):
        name = str(path.relative_to(manifests).parent).removeprefix("registry.ollama.ai/").removeprefix("library/")
        name += f":{path.name}"
        try:
            if path.stat().st_size > MANIFEST_LIMIT:
                raise ValueError("too large")
            layers = json.loads(path.read_bytes())["layers"]
            digests = [(la["mediaType"], la["digest"]) for la in layers if la["mediaType"] in OLLAMA_LAYERS]
        except OSError as error:
            directory.notes.append(f"{path}: {error.strerror}")
            continue
        except (ValueError, KeyError, TypeError, RecursionError):
            directory.notes.append(f"{path}: is not an Ollama manifest")
            continue
        for kind, digest in digests:
            match = re.fullmatch(r"sha256[:-]([0-9a-f]{64})", str(digest))
            if match:
                label = name if kind == OLLAMA_LAYERS[0] else f"{name} (adapter)"
                yield label, directory.root / "blobs" / f"sha256-{match[1]}"


# -- searching --------------------------------------------------------------------------------------------------------


def _walk(directory: ModelDirectory, root: Path, suffix: str = ".gguf") -> Iterator[Path]:
    """Yield files ending in `suffix` up to MAX_DEPTH levels below `root`, sorted; visit each directory once."""

    def note(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError | NotADirectoryError):
            directory.notes.append(f"{error.filename}: {error.strerror}")

    seen: set[Path] = set()
    entries_left = MAX_ENTRIES
    for name, folders, files in os.walk(root, onerror=note, followlinks=True):
        folder = Path(name)
        entries_left -= len(folders) + len(files)
        if entries_left < 0:
            directory.notes.append(f"{root}: has more than {MAX_ENTRIES} entries; the rest was not searched")
            return
        is_repeated = folder.resolve() in seen  # through a link
        seen.add(folder.resolve())
        deepest = len(folder.relative_to(root).parts) == MAX_DEPTH
        below = [] if is_repeated or deepest else sorted({*folders} - SKIPPED_NAMES)
        folders[:] = [name for name in below if not name.startswith(".")]
        for name in () if is_repeated else sorted(files):
            path = folder / name
            is_match = name.lower().endswith(suffix) and not name.startswith(".")
            if is_match and (path.is_file() or not os.path.exists(path)):  # noqa: PTH110 - report dangling links
                yield path


def _identity(path: Path) -> object:
    """Return a value that is equal for all paths of the same file."""
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
    match = SPLIT_NAME.fullmatch(path.name)
    if not match or not 1 < int(match[3]) <= 1000:
        return [path]
    return [path.with_name(f"{match[1]}-{i:05}-of-{match[3]}{path.suffix}") for i in range(1, int(match[3]) + 1)]


def _show(text: str, limit: int = 400) -> str:
    return text if text.isprintable() and len(text) <= limit else printable(text, limit)
