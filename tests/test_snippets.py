"""What the documentation shows is run: every command and block of code of every page, in order, in a folder a page.

The quick starts run with `make test-all`, all pages with `make docs-test`; `-rs` lists what is not run, and why.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import snippets
import yaml
from PIL import Image
from tiny import write_base

from toyexp.cli.main import main
from toyexp.tokenizers.byte_level import Bytes

pytestmark = pytest.mark.release
NAMES = sorted(str(path.relative_to(snippets.PAGES)) for path in snippets.PAGES.rglob("*.md"))
README = (snippets.PAGES.parent.parent / "README.md").read_text()
HELD_ELSEWHERE = (Path(__file__).parent / "test_docs.py").read_text()  # plugins that are installed and run there
# The runs that pages speak of, by the start of their directory's name.
RUNS = {
    "warm-llama": ["recipe=warm"],
    "scratch-llama": [],
    "lora-llama": ["recipe=lora", "recipe.base=model.gguf", "data=jsonl", "data.path=chats.jsonl", "model.context=64"],
    "gpt2-char": ["experiment=gpt2_char"],
    "vit_tiny-vit": ["recipe=vit_tiny", "model=vit", "model.patch=4", "data=images", "data.path=photos",
                     "data.image_size=32"],
    "sweeps": ["-m", "recipe=scratch,warm", "sweep.isolate=false", "sweep.report=false"],
}  # fmt: skip
PLACE = re.compile(r"outputs/([\w-]+)/(?:<[^>]*>|[\d-]{10}_[\d_]+|\.\.\.)(?=[/\s'\"]|$)")


def text_of(name):
    return README if name == "README.md" else (snippets.PAGES / name).read_text()


def blocks_of(name):
    return snippets.blocks(name, text_of(name))


@pytest.fixture(scope="session")
def shelf(tmp_path_factory):
    """A folder with what pages speak of: models, texts, chats, images; and the runs that were asked for so far."""
    root = tmp_path_factory.mktemp("shelf")
    for name in ("model.gguf", "base.gguf", "smollm2.gguf"):
        write_base(root / name, "llama", "q8_0", tokenizer=Bytes(), context=256)
    chat = '{"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]}\n'
    (root / "chats.jsonl").write_text(40 * chat)
    (root / "book.txt").write_text("It was a dark and stormy night; the rain fell in torrents.\n" * 200)
    for folder in ("photos/cat", "photos/dog", "birds/crow", "birds/duck", "pictures"):
        (root / folder).mkdir(parents=True)
        for number in range(12):
            Image.new("RGB", (32, 32), (20 * number, 99, 200)).save(root / folder / f"{number}.jpg")
    shutil.copy(root / "photos" / "cat" / "3.jpg", root / "cat.jpg")
    return root


def run_on(shelf, name):
    """The directory of a run of that name, trained when it is asked for first."""
    folder = shelf / "outputs" / name
    if not folder.exists():
        before = Path.cwd()
        os.chdir(shelf)
        try:
            place = f"hydra.{'sweep' if name == 'sweeps' else 'run'}.dir=outputs/{name}/2026-01-01_000000_000000"
            words = [*RUNS[name], "steps=2", "eval_every=2", place]
            assert main(words) == 0, f"the run {name} for the pages"
        finally:
            os.chdir(before)
    return next(folder.iterdir())


def with_places(text, shelf):
    """The runs that a page names, as those of this folder: the newest of that name."""

    def found(match):
        folder = Path("outputs", match[1])
        if not folder.exists() and match[1] in RUNS:
            shutil.copytree(run_on(shelf, match[1]).parent, folder)
        return str(max(folder.iterdir())) if folder.exists() else match[0]

    if "adapter.gguf" in text and not Path("adapter.gguf").exists():
        shutil.copy(run_on(shelf, "lora-llama") / "adapter.gguf", "adapter.gguf")
    return PLACE.sub(found, text)


def run_command(command, block):
    """Runs one line of a page; by a shell where it is more than toyexp alone."""
    where = f"{block.where}: {command}"
    program = command.split()[0].removeprefix(".venv/bin/")
    if program == "toyexp" and not re.search(r" [|>] ", command):
        words = snippets.shorten_command(command, block.said.get("small", ""))
        assert main(words) == 0, f"{where}\nas toyexp {' '.join(words)}"
    elif program == "cd":  # for all that comes after it on the page
        _, folder, *rest = command.split()
        os.chdir(folder)
        if rest[:1] == ["&&"]:
            run_command(" ".join(rest[1:]), block)
    else:
        in_a_shell(command, where)


def in_a_shell(command, where):
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = command.replace(".venv/bin/", "")
    for script, module in {"torchrun": "torch.distributed.run", "pytest": "pytest"}.items():
        if not shutil.which(script, path=environment["PATH"]):  # what it is, where the module alone is seen
            command = re.sub(rf"^{script}\b", f"python -m {module}", command)
    done = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{where}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"


def run_page(name, shelf, slow):
    """Runs a page from its first block to its last."""
    space = {"__name__": "__page__"}
    for block in blocks_of(name):
        if "not run" in block.said or ("slow" in block.said and not slow):
            continue
        if "first" in block.said:
            in_a_shell(block.said["first"], block.where)
        if block.file and block.language in ("yaml", "python"):
            Path(block.file).parent.mkdir(parents=True, exist_ok=True)
            Path(block.file).write_text(block.text)
        elif block.language == "yaml":
            yaml.safe_load(block.text)
        elif block.language == "json":
            [json.loads(line) for line in block.text.splitlines()]
        elif block.language == "python" and not block.file:
            code = compile(with_places(block.text, shelf), block.where, "exec")
            exec(code, space)
        for command in block.commands:
            if not snippets.skip_reason(command):
                run_command(with_places(command, shelf), block)


@pytest.fixture
def folder(shelf, tmp_path, monkeypatch):
    """An empty folder but for what is on the shelf, beside outputs/."""
    for path in shelf.iterdir():
        if path.name != "outputs":
            (shutil.copytree if path.is_dir() else shutil.copy)(path, tmp_path / path.name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(sys, "path", [*sys.path])
    with Path(os.devnull).open() as nothing:  # what is typed into a chat: its end
        monkeypatch.setattr(sys, "stdin", nothing)
        yield tmp_path
    for name, module in [*sys.modules.items()]:  # those of the page; another page may write its own of that name
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("start/")])
def test_a_quick_start_runs_from_its_first_command_to_its_last(name, folder, shelf, capsys):
    run_page(name, shelf, slow=False)


@pytest.mark.docs
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["README.md", *NAMES])
def test_all_that_a_page_shows_runs(name, folder, shelf, capsys):
    run_page(name, shelf, slow=True)


def not_run():
    for name in ["README.md", *NAMES]:
        for block in blocks_of(name):
            if "not run" in block.said:
                yield block.where, block.said["not run"], block.text
            else:
                for command in filter(snippets.skip_reason, block.commands):
                    yield block.where, snippets.skip_reason(command), command


@pytest.mark.docs
@pytest.mark.parametrize(("where", "why", "text"), [*not_run()])
def test_what_is_not_run_says_why(where, why, text):
    assert len(why.split()) > 1, f"{where} is not run, and does not say why"
    pytest.skip(f"{where} is not run: {why}")


def test_files_that_are_shown_are_installed_and_run_by_their_own_tests():
    for name in NAMES:
        for block in blocks_of(name):
            if block.language in ("python", "toml") and block.file:
                stem = Path(block.file).stem.removeprefix("test_")
                used_here = any(f"plugins=[{stem}]" in command for b in blocks_of(name) for command in b.commands)
                assert used_here or stem in HELD_ELSEWHERE, f"{block.where} shows {block.file}, which no test runs"
