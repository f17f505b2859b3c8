"""A configuration file that cannot mean what it seems to is refused by its name, in one line, before anything runs."""

import os
from pathlib import Path

import pytest
import yaml
from lines import run_failing

from toyexp.cli.main import main

TINY = ["model.d_model=16", "data=random", "engine=ggml", "engine.threads=1", "steps=1", "callbacks=[]"]
HEADER = "# @package _global_\n"


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("own/experiment").mkdir(parents=True)


@pytest.fixture
def refused(capsys):
    def run(*argv: str) -> str:
        line, _ = run_failing(capsys, *argv, *TINY, codes=(2,))
        assert not list(Path().rglob("events.jsonl"))
        return line

    return run


@pytest.mark.parametrize(("text", "key"), [("resume: x\n", "resume"), ("sweep: {resume: x}\n", "sweep.resume")])
def test_what_to_go_on_with_is_not_taken_from_a_file(refused, text, key):
    Path("own/experiment/mine.yaml").write_text(HEADER + text)
    Path("own/main.yaml").write_text("defaults: [config, _self_]\n" + text)
    for words in (["--config-dir", "own", "experiment=mine"], ["--config-path", "own", "--config-name", "main"]):
        line = refused(*words)
        assert f"{'mine' if 'experiment=mine' in words else 'main'}.yaml: {key} is not allowed in a file" in line
        assert f"on the command line: {key}=" in line


def test_a_saved_configuration_is_taken_with_its_resume_null_and_without_a_directory_added_to_it(refused, capsys):
    assert main([*TINY, "hydra.run.dir=first"]) == 0
    saved = Path("first/config.yaml")
    assert yaml.safe_load(saved.read_text())["resume"] is None
    assert main(["--config-path", "first", "hydra.run.dir=again"]) == 0
    assert main(["resume=first", "steps=2"]) == 0
    saved.write_text(saved.read_text() + "hydra: {run: {dir: elsewhere}}\n")
    capsys.readouterr()
    assert main(["resume=first", "steps=3"]) == 2
    assert "first/config.yaml: the key hydra has no effect" in capsys.readouterr().err
    assert not Path("elsewhere").exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("steps: 3\n", ["the first line must be '# @package _global_'"]),
        ("# mine\n# @package _global_\nsteps: 3\n", ["the first line must be '# @package _global_'"]),
        ("", ["must contain keys with values", "steps: 100", "# @package _global_"]),
        ("- steps\n", ["must contain keys with values"]),
        ("steps\n", ["must contain keys with values"]),
        (HEADER + "defaults: [mine, _self_]\nsteps: 3\n", ["includes itself"]),
    ],
)
def test_an_experiment_that_cannot_be_one_is_named_with_what_it_lacks(refused, text, words):
    Path("own/experiment/mine.yaml").write_text(text)
    line = refused("--config-dir", "own", "experiment=mine")
    assert "own/experiment/mine.yaml: " in line
    for word in words:
        assert word in line


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("steps: 3\nmodel: {d_model: 8\nlr: 1\n", ["line 4: not valid YAML"]),
        ("steps: 3\nlr: 1\nsteps: 4\n", ["line 4: not valid YAML", "duplicate key steps"]),
        ("steps: 3\noptim: muon\n", ["line 3: optim must be a mapping", "'- override /optim: muon'"]),
        ("callbacks: [plots]\n", ["line 2: callbacks must be a mapping", "'- override /callbacks: [plots]'"]),
        ("defaults: [/optim: muon]\n", ["optim is chosen twice", "'- override /optim: muon'"]),
        (
            "optim:\n  groups: [a]\n",
            ["line 3: optim.groups: must be a mapping", "optim.groups={blk.*: {lr: 0.001}}"],
        ),
        ("optim: {groups: a}\n", ["line 2: optim.groups: must be a mapping"]),
        ("defaults: [override /recipe: lora]\nrecipe: {targets: {q: 1}}\n", ["line 3: recipe.targets: must be a list"]),
        ("optim:\n  groups:\n    1: {lr: 1}\n", ["line 4: optim.groups.1: keys must be text"]),
        ("optim:\n  groups:\n    a*: {lr: 1}\n    blk.*:\n      lr: -1\n", ["line 5: optim.groups: blk.*: lr=-1"]),
        ("optim: {groups: {blk.*: {rate: 1}}}\n", ["line 2: optim.groups: blk.*: unknown setting rate"]),
        ("optim:\n  groups:\n    blk.*: 0.1\n", ["line 4: optim.groups: blk.*: expected settings"]),
        ("optim:\n  groups:\n    none.*: {lr: 1}\n", ["line 4: optim.groups: none.*: matches no trainable tensor"]),
        ("optim:\n  groups:\n    '*': {frozen: true}\n", ["line 3: optim.groups: freezes every tensor"]),
        ("optim:\n  grad_clip: -3\n", ["line 3: optim.grad_clip=-3.0: must be at least 0"]),
        ("steps: 3\nlr: -1\n", ["line 3: lr=-1.0: must be a finite number >= 0"]),
        ("model:\n  n_heads: 5\n", ["line 3: model.n_heads=5 does not divide"]),
        ("seed: many\n", ["line 2: seed: must be a whole number"]),
        ("steps: many\n", ["line 2: steps: must be a whole number"]),  # which the command line has right
        ("seed: 1\nlr: 3\nstepz: 3\n", ["line 4: unknown key stepz; did you mean steps?"]),
    ],
)
def test_what_is_wrong_in_an_experiment_is_told_by_its_file_and_line(refused, text, words):
    Path("own/experiment/mine.yaml").write_text(HEADER + text)
    line = refused("--config-dir", "own", "experiment=mine")
    assert "own/experiment/mine.yaml" in line
    for word in words:
        assert word in line


