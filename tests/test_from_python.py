"""Run the Python code of the documentation: the page about the API and the notebooks."""

import json
import re
from pathlib import Path

import notebooks
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


@pytest.mark.parametrize("notebook", notebooks.NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_without_warnings_and_has_the_outputs_of_its_code(notebook):
    content, executed = json.loads(notebook.read_text()), notebooks.execute(notebook)
    written, now = notebooks.structure(content), notebooks.structure(executed)
    assert content["metadata"] == executed["metadata"], f"{notebook.name}: code changed; run {notebooks.REFRESH}"
    assert written == now, f"{notebook.name}: outputs are missing or stale; run {notebooks.REFRESH}"
    assert (content["nbformat"], content["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in content["cells"]}) == len(content["cells"])
    assert not [output for output in now if output[1] == "stderr"]
    text = notebook.read_text()
    assert not re.search(r'np\.float|/(home|tmp|root|work|Users)/|\\u001b| object at 0x|"(note|warning)\b', text)


def test_the_notebooks_train_sweep_and_show_a_chart_and_a_continued_prompt():
    first, second = ("\n".join(map(str, pages(name))) for name in ("first_run", "compare_and_sweep"))
    assert "completed after 300 steps" in first and "completed after 400 steps" in first and first.count("<svg") == 2
    assert re.search(r"PROMPT\n.+\n\nCONTINUATION\n", first)
    assert len(re.findall(r"^ *[\d.]+%  '", first, re.MULTILINE)) == 5
    assert second.count("image/png") == 1 and "8 of 8 done" in second and second.count("<tr>") == 9 + 5
    assert len(re.findall(r"'(?:warm|scratch)', 0.00[13], [01]\): \d\.\d+[,}]", second)) == 8


def test_missing_or_renamed_outputs_are_stale_and_other_times_and_numbers_are_not():
    content = json.loads(notebooks.NOTEBOOKS[0].read_text())
    expected, text = notebooks.structure(content), json.dumps(content)
    assert notebooks.structure(json.loads(re.sub(r"(?<=<td>)\d+\.\d+", "7.5", text))) == expected
    assert notebooks.structure(json.loads(text.replace("<th>deviation</th>", "<th>spread</th>"))) != expected
    shown = next(cell["outputs"] for cell in content["cells"] if cell.get("outputs"))
    shown.pop()
    assert notebooks.structure(content) != expected


def pages(name):
    """Yield the texts of a committed notebook's outputs, and the kinds of pictures."""
    content = json.loads((DOCS / "notebooks" / f"{name}.ipynb").read_text())
    for output in (o for cell in content["cells"] for o in cell.get("outputs", ())):
        data = output.get("data", {"text": output.get("text")})
        yield from (kind if kind == "image/png" else "".join(text) for kind, text in data.items())


def test_outputs_are_refreshed_if_numbers_change_but_not_if_only_times_do(tmp_path):
    notebook = tmp_path / "small.ipynb"
    cell = {"cell_type": "code", "id": "a", "metadata": {}, "source": [], "execution_count": None, "outputs": []}
    content = {"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}

    def refresh(code):
        content["cells"][0]["source"] = [code]
        old = json.loads(notebook.read_text()) if notebook.exists() else content
        notebook.write_text(json.dumps({**old, "cells": [{**old["cells"][0], "source": [code]}]}))
        return notebooks.refresh(notebook)

    clock = "import time, toyexp; print('run outputs/2026-11-24_{0:06d}_{0:06d} in {0}.1 s'.format(time.time_ns() % 9))"
    assert refresh(clock) and not refresh(clock) and not refresh(clock)
    (tmp_path / "number").write_text("1")
    number = f"__import__('pathlib').Path({str(tmp_path / 'number')!r}).read_text()"
    assert refresh(number) and not refresh(number)
    (tmp_path / "number").write_text("2")
    assert refresh(number) and "'2'" in notebook.read_text()
