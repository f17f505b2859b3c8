"""Plots of sweeps and searches: their texts, their contents, and files that they never replace."""

import itertools
import json
import math
import re
import subprocess
import sys
import xml.dom.minidom
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from drawings import svg_texts
from matplotlib.image import imread
from synthetic_runs import write_run

from toyexp.base.drawing import COLOURS, Sheet, fit_text, fit_y_axis, format_number, is_own_plot
from toyexp.base.errors import UserError
from toyexp.cli.main import main
from toyexp.results.comparison import Comparison
from toyexp.results.plot import Line, draw_sheet
from toyexp.results.plot_search import Search
from toyexp.results.run_dirs import find_runs, read_run

SWEEP = ["-m", "engine=ggml", "data=random", "model.n_layers=1", "model.d_model=16", "model.context=16", "batch_size=2",
         "eval_every=2", "steps=4", "lr=5,1e-2", "seed=0,1", "sweep.isolate=false", "sweep.report=false"]  # fmt: skip


def plot_texts(capsys, *words):
    """Return the texts in the plot that `compare --plot` writes."""
    assert main(["compare", *words[:-1], "--plot", words[-1]]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"plot    {words[-1]}, ") and out.count("\n") == 1
    return svg_texts(Path(words[-1]))


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    """Two recipes and three rates with three seeds each; one run was killed, and one choice goes through the roof."""
    here = tmp_path_factory.mktemp("grid")
    for number, (recipe, lr, seed) in enumerate((r, lr, s) for r in ("scratch", "warm") for lr in (1e-3, 3e-3, 1e-2)
                                                for s in (0, 1, 2)):  # fmt: skip
        write_run(here / f"runs/{number:02}", recipe=recipe, lr=lr, seed=seed, steps=100)
    write_run(here / "runs/killed", reason=None, until=60, recipe="warm", lr=3e-3, seed=3, steps=100)
    write_run(here / "runs/wild", recipe="scratch", lr=0.5, seed=0, steps=100, held_out=40.0)
    return here


@pytest.fixture(autouse=True)
def change_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_plot_of_runs_names_the_swept_settings_and_final_losses(grid, capsys):
    words = plot_texts(capsys, str(grid / "runs"), "curves.svg")
    assert "recipe scratch, warm; lr 0.001, 0.003, 0.01, 0.5; 4 seeds" in " ".join(words), "× needs all combinations"
    common = "20 runs · llama · stdlib · ggml · 100 steps · 1 did not complete"
    plain = " ".join(words).replace(" · ", " ")
    assert common.replace(" · ", " ") in plain, "in one line or two, by how long the place is"
    ranking = Comparison.build([read_run(path) for path in find_runs(grid / "runs")]).ranking
    rows = [word for word in words if re.fullmatch(r"(scratch|warm)  lr=[\d.]+", word)]
    best = ranking.points[0].jobs[0].run
    assert rows[0] == f"{best.recipe}  lr={best.lr:g}" and len(rows) == 7
    ends = [word for word in words if "±" in word and "over" not in word and not word.startswith("Best")]
    for text, point in zip(ends, ranking.points, strict=False):
        mean, deviation = map(float, text.removesuffix(", best").split(" ± "))
        assert mean == pytest.approx(np.mean(point.values), abs=0.02)
        assert deviation == pytest.approx(np.std(point.values, ddof=1), rel=0.06)
    assert [text.endswith("best") for text in ends] == [True] + [False] * 5
    assert "↑ 1 run above the shown range, up to 40" in words
    assert "× recipe=warm  lr=0.003" in words or ("× warm  lr=0.003" in words and "killed at step 60" in words)
    assert "held-out loss (nats per token)" in words
    runs = Comparison.build([read_run(path) for path in find_runs(grid / "runs")])
    above, below = draw_sheet(runs, "runs").panels
    crosses = [line.get_xdata().tolist() for line in above.lines if line.get_marker() == "x"]
    assert crosses == [[60]], "a cross marks the last step of the run that was killed"
    assert max(above.get_ylim()) < 10 and max(below.get_xlim()) < 10, "axes fit the other runs"


