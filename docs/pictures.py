"""Draw the site's pictures of reports and a notebook, and record examples, from runs of `make pictures`.

usage: pictures.py RUNS

A browser draws the pictures, light and dark; without one, they stay as they are.
"""

import importlib.util
import io
import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import examples

ROOT = Path(__file__).parent.parent
PICTURES = ROOT / "docs" / "pages" / "pictures"
REPORT_WIDTH, CURVES_WIDTH = 1100, 590  # of the browser's window; the home page shows the curves about as wide
# For each picture: the file below RUNS, the element that begins it, the width of the window, the picture's pixels for
# each of the window's, and the elements that are left out.
PAGES = {
    "report": ("sweep/report.html", "header", REPORT_WIDTH, 1.25, "#opening"),
    "report_search": ("search/report.html", "#search", REPORT_WIDTH, 1.25, "header"),
    "curves_of_a_sweep": (
        "sweep/report.html", "#curves", CURVES_WIDTH, 2.4,
        "header, #opening, #curves :is(h2, .bar, .smalls, .small)",
    ),
    "notebook": (
        "site/notebooks/first_run.html", "article .highlight", REPORT_WIDTH, 1.25,
        ".md-header, .md-tabs, .md-sidebar",
    ),
}  # fmt: skip
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
HEIGHT = 800  # of the window


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
            page.add_style_tag(content=f"{hidden} {{ display: none !important }} #main {{ margin-top: -1rem }}")
            page.locator(first).first.evaluate("(element) => scrollBy(0, element.getBoundingClientRect().top)")
            page.wait_for_timeout(1000)  # charts are drawn when they come into view
            box = page.locator(first).first.bounding_box()
            end = box["y"] + box["height"] - 1  # a section ends the picture, without its border; a heading begins it
            height = min(end, HEIGHT) if end > HEIGHT / 2 else HEIGHT
            clip = {"x": box["x"] + 1, "y": box["y"] + 1, "width": box["width"] - 2, "height": height - box["y"] - 1}
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
    site = ["--config-file", str(ROOT / "docs" / "mkdocs.yml"), "--site-dir", str((runs / "site").resolve())]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    subprocess.run([sys.executable, "-m", "mkdocs", "build", "--quiet", *site], env=environment, check=True)
    photograph_pages(runs)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
