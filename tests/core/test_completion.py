"""Shell completion: what is offered, tested in the real shells."""

import dataclasses
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import shells

from toyexp.cli.commands import COMMANDS
from toyexp.cli.completion import RUNS, SHELLS, complete, possible_values, read_line
from toyexp.cli.main import main
from toyexp.config import schema
from toyexp.config.flags import FLAGS
from toyexp.config.top_level import GROUPS, LAUNCHERS, top_level_settings
from toyexp.interfaces.optimiser import MODES
from toyexp.plugins.discovery import load
from toyexp.plugins.settings import list_settings
from toyexp.training.settings import NONFINITE
from toyexp_optimisers.adamw import AdamWOptimiser


@pytest.fixture
def complete_line(tmp_path, monkeypatch):
    """Return the completions of a command line (split at spaces) in a directory with some files."""
    for name in ("tiny.gguf", "my model.gguf", "a:b=c.gguf", "book.txt", ".hidden.gguf"):
        (tmp_path / name).touch()
    (tmp_path / "texts").mkdir()
    for name in ("mine", "yours"):
        (tmp_path / "outputs" / name / "2026-11-21_1").mkdir(parents=True)
    (tmp_path / "outputs" / "mine" / "2026-11-21_1" / "config.yaml").touch()
    (tmp_path / "own" / "model").mkdir(parents=True)
    (tmp_path / "own" / "model" / "odd_one.yaml").touch()
    monkeypatch.chdir(tmp_path)
    return lambda line: [c.text for c in complete(line.split(" ")[1:])]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("toyexp des", ["describe"]),
        ("toyexp nonf", ["nonfinite="]),
        ("toyexp nonfinite=", ["nonfinite=skip", "nonfinite=stop"]),
        ("toyexp steps=", []),
        ("toyexp recipe=w", ["recipe=warm"]),
        ("toyexp rec", ["recipe.", "recipe="]),
        ("toyexp recipe=lora recipe.ra", ["recipe.rank=", "recipe.rank_pattern="]),
        ("toyexp recipe=warm recipe.ra", []),
        ("toyexp model.n_kv", ["model.n_kv_heads="]),
        ("toyexp +model.n_kv", ["+model.n_kv_heads="]),
        ("toyexp experiment=vit", ["experiment=vit_digits"]),
        ("toyexp --config-dir own model=odd", ["model=odd_one"]),
        ("toyexp -cd own model=odd", ["model=odd_one"]),
        ("toyexp engine=cpu engine.dt", ["engine.dtype="]),
        ("toyexp engine=cpu engine.dtype=b", ["engine.dtype=bfloat16"]),
        ("toyexp engine.compile=", ["engine.compile=false", "engine.compile=true"]),
        ("toyexp optim.mode=", [f"optim.mode={mode}" for mode in sorted({"auto", *MODES})]),
        ("toyexp sweep.l", ["sweep.launcher="]),
        ("toyexp sweep.submitit.cp", ["sweep.submitit.cpus="]),
        ("toyexp hydra.run", ["hydra.run.dir="]),
        ("toyexp callbacks=[default,sam", ["callbacks=[default,sample,", "callbacks=[default,sample]"]),
        ("toyexp callbacks=[sample,default,sam", []),
        ("toyexp callbacks=pl", []),  # it takes a list
        ("toyexp callbacks.sample.top", ["callbacks.sample.top_k=", "callbacks.sample.top_p="]),
        ("toyexp callbacks.sam", ["callbacks.sample."]),
        ("toyexp ~callbacks.prog", ["~callbacks.progress"]),
        ("toyexp -m recipe=scratch,w", ["recipe=scratch,warm"]),
        ("toyexp -m des", []),  # a command stands first
        ("toyexp --mul", ["--multirun"]),
        ("toyexp --cfg ", ["all", "hydra", "job"]),
        ("toyexp --cfg=j", ["--cfg=job"]),
        ("toyexp -cd o", ["outputs/", "own/"]),
        # files
        ("toyexp recipe.base=t", ["recipe.base=texts/", "recipe.base=tiny.gguf"]),
        ("toyexp data.path=b", ["data.path=book.txt"]),
        ("toyexp data.tokenizer=b", ["data.tokenizer=bpe", "data.tokenizer=byte"]),
        ("toyexp data.tokenizer=t", ["data.tokenizer=texts/", "data.tokenizer=tiny.gguf"]),
        ("toyexp hydra.run.dir=t", ["hydra.run.dir=texts/"]),
        ("toyexp resume=a", ["resume=auto"]),
        ("toyexp resume=outputs/m", ["resume=outputs/mine/", "resume=outputs/mine/2026-11-21_1"]),
        ("toyexp resume=outputs/mine/", ["resume=outputs/mine/2026-11-21_1"]),
        ("toyexp recipe.base=.h", ["recipe.base=.hidden.gguf"]),
        ("toyexp recipe.base=nowhere/", []),
        # commands
        ("toyexp describe ti", ["tiny.gguf"]),
        ("toyexp describe --t", ["--tensors"]),
        ("toyexp eval out", ["outputs/", "outputs/mine/2026-11-21_1"]),
        ("toyexp eval tiny.gguf --data b", ["book.txt"]),
        ("toyexp eval tiny.gguf --data=b", ["--data=book.txt"]),
        ("toyexp eval tiny.gguf seed", ["seed="]),
        ("toyexp eval tiny.gguf engine=gg", ["engine=ggml", "engine=ggml_cuda"]),
        ("toyexp generate tiny.gguf --engine ll", ["llama.cpp"]),
        ("toyexp generate tiny.gguf --prompt b", []),
        ("toyexp generate tiny.gguf --tokens ", []),
        ("toyexp export tiny.gguf --type q8", ["q8_0"]),
        ("toyexp export tiny.gguf --type hf", ["hf", "hf-bf16", "hf-f16"]),
        ("toyexp bench engine=cpu,gg", ["engine=cpu,ggml", "engine=cpu,ggml_cuda"]),
        ("toyexp parity --grad", ["--gradient"]),
        ("toyexp doctor --n", ["--numerics"]),
        ("toyexp doctor --graph eng", ["engine.", "engine="]),
        ("toyexp plugins war", ["warm"]),
        ("toyexp plugins --m", ["--matrix"]),
        ("toyexp models o", ["outputs/", "own/"]),
        ("toyexp completion ", ["bash", "fish", "zsh"]),
        ("toyexp help plugins/e", ["plugins/engine", "plugins/examples"]),
        ("toyexp new e", ["engine"]),
    ],
)  # fmt: skip
def test_completions_of_a_partial_command_line(complete_line, line, words):
    assert complete_line(line) == words