def test_the_lower_panel_stays_readable_in_a_journals_column_beside_a_diverged_run(tmp_path):
    for number, (lr, seed) in enumerate((lr, seed) for lr in (0.003, 0.01, 100.0) for seed in (0, 1)):
        write_run(tmp_path / f"runs/{number}", lr=lr, seed=seed, steps=100)
        events = tmp_path / f"runs/{number}/events.jsonl"
        lines = [json.loads(line) for line in events.read_text().splitlines()]
        for line in lines:
            if lr == 100.0 and line["kind"] in ("step", "eval"):
                line["loss"] = 5.0 if line["step"] <= 25 + 25 * seed else line["step"] * 1e4
        events.write_text("".join(json.dumps(line) + "\n" for line in lines))
        result = json.loads((tmp_path / f"runs/{number}/result.json").read_text())
        (tmp_path / f"runs/{number}/result.json").write_text(json.dumps({**result, "diverged": lr == 100.0}))
    comparison = Comparison.build([read_run(path) for path in find_runs(tmp_path / "runs")])
    sheet = draw_sheet(comparison, "runs")
    sheet.pictures(".svg", column="single")
    above, below = sheet.panels
    texts = [text.get_text() for text in below.texts]
    assert "diverged by step 50" in texts and above.get_title(loc="right").endswith("up to 1e6")
    assert above.get_ylim()[1] < 10, "the axis fits the runs that did not diverge"
    assert below.get_window_extent().width > 0.35 * sheet.figure.bbox.width


def test_a_journals_column_has_thinner_lines_enough_ticks_and_no_dot_at_the_end_of_a_line(grid):
    sheet = draw_sheet(Comparison.build([read_run(path) for path in find_runs(grid / "runs")]), str(grid))
    lines = [line for line in sheet.panels[0].lines if line.get_marker() == "o"]
    before = [(line.get_linewidth(), line.get_markersize()) for line in lines]
    for column, scale in (("single", 0.7), ("double", 0.9), (None, 1.0)):
        sheet.pictures(".svg", column=column)
        after = [(line.get_linewidth(), line.get_markersize()) for line in lines]
        np.testing.assert_allclose(after, scale * np.array(before))
        low, high = sheet.panels[1].get_xlim()
        assert sum(low <= tick <= high for tick in sheet.panels[1].get_xticks()) >= 3, column
        assert not any(line.endswith("·") for line in sheet._below_text.get_text().splitlines()), column


def test_means_in_a_plot_are_those_of_the_table(tmp_path, capsys):
    for number, (lr, held_out) in enumerate(((0.01, 4.60821), (0.01, 4.66677), (0.1, 2e6))):
        write_run(tmp_path / f"runs/{number}", lr=lr, seed=number, held_out=held_out, steps=20)
    sheet = draw_sheet(Comparison.build([read_run(path) for path in find_runs(tmp_path / "runs")]), "runs")
    beside = [text.get_text() for text in sheet.panels[1].texts]
    assert beside == ["4.6375 ± 0.0414, best", "2000000.0000"] and "4.6375 ± 0.0414" in sheet._title
    assert main(["compare", str(tmp_path / "runs")]) == 0
    assert all(text.removesuffix(", best") in capsys.readouterr().out for text in beside[:1])


def test_long_labels_of_rows_leave_room_for_the_panel_in_a_journals_column(tmp_path):
    for number, (recipe, decay) in enumerate((recipe, decay) for recipe in ("scratch", "warm") for decay in (0.0, 0.1)):
        write_run(tmp_path / f"runs/{number}", recipe=recipe, optim__weight_decay=decay, optim__grad_clip=decay + 1)
    write_run(tmp_path / "runs/4", recipe="warm", optim__weight_decay=0.5, optim__grad_clip=2.0, until=9, reason=None)
    sheet = draw_sheet(Comparison.build([read_run(path) for path in find_runs(tmp_path / "runs")]), "runs")
    below = sheet.panels[1]
    for column, named in (("double", True), ("single", False), (None, True)):
        sheet.pictures(".svg", column=column)
        labels = [label.get_text() for label in below.get_yticklabels()]
        assert all(("weight_decay=" in label) == named for label in labels) and labels[-1].startswith("×")
        assert below.get_window_extent().width > 0.3 * sheet.figure.bbox.width
        assert min(label.get_window_extent().x0 for label in below.get_yticklabels()) >= 0


