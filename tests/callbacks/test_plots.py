import math
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import matplotlib
import numpy as np
import pytest
from drawings import svg_texts
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import imread
from synthetic_runs import write_run

from toyexp.base.drawing import FILE_METADATA, Sheet, find_divergence, fit_y_axis, is_own_plot, thin_curve
from toyexp.base.run_plot import Curves, describe_result, draw_curves, remove_spikes
from toyexp.base.run_plot import smooth as smooth_values
from toyexp.cli import bench
from toyexp.cli.main import main
from toyexp.results.comparison import Comparison
from toyexp.results.plot import draw_sheet
from toyexp.results.run_dirs import read_run
from toyexp_callbacks import plots


def draw_files(curves):
    return draw_curves(curves).pictures(".png", ".svg")


class SynchronousThread:
    def __init__(self, target, args, daemon):
        self.start = lambda: target(*args)

    def is_alive(self):
        return False

    def join(self):
        pass


def measure_ink(path, size=(1800, 2400)):
    """Return the share of pixels that are not white."""
    picture = imread(path)
    assert picture.shape[:2] == size
    return float((picture[..., :3] < 0.99).any(axis=-1).mean())


def test_a_run_writes_a_plot_of_its_curves(train):
    run = train("callbacks=[default,plots]")
    path = run.dir / "plots" / "curves.png"
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert 0.01 < measure_ink(path) < 0.3
    pictures = [str(path), str(path.with_suffix(".svg"))]
    assert path.with_suffix(".svg").read_text().rstrip().endswith("</svg>")
    assert [e["path"] for e in run.select("export") if e.get("what") == "plot"] == pictures
    assert set(pictures) <= set(run.result["artifacts"])
    assert "plots/curves.png" in run.out, "the output must name the plot's path"


def test_the_plot_of_a_lora_run_says_what_trains(train):
    base = train("callbacks=[default]", to="base")
    words = ["recipe=lora", f"recipe.base={base.dir}", "recipe.rank=2", "recipe.targets=[q]"]
    run = train(*words, "callbacks=[default,plots]", to="lora")
    assert run.code == 0, run.err
    words = " ".join(svg_texts(run.dir / "plots" / "curves.svg"))
    assert "LoRA r=2 on q: 64 of 10,576 parameters" in words, words


def test_a_smoothed_curve_begins_at_its_first_value_and_weights_halve_to_both_sides():
    values = np.random.default_rng(0).normal(size=300)
    values[[7, 150]] = math.nan, math.inf
    smooth, half = smooth_values(values.tolist()), 299 * 45**2 / 60000  # as for the slider of the report page
    clean = np.where(np.isfinite(values), values, math.nan)
    mirrored = np.concatenate([2 * clean[0] - clean[:0:-1], clean])
    weights = 0.5 ** (np.abs(np.arange(300)[:, None] + 299 - np.arange(599)) / half) * np.isfinite(mirrored)
    expected = (weights @ np.nan_to_num(mirrored)) / weights.sum(1)
    np.testing.assert_allclose(smooth, np.where(np.isfinite(clean), expected, math.nan), rtol=0, atol=1e-3)
    assert smooth[0] == pytest.approx(values[0], abs=1e-3)
    assert math.isnan(*smooth_values([math.nan]))


def test_outliers_and_the_end_in_nan_are_marked_and_do_not_wreck_the_axis(tmp_path):
    losses = [5 - step / 50 for step in range(100)]
    losses[10], losses[-1] = 1e6, math.nan
    held_out = {"loss": ([0, 50], [5.0, 4.0])}
    steps = {"loss": (list(range(1, 101)), losses), "grad_norm": ([1], [1.0]), "lr": ([], [])}
    curves = Curves("run", "", "token", steps, held_out, early_end=(100, "failed"))
    (tmp_path / "a.svg").write_bytes(draw_files(curves)[".svg"])
    words = svg_texts(tmp_path / "a.svg")
    assert {"run: loss not finite from step 100", "the loss is nan from step 100"} <= {*words}
    assert "↑ 1 step above the shown range, up to 1e6" in words and not any("failed" in word for word in words)
    assert {"3.00", "3.50", "4.00", "4.50", "5.00"} <= {*words}, "the axis fits the other steps"
    without = smooth_values([math.nan if loss == 1e6 else loss for loss in losses])
    assert f"training, smoothed, last {without[-2]:.4g}" in words, "a single spike does not displace the mean"


