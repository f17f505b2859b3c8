import sys

import pytest
from matplotlib.image import imread


def ink(path):
    """The share of the picture that is not white."""
    picture = imread(path)
    assert picture.shape[:2] == (720, 960)
    return float((picture[..., :3] < 0.99).any(axis=-1).mean())


def test_a_run_leaves_a_picture_of_its_curves(train):
    run = train("callbacks=[default,plots]")
    path = run.dir / "plots" / "curves.png"
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert 0.01 < ink(path) < 0.3
    assert [e["path"] for e in run.of("export") if e.get("what") == "plot"] == [str(path)]
    assert str(path) in run.result["artifacts"]
    assert "plots/curves.png" in run.out, "the person is told where it is"


@pytest.mark.parametrize(
    "words",
    [["steps=1"], ["eval_every=0"], ["engine.nan_at=5"], ["engine.nan_at=1"]],
    ids=["one step", "no evals", "ends in NaN", "only NaN"],
)
def test_curves_with_holes_are_drawn_too(train, words):
    run = train("callbacks=[events,plots]", *words, engine="noop")
    assert run.code == (1 if "nan" in words[0] else 0)
    assert ink(run.dir / "plots" / "curves.png") > 0.01
    assert "callback plots failed" not in (run.dir / "log.txt").read_text()


def test_a_run_without_the_callback_never_imports_matplotlib(settings, spawn):
    words = settings(engine="noop")
    program = f"import sys, toyexp.commands.line as c; c.main({words!r}); print('matplotlib' in sys.modules)"
    out, _ = spawn("-c", program).communicate(timeout=60)
    assert out.splitlines()[-1] == "False", out


def test_without_matplotlib_the_run_is_refused_with_what_to_install(train, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    run = train("callbacks=[default,plots]")
    assert run.code == 2
    assert run.err == "toyexp: error: callbacks.plots: matplotlib is not installed: pip install 'toyexp[plots]'\n"
    assert not run.dir.exists()


def test_a_matplotlib_that_cannot_be_imported_is_found_before_the_training(train, monkeypatch):
    monkeypatch.setattr("toyexp.base.packages._broken", {})
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    run = train("callbacks=[plots,events,gguf_export]", engine="noop")
    assert run.code == 2 and run.err.count("\n") == 1
    assert "callbacks.plots: matplotlib is installed but cannot be loaded" in run.err
    assert not run.dir.exists()
