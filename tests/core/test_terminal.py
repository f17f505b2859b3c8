"""Terminal output, its encoding, and paths as users type them."""

import ast
import contextlib
import importlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from structure import PUBLIC

import toyexp
from toyexp.base.tables import fit_table
from toyexp.base.terminal import (
    choose_colour,
    has_colour,
    print_error,
    print_line,
    print_output,
    print_usage,
    replace_unencodable,
    wrap_columns,
)
from toyexp.base.user_paths import expand_home, expand_path, quote_letters
from toyexp.cli.main import main
from toyexp.cli.pages import MAX_HITS, print_page
from toyexp.config.words import parse

TINY = ["data=random", "model.d_model=16", "model.n_layers=1", "engine=ggml", "engine.threads=1", "steps=1"]


def test_characters_missing_in_the_encoding_are_replaced(tmp_path):
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii", "LC_ALL": "C", "PYTHONUTF8": "0"}
    for words in (["describe", "modèle.gguf"], ["name=日本", "steps=0"], ["plugins", "é"]):
        done = subprocess.run(
            [sys.executable, "-m", "toyexp", *words], cwd=tmp_path, env=ascii_only, capture_output=True, text=True
        )
        assert done.returncode == 2, done.stderr
        assert done.stderr.startswith("toyexp: error: ") and done.stderr.count("\n") == 1, done.stderr


def test_characters_missing_in_the_encoding_become_question_marks(monkeypatch):
    for name, errors in (("stdout", "strict"), ("stderr", "backslashreplace")):  # as Python opens them
        monkeypatch.setattr(sys, name, io.TextIOWrapper(io.BytesIO(), "ascii", errors, write_through=True))
    replace_unencodable()
    print_line("40 steps · café")
    print_error("café.gguf: not found")
    assert sys.stdout.buffer.getvalue() == b"40 steps ? caf?\n"
    assert sys.stderr.buffer.getvalue() == b"toyexp: caf?.gguf: not found\n"


@pytest.mark.parametrize("words", [["--version"], ["--help"], ["--cfg", "job"]])
def test_the_status_line_is_erased_before_output(words):
    ours, theirs = os.openpty()
    subprocess.run([sys.executable, "-m", "toyexp", *words], stdout=theirs, stdin=subprocess.DEVNULL)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # the end of the file
        while more := os.read(ours, 1 << 16):
            shown += more
    os.close(ours)
    began, _, answer = shown.partition(b"starting")
    assert began == b"\r\r" and answer.startswith(b"\r        \r") and b"starting" not in answer


def test_only_words_longer_than_any_path_are_cut_in_errors(capsys):
    print_error(f"{'a/' * 249}b and {'c' * 500}")
    assert capsys.readouterr().err == f"toyexp: {'a/' * 249}b and {'c' * 200}... (500 characters)\n"


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("option", "variables", "in_terminal", "in_pipe"),
    [
        ("auto", {}, True, False),
        ("auto", {"NO_COLOR": "1"}, False, False),
        ("auto", {"NO_COLOR": ""}, True, False),  # an empty variable does not count: no-color.org
        ("auto", {"FORCE_COLOR": "1"}, True, True),
        ("auto", {"FORCE_COLOR": "0"}, True, False),
        ("auto", {"NO_COLOR": "1", "FORCE_COLOR": "1"}, False, False),
        ("auto", {"TERM": "dumb"}, False, False),
        ("always", {"NO_COLOR": "1"}, True, True),
        ("never", {"FORCE_COLOR": "1"}, False, False),
    ],
)
def test_the_option_precedes_the_variables_and_they_the_terminal(monkeypatch, option, variables, in_terminal, in_pipe):
    for name, value in {"NO_COLOR": "", "FORCE_COLOR": "", "TERM": "xterm", **variables}.items():
        monkeypatch.setenv(name, value)
    assert choose_colour(["runs", f"--color={option}", "lr=0.1"]) == ["runs", "lr=0.1"]
    assert (has_colour(Terminal()), has_colour(io.StringIO())) == (in_terminal, in_pipe)
    choose_colour([])


@pytest.mark.parametrize("word", ["--color", "--color=blue", "--colour=", "--color=ALWAYS"])
def test_an_unknown_colour_choice_is_rejected(word, capsys):
    assert main([word, "runs"]) == 2
    out, error = capsys.readouterr()
    assert f"{word}: type --color=auto" in error and not out