def draw_panels(curves):
    """Return the panels of a plot by their label."""
    return {axes.get_ylabel().replace("\n", " "): axes for axes in draw_curves(curves).panels}


def test_arrows_at_the_edge_mark_the_steps_above_the_range():
    losses = [5 - step / 50 for step in range(100)]
    losses[10] = losses[60] = 1e6
    curves = {"loss": ([*range(1, 101)], losses), "grad_norm": ([1], [1.0]), "lr": ([], [])}
    axes = draw_panels(Curves("run", steps=curves))["loss (nats per token)"]
    (arrows,) = (line for line in axes.lines if line.get_marker() == r"$\uparrow$")
    assert arrows.get_xdata().tolist() == [11, 61] and {*arrows.get_ydata()} == {1}, "in fractions of the axis"


@pytest.mark.parametrize(
    ("low", "high", "limits"),
    [(2.0, 2.001, (1.9455, 2.0555)), (0.0, 1.0, (-0.05, 1.05)), (-1.0, -0.999, (-1.027, -0.972)), (1e-9, 1e-9, None)],
)
def test_an_axis_spans_at_least_a_twentieth_of_its_largest_value(low, high, limits):
    axes = Figure().subplots()
    fit_y_axis(axes, low, high, "1 step", high)
    found, wanted = axes.get_ylim(), limits or (0.9725e-9, 1.0275e-9)
    assert found == pytest.approx(wanted, abs=1e-12 if limits is None else 1e-3) and found[0] < low <= high < found[1]


def test_gradient_norms_are_smoothed_in_their_logarithm_and_one_huge_norm_does_not_wreck_the_axis():
    norms = [float(norm) for norm in np.random.default_rng(0).uniform(1, 8, 200)]
    norms[50], norms[150:] = 1e30, [0.0] * 50
    steps = [*range(1, 201)]
    curves = {"loss": (steps, [5.0] * 200), "grad_norm": (steps, norms), "lr": (steps, [0.003] * 200)}
    panels = draw_panels(Curves("run", steps=curves))
    axes = panels["gradient norm"]
    expected = np.exp(smooth_values([math.log(norm) if norm else math.nan for norm in norms]))
    np.testing.assert_allclose(axes.lines[1].get_ydata(), expected)
    assert axes.get_yscale() == "log" and 8 < axes.get_ylim()[1] < 1000
    assert axes.get_title(loc="left") == "0 from step 151"
    assert axes.get_title(loc="right") == "↑ 1 step above the shown range, up to 1e30"
    labels = [label.get_text() for label in panels["learning rate"].get_yticklabels()]
    assert labels == ["0", "0.0015", "0.003"], "as it was typed"


@pytest.mark.parametrize(("largest", "scale"), [(2.0, "linear"), (6.0, "log")])
def test_gradient_norms_of_another_magnitude_have_a_logarithmic_axis(largest, scale):
    norms, steps = np.linspace(1, largest, 100).tolist(), [*range(1, 101)]
    curves = {"loss": (steps, [5.0] * 100), "grad_norm": (steps, norms), "lr": (steps, [0.003] * 100)}
    assert draw_panels(Curves("run", steps=curves))["gradient norm"].get_yscale() == scale


@pytest.mark.parametrize(("count", "is_shown"), [(1, False), (10, True)])
def test_only_rare_gradient_norms_are_outside_the_axis(count, is_shown):
    norms, steps = [1.0] * (100 - count) + [100.0] * count, [*range(1, 101)]
    curves = {"loss": (steps, [5.0] * 100), "grad_norm": (steps, norms), "lr": (steps, [0.003] * 100)}
    axes = draw_panels(Curves("run", steps=curves))["gradient norm"]
    assert (axes.get_ylim()[1] > 100) == is_shown
    assert bool(axes.get_title(loc="right")) is not is_shown


