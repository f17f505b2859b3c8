"""Draw plots in toyexp's style, and write them as PNG, SVG or PDF files.

The colours are based on those of Okabe and Ito ("Color Universal Design", 2008). Each has a contrast of at least 3:1
with the background. Any two differ by at least 23 in CIELAB, also for people with common colour blindnesses.
Overlapping curves also differ by marker, so that they can be told apart in greyscale.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import math
import os
import re
import textwrap
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from toyexp.base.errors import UserError
from toyexp.base.files import open_file
from toyexp.base.lazy import numpy as np
from toyexp.base.packages import require_package
from toyexp.base.writing import convert_write_errors, require_writable, write_atomically

BLUE, VERMILLION, GREEN, PURPLE, AMBER = "#0B4A8A", "#B3260A", "#268960", "#B470DB", "#8F5C0C"
INK, GREY, PALE = "#222222", "#555555", "#BBBBBB"
BAND = "#f2f2f2"  # ground of a part of a panel
# people with red-green colour blindness see green as a yellowish and purple as a bluish colour
COLOURS = (BLUE, VERMILLION, "#4C69FF", "#BE8B00", GREEN, PURPLE, "#000000", "#8787A5")
# for dark backgrounds, with a contrast of at least 4.5:1
DARK_COLOURS = ("#3CC6FF", "#D86900", "#D3F8FB", "#FFE646", "#559662", "#B76FB7", "#B1AAB1", "#F8B169")
# the colour map cividis (Nunez et al. 2018) where its contrast with the background is at least 3:1, strongest first
RAMP, DARK_RAMP = (
    ("#00224e", "#1a386f", "#434e6c", "#61656f", "#7d7c78"),
    ("#fee838", "#dec958", "#bcae6c", "#9b9476", "#7d7c78"),
)
MARKS = ("o", "s", "^", "D", "v", "P", "X", "p")
TITLE, LABEL, SMALL = 12.0, 10.0, 9.0  # font sizes in points, for a figure 8 inches wide
WIDTH = 8.0  # inches
TITLE_LENGTH = 66  # characters
RESOLUTION = 300  # dots per inch of a PNG
COLUMNS = {
    None: (WIDTH, 1.0),
    "single": (3.5, 0.7),
    "double": (7.2, 0.9),
}  # column of a journal: width in inches, and scale of the text
LOG_RATIO = 20.0  # an axis becomes logarithmic if its largest value is this many times the smallest
MIN_SPAN = 0.05  # an axis spans at least this fraction of its largest value, so that noise does not look like a trend
POWERS = (1e-4, 1e5)  # a logarithmic axis with values outside these limits has the labels 10^n
# Metadata of files by suffix: toyexp as the creator, and no date, so that equal plots give equal bytes.
FILE_METADATA: Mapping[str, Mapping[str, str | None]] = {
    ".png": {"Software": "toyexp"},
    ".svg": {"Creator": "toyexp", "Date": None},
    ".pdf": {"Creator": "toyexp", "Producer": None, "CreationDate": None},
}
_SIGNATURES = (b"Software\0toyexp", b"<dc:title>toyexp</dc:title>", b"/Creator (toyexp)")
STYLE: Any = {
    "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": "#999999", "axes.axisbelow": True,
    "axes.labelcolor": INK, "axes.labelsize": LABEL, "text.color": INK,
    **{f"{axis}tick.{key}": value for axis in "xy" for key, value in (
        ("color", INK), ("labelsize", SMALL), ("major.width", 0.6), ("minor.width", 0.4))},
    "axes.formatter.useoffset": False,
    "axes.grid": True, "axes.grid.axis": "y", "grid.color": "#dddddd", "grid.linewidth": 0.5,
    "svg.hashsalt": "toyexp",  # without it SVG ids are random
    "svg.fonttype": "none", "pdf.fonttype": 42,  # text stays text
}  # fmt: skip
_style_lock = threading.RLock()


def require_drawing() -> None:
    """Raise Unavailable if matplotlib is missing or broken."""
    with require_package("matplotlib", "pip install 'toyexp[plots]'"):
        import matplotlib.backends.backend_agg
        import matplotlib.backends.backend_svg
        import matplotlib.figure  # noqa: F401 - Sheet imports them


@contextlib.contextmanager
def use_plot_style() -> Iterator[None]:
    """Apply toyexp's plot style and matplotlib's defaults, instead of the user's matplotlibrc, inside this context.

    Matplotlib reads these settings when it creates an object and again when it draws it, so do both inside this
    context. One thread at a time can enter; others wait. Raise Unavailable if matplotlib is missing or broken.
    """
    require_drawing()
    import matplotlib

    defaults: Any = {key: value for key, value in matplotlib.rcParamsDefault.items() if key != "backend"}
    with _style_lock, matplotlib.rc_context({**defaults, **STYLE}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # the font draws a box
        warnings.filterwarnings("ignore", category=RuntimeWarning)  # ticks beyond 1e308 overflow
        yield


def check_plot_path(option: str, typed: str) -> Path:
    """Check the path `typed`, which the user gave for `option` as the file of a plot, and return it.

    Raise UserError if its suffix is not supported, if the file cannot be written, or if the file exists and is not a
    plot that toyexp drew. Raise Unavailable without matplotlib.
    """
    path, subject = Path(typed), f"{option} {typed}"
    if path.suffix.lower() not in FILE_METADATA:
        name = f"{path.name.split('.')[0] or 'plot'}.svg"
        example = name if path.exists() else path.parent / name  # the path may be a directory or /dev/null
        raise UserError(f"{subject}: must end in {', '.join(FILE_METADATA)}; type {option} {example}")
    if path.is_dir():
        raise UserError(f"{subject}: is a directory, expected a file; type {option} {path / 'plot.svg'}")
    require_writable(subject, path)
    _require_own_plot(path)
    require_drawing()
    return path


def _require_own_plot(path: Path) -> None:
    if os.path.lexists(path) and not is_own_plot(path):
        raise UserError(f"{path}: exists and is not a plot of toyexp; choose another name")


def is_own_plot(path: Path) -> bool:
    """Return True if a file is a plot that toyexp drew."""
    try:
        with open_file(path) as file:
            head = file.read(4096)
            file.seek(max(path.stat().st_size - 65536, 0))  # the end of a PDF, where its metadata is
            return any(sign in part for part in (head, file.read()) for sign in _SIGNATURES)
    except (UserError, OSError):
        return False


class Sheet:
    """Figure on a white page: a title, a subtitle and panels below each other."""

    def __init__(
        self, height: float, title: str, below: str, rows: Sequence[float] = (1,), columns: Sequence[int] = ()
    ):
        # `height` is in inches; `below` is the subtitle. `rows` has the relative height of each row, `columns` its
        # number of panels; -2 means two panels below each other that share the x axis. If `columns` is empty, each row
        # is one panel, and all rows share the x axis.
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # needs neither a display nor global state
        from matplotlib.figure import Figure

        self._height, self._title, self._below = height, title, below
        self._scale = 1.0
        self.figure = Figure(figsize=(WIDTH, height), layout="constrained", facecolor="white")
        FigureCanvasAgg(self.figure)
        self.panels: list[Any] = []
        if columns:  # subfigures, so that each row has its own margins
            parts = self.figure.subfigures(len(rows), 1, height_ratios=list(rows), squeeze=False)
            for part, count in zip(parts.flat, columns, strict=True):
                shape = (1, count) if count > 0 else (-count, 1)
                self.panels += list(part.subplots(*shape, squeeze=False, sharex=count < 0).flat)
                part.align_ylabels()
        else:
            panels = self.figure.subplots(len(rows), 1, height_ratios=list(rows), squeeze=False, sharex=True)
            self.panels = list(panels.flat)
            self.figure.align_ylabels()
        self._below_text = self.figure.text(0.01, 1, "", va="top", fontsize=SMALL, color=GREY)
        self._resize(None)

    def _resize(self, column: str | None) -> None:
        """Set the size of the page, of all text, lines and marks, and wrap the subtitle.

        `column` says where the figure must fit: "single" or "double" for a column of a journal, None for the default
        size.
        """
        from matplotlib.lines import Line2D
        from matplotlib.text import Text
        from matplotlib.transforms import ScaledTranslation

        width, scale = COLUMNS[column]
        room = width / WIDTH / scale
        self.figure.set_size_inches(width, self._height * scale)
        text: Any
        line: Any
        for text in self.figure.findobj(Text):
            text.set_fontsize(round(text.get_fontsize() * scale / self._scale, 6))
        for line in self.figure.findobj(Line2D):
            sizes = {name: getattr(line, f"get_{name}")() for name in ("markersize", "linewidth")}
            line.set(**{name: round(size * scale / self._scale, 6) for name, size in sizes.items()})
        self._scale = scale
        # a journal needs no paths
        parts = [part for part in self._below.split(" · ") if column is None or "/" not in part]
        # no break in a short part or before a dot
        below = "\xa0· ".join(part.replace(" ", "\xa0") if len(part) < 60 * room else part for part in parts)
        lines, title = (
            [fit_text(line.replace("\xa0", " ").replace(" · …", " …").removesuffix(" ·"), most)
             for line in textwrap.wrap(text, most, max_lines=rows, placeholder=" …")]
            for text, rows, size, weight in ((below, 3, SMALL, "normal"), (self._title, 2, TITLE, "bold"))
            for most in [self._count_letters(text, size * scale, weight)]
        )  # fmt: skip
        # The empty lines reserve space for the subtitle, which has another font.
        self.figure.suptitle("\n".join([*(title or [""]), *[""] * len(lines)]), x=0.01,
                             ha="left", fontsize=TITLE * scale, fontweight="bold")  # fmt: skip
        shift = ScaledTranslation(
            0, (-22 - 1.2 * TITLE * max(len(title) - 1, 0)) / 72 * scale, self.figure.dpi_scale_trans
        )
        self._below_text.set(text="\n".join(lines))
        self._below_text.set_transform(self.figure.transFigure + shift)

    def _count_letters(self, text: str, size: float, weight: str) -> int:
        """Return how many letters of a text fill a line of the page, if the font has `size` points."""
        from matplotlib.font_manager import FontProperties
        from matplotlib.textpath import TextToPath

        shown = fit_text(text, 500)
        font = FontProperties(size=size, weight=weight)
        length = TextToPath().get_text_width_height_descent(shown or "x", font, ismath=False)[0]
        return int(0.95 * 72 * self.figure.get_size_inches()[0] * max(len(shown), 1) / length)

    def __repr__(self) -> str:
        return f"Sheet: write(file) saves it as {', '.join(FILE_METADATA)}"

    def _repr_png_(self) -> tuple[bytes, dict[str, Any]]:
        picture = self.pictures(".png", resolution=RESOLUTION // 2)[".png"]
        return picture, {"width": round(WIDTH * 96), "alt": f"{self._title} · {self._below}"}

    def pictures(self, *suffixes: str, column: str | None = None, resolution: int = RESOLUTION) -> dict[str, bytes]:
        """Render the figure in the formats `suffixes`, such as .png, and return {suffix: file content}.

        Equal figures give equal bytes. `column` is a key of COLUMNS, such as single; `resolution` is in dots per inch.
        """
        rendered = {}
        with use_plot_style():
            self._resize(column)
            for suffix in suffixes:
                file = io.BytesIO()
                self.figure.savefig(file, format=suffix[1:], metadata=FILE_METADATA[suffix], dpi=resolution)
                rendered[suffix] = file.getvalue()
        return rendered

    def write(self, file: str | os.PathLike[str], column: str | None = None) -> int:
        """Write the figure atomically and return its size in bytes.

        If `column` is single or double, the figure gets the width of such a column in a journal. Raise UserError if the
        file exists and is not a plot that toyexp drew, or for an unknown suffix.
        """
        path = check_plot_path("write", os.fspath(file))
        suffix = path.suffix.lower()
        picture = self.pictures(suffix, column=column)[suffix]
        with convert_write_errors(path), write_atomically(path) as temporary:
            temporary.write_bytes(picture)
        return len(picture)


def thin_curve(steps: Any, values: Any, limit: int) -> tuple[Any, Any]:
    """Return the steps and values of a curve, reduced to about `limit` points.

    The curve is divided into equal intervals. In each interval, the points with the smallest and largest value are
    kept.
    """
    x, y = np.asarray(steps), np.asarray(values, np.float64)
    if len(x) <= limit:
        return x, y
    low, high = (np.where(np.isfinite(y), y, beyond) for beyond in (np.inf, -np.inf))
    bounds = itertools.pairwise(len(x) * i // (limit // 2) for i in range(limit // 2 + 1))
    pairs = ((begin + low[begin:end].argmin(), begin + high[begin:end].argmax()) for begin, end in bounds)
    indices = sorted({int(index) for pair in pairs for index in pair})
    return x[indices], y[indices]


def find_divergence(steps: Sequence[int], losses: Sequence[float]) -> int | None:
    """Return the first step after which no loss is below the first one plus 10 % (at least 0.1); None if none is."""
    limit = losses[0] + max(0.1 * abs(losses[0]), 0.1) if losses else math.nan
    last = max((place for place, loss in enumerate(losses) if loss <= limit), default=len(losses))
    return steps[last + 1] if any(math.isfinite(loss) for loss in losses[last + 1 :]) else None


def set_step_axis(axes: Any) -> None:
    """Label the x axis "step" and give it integer ticks."""
    axes.set_xlabel("step")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.xaxis.set_major_formatter(lambda step, _: f"{step:,.0f}")


def set_log_scale(axes: Any, which: str, values: Iterable[float], ratio: float = LOG_RATIO) -> bool:
    """Make the axis `which` (`x`, `y`) logarithmic if `values` span a factor of `ratio`; return True if so."""
    from matplotlib.ticker import LogFormatterSciNotation, LogLocator, NullFormatter

    finite = [value for value in values if math.isfinite(value)]
    if not finite or min(finite) <= 0 or max(finite) <= ratio * min(finite):
        return False
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    axis, length, label = (axes.xaxis, axes.bbox.width, 45) if which == "x" else (axes.yaxis, axes.bbox.height, 15)
    decades, room = math.log10(max(finite) / min(finite)), 72 * length / axes.figure.dpi / label  # a label in points
    choices = ((1, 2, 3, 4, 5, 6, 7, 8),) * (decades < 1) + ((1, 2, 5), (1, 3), (1,))
    subs = next((some for some in choices if len(some) * decades <= room), choices[-1])
    axis.set_major_locator(LogLocator(subs=subs, numticks=6 if which == "x" else None))  # also in a journal's column
    least = POWERS[0] * (10 if which == "x" else 1)  # long decimals need more room side by side
    has_powers = max(finite) > POWERS[1] or min(finite) < least
    axis.set_major_formatter(LogFormatterSciNotation(minor_thresholds=(99, 99)) if has_powers else format_tick)
    axis.set_minor_formatter(NullFormatter())
    return True


def caption(axes: Any, text: str, colour: str = GREY, side: str = "right") -> None:
    """Write a note above a panel. `side` is left, center or right."""
    axes.set_title(text, loc=side, fontsize=SMALL, color=colour, pad=7)


def format_number(value: float, digits: int = 4) -> str:
    """Round a number to some significant digits; return 148,300 below a million, and 1.483e6 from there on."""
    return re.sub(r"e\+?(-?)0*", r"e\1", f"{float(f'{value:.{digits}g}'):,.6g}")


def format_tick(value: float, _: int) -> str:
    """Return a tick's label: the number in full, without a common factor at the axis's end."""
    return format_number(value, 6)


def fit_y_axis(axes: Any, low: float, high: float, above: str, largest: float, log: bool = False) -> None:
    """Fit the y axis to values from `low` to `high`; if `log` is True, make it logarithmic even for similar values.

    `largest` is the largest value of all curves. If it exceeds `high`, add a note such as "↑ 3 runs above the shown
    range, up to 7.2". `above` is the first part of this note, such as "3 runs".
    """
    if largest > high:
        caption(axes, f"↑ {above} above the shown range, up to {format_number(largest)}")
    if set_log_scale(axes, "y", (low, high), 1.0 if log else LOG_RATIO):
        axes.set_ylim(low * 0.9, high * 1.1)
        return
    missing = max(MIN_SPAN * max(abs(low), abs(high)) - (high - low), 0.0)
    room = missing / 2 + (high - low + missing) / 20
    if math.isfinite(room) and room:
        axes.set_ylim(low - room, high + room)
    if high >= POWERS[1]:
        axes.yaxis.set_major_formatter(format_tick)


def mark_above(axes: Any, steps: Sequence[int], values: Sequence[float], colour: str) -> None:
    """Draw arrows at the top edge of a panel, at the steps whose values are above its range."""
    (low, high), top = axes.get_xlim(), axes.get_ylim()[1]
    above = [step for step, value in zip(steps, values, strict=True) if value > top]
    places = {round(60 * (step - low) / (high - low)): step for step in above}.values()  # no two on the same spot
    if places:  # the layout fails for a line without points
        axes.plot(places, [1] * len(places), transform=axes.get_xaxis_transform(), color=colour, linestyle="none",
                  marker=r"$\uparrow$", markersize=7, clip_on=False, scalex=False)  # fmt: skip


def fit_text(text: str, limit: int) -> str:
    """Shorten a text to `limit` characters, and escape characters that matplotlib or SVG would misread."""
    text = "".join(letter if letter.isprintable() else "?" for letter in text)
    text = text if len(text) <= limit else text[: limit - 1] + "…"
    return text.replace("$", r"\$")  # matplotlib reads $ as a formula
