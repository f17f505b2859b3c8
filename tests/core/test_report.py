"""report.html: its contents, and when a sweep writes it; test_report_page.py opens it in a browser."""

import base64
import gzip
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from synthetic_runs import write_run, write_sweep

from toyexp.base.drawing import thin_curve
from toyexp.cli.main import main
from toyexp.results.comparison import Comparison
from toyexp.results.events import History, average_bins
from toyexp.results.report import FIRST_DELAY, SweepReport, _page_data, compute_importance, pack_library, write_report
from toyexp.results.run_dirs import find_runs, read_run

pytest.importorskip("plotly", reason="the report: pip install 'toyexp[report]'")


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    here = write_sweep(tmp_path_factory.mktemp("report"))
    assert main(["compare", str(here / "runs"), "--html", str(here / "report.html")]) == 0
    return here


def page_data(page):
    packed = re.search(r'id="data">([^<]*)<', page.read_text())[1]
    return json.loads(gzip.decompress(base64.b64decode(packed)))


def test_the_page_is_self_contained_and_has_the_numbers_of_the_runs(swept):
    page = swept / "report.html"
    text = page.read_text()
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//""", text[: text.index('id="library"')])
    assert "default-src 'none'" in text and page.stat().st_size < 3_000_000
    data = page_data(page)
    assert len(data["runs"]) == 25 and len(data["points"]) == 7
    for run in data["runs"]:
        events = [json.loads(line) for line in (Path(run["path"]) / "events.jsonl").read_text().splitlines()]
        losses = [event["loss"] for event in events if event["kind"] == "step"]
        assert run["curves"]["loss"]["y"] == pytest.approx(losses, rel=1e-4)
        assert np.cumsum(run["curves"]["loss"]["x"]).tolist() == list(range(1, len(losses) + 1))
        held = [(event["step"], event["loss"]) for event in events if event["kind"] == "eval"]
        steps, values = run["held"].get("loss", [[], []])
        assert steps == [step for step, _ in held] and values == pytest.approx([loss for _, loss in held], rel=1e-4)
        assert run["again"] == f"toyexp --config-path {run['path']} --config-name config"


def test_a_thinned_curve_keeps_its_extremes():
    """Every stretch's lowest and highest, at their own steps; the mean is that of all steps."""
    values = np.random.default_rng(0).normal(size=25_000)
    values[[3_333, 17_001]] = 50, -50
    curve = np.arange(1, 25_001), values
    steps, thinned = thin_curve(*curve, 1000)
    assert len(steps) <= 1000 and steps.tolist() == sorted(set(steps))
    assert all(values[step - 1] == value for step, value in zip(steps, thinned, strict=True))
    assert {3_334, 17_002} <= set(steps)
    for stretch in values.reshape(500, 50):
        assert stretch.min() in thinned and stretch.max() in thinned
    _, averages = average_bins(curve, 250)
    assert averages == pytest.approx(values.reshape(250, 100).mean(1))
    assert thin_curve(*curve, 30_000)[1].tolist() == values.tolist()


def test_the_last_of_many_held_out_scores_is_always_drawn(tmp_path):
    run = write_run(tmp_path / "run", steps=62, eval_every=1)
    (run_data,) = _page_data(Comparison.build([read_run(run)]), None, 100, {})["runs"]
    steps, losses = run_data["held"]["loss"]
    assert len(steps) == len(losses) < 62 and (steps[0], steps[-1]) == (1, 62)


def test_unreadable_events_are_skipped(tmp_path):
    run = write_run(tmp_path / "run", steps=20, eval_every=10)
    with open(run / "events.jsonl", "a") as file:
        file.write(
            '[1]\n{"kind": "step", "step": "x", "loss": 1}\n{"kind": "step", "step": 21, "loss": null}\n'
            f'{{"kind": "step", "step": 22, "tokens": 5, "wall_us": 1{"0" * 400}, "loss": 1{"0" * 400}}}\n{{"kind": '
        )
    history = History.read(run)
    assert history.curve("loss")[0].tolist() == list(range(1, 21)) and len(history.held_out["loss"]) == 2


