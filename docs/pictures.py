"""Draw the site's pictures of the report and of the terminal, from the runs of `make pictures`.

usage: pictures.py RUNS

A browser draws the report, light and dark; without one, its pictures stay as they are. Pictures of the terminal are SVG
files with real text, and need no browser.
"""

import importlib.util
import io
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

PICTURES = Path(__file__).parent / "pages" / "pictures"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WIDTH, HEIGHT, PIXELS = 1100, 780, 1.25  # of the report's window; pixels of the picture for each of the window's
COLUMNS = 96  # of the terminal
GROUND, TEXT = "131b1c", "d7e2e0"
# Black, red, green, yellow, blue, magenta, cyan and white of the terminal, then the bright ones.
NORMAL = (GROUND, "ff7b72", "6fcf7a", "f2c960", "8ab4ff", "cfa6ff", "5fd6c4", TEXT)
BRIGHT = ("97a8a5", "ff9d80", "8fd694", "ffdd80", "aacdff", "debeff", "8ce8d9", "ffffff")


def parse_rgb(colour: str) -> tuple[int, int, int]:
    """Return red, green and blue of a colour of six hexadecimal digits."""
    red, green, blue = bytes.fromhex(colour)
    return red, green, blue


def draw_terminal(name: str, command: str, output: str) -> None:
    """Write an SVG picture of a terminal that shows a command and its output, which may contain colour codes."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    console.print(Text.assemble(("$ ", "bold cyan"), (command, "bold")), soft_wrap=True)
    console.print(Text.from_ansi(output.rstrip()), soft_wrap=True)
    theme = TerminalTheme(parse_rgb(GROUND), parse_rgb(TEXT), [*map(parse_rgb, NORMAL)], [*map(parse_rgb, BRIGHT)])
    svg = console.export_svg(title="toyexp", theme=theme, unique_id=name)
    svg = re.sub(r"@font-face \{.*?\}\n?", "", svg, flags=re.DOTALL)  # fonts of the network
    svg = svg.replace("Fira Code", "ui-monospace, Menlo, Consolas, DejaVu Sans Mono")
    PICTURES.joinpath(f"{name}.svg").write_text(re.sub(r" +$", "", svg, flags=re.MULTILINE))


def run_toyexp(*words: str, cwd: Path) -> str:
    """Return what a command prints in a terminal of COLUMNS columns."""
    environment = {**os.environ, "COLUMNS": str(COLUMNS)}
    command = [sys.executable, "-m", "toyexp", *words, "--color=always"]
    done = subprocess.run(command, cwd=cwd, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


def photograph_reports(reports: dict[str, Path]) -> None:
    """Write a light and a dark WebP picture of each report, by the name of the picture."""
    browser = os.environ.get("TOYEXP_BROWSER") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None or importlib.util.find_spec("playwright") is None:
        sys.stderr.write(
            "no browser: pictures of reports stay as they are; apt install chromium, pip install playwright\n"
        )
        return
    from PIL import Image
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        for name, report in reports.items():
            for theme, suffix in (("light", ""), ("dark", "_dark")):
                page = chromium.new_page(
                    viewport={"width": WIDTH, "height": HEIGHT}, color_scheme=theme, device_scale_factor=PIXELS
                )
                page.goto(f"{report.resolve().as_uri()}#raw=false")
                page.wait_for_selector("html[data-ready]")
                picture = Image.open(io.BytesIO(page.screenshot()))
                picture.save(PICTURES / f"{name}{suffix}.webp", quality=82, method=6)
                page.close()
        chromium.close()


def main(runs: Path) -> None:
    """Draw all pictures from the runs below a directory."""
    compare = run_toyexp("compare", "sweep", cwd=runs)
    draw_terminal("terminal_compare", "toyexp compare outputs/sweeps/2026-11-24_094100_512034", compare)
    photograph_reports({"report": runs / "sweep" / "report.html"})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
