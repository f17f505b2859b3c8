"""Command lines in this process: a tiny run that computes nothing, and what one that fails says."""

from toyexp.cli.main import main


def noop(*plugins):
    """The words of a run with these modules as plugins."""
    sizes = [f"model.{size}=16" for size in ("d_model", "d_ff", "context")]
    modules = ",".join(["toyexp.testing.null", *plugins])
    return [f"plugins=[{modules}]", "engine=noop", "data=random", "model.n_layers=1", *sizes]


def drop_repeated_keys(*words):
    """The words without those whose key a later one gives again."""
    return list({word.partition("=")[0]: word for word in words}.values())


def run_failing(capsys, *words, codes=(1,)):
    """The one line with which a command line fails, and what it printed before."""
    capsys.readouterr()
    assert main([*words]) in codes
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    return line.removeprefix("toyexp: error: "), out
