"""The documentation site builds without warnings and documents every command and every setting."""

import html
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import examples
import pytest

from toyexp.base.formatting import format_value
from toyexp.cli.main import main
from toyexp.config.top_level import top_level_settings
from toyexp.plugins.discovery import load
from toyexp.plugins.settings import list_settings

pytestmark = pytest.mark.release
ROOT = Path(__file__).parent.parent


BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = os.environ.get("TOYEXP_BROWSER") or next(filter(None, map(shutil.which, BROWSERS)), None)
SHOWN = ("index", "start/researcher", "guides/sweeps", "guides/python", "guides/resume", "reference/settings",
         "reference/commands/compare", "reference/architecture", "notebooks/first_run",
         "notebooks/compare_and_sweep")  # fmt: skip
# Lists the texts of a page whose contrast with their ground is below 4.5 (WCAG AA), as [element, contrast, text].
FAINT = """() => {
  const parse = (text) => { const n = text.match(/[\\d.]+/g).map(Number); return [n[0], n[1], n[2], n[3] ?? 1]; };
  const over = (top, below) => [0, 1, 2].map((i) => top[i] * top[3] + below[i] * (1 - top[3])).concat(1);
  const linear = (v) => v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4;
  const light = (c) => 0.2126 * linear(c[0]) + 0.7152 * linear(c[1]) + 0.0722 * linear(c[2]);
  const faint = [], texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node; (node = texts.nextNode()); ) {
    const box = node.parentElement, range = document.createRange();
    range.selectNode(node);
    const isShown = box.checkVisibility({ opacityProperty: true, visibilityProperty: true });
    if (!node.data.trim() || !isShown || range.getBoundingClientRect().width < 2) continue;
    let ground = [255, 255, 255, 1], opacity = 1;
    const around = [box];
    while (around[0].parentElement) around.unshift(around[0].parentElement);
    for (const element of around) {
      const style = getComputedStyle(element);
      ground = over(parse(style.backgroundColor), ground);
      opacity *= Number(style.opacity);
    }
    const ink = parse(getComputedStyle(box).color);
    ink[3] *= opacity;
    const [low, high] = [light(over(ink, ground)), light(ground)].sort((a, b) => a - b);
    const contrast = (high + 0.05) / (low + 0.05);
    if (contrast < 4.5) faint.push([`${box.tagName}.${box.className}`, contrast.toFixed(2), node.data.trim()]);
  }
  return faint;
}"""


@pytest.fixture(scope="module")
def site_root(tmp_path_factory):
    """Build the site; a broken link or anchor is an error."""
    root = tmp_path_factory.mktemp("site")
    options = ["--config-file", str(ROOT / "docs" / "mkdocs.yml"), "--site-dir", str(root)]
    # The package of this tree, which need not be the one that is installed.
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'plugins'}", "NO_MKDOCS_2_WARNING": "1"}
    words = [sys.executable, "-m", "mkdocs", "build", *options]  # with --quiet it would not count warnings
    build = subprocess.run(words, cwd=root, env=environment, capture_output=True, text=True)
    assert build.returncode == 0 and "WARNING" not in build.stderr, build.stdout + build.stderr
    return root


@pytest.fixture(scope="module")
def site(site_root):
    return {str(path.relative_to(site_root)): path.read_text() for path in site_root.rglob("*.html")}


@pytest.fixture(scope="module")
def chromium():
    if BROWSER is None or importlib.util.find_spec("playwright") is None:
        pytest.skip("no browser here: apt install chromium, pip install playwright; or TOYEXP_BROWSER=/path/to/chrome")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


def table_rows(page):
    """Return the rows of all tables of a page, each a list of cells without markup."""
    rows = re.findall(r"<tr>(.*?)</tr>", page, re.DOTALL)
    return [
        [html.unescape(re.sub(r"<[^>]+>", "", c)) for c in re.findall(r"<td.*?>(.*?)</td>", row, re.DOTALL)]
        for row in rows
    ]


def is_reader(name, text):
    """Return whether a cell, such as `all`, `all except a, b` or `a, b`, names the part."""
    named = name in text.removeprefix("all except ").split(", ")
    return not named if text.startswith("all") else named


def test_the_site_loads_nothing_from_the_network(site):
    for name, page in site.items():
        assert not re.search(r"<(script|link|img)[^>]*=.?https?://", page), name


def test_a_page_that_links_to_a_template_shows_it(site):
    page = site["plugins/engine.html"]
    assert "MyEngineSession" in page and "[toyexp_my_engine.py](" not in page


