"""What the documentation shows of the Python door runs as it stands there: the page and the notebooks."""

import re
from pathlib import Path

PAGES = Path(__file__).parent.parent / "docs" / "pages"


def test_the_page_for_python_runs_from_its_first_line_to_its_last(tmp_path, monkeypatch, capsys):
    """Its blocks one after another, as in one session; each with fewer steps."""
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (PAGES / "guides" / "python.md").read_text(), re.DOTALL)
    known = {"__name__": "page"}
    for block in blocks:
        block = re.sub(r"steps=(\d+)", lambda m: f"steps={int(m[1]) // 10}, eval_every=5, engine='ggml'", block)
        exec(compile(re.sub(r'engine="\w+",', "", block), "guides/python.md", "exec"), known)
    assert known["longer"].steps == 12 and len(known["swept"]) == 4 and known["logits"].ndim == 2
    assert "best held-out loss first" in capsys.readouterr().out