def test_the_title_says_that_a_run_failed():
    steps = {"loss": ([1, 2], [6.95, 6.93]), "grad_norm": ([1], [1.0]), "lr": ([], [])}
    curves = Curves("run", "", "token", steps, {"loss": ([0], [6.95])}, early_end=(2, "failed"))
    assert describe_result(curves) == "failed at step 2"


def test_the_title_has_the_last_held_out_accuracy_in_percent_or_loss():
    steps = {"loss": ([1, 2], [6.95, 6.93]), "grad_norm": ([1], [1.0]), "lr": ([], [])}
    held_out = {"loss": ([0, 2], [6.95, 6.9])}
    assert describe_result(Curves("run", "", "token", steps, held_out)).endswith(" 6.9")
    held_out["accuracy"] = ([0, 2], [0.5, 0.2537])
    assert describe_result(Curves("run", "", "token", steps, held_out)).endswith(" 25.4 %")


def test_the_steps_after_the_last_finite_loss_are_shaded_in_every_panel():
    steps, losses = [*range(1, 21)], [5.0, 4.0, *[math.nan] * 18]
    curves = {"loss": (steps, losses), "grad_norm": (steps, losses), "lr": (steps, [1e30] * 20)}
    panels = draw_panels(Curves("run", steps=curves, early_end=(20, "failed")))
    for axes in panels.values():
        (band,) = axes.patches
        assert (band.get_x(), band.get_width()) == (3, 17) and not axes.yaxis.get_offset_text().get_text()
    assert panels["gradient norm"].get_title(loc="left") == "not finite from step 3"
    labels = [label.get_text() for label in panels["learning rate"].get_yticklabels()]
    assert labels == ["0", "5e29", "1e30"]


def test_many_huge_losses_are_no_spikes():
    assert remove_spikes([7.0, 7.1, 1e6, 2e6, 3e6]) == [7.0, 7.1, 1e6, 2e6, 3e6]
    kept = [7.0, 6.5, 6.0, 5.5, 1e6, 5.0]
    assert [*filter(math.isfinite, remove_spikes(kept))] == [7.0, 6.5, 6.0, 5.5, 5.0]


def test_one_axis_has_one_notation(tmp_path):
    gradients = [10.0**power for power in range(0, 17)] + [0.0]
    steps = [*range(1, 19)]
    curves = {"loss": (steps, [5.0] * 18), "grad_norm": (steps, gradients), "lr": (steps, [1.0] * 18)}
    (tmp_path / "a.svg").write_bytes(draw_files(Curves("run", steps=curves))[".svg"])
    words = svg_texts(tmp_path / "a.svg")
    assert not any("e+" in word for word in words) and any(word.startswith("10") for word in words), words


def test_labels_above_a_panel_share_a_row_if_there_is_room(tmp_path, monkeypatch):
    heights = {}
    monkeypatch.setattr(Axes, "annotate", lambda self, text, at, **how: heights.update({text: how["xytext"][1]}))
    curves = {"loss": ([*range(1, 101)], [5.0] * 100), "grad_norm": ([1], [1.0]), "lr": ([], [])}
    draw_files(Curves("run", steps=curves, warnings={51: "divergence"}, best=50, early_end=(100, "stopped")))
    assert heights == {"best, step 50": 4, "stopped, step 100": 4, "loss rose, step 51": 16}


def test_a_run_that_ends_in_a_number_has_no_cross_and_no_note_above(tmp_path):
    steps = list(range(1, 101))
    curves = {"loss": (steps, [5 - step / 50 for step in steps]), "grad_norm": ([1], [1.0]), "lr": ([], [])}
    (tmp_path / "a.svg").write_bytes(draw_files(Curves("run", steps=curves))[".svg"])
    assert "fill: #0b4a8a; stroke: #ffffff" not in (tmp_path / "a.svg").read_text(), "the cross"
    assert "above the shown range" not in " ".join(svg_texts(tmp_path / "a.svg"))