def test_impossible_steps_are_skipped_and_tokens_are_summed(tmp_path):
    """More steps than are parsed at once, with missing, negative and overflowing fields."""
    run = write_run(tmp_path / "run", steps=1200, eval_every=1200)
    odd = [{"step": 1201, "tokens": 5, "wall_us": 0}, {"step": 1202, "wall_us": 9}, {"step": 1203, "tokens": -7},
           {"step": -1, "tokens": 5, "wall_us": 9}, {"step": 1 << 64, "tokens": 5, "wall_us": 9}]  # fmt: skip
    with open(run / "events.jsonl", "a") as file:
        file.writelines(json.dumps({"kind": "step", "loss": 1.0, **event}) + "\n" for event in odd)
    history = History.read(run)
    curves = [history.curve(name)[0].tolist() for name in ("loss", "speed")]
    assert curves == [list(range(1, 1204)), list(range(1, 1201))]
    assert history.tokens[1198:].tolist() == [128 * 1199, 128 * 1200] + [128 * 1200 + 5] * 3


def test_runs_of_one_seed_count_once_in_mean_and_deviation(tmp_path):
    for name, seed, held_out in (("a", 0, 3.0), ("b", 0, 2.0), ("c", 1, 1.5)):
        write_run(tmp_path / name, seed=seed, steps=5, held_out=held_out)
    comparison = Comparison.build([read_run(path) for path in find_runs(tmp_path)])
    (point,) = comparison.ranking.points
    assert (point.mean, point.deviation) == pytest.approx((2.0, np.std([2.5, 1.5], ddof=1)))
    assert (len(point.jobs), len(point.values), point.repeats) == (3, 2, 1)
    assert "a run repeats another's settings and seed" in " ".join(comparison.notes())


def test_the_best_point_is_marked_only_among_several(tmp_path):
    for number, lr in enumerate((1e-2, 3e-3), 1):
        write_run(tmp_path / f"runs/{lr}", lr=lr, steps=5)
        page = tmp_path / f"{number}.html"
        assert main(["compare", str(tmp_path / "runs"), "--html", str(page)]) == 0
        assert page_data(page)["best"] is (number > 1)


