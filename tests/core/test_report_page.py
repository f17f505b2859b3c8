"""report.html in a browser: every interaction, and no network access."""

import csv
import importlib.util
import itertools
import json
import os
import re
import shutil
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from synthetic_runs import write_run, write_sweep

from toyexp.base.drawing import COLOURS, DARK_COLOURS, DARK_RAMP, RAMP
from toyexp.cli.main import main
from toyexp.results.comparison import Comparison
from toyexp.results.plot import Line
from toyexp.results.report import PAGE
from toyexp.results.run_dirs import find_runs, read_run

pytest.importorskip("plotly", reason="the report: pip install 'toyexp[report]'")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = os.environ.get("TOYEXP_BROWSER") or next(filter(None, map(shutil.which, BROWSERS)), None)
pytestmark = pytest.mark.release
BEST = {"recipe": "warm", "lr": 0.003}
LABEL = "recipe=warm  data=stdlib  lr=0.003"


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    here = write_sweep(tmp_path_factory.mktemp("report"))
    assert main(["compare", str(here / "runs"), "--html", str(here / "report.html")]) == 0
    return here


@pytest.fixture(scope="module")
def chromium():
    if BROWSER is None or importlib.util.find_spec("playwright") is None:
        pytest.skip("no browser here: apt install chromium, pip install playwright; or TOYEXP_BROWSER=/path/to/chrome")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


class Opened:
    """A page that records console errors and network requests."""

    def __init__(self, chromium, path, **window):
        self.context = chromium.new_context(**window)
        self.context.set_default_timeout(120_000)
        self.page, self.trouble = self.context.new_page(), []
        self.page.on("console", lambda message: self.trouble.append(message.text) if message.type != "log" else None)
        self.page.on("pageerror", lambda error: self.trouble.append(str(error)))
        self.page.on("request", lambda request: self.asked(request.url))
        self.page.goto(path.as_uri())
        self.page.wait_for_selector("html[data-ready]")

    def asked(self, url):
        if not url.startswith(("file:", "data:", "blob:")):
            self.trouble.append(url)


@pytest.fixture(scope="module")
def open_page(chromium, swept):
    return Opened(chromium, swept / "report.html", viewport={"width": 1300, "height": 900}, color_scheme="light")


@pytest.fixture
def page(open_page):
    """The page as it was when it opened, once a test is done with it."""
    yield open_page.page
    assert open_page.trouble == []
    open_page.page.evaluate("""() => {
      const by = (id) => document.getElementById(id), tell = (box, kind) => box.dispatchEvent(new Event(kind));
      for (const [id, on] of Object.entries({ xlog: 0, ylog: 0, raw: 0, held: 1, bands: 1, outliers: 0 }))
        if (by(id).checked !== Boolean(on)) by(id).click();
      for (const id of ["score", "over", "rows"]) by(id).querySelector("button").click();
      const hidden = () => document.querySelector("#legend [aria-pressed=false]");
      while (hidden()) hidden().click();
      if (by("filter").value) {
        by("filter").value = "";
        tell(by("filter"), "input");
      }
      if (by("smooth").value != 45) { by("smooth").value = 45; tell(by("smooth"), "input"); }
    }""")


# Where the last point of a trace is on the screen.
PLACE = """(n) => {
  const chart = document.getElementById("main"), found = chart.data.at(n), box = chart.getBoundingClientRect();
  const { xaxis, yaxis } = chart._fullLayout, last = found.x.length - 1;
  return [box.left + xaxis._offset + xaxis.d2p(found.x[last]), box.top + yaxis._offset + yaxis.d2p(found.y[last])];
}"""


def until(page, true):
    """Waits for an expression to hold; Playwright's own way would need eval, which the page does not allow."""
    for _ in range(1200):
        if page.evaluate(true):
            return
        page.wait_for_timeout(25)
    raise AssertionError(true)


def axis(page, name, chart="main"):
    low, high = page.evaluate(f"document.getElementById('{chart}')._fullLayout.{name}.range")
    return low, high


def traces(page, chart="main"):
    """Return the drawn curves: name, points, values."""
    to_row = "t => [t.name, [...t.x], [...t.y], t.customdata ? [...t.customdata] : null]"
    return page.evaluate(f"document.getElementById('{chart}').data.map({to_row})")


def column(page, head):
    heads = [text.rstrip(" ↑↓") for text in page.locator("#table thead th").all_inner_texts()]
    return [row.split("\t")[heads.index(head)].strip() for row in page.locator("#table tbody tr").all_inner_texts()]


def call(page, script, expression, **names):
    """Return the value of an expression that uses functions of scripts of the page, and global `names`."""
    known = "".join(f"const {name} = {json.dumps(value)};\n" for name, value in names.items())
    functions = "\n".join((PAGE / name).read_text() for name in script.split())
    return page.evaluate(f"(() => {{ {known}{functions}\nreturn {expression}; }})()")


def events(swept, kind, **settings):
    """Return the events of a kind of the runs with these settings, to compare with the page."""
    names = []
    for path in sorted(find_runs(swept / "runs")):
        run = read_run(path)
        if all(getattr(run, key) == value for key, value in settings.items()):
            lines = [json.loads(line) for line in (path / "events.jsonl").read_text().splitlines()]
            names.append([line for line in lines if line["kind"] == kind])
    return names


def test_hovering_shows_a_points_value_and_a_means_deviation(page, swept):
    x, y = page.evaluate(PLACE, -1)
    page.mouse.move(x - 3, y)
    page.mouse.move(x, y)
    until(page, "document.querySelector('#main .hoverlayer .hovertext') !== null")
    hover_text = page.locator("#main .hoverlayer").text_content()
    last = [lines[-1]["loss"] for lines in events(swept, "eval", **BEST)]
    assert LABEL in hover_text and "held-out loss, mean of 4 seeds" in hover_text and "step 300" in hover_text
    assert f"{np.mean(last):.4f} ± {np.std(last, ddof=1):.4f}" in hover_text
    assert page.locator("#legend .value").first.inner_text() == f"{np.mean(last):.4f} ± {np.std(last, ddof=1):.4f}"
    page.mouse.move(5, 5)


def test_dragging_zooms_all_charts_and_a_double_click_resets_them(page):
    box = page.locator("#main .nsewdrag").first.bounding_box()
    x, y = box["x"], box["y"]
    below_all, above_all = axis(page, "yaxis")
    page.mouse.move(x + box["width"] * 0.25, y + 60)
    page.mouse.down()
    page.mouse.move(x + box["width"] * 0.5, y + box["height"] - 60, steps=4)
    page.mouse.up()
    until(page, "document.getElementById('lr')._fullLayout.xaxis.range[1] < 200")  # the others follow
    low, high = axis(page, "xaxis")
    assert 60 < low < 90 and 130 < high < 170 and axis(page, "xaxis", "speed") == (low, high)
    assert axis(page, "yaxis")[0] > below_all and axis(page, "yaxis")[1] < above_all
    smooth = next(xs for name, xs, *_ in traces(page) if name == LABEL)
    assert min(smooth) <= low + 2 and max(smooth) >= high - 2  # redrawn for the visible range
    page.mouse.dblclick(x + 200, y + 200)
    until(page, "document.getElementById('main')._fullLayout.xaxis.range[1] > 300")
    assert axis(page, "xaxis")[0] < 1 and axis(page, "yaxis") == (below_all, above_all)
    page.locator("#lr").scroll_into_view_if_needed()
    box = page.locator("#lr .nsewdrag").first.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.9, box["y"] + 42, steps=4)
    page.mouse.up()
    until(page, "document.getElementById('main')._fullLayout.xaxis.range[0] > 100")  # and it follows them
    assert axis(page, "yaxis")[1] < above_all - 1  # scaled to the visible range
    page.mouse.dblclick(box["x"] + 40, box["y"] + 40)
    until(page, "document.getElementById('main')._fullLayout.xaxis.range[1] > 300")


def test_no_button_of_a_chart_uploads_it(page):
    titles = page.evaluate("[...document.querySelectorAll('.modebar-btn')].map(b => b.dataset.title)")
    assert "Zoom in" in titles and not [title for title in titles if re.search("share|cloud|send|edit", title, re.I)]


def test_the_legend_hides_shows_and_isolates_points_in_all_charts(page):
    first = page.locator("#legend button").first
    first.click()
    assert first.get_attribute("aria-pressed") == "false"
    assert LABEL not in [name for name, *_ in traces(page)] and page.locator("#table tbody tr").count() == 6
    assert page.locator("#parallel path.run.off").count() == 1
    first.click()
    assert LABEL in [name for name, *_ in traces(page)] and page.locator("#table tbody tr").count() == 7
    first.dblclick()
    assert page.locator("#legend [aria-pressed=true]").count() == 1 and column(page, "lr") == ["0.003"]


@pytest.mark.parametrize(
    ("words", "labels"),
    [
        ("warm lr=0.003", [LABEL]),
        ("lr=0.1", ["recipe=scratch  data=stdlib  lr=0.1", "recipe=warm  data=stdlib  lr=0.1"]),
        ("lr=0.10", ["recipe=scratch  data=stdlib  lr=0.1", "recipe=warm  data=stdlib  lr=0.1"]),
        ("recipe=w* lr<0.1 lr!=1e-3", [LABEL]),
        ("loss < 2.25 lr == 0.003", [LABEL]),
        ("weight_decay=0 recipe=warm lr=0.003", [LABEL]),
        ("accuracy>0.6 lr=3e-3", [LABEL]),
        ("state!=completed", ["<img src=x onerror=alert(1)>"]),
        ("accuracy=", ["<img src=x onerror=alert(1)>"]),
        ("lr>=0.1", ["recipe=scratch  data=stdlib  lr=0.1", "recipe=warm  data=stdlib  lr=0.1"]),
        ("seed=3 warm lr=0.003", [LABEL]),
        ("steps=40", ["<img src=x onerror=alert(1)>"]),
        ("time>1 time<=3 lr=0.003 warm", [LABEL]),
        ("of=300 optim.beta2=None warm lr=0.003", [LABEL]),
        ("when=2026-11-22 when>2026-11-21 when<=2026-11-23 warm sweep= lr=0.003", [LABEL]),
    ],
)  # fmt: skip
def test_the_filter_has_the_conditions_of_runs(page, words, labels):
    page.fill("#filter", words)
    until(page, f"new URLSearchParams(location.hash.slice(1)).get('filter') === {json.dumps(words.strip())}")
    assert page.locator("#legend button").count() == len(labels)
    assert set(page.locator("#legend .label").all_text_contents()) >= {label for label in labels if "<" not in label}
    assert page.locator("#count").inner_text().split(";")[0] == f"{len(labels)} of 7 points"
    assert page.get_attribute("#filter", "aria-invalid") == "false"