def test_a_run_that_is_mostly_above_the_range_has_a_logarithmic_axis_over_everything(tmp_path):
    losses = [7.0, *(80.0 - step / 2 for step in range(99))]
    steps = {"loss": (list(range(1, 101)), losses), "grad_norm": ([1], [1.0]), "lr": ([], [])}
    curves = Curves("run", "", "token", steps, {"loss": ([0, 100], [7.0, 8.5])}, {20: "loss_spike", 52: "divergence"})
    (tmp_path / "a.svg").write_bytes(draw_files(curves)[".svg"])
    words = svg_texts(tmp_path / "a.svg")
    assert not any("above" in word for word in words) and {"10", "20", "50"} <= {*words}, words
    assert "warnings, steps 20, 52" in words
    logs = smooth_values([math.log(loss) for loss in losses[1:]])
    assert f"training, smoothed, at the end {math.exp(logs[-1]):.4g}" in words and "training, each step" in words
    assert {"run: diverged at step 2", "diverged at step 2: loss from 7 to 80"} <= {*words}


def test_the_axis_of_a_run_that_diverges_late_fits_the_losses_before(tmp_path):
    losses = [5 - step / 50 for step in range(100)] + [1e4] * 50
    steps = {"loss": (list(range(1, 151)), losses), "grad_norm": ([1], [1.0]), "lr": ([], [])}
    (tmp_path / "a.svg").write_bytes(draw_files(Curves("run", "", "token", steps))[".svg"])
    words = svg_texts(tmp_path / "a.svg")
    assert "diverged at step 101: loss from 5 to 10,000" in " ".join(words)
    assert "↑ 50 steps above the shown range, up to 10,000" in words
    assert {"3.00", "4.00", "5.00"} <= {*words}


@pytest.mark.parametrize(
    ("losses", "step"),
    [([5.0, 4.0, 9.0], 3), ([5.0, 9.0, 8.0], 2), ([5.0, 9.0, 4.0], None), ([5.0, 5.4], None), ([0.1, 0.3], 2),
     ([5.0, math.nan], None), ([5.0, math.nan, 7.0], 2), ([], None), ([math.nan], None)],
)  # fmt: skip
def test_a_run_diverges_at_the_step_from_which_its_loss_stays_above_the_first(losses, step):
    assert find_divergence(range(1, len(losses) + 1), losses) == step


def test_the_only_loss_before_a_nan_has_a_wide_axis_and_the_colour_of_training(tmp_path):
    steps = {"loss": ([1, 2], [6.9485, math.nan]), "grad_norm": ([1], [1.0]), "lr": ([], [])}
    curves = Curves("run", "", "token", steps, {"loss": ([0], [6.9496])}, early_end=(2, "failed"))
    (tmp_path / "a.svg").write_bytes(draw_files(curves)[".svg"])
    assert {"6.0", "7.0", "8.0", "held-out, at step 0: 6.95"} <= {*svg_texts(tmp_path / "a.svg")}
    assert "fill: #0b4a8a; stroke: #ffffff" in (tmp_path / "a.svg").read_text()


def test_a_long_curve_is_thinned_and_keeps_its_spikes():
    values = np.ones(100_000)
    values[31_234], values[77_777] = 9.0, -5.0
    steps, thinned = thin_curve(range(100_000), values, 200)
    assert len(steps) <= 200 and list(steps) == sorted(steps)
    assert (thinned.max(), thinned.min()) == (9.0, -5.0)
    assert steps[thinned.argmax()] == 31_234 and steps[thinned.argmin()] == 77_777


