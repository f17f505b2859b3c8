"""Draw ```journey blocks as SVG: modules from top to bottom, with arrows that name the data between them."""

import html
import textwrap
from typing import Any

WIDTH, LINE, PADDING, GAP, LETTERS = 460, 18, 12, 40, 62


def parse_stations(source: str) -> list[tuple[str, str]]:
    """Parse a block into pairs: `loop: trains` gives ("loop", "trains"), `-> Step` gives ("->", "Step")."""
    found = []
    for line in source.strip().splitlines():
        if line.startswith("-> "):
            found.append(("->", line.removeprefix("-> ")))
        else:
            room, _, does = line.partition(": ")
            found.append((room, does))
    return found


def draw_svg(source: str, label: str) -> str:
    """Return the SVG of a block; screen readers read the `label`."""
    drawn, y = [], 1
    for room, text in parse_stations(source):
        if room == "->":
            drawn.append(f'<path class="arrow" d="M 24 {y + 4} v {GAP - 14} m -5 -6 l 5 7 l 5 -7"/>')
            drawn.append(f'<text class="travels" x="42" y="{y + GAP / 2 + 5}">{html.escape(text)}</text>')
            y += GAP
            continue
        lines = textwrap.wrap(text, LETTERS)
        height = 2 * PADDING + LINE * (1 + len(lines)) - 4
        drawn.append(f'<rect x="1" y="{y}" width="{WIDTH - 2}" height="{height}" rx="6"/>')
        drawn.append(f'<text class="room" x="{PADDING}" y="{y + PADDING + 11}">{html.escape(room)}</text>')
        for number, line in enumerate(lines, 1):
            place = y + PADDING + 11 + number * LINE
            drawn.append(f'<text class="does" x="{PADDING}" y="{place}">{html.escape(line)}</text>')
        y += height
    box = f'viewBox="0 0 {WIDTH} {y + 1}" style="max-width: {WIDTH}px"'
    return f'<svg class="journey" role="img" aria-label="{html.escape(label)}" {box}>{"".join(drawn)}</svg>'


def format_fence(source: str, language: str, css_class: str, options: Any, md: Any, **kwargs: Any) -> str:
    """Return the SVG that replaces a fenced ```journey block; mkdocs calls this."""
    rooms = [room for room, _ in parse_stations(source) if room != "->"]
    return draw_svg(source, f"From {rooms[0]} to {rooms[-1]}: {', '.join(rooms)}")
