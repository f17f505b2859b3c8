"""What the README says is true: its plugin is built, installed and run, and the hooks it lists are the hooks."""

import inspect
import re
from pathlib import Path

import environments
import numpy as np
import pytest
from cells import CELLS, ticked

from toyexp.commands.line import main
from toyexp.contract.hooks import Registration, RunHooks
from toyexp.formats.gguf.read import GGUFFile

README = (Path(__file__).parent.parent / "README.md").read_text()


def readme_file(name):
    """The code block that begins with `# <name>`."""
    return re.search(rf"```\w+\n(# {re.escape(name)}\n.*?)```", README, re.DOTALL)[1]


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """A virtual environment of its own that sees this one's packages, with the README's plugin installed."""
    root = tmp_path_factory.mktemp("demo")
    for name in ("pyproject.toml", "toyexp_demo.py", "test_toyexp_demo.py"):
        (root / name).write_text(readme_file(name))
    python = environments.make(root / "env", install=root)
    (root / "toyexp_demo.py").unlink()  # only the installed copy is left
    return root, python


def run(environment, *words):
    root, python = environment
    (root / "elsewhere").mkdir(exist_ok=True)
    return environments.run(python, *words, cwd=root / "elsewhere")


def test_the_plugin_is_listed_and_works_here(environment):
    listed = run(environment, "-m", "toyexp", "plugins")
    assert re.search(r"autograd +numpy in float64, gradients by autograd\.  \[demo, toyexp-demo 0\.1\]", listed.stdout)
    assert "head_only" in listed.stdout
    assert "good_enough" in listed.stdout
    assert re.search(r"autograd +PASS", run(environment, "-m", "toyexp", "doctor").stdout)


def test_the_plugin_runs_an_experiment(environment):
    done = run(
        environment, "-m", "toyexp", "engine=autograd", "recipe=head_only", "callbacks=[default,good_enough]",
        "callbacks.good_enough.loss=6", "steps=40", "eval_every=5", "data.max_mb=0.1", "model.d_model=16",
        "model.d_ff=16", "model.context=16", "lr=0.02",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "stopped because good_enough: below 6.0 after" in done.stdout
    assert re.search(r"model\.gguf", done.stdout)


def test_the_plugin_passes_the_conformance_kit(environment):
    root, _ = environment
    done = run(environment, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(root / "test_toyexp_demo.py"))
    assert done.returncode == 0, done.stdout[-3000:]
    assert "skipped" not in done.stdout


def test_the_optimiser_trains_on_every_engine_as_our_own_does(tmp_path, monkeypatch, capsys):
    """The file as it stands there, as a local plugin, against SGD without momentum."""
    (tmp_path / "plain_sgd.py").write_text(readme_file("plain_sgd.py"))
    monkeypatch.chdir(tmp_path)
    usual = ["-m", "data=random", "data.vocab=32", "model.d_model=16", "model.context=8", "model.d_ff=24", "steps=4",
             "lr=0.5", "optim.weight_decay=0.1", "engine=cpu,ggml", "sweep.isolate=false",
             "callbacks=[gguf_export]", "eval_every=0"]  # fmt: skip
    assert main([*usual, "plugins=[plain_sgd]", "optim=plain_sgd", "hydra.sweep.dir=a"]) == 0, capsys.readouterr().err
    assert main([*usual, "optim=sgd", "optim.momentum=0", "hydra.sweep.dir=b"]) == 0, capsys.readouterr().err
    for path in sorted(tmp_path.glob("a/*/model.gguf")):
        with GGUFFile(path) as one, GGUFFile(tmp_path / "b" / path.parent.name / "model.gguf") as other:
            for name in one.tensors:
                np.testing.assert_allclose(one.read(name), other.read(name), atol=1e-6, err_msg=name)


def test_the_readme_lists_every_hook_with_its_signature():
    for spec in (Registration, RunHooks):
        for name, hook in vars(spec).items():
            if not name.startswith("_"):
                signature = str(inspect.signature(hook)).replace("'", "")
                assert f"{name}{signature}" in README, name


def test_every_file_of_the_core_is_in_the_readmes_tree():
    tree = README[README.index("## The house") : README.index("## Measured")]
    for folder in Path(__file__).parent.parent.joinpath("toyexp").glob("*/"):
        room = re.search(rf"^  {folder.name}/.*?(?=^  \w+/|^plugins)", tree, re.DOTALL | re.MULTILINE)
        assert room or not (folder / "__init__.py").exists(), folder.name
        for path in folder.rglob("*.py"):
            assert path.name.startswith("__") or re.search(rf"\b{path.stem}\b", room[0]), path


def test_the_table_of_files_has_the_cells_that_are_tested():
    """Its figures are those of the last `make table`."""
    assert ticked(README) == CELLS


def test_the_figures_of_the_fault_tier_are_those_of_its_last_run():
    assert f"```\n{(Path(__file__).parent / 'faults' / 'figures.txt').read_text()}```\n" in README