def test_the_plot_labels_final_values_stop_and_best_and_is_reproducible(tmp_path):
    steps = list(range(1, 101))
    losses = [5 - step / 50 for step in steps]
    curves_by_name = {"loss": (steps, losses), "grad_norm": (steps, losses), "lr": (steps, losses)}
    held_out = {"loss": ([0, 50, 100], [5.0, 3.123, 3.4567]), "accuracy": ([0, 50, 100], [0.1, 0.6, 0.875])}
    curves = Curves("name $x_1$", "below", "image", curves_by_name, held_out, {40: "None"}, 50, (100, "stopped early"))
    pictures = draw_files(curves)
    (tmp_path / "a.svg").write_bytes(pictures[".svg"])
    labels = svg_texts(tmp_path / "a.svg")
    for text in ("held-out, at the end 3.457", "held-out, at the end 87.5 %", "best, step 50",
                 "stopped early, step 100", "warning, step 40", "loss (nats per image)", "held-out accuracy (%)",
                 "gradient norm", "learning rate", "step"):  # fmt: skip
        assert text in labels, labels
    assert any(word.startswith("training, smoothed, at the end 3.0") for word in labels), "the mean of the last steps"
    assert draw_files(curves) == pictures


def test_a_setting_that_a_schedule_scales_and_its_factor_have_no_panel():
    names = ("loss", "grad_norm", "lr", "weight_decay", "weight_decay_factor", "rms")
    panels = draw_panels(Curves("run", steps={name: ([1, 2], [2.0, 1.0]) for name in names}))
    assert {*panels} == {"loss (nats per token)", "gradient norm", "learning rate", "rms"}


@pytest.mark.parametrize(
    ("data", "unit"), [({"classes": 10}, "image"), ({"tokenizer": "bpe"}, "token"), ({"name": "vectors"}, "target")]
)
def test_a_plot_is_titled_by_name_recipe_and_settings(data, unit):
    curves = Curves()
    curves.describe({"data": data, "model": {"arch": "mlp", "parameters": 12}}, "mine", "warm", "cpu", 8, 0.01, 3)
    assert (curves.title, curves.unit) == ("mine, warm", unit)
    assert curves.subtitle.endswith("cpu · mlp · 12 parameters · batch 8 · lr 0.01 · seed 3")
    curves.describe({}, "warm-llama", "warm", "cpu", None, None, None)
    assert (curves.title, curves.subtitle) == ("warm-llama", "cpu")


def test_long_names_of_small_panels_are_wrapped(tmp_path):
    curves_by_name = {
        name: ([1, 2], [2.0, 1.0]) for name in ("loss", "grad_norm", "lr", "rms of all weights of the head")
    }
    (tmp_path / "a.svg").write_bytes(draw_files(Curves("name", steps=curves_by_name))[".svg"])
    words = svg_texts(tmp_path / "a.svg")
    assert {"gradient norm", "learning rate", "rms of all", "weights of the", "head"} <= {*words}, words


def test_only_plots_drawn_by_toyexp_are_recognised_as_its_own(tmp_path):
    curves_by_name = {name: ([1, 2], [2.0, 1.0]) for name in ("loss", "grad_norm", "lr")}
    for suffix, picture in draw_files(Curves("name", steps=curves_by_name)).items():
        (tmp_path / f"ours{suffix}").write_bytes(picture)
        assert is_own_plot(tmp_path / f"ours{suffix}")
    figure = Figure()
    figure.subplots().plot([1, 2])
    for suffix in FILE_METADATA:
        sheet, path = Sheet(3, "$title", "below"), tmp_path / f"sheet{suffix}"
        assert sheet.write(path) == path.stat().st_size and is_own_plot(path)
        figure.savefig(tmp_path / f"theirs{suffix}")
        assert not is_own_plot(tmp_path / f"theirs{suffix}")
    assert not is_own_plot(tmp_path / "none.png") and not is_own_plot(tmp_path)


