"""Read the texts of SVG plots: matplotlib writes each text as a comment next to its outlines."""

import re


def svg_texts(path):
    """Return the texts of an SVG file."""
    return re.findall(r"<!-- (.*?) -->", path.read_text())