def test_every_command_has_a_page_that_the_table_of_contents_leads_to(site, capsys):
    for name, offer in load().offers["command"].items():
        page = site[f"reference/commands/{name}.html"]
        assert offer.help.removesuffix(".") in html.unescape(page) and "Exit codes" in page
        assert f"commands/{name}.html" in site["index.html"], name
        is_recorded = name != "serve"  # whose output is that of llama-server, another program
        assert page.count('<div class="language-console') == is_recorded, f"{name}: no example"
        contents = page[page.index('aria-label="On this page"') :]
        assert [f'href="#{part}"' in contents for part in ("example", "usage", "exit-codes")] == [True] * 3, name
    options = [row[0] for row in table_rows(site["reference/commands/compare.html"]) if "--" in "".join(row)]
    assert main(["compare", "--help"]) == 0
    shown = re.findall(r"^  (--\S+)", capsys.readouterr().out, re.MULTILINE)
    assert [option.split()[0] for option in options] == shown
    assert all(f'href="#{option}" id="{option}"' in site["reference/commands/compare.html"] for option in shown)
    assert 'href="#cosine"' in site["reference/settings/callbacks.html"]


def test_every_setting_is_documented_with_its_default_and_the_parts_that_read_it(site):
    registry, keys = load(), 0
    for kind, offers in registry.offers.items():
        if kind == "command":
            continue
        rows = table_rows(site[f"reference/settings/{kind}.html"])
        for name in offers:
            prefix = {"callbacks": f"callbacks.{name}.", "format": ""}.get(kind, f"{kind}.")
            for s in list_settings(registry.get(kind, name)):
                expected = [prefix + s.name, format_value(s.default) or "empty", s.comment.replace("`", "")]
                readers = [row[4:] for row in rows if len(row) > 3 and [row[0], row[2], row[3]] == expected]
                assert [r for r in readers if not r or is_reader(name, r[0])], (name, s.name)
                keys += 1
    assert keys > 150
    top = {row[0] for row in table_rows(site["reference/settings.html"]) if row}
    assert top >= {key for key, _ in top_level_settings()}
    for name in ("settings", *(f"settings/{kind}" for kind in ("model", "callbacks", "format"))):
        anchors = re.findall(r'<a class="key" href="#([^"]+)"( id="\1")?', site[f"reference/{name}.html"])
        own = [anchor for anchor, identifier in anchors if identifier]
        assert len(own) == len({*own}) > 0 and {*own} == {anchor for anchor, _ in anchors}, name


def test_the_pages_of_the_notebooks_show_outputs_and_pictures(site, site_root):
    first, second = (site[f"notebooks/{name}.html"] for name in ("first_run", "compare_and_sweep"))
    assert "CONTINUATION" in first and first.count("<progress") == 2 and "training loss" in first
    assert "held_out_loss" in second and "8 of 8 done" in second
    assert json.loads((site_root / "notebooks" / "first_run.ipynb").read_text())["cells"]
    assert '<a download href="first_run.ipynb">' in first
    picture = re.search(r'<img src="(compare_and_sweep-1.png)" alt="[^"]*" width="768"', second)
    assert picture and (site_root / "notebooks" / picture[1]).is_file()


def test_the_diagrams_are_drawn_and_name_existing_modules_and_classes(site):
    page = (ROOT / "docs" / "pages" / "reference" / "architecture.md").read_text()
    diagrams = re.findall(r"```journey\n(.*?)```", page, re.DOTALL)
    assert site["reference/architecture.html"].count('<svg class="journey"') == len(diagrams) == 5
    core = "".join(path.read_text() for path in ROOT.joinpath("toyexp").rglob("*.py"))
    for line in "".join(diagrams).splitlines():
        module, arrow, value = re.match(r"(?:([\w/]+): |(-> )(\S+))", line).groups()
        if arrow:
            assert not value[0].isupper() or re.search(rf"^(class {value}\b|{value} = )", core, re.MULTILINE), line
        else:
            assert (ROOT / "toyexp" / f"{module}.py").is_file(), line
    plugin_section = page[page.index("## Where a plugin") :]
    assert set(re.findall(r"^\| (\w+) \| ", plugin_section, re.MULTILINE)) - {"kind"} == {
        {"optim": "optimiser", "callbacks": "callback"}.get(kind, kind) for kind in load().offers
    }


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_text_has_a_readable_contrast_and_no_page_is_wider_than_a_phone(chromium, site_root, theme):
    for width in (1400, 390):
        page = chromium.new_page(viewport={"width": width, "height": 900}, color_scheme=theme)
        for name in SHOWN:
            page.goto((site_root / f"{name}.html").as_uri())
            assert page.evaluate("document.body.dataset.mdColorScheme") == {"light": "default", "dark": "slate"}[theme]
            assert page.evaluate(FAINT) == [], (name, theme, width)
            assert page.evaluate("document.documentElement.scrollWidth") <= width, (name, theme, width)
            blocks = "[...document.querySelectorAll('article pre > code')]"
            is_cut = page.evaluate(f"{blocks}.some((e) => e.scrollWidth > e.clientWidth + 1)")
            assert width < 500 or not is_cut, (name, theme, width)
        page.close()


