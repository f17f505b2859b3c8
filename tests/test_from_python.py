"""Run the Python code of the documentation: the page about the API and the notebooks."""

import ast
import json
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.release
DOCS = Path(__file__).parent.parent / "docs"
PAGES = DOCS / "pages"


def test_all_code_of_the_python_page_runs(tmp_path, monkeypatch, capsys):
    """Run the code blocks in one namespace, each with fewer steps."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.txt").write_text("The cat sat on the mat, and the dog lay by the door. " * 200)
    blocks = re.findall(r"```python\n(.*?)```", (PAGES / "guides" / "python.md").read_text(), re.DOTALL)
    namespace = {"__name__": "page"}
    for block in blocks:
        block = re.sub(r"steps=(\d+)", lambda m: f"steps={int(m[1]) // 10}, eval_every=5, engine='ggml'", block)
        exec(compile(re.sub(r'engine="\w+",', "", block), "guides/python.md", "exec"), namespace)
    assert namespace["longer"].steps == 12 and len(namespace["swept"]) == 4 and namespace["logits"].ndim == 2
    assert "best held-out loss first" in capsys.readouterr().out


def run_cells(notebook):
    """Run the cells of a notebook with fewer steps; return its namespace and the displayed values."""
    namespace, outputs = {"__name__": "notebook"}, []
    for cell in json.loads(notebook.read_text())["cells"]:
        if cell["cell_type"] == "code":
            text = re.sub(r"steps=(\d+)", lambda m: f"steps={int(m[1]) // 10}", "".join(cell["source"]))
            text = re.sub(r"eval_every=\d+", "eval_every=2, engine='ggml'", text)
            body = ast.parse(text)
            last = body.body.pop() if isinstance(body.body[-1], ast.Expr) else None
            exec(compile(body, notebook.name, "exec"), namespace)
            if last:
                value = eval(compile(ast.Expression(last.value), notebook.name, "eval"), namespace)
                outputs.append(value._repr_html_() if "_repr_html_" in dir(value) else repr(value))
    return namespace, outputs


def test_the_first_notebook_trains_shows_probabilities_and_resumes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    namespace, outputs = run_cells(DOCS / "notebooks" / "first_run.ipynb")
    assert namespace["longer"].steps == 15 and namespace["result"].steps == 10
    assert "<polyline" in outputs[0] and "completed after 10 steps" in outputs[0]
    assert len(re.findall(r"^ *[\d.]+%  '", capsys.readouterr().out, re.MULTILINE)) == 5


def test_the_second_notebook_sweeps_over_seeds_and_compares(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    namespace, outputs = run_cells(DOCS / "notebooks" / "compare_and_sweep.ipynb")
    assert len(namespace["swept"]) == len(namespace["final"]) == 8 and outputs[0].count("<tr>") == 9
    assert capsys.readouterr().out.count(" ± ") >= 4


@pytest.mark.parametrize("notebook", sorted((DOCS / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_is_well_formed_and_has_no_outputs(notebook):
    content = json.loads(notebook.read_text())
    cells = content["cells"]
    assert (content["nbformat"], content["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in cells}) == len(cells)
    assert all(not cell["outputs"] for cell in cells if cell["cell_type"] == "code")