@pytest.mark.parametrize(
    ("words", "count", "problem"),
    [
        ("lrr=1", 7, "ignored: lrr=1 (no run has the setting lrr)"),
        ("lr < x trial=2", 7, "ignored: lr<x (< needs a number); ignored: trial=2 (no run has the setting trial)"),
        (
            "when<banana",
            7,
            "ignored: when<banana (< needs a date or time such as 2026-11-20T18:00, today or yesterday)",
        ),
        (
            "when>2026-13-45",
            7,
            "ignored: when>2026-13-45 (> needs a date or time such as 2026-11-20T18:00, today or yesterday)",
        ),
        ("zzz", 0, "no run contains zzz; try a condition such as state!=diverged"),
        ("lr= recipe=warm", 3, "ignored: lr= (needs a value)"),
        ("recipe=wram", 0, "no run has recipe=wram; values: scratch · warm"),
        ("lr=0.003,7 recipe=warm", 1, "no run has lr=7; values: 0.001 · 0.003 · 0.1"),
    ],
)
def test_a_filter_with_an_unknown_setting_or_value_is_explained(page, words, count, problem):
    page.fill("#filter", words)
    until(page, f"document.getElementById('count').textContent == '{count} of 7 points; {problem}'")
    assert page.get_attribute("#filter", "aria-invalid") == "true"
    colours = page.evaluate("['#count', '#count .bad'].map((s) => getComputedStyle(document.querySelector(s)).color)")
    assert colours[0] != colours[1], "the problem has the colour of errors, the count has not"
    assert page.locator("#legend button").count() == count


def test_the_filter_knows_today_and_yesterday(page):
    day = datetime.now().replace(hour=0, minute=0, second=0, microsecond=0)
    times = [(day - timedelta(days=days)).isoformat() for days in (0, 1)]
    assert call(page, "filter.js", "['today', 'yesterday'].map((day) => readTime(day, true))") == times
    assert call(page, "filter.js", "readTime('today,2026-11-22', false)") == f"{times[0][:10]}*,2026-11-22*"


def test_the_filter_knows_the_words_of_python(page):
    pairs = "[['false', 'False'], ['true', 'True'], ['null', 'None'], ['false', 'no']]"
    assert call(page, "filter.js", f"{pairs}.map((pair) => isEqual(...pair))") == [True, True, True, False]


def test_the_filter_compares_numbers_and_only_metrics_as_printed(page):
    cases = "[['0.00012', '0.0001', 'lr'], ['0.0001', '1e-4', 'lr'], ['4.72904', '4.7290', 'loss']," \
            "['0.90004', '0.9000', 'optim.beta1']]"  # fmt: skip
    assert call(page, "filter.js", f"{cases}.map((one) => isEqual(...one))") == [False, True, True, False]


def test_a_question_mark_stands_for_one_character_and_other_signs_for_themselves(page):
    cases = "[['scratch', 'scr?tch'], ['scratch', 'scr?atch'], ['a.b', 'a.b'], ['axb', 'a.b'], ['a+b', 'a+*']]"
    assert call(page, "filter.js", f"{cases}.map((one) => isEqual(...one))") == [True, False, True, False, True]


def test_a_run_without_a_value_differs_from_every_value(page):
    cases = "[['!=', '3'], ['=', '3'], ['=', 'null'], ['=', ''], ['<', '3'], ['>=', '']]"
    found = call(page, "filter.js", f"{cases}.map(([sign, text]) => matchesCondition(null, sign, text, 'lr'))")
    assert found == [True, False, True, True, False, False]


@pytest.mark.parametrize(
    ("values", "rising", "near"),
    [
        ([0, 1, 2, 10, 10.5], False, [0, 1, 2, 10]),
        ([9, 8, 7, -1, -2], True, [9, 8, 7, -1]),
        ([3, 3, 3, 7], False, [3, 3, 3, 7]),
    ],
)
def test_near_values_are_within_five_times_the_distance_of_the_median(page, values, rising, near):
    assert call(page, "data.js", f"nearBest({values})", data={"rising": rising}) == near


def test_runs_that_are_not_ranked_follow_by_length_and_loss(page):
    rows = [(False, 40, 1.0), (True, 20, 3.0), (False, 80, 2.0), (False, 80, 1.5), (True, 10, 1.0)]
    keys, rest = ("counts", "steps", "loss"), {"curves": {}, "warnings": [], "all": {}, "point": 0}
    given = {"points": [{}], "runs": [{**dict(zip(keys, row, strict=True)), **rest} for row in rows]}
    found = call(page, "data.js", "prepare(given).runs.map((run) => [run.steps, run.loss])", given=given)
    assert found == [[20, 3.0], [10, 1.0], [80, 1.5], [80, 2.0], [40, 1.0]]


def test_the_page_has_a_title_in_words_above_the_paths(page, swept):
    assert page.title() == page.locator("h1").inner_text() == "Comparison of recipe, data, lr and seed: 25 runs"
    assert page.locator("h1 + p").inner_text() == str(swept / "runs")


def test_a_filter_that_some_runs_of_a_point_match_says_so(page):
    note = "points contain a matching run; means are of all their runs"
    page.fill("#filter", "seed = 1")
    until(page, f"document.getElementById('count').textContent == '6 of 7 points; {note}'")


def test_charts_without_points_keep_their_axes(page):
    until(page, "document.getElementById('count').textContent == '7 of 7 points'")
    before = axis(page, "xaxis"), axis(page, "yaxis"), axis(page, "yaxis", "speed")
    page.fill("#filter", "nothing is called so")
    until(page, "document.querySelectorAll('#legend button').length == 0")
    assert page.locator("#result").text_content() == "No point passes the filter clear"
    assert page.locator("body").inner_text().count("passes the filter") == 1
    assert (axis(page, "xaxis"), axis(page, "yaxis"), axis(page, "yaxis", "speed")) == before
    page.click("#result button")
    until(page, "document.querySelectorAll('#legend button').length == 7")
    assert page.input_value("#filter") == "" and page.locator("#result").text_content().startswith("Best held-out loss")
    page.locator("#legend button").first.click(modifiers=["Shift"])
    page.locator("#legend button").first.click()
    page.click("#result button:has-text('show all')")
    assert page.locator("#legend [aria-pressed=false]").count() == 0


def test_the_address_keeps_theme_and_view_over_a_reload(chromium, swept):
    opened = Opened(chromium, swept / "report.html", viewport={"width": 1300, "height": 900}, color_scheme="light")
    page = opened.page
    page.click("#theme")
    page.click("#over button:has-text('time')")
    page.check("#ylog")
    page.locator("#legend button").first.click()
    page.fill("#filter", "recipe=warm")
    until(page, "document.querySelectorAll('#legend button').length == 3")
    page.click("#table th button:has-text('lr')")
    grip = page.locator("#parallel .grip[data-axis='lr']")
    grip.scroll_into_view_if_needed()
    box = grip.bounding_box()
    page.mouse.move(box["x"] + 12, box["y"] + 4)
    page.mouse.down()
    page.mouse.move(box["x"] + 12, box["y"] + box["height"] * 0.8, steps=3)
    page.mouse.up()
    until(page, "location.hash.includes('filter=') && location.hash.includes('axis=')")

    def view():
        return page.evaluate("""[
          document.documentElement.dataset.theme, document.getElementById("main").layout.xaxis.title.text,
          document.getElementById("main").layout.yaxis.type, document.getElementById("filter").value,
          [...document.querySelectorAll("#legend button")].map((b) => b.ariaPressed + b.textContent),
          document.querySelector("#table tbody").innerText, document.querySelector("[aria-sort=ascending]").innerText,
        ]""")

    before = view()
    assert before[:4] == ["dark", "time (s)", "log", "recipe=warm"] and len(before[4]) == 2
    page.reload()
    page.wait_for_selector("html[data-ready]")
    assert view() == before
    with page.expect_event("load"):  # the page reloads itself
        page.goto((swept / "report.html").as_uri() + "#over=nonsense&smooth=x&hide=nothing&zoom=a,b&axis=q&theme=dark")
    page.wait_for_selector("html[data-ready]")  # a wrong address is no error
    assert page.locator("#legend button").count() == 7 and opened.trouble == []
    opened.context.close()


def test_the_address_keeps_the_zoom(chromium, swept):
    opened = Opened(chromium, swept / "report.html", viewport={"width": 1300, "height": 900})
    page = opened.page
    with page.expect_event("load"):  # the page reloads itself
        page.goto((swept / "report.html").as_uri() + "#zoom=50,150&tall=2,4")
    page.wait_for_selector("html[data-ready]")
    assert (axis(page, "xaxis"), axis(page, "yaxis"), axis(page, "xaxis", "lr")) == ((50, 150), (2, 4), (50, 150))
    assert page.evaluate("location.hash") == "#zoom=50%2C150&tall=2%2C4" and opened.trouble == []
    opened.context.close()


def test_the_keyboards_focus_stays_on_legend_and_table(page):
    page.locator("#legend button").nth(2).focus()
    page.keyboard.press("Space")
    assert page.evaluate("document.activeElement.dataset.place") == "2"
    page.keyboard.press("Shift+Enter")
    assert page.evaluate("document.activeElement.dataset.place") == "2"
    page.locator("#table th button").nth(1).focus()
    head = page.evaluate("document.activeElement.dataset.head")
    page.keyboard.press("Enter")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.dataset.head") == head
    assert page.locator("#table th[aria-sort=descending]").count() == 1


def test_charts_have_a_name_for_screen_readers(page):
    names = page.evaluate("[...document.querySelectorAll('[role=img]')].map((e) => e.getAttribute('aria-label'))")
    assert len(names) == 4 and all(names)  # curves, three small charts
    assert page.locator("#parallel [role=group]").get_attribute("aria-label").startswith("held-out loss of 7 points")
    assert f"7 of 7 points. Best: {LABEL}" in names[0]
    assert page.locator("[role=img] button").count() == 0


