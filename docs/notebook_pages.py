"""Generate pages with the text, code and outputs of the notebooks, and the pictures of the outputs."""

import base64
import json
from html import escape
from pathlib import Path
from typing import Any

NOTEBOOKS = ("first_run", "compare_and_sweep")  # in reading order


def pages() -> dict[str, str | bytes]:
    """Return all pages and pictures by their path in the site."""
    files: dict[str, str | bytes] = {}
    for name in NOTEBOOKS:
        files |= notebook_files(name)
    return files


def notebook_files(name: str) -> dict[str, str | bytes]:
    """Return a notebook, a page in Markdown with its cells and a link to download it, and its pictures."""
    source = (Path(__file__).parent / "notebooks" / f"{name}.ipynb").read_bytes()
    notebook = json.loads(source)
    parts, pictures = [], {}
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        number = cell.get("execution_count")
        code = f'<div class="cell" data-number="{number}" markdown>\n\n```python\n{text}\n```\n\n</div>'
        parts.append(text if cell["cell_type"] == "markdown" else code)
        shown = []
        for output in cell.get("outputs", ()):
            data, picture = output.get("data", {}), f"{name}-{len(pictures) + 1}.png"
            if "image/png" in data:
                pictures[f"notebooks/{picture}"] = base64.b64decode("".join(data["image/png"]))
            shown.append(format_output(output, picture))
        parts += [f'<div class="output" data-number="{number}">{"".join(shown)}</div>'] if shown else []
    title, _, rest = parts[0].partition("\n")
    page = [title, f"[Download this notebook]({name}.ipynb){{download}}", rest.strip(), *parts[1:]]
    return {f"notebooks/{name}.md": "\n\n".join(page) + "\n", f"notebooks/{name}.ipynb": source, **pictures}


def format_output(output: dict[str, Any], picture: str) -> str:
    """Return an output as HTML; `picture` is the path of its picture, if it has one."""
    data = output.get("data", {})
    if "image/png" in data:
        style = output["metadata"]["image/png"]
        image = f'<img src="{picture}" alt="{escape(style["alt"])}" width="{style["width"]}">'
        return f'<a class="zoom" href="{picture}">{image}</a>'
    text = "".join(data.get("text/plain", output.get("text", ())))
    return "".join(data["text/html"]) if "text/html" in data else f"<pre>{escape(text.rstrip())}</pre>"
