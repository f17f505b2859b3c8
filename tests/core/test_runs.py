"""`toyexp runs` and `toyexp compare`: what is here, what differs, how well it did."""

import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from made_runs import made

import toyexp
from toyexp.commands.line import main
from toyexp.runs.chosen import ordered
from toyexp.runs.found import Run
from toyexp.training.rundir import lock


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Runs of two recipes and rates below outputs/, one that was killed, and what is no run."""
    monkeypatch.chdir(tmp_path)
    for number, (recipe, lr, seed) in enumerate((r, lr, s) for r in ("scratch", "warm") for lr in (3e-3, 1e-2)
                                                for s in (0, 1)):  # fmt: skip
        made(f"outputs/sweep/{number}", recipe=recipe, lr=lr, seed=seed, steps=50)
    made("outputs/killed", reason=None, until=30, seed=9, steps=50)
    (tmp_path / "outputs/conf").mkdir()
    (tmp_path / "outputs/conf/config.yaml").write_text("steps: 3\n")  # somebody's configuration
    return tmp_path


def answered(capsys, *words):
    assert main(words) == 0
    return capsys.readouterr().out


def listed(capsys, *words):
    return json.loads(answered(capsys, "runs", *words, "--json"))["runs"]


def test_runs_says_of_each_what_it_was_and_how_far_it_came(here, capsys):
    runs = listed(capsys)
    assert len(runs) == 9
    one = next(run for run in runs if run["path"].endswith("sweep/7"))
    result = json.loads((here / "outputs/sweep/7/result.json").read_text())
    expected = {"name": "warm-llama", "recipe": "warm", "engine": "ggml", "lr": 0.01, "seed": 1, "steps": 50, "of": 50,
                "state": "completed"}  # fmt: skip
    assert {key: one[key] for key in expected} == expected
    assert one["loss"] == result["eval_loss"] and one["when"].startswith("2026-11-22T10:01")
    killed = next(run for run in runs if run["path"].endswith("killed"))
    last = [json.loads(line) for line in (here / "outputs/killed/events.jsonl").read_text().splitlines()]
    evals = [event["loss"] for event in last if event["kind"] == "eval"]
    assert (killed["state"], killed["steps"], killed["of"], killed["loss"]) == ("killed", 30, 50, evals[-1])
    table = answered(capsys, "runs").splitlines()
    assert "30/50" in table[-3] and "killed" in table[-3]  # begun last
    assert table[-1] == "9 runs: 8 completed, 1 killed"


def test_a_run_on_auto_is_of_the_engine_that_it_took(here, capsys):
    place = here / "outputs/sweep/0/config.yaml"
    place.write_text(place.read_text().replace("- engine: ggml", "- engine: auto"))
    assert "- engine: auto" in place.read_text() and "ggml)" in repr(toyexp.open(place.parent))
    assert len(listed(capsys, "engine=ggml")) == 9
    place.write_text(place.read_text().replace("name: ggml", "name: auto"))
    told = json.loads(answered(capsys, "compare", "outputs/sweep", "--json"))
    assert [len(point["runs"]) for point in told["points"]] == [2] * 4 and "engine" not in told["differ"]


def test_a_run_that_a_process_writes_runs(here, capsys):
    held = lock(here / "outputs/killed")
    try:
        assert [run["state"] for run in listed(capsys, "state=running")] == ["running"]
    finally:
        os.close(held)
    assert not listed(capsys, "state=running")  # this process is still there, and the run is not


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
    ],
)
def test_filters_take_columns_and_settings(here, capsys, words, count):
    assert len(listed(capsys, *words)) == count


@pytest.mark.parametrize(("key", "order"), [("loss", "cab"), ("-loss", "acb")])
def test_runs_without_the_value_that_sorts_come_last_both_ways(key, order):
    runs = [Run(Path("a"), loss=2.0), Run(Path("b")), Run(Path("c"), loss=1.0)]
    assert "".join(run.path.name for run in ordered(runs, key)) == order


def test_runs_are_sorted_by_a_column_or_a_setting(here, capsys):
    losses = [run["loss"] for run in listed(capsys, "--sort=-loss")]
    assert losses == sorted(losses, reverse=True)
    assert [run["seed"] for run in listed(capsys, "--sort", "seed", "--last", "1")] == [9]
    assert listed(capsys, "--sort", "optim.weight_decay")


@pytest.mark.parametrize("width", [80, 70])
def test_tables_fit_the_terminal_and_say_what_they_lack(here, capsys, monkeypatch, width):
    for number, lr in enumerate((3e-3, 1e-2)):
        settings = {"optim__weight_decay": 0.1, "optim__beta2": 0.9 + number / 100, "recipe": "warm", "steps": 50}
        made(f"outputs/other/{number}", lr=lr, scores={"accuracy": 0.5}, **settings)
    whole = answered(capsys, "runs").splitlines()
    assert max(map(len, whole)) > width and "ggml" in whole[1]  # to a file or a pipe everything goes
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(width))
    table = answered(capsys, "runs").splitlines()
    assert max(map(len, table)) <= width
    assert table[-1] == "11 runs: 10 completed, 1 killed" and "in all of them: engine ggml" in table[-3]
    assert "no room here for: name" in table[-2] and table[-2].endswith("; --csv has all")
    assert {"recipe", "lr", "held-out", "accuracy", "run"} < set(table[0].split()) and len(table) == 12 + 4
    compared = answered(capsys, "compare", "outputs").splitlines()
    assert max(map(len, compared)) <= width and "weight_decay" in compared[0] and "beta2" in compared[0]
    assert "held-out loss" in compared[0] and compared[1].endswith("best") and "speed" not in compared[0]
    assert any(line.startswith("no room here for: speed, train loss") for line in compared)


def test_csv_has_a_row_for_each_run(here, capsys):
    rows = list(csv.DictReader(io.StringIO(answered(capsys, "runs", "--csv", "recipe=warm"))))
    assert len(rows) == 4 and {row["recipe"] for row in rows} == {"warm"} and float(rows[0]["loss"]) > 0


def test_compare_has_means_over_seeds_with_the_deviation_of_a_sample(here, capsys):
    told = json.loads(answered(capsys, "compare", "outputs/sweep", "--json"))
    assert told["metric"] == "held-out loss" and len(told["points"]) == 4
    assert set(told["differ"]) == {"recipe", "lr", "seed", "name"}
    for point in told["points"]:
        losses = []
        for run in point["runs"]:
            losses.append(json.loads((here / run["path"] / "result.json").read_text())["eval_loss"])
            assert (run["recipe"], f"{run['lr']:g}") == tuple(f"{v}" for v in point["settings"].values())
        assert len(losses) == 2 and point["mean"] == pytest.approx(np.mean(losses))
        assert point["deviation"] == pytest.approx(np.std(losses, ddof=1))
    means = [point["mean"] for point in told["points"]]
    assert means == sorted(means) and [point["best"] for point in told["points"]] == [True, False, False, False]
    table = answered(capsys, "compare", "outputs/sweep").splitlines()
    assert table[0].split()[:4] == ["recipe", "lr", "runs", "steps"] and table[1].endswith("best")
    assert f"{means[0]:.4f} ± {told['points'][0]['deviation']:.4f}" in table[1]
    assert "8 runs in 4 points" in table[6]


def test_compare_takes_runs_sweeps_patterns_and_filters(here, capsys):
    def runs(*words):
        points = json.loads(answered(capsys, "compare", *words, "--json"))["points"]
        return sorted(run["path"] for point in points for run in point["runs"])

    both = ["outputs/sweep/0", "outputs/sweep/5"]
    assert runs(*both) == both and runs("outputs/sweep/[05]") == both and runs(*both, both[0]) == both
    assert runs("outputs", "seed=9") == ["outputs/killed"] and len(runs("outputs/s*p", "lr>0.003")) == 4


def test_a_run_that_did_not_end_counts_for_nothing_and_is_told(here, capsys):
    told = answered(capsys, "compare", "outputs")
    assert "not counted: 1 killed" in told
    (row,) = [line for line in told.splitlines() if line.split()[:2] == ["scratch", "0.003"] and "2/3" in line]
    assert "2-" not in row.split()[3]  # nor do its steps


def test_settings_that_go_along_with_another_stand_below_it(tmp_path, capsys):
    for number, (model, d_model, layers) in enumerate([("llama", 32, 1), ("gpt2", 64, 2), ("gpt2", 64, 2)]):
        made(tmp_path / str(number), model=model, model__d_model=d_model, model__n_layers=layers, seed=number, steps=5)
    table = answered(capsys, "compare", str(tmp_path)).splitlines()
    assert table[0].split()[:2] == ["model", "runs"] and "with model: model.d_model" in "\n".join(table)


def test_runs_of_two_lengths_are_said_to_be_where_the_table_has_no_column_of_it(tmp_path, capsys):
    for recipe, steps in (("scratch", 5), ("warm", 12)):
        made(tmp_path / recipe, recipe=recipe, steps=steps)
    assert "they were to take 5 or 12 steps" in answered(capsys, "compare", str(tmp_path))
    made(tmp_path / "longer", recipe="warm", steps=20)
    told = answered(capsys, "compare", str(tmp_path))  # steps are a column now
    assert "they were to take" not in told and told.splitlines()[0].count("steps taken") == 1
    heads = answered(capsys, "compare", str(tmp_path), "--csv").splitlines()[0].split(",")
    assert len(heads) == len(set(heads))


def test_a_score_that_rises_decides_by_metric(tmp_path, capsys):
    for number, accuracy in enumerate((0.5, 0.9, 0.7)):
        made(tmp_path / str(number), lr=10.0**-number, steps=5, scores={"accuracy": accuracy})
    told = json.loads(answered(capsys, "compare", str(tmp_path), "--metric", "accuracy", "--json"))
    assert [point["mean"] for point in told["points"]] == [0.9, 0.7, 0.5] and told["points"][0]["best"]
    rows = list(csv.DictReader(io.StringIO(answered(capsys, "compare", str(tmp_path), "--csv", "--metric=accuracy"))))
    assert [row["held-out accuracy"] for row in rows] == ["0.9", "0.7", "0.5"] and rows[0]["best"] == "best"


def test_where_no_run_was_evaluated_no_score_is_offered(tmp_path, capsys):
    made(tmp_path / "a", steps=20, eval_every=50, until=10)
    assert main(["compare", str(tmp_path), "--metric", "accuracy"]) == 2
    assert "none was evaluated; without --metric they go by train loss" in capsys.readouterr().err


def test_losses_over_other_data_are_said_not_to_compare(here, capsys):
    made("outputs/other", steps=50, data__max_mb=2.0)
    events = here / "outputs/other/events.jsonl"
    events.write_text(events.read_text().replace('"tokens_sha256": "ab"', '"tokens_sha256": "cd"'))
    told = answered(capsys, "compare", "outputs/other", "outputs/sweep")
    assert "their data differ (tokens_sha256)" in told and "best" not in told
    assert not any(p["best"] for p in json.loads(answered(capsys, "compare", "outputs", "--json"))["points"])
    assert not any(row["best"] for row in csv.DictReader(io.StringIO(answered(capsys, "compare", "outputs", "--csv"))))
    assert "their data differ" not in answered(capsys, "compare", "outputs/sweep")


def test_among_runs_without_a_number_none_is_the_best(tmp_path, capsys):
    for lr in (3e-3, 1e-2):
        made(tmp_path / str(lr), reason=None, until=30, lr=lr, steps=50)
    assert "best" not in answered(capsys, "compare", str(tmp_path))
    points = json.loads(answered(capsys, "compare", str(tmp_path), "--json"))["points"]
    assert [(point["mean"], point["best"]) for point in points] == [(None, False)] * 2


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["compare"], ["takes runs, sweeps"]),
        (["compare", "nowhere"], ["compare nowhere", "not found"]),
        (["compare", "outputs/x*"], ["matches no run"]),
        (["compare", "outputs/conf"], ["holds no run"]),
        (["compare", "outputs", "seed=77"], ["seed=77", "none of 9 runs"]),
        (["compare", "outputs", "--metric", "accuracy"], ["--metric accuracy", "no run here"]),
        (["runs", "nowhere"], ["runs nowhere", "no directory and no filter"]),
        (["runs", "optim.beta3=1"], ["optim.beta3=1", "no run here has optim.beta3", "beta2"]),
        (["runs", "loss<"], ["loss<", "takes a value"]),
        (["runs", "loss<abc"], ["loss<abc", "is a number"]),
        (["compare", "outputs", "--csv", "r.csv"], ["--csv r.csv", "--csv > r.csv"]),
        (["compare", "outputs", "--html", "report.pdf"], ["--html report.pdf", "--html report.html", "help compare"]),
        (["compare", "outputs", "--html", "-"], ["--html -", "--html report.html"]),
        (["compare", "outputs", "--html", "dangling.html"], ["dangling.html", "choose another name"]),
        (["runs", "--last", "0"], ["--last 0"]),
        (["runs", "--sort", "colour"], ["--sort colour", "no run here has colour"]),
        (["runs", "--json", "--csv"], ["--json --csv"]),
        (["runs", "--sorted"], ["did you mean --sort"]),
    ],
)
def test_what_cannot_be_is_told_in_a_line(here, capsys, words, told):
    (here / "dangling.html").symlink_to("nowhere.html")
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and all(word in error for word in told), error


def test_nothing_here_says_what_to_type(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert "begin one: toyexp" in answered(capsys, "runs")


def test_what_others_broke_is_passed_over(here, capsys):
    """A run directory may come from anyone: nothing in it hangs, raises, or reaches the terminal as it is."""
    bad = here / "outputs/bad"
    bad.mkdir()
    (bad / "config.yaml").write_bytes(b'name: "\\e[31mred"\nseed: [\n\xff\nsteps: 99999999999999999999\n')
    (bad / "result.json").write_text('{"steps": "many", "eval_loss": [1], "reason": 3, "eval_scores": {"a": "b"}}')
    os.mkfifo(bad / "events.jsonl")
    (one,) = [run for run in listed(capsys) if run["path"].endswith("bad")]
    assert one["steps"] is None and one["loss"] is None and one["scores"] == {}
    assert "\x1b" not in answered(capsys, "runs")


def test_whole_numbers_that_no_float_holds_are_passed_over(here, capsys):
    one = here / "outputs/sweep/7"
    result = json.loads((one / "result.json").read_text())
    (one / "result.json").write_text(json.dumps({**result, "tokens_per_second": 10**400}))
    text = (one / "config.yaml").read_text()
    (one / "config.yaml").write_text(text.replace("lr: 0.01", f"lr: {10**400}"))
    (run,) = [run for run in listed(capsys) if run["path"].endswith("sweep/7")]
    assert run["speed"] is None and run["loss"] == result["eval_loss"]
    assert len(listed(capsys, "outputs", "lr>0")) == 9
    points = json.loads(answered(capsys, "compare", "outputs", "--json"))["points"]
    assert sum(point["counted"] for point in points) == 8


def test_a_run_whose_settings_cannot_be_read_is_of_no_point_and_counts_for_nothing(here, capsys):
    before = answered(capsys, "compare", "outputs/sweep", "--json")
    made("outputs/sweep/bad\nname", recipe="warm", lr=1e-2, seed=7, steps=50)
    (here / "outputs/sweep/bad\nname/config.yaml").write_text("")
    (here / "outputs/killed/result.json").write_text("[1, 2]")
    after = json.loads(answered(capsys, "compare", "outputs/sweep", "outputs/killed", "--json"))
    assert [p["mean"] for p in after["points"] if p["counted"]] == [p["mean"] for p in json.loads(before)["points"]]
    assert [n for n in after["notes"] if "whose config.yaml cannot be read" in n and "bad" in n]
    assert [n for n in after["notes"] if "1 killed (result.json cannot be read)" in n]
    for command in ("runs", "compare"):
        assert "bad\\nname" in answered(capsys, command, "outputs/sweep")


def test_thousands_of_runs_take_a_moment(tmp_path):
    """Links to the files of one run: what is measured is how much is opened, and how much of it is read."""
    run = made(tmp_path / "one", steps=2000)
    for number in range(2_000):
        directory = tmp_path / "many" / f"{number // 100}" / f"{number}"
        directory.mkdir(parents=True)
        for name in ("config.yaml", "events.jsonl", "result.json"):
            os.link(run / name, directory / name)
    before = os.times()
    told = subprocess.run([sys.executable, "-m", "toyexp", "runs", str(tmp_path / "many"), "steps=2000", "--last", "3"],
                          capture_output=True, text=True, check=True)  # fmt: skip
    usage = os.times()
    assert told.stdout.splitlines()[-1] == "3 of 2000 runs: 3 completed"
    took = usage.children_user + usage.children_system - before.children_user - before.children_system
    assert took < 6