def test_the_buttons_of_a_chart_are_shown_when_they_have_the_focus(page):
    page.locator("#main .modebar-btn").nth(1).focus()
    page.keyboard.press("Tab")
    until(page, "getComputedStyle(document.querySelector('#main .modebar')).opacity == 1")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.evaluate("document.activeElement.blur()")


def test_points_differ_in_small_charts_and_without_a_final_metric(page):
    """Marks tell colours apart; lines that coincide are dashed, and a point without a final metric is hollow."""
    marks = page.evaluate("document.getElementById('lr').data.map((t) => t.marker.symbol)")
    dashes = page.evaluate("document.getElementById('lr').data.map((t) => t.line.dash)")
    assert len(set(marks)) == 7 and dashes.count("9px,9px") == 3
    fills = page.evaluate("[...document.querySelectorAll('#legend .chip path')].map((p) => p.getAttribute('fill'))")
    assert fills[-1] == "none" and "none" not in fills[:-1]
    shapes = page.evaluate("[...document.querySelectorAll('#parallel path.mark')].map((p) => p.getAttribute('d'))")
    assert len(set(shapes)) == 7  # each point has its mark between the axes
    ended = page.locator("#parallel path.run.ended")
    assert ended.count() == 1 and ended.get_attribute("data-point") == "6"
    ticks = page.locator("#parallel text.tick").evaluate_all("all => all.map((t) => [t.getBBox().y, t.textContent])")
    assert max(ticks)[1] == "killed"  # it has an end of the axis of its own
    assert page.locator("#parallel path.run.best").get_attribute("data-point") == "0"


def test_the_table_is_saved_as_csv(page, swept):
    until(page, "document.getElementById('count').textContent == '7 of 7 points'")
    with page.expect_download() as download:
        page.click("#save")
    rows = list(csv.DictReader(Path(download.value.path()).read_text().splitlines()))
    assert list(rows[0])[:6] == ["held-out loss", "± held-out loss", "steps taken", "name", "recipe", "data"]
    last = [lines[-1]["loss"] for lines in events(swept, "eval", **BEST)]
    assert len(rows) == 7 and rows[0]["name"] == LABEL and rows[0]["steps taken"] == "300"
    assert float(rows[0]["held-out loss"]) == float(f"{np.mean(last):.5g}")
    assert float(rows[0]["± held-out loss"]) == float(f"{np.std(last, ddof=1):.5g}")
    assert max(len(cell) for row in rows for head, cell in row.items() if "loss" in head) <= 8, "no needless digits"


def test_the_filter_knows_jobs_and_trials_of_a_search(page):
    script = (PAGE / "filter.js").read_text()
    runs = [{"sweep": "s", "path": f"s/{n}-warm", "all": {"lr": lr}} for n, lr in enumerate(("0.1", "1e-3"))]
    found = {"columns": ["path"], "search": {"trials": [{"number": 7, "values": {"lr": 0.001}}]}, "runs": runs}
    read = "data.runs.map((run) => [readValue(run, 'job'), readValue(run, 'trial')])"
    values = page.evaluate(f"(() => {{ const data = {json.dumps(found)};\n{script}\nreturn {read}; }})()")
    assert values == [["0", None], ["1", 7]]


def test_a_formula_in_a_saved_table_is_quoted(chromium, tmp_path):
    for name, data in (("a", "=1+1"), ("b", "-2"), ("c", "@SUM(A1)"), ("d", "+x")):
        write_run(tmp_path / "runs" / name, data__name=data, steps=40)
    assert main(["compare", str(tmp_path / "runs"), "--html", str(tmp_path / "report.html")]) == 0
    opened = Opened(chromium, tmp_path / "report.html")
    with opened.page.expect_download() as download:
        opened.page.click("#save")
    text = Path(download.value.path()).read_text()
    assert all(f'"\'{formula}"' in text for formula in ("=1+1", "@SUM(A1)", "+x"))
    assert '"-2"' in text and opened.trouble == []
    opened.context.close()


def test_a_saved_table_of_runs_tells_them_apart(chromium, tmp_path):
    for steps, lr in ((40, 0.001), (40, 0.003), (80, 0.01)):
        write_run(tmp_path / f"runs/{lr}", lr=lr, steps=steps, scores={"score": 1e308})
    assert main(["compare", str(tmp_path / "runs"), "--html", str(tmp_path / "report.html")]) == 0
    opened = Opened(chromium, tmp_path / "report.html", viewport={"width": 1300, "height": 900})
    with opened.page.expect_download() as download:
        opened.page.click("#save")
    rows = list(csv.DictReader(Path(download.value.path()).read_text().splitlines()))
    assert {(row["steps"], row["steps taken"], row["name"]) for row in rows} == {
        ("40", "40", "scratch-llama"), ("80", "80", "scratch-llama"),
    }  # fmt: skip
    assert {Path(row["path"]).name for row in rows} == {"0.001", "0.003", "0.01"} and len(rows[0]) == 12
    assert "Values beyond ±1e300 are not drawn" in opened.page.locator("#said").inner_text()
    labels = opened.page.locator("#lr .yaxislayer-above text").all_text_contents()
    assert labels == ["0.001", "0.003", "0.01"]  # the rates that were typed
    assert opened.trouble == []
    opened.context.close()


def luminance(colour):
    rgb = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb]
    return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))


# Machado, Oliveira and Fernandes (2009): linear sRGB as seen without long, middle and short cones
BLIND = (
    ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
)


