"""What the documentation shows of the Python door runs as it stands there: the page and the notebooks."""

import ast
import json
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.release
DOCS = Path(__file__).parent.parent / "docs"
PAGES = DOCS / "pages"


def test_the_page_for_python_runs_from_its_first_line_to_its_last(tmp_path, monkeypatch, capsys):
    """Its blocks one after another, as in one session; each with fewer steps."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.txt").write_text("The cat sat on the mat, and the dog lay by the door. " * 200)
    blocks = re.findall(r"```python\n(.*?)```", (PAGES / "guides" / "python.md").read_text(), re.DOTALL)
    known = {"__name__": "page"}
    for block in blocks:
        block = re.sub(r"steps=(\d+)", lambda m: f"steps={int(m[1]) // 10}, eval_every=5, engine='ggml'", block)
        exec(compile(re.sub(r'engine="\w+",', "", block), "guides/python.md", "exec"), known)
    assert known["longer"].steps == 12 and len(known["swept"]) == 4 and known["logits"].ndim == 2
    assert "best held-out loss first" in capsys.readouterr().out


def run_cells(notebook):
    """Runs the cells of a notebook as a kernel does, each with fewer steps; what its last lines show, and its names."""
    known, shown = {"__name__": "notebook"}, []
    for cell in json.loads(notebook.read_text())["cells"]:
        if cell["cell_type"] == "code":
            text = re.sub(r"steps=(\d+)", lambda m: f"steps={int(m[1]) // 10}", "".join(cell["source"]))
            text = re.sub(r"eval_every=\d+", "eval_every=2, engine='ggml'", text)
            body = ast.parse(text)
            last = body.body.pop() if isinstance(body.body[-1], ast.Expr) else None
            exec(compile(body, notebook.name, "exec"), known)
            if last:
                value = eval(compile(ast.Expression(last.value), notebook.name, "eval"), known)
                shown.append(value._repr_html_() if "_repr_html_" in dir(value) else repr(value))
    return known, shown


def test_the_first_notebook_trains_looks_and_goes_on(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    known, shown = run_cells(DOCS / "notebooks" / "first_run.ipynb")
    assert known["longer"].steps == 15 and known["result"].steps == 10
    assert "<polyline" in shown[0] and "completed after 10 steps" in shown[0]
    assert len(re.findall(r"^ *[\d.]+%  '", capsys.readouterr().out, re.MULTILINE)) == 5


def test_the_second_notebook_compares_over_seeds_and_watches(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    known, shown = run_cells(DOCS / "notebooks" / "compare_and_sweep.ipynb")
    assert len(known["swept"]) == len(known["final"]) == 8 and shown[0].count("<tr>") == 9
    assert capsys.readouterr().out.count(" ± ") >= 4


@pytest.mark.parametrize("notebook", sorted((DOCS / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_is_well_formed_and_has_no_outputs(notebook):
    told = json.loads(notebook.read_text())
    cells = told["cells"]
    assert (told["nbformat"], told["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in cells}) == len(cells)
    assert all(not cell["outputs"] for cell in cells if cell["cell_type"] == "code")
