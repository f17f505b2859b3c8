"""Read the texts of SVG plots."""

import xml.etree.ElementTree as ElementTree


def svg_texts(path):
    """Return the texts of an SVG file; the lines of a text are several."""
    texts = ElementTree.fromstring(path.read_text()).iter("{http://www.w3.org/2000/svg}text")
    return ["".join(text.itertext()).strip() for text in texts]