def lab(colour, seen):
    rgb = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.clip(seen @ np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4), 0, 1)
    to_xyz = [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
    x, y, z = np.cbrt(np.maximum(to_xyz @ linear / [0.95047, 1, 1.08883], 1e-9))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("seen", [np.eye(3), *map(np.array, BLIND)], ids=["all", "protan", "deutan", "tritan"])
@pytest.mark.parametrize("series", [COLOURS, DARK_COLOURS], ids=["light", "dark"])
def test_colours_of_series_differ_for_the_common_colour_blindnesses(series, seen):
    pairs = itertools.combinations(series, 2)
    assert min(np.linalg.norm(lab(one, seen) - lab(other, seen)) for one, other in pairs) >= 23


def test_colours_contrast_with_their_ground(page):
    page_css = (PAGE / "page.css").read_text()
    grounds = re.findall(r"--card: (#\w+)", page_css)
    for ground, series, ramp in zip(grounds, (COLOURS, DARK_COLOURS), (RAMP, DARK_RAMP), strict=True):
        ground_luminance = luminance(ground if len(ground) == 7 else "#" + "".join(2 * c for c in ground[1:]))
        for colour in (*series, *ramp):
            low, high = sorted((luminance(colour), ground_luminance))
            assert (high + 0.05) / (low + 0.05) >= (4.5 if colour in DARK_COLOURS else 3), colour
        lightness = [luminance(colour) for colour in ramp]
        assert lightness == sorted(lightness, reverse=ground_luminance < 0.5)  # the rank can be read in greyscale


def test_a_printed_table_breaks_no_word_and_repeats_its_head(chromium, tmp_path):
    for number, lr in enumerate((1e-4, 3e-4, 0.003)):
        path = tmp_path / f"runs/{number}"
        write_run(path, lr=lr, steps=40, optim__weight_decay=number / 8, scores={"accuracy": 0.5, "f1": 0.25})
    assert main(["compare", str(tmp_path / "runs"), "--html", str(tmp_path / "report.html")]) == 0
    opened = Opened(chromium, tmp_path / "report.html", viewport={"width": 1300, "height": 900})
    page = opened.page
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    page.emulate_media(media="print")
    lines = """[...document.querySelectorAll("#table tbody td")].map((cell) => {
      const range = document.createRange(), text = cell.lastChild;
      if (!text || text.nodeType !== Node.TEXT_NODE) return 1;
      range.selectNodeContents(text);
      return range.getClientRects().length;
    })"""
    assert set(page.evaluate(lines)) <= {0, 1}
    table, paper = (page.locator(f"#table {kind}").bounding_box() for kind in ("table", ".scroll"))
    assert table["width"] <= paper["width"]
    assert page.locator("#table th:has-text('begun')").is_hidden()
    assert page.evaluate("getComputedStyle(document.querySelector('#table thead')).display") == "table-header-group"
    badge, row = page.locator(".badge").bounding_box(), page.locator("#table tbody tr").first.bounding_box()
    assert badge["y"] >= row["y"] and badge["height"] < row["height"]
    heights = [line.bounding_box()["height"] for line in page.locator("#table tbody tr").all()]
    assert max(heights) - min(heights) < 1  # the badge makes its row no higher
    opened.context.close()


def test_a_printed_table_has_all_rows_and_columns_in_legible_text(chromium, tmp_path):
    for number in range(30):
        write_run(
            tmp_path / f"runs/{number}", lr=(number + 1) / 7000, steps=40, scores={f"score_{n}": 0.5 for n in range(9)}
        )
    assert main(["compare", str(tmp_path / "runs"), "--html", str(tmp_path / "report.html")]) == 0
    opened = Opened(chromium, tmp_path / "report.html", viewport={"width": 1300, "height": 900})
    page = opened.page
    assert page.locator("#table tbody tr").count() == 20
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    page.emulate_media(media="print")
    assert page.locator("#table tbody tr").count() == 30 and page.locator("#more-rows").is_hidden()
    size, width, room = page.evaluate("""(() => {
      const table = document.querySelector("#table table");
      return [parseFloat(getComputedStyle(table).fontSize), table.offsetWidth, table.parentElement.clientWidth];
    })()""")
    assert size >= 8 and width <= room  # a page of A4 has 700 such pixels: 8 of them are 6 points
    opened.context.close()


def test_a_printed_page_has_the_settings_and_command_of_each_run(chromium, swept):
    opened = Opened(chromium, swept / "report.html", viewport={"width": 1300, "height": 900})
    page = opened.page
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    page.emulate_media(media="print")
    runs = page.locator("#runs details").all()
    assert len(runs) == page.locator("#runs details[open]").count() == 25
    for run in runs:
        command, state = run.locator("pre").inner_text(), run.locator("p").inner_text()
        assert command.startswith("toyexp --config-path ") and re.match("(completed|killed.*) · /", state)
    shared = page.locator("#shared").inner_text()
    assert shared.startswith("# settings of all runs") and "optim.weight_decay=" in shared and "\nlr=" not in shared
    assert page.locator("#table th button").count() == 0  # with them, Chromium would print the head on one page only
    assert page.locator("#runs .again button").first.is_hidden()
    assert page.locator("#more-runs").is_hidden()
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.locator("#shared").is_hidden()
    assert page.locator("#runs details[open]").count() == 0 and opened.trouble == []
    opened.context.close()


def test_a_printed_page_is_light_and_fits_the_paper(chromium, swept, tmp_path):
    opened = Opened(chromium, swept / "report.html", viewport={"width": 1300, "height": 900}, color_scheme="dark")
    page = opened.page
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    page.emulate_media(media="print")
    assert page.evaluate("document.documentElement.dataset.theme") == "light"
    right = "[...document.querySelectorAll('main *')].map((e) => e.getBoundingClientRect().right)"
    assert page.evaluate(f"Math.max(...{right})") <= 720
    overlaps = page.evaluate("""() => {
      const boxes = [...document.querySelectorAll("td, th, #legend button, figcaption, .js-plotly-plot, h2")]
        .map((e) => [e, e.getBoundingClientRect()]).filter(([, b]) => b.width && b.height);
      return boxes.flatMap(([e, a], i) => boxes.slice(i + 1).filter(([o, b]) => !e.contains(o) && !o.contains(e) &&
        a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1)).length;
    }""")
    assert overlaps == 0
    assert page.locator("#zooming").is_hidden() and page.locator("#hint").is_hidden()
    sizes = [page.evaluate(f"parseFloat(getComputedStyle(document.querySelector('{which}')).fontSize)")
             for which in ("h1", "h2", "body", "#legend", "figcaption")]  # fmt: skip
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == 5  # no caption is larger than a heading
    cut = "[...document.querySelectorAll('#legend .label')].filter((e) => e.offsetWidth < e.scrollWidth)"
    assert page.evaluate(f"{cut}.map((e) => e.textContent).filter((text) => !text.includes('<'))") == []
    assert page.evaluate("getComputedStyle(document.querySelector('.label')).overflowWrap") == "normal"
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    page.emulate_media(media="screen")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert page.evaluate("document.getElementById('main').getBoundingClientRect().width") > 700
    assert page.pdf(format="A4").startswith(b"%PDF") and opened.trouble == []
    opened.context.close()


def open_search(chromium, tmp_path, scores, metric, pruned=((3, 20),)):
    """Open the report of a search of six trials; `pruned` has the numbers of those pruned, each with its last step."""
    pruned = dict(pruned)
    rates = [1e-8, 1e-3, 0.1, 3e-4, 3e-3, 1e-2]
    for number, score in enumerate(scores):
        write_run(tmp_path / f"s/{number}", lr=rates[number], held_out=score, steps=40, scores={"accuracy": score},
                  optim="adamw" if number % 2 else "lion", optim__weight_decay=(0.1, 0)[number % 2])  # fmt: skip
    trials = [
        {"trial": n, "state": "pruned" if n in pruned else "complete", "score": score, "step": pruned.get(n), "values":
         {"lr": rates[n], "optim": "adamw" if n % 2 else "lion", "optim.weight_decay": (0.1, 0)[n % 2]}}
        for n, score in enumerate(scores)
    ]  # fmt: skip
    record = {
        "search": "tpe",
        "metric": metric,
        "repeats": 1,
        "trials": trials,
        "importances": {"lr": 0.9},
        "notes": [],
        "no_importances": "",
    }
    (tmp_path / "s/search.json").write_text(json.dumps(record))
    (tmp_path / "s/sweep.json").write_text(
        json.dumps({"space": ["lr=tag(log,interval(1e-4,1e-1))", "optim=adamw,lion"]})
    )
    assert main(["compare", str(tmp_path / "s"), "--html", str(tmp_path / "report.html")]) == 0
    return Opened(chromium, tmp_path / "report.html", viewport={"width": 1300, "height": 900})


def test_a_search_for_the_highest_metric_shows_the_lowest_trials_at_the_edge(chromium, tmp_path):
    opened = open_search(chromium, tmp_path, [0.5, 0.6, 0.55, 0.7, 0.58, 0.01], "accuracy")
    best, dots, star = traces(opened.page, "trials")
    assert best[2] == [0.5, 0.6, 0.6, 0.6, 0.6, 0.6] and dots[2][:5] == [0.5, 0.6, 0.55, 0.7, 0.58]
    assert star[1:3] == [[1], [0.6]]  # the pruned trial has a higher metric
    low, _ = axis(opened.page, "yaxis", "trials")
    assert low < dots[2][5] < 0.5 and low > 0.3  # in the compressed part
    assert opened.trouble == []
    opened.context.close()


def test_a_search_shows_its_history_and_each_setting(chromium, tmp_path):
    opened = open_search(chromium, tmp_path, [3.0, 2.5, 40.0, 2.8, 2.2, 2.4], "loss")
    page = opened.page
    best, dots, star = traces(page, "trials")
    assert best[1:3] == [[0, 1, 2, 4, 5, 5], [3.0, 2.5, 2.5, 2.2, 2.2, 2.2]]  # the best so far, of completed trials
    note = page.locator("#search-note").inner_text()
    legend = "rings: 1 trial pruned at step 20; grey band: logarithmic."
    assert note == f"Line: best so far; star: best trial; {legend}"
    result = page.locator("#result").inner_text()
    assert result.startswith("Best held-out loss: 2.2000, ") and "lr=0.003" in result
    assert page.locator("#search-best").inner_text() == f"{result}, trial 4"
    assert column(page, "trial") == ["4", "5", "1", "3", "0", "2"]
    heads = page.locator("#table thead th").all_inner_texts()
    assert "begun" not in heads, "all runs began in the same minute"
    colours = page.evaluate("document.getElementById('trials').data[1].marker.color")
    assert colours[3] == page.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--soft').trim()")
    low, high = axis(page, "yaxis", "trials")
    assert dots[2][3] == 2.8 and 3 < dots[2][2] < high < 4 and low < 2.2  # far trials are in the compressed part
    assert page.locator("#trials .yaxislayer-above text").all_text_contents()[-1] == "40"
    assert dots[1] == [0, 1, 2, 3, 4, 5] and dots[2][:2] == [3.0, 2.5]
    symbols = page.evaluate("document.getElementById('trials').data[1].marker.symbol")
    assert symbols == ["circle", "circle", "circle", "circle-open", "circle", "circle"]
    assert star[1:3] == [[4], [2.2]] and traces(page, "setting-lr")[-1][1:3] == [[0.003], [2.2]]
    assert page.evaluate("document.getElementById('setting-lr').data.at(-1).marker.symbol") == "star-open"
    assert page.evaluate("document.getElementById('setting-lr')._fullLayout.xaxis.type") == "log"
    assert 2 <= page.locator("#setting-lr .xaxislayer-above text").count() <= 4  # of seven decades
    for key, names in (("optim", ["adamw", "lion"]), ("optim.weight_decay", ["0", "0.1"])):  # values of a list
        assert page.locator(f"[id='setting-{key}'] .xaxislayer-above text").all_text_contents() == names
        xs = traces(page, f"setting-{key}")[0][1]
        assert [round(x) for x in xs] == [1, 0, 1, 0, 1, 0] and len(set(xs)) == 6  # side by side
    captions = page.locator("#settings figcaption")
    assert captions.all_inner_texts() == ["lr (importance 90 %)", "optim", "weight_decay"]
    assert captions.last.get_attribute("title") == "optim.weight_decay"
    boxes = [page.locator(f"[id='setting-{key}']").bounding_box() for key in ("lr", "optim")]
    assert boxes[0]["x"] + boxes[0]["width"] <= boxes[1]["x"] and opened.trouble == []
    opened.context.close()


def test_the_charts_of_a_search_show_the_trials_that_pass_the_filter(chromium, tmp_path):
    opened = open_search(chromium, tmp_path, [3.0, 2.5, 40.0, 2.8, 2.2, 2.4], "loss")
    page = opened.page
    page.fill("#filter", "optim=adamw")
    until(page, "document.getElementById('search-best').textContent.includes('shown')")
    best, dots, star = traces(page, "trials")
    assert dots[1:3] == [[1, 3, 5], [2.5, 2.8, 2.4]] and star[1:3] == [[5], [2.4]] and best[2] == [2.5, 2.4, 2.4]
    assert page.locator("#search-best").inner_text().startswith("Best shown held-out loss: 2.4000, ")
    assert page.locator("#search-note").inner_text() == "Line: best so far; star: best trial; rings: 1 pruned."
    assert axis(page, "yaxis", "trials")[1] < 3.1, "no band: the trial far above the others is hidden"
    page.fill("#filter", "state=killed")
    until(page, "document.getElementById('search-best').textContent === ''")
    assert traces(page, "trials")[1][1] == [] and opened.trouble == []
    opened.context.close()


def test_with_many_points_only_the_best_and_the_one_pointed_at_have_a_training_curve(chromium, tmp_path):
    for number in range(9):
        write_run(tmp_path / f"runs/{number}", lr=(number + 1) / 1000, held_out=2 + number / 10, steps=100)
    write_run(tmp_path / "runs/9", lr=0.02, until=60, reason=None, steps=100)
    assert main(["compare", str(tmp_path / "runs"), "--html", str(tmp_path / "report.html")]) == 0
    opened = Opened(chromium, tmp_path / "report.html", viewport={"width": 1300, "height": 900})

    def trained():
        return [name for name, *_ in traces(opened.page) if name.startswith("lr=")]

    assert trained() == ["lr=0.001"] and sum(name == "held out" for name, *_ in traces(opened.page)) == 10
    assert [x for name, x, *_ in traces(opened.page) if name == "end"] == [[50]], "where its held-out curve ends"
    opened.page.hover("#legend button >> nth=4")
    until(opened.page, "document.getElementById('main').data.some((trace) => trace.name === 'lr=0.005')")
    assert sorted(trained()) == ["lr=0.001", "lr=0.005"]
    opened.page.uncheck("#held")
    assert len(trained()) == 10 and [x for name, x, *_ in traces(opened.page) if name == "end"] == [[60]]
    assert opened.trouble == []
    opened.context.close()


def test_pruned_trials_are_drawn_at_their_last_metric_beside_completed_ones(chromium, tmp_path):
    opened = open_search(chromium, tmp_path, [3.0, 2.5, 40.0, 30.0, 2.2, 2.4], "loss", [(3, 20), (5, 40)])
    _, dots, _ = traces(opened.page, "trials")
    assert 3 < dots[2][3] < dots[2][2] < axis(opened.page, "yaxis", "trials")[1]  # 30 below 40
    assert "(pruned at step 20)<br>held-out loss 30.0000" in opened.page.evaluate(
        "document.getElementById('trials').data[1].text[3]"
    )
    opacity = opened.page.evaluate("document.getElementById('trials').data[1].marker.opacity")
    assert 0.5 < opacity[3] < opacity[5] == 1, "the later pruned, the darker"
    assert opened.trouble == []
    opened.context.close()


def test_values_far_from_the_others_are_arrows_at_the_edge_of_every_chart(chromium, tmp_path):
    for number, (lr, held_out) in enumerate(((0.001, 2.5), (0.003, 2.0), (0.01, 2.2), (10.0, 400.0))):
        write_run(tmp_path / f"runs/{number}", lr=lr, held_out=held_out, steps=100)
    events, result = (tmp_path / "runs/3" / name for name in ("events.jsonl", "result.json"))
    result.write_text(json.dumps({**json.loads(result.read_text()), "diverged": True}))
    lines = [json.loads(line) for line in events.read_text().splitlines()]
    for line in lines:
        if line["kind"] == "step" and line["step"] > 5:
            line.update(loss=400.0, grad_norm=1e20)
    events.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["compare", str(tmp_path / "runs"), "--html", str(tmp_path / "report.html")]) == 0
    opened = Opened(chromium, tmp_path / "report.html", viewport={"width": 1500, "height": 900})
    page = opened.page
    last = page.locator("#legend .chip path").last.get_attribute("fill")
    for chart in ("main", "grad_norm"):
        arrows = page.evaluate(f"document.getElementById('{chart}').data.find((t) => t.name === 'above')")
        high = axis(page, "yaxis", chart)[1]
        top = 10**high if chart == "grad_norm" else high
        assert arrows["y"] == pytest.approx([top] * len(arrows["x"])) and {*arrows["textfont"]["color"]} <= {
            last,
            last.replace(", 1)", ", 0.9)"),
        }
        assert top < 1000 and len(arrows["x"]) > 5
    paths = page.locator("td.strip svg path").evaluate_all("all => all.map((p) => p.getAttribute('d'))")
    assert paths[-1] == "M1,1L11,6L1,11z" and paths[-1] not in paths[:-1]
    assert page.locator("th.strip").inner_text().split() == ["2.0000", "2.5000"]
    assert "to 400" in page.locator("#parallel text.tick").all_text_contents()
    assert page.locator("#table td.bad").all_text_contents() == ["diverged"]
    assert opened.trouble == []
    opened.context.close()


