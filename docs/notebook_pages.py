"""The notebooks as pages: their text and their code, to be read and taken over; what they show is seen in them."""

import json
from pathlib import Path

NOTEBOOKS = ("first_run", "compare_and_sweep")  # in the order in which they are read


def pages() -> dict[str, str]:
    """Each by its place in the site."""
    return {f"notebooks/{name}.md": page(name) for name in NOTEBOOKS}


def page(name: str) -> str:
    """Its cells one after another, and below the title where it is."""
    notebook = json.loads((Path(__file__).parent / "notebooks" / f"{name}.ipynb").read_text(encoding="utf-8"))
    parts = []
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
    title, _, rest = parts[0].partition("\n")
    return "\n\n".join([title, f"The notebook is `docs/notebooks/{name}.ipynb`.", rest.strip(), *parts[1:]]) + "\n"
