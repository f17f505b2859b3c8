"""Draw the site's pictures of reports, a notebook and the terminal, and record examples, from runs of `make pictures`.

usage: pictures.py RUNS

A browser draws reports and the notebook, light and dark; without one, these pictures stay as they are. Pictures of the
terminal are SVG files with real text, and need no browser.
"""

import importlib.util
import io
import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import examples
from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

ROOT = Path(__file__).parent.parent
PICTURES = ROOT / "docs" / "pages" / "pictures"
REPORT_WIDTH, CURVES_WIDTH = 1100, 540  # of the browser's window; the home page shows the curves about as wide
# For each picture: the file below RUNS, the element that begins it, the width of the window, the picture's pixels for
# each of the window's, and the elements that are left out.
PAGES = {
    "report": ("sweep/report.html", "header", REPORT_WIDTH, 1.25, "#opening"),
    "report_search": ("search/report.html", "#search", REPORT_WIDTH, 1.25, "header"),
    "curves_of_a_sweep": (
        "sweep/report.html", "#curves .sides", CURVES_WIDTH, 2.4, "header, #opening, #curves .bar, #hint",
    ),
    "notebook": (
        "site/notebooks/first_run.html", "article .highlight", REPORT_WIDTH, 1.25,
        ".md-header, .md-tabs, .md-sidebar",
    ),
}  # fmt: skip
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
HEIGHT = 780  # of the window
COLUMNS, SCALE = (
    112,
    0.62,
)  # of the terminal; the picture's pixels for each of rich's, whose letters are 20 pixels high
GROUND, TEXT = "131b1c", "d7e2e0"
# Black, red, green, yellow, blue, magenta, cyan and white of the terminal, then the bright ones.
NORMAL = (GROUND, "ff7b72", "6fcf7a", "f2c960", "8ab4ff", "cfa6ff", "5fd6c4", TEXT)
BRIGHT = ("97a8a5", "ff9d80", "8fd694", "ffdd80", "aacdff", "debeff", "8ce8d9", "ffffff")


def parse_rgb(colour: str) -> tuple[int, int, int]:
    """Return red, green and blue of a colour of six hexadecimal digits."""
    red, green, blue = bytes.fromhex(colour)
    return red, green, blue


def draw_terminal(name: str, command: str, cwd: Path, keep: str = ".*", prompt: bool = True) -> None:
    """Run a command and write an SVG picture of a terminal that shows its output, with `prompt` also the command.

    Lines that do not match `keep` are replaced by dots.
    """
    environment = {**os.environ, "COLUMNS": str(COLUMNS)}
    words = [sys.executable, "-m", *shlex.split(command), "--color=always"]
    done = subprocess.run(words, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines = [Text.from_ansi(line) for line in done.stdout.replace(f"{ROOT}/", "").rstrip().splitlines()]
    columns = max(60, len(command) + 4, *(line.cell_len + 2 for line in lines if re.search(keep, line.plain)))
    assert columns <= COLUMNS, "a line is longer than the terminal"
    console = Console(record=True, width=columns, file=io.StringIO())
    if prompt:
        console.print(Text.assemble((" $ ", "bold cyan"), (command, "bold")), soft_wrap=True)
    for is_kept, group in itertools.groupby(lines, lambda line: re.search(keep, line.plain) is not None):
        for line in group if is_kept else [Text("...", style="bright_black")]:
            console.print(Text(" ").append_text(line), soft_wrap=True)  # a margin
    console.print("")
    theme = TerminalTheme(parse_rgb(GROUND), parse_rgb(TEXT), [*map(parse_rgb, NORMAL)], [*map(parse_rgb, BRIGHT)])
    svg = console.export_svg(title="toyexp", theme=theme, unique_id=name)
    svg = re.sub(r"@font-face \{.*?\}\n?", "", svg, flags=re.DOTALL)  # fonts of the network
    width, height = (float(side) * SCALE for side in re.findall(r'viewBox="0 0 (\S+) (\S+)"', svg)[0])
    svg = svg.replace("<svg ", f'<svg width="{width:.0f}" height="{height:.0f}" ', 1)
    svg = svg.replace("Fira Code", "ui-monospace, Menlo, Consolas, DejaVu Sans Mono")
    PICTURES.joinpath(f"{name}.svg").write_text(re.sub(r" +$", "", svg, flags=re.MULTILINE))


def photograph_pages(runs: Path) -> None:
    """Write a light and a dark WebP picture of each page."""
    browser = os.environ.get("TOYEXP_BROWSER") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None or importlib.util.find_spec("playwright") is None:
        sys.stderr.write(
            "no browser: pictures of pages stay as they are; apt install chromium, pip install playwright\n"
        )
        return
    from PIL import Image
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        for (name, (path, first, width, pixels, hidden)), theme in itertools.product(PAGES.items(), ("light", "dark")):
            page = chromium.new_page(
                viewport={"width": width, "height": HEIGHT}, color_scheme=theme, device_scale_factor=pixels
            )
            page.goto(f"{(runs / path).resolve().as_uri()}#raw=false")
            page.wait_for_selector("html[data-ready], article")
            page.add_style_tag(content=f"{hidden} {{ display: none !important }}")
            page.locator(first).first.evaluate("(element) => scrollBy(0, element.getBoundingClientRect().top - 12)")
            page.wait_for_timeout(1000)  # charts are drawn when they come into view
            box = page.locator(first).first.bounding_box()
            end = box["y"] + box["height"] + 12  # a section ends the picture, a heading begins it
            left, right = max(box["x"] - 8, 0), min(box["x"] + box["width"] + 8, width)
            height = min(end, HEIGHT) if end > HEIGHT / 2 else HEIGHT
            clip = {"x": left, "y": 0, "width": right - left, "height": height}
            picture = Image.open(io.BytesIO(page.screenshot(clip=clip)))
            picture.save(PICTURES / f"{name}{'' if theme == 'light' else '_dark'}.webp", quality=82, method=6)
            page.close()
        chromium.close()


def main(runs: Path) -> None:
    """Draw all pictures from the runs below a directory, and the site."""
    here = runs / "terminal"
    shutil.rmtree(here, ignore_errors=True)
    here.mkdir(parents=True)
    shutil.copytree(runs / "sweep", here / "outputs" / "sweep")
    shutil.copytree(runs / "vit_digits", here / "outputs" / "digits")
    examples.record(here)
    draw_terminal("terminal_compare", "toyexp compare outputs/sweep", here)
    draw_terminal("terminal_error", "toyexp recpe=warm", here)
    draw_terminal(
        "terminal_run",
        "toyexp steps=200 eval_every=50 name=first",
        here,
        keep=r"^(?!note|step +\d*[2468]0/|step (60|1[2-8]0)/)",
        prompt=False,  # the page has the command as text above the picture
    )
    draw_terminal(
        "terminal_sweep",
        "toyexp -m recipe=scratch,warm seed=0,1,2",
        here,
        keep=r"^(sweep|\[[05]\]|mean|settings|recipe|report|$|next|  +toyexp)",
        prompt=False,
    )
    site = ["--config-file", str(ROOT / "docs" / "mkdocs.yml"), "--site-dir", str((runs / "site").resolve())]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    subprocess.run([sys.executable, "-m", "mkdocs", "build", "--quiet", *site], env=environment, check=True)
    photograph_pages(runs)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