def test_a_plot_of_diverged_runs_shows_all_their_losses(tmp_path):
    runs = [write_run(tmp_path / f"runs/{seed}", steps=100, seed=seed) for seed in (0, 1)]
    for run in runs:
        lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
        lines = [{**line, "loss": 5.0 + 9.0 * line["step"]} if "loss" in line else line for line in lines]
        (run / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        result = json.loads((run / "result.json").read_text())
        (run / "result.json").write_text(json.dumps({**result, "diverged": True, "eval_loss": 905.0}))
    for some, title in ((runs, "2 of 2 diverged"), (runs[:1], "scratch-llama: diverged at step 2")):
        sheet = draw_sheet(Comparison.build([read_run(run) for run in some]), "runs")
        assert sheet.panels[0].get_ylim()[1] > 905 and title in repr(sheet.figure._suptitle)


@pytest.mark.parametrize(
    ("value", "digits", "shown"),
    [(1e-5, 4, "1e-5"), (2.5e-10, 4, "2.5e-10"), (0.00012, 4, "0.00012"), (148296.0, 4, "148,300"),
     (1482960.0, 4, "1.483e6"), (-1e30, 4, "-1e30"), (123456.0, 6, "123,456"), (0.0, 4, "0")],
)  # fmt: skip
def test_numbers_of_plots_have_separators_or_short_exponents(value, digits, shown):
    assert format_number(value, digits) == shown
    assert float(shown.replace(",", "")) == pytest.approx(value, rel=10.0 ** (1 - digits))


@pytest.mark.parametrize("losses", ["aa", "ab"])
def test_a_plot_says_if_losses_cannot_be_compared(tmp_path, capsys, losses):
    for i, digest in enumerate(losses):
        write_run(f"runs/{i}", lr=10.0 ** -(i + 2), steps=50, sources={"data": "d", "loss": digest})
    words = " ".join(plot_texts(capsys, "runs", "curves.svg"))
    said = "the objectives differ between points: losses cannot be compared"
    assert said in words if losses == "ab" else "compared" not in words


def test_the_band_is_the_mean_and_the_deviation_over_seeds_at_each_step(grid):
    runs = [read_run(path) for path in find_runs(grid / "runs")]
    seed_runs = [run for run in runs if (run.recipe, run.lr) == ("warm", 3e-3)]
    (point,) = Comparison.build(seed_runs).ranking.points
    line = Line.read(point, "held-out loss")
    curves = []
    for run in seed_runs:
        events = [json.loads(text) for text in (run.path / "events.jsonl").read_text().splitlines()]
        curves.append({event["step"]: event["loss"] for event in events if event["kind"] == "eval"})
    done = [curve for run, curve in zip(seed_runs, curves, strict=True) if run.state == "completed"]
    assert len(seed_runs) == 4 and len(done) == 3 and list(line.mean) == [25, 50, 75, 100]
    for at in line.mean:
        assert line.mean[at] == pytest.approx(np.mean([curve[at] for curve in done]))
        values = [curve[at] for curve in done]
        sides = [np.mean(values) + sign * np.std(values, ddof=1) for sign in (-1, 1)]
        assert line.band[at] == pytest.approx(np.clip(sides, min(values), max(values)))


def test_curves_are_distinguishable_without_colour_and_fill_the_page(grid, capsys):
    assert main(["compare", str(grid / "runs"), "--plot", "curves.png"]) == 0
    picture = imread("curves.png")
    assert picture.shape[1] == 2400 and 0.02 < (picture[..., :3] < 0.99).any(axis=-1).mean() < 0.4
    for side in (picture[:, :3], picture[:, -3:], picture[:3]):
        assert (side[..., :3] > 0.99).all(), "nothing is cut off at its edges"
    greys = sorted(np.dot(matplotlib.colors.to_rgb(colour), (0.299, 0.587, 0.114)) for colour in COLOURS[:3])
    assert greys[2] - greys[0] > 0.1


def test_of_many_points_only_the_best_are_coloured(tmp_path, capsys):
    for number in range(30):
        write_run(tmp_path / f"runs/{number}", steps=5, lr=1e-3 * (number + 1), held_out=2.0 + number / 10)
    words = plot_texts(capsys, "runs", "curves.svg")
    assert "Best held-out loss 2.0000: lr=0.001" in words and "lr 0.001 to 0.03 (30 values)" in " ".join(words)
    assert "22 others, grey" in words and "2.8 to 4.9" in words
    assert Path("curves.svg").stat().st_size < 200_000
    for colour in COLOURS:
        assert colour.lower() in Path("curves.svg").read_text().lower()


def test_one_run_and_runs_without_held_out_data_are_drawn_too(tmp_path, capsys):
    write_run(tmp_path / "one", steps=50)
    words = plot_texts(capsys, "one", "one.svg")
    assert any(word.startswith("scratch-llama: held-out loss ") for word in words)
    for name, lr in (("a", 1e-3), ("b", 3e-3)):
        write_run(tmp_path / "none" / name, steps=50, lr=lr, eval_every=1000)
        for file in ("result.json", "events.jsonl"):
            path = tmp_path / "none" / name / file
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            other_lines = [line for line in lines if line.get("kind") != "eval"]
            if "eval_loss" in other_lines[0]:
                other_lines[0]["eval_loss"] = None
            path.write_text("".join(json.dumps(line) + "\n" for line in other_lines))
    assert "smoothed train loss (nats per token)" in plot_texts(capsys, "none", "none.svg")


def test_the_plot_of_one_run_is_that_of_its_callback(capsys, tmp_path):
    """The same curves, title and marks; after the run, they come from its events."""
    run = tmp_path / "run"
    words = [*SWEEP[1:7], "steps=60", "eval_every=5", "lr=100", "callbacks=[default,plots]"]
    assert main([*words, f"hydra.run.dir={run}"]) == 0
    capsys.readouterr()
    drawn = svg_texts(run / "plots" / "curves.svg")
    assert {*plot_texts(capsys, str(run), str(tmp_path / "one.svg"))} == {*drawn} and "training, each step" in drawn


def test_the_plot_of_one_run_marks_its_end_and_its_warnings(tmp_path, capsys):
    run = write_run(tmp_path / "one", steps=200, until=150, reason="aborted", spike=85.2)
    words = plot_texts(capsys, str(run), str(tmp_path / "one.svg"))
    assert {"↑ 2 steps above the shown range, up to 85.2", "stopped, step 150"} <= {*words}, words
    result = json.loads((run / "result.json").read_text())
    (run / "result.json").write_text(json.dumps({**result, "reason": "errored", "why": "no space left"}))
    with (run / "events.jsonl").open("a") as events:
        events.write(json.dumps({"kind": "warning", "step": 9, "about": "divergence", "text": "the loss rose"}) + "\n")
    words = plot_texts(capsys, str(run), str(tmp_path / "failed.svg"))
    assert {"scratch-llama: failed at step 150", "failed, step 150", "loss rose, step 9"} <= {*words}, words
    with pytest.raises(UserError, match="no step is recorded"):
        draw_sheet(Comparison.build([read_run(write_run(tmp_path / "none", until=0, steps=5))]), "none")
    (tmp_path / "none" / "events.jsonl").unlink()
    (tmp_path / "none" / "events.jsonl").mkdir()
    with pytest.raises(UserError, match=r"events\.jsonl is a .*nothing to draw"):
        draw_sheet(Comparison.build([read_run(tmp_path / "none")]), "none")
    words = plot_texts(capsys, str(write_run(tmp_path / "short", steps=1, eval_every=1)), str(tmp_path / "short.svg"))
    assert any(word.startswith("training, at the end") for word in words)
    lines = draw_sheet(Comparison.build([read_run(tmp_path / "short")]), "short").panels[0].lines
    assert {line.get_marker() for line in lines if len(line.get_xdata()) == 1} == {".", "o"}


def test_any_name_and_number_gives_a_readable_plot(tmp_path, capsys):
    """Letters without a picture in the font, a terminal's codes, formulas; a loss of 0, one that explodes, no steps."""
    names = ("$x_1", "\u65e5\u672c", "a\x1b[3m--><b>", "x" * 300)
    for number, (name, held_out) in enumerate(zip(names, (0.0, -3.0, 700.0, float("nan")), strict=True)):
        write_run(tmp_path / f"runs/{number}", name=name, lr=10.0**-number, steps=5, held_out=held_out)
    write_run(tmp_path / "runs/none", until=0, lr=7.0, steps=5)
    for path in ("runs", *(f"runs/{number}" for number in range(3))):
        plot_texts(capsys, path, "curves.svg")
        assert xml.dom.minidom.parse("curves.svg").documentElement.tagName == "svg"


def write_search(directory, scores, metric="loss"):
    """A search as its directory keeps it: of each trial its rate, its optimiser and a score; one was stopped."""
    write_run(directory / "0", steps=5)
    draw = np.random.default_rng(0)
    values = [{"lr": float(10 ** draw.uniform(-4, -1)), "optim": name} for name in ("adamw", "lion") * 5]
    trials = [{"trial": number, "values": values[number], "score": score,
               "state": "complete" if number != 3 else "pruned", "step": 20 if number == 3 else None}
              for number, score in enumerate(scores)]  # fmt: skip
    record = {"search": "tpe", "metric": metric, "repeats": 1, "prune": None, "best": None,
            "importances": {"optim": 0.25, "lr": 0.75}, "trials": trials}  # fmt: skip
    (directory / "search.json").write_text(json.dumps(record))
    (directory / "sweep.json").write_text(
        json.dumps({"space": ["lr=tag(log, interval(1e-4, 1e-1))", "optim=adamw,lion"]})
    )
    return trials


@pytest.mark.parametrize(("metric", "best"), [("loss", 7), ("accuracy", 9)])
def test_a_search_is_plotted_by_trial_and_by_each_setting(tmp_path, capsys, metric, best):
    scores = [3.0, 2.5, 2.9, 5.0, 2.2, None, 2.6, 1.75, 2.0, 90.0]
    trials = write_search(tmp_path / "s", scores, metric)
    words = plot_texts(capsys, "s", "search.svg")
    values = trials[best]["values"]
    assert f"Best held-out {metric} {scores[best]:.4f}: lr={values['lr']} optim={values['optim']}" in words
    assert f"line: best so far; star: best trial, {best}" in words
    unit = " (nats per token)" if metric == "loss" else ""
    assert {"(importance 75%)", "(importance 25%)", "adamw", "lion", f"held-out {metric}{unit}"} <= {*words}
    notes = " ".join(words)
    below = "importance for the ranking of 10 trials 1 without a score dots of one value: left to right by trial"
    assert below in notes.replace(" · ", " ") and "tpe search of lr, optim: 10 trials · s · rings: 1 trial" in notes
    assert "pruned at step 20" in notes
    figure = draw_sheet(None, "s", tmp_path / "s").figure
    (so_far,) = (line for line in figure.axes[0].lines if len(line.get_xdata()) > 1)
    points = [(number, score) for number, score in enumerate(scores) if score is not None and number != 3]
    pick = np.minimum if metric == "loss" else np.maximum
    assert so_far.get_ydata()[:-1].tolist() == pick.accumulate([score for _, score in points]).tolist()
    dots = figure.axes[0].collections[0]
    heights = dict(dots.get_offsets().tolist())
    (number,) = (n for n, colour in zip(heights, dots.get_facecolor(), strict=True) if not colour[3])
    height = heights[number]
    assert number == 3 and all(heights[n] == score for n, score in points if score < 90)
    if metric == "loss":
        assert 3.0 < height < heights[9] < figure.axes[0].get_ylim()[1] < 4, "compressed, in order"
        assert "grey band: logarithmic" in notes and "90" in words, "the band's largest tick is the worst score"
    else:
        assert height == 5.0 and heights[9] == 90.0 and "grey band" not in notes


def test_a_rates_axis_has_a_label_for_each_decade_in_a_journals_column(tmp_path):
    search = write_search(tmp_path / "s", [3.0 + number for number in range(10)])
    record = json.loads((tmp_path / "s/search.json").read_text())
    for trial, row in enumerate(search):
        row["values"] = {"lr": 10 ** (-4 + trial / 3), "data.seed": trial, "batch_size": trial}
    (tmp_path / "s/search.json").write_text(json.dumps({**record, "trials": search}))
    sheet = draw_sheet(Comparison.build([read_run(tmp_path / "s/0")]), "s", tmp_path / "s")
    for column in ("single", "double", None):
        sheet.pictures(".svg", column=column)
        axes = next(axes for axes in sheet.panels if axes.get_xlabel().startswith("lr"))
        low, high = axes.get_xlim()
        labels = [label for label in axes.get_xticklabels() if low <= label.get_position()[0] <= high]
        assert [label.get_position()[0] for label in labels] == pytest.approx([1e-4, 1e-3, 1e-2, 1e-1])
        boxes = [label.get_window_extent() for label in labels]
        assert all(one.x1 < other.x0 for one, other in itertools.pairwise(boxes))


def test_a_logarithmic_axis_of_more_than_a_decade_has_ticks_at_1_2_and_5(tmp_path):
    sheet = Sheet(4.6, "title", "below")
    fit_y_axis(sheet.panels[0], 0.3, 8.0, "1 run", 8.0)
    ticks = {f"{tick:.0e}"[0] for tick in sheet.panels[0].get_yticks()}
    assert sheet.panels[0].get_yscale() == "log" and ticks == {"1", "2", "5"}


def test_the_compressed_part_of_a_searchs_axis_keeps_the_order_of_its_trials(tmp_path):
    write_search(tmp_path / "s", [3.0, 2.9, 2.8, 4.0, 2.7, 6.0, 12.0, 1e30])
    search = Search.read(tmp_path / "s")
    better, worse, end, _ = search.limits
    places = [search.place(score) for score in (2.7, worse, 4.0, 6.0, 12.0, 1e30)]
    assert places == sorted(places) and better < places[0] == 2.7 and places[1] == worse and places[-1] < end
    excess = math.log1p((6.0 - worse) / (worse - better)) / math.log1p((1e30 - worse) / (worse - better))
    assert places[3] == pytest.approx(worse + 0.85 * (end - worse) * excess)
    (middle, between), (last, label) = search.cut_ticks
    assert (
        label == "1e30" and last == places[-1] and middle == pytest.approx((worse + last) / 2, abs=0.15 * (end - worse))
    )
    assert middle == search.place(float(between)) and re.fullmatch(r"\de1[45]", between), "a round number"


def test_a_pruned_trial_that_led_is_within_the_axis(tmp_path):
    write_search(tmp_path / "s", [3.0, 2.9, 2.8, 1.5, 2.7, 2.75])
    dots = draw_sheet(None, "s", tmp_path / "s").panels[0].collections[0]
    low, high = dots.axes.get_ylim()
    assert low < 1.5 == min(y for _, y in dots.get_offsets()) and high > 3


def test_rings_are_darker_the_later_their_trials_were_pruned(tmp_path):
    trials = write_search(tmp_path / "s", [3.0, 2.9, 2.8, 4.0, 2.7, 5.0])
    record = json.loads((tmp_path / "s/search.json").read_text())
    record["trials"][5] = {**trials[5], "state": "pruned", "step": 40}
    (tmp_path / "s/search.json").write_text(json.dumps(record))
    dots = draw_sheet(None, "s", tmp_path / "s").panels[0].collections[0]
    early, late = dots.get_edgecolor()[dots.get_facecolor()[:, 3] == 0]
    assert early[:3] == pytest.approx([early[0]] * 3) and early[3] < late[3]  # grey, less transparent
    assert "at steps 20 to 40" in " ".join(Search.read(tmp_path / "s").describe_pruning())


def test_only_the_first_panel_of_a_row_has_numbers_at_its_left(tmp_path):
    write_search(tmp_path / "s", [3.0, 2.0, 2.5, 1.0])
    _, *panels = draw_sheet(None, "s", tmp_path / "s").panels
    assert [axes.yaxis.get_tick_params()["labelleft"] for axes in panels] == [True, False]


def test_long_labels_of_a_search_are_rotated_to_avoid_overlap(tmp_path):
    write_search(tmp_path / "s", [3.0, 2.0, 2.5, 1.0])
    file = tmp_path / "s/search.json"
    for names, turned in ((("adamw", "lion"), 0), (("adafactor_factored", "muon_nesterov_long"), 30)):
        record = json.loads(file.read_text())
        for trial, name in zip(record["trials"], names * 2, strict=True):
            trial["values"]["optim"] = name
        file.write_text(json.dumps(record))
        axes = draw_sheet(None, "s", tmp_path / "s").figure.axes[2]
        assert {label.get_rotation() for label in axes.get_xticklabels()} == {turned}


def test_numbers_from_a_list_have_a_slot_each_and_those_from_an_interval_an_axis(tmp_path):
    write_search(tmp_path / "s", [3.0, 2.0, 2.5, 1.0])
    record = json.loads((tmp_path / "s/search.json").read_text())
    for trial, value in zip(record["trials"], (0.1, 0, 0.1, 0), strict=True):
        trial["values"]["optim"] = value
    (tmp_path / "s/search.json").write_text(json.dumps(record))
    _, lr, listed = draw_sheet(None, "s", tmp_path / "s").figure.axes
    assert [label.get_text() for label in listed.get_xticklabels()] == ["0", "0.1"]
    assert listed.get_xticks().tolist() == [0, 1] and lr.get_xscale() == "log"


def test_runs_that_stopped_with_a_common_setting_are_named_by_it(tmp_path, capsys):
    write_run(tmp_path / "runs/good", lr=0.01, steps=5)
    for seed in (0, 1):
        write_run(tmp_path / f"runs/{seed}", reason="errored", until=2, lr=1e30, seed=seed, steps=5)
    words = plot_texts(capsys, "runs", "curves.svg")
    assert "× lr=1e+30" in words and "2 failed" in words
    assert "lr 0.01, 1e+30; 2 seeds" in " ".join(words), "the good one has one seed only"


def test_a_plot_names_settings_that_vary_together(tmp_path, capsys):
    for steps, lr in ((60, 1e30), (100, 0.003), (80, 0.01)):
        write_run(tmp_path / f"runs/{steps}", steps=steps, lr=lr, seed=0)
    words = plot_texts(capsys, "runs", "curves.svg")
    assert "steps 60, 80, 100 with lr 1e+30, 0.01, 0.003" in " ".join(words), "values of one run have the same position"
    assert {"steps=60  lr=1e+30", "steps=80  lr=0.01", "steps=100  lr=0.003"} <= set(words)


def test_of_many_settings_that_vary_together_a_plot_names_the_learning_rate(tmp_path, capsys):
    for number, (steps, lr) in enumerate([(60, 1e30), (100, 0.003)]):
        write_run(tmp_path / f"runs/{number}", steps=steps, lr=lr, batch_size=4 + number, eval_every=20 + number)
    words = plot_texts(capsys, "runs", "curves.svg")
    assert "steps 60, 100 with lr 1e+30, 0.003" in " ".join(words)
    assert {"steps=60  lr=1e+30", "steps=100  lr=0.003"} <= set(words)


def test_the_settings_of_a_model_do_not_lengthen_its_label(tmp_path, capsys):
    for model, width in (("llama", 32), ("gpt2", 64)):
        write_run(tmp_path / f"runs/{model}", model=model, model__d_model=width, steps=20)
    words = plot_texts(capsys, "runs", "curves.svg")
    assert {"llama", "gpt2"} <= set(words)
    assert any(text in " ".join(words) for text in ("model llama, gpt2", "model gpt2, llama"))


def test_a_long_title_is_wrapped_in_a_narrow_column(grid):
    sheet = draw_sheet(Comparison.build([read_run(path) for path in find_runs(grid / "runs")]), "/tmp/runs")
    page, narrow = (sheet.pictures(".svg", column=column)[".svg"].decode() for column in (None, "single"))
    assert "/tmp/runs" in page and "/tmp/runs" not in narrow
    assert ">recipe scratch, warm; lr 0.001, 0.003, 0.01, 0.5; 4 seeds" in page, "a part of the subtitle is not divided"
    assert ">Best held-out loss" in page and ">Best held-out loss" in narrow


@pytest.mark.parametrize("column", [None, "single", "double"])
def test_titles_fill_their_lines_and_stay_on_the_page(column):
    sheet = Sheet(4, "Best held-out loss 5.16: lr=0.01 " * 5, "24 runs · llama · lr 0.01 · " * 30)
    sheet.pictures(".svg", column=column)
    for text in sheet.figure.texts:
        end = text.get_window_extent(sheet.figure.canvas.get_renderer()).x1 / sheet.figure.bbox.width
        assert 0.85 < end <= 1 and not re.search("· …|\n·|· *$", text.get_text())


@pytest.mark.filterwarnings("error")
def test_means_below_1e300_are_drawn_in_short_form(tmp_path, capsys):
    for number in range(4):
        write_run(f"r/{number}", steps=50, seed=number % 2, lr=1e-2 * (1 + number // 2), scores={"up": 2e299 + number})
    for number, score in enumerate((9e299, -9e299)):
        write_run(f"r/{number + 4}", steps=50, seed=number, lr=0.1, scores={"up": score})
    words = plot_texts(capsys, "r", "--metric", "up", "a.svg")
    assert "2e+299 ± 0, best" in words and "0 ± 1.273e+300" in words


def test_a_value_too_large_for_float_is_drawn_as_text(tmp_path, capsys):
    write_search(tmp_path / "s", [3.0, 2.0])
    record = json.loads((tmp_path / "s/search.json").read_text())
    record["trials"][0]["values"]["lr"] = 10**400
    (tmp_path / "s/search.json").write_text(json.dumps(record))
    assert "star: best trial, 1" in " ".join(plot_texts(capsys, "s", "search.svg"))


def test_selected_runs_of_a_search_are_drawn_as_curves(tmp_path, capsys):
    write_search(tmp_path / "s", [3.0, 2.0])
    assert "loss (nats per token)" in plot_texts(capsys, "s", "lr>0", "curves.svg")
    (tmp_path / "s/search.json").write_text('{"trials": [{"trial": "x"}]}')
    assert "loss (nats per token)" in plot_texts(capsys, "s", "curves.svg")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--plot", "a.jpg"], "--plot a.jpg: must end in .png, .svg, .pdf; type --plot a.svg"),
        (["--plot", "x."], "must end in .png, .svg, .pdf; type --plot x.svg"),
        (["--plot", "sub/.svg"], "type --plot sub/plot.svg"),
        (["--plot", "x.svg.gz"], "type --plot x.svg"),
        (["--plot", "."], "--plot .: must end in .png, .svg, .pdf; type --plot plot.svg"),
        (["--plot", "/"], "type --plot plot.svg"),
        (["--plot", "/dev/null"], "type --plot null.svg"),
        (["--column", "single"], "--column single: sets the width of a plot; add --plot curves.svg"),
        (["--plot", "nowhere/a.svg"], "there is no directory nowhere"),
        (["--plot", "folder.svg"], "is a directory"),
        (["--plot", "theirs.svg"], "theirs.svg: exists and is not a plot of toyexp; choose another name"),
        (["--plot", "link.svg"], "link.svg: exists"),
        (["--plot", "a.svg", "--csv"], "--plot a.svg --csv: cannot be combined"),
    ],
)
def test_an_impossible_plot_gives_one_line_and_replaces_nothing(grid, tmp_path, capsys, words, message):
    (tmp_path / "theirs.svg").write_text("<svg>mine</svg>")
    (tmp_path / "folder.svg").mkdir()
    (tmp_path / "link.svg").symlink_to(tmp_path / "not-there.svg")
    before = sorted(tmp_path.iterdir())
    assert main(["compare", str(grid / "runs"), *words]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == before and (tmp_path / "theirs.svg").read_text() == "<svg>mine</svg>"


def test_a_plot_written_by_toyexp_is_replaced(grid, capsys):
    for name in ("a.svg", "a.png", "a.pdf"):
        for _ in range(2):
            assert main(["compare", str(grid / "runs"), "--plot", name]) == 0
        assert is_own_plot(Path(name))


def test_a_sweep_with_plots_writes_a_plot_and_replaces_no_foreign_file(tmp_path, capsys):
    assert main([*SWEEP, "callbacks=[events,plots]", "hydra.sweep.dir=s"]) == 0
    out = capsys.readouterr().out
    assert "plot    s/plots/sweep.png\nplot    s/plots/sweep.svg\n" in out
    words = svg_texts(tmp_path / "s/plots/sweep.svg")
    assert "lr 0.01, 5 × 2 seeds" in " ".join(words), words
    assert is_own_plot(tmp_path / "s/plots/sweep.png")
    (tmp_path / "s/plots/sweep.png").write_bytes(b"theirs")
    assert main(["sweep.resume=s"]) == 0, "trouble with a picture is none of the sweep's"
    assert "plot    none: " in capsys.readouterr().out and (tmp_path / "s/plots/sweep.png").read_bytes() == b"theirs"


def test_a_sweep_without_plots_never_imports_matplotlib(tmp_path):
    words = [*SWEEP, "callbacks=[events]", "hydra.sweep.dir=s"]
    program = f"import sys, toyexp.cli.main as c; c.main({words!r}); print('matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False", done.stdout
    assert not (tmp_path / "s/plots").exists()


@pytest.mark.parametrize(("column", "width"), [("single", 1050), ("double", 2160)])
def test_a_plot_fits_a_journals_column_at_300_dots_per_inch(grid, tmp_path, capsys, column, width):
    write_search(tmp_path / "s", [3.0, 2.5, 2.9, 5.0, 2.2, None, 2.6, 1.75, 2.0, 90.0])
    for runs in (str(grid / "runs"), "s"):
        assert main(["compare", runs, "--plot", "curves.png", "--column", column]) == 0
        picture = imread("curves.png")
        assert picture.shape[1] == width
        for side in (picture[:, :2], picture[:, -2:], picture[:2]):
            assert (side[..., :3] > 0.99).all(), "nothing is cut off at its edges"
    assert main(["compare", str(grid / "runs"), "--plot", "curves.png", "--column", "triple"]) == 2
    assert "choose one of" in capsys.readouterr().err


def test_a_plot_can_be_written_in_several_sizes(grid):
    comparison = Comparison.build([read_run(path) for path in find_runs(grid / "runs")])
    sheet = draw_sheet(comparison, "runs")
    page, small, again = (sheet.pictures(".svg", column=column)[".svg"] for column in (None, "single", None))
    sizes = [set(re.findall(rb'(?:font: (?:bold )?[\d.]+px|width="[\d.]+pt")', svg)) for svg in (page, small, again)]
    assert sizes[0] == sizes[2] and sizes[0].isdisjoint(sizes[1]), sizes


def test_a_plot_of_lora_runs_says_what_trains(tmp_path, capsys):
    write_run(tmp_path / "one", steps=50)
    path = tmp_path / "one/events.jsonl"
    first, *others = path.read_text().splitlines()
    model = {"parameters": 1200, "trainable": 64, "adapters": "LoRA r=8 on q,v"}
    path.write_text("\n".join([json.dumps({**json.loads(first), "model": model}), *others]) + "\n")
    assert "LoRA r=8 on q,v: 64 of 1,200 parameters" in " ".join(plot_texts(capsys, "one", "one.svg"))


def test_a_text_is_cut_only_when_it_is_too_long():
    assert [fit_text(text, 3) for text in ("abc", "abcd", "a\nb")] == ["abc", "ab…", "a?b"]