def test_only_our_words_are_coloured_and_codes_in_texts_are_escaped(monkeypatch, capsys):
    monkeypatch.setenv("NO_COLOR", "")
    monkeypatch.setenv("FORCE_COLOR", "1")
    print_error("error: data.path=\x1b[31mred: not found")
    print_error("warning: low memory")
    print_output("a\x1b[2Jb\n  ggml  PASS\n  cuda  FAIL no GPU\n0  lr=1  2.5  s/0-run  best\nthe best error: none")
    print_output("job  lr\x1b[0m", "bold")
    out, error = capsys.readouterr()
    red, yellow, green, bold = (f"\x1b[{code}m{{}}\x1b[0m".format for code in ("1;31", 33, 32, 1))
    key, best = bold(r"data.path=\x1b[31mred"), "\x1b[1;32mbest\x1b[0m"
    assert error.splitlines() == [
        f"{red('toyexp: error:')} {key}: not found", yellow("toyexp: warning:") + " low memory"
    ]  # fmt: skip
    assert out.splitlines() == [
        r"a\x1b[2Jb", f"  ggml  {green('PASS')}", f"  cuda  {red('FAIL')} no GPU",
        f"{bold('0  lr=1  2.5  s/0-run')}  {best}", "the best error: none", bold(r"job  lr\x1b[0m"),
    ]  # fmt: skip


def test_a_note_before_the_steps_of_a_run_is_yellow_and_other_words_are_not(monkeypatch, capsys):
    monkeypatch.setenv("NO_COLOR", "")
    monkeypatch.setenv("FORCE_COLOR", "1")
    print_output("note    2 of 2 cores busy\nnotes  lr=1\nnote that")
    assert capsys.readouterr().out == "\x1b[33mnote\x1b[0m    2 of 2 cores busy\nnotes  lr=1\nnote that\n"


def test_headings_commands_options_and_settings_of_a_help_text_are_coloured(monkeypatch, capsys):
    monkeypatch.setenv("NO_COLOR", "")
    monkeypatch.setenv("FORCE_COLOR", "1")
    print_usage(
        "commands\n  runs  List runs\n  --column X\n      width\n  lr=0.1  rate\n    toyexp lr=1\n\nA sentence."
    )
    heading, name, value = (f"\x1b[{code}m{{}}\x1b[0m".format for code in ("1", "1;36", "36"))
    assert capsys.readouterr().out.splitlines() == [
        heading("commands"), f"{name('  runs')}  List runs", name("  --column X"), "      width",
        f"{name('  lr')}{value('=0.1')}  rate", f"    {name('toyexp lr=1')}", "", "A sentence.",
    ]  # fmt: skip


def test_the_result_of_a_run_is_bold_and_labels_and_paths_have_the_terminals_own_colour(monkeypatch, capsys):
    monkeypatch.setenv("NO_COLOR", "")
    monkeypatch.setenv("FORCE_COLOR", "1")
    plain = "\nrun     outputs/a\nstep 20/60  60 k/s\n0  lr=1  3-warm-llama"
    print_output(f"held-out loss 6.9 -> 5.7{plain}")
    assert capsys.readouterr().out == f"\x1b[1mheld-out loss 6.9 -> 5.7\x1b[0m{plain}\n"


