"""Hints for new users: next steps after a first run, names from other tools, and help pages named by errors."""

import re
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from lines import run_failing

from toyexp.cli import doctor
from toyexp.cli.main import main
from toyexp.cli.pages import doctor_hints, page_about, read_page, run_hints, topics
from toyexp.config.keys import Keys
from toyexp.config.paths import PAGES
from toyexp.config.top_level import GROUPS, other_tools, translate_setting
from toyexp.plugins.discovery import load
from toyexp.plugins.rules import KINDS
from toyexp.runner import one_run
from toyexp.training import verdict

TINY = ["data=random", "data.vocab=32", "model.d_model=16", "model.context=8", "model.d_ff=24", "engine=ggml",
        "steps=1", "eval_every=0"]  # fmt: skip

HEALTHY = SimpleNamespace(has_diverged=False)


@pytest.fixture(autouse=True)
def _work_in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_toyexp_without_arguments_trains_and_suggests_three_commands(monkeypatch, capsys):
    """The hints follow the default run, which is replaced by a stub here."""
    assert main([*TINY, "data.vocab=257", "hydra.run.dir=trained"]) == 0
    model = Path("trained/model.gguf").absolute()
    result = SimpleNamespace(outcome=HEALTHY, dir=model.parent, artifacts=[model])
    asked = []
    monkeypatch.setattr(one_run, "execute", lambda run, *_: asked.append(run.config.settings.steps) or result)
    monkeypatch.setattr(verdict, "print_result", lambda result: None)
    capsys.readouterr()
    assert main([]) == 0
    output = capsys.readouterr().out.strip().splitlines()
    assert asked == [200], "it has run the default experiment"
    commands = [shlex.split(command.removeprefix("next"), comments=True) for command in output]
    assert len(commands) == 3 and all(words[0] == "toyexp" for words in commands)
    assert commands[0][1:3] == ["generate", "trained"] and commands[2][1:] == ["help", "start"]
    assert main(commands[2][1:]) == 0
    monkeypatch.undo()
    monkeypatch.chdir(result.dir.parent)
    assert main([*commands[1][1:], "--cfg", "job"]) in (0, 2), "the suggested command is valid"
    assert "neither a command" not in capsys.readouterr().err


@pytest.mark.parametrize("before", ["outputs", "words"])
def test_one_command_is_suggested_after_earlier_runs_or_with_overrides(monkeypatch, capsys, before):
    result = SimpleNamespace(outcome=HEALTHY, dir=Path("x"), artifacts=[])
    monkeypatch.setattr(one_run, "execute", lambda run, *_: result)
    monkeypatch.setattr(verdict, "print_result", lambda result: None)
    if before == "outputs":
        Path("outputs").mkdir()
    assert main(["steps=1"] if before == "words" else []) == 0
    assert capsys.readouterr().out.strip() == "next  toyexp runs  # list runs"


def test_a_sweep_and_a_diverged_run_suggest_what_to_do(capsys):
    sweep = ["-m", *TINY, "seed=0,1", "sweep.launcher=serial", "sweep.report=false", "hydra.sweep.dir=s w"]
    assert main(sweep) == 0
    hints = capsys.readouterr().out.rpartition("\n\n")[2].splitlines()
    (_, describe, run), (_, compare, folder, *_) = (shlex.split(h.removeprefix("next"), comments=True) for h in hints)
    assert (describe, compare, folder) == ("describe", "compare", "s w") and Path(run, "model.gguf").exists()
    diverged = SimpleNamespace(outcome=SimpleNamespace(has_diverged=True), dir=Path("x"), artifacts=[])
    assert run_hints(diverged, is_first=False) == [
        "",
        "next  toyexp help symptoms  # read what to do if the loss rises",
    ]


def test_doctor_suggests_commands_for_the_working_engines(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "verdict", lambda offer: "PASS  here" if offer.name in ("cpu", "ggml") else "no    why")
    monkeypatch.setattr(doctor, "missing_packages", lambda registry: [])
    assert main(["doctor"]) == 0
    tail = capsys.readouterr().out.rpartition("\n\n")[2]
    assert tail.startswith("next  toyexp  # train a small model in seconds on cpu, ")
    assert "toyexp parity engine=cpu,ggml" in tail and "toyexp help engines" in tail
    assert "parity" not in "\n".join(doctor_hints(["ggml"])), "one engine agrees with none"
    assert "pip install 'toyexp[torch]'" in "\n".join(doctor_hints([]))