def test_gradient_norms_are_averaged_in_their_logarithm(page):
    smooth = "smoothLogs([0, 1, 2], [1, 100, 0], 1)"
    first, middle, last = call(page, "data.js", smooth)
    expected = call(page, "data.js", "smoothCurve([0, 1, 2], [0, Math.log(100), null], 1)")
    assert [first, middle] == pytest.approx(np.exp(expected[:2])) and last is None


def test_the_ratio_of_losses_ignores_steps_without_a_finite_loss(page):
    """A ratio above 20 makes the vertical axis of runs that all diverged logarithmic."""
    runs = [{"curves": {"loss": {"my": losses}}} for losses in ([None], [None, 2, 50], [1, 1000, None])]
    zero = [{"curves": {"loss": {"my": [0, 1]}}}]
    assert call(page, "data.js", "all.map(lossRatio)", all=[runs, runs[:1], zero]) == [1000, 0, 0]


def test_thinned_curves_keep_each_bins_lowest_and_highest_point_in_order(page):
    xs, ys = [*range(1000)], np.random.default_rng(0).normal(size=1000)
    shown, values = call(page, "data.js", f"clipAndThin([{xs}, {ys.tolist()}], 101, 898, 80)")
    assert shown == sorted({*shown}) and values == ys[shown].tolist()
    bins = ys[100:900].reshape(40, 20)
    extremes = 100 + 20 * np.arange(40) + [bins.argmin(axis=1), bins.argmax(axis=1)]
    assert {*shown} == {*extremes.ravel().tolist()}


def test_losses_of_millions_have_short_exponents_in_the_legend(chromium, tmp_path):
    for seed, held_out in enumerate((2e6, 4e6)):
        write_run(tmp_path / f"runs/{seed}", seed=seed, held_out=held_out)
    assert main(["compare", str(tmp_path / "runs"), "--html", str(tmp_path / "report.html")]) == 0
    opened = Opened(chromium, tmp_path / "report.html")
    assert opened.page.locator("#legend .value").inner_text() == "3e6 ± 1.414e6" and opened.trouble == []
    opened.context.close()


def test_arrow_keys_keep_the_points_of_a_value_on_an_axis(page):
    grip = page.locator("#parallel .grip[data-axis='lr']")
    grip.focus()
    kept, every = [], {*column(page, "lr")}
    for key in ("ArrowUp", "ArrowUp", "Shift+ArrowUp", "ArrowDown", "Escape"):
        page.keyboard.press(key)
        assert page.evaluate("document.activeElement.dataset.axis") == "lr"
        kept.append({*column(page, "lr")})
    first, second, third, *_ = sorted(every, key=float)
    assert kept == [{first}, {second}, {second, third}, {first}, every]
    assert grip.get_attribute("aria-valuetext") == "all points"


def test_the_learning_rate_of_a_stopped_run_is_not_clipped(chromium, tmp_path):
    write_run(tmp_path / "runs/done", lr=0.003, steps=40)
    write_run(tmp_path / "runs/killed", lr=0.1, steps=40, reason=None, until=30)
    assert main(["compare", str(tmp_path / "runs"), "--html", str(tmp_path / "report.html")]) == 0
    opened = Opened(chromium, tmp_path / "report.html", viewport={"width": 1300, "height": 900})
    low, high = axis(opened.page, "yaxis", "lr")
    assert low < np.log10(0.003) and high > np.log10(0.1)
    assert opened.page.locator("figure:has(#lr) figcaption").inner_text() == "learning rate" and opened.trouble == []
    opened.context.close()


def test_ticks_of_a_settings_axis_are_short_and_have_one_notation(page):
    for values, some in ((["1e18", "1e21"], {"1e18", "1e21"}), (["1e4", "1e6"], {"1e4", "1e5", "1e6"})):
        labels = call(
            page, "choices.js filter.js", f"makeScale({values}, false, true, true).ticks.map((tick) => tick[1])"
        )
        assert {*labels} >= some and max(map(len, labels)) <= 5 and all("e" in label for label in labels)


def test_the_table_draws_each_points_metric_and_deviation_to_scale(page):
    places = page.locator("td.strip svg").evaluate_all("all => all.map((mark) => parseFloat(mark.style.left))")
    values = [float(re.search(r"\d+\.\d+", text)[0]) for text in column(page, "held-out loss") if text != "–"]
    spread = [
        float(([*re.findall(r"± (\d+\.\d+)", text), 0])[0]) for text in column(page, "held-out loss") if text != "–"
    ]
    lows, highs = (np.array(values) + sign * np.array(spread) for sign in (-1, 1))
    expected = 7 + 86 * (np.array(values) - min(lows)) / (max(highs) - min(lows))
    assert page.locator("th.strip span").all_inner_texts() == [f"{min(lows):.4f}", f"{max(highs):.4f}"]
    bars = page.locator("td.strip i").evaluate_all("all => all.map((bar) => parseFloat(bar.style.left))")
    assert min(bars) == pytest.approx(7, abs=0.1), "no bar is cut"
    assert places == pytest.approx(expected, abs=0.1) and page.locator("td.strip i").count() == 6
    assert page.evaluate("document.querySelector('#table .scroll').scrollWidth") <= 1300  # no chart is cut
    assert page.evaluate(
        "(() => { const l = document.getElementById('legend'); return l.scrollHeight <= l.clientHeight; })()"
    )


def test_a_table_that_fits_its_place_is_not_faded(page):
    size = page.viewport_size
    for width in range(1000, 1480, 40):
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_timeout(250)  # the table is drawn again after the last change of the window's size
        box = page.locator("#table .scroll")
        if page.locator("th.strip").is_visible():
            assert box.evaluate("box => [box.className, box.scrollWidth - box.clientWidth]") == ["scroll", 0], width
    page.set_viewport_size(size)


def test_settings_have_short_names_and_a_filter_takes_both_forms(chromium, tmp_path):
    for n, decay in enumerate((0, 0.01, 0.1)):
        write_run(tmp_path / f"runs/{n}", steps=40, optim__weight_decay=decay, held_out=2.0 + n)
    write_run(tmp_path / "runs/3", lr=0.1, steps=40, optim__weight_decay=1, reason=None, until=30)
    assert main(["compare", str(tmp_path / "runs"), "--html", str(tmp_path / "report.html")]) == 0
    opened = Opened(chromium, tmp_path / "report.html", viewport={"width": 1300, "height": 900})
    page = opened.page
    assert "optim.weight_decay" not in page.inner_text("main")
    head = page.locator("#table th button", has_text="weight_decay")
    assert head.count() == 1 and head.get_attribute("title") == "optim.weight_decay"
    assert page.locator("#parallel text title").all_text_contents()[:2] == ["lr", "optim.weight_decay"]
    note = page.locator("#notes li", has_text="1 killed run is not ranked")
    assert note.is_visible()
    for key in ("weight_decay", "optim.weight_decay"):
        page.fill("#filter", f"{key}<1")
        until(page, "document.getElementById('count').textContent == '3 of 4 points'")
        assert note.is_hidden(), "the filter excludes the killed run"
        page.fill("#filter", "")
        until(page, "document.getElementById('count').textContent == '4 of 4 points'")
    assert note.is_visible() and opened.trouble == []
    opened.context.close()


