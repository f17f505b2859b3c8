"""toyexp models: every file is listed once and correctly, in directory trees like those of each program."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from kinds import write_foreign, write_lora, write_vit
from tiny import write_base

from toyexp.cli.main import main
from toyexp.inference import models as caches
from toyexp.inference.models import default_directories, find_models
from toyexp.plugins.discovery import load
from toyexp.tokenizers.byte_level import Bytes

VARIABLES = ("HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME", "OLLAMA_MODELS", "LLAMA_CACHE")


@pytest.fixture(scope="module")
def registry():
    return load()


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """Provide an empty home directory and a working directory beside it."""
    home = tmp_path / "home"
    work = tmp_path / "work"
    home.mkdir()
    work.mkdir()
    monkeypatch.setenv("HOME", str(home))
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(work)
    return home


def base(path, **settings):
    path.parent.mkdir(parents=True, exist_ok=True)
    write_base(path, "llama", tokenizer=Bytes(), **settings)
    return path


def foreign(path, **settings):
    path.parent.mkdir(parents=True, exist_ok=True)
    write_foreign(path, **settings)
    return path


def hub(root, repository, revision, name, blob):
    """A file as the Hub's client stores it: a link in a snapshot to a blob."""
    folder = root / f"models--{repository.replace('/', '--')}"
    link = folder / "snapshots" / revision / name
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(os.path.relpath(folder / "blobs" / blob, link.parent))
    return folder / "blobs" / blob


def manifest(root, name, **layers):
    """A model as Ollama stores it: a manifest that names a blob by its digest."""
    path = root / "manifests" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    kinds = {"license": "0" * 64, **layers}
    entries = [{"mediaType": f"application/vnd.ollama.image.{k}", "digest": f"sha256:{d}"} for k, d in kinds.items()]
    path.write_text(json.dumps({"schemaVersion": 2, "config": {}, "layers": entries}))


def by_name(listing):
    return {f.name: f for f in listing.files}


# -- each program's own way -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variable", "below"),
    [("", ".cache/huggingface/hub"), ("HF_HUB_CACHE", ""), ("HF_HOME", "hub"), ("XDG_CACHE_HOME", "huggingface/hub")],
)
def test_a_file_in_two_revisions_of_the_hub_cache_is_listed_once(variable, below, home, monkeypatch, registry):
    root = home / below
    if variable:
        monkeypatch.setenv(variable, str(home))
    blob = hub(root, "org/tiny-GGUF", "aaa", "tiny-Q8_0.gguf", "1234")
    base(blob, kind="q8_0")
    hub(root, "org/tiny-GGUF", "bbb", "tiny-Q8_0.gguf", "1234")
    foreign(hub(root, "org/phi-GGUF", "ccc", "sub/phi.gguf", "5678"))
    hub(root, "org/phi-GGUF", "ccc", "README.md", "5678")
    listing = find_models(registry)
    assert set(by_name(listing)) == {"tiny-Q8_0", "phi"}
    tiny, phi = by_name(listing)["tiny-Q8_0"], by_name(listing)["phi"]
    assert (tiny.place, tiny.architecture, tiny.here, tiny.bytes) == (
        "Hugging Face",
        "llama",
        "base",
        blob.stat().st_size,
    )
    assert tiny.path == str(root / "models--org--tiny-GGUF/snapshots/aaa/tiny-Q8_0.gguf")
    assert "Q8_0" in tiny.types
    assert (phi.architecture, phi.here) == ("phi3", "donor")
    assert listing.unreadable == []


def test_a_deleted_blob_is_listed_as_unreadable(home, registry):
    hub(home / ".cache/huggingface/hub", "org/gone", "aaa", "gone.gguf", "1234")
    listing = find_models(registry)
    assert listing.files == []
    assert [(f.name, f.error) for f in listing.unreadable] == [
        ("gone", "is a link to ../../blobs/1234, which does not exist")
    ]