def test_plots_drawn_in_several_threads_equal_those_drawn_alone():
    curves = Curves("name", steps={"loss": ([1, 2], [2.0, 1.0]), "grad_norm": ([], []), "lr": ([], [])})
    expected = draw_files(curves)
    with ThreadPoolExecutor(4) as threads:
        assert all(drawn == expected for drawn in threads.map(draw_files, [curves] * 4))
    assert matplotlib.rcParams["svg.hashsalt"] is None


def test_a_plot_that_cannot_be_written_is_reported_once_and_does_not_fail_the_run(train, tmp_path, monkeypatch):
    """Another program has created a file of that name, which the run does not replace."""
    foreign_file = tmp_path / "run" / "plots" / "curves.png"

    def draw(curves):
        foreign_file.parent.mkdir(exist_ok=True)
        foreign_file.write_bytes(b"theirs")
        return SimpleNamespace(pictures=lambda *_: {".png": b"png", ".svg": b"svg"})

    monkeypatch.setattr(plots, "FIRST_DELAY", 0.0)
    monkeypatch.setattr(plots, "TIME_SHARE", math.inf)
    monkeypatch.setattr(plots, "draw_curves", draw)
    monkeypatch.setattr(plots, "threading", SimpleNamespace(Thread=SynchronousThread))
    run = train("callbacks=[default,plots]", "steps=12", "eval_every=3", engine="noop")
    assert run.code == 0 and run.result["reason"] == "completed" and run.result["steps"] == 12, run.err
    (warning,) = run.select("warning")
    assert "the run continues" in warning["text"] and "not written by" in warning["text"]
    assert foreign_file.read_bytes() == b"theirs"


def test_the_plot_names_the_callback_that_stopped_the_run_and_its_reason(train):
    run = train("callbacks=[default,plots,early_stop]", "steps=12", "eval_every=2", "callbacks.early_stop.patience=2",
                "callbacks.early_stop.min_delta=100", engine="noop")  # fmt: skip
    words = " ".join(svg_texts(run.dir / "plots" / "curves.svg"))
    assert f"early_stop: 2 evals without a held-out loss below {run.select('eval')[0]['loss'] - 100:.4f}" in words, (
        words
    )
    assert f", step {run.result['steps']}" in words and run.result["steps"] < 12


def test_the_best_evaluation_is_marked_unless_it_is_the_last(train):
    """One learning rate is so high that the held-out loss also rises; with the other one it only falls."""
    words = ["checkpoint_best=loss", "eval_every=2", "callbacks=[constant,events,plots]"]
    unstable = train(*words, "lr=0.5", to="wild")
    scores = {e["loss"]: e["step"] for e in unstable.select("eval") if e["step"]}
    assert 0 < (best := scores[min(scores)]) < 12, "the learning rate is too low"
    assert f"best, step {best}" in svg_texts(unstable.dir / "plots" / "curves.svg")
    falling = train(*words, "lr=0.01", to="falling")
    assert falling.result["best"]["step"] == 12, "the learning rate is too high"
    assert not any(word.startswith("best") for word in svg_texts(falling.dir / "plots" / "curves.svg"))


def test_a_plot_is_drawn_during_training_and_a_resumed_run_plots_all_steps(train, tmp_path, monkeypatch):
    drawings = []

    def draw(curves):
        drawings.append((list(curves.steps["loss"][0]), (tmp_path / "run" / "plots" / "curves.png").is_file()))
        return SimpleNamespace(pictures=lambda *_: {".png": b"png", ".svg": b"svg"})

    monkeypatch.setattr(plots, "FIRST_DELAY", 0.0)
    monkeypatch.setattr(plots, "TIME_SHARE", math.inf)
    monkeypatch.setattr(plots, "draw_curves", draw)
    monkeypatch.setattr(plots, "threading", SimpleNamespace(Thread=SynchronousThread))
    assert train("callbacks=[default,plots]", "steps=12", "eval_every=4", engine="noop").code == 0
    assert [(steps[-1], existed) for steps, existed in drawings] == [(4, False), (8, True), (12, True), (12, True)]
    assert main([f"resume={tmp_path / 'run'}", "plugins=[toyexp.testing.null]", "steps=15"]) == 0
    assert drawings[-1][0] == list(range(1, 16))