def test_a_gradient_that_becomes_zero_is_said_at_its_chart(chromium, tmp_path):
    events = write_run(tmp_path / "one", steps=40) / "events.jsonl"
    lines = [json.loads(line) for line in events.read_text().splitlines()]
    for line in lines:
        if line["kind"] == "step" and line["step"] >= 7:
            line["grad_norm"] = 0.0
    events.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["compare", str(tmp_path / "one"), "--html", str(tmp_path / "report.html")]) == 0
    opened = Opened(chromium, tmp_path / "report.html", viewport={"width": 1300, "height": 900})
    captions = opened.page.locator("figcaption").all_inner_texts()
    assert captions[:2] == ["learning rate", "gradient norm, smoothed; 0 from step 7"] and opened.trouble == []
    opened.context.close()


def test_settings_that_were_typed_come_before_the_defaults(chromium, tmp_path):
    for lr in (1e-3, 3e-3):
        events = write_run(tmp_path / f"runs/{lr}", lr=lr, steps=40) / "events.jsonl"
        first, *others = events.read_text().splitlines()
        typed = {**json.loads(first), "typed": ["+steps=40", f"lr={lr}", "hydra.run.dir=x"]}
        events.write_text("\n".join([json.dumps(typed), *others, ""]))
    assert main(["compare", str(tmp_path / "runs"), "--html", str(tmp_path / "report.html")]) == 0
    opened = Opened(chromium, tmp_path / "report.html")
    opened.page.locator("#runs summary").first.click()
    settings = opened.page.locator("#runs details pre").nth(1).inner_text().split("\n")
    assert settings[:3] == ["lr=0.003", "steps=40", "# defaults"] and len(settings) > 5 and opened.trouble == []
    opened.context.close()


def test_a_diverged_run_flattens_no_axis(chromium, tmp_path):
    write_run(tmp_path / "runs/good", lr=0.003, steps=300)
    bad = write_run(tmp_path / "runs/bad", lr=1e30, steps=300, reason="diverged")
    lines = [json.loads(line) for line in (bad / "events.jsonl").read_text().splitlines()]
    for line in lines:
        if line["kind"] in ("step", "eval") and line["step"] > 20:
            line["loss"] = 80.0 + line["step"] % 3
    (bad / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["compare", str(tmp_path / "runs"), "--html", str(tmp_path / "report.html")]) == 0
    opened = Opened(chromium, tmp_path / "report.html", viewport={"width": 1300, "height": 900})
    page = opened.page
    assert axis(page, "yaxis")[1] < 15 and axis(page, "yaxis", "lr")[1] < 0  # log10 of the rate
    assert "above" in page.evaluate("document.getElementById('lr').data.map((t) => t.name)")  # arrows at the edge
    for log in (True, False):
        page.set_checked("#ylog", log)
        assert "1 run above" in page.locator("#outliers-label").inner_text()
        page.check("#outliers")
        assert page.is_checked("#ylog") == log, "losses of 2 to 80 need no other axis"
        page.uncheck("#outliers")
    page.check("#outliers")
    assert axis(page, "yaxis")[1] > 80 and axis(page, "yaxis", "lr")[1] > 29
    labels = page.locator("#lr .yaxislayer-above text").count()
    assert labels < 9 and opened.trouble == []
    opened.context.close()


def diverge(run, loss):
    """Give a run the losses `loss(step)`, and mark it as diverged."""
    events, result = (run / name for name in ("events.jsonl", "result.json"))
    result.write_text(json.dumps({**json.loads(result.read_text()), "diverged": True}))
    lines = [json.loads(line) for line in events.read_text().splitlines()]
    lines = [{**line, "loss": loss(line["step"])} if line["kind"] in ("step", "eval") else line for line in lines]
    events.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_report_of_a_diverged_run_shows_all_its_losses_on_a_logarithmic_axis(chromium, tmp_path):
    diverge(write_run(tmp_path / "runs/bad", steps=100, lr=0.1), lambda step: 6.95 + 5 * max(step - 1, 0))
    assert main(["compare", str(tmp_path / "runs"), "--html", str(tmp_path / "report.html")]) == 0
    opened = Opened(chromium, tmp_path / "report.html", viewport={"width": 1300, "height": 900})
    low, high = axis(opened.page, "yaxis")
    assert opened.page.is_checked("#ylog") and low < np.log10(6.95) and high > np.log10(400)
    labels = opened.page.locator("#main .yaxislayer-above text").all_text_contents()
    assert labels == ["10", "20", "50", "100", "200", "500"] and opened.trouble == []
    assert opened.page.locator("#result").inner_text() == "Diverged at step 2"  # the first above 6.95 plus 10 %
    assert opened.page.locator("#legend .value").inner_text() == "diverged"
    assert "Solid line: divergence. Dotted lines: warnings." in opened.page.locator("#said").inner_text()
    for is_log in (False, True):
        opened.page.set_checked("#xlog", is_log)
        ground = opened.page.locator("#main .nsewdrag").first.bounding_box()
        lines = [line.bounding_box()["x"] - ground["x"] for line in opened.page.locator("#main .shapelayer path").all()]
        low, high = axis(opened.page, "xaxis")
        at = [(step - low) / (high - low) for step in (np.log10([2, 7]) if is_log else (2, 7))]
        assert lines == pytest.approx([place * ground["width"] for place in at], abs=3)
    opened.context.close()


def test_held_out_marks_stay_when_outliers_are_shown_and_the_result_is_the_best_shown(chromium, tmp_path):
    for number, (lr, held_out) in enumerate(((0.001, 2.5), (0.003, 2.0), (10.0, 400.0))):
        write_run(tmp_path / f"runs/{number}", lr=lr, held_out=held_out, steps=100)
    diverge(tmp_path / "runs/2", lambda step: 400.0 if step > 5 else 5.0)
    assert main(["compare", str(tmp_path / "runs"), "--html", str(tmp_path / "report.html")]) == 0
    opened = Opened(chromium, tmp_path / "report.html", viewport={"width": 1300, "height": 900})
    page, marks = opened.page, "#main .scatterlayer .points path"
    before = page.locator(marks).evaluate_all("all => all.filter((p) => p.style.display !== 'none').length")
    assert before and "above" in page.locator("#outliers-label").inner_text()
    page.check("#outliers")
    until(page, "document.getElementById('main').data.every((t) => t.name !== 'above')")
    assert page.locator(marks).evaluate_all("all => all.filter((p) => p.style.display !== 'none').length") == before
    assert page.locator("#outliers-label").inner_text().strip() == "outliers"
    assert page.locator("#result").inner_text() == "Best held-out loss: 2.0000, lr=0.003"
    page.fill("#filter", "lr!=0.003")
    until(page, "document.getElementById('result').textContent == 'Best shown held-out loss: 2.5000, lr=0.001'")
    opened.context.close()


def test_runs_that_failed_or_diverged_are_named_so_and_their_ends_stay_in_the_chart(chromium, tmp_path):
    for number, lr in enumerate((0.001, 0.003)):
        write_run(tmp_path / f"runs/{number}", lr=lr, steps=100)
    diverge(write_run(tmp_path / "runs/2", lr=10.0, steps=100), lambda step: 5000.0 if step > 5 else 5.0)
    diverge(
        write_run(tmp_path / "runs/3", lr=100.0, steps=100, until=40, reason="errored"),
        lambda step: 5.0 + 50.0 * max(step - 1, 0),
    )
    assert main(["compare", str(tmp_path / "runs"), "--html", str(tmp_path / "report.html")]) == 0
    opened = Opened(chromium, tmp_path / "report.html", viewport={"width": 1300, "height": 900})
    page = opened.page
    assert page.locator("#legend .value").all_inner_texts()[2:] == ["diverged", "failed"]
    assert page.locator("#legend .value.bad").all_inner_texts() == ["diverged", "failed"]
    (cross,) = [(xs, ys) for name, xs, ys, _ in traces(page) if name == "end"]
    low, high = axis(page, "yaxis")
    assert cross[0] == [40] and high < 20 and low + 0.9 * (high - low) < cross[1][0] < high
    page.check("#ylog")
    (cross,) = [ys for name, _, ys, _ in traces(page) if name == "end"]
    bottom, top = axis(page, "yaxis")
    assert bottom + 0.9 * (top - bottom) < np.log10(cross[0]) < top
    page.uncheck("#ylog")
    page.check("#outliers")
    assert page.is_checked("#ylog") and axis(page, "yaxis")[1] > np.log10(5000)
    page.uncheck("#outliers")
    assert not page.is_checked("#ylog") and axis(page, "yaxis") == (low, high)
    for words, result in (
        ("state=diverged", "The shown run diverged"),
        ("lr>1", "All 2 shown runs diverged or failed"),
    ):
        page.fill("#filter", words)
        until(page, f"document.getElementById('result').textContent === '{result}'")
    labels = page.locator("#main .yaxislayer-above text").all_text_contents()
    assert "1,000" in labels or "2,000" in labels  # as in the static plots
    assert opened.trouble == []
    opened.context.close()


def test_gradient_norms_within_a_decade_have_several_ticks(chromium, tmp_path):
    run = write_run(tmp_path / "runs/0", steps=100)
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    lines = [{**line, "grad_norm": 1.6 - 0.009 * line["step"]} if line["kind"] == "step" else line for line in lines]
    (run / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["compare", str(tmp_path / "runs"), "--html", str(tmp_path / "report.html")]) == 0
    opened = Opened(chromium, tmp_path / "report.html")
    labels = opened.page.locator("#grad_norm .yaxislayer-above text").all_text_contents()
    assert 3 <= len(labels) <= 7 and "1" in labels and opened.trouble == []
    opened.context.close()