def test_what_is_wrong_and_was_typed_is_not_told_of_a_file(refused):
    Path("own/experiment/mine.yaml").write_text(HEADER + "lr: 0.1\noptim: {grad_clip: 1}\n")
    assert refused("--config-dir", "own", "experiment=mine", "lr=-1").startswith("lr=-1.0: ")


def test_what_is_wrong_in_a_main_file_of_ones_own_is_told_by_its_line(refused):
    Path("own/main.yaml").write_text("defaults: [config, _self_]\nlr: -1\n")
    assert "own/main.yaml, line 2: lr=-1.0: " in refused("--config-path", "own", "--config-name", "main")


def test_a_byte_order_mark_before_an_experiment_is_passed_over(tmp_path):
    Path("own/experiment/mine.yaml").write_text("\ufeff" + HEADER + "seed: 7\n", encoding="utf-8")
    assert main(["--config-dir", "own", "experiment=mine", *TINY, "hydra.run.dir=run"]) == 0
    assert yaml.safe_load(Path("run/config.yaml").read_text())["seed"] == 7


def test_steps_that_are_typed_stand_before_the_epochs_of_a_file(refused):
    Path("own/experiment/mine.yaml").write_text(HEADER + "epochs: 9\n")
    words = ["--config-dir", "own", "experiment=mine", *TINY]
    assert main([*words, "hydra.run.dir=run"]) == 0  # TINY types steps=1
    saved = yaml.safe_load(Path("run/config.yaml").read_text())
    assert (saved["steps"], saved["epochs"]) == (1, None)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (os.mkfifo, "is a pipe"),
        (lambda path: path.symlink_to("/dev/zero"), "is a device"),
        (Path.mkdir, "is a folder"),
        (lambda path: path.symlink_to("gone"), "is a link to gone, which does not exist"),
    ],
)
def test_an_experiment_that_is_no_file_is_called_what_it_is(refused, make, said):
    make(Path("own/experiment/odd.yaml"))
    line = refused("--config-dir", "own", "experiment=odd")
    assert "own/experiment/odd.yaml: " in line and said in line
