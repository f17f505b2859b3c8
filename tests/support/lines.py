"""Run command lines in this process: overrides of a tiny run without an engine, and the error of a failing one."""

from toyexp.cli.main import main


def noop(*plugins):
    """Return the overrides of a tiny run on the `noop` engine with these modules as plugins."""
    sizes = [f"model.{size}=16" for size in ("d_model", "d_ff", "context")]
    modules = ",".join(["toyexp.testing.null", *plugins])
    return [f"plugins=[{modules}]", "engine=noop", "data=random", "model.n_layers=1", *sizes]


def drop_repeated_keys(*words):
    """Return the overrides, keeping only the last one of each key."""
    return list({word.partition("=")[0]: word for word in words}.values())


def run_failing(capsys, *words, codes=(1,)):
    """Run a command line that must fail; return its one-line error without the prefix, and its stdout."""
    capsys.readouterr()
    assert main([*words]) in codes
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    return line.removeprefix("toyexp: error: "), out
