"""What pictures say: matplotlib writes each text into an SVG as a comment beside its outlines."""

import re


def svg_texts(path):
    """The texts of an SVG."""
    return re.findall(r"<!-- (.*?) -->", path.read_text())