def test_blobs_are_named_by_ollama_manifests(home, registry):
    root = home / ".ollama/models"
    digests = {n: c * 64 for n, c in (("model", "a"), ("other", "b"), ("adapter", "c"))}
    base(root / "blobs" / f"sha256-{digests['model']}")
    foreign(root / "blobs" / f"sha256-{digests['other']}", architecture="clip", tensors={})
    write_lora(root / "blobs" / f"sha256-{digests['adapter']}", home / "base.gguf")
    manifest(root, "registry.ollama.ai/library/smollm2/135m", model=digests["model"])
    manifest(root, "registry.ollama.ai/library/smollm2/latest", model=digests["model"])
    manifest(root, "registry.ollama.ai/someone/tuned/v1", model=digests["model"], adapter=digests["adapter"])
    manifest(root, "hf.co/org/clip/Q8_0", model=digests["other"], projector="d" * 64)
    listing = find_models(registry)
    assert {f.name: f.here for f in listing.files} == {
        "smollm2:135m": "base",
        "someone/tuned:v1 (adapter)": "adapter",
        "hf.co/org/clip:Q8_0": "no: architecture clip",
    }
    assert by_name(listing)["smollm2:135m"].also == ("smollm2:latest", "someone/tuned:v1")
    assert by_name(listing)["smollm2:135m"].path == str(root / "blobs" / f"sha256-{digests['model']}")


def test_another_ollama_directory_can_be_named(tmp_path, registry):
    base(tmp_path / "disk/blobs" / f"sha256-{'a' * 64}")
    manifest(tmp_path / "disk", "registry.ollama.ai/library/smollm2/latest", model="a" * 64)
    assert set(by_name(find_models(registry, [tmp_path / "disk"]))) == {"smollm2:latest"}


def test_a_manifest_cannot_lead_out_of_the_blobs_or_break_the_search(home, registry):
    root = home / ".ollama/models"
    base(home / "secret.gguf")
    manifest(root, "registry.ollama.ai/library/a/1", model="../../../../secret.gguf")
    manifest(root, "registry.ollama.ai/library/b/1", model="E" * 64)
    folder = root / "manifests/registry.ollama.ai/library/c"
    folder.mkdir(parents=True)
    (folder / "text").write_text("no JSON")
    (folder / "list").write_text("[1, 2]")
    (folder / "deep").write_text("[" * 100_000)
    (folder / "large").write_text(" " * (1 << 20) + "{}")
    (folder / "binary").write_bytes(b"\xff\xfe")
    (folder / "odd").write_text('{"layers": [{"mediaType": {}, "digest": 1}]}')
    (root / "manifests/loose").write_text("{}")
    listing = find_models(registry)
    assert listing.files == []
    notes = [n for p in listing.places for n in p.notes]
    assert sorted(Path(n.partition(":")[0]).name for n in notes) == ["binary", "deep", "large", "list", "loose", "text"]


@pytest.mark.parametrize(
    ("program", "below"),
    [
        ("LM Studio", ".lmstudio/models/org/tiny-GGUF"),
        ("LM Studio", ".cache/lm-studio/models/org/tiny-GGUF"),
        ("llama.cpp", ".cache/llama.cpp"),
        ("llama.cpp", "Library/Caches/llama.cpp"),
    ],
)
def test_files_of_lm_studio_and_llama_cpp_are_found(program, below, home, registry):
    base(home / below / "tiny-F32.gguf")
    (home / below / "half.gguf.downloadInProgress").write_bytes(b"GGUF")
    listing = find_models(registry)
    assert [(f.name, f.place, f.path) for f in listing.files] == [
        ("tiny-F32", program, str(home / below / "tiny-F32.gguf"))
    ]


def test_environment_variables_of_each_program_take_precedence(tmp_path):
    environment = {name: str(tmp_path / name) for name in VARIABLES}
    roots = [p.root for p in default_directories(Path("/home/me"), environment)]
    assert {tmp_path / n for n in ("HF_HUB_CACHE", "OLLAMA_MODELS", "LLAMA_CACHE")} <= set(roots)
    assert not any(p.is_relative_to("/home/me/.cache/huggingface") for p in roots)
    roots = [p.root for p in default_directories(Path("/home/me"), {"XDG_CACHE_HOME": "/cache", "HF_HOME": ""})]
    assert {Path("/cache/huggingface/hub"), Path("/cache/llama.cpp")} <= set(roots)
    roots = [p.root for p in default_directories(Path("/home/me"), {"OLLAMA_MODELS": "~nobody-of-that-name/models"})]
    assert Path("~nobody-of-that-name/models") in roots, "which is not there, and told as such"