def test_the_home_page_shows_curves_the_install_line_a_command_and_python_above_the_fold(chromium, site_root):
    for theme, ending in (("light", "curves_of_a_sweep.webp"), ("dark", "curves_of_a_sweep_dark.webp")):
        page = chromium.new_page(viewport={"width": 1400, "height": 900}, color_scheme=theme)
        page.goto((site_root / "index.html").as_uri())
        picture = page.locator(f'.hero img[src*="{ending}"]')
        assert picture.is_visible() and page.locator(".hero img:visible").count() == 1
        blocks = page.locator(".hero .highlight").all()
        assert ["make run" in blocks[0].inner_text(), len(blocks)] == [True, 3]
        for shown in (picture, *blocks):
            box = shown.bounding_box()
            assert box["y"] + box["height"] < 900, theme
        assert picture.evaluate("(image) => image.naturalWidth") > 1000
        page.close()


def test_the_output_of_a_command_has_the_styles_of_a_terminal(site):
    page = site["index.html"]
    assert '<span class="t-bold">settings                 seeds  held-out loss</span>' in page
    assert re.search(r'<span class="t-bold">recipe=warm lr=0.01 [^<]*</span>  <span class="t-bright">best</span>', page)
    assert "\x1b" not in page


def test_the_copy_button_of_a_console_copies_only_the_command(chromium, site_root):
    page = chromium.new_page()
    page.goto((site_root / "reference" / "commands" / "compare.html").as_uri())
    code = page.locator(".language-console code").first
    code.evaluate("(element) => element.setAttribute('data-md-copying', '')")  # as the theme does while it copies
    assert code.inner_text().strip() == "toyexp compare outputs/sweep"
    page.close()


def test_tables_of_settings_fit_a_phone_and_have_room_for_explanations(chromium, site_root):
    page = chromium.new_page(viewport={"width": 390, "height": 844})
    for name in ("reference/settings", "reference/settings/model", "reference/commands/compare", "guides/sweeps"):
        page.goto((site_root / f"{name}.html").as_uri())
        for table in page.locator("article table").all():
            assert table.evaluate("(e) => e.scrollWidth <= e.closest('.md-typeset__scrollwrap').clientWidth"), name
    page.set_viewport_size({"width": 1400, "height": 900})
    page.goto((site_root / "reference" / "settings.html").as_uri())
    assert page.locator("th:has-text('what it does')").first.bounding_box()["width"] > 300
    heading, first = page.locator(".md-sidebar--primary .md-nav__link:visible").all()[:2]
    assert first.bounding_box()["y"] >= heading.bounding_box()["y"] + heading.bounding_box()["height"] + 4
    page.close()


def test_the_copy_button_covers_no_code_and_the_heads_of_settings_have_two_lines_at_most(chromium, site_root):
    page = chromium.new_page(viewport={"width": 1400, "height": 900})
    page.goto((site_root / "start/fine-tuner.html").as_uri())
    page.wait_for_selector("pre .md-code__nav")
    covered = page.evaluate("""() => [...document.querySelectorAll("pre:has(.md-code__nav)")].filter((pre) => {
      const nav = pre.querySelector(".md-code__nav").getBoundingClientRect(), range = document.createRange();
      range.selectNodeContents(pre.querySelector("code"));
      return [...range.getClientRects()].some((r) => r.right > nav.left && r.top < nav.bottom && r.width);
    }).map((pre) => pre.textContent.slice(0, 60))""")
    assert covered == []
    page.goto((site_root / "reference/settings.html").as_uri())
    heads = page.locator("table:has(a.key) th").all()
    lines = "(e) => { const r = document.createRange(); r.selectNodeContents(e); return r.getClientRects().length }"
    assert len(heads) > 5 and max(head.evaluate(lines) for head in heads) <= 2
    page.close()


def test_on_a_phone_pictures_fit_and_link_to_their_full_size_and_cut_code_has_a_shadow(chromium, site_root):
    page = chromium.new_page(viewport={"width": 390, "height": 844})
    page.goto((site_root / "guides/sweeps.html").as_uri())
    (plot,) = page.locator('img[src*="sweep"]:visible').all()
    assert "sweep_narrow.svg" in plot.get_attribute("src") and plot.bounding_box()["width"] <= 390
    page.goto((site_root / "notebooks/compare_and_sweep.html").as_uri())
    picture = page.locator(".output a.zoom > img").first
    box = picture.bounding_box()
    assert box["x"] + box["width"] <= 390 and picture.evaluate("(e) => e.naturalWidth") > 700
    assert picture.evaluate("(e) => e.parentElement.href === e.src")
    boxes = ".cell pre > code, .output > pre, .output > .md-typeset__scrollwrap"
    scrolling = f"[...document.querySelectorAll('{boxes}')].filter((e) => e.scrollWidth > e.clientWidth)"
    shadows = page.evaluate(f"{scrolling}.map((e) => getComputedStyle(e).backgroundAttachment)")
    assert len(shadows) > 2 and {*shadows} == {"local, scroll, scroll"}
    page.close()


