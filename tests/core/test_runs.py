"""`toyexp runs` and `toyexp compare`: listing, filtering and comparing runs."""

import csv
import io
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from synthetic_runs import write_run

import toyexp
from toyexp.base.formatting import display_path, format_csv
from toyexp.cli.main import main
from toyexp.results.comparison import Comparison, Entry
from toyexp.results.filters import filter_runs, sort_runs, split_filters
from toyexp.results.report import _page_data
from toyexp.results.run_dirs import Run, read_run, unzip_archives
from toyexp.training.provenance import read_origin
from toyexp.training.rundir import lock


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Make runs of two recipes and rates below outputs/, a killed one, and other directories."""
    monkeypatch.chdir(tmp_path)
    for number, (recipe, lr, seed) in enumerate((r, lr, s) for r in ("scratch", "warm") for lr in (3e-3, 1e-2)
                                                for s in (0, 1)):  # fmt: skip
        write_run(f"outputs/sweep/{number}", recipe=recipe, lr=lr, seed=seed, steps=50)
    write_run("outputs/killed", reason=None, until=30, seed=9, steps=50)
    (tmp_path / "outputs/conf").mkdir()
    (tmp_path / "outputs/conf/config.yaml").write_text("steps: 3\n")  # a foreign configuration
    return tmp_path


def run_command(capsys, *words):
    assert main(words) == 0
    return capsys.readouterr().out


def list_runs(capsys, *words):
    return json.loads(run_command(capsys, "runs", *words, "--json"))["runs"]


def test_runs_lists_settings_and_progress_of_each_run(here, capsys):
    runs = list_runs(capsys)
    assert len(runs) == 9
    seventh = next(run for run in runs if run["path"].endswith("sweep/7"))
    result = json.loads((here / "outputs/sweep/7/result.json").read_text())
    expected = {"name": "warm-llama", "recipe": "warm", "engine": "ggml", "lr": 0.01, "seed": 1, "steps": 50, "of": 50,
                "state": "completed"}  # fmt: skip
    assert {key: seventh[key] for key in expected} == expected
    assert seventh["loss"] == result["eval_loss"] and seventh["when"].startswith("2026-11-22T10:01")
    killed = next(run for run in runs if run["path"].endswith("killed"))
    last = [json.loads(line) for line in (here / "outputs/killed/events.jsonl").read_text().splitlines()]
    evals = [event["loss"] for event in last if event["kind"] == "eval"]
    assert (killed["state"], killed["steps"], killed["of"], killed["loss"]) == ("killed", 30, 50, evals[-1])
    table = run_command(capsys, "runs").splitlines()
    assert "30/50" in table[-3] and "killed" in table[-3]  # begun last
    assert table[-1] == "9 runs: 8 completed, 1 killed"


def test_a_diverged_run_is_marked_and_counted(here, capsys):
    path = here / "outputs/sweep/0/result.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "diverged": True}))
    assert [run["path"] for run in list_runs(capsys, "state=diverged")] == ["outputs/sweep/0"]
    assert "9 runs: 7 completed, 1 diverged, 1 killed" in run_command(capsys, "runs")
    result = json.loads(run_command(capsys, "compare", "outputs/sweep", "--json"))
    assert [point["counted"] for point in result["points"]] == [2] * 4
    for number in ("4", "5"):  # both seeds of the best point
        path = here / "outputs/sweep" / number / "result.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "diverged": True}))
    table = run_command(capsys, "compare", "outputs/sweep")
    marks = [line.partition("/s")[2].strip() for line in table.splitlines()[1:5]]
    assert marks == ["2 of 2 diverged  best", "", "1 of 2 diverged", ""]
    assert "deviation (over n-1) of the completed runs, including diverged ones" in table
    assert run_command(capsys, "compare", "outputs/sweep/0").splitlines()[1].endswith("/s  diverged")


def test_reasons_for_failures_stand_below_the_table_and_equal_ones_once(here, capsys):
    for number in (0, 1):
        path = here / f"outputs/sweep/{number}/result.json"
        error = f"RunFailed: step 2: the loss is nan; {'try a lower lr, ' * 9}or nonfinite=skip"
        path.write_text(json.dumps({**json.loads(path.read_text()), "reason": "errored", "error": error}))
    lines = run_command(capsys, "runs", "outputs/sweep").splitlines()
    assert sum(" failed  " in line for line in lines) == 2 and "RunFailed" not in "\n".join(lines)
    assert [line for line in lines if "nan" in line] == [
        f"failed: outputs/sweep/1: {error.removeprefix('RunFailed: ')}"
    ]


def test_a_run_is_unreadable_only_if_its_settings_are(here, capsys):
    for name, file in (("0", "events.jsonl"), ("1", "config.yaml")):
        (here / "outputs/sweep" / name / file).unlink()
        os.mkfifo(here / "outputs/sweep" / name / file)
    states = {run["path"][-1]: run["state"] for run in list_runs(capsys)}
    assert (states["0"], states["1"]) == ("completed", "unreadable")
    assert list_runs(capsys, "state=unreadable")[0]["why"].startswith("config.yaml is a pipe")


def test_filters_match_metrics_by_four_decimals_and_rates_exactly(tmp_path, capsys):
    write_run(tmp_path / "a", steps=5, lr=0.00304, held_out=1.23456)
    for word, count in (("loss=1.2346", 1), ("loss=1.235", 0), ("lr=0.0030", 0), ("lr=0.00304", 1)):
        assert len(list_runs(capsys, str(tmp_path), word)) == count, word


def test_a_run_with_engine_auto_lists_the_chosen_engine(here, capsys):
    path = here / "outputs/sweep/0/config.yaml"
    path.write_text(path.read_text().replace("- engine: ggml", "- engine: auto"))
    assert "- engine: auto" in path.read_text() and "ggml)" in repr(toyexp.open(path.parent))
    assert len(list_runs(capsys, "engine=ggml")) == 9
    path.write_text(path.read_text().replace("name: ggml", "name: auto"))
    result = json.loads(run_command(capsys, "compare", "outputs/sweep", "--json"))
    assert [len(point["runs"]) for point in result["points"]] == [2] * 4 and "engine" not in result["differ"]


def test_a_locked_run_is_listed_as_running(here, capsys):
    held = lock(here / "outputs/killed")
    try:
        assert [run["state"] for run in list_runs(capsys, "state=running")] == ["running"]
    finally:
        os.close(held)
    assert not list_runs(capsys, "state=running")  # this process is still there, and the run is not


@pytest.mark.parametrize(
    ("words", "count"),
    [
        (["recipe=warm"], 4),
        (["recipe=warm,scratch", "state=completed"], 8),
        (["recipe!=warm"], 5),
        (["lr>3e-3"], 4),
        (["lr=0.0030"], 5),
        (["name=warm*", "seed=1", "lr<=0.003"], 1),
        (["steps>=50"], 8),
        (["engine.threads=1", "seed=9"], 1),
        (["optim.beta2=null"], 9),
        (["loss>1e9"], 0),
        (["name==warm-llama"], 4),
        (["optim.beta2=None"], 9),
        (["when>2020"], 9),
        (["when>2026-11-22T09:00+00:00", "when<=2026-11-23"], 9),
        (["when!=2026-11-21,2026-11-22"], 0),
        (["data=stdlib"], 9),
        (["ppl<10"], 4),
        (["loss<2.302585"], 4),
        (["ppl>1"], 9),
        (["when=2026-11-22"], 9),
        (["when!=2026-11-22"], 0),
        (["when=2026-11-21,2026-11-22"], 9),
        (["when=2026-11"], 9),
        (["when=2026-1?-22"], 9),
        (["when="], 0),
        (["when=today"], 0),
    ],
)
def test_filters_take_columns_and_settings(here, capsys, words, count):
    assert len(list_runs(capsys, *words)) == count


@pytest.mark.parametrize(("key", "order"), [("loss", "cab"), ("-loss", "acb")])
def test_runs_without_the_value_that_sorts_come_last_both_ways(key, order):
    runs = [Run(Path("a"), loss=2.0), Run(Path("b")), Run(Path("c"), loss=1.0)]
    assert "".join(run.path.name for run in sort_runs(runs, key)) == order


def test_runs_are_sorted_by_a_column_or_a_setting(here, capsys):
    losses = [run["loss"] for run in list_runs(capsys, "--sort", "-loss")]
    assert losses == sorted(losses, reverse=True)
    assert [run["seed"] for run in list_runs(capsys, "--sort", "seed", "--last", "1")] == [9]
    assert list_runs(capsys, "--sort", "optim.weight_decay")


@pytest.mark.parametrize("width", [80, 70])
def test_tables_fit_the_terminal_and_name_hidden_columns(here, capsys, monkeypatch, width):
    for number, lr in enumerate((3e-3, 1e-2)):
        settings = {"optim__weight_decay": 0.1, "optim__beta2": 0.9 + number / 100, "recipe": "warm", "steps": 50}
        write_run(f"outputs/other/{number}", lr=lr, scores={"accuracy": 0.5}, **settings)
    lines = run_command(capsys, "runs").splitlines()
    assert max(map(len, lines)) > width and "ggml" in lines[1]  # to a file or a pipe everything goes
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(width))
    table = run_command(capsys, "runs").splitlines()
    assert max(map(len, table)) <= width
    below = " ".join(" ".join(table[12:]).split())
    assert table[-1] == "11 runs: 10 completed, 1 killed" and "same for all runs: engine ggml" in below
    assert "columns left out to fit the terminal: accuracy" in below and "; --csv has all" in below
    assert {"recipe", "lr", "held-out", "run"} < set(table[0].split())
    scored = run_command(capsys, "runs", "outputs/other").splitlines()
    assert max(map(len, scored)) <= width and "accuracy" in scored[0]
    compared = run_command(capsys, "compare", "outputs").splitlines()
    assert max(map(len, compared)) <= width and "weight_decay" in compared[0] and "beta2" in compared[0]
    assert "held-out loss" in compared[0] and compared[1].endswith("best") and "speed" not in compared[0]
    assert any(line.startswith("columns left out to fit the terminal: speed, smoothed train loss") for line in compared)


@pytest.mark.parametrize("width", [80, 60])
def test_in_a_narrow_terminal_paths_have_lines_of_their_own(tmp_path, capsys, monkeypatch, width):
    monkeypatch.chdir(tmp_path)
    paths = [f"outputs/{seed}".ljust(width - 10, "x") for seed in (0, 1)]
    for seed, path in enumerate(paths):
        write_run(path, seed=seed, steps=50)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(width))
    lines = re.sub(r"\x1b\[\d*m", "", run_command(capsys, "runs")).splitlines()
    assert [lines[2], lines[4]] == [f"  {path}" for path in paths] and lines[5] == ""
    seed = lines[0].split().index("seed")
    assert "run" not in lines[0].split() and max(map(len, lines)) <= width
    assert [line.split()[-len(lines[0].split()) :][seed] for line in (lines[1], lines[3])] == ["0", "1"]


def test_in_a_narrow_terminal_long_paths_are_listed_below_their_common_directory(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    root = "outputs/" + "x" * 60
    for seed in (0, 1):
        write_run(f"{root}/{seed}", seed=seed, steps=50)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    lines = re.sub(r"\x1b\[\d*m", "", run_command(capsys, "runs")).splitlines()
    assert [line.split()[-1] for line in lines[:3]] == ["run", "0", "1"] and lines[3] == ""
    assert f"paths below\n{root}" in "\n".join(lines)
    (tmp_path / root).rename(tmp_path / "y")
    for seed in (0, 1):
        (tmp_path / f"y/{seed}").rename(tmp_path / f"y/{str(seed) * 50}")
    Path("y").rename(root)
    lines = re.sub(r"\x1b\[\d*m", "", run_command(capsys, "runs")).splitlines()
    assert [lines[2], lines[4]] == ["  " + "0" * 50, "  " + "1" * 50] and f"paths below\n{root}" in "\n".join(lines)


def test_a_single_run_has_no_note_of_common_values(here, capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "70")
    lines = run_command(capsys, "runs", "seed=9").splitlines()
    assert lines[-1] == "1 of 9 runs: 1 killed" and "columns left out to fit the terminal: " in "\n".join(lines)
    assert "same for all runs" not in "\n".join(lines)


def test_csv_has_a_row_for_each_run(here, capsys):
    rows = list(csv.DictReader(io.StringIO(run_command(capsys, "runs", "--csv", "recipe=warm"))))
    assert len(rows) == 4 and {row["recipe"] for row in rows} == {"warm"} and float(rows[0]["loss"]) > 0


def test_compare_has_means_over_seeds_with_the_deviation_of_a_sample(here, capsys):
    result = json.loads(run_command(capsys, "compare", "outputs/sweep", "--json"))
    assert result["metric"] == "held-out loss" and len(result["points"]) == 4
    assert set(result["differ"]) == {"recipe", "lr", "seed", "name"}
    for point in result["points"]:
        losses = []
        for run in point["runs"]:
            losses.append(json.loads((here / run["path"] / "result.json").read_text())["eval_loss"])
            assert (run["recipe"], f"{run['lr']:g}") == tuple(f"{v}" for v in point["settings"].values())
        assert len(losses) == 2 and point["mean"] == pytest.approx(np.mean(losses))
        assert point["deviation"] == pytest.approx(np.std(losses, ddof=1))
    means = [point["mean"] for point in result["points"]]
    assert means == sorted(means) and [point["best"] for point in result["points"]] == [True, False, False, False]
    table = run_command(capsys, "compare", "outputs/sweep").splitlines()
    assert table[0].split()[:4] == ["recipe", "lr", "runs", "steps"] and table[1].endswith("best")
    assert f"{means[0]:.4f} ± {result['points'][0]['deviation']:.4f}" in table[1]
    assert "8 runs in 4 points" in table[6]


def test_compare_takes_runs_sweeps_patterns_and_filters(here, capsys):
    def runs(*words):
        points = json.loads(run_command(capsys, "compare", *words, "--json"))["points"]
        return sorted(run["path"] for point in points for run in point["runs"])

    both = ["outputs/sweep/0", "outputs/sweep/5"]
    assert runs(*both) == both and runs("outputs/sweep/[05]") == both and runs(*both, both[0]) == both
    assert runs("outputs", "seed=9") == ["outputs/killed"] and len(runs("outputs/s*p", "lr>0.003")) == 4


def test_an_unfinished_run_is_not_counted_and_noted(here, capsys):
    output = run_command(capsys, "compare", "outputs")
    assert "1 killed run is not ranked" in output
    (row,) = [line for line in output.splitlines() if line.split()[:2] == ["scratch", "0.003"] and "2/3" in line]
    assert "2-" not in row.split()[3]  # nor do its steps


def test_settings_that_change_together_share_a_column(tmp_path, capsys):
    for number, (model, d_model, layers) in enumerate([("llama", 32, 1), ("gpt2", 64, 2), ("gpt2", 64, 2)]):
        write_run(
            tmp_path / str(number), model=model, model__d_model=d_model, model__n_layers=layers, seed=number, steps=5
        )
    table = run_command(capsys, "compare", str(tmp_path)).splitlines()
    assert table[0].split()[:2] == ["model", "runs"] and "with model: model.d_model" in "\n".join(table)


def test_different_run_lengths_are_noted_if_the_table_has_no_column_for_them(tmp_path, capsys):
    for recipe, steps in (("scratch", 5), ("warm", 12)):
        write_run(tmp_path / recipe, recipe=recipe, steps=steps)
    assert "runs were planned with 5 or 12 steps" in run_command(capsys, "compare", str(tmp_path))
    write_run(tmp_path / "longer", recipe="warm", steps=20)
    output = run_command(capsys, "compare", str(tmp_path))  # steps are a column now
    assert "runs were planned with" not in output and output.splitlines()[0].count("steps taken") == 1
    heads = run_command(capsys, "compare", str(tmp_path), "--csv").splitlines()[0].split(",")
    assert len(heads) == len(set(heads))


def test_a_metric_that_should_rise_is_ranked_descending(tmp_path, capsys):
    for number, accuracy in enumerate((0.5, 0.9, 0.7)):
        write_run(tmp_path / str(number), lr=10.0**-number, steps=5, scores={"accuracy": accuracy})
    result = json.loads(run_command(capsys, "compare", str(tmp_path), "--metric", "accuracy", "--json"))
    assert [point["mean"] for point in result["points"]] == [0.9, 0.7, 0.5] and result["points"][0]["best"]
    rows = list(
        csv.DictReader(io.StringIO(run_command(capsys, "compare", str(tmp_path), "--csv", "--metric=accuracy")))
    )
    assert [row["held-out accuracy"] for row in rows] == ["0.9", "0.7", "0.5"] and rows[0]["best"] == "best"


def test_without_evaluations_no_metric_is_offered(tmp_path, capsys):
    write_run(tmp_path / "a", steps=20, eval_every=50, until=10)
    assert main(["compare", str(tmp_path), "--metric", "accuracy"]) == 2
    assert "no run was evaluated; leave out --metric to compare the training loss" in capsys.readouterr().err


def test_losses_on_different_data_are_noted_as_not_comparable(here, capsys):
    write_run("outputs/other", steps=50, data__max_mb=2.0)
    events = here / "outputs/other/events.jsonl"
    events.write_text(events.read_text().replace('"tokens_sha256": "ab"', '"tokens_sha256": "cd"'))
    output = run_command(capsys, "compare", "outputs/other", "outputs/sweep")
    assert "the data differ between points (tokens)" in output and "best" not in output
    assert not any(p["best"] for p in json.loads(run_command(capsys, "compare", "outputs", "--json"))["points"])
    assert not any(
        row["best"] for row in csv.DictReader(io.StringIO(run_command(capsys, "compare", "outputs", "--csv")))
    )
    assert "data differ" not in run_command(capsys, "compare", "outputs/sweep")


def test_a_score_that_is_too_large_for_a_cell_has_four_digits(tmp_path, capsys):
    for seed in (0, 1):
        write_run(tmp_path / f"{seed}", steps=5, seed=seed, held_out=2.0, scores={"accuracy": -12345678.9})
        file = tmp_path / f"{seed}/result.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "eval_loss": 1e299 * (seed + 1)}))
    output = run_command(capsys, "runs", str(tmp_path)) + run_command(capsys, "compare", str(tmp_path))
    output += run_command(capsys, "compare", str(tmp_path), "--metric", "accuracy")
    cells = "  1e+299  ", "1.5e+299 ± 7.071e+298", "  -1.235e+07  ", "-1.235e+07 ± 0"
    assert all(cell in output for cell in cells)
    assert max(map(len, output.splitlines())) < 250


def test_a_score_beyond_1e300_does_not_count_with_a_note(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for number, score in enumerate((1e308, -1e308, 1e308, 1e308, 0.5)):
        write_run(f"r/{number}", steps=5, seed=number, lr=1e-3 if number < 3 else 1e-2, scores={"odd": score})
    note = "a held-out odd beyond 1e+300 does not count: 4 runs"
    for words in (["--json"], ["--csv"], [], ["--html", "a.html"], ["--plot", "a.svg"]):
        done = subprocess.run([sys.executable, "-m", "toyexp", "compare", "r", "--metric", "odd", *words],
                              capture_output=True, text=True, check=True)  # fmt: skip
        assert note in done.stdout + done.stderr and "Warning" not in done.stderr
        if words == ["--json"]:
            assert [(p["mean"], p["counted"]) for p in json.loads(done.stdout)["points"]] == [(0.5, 1), (None, 0)]


def test_without_finite_losses_no_run_is_the_best(tmp_path, capsys):
    for lr in (3e-3, 1e-2):
        write_run(tmp_path / str(lr), reason=None, until=30, lr=lr, steps=50)
    assert "best" not in run_command(capsys, "compare", str(tmp_path))
    points = json.loads(run_command(capsys, "compare", str(tmp_path), "--json"))["points"]
    assert [(point["mean"], point["best"]) for point in points] == [(None, False)] * 2


@pytest.mark.parametrize(
    ("words", "phrases"),
    [
        (["compare"], ["needs runs, sweeps"]),
        (["compare", "nowhere"], ["compare nowhere", "not found"]),
        (["compare", "outputs/x*"], ["matches no run"]),
        (["compare", "outputs/conf"], ["holds no run"]),
        (["compare", "outputs", "seed=77"], ["seed=77", "none of 9 runs"]),
        (["compare", "outputs", "--metric", "accuracy"], ["--metric accuracy", "no run here"]),
        (["runs", "nowhere"], ["runs nowhere", "not a directory, zip archive or filter"]),
        (["runs", "optim.beta3=1"], ["optim.beta3=1", "no run here has optim.beta3", "beta2"]),
        (["runs", "loss<"], ["loss<", "needs a number"]),
        (["runs", "loss<abc"], ["loss<abc", "needs a number"]),
        (["runs", "loss<nan"], ["loss<nan", "needs a number"]),
        (["runs", "loss<" + "x" * 10_000], ["loss<xxx", "xxx... (10006 characters) < needs a number"]),
        (["runs", "when>soon"], ["when>soon", "when>2026-11", "yesterday"]),
        (["runs", "recipe>abc"], ["recipe>abc", "is text", "recipe=..."]),
        (["runs", "recipe.init>3"], ["recipe.init>3", "is text (default)"]),
        (["runs", ""], ["runs ''", "an unset shell variable?"]),
        (["compare", ""], ["compare ''", "an unset shell variable?"]),
        (["compare", "outputs", "--html", "report.pdf"], ["--html report.pdf", "--html report.html", "help compare"]),
        (["compare", "outputs", "--html", "p.svg"], ["--html p.svg", "a file name that ends in .html"]),
        (["compare", "outputs", "--html", "-"], ["--html -", "--html report.html"]),
        (["runs", "when>16:50"], ["when>16:50", "when needs a date, a time, today"]),
        (["compare", "outputs", "--html", "dangling.html"], ["dangling.html", "choose another name"]),
        (["runs", "--last", "0"], ["--last 0"]),
        (["runs", "--sort", "colour"], ["--sort colour", "no run here has colour"]),
        (["runs", "--json", "--csv"], ["--json --csv"]),
        (["runs", "--sorted"], ["did you mean --sort"]),
    ],
)
def test_invalid_arguments_give_a_one_line_error(here, capsys, words, phrases):
    (here / "dangling.html").symlink_to("nowhere.html")
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and len(error) < 400 and all(word in error for word in phrases), error


def test_an_empty_directory_says_what_to_type(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert "start one with `toyexp`" in run_command(capsys, "runs")


def test_damaged_run_directories_are_skipped(here, capsys):
    """A run directory may come from anyone: nothing in it hangs, raises, or reaches the terminal as it is."""
    bad = here / "outputs/bad"
    bad.mkdir()
    (bad / "config.yaml").write_bytes(b'name: "\\e[31mred"\nseed: [\n\xff\nsteps: 99999999999999999999\n')
    (bad / "result.json").write_text('{"steps": "many", "eval_loss": [1], "reason": 3, "eval_scores": {"a": "b"}}')
    os.mkfifo(bad / "events.jsonl")
    (run,) = [run for run in list_runs(capsys) if run["path"].endswith("bad")]
    assert run["steps"] is None and run["loss"] is None and run["scores"] == {}
    assert "\x1b" not in run_command(capsys, "runs")


def test_integers_too_large_for_float_are_skipped(here, capsys):
    directory = here / "outputs/sweep/7"
    result = json.loads((directory / "result.json").read_text())
    (directory / "result.json").write_text(json.dumps({**result, "tokens_per_second": 10**400}))
    text = (directory / "config.yaml").read_text()
    (directory / "config.yaml").write_text(text.replace("lr: 0.01", f"lr: {10**400}"))
    (run,) = [run for run in list_runs(capsys) if run["path"].endswith("sweep/7")]
    assert run["speed"] is None and run["loss"] == result["eval_loss"]
    assert len(list_runs(capsys, "outputs", "lr>0")) == 9
    points = json.loads(run_command(capsys, "compare", "outputs", "--json"))["points"]
    assert sum(point["counted"] for point in points) == 8


def test_a_run_with_unreadable_settings_belongs_to_no_point(here, capsys):
    before = run_command(capsys, "compare", "outputs/sweep", "--json")
    write_run("outputs/sweep/bad\nname", recipe="warm", lr=1e-2, seed=7, steps=50)
    (here / "outputs/sweep/bad\nname/config.yaml").write_text("a: [")
    (here / "outputs/killed/result.json").write_text("[1, 2]")
    after = json.loads(run_command(capsys, "compare", "outputs/sweep", "outputs/killed", "--json"))
    assert [p["mean"] for p in after["points"] if p["counted"]] == [p["mean"] for p in json.loads(before)["points"]]
    assert [n for n in after["notes"] if "whose config.yaml cannot be read" in n and "bad" in n]
    assert [n for n in after["notes"] if "1 killed run is not ranked (result.json cannot be read)" in n]
    for command in ("runs", "compare"):
        assert "bad\\nname" in run_command(capsys, command, "outputs/sweep")
        assert "bad\\nname" in run_command(capsys, command, "outputs/sweep/bad\nname")  # among no others


def test_thousands_of_runs_are_listed_quickly(tmp_path):
    """Links to the files of one run: the test counts opened files and read bytes."""
    run = write_run(tmp_path / "one", steps=2000)
    for number in range(2_000):
        directory = tmp_path / "many" / f"{number // 100}" / f"{number}"
        directory.mkdir(parents=True)
        for name in ("config.yaml", "events.jsonl", "result.json"):
            os.link(run / name, directory / name)
    before = os.times()
    proc = subprocess.run([sys.executable, "-m", "toyexp", "runs", str(tmp_path / "many"), "steps=2000", "--last", "3"],
                          capture_output=True, text=True, check=True)  # fmt: skip
    usage = os.times()
    assert proc.stdout.splitlines()[-1] == "3 of 2000 runs: 3 completed"
    took = usage.children_user + usage.children_system - before.children_user - before.children_system
    assert took < 6


BOMBS = {
    "aliases": "a0: &a0 [1,1]\n" + "".join(f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 10)),
    "merges": "a0: &a0 {k: 1}\n" + "".join(
        f"a{i}: &a{i} {{<<: [{','.join([f'*a{i - 1}'] * 9)}]}}\n" for i in range(1, 10)),
    "recursive": "z: &z [*z]\n",
    "deep": "z: " + "[" * 300_000,
    "deeper than Python goes": "z: " + "[" * 2000 + "]" * 2000,
}  # fmt: skip


@pytest.mark.parametrize("bomb", BOMBS)
def test_exploding_yaml_aliases_stop_neither_runs_nor_compare(tmp_path, capsys, bomb):
    for name in "ab":
        write_run(tmp_path / name, steps=5)
    config = tmp_path / "b/config.yaml"
    config.write_text(config.read_text() + BOMBS[bomb])
    assert "whose config.yaml cannot be read" in " ".join(run_command(capsys, "compare", str(tmp_path)).split())
    assert len(list_runs(capsys, str(tmp_path), "engine.threads=1")) == 1


def test_filters_match_booleans_and_losses_as_printed(here, capsys):
    write_run("outputs/tied", model__tied=False, steps=5, held_out=3.03947)
    paths = [
        list_runs(capsys, *words)[0]["path"] for words in (["model.tied=False"], ["loss=3.0395"], ["model.tied=false"])
    ]
    assert (
        paths == ["outputs/tied"] * 3
        and not list_runs(capsys, "model.tied=True")
        and not list_runs(capsys, "lr=0.0031")
    )


def test_filters_find_todays_runs_and_those_of_a_sweep(here, capsys):
    (here / "outputs/sweep/sweep.json").write_text("{}")
    assert len(list_runs(capsys, "sweep=sweep")) == 8 and "sweep" in run_command(capsys, "runs").splitlines()[0].split()
    now = datetime.now(UTC)
    for days, name in enumerate(("scratch", "warm")):
        run = write_run(f"outputs/new/{name}", recipe=name, steps=5)
        events, when = run / "events.jsonl", (now - timedelta(days=4 * days)).isoformat()
        events.write_text(events.read_text().replace("2026-11-22T10:00:00.000+00:00", when))
    words = ("when>yesterday", "when<=yesterday", "when=today", "when!=today")
    assert [len(list_runs(capsys, "outputs/new", word)) for word in words] == [1, 1, 1, 1]


def test_yesterday_begins_a_day_before_today():
    late = datetime.now().astimezone().replace(hour=0, minute=0, second=0, microsecond=0) - timedelta(hours=1)
    _, filters = split_filters(["when>=yesterday", "when>=today"])
    assert [f.matches(late.isoformat()) for f in filters] == [True, False]


def test_an_unreadable_run_is_noted_as_not_filtered():
    notes = []
    run = Run(Path("a"), unread="config.yaml is a pipe")
    assert filter_runs([run], split_filters(["recipe=warm"])[1], notes) == []
    assert notes == ["settings unknown: a, config.yaml is a pipe"]


def sources(data="d1", **others):
    return {"data": data, "text": data, "tokenizer": "t", "tokens": data, **others}


def test_runs_with_different_schedules_are_different_points(tmp_path, capsys):
    """A second schedule, of another setting, makes a point of its own."""
    scaled = {"cosine": "lr", "linear": "lr", "linear_2": "weight_decay"}
    for names in (["cosine"], ["linear"], ["cosine", "linear_2"]):
        for seed in (0, 1):
            callbacks = {f"callbacks__{name}": {"name": name, "scales": scaled[name]} for name in names}
            write_run(tmp_path / f"{'-'.join(names)}-{seed}", seed=seed, held_out=3.0, **callbacks)
    assert main(["compare", str(tmp_path), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert sorted(point["settings"]["schedule"] for point in result["points"]) == [
        "cosine",
        "cosine,linear_2",
        "linear",
    ]
    assert [len(point["runs"]) for point in result["points"]] == [2, 2, 2]


@pytest.mark.parametrize("role", ["data", "base"])
def test_runs_of_other_data_or_another_base_are_never_one_point(tmp_path, capsys, monkeypatch, role):
    """Equal settings, seeds 0 to 3; the last two read other bytes at the same path."""
    monkeypatch.chdir(tmp_path)
    for seed in range(4):
        read = sources(**({"base": "b1"} | {role: "1122334455667788"} if seed > 1 else {"base": "b1"}))
        write_run(f"pa/{seed}", seed=seed, steps=5, held_out=1.0 + seed, sources=read)
    result = json.loads(run_command(capsys, "compare", "pa", "--json"))
    assert [(p["mean"], p["counted"], p["best"]) for p in result["points"]] == [
        (1.5, 2, role == "base"), (3.5, 2, False)]  # fmt: skip
    assert result["points"][1]["settings"] == {f"{role} digest": "11223344"}
    assert any(f"{role} digest" in note and "separate points" in note for note in result["notes"])
    assert any("cannot be compared" in note for note in result["notes"]) is (role == "data")
    table = run_command(capsys, "compare", "pa")
    assert f"{role} digest" in table.splitlines()[0] and "1.5000 ± 0.7071" in table and "3.5000 ± 0.7071" in table
    assert main(["compare", "pa", "--csv"]) == 0
    out, err = capsys.readouterr()
    rows = list(csv.DictReader(io.StringIO(out)))
    assert [row["held-out loss mean"] for row in rows] == ["1.5"] * 2 + ["3.5"] * 2 and "separate points" in err
    for form in ("--html", "--plot"):
        assert main(["compare", "pa", form, {"--html": "r.html", "--plot": "r.svg"}[form]]) == 0
        assert "separate points" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", ["abc", [1], 10**400])
def test_a_nan_loss_is_noted(tmp_path, capsys, monkeypatch, wrong):
    monkeypatch.chdir(tmp_path)
    for seed in range(2):
        write_run(f"runs/{seed}", seed=seed, steps=5, held_out=1.0)
    result = Path("runs/1/result.json")
    result.write_text(json.dumps({**json.loads(result.read_text()), "eval_loss": wrong}))
    for command in ("runs", "compare"):
        notes = json.loads(run_command(capsys, command, "runs", "--json"))["notes"]
        assert any("runs/1, result.json has " in note and note.endswith(" for eval_loss") for note in notes)


def test_compare_and_eval_use_the_same_recorded_digests(tmp_path):
    run = write_run(tmp_path / "run", steps=5, sources=sources("of run_start"))
    assert Entry(0, read_run(run), {}).sources == read_origin(run).sources == sources("of run_start")
    result = run / "result.json"
    result.write_text(json.dumps({**json.loads(result.read_text()), "sources": sources("of result.json")}))
    assert Entry(0, read_run(run), {}).sources == read_origin(run).sources == sources("of result.json")


def test_runs_without_digests_are_told_apart_by_facts_about_their_data(tmp_path, capsys):
    for seed in range(2):
        run = write_run(tmp_path / str(seed), seed=seed, steps=5)
        events = run / "events.jsonl"
        events.write_text(events.read_text().replace('"tokens_sha256": "ab"', f'"tokens_sha256": "{seed}"'))
    assert [p["counted"] for p in json.loads(run_command(capsys, "compare", str(tmp_path), "--json"))["points"]] == [
        1,
        1,
    ]


def test_equal_runs_of_a_class_are_told_apart_unless_they_are_pooled(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for person in ("ann", "bob"):
        for seed in (0, 1):
            write_run(f"class/{person}/outputs/{seed}", seed=seed, steps=5, held_out=1.0 + seed + (person == "bob"))

    def points(*words):
        result = json.loads(run_command(capsys, "compare", *words, "--json"))
        return [(point["settings"].get("whose"), point["mean"]) for point in result["points"]], result["notes"]

    apart, notes = points("class")
    assert apart == [("ann", 1.5), ("bob", 2.5)] and any("--pool" in note for note in notes)
    assert points("class", "--pool")[0] == [(None, 2.0)]
    assert points("class/ann")[0] == [(None, 1.5)]  # one person's seeds are one point
    first, second = "class/ann/outputs/0", "class/bob/outputs/1"
    assert points(first, second)[0] == [(None, 2.0)]
    for run in (first, second):  # of equal settings and other seeds, begun in different directories
        events = Path(run, "events.jsonl")
        events.write_text(events.read_text().replace('"schema"', f'"cwd": "/home/{run[6:9]}", "schema"'))
    assert points(first, second)[0] == [("ann", 1.0), ("bob", 3.0)]
    for person in ("cy", "di"):  # side by side, told apart by their names alone
        write_run(f"flat/{person}", steps=5, name=person, held_out=1.0 + (person == "di"))
    assert points("flat")[0] == [("cy", 1.0), ("di", 2.0)]


def test_copied_runs_are_told_apart_by_their_working_directories(tmp_path, capsys):
    for person in ("ann", "bob"):
        for seed in (0, 1):
            run = write_run(tmp_path / f"{person}{seed}", seed=seed, steps=5, held_out=1.0 + seed + (person == "bob"))
            events = run / "events.jsonl"
            events.write_text(events.read_text().replace('"schema"', f'"cwd": "/home/{person}", "schema"'))

    def points(*words):
        result = json.loads(run_command(capsys, "compare", *map(str, words), "--json"))
        return [(point["settings"].get("whose"), point["mean"]) for point in result["points"]]

    assert points(tmp_path) == [("/home/ann", 1.5), ("/home/bob", 2.5)]
    assert points(tmp_path, "--pool") == [(None, 2.0)]
    for person in ("ann", "bob"):
        write_run(tmp_path / "zips" / person / "run", steps=5, held_out=1.0)
        shutil.make_archive(str(tmp_path / person), "zip", tmp_path / "zips" / person)
    shutil.rmtree(tmp_path / "zips")
    zips = [tmp_path / "ann.zip", tmp_path / "bob.zip"]
    assert points(*zips) == [("ann.zip", 1.0), ("bob.zip", 1.0)]
    assert any(
        "2 points are equally good" in n
        for n in json.loads(run_command(capsys, "compare", *map(str, zips), "--json"))["notes"]
    )
    shutil.rmtree(tmp_path / "bob0")
    shutil.rmtree(tmp_path / "ann1")
    assert points(tmp_path) == [(None, 2.0)]  # seeds that one person may have begun in two places


def test_repeated_runs_are_told_apart_unless_they_have_other_seeds(tmp_path, capsys):
    def points():
        result = json.loads(run_command(capsys, "compare", str(tmp_path), "--json"))["points"]
        return [(point["settings"].get("whose"), point["mean"]) for point in result]

    for held_out, name in enumerate("ab", 1):
        write_run(tmp_path / name, steps=5, held_out=float(held_out))
    assert points() == [("a", 1.0), ("b", 2.0)]
    for name in "ab":
        events = tmp_path / name / "events.jsonl"
        events.write_text(events.read_text().replace('"schema"', '"cwd": "/content", "schema"'))
    assert points() == [(None, 1.5)]  # repeats of one person's
    write_run(tmp_path / "c", steps=5, seed=1, held_out=2.0)
    assert points() == [(None, 1.75)]  # the mean of both seeds


def test_a_run_whose_settings_cannot_be_read_adds_no_digest_to_those_of_others(tmp_path, capsys):
    for name, data in (("0", "d1"), ("1", "d1"), ("bad", "d2")):
        write_run(tmp_path / name, seed=int(name == "1"), steps=5, sources=sources(data))
    (tmp_path / "bad/config.yaml").write_text("")
    result = json.loads(run_command(capsys, "compare", str(tmp_path), "--json"))
    assert not any(point["settings"] for point in result["points"])
    assert not any("separate points" in note for note in result["notes"])


def archive(path, **members):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in members.items():
            file.writestr(name, data)


def test_a_zip_of_runs_is_listed_and_compared(here, capsys):
    shutil.make_archive("class", "zip", "outputs")
    assert len(list_runs(capsys, "class.zip")) == 9 and "9 runs: 8 completed" in run_command(
        capsys, "runs", "class.zip"
    )
    means = [[p["mean"] for p in json.loads(run_command(capsys, "compare", path, "--json"))["points"]]
             for path in ("outputs", "class.zip")]  # fmt: skip
    assert means[0] == means[1]


def test_a_zip_with_backslashes_in_names_is_read(here, capsys):
    directory = here / "outputs/killed"
    archive(
        "class.zip", **{f"ann\\run\\{path.name}": path.read_bytes() for path in directory.iterdir() if path.is_file()}
    )
    assert [run["path"] for run in list_runs(capsys, "class.zip")] == ["class.zip/ann/run"]


def test_a_zip_with_a_password_is_reported_as_encrypted(here, capsys):
    archive("class.zip", **{"a/config.yaml": "a: 1"})
    data = bytearray((here / "class.zip").read_bytes())
    data[6] |= 1  # the flag of the member, and of its entry in the directory
    data[data.index(b"PK\x01\x02") + 8] |= 1
    (here / "class.zip").write_bytes(data)
    assert main(["runs", "class.zip"]) == 2
    assert "class.zip: cannot be unzipped: " in (error := capsys.readouterr().err)
    assert "is encrypted, password required" in error


def test_messages_name_the_zip_and_not_its_temporary_directory(here, capsys):
    shutil.make_archive("class", "zip", "outputs")
    archive("none.zip", **{"a/config.yaml": "a: 1"})
    assert {run["path"] for run in list_runs(capsys, "class.zip", "seed=9")} == {"class.zip/killed"}
    outputs = [run_command(capsys, *words) for words in (
        ["runs", "class.zip"], ["runs", "class.zip", "--csv"], ["compare", "class.zip", "--csv"],
        ["compare", "class.zip", "--json"], ["compare", "class.zip", "--plot", "x.svg"])]  # fmt: skip
    assert all("class.zip/sweep/3" in text for text in outputs[:4])
    assert main(["compare", "none.zip"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("toyexp: error: compare none.zip: holds no run")
    with unzip_archives(["class.zip"]) as (path,):
        assert display_path(path) == "class.zip"
        data = _page_data(Comparison.build([read_run(Path(path, "killed"))]), None, 100, {})
        assert data["runs"][0]["path"] == "class.zip/killed" and "class.zip/killed" in data["runs"][0]["again"]
    assert "toyexp-" not in "".join([*outputs, error, (here / "x.svg").read_text()])


@pytest.mark.parametrize("words", [["runs"], ["compare"], ["resume="], ["sweep.resume="]])
def test_a_name_that_is_too_long_is_a_user_error(here, capsys, words):
    for name in ("x" * 300, "x" * 300 + ".zip"):
        assert main([f"{words[0]}{name}"] if "=" in words[0] else [*words, name]) == 2
        error = capsys.readouterr().err
        assert "File name too long" in error and error.count("\n") == 1 and len(error) < 300


def test_a_zip_that_reaches_outside_or_is_too_large_writes_nothing(here, capsys, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(here / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)
    (here / "tmp").mkdir()
    monkeypatch.setattr("toyexp.results.run_dirs.MAX_UNZIPPED_BYTES", 1000)
    archive("out.zip", **{"../config.yaml": "a: 1"})
    archive("dos.zip", **{"a\\..\\..\\config.yaml": "a: 1"})
    archive("big.zip", **{"a/config.yaml": b" " * 2000})
    (here / "bad.zip").write_bytes(b"PK\x03\x04" + b"x" * 50)
    for name, message in (
        ("out.zip", "leads out of the archive"),
        ("big.zip", "take more than"),
        ("bad.zip", "cannot be unzipped"),
        ("dos.zip", "leads out of the archive"),
    ):
        for command in ("runs", "compare"):
            assert main([command, name]) == 2
            error = capsys.readouterr().err
            assert name in error and message in error and error.count("\n") == 1
    assert not [*(here / "tmp").iterdir()] and not (here / "config.yaml").exists()


def test_directories_without_permission_are_reported(here, capsys, monkeypatch):
    real, denied = os.scandir, here / "outputs/sweep/3"

    def scandir(path):
        if Path(path) == Path("outputs/sweep/3"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr("toyexp.results.run_dirs.os.scandir", scandir)
    for name in ("config.yaml", "events.jsonl"):  # as root finds no file that it may not read
        (denied / name).unlink()
        os.mkfifo(denied / name)
    (here / "outputs/sweep/4/events.jsonl").unlink()
    os.mkfifo(here / "outputs/sweep/4/events.jsonl")
    for command in (["runs", "outputs"], ["runs", "outputs", "optim.grad_clip=0"], ["compare", "outputs/sweep"]):
        output = " ".join(run_command(capsys, *command).split())
        assert "sweep/3, config.yaml is a pipe" in output and "sweep/4, events.jsonl is a pipe" in output
    assert main(["runs", "outputs", "--csv"]) == 0
    assert "not read: outputs/sweep/3" in capsys.readouterr().err


def test_a_run_without_config_yaml_is_listed_as_unreadable(here, capsys):
    (here / "outputs/sweep/3/config.yaml").unlink()
    (here / "outputs/sweep/4/config.yaml").write_text("")
    records = {f"{n}/{name}": (here / "outputs/sweep" / n / name).read_text()
               for n in ("2", "3") for name in ("events.jsonl", "result.json")}  # fmt: skip
    archive("all.zip", **records, **{"2/config.yaml": (here / "outputs/sweep/2/config.yaml").read_text()})
    for where, runs in (("outputs", ("sweep/3", "sweep/4")), ("all.zip", ("all.zip/3",))):
        output = " ".join(run_command(capsys, "runs", where).split())
        compared = " ".join(run_command(capsys, "compare", where).split())
        for run in runs:
            assert f"{run}, config.yaml is missing or empty" in output and f"{len(runs)} unreadable" in output
            assert f"{run}, config.yaml is missing or empty" in compared
    (alone,) = (run for run in list_runs(capsys) if run["path"].endswith("sweep/3"))
    assert (alone["state"], alone["why"], alone["steps"]) == ("unreadable", "config.yaml is missing or empty", 50)


def test_a_config_yaml_without_settings_is_noted(here, capsys):
    (here / "outputs/sweep/3/config.yaml").write_text("- a list\n")
    for words in (["runs", "outputs"], ["compare", "outputs/sweep"]):
        assert "sweep/3, config.yaml holds no settings" in " ".join(run_command(capsys, *words).split())


def test_links_to_the_outside_are_not_followed_with_a_note(here, capsys):
    (here / "outputs/latest").symlink_to("sweep/0")  # listed as unreadable
    (here / "outputs/broken").symlink_to("nowhere")
    (here / "outputs/loop").symlink_to("loop")
    assert "not followed" not in run_command(capsys, "runs")
    write_run(here / "elsewhere/one", steps=50)
    (here / "outputs/a-run").symlink_to("../elsewhere/one")
    (here / "outputs/sweep/all").symlink_to(here / "elsewhere")
    said = "not followed: 2 links below outputs, such as outputs/a-run"
    assert said in " ".join(run_command(capsys, "runs").split()) and len(list_runs(capsys)) == 9
    assert said in " ".join(run_command(capsys, "compare", "outputs").split())
    assert main(["runs", "--csv"]) == 0 and said in capsys.readouterr().err
    (here / "alone").mkdir()
    (here / "alone/x").symlink_to("../elsewhere/one")
    assert "note: not followed: 1 link below alone, such as alone/x" in run_command(capsys, "runs", "alone")
    assert len(list_runs(capsys, "alone/x")) == 1, "one that is named is followed"


def test_only_the_records_of_runs_are_extracted_from_a_zip(here):
    archive("class.zip", **{"a/config.yaml": "a: 1", "a/model.gguf": "x", "a/checkpoints/step-1/arrays": "x"})
    with unzip_archives(["class.zip", "outputs"]) as (path, other):
        assert [path.name for path in Path(path).rglob("*") if path.is_file()] == ["config.yaml"]
    assert other == "outputs" and not Path(path).exists()


def test_the_loss_of_a_killed_run_is_the_smoothed_one(tmp_path):
    run = write_run(tmp_path / "run", reason=None, until=30, steps=50)
    events = map(json.loads, (run / "events.jsonl").read_text().splitlines())
    expected = 0.0
    for event in (event for event in events if event["kind"] == "step"):
        expected += min(20 / event["step"], 1) * (event["loss"] - expected)
    assert read_run(run).train_loss == pytest.approx(expected, rel=1e-12)


def test_the_best_of_many_runs_are_ranked_as_among_all(tmp_path):
    runs = [
        read_run(write_run(tmp_path / name, name=name, steps=5, lr=lr)) for name, lr in (("a", 1), ("b", 1), ("c", 2))
    ]
    comparison = Comparison.build(runs, pool=True)
    comparison.selection_notes = ["settings unknown: d"]
    best = comparison.best(2)
    assert best.pool and best.total_runs == 3 and len(best.entries) == 2
    assert {"settings unknown: d", "the best 2 of 3 runs are shown"} <= {*best.notes()}


@pytest.mark.parametrize("cell", ["=1+1", "+cmd|calc", "-x", "@SUM(A1)", "\tx"])
def test_csv_cells_cannot_be_formulas(tmp_path, capsys, cell):
    write_run(tmp_path / "a", steps=5, name=cell)
    (row,) = csv.DictReader(io.StringIO(run_command(capsys, "runs", str(tmp_path), "--csv")))
    assert row["name"] == f"'{cell}" and format_csv([[cell, "-1e-3"]]) == f"'{cell},-1e-3\n"


def test_an_empty_path_is_rejected():
    with pytest.raises(toyexp.UserError, match="must be a path, got ''"):
        toyexp.open("")