def test_a_hidden_file_is_offered_once_its_dot_is_typed(complete_line):
    assert "data.path=.hidden.gguf" in complete_line("toyexp data.path=.")
    candidates = complete_line("toyexp data.path=")
    assert "data.path=tiny.gguf" in candidates and "data.path=.hidden.gguf" not in candidates


def test_the_newest_runs_are_offered_whatever_they_are_called(complete_line):
    for day in range(1, RUNS + 1):
        directory = Path("outputs", "yours", f"2026-11-{day:02}_1")
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.yaml").touch()
    candidates = {word for word in complete_line("toyexp resume=") if "2026" in word}
    assert len(candidates) == RUNS
    assert "resume=outputs/mine/2026-11-21_1" in candidates and "resume=outputs/yours/2026-11-01_1" not in candidates


def test_an_empty_line_offers_all_commands_and_keys(complete_line):
    candidates = complete_line("toyexp ")
    assert set(COMMANDS) <= set(candidates)
    assert {f"{f.name}=" for f in dataclasses.fields(schema.Root)} - {"sweep="} <= set(candidates)
    assert {f"{group}=" for group in GROUPS} <= set(candidates) and "sweep." in candidates


def test_offered_values_are_those_that_the_code_accepts():
    keys = dict(top_level_settings())
    assert possible_values(keys["nonfinite"])[0] == list(NONFINITE)
    assert possible_values(keys["sweep.launcher"])[0] == list(LAUNCHERS)
    mode = next(s for s in list_settings(AdamWOptimiser) if s.name == "mode")
    assert set(possible_values(mode)[0]) == {"auto", *MODES}


