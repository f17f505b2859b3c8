"""Print the counts of the fault tests at the end; with TOYEXP_FIGURES=<file>, also write them to a file."""

import os
from pathlib import Path

import pytest
from faults import FIGURES, LIKE_LLAMA, TEXT, words

from toyexp.cli.main import main


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):  # one of several processes, under xdist
        session.config.workeroutput["figures"] = dict(FIGURES)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    FIGURES.update(getattr(node, "workeroutput", {}).get("figures", {}))


def pytest_terminal_summary(terminalreporter):
    if not FIGURES:
        return
    lines = [f"{name:<62} {count:>6}" for name, count in sorted(FIGURES.items())]
    terminalreporter.section("counts of the fault tests")
    for line in lines:
        terminalreporter.write_line(line)
    figures_path = os.environ.get("TOYEXP_FIGURES")
    if figures_path:
        Path(figures_path).write_text("\n".join(lines) + "\n")


@pytest.fixture(scope="session")
def bench(tmp_path_factory):
    """Create a directory with a text file and a base of every model."""
    root = tmp_path_factory.mktemp("faults")
    (root / "book.txt").write_text(TEXT)
    before = Path.cwd()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOYEXP_CACHE", str(root / "cache"))
        os.chdir(root)
        try:
            for model in (*LIKE_LLAMA, "gpt2", "vit"):
                settings = words("vit_tiny" if model == "vit" else "scratch", model, "ggml")
                assert (
                    main([*settings, "steps=1", "checkpoint_every=0", "eval_every=0", f"hydra.run.dir=b/{model}"]) == 0
                )
                (root / "b" / model / "model.gguf").rename(root / f"base-{model}.gguf")
        finally:
            os.chdir(before)
    return root


@pytest.fixture
def here(bench, monkeypatch):
    """Change to the directory of `bench` and return it."""
    monkeypatch.chdir(bench)
    monkeypatch.setenv("TOYEXP_CACHE", str(bench / "cache"))
    return bench