def test_runs_below_the_working_directory_are_listed_by_name(home, registry):
    for run, kind in (("warm-llama/2026_1", "llama"), ("sweeps/2026_2/0-warm", "llama")):
        path = Path("outputs", run, "model.gguf")
        path.parent.mkdir(parents=True)
        write_base(path, kind)
    write_vit(Path("vit.gguf"))
    write_lora(Path("outputs/adapter.gguf"), Path("outputs/base.gguf"))
    base(Path(".venv/lib/hidden.gguf"))
    base(Path("node_modules/x/passed_over.gguf"))
    base(Path("a/b/c/d/e/f/too_deep.gguf"))
    listing = {f.path: (f.name, f.here) for f in find_models(registry).files}
    assert listing == {
        "outputs/warm-llama/2026_1/model.gguf": ("model", "base"),
        "outputs/sweeps/2026_2/0-warm/model.gguf": ("model", "base"),
        "outputs/adapter.gguf": ("lora-llama", "adapter"),
        "outputs/base.gguf": ("base", "base"),
        "vit.gguf": ("vit", "base"),
    }


# -- directories that are not as they should be -----------------------------------------------------------------------


def test_parts_of_a_split_file_are_one_entry_and_a_missing_part_is_named(tmp_path, registry):
    for name in ("whole", "torn", "headless"):
        foreign(tmp_path / "models" / f"{name}.gguf", split=1)
    (tmp_path / "models/torn-00003-of-00003.gguf").unlink()
    (tmp_path / "models/headless-00001-of-00003.gguf").unlink()
    base(tmp_path / "models/plain-00002-of-00001.gguf")  # only looks like a part
    listing = find_models(registry, [tmp_path / "models"])
    entry = by_name(listing)["whole-00001-of-00003"]
    parts = sorted(tmp_path.glob("models/whole-*"))
    assert (entry.parts, entry.path, entry.bytes) == (3, str(parts[0]), sum(p.stat().st_size for p in parts))
    assert set(by_name(listing)) == {"whole-00001-of-00003", "plain-00002-of-00001"}
    assert {f.name: f.error for f in listing.unreadable} == {
        "torn-00001-of-00003": "the file torn-00003-of-00003.gguf of this split model is missing",
        "headless-00001-of-00003": "the file headless-00001-of-00003.gguf of this split model is missing",
    }


def test_circular_links_and_special_files_are_skipped(tmp_path, registry):
    models = tmp_path / "models"
    base(models / "real.gguf")
    (models / "loop").symlink_to(models)
    (models / "up").symlink_to("..")
    (models / "self.gguf").symlink_to(models / "self.gguf")
    os.mkfifo(models / "pipe.gguf")
    os.link(models / "real.gguf", models / "same.gguf")
    (models / "folder.gguf").mkdir()
    (models / "broken.gguf").write_bytes(b"GGUF" + b"\xff" * 40)
    (models / "empty.gguf").touch()
    listing = find_models(registry, [models, models])
    assert [(f.name, f.also) for f in listing.files] == [("real", ("same",))]
    assert {f.name for f in listing.unreadable} == {"self", "broken", "empty"}


def test_an_unreadable_directory_is_noted(home, registry, monkeypatch):
    base(home / ".lmstudio/models/open/a.gguf")
    base(home / ".lmstudio/models/shut/b.gguf")
    scandir = os.scandir

    def raise_if_guarded(path):
        if Path(path).name == "shut" or "ollama" in str(path):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(caches.os, "scandir", raise_if_guarded)
    listing = find_models(registry)
    assert set(by_name(listing)) == {"a"}
    notes = [n for p in listing.places for n in p.notes]
    assert f"{home}/.lmstudio/models/shut: Permission denied" in notes
    assert "/usr/share/ollama/.ollama/models/manifests: Permission denied" in notes


def test_an_unreadable_file_is_listed_with_the_reason(tmp_path, registry, monkeypatch):
    base(tmp_path / "models/shut.gguf")
    opened = os.open

    def raise_if_guarded(path, *rest, **named):
        if str(path).endswith("shut.gguf"):
            raise PermissionError(13, "Permission denied")
        return opened(path, *rest, **named)

    monkeypatch.setattr(os, "open", raise_if_guarded)
    listing = find_models(registry, [tmp_path / "models"])
    assert [(f.name, f.error) for f in listing.unreadable] == [("shut", "cannot be opened: Permission denied")]