def test_noise_fills_a_linear_axis_only_if_it_is_zoomed(chromium, tmp_path):
    run = write_run(tmp_path / "runs/0", steps=100)
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    lines = [{**line, "loss": 4 + 1e-3 * (line["step"] % 7)} if "loss" in line else line for line in lines]
    (run / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["compare", str(tmp_path / "runs"), "--html", str(tmp_path / "report.html")]) == 0
    opened = Opened(chromium, tmp_path / "report.html")
    low, high = axis(opened.page, "yaxis")
    assert high - low >= 0.2  # a twentieth of the loss
    with opened.page.expect_event("load"):  # the page reloads itself
        opened.page.goto((tmp_path / "report.html").as_uri() + "#zoom=20,60")
    opened.page.wait_for_selector("html[data-ready]")
    low, high = axis(opened.page, "yaxis")
    assert low < 4.003 < high < low + 0.02 and opened.trouble == []
    opened.context.close()


def test_round_ticks_keep_a_distance_from_the_learning_rates_that_were_typed(page):
    for typed in ([0.0031], [0.00095, 0.0031], []):
        ticks = call(page, "choices.js charts.js", f"logTicks(1e-4, 1e-2, {typed}).tickvals")
        assert {*typed} < {*ticks} and 3 <= len(ticks) <= 7 and ticks == sorted(ticks)
        assert min(np.divide(ticks[1:], ticks[:-1])) > 1.5


def test_the_report_of_a_failed_run_says_so(chromium, tmp_path):
    write_run(tmp_path / "runs/0", steps=5, until=2, reason="errored")
    assert main(["compare", str(tmp_path / "runs"), "--html", str(tmp_path / "report.html")]) == 0
    opened = Opened(chromium, tmp_path / "report.html")
    assert opened.page.locator("#result").inner_text() == "Failed at step 2"
    assert opened.page.locator("#table td.bad").inner_text() == "failed"
    for chart in ("main", "lr", "speed"):
        assert opened.page.locator(f"#{chart} .xaxislayer-above text").all_text_contents() == ["0", "1", "2"]
    low, high = axis(opened.page, "yaxis")
    assert high - low >= 0.05 * high
    opened.context.close()


def test_a_seed_that_diverged_does_not_stretch_the_band_of_its_group(chromium, tmp_path):
    for lr, seed in itertools.product((0.003, 0.01), (0, 1, 2)):
        write_run(tmp_path / f"runs/{lr}-{seed}", lr=lr, seed=seed, steps=100)
    events = tmp_path / "runs/0.01-2/events.jsonl"
    lines = [json.loads(line) for line in events.read_text().splitlines()]
    lines = [
        {**line, "loss": 400.0} if line["kind"] in ("step", "eval") and line["step"] > 20 else line for line in lines
    ]
    events.write_text("".join(json.dumps(line) + "\n" for line in lines))
    picture, report = tmp_path / "a.svg", tmp_path / "report.html"
    assert main(["compare", str(tmp_path / "runs"), "--html", str(report), "--plot", str(picture)]) == 0
    opened = Opened(chromium, report, viewport={"width": 1300, "height": 900})
    bands = [ys for name, _, ys, _ in traces(opened.page) if name == ""]
    assert len(bands) == 2 and min(map(min, bands)) > 1.5  # mean - deviation is below 0
    low, high = axis(opened.page, "yaxis")
    assert 1 < low < high < 10
    ups = [ys for name, _, ys, _ in traces(opened.page) if name == "above"]
    assert len(ups) == 1 and opened.trouble == []
    opened.context.close()
    points = Comparison.build([read_run(path) for path in find_runs(tmp_path / "runs")]).ranking.points
    sides = [side for point in points for side in Line.read(point, "held-out loss").band.values()]
    assert min(low for low, _ in sides) > 1.5 and max(high for _, high in sides) < 400


def test_warnings_of_a_point_that_differ_only_in_numbers_are_one_line(chromium, tmp_path):
    for lr, seed in itertools.product((0.01, 0.02), (0, 1)):
        events = write_run(tmp_path / f"runs/{lr}-{seed}", lr=lr, seed=seed, steps=50) / "events.jsonl"
        text = f"step {20 + seed}: the loss has risen from 6.9{seed} to 8e+1{seed}; try a lower lr (it was {lr})"
        lines = [{"kind": "warning", "t": 1.0, "step": 20 + seed, "text": line} for line in (text, "no disk")]
        events.write_text(events.read_text() + "".join(json.dumps(line) + "\n" for line in lines))
    assert main(["compare", str(tmp_path / "runs"), "--html", str(tmp_path / "report.html")]) == 0
    opened = Opened(chromium, tmp_path / "report.html")
    rose = "the loss has risen from 6.90–6.91 to 8e+10–8e+11; try a lower lr (it was {0}) (lr={0}: 2 runs)"
    expected = [text.format(lr) for lr in (0.01, 0.02) for text in (rose, "no disk (lr={0}: 2 runs)")]
    assert sorted(opened.page.locator("#warnings summary").all_inner_texts()) == sorted(expected)
    assert opened.trouble == []
    opened.context.close()


def test_tables_are_named_and_expose_their_first_order(page):
    names = page.evaluate("[...document.querySelectorAll('table')].map((table) => table.getAttribute('aria-label'))")
    assert names == ["Results", "What differs"]
    for rows in ("points", "runs"):
        page.click(f"#rows button:has-text('{rows}')")
        assert page.locator("#table th[aria-sort=ascending]").all_inner_texts() == ["held-out loss ↑"]
        losses = [float(re.sub(r"best|±.*", "", text)) for text in column(page, "held-out loss") if text != "–"]
        assert losses == sorted(losses)
    page.click("#table th button:has-text('held-out loss')")
    assert page.locator("#table th[aria-sort=descending]").all_inner_texts() == ["held-out loss ↓"]


def test_columns_sort_both_ways_and_long_tables_expand(page, swept):
    assert column(page, "held-out loss")[0].startswith("best")
    losses = [lines[-1]["loss"] for lines in events(swept, "step", **BEST)]
    assert float(column(page, "smoothed train loss")[0]) == pytest.approx(np.mean(losses), abs=1e-4)
    page.click("#rows button:has-text('runs')")
    assert page.locator("#table tbody tr").count() == 20
    page.click("#more-rows")
    page.click("#table th button:has-text('smoothed train loss')")
    losses = [float(text) for text in column(page, "smoothed train loss")]
    last = [lines[-1]["loss"] for lines in events(swept, "step")]
    assert losses[:-1] == pytest.approx(sorted(last)[:-1], abs=1e-4) and len(losses) == 25
    killed = max(events(swept, "step"), key=lambda lines: lines[-1]["loss"])  # it left no result: its events are read
    mean = killed[0]["loss"]
    for line in killed[1:]:
        mean += max(0.02, min(1.0, 20 / line["step"])) * (line["loss"] - mean)
    assert losses[-1] == pytest.approx(mean, abs=1e-4)
    page.click("#table th button:has-text('smoothed train loss')")
    assert [float(text) for text in column(page, "smoothed train loss")] == losses[::-1]
    assert page.locator("#table th[aria-sort=descending]").inner_text() == "smoothed train loss ↓"
    for falling in (False, True):  # the killed run has no accuracy, and is last in either order
        page.click("#table th button:has-text('held-out accuracy')")
        *shares, last = column(page, "held-out accuracy")
        assert last == "–" and [float(share) for share in shares] == sorted(map(float, shares), reverse=falling)


def test_dragging_along_a_settings_axis_selects_points_and_a_click_resets_it(page):
    grip = page.locator("#parallel .grip[data-axis='recipe']")
    grip.scroll_into_view_if_needed()
    box = grip.bounding_box()
    page.mouse.move(box["x"] + 12, box["y"] + 4)
    page.mouse.down()
    page.mouse.move(box["x"] + 12, box["y"] + box["height"] / 3, steps=3)
    page.mouse.up()
    assert column(page, "recipe") == ["warm"] * 3 and page.locator("#legend button").count() == 3
    assert page.locator("#parallel path.run.off").count() == 4
    box = grip.bounding_box()  # the table above has fewer rows
    page.mouse.move(
        *page.evaluate("""(() => {
      const path = document.querySelector("#parallel path.run[data-point='0']"), to = path.getScreenCTM();
      const { x, y } = path.getPointAtLength(path.getTotalLength() * 0.2).matrixTransform(to);
      return [x, y];
    })()""")
    )
    assert page.locator("#tip").text_content().startswith(LABEL + "\nheld-out loss ")
    page.mouse.move(5, 5)
    assert page.locator("#tip").is_hidden()
    page.mouse.click(box["x"] + 12, box["y"] + box["height"] / 2)
    assert page.locator("#table tbody tr").count() == 7


def test_labels_of_a_settings_axis_are_at_the_height_of_their_ticks(page):
    ticks = page.locator("#parallel text.tick").evaluate_all(
        "all => all.map((t) => t.getBBox().y + t.getBBox().height / 2)"
    )
    lines = page.locator("#parallel line").evaluate_all(
        "all => all.filter((l) => l.getBBox().width).map((l) => l.getBBox().y)"
    )
    assert len(ticks) == len(lines) > 6 and ticks == pytest.approx(lines, abs=1.5)


def test_labels_of_a_settings_axis_overlap_neither_curves_nor_each_other(page):
    overlaps = page.evaluate("""(() => {
      const texts = [...document.querySelectorAll("#parallel text")].map((t) => t.getBBox()), found = [];
      const inside = (b, x, y) => x > b.x && x < b.x + b.width && y > b.y + 2 && y < b.y + b.height - 2;
      texts.forEach((a, i) => texts.slice(i + 1).forEach((b) => {
        const beside = a.x >= b.x + b.width || b.x >= a.x + a.width || a.y >= b.y + b.height || b.y >= a.y + a.height;
        if (!beside) found.push("text");
      }));
      for (const path of document.querySelectorAll("#parallel path.run")) {
        const length = path.getTotalLength(), ends = [...Array(12).keys()].map((i) => path.getPointAtLength(i / 2));
        for (const point of ends) if (texts.some((box) => inside(box, point.x, point.y))) found.push("curve");
      }
      return found;
    })()""")
    assert overlaps == []