def test_doctor_does_not_break_commands(capsys, monkeypatch):
    build = (
        'CMAKE_ARGS="-DGGML_BLAS=ON -DGGML_CUDA=ON -DGGML_BLAS_VENDOR=OpenBLAS" pip install --no-binary ggml-python x'
    )
    install = "pip install llama-cpp-python"
    why = "a K-quant needs llama.cpp, which is not installed: put llama-quantize on the PATH, or"
    monkeypatch.setattr(doctor, "verdict", lambda offer: f"PASS  this build is slow: build it again: {build}; it helps")
    monkeypatch.setattr(doctor, "missing_packages", lambda registry: [f"{why} {install} (it is not here)"])
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["--color=never", "doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 60, "a quoted list of flags is broken, too"
    joined = re.sub(r" \\\n +", " ", "\n".join(lines))  # as a shell reads lines that end with a backslash
    assert build in joined and install in joined
    assert all(len(line) <= 60 for line in lines)


def test_command_names_of_other_tools_are_translated_to_existing_commands(capsys):
    known = {*load().offers["command"]}
    for word, ours in other_tools("commands").items():
        told, _ = run_failing(capsys, word, codes=(2,))
        assert f"use: toyexp {ours}" in told and word not in known
        first = shlex.split(ours)[0]
        assert first in known or "=" in first or first == "--version", ours


def test_help_for_another_tools_command_suggests_the_equivalent(capsys):
    for flag in ("--help", "-h"):
        assert "use: toyexp compare outputs --html report.html" in run_failing(capsys, "report", flag, codes=(2,))[0]
    assert main(["--help"]) == main(["recipe=warm", "--help"]) == 0
    assert capsys.readouterr().out.count("usage: toyexp") == 2


def known_settings():
    every = Keys.from_registry(load())
    keys = {f"{place}.{key}".lstrip(".") for place in every.classes for key in every.key_names(place)}
    return keys | {*every.classes, *GROUPS, "hydra.run.dir"}


def test_settings_of_other_tools_are_translated_to_existing_settings():
    every = Keys.from_registry(load())
    known = known_settings()
    for ours, theirs in other_tools("settings").items():
        assert not {*theirs.split()} & known, theirs
        for setting in re.sub(r" \(.*\)", "", ours).split():
            key, _, value = setting.strip("'~").partition("=")
            assert key in known or key.startswith(("callbacks.", "--dry-run")), ours
            for name in re.findall(r"\w+", value if key in GROUPS else ""):
                assert name in (*every.offers[key], "default"), ours
    options = load().offers["command"]["generate"].cls().parser().options
    for theirs, ours in other_tools("generate").items():
        assert theirs not in options and (not ours.startswith("--") or ours.split()[0] in options), ours


def test_the_page_for_users_of_other_tools_names_existing_settings_and_options():
    known, commands = known_settings(), load().offers["command"]
    page = (
        (PAGES / "guides" / "coming-from.md").read_text().partition("## nanoGPT")[2]
    )  # the part above has code, not settings
    assert "| `train.bin` of uint16 ids | `data=tokens data.path=train.bin data.dtype=uint16` |" in page
    rows = re.findall(r"^\| .+? \| (.+) \|$", page, re.MULTILINE)
    cells = [cell for row in rows for cell in re.findall(r"`([^`]+)`", row)]
    ours = [
        word.strip("'~") for cell in cells if not cell.startswith(("toyexp", "-", "{", "on_")) for word in cell.split()
    ]
    settings = [word for word in ours if re.match(r"[a-z_.]+(=|$)", word)]
    assert len(settings) > 80 and {word.partition("=")[0] for word in settings} - known == set()
    options = {option for offer in commands.values() for option in offer.cls().parser().options}
    assert {option for cell in cells for option in re.findall(r"--[a-z-]+", cell)} <= options | {"--config-dir"}
    assert {name for cell in cells for name in re.findall(r"^toyexp (\w+)", cell)} <= {*commands}


def test_errors_translate_settings_as_the_page_does():
    page = (PAGES / "guides" / "coming-from.md").read_text().partition("## nanoGPT")[2].partition("## llama.cpp")[0]
    known, answered = known_settings(), 0
    for theirs, ours in re.findall(r"^\| (.+?) \| (.+) \|$", page, re.MULTILINE):
        for key, value in re.findall(r"[`(]([a-z_\d]+)(?:=([^`) ]+))?[`)]", theirs):
            if key in known or any(name.endswith(f".{key}") and name in ours for name in known):
                continue  # the same name exists here
            answered += 1
            words = re.sub(r"=\.\.\.| \(.*", "", translate_setting(key, value or "...") or "nothing")
            assert words.partition("=")[0] in ours, (key, words)
            assert value in ("", "2", "3", "gpt2", '"gpu"') or words.split()[0] in ours, (key, value, words)
    assert answered > 50


NEWCOMERS = [
    (["recipe=wram"], "recipes"),
    (["stesp=10"], "runs"),
    (["train"], "runs"),
    (["--lr", "0.1"], "runs"),
    (["lr=abc"], "runs"),
    (["lr=1,2"], "sweeps"),
    (["-m", "seed=0,1", "sweep.launcher=slrum"], "sweeps"),
    (["experiment=fo"], "runs"),
    (["data=text"], "data"),
    (["data=text", "data.path=nope.txt"], "data"),
    (["data=examples"], "data"),
    (["model=lama"], "models"),
    (["model.d_model=17"], "models"),
    (["data=digits"], "models"),
    (["model.context=99999999", "steps=1"], "models"),
    (["recipe=lora"], "recipes"),
    (["recipe=full", "recipe.base=no.gguf"], "recipes"),
    (["recipe=warm", "recipe.donor=no.gguf"], "recipes"),
    (["engine=gpu"], "engines"),
    (["engine=metal"], "engines"),
    (["optim=adm"], "optimisers"),
    (["callbacks=[early_stopping]"], "callbacks"),
    (["resume=nope"], "resume"),
    (["resume=trained"], "resume"),
    (["hydra.run.dir=trained"], "outputs"),
    (["plugins=[nope]"], "plugins"),
    (["generate", "trained"], "after"),
    (["eval"], "after"),
    (["generate", "no.gguf", "--prompt", "x"], "after"),
    (["merge", "no.gguf", "x", "--out", "y"], "after"),
    (["merge", "no.gguf", "x", "--out"], "after"),
    (["compare", "trained", "--html", "-"], "compare"),
    (["plugins", "--check", "nope"], "plugins"),
    (["model.width=3"], "models"),
    (["data.path=nope"], "data"),
    (["export", "trained"], "exports"),
    (["compare"], "compare"),
    (["new", "modle", "x"], "plugins"),
    (["-m", "seed=0,1,0"], "sweeps"),
    (["-m", "lr=interval(0.1,1)"], "sweeps"),
    (["-m", "seed=range(0,9,0)"], "sweeps"),
]


def test_common_errors_name_the_help_page_that_explains_them(capsys):
    """The help command works offline, and the error stays one line."""
    assert main([*TINY, "hydra.run.dir=trained"]) == 0
    for words, topic in NEWCOMERS:
        told, _ = run_failing(
            capsys, *words, *(TINY if words[0].startswith(("resume=trained", "hydra")) else []), codes=(2,)
        )
        assert told.endswith(f"(more: toyexp help {topic})"), f"{words}: {told}"


@pytest.mark.parametrize(
    ("error", "topic"),
    [
        ("out of memory on cuda:0: a step needs 9 GB", "symptoms"),
        ("the loss is nan at step 12", "symptoms"),
        ("writing q4_k takes llama-quantize, which is not here", "exports"),
        ("--type=q4_k: did you mean q4_k_s?", "exports"),
        ("model.context=16: the training examples (3) have only prompt tokens within this context", "data"),
        ("model.context=99: a.gguf has a context of 30 tokens; use model.context=30 or less", "recipes"),
        ("checkpoint_keep=0: must be at least 1", "resume"),
        ("nonfinite=ignore: choose one of: skip, stop", "resume"),
        ("epochs=-1.0: must be above 0", "runs"),
        ("a file: No space left on device", ""),
        ("model.gguf: d_model=32 is too narrow", ""),
        ("my.yaml, line 4: recipe.base=a.gguf: is not a GGUF file", "recipes"),
        ("callbacks.sample needs a tokenizer: remove it", "callbacks"),
        ("recipe.targets: the model has no q_proj", "recipes"),
        ("callbacks.good failed at step 3: KeyError: 'x'; see outputs/x/log.txt", ""),
    ],
)
def test_errors_that_end_a_run_name_their_help_page(error, topic):
    assert page_about(error) == topic


def test_a_page_in_the_terminal_describes_its_pictures():
    told = read_page("callbacks")
    assert "(picture: A small ViT learns to read digits)" in told and "![" not in told


def test_every_page_that_an_error_may_name_exists():
    from toyexp.cli import pages

    named = {*pages._KEY_PAGES.values(), *pages._COMMAND_PAGES.values(), *(topic for _, topic in pages._ERROR_PAGES)}
    assert named <= {*topics()}
    assert {*KINDS} - {"command"} <= {*pages._KEY_PAGES} and {*pages._COMMAND_PAGES} <= {*load().offers["command"]}
