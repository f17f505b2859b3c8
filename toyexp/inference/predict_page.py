"""Make the HTML page of wrongly classified images: pictures, labels, probabilities and the most frequent confusions."""

from __future__ import annotations

import base64
import io
from collections import Counter
from html import escape

from toyexp.base.errors import UserError
from toyexp.base.formatting import pluralise
from toyexp.batching.pictures import read_image
from toyexp.inference.predict import Prediction, Predictions

MAX_PICTURES, SIDE = 1000, 96  # pictures on a page, and their height and width in pixels
PAGE = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8"><meta name="viewport" content="width=device-width"><meta name="generator" content="toyexp">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; font: 15px/1.4 system-ui, sans-serif; }}
body {{ max-width: 72rem; margin: 2rem auto; padding: 0 1rem; overflow-wrap: anywhere; }}
table {{ border-collapse: collapse; }} caption {{ text-align: left; }}
th, td {{ text-align: left; padding: .2rem 1rem .2rem 0; border-bottom: 1px solid GrayText; }}
main {{ display: flex; flex-wrap: wrap; gap: 1rem; margin-top: 2rem; }} figure {{ width: 11rem; margin: 0; }}
</style>
<h1>{title}</h1>
<p>{summary}</p>
<table><caption>Confusions, most frequent first</caption>
<tr><th scope="col">label<th scope="col">predicted<th scope="col">images</tr>
{rows}</table>
<main>
{figures}</main>
</html>
"""


def wrong_page(predictions: Predictions) -> str:
    """Return a page with the wrongly classified images, those with the most probable wrong class first.

    Raise UserError if no image lies in a directory with the name of a class.
    """
    if predictions.accuracy is None:
        names = ", ".join(predictions.classes[:3])
        raise UserError(f"--html: no image lies in a directory named like one of the model's classes ({names}, ...)")
    wrong = sorted((i for i in predictions.images if i.correct is False), key=lambda image: -image.top[0][1])
    pairs = Counter((str(image.label), image.top[0][0]) for image in wrong).most_common()
    shown = f" The {MAX_PICTURES} with the highest probabilities are shown." if len(wrong) > MAX_PICTURES else ""
    return PAGE.format(
        title=escape(f"{predictions.file}: {pluralise(len(wrong), 'wrongly classified image')}"),
        summary=escape(predictions.summary() + "." + shown),
        rows="".join(f"<tr><td>{escape(label)}<td>{escape(name)}<td>{n}</tr>\n" for (label, name), n in pairs),
        figures="".join(_figure(image) for image in wrong[:MAX_PICTURES]),
    )


def _figure(image: Prediction) -> str:
    from PIL import Image

    picture = io.BytesIO()
    Image.fromarray(read_image(image.path, SIDE, color=True, resize=True)).save(picture, "JPEG")
    address = f"data:image/jpeg;base64,{base64.b64encode(picture.getvalue()).decode()}"
    shares = ", ".join(escape(f"{name} {share:.1%}") for name, share in image.top)
    caption = f"<b>{escape(str(image.label))}</b>, predicted: {shares}<br>{escape(image.file)}"
    picture_tag = f'<img src="{address}" width="{SIDE}" height="{SIDE}" alt="{escape(image.file)}">'
    return f"<figure>{picture_tag}<figcaption>{caption}</figcaption></figure>\n"
