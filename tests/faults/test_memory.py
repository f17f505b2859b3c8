"""Runs that need too much memory fail with a one-line error before anything is written."""

import functools
import re
import resource
from pathlib import Path

import pytest
from faults import FIGURES, toyexp, words

from toyexp.base import memory
from toyexp.base.errors import RunFailed
from toyexp.cli.main import main
from toyexp.config.request import Request
from toyexp.plugins.discovery import load
from toyexp.training.experiment import prepare

WORDS = [w for w in words("scratch", "llama", "ggml") if not w.startswith(("batch_size", "steps"))]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["batch_size=1000000000"], "a batch of 1000000000 rows needs 192 GB"),
        (
            ["batch_size=1000000000000", "optim.accumulate=1000000000000"],
            "a batch of 1000000000000 rows needs 192 TB",
        ),
        (["batch_size=9223372036854775807"], "a batch of 9223372036854775807 rows needs"),
        (["model.d_model=1000000"], "the trainable weights and optimiser state need"),
        (["model.d_ff=2000000000"], "the trainable weights and optimiser state need"),
        (["model.n_layers=10000", "model.d_model=4096"], "the trainable weights and optimiser state need"),
        (["model.n_layers=1000000000"], "model.n_layers=1000000000: must be at least 1 and at most 10000"),
        (["model.context=1000000000"], "part has"),
        (["model.vocab=2000000000"], "the trainable weights and optimiser state need"),
    ],
)
@pytest.mark.parametrize("engine", ["ggml", pytest.param("cpu", marks=pytest.mark.faults)])
def test_a_run_that_cannot_fit_is_rejected_before_anything_is_written(settings, message, engine, here, capsys):
    directory = here / "too-large"
    assert main([*WORDS, f"engine={engine}", *settings, f"hydra.run.dir={directory}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    if " are free" in line:
        sizes = "the sizes of the model, such as model.d_model"
        advised = "batch_size or model.context" if "a batch of" in line else sizes
        assert re.search(rf", but \S+ [MG]B are free; reduce {advised}", line)
    assert not directory.exists()


def test_a_checkpoint_copy_that_cannot_fit_is_rejected_before_anything_is_written(here, capsys, monkeypatch):
    """The memory of a checkpoint's copy only counts for runs that save checkpoints."""
    from toyexp.training import memory as run_memory

    settings = [*WORDS, "engine=ggml", "batch_size=2", "steps=2", "eval_every=0", "model.d_model=64"]
    run = prepare(Request([], load()).build_config(*settings))
    weights = sum(t.size for t in run.plan.trainable)  # 16 bytes each: weight, gradient, m and v
    monkeypatch.setattr(run_memory, "available_bytes", lambda: 20 * weights)
    directory = here / "no-room"
    assert main([*settings, f"hydra.run.dir={directory}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(
        r"too little memory: a checkpoint's copy .* needs \S+ [kMG]B, .*; .* without checkpoints: checkpoint_every=0",
        line,
    )
    assert not directory.exists()
    assert main([*settings, "checkpoint_every=0", f"hydra.run.dir={directory}"]) == 0


def test_an_image_batch_that_cannot_fit_is_rejected(here, capsys):
    settings = [w for w in words("vit_tiny", "vit", "ggml") if not w.startswith("batch_size")]
    assert main([*settings, "batch_size=10000000000", f"hydra.run.dir={here}/too-large"]) == 2
    assert "a batch of 10000000000 rows needs" in capsys.readouterr().err


def test_available_memory_respects_the_process_limit(monkeypatch):
    before = memory.available_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    try:
        resource.setrlimit(resource.RLIMIT_AS, (1 << 44, hard))
        assert memory.available_bytes() == pytest.approx(before, rel=0.2)
        resource.setrlimit(resource.RLIMIT_AS, (1 << 36, hard))
        limited = memory.available_bytes()
        assert limited is not None
        assert limited < 1 << 36
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"
        ),
    ],
)
def test_an_out_of_memory_error_becomes_one_line_with_a_remedy(error):
    with pytest.raises(RunFailed) as caught, memory.convert_memory_errors():
        raise error
    assert re.fullmatch(r"out of memory \(.*\); reduce batch_size, .*, or set engine.recompute=true", str(caught.value))


def test_other_framework_errors_are_not_converted():
    with pytest.raises(RuntimeError, match="shape mismatch"), memory.convert_memory_errors():
        raise RuntimeError("shape mismatch")


@pytest.mark.faults
@pytest.mark.timeout(600)
@pytest.mark.parametrize("engine", ["ggml", "cpu"])
@pytest.mark.parametrize("megabytes", [700, 900, 1100, 1500, 2500, 4000])
@pytest.mark.parametrize(
    "settings", [["batch_size=20000"], ["model.d_model=2048", "model.d_ff=8192"], ["batch_size=3000000"]]
)
def test_a_run_under_a_memory_limit_ends_without_a_traceback(settings, engine, megabytes, here):
    """With `ulimit -v`, a run that exceeds the limit ends with one line and no traceback."""
    directory = here / "little" / f"{engine}-{megabytes}-{settings[0]}"
    limit = functools.partial(resource.setrlimit, resource.RLIMIT_AS, (megabytes << 20, megabytes << 20))
    done = toyexp(
        [*WORDS, f"engine={engine}", "steps=2", "eval_every=0", *settings, f"hydra.run.dir={directory}"], here,
        preexec_fn=limit,
    )  # fmt: skip
    FIGURES["memory limit: runs completed or ended with one line"] += 1
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode in (0, 1, 2), done.stderr
    if done.returncode:
        assert len(done.stderr.splitlines()) == 1, done.stderr
    if done.returncode == 2:
        assert not directory.exists()


@pytest.mark.skipif(not Path("/proc/self/cgroup").exists(), reason="control groups exist on Linux only")
def test_available_memory_respects_the_container_limit(tmp_path, monkeypatch):
    before = memory.available_bytes()
    monkeypatch.setattr(memory, "CGROUP_ROOT", tmp_path)
    for name, text in (("max", "500000000"), ("current", "400000000"), ("stat", "anon 7\ninactive_file 50000000\n")):
        (tmp_path / f"memory.{name}").write_text(text)
    assert memory.available_bytes() == 150_000_000
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.available_bytes() == pytest.approx(before, rel=0.2)
