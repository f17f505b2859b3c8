"""An invalid configuration file is rejected before a run with one line that names the file and the line."""

import os
from pathlib import Path

import pytest
import yaml
from lines import run_failing

from toyexp.cli.main import main

TINY = ["model.d_model=16", "data=random", "engine=ggml", "engine.threads=1", "steps=1", "callbacks=[]"]
HEADER = "# @package _global_\n"


@pytest.fixture(autouse=True)
def _work_in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("own/experiment").mkdir(parents=True)


@pytest.fixture
def run_rejected(capsys):
    def run(*argv: str) -> str:
        line, _ = run_failing(capsys, *argv, *TINY, codes=(2,))
        assert not list(Path().rglob("events.jsonl"))
        return line

    return run


@pytest.mark.parametrize(("text", "key"), [("resume: x\n", "resume"), ("sweep: {resume: x}\n", "sweep.resume")])
def test_resume_is_rejected_in_a_configuration_file(run_rejected, text, key):
    Path("own/experiment/mine.yaml").write_text(HEADER + text)
    Path("own/main.yaml").write_text("defaults: [config, _self_]\n" + text)
    for words in (["--config-dir", "own", "experiment=mine"], ["--config-path", "own", "--config-name", "main"]):
        line = run_rejected(*words)
        assert f"{'mine' if 'experiment=mine' in words else 'main'}.yaml: {key} is not allowed in a file" in line
        assert f"on the command line: {key}=" in line


def test_a_saved_configuration_with_resume_null_is_accepted_and_an_added_hydra_key_rejected(run_rejected, capsys):
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
        (HEADER + "- steps\n", ["must contain keys with values"]),
        (HEADER + "defaults: banana\n", ["defaults must be a list", "mine.yaml"]),
    ],
)
def test_an_invalid_experiment_file_is_rejected_with_a_hint(run_rejected, text, words):
    Path("own/experiment/mine.yaml").write_text(text)
    line = run_rejected("--config-dir", "own", "experiment=mine")
    assert "own/experiment/mine.yaml: " in line
    for word in words:
        assert word in line


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("steps: 3\nmodel: {d_model: 8\nlr: 1\n", ["line 4: not valid YAML"]),
        ("steps: 3\nlr: 1\nsteps: 4\n", ["line 4: not valid YAML", "duplicate key steps"]),
        ("lr:\n", ["line 2: lr: cannot be null"]),
        ("steps: 3\noptim: muon\n", ["line 3: optim must be a mapping", "'- override /optim: muon'"]),
        ("callbacks: [plots]\n", ["line 2: callbacks must be a mapping", "'- override /callbacks: [plots]'"]),
        ("defaults: [/optim: muon]\n", ["optim is chosen twice", "'- override /optim: muon'"]),
        (
            "optim:\n  groups: [a]\n",
            ["line 3: optim.groups=[a]: must be a mapping", "optim.groups={blk.*: {lr: 0.001}}"],
        ),
        ("optim: {groups: a}\n", ["line 2: optim.groups=a: must be a mapping"]),
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
        ("seed: many\n", ["line 2: seed=many: must be a whole number"]),
        ("plugins: 3\n", ["line 2: plugins=3: must be a list"]),
        ("sweep: 3\n", ["line 2: sweep=3: must be a mapping"]),
        ("steps: many\n", ["line 2: steps=many: must be a whole number"]),  # although the command line overrides it
        ("seed: 1\nlr: 3\nstepz: 3\n", ["line 4: unknown key stepz; did you mean steps?"]),
    ],
)
def test_an_error_in_an_experiment_names_its_file_and_line(run_rejected, text, words):
    Path("own/experiment/mine.yaml").write_text(HEADER + text)
    line = run_rejected("--config-dir", "own", "experiment=mine")
    assert "own/experiment/mine.yaml" in line and "raised while composing" not in line
    for word in words:
        assert word in line


def test_an_error_in_an_override_does_not_name_a_file(run_rejected):
    Path("own/experiment/mine.yaml").write_text(HEADER + "lr: 0.1\noptim: {grad_clip: 1}\n")
    assert run_rejected("--config-dir", "own", "experiment=mine", "lr=-1").startswith("lr=-1.0: ")


def test_an_error_in_a_users_main_file_names_its_line(run_rejected):
    Path("own/main.yaml").write_text("defaults: [config, _self_]\nlr: -1\n")
    assert "own/main.yaml, line 2: lr=-1.0: " in run_rejected("--config-path", "own", "--config-name", "main")


def test_a_byte_order_mark_in_an_experiment_is_ignored(tmp_path):
    Path("own/experiment/mine.yaml").write_text("\ufeff" + HEADER + "seed: 7\n", encoding="utf-8")
    assert main(["--config-dir", "own", "experiment=mine", *TINY, "hydra.run.dir=run"]) == 0
    assert yaml.safe_load(Path("run/config.yaml").read_text())["seed"] == 7


def test_steps_on_the_command_line_override_epochs_of_a_file(run_rejected):
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
def test_an_experiment_that_is_not_a_regular_file_is_described(run_rejected, make, said):
    make(Path("own/experiment/odd.yaml"))
    line = run_rejected("--config-dir", "own", "experiment=odd")
    assert "own/experiment/odd.yaml: " in line and said in line