def test_each_picture_is_shown_in_one_form(chromium, site_root):
    for theme, width in (("light", 1400), ("dark", 390)):
        page = chromium.new_page(viewport={"width": width, "height": 900}, color_scheme=theme)
        for name in ("index", "guides/compare", "guides/sweeps"):
            page.goto((site_root / f"{name}.html").as_uri())
            for paragraph in page.locator("article p:has(> a.zoom)").all():
                assert paragraph.locator("img:visible").count() == paragraph.locator("a.zoom:visible").count() == 1
        page.close()


@pytest.fixture(scope="module")
def example_runs(tmp_path_factory):
    """Train the runs of the recorded examples, with two steps each."""
    folder = tmp_path_factory.mktemp("examples")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for words in (
            "-m recipe=scratch,warm lr=1e-3,3e-3,1e-2 seed=0,1,2 sweep.isolate=false hydra.sweep.dir=outputs/sweep",
            "experiment=vit_digits hydra.run.dir=outputs/digits",
            *examples.RUNS,
        ):
            quick = "steps=2 eval_every=2 engine=cpu" + ("" if "digits" in words else " data.max_mb=0.3")
            assert main(shlex.split(f"{words} {quick}")) == 0
        examples.write_files(folder)
    return folder


@pytest.mark.parametrize("name", examples.EXAMPLES)
def test_the_recorded_examples_are_what_the_commands_print(name, example_runs, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'plugins'}")
    command, _ = examples.EXAMPLES[name]
    printed = examples.run(command + (" --rounds 1 --steps 1" if name == "bench" else ""), example_runs)
    recorded = (examples.RECORDED / f"{name}.txt").read_text()
    assert recorded.startswith(f"$ toyexp {command}\n")
    if name in ("generate", "help"):  # another model, another text; a page that has changed since
        assert printed.strip()
        return
    # Lines about a machine and its engines differ between machines, and the digest of a run from that of another.
    machine = re.compile(r" *(engine|machine|cpu|ggml|peak|made by)\b")
    lines = [line for line in recorded.splitlines()[1:] if not machine.match(line)]
    lines = [line.split("  ")[0] if name == "doctor" else line for line in lines]
    assert {*re.findall(r"[A-Za-z_]{3,}", "\n".join(lines))} <= {*re.findall(r"[A-Za-z_]{3,}", printed)}, (
        f"docs/examples/{name}.txt is old: make pictures"
    )


def test_every_command_and_kind_of_setting_has_an_example():
    assert {*examples.EXAMPLES} == {*load().offers["command"], *load().offers, "settings"} - {"command", "serve"}
    assert {path.stem for path in examples.RECORDED.iterdir()} == {*examples.EXAMPLES}


def test_the_pictures_are_small_and_each_is_on_a_page(site):
    pictures = [*(ROOT / "docs" / "pages" / "pictures").iterdir()]
    sizes = {picture.name: picture.stat().st_size for picture in pictures}
    assert max(sizes.values()) < 150_000 and sum(sizes.values()) < 1_500_000, sizes
    shown = "".join(site.values())
    assert [name for name in sizes if f"pictures/{name}" not in shown] == []


def test_the_search_lists_changes_and_the_source_tree_after_guides(site_root):
    boosts = {
        entry["location"].partition("#")[0]: entry.get("boost", 1)
        for entry in json.loads((site_root / "search" / "search_index.json").read_text())["docs"]
    }
    assert boosts["reference/changes.html"] == boosts["reference/house.html"] == 0.1
    assert boosts["guides/sweeps.html"] == boosts["index.html"] == 1 > boosts["plugins/recipe.html"]


def test_quotes_that_begin_with_a_warning_become_boxes_and_regions_become_boxes_of_the_home_page(site):
    assert not [name for name, page in site.items() if "<p>[!" in page]
    for page in (ROOT / "docs" / "pages").rglob("*.md"):
        built = site[str(page.relative_to(ROOT / "docs" / "pages").with_suffix(".html"))]
        for kind in ("warning", "danger"):
            assert built.count(f'class="admonition {kind}"') == page.read_text().count(f"[!{kind.upper()}]"), page
    assert all(f'<div class="{region}">' in site["index.html"] for region in ("lead", "hero", "facts", "cards"))