@pytest.mark.parametrize("seven", [False, True])
def test_importance_of_a_grid_and_none_of_seven_runs(tmp_path, seven):
    """The recipe parts the ranks 1 to 8 in halves: 16 of 21 parts of their variance; the rate orders each half."""
    grid = [(r, lr) for r in ("scratch", "warm") for lr in (1e-3, 3e-3, 1e-2, 3e-2)]
    for number, (recipe, lr) in enumerate(grid[: 7 if seven else 8]):
        held_out = {"scratch": 3.0, "warm": 2.0}[recipe] + {1e-3: 0.3, 3e-3: 0.0, 1e-2: 0.1, 3e-2: 0.2}[lr]
        if seven:
            recipe, lr, held_out = "warm", 1e-3 * (number + 1), 3.0 + number
        write_run(tmp_path / str(number), recipe=recipe, lr=lr, steps=5 + seven * number // 2, held_out=held_out)
    shares, why = compute_importance(Comparison.build([read_run(path) for path in find_runs(tmp_path)]))
    if seven:
        assert not shares and "7 points are too few" in why
    else:
        assert list(shares) == ["recipe", "lr"] and shares["recipe"] == pytest.approx(0.8, abs=0.1) and not why


@pytest.mark.parametrize(
    ("words", "phrases"),
    [
        (["--html", "no/where.html"], ["--html no/where.html", "there is no directory no"]),
        (["--html", "runs"], ["--html runs", "must be a file name"]),
        (["--html", "mine.html"], ["--html mine.html", "not a report of toyexp"]),
        (["--html", "new.html", "--json"], ["--json", "cannot be combined"]),
    ],
)
def test_an_impossible_page_is_reported_and_replaces_nothing(swept, monkeypatch, capsys, words, phrases):
    monkeypatch.chdir(swept)
    Path("mine.html").write_text("my own notes")
    assert main(["compare", "runs", *words]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and all(word in error for word in phrases), error
    assert Path("mine.html").read_text() == "my own notes" and not Path("new.html").exists()


# -- of a sweep -------------------------------------------------------------------------------------------------------

SMALL = ["engine=ggml", "data=random", "model.n_layers=1", "model.d_model=16", "model.context=16", "batch_size=2",
         "eval_every=2", "callbacks=[events]", "sweep.isolate=false", "steps=4"]  # fmt: skip


def test_a_sweep_writes_its_report_by_default(tmp_path, monkeypatch, capsys):
    pytest.importorskip("ggml", reason="the ggml engine: pip install 'toyexp[ggml]'")
    monkeypatch.chdir(tmp_path)
    assert main(["-m", *SMALL, "lr=1e-2,1e-3", "seed=0,1", "hydra.sweep.dir=s"]) == 0
    assert "report  s/report.html" in capsys.readouterr().out.splitlines()
    data = page_data(tmp_path / "s/report.html")
    results = [json.loads(path.read_text())["eval_loss"] for path in sorted(tmp_path.glob("s/*/result.json"))]
    assert sorted(run["loss"] for run in data["runs"]) == pytest.approx(sorted(results))
    assert [point["counted"] for point in data["points"]] == [2, 2] and data["keys"] == ["lr"]
    (tmp_path / "s/report.html").write_text("mine")
    assert main(["sweep.resume=s"]) == 0
    assert "was not written by toyexp" in capsys.readouterr().out and (tmp_path / "s/report.html").read_text() == "mine"
    assert main(["-m", *SMALL, "seed=0,1", "hydra.sweep.dir=none", "sweep.report=false"]) == 0
    assert "report" not in capsys.readouterr().out and not (tmp_path / "none/report.html").exists()


def test_a_sweep_without_the_plotting_package_says_what_to_install(tmp_path, monkeypatch, capsys):
    write_run(tmp_path / "s/0", steps=5)
    pack_library.cache_clear()
    monkeypatch.setitem(sys.modules, "plotly", None)
    SweepReport()(tmp_path / "s", True)
    assert "pip install 'toyexp[report]' (to write no report: sweep.report=false)" in capsys.readouterr().out


def test_a_report_is_refreshed_within_a_time_budget_and_reads_only_new_events(tmp_path, monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr("toyexp.results.report.time.monotonic", lambda: now[0])
    read = []
    monkeypatch.setattr(
        History, "read", classmethod(lambda cls, run, old=History.read: read.append(run.name) or old(run))
    )
    report, page = SweepReport(), tmp_path / "s/report.html"
    write_run(tmp_path / "s/0", steps=5)
    now[0] = FIRST_DELAY - 1
    report(tmp_path / "s", False)
    assert not page.exists()
    now[0] = FIRST_DELAY
    report(tmp_path / "s", False)
    assert len(page_data(page)["runs"]) == 1
    write_run(tmp_path / "s/1", steps=5, seed=1)
    report(tmp_path / "s", False)
    assert len(page_data(page)["runs"]) == 1
    now[0] += FIRST_DELAY
    report(tmp_path / "s", False)
    assert len(page_data(page)["runs"]) == 2 and read == ["0", "1"] and not capsys.readouterr().out
    with (tmp_path / "s/1/events.jsonl").open("a") as events:
        events.write(json.dumps({"kind": "warning", "step": 5, "text": "late"}) + "\n")
    now[0] += FIRST_DELAY
    report(tmp_path / "s", False)
    assert [run["warned"] for run in page_data(page)["runs"]] == [0, 1] and read == ["0", "1", "1"]
    assert len(report._known) == 2, "the data of a run's earlier events is dropped"


def test_only_the_best_of_very_many_runs_are_shown(tmp_path, monkeypatch):
    monkeypatch.setattr("toyexp.results.report.MAX_RUNS", 3)
    for number in range(5):
        write_run(tmp_path / f"s/{number}", steps=5, lr=10.0**-number, held_out=float(5 - number))
    comparison = Comparison.build([read_run(path) for path in find_runs(tmp_path / "s")])
    write_report(comparison, tmp_path / "r.html", "five")
    data = page_data(tmp_path / "r.html")
    assert [run["loss"] for run in data["runs"]] == [1.0, 2.0, 3.0]
    assert "the best 3 of 5 runs are shown" in data["notes"]