@pytest.mark.parametrize(
    "words",
    [["steps=1"], ["eval_every=0"], ["engine.nan_at=5"], ["engine.nan_at=1"]],
    ids=["one step", "no evals", "ends in NaN", "only NaN"],
)
def test_curves_with_missing_values_are_drawn(train, words):
    run = train("callbacks=[events,plots]", *words, engine="noop")
    assert run.code == (1 if "nan" in words[0] else 0)
    assert measure_ink(run.dir / "plots" / "curves.png") > 0.01
    words_drawn = svg_texts(run.dir / "plots" / "curves.svg")
    assert ("nan" in words[0]) == any(word.startswith("the loss is nan from step") for word in words_drawn), words_drawn
    assert "callback plots failed" not in (run.dir / "log.txt").read_text()


def test_plots_do_not_depend_on_a_matplotlibrc(tmp_path):
    rc = {"text.usetex": True, "font.size": 30, "axes.facecolor": "black"}
    curves = Curves("name", steps={"loss": ([1, 2], [2.0, 1.0]), "grad_norm": ([1], [1]), "lr": ([], [])})
    write_run(tmp_path / "run", seed=0, steps=4)
    engine = {"name": "ggml", "engine": "ggml", "rounds": [0.1], "quartiles": [0.1, 0.1], "ratio": 1.0,
              "tokens_per_second": 100.0, "seconds_per_step": 0.1}  # fmt: skip

    def draw_all():
        comparison = Comparison.build([read_run(tmp_path / "run")])
        sheets = draw_sheet(comparison, "run"), bench.sheet([engine], "tokens", "Speed", [])
        return [draw_files(curves)[".svg"], *(each.pictures(".svg") for each in sheets)]

    expected = draw_all()
    with matplotlib.rc_context(rc):
        assert draw_all() == expected
        assert all(matplotlib.rcParams[key] == value for key, value in rc.items()), (
            "settings of the calling program have changed"
        )


def test_an_error_while_drawing_is_a_warning_and_the_run_completes(train, monkeypatch):
    def draw(curves):
        raise ValueError("no such font")

    monkeypatch.setattr(plots, "draw_curves", draw)
    run = train("callbacks=[default,plots]", engine="noop")
    assert run.code == 0 and run.result["reason"] == "completed", run.err
    assert [e["text"] for e in run.select("warning")] == ["plots: failed, the run continues: no such font"]
    assert not any("curves" in path for path in run.result["artifacts"])


def test_a_run_without_the_callback_never_imports_matplotlib(settings, spawn):
    words = settings(engine="noop")
    program = f"import sys, toyexp.cli.main as c; c.main({words!r}); print('matplotlib' in sys.modules)"
    out, _ = spawn("-c", program).communicate(timeout=60)
    assert out.splitlines()[-1] == "False", out


def test_without_matplotlib_the_run_is_rejected_with_the_package_to_install(train, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    run = train("callbacks=[default,plots]")
    assert run.code == 2
    assert run.err == "toyexp: error: callbacks.plots: matplotlib is not installed: pip install 'toyexp[plots]'\n"
    assert not run.dir.exists()


def test_a_matplotlib_that_cannot_be_imported_is_reported_before_training(train, monkeypatch):
    monkeypatch.setattr("toyexp.base.packages._broken_packages", {})
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    run = train("callbacks=[plots,events,gguf_export]", engine="noop")
    assert run.code == 2 and run.err.count("\n") == 1
    assert "callbacks.plots: matplotlib is installed but cannot be loaded" in run.err
    assert not run.dir.exists()


def test_a_stop_reason_with_dollar_signs_is_drawn_as_plain_text():
    curves = Curves(title="run", early_end=(2, r"worth $\nope$ no more"))
    curves.steps["loss"] = [1, 2], [2.0, 1.0]
    assert draw_files(curves)[".svg"].startswith(b"<?xml")