def test_axes_are_linear_or_logarithmic(page):
    distances = {}
    for log in (False, True):
        page.set_checked("#xlog", log)
        page.set_checked("#ylog", log)
        kinds = page.evaluate("['xaxis', 'yaxis'].map(a => document.getElementById('main')._fullLayout[a].type)")
        assert kinds == ["log" if log else "linear"] * 2
        places = "['xaxis', 'yaxis'].map((a, i) => [[10, 20, 40], [2, 3, 4.5]][i].map(v => axes[a].d2p(v)))"
        axes = f"(() => {{ const axes = document.getElementById('main')._fullLayout; return {places}; }})()"
        distances[log] = [np.diff(ticks) for ticks in page.evaluate(axes)]
    for linear, log, ratio in zip(distances[False], distances[True], (2, 1.5), strict=True):
        assert linear[1] / linear[0] == pytest.approx(ratio, rel=0.01) and log[1] / log[0] == pytest.approx(1, rel=0.01)


def test_a_setting_searched_by_magnitude_has_a_logarithmic_axis(page):
    places = "[false, true].map((tagged) => makeScale(['1', '2', '4'], false, true, tagged).place('2'))"
    assert call(page, "choices.js filter.js", places) == pytest.approx([0.07 + 0.86 / 3, 1 / 2])


def test_curves_can_be_drawn_over_steps_tokens_or_time(page, swept):
    (lines, *_) = events(swept, "step", **BEST, seed=0)
    tokens = np.cumsum([line["tokens"] for line in lines])
    for word, last in (("tokens", tokens[-1]), ("time", lines[-1]["t"]), ("steps", lines[-1]["step"])):
        page.click(f"#over button:has-text('{word}')")
        for chart in ("main", "lr", "speed"):
            assert max(max(xs) for _, xs, *_ in traces(page, chart)) == pytest.approx(last)
        title = page.evaluate("document.getElementById('main')._fullLayout.xaxis.title.text")
        assert title == {"time": "time (s)", "tokens": "tokens", "steps": "step"}[word]


def test_smoothing_is_a_two_sided_exponential_mean_of_the_steps(page, swept):
    """Compared with the explicit sum for one run; no smoothing at the left end of the slider."""
    page.set_checked("#bands", False)
    page.set_checked("#held", False)
    page.fill("#filter", "lr=0.003 warm")
    until(page, "document.querySelectorAll('#legend button').length == 1")
    losses = [[line["loss"] for line in lines] for lines in events(swept, "step", **BEST)]
    xs = np.arange(1, 301)
    for slider in (0, 80):
        page.evaluate(f"(() => {{ const s = document.getElementById('smooth'); s.value = {slider};"
                      "s.dispatchEvent(new Event('input')); })()")  # fmt: skip
        half = 299 * slider**2 / 60000
        drawn = [(steps, ys) for name, steps, ys, _ in traces(page) if name == LABEL]
        smoothed = []
        for run in losses:
            # The curve continues to the left by its reflection about the first point.
            places, values = np.append(2 - xs[1:], xs), np.append(2 * run[0] - np.array(run[1:]), run)
            weights = 2.0 ** (-np.abs(xs[:, None] - places) / half) if half else np.eye(599)[299:]
            smoothed.append(weights @ values / weights.sum(1))
        order = sorted(smoothed, key=lambda values: values[-1])
        assert np.array(sorted((ys for _, ys in drawn), key=lambda ys: ys[-1])) == pytest.approx(
            np.array(order), rel=1e-3
        )
        assert all(steps == xs.tolist() for steps, _ in drawn)
    page.fill("#filter", "")
    until(page, "document.querySelectorAll('#legend button').length == 7")


def test_a_missing_loss_has_no_weight_in_a_smoothed_curve(page):
    assert call(page, "data.js", "smoothCurve([1, 2, 3], [1, null, 1], 1)") == [1, None, 1]


def test_seeds_are_drawn_as_mean_and_deviation_or_separately(page, swept):
    page.evaluate("(() => { const s = document.getElementById('smooth'); s.value = 0;"
                  "s.dispatchEvent(new Event('input')); })()")  # fmt: skip
    held = traces(page)[-1]
    page.set_checked("#held", False)
    losses = np.array([[line["loss"] for line in lines] for lines in events(swept, "step", **BEST)])
    curves = traces(page)
    index = max(n for n, (name, *_) in enumerate(curves) if name == LABEL)
    xs, means = curves[index][1:3]
    values = np.array([np.interp(xs, range(1, 301), run) for run in losses])  # at most 220 places of a band are drawn
    assert len(xs) == 220 and means == pytest.approx(values.mean(0), rel=1e-4)
    deviations = values.std(0, ddof=1)
    bands = [ys for name, _, ys, _ in curves if name == "" and len(ys) == 2 * len(xs)]
    sides = [(values.mean(0) + sign * deviations).clip(values.min(0), values.max(0)) for sign in (1, -1)]
    expected = np.array([*sides[0], *sides[1][::-1]])
    assert min(np.abs(np.array(ys) - expected).max() for ys in bands) < 1e-3
    held_out = np.array([[line["loss"] for line in lines] for lines in events(swept, "eval", **BEST)])
    assert held[0] == "held out" and held[2] == pytest.approx(held_out.mean(0), rel=1e-4)
    assert held[3] == pytest.approx(held_out.std(0, ddof=1), rel=1e-3)
    page.set_checked("#bands", False)
    assert [name for name, *_ in traces(page)].count(LABEL) == 4


def test_raw_held_out_scores_and_outliers_can_be_hidden(page, swept):
    assert "raw" not in [name for name, *_ in traces(page)]  # of several runs only on demand
    page.check("#raw")
    names = [name for name, *_ in traces(page)]
    assert names.count("raw") == 4 and names.count("held out") == 7 and names.count("end") == 1  # raw: the best point
    page.locator("#legend button").nth(1).hover()
    until(page, "document.getElementById('main').data.filter((t) => t.name == 'raw').length == 8")
    page.mouse.move(5, 5)
    page.fill("#filter", "scratch lr=0.001")
    until(page, "document.querySelectorAll('#legend button').length == 1")
    assert page.evaluate("document.getElementById('outliers-label').offsetParent !== null")
    high = axis(page, "yaxis")[1]
    assert 6 < high < 10  # a step of a run has a loss of 30
    page.check("#outliers")
    losses = [line["loss"] for lines in events(swept, "step", recipe="scratch", lr=0.001) for line in lines]
    assert axis(page, "yaxis")[0] < min(losses) and 30 == max(losses) < axis(page, "yaxis")[1]
    page.uncheck("#raw")
    page.uncheck("#held")
    names = [name for name, *_ in traces(page)]
    assert "raw" not in names and "held out" not in names
    page.click("#score button:has-text('accuracy')")
    until(page, "document.getElementById('main').layout.yaxis.title.text == 'held-out accuracy'")
    assert traces(page)[-1][2][-1] == pytest.approx(np.mean([0, 1, 2, 3]) / 30, rel=1e-4)


def test_the_page_has_a_dark_mode_fits_a_phone_and_shows_samples_and_warnings(chromium, swept):
    window = {"viewport": {"width": 390, "height": 844}, "color_scheme": "dark", "has_touch": True, "is_mobile": True}
    open_page = Opened(chromium, swept / "report.html", **window)
    page = open_page.page
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    cell = page.locator("#table tbody td.best").first.bounding_box()
    assert cell["x"] > 0 and cell["x"] + cell["width"] < 390  # the score of the best, without a swipe
    page.evaluate("document.querySelector('#table .scroll').scrollLeft = 400")
    moved = page.locator("#table tbody td.best").first.bounding_box()
    assert moved["x"] == pytest.approx(cell["x"], abs=4) and moved["width"] < 200, "its column does not scroll away"
    ground = "getComputedStyle(document.body).backgroundColor"
    targets = "[...document.querySelectorAll('#ways a, input, button, summary')].filter((e) => e.offsetParent)"
    sizes = page.evaluate(
        f"{targets}.map((e) => [e.id || e.textContent, (e.closest('label') || e).getBoundingClientRect().height])"
    )
    assert [target for target in sizes if target[1] < 24] == []
    assert page.evaluate(
        "(() => { const l = document.getElementById('legend'); return l.scrollHeight <= l.clientHeight; })()"
    )
    light = [max(map(int, re.findall(r"\d+", page.evaluate(ground))))]
    grid = [page.evaluate("document.getElementById('main').layout.xaxis.gridcolor")]
    page.click("#theme")
    light.append(max(map(int, re.findall(r"\d+", page.evaluate(ground)))))
    grid.append(page.evaluate("document.getElementById('main').layout.xaxis.gridcolor"))
    assert light[0] < 80 < 200 < light[1] and grid[0] != grid[1]
    assert "Tap" in page.locator("#zooming").inner_text()
    assert page.locator("#ways a.bad").inner_text() == "warnings (8)"
    assert page.locator("#warnings summary").all_inner_texts() == [
        f"the loss climbs (recipe={recipe} data=stdlib lr=0.1: 4 runs)" for recipe in ("warm", "scratch")
    ]
    assert page.locator("#samples .card").count() == 6
    assert page.locator("#samples .card b").count() == 0  # text of a run is not interpreted
    values = page.locator("#runs summary span:last-child")
    shown = values.evaluate_all("all => all.map((e) => [e.textContent, e.getBoundingClientRect().right])")
    assert len({right for _, right in shown}) == 1 and all(re.fullmatch(r"\d\.\d{4}", text) for text, _ in shown)
    states = page.locator("#runs summary span:nth-last-child(2)").all_inner_texts()
    assert sorted(states) == ["completed"] * 16 + ["completed, warnings: 1"] * 4  # the 20 runs that are listed at first
    assert page.locator("#by").inner_text() == "held-out loss"
    page.locator("#runs details").first.locator("summary").click()
    assert page.locator("#runs details pre").first.inner_text().startswith("toyexp --config-path ")
    assert open_page.trouble == []
    open_page.context.close()


def test_a_phone_lists_the_best_eight_points_and_the_others_on_demand(chromium, tmp_path):
    for number in range(1, 11):
        write_run(tmp_path / f"runs/{number}", lr=number / 1000, steps=40)
    assert main(["compare", str(tmp_path / "runs"), "--html", str(tmp_path / "report.html")]) == 0
    opened = Opened(chromium, tmp_path / "report.html", viewport={"width": 390, "height": 844})
    assert opened.page.locator("#legend button").count() == 8
    opened.page.click("#more-points:has-text('show all 10')")
    assert opened.page.locator("#legend button").count() == 10 and opened.page.locator("#more-points").is_hidden()
    opened.context.close()
