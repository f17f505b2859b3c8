"""Run every command and code block of the documentation in order, each page in its own directory.

The quick starts run with `make test-all`, all pages with `make docs-test`; `-rs` lists skipped blocks with reasons.
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
INSTALLED_ELSEWHERE = (
    Path(__file__).parent / "test_docs.py"
).read_text()  # plugins that test_docs.py installs and runs
# Overrides of the runs that pages mention, by the name of their directory.
RUNS = {
    "warm-llama": ["recipe=warm"],
    "scratch-llama": [],
    "lora-llama": ["recipe=lora", "recipe.base=model.gguf", "data=examples", "data.path=chats.jsonl",
                   "model.context=64"],
    "gpt2-char": ["experiment=gpt2_char"],
    "vit_tiny-vit": ["recipe=vit_tiny", "model=vit", "model.patch=4", "data=images", "data.path=photos",
                     "data.image_size=32"],
    "sweeps": ["-m", "recipe=scratch,warm", "sweep.isolate=false", "sweep.report=false"],
}  # fmt: skip
RUN_PATH = re.compile(r"outputs/([\w-]+)/(?:<[^>]*>|[\d-]{10}_[\d_]+|\.\.\.)(?=[/\s'\"]|$)")


def read_page(name):
    return README if name == "README.md" else (snippets.PAGES / name).read_text()


def page_blocks(name):
    return snippets.blocks(name, read_page(name))


@pytest.fixture(scope="session")
def shared_files(tmp_path_factory):
    """Create a directory with the files that pages mention: models, texts, chats, images; `train_run` adds runs."""
    root = tmp_path_factory.mktemp("shared_files")
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


def train_run(shared_files, name):
    """Return the directory of the run `name`; train it on the first call."""
    folder = shared_files / "outputs" / name
    if not folder.exists():
        before = Path.cwd()
        os.chdir(shared_files)
        try:
            directory = f"hydra.{'sweep' if name == 'sweeps' else 'run'}.dir=outputs/{name}/2026-01-01_000000_000000"
            words = [*RUNS[name], "steps=2", "eval_every=2", directory]
            assert main(words) == 0, f"the run {name} for the pages"
        finally:
            os.chdir(before)
    return next(folder.iterdir())


def replace_run_paths(text, shared_files):
    """Replace run directories in a text by the newest run of that name in the current directory."""

    def newest_run(match):
        folder = Path("outputs", match[1])
        if not folder.exists() and match[1] in RUNS:
            shutil.copytree(train_run(shared_files, match[1]).parent, folder)
        return str(max(folder.iterdir())) if folder.exists() else match[0]

    if "adapter.gguf" in text and not Path("adapter.gguf").exists():
        shutil.copy(train_run(shared_files, "lora-llama") / "adapter.gguf", "adapter.gguf")
    return RUN_PATH.sub(newest_run, text)


def run_command(command, block):
    """Run one line of a page; through a shell unless it is a single toyexp command."""
    where = f"{block.location}: {command}"
    program = command.split()[0].removeprefix(".venv/bin/")
    if program == "toyexp" and not re.search(r" [|>] ", command):
        words = snippets.shorten_command(command, block.options.get("small", ""))
        assert main(words) == 0, f"{where}\nas toyexp {' '.join(words)}"
    elif program == "cd":  # applies to the rest of the page
        _, folder, *rest = command.split()
        os.chdir(folder)
        if rest[:1] == ["&&"]:
            run_command(" ".join(rest[1:]), block)
    else:
        run_shell(command, where)


def run_shell(command, where):
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = command.replace(".venv/bin/", "")
    for script, module in {"torchrun": "torch.distributed.run", "pytest": "pytest"}.items():
        if not shutil.which(script, path=environment["PATH"]):  # the module is installed without its script
            command = re.sub(rf"^{script}\b", f"python -m {module}", command)
    done = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{where}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"


def run_page(name, shared_files, slow):
    """Run all blocks of a page in order."""
    space = {"__name__": "__page__"}
    for block in page_blocks(name):
        if "not run" in block.options or ("slow" in block.options and not slow):
            continue
        if "first" in block.options:
            run_shell(block.options["first"], block.location)
        if block.file and block.language in ("yaml", "python"):
            Path(block.file).parent.mkdir(parents=True, exist_ok=True)
            Path(block.file).write_text(block.text)
        elif block.language == "yaml":
            yaml.safe_load(block.text)
        elif block.language == "json":
            [json.loads(line) for line in block.text.splitlines()]
        elif block.language == "python" and not block.file:
            code = compile(replace_run_paths(block.text, shared_files), block.location, "exec")
            exec(code, space)
        for command in block.commands:
            if not snippets.skip_reason(command):
                run_command(replace_run_paths(command, shared_files), block)


@pytest.fixture
def folder(shared_files, tmp_path, monkeypatch):
    """Change to a directory with a copy of all shared files except outputs/."""
    for path in shared_files.iterdir():
        if path.name != "outputs":
            (shutil.copytree if path.is_dir() else shutil.copy)(path, tmp_path / path.name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(sys, "path", [*sys.path])
    with Path(os.devnull).open() as nothing:  # a chat on stdin ends at once
        monkeypatch.setattr(sys, "stdin", nothing)
        yield tmp_path
    for name, module in [*sys.modules.items()]:  # another page may write a module with the same name
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("start/")])
def test_every_command_of_a_quick_start_runs(name, folder, shared_files, capsys):
    run_page(name, shared_files, slow=False)


@pytest.mark.docs
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["README.md", *NAMES])
def test_every_command_of_a_page_runs(name, folder, shared_files, capsys):
    run_page(name, shared_files, slow=True)


def skipped_blocks():
    for name in ["README.md", *NAMES]:
        for block in page_blocks(name):
            if "not run" in block.options:
                yield block.location, block.options["not run"], block.text
            else:
                for command in filter(snippets.skip_reason, block.commands):
                    yield block.location, snippets.skip_reason(command), command


@pytest.mark.docs
@pytest.mark.parametrize(("where", "why", "text"), [*skipped_blocks()])
def test_skipped_blocks_have_a_reason(where, why, text):
    assert len(why.split()) > 1, f"{where} is not run and has no reason"
    pytest.skip(f"{where} is not run: {why}")


def test_documented_files_are_used_on_their_page_or_by_another_test():
    for name in NAMES:
        for block in page_blocks(name):
            if block.language in ("python", "toml") and block.file:
                stem = Path(block.file).stem.removeprefix("test_")
                uses = (f"plugins=[{stem}]", f"python {block.file}")
                commands = [command for other in page_blocks(name) for command in other.commands]
                used_here = any(use in command for use in uses for command in commands)
                assert used_here or stem in INSTALLED_ELSEWHERE, (
                    f"{block.location} shows {block.file}, which no test runs"
                )