def test_a_wrapped_line_of_a_job_keeps_a_number_with_its_name(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    line = "[2] recipe=warm lr=0.001  completed after 60 steps  held-out 6.0709  3.77 s"
    assert wrap_columns(line, Terminal()).split("\n") == [line[:50], "    held-out 6.0709  3.77 s"]


@pytest.mark.parametrize(
    ("line", "typed"),
    [
        ("error: x; did you mean recipe? (more: toyexp help runs)", ["recipe", "toyexp help runs"]),
        ("error: cuda: none; use engine=cpu, or --engine", ["engine=cpu"]),
        (
            "note: see `toyexp doctor`, or pip install 'toyexp[all]' (big)",
            ["toyexp doctor", "pip install 'toyexp[all]'"],
        ),
        ("8 steps are saved; to resume: toyexp resume='a b/c' plugins=[x]", ["toyexp resume='a b/c' plugins=[x]"]),
        ("next  toyexp  # train", ["toyexp"]),
        (
            "error: the loss is nan; try a lower lr (it was 3), optim.grad_clip=1, or nonfinite=skip",
            ["lr", "optim.grad_clip=1", "nonfinite=skip"],
        ),
        ("      A=1 toyexp x", []),
        ("a.gguf: toyexp can write hf files", []),
        ("toyexp 0.1.0, Python 3.11", []),
        ("this toyexp reads format 3", []),
        ('  "error": "none; to resume: toyexp resume=a"', []),
    ],
)
def test_text_to_type_is_marked_in_messages_and_never_in_json(monkeypatch, capsys, line, typed):
    monkeypatch.setenv("NO_COLOR", "")
    monkeypatch.setenv("FORCE_COLOR", "1")
    print_output(line)
    out = capsys.readouterr().out
    assert re.findall(r"\x1b\[1;36m(.*?)\x1b\[0m", out) == typed
    assert re.sub(r"\x1b\[[\d;]*m", "", out) == f"{line}\n"


def test_states_are_coloured_and_secondary_text_is_not(monkeypatch, capsys):
    monkeypatch.setenv("NO_COLOR", "")
    monkeypatch.setenv("FORCE_COLOR", "1")
    green, yellow, red = (f"\x1b[{code}m{{}}\x1b[0m".format for code in (32, 33, "1;31"))
    for text, shown in {
        "0  completed  a/0": f"0  {green('completed')}  a/0",
        "0  pruned: bad": f"0  {yellow('pruned')}: bad",
        "completed after 9 steps": f"{green('completed')} after 9 steps",
        "lr=1  3  2 of 3 diverged": f"lr=1  3  {red('2 of 3 diverged')}",
        "diverged after 9 steps": f"{red('diverged')} after 9 steps",
        "2 of 2 within the tolerances": green("2 of 2 within the tolerances"),
        "1 of 2 within the tolerances": "1 of 2 within the tolerances",
        "9 runs: 7 completed, 2 pruned": "9 runs: 7 completed, 2 pruned",
        "same for all runs: lr 1": "same for all runs: lr 1",
        "next  toyexp eval a  # score": "next  \x1b[1;36mtoyexp eval a\x1b[0m  # score",
    }.items():
        print_output(text)
        assert capsys.readouterr().out == f"{shown}\n"


def test_data_for_programs_has_no_colours_and_headings_for_people_have(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["--color=always", *TINY, "hydra.run.dir=one"]) == 0
    capsys.readouterr()
    assert main(["--color=always", "runs", "one", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)
    for words in (["runs", "one"], ["help"], ["help", "start"], ["describe", "--help"], ["plugins"]):
        assert main(["--color=always", *words]) == 0
        assert "\x1b[1" in capsys.readouterr().out, words
        assert main(words) == 0
        assert "\x1b" not in capsys.readouterr().out, words


def test_texts_are_wrapped_below_their_column_and_commands_after_a_backslash(monkeypatch):
    text = (
        "  steps  the number of steps that the run trains\n  toyexp describe a/path/of/a/model.gguf 'a b' c=1\n\nshort"
    )
    assert wrap_columns(text) == text  # a pipe
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("COLUMNS", "30")
    assert wrap_columns(text).splitlines() == [
        "  steps  the number of steps", "         that the run trains",
        "  toyexp describe \\", "    a/path/of/a/model.gguf \\", "    'a b' c=1", "", "short",
    ]  # fmt: skip


def test_the_rest_of_a_line_begins_below_no_column_at_the_right_edge(monkeypatch):
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("COLUMNS", "30")
    lines = wrap_columns("steps  ten letters of it  then all the rest of it").splitlines()
    assert lines == ["steps  ten letters of it  then", "       all the rest of it"]


def test_a_wrapped_command_is_the_same_for_a_shell(monkeypatch):
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("COLUMNS", "30")
    command = "A='-b  c -d' pip install --no-deps 'a package' --no-cache-dir --no-binary a"
    _, *lines = wrap_columns(f"  cuda  no  is built without it; build it again: {command}").splitlines()
    begin = next(n for n, line in enumerate(lines) if "A=" in line)
    assert max(map(len, lines)) <= 30 and lines[begin].lstrip().startswith("A=")
    shell = subprocess.run(["sh", "-c", "\n".join(["set -- \\", *lines[begin:], 'printf "%s," "$@"'])],
                           capture_output=True, text=True)  # fmt: skip
    assert shell.stdout == ",".join(shlex.split(command)) + ","
    assert wrap_columns("12 long words before it; see toyexp help data").splitlines()[1] == "toyexp help data"


def test_a_terminal_shows_each_remedy_of_a_bad_loss_on_its_own_line(monkeypatch, capsys):
    error = "error: step 2: the loss is nan; try a lower optim.adamw_lr (it was 4), lr (it was 3), "
    error += "optim.grad_clip=1, or nonfinite=skip"
    print_error(error)
    assert capsys.readouterr().err == f"toyexp: {error}\n"  # in a log
    monkeypatch.setattr("toyexp.base.terminal.terminal_width", lambda stream=None: 100)
    print_error(error)
    assert capsys.readouterr().err.splitlines() == [
        "toyexp: error: step 2: the loss is nan",
        "  try a lower optim.adamw_lr (it was 4), lr (it was 3)",
        "  or optim.grad_clip=1",
        "  or nonfinite=skip",
    ]


def test_long_words_and_json_are_not_broken_and_errors_hang(monkeypatch):
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("COLUMNS", "30")
    line = '  "key": "a long text of several words",'
    assert wrap_columns(line) == line
    assert wrap_columns("toyexp: error: outputs/a/long/path/of/a/run: is no run").splitlines() == [
        "toyexp: error:", " outputs/a/long/path/of/a/run:", " is no run"
    ]  # fmt: skip
    commands = "  eval    toyexp eval outputs/a/long/path.gguf --x\n  export  toyexp export outputs/b.gguf"
    assert wrap_columns(commands).splitlines() == [
        "  eval    toyexp eval \\", "      outputs/a/long/path.gguf \\", "      --x",
        "  export  toyexp export \\", "            outputs/b.gguf",
    ]  # fmt: skip


def test_wrapped_commands_fit_the_terminal_with_their_backslashes(monkeypatch):
    monkeypatch.setattr(sys, "stdout", Terminal())
    command = "toyexp eval " + " ".join(f"--a={'b' * (number % 7)}" for number in range(30))
    for width in range(24, 60):
        monkeypatch.setenv("COLUMNS", str(width))
        lines = wrap_columns(f"  next  {command}").splitlines()
        assert max(map(len, lines)) <= width and all(line.endswith(" \\") for line in lines[:-1])
        assert " ".join(line.removesuffix("\\") for line in lines).split() == ["next", *command.split()]


def test_a_list_of_pages_that_mention_a_word_has_one_line_for_each(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    for width in (80, 110):
        monkeypatch.setattr(sys, "stdout", Terminal())
        monkeypatch.setenv("COLUMNS", str(width))
        assert main(["help", "gradient"]) == 0
        lines = sys.stdout.getvalue().splitlines()[-MAX_HITS:]
        assert all(line.startswith("  toyexp help ") and len(line) <= width for line in lines)
        assert any("gradient" in line[44:] for line in lines) and max(map(len, lines)) > width - 15


def test_a_table_of_a_page_breaks_long_words_and_cuts_none(monkeypatch):
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "40")
    print_page("| type | values |\n|---|---|\n| `'optim.beta2=choice(0.95,0.99)'` | one of these two values |\n")
    shown = sys.stdout.getvalue()
    assert "…" not in shown and max(map(len, shown.splitlines())) <= 40
    assert "'optim.beta2=choice(0.95,0.99)'" in "".join(line[:21].strip() for line in shown.splitlines())


def test_on_a_narrow_terminal_a_description_is_below_a_long_key(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    description = "rank of the adapters; null: the rank of recipe.adapter, or 8"
    text = f"  lr=1  {description}\n  recipe.rank=null        {description}"
    below = ["  recipe.rank=null", "      rank of the adapters; null: the rank of", "      recipe.adapter, or 8"]
    for width, shown in (
        (50, below),
        (80, [text.splitlines()[1].removesuffix(" recipe.adapter, or 8"), " " * 26 + "recipe.adapter, or 8"]),
    ):
        monkeypatch.setattr(sys, "stdout", Terminal())
        monkeypatch.setenv("COLUMNS", str(width))
        print_usage(text)
        lines = sys.stdout.getvalue().splitlines()
        assert lines[0].startswith("  lr=1  rank of") and lines[-len(shown) :] == shown, lines
    for usage in ("usage: toyexp describe FILE.gguf", "       toyexp describe FILE.gguf"):
        monkeypatch.setattr(sys, "stdout", Terminal())
        monkeypatch.setenv("COLUMNS", "50")
        print_usage(f"{usage}  {description}")
        first, *others = sys.stdout.getvalue().splitlines()
        assert first == usage and {len(line) - len(line.lstrip()) for line in others} == {11}


def test_help_has_coloured_headings_and_no_verdicts(monkeypatch):
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("COLUMNS", "30")
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.setenv(name, "")
    choose_colour([])
    monkeypatch.setenv("TERM", "xterm")
    print_usage("usage: toyexp runs\n\nthe parts of a run and their presets\n  --retry  run those that have failed")
    print_output("  --retry  run those that have failed\n[0]  failed")
    heading, name, red = (f"\x1b[{code}m{{}}\x1b[0m".format for code in ("1", "1;36", "1;31"))
    assert sys.stdout.getvalue().splitlines() == [
        f"{heading('usage:')} {name('toyexp runs')}", "", "\x1b[1mthe parts of a run and their", "presets\x1b[0m",
        f"{name('  --retry')}  run those that have", "           failed", "  --retry  run those that have",
        "           failed", f"[0]  {red('failed')}",
    ]  # fmt: skip


def test_a_table_fits_the_terminal_and_its_head_is_bold(monkeypatch):
    rows = [["op", "tensor", "result"], ["block 0"], ["matmul", "attn_q.weight", "[B, T, 64]"]]
    full = ["op      tensor         result", "block 0", "matmul  attn_q.weight  [B, T, 64]"]
    assert fit_table(rows, (), ["result"]) == full
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("COLUMNS", "30")
    head, *lines = fit_table(rows, (), ["result"])
    assert lines == ["block 0", "matmul  attn_q.weight", "columns left out to fit the terminal: result"]
    monkeypatch.setenv("NO_COLOR", "")
    monkeypatch.setenv("FORCE_COLOR", "1")
    print_line(head)
    assert "\x1b[1mop      tensor\x1b[0m" in sys.stdout.getvalue()


def test_public_names_are_imported_lazily():
    print_code = "print('numpy' in sys.modules)"
    program = f"import sys, toyexp; {print_code}; toyexp.Session; {print_code}"
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "False\nTrue\n"
    with pytest.raises(AttributeError, match="no attribute 'Plane'"):
        toyexp.Plane  # noqa: B018


@pytest.mark.parametrize("package", PUBLIC)
def test_public_names_match_those_for_type_checkers(package):
    surface = importlib.import_module(package)
    tree = ast.parse(Path(surface.__file__).read_text())
    imports = [
        node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module.startswith("toyexp.")
    ]
    seen = {alias.name: node.module for node in imports for alias in node.names if alias.name != "lazy"}
    assert sorted(seen) == sorted(surface.__all__)
    for name, module in seen.items():
        if (package, name) != ("toyexp", "sweep"):  # a package of that name, which is called as the function is
            assert getattr(surface, name) is getattr(importlib.import_module(module), name)


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("data.path=~/a.txt", "data.path=HOME/a.txt"),
        ("data.path=~/a.txt,~/b.txt", "data.path=HOME/a.txt,HOME/b.txt"),
        ("--to=~/b", "--to=HOME/b"),
        ("recipe.base=~", "recipe.base=HOME"),
        ("recipe.base=~nobody-of-this-name/a", "recipe.base=~nobody-of-this-name/a"),
        ("recipe.base=a~/b", "recipe.base=a~/b"),
        ("callbacks.sample.prompt='~/a'", "callbacks.sample.prompt='~/a'"),
        ("--prompt=~/a", "--prompt=~/a"),
        ("~callbacks.cosine", "~callbacks.cosine"),
    ],
)
def test_a_tilde_behind_an_equals_sign_is_the_home_directory(word, meant, monkeypatch):
    monkeypatch.setenv("HOME", "HOME")
    assert expand_home(word) == meant


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("data.path=books/Zoë.txt", "books/Zoë.txt"),
        ("data.path=My Zoë's.txt", None),  # the quote is the person's to close
        ("data.path=My Zoë.txt", "My Zoë.txt"),
        ("+data.path=日本語", "日本語"),
        ("data.path='Zoë.txt'", "Zoë.txt"),
        ("data.path=[a,Zoë, ü]", ["a", "Zoë", "ü"]),
        ("data.path={a:[é,1]}", {"a": ["é", 1]}),
    ],
)
def test_a_value_of_any_script_is_read_without_quotes(word, meant):
    if meant is None:
        assert quote_letters(word) == word
    else:
        (override,) = parse([quote_letters(word)])
        assert override.value() == meant