def test_the_default_of_a_setting_is_among_its_choices():
    for offers in load().offers.values():
        for offer in offers.values():
            for setting in list_settings(offer.cls):
                choices, paths = possible_values(setting)
                if choices and setting.type.startswith("str") and paths is None:
                    assert setting.default in choices, (offer.name, setting)


def test_every_flag_and_every_option_of_every_command_is_offered(complete_line):
    assert {*FLAGS, "--color=never", "--version"} <= set(complete_line("toyexp -"))
    for name, command in COMMANDS.items():
        assert set(command().parser().options) <= set(complete_line(f"toyexp {name} -")), name
    assert {"--tokens", "--chat"} <= set(complete_line("toyexp generate -"))
    assert [c.help for c in complete(["bench", "--ro"])] == ["number of timed rounds per engine (default: 7)"]


@pytest.mark.parametrize(
    ("line", "words", "kept_length", "quote"),
    [
        ("toyexp recipe=wa", ["toyexp", "recipe=wa"], 7, ""),
        ("toyexp  a ", ["toyexp", "a", ""], 0, ""),
        ("toyexp 'callbacks=[a", ["toyexp", "callbacks=[a"], 0, "'"),
        ("toyexp callbacks='[a", ["toyexp", "callbacks=[a"], 10, "'"),
        ('toyexp data.path="my f', ["toyexp", "data.path=my f"], 10, '"'),
        ("toyexp data.path=my\\ f", ["toyexp", "data.path=my f"], 10, ""),
        ("toyexp recipe.base=c:d", ["toyexp", "recipe.base=c:d"], 14, ""),
        ("toyexp ''", ["toyexp", ""], 0, ""),
        ("HERE=1 toyexp a", ["toyexp", "a"], 0, ""),
    ],
)
def test_a_line_is_split_like_bash_does(line, words, kept_length, quote):
    split_line = read_line(line, " \t\n\"'><=;|&(:")
    assert (split_line.words, split_line.kept_length, split_line.quote) == (words, kept_length, quote)


@pytest.mark.parametrize("shell", SHELLS)
def test_a_completion_script_is_printed_by_shell_name_and_by_hydras_flag(capsys, shell):
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert f"completion --for {shell}" in script
    assert main(["-sc", f"install={shell}"]) == 0
    assert capsys.readouterr().out == script


def test_completion_imports_neither_a_framework_nor_hydra(tmp_path):
    program = (
        "import sys; from toyexp.cli.main import main; main(['completion', '--for', 'fish', sys.argv[1]]); "
        "print('LOADED', *({'torch', 'ggml', 'hydra', 'omegaconf', 'tokenizers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program, "recipe.base="], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.endswith("LOADED\n") and done.stderr == "", done.stdout


# -- in the shells themselves -----------------------------------------------------------------------------------------

TYPED = [
    ("toyexp recipe=wa", "<toyexp><recipe=warm>"),  # bash breaks words at `=` and `:`
    ("toyexp recipe.base=a", "<toyexp><recipe.base=a:b=c.gguf>"),
    ("toyexp describe my\\ mo", "<toyexp><describe><my model.gguf>"),
]


@pytest.mark.parametrize("name", ["bash", "zsh"])
def test_tab_completes_the_word(complete_line, tmp_path, name):
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")
    shell = shells.Shell(name, tmp_path)
    try:
        for line, becomes in TYPED:
            assert shell.tab(line) == becomes
        assert shell.tab("toyexp 'callbacks=[default,sam", then="'") == "<toyexp><callbacks=[default,sample>"
    finally:
        shell.close()


def test_fish_gets_completions_with_descriptions(complete_line, tmp_path):
    if shutil.which("fish") is None:
        pytest.skip("fish is not installed")
    assert shells.complete_in_fish("toyexp recipe=wa", tmp_path) == ["recipe=warm"]
    assert shells.complete_in_fish("toyexp describe 'my m", tmp_path) == ["my model.gguf"]


def test_the_scripts_have_no_syntax_errors(tmp_path, capsys):
    for name in SHELLS:
        if shutil.which(name) is not None:
            main(["completion", name])
            script = capsys.readouterr().out
            assert re.search("toyexp", script)
            done = subprocess.run([name, "-n"], input=script, capture_output=True, text=True)
            assert (done.returncode, done.stderr) == (0, "")
