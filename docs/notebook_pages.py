"""Generate pages with the text and code of the notebooks; their output is only in the notebooks."""

import json
from pathlib import Path

NOTEBOOKS = ("first_run", "compare_and_sweep")  # in reading order


def pages() -> dict[str, str]:
    """Return all pages by their path in the site."""
    return {f"notebooks/{name}.md": page(name) for name in NOTEBOOKS}


def page(name: str) -> str:
    """Return a notebook's cells as Markdown, with its path below the title."""
    notebook = json.loads((Path(__file__).parent / "notebooks" / f"{name}.ipynb").read_text(encoding="utf-8"))
    parts = []
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
    title, _, rest = parts[0].partition("\n")
    return "\n\n".join([title, f"The notebook is `docs/notebooks/{name}.ipynb`.", rest.strip(), *parts[1:]]) + "\n"