def test_a_path_with_an_accent_is_trained_on_and_swept_over(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TOYEXP_CACHE", str(tmp_path / "cache"))
    for name in ("Zoë.txt", "ü.txt"):
        Path(name).write_text("It was a bright cold day in April. " * 100)
    tiny = ["data=text", "data.tokenizer=byte", "model.d_model=16", "engine=ggml", "engine.threads=1", "steps=1"]
    assert main([*tiny, "data.path=Zoë.txt", "callbacks=[]", "hydra.run.dir=né"]) == 0
    assert Path("né/config.yaml").exists()
    sweep = ["-m", "sweep.isolate=false", "hydra.sweep.dir=s", "hydra.sweep.subdir=${hydra.job.num}"]
    assert main([*tiny, *sweep, "callbacks=[]", "data.path=Zoë.txt,ü.txt"]) == 0
    assert [yaml.safe_load(Path(f"s/{n}/config.yaml").read_text())["data"]["path"] for n in (0, 1)] == [
        "Zoë.txt", "ü.txt"
    ]  # fmt: skip
    assert main([*tiny, "data.path=nö.txt"]) == 2
    assert "data.path=nö.txt: not found" in capsys.readouterr().err


def test_a_tilde_in_a_configuration_file_is_the_home_directory(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.yaml").write_text("defaults: [/config, _self_]\nrecipe: {donor: ~/none.gguf}\n")
    assert main(["--config-path=~", "--config-name", "mine", "recipe=warm"]) == 2
    assert f"{tmp_path / 'none.gguf'}: not found" in capsys.readouterr().err
    assert expand_path("a ~/b") == "a ~/b" and expand_path(None) is None


@pytest.mark.parametrize("words", [["recipe=lora", "recipe.base=smol.gguf"], ["describe", "smol.gguf"]])
def test_a_missing_gguf_names_the_command_that_lists_models(words, capsys):
    assert main(words) == 2
    error = capsys.readouterr().err
    assert "smol.gguf: not found" in error and "toyexp models" in error


def test_busy_cores_are_a_separate_note(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("toyexp.base.threads._count_busy_now", lambda: 2)
    monkeypatch.setattr("toyexp.base.threads.machine_cores", lambda: 2)
    tiny = ["model.d_model=8", "model.n_heads=2", "model.n_kv_heads=1", "model.context=8", "model.n_layers=1"]
    run = ["engine=cpu", "engine.threads=2", "steps=1", "eval_every=0", "hydra.run.dir=run", *tiny]
    assert main([*run, "data=random", "callbacks=[events]"]) == 0
    (note,) = [line for line in capsys.readouterr().out.splitlines() if "busy" in line]
    assert note == "note    2 of 2 cores busy; engine.threads=1 may be faster"
    start = Path("run/events.jsonl").read_text().splitlines()[0]
    assert '"device": "torch ' in start and "cores busy" not in start


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
@pytest.mark.parametrize(
    ("words", "unbuffered"),
    [
        *((words, unbuffered) for words in (["--version"], ["--cfg", "job"]) for unbuffered in ("", "1")),
        (["doctor"], ""),
        (["bench", "engine=noop", "plugins=[toyexp.testing.null]"], ""),  # before anything is measured
        (["parity", "engine=noop,noop:nan_at=9", "plugins=[toyexp.testing.null]", "data=random", "steps=2"], ""),
    ],
)
def test_a_full_disk_behind_stdout_is_reported(words, unbuffered):
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "toyexp", *words], stdout=full, stderr=subprocess.PIPE, text=True, env=environment,
            check=False, timeout=60,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (
        1, "toyexp: error: the output could not be written: No space left on device\n"
    )  # fmt: skip