def test_a_huge_directory_is_searched_up_to_a_limit(tmp_path, registry, monkeypatch):
    monkeypatch.setattr(caches, "MAX_ENTRIES", 10)
    base(tmp_path / "models/a.gguf")
    for i in range(30):
        (tmp_path / f"models/z{i:02}").touch()
    listing = find_models(registry, [tmp_path / "models"])
    assert set(by_name(listing)) <= {"a"}
    assert [n for p in listing.places for n in p.notes] == [
        f"{tmp_path}/models: has more than 10 entries; the rest was not searched"
    ]


# -- what is shown ----------------------------------------------------------------------------------------------------


def test_each_line_ends_in_a_path_that_can_be_pasted(home, capsys):
    for name in ("plain.gguf", "with blank, comma.gguf"):
        base(home / ".lmstudio/models" / name)
    assert main(["models"]) == 0
    out = capsys.readouterr().out
    assert f"base  {home}/.lmstudio/models/plain.gguf\n" in out
    assert f"base  \"'{home}/.lmstudio/models/with blank, comma.gguf'\"\n" in out
    assert "2 models, " in out
    widths = {len(line.partition("base")[0]) for line in out.splitlines()[1:3]}
    assert len(widths) == 1


def test_names_and_files_cannot_print_control_characters(home, capsys):
    bad = "\x1b[31mred\u202e\n"
    foreign(home / ".lmstudio/models" / f"{bad}.gguf", architecture="a" + bad.replace("\n", ""))
    (home / ".lmstudio/models" / f"broken{bad}.gguf").write_bytes(b"GGUF")
    foreign(Path("run/model.gguf"), keys={"general.name": bad})
    with open(os.fsencode(home / ".lmstudio/models/") + b"\xff.gguf", "wb") as file:
        file.write(b"GGUF")
    for words in (["models"], ["models", "--json"]):
        assert main(words) == 0
        out = capsys.readouterr().out
        assert all(c.isprintable() or c == "\n" for c in out)
        assert "\x1b" not in out


def test_if_nothing_is_found_the_searched_directories_are_printed(home, capsys):
    assert main(["models"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("no GGUF models found; searched:\n")
    for directory in default_directories(home, os.environ):
        assert str(directory.root) in out
    assert f"{home}/.ollama/models (does not exist)" in out
    assert "search another directory: toyexp models DIR" in out


def test_json_has_models_unreadable_files_and_directories(home, capsys):
    base(home / ".lmstudio/models/a.gguf")
    (home / ".lmstudio/models/b.gguf").write_bytes(b"GGUF")
    assert main(["models", "--json"]) == 0
    listing = json.loads(capsys.readouterr().out)
    assert [(m["name"], m["here"], m["parameters"] > 1000) for m in listing["models"]] == [("a", "base", True)]
    assert [m["error"] for m in listing["unreadable"]] == ["is not a GGUF file (4 bytes)"]
    assert {p["name"] for p in listing["places"]} >= {"Hugging Face", "Ollama", "LM Studio", "llama.cpp", "here"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--jsn"], "models --jsn: unknown option; did you mean --json?"),
        (["missing"], "models missing: not found"),
        (["file"], "models file: not a directory; to describe a file: toyexp describe"),
    ],
)
def test_bad_arguments_give_a_one_line_error_and_exit_code_2(words, said, capsys):
    Path("file").touch()
    assert main(["models", *words]) == 2
    printed = capsys.readouterr()
    assert not printed.out and printed.err.startswith(f"toyexp: error: {said}") and printed.err.count("\n") == 1


def test_the_command_returns_0_and_imports_no_framework(home):
    base(home / ".lmstudio/models/a.gguf")
    (home / ".lmstudio/models/b.gguf").write_bytes(b"GGUF")
    program = (
        "import sys; from toyexp.cli.main import main; code = main(['models']);"
        "print(*{m.partition('.')[0] for m in sys.modules} & {'hydra', 'torch', 'ggml', 'gguf', 'tokenizers'});"
        "sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == ""
    assert "cannot be read:\n" in done.stdout
